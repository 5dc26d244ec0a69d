"""Reports of `docs/notes/reports.md` that need PEFT, Accelerate or Lightning."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

if missing := [name for name in ("accelerate", "lightning", "peft") if find_spec(name) is None]:
    reason = f"needs {', '.join(missing)}: pip install --no-deps -r requirements-loops.txt"
    pytest.skip(reason, allow_module_level=True)

from accelerate import Accelerator
from lightning.pytorch import LightningModule, Trainer
from peft import LoraConfig, get_peft_model

import layerzero
from layerzero.integrations.accelerate import LayerZeroAccelerator, LayerZeroPlugin
from layerzero.integrations.lightning import LayerZeroStrategy
from tests.end_to_end import test_reports as core
from tests.end_to_end.test_reports import WORLD, Outcome, Ranks, chain, sgd, step_of, whole
from tests.support.loops import forget_accelerators, launched
from tests.support.ranks import run_ranks


class Classifier(nn.Module):
    """Body that is recomputed in the backward, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.body, x, use_reentrant=True))


def adapted() -> nn.Module:
    """Return a Classifier with an adapter in the body and a second, trained head."""
    return core.numbered(
        get_peft_model(Classifier(), LoraConfig(r=2, target_modules=["body"], modules_to_save=["head"]))
    )


def train_adapters(at: Ranks, *, compare: bool) -> Outcome:
    """Train for two steps; with `compare`, the loss has the outputs without adapters."""
    net = adapted()
    model = core.shard(at, adapted(), units=["base_model.model.body", "base_model.model.head"])
    alone, ours = (sgd([p for p in each.parameters() if p.requires_grad]) for each in (net, model))
    optimizer = layerzero.shard_optimizer(ours, model)
    for step in range(2):
        for each, steps, x in ((net, alone, core.all_rows(step)), (model, optimizer, core.rows(at.rank, step))):
            out = each(x.requires_grad_())
            with torch.no_grad(), each.disable_adapter():
                reference = each(x) if compare else 0
            step_of(steps, (out - reference).square().mean() / 64)
    return core.parameters_of(net, model)


def outputs_without_adapters(at: Ranks) -> Outcome:
    right, ours = train_adapters(at, compare=True)
    return Outcome([right[-1][0], right], [ours[-1][0], ours])


def saved_modules_with_recomputation(at: Ranks) -> Outcome:
    right, ours = train_adapters(at, compare=False)
    return Outcome([right[-1][0], right], [ours[-1][0], ours])


def samples(steps: int) -> DataLoader:
    """Return a loader that gives each rank its batch of :func:`core.rows` in each step."""
    return DataLoader(TensorDataset(torch.cat([core.all_rows(step) for step in range(steps)])), batch_size=2)


def last_batch_of_an_epoch(at: Ranks) -> Outcome:
    found = []
    for ours in (False, True):
        forget_accelerators()
        settings = {"cpu": True, "gradient_accumulation_steps": 2}
        plugin = LayerZeroPlugin(zero3_size=at.size, units=["0"])
        acc = LayerZeroAccelerator(layerzero_plugin=plugin, **settings) if ours else Accelerator(**settings)
        net = chain(2, 2, 1)
        model, optimizer, loader = acc.prepare(net, sgd(net.parameters()), samples(5))
        steps = 0
        for _ in range(2):
            for (x,) in loader:
                with acc.accumulate(model):
                    acc.backward(model(x).mean())
                    steps += acc.sync_gradients
                    optimizer.step()
                    optimizer.zero_grad()
        found.append([steps, [whole(p) for p in model.parameters()]])
    return Outcome(*found)


class Pair(LightningModule):
    """Generator and critic with an optimizer each."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.critic = chain(2, 2), chain(2, 1)

    def training_step(self, batch: list[Tensor], index: int) -> None:
        for sign, optimizer in zip((1, -1), self.optimizers(), strict=True):
            self.toggle_optimizer(optimizer)
            self.manual_backward(sign * self.critic(self.generator(batch[0])).mean())
            self.clip_gradients(optimizer, gradient_clip_val=100.0, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [sgd(self.generator.parameters()), sgd(self.critic.parameters(), lr=0.25)]


def manual_optimization(at: Ranks) -> Outcome:
    found = []
    for strategy in ("ddp_find_unused_parameters_true", LayerZeroStrategy(at.size, ["generator", "critic"])):
        quiet = dict.fromkeys(["enable_checkpointing", "logger", "enable_progress_bar", "enable_model_summary"], False)
        trainer = Trainer(accelerator="cpu", devices=WORLD, strategy=strategy, max_epochs=1, **quiet)
        module = Pair()
        trainer.fit(module, samples(2))
        found.append([whole(p) for p in module.parameters()])
    return Outcome(*found)


REPORTS = {
    "huggingface/peft#1442": outputs_without_adapters,
    "huggingface/peft#899": saved_modules_with_recomputation,
    "huggingface/accelerate#2831": last_batch_of_an_epoch,
    "Lightning-AI/pytorch-lightning#19626": manual_optimization,
}


def _run(rank: int, run: Callable[[Ranks], Outcome], folder: Path) -> tuple[str, str]:
    with launched(TORCHELASTIC_RUN_ID="1"):
        return core.figures(run(Ranks(rank, 2, folder)))


@pytest.mark.parametrize("number", REPORTS)
def test_report(number: str, tmp_path: Path) -> None:
    assert run_ranks(_run, REPORTS[number], tmp_path) == [core.on_the_page()[number]] * WORLD
