"""What ``check`` found, and how it prints."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table

from cpcompile.report import FallbackReport, Report, ReshardReport, SiteReport, largest, rendered


@dataclass(frozen=True)
class Difference:
    """The first value that differs: its node, module and operator, its layout, and the error relative to its scale."""

    node: str
    module: str
    operator: str
    layout: str
    error: float


@dataclass(frozen=True)
class CheckReport:
    """All simulated ranks against the single device.

    ok: whether every rank's outputs (and gradients) are equal within ``tolerance``. max_error: the worst output of the
    worst rank, relative to that output's scale. max_grad_error: the worst parameter, relative to its own gradient's
    scale; ``worst_gradient`` names it. Left out is a gradient that rounding alone changes as much on one device (of a
    key's bias, which a softmax does not see): a note names it. collectives: how often each kind ran on a rank, forward;
    bytes_sent: bytes that left each rank, forward, counted from the collectives that ran; likewise ``backward_...``.
    """

    ok: bool
    max_error: float
    max_grad_error: float
    worst_gradient: str
    tolerance: float
    report: Report
    collectives: Counter[str]
    backward_collectives: Counter[str]
    bytes_sent: tuple[int, ...]
    backward_bytes_sent: tuple[int, ...]
    first_difference: Difference | None = None

    @property
    def sites(self) -> tuple[SiteReport, ...]:
        """Every attention call and what it became."""
        return self.report.sites

    @property
    def fallbacks(self) -> tuple[FallbackReport, ...]:
        """Operators that ran on gathered operands."""
        return self.report.fallbacks

    @property
    def inserted(self) -> tuple[ReshardReport, ...]:
        """Reshards that the plan did not ask for."""
        return self.report.inserted

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.report
        table = Table(title="against the single device", title_justify="left")
        for column in ("", "error", "collectives on a rank", "sent by a rank"):
            table.add_column(column)
        table.add_row("forward", f"{self.max_error:.2g}", _counts(self.collectives), largest(self.bytes_sent))
        if self.backward_collectives or self.worst_gradient:
            error = f"{self.max_grad_error:.2g}" + (f" ({self.worst_gradient})" if self.worst_gradient else "")
            table.add_row("backward", error, _counts(self.backward_collectives), largest(self.backward_bytes_sent))
        yield table
        if self.first_difference is not None:
            found = self.first_difference
            yield (
                f"first difference: {found.node} = {found.operator} in {found.module or '(root)'}, "
                f"layout {found.layout}, error {found.error:.2g}"
            )
        yield f"{'equal' if self.ok else 'NOT EQUAL'} (tolerance {self.tolerance:g})"

    def __str__(self) -> str:
        return rendered(self)


def _counts(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items())) or "none"
