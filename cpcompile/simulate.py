"""All ranks in this process, on real numbers: a rewritten program against the model itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from cpcompile.accounting import CountTraffic, Traffic
from cpcompile.assemble import all_coords, unshard
from cpcompile.capture import Captured
from cpcompile.check_report import CheckReport, Difference
from cpcompile.compiled import captured_call, compile_call, plan_of
from cpcompile.decision import decision, has_decision, is_tensor, module_of
from cpcompile.errors import MeshError, Problem
from cpcompile.generators import DrawFrom
from cpcompile.layout import Axis
from cpcompile.pipeline import Options, Rewritten, bind_groups, lower_ranks, shortest_sizes
from cpcompile.reference import (
    Reference,
    carriers,
    differentiable,
    error,
    excused_error,
    reference,
    rounding_noise,
    tolerance_of,
)
from cpcompile.report import Report
from cpcompile.threads import run_ranks
from cpcompile.trees import flatten

_UNINITIALIZED = (
    torch.ops.aten.empty_like.default,
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.new_empty.default,
)


@dataclass(frozen=True)
class _Rank:
    outputs: tuple[torch.Tensor, ...]
    gradients: tuple[torch.Tensor | None, ...]
    forward: Traffic
    backward: Traffic
    values: Mapping[str, torch.Tensor]


def check(
    model: nn.Module,
    plan: Mapping[str, Any] | None = None,
    *,
    ring: int = 1,
    ulysses: int = 1,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    backward: bool = False,
    bisect: bool = False,
    dynamic: bool = False,
    tolerance: float | None = None,
) -> CheckReport:
    """Run one call of ``model`` on ``ring * ulysses`` simulated ranks and compare it with the model itself.

    No process is launched and no GPU is needed: the ranks are threads, the numbers real.

    Args:
        model: the model; it is left as it was.
        plan: module name -> inputs to split or outputs to gather; None takes ``model._cp_plan``.
        ring, ulysses: ranks along either axis of the mesh.
        args, kwargs: the call's arguments.
        backward: compare every parameter's (and input's) gradient too, under fixed random cotangents of the outputs.
        bisect: name the first value that differs from the captured graph's, with its layout.
        dynamic: capture sizes as symbols.
        tolerance: the largest error allowed, relative to each output's (and each gradient's own) scale; None takes
            what the output's dtype can hold.

    Raises:
        PlanError, MeshError, CaptureError, UnsupportedError: before anything runs.
    """
    axes = mesh_axes(ring, ulysses)
    options = Options(verify=True)
    captured = captured_call(model, plan_of(model, plan), args, kwargs, dynamic=dynamic)
    if dynamic:
        shapes = [tensor.shape for tensor in flatten((tuple(args), dict(kwargs or {})))[0]]
        rewritten, _ = compile_call(captured, axes, options)
        if not captured.sizes.matcher(shortest_sizes(rewritten))(shapes):
            captured = captured_call(model, plan_of(model, plan), args, kwargs)
    return check_captured(
        model, captured, axes, args, kwargs, options, backward=backward, bisect=bisect, tolerance=tolerance
    )


def mesh_axes(ring: int, ulysses: int) -> tuple[Axis, ...]:
    """The axes of a simulated mesh, those of one rank left out.

    Raises:
        MeshError: a degree below one, or one rank in all.
    """
    problems = [
        Problem(f"{name}={degree}", "a mesh axis has at least one rank", "use 1 for an axis that is not wanted")
        for name, degree in (("ring", ring), ("ulysses", ulysses))
        if degree < 1
    ]
    if not problems and ring * ulysses == 1:
        problems = [Problem("ring=1, ulysses=1", "one rank shares nothing", "make one of them 2 or more")]
    if problems:
        raise MeshError(problems)
    return tuple(axis for axis in (Axis("ring", ring), Axis("ulysses", ulysses)) if axis.size > 1)


def check_captured(
    model: nn.Module,
    captured: Captured,
    axes: tuple[Axis, ...],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    options: Options,
    *,
    backward: bool = False,
    bisect: bool = False,
    tolerance: float | None = None,
    against: Reference | None = None,
) -> CheckReport:
    """``check`` of a call that is captured already, with options of the passes, against a reference if one is known."""
    rewritten, report = compile_call(captured, axes, options)
    tensors, _ = flatten((tuple(args), dict(kwargs or {})))
    against = against or reference(model, args, kwargs, backward=backward)
    ranks = simulate(rewritten, model, tensors, against, backward=backward, record=bisect)
    tolerance = tolerance_of(rewritten.module) if tolerance is None else tolerance
    max_error = max(
        (error(mine, want) for rank in ranks for mine, want in zip(rank.outputs, against.outputs, strict=True)),
        default=0.0,
    )
    errors = _gradient_errors(ranks, against) if backward else {}
    failed = [name for name, found in errors.items() if not found <= tolerance]
    noise = rounding_noise(model, args, kwargs, against) if failed else {}
    excused = [name for name in failed if errors[name] <= excused_error(noise[name])]
    if excused:
        report = _noted(report, f"{', '.join(sorted(excused))}: no further off than rounding alone brings one device")
    errors = {name: found for name, found in errors.items() if name not in excused}
    worst = max(errors, key=lambda name: errors[name], default="")
    max_grad_error = errors.get(worst, 0.0)
    return CheckReport(
        ok=max_error <= tolerance and max_grad_error <= tolerance,
        max_error=max_error,
        max_grad_error=max_grad_error,
        worst_gradient=worst,
        tolerance=tolerance,
        report=report,
        collectives=Counter(ranks[0].forward.collectives),
        backward_collectives=Counter(ranks[0].backward.collectives),
        bytes_sent=tuple(rank.forward.bytes_sent for rank in ranks),
        backward_bytes_sent=tuple(rank.backward.bytes_sent for rank in ranks),
        first_difference=_first_difference(rewritten, ranks, tensors, tolerance) if bisect else None,
    )


def simulate(
    rewritten: Rewritten,
    model: nn.Module,
    tensors: Sequence[torch.Tensor],
    against: Reference,
    *,
    backward: bool,
    record: bool = False,
) -> list[_Rank]:
    """All ranks' runs of a rewritten program, in rank order."""
    _, sources = differentiable(model, tensors)
    modules = lower_ranks(rewritten)
    ranks = all_coords(rewritten.axes)

    def program(coords: dict[str, int], groups: dict[str, str]) -> _Rank:
        module = modules[ranks.index(coords)]
        bind_groups(module, groups)
        recorder = _Recorder(module) if record else None
        with torch.set_grad_enabled(backward), DrawFrom(against.generator), CountTraffic() as forward:
            outputs = tuple(recorder.run(*tensors) if recorder else module(*tensors))
        gradients: tuple[torch.Tensor | None, ...] = ()
        with CountTraffic() as counted:
            if backward and against.cotangents:
                gradients = torch.autograd.grad(carriers(outputs), sources, against.cotangents, allow_unused=True)
        values = recorder.values if recorder else {}
        return _Rank(tuple(out.detach() for out in outputs), gradients, forward.traffic, counted.traffic, values)

    return run_ranks(rewritten.axes, program)


def _gradient_errors(ranks: Sequence[_Rank], against: Reference) -> dict[str, float]:
    """For each parameter the worst rank's error, relative to that parameter's own gradient; no gradient is zero."""
    errors: dict[str, float] = {}
    for index, name in enumerate(against.names):
        want = against.gradients[index] if against.gradients else None
        for rank in ranks:
            mine = rank.gradients[index] if rank.gradients else None
            present = next((gradient for gradient in (want, mine) if gradient is not None), None)
            if present is not None:
                zero = torch.zeros_like(present)
                found = error(zero if mine is None else mine, zero if want is None else want)
                errors[name] = max(errors.get(name, 0.0), found)
    return errors


def _noted(report: Report, note: str) -> Report:
    return replace(report, notes=(*report.notes, note))


class _Recorder(fx.Interpreter):
    """Runs a lowered graph and keeps each value under the name of the node that it was lowered from."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.values: dict[str, torch.Tensor] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n.target in _UNINITIALIZED:
            value.zero_()  # what nobody has written yet is equal everywhere
        origin = n.meta.get("origin", n)
        if isinstance(value, torch.Tensor):
            self.values[origin.name] = value.detach()
        return value


def _first_difference(
    rewritten: Rewritten, ranks: Sequence[_Rank], tensors: Sequence[torch.Tensor], tolerance: float
) -> Difference | None:
    """The first value, in the order of the program, that assembled from the ranks is not the single device's."""
    single = _Recorder(rewritten.normalized)
    with torch.no_grad():
        single.run(*tensors)
    for node in rewritten.module.graph.nodes:
        if node.op != "call_function" or not is_tensor(node) or not has_decision(node):
            continue
        if node.name not in single.values or any(node.name not in rank.values for rank in ranks):
            continue
        layout = decision(node).layout
        mine = unshard({index: rank.values[node.name] for index, rank in enumerate(ranks)}, layout, rewritten.axes)
        want = single.values[node.name]
        found = error(mine.to(want.dtype), want)
        if not found <= tolerance:
            return Difference(node.name, module_of(node), str(node.target), str(layout), found)
    return None
