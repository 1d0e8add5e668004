"""What one device computes, and how far from it a result may be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from cpcompile.decision import is_tensor
from cpcompile.trees import flatten

_TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 4e-2}
"""Largest error relative to the output's scale: some ten roundings of the dtype after a few layers."""


@dataclass(frozen=True)
class Reference:
    """What one device computes: outputs, gradients under fixed random cotangents, and the generator's state before."""

    outputs: tuple[torch.Tensor, ...]
    cotangents: tuple[torch.Tensor, ...]
    names: tuple[str, ...]
    gradients: tuple[torch.Tensor | None, ...]
    generator: torch.Tensor


def reference(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    *,
    backward: bool,
    parameters: Mapping[str, torch.Tensor] | None = None,
    generator: torch.Tensor | None = None,
) -> Reference:
    """The model itself on one device; with other ``parameters`` by the names of its own, from a ``generator`` state."""
    if generator is not None:
        torch.set_rng_state(generator)
    before = torch.get_rng_state()
    names, sources = differentiable(model, flatten((tuple(args), dict(kwargs or {})))[0])
    with torch.set_grad_enabled(backward):
        if parameters is None:
            result = model(*args, **dict(kwargs or {}))
        else:
            result = torch.func.functional_call(model, dict(parameters), tuple(args), dict(kwargs or {}))
            sources = tuple(parameters.get(name, source) for name, source in zip(names, sources, strict=True))
        outputs, _ = flatten(result)
    source = torch.Generator().manual_seed(20)
    cotangents = tuple(
        torch.randn(out.shape, generator=source, dtype=torch.float64).to(out) for out in carriers(outputs)
    )
    gradients: tuple[torch.Tensor | None, ...] = ()
    if backward and cotangents:
        gradients = torch.autograd.grad(carriers(outputs), sources, cotangents, allow_unused=True)
    return Reference(tuple(out.detach() for out in outputs), cotangents, names, gradients, before)


def error(mine: torch.Tensor, want: torch.Tensor) -> float:
    """The largest difference relative to the scale of ``want``; infinite for another shape, or a NaN of one alone."""
    if mine.shape != want.shape or mine.dtype != want.dtype:
        return float("inf")
    if not want.is_floating_point() and not want.is_complex():
        return 0.0 if torch.equal(mine, want) else float("inf")
    wide = torch.complex128 if want.is_complex() else torch.float64
    mine, want = mine.to(wide), want.to(wide)
    same = (mine == want) | (mine.isnan() & want.isnan())
    difference = torch.where(same, torch.zeros_like(want), mine - want).abs()
    if not difference.numel():
        return 0.0
    worst = difference.nan_to_num(nan=float("inf")).max().item()
    finite = want.abs()[want.abs().isfinite()]
    scale = finite.max().item() if finite.numel() else 0.0
    return worst / scale if scale else worst


def carriers(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The outputs that a gradient comes back through."""
    return [out for out in outputs if out.is_floating_point() and (out.requires_grad or not torch.is_grad_enabled())]


def differentiable(
    model: nn.Module, tensors: Sequence[torch.Tensor]
) -> tuple[tuple[str, ...], tuple[torch.Tensor, ...]]:
    """Names and tensors of what gradients are compared of: parameters, and inputs that require grad."""
    named: list[tuple[str, torch.Tensor]] = [
        (name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad
    ]
    named += [(f"input {index}", tensor) for index, tensor in enumerate(tensors) if tensor.requires_grad]
    return tuple(name for name, _ in named), tuple(tensor for _, tensor in named)


def rounding_noise(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None, against: Reference
) -> dict[str, float]:
    """For each parameter how much rounding alone changes its gradient on one device.

    With another attention kernel, and with the parameters' last bits changed: a gradient that is zero but for rounding
    (of a key's bias: a softmax does not see it) is as large as its own noise.
    """
    with sdpa_kernel(SDPBackend.MATH):
        others = [reference(model, args, kwargs, backward=True, generator=against.generator)]
    generator = torch.Generator().manual_seed(21)
    for _ in range(3):
        near = {name: _last_bits_changed(value, generator) for name, value in model.named_parameters()}
        state = against.generator
        others.append(reference(model, args, kwargs, backward=True, parameters=near, generator=state))
    noise = dict.fromkeys(against.names, 0.0)
    for other in others:
        for name, mine, want in zip(against.names, other.gradients, against.gradients, strict=True):
            if mine is not None and want is not None:
                noise[name] = max(noise[name], error(mine, want))
    return noise


def excused_error(noise: float) -> float:
    """The error that rounding explains: twice the noise, and more where the gradient is nothing else."""
    return 2 * noise if noise < 0.25 else 8 * noise


def _last_bits_changed(value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if not value.is_floating_point():
        return value
    eps = torch.finfo(value.dtype).eps
    factor = 1 + eps * torch.randint(-2, 3, value.shape, generator=generator, dtype=torch.float64)
    return (value.detach() * factor.to(value)).requires_grad_(value.requires_grad)


def tolerance_of(module: fx.GraphModule) -> float:
    """What the coarsest dtype that a program computes in can hold: its outputs', or that of an autocast region."""
    dtypes = {node.meta["val"].dtype for node in module.graph.nodes if node.op == "call_function" and is_tensor(node)}
    return max((_TOLERANCE[dtype] for dtype in dtypes if dtype in _TOLERANCE), default=1e-5)
