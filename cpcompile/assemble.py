"""Layouts applied to real tensors, for simulation, verification and tests: never on the path of a real run."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

import torch

from cpcompile.layout import Axis, Coords, Layout


def all_coords(axes: Sequence[Axis]) -> list[dict[str, int]]:
    """The coordinates of every rank of a mesh, in rank order (the last axis varies fastest)."""
    names = [axis.name for axis in axes]
    return [
        dict(zip(names, index, strict=True)) for index in itertools.product(*(range(axis.size) for axis in axes))
    ]


def shard(tensor: torch.Tensor, layout: Layout, coords: Coords) -> torch.Tensor:
    """What the rank at ``coords`` holds of a global tensor. Of a pending sum, the first rank along an axis holds all."""
    local = tensor
    for index, dim in enumerate(layout.dims):
        if not dim.is_replicated:
            local = local.index_select(index, torch.tensor(dim.indices(coords), dtype=torch.long, device=tensor.device))
    if any(coords[pending.axis.name] != 0 for pending in layout.partial if pending.op == "sum"):
        local = torch.zeros_like(local)
    return local


def unshard(locals_: Mapping[int, torch.Tensor], layout: Layout, axes: Sequence[Axis]) -> torch.Tensor:
    """The global tensor behind the ranks' local ones (keyed by rank), pending sums and maxima combined."""
    out: torch.Tensor | None = None
    pending = {partial.axis.name: partial.op for partial in layout.partial}
    for rank, coords in enumerate(all_coords(axes)):
        local = locals_[rank]
        if out is None:
            shape = [dim.size for dim in layout.dims]
            fill = float("-inf") if "max" in pending.values() else 0
            out = local.new_full(shape, fill) if pending else local.new_zeros(shape)
        place = tuple(_grid(layout, coords))
        if not pending:
            out[place] = local
        elif all(coords[axis.name] == 0 for axis in axes if axis not in layout.axes and axis.name not in pending):
            out[place] = torch.maximum(out[place], local) if "max" in pending.values() else out[place] + local
    assert out is not None
    return out


def disagreement(locals_: Mapping[int, torch.Tensor], layout: Layout, axes: Sequence[Axis]) -> float:
    """The largest difference between ranks in what they both hold: 0 for a layout that is true."""
    if layout.partial:
        return 0.0
    whole = unshard(locals_, layout, axes)
    worst = 0.0
    for rank, coords in enumerate(all_coords(axes)):
        if locals_[rank].numel() and locals_[rank].dtype != torch.bool:
            worst = max(worst, (whole[tuple(_grid(layout, coords))] - locals_[rank]).abs().max().item())
    return worst


def _grid(layout: Layout, coords: Coords) -> Iterator[torch.Tensor]:
    count = len(layout.dims)
    for index, dim in enumerate(layout.dims):
        shape = [1] * count
        shape[index] = -1
        yield torch.tensor(dim.indices(coords), dtype=torch.long).reshape(shape)
