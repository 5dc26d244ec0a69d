"""A loop on another stream than the one that `shard_model` was called under is refused.

There are no streams here: `_Streams` says which one is current, in place of the accelerator. What is tested is where
the engine looks, not that gradients of an accelerator would have come too late.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch

import layerzero
from layerzero.storage.device import HomeStream
from tests.support.models import backward, exact_sgd, integer_batch, integer_loss, integer_net, train
from tests.support.ranks import mesh_of, run_ranks


class _Streams(HomeStream):
    now = "stream 0"

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._stream = self._current()

    def _current(self) -> str:
        return _Streams.now


@contextmanager
def _stream(name: str) -> Iterator[None]:
    before, _Streams.now = _Streams.now, name
    try:
        yield
    finally:
        _Streams.now = before


def _loops(rank: int) -> None:
    with mock.patch("layerzero.engine.runtime.HomeStream", _Streams):
        model = layerzero.shard_model(integer_net(), mesh=mesh_of(2), units=["first", "second", "head"])
        optimizer = layerzero.shard_optimizer(exact_sgd(model.parameters()), model)
        refused = pytest.raises(
            RuntimeError, match=r"stream 7.* shard_model was called under stream 0.*Call shard_model"
        )
        train(model, optimizer, rank, [0])
        with _stream("stream 7"), refused:
            backward(model, rank)
        loss = integer_loss(model, integer_batch(rank=rank))
        with _stream("stream 7"), refused:
            loss.backward()
        optimizer.zero_grad()
        with layerzero.no_sync(model):
            backward(model, rank)
        with _stream("stream 7"):
            with refused:
                optimizer.step()
            with refused:
                layerzero.clip_grad_norm_(model, 1.0)
        optimizer.step()
        train(model, optimizer, rank, [1])  # out of the context, it goes on
        with _stream("stream 7"):  # the way out
            model = layerzero.shard_model(integer_net(), mesh=mesh_of(2), units=["first", "second", "head"])
            train(model, layerzero.shard_optimizer(exact_sgd(model.parameters()), model), rank, range(2))


def test_another_stream_is_refused_wherever_exchanges_are_launched() -> None:
    run_ranks(_loops, world_size=4)


def test_the_cpu_is_not_asked() -> None:
    with mock.patch.object(HomeStream, "_current", side_effect=AssertionError("asked")):
        HomeStream(torch.device("cpu")).check()
