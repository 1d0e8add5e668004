"""Attention of this rank's queries to keys that lie over the ranks of a group: one operator, forward and backward.

``rotation`` says how keys and values travel (Ring Attention, Liu et al. 2023):

    allgather   all at once; this rank's own block is computed meanwhile, then one call over the rest, one merge
    alltoall    from neighbour to neighbour; the next block travels while this one is computed, and two are alive
    merge       not at all: every rank holds the same queries, attends to its own keys, and results are merged

Keys that every rank holds (resident) join once: with a rank's own block, for ``merge`` on the first rank alone. The
backward works block by block from the global output and log-sum-exp (LSE), which is exact. A group of one rank is
attention by positions, without communication. Query head i uses key/value head ``(i + offset) // repeat`` where a
repeat is given, else heads are shared as SDPA has it.

Legend: B batch, H heads, K key/value heads, T query rows, S keys, D head dim of q and k, E that of v.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from cpcompile.blocks import Run
from cpcompile.heads import HeadMap
from cpcompile.ops.collectives import all_reduce_sum
from cpcompile.ops.kernels import Mask
from cpcompile.ops.running import Gradients, Output
from cpcompile.ops.travel import Block, Travel
from cpcompile.ring import Ring, ring_of

_lib = torch.library.Library("cpcompile", "FRAGMENT")


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, spec: tuple[Ring, str, float | None, bool, bool, HeadMap], q: Any, k: Any, v: Any, mask: Mask
    ) -> torch.Tensor:
        ring, group, scale, wide, shared, heads = spec
        output = Output(ring, q, v, mask, scale, heads, wide)
        own = Block(k, k if shared else v)
        if ring.rotation == "merge":
            output.add(ring.here(), {ring.rank: own})
            output.merge_ranks(group)
        else:
            travel = Travel(ring, group, own, shared)
            travel.start()
            output.add(ring.here(), {ring.rank: own})
            for blocks in travel.arrivals():
                output.add(_runs(ring, blocks), blocks)
                del blocks  # while the next one is waited for, only it and the one behind it are alive
        out, saved, lse = output.result()
        ctx.spec = spec
        ctx.save_for_backward(q, k, v, mask, saved, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ring, group, scale, _, shared, heads = ctx.spec
        q, k, v, mask, out, lse = ctx.saved_tensors
        if ring.rotation == "merge":  # every rank's rows are the same, what it is told of their gradient is a part
            grad_out = all_reduce_sum(grad_out, group)
        gradients = Gradients(ring, grad_out, q, v, mask, out, lse, scale, heads)
        own = Block(k, k if shared else v)
        if ring.rotation == "merge":
            grad = gradients.add(ring.here(), {ring.rank: own})[ring.rank]
        else:
            travel = Travel(ring, group, own, shared)
            travel.start()
            grad = gradients.add(ring.here(), {ring.rank: own})[ring.rank]
            shares = _shares(gradients, travel)
            if ring.rotation == "allgather":
                grad = travel.gather_gradients(grad, next(shares, {}))
            else:
                grad = travel.pass_gradients(grad, shares)
        of_mask = gradients.mask_grad
        if of_mask is not None:
            of_mask = of_mask.reshape(mask.shape).to(mask.dtype)
        return None, gradients.q_grad.to(q.dtype), grad.k.to(k.dtype), grad.v.to(v.dtype), of_mask


def _shares(gradients: Gradients, travel: Travel) -> Iterator[dict[int, Block]]:
    for blocks in travel.arrivals():
        shares = gradients.add(_runs(travel.ring, blocks), blocks)
        del blocks
        yield shares


def _runs(ring: Ring, blocks: Mapping[int, Block]) -> list[Run]:
    return [run for source in blocks for run in ring.travelling(source)]


def _ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    queries: Sequence[int],
    keys: Sequence[int],
    resident: Sequence[int],
    left: int | None,
    right: int | None,
    scale: float | None,
    group_size: int,
    rank: int,
    group: str,
    rotation: Any,
    wide: bool,
    shared: bool,
    repeat: int = 0,
    offset: int = 0,
) -> torch.Tensor:
    ring = ring_of(queries, keys, resident, left, right, group_size, rank, rotation)
    lead = torch.broadcast_shapes(*(x.shape[:-3] for x in (q, k, v)))
    if len(lead) != 1:
        if mask is not None and mask.dim() > 3:
            mask = mask.expand(*lead, -1, -1, -1).reshape(-1, *mask.shape[-3:])
        q, k, v = (x.expand(*lead, -1, -1, -1).reshape(-1, *x.shape[-3:]) for x in (q, k, v))
    batch, heads = (max(q.shape[i], k.shape[i], v.shape[i]) for i in (0, 1))
    q = q.expand(batch, heads, -1, -1)
    groups = max(k.shape[1], v.shape[1])
    k, v = (x.expand(batch, groups, -1, -1) for x in (k, v))
    out: torch.Tensor = _Attention.apply((ring, group, scale, wide, shared, HeadMap(repeat, offset)), q, k, v, mask)
    return out if len(lead) == 1 else out.reshape(*lead, *out.shape[1:])


_lib.define(
    "ring_attention(Tensor q, Tensor k, Tensor v, Tensor? mask, SymInt[] queries, SymInt[] keys, int[] resident, "
    "SymInt? left, SymInt? right, float? scale, int group_size, int rank, str group, str rotation, bool wide, "
    "bool shared, int repeat=0, int offset=0) -> Tensor"
)
_lib.impl("ring_attention", _ring_attention, "CompositeImplicitAutograd")

ring_attention = torch.ops.cpcompile.ring_attention.default
