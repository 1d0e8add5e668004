"""Distributed attention of packages that may be installed: yunchang, para-attn and cache-dit."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

from benchmarks.contestant import Attend, Contestant, Kind
from benchmarks.kernels import flash, flash_backward, template_backward, template_forward
from benchmarks.peers import GIVEN_KERNEL
from benchmarks.problem import Problem

# A block's gradient of the queries is written into a buffer that, in fp32, is also the sum over the blocks.
_OF_YUNCHANG = f"{GIVEN_KERNEL}; its dq is for half precision"


def contestants_of_optional_peers() -> list[Contestant]:
    """All of them, installed or not."""
    return [
        Contestant("yunchang ulysses", "yunchang", "ulysses", _yunchang_ulysses, note="SDPA given", memory="BSHD"),
        Contestant("yunchang ring", "yunchang", "ring", _yunchang_ring, note=_OF_YUNCHANG, memory="BSHD"),
        Contestant("para-attn ulysses", "para-attn", "ulysses", _para_attn_ulysses, note="calls SDPA itself"),
        Contestant("para-attn ring", "para-attn", "ring", _para_attn_ring, note=GIVEN_KERNEL),
        _cache_dit("cache-dit ulysses", "ulysses", "UlyssesAttention"),
        _cache_dit("cache-dit ring", "ring", "RingAttention"),
    ]


def _yunchang_ulysses(problem: Problem, _backward: bool) -> Attend:
    yunchang = importlib.import_module("yunchang")

    def sdpa(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=options["causal"])
        return out.transpose(1, 2)

    module = yunchang.UlyssesAttention(dist.group.WORLD, attn_type=yunchang.kernels.AttnType.TORCH_MATH)
    module.attn_fn = sdpa
    return functools.partial(module, causal=problem.causal)


def _yunchang_ring(problem: Problem, _backward: bool) -> Attend:
    module = importlib.import_module("yunchang.ring.ring_flash_attn")
    module.select_flash_attn_impl = _yunchang_kernel  # type: ignore[attr-defined]
    return functools.partial(module.ring_flash_attn_func, causal=problem.causal, group=dist.group.WORLD)


def _yunchang_kernel(_attn_type: Any, stage: str, **_options: Any) -> Callable[..., Any]:
    """The CPU's kernel as yunchang calls one: tensors are [B, S, H, D], a log-sum-exp [B, H, S]."""

    def forward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> Any:
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        out, lse = flash(q, k, v, is_causal=options["causal"], scale=options["softmax_scale"])
        return out.transpose(1, 2), lse

    def backward(*tensors: Any, rng_state: Any) -> None:
        grad_out, query, key, value, out, lse, *buffers, _dropout, scale, causal, _window, _cap, _alibi, _same = tensors
        grad, q, k, v, o = (x.transpose(1, 2) for x in (grad_out, query, key, value, out))
        gradients = flash_backward(grad, q, k, v, o, lse, causal, scale)
        for buffer, gradient in zip(buffers, gradients, strict=True):
            buffer.copy_(gradient.transpose(1, 2))

    return forward if stage == "fwd-only" else backward


def _para_attn_ulysses(problem: Problem, _backward: bool) -> Attend:
    module = importlib.import_module("para_attn")
    return functools.partial(module.ulysses_attn_func, is_causal=problem.causal, mesh=dist.group.WORLD)


def _para_attn_ring(problem: Problem, backward: bool) -> Attend:
    module = importlib.import_module("para_attn")
    if backward:
        raise NotImplementedError("it has no backward")
    module.ops._attention_forward_with_lse = flash  # called by its own custom op
    return functools.partial(module.ring_attn_func, is_causal=problem.causal, mesh=_world_mesh(problem.ranks))


@functools.cache
def _world_mesh(ranks: int) -> Any:
    return init_device_mesh("cpu", (ranks,), mesh_dim_names=("ring",))


@functools.cache
def _cache_dit_config(kind: Kind, ranks: int) -> Any:
    core = importlib.import_module("cache_dit.distributed.core")
    config = core._ContextParallelConfig(**{f"{kind}_degree": ranks})
    mesh = init_device_mesh("cpu", config.mesh_shape, mesh_dim_names=config.mesh_dim_names)
    config.setup(dist.get_rank(), ranks, torch.device("cpu"), mesh)
    return config


def _cache_dit(name: str, kind: Kind, template: str) -> Contestant:
    def make(problem: Problem, backward: bool) -> Attend:
        core = importlib.import_module("cache_dit.distributed.core")
        if backward:
            raise NotImplementedError("it has no backward")
        if kind == "ring" and problem.causal:
            raise NotImplementedError("its ring knows no causal attention")
        # Its fused merge is a kernel of GPUs; without that, it merges in torch.
        core._templated_ring.fused_merge_attn_states = None
        config = _cache_dit_config(kind, problem.ranks)
        middle = (None, 0.0, problem.causal, None, False, False)  # mask, dropout, causal, scale, GQA, log-sum-exp
        strategy = (None,) if kind == "ulysses" else ()
        apply = getattr(core, template).apply
        return lambda q, k, v: apply(q, k, v, *middle, *strategy, template_forward, template_backward, config)

    return Contestant(name, "cache-dit", kind, make, note=GIVEN_KERNEL, memory="BSHD")
