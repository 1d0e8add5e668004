"""Where in the sequence a rank's indices of a dim lie, as runs of neighbours: what attention by positions is told."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cpcompile.errors import Refusal
from cpcompile.layout import Axis, Coords, Dim, Product
from cpcompile.sizes import Size, add, multiply


@dataclass(frozen=True)
class Stretch:
    """A run of neighbours on one rank. resident: every rank holds it."""

    start: Size
    length: Size
    resident: bool


def stretches(dim: Dim, coords: Coords) -> list[Stretch]:
    """The runs of a dim that is not refused, on the rank at ``coords``, in local order; as many on every rank."""
    return list(_stretches(dim, coords, 0))


def refuse_stretches(dim: Dim, group: frozenset[Axis]) -> Refusal | None:
    """Why the runs of a dim cannot be told, or a run not lie on exactly one rank of ``group`` or on all of them."""
    for part in dim.parts:
        if isinstance(part, Product):
            if not part.outer.is_replicated or not isinstance(part.outer.size, int):
                return Refusal(f"({part}): its rows lie apart on a rank")
            refused = refuse_stretches(part.inner, group)
            if refused is not None:
                return refused
        elif part.axes and frozenset(part.axes) != group:
            return Refusal(f"({part}) is not divided over all of {', '.join(sorted(axis.name for axis in group))}")
    return None


def _stretches(dim: Dim, coords: Coords, base: Size) -> Iterator[Stretch]:
    for part in dim.parts:
        if isinstance(part, Product):
            assert isinstance(part.outer.size, int)
            for row in range(part.outer.size):
                yield from _stretches(part.inner, coords, add(base, multiply(row, part.inner.size)))
        else:
            first, length = part.bounds(coords)
            yield Stretch(add(base, first), length, part.is_replicated)
        base = add(base, part.size)
