"""What takes part: a way to do attention over the ranks, and how its inputs are handed to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

from benchmarks.problem import Answer, Order, Problem

Attend: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Kind: TypeAlias = Literal["dense", "ulysses", "ring"]


@dataclass(frozen=True)
class Contestant:
    """One way to do attention.

    family: whose it is. note: what it was helped with, or what its times hold.
    make: the function to time, for a problem and whether gradients are wanted. It raises where there is none, and the
    table gives the reason: ModuleNotFoundError means that it is not installed.
    memory: the order of dimensions that it takes and gives. Each gets contiguous tensors in its own order.
    alone: only the first rank computes, on whole tensors.
    """

    name: str
    family: str
    kind: Kind
    make: Callable[[Problem, bool], Attend]
    note: str = ""
    memory: Literal["BHSD", "BSHD"] = "BHSD"
    order: Order = "plain"
    alone: bool = False


class Trial:
    """A contestant with its inputs for one problem in hand."""

    def __init__(self, contestant: Contestant, problem: Problem, backward: bool) -> None:
        self.contestant = contestant
        self._problem = problem
        self._backward = backward
        self._attend = contestant.make(problem, backward)
        self._inputs = [self._laid_out(x).requires_grad_(backward) for x in problem.inputs]
        self._cotangent = self._laid_out(problem.cotangent)
        self.runs_here = not contestant.alone or problem.rank == 0

    def forward(self) -> torch.Tensor:
        """Attention alone."""
        with torch.set_grad_enabled(self._backward):
            return self._attend(self._inputs[0], self._inputs[1], self._inputs[2])

    def backward(self, out: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Gradients of query, key and value."""
        return torch.autograd.grad(out, self._inputs, self._cotangent)

    def run(self) -> None:
        """What is timed."""
        out = self.forward()
        if self._backward:
            self.backward(out)

    def errors(self, out: torch.Tensor, gradients: tuple[torch.Tensor, ...], answer: Answer) -> dict[str, float]:
        """How far each result is from the answer, relative to the largest number in the answer."""
        found: dict[str, float] = {}
        for name, mine in zip(answer.parts, (out, *gradients), strict=True):
            whole = answer.parts[name]
            want = self._laid_out(whole)
            same_shape = mine.shape == want.shape
            error = ((mine.detach() - want).abs().max() / whole.abs().max()).item() if same_shape else float("inf")
            found[name] = error if error == error else float("inf")
        return found

    def _laid_out(self, x_BHSD: torch.Tensor) -> torch.Tensor:
        """A tensor as the contestant takes and gives it."""
        x = x_BHSD if self.contestant.alone else self._problem.shard(x_BHSD, self.contestant.order)
        x = x.transpose(1, 2) if self.contestant.memory == "BSHD" else x
        return x.detach().clone(memory_format=torch.contiguous_format)
