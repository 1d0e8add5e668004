"""What the passes cost: little beside the capture, and in proportion to the graph. Ratios alone are compared."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from cpcompile.compiled import captured_call, plan_of
from cpcompile.layout import Axis
from cpcompile.pipeline import Options, lower, rewrite
from tests.models import flux

REPEATS = 4

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Costs:
    """Of one model: seconds of its capture, the fewest seconds of all passes for one rank, nodes of its graph."""

    capture_seconds: float
    pass_seconds: float
    nodes: int


@contextmanager
def uncollected() -> Iterator[None]:
    """Without the garbage collector, whose cost grows with all that other tests have left in memory."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def measured(layers: int, single_layers: int) -> Costs:
    """Capture a Flux of so many blocks, and run the passes, copying included and verification left out."""
    model, kwargs = flux(layers=layers, single_layers=single_layers, batch=1)
    with uncollected():
        start = time.perf_counter()
        captured = captured_call(model, plan_of(model, None), (), kwargs)
        capture_seconds = time.perf_counter() - start
    seconds = []
    for _ in range(REPEATS):
        with uncollected():
            start = time.perf_counter()
            rewritten = rewrite(captured, (Axis("ulysses", 4),), Options())
            lower(rewritten, {"ulysses": 1})
            seconds.append(time.perf_counter() - start)
        assert sum(rewritten.seconds.values()) <= seconds[-1]
    return Costs(capture_seconds, min(seconds), len(captured.module.graph.nodes))


@pytest.fixture(scope="module")
def shallow() -> Costs:
    """Flux of 14 blocks. The first passes of a process, which import and warm up, are among the repeats."""
    return measured(5, 9)


@pytest.fixture(scope="module")
def deep() -> Costs:
    """Flux as published in depth: 19 double and 38 single blocks."""
    return measured(19, 38)


def test_passes_cost_little_beside_the_capture(deep: Costs) -> None:
    assert deep.pass_seconds <= 0.15 * deep.capture_seconds


def test_passes_are_linear_in_the_graph(shallow: Costs, deep: Costs) -> None:
    assert deep.nodes > 3 * shallow.nodes
    assert deep.pass_seconds / deep.nodes <= 1.5 * shallow.pass_seconds / shallow.nodes
