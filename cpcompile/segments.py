"""Mesh axes, and runs of indices divided over them: the atoms of a layout."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from cpcompile.sizes import (
    Size,
    add,
    at_most,
    cuts,
    divide,
    finest_granule,
    multiply,
    part_offset,
    part_size,
    product,
)

Coords: TypeAlias = Mapping[str, int]
"""This rank's index along each mesh axis, by axis name."""


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
    every axis out in reverse order (the second half of a zigzag). Where each index ``covers`` several of
    another run (a key/value head several query heads), that run is what is cut, and a rank holds every index that
    covers some of its part: neighbours may both hold one. Such sizes are numbers.
    """

    size: Size
    axes: tuple[Axis, ...] = ()
    descending: bool = False
    granule: Size = 1
    covers: int = 1

    def __post_init__(self) -> None:
        axes = tuple(axis for axis in self.axes if axis.size > 1)
        granule = _canonical_granule(self.size, tuple(axis.size for axis in axes), self.granule) if axes else 1
        object.__setattr__(self, "axes", axes)
        object.__setattr__(self, "descending", bool(axes) and self.descending)
        object.__setattr__(self, "granule", granule)
        if divide(self.size, product(axis.size for axis in axes)) is not None:
            object.__setattr__(self, "covers", 1)  # no cut falls inside an index

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
        outer = Segment(rows, self.axes[:depth], self.descending)
        return outer, Segment(units, self.axes[depth:], self.descending, self.granule)

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

    def covered(self) -> Segment:
        """The run that is cut: itself, or what its indices cover."""
        return Segment(multiply(self.size, self.covers), self.axes, self.descending)

    def bounds(self, coords: Coords) -> tuple[Size, Size]:
        """First index and count of what the rank at ``coords`` holds, in the segment's own numbering."""
        if self.is_replicated:
            return 0, self.size
        if self.covers > 1:
            first, count = self.covered().bounds(coords)
            assert isinstance(first, int)
            assert isinstance(count, int)
            start = first // self.covers
            return start, -(-(first + count) // self.covers) - start
        units = divide(self.size, self.granule)
        assert units is not None, f"{self} is not a whole number of granules"
        offset: Size = 0
        for axis in self.axes:
            index = coords[axis.name]
            if self.descending:
                index = axis.size - 1 - index
            offset = add(offset, part_offset(units, axis.size, index))
            units = part_size(units, axis.size, index)
        return multiply(offset, self.granule), multiply(units, self.granule)

    def __str__(self) -> str:
        if self.is_replicated:
            return str(self.size)
        names = ".".join(axis.name for axis in self.axes)
        granule = "" if self.granule == 1 else f" g{self.granule}"
        covers = "" if self.covers == 1 else f" x{self.covers}"
        return f"{self.size} {names}{'-' if self.descending else ''}{granule}{covers}"


def _canonical_granule(size: Size, counts: tuple[int, ...], granule: Size) -> Size:
    """The smallest granule that makes the same cuts."""
    if granule == 1:
        return 1
    if not isinstance(size, int) or not isinstance(granule, int):
        units = divide(size, granule)
        return 1 if units is not None and divide(units, product(counts)) is not None else granule  # 1: all parts equal
    assert size % granule == 0, f"{size} indices are no whole number of granules of {granule}"
    return finest_granule(size, counts, granule)


def is_short(units: Size, axes: Sequence[Axis]) -> bool:
    """Whether ``units`` are provably fewer than the ranks along ``axes``."""
    ranks = product(axis.size for axis in axes)
    return at_most(ranks, units) is False
