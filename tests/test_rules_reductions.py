"""Rules of sums, means, and operators along a dimension."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cpcompile.errors import Refusal
from cpcompile.layout import Dim, Layout, Partial, Segment, multiplied, sharded, whole
from cpcompile.passes.rules import reductions
from tests.rule_harness import ask, check, refused
from tests.rule_layouts import CP2, CP3, CP4, GRID, RING, ULYSSES, few, layouts_of, meshes, one

aten = torch.ops.aten

# Operator: its arguments but the operand, and the dimensions that it reduces (of three).
SUMS: list[tuple[Any, tuple[Any, ...], tuple[int, ...]]] = [
    (aten.sum.default, (), (0, 1, 2)),
    (aten.sum.dim_IntList, ([1],), (1,)),
    (aten.sum.dim_IntList, ([0], True), (0,)),
    (aten.sum.dim_IntList, ([-1, 1],), (1, 2)),
    (aten.sum.dim_IntList, ([],), (0, 1, 2)),
    (aten.sum.dim_IntList, (None, True), (0, 1, 2)),
    (aten.mean.default, (), (0, 1, 2)),
    (aten.mean.dim, ([1], True), (1,)),
    (aten.mean.dim, ([-2],), (1,)),
    (aten.mean.dim, ([0, 1],), (0, 1)),
]
# Operator: its arguments but the operand. Each works along dimension 1 (of three).
ALONG: list[tuple[Any, tuple[Any, ...]]] = [
    (aten.softmax.int, (1,)),
    (aten.softmax.int, (-2, torch.float32)),
    (aten._softmax.default, (1, False)),
    (aten.log_softmax.int, (1,)),
    (aten._log_softmax.default, (1, False)),
    (aten.cumsum.default, (1,)),
    (aten.cumprod.default, (1,)),
    (aten.logsumexp.default, ([1], True)),
    (aten.amax.default, ([1],)),
    (aten.amin.default, ([-2], True)),
    (aten.max.dim, (1,)),
    (aten.min.dim, (1, True)),
    (aten.argmax.default, (1,)),
    (aten.argmin.default, (-2, True)),
    (aten.any.dim, (1,)),
    (aten.all.dim, (1, True)),
    (aten.sort.default, (1, True)),
    (aten.topk.default, (3, 1)),
    (aten.flip.default, ([1],)),
    (aten.glu.default, (1,)),
    (aten.var.correction, ([1],)),
    (aten.std.correction, ([1],)),
    (aten.linalg_vector_norm.default, (2, [1], True)),
]
SHAPE = (2, 12, 6)


def tensor(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64).to(dtype)


def test_every_rule_has_a_case() -> None:
    assert set(reductions.RULES) == {case[0] for case in (*SUMS, *ALONG)}


def held_once(layout: Layout, over: tuple[int, ...]) -> bool:
    """Whether, of every reduced dimension, what one rank holds no other along its axes does."""
    for index in over:
        dim = layout.dims[index]
        if dim.is_replicated:
            continue
        assert isinstance(dim.size, int)
        held = torch.zeros(dim.size, dtype=torch.long)
        axes = sorted(dim.axes, key=lambda axis: axis.name)
        places = [{}]  # type: list[dict[str, int]]
        for axis in axes:
            places = [{**place, axis.name: i} for place in places for i in range(axis.size)]
        for place in places:
            held[dim.indices(place)] += 1
        if not bool((held == 1).all()):
            return False
    return True


@pytest.mark.parametrize("case", SUMS, ids=lambda case: f"{case[0]}-{case[1]}")
@given(data=st.data())
@few(50)
def test_sums(case: tuple[Any, tuple[Any, ...], tuple[int, ...]], data: st.DataObject) -> None:
    target, rest, over = case
    mesh = data.draw(meshes())
    layout = data.draw(layouts_of(SHAPE, mesh, partial=True))
    args = (tensor(*SHAPE), *rest)
    if isinstance(ask(target, args, [layout]), Refusal):
        assert not held_once(layout, over)
        return
    answer = check(target, args, [layout], mesh, free=True)
    axes = {axis for index in over for axis in layout.dims[index].axes} | {partial.axis for partial in layout.partial}
    assert {partial.axis for partial in answer.results[0].partial} == axes


@pytest.mark.parametrize("case", ALONG, ids=lambda case: f"{case[0]}-{case[1]}")
@given(data=st.data())
@few(12)
def test_along_a_dimension(case: tuple[Any, tuple[Any, ...]], data: st.DataObject) -> None:
    target, rest = case
    mesh = data.draw(meshes())
    layout = data.draw(layouts_of(SHAPE, mesh, partial=True))
    answer = check(target, (tensor(*SHAPE), *rest), [layout], mesh, free=not layout.partial and not layout.dims[1].axes)
    assert answer.operands["self"] == layout.reduced().with_dim(1, whole(12))


@pytest.mark.parametrize("target", [aten.argmax.default, aten.amax.default])
def test_along_all_dimensions(target: Any) -> None:
    layout = one(SHAPE, 1, sharded(12, [CP3]))
    assert check(target, (tensor(*SHAPE),), [layout], (CP3,)).results == (Layout(()),)


def test_a_sum_of_what_some_ranks_share_is_refused() -> None:
    mixed = Dim.of(Segment(4), sharded(8, [CP2]))
    assert "whole" in refused(aten.sum.dim_IntList, (tensor(*SHAPE), [1]), [one(SHAPE, 1, mixed)])
    rows = multiplied(whole(2), Dim.of(Segment(2), sharded(4, [CP2])))
    assert rows is not None
    assert "whole" in refused(aten.mean.default, (tensor(*SHAPE),), [one(SHAPE, 1, rows)])
    two = Dim.of(sharded(4, [RING]), sharded(8, GRID))
    assert "whole" in refused(aten.sum.dim_IntList, (tensor(*SHAPE), [1]), [one(SHAPE, 1, two)])
    other = check(aten.sum.dim_IntList, (tensor(*SHAPE), [2]), [one(SHAPE, 1, mixed)], (CP2,), free=True)
    assert other.results == (one((2, 12), 1, mixed),)


@pytest.mark.parametrize("size", [13, 14, 5])
def test_a_mean_of_uneven_shares_weighs_every_element_alike(size: int) -> None:
    layout = one((2, size, 3), 1, sharded(size, [CP4]))
    answer = check(aten.mean.dim, (tensor(2, size, 3), [1]), [layout], (CP4,), free=True)
    assert answer.results == (Layout((whole(2), whole(3)), (Partial(CP4),)),)


def test_a_sum_over_shards_of_two_axes() -> None:
    layout = Layout((sharded(6, [RING]), sharded(9, [ULYSSES]), whole(2)))
    args = (tensor(6, 9, 2), [0, 1])
    answer = check(aten.sum.dim_IntList, args, [layout], GRID, free=True)
    assert answer.results == (Layout((whole(2),), (Partial(RING), Partial(ULYSSES))),)
    answer = check(aten.sum.dim_IntList, (tensor(6, 9, 2), [1]), [layout], GRID, free=True)
    assert answer.results == (Layout((sharded(6, [RING]), whole(2)), (Partial(ULYSSES),)),)


def test_counts_are_summed_too() -> None:
    layout = one((12,), 0, sharded(12, [CP3]))
    assert check(aten.sum.default, (torch.arange(12),), [layout], (CP3,)).results[0].partial == (Partial(CP3),)
    assert check(aten.sum.default, (torch.rand(12) > 0.5,), [layout], (CP3,)).results[0].partial == (Partial(CP3),)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("target", [aten.sum.dim_IntList, aten.mean.dim])
def test_narrow_sums_stay_wide_until_they_are_complete(target: Any, dtype: torch.dtype) -> None:
    layout = one((4, 96), 1, sharded(96, [CP4]))
    x = tensor(4, 96, dtype=dtype)
    answer = check(target, (x, [1]), [layout], (CP4,))
    assert answer.target is torch.ops.cpcompile.partial_sum.default
    local = answer.target(x[:, :24], [1], False, [], dtype)
    assert local.dtype == torch.float32
    assert torch.equal(local, x[:, :24].float().sum(1)), "no term is rounded"


def test_a_narrow_pending_sum_is_completed_before_it_is_summed() -> None:
    layout = Layout((whole(2), whole(6)), (Partial(CP3),))
    args = (tensor(2, 6, dtype=torch.bfloat16), [1])
    assert check(aten.sum.dim_IntList, args, [layout], (CP3,)).results[0].partial == ()
    pending = Layout((whole(2), whole(6)), (Partial(CP3, "max"),))
    assert check(aten.sum.dim_IntList, (tensor(2, 6), [1]), [pending], (CP3,)).results[0].partial == ()
