"""Train a model for a few steps, in one process and distributed, from the same initial weights on the same batches.

[Note: Unsharded run]
The unsharded run is data-parallel training in one process. It has one model per rank, which the user's function builds
from the same seed. Batch-norm statistics, counters and other module state therefore change as they do on that rank. All
models share the storage of the weights. Each model processes the batches of its rank. The gradients are then averaged,
and one optimizer updates the weights. layerzero uses no collectives in the unsharded run. Every rank executes the full
unsharded run, so that modules that communicate with other ranks still work.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from layerzero.extend import Progress, agreed, require_equal, strip_wrapper_names, torch_compat
from layerzero.verification.comparison import StepRecord
from layerzero.verification.schemes import Scheme, accumulating, set_up


@dataclass(frozen=True)
class TrainingTask:
    """Training that all runs perform. The fields are arguments of :func:`layerzero.verify`."""

    model_fn: Callable[[], nn.Module]
    batch_fn: Callable[[int, int], Any]
    loss_fn: Callable[[nn.Module, Any], Tensor]
    optimizer_fn: Callable[[Iterable[nn.Parameter]], Optimizer]
    steps: int
    micro_batches: int
    seed: int
    progress: Progress = field(default_factory=lambda: Progress("", shown=False))

    def build_model(self) -> nn.Module:
        """Build the user's model with the random seeds reset, so that all models start with equal weights."""
        _seed(self.seed)
        model = self.model_fn()
        if not isinstance(model, nn.Module):
            raise TypeError(f"model_fn must return a torch.nn.Module, got {type(model).__name__}")
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.is_meta:
                raise ValueError(
                    f"{name!r} of the model is on the meta device. Return initialized weights from model_fn"
                )
        return model

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        optimizer = self.optimizer_fn(parameters)
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer_fn must return a torch.optim.Optimizer, got {type(optimizer).__name__}")
        return optimizer

    def batch(self, index: int, rank: int) -> Any:
        """Seed the random number generators from `index` and `rank`, and return the user's batch."""
        _seed(self.seed, 1 + index, rank, 0)
        return self.batch_fn(index, rank)

    def forward_backward(self, model: nn.Module, step: int, micro_batch: int, rank: int, device: torch.device) -> float:
        """Run the forward and backward passes of one micro-batch. Its step, index and rank determine the random seed.

        Returns:
            The loss. The gradients are those of the loss divided by the number of micro-batches.
        """
        self.progress.update(f"step {step + 1} of {self.steps}")
        index = step * self.micro_batches + micro_batch
        batch = torch_compat.tree_map_only(Tensor, lambda tensor: tensor.to(device), self.batch(index, rank))
        _seed(self.seed, 1 + index, rank, 1)
        loss = self.loss_fn(model, batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise TypeError(f"the loss must be a tensor of one element, got {_describe_value(loss)}. Check loss_fn")
        if not loss.requires_grad:
            raise ValueError("the loss has no gradient, because it depends on no trainable parameter. Check loss_fn")
        (loss / self.micro_batches).backward()
        return loss.item()


def default_loss(model: nn.Module, batch: Any) -> Tensor:
    """Run the model and return its output, or the ``loss`` in its output. This is the default loss function."""
    try:
        if isinstance(batch, Mapping):
            output = model(**batch)
        else:
            output = model(*batch) if isinstance(batch, tuple) else model(batch)
    except TypeError as error:
        error.add_note(
            "Without a loss function, verify passes the batch to the model: a dict as keyword arguments, a tuple as "
            "positional arguments. If the model expects other arguments, pass loss_fn, or --loss on the command line"
        )
        raise
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise TypeError(
            f"the model returned {_describe_value(output)}, which is not a scalar loss and has none as .loss or "
            "['loss']. Pass a loss_fn(model, batch) that returns the loss"
        )
    return loss


class PlainRun:
    """Result of the run without layerzero: initial weights, losses, dtypes, and (on rank 0) a record of each step."""

    def __init__(self) -> None:
        self.start: dict[str, Tensor] = {}
        self.records: list[StepRecord] = []
        self.losses: list[float] = []
        self.edited: set[str] = set()  # weights that code other than the optimizer has changed; known on rank 0
        self.dtypes: set[torch.dtype] = set()  # dtypes of the parameters


def train_plain(
    task: TrainingTask, *, world_size: int, device: torch.device, rank: int, fp32_masters: bool
) -> PlainRun:
    """Train without layerzero. See [Note: Unsharded run].

    Args:
        task: description of the training.
        world_size: number of ranks whose batches are used.
        device: device of the models.
        rank: index of this rank. The buffers of its model are recorded together with the weights. Only rank 0 records
            each step.
        fp32_masters: True if the optimizer updates trainable weights in at least fp32 precision, as layerzero's does.
            False if it updates the parameters themselves.
    """
    _require_repeatable_batches(task)
    models = _models_of_ranks(task, world_size, device)
    parameters = _named_parameters(models[0])
    masters = {name: _create_master(p, fp32_masters=fp32_masters) for name, p in parameters.items()}
    optimizer = task.optimizer(masters.values())
    run = PlainRun()
    run.start = _weights(masters, models[rank])
    run.dtypes = {parameter.dtype for parameter in parameters.values()}
    for step in range(task.steps):
        losses, gradient_sums = _sum_gradients(task, step, models, device)
        run.losses += losses
        if rank == 0:
            previous = run.records[-1].weights if run.records else run.start
            run.edited |= {name for name, p in parameters.items() if _has_changed(p, previous[name])}
        for name, master in masters.items():
            gradient = gradient_sums.get(name)
            master.grad = None if gradient is None else gradient.div_(world_size).to(master.dtype)
            if not torch.equal(parameters[name], master.to(parameters[name].dtype)):
                master.data.copy_(parameters[name])  # plain training keeps changes that a forward pass made to weights
        gradients = {name: None if m.grad is None else m.grad.cpu().clone() for name, m in masters.items()}
        optimizer.step()
        optimizer.zero_grad()
        for name, parameter in parameters.items():
            parameter.data.copy_(masters[name])
        if rank == 0:
            run.records.append(StepRecord(gradients, _weights(masters, models[rank])))
    return run


def _sum_gradients(
    task: TrainingTask, step: int, models: Sequence[nn.Module], device: torch.device
) -> tuple[list[float], dict[str, Tensor]]:
    """Run one step of the unsharded run without its update. Return the losses, and the sums of gradients by name."""
    losses: list[float] = []
    gradient_sums: dict[str, Tensor] = {}
    for virtual_rank, model in enumerate(models):
        for micro_batch in range(task.micro_batches):
            losses.append(task.forward_backward(model, step, micro_batch, virtual_rank, device))
            _add_gradients(gradient_sums, model)
    if not all(map(math.isfinite, losses)):
        raise ValueError(
            f"the loss of the unsharded run is not finite in step {step}, so the runs cannot be compared. Check the "
            "batches, or pass an optimizer_fn with a smaller learning rate"
        )
    return losses, gradient_sums


def train_distributed(
    task: TrainingTask,
    scheme: Scheme,
    *,
    zero3_size: int | None,
    rank: int,
    device_type: str,
    settings: Mapping[str, Any],
) -> Iterator[StepRecord]:
    """Train with a scheme on this rank's batches and yield a record of each step.

    On ranks other than 0, the tensors in the records are empty. All ranks must exhaust the iterator together.
    """
    ranks = range(dist.get_world_size())
    kinds: dict[str, object] = {}
    with agreed("verify, set-up of the model", kinds, ranks=ranks):
        named = task.build_model()  # wrappers have other names of parameters
        model, optimizer = set_up(
            scheme, named, task.optimizer, zero3_size=zero3_size, device_type=device_type, settings=settings
        )
        kinds |= {name: type(parameter).__name__ for name, parameter in _named_parameters(named).items()}
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    for step in range(task.steps):
        for micro_batch in range(task.micro_batches):
            last = micro_batch + 1 == task.micro_batches
            with nullcontext() if last else accumulating(model):
                task.forward_backward(model, step, micro_batch, rank, device)
        if scheme == "layerzero":
            _average_ignored(named)
        parameters = _named_parameters(named)
        kinds = {name: type(parameter.grad).__name__ for name, parameter in parameters.items()}
        require_equal(f"verify, gradients of step {step}", kinds, ranks=ranks)  # gathered below
        gradients = {name: None if p.grad is None else _full_on_rank_0(p.grad, rank) for name, p in parameters.items()}
        optimizer.step()
        optimizer.zero_grad()
        yield StepRecord(
            gradients, {name: _full_on_rank_0(tensor, rank) for name, tensor in _params_and_buffers(named)}
        )


def _require_repeatable_batches(task: TrainingTask) -> None:
    first, second = (list(filter(torch.is_tensor, torch_compat.tree_leaves(task.batch(0, 0)))) for _ in range(2))
    if len(first) != len(second) or not all(torch.equal(a, b) for a, b in zip(first, second, strict=True)):
        raise ValueError(
            "two calls to batch_fn(0, 0) returned different batches, but equal arguments must give equal batches. Use "
            "torch's random numbers, which are seeded before each call, or select by index and rank"
        )


def _models_of_ranks(task: TrainingTask, world_size: int, device: torch.device) -> list[nn.Module]:
    models: list[nn.Module] = []
    for _ in range(world_size):
        model = task.build_model()
        if any(model is other for other in models):
            raise ValueError("model_fn returned the same object twice. Build a new model in each call")
        models.append(model.to(device))
        first = dict(models[0].named_parameters())
        parameters = dict(model.named_parameters())
        if {n: p.shape for n, p in parameters.items()} != {n: p.shape for n, p in first.items()}:
            raise ValueError(
                "model_fn was called twice with the same seed, but the names or shapes of the parameters differ. Seed "
                "all random number generators that it uses"
            )
        if model is models[0]:
            continue
        for name, parameter in parameters.items():
            # Replace the storage, not the object, because a module may have other references to its parameters.
            parameter.data = first[name].data
        for first_buffer, buffer in zip(models[0].buffers(), model.buffers(), strict=True):
            buffer.copy_(first_buffer)
    return models


def _create_master(parameter: nn.Parameter, *, fp32_masters: bool) -> nn.Parameter:
    """Return the parameter that the optimizer of the unsharded run updates.

    If the dtype does not change, the master shares the storage of `parameter`.
    """
    promotes = fp32_masters and parameter.requires_grad
    dtype = torch.promote_types(parameter.dtype, torch.float32) if promotes else parameter.dtype
    return nn.Parameter(parameter.data.to(dtype), requires_grad=parameter.requires_grad)


def _add_gradients(gradient_sums: dict[str, Tensor], model: nn.Module) -> None:
    for name, parameter in _named_parameters(model).items():
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            continue
        gradient = gradient.to_dense() if gradient.layout is not torch.strided else gradient
        if name in gradient_sums:
            gradient_sums[name].add_(gradient)
        else:
            gradient_sums[name] = gradient.to(torch.promote_types(gradient.dtype, torch.float32), copy=True)


def _has_changed(parameter: Tensor, previous: Tensor) -> bool:
    """Return whether a parameter differs from `previous`. The two are compared in the parameter's dtype."""
    return not torch.equal(parameter.detach().cpu(), previous.to(parameter.dtype))


def _named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters by name, without the parts of the names that wrappers add."""
    return {strip_wrapper_names(name): parameter for name, parameter in model.named_parameters()}


def _params_and_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the tensor of each parameter and each floating-point buffer.

    Integer buffers are omitted, because they are counters.
    """
    yield from _named_parameters(model).items()
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point():
            yield strip_wrapper_names(name), buffer


def _weights(masters: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    return {name: masters.get(name, value).detach().cpu().clone() for name, value in _params_and_buffers(model)}


def _average_ignored(model: nn.Module) -> None:
    """Average the gradients of ignored parameters over all ranks, as a user's training loop must also do."""
    for parameter in model.parameters():
        if isinstance(parameter, DTensor) or not parameter.requires_grad:
            continue
        used = torch.tensor([parameter.grad is not None], dtype=torch.float32, device=parameter.device)
        dist.all_reduce(used)
        if used.item():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            dist.all_reduce(gradient)
            parameter.grad = gradient.div_(dist.get_world_size())


def _full_on_rank_0(tensor: Tensor, rank: int) -> Tensor:
    """Return the full tensor in host memory on rank 0, and an empty tensor on other ranks.

    All ranks must call this function.
    """
    full = tensor.detach()
    if isinstance(full, DTensor):
        full = full.full_tensor()
    return full.cpu().clone() if rank == 0 else full.new_empty(0)


def _seed(*numbers: int) -> None:
    """Seed the generators of torch and Python from integers. Equal integers give equal states on every rank."""
    mixed = 0
    for number in numbers:
        mixed = (mixed * 1_000_003 + number + 0x9E3779B9) % 2**63
    torch.manual_seed(mixed)
    random.seed(mixed)


@contextmanager
def preserved_rng(device: torch.device) -> Iterator[None]:
    """Context manager that restores the random number generators of Python and torch on exit."""
    state = random.getstate()
    devices = [] if device.type == "cpu" else [device]
    try:
        with torch.random.fork_rng(devices, device_type=device.type):
            yield
    finally:
        random.setstate(state)


def _describe_value(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    return f"a {type(value).__name__}"
