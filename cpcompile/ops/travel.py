"""Keys and values, packed, on their way between the ranks of a group, and their gradients on the way back.

A block is what a rank's keys and values that travel look like in one flat tensor: K, then V (once where both are the
same tensor).

Legend: B batch, K key/value heads, S keys of a block, D head dim of k, E that of v.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from cpcompile.blocks import spans
from cpcompile.ring import Ring

_c10d = torch.ops._c10d_functional


@dataclass(frozen=True)
class Block:
    """Keys and values (or their gradients): k [B, K, S, D], v [B, K, S, E]."""

    k: torch.Tensor
    v: torch.Tensor

    def like(self, dtype: torch.dtype) -> Block:
        """Zeros for gradients in ``dtype``."""
        return Block(torch.zeros_like(self.k, dtype=dtype), torch.zeros_like(self.v, dtype=dtype))


@dataclass
class Travel:
    """The travelling of one call. shared: keys and values are the same tensor.

    It runs as ``start``, then ``arrivals``; the backward pass gives gradients of what arrived to ``gradients``.
    """

    ring: Ring
    group: str
    own: Block
    shared: bool
    pending: Any = field(default=None, init=False)

    def start(self) -> None:
        """Send the first blocks on their way."""
        if self.ring.size == 1:
            return
        flat = self._packed(self.own)
        if self.ring.rotation == "allgather":
            self.pending = _c10d.all_gather_into_tensor(self._padded(flat), self.ring.size, self.group)
        else:
            self.pending = self._hop(flat, 1)

    def arrivals(self) -> Iterator[dict[int, Block]]:
        """Blocks by the rank that they come from, as soon as they are here; the next ones travel meanwhile."""
        ring = self.ring
        if ring.size == 1:
            return
        if ring.rotation == "allgather":
            gathered = _c10d.wait_tensor(self.pending).reshape(ring.size, -1)
            self.pending = None
            yield {rank: self._unpacked(gathered[rank], rank) for rank in ring.others}
            return
        for hop in range(1, ring.size):
            flat = _c10d.wait_tensor(self.pending)
            self.pending = self._hop(flat, hop + 1) if hop + 1 < ring.size else None
            source = ring.source(hop)
            if ring.hops(source) < hop or not ring.needs(ring.rank, source):
                yield {}
            else:
                yield {source: self._unpacked(flat, source)}

    def gather_gradients(self, grad: Block, of_others: Mapping[int, Block]) -> Block:
        """Sum what all ranks gave to this rank's block: ``grad``, with the sum in place of its travelling part."""
        ring = self.ring
        if ring.size == 1:
            return grad
        flats = [self._packed(grad) if rank == ring.rank else self._flat(of_others[rank]) for rank in range(ring.size)]
        stacked = torch.cat([self._padded(flat) for flat in flats])
        summed = _c10d.wait_tensor(_c10d.reduce_scatter_tensor(stacked, "sum", ring.size, self.group))
        return self._returned(grad, summed)

    def pass_gradients(self, grad: Block, hops: Iterator[dict[int, Block]]) -> Block:
        """The same with gradients that travel behind the blocks: ``hops`` gives this rank's share for each arrival."""
        ring = self.ring
        if ring.size == 1:
            return grad
        current = self._packed(grad)
        home = current if ring.hops(ring.rank) == 0 else torch.zeros_like(current)
        for hop in range(1, ring.size + 1):
            pending, sizes, swapped = self._gradient_hop(current, hop)
            shares = next(hops) if hop < ring.size else {}
            came = _c10d.wait_tensor(pending)
            arrived = came.narrow(0, sizes[1] if swapped else 0, sizes[0])
            returned = came.narrow(0, 0 if swapped else sizes[0], sizes[1])
            if returned.shape[0]:
                home = home + returned
            if hop < ring.size:
                current = arrived
                for share in shares.values():
                    current = arrived + self._flat(share)
        return self._returned(grad, home)

    def _hop(self, flat: torch.Tensor, hop: int) -> torch.Tensor:
        """Start hop number ``hop``: what came with the one before goes on, if a rank further on needs it."""
        ring = self.ring
        send, receive = [0] * ring.size, [0] * ring.size
        if ring.hops(ring.source(hop - 1)) >= hop:
            send[(ring.rank + 1) % ring.size] = self._numel(ring.source(hop - 1))
        if ring.hops(ring.source(hop)) >= hop:
            receive[(ring.rank - 1) % ring.size] = self._numel(ring.source(hop))
        started: torch.Tensor = _c10d.all_to_all_single(flat.narrow(0, 0, sum(send)), receive, send, self.group)
        return started

    def _gradient_hop(self, flat: torch.Tensor, hop: int) -> tuple[torch.Tensor, tuple[int, int], bool]:
        """Start the hop of gradients: to the next rank that their block went to, or home from the last.

        Gives what arrives, the sizes of its two parts (gradients of the block that is here now, and the sum of this
        rank's own), and whether they arrive the other way round.
        """
        ring = self.ring
        send, receive = [0] * ring.size, [0] * ring.size
        source = ring.source(hop - 1)
        if ring.hops(source) >= hop:
            send[(ring.rank + 1) % ring.size] = self._numel(source)
        elif ring.hops(source) == hop - 1 and hop > 1:
            send[source] = self._numel(source)
        passing = self._numel(ring.source(hop)) if ring.hops(ring.source(hop)) >= hop else 0
        returning = self._numel(ring.rank) if ring.hops(ring.rank) == hop - 1 and hop > 1 else 0
        previous, last = (ring.rank - 1) % ring.size, (ring.rank + hop - 1) % ring.size
        receive[previous] += passing
        receive[last] += returning
        started = _c10d.all_to_all_single(flat.narrow(0, 0, sum(send)), receive, send, self.group)
        return started, (passing, returning), last < previous

    def _numel(self, rank: int) -> int:
        k, v = self.own.k, self.own.v
        row = k.shape[0] * k.shape[1] * (k.shape[3] + (0 if self.shared else v.shape[3]))
        return row * self.ring.block_length(rank)

    def _padded(self, flat: torch.Tensor) -> torch.Tensor:
        """As long as the longest block: a gather takes equal ones."""
        longest = max(self._numel(rank) for rank in range(self.ring.size))
        if flat.shape[0] == longest:
            return flat
        return torch.nn.functional.pad(flat, (0, longest - flat.shape[0]))

    def _packed(self, block: Block) -> torch.Tensor:
        """The travelling part of this rank's tensors."""
        found = spans(self.ring.leaving())
        k = _taken(block.k, found)
        return self._flat(Block(k, k if block.v is block.k else _taken(block.v, found)))

    def _flat(self, block: Block) -> torch.Tensor:
        if not self.shared:
            return torch.cat([block.k.reshape(-1), block.v.reshape(-1)])
        return (block.k if block.k is block.v else block.k + block.v).reshape(-1)

    def _unpacked(self, flat: torch.Tensor, rank: int) -> Block:
        k, v, length = self.own.k, self.own.v, self.ring.block_length(rank)
        shapes = [(x.shape[0], x.shape[1], length, x.shape[3]) for x in (k, v)]
        counts = [shape[0] * shape[1] * shape[2] * shape[3] for shape in shapes]
        key = flat.narrow(0, 0, counts[0]).reshape(shapes[0])
        return Block(key, key if self.shared else flat.narrow(0, counts[0], counts[1]).reshape(shapes[1]))

    def _returned(self, grad: Block, flat: torch.Tensor) -> Block:
        """``grad`` with its travelling part replaced; where keys and values are one, all of it is in the keys'."""
        summed = self._unpacked(flat, self.ring.rank)
        k, v = grad.k.clone(), grad.v.clone()
        values = torch.zeros_like(summed.v) if self.shared else summed.v
        at = 0
        for _, first, length in spans(self.ring.leaving()):
            k.narrow(2, first, length).copy_(summed.k.narrow(2, at, length))
            v.narrow(2, first, length).copy_(values.narrow(2, at, length))
            at = at + length
        return Block(k, v)


def _taken(x: torch.Tensor, found: Sequence[tuple[int, int, int]]) -> torch.Tensor:
    parts = [x.narrow(2, first, length) for _, first, length in found]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2) if parts else x.narrow(2, 0, 0)
