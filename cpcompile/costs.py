"""What programs send, counted from layouts: the one account that the report, the choice of a kind and the tests share.

Everything is numbers: where sizes are symbols, ``numbered`` layouts come first. A rank's bytes are those that leave it.

Legend: B batch, H heads, K key/value heads, T query rows, S keys, D head dim of q and k, E that of v.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from cpcompile.assemble import all_coords
from cpcompile.layout import Axis, Coords, Dim, Layout, Part, Product, Segment
from cpcompile.ops.neutral import accumulation_dtype
from cpcompile.positions import flat, group_runs
from cpcompile.ring import Ring, ring_of
from cpcompile.site import RingCall, Site
from cpcompile.sizes import Size
from cpcompile.transfer import elements_sent


def number(size: Size, known: Mapping[Any, int]) -> int:
    """A size where symbols have these values."""
    return size if isinstance(size, int) else int(size.subs(known))


def numbered(layout: Layout, known: Mapping[Any, int]) -> Layout:
    """The layout with numbers for symbols, part for part as it is, and with nothing pending."""
    return Layout(tuple(_dim(dim, known) for dim in layout.dims))


def _dim(dim: Dim, known: Mapping[Any, int]) -> Dim:
    return Dim(tuple(_part(part, known) for part in dim.parts))


def _part(part: Part, known: Mapping[Any, int]) -> Part:
    if isinstance(part, Product):
        outer = _part(part.outer, known)
        assert isinstance(outer, Segment)
        return Product(outer, _dim(part.inner, known))
    return Segment(number(part.size, known), part.axes, part.descending, number(part.granule, known), part.covers)


def reshard_bytes(source: Layout, target: Layout, itemsize: int, places: Sequence[Coords]) -> list[int]:
    """What each rank sends for one exchange."""
    return [_known(elements_sent(Layout(source.dims), Layout(target.dims), coords)) * itemsize for coords in places]


def all_reduce_bytes(layout: Layout, itemsize: int, ranks: int, places: Sequence[Coords]) -> list[int]:
    """What each rank sends for a sum over ``ranks`` of a local tensor (the ring algorithm: twice all but its share)."""
    numels = [math.prod(map(_known, layout.local_shape(coords))) for coords in places]
    return [2 * itemsize * (ranks - 1) * numel // ranks for numel in numels]


@dataclass(frozen=True)
class RingBytes:
    """What one rank sends for one call of attention by positions.

    Sections 3.1 (blocks from neighbour to neighbour) of Ring Attention (Liu et al. 2023), and its forms with one gather
    or with results that travel:

        allgather   the longest block to all others; back: the same, and a share of the sum of its gradients for each
        alltoall    each block as far as it is needed; back: the same, and the gradients behind it, and home
        merge       the output and its log-sum-exp to all others; back: a sum of the output's gradient
    """

    forward: int
    backward: int


def ring_bytes(site: Site, dtype: torch.dtype, places: Sequence[Coords], *, shared: bool) -> list[RingBytes]:
    """What each rank sends for a (numbered) site's attention by positions; nothing where there is none.

    shared: keys and values are one tensor.
    """
    return [RingBytes(0, 0) if site.ring is None else _ring_bytes(site, site.ring, dtype, shared, c) for c in places]


def _ring_bytes(site: Site, call: RingCall, dtype: torch.dtype, shared: bool, coords: Coords) -> RingBytes:
    ring = ring_at(call, site.query.dims[-2], site.key.dims[-2], coords)
    if ring.size == 1:
        return RingBytes(0, 0)
    *lead, rows, features = map(_known, site.result.local_shape(coords))
    wide = accumulation_dtype(dtype)
    if call.rotation == "merge":
        out = math.prod(lead) * rows
        sum_of_gradients = 2 * out * features * dtype.itemsize * (ring.size - 1) // ring.size
        return RingBytes(out * (features + 1) * wide.itemsize * (ring.size - 1), sum_of_gradients)
    key, value = (list(map(_known, layout.local_shape(coords))) for layout in (site.key, site.value))
    heads = max(key[-3], value[-3]) if len(key) > 2 else 1
    row = math.prod(lead[:-1]) * heads * (key[-1] + (0 if shared else value[-1]))
    lengths = [ring.block_length(rank) * row for rank in range(ring.size)]
    if call.rotation == "allgather":
        travelling = max(lengths) * (ring.size - 1)
        return RingBytes(travelling * dtype.itemsize, travelling * (dtype.itemsize + wide.itemsize))
    hops = [(ring.source(hop - 1), hop) for hop in range(1, ring.size + 1)]
    blocks = sum(lengths[source] for source, hop in hops[:-1] if ring.hops(source) >= hop)
    gradients = sum(lengths[source] for source, hop in hops if ring.hops(source) >= hop - (hop > 1))
    return RingBytes(blocks * dtype.itemsize, blocks * dtype.itemsize + gradients * wide.itemsize)


@functools.lru_cache(maxsize=4096)
def _ring_at(call: RingCall, query: Dim, key: Dim, place: tuple[tuple[str, int], ...]) -> Ring:
    runs = group_runs(call, query, key, dict(place))
    queries, keys = (list(map(_known, flat(by_rank))) for by_rank in (runs.queries, runs.keys))
    left, right = (None if limit is None else _known(limit) for limit in (call.left, call.right))
    return ring_of(queries, keys, runs.resident, left, right, len(runs.keys), runs.rank, call.rotation)


def ring_at(call: RingCall, query: Dim, key: Dim, coords: Coords) -> Ring:
    """The (numbered) ring of the rank at ``coords``."""
    return _ring_at(call, query, key, tuple(sorted(coords.items())))


def _known(size: Size) -> int:
    assert isinstance(size, int), f"{size} is no number"
    return size


@functools.lru_cache(maxsize=4096)
def site_bytes(
    site: Site, outside: tuple[Layout, ...], dtype: torch.dtype, axes: tuple[Axis, ...], shared: bool
) -> tuple[int, ...]:
    """What each rank of a mesh sends forward for a (numbered) site: ``outside`` are q, k, v and the output outside."""
    places = all_coords(axes)
    query, key, value, result = outside
    moves = [(query, site.query), (key, site.key), (value, site.value), (site.result, result)]
    if shared:
        del moves[2]
    sent = [reshard_bytes(source, target, dtype.itemsize, places) for source, target in moves if source != target]
    sent.append([found.forward for found in ring_bytes(site, dtype, places, shared=shared)])
    return tuple(map(sum, zip(*sent, strict=True)))


def resident_elements(site: Site, axes: tuple[Axis, ...]) -> int:
    """How many elements of keys and values (numbered) are on a rank at once, on the one that has most."""
    most = 0
    for coords in all_coords(axes):
        rows = [math.prod(map(_known, (*x.local_shape(coords)[:-2], x.shape[-1]))) for x in (site.key, site.value)]
        keys = _known(site.key.dims[-2].local_size(coords))
        if site.ring is not None and site.ring.axes and site.ring.rotation != "merge":
            ring = ring_at(site.ring, site.query.dims[-2], site.key.dims[-2], coords)
            blocks = [ring.block_length(rank) for rank in range(ring.size)]
            keys = 2 * max(blocks) if site.ring.rotation == "alltoall" else sum(blocks)
        most = max(most, sum(rows) * keys)
    return most


def numbered_site(site: Site, known: Mapping[Any, int]) -> Site:
    """The site with numbers for symbols."""
    query, key, value, result = (numbered(x, known) for x in (site.query, site.key, site.value, site.result))
    ring = site.ring
    if ring is not None:
        left, right = (None if x is None else number(x, known) for x in (ring.left, ring.right))
        ring = replace(ring, left=left, right=right)
    return Site(site.kind, query, key, value, result, ring)
