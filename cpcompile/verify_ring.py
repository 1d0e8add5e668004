"""The invariants of attention by positions in one rank's graph: what it is told is what the layouts mean."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import fx

from cpcompile.decision import decision
from cpcompile.heads import HeadMap, head_map
from cpcompile.layout import Coords, Dim
from cpcompile.local_values import LocalValues
from cpcompile.ops.ring import ring_attention
from cpcompile.transfer import peers


def ring_laws(origin: fx.Node, lowered: fx.Node, coords: Coords, local: LocalValues) -> Iterator[str]:
    """What is wrong with the attention that an attention call was lowered to."""
    site = decision(origin).site
    call = None if site is None else site.ring
    if site is None or call is None:
        if lowered.target is ring_attention:
            yield "attention by positions, where the site is a plain call"
        return
    if lowered.target is not ring_attention:
        yield "the site is attention by positions, this is another call"
        return
    queries, keys, resident, left, right, _, size, rank, group, rotation, wide, _, repeat, offset = local.argument(
        lowered.args[4:]
    )
    places = peers(call.axes, coords)
    if (size, group) != (len(places), ".".join(axis.name for axis in call.axes)):
        yield f"it runs over {size} ranks of ({group}), the site over {[axis.name for axis in call.axes]}"
        return
    if places[rank] != dict(coords):
        yield f"the rank takes itself for number {rank} of its group"
    limits = [None if limit is None else local.number(limit) for limit in (call.left, call.right)]
    if ([left, right], rotation, wide) != (limits, call.rotation, call.wide):
        yield f"it runs as {left}, {right}, {rotation}, {wide}, the site as {limits}, {call.rotation}, {call.wide}"
    heads = head_map(local.numbered(site.query), local.numbered(site.key), coords)
    if heads != HeadMap(repeat, offset):
        yield f"query heads share key/value heads as {heads}, not as {repeat}, {offset}"
    rows, columns = (local.numbered(layout).dims[-2] for layout in (site.query, site.key))
    yield from _runs("keys", keys, columns, places)
    if call.hides:
        yield from _runs("queries", queries, rows, places)
    held = [set(columns.indices(place)) for place in places]
    for position, flag in enumerate(resident):
        count = len(keys) // size
        runs = [_expanded(keys[at * count :][2 * position : 2 * position + 2]) for at in range(size)]
        alike = len(set(map(tuple, runs))) == 1
        on_all = alike and all(set(run) <= other for run, other in zip(runs, held, strict=True))
        if flag and not on_all:
            yield f"run {position} of the keys is not on every rank"
        if not flag and size > 1 and on_all and runs[0]:
            yield f"run {position} of the keys is on every rank and would count {size} times"


def _runs(what: str, flat: Sequence[int], dim: Dim, places: Sequence[Coords]) -> Iterator[str]:
    count = len(flat) // len(places)
    for number, place in enumerate(places):
        if _expanded(flat[number * count : (number + 1) * count]) != dim.indices(place):
            yield f"{what} of rank {number} of its group are not those of its shard ({dim})"


def _expanded(flat: Sequence[int]) -> list[int]:
    return [index for at in range(0, len(flat), 2) for index in range(flat[at], flat[at] + flat[at + 1])]
