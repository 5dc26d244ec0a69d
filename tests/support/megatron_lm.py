"""Megatron-LM's own pretraining script on gloo ranks, with its parser, data, schedules, logs and checkpoints.

This needs a checkout of Megatron-LM. The environment variable MEGATRON_LM names one of core_v0.16.1; if Megatron-Core
0.19 is installed, MEGATRON_LM_0_19 names one of core_v0.19.0. The package contains no ``pretrain_gpt.py``, and before
0.19 no ``megatron.training``. The checkout is only read. CUDA functions that :mod:`megatron_cpu` does not replace are
replaced here.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import io
import logging
import os
import re
import shlex
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

from tests.support.megatron_cpu import cpu_instead_of_cuda

try:
    RELEASE = tuple(int(part) for part in importlib.metadata.version("megatron-core").split(".")[:2])
except importlib.metadata.PackageNotFoundError:
    RELEASE = (0, 16)
_VARIABLE, _TAG = ("MEGATRON_LM", "core_v0.16.1") if RELEASE < (0, 19) else ("MEGATRON_LM_0_19", "core_v0.19.0")
CHECKOUT = os.environ.get(_VARIABLE, "")
NEEDS_CHECKOUT = pytest.mark.skipif(not CHECKOUT, reason=f"{_VARIABLE} names no checkout of Megatron-LM ({_TAG})")

# A GPT of two layers with eight sequences per step, without kernels that a CPU lacks.
ARGUMENTS = shlex.split(
    "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --seq-length 8 --max-position-embeddings 8 "
    "--micro-batch-size 2 --global-batch-size 8 --train-iters 4 --lr 1e-2 --min-lr 1e-3 --lr-decay-style linear "
    "--clip-grad 1.0 --weight-decay 0.1 --attention-dropout 0 --hidden-dropout 0 --mock-data --num-workers 0 "
    "--tokenizer-type NullTokenizer --vocab-size 63 --make-vocab-size-divisible-by 8 --log-interval 1 "
    "--eval-interval 100 --eval-iters 1 --distributed-backend gloo --transformer-impl local "
    "--attention-backend unfused --use-cpu-initialization --no-gradient-accumulation-fusion --no-masked-softmax-fusion "
    "--no-bias-gelu-fusion --no-bias-dropout-fusion --no-bias-swiglu-fusion --no-rope-fusion --no-persist-layer-norm"
)


class Printed(NamedTuple):
    """Output of one rank's training, and its exit code."""

    text: str
    exit_code: Any  # None: the script returned


def pretrain(arguments: Sequence[str], main: Callable[[], None], *, also: Any = None) -> Printed:
    """Run a pretraining script with these arguments on this rank, which has a process group already.

    Args:
        main: main function of the script.
        also: context manager to run the script in.
    """
    out, code = io.StringIO(), None
    with training() as module, also or contextlib.nullcontext():
        environment = {"RANK": str(torch.distributed.get_rank()), "LOCAL_RANK": "0"}
        environment["WORLD_SIZE"] = str(torch.distributed.get_world_size())
        argv = mock.patch.object(sys, "argv", ["pretrain.py", *arguments])
        with mock.patch.dict(os.environ, environment), argv, contextlib.redirect_stdout(out):
            try:
                main()
            except SystemExit as end:
                code = end.code
            finally:
                module.destroy_global_state()
    return Printed(out.getvalue(), code)


def steps_of(printed: Sequence[Printed]) -> list[dict[str, str]]:
    """Return the numbers that the last rank has printed for each step, as text, without times.

    The second line of a run has the mean of the first two losses: Megatron-LM does not reset the sum at the first one.
    """
    steps = []
    for line in printed[-1].text.splitlines():
        if re.search(r"iteration +\d+/", line):
            parts = [part.strip() for part in line.split("|")[1:-1]]
            pairs = [part.partition(":")[::2] for part in parts if "elapsed" not in part]
            steps.append({name.strip(): value.strip() for name, value in pairs})
    return steps


@contextlib.contextmanager
def training() -> Iterator[Any]:
    """Yield ``megatron.training.training`` of the checkout, patched for the CPU; undo all patches at the end."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(cpu_instead_of_cuda())
        stack.enter_context(mock.patch.object(sys, "path", [*sys.path, CHECKOUT]))
        put = functools.partial(_put, stack)
        state = torch.zeros(1, dtype=torch.uint8)
        put(torch.cuda, "device_count", lambda: 1)
        put(torch.cuda, "set_device", lambda *_: None)
        put(torch.cuda, "get_rng_state", lambda *_: state)
        put(torch.cuda, "set_rng_state", lambda *_: None)
        put(torch.cuda, "get_device_capability", lambda *_: (8, 0))
        put(torch.cuda, "get_device_properties", lambda *_: types.SimpleNamespace(major=8, minor=0))
        put(torch, "rand", _rand(torch.rand))
        kernels = types.ModuleType("megatron.core.transformer.custom_layers.batch_invariant_kernels")  # imports triton
        kernels.enable_batch_invariant_mode = None  # type: ignore[attr-defined]
        stack.enter_context(mock.patch.dict(sys.modules, {kernels.__name__: kernels}))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = importlib.import_module("megatron.training.training")
            initialize = importlib.import_module("megatron.training.initialize")
            helpers = importlib.import_module("megatron.core.datasets.utils")
            datasets = importlib.import_module("megatron.core.datasets.gpt_dataset")
        warnings.simplefilter("ignore")  # Megatron's own warnings are not tested here
        warnings.filterwarnings("error", module="layerzero")
        put(datasets.MockGPTLowLevelDataset, "size", 200)  # documents; an index of 100,000 takes seconds
        put(helpers, "compile_helpers", lambda: None)  # the wheel contains them
        if hasattr(initialize, "fused_kernels"):  # Megatron-LM core_v0.16.1
            put(initialize.fused_kernels, "load", lambda _: None)
        put(module, "initialize_megatron", functools.partial(initialize.initialize_megatron, allow_no_cuda=True))
        level = logging.getLogger().level
        stack.callback(lambda: logging.getLogger().setLevel(level))
        stack.enter_context(mock.patch.dict(vars(module)))
        yield module


def _put(stack: contextlib.ExitStack, target: Any, name: str, value: Any) -> None:
    stack.enter_context(mock.patch.object(target, name, value))


def _rand(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device", None)
        return make(*args, **kwargs)

    return made
