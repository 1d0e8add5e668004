"""normalize: one spelling for things.

In: a functional graph. Out: the same values without assertions on metadata and without operators that change nothing
(casts to the dtype that a tensor has, copies, dropout that drops nothing); parameters come right after the inputs.
Nothing is refused.

    %a = to(%x, float32)   # x is float32       use(%x)
    %_ = _assert_tensor_metadata(%a, ...)   ->
    use(%a)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

aten = torch.ops.aten

_DEAD = (
    aten._assert_tensor_metadata.default,
    aten._assert_async.msg,
    aten._assert_scalar.default,
    aten.sym_constrain_range_for_size.default,
    aten.sym_constrain_range.default,
)
_CASTS = (aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten.type_as.default, aten._to_copy.default)
_SAME = (*_CASTS, aten.alias.default, aten.lift_fresh_copy.default, aten.clone.default, aten.contiguous.default)


@dataclass(frozen=True)
class Normalize:
    """The pass; it has no options."""

    name: ClassVar[str] = "normalize"

    def __call__(self, module: fx.GraphModule) -> None:
        """Rewrite ``module`` in place."""
        graph = module.graph
        for node in list(graph.nodes):
            if node.op != "call_function":
                continue
            if node.target in _DEAD:
                graph.erase_node(node)
            elif _changes_nothing(node):
                source = node.args[0]
                assert isinstance(source, fx.Node)
                node.replace_all_uses_with(source)
                graph.erase_node(node)
        graph.eliminate_dead_code()
        _parameters_first(graph)


def _parameters_first(graph: fx.Graph) -> None:
    """Attributes stand behind the inputs, whichever region they came from: what enters, enters before all else."""
    calls = iter([node for node in graph.nodes if node.op not in ("placeholder", "get_attr")])
    first = next(calls)
    for node in list(graph.nodes):
        if node.op == "get_attr" and node > first:
            first.prepend(node)


def _changes_nothing(node: fx.Node) -> bool:
    if node.target is aten.dropout.default:
        probability, train = node.args[1], node.args[2]
        return not bool(train) or bool(probability == 0.0)
    if node.target not in _SAME or node.target is aten.contiguous.default:
        return False
    source = node.args[0]
    assert isinstance(source, fx.Node)
    before, after = source.meta["val"], node.meta["val"]
    same = before.dtype == after.dtype and before.device == after.device
    return bool(same and before.layout == after.layout)
