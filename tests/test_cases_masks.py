"""Masks in whole models: every shape and dtype, from the caller or built inside, over every kind of attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.small_models import MESHES, SPLIT, Attention, Input, Tower, covered, equal, padding, rand

B, H, S = 2, 4, 10
VALID = padding(7, 4, size=S)
SHAPES = {
    "keys": (B, 1, 1, S),
    "keys of each head": (B, H, 1, S),
    "pairs": (B, 1, S, S),
    "pairs of each head": (B, H, S, S),
    "pairs of all": (S, S),
    "keys of all": (1, S),
    "no batch": (H, S, S),
    "queries": (B, 1, S, 1),
}


def mask_of(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A random mask; no row of it is without a visible key."""
    scores = rand(*shape, seed=3)
    if dtype is not torch.bool:
        return scores.to(dtype)
    mask = scores > 0
    mask[..., 0] = True
    return mask


@pytest.mark.parametrize("dtype", [torch.bool, torch.float64])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_whole_mask_of_every_shape(dtype, shape):
    covered(equal(Tower(depth=1), SPLIT, rand(B, S, 16), None, mask_of(shape, dtype), meshes=[(1, 2), (2, 2), (3, 1)]))


@pytest.mark.parametrize(
    "name", [name for name in SHAPES if name != "queries"]
)  # a softmax does not see what a row has in common
def test_a_bias_that_is_learned(name):
    bias = rand(*SHAPES[name], seed=4, grad=True)
    equal(Tower(depth=1), SPLIT, rand(B, S, 16, grad=True), None, bias)


@pytest.mark.parametrize(("along", "dtype"), [("queries", torch.bool), ("keys", torch.float64)])
@pytest.mark.parametrize("name", SHAPES)
def test_a_mask_that_the_plan_shards(dtype, name, along):
    shape = SHAPES[name]
    plan = {"": {"x": Input(1), "mask": Input(-2 if along == "queries" else -1)}}
    equal(Tower(depth=1), plan, rand(B, S, 16), None, mask_of(shape, dtype))


class Masked(nn.Module):
    """Builds its mask from what it is given, as models do."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.attn = kind, Attention()

    def forward(self, x: torch.Tensor, valid: torch.Tensor | None = None) -> torch.Tensor:
        return self.attn(x, mask=self.mask(x, valid))

    def mask(self, x: torch.Tensor, valid: torch.Tensor | None) -> torch.Tensor:
        size = x.shape[1]
        row = torch.arange(size, device=x.device)
        distance = row[:, None] - row[None, :]
        if self.kind == "window":
            return distance.abs() <= 2
        if self.kind == "causal window":
            return (distance >= 0) & (distance < 3)
        if self.kind == "tril":
            return torch.ones(size, size, dtype=torch.bool).tril()
        if self.kind == "triu":
            return torch.full((size, size), float("-inf"), dtype=x.dtype).triu(1)
        if self.kind == "alibi":
            slopes = 0.5 ** torch.arange(1, 5, dtype=x.dtype)
            return -distance.abs().to(x.dtype)[None] * slopes[:, None, None]
        if self.kind == "segments":
            segment = row // 4
            return segment[:, None] == segment[None, :]
        assert valid is not None
        if self.kind == "padding":
            return valid[:, None, None, :]
        if self.kind == "additive padding":
            return (1.0 - valid[:, None, None, :].to(x.dtype)) * -1e9
        if self.kind == "masked fill":
            return torch.zeros_like(valid, dtype=x.dtype).masked_fill(~valid, float("-inf"))[:, None, None, :]
        if self.kind == "where":
            bias = torch.where(valid, torch.zeros((), dtype=x.dtype), torch.full((), -1e9, dtype=x.dtype))
            return bias.unsqueeze(1).unsqueeze(1).expand(-1, 4, size, -1)
        if self.kind == "pairs":
            return (valid[:, :, None] & valid[:, None, :])[:, None] | (distance == 0)
        if self.kind == "causal and padding":
            return (distance >= 0)[None, None] & valid[:, None, None, :]
        if self.kind == "repeated":
            return valid.view(-1, 1, 1, size).repeat(1, 4, size, 1)
        assert self.kind == "lengths"
        return row[None, None, None, :] < valid.sum(dim=1)[:, None, None, None]


BUILT = ("window", "causal window", "tril", "triu", "alibi", "segments")
GIVEN = (
    "padding",
    "additive padding",
    "masked fill",
    "where",
    "pairs",
    "causal and padding",
    "repeated",
    "lengths",
)


@pytest.mark.parametrize("kind", BUILT)
def test_a_mask_built_from_positions(kind):
    equal(Masked(kind), SPLIT, rand(B, S, 16))


@pytest.mark.parametrize("kind", GIVEN)
@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "sharded"])
def test_a_mask_built_from_the_valid_tokens(kind, sharded):
    plan = {"": {"x": Input(1), "valid": Input(1)}} if sharded else SPLIT
    equal(Masked(kind), plan, rand(B, S, 16), VALID)


class SoftCapped(nn.Module):
    """Scores capped by a tanh, with a window: attention written by hand."""

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in x.chunk(3, -1))
        scores = 5.0 * torch.tanh(q @ k.transpose(-1, -2) / 10.0)
        row = torch.arange(x.shape[1])
        scores = scores.masked_fill((row[:, None] - row[None, :]).abs() > 2, float("-inf"))
        return torch.softmax(scores, -1) @ v


def test_capped_scores_with_a_window():
    equal(SoftCapped(), SPLIT, rand(2, 9, 24, grad=True))


class Blind(nn.Module):
    """Attention of x to itself, without projections."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        heads = x.unflatten(-1, (4, 4)).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float64])
def test_keys_of_one_rank_all_masked_and_a_row_that_sees_nothing(dtype):
    visible = torch.ones(1, 1, 8, 8, dtype=torch.bool)
    visible[..., :4] = False
    visible[..., 4:] = torch.arange(8)[:, None] % 3 > 0  # rows 0, 3 and 6 see nothing
    mask: Any = visible
    if dtype is not torch.bool:
        mask = torch.zeros(1, 1, 8, 8, dtype=dtype).masked_fill(~visible, float("-inf"))
    equal(Blind(), SPLIT, rand(2, 8, 16, grad=True), mask, meshes=[*MESHES, (4, 1)])


@pytest.mark.parametrize("wanted", ["queries", "keys"])
def test_a_pair_mask_for_cross_attention(wanted):
    class Crossing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = Attention()

        def forward(self, x, context, mask):
            return self.attn(x, context, mask)

    plan = SPLIT if wanted == "queries" else {"": {"context": Input(1)}}
    args = rand(2, 9, 16), rand(2, 5, 16, seed=1), mask_of((2, 1, 9, 5), torch.bool)
    equal(Crossing(), plan, *args)
