"""LayerZeroConfig.from_yaml: every key works or is refused with a reason."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

import layerzero
from layerzero import (
    Codecs,
    Float8Rows,
    Int4Blocks,
    Int4Difference,
    Int8Blocks,
    LayerZeroConfig,
    Offload,
    PrecisionPolicy,
)
from tests.support.models import TiedTransformer
from tests.support.ranks import mesh_of, run_ranks

OURS = """
zero3_size: 2
units: [Block, "norm"]
mp_policy:
  param_dtype: bf16
  reduce_dtype: torch.float32
  cast_forward_inputs: false
  replica_reduce_dtype: bf16
  fp32_accumulation: true
  buffer_dtype: float32
  accumulation_dtype: bf16
accumulation: full
offload: {grads: true, optimizer: true, params: true, pin_memory: false}
reshard_after_forward: step
codecs: {gather: float8_rows, hop2: int8_blocks, refresh: lossless}
prefetch: 2
shared_memory: "off"
ignored_modules: [head]
sync_module_states: false
"""

MINDSPEED = """
zero3_size: 8
transformer_layers: [tests.support.models.Block]
param_dtype: bf16
reduce_dtype: fp32
buffer_dtype: fp32
ignored_modules: [vae]
offload_grads: True
offload_optimizer: False
forward_prefetch: True
backward_prefetch: BACKWARD_PRE
autocast_input: False
autocast_output: True
ckpt_load_path: null
"""


def read(folder: Path, text: str) -> LayerZeroConfig:
    path = folder / "layerzero.yaml"
    path.write_text(text)
    return LayerZeroConfig.from_yaml(path)


def test_every_setting_can_be_given(tmp_path: Path) -> None:
    config = read(tmp_path, OURS)
    assert config == LayerZeroConfig(
        zero3_size=2,
        units=["Block", "norm"],
        mp_policy=PrecisionPolicy(
            torch.bfloat16,
            torch.float32,
            cast_forward_inputs=False,
            replica_reduce_dtype=torch.bfloat16,
            fp32_accumulation=True,
            buffer_dtype=torch.float32,
            accumulation_dtype=torch.bfloat16,
        ),
        accumulation="full",
        offload=Offload(grads=True, optimizer=True, params=True, pin_memory=False),
        reshard_after_forward="step",
        codecs=Codecs(gather=Float8Rows(), hop2=Int8Blocks(), refresh="lossless"),
        prefetch=2,
        shared_memory="off",
        ignored_modules=["head"],
        sync_module_states=False,
    )
    assert LayerZeroConfig(**config.arguments()) == config
    lossy = read(tmp_path, "codecs: {hop2: int4_blocks, refresh: int4_difference}").codecs
    assert lossy == Codecs(hop2=Int4Blocks(), refresh=Int4Difference())
    default = LayerZeroConfig()
    same = [name for name, value in config.arguments().items() if value == getattr(default, name)]
    assert not same, f"the test gives no other value to {same}"


def test_a_file_of_mindspeed_means_the_same_here(tmp_path: Path) -> None:
    config = read(tmp_path, MINDSPEED)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32, cast_forward_inputs=False)
    assert config == LayerZeroConfig(
        zero3_size=8,
        units=["tests.support.models.Block"],
        mp_policy=PrecisionPolicy.of(policy, buffer_dtype=torch.float32),
        offload=Offload(grads=True),
        ignored_modules=["vae"],
        prefetch=1,
    )
    without = read(tmp_path, MINDSPEED.replace("autocast_output: True", "autocast_output: False"))
    assert without.mp_policy.output_dtype is None
    default = read(tmp_path, "\n".join(line for line in MINDSPEED.splitlines() if not line.startswith("autocast")))
    assert default.mp_policy.torch_policy == MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)
    never = MINDSPEED.replace("forward_prefetch: True", "forward_prefetch: False").replace("BACKWARD_PRE", "null")
    assert read(tmp_path, never).prefetch == 0


SHIPPED = """
zero3_size: 8
transformer_layers: [tests.support.models.Block]
param_dtype: fp16
"""

ALL_AT_THEIR_DEFAULTS = """
zero3_size: 8
transformer_layers: [tests.support.models.Block]
backward_prefetch: BACKWARD_PRE
backward_reduce_scatter: BACKWARD_PRE
param_dtype: fp16
reduce_dtype: fp16
buffer_dtype: null
ignored_modules: null
param_init_fn: null
forward_prefetch: true
limit_all_gathers: true
offload_grads: false
ckpt_load_path: null
autocast_input: true
autocast_output: true
"""


def test_a_file_of_mindspeed_need_not_name_its_defaults(tmp_path: Path) -> None:
    policy = MixedPrecisionPolicy(torch.float16, torch.float16, torch.float32)
    expected = LayerZeroConfig(zero3_size=8, units=["tests.support.models.Block"], mp_policy=policy)
    assert read(tmp_path, SHIPPED) == read(tmp_path, ALL_AT_THEIR_DEFAULTS) == expected
    assert read(tmp_path, "forward_prefetch: true").prefetch == 1, "alone: backward_prefetch has its default"
    assert read(tmp_path, SHIPPED + "reduce_dtype: fp32").mp_policy.reduce_dtype == torch.float32


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("zero3: 2", r"unknown settings zero3 \(did you mean zero3_size\?\)\. Use only .*zero3_size"),
        ("zero3_size: 2\nzero3_size: 4", "zero3_size given twice"),
        ("zero3_size: two", r"layerzero\.yaml: zero3_size must be an int"),
        ("zero3_size: 0", r"layerzero\.yaml: zero3_size=0 is not positive. Use"),
        ("zero3_size: -2", r"layerzero\.yaml: zero3_size=-2 is not positive. Use"),
        ("zero3_size: 1.5", r"layerzero\.yaml: zero3_size must be an int or None, got 1\.5"),
        ("zero3_size: true", r"layerzero\.yaml: zero3_size must be an int or None, got True"),
        ('zero3_size: "8"', r"layerzero\.yaml: zero3_size must be an int or None, got '8'"),
        ("mp_policy: {param_dtype: int8}", "param_dtype is 'int8', which is not a supported dtype. Use one of fp32"),
        (
            "mp_policy: {accumulation_dtype: fp16}",
            r"layerzero\.yaml: accumulation_dtype=torch.float16 is not supported.*Use torch.bfl",
        ),
        ("mp_policy: {dtype: bf16}", "mp_policy must be a mapping with the names param_dtype"),
        ("mp_policy: {param_dtype: bf16}\nparam_dtype: bf16", "param_dtype is given twice"),
        ("hop2_codec: int8_blocks", r"hop2_codec is no longer a setting.*codecs=layerzero.Codecs\(hop2="),
        ("offload: {grad: true}", "offload must be a mapping with the names grads, optimizer, params, pin_memory"),
        ("codecs: {gather: int4}", r"codecs\.gather is 'int4', but a file supports only float8_rows"),
        ("codecs: {hop2: float8_rows}", "'float8_rows', but a file supports only int8_blocks and int4_blocks"),
        ("codecs: {refresh: int4_blocks}", "'int4_blocks', but a file supports only lossless and int4_difference"),
        ("codecs: int8_blocks", "codecs must be a layerzero.Codecs or None, got 'int8_blocks'"),
        ("units: [A]\ntransformer_layers: [B]", "but they mean the same"),
        ("transformer_layers: Block", "must be a list of class names"),
        ("param_init_fn: my.function", "param_init_fn is 'my.function', but a file cannot contain functions"),
        ("limit_all_gathers: false", "limit_all_gathers is False, but .*prefetch"),
        ("limit_all_gathers: 1", "limit_all_gathers is 1, but"),
        ("backward_reduce_scatter: BACKWARD_POST", "backward_reduce_scatter is 'BACKWARD_POST', but .*BACKWARD_PRE"),
        (
            "forward_prefetch: false\nbackward_prefetch: BACKWARD_POST",
            "BACKWARD_POST.*which is not supported. Use BACKWARD_PRE",
        ),
        ("ckpt_load_path: /somewhere", "Leave it out, and call layerzero.checkpoint.load"),
        ("backward_prefetch: BACKWARD_POST", "BACKWARD_PRE"),
        ("backward_prefetch: BACKWARD_PRE\nforward_prefetch: false", "one setting for both"),
        ("forward_prefetch: true\nprefetch: 1", "Use only prefetch, or"),
        ("autocast_output: fp32", "autocast_output must be true or false"),
        ("- zero3_size", "must contain a mapping of names to values"),
        ("zero3_size: [", "is not YAML"),
        ("units: !!python/object/apply:os.getcwd []", "is not YAML"),
        ("accumulation: half", "accumulation='half'"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=said):
        read(tmp_path, text)


def _shard(rank: int, path: str) -> None:
    for text in (
        "units: [Block]\nignored_modules: [LayerNorm]",
        "units: [tests.support.models.Block]\nignored_modules: [norm]",
    ):
        if rank == 0:
            Path(path).write_text("zero3_size: 2\nshared_memory: off\n" + text)
        torch.distributed.barrier()
        config = LayerZeroConfig.from_yaml(path)
        model = layerzero.shard_model(TiedTransformer(), **config.arguments())
        torch.distributed.barrier()
        plain = {name for name, p in model.named_parameters() if not hasattr(p, "full_tensor")}
        assert plain == {name for name in plain if "norm" in name} and "norm.weight" in plain
        assert ("blocks.0.norm1.weight" in plain) is ("LayerNorm" in text)
        model(torch.zeros(1, 4, dtype=torch.long)).sum().backward()
        assert layerzero.traffic(model).calls["gather"] == 2 * 3, "two units and the root, in both passes"
    for setting in ("units", "ignored_modules"):
        with pytest.raises(
            ValueError, match=rf"{setting} contains 'Nowhere', which this model does not have.* classes .*Block"
        ):
            layerzero.shard_model(TiedTransformer(), mesh=mesh_of(2), **{setting: ["Nowhere"]})


def test_classes_are_found_by_name_among_the_models_own_modules(tmp_path: Path) -> None:
    run_ranks(_shard, str(tmp_path / "layerzero.yaml"), world_size=2)


@pytest.mark.slow
def test_yaml_is_imported_by_files_alone() -> None:
    code = "import sys, layerzero; assert 'yaml' not in sys.modules and 'safetensors' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
