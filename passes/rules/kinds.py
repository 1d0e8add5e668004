"""The kinds of attention that a site could become, built from how q, k and v lie; nothing is chosen here.

| q | k, v | kinds |
|---|---|---|
| any | whole sequence on every rank | local: no communication |
| any | sharded | ulysses, ring, or one over some axes and the other over the rest; gathered where neither can be |
| whole | sharded | merge too: each rank attends to its own keys |

Rows that every rank holds (a replicated text before a sharded image) need no case of their own: Ulysses takes heads of
them for free, the ring rows; their output is computed once and gathered.

Legend: B batch, H query heads, K key/value heads, S global sequence, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from cpcompile.errors import Refusal
from cpcompile.heads import heads_match
from cpcompile.layout import Axis, Dim, Layout, Segment, sharded, whole
from cpcompile.orders import is_one_sided, zigzag
from cpcompile.positions import refuse_stretches
from cpcompile.site import Kind, RingCall, Site, SiteOptions
from cpcompile.sizes import Size, at_most, divide


@dataclass(frozen=True)
class Attended:
    """An attention call outside of any exchange: leading dimensions agree, the head dim is whole.

    left, right: what positions hide. banded: the call is ``banded_attention``, which is a plain call nowhere.
    """

    query: Layout
    key: Layout
    value: Layout
    left: Size | None = None
    right: Size | None = None
    banded: bool = False

    @property
    def seq(self) -> int:
        """The dimension of queries, or keys."""
        return len(self.query.dims) - 2

    @property
    def keys(self) -> Dim:
        """How keys lie."""
        return self.key.dims[self.seq]

    @property
    def rows(self) -> Dim:
        """How queries lie."""
        return self.query.dims[self.seq]

    @property
    def result(self) -> Layout:
        """Rows of the queries, features of the values; of the keys what queries are broadcast over."""
        layouts = (self.query, self.key, self.value)
        lead = (next((x.dims[i] for x in layouts if x.shape[i] != 1), whole(1)) for i in range(self.seq))
        return Layout((*lead, self.rows, whole(self.value.shape[-1])))

    @property
    def key_axes(self) -> tuple[Axis, ...]:
        """The axes that divide the keys, outermost first."""
        return _ordered(self.keys)

    def site(self, kind: Kind, ring: RingCall | None, reason: str = "") -> Site:
        """The site in which attention runs on these."""
        return Site(kind, self.query, self.key, self.value, self.result, ring, reason)


def local(call: Attended, options: SiteOptions) -> Site | Refusal:
    """Keys are whole: attention of the rows that a rank has."""
    return _alone(call, "local", options, "")


def shared_out(
    call: Attended, heads_over: tuple[Axis, ...], ring_over: tuple[Axis, ...], options: SiteOptions
) -> Site | Refusal:
    """Heads divided over some of the keys' axes (Ulysses), keys travelling over the others (ring)."""
    inside = _divided(call, heads_over) if heads_over else call
    if isinstance(inside, Refusal):
        return inside
    if not ring_over:
        return _alone(inside, "ulysses", options, "")
    group = frozenset(ring_over)
    spread = _spread(inside.rows, ring_over, zigzag if is_one_sided(call.left, call.right) else sharded)
    refused = refuse_stretches(inside.keys, group) or (refuse_stretches(spread) if _hides(call) else None)
    if refused is not None:
        return refused
    inside = replace(inside, query=inside.query.with_dim(call.seq, spread))
    ring = RingCall(ring_over, call.left, call.right, options.rotation, options.wide)
    return inside.site("unified" if heads_over else "ring", ring)


def merged(call: Attended, options: SiteOptions) -> Site | Refusal:
    """The queries are everyone's: results over each rank's own keys are merged."""
    axes = call.key_axes
    if call.rows.axes & frozenset(axes):
        return Refusal("queries are divided")
    refused = refuse_stretches(call.keys, frozenset(axes)) or (refuse_stretches(call.rows) if _hides(call) else None)
    if refused is not None:
        return refused
    return call.site("merge", RingCall(axes, call.left, call.right, "merge", options.wide))


def gathered(call: Attended, heads_over: tuple[Axis, ...], options: SiteOptions, reason: str) -> Site | Refusal:
    """Heads divided over some of the keys' axes, keys and values gathered over the others."""
    inside = _divided(call, heads_over) if heads_over else call
    if isinstance(inside, Refusal):
        return inside
    seq = call.seq
    everywhere = replace(
        inside,
        key=inside.key.with_dim(seq, whole(call.key.shape[seq])),
        value=inside.value.with_dim(seq, whole(call.value.shape[seq])),
    )
    return _alone(everywhere, "ulysses+gathered" if heads_over else "gathered", options, reason)


def refuse_heads(call: Attended, axes: Sequence[Axis]) -> str:
    """Why heads cannot be divided over ``axes``, or "" where they can."""
    ranks = 1
    for axis in axes:
        ranks *= axis.size
    if call.seq < 2:
        return "there is no head dimension"
    at = call.seq - 1
    heads, kv_heads = call.query.shape[at], call.key.shape[at]
    repeats = divide(heads, kv_heads)
    if not call.query.dims[at].is_replicated or not call.key.dims[at].is_replicated:
        return "heads are sharded already"
    if at_most(ranks, heads) is not True:
        return f"{heads} heads for {ranks} ranks"
    if not isinstance(repeats, int) or call.value.shape[at] != kv_heads:
        return f"{heads} heads are no multiple of {kv_heads} key/value heads"
    if repeats > 1 and not isinstance(kv_heads, int) and divide(kv_heads, ranks) is None:
        return f"{kv_heads} key/value heads may not be a multiple of {ranks} ranks"
    return ""


def _divided(call: Attended, axes: tuple[Axis, ...]) -> Attended | Refusal:
    """Heads in place of the sequence over ``axes``."""
    refused = refuse_heads(call, axes)
    if refused:
        return Refusal(refused)
    seq, gone = call.seq, frozenset(axes)
    heads, kv_heads = call.query.shape[seq - 1], call.key.shape[seq - 1]
    repeats = divide(heads, kv_heads)
    assert isinstance(repeats, int)
    needed = Dim((Segment(kv_heads, axes, covers=repeats),))
    found: list[Layout] = []
    for by_head, layout in zip((sharded(heads, axes), needed, needed), (call.query, call.key, call.value), strict=True):
        kept = layout.dims[seq].gathered(gone)
        if kept is None:
            return Refusal(f"({layout.dims[seq]}) without {', '.join(axis.name for axis in axes)} is no layout")
        found.append(layout.with_dim(seq, kept).with_dim(seq - 1, by_head))
    return replace(call, query=found[0], key=found[1], value=found[2])


def _alone(call: Attended, kind: Kind, options: SiteOptions, reason: str) -> Site | Refusal:
    """A rank attends to keys that it has: by positions where it has only some rows and positions count.

    A key/value head that several ranks' query heads share may take this operator too: it knows whose head it is.
    """
    ring: RingCall | None = None
    if call.banded or (_hides(call) and not call.rows.is_replicated) or not heads_match(call.query, call.key):
        refused = refuse_stretches(call.rows) if _hides(call) else None
        if refused is not None:
            return refused
        ring = RingCall((), call.left, call.right, "allgather", options.wide)
    return call.site(kind, ring, reason)


def _spread(rows: Dim, axes: tuple[Axis, ...], divided: Callable[[Size, tuple[Axis, ...]], Dim]) -> Dim:
    """Rows with those that every rank holds divided too: each is computed once."""
    if rows.is_replicated and rows.size == 1:
        return rows
    return Dim.of(
        *(divided(part.size, axes) if isinstance(part, Segment) and part.is_replicated else part for part in rows.parts)
    )


def _hides(call: Attended) -> bool:
    return call.left is not None or call.right is not None


def _ordered(dim: Dim) -> tuple[Axis, ...]:
    """The axes of a dim, outermost first."""
    found: list[Axis] = []
    for part in dim.parts:
        axes = part.axes if isinstance(part, Segment) else (*part.outer.axes, *_ordered(part.inner))
        found.extend(axis for axis in axes if axis not in found)
    return tuple(found)
