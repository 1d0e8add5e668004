"""Attention calls in whole models: heads, groups, sources of q, k and v, and how the call is written."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cpcompile import check
from tests.small_models import SPLIT, Attention, Block, Input, Output, Tower, covered, equal, kinds, rand, sharp


@pytest.mark.parametrize("size", [8, 9])
def test_lengths_that_do_and_do_not_divide(size):
    for report in covered(equal(Tower(), SPLIT, rand(2, size, 16, grad=True))):
        assert len(report.sites) == 2


def test_ten_tokens_over_ring_two_by_ulysses_two():
    (report,) = covered(equal(Tower(), SPLIT, rand(1, 10, 16), meshes=[(2, 2)]))
    assert kinds(report) == ["unified"] * 2


@pytest.mark.parametrize(("heads", "ulysses"), [(30, 4), (4, 3), (5, 2), (7, 4)])
def test_heads_that_do_not_divide(heads, ulysses):
    (report,) = equal(Tower(2 * heads, heads, depth=1), SPLIT, rand(2, 13, 2 * heads), meshes=[(1, ulysses)])
    assert kinds(report) == ["ulysses"]


def test_fewer_heads_than_ranks():
    (report,) = equal(Tower(16, 2, depth=1), SPLIT, rand(2, 13, 16), meshes=[(1, 3)])
    assert kinds(report) == ["ring"]
    assert "2 heads" in report.sites[0].reason


def test_tokens_that_eight_ranks_cannot_divide():
    (report,) = equal(Tower(16, 8, depth=1), SPLIT, rand(1, 27, 16), meshes=[(1, 8)])
    assert kinds(report) == ["ulysses"]


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 4), (8, 2), (8, 1), (6, 3), (6, 2)])
def test_grouped_heads_with_more_and_fewer_groups_than_ranks(heads, kv_heads):
    model = Tower(2 * heads, heads, depth=1, kv_heads=kv_heads)
    equal(model, SPLIT, rand(2, 9, 2 * heads), meshes=[(1, 2), (1, 4), (2, 2), (1, 3)])


@pytest.mark.parametrize("causal", [False, True])
def test_causal_self_attention(causal):
    equal(Tower(causal=causal), SPLIT, rand(2, 11, 16))


@pytest.mark.parametrize("scale", [0.3, 1.0])
def test_a_given_scale(scale):
    equal(Tower(depth=1, scale=scale), SPLIT, rand(2, 7, 16))


@pytest.mark.parametrize("value_dim", [1, 7])
def test_a_value_head_dim_of_its_own(value_dim):
    covered(equal(Tower(depth=1, value_dim=value_dim), SPLIT, rand(2, 7, 16)))


@pytest.mark.parametrize("text", [1, 5, 769])
def test_cross_attention_to_a_whole_text_moves_no_keys(text):
    model = Tower(depth=1, cross=True)
    for report in equal(model, SPLIT, rand(2, 9, 16), rand(2, text, 16, grad=True)):
        (cross,) = [site for site in report.sites if site.module.endswith("cross")]
        assert cross.kind == "local"
        assert set(cross.bytes_sent) == {0}


class Crossing(nn.Module):
    """One attention of x to a context."""

    def __init__(self, **attention: Any) -> None:
        super().__init__()
        self.attn = Attention(**attention)

    def forward(self, x, context, mask=None):
        return self.attn(x, context, mask)


BOTH = {"": {"x": Input(1), "context": Input(1)}}


@pytest.mark.parametrize(("queries", "keys"), [(9, 5), (5, 9)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("plan", [SPLIT, {"": {"context": Input(1)}}, BOTH], ids=["queries", "keys", "both"])
def test_queries_and_keys_of_different_lengths(queries, keys, causal, plan):
    args = rand(2, queries, 16, grad=True), rand(2, keys, 16, seed=1, grad=True)
    covered(equal(Crossing(causal=causal), plan, *args))


class OneTensor(nn.Module):
    """The same tensor as key and value, everything passed by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_kv = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        q = self.to_q(x).unflatten(-1, (4, 4)).transpose(1, 2)
        kv = self.to_kv(x).unflatten(-1, (4, 4)).transpose(1, 2)
        return F.scaled_dot_product_attention(is_causal=False, value=kv, key=kv, query=q, attn_mask=None)


def test_one_tensor_as_key_and_value_is_exchanged_once():
    args = rand(2, 8, 16)
    (report, *_) = equal(OneTensor(), SPLIT, args)
    (twice, *_) = equal(Crossing(), BOTH, args, args)
    assert kinds(report) == kinds(twice) == ["ulysses"]
    assert report.sites[0].bytes_sent[0] * 4 == twice.sites[0].bytes_sent[0] * 3


class AllOne(nn.Module):
    """x itself as query, key and value, without projections; heads from a view."""

    def forward(self, x):
        heads = x.view(*x.shape[:2], 4, 4).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads)


def test_one_tensor_as_everything():
    equal(AllOne(), SPLIT, rand(2, 7, 16, grad=True))


class Flat(nn.Module):
    """Attention of three dimensions: no head dimension, or batch and heads in one."""

    def __init__(self, folded: bool) -> None:
        super().__init__()
        self.folded, self.qkv, self.out = folded, nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        if self.folded:
            q, k, v = (part.unflatten(-1, (4, 4)).transpose(1, 2).flatten(0, 1) for part in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v)
        if self.folded:
            out = out.unflatten(0, (-1, 4)).transpose(1, 2).flatten(2)
        return self.out(out)


@pytest.mark.parametrize("folded", [False, True])
def test_attention_without_a_head_dimension(folded):
    covered(equal(Flat(folded), SPLIT, rand(2, 7, 16)))


class Unbatched(nn.Module):
    """Attention of [S, D] matrices, and of [H, S, D]."""

    def forward(self, x):
        return F.scaled_dot_product_attention(x[0], x[1], x[2]) + F.scaled_dot_product_attention(x, x, x)[0]


def test_attention_of_matrices():
    equal(Unbatched(), SPLIT, rand(3, 7, 4, grad=True))


class Fused(nn.Module):
    """q, k and v out of one projection, taken apart in one of the ways that models have."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.qkv, self.out = way, nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x):
        fused = self.qkv(x)
        batch, size, _ = fused.shape
        if self.way == "chunk":
            q, k, v = (part.view(batch, size, 4, 4).transpose(1, 2) for part in fused.chunk(3, dim=-1))
        elif self.way == "unbind":
            q, k, v = fused.reshape(batch, size, 3, 4, 4).permute(2, 0, 3, 1, 4).unbind(0)
        elif self.way == "index":
            qkv = fused.view(batch, size, 3, 4, 4).permute(0, 3, 1, 2, 4)
            q, k, v = qkv[..., 0, :], qkv[..., 1, :], qkv[..., 2, :]
        elif self.way == "split":
            q, k, v = (part.transpose(1, 2) for part in fused.unflatten(-1, (4, 12)).split([4, 4, 4], dim=-1))
        else:
            q, k, v = (part.squeeze(0) for part in fused.view(batch, size, 3, 4, 4).permute(2, 0, 3, 1, 4).chunk(3))
        out = F.scaled_dot_product_attention(q, k, v)
        return self.out(out.transpose(1, 2).reshape(batch, size, 16))


@pytest.mark.parametrize("way", ["chunk", "unbind", "index", "split", "permuted chunk"])
def test_q_k_and_v_of_one_projection(way):
    covered(equal(Fused(way), SPLIT, rand(2, 9, 16)))


class Unknown(nn.Module):
    """An attention processor of a class that nobody listed: it calls the function by another name."""

    def __call__(self, q, k, v):
        return torch._C._nn.scaled_dot_product_attention(q, k, v)


class Known(nn.Module):
    """An ordinary one."""

    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v)


class Processed(nn.Module):
    """Three layers, each with the processor that it was given."""

    def __init__(self, *processors: nn.Module) -> None:
        super().__init__()
        self.qkv = nn.ModuleList(nn.Linear(16, 48) for _ in processors)
        self.processors = nn.ModuleList(processors)

    def forward(self, x):
        for qkv, processor in zip(self.qkv, self.processors, strict=True):
            heads = (part.unflatten(-1, (4, 4)).transpose(1, 2) for part in qkv(x).chunk(3, -1))
            x = x + processor(*heads).transpose(1, 2).flatten(2)
        return x


def test_every_site_is_found_whatever_class_calls_it():
    for report in equal(Processed(Known(), Unknown(), Known()), SPLIT, rand(2, 8, 16)):
        assert len(report.sites) == 3
        assert "local" not in kinds(report)


class ByHand(nn.Module):
    """Attention written out in matrix products and a softmax: no site, and still equal."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (4, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        weights = torch.softmax(q @ k.transpose(-1, -2) / 2.0, dim=-1)
        return (weights @ v).transpose(1, 2).flatten(2)


def test_attention_written_out_by_hand():
    equal(ByHand(), SPLIT, rand(2, 7, 16))


def test_dropout_in_evaluation_is_no_dropout():
    (report,) = equal(Tower(dropout=0.5), SPLIT, rand(2, 8, 16), meshes=[(1, 2)])
    assert kinds(report) == ["ulysses"] * 2


def test_dropout_in_training_is_gathered_and_reported():
    model = sharp(Block(dropout=0.5)).train()
    report = check(model, SPLIT, ulysses=2, args=(rand(2, 8, 16),), backward=True)
    assert report.ok, "one draw for all ranks"
    assert kinds(report) == ["whole"]
    (fallback,) = report.fallbacks
    assert "dropout" in fallback.reason


def test_sequence_first():
    class SequenceFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tower = Tower()

        def forward(self, x):
            return self.tower(x.transpose(0, 1)).transpose(0, 1)

    plan = {"": {"x": Input(0, expected_dims=3)}, "tower.out": Output(1)}
    for report in covered(equal(SequenceFirst(), plan, rand(9, 3, 16))):
        assert len(report.sites) == 2
