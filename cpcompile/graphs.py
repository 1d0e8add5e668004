"""Small helpers over fx graphs that several passes need."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.node import map_arg


def fake_mode_of(node: fx.Node) -> FakeTensorMode | None:
    """The fake mode that a node's value was made in, or one of its operands' where it has no tensor."""
    for candidate in (node, *node.all_input_nodes):
        values = candidate.meta.get("val")
        for value in values if isinstance(values, (list, tuple)) else (values,):
            if isinstance(value, FakeTensor):
                mode = value.fake_mode
                assert isinstance(mode, FakeTensorMode)
                return mode
    return None


def emit(
    graph: fx.Graph,
    target: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    like: fx.Node,
    value: Any = None,
) -> fx.Node:
    """A new call at the graph's insertion point, with its (fake) value and its origin taken from ``like``.

    Where ``value`` is not known it is computed.
    """
    node = graph.call_function(target, tuple(args), dict(kwargs or {}))
    for key in ("nn_module_stack", "stack_trace"):
        if key in like.meta:
            node.meta[key] = like.meta[key]
    if value is not None:
        node.meta["val"] = value
        return node
    values = map_arg((node.args, node.kwargs), lambda operand: operand.meta["val"])
    with fake_mode_of(like) or contextlib.nullcontext(), torch.no_grad():
        node.meta["val"] = target(*values[0], **values[1])
    return node


def source_line(node: fx.Node) -> str | None:
    """The innermost line of the user's code that made a node, as ``file:line in function``."""
    trace = node.meta.get("stack_trace")
    if not trace:
        return None
    places = [line.strip() for line in trace.splitlines() if line.strip().startswith("File ")]
    if not places:
        return None
    file, line, function = (part.strip() for part in places[-1].split(",", 2))
    return f"{file.removeprefix('File ').strip(chr(34))}:{line.removeprefix('line ')} {function}"
