"""Count the operations of this rank on the rendezvous store, and their bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist


class CountingStore(dist.Store):
    """Store that passes all operations on, also those of gloo, and counts them.

    Attributes:
        operations: number of operations of this rank; one on several keys counts as one for each key.
        nbytes: bytes of keys and values that this rank has sent or received.
    """

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self._store = store
        self.operations = self.nbytes = 0

    def _count(self, keys: list[str], values: list[Any] | None = None) -> None:
        self.operations += len(keys)
        self.nbytes += sum(map(len, keys)) + sum(map(len, values or ()))

    def set(self, key: str, value: Any) -> None:
        self._count([key], [value])
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        value = self._store.get(key)
        self._count([key], [value])
        return value

    def add(self, key: str, amount: int) -> int:
        self._count([key])
        return self._store.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        self._count(keys)
        return self._store.check(keys)

    def wait(self, keys: list[str], timeout: timedelta = timedelta(seconds=60)) -> None:
        self._count(keys)
        self._store.wait(keys, timeout)

    def delete_key(self, key: str) -> bool:
        self._count([key])
        return self._store.delete_key(key)

    deleteKey = delete_key

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        self._count([key], [expected, desired])
        return self._store.compare_set(key, expected, desired)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        values = self._store.multi_get(keys)
        self._count(keys, values)
        return values

    def multi_set(self, keys: list[str], values: list[Any]) -> None:
        self._count(keys, values)
        self._store.multi_set(keys, values)

    def has_extended_api(self) -> bool:
        return self._store.has_extended_api()

    def clone(self) -> dist.Store:
        return self._store.clone()


@contextmanager
def counted_store() -> Iterator[CountingStore]:
    """Context manager in which the default store counts."""
    tables, world = dist.distributed_c10d._world.pg_map, dist.group.WORLD
    backend, store = tables[world]
    counting = CountingStore(store)
    tables[world] = (backend, counting)
    try:
        yield counting
    finally:
        tables[world] = (backend, store)
