"""Define the result of :func:`layerzero.plan`, and format the result as text or as data for JSON.

The text contains tables, the recommendation, the recommended call and the YAML settings.
"""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import torch

from layerzero.config import LayerZeroConfig
from layerzero.estimates.memory_estimate import device_bytes
from layerzero.integrations.yaml_file import HOP2_CODECS, NAMED_REFRESH_CODECS, dtype_named
from layerzero.planning.cluster import Cluster
from layerzero.planning.estimator import (
    ALIKE_TEXT,
    DTYPE_TEXTS,
    LAYERZERO,
    OTHER_SCHEMES,
    Candidate,
    Estimate,
    Estimator,
    selection_reason,
    simplest_fast_row,
)
from layerzero.planning.site_estimate import SiteEstimate, SiteSettings, estimate_sites
from layerzero.utils.text_tables import parameters_text, seconds_text, si_text, size_text, table

__all__ = [
    "COLUMNS_TEXT",
    "HEADER",
    "Plan",
    "SchemeComparison",
    "call_text",
    "count_text",
    "group_size",
    "parts_text",
    "reduce_text",
    "row_cells",
    "scheme_comparison_text",
    "settings_text",
    "short_settings",
    "shown_rows",
    "shown_text",
    "speeds_text",
    "yaml_text",
]

_OFFLOADS = ("offload_grads", "offload_optimizer", "offload_params")  # fields of a candidate

_LINKS = (50.0, 200.0, 400.0)  # in Gbit/s per accelerator; with eight accelerators 400, 1,600 and 3,200 per node
_ONE_UNIT = "the whole model is one unit, so a gather would collect all weights at once; `units` or --unit divides it"
_SHOWN = 12  # number of rows that are shown by default
HEADER = (
    "scheme", "S", "accumulation", "offload", "reduce", "A", "peak", "room", "host", "zero3", "replica", "between",
    "step", "tokens/s",
)  # fmt: skip
# Text of the parts of a step. The text of other parts is "waiting for" and their name.
_PARTS = {
    "forward": "forward",
    "backward": "backward",
    "update": "optimizer",
    "launch": "launching collectives",
    "contention": "slowdown caused by communication",
    "hop1": "waiting for hop 1",
    "hop2": "waiting for hop 2",
    "fetch": "waiting for copies from host memory",  # weights or accumulators
    "up": "waiting for copies from host memory",  # masters
    "store": "waiting for copies to host memory",  # weights or accumulators
    "down": "waiting for copies to host memory",  # final gradients
}
COLUMNS_TEXT = (
    "S: number of ranks in a ZeRO-3 group, over which weights are sharded; accumulation: layerzero's setting (empty "
    "for sharded and full if S is 1, because they are then equivalent); reduce: dtype of gradients in hop 1 "
    "(reduction inside a ZeRO-3 group), then, each after a slash, the dtype or codec of hop 2 (reduction across the "
    "groups) if it differs, and the codec of the refresh (copy of updated weights to all groups) if there is one; A: "
    "micro-batches per step; peak: maximum memory use during a step, including activations if their size is known; "
    "room: memory that remains free, not counting the reserve; host: host memory used per rank; zero3, replica, "
    "between: bytes that a rank sends per step inside its ZeRO-3 group, to other ZeRO-3 groups, and to other nodes; "
    "HFSDP: hybrid mode of Megatron-FSDP; ZeRO-1: Megatron's distributed optimizer. Memory is computed, and times are "
    "simulated; neither is measured."
)


@dataclass(frozen=True)
class SchemeComparison:
    """Comparison of the schemes at one speed of the link between nodes, with the same number of micro-batches.

    Attributes:
        between: speed of the link in Gbit/s per node.
        rows: row that the planner prefers for each scheme, or None if no row of the scheme fits. The first key is
            ``"layerzero"``. At the cluster's own link speed, the row of layerzero is the recommended one.
    """

    between: float
    rows: dict[str, Estimate | None]

    @property
    def advantage(self) -> float | None:
        """Throughput of layerzero relative to the fastest other scheme that fits, minus 1.

        The value is None if layerzero or all other schemes do not fit.
        """
        layerzero_row, *others = self.rows.values()
        fastest = max((row.tokens for row in others if row is not None), default=0.0)
        return None if layerzero_row is None or not fastest else layerzero_row.tokens / fastest - 1


@dataclass(frozen=True)
class Plan:
    """Result of :func:`layerzero.plan`. ``print(plan)`` prints the result as tables.

    Attributes:
        cluster: cluster for which the plan was made.
        numel: number of parameter elements in the model.
        units: number of units, including the root.
        rows: estimates, one per combination of settings. Settings that fit into memory come first, the fastest first.
            The others follow, in ascending order of :attr:`Estimate.shortfalls`, so that the closest come first.
        other_schemes: estimates for FSDP2, HSDP, HFSDP and ZeRO-1, from formulas and models of these schemes.
        best: recommended row; None if no settings fit.
        estimator: estimator that can compute more rows.
    """

    cluster: Cluster
    numel: int
    units: int
    rows: tuple[Estimate, ...]
    other_schemes: tuple[Estimate, ...]
    best: Estimate | None
    estimator: Estimator

    @property
    def trained_numel(self) -> int:
        """Number of elements of trainable parameters."""
        return self.estimator.trained_numel

    @property
    def parameters_text(self) -> str:
        """Text of the number of parameters and, if some parameters are frozen, of those that are trained."""
        trained = parameters_text(self.trained_numel).removesuffix(" parameters")
        return parameters_text(self.numel) + ("" if self.trained_numel == self.numel else f" ({trained} trained)")

    @property
    def why(self) -> str:
        """Text of the recommendation and its reason. If no settings fit, the text describes the closest settings."""
        best = self.best
        if best is None:
            closest = self.rows[0]
            needs = [f"{size_text(closest.excess)} more per {self.cluster.rank_text}"] if closest.excess else []
            if closest.host_excess:
                needs.append(
                    f"{size_text(closest.host_excess)} more host memory per node "
                    f"({size_text(closest.host * self.cluster.accelerators)} in total)"
                )
            return (
                f"No settings fit. The settings that come closest ({settings_text(closest.choice)}) need "
                f"{' and '.join(needs)}. "
                "Smaller micro-batches, activation checkpointing, a larger zero3_size or more nodes reduce memory."
            )
        computing = best.parts.get("forward", 0.0) + best.parts.get("backward", 0.0)
        num_too_large = sum(not row.fits for row in self.rows)
        free = size_text(max(0.0, self.cluster.room - best.peak))
        sentence = (
            f"Recommended: {settings_text(best.choice)}. {selection_reason(self.rows)} Forward and backward passes "
            f"take {computing / best.step:.0%} of a step, and {free} of memory remains free on each "
            f"{self.cluster.rank_text}."
        )
        if not num_too_large:
            return sentence
        return (
            f"{sentence} {count_text(num_too_large, 'combination')} {'does' if num_too_large == 1 else 'do'} not fit."
        )

    @property
    def config(self) -> LayerZeroConfig | None:
        """Recommended settings; None if no settings fit."""
        return None if self.best is None else self.estimator.config(self.best.choice)

    def at_sites(self, settings: SiteSettings) -> list[SiteEstimate]:
        """Estimate training at several sites with :func:`layerzero.outer`, without a codec and with each codec.

        Each site has the cluster of this plan and the recommended settings. The list is empty if no settings fit.

        Raises:
            ValueError: the model has fewer trainable units than `settings` has fragments.
        """
        if self.best is None:
            return []
        return list(estimate_sites(self.best, self.estimator.unit_specs(self.best.choice), settings))

    def estimates_by_node_count(self, nodes: Sequence[int], choice: Candidate) -> Iterator[Estimate]:
        """Yield the estimate of `choice` for each number of nodes.

        A number of nodes is skipped if the ``zero3_size`` of `choice` does not divide the number of ranks.
        """
        for count in nodes:
            estimator = self.estimator.with_cluster(replace(self.cluster, nodes=count))
            if estimator.cluster.ranks % choice.zero3_size == 0:
                yield estimator.estimate(choice)

    @cached_property
    def links(self) -> tuple[SchemeComparison, ...]:
        """Comparison of the schemes at 50, 200 and 400 Gbit/s per accelerator, and at the cluster's own link speed.

        All rows have the number of micro-batches of `best`, or the smallest number if no settings fit. The tuple is
        empty if the cluster has one node.
        """
        if self.cluster.nodes == 1:
            return ()
        own_link = self.cluster.node_link
        counts = [row.choice.micro_batches for row in self.rows]
        count = min(counts) if self.best is None else self.best.choice.micro_batches
        fitting = [row for row in (*self.rows, *self.other_schemes) if row.fits and row.choice.micro_batches == count]
        comparisons = []
        for between in sorted({own_link, *(each * self.cluster.accelerators for each in _LINKS)}):
            estimator = (
                self.estimator
                if between == own_link
                else self.estimator.with_cluster(replace(self.cluster, between=between))
            )
            rows: dict[str, Estimate | None] = {LAYERZERO: self.best}
            for scheme in OTHER_SCHEMES if between == own_link else (LAYERZERO, *OTHER_SCHEMES):
                rows[scheme] = simplest_fast_row(
                    estimator.estimate(row.choice) for row in fitting if row.choice.scheme == scheme
                )
            comparisons.append(SchemeComparison(between, rows))
        return tuple(comparisons)

    def as_dict(self, *, every_row: bool = False) -> dict[str, Any]:
        """Return the contents of the printed plan as dicts, lists, strings and numbers, for JSON.

        ``docs/planning.md`` lists the keys. If `every_row` is True, settings that do not fit are included.
        """
        best, fitting = self.best, [row for row in self.rows if row.fits]
        return {
            "parameters": self.numel,
            "trained_parameters": self.trained_numel,
            "units": self.units,
            "cluster": self.cluster.as_dict(),
            "settings": {"tried": len(self.rows), "fit": len(fitting)},
            "rows": [_row_data(row) for row in (self.rows if every_row else fitting or shown_rows(self))],
            "other_schemes": [_row_data(row) for row in self.other_schemes],
            "links": [
                {
                    "between": link.between,
                    "advantage": link.advantage,
                    "schemes": {name: row and _row_data(row) for name, row in link.rows.items()},
                }
                for link in self.links
            ],
            "recommended": None if best is None else _row_data(best),
            "why": self.why,
            "call": None if best is None else call_text(self),
            "yaml": None if best is None else yaml_text(self),
            "price_per_day": best.price if best is not None and best.price else None,
        }

    def as_text(self, *, every_row: bool = False) -> str:
        """Return tables, the recommendation, and settings to paste into code or a YAML file.

        If `every_row` is True, all rows are included, even those of settings that do not fit.
        """
        cluster = self.cluster
        fitting = sum(row.fits for row in self.rows)
        rows = self.rows if every_row else shown_rows(self)
        lines = [
            f"{self.parameters_text} in {count_text(self.units, 'unit')}, "
            f"{'including the root' if self.units > 1 else 'the root'}; "
            f"{count_text(cluster.nodes, 'node')} x {count_text(cluster.accelerators, cluster.rank_text)} of "
            f"{cluster.memory:.4g} GB, {cluster.node_link_text}",
            speeds_text(self),
            *([_ONE_UNIT] if self.units == 1 else ()),
            f"{fitting} of {len(self.rows)} combinations of settings fit into {size_text(cluster.room)} "
            f"({cluster.memory:.4g} GB minus a reserve of {cluster.reserve:.4g} GB)"
            + ("" if every_row else f"; {shown_text(self, rows)}:"),
            "",
            table(HEADER, [row_cells(row) for row in rows]),
            "",
            "other schemes:",
            table(HEADER, [row_cells(row) for row in self.other_schemes]),
            "",
            *([links, ""] if (links := scheme_comparison_text(self)) else ()),
        ]
        best = self.best
        if best is not None:
            lines += ["memory of the recommended settings, per rank:", _memory_table(best), "", parts_text(best), ""]
            if best.price:
                lines += [f"price of the cluster: {best.price:,.0f} per day", ""]
        lines += [self.why]
        if best is not None:
            lines += ["", call_text(self), "", yaml_text(self).rstrip()]
        lines += ["", *textwrap.wrap(COLUMNS_TEXT, 110, break_on_hyphens=False)]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.as_text()


def row_cells(row: Estimate) -> tuple[str, ...]:
    """Return the table cells of a row, in the order of :data:`HEADER`."""
    choice = row.choice
    of_layerzero = choice.scheme == LAYERZERO
    lacking = [f"-{size_text(row.excess)}"] if row.excess else []
    lacking += [f"host -{size_text(row.host_excess)}"] if row.host_excess else []
    return (
        choice.scheme,
        str(group_size(choice) or ""),
        choice.accumulation_text if of_layerzero else "",
        choice.offload if of_layerzero else "",
        reduce_text(choice),
        str(choice.micro_batches),
        size_text(row.peak),
        ", ".join(lacking) or size_text(row.room - row.peak),
        size_text(row.host),
        size_text(row.sent["zero3"]),
        size_text(row.sent["replica"]),
        size_text(row.between),
        seconds_text(row.step),
        si_text(row.tokens),
    )


def _row_data(row: Estimate) -> dict[str, Any]:
    choice = row.choice
    return {
        "scheme": choice.scheme,
        "zero3_size": group_size(choice),
        "accumulation": choice.accumulation if choice.scheme == LAYERZERO else None,
        "offload": [name for name in _OFFLOADS if getattr(choice, name)],
        "reduce_dtype": DTYPE_TEXTS[choice.reduce_dtype],
        "replica_reduce_dtype": DTYPE_TEXTS[choice.replica_reduce_dtype] or None,
        "accumulation_dtype": DTYPE_TEXTS[choice.accumulation_dtype] or None,
        "hop2_codec": choice.hop2_codec,
        "refresh_codec": choice.refresh_codec,
        "micro_batches": choice.micro_batches,
        "fits": row.fits,
        "peak_bytes": row.peak,
        "room_bytes": row.room - row.peak,
        "host_bytes": row.host,
        "host_excess_bytes": row.host_excess,
        "memory_bytes": row.memory,
        "zero3_bytes": row.sent["zero3"],
        "replica_bytes": row.sent["replica"],
        "between_bytes": row.between,
        "step_seconds": row.step,
        "parts_seconds": row.parts,
        "tokens_per_second": row.tokens,
    }


def group_size(choice: Candidate) -> int | None:
    """Return S, the number of ranks over which weights are sharded, or None for schemes in which S is fixed."""
    return choice.zero3_size if choice.scheme in (LAYERZERO, "HSDP", "HFSDP") else None


def shown_rows(plan: Plan, most: int = _SHOWN) -> Sequence[Estimate]:
    """Return the fastest rows that fit, or the closest rows if none fit; at most `most` rows.

    If the recommended row is not among the fastest rows, it replaces the last of them, and comes first.
    """
    rows = ([row for row in plan.rows if row.fits] or list(plan.rows))[:most]
    return rows if plan.best is None or plan.best in rows else [plan.best, *rows[:-1]]


def shown_text(plan: Plan, rows: Sequence[Estimate]) -> str:
    """Return text that describes the rows that :func:`shown_rows` returned."""
    if plan.best is None:
        return f"the {len(rows)} closest"
    if len(rows) > 1 and rows[0].tokens < rows[1].tokens:
        return f"the recommended one and the {len(rows) - 1} fastest"
    return f"the {len(rows)} fastest"


def scheme_comparison_text(plan: Plan) -> str:
    """Return a table of step times by scheme and speed of the link between nodes, or an empty string for one node."""

    def cell(row: Estimate | None) -> str:
        if row is None:
            return "does not fit"
        return f"{_scheme_settings_text(row.choice)} {seconds_text(row.step)}, {si_text(row.tokens)}"

    if not plan.links:
        return ""
    rows = [row for link in plan.links for row in link.rows.values() if row is not None]
    if not rows:
        return "No scheme fits at any link speed"
    lines = []
    for link in plan.links:
        advantage = "" if link.advantage is None else f"{round(link.advantage, 3) + 0.0:+.1%}"  # without -0.0%
        lines.append((f"{link.between:,.4g}", *map(cell, link.rows.values()), advantage))
    count = rows[0].choice.micro_batches
    title = (
        f"Step time and tokens/s by link speed, with {count_text(count, 'micro-batch')} per step and, for each scheme, "
        "the settings that the planner prefers.\nThe last column compares the throughput of layerzero with that of the "
        f"fastest other scheme; differences of up to {ALIKE_TEXT} are ties:"
    )
    return f"{title}\n{table(('Gbit/s', *plan.links[0].rows, 'difference'), lines)}"


def _scheme_settings_text(choice: Candidate) -> str:
    """Return a short text with the settings of `choice` that the planner may choose for its scheme."""
    if choice.scheme == LAYERZERO:
        return f"{short_settings(choice)} {reduce_text(choice)}"
    size = group_size(choice)
    return f"{'' if size is None else f'S={size} '}{reduce_text(choice)}"


def short_settings(choice: Candidate) -> str:
    """Return a short text with S, `accumulation` and the offloads of `choice`."""
    offload = "" if choice.offload == "-" else f"offload {choice.offload}"
    return " ".join(filter(None, (f"S={choice.zero3_size}", choice.accumulation_text, offload)))


def reduce_text(choice: Candidate) -> str:
    """Return the dtype of hop 1, the dtype or codec of hop 2 if it differs, and the codec of the refresh, if any.

    For example: ``fp32``, ``fp32/bf16``, ``fp32/int8_blocks`` or ``fp32/int4_blocks/lossless``.
    """
    gradients = _gradients_text(choice)
    if choice.refresh_codec is None:
        return gradients
    return f"{gradients if '/' in gradients else f'{gradients}/{gradients}'}/{choice.refresh_codec}"


def _gradients_text(choice: Candidate) -> str:
    hop1 = DTYPE_TEXTS[choice.reduce_dtype]
    hop2 = choice.hop2_codec or DTYPE_TEXTS[choice.replica_reduce_dtype] or hop1
    return hop1 if hop2 == hop1 else f"{hop1}/{hop2}"


def count_text(number: int, noun: str) -> str:
    """Return a number and a noun, in the plural if necessary."""
    ending = "" if number == 1 else "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}{ending}"


def speeds_text(plan: Plan) -> str:
    """Return text with inputs that affect which scheme is fastest and that users often leave at their defaults."""
    cluster = plan.cluster
    return (
        f"{cluster.tflops:.4g} TFLOP/s per {cluster.rank_text}, {cluster.inside:.4g} GB/s inside a node, "
        f"{plan.estimator.compute_cost.tokens:,} tokens in each {cluster.rank_text}'s micro-batch"
        + ("" if plan.estimator.compute_cost.activation_bytes else "; activations are unknown and not counted")
    )


def _memory_table(row: Estimate) -> str:
    remarks = {"reduce_buffer": "in backward"}
    kinds = [(kind, size_text(nbytes), remarks.get(kind, "")) for kind, nbytes in row.memory.items() if nbytes]
    if (gathered := row.peak - device_bytes(row.memory)) > 0:
        kinds.append(("gathered units", size_text(gathered), "at the peak"))
    return table(("kind", "bytes", ""), [*kinds, ("peak of a step", size_text(row.peak), "")])


def parts_text(row: Estimate) -> str:
    """Return a line of text with the step time and its components, longest first."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for name, value in row.parts.items():
        seconds[_PARTS.get(name, f"waiting for {name}")] += value
    parts = sorted(seconds.items(), key=lambda part: -part[1])
    texts = [f"{name} {seconds_text(value)}" for name, value in parts if value > 1e-6]
    return f"a step of {seconds_text(row.step)}: " + ", ".join(texts)


def settings_text(choice: Candidate) -> str:
    """Return the settings of layerzero in `choice` as part of a sentence."""
    parts = [
        f"zero3_size={choice.zero3_size}",
        f"accumulation={choice.accumulation!r}",
        f"{_gradients_text(choice)} gradients",
        "" if choice.accumulation_dtype is None else f"{DTYPE_TEXTS[choice.accumulation_dtype]} accumulators",
        "" if choice.refresh_codec is None else f"{choice.refresh_codec} refresh",
        count_text(choice.micro_batches, "micro-batch"),
        "" if choice.offload == "-" else f"offload of {choice.offload}",
    ]
    return ", ".join(filter(None, parts))


def _settings(plan: Plan) -> dict[str, dict[str, str]]:
    """Return the recommended settings as in a YAML file, by policy. Settings without a policy have the key ``""``."""
    assert plan.best is not None
    choice = plan.best.choice
    policy: dict[str, torch.dtype | None] = {
        "param_dtype": plan.estimator.param_dtype,
        "reduce_dtype": choice.reduce_dtype,
    }
    policy |= {"replica_reduce_dtype": choice.replica_reduce_dtype, "accumulation_dtype": choice.accumulation_dtype}
    others = {"zero3_size": str(choice.zero3_size)}
    if choice.accumulation != "sharded":
        others["accumulation"] = choice.accumulation
    if plan.cluster.device == "cpu":
        others["shared_memory"] = '"off"'
    codecs = {"hop2": choice.hop2_codec, "refresh": choice.refresh_codec}
    return {
        "mp_policy": {name: DTYPE_TEXTS[dtype] for name, dtype in policy.items() if dtype is not None},
        "": others,
        "offload": {name.removeprefix("offload_"): "true" for name in _OFFLOADS if getattr(choice, name)},
        "codecs": {name: codec for name, codec in codecs.items() if codec is not None},
    }


def call_text(plan: Plan) -> str:
    """Return source code that calls :func:`layerzero.shard_model` with the recommended settings."""
    codecs = {**HOP2_CODECS, **NAMED_REFRESH_CODECS}
    texts: dict[str, tuple[str, Callable[[str], str]]] = {
        "mp_policy": ("layerzero.PrecisionPolicy", lambda value: str(dtype_named("dtype", value))),
        "offload": ("layerzero.Offload", str.title),
        "codecs": ("layerzero.Codecs", lambda value: _codec_text(codecs[value])),
    }
    lines = []
    for policy, settings in _settings(plan).items():
        if not policy:
            quoted = {name: f'"{value}"' if name == "accumulation" else value for name, value in settings.items()}
            lines += [f"    {name}={value}," for name, value in quoted.items()]
        elif settings:
            kind, text = texts[policy]
            given = ", ".join(f"{name}={text(value)}" for name, value in settings.items())
            lines.append(f"    {policy}={kind}({given}),")
    return "\n".join(
        [
            "model = layerzero.shard_model(",
            "    model,",
            f"    units={_units(plan, yaml=False)},{_placeholder_comment(plan)}",
            *lines,
            ")",
        ]
    )


def _codec_text(codec: object) -> str:
    return f'"{codec}"' if isinstance(codec, str) else f"layerzero.{codec!r}"


def yaml_text(plan: Plan) -> str:
    """Return the recommended settings as YAML text for :meth:`layerzero.LayerZeroConfig.from_yaml`."""
    lines = [f"units: {_units(plan, yaml=True)}{_placeholder_comment(plan)}"]
    for policy, settings in _settings(plan).items():
        texts = [f"{name}: {value}" for name, value in settings.items()]
        lines += [f"{policy}: {{{', '.join(texts)}}}"] if policy and texts else texts
    return "\n".join(["# layerzero.yaml", *lines]) + "\n"


def _placeholder_comment(plan: Plan) -> str:
    """Return a comment that tells what to replace, if ``units`` contains placeholders."""
    names = _named_units(plan)
    if names is None or plan.estimator.unit_text in ("", "auto"):
        return ""
    added_names = ", and the names of its embedding and head" if len(names) > 1 else ""
    return f"  # replace with the class of your model's blocks{added_names}"


def _named_units(plan: Plan) -> list[str | type] | None:
    """Return the names and classes in ``units``, or None if ``units`` has other values, such as modules."""
    units = plan.estimator.units
    if units is None or isinstance(units, str) or (callable(units) and not isinstance(units, type)):
        return None
    named = [units] if isinstance(units, type) else list(cast("Iterable[Any]", units))
    return named if all(isinstance(unit, (str, type)) for unit in named) else None


def _units(plan: Plan, *, yaml: bool) -> str:
    """Return the value of ``units`` as text.

    The text contains the names of classes or modules, or a placeholder if the names are unknown.
    """
    units, unit_text = plan.estimator.units, plan.estimator.unit_text
    if units is None:
        return "null" if yaml else "None"
    if unit_text == "auto" or isinstance(units, str):
        name = unit_text or str(units)
        return name if yaml else f'"{name}"'
    if callable(units) and not isinstance(units, type):
        return "null  # the units that your callable selects" if yaml else "your_callable"
    named = _named_units(plan)
    if named is None:
        return "null  # the units that you passed" if yaml else "your_units"
    names = [unit if isinstance(unit, str) else unit_text or unit.__name__ for unit in named]
    if yaml:
        return f"[{', '.join(names)}]"
    quoted = [
        f'"{name}"' if unit_text or isinstance(unit, str) else name for name, unit in zip(names, named, strict=True)
    ]
    return f"{{{', '.join(quoted)}}}"
