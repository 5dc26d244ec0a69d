"""layerzero.megatron.save, load and export with expert parallelism: data-parallel ranks hold different experts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from typer.testing import CliRunner

import layerzero.megatron
from layerzero.checkpoint.whole_model_files import inspect
from layerzero.cli import app
from layerzero.megatron import chunk_checkpoint
from layerzero.megatron.global_names import expert_names_of
from tests.support.megatron_checkpoints import save as save_in_megatrons_format
from tests.support.megatron_parallel import SequenceParallelNorm
from tests.support.megatron_ranks import Case, make_ours, make_scheduler, megatron, train, whole_weights
from tests.support.ranks import on_ranks, run_ranks

# Metadata that Megatron-LM passes: each expert has its own name, so other expert-parallel sizes can load it.
METADATA = {"singleton_local_shards": True, "chained_optim_avoid_prefix": True}


def experts(size: int, **changes: Any) -> Case:
    """Expert-parallel run, with the experts spread over this number of data-parallel ranks."""
    settings = (
        ("num_moe_experts", 4),
        ("moe_router_topk", 2),
        ("moe_ffn_hidden_size", 16),
        ("moe_token_dispatcher_type", "allgather" if changes.get("tp", 1) > 1 else "alltoall"),
        ("add_bias_linear", False),
        ("expert_model_parallel_size", size),
    )
    return Case(layers=2, micro_batches=2, zero3_size=2, settings=settings).but(**changes)


class Grouped(nn.Module):
    """Experts named as in Transformer Engine's layers: linear_fc1.weight0, linear_fc1.weight1."""

    def __init__(self, experts: Any) -> None:
        super().__init__()
        self.act = experts.config.activation_func
        for name in ("linear_fc1", "linear_fc2"):
            layer = nn.Module()
            for number, expert in enumerate(experts.local_experts):
                layer.register_parameter(f"weight{number}", expert.get_submodule(name).weight)
            self.add_module(name, layer)

    def forward(self, tokens: Tensor, counts: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        found, sizes = [], counts.tolist()
        for number, (x, p) in enumerate(zip(tokens.split(sizes), probs.split(sizes), strict=True)):
            inner = self.act(x @ getattr(self.linear_fc1, f"weight{number}").T) * p[:, None]
            found.append(inner.to(x.dtype) @ getattr(self.linear_fc2, f"weight{number}").T)
        return torch.cat(found), None


class Shared(nn.Module):
    """Experts in one tensor per layer, as in Megatron's GroupedMLP."""

    def __init__(self, experts: Any) -> None:
        super().__init__()
        for number, name in ((1, "linear_fc1"), (2, "linear_fc2")):
            weights = [expert.get_submodule(name).weight for expert in experts.local_experts]
            joined = nn.Parameter(torch.cat([weight.detach() for weight in weights]))
            joined.allreduce = False  # type: ignore[attr-defined]
            self.register_parameter(f"weight{number}", joined)

    def forward(self, tokens: Tensor, counts: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        raise NotImplementedError("nobody trains it here")


Change = Callable[[Any], nn.Module]


def _all_of(chunks: list[Any], optimizer: Any) -> dict[str, Tensor]:
    """Return the full weights, optimizer states and averages."""
    found: dict[str, Tensor] = {}
    for index, (chunk, stepped, ema) in enumerate(zip(chunks, optimizer.sharded, optimizer.emas, strict=True)):
        values = {f"{index} {name}": weight for name, weight in chunk.named_parameters()}
        for name, state in stepped.state_dict_by_name()["state"].items():
            values |= {f"{index} {name} {key}": torch.as_tensor(value) for key, value in state.items()}
        if ema is not None:
            averages = ema.state_dict()["averages"]
            values |= {f"{index} {name} average": average for name, average in averages.items()}
        found |= {n: v.full_tensor() if hasattr(v, "full_tensor") else v for n, v in values.items()}
    return {name: value.detach().clone() for name, value in found.items()}


def _save_and_go_on(rank: int, folder: str, case: Case) -> tuple[Any, dict[str, Tensor]]:
    with megatron(case), SequenceParallelNorm.used():
        chunks, optimizer = make_ours(case, ema_decay=0.5)
        scheduler = make_scheduler(optimizer)
        train(case, chunks, optimizer, scheduler, range(2))
        layerzero.megatron.save(folder, chunks, optimizer, {"scheduler": scheduler.state_dict(), "step": 2})
        save_in_megatrons_format(f"{folder}-megatron", chunks, optimizer, scheduler, METADATA, parallel=False)
        return train(case, chunks, optimizer, scheduler, range(2, 4)), _all_of(chunks, optimizer)


def _go_on(rank: int, folder: str, case: Case) -> tuple[Any, dict[str, Tensor]]:
    with megatron(case), SequenceParallelNorm.used():
        chunks, optimizer = make_ours(case, ema_decay=0.5)
        for parameter in (p for chunk in chunks for p in chunk.parameters()):
            parameter.data.zero_()  # values that are not loaded stay visible
        scheduler = make_scheduler(optimizer)
        extra = layerzero.megatron.load(folder, chunks, optimizer)
        assert extra["step"] == 2
        scheduler.load_state_dict(extra["scheduler"])
        for group in optimizer.param_groups:
            assert group["is_expert_parallel"] <= (dict(case.settings)["expert_model_parallel_size"] > 1)
        return train(case, chunks, optimizer, scheduler, range(2, 4)), _all_of(chunks, optimizer)


def _merged_by_megatron(rank: int, path: str, case: Case) -> dict[str, Tensor]:
    """Return the compute weights under the names that Megatron uses on one rank."""
    with megatron(case):
        from megatron.core import dist_checkpointing  # noqa: PLC0415

        (chunk,), _ = make_ours(case)
        state = dist_checkpointing.load({"model": chunk.sharded_state_dict(metadata=METADATA)}, path)
        chunk.load_state_dict(state["model"])
        return whole_weights(chunk)


CASES = {
    "2": experts(2, zero3_size=4),
    "2 with muon": experts(2, optimizer="muon"),
    "4": experts(4),
    "1, sharded over more ranks": experts(1, expert_zero3_size=4),
    "2 beside tensor ranks": experts(2, tp=2, sequence_parallel=True),
    "2 of interleaved stages": experts(
        2, pp=2, chunks=2, layers=4, zero3_size=1, tied=False, dtype="float16", overflow_at=2
    ),
}


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("which", CASES)
def test_a_resumed_run_is_the_uninterrupted_one_and_export_has_all_experts(which: str, tmp_path: Path) -> None:
    case, path = CASES[which], tmp_path / "run"
    expected = run_ranks(_save_and_go_on, str(path), case, world_size=4)
    for one, other in zip(expected, run_ranks(_go_on, str(path), case, world_size=4), strict=True):
        assert one[0] == other[0]
        assert one[1].keys() == other[1].keys() and len(one[1]) > 20
        for name, value in one[1].items():
            assert torch.equal(value, other[1][name]), name
    alone = experts(1, layers=case.layers, tied=case.tied, zero3_size=1, dtype=case.dtype)
    whole = run_ranks(_merged_by_megatron, f"{path}-megatron", alone, world_size=1)[0]
    for part in path.glob("layout-*"):
        names = {name for name in inspect(part)[1].tensors if name.startswith("model.")}
        held = {number for number in range(5) if any(f".local_experts.{number}." in name for name in names)}
        assert held == {0, 1, 2, 3}
    done = CliRunner().invoke(app, ["export", str(path), str(tmp_path / "whole.safetensors")])
    assert done.exit_code == 0, done.output
    exported = load_file(tmp_path / "whole.safetensors")
    assert exported.keys() == whole.keys()
    for name, value in whole.items():
        assert torch.equal(exported[name].to(getattr(torch, case.dtype)).float(), value), name
    averages = CliRunner().invoke(app, ["export", "--ema", str(path), str(tmp_path / "averages.safetensors")])
    assert averages.exit_code == 0, averages.output
    means = load_file(tmp_path / "averages.safetensors")
    assert means.keys() == whole.keys()
    moved = [name for name, mean in means.items() if "local_experts" in name and not torch.equal(mean, exported[name])]
    assert len(moved) > case.layers


def _by_number(chunks: list[Any], optimizer: Any) -> dict[str, Tensor]:
    """Return the full tensors that this rank has a part of, named with the expert numbers of the full model."""
    stored = expert_names_of(chunks[0]).stored
    found = {}
    for name, value in _all_of(chunks, optimizer).items():
        before, own, *entry = name.split(" ")
        found[" ".join([before, stored(own), *entry])] = value
    return found


def _save(rank: int, folder: str, case: Case, change: Change | None = None) -> dict[str, Tensor]:
    with megatron(case):
        chunks, optimizer = make_ours(case, change=change, ema_decay=0.5)
        train(case, chunks, optimizer, make_scheduler(optimizer), range(2))
        layerzero.megatron.save(folder, chunks, optimizer)
        return _by_number(chunks, optimizer)


def _load(rank: int, folder: str, case: Case, change: Change | None = None) -> dict[str, Tensor]:
    with megatron(case):
        chunks, optimizer = make_ours(case, change=change, ema_decay=0.5)
        for parameter in (p for chunk in chunks for p in chunk.parameters()):
            parameter.data.zero_()
        layerzero.megatron.load(folder, chunks, optimizer)
        found = _by_number(chunks, optimizer)
        train(case, chunks, optimizer, make_scheduler(optimizer), range(2, 3))
        return found


def _everything(of_ranks: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Gather the full model. Tensors that several ranks hold must be equal."""
    together: dict[str, Tensor] = {}
    for found in of_ranks:
        for name, value in found.items():
            assert torch.equal(together.setdefault(name, value), value), name
    return together


def test_other_data_parallel_and_expert_parallel_ranks_may_load(tmp_path: Path) -> None:
    for saved, ranks, others in (
        (
            experts(2, zero3_size=4, expert_zero3_size=1),
            4,
            [(experts(2), 2), (experts(4, zero3_size=4), 4), (experts(1, expert_zero3_size=1), 2)],
        ),
        (experts(1), 2, [(experts(4), 4)]),
    ):
        path = f"{tmp_path}/{ranks}"
        expected = _everything(run_ranks(_save, path, saved, world_size=ranks))
        assert len({name for name in expected if ".local_experts.3." in name}) > 2 * saved.layers
        for case, world_size in others:
            loaded = _everything(run_ranks(_load, path, case, world_size=world_size))
            assert loaded.keys() == expected.keys()
            for name, value in expected.items():
                assert torch.equal(loaded[name], value), (name, case)


def _expect_equal(loaded: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert loaded.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(loaded[name], value), name


def test_experts_of_grouped_layers_have_their_numbers_too(tmp_path: Path) -> None:
    path = tmp_path / "grouped"
    expected = _everything(run_ranks(_save, str(path), experts(2), Grouped, world_size=4))
    ends = {f"linear_fc{layer}.weight{number}" for layer in (1, 2) for number in range(4)}
    held = {name.partition(".mlp.experts.")[2] for name in expected}
    for entry in ("", " exp_avg", " exp_avg_sq", " average"):
        assert {f"{end}{entry}" for end in ends} <= held
    (part,) = path.glob("layout-*")
    stored = set(inspect(part)[1].tensors)
    assert {name.partition(".mlp.experts.")[2] for name in stored if name.startswith("model.")} >= ends
    for case, world_size in ((experts(4), 4), (experts(1), 2)):
        _expect_equal(_everything(run_ranks(_load, str(path), case, Grouped, world_size=world_size)), expected)


WRAPPINGS: dict[str, Change | None] = {"plain": None, "wrapped": checkpoint_wrapper}


def test_wrappers_around_experts_leave_no_trace_in_a_checkpoint(tmp_path: Path) -> None:
    runs = {
        name: _everything(run_ranks(_save, f"{tmp_path}/{name}", experts(2), change, world_size=4))
        for name, change in WRAPPINGS.items()
    }
    _expect_equal(runs["wrapped"], runs["plain"])
    loaded = run_ranks(_load, f"{tmp_path}/plain", experts(4), checkpoint_wrapper, world_size=4)
    _expect_equal(_everything(loaded), runs["plain"])
    for flags in ([], ["--ema"]):
        found = []
        for name in WRAPPINGS:
            file = tmp_path / f"{name}{len(flags)}.safetensors"
            done = CliRunner().invoke(app, ["export", *flags, f"{tmp_path}/{name}", str(file)])
            assert done.exit_code == 0, done.output
            found.append(load_file(file))
        _expect_equal(found[1], found[0])


@on_ranks(world_size=4)
def test_other_experts_than_the_models_are_named_and_those_without_a_number_refused(rank: int, tmp_path: Path) -> None:
    more, fewer = (experts(2).but(settings=(("num_moe_experts", n), *experts(2).settings[1:])) for n in (8, 4))
    with megatron(more):
        chunks, optimizer = make_ours(more)
        layerzero.megatron.save(f"{tmp_path}/more", chunks, optimizer)
        smaller, _ = make_ours(fewer)
        layerzero.megatron.save(f"{tmp_path}/fewer", smaller, None)
        with pytest.raises(ValueError, match=r"router.weight: expected shape") as caught:
            layerzero.megatron.load(f"{tmp_path}/fewer", chunks, None)
        assert "unexpected" not in str(caught.value)
        assert ("missing: decoder" in str(caught.value)) == (
            rank % 2 == 1
        )  # the checkpoint has none of this rank's experts
        with pytest.raises(ValueError, match=r"unexpected: decoder.*local_experts\.[4-7]") as caught:
            layerzero.megatron.load(f"{tmp_path}/more", smaller, None)
        assert "missing" not in str(caught.value)
        shared, _ = make_ours(more, change=Shared)
        for call in (layerzero.megatron.save, layerzero.megatron.load):
            with pytest.raises(
                ValueError, match=r"mlp.experts.weight1', because its name does not contain the index of its expert"
            ):
                call(f"{tmp_path}/odd", shared, None)
        ema = layerzero.EMA(chunks[0]).state_dict()
        averages = {n: rows for n, rows in ema["averages"].items() if ".experts." not in n}
        layerzero.megatron.save(f"{tmp_path}/common", chunks, optimizer, {"ema": averages})
        with pytest.raises(TypeError, match=r"ema.averages.*experts\..* which is a different parameter on other ranks"):
            layerzero.megatron.save(f"{tmp_path}/odd", chunks, optimizer, {"ema": ema})
        fails = mock.patch.object(chunk_checkpoint, "expert_names_of", side_effect=KeyError("a layer"))
        for call in (layerzero.megatron.save, layerzero.megatron.load):
            with fails if rank == 1 else nullcontext(), pytest.raises((KeyError, RuntimeError), match="a layer"):
                call(f"{tmp_path}/odd", chunks, optimizer)
        assert not Path(f"{tmp_path}/odd").exists()
