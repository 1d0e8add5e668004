"""reshard: make every change of layout a node.

In: a graph with decisions. Out: the same values with ``cp.shard``, ``cp.gather``, ``cp.all_to_all`` and ``cp.reduce``
wherever an operand does not lie as its user needs it; markers are gone. Nothing is refused: what is no single exchange
is gathered and sharded again.

    %m = mark(%x, 0)         # wants (2) (64 cp) (C)          %s = cp.shard(%x)        # (2) (64 cp) (C)
    %y = linear(%m, %w)                                ->     %y = linear(%s, %w)
    return %y                # wants (2) (64) (D)             %g = cp.gather(%y)       # (2) (64) (D)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import fx

from cpcompile.decision import Decision, Why, decision, is_tensor
from cpcompile.errors import Refusal
from cpcompile.layout import Layout
from cpcompile.ops import neutral
from cpcompile.ops.markers import mark
from cpcompile.transfer import kind_of

_OPS = {"shard": neutral.shard, "gather": neutral.gather, "all_to_all": neutral.all_to_all}


@dataclass(frozen=True)
class Reshard:
    """The pass; it has no options."""

    name: ClassVar[str] = "reshard"

    def __call__(self, module: fx.GraphModule) -> None:
        """Rewrite ``module`` in place."""
        graph = module.graph
        made: dict[tuple[fx.Node, Layout], fx.Node] = {}
        for node in list(graph.nodes):
            self._operands(graph, node, made)
            own = decision(node)
            if own.returns is not None and is_tensor(node):
                wanted = own.returns[0]
                assert wanted is not None
                node.meta["cp"] = replace(own, returns=None)
                if wanted != own.layout:
                    with graph.inserting_after(node):
                        back = _one_step(graph, node, wanted, "fallback", node)
                    node.replace_all_uses_with(back, delete_user_cb=lambda user, back=back: user is not back)
        for node in list(graph.nodes):
            if node.target is mark:
                source = node.args[0]
                assert isinstance(source, fx.Node)
                node.replace_all_uses_with(source)
                graph.erase_node(node)

    def _operands(self, graph: fx.Graph, node: fx.Node, made: dict[tuple[fx.Node, Layout], fx.Node]) -> None:
        needed = iter(decision(node).operands)
        if node.op != "output" and not decision(node).operands:
            return

        def change(operand: Any) -> Any:
            if isinstance(operand, (list, tuple)):
                return type(operand)(change(item) for item in operand)
            if isinstance(operand, dict):
                return {name: change(item) for name, item in operand.items()}
            if not isinstance(operand, fx.Node) or not is_tensor(operand):
                return operand
            layout = next(needed)
            if decision(operand).layout == layout:
                return operand
            key = (operand, layout)
            if key not in made:
                with graph.inserting_before(node):
                    made[key] = changed(graph, operand, layout, node)
            return made[key]

        args, kwargs = change(tuple(node.args)), change(dict(node.kwargs))
        node.args, node.kwargs = args, kwargs


def changed(graph: fx.Graph, node: fx.Node, wanted: Layout, user: fx.Node) -> fx.Node:
    """Nodes at the insertion point that bring ``node`` to ``wanted``; the last of them."""
    own = decision(user)
    why: Why = own.why or ("fallback" if own.fallback else "rule")
    layout = decision(node).layout
    if layout.partial and layout.partial != wanted.partial:
        node = _one_step(graph, node, layout.reduced(), why, user)
        layout = layout.reduced()
    if layout == wanted:
        return node
    if isinstance(kind_of(layout, wanted), Refusal):
        node = _one_step(graph, node, Layout.replicated(layout.shape), why, user)
    return _one_step(graph, node, wanted, why, user)


def _one_step(graph: fx.Graph, node: fx.Node, wanted: Layout, why: Why, user: fx.Node) -> fx.Node:
    layout = decision(node).layout
    if layout.partial and not wanted.partial:
        target = neutral.reduce
    else:
        kind = kind_of(Layout(layout.dims), Layout(wanted.dims))
        assert not isinstance(kind, Refusal), kind.reason
        target = _OPS[kind]
    step = graph.call_function(target, (node,))
    step.meta["val"] = node.meta["val"]
    for key in ("nn_module_stack", "stack_trace"):
        if key in user.meta:
            step.meta[key] = user.meta[key]
    step.meta["cp"] = Decision((wanted,), (layout,), why=why)
    return step
