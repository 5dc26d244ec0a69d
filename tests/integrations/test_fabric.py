"""layerzero.integrations.fabric compared with Fabric's DDP strategy on the same data."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

if find_spec("lightning") is None:
    pytest.skip("needs lightning: pip install --no-deps -r requirements-loops.txt", allow_module_level=True)

from lightning.fabric import Fabric

import layerzero
from layerzero.integrations.fabric import FabricStrategy
from tests.support.loops import Samples, assert_like, on_launched_ranks
from tests.support.models import IntegerNet, exact_sgd, full_parameters, integer_loss, integer_net


def train(strategy: Any, folder: str | None = None, **settings: Any) -> tuple[list[float], list[float], Any]:
    """Train, from a checkpoint in `folder` if there is one; return losses, gradient norms and the model."""
    fabric = Fabric(accelerator="cpu", devices=4, strategy=strategy, **settings)
    fabric.launch()
    net = integer_net(0 if folder is None else 1)
    model, optimizer = fabric.setup(net, exact_sgd(net.parameters()))
    state = {"model": model, "optimizer": optimizer, "batch": 0}
    if folder is not None:
        assert fabric.load(folder, state) == {}
        assert state["batch"] == 4
    losses, norms = [], []
    for index, batch in enumerate(fabric.setup_dataloaders(DataLoader(Samples(64), batch_size=2))):
        if index < state["batch"]:
            continue
        with fabric.no_backward_sync(model, enabled=index % 2 == 0):
            loss = integer_loss(model, batch)
            fabric.backward(loss / 2)
        losses.append(loss.item())
        if index % 2:
            norms.append(float(fabric.clip_gradients(model, optimizer, max_norm=1e9)))
            optimizer.step()
            optimizer.zero_grad()
        if index == 3 and "callbacks" in settings:
            state["batch"] = 4
            fabric.save(settings["callbacks"][0].folder, state)
            state["batch"] = 0
    return losses, norms, net


class Saving:
    """Callback that names the folder to save to."""

    def __init__(self, folder: str) -> None:
        self.folder = folder


@on_launched_ranks(run_id="1", timeout=300)
def test_losses_norms_weights_and_a_resumed_run(rank: int, tmp_path: Path) -> None:
    folder = str(tmp_path / "state")
    theirs = train("ddp")
    ours = train(FabricStrategy(2, IntegerNet.UNITS), callbacks=[Saving(folder)])
    assert ours[0] == theirs[0]
    assert_like(ours[1], theirs[1])
    assert layerzero.traffic(ours[2]).calls["hop2"] == 4 * 4  # four handles, four steps of two backwards
    final = full_parameters(ours[2])
    for name, value in theirs[2].named_parameters():
        assert torch.equal(final[name], value)
    again = train(FabricStrategy(2, IntegerNet.UNITS), folder)
    assert again[0] == ours[0][4:]
    for name, value in full_parameters(again[2]).items():
        assert torch.equal(final[name], value)
    whole = torch.load(f"{folder}/fabric.ckpt", weights_only=True)["model"]
    assert whole.keys() == final.keys()
    with pytest.raises(ValueError, match="static_graph"):
        FabricStrategy(2, static_graph=True)
