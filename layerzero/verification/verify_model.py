"""Compare the training of a model in one process and distributed over ranks: :func:`verify`."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim import Optimizer

from layerzero import Codecs, LayerZeroConfig, PrecisionPolicy, shard_model
from layerzero.extend import (
    Progress,
    agreed,
    compute_device,
    default_device_type,
    refuse_old_names,
    require_equal,
    require_numpy,
)
from layerzero.verification.comparison import Comparison, ParameterDifference, VerifyReport
from layerzero.verification.local_processes import run_on_local_ranks
from layerzero.verification.schemes import PER_MODEL, SCHEMES, Scheme, scheme_name
from layerzero.verification.training_runs import (
    PlainRun,
    TrainingTask,
    default_loss,
    preserved_rng,
    train_distributed,
    train_plain,
)

_REFUSED = {
    "mesh": "verify creates a mesh for each of zero3_sizes",
    "zero3_size": "pass zero3_sizes=[...], or leave it out to try every divisor of the world size",
    "param_init_fn": "model_fn must return initialized weights, because all runs start from the same weights",
}


def default_optimizer(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Return SGD with momentum. Adam is unsuitable, because it normalizes gradients and thus hides a wrong scale."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@dataclass(frozen=True)
class _Trial:
    """Settings of one distributed run."""

    zero3_size: int | None  # None: the user's function determines it
    precision: str
    tolerance: float
    settings: Mapping[str, Any]


def verify(
    model_fn: Callable[[], nn.Module],
    batch_fn: Callable[[int, int], Any],
    *,
    loss_fn: Callable[[nn.Module, Any], Tensor] | None = None,
    optimizer_fn: Callable[[Iterable[nn.Parameter]], Optimizer] | None = None,
    scheme: Scheme = "layerzero",
    world_size: int | None = None,
    zero3_sizes: Sequence[int] | None = None,
    steps: int = 3,
    micro_batches: int = 2,
    tolerance: float | None = None,
    seed: int = 0,
    timeout: float = 300.0,
    **settings: Any,
) -> VerifyReport:
    """Train a model for a few steps, in one process and distributed, and compare the gradients and weights.

    The unsharded run is data-parallel training in one process, without collectives. The distributed runs train with
    `scheme`. By default, they call :func:`layerzero.shard_model`, :func:`layerzero.shard_optimizer` and the model's
    ``no_sync``, as a training loop does. All runs start from the same weights and draw the same random numbers for a
    given rank and micro-batch. Therefore dropout and batch-norm in training mode can be compared.

    On a CPU, the ranks use collectives instead of shared memory, as on devices, unless you pass `shared_memory`.
    Therefore the run fails, at the latest after `timeout`, if `loss_fn` calls the model on only some ranks of a ZeRO-3
    group. On devices, such a call hangs until the timeout of the process group.

    Use a small configuration of the model. Every rank allocates the full model, and rank 0 stores two copies of it per
    step in host memory.

    If torch.distributed is initialized (under torchrun), every rank must call this function, and the existing ranks and
    their devices are used. Otherwise, `world_size` processes are started on this machine's CPU. In this case, all
    functions must be picklable. Define them at the top level of a module. A script must also guard its entry point with
    ``if __name__ == "__main__"``.

    Args:
        model_fn: function that builds the model on any device. The function is called many times and must return a new
            model with the same structure each time.
        batch_fn: function ``(index, rank) -> batch``, where `index` counts micro-batches from 0 over all steps. The
            function must return equal batches for equal arguments. torch's generators are seeded before each call.
        loss_fn: function ``(model, batch) -> loss``, where the loss is a tensor with one element. If None, the model
            must return the loss, or an object that has the loss as ``.loss`` or ``["loss"]``. The model is called as
            ``model(batch)``, as ``model(*batch)`` for a tuple, or as ``model(**batch)`` for a dict.
        optimizer_fn: function ``(parameters) -> optimizer``, for example ``functools.partial(torch.optim.SGD,
            lr=0.01)``. The default is SGD with momentum 0.9 and learning rate 0.1. Adam hides wrong scales of
            gradients. It also takes full-size steps if gradients consist only of rounding errors.
        scheme: ``"layerzero"``, ``"fsdp2"``, ``"hsdp"`` (FSDP2 with replicas), ``"ddp"``, or your own code: a function
            ``model -> (model, optimizer)`` that is called on each rank. The function returns the model that it was
            called with, or a wrapper around it. verify then finds mistakes such as an optimizer that was built before
            ``fully_shard``. `optimizer_fn` must build the same kind of optimizer for the unsharded run. If the
            function selects a low precision, pass a `tolerance`.
        world_size: number of processes to start. The default is 4. Under torchrun, it is the existing world size.
        zero3_sizes: values of S to try, with `scheme` layerzero or hsdp. The default is every divisor of the world
            size, for hsdp without the world size itself. If `reshard_after_forward` is a number, the default is 1 and
            every divisor that is a multiple of that number. If `reshard_after_forward` is a callable that returns
            numbers, pass `zero3_sizes`.
        steps, micro_batches: number of optimizer steps, and number of batches per step and rank. All micro-batches of a
            step except the last one run inside ``no_sync``, or with ``set_requires_gradient_sync(False)``, if the
            model has these methods.
        tolerance: largest accepted relative difference, both of a parameter's gradient and of the trained parameter. A
            gradient's difference is divided by the gradient's largest element. A trained parameter's difference is
            divided by the distance that the parameter moved. If a hundredth of the model's largest gradient or movement
            is larger, it is the divisor instead. Trained values that differ by one ulp of their dtype count as equal.
            The default depends on the coarsest dtype that is used. For fp32 (3.5e-4) and fp64, the default is the
            square root of epsilon, which corresponds to half of the digits. For fp16 (0.125) and bf16 (0.35), it is
            four times the square root, because these dtypes have so few digits that accumulated rounding errors exceed
            half of them.
        seed: seed for all random numbers.
        timeout: timeout of a collective between the started processes, in seconds.
        settings: settings of :func:`layerzero.shard_model`: `units`, `accumulation`, `mp_policy`, ... With fsdp2 and
            hsdp, only `units` and a ``MixedPrecisionPolicy`` are supported, and with other schemes none. To try several
            accumulation modes, call verify for each. `ignored_params` and `ignored_modules` must be functions
            ``model -> iterable``. verify averages the gradients of ignored parameters, because layerzero leaves this to
            the training loop.

    The unsharded run uses the precision in which the model is built and, with layerzero, fp32 masters. If `mp_policy`
    requests a lower precision, there are two runs for each S. The first run omits the dtypes and uses the strict
    tolerance. It determines whether the model can be distributed. The second run uses the policy and measures the
    effect of the lower precision. `tolerance` applies only to runs with your policy. In bf16, a tolerance of 0.35 is
    enough to detect wrong scales, but not subtle errors. Differences of 0.14 from fp32 have been observed in single
    layers.

    Returns:
        A :class:`VerifyReport`, the same on all ranks. It has ``report.ok`` and ``report.worst``, and ``str(report)``
        is a table.

    Raises:
        TypeError, ValueError: an argument is invalid, a function cannot be pickled, or a loss is invalid or not finite.
        RuntimeError: a rank failed, for instance because layerzero does not support the model. The message contains the
            rank's traceback. Under torchrun, the traceback is instead in the exception chain on the rank that failed.
            The other ranks may then wait for this rank until the timeout of the process group.

    Example::

        report = layerzero.verify(make_model, make_batch, units={Block})
        print(report)
        assert report.ok
    """
    require_numpy("layerzero.verify")
    own_ranks = dist.is_initialized()
    world = (dist.get_world_size() if own_ranks else 4) if world_size is None else world_size
    _check_arguments(
        {"steps": steps, "micro_batches": micro_batches, "world_size": world},
        {"tolerance": tolerance, "timeout": timeout},
        settings,
    )
    _check_scheme(scheme, settings, has_optimizer=optimizer_fn is not None)
    loss_fn = default_loss if loss_fn is None else loss_fn
    optimizer_fn = default_optimizer if optimizer_fn is None else optimizer_fn
    functions = {"model_fn": model_fn, "batch_fn": batch_fn, "loss_fn": loss_fn, "optimizer_fn": optimizer_fn}
    for name, function in functions.items():
        if not callable(function):
            raise TypeError(f"{name} must be callable, got {type(function).__name__}")
    if own_ranks and world != dist.get_world_size():
        raise ValueError(
            f"world_size={world_size}, but torch.distributed is initialized with {dist.get_world_size()} ranks. Leave "
            "world_size out"
        )
    sizes = _sizes_to_verify(scheme, zero3_sizes, world, settings.get("reshard_after_forward", True))
    run_arguments = {"steps": steps, "micro_batches": micro_batches, "seed": seed, "zero3_sizes": sizes}
    arguments: dict[str, Any] = {**functions, **run_arguments, "scheme": scheme}
    arguments |= {"tolerance": tolerance, "settings": settings}
    if own_ranks:
        return _verify(dist.get_rank(), arguments, device_type=default_device_type())
    report: VerifyReport = run_on_local_ranks(_verify, arguments, world_size=world, timeout=timeout)
    return report


def _check_arguments(
    counts: Mapping[str, int], limits: Mapping[str, float | None], settings: Mapping[str, Any]
) -> None:
    """Raise TypeError or ValueError if an argument of :func:`verify` is invalid regardless of `zero3_size`."""
    for name, value in counts.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} must be an int >= 1, got {value!r}")
    for name, limit in limits.items():
        if limit is not None and not (limit > 0 and math.isfinite(limit)):
            raise ValueError(f"{name} must be a positive number, got {limit!r}")
    refuse_old_names(settings)
    for name, value in settings.items():
        _require_supported(name, value)
    config_settings = {name: value for name, value in settings.items() if name not in PER_MODEL}
    LayerZeroConfig(**{"zero3_size": 1, **config_settings})


def _require_supported(name: str, value: Any) -> None:
    """Raise TypeError unless :func:`verify` supports a setting of :func:`layerzero.shard_model`."""
    if name in _REFUSED:
        raise TypeError(f"verify does not support {name}: {_REFUSED[name]}")
    if isinstance(value, Codecs) and (value.gather or value.hop2 or not isinstance(value.refresh, str | None)):
        raise TypeError(
            f"verify supports only Codecs(refresh='lossless'), got {value!r}: the unsharded run uses "
            "exact weights and gradients, and decoded ones would differ by their rounding"
        )
    if name == "mp_policy" and callable(value):
        raise TypeError("verify does not support a callable mp_policy. Pass one mp_policy for the full model")
    if name in PER_MODEL and not (value is None or callable(value) or value == "unsupported"):
        raise TypeError(f"verify builds several models, so {name} must be a function of the model, not {value!r}")
    names = inspect.signature(shard_model).parameters.keys() - {"model"}
    if name not in names:
        raise TypeError(
            f"verify and shard_model have no setting {name!r}. Use one of {sorted(names - _REFUSED.keys())}"
        )


def _check_scheme(scheme: Scheme, settings: Mapping[str, Any], *, has_optimizer: bool) -> None:
    if callable(scheme):
        if not has_optimizer:
            raise TypeError(
                "scheme is a function that builds its own optimizer, so verify needs an optimizer for the unsharded "
                "run. Pass optimizer_fn, a function (parameters) -> optimizer, or --optimizer on the command line"
            )
    elif scheme not in SCHEMES:
        raise ValueError(f"scheme must be a function (model) -> (model, optimizer) or one of {SCHEMES}, got {scheme!r}")
    if scheme == "layerzero":
        return
    supported = {"units", "mp_policy"} if scheme in ("fsdp2", "hsdp") else set[str]()
    if odd := sorted(settings.keys() - supported):
        raise TypeError(f"verify does not support {odd[0]} with {scheme_name(scheme)}. Leave it out")
    policy = settings.get("mp_policy", MixedPrecisionPolicy())
    if type(policy) is not MixedPrecisionPolicy:
        raise TypeError(
            f"verify does not support mp_policy={policy!r} with {scheme_name(scheme)}. Pass a "
            "torch.distributed.fsdp.MixedPrecisionPolicy"
        )


def _sizes_to_verify(scheme: Scheme, zero3_sizes: Sequence[int] | None, world: int, reshards: Any) -> list[int | None]:
    if callable(scheme):
        if zero3_sizes is not None:
            raise TypeError("zero3_sizes has no effect if scheme is a function. Leave it out")
        return [None]
    kept = reshards if type(reshards) is int else 1  # not a bool
    possible = [size for size in range(1, world + 1) if world % size == 0 and (size == 1 or size % kept == 0)]
    if possible == [1] and kept > 1:
        raise ValueError(
            f"reshard_after_forward={kept} does not divide the {world} ranks of verify. Use a multiple of {kept} ranks"
        )
    possible = {"fsdp2": [world], "hsdp": possible[:-1] or possible, "ddp": [1]}.get(scheme, possible)
    sizes = possible if zero3_sizes is None else list(zero3_sizes)
    if not sizes or not set(sizes) <= set(possible):
        multiple = f" and be 1 or a multiple of reshard_after_forward={kept}" * (kept > 1)
        raise ValueError(
            f"zero3_sizes={sizes} is not possible with {scheme}: sizes must divide the {world} ranks{multiple}. "
            f"Use values from {possible}"
        )
    return [*sizes]


def _verify(rank: int, arguments: Mapping[str, Any], *, device_type: str = "cpu") -> VerifyReport:
    """Run the comparison on this rank.

    All ranks must call this function, and the default process group must be initialized.
    """
    fields = dict(arguments)
    sizes, tolerance, settings = fields.pop("zero3_sizes"), fields.pop("tolerance"), fields.pop("settings")
    scheme: Scheme = fields.pop("scheme")
    progress = Progress("verify, one process", shown=rank == 0)
    task = TrainingTask(**fields, progress=progress)
    world = dist.get_world_size()
    numbers = {"steps": task.steps, "micro_batches": task.micro_batches, "seed": task.seed}
    agreed_values = {**numbers, "scheme": scheme_name(scheme), "zero3_sizes": sizes, "tolerance": tolerance}
    require_equal("verify", agreed_values, ranks=range(world))
    device = compute_device(device_type)
    with preserved_rng(device), progress:
        with agreed("verify, unsharded run", {}, ranks=range(world)):
            plain = train_plain(task, world_size=world, device=device, rank=rank, fp32_masters=scheme == "layerzero")
        notes = _notes(plain, world)
        rows: list[ParameterDifference] = []
        for trial in _create_trials(sizes, tolerance, settings, plain.dtypes):
            rows += _run_trial(task, scheme, trial, plain, rank=rank, device_type=device_type)
    rows.sort(key=lambda row: (-row.relative_to_tolerance, row.name, row.zero3_size))
    shared: list[Any] = [VerifyReport(tuple(rows), world, task.steps, task.micro_batches, notes, scheme_name(scheme))]
    dist.broadcast_object_list(shared, src=0)
    report: VerifyReport = shared[0]
    return report


def _run_trial(
    task: TrainingTask, scheme: Scheme, trial: _Trial, plain: PlainRun, *, rank: int, device_type: str
) -> list[ParameterDifference]:
    """Train with `scheme` once. Return one row per parameter on rank 0, and an empty list on other ranks."""
    size = "" if trial.zero3_size is None else f" with zero3_size={trial.zero3_size}"
    task.progress.work = f"verify, {scheme_name(scheme)}{size}"
    comparison = Comparison(
        plain.start, zero3_size=trial.zero3_size, precision=trial.precision, tolerance=trial.tolerance
    )
    records = train_distributed(
        task, scheme, zero3_size=trial.zero3_size, rank=rank, device_type=device_type, settings=trial.settings
    )
    try:
        for step, snapshot in enumerate(records):
            if rank == 0:
                comparison.add(step, plain.records[step], snapshot)
    except Exception as error:
        subject = f"the unsharded run works, but {scheme_name(scheme)}{size} in {trial.precision} fails"
        raise RuntimeError(f"{subject}: {type(error).__name__}: {error}") from error
    return comparison.rows()


def _create_trials(
    sizes: Sequence[int | None], tolerance: float | None, settings: Mapping[str, Any], dtypes: set[torch.dtype]
) -> list[_Trial]:
    """Return the distributed runs for each of `sizes`.

    If `settings` request a lower precision than the model has, there are two runs per size. The first run uses the
    model's precision.
    """
    policy = PrecisionPolicy.of(settings.get("mp_policy"))
    as_built = _coarsest(dtypes)
    lowest = _coarsest([*dtypes, *(each for each in vars(policy).values() if isinstance(each, torch.dtype))])
    runs: list[tuple[torch.dtype, float, Mapping[str, Any]]]
    runs = [(lowest, tolerance or _default_tolerance(lowest), settings)]
    if _epsilon(lowest) > _epsilon(as_built):
        exact = {**settings, "mp_policy": PrecisionPolicy(fp32_accumulation=policy.fp32_accumulation)}
        exact.pop("codecs", None)
        runs.insert(0, (as_built, _default_tolerance(as_built), exact))
    names = {dtype: str(dtype).removeprefix("torch.") for dtype, *_ in runs}
    return [_Trial(size, names[dtype], largest, given) for size in sizes for dtype, largest, given in runs]


def _default_tolerance(dtype: torch.dtype) -> float:
    is_low_precision = _epsilon(dtype) > _epsilon(torch.float32)
    return math.sqrt(_epsilon(dtype)) * (4.0 if is_low_precision else 1.0)


def _coarsest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    return max((dtype for dtype in dtypes if dtype.is_floating_point), key=_epsilon, default=torch.float32)


def _epsilon(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


def _notes(plain: PlainRun, world: int) -> tuple[str, ...]:
    """Return remarks about the unsharded run. All ranks must call this function.

    Only rank 0's result includes the remark about in-place changes of weights.
    """
    notes = []
    if plain.edited:
        notes.append(
            f"in the unsharded run, a forward or backward changes {', '.join(sorted(plain.edited))} in place. A "
            "sharded model loses such changes. Change weights between steps, inside layerzero.unsharded"
        )
    losses_of_ranks: list[list[float]] = [[] for _ in range(world)]
    dist.all_gather_object(losses_of_ranks, plain.losses)
    limit = math.sqrt(_epsilon(_coarsest(plain.dtypes)))
    is_close = functools.partial(math.isclose, rel_tol=limit, abs_tol=1e-12)
    odd = [rank for rank, losses in enumerate(losses_of_ranks) if not all(map(is_close, losses, losses_of_ranks[0]))]
    if odd:
        ranks = ", ".join(map(str, odd))
        notes.append(
            f"in the unsharded run, rank{'s' * (len(odd) > 1)} {ranks} and rank 0 computed different losses from the "
            "same batches and random numbers. The model, the loss or the batches depend on the rank, or on chance"
        )
    return tuple(notes)
