"""A call's arguments by the names of the operator's schema, and the way back to a call on local values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import fx
from torch._ops import OpOverload

from cpcompile.decision import LocalArgument
from cpcompile.layout import Dim
from cpcompile.sizes import Size, as_size


def bind(
    target: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], operand_of: Callable[[Any], Any]
) -> dict[str, Any]:
    """Every argument of the schema by name: what was passed, else the default.

    ``operand_of`` turns a graph node (or, in tests, a tensor) into an ``Operand`` or a plain value; symbolic ints
    become sizes, lists tuples.
    """

    def plain(value: Any) -> Any:
        if isinstance(value, (fx.Node, torch.Tensor)):
            return plain_scalar(operand_of(value))
        if isinstance(value, (list, tuple)):
            return tuple(plain(item) for item in value)
        return plain_scalar(value)

    bound: dict[str, Any] = {}
    for index, argument in enumerate(target._schema.arguments):
        if index < len(args) and not argument.kwarg_only:
            bound[argument.name] = plain(args[index])
        elif argument.name in kwargs:
            bound[argument.name] = plain(kwargs[argument.name])
        else:
            bound[argument.name] = plain(argument.default_value)
    return bound


def plain_scalar(value: Any) -> Any:
    """A symbolic int as a size; anything else as it is."""
    return as_size(value) if isinstance(value, (torch.SymInt, sympy.Expr)) else value


def localized(
    target: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    arguments: Mapping[str, LocalArgument],
    new_target: Any,
    size_of: Callable[[Dim | Size], Any],
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The local call: ``arguments`` in place of the literals of the same names, each ``Dim`` in them through
    ``size_of``. A new target takes the first operand and ``arguments``, and nothing else."""

    def written(value: LocalArgument) -> Any:
        if isinstance(value, (Dim, sympy.Expr)):
            return size_of(value)
        if isinstance(value, tuple):
            return [written(item) for item in value]
        return value

    local = {name: written(value) for name, value in arguments.items()}
    if new_target is not None:
        first = args[0] if args else kwargs[target._schema.arguments[0].name]
        return new_target, *_passed(new_target, {new_target._schema.arguments[0].name: first, **local})
    names = [argument.name for argument in target._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs, **local}
    count = len(args)
    return target, tuple(given.pop(name) for name in names[:count]), given


def _passed(target: OpOverload, given: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments by position as far as they are given without a gap, the rest by name."""
    args: list[Any] = []
    for argument in target._schema.arguments:
        if argument.kwarg_only or argument.name not in given:
            break
        args.append(given.pop(argument.name))
    return tuple(args), given
