"""What a model is going to need on a cluster, and how fast it may be: :func:`layerzero.plan`. Needs torch alone."""

from layerzero.planning.cluster import Cluster
from layerzero.planning.estimator import Choice, Row
from layerzero.planning.plan_report import Plan
from layerzero.planning.planner import plan
from layerzero.planning.probe import Probed, probe
from layerzero.planning.transformer_shapes import Sizes, read_config

__all__ = ["Choice", "Cluster", "Plan", "Probed", "Row", "Sizes", "plan", "probe", "read_config"]
