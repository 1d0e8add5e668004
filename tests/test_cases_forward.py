"""How a forward is called and wrapped: hooks, decorators, buffers, caches, frozen and tied parameters, odd tensors."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cpcompile import check
from tests.small_models import (
    MESHES,
    SPLIT,
    Attention,
    Block,
    Input,
    Joint,
    Output,
    Tower,
    covered,
    equal,
    padding,
    rand,
    sharp,
)


def wrapped(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


class Decorated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    @wrapped
    def forward(self, x, extra=None):
        return self.block(x)


@pytest.mark.parametrize("args", [(rand(2, 9, 16),), (rand(2, 9, 16), None)])
def test_a_decorated_forward(args):
    covered(equal(Decorated(), SPLIT, *args))


def test_a_forward_that_was_replaced_on_the_instance():
    model = Tower()
    model.forward = wrapped(model.forward)  # type: ignore[method-assign]
    model.blocks[0].forward = wrapped(model.blocks[0].forward)
    covered(equal(model, {**SPLIT, "blocks.0": Output(1)}, rand(2, 9, 16)))


def test_hooks_of_others():
    model = Tower()
    model.blocks[0].register_forward_pre_hook(lambda module, args: (args[0] * 2, *args[1:]))
    model.blocks[1].register_forward_hook(lambda module, args, output: output + 1)
    covered(equal(model, SPLIT, rand(2, 9, 16)))
    covered(equal(model, {"blocks.0": {"x": Input(1)}, "blocks.1": Output(1)}, rand(2, 9, 16)))


class Given(nn.Module):
    """Scalars, buffers, flags and a cache that is filled by the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.cache = Block(), {}
        self.register_buffer("table", torch.arange(9.0))
        self.register_buffer("factor", torch.tensor(2.0), persistent=False)

    def forward(self, x, t, flag=True, n=3):
        if "positions" not in self.cache:
            self.cache["positions"] = torch.arange(x.shape[1]).to(x)
        x = x * t + (self.table * self.factor + self.cache["positions"])[None, :, None] / n
        return {"out": self.block(x), "n": n, "table": self.table, "t": t} if flag else x


@pytest.mark.parametrize("kwargs", [{}, {"flag": False}, {"n": 2}])
def test_scalars_buffers_flags_and_caches(kwargs):
    model = Given()
    covered(equal(model, SPLIT, x=rand(2, 9, 16, grad=True), t=rand(seed=5, grad=True), **kwargs))
    assert model.cache["positions"].tolist() == list(range(9))


class Anything(nn.Module):
    """Takes what it is given by name only."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention()

    def forward(self, *args, **kwargs):
        return self.attn(kwargs["hidden"], mask=kwargs.get("mask"))


@pytest.mark.parametrize("mask", [None, padding(9, 4, size=9)[:, None, None]])
def test_keyword_arguments_that_the_signature_does_not_name(mask):
    covered(equal(Anything(), {"": {"hidden": Input(1), "mask": Input(-1)}}, hidden=rand(2, 9, 16), mask=mask))


def test_the_same_tensor_for_two_arguments():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = Attention()

        def forward(self, x, context):
            return self.attn(x, context) + x

    x = rand(2, 9, 16, grad=True)
    for plan in (SPLIT, {"": {"x": Input(1), "context": Input(1)}}, {"": {"context": Input(1)}}):
        covered(equal(Two(), plan, x, x))


@pytest.mark.parametrize(
    "x",
    [rand(2, 16, 9).mT, rand(1, 9, 16).expand(3, -1, -1), rand(2, 20, 16)[:, ::2], rand(0, 9, 16), rand(2, 1, 16)],
    ids=["transposed", "expanded", "strided", "no batch", "one token"],
)
def test_tensors_of_any_strides_and_sizes(x):
    equal(Tower(), SPLIT, x)


def test_a_text_of_no_tokens():
    plan = {"": {"text": Input(1), "image": Input(1)}}
    covered(equal(Joint(), plan, rand(2, 0, 16), rand(2, 9, 16, seed=1)))


def test_frozen_parameters_and_none_at_all():
    model = Tower()
    model.blocks[0].requires_grad_(False)
    covered(equal(model, SPLIT, rand(2, 9, 16)))
    covered(equal(model.requires_grad_(False), SPLIT, rand(2, 9, 16)))


class Language(nn.Module):
    """Integer tokens, a head tied to the embedding, and outputs that are no floats."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.block, self.head = nn.Embedding(20, 16), Block(causal=True), nn.Linear(16, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        logits = self.head(self.block(self.embedding(tokens)))
        hot = F.one_hot(tokens, 20).to(logits)
        return logits, logits.argmax(-1), tokens + 1, (tokens > 3).sum(1), hot @ self.embedding.weight, tokens.cumsum(1)


def test_tokens_and_tied_embeddings():
    equal(Language(), {"": {"tokens": Input(1)}}, torch.arange(18).view(2, 9))


def test_outputs_with_and_without_gradients():
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x, y):
            return self.linear(x) + y.detach(), y * 2, x.detach() + 1

    covered(equal(Mixed(), SPLIT, rand(2, 9, 16), rand(2, 9, 16, seed=1, grad=True)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lower_precisions(dtype):
    for ring, ulysses in MESHES:
        model, x = sharp(Tower(causal=True)).to(dtype), rand(2, 9, 16).to(dtype)
        report = check(model, SPLIT, ring=ring, ulysses=ulysses, args=(x,), backward=True)
        assert report.ok, str(report)
    assert report.tolerance <= 1e-5 or dtype is not torch.float32


def test_a_gradient_that_is_zero_but_for_rounding_is_no_difference():
    class ZeroGradient(nn.Module):
        """No softmax sees the bias of a key."""

        def __init__(self) -> None:
            super().__init__()
            self.tower = Tower()
            for block in self.tower.blocks:
                block.attn.to_k = nn.Linear(16, 16)

        def forward(self, x):
            return self.tower(x)

    for size in (8, 9, 33):
        report = check(sharp(ZeroGradient()), SPLIT, ulysses=2, args=(rand(2, size, 16),), backward=True)
        assert report.ok, str(report)
        assert any("rounding alone" in note for note in report.report.notes)
