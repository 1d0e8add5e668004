"""What moves when a tensor changes its layout: for each pair of ranks, the blocks that one sends to the other.

Pure arithmetic over layouts. A block is a box of the local tensor: a start and a length for each dimension, seen from
the sender's local tensor and from the receiver's. A rank takes from itself what it holds; of the rest every element
has exactly one sender.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from cpcompile.alignment import Pair, aligned, can_list, explode
from cpcompile.assemble import all_coords
from cpcompile.errors import Refusal
from cpcompile.layout import Axis, Coords, Dim, Layout, Part, Segment
from cpcompile.sizes import Size, add, at_most, product, subtract

Kind: TypeAlias = Literal["none", "shard", "gather", "all_to_all"]
_Place: TypeAlias = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Run:
    """A run of indices of one dimension: where it starts in the sender's and in the receiver's local tensor."""

    source: Size
    target: Size
    length: Size
    axes: frozenset[Axis]  # that divide the part of the source it comes from


@dataclass(frozen=True)
class Block:
    """A box of elements that moves from one rank to another (or stays)."""

    source: tuple[Size, ...]
    target: tuple[Size, ...]
    lengths: tuple[Size, ...]

    @property
    def numel(self) -> Size:
        """Elements in it."""
        return product(self.lengths)


def _moved_axes(source: Dim, target: Dim) -> frozenset[Axis] | Refusal:
    """The axes along which the change of one row of parts needs communication."""
    if source == target:
        return frozenset()
    one, other = _segment(source), _segment(target)
    listed = can_list(source) and can_list(target)
    if not listed and (one is None or other is None):
        return Refusal(f"({source}) to ({target}) has no plain exchange")
    if source.is_replicated or target.is_replicated:
        return source.axes
    if one is not None and other is not None and one.descending == other.descending:
        shared = min(len(one.axes), len(other.axes))
        if one.axes[:shared] == other.axes[:shared] and _nested(one, other):
            return frozenset(one.axes[shared:])
    if not listed:
        return Refusal(f"({source}) to ({target}) has no exchange that symbolic sizes can state")
    if source.gathered(source.axes - target.axes) == target:
        return source.axes - target.axes
    return frozenset() if target.gathered(target.axes - source.axes) == source else source.axes | target.axes


def _segment(dim: Dim) -> Segment | None:
    return part if len(dim.parts) == 1 and isinstance(part := dim.parts[0], Segment) else None


def _nested(source: Segment, target: Segment) -> bool:
    """Whether the cuts of the longer axis list refine those of the shorter one."""
    short, long = sorted((source, target), key=lambda segment: len(segment.axes))
    return Dim((long,)).without(long.axes[len(short.axes) :]) == Dim((short,))


@functools.lru_cache(maxsize=8192)
def moved_axes(source: Layout, target: Layout) -> tuple[Axis, ...] | Refusal:
    """The axes along which ranks exchange to get from one layout to the other, in name order of first use."""
    pair = explode(source, target)
    moved: set[Axis] = set()
    order: list[Axis] = []
    for s, t in zip(pair.source.dims, pair.target.dims, strict=True):
        rows = aligned(s, t)
        if isinstance(rows, Refusal):
            return rows
        for a, b in rows:
            axes = _moved_axes(a, b)
            if isinstance(axes, Refusal):
                return axes
            moved |= axes
        for part in (*s.parts, *t.parts):
            order.extend(_axes_in_order(part))
    return tuple(dict.fromkeys(axis for axis in order if axis in moved))


def _axes_in_order(part: Part) -> list[Axis]:
    if isinstance(part, Segment):
        return list(part.axes)
    return [*part.outer.axes, *(axis for inner in part.inner.parts for axis in _axes_in_order(inner))]


def kind_of(source: Layout, target: Layout) -> Kind | Refusal:
    """Which reshard leads from one layout to the other; a Refusal where it takes a gather and a shard."""
    if source == target:
        return "none"
    axes = moved_axes(source, target)
    if isinstance(axes, Refusal):
        return axes
    if not axes:
        return "shard"
    gathers_only = all(
        s == t or t == s.gathered(s.axes & frozenset(axes)) for s, t in zip(source.dims, target.dims, strict=True)
    )
    return "gather" if gathers_only else "all_to_all"


def _runs(source: Dim, target: Dim, holder: Coords, needer: Coords) -> list[Run]:
    rows = aligned(source, target)
    assert not isinstance(rows, Refusal)
    found: list[Run] = []
    at_source: Size = 0
    at_target: Size = 0
    for s, t in rows:
        for run in _row_runs(s, t, holder, needer):
            if run.length != 0:
                found.append(replace(run, source=add(at_source, run.source), target=add(at_target, run.target)))
        at_source, at_target = add(at_source, s.local_size(holder)), add(at_target, t.local_size(needer))
    return found


def _row_runs(s: Dim, t: Dim, holder: Coords, needer: Coords) -> list[Run]:
    """What the holder has and the needer wants of one row of parts, as runs of their local rows."""
    if s == t:  # it stays where it is, if both hold the same of it
        here = all(holder[axis.name] == needer[axis.name] for axis in s.axes)
        return [Run(0, 0, s.local_size(holder), s.axes)] if here else []
    one, other = _segment(s), _segment(t)
    if one is None or other is None:
        return _listed_runs(s, t, holder, needer)
    shared = _intersection(one, other, holder, needer)
    if shared is None:
        return []
    start, length = shared
    at_source, at_target = subtract(start, one.bounds(holder)[0]), subtract(start, other.bounds(needer)[0])
    return [Run(at_source, at_target, length, s.axes)]


def _listed_runs(s: Dim, t: Dim, holder: Coords, needer: Coords) -> list[Run]:
    """The same for parts that do not lie side by side, every run by itself."""
    found: list[Run] = []
    at_source = 0
    for s_start, s_length, axes in _held(s, holder):
        at_target = 0
        for t_start, t_length, _ in _held(t, needer):
            start, end = max(s_start, t_start), min(s_start + s_length, t_start + t_length)
            if start < end:
                found.append(Run(at_source + start - s_start, at_target + start - t_start, end - start, axes))
            at_target += t_length
        at_source += s_length
    return found


def _held(dim: Dim, coords: Coords) -> list[tuple[int, int, frozenset[Axis]]]:
    """Start and length of the runs that a rank holds of a dim, and the axes that divide each."""
    found: list[tuple[int, int, frozenset[Axis]]] = []
    base = 0
    for part in dim.parts:
        start, count = (part if isinstance(part, Segment) else part.outer).bounds(coords)
        assert isinstance(start, int)
        assert isinstance(count, int)
        assert isinstance(part.size, int)
        if isinstance(part, Segment):
            found.append((base + start, count, frozenset(part.axes)))
        else:
            row, stride = _held(part.inner, coords), part.inner.size
            assert isinstance(stride, int)
            outer = frozenset(part.outer.axes)
            at = (base + index * stride for index in range(start, start + count))
            found.extend((first + shift, length, outer | axes) for first in at for shift, length, axes in row)
        base += part.size
    return found


def _intersection(s: Segment, t: Segment, holder: Coords, needer: Coords) -> tuple[Size, Size] | None:
    """Start and length, in the segment's own numbering, of what the holder has and the needer wants."""
    s_start, s_length = s.bounds(holder)
    t_start, t_length = t.bounds(needer)
    if all(isinstance(size, int) for size in (s_start, s_length, t_start, t_length)):
        start = s_start if at_most(t_start, s_start) else t_start
        s_end, t_end = add(s_start, s_length), add(t_start, t_length)
        end = s_end if at_most(s_end, t_end) else t_end
        return (start, subtract(end, start)) if at_most(add(start, 1), end) else None
    if s.is_replicated:
        return t_start, t_length
    if t.is_replicated:
        return s_start, s_length
    shared = min(len(s.axes), len(t.axes))
    if any(holder[axis.name] != needer[axis.name] for axis in s.axes[:shared]):
        return None
    return (s_start, s_length) if len(s.axes) >= len(t.axes) else (t_start, t_length)


@functools.lru_cache(maxsize=65536)
def _blocks(
    source: Layout, target: Layout, group: tuple[Axis, ...], holder: _Place, needer: _Place
) -> tuple[Block, ...]:
    held, needed = dict(holder), dict(needer)
    by_dim = [_runs(s, t, held, needed) for s, t in zip(source.dims, target.dims, strict=True)]
    found: list[Block] = []
    for runs in itertools.product(*by_dim):
        divided = frozenset[Axis]().union(*(run.axes for run in runs))
        if any(held[axis.name] != needed[axis.name] for axis in group if axis not in divided):
            continue  # several ranks hold it: the one that differs from the receiver only where it must is the sender
        found.append(
            Block(
                tuple(run.source for run in runs), tuple(run.target for run in runs), tuple(run.length for run in runs)
            )
        )
    return tuple(found)


def blocks(pair: Pair, group: tuple[Axis, ...], holder: Coords, needer: Coords) -> tuple[Block, ...]:
    """What ``needer`` takes from ``holder`` in the exploded layouts of ``pair``."""
    return _blocks(pair.source, pair.target, group, tuple(sorted(holder.items())), tuple(sorted(needer.items())))


def peers(group: Sequence[Axis], coords: Coords) -> list[dict[str, int]]:
    """The coordinates of the ranks of this rank's group along ``group``, in group order."""
    return [{**coords, **along} for along in all_coords(group)]


def elements_sent(source: Layout, target: Layout, coords: Coords) -> Size:
    """Elements that the rank at ``coords`` sends to others for this change, where it is one exchange."""
    group = moved_axes(source, target)
    assert not isinstance(group, Refusal)
    pair = explode(source, target)
    sent: Size = 0
    for peer in peers(group, coords):
        if peer != dict(coords):
            for block in blocks(pair, group, coords, peer):
                sent = add(sent, block.numel)
    return sent


def own_ranges(source: Dim, target: Dim, coords: Coords) -> list[tuple[Size, Size]]:
    """Start and length of the runs of the local ``source`` that make up the local ``target``, where nothing moves."""
    return [(run.source, run.length) for run in _runs(source, target, coords, coords)]
