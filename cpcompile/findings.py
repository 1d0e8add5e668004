"""What a verification found wrong: collected node by node, raised as one error."""

from __future__ import annotations

import warnings

from torch import fx

from cpcompile.decision import module_of
from cpcompile.errors import Problem, VerificationError
from cpcompile.show import Names, operator_name

REMEDY = "report this as a bug of cpcompile, with the plan and the graph's text (cpcompile.show.text)"


class Findings:
    """The broken laws of one stage."""

    def __init__(self, stage: str) -> None:
        self.stage = stage
        self.problems: list[Problem] = []
        self._names: dict[fx.Graph, Names] = {}

    def add(self, node: fx.Node, law: str) -> None:
        """``node`` breaks ``law``."""
        module = module_of(node)
        kind = f" ({operator_name(node.target)})" if node.op == "call_function" else f" ({node.op})"
        self.problems.append(Problem(f"{self.name(node)}{kind}{f' in {module}' if module else ''}", law, REMEDY))

    def add_here(self, where: str, law: str) -> None:
        """A law that is broken by no node in particular."""
        self.problems.append(Problem(where, law, REMEDY))

    def name(self, node: fx.Node) -> str:
        """A node's name as the printed graph has it."""
        if node.graph not in self._names:
            self._names[node.graph] = Names(node.graph)
        return self._names[node.graph][node]

    def lint(self, module: fx.GraphModule) -> bool:
        """Whether fx itself takes the graph for well-formed."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                module.graph.lint()
        except Exception as error:
            self.add_here("the graph", f"lint: {str(error).partition(chr(10))[0]}")
            return False
        return True

    def raise_all(self) -> None:
        """Raise what was found, if anything."""
        if self.problems:
            raise VerificationError(self.stage, self.problems)
