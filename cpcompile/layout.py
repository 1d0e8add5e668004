"""How one tensor lies over the ranks of a mesh: pure arithmetic, no graph, no tensor.

A tensor's dimension is a ``Dim``: parts in a row, each a ``Segment`` (a run of indices, whole on every rank or divided
over mesh axes) or a ``Product`` (row-major: for each index of an outer segment, an inner dim). A rank holds the
indices of its share of every part, in global order, one part after the other. ``Dim.of`` brings equal contents to one
canonical form, so that dims which give every rank the same indices compare equal.

Sizes are global, and ints or symbolic expressions (``sizes.Size``); no function here asks for a symbol's value.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from cpcompile.sizes import (
    Size,
    add,
    at_most,
    coarsest_granule,
    cuts,
    divide,
    finest_granule,
    multiply,
    part_offset,
    part_size,
    product,
    total,
)

Coords: TypeAlias = Mapping[str, int]
"""This rank's index along each mesh axis, by axis name."""

_MAX_EXPANDED_PARTS = 256  # above this a product is kept as it is: canonical form must stay cheap


@dataclass(frozen=True)
class Axis:
    """A named mesh dimension and how many ranks lie along it."""

    name: str
    size: int

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Segment:
    """A run of ``size`` indices, divided over ``axes`` (outermost first), whole everywhere where there are none.

    The run is cut axis by axis into units of ``granule`` indices: part i of n holds (units + n - 1 - i) // n units, so
    that gathering the innermost axis leaves exactly the layout over the outer ones. ``descending`` hands the parts of
    the outermost axis out in reverse order (the second half of a zigzag).
    """

    size: Size
    axes: tuple[Axis, ...] = ()
    descending: bool = False
    granule: Size = 1

    def __post_init__(self) -> None:
        axes = tuple(axis for axis in self.axes if axis.size > 1)
        granule = _canonical_granule(self.size, tuple(axis.size for axis in axes), self.granule) if axes else 1
        object.__setattr__(self, "axes", axes)
        object.__setattr__(self, "descending", bool(axes) and self.descending)
        object.__setattr__(self, "granule", granule)

    @property
    def is_replicated(self) -> bool:
        """Whether every rank holds all of it."""
        return not self.axes

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of ranks along each of its axes."""
        return tuple(axis.size for axis in self.axes)

    def split_at(self, depth: int) -> tuple[Segment, Segment] | None:
        """Its row-major factors over the first ``depth`` axes and over the rest; None unless the former cut it evenly.

        (128 dp.cp) is (2 dp) rows of (64 cp) where dp has two ranks.
        """
        rows = product(self.counts[:depth])
        units = divide(self.size, rows)
        if units is None or divide(units, self.granule) is None:
            return None
        return Segment(rows, self.axes[:depth], self.descending), Segment(units, self.axes[depth:], False, self.granule)

    def in_units_of(self, count: Size) -> Segment | None:
        """The same division counted in units of ``count`` indices; None where a cut falls inside such a unit."""
        if self.is_replicated:
            return Segment(units) if (units := divide(self.size, count)) is not None else None
        if (units := divide(self.size, count)) is None:
            return None
        if (granule := divide(self.granule, count)) is not None:
            return replace(self, size=units, granule=granule)
        if not (isinstance(self.size, int) and isinstance(self.granule, int) and isinstance(count, int)):
            share = divide(self.size, product(self.counts))
            even = share is not None and divide(share, self.granule) is not None and divide(share, count) is not None
            return replace(self, size=units, granule=1) if even else None
        coarse = math.lcm(self.granule, count)
        if self.size % coarse or cuts(self.size, self.counts, coarse) != cuts(self.size, self.counts, self.granule):
            return None
        return replace(self, size=units, granule=coarse // count)

    def bounds(self, coords: Coords) -> tuple[Size, Size]:
        """First index and count of what the rank at ``coords`` holds, in the segment's own numbering."""
        if self.is_replicated:
            return 0, self.size
        units = divide(self.size, self.granule)
        assert units is not None, f"{self} is not a whole number of granules"
        offset: Size = 0
        for depth, axis in enumerate(self.axes):
            index = coords[axis.name]
            if self.descending and depth == 0:
                index = axis.size - 1 - index
            offset = add(offset, part_offset(units, axis.size, index))
            units = part_size(units, axis.size, index)
        return multiply(offset, self.granule), multiply(units, self.granule)

    def __str__(self) -> str:
        if self.is_replicated:
            return str(self.size)
        names = ".".join(axis.name for axis in self.axes)
        granule = "" if self.granule == 1 else f" g{self.granule}"
        return f"{self.size} {names}{'-' if self.descending else ''}{granule}"


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


def is_short(units: Size, axes: Sequence[Axis]) -> bool:
    """Whether ``units`` are provably fewer than the ranks along ``axes``."""
    ranks = product(axis.size for axis in axes)
    return at_most(ranks, units) is False


def segments_of(dim: Dim) -> Iterator[Segment]:
    """Every segment of a dim, those inside products too."""
    for part in dim.parts:
        if isinstance(part, Segment):
            yield part
        else:
            yield part.outer
            yield from segments_of(part.inner)


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


def multiplied(outer: Dim, inner: Dim) -> Dim | None:
    """Row-major product of two dims, as flattening makes it; None where they share an axis (no rank holds a whole)."""
    if outer.axes & inner.axes:
        return None
    return Dim.of(*(_multiplied(part, inner) for part in outer.parts))


def _canonical_granule(size: Size, counts: tuple[int, ...], granule: Size) -> Size:
    """The smallest granule that makes the same cuts."""
    if granule == 1:
        return 1
    if not isinstance(size, int) or not isinstance(granule, int):
        units = divide(size, granule)
        return 1 if units is not None and divide(units, product(counts)) is not None else granule  # 1: all parts equal
    assert size % granule == 0, f"{size} indices are no whole number of granules of {granule}"
    return finest_granule(size, counts, granule)


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
    if outer.axes and outer.size == product(outer.counts) and not head.descending:
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
