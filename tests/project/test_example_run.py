"""examples/train_gpt.py on real ranks: the loss falls, and a stopped and restarted run equals an uninterrupted one."""

from __future__ import annotations

import argparse
import contextlib
import io
import math
import shutil
import sys
import warnings
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import pytest
import torch
import train_gpt
import train_sites

from benchmarks import codec_losses
from layerzero.engine.hooks import get_state
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.slow

ARGS = ["--model", "tiny", "--steps", "4", "--save-every", "2", "--seq-len", "16", "--validation-windows", "16"]


def _run(rank: int, folder: str, zero3_size: int, optimizer: str) -> tuple[float, float]:
    argv = [*ARGS, "--device", "cpu", "--no-sample", "--checkpoints", folder, "--zero3-size", str(zero3_size)]
    argv += ["--optimizer", optimizer, "--dtype", "bf16", "--picture", f"{folder}.png"]
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        return tuple(train_gpt.main(argv))


@pytest.mark.sample(1)
@pytest.mark.parametrize("optimizer", ["adamw", "muon"] if hasattr(torch.optim, "Muon") else ["adamw"])
def test_a_demo_that_is_stopped_and_started_again_ends_with_the_same_loss(tmp_path: Path, optimizer: str) -> None:
    folder = tmp_path / "run"
    first, last = run_ranks(_run, str(folder), 2, optimizer)[0]
    assert last < first - 0.1
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in folder.iterdir()) == ["step-000002", "step-000004"]
    shutil.rmtree(folder / "step-000004")
    assert run_ranks(_run, str(folder), 2, optimizer)[0] == (first, last)
    _, again = run_ranks(_run, str(folder), 2, optimizer)[0]
    assert again == last, "nothing was left to do"
    shutil.rmtree(folder / "step-000004")
    _, other = run_ranks(_run, str(folder), 4, optimizer)[0]
    assert abs(other - last) < (1e-3 if optimizer == "adamw" else 1e-2)  # Muon's arithmetic is in bf16


def _compute_dtypes(rank: int) -> set[torch.dtype]:
    """Return the compute dtypes of the demo's model with the default of --dtype."""
    with mock.patch.object(train_gpt, "run", train_gpt.build):
        trainer = train_gpt.main([*ARGS, "--device", "cpu"])
    return {handle.weights.compute.dtype for handle in get_state(trainer.model).handles}


def test_a_demo_computes_in_fp32_on_a_cpu_by_default() -> None:
    assert run_ranks(_compute_dtypes, world_size=2) == [{torch.float32}] * 2


def _losses_with_codecs(rank: int) -> list[float]:
    """Return the losses of the plain example, and of the benchmark without and with a codec and spikes.

    The spikes multiply gradients by 0. Clipping would undo any other factor up to rounding.
    """
    small, plain = [*ARGS, "--device", "cpu"], argparse.Namespace(codec="none", spike=1.0, steps=4, seed=0)
    given = [*small, "--no-sample", "--lr", "1e-3", "--zero3-size", "1"]
    every_second = mock.patch.object(codec_losses, "SPIKE_EVERY", 2)
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()), every_second:
        return [
            train_gpt.main(given).last_loss,
            *(
                codec_losses.validation_loss(argparse.Namespace(**vars(plain) | changes), *small)
                for changes in ({}, {"codec": "int4"}, {"spike": 0.0})
            ),
        ]


def test_the_benchmark_of_codecs_trains_the_example_and_changes_what_it_says() -> None:
    (plain, same, encoded, spiked), _ = run_ranks(_losses_with_codecs, world_size=2)
    assert plain == same
    assert 0 < abs(encoded - plain) < 0.05 and spiked != plain


def _log(rank: int, folder: str) -> None:
    argv = [*ARGS, "--steps", "2", "--device", "cpu", "--no-sample", "--logdir", folder]
    quiet = contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO())
    with quiet[0], quiet[1], warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from TensorBoard
        train_gpt.main(argv)


def test_a_demo_writes_for_tensorboard_on_its_first_rank(tmp_path: Path) -> None:
    if find_spec("tensorboard") is None:
        pytest.skip("needs tensorboard: pip install --no-deps -r requirements-loops.txt")
    run_ranks(_log, str(tmp_path), world_size=2)
    (file,) = tmp_path.iterdir()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        accumulator = import_module("tensorboard.backend.event_processing.event_accumulator")
        events = accumulator.EventAccumulator(str(file))
        events.Reload()
    names = set(events.Tags()["scalars"])
    assert {"loss", "grad_norm", "bytes sent/zero3"} <= names
    for name in names:
        assert all(math.isfinite(event.value) for event in events.Scalars(name))
    assert [event.step for event in events.Scalars("loss")] == [0, 1]


def test_a_demo_says_what_its_log_needs() -> None:
    missing = mock.patch.dict(sys.modules, {"torch.utils.tensorboard": None})
    with missing, pytest.raises(SystemExit, match="--logdir needs TensorBoard: pip install tensorboard"):
        train_gpt.main(["--logdir", "somewhere"])


def _train_sites(rank: int, argv: list[str]) -> tuple[float, float]:
    argv = ["--model", "tiny", "--steps", "12", "--seq-len", "16", "--device", "cpu", *argv]
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        return tuple(train_sites.main(argv))


@pytest.mark.exhaustive
def test_sites_learn_and_exchange_less_than_synchronous_training() -> None:
    sites = ["--warmup", "4", "--every", "4", "--zero3-size", "2"]
    for (loss, sent), (alone, _) in zip(
        run_ranks(_train_sites, sites), run_ranks(_train_sites, ["--sites", "1"]), strict=True
    ):
        assert abs(loss - alone) < 0.1 and loss < math.log(256) - 0.5
        assert 0 < sent < 20_000  # 0.1 million parameters
