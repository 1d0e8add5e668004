"""One attention kernel call with its log-sum-exp (LSE), forward and backward: the only place that knows kernels.

    attend(q, k, v, mask, causal, scale)                              -> (out_BHTD, lse_BHT)
    attend_backward(grad_out, q, k, v, out, lse, mask, causal, scale) -> (grad_q, grad_k, grad_v)

Which kernel runs follows ``torch.nn.attention.sdpa_kernel``, the operands' device and dtype. The backward takes the
GLOBAL ``out`` and ``lse`` of a row whose keys are spread over many calls, and gives this call's exact share of the
gradients (FlashAttention-2, Dao 2023, section 3.1: the probabilities of a block are exp(scores - lse)).

Legend: B batch, H heads, K key/value heads (H is a multiple), T query rows, S keys, D head dim of q and k, E that of v.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends
from torch.nn.functional import pad

from cpcompile.ops.neutral import accumulation_dtype

aten = torch.ops.aten

Mask: TypeAlias = "torch.Tensor | None"
Gradients: TypeAlias = "tuple[torch.Tensor, torch.Tensor, torch.Tensor]"


@dataclass(frozen=True)
class Kernel:
    """A kernel behind the interface. grouped: whether it takes fewer key/value heads than heads as they are.
    same_head_dim: whether the head dims of q and v must be equal."""

    forward: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    backward: Callable[..., Gradients]
    grouped: bool = True
    same_head_dim: bool = True


def attend(
    q_BHTD: torch.Tensor,
    k_BKSD: torch.Tensor,
    v_BKSE: torch.Tensor,
    mask: Mask,
    causal: bool,
    scale: float | None,
    *,
    reference: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of some rows to some keys: ``(out_BHTE, lse_BHT)``.

    ``mask`` broadcasts to [B, H, T, S]: booleans (True is visible) or scores to add. ``causal`` is aligned top-left. A
    row that sees nothing, also where there are no keys at all, gives 0 and an LSE of -inf. The LSE is in fp32, or fp64;
    so is the output where no fused kernel rounds it. ``reference``: no fused kernel, as for a mask with a gradient.
    """
    if 0 in q_BHTD.shape[:3] or 0 in k_BKSD.shape:  # a kernel that divides by the number of keys ends the process
        lse_dtype = accumulation_dtype(q_BHTD.dtype)
        out = q_BHTD.new_zeros((*q_BHTD.shape[:3], v_BKSE.shape[3]))
        return out, q_BHTD.new_full(q_BHTD.shape[:3], -math.inf, dtype=lse_dtype)
    kernel = _kernel(q_BHTD, v_BKSE, mask, reference)
    scale = q_BHTD.shape[3] ** -0.5 if scale is None else scale
    q, k, v = _fitted(kernel, q_BHTD, k_BKSD, v_BKSE)
    bias = _bias(mask, q)
    out, lse = kernel.forward(q, k, v, bias, causal, scale)
    if bias is not None:
        lse = torch.where(_sees(bias, causal, q.shape[2], k.shape[2]), lse, -math.inf)
    return out, lse


def attend_backward(
    grad_out_BHTE: torch.Tensor,
    q_BHTD: torch.Tensor,
    k_BKSD: torch.Tensor,
    v_BKSE: torch.Tensor,
    out_BHTE: torch.Tensor,
    lse_BHT: torch.Tensor,
    mask: Mask,
    causal: bool,
    scale: float | None,
    *,
    reference: bool = False,
) -> Gradients:
    """This call's share of the gradients of q, k and v, from the rows' global output and LSE: in the kernel's dtype."""
    if 0 in q_BHTD.shape[:3] or 0 in k_BKSD.shape:
        return torch.zeros_like(q_BHTD), torch.zeros_like(k_BKSD), torch.zeros_like(v_BKSE)
    kernel = _kernel(q_BHTD, v_BKSE, mask, reference)
    scale = q_BHTD.shape[3] ** -0.5 if scale is None else scale
    q, k, v = _fitted(kernel, q_BHTD, k_BKSD, v_BKSE)
    grad_out, out = grad_out_BHTE.to(q.dtype), out_BHTE.to(saved_dtype(q, v, mask, reference=reference))
    # A row that sees nothing anywhere has scores of -inf: with any finite LSE its probabilities are 0.
    lse = torch.where(lse_BHT == -math.inf, 0.0, lse_BHT)
    grad_q, grad_k, grad_v = kernel.backward(grad_out, q, k, v, out, lse, _bias(mask, q), causal, scale)
    return grad_q, _regrouped(grad_k, k_BKSD.shape[1]), _regrouped(grad_v, k_BKSD.shape[1])


def mask_gradient(
    grad_out_BHTE: torch.Tensor,
    q_BHTD: torch.Tensor,
    k_BKSD: torch.Tensor,
    v_BKSE: torch.Tensor,
    out_BHTE: torch.Tensor,
    lse_BHT: torch.Tensor,
    mask: Mask,
    causal: bool,
    scale: float | None,
) -> torch.Tensor:
    """The gradient of scores to add, [B, H, T, S]: the reference's, from the rows' global output and LSE."""
    scale = q_BHTD.shape[3] ** -0.5 if scale is None else scale
    q, k, v = _fitted(MATH, q_BHTD, k_BKSD, v_BKSE)
    lse = torch.where(lse_BHT == -math.inf, 0.0, lse_BHT)
    return _scores_gradient(grad_out_BHTE, q, k, v, out_BHTE, lse, _bias(mask, q), causal, scale)[1]


def is_reference(q: torch.Tensor, v: torch.Tensor, mask: Mask, *, reference: bool = False) -> bool:
    """Whether such a call runs without a fused kernel."""
    return _kernel(q, v, mask, reference) is MATH


def saved_dtype(q: torch.Tensor, v: torch.Tensor, mask: Mask, *, reference: bool = False) -> torch.dtype:
    """In which dtype the backward takes the output: it is as exact as that of one device, which has the weights."""
    return accumulation_dtype(q.dtype) if is_reference(q, v, mask, reference=reference) else q.dtype


def _kernel(q: torch.Tensor, v: torch.Tensor, mask: Mask, reference: bool) -> Kernel:
    """The first kernel in the order of ``sdpa_kernel`` that takes these operands, as one device chooses."""
    if reference:
        return MATH
    allowed: Mapping[SDPBackend, Kernel] = _BY_DEVICE.get(q.device.type, {})
    half = q.dtype in (torch.float16, torch.bfloat16)
    for backend in _cur_sdpa_kernel_backends(with_priority=True):
        if backend is SDPBackend.MATH or (q.dtype is torch.float64 and q.device.type != "cpu"):
            return MATH
        kernel = allowed.get(backend)
        if kernel is None or (q.device.type != "cpu" and not half and backend is not SDPBackend.EFFICIENT_ATTENTION):
            continue
        if kernel.same_head_dim and q.shape[3] != v.shape[3]:
            continue
        if backend is SDPBackend.FLASH_ATTENTION and mask is not None and q.device.type != "cpu":
            continue  # it has no argument for one
        return kernel
    return MATH


def _fitted(kernel: Kernel, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Operands as the kernel takes them: each row contiguous, heads repeated where it must be."""
    if not kernel.grouped and k.shape[1] != q.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    return tuple(x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))


def _regrouped(grad: torch.Tensor, heads: int) -> torch.Tensor:
    """Gradients of repeated heads, summed."""
    if grad.shape[1] == heads:
        return grad
    summed: torch.Tensor = grad.unflatten(1, (heads, -1)).sum(2, dtype=accumulation_dtype(grad.dtype))
    return summed


def _bias(mask: Mask, q: torch.Tensor) -> Mask:
    """The mask as scores to add, in four dimensions and the dtype of q."""
    if mask is None:
        return None
    if mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, -math.inf)
    mask = mask.to(q.dtype)
    return mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))


def _sees(bias: torch.Tensor, causal: bool, rows: int, keys: int) -> torch.Tensor:
    """Which rows see a key: [B, H, T], broadcast."""
    visible = bias > -math.inf
    if causal:
        visible = visible & torch.ones((rows, keys), dtype=torch.bool, device=bias.device).tril()
    return visible.any(-1)


def _math(q: Any, k: Any, v: Any, bias: Any, causal: bool, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    scores = _scores(q, k, bias, causal, scale)
    lse = torch.logsumexp(scores, -1)
    weights = torch.softmax(scores, -1).masked_fill((lse == -math.inf).unsqueeze(-1), 0.0)
    return torch.matmul(weights, v.to(weights.dtype)), lse


def _math_backward(
    grad_out: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, bias: Any, causal: bool, scale: float
) -> Gradients:
    weights, grad_scores = _scores_gradient(grad_out, q, k, v, out, lse, bias, causal, scale)
    wide = weights.dtype
    grad_scores = grad_scores * scale
    return (
        torch.matmul(grad_scores, k.to(wide)),
        torch.matmul(grad_scores.mT, q.to(wide)),
        torch.matmul(weights.mT, grad_out.to(wide)),
    )


def _scores_gradient(
    grad_out: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, bias: Any, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The probabilities, and the gradient of the scores."""
    weights = torch.exp(_scores(q, k, bias, causal, scale) - lse.unsqueeze(-1))
    grad = grad_out.to(weights.dtype)
    delta = (grad * out.to(weights.dtype)).sum(-1, keepdim=True)
    return weights, weights * (torch.matmul(grad, v.to(weights.dtype).mT) - delta)


def _scores(q: torch.Tensor, k: torch.Tensor, bias: Mask, causal: bool, scale: float) -> torch.Tensor:
    wide = accumulation_dtype(q.dtype)
    scores = torch.matmul(q.to(wide) * scale, k.to(wide).mT)
    if bias is not None:
        scores = scores + bias
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    return scores


def _cpu_flash(q: Any, k: Any, v: Any, bias: Any, causal: bool, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
    return out, lse


def _cpu_flash_backward(
    grad_out: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, bias: Any, causal: bool, scale: float
) -> Gradients:
    grads: Gradients = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out, q, k, v, out, lse, 0.0, causal, attn_mask=bias, scale=scale
    )
    return grads


def _cuda_flash(q: Any, k: Any, v: Any, _bias: Any, causal: bool, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v, dim = *_in_eights(q, k, v), v.shape[3]
    out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
    return out[..., :dim], lse


def _cuda_flash_backward(
    grad_out: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, _bias: Any, causal: bool, scale: float
) -> Gradients:
    dim, (rows, keys) = v.shape[3], (q.shape[2], k.shape[2])
    grad_out, q, k, v, out = _in_eights(grad_out, q, k, v, out)
    seed = torch.empty(0, dtype=torch.int64, device=q.device)  # of a dropout that there is not
    grads = aten._scaled_dot_product_flash_attention_backward(
        grad_out, q, k, v, out, lse, None, None, rows, keys, 0.0, causal, seed, seed, scale=scale
    )
    return grads[0][..., :dim], grads[1][..., :dim], grads[2][..., :dim]


def _in_eights(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Head dims padded to a multiple of 8."""
    return tuple(pad(x, (0, -x.shape[3] % 8)) for x in tensors)


def _efficient(q: Any, k: Any, v: Any, bias: Any, causal: bool, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(
        q, k, v, _aligned(bias, q, k), True, 0.0, causal, scale=scale
    )
    return out, lse[..., : q.shape[2]]  # rows are padded to a multiple of 32


def _efficient_backward(
    grad_out: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, bias: Any, causal: bool, scale: float
) -> Gradients:
    seed = torch.empty((), dtype=torch.int64, device=q.device)
    padded = pad(lse, (0, -lse.shape[2] % 32), value=math.inf)
    grads = aten._scaled_dot_product_efficient_attention_backward(
        grad_out,
        q,
        k,
        v,
        _aligned(bias, q, k),
        out,
        padded,
        seed,
        seed,
        0.0,
        [True, True, True, False],
        causal,
        scale=scale,
    )
    return grads[0], grads[1], grads[2]


def _aligned(bias: Mask, q: torch.Tensor, k: torch.Tensor) -> Mask:
    """The bias of every head and row, with rows that start at multiples of 16 elements in memory."""
    if bias is None:
        return None
    keys = k.shape[2]
    full = bias.expand(q.shape[0], q.shape[1], q.shape[2], keys)
    return pad(full, (0, -keys % 16))[..., :keys]


def _cudnn(q: Any, k: Any, v: Any, bias: Any, causal: bool, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
        q, k, v, _aligned(bias, q, k), True, 0.0, causal, False, scale=scale
    )
    return out, lse.squeeze(-1)


def _cudnn_backward(
    grad_out: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, bias: Any, causal: bool, scale: float
) -> Gradients:
    seed = torch.empty((), dtype=torch.int64, device=q.device)
    grads: Gradients = aten._scaled_dot_product_cudnn_attention_backward(
        grad_out,
        q,
        k,
        v,
        out,
        lse.unsqueeze(-1),
        seed,
        seed,
        _aligned(bias, q, k),
        None,
        None,
        q.shape[2],
        k.shape[2],
        0.0,
        causal,
        scale=scale,
    )
    return grads


MATH = Kernel(_math, _math_backward, grouped=False, same_head_dim=False)
CPU_FLASH = Kernel(_cpu_flash, _cpu_flash_backward)
_BY_DEVICE: Mapping[str, Mapping[SDPBackend, Kernel]] = {
    "cpu": {SDPBackend.FLASH_ATTENTION: CPU_FLASH},
    "cuda": {
        SDPBackend.FLASH_ATTENTION: Kernel(_cuda_flash, _cuda_flash_backward),
        SDPBackend.EFFICIENT_ATTENTION: Kernel(_efficient, _efficient_backward, grouped=False, same_head_dim=False),
        SDPBackend.CUDNN_ATTENTION: Kernel(_cudnn, _cudnn_backward, grouped=False),
    },
}
