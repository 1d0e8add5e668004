"""The marker operator: while a model is captured, hooks pass the tensors that a plan names through it."""

from __future__ import annotations

import torch


@torch.library.custom_op("cpcompile::mark", mutates_args=())
def _mark(x: torch.Tensor, entry: int) -> torch.Tensor:
    """The identity. ``entry`` is the index of the plan's entry."""
    return x.clone()


@_mark.register_fake
def _(x: torch.Tensor, entry: int) -> torch.Tensor:
    return torch.empty_like(x)


def _backward(_ctx: object, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
    return grad, None


_mark.register_autograd(_backward)

mark = torch.ops.cpcompile.mark.default
