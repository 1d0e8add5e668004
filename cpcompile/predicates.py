"""Which keys a query sees, as conditions on positions: what a mask says, without its S x S values.

A value in a mask is a function of its dimensions' indices, counted from the right as broadcasting does: -2 is the
query's position, -1 the key's. A condition is a conjunction of atoms; each atom is a linear condition on indices or a
tensor of booleans that is known only when the program runs, and remembers the graph's node that says it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from cpcompile.sizes import Size, add, at_most, floor_div, multiply, subtract

Answer: TypeAlias = Literal["all", "none", "mixed"]
"""Whether a condition holds for all, none or some of a block."""


@dataclass(frozen=True)
class Affine:
    """An integer: a constant plus the indices of some dimensions (negative numbers), each times a coefficient."""

    constant: Size = 0
    coefficients: tuple[tuple[int, int], ...] = ()

    @staticmethod
    def of(constant: Size, coefficients: Iterable[tuple[int, int]] = ()) -> Affine:
        """Its one spelling."""
        return Affine(constant, tuple(sorted((dim, c) for dim, c in coefficients if c)))

    @property
    def dims(self) -> dict[int, int]:
        """Coefficients by dimension."""
        return dict(self.coefficients)

    @property
    def is_constant(self) -> bool:
        """Whether it depends on no index."""
        return not self.coefficients

    def __add__(self, other: Affine) -> Affine:
        dims = self.dims
        for dim, c in other.coefficients:
            dims[dim] = dims.get(dim, 0) + c
        return Affine.of(add(self.constant, other.constant), dims.items())

    def times(self, factor: int) -> Affine:
        """Its multiple."""
        return Affine.of(multiply(self.constant, factor), ((dim, c * factor) for dim, c in self.coefficients))

    def __sub__(self, other: Affine) -> Affine:
        return self + other.times(-1)

    def plus(self, number: Size) -> Affine:
        """Itself and a constant."""
        return Affine(add(self.constant, number), self.coefficients)

    def over(self, block: Sequence[tuple[Size, Size]]) -> Answer:
        """Whether ``self >= 0`` over a block: first index and length of each dimension, the last one's last."""
        low = high = self.constant
        for dim, c in self.coefficients:
            first, length = block[dim]
            ends = multiply(first, c), multiply(subtract(add(first, length), 1), c)
            low, high = add(low, ends[c < 0]), add(high, ends[c > 0])
        if at_most(0, low):
            return "all"
        return "none" if at_most(high, -1) else "mixed"


@dataclass(frozen=True)
class Band:
    """Key k is visible to query q where ``q - k <= left`` and ``k - q <= right``; None: no limit on that side."""

    left: Size | None = None
    right: Size | None = None

    @property
    def is_open(self) -> bool:
        """Whether it hides nothing."""
        return self.left is None and self.right is None

    def shows_every_row(self, queries: Size, keys: Size) -> bool:
        """Whether every query provably sees a key: itself, or with no limit to the left the first one."""
        if self.right is not None and at_most(0, self.right) is not True:
            return False
        if self.left is None:
            return at_most(1, keys) is True
        return at_most(0, self.left) is True and at_most(queries, keys) is True


@dataclass(frozen=True)
class Atom:
    """One condition. source: the node (or what stands for it) whose boolean it is. limit: that it is ``limit >= 0``."""

    source: Hashable
    limit: Affine | None = None


@dataclass(frozen=True)
class Condition:
    """The conjunction of atoms; of none, always true; ``never`` is always false."""

    atoms: tuple[Atom, ...] = ()
    never: bool = False

    def __and__(self, other: Condition) -> Condition:
        if self.never or other.never:
            return NEVER
        return Condition(tuple(dict.fromkeys((*self.atoms, *other.atoms))))


ALWAYS, NEVER = Condition(), Condition(never=True)


def split_band(condition: Condition, shape: Sequence[Size]) -> tuple[Band, tuple[Atom, ...]]:
    """The band that a condition over ``shape`` (queries and keys last) contains, and the atoms that are left."""
    band, rest = Band(), list[Atom]()
    block = [(0, size) for size in shape]
    for atom in condition.atoms:
        if atom.limit is None:
            rest.append(atom)
            continue
        if atom.limit.over(block) == "all":
            continue
        narrowed = _narrowed(band, atom.limit)
        if narrowed is None:
            rest.append(atom)
        else:
            band = narrowed
    return band, tuple(rest)


def _narrowed(band: Band, limit: Affine) -> Band | None:
    """The band with ``limit >= 0`` too; None where that is no limit of a band, or which is narrower is not known."""
    if set(limit.dims) != {-2, -1} or limit.dims[-2] != -limit.dims[-1]:
        return None
    count = limit.dims[-2]
    number = floor_div(limit.constant, abs(count))
    known = band.right if count > 0 else band.left
    if known is not None:
        if at_most(known, number):
            return band
        if not at_most(number, known):
            return None
    return Band(band.left, number) if count > 0 else Band(number, band.right)
