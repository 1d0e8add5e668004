"""One attention call as it was decided: what a rank holds while it runs, and what runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from cpcompile.layout import Axis, Layout
from cpcompile.ring import Rotation
from cpcompile.sizes import Size

Kind: TypeAlias = Literal["local", "ulysses", "ring", "unified", "merge", "gathered", "ulysses+gathered", "whole"]
"""local: every rank has the keys of its queries. ulysses: heads are divided while attention runs. ring: keys and values
travel. unified: the ring over what Ulysses gives. merge: results travel. gathered: keys and values are gathered before.
whole: every rank computes all of it, on gathered operands."""

Policy: TypeAlias = Literal["auto", "local"]
"""``local`` runs every site on local shards, as a patch that missed it would: wrong on purpose, for tests."""


@dataclass(frozen=True)
class SiteOptions:
    """What is asked of every site.

    rotation: how keys and values travel in a ring. wide: whether a ring's results are merged in fp32 at least.
    """

    rotation: Rotation = "allgather"
    wide: bool = True
    policy: Policy = "auto"


@dataclass(frozen=True)
class RingCall:
    """Attention by positions over a group of ranks, or on each rank alone where ``axes`` is empty.

    left, right: which keys a query sees, see ``cpcompile.blocks``. rotation, wide: see ``SiteOptions``.
    """

    axes: tuple[Axis, ...]
    left: Size | None = None
    right: Size | None = None
    rotation: Rotation = "allgather"
    wide: bool = True

    @property
    def hides(self) -> bool:
        """Whether positions hide any keys, so that they must be known."""
        return self.left is not None or self.right is not None


@dataclass(frozen=True)
class Site:
    """How one attention call runs.

    kind: what it became. query, key, value: how they lie when the attention runs. result: how its output then lies.
    ring: what runs where it is no plain attention call. reason: why it is not what the mesh's names ask for.
    considered: the kinds that were open, and what each sends, the largest number of bytes over the ranks.
    """

    kind: Kind
    query: Layout
    key: Layout
    value: Layout
    result: Layout
    ring: RingCall | None = None
    reason: str = ""
    considered: tuple[tuple[Kind, int], ...] = ()
