"""Sums and means: over a sharded dimension each rank sums its share, and the sum over the ranks is pending.

Other operators that work along a dimension need it whole.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from cpcompile.errors import Refusal
from cpcompile.layout import Axis, Dim, Layout, Partial, Segment, whole
from cpcompile.passes.rules.call import Answer, Call, Rule, local_only, reduced

aten = torch.ops.aten

_ALONG = (
    aten._log_softmax.default,
    aten._softmax.default,
    aten.all.dim,
    aten.amax.default,
    aten.amin.default,
    aten.any.dim,
    aten.argmax.default,
    aten.argmin.default,
    aten.cumprod.default,
    aten.cumsum.default,
    aten.flip.default,
    aten.glu.default,
    aten.linalg_vector_norm.default,
    aten.log_softmax.int,
    aten.logsumexp.default,
    aten.max.dim,
    aten.min.dim,
    aten.softmax.int,
    aten.sort.default,
    aten.std.correction,
    aten.topk.default,
    aten.var.correction,
)


def total(call: Call) -> Answer | Refusal:
    """``sum`` over some or all dimensions."""
    return _reduction(call, mean=False)


def mean(call: Call) -> Answer | Refusal:
    """``mean``: the local sum over the GLOBAL count, so that unequal shares weigh what they should."""
    return _reduction(call, mean=True)


def _reduction(call: Call, *, mean: bool) -> Answer | Refusal:
    operand = call.operand("self")
    carried = operand.layout.partial if _is_wide(call) else ()
    operand = replace(operand, layout=replace(operand.layout, partial=carried))
    over = _over(call)
    keep = bool(call.arguments.get("keepdim", False))
    axes = sorted({axis for index in over for axis in operand.dims[index].axes}, key=lambda axis: axis.name)
    mixed = [operand.dims[index] for index in sorted(over) if has_whole_part(operand.dims[index])]
    if mixed:
        return Refusal(f"it sums over ({mixed[0]}), of which every rank holds a part whole")
    partial = tuple(Partial(axis) for axis in axes)
    dims = [whole(1) if index in over else dim for index, dim in enumerate(operand.dims) if keep or index not in over]
    result = Layout(tuple(dims), (*carried, *partial))
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


def along(call: Call) -> Answer | Refusal:
    """Operators along some dimensions (softmax, maximum, sort, ...), which must be whole; all others lie as they do."""
    operand, over = reduced(call.operand("self")), _over(call)
    layout = local_only(operand.layout, sorted(over))
    results: list[Layout] = []
    for result in call.results:
        kept = len(result.shape) == len(layout.dims)
        dims = [
            whole(result.shape[index]) if index in over else dim
            for index, dim in enumerate(layout.dims)
            if kept or index not in over
        ]
        results.append(Layout(tuple(dims)))
    return Answer({"self": layout}, tuple(results))


def has_whole_part(dim: Dim) -> bool:
    """Whether ranks share some part of a sharded dim: a sum over the ranks would count it more than once."""
    return _shares_part(dim, dim.axes)


def _shares_part(dim: Dim, axes: frozenset[Axis]) -> bool:
    for part in dim.parts:
        if isinstance(part, Segment):
            if frozenset(part.axes) != axes:
                return True
        elif _shares_part(part.inner, axes - frozenset(part.outer.axes)):
            return True
    return False


def _over(call: Call) -> set[int]:
    """The dimensions along which a call works: all of them where it names none."""
    count = len(call.operand("self").dims)
    named = call.arguments.get("dims" if "dims" in call.arguments else "dim")
    if named is None or named == () or not count:
        return set(range(count))
    return {dim % count for dim in ([named] if isinstance(named, int) else named)}


def _is_wide(call: Call) -> bool:
    operand, result = call.operand("self"), call.results[0]
    same = operand.dtype.is_complex == result.dtype.is_complex
    sums = all(partial.op == "sum" for partial in operand.layout.partial)
    return same and sums and min(operand.dtype.itemsize, result.dtype.itemsize) >= 4


RULES: dict[torch._ops.OpOverload, Rule] = {
    aten.sum.default: total,
    aten.sum.dim_IntList: total,
    aten.mean.default: mean,
    aten.mean.dim: mean,
    **dict.fromkeys(_ALONG, along),
}
