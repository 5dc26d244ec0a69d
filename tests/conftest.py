"""What holds for every test and for every process that it starts."""

import os
import sys

# torch asks for the name of each address that it connects to, and of 127.0.0.1 as IPv6 writes it only a name server can
# tell. Where one loses a question, five seconds are waited for the answer, in each of thousands of process groups.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


def pytest_sessionfinish() -> None:
    """The ranks end while this process may still take its time; a worker is soon killed after its session."""
    if ranks := sys.modules.get("tests.support.ranks"):
        ranks.stop_ranks()
