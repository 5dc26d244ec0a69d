"""Settings for all tests and for the processes that they start."""

import os
import sys
from collections import defaultdict

import pytest

# torch looks up the host name of each address that it connects to. Only a name server can resolve 127.0.0.1 written as
# IPv6. If the server loses a query, each of thousands of process groups waits five seconds for the answer.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Spread the settings of tests over the tiers, as their marks ``sample`` and ``default_sample`` say."""
    for item in items:
        if item.get_closest_marker("exhaustive"):
            item.add_marker("slow")
    _leave_out([item for item in items if not item.get_closest_marker("slow")], "default_sample", "slow")
    slow = [item for item in items if item.get_closest_marker("slow") and not item.get_closest_marker("exhaustive")]
    _leave_out(slow, "sample", "exhaustive")


def _leave_out(items: list[pytest.Item], sample: str, tier: str) -> None:
    """Move all but n settings of each test that has the mark `sample` with the argument n to `tier`."""
    settings_of: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker(sample):
            settings_of[item.nodeid.partition("[")[0]].append(item)
    for settings in settings_of.values():
        (number,) = settings[0].get_closest_marker(sample).args
        kept = {(2 * index + 1) * len(settings) // (2 * number) for index in range(number)}  # spread evenly
        for index, item in enumerate(settings):
            if index not in kept:
                item.add_marker(tier)


def pytest_sessionfinish() -> None:
    """Stop the ranks while this process still has time: a worker is killed soon after its session."""
    if ranks := sys.modules.get("tests.support.ranks"):
        ranks.stop_ranks()
