"""inline: the bodies of gradient and autocast regions take the regions' places.

In: a captured graph. Out: the same values in one flat graph, ``no_grad`` regions ending in ``detach``, and the casts
that autocast makes, around the call or in a region, as nodes. Nothing is refused: other higher-order operators stay,
and the later passes gather for them and say so.

    %r = wrap_with_set_grad_enabled(False, %body, %x)         %y  = sin(%x)
    %y = getitem(%r, 0)                                 ->    %y1 = detach(%y)
    use(%y)                                                   use(%y1)
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from cpcompile.autocast import Autocast, make_explicit
from cpcompile.graphs import emit

aten = torch.ops.aten


@dataclass(frozen=True)
class Inline:
    """The pass. autocast: what was switched on around the captured call."""

    autocast: tuple[Autocast, ...] = ()

    name: ClassVar[str] = "inline"

    def __call__(self, module: fx.GraphModule) -> None:
        """Rewrite ``module`` in place."""
        for node in list(module.graph.nodes):
            if isinstance(node.target, torch._ops.HigherOrderOperator):
                _inline(module, node, self.autocast)
            else:
                make_explicit(module.graph, node, self.autocast)


def _inline(module: fx.GraphModule, node: fx.Node, autocast: tuple[Autocast, ...]) -> None:
    """Put the body of a region in its place."""
    name = str(node.target)
    if name == "wrap_with_set_grad_enabled":
        enabled, body, *operands = node.args
        stop_gradients = not enabled
    elif name == "wrap_with_autocast":
        device_type, dtype, enabled, _cache, body, *operands = node.args
        assert isinstance(device_type, str)
        assert isinstance(dtype, torch.dtype)
        stop_gradients = False
        autocast = tuple(state for state in autocast if state.device_type != device_type)
        if enabled:
            autocast = (*autocast, Autocast(device_type, dtype))
    else:
        return  # an operator that nothing here knows: propagate gathers it and says so
    assert isinstance(body, fx.Node)
    assert isinstance(body.target, str)
    inner = module.get_submodule(body.target)
    assert isinstance(inner, fx.GraphModule)
    with module.graph.inserting_before(node):
        result = _copy_body(module, inner, operands, node, autocast)
        if stop_gradients:
            result = [_detached(module.graph, value, node) for value in result]
    for user in list(node.users):
        if user.target is operator.getitem:
            user.replace_all_uses_with(result[user.args[1]])  # type: ignore[index]
            module.graph.erase_node(user)
    if node.users:
        node.replace_all_uses_with(result[0])
    module.graph.erase_node(node)
    if not body.users:
        module.graph.erase_node(body)


def _copy_body(
    module: fx.GraphModule, inner: fx.GraphModule, operands: list[Any], at: fx.Node, autocast: tuple[Autocast, ...]
) -> list[Any]:
    """The nodes of ``inner`` copied before ``at``, regions inside it inlined in turn."""
    for node in list(inner.graph.nodes):
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            _inline(inner, node, autocast)
        else:
            make_explicit(inner.graph, node, autocast)
    values = iter(operands)
    env: dict[fx.Node, Any] = {}
    for node in inner.graph.nodes:
        if node.op == "placeholder":
            env[node] = next(values)
        elif node.op == "output":
            returned = fx.node.map_arg(node.args[0], lambda old: env[old])
            return list(returned) if isinstance(returned, (list, tuple)) else [returned]
        else:
            if node.op == "get_attr":
                _bring_attribute(module, inner, node)
            env[node] = module.graph.node_copy(node, lambda old: env[old])
            env[node].meta = dict(node.meta)
            for key in ("nn_module_stack", "stack_trace"):
                env[node].meta.setdefault(key, at.meta.get(key))
    raise AssertionError("a graph without an output")


def _bring_attribute(module: fx.GraphModule, inner: fx.GraphModule, node: fx.Node) -> None:
    assert isinstance(node.target, str)
    if not hasattr(module, node.target.split(".")[0]):
        setattr(module, node.target, getattr(inner, node.target))


def _detached(graph: fx.Graph, value: Any, at: fx.Node) -> Any:
    if isinstance(value, fx.Node) and isinstance(value.meta.get("val"), torch.Tensor):
        return emit(graph, aten.detach.default, [value], like=at)
    return value
