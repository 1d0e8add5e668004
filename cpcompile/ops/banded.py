"""Attention that sees a band of keys around each query: what an explicit mask of positions is turned into.

On one device it is ``scaled_dot_product_attention`` with that mask. On ranks ``lower`` puts attention by positions in
its place, which makes no mask.

Legend: B batch, H heads, S keys, T queries.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

_lib = torch.library.Library("cpcompile", "FRAGMENT")
_lib.define(
    "banded_attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, SymInt? left, SymInt? right, "
    "float? scale, bool enable_gqa) -> Tensor"
)


def band_mask(queries: int, keys: int, left: int | None, right: int | None, device: torch.device) -> torch.Tensor:
    """[T, S] booleans, true where ``q - k <= left`` and ``k - q <= right``."""
    distance = torch.arange(keys, device=device) - torch.arange(queries, device=device)[:, None]
    mask = torch.ones((queries, keys), dtype=torch.bool, device=device)
    if left is not None:
        mask = mask & (distance >= -left)
    return mask if right is None else mask & (distance <= right)


def _banded_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    left: int | None,
    right: int | None,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    mask = band_mask(query.shape[-2], key.shape[-2], left, right, query.device)
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        mask = mask & attn_mask
    elif attn_mask is not None:
        mask = attn_mask.masked_fill(~mask, float("-inf"))
    return F.scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=enable_gqa)


_lib.impl("banded_attention", _banded_attention, "CompositeImplicitAutograd")

banded_attention = torch.ops.cpcompile.banded_attention.default
