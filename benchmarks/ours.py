"""Dense attention on one process, and the kinds of distributed attention that this package makes of it."""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from torch import fx, nn
from torch.nn import functional

import cpcompile
from benchmarks.contestant import Attend, Contestant
from benchmarks.problem import Problem

RotateMethod: TypeAlias = Literal["allgather", "alltoall"]

_PLAN = {"": {name: cpcompile.ContextParallelInput(split_dim=2) for name in ("query", "key", "value")}}


class _Attention(nn.Module):
    """A model that is one attention call."""

    def __init__(self, is_causal: bool) -> None:
        super().__init__()
        self.is_causal = is_causal

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(query, key, value, is_causal=self.is_causal)


def dense() -> Contestant:
    """The whole problem on one process: over P ranks, the P-th part of its time is the ideal."""

    def make(problem: Problem, _backward: bool) -> Attend:
        return _Attention(problem.causal)

    return Contestant("dense, one process", "dense", "dense", make, note="the other ranks idle", alone=True)


def contestants_of_ours() -> list[Contestant]:
    """Every kind that has the ranks of one axis."""
    return [
        _ours("cpcompile ulysses", "ulysses"),
        _ours("cpcompile ring, allgather", "ring", "allgather"),
        _ours("cpcompile ring, alltoall", "ring", "alltoall"),
    ]


def _ours(name: str, kind: Literal["ulysses", "ring"], rotate_method: RotateMethod = "allgather") -> Contestant:
    def make(problem: Problem, backward: bool) -> Attend:
        ring, ulysses = (problem.ranks, None) if kind == "ring" else (None, problem.ranks)
        config = cpcompile.ContextParallelConfig(ring, ulysses, rotate_method=rotate_method)
        examples = tuple(x.detach().requires_grad_(backward) for x in problem.inputs)
        with torch.set_grad_enabled(backward):
            parallel = cpcompile.parallelize(
                _Attention(problem.causal),
                _PLAN,
                config=config,
                example_inputs=examples,
                gather_outputs=False,
                grad_sync=False,
            )
        program = _from_shards_on(parallel.graph_module())

        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = program(query, key, value)[0]
            return out

        return attend

    return Contestant(name, "cpcompile", kind, make)


def _from_shards_on(program: fx.GraphModule) -> fx.GraphModule:
    """A rank's program without its first slices: it takes shards, as inside a model, in place of whole tensors."""
    for node in program.graph.find_nodes(op="placeholder"):
        (taken,) = node.users
        assert taken.target is torch.ops.aten.slice.Tensor, taken.format_node()
        taken.replace_all_uses_with(node)
        program.graph.erase_node(taken)
    program.recompile()
    return program
