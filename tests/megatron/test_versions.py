"""layerzero.megatron accepts the supported releases of Megatron-Core and refuses others by version number."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

import layerzero.megatron
from layerzero.megatron.versions import SUPPORTED, release, version
from tests.support.megatron_cpu import cpu_instead_of_cuda
from tests.support.megatron_ranks import Case, Run, assert_same, make_ours, make_reference, megatron, run
from tests.support.ranks import run_ranks

ROOT = Path(__file__).parents[2]
DATA = Case(zero3_size=2, micro_batches=1, layers=2, steps=4)
OTHERS = ("0.15.3", "0.17.1", "0.18.2", "0.20.0rc0+d98e8a6", "1.16.1")


def other(number: str) -> mock._patch[str]:
    """Return Megatron-Core with another version number."""
    import megatron.core  # noqa: PLC0415

    return mock.patch.object(megatron.core, "__version__", number)


def test_the_tests_run_on_the_releases_that_messages_and_requirements_name() -> None:
    pinned = {
        found
        for file in ("requirements-megatron.txt", "requirements-megatron-0.19.txt")
        for found in re.findall(r"^megatron-core==(\S+)", (ROOT / file).read_text(), re.MULTILINE)
    }
    assert pinned == {release for release, _ in SUPPORTED.values()}
    with cpu_instead_of_cuda():
        # Megatron-Core appends the revision of the checkout that it runs in.
        assert SUPPORTED[release()][0] == version().partition("+")[0]


@pytest.mark.parametrize("number", OTHERS)
def test_installing_into_another_release_is_refused_by_number(number: str) -> None:
    with cpu_instead_of_cuda(), other(number), pytest.raises(RuntimeError) as raised:
        layerzero.megatron.install()
    for part in (f"megatron-core {number}: ", "Install megatron-core 0.16.* or 0.19.*", "0.16.1 and 0.19.2"):
        assert part in str(raised.value)


def _wraps(rank: int) -> list[str]:
    said = []
    for number in ("0.17.1", "0.17.1" if rank else version(), version() + (".post1" if rank else "")):
        with megatron(DATA), other(number), pytest.raises((RuntimeError, ValueError)) as raised:
            make_ours(DATA)
        said.append(str(raised.value))
    return said


def test_wrapping_in_another_release_is_refused_on_all_ranks() -> None:
    for everywhere, on_one, different in run_ranks(_wraps, world_size=2):
        assert "does not support megatron-core 0.17.1" in everywhere
        assert "does not support megatron-core 0.17.1" in on_one
        assert "megatron-core" in different and ".post1" in different


def _skips(rank: int) -> list[bool]:
    """Return which steps updated the model. Before 0.19, Megatron-Core does not read the setting."""
    from megatron.core.optimizer import OptimizerConfig  # noqa: PLC0415

    is_known = "grad_norm_skip_threshold" in {field.name for field in dataclasses.fields(OptimizerConfig)}

    def limited(threshold: float) -> mock._patch[object]:
        from tests.support import megatron_ranks  # noqa: PLC0415

        make = megatron_ranks.optimizer_config

        def configure(case: Case) -> object:
            config = make(case)
            config.grad_norm_skip_threshold = threshold
            return config

        return mock.patch.object(megatron_ranks, "optimizer_config", configure)

    with megatron(DATA):
        norms = [float(step[1] or 0.0) for step in run(DATA, make_reference).steps]
    threshold = (max(norms) + min(norms)) / 2
    runs: list[Run] = []
    for make in (make_ours, make_reference)[: 1 + is_known]:
        with megatron(DATA), limited(threshold):
            runs.append(run(DATA, make))
    if is_known:
        assert_same(runs[0], runs[1], DATA)
    assert all(step[0] is ((step[1] or 0.0) <= threshold) for step in runs[0].steps), (threshold, runs[0].steps)
    return [step[0] for step in runs[0].steps]


def test_steps_with_large_norms_are_skipped_as_megatron_skips_them() -> None:
    assert {*run_ranks(_skips, world_size=2)[0]} == {True, False}
    assert not dist.is_initialized()
