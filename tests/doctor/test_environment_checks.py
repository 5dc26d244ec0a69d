"""Environment variables, network interfaces, launchers and threads."""

from __future__ import annotations

import pytest

from layerzero.doctor.environment_checks import (
    _OVERRIDES,
    _RULES,
    check_interfaces,
    check_launch,
    check_threads,
    check_variables,
    relevant_variables,
    whole_number,
)
from layerzero.doctor.findings import Finding

LAUNCHED = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}


def levels(findings: list[Finding]) -> list[str]:
    return [finding.level for finding in findings]


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
        ("CUDA_DEVICE_MAX_CONNECTIONS", "1", "problem", "ok"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "32", "ok", "ok"),
        ("TORCH_DISTRIBUTED_DEBUG", "detail", "problem", "problem"),
        ("TORCH_DISTRIBUTED_DEBUG", "INFO", "ok", "ok"),
        ("NCCL_DEBUG", "INFO", "note", "note"),
        ("NCCL_DEBUG", "WARN", "ok", "ok"),
        ("NCCL_ALGO", "Ring", "note", "note"),
        ("PYTORCH_ALLOC_CONF", "expandable_segments:True", "ok", "ok"),
        ("NCCL_IB_HCA", "mlx5", "ok", "ok"),
    ],
)
def test_a_variable_is_judged_by_its_value_and_the_device(name: str, value: str, on_gpu: str, on_cpu: str) -> None:
    for device_type, expected in (("cuda", on_gpu), ("cpu", on_cpu)):
        (found,) = check_variables({name: value, "HOME": "/"}, device_type)
        assert found.level == expected and f"{name}={value}" in found.text.replace("DETAIL", "detail"), found


def test_without_variables_one_line_says_so() -> None:
    (found,) = check_variables({"HOME": "/"}, "cuda")
    assert found.level == "ok" and found.text.startswith("no NCCL, CUDA")


def test_disabled_infiniband_is_a_problem_where_there_is_an_adapter() -> None:
    environment = {"NCCL_IB_DISABLE": "1"}
    assert levels(check_variables(environment, "cuda")) == ["ok"]
    (found,) = check_variables(environment, "cuda", rdma=["mlx5_0", "mlx5_1"])
    assert found.level == "problem" and "mlx5_0, mlx5_1" in found.text


def test_every_variable_that_is_set_is_shown_once() -> None:
    environment = dict.fromkeys({*(rule.name for rule in _RULES), *_OVERRIDES, "NCCL_IB_TC", "GLOO_LOG_LEVEL"}, "1")
    text = "\n".join(map(str, check_variables(environment, "cuda")))
    assert {name: text.count(f"{name}=1") for name in environment if text.count(f" {name}=1") != 1} == {}


def test_a_missing_interface_is_a_problem() -> None:
    interfaces = ["lo", "eth0", "eth1", "docker0"]

    def gloo(value: str) -> list[str]:
        return levels(check_interfaces({"GLOO_SOCKET_IFNAME": value}, interfaces, "cpu"))

    def nccl(value: str, device_type: str = "cuda") -> list[str]:
        return levels(check_interfaces({"NCCL_SOCKET_IFNAME": value}, interfaces, device_type))

    assert gloo("eth0") == gloo("eth0,eth1") == ["ok"]
    assert gloo("eth") == gloo("eth0,ib0") == ["problem"], "gloo needs full names"
    assert nccl("eth") == nccl("ib,eth") == nccl("=eth1") == nccl("^docker,lo") == nccl("^=eth0") == ["ok"]
    assert nccl("ib") == nccl("=eth") == nccl("^docker,lo,eth") == ["problem"]
    assert nccl("ib", "cpu") == ["note"]


def test_a_host_name_that_resolves_to_the_loopback_is_a_problem_between_nodes() -> None:
    assert check_interfaces({}, ["lo", "eth0"], "cpu") == []
    assert levels(check_interfaces({}, ["lo", "eth0"], "cpu", loopback=True)) == ["problem"]
    assert levels(check_interfaces({"GLOO_SOCKET_IFNAME": "eth0"}, ["lo", "eth0"], "cpu", loopback=True)) == ["ok"]


@pytest.mark.parametrize(
    ("change", "expected", "text"),
    [
        ({}, ["ok"], "4 ranks, 2 on each node"),
        ({"RANK": None}, ["problem", "ok"], "but these variables are not set: RANK"),
        (
            {"MASTER_ADDR": None, "MASTER_PORT": None},
            ["problem", "ok"],
            "these variables are not set: MASTER_ADDR, MASTER_PORT",
        ),
        ({"LOCAL_WORLD_SIZE": None}, ["note"], "does not know the number of ranks per node"),
        ({"LOCAL_WORLD_SIZE": "3"}, ["problem"], "LOCAL_WORLD_SIZE=3 does not divide WORLD_SIZE=4"),
        ({"WORLD_SIZE": "many"}, ["problem"], "WORLD_SIZE=many is not a number"),
        (dict.fromkeys(LAUNCHED), ["ok"], "one process"),
        (
            {"TORCHELASTIC_MAX_RESTARTS": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"},
            ["ok", "problem"],
            "Set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1",
        ),
    ],
)
def test_the_variables_of_a_launcher_are_checked(change: dict[str, str], expected: list[str], text: str) -> None:
    environment = {name: value for name, value in {**LAUNCHED, **change}.items() if value is not None}
    found = check_launch(environment)
    assert levels(found) == expected and text in "\n".join(map(str, found))


@pytest.mark.parametrize(
    ("threads", "cores", "ranks", "device_type", "level", "text"),
    [
        (8, 8, 1, "cpu", "ok", "8 threads per rank, 8 cores"),
        (1, 2, 4, "cpu", "ok", "1 thread per rank, 2 cores"),
        (4, 8, 4, "cpu", "problem", "OMP_NUM_THREADS=2"),
        (4, 8, 4, "cuda", "note", "OMP_NUM_THREADS=2"),
        (1, 64, 8, "cuda", "note", "OMP_NUM_THREADS=8"),
        (8, 64, 8, "cuda", "ok", "8 threads per rank, 64 cores"),
    ],
)
def test_ranks_share_the_cores(threads: int, cores: int, ranks: int, device_type: str, level: str, text: str) -> None:
    found = check_threads(threads, cores, ranks, device_type)
    assert found.level == level and text in str(found)


def test_variables_that_name_devices_of_a_machine_may_differ_between_ranks() -> None:
    environment = {
        "NCCL_ALGO": "Ring",
        "NCCL_IB_HCA": "mlx5_0",
        "GLOO_SOCKET_IFNAME": "eth0",
        "CUDA_VISIBLE_DEVICES": "1",
    }
    environment |= {"RANK": "1", "WORLD_SIZE": "2", "OMP_NUM_THREADS": "4", "HOME": "/"}
    assert list(relevant_variables(environment)) == ["NCCL_ALGO", "OMP_NUM_THREADS", "WORLD_SIZE"]


def test_only_digits_are_a_number() -> None:
    values = {"A": "12", "B": "", "C": "-1", "D": "x"}
    assert [whole_number(values, name) for name in "ABCDE"] == [12, None, None, None, None]
