"""Size expressions written into a graph as plain arithmetic on the sizes of its inputs."""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch import fx
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from cpcompile.sizes import Size


class SizeWriter:
    """Writes sizes into ``graph``: an int as it is, an expression as nodes, each expression once."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._symbols: dict[sympy.Symbol, fx.Proxy] = {}
        self._written: dict[sympy.Expr, Any] = {}
        self._last: fx.Node | None = None

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
