"""Megatron-LM's pretraining script with and without layerzero: the same printed digits; flags work or are refused.

Needs a checkout of Megatron-LM: core_v0.16.1 at the path in the environment variable MEGATRON_LM or, with
Megatron-Core 0.19, core_v0.19.0 at the path in MEGATRON_LM_0_19.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import runpy
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

import layerzero.megatron
from tests.support.megatron_checkpoints import may_start_writers
from tests.support.megatron_lm import ARGUMENTS, CHECKOUT, NEEDS_CHECKOUT, RELEASE, Printed, pretrain, steps_of
from tests.support.ranks import run_ranks

pytestmark = NEEDS_CHECKOUT

SHOWN = ["--log-params-norm", "--log-num-zeros-in-grad"]
OURS = ["--check-weight-hash-across-dp-replicas-interval", "1"]
DISTRIBUTED = ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
RESHARDABLE = ["--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable"]


def own(rank: int, arguments: Sequence[str], also: Any = None) -> Printed:
    """Run Megatron-LM's unchanged script."""
    script = str(Path(CHECKOUT) / "pretrain_gpt.py")
    return pretrain([*ARGUMENTS, *arguments], lambda: runpy.run_path(script, run_name="__main__"), also=also)


def ours(rank: int, arguments: Sequence[str], also: Any = None, node: int = 2, without: str = "") -> Printed:
    """Run examples/pretrain_megatron.py, which uses layerzero, with `node` as LOCAL_WORLD_SIZE, which torchrun sets."""

    def main() -> None:
        import pretrain_megatron  # noqa: PLC0415 - Megatron-LM is there now

        pretrain_megatron.main()

    here = mock.patch.object(sys, "path", [*sys.path, str(Path(__file__).parents[2] / "examples")])
    with here, mock.patch.dict(os.environ, LOCAL_WORLD_SIZE=str(node)):
        return pretrain([*(each for each in ARGUMENTS if each != without), *arguments], main, also=also)


def _both(rank: int, arguments: Sequence[str], node: int) -> tuple[Printed, Printed]:
    both = [argument for argument in arguments if not argument.startswith("--layerzero")]
    return own(rank, both), ours(rank, [*arguments, *OURS], node=node)


LAYOUTS = {
    "data": ([], 2),
    "data, one node": ([], 4),
    "tensor": (["--tensor-model-parallel-size", "2"], 4),
    "pipeline": (["--pipeline-model-parallel-size", "2"], 4),
    "interleaved": (
        [
            *["--pipeline-model-parallel-size", "2", "--num-layers", "4"],
            *["--num-layers-per-virtual-pipeline-stage", "1", *DISTRIBUTED],
        ],
        2,
    ),
    "distributed optimizer": (DISTRIBUTED, 2),
    "bf16": (["--bf16"], 2),
    "sgd": (["--optimizer", "sgd"], 2),
    "muon": (["--optimizer", "muon", "--muon-fp32-matmul-prec", "high"], 2),
    "experts": (
        [
            *["--num-experts", "4", "--expert-model-parallel-size", "2", "--moe-token-dispatcher-type", "alltoall"],
            *["--disable-bias-linear", "--layerzero-expert-zero3-size=1"],
        ],
        4,
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_printed_digit_is_that_of_megatrons_own_training(layout: str) -> None:
    arguments, node = LAYOUTS[layout]
    told = run_ranks(_both, [*arguments, *SHOWN], node, world_size=4, timeout=400)
    theirs, mine = steps_of([pair[0] for pair in told]), steps_of([pair[1] for pair in told])
    assert len(mine) == 4
    assert float(mine[-1]["lm loss"]) < float(mine[0]["lm loss"])
    for step, (reference, printed) in enumerate(zip(theirs, mine, strict=True)):
        for steps in (reference, printed):
            steps.pop("num zeros")  # gradients of key biases are zero except for rounding
            if "--overlap-param-gather" in arguments:  # Megatron's loss is of weights half of which are a step old
                steps.pop("params norm")
        assert_alike(printed, reference, (layout, step))
    assert "Weight hashes match after 4 iterations" in told[0][1].text


def assert_alike(mine: dict[str, str], theirs: dict[str, str], where: object, units: int = 1) -> None:
    """Assert that two texts are equal except for `units` of the last digit of a number, where roundings may differ."""
    assert mine.keys() == theirs.keys(), where
    for name, text in theirs.items():
        if "." not in text:
            assert mine[name] == text, (where, name)
            continue
        digits, _, exponent = text.partition("E")
        last = 10.0 ** (int(exponent or 0) - len(digits.partition(".")[2]))
        assert abs(float(mine[name]) - float(text)) <= 1.01 * units * last, (where, name, mine[name], text)


# Flags


REFUSED = {
    "--ckpt-format": ["--ckpt-format", "torch", "--save", "nowhere", "--save-interval", "2"],
    "--use-distributed-optimizer": ["--use-distributed-optimizer", "--save", "nowhere", "--save-interval", "2"],
    "and dist_muon": ["--optimizer", "dist_muon", "--save", "nowhere", "--save-interval", "2"],
    "--check-for-large-grads": ["--check-for-large-grads"],
    "--save-wgrads-interval": ["--save-wgrads-interval", "2", "--save", "nowhere", "--save-interval", "2"],
    "--num-distributed-optimizer-instances": [
        *["--num-distributed-optimizer-instances", "2", "--use-distributed-optimizer"],
        *DISTRIBUTED[1:],
    ],
}
if RELEASE >= (0, 19):
    REFUSED |= {
        "--optimizer": ["--optimizer", "lion"],
        "--save-params-interval": ["--save-params-interval", "2", "--save", "nowhere", "--save-interval", "2"],
    }


def _refusals(rank: int) -> dict[str, str]:
    return {flag: _refusal(rank, arguments) for flag, arguments in REFUSED.items()}


def _refusal(rank: int, arguments: list[str]) -> str:
    with pytest.raises(ValueError, match="not supported with layerzero") as raised:
        ours(rank, arguments)
    return str(raised.value)


def test_what_cannot_be_had_is_refused_at_start_by_its_own_name_on_all_ranks() -> None:
    for rank, found in enumerate(run_ranks(_refusals, world_size=2, timeout=400)):
        for flag, text in found.items():
            assert f"{flag} " in text, (rank, text)


MINDSPEED = """
zero3_size: 8
transformer_layers: [megatron.core.transformer.transformer_layer.TransformerLayer]
param_dtype: bf16
reduce_dtype: fp32
limit_all_gathers: true
"""


def _wrapped(rank: int, folder: str, zero3_size: int) -> tuple[dict[str, Any], list[str]]:
    """Return the `wrap` settings of a run with a MindSpeed config file, and the warnings logged."""
    file = Path(folder) / f"{rank}.yaml"
    file.write_text(MINDSPEED.replace("8", str(zero3_size)))
    found: dict[str, Any] = {}
    said: list[str] = []

    def recorded(chunks: Any, config: Any, **settings: Any) -> Any:
        found.update(settings, units=sum(settings["units"](*entry) for entry in chunks[0].named_modules()))
        return layerzero.megatron.wrap(chunks, config, **settings)

    module = sys.modules["layerzero.megatron.install"]
    log = mock.patch.object(logging.getLogger("layerzero"), "warning", lambda text, *args: said.append(text % args))
    with log, mock.patch.object(module, "wrap", recorded):
        two = ["--tensor-model-parallel-size", "2", "--bf16", "--train-iters", "1"]
        ours(rank, [*two, "--layerzero-config", str(file)])
    return found, said


def test_a_file_of_mindspeed_counts_tensor_ranks(tmp_path: Path) -> None:
    for zero3_size, expected in ((4, 2), (2, 1), (8, 2)):
        told = run_ranks(_wrapped, str(tmp_path), zero3_size, world_size=4, timeout=400)
        for rank, (settings, said) in enumerate(told):
            assert settings["zero3_size"] == expected
            assert settings["units"] == 2, "layers; the tied embedding is the chunk's"
            policy = settings["mp_policy"]
            assert (policy.param_dtype, policy.reduce_dtype) == (torch.bfloat16, torch.float32)
            assert [f"layerzero uses zero3_size={expected}" in text for text in said] == [True] * (rank == 0)


def _refused_files(rank: int, folder: str) -> list[str]:
    file = Path(folder) / f"{rank}.yaml"
    texts = []
    for content, arguments in (
        (MINDSPEED.replace("8", "3"), ["--bf16", "--tensor-model-parallel-size", "2"]),
        (MINDSPEED, ["--fp16"]),
        (f"prefetch: {rank}", []),
        ("units: [Nowhere]", []),
        ("offload_grads: true", []),
    ):
        file.write_text(content)
        with pytest.raises(ValueError, match=r"\w") as raised:
            ours(rank, [*arguments, "--layerzero-config", str(file)])
        texts.append(str(raised.value))
    fused = "--no-gradient-accumulation-fusion"
    with pytest.raises(ValueError, match=f'Use accumulation="full".*{fused}'):
        ours(rank, [], without=fused)
    file.write_text("accumulation: full\nmp_policy: {accumulation_dtype: bf16}")
    with pytest.raises(ValueError, match=f"Remove accumulation_dtype.*{fused}"):
        ours(rank, ["--layerzero-config", str(file)], without=fused)
    return texts


def test_a_file_that_cannot_be_is_refused_on_all_ranks(tmp_path: Path) -> None:
    for texts in run_ranks(_refused_files, str(tmp_path), world_size=2, timeout=400):
        said = [
            "zero3_size=3 is not a multiple of the tensor-parallel size",
            "param_dtype in --layerzero-config is torch.bfloat16, but Megatron computes in torch.float16",
            "prefetch",
            "units of --layerzero-config contains Nowhere",
            "offload_grads is no longer a setting of shard_model. Use offload=layerzero.Offload(grads=...)",
        ]
        for expected, text in zip(said, texts, strict=True):
            assert expected in text


@pytest.mark.parametrize("mode", ["disabled", "validate_results"])  # Megatron-LM has no other mode that works
def test_steps_are_run_again_as_in_megatron(mode: str, tmp_path: Path) -> None:
    told = run_ranks(_with_a_nan, mode, str(tmp_path), world_size=2, timeout=400)
    theirs, mine = [pair[0] for pair in told], [pair[1] for pair in told]
    assert [each.exit_code for each in mine] == [each.exit_code for each in theirs]
    assert steps_of(mine) == steps_of(theirs)
    if mode == "validate_results":
        assert mine[0].exit_code, "a loss that is NaN once ends the run"
        assert len(steps_of(mine)) == 1
        for who in ("own", "ours"):
            assert (tmp_path / who / "latest_checkpointed_iteration.txt").read_text() == "1", who


def _with_a_nan(rank: int, mode: str, folder: str) -> list[Printed]:
    happens = mode == "validate_results"
    return [
        run(rank, ["--rerun-mode", mode, *_saving(f"{folder}/{run.__name__}", 100)], _nan_once(rank, happens))
        for run in (own, ours)
    ]


@contextlib.contextmanager
def _nan_once(rank: int, happens: bool) -> Iterator[None]:
    """Make the loss of one micro-batch NaN in the second step on one rank, but not when it is recomputed."""
    from megatron.core.models.gpt import GPTModel  # noqa: PLC0415

    plain, calls = GPTModel.compute_language_model_loss, itertools.count()

    def damaged(self: Any, *args: Any) -> Any:
        loss = plain(self, *args)
        return loss * float("nan") if happens and next(calls) == 2 and rank == 1 else loss

    with may_start_writers(), mock.patch.object(GPTModel, "compute_language_model_loss", damaged):
        yield


# Checkpoints


def _saving(folder: str, interval: int) -> list[str]:
    return ["--save", folder, "--save-interval", str(interval), "--ckpt-format", "torch_dist"]


def _resumed(rank: int, folder: str, arguments: list[str], whose: str) -> list[list[dict[str, str]]]:
    """Return the steps of an uninterrupted run, of one that stops after two steps, and of the run that resumes it."""
    first, second = {"ours": (ours, ours), "to megatron": (ours, own), "from megatron": (own, ours)}[whose]
    stop = [*_saving(folder, 2), "--exit-interval", "2"]
    of_layerzero = ["--layerzero-ema-decay", "0.5"]
    runs = []
    for run, more in ((ours, []), (first, stop), (second, ["--load", folder, *_saving(folder, 2)])):
        extra = of_layerzero if run is ours and whose == "ours" else []
        runs.append(steps_of([run(rank, [*arguments, *SHOWN[:1], *more, *extra], may_start_writers())]))
    return runs


@pytest.mark.parametrize("whose", ["ours", "to megatron", "from megatron"])
def test_a_run_goes_on_where_it_was_saved_in_megatrons_format(whose: str, tmp_path: Path) -> None:
    arguments = RESHARDABLE if whose == "ours" else []
    whole, first, rest = run_ranks(_resumed, str(tmp_path / "run"), arguments, whose, world_size=2, timeout=400)[-1]
    assert (len(first), len(rest)) == (2, 2)
    assert_goes_on(whole, first, rest)


def assert_goes_on(whole: list[dict[str, str]], *runs: list[dict[str, str]]) -> None:
    """Assert that consecutive runs printed the steps of one run. See steps_of about their second losses."""
    told = [step for run in (_as_if_each_were_printed(run) for run in runs) for step in run]
    for number, (step, expected) in enumerate(zip(told, _as_if_each_were_printed(whole), strict=True)):
        assert_alike(step, expected, number, units=4)


def _as_if_each_were_printed(run: list[dict[str, str]]) -> list[dict[str, str]]:
    steps = [{name: value for name, value in step.items() if "iterations" not in name} for step in run]
    if len(steps) > 1 and "lm loss" in steps[0] and "lm loss" in steps[1]:
        steps[1]["lm loss"] = f"{2 * float(run[1]['lm loss']) - float(run[0]['lm loss']):.6E}"
    return steps


def test_fp16_is_saved_before_the_first_good_step_and_goes_on(tmp_path: Path) -> None:
    arguments = ["--fp16", "--initial-loss-scale", str(2**22), "--hysteresis", "1", "--train-iters", "6"]
    whole, first, rest = run_ranks(_resumed_fp16, str(tmp_path / "run"), arguments, world_size=2, timeout=400)[-1]
    assert len(first) == 1
    assert [step["number of skipped iterations"] for step in (*first, rest[0], rest[-1])] == ["1", "1", "0"]
    assert_goes_on(whole, first, rest)


def _resumed_fp16(rank: int, folder: str, arguments: list[str]) -> list[list[dict[str, str]]]:
    stop, go = [*_saving(folder, 1), "--exit-interval", "1"], ["--load", folder, *_saving(folder, 100)]
    return [steps_of([ours(rank, [*arguments, *more], may_start_writers())]) for more in ([], stop, go)]


def test_the_average_of_the_weights_is_in_checkpoints(tmp_path: Path) -> None:
    run_ranks(_average, str(tmp_path / "run"), world_size=2, timeout=400)
    first, second = (_tensors(tmp_path / "run" / f"iter_000000{step}") for step in (1, 2))
    averages = {key.removeprefix("optimizer.state.ema."): value for key, value in second.items() if ".ema." in key}
    assert averages
    for name, average in averages.items():
        torch.testing.assert_close(average, (first[name] + second[name]) / 2)
        assert not torch.equal(first[name], second[name]), name


def _average(rank: int, folder: str) -> None:
    arguments = ["--train-iters", "2", "--layerzero-ema-decay", "0.5", *_saving(folder, 1)]
    ours(rank, arguments, may_start_writers())


def _tensors(folder: Path) -> dict[str, Any]:
    reader = dcp.FileSystemReader(folder)
    stored = reader.read_metadata().state_dict_metadata
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in stored.items()
        if isinstance(entry, TensorStorageMetadata) and entry.size
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        dcp.load(state, storage_reader=reader, no_dist=True)
    return state


def test_a_signal_ends_the_run_on_all_ranks_with_a_checkpoint(tmp_path: Path) -> None:
    for printed in run_ranks(_signaled, str(tmp_path / "run"), world_size=2, timeout=400):
        assert printed.exit_code == 0
    assert (tmp_path / "run" / "latest_checkpointed_iteration.txt").read_text() == "2"


def _signaled(rank: int, folder: str) -> Printed:
    before = signal.getsignal(signal.SIGTERM)
    try:
        return ours(rank, ["--exit-signal-handler", *_saving(folder, 100)], _signal_in_second_step(rank))
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _signal_in_second_step(rank: int) -> Iterator[None]:
    from megatron.training import training  # noqa: PLC0415

    plain, calls = training.training_log, itertools.count(1)

    def logged(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == 2 and rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return plain(*args, **kwargs)

    with may_start_writers(), mock.patch.object(training, "training_log", logged):
        yield
