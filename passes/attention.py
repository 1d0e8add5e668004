"""attention: swap each site for what was decided about it.

In: a graph whose attention calls carry a ``Site``. Out: exchanges around a plain attention call on what each rank
then holds: query, key and value in one packed exchange on the way in, the output on the way back. Nothing is refused.

    %o = sdpa(%q, %k, %v)    # ulysses          %e  = cp.exchange([%q, %k, %v])   # (2) (4 cp) (80) (16)
                                          ->    %o  = sdpa(%e.0, %e.1, %e.2)
                                                %o1 = cp.all_to_all(%o)           # (2) (4) (16 cp ++ 64 cp) (16)
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import fx
from torch._ops import OpOverload

from cpcompile.decision import Decision, decision
from cpcompile.errors import Refusal
from cpcompile.graphs import emit
from cpcompile.layout import Layout
from cpcompile.ops import neutral
from cpcompile.site import Site
from cpcompile.transfer import kind_of


@dataclass(frozen=True)
class Attention:
    """The pass; it has no options."""

    name: ClassVar[str] = "attention"

    def __call__(self, module: fx.GraphModule) -> None:
        """Rewrite ``module`` in place."""
        for node in list(module.graph.nodes):
            made = node.meta.get("cp")
            if isinstance(made, Decision) and made.site is not None:
                _swap(module.graph, node, made.site)


def _swap(graph: fx.Graph, node: fx.Node, site: Site) -> None:
    outside = decision(node)
    assert isinstance(node.target, OpOverload)
    names = [argument.name for argument in node.target._schema.arguments]
    arguments: dict[str, Any] = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    inside = {"query": site.query, "key": site.key, "value": site.value}
    operands = {name: arguments[name] for name in inside}
    with graph.inserting_before(node):
        arguments |= _exchanged(graph, node, operands, inside)
    query, key, value = (arguments.pop(name) for name in ("query", "key", "value"))
    node.args = (query, key, value)
    node.kwargs = arguments
    mask = arguments.get("attn_mask")
    masks = (decision(mask).layout,) if isinstance(mask, fx.Node) else ()
    node.meta["cp"] = replace(outside, results=(site.result,), operands=(site.query, site.key, site.value, *masks))
    if site.result != outside.layout:
        with graph.inserting_after(node):
            back = _step(graph, node, site.result, outside.layout)
        node.replace_all_uses_with(back, delete_user_cb=lambda user: user is not back)


def _exchanged(
    graph: fx.Graph, node: fx.Node, operands: dict[str, fx.Node], inside: dict[str, Layout]
) -> dict[str, fx.Node]:
    """The operands as the local attention needs them: what moves, moves in one exchange; the same tensor moves once."""
    moving: dict[tuple[fx.Node, Layout], int] = {}
    result: dict[str, fx.Node] = {}
    for name, operand in operands.items():
        kind = kind_of(decision(operand).layout, inside[name])
        assert not isinstance(kind, Refusal), kind.reason
        if kind == "none":
            result[name] = operand
        elif kind == "shard":
            result[name] = _step(graph, operand, decision(operand).layout, inside[name], like=node)
        else:
            moving.setdefault((operand, inside[name]), len(moving))
    if not moving:
        return result
    sources = [operand for operand, _ in moving]
    layouts = tuple(layout for _, layout in moving)
    packed = emit(graph, neutral.exchange, [sources], like=node, value=[source.meta["val"] for source in sources])
    packed.meta["cp"] = Decision(layouts, tuple(decision(source).layout for source in sources), why="site")
    items: list[fx.Node] = []
    for index, layout in enumerate(layouts):
        item = emit(graph, operator.getitem, [packed, index], like=node, value=sources[index].meta["val"])
        item.meta["cp"] = Decision((layout,))
        items.append(item)
    for name, operand in operands.items():
        if (operand, inside[name]) in moving:
            result[name] = items[moving[operand, inside[name]]]
    return result


def _step(graph: fx.Graph, operand: fx.Node, source: Layout, target: Layout, like: fx.Node | None = None) -> fx.Node:
    kind = kind_of(source, target)
    assert not isinstance(kind, Refusal), kind.reason
    ops = {"shard": neutral.shard, "gather": neutral.gather, "all_to_all": neutral.all_to_all}
    step = emit(graph, ops[kind], [operand], like=like or operand, value=operand.meta["val"])
    step.meta["cp"] = Decision((target,), (source,), why="site")
    return step
