"""Rows of docs/limits.md that no other test file covers: refusals and losses, and that the alternative works."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.utils import prune

import layerzero
from tests.support.models import IntegerNet, different, exact_sgd, full_parameters, integer_net
from tests.support.ranks import mesh_of, on_ranks, run_ranks

WORLD = 2
TORCHS_OWN = "."  # which differs between versions of torch
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


def _shard(model: nn.Module, **settings: Any) -> nn.Module:
    return layerzero.shard_model(model, mesh=mesh_of(2), **settings)


def _train(model: nn.Module, x: Tensor | None = None) -> None:
    model(torch.ones(2, 5) if x is None else x).sum().backward()


def _refused(call: Callable[[], Any], match: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of old functions
        with pytest.raises(Exception, match=match):
            call()


# --- models ---


class Sibling(nn.Module):
    """Net whose last layer multiplies by the weight of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.last = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x)) @ self.first.weight


@on_ranks(world_size=WORLD)
def test_a_weight_that_a_sibling_reads_belongs_to_the_parent(rank: int) -> None:
    _refused(
        lambda: _train(_shard(Sibling(), units=["first", "last"])),
        r"first.weight.*Call model\(x\), not model\.forward\(x\)",
    )
    torch.manual_seed(0)
    alone = Sibling()
    model = _shard(copy.deepcopy(alone), units=["last"])
    for net in (model, alone):
        _train(net)
    for name, parameter in alone.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad.full_tensor(), parameter.grad)


@on_ranks(world_size=WORLD)
def test_an_embedding_with_a_largest_norm_is_refused_and_is_renormalized_between_steps(rank: int) -> None:
    ids = torch.tensor([0, 1, 2])
    model = _shard(nn.Embedding(4, 3, max_norm=0.1))
    _refused(lambda: model(ids).sum().backward(), "changed in place")
    model = _shard(nn.Embedding(4, 3))
    with layerzero.unsharded(model, writeback=True), torch.no_grad():
        model.weight.renorm_(2, 0, 0.1)
    _train(model, ids)
    assert model(ids).norm(dim=1).max() < 0.11


@on_ranks(world_size=WORLD)
def test_lazy_parameters_and_sparse_buffers_have_their_ways_out(rank: int) -> None:
    lazy = nn.Sequential(nn.LazyLinear(3))
    _refused(lambda: _shard(lazy), "no shape yet")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of lazy modules
        lazy(torch.ones(2, 5))
    _train(_shard(lazy))
    model = integer_net()
    model.register_buffer("table", torch.eye(3).to_sparse())
    _refused(lambda: _shard(model), "buffer 'table' .*sync_module_states=False")
    _train(_shard(model, sync_module_states=False))


@on_ranks(world_size=WORLD)
def test_fully_shard_around_a_sharded_part_and_pruning_afterwards_raise(rank: int) -> None:
    outer = nn.Sequential(nn.Linear(5, 5), _shard(nn.Linear(5, 5)))
    _refused(lambda: fully_shard(outer, mesh=init_device_mesh("cpu", (WORLD,))), TORCHS_OWN)
    model = _shard(integer_net(), units=["first"])
    _refused(lambda: (prune.random_unstructured(model.first, "weight", 0.5), _train(model)), TORCHS_OWN)
    pruned = integer_net()
    prune.random_unstructured(pruned.first, "weight", 0.5)
    prune.remove(pruned.first, "weight")
    _train(_shard(pruned, units=["first"]))


@on_ranks(world_size=WORLD)
def test_values_that_are_assigned_are_copied_and_initializations_by_index_are_refused(rank: int) -> None:
    model, other = _shard(integer_net()), _shard(integer_net(1))
    source = other.first.weight.detach()
    model.first.weight.data = source
    source.mul_(0)
    assert torch.equal(model.first.weight.full_tensor(), integer_net(1).first.weight), "the two share no memory"

    model, flat = _shard(nn.Conv1d(4, 4, 3)), _shard(nn.Linear(4, 4))
    before = full_parameters(flat)
    _refused(lambda: nn.init.orthogonal_(flat.weight), "unsharded")
    assert not different(full_parameters(flat), before)
    _refused(lambda: nn.init.dirac_(model.weight), "unsharded")
    _refused(lambda: nn.init.sparse_(flat.weight, 0.5), "unsharded")
    assert not model.weight.full_tensor().any(), "zeroed before the error"
    assert different(full_parameters(flat), before), "drawn before the error"
    with layerzero.unsharded(model, writeback=True):
        nn.init.dirac_(model.weight)
    assert torch.equal(model.weight.full_tensor(), nn.init.dirac_(torch.empty(4, 4, 3)))
    torch.manual_seed(0)  # every rank writes the same
    with layerzero.unsharded(flat, writeback=True):
        nn.init.sparse_(flat.weight, 0.5)
    assert flat.weight.full_tensor().eq(0).sum() == 8


@on_ranks(world_size=WORLD)
def test_a_generator_is_ignored_by_torch_for_computed_tensors_and_heeded_for_ours(rank: int) -> None:
    parameter = _shard(nn.Linear(5, 6)).weight

    def draw(into: Callable[[], Tensor], seed: int) -> Tensor:
        torch.manual_seed(seed)
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # torch's, of random DTensors on the CPU
            return into().normal_(generator=torch.Generator().manual_seed(7)).to_local().clone()

    def computed() -> Tensor:
        return 2 * parameter.detach()

    assert not torch.equal(draw(computed, 0), draw(computed, 1)), "torch heeds generator= now: correct docs/limits.md"
    for right in (lambda: torch.zeros_like(parameter), lambda: parameter):
        assert torch.equal(draw(right, 0), draw(right, 1))


class NoReset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 5))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


@on_ranks(world_size=WORLD)
def test_storages_are_not_copied_and_objects_are_not_duplicated(rank: int, tmp_path: Path) -> None:
    model = _shard(integer_net())
    optimizer = layerzero.shard_optimizer(exact_sgd(model.parameters()), model)
    with pytest.raises(TypeError):
        dcp.async_save({"model": get_model_state_dict(model)}, checkpoint_id=f"{tmp_path}/async")
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=f"{tmp_path}/sync")
    for whole in (model, model.first.weight, optimizer):
        with pytest.raises(TypeError, match=r"deepcopy of a .* is not supported"):
            copy.deepcopy(whole)


def _fill(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters(recurse=False):
            parameter.fill_(2.0)


@on_ranks(world_size=WORLD)
def test_from_meta_all_ranks_start_there_and_every_module_is_initialized(rank: int) -> None:
    def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
        with torch.device("meta"):
            return make()

    _refused(lambda: _shard(on_meta(NoReset)), "NoReset.*reset_parameters.*param_init_fn")
    assert _shard(on_meta(NoReset), param_init_fn=_fill).weight.full_tensor().eq(2).all()
    mixed = integer_net(1) if rank == 0 else on_meta(IntegerNet)
    _refused(lambda: _shard(mixed, param_init_fn=_fill), "ranks disagree.* on meta")
    model = _shard(on_meta(IntegerNet), param_init_fn=_fill)
    layerzero.load_full_state_dict(model, integer_net(1).state_dict() if rank == 0 else {})
    assert not different(full_parameters(model), dict(integer_net(1).named_parameters()))


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.norm = nn.BatchNorm1d(5)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x).float())


@on_ranks(world_size=WORLD)
def test_batch_norm_beside_bf16_may_be_left_out(rank: int) -> None:
    model = Normed()
    _train(_shard(model, mp_policy=BF16, ignored_modules=[model.norm]))
    assert model.norm.running_mean.any() and model.norm.weight.grad is not None


def _load_on_one_rank_first(rank: int, on: int) -> None:
    model, state = _shard(integer_net(), units=IntegerNet.UNITS), integer_net(1).state_dict()
    if rank == on:
        model.load_state_dict(state)
    for _ in range(2):  # nothing has changed, and the error comes again
        _refused(
            lambda: _train(model),
            rf"first forward.*changed is .*'first'.* on rank {on}( and|\.) .*load_full_state_dict",
        )
    layerzero.load_full_state_dict(model, state if rank == 0 else None)
    _train(model)
    assert not different(full_parameters(model), dict(integer_net(1).named_parameters()))


def _load_on_one_rank_later(rank: int) -> str:
    model = _shard(integer_net(), units=IntegerNet.UNITS)
    _train(model)
    with pytest.raises(RuntimeError) as caught:
        if rank == 0:
            model.load_state_dict(integer_net(1).state_dict())
        _train(model)
    return str(caught.value)


@pytest.mark.slow
def test_loading_on_one_rank_only_is_an_error_on_both() -> None:
    for on in (0, 1):  # before the first forward, which all ranks enter: sooner than the groups' timeout
        run_ranks(_load_on_one_rank_first, on, world_size=WORLD, pg_timeout=60, timeout=30)
    first, second = run_ranks(_load_on_one_rank_later, world_size=WORLD, pg_timeout=3, timeout=60, shared_memory="off")
    assert "changed outside optimizer.step()" in first and "ranks [1] did not take part" in first, first
    assert "rank 0" in second and "changed outside optimizer.step()" in second, second
