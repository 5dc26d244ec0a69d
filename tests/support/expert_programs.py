"""Models whose experts are on a smaller mesh, and programs in which ranks call different experts or none.

All weights and gradients are small integers or multiples of a small power of two, so every order of additions gives the
same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

WIDTH = 4
EXPERTS = 3
LAYERS = 3
# How the experts are called. "nested": in a layer that is a unit. "returned": the layer returns the output of an
# expert. "frozen": the layer has no trainable parameter of its own. "inner": the layer contains a unit of the root's
# mesh, before the experts and after them. "twice": a layer is called twice in a row. "flat": the layer is no unit,
# but contains a unit of the root's mesh, which it calls before the experts and after them. "beside": the same, and
# another unit computes from data that needs no gradient.
KINDS = ("nested", "returned", "frozen", "inner", "twice", "flat", "beside")
# Experts that a layer calls, in order.
CHOICES = {"all": (0, 1, 2), "reversed": (2, 1, 0), "first": (0,), "last": (2,), "none": ()}


class Meet(torch.autograd.Function):
    """Identity around a collective of the user, in forward and backward, as a dispatch of tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, meet: Callable[[], object]) -> Tensor:
        ctx.meet = meet
        meet()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.meet()
        return gradient, None


class Plain(nn.Module):
    """Module with one parameter, whose backward needs the output of its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.weight).relu()


class Expert(Plain):
    """Expert, a unit on a smaller mesh."""


class Layer(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.shift = nn.Parameter(torch.ones(WIDTH), requires_grad=kind != "frozen")
        self.before = Plain() if kind in ("inner", "beside", "flat") else nn.Identity()
        self.after = Plain() if kind in ("inner", "beside") else nn.Identity()
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def forward(self, x: Tensor, chosen: tuple[int, ...], meet: Callable[[], object]) -> Tensor:
        x = total = Meet.apply(self.before(x) + self.shift, meet)
        for index in chosen:
            total = total + self.experts[index](x)
        total = Meet.apply(total, meet).relu()  # relu: all ranks recompute the layer
        if self.kind == "beside":
            from_data = self.after(torch.ones_like(total))
            return self.before(total) + from_data
        if self.kind == "flat":
            return self.before(total)
        total = self.after(total)
        if self.kind == "returned" and chosen:
            return self.experts[chosen[0]](total)
        return total


class ExpertNet(nn.Module):
    """Three layers with three experts each.

    Args:
        kind: one of `KINDS`.
        recompute: kind of the activation checkpoint of each layer: ``"none"``, ``"reentrant"`` or ``"other"``.
        meet: collective of the user, which each layer calls twice in forward and backward.
    """

    def __init__(self, kind: str, recompute: str = "none", meet: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self.recompute, self.meet = recompute, meet
        self.times = 2 if kind == "twice" else 1
        self.shift = nn.Parameter(torch.ones(WIDTH))
        self.layers = nn.ModuleList(Layer(kind) for _ in range(LAYERS))
        self.head = Plain()

    def forward(self, x: Tensor, choice: str) -> Tensor:
        x = x + self.shift
        for layer in self.layers:
            for _ in range(self.times):
                if self.recompute == "none":
                    x = layer(x, CHOICES[choice], self.meet)
                else:
                    x = checkpoint(layer, x, CHOICES[choice], self.meet, use_reentrant=self.recompute == "reentrant")
        return self.head(x)


def expert_units(kind: str) -> set[type[nn.Module]]:
    """Return the classes of the units."""
    return {Expert, Plain} if kind in ("flat", "beside") else {Expert, Plain, Layer}


def expert_mesh_of(root: DeviceMesh, experts: DeviceMesh) -> Callable[[str, nn.Module], DeviceMesh]:
    """Return a callable that selects the mesh of each unit."""
    return lambda name, module: experts if isinstance(module, Expert) else root


def experts_mesh(size: int, ep: int, device_type: str = "cpu") -> tuple[DeviceMesh, DeviceMesh]:
    """Return the mesh of the experts, in ZeRO-3 groups of `size` ranks, and the mesh of the expert-parallel ranks."""
    shape = (dist.get_world_size() // ep // size, size, ep)
    whole = dist.device_mesh.init_device_mesh(device_type, shape, mesh_dim_names=("replicas", "shards", "ep"))
    return whole["replicas", "shards"], whole["ep"]
