"""`layerzero.stream_weights` and `WeightSender`: the weights of the next forward, on any ranks, in little memory."""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

import layerzero
from layerzero import Codecs, Offload, checkpoint
from layerzero.engine.hooks import get_state
from tests.checkpoint.test_whole_model_files import AllocationPeak
from tests.dtensor.test_extensions import Coded, Layer, wrap
from tests.dtensor.test_tensor_parallel import Net as TensorParallelNet
from tests.dtensor.test_tensor_parallel import net as tensor_parallel_net
from tests.dtensor.test_tensor_parallel import parallel
from tests.sharding.test_expert_parallel import Net as ExpertNet
from tests.sharding.test_expert_parallel import shard as shard_experts
from tests.support.bits import assert_equal_bits
from tests.support.checkpointing import WithBuffers
from tests.support.graphs import WIDTH
from tests.support.late_transfers import late
from tests.support.models import BF16, TiedTransformer, full_parameters, integer_batch, integer_loss, refusal_of, update
from tests.support.ranks import BOTH, mesh_of, on_ranks, run_ranks

WORLD = 4
BUCKET = 700  # bytes; smaller than some parameters, and larger than others


class Policy(WithBuffers):
    """Tied weights, buffers, an extra state, and parameters that are frozen, empty, transposed, or without dims."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.mixer = nn.Parameter(torch.eye(12).t() + 0.01 * seed)
        self.odd = nn.Parameter(torch.ones(1, 12))
        self.unused = nn.Parameter(torch.empty(0, 3))
        self.register_buffer("shift", torch.full((12,), 0.1 * seed))
        for parameter in self.blocks[0].up.parameters():
            parameter.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) @ self.mixer * self.scale + self.odd + self.shift.to(self.scale.dtype)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build(size: int, dtype: torch.dtype = torch.bfloat16, **settings: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    model = layerzero.shard_model(Policy(seed=1), mesh=mesh_of(size), units=Policy.UNITS, mp_policy=policy, **settings)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return model, layerzero.shard_optimizer(torch.optim.AdamW(trained, lr=1e-3), model)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    TiedTransformer.loss(model, TiedTransformer.batch(step=step, rank=rank)).backward()
    update(optimizer)


def streamed(model: nn.Module, **settings: Any) -> dict[str, Tensor]:
    settings = {"bucket_bytes": BUCKET} | settings
    return {name: tensor.clone() for name, tensor in layerzero.stream_weights(model, **settings)}


def computed_with(model: nn.Module) -> dict[str, Tensor]:
    """Run a forward and return the parameters that the modules have in it, and the buffers of the state dict."""
    found = {name: value for name, value in model.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}
    found = {name: value.detach().clone() for name, value in found.items() if not isinstance(value, nn.Parameter)}
    hooks = []
    for path, module in model.named_modules():

        def note(module: nn.Module, args: Any, path: str = path) -> None:
            for name, value in module._parameters.items():
                if value is not None:
                    found[f"{path}.{name}".lstrip(".")] = value.detach().clone()

        hooks.append(module.register_forward_pre_hook(note))
    with torch.no_grad():
        model(TiedTransformer.batch(step=0)[0])
    for hook in hooks:
        hook.remove()
    return found


# --- values ---


def _follow(rank: int, size: int, dtype: torch.dtype, folder: str) -> list[int]:
    """Compare streams with forwards over 20 steps with edits of all kinds; return the bytes of each version."""
    model, optimizer = build(size, dtype)
    average = layerzero.EMA(model, decay=0.5)
    sender, receiver = layerzero.WeightSender(model, bucket_bytes=BUCKET), layerzero.WeightReceiver()
    sent = []
    for step in range(20):
        if step:
            train_step(model, optimizer, rank, step)
            average.update()
        if step == 3:
            with layerzero.unsharded(model, writeback=True), torch.no_grad():
                model.blocks[0].up.weight.add_(1)
                model.head.weight.mul_(-1)
        if step == 6:
            checkpoint.save(f"{folder}/{dist.get_world_size()}-{size}-{dtype}", model, optimizer)
        if step == 9:
            checkpoint.load(f"{folder}/{dist.get_world_size()}-{size}-{dtype}", model, optimizer)
        if step == 12:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.data.mul_(1.5)
                model.shift.add_(rank)
        if step == 15:
            layerzero.load_full_state_dict(model, Policy(seed=2).state_dict())
        packets = list(sender.packets(full=step == 17))
        ours = streamed(model)
        assert bool(packets) == (rank == 0)
        if rank == 0:
            assert [receiver.apply(packet) for packet in packets] == [False] * (len(packets) - 1) + [True]
            assert receiver.version == sender.version == step + 1
            assert_equal_bits(receiver.tensors, ours, ("packets", step))
        sent.append(sum(map(len, packets)))
        assert_equal_bits(ours, computed_with(model), ("forward", step))
        masters = full_parameters(model)
        assert_equal_bits({name: ours[name] for name in masters}, {n: v.to(dtype) for n, v in masters.items()}, step)
        if step == 18:
            with average.swapped():
                ours = streamed(model)
                assert_equal_bits(ours, computed_with(model), "averages")
                assert not torch.equal(ours["head.weight"], masters["embedding.weight"].to(dtype))
    assert {type(value) for value in ours.values()} == {Tensor}
    assert list(model.state_dict().keys() - ours.keys()) == ["counting._extra_state"]
    return sent


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "sizes", "dtype", "shared_memory"),  # with S = 1, no ranks share memory
    [
        (1, [1], torch.bfloat16, "off"),
        (2, [1, 2], torch.bfloat16, "off"),
        pytest.param(4, [1, 2, 4], torch.bfloat16, "off", marks=pytest.mark.exhaustive),
        pytest.param(4, [1, 2, 4], torch.float32, "off", marks=pytest.mark.exhaustive),
        (4, [2, 4], torch.bfloat16, None),
    ],
)
def test_a_stream_has_the_weights_of_the_next_forward(
    world: int, sizes: list[int], dtype: torch.dtype, shared_memory: str | None, tmp_path: Path
) -> None:
    for size in sizes:
        sent, *_ = run_ranks(
            _follow, size, dtype, str(tmp_path), world_size=world, shared_memory=shared_memory, timeout=240
        )
        usual = max(sent[step] for step in (1, 2, 4, 5, 7, 8, 10, 11))
        assert usual < sent[0] and sent[17] > 0.99 * sent[0], "differences are smaller, and `full` sends all"


@pytest.mark.slow
@on_ranks()
def test_weights_in_host_memory_and_encoded_weights_are_streamed(rank: int) -> None:
    encoded = {"codecs": Codecs(gather=layerzero.Float8Rows())}
    for settings in ({"offload": Offload(params=True)}, {"offload": Offload(optimizer=True)}, encoded):
        for size in (1, 2, 4):
            with late(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # there is no device, whose memory the settings would save
                model, optimizer = build(size, **settings)
            train_step(model, optimizer, rank, 0)
            expected = computed_with(model)
            if settings is encoded and size > 1:  # forwards use decoded weights, and streams exact ones
                exact = {name: value.bfloat16() for name, value in full_parameters(model).items()}
                exact["head.weight"] = exact["embedding.weight"]  # they are tied
                assert not torch.equal(exact["blocks.0.down.weight"], expected["blocks.0.down.weight"])
                expected |= exact
            assert_equal_bits(streamed(model), expected, (settings, size))


@pytest.mark.slow
@on_ranks()
def test_tensor_parallel_parameters_are_full(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for size in (1, 2):
        model = layerzero.shard_model(parallel(mesh["tp"]), zero3_size=size, units=TensorParallelNet.UNITS)
        optimizer = layerzero.shard_optimizer(torch.optim.AdamW(model.parameters()), model)
        sender, receiver = layerzero.WeightSender(model, bucket_bytes=50), layerzero.WeightReceiver()
        for step in range(3):
            integer_loss(model, integer_batch(step=step, rank=mesh["dp"].get_local_rank())).backward()
            update(optimizer)
            ours = streamed(model, bucket_bytes=50)
            assert_equal_bits(ours, full_parameters(model), (size, step))
            first = streamed(model, bucket_bytes=50, rank0_only=True)
            assert_equal_bits(first, ours if rank == 0 else {}, (size, step))
            for packet in sender.packets():
                receiver.apply(packet)
        assert_equal_bits(receiver.tensors, ours if rank == 0 else {}, size)
    assert ours.keys() == dict(tensor_parallel_net().named_parameters()).keys()


@pytest.mark.slow
@on_ranks()
def test_parameters_on_several_meshes_are_full(rank: int) -> None:
    for expert_size, size in ((1, 1), (2, 4), (2, 2), (1, 2)):
        model, optimizer = shard_experts(2, size, expert_size=expert_size)
        for step in range(3):
            integer_loss(model, integer_batch(rank=rank, step=step)).backward()
            update(optimizer)
            ours = streamed(model)
            parameters = full_parameters(model)
            assert_equal_bits({name: ours[name] for name in parameters}, parameters, (expert_size, size, step))
            first = streamed(model, rank0_only=True)
            assert_equal_bits(first, ours if rank == 0 else {}, (expert_size, size, step))
        whole = ExpertNet().state_dict()
        assert {name: value.shape for name, value in ours.items()} == {name: v.shape for name, v in whole.items()}
    apart, _ = shard_experts(2, 2, dtensor=False)
    with pytest.raises((ValueError, RuntimeError), match=r"stream_weights: parameter .*experts.* only some ranks"):
        streamed(apart)


@pytest.mark.slow
@on_ranks()
def test_parameters_with_an_all_gather_extension_have_their_own_precision(rank: int) -> None:
    for size in (1, 2, 4):
        torch.manual_seed(0)
        model = layerzero.shard_model(
            wrap(nn.Sequential(Layer(Coded), Layer(Coded))), mesh=mesh_of(size), units={Layer}
        )
        model(torch.ones(2, WIDTH, dtype=torch.float64)).sum().backward()
        assert_equal_bits(streamed(model), full_parameters(model), size)


# --- first rank only, and traffic ---


def full_names(model: nn.Module) -> set[str]:
    """Return the names of sharded parameters; a tied one has one name."""
    return {name for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)}


@pytest.mark.default_sample(1)
@BOTH
@on_ranks()
def test_the_first_rank_alone_gets_tensors_and_other_replicas_send_nothing(
    rank: int, shared_memory: str | None
) -> None:
    for size in (1, 2, 4):
        model, optimizer = build(size)
        train_step(model, optimizer, rank, 0)
        expected = streamed(model)
        counters = get_state(model).mesh_info.counters
        layerzero.traffic(model, reset=True)
        ours = streamed(model, rank0_only=True)
        assert_equal_bits(ours, expected if rank == 0 else {}, size)
        sent = {axis: count for (kind, axis), count in counters.bytes.items() if kind == "unshard"}
        assert sent.keys() <= {"zero3"}, "nothing crosses replicas"
        shared = get_state(model).transports[0].traits.shares_memory
        assert bool(sent.get("zero3")) == (rank < size and size > 1 and not shared), (size, sent)
        if sent.get("zero3"):
            whole = sum(value.nbytes for name, value in expected.items() if name in full_names(model))
            told = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
            dist.all_gather(told, torch.tensor([sent["zero3"]]), group=mesh_of(size).get_group("zero3"))
            assert sum(int(each) for each in told) == (size - 1) * whole, size


# --- memory ---


class Wide(nn.Module):
    """Four units of four layers of 128 KiB in bf16, and one of 512 KiB."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(4))) for _ in range(4)]
        self.layers = nn.ModuleList(layers)
        self.large = nn.Linear(256, 1024, bias=False)


LAYER, LARGE = 2 * 256 * 256, 8 * 256 * 256


class NewStorages(AllocationPeak):
    """Peak bytes of storages that did not exist before."""

    def __init__(self) -> None:
        super().__init__(nn.Module())
        gc.collect()
        held = (each for each in gc.get_objects() if type(each) in (Tensor, nn.Parameter) and not each.is_meta)
        self._old = {each.untyped_storage()._cdata for each in held}


def await_release(tensor: Tensor) -> None:
    """Wait until only `tensor` uses its memory: a gloo thread may hold it for a moment after a collective ends."""
    deadline = time.monotonic() + 10
    while references(tensor) > references(torch.empty(0)) and time.monotonic() < deadline:
        time.sleep(0.001)


def references(tensor: Tensor) -> int:
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


@BOTH
@on_ranks()
def test_a_stream_holds_one_bucket_at_a_time(rank: int, shared_memory: str | None) -> None:
    model = layerzero.shard_model(Wide(), mesh=mesh_of(2), units=nn.Sequential, mp_policy=BF16)
    with torch.no_grad():  # the first forward's refreshes
        layerzero.refresh(model)
    for bucket in (LAYER // 2, LAYER, 3 * LAYER, LARGE, 2 * LARGE, 100 * LARGE):
        largest, whole = max(bucket, LARGE), 16 * LAYER + LARGE
        for rank0_only in (False, True):
            count = 0
            with NewStorages() as seen:
                for _, tensor in layerzero.stream_weights(model, bucket_bytes=bucket, rank0_only=rank0_only):
                    count += tensor.numel()
                    await_release(tensor)
            assert count == (whole // 2 if rank == 0 or not rank0_only else 0)
            held = largest if count else 2 * largest  # a peer of the first rank does not wait for gloo's threads
            assert seen.peak <= held, (bucket, rank0_only, seen.peak)
            assert rank or seen.peak >= min(largest, whole) - LAYER, "buckets are used"
            assert rank < 2 or not rank0_only or seen.peak < 1000, "other replicas need no memory"


@BOTH
@on_ranks(world_size=2)
def test_tensors_are_emptied_unless_they_are_kept(rank: int, shared_memory: str | None) -> None:
    model, _ = build(2)
    expected = streamed(model)
    given = dict(layerzero.stream_weights(model, bucket_bytes=10**9))
    assert {tuple(tensor.shape) for tensor in given.values()} == {(0,)}, "a tensor that was not copied is empty"
    kept = {name: tensor.detach() for name, tensor in layerzero.stream_weights(model)}
    with torch.inference_mode():
        assert_equal_bits(streamed(model), expected, "inference mode")
    for tensor in kept.values():
        tensor.zero_()
    assert_equal_bits(streamed(model), expected, "the tensors are copies")


# --- early ends and refusals ---


class Stop(Exception):
    pass


def _leave_early(rank: int, leaver: int, how: str) -> None:
    model, optimizer = build(2)
    train_step(model, optimizer, rank, 0)
    expected = streamed(model)
    sender, receiver = layerzero.WeightSender(model, bucket_bytes=BUCKET), layerzero.WeightReceiver()
    for attempt in range(2):
        stream: Generator[Any, None, None] = layerzero.stream_weights(model, bucket_bytes=BUCKET)
        if how == "packets":
            stream = sender.packets()
        if rank != leaver:
            count = len(list(stream))
            assert count == 0 if how == "packets" else count > 1
        elif how == "break":
            for _ in stream:
                break
            del stream
        elif how == "close":
            next(stream)
            stream.close()
        else:
            with pytest.raises(Stop):
                consume(stream)
            del stream
        train_step(model, optimizer, rank, attempt + 1)
    packets = list(sender.packets())
    if rank == 0:
        assert all(receiver.apply(packet) is (packet is packets[-1]) for packet in packets), "all values are sent"
        assert_equal_bits(receiver.tensors, streamed(model, rank0_only=False), "after the early end")
    else:
        streamed(model)
    assert not torch.equal(streamed(model)["head.weight"], expected["head.weight"])


def consume(stream: Iterator[Any]) -> None:
    for _ in stream:
        raise Stop


@pytest.mark.default_sample(1)
@pytest.mark.parametrize("how", ["break", "close", "raise", "packets"])
def test_a_rank_may_leave_early(how: str) -> None:
    run_ranks(_leave_early, 0 if how == "packets" else 1, how, pg_timeout=10)


@BOTH
@on_ranks()
def test_a_model_is_not_used_or_changed_while_it_is_streamed(rank: int, shared_memory: str | None) -> None:
    model, optimizer = build(2)
    train_step(model, optimizer, rank, 0)
    tokens, _ = TiedTransformer.batch(step=0)
    loss = model(tokens).sum()
    expected = streamed(model)
    stream = layerzero.stream_weights(model, bucket_bytes=BUCKET)
    name, tensor = next(stream)
    seen = {name: tensor.clone()}
    refused: dict[str, Callable[[], Any]] = {
        "a forward is not possible": lambda: model(tokens),
        "a backward is not possible": loss.backward,
        "optimizer.step() is not possible": optimizer.step,
        "layerzero.unsharded is not possible": layerzero.unsharded(model).__enter__,
        "layerzero.full_precision is not possible": layerzero.full_precision(model).__enter__,
        "changing weights is not possible": lambda: layerzero.load_full_state_dict(model, Policy().state_dict()),
        "layerzero.stream_weights is not possible": lambda: streamed(model),
        "layerzero.WeightSender.packets is not possible": lambda: list(layerzero.WeightSender(model).packets()),
    }
    for message, call in refused.items():
        told = refusal_of(call)
        assert message in told and "Exhaust or close the generator first" in told, (message, told)
    seen |= {name: tensor.clone() for name, tensor in stream}
    assert_equal_bits(seen, expected, "the stream goes on")
    optimizer.zero_grad()
    train_step(model, optimizer, rank, 1)


@BOTH
@on_ranks()
def test_a_stream_in_the_wrong_place_is_refused(rank: int, shared_memory: str | None) -> None:
    model, _ = build(2)
    tokens, _ = TiedTransformer.batch(step=0)
    told: list[str] = []

    def inside(*_: Any) -> None:
        told.append(refusal_of(lambda: streamed(model)))

    hook = model.blocks[0].register_forward_hook(inside)
    output = model(tokens)
    hook.remove()
    output.register_hook(inside)
    output.float().sum().backward()
    assert len(told) == 2 and all("called during a forward or backward" in each for each in told), told
    for context in (layerzero.unsharded(model), layerzero.full_precision(model), layerzero.gathered(model.blocks[0])):
        with context, torch.no_grad():
            assert "inside layerzero." in refusal_of(lambda: streamed(model))
    for value in (0, -1, 1.5, True):
        assert "is not a positive integer" in refusal_of(
            lambda v=value: layerzero.stream_weights(model, bucket_bytes=v)
        )
    assert "not sharded" in refusal_of(lambda: layerzero.stream_weights(nn.Linear(1, 1)))
    assert "bucket_bytes is" in refusal_of(lambda: streamed(model, bucket_bytes=100 + rank))

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = model.blocks[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(tokens)
    hook.remove()
    assert_equal_bits(streamed(model), computed_with(model), "after an interrupted forward")
    model(tokens).float().sum().backward()


@on_ranks(world_size=2)
def test_a_model_is_closed_after_its_streams(rank: int) -> None:
    model, _ = build(2)
    stream = layerzero.stream_weights(model, bucket_bytes=BUCKET)
    next(stream)
    assert "Exhaust or close the generator" in refusal_of(lambda: layerzero.close(model))
    del stream
    layerzero.close(model)
    assert "closed" in refusal_of(lambda: layerzero.stream_weights(model))


def _one_does_not_call(rank: int) -> str:
    model, _ = build(2)
    streamed(model)
    if rank == 1:
        return ""
    return refusal_of(lambda: streamed(model))


@pytest.mark.slow
def test_a_rank_that_does_not_call_is_named() -> None:
    told = run_ranks(_one_does_not_call, pg_timeout=3)
    assert all("stream_weights: ranks [1] did not take part" in message for message in told if message), told


# --- packets ---


class Adapted(nn.Module):
    """Frozen layers with trainable adapters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.adapters = nn.ModuleList(nn.Linear(64, 2, bias=False) for _ in range(3))
        self.base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for base, adapter in zip(self.base, self.adapters, strict=True):
            x = torch.tanh(base(x) + adapter(x).sum(-1, keepdim=True))
        return x


@on_ranks()
def test_frozen_weights_are_sent_once(rank: int) -> None:
    model = layerzero.shard_model(Adapted(), mesh=mesh_of(2), mp_policy=BF16)
    adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = layerzero.shard_optimizer(torch.optim.AdamW(adapters, lr=1e-2), model)
    sender, receiver = layerzero.WeightSender(model), layerzero.WeightReceiver()
    for step in range(4):
        if step == 3:  # the user changes a frozen weight
            with layerzero.unsharded(model.base[1], writeback=True), torch.no_grad():
                model.base[1].weight.add_(1)
        layerzero.traffic(model, reset=True)
        packets = list(sender.packets())
        gathered = layerzero.traffic(model).calls.get("unshard", 0)
        assert gathered == ({0: 9, 3: 9}.get(step, 3) if rank < 2 else 0), "frozen layers are gathered once"
        if rank == 0:
            assert sum(map(len, packets)) > 3 * 64 * 64 * 2 if step in (0, 3) else sum(map(len, packets)) < 3000
            assert [receiver.apply(packet) for packet in packets] == [True]
        assert_equal_bits(receiver.tensors, streamed(model, rank0_only=True), step)
        assert sender.nbytes == (3 * 64 * 2 * 2 if rank == 0 else 0), "only adapters have previous values"
        model(torch.ones(2, 64)).sum().backward()
        update(optimizer)


class Odd(torch.Tensor):
    """Tensor class that packets cannot describe."""


@on_ranks(world_size=2)
def test_tensor_classes_are_streamed_and_not_sent_in_packets(rank: int) -> None:
    net = Policy()
    net.extra = nn.Parameter(torch.ones(3).as_subclass(Odd), requires_grad=False)  # type: ignore[arg-type]
    model = layerzero.shard_model(net, mesh=mesh_of(2), units=Policy.UNITS, ignored_params=[net.extra])
    assert torch.equal(streamed(model)["extra"].as_subclass(Tensor), torch.ones(3))
    assert "'extra' is a Odd" in refusal_of(lambda: list(layerzero.WeightSender(model).packets()))
