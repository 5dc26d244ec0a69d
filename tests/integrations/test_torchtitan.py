"""layerzero.integrations.torchtitan in torchtitan's trainer, compared with its FSDP2 on the same data."""

from __future__ import annotations

import contextlib
import io
import sys
import time
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

if find_spec("torchtitan") is None or find_spec("transformers") is None:
    pytest.skip(
        "needs torchtitan and transformers: pip install --no-deps -r requirements-loops.txt", allow_module_level=True
    )

from tests.support.torchtitan_cpu import HEADS, LAYERS, VOCABULARY, WIDTH, mixture, on_cpu, summing, tiny

# isort: split
from torchtitan.components.optimizer import ParamGroupConfig
from torchtitan.config import ConfigManager
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.trainer import Trainer
from transformers import LlamaConfig, LlamaForCausalLM

import layerzero
from layerzero.integrations.torchtitan import OptimizersContainer, parallelize, with_layerzero
from tests.support.loops import assert_like, launched
from tests.support.ranks import on_ranks, run_ranks

_NoSleep = SimpleNamespace(**(vars(time) | {"sleep": lambda seconds: None}))


def train(config: Any, *, keep: bool = False) -> tuple[list[float], list[float], dict[str, Tensor], Any]:
    """Train; return losses and norms as torchtitan logs them, the final full weights, and the trainer."""
    losses, norms = [], []
    with launched(), on_cpu(), contextlib.redirect_stderr(io.StringIO()):
        trainer = config.build()

        def log(step: int, loss: float, most: float, norm: float, **_: Any) -> None:
            losses.append(loss)
            norms.append(norm)

        if not keep:
            overwrite(trainer.model_parts)
        with mock.patch.object(trainer.metrics_processor, "log", log), mock.patch("torchtitan.trainer.time", _NoSleep):
            trainer.train()
        trainer.close()
        return losses, norms, weights_of(trainer.model_parts), trainer


def plain(name: str) -> str:
    return name.replace("_checkpoint_wrapped_module.", "")


def drawn(name: str, shape: torch.Size) -> Tensor:
    generator = torch.Generator().manual_seed(sum(name.encode()))
    return torch.randn(shape, generator=generator) * 0.02 + ("norm" in name)


@torch.no_grad()
def overwrite(parts: list[torch.nn.Module]) -> None:
    """Write the same weights into the model of every rank."""
    for part in parts:
        for name, parameter in part.named_parameters():
            whole = drawn(plain(name), parameter.shape)
            if type(parameter.data) is DTensor:
                whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements)
            parameter.copy_(whole)


@torch.no_grad()
def weights_of(parts: list[torch.nn.Module]) -> dict[str, Tensor]:
    held = {plain(name): p.detach() for part in parts for name, p in part.named_parameters()}
    return {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in held.items()}


def settings(folder: str, how: str) -> Trainer.Config:
    made = mixture(folder) if how.startswith("experts") else tiny(folder)
    if how == "tensor parallel":
        made.parallelism.data_parallel_replicate_degree, made.parallelism.tensor_parallel_degree = 1, 2
    if how == "replicated":  # torchtitan's DDP
        made.parallelism.data_parallel_replicate_degree = 4
    if how in ("experts, parallel", "experts, kept", "experts, fully_shard"):
        made.parallelism.data_parallel_replicate_degree, made.parallelism.expert_parallel_degree = 1, 2
    if how == "experts, replicas":
        made.parallelism.expert_parallel_degree = 2
    if how == "kept":
        made.parallelism.data_parallel_replicate_degree = 1
    if how == "checkpointed":
        made.activation_checkpoint = SelectiveAC.Config()
    if how == "whole loss":
        made.loss = made.loss.loss_fn
    if how == "tied":
        made.model_spec.model.enable_weight_tying = True
        made.model_spec.model.tok_embeddings.param_init = {"weight": skip_param_init}
    if how == "bf16":
        made.training.mixed_precision_param = "bfloat16"
    return made


def _same(rank: int, folder: str, ways: list[str]) -> None:
    theirs: dict[str, Any] = {}  # from settings to their run; several ways may share settings
    for how in ways:
        said = _SETTINGS_OF.get(how, how)
        if said not in theirs:
            theirs = {said: train(summing(settings(folder, said)))[:3]}
        try:
            _compare(folder, how, *theirs[said])
        except Exception as error:
            raise AssertionError(f"trained as {how!r}") from error


def _compare(folder: str, how: str, losses: list[float], norms: list[float], weights: dict[str, Tensor]) -> None:
    mine = with_layerzero(settings(folder, how), accumulation="full" if how == "full" else "sharded")
    replaced = contextlib.nullcontext()
    if how.endswith("fully_shard"):  # called by torchtitan's own parallelize_fn, bottom-up
        mine = settings(folder, how)
        mine.optimizer = with_layerzero(settings(folder, how)).optimizer
        replaced = mock.patch("torchtitan.distributed.fsdp.fully_shard", layerzero.fully_shard)
    if how == "by hand":  # in torchtitan's trainer
        mine = settings(folder, how)
        mine.model_spec.parallelize_fn = parallelize
        mine.optimizer = with_layerzero(mine).optimizer
    if how == "kept":
        mine.parallelism.fsdp_reshard_after_forward = 2
    if how == "kept until the step":
        mine.parallelism.fsdp_reshard_after_forward = "step"
    if how == "experts, kept":  # on four ranks, two of which share experts
        mine.parallelism.fsdp_reshard_after_forward = 4
    with replaced:
        ours = train(mine)
    exact = how != "bf16" and not how.startswith("experts")  # torch multiplies experts in bf16
    assert_like(ours[0], losses, rtol=1e-5 if exact else 1e-4)
    assert_like(ours[1], norms, rtol=1e-5 if exact else 2e-3 if how == "bf16" else 5e-5)
    assert ours[2].keys() == weights.keys()
    for name, value in weights.items():  # AdamW amplifies the rounding of a gradient that is nearly zero
        change = value - drawn(name, value.shape)
        assert (ours[2][name] - value).norm() <= (1e-3 if exact else 0.05) * change.norm(), name
    (part,) = ours[3].model_parts
    hop2 = layerzero.traffic(part).calls.get("hop2", 0)
    if how in ("by hand", "fully_shard"):
        assert hop2 > 5 * 3
    elif how == "kept until the step":
        assert layerzero.traffic(part).calls["gather"] == 3 * len(layerzero.units(part))
    elif how == "kept":
        assert layerzero.traffic(part).calls["regather"] > 0
    elif not how.endswith("parallel") and how not in (
        "experts, replicas",
        "experts, kept",
        "experts, fully_shard",
    ):  # with one replica
        units = 4 if how == "tied" else 5  # two layers, the root, and the ends
        assert hop2 == units * 3  # two micro-batches in each of three steps


# Runs of one mesh share one call of ranks: torch learns how to redistribute its DTensors once, which takes longer
# than a run.
WAYS = {
    "dense": [
        "chunked loss",
        "fully_shard",
        "by hand",
        "full",
        "kept until the step",
        "whole loss",
        "checkpointed",
        "tied",
        "bf16",
    ],
    "one node, or many": ["kept", "replicated"],
    "tensor parallel": ["tensor parallel"],
    "experts": ["experts", "experts, parallel", "experts, kept", "experts, fully_shard", "experts, replicas"],
}
_SETTINGS_OF = {
    **dict.fromkeys(("fully_shard", "by hand", "full", "kept until the step"), "chunked loss"),
    **dict.fromkeys(("experts, kept", "experts, fully_shard"), "experts, parallel"),
}


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("ways", WAYS.values(), ids=list(WAYS))
def test_losses_norms_and_weights_are_those_of_its_fsdp(ways: list[str], tmp_path: Path) -> None:
    run_ranks(_same, str(tmp_path), ways, timeout=300)


def _use_muon(config: Trainer.Config) -> None:
    matrices = r"layers\..*(wqkv|wo|w[123])\.weight"
    config.optimizer.param_groups = [
        ParamGroupConfig(pattern=matrices, optimizer_name="Muon", optimizer_kwargs={"lr": 0.02}),
        ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 3e-3}),
    ]


def _resumed(rank: int, folder: str, muon: bool) -> None:
    def config(folder: str, steps: int) -> Trainer.Config:
        made = tiny(folder, steps=steps)
        if muon:
            _use_muon(made)
        made.checkpoint.enable, made.checkpoint.interval, made.checkpoint.last_save_model_only = True, 2, False
        return with_layerzero(made)

    losses, norms, weights, trainer = train(config(f"{folder}/whole", 4))
    assert [type(each.inner).__name__ for each in trainer.optimizers] == (["Muon", "AdamW"] if muon else ["AdamW"])
    train(config(f"{folder}/parts", 2))
    dist.barrier()
    again = train(config(f"{folder}/parts", 4), keep=True)
    assert again[0] == losses[2:] and again[1] == norms[2:]
    for name, value in weights.items():
        assert torch.equal(again[2][name], value), name


@pytest.mark.parametrize("muon", [False, True], ids=["AdamW", "Muon"])
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path, muon: bool) -> None:
    run_ranks(_resumed, str(tmp_path), muon, timeout=300)


def _drawn(rank: int, folder: str) -> None:
    config = with_layerzero(tiny(folder))
    with launched(), on_cpu(), contextlib.redirect_stderr(io.StringIO()):
        trainer = config.build()
        with torch.device("meta"):
            whole = config.model_spec.model.build()
        whole.to_empty(device="cpu")
        torch.manual_seed(config.debug.seed)
        with torch.no_grad():
            whole.init_weights(buffer_device=None)
    held = weights_of(trainer.model_parts)
    for name, value in weights_of([whole]).items():
        assert torch.equal(held[name], value), name
    for (name, ours), (_, theirs) in zip(trainer.model_parts[0].named_buffers(), whole.named_buffers(), strict=True):
        assert torch.equal(ours, theirs), name
    trainer.close()


def test_weights_are_drawn_as_one_process_draws_them(tmp_path: Path) -> None:
    run_ranks(_drawn, str(tmp_path), timeout=300)


def _exported(rank: int, folder: str) -> None:
    for name, wrap in (("theirs", summing), ("ours", with_layerzero)):
        config = tiny(f"{folder}/{name}", steps=2)
        config.checkpoint.enable, config.checkpoint.last_save_in_hf = True, True
        train(wrap(config))


def test_its_export_for_transformers_is_that_of_its_fsdp(tmp_path: Path) -> None:
    run_ranks(_exported, str(tmp_path), timeout=300)
    theirs, ours = (
        {
            name: value
            for file in (tmp_path / run / "checkpoint" / "step-2").glob("*.safetensors")
            for name, value in load_file(file).items()
        }
        for run in ("theirs", "ours")
    )
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=2e-5)
    inner = len(ours["model.layers.0.mlp.gate_proj.weight"])
    sizes = {"hidden_size": WIDTH, "intermediate_size": inner, "num_hidden_layers": LAYERS}
    folder = tmp_path / "ours" / "checkpoint" / "step-2"
    LlamaConfig(**sizes, num_attention_heads=HEADS, vocab_size=VOCABULARY).save_pretrained(folder)
    loaded = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    assert loaded.keys() == ours.keys()
    assert all(torch.equal(loaded[name], value) for name, value in ours.items())


def _refused(rank: int, folder: str, section: str, field: str, value: Any, message: str) -> None:
    config = with_layerzero(tiny(folder))
    setattr(getattr(config, section), field, value)
    if field in ("pipeline_parallel_degree", "context_parallel_degree"):
        config.parallelism.data_parallel_replicate_degree = 1
    with launched(), on_cpu(), contextlib.redirect_stderr(io.StringIO()), pytest.raises(ValueError, match=message):
        config.build()


@pytest.mark.parametrize(
    ("section", "field", "value", "message"),
    [
        ("parallelism", "spmd_backend", "spmd_types", "--parallelism.spmd_backend partial_dtensor"),
        ("training", "enable_cpu_offload", True, "Offload.optimizer=True"),
        ("parallelism", "enable_fsdp_symm_mem", True, "Leave it out"),
        ("parallelism", "pipeline_parallel_degree", 2, "docs/meshes.md"),
        ("parallelism", "context_parallel_degree", 2, "tensor_parallel_degree"),
        ("training", "disable_cuda_graphs", False, "--training.disable_cuda_graphs"),
        ("optimizer", "implementation", "fused_opt_states_bf16", "Use 'fused'"),
    ],
)
def test_settings_without_a_counterpart_are_refused(
    section: str, field: str, value: Any, message: str, tmp_path: Path
) -> None:
    run_ranks(_refused, str(tmp_path), section, field, value, message, timeout=300)


def test_what_torchtitan_says_itself_is_not_given_twice(tmp_path: Path) -> None:
    config = tiny(str(tmp_path))
    (tmp_path / "layerzero.yaml").write_text("zero3_size: 2\n")
    for given, message in {
        ("config_file", str(tmp_path / "layerzero.yaml")): "zero3_size.*data_parallel_shard_degree",
        ("mp_policy", torch.distributed.fsdp.MixedPrecisionPolicy(torch.bfloat16)): "mixed_precision_param",
        ("units", ("Attention",)): "the units are the layers",
        ("ignored_modules", ("norm",)): "does not average gradients",
        ("reshard_after_forward", False): "fsdp_reshard_after_forward",
    }.items():
        with pytest.raises(ValueError, match=message):
            with_layerzero(config, **dict([given]))
    ours = with_layerzero(config, accumulation="full")
    ours.training.steps = 99
    assert config.training.steps == 3, "it is a copy"
    with pytest.raises(TypeError, match="parallelize_fn"):
        with_layerzero(ours)
    with pytest.raises(ValueError, match="'Muon'"):
        OptimizersContainer._resolve_optimizer_factory("DistMuon")


@pytest.mark.parametrize("model", [torch.nn.Linear(2, 2), torch.nn.ModuleDict({"layers": torch.nn.ModuleDict()})])
def test_what_is_no_decoder_is_refused(model: torch.nn.Module) -> None:
    if isinstance(model, torch.nn.ModuleDict):
        model = torch.nn.Module()
        model.layers, model.vision_encoder = torch.nn.ModuleDict(), torch.nn.Linear(2, 2)
    nothing = dict.fromkeys(("parallel_dims", "training", "parallelism", "compile_config", "ac_config", "dump_folder"))
    with pytest.raises(TypeError, match=r"layerzero\.shard_model"):
        parallelize(model, **nothing)


def _example(rank: int, folder: str) -> list[float]:
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    config = import_module("train_torchtitan").small_llama()
    config.dump_folder = folder
    config.model_spec.model.layers = config.model_spec.model.layers[:2]
    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.training.mixed_precision_param, config.activation_checkpoint = "float32", None
    config.optimizer.implementation = "for-loop"
    return train(config)[0]


def test_the_example_learns_and_saves(tmp_path: Path) -> None:
    for losses in run_ranks(_example, str(tmp_path), timeout=300):
        assert losses[-1] < losses[0] - 0.5
    assert (tmp_path / "checkpoint" / "step-20" / ".metadata").exists()
    example = Path(__file__).parents[2] / "examples" / "train_torchtitan.py"
    assert len(example.read_text().splitlines()) <= 40


@on_ranks(world_size=1, timeout=300)
def test_its_command_line_reads_the_example(rank: int, tmp_path: Path) -> None:
    """Parse a command line as torchtitan.train does: a user's registry, and flags that reach the sharded config."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    flags = ["--module", "train_torchtitan", "--config", "small_llama", "--training.steps", "7"]
    flags += ["--parallelism.data_parallel_replicate_degree", "16", "--parallelism.spmd_backend", "partial_dtensor"]
    config = ConfigManager().parse_args(flags)
    assert config.training.steps == 7 and config.parallelism.data_parallel_replicate_degree == 16
    assert type(config) is not Trainer.Config and isinstance(config, Trainer.Config)
    assert isinstance(config.optimizer, OptimizersContainer.Config)
