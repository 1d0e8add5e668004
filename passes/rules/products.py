"""Products with weights, contractions of tensors, and normalisation over features."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

import torch

from cpcompile.errors import Refusal
from cpcompile.layout import Axis, Layout, Partial, whole
from cpcompile.passes.rules.call import Answer, Call, Operand, Rule, agree, broadcast_to, local_only, reduced
from cpcompile.passes.rules.reductions import has_whole_part
from cpcompile.sizes import Size

aten = torch.ops.aten

Labels: TypeAlias = "Sequence[str]"
"""One label a dimension, as in an einsum: equal labels are one index."""

_EQUATIONS = {
    aten.mm.default: "nk,km->nm",
    aten.bmm.default: "bnk,bkm->bnm",
    aten.mv.default: "nk,k->n",
    aten.dot.default: "k,k->",
    aten.outer.default: "n,m->nm",
}


def linear(call: Call) -> Answer | Refusal:
    """``x @ W.T + b``: tokens as they lie, features whole. Without a bias a pending sum passes."""
    operand = call.operand("input")
    layout = local_only(operand.layout, [len(operand.dims) - 1])
    if call["bias"] is not None or not _is_wide([operand]) or any(partial.op != "sum" for partial in layout.partial):
        layout = layout.reduced()
    features = call.operand("weight").shape[:-1]  # none where the weight is a vector
    return Answer({"input": layout}, (replace(layout, dims=(*layout.dims[:-1], *map(whole, features))),))


def product(call: Call) -> Answer | Refusal:
    """``mm``, ``bmm``, ``mv``, ``dot`` and ``outer``."""
    sources, target = _EQUATIONS[call.target].split("->")
    return _contraction(call, sources.split(","), target)


def matmul(call: Call) -> Answer | Refusal:
    """``matmul``: batch dimensions broadcast, a vector has no row or no column."""
    left, right = (len(operand.dims) for operand in call.operands().values())
    batch = [f"batch {index}" for index in range(max(left, right, 2) - 2)]
    rows, columns = ["n"] * (left > 1), ["m"] * (right > 1)
    sources = [
        [*batch[len(batch) - max(left - 2, 0) :], *rows, "k"],
        [*batch[len(batch) - max(right - 2, 0) :], "k", *columns],
    ]
    return _contraction(call, sources, [*batch, *rows, *columns])


def einsum(call: Call) -> Answer | Refusal:
    """``einsum`` of distinct letters."""
    sources, arrow, target = call["equation"].replace(" ", "").partition("->")
    labels = sources.split(",")
    if not arrow:
        target = "".join(sorted(letter for letter in {*sources} - {","} if sources.count(letter) == 1))
    if "." in sources or any(len({*part}) != len(part) for part in labels):
        return Refusal(f"the equation {call['equation']!r} has an ellipsis or a diagonal")
    return _contraction(call, labels, target)


def addmm(call: Call) -> Answer | Refusal:
    """``bias + a @ b``: rows and columns as they lie, the contracted dimension whole."""
    a, b = (reduced(call.operand(name)) for name in ("mat1", "mat2"))
    (left, right), result, _ = _meet([a, b], ["nk", "km"], "nm", whole_sums=True)
    bias = broadcast_to(reduced(call.operand("self")), result)
    return Answer({"self": bias, "mat1": left, "mat2": right}, (result,))


def _contraction(call: Call, sources: Sequence[Labels], target: Labels) -> Answer | Refusal:
    """Operands agree in every index; where a contracted one is sharded, the sum over the ranks is pending.

    A narrow type must not be rounded before a sum is complete: there, contracted dimensions are whole.
    """
    passed = [value for value in call.arguments.values() if isinstance(value, (Operand, tuple)) and value != ()]
    operands: list[Operand] = [x for value in passed for x in ([value] if isinstance(value, Operand) else value)]
    wide = _is_wide(operands)
    needed, result, pending = _meet([reduced(x) for x in operands], sources, target, whole_sums=not wide)
    with_sums = [x.layout.partial for x in operands if x.layout.partial]
    carried = with_sums[0] if wide and len(with_sums) == 1 else ()
    axes = {axis for layout in needed for axis in layout.axes}
    if any(partial.op != "sum" or partial.axis in axes for partial in carried):
        carried = ()
    needed = [
        replace(layout, partial=carried if x.layout.partial else ()) for x, layout in zip(operands, needed, strict=True)
    ]
    result = replace(result, partial=(*carried, *pending))
    layouts = iter(needed)
    named: dict[str, Layout | Sequence[Layout]] = {
        name: next(layouts) if isinstance(value, Operand) else [next(layouts) for _ in value]
        for name, value in call.arguments.items()
        if any(value is item for item in passed)
    }
    return Answer(named, (result,))


def _meet(
    operands: Sequence[Operand], sources: Sequence[Labels], target: Labels, *, whole_sums: bool
) -> tuple[list[Layout], Layout, list[Partial]]:
    """How operands lie to agree in all labels, how the result then does, and what is pending on it.

    A contraction is a broadcast product over all labels and a sum over those that the result lacks. Where one of
    these cannot stay sharded (``whole_sums``, or a part of it is whole), all of them are whole.
    """
    summed = sorted({label for labels in sources for label in labels} - {*target})
    every = [*target, *summed]
    placed: list[Operand] = []
    for operand, labels in zip(operands, sources, strict=True):
        own = dict(zip(labels, operand.dims, strict=True))
        dims = [
            own[label] if not (whole_sums and label in summed) else whole(own[label].size)
            for label in every
            if label in own
        ]
        present = iter(dims)
        placed.append(replace(operand, layout=Layout(tuple(next(present) if x in own else whole(1) for x in every))))
    shape = [_broadcast([operand.shape[index] for operand in placed]) for index in range(len(every))]
    common, needed = agree(placed, shape)
    if any(has_whole_part(dim) for dim in common.dims[len(target) :]):
        return _meet(operands, sources, target, whole_sums=True)
    layouts = [
        Layout(tuple(layout.dims[every.index(label)] for label in labels))
        for layout, labels in zip(needed, sources, strict=True)
    ]
    axes: set[Axis] = {axis for dim in common.dims[len(target) :] for axis in dim.axes}
    pending = [Partial(axis) for axis in sorted(axes, key=lambda axis: axis.name)]
    return layouts, Layout(common.dims[: len(target)]), pending


def _broadcast(sizes: Sequence[Size]) -> Size:
    return next((size for size in sizes if size != 1), 1)


def _is_wide(operands: Sequence[Operand]) -> bool:
    return all(operand.dtype.itemsize >= 4 for operand in operands)


def norm(call: Call) -> Answer | Refusal:
    """Layer norm and RMS norm over the last dimensions, which must be whole."""
    operand = reduced(call.operand("input"))
    count = len(operand.dims)
    layout = local_only(operand.layout, range(count - len(call["normalized_shape"]), count))
    return Answer({"input": layout}, (layout,))


RULES: dict[torch._ops.OpOverload, Rule] = {
    aten.linear.default: linear,
    **dict.fromkeys(_EQUATIONS, product),
    aten.matmul.default: matmul,
    aten.einsum.default: einsum,
    aten.addmm.default: addmm,
    **dict.fromkeys((aten.layer_norm.default, aten.rms_norm.default), norm),
}
