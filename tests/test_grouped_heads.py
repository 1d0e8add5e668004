"""Query heads that share key/value heads (GQA, MQA), divided over any number of ranks: only what each needs travels."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cpcompile.heads import HeadMap, head_map
from cpcompile.layout import Axis, Dim, Layout, Segment, sharded, whole
from tests.small_models import SPLIT, kinds, rand
from tests.test_sites import checked

BATCH, HEAD_DIM, ITEMSIZE = 2, 4, 8

HEADS = [(4, 1, 2), (4, 2, 4), (6, 2, 4), (12, 3, 2), (6, 3, 2), (8, 2, 3), (7, 1, 5), (12, 6, 4)]
"""Query heads, key/value heads, ranks."""


class Grouped(nn.Module):
    def __init__(self, heads: int, kv_heads: int, *, causal: bool = False, bias: bool = False, enable: bool = True):
        super().__init__()
        self.heads, self.kv_heads, self.causal, self.enable = heads, kv_heads, causal, enable
        self.to_q = nn.Linear(16, heads * HEAD_DIM)
        self.to_k, self.to_v = nn.Linear(16, kv_heads * HEAD_DIM), nn.Linear(16, kv_heads * HEAD_DIM)
        self.slopes = nn.Parameter(torch.zeros(heads, 1, 1)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.to_q(x).unflatten(-1, (self.heads, HEAD_DIM)).transpose(1, 2)
        k, v = (to(x).unflatten(-1, (self.kv_heads, HEAD_DIM)).transpose(1, 2) for to in (self.to_k, self.to_v))
        at = torch.arange(x.shape[1], device=x.device)
        mask = None if self.slopes is None else self.slopes * (at - at[:, None]).abs()
        out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=self.causal, enable_gqa=self.enable)
        return out.transpose(1, 2).flatten(2)


def held(heads: int, ranks: int, rank: int) -> range:
    """The query heads of a rank: as even as can be, the larger shares first."""
    sizes = [(heads + ranks - 1 - index) // ranks for index in range(ranks)]
    return range(sum(sizes[:rank]), sum(sizes[: rank + 1]))


@pytest.mark.parametrize(("heads", "kv_heads", "ranks"), HEADS)
@pytest.mark.parametrize("size", [13, 16])
def test_each_rank_is_sent_the_heads_that_its_own_use(heads: int, kv_heads: int, ranks: int, size: int) -> None:
    report = checked(Grouped(heads, kv_heads), SPLIT, rand(BATCH, size, 16, grad=True), axes=(Axis("ulysses", ranks),))
    (site,) = report.sites
    assert site.kind == "ulysses"
    group = heads // kv_heads
    mine = [held(heads, ranks, rank) for rank in range(ranks)]
    tokens = [len(held(size, ranks, rank)) for rank in range(ranks)]
    used = [len({head // group for head in own}) for own in mine]
    assert list(site.bytes_sent) == [
        BATCH
        * HEAD_DIM
        * ITEMSIZE
        * (
            tokens[rank] * (heads - len(mine[rank]))
            + 2 * tokens[rank] * (sum(used) - used[rank])
            + len(mine[rank]) * (size - tokens[rank])
        )
        for rank in range(ranks)
    ]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (4, 1), (12, 3)])
def test_masks_and_both_kinds_of_axes(heads: int, kv_heads: int, causal: bool, bias: bool) -> None:
    if causal and bias:
        return
    model = Grouped(heads, kv_heads, causal=causal, bias=bias)
    report = checked(model, SPLIT, rand(BATCH, 13, 16, grad=True), axes=(Axis("ring", 2), Axis("ulysses", 4)))
    assert kinds(report) == ["unified"]
    report = checked(model, SPLIT, rand(BATCH, 13, 16, grad=True), axes=(Axis("ulysses", 4),))
    assert kinds(report) == ["ulysses"]


def test_one_head_is_broadcast_without_being_asked() -> None:
    report = checked(Grouped(6, 1, enable=False), SPLIT, rand(BATCH, 13, 16, grad=True), axes=(Axis("ulysses", 4),))
    assert kinds(report) == ["ulysses"]


def test_neighbours_both_hold_a_head_that_is_cut() -> None:
    axes = (Axis("ulysses", 4),)
    segment = Segment(2, axes, covers=3)  # six query heads: 0 1 | 2 3 | 4 | 5
    assert [segment.bounds({"ulysses": rank}) for rank in range(4)] == [(0, 1), (0, 2), (1, 1), (1, 1)]
    assert str(segment) == "2 ulysses x3"
    assert Segment(4, axes, covers=3) == Segment(4, axes)
    assert Segment(2, covers=3) == Segment(2)


def test_whose_head_each_query_head_uses() -> None:
    axes = (Axis("ulysses", 4),)
    query = Layout((whole(2), sharded(6, axes), whole(8), whole(4)))
    key = Layout((whole(2), Dim((Segment(2, axes, covers=3),)), whole(8), whole(4)))
    maps = [head_map(query, key, {"ulysses": rank}) for rank in range(4)]
    assert maps == [HeadMap(), HeadMap(3, 2), HeadMap(), HeadMap()]
