# ruff: noqa: PLC0415 (Megatron is imported where the stand-ins are in place)
"""Sharded state dicts in Megatron's distributed checkpoints: loads into other layouts, and to and from Megatron."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import layerzero
import layerzero.megatron
from tests.megatron.test_expert_checkpoints import METADATA, experts
from tests.support.megatron_checkpoints import DATA, go_on, load, save, save_and_go_on
from tests.support.megatron_ranks import (
    Case,
    Make,
    Run,
    assert_same,
    make_chunks,
    make_config,
    make_ours,
    make_reference,
    make_scheduler,
    megatron,
    optimizer_config,
)
from tests.support.ranks import run_ranks

# Metadata that Megatron-LM passes with --dist-ckpt-optim-fully-reshardable
RESHARDABLE = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "singleton_local_shards": True,
    "chained_optim_avoid_prefix": True,
}


def _resume(rank: int, path: str, case: Case, metadata: Any, make: Make, parallel: bool = False) -> Run:
    """Load, save the loaded state again, and train on."""
    with megatron(case):
        chunks, optimizer = make(case)
        scheduler = make_scheduler(optimizer)
        load(path, chunks, optimizer, scheduler, metadata, parallel)
        save(f"{path}-again", chunks, optimizer, scheduler, metadata, parallel)
        assert_same_content(path, f"{path}-again")
        return go_on(case, chunks, optimizer, scheduler)


def assert_same_content(one: str, other: str) -> None:
    """Assert that two checkpoints have the same tensors, bit for bit, and the same settings and counts."""
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
    chain = common["optimizer"]
    return [_settings_of(chain[index]) for index in sorted(chain)] if 0 in chain else _settings_of(chain)


def _settings_of(optimizer: dict[str, Any]) -> Any:
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


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "saved",
    [DATA.but(tp=2, tied=False, dtype="bfloat16"), DATA.but(pp=2, zero3_size=1, optimizer="sgd")],
    ids=["tensor", "pipeline"],
)
def test_a_checkpoint_resumes_in_any_layout(saved: Case, tmp_path: Path) -> None:
    path = f"{tmp_path}/saved"
    expected = run_ranks(save_and_go_on, path, saved, None, make_ours, True, world_size=4)
    losses = max(run.losses for run in expected)  # from a rank of the last stage
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
        elif other.tp * other.pp == saved.tp * saved.pp:  # the same number of data-parallel ranks: the same batches
            assert any(_close(run.losses, losses) for run in resumed), (other, resumed, losses)


def _close(some: list[float], others: list[float]) -> bool:
    return len(some) == len(others) and torch.allclose(torch.tensor(some), torch.tensor(others), rtol=2e-3)


INTERCHANGED = {
    "muon": (DATA.but(optimizer="muon"), None),
    "muon-bf16": (DATA.but(tp=2, optimizer="muon", dtype="bfloat16"), METADATA),
    "muon-experts": (experts(2, optimizer="muon"), METADATA),
    "fp32": (DATA.but(pp=2), None),
    "bf16": (DATA.but(tp=2, dtype="bfloat16"), None),
    "fp16": (DATA.but(pp=2, dtype="float16", overflow_at=1), None),
    "distributed": (DATA.but(tp=2, distributed=True), RESHARDABLE),
    "distributed-bf16": (DATA.but(pp=2, dtype="bfloat16", distributed=True, tied=False), RESHARDABLE),
}


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize(("case", "metadata"), INTERCHANGED.values(), ids=INTERCHANGED)
def test_megatron_and_layerzero_load_each_others_checkpoints(case: Case, metadata: Any, tmp_path: Path) -> None:
    both = (("theirs", make_reference, make_ours), ("ours", make_ours, make_reference))
    # Megatron's distributed optimizer can load only into the fused optimizers of Apex and Transformer Engine. This test
    # instead compares the checkpoint that Megatron saved with the one that layerzero saves after loading it.
    for name, saver, loader in both[:1] if case.distributed else both:
        path = f"{tmp_path}/{name}"
        expected = run_ranks(save_and_go_on, path, case, metadata, saver, world_size=4)
        resumed = run_ranks(_resume, path, case, metadata, loader, world_size=4)
        for one, other in zip(expected, resumed, strict=True):
            assert_same(one, other, case)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize(("dtype", "metadata"), [("float32", None), ("bfloat16", METADATA), ("float16", METADATA)])
def test_expert_parallel_checkpoints_are_megatrons(dtype: str, metadata: Any, tmp_path: Path) -> None:
    own = {"zero3_size": 4, "expert_zero3_size": 1}
    case = experts(2, dtype=dtype, **({"pp": 2} if dtype == "bfloat16" else own if dtype == "float32" else {}))
    for name, saver, loader in (("theirs", make_reference, make_ours), ("ours", make_ours, make_reference)):
        path = f"{tmp_path}/{name}"
        expected = run_ranks(save_and_go_on, path, case, metadata, saver, world_size=4)
        resumed = run_ranks(_resume, path, case, metadata, loader, world_size=4)
        for one, other in zip(expected, resumed, strict=True):
            assert_same(one, other, case)


@pytest.mark.parametrize("optimizer", ["adam", "muon"])
def test_expert_parallel_checkpoints_resume_on_other_ranks(optimizer: str, tmp_path: Path) -> None:
    path, saved = f"{tmp_path}/saved", experts(2, optimizer=optimizer)
    expected = run_ranks(save_and_go_on, path, saved, METADATA, make_ours, True, world_size=4)
    own = saved.but(zero3_size=1, expert_zero3_size=2)
    for case in (saved, experts(4, zero3_size=4, optimizer=optimizer), own, experts(4, optimizer=optimizer)):
        resumed = run_ranks(_resume, path, case, METADATA, make_ours, True, world_size=4)
        shutil.rmtree(f"{path}-again")
        for one, other in zip(expected, resumed, strict=True):
            if case == saved:
                _assert_bits(one, other)
            torch.testing.assert_close(one.losses, other.losses, rtol=1e-4, atol=1e-5)


def _make_without_momentum(case: Case) -> tuple[list[nn.Module], Any]:
    """Make an optimizer that keeps no state."""
    chunks, _ = make_ours(case)
    make = functools.partial(torch.optim.SGD, lr=1e-2)
    return chunks, layerzero.megatron.ShardedMegatronOptimizer(chunks, optimizer_config(case), make_optimizer=make)


def _make_with_frozen_stage(case: Case) -> tuple[list[nn.Module], Any]:
    """Make a model whose first stage has no trainable parameter."""
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
    metadata = {"non_homogeneous_layers": True}  # a part of a layer stack cannot be saved
    expected = run_ranks(save_and_go_on, path, case, metadata, make, world_size=4)
    for one, other in zip(expected, run_ranks(_resume, path, case, metadata, make, world_size=4), strict=True):
        _assert_bits(one, other)


def _loses_momentum(rank: int, path: str) -> None:
    case = DATA.but(optimizer="sgd")
    with megatron(case):
        chunks, optimizer = _make_without_momentum(case)
        with pytest.raises(
            ValueError, match=r"checkpoint need momentum_buffer of .*settings of the checkpoint: .*'momentum': 0.9"
        ):
            load(path, chunks, optimizer, make_scheduler(optimizer), None, parallel=False)


def test_state_that_the_optimizer_would_not_keep_is_not_lost_without_a_word(tmp_path: Path) -> None:
    path = f"{tmp_path}/saved"
    run_ranks(save_and_go_on, path, DATA.but(optimizer="sgd"), None, make_ours, world_size=4)
    run_ranks(_loses_momentum, path, world_size=4)
