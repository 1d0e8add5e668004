"""Sums and means: over a sharded dimension each rank sums its share, and the sum over the ranks is pending."""

from __future__ import annotations

import torch

from cpcompile.errors import Refusal
from cpcompile.layout import Dim, Layout, Partial, Segment, whole
from cpcompile.passes.rules.call import Answer, Call, Rule, reduced

aten = torch.ops.aten


def total(call: Call) -> Answer | Refusal:
    """``sum`` over some or all dimensions."""
    return _reduction(call, mean=False)


def mean(call: Call) -> Answer | Refusal:
    """``mean``: the local sum over the GLOBAL count, so that unequal shares weigh what they should."""
    return _reduction(call, mean=True)


def _reduction(call: Call, *, mean: bool) -> Answer | Refusal:
    operand = reduced(call.operand("self"))
    count = len(operand.dims)
    named = call.arguments.get("dim")
    over = {dim % count for dim in ([named] if isinstance(named, int) else named)} if named else set(range(count))
    keep = bool(call.arguments.get("keepdim", False))
    axes = sorted({axis for index in over for axis in operand.dims[index].axes}, key=lambda axis: axis.name)
    mixed = [operand.dims[index] for index in sorted(over) if _has_whole_part(operand.dims[index])]
    if mixed:
        return Refusal(f"it sums over ({mixed[0]}), of which every rank holds a part whole")
    partial = tuple(Partial(axis) for axis in axes)
    dims = [
        whole(1) if index in over else dim for index, dim in enumerate(operand.dims) if keep or index not in over
    ]
    result = Layout(tuple(dims), partial)
    if not partial:
        return Answer({"self": operand.layout}, (result,))
    # The op that keeps what is pending in fp32 where the tensor is narrower: rounded once, when it is complete.
    shape = call.operand("self").shape
    arguments = {
        "dim": tuple(sorted(over)),
        "keepdim": keep,
        "count": tuple(shape[index] for index in sorted(over)) if mean else (),
        "dtype": call.results[0].dtype,
    }
    return Answer({"self": operand.layout}, (result,), arguments, torch.ops.cpcompile.partial_sum.default)


def _has_whole_part(dim: Dim) -> bool:
    """Whether ranks share some part of a sharded dim: a sum over the ranks would count it more than once."""
    return any(
        frozenset(part.axes if isinstance(part, Segment) else {*part.outer.axes, *part.inner.axes}) != dim.axes
        for part in dim.parts
    )


RULES: dict[torch._ops.OpOverload, Rule] = {
    aten.sum.default: total,
    aten.sum.dim_IntList: total,
    aten.mean.default: mean,
    aten.mean.dim: mean,
}
