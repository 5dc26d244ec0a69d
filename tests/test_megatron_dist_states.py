# ruff: noqa: PLC0415 (Megatron is imported where the stand-ins are in place)
"""Sharded state dicts in Megatron's own distributed checkpoints: between layouts, and from and to Megatron itself."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import queue
import re
import shutil
from collections.abc import Callable, Iterator
from importlib.util import find_spec
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
from tests.megatron_ranks import (
    HIDDEN,
    Case,
    Run,
    make_chunks,
    make_config,
    make_ours,
    make_reference,
    make_scheduler,
    megatron,
    optimizer_config,
    train,
    whole_weights,
)
from tests.ranks import run_ranks
from tests.test_megatron import assert_same

if find_spec("megatron") is None:
    pytest.skip("needs megatron-core: pip install --no-deps -r requirements-megatron.txt", allow_module_level=True)

Make = Callable[[Case], tuple[list[nn.Module], Any]]
# What Megatron-LM passes with --dist-ckpt-optim-fully-reshardable
RESHARDABLE = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "singleton_local_shards": True,
    "chained_optim_avoid_prefix": True,
}
GATED = (("gated_linear_unit", True),)  # its first linear layer is stored in two pieces
DATA = Case(zero3_size=2, settings=GATED)
BEFORE, AFTER = [0, 1], [2, 3]  # steps


def sharded_state(chunks: list[nn.Module], optimizer: Any, metadata: Any, *, is_loading: bool) -> dict[str, Any]:
    """As Megatron-LM's training script puts it together."""
    state: dict[str, Any] = {
        name: chunk.sharded_state_dict(metadata=metadata) for name, chunk in _named(chunks).items()
    }
    if not optimizer.is_stub_optimizer:
        state["optimizer"] = optimizer.sharded_state_dict(state, is_loading=is_loading, metadata=metadata)
    return state


def _named(chunks: list[nn.Module]) -> dict[str, Any]:
    """Ours as they are, and what is inside Megatron's wrapper, as Megatron-LM does."""
    names = ["model"] if len(chunks) == 1 else [f"model{index}" for index in range(len(chunks))]
    return {
        name: chunk if isinstance(chunk, layerzero.megatron.ShardedChunk) else chunk.module
        for name, chunk in zip(names, chunks, strict=True)
    }


def save(path: str, chunks: list[nn.Module], optimizer: Any, scheduler: Any, metadata: Any, parallel: bool) -> None:
    from megatron.core import dist_checkpointing

    if dist.get_rank() == 0:
        Path(path).mkdir()
    dist.barrier()
    state = {"scheduler": scheduler.state_dict(), **sharded_state(chunks, optimizer, metadata, is_loading=False)}
    with _may_start_writers():
        dist_checkpointing.save(state, path, _in_parallel() if parallel else None)


def _in_parallel(load_from: str | None = None) -> Any:
    """Megatron-LM's default: what several data-parallel ranks hold is written and read by one of them."""
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing import serialization
    from megatron.core.dist_checkpointing.strategies import fully_parallel

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    if load_from is None:
        strategy = serialization.get_default_save_sharded_strategy("torch_dist")
        return fully_parallel.FullyParallelSaveStrategyWrapper(strategy, group)
    strategy = serialization.get_default_load_sharded_strategy(load_from)
    return fully_parallel.FullyParallelLoadStrategyWrapper(strategy, group)


@contextlib.contextmanager
def _may_start_writers() -> Iterator[None]:
    """Megatron writes in processes of its own, which daemons such as the ranks of these tests must not start."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    daemon = mock.patch.dict(multiprocessing.current_process()._config, daemon=False)  # type: ignore[attr-defined]
    # Megatron has a process for this queue, which would outlive a rank that is killed.
    with daemon, mock.patch.object(filesystem_async, "_results_queue", queue.Queue()):
        yield


def load(path: str, chunks: list[nn.Module], optimizer: Any, scheduler: Any, metadata: Any, parallel: bool) -> None:
    from megatron.core import dist_checkpointing

    wanted = sharded_state(chunks, optimizer, metadata, is_loading=True)
    state = dist_checkpointing.load(wanted, path, _in_parallel(path) if parallel else None)
    for name, chunk in _named(chunks).items():
        chunk.load_state_dict(state[name])
    if not optimizer.is_stub_optimizer:
        optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])


def _go_on(case: Case, chunks: list[nn.Module], optimizer: Any, scheduler: Any) -> Run:
    losses, results, scales = train(case, chunks, optimizer, scheduler, AFTER)
    return Run(losses, results, [whole_weights(chunk) for chunk in chunks], scales)


def _save(rank: int, path: str, case: Case, metadata: Any, make: Make, parallel: bool = False) -> Run:
    """Train, save, and train on."""
    with megatron(case):
        chunks, optimizer = make(case)
        scheduler = make_scheduler(optimizer)
        for group in optimizer.param_groups:
            group.update({"eps": 1e-6} if "eps" in group else {"dampening": 0.2})  # what only the checkpoint knows
        train(case, chunks, optimizer, scheduler, BEFORE)
        save(path, chunks, optimizer, scheduler, metadata, parallel)
        return _go_on(case, chunks, optimizer, scheduler)


def _resume(rank: int, path: str, case: Case, metadata: Any, make: Make, parallel: bool = False) -> Run:
    """Load, save what was loaded once more, and train on."""
    with megatron(case):
        chunks, optimizer = make(case)
        scheduler = make_scheduler(optimizer)
        load(path, chunks, optimizer, scheduler, metadata, parallel)
        save(f"{path}-again", chunks, optimizer, scheduler, metadata, parallel)
        assert_same_content(path, f"{path}-again")
        return _go_on(case, chunks, optimizer, scheduler)


def assert_same_content(one: str, other: str) -> None:
    """Two checkpoints have the same tensors, bit for bit, the same settings and counts."""
    from megatron.core import dist_checkpointing

    first, second = (
        {key: value for key, value in dist_checkpointing.load_plain_tensors(path).items() if isinstance(value, Tensor)}
        for path in (one, other)
    )
    assert first.keys() == second.keys()
    assert len(first) > 20
    for key, value in first.items():
        assert value.dtype == second[key].dtype
        assert torch.equal(value, second[key]), key
    common, again = (dist_checkpointing.load_common_state_dict(path) for path in (one, other))
    assert _settings(common) == _settings(again)
    assert common["scheduler"] == again["scheduler"]


def _settings(common: dict[str, Any]) -> Any:
    optimizer = common["optimizer"]
    inner = optimizer.get("optimizer", optimizer)
    names = ("wd_mult", "lr_mult", "lr", "weight_decay", "max_lr", "min_lr", "betas", "eps", "momentum", "dampening")
    groups = sorted(repr([(name, group.get(name)) for name in names]) for group in inner["param_groups"])
    steps = {float(group["step"]) for group in inner["param_groups"] if "step" in group}
    if "common_step" in inner.get("state", {}):
        steps.add(float(inner["state"]["common_step"]))
    return groups, steps, optimizer.get("grad_scaler"), optimizer.get("param_state_sharding_type")


def _assert_bits(one: Run, other: Run) -> None:
    assert one[:2] == other[:2]
    for mine, theirs in zip(one.weights, other.weights, strict=True):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(value, theirs[name]) for name, value in mine.items())


@pytest.mark.parametrize(
    "saved",
    [DATA.but(tp=2, tied=False, dtype="bfloat16"), DATA.but(pp=2, zero3_size=1, optimizer="sgd")],
    ids=["tensor", "pipeline"],
)
def test_a_checkpoint_resumes_in_any_layout(saved: Case, tmp_path: Path) -> None:
    path = f"{tmp_path}/saved"
    expected = run_ranks(_save, path, saved, None, make_ours, True, world_size=4)
    losses = max(run.losses for run in expected)  # of a rank on the last stage
    for layout in (
        {},
        {"tp": 1, "pp": 2},
        {"tp": 1, "pp": 2, "chunks": 2},
        {"tp": 1, "pp": 1},
        {"tp": 4, "pp": 1, "zero3_size": 1},
    ):
        other = saved.but(**layout)
        resumed = run_ranks(_resume, path, other, None, make_ours, True, world_size=4)
        shutil.rmtree(f"{path}-again")
        if other == saved:
            for one, two in zip(expected, resumed, strict=True):
                _assert_bits(one, two)
        elif other.tp * other.pp == saved.tp * saved.pp:  # as many data-parallel ranks: the same batches
            assert any(_close(run.losses, losses) for run in resumed), (other, resumed, losses)


def _close(some: list[float], others: list[float]) -> bool:
    return len(some) == len(others) and torch.allclose(torch.tensor(some), torch.tensor(others), rtol=2e-3)


INTERCHANGED = {
    "fp32": (DATA.but(pp=2), None),
    "bf16": (DATA.but(tp=2, dtype="bfloat16"), None),
    "fp16": (DATA.but(pp=2, dtype="float16", overflow_at=1), None),
    "distributed": (DATA.but(tp=2, distributed=True), RESHARDABLE),
    "distributed-bf16": (DATA.but(pp=2, dtype="bfloat16", distributed=True, tied=False), RESHARDABLE),
}


@pytest.mark.parametrize(("case", "metadata"), INTERCHANGED.values(), ids=INTERCHANGED)
def test_megatron_and_layerzero_load_each_others_checkpoints(case: Case, metadata: Any, tmp_path: Path) -> None:
    both = (("theirs", make_reference, make_ours), ("ours", make_ours, make_reference))
    # Megatron's distributed optimizer can load into the fused optimizers of Apex and Transformer Engine only. That it
    # finds what it looks for is seen from what it has saved itself, which is equal to what we save after loading it.
    for name, saver, loader in both[:1] if case.distributed else both:
        path = f"{tmp_path}/{name}"
        expected = run_ranks(_save, path, case, metadata, saver, world_size=4)
        resumed = run_ranks(_resume, path, case, metadata, loader, world_size=4)
        for one, other in zip(expected, resumed, strict=True):
            assert_same(one, other, case)


def _make_without_momentum(case: Case) -> tuple[list[nn.Module], Any]:
    """The optimizer keeps no state at all."""
    chunks, _ = make_ours(case)
    make = functools.partial(torch.optim.SGD, lr=1e-2)
    return chunks, layerzero.megatron.ShardedMegatronOptimizer(chunks, optimizer_config(case), make_optimizer=make)


def _make_with_frozen_stage(case: Case) -> tuple[list[nn.Module], Any]:
    """The first stage has nothing to train."""
    config = make_config(case)
    models = make_chunks(case, config)
    chunks = layerzero.megatron.wrap(models, config, zero3_size=case.zero3_size)
    if chunks[0].groups.is_first_stage:
        chunks[0].requires_grad_(False)
    return chunks, layerzero.megatron.ShardedMegatronOptimizer(chunks, optimizer_config(case))


@pytest.mark.parametrize(
    ("make", "case"),
    [(_make_without_momentum, DATA.but(optimizer="sgd")), (_make_with_frozen_stage, DATA.but(pp=2, tied=False))],
    ids=["without-state", "frozen-stage"],
)
def test_optimizers_that_keep_nothing_are_saved_and_loaded(make: Make, case: Case, tmp_path: Path) -> None:
    path = f"{tmp_path}/saved"
    metadata = {"non_homogeneous_layers": True}  # a stack of layers cannot be saved in part
    expected = run_ranks(_save, path, case, metadata, make, world_size=4)
    for one, other in zip(expected, run_ranks(_resume, path, case, metadata, make, world_size=4), strict=True):
        _assert_bits(one, other)


def _loses_momentum(rank: int, path: str) -> None:
    case = DATA.but(optimizer="sgd")
    with megatron(case):
        chunks, optimizer = _make_without_momentum(case)
        with pytest.raises(ValueError, match=r"saved with momentum_buffer of .*differ in .*'momentum': 0.9"):
            load(path, chunks, optimizer, make_scheduler(optimizer), None, parallel=False)


def test_state_that_the_optimizer_would_not_keep_is_not_lost_without_a_word(tmp_path: Path) -> None:
    path = f"{tmp_path}/saved"
    run_ranks(_save, path, DATA.but(optimizer="sgd"), None, make_ours, world_size=4)
    run_ranks(_loses_momentum, path, world_size=4)


def _finds_less(rank: int, path: str) -> tuple[bool, bool]:
    """Load what was saved without q/k norms into a model that has them; tells what this rank has missed."""
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
    run_ranks(_save, path, DATA, None, make_ours, world_size=4)
    for refused in zip(*run_ranks(_finds_less, path, world_size=4), strict=True):
        assert any(refused)  # by the ranks that have rows of what is missing


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
        with pytest.raises(ValueError, match="has not been stepped yet"):
            optimizer.sharded_state_dict({})
        train(case, chunks, optimizer, scheduler, BEFORE)

        inner = optimizer.sharded[0].inner
        states = [state for state in inner.state.values() if state]
        if dist.get_rank(optimizer.groups.pipeline) == 1:  # only one stage notices anything by itself
            states[0]["step"] += 1
        with pytest.raises(ValueError, match="have been stepped 2, 3 times"):
            optimizer.sharded_state_dict({})
        if dist.get_rank(optimizer.groups.pipeline) == 1:
            states[0]["step"] -= 1
        if rank == 3:
            states[0]["average"] = torch.zeros(1, 1, 7)
        with pytest.raises(
            (NotImplementedError, RuntimeError), match=r"'average' of .* is not of the parameter's shape"
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
        with pytest.raises(ValueError, match=r"no parameter group with wd_mult=0.0"):
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
    """A module that stores a part of its weight only; whether this rank has refused that."""
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
    refused = run_ranks(_described_wrongly, rows, 0, world_size=4)  # by who holds the others
    assert any(refused) and not all(refused)


def _reloads(rank: int) -> None:
    case = Case(pp=2, chunks=2, zero3_size=2)
    with megatron(case):
        chunks, optimizer = make_ours(case)
        wanted = [layerzero.full_state_dict(chunk, rank0_only=False) for chunk in chunks]
        with torch.no_grad():
            for chunk in chunks:
                for parameter in chunk.parameters():
                    parameter.add_(1.0)
        with pytest.raises(ValueError, match=r"the state dict has no 'model0' but \['model'\]"):
            optimizer.reload_model_params({"model": wanted[0]})
        optimizer.reload_model_params({f"model{index}": state for index, state in enumerate(wanted)})
        for chunk, state in zip(chunks, wanted, strict=True):
            for name, value in layerzero.full_state_dict(chunk, rank0_only=False).items():
                assert not isinstance(value, Tensor) or torch.equal(value, state[name]), name


def test_parameters_are_reloaded_from_a_checkpoint_of_all_chunks() -> None:
    run_ranks(_reloads, world_size=4)
