"""One dimension of a tensor as parts in a row, and its canonical form.

Equal contents are brought to one form: repetitions are written out, whole runs that touch are merged, repetitions are
folded again; a whole inner factor of a product is a granule of what is outside it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from cpcompile.segments import Axis, Coords, Segment, is_short
from cpcompile.sizes import Size, add, coarsest_granule, divide, multiply, product, total

_MAX_EXPANDED_PARTS = 256  # above this a product is kept as it is: canonical form must stay cheap


@dataclass(frozen=True)
class Product:
    """Row-major product: for each index of ``outer``, all of ``inner`` (which is sharded, on axes of its own)."""

    outer: Segment
    inner: Dim

    @property
    def size(self) -> Size:
        """Global size."""
        return multiply(self.outer.size, self.inner.size)

    def __str__(self) -> str:
        inner = str(self.inner)
        return f"{self.outer} * {f'({inner})' if len(self.inner.parts) > 1 else inner}"


Part: TypeAlias = "Segment | Product"


def part_axes(part: Part) -> frozenset[Axis]:
    """Every mesh axis that divides a part."""
    return frozenset(part.axes if isinstance(part, Segment) else (*part.outer.axes, *part.inner.axes))


@dataclass(frozen=True)
class Dim:
    """One dimension of a tensor, as parts in a row. Build it with ``Dim.of`` or ``whole``: they make it canonical."""

    parts: tuple[Part, ...]
    _axes: frozenset[Axis] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        found: set[Axis] = set()
        for part in self.parts:
            found.update(part.axes if isinstance(part, Segment) else {*part.outer.axes, *part.inner.axes})
        object.__setattr__(self, "_axes", frozenset(found))

    @staticmethod
    def of(*parts: Part | Dim) -> Dim:
        """The canonical dim of these parts (or dims) in a row."""
        return _canonical(tuple(_flat(parts)))

    @property
    def size(self) -> Size:
        """Global size."""
        return total(part.size for part in self.parts)

    @property
    def axes(self) -> frozenset[Axis]:
        """Every mesh axis that divides some part."""
        return self._axes

    @property
    def is_replicated(self) -> bool:
        """Whether every rank holds all of it."""
        return not self._axes

    def local_size(self, coords: Coords) -> Size:
        """How many indices the rank at ``coords`` holds."""
        return total(
            part.bounds(coords)[1]
            if isinstance(part, Segment)
            else multiply(part.outer.bounds(coords)[1], part.inner.local_size(coords))
            for part in self.parts
        )

    def indices(self, coords: Coords) -> list[int]:
        """The global indices that the rank at ``coords`` holds, in local order. For numbers only: not for symbols."""
        found: list[int] = []
        base = 0
        for part in self.parts:
            assert isinstance(part.size, int), f"{self} is symbolic"
            if isinstance(part, Segment):
                found.extend(base + index for index in _range(part, coords))
            else:
                inner = part.inner.indices(coords)
                stride = part.inner.size
                assert isinstance(stride, int)
                found.extend(base + i * stride + j for i in _range(part.outer, coords) for j in inner)
            base += part.size
        return found

    def without(self, axes: Iterable[Axis]) -> Dim:
        """The dim after gathering ``axes``, none of which may have another axis cut within it unevenly."""
        found = self.gathered(axes)
        assert found is not None, f"({self}): {axes} cannot be gathered and leave a layout"
        return found

    def gathered(self, axes: Iterable[Axis]) -> Dim | None:
        """The dim after gathering ``axes``; None where what is left is no layout: (63 ring.ulysses) without ring."""
        gone = frozenset(axes)
        if not gone & self._axes:
            return self
        found = [_without(part, gone) for part in self.parts]
        kept = [part for part in found if part is not None]
        return Dim.of(*kept) if len(kept) == len(found) else None

    def __str__(self) -> str:
        return " ++ ".join(str(part) for part in self.parts)


def whole(size: Size) -> Dim:
    """A dimension that every rank holds whole."""
    return Dim((Segment(size),))


def sharded(size: Size, axes: Sequence[Axis], granule: Size = 1, *, descending: bool = False) -> Dim:
    """A dimension divided over ``axes``; left whole where it has provably fewer units than ranks to share them."""
    live = tuple(axis for axis in axes if axis.size > 1)
    units = divide(size, granule)
    if not live or units is None or is_short(units, live):
        return whole(size)
    return Dim((Segment(size, live, descending, granule),))


def segments_of(dim: Dim) -> Iterator[Segment]:
    """Every segment of a dim, those inside products too."""
    for part in dim.parts:
        if isinstance(part, Segment):
            yield part
        else:
            yield part.outer
            yield from segments_of(part.inner)


def multiplied(outer: Dim, inner: Dim) -> Dim | None:
    """Row-major product of two dims, as flattening makes it; None where they share an axis (no rank holds a whole)."""
    if outer.axes & inner.axes:
        return None
    return Dim.of(*(_multiplied(part, inner) for part in outer.parts))


def _multiplied(part: Part, inner: Dim) -> Part | Dim:
    if isinstance(part, Product):
        below = multiplied(part.inner, inner)
        assert below is not None
        return _product(part.outer, below)
    return _product(part, inner)


def _product(outer: Segment, inner: Dim) -> Part | Dim:
    """The canonical product of a segment and a canonical dim.

    Replicated inner factors are granules of what is outside them, and where a rank holds one row, the axes of its rows
    are the outer axes of what comes first in the row: (2 dp) rows of (64 cp) are (128 dp.cp).
    """
    if outer.size == 0 or inner.size == 0:
        return Segment(0)
    if outer.size == 1 and outer.is_replicated:
        return inner
    if inner.is_replicated:
        factor = inner.size
        granule = 1 if outer.is_replicated else multiply(outer.granule, factor)
        return replace(outer, size=multiply(outer.size, factor), granule=granule)
    if len(inner.parts) > 1:
        return _whole_shares(outer, inner)
    (first,) = inner.parts
    head, below = (first, None) if isinstance(first, Segment) else (first.outer, first.inner)
    if head.is_replicated:
        merged = _product(outer, whole(head.size))
        assert isinstance(merged, Segment)
        assert below is not None
        return _product(merged, below)
    if outer.axes and outer.size == product(outer.counts) and outer.descending == head.descending:
        size = multiply(outer.size, head.size)
        merged = Segment(size, (*outer.axes, *head.axes), outer.descending, head.granule)
        return merged if below is None else _product(merged, below)
    return Product(outer, inner)


def _whole_shares(outer: Segment, inner: Dim) -> Part | Dim:
    """The product with as many rows taken together as all ranks hold together: where rows meet, parts can merge."""
    if not isinstance(outer.size, int) or not isinstance(outer.granule, int) or outer.is_replicated:
        return Product(outer, inner)
    count = coarsest_granule(outer.size, outer.counts, outer.granule)
    rows = outer.in_units_of(count)
    if count == 1 or count * len(inner.parts) > _MAX_EXPANDED_PARTS or rows is None:
        return Product(outer, inner)
    share = Dim.of(*(inner,) * count)
    (first, *rest) = share.parts
    if rest:
        return Product(rows, share)
    if isinstance(first, Product) and first.outer.is_replicated and len(first.inner.parts) > 1:
        merged = _product(rows, whole(first.outer.size))  # nothing merged where rows meet: they stay the rows
        assert isinstance(merged, Segment)
        return Product(merged, first.inner)
    return _product(rows, share)


def _flat(parts: Iterable[Part | Dim]) -> Iterator[Part]:
    for part in parts:
        if isinstance(part, Dim):
            yield from part.parts
        else:
            yield part


@functools.lru_cache(maxsize=8192)
def _canonical(parts: tuple[Part, ...]) -> Dim:
    return Dim(tuple(_compress(_merge_replicated(_expand(parts)))))


def _expand(parts: Iterable[Part]) -> list[Part]:
    """Repetitions written out, so that the same contents always reach ``_compress`` the same way."""
    expanded: list[Part] = []
    for part in parts:
        if isinstance(part, Segment):
            expanded.append(part)
            continue
        for piece in _flat([_product(part.outer, Dim.of(part.inner))]):
            if isinstance(piece, Product) and piece.outer.is_replicated and isinstance(piece.outer.size, int):
                body = _expand(piece.inner.parts)
                if len(body) * piece.outer.size <= _MAX_EXPANDED_PARTS:
                    expanded.extend(body * piece.outer.size)
                    continue
            expanded.append(piece)
    return expanded


def _merge_replicated(parts: Iterable[Part]) -> list[Part]:
    merged: list[Part] = []
    for part in parts:
        if part.size == 0:
            continue
        last = merged[-1] if merged else None
        if isinstance(part, Segment) and part.is_replicated and isinstance(last, Segment) and last.is_replicated:
            merged[-1] = Segment(add(last.size, part.size))
        else:
            merged.append(part)
    return merged or [Segment(0)]


def _compress(parts: list[Part]) -> list[Part]:
    """Repetitions folded: first the shortest period of the whole row, then runs of equal parts."""
    count = len(parts)
    for period in range(1, count // 2 + 1):
        if count % period == 0 and parts == parts[:period] * (count // period):
            body = Dim(tuple(_compress(parts[:period])))
            folded = _product(Segment(count // period), body)
            return list(_flat([folded]))
    runs: list[Part] = []
    index = 0
    while index < count:
        part = parts[index]
        end = index + 1
        while end < count and parts[end] == part:
            end += 1
        runs.extend([part] if end == index + 1 else _flat([_product(Segment(end - index), Dim((part,)))]))
        index = end
    return runs


def _without(part: Part, gone: frozenset[Axis]) -> Dim | None:
    if isinstance(part, Product):
        outer, inner = _without(part.outer, gone), part.inner.gathered(gone)
        return None if outer is None or inner is None else multiplied(outer, inner)
    kept = tuple(axis for axis in part.axes if axis not in gone)
    if part.axes[: len(kept)] == kept:
        return Dim((replace(part, axes=kept),))
    depth = max(depth for depth, axis in enumerate(part.axes, start=1) if axis in gone)
    if depth == len(part.axes):  # the innermost first
        return _without(replace(part, axes=part.axes[: _last_kept(part.axes, gone)]), gone)
    split = part.split_at(depth)
    outer = None if split is None else _without(split[0], gone)
    return None if split is None or outer is None else multiplied(outer, Dim((split[1],)))


def _last_kept(axes: tuple[Axis, ...], gone: frozenset[Axis]) -> int:
    return max(depth for depth, axis in enumerate(axes, start=1) if axis not in gone)


def _range(segment: Segment, coords: Coords) -> range:
    start, count = segment.bounds(coords)
    assert isinstance(start, int)
    assert isinstance(count, int)
    return range(start, start + count)
