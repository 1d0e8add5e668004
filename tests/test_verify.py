"""The verifier: quiet on what the passes make, and by name and law against each way of breaking it."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from cpcompile.compiled import captured_call, plan_of
from cpcompile.decision import Cotangent, decision
from cpcompile.errors import VerificationError
from cpcompile.layout import Axis, Layout
from cpcompile.ops import neutral
from cpcompile.ops.markers import mark
from cpcompile.pipeline import Options, lower_ranks, rewrite
from cpcompile.verify import verify, verify_parameters
from tests import models, toys
from tests.breaking import caught, drop
from tests.toys import nodes_of

aten = torch.ops.aten
MESHES = [(Axis("ulysses", 2),), (Axis("ulysses", 3),), (Axis("ring", 2), Axis("ulysses", 2))]
MODELS = [toys.Region, toys.Rope, toys.Fallback, toys.Attend, toys.Pooled, toys.Toy, toys.Twice]


def check(built, stage="enter", outputs_whole=True):
    verify(built.module, stage, outputs_whole=outputs_whole, grad_sync="all_reduce")


def decide(node, **changes):
    node.meta["cp"] = replace(decision(node), **changes)


def lowered(built):
    return lower_ranks(built.rewritten)


def test_the_toys_are_valid_on_every_mesh():
    for make in MODELS:
        for axes in MESHES:
            built = toys.build(make, axes=axes)
            verify_parameters(lowered(built)[0], built.model)


@pytest.mark.parametrize("make", [models.flux, models.wan])
def test_real_models_are_valid(make):
    model, inputs = make()
    captured = captured_call(model, plan_of(model, None), (), inputs)
    rewritten = rewrite(captured, MESHES[2], Options(verify=True))
    verify_parameters(lower_ranks(rewritten)[0], model)


@pytest.mark.parametrize("grad_sync", ["all_reduce", "mean", "sum", "none"])
@pytest.mark.parametrize("gather_outputs", [True, False])
def test_the_toys_are_valid_under_every_option(grad_sync, gather_outputs):
    lowered(toys.build(toys.Pooled, grad_sync=grad_sync, gather_outputs=gather_outputs))


def test_a_graph_that_fx_finds_malformed():
    built = toys.build(toys.Pooled)
    built.node(neutral.reduce).append(built.node(aten.mean.dim))
    with pytest.raises(VerificationError, match=r"the graph: lint: .*before it has been defined"):
        check(built)


def test_a_node_without_a_decision():
    built = toys.build(toys.Pooled)
    del built.node(aten.linear.default).meta["cp"]
    caught(lambda: check(built, "propagate"), built.node(aten.linear.default), "no decision")


def test_a_layout_of_another_shape_and_one_with_a_conflict():
    built = toys.build(toys.Pooled)
    node = built.node(aten.linear.default)
    dims = decision(node).layout.dims
    decide(node, results=(Layout((dims[1], dims[1], dims[2])),))
    error = caught(lambda: check(built), node, "(2, 7, 8)", "(7, 7, 8)")
    assert "axis ulysses divides both dimension 0 and dimension 1" in str(error)


def test_a_missing_operand_layout():
    built = toys.build(toys.Pooled)
    node = built.node(aten.linear.default)
    decide(node, operands=decision(node).operands[:-1])
    caught(lambda: check(built, "propagate"), node, "3 tensor operands", "2 layouts")


def test_a_wrong_operand_layout():
    built = toys.build(toys.Pooled)
    node = built.node(aten.linear.default)
    operands = decision(node).operands
    decide(node, operands=(Layout.replicated(operands[0].shape), *operands[1:]))
    caught(lambda: check(built), node, "an operand lies otherwise", "%shard lies as (2) (7 ulysses) (8)")


def test_a_dropped_reduce():
    built = toys.build(toys.Pooled)
    user = next(iter(built.node(neutral.reduce).users))
    drop(built.node(neutral.reduce))
    caught(lambda: check(built, "reshard"), user, "a pending value reaches it", "%mean lies as (2) (8), partial sum")


def test_a_dropped_gather_of_an_output():
    built = toys.build(toys.Twice)
    drop(built.node(neutral.gather))
    caught(lambda: check(built, "reshard"), "%output", "an operand lies otherwise", "%linear lies as")


def test_outputs_that_should_be_whole():
    built = toys.build(toys.Twice, gather_outputs=False)
    check(built, outputs_whole=False)
    caught(lambda: check(built), "%output", "outputs are whole")


def test_a_surviving_marker():
    built = toys.build(toys.Pooled)
    node = built.node(neutral.shard)
    with built.module.graph.inserting_after(node):
        left = built.module.graph.call_function(mark, (node, 0))
    left.meta = dict(node.meta)
    decide(left, operands=decision(node).results)
    caught(lambda: check(built, "reshard"), left, "a marker survives")


@pytest.mark.parametrize("wrong", [neutral.gather, neutral.all_to_all, neutral.reduce])
def test_a_reshard_of_another_kind(wrong):
    built = toys.build(toys.Pooled)
    node = built.node(neutral.shard)
    node.target = wrong
    caught(lambda: check(built, "reshard"), node, "only what is pending" if wrong is neutral.reduce else "'shard'")


def test_a_return_that_was_not_made():
    built = toys.build(toys.Fallback)
    node = built.node(aten.renorm.default)
    decide(node, returns=(decision(built.node(neutral.shard, 1)).layout,))
    caught(lambda: check(built, "reshard"), node, "its return to (2) (7 ulysses) (8) was not made")


def test_a_slice_in_place_of_a_reduce_scatter():
    built = toys.build(toys.Fallback)
    node = built.node(neutral.gather, 0)
    assert decision(node).cotangent is Cotangent.PENDING
    decide(node, cotangent=Cotangent.FULL)
    caught(lambda: check(built, "cotangents"), node, "use by %renorm gives a pending cotangent", "its own is full")


def test_a_reduce_scatter_in_place_of_a_slice():
    built = toys.build(toys.Fallback)
    node = built.node(neutral.gather, 1)
    assert decision(node).cotangent is Cotangent.FULL
    decide(node, cotangent=Cotangent.PENDING)
    caught(lambda: check(built, "cotangents"), node, "use by %output gives a full cotangent", "needs a cp.pend")


def test_a_full_cotangent_of_what_ranks_make_of_different_values():
    built = toys.build(toys.Fallback)
    node = built.node(neutral.gather, 1)
    node.target = aten.alias.default
    caught(lambda: check(built, "cotangents"), node, "its cotangent must be pending")


def test_a_sharded_value_has_a_local_cotangent_and_a_partial_one_a_full_one():
    built = toys.build(toys.Pooled)
    nodes = built.node(aten.linear.default), built.node(aten.mean.dim)
    decide(nodes[0], cotangent=Cotangent.FULL)
    decide(nodes[1], cotangent=Cotangent.PENDING)
    caught(lambda: check(built), nodes[0], "is local, not full")
    caught(lambda: check(built), nodes[1], "is full, not pending")


def test_a_dropped_pend():
    built = toys.build(toys.Pooled)
    drop(built.node(neutral.pend))
    caught(lambda: check(built, "cotangents"), "%linear_1", "use by %output gives a full", "its own is pending")


def test_a_parameter_that_does_not_enter():
    built = toys.build(toys.Pooled)
    values: Any = built.node(neutral.enter).args[0]
    for index, item in enumerate(list(built.node(neutral.enter).users)):
        item.replace_all_uses_with(values[index])
    caught(lambda: check(built), "%first.weight", "use by %linear gives a pending cotangent")
    for node in nodes_of(built.module, "first.weight"):
        decide(node, cotangent=Cotangent.PENDING)
    caught(lambda: check(built), "%first.weight", "requires grad", "cp.enter")


def test_all_problems_are_listed():
    built = toys.build(toys.Pooled)
    drop(built.node(neutral.pend))
    drop(built.node(neutral.reduce))
    with pytest.raises(VerificationError, match=r"not valid after cotangents \([2-9] problems\)"):
        check(built, "cotangents")


# Parameters.


def test_a_copied_parameter():
    built = toys.build(toys.Pooled)
    module: Any = lowered(built)[0]
    weight: Any = built.model.get_parameter("first.weight")
    module.first.weight = nn.Parameter(weight.detach().clone())
    caught(lambda: verify_parameters(module, built.model), "%first.weight", "a copy", "the model's own object")
    module.first.weight = weight
    module.register_parameter("extra", nn.Parameter(torch.zeros(1)))
    caught(lambda: verify_parameters(module, built.model), "%extra", "the model does not have")


def test_constants_of_the_capture_are_no_copies():
    built = toys.build(toys.Toy)
    module = lowered(built)[0]
    assert any(name.startswith("constant_") for name, _ in module.named_buffers())
    verify_parameters(module, built.model)
