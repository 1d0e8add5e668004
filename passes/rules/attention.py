"""The rule of attention calls: how q, k, v and the mask must lie, how the output does, and which kind runs in between.

Legend: B batch, H query heads, K key/value heads, S global sequence, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from cpcompile.errors import Refusal
from cpcompile.layout import Axis, Dim, Layout, whole
from cpcompile.ops.banded import banded_attention
from cpcompile.passes.rules.call import Answer, Call, Operand, agree, broadcast_to, local_only, reduced
from cpcompile.passes.rules.choose import Setting, choose
from cpcompile.passes.rules.kinds import Attended
from cpcompile.reshape import meet
from cpcompile.site import RingCall, Site, SiteOptions
from cpcompile.sizes import Size

SITES = (torch.ops.aten.scaled_dot_product_attention.default, banded_attention)
"""The operators that are attention calls."""


def attention(call: Call, setting: Setting, *, shared: bool = False) -> tuple[Answer, Site] | Refusal:
    """The decision for one call of ``SITES``; shared: its keys and values are one tensor."""
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
    attended = Attended(q.layout, k.layout, v.layout, *_limits(call), banded=call.target is banded_attention)
    if setting.options.policy == "local":
        return _answer(call, attended, attended.site("local", None), mask_keys=k.dims[seq])
    site = choose(attended, setting, k.dtype, shared=shared)
    if isinstance(site, Refusal):
        return site
    if (
        not attended.banded
        and call["dropout_p"]
        and not all(layout.is_replicated for layout in (site.query, site.key, site.value))
    ):
        return Refusal("dropout inside attention draws random numbers for the whole score matrix")
    return _answer(call, attended, site, mask_keys=whole(k.shape[seq]))


def alone(call: Call, options: SiteOptions) -> RingCall | None:
    """What runs where every rank has all of it: a band is not made a mask of."""
    left, right = _limits(call)
    return RingCall((), left, right, "allgather", options.wide) if call.target is banded_attention else None


def _limits(call: Call) -> tuple[Size | None, Size | None]:
    """What positions hide."""
    if call.target is banded_attention:
        return call["left"], call["right"]
    return None, 0 if call["is_causal"] else None


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


def _answer(call: Call, attended: Attended, site: Site, mask_keys: Dim) -> tuple[Answer, Site]:
    operands: dict[str, Layout | Sequence[Layout]] = {
        "query": attended.query,
        "key": attended.key,
        "value": attended.value,
    }
    mask = call["attn_mask"]
    if isinstance(mask, Operand):
        scores = Layout((*site.result.dims[:-1], mask_keys))
        operands["attn_mask"] = broadcast_to(reduced(mask), scores)
    return Answer(operands, (attended.result,)), site


def _with(operand: Operand, index: int, dim: Dim) -> Operand:
    return replace(operand, layout=operand.layout.with_dim(index, dim))
