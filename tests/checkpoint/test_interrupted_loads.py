"""If a rank dies or fails in a load, all ranks raise one error soon, not when a timeout of an hour expires."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.checkpoint import state_dict_saver

from layerzero import checkpoint
from layerzero.checkpoint import buddy_snapshots, loading, run_folder
from layerzero.checkpoint.dcp_interop import _DcpSource
from layerzero.checkpoint.restore import RestorePlan
from layerzero.checkpoint.safetensors_files import CheckpointFiles, TensorFiles
from tests.support.checkpointing import everything, on_first_rank, sharded_net
from tests.support.crashing import fails_at, failure_of, interrupt, kill, survivors
from tests.support.models import different, integer_batch, integer_net
from tests.support.ranks import on_ranks, run_ranks


def _save(rank: int, folder: Path) -> None:
    """Save what each kind of load reads."""
    model, optimizer = sharded_net(1, steps=1)
    checkpoint.save(folder / "runs" / "one", model, optimizer, {"step": 1})
    plain = integer_net()
    on_first_rank(save_file, plain.state_dict(), folder / "model.safetensors")
    state_dict_saver.save({"model": plain.state_dict()}, checkpoint_id=folder / "dcp")


class _Loads:
    """Each kind of load, for the model of a rank."""

    def __init__(self, rank: int, folder: Path) -> None:
        self.model, self.optimizer = sharded_net(1)
        self.folder, self._memory = folder, folder / f"node{rank // 2}"
        self._memory.mkdir(exist_ok=True)

    def of(self, kind: str) -> Callable[[], Any]:
        """Return a function that loads."""
        model, optimizer, folder = self.model, self.optimizer, self.folder
        if kind == "snapshot":
            buddies = checkpoint.Buddies(model, optimizer, name="run", memory=self._memory)
            buddies.snapshot({"step": 1})
            buddies.wait()
            return buddies.load
        return {
            "load": partial(checkpoint.load, folder / "runs" / "one", model, optimizer),
            "latest": partial(checkpoint.load_latest, folder / "runs", model, optimizer),
            "full": partial(checkpoint.load_safetensors, folder / "model.safetensors", model),
            "dcp": partial(checkpoint.load_dcp, folder / "dcp", model),
        }[kind]


PHASES: dict[str, tuple[object, str, int]] = {  # function in which a rank fails, and in which of its calls
    "list": (run_folder, "_candidates", 0),  # only the first rank lists a folder
    "open": (loading, "num_saving_ranks", 0),
    "fetch": (buddy_snapshots.Buddies, "_fetch", 1),
    "read": (TensorFiles, "read", 0),
    "read dcp": (_DcpSource, "read", 0),
    "restore": (RestorePlan, "restore_extra_states", 0),
    "reread": (TensorFiles, "reread", 0),
}


def _loads_until_killed(folder: Path, kind: str, phase: str, victim: int, rank: int) -> str:
    """Return how soon and how a load ends in which a rank is killed."""
    load = _Loads(rank, folder).of(kind)
    dist.barrier()
    began = time.monotonic()
    owner, name, turn = PHASES[phase]
    try:
        with fails_at(owner, name, turn if rank == victim else 1000, kill):
            load()
    except checkpoint.CheckpointError as error:
        return f"{time.monotonic() - began} {type(error).__name__} {error}"
    return "nothing was raised"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "phase", "victim"),
    [
        *(("load", phase, 2) for phase in ("open", "read", "restore", "reread")),
        ("latest", "read", 4),
        ("full", "read", 3),
        ("dcp", "read dcp", 2),
        ("snapshot", "fetch", 1),
        ("snapshot", "read", 3),
    ],
)
def test_all_others_raise_an_error_soon_if_a_rank_is_killed_in_a_load(
    kind: str, phase: str, victim: int, tmp_path: Path
) -> None:
    run_ranks(_save, tmp_path, world_size=4)  # also for five ranks
    act = partial(_loads_until_killed, tmp_path, kind, phase, victim)
    for rank, said in survivors(tmp_path, act, world_size=5, victim=victim).items():
        took, _, message = said.partition(" ")
        assert re.fullmatch(r"[\d.]+", took) and float(took) < 5, (rank, said)
        assert message.startswith("RankLostError") and f"rank {victim} has died" in message, (rank, said)


@on_ranks(world_size=4)
def test_an_interrupt_of_one_rank_ends_any_load_on_all_ranks(rank: int, tmp_path: Path) -> None:
    _save(rank, tmp_path)
    loads = _Loads(rank, tmp_path)
    for bad, (kind, phase) in enumerate(
        [("latest", "list"), ("load", "open"), ("snapshot", "fetch"), ("dcp", "read dcp"), ("load", "reread")]
    ):
        owner, name, turn = PHASES[phase]
        load = loads.of(kind)
        with fails_at(owner, name, turn if rank == bad % 4 else 1000, interrupt):
            said = failure_of(load)
        expected = f"RankLostError: .*rank {bad % 4} failed with KeyboardInterrupt: by hand"
        assert re.match("KeyboardInterrupt" if rank == bad % 4 else expected, said), (kind, phase, said)
        with pytest.raises(RuntimeError, match="failed halfway") if phase == "reread" else nullcontext():
            loads.model(integer_batch()[0])
    assert checkpoint.load(tmp_path / "runs" / "one", loads.model, loads.optimizer) == {"step": 1}
    loads.model(integer_batch()[0])


@on_ranks(world_size=4)
def test_an_error_on_one_rank_is_raised_on_all_and_changes_nothing(rank: int, tmp_path: Path) -> None:
    _save(rank, tmp_path)
    loads = _Loads(rank, tmp_path)
    before = everything(loads.model, loads.optimizer)
    faults: dict[str, tuple[str, Exception, str]] = {
        "open": ("load", FileNotFoundError("no such folder"), "FileNotFoundError"),
        "read": ("latest", checkpoint.CheckpointError("damaged"), "CheckpointError: no checkpoint in .* can be loaded"),
        "read dcp": ("dcp", ValueError("bad values"), "ValueError|RuntimeError"),
        "fetch": ("snapshot", OSError(28, "No space left on device"), "RankLostError"),
    }
    for bad, (phase, (kind, error, expected)) in enumerate(faults.items()):
        owner, name, turn = PHASES[phase]
        load = loads.of(kind)
        with fails_at(owner, name, turn if rank == bad % 3 else 1000, mock.Mock(side_effect=error)):
            said = failure_of(load)
        assert re.match(expected, said) and str(error) in said, said
        assert not (wrong := different(everything(loads.model, loads.optimizer), before)), wrong


@on_ranks(world_size=2, pg_timeout=3)
def test_one_rank_may_read_for_longer_than_the_timeout_of_the_default_group(rank: int, tmp_path: Path) -> None:
    _save(rank, tmp_path)
    loads = _Loads(rank, tmp_path)
    with fails_at(CheckpointFiles, "read", 0, partial(time.sleep, 4 * rank)):
        assert loads.of("load")() == {"step": 1}
