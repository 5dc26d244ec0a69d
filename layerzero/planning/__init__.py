"""What a model is going to need on a cluster, and how fast it may be: :func:`layerzero.plan`. Needs torch alone."""

from layerzero.planning.api import plan
from layerzero.planning.cluster import Cluster
from layerzero.planning.models import Sizes, read_config
from layerzero.planning.plan_report import Plan
from layerzero.planning.probe import Probed, probe
from layerzero.planning.rows import Choice, Row

__all__ = ["Choice", "Cluster", "Plan", "Probed", "Row", "Sizes", "plan", "probe", "read_config"]
