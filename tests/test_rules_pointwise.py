"""Rules of pointwise operators, copies and factories like a tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cpcompile.layout import Dim, Layout, Partial, Segment, sharded, whole
from cpcompile.passes.rules import pointwise, rule_for
from cpcompile.reshape import is_slice_of
from tests.rule_harness import check, refused
from tests.rule_layouts import CP2, CP3, GRID, RING, ULYSSES, few, layouts_of, meshes, one

aten = torch.ops.aten

SHAPES = [(2, 12, 3), (12, 3), (12,), (2, 7, 1), (1, 24, 2)]


def real(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def positive(*shape: int) -> torch.Tensor:
    return real(*shape).abs() + 0.5


def number(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.complex128)


def flags(*shape: int) -> torch.Tensor:
    return torch.rand(shape) < 0.5


def counts(*shape: int) -> torch.Tensor:
    return torch.randint(1, 9, shape)


Make = Callable[..., torch.Tensor]

# Operator: how its tensors are made (they broadcast), then its other arguments.
UNARY: dict[Any, tuple[Make, tuple[Any, ...]]] = {
    aten.neg.default: (real, ()),
    aten.negative.default: (real, ()),
    aten.absolute.default: (real, ()),
    aten.silu.default: (real, ()),
    aten.gelu.default: (real, ()),
    aten.hardswish.default: (real, ()),
    aten.log_sigmoid.default: (real, ()),
    aten.tanh.default: (real, ()),
    aten.sigmoid.default: (real, ()),
    aten.rsqrt.default: (positive, ()),
    aten.reciprocal.default: (positive, ()),
    aten.pow.Tensor_Scalar: (positive, (2.5,)),
    aten.add.Scalar: (real, (1.5, 2)),
    aten.mul.Scalar: (real, (1.5,)),
    aten.div.Scalar: (real, (1.5,)),
    aten.rsub.Scalar: (real, (1.5,)),
    aten.floor_divide.Scalar: (counts, (2,)),
    aten.clamp.default: (real, (-0.5, 0.5)),
    aten.ge.Scalar: (real, (0.0,)),
    aten.bitwise_not.default: (flags, ()),
    aten.fill.Scalar: (real, (2.0,)),
    aten.to.dtype: (real, (torch.float32,)),
    aten.to.dtype_layout: (real, ()),
    aten.to.device: (real, ("cpu", torch.float64)),
    aten._to_copy.default: (real, ()),
    aten.clone.default: (real, ()),
    aten.contiguous.default: (real, ()),
    aten.alias.default: (real, ()),
    aten.detach.default: (real, ()),
    aten.lift_fresh_copy.default: (real, ()),
    aten.dropout.default: (real, (0.5, False)),
    aten.conj.default: (number, ()),
    aten.resolve_conj.default: (number, ()),
    aten.resolve_neg.default: (real, ()),
    aten.real.default: (number, ()),
    aten.imag.default: (number, ()),
    aten.zeros_like.default: (real, ()),
    aten.ones_like.default: (real, ()),
    aten.full_like.default: (real, (2.5,)),
    aten.empty_like.default: (real, ()),
    aten.new_zeros.default: (real, ([3, 12],)),
    aten.new_ones.default: (real, ([3, 12],)),
    aten.new_full.default: (real, ([3, 12], 2.5)),
    aten.new_empty.default: (real, ([3, 12],)),
}

BINARY: dict[Any, tuple[Make, Make]] = {
    aten.add.Tensor: (real, real),
    aten.sub.Tensor: (real, real),
    aten.subtract.Tensor: (real, real),
    aten.rsub.Tensor: (real, real),
    aten.mul.Tensor: (number, number),
    aten.multiply.Tensor: (real, real),
    aten.div.Tensor: (real, positive),
    aten.divide.Tensor: (real, positive),
    aten.floor_divide.default: (counts, counts),
    aten.pow.Tensor_Tensor: (positive, real),
    aten.maximum.default: (real, real),
    aten.le.Tensor: (real, real),
    aten.eq.Tensor: (counts, counts),
    aten.__and__.Tensor: (flags, flags),
    aten.__or__.Tensor: (flags, flags),
    aten.__xor__.Tensor: (flags, flags),
    aten.complex.default: (real, real),
    aten.polar.default: (positive, real),
}
WHERE: dict[Any, tuple[Any, ...]] = {
    aten.where.self: (flags, real, real),
    aten.where.ScalarOther: (flags, real, 0.5),
    aten.where.ScalarSelf: (flags, 0.5, real),
    aten.where.Scalar: (flags, 0.5, 1.5),
    aten.addcmul.default: (real, real, real),
    aten.lerp.Tensor: (real, real, real),
    aten.masked_fill.Scalar: (real, flags, -1.0),
    aten.pow.Scalar: (2.0, real),
}
TO_THE_FIRST = {  # the first operand has the result's shape, the second broadcasts to it
    aten.copy.default: (counts, counts),
    aten.masked_fill.Tensor: (real, flags, lambda *_: real()),
    aten.fill.Tensor: (real, lambda *_: real()),
    aten.type_as.default: (real, lambda *shape: real(*shape).float()),
}
NO_VALUES = (aten.empty_like.default, aten.new_empty.default)


def test_every_rule_has_a_case() -> None:
    assert set(pointwise.RULES) <= {*UNARY, *BINARY, *WHERE, *TO_THE_FIRST}


@st.composite
def broadcast_shape(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[int, ...]:
    dropped = draw(st.integers(0, len(shape)))
    return tuple(1 if draw(st.booleans()) and draw(st.booleans()) else size for size in shape[dropped:])


def is_free(layouts: list[Layout]) -> bool:
    """Whether at most one operand is not whole: all others can be sliced to fit."""
    return sum(not layout.is_replicated for layout in layouts) <= 1


@pytest.mark.parametrize("target", UNARY, ids=str)
@given(data=st.data())
@few(8)
def test_one_operand(target: Any, data: st.DataObject) -> None:
    make, rest = UNARY[target]
    shape, mesh = data.draw(st.sampled_from(SHAPES)), data.draw(meshes())
    layout = data.draw(layouts_of(shape, mesh, partial=make in (real, positive)))
    check(target, (make(*shape), *rest), [layout], mesh, values=target not in NO_VALUES, free=not layout.partial)


@pytest.mark.parametrize("target", [*BINARY, *WHERE, *TO_THE_FIRST], ids=str)
@given(data=st.data())
@few(14)
def test_operands_that_broadcast(target: Any, data: st.DataObject) -> None:
    makes: tuple[Any, ...] = BINARY.get(target) or WHERE.get(target) or TO_THE_FIRST[target]
    shape, mesh = data.draw(st.sampled_from(SHAPES)), data.draw(meshes())
    args: list[Any] = []
    layouts: list[Layout] = []
    for index, make in enumerate(makes):
        if not callable(make):
            args.append(make)
            continue
        full = index == 0 and target in TO_THE_FIRST
        args.append(make(*(shape if full else data.draw(broadcast_shape(shape)))))
        whole_one = data.draw(st.sampled_from([True, False, False]))
        mine = layouts_of(args[-1].shape, mesh, partial=make in (real, positive))
        layouts.append(Layout.replicated(args[-1].shape) if whole_one else data.draw(mine))
    check(target, args, layouts, mesh, free=is_free(layouts) and not any(layout.partial for layout in layouts))


def test_a_replicated_operand_is_sliced() -> None:
    dim = Dim.of(Segment(4), sharded(9, [CP3]))
    answer = check(
        aten.add.Tensor, (real(2, 13), real(13)), [one((2, 13), 1, dim), Layout.replicated((13,))], (CP3,), free=True
    )
    assert answer.results == (one((2, 13), 1, dim),)
    answer = check(
        aten.mul.Tensor,
        (real(2, 13), real(2, 1)),
        [Layout.replicated((2, 13)), one((2, 1), 0, sharded(2, [CP2]))],
        (CP2,),
        free=True,
    )
    assert answer.results == (one((2, 13), 0, sharded(2, [CP2])),)


def test_whole_segments_of_both_are_sliced() -> None:
    left = one((20,), 0, Dim.of(Segment(8), sharded(12, [CP2])))
    right = one((20,), 0, Dim.of(sharded(8, [CP2]), Segment(12)))
    answer = check(aten.mul.Tensor, (real(20), real(20)), [left, right], (CP2,), free=True)
    assert answer.results[0].dims == (Dim.of(sharded(8, [CP2]), sharded(12, [CP2])),)


def test_an_axis_divides_one_dimension() -> None:
    rows, columns = one((8, 1), 0, sharded(8, [CP2])), one((1, 9), 1, sharded(9, [CP2]))
    answer = check(aten.add.Tensor, (real(8, 1), real(1, 9)), [rows, columns], (CP2,))
    assert answer.results == (one((8, 9), 1, sharded(9, [CP2])),), "the larger one stays"


def test_the_larger_of_two_that_do_not_fit_stays() -> None:
    small, large = one((12,), 0, sharded(12, [CP2], 3)), one((4, 12), 1, sharded(12, [CP2], 4))
    answer = check(aten.add.Tensor, (real(12), real(4, 12)), [small, large], (CP2,))
    assert answer.results == (large,)
    assert answer.operands["other"] == large


def test_an_axis_more_is_a_slice() -> None:
    coarse, fine = one((12,), 0, sharded(12, [RING])), one((12,), 0, sharded(12, GRID))
    answer = check(aten.add.Tensor, (real(12), real(12)), [coarse, fine], GRID, free=True)
    assert answer.results == (fine,)


SUM = (Partial(CP3),)
PENDING, WHOLE, SHARDED = Layout((whole(6),), SUM), Layout.replicated((6,)), one((6,), 0, sharded(6, [CP3]))


@pytest.mark.parametrize(
    ("target", "layouts", "stays"),
    [
        (aten.add.Tensor, [PENDING, PENDING], True),
        (aten.sub.Tensor, [PENDING, PENDING], True),
        (aten.add.Tensor, [PENDING, WHOLE], False),
        (aten.add.Tensor, [PENDING, SHARDED], False),
        (aten.mul.Tensor, [PENDING, WHOLE], True),
        (aten.mul.Tensor, [WHOLE, PENDING], True),
        (aten.mul.Tensor, [PENDING, PENDING], False),
        (aten.mul.Tensor, [PENDING, SHARDED], False),
        (aten.div.Tensor, [PENDING, WHOLE], True),
        (aten.div.Tensor, [WHOLE, PENDING], False),
        (aten.maximum.default, [PENDING, PENDING], False),
        (aten.neg.default, [PENDING], True),
        (aten.clone.default, [PENDING], True),
        (aten.silu.default, [PENDING], False),
    ],
)
def test_pending_sums(target: Any, layouts: list[Layout], stays: bool) -> None:
    answer = check(target, [positive(6) for _ in layouts], layouts, (CP3,))
    assert answer.results[0].partial == (SUM if stays else ())


def test_a_pending_sum_beside_another_axis() -> None:
    pending = Layout((whole(12), whole(2)), (Partial(ULYSSES),))
    shards = one((12, 2), 0, sharded(12, [RING]))
    answer = check(aten.mul.Tensor, (real(12, 2), real(12, 2)), [pending, shards], GRID)
    assert answer.results[0].partial == (Partial(ULYSSES),)
    assert answer.results[0].dims == shards.dims


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_narrow_sum_is_complete_before_anything_rounds_it(dtype: torch.dtype) -> None:
    x = real(6)
    assert check(aten.to.dtype, (x, torch.float32), [PENDING], (CP3,)).results[0].partial == ()
    assert check(aten.to.dtype, (x.float(), torch.float64), [PENDING], (CP3,)).results[0].partial == SUM
    assert check(aten.to.dtype, (x, dtype), [PENDING], (CP3,)).results[0].partial == ()
    narrow = x.to(dtype)
    assert check(aten.mul.Scalar, (narrow, 2.0), [PENDING], (CP3,)).results[0].partial == ()
    like = check(aten.zeros_like.default, (narrow,), [PENDING], (CP3,))
    assert like.arguments["dtype"] == dtype, "what a rank holds of the sum is wider than the sum"
    assert check(aten.type_as.default, (x, narrow), [WHOLE, PENDING], (CP3,)).arguments == {"dtype": dtype}


def test_a_pending_maximum_is_completed() -> None:
    pending = Layout((whole(6),), (Partial(CP3, "max"),))
    assert check(aten.mul.Scalar, (real(6), -1.0), [pending], (CP3,)).results[0].partial == ()


def test_random_draws_are_refused() -> None:
    assert "random" in refused(aten.dropout.default, (real(6), 0.5, True), [SHARDED])
    assert rule_for(aten.native_dropout.default) is None


def test_sharding_never_moves_what_is_already_there() -> None:
    for layout in (SHARDED, one((6,), 0, Dim.of(Segment(2), sharded(4, [CP3])))):
        answer = check(aten.add.Tensor, (real(6), real(6)), [layout, WHOLE], (CP3,))
        assert all(is_slice_of(layout.dims[0], answer.operands[name].dims[0]) for name in answer.operands)
