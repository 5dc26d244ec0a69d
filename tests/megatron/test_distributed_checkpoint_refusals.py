# ruff: noqa: PLC0415 (Megatron is imported where the stand-ins are in place)
"""Megatron's distributed checkpoints: unsupported state is refused, and loads that fail or miss entries."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import CheckpointException

import layerzero
import layerzero.megatron
from tests.support.megatron_checkpoints import BEFORE, DATA, GATED, save, save_and_go_on, sharded_state
from tests.support.megatron_ranks import HIDDEN, Case, make_ours, make_scheduler, megatron, train, whole_weights
from tests.support.ranks import on_ranks, run_ranks


def _finds_less(rank: int, path: str) -> tuple[bool, bool]:
    """Load a checkpoint without q/k norms into a model that has them.

    Returns: whether a strict load of the model raised on this rank, and whether the load of the optimizer did.
    """
    case = DATA.but(settings=(*GATED, ("qk_layernorm", True)))
    with megatron(case):
        from megatron.core import dist_checkpointing

        chunks, optimizer = make_ours(case)
        before = whole_weights(chunks[0])
        wanted = sharded_state(chunks, optimizer, None, is_loading=True)
        state = dist_checkpointing.load(wanted, path, strict="log_all")
        result = chunks[0].load_state_dict(state["model"], strict=False)
        assert all("q_layernorm" in name or "k_layernorm" in name for name in result.missing_keys)
        for name, value in whole_weights(chunks[0]).items():
            assert torch.equal(value, before[name]) == ("q_layernorm" in name or "k_layernorm" in name)
        strictly = _raises(lambda: chunks[0].load_state_dict(state["model"]), "Missing key")
        assert strictly == bool(result.missing_keys)
        without_state = r"no exp_avg, exp_avg_sq of '.*without the optimizer"
        return strictly, _raises(lambda: optimizer.load_state_dict(state["optimizer"]), without_state)


def _raises(act: Callable[[], Any], text: str) -> bool:
    try:
        act()
    except (RuntimeError, ValueError) as error:
        assert re.search(text, str(error))
        return True
    return False


def test_a_load_that_is_not_strict_leaves_what_the_checkpoint_lacks(tmp_path: Path) -> None:
    path = f"{tmp_path}/saved"
    run_ranks(save_and_go_on, path, DATA, None, make_ours, world_size=4)
    for refused in zip(*run_ranks(_finds_less, path, world_size=4), strict=True):
        assert any(refused)  # on the ranks that have rows of the missing parameter


def _refuses(rank: int, path: str) -> None:
    case = Case(pp=2, zero3_size=2)
    with megatron(case):
        from megatron.core import dist_checkpointing

        chunks, optimizer = make_ours(case)
        scheduler = make_scheduler(optimizer)
        with pytest.raises(
            NotImplementedError, match=r"distrib_optim_sharding_type='dp_reshardable'.*fully_reshardable"
        ):
            optimizer.sharded_state_dict({}, metadata={"distrib_optim_sharding_type": "dp_reshardable"})
        unstepped = optimizer.sharded_state_dict({})
        assert {group["step"] for group in unstepped["param_groups"]} == {0}, "all of them, so there is one count"
        optimizer.load_state_dict(unstepped)
        assert not optimizer.sharded[0].state_by_name(), "a parameter has no state before its first step"
        optimizer.sharded[0].inner.state["k"] = 1
        with pytest.raises(NotImplementedError, match=r"state under 'k', which is no parameter.*megatron\.save"):
            optimizer.sharded_state_dict({})
        del optimizer.sharded[0].inner.state["k"]
        train(case, chunks, optimizer, scheduler, BEFORE)

        inner = optimizer.sharded[0].inner
        key = next(key for key, state in inner.state.items() if state)
        lost = inner.state.pop(key)
        with pytest.raises(ValueError, match="has not been stepped yet"):
            optimizer.sharded_state_dict({})
        inner.state[key] = lost
        states = [state for state in inner.state.values() if state]
        if dist.get_rank(optimizer.groups.pipeline) == 1:  # only one stage detects it by itself
            states[0]["step"] += 1
        with pytest.raises(ValueError, match="have been stepped 2, 3 times"):
            optimizer.sharded_state_dict({})
        if dist.get_rank(optimizer.groups.pipeline) == 1:
            states[0]["step"] -= 1
        if rank == 3:
            states[0]["average"] = torch.zeros(1, 1, 7)
        with pytest.raises(
            (NotImplementedError, RuntimeError), match=r"'average' of .* does not have the parameter's shape"
        ):
            optimizer.sharded_state_dict({})
        states[0].pop("average", None)

        before = [whole_weights(chunk) for chunk in chunks]
        save(path, chunks, optimizer, scheduler, None, parallel=False)
        others, other = make_ours(case.but(zero3_size=1))
        unloaded = [whole_weights(chunk) for chunk in others]
        state = sharded_state(others, other, None, is_loading=True)
        _damage(rank, path)
        with pytest.raises(CheckpointException, match=r"No such file"):
            dist_checkpointing.load(state, path)
        for chunk, weights, loaded in zip(others, unloaded, before, strict=True):
            now = whole_weights(chunk)
            assert all(torch.equal(value, weights[name]) for name, value in now.items())
            assert any(not torch.equal(value, loaded[name]) for name, value in now.items())
        groups = [{**group, "wd_mult": 7.0} for group in state["optimizer"]["param_groups"]]
        with pytest.raises(ValueError, match=r"no parameter group with .*wd_mult=1.0"):
            other.load_state_dict({**state["optimizer"], "param_groups": groups})


def _damage(rank: int, path: str) -> None:
    dist.barrier()
    if rank == 0:
        for file in Path(path).glob("*.distcp"):
            file.unlink()
    dist.barrier()


def test_what_the_format_has_no_place_for_is_refused_and_a_failed_load_changes_nothing(tmp_path: Path) -> None:
    run_ranks(_refuses, f"{tmp_path}/saved", world_size=4)


def _described_wrongly(rank: int, index: tuple[slice, ...], axis: int) -> bool:
    """Save a module that stores only a part of its weight; return whether this rank raised."""
    case = Case(zero3_size=2)
    with megatron(case):
        from megatron.core.dist_checkpointing.mapping import ShardedTensor
        from megatron.core.transformer.mlp import MLP

        original = MLP.sharded_state_dict

        def in_part(self: nn.Module, prefix: str = "", *args: Any, **kwargs: Any) -> dict[str, Any]:
            state = original(self, prefix, *args, **kwargs)
            whole = state[f"{prefix}linear_fc2.weight"]
            part = ShardedTensor.from_rank_offsets(whole.key, whole.data[index], (axis, 0, 2))
            return {**state, f"{prefix}linear_fc2.weight": part}

        chunks, _ = make_ours(case)
        shown = dict(chunks[0].named_parameters())
        refused = False
        with mock.patch.object(MLP, "sharded_state_dict", in_part):
            try:
                chunks[0].sharded_state_dict()
            except NotImplementedError as error:
                refused = "linear_fc2.weight' is stored as" in str(error)
        assert all(shown[name] is parameter for name, parameter in chunks[0].named_parameters())
        return refused


def test_pieces_that_are_not_all_rows_are_refused() -> None:
    columns, rows = (slice(None), slice(0, HIDDEN)), (slice(0, HIDDEN // 2),)
    assert all(run_ranks(_described_wrongly, columns, 1, world_size=4))
    refused = run_ranks(_described_wrongly, rows, 0, world_size=4)  # on the ranks that hold the other rows
    assert any(refused) and not all(refused)


@on_ranks(world_size=4)
def test_parameters_are_reloaded_from_a_checkpoint_of_all_chunks(rank: int) -> None:
    case = Case(pp=2, chunks=2, zero3_size=2)
    with megatron(case):
        chunks, optimizer = make_ours(case)
        wanted = [layerzero.full_state_dict(chunk, rank0_only=False) for chunk in chunks]
        with torch.no_grad():
            for chunk in chunks:
                for parameter in chunk.parameters():
                    parameter.add_(1.0)
        with pytest.raises(ValueError, match=r"the state dict has no key 'model0'\. Its keys are \['model'\]"):
            optimizer.reload_model_params({"model": wanted[0]})
        optimizer.reload_model_params({f"model{index}": state for index, state in enumerate(wanted)})
        for chunk, state in zip(chunks, wanted, strict=True):
            for name, value in layerzero.full_state_dict(chunk, rank0_only=False).items():
                assert not isinstance(value, Tensor) or torch.equal(value, state[name]), name
