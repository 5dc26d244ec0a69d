"""Determine by long runs which optimizers of other packages work, and compare the result with layerzero's decision.

    PYTHONPATH=DIR python -m benchmarks.optimizer_survey [--write benchmarks/results/optimizers.md] [--only NAME ...]

DIR contains the packages to test, out of pytorch_optimizer, lion-pytorch, schedulefree, bitsandbytes and torchao.
Install them with ``--no-deps --target DIR``, so that torch is not replaced.

The result does not use the compatibility trial of `layerzero.optimizers`. Each optimizer is built for full parameters,
for the rows of three ranks (some ranks have none), and for each parameter separately. It takes 60 steps on larger
tensors, with two seeds, on a quadratic loss with noise. Then the parameters are compared. Neither use nor tests of
layerzero need this script.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import inspect
import logging
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from layerzero.optimizers.compatibility import kinds_that_need_full_params

PACKAGES = {
    "torch.optim": "torch",
    "pytorch_optimizer": "pytorch_optimizer",
    "lion_pytorch": "lion-pytorch",
    "schedulefree": "schedulefree",
    "bitsandbytes.optim": "bitsandbytes",
    "torchao.optim": "torchao",
}
# Shapes, and the row bounds of three ranks. The first shape has more than 4096 elements, from where 8-bit optimizers
# quantize. The rows of the second rank also do, and their blocks of 128 or 256 elements start at other elements than
# those of the full matrix.
CUTS = {
    (128, 96): (0, 61, 125, 128),
    (40, 33): (0, 1, 1, 40),
    (257,): (0, 100, 101, 257),
    (6, 5, 3, 3): (0, 4, 6, 6),
    (11,): (0, 3, 7, 11),
    (1, 50): (0, 0, 1, 1),
    (130, 17): (0, 61, 125, 130),
    (17, 3): (0, 0, 16, 17),
    (3, 1): (0, 1, 3, 3),
    (): (0, 0, 0, 1),
}
STEPS, SEEDS, SECONDS = 60, (0, 1), 150
SETTINGS: dict[str, dict[str, Any]] = {"lr": {"lr": 1e-3}, "num_iterations": {"num_iterations": 100}}
OF_CLASS: dict[str, dict[str, Any]] = {
    "AdaShift": {"keep_num": 2},  # it does not move before as many steps
    "Shampoo": {"matrix_eps": 1.0},  # roots of nearly singular matrices amplify rounding
}
# Dependencies that 60 steps with defaults do not show, from the definition of the optimizer: on other parameters, or
# between the elements of one parameter.
ON_OTHERS = {
    "AdamS": "scales its weight decay by a mean over all parameters",
    "DAdaptAdaGrad": "estimates a distance from all parameters",
    "EmoFact": "follows the loss of a closure",
    "EmoLynx": "follows the loss of a closure",
    "EmoNavi": "follows the loss of a closure",
    "SWATS": "changes its rule for all parameters at once",
}
INSIDE = {
    "Alice": "draws random numbers, in another order than for all parameters",
    "LAMB8bit": "scales by norms of whole parameters",
    "LARS8bit": "scales by norms of whole parameters",
    "ScalableShampoo": "preconditions matrices after more steps",
}
MARKS = ("<!-- survey -->", "<!-- end of survey -->")
Build = Callable[[list[nn.Parameter]], Optimizer]


class Truth(NamedTuple):
    works: bool | None  # on rows; None: unknown
    why: str
    alone: bool = False  # stepping each parameter separately gives the same result as stepping all together


class Row(NamedTuple):
    package: str
    name: str
    truth: Truth
    accepted: str  # "on rows", "whole", or empty
    said: str

    @property
    def verdict(self) -> str:
        if self.truth.works is None:
            return "not judged"
        if self.accepted:
            works = self.truth.works if self.accepted == "on rows" else self.truth.alone
            return self.accepted if works else f"{self.accepted} (WRONGLY)"
        if "wraps another optimizer" in self.said:
            return "wrappers"
        if "cannot be saved" in self.said or "in the state of" in self.said:  # it trains, but cannot be resumed
            return "refused"
        return "refused (WRONGLY)" if self.truth.works or self.truth.alone else "refused"


def classes() -> Iterator[tuple[str, str, type[Optimizer]]]:
    for module in PACKAGES:
        try:
            found = vars(importlib.import_module(module))
        except ImportError as error:
            print(f"{module}: {error}", file=sys.stderr)
            continue
        for name, kind in sorted(found.items()):
            if inspect.isclass(kind) and issubclass(kind, Optimizer) and kind is not Optimizer:
                yield module, name, kind


def builder(kind: type[Optimizer]) -> Build:
    """Return a function that builds the optimizer with its defaults; settings without a default get a value."""
    arguments = inspect.signature(kind.__init__).parameters
    given: dict[str, Any] = {}
    for name, value in SETTINGS.items():
        if name in arguments and arguments[name].default is inspect.Parameter.empty:
            given |= value
    given |= OF_CLASS.get(kind.__name__, {}) if kind.__module__.startswith("pytorch_optimizer") else {}
    if "momentum" in arguments and kind.__module__.startswith("bitsandbytes"):
        given["momentum"] = 0.9  # without momentum, these optimizers raise when they are built or stepped
    if "params" not in arguments and "optimizer" in arguments:
        return lambda parameters: kind(torch.optim.SGD(parameters, lr=1e-2), **given)
    if "base_optimizer" in arguments:
        return lambda parameters: kind(parameters, base_optimizer=torch.optim.SGD, lr=1e-2, **given)
    if "Muon" in kind.__name__ or kind.__name__ in ("AdaGO",):
        return lambda parameters: _muon(kind, parameters)
    return lambda parameters: kind(parameters, **given)


def _muon(kind: type[Optimizer], parameters: list[nn.Parameter]) -> Optimizer:
    matrices = [p for p in parameters if p.ndim == 2]
    if kind.__module__.startswith("torch."):
        return kind(matrices)
    others = [p for p in parameters if p.ndim != 2]
    return kind([{"params": matrices, "use_muon": True}, {"params": others, "use_muon": False}])


def truth_of(build: Build) -> Truth:
    worst, worst_alone, quantized, on_rows = 0.0, 0.0, False, ""
    for seed in SEEDS:
        generator = torch.Generator().manual_seed(seed)
        start = [0.5 * torch.randn(shape, generator=generator) for shape in CUTS]
        target = [torch.randn(shape, generator=generator) for shape in CUTS]
        noise = [[0.3 * torch.randn(shape, generator=generator) for shape in CUTS] for _ in range(STEPS)]
        scales = [10 ** (2 * torch.rand((), generator=generator).item() - 1.5) for _ in range(STEPS)]

        def rows(tensors: list[Tensor], rank: int) -> list[Tensor]:
            whole = [tensor if tensor.ndim else tensor.reshape(1) for tensor in tensors]
            return [tensor[at[rank] : at[rank + 1]] for tensor, at in zip(whole, CUTS.values(), strict=True)]

        try:
            whole, optimizer = _train(build, start, target, noise, scales, seed)
        except _OutOfTimeError:
            raise
        except Exception as error:
            return Truth(None, f"whole parameters: {_short(error)}")
        if all(torch.equal(after, before) for after, before in zip(whole, start, strict=True)):
            return Truth(None, "nothing moves with its defaults")
        quantized |= _is_quantized(optimizer)
        try:
            pieces = [
                _train(build, *(rows(t, rank) for t in (start, target)), [rows(n, rank) for n in noise], scales, seed)[
                    0
                ]
                for rank in range(3)
            ]
            together = [torch.cat([piece[i] for piece in pieces]).view_as(start[i]) for i in range(len(start))]
            worst = max(worst, _apart(whole, together, start))
        except _OutOfTimeError:
            raise
        except Exception as error:
            worst, on_rows = 1.0, f"rows on three ranks: {_short(error)}"
        try:
            alone = [
                whole[i]
                if torch.equal(whole[i], start[i])
                else _train(build, [start[i]], [target[i]], [[each[i]] for each in noise], scales, seed)[0][0]
                for i in range(len(start))
            ]
            worst_alone = max(worst_alone, _apart(whole, alone, start))
        except _OutOfTimeError:
            raise
        except Exception:
            worst_alone = 1.0
    by_itself = worst_alone < 1e-6
    if worst < 1e-6:
        return Truth(True, "same updates", by_itself)
    if quantized and worst < 0.5:
        return Truth(True, f"quantizes its state in blocks: {100 * worst:.1f}% of the way apart", by_itself)
    return Truth(False, on_rows or f"{100 * worst:.2g}% of the way apart", by_itself)


def _apart(whole: list[Tensor], others: list[Tensor], start: list[Tensor]) -> float:
    """Return the largest difference of a parameter beyond rounding, relative to its change since `start`."""
    worst = 0.0
    for first, ours, theirs in zip(start, whole, others, strict=True):
        moved = (ours - first).double().norm().item()
        off = (ours - theirs).double().norm().item()
        rounding = STEPS**0.5 * 2.0**-24 * first.double().norm().item()
        if moved > 3 * rounding:
            worst = max(worst, max(0.0, off - rounding) / moved)
    return worst


def _train(
    build: Build,
    start: list[Tensor],
    target: list[Tensor],
    noise: list[list[Tensor]],
    scales: list[float],
    seed: int,
) -> tuple[list[Tensor], Optimizer]:
    torch.manual_seed(seed)
    parameters = [nn.Parameter(each.clone()) for each in start]
    optimizer = build(parameters)
    if callable(begin := getattr(optimizer, "train", None)):
        begin()
    for step, scale in zip(noise, scales, strict=True):
        for parameter, goal, each in zip(parameters, target, step, strict=True):
            parameter.grad = (parameter.detach() - goal + each) * scale
        optimizer.step()
    if not all(parameter.isfinite().all() for parameter in parameters):
        raise FloatingPointError("not finite")
    return [parameter.detach() for parameter in parameters], optimizer


def _is_quantized(optimizer: Optimizer) -> bool:
    """Return whether the optimizer has quantized state: uint8 tensors, or tensor subclasses."""
    for values in getattr(optimizer, "state", {}).values():
        for value in values.values() if isinstance(values, dict) else ():
            if isinstance(value, Tensor) and value.ndim and (value.dtype is torch.uint8 or type(value) is not Tensor):
                return True
    return False


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:110]


class _OutOfTimeError(BaseException):
    pass


def _alarm(*_: Any) -> None:
    raise _OutOfTimeError


def survey(only: list[str]) -> list[Row]:
    rows = []
    signal.signal(signal.SIGALRM, _alarm)
    for package, name, kind in classes():
        if only and name not in only:
            continue
        build, said, accepted = builder(kind), "", ""
        signal.alarm(SECONDS)
        try:
            with torch.compiler.set_stance("force_eager"):
                truth = truth_of(build)
            if truth.works is not None and name in ON_OTHERS | INSIDE:
                truth = Truth(works=False, why=(ON_OTHERS | INSIDE)[name], alone=name in INSIDE)
        except _OutOfTimeError:
            truth = Truth(None, f"not done within {SECONDS} s")
        finally:
            signal.alarm(0)
        try:
            optimizer = build([nn.Parameter(torch.zeros(shape)) for shape in CUTS])
        except Exception as error:
            truth = Truth(None, f"not built: {_short(error)}")
        else:
            try:
                accepted = "whole" if kinds_that_need_full_params(optimizer, torch.device("cpu")) else "on rows"
            except Exception as error:
                said = str(error).split(". Under layerzero, ")[0]
        rows.append(Row(package, name, truth, accepted, said))
        print(f"{package}.{name}: {rows[-1].verdict}; {truth.why}; {said}", flush=True)
    return rows


def table(rows: list[Row]) -> str:
    verdicts = Counter(row.verdict for row in rows)
    versions = [f"{name} {importlib.metadata.version(name)}" for name in PACKAGES.values()]
    lines = [
        MARKS[0],
        f"Versions: {', '.join(versions)}. {len(rows)} classes: "
        + ", ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common())
        + ".",
        "",
        "| package | on rows | whole | refused | wrappers | not judged |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for package in PACKAGES:
        cells: dict[str, list[str]] = {key: [] for key in ("on rows", "whole", "refused", "wrappers", "not judged")}
        for row in rows:
            if row.package == package:
                verdict, _, wrong = row.verdict.partition(" (")
                mark = "\\*" if row.truth.works and "quantizes" in row.truth.why else ""
                name = row.name + mark
                cells[verdict].append(f"**{name} ({wrong.lower()}**" if wrong else name)
        lines.append(f"| {package} | {' | '.join(', '.join(names) or 'none' for names in cells.values())} |")
    return "\n".join([*lines, MARKS[1]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, help="a markdown file whose part between the marks is replaced")
    parser.add_argument("--only", nargs="*", default=[], help="names of classes")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    text = table(survey(given.only))
    print(text)
    if given.write:
        before, _, rest = given.write.read_text().partition(MARKS[0])
        given.write.write_text(before + text + rest.partition(MARKS[1])[2])


if __name__ == "__main__":
    main()
