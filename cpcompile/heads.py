"""Which key/value head each of a rank's query heads uses, where query heads share them (GQA) and ranks divide them.

Legend: H query heads, K key/value heads.
"""

from __future__ import annotations

from dataclasses import dataclass

from cpcompile.assemble import all_coords
from cpcompile.layout import Coords, Layout, Segment
from cpcompile.sizes import divide


@dataclass(frozen=True)
class HeadMap:
    """Local query head i uses local key/value head ``(i + offset) // repeat``; repeat 0: as SDPA has it by itself."""

    repeat: int = 0
    offset: int = 0


def head_map(query: Layout, key: Layout, coords: Coords) -> HeadMap:
    """The map of the rank at ``coords``; layouts are [..., H, T, D] and [..., K, S, D]."""
    if len(query.dims) < 3:
        return HeadMap()
    heads, kv_heads = query.dims[-3], key.dims[-3]
    (part,) = kv_heads.parts if len(kv_heads.parts) == 1 else (None,)
    if not isinstance(part, Segment) or part.covers == 1:
        return HeadMap()
    first, count = part.covered().bounds(coords)
    held = heads.local_size(coords)
    assert isinstance(first, int)
    assert held == count, f"({heads}) and ({kv_heads}) are cut at different heads"
    offset = first % part.covers
    local_kv_heads = kv_heads.local_size(coords)
    by_itself = local_kv_heads == 1 or (offset == 0 and divide(held, local_kv_heads) == part.covers)
    return HeadMap() if by_itself else HeadMap(part.covers, offset)


def heads_match(query: Layout, key: Layout) -> bool:
    """Whether every rank's heads match as SDPA has it by itself."""
    axes = tuple(query.dims[-3].axes) if len(query.dims) > 2 else ()
    return all(head_map(query, key, coords) == HeadMap() for coords in all_coords(axes))
