"""Arithmetic on sizes that are ints or symbolic expressions.

A size is never turned into a number here: where a fact about symbols cannot be proven, the answer is None.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import sympy
import torch
from torch.utils._sympy.functions import FloorDiv

Size: TypeAlias = "int | sympy.Expr"


def as_size(value: int | torch.SymInt | sympy.Expr) -> Size:
    """The size behind a shape entry: an int stays one, a SymInt becomes its expression."""
    if isinstance(value, torch.SymInt):
        return _tidy(value.node.expr)
    if isinstance(value, sympy.Expr):
        return _tidy(value)
    return value


def _tidy(expr: sympy.Expr) -> Size:
    expanded = sympy.expand(expr)
    return expanded.p if isinstance(expanded, sympy.Integer) else expanded


def add(left: Size, right: Size) -> Size:
    """Sum of two sizes."""
    if isinstance(left, int) and isinstance(right, int):
        return left + right
    return _tidy(sympy.sympify(left) + right)


def total(sizes: Iterable[Size]) -> Size:
    """Sum of any number of sizes."""
    result: Size = 0
    for size in sizes:
        result = add(result, size)
    return result


def subtract(left: Size, right: Size) -> Size:
    """Difference of two sizes."""
    if isinstance(left, int) and isinstance(right, int):
        return left - right
    return _tidy(sympy.sympify(left) - right)


def multiply(left: Size, right: Size) -> Size:
    """Product of two sizes."""
    if isinstance(left, int) and isinstance(right, int):
        return left * right
    return _tidy(sympy.sympify(left) * right)


def product(sizes: Iterable[Size]) -> Size:
    """Product of any number of sizes."""
    result: Size = 1
    for size in sizes:
        result = multiply(result, size)
    return result


def divide(numerator: Size, denominator: Size) -> Size | None:
    """The exact quotient, or None where it is not provably a whole number."""
    if isinstance(numerator, int) and isinstance(denominator, int):
        if denominator == 0 or numerator % denominator:
            return None
        return numerator // denominator
    if denominator == 1:
        return numerator
    quotient = sympy.cancel(sympy.sympify(numerator) / denominator)
    return _tidy(quotient) if quotient.is_integer else None


def ceil_div(numerator: Size, count: int) -> Size:
    """Numerator divided by count, rounded up."""
    return floor_div(add(numerator, count - 1), count)


def floor_div(numerator: Size, count: int) -> Size:
    """Numerator divided by count, rounded down."""
    if isinstance(numerator, int):
        return numerator // count
    return _tidy(FloorDiv(numerator, sympy.Integer(count)))


def at_most(left: Size, right: Size) -> bool | None:
    """Whether left <= right; None where it depends on the symbols' values."""
    if isinstance(left, int) and isinstance(right, int):
        return left <= right
    difference = sympy.expand(sympy.sympify(right) - left)
    if difference.is_nonnegative:
        return True
    return False if difference.is_negative else None


def part_size(units: Size, count: int, index: int) -> Size:
    """Units in part ``index`` of ``count``: sizes differ by at most one, the larger ones first."""
    if not isinstance(units, int) and (even := divide(units, count)) is not None:
        return even
    return floor_div(add(units, count - 1 - index), count)


def part_offset(units: Size, count: int, index: int) -> Size:
    """Units before part ``index`` of ``count``."""
    if isinstance(units, int):
        quotient, rest = divmod(units, count)
        return index * quotient + min(index, rest)
    return total(part_size(units, count, before) for before in range(index))


def cuts(size: int, counts: Sequence[int], granule: int) -> list[int]:
    """The first index of every part, and the end, when ``size`` is cut in ``counts[0]``, each of these in ..."""
    starts, sizes = [0], [size // granule]
    for count in counts:
        starts = [
            start + index * (units // count) + min(index, units % count)
            for start, units in zip(starts, sizes, strict=True)
            for index in range(count)
        ]
        sizes = [(units + count - 1 - index) // count for units in sizes for index in range(count)]
    return [*(start * granule for start in starts), size]


@functools.lru_cache(maxsize=4096)
def finest_granule(size: int, counts: tuple[int, ...], granule: int) -> int:
    """The smallest granule that makes the same cuts."""
    wanted = cuts(size, counts, granule)
    return next(g for g in divisors(granule) if cuts(size, counts, g) == wanted)


@functools.lru_cache(maxsize=4096)
def coarsest_granule(size: int, counts: tuple[int, ...], granule: int) -> int:
    """The largest granule that makes the same cuts."""
    wanted = cuts(size, counts, granule)
    return next(g for g in reversed(divisors(math.gcd(*wanted))) if cuts(size, counts, g) == wanted)


def divisors(number: int) -> list[int]:
    """The divisors of a positive number, in ascending order."""
    low = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return [*low, *(number // d for d in reversed(low) if d * d != number)]
