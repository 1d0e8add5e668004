"""What a value in a mask can be read as, and how comparisons, logic and arithmetic act on that.

An ``Affine`` is an integer made of indices, a ``Condition`` a boolean, a ``Choice`` one of two numbers. What is none of
these is not read (None); a boolean then is a condition of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import fx

from cpcompile.predicates import ALWAYS, NEVER, Affine, Atom, Condition

aten = torch.ops.aten


@dataclass(frozen=True)
class Source:
    """A boolean in the graph: a node, and the dimensions of size one to give it, one after the other."""

    node: fx.Node
    unsqueezed: tuple[int, ...] = ()


@dataclass(frozen=True)
class Choice:
    """``yes`` where ``condition`` holds, else ``no``."""

    condition: Condition
    yes: float
    no: float


Value: TypeAlias = "Affine | Condition | Choice"


def opaque(node: fx.Node) -> Condition:
    """A boolean of which nothing is known before the program runs."""
    return Condition((Atom(Source(node)),))


def constant(number: Any, dtype: torch.dtype) -> Value | None:
    """A number, as a tensor of ``dtype`` has it."""
    if dtype is torch.bool:
        return ALWAYS if number else NEVER
    if isinstance(number, (bool, int)) and not dtype.is_floating_point:
        return Affine(int(number))
    return Choice(ALWAYS, float(number), float(number)) if isinstance(number, (bool, int, float)) else None


def as_integer(value: Value | None) -> Affine | None:
    """A value in integer arithmetic."""
    if isinstance(value, Condition):
        return Affine(0) if value.never else Affine(1) if not value.atoms else None
    return value if isinstance(value, Affine) else None


def at_least_zero(limit: Affine, node: fx.Node) -> Condition:
    """``limit >= 0``, which ``node`` says."""
    if limit.is_constant and isinstance(limit.constant, int):
        return ALWAYS if limit.constant >= 0 else NEVER
    return Condition((Atom(Source(node), limit),))


def negated(condition: Condition, node: fx.Node | None) -> Condition | None:
    """Its negation, which ``node`` says; None where nothing says it, and it is no single limit."""
    if condition.never or not condition.atoms:
        return ALWAYS if condition.never else NEVER
    limit = condition.atoms[0].limit if len(condition.atoms) == 1 else None
    if limit is None:
        return None if node is None else opaque(node)
    return Condition((Atom(None if node is None else Source(node), limit.times(-1).plus(-1)),))


def compared(operator: str, left: Value | None, right: Value | None, node: fx.Node) -> Value:
    """A comparison: ge, gt, le, lt, eq or ne."""
    number = _number(right)
    if operator in ("eq", "ne") and number is not None and isinstance(left, (Choice, Condition)):
        choice = left if isinstance(left, Choice) else Choice(left, 1.0, 0.0)
        return _is_number(choice, number, node, equal=operator == "eq")
    one, other = as_integer(left), as_integer(right)
    if one is None or other is None:
        return opaque(node)
    difference = one - other
    if operator in ("eq", "ne"):
        if not difference.is_constant or not isinstance(difference.constant, int):
            return opaque(node)
        return ALWAYS if (difference.constant == 0) == (operator == "eq") else NEVER
    if operator in ("le", "lt"):
        difference = difference.times(-1)
    return at_least_zero(difference if operator in ("ge", "le") else difference.plus(-1), node)


def _number(value: Value | None) -> float | None:
    if isinstance(value, Choice) and value.yes == value.no:
        return value.yes
    if isinstance(value, Affine) and value.is_constant and isinstance(value.constant, int):
        return value.constant
    return None


def _is_number(choice: Choice, number: float, node: fx.Node, *, equal: bool) -> Condition:
    yes, no = (choice.yes == number) == equal, (choice.no == number) == equal
    if yes == no:
        return ALWAYS if yes else NEVER
    return _said_by(choice.condition, node) if yes else negated(choice.condition, node) or opaque(node)


def _said_by(condition: Condition, node: fx.Node) -> Condition:
    if len(condition.atoms) != 1:
        return condition
    return Condition((replace(condition.atoms[0], source=Source(node)),))


def either(left: Condition, right: Condition, node: fx.Node) -> Condition:
    """Their disjunction, which ``node`` says."""
    if left.never or right == ALWAYS:
        return right
    return left if right.never or left == ALWAYS else opaque(node)


def calculated(function: Callable[[float, float], float], left: Value | None, right: Value | None) -> Choice | None:
    """Arithmetic where one side is a number."""
    if not isinstance(left, Choice) or not isinstance(right, Choice):
        return None
    if left.yes != left.no and right.yes != right.no:
        return None
    condition = left.condition if left.yes != left.no else right.condition
    yes, no = function(left.yes, right.yes), function(left.no, right.no)
    return None if math.isnan(yes) or math.isnan(no) else Choice(condition, yes, no)


def chosen(condition: Condition, yes: Value | None, no: Value | None) -> Choice | None:
    """``where`` of two numbers."""
    if not isinstance(yes, Choice) or not isinstance(no, Choice) or yes.yes != yes.no or no.yes != no.no:
        return None
    return Choice(condition, yes.yes, no.no)


def triangular(value: Value | None, diagonal: int, node: fx.Node, *, lower: bool) -> Value | None:
    """``tril`` or ``triu`` of a boolean, or of numbers that are zero elsewhere already."""
    sign = 1 if lower else -1
    limit = Affine.of(sign * diagonal, [(-2, sign), (-1, -sign)])
    if isinstance(value, Condition):
        source = Source(node) if value == ALWAYS else None
        return value & Condition((Atom(source, limit),))
    if isinstance(value, Affine) and value.is_constant and isinstance(value.constant, int):
        value = Choice(ALWAYS, value.constant, value.constant)
    if not isinstance(value, Choice) or (value.yes != value.no and value.no != 0):
        return None
    return Choice(value.condition & Condition((Atom(None, limit),)), value.yes, 0.0)
