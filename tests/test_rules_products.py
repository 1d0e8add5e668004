"""Rules of products with weights, contractions and normalisation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cpcompile.layout import Dim, Layout, Partial, Segment, sharded, whole
from cpcompile.passes.rules import products
from tests.rule_harness import ask, check, refused
from tests.rule_layouts import CP2, CP3, GRID, RING, ULYSSES, few, layouts_of, meshes, one

aten = torch.ops.aten


def tensor(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64).to(dtype)


Shapes = list[tuple[int, ...]]
# Operator: the shapes of its tensors, and how they are passed together with the rest.
TENSORS: list[tuple[Any, Shapes, Any]] = [
    (aten.matmul.default, [(2, 12, 4), (2, 4, 6)], None),
    (aten.matmul.default, [(2, 3, 6, 4), (3, 4, 12)], None),
    (aten.matmul.default, [(1, 6, 12), (2, 12, 3)], None),
    (aten.matmul.default, [(12,), (12,)], None),
    (aten.matmul.default, [(12,), (2, 12, 3)], None),
    (aten.matmul.default, [(2, 6, 12), (12,)], None),
    (aten.mm.default, [(6, 12), (12, 4)], None),
    (aten.bmm.default, [(2, 6, 12), (2, 12, 6)], None),
    (aten.mv.default, [(6, 12), (12,)], None),
    (aten.dot.default, [(12,), (12,)], None),
    (aten.outer.default, [(12,), (6,)], None),
    (aten.addmm.default, [(6,), (12, 4), (4, 6)], None),
    (aten.addmm.default, [(12, 1), (12, 6), (6, 4)], None),
    (aten.einsum.default, [(2, 12, 3), (2, 6, 3)], "bqd,bkd->bqk"),
    (aten.einsum.default, [(6, 12), (12, 4)], "ij, jk"),
    (aten.einsum.default, [(12, 6)], "nc->c"),
    (aten.einsum.default, [(2, 6), (6, 4), (4, 12)], "ab,bc,cd->da"),
]
WEIGHTS: list[tuple[Any, Shapes, tuple[Any, ...]]] = [
    (aten.linear.default, [(2, 12, 6), (4, 6), (4,)], ()),
    (aten.linear.default, [(12, 6), (4, 6)], ()),
    (aten.linear.default, [(12, 6), (6,)], ()),
    (aten.layer_norm.default, [(2, 12, 6)], ([6],)),
    (aten.layer_norm.default, [(2, 12, 6), (12, 6), (12, 6)], ([12, 6],)),
    (aten.rms_norm.default, [(2, 12, 6)], ([6],)),
    (aten.rms_norm.default, [(2, 12, 6), (6,)], ([6],)),
]


def test_every_rule_has_a_case() -> None:
    assert set(products.RULES) == {case[0] for case in (*TENSORS, *WEIGHTS)}


@pytest.mark.parametrize("case", TENSORS, ids=lambda case: f"{case[0]}-{case[1]}")
@given(data=st.data())
@few(40)
def test_contractions(case: tuple[Any, Shapes, Any], data: st.DataObject) -> None:
    target, shapes, equation = case
    mesh = data.draw(meshes())
    found: list[Layout] = []
    for shape in shapes:
        kept = data.draw(st.sampled_from([True, False, False]))
        mine = layouts_of(shape, mesh, partial=True)
        found.append(Layout.replicated(shape) if kept else data.draw(mine))
    args = [tensor(*shape) for shape in shapes]
    check(target, [equation, args] if equation else args, found, mesh)


@pytest.mark.parametrize("case", WEIGHTS, ids=lambda case: f"{case[0]}-{case[1]}")
@given(data=st.data())
@few(25)
def test_products_with_weights(case: tuple[Any, Shapes, tuple[Any, ...]], data: st.DataObject) -> None:
    target, shapes, rest = case
    mesh = data.draw(meshes())
    layout = data.draw(layouts_of(shapes[0], mesh, partial=True))
    given_layouts = [layout, *(Layout.replicated(shape) for shape in shapes[1:])]
    tensors = [tensor(*shape) for shape in shapes]
    features = layout.dims[len(shapes[0]) - len(rest[0]) :] if rest else layout.dims[-1:]
    free = not layout.partial and not any(dim.axes for dim in features)
    check(target, (tensors[0], *rest, *tensors[1:]), given_layouts, mesh, free=free)


SUM = (Partial(CP3),)
TOKENS = sharded(12, [CP3])


def layouts(*dims: Sequence[Dim | int]) -> list[Layout]:
    return [Layout(tuple(whole(dim) if isinstance(dim, int) else dim for dim in each)) for each in dims]


@pytest.mark.parametrize(
    ("given", "result"),
    [
        (layouts((2, 6, TOKENS), (2, TOKENS, 4)), Layout((whole(2), whole(6), whole(4)), SUM)),
        (layouts((2, 6, 12), (2, TOKENS, 4)), Layout((whole(2), whole(6), whole(4)), SUM)),
        (layouts((2, 6, TOKENS), (2, 12, 4)), Layout((whole(2), whole(6), whole(4)), SUM)),
        (layouts((sharded(3, [CP3]), 6, 12), (3, 12, 4)), Layout((sharded(3, [CP3]), whole(6), whole(4)))),
        (layouts((2, TOKENS, 6), (2, 6, 4)), Layout((whole(2), TOKENS, whole(4)))),
        (layouts((2, 4, 6), (2, 6, TOKENS)), Layout((whole(2), whole(4), TOKENS))),
    ],
)
def test_what_shards_give(given: list[Layout], result: Layout) -> None:
    args = [tensor(*map(int, layout.shape)) for layout in given]
    for target in (aten.bmm.default, aten.matmul.default):
        assert check(target, args, given, (CP3,), free=True).results == (result,)


def test_an_axis_in_rows_and_columns_stays_with_the_larger() -> None:
    given = layouts((TOKENS, 2), (2, sharded(6, [CP3])))
    answer = check(aten.mm.default, (tensor(12, 2), tensor(2, 6)), given, (CP3,))
    assert answer.results == (Layout((TOKENS, whole(6))),)
    answer = check(aten.outer.default, (tensor(6), tensor(12)), layouts((sharded(6, [CP3]),), (TOKENS,)), (CP3,))
    assert answer.results == (Layout((whole(6), TOKENS)),)


def test_rows_and_sums_over_two_axes() -> None:
    given = layouts((sharded(6, [RING]), sharded(12, [ULYSSES])), (sharded(12, [ULYSSES]), 4))
    answer = check(aten.mm.default, (tensor(6, 12), tensor(12, 4)), given, GRID, free=True)
    assert answer.results == (Layout((sharded(6, [RING]), whole(4)), (Partial(ULYSSES),)),)


def test_a_part_that_all_ranks_hold_is_not_summed_twice() -> None:
    mixed = Dim.of(Segment(4), sharded(8, [CP2]))
    answer = check(aten.mm.default, (tensor(6, 12), tensor(12, 4)), layouts((6, mixed), (mixed, 4)), (CP2,))
    assert answer.results == (Layout.replicated((6, 4)),)
    rows = check(aten.mm.default, (tensor(12, 6), tensor(6, 4)), layouts((mixed, 6), (6, 4)), (CP2,), free=True)
    assert rows.results == (one((12, 4), 0, mixed),)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_products_are_summed_whole(dtype: torch.dtype) -> None:
    args = (tensor(6, 12, dtype=dtype), tensor(12, 4, dtype=dtype))
    answer = check(aten.mm.default, args, layouts((6, TOKENS), (TOKENS, 4)), (CP3,))
    assert answer.results == (Layout.replicated((6, 4)),)
    pending = Layout((whole(6), whole(12)), SUM)
    assert check(aten.linear.default, (*args[:1], tensor(4, 12, dtype=dtype)), [pending, layouts((4, 12))[0]], (CP3,))
    assert check(aten.mm.default, args, [pending, layouts((12, 4))[0]], (CP3,)).results[0].partial == ()


def test_pending_sums_pass_linear_products() -> None:
    x, w, b = tensor(2, 6), tensor(4, 6), tensor(4)
    pending, rest = Layout((whole(2), whole(6)), SUM), layouts((4, 6), (4,))
    assert check(aten.linear.default, (x, w), [pending, rest[0]], (CP3,), free=True).results[0].partial == SUM
    assert check(aten.linear.default, (x, w, b), [pending, *rest], (CP3,)).results[0].partial == ()
    for target, args, held in [
        (aten.mm.default, (x, tensor(6, 4)), [pending, layouts((6, 4))[0]]),
        (aten.outer.default, (tensor(6), tensor(2)), [Layout((whole(6),), SUM), layouts((2,))[0]]),
    ]:
        assert check(target, args, held, (CP3,), free=True).results[0].partial == SUM
    assert (
        check(aten.mm.default, (x, tensor(6, 2)), [pending, Layout((whole(6), whole(2)), SUM)], (CP3,))
        .results[0]
        .partial
        == ()
    )
    sharded_rows = one((6, 12), 1, TOKENS)
    assert check(aten.mm.default, (x, tensor(6, 12)), [pending, sharded_rows], (CP3,)).results == (
        one((2, 12), 1, TOKENS),
    )


def test_features_of_a_norm_are_gathered_alone() -> None:
    layout = Layout((sharded(12, [RING]), sharded(6, [ULYSSES])))
    for target in (aten.layer_norm.default, aten.rms_norm.default):
        answer = check(target, (tensor(12, 6), [6]), [layout], GRID)
        assert answer.results == (one((12, 6), 0, sharded(12, [RING])),)
    answer = check(aten.linear.default, (tensor(12, 6), tensor(4, 6)), [layout, Layout.replicated((4, 6))], GRID)
    assert answer.results == (one((12, 4), 0, sharded(12, [RING])),)


def test_a_diagonal_or_an_ellipsis_is_refused() -> None:
    args = [tensor(12, 12)]
    for equation in ("ii->i", "...i->...i"):
        assert "equation" in refused(aten.einsum.default, (equation, args), [one((12, 12), 0, TOKENS)])
    assert ask(aten.einsum.default, ("ij->ji", args), [one((12, 12), 0, TOKENS)])
