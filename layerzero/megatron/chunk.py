"""A sharded model chunk with the interface of Megatron's data-parallel wrapper."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from layerzero.dtensor.sharded_tensor import RowShardedTensor, plain
from layerzero.engine.hooks import get_state
from layerzero.full_state import load_full_state_dict
from layerzero.megatron.parallel_groups import NOT_FOUND, ProcessGroups
from layerzero.reliability.own_gradients import LocalGradientCheck

__all__ = ["ShardedChunk"]


class ShardedChunk(nn.Module):
    """What Megatron's schedules and loop call on a model chunk; made by :func:`layerzero.megatron.wrap`.

    It is the root of the sharded model: pass it to ``layerzero.memory``, ``layerzero.traffic``, ``layerzero.EMA`` and
    ``layerzero.full_state_dict``. Its parameters have the names that they have under Megatron's own wrapper.

    Attributes:
        module: Megatron's model.
        config: its TransformerConfig.
        groups: where this rank stands.
        own_gradients: which of this rank's gradients were not finite; None where nobody wants to know.
    """

    def __init__(self, module: nn.Module, config: Any, groups: ProcessGroups) -> None:
        super().__init__()
        self.module = module
        self.config = config
        self.groups = groups
        self.own_gradients: LocalGradientCheck | None = None
        self._shows_whole_gradients = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "ddp_config":  # for which Megatron's finalize_model_grads asks
            raise AttributeError(
                "a ShardedChunk has no ddp_config: Megatron's own functions cannot finish sharded gradients. Leave "
                "config.finalize_model_grads_func as layerzero.megatron.wrap has set it"
            )
        return super().__getattr__(name)

    # Gradients

    no_sync: Callable[[], AbstractContextManager[None]]  # backwards inside only accumulate; bound by shard_model

    def start_grad_sync(self, *unused: object) -> None:
        """Reduce what backwards inside :meth:`no_sync` have left behind. All data-parallel ranks must call this."""
        get_state(self).scheduler.complete_gradients()

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Return when all gradients are final."""
        get_state(self).scheduler.complete_gradients()

    @torch.no_grad()
    def scale_gradients(self, scaling_factor: float | Tensor) -> None:
        """Multiply all final gradients."""
        if isinstance(scaling_factor, Tensor):
            scaling_factor = scaling_factor.reshape(())
        gradients = [rows for rows in self.gradient_rows().values() if rows.numel()]
        if gradients:
            torch._foreach_mul_(gradients, scaling_factor)

    def gradient_rows(self) -> dict[str, Tensor]:
        """This rank's rows of the final gradients, plain, by name; without parameters that no rank has used."""
        return {name: plain(p.grad) for name, p in self.named_parameters() if p.grad is not None}

    def zero_grad_buffer(self) -> None:
        """Forget all gradients, also those of a backward that raised."""
        get_state(self).scheduler.recover_interrupted_pass()
        self.zero_grad(set_to_none=True)
        if self.own_gradients is not None:
            self.own_gradients.forget()
        if self._shows_whole_gradients:
            self._shows_whole_gradients = False
            for parameter in self.parameters():
                del parameter.main_grad  # type: ignore[attr-defined]

    def show_whole_gradients(self) -> None:
        """Until gradients are zeroed, let each parameter have its whole final gradient as ``main_grad``.

        For ``--save-wgrads-interval``, which reads it. It is there on the first data-parallel rank, which writes the
        file, in host memory; None on others. All data-parallel ranks must call this.
        """
        keeps = dist.get_rank(self.groups.zero1) == 0
        self._shows_whole_gradients = True
        for parameter in self.parameters():
            whole = torch.zeros(parameter.shape)
            if parameter.grad is not None:
                whole = parameter.grad.full_tensor().cpu()  # type: ignore[attr-defined]
            parameter.main_grad = whole if keeps else None  # type: ignore[attr-defined]

    # Parameters

    def start_param_sync(self, *unused: object, force_sync: bool = False, force_dispatch: bool = False) -> None:
        """Launch the refresh that the optimizer's step has left, and that of masters which were edited by hand."""
        get_state(self).refreshes.launch_deferred()
        get_state(self).refreshes.launch_edited()

    def broadcast_params(self) -> None:
        """Nothing is left to do: :func:`~layerzero.megatron.wrap` started from the first rank's parameters."""

    def set_is_first_microbatch(self) -> None:
        if hasattr(self.module, "set_is_first_microbatch"):
            self.module.set_is_first_microbatch()  # type: ignore[operator]

    # States, with the names that the module alone has

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def state_dict_for_save_checkpoint(self, prefix: str = "", keep_vars: bool = False) -> dict[str, Any]:
        """Always raises: Megatron calls it on some ranks only, and none of them has whole parameters."""
        raise NotImplementedError(
            "the parameters of this chunk are sharded; save with layerzero.megatron.save or in the format torch_dist, "
            "or call layerzero.full_state_dict(chunk) on every data-parallel rank"
        )

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        """For ``megatron.core.dist_checkpointing``: this rank's rows of each parameter, in the dtype it computes in.

        The format is Megatron's own: either loads what the other has saved, in any layout. Give what was loaded to
        :meth:`load_state_dict`. A copy of this rank's rows is made.

        Raises:
            NotImplementedError: a parameter is stored in pieces that are not runs of its rows.
        """
        from layerzero.megatron.sharded_model_state import global_params, with_weights  # noqa: PLC0415

        state, _ = global_params(self.module, get_state(self).members.values(), metadata, prefix, sharded_offsets)
        return with_weights(state)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load whole tensors, as the module's own ``state_dict()`` has them before it is wrapped, or sharded ones, as
        :meth:`state_dict` has them or ``dist_checkpointing.load`` returns for :meth:`sharded_state_dict`.

        Of whole ones, the first data-parallel rank's are what all ranks get. All data-parallel ranks must call this.
        Where `strict` is False, what was missing and unexpected is returned; of sharded ones, what a load that was not
        strict has not found is missing on the ranks that have rows of it.
        """
        if assign:
            raise ValueError("assign=True would take the sharded parameters out of the model; leave it False")
        if any(value is NOT_FOUND or isinstance(value, RowShardedTensor) for value in state_dict.values()):
            found = {name: value for name, value in state_dict.items() if value is not NOT_FOUND}
            return self.module.load_state_dict(found, strict=strict)
        return load_full_state_dict(self, state_dict, strict=strict)
