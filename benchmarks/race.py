"""All contestants on one problem: checked, counted, then timed in turn, round by round."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch.distributed as dist

from benchmarks.contestant import Contestant, Kind, Trial
from benchmarks.problem import Answer, Problem
from benchmarks.traffic import CountSent

Status: TypeAlias = Literal["right", "wrong", "not installed", "cannot"]

TOLERANCE = 1e-4
"""Of the answer's largest number. Rounding is a hundredth of it; a key too few or too many is a hundred times it."""

FEWEST_ROUNDS = 5


@dataclass
class Result:
    """What one contestant did.

    seconds: for each round, those of the slowest rank. error: the largest of any result on any rank, and whose it is.
    sent: bytes that left the first rank, forward and backward; calls: its collectives likewise, by name.
    """

    contestant: str
    family: str
    kind: Kind
    tokens: int
    ranks: int
    causal: bool
    backward: bool
    status: Status
    note: str
    seconds: list[float] = field(default_factory=list)
    error: float = float("nan")
    sent: tuple[int, int] = (0, 0)
    calls: tuple[dict[str, int], dict[str, int]] = field(default_factory=lambda: ({}, {}))


def race(
    contestants: Sequence[Contestant], problem: Problem, answer: Answer, backward: bool, rounds: int, seconds: float
) -> list[Result]:
    """Run all contestants side by side. Every rank calls this, and gets the same results.

    Args:
        rounds: how often each is timed; fewer, but no fewer than five, where that would take longer than ``seconds``.
    """
    results: list[Result] = []
    trials: list[tuple[Trial, Result]] = []
    for contestant in contestants:
        result, trial = _checked(contestant, problem, answer, backward)
        results.append(result)
        if trial is not None:
            trials.append((trial, result))
    start = time.perf_counter()
    for turn in range(rounds):
        if turn >= FEWEST_ROUNDS and max(_everywhere(time.perf_counter() - start)) * (turn + 1) / turn > seconds:
            break
        for result, of_ranks in zip([result for _, result in trials], _round(trials, turn), strict=True):
            result.seconds.append(max(of_ranks))
    return results


def _round(trials: Sequence[tuple[Trial, Result]], turn: int) -> list[list[float]]:
    """Time all once, in an order of this turn's own: for each the seconds of every rank."""
    order = list(range(len(trials)))
    random.Random(turn).shuffle(order)
    own = dict.fromkeys(order, 0.0)
    gc.collect()
    gc.disable()
    try:
        for index in order:
            own[index] = _timed(trials[index][0])
    finally:
        gc.enable()
    of_ranks = _everywhere(own)
    return [[rank[index] for rank in of_ranks] for index in range(len(trials))]


def _timed(trial: Trial) -> float:
    """Seconds on this rank, from a moment at which all ranks are there."""
    dist.barrier()
    if not trial.runs_here:
        return 0.0
    start = time.perf_counter()
    trial.run()
    return time.perf_counter() - start


def _checked(contestant: Contestant, problem: Problem, answer: Answer, backward: bool) -> tuple[Result, Trial | None]:
    """Make a contestant and run it once: its errors, its traffic, or why there is nothing to time."""

    def result(status: Status, note: str) -> Result:
        about = (contestant.name, contestant.family, contestant.kind, problem.tokens, problem.ranks, problem.causal)
        return Result(*about, backward, status, note)

    trial, failure, status = None, "", "cannot"
    errors: dict[str, float] = {}
    forward, backwards = CountSent(), CountSent()
    try:
        trial = Trial(contestant, problem, backward)
        if trial.runs_here:
            with forward:
                out = trial.forward()
            with backwards:
                gradients = trial.backward(out) if backward else ()
            errors = trial.errors(out, gradients, answer)
    except ModuleNotFoundError as error:
        status, failure = "not installed", str(error)
    except Exception as error:
        failure = " ".join(str(error).split()) or type(error).__name__
    failures = [found for found in _everywhere(failure) if found]
    if failures:
        return result("not installed" if status == "not installed" else "cannot", failures[0]), None
    worst: dict[str, float] = {}
    for of_rank in _everywhere(errors):
        for name, value in of_rank.items():
            worst[name] = max(value, worst.get(name, 0.0))
    is_right = max(worst.values()) <= TOLERANCE
    wrong = ", ".join(f"{name} is off by {value:.1g}" for name, value in worst.items() if value > TOLERANCE)
    note = contestant.note if is_right else f"{contestant.note}; {wrong}".removeprefix("; ")
    found = result("right" if is_right else "wrong", note)
    found.error = max(worst.values())
    found.sent = forward.traffic.bytes_sent, backwards.traffic.bytes_sent
    found.calls = dict(forward.traffic.collectives), dict(backwards.traffic.collectives)
    return found, trial


def _everywhere(value: Any) -> list[Any]:
    """All ranks' values."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found
