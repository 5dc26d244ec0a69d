"""Full tensors loaded into sharded parameters, and copies of sharded states, as training loops use ``state_dict()``."""

from __future__ import annotations

import copy
import io
import re

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import layerzero
from layerzero.megatron import ProcessGroups, ShardedChunk
from tests.support.models import (
    IntegerNet,
    TiedTransformer,
    assert_same_bits,
    different,
    exact_sgd,
    full_parameters,
    integer_batch,
    integer_net,
    refusal_of,
    train,
)
from tests.support.ranks import mesh_of, on_ranks

WORLD = 4


def _sharded(net: nn.Module, size: int = 2, dtype: torch.dtype = torch.float32) -> nn.Module:
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    return layerzero.shard_model(net, mesh=mesh_of(size), units=type(net).UNITS, mp_policy=policy)


def _tied(seed: int = 0) -> TiedTransformer:
    return TiedTransformer(seed=seed)


def _loss(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return TiedTransformer.loss(model, TiedTransformer.batch(step=0))


def _without(state: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {key: value for key, value in state.items() if key != name}


@on_ranks(world_size=WORLD)
def test_load_state_dict_takes_this_ranks_rows_of_whole_tensors(rank: int) -> None:
    for size, dtype in ((1, torch.float32), (2, torch.bfloat16), (4, torch.float32)):
        source = _tied(seed=1)
        state = source.state_dict()
        model, fresh = _sharded(_tied(), size, dtype), _sharded(_tied(seed=1), size, dtype)
        for missing in ("", "head.weight", "embedding.weight"):  # of a tied parameter, one name is enough
            layerzero.load_full_state_dict(model, _tied().state_dict())
            assert not torch.equal(_loss(model), _loss(fresh))
            calls = layerzero.traffic(model).calls
            assert not any(model.load_state_dict(_without(state, missing)))
            assert layerzero.traffic(model).calls == calls, "no collective"
            assert torch.equal(_loss(model), _loss(fresh)), (size, dtype, missing)
            assert not different(full_parameters(model), dict(source.named_parameters())), (size, dtype, missing)
            assert model.head.weight is model.embedding.weight


@on_ranks(world_size=WORLD)
def test_parts_of_a_state_load_and_what_does_not_fit_is_an_error(rank: int) -> None:
    model, alone = _sharded(integer_net()), integer_net()
    for net in (model, alone):
        part = {name: value for name, value in integer_net(seed=1).state_dict().items() if name.startswith("first")}
        result = net.load_state_dict({**part, "stranger": torch.zeros(1)}, strict=False)
        assert len(result.missing_keys) == 5 and result.unexpected_keys == ["stranger"]
        net.second.load_state_dict(integer_net(seed=2).second.state_dict())
        with torch.no_grad():
            net.head.weight.copy_(integer_net(seed=3).head.weight)
    assert_same_bits(model, alone, "parts")
    inputs, _ = integer_batch()
    assert torch.equal(model(inputs), alone(inputs))
    assert "Missing key" in refusal_of(lambda: model.load_state_dict(part))
    message = refusal_of(lambda: model.load_state_dict({**integer_net().state_dict(), "shift": torch.zeros(5)}))
    assert "size mismatch for shift" in message
    assert "torch.no_grad" in refusal_of(lambda: model.shift.copy_(torch.ones(6)))
    assert "another sharding" in refusal_of(lambda: model.load_state_dict(_sharded(integer_net(), size=4).state_dict()))


def _like(parameter: DTensor, rows: Tensor) -> DTensor:
    """Make a DTensor as libraries with their own sharding do."""
    return DTensor.from_local(
        rows,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


@on_ranks(world_size=WORLD)
def test_a_dtensor_that_others_have_cut_is_loaded_by_their_cut(rank: int) -> None:
    for size in (1, 2, 4):
        source = integer_net(seed=1)
        for cut in ("torch", "torch, with its own placements", "layerzero"):
            model = _sharded(integer_net(), size)
            theirs = dict(source.named_parameters())
            for name, parameter in model.named_parameters():
                whole = theirs[name].detach()
                torchs = distribute_tensor(whole, parameter.device_mesh, [Shard(0), Shard(0)], src_data_rank=None)
                value = {
                    "torch": lambda p=parameter, t=torchs: _like(p, t.to_local()),
                    "torch, with its own placements": lambda t=torchs: t,
                    "layerzero": lambda p=parameter, w=whole: _like(p, w[p._local_tensor.spec.rows]),
                }[cut]()
                with torch.no_grad():
                    parameter.copy_(value)
                    parameter.copy_(value)
            assert_same_bits(model, source, f"{size}, cut by {cut}")
            inputs, _ = integer_batch()
            assert torch.equal(model(inputs), source(inputs)), (size, cut)
    odd = _like(model.shift, torch.zeros(6 if rank == 1 else 0))
    message = refusal_of(lambda: model.shift.data.copy_(odd))
    assert "'shift' was given a DTensor of which the ranks have [0, 6, 0, 0] of 6 rows" in message
    assert "layerzero.load_full_state_dict" in message
    assert_same_bits(model, source, "as it was")


@on_ranks(world_size=WORLD)
def test_ranks_that_load_other_values_are_told_at_the_next_forward(rank: int) -> None:
    inputs, _ = integer_batch()
    model = _sharded(integer_net())
    model.load_state_dict(integer_net(seed=rank // 2).state_dict())
    message = refusal_of(lambda: model(inputs))
    assert re.search(r"ranks disagree.*'first.weight'.*on ranks 0, 1.*on ranks 2, 3", message), message
    assert "load_full_state_dict" in message and "layerzero.refresh" in message
    layerzero.load_full_state_dict(model, integer_net(seed=rank).state_dict())
    assert torch.equal(model(inputs), integer_net(seed=0)(inputs))
    model.load_state_dict(integer_net(seed=rank).state_dict())
    assert "ranks disagree" in refusal_of(lambda: model(inputs))
    model.load_state_dict(integer_net(seed=2).state_dict())  # the other remedy
    assert torch.equal(model(inputs), integer_net(seed=2)(inputs))


@on_ranks(world_size=WORLD)
def test_load_full_state_dict_takes_one_name_of_a_tied_parameter_and_may_be_lenient(rank: int) -> None:
    source = _tied(seed=1)
    for missing in ("head.weight", "embedding.weight"):
        model = _sharded(_tied())
        assert not any(layerzero.load_full_state_dict(model, _without(source.state_dict(), missing)))
        assert not different(full_parameters(model), dict(source.named_parameters())), missing
    model, alone = _sharded(integer_net()), integer_net()
    part = {name: value for name, value in integer_net(seed=1).state_dict().items() if name.startswith("first")}
    part["stranger"] = torch.zeros(2)
    result = layerzero.load_full_state_dict(model, part if rank == 0 else None, strict=False)
    expected = alone.load_state_dict(part, strict=False)
    assert result.unexpected_keys == expected.unexpected_keys == ["stranger"]
    assert set(result.missing_keys) == set(expected.missing_keys) and len(result.missing_keys) == 5
    assert_same_bits(model, alone, "strict=False")
    assert torch.equal(model(integer_batch()[0]), alone(integer_batch()[0]))
    bad = {"first.weight": torch.zeros(2, 2)} if rank == 0 else {}
    assert "expected shape [6, 5]" in refusal_of(lambda: layerzero.load_full_state_dict(model, bad, strict=False))
    sharded_state = model.state_dict()
    assert "got a DTensor" in refusal_of(lambda: layerzero.load_full_state_dict(model, sharded_state))
    on_meta = {name: value.to("meta") for name, value in alone.state_dict().items()}
    assert "on meta" in refusal_of(lambda: layerzero.load_full_state_dict(model, on_meta if rank == 0 else None))
    assert "strict" in refusal_of(lambda: layerzero.load_full_state_dict(model, part, strict=rank == 1))
    assert_same_bits(model, alone, "nothing has changed")


@on_ranks(world_size=2)
def test_full_state_dict_can_leave_out_what_is_not_trained(rank: int) -> None:
    net = integer_net()
    net.register_buffer("seen", torch.zeros(2))
    net.empty = nn.Parameter(torch.zeros(7, 0))  # all rows are on one rank
    for parameter in (net.first.weight, net.head.bias, net.shift):
        parameter.requires_grad_(False)
    model = layerzero.shard_model(net, mesh=mesh_of(2), units=IntegerNet.UNITS, ignored_params=[net.shift])
    state = layerzero.full_state_dict(model, rank0_only=False, trainable_only=True)
    expected = {name: value for name, value in integer_net().named_parameters() if value.requires_grad}
    for name in ("first.weight", "head.bias", "shift"):
        del expected[name]
    assert not different(state, {**expected, "empty": torch.zeros(7, 0)})
    model.first.bias.requires_grad_(rank != 1)
    assert "first.bias" in refusal_of(lambda: layerzero.full_state_dict(model, trainable_only=True))


@on_ranks(world_size=WORLD)
def test_deep_copies_of_states_keep_the_best_and_load_back(rank: int) -> None:
    model = _sharded(integer_net())
    optimizer = layerzero.shard_optimizer(exact_sgd(model.parameters()), model)
    train(model, optimizer, rank, range(1))
    best, its_state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    expected = full_parameters(model)
    inputs, _ = integer_batch()
    output = model(inputs)
    train(model, optimizer, rank, range(1, 3))
    further = full_parameters(model)
    assert len(different(further, expected)) == 7, "the copies are copies"
    copied = best["first.weight"]
    assert torch.equal(copied.full_tensor(), expected["first.weight"])
    assert copied.to_local().tracker is not model.first.weight.to_local().tracker
    copied.add_(1)  # a write to a copy does not change the model
    copied.sub_(1)
    model.load_state_dict(best)
    optimizer.load_state_dict(its_state)
    assert torch.equal(model(inputs), output)
    assert not different(full_parameters(model), expected)
    train(model, optimizer, rank, range(1, 3))
    assert not different(full_parameters(model), further), "the same steps again"
    again = copy.deepcopy(best)
    assert not different({n: v.full_tensor() for n, v in again.items()}, expected)
    gradient = model.state_dict()["shift"].clone()
    assert torch.equal(copy.deepcopy(gradient).to_local(), gradient.to_local())
    assert "state_dict()" in refusal_of(lambda: copy.deepcopy(model.shift))
    assert "not supported" in refusal_of(lambda: copy.deepcopy(model))


@on_ranks(world_size=2)
def test_local_rows_are_read_as_arrays_and_a_part_is_not_taken_for_the_whole(rank: int) -> None:
    model = _sharded(integer_net())
    expected = integer_net().first.weight.detach()
    rows = model.first.weight.to_local().spec.rows
    for local in (model.first.weight.detach().to_local(), model.first.weight.data.to_local()):
        assert np.array_equal(local.numpy(), expected[rows.start : rows.stop].numpy())
        assert np.array_equal(np.asarray(local), expected[rows.start : rows.stop].numpy())
        assert local.tolist() == expected[rows.start : rows.stop].tolist()
        if len(rows):
            with pytest.raises(ValueError, match="read-only"):
                local.numpy()[...] = 0
    plain = torch.tensor(model.first.weight.to_local().numpy())
    assert type(plain) is Tensor and torch.equal(plain, expected[rows.start : rows.stop])
    assert torch.equal(model(integer_batch()[0]), integer_net()(integer_batch()[0])), "looking is no edit"
    for look in (lambda p: p.detach().cpu().numpy(), lambda p: p.tolist(), lambda p: np.asarray(p.detach())):
        message = refusal_of(lambda look=look: look(model.first.weight))
        assert "p.to_local()" in message and "full_tensor" in message
    with layerzero.no_sync(model):
        model(integer_batch()[0]).sum().backward()
    assert "no_sync" in refusal_of(lambda: model.shift.grad.to_local().numpy())


@on_ranks(world_size=2)
def test_saving_a_part_as_if_it_were_the_whole_is_one_clear_error(rank: int) -> None:
    model = _sharded(_tied())
    optimizer = layerzero.shard_optimizer(torch.optim.AdamW(model.parameters()), model)
    TiedTransformer.loss(model, TiedTransformer.batch(step=0, rank=rank)).backward()
    optimizer.step()
    for save in (
        lambda: torch.save(model.state_dict(), io.BytesIO()),
        lambda: torch.save(optimizer.state_dict(), io.BytesIO()),
        lambda: safetensors.torch.save(model.state_dict()),
        lambda: safetensors.torch.save({"first": model.head.weight.detach().contiguous()}),
        lambda: safetensors.torch.save_model(model, "never.safetensors"),
    ):
        assert "layerzero.full_state_dict(model)" in refusal_of(save)
    state = layerzero.full_state_dict(model)  # the remedy that the messages name
    if rank == 0:
        del state["head.weight"]
        loaded = safetensors.torch.load(safetensors.torch.save(state))
        assert not different(loaded, state)
    dist.barrier()


@on_ranks(world_size=WORLD)
def test_an_ignored_dtensor_is_whole_in_a_whole_state_and_is_cut_as_it_was(rank: int) -> None:
    """Ignore a DTensor of another framework, sharded or replicated by torch over all ranks."""
    mesh = init_device_mesh("cpu", (WORLD,))
    for placement in (Shard(0), Replicate()):
        net, other = integer_net(), integer_net(seed=1)
        net.shift = nn.Parameter(distribute_tensor(net.shift.detach(), mesh, [placement]))
        model = layerzero.shard_model(net, mesh=mesh_of(2), units=IntegerNet.UNITS, ignored_params=[net.shift])
        state = layerzero.full_state_dict(model, rank0_only=False)
        assert type(state["shift"]) is Tensor
        assert not different(state, integer_net().state_dict())
        layerzero.load_full_state_dict(model, other.state_dict() if rank == 0 else None)
        assert isinstance(model.shift, DTensor) and model.shift.placements == (placement,)
        state = layerzero.full_state_dict(model)
        assert not different(state, other.state_dict() if rank == 0 else {})


@on_ranks(world_size=2)
def test_a_megatron_chunk_takes_a_part_of_a_whole_state_where_it_is_told_to(rank: int) -> None:
    alone, all_ranks = [dist.new_group([each]) for each in range(2)][rank], dist.group.WORLD
    groups = ProcessGroups(all_ranks, all_ranks, tensor=alone, pipeline=alone, model=alone, embedding=None)
    chunk = ShardedChunk(integer_net(), None, groups)
    layerzero.shard_model(chunk, mesh=mesh_of(2))
    part = {name: value for name, value in integer_net(seed=1).state_dict().items() if name.startswith("first")}
    assert "missing" in refusal_of(lambda: chunk.load_state_dict(part))
    result = chunk.load_state_dict({**part, "stranger": torch.zeros(1)}, strict=False)
    assert len(result.missing_keys) == 5 and result.unexpected_keys == ["stranger"]
    expected = integer_net()
    expected.load_state_dict(part, strict=False)
    assert not different(layerzero.full_state_dict(chunk, rank0_only=False), expected.state_dict())
