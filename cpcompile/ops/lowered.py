"""The operators of lowered graphs, and where each takes the name of its group."""

from __future__ import annotations

from cpcompile.ops.collectives import all_reduce, enter_sum, exchange_blocks, pend_on_one
from cpcompile.ops.ring import ring_attention

LOWERED = (exchange_blocks, all_reduce, enter_sum, pend_on_one, ring_attention)
GROUP_ARGUMENT = {exchange_blocks: 8, all_reduce: 1, enter_sum: 1, ring_attention: 12}
