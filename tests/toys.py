"""Models small enough to read their graphs whole, each with its plan and inputs, and the graph after each pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from cpcompile.assemble import all_coords
from cpcompile.capture import Captured, capture
from cpcompile.layout import Axis
from cpcompile.passes.attention import Attention
from cpcompile.passes.cotangents import Cotangents
from cpcompile.passes.enter import Enter
from cpcompile.passes.functionalize import Functionalize
from cpcompile.passes.inline import Inline
from cpcompile.passes.lower import Lower
from cpcompile.passes.normalize import Normalize
from cpcompile.passes.propagate import Propagate
from cpcompile.passes.reshard import Reshard
from cpcompile.pipeline import Options, Rewritten, rewrite
from cpcompile.plan import ContextParallelInput, ContextParallelOutput, resolve_plan
from cpcompile.show import text

# Legend of sizes: B 2 batch, S 7 sequence, C 8 channels, H 2 heads, D 4 head dim.
AXES = (Axis("ulysses", 2),)


class Region(nn.Module):
    """A table made without gradients."""

    def forward(self, x):
        with torch.no_grad():
            table = torch.arange(x.shape[1]).unsqueeze(1).sin()
        return x * table


class Rope(nn.Module):
    """Halves written into a fresh tensor."""

    def forward(self, x):
        out = torch.empty_like(x)
        out[..., 0::2] = -x[..., 1::2]
        out[..., 1::2] = x[..., 0::2]
        return out * 2


class Casts(nn.Module):
    """Operators that change nothing."""

    def forward(self, x):
        same = F.dropout(x.to(torch.float32), 0.5, training=False)
        return same.half().float()


class Fallback(nn.Module):
    """An operator without a rule between two with one."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.last(self.first(x).renorm(2, 1, 1.0))


class Attend(nn.Module):
    """Causal attention, and its output projected."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Pooled(nn.Module):
    """A mean over the sequence that is both added to the sequence and returned."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        pooled = self.second(self.first(x).mean(1))
        return x + pooled.unsqueeze(1), pooled


class Toy(nn.Module):
    """All of it in two layers: linear, rotary embedding, attention, a region without gradients, a mean."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        with torch.no_grad():
            angle = torch.arange(x.shape[1]).unsqueeze(1) * torch.tensor([1.0, 0.1])
            cos, sin = angle.cos(), angle.sin()
        heads = self.first(x).view(2, -1, 2, 4).transpose(1, 2)
        turned = torch.empty_like(heads)
        turned[..., 0::2] = heads[..., 0::2] * cos - heads[..., 1::2] * sin
        turned[..., 1::2] = heads[..., 0::2] * sin + heads[..., 1::2] * cos
        mixed = F.scaled_dot_product_attention(turned, turned, heads).transpose(1, 2).flatten(2)
        return self.last(mixed + mixed.mean(1, keepdim=True))


class Twice(nn.Module):
    """Two outputs that do not depend on each other, of equal layouts."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.left(x), self.right(x)


PLAN: dict[str, Any] = {"": {"x": ContextParallelInput(1)}}
GATHERED = {**PLAN, "last": ContextParallelOutput(1)}


@dataclass(frozen=True)
class Built:
    """A model and its rewritten program."""

    model: nn.Module
    rewritten: Rewritten

    @property
    def module(self) -> fx.GraphModule:
        return self.rewritten.module

    def node(self, target: Any, index: int = 0) -> fx.Node:
        """The rank-neutral node number ``index`` of an operator."""
        return nodes_of(self.module, target)[index]


def nodes_of(module: fx.GraphModule, target: Any) -> list[fx.Node]:
    return [node for node in module.graph.nodes if node.target == target]


def captured(make: Callable[[], nn.Module], plan: dict[str, Any] | None = None) -> tuple[nn.Module, Captured]:
    torch.manual_seed(0)
    model = make()
    return model, capture(model, resolve_plan(plan or PLAN, model), (torch.randn(2, 7, 8),), {})


_known: dict[tuple[Any, ...], tuple[nn.Module, Captured]] = {}


def build(
    make: Callable[[], nn.Module], plan: dict[str, Any] | None = None, axes: tuple[Axis, ...] = AXES, **options: Any
) -> Built:
    key = (make, tuple(plan or PLAN))
    if key not in _known:  # rewriting works on a copy
        _known[key] = captured(make, plan)
    model, call = _known[key]
    return Built(model, rewrite(call, axes, Options(verify=True, **options)))


def stages(
    make: Callable[[], nn.Module], plan: dict[str, Any] | None = None, axes: tuple[Axis, ...] = AXES
) -> dict[str, str]:
    """The text of the graph after each pass, in order, the lowered one once for each rank."""
    _, call = captured(make, plan)
    module = call.module
    found = {"capture": text(module)}
    steps: tuple[Any, ...] = (
        Inline(),
        Functionalize(),
        Normalize(),
        Propagate(axes, call.plan.entries),
        Reshard(),
        Attention(),
        Cotangents(),
        Enter(),
    )
    for step in steps:
        with torch.no_grad():
            step(module)
        found[step.name] = text(module, parameters=step.name in ("cotangents", "enter"))
    lowered = [text(Lower(axes, coords)(module), coords=coords, max_items=None) for coords in all_coords(axes)]
    for coords, printed in zip(all_coords(axes), lowered, strict=True):
        found[f"lower, {coords}"] = printed
    return found
