"""What a rank computes of one attention, call by call: the running output of its rows, and then the gradients.

Both follow the same calls (``blocks.pieces``). Gradients come block by block from the global output and log-sum-exp
(LSE), which is exact (FlashAttention-2, Dao 2023, section 3.1).

Legend: B batch, H heads, T query rows, S keys.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from cpcompile.blocks import Piece, Run, spans
from cpcompile.heads import HeadMap
from cpcompile.ops.kernels import Mask, attend, attend_backward, is_reference, mask_gradient, saved_dtype
from cpcompile.ops.merge import merge
from cpcompile.ops.neutral import accumulation_dtype
from cpcompile.ops.travel import Block
from cpcompile.ring import Ring

_c10d = torch.ops._c10d_functional

_ABSORBED = {torch.float32: 2.0**26, torch.float64: 2.0**55}
"""Beyond this a number to add leaves nothing of a score, nor of the logarithm of a count of keys."""


class _Rows:
    """What both passes know of this rank's rows.

    A row of a mask of numbers that are all very negative (another spelling of "sees nothing") is absorbed: its scores
    are equal, each key counts the same. Its LSE then tells nothing about how many keys a block has, so results of
    blocks are merged by the logarithm of that count instead.
    """

    def __init__(self, ring: Ring, q: torch.Tensor, mask: Mask, scale: float | None, heads: HeadMap) -> None:
        self.ring, self.q, self.scale = ring, q, scale
        self.kv_heads: torch.Tensor | None = None  # of each query head, where SDPA has it otherwise
        if heads.repeat:
            self.kv_heads = (torch.arange(q.shape[1], device=q.device) + heads.offset) // heads.repeat
        self.learns_mask = mask is not None and mask.requires_grad  # then one device runs its reference
        self.mask = mask if mask is None or mask.dtype is torch.bool else mask.to(q.dtype)
        if self.mask is not None:
            self.mask = self.mask.reshape((1,) * (4 - self.mask.dim()) + tuple(self.mask.shape))
        self.wide = accumulation_dtype(q.dtype)
        self.highest: torch.Tensor | None = None
        if self.mask is not None and self.mask.dtype is not torch.bool and ring.left is None and ring.right is None:
            self.highest = self.mask.amax(-1).to(self.wide)
            self.absorbed = self.highest.isfinite() & (self.highest.abs() > _ABSORBED[self.wide])

    def count(self, mask: torch.Tensor, keys: int, piece: Piece | None = None) -> torch.Tensor:
        """How many keys count for the rows (of a call) that are absorbed."""
        assert self.highest is not None
        highest = self.highest if piece is None else self.of(self.highest, piece)
        equal = (mask == highest.to(mask.dtype).unsqueeze(-1)).sum(-1)
        return (equal if mask.shape[3] > 1 else equal * keys).to(self.wide)

    def of(self, x: torch.Tensor, piece: Piece) -> torch.Tensor:
        """A call's rows of what may be the same for all rows."""
        return self.rows(x, piece) if x.shape[2] > 1 else x

    def operands(self, piece: Piece, blocks: Mapping[int, Block]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k and v of a call."""
        keys = spans(piece.keys)
        k, v = (
            _joined(
                [(blocks[source].k if name == "k" else blocks[source].v).narrow(2, at, n) for source, at, n in keys]
            )
            for name in ("k", "v")
        )
        if self.kv_heads is not None:
            k, v = k.index_select(1, self.kv_heads), v.index_select(1, self.kv_heads)
        return self.rows(self.q, piece), k, v

    def rows(self, x: torch.Tensor, piece: Piece) -> torch.Tensor:
        """A call's rows of a tensor [B, H, T, ...]."""
        return x if x.shape[2] == piece.rows.length else x.narrow(2, piece.rows.local, piece.rows.length)

    def mask_of(self, piece: Piece) -> Mask:
        """The mask of a call: rows and keys of the mask, and of the band where the call is at its edge."""
        found = self.mask
        if found is not None:
            if found.shape[2] > 1:
                found = self.rows(found, piece)
            if found.shape[3] > 1:
                found = _joined([found.narrow(3, at, n) for at, n in _in_sequence(piece.keys)], 3)
        if piece.mode != "band":
            return found
        left, right, device = self.ring.left, self.ring.right, self.q.device
        assert left is not None
        q = torch.arange(piece.rows.start, piece.rows.start + piece.rows.length, device=device).unsqueeze(1)
        k = torch.cat([torch.arange(run.start, run.start + run.length, device=device) for run in piece.keys])
        band = q - k <= left
        if right is not None:
            band = band & (k - q <= right)
        if found is None:
            return band
        return found & band if found.dtype is torch.bool else torch.where(band, found, -math.inf)


class Output(_Rows):
    """The running output and LSE of this rank's rows."""

    def __init__(
        self,
        ring: Ring,
        q: torch.Tensor,
        v: torch.Tensor,
        mask: Mask,
        scale: float | None,
        heads: HeadMap,
        wide: bool,
    ) -> None:
        super().__init__(ring, q, mask, scale, heads)
        self.dtype = self.wide if wide else q.dtype
        self.saved = saved_dtype(q, v, mask, reference=self.learns_mask)
        self.out: torch.Tensor | None = None
        self.lse = q.new_empty(0)
        self.shape = (*q.shape[:3], v.shape[3])

    def add(self, keys: Sequence[Run], blocks: Mapping[int, Block]) -> None:
        """Attend to some keys."""
        for piece in self.ring.calls(keys):
            q, k, v = self.operands(piece, blocks)
            mask = self.mask_of(piece)
            out, lse = attend(q, k, v, mask, piece.mode == "causal", self.scale, reference=self.learns_mask)
            if self.highest is not None and mask is not None:
                lse = torch.where(self.of(self.absorbed, piece), self.count(mask, k.shape[2], piece).log(), lse)
            self._merge(piece, out, lse)

    def _merge(self, piece: Piece, out: torch.Tensor, lse: torch.Tensor) -> None:
        if self.out is None:
            if piece.rows.length == self.shape[2]:
                self.out, self.lse = out.to(self.dtype), lse
                return
            self.empty()
        assert self.out is not None
        rows = self.rows(self.out, piece), self.rows(self.lse, piece)
        for into, merged in zip(rows, merge(*rows, out, lse), strict=True):
            into.copy_(merged)

    def empty(self) -> None:
        """Nothing seen yet."""
        self.out = self.q.new_zeros(self.shape, dtype=self.dtype)
        self.lse = self.q.new_full(self.shape[:3], -math.inf, dtype=self.wide)

    def merge_ranks(self, group: str) -> None:
        """The same rows on every rank: merge what each got of its own keys, in the order of ranks."""
        if self.out is None:
            self.empty()
        assert self.out is not None
        mine = torch.cat([self.out.to(self.wide), self.lse.unsqueeze(-1)], -1)
        gathered = _c10d.wait_tensor(_c10d.all_gather_into_tensor(mine.contiguous(), self.ring.size, group))
        first, *rest = gathered.reshape(self.ring.size, *mine.shape)
        self.out, self.lse = first[..., :-1], first[..., -1]
        for other in rest:
            self.out, self.lse = merge(self.out, self.lse, other[..., :-1], other[..., -1])

    def result(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The output, and the output and LSE that a backward pass over the same calls expects."""
        if self.out is None:
            self.empty()
        assert self.out is not None
        lse = self.lse
        if self.highest is not None:
            lse = torch.where(self.absorbed, self.highest, lse)
        out = self.out.to(self.q.dtype)
        return out, out if self.saved is self.q.dtype else self.out.to(self.saved), lse


class Gradients(_Rows):
    """The running gradient of this rank's queries, and the shares of keys and values."""

    def __init__(
        self,
        ring: Ring,
        grad_out: torch.Tensor,
        q: torch.Tensor,
        v: torch.Tensor,
        mask: Mask,
        out: torch.Tensor,
        lse: torch.Tensor,
        scale: float | None,
        heads: HeadMap,
    ) -> None:
        super().__init__(ring, q, mask, scale, heads)
        self.grad_out, self.out, self.lse = grad_out, out, lse
        if self.mask is not None and self.highest is not None and is_reference(q, v, mask, reference=self.learns_mask):
            # From this LSE each key of an absorbed row has a probability of 1, which fused kernels leave at that.
            count = self.count(self.mask, ring.key_count).unsqueeze(-1)
            self.grad_out = torch.where(self.absorbed.unsqueeze(-1), grad_out / count, grad_out).to(grad_out.dtype)
        self.q_grad = torch.zeros_like(q, dtype=self.wide)
        self.mask_grad: torch.Tensor | None = None
        if self.learns_mask:
            assert self.mask is not None
            self.mask_grad = torch.zeros_like(self.mask, dtype=self.wide)

    def add(self, keys: Sequence[Run], blocks: Mapping[int, Block]) -> dict[int, Block]:
        """Add these calls' share to the queries' gradient; give that of the blocks."""
        given = {source: block.like(self.wide) for source, block in blocks.items()}
        for piece in self.ring.calls(keys):
            q, k, v = self.operands(piece, blocks)
            grad_out, out, lse = (self.rows(x, piece) for x in (self.grad_out, self.out, self.lse))
            call = (grad_out, q, k, v, out, lse, self.mask_of(piece), piece.mode == "causal", self.scale)
            q_grad, k_grad, v_grad = attend_backward(*call, reference=self.learns_mask)
            if self.mask_grad is not None:
                self._add_to_mask(self.mask_grad, piece, mask_gradient(*call))
            self.rows(self.q_grad, piece).add_(q_grad)
            at = 0
            for source, first, length in spans(piece.keys):
                for into, grad in ((given[source].k, k_grad), (given[source].v, v_grad)):
                    room, share = into.narrow(2, first, length), grad.narrow(2, at, length)
                    if self.kv_heads is None:
                        room.add_(share)
                    else:
                        room.index_add_(1, self.kv_heads, share.to(room.dtype))
                at = at + length
        return given

    def _add_to_mask(self, into: torch.Tensor, piece: Piece, grad: torch.Tensor) -> None:
        """Add a call's share to the rows and keys of the mask, summed over what it is broadcast over."""
        into = self.of(into, piece)
        over = [dim for dim in range(4) if into.shape[dim] == 1 and grad.shape[dim] != 1]
        if over:
            grad = grad.sum(over, keepdim=True)
        if into.shape[3] == 1:
            into.add_(grad)
            return
        at = 0
        for first, length in _in_sequence(piece.keys):
            into.narrow(3, first, length).add_(grad.narrow(3, at, length))
            at = at + length


def _in_sequence(runs: Sequence[Run]) -> list[tuple[int, int]]:
    """Where in the sequence, neighbours as one."""
    return [(first, length) for _, first, length in spans([Run(0, run.length, run.start) for run in runs])]


def _joined(parts: Sequence[torch.Tensor], dim: int = 2) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)
