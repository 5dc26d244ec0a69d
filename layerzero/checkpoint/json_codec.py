"""Encode nested values as JSON and tensors, and decode them. In contrast to unpickling, decoding executes no code.

Values that JSON cannot represent, such as tensors, tuples and infinities, become objects with a key that starts with
``$``:

    {"$tensor": KEY}                    a full tensor, stored under KEY; {"$ndarray": KEY} for a NumPy array
    {"$sharded": KEY, "like": NAME}     a sharded tensor with the sharding of the parameter NAME
    {"$per_rank": [VALUE, ...]}         one value for each rank that saved the checkpoint
    {"$joint": INDEX, "common": VALUE}  entries of all ranks that are not merged yet; see MergeableValue
    {"$tuple": [...]}, {"$dict": [[KEY, VALUE], ...]}, {"$ordered": ...}, {"$counter": ...}, {"$bytes": BASE64},
    {"$float": "inf"}, {"$dtype": "bfloat16"}

[Note: Tensor subclasses]
A tensor subclass without its own memory, such as a quantized weight, is stored as its plain inner tensors, which the
method ``__tensor_flatten__`` of its class returns with the remaining metadata. A load constructs no subclass tensors.
The model already has tensors with the same classes and settings, and the load fills the plain tensors inside them.
Therefore no class is looked up by a name from a file.
"""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from layerzero.checkpoint.publish import contiguous_on_cpu, tensor_bytes
from layerzero.extend import LocalShard, torch_compat

_DEPTH = 100  # maximum nesting depth of a value, so that recursive functions do not overflow Python's stack

DTYPES = {  # names in the safetensors format
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL",
    torch.complex64: "C64",
}  # fmt: skip
DTYPE_NAMED = {name: dtype for dtype, name in DTYPES.items()}

_MAPPING_TAGS: dict[type, str] = {dict: "$dict", OrderedDict: "$ordered", Counter: "$counter"}
_MAPPINGS = {tag: kind for kind, tag in _MAPPING_TAGS.items()}
_COMPARED = ("extra", "optimizer.shared_state")  # paths of full tensors that must be the same on all ranks
_DEVICE = re.compile(r"device\([^()]*\)")
_NOT_IN_WORDS = (" at 0x", "tensor(", "array(", "...")  # parts of the default repr of an object, or of a truncated repr


@dataclass(frozen=True)
class PerRank:
    """A value in ``extra`` that differs between ranks; created by :func:`layerzero.checkpoint.per_rank`."""

    value: object


@dataclass(frozen=True)
class MergeableValue:
    """A dict or list that contains entries common to all ranks, and this rank's own entries.

    The checkpoint contains the common entries and the own entries of all ranks.
    """

    common: dict[str, Any] | list[Any]
    own: dict[str, Any] | list[Any]


@dataclass(frozen=True)
class StoredTensor:
    """One full tensor of a checkpoint and the chunks that it was split into.

    Attributes:
        chunks: (file, offsets, sizes) of every chunk.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]

    @property
    def nbytes(self) -> int:
        """Size of the full tensor in bytes."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()


@dataclass(frozen=True)
class StoredRef:
    """Reference to a stored tensor, which stands for the tensor in decoded values until :func:`fill_refs` replaces it.

    Attributes:
        key: key of the stored tensor.
        like: name of the parameter whose sharding the tensor has; None for a full tensor.
        is_array: whether the value is a NumPy array.
    """

    key: str
    shape: torch.Size
    dtype: torch.dtype
    like: str | None = None
    is_array: bool = False


def refs_in(values: Any) -> list[StoredRef]:
    """Return the references to stored tensors in decoded values."""
    return [leaf for leaf in torch_compat.tree_leaves(values) if isinstance(leaf, StoredRef)]


def fill_refs(values: Any, tensor_of: Callable[[str], Tensor | None]) -> Any:
    """Return decoded `values` with each reference replaced by the tensor that `tensor_of` returns for its key."""

    def filled(ref: StoredRef) -> Any:
        tensor = tensor_of(ref.key)
        return tensor.numpy() if ref.is_array and tensor is not None else tensor

    return torch_compat.tree_map_only(StoredRef, filled, values)


@dataclass
class Encoder:
    """Encoder that converts values to JSON and collects their tensors. After an error, it is not used again.

    Attributes:
        name_of: function that returns the stored name of the parameter to which rows belong.
        is_rank_local: function that returns whether other ranks have a different parameter under a given name. Tensors
            with the sharding of such a parameter are allowed only in own entries of a :class:`MergeableValue`.
        tells: whether this rank writes its own entries of a :class:`MergeableValue`. If several ranks have equal own
            entries, only one of these ranks writes them.
        tensors: by key, the tensors that the JSON refers to. They stay alive, so that their ids in `_keys` stay valid.
        own: this rank's :class:`PerRank` values and own entries of :class:`MergeableValue`, as JSON, in encoding order.
        written: keys of the tensors that this rank writes: its shards, its own values, and on one rank the others.
        digests: by path, digests of all values that must be the same on all ranks.
    """

    rank: int
    name_of: Callable[[LocalShard], str]
    is_rank_local: Callable[[str], bool] = lambda name: False
    tells: bool = True
    tensors: dict[str, Tensor] = field(default_factory=dict)
    own: list[Any] = field(default_factory=list)
    written: set[str] = field(default_factory=set)
    digests: dict[str, str] = field(default_factory=dict)
    _keys: dict[tuple[str, int], str] = field(default_factory=dict)  # a tensor that occurs twice is stored once
    _depth: int = 0
    _prefix: str = ""
    _encodes_own: bool = False

    def encode(self, value: Any, path: str) -> Any:
        """Encode `value` as JSON, and collect its tensors, own values and digests.

        Args:
            path: name of the value in error messages, and key of its tensors in the checkpoint.

        Raises:
            TypeError: a value is neither plain data nor a tensor, or is nested too deeply to be loaded; the message
                names the path of the value.
        """
        if self._depth > _DEPTH:
            raise TypeError(
                f"{path.partition('.')[0]} cannot be saved: values are nested more than {_DEPTH} levels deep, or "
                "contain themselves. Use a flatter structure"
            )
        self._depth += 1
        encoded = self._encode(value, path)
        self._depth -= 1
        return encoded

    def _encode(self, value: Any, path: str) -> Any:
        if isinstance(value, PerRank):
            return self._encode_per_rank(value.value, path)
        if isinstance(value, MergeableValue):
            return self._encode_mergeable_value(value, path)
        if isinstance(value, Tensor):
            return self._encode_tensor(value, path)
        if type(value) in _MAPPING_TAGS:
            return self._encode_mapping(value, path)
        if type(value) in (list, tuple):
            items = [self.encode(item, f"{path}.{index}") for index, item in enumerate(value)]
            self._record_digest(f"{path} (items)", f"{type(value).__name__} of {len(value)}")
            return items if type(value) is list else {"$tuple": items}
        if type(value).__module__ == "numpy":
            return self._encode_numpy(value, path)
        encoded = _encode_leaf(value, path)
        self._record_digest(path, encoded)
        return encoded

    def _encode_mapping(self, value: Mapping[Any, Any], path: str) -> Any:
        encoded = [[key, self.encode(item, f"{path}.{key}")] for key, item in value.items()]
        self._record_digest(f"{path} (keys)", [repr(key) for key in value])
        if type(value) is dict and all(type(key) is str and not key.startswith("$") for key in value):
            return dict(encoded)
        return {_MAPPING_TAGS[type(value)]: [[_encode_leaf(key, f"a key of {path}"), item] for key, item in encoded]}

    def _encode_numpy(self, value: Any, path: str) -> Any:
        if value.ndim == 0:
            return self.encode(value.item(), path)
        try:
            tensor = torch.from_numpy(value.copy())  # copied, because strides may be negative
        except TypeError as error:
            raise TypeError(f"{path}: {error}") from None
        return {"$ndarray": self._encode_tensor(tensor, path)["$tensor"]}

    def _encode_tensor(self, tensor: Tensor, path: str) -> Any:
        if tensor.layout is not torch.strided or tensor.is_meta or tensor.dtype not in DTYPES:
            kind = "meta tensor" if tensor.is_meta else f"{tensor.layout} tensor of {tensor.dtype}"
            raise TypeError(f"{path}: a {kind} cannot be stored in a safetensors file. Convert or remove the tensor")
        if has_inner_tensors(tensor):
            raise TypeError(
                f"{path}: a {type(tensor).__name__}, a tensor subclass, cannot be stored in a safetensors file. Save "
                "the trained parameters with layerzero.full_state_dict(model, trainable_only=True), and create the "
                "other tensors again before a load"
            )
        key = self._keys.get((self._prefix, id(tensor)))
        if key is None:
            key = (self._prefix + path).encode(errors="replace").decode()  # safetensors accepts valid Unicode only
            while key in self.tensors:  # {1: a, "1": b}
                key += "'"
            self._keys[self._prefix, id(tensor)] = key
            self.tensors[key] = tensor
            is_writer = self.tells if self._encodes_own else self.rank == 0
            if is_writer or self._prefix or isinstance(tensor, DTensor):
                self.written.add(key)
        if isinstance(tensor, DTensor):
            return {"$sharded": key, "like": self._parameter_like(tensor, path)}
        self._record_tensor_digest(path, tensor)
        return {"$tensor": key}

    def _parameter_like(self, tensor: DTensor, path: str) -> str:
        """Return the name of the parameter whose sharding a sharded tensor has."""
        local = tensor._local_tensor
        if not isinstance(local, LocalShard):
            raise TypeError(f"{path}: a DTensor that layerzero did not create cannot be saved. Store its full_tensor()")
        if self._prefix:
            raise TypeError(
                f"{path}: per_rank cannot mark a sharded tensor, because all ranks save it. Store the tensor outside "
                "of per_rank"
            )
        try:
            like = self.name_of(local)
        except LookupError:
            raise TypeError(
                f"{path} has the sharding of {local.spec.name!r} of another model and cannot be saved. Store its "
                "full_tensor()"
            ) from None
        if self.is_rank_local(like) and not self._encodes_own:
            raise TypeError(
                f"{path} has the sharding of {like}, which is a different parameter on other ranks. Remove the tensor "
                "from extra. To save averages of such weights, use ShardedMegatronOptimizer(ema_decay=...)"
            )
        return like

    def _encode_per_rank(self, value: object, path: str) -> Any:
        if self._prefix:
            raise TypeError(f"{path}: per_rank cannot be nested. Mark only the outer value")
        self._record_digest(path, "a value of each rank")
        self._prefix = f"rank{self.rank}."
        self.own.append(self.encode(value, path))
        self._prefix = ""
        return {"$per_rank": len(self.own) - 1}

    def _encode_mergeable_value(self, merged: MergeableValue, path: str) -> Any:
        common = self.encode(merged.common, path)
        self._encodes_own = True
        own = self.encode(merged.own, path)
        self._encodes_own = False
        self.own.append(own if self.tells else type(own)())
        return {"$joint": len(self.own) - 1, "common": common}

    def _record_digest(self, path: str, encoded: Any) -> None:
        if not self._prefix and not self._encodes_own:
            self.digests[path] = repr(encoded)

    def _record_tensor_digest(self, path: str, tensor: Tensor) -> None:
        """Record a digest of a full tensor. Ranks compare only its presence if the first rank's copy counts."""
        if self._prefix or self._encodes_own:
            return
        digest = hashlib.sha256()
        if path.startswith(_COMPARED):
            values = contiguous_on_cpu(tensor)
            for piece in tensor_bytes(values):
                digest.update(piece)
            self.digests[path] = f"{tensor.dtype} {list(tensor.shape)} {digest.hexdigest()[:16]}"
        else:
            self.digests[path] = ""


@dataclass(frozen=True)
class Decoder:
    """Decoder that converts JSON back to values, in which a :class:`StoredRef` stands for each tensor.

    Attributes:
        tensors: table of the stored tensors, by key.
        rank: rank whose :class:`PerRank` values are used. If None, these values are decoded as None.
    """

    tensors: Mapping[str, StoredTensor]
    rank: int | None

    def decode(self, value: Any) -> Any:
        """Decode the JSON `value`.

        Raises:
            ValueError, TypeError, LookupError: an :class:`Encoder` did not write the value.
        """
        if isinstance(value, list):
            return [self.decode(item) for item in value]
        if not isinstance(value, dict):
            return value
        tag = next(iter(value), "")
        if not tag.startswith("$"):
            return {key: self.decode(item) for key, item in value.items()}
        content = value[tag]
        if tag in ("$tensor", "$sharded", "$ndarray"):
            like = value["like"] if tag == "$sharded" else None
            stored = self.tensors[content]
            return StoredRef(content, torch.Size(stored.shape), stored.dtype, like, tag == "$ndarray")
        return self._decode_tagged(tag, content)

    def _decode_tagged(self, tag: str, content: Any) -> Any:
        if tag == "$per_rank":
            return None if self.rank is None else self.decode(content[self.rank])
        if tag in _MAPPINGS:
            return _MAPPINGS[tag]({self.decode(key): self.decode(item) for key, item in content})
        if tag == "$tuple":
            return tuple(self.decode(item) for item in content)
        if tag == "$bytes":
            return base64.b64decode(content, validate=True)
        if tag == "$float":
            return float(content)
        if tag == "$dtype":
            return dtype_named(content)
        raise ValueError(f"unknown tag {tag!r}; a newer version of layerzero may have written the checkpoint")


def has_own_values(value: Any) -> bool:
    """Return whether the JSON `value` contains per-rank values."""
    if isinstance(value, list):
        return any(map(has_own_values, value))
    return isinstance(value, dict) and ("$per_rank" in value or any(map(has_own_values, value.values())))


def merge_ranks(value: Any, owns: Sequence[Sequence[Any]]) -> Any:
    """Return `value` with ``{"$per_rank": index}`` and ``{"$joint": index}`` replaced by the values of all ranks."""
    if isinstance(value, list):
        return [merge_ranks(item, owns) for item in value]
    if not isinstance(value, dict):
        return value
    if "$per_rank" in value:
        return {"$per_rank": [own_values[value["$per_rank"]] for own_values in owns]}
    if "$joint" in value:
        common, parts = value["common"], [own_values[value["$joint"]] for own_values in owns]
        if isinstance(common, list):
            return [*common, *(item for part in parts for item in part)]
        return common | {key: item for part in parts for key, item in part.items()}
    return {key: merge_ranks(item, owns) for key, item in value.items()}


def dtype_named(name: str) -> torch.dtype:
    """Return the torch dtype with this name, such as ``"bfloat16"``. Raises ValueError if there is none."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a dtype in torch {torch.__version__}")
    return dtype


def _encode_leaf(value: Any, path: str) -> Any:
    kind = type(value)
    if kind is float and not math.isfinite(value):
        return {"$float": repr(value)}
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is bytes:
        return {"$bytes": base64.b64encode(value).decode()}
    if kind is torch.dtype:
        return {"$dtype": str(value).removeprefix("torch.")}
    if kind in (tuple, torch.Size):
        return {"$tuple": [_encode_leaf(item, path) for item in value]}
    raise TypeError(
        f"{path}: a {kind.__module__}.{kind.__qualname__} cannot be saved, because checkpoints contain no code. Store "
        "its numbers, strings and tensors, in lists, tuples and dicts"
    )


def has_inner_tensors(tensor: Tensor) -> bool:
    """Return whether a tensor, other than a sharded one, stores its values in other tensors, as quantized ones do."""
    has_own_memory = type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__
    return not has_own_memory and not isinstance(tensor, (DTensor, LocalShard))


def flatten_subclass(name: str, tensor: Tensor) -> tuple[str, dict[str, Tensor]] | None:
    """Return a description of a subclass tensor (class, shape and metadata), and its plain tensors by name.

    Args:
        name: name of the tensor in error messages.

    Returns:
        The description and the plain tensors. None if the tensor has no inner tensors, its class has no
        ``__tensor_flatten__``, the repr of its metadata is incomplete, or an inner tensor cannot be filled in place.

    Raises:
        TypeError: ``__tensor_flatten__`` raised an error.
    """
    if not has_inner_tensors(tensor) or not hasattr(tensor, "__tensor_flatten__"):
        return None
    kind = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
    try:
        names, context = tensor.__tensor_flatten__()
        description = f"{kind} of {list(tensor.shape)} with {_DEVICE.sub('a device', repr(context))}"
        first_read = {part: getattr(tensor, part) for part in names}
        second_read = {part: getattr(tensor, part) for part in names}
    except Exception as error:
        raise TypeError(f"{name}: {kind}.__tensor_flatten__ failed: {type(error).__name__}: {error}") from error
    if any(sign in description for sign in _NOT_IN_WORDS):
        return None
    leaves: dict[str, Tensor] = {}
    for part, attribute in first_read.items():
        if isinstance(attribute, Tensor) and has_inner_tensors(attribute):
            if (flattened := flatten_subclass(f"{name}.{part}", attribute)) is None:
                return None
            description += f"; {part}: {flattened[0]}"
            leaves |= {f"{part}.{key}": value for key, value in flattened[1].items()}
        elif _can_be_filled(attribute, second_read[part]):
            leaves[part] = attribute
        else:
            return None
    return description, leaves


def _can_be_filled(value: Any, second_read: Any) -> bool:
    """Return whether two reads of an attribute returned a plain tensor on the same memory, not temporary copies."""
    is_plain = (
        isinstance(value, Tensor) and not isinstance(value, (DTensor, LocalShard)) and value.layout is torch.strided
    )
    return is_plain and value.data_ptr() == second_read.data_ptr()


def to_subclass_entry(name: str, value: Tensor) -> Any:
    """Return the checkpoint entry for a tensor: a dict if it can be flattened, otherwise the tensor itself."""
    parts = flatten_subclass(name, value)
    return value if parts is None else {"of": parts[0], "tensors": parts[1]}


def is_subclass_entry(entry: Any) -> bool:
    """Return whether `entry`, a JSON value in a checkpoint, has the form that :func:`to_subclass_entry` returns."""
    return isinstance(entry, Mapping) and entry.keys() == {"of", "tensors"} and isinstance(entry["tensors"], Mapping)
