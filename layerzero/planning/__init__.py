"""Estimate whether a model fits on a cluster, and what crosses nodes: :func:`layerzero.plan`. Requires only torch."""

from layerzero.planning.cluster import Cluster
from layerzero.planning.estimator import Row
from layerzero.planning.plan_report import Plan
from layerzero.planning.planner import plan
from layerzero.planning.step_cost import StepCost
from layerzero.planning.transformer_shapes import TransformerShape, read_config

__all__ = ["Cluster", "Plan", "Row", "StepCost", "TransformerShape", "plan", "read_config"]
