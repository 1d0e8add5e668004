"""What a forward may be made of: each group of operators over sharded tensors gives the single device's numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cpcompile import CaptureError, check
from tests.small_models import SPLIT, Input, equal, rand

BOTH = {"": {"x": Input(1), "y": Input(1)}}
Function = Callable[[Any, torch.Tensor, torch.Tensor], Any]

FUNCTIONS: dict[str, Function] = {
    "slices": lambda m, x, y: (x[:, -3:], x[:, :-1], x[:, 1:] - x[:, :-1], x[:, ::3], x[:, 2:7:2], x.narrow(1, 2, 4)),
    "indices": lambda m, x, y: (x[:, -1], x[:, [1, 4]], x[torch.arange(2)], x[..., None, :], x.select(1, 0), x[1]),
    "gathers": lambda m, x, y: x.gather(1, torch.arange(9).flip(0)[None, :, None].expand(x.shape)).sin(),
    "scatters": lambda m, x, y: (
        torch.zeros_like(x).index_add(1, torch.arange(9).flip(0), x),
        torch.zeros_like(x).scatter(1, torch.arange(9).flip(0)[None, :, None].expand(x.shape), x),
        torch.zeros_like(x).scatter_add(1, torch.zeros(x.shape, dtype=torch.long), x),
    ),
    "splits": lambda m, x, y: (
        [part.sin() for part in x.split(2, 1)],
        x.chunk(4, 1),
        x.unbind(1),
        x.tensor_split(2, 1),
    ),
    "feature splits": lambda m, x, y: (x.chunk(3, -1), x.split([4, 12], -1), x.unbind(-1)[3], x.unbind(0)),
    "moves": lambda m, x, y: (x.roll(2, 1), x.flip(1), x.rot90(1, (1, 2)), x.movedim(1, 0), x.mT, x.roll(1, -1)),
    "pads": lambda m, x, y: (
        F.pad(x, (0, 0, 1, 2)),
        F.pad(x, (1, 1)),
        F.pad(x.mT, (2, 1), mode="replicate"),
        x.diff(dim=1),
    ),
    "scans": lambda m, x, y: (x.cumsum(1), x.cumprod(1), x.cumsum(-1), x.logcumsumexp(1)),
    "orders": lambda m, x, y: (
        x.max(1),
        x.argmax(1),
        x.sort(1)[0],
        x.topk(3, 1)[0],
        x.max(),
        x.amin(1),
        x.median(1)[0],
    ),
    "norms": lambda m, x, y: (x.norm(), x.norm(dim=1), x.var(1), x.std(), torch.linalg.vector_norm(x, dim=(1, 2))),
    "more reductions": lambda m, x, y: (
        x.prod(1),
        x.logsumexp(1),
        torch.var_mean(x, 1),
        x.softmax(1),
        x.log_softmax(1),
    ),
    "counts": lambda m, x, y: (
        (x > 0).sum(1),
        (x > 0).all(1),
        (x > 2).any(),
        x.isnan().any(),
        (x > 0).double().mean(1),
    ),
    "sums": lambda m, x, y: (x.sum(), x.sum((0, 1)), x.sum((1, 2), keepdim=True) + x, x.mean((0, 2)), x.sum() * x),
    "products": lambda m, x, y: (
        x @ m.w,
        x @ x.mT,
        x.mT @ x,
        torch.bmm(x, y.mT),
        x @ m.g,
        torch.einsum("bsc,btc->bst", x, y),
    ),
    "einsums": lambda m, x, y: (
        torch.einsum("bsc,cd->bsd", x, m.w),
        torch.einsum("bsc,bsd->bcd", x, x),
        x[0].mT @ x[1],
    ),
    "triangles": lambda m, x, y: ((x @ x.mT).tril(), (x @ x.mT).triu(1), torch.block_diag(x[0], m.w)),
    "distances": lambda m, x, y: (
        torch.cdist(x, y),
        F.cosine_similarity(x, x.flip(1), dim=-1),
        torch.outer(x[0, :, 0], y[0, :, 0]),
    ),
    "grids": lambda m, x, y: torch.meshgrid(x[0, :, 0], y[0, :, 1], indexing="ij"),
    "repeats": lambda m, x, y: (x.repeat(2, 2, 1), x.tile(3), x.repeat_interleave(3, 1), x.expand(3, -1, -1, -1)),
    "more repeats": lambda m, x, y: (
        x.repeat_interleave(2),
        x.repeat(2, 1, 1, 1),
        x[:, :1].expand(-1, 4, -1),
        x.repeat(1, 1, 2),
    ),
    "reshapes": lambda m, x, y: (
        x.flatten(1),
        x.reshape(-1),
        x.reshape(-1, 4),
        x.reshape(2, 2, -1),
        x.unflatten(1, (3, 3)),
    ),
    "permuted reshapes": lambda m, x, y: (
        x.permute(1, 0, 2).flatten(0, 1),
        x.permute(1, 0, 2).reshape(3, -1, 16),
        x.unflatten(1, (3, 3)).transpose(1, 2).flatten(1, 2),
        x.unflatten(2, (4, 4)).permute(0, 2, 1, 3).flatten(0, 1),
    ),
    "unfolds": lambda m, x, y: (x.unfold(1, 3, 1).sum(-1), F.interpolate(x.mT, scale_factor=2).mT),
    "factories": lambda m, x, y: (
        x * torch.ones_like(x).cumsum(1),
        x + x.new_ones(x.shape).cumsum(1),
        torch.zeros_like(y) + 1,
    ),
    "positions": lambda m, x, y: x + torch.linspace(0, 1, x.shape[1], dtype=x.dtype)[None, :, None] + torch.eye(9, 16),
    "conversions": lambda m, x, y: (
        x.to(torch.complex128).sum(1).abs(),
        x.view(torch.int64).bitwise_and(1),
        x.int().sum(1),
    ),
    "losses": lambda m, x, y: (
        F.mse_loss(x, x.sin()),
        F.l1_loss(x, x.cos(), reduction="sum"),
        F.kl_div(x, x.softmax(-1), reduction="sum"),
    ),
    "pending sums": lambda m, x, y: _pending(m, x.sum(1), x.mean(1), x),
    "one tensor twice": lambda m, x, y: (
        x + x,
        x * x,
        torch.cat([x, x], 1),
        torch.stack([x, x], 2),
        torch.where(x > 0, x, x),
    ),
    "nothing is changed": lambda m, x, y: (x, x, m.w, y, x.sin(), 3, None),
    "empty": lambda m, x, y: (torch.cat([y[:, :0], x], 1), x[..., :0], x[:, :0].sum(1), x[..., :0].sum(1)),
    "no gradient": lambda m, x, y: _without_gradient(m, x),
    "views written": lambda m, x, y: _views_written(x),
    "rows written": lambda m, x, y: _rows_written(m, x),
    "convolution": lambda m, x, y: m.conv(x.mT).mT,
    "group norm": lambda m, x, y: m.group_norm(x.mT),
    "slopes": lambda m, x, y: (m.prelu(x), m.prelu(x.mT), F.glu(x), F.rrelu(x)),
    "recurrence": lambda m, x, y: m.gru(x)[0],
    "torch's attention": lambda m, x, y: (m.mha(x, y, y)[0], m.mha(x, x, x, need_weights=False)[0]),
    "torch's encoder layer": lambda m, x, y: m.layer(x, src_key_padding_mask=torch.arange(9)[None].expand(2, 9) > 6),
    "queries of one batch": lambda m, x, y: _attend(_heads(x[:1]), _heads(y), _heads(y)),
    "keys of one batch": lambda m, x, y: _attend(_heads(x), _heads(y[:1]), _heads(y[:1])),
    "keys of one head": lambda m, x, y: _attend(_heads(x), _heads(y)[:, :1], _heads(y)[:, :1]),
    "queries of one head": lambda m, x, y: _attend(_heads(x)[:, :1], _heads(x), _heads(x)),
    "five dimensions": lambda m, x, y: _attend(*(_heads(x).unflatten(-1, (2, 2)).permute(0, 1, 3, 2, 4),) * 3),
}


def _heads(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(-1, (4, 4)).transpose(1, 2)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def _pending(m: Any, p: torch.Tensor, q: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor]:
    """Sums over the tokens in every place: what is linear in them, and what is not."""
    linear = [
        p + q,
        p - q * 2,
        F.linear(p, m.w),
        p @ m.w,
        p * m.g,
        p / m.g,
        -p,
        p.clone(),
        p.view(-1),
        p.t(),
        p[None] * 2,
    ]
    joined = [torch.cat([p, q]), torch.stack([p, q]), torch.cat([p, m.g[None]]), (p[None] * 2).expand(3, -1, -1)]
    return [
        *linear,
        *joined,
        p + m.g,
        p + 1,
        m.g / p,
        p.exp(),
        p * p,
        p * q,
        p > 0,
        torch.where(p > 0, p, q),
        p[:, None] * x,
    ]


def _without_gradient(m: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    with torch.no_grad():
        pooled, mixed = x.sum(1, keepdim=True), x * m.g + F.linear(x, m.w)
        with torch.enable_grad():
            counted = x * m.g
    return x * pooled + mixed, pooled, mixed, counted, x.detach() * x


def _views_written(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    a, b = x * 1, x * 2
    flat = a.view(2, -1)
    flat.relu_()
    b[b > 1] = 0.0
    b[:, :3] += 1
    b.transpose(1, 2)[:, 2:4].mul_(3)
    return a + 1, flat.sum(), b


def _rows_written(m: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    out = torch.zeros(x.shape[0], x.shape[1], 16, dtype=x.dtype)
    for index in range(0, x.shape[1], 3):
        out[:, index] = x[:, index] * index
    other = x * 1
    other[:, torch.tensor([0, 2])] = m.g * 2
    other[..., 4:8] = x[..., :4]
    return out, other


class Calls(nn.Module):
    """One function of x [B, S, C], y [B, T, C] and some parameters."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function
        self.w, self.g = nn.Parameter(torch.empty(16, 16)), nn.Parameter(torch.empty(16))
        self.conv, self.group_norm, self.prelu = nn.Conv1d(16, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.PReLU()
        self.gru, self.mha = nn.GRU(16, 8, batch_first=True), nn.MultiheadAttention(16, 4, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        return self.function(self, x, y)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("plan", [BOTH, SPLIT], ids=["both", "x"])
def test_operators(name, plan):
    args = rand(2, 9, 16, grad=True), rand(2, 5, 16, seed=1, grad=True)
    equal(Calls(FUNCTIONS[name]), plan, *args, meshes=[(2, 2)])


REFUSED: dict[str, Function] = {
    "a boolean index": lambda m, x, y: x[x > 0].sum(),
    "counted repeats": lambda m, x, y: x.repeat_interleave(torch.arange(9), dim=1),
    "a dimension that is hidden": lambda m, x, y: torch.vmap(lambda row: row @ m.w)(x),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_rank_could_know_is_refused(name):
    with pytest.raises(CaptureError, match=r"depends on data|hides a dimension"):
        check(Calls(REFUSED[name]).double(), SPLIT, ulysses=2, args=(rand(2, 9, 16), rand(2, 5, 16)))
