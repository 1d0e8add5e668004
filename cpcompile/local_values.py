"""Lowered graphs run without a process group: whole ones on shapes alone, pieces of them on index tensors.

On shapes, a value is a ``Spec``. Equal calls are computed once: of many equal blocks, one is run.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.node import map_arg

from cpcompile.costs import numbered
from cpcompile.decision import Decision, tensor_results
from cpcompile.layout import Coords, Layout
from cpcompile.ops import collectives
from cpcompile.ops.ring import ring_attention
from cpcompile.sizes import Size, as_size

aten = torch.ops.aten


@dataclass(frozen=True)
class Spec:
    """A tensor but for its numbers."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(tensor: torch.Tensor) -> Spec:
        """The spec of a tensor without symbolic sizes."""
        return Spec(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.device)

    @staticmethod
    def dense(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Spec:
        """The spec of a contiguous tensor."""
        counts = itertools.accumulate((max(size, 1) for size in reversed(shape[1:])), operator.mul, initial=1)
        return Spec(shape, tuple(reversed(list(counts)))[-len(shape) :] if shape else (), dtype, device)

    def empty(self) -> torch.Tensor:
        """A tensor of this spec (fake under a fake mode)."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


@dataclass(frozen=True)
class _Items:
    kind: type
    items: tuple[Any, ...]


@dataclass(frozen=True)
class _Literal:
    kind: type  # 1, 1.0 and True are equal, and not the same argument
    value: Any


@dataclass
class LocalValues:
    """What every node of a rank's graph gives: specs, and numbers for sizes. failures: nodes that cannot run.

    hints: the values that the capture saw for the symbols of its inputs' sizes.
    """

    values: dict[fx.Node, Any] = field(default_factory=dict)
    failures: dict[fx.Node, str] = field(default_factory=dict)
    hints: dict[sympy.Symbol, int] = field(default_factory=dict)

    def number(self, size: Size) -> int:
        """A size as a number."""
        return size if isinstance(size, int) else int(size.subs(self.hints))

    def shape(self, layout: Layout, coords: Coords) -> tuple[int, ...]:
        """Local shape as numbers."""
        return tuple(self.number(size) for size in layout.local_shape(coords))

    def numbered(self, layout: Layout) -> Layout:
        """The layout with numbers for symbols, part for part as it is, and with nothing pending."""
        return numbered(layout, self.hints)

    def argument(self, argument: Any) -> Any:
        """An argument of a node with numbers in place of nodes that give sizes."""
        return map_arg(argument, lambda node: self.values[node])


def run_on_shapes(module: fx.GraphModule, coords: Coords) -> LocalValues:
    """Run a lowered graph on shapes. A node that gives what its origin's layout does not promise, or that cannot run,
    is a failure; what follows takes the promised shape for granted, so that only the culprits are named."""
    found = LocalValues()
    for node in module.graph.nodes:
        value = node.meta["origin"].meta.get("val") if "origin" in node.meta else None
        if node.op == "placeholder" and isinstance(value, torch.Tensor):
            for size in value.shape:
                if isinstance(size, torch.SymInt) and isinstance(size.node.expr, sympy.Symbol):
                    found.hints[size.node.expr] = int(size.node.hint)
    for node in module.graph.nodes:
        if node.op == "output":
            continue
        promised = _promised(node, coords, found)
        try:
            value = _run(module, node, found)
        except _Unknown:
            value = None
        except Exception as error:
            reason = str(error).strip().splitlines()
            found.failures[node] = (
                f"it cannot run on this rank's sizes: {reason[0] if reason else type(error).__name__}"
            )
            value = None
        if promised is not None and value is not None:
            law = _difference(value, promised)
            if law:
                found.failures[node] = law
                value = None
        found.values[node] = promised if value is None else value
    return found


def run_piece(end: fx.Node, start: fx.Node, value: torch.Tensor, local: LocalValues) -> torch.Tensor | str:
    """What ``end`` is when ``start`` is ``value``, where only slices, cats and reshapes lie between; else what does."""
    known: dict[fx.Node, torch.Tensor] = {start: value}

    def run(node: fx.Node) -> torch.Tensor:
        if node not in known:
            if node.target not in (aten.slice.Tensor, aten.cat.default, aten.reshape.default):
                raise _Unknown(f"%{node.name}")
            args = map_arg(
                node.args, lambda arg: run(arg) if isinstance(local.values[arg], Spec) else local.values[arg]
            )
            known[node] = node.target(*args)
        return known[node]

    try:
        return run(end)
    except _Unknown as error:
        return str(error)


class _Unknown(Exception):
    """A value that is not known: an operand's failure has been reported, or nothing here can run the operator."""


def _promised(node: fx.Node, coords: Coords, local: LocalValues) -> Any:
    """What the origin's layout says: a spec for each result, None where there is nothing to say."""
    origin = node.meta.get("origin")
    made = origin.meta.get("cp") if isinstance(origin, fx.Node) else None
    if not isinstance(origin, fx.Node) or not isinstance(made, Decision) or not any(made.results):
        return None
    specs = tuple(
        None if layout is None or value is None else Spec.dense(local.shape(layout, coords), value.dtype, value.device)
        for layout, value in zip(made.results, tensor_results(origin), strict=True)
    )
    return list(specs) if isinstance(origin.meta["val"], (list, tuple)) else specs[0]


def _difference(value: Any, promised: Any) -> str | None:
    pairs = zip(value, promised, strict=False) if isinstance(promised, list) else [(value, promised)]
    if isinstance(promised, list) and len(value) != len(promised):
        return f"it gives {len(value)} results, its layouts are {len(promised)}"
    for got, wanted in pairs:
        if wanted is not None and (not isinstance(got, Spec) or got.shape != wanted.shape):
            shape = got.shape if isinstance(got, Spec) else got
            return f"its local shape is {shape}, its layout promises {wanted.shape}"
    return None


def _run(module: fx.GraphModule, node: fx.Node, local: LocalValues) -> Any:
    if node.op == "placeholder":
        value = node.meta["origin"].meta.get("val") if "origin" in node.meta else None
        if not isinstance(value, torch.Tensor):
            raise _Unknown
        shape, stride = (tuple(local.number(as_size(n)) for n in sizes) for sizes in (value.shape, value.stride()))
        return Spec(shape, stride, value.dtype, value.device)
    if node.op == "get_attr":
        assert isinstance(node.target, str)
        value = operator.attrgetter(node.target)(module)
        return Spec.of(value) if isinstance(value, torch.Tensor) else value
    args, kwargs = local.argument((tuple(node.args), dict(node.kwargs)))
    if isinstance(node.target, HigherOrderOperator) or any(local.values[n] is None for n in node.all_input_nodes):
        raise _Unknown
    handler = _HANDLERS.get(node.target)
    if handler is not None:
        return handler(*args, **kwargs)
    if not isinstance(node.target, torch._ops.OpOverload):  # arithmetic on sizes, items of lists
        assert callable(node.target)
        if any(isinstance(value, Spec) for value in (*args, *kwargs.values())):
            raise _Unknown  # a function of tensors that is no operator
        return node.target(*args, **kwargs)
    if node.target is aten.sym_size.int:
        return args[0].shape[args[1]]
    return _call(node.target, _frozen(args), _frozen(kwargs))


@functools.lru_cache(maxsize=16384)
def _call(target: Any, args: Any, kwargs: Any) -> Any:
    with FakeTensorMode(), torch.no_grad():
        return _plain(_frozen(target(*_thawed(args), **_thawed(kwargs))))


def _frozen(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return Spec.of(value)
    if isinstance(value, Spec):
        return value
    if isinstance(value, (list, tuple)):
        return _Items(list if isinstance(value, list) else tuple, tuple(_frozen(item) for item in value))
    if isinstance(value, dict):
        return _Items(dict, tuple((name, _frozen(item)) for name, item in value.items()))
    return _Literal(type(value), value)


def _thawed(value: Any) -> Any:
    if isinstance(value, Spec):
        return value.empty()
    if isinstance(value, _Literal):
        return value.value
    if value.kind is dict:
        return {name: _thawed(item) for name, item in value.items}
    return value.kind(_thawed(item) for item in value.items)


def _plain(value: Any) -> Any:
    if isinstance(value, _Items):
        return [_plain(item) for item in value.items]
    return value.value if isinstance(value, _Literal) else value


def _exchange(tensors: list[Spec], shapes: list[int], *_rest: Any) -> list[Spec]:
    found: list[Spec] = []
    for tensor in tensors:
        at = sum(len(spec.shape) for spec in found)
        found.append(Spec.dense(tuple(shapes[at : at + len(tensor.shape)]), tensor.dtype, tensor.device))
    return found


def _all_reduce(x: Spec, _group: str, _full: bool, dtype: torch.dtype) -> Spec:
    return Spec.dense(x.shape, dtype, x.device)


def _ring_attention(q: Spec, k: Spec, v: Spec, *_rest: Any) -> Spec:
    lead = tuple(max(sizes) for sizes in zip(q.shape[:-2], k.shape[:-2], v.shape[:-2], strict=True))
    return Spec.dense((*lead, q.shape[-2], v.shape[-1]), q.dtype, q.device)


_HANDLERS: Mapping[Any, Callable[..., Any]] = {
    collectives.exchange_blocks: _exchange,
    collectives.all_reduce: _all_reduce,
    collectives.enter_sum: lambda tensors, *_rest: list(tensors),
    ring_attention: _ring_attention,
    collectives.pend_on_one: lambda x, _keep: x,
}
