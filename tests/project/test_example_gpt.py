"""The example's model, data and cost formulas, without a process group. Other tests run the example."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from gpt import GPT, GPTConfig
from matplotlib.figure import Figure
from run_picture import draw
from scheme_costs import scheme_costs
from stdlib_text import IGNORED, WindowSampler, is_held_out, load_corpus, validation_share

from layerzero import MemoryReport, TrafficReport

pytestmark = pytest.mark.slow

CONFIG = GPTConfig(layers=2, width=32, heads=2, context=16)


@pytest.fixture
def model() -> GPT:
    torch.manual_seed(0)
    return GPT(CONFIG).eval()


@pytest.fixture(scope="module")
def source_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("source")
    for index in range(100):
        (root / f"m{index}.py").write_bytes(b"# file %03d\n" % index * 20)
    for skipped in ("test", "site-packages"):
        (root / skipped).mkdir()
        (root / skipped / "m.py").write_bytes(b"never read\n" * 100)
    return root


def sampler(text: torch.Tensor, **changes: int) -> WindowSampler:
    settings = {"seq_len": 10, "batch_size": 2, "micro_batches": 2, "ranks": 4, "seed": 3} | changes
    return WindowSampler(text, **settings)


def windows_of_step(source: WindowSampler, step: int) -> list[tuple[int, ...]]:
    """Return the inputs of all ranks and micro-batches, in the order of the global counter."""
    return [
        tuple(row.tolist())
        for micro_batch in range(source.micro_batches)
        for rank in range(source.ranks)
        for row in source.batch(step=step, micro_batch=micro_batch, rank=rank).inputs
    ]


# --- text ---


def test_training_and_validation_share_no_file(source_tree: Path) -> None:
    corpus = load_corpus(root=source_tree)
    assert not set(corpus.train_files) & set(corpus.validation_files)
    assert all(is_held_out(name) for name in corpus.validation_files)
    assert not any(is_held_out(name) for name in corpus.train_files)
    assert 2 <= len(corpus.validation_files) <= 25


# --- batches ---

# Random bytes, so that no two windows of 10 look alike.
TEXT = torch.randint(256, (5_000,), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)


def test_no_window_is_drawn_twice_in_an_epoch() -> None:
    source = sampler(TEXT)
    steps = source.windows_per_epoch // source.windows_per_step
    seen = [window for step in range(steps) for window in windows_of_step(source, step)]
    assert len(set(seen)) == len(seen) == steps * 16


@pytest.mark.parametrize(
    "split",
    [
        {"ranks": 1, "micro_batches": 8, "batch_size": 2},
        {"ranks": 2, "micro_batches": 1, "batch_size": 8},
        {"ranks": 16, "micro_batches": 1, "batch_size": 1},
    ],
)
def test_a_step_has_the_same_windows_however_many_ranks_share_it(split: dict[str, int]) -> None:
    for step in (0, 7, 40):  # 40 lies in the second epoch
        assert windows_of_step(sampler(TEXT, **split), step) == windows_of_step(sampler(TEXT), step)


@pytest.mark.parametrize("ranks", [1, 3, 4, 16])
def test_validation_covers_the_same_windows_for_any_number_of_ranks(ranks: int) -> None:
    def share(rank: int, ranks: int) -> list:
        return validation_share(TEXT, windows=13, seq_len=10, batch_size=2, rank=rank, ranks=ranks)

    def real_rows(batches: list) -> list[tuple[int, ...]]:
        kept = torch.cat([batch.inputs[batch.targets[:, 0] != IGNORED] for batch in batches])
        return [tuple(row) for row in kept.tolist()]

    shares = [share(rank, ranks) for rank in range(ranks)]
    assert len({len(batches) for batches in shares}) == 1, "ranks would wait for each other's forwards"
    assert all(batch.inputs.shape == (2, 10) for batches in shares for batch in batches)
    assert sorted(row for batches in shares for row in real_rows(batches)) == sorted(real_rows(share(0, 1)))
    assert len(real_rows(share(0, 1))) == 13


# --- model ---


def test_later_tokens_do_not_change_earlier_logits(model: GPT) -> None:
    ids = torch.randint(256, (2, 12))
    changed = ids.clone()
    changed[:, 8:] = (changed[:, 8:] + 1) % 256
    before, after = model(ids), model(changed)
    torch.testing.assert_close(before[:, :8], after[:, :8], rtol=0, atol=1e-6)
    assert not torch.allclose(before[:, 8:], after[:, 8:], atol=1e-3)


# --- picture and formulas ---


def test_the_picture_shows_the_numbers_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: saved.append(figure))
    memory = MemoryReport({}, {"zero3_shard": 3_000_000, "optimizer": 2_000_000, "host_accumulator": 1})
    traffic = TrafficReport({}, {}, {"replica": 8_000_000, "zero3": 1})
    draw(
        str(tmp_path / "run.png"),
        [3.0, 2.0],
        memory,
        traffic,
        scheme_costs(80_000_000, ranks=4, zero3_size=2, micro_batches=3),
    )
    loss, stored, sent = saved[0].axes
    assert list(loss.lines[0].get_ydata()) == [3.0, 2.0]
    assert [text.get_text().strip() for text in stored.texts] == ["5", "320", "640"], "MB by hand, as below"
    assert [text.get_text().strip() for text in sent.texts] == ["4", "480", "160"], "MB per step"
    assert [bar.get_width() for bars in stored.containers for bar in bars] == [3, 2, 320, 640]


def test_costs_of_a_case_worked_by_hand() -> None:
    # 80 parameters on 2 nodes of 2 ranks, bf16 compute, fp32 gradients, 3 micro-batches: a rank keeps 20 elements of
    # what all ranks shard and 40 of what the ranks of a node shard; half of 40 leave the node.
    layerzero, fsdp, hsdp = scheme_costs(80, ranks=4, zero3_size=2, micro_batches=3)
    assert layerzero.state_bytes == 20 * 12 + 40 * 2 + 40 * 4
    assert fsdp.state_bytes == 20 * 16
    assert hsdp.state_bytes == 40 * 16
    assert layerzero.slow_bytes == 20 * (4 + 2)
    assert fsdp.slow_bytes == 20 * 3 * (2 + 2 + 4)
    assert hsdp.slow_bytes == 20 * 2 * 4


def test_full_accumulation_keeps_every_gradient() -> None:
    cost = scheme_costs(80, ranks=4, zero3_size=2, micro_batches=3, accumulation="full")[0]
    assert cost.state_bytes == 20 * 16 + 40 * 2 + 80 * 4


def test_on_a_single_node_shards_of_both_kinds_coincide() -> None:
    bf16 = scheme_costs(80, ranks=4, zero3_size=4, micro_batches=3)[0]
    fp32, fsdp, _ = scheme_costs(80, ranks=4, zero3_size=4, micro_batches=3, compute_bytes=4)
    assert bf16.state_bytes == 20 * 16 + 20 * 2
    assert fp32.state_bytes == fsdp.state_bytes == 20 * 16


def test_fp32_weights_contain_the_masters() -> None:
    cost = scheme_costs(80, ranks=4, zero3_size=2, micro_batches=3, compute_bytes=4)[0]
    assert cost.state_bytes == 20 * 8 + 40 * 4 + 40 * 4


def test_nothing_leaves_a_single_node() -> None:
    assert [cost.slow_bytes for cost in scheme_costs(80, ranks=4, zero3_size=4, micro_batches=3)] == [0, 0, 0]


def test_layerzero_bytes_do_not_grow_with_micro_batches() -> None:
    one, many = (scheme_costs(80, ranks=8, zero3_size=2, micro_batches=a)[0] for a in (1, 16))
    assert one == many
