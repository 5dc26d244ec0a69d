"""Ranks that disagree raise an error that names field and ranks, on every rank."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import layerzero
from layerzero import Offload, PrecisionPolicy
from layerzero.comm.process_groups import mesh_group
from tests.support.models import different, full_parameters
from tests.support.ranks import on_ranks, run_ranks

pytestmark = pytest.mark.slow

WORLD = 4
SECONDS = 10.0  # time until every rank has raised, with a margin for a busy machine

# The rank that differs from the others; its number appears in no value below.
ODD = 3


class Net(nn.Module):
    """Two linear layers of given sizes."""

    def __init__(self, *, width: int = 5, hidden: int = 6, bias: bool = True, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(width, hidden, dtype=dtype)
        self.second = nn.Linear(hidden, width, bias=bias, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


class Raised(NamedTuple):
    kind: str
    message: str
    seconds: float


class Case(NamedTuple):
    """Call that the odd rank makes while the others shard a Net, and patterns that each rank's message must contain."""

    call: Callable[[], Any]
    patterns: tuple[str, ...]
    usual: Callable[[], Any]


def _shard(model: nn.Module | None = None, **settings: Any) -> nn.Module:
    settings = {"zero3_size": 2, "units": ["first"]} | settings
    return layerzero.shard_model(Net() if model is None else model, **settings)


def _changed(change: Callable[[Net], Any]) -> nn.Module:
    model = Net()
    change(model)
    return _shard(model)


def _square(*, tied: bool = False) -> Net:
    model = Net(width=6, hidden=6)
    if tied:
        model.second.weight = model.first.weight
    return model


def _shard_without_bias(model: Net) -> nn.Module:
    return _shard(model, ignored_params=[model.second.bias])


def _fail(message: str) -> Any:
    raise LookupError(message)


def _failing_units(name: str, module: nn.Module) -> bool:
    return _fail("no such luck") if name == "second" else False


def _shard_from_meta(init: Callable[[nn.Module], Any]) -> nn.Module:
    with torch.device("meta"):
        model = Net()
    return _shard(model, param_init_fn=init)


def _case(call: Callable[[], Any], *patterns: str, usual: Callable[[], Any] = _shard) -> Case:
    return Case(call, patterns, usual)


RANK = rf"\b{ODD}\b"
# By field that the message names: settings of the odd rank, and a value of it in the message.
SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "zero3_size": ({"zero3_size": 4}, "4"),
    "param_dtype": ({"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}, "bfloat16"),
    "reduce_dtype": ({"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float16)}, "float16"),
    "replica_reduce_dtype": ({"mp_policy": PrecisionPolicy(replica_reduce_dtype=torch.bfloat16)}, "bfloat16"),
    "output_dtype": ({"mp_policy": MixedPrecisionPolicy(output_dtype=torch.float64)}, "float64"),
    "accumulation_dtype": ({"mp_policy": PrecisionPolicy(accumulation_dtype=torch.bfloat16)}, "bfloat16"),
    "offload.params": ({"offload": Offload(params=True)}, ""),
    "offload.pin_memory": ({"offload": Offload(grads=True, pin_memory=False)}, ""),
    "prefetch": ({"prefetch": 2}, ""),
    "reshard_after_forward": ({"reshard_after_forward": False}, ""),
    "sync_module_states": ({"sync_module_states": False}, ""),
    "units": ({"units": ["second"]}, "first.*second"),
    "accumulation": ({"accumulation": "full"}, "full"),
}
CASES: dict[str, Case] = {
    **{field: _case(partial(_shard, **given), field, value, RANK) for field, (given, value) in SETTINGS.items()},
    "zero3_size of init_mesh": _case(
        lambda: layerzero.init_mesh(4), "init_mesh", "zero3_size", RANK, usual=lambda: layerzero.init_mesh(2)
    ),
    "fewer units": _case(lambda: _shard(units=None), "units", "first", RANK),
    "accumulation of one unit": _case(
        lambda: _shard(accumulation=lambda name, _: "full" if name == "first" else "sharded"),
        "accumulation",
        "first",
        RANK,
    ),
    "other shapes": _case(lambda: _shard(Net(hidden=8)), r"first\.weight", "8", RANK),
    "other shapes of the same size": _case(
        lambda: _shard(Net(width=6, hidden=5)), r"first\.weight", r"5, 6", r"6, 5", RANK
    ),
    "other dtype": _case(lambda: _shard(Net(dtype=torch.float64)), r"first\.weight", "float64", RANK),
    "missing parameter": _case(lambda: _shard(Net(bias=False)), r"second\.bias", RANK),
    "additional parameter": _case(
        lambda: _changed(lambda m: m.register_parameter("scale", nn.Parameter(torch.ones(2)))), "scale", RANK
    ),
    "frozen parameter": _case(
        lambda: _changed(lambda m: m.second.bias.requires_grad_(False)), r"second\.bias", "requires_grad|frozen", RANK
    ),
    "tied parameter": _case(lambda: _shard(_square(tied=True)), "weight", RANK, usual=lambda: _shard(_square())),
    "other buffer": _case(lambda: _changed(lambda m: m.register_buffer("mean", torch.zeros(7))), "mean", RANK),
    "ignored parameter": _case(lambda: _shard_without_bias(Net()), r"second\.bias|ignored", RANK),
    "own mistake": _case(lambda: _shard(prefetch=-1), "prefetch", RANK),
    "zero3_size that does not divide": _case(lambda: _shard(zero3_size=9), "zero3_size", RANK),
    "unknown unit": _case(lambda: _shard(units=["fourth"]), "fourth", RANK),
    "exception in units": _case(lambda: _shard(units=_failing_units), "no such luck", RANK),
    "exception in accumulation": _case(
        lambda: _shard(accumulation=lambda name, module: _fail("no such mode")), "no such mode", RANK
    ),
    "something that is no module": _case(lambda: _shard(nn.ModuleList([Net()]).parameters()), "Module", RANK),
}


def _disagree(rank: int) -> dict[str, Raised | None]:
    raised: dict[str, Raised | None] = {}
    for name, case in CASES.items():
        start = time.monotonic()
        try:
            (case.call if rank == ODD else case.usual)()
            raised[name] = None
        except Exception as error:
            raised[name] = Raised(type(error).__name__, str(error), time.monotonic() - start)
        # After each failure the same process group still serves a model that all ranks agree on.
        model = _shard()
        model(torch.ones(2, 5)).sum().backward()
        assert all(p.grad is not None for p in model.parameters()), name
    return raised


@pytest.fixture(scope="module")
def raised() -> list[dict[str, Raised | None]]:
    return run_ranks(_disagree, world_size=WORLD)


@pytest.mark.parametrize("name", CASES)
def test_difference_is_an_error_on_every_rank_that_names_field_and_rank(
    name: str, raised: list[dict[str, Raised | None]]
) -> None:
    for rank, of_rank in enumerate(raised):
        error = of_rank[name]
        assert error is not None, f"rank {rank}: nothing was raised"
        # The odd rank raises its own exception, which need not contain its number.
        patterns = [p for p in CASES[name].patterns if not (rank == ODD and p == RANK)]
        missing = [pattern for pattern in patterns if not re.search(pattern, error.message, re.DOTALL)]
        assert not missing, f"rank {rank}: no {missing} in {error}"
        assert error.seconds < SECONDS, f"rank {rank}: {error}"


def _zero_own(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        nn.init.zeros_(parameter)


def _fail_to_initialize(rank: int) -> Raised:
    start = time.monotonic()
    try:
        _shard_from_meta((lambda module: _fail("no such init")) if rank == ODD else _zero_own)
    except Exception as error:
        raised = Raised(type(error).__name__, str(error), time.monotonic() - start)
    else:
        raise AssertionError(f"rank {rank}: nothing was raised")
    _shard()
    return raised


def test_exception_in_param_init_fn_on_one_rank_is_an_error_on_every_rank() -> None:
    for rank, error in enumerate(run_ranks(_fail_to_initialize, world_size=WORLD, pg_timeout=15, timeout=60)):
        assert "no such init" in error.message, error
        assert rank == ODD or re.search(RANK, error.message), error
        assert error.seconds < SECONDS, error


@on_ranks(world_size=WORLD)
def test_ranks_that_would_start_differently_start_alike_from_meta_too(rank: int) -> None:
    torch.manual_seed(0)
    of_rank_0 = Net().state_dict()
    torch.manual_seed(rank)
    assert not different(full_parameters(_shard(Net())), of_rank_0)
    with torch.device("meta"):
        models = [Net(), Net()]
    zero = _shard(models[0], param_init_fn=_zero_own)
    assert not any(value.any() for value in full_parameters(zero).values())
    reset = full_parameters(_shard(models[1]))
    assert all(value.std() > 0 and value.abs().max() < 0.5 for value in reset.values()), reset  # as nn.Linear does
    alone = Net()
    alone.load_state_dict(reset)
    x = torch.ones(2, 5)
    torch.testing.assert_close(models[1](x), alone(x))


def _leave_out(rank: int, absent: int) -> Raised | None:
    if rank == absent:
        return None
    start = time.monotonic()
    try:
        _shard()
    except Exception as error:
        return Raised(type(error).__name__, str(error), time.monotonic() - start)
    raise AssertionError(f"rank {rank}: nothing was raised")


@pytest.mark.sample(2)
@pytest.mark.parametrize(("absent", "store"), [(0, "file"), (2, "file"), (2, "server")])  # their exceptions differ
def test_rank_that_never_comes_is_named_by_the_others_within_the_timeout(
    absent: int, store: str, tmp_path: Path
) -> None:
    store_file = tmp_path / "store" if store == "file" else None
    errors = run_ranks(_leave_out, absent, world_size=WORLD, pg_timeout=5, timeout=60, store_file=store_file)
    assert errors[absent] is None
    for error in errors[:absent] + errors[absent + 1 :]:
        assert f"ranks [{absent}] did not take part" in error.message, error
        assert error.seconds < 5 + SECONDS, error


@on_ranks(world_size=2, pg_timeout=10)
def test_ranks_that_have_made_different_numbers_of_groups_are_told_before_they_wait_for_ever(rank: int) -> None:
    if rank == 0:
        dist.new_group([0], use_local_synchronization=True)  # torch's group names now differ on the two ranks
    layerzero.mesh_from_groups(dist.group.WORLD, dist.group.WORLD)
    mesh = layerzero.init_mesh(2)
    impatient = dist.new_group([0, 1], timeout=timedelta(seconds=1))
    if rank == 0:
        with pytest.raises(RuntimeError):  # the other rank does not arrive
            mesh_group([0, 1], like=impatient, device_type="cpu")
    dist.barrier()
    with pytest.raises(ValueError, match="number of process groups created so far is 2 on rank 0 and 1 on rank 1"):
        layerzero.shard_model(nn.Linear(2, 2), mesh=mesh)
