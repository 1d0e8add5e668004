"""The laws of layouts: what ranks hold adds up, gathers leave layouts, and equal contents compare equal."""

from __future__ import annotations

import itertools
import math

import pytest
import sympy
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from cpcompile.assemble import all_coords, disagreement, shard, unshard
from cpcompile.layout import (
    Axis,
    Dim,
    Layout,
    Partial,
    Segment,
    is_short,
    multiplied,
    sharded,
    whole,
)
from tests.strategies import (
    CP3,
    Mesh,
    counted,
    dims,
    held,
    layouts_profile,
    meshes,
    meshes_and_dims,
    meshes_and_layouts,
    number,
    product_of,
    segments,
)

DP, RING, ULYSSES = Axis("dp", 2), Axis("ring", 2), Axis("ulysses", 2)
S = sympy.Symbol("s", integer=True, positive=True)


@layouts_profile
@given(meshes_and_layouts())
def test_unshard_undoes_shard(case: tuple[Mesh, Layout]) -> None:
    mesh, layout = case
    x = counted(layout)
    shards = {rank: shard(x, layout, coords) for rank, coords in enumerate(all_coords(mesh))}
    for rank, coords in enumerate(all_coords(mesh)):
        assert tuple(shards[rank].shape) == layout.local_shape(coords)
    assert torch.equal(unshard(shards, layout, mesh), x)
    assert disagreement(shards, layout, mesh) == 0.0
    assert layout.axis_conflict() is None


@layouts_profile
@given(meshes_and_dims())
def test_ranks_hold_every_index_in_order(case: tuple[Mesh, Dim]) -> None:
    mesh, dim = case
    owned = held(dim, mesh)
    assert sorted(set(itertools.chain(*owned))) == list(range(number(dim.size)))
    for coords, indices in zip(all_coords(mesh), owned, strict=True):
        assert indices == sorted(set(indices))
        assert len(indices) == dim.local_size(coords)


@layouts_profile
@given(st.data(), meshes())
def test_the_ranks_of_a_segment_share_it_evenly(data: st.DataObject, mesh: Mesh) -> None:
    segment = data.draw(segments(mesh, largest=30))
    axes = {axis.name for axis in segment.axes}
    ranks = [coords for coords in all_coords(mesh) if all(coords[a.name] == 0 for a in mesh if a.name not in axes)]
    sizes = [number(segment.bounds(coords)[1]) for coords in ranks]
    assert sum(sizes) == segment.size
    assert max(sizes) - min(sizes) <= number(segment.granule)
    assert all(size % number(segment.granule) == 0 for size in sizes)
    assert sorted(itertools.chain(*held(Dim((segment,)), segment.axes))) == list(range(number(segment.size)))


@layouts_profile
@given(st.integers(0, 100), st.integers(1, 8), st.booleans())
def test_parts_go_out_in_order_or_in_reverse(size: int, ranks: int, descending: bool) -> None:
    segment = Segment(size, (Axis("cp", ranks),), descending)
    sizes = [segment.bounds({"cp": rank})[1] for rank in range(ranks)]
    expected = [(size + ranks - 1 - part) // ranks for part in range(ranks)]
    assert sizes == (expected[::-1] if descending and ranks > 1 else expected)


@layouts_profile
@given(st.data(), meshes(), st.integers(1, 60), st.sampled_from([1, 2, 3]))
def test_gathering_the_inner_axes_leaves_the_outer_layout(data: st.DataObject, mesh: Mesh, units: int, g: int) -> None:
    down = data.draw(st.booleans())
    for depth in range(len(mesh) + 1):
        outer = Dim.of(Segment(units * g, mesh[:depth], down and mesh[0] in mesh[:depth], g))
        assert Dim.of(Segment(units * g, mesh, down, g)).without(mesh[depth:]) == outer or mesh[0].size == 1


@layouts_profile
@given(st.data(), meshes_and_dims())
def test_a_gathered_rank_holds_what_its_row_of_ranks_held(data: st.DataObject, case: tuple[Mesh, Dim]) -> None:
    mesh, dim = case
    gone = frozenset(axis for axis in mesh if data.draw(st.booleans()))
    gathered = dim.gathered(gone)
    assume(gathered is not None)
    assert gathered is not None
    assert gathered.axes == dim.axes - gone
    for coords in all_coords(mesh):
        row = [{**coords, **along} for along in all_coords(sorted(gone, key=str))]
        assert gathered.indices(coords) == sorted(set(itertools.chain(*(dim.indices(other) for other in row))))


def test_an_outer_axis_can_be_gathered_where_it_cut_evenly() -> None:
    assert Dim.of(Segment(12, (DP, RING))).without([DP]) == product_of(whole(2), sharded(6, [RING]))
    assert Dim.of(Segment(7, (DP, RING))).gathered([DP]) is None
    with pytest.raises(AssertionError, match="cannot be gathered"):
        Dim.of(Segment(7, (DP, RING))).without([DP])


def test_the_examples_of_the_design() -> None:
    text, image = sharded(16, [RING]), sharded(64, [RING])
    assert str(Dim.of(text, image)) == "16 ring ++ 64 ring"
    assert str(Dim.of(whole(16), image)) == "16 ++ 64 ring"
    assert str(product_of(whole(2), image)) == "2 * 64 ring"
    assert product_of(whole(2), image) == Dim.of(image, image)
    assert product_of(sharded(2, [DP]), image) == Dim.of(Segment(128, (DP, RING)))
    assert str(Layout((whole(2), whole(8)), (Partial(RING),))) == "(2) (8), partial sum over ring"


def test_short_and_ragged_segments_are_left_whole() -> None:
    assert sharded(3, [Axis("cp", 4)]) == whole(3)
    assert sharded(4, [Axis("cp", 4)]) != whole(4)
    assert sharded(0, [RING]) == whole(0)
    assert sharded(9, [RING], granule=2) == whole(9)
    assert sharded(6, [RING, ULYSSES], granule=2) == whole(6)
    assert sharded(8, [Axis("cp", 1)]) == whole(8)
    assert sharded(S, [CP3]) != whole(S)
    assert is_short(2, [CP3])
    assert not is_short(S, [CP3])


def test_an_axis_divides_one_dimension() -> None:
    both = Layout((sharded(8, [RING]), Dim.of(whole(2), sharded(8, [RING]))))
    assert both.axis_conflict() == "axis ring divides both dimension 0 and dimension 1"
    pending = Layout((whole(2), sharded(8, [RING])), (Partial(RING),))
    assert pending.axis_conflict() == "axis ring divides dimension 1 of a value partial over it"
    assert Layout((sharded(8, [RING]), sharded(8, [ULYSSES])), (Partial(DP),)).axis_conflict() is None
    assert multiplied(sharded(8, [RING]), sharded(8, [RING])) is None


@layouts_profile
@given(st.data(), meshes())
def test_partial_values_are_combined_once(data: st.DataObject, mesh: Mesh) -> None:
    pending = data.draw(st.sampled_from(mesh))
    rest = tuple(axis for axis in mesh if axis != pending)
    for op in ("sum", "max"):
        layout = Layout((data.draw(dims(rest, depth=1)), whole(3)), (Partial(pending, op),))
        x = counted(layout).double()
        terms = torch.stack([(index + 1) * x - 100 * index for index in range(pending.size)])
        shards = {
            rank: shard(terms[coords[pending.name]], layout.reduced(), coords).clone()
            for rank, coords in enumerate(all_coords(mesh))
        }
        assert torch.equal(unshard(shards, layout, mesh), terms.sum(0) if op == "sum" else terms.amax(0))
        assert disagreement(shards, layout, mesh) == 0.0
        spread = {rank: shard(x, layout, coords) for rank, coords in enumerate(all_coords(mesh))}
        assert torch.equal(unshard(spread, layout, mesh), x)
        other = next((rank for rank, c in enumerate(all_coords(mesh)) if rest and c[rest[0].name] == 1), None)
        if other is not None and rest[0] not in layout.axes and shards[other].numel():
            shards[other][0] += 1
            assert disagreement(shards, layout, mesh) == 1.0


def test_a_wrong_layout_is_found_out() -> None:
    mesh, dim = (RING, ULYSSES), sharded(8, [RING])
    x, places = torch.arange(8.0), all_coords((RING, ULYSSES))
    shards = {rank: shard(x, Layout((dim,)), coords) for rank, coords in enumerate(places)}
    assert not torch.equal(unshard(shards, Layout((Dim.of(Segment(8, (RING,), True)),)), mesh), x)
    assert disagreement(shards, Layout((sharded(8, [ULYSSES]),)), mesh) == 4.0
    with pytest.raises(ValueError, match="as \\(8\\) has it"):
        unshard(shards, Layout((whole(8),)), mesh)
    shards[1] = shards[1] + torch.tensor([0, 0, 0, float("nan")])
    assert disagreement(shards, Layout((dim,)), mesh) == math.inf
    flags = {0: torch.tensor([True, False]), 1: torch.tensor([True, True])}
    assert disagreement(flags, Layout((whole(2),)), (RING,)) == 1.0
    with pytest.raises(ValueError, match="log-sum-exp"):
        unshard(shards, Layout((whole(4),), (Partial(RING, "lse"),)), mesh)


def _symbolic_dims(size: sympy.Expr | int) -> list[Dim]:
    """The same constructions for a symbol and for its value."""
    seq = Dim((Segment(size, (CP3,)),))
    patches = Dim((Segment(4 * size, (CP3,), granule=4),))
    return [
        seq,
        Dim((Segment(size, (CP3, ULYSSES)),)),
        Dim.of(whole(7), seq, whole(size)),
        Dim.of(sharded(6, [CP3]), seq),
        product_of(whole(2), seq),
        product_of(whole(2), Dim.of(whole(16), seq)),
        product_of(sharded(2, [DP]), seq),
        product_of(sharded(4, [DP]), seq),
        product_of(seq, whole(5)),
        product_of(seq, sharded(4, [ULYSSES])),
        Dim.of(Segment(size, (CP3,)), Segment(size, (CP3,), descending=True)),
        Dim.of(Segment(size + 3, (CP3,)), patches),
        Dim.of(Segment(2 * size, (DP, CP3))).without([CP3]),
        Dim.of(Segment(2 * size, (DP, CP3))).without([DP]),
    ]


@pytest.mark.parametrize("index", range(len(_symbolic_dims(S))))
def test_symbolic_local_sizes_are_the_numeric_ones(index: int) -> None:
    symbolic = _symbolic_dims(S)[index]
    assert Dim.of(symbolic) == symbolic
    assert Layout((symbolic,)).axis_conflict() is None
    assert isinstance(str(symbolic), str)
    for value in (1, 2, 3, 4, 7, 12, 31):
        numeric = _symbolic_dims(value)[index]
        assert sympy.sympify(symbolic.size).subs(S, value) == numeric.size
        for coords in all_coords((DP, CP3, ULYSSES)):
            assert sympy.sympify(symbolic.local_size(coords)).subs(S, value) == numeric.local_size(coords)
            for part in symbolic.parts:
                start, count = part.bounds(coords) if isinstance(part, Segment) else part.outer.bounds(coords)
                assert not sympy.sympify(start).subs(S, value).is_negative
                assert not sympy.sympify(count).subs(S, value).is_negative


def test_symbols_compare_equal_where_they_are_built_alike() -> None:
    seq = Dim((Segment(S, (CP3,)),))
    assert product_of(whole(2), seq) == Dim.of(seq, seq)
    assert product_of(product_of(whole(2), whole(3)), seq) == product_of(whole(2), product_of(whole(3), seq))
    assert product_of(whole(S), whole(4)) == whole(4 * S)
    assert Dim.of(whole(S), whole(3)) == whole(S + 3)
    assert Dim.of(whole(16), seq) != Dim.of(seq, whole(16))
