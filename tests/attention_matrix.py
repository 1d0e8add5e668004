"""Draws from the whole matrix of attention calls, and what one device computes for them.

Legend: B batch, H heads, K key/value heads, S keys, D head dim of q and k, E that of v.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

FLOATS = (torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16)
FLOOR = {torch.float32: 1e-7, torch.float64: 1e-12, torch.bfloat16: 1e-3, torch.float16: 1e-3}
"""What is added to twice the dense kernel's own error, relative to the scale of what is compared."""


_FUSED = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
_ORDERS = 3
_NUMBERS = 2048
"""About so many in each tensor: the largest of few rounding errors is luck, that of thousands tells kernels apart."""

LUCK, WITHIN = 4.0, 0.97
"""The largest of some rounding errors is a draw itself: about one in a hundred exceeds twice that of another kernel on
the same numbers, by half at most; and where what is compared cancels to nothing, one kernel's rounding may be zero. So
nearly all draws must be WITHIN what is allowed, and each within LUCK times that."""


@dataclass(frozen=True)
class Case:
    """One call: tensors of one device, and the arguments beside them."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None
    causal: bool
    scale: float | None
    shared: bool
    grad: torch.Tensor
    label: str = field(default="", compare=False)

    @property
    def grouped(self) -> bool:
        """Whether there are fewer key/value heads than heads."""
        return self.q.shape[1] != self.k.shape[1]

    @property
    def has_lowest_rows(self) -> bool:
        """Whether some row of the mask hides every key by a finite number."""
        if self.mask is None or self.mask.dtype is torch.bool:
            return False
        highest = self.mask.amax(-1)
        return bool((highest.isfinite() & (highest < -1e4)).any())

    def to(self, dtype: torch.dtype) -> Case:
        """The same numbers in another dtype."""
        mask = self.mask if self.mask is None or self.mask.dtype is torch.bool else self.mask.to(dtype)
        k = self.k.to(dtype)
        v = k if self.shared else self.v.to(dtype)
        return Case(self.q.to(dtype), k, v, mask, self.causal, self.scale, self.shared, self.grad.to(dtype), self.label)

    def __repr__(self) -> str:
        mask = None if self.mask is None else f"{self.mask.dtype} {tuple(self.mask.shape)}"
        shapes = " ".join(f"{tuple(x.shape)}" for x in (self.q, self.k, self.v))
        flags = f"causal {self.causal} scale {self.scale} shared {self.shared}"
        return f"Case({self.label}: {shapes} {self.q.dtype} mask {mask} {flags})"


def dense(case: Case) -> tuple[torch.Tensor, ...]:
    """Output and gradients of q, k and v (of k alone where it is v too) on one device, from contiguous tensors: of
    others SDPA takes its reference, which is more exact than the fused kernel in half precision."""
    q, k, v = (x.detach().contiguous().clone().requires_grad_() for x in (case.q, case.k, case.v))
    value = k if case.shared else v
    out = scaled_dot_product_attention(
        q, k, value, attn_mask=case.mask, is_causal=case.causal, scale=case.scale, enable_gqa=case.grouped
    )
    grads = torch.autograd.grad(out, (q, k) if case.shared else (q, k, v), case.grad)
    return (out.detach(), *grads)


def worst(mine: tuple[torch.Tensor, ...], case: Case) -> list[tuple[float, float]]:
    """For the output and the gradients: the error, and the error allowed, relative to the scale of the fp64 value.

    What is allowed is twice the dense kernel's own error, and ``FLOOR``. That error is the worst over SDPA's fused
    kernel and its reference, each with the keys in several orders: it is the same sum of the same numbers, and of few
    numbers one order alone may be rounded to nothing. The gradients have one scale and one error: where one of them
    cancels to nothing (a row that sees one key), rounding alone is left, which one kernel has and another has not.
    """
    exact = dense(case.to(torch.float64))
    runs = [mine]
    # Where a row is the lowest number alone, the gradients of the fused kernel are not those of the reference.
    for backends in (_FUSED,) if case.has_lowest_rows else (_FUSED, [SDPBackend.MATH]):
        with sdpa_kernel(backends):
            runs += (dense(case), *(_in_order(case, seed) for seed in range(_ORDERS)))
    found: list[tuple[float, float]] = []
    for part in (slice(0, 1), slice(1, None)):
        scale = max(_largest(want) for want in exact[part]) or 1.0
        errors = [
            max(_largest(x.double() - want) / scale for x, want in zip(results[part], exact[part], strict=True))
            for results in runs
        ]
        assert all(map(math.isfinite, errors)), f"{case!r}: not finite"
        found.append((errors[0], 2 * max(errors[1:]) + FLOOR[case.q.dtype]))
    return found


def _in_order(case: Case, seed: int) -> tuple[torch.Tensor, ...]:
    """The same on one device with the keys in another order, gradients back in their own."""
    queries, keys = case.q.shape[2], case.k.shape[2]
    order = torch.randperm(keys, generator=torch.Generator().manual_seed(seed))
    mask = torch.ones(queries, keys, dtype=torch.bool).tril() if case.causal else case.mask
    k = case.k.index_select(2, order)
    turned = replace(
        case,
        k=k,
        v=k if case.shared else case.v.index_select(2, order),
        mask=None if mask is None else mask.index_select(-1, order),
        causal=False,
    )
    out, q_grad, *key_grads = dense(turned)
    return (out, q_grad, *(grad.index_select(2, order.argsort()) for grad in key_grads))


def _largest(x: torch.Tensor) -> float:
    return x.abs().max().item() if x.numel() else 0.0


@st.composite
def cases(draw: st.DrawFn, queries: int, keys: int, *, heads: int | None = None) -> Case:
    """A call of so many queries and keys."""
    seed = draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    dtype = draw(st.sampled_from(FLOATS))
    groups = draw(st.integers(1, 3))
    kv_heads = draw(st.integers(1, 4)) if heads is None else heads
    dim = draw(st.sampled_from([4, 8]))
    batch = draw(st.integers(1, 2))
    batch += _NUMBERS // (min(queries, keys) * kv_heads * groups * dim)
    shared = draw(st.sampled_from([False, False, False, True]))
    value_dim = dim if shared else draw(st.sampled_from([dim, dim, 12]))
    strength = draw(st.sampled_from([1.0, 1.0, 4.0]))

    def numbers(*shape: int) -> torch.Tensor:
        """Random numbers of this shape, in a memory order that is drawn too."""
        order = draw(st.permutations(range(4)))
        made = torch.randn([shape[i] for i in order], generator=generator, dtype=torch.float64)
        return made.permute([order.index(i) for i in range(4)]).to(dtype)

    q = numbers(batch, groups * kv_heads, queries, dim) * strength
    k = numbers(batch, kv_heads, keys, dim)
    v = k if shared else numbers(batch, kv_heads, keys, value_dim)
    causal = draw(st.booleans())
    mask = None if causal else draw(masks(batch, groups * kv_heads, queries, keys, generator, dtype))
    scale = draw(st.sampled_from([None, None, 0.3]))
    grad = numbers(batch, groups * kv_heads, queries, value_dim)
    return Case(q, k, v, mask, causal, scale, shared, grad, f"seed {seed}")


@st.composite
def masks(
    draw: st.DrawFn, batch: int, heads: int, queries: int, keys: int, generator: torch.Generator, dtype: torch.dtype
) -> torch.Tensor | None:
    """No mask, or one of booleans or numbers that varies over any of its dimensions."""
    kind = draw(st.sampled_from(["none", "bool", "bool", "hidden", "float", "infinite", "lowest"]))
    if kind == "none":
        return None
    sizes = (batch, heads, queries, keys)
    shape = [size if draw(st.booleans()) else 1 for size in sizes[:3]] + [keys]
    if draw(st.booleans()):
        shape = shape[-2:]
    visible = torch.rand(shape, generator=generator) < 0.6
    if kind == "hidden":  # a stretch that nobody sees, and a row that sees nothing
        start = draw(st.integers(0, keys))
        visible[..., start : start + draw(st.integers(0, keys))] = False
        visible[..., draw(st.integers(0, shape[-2] - 1)), :] = False
    if kind in ("bool", "hidden"):
        return visible
    values = torch.randn(shape, generator=generator).to(dtype)
    if kind == "float":
        return values
    if kind == "infinite":
        return values.masked_fill(~visible, -math.inf)
    visible[..., draw(st.integers(0, shape[-2] - 1)), :] = False  # a row of the lowest number alone counts each key
    return values.masked_fill(~visible, torch.finfo(dtype).min)
