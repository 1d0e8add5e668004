"""One operator in the middle, gathered although there is a rule for it: outputs and all gradients stay equal.

This is where a rule for gradients that looks at the forward pass alone goes wrong: behind the gather every rank
computes the same, yet what comes back to it differs from rank to rank.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import fx

from cpcompile.compiled import compile_call
from cpcompile.cotangents import contribution
from cpcompile.decision import Cotangent, decision, module_of, tensor_operands
from cpcompile.errors import VerificationError
from cpcompile.layout import Layout
from cpcompile.ops import neutral
from cpcompile.pipeline import Options, rewrite
from cpcompile.reference import error
from cpcompile.simulate import mesh_axes, simulate
from tests.models import capture_of, case, checked, reference_of

aten = torch.ops.aten

FAMILIES = {
    "linear": aten.linear.default,
    "layer_norm": aten.layer_norm.default,
    "rms_norm": aten.rms_norm.default,
    "unbind": aten.unbind.int,
    "residual": aten.add.Tensor,
    "attention": aten.scaled_dot_product_attention.default,
}
OWN_FAMILIES = {
    "flux_small": {"cat": aten.cat.default, "split": aten.split_with_sizes.default, "stack": aten.stack.default},
    "wan_small": {"scatter": aten.slice_scatter.default, "slice": aten.slice.Tensor},
    "wan_i2v_small": {"scatter": aten.slice_scatter.default, "slice": aten.slice.Tensor},
}
SAMPLES = 12


@cache
def sharded_nodes(name: str) -> tuple[fx.Node, ...]:
    """A case's operators (none that the passes inserted) that run on shards."""
    rewritten, _ = compile_call(capture_of(name), mesh_axes(1, 3), Options())
    return tuple(
        node
        for node in rewritten.module.graph.nodes
        if isinstance(node.target, torch._ops.OpOverload)
        and node.target.namespace == "aten"
        and any(layout is not None and layout.is_sharded for layout in (*decision(node).results, *operands(node)))
    )


def operands(node: fx.Node) -> list[Layout]:
    """The layouts of a node's operands as it runs."""
    return [decision(operand).layout for operand in tensor_operands(node)]


def is_residual(node: fx.Node) -> bool:
    """Whether an addition joins two streams of tokens [B, S, C]."""
    layouts = [decision(operand).layout for operand in tensor_operands(node)]
    return len(layouts) == 2 and all(layout.is_sharded and len(layout.dims) == 3 for layout in layouts)


@cache
def sample(name: str) -> dict[str, str]:
    """For each family the operator in the middle, and others at a fixed stride: what it is -> the node's name."""
    nodes = sharded_nodes(name)
    found: dict[str, str] = {}
    for family, target in (FAMILIES | OWN_FAMILIES[name]).items():
        alike = [node for node in nodes if node.target is target and (family != "residual" or is_residual(node))]
        found[family] = alike[len(alike) // 2].name
    others = [node for node in nodes if node.name not in found.values()]
    missing = SAMPLES - len(found)
    for index, node in enumerate(others[:: len(others) // missing][:missing]):
        found[f"other {index}"] = node.name
    return found


def keys(name: str) -> list[str]:
    """The keys of a sample, without making it."""
    families = [*FAMILIES, *OWN_FAMILIES[name]]
    return [*families, *(f"other {index}" for index in range(SAMPLES - len(families)))]


@pytest.mark.parametrize("name", OWN_FAMILIES)
def test_the_sample_is_what_it_says(name: str) -> None:
    assert list(sample(name)) == keys(name)
    assert len(set(sample(name).values())) == SAMPLES


@pytest.mark.parametrize(("name", "key"), [(name, key) for name in OWN_FAMILIES for key in keys(name)])
def test_gathered_in_the_middle_is_equal(name: str, key: str) -> None:
    node = sample(name)[key]
    mesh = (1, 3) if keys(name).index(key) % 2 else (2, 2)
    report = checked(name, *mesh, gather_at=node)
    assert report.ok, str(report)
    assert report.max_error <= 1e-5
    assert report.max_grad_error <= 1e-5
    assert [(made.node, made.reason) for made in report.fallbacks] == [(node, "gathered on request")]
    assert report.bytes_sent == report.report.bytes_sent


def wrong_gradients(name: str, gather_at: str | None) -> tuple[int, int]:
    """How many gradients are wrong on some rank, and of how many; nothing is verified."""
    model, kwargs = case(name)
    options = Options(gather_at=frozenset({gather_at} if gather_at else ()))
    rewritten = rewrite(capture_of(name), mesh_axes(1, 3), options)
    tensors = [value for value in kwargs.values() if isinstance(value, torch.Tensor)]
    against = reference_of(name)
    ranks = simulate(rewritten, model, tensors, against, backward=True)
    assert all(error(rank.outputs[0], against.outputs[0]) <= 1e-5 for rank in ranks)
    wrong = 0
    for index, want in enumerate(against.gradients):
        assert want is not None
        mine = [rank.gradients[index] for rank in ranks]
        wrong += any(found is None or error(found, want) > 1e-3 for found in mine)
    return wrong, len(against.gradients)


def naive_contribution(user: fx.Node, value: fx.Node, *, outputs_whole: bool) -> Cotangent:
    """The law as the forward pass suggests it: the backward of every gather takes its slice."""
    if value.target is neutral.gather:
        return Cotangent.FULL
    return contribution(user, value, outputs_whole=outputs_whole)


@pytest.mark.parametrize(
    ("name", "module", "least"),
    [("flux_small", "single_transformer_blocks.0.attn", 0.75), ("wan_small", "blocks.0.attn1", 0.3)],
)
def test_the_naive_law_of_gradients_would_be_seen(
    name: str, module: str, least: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    attention = next(
        node.name for node in sharded_nodes(name) if node.target is FAMILIES["attention"] and module_of(node) == module
    )
    assert wrong_gradients(name, attention)[0] == 0
    monkeypatch.setattr("cpcompile.passes.cotangents.contribution", naive_contribution)
    assert wrong_gradients(name, None)[0] == 0, "where nothing is gathered in the middle the naive law holds"
    wrong, count = wrong_gradients(name, attention)
    assert least * count <= wrong
    with pytest.raises(VerificationError):
        checked.__wrapped__(name, 1, 3, gather_at=attention)  # not the result of before
