"""Hand-written modules of a few parameters, one for each thing that models do, and what the case tests ask of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from cpcompile import CheckReport, ContextParallelInput, ContextParallelOutput
from cpcompile.compiled import captured_call, plan_of
from cpcompile.pipeline import Options
from cpcompile.reference import reference
from cpcompile.simulate import check_captured, mesh_axes

Input: Any = ContextParallelInput
Output: Any = ContextParallelOutput

SPLIT = {"": {"x": Input(1)}}
"""The plan of most models here: one input, its sequence in dimension 1."""

MESHES = ((1, 2), (2, 1), (2, 2))
"""Ulysses, gathered keys and values, and both: (ring, ulysses)."""


def rand(*shape: int, seed: int = 0, grad: bool = False) -> torch.Tensor:
    """Normal random numbers in fp64, the same in every run."""
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_(grad)


def padding(*valid: int, size: int) -> torch.Tensor:
    """[B, S], true for the first ``valid[b]`` keys of row b."""
    return torch.arange(size)[None, :] < torch.tensor(valid)[:, None]


def sharp(model: nn.Module) -> nn.Module:
    """The model in fp64 and evaluation mode, every parameter random (biases and norms too)."""
    model = model.double().eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            fan_in = parameter.shape[-1] if parameter.dim() > 1 else 4
            fresh = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(fresh / math.sqrt(fan_in))
    return model


def equal(
    model: nn.Module,
    plan: Mapping[str, Any],
    *args: Any,
    meshes: Sequence[tuple[int, int]] = MESHES,
    tolerance: float = 1e-10,
    **kwargs: Any,
) -> list[CheckReport]:
    """Check one call of ``sharp(model)``, forward and backward, on every mesh (ring, ulysses): one device's numbers.

    What ``cpcompile.check`` does, with one capture and one reference for all meshes.
    """
    model = sharp(model)
    captured = captured_call(model, plan_of(model, plan), args, kwargs)
    against = reference(model, args, kwargs, backward=True)
    reports: list[CheckReport] = []
    for ring, ulysses in meshes:
        axes = mesh_axes(ring, ulysses)
        run = partial(check_captured, model, captured, axes, args, kwargs, Options(verify=True), against=against)
        report = run(backward=True, tolerance=tolerance)
        if not report.ok:
            raise AssertionError(str(run(backward=True, tolerance=tolerance, bisect=True)))
        reports.append(report)
    return reports


def covered(reports: Sequence[CheckReport]) -> list[CheckReport]:
    """The reports, none of which may have an operator that ran on gathered operands."""
    for report in reports:
        assert not report.fallbacks, str(report)
    return list(reports)


def kinds(report: CheckReport) -> list[str]:
    """What each attention call became."""
    return [site.kind for site in report.sites]


class Attention(nn.Module):
    """Attention of x to itself or to a context, over [B, S, C]."""

    def __init__(
        self,
        width: int = 16,
        heads: int = 4,
        *,
        kv_heads: int | None = None,
        value_dim: int | None = None,
        causal: bool = False,
        scale: float | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads = heads, kv_heads or heads
        self.head_dim = width // heads if width >= heads else 2
        self.value_dim = value_dim or self.head_dim
        self.causal, self.scale, self.dropout = causal, scale, dropout
        self.to_q = nn.Linear(width, heads * self.head_dim)
        self.to_k = nn.Linear(width, self.kv_heads * self.head_dim, bias=False)  # its gradient would be zero
        self.to_v = nn.Linear(width, self.kv_heads * self.value_dim)
        self.to_out = nn.Linear(heads * self.value_dim, width)

    def forward(
        self, x: torch.Tensor, context: torch.Tensor | None = None, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        context = x if context is None else context
        q = self.to_q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k = self.to_k(context).unflatten(-1, (self.kv_heads, -1)).transpose(1, 2)
        v = self.to_v(context).unflatten(-1, (self.kv_heads, -1)).transpose(1, 2)
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=self.causal,
            scale=self.scale,
            enable_gqa=self.heads != self.kv_heads,
        )
        return self.to_out(out.transpose(1, 2).flatten(2))


class Feedforward(nn.Module):
    """Two linears and what is between them."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """A transformer block: self attention, cross attention where there is a context, feedforward."""

    def __init__(self, width: int = 16, heads: int = 4, *, cross: bool = False, **attention: Any) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Attention(width, heads, **attention)
        self.cross = Attention(width, heads) if cross else None
        self.ff = Feedforward(width)

    def forward(
        self, x: torch.Tensor, context: torch.Tensor | None = None, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        x = x + self.attn(self.norm1(x), mask=mask)
        if self.cross is not None:
            x = x + self.cross(x, context)
        return x + self.ff(self.norm2(x))


class Tower(nn.Module):
    """Blocks between an embedding and an output projection."""

    def __init__(self, width: int = 16, heads: int = 4, depth: int = 2, **block: Any) -> None:
        super().__init__()
        self.embed = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width, heads, **block) for _ in range(depth))
        self.out = nn.Linear(width, width)

    def forward(
        self, x: torch.Tensor, context: torch.Tensor | None = None, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x, context, mask)
        return self.out(x)


class JointAttention(nn.Module):
    """Two streams with projections of their own, one attention over [text, image] (or [image, text])."""

    def __init__(self, width: int = 16, heads: int = 4, *, image_first: bool = False) -> None:
        super().__init__()
        self.heads, self.image_first = heads, image_first
        self.text_qkv, self.image_qkv = nn.Linear(width, 3 * width), nn.Linear(width, 3 * width)
        self.text_out, self.image_out = nn.Linear(width, width), nn.Linear(width, width)

    def forward(
        self, text: torch.Tensor, image: torch.Tensor, mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        texts = [part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.text_qkv(text).chunk(3, -1)]
        images = [part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.image_qkv(image).chunk(3, -1)]
        pairs: Sequence[tuple[torch.Tensor, ...]] = list(zip(texts, images, strict=True))
        q, k, v = (torch.cat(pair[::-1] if self.image_first else pair, dim=2) for pair in pairs)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)
        sizes = [text.shape[1], image.shape[1]]
        if self.image_first:
            image_part, text_part = out.split(sizes[::-1], dim=1)
        else:
            text_part, image_part = out.split(sizes, dim=1)
        return self.text_out(text_part), self.image_out(image_part)


class Joint(nn.Module):
    """Text and image through joint blocks; both come out."""

    def __init__(self, width: int = 16, heads: int = 4, depth: int = 2, *, image_first: bool = False) -> None:
        super().__init__()
        self.attn = nn.ModuleList(JointAttention(width, heads, image_first=image_first) for _ in range(depth))
        self.norm = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))

    def forward(
        self, text: torch.Tensor, image: torch.Tensor, mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        for attn, norm in zip(self.attn, self.norm, strict=True):
            more_text, more_image = attn(norm(text), norm(image), mask)
            text, image = text + more_text, image + more_image
        return text, image


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of pairs of features by tables that broadcast to x."""
    even, odd = x[..., 0::2], x[..., 1::2]
    turned = torch.stack([-odd, even], dim=-1).flatten(-2)
    return x * cos + turned * sin


def rope_tables(size: int, head_dim: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of [S, D], as a model builds them from positions counted from zero."""
    frequencies = 0.5 ** torch.arange(head_dim // 2, device=device, dtype=torch.float64)
    angles = torch.outer(torch.arange(size, device=device, dtype=torch.float64), frequencies)
    angles = angles.repeat_interleave(2, dim=-1)
    return angles.cos(), angles.sin()
