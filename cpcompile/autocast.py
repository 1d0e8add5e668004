"""Autocast made explicit: the casts that it makes around an operator, as nodes of their own.

A graph captured under autocast holds operators whose operands have other dtypes than they are computed in. Here each
such operator is asked, on fake tensors, which of its operands autocast converts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg
from torch.utils._python_dispatch import TorchDispatchMode

from cpcompile.graphs import emit, fake_mode_of

aten = torch.ops.aten

_DONE = "casts are explicit"


@dataclass(frozen=True)
class Autocast:
    """Autocast switched on for a kind of device, with the dtype that it computes in."""

    device_type: str
    dtype: torch.dtype


def ambient(device_types: Iterable[str]) -> tuple[Autocast, ...]:
    """What is switched on around the caller, for these kinds of device."""
    return tuple(
        Autocast(device_type, torch.get_autocast_dtype(device_type))
        for device_type in sorted(set(device_types))
        if torch.is_autocast_enabled(device_type)
    )


@contextmanager
def switched_off(states: tuple[Autocast, ...]) -> Iterator[None]:
    """Inside, none of them is on: the program that runs has its casts in it."""
    if not states:
        yield
        return
    with torch.autocast(states[0].device_type, enabled=False), switched_off(states[1:]):
        yield


def make_explicit(graph: fx.Graph, node: fx.Node, states: tuple[Autocast, ...]) -> None:
    """Put the casts that autocast makes around ``node``, or inside it, into the graph.

    Where it converts operands, the casts stand before the node. Where it converts something inside a composite
    operator (the product in an einsum), the node becomes the operators that it is made of.
    """
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload) or node.meta.get(_DONE):
        return
    node.meta[_DONE] = True  # a body is copied outwards region by region, each under its own state
    operands = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    if not states or not any(operand.meta["val"].is_floating_point() for operand in operands):
        return
    with torch.no_grad():
        values = {operand: operand.meta["val"].detach() for operand in operands}
    under = _Watch(list(values.values()))
    with _switched_on(states):
        _call(node, values, under)
    casts = {operands[index]: dtype for index, dtype in under.casts.items()}
    if _is_the_same_inside(node, values, casts, under):
        for operand, dtype in casts.items():
            with graph.inserting_before(node):
                cast = emit(graph, aten.to.dtype, [operand, dtype], like=node)
                cast.meta[_DONE] = True
            node.replace_input_with(operand, cast)
    else:
        _decompose(graph, node, values, states)


def _is_the_same_inside(
    node: fx.Node, values: dict[fx.Node, torch.Tensor], casts: dict[fx.Node, torch.dtype], under: _Watch
) -> bool:
    """Whether the operator on converted operands takes the steps that it takes under autocast."""
    if all(step[0] is not aten._to_copy.default for step in under.steps):
        return True
    with torch.no_grad(), fake_mode_of(node) or nullcontext():
        converted = {n: value.to(casts[n]) if n in casts else value for n, value in values.items()}
    if len({value.dtype for value in converted.values() if value.is_floating_point()}) > 1:
        return False  # it converts one of them inside
    plain = _Watch([])
    _call(node, converted, plain)
    return under.steps == plain.steps


class _Watch(TorchDispatchMode):
    """The steps of an operator with the dtypes that they give, and which of some tensors are converted before them."""

    def __init__(self, operands: list[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operands = operands
        self.casts: dict[int, torch.dtype] = {}
        self.steps: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is aten._to_copy.default and kwargs and kwargs.get("dtype") is not None:
            for index, operand in enumerate(self._operands):
                if args[0] is operand:
                    self.casts[index] = kwargs["dtype"]
                    return result
        results = result if isinstance(result, (list, tuple)) else (result,)
        if func.namespace == "aten":
            self.steps.append((func, *(x.dtype for x in results if isinstance(x, torch.Tensor))))
        return result


def _call(node: fx.Node, values: dict[fx.Node, torch.Tensor], watch: _Watch) -> None:
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: values.get(n, n.meta.get("val")))
    with torch.no_grad(), fake_mode_of(node) or nullcontext(), watch:
        node.target(*args, **kwargs)  # type: ignore[operator]


def _decompose(
    graph: fx.Graph, node: fx.Node, values: dict[fx.Node, torch.Tensor], states: tuple[Autocast, ...]
) -> None:
    """Put the operators that a composite one is made of, and the casts between them, in its place."""
    nodes = list(values)

    def call(*given: torch.Tensor) -> Any:
        own = dict(zip(nodes, given, strict=True))
        args, kwargs = map_arg((node.args, node.kwargs), lambda n: own.get(n, n.meta.get("val")))
        return node.target(*args, **kwargs)  # type: ignore[operator]

    with torch.no_grad(), _switched_on(states):
        body = make_fx(call, tracing_mode="fake", _allow_non_fake_inputs=True)(*values.values())
    env: dict[fx.Node, Any] = {}
    given = iter(nodes)
    with graph.inserting_before(node):
        for step in body.graph.nodes:
            if step.op == "placeholder":
                env[step] = next(given)
            elif step.op == "output":
                result = map_arg(step.args[0], lambda old: env[old])
            else:
                env[step] = graph.node_copy(step, lambda old: env[old])
                kept = {key: node.meta[key] for key in ("nn_module_stack", "stack_trace") if key in node.meta}
                env[step].meta = {"val": step.meta["val"], _DONE: True, **kept}
    if isinstance(result, fx.Node):
        node.replace_all_uses_with(result)
    else:
        for user in list(node.users):
            user.replace_all_uses_with(result[user.args[1]])
            graph.erase_node(user)
    graph.erase_node(node)


@contextmanager
def _switched_on(states: tuple[Autocast, ...]) -> Iterator[None]:
    if not states:
        yield
        return
    with (
        torch.autocast(states[0].device_type, dtype=states[0].dtype, cache_enabled=False),
        _switched_on(states[1:]),
    ):
        yield
