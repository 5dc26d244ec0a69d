"""Encode nested values as JSON and tensors, and decode them. In contrast to unpickling, decoding executes no code.

Values that JSON cannot represent, such as tensors, tuples and infinities, become objects with a key that starts with
``$``:

    {"$tensor": KEY}                    a full tensor, stored under KEY; {"$ndarray": KEY} for a NumPy array
    {"$sharded": KEY, "like": NAME}     a sharded tensor with the sharding of the parameter NAME
    {"$per_rank": [VALUE, ...]}         one value for each rank that saved the checkpoint
    {"$joint": INDEX, "common": VALUE}  entries of all ranks that are not merged yet; see MergeableValue
    {"$tuple": [...]}, {"$dict": [[KEY, VALUE], ...]}, {"$ordered": ...}, {"$counter": ...}, {"$bytes": BASE64},
    {"$float": "inf"}, {"$dtype": "bfloat16"}
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from layerzero.checkpoint.atomic_files import contiguous_on_cpu, tensor_bytes
from layerzero.dtensor.local_shard import LocalShard

__all__ = [
    "DEPTH",
    "DTYPES",
    "Decoder",
    "Encoder",
    "MergeableValue",
    "PerRank",
    "dtype_named",
    "has_own_memory",
    "has_own_values",
    "is_deeper",
    "merge_ranks",
    "references",
]

DEPTH = 200  # maximum nesting depth of the JSON, so that recursive functions do not overflow Python's stack

DTYPES = {  # names in the safetensors format
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL",
    torch.complex64: "C64",
}  # fmt: skip

_TENSORS = ("$tensor", "$ndarray", "$sharded")
_PAIRS: dict[str, Callable[[Any], Any]] = {
    "$dict": dict,
    "$ordered": OrderedDict,
    "$counter": lambda p: Counter(dict(p)),
}


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


@dataclass
class Encoder:
    """Encoder that converts values to JSON and collects their tensors.

    Attributes:
        is_rank_local: function that returns whether other ranks have a different parameter under a given name. Tensors
            with the sharding of such a parameter are allowed only in own entries of a :class:`MergeableValue`.
        tells: whether this rank writes its own entries of a :class:`MergeableValue`. If several ranks have equal own
            entries, only one of these ranks writes them.
        tensors: by key, the tensors that the JSON refers to.
        own: this rank's :class:`PerRank` values and own entries of :class:`MergeableValue`, as JSON, in encoding order.
        apart: keys of the tensors in own entries of :class:`MergeableValue`.
        digests: by path, digests of all values that must be the same on all ranks.
    """

    rank: int
    name_of: Callable[[LocalShard], str]  # returns the stored name of the parameter that these rows belong to
    is_rank_local: Callable[[str], bool] = lambda name: False
    tells: bool = True
    tensors: dict[str, Tensor] = field(default_factory=dict)
    own: list[Any] = field(default_factory=list)
    apart: set[str] = field(default_factory=set)
    digests: dict[str, str] = field(default_factory=dict)
    _keys: dict[tuple[str, int], str] = field(default_factory=dict)  # a tensor that occurs twice is stored once
    _key_at: dict[str, str] = field(default_factory=dict)  # keys of full tensors, by path
    _prefix: str = ""
    _encodes_own: bool = False

    def encode(self, value: Any, path: str) -> Any:
        """Encode `value` as JSON, and collect its tensors, own values and digests.

        Args:
            path: name of the value in error messages, and key of its tensors in the checkpoint.

        Raises:
            TypeError: a value is neither plain data nor a tensor; the message names the path of the value.
        """
        if isinstance(value, PerRank):
            return self._encode_per_rank(value.value, path)
        if isinstance(value, MergeableValue):
            return self._encode_mergeable_value(value, path)
        if isinstance(value, Tensor):
            return self._encode_tensor(value, path)
        if type(value) in (dict, OrderedDict, Counter):
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

    def encode_tree(self, value: Any, path: str) -> Any:
        """Encode a value from the user, and check that a load can decode its nesting depth.

        Raises:
            TypeError: :meth:`encode` raises it, or the value is nested too deeply to be loaded.
        """
        max_depth = DEPTH // 2 - 2  # each own value may add the same depth again
        try:
            encoded = self.encode(value, path)
            too_deep = any(is_deeper(tree, max_depth) for tree in (encoded, *self.own))
        except RecursionError:
            too_deep = True
        if too_deep:
            raise TypeError(
                f"{path} cannot be saved: values are nested more than {max_depth} levels deep, or contain themselves. "
                "Use a flatter structure"
            )
        return encoded

    def _encode_mapping(self, value: Mapping[Any, Any], path: str) -> Any:
        encoded = [[key, self.encode(item, f"{path}.{key}")] for key, item in value.items()]
        self._record_digest(f"{path} (keys)", [repr(key) for key in value])
        if type(value) is dict and all(type(key) is str and not key.startswith("$") for key in value):
            return dict(encoded)
        tag = {dict: "$dict", OrderedDict: "$ordered", Counter: "$counter"}[type(value)]
        return {tag: [[_encode_leaf(key, f"a key of {path}"), item] for key, item in encoded]}

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
        if not isinstance(tensor, (DTensor, LocalShard)) and not has_own_memory(tensor):
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
            if self._encodes_own:
                self.apart.add(key)
        if isinstance(tensor, DTensor):
            local = tensor._local_tensor
            if not isinstance(local, LocalShard):
                raise TypeError(
                    f"{path}: a DTensor that layerzero did not create cannot be saved. Store its full_tensor()"
                )
            if self._prefix:
                raise TypeError(
                    f"{path}: per_rank cannot mark a sharded tensor, because all ranks save it. Store the tensor "
                    "outside of per_rank"
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
                    f"{path} has the sharding of {like}, which is a different parameter on other ranks. Remove the "
                    "tensor from extra. To save averages of such weights, use ShardedMegatronOptimizer(ema_decay=...)"
                )
            return {"$sharded": key, "like": like}
        if not self._prefix and not self._encodes_own:
            self.digests[path] = ""  # `digest_tensors` computes the digest if the ranks compare this tensor
            self._key_at[path] = key
        return {"$tensor": key}

    def _encode_per_rank(self, value: object, path: str) -> Any:
        if self._prefix:
            raise TypeError(f"{path}: per_rank cannot be nested. Mark only the outer value")
        self._record_digest(path, "a value of each rank")
        self._prefix = f"rank{self.rank}."
        try:
            self.own.append(self.encode(value, path))
        finally:
            self._prefix = ""
        return {"$per_rank": len(self.own) - 1}

    def _encode_mergeable_value(self, merged: MergeableValue, path: str) -> Any:
        common = self.encode(merged.common, path)
        self._encodes_own = True
        try:
            own = self.encode(merged.own, path)
        finally:
            self._encodes_own = False
        self.own.append(own if self.tells else type(own)())
        return {"$joint": len(self.own) - 1, "common": common}

    def _record_digest(self, path: str, encoded: Any) -> None:
        if not self._prefix and not self._encodes_own:
            self.digests[path] = repr(encoded)

    def digest_tensors(self, path: str) -> None:
        """Compute the digests of the full tensors at and below `path`, so that ranks can compare them."""
        for tensor_path in [
            tensor_path for tensor_path, digest in self.digests.items() if tensor_path.startswith(path) and not digest
        ]:
            tensor = contiguous_on_cpu(self.tensors[self._key_at[tensor_path]])
            description = f"{tensor.dtype} {list(tensor.shape)} "
            digest = hashlib.sha256()
            for piece in tensor_bytes(tensor):
                digest.update(piece)
            self.digests[tensor_path] = description + digest.hexdigest()[:16]


@dataclass(frozen=True)
class Decoder:
    """Decoder that converts JSON back to values.

    Attributes:
        tensor: function that returns the tensor stored under a key.
        rank: rank whose :class:`PerRank` values are used. If None, these values are decoded as None.
    """

    tensor: Callable[[str], Tensor]
    rank: int | None

    def decode(self, value: Any) -> Any:
        """Decode the JSON `value`."""
        if isinstance(value, list):
            return [self.decode(item) for item in value]
        if not isinstance(value, dict):
            return value
        tag = next(iter(value), "")
        if not tag.startswith("$"):
            return {key: self.decode(item) for key, item in value.items()}
        return self._decode_tagged(tag, value[tag])

    def _decode_tagged(self, tag: str, content: Any) -> Any:
        if tag in ("$tensor", "$sharded"):
            return self.tensor(content)
        if tag == "$ndarray":
            return self.tensor(content).numpy()
        if tag == "$per_rank":
            return None if self.rank is None else self.decode(content[self.rank])
        if tag in _PAIRS:
            return _PAIRS[tag]([(self.decode(key), self.decode(item)) for key, item in content])
        if tag == "$tuple":
            return tuple(self.decode(item) for item in content)
        if tag == "$bytes":
            return base64.b64decode(content)
        if tag == "$float":
            return float(content)
        if tag == "$dtype":
            return dtype_named(content)
        raise ValueError(f"unknown tag {tag!r}; a newer version of layerzero may have written the checkpoint")


def references(value: Any, *, rank: int | None) -> Iterator[dict[str, str]]:
    """Yield the tensor references in the JSON `value` that a :class:`Decoder` for `rank` would resolve."""
    if isinstance(value, list):
        for item in value:
            yield from references(item, rank=rank)
    elif isinstance(value, dict):
        tag = next(iter(value), "")
        if tag in _TENSORS:
            yield value
        elif tag == "$per_rank":
            if rank is not None:
                yield from references(value[tag][rank], rank=rank)
        else:
            for item in value.values():
                yield from references(item, rank=rank)


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


def is_deeper(value: Any, depth: int) -> bool:
    """Return whether lists and objects in the JSON `value` are nested more than `depth` levels deep."""
    level = [value]
    for _ in range(depth + 1):
        level = [item for v in level if isinstance(v, (list, dict)) for item in (v.values() if type(v) is dict else v)]
        if not level:
            return False
    return True


def dtype_named(name: str) -> torch.dtype:
    """Return the torch dtype with this name, such as ``"bfloat16"``. Raises ValueError if there is none."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a dtype in torch {torch.__version__}")
    return dtype


def has_own_memory(tensor: Tensor) -> bool:
    """Return whether a tensor stores its values in its own storage; False for classes with ``__torch_dispatch__``."""
    return type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__


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
