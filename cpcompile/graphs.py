"""Small helpers over fx graphs that several passes need: nodes born with a value, uses after a point, printing names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.node import map_arg


def fake_mode_of(graph: fx.Graph) -> FakeTensorMode | None:
    """The fake mode that the graph's values were made in."""
    for node in graph.nodes:
        if isinstance(node.meta.get("val"), FakeTensor):
            mode = node.meta["val"].fake_mode
            assert isinstance(mode, FakeTensorMode)
            return mode
    return None


def emit(
    graph: fx.Graph, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None, *, like: fx.Node
) -> fx.Node:
    """A new call at the graph's insertion point, with its (fake) value computed and its origin taken from ``like``."""
    node = graph.call_function(target, tuple(args), dict(kwargs or {}))
    for key in ("nn_module_stack", "stack_trace"):
        if key in like.meta:
            node.meta[key] = like.meta[key]
    values = map_arg((node.args, node.kwargs), lambda operand: operand.meta["val"])
    fakes = [value for value in torch.utils._pytree.tree_leaves(values) if isinstance(value, FakeTensor)]
    if fakes:
        with fakes[0].fake_mode, torch.no_grad():
            node.meta["val"] = target(*values[0], **values[1])
    else:
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
