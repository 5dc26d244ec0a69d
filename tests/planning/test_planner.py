"""Plans predict the memory of a run to the byte, its traffic, and the order of the engine's schedule."""

from __future__ import annotations

import itertools
import json
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import layerzero
from benchmarks.model_shapes import UNITS
from benchmarks.simulation.record import Settings, record_blocks
from layerzero.config import LayerZeroConfig
from layerzero.device.buffer_pools import FullBufferPool
from layerzero.estimates.memory_estimate import estimate_memory, optimizer_bytes
from layerzero.planning import Candidate, Cluster, TransformerShape, plan, read_config
from layerzero.planning.estimator import _CRITERIA, StepCost, selection_reason, simplest_fast_row
from layerzero.planning.meta_sharding import MetaSharding, traits_of
from layerzero.planning.plan_report import (
    COLUMNS_TEXT,
    call_text,
    reduce_text,
    row_cells,
    scheme_comparison_text,
    settings_text,
    yaml_text,
)
from layerzero.planning.sim_program import (
    Operation,
    SimCompute,
    SimLaunch,
    SimWait,
    StartReduction,
    program_from_events,
)
from layerzero.planning.sim_schedules import ScheduleSettings, UnitCost, layerzero_program
from layerzero.planning.simulator import SimMachine, simulate
from layerzero.planning.transformer_shapes import TransformerBlock
from layerzero.utils.text_tables import seconds_text, si_text, size_text, table
from tests.support.ranks import mesh_of, run_ranks

pytestmark = pytest.mark.slow

# --- memory and traffic, compared with real ranks ---


class Block(nn.Module):
    def __init__(self, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, inner), nn.Linear(inner, 6)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Blocks whose sizes need padding, one with its own strides, one partly frozen, inside a root."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.blocks = nn.ModuleList(Block(inner) for inner in (3, 40, 7, 7, 64))
        self.blocks[1].up.weight = nn.Parameter(self.blocks[1].up.weight.detach().t().contiguous().t())
        self.blocks[2].up.requires_grad_(False)
        self.last = nn.Linear(6, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x).float()


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
ALL_BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
SETTINGS: list[dict[str, object]] = [
    {"zero3_size": 1, "accumulation": "full", "mp_policy": BF16},
    {"zero3_size": 2, "accumulation": "sharded", "mp_policy": BF16},
    {"zero3_size": 2, "accumulation": "full", "mp_policy": BF16},
    {"zero3_size": 4, "accumulation": "sharded", "mp_policy": BF16},
    {"zero3_size": 2, "accumulation": "sharded", "mp_policy": MixedPrecisionPolicy()},
    {"zero3_size": 4, "accumulation": "full", "mp_policy": MixedPrecisionPolicy()},
    {"zero3_size": 2, "accumulation": "sharded", "mp_policy": ALL_BF16},
    {"zero3_size": 2, "accumulation": "full", "mp_policy": ALL_BF16},
    {"zero3_size": 2, "accumulation": "local", "mp_policy": BF16},
    {"zero3_size": 1, "accumulation": "local", "mp_policy": BF16},
    {"zero3_size": 2, "accumulation": "local", "mp_policy": MixedPrecisionPolicy(), "offload_optimizer": True},
    {"zero3_size": 2, "mp_policy": BF16, "offload_grads": True},
    {"zero3_size": 1, "mp_policy": BF16, "offload_grads": True},
    {"zero3_size": 2, "mp_policy": BF16, "offload_optimizer": True},
    {"zero3_size": 4, "mp_policy": BF16, "offload_optimizer": True},
    {"zero3_size": 2, "mp_policy": BF16, "offload_grads": True, "offload_optimizer": True, "accumulation": "full"},
    {"zero3_size": 2, "mp_policy": BF16, "offload_params": True, "offload_optimizer": True},
    {"zero3_size": 1, "mp_policy": BF16, "offload_params": True},
    {"zero3_size": 2, "mp_policy": MixedPrecisionPolicy(), "offload_params": True, "offload_grads": True},
    {"zero3_size": 2, "mp_policy": BF16, "prefetch": 3},
    {"zero3_size": 2, "mp_policy": BF16, "reshard_after_forward": False},
    {"zero3_size": 4, "mp_policy": BF16, "reshard_after_forward": 2},
    {"zero3_size": 2, "mp_policy": BF16, "replica_reduce_dtype": torch.bfloat16},
    {"zero3_size": 2, "mp_policy": BF16, "hop2_codec": layerzero.Int8Blocks()},
    {"zero3_size": 2, "mp_policy": BF16, "accumulation_dtype": torch.bfloat16},
    {"zero3_size": 2, "mp_policy": ALL_BF16, "accumulation_dtype": torch.bfloat16, "accumulation": "full"},
    {"zero3_size": 1, "mp_policy": BF16, "accumulation_dtype": torch.bfloat16, "offload_grads": True},
    {"zero3_size": 1, "mp_policy": BF16, "accumulation": "local", "hop2_codec": layerzero.Int4Blocks()},
]


def _train(model: nn.Module, micro_batches: int) -> torch.optim.Optimizer:
    """Train for three steps; traffic is counted in the last one."""
    optimizer = layerzero.shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3), model)
    for _ in range(3):
        layerzero.traffic(model, reset=True)
        for index in range(micro_batches):
            with layerzero.no_sync(model) if index + 1 < micro_batches else nullcontext():
                model(torch.ones(2, 5)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def _measured(rank: int) -> list[tuple[dict[str, int], int, int]]:
    """Return measured memory, and measured and predicted peaks, by settings."""
    found = []
    for index, settings in enumerate(SETTINGS):
        torch.manual_seed(0)
        given = {name: value for name, value in settings.items() if name != "zero3_size"}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the CPU has no device memory to free
            model = layerzero.shard_model(Net(), mesh=mesh_of(settings["zero3_size"]), units={Block}, **given)
        # Offloaded tensors have host memory from the first time on that they wait between micro-batches.
        optimizer = _train(model, 2 if settings.get("offload_grads") else 1 + index % 3)
        report = layerzero.memory(model)
        assert len(optimizer.state), "it is there, so that its state is counted"
        found.append((report.measured, report.measured_peak, report.predicted_peak))
    return found


@pytest.mark.skipif(
    not FullBufferPool.can_cache, reason="needs a torch that moves memory between storages, as 2.13 does"
)
def test_a_plan_is_to_the_byte_what_real_ranks_hold() -> None:
    with torch.device("meta"):
        on_meta = Net()
    for rank, measured in enumerate(run_ranks(_measured, timeout=240)):
        for settings, (held, peak, predicted_peak) in zip(SETTINGS, measured, strict=True):
            config = LayerZeroConfig(units={Block}, shared_memory="off", **settings)
            in_host = settings.get("offload_params", False)
            where = traits_of(4, settings["zero3_size"], rank=rank, on_device=False, offload_params=in_host)
            units = MetaSharding(on_meta, config).unit_specs(config, where)
            found = estimate_memory(units, config)
            kind = "host_optimizer" if config.offload_optimizer else "optimizer"
            state = optimizer_bytes(units, 2)
            planned = {**found.kinds, kind: state}
            assert {k: v for k, v in planned.items() if v} == {k: v for k, v in held.items() if v}, (rank, settings)
            on_device = 0 if config.offload_optimizer else state
            assert found.peak + on_device == peak == predicted_peak, (rank, settings)


class Trained(Net):
    """Net without frozen parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(True)


class Adapted(Net):
    """Net of which only two biases are trained. Inputs of frozen blocks still need gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.first.bias.requires_grad_(True)
        self.blocks[3].up.bias.requires_grad_(True)


MODELS: tuple[type[Net], ...] = (Trained, Net, Adapted)
SENT = [
    *((Trained, settings, micro_batches) for settings in SETTINGS[:4] for micro_batches in (1, 3)),
    *((model, SETTINGS[index], 3) for model in MODELS[1:] for index in (1, 2, 8)),
]


def _sent(rank: int) -> list[dict[str, int]]:
    """Return the bytes of a step by axis, for each setting."""
    found = []
    for make, settings, micro_batches in SENT:
        given = {name: settings[name] for name in ("accumulation", "mp_policy")}
        model = layerzero.shard_model(make(), mesh=mesh_of(settings["zero3_size"]), units={Block}, **given)
        _train(model, micro_batches)
        sent = layerzero.traffic(model).bytes_by_axis
        found.append({axis: sent.get(axis, 0) for axis in ("zero3", "replica")})
    return found


def test_planned_bytes_are_those_that_real_ranks_send() -> None:
    cluster = Cluster(nodes=2, accelerators=2, device="cpu")
    for (make, settings, micro_batches), sent in zip(SENT, run_ranks(_sent)[0], strict=True):
        found = plan(
            make,
            cluster,
            units={Block},
            micro_batches=[micro_batches],
            zero3_sizes=[settings["zero3_size"]],
            accumulations=[settings["accumulation"]],
            reduce_dtypes=[torch.float32],
            offload=False,
        )
        (row,) = found.rows
        assert row.sent == pytest.approx(sent, rel=1e-12), (make, settings, micro_batches)


def test_frozen_parameters_have_no_gradients_in_any_scheme() -> None:
    """Frozen parameters are held and gathered. Nothing else is done with them."""
    cluster = Cluster(nodes=2, accelerators=2, device="cpu")
    numel = sum(parameter.numel() for parameter in Net().parameters())
    whole, part = (
        plan(make, cluster, units={Block}, micro_batches=[3], offload=False, tokens=64, recompute=False)
        for make in (Trained, Adapted)
    )
    assert (whole.trained_numel, part.numel, part.trained_numel) == (numel, numel, 13)
    assert " trained)" not in whole.parameters_text and part.parameters_text.endswith(" (13 trained)")
    assert part.as_dict()["trained_parameters"] == 13
    for row, other in zip(part.other_schemes, whole.other_schemes, strict=True):
        scheme = row.choice.scheme
        assert (scheme, row.choice.reduce_dtype) == (other.choice.scheme, other.choice.reduce_dtype)
        sharded = 4 if scheme == "FSDP2" else 2
        states = 2 if scheme == "HSDP" else 4
        kept = 4 * (13 if scheme in ("HFSDP", "ZeRO-1") else numel) / states
        assert row.memory["masters"] == round(kept) and row.memory["optimizer"] == round(8 * 13 / states), scheme
        assert row.memory.get("gathered") == other.memory.get("gathered")
        assert row.sent["replica"] == pytest.approx(other.sent["replica"] * 13 / numel), scheme
        reduced = 3 * row.choice.reduce_dtype.itemsize * (numel - 13) * (1 - 1 / sharded) * (scheme != "ZeRO-1")
        assert row.sent["zero3"] == pytest.approx(other.sent["zero3"] - reduced), scheme
        assert row.parts["backward"] == pytest.approx(other.parts["backward"] / 2), "no gradients of matrices"


# --- the schedule, compared with the engine's ---


def _said(program: Sequence[Operation]) -> list[str]:
    """Return the launches, waits and computations of the last step, in order."""
    numbers: dict[int, str] = {}
    said: list[str] = []
    for operation in program:
        if isinstance(operation, SimLaunch):
            numbers[operation.number] = f"{operation.collective.kind} {operation.collective.unit}"
            said.append(f"launch {numbers[operation.number]}")
        elif isinstance(operation, SimWait):
            said.append(f"wait {numbers[operation.number]}")
        elif isinstance(operation, StartReduction):
            said.append("reduce " + ", ".join(f"{each.kind} {each.unit}" for each in operation.collectives))
        elif isinstance(operation, SimCompute):
            said.append(" ".join(operation.what))
        else:
            said.append(type(operation).__name__)
    ends = [place for place, each in enumerate(said) if each == "StepEnd"]
    return said[ends[-2] + 1 : ends[-1] + 1]


def _without_splinters(said: Sequence[str]) -> Iterator[str]:
    """Merge the parts of a unit's computation, which a recording splits at launches."""
    phase = ""
    for each in said:
        if each.startswith(("forward blocks", "backward blocks")):
            if each != phase:
                yield each
            phase = each
        elif not each.startswith(("forward", "backward", "after", "update")):
            yield each


CASES = [
    (16, 8, 2, "sharded"),
    (16, 8, 3, "full"),
    (16, 8, 3, "local"),
    (16, 1, 2, "sharded"),
    (16, 1, 2, "local"),
    (8, 8, 3, "sharded"),
    (8, 8, 1, "full"),
]


@pytest.mark.parametrize(("ranks", "zero3_size", "micro_batches", "accumulation"), CASES)
def test_the_schedule_is_the_one_that_the_engine_records(
    ranks: int, zero3_size: int, micro_batches: int, accumulation: str
) -> None:
    blocks = 4
    recorded = program_from_events(
        record_blocks(blocks, Settings(ranks, zero3_size, micro_batches, accumulation), steps=3)
    )
    works = [UnitCost(name, 64, 1.0, 2.0) for name in ("the root", *(f"blocks.{index}" for index in range(blocks)))]
    sharding = ScheduleSettings(ranks, zero3_size, micro_batches, accumulation, ends_stay_gathered=False)
    written = list(layerzero_program(works, sharding, steps=3))
    assert list(_without_splinters(_said(written))) == list(_without_splinters(_said(recorded)))


def test_times_grow_by_as_much_with_each_micro_batch_from_the_third_on() -> None:
    works = [UnitCost(name, 1e6, 0.1, 0.2) for name in ("the root", *(f"blocks.{index}" for index in range(3)))]
    for (shared, mode), between in itertools.product(
        ((1, "sharded"), (2, "sharded"), (2, "full"), (2, "local")), (1e7, 1e9)
    ):
        machine = SimMachine(node_size=2, inside=1e8, between=between, launch=1e-4, zero3_size=shared)
        steps = [
            simulate(layerzero_program(works, ScheduleSettings(8, shared, count, mode)), machine).step
            for count in range(2, 7)
        ]
        grown = [after - before for before, after in itertools.pairwise(steps)]
        assert grown == pytest.approx([grown[0]] * 4, rel=1e-9), (shared, mode, between)


@pytest.mark.exhaustive
def test_a_row_of_many_micro_batches_is_what_all_of_them_would_take() -> None:
    found = plan(SMALL, Cluster(nodes=4, between=10.0), micro_batches=[1, 2, 6], offload=True)
    for row in (*found.rows, *found.other_schemes):
        machine, program = found.estimator.program(row.choice)
        assert row.step == pytest.approx(simulate(program, machine).step, rel=1e-6), row.choice


# --- inputs and outputs ---

SMALL = TransformerShape(layers=3, hidden=64, ffn=160, vocab=256, heads=4)


def test_the_recommended_settings_can_be_pasted(tmp_path: Path) -> None:
    for model, units in ((Trained, {Block}), (SMALL, None)):
        found = plan(model, Cluster(nodes=4, accelerators=2, device="cpu"), units=units, micro_batches=[2])
        text = str(found)
        assert found.best is not None and found.best.fits and found.why in text
        said = text[text.index("# layerzero.yaml") : text.index(COLUMNS_TEXT[:30])]
        path = tmp_path / "layerzero.yaml"
        path.write_text(said)
        config, chosen = LayerZeroConfig.from_yaml(path), found.config
        assert chosen is not None
        for name in ("zero3_size", "mp_policy", "accumulation", "offload_grads", "offload_optimizer", "shared_memory"):
            assert getattr(config, name) == getattr(chosen, name), name
        assert list(config.units) == (["Block"] if model is Trained else ["Block", "embed", "head"])
        assert 'units={"Block", "embed", "head"}' in text if model is SMALL else "units={Block}" in text
        call = text[text.index("model = layerzero.shard_model(") : text.index("# layerzero.yaml")]
        compile(call, "call", "exec")
        assert f"zero3_size={found.best.choice.zero3_size}" in call


def test_only_placeholders_have_a_comment_that_says_what_to_replace() -> None:
    comment = "  # replace with the class of your model's blocks"
    for model, units, expected in (
        (SMALL, None, f"{comment}, and the names of its embedding and head"),
        (SMALL, set(SMALL.units), f"{comment}, and the names of its embedding and head"),
        (SMALL, SMALL.units[:1], comment),
        (SMALL, lambda name, module: name == "embed", ""),
        (Trained, {Block}, ""),
    ):
        found = plan(
            model, Cluster(nodes=2, accelerators=2, device="cpu"), units=units, zero3_sizes=[2], micro_batches=[1]
        )
        (in_call,) = re.findall(r"^    units=.*?,((?:  #.*)?)$", call_text(found), re.MULTILINE)
        assert in_call == expected, units
        (in_yaml,) = re.findall(
            r"^units: (?:\[.*\]|null  # the units that your callable selects)(.*)$", yaml_text(found), re.MULTILINE
        )
        assert in_yaml == expected, units


_SAME = ("zero3_size", "mp_policy", "shared_memory", "units")  # compared one by one


class _Called:
    """Stand-in for the package that keeps the settings of the call."""

    Int8Blocks, Int4Blocks = layerzero.Int8Blocks, layerzero.Int4Blocks
    Int4Difference = layerzero.Int4Difference

    def __init__(self, settings: dict[str, object]) -> None:
        self.settings = settings

    @classmethod
    def shard_model(cls, model: None, **settings: object) -> _Called:
        return cls(settings)


@pytest.mark.exhaustive
def test_what_is_pasted_has_every_setting_of_its_row(tmp_path: Path) -> None:
    tried = {
        "hop2_codecs": (None, "int8_blocks", "int4_blocks"),
        "refresh_codecs": (None, "lossless", "int4_difference"),
        "replica_reduce_dtypes": (None, "bf16"),
        "accumulation_dtypes": (None, "bf16"),
    }
    cluster = Cluster(nodes=2, accelerators=2, device="cpu")
    found = plan(SMALL, cluster, zero3_sizes=[2], micro_batches=[2], offload=True, **tried)
    path = tmp_path / "layerzero.yaml"
    for row in found.rows:
        path.write_text(yaml_text(replace(found, best=row)))
        config, chosen = LayerZeroConfig.from_yaml(path), found.estimator.config(row.choice)
        assert replace(config, units=None) == replace(chosen, units=None), row.choice
        call = call_text(replace(found, best=row))
        names = {"layerzero": _Called, "torch": torch, "model": None}
        exec(call, names)  # text of the planner
        called = names["model"].settings
        for name in ("zero3_size", "mp_policy", "shared_memory"):
            assert called.pop(name) == getattr(chosen, name), (name, row.choice)
        called.pop("units")
        defaults = LayerZeroConfig().arguments()
        assert {**defaults, **called} == {**chosen.arguments(), **{n: defaults[n] for n in _SAME}}, row.choice
    assert {row.choice.accumulation for row in found.rows} == {"sharded", "full", "local"}
    for name, values in tried.items():
        assert {getattr(row.choice, name.removesuffix("s")) for row in found.rows} == {
            torch.bfloat16 if value == "bf16" else value for value in values
        }
    assert len({row.choice for row in found.rows}) == len(found.rows), "no combination is planned twice"


def test_encoded_gradients_are_planned_where_there_are_several_replicas() -> None:
    codecs = (None, "int8_blocks", "int4_blocks")
    settings = {"zero3_sizes": [8, 32], "micro_batches": [1], "reduce_dtypes": [torch.float32], "hop2_codecs": codecs}
    found = plan(SMALL, Cluster(nodes=4, accelerators=8, between=1), accumulations=["sharded"], **settings)
    rows = {(row.choice.zero3_size, row.choice.hop2_codec): row for row in found.rows}
    assert set(rows) == {(32, None), *((8, codec) for codec in codecs)}
    exact, int8, int4 = (rows[8, codec] for codec in codecs)
    elements = exact.sent["replica"] / (2 + 4)  # the refresh in bf16 and hop 2 in fp32
    assert int8.sent["replica"] == pytest.approx(elements * (2 + 1 + 2 / 128), rel=1e-9)
    assert int4.sent["replica"] == pytest.approx(elements * (2 + 1 / 2 + 2 / 128), rel=1e-9)
    assert int4.step < int8.step < exact.step and int4.memory["residual"] > 0 == int8.memory["residual"]
    assert found.best is int4, "the link is slow"
    assert all(row.choice.hop2_codec is None for row in plan(SMALL, Cluster(nodes=4)).rows), "only if asked for"
    fast = plan(SMALL, Cluster(nodes=4, accelerators=8), accumulations=["sharded"], **{**settings, "zero3_sizes": [8]})
    assert fast.best is not None and fast.best.choice.hop2_codec is None, "exact gradients, unless encoded are faster"


def test_encoded_refreshes_are_planned_on_processors() -> None:
    cluster = Cluster(nodes=4, accelerators=2, between=0.1, inside=2.0, tflops=0.05, device="cpu")
    codecs = (None, "lossless", "int4_difference")
    settings = {"zero3_sizes": [2, 8], "micro_batches": [1], "reduce_dtypes": ["fp32"], "accumulations": ["sharded"]}
    found = plan(SMALL, cluster, refresh_codecs=codecs, **settings)
    rows = {(row.choice.zero3_size, row.choice.refresh_codec): row for row in found.rows}
    assert set(rows) == {(8, None), *((2, codec) for codec in codecs)}, "with one replica, nothing is refreshed"
    exact, lossless, lossy = (rows[2, codec] for codec in codecs)
    elements = exact.sent["replica"] / (2 + 4)
    assert lossless.sent["replica"] == pytest.approx(elements * (4.3 / 8 + 4), rel=1e-9)
    assert lossy.sent["replica"] == pytest.approx(elements * (4.125 / 8 + 4), rel=1e-9)
    assert lossy.step < lossless.step < exact.step and lossless.memory["reduce_buffer"] > exact.memory["reduce_buffer"]
    fast = plan(SMALL, replace(cluster, between=100.0), refresh_codecs=codecs, **settings)
    times = {row.choice.refresh_codec: row.step for row in fast.rows if row.choice.zero3_size == 2}
    assert times[None] < min(times["lossless"], times["int4_difference"]), "encoding takes longer than sending"
    offloaded = plan(SMALL, cluster, refresh_codecs=["lossless"], offload=True, **{**settings, "zero3_sizes": [2]})
    assert min(row.step for row in offloaded.rows) >= lossless.step * (1 - 1e-9), "the refresh is still waited for"


def test_an_encoded_refresh_takes_the_time_of_its_coding_and_of_its_bytes() -> None:
    units = [UnitCost("root", 0.0, 0.0, 0.0), UnitCost("block", 8e6, 0.0, 0.0)]
    machine = SimMachine(node_size=2, inside=1e30, between=1e6, zero3_size=2)
    settings = ScheduleSettings(ranks=8, zero3_size=2, micro_batches=1, refreshed=0.5)

    def step(**changes: float) -> float:
        return simulate(layerzero_program(units, replace(settings, **changes), steps=3), machine).step

    sent_by_node = 8e6 * 3 / 4 * 0.5
    plain = step()
    assert step(refreshed=1.0) - plain == pytest.approx(sent_by_node / 1e6)
    assert step(refresh_encoding=1e-4) == pytest.approx(max(plain, 8e6 / 8 * 1e-4 + plain - sent_by_node / 1e6))
    assert step(refresh_decoding=1e-4) == pytest.approx(max(plain, 8e6 / 2 * 3 / 4 * 1e-4 + plain - sent_by_node / 1e6))
    hop2 = [each.collective for each in layerzero_program(units, settings, steps=1) if isinstance(each, SimLaunch)]
    assert {each.comm for each in hop2 if each.kind == "refresh"} == {"encoded refresh"}


def test_dtypes_of_hop_2_and_of_accumulators_are_planned() -> None:
    cluster = Cluster(nodes=4, accelerators=2, between=10)
    settings = {"zero3_sizes": [2], "micro_batches": [2], "offload": False}
    found = plan(SMALL, cluster, replica_reduce_dtypes=[None, "bf16"], accumulation_dtypes=[None, "bf16"], **settings)
    rows = {
        (c.accumulation, c.reduce_dtype, c.replica_reduce_dtype, c.accumulation_dtype): row
        for row in found.rows
        if (c := row.choice)
    }
    fp32, bf16 = torch.float32, torch.bfloat16
    dtypes = [(fp32, None), (fp32, bf16), (bf16, None)]
    assert set(rows) == {
        *((mode, *pair, dtype) for mode in ("sharded", "full") for pair in dtypes for dtype in (None, bf16)),
        *(("local", *pair, None) for pair in dtypes),
    }
    exact, narrow = rows["sharded", fp32, None, None], rows["sharded", fp32, bf16, None]
    assert narrow.sent["zero3"] == exact.sent["zero3"] and narrow.step < exact.step
    assert narrow.sent["replica"] == pytest.approx(exact.sent["replica"] * (2 + 2) / (2 + 4), rel=1e-9)
    halved = rows["sharded", fp32, None, bf16]
    assert halved.memory["accumulator"] == exact.memory["accumulator"] / 2 and halved.sent == exact.sent
    for tried in ({"accumulation_dtypes": ["bf16"]}, {"hop2_codecs": ["int8_blocks"]}):
        large = plan(SMALL, cluster, micro_batches=[1], **tried).rows
        assert {row.choice.zero3_size for row in large} == {1, 2, 8}, "it fits with the ranks of a node"
    coded = plan(SMALL, cluster, replica_reduce_dtypes=["bf16"], hop2_codecs=["int8_blocks"], **settings).rows
    assert {row.choice.replica_reduce_dtype for row in coded} == {None}, "the codec determines what hop 2 sends"
    alone = {
        "zero3_sizes": [1, 8],
        "micro_batches": [2],
        "accumulation_dtypes": ["bf16"],
        "replica_reduce_dtypes": ["bf16"],
    }
    effects = {
        (c.zero3_size, c.accumulation, c.reduce_dtype, c.replica_reduce_dtype, c.accumulation_dtype)
        for row in plan(SMALL, cluster, offload=False, **alone).rows
        if (c := row.choice)
    }
    assert effects == {
        (1, "sharded", bf16, None, bf16),  # there is no hop 1
        (1, "local", bf16, None, None),
        *((8, "sharded", dtype, None, None) for dtype in (fp32, bf16)),  # no hop 2; the accumulator is the gradient
        *((8, "full", dtype, None, bf16) for dtype in (fp32, bf16)),
    }
    slow = plan(SMALL, replace(cluster, between=1.0), replica_reduce_dtypes=[None, "bf16"], **settings).best
    assert slow is not None and (slow.choice.reduce_dtype, slow.choice.replica_reduce_dtype) == (fp32, bf16)


def test_texts_and_data_of_a_row_have_its_dtypes_and_codecs() -> None:
    choice = Candidate("layerzero", 2, reduce_dtype=torch.float32, accumulation_dtype=torch.bfloat16)
    assert reduce_text(choice) == "fp32" and choice.accumulation_text == "sharded bf16"
    for changes, text in (
        ({"replica_reduce_dtype": torch.bfloat16}, "fp32/bf16"),
        ({"hop2_codec": "int8_blocks"}, "fp32/int8_blocks"),
        ({"refresh_codec": "lossless"}, "fp32/fp32/lossless"),
        ({"hop2_codec": "int4_blocks", "refresh_codec": "lossless"}, "fp32/int4_blocks/lossless"),
    ):
        assert reduce_text(replace(choice, **changes)) == text
    full = replace(choice, hop2_codec="int4_blocks", refresh_codec="int4_difference")
    assert settings_text(full) == (
        "zero3_size=2, accumulation='sharded', fp32/int4_blocks gradients, bf16 accumulators, int4_difference refresh, "
        "1 micro-batch"
    )
    tried = {"accumulation_dtypes": ["bf16"], "replica_reduce_dtypes": ["bf16"], "refresh_codecs": ["lossless"]}
    cluster = Cluster(nodes=4, accelerators=2, device="cpu")
    found = plan(SMALL, cluster, zero3_sizes=[2], reduce_dtypes=["fp32"], micro_batches=[1], **tried)
    names = ("reduce_dtype", "replica_reduce_dtype", "accumulation_dtype", "hop2_codec", "refresh_codec")
    rows = {row["accumulation"]: tuple(row[name] for name in names) for row in found.as_dict()["rows"]}
    assert rows["sharded"] == ("fp32", "bf16", "bf16", None, "lossless")
    assert rows["local"] == ("fp32", "bf16", None, None, "lossless")


def test_a_codec_that_shard_model_refuses_is_refused() -> None:
    cluster = Cluster(nodes=4)
    message = (
        "hop2_codecs contains 'int4_blocks', which shard_model refuses: Int4Blocks adds the encoding errors .* fp16"
    )
    with pytest.raises(ValueError, match=message):
        plan(SMALL, cluster, param_dtype="fp16", hop2_codecs=[None, "int4_blocks"])
    for dtype, codec in (("fp16", "int8_blocks"), ("bf16", "int4_blocks")):
        rows = plan(SMALL, cluster, param_dtype=dtype, hop2_codecs=[codec], micro_batches=[1], zero3_sizes=[8]).rows
        assert {row.choice.hop2_codec for row in rows} == {codec}


def test_codecs_do_not_change_which_sizes_are_tried() -> None:
    cluster = Cluster(nodes=4, accelerators=2)
    tried = [
        {row.choice.zero3_size for row in plan(SMALL, cluster, micro_batches=[1], hop2_codecs=codecs).rows}
        for codecs in ([None], ["int8_blocks"], ["int4_blocks", None])
    ]
    assert tried == [{1, 2, 8}] * 3


def test_the_order_of_parts_does_not_depend_on_hashes() -> None:
    names = [f"part {index}" for index in range(20)]
    cost = StepCost(0.0, {"first": 1.0}, {}, 0.0).plus(StepCost(0.0, dict.fromkeys(names, 1.0), {}, 0.0), 1.0)
    assert list(cost.parts) == ["first", *names]


def test_the_sentence_and_the_choice_have_the_same_criteria() -> None:
    found = plan(SMALL, Cluster(nodes=4), micro_batches=[1, 2])
    row = next(row for row in found.rows if row.fits and row.choice.zero3_size == 8)
    simple = replace(row, choice=Candidate("layerzero", 8), simulated=lambda: StepCost(1.0, {}, {}, 0.0))
    values = [
        ("the fewest micro-batches", {"micro_batches": 2}),
        ("the fewest kinds of offloading", {"offload_grads": True}),
        ("the fewest codecs", {"hop2_codec": "int8_blocks"}),
        ("the fewest low-precision gradient dtypes", {"replica_reduce_dtype": torch.bfloat16}),
        ("weights sharded within a node", {"zero3_size": 16}),
        ("gradients sent between nodes only once per step", {"accumulation": "local"}),
    ]
    worse = [replace(simple, choice=replace(simple.choice, **change)) for _, change in values]
    rule = f"{', then '.join(text for text, _ in values)}, then the least memory."
    assert rule == f"{', then '.join(text for text, _ in _CRITERIA)}."
    assert selection_reason([simple, *worse[:-1]]) == (
        "Of the 6 combinations that fit and are within 3% of the highest throughput, the planner prefers the one with "
        f"{', then '.join(text for text, _ in values[:-1])}."
    )
    assert selection_reason([simple, worse[2]]).endswith("the planner prefers the one with the fewest codecs.")
    assert selection_reason([simple, simple]).endswith("the planner prefers the fastest."), (
        "rows are sorted by throughput"
    )
    slow = replace(simple, simulated=lambda: StepCost(1.1, {}, {}, 0.0))
    assert selection_reason([simple, slow]) == "No other combination that fits is within 3% of its throughput."
    assert selection_reason(found.rows) in found.why
    local = replace(worse[-1], peak=simple.peak - 1)
    twice = [
        replace(row, choice=replace(row.choice, micro_batches=2), tokens_per_step=2 * row.tokens_per_step)
        for row in (simple, local)
    ]
    assert simplest_fast_row([simple, local]) is local, "with one micro-batch, it sends gradients only once, too"
    assert simplest_fast_row(twice) is twice[0]
    narrower = replace(simple, choice=replace(simple.choice, reduce_dtype=torch.bfloat16))
    assert simplest_fast_row([narrower, worse[3]]) is worse[3], "one hop in fp32 is better than none"
    narrowest = replace(narrower, choice=replace(narrower.choice, accumulation_dtype=torch.bfloat16))
    local_bf16 = replace(narrower, choice=replace(narrower.choice, accumulation="local"), peak=simple.peak + 1)
    assert simplest_fast_row([narrowest, local_bf16]) is local_bf16, "bf16 accumulators count, too"
    coded = [replace(simple, choice=replace(simple.choice, refresh_codec=codec)) for codec in ("lossless", None)]
    assert simplest_fast_row(coded) is coded[1]
    larger = replace(simple, peak=simple.peak + 1)
    for row, simpler in itertools.pairwise([*worse[:-1], larger, simple]):
        assert simplest_fast_row([row, simpler]) is simpler


def test_a_model_that_does_not_fit_is_said_to_lack_so_much() -> None:
    large = TransformerShape(layers=8, hidden=2048, vocab=50_000, heads=16)
    found = plan(large, Cluster(nodes=1, accelerators=2, memory=5, reserve=1), micro_batches=[1], offload=False)
    assert found.best is None and found.config is None
    closest = min(found.rows, key=lambda row: row.excess)
    assert closest is found.rows[0] and closest.excess == closest.peak - 4e9 > 0
    start = f"No settings fit. The settings that come closest ({settings_text(closest.choice)}) need "
    assert found.why.startswith(f"{start}{size_text(closest.excess)} more per accelerator. ")
    both = replace(found, rows=(replace(closest, host=1003e9 / 2), *found.rows))
    host_text = "3.00 GB more host memory per node (1.00 TB in total). "
    assert both.why.startswith(f"{start}{size_text(closest.excess)} more per accelerator and {host_text}")
    only_host = replace(found, rows=(replace(closest, peak=1, host=1003e9 / 2), *found.rows))
    assert only_host.why.startswith(f"{start}{host_text}")
    with_offload = plan(large, Cluster(nodes=1, accelerators=2, memory=12, reserve=1), micro_batches=[1])
    assert any(row.choice.offload != "-" for row in with_offload.rows), "tried where it does not fit without"


def test_the_closest_settings_lack_the_least_device_memory_whatever_host_memory_they_lack() -> None:
    large = TransformerShape(layers=8, hidden=2048, vocab=50_000, heads=16)
    cluster = Cluster(nodes=1, accelerators=2, memory=2, reserve=1, host_memory=1)
    found = plan(large, cluster, micro_batches=[1], zero3_sizes=[2], accumulations=["sharded"])
    lacking = [(row.excess, row.host_excess) for row in found.rows]
    assert lacking == sorted(lacking) and lacking[0][1] > min(host for _, host in lacking)
    assert lacking[0][0] == min(row.excess for row in found.rows) > 0
    closest = found.rows[0]
    assert "optimizer" in closest.choice.offload and "more host memory per node" in found.why
    assert (
        f" need {size_text(closest.excess)} more per accelerator and {size_text(closest.host_excess)} more" in found.why
    )
    shown = f"  -{size_text(closest.excess)}, host -{size_text(closest.host_excess)}  "
    assert shown in str(found).splitlines()[5], "both are missing"
    roomy = replace(closest, peak=1)
    assert row_cells(roomy)[7] == f"host -{size_text(closest.host_excess)}"
    plenty = plan(
        large, replace(cluster, host_memory=1e6), micro_batches=[1], zero3_sizes=[2], accumulations=["sharded"]
    )
    assert [row.choice for row in plenty.rows][:1] == [closest.choice], "host memory does not decide what is closest"


@pytest.mark.exhaustive
def test_more_nodes_need_less_memory_and_no_setting_beats_its_computation_or_its_link() -> None:
    for nodes, device in ((2, "cuda"), (16, "cuda"), (2, "cpu")):
        cluster = Cluster(nodes=nodes, between=50.0, memory=8.0, price=2.0, device=device)
        found = plan(SMALL, cluster, micro_batches=[1, 5], offload=True)
        for row in (*found.rows, *found.other_schemes):
            computing = row.parts["forward"] + row.parts["backward"]
            assert row.step >= computing * (1 - 1e-9), row
            assert row.step >= cluster.accelerators * row.between / (cluster.between * 1e9 / 8) * (1 - 1e-9), row
            assert sum(row.parts.values()) == pytest.approx(row.step)
            assert min(row.parts.values()) >= -1e-9 * row.step, row.parts
            assert row.price == 24 * 2.0 * cluster.ranks
            assert row.tokens == pytest.approx(4096 * row.choice.micro_batches * cluster.ranks / row.step)
    best = found.best
    assert best is not None
    held = [sum(row.memory.values()) for row in found.estimates_by_node_count((1, 2, 4), best.choice)]
    assert held[0] > held[1] > held[2]


def test_bytes_of_the_schemes_are_those_of_their_formulas() -> None:
    nodes, node, count = 4, 8, 3
    found = plan(SMALL, Cluster(nodes=nodes, accelerators=node), micro_batches=[count])
    numel = SMALL.numel
    fsdp, hsdp, hfsdp, zero1 = (row for row in found.other_schemes if row.choice.reduce_dtype is torch.float32)
    assert hsdp.between == pytest.approx(2 * 4 * numel / node * (1 - 1 / nodes))
    assert zero1.sent["replica"] == pytest.approx((4 + 2) * numel * (1 - 1 / (nodes * node)))
    assert hfsdp.between == pytest.approx((2 + 4) * numel / node * (1 - 1 / nodes))
    model = SMALL.build()
    stays = (
        model.norm.weight.numel() + model.head.weight.numel()
    )  # the root and the last unit, from forward to backward
    gathered = 2 * (2 * (numel - stays) + stays)
    held = [row.memory for row in (fsdp, hsdp, hfsdp, zero1)]
    states = ("weights", "masters", "gradients", "optimizer")
    assert [sum(each.get(kind, 0) for kind in states) for each in held] == pytest.approx(
        [
            16 * numel / (nodes * node),
            16 * numel / node,
            (2 + 4) * numel / node + 12 * numel / (nodes * node),
            (2 + 4) * numel + 12 * numel / (nodes * node),
        ],
        abs=4,
    )
    in_bf16 = {
        row.choice.scheme: row.memory for row in found.other_schemes if row.choice.reduce_dtype is torch.bfloat16
    }
    shared_by = {"FSDP2": nodes * node, "HSDP": node, "HFSDP": node, "ZeRO-1": 1}
    element = {"FSDP2": 4, "HSDP": 4, "HFSDP": 2, "ZeRO-1": 2}  # FSDP2 and HSDP accumulate in the dtype of the masters
    assert {scheme: held["gradients"] for scheme, held in in_bf16.items()} == {
        scheme: pytest.approx(element[scheme] * numel / over, abs=1) for scheme, over in shared_by.items()
    }
    assert fsdp.sent["zero3"] == pytest.approx(count * (gathered + 4 * numel) * (1 - 1 / (nodes * node)))
    for row in found.rows:
        choice = row.choice
        if choice.zero3_size == node:
            padded = sum(handle.layout.numel for unit in found.estimator.unit_specs(choice) for handle in unit.handles)
            wire = choice.reduce_dtype.itemsize
            assert numel <= padded < 1.1 * numel
            reduced = count if choice.accumulation == "local" else 1
            assert row.between == pytest.approx((reduced * wire + 2) * padded / node * (1 - 1 / nodes))


def test_schemes_are_compared_at_several_links_with_their_simplest_fast_rows() -> None:
    cluster = Cluster(nodes=4, accelerators=4, between=100.0)
    found = plan(SMALL, cluster, micro_batches=[2, 4], zero3_sizes=[4])
    best = found.best
    assert best is not None
    assert [each.between for each in found.links] == [100.0, 200.0, 800.0, 1600.0]
    for link in found.links:
        counts = [best.choice.micro_batches]
        again = plan(SMALL, replace(cluster, between=link.between), micro_batches=counts, zero3_sizes=[4])
        assert list(link.rows) == ["layerzero", "FSDP2", "HSDP", "HFSDP", "ZeRO-1"]
        for scheme, row in link.rows.items():
            assert row is not None and row.choice.scheme == scheme
            (same,) = (each for each in (*again.rows, *again.other_schemes) if each.choice == row.choice)
            assert (row.step, row.peak) == (same.step, same.peak), "as in a plan for this link"
            rivals = [each for each in (*again.rows, *again.other_schemes) if each.choice.scheme == scheme]
            assert row.tokens >= 0.97 * max(each.tokens for each in rivals)
        (line,) = (
            line for line in scheme_comparison_text(found).splitlines() if line.startswith(f"{link.between:,.0f} ")
        )
        cells = re.split("  +", line)[2:6]
        for (scheme, row), cell in zip(list(link.rows.items())[1:], cells, strict=True):
            settings = f"S={row.choice.zero3_size} " if scheme in ("HSDP", "HFSDP") else ""
            assert cell == (f"{settings}{reduce_text(row.choice)} {seconds_text(row.step)}, {si_text(row.tokens)}"), (
                "the row can be found in the table of the scheme"
            )
        ours, *others = [row.tokens for row in link.rows.values() if row is not None]
        assert link.advantage == pytest.approx(ours / max(others) - 1)
    assert found.links[0].rows["layerzero"] == best, "the recommended row at the given link"
    for scheme in found.links[0].rows:
        speeds = [link.rows[scheme].tokens for link in found.links]
        assert all(0.97 * slow <= fast for slow, fast in itertools.pairwise(speeds)), scheme


def test_a_scheme_that_does_not_fit_has_no_row_at_any_link() -> None:
    sizes = TransformerShape(layers=8, hidden=2048, vocab=50_000, heads=16)
    found = plan(sizes, Cluster(nodes=4, accelerators=2, memory=7, reserve=1), micro_batches=[1])
    assert found.best is not None
    fits = {row.choice.scheme for row in (*found.rows, *found.other_schemes) if row.fits}
    assert fits == {"layerzero", "FSDP2", "HFSDP"}
    for link in found.links:
        assert {scheme for scheme, row in link.rows.items() if row is not None} == fits
    nothing = plan(sizes, Cluster(nodes=4, accelerators=2, memory=1.1, reserve=1), micro_batches=[1], offload=False)
    assert all(link.advantage is None for link in nothing.links)


def test_weights_are_shared_beyond_a_node_only_if_they_do_not_fit_into_one() -> None:
    sizes = TransformerShape(layers=8, hidden=2048, vocab=50_000, heads=16)

    def tried(memory: float) -> tuple[list[int], list[int]]:
        cluster = Cluster(nodes=8, accelerators=2, memory=memory, reserve=1)
        rows = plan(sizes, cluster, micro_batches=[1], offload=False).rows
        fitting = [row for row in rows if row.fits and row.choice.accumulation == "sharded"]
        return tuple(sorted({row.choice.zero3_size for row in each}) for each in (rows, fitting))

    assert tried(12.0) == ([1, 2, 16], [1, 2, 16])
    assert tried(6.3) == ([1, 2, 4, 16], [4, 16]), "four ranks suffice, so eight are not tried"
    assert tried(1.1) == ([1, 2, 4, 8, 16], [])


def test_hsdp_is_given_more_nodes_if_it_does_not_fit_into_one() -> None:
    sizes = TransformerShape(layers=8, hidden=2048, vocab=50_000, heads=16)
    found = plan(sizes, Cluster(nodes=8, accelerators=2, memory=7, reserve=1), micro_batches=[1])
    groups = {
        name: {row.choice.zero3_size: row.fits for row in found.other_schemes if row.choice.scheme == name}
        for name in ("HSDP", "HFSDP")
    }
    assert groups == {"HSDP": {2: False, 4: False, 8: True}, "HFSDP": {2: True}}
    for row in found.other_schemes:
        if row.choice.zero3_size == 8 and row.choice.reduce_dtype is torch.float32:
            numel = sizes.numel
            assert row.memory["optimizer"] == pytest.approx(8 * numel / 8, abs=1)
            assert row.sent["replica"] == pytest.approx(2 * 4 * numel / 8 * (1 - 1 / 2))
            assert row.between > row.sent["replica"], "weights cross nodes, too"


def test_what_has_been_estimated_once_is_not_estimated_again() -> None:
    done = []
    found = plan(
        SMALL, Cluster(nodes=4), micro_batches=[1, 2, 8], zero3_sizes=[4, 8], on_estimate=lambda: done.append(1)
    )
    ours = {replace(row.choice, micro_batches=1) for row in found.rows}
    others = {replace(row.choice, micro_batches=1) for row in found.other_schemes}
    # One estimate of memory for each setting with any number of micro-batches, and simulations of 1, 2 and 3 of them.
    assert len(done) == 4 * len(ours) + len(others)
    str(found)
    shown = len(done)
    assert shown > 4 * (len(ours) + len(others)), "the times of other schemes"
    str(found)
    assert len(done) == shown


def test_times_of_what_does_not_fit_are_simulated_when_they_are_read() -> None:
    done = []
    cluster = Cluster(nodes=2, accelerators=2, memory=1.0001, reserve=1)
    found = plan(SMALL, cluster, micro_batches=[1], offload=False, on_estimate=lambda: done.append(1))
    assert not any(row.fits for row in found.rows) and len(done) == len(found.rows) + len(found.other_schemes)
    lacking = [row.excess for row in found.rows]
    assert lacking == sorted(lacking) and len(set(lacking)) > 1, "the closest first"
    assert found.rows[0].step > 0 and len(done) == len(found.rows) + len(found.other_schemes) + 1


def test_sizes_are_those_of_well_known_models() -> None:
    numels = {
        model: sum(each.numel * each.copies for each in UNITS if each.model == model)
        for model in {u.model for u in UNITS}
    }
    llama = TransformerShape(layers=32, hidden=4096, ffn=11008, vocab=32000, heads=32)
    assert llama.numel == numels["Llama 7B"]
    assert (
        TransformerShape(layers=80, hidden=8192, ffn=28672, vocab=32000, heads=64, kv_heads=8).numel
        == numels["Llama 70B"]
    )
    mixtral = TransformerShape(layers=32, hidden=4096, ffn=14336, vocab=32000, heads=32, kv_heads=8, experts=8)
    assert mixtral.numel == numels["Mixtral 8x7B"]


CONFIG = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 128,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


def test_a_config_of_hugging_face_gives_the_sizes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    expected = TransformerShape(layers=2, hidden=64, ffn=96, vocab=128, heads=4, kv_heads=2)
    assert read_config(tmp_path) == read_config(tmp_path / "config.json") == expected
    for change, message in (
        ({"model_type": "walrus"}, "model_type 'walrus' is not supported .*module:function"),
        ({"vocab_size": None}, "lacks 'vocab_size'"),
        ({"hidden_size": 30}, "num_attention_heads=4 does not divide hidden_size=30. Add head_dim to the config"),
        ({"attention_bias": True}, "attention_bias and mlp_bias differ"),
    ):
        wrong = {name: value for name, value in {**CONFIG, **change}.items() if value is not None}
        (tmp_path / "wrong.json").write_text(json.dumps(wrong))
        with pytest.raises(ValueError, match=message):
            read_config(tmp_path / "wrong.json")
    (tmp_path / "wrong.json").write_text("no")
    with pytest.raises(ValueError, match="is not JSON"):
        read_config(tmp_path / "wrong.json")
    with pytest.raises(
        FileNotFoundError, match=r"none.json does not exist. Pass the path of a Hugging Face config.json"
    ):
        read_config(tmp_path / "none.json")


def test_a_cluster_is_read_strictly(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("nodes: 4\nmemory: 40\n")
    assert Cluster.from_yaml(path, between=100.0) == Cluster(nodes=4, memory=40, between=100.0)
    for text, message in (
        ("nodes: 4\nbandwith: 3", "unknown fields bandwith. Use nodes"),
        ("memory: 4", "has no field nodes"),
        ("nodes: many", "nodes must be an int"),
        ("nodes: 0", "nodes must be positive, got 0"),
        ("nodes: 2\nsteps: tree", "steps='tree' is not supported. Use one of"),
        ("- 3", "must contain a mapping of names to values"),
    ):
        path.write_text(text)
        with pytest.raises((TypeError, ValueError), match=message):
            Cluster.from_yaml(path)


def test_what_cannot_be_planned_is_refused() -> None:
    cluster = Cluster(nodes=2, accelerators=2)
    for arguments, settings, message in (
        ((SMALL, cluster), {"zero3_sizes": [3]}, "zero3_size=3 does not divide the 4 ranks"),
        ((SMALL, cluster), {"micro_batches": [0]}, "must be a non-empty list of numbers of at least 1"),
        ((SMALL, cluster), {"accumulations": ["half"]}, "list of 'sharded', 'full', 'local', got .'half'."),
        ((SMALL, cluster), {"accumulations": []}, r"accumulations must be a non-empty list of .* got \[\]"),
        ((SMALL, cluster), {"reduce_dtypes": []}, r"reduce_dtypes must be a non-empty list of .* got \[\]"),
        ((SMALL, cluster), {"reduce_dtypes": ["fp4"]}, "an element of reduce_dtypes is 'fp4'"),
        ((SMALL, cluster), {"zero3_sizes": []}, r"zero3_sizes must be a non-empty list of .* got \[\]"),
        ((SMALL, cluster), {"hop2_codecs": []}, r"hop2_codecs must be a non-empty list of .* got \[\]"),
        ((SMALL, cluster), {"hop2_codecs": "int8_blocks"}, "hop2_codecs must be .* list .*, got 'int8_blocks'"),
        ((SMALL, cluster), {"hop2_codecs": ["int2"]}, "'int8_blocks', 'int4_blocks' or None .*, got .'int2'."),
        ((SMALL, cluster), {"hop2_codecs": [layerzero.Int8Blocks()]}, "or None .*, got .Int8Blocks"),
        ((SMALL, cluster), {"refresh_codecs": ["auto"]}, "'lossless', 'int4_difference' or None .*, got .'auto'."),
        ((SMALL, cluster), {"refresh_codecs": ["lossless"]}, "refresh_codecs contains 'lossless', .* on cuda are not"),
        (
            (SMALL, replace(cluster, device="cpu")),
            {"refresh_codecs": ["lossless"], "param_dtype": "fp32"},
            "refresh_codecs contains 'lossless', .* computes in torch.float32",
        ),
        ((SMALL, cluster), {"replica_reduce_dtypes": ["fp4"]}, "an element of replica_reduce_dtypes is 'fp4'"),
        ((SMALL, cluster), {"accumulation_dtypes": []}, r"accumulation_dtypes must be a non-empty list .* got \[\]"),
        (
            (SMALL, cluster),
            {"accumulation_dtypes": ["fp16"]},
            "accumulation_dtypes contains torch.float16, which shard_",
        ),
        ((SMALL, cluster), {"param_dtype": "fp4"}, "param_dtype is 'fp4'"),
        ((SMALL, cluster), {"tokens": 0}, "tokens=0"),
        ((lambda: 3, cluster), {}, "must return a torch.nn.Module, got int"),
        ((3, cluster), {}, "model must be a module"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            plan(*arguments, **settings)
    with pytest.raises(ValueError, match="heads=3 does not divide hidden=64"):
        TransformerShape(layers=1, hidden=64, vocab=8, heads=3)


# Bytes of weights, gradients, optimizer and buffers on 64 GPUs, 8 of which share the weights.
LARGE = {
    "8B": (TransformerShape(layers=32, hidden=4096, vocab=128256, heads=32, kv_heads=8, ffn=14336), "sharded", 13.5e9),
    "70B": (TransformerShape(layers=80, hidden=8192, vocab=128256, heads=64, kv_heads=8, ffn=28672), "local", 62e9),
}


@pytest.mark.parametrize("name", LARGE)
def test_large_models_fit(name: str) -> None:
    sizes, mode, most = LARGE[name]
    chosen = {"zero3_sizes": [8], "accumulations": [mode], "micro_batches": [4], "reduce_dtypes": [torch.float32]}
    (row,) = plan(sizes, Cluster(nodes=8), offload=False, **chosen).rows
    assert row.peak - row.memory["activations"] <= most
    together, apart = (
        plan(sizes, Cluster(nodes=8), units=units, offload=False, **chosen).rows[0]
        for units in ([TransformerBlock], sizes.units)
    )
    assert apart.peak < together.peak and apart.step < together.step, "the embedding and the head are units"


def _paired(name: str, module: nn.Module) -> str | bool:
    return f"pair {int(name.split('.')[1]) // 2}" if isinstance(module, TransformerBlock) else False


def test_blocks_compute_in_whatever_unit_they_are_and_only_they_compute_again() -> None:
    cluster = Cluster(nodes=2, accelerators=2)
    sizes = TransformerShape(layers=4, hidden=64, vocab=512, heads=2)
    tokens = 128
    blocks, head = (
        4 * tokens * sizes.block_forward_flops_per_token(tokens),
        tokens * sizes.head_forward_flops_per_token(),
    )
    speed = cluster.tflops * 1e12
    for units in ([TransformerBlock], _paired, lambda name, module: False):
        for again in (True, False):
            found = plan(sizes, cluster, units=units, tokens=tokens, micro_batches=[1], recompute=again)
            for row in found.rows:
                assert row.parts["forward"] == pytest.approx((blocks + head) / speed), units
                assert row.parts["backward"] == pytest.approx(((2 + again) * blocks + 2 * head) / speed), units


def test_a_plan_needs_no_memory_for_the_model_and_leaves_it_as_it_was() -> None:
    model = SMALL.build()
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    found = plan(model, Cluster(nodes=2), units=["TransformerBlock"], micro_batches=[1], zero3_sizes=[8])
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == before
    assert all(parameter.is_meta for parameter in model.parameters())
    assert found.units == 4 and not torch.distributed.is_initialized()


def test_numbers_have_units_for_people() -> None:
    assert [size_text(n) for n in (0, 999, 1000, 1_240_000, 999_600, 5e13)] == [
        "0 B", "999 B", "1.00 kB", "1.24 MB", "1.00 MB", "50.0 TB",
    ]  # fmt: skip
    assert [seconds_text(s) for s in (0, 2.5, 0.0125, 1.5e-5)] == ["0.00 s", "2.50 s", "12.5 ms", "15 µs"]
    assert si_text(12_345) == "12.3 k"
    assert table(("a", "bb"), [("x", "1"), ("yy", "22")]) == "a   bb\nx    1\nyy  22"
