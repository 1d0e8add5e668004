"""Operators of masks that make or join values: aranges, constants, arithmetic, comparisons, logic, choices."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from cpcompile.passes.masks.reader import Arguments, Operator, Reader, sizes, table
from cpcompile.passes.masks.values import (
    Choice,
    Value,
    as_integer,
    calculated,
    chosen,
    compared,
    constant,
    either,
    triangular,
)
from cpcompile.predicates import Affine, Condition
from cpcompile.sizes import as_size


def _arange(reader: Reader, node: fx.Node, arguments: Arguments) -> Value | None:
    if node.meta["val"].dtype not in (torch.int64, torch.int32):
        return None
    start, step = arguments.get("start", 0), arguments.get("step", 1)
    if isinstance(start, fx.Node):
        start = as_size(start.meta["val"])
    return Affine.of(start, [(-1, step)]) if isinstance(step, int) and not isinstance(start, float) else None


def _filled(number: Any) -> Operator:
    def read(reader: Reader, node: fx.Node, arguments: Arguments) -> Value | None:
        return constant(arguments["fill_value"] if number is None else number, node.meta["val"].dtype)

    return read


def _sum(sign: int) -> Operator:
    def read(reader: Reader, node: fx.Node, arguments: Arguments) -> Value | None:
        if arguments.get("alpha", 1) != 1:
            return None
        left = reader.number_or_read(arguments["self"], node)
        right = reader.number_or_read(arguments["other"], node)
        if not node.meta["val"].dtype.is_floating_point:
            one, other = as_integer(left), as_integer(right)
            return None if one is None or other is None else one + other.times(sign)
        return calculated(operator.add if sign == 1 else operator.sub, left, right)

    return read


def _difference_from(reader: Reader, node: fx.Node, arguments: Arguments) -> Value | None:
    return _sum(-1)(reader, node, arguments | {"self": arguments["other"], "other": arguments["self"]})


def _product(reader: Reader, node: fx.Node, arguments: Arguments) -> Value | None:
    left, right = (reader.number_or_read(arguments[name], node) for name in ("self", "other"))
    if isinstance(left, Condition) and isinstance(right, Condition):
        return left & right if node.meta["val"].dtype is torch.bool else None
    if node.meta["val"].dtype.is_floating_point:
        return calculated(operator.mul, left, right)
    one, other = as_integer(left), as_integer(right)
    for a, b in ((one, other), (other, one)):
        if a is not None and b is not None and b.is_constant and isinstance(b.constant, int):
            return a.times(b.constant)
    return None


def _compare(name: str) -> Operator:
    def read(reader: Reader, node: fx.Node, arguments: Arguments) -> Value | None:
        source, other = arguments["self"], arguments["other"]
        if isinstance(other, float) and not source.meta["val"].dtype.is_floating_point:
            return None
        return compared(name, reader.read(source), reader.number_or_read(other, source), node)

    return read


def _logic(join: Callable[[Condition, Condition, fx.Node], Condition]) -> Operator:
    def read(reader: Reader, node: fx.Node, arguments: Arguments) -> Value | None:
        left, right = (reader.read(arguments[name]) for name in ("self", "other"))
        both = isinstance(left, Condition) and isinstance(right, Condition)
        return join(left, right, node) if both else None  # type: ignore[arg-type]

    return read


def _not(reader: Reader, node: fx.Node, arguments: Arguments) -> Value | None:
    value = reader.read(arguments["self"])
    return reader.negation(value, node) if isinstance(value, Condition) else None


def _cast(reader: Reader, node: fx.Node, arguments: Arguments) -> Value | None:
    value, dtype = reader.read(arguments["self"]), node.meta["val"].dtype
    before = arguments["self"].meta["val"].dtype
    if dtype is before:
        return value
    if dtype is torch.bool:
        zero = constant(0, before)
        return compared("ne", value, zero, node)
    if dtype.is_floating_point and isinstance(value, Condition):
        return Choice(value, 1.0, 0.0)
    if (
        dtype.is_floating_point
        and isinstance(value, Choice)
        and all(float(torch.tensor(n, dtype=dtype)) == n for n in (value.yes, value.no))
    ):
        return value
    return as_integer(value) if not dtype.is_floating_point else None


def _where(reader: Reader, node: fx.Node, arguments: Arguments) -> Value | None:
    condition = reader.read(arguments["condition"])
    yes, no = (reader.number_or_read(arguments[name], node) for name in ("self", "other"))
    return chosen(condition, yes, no) if isinstance(condition, Condition) else None


def _masked_fill(reader: Reader, node: fx.Node, arguments: Arguments) -> Value | None:
    mask, value = reader.read(arguments["mask"]), reader.read(arguments["self"])
    fill = reader.number_or_read(arguments["value"], node)
    if not isinstance(mask, Condition):
        return None
    kept = reader.negation(mask, None)
    if kept is None:
        return None
    if isinstance(value, Condition):
        return value & kept if fill == Affine(0) or fill == constant(0, torch.bool) else None
    return chosen(kept, value, fill)


def _triangle(*, lower: bool) -> Operator:
    def read(reader: Reader, node: fx.Node, arguments: Arguments) -> Value | None:
        diagonal = arguments.get("diagonal", 0)
        value = reader.read(arguments["self"])
        return triangular(value, diagonal, node, lower=lower) if isinstance(diagonal, int) else None

    return read


def _diff(reader: Reader, node: fx.Node, arguments: Arguments) -> Value | None:
    """Of numbers in a row, with one in front that continues them."""
    source, before = (as_integer(reader.read(arguments[name])) for name in ("self", "prepend"))
    if source is None or before is None or arguments["n"] != 1 or arguments["append"] is not None:
        return None
    count = len(sizes(node))
    dim = arguments["dim"] % count - count
    step = source.dims.get(dim, 0)
    first = Affine.of(source.constant, ((d, c) for d, c in source.coefficients if d != dim))
    return Affine(step) if first - before == Affine(step) and sizes(arguments["prepend"])[dim] == 1 else None


def _cumsum(reader: Reader, node: fx.Node, arguments: Arguments) -> Value | None:
    value, count = as_integer(reader.read(arguments["self"])), len(sizes(node))
    if value is None or not value.is_constant or not isinstance(value.constant, int):
        return None
    return Affine.of(value.constant, [(arguments["dim"] % count - count, value.constant)])


_COMPARISONS = ("ge", "gt", "le", "lt", "eq", "ne")


def _both(left: Condition, right: Condition, node: fx.Node) -> Condition:
    return left & right


OPERATORS = table(
    [
        ("arange", ("default", "start", "start_step"), _arange),
        *((name, ("default",), _filled(1)) for name in ("ones", "new_ones", "ones_like")),
        *((name, ("default",), _filled(0)) for name in ("zeros", "new_zeros", "zeros_like")),
        *((name, ("default",), _filled(None)) for name in ("full", "new_full", "full_like")),
        ("add", ("Tensor", "Scalar"), _sum(1)),
        ("sub", ("Tensor", "Scalar"), _sum(-1)),
        ("rsub", ("Tensor", "Scalar"), _difference_from),
        ("mul", ("Tensor", "Scalar"), _product),
        *((name, ("Tensor", "Scalar"), _compare(name)) for name in _COMPARISONS),
        *((name, ("Tensor",), _logic(_both)) for name in ("__and__", "bitwise_and")),
        *((name, ("Tensor",), _logic(either)) for name in ("__or__", "bitwise_or")),
        ("logical_and", ("default",), _logic(_both)),
        ("logical_or", ("default",), _logic(either)),
        *((name, ("default",), _not) for name in ("logical_not", "bitwise_not")),
        ("to", ("dtype",), _cast),
        ("_to_copy", ("default",), _cast),
        ("where", ("self", "ScalarSelf", "ScalarOther", "Scalar"), _where),
        ("masked_fill", ("Scalar",), _masked_fill),
        ("tril", ("default",), _triangle(lower=True)),
        ("triu", ("default",), _triangle(lower=False)),
        ("diff", ("default",), _diff),
        ("cumsum", ("default",), _cumsum),
    ]
)
