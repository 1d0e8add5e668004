"""Where in the sequence a rank's indices of a dim lie, as runs of neighbours: what attention by positions is told."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cpcompile.errors import Refusal
from cpcompile.layout import Axis, Coords, Dim, Product
from cpcompile.site import RingCall
from cpcompile.sizes import Size, add, multiply
from cpcompile.transfer import peers


@dataclass(frozen=True)
class Stretch:
    """A run of neighbours on one rank. resident: every rank holds it."""

    start: Size
    length: Size
    resident: bool


@dataclass(frozen=True)
class GroupRuns:
    """Queries and keys of every rank of this rank's group, in group order; resident: which runs of keys all hold."""

    queries: tuple[tuple[Stretch, ...], ...]
    keys: tuple[tuple[Stretch, ...], ...]
    resident: tuple[bool, ...]
    rank: int


def stretches(dim: Dim, coords: Coords) -> list[Stretch]:
    """The runs of a dim that is not refused, on the rank at ``coords``, in local order; as many on every rank."""
    return list(_stretches(dim, coords, 0))


def refuse_stretches(dim: Dim, group: frozenset[Axis] | None = None) -> Refusal | None:
    """Why the runs of a dim cannot be told, or, for a group, a run not lie on exactly one rank of it or on all."""
    for part in dim.parts:
        if isinstance(part, Product):
            if not part.outer.is_replicated or not isinstance(part.outer.size, int):
                return Refusal(f"({part}): its rows lie apart on a rank")
            refused = refuse_stretches(part.inner, group)
            if refused is not None:
                return refused
        elif group is not None and part.axes and frozenset(part.axes) != group:
            return Refusal(f"({part}) is not divided over all of {', '.join(sorted(axis.name for axis in group))}")
    return None


def group_runs(call: RingCall, query: Dim, key: Dim, coords: Coords) -> GroupRuns:
    """What the rank at ``coords`` is told about its group. Where positions hide nothing, those of queries are left out.

    Both dims are not refused: keys for the group, queries where positions hide something.
    """
    places = peers(call.axes, coords)
    keys = [tuple(stretches(key, place)) for place in places]
    queries = [
        tuple(stretches(query, place)) if call.hides else (Stretch(0, query.local_size(place), False),)
        for place in places
    ]
    return GroupRuns(tuple(queries), tuple(keys), tuple(run.resident for run in keys[0]), places.index(dict(coords)))


def flat(by_rank: Sequence[Sequence[Stretch]]) -> list[Size]:
    """Start and length of every run, rank by rank."""
    return [size for runs in by_rank for run in runs for size in (run.start, run.length)]


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
