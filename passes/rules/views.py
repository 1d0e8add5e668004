"""Views: the same elements in another shape or order of dimensions. Pending sums pass through all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from cpcompile.errors import Refusal
from cpcompile.layout import Dim, Layout, multiplied, whole
from cpcompile.passes.rules.call import Answer, Call, Operand, Rule, unary
from cpcompile.reshape import reshape
from cpcompile.sizes import Size

aten = torch.ops.aten


def view(call: Call) -> Answer | Refusal:
    """Row-major views, whatever they are called: the local call is a reshape to the local shape."""
    layout = reshape(_only(call).layout, call.results[0].shape)
    if isinstance(layout, Refusal):
        return layout
    return Answer(_as_they_lie(call), (layout,), {"shape": layout.dims}, aten.reshape.default)


def permute(call: Call) -> Answer | Refusal:
    """Dimensions in another order."""
    order = [dim % len(call["dims"]) for dim in call["dims"]]
    return _reordered(call, order)


def transpose(call: Call) -> Answer | Refusal:
    """Two dimensions change places."""
    count = len(_only(call).dims)
    order = list(range(count))
    first, second = (value for value in call.arguments.values() if isinstance(value, int))
    if count:
        order[first], order[second] = order[second], order[first]
    return _reordered(call, order)


def movedim(call: Call) -> Answer | Refusal:
    """Some dimensions at new places, the others in their order around them."""
    count = len(_only(call).dims)
    source, destination = (_positions(call[name], count) for name in ("source", "destination"))
    placed = dict(zip(destination, source, strict=True))
    others = iter(index for index in range(count) if index not in source)
    return _reordered(call, [placed[index] if index in placed else next(others) for index in range(count)])


def reverse(call: Call) -> Answer | Refusal:
    """All dimensions in reverse: ``t`` (of a matrix or vector) and ``.T``."""
    return _reordered(call, list(reversed(range(len(_only(call).dims)))))


def matrix_transpose(call: Call) -> Answer | Refusal:
    """``.mT``: the last two dimensions change places."""
    count = len(_only(call).dims)
    return _reordered(call, [*range(count - 2), count - 1, count - 2])


def unsqueeze(call: Call) -> Answer | Refusal:
    """A dimension of one element more."""
    layout = _only(call).layout
    index = call["dim"] % (len(layout.dims) + 1)
    return unary(call, layout, replace(layout, dims=(*layout.dims[:index], whole(1), *layout.dims[index:])))


def squeeze(call: Call) -> Answer | Refusal:
    """Dimensions of one element gone: ``squeeze.dim``, ``squeeze.dims`` and ``squeeze``.

    The local call names them: a rank's share of a larger dimension can have one element too.
    """
    layout = _only(call).layout
    count = len(layout.dims)
    named = _positions(call.arguments.get("dim", range(count)), count) if count else []
    gone = tuple(sorted(index for index in named if layout.dims[index].size == 1))
    dims = tuple(dim for index, dim in enumerate(layout.dims) if index not in gone)
    return Answer({"self": layout}, (replace(layout, dims=dims),), {"dim": gone}, aten.squeeze.dims)


def expand(call: Call) -> Answer | Refusal:
    """Dimensions of one element repeated; others as they are."""
    operand, shape = _only(call), call.results[0].shape
    shift = len(shape) - len(operand.dims)
    dims = tuple(
        operand.dims[index - shift] if index >= shift and operand.dims[index - shift].size == size else whole(size)
        for index, size in enumerate(shape)
    )
    result = replace(operand.layout, dims=dims)
    return Answer(_as_they_lie(call), (result,), {"size": dims}, aten.expand.default)


def repeat(call: Call) -> Answer | Refusal:
    """Every dimension tiled: one more outer factor."""
    operand = _only(call)
    repeats: Sequence[Size] = call["dims"] if call.target is aten.tile.default else call["repeats"]
    repeats = (*(1,) * (len(operand.dims) - len(repeats)), *repeats)
    shift = len(repeats) - len(operand.dims)
    tiled = [
        multiplied(whole(count), operand.dims[index - shift] if index >= shift else whole(1))
        for index, count in enumerate(repeats)
    ]
    return unary(call, operand.layout, replace(operand.layout, dims=tuple(dim for dim in tiled if dim is not None)))


def repeat_interleave(call: Call) -> Answer | Refusal:
    """Every index of one dimension (or of the flattened tensor) repeated: one more inner factor."""
    operand = _only(call)
    if call["dim"] is None and len(operand.dims) != 1:
        return Refusal("it flattens its operand")
    dim, repeats = 0 if call["dim"] is None else call.dim(), call["repeats"]
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


def _as_they_lie(call: Call) -> dict[str, Layout]:
    """Nothing is asked of any operand: the view is of the first, another one only lends its shape."""
    return {name: operand.layout for name, operand in call.operands().items()}


def _positions(dims: int | Sequence[int], count: int) -> list[int]:
    """Dimension arguments counted from the front."""
    return [dim % count for dim in ([dims] if isinstance(dims, int) else dims)]


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
            aten.ravel.default,
            aten.view_as.default,
            aten.reshape_as.default,
        ),
        view,
    ),
    aten.permute.default: permute,
    **dict.fromkeys((aten.transpose.int, aten.swapaxes.default, aten.swapdims.default), transpose),
    **dict.fromkeys((aten.movedim.int, aten.movedim.intlist, aten.moveaxis.int, aten.moveaxis.intlist), movedim),
    **dict.fromkeys((aten.t.default, aten.numpy_T.default), reverse),
    aten.mT.default: matrix_transpose,
    aten.unsqueeze.default: unsqueeze,
    **dict.fromkeys((aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default), squeeze),
    **dict.fromkeys((aten.expand.default, aten.expand_as.default), expand),
    **dict.fromkeys((aten.repeat.default, aten.tile.default), repeat),
    aten.repeat_interleave.self_int: repeat_interleave,
    **dict.fromkeys((aten.view_as_complex.default, aten.view_as_real.default), complex_view),
}
