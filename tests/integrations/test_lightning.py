"""layerzero.integrations.lightning compared with Lightning's DDP strategy on the same data."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

if find_spec("lightning") is None:
    pytest.skip("needs lightning: pip install --no-deps -r requirements-loops.txt", allow_module_level=True)

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

import layerzero
from layerzero.engine.hooks import get_state
from layerzero.integrations.common import is_sharded
from layerzero.integrations.lightning import LayerZeroStrategy
from tests.support.loops import Samples, assert_like, on_launched_ranks
from tests.support.models import IntegerNet, exact_sgd, full_parameters, integer_net

UNITS = [f"net.{name}" for name in IntegerNet.UNITS]


class Module(LightningModule):
    """An IntegerNet and a parameter of the module itself, which is used after the net."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.net = integer_net(seed)
        self.scale = torch.nn.Parameter(torch.ones(3))
        self.losses: list[float] = []
        self.norms: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        loss = 8 * (self(batch[0]) * batch[1] * self.scale).sum(1).mean()
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        self.log("checked", 8 * (self(batch[0]) * batch[1] * self.scale).sum(1).mean(), sync_dist=True)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norms = [p.grad.norm() for p in self.parameters()]
        norms = [norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in norms]
        self.norms.append(torch.stack(norms).norm().item())

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = exact_sgd(self.parameters())
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)}


def fit(strategy: Any, folder: Path, module: Module | None = None, ckpt: str | None = None, **settings: Any) -> Trainer:
    defaults = {"accumulate_grad_batches": 2, "max_epochs": 1, "enable_checkpointing": False, "logger": False}
    defaults |= {"enable_progress_bar": False, "enable_model_summary": False, "default_root_dir": folder}
    trainer = Trainer(accelerator="cpu", devices=4, strategy=strategy, **{**defaults, **settings})
    module = Module() if module is None else module
    trainer.fit(module, DataLoader(Samples(64), batch_size=2), DataLoader(Samples(8), batch_size=1), ckpt_path=ckpt)
    return trainer


@on_launched_ranks(run_id="1", timeout=300)
def test_losses_norms_and_weights_are_those_of_ddp(rank: int, tmp_path: Path) -> None:
    theirs = fit("ddp", tmp_path)
    for zero3_size, settings in ((1, None), (2, None), (4, None), (2, {"reshard_after_forward": "step"})):
        ours = fit(LayerZeroStrategy(zero3_size, UNITS, settings=settings), tmp_path)
        module = ours.lightning_module
        assert_like(module.losses, theirs.lightning_module.losses)
        assert_like(module.norms, theirs.lightning_module.norms)
        assert_like([float(ours.callback_metrics["checked"])], [float(theirs.callback_metrics["checked"])])
        calls, handles = layerzero.traffic(module).calls, len(get_state(module).handles)
        assert calls.get("hop2", 0) == (0 if zero3_size == 4 else handles * 4)  # of 8 backwards
        if settings is not None:  # a validation, four steps, and a validation
            assert calls["gather"] == handles * 5
        for name, value in full_parameters(module).items():
            torch.testing.assert_close(value, theirs.lightning_module.get_parameter(name).detach())
    for settings in ({"gradient_clip_val": 2.0}, {"precision": "bf16-mixed"}):
        theirs = fit("ddp", tmp_path, **settings).lightning_module
        ours = fit(LayerZeroStrategy(2, UNITS), tmp_path, **settings).lightning_module
        rtol = 1e-4 if "precision" not in settings else 2**-6  # relative to the largest: a loss is a difference
        for got, expected in ((ours.losses[:4], theirs.losses[:4]), (ours.norms[:2], theirs.norms[:2])):
            assert_like(got, expected, rtol=0, atol=rtol * max(map(abs, expected)))
    assert {handle.precision.compute for handle in get_state(ours).handles} == {torch.bfloat16}


@on_launched_ranks(run_id="1", timeout=300)
def test_a_resumed_run_is_the_uninterrupted_one(rank: int, tmp_path: Path) -> None:
    saving = ModelCheckpoint(dirpath=tmp_path, save_top_k=2, monitor="step", mode="max")
    settings = {"accumulate_grad_batches": 1, "limit_train_batches": 3}
    whole = fit("layerzero", tmp_path, enable_checkpointing=True, callbacks=[saving], max_epochs=3, **settings)
    torch.distributed.barrier()  # the first rank removes old checkpoints
    kept = sorted(path.name for path in Path(tmp_path).iterdir())
    assert kept == ["epoch=1-step=6.ckpt", "epoch=2-step=9.ckpt"]
    losses = whole.lightning_module.losses
    again = fit(LayerZeroStrategy(4), tmp_path, Module(1), ckpt=f"{tmp_path}/{kept[0]}", max_epochs=3, **settings)
    assert again.lightning_module.losses == losses[6:]
    final = full_parameters(whole.lightning_module)
    for name, value in full_parameters(again.lightning_module).items():
        assert torch.equal(value, final[name])
    loaded = Module.load_from_checkpoint(f"{tmp_path}/{kept[1]}/lightning.ckpt", seed=1)
    for name, value in final.items():
        assert torch.equal(loaded.get_parameter(name), value)
    checked = whole.validate(whole.lightning_module, DataLoader(Samples(8)), verbose=False)
    fresh = Module(1)
    trainer = Trainer(accelerator="cpu", devices=4, strategy="layerzero", logger=False, enable_progress_bar=False)
    assert trainer.validate(fresh, DataLoader(Samples(8)), ckpt_path=f"{tmp_path}/{kept[1]}", verbose=False) == checked
    assert not is_sharded(fresh)


@on_launched_ranks(run_id="1", timeout=300)
def test_a_run_of_ddp_goes_on_here_and_what_cannot_work_is_refused(rank: int, tmp_path: Path) -> None:
    settings = {"accumulate_grad_batches": 1, "limit_train_batches": 4}
    trainer = fit("ddp", tmp_path, **settings)
    trainer.save_checkpoint(f"{tmp_path}/ddp.ckpt")
    theirs = fit("ddp", tmp_path, ckpt=f"{tmp_path}/ddp.ckpt", **settings, max_epochs=2)
    ours = fit(LayerZeroStrategy(2), tmp_path, Module(1), ckpt=f"{tmp_path}/ddp.ckpt", **settings, max_epochs=2)
    assert_like(ours.lightning_module.losses, theirs.lightning_module.losses)
    ours.save_checkpoint(f"{tmp_path}/ours.ckpt")
    with mock.patch("shutil.rmtree") as remove:
        ours.save_checkpoint(f"{tmp_path}/ours.ckpt", weights_only=True)
    removed = [Path(call.args[0]).name for call in remove.call_args_list]
    assert removed == (["layerzero_0"] if rank == 0 else []), "one rank removes what the new checkpoint does not have"
    with pytest.raises(ValueError, match="find_unused_parameters"):
        LayerZeroStrategy(2, find_unused_parameters=True)
    with pytest.raises(ValueError, match="precision='16-true' is not supported"):
        fit(LayerZeroStrategy(2), tmp_path, precision="16-true")
