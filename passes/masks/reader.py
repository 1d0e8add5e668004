"""Reads the mask of an attention call backward, from the call to the aranges and constants that it is made of.

Each operator is one function from what its operands were read as to what its result is. None: it is not read. Nothing
is assumed: a value that only the program knows stays a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import fx

from cpcompile.decision import is_tensor, shape_of
from cpcompile.passes.masks.values import Choice, Source, Value, constant, negated, opaque
from cpcompile.passes.rules.bind import bind
from cpcompile.predicates import NEVER, Affine, Atom, Condition
from cpcompile.sizes import Size, as_size

Arguments: TypeAlias = dict[str, Any]
"""Of a call, by the names of its schema; operands are nodes."""

Operator: TypeAlias = "Callable[[Reader, fx.Node, Arguments], Value | None]"


class Reader:
    """Reads nodes of one graph, each once."""

    def __init__(self, operators: Mapping[Any, Operator]) -> None:
        self._operators = operators
        self._known: dict[fx.Node, Value | None] = {}
        self._denied: dict[fx.Node, Condition] = {}

    def read(self, node: Any) -> Value | None:
        """What a node, or a number, is known to be."""
        if isinstance(node, (bool, int, float)):
            return constant(node, torch.float32 if isinstance(node, float) else torch.int64)
        if not isinstance(node, fx.Node):
            return None
        if isinstance(node.meta.get("val"), torch.SymInt):
            return Affine(as_size(node.meta["val"]))
        if not is_tensor(node):
            return None
        if node not in self._known:
            value = self._read(node) if node.op == "call_function" and node.target in self._operators else None
            if value is None and node.meta["val"].dtype is torch.bool:
                value = opaque(node)
            self._known[node] = value
        return self._known[node]

    def _read(self, node: fx.Node) -> Value | None:
        assert isinstance(node.target, torch._ops.OpOverload)
        arguments = bind(node.target, node.args, node.kwargs, lambda operand: operand)
        value = self._operators[node.target](self, node, arguments)
        value = renamed(value, {dim: dim for dim, size in sizes(node).items() if size != 1})
        return _decided(value, list(sizes(node).values())) if isinstance(value, Condition) else value

    def negation(self, condition: Condition, node: fx.Node | None) -> Condition | None:
        """The negation of a condition, which ``node`` says; of one that denies another, that other one."""
        source = condition.atoms[0].source if len(condition.atoms) == 1 else None
        if isinstance(source, Source) and source.node in self._denied and not source.unsqueezed:
            return self._denied[source.node]
        if node is not None:
            self._denied[node] = condition
        return negated(condition, node)

    def number_or_read(self, value: Any, like: fx.Node) -> Value | None:
        """An operand of arithmetic with ``like``: a number counts in that tensor's dtype."""
        if isinstance(value, (bool, int, float)):
            dtype = like.meta["val"].dtype
            return constant(value, torch.int64 if dtype is torch.bool else dtype)
        return self.read(value)


def sizes(node: fx.Node) -> dict[int, Size]:
    """A tensor's sizes by dimension, counted from the right."""
    shape = shape_of(node.meta["val"])
    return {index - len(shape): size for index, size in enumerate(shape)}


def renamed(value: Value | None, dims: dict[int, int]) -> Value | None:
    """The value with its dimensions renamed; where a dimension is gone, its index was 0. Sources stay as they are."""
    if isinstance(value, Affine):
        return Affine.of(value.constant, ((dims[dim], c) for dim, c in value.coefficients if dim in dims))
    if isinstance(value, Condition):
        found: list[Atom] = []
        for atom in value.atoms:
            limit = None if atom.limit is None else renamed(atom.limit, dims)
            assert limit is None or isinstance(limit, Affine)
            found.append(Atom(atom.source, limit))
        return Condition(tuple(found), value.never)
    if isinstance(value, Choice):
        condition = renamed(value.condition, dims)
        assert isinstance(condition, Condition)
        return Choice(condition, value.yes, value.no)
    return None


def _decided(condition: Condition, shape: Sequence[Size]) -> Condition:
    """The condition without what is always so, or never."""
    block = [(0, size) for size in shape]
    answers = {atom: "mixed" if atom.limit is None else atom.limit.over(block) for atom in condition.atoms}
    if condition.never or "none" in answers.values():
        return NEVER
    return Condition(tuple(atom for atom, answer in answers.items() if answer == "mixed"))


def table(rows: Iterable[tuple[str, Sequence[str], Operator]]) -> dict[Any, Operator]:
    """Operators by overload, from rows of an ATen name, its overloads and one function."""
    return {getattr(getattr(torch.ops.aten, name), overload): read for name, names, read in rows for overload in names}
