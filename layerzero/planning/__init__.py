"""Estimate a model's memory, traffic and step time on a cluster: :func:`layerzero.plan`. Requires only torch."""

from layerzero.planning.cluster import Cluster
from layerzero.planning.estimator import Candidate, Estimate
from layerzero.planning.plan_report import Plan, SchemeComparison
from layerzero.planning.planner import plan
from layerzero.planning.probe import ProbeResult, probe
from layerzero.planning.site_estimate import SiteEstimate, SiteSettings
from layerzero.planning.transformer_shapes import TransformerShape, read_config

__all__ = [
    "Candidate",
    "Cluster",
    "Estimate",
    "Plan",
    "ProbeResult",
    "SchemeComparison",
    "SiteEstimate",
    "SiteSettings",
    "TransformerShape",
    "plan",
    "probe",
    "read_config",
]
