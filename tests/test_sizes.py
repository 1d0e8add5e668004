"""Arithmetic on sizes: numbers exactly, symbols without asking for their values."""

from __future__ import annotations

import math
from typing import Any

import pytest
import sympy
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._sympy.functions import FloorDiv

from cpcompile.sizes import (
    Size,
    add,
    as_size,
    at_most,
    ceil_div,
    coarsest_granule,
    cuts,
    divide,
    divisors,
    finest_granule,
    floor_div,
    multiply,
    part_offset,
    part_size,
    product,
    subtract,
    total,
)
from tests.strategies import layouts_profile

S = sympy.Symbol("s", integer=True, positive=True)
T = sympy.Symbol("t", integer=True, positive=True)

SIZES: list[Size] = [0, 1, 7, S, 2 * S, S + 3, S + T, 3 * S * T, FloorDiv(S + 2, 3)]


def at(size: Size, **values: int) -> int:
    """The size where the symbols have these values."""
    return size if isinstance(size, int) else int(size.subs({S: values["s"], T: values["t"]}))


@layouts_profile
@given(st.integers(0, 200), st.integers(1, 8))
def test_parts_add_up_and_differ_by_at_most_one(units: int, count: int) -> None:
    sizes = [part_size(units, count, index) for index in range(count)]
    assert sizes == [(units + count - 1 - index) // count for index in range(count)]
    assert sum(sizes) == units
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
    assert [part_offset(units, count, index) for index in range(count)] == [sum(sizes[:i]) for i in range(count)]


@pytest.mark.parametrize("size", SIZES[3:], ids=str)
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_symbolic_parts_are_the_numeric_ones(size: Size, count: int) -> None:
    for s in range(1, 9):
        for t in (1, 5):
            for index in range(count):
                units = at(size, s=s, t=t)
                assert at(part_size(size, count, index), s=s, t=t) == part_size(units, count, index)
                assert at(part_offset(size, count, index), s=s, t=t) == part_offset(units, count, index)


def test_a_known_multiple_is_divided_without_a_floor() -> None:
    assert part_size(6 * S, 3, 2) == 2 * S
    assert part_offset(6 * S, 3, 2) == 4 * S


@pytest.mark.parametrize("left", SIZES, ids=str)
@pytest.mark.parametrize("right", SIZES, ids=str)
def test_symbolic_arithmetic_is_the_numeric_one(left: Size, right: Size) -> None:
    for s, t in ((1, 1), (2, 5), (7, 3), (12, 4)):
        a, b = at(left, s=s, t=t), at(right, s=s, t=t)
        assert at(add(left, right), s=s, t=t) == a + b
        assert at(subtract(left, right), s=s, t=t) == a - b
        assert at(multiply(left, right), s=s, t=t) == a * b
        assert at(total([left, right, 1]), s=s, t=t) == a + b + 1
        assert at(product([left, right, 2]), s=s, t=t) == a * b * 2
        assert at(floor_div(left, 3), s=s, t=t) == a // 3
        assert at(ceil_div(left, 3), s=s, t=t) == -(-a // 3)
        quotient = divide(left, right)
        assert quotient is None or at(quotient, s=s, t=t) * b == a
        known = at_most(left, right)
        assert known is None or known == (a <= b)


def test_only_what_holds_for_all_values_is_answered() -> None:
    assert divide(3 * S * T, T) == 3 * S
    assert divide(4 * S, 2) == 2 * S
    assert divide(S, 2) is None
    assert divide(6, S) is None
    assert divide(7, 2) is None
    assert divide(7, 0) is None
    assert at_most(1, S) is True
    assert at_most(S + T, S) is False
    assert at_most(S, T) is None
    assert at_most(2, S) is None
    assert at_most(FloorDiv(S + 2, 3), S) in (True, None)


def test_constants_come_back_as_ints() -> None:
    for size in (subtract(S + 3, S), divide(4 * S, S), add(S, 2 - S), multiply(S, 0), as_size(sympy.Integer(5))):
        assert type(size) is int


def test_a_dynamic_shape_becomes_its_expression() -> None:
    env = ShapeEnv()
    kinds = [DimDynamic.DYNAMIC, DimDynamic.STATIC]
    context: StatelessSymbolicContext[..., Any] = StatelessSymbolicContext(dynamic_sizes=kinds)
    x = FakeTensorMode(shape_env=env).from_tensor(torch.empty(12, 4), symbolic_context=context)
    batch, width = x.shape
    size = as_size(batch * 2 + 1)
    assert isinstance(size, sympy.Expr)
    (symbol,) = size.free_symbols
    assert size == 2 * symbol + 1
    assert as_size(width) == 4
    assert at_most(1, size) is True
    assert divide(size, 2) is None
    assert not env.guards, "asking for a fact about a size must not fix its value"


@layouts_profile
@given(st.integers(1, 12), st.sampled_from([(2,), (3,), (2, 2), (3, 2), (2, 4)]), st.sampled_from([1, 2, 3, 4, 6]))
def test_granules_make_the_same_cuts(units: int, counts: tuple[int, ...], granule: int) -> None:
    size = units * granule
    wanted = cuts(size, counts, granule)
    assert len(wanted) == math.prod(counts) + 1
    assert wanted == sorted(wanted)
    same = [g for g in range(1, size + 1) if size % g == 0 and cuts(size, counts, g) == wanted]
    assert finest_granule(size, counts, granule) == min(same)
    assert coarsest_granule(size, counts, granule) == max(same)


@given(st.integers(1, 400))
@layouts_profile
def test_divisors(value: int) -> None:
    assert divisors(value) == [d for d in range(1, value + 1) if value % d == 0]
