"""The ordered passes: from a captured graph to the rank-neutral graph, and from there to each rank's program."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx._lazy_graph_module import _LazyGraphModule

from cpcompile.assemble import all_coords
from cpcompile.capture import Captured
from cpcompile.decision import GradSync, decision
from cpcompile.layout import Axis, Coords, segments_of
from cpcompile.passes.analyse import Advice, Analyse
from cpcompile.passes.attention import Attention
from cpcompile.passes.bands import Bands
from cpcompile.passes.cotangents import Cotangents
from cpcompile.passes.draws import Draws, makes_draws
from cpcompile.passes.enter import Enter
from cpcompile.passes.functionalize import Functionalize
from cpcompile.passes.inline import Inline
from cpcompile.passes.lower import Lower, bind_groups
from cpcompile.passes.normalize import Normalize
from cpcompile.passes.propagate import Propagate
from cpcompile.passes.reshard import Reshard
from cpcompile.passes.rules.call import Rule
from cpcompile.site import SiteOptions
from cpcompile.sizes import Size
from cpcompile.verify import Stage, verify, verify_lowered, verify_parameters, verify_ranks

__all__ = [
    "GradSync",
    "Options",
    "Rewritten",
    "bind_groups",
    "lower",
    "lower_ranks",
    "planned",
    "rewrite",
    "shortest_sizes",
]


_MAX_ROUNDS = 16  # of propagation: each settles a pair of symbols, or rows of one more size


@dataclass(frozen=True)
class Options:
    """What the passes are told.

    sites: what is asked of attention. gather_at is for tests: nodes to run gathered although a rule exists.
    """

    gather_outputs: bool = True
    grad_sync: GradSync = "all_reduce"
    rules: Mapping[OpOverload, Rule] = field(default_factory=dict)
    gather_at: frozenset[str] = frozenset()
    sites: SiteOptions = field(default_factory=SiteOptions)
    verify: bool = False


def _spelling(captured: Captured) -> tuple[Any, ...]:
    """The passes that keep the program a single device's."""
    return Inline(captured.autocast), Functionalize(), Normalize(), Bands(), Draws()


@dataclass(frozen=True)
class Rewritten:
    """The rank-neutral program of one captured call over one mesh.

    module: what ``lower`` starts from. notes: what the plan asked for and the layouts did not need or allow. seconds:
    what each pass took.
    """

    captured: Captured
    axes: tuple[Axis, ...]
    options: Options
    module: fx.GraphModule
    notes: tuple[str, ...]
    seconds: Mapping[str, float]

    @functools.cached_property
    def draws(self) -> bool:
        """Whether the program draws random numbers."""
        return makes_draws(self.module)

    @functools.cached_property
    def normalized(self) -> fx.GraphModule:
        """The captured graph in one spelling: what the layouts were decided on, still the single-device program."""
        module = _copied(self.captured.module)
        for step in _spelling(self.captured):
            step(module)
        module.recompile()
        return module


def rewrite(captured: Captured, axes: tuple[Axis, ...], options: Options) -> Rewritten:
    """Run the passes of the rank-neutral part on a copy of the captured graph.

    Raises:
        UnsupportedError: the graph holds something that no pass has a spelling for.
        VerificationError: with ``options.verify``, an invariant does not hold after a pass.
    """
    live = tuple(axis for axis in axes if axis.size > 1)
    module, notes, seconds = _run(captured, live, options, _passes(captured, live, options))
    return Rewritten(captured, live, options, module, notes, seconds)


def planned(captured: Captured, axes: tuple[Axis, ...], options: Options) -> fx.GraphModule:
    """The graph as it is once layouts are decided, and nothing is inserted yet."""
    live = tuple(axis for axis in axes if axis.size > 1)
    return _run(captured, live, options, _passes(captured, live, options)[:1])[0]


def _passes(captured: Captured, axes: tuple[Axis, ...], options: Options) -> tuple[tuple[Any, Stage], ...]:
    """THE ordered passes between one spelling and the rank-neutral program."""
    propagate = Propagate(
        axes,
        captured.plan.entries,
        options.rules,
        options.gather_outputs,
        options.gather_at,
        options.sites,
        captured.sizes.known,
    )
    return (
        (propagate, "propagate"),
        (Reshard(), "reshard"),
        (Attention(), "attention"),
        (Cotangents(options.gather_outputs), "cotangents"),
        (Enter(options.grad_sync), "enter"),
    )


def _run(
    captured: Captured, axes: tuple[Axis, ...], options: Options, passes: tuple[tuple[Any, Stage], ...]
) -> tuple[fx.GraphModule, tuple[str, ...], dict[str, float]]:
    """The module after ``passes``, the markers' notes, and what each pass took."""
    module = _copied(captured.module)
    seconds: dict[str, float] = {}
    for step in _spelling(captured):
        _timed(seconds, step, module)
    notes: tuple[str, ...] = ()
    for step, stage in passes:
        _timed(seconds, step, module)
        if stage == "propagate":
            _settle(captured, step, module, seconds)
            # Markers carry their notes, and are gone after this.
            notes = tuple(note for node in module.graph.nodes if (note := decision(node).note))
        if options.verify:
            verify(module, stage, outputs_whole=options.gather_outputs)
    module.recompile()
    return module, notes, seconds


def _settle(captured: Captured, propagate: Propagate, module: fx.GraphModule, seconds: dict[str, float]) -> None:
    """Propagate again while what was decided shows that something else should have been."""
    plain, found = _agreed(captured, propagate, module, seconds)
    if not found.zigzag:
        return
    _timed(seconds, evened := replace(plain, zigzag=found.zigzag), module)
    if _agreed(captured, evened, module, seconds)[1].conflicts > found.conflicts:
        _timed(seconds, plain, module)


def _agreed(
    captured: Captured, propagate: Propagate, module: fx.GraphModule, seconds: dict[str, float]
) -> tuple[Propagate, Advice]:
    """Propagate until granules fit the views and sizes that meet are taken to be equal."""
    for _ in range(_MAX_ROUNDS):
        advice: Advice = _timed(seconds, Analyse(), module)
        granules = dict(propagate.granules)
        for size, granule in advice.granules.items():
            known = granules.get(size, 1)
            both_known = isinstance(known, int) and isinstance(granule, int)
            granules[size] = math.lcm(known, granule) if both_known else granule
        met = advice.unequal is not None and captured.sizes.assume_equal(*advice.unequal)
        if not met and granules == propagate.granules:
            break
        propagate = replace(propagate, granules=granules)
        _timed(seconds, propagate, module)
    return propagate, advice


def lower(rewritten: Rewritten, coords: Coords) -> fx.GraphModule:
    """The program of the rank at ``coords``, its groups named by axes."""
    module = Lower(rewritten.axes, coords, rewritten.options.grad_sync)(rewritten.module)
    if rewritten.options.verify:
        verify_lowered(module, coords)
        verify_parameters(module, rewritten.captured.module)
    return module


def lower_ranks(rewritten: Rewritten) -> list[fx.GraphModule]:
    """The programs of all ranks in rank order; with ``options.verify`` also held against each other.

    Raises:
        VerificationError: with ``options.verify``, an invariant does not hold.
    """
    modules = [lower(rewritten, coords) for coords in all_coords(rewritten.axes)]
    if rewritten.options.verify:
        verify_ranks(modules, rewritten.axes)
    return modules


def shortest_sizes(rewritten: Rewritten) -> list[tuple[Size, int]]:
    """For every symbolic segment that is divided, how long it must be for each rank to get a share."""
    found: dict[tuple[Size, int], None] = {}
    for node in rewritten.module.graph.nodes:
        for layout in decision(node).results:
            for dim in () if layout is None else layout.dims:
                for segment in segments_of(dim):
                    if segment.axes and not isinstance(segment.size, int):
                        found[segment.size, math.prod(axis.size for axis in segment.axes)] = None
    return list(found)


def _copied(module: fx.GraphModule) -> fx.GraphModule:
    """The same graph over the same parameters, with metadata of its own."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        env[node] = graph.node_copy(node, lambda old: env[old])
        env[node].meta = dict(node.meta)
        env[node].name = node.name
    # Code is made when it is first run: the passes only look at the graph.
    return _LazyGraphModule(module, graph, class_name=type(module).__name__)


def _timed(seconds: dict[str, float], step: Any, module: fx.GraphModule) -> Any:
    start = time.perf_counter()
    with torch.no_grad():
        result = step(module)
    seconds[step.name] = seconds.get(step.name, 0.0) + time.perf_counter() - start
    return result
