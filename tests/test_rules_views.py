"""Rules of views."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cpcompile.assemble import all_coords, shard
from cpcompile.errors import Refusal
from cpcompile.layout import Axis, Dim, Layout, Product, Segment, multiplied, sharded, whole
from cpcompile.passes.rules import views
from tests.rule_harness import ask, check, refused
from tests.rule_layouts import CP2, CP3, CP4, GRID, few, layouts_of, meshes, one

aten = torch.ops.aten

# Operator: the shape of its operand and its other arguments.
FREE: list[tuple[Any, Sequence[int], tuple[Any, ...]]] = [  # never refused, whatever the layout
    (aten.permute.default, (2, 12, 3), ([1, -1, 0],)),
    (aten.permute.default, (12,), ([0],)),
    (aten.transpose.int, (2, 12, 3), (1, -3)),
    (aten.swapaxes.default, (2, 12, 3), (-1, 1)),
    (aten.swapdims.default, (12, 3), (0, 1)),
    (aten.movedim.int, (2, 12, 3, 4), (1, -1)),
    (aten.movedim.intlist, (2, 12, 3, 4), ([1, -1], [0, 2])),
    (aten.moveaxis.int, (2, 12, 3), (0, 1)),
    (aten.moveaxis.intlist, (2, 12, 3), ([0], [-1])),
    (aten.t.default, (12, 3), ()),
    (aten.t.default, (12,), ()),
    (aten.numpy_T.default, (12, 3), ()),
    (aten.mT.default, (2, 12, 3), ()),
    (aten.unsqueeze.default, (2, 12), (-1,)),
    (aten.unsqueeze.default, (2, 12), (1,)),
    (aten.squeeze.dim, (2, 1, 12), (-2,)),
    (aten.squeeze.dim, (2, 1, 12), (0,)),
    (aten.squeeze.dims, (1, 6, 1, 2), ([0, -2, 1],)),
    (aten.squeeze.default, (1, 6, 1, 3), ()),
    (aten.expand.default, (12, 1), ([2, -1, 5],)),
    (aten.expand.default, (1, 12), ([3, 12],)),
    (aten.expand_as.default, (1, 12), (torch.randn(3, 12, dtype=torch.float64),)),
    (aten.repeat.default, (12, 3), ([2, 1, 3],)),
    (aten.repeat.default, (12, 3), ([2, 1],)),
    (aten.tile.default, (2, 12), ([3],)),
    (aten.repeat_interleave.self_int, (2, 12), (3, -1)),
    (aten.repeat_interleave.self_int, (2, 12), (2, 0)),
    (aten.repeat_interleave.self_int, (12,), (2,)),
    (aten.view_as_complex.default, (12, 3, 2), ()),
]
RESHAPES: list[tuple[Any, Sequence[int], tuple[Any, ...]]] = [  # refused where a cut does not align
    (aten.view.default, (2, 12, 6), ([24, -1],)),
    (aten.view.default, (24, 6), ([2, 12, 2, 3],)),
    (aten._unsafe_view.default, (2, 12, 6), ([2, 12, 3, 2],)),
    (aten.reshape.default, (4, 12), ([2, 2, 3, -1],)),
    (aten.reshape.default, (2, 4, 4, 3), ([2, 16, 3],)),
    (aten.flatten.using_ints, (2, 4, 6), (1,)),
    (aten.flatten.using_ints, (2, 4, 6), (-3, -2)),
    (aten.unflatten.int, (2, 24), (1, [4, -1])),
    (aten.unflatten.int, (24, 2), (0, [-1, 2, 3])),
    (aten.ravel.default, (2, 12), ()),
    (aten.view_as.default, (2, 12), (torch.randn(24, dtype=torch.float64),)),
    (aten.reshape_as.default, (24,), (torch.randn(4, 6, dtype=torch.float64),)),
]


def test_every_rule_has_a_case() -> None:
    assert set(views.RULES) == {target for target, *_ in (*FREE, *RESHAPES)} | {aten.view_as_real.default}


def tensor(shape: Sequence[int], dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype)


@pytest.mark.parametrize("case", FREE, ids=lambda case: f"{case[0]}-{case[1]}")
@given(data=st.data())
@few(20)
def test_views_that_no_layout_stops(case: tuple[Any, Sequence[int], tuple[Any, ...]], data: st.DataObject) -> None:
    target, shape, rest = case
    mesh = data.draw(meshes())
    layouts = [data.draw(layouts_of(shape, mesh, partial=True))]
    layouts += [data.draw(layouts_of(x.shape, mesh)) for x in rest if isinstance(x, torch.Tensor)]
    answer = check(target, (tensor(shape), *rest), layouts, mesh, free=target is not aten.view_as_complex.default)
    assert answer.results[0].partial == layouts[0].partial


@given(data=st.data())
@few(20)
def test_view_as_real(data: st.DataObject) -> None:
    mesh = data.draw(meshes())
    layout = data.draw(layouts_of((12, 3), mesh, partial=True))
    check(aten.view_as_real.default, (tensor((12, 3), torch.complex128),), [layout], mesh, free=True)


@pytest.mark.parametrize("case", RESHAPES, ids=lambda case: f"{case[0]}-{case[1]}")
@given(data=st.data())
@few(25)
def test_reshapes(case: tuple[Any, Sequence[int], tuple[Any, ...]], data: st.DataObject) -> None:
    target, shape, rest = case
    mesh = data.draw(meshes())
    layouts = [data.draw(layouts_of(shape, mesh, partial=True))]
    layouts += [data.draw(layouts_of(x.shape, mesh)) for x in rest if isinstance(x, torch.Tensor)]
    args = (tensor(shape), *rest)
    if isinstance(ask(target, args, layouts), Refusal):
        assert not could_be(shape, target(*args).shape, layouts[0], mesh), f"{layouts[0]} is refused"
    else:
        check(target, args, layouts, mesh, free=True)


def could_be(shape: Sequence[int], target: Sequence[int], layout: Layout, mesh: Sequence[Axis]) -> bool:
    """Whether a layout of the viewed tensor can exist: what every rank holds is, in order, a grid of indices, and an
    axis decides about the indices of one dimension."""
    numbers = torch.arange(math.prod(shape)).reshape(*shape)
    found: list[tuple[dict[str, int], list[list[int]]]] = []
    for coords in all_coords(mesh):
        held = shard(numbers, layout.reduced(), coords).reshape(-1)
        indices = [torch.unique(index) for index in torch.unravel_index(held, tuple(target))]
        grid = torch.meshgrid(*indices, indexing="ij")
        flat = torch.stack([index * math.prod(target[i + 1 :]) for i, index in enumerate(grid)]).sum(0)
        if not torch.equal(flat.reshape(-1), held):
            return False
        found.append((coords, [index.tolist() for index in indices]))
    for axis in mesh:
        decided = {
            dim
            for (left, mine), (right, theirs) in itertools.product(found, found)
            if {**left, axis.name: 0} == {**right, axis.name: 0}
            for dim in range(len(target))
            if mine[dim] != theirs[dim]
        }
        if len(decided) > 1:
            return False
    return True


ROWS = multiplied(whole(2), sharded(12, [CP3]))
MIXED = Dim.of(Segment(4), sharded(12, [CP3]))


@pytest.mark.parametrize(
    ("shape", "layout", "to", "dims"),
    [
        ((2, 12, 6), one((2, 12, 6), 1, sharded(12, [CP3])), [24, 6], [ROWS, whole(6)]),
        ((24, 6), one((24, 6), 0, ROWS or whole(24)), [2, 12, 6], [whole(2), sharded(12, [CP3]), whole(6)]),
        (
            (2, 13, 6),
            one((2, 13, 6), 1, sharded(13, [CP4])),
            [2, 13, 3, 2],
            [whole(2), sharded(13, [CP4]), whole(3), whole(2)],
        ),
        (
            (2, 13, 6),
            one((2, 13, 6), 1, sharded(13, [CP4])),
            [26, 6],
            [multiplied(whole(2), sharded(13, [CP4])), whole(6)],
        ),
        ((2, 16, 6), one((2, 16, 6), 1, MIXED), [32, 2, 3], [multiplied(whole(2), MIXED), whole(2), whole(3)]),
        ((12, 3, 2), one((12, 3, 2), 0, sharded(12, [CP2])), [12, 6], [sharded(12, [CP2]), whole(6)]),
        ((24,), one((24,), 0, sharded(24, [CP3], 4)), [6, 4], [sharded(6, [CP3]), whole(4)]),
        ((24,), one((24,), 0, sharded(24, [CP3], 4)), [3, 2, 4], [sharded(3, [CP3]), whole(2), whole(4)]),
        ((6, 4), one((6, 4), 0, sharded(6, [CP4])), [24], [sharded(24, [CP4], 4)]),
        ((36,), one((36,), 0, sharded(36, GRID)), [6, 6], [sharded(6, GRID), whole(6)]),
        ((36,), one((36,), 0, sharded(36, GRID)), [2, 18], [sharded(2, GRID[:1]), sharded(18, GRID[1:])]),
    ],
)
def test_reshapes_that_align(shape: Sequence[int], layout: Layout, to: list[int], dims: list[Dim]) -> None:
    mesh = tuple(sorted(layout.axes, key=lambda axis: axis.name))
    answer = check(aten.reshape.default, (tensor(shape), to), [layout], mesh, free=True)
    assert answer.results == (Layout(tuple(dims)),)


@pytest.mark.parametrize("dim", [sharded(24, [CP4]), sharded(24, [CP3]), Dim.of(Segment(6), sharded(18, [CP2], 3))])
def test_reshapes_that_do_not_align(dim: Dim) -> None:
    layout = one((24, 2), 0, dim)
    assert "align" in refused(aten.view.default, (tensor((24, 2)), [2, 12, 2]), [layout])


def test_rows_and_columns_over_two_axes() -> None:
    tp = Axis("tp", 2)
    layout = Layout((sharded(4, [CP2]), sharded(6, [tp])))
    answer = check(aten.view.default, (tensor((4, 6)), [24]), [layout], (CP2, tp), free=True)
    assert answer.results[0].dims == (Dim.of(Product(Segment(4, (CP2,)), sharded(6, [tp]))),)


@pytest.mark.parametrize(
    ("target", "rest"), [(aten.squeeze.dim, (1,)), (aten.squeeze.dims, ([0, 1],)), (aten.squeeze.default, ())]
)
def test_squeeze_keeps_a_share_of_one_element(target: Any, rest: tuple[Any, ...]) -> None:
    layout = one((1, 2, 3), 1, sharded(2, [CP2]))
    answer = check(target, (tensor((1, 2, 3)), *rest), [layout], (CP2,), free=True)
    assert sharded(2, [CP2]) in answer.results[0].dims


def test_expand_repeats_beside_shards() -> None:
    answer = check(
        aten.expand.default, (tensor((1, 12)), [2, 4, -1]), [one((1, 12), 1, sharded(12, [CP3]))], (CP3,), free=True
    )
    assert answer.results == (one((2, 4, 12), 2, sharded(12, [CP3])),)


def test_repeats_that_flatten_are_refused() -> None:
    layout = one((2, 12), 1, sharded(12, [CP3]))
    assert "flatten" in refused(aten.repeat_interleave.self_int, (tensor((2, 12)), 2), [layout])


def test_two_real_numbers_of_one_complex_stay_together() -> None:
    answer = check(aten.view_as_complex.default, (tensor((3, 2)),), [one((3, 2), 1, sharded(2, [CP2]))], (CP2,))
    assert answer.results == (Layout.replicated((3,)),)
