"""The ordered passes: from a captured graph to the rank-neutral graph, and from there to each rank's program."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx._lazy_graph_module import _LazyGraphModule

from cpcompile.assemble import all_coords
from cpcompile.capture import Captured
from cpcompile.decision import GradSync, decision
from cpcompile.layout import Axis, Coords
from cpcompile.passes.attention import Attention
from cpcompile.passes.cotangents import Cotangents
from cpcompile.passes.enter import Enter
from cpcompile.passes.functionalize import Functionalize
from cpcompile.passes.inline import Inline
from cpcompile.passes.lower import Lower, bind_groups
from cpcompile.passes.normalize import Normalize
from cpcompile.passes.propagate import Propagate
from cpcompile.passes.reshard import Reshard
from cpcompile.passes.rules.attention import Policy
from cpcompile.passes.rules.call import Rule
from cpcompile.verify import Stage, verify, verify_lowered, verify_parameters, verify_ranks

__all__ = ["GradSync", "Options", "Rewritten", "bind_groups", "lower", "lower_ranks", "rewrite"]


@dataclass(frozen=True)
class Options:
    """What the passes are told.

    gather_at and policy are for tests: nodes to run gathered although a rule exists, and attention on local shards.
    """

    gather_outputs: bool = True
    grad_sync: GradSync = "all_reduce"
    rules: Mapping[OpOverload, Rule] = field(default_factory=dict)
    gather_at: frozenset[str] = frozenset()
    policy: Policy = "auto"
    verify: bool = False


_SPELLING = (Inline(), Functionalize(), Normalize())
"""The passes that keep the program a single device's."""


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
    def normalized(self) -> fx.GraphModule:
        """The captured graph in one spelling: what the layouts were decided on, still the single-device program."""
        module = _copied(self.captured.module)
        for step in _SPELLING:
            step(module)
        module.recompile()
        return module


def rewrite(captured: Captured, axes: tuple[Axis, ...], options: Options) -> Rewritten:
    """Run the passes of the rank-neutral part on a copy of the captured graph.

    Raises:
        UnsupportedError: the graph holds something that no pass has a spelling for.
        VerificationError: with ``options.verify``, an invariant does not hold after a pass.
    """
    module = _copied(captured.module)
    seconds: dict[str, float] = {}
    for step in _SPELLING:
        _timed(seconds, step, module)
    live = tuple(axis for axis in axes if axis.size > 1)
    steps: tuple[tuple[object, Stage], ...] = (
        (
            Propagate(
                live,
                tuple(axis for axis in live if axis.name == "ring"),
                captured.plan.entries,
                options.rules,
                options.gather_outputs,
                options.gather_at,
                options.policy,
            ),
            "propagate",
        ),
        (Reshard(), "reshard"),
        (Attention(), "attention"),
        (Cotangents(options.gather_outputs), "cotangents"),
        (Enter(options.grad_sync), "enter"),
    )
    notes: tuple[str, ...] = ()
    for step_, stage in steps:
        _timed(seconds, step_, module)
        if stage == "propagate":  # markers carry their notes, and are gone after it
            notes = tuple(note for node in module.graph.nodes if (note := decision(node).note))
        if options.verify:
            verify(module, stage, outputs_whole=options.gather_outputs, grad_sync=options.grad_sync)
    module.recompile()
    return Rewritten(captured, live, options, module, notes, seconds)


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


def _timed(seconds: dict[str, float], step: object, module: fx.GraphModule) -> None:
    start = time.perf_counter()
    with torch.no_grad():
        step(module)  # type: ignore[operator]
    seconds[step.name] = time.perf_counter() - start  # type: ignore[attr-defined]
