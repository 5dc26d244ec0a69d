"""Parameters that tensor parallel ranks cut unevenly: their layout order differs between those ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.utils import parametrizations

import layerzero
from layerzero.engine.hooks import get_state
from tests.support.models import different, exact_sgd, full_gradients, full_parameters, update
from tests.support.ranks import mesh_of, on_ranks, run_ranks

# Shapes of parameters by case, each cut along a dim, or plain.
CASES: dict[str, dict[str, tuple[tuple[int, ...], int | None]]] = {
    "other order": {"a": ((5,), 0), "n": ((3,), None)},
    "more handles": {"a": ((4, 4), 0), "b": ((23, 11), 0), "c": ((24, 7), 0)},
    "longer rows": {"a": ((6, 5), 1), "b": ((6, 3), None), "c": ((5, 7), 1), "n": ((3,), None)},
}


class Parts(nn.Module):
    """Module that returns the sum of some parameters times an input; it may skip a parameter."""

    def __init__(self, case: str, tp: DeviceMesh | None) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, (shape, dim) in CASES[case].items():
            value = torch.randint(-2, 3, shape, generator=generator).float()
            cut = tp is not None and dim is not None
            self.register_parameter(name, nn.Parameter(distribute_tensor(value, tp, [Shard(dim)]) if cut else value))

    def forward(self, x: Tensor, without: str = "") -> Tensor:
        used = [parameter for name, parameter in self.named_parameters() if name != without]
        return sum((p.full_tensor() if isinstance(p, DTensor) else p).square().sum() for p in used) * x.sum()


def _orders(model: nn.Module) -> list[list[str]]:
    return [[slot.name for slot in handle.layout.slots] for handle in get_state(model).handles]


def _trains(rank: int, case: str, size: int, accumulation: str) -> list[list[str]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = layerzero.shard_model(Parts(case, mesh["tp"]), zero3_size=size, accumulation=accumulation)
    alone = Parts(case, None)
    optimizer = layerzero.shard_optimizer(exact_sgd(model.parameters()), model)
    exact = exact_sgd(alone.parameters())
    x, names = torch.tensor(0.25), list(CASES[case])
    for step, without in enumerate(("", *names)):
        if step == 1:
            with layerzero.no_sync(model):
                model(x, names[-1]).backward()
            alone(x, names[-1]).backward()
        model(x * (1 + rank // 2), without).backward()
        alone(x * 1.5, without).backward()
        expected = {name: parameter.grad for name, parameter in alone.named_parameters()}
        assert [p.grad is None for p in model.parameters()] == [grad is None for grad in expected.values()], without
        expected = {name: grad for name, grad in expected.items() if grad is not None}
        assert not different(full_gradients(model), expected), (step, without)
        update(optimizer, exact)
        assert not different(full_parameters(model), dict(alone.named_parameters())), (step, without)
    ema = layerzero.EMA(model)
    assert list(ema.state_dict()["averages"]) == names
    with torch.no_grad():
        model.get_parameter(names[0]).mul_(2)
        alone.get_parameter(names[0]).mul_(2)
        assert torch.equal(model(x), alone(x))
    assert layerzero.fingerprint(model).ok
    if size == 1:
        if rank == 3:
            get_state(model).handles[-1].weights.zero3_shard[0] += 1
        found = layerzero.fingerprint(model).corruptions
        assert found and all(3 in corruption.ranks for corruption in found), found
    return _orders(model)


@pytest.mark.default_sample(1)
@pytest.mark.sample(1)
@pytest.mark.parametrize("case", CASES)
def test_parts_that_lie_in_different_orders_train_as_one_process(case: str) -> None:
    for size, accumulation in ((1, "full"), (2, "sharded")):
        orders = run_ranks(_trains, case, size, accumulation)
        assert orders[0] == orders[2] and orders[0] != orders[1], "what the test is about"


# Functions of two parameters whose rows do not correspond. Without a check, only some ranks raise an error, and the
# kernel of weight_norm reads rows that do not exist.
MIXED: dict[str, Callable[[Tensor, Tensor], object]] = {
    "add": torch.add,
    "dist": torch.dist,
    "mse_loss": F.mse_loss,
    "huber_loss": lambda p, q: F.huber_loss(p, q, reduction="sum"),
    "matmul": lambda p, q: p.t() @ q,
    "stack": lambda p, q: torch.stack([p, q]),
    "cat": lambda p, q: torch.cat([p, q], -1),
    "foreach": lambda p, q: torch._foreach_add([p, p], [p, q]),
    "fused": lambda p, q: torch._fused_sgd_(
        *([p.to_local().clone()], [q.to_local()], []),
        weight_decay=0.0,
        momentum=0.0,
        lr=0.5,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=True,
    ),
}


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = parametrizations.weight_norm(nn.Linear(6, 7))
        self.p, self.q = nn.Parameter(torch.ones(5, 6)), nn.Parameter(torch.ones(5, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).sum() + (self.p * self.q).sum()


@pytest.mark.default_sample(1)
@pytest.mark.parametrize("size", [1, 2, 4])
@on_ranks()
def test_rows_of_parameters_that_do_not_correspond_are_not_mixed(rank: int, size: int) -> None:
    model, same = (layerzero.shard_model(Normed(), mesh=mesh_of(size)) for _ in range(2))
    with torch.no_grad():
        for name, function in MIXED.items():
            with pytest.raises(NotImplementedError, match="is not supported for parameter 'p'"):
                pytest.fail(f"{name} gives {function(model.p, model.q)}")
            function(model.p, model.p)
            function(model.p, same.p)
        with pytest.raises(NotImplementedError, match=r"parameter 'linear\."):
            pytest.fail(f"{model.linear.weight}")
        together = torch.cat([model.p.to_local().flatten(), model.q.to_local().flatten()])
        assert together.numel() == model.p.to_local().numel() + model.q.to_local().numel()
    torch.manual_seed(0)
    alone = Normed()
    layerzero.load_full_state_dict(model, alone.state_dict())
    assert torch.equal(model(torch.ones(2, 6)), alone(torch.ones(2, 6)))


@on_ranks(world_size=1)
def test_elements_of_copies_are_numbers_that_combine_with_all_tensors(rank: int) -> None:
    model = layerzero.shard_model(Normed(), mesh=mesh_of(1))
    with torch.no_grad():
        p, q = model.p.detach() * 2, model.q.detach() * 3
        assert torch.equal((p[0, 0] + q[0, 0]).full_tensor(), torch.tensor(5.0))
        assert torch.equal((q * p[0, 0]).full_tensor(), torch.full((5, 6), 6.0))
        x, y = p.to_local()[0, 0], q.to_local()[0, 0]
        assert torch.equal(x + y, torch.tensor(5.0))
        scaled = torch.ones(3) * x
        assert type(scaled) is Tensor and torch.equal(scaled + torch.ones(2, 3), torch.full((2, 3), 3.0))
        total = torch.zeros(2)
        for norm in model.p.to_local().norm(dim=1):
            total += norm
        assert torch.equal(total, torch.ones(5, 6).norm(dim=1).sum().expand(2))
        assert 0 <= torch.rand_like(x).item() < 1


@on_ranks(world_size=1)
def test_one_rank_has_all_rows_of_all_parameters(rank: int) -> None:
    model = layerzero.shard_model(Normed(), mesh=mesh_of(1))
    with torch.no_grad():
        assert (model.p.t() @ model.q).full_tensor().equal(torch.full((6, 6), 5.0))
        assert torch.cat([model.p, model.q], -1).shape == (5, 12)
