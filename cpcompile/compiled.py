"""From a model, a plan and a call to a rewritten program: what both doors and the simulation share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from cpcompile.capture import Captured, capture
from cpcompile.decision import decision, has_decision
from cpcompile.errors import FallbackError, PlanError, Problem
from cpcompile.layout import Axis
from cpcompile.ops.markers import mark
from cpcompile.pipeline import Options, Rewritten, rewrite
from cpcompile.plan import ResolvedPlan, resolve_plan
from cpcompile.report import Report, make_report


def plan_of(model: nn.Module, plan: Mapping[str, Any] | None) -> ResolvedPlan:
    """The plan, or the model's own ``_cp_plan``, resolved.

    Raises:
        PlanError: there is none, or it does not fit the model.
    """
    if plan is None:
        plan = getattr(model, "_cp_plan", None)
    if plan is None:
        raise PlanError(
            [
                Problem(
                    type(model).__name__,
                    "there is no plan: none was given and the model has no _cp_plan",
                    "pass plan={module name: {argument: ContextParallelInput(split_dim=...)}, ...}",
                )
            ]
        )
    return resolve_plan(plan, model)


def captured_call(
    model: nn.Module,
    plan: ResolvedPlan,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    *,
    dynamic: bool = False,
) -> Captured:
    """One call captured."""
    return capture(model, plan, args, kwargs or {}, dynamic=dynamic)


def compile_call(
    captured: Captured, axes: tuple[Axis, ...], options: Options, *, strict: bool = False
) -> tuple[Rewritten, Report]:
    """The captured call rewritten for a mesh, and the report about it.

    Raises:
        PlanError: nothing at all is sharded under the plan.
        FallbackError: with ``strict``, an operator would run on gathered operands.
    """
    rewritten = rewrite(captured, axes, options)
    notes = (*captured.notes, *rewritten.notes)
    if captured.sizes.are_symbolic:
        notes = (*notes, "sizes are symbols: the bytes are those of the captured call")
    raw = options.grad_sync == "none"
    report = make_report(rewritten.module, rewritten.axes, notes, raw_gradients=raw, known=captured.sizes.known)
    if rewritten.axes and not any(_is_sharded(node) for node in rewritten.module.graph.nodes) and not rewritten.notes:
        marks = [node.args[1] for node in captured.module.graph.nodes if node.target is mark]
        reasons = "; ".join(captured.notes) or "no tensor was split"
        law = f"nothing at all is sharded under it: {reasons}"
        if any(captured.plan.entries[index].role != "gather_output" for index in marks):
            law = "nothing at all is sharded under it: this call does not use what it splits"
        elif marks:
            law = "it gathers and splits nothing: nothing at all is sharded under it"
        raise PlanError(
            [
                Problem(
                    "plan",
                    law,
                    "name a tensor of this call that has the sequence as a dimension",
                )
            ]
        )
    if strict and report.fallbacks:
        raise FallbackError(
            [
                Problem(
                    fallback.module or "(root)",
                    f"{fallback.operator} would run on gathered operands ({fallback.reason})"
                    + (f"\nat {fallback.source}" if fallback.source else ""),
                    "give a rule for it (rules={op: rule}), or call without strict",
                )
                for fallback in report.fallbacks
            ]
        )
    return rewritten, report


def _is_sharded(node: Any) -> bool:
    return has_decision(node) and any(layout is not None and layout.is_sharded for layout in decision(node).results)
