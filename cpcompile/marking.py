"""Hooks that pass the tensors a plan names through marker operators while a model is captured."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from cpcompile.errors import PlanError, Problem
from cpcompile.ops.markers import mark
from cpcompile.plan import PlanEntry, ResolvedPlan


class Marking:
    """One capture's marking: which entries found their tensors, and what went wrong."""

    def __init__(self, plan: ResolvedPlan) -> None:
        self._plan = plan
        self._problems: list[Problem] = []
        self._notes: dict[int, str] = {}
        self._marked: set[int] = set()

    @contextlib.contextmanager
    def hooked(self, model: nn.Module) -> Iterator[None]:
        """The hooks are on the model inside, and gone after."""
        handles: list[Any] = []
        try:
            by_module: dict[str, list[int]] = {}
            for index, entry in enumerate(self._plan.entries):
                by_module.setdefault(entry.module, []).append(index)
            for name, indices in by_module.items():
                module = model.get_submodule(name)
                before = [i for i in indices if self._plan.entries[i].role == "split_input"]
                after = [i for i in indices if self._plan.entries[i].role != "split_input"]
                if before:
                    handles.append(module.register_forward_pre_hook(self._before(before), with_kwargs=True))
                if after:
                    handles.append(module.register_forward_hook(self._after(after)))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def raise_problems(self) -> None:
        """Raise what the hooks found wrong, all of it."""
        if self._problems:
            raise PlanError(self._problems)

    def notes(self) -> tuple[str, ...]:
        """What was skipped, and entries whose module was never called or whose tensor was never there."""
        found = [note for index, note in sorted(self._notes.items()) if index not in self._marked]
        silent = [
            f"{entry.name}: its module was not called, nothing was done"
            for index, entry in enumerate(self._plan.entries)
            if index not in self._marked and index not in self._notes
        ]
        return (*found, *silent)

    def _before(self, indices: Sequence[int]) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
            names = _positional_names(module)
            new_args, new_kwargs = list(args), dict(kwargs)
            for index in indices:
                key = self._plan.entries[index].key
                if key in new_kwargs:
                    new_kwargs[str(key)] = self._mark(index, new_kwargs[str(key)])
                elif key in names and names.index(str(key)) < len(new_args):
                    position = names.index(str(key))
                    new_args[position] = self._mark(index, new_args[position])
                else:
                    self._notes[index] = f"{self._plan.entries[index].name}: the caller left it out"
            return tuple(new_args), new_kwargs

        return hook

    def _after(self, indices: Sequence[int]) -> Any:
        def hook(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
            for index in indices:
                entry = self._plan.entries[index]
                assert isinstance(entry.key, int)
                if isinstance(output, torch.Tensor):
                    if entry.key == 0:
                        output = self._mark(index, output)
                        continue
                    count: int | str = "one"
                elif isinstance(output, (tuple, list)):
                    if entry.key < len(output):
                        output = _replaced(output, entry.key, self._mark(index, output[entry.key]))
                        continue
                    count = len(output)
                elif isinstance(output, dict):
                    if entry.key < len(output):
                        name = list(output)[entry.key]
                        output[name] = self._mark(index, output[name])
                        continue
                    count = len(output)
                else:
                    count = f"a {type(output).__name__}, no"
                self._problem(entry, f"the module gives {count} outputs", "name an output that the module has")
            return output

        return hook

    def _mark(self, index: int, value: Any) -> Any:
        entry = self._plan.entries[index]
        if value is None:
            self._notes[index] = f"{entry.name}: it is None in this call"
            return value
        if isinstance(value, (list, tuple)):
            if entry.item is None:
                self._problem(
                    entry, f"it is a {type(value).__name__} of {len(value)}", "give a list with one entry for each item"
                )
                return value
            if entry.item >= len(value):
                self._problem(entry, f"the list has {len(value)} items", "give one entry for each item")
                return value
            return _replaced(value, entry.item, self._mark_tensor(index, entry, value[entry.item]))
        return self._mark_tensor(index, entry, value)

    def _mark_tensor(self, index: int, entry: PlanEntry, value: Any) -> Any:
        if value is None:
            self._notes[index] = f"{entry.name}: it is None in this call"
            return value
        if not isinstance(value, torch.Tensor):
            self._problem(entry, f"it is a {type(value).__name__}, not a tensor", "name a tensor, or a list of tensors")
            return value
        if entry.expected_dims is not None and value.dim() != entry.expected_dims:
            self._notes[index] = (
                f"{entry.name}: it has {value.dim()} dimensions where the plan expects {entry.expected_dims}; "
                f"left as it is"
            )
            return value
        if not -value.dim() <= entry.dim < value.dim():
            self._problem(
                entry,
                f"dimension {entry.dim} of a tensor of shape {tuple(value.shape)}",
                f"use a dimension between {-value.dim()} and {value.dim() - 1}",
            )
            return value
        self._marked.add(index)
        return mark(value, index)

    def _problem(self, entry: PlanEntry, law: str, remedy: str) -> None:
        problem = Problem(entry.name, law, remedy)
        if problem not in self._problems:
            self._problems.append(problem)


def _positional_names(module: nn.Module) -> list[str]:
    """Parameter names of the module's forward by position, through wrappers that keep the signature."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(module.forward).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind in kinds]


def _replaced(values: Sequence[Any], index: int, value: Any) -> Any:
    new = [*values[:index], value, *values[index + 1 :]]
    if isinstance(values, tuple) and hasattr(values, "_fields"):
        return type(values)(*new)
    return new if isinstance(values, list) else tuple(new)
