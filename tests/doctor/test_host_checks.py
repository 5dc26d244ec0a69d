"""Versions, devices, memory and limits of a machine."""

from __future__ import annotations

import math
import re
import tomllib
from pathlib import Path

import pytest

from layerzero.doctor.host_checks import (
    TESTED_PYTHON,
    TESTED_TORCH,
    check_backends,
    check_devices,
    check_file_limit,
    check_host,
    check_locked_memory,
    check_shared_memory,
    check_version,
)

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("found", "level"),
    [("2.10.1", "problem"), ("2.11.0", "ok"), ("2.13.0+cpu", "ok"), ("2.14.9", "ok"), ("2.15.0a0+git1", "note")],
)
def test_a_version_is_compared_with_the_supported_range(found: str, level: str) -> None:
    finding = check_version("torch", found, ((2, 11), (2, 14)))
    assert finding.level == level and f"torch {found}" in finding.text


def test_the_ranges_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["requires-python"] == ">={}.{}".format(*TESTED_PYTHON[0])
    assert "torch>={}.{}".format(*TESTED_TORCH[0]) in project["dependencies"]
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+)\.(\d+) \| (\d+)\.(\d+)\.\d+ \|", page, re.MULTILINE)
    assert max((int(a), int(b)) for a, b, _, _ in rows) == TESTED_PYTHON[1]
    assert max((int(a), int(b)) for _, _, a, b in rows) == TESTED_TORCH[1]


@pytest.mark.parametrize(
    ("kind", "names", "ranks", "has_nvidia", "cuda", "level", "text"),
    [
        ("cpu", [], 2, False, None, "ok", "no accelerator"),
        ("cpu", [], 2, True, None, "problem", "torch was built without CUDA"),
        ("cpu", [], 2, True, "13.0", "problem", "the driver supports CUDA 13.0"),
        ("cuda", ["A"] * 8, 8, True, "13.0", "ok", "8 cuda devices: A"),
        ("cuda", ["A"] * 4, 8, True, "13.0", "problem", "8 ranks on this node, but only 4 cuda devices"),
        ("cuda", ["A"], 8, True, "13.0", "ok", "1 cuda device: A"),  # a launcher may show each rank its own device
        ("cuda", ["A", "B"], 2, True, "13.0", "note", "A, B"),
    ],
)
def test_devices_are_compared_with_the_machine_and_the_ranks(
    kind: str, names: list[str], ranks: int, has_nvidia: bool, cuda: str | None, level: str, text: str
) -> None:
    (found,) = check_devices(kind, names, ranks, has_nvidia=has_nvidia, cuda=cuda)
    assert found.level == level and text in str(found)


def test_a_missing_backend_is_a_problem() -> None:
    assert [each.text for each in check_backends("cuda", lambda _: True)] == [
        "backend for cuda: nccl",
        "backend for cpu: gloo",
    ]
    found = check_backends("cuda", lambda backend: backend == "gloo")
    assert [each.level for each in found] == ["problem", "ok"] and "without nccl" in found[0].text
    assert len(check_backends("cpu", lambda _: True)) == 1


def test_a_small_shared_memory_is_a_problem_of_nccl() -> None:
    docker = (64 << 20, 64 << 20)
    assert [each.level for each in check_shared_memory(docker, 1e12, "cuda")] == ["problem"]
    assert [each.level for each in check_shared_memory(docker, 1e12, "cpu")] == ["note", "ok"]
    assert [each.level for each in check_shared_memory((1 << 34, 1 << 33), 1e12, "cuda")] == ["ok"]
    assert [each.level for each in check_shared_memory(None, math.inf, "cpu")] == ["note"]


def test_weights_in_shared_memory_are_limited_by_memory_outside_dev_shm() -> None:
    *_, found = check_shared_memory((64 << 20, 64 << 20), 24e9, "cpu")
    assert "24.0 GB of memory available" in found.text and "up to 1.33 B parameters" in found.text


@pytest.mark.parametrize(
    ("limit", "world", "local", "level", "text"),
    [
        (1024, 1, 1, "ok", "limit of open files per process: 1,024"),
        (1024, 1024, 8, "problem", "more than 1,157 sockets"),  # 1023 + 7 + 127
        (1157, 1024, 8, "problem", "may open only 1,157 files"),
        (1158, 1024, 8, "ok", "gloo's connections need 1,157"),
        (-1, 100_000, 8, "ok", "unlimited"),
    ],
)
def test_descriptors_suffice_for_the_connections_of_gloo(
    limit: int, world: int, local: int, level: str, text: str
) -> None:
    found = check_file_limit(limit, world, local)
    assert found.level == level and text in found.text


def test_locked_memory_matters_with_an_rdma_adapter() -> None:
    assert check_locked_memory(8 << 20, []).level == "ok"
    assert check_locked_memory(-1, ["mlx5_0"]).level == "ok"
    found = check_locked_memory(8 << 20, ["mlx5_0"])
    assert found.level == "problem" and "8.39 MB" in found.text and "mlx5_0" in found.text


def test_this_machine_can_be_checked() -> None:
    found = check_host({"NCCL_DEBUG": "INFO"})
    groups = list(dict.fromkeys(each.group for each in found))
    assert groups == ["Python and torch", "devices", "launch", "environment variables", "memory and limits"]
    assert any("NCCL_DEBUG=INFO" in each.text for each in found)
