"""The invariants of a graph between passes. What breaks one is a defect of cpcompile, never of a model or a plan.

Everything is computed anew from the graph and the shared laws (``cotangents``, ``transfer``, ``assemble``), never asked
of the pass that should have kept it. Linear in the number of nodes.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any, Literal, TypeAlias

import torch
from torch import fx, nn

from cpcompile.cotangents import contribution, has_gradient, is_whole_gather, must_be_pending, results_of
from cpcompile.decision import Cotangent, Decision, decision, is_tensor, shape_of, tensor_operands, tensor_results
from cpcompile.errors import Refusal
from cpcompile.findings import Findings
from cpcompile.layout import Layout
from cpcompile.ops import neutral
from cpcompile.ops.markers import mark
from cpcompile.transfer import kind_of
from cpcompile.verify_local import verify_lowered
from cpcompile.verify_ranks import verify_ranks

__all__ = ["Stage", "verify", "verify_lowered", "verify_parameters", "verify_ranks"]

Stage: TypeAlias = Literal["propagate", "reshard", "attention", "cotangents", "enter"]
"""The pass that a rank-neutral graph comes from."""

_KINDS = {neutral.shard: "shard", neutral.gather: "gather", neutral.all_to_all: "all_to_all"}


def verify(module: fx.GraphModule, stage: Stage, *, outputs_whole: bool, grad_sync: str = "none") -> None:
    """Check a rank-neutral graph after ``stage``.

    ``outputs_whole``: the graph's outputs are gathered. ``grad_sync``: what ``enter`` was told.

    Raises:
        VerificationError: all invariants that do not hold.
    """
    findings = Findings(stage)
    if findings.lint(module) and _all_decided(module.graph, findings):
        for node in module.graph.nodes:
            _check_layouts(node, findings)
            if stage == "propagate":
                continue
            _check_operands(node, findings, outputs_whole)
            _check_reshard(node, findings)
            if stage in ("cotangents", "enter"):
                _check_cotangent(node, findings, outputs_whole)
            if stage == "enter" and grad_sync in ("all_reduce", "mean"):
                _check_entered(module, node, findings)
    findings.raise_all()


def verify_parameters(module: nn.Module, model: nn.Module) -> None:
    """Check that every parameter and buffer of ``module`` is the model's own object, not a copy of it.

    Tensors that the capture itself made (constants) have no counterpart in the model.

    Raises:
        VerificationError: all tensors that are not shared.
    """
    findings = Findings("sharing parameters")
    own = dict(_tensors(model))
    ids = {id(tensor) for tensor in own.values()}
    for name, tensor in _tensors(module):
        if name in own and tensor is not own[name]:
            findings.add_here(f"%{name}", "it is a copy: a parameter or buffer must be the model's own object")
        elif name not in own and isinstance(tensor, nn.Parameter) and id(tensor) not in ids:
            findings.add_here(f"%{name}", "it is a parameter that the model does not have")
    findings.raise_all()


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _all_decided(graph: fx.Graph, findings: Findings) -> bool:
    before = len(findings.problems)
    for node in graph.nodes:
        made = node.meta.get("cp")
        values = () if node.op == "output" else tensor_results(node)
        if not isinstance(made, Decision):
            findings.add(node, "no decision is written on it: how it lies over the ranks is unknown")
        elif len(made.results) != len(values) or any(
            (layout is None) != (value is None) for layout, value in zip(made.results, values, strict=True)
        ):
            findings.add(
                node, f"it has {len(values)} results and layouts for {len(made.results)} of them, or for others"
            )
    return len(findings.problems) == before


def _check_layouts(node: fx.Node, findings: Findings) -> None:
    """Layouts are layouts, of the shapes that the values have."""
    made = decision(node)
    operands = tensor_operands(node)
    results: list[tuple[str, Layout | None, torch.Tensor | None]] = []
    if node.op != "output":
        values = tensor_results(node)
        results += [("its result", layout, value) for layout, value in zip(made.results, values, strict=True)]
        if made.returns is not None:
            results += [("what it returns to", layout, v) for layout, v in zip(made.returns, values, strict=True)]
    if len(made.operands) != len(operands):
        findings.add(node, f"it has {len(operands)} tensor operands and asks for {len(made.operands)} layouts")
    else:
        results += [
            (f"operand {findings.name(operand)}", layout, operand.meta["val"])
            for operand, layout in zip(operands, made.operands, strict=True)
        ]
    for what, layout, value in results:
        if layout is None or value is None:
            continue
        if layout.shape != shape_of(value):
            findings.add(
                node, f"{what} has the global shape {shape_of(value)}, its layout {layout} is of {layout.shape}"
            )
        if conflict := layout.axis_conflict():
            findings.add(node, f"{what} cannot lie as {layout}: {conflict}")
    if node.target is operator.getitem:
        source, index = node.args
        if isinstance(source, fx.Node) and isinstance(index, int) and not is_tensor(source):
            given = decision(source).results[index]
            if made.results[0] != given:
                findings.add(
                    node, f"it lies as {made.results[0]}, as item {index} of {findings.name(source)} as {given}"
                )


def _check_operands(node: fx.Node, findings: Findings, outputs_whole: bool) -> None:
    """Operands lie as the node asks; nothing is left of what only ``propagate`` may leave."""
    made = decision(node)
    if node.target is mark:
        findings.add(node, "a marker survives: reshard takes all of them out")
    if is_tensor(node) and made.returns is not None:
        findings.add(node, f"its return to {made.returns[0]} was not made")
    operands = tensor_operands(node)
    if len(made.operands) != len(operands):
        return
    for operand, wanted in zip(operands, made.operands, strict=True):
        layout = decision(operand).layout
        if layout != wanted:
            law = "a pending value reaches it that is not reduced" if layout.partial else "an operand lies otherwise"
            findings.add(node, f"{law}: {findings.name(operand)} lies as {layout}, it asks for {wanted}")
        elif node.op == "output" and layout.partial:
            findings.add(node, f"output {findings.name(operand)} is pending: {layout}")
        elif node.op == "output" and outputs_whole and not layout.is_replicated:
            findings.add(node, f"outputs are whole on every rank, {findings.name(operand)} lies as {layout}")


def _check_reshard(node: fx.Node, findings: Findings) -> None:
    """A change of layout is of the kind that the two layouts make it."""
    made = decision(node)
    if node.target not in neutral.RESHARDS or len(made.operands) != len(tensor_operands(node)):
        return
    sources, targets = [decision(operand).layout for operand in tensor_operands(node)], made.results
    if len(sources) != len(targets):
        findings.add(node, f"it takes {len(sources)} tensors and gives {len(targets)}")
        return
    for source, target in zip(sources, targets, strict=True):
        assert target is not None
        change = f"{source} to {target}"
        if node.target is neutral.reduce:
            if not source.partial:
                findings.add(node, f"only what is pending is reduced, its operand lies as {source}")
            elif target != source.reduced():
                findings.add(node, f"a reduce changes nothing but what is pending, not {change}")
            continue
        if source.partial != target.partial:
            findings.add(node, f"only a reduce completes what is pending, not this change of {change}")
        kind = kind_of(Layout(source.dims), Layout(target.dims))
        if isinstance(kind, Refusal):
            findings.add(node, f"{change} is no single exchange: {kind.reason}")
        elif node.target in _KINDS and kind != _KINDS[node.target]:
            findings.add(node, f"{change} is the kind {kind!r}, not {_KINDS[node.target]!r}")


def _check_cotangent(node: fx.Node, findings: Findings, outputs_whole: bool) -> None:
    """The cotangent of a value is what its layout, its uses and the node that made it allow."""
    state = decision(node).cotangent
    if not is_tensor(node):
        if isinstance(node.meta.get("val"), (list, tuple)):
            _check_items(node, findings)
        return
    layout = decision(node).layout
    wanted = (
        Cotangent.NONE
        if not has_gradient(node)
        else Cotangent.LOCAL
        if layout.is_sharded
        else Cotangent.FULL
        if layout.partial
        else None
    )
    if wanted is not None:
        if state is not wanted:
            findings.add(node, f"the cotangent of a value that lies as {layout} is {wanted.value}, not {state.value}")
        return
    if state not in (Cotangent.FULL, Cotangent.PENDING):
        findings.add(node, f"the cotangent of a value whole on every rank is full or pending, not {state.value}")
        return
    if state is Cotangent.FULL and must_be_pending(node):
        findings.add(
            node, "its cotangent must be pending: ranks make it of different values, and not by a whole gather"
        )
    for user in node.users:
        given = contribution(user, node, outputs_whole=outputs_whole)
        if given is not state:
            need = ", which needs a cp.pend between" if given is Cotangent.FULL else ""
            law = (
                f"its use by {findings.name(user)} gives a {given.value} cotangent, but its own is {state.value}{need}"
            )
            findings.add(node, law)


def _check_items(node: fx.Node, findings: Findings) -> None:
    """What one operator makes has one backward: its whole items have one cotangent, and it is written on the node."""
    if node.target not in (neutral.exchange, neutral.enter):
        return
    items = [item for item in results_of(node) if has_gradient(item)]
    whole = [item for item in items if decision(item).layout.is_replicated]
    states = {decision(item).cotangent for item in whole}
    if len(states) > 1:
        findings.add(node, "its results have full and pending cotangents, which one backward cannot give")
    state = decision(node).cotangent
    if state is Cotangent.FULL and (states - {Cotangent.FULL} or len(whole) != len(items)):
        findings.add(node, "its backward is the one for full cotangents, its results have others")
    if state is not Cotangent.FULL and items and len(whole) == len(items) and states == {Cotangent.FULL}:
        findings.add(node, f"its backward is the one for {state.value} cotangents, those of its results are full")
    if node.target is neutral.exchange and state is Cotangent.FULL and not is_whole_gather(node):
        findings.add(node, "full cotangents are sliced only where whole values are gathered of sharded ones alone")


def _check_entered(module: fx.GraphModule, node: fx.Node, findings: Findings) -> None:
    """What requires grad and has a pending cotangent enters."""
    if node.op not in ("placeholder", "get_attr") or not has_gradient(node):
        return
    if decision(node).cotangent is Cotangent.PENDING and requires_grad(module, node):
        findings.add(node, "it requires grad and its cotangent is pending, but it does not enter through cp.enter")


def requires_grad(module: fx.GraphModule, node: fx.Node) -> bool:
    """Whether an input or an attribute of ``module`` requires grad."""
    value: Any = node.meta.get("val")
    if node.op == "get_attr":
        assert isinstance(node.target, str)
        owner, _, leaf = node.target.rpartition(".")
        value = getattr(module.get_submodule(owner), leaf)
    return isinstance(value, torch.Tensor) and value.requires_grad
