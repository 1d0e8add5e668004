"""How one tensor lies over the ranks of a mesh: pure arithmetic, no graph, no tensor.

A tensor's dimension is a ``Dim``: parts in a row, each a ``Segment`` (a run of indices, whole on every rank or divided
over mesh axes) or a ``Product`` (row-major: for each index of an outer segment, an inner dim). A rank holds the
indices of its share of every part, in global order, one part after the other. ``Dim.of`` brings equal contents to one
canonical form, so that dims which give every rank the same indices compare equal.

Sizes are global, and ints or symbolic expressions (``sizes.Size``); no function here asks for a symbol's value.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from cpcompile.dims import Dim, Part, Product, multiplied, part_axes, segments_of, sharded, whole
from cpcompile.segments import Axis, Coords, Segment, is_short
from cpcompile.sizes import Size

__all__ = [
    "Axis",
    "Coords",
    "Dim",
    "Layout",
    "Part",
    "Partial",
    "Product",
    "Segment",
    "is_short",
    "multiplied",
    "part_axes",
    "segments_of",
    "sharded",
    "whole",
]


@dataclass(frozen=True)
class Partial:
    """A pending combination over one axis: the value is the ``op`` of what the ranks along it hold."""

    axis: Axis
    op: Literal["sum", "max", "lse"] = "sum"

    def __str__(self) -> str:
        return f"partial {self.op} over {self.axis}"


@dataclass(frozen=True)
class Layout:
    """How a tensor lies over the mesh: one ``Dim`` a dimension, and what is still to be combined over which axes.

    An axis divides at most one dimension, and none that is also pending: ``axis_conflict`` finds a breach.
    """

    dims: tuple[Dim, ...]
    partial: tuple[Partial, ...] = ()

    @staticmethod
    def replicated(shape: Iterable[Size]) -> Layout:
        """The layout of a tensor that every rank holds whole."""
        return Layout(tuple(whole(size) for size in shape))

    @property
    def shape(self) -> tuple[Size, ...]:
        """Global shape."""
        return tuple(dim.size for dim in self.dims)

    @property
    def axes(self) -> frozenset[Axis]:
        """Every mesh axis that divides some dimension."""
        return frozenset[Axis]().union(*(dim.axes for dim in self.dims))

    @property
    def is_sharded(self) -> bool:
        """Whether some dimension is divided."""
        return any(not dim.is_replicated for dim in self.dims)

    @property
    def is_replicated(self) -> bool:
        """Whether every rank holds the same, final value."""
        return not self.partial and not self.is_sharded

    def local_shape(self, coords: Coords) -> tuple[Size, ...]:
        """Shape of what the rank at ``coords`` holds."""
        return tuple(dim.local_size(coords) for dim in self.dims)

    def with_dim(self, index: int, dim: Dim) -> Layout:
        """The same layout but for one dimension."""
        return replace(self, dims=(*self.dims[:index], dim, *self.dims[index + 1 :]))

    def reduced(self) -> Layout:
        """The same layout with nothing pending."""
        return self if not self.partial else Layout(self.dims)

    def axis_conflict(self) -> str | None:
        """The law that this layout breaks, or None."""
        seen: dict[Axis, int] = {}
        for index, dim in enumerate(self.dims):
            for axis in sorted(dim.axes, key=lambda axis: axis.name):
                if axis in seen:
                    return f"axis {axis} divides both dimension {seen[axis]} and dimension {index}"
                seen[axis] = index
        for pending in self.partial:
            if pending.axis in seen:
                return f"axis {pending.axis} divides dimension {seen[pending.axis]} of a value partial over it"
        return None

    def __str__(self) -> str:
        dims = " ".join(f"({dim})" for dim in self.dims) or "()"
        return ", ".join([dims, *(str(pending) for pending in self.partial)])
