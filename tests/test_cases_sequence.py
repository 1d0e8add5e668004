"""What models do to the sequence: positions, flattening, means, slices, residuals from before the split."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cpcompile import check
from tests.small_models import (
    SPLIT,
    Attention,
    Block,
    Feedforward,
    Input,
    Output,
    Tower,
    covered,
    equal,
    rand,
    rope_tables,
    rotated,
    sharp,
)


class Rotary(nn.Module):
    """Rotary positions from a table that the plan does not name, on [B, S, H, D] or on [B, H, S, D]."""

    def __init__(self, heads_first: bool) -> None:
        super().__init__()
        self.heads_first, self.qkv, self.out = heads_first, nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x, table=None):
        cos, sin = rope_tables(x.shape[1], 4, x.device) if table is None else table
        q, k, v = (part.unflatten(-1, (4, 4)) for part in self.qkv(x).chunk(3, -1))
        if self.heads_first:
            q, k, v = (part.transpose(1, 2) for part in (q, k, v))
            q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        else:
            q, k = (rotated(part, cos[None, :, None], sin[None, :, None]) for part in (q, k))
            q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("given", ["built inside", "whole", "sharded"])
def test_rotary_positions(heads_first, given):
    table = None if given == "built inside" else rope_tables(9, 4, torch.device("cpu"))
    plan = {"": {"x": Input(1), "table": [Input(0), Input(0)]}} if given == "sharded" else SPLIT
    covered(equal(Rotary(heads_first), plan, rand(2, 9, 16), table))


class ComplexRotary(nn.Module):
    """Rotary positions as complex numbers, from an outer product of positions and frequencies."""

    def forward(self, x):
        angles = torch.outer(torch.arange(x.shape[1]).double(), 0.5 ** torch.arange(2).double())
        turned = (
            torch.view_as_complex(x.unflatten(-1, (4, 2, 2))) * torch.polar(torch.ones_like(angles), angles)[:, None]
        )
        heads = torch.view_as_real(turned).flatten(-2).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads)


def test_rotary_positions_as_complex_numbers():
    covered(equal(ComplexRotary(), SPLIT, rand(2, 9, 16, grad=True)))


class Positions(nn.Module):
    """Learned positions, cut to the length, and sinusoids built from an arange."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.embedding, self.block = nn.Parameter(torch.randn(1, 32, 16)), nn.Embedding(32, 16), Block()

    def forward(self, x):
        position = torch.arange(x.shape[1])
        waves = torch.cat(
            [(position[:, None] * 0.1 * torch.arange(1, 9)).sin(), position[:, None].expand(-1, 8) / 8], 1
        )
        x = x + self.table[:, : x.shape[1]] + self.embedding(position)[None] + waves.double()
        return self.block(x)


def test_positions_added_inside():
    equal(Positions(), SPLIT, rand(2, 9, 16))


class Flattened(nn.Module):
    """Tokens of all batches in one dimension, through a feedforward, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.ff, self.attn = nn.LayerNorm(16), Feedforward(), Attention()

    def forward(self, x):
        batch, size, width = x.shape
        flat = self.ff(self.norm(x.view(batch * size, width)))
        x = flat.view(batch, size, width)
        x = x + self.attn(x)
        return x.flatten(0, 1).relu().unflatten(0, (batch, size)), x.reshape(-1, width).sum(0)


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_batch_and_sequence_flattened_and_back(batch):
    covered(equal(Flattened(), SPLIT, rand(batch, 9, 16)))


class TwoFlattened(nn.Module):
    """Two batches of tokens of different lengths joined into one row of tokens, then split again."""

    def __init__(self) -> None:
        super().__init__()
        self.ff = Feedforward()

    def forward(self, x, y):
        rows = torch.cat([x.flatten(0, 1), y.flatten(0, 1)])
        first, second = self.ff(rows).split([x.shape[0] * x.shape[1], y.shape[0] * y.shape[1]])
        return first.view(x.shape), second.view(y.shape)


@pytest.mark.parametrize("names", ["x", "y", "xy"])
def test_two_flattened_batches_joined_and_split(names):
    plan = {"": {name: Input(1) for name in names}}
    covered(equal(TwoFlattened(), plan, rand(2, 7, 16), rand(3, 5, 16, seed=1)))


class TokenTimesteps(nn.Module):
    """A timestep for each token, flattened, embedded, unflattened and used as a modulation."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.modulation, self.block = nn.Linear(8, 16), nn.Linear(16, 32), Block()

    def forward(self, x, timestep):
        angles = timestep.flatten()[:, None] * 0.5 ** torch.arange(4).double()[None]
        temb = self.embed(torch.cat([angles.sin(), angles.cos()], dim=-1)).unflatten(0, timestep.shape)
        scale, shift = self.modulation(F.silu(temb)).unflatten(-1, (2, -1)).unbind(2)
        return self.block(x * (1 + scale) + shift)


@pytest.mark.parametrize("names", [("x",), ("x", "timestep"), ("timestep",)])
def test_a_timestep_for_each_token(names):
    plan = {"": {name: Input(1) for name in names}}
    covered(equal(TokenTimesteps(), plan, rand(2, 9, 16), rand(2, 9, seed=1)))


class Pooled(nn.Module):
    """The mean over the tokens, back on every token and as an output of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.ff = nn.Linear(16, 16), Feedforward()

    def forward(self, x):
        pooled = self.gate(x.mean(dim=1))
        x = self.ff(x * pooled.sigmoid()[:, None] + x.mean(1, keepdim=True))
        return x, pooled, x.sum(), x.amax(dim=1), x.var(dim=1), x.std(), (x - x.mean()).pow(2).mean().sqrt()


def test_means_and_sums_over_the_tokens():
    equal(Pooled(), SPLIT, rand(2, 9, 16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [8, 9, 13])
def test_a_mean_in_half_precision_over_uneven_shards_is_rounded_once(dtype, size):
    class Mean(nn.Module):
        def forward(self, x):
            return x.mean(dim=1), x.sum(dim=1)

    x = (rand(2, size, 64) + 3).to(dtype)
    for ring, ulysses in ((1, 2), (1, 3), (2, 2)):
        report = check(Mean(), SPLIT, ring=ring, ulysses=ulysses, args=(x,))
        assert report.max_error <= 2 * torch.finfo(dtype).eps, str(report)


class Residual(nn.Module):
    """A tensor kept from before the split is added after it, whole and in part."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks, self.out = nn.Linear(16, 16), nn.ModuleList([Block(), Block()]), nn.Linear(16, 16)

    def forward(self, x, control=None):
        kept = self.embed(x)
        first = self.blocks[0](kept)
        difference = first - kept
        second = self.blocks[1](first)
        if control is not None:
            second = second + control[0] + control[1][:, None]
        return self.out(second + difference) + x, kept


@pytest.mark.parametrize("plan", [{"blocks.0": {"x": Input(1)}}, {"blocks.1": {"x": Input(1)}, "out": Output(1)}])
@pytest.mark.parametrize("controlled", [False, True])
def test_a_residual_from_before_the_split(plan, controlled):
    control = [rand(2, 9, 16, seed=1, grad=True), rand(2, 16, seed=2, grad=True)] if controlled else None
    covered(equal(Residual(), plan, rand(2, 9, 16, grad=True), control))


class Windows(nn.Module):
    """Tokens grouped in windows of three, attention inside each, and a merge of pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.attn, self.merge = Attention(), nn.Linear(32, 16)

    def forward(self, x):
        batch, size, width = x.shape
        x = self.attn(x.view(batch * (size // 3), 3, width)).view(batch, size, width)
        return self.merge(x.view(batch, size // 2, 2 * width))


@pytest.mark.parametrize("size", [12, 18])
def test_windows_and_merged_pairs(size):
    equal(Windows(), SPLIT, rand(2, size, 16))


class Rolled(nn.Module):
    """Shifts, flips, cumulative sums, strided slices, gathers: what mixes tokens without a sum."""

    def forward(self, x):
        x = x + torch.roll(x, 2, dims=1) + x.flip(1)
        x = x + x.cumsum(1)
        order = torch.arange(x.shape[1] - 1, -1, -1)
        picked = x[:, order] + x.index_select(1, order)
        doubled = x.repeat_interleave(2, dim=1)[:, ::2]
        padded = F.pad(x, (0, 0, 1, 1))[:, 1:-1]
        largest = x.topk(2, dim=1).values.sum(1, keepdim=True)
        return picked + doubled + padded, x[:, ::2], x[:, -1], torch.stack([x, 2 * x], 1), x.softmax(1), largest


def test_operators_that_mix_tokens():
    equal(Rolled(), SPLIT, rand(2, 9, 16, grad=True))


class CausalLM(nn.Module):
    """Labels are shifted and the loss is taken inside."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.tower, self.head = nn.Embedding(11, 16), Tower(causal=True), nn.Linear(16, 11)

    def forward(self, tokens, labels):
        logits = self.head(self.tower(self.embedding(tokens)))
        shifted = F.pad(labels, (0, 1), value=-100)[..., 1:]
        loss = F.cross_entropy(logits.flatten(0, 1), shifted.flatten(), ignore_index=-100)
        return loss, F.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:]), logits


@pytest.mark.parametrize("names", [("tokens",), ("tokens", "labels")])
def test_a_loss_over_shifted_labels(names):
    tokens = torch.arange(16).view(2, 8) * 7 % 11
    equal(CausalLM(), {"": {name: Input(1) for name in names}}, tokens, tokens)


def test_single_precision():
    for ring, ulysses in ((1, 2), (2, 1), (2, 2)):
        report = check(
            sharp(Tower()).float(), SPLIT, ring=ring, ulysses=ulysses, args=(rand(2, 9, 16).float(),), backward=True
        )
        assert report.ok, str(report)
        assert report.tolerance <= 1e-5
