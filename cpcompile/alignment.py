"""Two layouts of one tensor brought side by side: repeated dimensions unfolded, dims cut into parts of equal size."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from cpcompile.errors import Refusal
from cpcompile.layout import Dim, Layout, Part, Product, Segment, whole
from cpcompile.reshape import factor
from cpcompile.sizes import at_most, subtract

_MAX_LISTED_RUNS = 256  # above this runs are not listed one by one: there would be as many blocks


@dataclass(frozen=True)
class Pair:
    """A layout change with every dimension cut into plain parts: no repetition is left where it can be a dimension."""

    source: Layout
    target: Layout


@functools.lru_cache(maxsize=8192)
def explode(source: Layout, target: Layout) -> Pair:
    """The same change on the tensor with its repeated dimensions unfolded: (2 * 64 cp) becomes (2) (64 cp)."""
    pairs = [pair for s, t in zip(source.dims, target.dims, strict=True) for pair in _explode_dim(s, t)]
    return Pair(Layout(tuple(s for s, _ in pairs)), Layout(tuple(t for _, t in pairs)))


def _explode_dim(source: Dim, target: Dim) -> list[tuple[Dim, Dim]]:
    for shape_from in (source, target):
        part = shape_from.parts[0]
        if len(shape_from.parts) != 1 or not isinstance(part, Product):
            continue
        one = factor(source, part.outer.size, part.inner.size)
        other = factor(target, part.outer.size, part.inner.size)
        if not isinstance(one, Refusal) and not isinstance(other, Refusal):
            return [(one[0], other[0]), *_explode_dim(one[1], other[1])]
    return [(source, target)]


def aligned(source: Dim, target: Dim) -> list[tuple[Dim, Dim]] | Refusal:
    """Both dims in rows of parts of equal size, whole parts cut to fit; one row where the parts do not fit."""
    found: list[tuple[Dim, Dim]] = []
    lefts, rights = _plain(source.parts), _plain(target.parts)
    while lefts and rights:
        a, b = lefts.pop(0), rights.pop(0)
        if a.size == b.size:
            found.append((Dim((a,)), Dim((b,))))
        elif is_whole(a) and at_most(b.size, a.size):
            found.append((whole(b.size), Dim((b,))))
            lefts.insert(0, Segment(subtract(a.size, b.size)))
        elif is_whole(b) and at_most(a.size, b.size):
            found.append((Dim((a,)), whole(a.size)))
            rights.insert(0, Segment(subtract(b.size, a.size)))
        elif can_list(source) and can_list(target):
            return [(source, target)]
        else:
            return Refusal(f"({source}) and ({target}) are cut at different places")
    return found if not lefts and not rights else Refusal(f"({source}) and ({target}) differ in size")


def _plain(parts: Sequence[Part]) -> list[Part]:
    """Repetitions of a known count written out."""
    found: list[Part] = []
    for part in parts:
        if isinstance(part, Product) and part.outer.is_replicated and isinstance(part.outer.size, int):
            found.extend(_plain(part.inner.parts) * part.outer.size)
        else:
            found.append(part)
    return found


def is_whole(part: Part) -> bool:
    """Whether every rank holds all of a part."""
    return isinstance(part, Segment) and part.is_replicated


def can_list(dim: Dim) -> bool:
    """Whether what each rank holds of it can be listed, run by run."""
    return isinstance(dim.size, int) and sum(_runs_in(part) for part in dim.parts) <= _MAX_LISTED_RUNS


def _runs_in(part: Part) -> int:
    if isinstance(part, Segment):
        return 1
    assert isinstance(part.outer.size, int)
    return part.outer.size * sum(_runs_in(below) for below in part.inner.parts)
