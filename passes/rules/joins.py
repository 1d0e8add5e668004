"""Tensors joined and cut along a dimension: cat, stack, split, slice, select. Layouts are cut where tensors are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from cpcompile.errors import Refusal
from cpcompile.layout import Dim, Layout, whole
from cpcompile.passes.rules.call import Answer, Call, Operand, Rule, agree, local_only, reduced, unary
from cpcompile.reshape import cut
from cpcompile.sizes import Size, add, at_most, ceil_div, subtract

aten = torch.ops.aten


def cat(call: Call) -> Answer | Refusal:
    """Tensors in a row: sharded ones stay so, and each rank's result is its shards in a row."""
    tensors: Sequence[Operand] = call["tensors"]
    dim = call.dim(of=len(call.results[0].shape))
    if any(len(tensor.dims) != len(call.results[0].shape) for tensor in tensors):
        return Refusal("it joins tensors of different rank")
    pending = {tensor.layout.partial for tensor in tensors}
    partial = pending.pop() if len(pending) == 1 else ()
    around = [replace(tensor, layout=local_only(tensor.layout.reduced(), [dim])) for tensor in tensors]
    shape = [1 if index == dim else size for index, size in enumerate(call.results[0].shape)]
    common, _ = agree([_with_dim(tensor, dim, 1) for tensor in around], shape)
    elsewhere = common.axes
    joined = [
        tensor.dims[dim] if not tensor.dims[dim].axes & elsewhere else whole(tensor.dims[dim].size)
        for tensor in tensors
    ]
    operands = [Layout(common.with_dim(dim, own).dims, partial) for own in joined]
    return Answer({"tensors": operands}, (Layout(common.with_dim(dim, Dim.of(*joined)).dims, partial),))


def stack(call: Call) -> Answer | Refusal:
    """Tensors along a new dimension."""
    tensors: Sequence[Operand] = call["tensors"]
    pending = {tensor.layout.partial for tensor in tensors}
    partial = pending.pop() if len(pending) == 1 else ()
    common, _ = agree([reduced(tensor) for tensor in tensors], tensors[0].shape)
    layout = Layout(common.dims, partial)
    dim = call.dim(of=len(call.results[0].shape))
    dims = (*layout.dims[:dim], whole(len(tensors)), *layout.dims[dim:])
    return Answer({"tensors": [layout] * len(tensors)}, (Layout(dims, partial),))


def split(call: Call) -> Answer | Refusal:
    """``split``, ``split_with_sizes`` and ``chunk``: the local call splits into the local sizes of the pieces."""
    operand, dim = call.operand("self"), call.dim()
    pieces: list[Dim] = []
    start: Size = 0
    for result in call.results:
        stop = add(start, result.shape[dim])
        piece = cut(operand.dims[dim], start, stop)
        if isinstance(piece, Refusal):
            return piece
        pieces.append(piece)
        start = stop
    results = tuple(operand.layout.with_dim(dim, piece) for piece in pieces)
    arguments = {"split_sizes": tuple(pieces), "dim": dim}
    return Answer({"self": operand.layout}, results, arguments, aten.split_with_sizes.default)


def unbind(call: Call) -> Answer | Refusal:
    """One result for each index of a dimension, which must be whole."""
    layout = local_only(call.operand("self").layout, [call.dim()])
    dim = call.dim()
    result = replace(layout, dims=(*layout.dims[:dim], *layout.dims[dim + 1 :]))
    return Answer({"self": layout}, (result,) * len(call.results))


def select(call: Call) -> Answer | Refusal:
    """One index of a dimension, inside a segment that every rank holds."""
    layout, dim = call.operand("self").layout, call.dim()
    own = layout.dims[dim]
    index = call["index"] if at_most(0, call["index"]) else add(own.size, call["index"])
    if own.is_replicated:
        arguments = {}
    else:
        here, before = cut(own, index, add(index, 1)), cut(own, 0, index)
        if isinstance(here, Refusal) or isinstance(before, Refusal):
            return Refusal(f"index {index} of the sharded dimension ({own})")
        arguments = {"index": before}
    return unary(call, layout, replace(layout, dims=(*layout.dims[:dim], *layout.dims[dim + 1 :])), **arguments)


def slice_(call: Call) -> Answer | Refusal:
    """A range of a dimension; with a step, of a dimension that is whole."""
    layout, dim = call.operand("self").layout, call.dim()
    own = layout.dims[dim]
    found = _range(call, own)
    if isinstance(found, Refusal):
        return found
    piece, arguments = found
    return unary(call, layout, layout.with_dim(dim, piece), **arguments)


def slice_scatter(call: Call) -> Answer | Refusal:
    """A tensor with a range of one dimension overwritten: base and source agree everywhere else."""
    base, source, dim = call.operand("self"), call.operand("src"), call.dim()
    base, source = reduced(base), reduced(source)
    own = base.dims[dim]
    found = _range(call, own)
    if isinstance(found, Refusal):
        return found
    piece, arguments = found
    around = [_with_dim(base, dim, 1), _with_dim(source, dim, 1)]
    common, _ = agree(around, [1 if i == dim else size for i, size in enumerate(base.shape)])
    if common.axes & own.axes:
        return Refusal(f"the source is sharded over the axes of the written dimension ({own})")
    result = common.with_dim(dim, own)
    return Answer({"self": result, "src": common.with_dim(dim, piece)}, (result,), arguments)


def _range(call: Call, own: Dim) -> tuple[Dim, dict[str, Dim]] | Refusal:
    """What ``start:end:step`` of a call keeps of a dim, and the local bounds."""
    start = _bound(call["start"], 0, own.size)
    stop = _bound(call["end"], own.size, own.size)
    if start is None or stop is None:
        return Refusal("the order of its symbolic bounds is not known")
    step = call["step"]
    if step != 1:
        if not own.is_replicated:
            return Refusal(f"a step of {step} through the sharded dimension ({own})")
        length = subtract(stop, start)
        return whole(ceil_div(length, step) if at_most(0, length) else 0), {}
    if at_most(stop, start):
        return whole(0), {} if own.is_replicated else {"start": whole(0), "end": whole(0)}
    piece = cut(own, start, stop)
    if isinstance(piece, Refusal):
        return piece
    if own.is_replicated:
        return piece, {}
    before, until = cut(own, 0, start), cut(own, 0, stop)
    assert isinstance(before, Dim) and isinstance(until, Dim)
    return piece, {"start": before, "end": until}


def _bound(value: Size | None, default: Size, size: Size) -> Size | None:
    """A bound of a slice, counted from the front and clamped as slicing does."""
    if value is None:
        return default
    if isinstance(value, int) and value >= 2**62:
        return size
    negative = at_most(value, -1)
    if negative is None:
        return None
    if negative:
        value = add(size, value)
        return value if at_most(0, value) else 0 if at_most(value, 0) else None
    return value if at_most(value, size) else size if at_most(size, value) else None


def _with_dim(operand: Operand, dim: int, size: Size) -> Operand:
    return replace(operand, layout=operand.layout.with_dim(dim, whole(size)))


RULES: dict[torch._ops.OpOverload, Rule] = {
    **dict.fromkeys((aten.cat.default, aten.concat.default), cat),
    aten.stack.default: stack,
    **dict.fromkeys((aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default), split),
    aten.unbind.int: unbind,
    aten.select.int: select,
    aten.slice.Tensor: slice_,
    aten.slice_scatter.default: slice_scatter,
}
