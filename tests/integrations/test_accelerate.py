"""layerzero.integrations.accelerate compared with Accelerate's DistributedDataParallel on the same data."""

from __future__ import annotations

import os
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.data import DataLoader

if find_spec("accelerate") is None:
    pytest.skip("needs accelerate: pip install --no-deps -r requirements-loops.txt", allow_module_level=True)

from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, ProjectConfiguration, load_checkpoint_in_model

import layerzero
from layerzero import checkpoint
from layerzero.checkpoint import publish
from layerzero.integrations.accelerate import CONFIG_VARIABLE, LayerZeroAccelerator, LayerZeroPlugin
from tests.support.loops import Samples, assert_like, forget_accelerators, launched, on_launched_ranks
from tests.support.models import (
    IntegerNet,
    TiedTransformer,
    different,
    exact_sgd,
    full_parameters,
    integer_loss,
    integer_net,
)
from tests.support.ranks import on_ranks, run_ranks

SAMPLES = 64  # 8 micro-batches of 2 samples on 4 ranks


def accelerator(plugin: LayerZeroPlugin | None = None, *, ours: bool = True, **settings: Any) -> Accelerator:
    forget_accelerators()
    settings = {"cpu": True, "gradient_accumulation_steps": 2, **settings}
    return LayerZeroAccelerator(layerzero_plugin=plugin, **settings) if ours else Accelerator(**settings)


def objects(net: nn.Module | None = None) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader, Any]:
    net = integer_net() if net is None else net
    optimizer = exact_sgd(net.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 2.0 ** -(step // 8))  # 4 a step, for 4 ranks
    return net, optimizer, DataLoader(Samples(SAMPLES), batch_size=2), scheduler


def train(
    acc: Accelerator, prepared: tuple[Any, ...], max_norm: float = 1e9, skip: int = 0
) -> tuple[list[float], list[float]]:
    """Return the losses of the micro-batches and the gradient norms of the steps."""
    model, optimizer, loader, scheduler = prepared
    losses, norms = [], []
    for batch in acc.skip_first_batches(loader, skip) if skip else loader:
        with acc.accumulate(model):
            loss = integer_loss(model, batch)
            acc.backward(loss)
            if acc.sync_gradients:
                norms.append(float(acc.clip_grad_norm_(model.parameters(), max_norm)))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms


PLUGIN = {"zero3_size": 2, "units": IntegerNet.UNITS}


@on_ranks()
def test_losses_norms_and_weights_are_those_of_ddp(rank: int) -> None:
    with launched():
        reference = accelerator(ours=False)
        theirs = reference.prepare(*objects())
        expected = train(reference, theirs)
        keeps = {**PLUGIN, "settings": {"reshard_after_forward": "step"}}
        for plugin in (PLUGIN, {**PLUGIN, "zero3_size": 1}, {**PLUGIN, "zero3_size": 4}, keeps):
            acc = accelerator(LayerZeroPlugin(**plugin))
            prepared = acc.prepare(*objects())
            losses, norms = train(acc, prepared)
            assert losses == expected[0]  # the same bits
            assert_like(norms, expected[1])
            traffic = layerzero.traffic(prepared[0])
            handles = 4  # three units and the root
            assert (traffic.calls.get("gather") == handles * 4) == (plugin is keeps)  # of 4 steps with 2 backwards each
            assert traffic.calls.get("hop2", 0) == (0 if plugin["zero3_size"] == 4 else handles * 4)  # of 8 backwards
            assert acc.unwrap_model(prepared[0]) is prepared[0]
            state = acc.get_state_dict(prepared[0])
            for name, value in reference.get_state_dict(theirs[0]).items():
                assert rank or torch.equal(state[name], value)


@on_ranks()
def test_clipping_by_norm_of_all_or_some_and_by_value(rank: int) -> None:
    with launched():
        reference = accelerator(ours=False)
        expected = train(reference, reference.prepare(*objects()), max_norm=2.0)
        acc = accelerator(LayerZeroPlugin(**PLUGIN))
        got = train(acc, acc.prepare(*objects()), max_norm=2.0)
        assert max(expected[1]) > 4.0, "something is clipped"
        assert_like(got[0], expected[0])
        assert_like(got[1], expected[1])
        # Clip some parameters only, and with a list made before prepare.
        acc = accelerator(LayerZeroPlugin(**PLUGIN), gradient_accumulation_steps=1)
        net, optimizer, loader, _ = objects()
        before, some = list(net.parameters()), list(net.head.parameters())
        model, optimizer = acc.prepare(net, optimizer)
        integer_loss(model, next(iter(acc.prepare(loader)))).backward()
        grads = [p.grad.full_tensor() for p in model.head.parameters()]
        norm = acc.clip_grad_norm_(some, 1e9)
        torch.testing.assert_close(norm, torch.cat([g.flatten() for g in grads]).norm())
        whole = acc.clip_grad_norm_(before, 1e9)
        torch.testing.assert_close(whole, layerzero.clip_grad_norm_(model, 1e9))
        assert whole > norm
        acc.clip_grad_value_(model.parameters(), 0.5)
        assert max(p.grad.full_tensor().abs().max() for p in model.parameters()) == 0.5


@on_ranks()
def test_prepare_takes_its_arguments_in_any_order_and_one_by_one(rank: int) -> None:
    with launched():
        results = []
        for order in ((3, 1, 0, 2), (1, 3, 2, 0), (0, 2, 1, 3)):
            for together in (True, False):
                acc = accelerator(LayerZeroPlugin(**PLUGIN))
                things = objects()
                shuffled = [things[i] for i in order]
                if together:
                    ready = acc.prepare(*shuffled)
                elif order[0] != 3:  # Accelerate requires the optimizer before its scheduler
                    ready = [acc.prepare(each) for each in shuffled]
                else:
                    continue
                prepared = tuple(ready[order.index(i)] for i in range(4))
                results.append(train(acc, prepared)[0])
                assert isinstance(prepared[1].optimizer, layerzero.ShardedOptimizer)
        assert len(results) == 5
        assert all(result == results[0] for result in results)


def _resume(rank: int, folder: str) -> None:
    with launched():
        acc = accelerator(LayerZeroPlugin(**PLUGIN), gradient_accumulation_steps=1)
        prepared = acc.prepare(*objects())
        seen: list[int] = []
        acc.register_save_state_pre_hook(lambda models, weights, where: seen.append(len(models)))
        whole = iter(prepared[2])
        losses = train(acc, (*prepared[:2], [next(whole) for _ in range(3)], prepared[3]))[0]
        acc.save_state(folder)
        acc.save_state(folder)  # replaces the first
        assert seen == [1, 1]
        drawn = torch.rand(1)
        losses += train(acc, (*prepared[:2], list(whole), prepared[3]))[0]
        final = full_parameters(prepared[0])
    for zero3_size in (2, 4):
        with launched():
            acc = accelerator(LayerZeroPlugin(**{**PLUGIN, "zero3_size": zero3_size}), gradient_accumulation_steps=1)
            prepared = acc.prepare(*objects(IntegerNet()))
            acc.load_state(folder)
            assert torch.equal(torch.rand(1), drawn)
            got = train(acc, prepared, skip=3)[0]
            assert_like(got, losses[3:], rtol=0 if zero3_size == 2 else 1e-5)  # additions happen in another order
            assert prepared[3].get_last_lr() != [2**-4]
            if zero3_size == 2:
                for name, value in full_parameters(prepared[0]).items():
                    assert torch.equal(value, final[name])
    names = {each.name for each in Path(folder).iterdir()}
    assert {"layerzero_0", "scheduler.bin", "random_states_0.pkl"} <= names
    assert not any("model" in name or "optimizer" in name or name.endswith((".new", ".old")) for name in names)


def test_a_resumed_run_is_the_uninterrupted_one_also_with_another_zero3_size(tmp_path: Path) -> None:
    run_ranks(_resume, str(tmp_path / "state"))


@on_launched_ranks(pg_timeout=20)
def test_a_save_over_another_that_fails_on_one_rank_fails_on_all_and_keeps_the_old_one(
    rank: int, tmp_path: Path
) -> None:
    folder = str(tmp_path / "state")
    acc = accelerator(LayerZeroPlugin(**PLUGIN))
    model, *_ = acc.prepare(*objects())
    acc.save_state(folder)
    acc.wait_for_everyone()
    saved, rename = full_parameters(model), os.rename
    exchange, publish._renameat2 = publish._renameat2, None

    failures = [OSError(5, "Input/output error")] if rank == 0 else []

    def refuse(source: Any, target: Any) -> None:
        if Path(target).name == "layerzero_0" and failures:
            raise failures.pop()
        rename(source, target)

    with torch.no_grad():
        model.shift.fill_(9.0)
    os.rename = refuse
    began = time.monotonic()
    try:
        with pytest.raises(checkpoint.CheckpointError, match="Input/output error"):
            acc.save_state(folder)
    finally:
        os.rename, publish._renameat2 = rename, exchange
    assert time.monotonic() - began < 15, "nobody waits for the rank that failed"
    found = checkpoint.load_latest(folder, model)
    assert found is not None, "the old one is still there"
    assert not different(full_parameters(model), saved)


@on_launched_ranks()
def test_automatic_names_and_total_limit(rank: int, tmp_path: Path) -> None:
    folder = str(tmp_path)
    project = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True, total_limit=2)
    acc = accelerator(LayerZeroPlugin(**PLUGIN), project_config=project)
    model, *_ = acc.prepare(*objects())
    for value in (1.0, 2.0, 3.0):
        with torch.no_grad():
            model.shift.fill_(value)
        acc.save_state()
        acc.wait_for_everyone()
    with torch.no_grad():
        model.shift.fill_(9.0)
    acc.load_state()
    assert model.shift.full_tensor().tolist() == [3.0] * 6
    assert len(list(Path(folder, "checkpoints").iterdir())) == 2


@on_launched_ranks()
def test_save_model_writes_what_accelerate_loads(rank: int, tmp_path: Path) -> None:
    folder = str(tmp_path / "model")
    acc = accelerator(LayerZeroPlugin(zero3_size=2, units=TiedTransformer.UNITS))
    model = acc.prepare(TiedTransformer())
    acc.save_model(model, folder)
    acc.wait_for_everyone()
    fresh = TiedTransformer(seed=1)
    load_checkpoint_in_model(fresh, folder)
    for name, value in full_parameters(model).items():
        assert torch.equal(fresh.get_parameter(name), value)


def _train_text(acc: Accelerator, rank: int, **kwargs: Any) -> list[float]:
    net = TiedTransformer()
    model, optimizer = acc.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    losses = []
    for step in range(4):
        loss = TiedTransformer.loss(model, TiedTransformer.batch(step=step, rank=rank))
        assert loss.dtype == torch.float32
        acc.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@on_ranks()
def test_mixed_precision_becomes_the_policy(rank: int) -> None:
    with launched():
        settings = {"mixed_precision": "bf16", "gradient_accumulation_steps": 1}
        theirs = _train_text(accelerator(ours=False, **settings), rank)
        acc = accelerator(LayerZeroPlugin(zero3_size=2, units=TiedTransformer.UNITS), **settings)
        ours = _train_text(acc, rank)
        assert_like(ours, theirs, rtol=2e-2)
        model = acc._models[0]
        members = layerzero.engine.hooks.get_state(model).handles
        assert {handle.precision.compute for handle in members} == {torch.bfloat16}
        assert {handle.precision.reduce for handle in members} == {torch.float32}


@on_ranks()
def test_a_model_that_was_prepared_for_evaluation_is_sharded_when_it_is_to_be_trained(rank: int) -> None:
    with launched():
        acc = accelerator(LayerZeroPlugin(**PLUGIN))
        net, *others = objects()
        acc.prepare_model(net, evaluation_mode=True)
        assert type(net.shift) is nn.Parameter
        losses = train(acc, acc.prepare(net, *others))[0]
        acc = accelerator(LayerZeroPlugin(**PLUGIN))
        assert losses == train(acc, acc.prepare(*objects()))[0]


@on_ranks()
def test_an_overflow_on_one_rank_skips_the_step_and_the_scheduler_on_all(rank: int) -> None:
    with launched():
        acc = accelerator(LayerZeroPlugin(**PLUGIN), gradient_accumulation_steps=1)
        acc.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)  # Accelerate makes one on devices only
        model, optimizer, loader, scheduler = acc.prepare(*objects())
        before = full_parameters(model)
        for step, batch in enumerate(loader):
            loss = integer_loss(model, batch)
            acc.backward(loss * (float("inf") if (step, rank) == (1, 2) else 1.0))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            assert acc.optimizer_step_was_skipped == (step == 1), step
            same = all(torch.equal(value, before[name]) for name, value in full_parameters(model).items())
            assert same == (step == 1), step
            before = full_parameters(model)


def _from_environment(rank: int, path: str) -> None:
    with launched(**{CONFIG_VARIABLE: path}):
        acc = accelerator()
        model, optimizer, loader, scheduler = acc.prepare(*objects())
        train(acc, (model, optimizer, loader, scheduler))
        calls = layerzero.traffic(model).calls
        assert calls["hop1"] == calls["hop2"] == 4 * 4  # "full": one each a step, of three units and the root
        with pytest.raises(ValueError, match="zero3_size is set both as an argument and in"):
            LayerZeroPlugin(zero3_size=4)


def test_settings_from_a_file_that_the_environment_names(tmp_path: Path) -> None:
    path = tmp_path / "layerzero.yaml"
    path.write_text("zero3_size: 2\nunits: [Linear]\naccumulation: full\n")
    run_ranks(_from_environment, str(path))


@on_ranks()
def test_what_cannot_work_is_refused(rank: int) -> None:
    with launched():
        with pytest.raises(ValueError, match="mixed_precision='fp16' is not supported on cpu"):
            accelerator(mixed_precision="fp16")
        with pytest.raises(ValueError, match="dynamo_backend: Accelerate would"):
            accelerator(dynamo_backend="inductor")
        policy = MixedPrecisionPolicy(param_dtype=torch.float16)
        acc = accelerator(LayerZeroPlugin(**PLUGIN, mp_policy=policy), mixed_precision="bf16")
        with pytest.raises(ValueError, match=r"computes in torch.bfloat16, but mp_policy.param_dtype is torch.float16"):
            acc.prepare(integer_net())
        with pytest.raises(ValueError, match="unknown settings zero4_size"):
            LayerZeroPlugin(settings={"zero4_size": 1})
        acc = accelerator(LayerZeroPlugin(**PLUGIN))
        net = integer_net()
        model, *_ = acc.prepare(net, exact_sgd(net.head.parameters()), exact_sgd(net.first.parameters()))
        with pytest.raises(ValueError, match="a sharded model has 2 optimizers"):
            acc.save_state("/nowhere")
        handler = DistributedDataParallelKwargs(comm_hook="fp16")
        with pytest.raises(ValueError, match="comm_hook"):
            accelerator(kwargs_handlers=[handler])
        with pytest.raises(ValueError, match="even_batches"), acc.join_uneven_inputs([model]):
            pass
