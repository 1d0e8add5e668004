"""What each use of a value contributes to its gradient: the law that the passes write and the verifier checks.

A sharded value has a LOCAL cotangent and a partial one a FULL one. A replicated value's is FULL (equal on all ranks)
or PENDING (the sum over the ranks is the gradient), and each of its uses gives one or the other.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from cpcompile.decision import Cotangent, decision, has_decision, is_tensor, tensor_operands
from cpcompile.layout import Axis, Layout, part_axes
from cpcompile.ops import neutral


def has_gradient(node: fx.Node) -> bool:
    """Whether a node's value could carry a gradient."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def layouts_around(node: fx.Node) -> list[Layout]:
    """The layouts of a node's operands and results; of an item of a tuple, those of the node that made the tuple."""
    if node.target is operator.getitem:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        return layouts_around(source)
    operands = [decision(operand).layout for operand in tensor_operands(node)]
    return operands + [layout for layout in decision(node).results if layout is not None]


def is_mixed(node: fx.Node) -> bool:
    """Whether ranks run a node on different values: an operand or a result is sharded or partial."""
    return any(not layout.is_replicated for layout in layouts_around(node))


def is_whole_gather(node: fx.Node) -> bool:
    """Whether a node makes whole values of sharded ones alone, so that a full cotangent is sliced for free."""
    if node.target is operator.getitem:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        return is_whole_gather(source)
    if node.target is neutral.reduce:
        return decision(node).layout.is_replicated
    if node.target not in (neutral.gather, neutral.exchange, neutral.all_to_all):
        return False
    if any(layout is None or not layout.is_replicated for layout in decision(node).results):
        return False
    return all(_all_divided(decision(operand).layout) for operand in tensor_operands(node))


def _all_divided(layout: Layout) -> bool:
    """Whether no two ranks along the layout's axes hold the same element."""
    divided = frozenset[Axis]()
    for dim in layout.dims:
        divided |= frozenset.intersection(*(part_axes(part) for part in dim.parts))
    return divided == layout.axes


def must_be_pending(node: fx.Node) -> bool:
    """Whether the node that made a replicated value can only take the pending form of its cotangent."""
    if node.op != "call_function":
        return False
    return is_mixed(node) and not is_whole_gather(node)


def contribution(user: fx.Node, value: fx.Node, *, outputs_whole: bool) -> Cotangent:
    """What one user of a replicated value gives to its cotangent."""
    if user.op == "output":
        return Cotangent.FULL if outputs_whole else Cotangent.PENDING
    if user.target is neutral.enter:
        return Cotangent.FULL
    if user.target is neutral.pend:
        return Cotangent.PENDING
    if not has_decision(user) or is_mixed(user):
        return Cotangent.PENDING
    states = {decision(result).cotangent for result in results_of(user) if has_gradient(result)}
    return Cotangent.PENDING if Cotangent.PENDING in states else Cotangent.FULL


def results_of(node: fx.Node) -> list[fx.Node]:
    """The nodes that stand for a node's tensors: itself, or the items taken of its tuple."""
    if is_tensor(node):
        return [node]
    return [user for user in node.users if user.target is operator.getitem]
