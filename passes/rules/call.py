"""The terms in which a rule is asked and answers.

A rule is a function of one ``Call``: given how the operands lie over the mesh, it says how they must lie and how each
result then does, or refuses with a reason. It never sees a graph, a rank or a device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch._ops import OpOverload

from cpcompile.decision import LocalArgument
from cpcompile.errors import Refusal
from cpcompile.layout import Axis, Dim, Layout, whole
from cpcompile.reshape import meet
from cpcompile.sizes import Size, at_most, product


@dataclass(frozen=True)
class Operand:
    """A tensor operand: its layout (which holds its global shape) and its dtype."""

    layout: Layout
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[Size, ...]:
        """Global shape."""
        return self.layout.shape

    @property
    def dims(self) -> tuple[Dim, ...]:
        """One dim a dimension."""
        return self.layout.dims

    @property
    def bytes(self) -> Size:
        """Global bytes."""
        return product((self.dtype.itemsize, *self.shape))


@dataclass(frozen=True)
class Result:
    """A tensor result of the single-device call: global shape and dtype."""

    shape: tuple[Size, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Call:
    """One operator call. ``arguments`` holds every argument of the schema by name: operands in place of tensors, sizes
    in place of symbolic ints, defaults where nothing was passed."""

    target: OpOverload
    arguments: Mapping[str, Any]
    results: tuple[Result, ...]

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def operand(self, name: str) -> Operand:
        """The tensor argument ``name``."""
        found = self.arguments[name]
        assert isinstance(found, Operand), f"{self.target}: {name} is no tensor"
        return found

    def operands(self) -> dict[str, Operand]:
        """Every single tensor argument that was passed."""
        return {name: value for name, value in self.arguments.items() if isinstance(value, Operand)}

    def dim(self, name: str = "dim", of: int | None = None) -> int:
        """The dimension argument ``name``, counted from the front of ``of`` dimensions (or the first operand's)."""
        count = len(next(iter(self.operands().values())).shape) if of is None else of
        value = self.arguments[name]
        return value % max(count, 1) if isinstance(value, int) else value


@dataclass(frozen=True)
class Answer:
    """What a call needs and gives. An operand that is not named must be replicated.

    arguments: literals of the local call; a ``Dim`` there means the number of its indices that the rank holds.
    target: another operator for the local call, which takes the first operand and ``arguments`` and nothing else.
    """

    operands: Mapping[str, Layout | Sequence[Layout]]
    results: tuple[Layout, ...]
    arguments: Mapping[str, LocalArgument] = field(default_factory=dict)
    target: OpOverload | None = None


Rule: TypeAlias = Callable[[Call], "Answer | Refusal"]


def unary(call: Call, layout: Layout, result: Layout | None = None, **arguments: LocalArgument) -> Answer:
    """The answer of a call with one operand: it must lie as ``layout``, and the result lies as ``result``."""
    name = next(iter(call.operands()))
    return Answer({name: layout}, (layout if result is None else result,), arguments)


def local_only(layout: Layout, dims: Sequence[int]) -> Layout:
    """The layout with ``dims`` whole on every rank."""
    for index in dims:
        layout = layout.with_dim(index, whole(layout.dims[index].size))
    return layout


def agree(operands: Sequence[Operand], shape: Sequence[Size]) -> tuple[Layout, list[Layout]]:
    """The layout in which broadcast operands of a result of ``shape`` meet, and what each operand becomes for it.

    Operands that are whole are sliced, which is free. Where two sharded operands do not fit, the larger one keeps its
    layout and the smaller moves; an axis that would divide two dimensions stays with the larger operand's.
    """
    target = [whole(size) for size in shape]
    order = sorted(range(len(operands)), key=_by_bytes(operands))
    for position in order:
        dims = operands[position].dims
        taken: set[Axis] = set()
        for dim in target:
            taken |= dim.axes
        shift = len(shape) - len(dims)
        for index, dim in enumerate(dims):
            if dim.is_replicated or dim.size != shape[shift + index]:
                continue
            here = target[shift + index]
            elsewhere = taken - here.axes
            if dim.axes & elsewhere:
                continue
            met = meet(here, dim)
            if not isinstance(met, Refusal):
                target[shift + index] = met
                taken |= met.axes
    result = Layout(tuple(target))
    return result, [broadcast_to(operand, result) for operand in operands]


def broadcast_to(operand: Operand, result: Layout) -> Layout:
    """How an operand must lie for a broadcast result to lie as ``result``."""
    shift = len(result.dims) - len(operand.dims)
    return Layout(
        tuple(
            result.dims[shift + index] if dim.size == result.dims[shift + index].size else whole(dim.size)
            for index, dim in enumerate(operand.dims)
        )
    )


def _by_bytes(operands: Sequence[Operand]) -> Callable[[int], tuple[int, int]]:
    """Larger operands first, by bytes where they are known, in the order of the call otherwise."""

    def key(position: int) -> tuple[int, int]:
        mine = operands[position].bytes
        larger = sum(1 for other in operands if at_most(other.bytes, mine) is False)
        return larger, position

    return key


def reduced(operand: Operand) -> Operand:
    """The operand once nothing is pending on it."""
    return replace(operand, layout=operand.layout.reduced())
