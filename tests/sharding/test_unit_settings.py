"""Settings per unit: precision, reshard_after_forward, and modules grouped into one unit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import layerzero
from layerzero.engine.hooks import get_state
from layerzero.sharding.unit_selection import block_classes
from tests.support.graphs import IN_FLIGHT, MODES, WIDTH, WORLD, Block, Case, Chain, batch, blocks, compare, shard
from tests.support.models import BF16, TiedTransformer, full_gradients, full_parameters
from tests.support.ranks import mesh_of, on_ranks, run_ranks, run_sharing

FP32_NORM = MixedPrecisionPolicy(param_dtype=torch.float32, output_dtype=torch.bfloat16)


# --- precision of a unit ---


class Watched(nn.LayerNorm):
    """Norm that records the dtypes of its inputs and its computation."""

    def __init__(self) -> None:
        super().__init__(WIDTH)
        self.seen: set[tuple[torch.dtype, ...]] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add((x.dtype, self.weight.dtype))
        return super().forward(x)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = Watched(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


def _policy(name: str, module: nn.Module) -> MixedPrecisionPolicy:
    if isinstance(module, Watched):
        return FP32_NORM
    return BF16 if name else MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)


def _by_hand(model: nn.Module, x: Tensor) -> Tensor:
    """Run the forward in one process, with the casts of `_policy` written out."""
    weights = {n: p.bfloat16() if "norm" not in n else p for n, p in model.named_parameters()}
    x = x.bfloat16()
    for i in range(len(model)):
        normed = F.layer_norm(x.float(), (WIDTH,), weights[f"{i}.norm.weight"], weights[f"{i}.norm.bias"]).bfloat16()
        x = x + torch.tanh(F.linear(normed, weights[f"{i}.linear.weight"], weights[f"{i}.linear.bias"]))
    return x.float()


def _mixed(rank: int) -> None:
    for settings in ({}, {"accumulation": "full"}, {"reshard_after_forward": False}):
        torch.manual_seed(0)
        alone = nn.Sequential(Normed(), Normed())
        model = layerzero.shard_model(
            copy.deepcopy(alone), mesh=mesh_of(2), units={Normed, Watched}, mp_policy=_policy, **settings
        )
        output = model(batch(rank, 0).float())
        expected = _by_hand(alone, batch(rank, 0).float())
        assert torch.equal(output, expected) and output.dtype == torch.float32
        assert all(module.norm.seen == {(torch.float32, torch.float32)} for module in model)
        output.sum().backward()
        for r in range(WORLD):
            (_by_hand(alone, batch(r, 0).float()).sum() / WORLD).backward()
        for name, gradient in full_gradients(model).items():
            torch.testing.assert_close(gradient, alone.get_parameter(name).grad, rtol=2e-2, atol=2e-2)
        kinds = {handle.precision.compute for handle in get_state(model).handles}
        assert kinds == {torch.bfloat16, torch.float32}
        layerzero.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.5), model).step()
        torch.optim.SGD(alone.parameters(), lr=0.5).step()
        for name, whole in full_parameters(model).items():
            torch.testing.assert_close(whole, alone.get_parameter(name).detach(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("run", [run_ranks, run_sharing])
def test_norms_compute_in_fp32_beside_blocks_in_bf16(run: Callable[..., Any]) -> None:
    run(_mixed, world_size=WORLD)


# --- weights that stay gathered ---


@on_ranks(world_size=WORLD)
def test_the_last_unit_stays_gathered_for_its_backward(rank: int) -> None:
    for kept in (("units.2",), ("units.0", "units.2"), ("units.0", "units.1", "units.2")):

        def reshards(name: str, module: nn.Module, kept: tuple[str, ...] = kept) -> bool:
            return name not in kept

        compare(rank, "kept", Case(blocks, IN_FLIGHT), reshard_after_forward=reshards)
        model = shard(blocks(), reshard_after_forward=reshards, prefetch=0)
        lz_state = get_state(model)
        loss = model(batch(rank, 0)).sum()
        assert [unit.name for unit in lz_state.units if unit.gathered] == list(kept)
        before = layerzero.traffic(model).calls["gather"]
        loss.backward()
        units = len([unit for unit in lz_state.units if unit.name and unit.name not in kept])
        assert layerzero.traffic(model).calls["gather"] - before == units + 1  # the root
        assert not any(unit.gathered for unit in lz_state.units)
        with torch.no_grad():
            model(batch(rank, 0))
        assert not any(unit.gathered for unit in lz_state.units)


# --- several modules, one unit ---


class ChunkedLoss(nn.Module):
    """Cross-entropy of a head, for a few tokens at a time, so that few logits exist at once."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.head = head

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        chunks = zip(x.flatten(0, 1).split(5), targets.flatten().split(5), strict=True)
        return (
            torch.stack([F.cross_entropy(self.head(x), t, reduction="sum") for x, t in chunks]).sum() / targets.numel()
        )


class WithLoss(TiedTransformer):
    """Language model that returns its loss; head and embedding are tied."""

    def __init__(self) -> None:
        super().__init__()
        self.double()
        self.chunked = ChunkedLoss(self.head)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.chunked(self.norm(x), targets)


def _loss(model: nn.Module, rank: int, step: int) -> None:
    first = model(*TiedTransformer.batch(step=step, rank=rank))
    second = model(*TiedTransformer.batch(step=step, micro_batch=1, rank=rank))
    first.backward()
    second.backward()


def _grouped(name: str, module: nn.Module) -> bool | str:
    if name in ("embedding", "chunked", "head"):
        return "vocabulary"
    return name.startswith("blocks.") and name.count(".") == 1


def _tied_head(rank: int) -> None:
    for settings in (*MODES, {"size": 1}, {"size": 4}):
        compare(rank, "tied head", Case(WithLoss, _loss), **{"units": _grouped, **settings})
    model = shard(WithLoss(), units=_grouped)
    named = {unit.name: [member.name for member in unit.members()] for unit in get_state(model).units}
    assert named["vocabulary"] == ["embedding.weight"] and "norm.weight" in named[""]
    if layerzero.memory(model).measured["full_buffer"] == 0:
        model(*TiedTransformer.batch(step=0, rank=rank))
        before = layerzero.traffic(model).calls.get("gather", 0)
        model(*TiedTransformer.batch(step=1, rank=rank)).backward()
        calls = layerzero.traffic(model).calls.get("gather", 0) - before
        # The root, two blocks, and the group for the embedding and for the loss; the same again for the backward.
        assert calls in (0, 5 + 5), calls


@pytest.mark.slow
@pytest.mark.parametrize("run", [run_ranks, pytest.param(run_sharing, marks=pytest.mark.slow)])
def test_a_chunked_loss_is_one_unit_with_its_tied_head(run: Callable[..., Any]) -> None:
    run(_tied_head, world_size=WORLD)


class TwoInOne(nn.Module):
    """Two layers, called consecutively or with another unit in between."""

    def __init__(self, *, apart: bool) -> None:
        super().__init__()
        self.body, self.norm, self.head = Block(), nn.LayerNorm(WIDTH, dtype=torch.float64), Block()
        self.between, self.apart, self.stops = Block(), apart, False

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.body(x))
        return x if self.stops else self.head(self.between(x) if self.apart else x)


def _pair(name: str, module: nn.Module) -> bool | str:
    return "norm and head" if name in ("norm", "head") else name in ("body", "between")


@pytest.mark.slow
@on_ranks(world_size=WORLD)
def test_modules_of_one_unit_that_follow_each_other_are_gathered_once(rank: int) -> None:
    for apart in (False, True):
        for settings in (*MODES, {"prefetch": 0}, {"size": 1}):
            compare(rank, "pair", Case(lambda apart=apart: TwoInOne(apart=apart), IN_FLIGHT), units=_pair, **settings)
        for prefetch in (0, 1, 2):
            model = shard(TwoInOne(apart=apart), units=_pair, prefetch=prefetch)
            assert sorted(unit.name for unit in get_state(model).units) == sorted(
                ["", "body", "between", "norm and head"]
            )
            for step in range(3):
                before = layerzero.traffic(model).calls.get("gather", 0)
                output = model(batch(rank, step).requires_grad_())
                forward = layerzero.traffic(model).calls["gather"] - before
                output.sum().backward()
                backward = layerzero.traffic(model).calls["gather"] - before - forward
                once = step > 0 and not apart  # from the second forward on the next unit is known
                assert (forward, backward) == ((2 if once else 4 if apart else 3), (4 if apart else 2)), (
                    apart,
                    prefetch,
                    step,
                    forward,
                    backward,
                )
                assert layerzero.memory(model).measured["full_buffer"] == 0
    # The expected unit does not come: nothing stays.
    model = shard(TwoInOne(apart=False), units=_pair)
    for step in range(2):
        model(batch(rank, step)).sum().backward()
    for other in ("apart", "stops"):
        model(batch(rank, 0)).sum().backward()
        setattr(model, other, True)
        output = model(batch(rank, 0))
        assert layerzero.memory(model).measured["full_buffer"] == 0, other
        output.sum().backward()
        setattr(model, other, False)
    with torch.no_grad():
        model(batch(rank, 0))
    assert layerzero.memory(model).measured["full_buffer"] == 0


# --- units="auto" ---


class Layer(Block):
    pass


class Backbone(nn.Module):
    _no_split_modules: Any = ("Layer", "VisionLayer")  # transformers lists more classes than a model has

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@on_ranks(world_size=WORLD)
def test_a_model_names_its_own_units(rank: int) -> None:
    for make, names in ((Backbone, ["", "layers.0", "layers.1"]), (lambda: Chain(Backbone()), None)):
        compare(rank, "auto", Case(make, IN_FLIGHT), units="auto")
        model = shard(make(), units="auto")
        found = [unit.name for unit in get_state(model).units]
        assert found == (names or ["", "units.0.layers.0", "units.0.layers.1"])
    with pytest.raises(ValueError, match=r"units='auto'.*This Chain does neither.*units=\{Block\}"):
        shard(blocks(), units="auto")
    backbone = Backbone()
    backbone._no_split_modules = {"Other"}
    with pytest.raises(ValueError, match=r"has no module of the classes in its _no_split_modules, \['Other'\]"):
        shard(backbone, units="auto")


VOCABULARY = 24


class Language(Backbone):
    """Backbone between an embedding and a head, with the methods of a model of transformers."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.inside = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH, dtype=torch.float64))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False, dtype=torch.float64)
        if tied:
            self.head.weight = self.inside[0].weight

    def get_input_embeddings(self) -> nn.Module:
        return self.inside[0]

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, x: Tensor) -> Tensor:
        indices = x.detach().abs().sum(-1).long() % VOCABULARY
        return self.head(super().forward(x + self.inside(indices)))


@on_ranks()
def test_auto_gives_the_embedding_and_the_head_units_of_their_own(rank: int) -> None:
    for tied, names in (
        (False, ["", "layers.0", "layers.1", "inside.0", "head"]),
        (True, ["", "layers.0", "layers.1"]),
    ):
        compare(rank, f"auto, tied {tied}", Case(lambda tied=tied: Language(tied=tied), IN_FLIGHT), units="auto")
        assert [unit.name for unit in get_state(shard(Language(tied=tied), units="auto")).units] == names
    model = Language(tied=False)
    model.get_output_embeddings = lambda: None
    assert [unit.name for unit in get_state(shard(model, units="auto")).units][-1] == "inside.0", "a model without head"
    model = Language(tied=False)
    model.get_output_embeddings = lambda: model.layers[0].linear
    assert [unit.name for unit in get_state(shard(model, units="auto")).units][-1] == "inside.0", "a head in a block"
    model = Language(tied=False)
    model.forward = model.forward
    names = [unit.name for unit in get_state(shard(model, units="auto")).units]
    assert names[-1] == "inside.0", "a replaced forward may read the weight of the head without calling it"
    names = [unit.name for unit in get_state(shard(Language(tied=False), units="auto", ignored_modules=["head"])).units]
    assert names[-1] == "inside.0", "a head that is not sharded"


class GradientCheckpointingLayer(nn.Module):
    """Stand-in for the class in transformers."""


class Wave(GradientCheckpointingLayer):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


def test_a_part_that_names_no_units_has_those_that_transformers_checkpoints() -> None:
    assert block_classes(nn.ModuleList([Wave(nn.Linear(2, 2)), nn.Linear(2, 2)])) == {"Wave"}
    assert block_classes(nn.ModuleList([Wave(nn.Linear(2, 2)), Backbone()])) == {"Wave", "Layer"}
    assert block_classes(nn.ModuleList([Wave(Backbone())])) == {"Layer"}, "no unit inside another"
    backbone = Backbone()
    backbone.layers[0].add_module("inside", Wave(nn.Linear(2, 2)))
    assert block_classes(backbone) == {"Layer"}
    assert block_classes(nn.Linear(2, 2)) == set()
