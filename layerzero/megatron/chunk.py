"""Provide a sharded model chunk that has the interface of Megatron's data-parallel wrapper."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from layerzero import load_full_state_dict
from layerzero.extend import RowShardedTensor, get_state, local_rows, torch_compat
from layerzero.megatron.parallel_groups import NOT_FOUND, ProcessGroups
from layerzero.reliability import LocalGradientCheck


class ShardedChunk(nn.Module):
    """Sharded model chunk with the methods that Megatron's schedules and training loop call.

    :func:`layerzero.megatron.wrap` creates the chunk. The chunk is the root of the sharded model. Therefore, pass the
    chunk to ``layerzero.memory``, ``layerzero.traffic``, ``layerzero.EMA`` and ``layerzero.full_state_dict``. The
    parameters have the same names as in Megatron's own wrapper. The chunk has no ``ddp_config``, so that Megatron's own
    ``finalize_model_grads``, which would leave gradients of tied embeddings unsummed, raises an error.

    Attributes:
        module: Megatron's model.
        config: TransformerConfig of the model.
        groups: process groups of this rank.
        own_gradients: record of this rank's NaN and infinite gradients. If None, gradients are not checked.
    """

    def __init__(self, module: nn.Module, config: Any, groups: ProcessGroups) -> None:
        super().__init__()
        self.module = module
        self.config = config
        self.groups = groups
        self.own_gradients: LocalGradientCheck | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    # Gradients

    no_sync: Callable[[], AbstractContextManager[None]]  # bound by shard_model; inside, gradients only accumulate

    def start_grad_sync(self, *unused: object) -> None:
        """Reduce gradients that were accumulated inside :meth:`no_sync`.

        All data-parallel ranks must call this method.
        """
        get_state(self).scheduler.complete_gradients()

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Complete the gradient reduction. Afterwards, all gradients of the chunk are final.

        Raises:
            ValueError: `force_all_reduce` is True, as Megatron's loop sets it to save full gradients.
        """
        if force_all_reduce:
            raise ValueError(
                "force_all_reduce=True is not supported, because a rank stores only some rows of the gradients. Leave "
                "it False"
            )
        get_state(self).scheduler.complete_gradients()

    @torch.no_grad()
    def scale_gradients(self, scaling_factor: float | Tensor) -> None:
        """Multiply all final gradients by a factor, in place."""
        if isinstance(scaling_factor, Tensor):
            scaling_factor = scaling_factor.reshape(())
        gradients = [rows for rows in self.gradient_rows().values() if rows.numel()]
        if gradients:
            torch_compat.foreach_mul_(gradients, scaling_factor)

    def gradient_rows(self) -> dict[str, Tensor]:
        """Return this rank's rows of the final gradients as plain tensors, keyed by parameter name.

        Parameters without a gradient are omitted.
        """
        return {name: local_rows(p.grad) for name, p in self.named_parameters() if p.grad is not None}

    def zero_grad_buffer(self) -> None:
        """Discard all gradients, including those of a backward pass that raised an error."""
        get_state(self).scheduler.recover_interrupted_pass()
        self.zero_grad(set_to_none=True)
        if self.own_gradients is not None:
            self.own_gradients.clear_record()

    # Parameters

    def start_param_sync(self, *unused: object, force_sync: bool = False, force_dispatch: bool = False) -> None:
        """Refresh the compute weights.

        The method launches the refreshes that the optimizer's step deferred, and refreshes of masters to which the user
        has written.
        """
        get_state(self).refreshes.launch_due()

    def broadcast_params(self) -> None:
        """Do nothing, because :func:`~layerzero.megatron.wrap` has already broadcast the first rank's parameters."""

    def set_is_first_microbatch(self) -> None:
        module: Any = self.module
        if hasattr(module, "set_is_first_microbatch"):
            module.set_is_first_microbatch()

    # State dicts, with the names of the unwrapped module

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def state_dict_for_save_checkpoint(self, prefix: str = "", keep_vars: bool = False) -> dict[str, Any]:
        """Raise an error, because Megatron calls this method on only some ranks, and no rank has full parameters.

        Raises:
            NotImplementedError: always. The message names the alternatives.
        """
        raise NotImplementedError(
            "the parameters of this chunk are sharded. Save with layerzero.megatron.save or in the format torch_dist, "
            "or call layerzero.full_state_dict(chunk) on every data-parallel rank"
        )

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Return this rank's rows of each parameter, in compute dtype, for ``megatron.core.dist_checkpointing``.

        The rows are copies. The format is Megatron's own. Therefore Megatron can load a checkpoint of layerzero in any
        parallel layout, and vice versa. To load a checkpoint, pass the loaded state dict to :meth:`load_state_dict`.

        Raises:
            NotImplementedError: Megatron stores a parameter in pieces that are not contiguous ranges of its rows.
        """
        from layerzero.megatron.sharded_model_state import global_params, insert_weights  # noqa: PLC0415

        state, _ = global_params(self.module, get_state(self).members.values(), metadata, prefix, sharded_offsets)
        return insert_weights(state)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load full or sharded tensors into the chunk. All data-parallel ranks must call this method.

        Full tensors must have the names and shapes in the unwrapped module's ``state_dict()``. Every rank then loads
        the values that the first data-parallel rank passes. Sharded tensors must come from :meth:`state_dict`, or from
        ``dist_checkpointing.load`` with :meth:`sharded_state_dict`.

        Args:
            strict: if True, raise an error if keys are missing or unexpected. If False, return these keys instead. If a
                non-strict ``dist_checkpointing.load`` did not find a sharded tensor, the tensor's key counts as missing
                on the ranks that hold rows of the tensor.
            assign: must be False.

        Raises:
            ValueError: `assign` is True.
        """
        if assign:
            raise ValueError("assign=True would replace the sharded parameters of the model. Leave it False")
        if any(value is NOT_FOUND or isinstance(value, RowShardedTensor) for value in state_dict.values()):
            loaded = {name: value for name, value in state_dict.items() if value is not NOT_FOUND}
            return self.module.load_state_dict(loaded, strict=strict)
        return load_full_state_dict(self, state_dict, strict=strict)
