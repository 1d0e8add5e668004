"""What each rank of a group does in one attention over the group: pure arithmetic over runs of positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from cpcompile.blocks import Piece, Run, pieces, sees_any

Rotation: TypeAlias = Literal["allgather", "alltoall", "merge"]
"""How keys and values reach the queries: all at once, from neighbour to neighbour, or not at all (results do)."""


@dataclass(frozen=True)
class Ring:
    """Queries and keys of every rank of a group.

    queries: the runs of each rank's rows. keys: those of each rank's keys. resident: which runs of keys every rank
    holds. left, right: see ``blocks``. rank: this rank's number in the group.
    """

    queries: tuple[tuple[Run, ...], ...]
    keys: tuple[tuple[Run, ...], ...]
    resident: tuple[bool, ...]
    left: int | None
    right: int | None
    rank: int
    rotation: Rotation

    @property
    def size(self) -> int:
        """Ranks in the group."""
        return len(self.keys)

    @property
    def others(self) -> list[int]:
        """The other ranks, in their order."""
        return [rank for rank in range(self.size) if rank != self.rank]

    @property
    def key_count(self) -> int:
        """All keys of the sequence."""
        total = 0
        for rank, runs in enumerate(self.keys):
            for run, resident in zip(runs, self.resident, strict=True):
                if rank == 0 or not resident:
                    total = total + run.length
        return total

    def here(self) -> tuple[Run, ...]:
        """The runs of this rank's keys that it attends to where they lie; keys of all ranks count on one of them."""
        own = self.keys[self.rank]
        if self.rotation == "merge" and self.rank != 0:
            return tuple(run for run, resident in zip(own, self.resident, strict=True) if not resident)
        return own

    def leaving(self) -> tuple[Run, ...]:
        """The runs of this rank's keys that travel, where they lie in its tensors."""
        return tuple(run for run, resident in zip(self.keys[self.rank], self.resident, strict=True) if not resident)

    def travelling(self, rank: int) -> tuple[Run, ...]:
        """The runs of a rank's travelling block, where they lie in it."""
        found: list[Run] = []
        at = 0
        for run, resident in zip(self.keys[rank], self.resident, strict=True):
            if not resident:
                found.append(Run(run.start, run.length, at, rank))
                at = at + run.length
        return tuple(found)

    def block_length(self, rank: int) -> int:
        """Keys in a rank's travelling block."""
        total = 0
        for run in self.travelling(rank):
            total = total + run.length
        return total

    def calls(self, keys: Sequence[Run]) -> tuple[Piece, ...]:
        """The kernel calls of this rank's queries against some keys."""
        return pieces(self.queries[self.rank], keys, self.left, self.right)

    def needs(self, rank: int, source: int) -> bool:
        """Whether a rank's queries see something of the block that comes from ``source``."""
        return sees_any(self.queries[rank], self.travelling(source), self.left, self.right)

    def hops(self, source: int) -> int:
        """How many hops the block of ``source`` makes: to the last rank that needs it."""
        needed = (hop for hop in range(self.size - 1, 0, -1) if self.needs((source + hop) % self.size, source))
        return next(needed, 0)

    def source(self, hop: int) -> int:
        """Whose block is here after ``hop`` hops."""
        return (self.rank - hop) % self.size


def ring_of(
    queries: Sequence[int],
    keys: Sequence[int],
    resident: Sequence[int],
    left: int | None,
    right: int | None,
    size: int,
    rank: int,
    rotation: Rotation,
) -> Ring:
    """Read the flat form: for each rank, start and length of its runs, which lie one after the other."""
    by_rank = _by_rank(queries, size), _by_rank(keys, size)
    return Ring(*by_rank, tuple(bool(flag) for flag in resident), left, right, rank, rotation)


def _by_rank(flat: Sequence[int], size: int) -> tuple[tuple[Run, ...], ...]:
    count = len(flat) // size
    found: list[tuple[Run, ...]] = []
    for rank in range(size):
        numbers = flat[rank * count : (rank + 1) * count]
        runs: list[Run] = []
        at = 0
        for start, length in zip(numbers[::2], numbers[1::2], strict=True):
            runs.append(Run(start, length, at, rank))
            at = at + length
        found.append(tuple(runs))
    return tuple(found)
