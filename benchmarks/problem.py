"""The attention problem that every contestant gets, its answer on one device, and how ranks share it.

B batch, H heads, S global sequence, T local sequence, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch.nn import functional

BATCH, HEADS, HEAD_DIM = 1, 8, 64

Order: TypeAlias = Literal["plain", "head-tail"]
"""Which tokens a rank holds: its run of them, or one run from the front and its mirror image from the back."""


@dataclass(frozen=True)
class Problem:
    """One attention call, whole on every rank: tensors are [B, H, S, D], the same on all of them."""

    tokens: int
    rank: int
    ranks: int
    causal: bool
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    cotangent: torch.Tensor

    @property
    def inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query, key and value."""
        return self.query, self.key, self.value

    def shard(self, x_BHSD: torch.Tensor, order: Order = "plain") -> torch.Tensor:
        """This rank's tokens of a whole tensor."""
        if order == "plain":
            return x_BHSD.chunk(self.ranks, dim=2)[self.rank]
        pieces = x_BHSD.chunk(2 * self.ranks, dim=2)
        return torch.cat([pieces[self.rank], pieces[2 * self.ranks - 1 - self.rank]], dim=2)


@dataclass(frozen=True)
class Answer:
    """What one device computes: the output, and where asked for, the gradients of query, key and value."""

    parts: dict[str, torch.Tensor]


def make_problem(tokens: int, rank: int, ranks: int, causal: bool) -> Problem:
    """Draw a problem; equal arguments draw equal tensors."""
    generator = torch.Generator().manual_seed(tokens)
    shape = (BATCH, HEADS, tokens, HEAD_DIM)
    query, key, value, cotangent = (torch.randn(shape, generator=generator) for _ in range(4))
    return Problem(tokens, rank, ranks, causal, query, key, value, cotangent)


def solve(problem: Problem, backward: bool) -> Answer:
    """Dense attention on one device."""
    query, key, value = inputs = [x.detach().requires_grad_(backward) for x in problem.inputs]
    out = functional.scaled_dot_product_attention(query, key, value, is_causal=problem.causal)
    parts = {"out": out.detach()}
    if backward:
        gradients = torch.autograd.grad(out, inputs, problem.cotangent)
        parts |= dict(zip(("dq", "dk", "dv"), gradients, strict=True))
    return Answer(parts)
