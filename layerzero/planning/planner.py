"""Search for the best settings for a model on a cluster: :func:`plan`."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from layerzero.config import ACCUMULATIONS, LayerZeroConfig, Precision, Units
from layerzero.engine.reduction_spec import ReductionSpec
from layerzero.integrations.yaml_file import HOP2_CODECS, NAMED_REFRESH_CODECS, dtype_named
from layerzero.layout.shard_grid import ShardGrid
from layerzero.planning.cluster import Cluster
from layerzero.planning.compute_cost import ComputeCost
from layerzero.planning.estimator import LAYERZERO, OTHER_SCHEMES, Candidate, Estimate, Estimator, simplest_fast_row
from layerzero.planning.meta_sharding import MetaSharding
from layerzero.planning.plan_report import Plan
from layerzero.planning.transformer_shapes import TransformerShape, read_config
from layerzero.sharding.build_units import check_codecs, settings_of_units
from layerzero.sharding.unit_selection import block_classes

__all__ = ["plan"]

T = TypeVar("T")
Model = nn.Module | Callable[[], nn.Module] | TransformerShape | str | os.PathLike[str]


def plan(
    model: Model,
    cluster: Cluster,
    *,
    units: Units = None,
    tokens: int = 4096,
    sequence: int | None = None,
    micro_batches: Iterable[int] = (1, 4, 16),
    zero3_sizes: Iterable[int] | None = None,
    accumulations: Iterable[str] = ACCUMULATIONS,
    offload: bool | None = None,
    param_dtype: torch.dtype | str = torch.bfloat16,
    reduce_dtypes: Iterable[torch.dtype | str] = (torch.float32, torch.bfloat16),
    replica_reduce_dtypes: Iterable[torch.dtype | str | None] = (None,),
    accumulation_dtypes: Iterable[torch.dtype | str | None] = (None,),
    hop2_codecs: Iterable[str | None] = (None,),
    refresh_codecs: Iterable[str | None] = (None,),
    recompute: bool = True,
    activation_bytes: float = 0.0,
    on_estimate: Callable[[], None] | None = None,
) -> Plan:
    """Estimate a model's memory, traffic and step time on a cluster for many settings, and recommend settings.

    Except for activations, the estimated memory matches the prediction of :func:`layerzero.memory` in a run to the
    byte, because both use the same formulas. Activations are approximate, and times are simulated. See
    ``docs/planning.md`` for the assumptions and the differences from measurements. No process group is needed, and no
    memory is allocated for the model.

    Args:
        model: module, preferably on the meta device; function without arguments that builds a module and is called
            under the meta device; :class:`layerzero.planning.TransformerShape`; or path of a Hugging Face
            ``config.json``.
        cluster: description of the cluster.
        units: as in :func:`layerzero.shard_model`. If None, the units of a transformer shape or config are its blocks,
            its embedding and its head. A tied embedding and head are in the root. For other models, None means
            ``"auto"`` if the model declares its block classes, otherwise only the root.
        tokens: number of tokens per micro-batch and rank.
        sequence: number of tokens in one sequence. The default is `tokens`.
        micro_batches: values of A, the number of micro-batches per step, to try.
        zero3_sizes: values of S to try. By default, these are the divisors of the number of accelerators per node, and
            the total number of ranks. If the first of `accumulations` does not fit on the ranks of a node without
            offload, `hop2_codec` or `accumulation_dtype`, the ranks of 2, 4, ... nodes are tried as well, until it
            fits. HSDP and HFSDP are also tried with more nodes, until they fit.
        accumulations: values of `accumulation` to try.
        param_dtype: compute dtype, or its name.
        reduce_dtypes: reduce dtypes to try, or their names. Each dtype is used for both hops if `replica_reduce_dtype`
            is None.
        replica_reduce_dtypes: values of `replica_reduce_dtype` to try if there are several replicas: dtypes, their
            names, or None for the reduce dtype.
        accumulation_dtypes: values of `accumulation_dtype` to try: ``"bf16"``, or None. Only None is tried if the
            accumulators are the final gradients, as with ``"local"``.
        hop2_codecs: names of codecs to try as `hop2_codec` if there are several replicas: ``"int8_blocks"``,
            ``"int4_blocks"``, or None for no codec. Encoded gradients change the results of training, so no codec is
            tried by default.
        refresh_codecs: names of codecs to try as `refresh_codec` if there are several replicas, on a cluster of CPUs:
            ``"lossless"``, ``"int4_difference"``, or None for no codec. A lossless refresh is assumed to send 4.3 bits
            per weight. The number depends on the training.
        offload: if True, try `offload_grads`, `offload_optimizer` and both, and then `offload_params` alone and
            combined with each of these options. If None, try the first three options if the model does not fit without
            offloading, and the others if the model still does not fit. If False, do not try offloading.
        recompute: True if blocks keep only their inputs for the backward pass (activation checkpointing).
        activation_bytes: size of the activations of a micro-batch on one rank, in bytes. If 0, the size is estimated
            for a transformer shape or config, and unknown for other models.
        on_estimate: function that is called after each estimate of memory and after each simulation, for example to
            show progress.

    Returns:
        A :class:`layerzero.planning.Plan` that contains all estimates and the recommendation.

    Raises:
        TypeError, ValueError: an argument is not supported. The message gives the reason and alternatives.

    Example::

        cluster = layerzero.planning.Cluster(nodes=16, accelerators=8, memory=80, between=400)
        found = layerzero.plan(layerzero.planning.read_config("config.json"), cluster)
        print(found)
        print(found.best.choice, found.best.peak, found.best.step)
    """
    if tokens < 1 or (sequence is not None and not 1 <= sequence <= tokens):
        raise ValueError(
            f"tokens={tokens} and sequence={sequence} do not match. Use at least one token, and at most `tokens` per "
            "sequence"
        )
    dtype = dtype_named("param_dtype", param_dtype)
    counts = sorted(_distinct_values("micro_batches", micro_batches, "numbers of at least 1", _is_count))
    modes = _distinct_values(
        "accumulations", accumulations, _format_names(ACCUMULATIONS), lambda mode: mode in ACCUMULATIONS
    )
    reduce_values = _distinct_values("reduce_dtypes", reduce_dtypes, "dtypes or their names", lambda value: True)
    reduce = list(dict.fromkeys(dtype_named("an element of reduce_dtypes", value) for value in reduce_values))
    tried = _TriedSettings(
        modes,
        reduce,
        _dtypes("replica_reduce_dtypes", replica_reduce_dtypes),
        _dtypes("accumulation_dtypes", accumulation_dtypes),
        _codecs("hop2_codecs", hop2_codecs, HOP2_CODECS),
        _codecs("refresh_codecs", refresh_codecs, NAMED_REFRESH_CODECS),
        counts,
    )
    shape = _shape_of(model)
    built = _build_model(model if shape is None else shape)
    if units is None:
        units = shape.units if shape is not None else "auto" if block_classes(built) else None
    unit_text = "" if shape is None else "Block" if isinstance(model, TransformerShape) else "auto"
    sharding = MetaSharding(built, LayerZeroConfig(units=units))
    if shape is not None:
        cost = ComputeCost.of_sizes(
            shape, sharding.plans, tokens, sequence or tokens, recompute=recompute, element=dtype.itemsize
        )
        cost = replace(cost, activation_bytes=activation_bytes) if activation_bytes else cost
    else:
        cost = ComputeCost.of_units(sharding.plans, tokens, recompute=recompute, activation_bytes=activation_bytes)
    estimator = Estimator(sharding, cost, cluster, dtype, units, unit_text, on_estimate or _do_nothing)
    tried.check(estimator)

    def rows_of(size: int) -> list[Estimate]:
        rows: list[Estimate] = []
        for choice in tried.choices(size, cluster.ranks):
            rows.append(estimator.estimate(choice))
            if offload or (offload is None and not rows[-1].fits):
                combined = [
                    replace(choice, offload_grads=grads, offload_optimizer=optimizer)
                    for grads, optimizer in ((True, False), (False, True), (True, True))
                ]
                estimates = [estimator.estimate(each) for each in combined]
                if offload or not any(row.fits for row in estimates):
                    estimates += [
                        estimator.estimate(replace(each, offload_params=True)) for each in (choice, *combined)
                    ]
                rows += estimates
        return rows

    rows = [row for size in _sizes_to_try(zero3_sizes, cluster) for row in rows_of(size)]
    if zero3_sizes is None:
        for size in _sizes_beyond_a_node(cluster):
            if any(tried.is_default(row.choice) for row in rows if row.fits and row.choice.zero3_size < cluster.ranks):
                break
            rows += rows_of(size)
    # Nothing depends on the times of rows that do not fit, so do not simulate them. Simulations take most of the time.
    rows.sort(key=lambda row: (not row.fits, *((-row.tokens, 0.0) if row.fits else row.shortfalls)))
    other_schemes: list[Estimate] = []
    groups = {"FSDP2": [cluster.accelerators], "ZeRO-1": [1]}  # FSDP2 ignores this size and shards over all ranks
    for name in OTHER_SCHEMES:
        for size in groups.get(name, [cluster.accelerators, *_sizes_beyond_a_node(cluster)]):
            estimates = [
                estimator.estimate(Candidate(name, size, "full", reduce_dtype=wire, micro_batches=count))
                for count in counts
                for wire in reduce
            ]
            other_schemes += estimates
            if any(row.fits for row in estimates):
                break
    numel = sum(parameter.numel() for parameter in built.parameters())
    return Plan(
        cluster,
        numel,
        len(sharding.plans),
        tuple(rows),
        tuple(other_schemes),
        simplest_fast_row(rows),
        estimator,
    )


def _do_nothing() -> None:
    pass


@dataclass(frozen=True)
class _TriedSettings:
    """Values of settings that a plan combines with each other and with each `zero3_size`."""

    accumulations: list[str]
    reduce_dtypes: list[torch.dtype]
    replica_reduce_dtypes: list[torch.dtype | None]
    accumulation_dtypes: list[torch.dtype | None]
    hop2_codecs: list[str | None]
    refresh_codecs: list[str | None]
    micro_batches: list[int]

    def choices(self, zero3_size: int, ranks: int) -> Iterable[Candidate]:
        """Return the distinct combinations of settings for one `zero3_size`, in a job of `ranks` ranks."""
        replicas = ranks // zero3_size
        # With one replica, there is no hop 2, and no refresh between ranks.
        between = list(itertools.product(self.replica_reduce_dtypes, self.hop2_codecs, self.refresh_codecs))
        combinations = itertools.product(
            _distinct_modes(self.accumulations, zero3_size, replicas),
            self.reduce_dtypes,
            between if replicas > 1 else [(None, None, None)],
            self.accumulation_dtypes,
            self.micro_batches,
        )
        return dict.fromkeys(
            Candidate(
                LAYERZERO,
                zero3_size,
                accumulation,
                reduce_dtype=hop1 if zero3_size > 1 or hop2 is None or hop2_codec is not None else hop2,
                replica_reduce_dtype=None if hop2 is hop1 or zero3_size == 1 or hop2_codec is not None else hop2,
                accumulation_dtype=accumulation_dtype if _has_accumulator(accumulation, zero3_size, replicas) else None,
                hop2_codec=hop2_codec,
                refresh_codec=refresh_codec,
                micro_batches=count,
            )
            for accumulation, hop1, (hop2, hop2_codec, refresh_codec), accumulation_dtype, count in combinations
        )

    def is_default(self, choice: Candidate) -> bool:
        """Return whether `choice` has the first `accumulation` and no optional settings.

        Offloads are optional. `hop2_codec` and `accumulation_dtype` are optional if None is among the values to try.
        """
        return (
            choice.accumulation == self.accumulations[0]
            and choice.offload == "-"
            and (choice.hop2_codec is None or None not in self.hop2_codecs)
            and (choice.accumulation_dtype is None or None not in self.accumulation_dtypes)
        )

    def check(self, estimator: Estimator) -> None:
        """Raise ValueError if ``shard_model`` would refuse a value for this model, compute dtype or device."""
        cluster = estimator.cluster
        default = Candidate(LAYERZERO, cluster.accelerators)
        choices: list[tuple[str, Any, Candidate]] = [
            ("hop2_codecs", value, replace(default, hop2_codec=value)) for value in self.hop2_codecs
        ]
        choices += [("refresh_codecs", value, replace(default, refresh_codec=value)) for value in self.refresh_codecs]
        choices += [
            ("accumulation_dtypes", value, replace(default, accumulation_dtype=value))
            for value in self.accumulation_dtypes
        ]
        for name, value, choice in choices:
            try:
                config = estimator.config(choice)
                settings = settings_of_units(estimator.sharding.plans, config, zero3_size=choice.zero3_size)
                check_codecs(settings, config.codecs)
                if config.codecs.refresh is not None and cluster.device != "cpu":
                    raise ValueError(f"refreshes of weights on {cluster.device} are not encoded")
            except (TypeError, ValueError) as error:
                raise ValueError(
                    f"{name} contains {value!r}, which shard_model refuses: {error}. To plan without it, leave it out "
                    f"of {name}"
                ) from None


def _sizes_to_try(requested: Iterable[int] | None, cluster: Cluster) -> list[int]:
    if requested is None:
        node = cluster.accelerators
        return sorted({*(size for size in range(1, node + 1) if node % size == 0), cluster.ranks})
    sizes = sorted(_distinct_values("zero3_sizes", requested, "numbers of at least 1", _is_count))
    if invalid := [size for size in sizes if cluster.ranks % size]:
        raise ValueError(
            f"zero3_size={invalid[0]} does not divide the {cluster.ranks} ranks of the cluster. Use a divisor"
        )
    return sizes


def _distinct_values(name: str, given: Iterable[T], expected: str, is_supported: Callable[[T], bool]) -> list[T]:
    """Return the distinct values in an argument that lists values to try.

    Raises:
        ValueError: the argument is not a list, is empty, or contains an unsupported value.
    """
    is_list = isinstance(given, Iterable) and not isinstance(given, str)
    values = list(given) if is_list else []
    if not values or not all(map(is_supported, values)):
        raise ValueError(f"{name} must be a non-empty list of {expected}, got {values if is_list else given!r}")
    return list(dict.fromkeys(values))


def _format_names(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _dtypes(name: str, given: Iterable[torch.dtype | str | None]) -> list[torch.dtype | None]:
    values = _distinct_values(
        name, given, "dtypes, their names or None (`none` on the command line)", lambda value: True
    )
    dtypes = [None if value is None else dtype_named(f"an element of {name}", value) for value in values]
    return list(dict.fromkeys(dtypes))


def _codecs(name: str, given: Iterable[str | None], known: Iterable[str]) -> list[str | None]:
    return _distinct_values(
        name,
        given,
        f"{_format_names(known)} or None (`none` on the command line)",
        lambda value: value is None or (isinstance(value, str) and value in known),
    )


def _sizes_beyond_a_node(cluster: Cluster) -> list[int]:
    """Return the values of `zero3_size` that span several nodes, but not all nodes."""
    return [cluster.accelerators * count for count in range(2, cluster.nodes) if cluster.nodes % count == 0]


def _distinct_modes(modes: Sequence[str], zero3_size: int, replicas: int) -> list[str]:
    """Return the values of `accumulation` in `modes`, without values equivalent to an earlier value on this mesh."""
    grid = ShardGrid.of_rank(0, data_parallel=zero3_size * replicas, zero3_size=zero3_size)
    dtypes = Precision(torch.float32, torch.float32, torch.float32, torch.float32)
    first = {
        ReductionSpec.plan(grid, dtypes, accumulation=mode, divide_factor=1.0, adds_hop1=False, adds_hop2=False): mode
        for mode in reversed(modes)
    }
    return [mode for mode in modes if mode in first.values()]


def _has_accumulator(accumulation: str, zero3_size: int, replicas: int) -> bool:
    """Return whether gradients are accumulated in separate memory instead of in the final gradients."""
    return accumulation != "local" and (replicas > 1 or (accumulation == "full" and zero3_size > 1))


def _shape_of(model: Model) -> TransformerShape | None:
    if isinstance(model, TransformerShape):
        return model
    if isinstance(model, (str, os.PathLike)):
        return read_config(Path(model))
    return None


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
