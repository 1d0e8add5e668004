"""Random transformer-like models and random plans for them, for the law that a plan never changes a number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import nn

from tests.small_models import Input, Output, rand, rope_tables, rotated

B, C, HEADS = 2, 8, 4

Step = tuple[str, int, int]
"""Which step, and two small numbers that it takes its dimensions, positions and variants from."""


@dataclass
class State:
    """What a step sees and changes: x [B, S, C], text [B, T, C], and a mask over all pairs of the longest sequence.

    kept: values of x from before. joined: how many tokens of x came from the text, while they are in one.
    """

    x: torch.Tensor
    text: torch.Tensor
    bias: torch.Tensor
    kept: list[torch.Tensor] = field(default_factory=list)
    joined: int = 0


def _bounded(x: torch.Tensor) -> torch.Tensor:
    return x * (1 + x.pow(2)).rsqrt()


def _linear(model: Random, s: State, index: int, a: int, b: int) -> None:
    s.x = F.linear(s.x, model.weights[index % 4], model.biases[index % 4] if a % 2 else None)


def _norm(model: Random, s: State, index: int, a: int, b: int) -> None:
    s.x = F.layer_norm(s.x, (C,), model.biases[index % 4] + 1, model.biases[a % 4])


def _act(model: Random, s: State, index: int, a: int, b: int) -> None:
    s.x = (F.gelu, torch.tanh, F.silu, _bounded, torch.sin, lambda x: F.softmax(x, -1))[a](s.x)


def _residual(model: Random, s: State, index: int, a: int, b: int) -> None:
    found = [old for old in s.kept if old.shape == s.x.shape]
    if found:
        s.x = s.x + found[a % len(found)] * model.biases[b % 4]
    s.kept.append(s.x)


def _join(model: Random, s: State, index: int, a: int, b: int) -> None:
    if not s.joined:
        s.joined = s.text.shape[1]
        s.x = torch.cat([s.text, s.x], dim=1)


def _part(model: Random, s: State, index: int, a: int, b: int) -> None:
    if s.joined:
        if a % 2:
            s.text, s.x = s.x.split([s.joined, s.x.shape[1] - s.joined], dim=1)
        else:
            s.text, s.x = s.x[:, : s.joined], s.x[:, s.joined :]
        s.joined = 0


def _flat(model: Random, s: State, index: int, a: int, b: int) -> None:
    flat = s.x.reshape(-1, C)
    flat = flat @ model.weights[a % 4] if b % 2 else flat * model.biases[a % 4]
    s.x = flat.view(s.x.shape)


def _permuted(model: Random, s: State, index: int, a: int, b: int) -> None:
    order = ((1, 0, 2), (0, 2, 1), (2, 1, 0), (1, 2, 0), (2, 0, 1), (0, 1, 2))[a]
    back = sorted(range(3), key=order.__getitem__)
    x = s.x.permute(order)
    x = (x.flatten(0, 1) if b % 2 else x.flatten(1)).sin().reshape(x.shape)
    s.x = x.permute(back) + s.x


def _pooled(model: Random, s: State, index: int, a: int, b: int) -> None:
    pooled = (s.x.mean(1, keepdim=True), s.x.sum(1)[:, None], s.x.amax(1, keepdim=True))[a % 3]
    if b % 2:
        pooled = F.linear(pooled, model.weights[b % 4]).expand(-1, s.x.shape[1], -1)
    s.x = s.x + pooled * 0.5


def _scan(model: Random, s: State, index: int, a: int, b: int) -> None:
    dim = 1 if a % 3 else 2
    s.x = (s.x.cumsum(dim) / s.x.shape[dim], s.x.roll(1 + b, dim), s.x.flip(dim), F.softmax(s.x, dim))[a % 4]


def _sliced(model: Random, s: State, index: int, a: int, b: int) -> None:
    size = s.x.shape[1]
    start, stop = a % size, size - b % 2
    if stop - start >= 2 and not s.joined:
        s.x = s.x[:, start:stop] if b % 3 else s.x[:, start:stop:2] + s.x[:, start : start + 1]


def _written(model: Random, s: State, index: int, a: int, b: int) -> None:
    x = s.x.clone()
    at = a % x.shape[1]
    x[:, at : at + 2] = s.x[:, at : at + 2] * 0.5 + 1
    x[..., b % C] = s.x[..., 0].sin()
    s.x = x


def _picked(model: Random, s: State, index: int, a: int, b: int) -> None:
    order = torch.arange(s.x.shape[1]).flip(0) if a % 2 else torch.arange(s.x.shape[1])
    s.x = s.x[:, order] if b % 2 else s.x + s.x[:, a % s.x.shape[1]][:, None]


def _stacked(model: Random, s: State, index: int, a: int, b: int) -> None:
    dim = a % 4
    parts = torch.stack([s.x, s.x.sin(), s.x * model.biases[b % 4]], dim).unbind(dim)
    s.x = parts[0] + parts[1] * parts[2]


def _chunked(model: Random, s: State, index: int, a: int, b: int) -> None:
    dim = 1 if a % 2 else 2
    parts = s.x.chunk(2 + b % 2, dim)
    s.x = torch.cat([part.cos() if n == b % len(parts) else part for n, part in enumerate(parts)][::-1], dim)
    s.joined = 0 if dim == 1 else s.joined


def _positions(model: Random, s: State, index: int, a: int, b: int) -> None:
    cos, sin = rope_tables(s.x.shape[1], C, s.x.device)
    s.x = rotated(s.x, cos, sin) if a % 2 else s.x + torch.arange(s.x.shape[1])[:, None] * 0.1


def _padded(model: Random, s: State, index: int, a: int, b: int) -> None:
    s.x = F.pad(s.x, (0, 0, a % 3, b % 3)) if s.x.shape[1] < 10 else s.x
    s.joined = 0


def _repeated(model: Random, s: State, index: int, a: int, b: int) -> None:
    if s.x.shape[1] < 8 and not s.joined:
        s.x = s.x.repeat(1, 2, 1) if a % 2 else s.x.repeat_interleave(2, dim=1)


def _filled(model: Random, s: State, index: int, a: int, b: int) -> None:
    size = s.x.shape[1]
    valid = torch.arange(size) < size - a % 3
    s.x = s.x.masked_fill(~valid[None, :, None], 0.5) if b % 2 else torch.where(s.x > 0, s.x, s.x * valid[:, None])


def _gated(model: Random, s: State, index: int, a: int, b: int) -> None:
    pooled = s.text.mean(1) if a % 2 else s.text[:, 0]
    shift, scale = F.linear(pooled, torch.cat([model.weights[a % 4], model.weights[b % 4]])).chunk(2, -1)
    s.x = s.x * (1 + scale[:, None]) + shift[:, None]


def _texted(model: Random, s: State, index: int, a: int, b: int) -> None:
    s.text = s.text + F.linear(s.text, model.weights[a % 4]) * (s.x.mean(1, keepdim=True) if b % 2 else 1)


def _squared(model: Random, s: State, index: int, a: int, b: int) -> None:
    s.x = _bounded(s.x.pow(2) - s.x.var(2 - a % 2, keepdim=True) - s.x.square().mean())


def _by_hand(model: Random, s: State, index: int, a: int, b: int) -> None:
    weights = torch.softmax(s.x @ s.x.transpose(1, 2) / 3, -1)
    s.x = weights @ s.x if a % 2 else torch.einsum("bij,bjc->bic", weights, s.x)


def _frozen(model: Random, s: State, index: int, a: int, b: int) -> None:
    with torch.no_grad():
        gate = s.x.mean(1, keepdim=True).sigmoid() if a % 2 else s.x.sigmoid()
    s.x = s.x * gate + s.x.detach() * 0.5


def _attention(model: Random, s: State, index: int, a: int, b: int) -> None:
    context = s.text if b == 1 else s.x
    groups = HEADS if a % 2 else 2
    q = F.linear(s.x, model.weights[index % 4]).unflatten(-1, (HEADS, -1)).transpose(1, 2)
    k = F.linear(context, model.weights[(index + 1) % 4][: 2 * groups]).unflatten(-1, (groups, -1)).transpose(1, 2)
    v = F.linear(context, model.weights[(index + 2) % 4][: 2 * groups]).unflatten(-1, (groups, -1)).transpose(1, 2)
    bias = s.bias[:, :, : q.shape[2], : k.shape[2]]
    mask = (None, bias, bias > -0.5, bias[:, :1, :1] < 1, bias[0, 0], None)[a]
    out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=a == 5, enable_gqa=groups != HEADS)
    s.x = s.x + out.transpose(1, 2).flatten(2)


STEPS: dict[str, Callable[[Random, State, int, int, int], None]] = {
    name.removeprefix("_"): step
    for name, step in list(globals().items())
    if name.startswith("_") and getattr(step, "__annotations__", {}).get("model") == "Random"
}


class Random(nn.Module):
    """Runs its steps; a tap before each one (and one at the end) is where a plan may act."""

    def __init__(self, steps: list[Step]) -> None:
        super().__init__()
        self.steps = steps
        self.taps = nn.ModuleList(nn.Identity() for _ in range(len(steps) + 1))
        self.weights = nn.ParameterList(nn.Parameter(torch.empty(C, C)) for _ in range(4))
        self.biases = nn.ParameterList(nn.Parameter(torch.empty(C)) for _ in range(4))

    def forward(self, x: torch.Tensor, text: torch.Tensor, bias: torch.Tensor) -> dict[str, torch.Tensor]:
        state = State(x, text, bias)
        for index, (name, a, b) in enumerate(self.steps):
            state.x = self.taps[index](state.x)
            STEPS[name](self, state, index, a, b)
        return {"x": self.taps[-1](state.x), "text": state.text, "mean": state.x.mean()}


def steps() -> st.SearchStrategy[list[Step]]:
    """Steps, attention more often than the others."""
    names = st.sampled_from([*["attention"] * 6, "linear", "join", "join", *STEPS])
    return st.lists(st.tuples(names, st.integers(0, 5), st.integers(0, 5)), min_size=2, max_size=8)


@st.composite
def plans(draw: st.DrawFn, count: int) -> dict[str, Any]:
    """A random subset of the inputs split and of the taps split or gathered, mostly along the sequence."""
    dims = st.sampled_from([1, 1, 1, 1, 0, 2])
    inputs = {name: Input(draw(dims)) for name in ("x", "text") if draw(st.booleans())}
    if draw(st.integers(0, 3)) == 0:
        inputs["bias"] = Input(draw(st.sampled_from([2, 3, 1, 0])))
    plan: dict[str, Any] = {"": inputs} if inputs else {}
    for index in range(count + 1):
        kind = draw(st.sampled_from(["no", "no", "no", "split", "gather"]))
        if kind == "split" or (index == count and not any("gather" not in repr(value) for value in plan.values())):
            plan[f"taps.{index}"] = {"input": Input(draw(dims))}
        elif kind == "gather":
            plan[f"taps.{index}"] = Output(draw(dims))
    return plan


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[Step], dict[str, Any], tuple[int, int], tuple[int, int]]:
    """Steps, a plan, the lengths of x and of the text, and a mesh."""
    found = draw(steps())
    mesh = draw(st.sampled_from([(1, 2), (2, 1), (2, 2), (1, 3), (3, 1)]))
    return found, draw(plans(len(found))), (draw(st.integers(2, 9)), draw(st.integers(1, 5))), mesh


def arguments(size: int, text: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, text and bias."""
    longest = 2 * (size + text) + 4
    return (
        rand(B, size, C, grad=True),
        rand(B, text, C, seed=1, grad=True),
        rand(B, HEADS, longest, longest, seed=2, grad=True),
    )
