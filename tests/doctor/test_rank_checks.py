"""Comparison of the reports of ranks, without processes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from layerzero.doctor.findings import Finding
from layerzero.doctor.rank_checks import RankReport, check_nodes, check_ranks, format_ranks, merge_findings, node_size

NOTE = Finding("one", "note", "a note")
PROBLEM = Finding("two", "problem", "a problem", "Change it")


def reports(hosts: str, **changes: RankReport) -> dict[int, RankReport]:
    """Return the reports of ranks on hosts named by letters; `changes` replace fields by ``rank_1={...}``."""
    found = {}
    for rank, host in enumerate(hosts):
        report = RankReport(f"{host} boot", hosts.count(hosts[0]), "", {"torch": "2.13.0"}, ())
        found[rank] = replace(report, **changes.get(f"rank_{rank}", {}))
    return found


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([3], "rank 3"), ([0, 1], "ranks 0-1"), ([7, 0, 1, 2, 5], "ranks 0-2, 5, 7"), ([1, 3], "ranks 1, 3")],
)
def test_neighboring_ranks_are_written_as_a_range(ranks: list[int], text: str) -> None:
    assert format_ranks(ranks) == text


def test_equal_ranks_are_fine() -> None:
    assert [each.level for each in check_ranks(reports("aabb"))] == ["ok"]
    (found,) = check_nodes(reports("aabb"))
    assert found.level == "ok" and found.text == "2 nodes: ranks 0-1 on a; ranks 2-3 on b"


def test_a_difference_names_values_and_ranks() -> None:
    other = {"facts": {"torch": "2.12.0", "NCCL_ALGO": "Ring"}}
    first, second = check_ranks(reports("aabb", rank_1=other, rank_3=other))
    assert first.text == "torch differs: 2.13.0 on ranks 0, 2 and 2.12.0 on ranks 1, 3" and first.level == "problem"
    assert (
        second.text == "NCCL_ALGO differs: not set on ranks 0, 2 and Ring on ranks 1, 3" and second.level == "problem"
    )


def test_different_accelerators_are_noted() -> None:
    (found,) = check_ranks(reports("ab", rank_1={"facts": {"torch": "2.13.0", "accelerators": "B"}}))
    assert found.level == "note"


@pytest.mark.parametrize(
    ("hosts", "size"),
    [("aabb", 2), ("aaaa", 4), ("ab", 1), ("aab", None), ("abab", None), ("abba", None)],
)
def test_nodes_are_measured_only_if_they_are_blocks_of_equal_size(hosts: str, size: int | None) -> None:
    assert node_size(reports(hosts)) == size


def problems(found: list[Finding]) -> list[str]:
    return [each.text for each in found if each.level == "problem"]


def test_ranks_that_alternate_between_nodes_are_a_problem() -> None:
    assert problems(check_nodes(reports("abab"))) == [
        "a has ranks 0, 2, but weights are sharded over consecutive ranks, so gathers cross nodes",
        "b has ranks 1, 3, but weights are sharded over consecutive ranks, so gathers cross nodes",
    ]


def test_a_wrong_number_of_local_ranks_is_a_problem() -> None:
    one = {"local_world_size": 1}
    found = problems(check_nodes(reports("aa", rank_0=one, rank_1=one)))
    assert found == ["LOCAL_WORLD_SIZE is 1, but a has 2: ranks 0-1"]
    found = problems(check_nodes(reports("aa", rank_1=one)))
    assert found == ["LOCAL_WORLD_SIZE differs: 2 on rank 0 and 1 on rank 1"]
    missing = {"local_world_size": None}
    assert problems(check_nodes(reports("aa", rank_0=missing, rank_1=missing))) == [], "zero3_size is then required"


def test_two_ranks_on_one_device_are_a_problem() -> None:
    devices = {f"rank_{rank}": {"device": device} for rank, device in enumerate("xxyx")}
    assert problems(check_nodes(reports("aabb", **devices))) == ["ranks 0-1 use the same device of a"]


def test_many_nodes_are_abbreviated() -> None:
    assert check_nodes(reports("abcdefghij"))[0].text.endswith("rank 7 on h; and 2 more nodes")


def test_findings_of_some_ranks_carry_their_names() -> None:
    mine, fine = Finding("one", "ok", "12 GB"), Finding("one", "ok", "13 GB")
    merged = merge_findings(
        reports(
            "aab",
            rank_0={"findings": (mine, NOTE)},
            rank_1={"findings": (fine, NOTE, PROBLEM)},
            rank_2={"findings": (fine, NOTE, PROBLEM)},
        )
    )
    assert merged == [mine, NOTE, replace(PROBLEM, text="ranks 1-2: a problem")]


def test_a_report_survives_json() -> None:
    report = RankReport.of_this_rank("0.1.0", {"NCCL_ALGO": "Ring", "LOCAL_WORLD_SIZE": "2"}, [NOTE, PROBLEM])
    assert report.facts["NCCL_ALGO"] == "Ring" and report.local_world_size == 2
    assert RankReport.from_json(report.to_json()) == report
