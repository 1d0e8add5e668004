"""Pointwise operators: results lie as their operands do, once these agree.

Linear ones carry a pending sum along: the rest need its final value.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.utils._pytree import tree_flatten

from cpcompile.errors import Refusal
from cpcompile.layout import Layout, Partial
from cpcompile.passes.rules.call import Answer, Call, Operand, Rule, agree, reduced, unary

aten = torch.ops.aten

_COPIES = (  # a pending sum is not rounded before it is complete
    aten.to.dtype,
    aten.to.dtype_layout,
    aten.to.device,
    aten._to_copy.default,
    aten.clone.default,
    aten.contiguous.default,
    aten.alias.default,
    aten.detach.default,
    aten.lift_fresh_copy.default,
)
_UNTAGGED = (  # pointwise all the same
    aten.__and__.Tensor,
    aten.__or__.Tensor,
    aten.__xor__.Tensor,
    aten.absolute.default,
    aten.complex.default,
    aten.conj.default,
    aten.copy.default,
    aten.divide.Tensor,
    aten.fill.Scalar,
    aten.fill.Tensor,
    aten.floor_divide.default,
    aten.floor_divide.Scalar,
    aten.hardswish.default,
    aten.imag.default,
    aten.log_sigmoid.default,
    aten.masked_fill.Tensor,
    aten.multiply.Tensor,
    aten.negative.default,
    aten.polar.default,
    aten.real.default,
    aten.resolve_conj.default,
    aten.resolve_neg.default,
    aten.rsub.Tensor,
    aten.subtract.Tensor,
    aten.where.Scalar,
    aten.where.ScalarOther,
    aten.where.ScalarSelf,
)
_SCALED = (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar, aten.neg.default)
_SUMS = (aten.add.Tensor, aten.sub.Tensor)


def pointwise(call: Call) -> Answer | Refusal:
    """Any operator whose result element depends on the operands' elements at the same (broadcast) index."""
    if torch.Tag.nondeterministic_seeded in call.target.tags:
        return Refusal("it draws random numbers")
    return _elementwise(call)


def _elementwise(call: Call) -> Answer:
    names = [name for name, value in call.arguments.items() if _is_tensor_argument(value)]
    pending = _carried_partial(call)
    flat = [operand for name in names for operand in _as_list(call[name])]
    layout, required = agree([reduced(operand) for operand in flat], call.results[0].shape)
    if pending and layout.axes & {partial.axis for partial in pending}:
        pending = ()
    taken = iter(
        Layout(need.dims, pending if operand.layout.partial == pending else ())
        for operand, need in zip(flat, required, strict=True)
    )
    operands: dict[str, Layout | Sequence[Layout]] = {
        name: next(taken) if isinstance(call[name], Operand) else [next(taken) for _ in call[name]] for name in names
    }
    return Answer(operands, tuple(Layout(layout.dims, pending) for _ in call.results))


def dropout(call: Call) -> Answer | Refusal:
    """Dropout outside training is a copy."""
    if call["train"] and call["p"] > 0:
        return Refusal("it draws random numbers")
    return _elementwise(call)


def type_as(call: Call) -> Answer | Refusal:
    """A cast to the dtype of another tensor, of which nothing else matters."""
    operand, other = call.operand("self"), call.operand("other")
    pending = operand.layout.partial if _keeps_sum(call) else ()
    layout = Layout(operand.dims, pending)
    operands = {"self": layout, "other": other.layout}
    return Answer(operands, (layout,), {"dtype": call.results[0].dtype}, aten.to.dtype)


def like(call: Call) -> Answer | Refusal:
    """Factories that take shape and dtype of a tensor: each rank makes its share.

    The dtype is written out: what a rank holds of a pending sum can be wider than the sum.
    """
    layout = call.operand("self").layout
    return unary(call, layout, layout.reduced(), dtype=call.results[0].dtype)


def new(call: Call) -> Answer | Refusal:
    """Factories that take only the dtype of a tensor: born whole on every rank."""
    result = Layout.replicated(call.results[0].shape)
    return unary(call, call.operand("self").layout, result, dtype=call.results[0].dtype)


def _carried_partial(call: Call) -> tuple[Partial, ...]:
    """The pending sums that this operator may be computed under, () where they must be complete first."""
    tensors = list(call.operands().values())
    found = [operand.layout.partial for operand in tensors if operand.layout.partial]
    if not found or any(partial.op != "sum" for partial in found[0]):
        return ()
    if call.target in _COPIES:
        return found[0] if _keeps_sum(call) else ()
    if call.target in _SCALED:
        first = tensors[0].layout.partial
        numerator_only = call.target not in (aten.div.Tensor, aten.div.Scalar) or bool(first)
        return found[0] if len(found) == 1 and numerator_only and _is_wide(call) else ()
    if call.target in _SUMS:
        same = len(found) == len(tensors) == 2 and found[0] == found[1]
        return found[0] if same and _is_wide(call) else ()
    return ()


def _keeps_sum(call: Call) -> bool:
    source, result = call.operand("self").dtype, call.results[0].dtype
    return source.is_floating_point and result.is_floating_point and result.itemsize >= source.itemsize >= 4


def _is_wide(call: Call) -> bool:
    return all(operand.dtype.itemsize >= 4 and operand.dtype.is_floating_point for operand in call.operands().values())


def _is_tensor_argument(value: object) -> bool:
    leaves = tree_flatten(value)[0] if isinstance(value, (list, tuple)) else [value]
    return any(isinstance(leaf, Operand) for leaf in leaves)


def _as_list(value: Operand | Sequence[Operand]) -> Sequence[Operand]:
    return [value] if isinstance(value, Operand) else value


RULES: dict[torch._ops.OpOverload, Rule] = {
    **dict.fromkeys((*_COPIES, *_UNTAGGED), pointwise),
    aten.dropout.default: dropout,
    aten.type_as.default: type_as,
    **dict.fromkeys(
        (aten.empty_like.default, aten.zeros_like.default, aten.ones_like.default, aten.full_like.default), like
    ),
    **dict.fromkeys(
        (aten.new_empty.default, aten.new_zeros.default, aten.new_ones.default, aten.new_full.default), new
    ),
}
