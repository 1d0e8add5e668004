"""propagate: decide how every value lies over the ranks.

In: a normalized graph with markers. Out: the same graph; every node carries a ``Decision`` (its results' layouts, what
each operand must become, the local call's literals). Nothing is refused: an operator without a sound rule runs on
gathered operands, and its decision says why.

    %m = mark(%x, 0)                        # (2) (64 cp) (C)        operands: (2) (64 cp) (C)
    %y = linear(%m, %w)                     # (2) (64 cp) (D)
    %s = cumsum(%y, 1)                      # (2) (64) (D)           fallback: no rule; returns to (2) (64 cp) (D)
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import fx
from torch._ops import OpOverload

from cpcompile.decision import (
    Decision,
    decision,
    is_tensor,
    layout_of,
    shape_of,
    tensor_operands,
    tensor_results,
)
from cpcompile.errors import Refusal
from cpcompile.layout import Axis, Layout, sharded, whole
from cpcompile.ops.markers import mark
from cpcompile.orders import zigzag
from cpcompile.passes.rules import rule_for
from cpcompile.passes.rules.attention import SITES, alone, attention
from cpcompile.passes.rules.bind import bind
from cpcompile.passes.rules.call import Answer, Call, Operand, Result, Rule
from cpcompile.passes.rules.choose import Setting
from cpcompile.plan import PlanEntry
from cpcompile.site import Site, SiteOptions
from cpcompile.sizes import Size, product

aten = torch.ops.aten


@dataclass(frozen=True)
class Propagate:
    """The pass.

    axes: the axes that share the sequence, outermost first. entries: the plan's, as the markers count them. rules: the
    user's own. gather_outputs: whether the graph's outputs are whole. gather_at: names of nodes to run gathered in
    spite of a rule (for tests). sites: what is asked of attention. known: what symbols were in the captured call.
    granules: for dimensions of a size, of how many indices their shards are multiples. zigzag: the sizes whose splits
    are in that order.
    """

    axes: tuple[Axis, ...]
    entries: tuple[PlanEntry, ...] = ()
    rules: Mapping[OpOverload, Rule] = field(default_factory=dict)
    gather_outputs: bool = True
    gather_at: frozenset[str] = frozenset()
    sites: SiteOptions = field(default_factory=SiteOptions)
    known: Mapping[Any, int] = field(default_factory=dict)
    granules: Mapping[Size, Size] = field(default_factory=dict)
    zigzag: frozenset[Size] = frozenset()
    name: ClassVar[str] = "propagate"

    def __call__(self, module: fx.GraphModule) -> None:
        """Write a decision on every node of ``module``."""
        for node in module.graph.nodes:
            node.meta["cp"] = self._decide(node)

    def _decide(self, node: fx.Node) -> Decision:
        if node.op == "output":
            return Decision(
                (), tuple(self._output(layout_of(operand)) for operand in tensor_operands(node)), why="output"
            )
        if node.op != "call_function" or not tensor_operands(node):
            if node.target is operator.getitem:
                return self._item(node)
            return Decision(_whole_results(node))
        if node.target is mark:
            return self._marked(node)
        return self._call(node)

    def _output(self, layout: Layout) -> Layout:
        return Layout.replicated(layout.shape) if self.gather_outputs else layout.reduced()

    def _item(self, node: fx.Node) -> Decision:
        source, index = node.args
        assert isinstance(source, fx.Node)
        assert isinstance(index, int)
        made = decision(source)
        returns = None if made.returns is None else (made.returns[index],)
        return Decision((made.results[index],), returns=returns)

    def _marked(self, node: fx.Node) -> Decision:
        entry = self.entries[node.args[1]]  # type: ignore[index]
        layout = layout_of(tensor_operands(node)[0]).reduced()
        index = entry.dim % len(layout.dims)
        dim = layout.dims[index]
        note: str | None = None
        if entry.role == "gather_output":
            wanted = layout.with_dim(index, whole(dim.size))
            if dim.is_replicated:
                note = f"{entry.name}: dimension {index} is not sharded here, there is nothing to gather"
        elif not dim.is_replicated:
            wanted, note = layout, f"{entry.name}: dimension {index} is sharded already, as ({dim})"
        elif layout.is_sharded:
            wanted, note = layout, f"{entry.name}: it is sharded along another dimension already, as {layout}"
        else:
            divided = zigzag if dim.size in self.zigzag else sharded
            wanted = layout.with_dim(index, divided(dim.size, self.axes, self.granules.get(dim.size, 1)))
            if not wanted.is_sharded:
                ranks = product(axis.size for axis in self.axes)
                note = f"{entry.name}: dimension {index} has {dim.size} indices for {ranks} ranks; every rank keeps all"
        return Decision((wanted,), (wanted,), why="plan", note=note)

    def _call(self, node: fx.Node) -> Decision:
        layouts = [layout_of(operand) for operand in tensor_operands(node)]
        is_site = node.target in SITES and node.target not in self.rules
        if all(layout.is_replicated for layout in layouts):
            result = Layout.replicated(shape_of(node.meta["val"])) if is_site else None
            untouched = (
                None
                if result is None
                else Site("local", layouts[0], layouts[1], layouts[2], result, alone(call_of(node), self.sites))
            )
            return Decision(_whole_results(node), tuple(layouts), site=untouched)
        site = None
        answer: Answer | Refusal
        if not isinstance(node.target, OpOverload):
            answer = Refusal(f"{node.target} is no operator that a rule could exist for")
        elif any(result is None for result in tensor_results(node)):
            answer = Refusal(f"{node.target} gives results that are no tensors")
        elif is_site:
            setting = Setting(self.axes, self.sites, self.known)
            found = attention(call_of(node), setting, shared=is_shared(node))
            answer, site = (found, None) if isinstance(found, Refusal) else found
        else:
            rule = rule_for(node.target, self.rules)
            answer = rule(call_of(node)) if rule else Refusal(f"there is no rule for {node.target}")
        if not isinstance(answer, Refusal):
            answer = _checked(answer)
        if isinstance(answer, Refusal):
            return _fallback(node, answer.reason, tuple(_like_operands(node)), is_site)
        if node.name in self.gather_at:
            return _fallback(node, "gathered on request", answer.results, is_site)
        operands = tuple(_operand_layouts(node, answer))
        return Decision(answer.results, operands, answer.arguments, answer.target, site=site)


def is_shared(node: fx.Node) -> bool:
    """Whether the keys and values of an attention call are one tensor."""
    names = dict(zip(("query", "key", "value"), node.args, strict=False)) | node.kwargs
    return names["key"] is names["value"]


def call_of(node: fx.Node) -> Call:
    """The call of a node in a rule's terms."""
    assert isinstance(node.target, OpOverload)

    def operand_of(operand: fx.Node) -> Any:
        value = operand.meta["val"]
        return Operand(layout_of(operand), value.dtype) if isinstance(value, torch.Tensor) else value

    arguments = bind(node.target, node.args, node.kwargs, operand_of)
    results = tuple(Result(shape_of(value), value.dtype) for value in tensor_results(node) if value is not None)
    return Call(node.target, arguments, results)


def _checked(answer: Answer) -> Answer | Refusal:
    """The answer, or a refusal where a layout in it is none."""
    operands = [x for needed in answer.operands.values() for x in ([needed] if isinstance(needed, Layout) else needed)]
    for layout in (*operands, *answer.results):
        conflict = layout.axis_conflict()
        if conflict:
            return Refusal(conflict)
    return answer


def _operand_layouts(node: fx.Node, answer: Answer) -> Iterator[Layout]:
    """The answer's operand layouts in the order of ``tensor_operands``."""
    assert isinstance(node.target, OpOverload)
    names = [argument.name for argument in node.target._schema.arguments]
    passed = [*zip(names, node.args, strict=False), *node.kwargs.items()]
    for name, value in passed:
        needed = answer.operands.get(name)
        items: Sequence[Any] = value if isinstance(value, (list, tuple)) else [value]
        for index, item in enumerate(items):
            if not isinstance(item, fx.Node) or not is_tensor(item):
                continue
            if needed is None:
                yield Layout.replicated(layout_of(item).shape)
            else:
                yield needed if isinstance(needed, Layout) else needed[index]


def _whole_results(node: fx.Node) -> tuple[Layout | None, ...]:
    return tuple(None if value is None else Layout.replicated(shape_of(value)) for value in tensor_results(node))


def _fallback(node: fx.Node, reason: str, wanted: tuple[Layout | None, ...], is_site: bool) -> Decision:
    """The operator runs on whole operands; its results go back to the layouts ``wanted``, which costs nothing."""
    results = _whole_results(node)
    operands = tuple(Layout.replicated(layout_of(operand).shape) for operand in tensor_operands(node))
    returns = tuple(None if layout is None else layout.reduced() for layout in wanted)
    site = (
        Site(
            "whole",
            operands[0],
            operands[1],
            operands[2],
            Layout.replicated(shape_of(node.meta["val"])),
            reason=reason,
        )
        if is_site
        else None
    )
    if all(layout is None or layout.is_replicated for layout in returns):
        return Decision(results, operands, fallback=reason, site=site)
    return Decision(results, operands, returns=returns, fallback=reason, site=site)


def _like_operands(node: fx.Node) -> Iterator[Layout | None]:
    """For each result the layout of the largest sharded operand of the same rank, where the sizes are the same."""
    operands = [layout_of(operand).reduced() for operand in tensor_operands(node)]
    for value in tensor_results(node):
        if value is None:
            yield None
            continue
        shape = shape_of(value)
        alike = [layout for layout in operands if layout.is_sharded and len(layout.dims) == len(shape)]
        dims = [whole(size) for size in shape]
        for layout in alike[:1]:
            dims = [own if own.size == size else whole(size) for own, size in zip(layout.dims, shape, strict=True)]
        yield Layout(tuple(dims))
