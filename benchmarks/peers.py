"""Distributed attention that comes with diffusers and with torch, given the CPU's kernel."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental._context_parallel import _attention as template

from benchmarks.contestant import Attend, Contestant, Kind
from benchmarks.kernels import flash, flash_backward, template_backward, template_forward
from benchmarks.problem import Order, Problem

GIVEN_KERNEL = "the CPU's flash kernel given"


def contestants_of_peers() -> list[Contestant]:
    """Those that are there wherever the tests run."""
    return [
        _diffusers("diffusers ulysses", "ulysses"),
        _diffusers("diffusers ring", "ring"),
        _torch("torch ring, allgather", template._RotateMethod.ALL_GATHER),
        _torch("torch ring, alltoall", template._RotateMethod.ALL_TO_ALL),
        _torch("torch ring, head-tail", template._RotateMethod.ALL_GATHER, "head-tail"),
    ]


@functools.cache
def _diffusers_config(kind: Kind, ranks: int) -> Any:
    parallel = importlib.import_module("diffusers.models._modeling_parallel")
    context = parallel.ContextParallelConfig(**{f"{kind}_degree": ranks})
    mesh = init_device_mesh("cpu", context.mesh_shape, mesh_dim_names=context.mesh_dim_names)
    context.setup(dist.get_rank(), ranks, torch.device("cpu"), mesh)
    return parallel.ParallelConfig(context_parallel_config=context)


def _diffusers(name: str, kind: Kind) -> Contestant:
    def make(problem: Problem, _backward: bool) -> Attend:
        dispatch = importlib.import_module("diffusers.models.attention_dispatch")
        return functools.partial(
            dispatch._templated_context_parallel_attention,
            is_causal=problem.causal,
            forward_op=template_forward,
            backward_op=template_backward,
            _parallel_config=_diffusers_config(kind, problem.ranks),
        )

    return Contestant(name, "diffusers", kind, make, note=GIVEN_KERNEL, memory="BSHD")


_FLASH: Any = flash
_FLASH_BACKWARD: Any = flash_backward


def _world() -> Any:
    return dist.group.WORLD


@contextmanager
def _template_options(rotate: template._RotateMethod, balanced: bool) -> Iterator[None]:
    """The template reads its options from a global."""
    options = template._cp_options
    before = options.rotate_method, options.enable_load_balance
    options.rotate_method, options.enable_load_balance = rotate, balanced
    try:
        yield
    finally:
        options.rotate_method, options.enable_load_balance = before


class _TorchRing(torch.autograd.Function):
    """The template's forward and backward, as torch itself ties them for its GPU kernels."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rotate: template._RotateMethod,
        is_causal: bool,
        balanced: bool,
    ) -> torch.Tensor:
        with _template_options(rotate, balanced):
            out, lse = template._templated_ring_attention(_world(), 2, _FLASH, query, key, value, is_causal=is_causal)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.settings = rotate, is_causal, balanced
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        rotate, is_causal, balanced = ctx.settings
        with _template_options(rotate, balanced):
            gradients = template._templated_ring_attention_backward(
                _world(),
                2,
                _FLASH_BACKWARD,
                grad_outs[0],
                "grad_out",
                query,
                key,
                value,
                out,
                lse,
                is_causal,
            )
        return (*gradients, None, None, None)


def _torch(name: str, rotate: template._RotateMethod, order: Order = "plain") -> Contestant:
    def make(problem: Problem, _backward: bool) -> Attend:
        if order == "head-tail" and not problem.causal:
            raise NotImplementedError("the order is for causal attention alone")
        apply: Callable[..., torch.Tensor] = _TorchRing.apply
        return lambda q, k, v: apply(q, k, v, rotate, problem.causal, order == "head-tail")

    return Contestant(name, "torch", "ring", make, note=GIVEN_KERNEL, order=order)
