"""What the analysing passes write on a node, and how anything reads it: the one typed slot ``node.meta["cp"]``."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch.fx import Node

from cpcompile.layout import Dim, Layout
from cpcompile.site import Site
from cpcompile.sizes import Size, as_size

LocalArgument: TypeAlias = "Dim | Size | tuple[LocalArgument, ...] | float | bool | str | torch.dtype | None"
"""An argument of the local call. A ``Dim`` stands for the number of its indices that this rank holds."""


class Cotangent(enum.Enum):
    """How the gradient of a value lies over the ranks.

    FULL: equal on all ranks. PENDING: the sum over the ranks is the gradient. LOCAL: each rank holds the gradient of
    its own shards, and of replicated segments beside them a pending part. NONE: the value has no gradient.
    """

    FULL = "full"
    PENDING = "pending"
    LOCAL = "local"
    NONE = "none"


GradSync: TypeAlias = Literal["all_reduce", "mean", "sum", "none"]
"""What each rank's gradients are: whole; whole after a mean, or a sum, over the ranks; or as they come (raw)."""

Why: TypeAlias = Literal["plan", "rule", "fallback", "site", "output"]


@dataclass(frozen=True)
class Decision:
    """How one node runs on the ranks.

    results: the layout of each result, None where a result is no tensor.
    operands: the layout that each tensor operand must have, in the order of ``tensor_operands``.
    arguments: literal arguments (by schema name) of the local call, as counts of this rank's indices.
    target: the operator of the local call where it is another one; it takes the first operand and ``arguments``.
    returns: where a result goes back to another layout right after it was computed (after a fallback).
    fallback: why the operator runs on gathered operands, or None.
    why: for a reshard, what asked for it. site: for an attention call, how it runs.
    """

    results: tuple[Layout | None, ...]
    operands: tuple[Layout, ...] = ()
    arguments: Mapping[str, LocalArgument] = field(default_factory=dict)
    target: Any = None
    returns: tuple[Layout | None, ...] | None = None
    fallback: str | None = None
    why: Why | None = None
    note: str | None = None
    site: Site | None = None
    cotangent: Cotangent = Cotangent.NONE

    @property
    def layout(self) -> Layout:
        """The layout of the only result."""
        (layout,) = self.results
        assert layout is not None
        return layout


def decision(node: Node) -> Decision:
    """The decision written on a node."""
    found = node.meta["cp"]
    assert isinstance(found, Decision)
    return found


def layout_of(node: Node) -> Layout:
    """The layout in which a value's users see it."""
    made = decision(node)
    seen = made.layout if made.returns is None else made.returns[0]
    assert seen is not None
    return seen


def has_decision(node: Node) -> bool:
    """Whether a decision is written on a node."""
    return "cp" in node.meta


def is_tensor(node: Node) -> bool:
    """Whether a node's value is a tensor (not a tuple, a size or nothing)."""
    return isinstance(node.meta.get("val"), torch.Tensor)


def tensor_operands(node: Node) -> list[Node]:
    """The tensor operands of a node in the order of its arguments, a repeated one as often as it is passed."""
    found: list[Node] = []

    def visit(value: Any) -> None:
        if isinstance(value, Node):
            if is_tensor(value):
                found.append(value)
        elif isinstance(value, (list, tuple)):
            for item in value:
                visit(item)
        elif isinstance(value, dict):
            for item in value.values():
                visit(item)

    visit(node.args)
    visit(node.kwargs)
    return found


def tensor_results(node: Node) -> tuple[torch.Tensor | None, ...]:
    """The values of a node's results: of a tuple-valued node each, None where one is no tensor."""
    value = node.meta.get("val")
    values = value if isinstance(value, (list, tuple)) else (value,)
    return tuple(item if isinstance(item, torch.Tensor) else None for item in values)


def shape_of(value: torch.Tensor) -> tuple[Size, ...]:
    """Global shape of a (fake) tensor."""
    return tuple(as_size(size) for size in value.shape)


def module_of(node: Node) -> str:
    """The full name of the module whose forward made this node, "" for the root."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = next(reversed(stack.values()))[0]
    return str(path).removeprefix("L['self'].").removeprefix("model").removeprefix(".")
