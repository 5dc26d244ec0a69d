"""Plans predict the memory of a run to the byte and its traffic, and compare schemes by closed formulas."""

from __future__ import annotations

import json
import math
import warnings
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import layerzero
from benchmarks.model_shapes import UNITS
from layerzero import Codecs, LayerZeroConfig, Offload, PrecisionPolicy
from layerzero.device.buffer_pools import FullBufferPool
from layerzero.planning import Cluster, StepCost, TransformerShape, plan, read_config
from layerzero.planning.plan_report import _count_text, seconds_text
from layerzero.planning.step_cost import MARGIN, Pass, paying_links
from layerzero.utils.text_tables import size_text, table
from tests.support.ranks import mesh_of, run_ranks

SMALL = TransformerShape(layers=3, hidden=64, ffn=160, vocab=256, heads=4)
LARGE = TransformerShape(layers=8, hidden=2048, vocab=50_000, heads=16)

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


BF16 = PrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
ALL_BF16 = PrecisionPolicy(param_dtype=torch.bfloat16)
SETTINGS: list[dict[str, object]] = [
    {"zero3_size": 1, "accumulation": "full", "mp_policy": BF16},
    {"zero3_size": 2, "accumulation": "sharded", "mp_policy": BF16},
    {"zero3_size": 2, "accumulation": "full", "mp_policy": BF16},
    {"zero3_size": 4, "accumulation": "sharded", "mp_policy": BF16},
    {"zero3_size": 2, "accumulation": "sharded", "mp_policy": PrecisionPolicy()},
    {"zero3_size": 4, "accumulation": "full", "mp_policy": PrecisionPolicy()},
    {"zero3_size": 2, "accumulation": "sharded", "mp_policy": ALL_BF16},
    {"zero3_size": 2, "accumulation": "full", "mp_policy": ALL_BF16},
    {"zero3_size": 2, "accumulation": "local", "mp_policy": BF16},
    {"zero3_size": 1, "accumulation": "local", "mp_policy": BF16},
    {"zero3_size": 2, "accumulation": "local", "mp_policy": PrecisionPolicy(), "offload": Offload(optimizer=True)},
    {"zero3_size": 2, "mp_policy": BF16, "offload": Offload(grads=True)},
    {"zero3_size": 1, "mp_policy": BF16, "offload": Offload(grads=True)},
    {"zero3_size": 2, "mp_policy": BF16, "offload": Offload(optimizer=True)},
    {"zero3_size": 4, "mp_policy": BF16, "offload": Offload(optimizer=True)},
    {"zero3_size": 2, "mp_policy": BF16, "accumulation": "full", "offload": Offload(grads=True, optimizer=True)},
    {"zero3_size": 2, "mp_policy": BF16, "offload": Offload(optimizer=True, params=True)},
    {"zero3_size": 1, "mp_policy": BF16, "offload": Offload(params=True)},
    {"zero3_size": 2, "mp_policy": PrecisionPolicy(), "offload": Offload(grads=True, params=True)},
    {"zero3_size": 2, "mp_policy": BF16, "prefetch": 3},
    {"zero3_size": 2, "mp_policy": BF16, "reshard_after_forward": False},
    {"zero3_size": 4, "mp_policy": BF16, "reshard_after_forward": 2},
    {"zero3_size": 2, "mp_policy": BF16, "reshard_after_forward": "step"},
    {"zero3_size": 4, "mp_policy": BF16, "reshard_after_forward": "step", "accumulation": "full"},
    {"zero3_size": 2, "mp_policy": replace(BF16, replica_reduce_dtype=torch.bfloat16)},
    {"zero3_size": 2, "mp_policy": BF16, "codecs": Codecs(hop2=layerzero.Int8Blocks())},
    {"zero3_size": 2, "mp_policy": replace(BF16, accumulation_dtype=torch.bfloat16)},
    {"zero3_size": 2, "mp_policy": replace(ALL_BF16, accumulation_dtype=torch.bfloat16), "accumulation": "full"},
    {"zero3_size": 1, "mp_policy": replace(BF16, accumulation_dtype=torch.bfloat16), "offload": Offload(grads=True)},
    {"zero3_size": 1, "mp_policy": BF16, "accumulation": "local", "codecs": Codecs(hop2=layerzero.Int4Blocks())},
]


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


CASES: list[tuple[type[Net], dict[str, Any], int]] = [
    *((Trained, settings, micro_batches) for settings in SETTINGS[:4] for micro_batches in (1, 3)),
    *((model, SETTINGS[index], 3) for model in (Net, Adapted) for index in (1, 2, 8)),
    *((Net, settings, 2) for settings in SETTINGS[4:]),
]


def _measured(rank: int) -> list[tuple[dict[str, int], layerzero.MemoryReport]]:
    """Return the bytes of a step by axis, and the memory, for each case."""
    found = []
    for make, settings, micro_batches in CASES:
        given = {name: value for name, value in settings.items() if name != "zero3_size"}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the CPU has no device memory to free
            model = layerzero.shard_model(make(), mesh=mesh_of(settings["zero3_size"]), units={Block}, **given)
        optimizer = layerzero.shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3), model)
        for _ in range(3):
            layerzero.traffic(model, reset=True)
            for index in range(micro_batches):
                with layerzero.no_sync(model) if index + 1 < micro_batches else nullcontext():
                    model(torch.ones(2, 5)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append((layerzero.traffic(model).bytes_by_axis, layerzero.memory(model)))
    return found


@pytest.mark.slow
def test_a_plan_is_to_the_byte_what_real_ranks_hold_and_send() -> None:
    cluster = Cluster(nodes=2, accelerators=2, device="cpu")
    measured = run_ranks(_measured, timeout=240)
    if FullBufferPool.can_cache:
        for held in (report for found in measured for _, report in found):
            assert held.measured_peak == held.predicted_peak, "on all ranks, which hold different numbers of elements"
    for case, (sent, held) in zip(CASES, measured[0], strict=True):
        make, settings, micro_batches = case
        config = LayerZeroConfig(units={Block}, **settings)
        found = plan(make, cluster, config, micro_batches=micro_batches)
        row = found.estimator.layerzero(config.zero3_size, config.accumulation)
        assert (row.cost.zero3, row.cost.replica) == (sent.get("zero3", 0), sent.get("replica", 0)), case
        if FullBufferPool.can_cache:  # a torch that moves memory between storages, as 2.13 does
            assert {k: v for k, v in row.memory.items() if v} == {k: v for k, v in held.measured.items() if v}, case
            assert row.peak == held.measured_peak, case


# --- formulas ---


# Numbers of the planner that simulated steps: settings, peak, and bytes sent inside the ZeRO-3 group, to other replicas
# and to other nodes. It assumed whole blocks in encoded gradients (100,203 bytes instead of 100,392). Hop 2 no longer
# decodes the parts of the other 3 replicas one by one (peak 1,910,408 before: 3 parts of 6,016 elements in fp32).
FP32, ALL16 = (PrecisionPolicy(torch.bfloat16, dtype) for dtype in (torch.float32, torch.bfloat16))
OFFLOADS = {"offload": Offload(grads=True, optimizer=True)}
NARROW = replace(FP32, replica_reduce_dtype=torch.bfloat16, accumulation_dtype=torch.bfloat16)
RECORDED: list[tuple[int, str, int, dict[str, Any], tuple[float, ...]]] = [
    (1, "sharded", 3, {}, (1969208, 0, 996840, 249210)),
    (4, "sharded", 3, {}, (1801352, 3115872, 199368, 199368)),
    (4, "full", 2, {"mp_policy": ALL16}, (2269016, 1279776, 132912, 132912)),
    (2, "local", 2, {}, (2045816, 1384832, 775320, 387660)),
    (16, "sharded", 1, {}, (1505728, 1298280, 0, 324570)),
    (8, "sharded", 2, OFFLOADS, (1508752, 2423456, 66456, 672320)),
    (4, "sharded", 1, {"mp_policy": NARROW}, (1845096, 1038624, 132912, 132912)),
    (4, "sharded", 2, {"codecs": Codecs(hop2=layerzero.Int8Blocks())}, (1838216, 2077248, 100392, 100392)),
    (4, "sharded", 2, {"codecs": Codecs(refresh=layerzero.Int4Difference())}, (1801352, 2077248, *[151031.64375] * 2)),
    (4, "local", 1, {"offload": Offload(params=True)}, (1676088, 1038624, 199368, 199368)),
    (2, "sharded", 2, {"codecs": Codecs(refresh="lossless")}, (3233720, 1049472, 198415.8, 198415.8)),
]
OTHERS = {  # by scheme, with three micro-batches and fp32 gradients
    "FSDP2": (1257280, 3834360, 0, 958590),
    "HSDP": (1780864, 3067488, 261792, 261792),
    "HFSDP": (1475440, 3067488, 196344, 196344),
    "ZeRO-1": (1882576, 0, 981720, 245430),
}


@pytest.mark.parametrize(("size", "mode", "micro_batches", "settings", "expected"), RECORDED, ids=str)
def test_memory_and_traffic_are_those_recorded(
    size: int, mode: str, micro_batches: int, settings: dict[str, Any], expected: tuple[float, ...]
) -> None:
    on_cpu = "lossless" in str(settings)
    cluster = Cluster(nodes=2, accelerators=2, device="cpu") if on_cpu else Cluster(nodes=4, accelerators=4)
    config = LayerZeroConfig(**{"mp_policy": FP32, "zero3_size": size, **settings})
    found = plan(SMALL, cluster, config, tokens=128, micro_batches=micro_batches)
    row = found.estimator.layerzero(size, mode)
    numbers = (row.peak, row.cost.zero3, row.cost.replica, row.cost.between)
    assert numbers == pytest.approx(expected, rel=1e-12)
    if micro_batches == 3:
        others = {r.scheme: (r.peak, r.cost.zero3, r.cost.replica, r.cost.between) for r in found.other_schemes}
        assert others == {scheme: pytest.approx(numbers, rel=1e-12) for scheme, numbers in OTHERS.items()}


def test_frozen_parameters_have_no_gradients_in_any_scheme() -> None:
    """Frozen parameters are held and gathered. Nothing else is done with them."""
    cluster = Cluster(nodes=2, accelerators=2, device="cpu")
    numel = sum(parameter.numel() for parameter in Net().parameters())
    whole, part = (
        plan(make, cluster, units={Block}, micro_batches=3, tokens=64, recompute=False) for make in (Trained, Adapted)
    )
    assert (whole.trained_numel, part.numel, part.trained_numel) == (numel, numel, 13)
    assert " trained)" not in str(whole) and f"{_count_text(numel)} parameters (13 trained) in 6 units" in str(part)
    for row, other in zip(part.other_schemes, whole.other_schemes, strict=True):
        scheme = row.scheme
        states = 2 if scheme == "HSDP" else 4
        kept = 4 * (13 if scheme in ("HFSDP", "ZeRO-1") else numel) / states
        assert row.memory["masters"] == round(kept) and row.memory["optimizer"] == round(8 * 13 / states), scheme
        assert row.memory.get("gathered") == other.memory.get("gathered")
        assert row.cost.replica == pytest.approx(other.cost.replica * 13 / numel), scheme
        reduced = 3 * 4 * (numel - 13) * (1 - 1 / row.zero3_size)
        assert row.cost.zero3 == pytest.approx(other.cost.zero3 - reduced), scheme
    forward, backward = part.estimator.compute[:2]
    assert backward == forward and whole.estimator.compute.backward == 2 * forward, "no gradients of matrices"


def test_only_blocks_compute_again() -> None:
    tokens, sizes = 128, TransformerShape(layers=4, hidden=64, vocab=512, heads=2)
    blocks = 4 * tokens * sizes.block_forward_flops_per_token(tokens)
    head = tokens * sizes.head_forward_flops_per_token()
    for again in (True, False):
        compute = plan(sizes, Cluster(nodes=1), tokens=tokens, recompute=again).estimator.compute
        assert compute[:2] == pytest.approx((blocks + head, (2 + again) * blocks + 2 * head))


def test_a_step_takes_as_long_as_the_busiest_resource_of_each_pass() -> None:
    cluster = Cluster(nodes=4, accelerators=2, inside=1.0, between=8.0)  # 1 GB/s each
    forward, backward = Pass(3, 1.0, zero3=2e9), Pass(1, 4.0, zero3=1e9, replica=3e9)
    cost = StepCost((forward, backward), 2, cluster)
    assert (cost.zero3, cost.replica, cost.between) == (7e9, 3e9, 3e9)
    assert cost.seconds() == 3 * 2.0 + 6.0, "both ranks of a node send to other nodes"
    assert cost.seconds(16.0) == 3 * 2.0 + 4.0 and cost.hidden_from == 8 * 2 * 3.0 / 4.0
    alone = StepCost((forward, backward), 1, cluster)
    assert alone.between == 1.5e9, "a replica group has two ranks on each node, so its data leaves the node once"
    assert alone.seconds(1e9) == 3 * 2.0 + 4.0
    spanning = StepCost((forward, backward), 4, cluster)
    assert spanning.between == (7e9 + 2 * 3e9) / 2, "the data of a ring over several nodes leaves each node once"
    one_node = StepCost((forward,), 2, replace(cluster, nodes=1))
    assert one_node.between == one_node.hidden_from == 0


def test_links_at_which_layerzero_pays_are_those_at_which_its_step_is_shorter() -> None:
    rows = []
    for count in (1, 4):
        found = plan(LARGE, Cluster(nodes=8, accelerators=4), micro_batches=count)
        rows += [*found.rows[::3], *found.other_schemes]
    texts = set()
    for ours in rows:
        for theirs in rows:
            bounds = paying_links(ours.cost, theirs.cost)
            slowest, fastest = bounds or (0.0, 0.0)
            texts.add((slowest > 0, 0 < fastest < math.inf))
            for link in (1.001 * fastest, 0.999 * fastest, 1.001 * slowest, 10 * fastest):
                if 0 < link < math.inf:
                    pays = ours.cost.seconds(link) < (1 - MARGIN) * theirs.cost.seconds(link)
                    assert pays == (slowest < link < fastest), (link, bounds)
            assert bounds is not None or not ours.cost.seconds(1) < 0.96 * theirs.cost.seconds(1)
    assert texts >= {(False, False), (False, True), (True, True)}


# --- settings that are tried ---


def test_weights_are_shared_beyond_a_node_only_if_they_do_not_fit_into_one() -> None:
    narrow = LayerZeroConfig(mp_policy=ALL16)

    def tried(memory: float) -> tuple[list[int], list[int]]:
        rows = plan(LARGE, Cluster(nodes=8, accelerators=2, memory=memory, reserve=1), narrow).rows
        fitting = [row for row in rows if row.fits and row.accumulation == "sharded" and not row.offload]
        return tuple(sorted({row.zero3_size for row in each}) for each in (rows, fitting))  # type: ignore[return-value]

    assert tried(12.0) == ([1, 2, 16], [1, 2, 16])
    assert tried(6.3) == ([1, 2, 4, 16], [4, 16]), "four ranks suffice, so eight are not tried"
    assert tried(1.1) == ([1, 2, 4, 8, 16], [])
    given = LayerZeroConfig(zero3_size=4)
    assert {row.zero3_size for row in plan(SMALL, Cluster(nodes=8), given).rows} == {4}
    assert {row.zero3_size for row in plan(SMALL, Cluster(nodes=8), given, zero3_sizes=[2, 8]).rows} == {2, 8}


def test_hsdp_is_given_more_nodes_if_it_does_not_fit_into_one() -> None:
    found = plan(LARGE, Cluster(nodes=8, accelerators=2, memory=7, reserve=1), LayerZeroConfig(mp_policy=ALL16))
    groups = {
        name: {row.zero3_size: row.fits for row in found.other_schemes if row.scheme == name}
        for name in ("HSDP", "HFSDP")
    }
    assert groups == {"HSDP": {2: False, 4: False, 8: True}, "HFSDP": {2: True}}
    (hsdp,) = (row for row in found.compared if row.scheme == "HSDP")
    assert hsdp.zero3_size == 8 and hsdp.cost.between > hsdp.cost.replica, "weights cross nodes, too"
    assert hsdp.memory["optimizer"] == pytest.approx(8 * found.numel / 8, abs=1)


def test_each_mode_and_each_offload_is_tried_where_it_makes_a_difference() -> None:
    cluster = Cluster(nodes=2, accelerators=2)
    modes = {(row.zero3_size, row.accumulation) for row in plan(SMALL, cluster).rows}
    assert modes == {
        *((1, mode) for mode in ("sharded", "local")),  # without ZeRO-3, "full" is "sharded"
        *((2, mode) for mode in ("sharded", "full", "local")),
        *((4, mode) for mode in ("sharded", "full")),  # with one replica, "local" is "sharded"
    }
    offloads = {row.offload for row in plan(SMALL, replace(cluster, memory=1.0001, reserve=1)).rows}
    kinds = [(), ("grads",), ("optimizer",), ("grads", "optimizer")]
    assert offloads == {*kinds, *((*kind, "params") for kind in kinds)}
    with_offload = plan(LARGE, Cluster(nodes=1, accelerators=2, memory=12, reserve=1))
    assert any(row.offload for row in with_offload.rows if row.fits) and with_offload.best is not None


def test_the_simplest_of_the_fastest_settings_are_recommended() -> None:
    fast = plan(LARGE, Cluster(nodes=4, accelerators=4), micro_batches=4)
    assert fast.best is not None and (fast.best.zero3_size, fast.best.accumulation) == (4, "sharded")
    assert all(row.cost.seconds() >= (1 - MARGIN) * fast.best.cost.seconds() for row in fast.rows if row.fits)
    alike = [row for row in fast.rows if (1 - MARGIN) * row.cost.seconds() <= fast.rows[0].cost.seconds()]
    assert any(row.peak < fast.best.peak for row in alike), "but they send gradients between nodes more often"
    once = plan(LARGE, Cluster(nodes=4, accelerators=4)).best
    assert once is not None and once.accumulation == "local", "with one micro-batch, it sends them only once, too"
    tight = plan(LARGE, Cluster(nodes=4, accelerators=4, memory=7.2, reserve=1), micro_batches=4)
    assert tight.best is not None and not tight.best.offload, "offloading is the last resort"
    chosen = fast.config
    assert chosen is not None and (chosen.zero3_size, chosen.accumulation, chosen.offload.grads) == (
        4,
        "sharded",
        False,
    )


def test_a_model_that_does_not_fit_is_said_to_lack_so_much() -> None:
    cluster = Cluster(nodes=1, accelerators=2, memory=2, reserve=1, host_memory=1)
    found = plan(LARGE, cluster, zero3_sizes=[2])
    assert found.best is None and found.config is None
    lacking = [(row.excess, row.host_excess) for row in found.rows]
    assert lacking == sorted(lacking) and lacking[0][0] > 0 and lacking[0][1] > min(host for _, host in lacking)
    closest = found.rows[0]
    assert closest.excess == closest.peak - 1e9 and closest.host_excess == 2 * closest.host - 1e9
    assert "optimizer" in closest.offload
    need = (
        f"need {size_text(closest.excess)} more per accelerator and {size_text(closest.host_excess)} more host memory"
    )
    assert found.why.startswith("No settings fit. The settings that come closest (layerzero, ") and need in found.why
    shown = f"  -{size_text(closest.excess)}, host -{size_text(closest.host_excess)}  "
    assert shown in str(found), "both are missing"
    plenty = plan(LARGE, replace(cluster, host_memory=1e6), zero3_sizes=[2])
    assert plenty.rows[0].offload == closest.offload, "host memory does not decide what is closest"


def test_a_plan_needs_no_memory_for_the_model_and_leaves_it_as_it_was() -> None:
    model = SMALL.build()
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    found = plan(model, Cluster(nodes=2), units=["TransformerBlock"], zero3_sizes=[8])
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == before
    assert all(parameter.is_meta for parameter in model.parameters())
    assert len(found.estimator.units) == 4 and not torch.distributed.is_initialized()


# --- input ---


def test_sizes_are_those_of_well_known_models() -> None:
    numels = {
        model: sum(each.numel * each.copies for each in UNITS if each.model == model)
        for model in {u.model for u in UNITS}
    }
    llama = TransformerShape(layers=32, hidden=4096, ffn=11008, vocab=32000, heads=32)
    large = TransformerShape(layers=80, hidden=8192, ffn=28672, vocab=32000, heads=64, kv_heads=8)
    mixtral = TransformerShape(layers=32, hidden=4096, ffn=14336, vocab=32000, heads=32, kv_heads=8, experts=8)
    for name, shape in (("Llama 7B", llama), ("Llama 70B", large), ("Mixtral 8x7B", mixtral)):
        assert plan(shape, Cluster(nodes=1), zero3_sizes=[8]).numel == numels[name]


# Bytes of weights, gradients, optimizer and buffers on 64 GPUs, 8 of which share the weights.
FITTING = {
    "8B": (TransformerShape(layers=32, hidden=4096, vocab=128256, heads=32, kv_heads=8, ffn=14336), "sharded", 13.5e9),
    "70B": (TransformerShape(layers=80, hidden=8192, vocab=128256, heads=64, kv_heads=8, ffn=28672), "local", 62e9),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FITTING)
def test_large_models_fit(name: str) -> None:
    sizes, mode, most = FITTING[name]
    found = plan(sizes, Cluster(nodes=8), zero3_sizes=[8], micro_batches=4)
    (row,) = (row for row in found.rows if row.accumulation == mode and not row.offload and row.reshards is True)
    assert row.peak - row.memory["activations"] <= most


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
        ({"hidden_size": 30}, "wrong.json: heads=4 does not divide hidden=30. Change one of them, or pass head_dim"),
        ({"attention_bias": True}, "attention_bias and mlp_bias differ"),
    ):
        wrong = {name: value for name, value in {**CONFIG, **change}.items() if value is not None}
        (tmp_path / "wrong.json").write_text(json.dumps(wrong))
        with pytest.raises(ValueError, match=message):
            read_config(tmp_path / "wrong.json")
    (tmp_path / "wrong.json").write_text("no")
    with pytest.raises(ValueError, match="is not JSON"):
        read_config(tmp_path / "wrong.json")
    with pytest.raises(FileNotFoundError, match=r"none.json"):
        read_config(tmp_path / "none.json")


def test_what_cannot_be_planned_is_refused() -> None:
    cluster = Cluster(nodes=2, accelerators=2)
    on_cpu = replace(cluster, device="cpu")
    lossless = LayerZeroConfig(mp_policy=FP32, codecs=Codecs(refresh="lossless"))
    fp16 = LayerZeroConfig(mp_policy=PrecisionPolicy(torch.float16), codecs=Codecs(hop2=layerzero.Int4Blocks()))
    for arguments, settings, message in (
        ((SMALL, cluster), {"zero3_sizes": [3]}, "zero3_size=3 does not divide the 4 ranks"),
        ((SMALL, cluster), {"micro_batches": 0}, "micro_batches=0 must be at least 1"),
        ((SMALL, cluster), {"tokens": 0}, "tokens=0"),
        ((SMALL, cluster, lossless), {}, "Codecs.refresh='lossless' .* only CPUs"),
        ((SMALL, on_cpu, replace(lossless, mp_policy=PrecisionPolicy())), {}, "computes in torch.float32"),
        ((SMALL, cluster, fp16), {}, "Int4Blocks adds the encoding errors .* fp16"),
        ((lambda: 3, cluster), {}, "must return a torch.nn.Module, got int"),
        ((3, cluster), {}, "model must be a module"),
        ((SMALL, cluster, LayerZeroConfig(zero3_size=3)), {}, "zero3_size=3 does not divide the 4 ranks"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            plan(*arguments, **settings)
    for fields, message in (
        ({"nodes": "many"}, "nodes must be an int"),
        ({"nodes": 0}, "nodes must be positive, got 0"),
        ({"nodes": 1, "memory": True}, "memory must be a number"),
        ({"nodes": 1, "reserve": -1}, "reserve must be 0 or positive"),
        ({"nodes": 1, "device": "toaster"}, "device='toaster' is not supported"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            Cluster(**fields)
    with pytest.raises(ValueError, match="heads=3 does not divide hidden=64"):
        TransformerShape(layers=1, hidden=64, vocab=8, heads=3)


def test_numbers_have_units_for_people() -> None:
    assert [size_text(n) for n in (0, 999, 1000, 1_240_000, 999_600, 5e13)] == [
        "0 B", "999 B", "1.00 kB", "1.24 MB", "1.00 MB", "50.0 TB",
    ]  # fmt: skip
    assert [seconds_text(s) for s in (0, 2.5, 0.0125, 1.5e-5)] == ["0.00 s", "2.50 s", "12.5 ms", "15 µs"]
    assert _count_text(12_345) == "12.3 k"
    assert table(("a", "bb"), [("x", "1"), ("yy", "22")]) == "a   bb\nx    1\nyy  22"
