"""cotangents: decide how the gradient of every value lies over the ranks, in one reverse sweep.

In: a graph in which every change of layout is a node (a shared one has the gradients of all its users). Out: the same
graph; every decision carries its ``Cotangent``, and ``cp.pend`` stands where a full contribution meets a pending one
(kept on one rank, zero elsewhere: exact). Nothing is refused.

    %g = cp.gather(%y)               # full: its backward is this rank's slice
    %h = mul(%g, %sharded)           # a rank-dependent use: then %g is pending, and its backward a reduce-scatter
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import fx

from cpcompile.cotangents import contribution, has_gradient, must_be_pending, results_of
from cpcompile.decision import Cotangent, Decision, decision, is_tensor
from cpcompile.graphs import emit
from cpcompile.ops import neutral


@dataclass(frozen=True)
class Cotangents:
    """The pass. outputs_whole: the graph's outputs are gathered, so that their cotangents are equal on all ranks."""

    outputs_whole: bool = True
    name: ClassVar[str] = "cotangents"

    def __call__(self, module: fx.GraphModule) -> None:
        """Write the cotangents, and insert ``cp.pend`` where they differ between uses."""
        nodes = list(module.graph.nodes)
        for node in reversed(nodes):
            if is_tensor(node):
                self._write(node, self._state(node))
            elif node.op == "call_function":
                self._agree(node)
        for node in nodes:
            if is_tensor(node) and decision(node).cotangent is Cotangent.PENDING:
                self._pend(module.graph, node)

    def _state(self, node: fx.Node) -> Cotangent:
        layout = decision(node).layout
        if not has_gradient(node):
            return Cotangent.NONE
        if layout.is_sharded:
            return Cotangent.LOCAL
        if layout.partial:
            return Cotangent.FULL
        if must_be_pending(node):
            return Cotangent.PENDING
        given = {contribution(user, node, outputs_whole=self.outputs_whole) for user in node.users}
        return Cotangent.PENDING if Cotangent.PENDING in given else Cotangent.FULL

    def _agree(self, node: fx.Node) -> None:
        """The items of one tuple have one kind of cotangent: the operator that made them has one backward."""
        items = [item for item in results_of(node) if has_gradient(item) and decision(item).layout.is_replicated]
        states = {decision(item).cotangent for item in items}
        if Cotangent.PENDING in states:
            for item in items:
                self._write(item, Cotangent.PENDING)
        whole = states == {Cotangent.FULL} and all(
            decision(item).layout.is_replicated for item in results_of(node) if has_gradient(item)
        )
        self._write(node, Cotangent.FULL if whole else Cotangent.LOCAL if not items else Cotangent.PENDING)

    def _pend(self, graph: fx.Graph, node: fx.Node) -> None:
        full = [
            user
            for user in node.users
            if contribution(user, node, outputs_whole=self.outputs_whole) is Cotangent.FULL
            and user.target is not neutral.pend
        ]
        if not full or node.op == "output":
            return
        with graph.inserting_after(_after(node)):
            pend = emit(graph, neutral.pend, [node], like=node, value=node.meta["val"])
        layout = decision(node).layout
        pend.meta["cp"] = Decision((layout,), (layout,), cotangent=Cotangent.FULL)
        for user in full:
            user.replace_input_with(node, pend)

    def _write(self, node: fx.Node, state: Cotangent) -> None:
        node.meta["cp"] = replace(decision(node), cotangent=state)


def _after(node: fx.Node) -> fx.Node:
    """The node behind which a new call may stand: parameters and inputs come first."""
    while node.next.op in ("placeholder", "get_attr") and node.op in ("placeholder", "get_attr"):
        node = node.next
    return node
