"""The values of a plan: what it says at one module, read and checked without looking at a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from cpcompile.errors import Problem

Role = Literal["split_input", "split_output", "gather_output"]


@dataclass(frozen=True)
class PlanEntry:
    """One tensor at one module that the plan splits or gathers."""

    module: str
    """The full name in the model; "" is the root."""
    role: Role
    key: str | int
    """The parameter's name (split_input), or the output's index (split_output, gather_output)."""
    item: int | None
    """The index in an argument that is a list of tensors."""
    dim: int
    """The dimension that is split or gathered; negative counts from the end."""
    expected_dims: int | None

    @property
    def name(self) -> str:
        """What errors and the report call this tensor, for example ``blocks.0.hidden_states`` or ``rope output 0``."""
        if self.role != "split_input":
            return f"{self.module} output {self.key}".lstrip()
        name = f"{self.module}.{self.key}" if self.module else str(self.key)
        return name if self.item is None else f"{name}[{self.item}]"


@dataclass(frozen=True)
class Slot:
    """One argument or output of a module, as one place in the plan describes it."""

    where: str
    role: Role
    key: str | int
    entries: tuple[PlanEntry, ...]
    """One entry, or one for each tensor of a list; they do not know their module yet."""

    @property
    def meaning(self) -> frozenset[tuple[int | None, int, int | None]]:
        """What two slots that ask for the same have in common: -1 of 3 dimensions is 2."""
        return frozenset((e.item, e.dim % (e.expected_dims or 1 << 31), e.expected_dims) for e in self.entries)

    def __str__(self) -> str:
        items = ("" if entry.item is None else f"[{entry.item}] " for entry in self.entries)
        return "; ".join(
            f"{item}dim={entry.dim}, expected_dims={entry.expected_dims}"
            for item, entry in zip(items, self.entries, strict=True)
        )


def read_value(value: object, where: str, problems: list[Problem]) -> list[Slot]:
    """Return what one value of a plan asks for; what is wrong with it goes to ``problems``."""
    if isinstance(value, Mapping):
        if not value:
            problems.append(Problem(where, "it names no input and no output", "name one, or delete this key"))
        slots = (_read_split(key, spec, f"{where}[{key!r}]", problems) for key, spec in value.items())
        return [slot for slot in slots if slot]
    if _is_output(value):
        return _read_gather(0, value, where, problems)
    if isinstance(value, list | tuple):
        if not value:
            remedy = "give one element for each output, or delete this key"
            problems.append(Problem(where, "it names no output", remedy))
        return [slot for i, spec in enumerate(value) for slot in _read_gather(i, spec, f"{where}[{i}]", problems)]
    law = f"a module takes a dict of inputs, a ContextParallelOutput or a list of them, not {describe_type(value)}"
    remedy = "split inputs with {name: ContextParallelInput(...)}, gather an output with ContextParallelOutput(...)"
    problems.append(Problem(where, law, remedy))
    return []


def describe_type(value: object) -> str:
    """Name the type of a value in a sentence."""
    return "None" if value is None else f"a value of type {type(value).__name__}"


def _read_gather(index: int, spec: object, where: str, problems: list[Problem]) -> list[Slot]:
    if spec is None:
        return []
    if not _is_output(spec):
        law = f"a gathered output is described by a ContextParallelOutput, not {describe_type(spec)}"
        remedy = "use ContextParallelOutput(gather_dim=...), or None to leave this output; inputs stand in a dict"
        problems.append(Problem(where, law, remedy))
        return []
    entry = _read_entry("gather_output", index, None, spec, where, problems)
    return [Slot(where, "gather_output", index, (entry,))] if entry else []


def _read_split(key: object, spec: object, where: str, problems: list[Problem]) -> Slot | None:
    law, remedy = "", ""
    if isinstance(key, bool) or not isinstance(key, str | int) or (isinstance(key, int) and key < 0):
        law = f"the key {key!r} is neither the name of a parameter nor the index of an output"
        remedy = "use a string for an input, or an integer from 0 on for an output"
    elif isinstance(key, str) and isinstance(spec, list | tuple):
        return _read_split_list(key, spec, where, problems)
    elif _is_output(spec):
        law = "a dict describes what is split, and a ContextParallelOutput what is gathered"
        remedy = "make the ContextParallelOutput the value of a module's name, outside this dict"
    elif not _is_input(spec):
        law = f"a split tensor is described by a ContextParallelInput, not {describe_type(spec)}"
        remedy = "use ContextParallelInput(split_dim=...)"
    elif not isinstance(_field(spec, "split_output"), bool):
        law = f"split_output is True or False, not {_field(spec, 'split_output')!r}"
        remedy = "set split_output=True for an output, split_output=False for an input"
    elif isinstance(key, str) and _field(spec, "split_output"):
        law = "a string key names an input, but split_output=True splits an output"
        remedy = "use the index of the output as the key (0 for the first), or set split_output=False"
    elif isinstance(key, int) and not _field(spec, "split_output"):
        law = "an integer key names an output, but split_output=False splits an input"
        remedy = "set split_output=True, or use the name of a parameter of forward as the key"
    else:
        role: Role = "split_input" if isinstance(key, str) else "split_output"
        entry = _read_entry(role, key, None, spec, where, problems)
        return Slot(where, role, key, (entry,)) if entry else None
    problems.append(Problem(where, law, remedy))
    return None


def _read_split_list(
    key: str, specs: list[object] | tuple[object, ...], where: str, problems: list[Problem]
) -> Slot | None:
    if not specs:
        remedy = "give one ContextParallelInput for each tensor of the argument"
        problems.append(Problem(where, "the list describes no tensor", remedy))
    entries = []
    for item, spec in enumerate(specs):
        if spec is None or (_is_input(spec) and _field(spec, "split_output") is True):
            continue  # left alone
        if _is_input(spec):
            entries.append(_read_entry("split_input", key, item, spec, f"{where}[{item}]", problems))
        else:
            law = f"a tensor of a list is described by a ContextParallelInput, not {describe_type(spec)}"
            remedy = "use ContextParallelInput(split_dim=...), or None to leave this tensor"
            problems.append(Problem(f"{where}[{item}]", law, remedy))
    good = tuple(entry for entry in entries if entry)
    return Slot(where, "split_input", key, good) if good else None


def _read_entry(
    role: Role, key: str | int, item: int | None, spec: object, where: str, problems: list[Problem]
) -> PlanEntry | None:
    dim_field = "gather_dim" if role == "gather_output" else "split_dim"
    dim, expected_dims = _field(spec, dim_field), _field(spec, "expected_dims")
    if not _is_int(dim):
        law = f"{dim_field} is an integer, not {dim!r}"
        problems.append(Problem(where, law, f"set {dim_field} to the dimension of the sequence"))
    elif expected_dims is not None and (not _is_int(expected_dims) or expected_dims < 1):
        law = f"expected_dims is a positive integer or None, not {expected_dims!r}"
        problems.append(Problem(where, law, "set expected_dims to the tensor's number of dimensions, or leave it out"))
    elif expected_dims is not None and not -expected_dims <= dim < expected_dims:
        law = f"{dim_field}={dim} is out of range for a tensor of expected_dims={expected_dims} dimensions"
        remedy = f"use {dim_field} from {-expected_dims} to {expected_dims - 1}, or correct expected_dims"
        problems.append(Problem(where, law, remedy))
    else:
        return PlanEntry("", role, key, item, dim, expected_dims)
    return None


def _is_input(spec: object) -> bool:
    return hasattr(spec, "split_dim") and hasattr(spec, "split_output")


def _is_output(spec: object) -> bool:
    return hasattr(spec, "gather_dim")


def _field(spec: object, name: str) -> Any:
    # By name, so that the objects of diffusers do as well as ours.
    return getattr(spec, name, None)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
