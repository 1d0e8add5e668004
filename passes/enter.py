"""enter: parameters, and inputs that require grad, enter the ranks' program.

In: a graph with cotangents. Out: ``cp.enter`` behind every such value whose gradient on each rank is not yet what the
user asked for; its backward makes it so, on the graph's edge and never on ``.grad``. Several values share a bucket, and
so one collective. Nothing is refused.

    %w = get_attr[weight]                        %w = get_attr[weight]
    %y = linear(%x, %w)         # pending   ->   %e = cp.enter([%w, ...])      # backward: all-reduce
                                                 %y = linear(%x, %e.0)
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import fx

from cpcompile.cotangents import has_gradient
from cpcompile.decision import Cotangent, Decision, GradSync, decision
from cpcompile.graphs import emit
from cpcompile.ops import neutral

_BUCKET_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Enter:
    """The pass. grad_sync: what the user wants gradients to be."""

    grad_sync: GradSync = "all_reduce"
    name: ClassVar[str] = "enter"

    def __call__(self, module: fx.GraphModule) -> None:
        """Insert the entries."""
        if self.grad_sync == "none":
            return
        wanted = (Cotangent.FULL,) if self.grad_sync == "sum" else (Cotangent.PENDING,)
        values = [node for node in module.graph.nodes if node.op in ("placeholder", "get_attr")]
        if not values:
            return
        entering = [
            node
            for node in values
            if has_gradient(node) and _requires_grad(module, node) and decision(node).cotangent in wanted
        ]
        for bucket in _buckets(entering):
            self._enter(module.graph, bucket, values[-1])

    def _enter(self, graph: fx.Graph, bucket: list[fx.Node], last: fx.Node) -> None:
        state = decision(bucket[0]).cotangent
        uses = {node: list(node.users) for node in bucket}
        with graph.inserting_after(last):
            values = [node.meta["val"] for node in bucket]
            packed = emit(graph, neutral.enter, [bucket], like=last, value=values)
        layouts = tuple(decision(node).layout for node in bucket)
        packed.meta["cp"] = Decision(layouts, layouts, cotangent=state)
        at = packed
        for index, node in enumerate(bucket):
            with graph.inserting_after(at):
                at = emit(graph, operator.getitem, [packed, index], like=node, value=node.meta["val"])
            at.meta["cp"] = Decision((layouts[index],), cotangent=state)
            for user in uses[node]:
                user.replace_input_with(node, at)
            node.meta["cp"] = replace(decision(node), cotangent=Cotangent.FULL)


def _requires_grad(module: fx.GraphModule, node: fx.Node) -> bool:
    if node.op == "get_attr":
        assert isinstance(node.target, str)
        owner, _, leaf = node.target.rpartition(".")
        value = getattr(module.get_submodule(owner), leaf)
        return isinstance(value, torch.Tensor) and value.requires_grad
    return bool(node.meta["val"].requires_grad)


def _buckets(nodes: list[fx.Node]) -> list[list[fx.Node]]:
    """Values of one dtype and device together, inputs (whose sizes may be symbols) each alone."""
    found: list[list[fx.Node]] = []
    open_: dict[tuple[torch.dtype, torch.device], tuple[list[fx.Node], int]] = {}
    for node in nodes:
        value = node.meta["val"]
        if node.op == "placeholder":
            found.append([node])
            continue
        kind = (value.dtype, value.device)
        bucket, held_bytes = open_.get(kind, ([], 0))
        size_bytes = value.numel() * value.element_size()
        if bucket and held_bytes + size_bytes > _BUCKET_BYTES:
            bucket, held_bytes = [], 0
        if not bucket:
            found.append(bucket)
        bucket.append(node)
        open_[kind] = (bucket, held_bytes + size_bytes)
    return found
