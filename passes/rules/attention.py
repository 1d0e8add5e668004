"""Which attention a site becomes: decided from the layouts of q, k, v and the mask alone.

| q | k, v | kind |
|---|---|---|
| any | whole sequence on every rank | local: no communication, mask rows as the queries lie |
| whole | sharded | gathered: keys and values are gathered |
| sharded | sharded | ulysses over the axes where heads allow it, gathered over the others |

Segments that every rank holds (a replicated text before a sharded image) need no case of their own: the exchange
takes heads of them for free, and gathers their output once.

Legend: B batch, H query heads, K key/value heads, S global sequence, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from cpcompile.errors import Refusal
from cpcompile.layout import Axis, Dim, Layout, Segment, sharded, whole
from cpcompile.passes.rules.call import Answer, Call, Operand, agree, broadcast_to, local_only, reduced
from cpcompile.reshape import meet
from cpcompile.sizes import at_most, divide

Kind: TypeAlias = Literal["local", "ulysses", "gathered", "ulysses+gathered", "whole"]
"""``whole``: every rank computes all of it, on gathered operands."""


@dataclass(frozen=True)
class Site:
    """How one attention call runs.

    kind: what it became. query, key, value: how they lie when the local attention runs. result: how its output then
    lies. causal_rows: the causal flag must become a mask, because a rank holds only some of the query rows.
    """

    kind: Kind
    query: Layout
    key: Layout
    value: Layout
    result: Layout
    causal_rows: bool = False
    reason: str = ""


Policy: TypeAlias = Literal["auto", "local"]
"""``local`` runs every site on local shards, as a patch that missed it would: wrong on purpose, for tests."""


def attention(call: Call, gather_axes: Sequence[Axis], policy: Policy = "auto") -> tuple[Answer, Site] | Refusal:
    """The decision for one ``scaled_dot_product_attention`` call.

    ``gather_axes`` are the axes over which keys and values are gathered rather than exchanged for heads.
    """
    q, k, v = (reduced(call.operand(name)) for name in ("query", "key", "value"))
    count = len(q.dims)
    if count < 3:
        return Refusal("attention without a batch or head dimension")
    if len(k.dims) != count or len(v.dims) != count:
        return Refusal("query, key and value of different rank")
    q, k, v = _leading_agree(q, k, v)
    seq = count - 2
    keys = meet(k.dims[seq], v.dims[seq])
    k, v = (_with(x, seq, k.dims[seq] if isinstance(keys, Refusal) else keys) for x in (k, v))
    taken = frozenset[Axis]().union(*(dim.axes for x in (q, k, v) for dim in x.dims[:seq]))
    q, k, v = (_with(x, seq, x.dims[seq] if not x.dims[seq].axes & taken else whole(x.shape[seq])) for x in (q, k, v))
    if policy == "local":
        site = Site("local", q.layout, k.layout, v.layout, _output(q, k, v))
        return _answer(call, q, k, v, site, mask_keys=k.dims[seq])
    site = _site(call, q, k, v, seq, gather_axes)
    if call["dropout_p"] and not all(layout.is_replicated for layout in (site.query, site.key, site.value)):
        return Refusal("dropout inside attention draws random numbers for the whole score matrix")
    return _answer(call, q, k, v, site, mask_keys=whole(k.shape[seq]))


def _site(call: Call, q: Operand, k: Operand, v: Operand, seq: int, gather_axes: Sequence[Axis]) -> Site:
    causal = bool(call["is_causal"])
    key_axes = k.dims[seq].axes
    if not key_axes:
        rows = causal and not q.dims[seq].is_replicated
        return Site("local", q.layout, k.layout, v.layout, _output(q, k, v), rows)
    ordered = _ordered(k.dims[seq])
    wanted = tuple(axis for axis in ordered if axis in q.dims[seq].axes and axis not in gather_axes)
    reason = _heads_refuse(q, k, seq, wanted) if wanted else ""
    exchanged = () if reason else wanted
    heads = seq - 1
    query = q.layout.with_dim(seq, q.dims[seq].without(exchanged))
    key = k.layout.with_dim(seq, whole(k.shape[seq]))
    value = v.layout.with_dim(seq, whole(v.shape[seq]))
    if exchanged:
        query = query.with_dim(heads, sharded(q.shape[heads], exchanged))
        key = key.with_dim(heads, sharded(k.shape[heads], exchanged))
        value = value.with_dim(heads, sharded(v.shape[heads], exchanged))
    rest = key_axes - set(exchanged)
    kind: Kind = "gathered" if not exchanged else "ulysses+gathered" if rest else "ulysses"
    rows = causal and not query.dims[seq].is_replicated
    return Site(kind, query, key, value, _output(replace(q, layout=query), replace(k, layout=key), v), rows, reason)


def _heads_refuse(q: Operand, k: Operand, seq: int, axes: Sequence[Axis]) -> str:
    """Why heads cannot be divided over ``axes``, or "" where they can."""
    ranks = 1
    for axis in axes:
        ranks *= axis.size
    if seq < 2:
        return "there is no head dimension"
    heads, kv_heads = q.shape[seq - 1], k.shape[seq - 1]
    if not q.dims[seq - 1].is_replicated or not k.dims[seq - 1].is_replicated:
        return "heads are sharded already"
    if at_most(ranks, heads) is not True or at_most(ranks, kv_heads) is not True:
        return f"{heads} heads and {kv_heads} key/value heads for {ranks} ranks"
    if heads != kv_heads and divide(kv_heads, ranks) is None:
        return f"{kv_heads} grouped key/value heads are not a multiple of {ranks} ranks"
    return ""


def _leading_agree(q: Operand, k: Operand, v: Operand) -> tuple[Operand, Operand, Operand]:
    """Batch and head dimensions lie alike in all three; the head dim is whole."""
    seq = len(q.dims) - 2
    heads_alike = q.shape[:seq] == k.shape[:seq] == v.shape[:seq]
    free = range(seq, seq + 2) if heads_alike else range(max(seq - 1, 0), seq + 2)
    cores = [replace(x, layout=local_only(x.layout, list(free))) for x in (q, k, v)]
    ones = [
        replace(x, layout=Layout(tuple(whole(1) if i in free else dim for i, dim in enumerate(x.dims)))) for x in cores
    ]
    shape = tuple(
        1 if i in free else next((x.shape[i] for x in ones if x.shape[i] != 1), 1) for i in range(len(q.dims))
    )
    common, _ = agree(ones, shape)
    agreed: list[Operand] = []
    for x in (q, k, v):
        lead = broadcast_to(x, common).dims
        dims = tuple(x.dims[i] if i == seq else whole(x.shape[i]) if i in free else lead[i] for i in range(len(x.dims)))
        agreed.append(replace(x, layout=Layout(dims)))
    return agreed[0], agreed[1], agreed[2]


def _answer(call: Call, q: Operand, k: Operand, v: Operand, site: Site, mask_keys: Dim) -> tuple[Answer, Site]:
    operands: dict[str, Layout | Sequence[Layout]] = {"query": q.layout, "key": k.layout, "value": v.layout}
    mask = call["attn_mask"]
    if isinstance(mask, Operand):
        scores = Layout((*site.result.dims[:-1], mask_keys))
        operands["attn_mask"] = broadcast_to(reduced(mask), scores)
    return Answer(operands, (_output(q, k, v),)), site


def _output(q: Operand, k: Operand, v: Operand) -> Layout:
    """Rows of the queries, features of the values; where queries are broadcast over the keys' batch or heads, those."""
    seq = len(q.dims) - 2
    lead = (next((x.dims[i] for x in (q, k, v) if x.shape[i] != 1), whole(1)) for i in range(seq))
    return Layout((*lead, q.dims[seq], whole(v.shape[-1])))


def _with(operand: Operand, index: int, dim: Dim) -> Operand:
    return replace(operand, layout=operand.layout.with_dim(index, dim))


def _ordered(dim: Dim) -> tuple[Axis, ...]:
    """The axes of a dim, outermost first."""
    found: list[Axis] = []
    for part in dim.parts:
        axes = part.axes if isinstance(part, Segment) else (*part.outer.axes, *_ordered(part.inner))
        found.extend(axis for axis in axes if axis not in found)
    return tuple(found)
