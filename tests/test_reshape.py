"""Views of sharded tensors: what a rank gets from its local tensor is what the layout says of the global view."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
import sympy
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from cpcompile.assemble import all_coords, shard
from cpcompile.errors import Refusal
from cpcompile.layout import Axis, Dim, Layout, Part, Partial, Segment, sharded, whole
from cpcompile.reshape import cut, factor, is_slice_of, meet, merge, reshape, split_dim
from cpcompile.sizes import Size
from tests.strategies import (
    CP3,
    Mesh,
    bricks,
    counted,
    dims,
    held,
    layouts_profile,
    meshes,
    meshes_and_dims,
    number,
    product_of,
)

CP2, CP4, DP, ULYSSES = Axis("cp", 2), Axis("cp", 4), Axis("dp", 2), Axis("ulysses", 2)
S = sympy.Symbol("s", integer=True, positive=True)


def _leaves(part: Part) -> list[tuple[int, bool]]:
    """Size of each run of a part, repetitions written out, and whether it is sharded."""
    if isinstance(part, Segment) or part.outer.axes:
        return [(number(part.size), not Dim((part,)).is_replicated)]
    return [leaf for below in part.inner.parts for leaf in _leaves(below)] * number(part.outer.size)


@layouts_profile
@given(st.data(), meshes_and_dims())
def test_a_cut_takes_the_range_or_falls_inside_a_sharded_segment(data: st.DataObject, case: tuple[Mesh, Dim]) -> None:
    mesh, dim = case
    leaves = [leaf for part in dim.parts for leaf in _leaves(part)]
    ends = list(itertools.accumulate((size for size, _ in leaves), initial=0))
    limits = st.one_of(st.sampled_from(ends), st.integers(0, number(dim.size)))
    start, stop = sorted((data.draw(limits), data.draw(limits)))
    piece = cut(dim, start, stop)
    crossed = any(
        split and base < limit < base + size
        for (size, split), base in zip(leaves, ends, strict=False)
        for limit in (start, stop)
    )
    assert isinstance(piece, Refusal) == (crossed and start < stop)
    if not isinstance(piece, Refusal):
        wanted = [[index - start for index in indices if start <= index < stop] for indices in held(dim, mesh)]
        assert held(piece, mesh) == wanted
        assert Dim.of(piece).parts == piece.parts


@layouts_profile
@given(meshes_and_dims())
def test_the_pieces_of_a_dim_make_it_again(case: tuple[Mesh, Dim]) -> None:
    _, dim = case
    sizes = [number(part.size) for part in dim.parts]
    ends = list(itertools.accumulate(sizes, initial=0))
    pieces = [cut(dim, start, stop) for start, stop in itertools.pairwise(ends)]
    assert Dim.of(*(piece for piece in pieces if isinstance(piece, Dim))) == dim


def test_refused_cuts_say_where() -> None:
    found = cut(Dim.of(whole(16), sharded(64, [CP2])), 10, 20)
    assert found == Refusal("cut 10:20 of (16 ++ 64 cp): it falls inside the sharded segment (64 cp)")
    assert isinstance(cut(product_of(sharded(4, [DP]), sharded(6, [CP2])), 0, 6), Refusal)
    assert cut(whole(8), 5, 3) == whole(0)


@layouts_profile
@given(st.data(), meshes())
def test_a_product_has_its_factors(data: st.DataObject, mesh: Mesh) -> None:
    outer, inner = data.draw(bricks(mesh, 2))
    assert factor(product_of(outer, inner), outer.size, inner.size) == (outer, inner)


@layouts_profile
@given(st.data(), meshes())
def test_three_dims_come_back_from_one(data: st.DataObject, mesh: Mesh) -> None:
    found = data.draw(bricks(mesh, 3))
    merged = merge(found)
    assert isinstance(merged, Dim)
    assert split_dim(merged, [dim.size for dim in found]) == tuple(found)
    tokens = merge(found[:2])
    assert isinstance(tokens, Dim)
    assert merge([tokens, found[2]]) == merged
    assert merge([found[0], product_of(found[1], found[2])]) == merged


def _check_view(layout: Layout, shape: Sequence[int], mesh: Mesh) -> Layout | None:
    """Every rank's view of its shard is its shard of the view; None where the view is refused."""
    target = reshape(layout, shape)
    if isinstance(target, Refusal):
        return None
    assert target.shape == tuple(shape)
    assert target.axis_conflict() is None
    x = counted(layout)
    for coords in all_coords(mesh):
        local = shard(x, layout, coords).reshape([number(size) for size in target.local_shape(coords)])
        assert torch.equal(local, shard(x.reshape(tuple(shape)), target, coords))
    return target


@layouts_profile
@given(st.data(), meshes())
def test_a_local_view_is_the_shard_of_the_view(data: st.DataObject, mesh: Mesh) -> None:
    layout = Layout(tuple(data.draw(bricks(mesh, 3, larger=data.draw(st.sampled_from([1, 2, 4]))))))
    shape: list[int] = []
    rest = math.prod(number(size) for size in layout.shape)
    while rest > 1 and len(shape) < 4:
        shape.append(data.draw(st.sampled_from([d for d in range(1, rest + 1) if rest % d == 0])))
        rest //= shape[-1]
    view = _check_view(layout, [*shape, rest], mesh)
    assume(view is not None)
    assert view is not None
    back = reshape(view, layout.shape)
    assert isinstance(back, Refusal) or back == layout


@layouts_profile
@given(st.data(), meshes_and_dims())
def test_random_dims_factor_rightly_or_not_at_all(data: st.DataObject, case: tuple[Mesh, Dim]) -> None:
    mesh, dim = case
    size = number(dim.size)
    assume(size > 0)
    inner = data.draw(st.sampled_from([d for d in range(1, size + 1) if size % d == 0]))
    _check_view(Layout((dim,)), (size // inner, inner), mesh)


@layouts_profile
@given(st.data(), meshes())
def test_flattened_tokens_and_heads(data: st.DataObject, mesh: Mesh) -> None:
    batch, seq, heads = data.draw(bricks(mesh, 3))
    layout = Layout((batch, seq, heads, whole(2)))
    sizes = [number(size) for size in layout.shape]
    for shape in (
        [sizes[0] * sizes[1], sizes[2] * 2],
        [sizes[0] * sizes[1] * sizes[2], 2],
        [sizes[0], sizes[1], sizes[2] * 2],
        [sizes[0], sizes[1], 1, sizes[2], 2],
        [sizes[0], sizes[1] * sizes[2] * 2],
    ):
        view = _check_view(layout, shape, mesh)
        assert view is not None
        assert _check_view(view, sizes, mesh) == layout


def test_views_that_models_take() -> None:
    tokens = Layout((whole(2), sharded(64, [CP2]), whole(8)))
    flat = reshape(tokens, (128, 8))
    assert str(flat) == "(2 * 64 cp) (8)"
    assert reshape(flat, (2, 64, 8)) == tokens  # type: ignore[arg-type]
    assert str(reshape(tokens, (2, 64, 4, 2))) == "(2) (64 cp) (4) (2)"
    patches = Layout((whole(2), sharded(64, [CP2], granule=4), whole(8)))
    assert str(reshape(patches, (2, 16, 4, 8))) == "(2) (16 cp) (4) (8)"
    odd = Layout((sharded(20, [CP2], granule=4),))
    assert str(reshape(odd, (5, 4))) == "(5 cp) (4)"
    assert isinstance(reshape(Layout((sharded(20, [CP3]),)), (5, 4)), Refusal)
    both = Layout((sharded(2, [DP]), sharded(9, [CP2]), whole(8)))
    joined = reshape(both, (18, 8))
    assert str(joined) == "(18 dp.cp) (8)"
    assert reshape(joined, (2, 9, 8)) == both  # type: ignore[arg-type]
    assert reshape(Layout((sharded(4, [DP]),)), (4, 1)) == Layout((sharded(4, [DP]), whole(1)))
    assert reshape(Layout((whole(1), sharded(4, [DP]))), (4,)) == Layout((sharded(4, [DP]),))
    assert reshape(Layout((whole(1),), (Partial(DP),)), ()) == Layout((), (Partial(DP),))
    assert reshape(Layout((whole(0), whole(3)), (Partial(DP),)), (3, 0)) == Layout((whole(3), whole(0)), (Partial(DP),))
    empty_ranks = Layout((whole(4), Dim((Segment(1, (CP2,)),))))
    assert str(reshape(empty_ranks, (4,))) == "(4 * 1 cp)"
    assert isinstance(reshape(Layout((sharded(4, [CP2]), Dim.of(sharded(4, [CP2])))), (16,)), Refusal)


def test_a_join_of_two_flattened_batches_splits_again() -> None:
    text, image = product_of(whole(2), sharded(16, [CP3])), product_of(whole(2), sharded(65, [CP3]))
    joined = Dim.of(text, image)
    assert cut(joined, 0, 32) == text
    assert cut(joined, 32, 162) == image
    assert cut(joined, 0, 16) == sharded(16, [CP3])
    assert cut(joined, 16, 97) == Dim.of(sharded(16, [CP3]), sharded(65, [CP3]))
    assert isinstance(cut(joined, 8, 32), Refusal)


@layouts_profile
@given(st.data(), meshes())
def test_what_both_agree_on_is_a_slice_of_both(data: st.DataObject, mesh: Mesh) -> None:
    left = data.draw(dims(mesh, depth=1))
    other: list[Part | Dim] = [part if data.draw(st.booleans()) else Segment(part.size) for part in left.parts]
    gone = [axis for axis in mesh if data.draw(st.booleans())]
    fewer = Dim.of(*other)
    for right in (fewer, left.gathered(gone) or left, fewer.gathered(gone) or left):
        met = meet(left, right)
        if isinstance(met, Refusal):  # whole parts and gathered axes at once may fold into rows that do not align
            assert right not in (fewer, left.gathered(gone))
            assert isinstance(meet(right, left), Refusal)
            continue
        assert met == meet(right, left) == left
        assert is_slice_of(left, met)
        assert is_slice_of(right, met)
        assert is_slice_of(met, right) == (right == met)


@layouts_profile
@given(st.data(), meshes())
def test_meeting_never_needs_what_a_rank_lacks(data: st.DataObject, mesh: Mesh) -> None:
    left = data.draw(dims(mesh, depth=1, short=False))
    right = Dim.of(data.draw(dims(mesh, depth=1, short=False)))
    filler = number(left.size) - number(right.size)
    left, right = Dim.of(left, whole(max(-filler, 0))), Dim.of(right, whole(max(filler, 0)))
    met = meet(left, right)
    other = meet(right, left)
    assert met == other or (isinstance(met, Refusal) and isinstance(other, Refusal))
    if not isinstance(met, Refusal):
        for mine, one, two in zip(held(met, mesh), held(left, mesh), held(right, mesh), strict=True):
            assert set(mine) <= set(one) & set(two)
        assert is_slice_of(left, met)
        assert is_slice_of(right, met)


def test_meetings_that_models_have() -> None:
    text_whole, image = whole(16), sharded(64, [CP2])
    assert meet(Dim.of(text_whole, image), whole(80)) == Dim.of(text_whole, image)
    assert meet(Dim.of(text_whole, image), Dim.of(sharded(16, [CP2]), whole(64))) == Dim.of(sharded(16, [CP2]), image)
    assert isinstance(meet(Dim.of(text_whole, image), sharded(80, [CP2])), Refusal)
    assert isinstance(meet(whole(4), whole(5)), Refusal)
    nested = sharded(64, [CP2, ULYSSES])
    assert meet(nested, image) == nested
    assert is_slice_of(image, nested)
    assert not is_slice_of(nested, image)
    assert meet(sharded(64, [CP2]), Dim((Segment(64, (CP2,), descending=True),))) != image


def _symbolic_views(s: Size) -> list[tuple[Layout, tuple[Size, ...]]]:
    seq = Dim((Segment(s, (CP3,)),))
    joint = Dim.of(whole(16), seq)
    return [
        (Layout((whole(2), seq, whole(8))), (2 * s, 8)),
        (Layout((product_of(whole(2), seq), whole(8))), (2, s, 4, 2)),
        (Layout((whole(2), joint, whole(8))), (2 * s + 32, 8)),
        (Layout((product_of(whole(2), joint), whole(8))), (2, s + 16, 8)),
        (Layout((Dim((Segment(4 * s, (CP3,), granule=4),)), whole(3))), (s, 4, 3)),
        (Layout((Dim((Segment(4 * s, (CP3,), granule=4),)), whole(3))), (2 * s, 2, 3)),
        (Layout((whole(s), sharded(6, [CP3]), whole(5))), (s, 30)),
        (Layout((whole(s), sharded(6, [CP3]), whole(5))), (6 * s, 5)),
        (Layout((sharded(2, [DP]), seq, whole(5))), (2 * s, 5)),
        (Layout((product_of(sharded(2, [DP]), seq), whole(5))), (2, s, 5)),
        (Layout((product_of(sharded(4, [DP]), seq), whole(5))), (4, s, 5)),
    ]


@pytest.mark.parametrize("index", range(len(_symbolic_views(S))))
def test_symbolic_views_are_the_numeric_ones(index: int) -> None:
    layout, shape = _symbolic_views(S)[index]
    view = reshape(layout, shape)
    assert isinstance(view, Layout), view
    assert view.shape == shape
    assert reshape(view, layout.shape) == layout
    for value in (
        3,
        4,
        5,
        7,
        30,
    ):  # at fewer tokens than ranks a number is viewed as well, but another axis may take it
        numeric = reshape(*_symbolic_views(value)[index])
        assert isinstance(numeric, Layout)
        for coords in all_coords((DP, CP3)):
            sizes = [int(sympy.sympify(size).subs(S, value)) for size in view.local_shape(coords)]
            assert sizes == list(numeric.local_shape(coords))


def test_symbolic_cuts() -> None:
    seq = Dim((Segment(S, (CP3,)),))
    joint = Dim.of(whole(16), seq, whole(S))
    assert cut(joint, 16, S + 16) == seq
    assert cut(joint, 0, 16) == whole(16)
    assert cut(joint, 4, S + 16) == Dim.of(whole(12), seq)
    assert cut(joint, S + 16, 2 * S + 16) == whole(S)
    assert cut(product_of(whole(2), seq), S, 2 * S) == seq
    assert cut(Dim((Segment(2 * S, (CP3,)),)), 0, 2 * S) == Dim((Segment(2 * S, (CP3,)),))
    for start, stop in ((0, S), (16, S), (17, S + 16)):
        assert isinstance(cut(joint, start, stop), Refusal)
    assert meet(joint, whole(2 * S + 16)) == joint
    assert meet(joint, Dim.of(sharded(16, [CP3]), whole(2 * S))) == Dim.of(sharded(16, [CP3]), seq, whole(S))
    other = sympy.Symbol("t", integer=True, positive=True)
    assert isinstance(
        meet(Dim.of(whole(S), seq), Dim.of(whole(other), Dim((Segment(2 * S - other, (CP3,)),)))), Refusal
    )
