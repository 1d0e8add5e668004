"""In which order the parts of a split go out: plain, or zigzag, which gives every rank equal work under a causal mask.

Zigzag (also called head-tail) is two segments: the first half of the indices in order, the second half in reverse, so
that rank r of P holds parts r and 2P - 1 - r of 2P. Row i sees i + 1 keys: the two parts add up to the same everywhere.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from cpcompile.layout import Axis, Dim, Segment, sharded
from cpcompile.site import Site
from cpcompile.sizes import Size, divide, floor_div, multiply, subtract


def zigzag(size: Size, axes: Sequence[Axis], granule: Size = 1) -> Dim:
    """A dimension divided over ``axes`` in zigzag; in plain order where half of it is too short for the ranks."""
    units = divide(size, granule)
    if units is not None:
        second = multiply(floor_div(units, 2), granule)
        halves = (
            sharded(subtract(size, second), axes, granule),
            sharded(second, axes, granule, descending=True),
        )
        if not any(half.is_replicated for half in halves):
            return Dim.of(*halves)
    return sharded(size, axes, granule)


def is_one_sided(left: Size | None, right: Size | None) -> bool:
    """Whether positions hide keys on one side only, so that what a row costs grows along the sequence."""
    return (left is None) != (right is None)


def plain_rows(site: Site) -> Iterator[Size]:
    """The sizes of this site's segments of rows that go out in plain order, where zigzag would even the work out."""
    if site.ring is None or not is_one_sided(site.ring.left, site.ring.right):
        return
    parts = site.query.dims[-2].parts
    for part, following in itertools.zip_longest(parts, parts[1:]):
        if isinstance(part, Segment) and part.axes and not part.descending:
            turns = isinstance(following, Segment) and following.descending and following.axes == part.axes
            if not turns:
                yield part.size
