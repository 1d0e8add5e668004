"""The plan: where a model's values become sharded over the sequence, and where they become whole again.

The format is that of diffusers' ``_cp_plan``. Plans made of diffusers' own objects are accepted as they are: what
counts is the attributes, so that diffusers need not be installed.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

from torch import nn

from cpcompile.errors import PlanError, Problem
from cpcompile.module_names import closest_names, kind, match_modules
from cpcompile.plan_values import PlanEntry, Role, Slot, describe_type, read_value

__all__ = [
    "ContextParallelInput",
    "ContextParallelInputType",
    "ContextParallelModelPlan",
    "ContextParallelOutput",
    "ContextParallelOutputType",
    "PlanEntry",
    "ResolvedPlan",
    "Role",
    "resolve_plan",
]


@dataclass(frozen=True)
class ContextParallelInput:
    """Shard one tensor over the sequence: an argument of a module, or with ``split_output`` one of its outputs.

    ``split_dim`` is the dimension of the sequence. Where ``expected_dims`` is given, a tensor with another number of
    dimensions is left whole.
    """

    split_dim: int
    expected_dims: int | None = None
    split_output: bool = False

    def __repr__(self) -> str:
        return (
            f"ContextParallelInput(split_dim={self.split_dim}, expected_dims={self.expected_dims}, "
            f"split_output={self.split_output})"
        )


@dataclass(frozen=True)
class ContextParallelOutput:
    """Make one output of a module whole again along ``gather_dim``, the dimension of the sequence."""

    gather_dim: int
    expected_dims: int | None = None

    def __repr__(self) -> str:
        return f"ContextParallelOutput(gather_dim={self.gather_dim}, expected_dims={self.expected_dims})"


# What is split at one module: by the name of a parameter of forward, or by the index of an output. A list goes with an
# argument that is itself a list of tensors; None leaves that tensor alone.
ContextParallelInputType = Mapping[str | int, ContextParallelInput | Sequence[ContextParallelInput | None]]

# What is gathered at one module: its only output, or one element for each output; None leaves that output alone.
ContextParallelOutputType = ContextParallelOutput | Sequence[ContextParallelOutput | None]

# By module name: "" is the root, and "*" in a name stands for any one child.
ContextParallelModelPlan = Mapping[str, ContextParallelInputType | ContextParallelOutputType]


@dataclass(frozen=True)
class ResolvedPlan:
    """A plan that fits its model: one entry for each tensor, in the plan's order, and what the report should say."""

    entries: tuple[PlanEntry, ...]
    notes: tuple[str, ...]


def resolve_plan(plan: Mapping[str, Any], model: nn.Module) -> ResolvedPlan:
    """Expand the names of a plan and check it against the model, which stays untouched.

    Raises one PlanError that lists everything that is wrong. Modules that a shallow model lacks where others of their
    kind are there become notes.
    """
    split_something = "split at least one tensor, as in {'': {'hidden_states': ContextParallelInput(split_dim=1)}}"
    if not isinstance(plan, Mapping):
        remedy = f"pass a dict of module names, {split_something.removeprefix('split at least one tensor, ')}"
        raise PlanError([Problem("plan", f"a plan is a dict, not {describe_type(plan)}", remedy)])
    resolution = _Resolution(model)
    for pattern, value in plan.items():
        resolution.add(pattern, value)
    entries = tuple(replace(entry, module=name) for name, slot in resolution.slots.values() for entry in slot.entries)
    problems = resolution.problems
    if not plan:
        problems.append(Problem("plan", "the plan is empty, so nothing would be sharded", split_something))
    elif not problems and all(entry.role == "gather_output" for entry in entries):
        law = "it splits no tensor of this model, so nothing would be sharded"
        problems.append(Problem("plan", law, split_something))
    if problems:
        raise PlanError(problems)
    return ResolvedPlan(entries, tuple(_absent_note(k, names) for k, names in resolution.absent.items()))


class _Resolution:
    """What is known so far while a plan is walked."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.problems: list[Problem] = []
        # By module identity: a tied module has several names, and its tensors are still split once.
        self.slots: dict[tuple[int, Role, str | int], tuple[str, Slot]] = {}
        self.absent: dict[str, dict[str, None]] = {}

    def add(self, pattern: object, value: object) -> None:
        where = f"plan[{pattern!r}]"
        slots = read_value(value, where, self.problems)
        if not isinstance(pattern, str):
            law = f"a module is named by a string, not {describe_type(pattern)}"
            self.problems.append(Problem(where, law, 'use the full name of the module ("" is the root)'))
            return
        match = match_modules(self.model, pattern)
        if match.unknown:
            closest = ", ".join(map(repr, closest_names(self.model, pattern))) or "'' (the root)"
            law = f"{type(self.model).__name__} has no module {pattern!r}"
            self.problems.append(Problem(where, law, f"name a module that exists; the closest: {closest}"))
        for name in match.absent:
            self.absent.setdefault(kind(name), {})[name] = None
        uncallable = [name for name, module in match.found if _has_no_forward(module)]
        if uncallable:
            law = f"{_names(uncallable)} only holds other modules and is never called: no tensor goes in or out"
            self.problems.append(Problem(where, law, f"name its members, as in {uncallable[0] + '.*'!r}"))
        found = [(name, module) for name, module in match.found if name not in uncallable]
        for slot in slots:
            if slot.role == "split_input":
                self._check_parameter(str(slot.key), slot.where, found)
            self._put(slot, found)

    def _check_parameter(self, parameter: str, where: str, found: list[tuple[str, nn.Module]]) -> None:
        refusing: dict[type[nn.Module], list[str]] = {}
        accepted: dict[type[nn.Module], list[str]] = {}
        for name, module in found:
            names = _parameter_names(module)
            if names is not None and parameter not in names:
                refusing.setdefault(type(module), []).append(name or "the root")
                accepted[type(module)] = names
        for cls, names in refusing.items():
            law = f"the forward of {cls.__name__} ({_names(names)}) has no parameter {parameter!r}"
            closest = get_close_matches(parameter, accepted[cls], n=1)
            listed = ", ".join(accepted[cls]) or "none"
            remedy = f"use {closest[0]!r}; " if closest else ""
            self.problems.append(Problem(where, law, f"{remedy}its parameters are: {listed}"))

    def _put(self, slot: Slot, found: list[tuple[str, nn.Module]]) -> None:
        contradicted: dict[str, tuple[Slot, list[str]]] = {}
        for name, module in found:
            _, earlier = self.slots.setdefault((id(module), slot.role, slot.key), (name, slot))
            if earlier.meaning != slot.meaning:
                names = contradicted.setdefault(earlier.where, (earlier, []))[1]
                names.append(replace(slot.entries[0], module=name, item=None).name)
        for where, (earlier, names) in contradicted.items():
            law = f"{_names(names)} is given {slot} here, but {earlier} at {where}"
            self.problems.append(Problem(slot.where, law, "keep one of the two"))


def _parameter_names(module: nn.Module) -> list[str] | None:
    """Return the names that the module's forward takes, or None where it takes any."""
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):  # compiled code that has no signature
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return [parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_POSITIONAL]


def _has_no_forward(module: nn.Module) -> bool:
    return type(module).forward is nn.Module.forward and "forward" not in vars(module)


def _names(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _absent_note(kind_of_name: str, names: Mapping[str, None]) -> str:
    listed = list(names)
    shown = ", ".join(listed) if len(listed) <= 4 else f"{listed[0]}, {listed[1]}, ..., {listed[-1]}"
    return f"this model has no {shown}: the plan's entries for {kind_of_name} are skipped there"
