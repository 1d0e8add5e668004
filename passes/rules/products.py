"""Products with weights, and normalisation over features: each token alone, features whole."""

from __future__ import annotations

import torch

from cpcompile.errors import Refusal
from cpcompile.layout import Layout, whole
from cpcompile.passes.rules.call import Answer, Call, Rule, local_only, reduced

aten = torch.ops.aten


def linear(call: Call) -> Answer | Refusal:
    """``x @ W.T + b``: tokens as they lie, features whole. Without a bias a pending sum passes."""
    operand = call.operand("input")
    layout = local_only(operand.layout, [len(operand.dims) - 1])
    wide = operand.dtype.itemsize >= 4
    if call["bias"] is not None or not wide or any(partial.op != "sum" for partial in layout.partial):
        layout = layout.reduced()
    features = whole(call.results[0].shape[-1])
    if len(call.operand("weight").shape) == 1:
        result = Layout(layout.dims[:-1], layout.partial)
    else:
        result = layout.with_dim(len(layout.dims) - 1, features)
    return Answer({"input": layout}, (result,))


def outer(call: Call) -> Answer | Refusal:
    """All products of two vectors: rows lie as the first, columns as the second, one of them over an axis."""
    rows, columns = reduced(call.operand("self")), reduced(call.operand("vec2"))
    if rows.layout.axes & columns.layout.axes:
        columns_layout = Layout.replicated(columns.shape)
    else:
        columns_layout = columns.layout
    result = Layout((*rows.dims, *columns_layout.dims))
    return Answer({"self": rows.layout, "vec2": columns_layout}, (result,))


def norm(call: Call) -> Answer | Refusal:
    """Layer norm and RMS norm over the last dimensions, which must be whole."""
    operand = reduced(call.operand("input"))
    count = len(operand.dims)
    layout = local_only(operand.layout, range(count - len(call["normalized_shape"]), count))
    return Answer({"input": layout}, (layout,))


RULES: dict[torch._ops.OpOverload, Rule] = {
    aten.linear.default: linear,
    aten.outer.default: outer,
    **dict.fromkeys((aten.layer_norm.default, aten.rms_norm.default), norm),
}
