"""Tensors joined and cut along a dimension: cat, stack, split, slice, select. Layouts are cut where tensors are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from cpcompile.errors import Refusal
from cpcompile.layout import Dim, Layout, whole
from cpcompile.passes.rules.call import Answer, Call, Operand, Rule, agree, local_only, reduced, unary
from cpcompile.reshape import cut, meet
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
    common = _around([reduced(tensor) for tensor in tensors], dim)
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
    arguments = _index(call, layout.dims[dim])
    if isinstance(arguments, Refusal):
        return arguments
    return unary(call, layout, replace(layout, dims=(*layout.dims[:dim], *layout.dims[dim + 1 :])), **arguments)


def select_scatter(call: Call) -> Answer | Refusal:
    """A tensor with one index of a dimension overwritten: base and source agree everywhere else."""
    base, dim = reduced(call.operand("self")), call.dim()
    source = reduced(call.operand("src"))
    own = base.dims[dim]
    placed = replace(source, layout=replace(source.layout, dims=(*source.dims[:dim], whole(1), *source.dims[dim:])))
    common = _around([base, placed], dim)
    own = whole(own.size) if own.axes & common.axes else own
    arguments = _index(call, own)
    if isinstance(arguments, Refusal):
        return arguments
    result = common.with_dim(dim, own)
    source_layout = Layout((*common.dims[:dim], *common.dims[dim + 1 :]))
    return Answer({"self": result, "src": source_layout}, (result,), arguments)


def _index(call: Call, own: Dim) -> dict[str, Dim] | Refusal:
    """The local form of the index argument, into a segment that every rank holds."""
    if own.is_replicated:
        return {}
    index = call["index"]
    negative = at_most(index, -1)
    if negative is None:
        return Refusal(f"the sign of its symbolic index {index} is not known")
    index = add(own.size, index) if negative else index
    here, before = cut(own, index, add(index, 1)), cut(own, 0, index)
    if isinstance(here, Refusal) or isinstance(before, Refusal):
        return Refusal(f"index {index} of the sharded dimension ({own})")
    return {"index": before}


def slice_(call: Call) -> Answer | Refusal:
    """A range of a dimension; with a step, of a dimension that is whole."""
    layout, dim = call.operand("self").layout, call.dim()
    own = layout.dims[dim]
    found = _range(call, own)
    if isinstance(found, Refusal):
        return found
    piece, arguments = found
    return unary(call, layout, layout.with_dim(dim, piece), **arguments)


def narrow(call: Call) -> Answer | Refusal:
    """A range given by its length: a slice."""
    layout, dim, start = call.operand("self").layout, call.dim(), call["start"]
    own = layout.dims[dim]
    negative = at_most(start, -1)
    if negative is None:
        return Refusal(f"the sign of its symbolic start {start} is not known")
    start = add(own.size, start) if negative else start
    before, piece = cut(own, 0, start), cut(own, start, add(start, call["length"]))
    if isinstance(before, Refusal) or isinstance(piece, Refusal):
        return Refusal(f"{call['length']} indices from {start} of the sharded dimension ({own})")
    arguments = {"dim": dim, "start": before, "end": Dim.of(before, piece)}
    return Answer({"self": layout}, (layout.with_dim(dim, piece),), arguments, aten.slice.Tensor)


def slice_scatter(call: Call) -> Answer | Refusal:
    """A tensor with a range of one dimension overwritten: base and source agree, also within the range.

    With a step both are whole along that dimension.
    """
    base, source, dim = reduced(call.operand("self")), reduced(call.operand("src")), call.dim()
    common = _around([base, source], dim)
    own, given = (whole(x.shape[dim]) if x.dims[dim].axes & common.axes else x.dims[dim] for x in (base, source))
    if call["step"] != 1:
        result = common.with_dim(dim, whole(own.size))
        return Answer({"self": result, "src": common.with_dim(dim, whole(given.size))}, (result,))
    found = _written(call, own, given)
    if isinstance(found, Refusal):
        return found
    before, piece, after = found
    result = common.with_dim(dim, Dim.of(before, piece, after))
    arguments = {} if result.dims[dim].is_replicated else {"start": before, "end": Dim.of(before, piece)}
    return Answer({"self": result, "src": common.with_dim(dim, piece)}, (result,), arguments)


def _written(call: Call, own: Dim, given: Dim) -> tuple[Dim, Dim, Dim] | Refusal:
    """The written dimension before, within and after the range: within, what either side holds whole is sliced."""
    bounds = _bounds(call, own.size)
    if isinstance(bounds, Refusal):
        return bounds
    start, stop = bounds
    if at_most(stop, start):
        return whole(0), whole(0), own
    before, piece, after = cut(own, 0, start), cut(own, start, stop), cut(own, stop, own.size)
    for part in (before, piece, after):
        if isinstance(part, Refusal):
            return part
    assert isinstance(before, Dim)
    assert isinstance(piece, Dim)
    assert isinstance(after, Dim)
    met = meet(piece, given)
    return before, piece if isinstance(met, Refusal) else met, after


def _around(tensors: Sequence[Operand], dim: int) -> Layout:
    """How tensors agree in all dimensions but one, which counts as one element."""
    shape = [1 if index == dim else size for index, size in enumerate(tensors[0].shape)]
    return agree([_with_dim(tensor, dim, 1) for tensor in tensors], shape)[0]


def _range(call: Call, own: Dim) -> tuple[Dim, dict[str, Dim]] | Refusal:
    """What ``start:end:step`` of a call keeps of a dim, and the local bounds."""
    bounds = _bounds(call, own.size)
    if isinstance(bounds, Refusal):
        return bounds
    start, stop = bounds
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
    before = cut(own, 0, start)
    if isinstance(before, Refusal):
        return before
    return piece, {"start": before, "end": Dim.of(before, piece)}


def _bounds(call: Call, size: Size) -> tuple[Size, Size] | Refusal:
    """Start and end of a slice of ``size`` indices, counted from the front and clamped."""
    start, stop = _bound(call["start"], 0, size), _bound(call["end"], size, size)
    if start is None or stop is None:
        return Refusal("the order of its symbolic bounds is not known")
    return start, stop


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
    **dict.fromkeys((aten.cat.default, aten.concat.default, aten.concatenate.default), cat),
    aten.stack.default: stack,
    **dict.fromkeys(
        (
            aten.split.Tensor,
            aten.split.sizes,
            aten.split_with_sizes.default,
            aten.chunk.default,
            aten.unsafe_split.Tensor,
            aten.unsafe_chunk.default,
            aten.tensor_split.sections,
            aten.tensor_split.indices,
        ),
        split,
    ),
    aten.unbind.int: unbind,
    aten.select.int: select,
    aten.select_scatter.default: select_scatter,
    aten.slice.Tensor: slice_,
    aten.narrow.default: narrow,
    aten.slice_scatter.default: slice_scatter,
}
