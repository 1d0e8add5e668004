"""Every exception of cpcompile, and the one formatter that writes their messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Problem:
    """One broken law: where it was broken, what it says, and what to do about it.

    ``where`` is the place in the user's words (``plan['blocks.0']['hidden_states']``, or a line of their code). ``law``
    says what does not hold, with the global shape, the dimension and the world size where they are known. ``remedy``
    is an instruction.
    """

    where: str
    law: str
    remedy: str


@dataclass(frozen=True)
class Refusal:
    """The answer of a rule that does not apply: a value, not an exception."""

    reason: str


def format_problems(title: str, problems: Sequence[Problem]) -> str:
    """Write problems as a numbered list under a title; every error that carries problems is worded here."""
    lines = [f"{title} ({len(problems)} problem{'' if len(problems) == 1 else 's'}):"]
    for number, problem in enumerate(problems, start=1):
        label = f"  {number}. "
        indent = " " * len(label)
        lines.append(_indented(f"{label}{problem.where}: {problem.law}", indent))
        lines.append(_indented(f"{indent}fix: {problem.remedy}", indent))
    return "\n".join(lines)


def _indented(text: str, indent: str) -> str:
    return text.replace("\n", "\n" + indent)


class CPCompileError(Exception):
    """The base of all errors that cpcompile raises on purpose."""


class ProblemsError(CPCompileError):
    """An error that carries problems, and lists all of them at once."""

    title: ClassVar[str] = "cpcompile cannot go on"
    problems: tuple[Problem, ...]

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        # Exceptions are pickled as cls(*args), so args are what __init__ takes and the message is made in __str__.
        super().__init__(self.problems)

    def __str__(self) -> str:
        return format_problems(self.title, self.problems)


class PlanError(ProblemsError):
    """The plan does not fit the model."""

    title = "the plan does not fit the model"


class MeshError(ProblemsError, ValueError):
    """The device mesh does not fit the configuration, or the processes."""

    title = "the device mesh does not fit"


class UnsupportedError(ProblemsError):
    """Something was asked for that cpcompile does not do."""

    title = "this is not supported"


class FallbackError(ProblemsError):
    """Strict mode: operators that would have been gathered and run replicated."""

    title = "strict mode allows no gathered operators"


class CaptureError(ProblemsError):
    """The model could not be captured as one graph.

    ``location`` is the place in the user's code (``file:line in function``) and ``source_line`` the code that stands
    there; both are None where tracing gave no place.
    """

    title = "the model cannot be captured as one graph"

    def __init__(
        self,
        reason: str,
        location: str | None = None,
        source_line: str | None = None,
        remedy: str = "change this code so that torch.export can trace it",
    ) -> None:
        self.reason = reason
        self.location = location
        self.source_line = source_line
        self.remedy = remedy
        law = reason if source_line is None else f"{reason}\nin: {source_line.strip()}"
        super().__init__([Problem(location or "the model's forward", law, remedy)])
        self.args = (reason, location, source_line, remedy)


class VerificationError(ProblemsError):
    """An invariant of the graph does not hold after a stage of the pipeline: a defect of cpcompile."""

    def __init__(self, stage: str, problems: Iterable[Problem]) -> None:
        self.stage = stage
        super().__init__(problems)
        self.args = (stage, self.problems)

    def __str__(self) -> str:
        return format_problems(f"the graph is not valid after {self.stage}", self.problems)


class RanksDisagreeError(ProblemsError):
    """The ranks were about to run different things: other inputs, weights or programs, or not all of them came."""

    title = "the ranks do not agree"


class SimulationError(CPCompileError):
    """A rank failed while all ranks ran in one process."""
