"""layerzero.verify: right models pass, wrong ones are named, and nothing hangs."""

from __future__ import annotations

import functools
import math
import os
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import layerzero
from examples import verify_gpt
from layerzero import Codecs
from layerzero.engine.reduction_spec import ReductionStage
from layerzero.engine.weight_refresh import RefreshRound
from tests.support.models import BF16, Block, TiedTransformer
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.slow


def token_batch(index: int, rank: int) -> tuple[Tensor, Tensor]:
    return TiedTransformer.batch(step=index, rank=rank)


def make_batch(index: int, rank: int) -> Tensor:
    """Return a batch [6, 4] from the random numbers that verify seeds; the command line finds it by name."""
    return torch.randn(6, 4)


class Net(nn.Module):
    """Two layers; returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.second = nn.Linear(8, 2)

    def hidden(self, x: Tensor) -> Tensor:
        return self.first(x).tanh()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.hidden(x)).square().mean()


class KeepsEdits(Net):
    """Writes to its weight. Plain training keeps the write, sharded training loses it; neither raises."""

    def forward(self, x: Tensor) -> Tensor:
        self.second.weight.data.mul_(0.9)
        return super().forward(x)


class UsesRank(Net):
    """Net whose first layer differs between ranks."""

    def hidden(self, x: Tensor) -> Tensor:
        return super().hidden(x) * (1 + dist.get_rank())


class Noisy(Net):
    """Net with batch-norm and dropout in training mode, and a bias whose gradient is only rounding noise."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def hidden(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.norm(self.first(x)).relu(), 0.5)


class Unused(Net):
    """Net with an unused parameter, one that only some ranks use, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Parameter(torch.ones(3))
        self.sometimes = nn.Parameter(torch.ones(8))
        self.frozen = nn.Linear(8, 8).requires_grad_(False)

    def hidden(self, x: Tensor) -> Tensor:
        hidden = self.frozen(super().hidden(x))
        return hidden * self.sometimes if x[0, 0] > 0 else hidden


class Counts(Net):
    """Counts its calls outside parameters and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) / self.calls


class Speaks(Net):
    """Takes keywords and returns a mapping, as models of some libraries do."""

    def forward(self, *, x: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return {"loss": super().forward(x), "logits": x}


class Scaled(Net):
    """Has an integer parameter, which layerzero refuses unless it is ignored."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([2], dtype=torch.int8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


def scale_of(model: nn.Module) -> list[nn.Parameter]:
    return [model.scale]  # type: ignore[list-item]


def keyword_batch(index: int, rank: int) -> dict[str, Tensor]:
    return {"x": make_batch(index, rank)}


class Right(NamedTuple):
    """Arguments of a call of ``layerzero.verify`` that must find no difference."""

    model: Callable[[], nn.Module]
    batch: Callable[[int, int], Any] = make_batch
    settings: dict[str, Any] = {}  # noqa: RUF012


RIGHT = {
    "tied transformer": Right(
        TiedTransformer, token_batch, {"loss_fn": TiedTransformer.loss, "units": {Block}, "zero3_sizes": None}
    ),
    "the example": Right(verify_gpt.make_model, verify_gpt.make_batch, {"loss_fn": verify_gpt.loss, "steps": 1}),
    "full accumulation": Right(Net, settings={"accumulation": "full", "units": ["first"]}),
    "batch-norm and dropout": Right(Noisy),
    "unused parameters": Right(Unused),
    "a counter in Python": Right(Counts),
    "ignored parameters": Right(Scaled, settings={"ignored_params": scale_of}),
    "mappings": Right(Speaks, keyword_batch),
    "kept by two": Right(Net, settings={"reshard_after_forward": 2, "zero3_sizes": None, "steps": 1}),
    "kept by four": Right(Net, settings={"reshard_after_forward": 4, "zero3_sizes": None, "steps": 1}),
}


def _verify_right(rank: int) -> dict[str, layerzero.VerifyReport]:
    return {
        case: layerzero.verify(right.model, right.batch, **{"zero3_sizes": [2], "steps": 2, **right.settings})
        for case, right in RIGHT.items()
    }


def test_right_models_train_alike() -> None:
    reports = run_ranks(_verify_right)
    for case in RIGHT:
        report = reports[0][case]
        assert report.ok, f"{case}:\n{report}"
        assert all(other[case] == report for other in reports), f"{case}: ranks got different reports"
        sizes = {"tied transformer": {1, 2, 4}, "kept by two": {1, 2, 4}, "kept by four": {1, 4}}
        assert {row.zero3_size for row in report.rows} == sizes.get(case, {2})
        assert report.worst is report.rows[0]
        assert report.notes == ()
        assert max(row.gradient for row in report.rows) < 1e-5, f"{case}: more than rounding\n{report}"
    noisy = {row.name for row in reports[0]["batch-norm and dropout"].rows}
    assert {"norm.running_mean", "norm.running_var"} < noisy
    assert "norm.num_batches_tracked" not in noisy
    tied = {row.name for row in reports[0]["tied transformer"].rows}
    assert tied == {name for name, _ in TiedTransformer().named_parameters()}


def _verify_wrong(rank: int) -> dict[str, layerzero.VerifyReport]:
    models: tuple[type[nn.Module], ...] = (KeepsEdits, UsesRank)
    return {model.__name__: layerzero.verify(model, make_batch, zero3_sizes=[2]) for model in models}


def test_models_that_are_wrong_when_sharded_are_named() -> None:
    reports = run_ranks(_verify_wrong)[0]
    edits = reports["KeepsEdits"]
    assert "second.weight" in {row.name for row in edits.rows if not row.ok}, edits
    assert "a forward or backward changes second.weight in place" in str(edits)
    assert str(edits).splitlines()[-1].startswith("DIFFERENT: ")
    ranked = reports["UsesRank"]
    assert "first.weight" in {row.name for row in ranked.rows if not row.ok}, ranked
    assert "depend on the rank" not in str(edits)
    assert "ranks 1, 2, 3 and rank 0 computed different losses" in str(ranked)


def _scaled(factor: float) -> Callable[..., None]:
    original = ReductionStage.__init__

    def init(self: ReductionStage, *args: Any) -> None:
        path, scale, codec = args[:4], args[4], args[5:]
        original(self, *path, scale if scale == 1.0 else scale * factor, *codec)

    return init


def _verify_broken_engine(rank: int) -> dict[str, tuple[layerzero.VerifyReport, ...]]:
    defects: dict[str, tuple[type, str, Any]] = {
        "sum instead of mean": (ReductionStage, "__init__", _scaled(4.0)),
        "off by a thousandth": (ReductionStage, "__init__", _scaled(1.001)),
        "no refresh": (RefreshRound, "launch", lambda self, ready: None),
    }
    reports = {}
    for name, (owner, attribute, replacement) in defects.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, attribute, replacement)
            found = [layerzero.verify(Net, make_batch, mp_policy=BF16, zero3_sizes=[2])]
        reports[name] = tuple(found)
    return reports


def test_a_broken_engine_is_found_out() -> None:
    for name, (report,) in run_ranks(_verify_broken_engine, shared_memory="off")[0].items():
        wrong = {(row.precision, row.name) for row in report.rows if not row.ok}
        names = set(dict(Net().named_parameters()))
        strict = {row for precision, row in wrong if precision == "float32"}
        assert strict == names, f"{name}\n{report}"
        if name != "off by a thousandth":  # bf16 cannot distinguish it from rounding
            assert {row for precision, row in wrong if precision == "bfloat16"} == names, f"{name}\n{report}"


_calls = {"loss": 0}


def _evaluates_on_rank_0(model: nn.Module, batch: Tensor) -> Tensor:
    """Run a forward on rank 0 alone after every loss but the first, which all ranks must enter."""
    _calls["loss"] += 1
    loss: Tensor = model(batch)
    if _calls["loss"] > 1 and dist.get_rank() == 0:
        with torch.no_grad():
            model(batch)
    return loss


def _verify_an_evaluation_on_one_rank(rank: int) -> str:
    _calls["loss"] = 0
    with pytest.raises(RuntimeError) as raised:
        layerzero.verify(Net, make_batch, loss_fn=_evaluates_on_rank_0, zero3_sizes=[2])
    return str(raised.value)


@pytest.mark.exhaustive
def test_an_evaluation_on_one_rank_alone_is_found_out_on_a_cpu_too() -> None:
    # By default the ranks use shared memory, which allows such an evaluation.
    for said in run_ranks(_verify_an_evaluation_on_one_rank, world_size=2, shared_memory=None, pg_timeout=10):
        assert "the unsharded run works, but layerzero with zero3_size=2 in float32 fails" in said, said
        assert "rank 0 was in another operation: gather" in said or "gather of 'the root' failed on rank 0" in said, (
            said
        )


def _allowed_in_shared_memory(rank: int) -> str:
    _calls["loss"] = 0
    report = layerzero.verify(Net, make_batch, loss_fn=_evaluates_on_rank_0, zero3_sizes=[2], shared_memory="auto")
    return "ok" if report.ok else str(report)


def test_shared_memory_hides_an_evaluation_on_one_rank_alone() -> None:
    assert run_ranks(_allowed_in_shared_memory, world_size=2, shared_memory=None) == ["ok", "ok"]


def _verify_low_precision(rank: int) -> tuple[layerzero.VerifyReport, layerzero.VerifyReport]:
    settings: dict[str, Any] = {"loss_fn": TiedTransformer.loss, "units": {Block}, "zero3_sizes": [2], "steps": 2}
    low = layerzero.verify(TiedTransformer, token_batch, mp_policy=BF16, **settings)
    strict = layerzero.verify(TiedTransformer, token_batch, mp_policy=BF16, tolerance=1e-4, **settings)
    return low, strict


def test_low_precision_is_compared_at_its_own_tolerance_and_sharding_at_full_precision() -> None:
    low, strict = run_ranks(_verify_low_precision)[0]
    assert low.ok, low
    assert {row.precision: row.tolerance for row in low.rows} == {
        "float32": math.sqrt(torch.finfo(torch.float32).eps),
        "bfloat16": 4 * math.sqrt(torch.finfo(torch.bfloat16).eps),
    }
    assert {row.precision for row in strict.rows if not row.ok} == {"bfloat16"}


def _verify_encoded_refreshes(rank: int) -> layerzero.VerifyReport:
    return layerzero.verify(
        Net, make_batch, mp_policy=BF16, codecs=Codecs(refresh="lossless"), zero3_sizes=[1], steps=2
    )


def test_refreshes_are_encoded_only_in_low_precision() -> None:
    report = run_ranks(_verify_encoded_refreshes, world_size=2)[0]
    assert report.ok and {row.precision for row in report.rows} == {"float32", "bfloat16"}, report


def _half_model() -> nn.Module:
    return Net().bfloat16()


def half_batch(index: int, rank: int) -> Tensor:
    return make_batch(index, rank).bfloat16()


def _drawn() -> list[float]:
    return [*torch.rand(3).tolist(), random.random()]


def _verify_bfloat16_model(rank: int) -> tuple[layerzero.VerifyReport, list[float], list[float]]:
    torch.manual_seed(7)
    state, expected = random.getstate(), _drawn()
    torch.manual_seed(7)
    random.setstate(state)
    report = layerzero.verify(_half_model, half_batch, micro_batches=1)
    return report, _drawn(), expected


def test_a_bfloat16_model_is_verified_and_the_callers_random_numbers_stay() -> None:
    report, drawn, expected = run_ranks(_verify_bfloat16_model)[0]
    assert report.ok, report
    assert {row.precision for row in report.rows} == {"bfloat16"}
    assert drawn == expected


_shared_net = Net()


def _one_net() -> nn.Module:
    return _shared_net


def _scalarless(model: nn.Module, batch: Tensor) -> Tensor:
    return model.hidden(batch)  # type: ignore[operator, no-any-return]


class Exploding(Net):
    def forward(self, x: Tensor) -> Tensor:
        return (super().forward(x) * 1e6).exp()


_stream = iter(torch.arange(1000.0))


def stream_batch(index: int, rank: int) -> Tensor:
    return next(_stream).expand(6, 4)


def _two_arguments(index: int, rank: int) -> tuple[Tensor, Tensor]:
    return make_batch(index, rank), torch.ones(1)


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "world": ({"world_size": 3}, "world_size=3, but torch.distributed is initialized with 4 ranks"),
    "sizes": (
        {"zero3_sizes": [3]},
        "zero3_sizes=[3] is not possible with layerzero: sizes must divide the 4 ranks. Use values from [1, 2, 4]",
    ),
    "no sizes": ({"zero3_sizes": []}, "zero3_sizes=[] is not possible with layerzero"),
    "kept by 3": ({"reshard_after_forward": 3}, "reshard_after_forward=3 does not divide the 4 ranks of verify"),
    "kept by 4": (
        {"reshard_after_forward": 4, "zero3_sizes": [2]},
        "the 4 ranks and be 1 or a multiple of reshard_after_forward=4. Use values from [1, 4]",
    ),
    "steps": ({"steps": 0}, "steps must be an int >= 1, got 0"),
    "tolerance": ({"tolerance": -1.0}, "tolerance must be a positive number, got -1.0"),
    "mesh": ({"mesh": None}, "verify does not support mesh"),
    "zero3_size": ({"zero3_size": 2}, "verify does not support zero3_size: pass zero3_sizes"),
    "gather": (
        {"codecs": Codecs(gather=layerzero.Float8Rows())},
        "verify supports only Codecs(refresh='lossless')",
    ),
    "hop2": ({"codecs": Codecs(hop2=layerzero.Int8Blocks())}, "verify supports only Codecs(refresh='lossless')"),
    "refresh": (
        {"codecs": Codecs(refresh=layerzero.Int4Difference())},
        "verify supports only Codecs(refresh='lossless'), got Codecs(gather=None, hop2=None, refresh=Int4",
    ),
    "old name": ({"gather_codec": None}, "Use codecs=layerzero.Codecs(gather=...)"),
    "typo": ({"unit": {Block}}, "no setting 'unit'. Use one of ['accumulation'"),
    "accumulation": ({"accumulation": "half"}, "accumulation='half'"),
    "ignored": ({"ignored_params": []}, "ignored_params must be a function of the model, not []"),
    "loss": ({"loss_fn": 3}, "loss_fn must be callable, got int"),
    "same object": ({"model_fn": _one_net}, "model_fn returned the same object twice"),
    "no model": ({"model_fn": dict}, "model_fn must return a torch.nn.Module, got dict"),
    "no loss": (
        {"model_fn": functools.partial(nn.Linear, 4, 2)},
        "a tensor of shape [6, 2], which is not a scalar loss",
    ),
    "arguments": ({"batch_fn": _two_arguments}, "If the model expects other arguments, pass loss_fn, or --loss"),
    "no scalar": ({"loss_fn": _scalarless}, "the loss must be a tensor of one element, got a tensor of shape [6, 8]"),
    "stream": ({"batch_fn": stream_batch}, "two calls to batch_fn(0, 0) returned different batches"),
    "not finite": ({"model_fn": Exploding}, "not finite in step 0"),
    "refused": (
        {"model_fn": Scaled},
        "the unsharded run works, but layerzero with zero3_size=1 in float32 fails",
    ),
}


def _message(mistake: dict[str, Any]) -> str:
    try:
        layerzero.verify(**{"model_fn": Net, "batch_fn": make_batch, **mistake})
    except (TypeError, ValueError, RuntimeError) as error:
        return "\n".join([str(error), *getattr(error, "__notes__", [])])
    return "no error"


def _make_mistakes(rank: int) -> dict[str, str]:
    return {name: _message(mistake) for name, (mistake, _) in MISTAKES.items()}


def test_mistakes_are_named_on_every_rank() -> None:
    for messages in run_ranks(_make_mistakes):
        for name, (_, pattern) in MISTAKES.items():
            assert pattern in messages[name], name


# Processes started by verify


def _in_a_sharded_run_on_rank_1(model: nn.Module) -> bool:
    return dist.get_rank() == 1 and isinstance(next(model.parameters()), DTensor)


def fails_on_rank_1(model: nn.Module, batch: Tensor) -> Tensor:
    if _in_a_sharded_run_on_rank_1(model):
        raise KeyError("a mistake of the user")
    return model(batch)  # type: ignore[no-any-return]


def dies_on_rank_1(model: nn.Module, batch: Tensor) -> Tensor:
    if _in_a_sharded_run_on_rank_1(model):
        os._exit(7)
    return model(batch)  # type: ignore[no-any-return]


@pytest.mark.exhaustive
def test_a_rank_that_raises_is_one_error_with_its_traceback() -> None:
    with pytest.raises(RuntimeError, match=r"rank 1 failed: .*a mistake of the user") as caught:
        layerzero.verify(Net, make_batch, world_size=2, zero3_sizes=[2], loss_fn=fails_on_rank_1)
    assert 'raise KeyError("a mistake of the user")' in str(caught.value)


def test_a_rank_that_dies_is_one_error() -> None:
    with pytest.raises(RuntimeError, match=r"rank 1 failed: its process ended without an exception.*\(exit code 7\)"):
        layerzero.verify(Net, make_batch, world_size=2, zero3_sizes=[2], loss_fn=dies_on_rank_1)


def test_what_cannot_be_pickled_is_named() -> None:
    with pytest.raises(
        TypeError, match=r"batch_fn cannot be sent to the processes of the ranks .*top level of a module"
    ):
        layerzero.verify(Net, lambda index, rank: torch.ones(6, 4))
    with pytest.raises(TypeError, match="settings cannot be sent"):
        layerzero.verify(Net, make_batch, units=lambda name, module: name == "first")
