"""Arguments and results as tensors plus a fixed structure around them.

Lists, tuples, dicts, named tuples, whatever is registered with torch's pytree (the model outputs of diffusers and
transformers are) and plain dataclasses are taken apart; every other value that is no tensor is held fixed.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree


class _Slot:
    """Where a tensor goes."""

    def __repr__(self) -> str:
        return "<tensor>"


SLOT = _Slot()


@dataclass(frozen=True)
class _Fields:
    """A dataclass instance taken apart: its class and its fields' values."""

    cls: type
    names: tuple[str, ...]
    values: Structure


@dataclass(frozen=True)
class Structure:
    """A nested value with its tensors taken out: ``leaves`` are slots, fixed values, or dataclasses in turn."""

    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]

    @property
    def count(self) -> int:
        """How many tensors it takes."""
        return sum(1 if leaf is SLOT else leaf.values.count if isinstance(leaf, _Fields) else 0 for leaf in self.leaves)

    def build(self, tensors: Sequence[Any]) -> Any:
        """The nested value with ``tensors`` in their places."""
        assert len(tensors) == self.count, f"{len(tensors)} tensors for {self.count} places"
        return self._build(iter(tensors))

    def _build(self, tensors: Any) -> Any:
        leaves: list[Any] = []
        for leaf in self.leaves:
            if leaf is SLOT:
                leaves.append(next(tensors))
            elif isinstance(leaf, _Fields):
                leaves.append(_construct(leaf.cls, dict(zip(leaf.names, leaf.values._build(tensors), strict=True))))
            else:
                leaves.append(leaf)
        return pytree.tree_unflatten(leaves, self.spec)

    def key(self) -> Any:
        """A value that compares equal for structures with equal fixed values (1, 1.0 and True are three of them)."""
        fixed = tuple(
            (*leaf.values.key(), leaf.cls)
            if isinstance(leaf, _Fields)
            else SLOT
            if leaf is SLOT
            else (type(leaf), leaf if _is_hashable(leaf) else id(leaf))
            for leaf in self.leaves
        )
        return (str(self.spec), fixed)

    def leaf_names(self, model: nn.Module) -> tuple[str, ...]:
        """For the structure of a call's ``(args, kwargs)``: what the caller calls each tensor."""
        indexed = self.build([_Name(index) for index in range(self.count)])
        args, kwargs = indexed
        names: dict[int, str] = {}
        try:
            bound = inspect.signature(model.forward).bind(*args, **kwargs).arguments
        except (TypeError, ValueError):
            bound = {**{f"args_{index}": value for index, value in enumerate(args)}, **kwargs}
        for path, leaf in pytree.tree_flatten_with_path(bound)[0]:
            if isinstance(leaf, _Name):
                names[leaf.index] = "".join(str(key) for key in path)
        return tuple(_clean(names.get(index, f"input_{index}")) for index in range(self.count))


@dataclass(frozen=True)
class _Name:
    index: int


def _clean(path: str) -> str:
    """``['hidden_states'][0]`` as ``hidden_states[0]``."""
    first, _, rest = path.removeprefix("[").partition("]")
    name = first.strip("'") + rest
    return name.removeprefix("kwargs['").replace("']", "", 1) if name.startswith("kwargs['") else name


def flatten(value: Any) -> tuple[list[torch.Tensor], Structure]:
    """The tensors of a nested value in order, and the structure around them."""
    leaves, spec = pytree.tree_flatten(value)
    tensors: list[torch.Tensor] = []
    kept: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            tensors.append(leaf)
            kept.append(SLOT)
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            fields = dataclasses.fields(leaf)
            inner, structure = flatten(tuple(getattr(leaf, field.name) for field in fields))
            if not inner:
                kept.append(leaf)
                continue
            tensors.extend(inner)
            kept.append(_Fields(type(leaf), tuple(field.name for field in fields), structure))
        else:
            kept.append(leaf)
    return tensors, Structure(spec, tuple(kept))


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _construct(cls: type, values: dict[str, Any]) -> Any:
    """A dataclass instance with these fields, whatever its ``__init__`` takes."""
    made: Any = object.__new__(cls)
    for name, value in values.items():
        object.__setattr__(made, name, value)
    return made
