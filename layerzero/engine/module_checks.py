"""Check for changes to the modules and parameters of a sharded model.

Only parameters that were in the model when it was sharded have their gradients reduced and are updated by the sharded
optimizer. If a parameter were added later, each rank would silently train its own copy.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping

from torch import nn

from layerzero.dtensor.sharded_tensor import RowShardedTensor
from layerzero.engine.managed_param import ManagedParam


class StructureCheck:
    """Record of a model's modules and parameters at the time of sharding, which detects later changes.

    Create this object while the modules hold sharded parameters.
    """

    def __init__(self, model: nn.Module, members: Iterable[ManagedParam]) -> None:
        self._model = weakref.ref(model)  # see [Note: References between model and state] in hooks.py
        self._sharded = {id(member.sharded): member for member in members}
        self._parameter_tables = [
            module._parameters for module in model.modules()
        ]  # kept alive, so that the ids stay unique
        # (dict, attribute) of the parameters that are sharded, or that are ignored and trained by the user.
        self._parameter_refs = {
            (id(parameters), attribute)
            for parameters in self._parameter_tables
            for attribute, parameter in parameters.items()
            if parameter is not None
        }
        self._added_frozen_params: list[nn.Parameter] = []  # these need no reduction and no step while they are frozen
        self._record_structure()

    @property
    def _live_model(self) -> nn.Module:
        model = self._model()
        assert model is not None
        return model

    def check_for_changes(self) -> None:
        """Check the modules and parameters of the model. Call this method at the start of an outermost forward pass.

        Modules may be removed, wrapped in other modules, or added if they have no trainable parameters.

        Raises:
            RuntimeError: a parameter was replaced, or a trainable parameter was added.
        """
        if self._has_changed() or any(parameter.requires_grad for parameter in self._added_frozen_params):
            self._check_structure()
            self._record_structure()

    def _has_changed(self) -> bool:
        # This method runs in every forward pass, so it avoids Python loops. Units check for replaced parameters.
        return (
            [*map(len, self._parameters)] != self._counts
            or any(self._leaf_tables)
            or self._parents != self._children
            or not {*map(dict.get, self._tables_of_absent, self._absent)} <= {None}
        )

    def _record_structure(self) -> None:
        modules = list(self._live_model.modules())
        self._parameters = [module._parameters for module in modules]
        self._counts = [*map(len, self._parameters)]
        self._leaf_tables = [module._modules for module in modules if not module._modules]
        self._parents = [module._modules for module in modules if module._modules]
        self._children = [dict(table) for table in self._parents]  # modules are equal only to themselves
        missing = [(table, name) for table in self._parameters for name, value in table.items() if value is None]
        self._tables_of_absent = [table for table, _ in missing]
        self._absent = [name for _, name in missing]

    def _check_structure(self) -> None:
        modules = dict(self._live_model.named_modules())
        ids = {id(module._parameters) for module in modules.values()}
        for member in self._sharded.values():
            for parameters, attribute in member.module_refs:
                current = parameters.get(attribute)
                own = (member.sharded, member.gathered, member.shown)
                if id(parameters) in ids and not any(current is each for each in own):
                    raise replaced_param_error(member)
        added = dict(self._added_params(modules))
        if trained := [name for name, parameter in added.items() if parameter.requires_grad]:
            raise RuntimeError(
                f"{_format_names(trained)} joined the model after shard_model. Gradients would not be averaged over "
                "the ranks, and no sharded optimizer would update the parameters. Add modules and parameters before "
                "shard_model (in ignored_modules or ignored_params, to keep them unsharded), or freeze them with "
                "requires_grad_(False)"
            )
        self._added_frozen_params = [*added.values()]

    def _added_params(self, modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters that joined the model after sharding, except those that another sharded model manages.

        Raises:
            RuntimeError: one of them was tied to a sharded parameter.
        """
        for name, module in modules.items():
            for attribute, parameter in module._parameters.items():
                ref = (id(module._parameters), attribute)
                if parameter is None or ref in self._parameter_refs:
                    continue
                full_name = f"{name}.{attribute}" if name else attribute
                if tied := self._sharded.get(id(parameter)):
                    raise RuntimeError(
                        f"parameter {full_name!r} was tied to {tied.name!r} after shard_model, and would not be "
                        "gathered in that module. Tie parameters before shard_model"
                    )
                if not isinstance(parameter, RowShardedTensor):
                    yield full_name, parameter


def replaced_param_error(member: ManagedParam) -> RuntimeError:
    """Return the error for a managed parameter that was replaced in its module."""
    return RuntimeError(
        f"parameter {member.name!r} was replaced in the sharded model, by an assignment, functional_call, a "
        "parametrization or load_state_dict(assign=True) of a part. To change values, copy them into the parameter, or "
        "use layerzero.load_full_state_dict. Replace parameters before shard_model"
    )


def _format_names(names: list[str]) -> str:
    listed = ", ".join(repr(name) for name in names[:4]) + (", ..." if len(names) > 4 else "")
    return f"parameters {listed}" if len(names) > 1 else f"parameter {listed}"
