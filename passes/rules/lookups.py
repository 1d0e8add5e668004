"""Lookups by index tensors: results lie as the indices do, the dimension that is looked up in is whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from cpcompile.errors import Refusal
from cpcompile.layout import Layout, whole
from cpcompile.passes.rules.call import Answer, Call, Operand, Rule, agree, local_only, reduced

aten = torch.ops.aten


def embedding(call: Call) -> Answer | Refusal:
    """Rows of a table that every rank holds."""
    if call["scale_grad_by_freq"]:
        return Refusal("its gradient counts the indices of all ranks")
    indices = reduced(call.operand("indices")).layout
    return Answer({"indices": indices}, (Layout((*indices.dims, whole(call.results[0].shape[-1]))),))


def index_select(call: Call) -> Answer | Refusal:
    """Indices of one dimension in any order."""
    layout, dim, index = call.operand("self").layout, call.dim(), reduced(call.operand("index")).layout
    if not layout.dims:
        return Refusal("it takes indices of a scalar")
    layout = local_only(layout, [dim])
    if index.axes & _busy(layout) or not index.dims:
        index = Layout.replicated(index.shape)
    taken = index.dims[0] if index.dims else whole(1)
    return Answer({"self": layout, "index": index}, (layout.with_dim(dim, taken),))


def gather(call: Call) -> Answer | Refusal:
    """``out[i][j] = self[i][index[i][j]]``: both agree in all dimensions but one."""
    operand, index, dim = reduced(call.operand("self")), reduced(call.operand("index")), call.dim()
    count = len(operand.dims)
    if not count or any(operand.shape[i] != index.shape[i] for i in range(count) if i != dim):
        return Refusal("the indices are fewer than the elements in a dimension that is not looked up in")
    table = replace(operand, layout=local_only(operand.layout, [dim]))
    entries = replace(index, layout=index.layout.with_dim(dim, whole(1)))
    one = replace(table, layout=table.layout.with_dim(dim, whole(1)))
    common, _ = agree([one, entries], entries.shape)
    own = index.dims[dim] if not index.dims[dim].axes & common.axes else whole(index.shape[dim])
    result = common.with_dim(dim, own)
    return Answer({"self": common.with_dim(dim, table.dims[dim]), "index": result}, (result,))


def index(call: Call) -> Answer | Refusal:
    """``x[rows, columns]``: the index tensors agree; the dimensions that they look up in are whole."""
    layout: Layout = call.operand("self").layout
    passed: Sequence[Operand | None] = call["indices"]
    where = [position for position, tensor in enumerate(passed) if tensor is not None]
    tensors = [reduced(tensor) for tensor in passed if tensor is not None]
    if any(tensor.dtype in (torch.bool, torch.uint8) for tensor in tensors):
        return Refusal("how many elements a mask selects depends on its values")
    layout = local_only(layout, where)
    kept = [dim for position, dim in enumerate(layout.dims) if position not in where]
    ahead = where[0] if where[-1] - where[0] == len(where) - 1 else 0
    looked_up = len(call.results[0].shape) - len(kept)
    shape = call.results[0].shape[ahead : ahead + looked_up]
    busy = _busy(layout)
    free = [x if not x.layout.axes & busy else replace(x, layout=Layout.replicated(x.shape)) for x in tensors]
    common, needed = agree(free, shape)
    layouts = iter(needed)
    operands = [Layout(()) if tensor is None else next(layouts) for tensor in passed]
    result = replace(layout, dims=(*kept[:ahead], *common.dims, *kept[ahead:]))
    return Answer({"self": layout, "indices": operands}, (result,))


def _busy(layout: Layout) -> frozenset[object]:
    """The axes that divide a tensor or that it is pending over."""
    return layout.axes | {partial.axis for partial in layout.partial}


RULES: dict[torch._ops.OpOverload, Rule] = {
    aten.embedding.default: embedding,
    aten.index_select.default: index_select,
    aten.gather.default: gather,
    aten.index.Tensor: index,
}
