"""Keys and values that are alive on a rank while its ring attention runs, counted: all ranks in one process.

    python -m benchmarks.memory --tokens 4096 --ranks 2,4,8

A block is a rank's share of the keys and values. Those that the caller holds are not counted: what a rank packs,
receives and copies is.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from benchmarks.ours import RotateMethod
from benchmarks.problem import BATCH, HEAD_DIM, HEADS
from cpcompile.layout import Axis
from cpcompile.ops.ring import ring_attention
from cpcompile.threads import run_ranks

_aten = torch.ops.aten
_wait = torch.ops._c10d_functional.wait_tensor.default

_CARRIES_NOTHING = {
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    _aten.zeros_like.default,
}
"""Takes keys and values, but gives results or gradients."""


@dataclass(frozen=True)
class Peak:
    """The most bytes of keys and values that were alive at once on any rank."""

    forward_bytes: int
    backward_bytes: int


class _CountAlive(TorchDispatchMode):
    """Counts bytes of storages that are made, inside it, of others that carry keys and values.

    What a collective sends counts until its result is waited for. The threads of a simulation hold it for as long as
    the slowest of them does, so they are given a copy, which is not counted.
    """

    def __init__(self, *carried: torch.Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._callers = {x.untyped_storage().data_ptr() for x in carried}
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._sent: dict[int, Any] = {}
        self._bytes = 0
        self._peak_bytes = 0

    def take_peak_bytes(self) -> int:
        """The peak since it was last taken."""
        peak_bytes, self._peak_bytes = self._peak_bytes, self._bytes
        return peak_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        carries = func not in _CARRIES_NOTHING and any(map(self._is_counted, _storages((args, kwargs))))
        if func.namespace == "_c10d_functional" and func is not _wait:
            result = func(*tree_map_only(torch.Tensor, torch.clone, args), **(kwargs or {}))
            self._sent[result.untyped_storage()._cdata] = args
        else:
            result = func(*args, **(kwargs or {}))
        if func is _wait:
            self._sent.pop(result.untyped_storage()._cdata, None)
        for storage in _storages(result) if carries else ():
            if not self._is_counted(storage):
                self._count(storage)
        return result

    def _is_counted(self, storage: torch.UntypedStorage) -> bool:
        return storage._cdata in self._alive or storage.data_ptr() in self._callers

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size_bytes = storage._cdata, storage.nbytes()

        def gone(_: Any) -> None:
            del self._alive[key]
            self._bytes -= size_bytes

        self._alive[key] = weakref.ref(storage, gone)
        self._bytes += size_bytes
        self._peak_bytes = max(self._peak_bytes, self._bytes)


def _storages(values: Any) -> Iterator[torch.UntypedStorage]:
    return (x.untyped_storage() for x in tree_leaves(values) if isinstance(x, torch.Tensor))


def block_bytes(tokens: int, ranks: int) -> int:
    """Keys and values of one rank, in fp32."""
    return 2 * BATCH * HEADS * tokens // ranks * HEAD_DIM * 4


def peak_alive(tokens: int, ranks: int, rotation: RotateMethod) -> Peak:
    """Run one attention without a mask, forward and backward, over ``ranks`` threads."""
    axis, share = Axis("ring", ranks), tokens // ranks
    runs = [number for rank in range(ranks) for number in (rank * share, share)]

    def program(coords: dict[str, int], groups: dict[str, str]) -> tuple[int, int]:
        q, k, v = (torch.zeros(BATCH, HEADS, share, HEAD_DIM, requires_grad=True) for _ in range(3))
        place = (ranks, coords["ring"], groups["ring"], rotation)
        with _CountAlive(k, v) as alive:
            out = ring_attention(q, k, v, None, runs, runs, [0], None, None, None, *place, True, False)
            forward_bytes = alive.take_peak_bytes()
            torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
            return forward_bytes, alive.take_peak_bytes()

    return Peak(*map(max, zip(*run_ranks((axis,), program), strict=True)))


def main(
    tokens: Annotated[int, typer.Option(help="Of the whole sequence; the ranks divide it evenly.")] = 4096,
    ranks: Annotated[str, typer.Option(help="Sizes of the group, separated by commas.")] = "2,4,8",
) -> None:
    """Count the keys and values that are alive at once, for each way in which they travel."""
    table = Table(title=f"S={tokens}, batch {BATCH}, {HEADS} heads of {HEAD_DIM}, fp32", title_justify="left")
    for column in ("rotation", "P", "forward, MB", "forward, blocks", "backward, MB", "backward, blocks"):
        table.add_column(column, justify="left" if column == "rotation" else "right")
    rotations: tuple[RotateMethod, ...] = ("alltoall", "allgather")
    for rotation in rotations:
        for size in map(int, ranks.split(",")):
            peak, block = peak_alive(tokens, size, rotation), block_bytes(tokens, size)
            counts = (peak.forward_bytes, peak.backward_bytes)
            cells = [cell for count in counts for cell in (f"{count / 1e6:.2f}", f"{count / block:g}")]
            table.add_row(rotation, str(size), *cells)
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
