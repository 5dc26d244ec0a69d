"""Support parameters whose tensor subclass has an all-gather extension, as defined by FSDP2.

[Note: All-gather extensions]
A class may define two methods. ``fsdp_pre_all_gather`` returns the tensors that a gather sends instead of this rank's
rows. ``fsdp_post_all_gather`` builds the gathered parameter from the received tensors. torchao's float8 training
weights have such a class: rows stay sharded in fp32, gathers send float8, and modules compute with a float8 tensor.

The class must store its values in one plain inner tensor with the shape and dtype of the parameter. The rows of the
inner tensor are the masters. Masters are plain tensors, so optimizers and checkpoints do not depend on the class. The
ZeRO-3 shard has the parameter's dtype for any ``param_dtype``, because the class itself reduces the precision.

Each such parameter has a separate handle. All ZeRO-3 shards have the same number of rows, and rows of zeros pad the
last shards. Therefore the inputs have the same shapes on all ranks. This property is checked once, before the first
gather. If an input has as many rows as the shard, the padding is removed from the gathered input before the class
receives it.

The gathered parameter is built once, at the first gather. Autograd saves the parameter and views of it. Later gathers
therefore write to the same memory and pass the parameter as ``out``. Between passes, the storages of the received
tensors and of the inner tensors that the class has returned are empty.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch.autograd.graph import Node, increment_version
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from layerzero.extend import (
    Collective,
    ExtendedGather,
    FullBufferPool,
    GatheredBytes,
    GatherExtension,
    MeshInfo,
    PendingCollective,
    agreed,
    all_gather,
    torch_compat,
)

_PRE, _POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"


def reason_not_extensible(tensor: Tensor) -> str | None:
    """Return why the all-gather extension of a parameter's class is not supported, or None if it is supported."""
    kind = type(tensor).__name__
    if not (hasattr(tensor, _PRE) and hasattr(tensor, _POST)):
        return f"a {kind}, which has only one of {_PRE} and {_POST}"
    if not (hasattr(tensor, "__tensor_flatten__") and hasattr(tensor, "__tensor_unflatten__")):
        return f"a {kind}, whose all-gather extension also needs __tensor_flatten__ and __tensor_unflatten__"
    if (parameters := _num_arguments(tensor)) not in (1, 5):
        return f"a {kind}, whose {_PRE} has {parameters} arguments instead of (mesh) or FSDP2's five"
    if tensor.ndim == 0 or tensor.numel() == 0:
        return f"a {kind} with an all-gather extension and no rows to shard (shape {list(tensor.shape)})"
    names = _inner_names(tensor)
    inner = getattr(tensor, names[0])
    if len(names) > 1 or (inner.shape, inner.dtype) != (tensor.shape, tensor.dtype):
        parts_text = ", ".join(f"{n} {list(getattr(tensor, n).shape)} {getattr(tensor, n).dtype}" for n in names)
        return (
            f"a {kind}, whose values are in {parts_text}, but an all-gather extension needs one inner tensor with the "
            "shape and dtype of the parameter"
        )
    if type(inner) not in (Tensor, nn.Parameter):
        return f"a {kind} whose inner tensor is a {type(inner).__name__}, a tensor subclass"
    if not inner.is_contiguous():
        return f"a {kind} with an all-gather extension that is not contiguous (strides {list(inner.stride())})"
    return None


def inner_tensor(tensor: Tensor) -> Tensor:
    """Return the inner tensor that has the values of `tensor`.

    :func:`reason_not_extensible` must return None for `tensor`.
    """
    inner: Tensor = getattr(tensor, _inner_names(tensor)[0])
    return inner


def _inner_names(tensor: Any) -> list[str]:
    names: list[str] = list(tensor.__tensor_flatten__()[0])
    return names


def _num_arguments(tensor: Any) -> int:
    """Return the number of arguments of ``fsdp_pre_all_gather``. Supported classes accept 1 (the mesh) or 5."""
    return len(inspect.signature(tensor.fsdp_pre_all_gather).parameters)


def split_parameter(
    parameter: nn.Parameter, module: nn.Module, policy: MixedPrecisionPolicy
) -> tuple[nn.Parameter, GatherExtension]:
    """Return a plain parameter that uses the memory of `parameter`, and the constructor of its gathers."""
    subclass: Any = parameter
    (inner,), context = subclass.__tensor_flatten__()
    values = inner_tensor(parameter)
    plain: Any = nn.Parameter(values.detach(), requires_grad=parameter.requires_grad)
    extension = _Extension(type(parameter), inner, context, weakref.ref(module), policy)
    own_attributes = vars(extension.wrap_rows(plain.detach())).keys()
    for name, value in vars(parameter).items():  # attributes that the user has set on the parameter
        if name not in own_attributes:
            setattr(plain, name, value)
    plain._backward_hooks = parameter._backward_hooks
    if (hooks := getattr(parameter, "_post_accumulate_grad_hooks", None)) is not None:
        plain._post_accumulate_grad_hooks = hooks
    values.data = torch.empty(0, dtype=values.dtype, device=values.device)
    return plain, partial(_ExtendedGather, extension)


@dataclass(frozen=True, eq=False)
class _Extension:
    """Tensor subclass of one parameter, and the arguments for its all-gather extension."""

    kind: type[Tensor]
    inner: str  # name of the attribute that refers to the inner tensor
    context: object  # metadata from __tensor_flatten__
    module: weakref.ref[nn.Module]
    policy: MixedPrecisionPolicy

    def wrap_rows(self, rows: Tensor) -> Any:
        """Return a tensor of the parameter's class that wraps `rows` without a copy."""
        kind: Any = self.kind
        return kind.__tensor_unflatten__({self.inner: rows}, self.context, rows.shape, rows.stride())


class _ExtendedGather(ExtendedGather):
    """Gathers of one parameter through the extension of its class; see [Note: All-gather extensions].

    Args:
        name: name of the parameter.
        shape: full shape of the parameter.
        shard: 1-D [G / S], this rank's ZeRO-3 shard. It has full rows, with rows of zeros after the parameter's last
            row.

    Raises:
        TypeError, ValueError: the class violates the protocol, or ranks have inputs with different shapes.
    """

    def __init__(
        self,
        extension: _Extension,
        name: str,
        shape: tuple[int, ...],
        shard: Tensor,
        mesh_info: MeshInfo,
        storages: FullBufferPool,
        *,
        label: str,
    ) -> None:
        self._extension = extension
        self._name = name
        self._shape = torch.Size(shape)
        self._strides = tuple(torch.empty(shape, device="meta").stride())
        self._comm = mesh_info.zero3_gather_comm
        self._mesh: DeviceMesh = mesh_info.mesh["zero3"]
        self._storages = storages
        self._local = extension.wrap_rows(shard.view(-1, *shape[1:]))
        self._metadata: Any = None
        self._sent: list[Tensor] = []
        self._works: list[PendingCollective] = []  # of the gather in flight
        self._param_dtype = extension.policy.param_dtype or shard.dtype

        fields: dict[str, object] = {}
        with _without_autograd():
            with agreed(f"{_PRE} of parameter {name!r}", fields, ranks=mesh_info.ranks):
                inputs, self._metadata = self._gather_inputs()
                self._kinds = [(tuple(each.shape), each.dtype) for each in inputs]
                fields["inputs"] = [f"{list(size)} {dtype}" for size, dtype in self._kinds]
            size = self._comm.size
            self._buffers = [  # for each input: 1-D uint8 buffer for the parts from all ranks
                torch.empty(size * each.nbytes, dtype=torch.uint8, device=each.device) for each in inputs
            ]
            self._outputs = tuple(  # aliases: see [Note: Version counters] in engine/weight_storage.py
                self._without_padding(buffer.data.view(dtype).view(size * part[0], *part[1:]), part[0])
                for buffer, (part, dtype) in zip(self._buffers, self._kinds, strict=True)
            )
            self._launch(inputs, label, Collective.UNSHARD)
            self.wait()
            self.parameter, self._made = self._build_parameter()
        self._received_bytes = tuple(buffer.nbytes for buffer in self._buffers)
        self._made_bytes = tuple(storage.nbytes() for storage in self._made)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Size in bytes of each storage that is allocated while the unit computes."""
        return (*self._received_bytes, *self._made_bytes)

    @property
    def accumulate_grad_node(self) -> Node:
        self.parameter.requires_grad_(True)
        with torch.enable_grad():
            output: Tensor = _Touch.apply(self.parameter)  # type: ignore[no-untyped-call]
        assert output.grad_fn is not None
        node = output.grad_fn.next_functions[0][0]
        assert node is not None
        return node

    @property
    def extension_memory(self) -> GatheredBytes:
        return GatheredBytes(self._received_bytes, self._made_bytes)

    @property
    def nbytes(self) -> int:
        """Number of bytes currently allocated."""
        return sum(storage.nbytes() for storage in self._all_storages())

    @property
    def version(self) -> int:
        """Version counter of the gathered parameter. Writes by the user increment it."""
        return self.parameter._version

    def bump_version(self) -> None:
        """Increment the version counter, so that autograd rejects graphs that have saved the gathered parameter."""
        increment_version(self.parameter)

    def gather(self, *, name: str) -> _ExtendedGather:
        """Launch the gather of the inputs that ``fsdp_pre_all_gather`` returns.

        That method may call collectives on the mesh of the ZeRO-3 group.
        """
        with _without_autograd():
            inputs, self._metadata = self._gather_inputs()
            kinds = [(tuple(each.shape), each.dtype) for each in inputs]
            if kinds != self._kinds:
                raise RuntimeError(
                    f"{_PRE} of parameter {self._name!r} returned {kinds}, but it returned {self._kinds} at the first "
                    "gather, whose buffers are reused. Return inputs of the same shapes and dtypes in every gather"
                )
            for buffer, nbytes in zip(self._buffers, self._received_bytes, strict=True):
                self._storages.allocate(buffer.untyped_storage(), nbytes)
            self._launch(inputs, name, Collective.GATHER)
        return self

    def wait(self) -> None:
        """Wait for the gather in flight, and release its inputs."""
        for work in self._works:
            work.wait()
        self._works, self._sent = [], []

    def fill(self, storages: FullBufferPool) -> None:
        """Fill the gathered parameter by passing the received tensors to the class's ``fsdp_post_all_gather``."""
        for storage, nbytes in zip(self._made, self._made_bytes, strict=True):
            storages.allocate(storage, nbytes)
        with _without_autograd(), torch_compat.preserve_version_counter(self.parameter):
            self._local.fsdp_post_all_gather(self._outputs, self._metadata, self._param_dtype, out=self.parameter)

    def free(self, storages: FullBufferPool) -> None:
        """Free the memory of the received tensors and the gathered parameter. The next gather reuses the storages."""
        for storage in self._all_storages():
            if storage.nbytes():
                storages.free(storage)

    def _all_storages(self) -> list[UntypedStorage]:
        return [*(buffer.untyped_storage() for buffer in self._buffers), *self._made]

    def _without_padding(self, output: Tensor, rows_per_rank: int) -> Tensor:
        """Return a gathered input without its padding, if each rank has sent as many rows as its shard has."""
        return output[: self._shape[0]] if rows_per_rank == self._local.shape[0] else output

    def _gather_inputs(self) -> tuple[Sequence[Tensor], Any]:
        extension = self._extension
        arguments: tuple[Any, ...] = (self._mesh,)
        if _num_arguments(self._local) == 5:
            arguments = (self._mesh, self._shape, self._strides, extension.module(), extension.policy)
        returned = self._local.fsdp_pre_all_gather(*arguments)
        if not isinstance(returned, tuple) or len(returned) != 2:
            raise TypeError(
                f"{_PRE} of parameter {self._name!r} returned {returned!r}. Return (inputs of the all-gather, metadata)"
            )
        inputs, metadata = returned
        unsupported = [each for each in inputs if type(each) not in (Tensor, nn.Parameter) or each.ndim == 0]
        if unsupported or not inputs:
            returned_text = (
                "nothing" if not inputs else f"{type(unsupported[0]).__name__} of shape {list(unsupported[0].shape)}"
            )
            raise TypeError(
                f"{_PRE} of parameter {self._name!r} returned {returned_text} as an input of the all-gather. Return "
                "plain tensors with at least one dim"
            )
        return inputs, metadata

    def _launch(self, inputs: Sequence[Tensor], name: str, collective: Collective) -> None:
        self._sent = [each.detach().contiguous().view(-1).view(torch.uint8) for each in inputs]
        for buffer, sent in zip(self._buffers, self._sent, strict=True):
            if self._comm.size == 1:
                buffer.copy_(sent)
            elif sent.numel():
                self._works.append(all_gather(self._comm, collective, buffer, sent, name=name))

    def _build_parameter(self) -> tuple[nn.Parameter, list[UntypedStorage]]:
        """Build the gathered parameter. Return the parameter and the storages that the class has allocated for it."""
        returned = self._local.fsdp_post_all_gather(self._outputs, self._metadata, self._param_dtype)
        if not isinstance(returned, tuple) or len(returned) != 2 or not isinstance(returned[0], Tensor):
            raise TypeError(
                f"{_POST} of parameter {self._name!r} returned a {type(returned).__name__}. Return (gathered tensor, "
                "its inner tensors)"
            )
        gathered, inner = returned
        if not gathered.is_floating_point():
            raise TypeError(
                f"{_POST} of parameter {self._name!r} returned a tensor of {gathered.dtype}, but modules need a "
                "floating-point tensor. Return a tensor of a floating-point dtype, which may wrap quantized data"
            )
        if gathered.shape != self._shape:  # as in FSDP2, for classes that pad their inputs themselves
            if gathered.numel() < prod(self._shape):
                raise ValueError(
                    f"{_POST} of parameter {self._name!r} returned a tensor of shape {list(gathered.shape)}, which is "
                    f"smaller than the parameter. Return a tensor of shape {list(self._shape)}"
                )
            gathered = torch.as_strided(gathered, self._shape, self._strides, 0)
        new_storages = {storage._cdata: storage for each in inner for storage in (each.untyped_storage(),)}
        for buffer in self._buffers:
            new_storages.pop(buffer.untyped_storage()._cdata, None)
        return nn.Parameter(gathered, requires_grad=False), list(new_storages.values())


@contextmanager
def _without_autograd() -> Iterator[None]:
    """Disable autograd and inference mode, so that gathered tensors can be used with and without gradients."""
    with torch.inference_mode(False), torch.no_grad():
        yield


class _Touch(torch.autograd.Function):
    """Function that adds a tensor of any class to an autograd graph without calling an operator on the tensor."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        return None
