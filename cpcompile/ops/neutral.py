"""Rank-neutral operators: what a rewritten graph says before it is lowered.

On global values each of them is the identity, so a rewritten graph run on one device still computes the single-device
result. How a value lies before and after stands in ``node.meta["cp"]``; ``lower`` turns each into this rank's part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

_lib = torch.library.Library("cpcompile", "FRAGMENT")

_SINGLE = ("shard", "gather", "all_to_all", "reduce", "pend")
_PACKED = ("exchange", "enter")

for _name in _SINGLE:
    _lib.define(f"{_name}(Tensor x) -> Tensor")
for _name in _PACKED:
    _lib.define(f"{_name}(Tensor[] tensors) -> Tensor[]")
_lib.define(
    "partial_sum(Tensor x, int[] dim, bool keepdim, SymInt[] count, ScalarType dtype) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _identity(x: torch.Tensor) -> Any:
    return torch.ops.aten.alias.default(x)


def _identities(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.ops.aten.alias.default(tensor) for tensor in tensors]


def _partial_sum(
    x: torch.Tensor, dim: Sequence[int], keepdim: bool, count: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """The rank's share of a sum, over the GLOBAL count where it is a mean; in fp32 where ``dtype`` is narrower."""
    summed = torch.sum(x, list(dim), keepdim=keepdim, dtype=accumulation_dtype(dtype))
    for size in count:
        summed = summed / size
    return summed


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of ``dtype`` are summed over ranks."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


for _name in _SINGLE:
    _lib.impl(_name, _identity, "CompositeImplicitAutograd")
for _name in _PACKED:
    _lib.impl(_name, _identities, "CompositeImplicitAutograd")
_lib.impl("partial_sum", _partial_sum, "CompositeImplicitAutograd")

shard = torch.ops.cpcompile.shard.default
gather = torch.ops.cpcompile.gather.default
all_to_all = torch.ops.cpcompile.all_to_all.default
reduce = torch.ops.cpcompile.reduce.default
pend = torch.ops.cpcompile.pend.default
exchange = torch.ops.cpcompile.exchange.default
enter = torch.ops.cpcompile.enter.default
partial_sum = torch.ops.cpcompile.partial_sum.default

RESHARDS = (shard, gather, all_to_all, reduce, exchange)
NEUTRAL = (*RESHARDS, pend, enter)
