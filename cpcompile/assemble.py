"""Layouts applied to real tensors, for simulation, verification and tests: never on the path of a real run."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import torch

from cpcompile.layout import Axis, Coords, Layout, Partial


def all_coords(axes: Sequence[Axis]) -> list[dict[str, int]]:
    """The coordinates of every rank of a mesh, in rank order (the last axis varies fastest)."""
    names = [axis.name for axis in axes]
    return [dict(zip(names, index, strict=True)) for index in itertools.product(*(range(axis.size) for axis in axes))]


def shard(tensor: torch.Tensor, layout: Layout, coords: Coords) -> torch.Tensor:
    """What the rank at ``coords`` holds of a global tensor. Of a pending sum, the axis's first rank holds all."""
    local = tensor
    for index, dim in enumerate(layout.dims):
        if not dim.is_replicated:
            local = local.index_select(index, torch.tensor(dim.indices(coords), dtype=torch.long, device=tensor.device))
    if any(coords[pending.axis.name] != 0 for pending in layout.partial if pending.op == "sum"):
        local = torch.zeros_like(local)
    return local


def unshard(locals_: Mapping[int, torch.Tensor], layout: Layout, axes: Sequence[Axis]) -> torch.Tensor:
    """The global tensor behind the ranks' local ones (keyed by rank), pending sums and maxima combined."""
    values: list[tuple[Coords, torch.Tensor]] = [
        (coords, locals_[rank]) for rank, coords in enumerate(all_coords(axes))
    ]
    for pending in layout.partial:
        values = _combined(values, pending)
    out = values[0][1].new_zeros([dim.size for dim in layout.dims])
    for coords, local in values:
        _place(out, local, layout, coords)
    return out


def _place(out: torch.Tensor, local: torch.Tensor, layout: Layout, coords: Coords) -> None:
    if tuple(local.shape) != layout.local_shape(coords):  # assignment would broadcast it
        raise ValueError(
            f"{tuple(local.shape)} at {dict(coords)} is not {layout.local_shape(coords)}, as {layout} has it"
        )
    out[tuple(_grid(layout, coords))] = local


def _combined(values: list[tuple[Coords, torch.Tensor]], pending: Partial) -> list[tuple[Coords, torch.Tensor]]:
    """The value of each row of ranks along a pending axis, in the name of the row's first rank."""
    if pending.op == "lse":
        raise ValueError("an attention output is merged with its log-sum-exps, not by itself")
    rows: dict[tuple[tuple[str, int], ...], tuple[Coords, torch.Tensor]] = {}
    for coords, local in values:
        row = tuple(sorted((name, index) for name, index in coords.items() if name != pending.axis.name))
        if row not in rows:
            rows[row] = (coords, local)
        else:
            first, so_far = rows[row]
            rows[row] = (first, so_far + local if pending.op == "sum" else torch.maximum(so_far, local))
    return list(rows.values())


def disagreement(locals_: Mapping[int, torch.Tensor], layout: Layout, axes: Sequence[Axis]) -> float:
    """The largest difference between ranks in what they both hold: 0 for a layout that is true.

    Ranks that hold different terms of a pending sum are not compared; a NaN that not all have counts as infinite.
    """
    worst = 0.0
    pending = [axis for axis in axes if any(axis == partial.axis for partial in layout.partial)]
    places = all_coords(axes)
    for term in all_coords(pending):
        ranks = [rank for rank, coords in enumerate(places) if term.items() <= coords.items()]
        global_value = locals_[ranks[0]].new_zeros([dim.size for dim in layout.dims])
        for rank in ranks:
            _place(global_value, locals_[rank], layout, places[rank])
        for rank in ranks:
            worst = max(worst, _distance(global_value[tuple(_grid(layout, places[rank]))], locals_[rank]))
    return worst


def _distance(left: torch.Tensor, right: torch.Tensor) -> float:
    differs = (left != right) & ~((left != left) & (right != right))
    if not differs.any():
        return 0.0
    wide = torch.complex128 if left.is_complex() else torch.float64
    return torch.nan_to_num((left[differs].to(wide) - right[differs].to(wide)).abs(), nan=math.inf).max().item()


def _grid(layout: Layout, coords: Coords) -> Iterator[torch.Tensor]:
    count = len(layout.dims)
    for index, dim in enumerate(layout.dims):
        shape = [1] * count
        shape[index] = -1
        yield torch.tensor(dim.indices(coords), dtype=torch.long).reshape(shape)
