"""Rules of tensors joined and cut along a dimension."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cpcompile.errors import Refusal
from cpcompile.layout import Dim, Layout, Partial, Segment, sharded, whole
from cpcompile.passes.rules import joins
from tests.rule_harness import ask, check, refused
from tests.rule_layouts import CP2, CP3, CP4, GRID, RING, ULYSSES, few, layouts_of, meshes, one

aten = torch.ops.aten


def tensor(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


# Operator: shapes of the joined tensors, and the dimension.
JOINED: list[tuple[Any, list[tuple[int, ...]], int]] = [
    (aten.cat.default, [(2, 4, 3), (2, 12, 3)], 1),
    (aten.cat.default, [(2, 12), (3, 12), (1, 12)], -2),
    (aten.concat.default, [(12,), (0,), (5,)], 0),
    (aten.concatenate.default, [(2, 6), (2, 6)], -1),
    (aten.stack.default, [(2, 12), (2, 12)], -1),
    (aten.stack.default, [(12,), (12,), (12,)], 0),
]
# Operator: shape of its operand, its other arguments, and the dimension along which it cuts.
CUTS: list[tuple[Any, tuple[int, ...], tuple[Any, ...], int]] = [
    (aten.split.Tensor, (2, 12), (6, 1), 1),
    (aten.split.Tensor, (14, 2), (4,), 0),
    (aten.split.sizes, (2, 12), ([4, 8], -1), 1),
    (aten.split_with_sizes.default, (2, 12, 2), ([3, 0, 9], 1), 1),
    (aten.chunk.default, (2, 12), (3, -1), 1),
    (aten.chunk.default, (3, 6), (2,), 0),
    (aten.unsafe_split.Tensor, (12, 2), (6,), 0),
    (aten.unsafe_chunk.default, (12, 2), (2,), 0),
    (aten.tensor_split.sections, (2, 13), (3, 1), 1),
    (aten.tensor_split.indices, (2, 12), ([2, 6], -1), 1),
    (aten.select.int, (2, 12), (1, 3), 1),
    (aten.select.int, (12, 2), (0, -1), 0),
    (aten.slice.Tensor, (2, 12), (1, 4), 1),
    (aten.slice.Tensor, (2, 12), (-1, None, -6), 1),
    (aten.slice.Tensor, (2, 12), (1, -99, 99), 1),
    (aten.slice.Tensor, (2, 12), (1, 0, 2**63 - 1), 1),
    (aten.slice.Tensor, (2, 12), (1, 8, 4), 1),
    (aten.slice.Tensor, (12, 3), (0, 20, 30), 0),
    (aten.slice.Tensor, (12, 3), (0, 1, None, 2), 0),
    (aten.slice.Tensor, (12, 3), (0, 5, 3, 2), 0),
    (aten.slice.Tensor, (12, 3), (), 0),
    (aten.narrow.default, (2, 12), (1, 4, 8), 1),
    (aten.narrow.default, (2, 12), (-1, -6, 6), 1),
    (aten.narrow.default, (12, 2), (0, 3, 0), 0),
    (aten.unbind.int, (2, 12, 3), (-1,), 2),
    (aten.unbind.int, (3, 12), (), 0),
]
# Operator: shapes of base and source, the other arguments, and the written dimension.
WRITES: list[tuple[Any, tuple[int, ...], tuple[int, ...], tuple[Any, ...], int]] = [
    (aten.slice_scatter.default, (2, 16), (2, 12), (1, 4), 1),
    (aten.slice_scatter.default, (2, 16), (2, 12), (-1, -12), 1),
    (aten.slice_scatter.default, (12, 3), (12, 3), (), 0),
    (aten.slice_scatter.default, (12, 3), (6, 3), (0, 3, 9), 0),
    (aten.slice_scatter.default, (12, 4), (12, 2), (1, 1, 99, 2), 1),
    (aten.slice_scatter.default, (12, 4), (0, 4), (0, 9, 3), 0),
    (aten.select_scatter.default, (2, 12), (2,), (1, -1), 1),
    (aten.select_scatter.default, (2, 12), (12,), (0, 1), 0),
]


def test_every_rule_has_a_case() -> None:
    assert set(joins.RULES) == {case[0] for case in (*JOINED, *CUTS, *WRITES)}


def layouts(data: st.DataObject, shapes: Sequence[Sequence[int]], mesh: Any, *, partial: bool) -> list[Layout]:
    """A layout for each shape: often whole, often alike where shapes are."""
    found: list[Layout] = []
    for shape in shapes:
        kind = data.draw(st.sampled_from(["own", "own", "whole", "like"]))
        if kind == "like" and found and found[-1].shape == tuple(shape):
            found.append(found[-1])
        else:
            found.append(
                Layout.replicated(shape) if kind == "whole" else data.draw(layouts_of(shape, mesh, partial=partial))
            )
    return found


def only_one_is_sharded(found: Sequence[Layout]) -> bool:
    return sum(layout.is_sharded for layout in found) <= 1 and len({layout.partial for layout in found}) == 1


@pytest.mark.parametrize("case", JOINED, ids=lambda case: f"{case[0]}-{case[2]}")
@given(data=st.data())
@few(40)
def test_joined(case: tuple[Any, list[tuple[int, ...]], int], data: st.DataObject) -> None:
    target, shapes, dim = case
    mesh = data.draw(meshes())
    found = layouts(data, shapes, mesh, partial=True)
    answer = check(target, ([tensor(*shape) for shape in shapes], dim), found, mesh, free=only_one_is_sharded(found))
    if len({layout.partial for layout in found}) == 1:
        assert answer.results[0].partial == found[0].partial


@pytest.mark.parametrize("case", CUTS, ids=lambda case: f"{case[0]}-{case[1:3]}")
@given(data=st.data())
@few(25)
def test_cut(case: tuple[Any, tuple[int, ...], tuple[Any, ...], int], data: st.DataObject) -> None:
    target, shape, rest, dim = case
    mesh = data.draw(meshes())
    layout = data.draw(layouts_of(shape, mesh, partial=True))
    args = (tensor(*shape), *rest)
    if isinstance(ask(target, args, [layout]), Refusal):
        assert not layout.dims[dim].is_replicated, "what every rank holds whole can be cut anywhere"
    else:
        answer = check(target, args, [layout], mesh, free=target is not aten.unbind.int)
        assert {result.partial for result in answer.results} == {layout.partial}


@pytest.mark.parametrize("case", WRITES, ids=lambda case: f"{case[0]}-{case[1:4]}")
@given(data=st.data())
@few(40)
def test_written(case: tuple[Any, ...], data: st.DataObject) -> None:
    target, base, source, rest, dim = case
    mesh = data.draw(meshes())
    found = layouts(data, [base, source], mesh, partial=True)
    args = (tensor(*base), tensor(*source), *rest)
    if isinstance(ask(target, args, found), Refusal):
        assert not found[0].dims[dim].is_replicated, "into what every rank holds whole anything can be written"
        return
    stepped = len(rest) == 4
    free = only_one_is_sharded(found) and not found[0].partial
    check(target, args, found, mesh, free=free and not (stepped and any(x.dims[dim].axes for x in found)))


TEXT, IMAGE = whole(4), sharded(12, [CP3])
JOINT = Dim.of(TEXT, IMAGE)
BOTH = Dim.of(sharded(4, [CP3]), IMAGE)


@pytest.mark.parametrize(
    ("text", "image", "joint"),
    [(TEXT, IMAGE, JOINT), (sharded(4, [CP3]), IMAGE, BOTH), (TEXT, whole(12), whole(16)), (TEXT, JOINT, None)],
)
def test_cat_keeps_every_part_as_it_lies(text: Dim, image: Dim, joint: Dim | None) -> None:
    shapes = [(2, text.size), (2, image.size)]
    found = [one(shapes[0], 1, text), one(shapes[1], 1, image)]
    args = ([tensor(*shape) for shape in shapes], 1)
    answer = check(aten.cat.default, args, found, (CP3,), free=True)
    assert answer.results[0].dims[1] == (joint or Dim.of(text, image))


def test_cat_of_an_axis_in_two_dimensions() -> None:
    rows, columns = one((2, 12), 0, sharded(2, [CP2])), one((2, 4), 1, sharded(4, [CP2]))
    answer = check(aten.cat.default, ([tensor(2, 12), tensor(2, 4)], 1), [rows, columns], (CP2,))
    assert answer.results == (one((2, 16), 0, sharded(2, [CP2])),)


def test_cat_of_tensors_of_different_rank_is_refused() -> None:
    assert "rank" in refused(
        aten.cat.default, ([tensor(0), tensor(2, 12)], 1), [one((0,), 0, whole(0)), one((2, 12), 1, IMAGE)]
    )


def test_pending_and_final_tensors_are_joined_when_complete() -> None:
    pending = Layout((whole(12),), (Partial(CP3),))
    for target in (aten.cat.default, aten.stack.default):
        args = ([tensor(12), tensor(12)],)
        assert check(target, args, [pending, pending], (CP3,), free=True).results[0].partial == (Partial(CP3),)
        assert check(target, args, [pending, one((12,), 0, IMAGE)], (CP3,)).results[0].partial == ()


def test_cuts_at_the_ends_of_segments() -> None:
    layout = one((2, 16), 1, JOINT)
    x = tensor(2, 16)
    text, image = check(aten.split_with_sizes.default, (x, [4, 12], 1), [layout], (CP3,), free=True).results
    assert (text.dims[1], image.dims[1]) == (TEXT, IMAGE)
    for args, dim in [((1, 4), IMAGE), ((1, 0, 4), TEXT), ((1, 2), Dim.of(whole(2), IMAGE)), ((1, None, -12), TEXT)]:
        assert check(aten.slice.Tensor, (x, *args), [layout], (CP3,), free=True).results[0].dims[1] == dim
    for index in (0, 3, -13):
        assert check(aten.select.int, (x, 1, index), [layout], (CP3,), free=True).results == (Layout.replicated((2,)),)
    behind = one((2, 16), 1, Dim.of(IMAGE, TEXT))
    check(aten.select.int, (x, 1, -1), [behind], (CP3,), free=True)
    check(aten.narrow.default, (x, 1, 12, 3), [behind], (CP3,), free=True)


def test_cuts_inside_shards_are_refused() -> None:
    layout, x = one((2, 16), 1, JOINT), tensor(2, 16)
    assert "inside" in refused(aten.slice.Tensor, (x, 1, 5), [layout])
    assert "step" in refused(aten.slice.Tensor, (x, 1, 4, 16, 2), [layout])
    assert "inside" in refused(aten.split.Tensor, (x, 8, 1), [layout])
    assert "index 4" in refused(aten.select.int, (x, 1, 4), [layout])
    assert "index 15" in refused(aten.select.int, (x, 1, -1), [layout])
    assert "from 5" in refused(aten.narrow.default, (x, 1, 5, 2), [layout])
    assert "inside" in refused(
        aten.slice_scatter.default, (x, tensor(2, 11), 1, 5), [layout, Layout.replicated((2, 11))]
    )
    assert "index 4" in refused(aten.select_scatter.default, (x, tensor(2), 1, 4), [layout, Layout.replicated((2,))])


def test_a_slice_with_a_step_along_what_is_whole() -> None:
    layout = one((12, 4), 0, IMAGE)
    answer = check(aten.slice.Tensor, (tensor(12, 4), 1, 0, 2**63 - 1, 2), [layout], (CP3,), free=True)
    assert answer.results == (one((12, 2), 0, IMAGE),)


@pytest.mark.parametrize(
    ("base", "source", "result"),
    [
        (whole(16), IMAGE, JOINT),
        (JOINT, whole(12), JOINT),
        (JOINT, IMAGE, JOINT),
        (BOTH, whole(12), BOTH),
        (Dim.of(sharded(4, [CP3]), whole(12)), IMAGE, BOTH),
    ],
)
def test_base_and_source_are_sliced_like_each_other(base: Dim, source: Dim, result: Dim) -> None:
    found = [one((2, 16), 1, base), one((2, 12), 1, source)]
    answer = check(aten.slice_scatter.default, (tensor(2, 16), tensor(2, 12), 1, 4), found, (CP3,), free=True)
    assert answer.results == (one((2, 16), 1, result),)


def test_rows_written_in_steps_stay_sharded() -> None:
    """Wan's rope: even and odd features into a buffer of zeros."""
    found = [Layout.replicated((2, 12, 4)), one((2, 12, 2), 1, IMAGE)]
    args = (tensor(2, 12, 4), tensor(2, 12, 2), -1, 1, 2**63 - 1, 2)
    assert check(aten.slice_scatter.default, args, found, (CP3,), free=True).results == (one((2, 12, 4), 1, IMAGE),)


def test_the_source_moves_where_both_are_sharded() -> None:
    found = [one((2, 16), 1, JOINT), one((2, 12), 1, sharded(12, [CP3], 3))]
    answer = check(aten.slice_scatter.default, (tensor(2, 16), tensor(2, 12), 1, 4), found, (CP3,))
    assert answer.results == (found[0],)


def test_unbind_of_a_sharded_dimension_gathers_it_alone() -> None:
    layout = Layout((sharded(2, [RING]), sharded(12, [ULYSSES])))
    answer = check(aten.unbind.int, (tensor(2, 12), 0), [layout], GRID)
    assert answer.results == (one((12,), 0, sharded(12, [ULYSSES])),) * 2


def test_cuts_between_rows() -> None:
    rows = Dim.of(*(sharded(6, [CP4]),) * 3)
    answer = check(aten.split.Tensor, (tensor(18, 2), 6), [one((18, 2), 0, rows)], (CP4,), free=True)
    assert answer.results == (one((6, 2), 0, sharded(6, [CP4])),) * 3
    halves = Dim.of(Segment(6, (CP3,)), Segment(6, (CP3,), descending=True))
    zigzag = one((12, 2), 0, halves)
    check(aten.chunk.default, (tensor(12, 2), 2), [zigzag], (CP3,), free=True)
