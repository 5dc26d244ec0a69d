"""layerzero.outer trains as DiLoCo does in one process, keeps the errors of messages, and resumes."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.optim import Optimizer

import layerzero
from layerzero import Codecs, Offload
from layerzero.dtensor.local_shard import plain
from layerzero.outer_steps import OuterSteps, divide_into_fragments, start_positions
from tests.support.models import (
    BF16,
    IntegerNet,
    assert_close,
    different,
    exact_model,
    exact_sgd,
    full_gradients,
    full_parameters,
    integer_batch,
    integer_loss,
    integer_net,
    union,
    update,
)
from tests.support.ranks import BOTH, on_ranks


def sites_of(sites: int, zero3_size: int = 1) -> DeviceMesh:
    """Return a mesh of all ranks. A site has consecutive ranks."""
    replicas = dist.get_world_size() // sites // zero3_size
    return init_device_mesh("cpu", (sites, replicas, zero3_size), mesh_dim_names=("site", "replica", "zero3"))


def build(
    mesh: DeviceMesh, *, net: nn.Module | None = None, settings: dict[str, Any] | None = None, **options: Any
) -> tuple[nn.Module, Optimizer, OuterSteps]:
    model, optimizer = exact_model(net or integer_net(), mesh=mesh["replica", "zero3"], **settings or {})
    options = {"every": 2, "warmup": 0, "lr": 0.5, "momentum": 0.5, **options}
    return model, optimizer, layerzero.outer(model, optimizer, sites=mesh["site"], **options)


def advance(trained: tuple[nn.Module, Optimizer, OuterSteps], rank: int, step: int) -> None:
    model, optimizer, outer = trained
    integer_loss(model, integer_batch(step=step, rank=rank)).backward()
    update(optimizer)
    outer.step()


class Alone:
    """DiLoCo in one process, in fp64, with torch's SGD for the outer steps."""

    def __init__(
        self,
        sites: int,
        *,
        world_size: int = 4,
        every: int,
        warmup: int,
        delay: int = 0,
        lr: float = 0.5,
        momentum: float = 0.5,
        first: dict[str, int] | None = None,
    ) -> None:
        self.nets = [integer_net().double() for _ in range(sites)]
        self.inner = [exact_sgd(net.parameters()) for net in self.nets]
        self.anchors: dict[str, Tensor] = {}
        self.outer: dict[str, Optimizer] = {}
        self.settings = (every, warmup, delay, lr, momentum)
        self.first = first or {name: every for name, _ in self.nets[0].named_parameters()}  # step of the first exchange
        self.flying: dict[str, tuple[int, list[Tensor]]] = {}
        self.ranks = [range(world_size // sites * site, world_size // sites * (site + 1)) for site in range(sites)]
        self.steps = 0

    def step(self, step: int) -> None:
        every, warmup, delay, lr, momentum = self.settings
        synchronous = self.steps < warmup
        for net, ranks in zip(self.nets, self.ranks, strict=True):
            inputs, targets = union([integer_batch(step=step, rank=rank) for rank in ranks])
            integer_loss(net, (inputs.double(), targets.double())).backward()
        if synchronous:
            for parameters in zip(*(net.parameters() for net in self.nets), strict=True):
                mean = torch.stack([p.grad for p in parameters]).mean(0)
                for parameter in parameters:
                    parameter.grad = mean.clone()
        for inner in self.inner:
            update(inner)
        self.steps += 1
        if self.steps >= warmup:
            self._exchange(self.steps - warmup, every, delay, lr, momentum)

    def begin(self, lr: float, momentum: float) -> None:
        for name, parameter in self.nets[0].named_parameters():
            self.anchors[name] = parameter.detach().clone()
            self.outer[name] = torch.optim.SGD([self.anchors[name]], lr=lr, momentum=momentum, nesterov=momentum > 0)

    @torch.no_grad()
    def _exchange(self, since: int, every: int, delay: int, lr: float, momentum: float) -> None:
        if since == 0:
            self.begin(lr, momentum)
            return
        parameters = [dict(net.named_parameters()) for net in self.nets]
        for name, (due, _) in list(self.flying.items()):
            if due == since:
                self._take(name, parameters)
        for name, first in self.first.items():
            if since >= first and (since - first) % every == 0:
                self.flying[name] = (since + delay, [each[name].clone() for each in parameters])
                if not delay:
                    self._take(name, parameters)

    def _take(self, name: str, parameters: list[dict[str, Tensor]]) -> None:
        _, sent = self.flying.pop(name)
        anchor = self.anchors[name]
        anchor.grad = torch.stack([anchor - each for each in sent]).mean(0)
        self.outer[name].step()
        for each, begun in zip(parameters, sent, strict=True):
            each[name].copy_(anchor + (each[name] - begun))


def first_exchanges(outer: OuterSteps) -> dict[str, int]:
    """Return the number of steps after the warm-up at which each parameter is first exchanged."""
    every, fragments = outer.settings.every, outer.settings.fragments
    return {
        member.name: every * (index + 1) // fragments
        for index, handles in enumerate(outer._fragment_handles)
        for handle in handles
        for member in handle.members
    }


CASES = [
    {"every": 2, "warmup": 0},
    {"every": 3, "warmup": 2, "momentum": 0.0, "lr": 1.0},
    {"every": 3, "warmup": 1, "delay": 2},
    {"every": 4, "warmup": 0, "fragments": 2, "delay": 1},
    {"every": 4, "warmup": 1, "fragments": 4, "delay": 3},
]


@pytest.mark.default_sample(1)
@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case in CASES[1:4:2] else pytest.mark.slow) for case in CASES], ids=str
)
@on_ranks()
def test_outer_steps_are_those_of_one_process(rank: int, case: dict[str, Any]) -> None:
    for sites, zero3_size in ((2, 1), (2, 2), (4, 1)):
        mesh = sites_of(sites, zero3_size)
        trained = build(mesh, **case)
        options = {key: value for key, value in case.items() if key != "fragments"}
        alone = Alone(sites, first=first_exchanges(trained[2]), **options)
        if not case["warmup"]:
            alone.begin(alone.settings[3], alone.settings[4])
        for step in range(8):
            advance(trained, rank, step)
            alone.step(step)
            net = alone.nets[mesh.get_local_rank("site")]
            ours = {name: p.double() for name, p in full_parameters(trained[0]).items()}
            theirs = {name: p.detach() for name, p in net.named_parameters()}
            text = f"{sites} sites, S={zero3_size}, {case}, after step {step + 1}"
            if step < 4:  # later, fp32 has too few digits for exact sums
                assert not (wrong := different(ours, theirs)), f"{text}: {wrong}"
            assert_close(ours, theirs, text)
        layerzero.close(trained[0])


class PartlyUsed(IntegerNet):
    """IntegerNet of which the sites can use different units."""

    uses_second = True

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x) + self.shift
        return self.head((hidden + self.second(x.flip(1)) if self.uses_second else hidden).relu())


@pytest.mark.default_sample(1)
@pytest.mark.parametrize("clips", [False, True], ids=["exact", "clipped"])
@on_ranks()
def test_the_warm_up_is_synchronous_training(rank: int, clips: bool) -> None:
    for zero3_size in (1, 2):
        mesh = sites_of(2, zero3_size)
        net = PartlyUsed()
        net.load_state_dict(integer_net(seed=rank // 2).state_dict())  # the weights of the first site count
        model, optimizer, outer = build(mesh, net=net, warmup=3)
        net.uses_second = rank < 2
        alone = [PartlyUsed() for _ in range(2)]
        for each in alone:
            each.load_state_dict(integer_net().state_dict())
        alone[1].uses_second = False
        theirs = [exact_sgd(each.parameters()) for each in alone]
        for step in range(3):
            integer_loss(model, integer_batch(step=step, rank=rank)).backward()
            norm = None
            if clips:
                outer.average_gradients()
                outer.average_gradients()
                norm = layerzero.clip_grad_norm_(model, 0.5)
            update(optimizer)
            outer.step()
            calls = layerzero.traffic(model, reset=True).calls["site_gradients"]
            assert calls == 2, "which parameters have a gradient, and the gradients"
            for each, ranks in zip(alone, ((0, 1), (2, 3)), strict=True):
                integer_loss(each, union([integer_batch(step=step, rank=other) for other in ranks])).backward()
            for parameters in zip(*(each.parameters() for each in alone), strict=True):
                given = [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters]
                for parameter in parameters:
                    parameter.grad = (given[0] + given[1]) / 2
            for each, inner in zip(alone, theirs, strict=True):
                if clips:
                    expected = nn.utils.clip_grad_norm_(each.parameters(), 0.5)
                    torch.testing.assert_close(norm, expected)
                update(inner)
            case = f"S={zero3_size}, step {step}"
            expected = {name: p.detach() for name, p in alone[0].named_parameters()}
            if clips:
                assert_close(full_parameters(model), expected, case)
            else:
                assert not (wrong := different(full_parameters(model), expected)), f"{case}: {wrong}"
        assert not outer.in_warmup
        integer_loss(model, integer_batch(step=3, rank=rank)).backward()
        before = full_gradients(model)
        outer.average_gradients()
        assert not different(full_gradients(model), before), "gradients are averaged after the warm-up"


@pytest.mark.parametrize("zero3_size", [1, 2])
@on_ranks()
def test_micro_batches_and_closures_of_synchronous_steps_count_once(rank: int, zero3_size: int) -> None:
    model, optimizer, outer = build(sites_of(2, zero3_size), warmup=3)
    net = integer_net()
    inner = exact_sgd(net.parameters())
    for step in range(3):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = integer_loss(model, integer_batch(step=step, rank=rank))
            loss.backward()
            return loss

        if step < 2:
            with layerzero.no_sync(model):
                closure()
            if step:  # otherwise the average reduces what is left
                integer_loss(model, integer_batch(step=step, rank=rank, micro_batch=1)).backward()
            outer.average_gradients()
        optimizer.step(closure if step == 2 else None)
        optimizer.zero_grad()
        outer.step()
        for micro_batch in range(2 if step == 1 else 1):
            batches = [integer_batch(step=step, rank=other, micro_batch=micro_batch) for other in range(4)]
            integer_loss(net, union(batches)).backward()
        update(inner)
        assert not (wrong := different(full_parameters(model), dict(net.named_parameters()))), f"step {step}: {wrong}"


def _gather_sites(mesh: DeviceMesh, weights: dict[str, Tensor]) -> dict[str, list[Tensor]]:
    """Return the weights of all sites, by name."""
    found = {}
    for name, weight in weights.items():
        found[name] = [torch.empty_like(weight) for _ in range(mesh.size(0))]
        dist.all_gather(found[name], weight.contiguous(), group=mesh.get_group("site"))
    return found


@pytest.mark.parametrize(
    ("codec", "bits"),
    [(layerzero.Int8Blocks(), 7), (layerzero.Int4Blocks(feedback=False), 3)],
    ids=["int8", "int4"],
)
@on_ranks()
def test_errors_of_messages_enter_the_next_exchange(rank: int, codec: object, bits: int) -> None:
    mesh = sites_of(2, 2)
    torch.manual_seed(rank // 2)
    model, _optimizer, outer = build(mesh, every=2, lr=1.0, momentum=0.0, codec=codec)
    with torch.no_grad():
        for parameter in model.parameters():
            plain(parameter).add_(torch.randn_like(plain(parameter)))  # as if the sites had learned something
    layerzero.refresh(model)
    moved = _gather_sites(mesh, full_parameters(model))
    spread = max(float((a - b).abs().max()) for a, b in moved.values())
    for exchange in range(4):
        outer.step()
        outer.step()
        now = _gather_sites(mesh, full_parameters(model))
        for name, weights in now.items():
            before, after = (torch.stack(each).double().mean(0) for each in (moved[name], weights))
            torch.testing.assert_close(after, before, rtol=0, atol=1e-5, msg=lambda m, n=name: f"lost in {n}: {m}")
        apart = max(float((a - b).abs().max()) for a, b in now.values())
        assert exchange or apart > 0, "the messages are exact, so this test proves nothing"
        assert apart <= max(spread / (2**bits - 3), 1e-6), f"exchange {exchange}: {apart} of {spread}"
        spread = apart
    assert layerzero.fingerprint(model).ok


@pytest.mark.sample(5)
@pytest.mark.slow
@BOTH
@pytest.mark.parametrize(
    "settings",
    [
        {"mp_policy": BF16},
        {"mp_policy": BF16, "one_site": True, "codecs": Codecs(refresh="lossless")},
        {"offload": Offload(optimizer=True)},
        {"mp_policy": BF16, "accumulation": "full"},
    ],
    ids=["bf16", "lossless refresh", "offload", "full"],
)
@on_ranks()
def test_compute_weights_are_the_masters_after_outer_steps(
    rank: int, settings: dict[str, Any], shared_memory: str | None
) -> None:
    mesh = sites_of(1, 2) if settings.pop("one_site", False) else sites_of(2, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # Offload.optimizer frees no memory on a CPU
        trained = build(mesh, settings=settings, every=2, fragments=2, delay=1)
    for step in range(5):
        advance(trained, rank, step)
        assert layerzero.fingerprint(trained[0]).ok, f"step {step}"
    found = layerzero.memory(trained[0]).measured
    kind = "host_outer" if "offload" in settings else "outer"
    masters = sum(handle.weights.master.numel() for handle in trained[2]._handles)
    assert found[kind] == trained[2].nbytes == 8 * masters
    layerzero.close(trained[0])
    with pytest.raises(RuntimeError, match="were closed"):
        trained[2].step()


@on_ranks()
def test_bytes_between_sites_are_those_of_the_fragments(rank: int) -> None:
    mesh = sites_of(2, 2)
    for codec in (None, layerzero.Int4Blocks()):
        model, _, outer = trained = build(mesh, every=3, warmup=1, fragments=2, codec=codec)
        masters = [sum(handle.weights.master.numel() for handle in handles) for handles in outer._fragment_handles]
        assert len(masters) == 2 and min(masters) > 0
        parameters = [[m.master.numel() for handle in each for m in handle.members] for each in outer._fragment_handles]
        encoded = [sum(math.ceil(n / 2) + 2 * math.ceil(n / 128) for n in numels) for numels in parameters]
        sizes = encoded if codec is not None else [4 * numel for numel in masters]
        messages = [32 + 16 * math.ceil(size / 16) for size in sizes]
        layerzero.traffic(model, reset=True)
        exchanged = {2: messages[0], 4: messages[1], 5: messages[0], 7: messages[1]}  # by step
        for step in range(1, 8):
            advance(trained, rank, step)
            sent = layerzero.traffic(model, reset=True).bytes
            checksums = 16 if step == 1 else 0
            assert sent.get("site_deltas", 0) == exchanged.get(step, 0) + checksums, f"step {step}: {sent}"
            assert (sent.get("site_gradients", 0) > 0) is (step == 1), f"step {step}: {sent}"


@pytest.mark.sample(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "stop"),
    [
        ({"every": 3, "warmup": 2}, 1),
        ({"every": 3, "warmup": 2}, 2),
        ({"every": 3, "warmup": 1, "fragments": 2, "delay": 2}, 5),
        ({"every": 3, "warmup": 0, "delay": 2, "codec": layerzero.Int4Blocks()}, 4),
    ],
    ids=["warm-up", "end of warm-up", "in flight", "encoded"],
)
@pytest.mark.parametrize("again", [2, 1], ids=["S=2", "S=1"])
@on_ranks()
def test_resumed_training_is_the_same(rank: int, tmp_path: Path, case: dict[str, Any], stop: int, again: int) -> None:
    mesh = sites_of(2, 2)
    trained = build(mesh, settings={"mp_policy": BF16}, **case)
    path = tmp_path / f"site{mesh.get_local_rank('site')}"
    for step in range(8):
        if step == stop:
            extra = {"outer": trained[2].state_dict()}
            layerzero.checkpoint.save(path, trained[0], trained[1], extra)
        advance(trained, rank, step)
    mesh = sites_of(2, again)
    resumed = build(mesh, settings={"mp_policy": BF16}, **case)
    extra = layerzero.checkpoint.load(path, resumed[0], resumed[1])
    resumed[2].load_state_dict(extra["outer"])
    for step in range(stop, 8):
        advance(resumed, rank, step)
    wrong = different(full_parameters(resumed[0]), full_parameters(trained[0]))
    if case.get("codec") is None:
        assert not wrong, wrong
    else:  # blocks of 128 elements lie elsewhere
        assert again != 2 or not wrong, wrong
    for name in ("anchors", "velocities"):
        ours, theirs = (
            {key: value.full_tensor() for key, value in each[2].state_dict()[name].items()}
            for each in (resumed, trained)
        )
        assert ours
        assert again != 2 or not different(ours, theirs), name


@on_ranks()
def test_a_site_may_skip_steps(rank: int) -> None:
    mesh = sites_of(2, 2)
    trained = build(mesh, every=2, delay=1)
    guard = layerzero.guard_steps(trained[0], trained[1])
    for step in range(5):
        if step == 2 and rank == 0:
            next(trained[0].first.parameters()).register_hook(lambda g: g * math.nan)
        advance(trained, rank, step)
    assert guard.skipped == (3 if rank < 2 else 0)
    assert all(bool(p.isfinite().all()) for p in full_parameters(trained[0]).values())


@on_ranks()
def test_averages_and_outer_steps_are_not_mistaken_for_flipped_bits(rank: int) -> None:
    trained = build(sites_of(2, 2), settings={"mp_policy": BF16}, every=2, warmup=2, fragments=2, delay=1)
    guard = layerzero.guard_corruption(trained[0], trained[1], every=1)
    for step in range(6):
        integer_loss(trained[0], integer_batch(step=step, rank=rank)).backward()
        trained[2].average_gradients()  # before the guard compares the gradients
        update(trained[1])
        trained[2].step()
    assert guard.checks == 6 and not guard.found


@on_ranks()
def test_uses_that_would_lose_weights_raise(rank: int) -> None:
    mesh = sites_of(2, 2)
    trained = build(mesh, warmup=1)
    model, optimizer, outer = trained
    advance(trained, rank, 0)
    ema = layerzero.EMA(model)
    ema.update()
    with ema.swapped(), pytest.raises(RuntimeError, match="Leave the context first"):
        outer.step()
    other = layerzero.shard_optimizer(exact_sgd(model.parameters()), model)
    outer.close()
    with pytest.raises(ValueError, match="got 1 optimizers, but the model has 2"):
        layerzero.outer(model, optimizer, sites=mesh["site"], every=2, warmup=0)
    del other
    net = integer_net()
    net.second.requires_grad_(False)
    trained = build(mesh, net=net)
    advance(trained, rank, 0)
    trained[0].second.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"second.* unfrozen after layerzero.outer"):
        advance(trained, rank, 1)


@BOTH
@on_ranks()
def test_outer_steps_keep_the_errors_of_encoded_gradients(rank: int, shared_memory: str | None) -> None:
    mesh = sites_of(1, 2)
    trained = build(mesh, settings={"codecs": Codecs(hop2=layerzero.Int4Blocks())}, every=2)
    advance(trained, rank, 0)

    def stored() -> float:
        gradients = [handle.gradients for handle in trained[2]._handles]
        return sum(float(g.residual.abs().sum()) for g in gradients if g is not None and g.residual is not None)

    integer_loss(trained[0], integer_batch(step=1, rank=rank)).backward()
    update(trained[1])
    before = stored()
    trained[2].step()
    trained[0](integer_batch(step=2, rank=rank)[0])
    assert stored() == before > 0


@on_ranks()
def test_copies_on_tensor_parallel_ranks_stay_equal(rank: int) -> None:
    """Tensor parallelism splits a linear layer, beside a norm of which its ranks have copies."""
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("site", "dp", "tp"))
    torch.manual_seed(0)
    model = parallelize_module(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)), mesh["tp"], {"1": ColwiseParallel()})
    for codec in (
        {"codecs": Codecs(hop2=layerzero.Int8Blocks())},
        {"codecs": Codecs(refresh=layerzero.Int4Difference())},
    ):
        with pytest.raises(ValueError, match="tensor-parallel"):
            layerzero.shard_model(model, mesh=mesh["dp"], mp_policy=BF16, **codec)
    model = layerzero.shard_model(model, mesh=mesh["dp"])
    optimizer = layerzero.shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), model)
    outer = layerzero.outer(model, optimizer, sites=mesh["site"], every=2, warmup=0, codec=layerzero.Int4Blocks())
    for step in range(6):
        torch.manual_seed(10 * step + mesh.get_local_rank("site"))
        model(torch.randn(4, 8)).square().mean().backward()
        for parameter in model[0].parameters():  # the gradient of each rank belongs to its part of the layer
            dist.all_reduce(plain(parameter.grad), group=mesh.get_group("tp"))
        update(optimizer)
        outer.step()
    weights = [torch.empty_like(plain(model[0].weight)) for _ in range(2)]
    dist.all_gather(weights, plain(model[0].weight).clone(), group=mesh.get_group("tp"))
    assert torch.equal(*weights)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["every between sites", "every in a site", "models", "mesh", "delay"])
@on_ranks()
def test_disagreements_raise_on_all_ranks(rank: int, case: str) -> None:
    mesh = sites_of(2, 2)
    net = integer_net()
    options: dict[str, Any] = {"every": 2}
    if case == "every between sites":
        options["every"], text = 2 + rank // 2, "every is 2 on rank [01] and 3 on rank [23]"
    elif case == "every in a site":
        options["every"], text = 2 + rank % 2, "every is"
    elif case == "models":
        net.head = nn.Linear(6, 3 + rank // 2)
        text = "between sites"
    elif case == "mesh":
        options["sites"], text = mesh["zero3"], "must contain one rank"
    else:
        options |= {"delay": 2 if rank >= 2 else 0}
        text = "delay=2 is not less than every=2"
    model, optimizer = exact_model(net, mesh=mesh["replica", "zero3"])
    with pytest.raises((ValueError, RuntimeError), match=text):
        layerzero.outer(model, optimizer, **{"sites": mesh["site"], "warmup": 0, **options})


@on_ranks()
def test_weights_may_be_loaded_before_the_first_step(rank: int) -> None:
    loaded, expected = (build(sites_of(2, 2), every=2, warmup=0, codec=layerzero.Int4Blocks()) for _ in range(2))
    weights = {name: value + 1 for name, value in full_parameters(loaded[0]).items()}
    layerzero.load_full_state_dict(loaded[0], weights, strict=False)
    expected[2].close()
    layerzero.load_full_state_dict(expected[0], weights, strict=False)
    again = {"every": 2, "warmup": 0, "lr": 0.5, "momentum": 0.5, "codec": layerzero.Int4Blocks()}
    expected = (*expected[:2], layerzero.outer(*expected[:2], sites=sites_of(2, 2)["site"], **again))
    for step in range(4):
        for trained in (loaded, expected):
            advance(trained, rank, step)
    wrong = different(full_parameters(loaded[0]), full_parameters(expected[0]))
    assert not wrong, wrong


@on_ranks()
def test_anchors_are_the_weights_before_the_first_of_two_optimizers(rank: int) -> None:
    mesh = sites_of(2, 2)
    model = layerzero.shard_model(integer_net(), mesh=mesh["replica", "zero3"], units=IntegerNet.UNITS)
    parameters = list(model.parameters())
    optimizers = [layerzero.shard_optimizer(exact_sgd(part), model) for part in (parameters[:2], parameters[2:])]
    outer = layerzero.outer(model, *optimizers, sites=mesh["site"], every=4, warmup=0)
    before = [fragment.anchor.clone() for fragment in outer._fragments]
    integer_loss(model, integer_batch(step=0, rank=rank)).backward()
    for optimizer in optimizers:
        optimizer.step()
    outer.step()
    assert all(torch.equal(fragment.anchor, anchor) for fragment, anchor in zip(outer._fragments, before, strict=True))


@on_ranks()
def test_a_site_may_skip_its_first_steps(rank: int) -> None:
    trained = build(sites_of(2, 1), every=1, warmup=0, codec=layerzero.Int4Blocks())
    for step in range(4):
        integer_loss(trained[0], integer_batch(step=step, rank=rank)).backward()
        if rank >= 2 or step >= 2:  # as if a loss scaler had skipped the first steps of a site
            trained[1].step()
        trained[1].zero_grad()
        trained[2].step()  # raises if the anchors differ


@pytest.mark.parametrize("case", ["steps", "anchors", "weights", "warm-up"])
@on_ranks()
def test_sites_that_have_drifted_apart_raise(rank: int, case: str) -> None:
    trained = build(sites_of(2, 2), every=2, warmup={"weights": 2, "warm-up": 6}.get(case, 0), delay=1)
    if case == "steps" and rank >= 2:
        trained[2].steps += 2  # as after a checkpoint of another step
    text = {
        "steps": "step 2, .*step 4, ",
        "anchors": "different anchors of fragment 0" if rank % 2 else "other ranks of this site have received messages",
        "weights": "must begin with equal weights",
        "warm-up": r"the sites are at different steps: [12] on rank",
    }[case]
    with pytest.raises(RuntimeError, match=text):
        for step in range(3):
            if case == "anchors" and step == 1 and rank == 3:  # ranks 1 and 3 have the same rows
                trained[2]._fragments[0].anchor[0] += 1
            if case == "warm-up" and step == 1 and rank >= 2:
                trained[2].steps += 1  # as if this site had called step() once more
            if case == "weights" and step == 1:
                trained[1].param_groups[0]["lr"] = 2**-4 * (1 + rank // 2)
            advance(trained, rank, step)


@on_ranks()
def test_wrong_arguments_raise(rank: int) -> None:
    mesh = sites_of(2, 2)
    model, optimizer, outer = build(mesh)
    with pytest.raises(ValueError, match="already called"):
        layerzero.outer(model, optimizer, sites=mesh["site"], every=2, warmup=0)
    outer.close()
    with pytest.raises(TypeError, match="shard_optimizer returned"):
        layerzero.outer(model, exact_sgd(model.parameters()), sites=mesh["site"], every=2, warmup=0)
    for wrong, text in (
        ({"every": 0}, "every=0"),
        ({"warmup": -1}, "warmup=-1"),
        ({"fragments": 3}, "fragments=3 is more than every=2"),
        ({"every": 9, "fragments": 9}, "trainable units"),
        ({"momentum": 1.0}, "momentum=1.0"),
        ({"sites": mesh}, "3 axes"),
        ({"sites": None}, "sites must be"),
    ):
        with pytest.raises((ValueError, TypeError), match=text):
            layerzero.outer(model, optimizer, **{"sites": mesh["site"], "every": 2, "warmup": 0, **wrong})
    with pytest.raises(ValueError, match="missing"):
        layerzero.outer(model, optimizer, sites=mesh["site"], every=2, warmup=0).load_state_dict(
            {"steps": 3, "anchors": {}, "velocities": {}, "means": {}, "own": {}, "due": {}}
        )


def test_fragments_are_contiguous_and_about_equally_large() -> None:
    for sizes, fragments, stops in (
        ([1, 1, 1, 1], 2, [2, 4]),
        ([1, 1, 1, 1], 4, [1, 2, 3, 4]),
        ([10, 1, 1, 1], 2, [1, 4]),
        ([1, 1, 1, 10], 2, [3, 4]),
        ([0, 0, 0], 3, [1, 2, 3]),
        ([5], 1, [1]),
    ):
        groups = divide_into_fragments(sizes, fragments)
        assert [group.stop for group in groups] == stops
        assert [index for group in groups for index in group] == list(range(len(sizes)))
    for every, fragments, positions in ((16, 4, [4, 8, 12, 0]), (16, 1, [0]), (7, 4, [1, 3, 5, 0]), (3, 3, [1, 2, 0])):
        assert start_positions(every, fragments) == positions
