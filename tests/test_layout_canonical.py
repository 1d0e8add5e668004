"""The canonical form: dims which give every rank the same indices compare equal, however they were built."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from cpcompile.assemble import all_coords
from cpcompile.layout import Axis, Dim, Part, Product, Segment, whole
from tests.strategies import CP3, Mesh, held, layouts_profile, meshes_and_dims, number

DP, RING, ULYSSES = Axis("dp", 2), Axis("ring", 2), Axis("ulysses", 2)


@layouts_profile
@given(meshes_and_dims())
def test_canonical_form_is_a_fixed_point(case: tuple[Mesh, Dim]) -> None:
    _, dim = case
    assert Dim.of(dim) == dim
    assert Dim.of(*dim.parts).parts == dim.parts


def _respelled(data: st.DataObject, part: Part) -> list[Part]:
    """Other words for a part: what every rank holds stays the same."""
    if isinstance(part, Segment):
        size, granule = number(part.size), number(part.granule)
        if part.is_replicated:
            first = data.draw(st.integers(0, size))
            return [Segment(first), Segment(0, (RING,)), Segment(size - first, (Axis("none", 1),))]
        if size % 2 == 0 and data.draw(st.booleans()) and (coarse := part.in_units_of(2)) is not None:
            return [Product(coarse, whole(2))]
        split = part.split_at(1) if len(part.axes) > 1 else None
        return [part] if split is None else [Product(split[0], Dim((Segment(0), split[1])))] if granule else []
    inner = Dim(tuple(itertools.chain(*(_respelled(data, below) for below in part.inner.parts))))
    rows = number(part.outer.size)
    if part.outer.is_replicated and data.draw(st.booleans()):
        first = data.draw(st.integers(0, rows))
        return [Product(Segment(first), inner), *inner.parts * (rows - first)]
    if rows % 2 == 0 and (pairs := part.outer.in_units_of(2)) is not None:
        return [
            Product(pairs, Dim(inner.parts * 2) if data.draw(st.booleans()) else Dim((Product(Segment(2), inner),)))
        ]
    return [Product(part.outer, inner)]


@layouts_profile
@given(st.data(), meshes_and_dims())
def test_other_words_for_a_dim_are_the_same_dim(data: st.DataObject, case: tuple[Mesh, Dim]) -> None:
    mesh, dim = case
    words = Dim(tuple(itertools.chain(*(_respelled(data, part) for part in dim.parts))))
    assume(held(words, mesh) == held(dim, mesh))
    assert Dim.of(words) == dim
    assert hash(Dim.of(words)) == hash(dim)


# The exhaustive test below leaves out three kinds of dims, which can be written in two ways that compare unequal:
# - a segment of which some rank holds nothing (fewer units than ranks): (1 cp ++ 1 cp) is (2 cp g2). `sharded` leaves
#   such a segment whole, and no view makes one out of others.
# - two sharded parts that meet on one rank, as where a zigzag turns, one of them cut unevenly: over two ranks
#   (4 cp ++ 4 cp-) and (3 cp ++ 5 cp-) are both 2, 4 and 2 indices. The boundary stays as it was built because a later
#   cut may fall on it (zigzag text joined with a zigzag image).
# - more than 256 repetitions of a row of several parts, which are not written out.
def _small_parts(mesh: Mesh, largest: int) -> list[Part]:
    orders = [order for count in range(1, len(mesh) + 1) for order in itertools.permutations(mesh, count)]
    cut = [
        Segment(size, order, descending, granule)
        for order in orders
        for granule in (1, 2, 3)
        for size in range(granule, largest + 1, granule)
        for descending in (False, True)
        if size // granule >= math.prod(axis.size for axis in order)
    ]
    flat = list(dict.fromkeys([*(Segment(size) for size in range(1, largest + 1)), *cut]))
    rows: list[Part] = []
    inners = [Dim(row) for count in (1, 2) for row in itertools.product(flat, repeat=count)]
    inners = [row for row in inners if number(row.size) <= largest // 2 and not row.is_replicated]
    for _ in range(2):
        products: list[Part] = [
            Product(outer, row)
            for outer, row in itertools.product(flat, inners)
            if 1 < number(outer.size) <= largest // number(row.size) and not set(outer.axes) & row.axes
        ]
        rows.extend(products)
        inners = [Dim((part,)) for part in products if number(part.size) <= largest // 2]
    return [*flat, *rows]


def _rows(found: list[Part], size: int, count: int) -> Iterator[tuple[Part, ...]]:
    for part in found if count else []:
        if part.size == size:
            yield (part,)
        elif number(part.size) < size:
            yield from ((part, *rest) for rest in _rows(found, size - number(part.size), count - 1))


def _leaves(part: Part, uneven: bool = False) -> list[tuple[Segment, int, bool]]:
    """The segments in a row as they lie, their sizes, and whether they, or what is around them, are cut unevenly."""
    head = part if isinstance(part, Segment) else part.outer
    uneven = uneven or len({number(head.bounds(coords)[1]) for coords in all_coords(head.axes)}) > 1
    if isinstance(part, Segment):
        return [(part, number(part.size), uneven)]
    return [leaf for _ in range(number(part.outer.size)) for p in part.inner.parts for leaf in _leaves(p, uneven)]


def _meet_on_a_rank(row: tuple[Part, ...], owned: list[list[int]], ranks: int) -> bool:
    heads = [part if isinstance(part, Segment) else part.outer for part in row]
    if any(a.axes[:1] == b.axes[:1] and a.descending != b.descending for a, b in itertools.pairwise(heads)):
        return any(leaf[2] for part in row for leaf in _leaves(part))
    at = 0
    for (_, size, uneven), (_, _, next_uneven) in itertools.pairwise(leaf for part in row for leaf in _leaves(part)):
        at += size
        before, after = ([at - 1 + step in indices for indices in owned] for step in (0, 1))
        if before == after and sum(before) < ranks and (uneven or next_uneven):
            return True
    return False


@pytest.mark.parametrize(
    ("mesh", "size", "count"),
    [((RING,), 8, 4), ((RING,), 12, 2), ((CP3,), 9, 3), ((RING, ULYSSES), 8, 2), ((DP, CP3), 12, 1)],
    ids=str,
)
def test_dims_are_equal_where_their_contents_are(mesh: Mesh, size: int, count: int) -> None:
    found: dict[tuple[tuple[int, ...], ...], Dim] = {}
    contents: dict[Dim, tuple[tuple[int, ...], ...]] = {}
    spellings = 0
    for row in _rows(_small_parts(mesh, size), size, count):
        raw = Dim(row)
        owned = held(raw, mesh)
        if _meet_on_a_rank(row, owned, math.prod(axis.size for axis in mesh)):
            continue
        spellings += 1
        key, dim = tuple(map(tuple, owned)), Dim.of(*row)
        assert found.setdefault(key, dim) == dim, f"({raw}) became ({dim})"
        assert contents.setdefault(dim, key) == key
        assert dim.axes == raw.axes
    assert spellings > len(found) > 20
