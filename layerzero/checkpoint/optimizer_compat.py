"""Check that an optimizer can continue from the group settings and parameter states in a checkpoint.

[Note: Trial of the optimizer state]
Optimizer classes do not declare which state they store for a parameter, or which entries may be missing. A trial step
determines these entries. The trial updates a small parameter with the settings in the checkpoint, because the state
depends on settings such as ``amsgrad`` and ``momentum``. If an entry is a number or a tensor of the parameter's shape
after the trial, the checkpoint must have the same kind of entry. An entry that is None or missing in the checkpoint is
accepted if a step that starts from such a state succeeds. Other entries in the checkpoint are not checked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from layerzero.checkpoint.contents_checks import StoredTensor
from layerzero.checkpoint.json_codec import Decoder, references
from layerzero.optimizers.compatibility import state_after_a_step

__all__ = ["GroupCompatibility", "key_of", "match_state_type"]

_NUMBER, _TENSOR, _SEQUENCE, _TABLE = "a number", "a tensor", "a list of values", "a table"
_ROWS = "a tensor of the parameter's shape"
_TAGS = {"$tuple": _SEQUENCE, "$float": _NUMBER, "$dict": _TABLE, "$ordered": _TABLE, "$counter": _TABLE}


def key_of(reference: Any) -> str | None:
    """Return the key of a tensor reference in the JSON of a checkpoint; None for other values."""
    first_reference = next(references(reference, rank=None), None) if isinstance(reference, dict) else None
    return (
        None
        if first_reference is not reference or first_reference is None
        else str(first_reference[next(iter(first_reference))])
    )


class GroupCompatibility:
    """Compatibility of one parameter group with its entry in a checkpoint.

    Args:
        group: current parameter group of `inner`.
        saved: settings of the group in the checkpoint, as JSON.
        tensors: tensors in the checkpoint, by key.
        what: name of the group in error messages.

    Attributes:
        problems: descriptions of incompatible settings, one line each.
        settings: the compatible settings in `saved`.
    """

    def __init__(
        self,
        inner: Optimizer,
        group: Mapping[str, Any],
        saved: Mapping[str, Any],
        tensors: Mapping[str, StoredTensor],
        *,
        device: torch.device,
        what: str,
    ) -> None:
        self._inner, self._group, self._tensors, self._device = inner, group, tensors, device
        mismatches = {key: mismatch for key, value in saved.items() if (mismatch := self._mismatch(key, value))}
        self.problems = [f"{key} of {what}: {mismatch}" for key, mismatch in mismatches.items()]
        self.settings = {key: value for key, value in saved.items() if key not in mismatches}
        self._kept_by_ndim: dict[int, dict[str, Any] | None] = {}
        self._stepped_with = {**group, **self._decode_settings(self.settings)}
        _, failure = self._trial(self._stepped_with)
        if failure is not None and self._trial(group)[1] is None:
            changed = [
                key for key, value in self._decode_settings(self.settings).items() if _differs(group.get(key), value)
            ]
            self.problems.append(f"{what}: with {', '.join(changed)} from the checkpoint, a step fails with {failure}")
            self.settings, self._stepped_with = {}, dict(group)

    def _mismatch(self, name: str, saved: Any) -> str | None:
        current = self._group.get(name)
        if current is None or saved is None:
            return None  # the trial step decides
        return _kind_mismatch(_nested_kind(current), self._nested_kind_of_saved(saved), saved)

    def _nested_kind_of_saved(self, value: Any) -> Any:
        """Return the kind of the encoded `value`. For a list, return a list of kinds."""
        if (key := key_of(value)) is not None:
            return _NUMBER if self._tensors[key].shape in ((), (1,)) else _TENSOR
        tag = next(iter(value), "") if isinstance(value, dict) else ""
        if isinstance(value, list) or tag == "$tuple":
            return [self._nested_kind_of_saved(item) for item in (value if isinstance(value, list) else value[tag])]
        return _TAGS.get(tag, f"a {tag[1:]}" if tag.startswith("$") else _kind_of_leaf(value))

    def _decode_settings(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Decode the saved settings, except those that contain tensors, because tensors have not been read yet."""
        decoder = Decoder(_refuse_tensor, rank=None)
        return {
            key: decoder.decode(value)
            for key, value in saved.items()
            if next(references(value, rank=None), None) is None
        }

    def _trial(self, group: Mapping[str, Any], ndim: int = 2) -> tuple[dict[str, Any] | None, str | None]:
        """Update a small parameter with `ndim` dims. Return (state, None), or (None, error) if the step fails."""
        try:
            return self._state_after_a_step(self._inner, {**group, "params": []}, ndim), None
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
        try:  # use the parameters of the group, because some optimizers create the state in the constructor
            return self._state_after_a_step(self._inner, {**group, "params": self._group["params"]}, ndim), None
        except Exception:
            return None, failure

    def state_problems(self, values: Mapping[str, Any], ndim: int) -> Iterator[tuple[str, str]]:
        """Yield (key, reason) for each incompatible entry in the state of a parameter.

        Args:
            values: entries of the state, as JSON.
            ndim: number of dims of the parameter.
        """
        example_state = self.example_state(ndim) if values else None  # a parameter without state has never been stepped
        missing = {}
        for state_key, example in (example_state or {}).items():
            expected, value = _kind_of_example(example), values.get(state_key)
            saved_kind = self._kind_of_saved(value)
            if value is None and (example is not None or state_key not in values):
                missing[state_key] = (
                    "it is None in the checkpoint" if state_key in values else "the checkpoint does not have it"
                )
            elif expected in (_ROWS, _NUMBER) and saved_kind != expected:
                yield state_key, f"expected {expected}, but the checkpoint has {saved_kind}"
        if example_state is not None and missing and not self._can_step(example_state, values, missing, ndim):
            self.settings = {}  # with settings such as amsgrad, the parameter's current state may lack them too
            yield from missing.items()

    def example_state(self, ndim: int) -> dict[str, Any] | None:
        """Return an example of the state of a parameter with `ndim` dims; None if the trial step fails."""
        if ndim not in self._kept_by_ndim:
            self._kept_by_ndim[ndim] = self._trial(self._stepped_with, ndim)[0]
        return self._kept_by_ndim[ndim]

    def _kind_of_saved(self, value: Any) -> str:
        if (key := key_of(value)) is not None:
            return _ROWS if self._tensors[key].shape else _NUMBER
        return sorted_kind if isinstance(sorted_kind := self._nested_kind_of_saved(value), str) else _SEQUENCE

    def _can_step(
        self, example_state: Mapping[str, Any], values: Mapping[str, Any], missing: Mapping[str, Any], ndim: int
    ) -> bool:
        state = {key: value for key, value in example_state.items() if key not in missing}
        state |= {key: None for key in missing if key in values}
        try:
            self._state_after_a_step(self._inner, {**self._stepped_with, "params": []}, ndim, state)
        except Exception:
            return False
        return True

    def _state_after_a_step(
        self, inner: Optimizer, group: dict[str, Any], ndim: int, state: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        shape = (2, *[3] * (ndim - 1)) if ndim else ()
        on_device = [] if self._device.type == "cpu" else [self._device]
        with torch.random.fork_rng(on_device, device_type=self._device.type):  # some optimizers use stochastic rounding
            return state_after_a_step(inner, group, self._device, shape, state=state)[0]


def match_state_type(value: Any, example: Any) -> Any:
    """Return a loaded state entry. If `example` is a tensor, a number is converted to a tensor."""
    if isinstance(example, Tensor) and isinstance(value, (int, float)):
        return torch.full_like(example, value)
    return value


def _kind_of_example(example: Any) -> str:
    """Return the kind of a state entry, such as "a number"."""
    if isinstance(example, Tensor) and example.ndim:
        return _ROWS
    return kind if isinstance(kind := _nested_kind(example), str) else _SEQUENCE


def _nested_kind(value: Any) -> Any:
    """Return the kind of a value, such as "a number". For a list, return a list of kinds."""
    if isinstance(value, Tensor):
        return _NUMBER if value.numel() == 1 else _TENSOR
    return [_nested_kind(item) for item in value] if isinstance(value, (list, tuple)) else _kind_of_leaf(value)


def _kind_of_leaf(value: Any) -> str:
    if isinstance(value, (bool, int, float)):
        return _NUMBER
    return _TABLE if isinstance(value, dict) else f"a {type(value).__name__}"


def _kind_mismatch(expected: Any, saved: Any, value: Any) -> str | None:
    """Return a description of the mismatch between two kinds; None if the kinds match.

    Lists may differ in length, because the trial step checks them.
    """
    if isinstance(expected, list) and isinstance(saved, list):
        kind_pairs = zip(expected, saved, strict=False)
        return next(
            (
                mismatch
                for kinds in kind_pairs
                if "a NoneType" not in kinds and (mismatch := _kind_mismatch(*kinds, value))
            ),
            None,
        )
    if expected == saved:
        return None
    expected, saved = (_SEQUENCE if isinstance(sort, list) else sort for sort in (expected, saved))
    value_text = repr(value)
    return f"expected {expected}, but the checkpoint has {saved}: {value_text[:60]}{'...' * (len(value_text) > 60)}"


def _differs(current: Any, saved: Any) -> bool:
    try:
        return bool(current != saved)
    except (RuntimeError, TypeError, ValueError):  # a comparison of tensors may fail
        return True


def _refuse_tensor(key: str) -> Tensor:
    raise AssertionError(key)
