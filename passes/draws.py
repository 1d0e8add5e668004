"""draws: random draws are those of the whole program.

In: a normalized graph. Out: the same draws made on global shapes, so that they are whole on every rank and sliced where
they are used: dropout becomes a product with the dropout of ones, ``rand_like`` a ``rand``. The ranks share the state
of one generator while they draw. Nothing is refused: other draws are left to propagate, which gathers for them.

    %y = dropout(%x, 0.1, True)            %ones = new_ones(%x, [2, 64, 8])
                                     ->    %mask = dropout(%ones, 0.1, True)
                                           %y    = mul(%x, %mask)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from cpcompile.graphs import emit

aten = torch.ops.aten

_LIKE: dict[Any, torch._ops.OpOverload] = {
    aten.rand_like.default: aten.rand.default,
    aten.randn_like.default: aten.randn.default,
}


@dataclass(frozen=True)
class Draws:
    """The pass; it has no options."""

    name: ClassVar[str] = "draws"

    def __call__(self, module: fx.GraphModule) -> None:
        """Rewrite ``module`` in place."""
        graph = module.graph
        for node in list(graph.nodes):
            if node.target is aten.dropout.default:
                with graph.inserting_before(node):
                    new = _dropout(graph, node)
            elif node.target in _LIKE and _is_plain(node):
                with graph.inserting_before(node):
                    new = _like(graph, node)
            else:
                continue
            node.replace_all_uses_with(new)
            graph.erase_node(node)


def makes_draws(module: fx.GraphModule) -> bool:
    """Whether a graph draws random numbers."""
    return any(_draws(node) for node in module.graph.nodes if node.op == "call_function")


def _draws(node: fx.Node) -> bool:
    if node.target is aten.scaled_dot_product_attention.default:  # tagged as drawing, for its dropout
        return bool(node.kwargs.get("dropout_p", node.args[4] if len(node.args) > 4 else 0.0))
    if node.target is aten.dropout.default:
        return True
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def _dropout(graph: fx.Graph, node: fx.Node) -> fx.Node:
    source, probability = node.args[0], node.args[1]
    assert isinstance(source, fx.Node)
    ones = emit(graph, aten.new_ones.default, [source, _sizes(graph, source)], like=node)
    mask = emit(graph, aten.dropout.default, [ones, probability, True], like=node)
    return emit(graph, aten.mul.Tensor, [source, mask], like=node)


def _like(graph: fx.Graph, node: fx.Node) -> fx.Node:
    source, value = node.args[0], node.meta["val"]
    assert isinstance(source, fx.Node)
    options = {"dtype": value.dtype, "layout": value.layout, "device": value.device}
    return emit(graph, _LIKE[node.target], [_sizes(graph, source)], options, like=node)


def _is_plain(node: fx.Node) -> bool:
    """Whether elements are drawn in the order of their indices: the values follow memory, not shape."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return bool(source.meta["val"].is_contiguous()) and "memory_format" not in node.kwargs


def _sizes(graph: fx.Graph, source: fx.Node) -> list[Any]:
    """The global sizes of a value: numbers, or nodes where they are symbols."""
    return [
        emit(graph, aten.sym_size.int, [source, dim], like=source, value=size)
        if isinstance(size, torch.SymInt)
        else size
        for dim, size in enumerate(source.meta["val"].shape)
    ]
