"""A small model to write plans for, and what the tests ask of a plan."""

from typing import Any

import pytest
from torch import nn

from cpcompile.errors import PlanError
from cpcompile.plan import ContextParallelInput, ContextParallelOutput, resolve_plan

# Short, and untyped: many tests pass what the types forbid.
Input: Any = ContextParallelInput
Output: Any = ContextParallelOutput


class Attention(nn.Module):
    def forward(self, hidden_states, mask=None):
        return hidden_states


class Feedforward(nn.Module):
    def forward(self, x):
        return x


class Block(nn.Module):
    def __init__(self, cross=False):
        super().__init__()
        self.attn = Attention()
        self.ff = Feedforward()
        if cross:
            self.cross = Attention()

    def forward(self, hidden_states, context=None, **kwargs):
        return self.ff(self.attn(hidden_states))


class Model(nn.Module):
    def __init__(self, depth=2, crosses=()):
        super().__init__()
        self.rope = nn.Identity()
        self.blocks = nn.ModuleList([Block(cross=index in crosses) for index in range(depth)])
        self.single_blocks = nn.ModuleList()
        self.audio = None
        self.register_module("video", None)
        self.layers = nn.Sequential(*[Feedforward() for _ in range(2)])
        self.proj = nn.Linear(4, 4)

    def forward(self, hidden_states, states=(), *, text=None):
        return self.proj(hidden_states)


class Stacked(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        return x


SPLIT = {"hidden_states": Input(1, 3)}


def entries(plan, model=None):
    return resolve_plan(plan, Model() if model is None else model).entries


def names(plan, model=None):
    return [entry.name for entry in entries(plan, model)]


def problems(plan, model=None):
    with pytest.raises(PlanError) as caught:
        resolve_plan(plan, Model() if model is None else model)
    for problem in caught.value.problems:
        assert problem.where in str(caught.value)
        assert problem.law in str(caught.value)
        assert f"fix: {problem.remedy}" in str(caught.value)
    return caught.value.problems


def the_problem(plan, model=None):
    found = problems(plan, model)
    assert len(found) == 1, found
    return found[0]
