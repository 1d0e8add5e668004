"""Views: the same elements in another shape or order of dimensions. Pending sums pass through all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from cpcompile.errors import Refusal
from cpcompile.layout import Dim, Layout, multiplied, whole
from cpcompile.passes.rules.call import Answer, Call, Operand, Rule, unary
from cpcompile.reshape import reshape

aten = torch.ops.aten


def view(call: Call) -> Answer | Refusal:
    """Row-major views, whatever they are called: the local call is a reshape to the local shape."""
    operand = _only(call)
    layout = reshape(operand.layout, call.results[0].shape)
    if isinstance(layout, Refusal):
        return layout
    return Answer({"self": operand.layout}, (layout,), {"shape": layout.dims}, aten.reshape.default)


def permute(call: Call) -> Answer | Refusal:
    """Dimensions in another order."""
    order = [dim % len(call["dims"]) for dim in call["dims"]]
    return _reordered(call, order)


def transpose(call: Call) -> Answer | Refusal:
    """Two dimensions change places."""
    count = len(_only(call).dims)
    order = list(range(count))
    a, b = call["dim0"] % max(count, 1), call["dim1"] % max(count, 1)
    if count:
        order[a], order[b] = order[b], order[a]
    return _reordered(call, order)


def matrix_transpose(call: Call) -> Answer | Refusal:
    """``t``: a matrix transposed, a vector as it is."""
    return _reordered(call, list(reversed(range(len(_only(call).dims)))))


def unsqueeze(call: Call) -> Answer | Refusal:
    """A dimension of one element more."""
    layout = _only(call).layout
    index = call["dim"] % (len(layout.dims) + 1)
    return unary(call, layout, replace(layout, dims=(*layout.dims[:index], whole(1), *layout.dims[index:])))


def squeeze(call: Call) -> Answer | Refusal:
    """Dimensions of one element gone: ``squeeze.dim``, ``squeeze.dims`` and ``squeeze``."""
    layout = _only(call).layout
    count = len(layout.dims)
    named = call.arguments.get("dim", range(count))
    named = [named] if isinstance(named, int) else named
    gone = {dim % max(count, 1) for dim in named if layout.dims and layout.dims[dim % count].size == 1}
    return unary(
        call,
        layout,
        replace(layout, dims=tuple(dim for index, dim in enumerate(layout.dims) if index not in gone)),
        **({} if "dim" not in call.arguments else {"dim": call["dim"]}),
    )


def expand(call: Call) -> Answer | Refusal:
    """Dimensions of one element repeated; others as they are."""
    operand, shape = _only(call), call.results[0].shape
    shift = len(shape) - len(operand.dims)
    dims = tuple(
        operand.dims[index - shift] if index >= shift and operand.dims[index - shift].size == size else whole(size)
        for index, size in enumerate(shape)
    )
    result = replace(operand.layout, dims=dims)
    return unary(call, operand.layout, result, size=dims)


def repeat(call: Call) -> Answer | Refusal:
    """Every dimension tiled: one more outer factor."""
    operand = _only(call)
    repeats: Sequence[int] = call["repeats"]
    shift = len(repeats) - len(operand.dims)
    tiled = [
        multiplied(whole(count), operand.dims[index - shift] if index >= shift else whole(1))
        for index, count in enumerate(repeats)
    ]
    return unary(call, operand.layout, replace(operand.layout, dims=tuple(dim for dim in tiled if dim is not None)))


def repeat_interleave(call: Call) -> Answer | Refusal:
    """Every index of one dimension (or of the flattened tensor) repeated: one more inner factor."""
    operand = _only(call)
    if call["dim"] is None:
        return Refusal("it flattens its operand")
    dim, repeats = call.dim(), call["repeats"]
    repeated = multiplied(operand.dims[dim], whole(repeats))
    assert repeated is not None
    return unary(call, operand.layout, operand.layout.with_dim(dim, repeated), output_size=repeated)


def complex_view(call: Call) -> Answer | Refusal:
    """``view_as_complex`` and ``view_as_real``: the last dimension of two becomes one number, or the reverse."""
    layout = _only(call).layout
    if call.target is aten.view_as_real.default:
        return unary(call, layout, replace(layout, dims=(*layout.dims, whole(2))))
    if not layout.dims[-1].is_replicated:
        layout = layout.with_dim(len(layout.dims) - 1, whole(2))
    return unary(call, layout, replace(layout, dims=layout.dims[:-1]))


def _only(call: Call) -> Operand:
    return call.operand("self")


def _reordered(call: Call, order: Sequence[int]) -> Answer:
    layout = _only(call).layout
    dims: tuple[Dim, ...] = tuple(layout.dims[index] for index in order)
    return unary(call, layout, Layout(dims, layout.partial))


RULES: dict[torch._ops.OpOverload, Rule] = {
    **dict.fromkeys(
        (
            aten.view.default,
            aten._unsafe_view.default,
            aten.reshape.default,
            aten.flatten.using_ints,
            aten.unflatten.int,
        ),
        view,
    ),
    aten.permute.default: permute,
    aten.transpose.int: transpose,
    aten.t.default: matrix_transpose,
    aten.unsqueeze.default: unsqueeze,
    **dict.fromkeys((aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default), squeeze),
    aten.expand.default: expand,
    aten.repeat.default: repeat,
    aten.repeat_interleave.self_int: repeat_interleave,
    **dict.fromkeys((aten.view_as_complex.default, aten.view_as_real.default), complex_view),
}
