"""Symbolic sizes: what a capture took for granted about them, and size expressions written into a graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.printers import PythonPrinter
from torch.utils._sympy.reference import PythonReferenceAnalysis

from cpcompile.sizes import Size, as_size, subtract


@dataclass
class Sizes:
    """What a captured graph says about the sizes of its inputs.

    inputs: the (fake) inputs, whose sizes the symbols are. env: where the symbols live. known: the example call's value
    of each symbol. guards: what tracing relied on. assumed: pairs of sizes that layouts took for equal. distinct: pairs
    that could have been, but were not in the example call.
    """

    inputs: tuple[torch.Tensor, ...]
    env: ShapeEnv | None = None
    known: dict[sympy.Symbol, int] = field(default_factory=dict)
    guards: list[sympy.Basic] = field(default_factory=list)
    assumed: list[tuple[Size, Size]] = field(default_factory=list)
    distinct: list[tuple[Size, Size]] = field(default_factory=list)

    @staticmethod
    def of(inputs: Sequence[torch.Tensor], examples: Sequence[torch.Tensor]) -> Sizes:
        """Read a capture's inputs; equalities that tracing relied on are used up, a symbol each."""
        symbolic: list[Any] = [size for x in inputs for size in x.shape if isinstance(size, torch.SymInt)]
        env: ShapeEnv | None = symbolic[0].node.shape_env if symbolic else None
        sizes = Sizes(tuple(inputs), env)
        if env is None:
            return sizes
        for fake, real in zip(inputs, examples, strict=True):
            for size, value in zip(fake.shape, real.shape, strict=True):
                expr = as_size(size)
                if isinstance(expr, sympy.Symbol):
                    sizes.known[expr] = value
        sizes.guards = [guard.expr for guard in env.guards]
        for guard in sizes.guards:
            if isinstance(guard, sympy.Equality):
                sizes._unify(env.replace(guard.lhs), env.replace(guard.rhs))
        return sizes

    @property
    def are_symbolic(self) -> bool:
        """Whether any size is a symbol."""
        return self.env is not None

    def assume_equal(self, left: Size, right: Size) -> bool:
        """Take two sizes for equal from now on, if they are in the example call and one of them is a symbol.

        Every layout that was made before this is out of date where it holds the symbol.
        """
        if self._value(left) != self._value(right):
            if (left, right) not in self.distinct:
                self.distinct.append((left, right))
            return False
        if not self._unify(left, right):
            return False
        self.assumed.append((left, right))
        return True

    def _value(self, size: Size) -> int | None:
        if isinstance(size, int):
            return size
        value = as_size(size.subs(self.known))
        return value if isinstance(value, int) else None

    def _unify(self, left: Size, right: Size) -> bool:
        """Replace a symbol so that both are the same expression."""
        assert self.env is not None
        difference = subtract(as_size(left), as_size(right))
        if isinstance(difference, int):
            return difference == 0
        for symbol in sorted(difference.free_symbols, key=lambda s: (s not in self.known, str(s)), reverse=True):
            slope = difference.coeff(symbol)
            rest = difference - slope * symbol
            if slope in (1, -1) and symbol not in rest.free_symbols:
                self.env.replacements[symbol] = sympy.expand(-rest / slope)
                self.env._replacements_version_counter += 1  # what a SymInt shows is cached by it
                self.env._update_version_counter()
                return True
        return False

    def matcher(self, at_least: Sequence[tuple[Size, int]] = ()) -> Callable[[Sequence[Sequence[int]]], bool]:
        """A test of a call's shapes: whether the capture, and what layouts took for granted, hold for them.

        ``at_least`` are sizes that must not be smaller than a number. The test is one generated expression: it costs
        microseconds.
        """
        names: dict[sympy.Symbol, str] = {}
        for index, fake in enumerate(self.inputs):
            for dim, size in enumerate(fake.shape):
                raw = size.node._expr if isinstance(size, torch.SymInt) else None
                if isinstance(raw, sympy.Symbol):
                    names.setdefault(raw, f"shapes[{index}][{dim}]")
        tests: list[sympy.Basic | str] = []
        for index, fake in enumerate(self.inputs):
            for dim, size in enumerate(fake.shape):
                value = size.node.expr if isinstance(size, torch.SymInt) else size
                if isinstance(value, int) or names.get(value) != f"shapes[{index}][{dim}]":
                    tests.append(f"shapes[{index}][{dim}] == {_code(value, names)}")
        for symbol, place in names.items():
            bounds = self.env.var_to_range.get(symbol) if self.env is not None else None
            if bounds is not None:
                tests += [f"{place} >= {bounds.lower}"] if isinstance(bounds.lower, sympy.Integer) else []
                tests += [f"{place} <= {bounds.upper}"] if isinstance(bounds.upper, sympy.Integer) else []
        tests += [f"({_code(left, names)}) == ({_code(right, names)})" for left, right in self.assumed]
        tests += [f"({_code(left, names)}) != ({_code(right, names)})" for left, right in self.distinct]
        tests += [f"({_code(size, names)}) >= {least}" for size, least in at_least]
        usable = [guard for guard in self.guards if guard.free_symbols <= names.keys()]
        tests += [_code(guard, names) for guard in usable]
        source = " and ".join(f"({test})" for test in dict.fromkeys(tests)) or "True"
        matches: Callable[[Sequence[Sequence[int]]], bool] = eval(
            f"lambda shapes: {source}", {"math": __import__("math")}
        )
        return matches


def _code(value: Any, names: dict[sympy.Symbol, str]) -> str:
    """Python for an expression, over the shapes of a call."""
    if isinstance(value, int):
        return str(value)
    placeholders = {symbol: sympy.Symbol(f"shape_{index}", integer=True) for index, symbol in enumerate(names)}
    code = str(PythonPrinter().doprint(value.xreplace(placeholders)))
    for index, place in reversed(list(enumerate(names.values()))):
        code = code.replace(f"shape_{index}", place)
    return code


class SizeWriter:
    """Writes sizes into ``graph``: an int as it is, an expression as nodes, each expression once."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._symbols: dict[sympy.Symbol, fx.Proxy] = {}
        self._written: dict[sympy.Expr, Any] = {}

    def learn(self, placeholder: fx.Node, value: torch.Tensor) -> None:
        """An input of the graph, whose sizes give symbols their values. All are learnt before anything is written."""
        for dim, size in enumerate(value.shape):
            expr = size.node.expr if isinstance(size, torch.SymInt) else None
            if isinstance(expr, sympy.Symbol) and expr not in self._symbols:
                node = self._graph.call_function(torch.ops.aten.sym_size.int, (placeholder, dim))
                self._symbols[expr] = fx.Proxy(node)

    def write(self, size: Size) -> Any:
        """The size as an argument of a node."""
        if isinstance(size, int):
            return size
        if size not in self._written:
            value = sympy_interp(PythonReferenceAnalysis, self._symbols, size)
            self._written[size] = value.node if isinstance(value, fx.Proxy) else value
        return self._written[size]
