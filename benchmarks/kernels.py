"""The CPU's flash attention with its log-sum-exp, in the shapes in which others call a kernel.

Most rings call kernels of GPUs. On a CPU this one is put into their hands: the one that
``scaled_dot_product_attention`` runs there, so that what differs is the way they distribute the work.
"""

from __future__ import annotations

from typing import Any

import torch

_aten = torch.ops.aten


def flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [B, H, S, D] and log-sum-exp [B, H, S] of tensors [B, H, S, D]."""
    out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
    )
    return out, lse


def flash_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    is_causal: bool = False,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value, of tensors [B, H, S, D] and a log-sum-exp [B, H, S]."""
    query_grad, key_grad, value_grad = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out, query, key, value, out, logsumexp, 0.0, is_causal, scale=scale
    )
    return query_grad, key_grad, value_grad


def template_forward(
    ctx: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _save_ctx: bool = True,
    **_config: Any,
) -> Any:
    """The ``forward_op`` of the templates in diffusers and cache-dit: tensors are [B, S, H, D]."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    out, lse = flash(q, k, v, attn_mask, dropout_p, is_causal, scale=scale)
    out, lse = out.transpose(1, 2), lse.transpose(1, 2)
    if _save_ctx:
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.is_causal, ctx.scale = is_causal, scale
    return (out, lse) if return_lse else out


def template_backward(ctx: Any, grad_out: torch.Tensor, **given: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The ``backward_op`` beside it; a ring gives the merged output and log-sum-exp."""
    names = ("query", "key", "value", "out", "lse")
    tensors = [given.get(name, saved) for name, saved in zip(names, ctx.saved_tensors, strict=True)]
    grad, q, k, v, out, lse = (x.transpose(1, 2) for x in (grad_out, *tensors))
    gradients = flash_backward(grad, q, k, v, out, lse, ctx.is_causal, ctx.scale)
    return tuple(x.transpose(1, 2) for x in gradients)
