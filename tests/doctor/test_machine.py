"""Versions, devices, launcher, variables, shared memory and packages of one machine."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

import layerzero
from layerzero.doctor.findings import Finding
from layerzero.doctor.machine import (
    TESTED_PYTHON,
    TESTED_TORCH,
    check_descriptors,
    check_devices,
    check_distributions,
    check_launch,
    check_machine,
    check_shared_memory,
    check_threads,
    check_variables,
    check_version,
    installed_versions,
    whole_number,
)

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(layerzero.__file__).parent
LAUNCHED = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}


def install(folder: Path, name: str, version: str, *, files: tuple[str, ...] = ()) -> None:
    """Write a distribution as pip installs it: its files, its metadata and the list of its files."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n")
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in (*files, f"{info.name}/METADATA")))
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).touch()


def levels(findings: list[Finding]) -> list[str]:
    return [finding.level for finding in findings]


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
        ("cpu", [], 2, True, None, "problem", "Install a build of torch with CUDA"),
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
    found = check_devices(kind, names, ranks, has_nvidia=has_nvidia, cuda=cuda)
    assert found.level == level and text in str(found)


@pytest.mark.parametrize(
    ("change", "level", "text"),
    [
        ({}, "ok", "4 ranks, 2 on each node"),
        ({"LOCAL_WORLD_SIZE": None}, "problem", "zero3_size then has no default"),
        ({"LOCAL_WORLD_SIZE": "3"}, "problem", "LOCAL_WORLD_SIZE=3 does not divide WORLD_SIZE=4"),
        (dict.fromkeys(LAUNCHED), "ok", "one process"),
    ],
)
def test_the_variables_of_a_launcher_are_checked(change: dict[str, str | None], level: str, text: str) -> None:
    changed = {**LAUNCHED, **change}
    found = check_launch({name: value for name, value in changed.items() if value is not None})
    assert found.level == level and text in str(found)


@pytest.mark.parametrize(
    ("threads", "cores", "ranks", "kind", "level", "text"),
    [
        (8, 8, 1, "cpu", "ok", "8 threads per rank, 8 cores"),
        (1, 2, 4, "cpu", "ok", "1 thread per rank, 2 cores"),
        (4, 8, 4, "cpu", "problem", "OMP_NUM_THREADS=2"),
        (4, 8, 4, "cuda", "note", "OMP_NUM_THREADS=2"),
        (1, 64, 8, "cuda", "note", "OMP_NUM_THREADS=8"),
        (8, 64, 8, "cuda", "ok", "8 threads per rank, 64 cores"),
    ],
)
def test_ranks_share_the_cores(threads: int, cores: int, ranks: int, kind: str, level: str, text: str) -> None:
    found = check_threads(threads, cores, ranks, kind)
    assert found.level == level and text in str(found)


@pytest.mark.parametrize(
    ("world", "local", "limit", "level"),
    [(8, 8, 1024, "ok"), (512, 8, 1024, "problem"), (512, 8, 4096, "ok"), (4096, 8, -1, "ok"), (1, 1, 20, "problem")],
)
def test_the_limit_of_open_files_is_compared_with_the_connections(
    world: int, local: int, limit: int, level: str
) -> None:
    found = check_descriptors({"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(local)}, limit)
    assert found.level == level and f"a limit of {limit}" in found.text


@pytest.mark.parametrize(
    ("name", "value", "on_gpu", "on_cpu"),
    [
        ("NCCL_P2P_DISABLE", "1", "problem", "note"),
        ("NCCL_P2P_DISABLE", "0", "ok", "ok"),
        ("NCCL_SHM_DISABLE", "1", "problem", "note"),
        ("TORCH_NCCL_BLOCKING_WAIT", "1", "problem", "note"),
        ("TORCH_NCCL_BLOCKING_WAIT", "false", "ok", "ok"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", "problem", "note"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1", "ok", "ok"),
        ("CUDA_LAUNCH_BLOCKING", "1", "problem", "note"),
        ("PYTORCH_NO_CUDA_MEMORY_CACHING", "1", "problem", "note"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "1", "problem", "note"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "32", "ok", "ok"),
        ("TORCH_DISTRIBUTED_DEBUG", "detail", "problem", "problem"),
        ("TORCH_DISTRIBUTED_DEBUG", "INFO", "ok", "ok"),
        ("NCCL_IB_DISABLE", "1", "ok", "ok"),  # without an adapter
        ("NCCL_ALGO", "Ring", "note", "note"),
        ("NCCL_IB_HCA", "mlx5", "ok", "ok"),
    ],
)
def test_a_variable_is_judged_by_its_value_and_the_device(name: str, value: str, on_gpu: str, on_cpu: str) -> None:
    for kind, expected in (("cuda", on_gpu), ("cpu", on_cpu)):
        *found, listed = check_variables({name: value, "HOME": "/"}, kind)
        assert levels(found or [listed]) == [expected]
        assert all(f"{name}={value}" in each.text for each in found) and listed.text == f"set: {name}={value}"


def test_disabled_infiniband_is_a_problem_where_there_is_an_adapter() -> None:
    found, _ = check_variables({"NCCL_IB_DISABLE": "1"}, "cuda", adapters=["mlx5_0", "mlx5_1"])
    assert found.level == "problem" and "mlx5_0, mlx5_1" in found.text


def test_a_small_shared_memory_is_a_problem_of_nccl() -> None:
    sizes = {64 << 20: "problem", 0: "problem", 1 << 34: "ok"}
    assert {size: check_shared_memory(size, "cuda").level for size in sizes} == sizes
    assert check_shared_memory(64 << 20, "cpu").level == "note"


def test_only_digits_are_a_number() -> None:
    values = {"A": "12", "B": "", "C": "-1", "D": "x"}
    assert [whole_number(values, name) for name in "ABCDE"] == [12, None, None, None, None]


def test_another_version_than_the_imported_one_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    install(tmp_path, "torch-layerzero", layerzero.__version__)
    (found,) = check_distributions()
    assert found.level == "ok" and str(PACKAGE) in found.text
    install(tmp_path, "torch_layerzero", "0.0.9")
    (found,) = check_distributions()
    assert found.level == "problem" and "torch-layerzero 0.0.9 is installed" in found.text


def test_a_strangers_distribution_is_a_problem_if_it_installs_the_same_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    install(tmp_path, "LayerZero", "0.5.13", files=("LayerZero/__init__.py",))
    assert levels(check_distributions()) == ["ok"], "a stranger with another module"
    install(tmp_path, "LayerZero", "0.5.14", files=("layerzero_of_others/__init__.py", "layerzero/Trainer.py"))
    (found,) = check_distributions()
    assert found.level == "problem" and "LayerZero 0.5.14" in found.text and str(tmp_path) in found.text
    assert "pip uninstall layerzero" in found.fix


def test_versions_are_found_by_normalized_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, version in (("second", "1"), ("first", "2")):
        (tmp_path / folder).mkdir()
        install(tmp_path / folder, "Made_Up.Core", version)
        (tmp_path / folder / "broken-1.dist-info").mkdir()  # what an interrupted pip leaves behind
        monkeypatch.syspath_prepend(tmp_path / folder)
    assert installed_versions(["made-up-core", "made-up-other"]) == {"made-up-core": "2"}


def test_this_machine_can_be_checked() -> None:
    found = check_machine({"NCCL_DEBUG": "INFO"})
    groups = ["Python and torch", "devices", "launch", "environment variables", "memory", "packages"]
    assert list(dict.fromkeys(each.group for each in found)) == groups
    assert any("NCCL_DEBUG=INFO" in each.text for each in found)
