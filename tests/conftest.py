"""Settings for all tests and for the processes that they start."""

import os
import sys
from collections import defaultdict

import pytest

# torch looks up the host name of each address that it connects to. Only a name server can resolve 127.0.0.1 written as
# IPv6. If the server loses a query, each of thousands of process groups waits five seconds for the answer.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as exhaustive the slow settings of a test that its mark ``sample`` leaves out of make test-slow."""
    sampled: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("exhaustive"):
            item.add_marker("slow")
        elif item.get_closest_marker("sample") and item.get_closest_marker("slow"):
            sampled[item.nodeid.partition("[")[0]].append(item)
    for settings in sampled.values():
        (number,) = settings[0].get_closest_marker("sample").args
        kept = {(2 * index + 1) * len(settings) // (2 * number) for index in range(number)}  # spread evenly
        for index, item in enumerate(settings):
            if index not in kept:
                item.add_marker("exhaustive")


def pytest_sessionfinish() -> None:
    """Stop the ranks while this process still has time: a worker is killed soon after its session."""
    if ranks := sys.modules.get("tests.support.ranks"):
        ranks.stop_ranks()
