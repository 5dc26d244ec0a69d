"""Answer three questions about a model on a cluster: :func:`plan`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from layerzero import LayerZeroConfig, PrecisionPolicy
from layerzero.extend import ACCUMULATIONS, Progress, Units, block_classes, plan_units
from layerzero.planning.cluster import Cluster
from layerzero.planning.compute_cost import ComputeCost
from layerzero.planning.estimator import OTHER_SCHEMES, Estimator, Row
from layerzero.planning.plan_report import Plan
from layerzero.planning.step_cost import MARGIN
from layerzero.planning.transformer_shapes import TransformerShape, read_config

Model = nn.Module | Callable[[], nn.Module] | TransformerShape | str | os.PathLike[str]
_CONFIG = LayerZeroConfig(mp_policy=PrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
_OFFLOADS = (("grads",), ("optimizer",), ("grads", "optimizer"))  # tried if the model does not fit otherwise


def plan(
    model: Model,
    cluster: Cluster,
    config: LayerZeroConfig = _CONFIG,
    *,
    units: Units = None,
    zero3_sizes: Iterable[int] | None = None,
    tokens: int = 4096,
    micro_batches: int = 1,
    recompute: bool = True,
    activation_bytes: float = 0.0,
) -> Plan:
    """Estimate whether a model fits, what crosses nodes, and at which link layerzero pays, for several settings.

    Except for activations, the estimated memory matches the prediction of :func:`layerzero.memory` in a run to the
    byte, because both use the same formulas. Activations are approximate, and times come from closed formulas. See
    ``docs/planning.md`` for the assumptions. No process group is needed, and no memory is allocated for the model.

    Each value of `zero3_size` is tried with each value of `accumulation`, and with offloading if the model does not fit
    otherwise. Where the gathered weights fit, ``reshard_after_forward="step"`` is tried as well, unless `config`
    changes that setting.

    Args:
        model: module, preferably on the meta device; function without arguments that builds a module and is called
            under the meta device; :class:`layerzero.planning.TransformerShape`; or path of a Hugging Face
            ``config.json``.
        cluster: description of the cluster.
        config: settings that all rows have in common. By default, compute weights are in bf16 and gradients are reduced
            in fp32.
        units: replacement for the `units` of `config`. The units of a transformer shape or ``config.json`` are always
            its blocks, its embedding and its head. A tied embedding and head are in the root. For other models, None
            means ``"auto"`` if the model declares its block classes, otherwise only the root.
        zero3_sizes: values of S to try. By default, this is the `zero3_size` of `config` or, if that is None, the
            divisors of the number of accelerators per node, and the total number of ranks. If ``"sharded"`` does not
            fit on the ranks of a node without offloading, the ranks of 2, 4, ... nodes are tried as well, until it
            fits. HSDP and HFSDP are also tried with more nodes, until they fit.
        tokens: number of tokens per micro-batch and rank, which are one sequence.
        micro_batches: number of micro-batches per step.
        recompute: True if blocks keep only their inputs for the backward pass (activation checkpointing).
        activation_bytes: size of the activations of a micro-batch on one rank, in bytes. If 0, the size is estimated
            for a transformer shape or config, and unknown for other models.

    Raises:
        TypeError, ValueError: an argument is not supported. The message gives the reason and alternatives.

    Example::

        cluster = layerzero.planning.Cluster(nodes=16, accelerators=8, memory=80, between=400)
        found = layerzero.plan(layerzero.planning.read_config("config.json"), cluster)
        print(found)
        print(found.best.peak, found.best.cost.between, found.config)
    """
    if tokens < 1 or micro_batches < 1:
        raise ValueError(f"tokens={tokens} and micro_batches={micro_batches} must be at least 1")
    if isinstance(config.codecs.refresh, str) and cluster.device != "cpu":
        raise ValueError(
            f"Codecs.refresh={config.codecs.refresh!r} cannot be planned for device={cluster.device!r}, because only "
            "CPUs compress refreshes losslessly. Plan without it, or for device='cpu'"
        )
    shape = read_config(Path(model)) if isinstance(model, (str, os.PathLike)) else model
    built = _build_model(shape)
    if isinstance(shape, TransformerShape):
        units = shape.units
    elif units is None:
        units = "auto" if config.units is None and block_classes(built) else config.units
    config = replace(config, units=units)
    selected = plan_units(built, config)
    if isinstance(shape, TransformerShape):
        element = (config.root_policy(built).param_dtype or torch.float32).itemsize
        compute = ComputeCost.of_shape(shape, tokens, recompute=recompute, element=element)
    else:
        compute = ComputeCost.of_units(selected, tokens, recompute=recompute)
    compute = compute._replace(activation_bytes=activation_bytes or compute.activation_bytes)
    estimator = Estimator(selected, config, cluster, compute, micro_batches)
    with Progress("plan") as progress:
        rows = _tried_rows(estimator, list(zero3_sizes or filter(None, [config.zero3_size])), progress)
    rows.sort(key=lambda row: (row.excess, row.host_excess, row.cost.seconds(), len(row.offload), row.peak))
    return Plan(estimator, tokens, tuple(rows), tuple(_other_rows(estimator)), _simplest_fast_row(rows))


def _tried_rows(estimator: Estimator, given: Sequence[int], progress: Progress) -> list[Row]:
    """Return the rows of layerzero with the `given` values of `zero3_size`, or with those that are tried by default."""
    cluster = estimator.cluster
    rows = [row for size in _sizes(given, cluster) for row in _rows(estimator, size, progress)]
    for size in () if given else _sizes_beyond_a_node(cluster):
        fitting = [row for row in rows if row.fits and row.zero3_size < cluster.ranks]
        if any(row.accumulation == "sharded" and not row.offload for row in fitting):
            break
        rows += _rows(estimator, size, progress)
    return rows


def _rows(estimator: Estimator, zero3_size: int, progress: Progress) -> Iterator[Row]:
    """Yield the rows of layerzero with one `zero3_size`."""
    given = estimator.config.accumulation
    for mode in [given] if callable(given) else ACCUMULATIONS:
        # "full" equals "sharded" if weights are not sharded, and "local" if there is one replica.
        if (mode == "full" and zero3_size == 1) or (mode == "local" and zero3_size == estimator.cluster.ranks):
            continue
        progress.update(f"zero3_size={zero3_size}")
        tried = [estimator.layerzero(zero3_size, mode)]
        if not tried[0].fits:
            tried += [estimator.layerzero(zero3_size, mode, offload) for offload in _OFFLOADS]
        elif zero3_size > 1 and estimator.config.reshard_after_forward is True:
            stays = estimator.layerzero(zero3_size, mode, reshards="step")
            tried += [stays] if stays.fits else []
        if not any(row.fits for row in tried):
            tried += [estimator.layerzero(zero3_size, mode, (*offload, "params")) for offload in ((), *_OFFLOADS)]
        yield from tried


def _other_rows(estimator: Estimator) -> Iterator[Row]:
    node = estimator.cluster.accelerators
    sizes = {"FSDP2": [estimator.cluster.ranks], "ZeRO-1": [1]}
    for name in OTHER_SCHEMES:
        for size in sizes.get(name, [node, *_sizes_beyond_a_node(estimator.cluster)]):
            row = estimator.other_scheme(name, size)
            yield row
            if row.fits:
                break


def _simplest_fast_row(rows: Sequence[Row]) -> Row | None:
    """Return the simplest of the fastest rows that fit, or None if no row fits.

    Simpler are fewer kinds of offloading, weights sharded within a node, gradients sent between nodes only once per
    step, and less memory, in this order.
    """
    fitting = [row for row in rows if row.fits]
    longest = min((row.cost.seconds() for row in fitting), default=0.0) / (1 - MARGIN)

    def complexity(row: Row) -> tuple[int, bool, bool, int]:
        sends_often = row.accumulation == "local" and len(row.cost.passes) > 2
        return len(row.offload), row.zero3_size > row.cost.cluster.accelerators, sends_often, row.peak

    return min((row for row in fitting if row.cost.seconds() <= longest), key=complexity, default=None)


def _sizes(given: Iterable[int], cluster: Cluster) -> list[int]:
    """Return the values of `zero3_size` to try first: the given ones, or those that divide a node, and all ranks."""
    node = cluster.accelerators
    sizes = sorted(set(given)) or sorted({*(size for size in range(1, node + 1) if node % size == 0), cluster.ranks})
    if invalid := [size for size in sizes if size < 1 or cluster.ranks % size]:
        raise ValueError(
            f"zero3_size={invalid[0]} does not divide the {cluster.ranks} ranks of the cluster. Use a divisor"
        )
    return sizes


def _sizes_beyond_a_node(cluster: Cluster) -> list[int]:
    """Return the values of `zero3_size` that span several nodes, but not all nodes."""
    return [cluster.accelerators * count for count in range(2, cluster.nodes) if cluster.nodes % count == 0]


def _build_model(model: Any) -> nn.Module:
    if isinstance(model, TransformerShape):
        return model.build()
    if isinstance(model, nn.Module):
        return model
    if not callable(model):
        raise TypeError(
            f"model must be a module, a function that builds a module, a TransformerShape or a path, got {model!r}"
        )
    with torch.device("meta"):
        built = model()
    if not isinstance(built, nn.Module):
        raise TypeError(
            f"{getattr(model, '__name__', model)}() must return a torch.nn.Module, got {type(built).__name__}"
        )
    return built
