"""Reports are tables with units."""

from __future__ import annotations

import re

import pytest
import torch

import layerzero
from tests.support.models import TiedTransformer, update
from tests.support.ranks import mesh_of, run_ranks

pytestmark = pytest.mark.slow


def _printed(rank: int) -> tuple[str, str]:
    model = layerzero.shard_model(TiedTransformer(), mesh=mesh_of(2), units=TiedTransformer.UNITS)
    optimizer = layerzero.shard_optimizer(torch.optim.AdamW(model.parameters()), model)
    for step in range(2):
        layerzero.traffic(model, reset=True)
        TiedTransformer.loss(model, TiedTransformer.batch(step=step, rank=rank)).backward()
        update(optimizer)
    report, traffic = layerzero.memory(model), layerzero.traffic(model)
    for collective in ("hop1", "hop2", "refresh"):
        assert traffic.predicted[collective] == traffic.bytes[collective], collective
    assert "metadata" not in traffic.predicted
    rows = {line.split("  ")[0]: line.split()[-4:] for line in str(report).splitlines()}
    for kind in ("zero3_shard", "accumulator", "reduce_buffer"):
        predicted, measured = " ".join(rows[kind][:2]), " ".join(rows[kind][2:])
        assert predicted == measured != "0 B", report
    return str(report), str(traffic)


def test_reports_are_tables_with_units() -> None:
    memory, traffic = run_ranks(_printed)[0]
    assert re.search(r"^memory of this rank +predicted +measured$", memory, re.MULTILINE)
    assert re.search(r"^peak of a step +[\d.]+ .B +[\d.]+ .B$", memory, re.MULTILINE)
    assert re.search(r"^gather +\d+ ", traffic, re.MULTILINE)
    assert re.search(r"^axis replica +[\d.]+ .B$", traffic, re.MULTILINE)
