"""Settings for all tests and for the processes that they start."""

import os
import sys

# torch looks up the host name of each address that it connects to. Only a name server can resolve 127.0.0.1 written as
# IPv6. If the server loses a query, each of thousands of process groups waits five seconds for the answer.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


def pytest_sessionfinish() -> None:
    """Stop the ranks while this process still has time: a worker is killed soon after its session."""
    if ranks := sys.modules.get("tests.support.ranks"):
        ranks.stop_ranks()
