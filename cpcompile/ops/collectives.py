"""Lowered operators: this rank's part of a reshard, each one an autograd function made of functional collectives.

They are composite (CompositeImplicitAutograd), so they stay whole in a captured graph while AOTAutograd and inductor
see the collectives inside, forward and backward. Every backward is the transpose of the forward for cotangents whose
sum over the ranks is the gradient (pending), or the free form for cotangents equal on all ranks (full).

A block list describes boxes of tensors as flat ints: for each box, start and length of every dimension.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed._functional_collectives  # registers the functional collectives' autograd and fakes

from cpcompile.ops.neutral import accumulation_dtype

_lib = torch.library.Library("cpcompile", "FRAGMENT")
_c10d = torch.ops._c10d_functional

Box = tuple[Sequence[int], Sequence[int]]


def all_reduce_sum(x: torch.Tensor, group: str) -> torch.Tensor:
    """The sum over a group; fp16 and bf16 travel in fp32 and are rounded once."""
    wide = x.to(accumulation_dtype(x.dtype)).contiguous()
    summed: torch.Tensor = _c10d.wait_tensor(_c10d.all_reduce(wide, "sum", group))
    return summed.to(x.dtype)


def _boxes(flat: Sequence[int], counts: Sequence[int], ndims: Sequence[int], group_size: int) -> list[list[list[Box]]]:
    """For each tensor and each peer the boxes in ``flat``."""
    found: list[list[list[Box]]] = []
    at = 0
    for tensor, ndim in enumerate(ndims):
        by_peer: list[list[Box]] = []
        for peer in range(group_size):
            boxes: list[Box] = []
            for _ in range(counts[tensor * group_size + peer]):
                boxes.append((flat[at : at + 2 * ndim : 2], flat[at + 1 : at + 2 * ndim : 2]))
                at += 2 * ndim
            by_peer.append(boxes)
        found.append(by_peer)
    return found


def _take(x: torch.Tensor, box: Box) -> torch.Tensor:
    for dim, (start, length) in enumerate(zip(*box, strict=True)):
        if length is not x.shape[dim]:
            x = x.narrow(dim, start, length)
    return x


def _numel(box: Box) -> int:
    numel = 1
    for length in box[1]:
        numel = numel * length
    return numel


def _pack(tensors: Sequence[torch.Tensor], boxes: list[list[list[Box]]], peer: int) -> Iterator[torch.Tensor]:
    for tensor, by_peer in zip(tensors, boxes, strict=True):
        for box in by_peer[peer]:
            yield _take(tensor, box).reshape(-1)


def _sizes(boxes: list[list[list[Box]]], peer: int) -> int:
    return sum(_numel(box) for by_peer in boxes for box in by_peer[peer])


def _all_to_all(
    tensors: Sequence[torch.Tensor], send: list[list[list[Box]]], receive: list[list[list[Box]]], rank: int, group: str
) -> list[torch.Tensor]:
    """One packed exchange: the flat buffer that came from each peer. What a rank keeps does not travel."""
    peers = range(len(send[0]))
    pieces = [piece for peer in peers if peer != rank for piece in _pack(tensors, send, peer)]
    buffer = torch.cat(pieces) if pieces else tensors[0].new_empty(0)
    out_sizes = [0 if peer == rank else _sizes(receive, peer) for peer in peers]
    in_sizes = [0 if peer == rank else _sizes(send, peer) for peer in peers]
    received = _c10d.wait_tensor(_c10d.all_to_all_single(buffer, out_sizes, in_sizes, group))
    return list(received.split_with_sizes(out_sizes))


def _place(
    outs: Sequence[torch.Tensor], boxes: list[list[list[Box]]], peer: int, buffer: torch.Tensor, *, add: bool
) -> None:
    at = 0
    for out, by_peer in zip(outs, boxes, strict=True):
        for box in by_peer[peer]:
            numel = _numel(box)
            piece = buffer.narrow(0, at, numel).reshape(tuple(box[1]))
            at = at + numel
            view = _take(out, box)
            if add:
                view.add_(piece)
            else:
                view.copy_(piece)


def _keep(
    outs: Sequence[torch.Tensor],
    to: list[list[list[Box]]],
    tensors: Sequence[torch.Tensor],
    of: list[list[list[Box]]],
    rank: int,
) -> None:
    for out, targets, tensor, sources in zip(outs, to, tensors, of, strict=True):
        for target, source in zip(targets[rank], sources[rank], strict=True):
            _take(out, target).copy_(_take(tensor, source))


class _Exchange(torch.autograd.Function):
    """A packed exchange of blocks between the ranks of a group."""

    @staticmethod
    def forward(ctx: Any, spec: tuple[Any, ...], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        shapes, flat_send, flat_receive, counts_send, counts_receive, group_size, rank, group, full, alike = spec
        ndims = [tensor.dim() for tensor in tensors]
        send = _boxes(flat_send, counts_send, ndims, group_size)
        receive = _boxes(flat_receive, counts_receive, ndims, group_size)
        outs: list[torch.Tensor] = []
        at = 0
        for tensor in tensors:
            outs.append(tensor.new_empty(tuple(shapes[at : at + tensor.dim()])))
            at += tensor.dim()
        if alike:
            flat = torch.cat([piece.reshape(-1) for piece in _pack(tensors, send, rank)])
            gathered = _c10d.wait_tensor(_c10d.all_gather_into_tensor(flat, group_size, group))
            buffers = list(gathered.reshape(group_size, -1).unbind(0))
        else:
            buffers = _all_to_all(tensors, send, receive, rank, group)
        for peer in range(group_size):
            if peer != rank:
                _place(outs, receive, peer, buffers[peer], add=False)
        _keep(outs, receive, tensors, send, rank)
        ctx.plan = (send, receive, group_size, rank, group, full, alike)
        ctx.shapes = [tensor.shape for tensor in tensors]
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        send, receive, group_size, rank, group, full, alike = ctx.plan
        outs = [grad.new_zeros(shape) for grad, shape in zip(grads, ctx.shapes, strict=True)]
        _keep(outs, send, grads, receive, rank)
        if full:  # every rank holds the same cotangent of the whole: mine is my slice of it
            return None, *outs
        dtype = grads[0].dtype
        wide = accumulation_dtype(dtype)
        if alike:
            rows = [
                torch.cat([piece.reshape(-1) for piece in _pack(grads, receive, peer)]) for peer in range(group_size)
            ]
            stacked = torch.cat(rows).to(wide)
            summed = _c10d.wait_tensor(_c10d.reduce_scatter_tensor(stacked, "sum", group_size, group))
            _place(outs, send, rank, summed.to(dtype), add=False)
            return None, *outs
        buffers = _all_to_all(grads, receive, send, rank, group)
        sums = [out.to(wide) for out in outs]
        for peer in range(group_size):
            if peer != rank:
                _place(sums, send, peer, buffers[peer].to(wide), add=True)
        return None, *(total.to(dtype) for total in sums)


def _exchange(
    tensors: Sequence[torch.Tensor],
    shapes: Sequence[int],
    send: Sequence[int],
    receive: Sequence[int],
    send_counts: Sequence[int],
    receive_counts: Sequence[int],
    group_size: int,
    rank: int,
    group: str,
    full: bool,
    alike: bool,
) -> list[torch.Tensor]:
    spec = (shapes, send, receive, send_counts, receive_counts, group_size, rank, group, full, alike)
    return list(_Exchange.apply(spec, *tensors))


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: str, full: bool, dtype: torch.dtype) -> torch.Tensor:
        ctx.group, ctx.full, ctx.dtype = group, full, x.dtype
        return all_reduce_sum(x, group).to(dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad = grad.to(ctx.dtype)
        return (grad if ctx.full else all_reduce_sum(grad, ctx.group)), None, None, None


def _all_reduce(x: torch.Tensor, group: str, full: bool, dtype: torch.dtype) -> torch.Tensor:
    result: torch.Tensor = _AllReduce.apply(x, group, full, dtype)
    return result


class _Enter(torch.autograd.Function):
    """Where values that every rank holds enter the ranks' program: their gradients become whole in one bucket."""

    @staticmethod
    def forward(ctx: Any, group: str, reduce: bool, scale: float, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.group, ctx.reduce, ctx.scale = group, reduce, scale
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        found = list(grads)
        if ctx.reduce:
            summed = all_reduce_sum(torch.cat([grad.reshape(-1) for grad in grads]), ctx.group)
            pieces = summed.split_with_sizes([grad.numel() for grad in grads])
            found = [piece.reshape(grad.shape) for piece, grad in zip(pieces, grads, strict=True)]
        if ctx.scale != 1.0:
            found = [grad * ctx.scale for grad in found]
        return None, None, None, *found


def _enter_sum(tensors: Sequence[torch.Tensor], group: str, reduce: bool, scale: float) -> list[torch.Tensor]:
    return list(_Enter.apply(group, reduce, scale, *tensors))


class _Pend(torch.autograd.Function):
    """A full cotangent becomes pending: it is kept on one rank, zero elsewhere."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, keep: bool) -> torch.Tensor:
        ctx.keep = keep
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return (grad if ctx.keep else torch.zeros_like(grad)), None


def _pend_on_one(x: torch.Tensor, keep: bool) -> torch.Tensor:
    result: torch.Tensor = _Pend.apply(x, keep)
    return result


_lib.define(
    "exchange_blocks(Tensor[] tensors, SymInt[] shapes, SymInt[] send, SymInt[] receive, int[] send_counts, "
    "int[] receive_counts, int group_size, int rank, str group, bool full, bool alike) -> Tensor[]"
)
_lib.define("all_reduce_sum(Tensor x, str group, bool full, ScalarType dtype) -> Tensor")
_lib.define("enter_sum(Tensor[] tensors, str group, bool reduce, float scale) -> Tensor[]")
_lib.define("pend_on_one(Tensor x, bool keep) -> Tensor")
_lib.impl("exchange_blocks", _exchange, "CompositeImplicitAutograd")
_lib.impl("all_reduce_sum", _all_reduce, "CompositeImplicitAutograd")
_lib.impl("enter_sum", _enter_sum, "CompositeImplicitAutograd")
_lib.impl("pend_on_one", _pend_on_one, "CompositeImplicitAutograd")

exchange_blocks = torch.ops.cpcompile.exchange_blocks.default
all_reduce = torch.ops.cpcompile.all_reduce_sum.default
enter_sum = torch.ops.cpcompile.enter_sum.default
pend_on_one = torch.ops.cpcompile.pend_on_one.default
