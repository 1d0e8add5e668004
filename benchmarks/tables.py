"""Results as tables: on the terminal, as markdown, as CSV."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.race import Result
from benchmarks.ratios import fastest_peer, milliseconds, ratio, to_ideal, verdicts

_COLUMNS = ("attention", "ms", "x ideal", "x fastest peer", "error", "collectives", "MB sent", "note")

LEGEND = (
    "ms: median over the rounds of the slowest rank's time. x ideal: median over the rounds of its ratio to dense/P, "
    "in the same round. x fastest peer: likewise. error: the largest on any rank, relative to the largest number of "
    "dense attention's own result (out, dq, dk, dv). collectives, MB sent: what leaves the first rank, forward + "
    "backward; a send counts as a collective. In the lines below a table, the middle half of the ratios is in brackets."
)


def title(results: Sequence[Result]) -> str:
    """What one table is about."""
    first = results[0]
    timed = next((len(result.seconds) for result in results if result.seconds), 0)
    mask = "causal" if first.causal else "no mask"
    what = "forward and backward" if first.backward else "forward"
    return f"S={first.tokens}, P={first.ranks}, {mask}, {what}, {timed} rounds"


def rows(results: Sequence[Result]) -> list[tuple[str, ...]]:
    """The cells of one table."""
    fastest = fastest_peer(results)
    found: list[tuple[str, ...]] = []
    for result in results:
        if not result.seconds:
            note = result.status if result.status == "not installed" else f"cannot: {result.note}"
            found.append((result.contestant, *("-",) * 6, note))
            continue
        calls = [sum(counts.values()) for counts in result.calls]
        sent = [f"{count / 1e6:.2f}" for count in result.sent]
        parts = 2 if result.backward else 1
        found.append(
            (
                result.contestant,
                f"{milliseconds(result):.1f}",
                f"{to_ideal(result, results):.3f}",
                "-" if fastest is None else f"{ratio(result, fastest):.3f}",
                f"{result.error:.0e}",
                " + ".join(map(str, calls[:parts])),
                " + ".join(sent[:parts]),
                result.note if result.status == "right" else f"WRONG: {result.note}",
            )
        )
    return found


def show(console: Console, results: Sequence[Result]) -> None:
    """Print one table and its verdicts."""
    table = Table(title=title(results), title_justify="left")
    for index, column in enumerate(_COLUMNS):
        table.add_column(column, justify="left" if index in (0, len(_COLUMNS) - 1) else "right", no_wrap=index == 0)
    for cells, result in zip(rows(results), results, strict=True):
        table.add_row(*cells, style={"right": None, "wrong": "red"}.get(result.status, "dim"))
    console.print(table)
    for line in verdicts(results):
        console.print(line)
    console.print()


def markdown(tables: Sequence[Sequence[Result]], about: str) -> str:
    """All tables and verdicts as one document."""
    lines = ["# Attention over several ranks", "", about, "", LEGEND, ""]
    for results in tables:
        lines += [f"## {title(results)}", "", _line(_COLUMNS), _line(["---"] * len(_COLUMNS))]
        lines += [*map(_line, rows(results)), "", *(f"- {line}" for line in verdicts(results)), ""]
    return "\n".join(lines)


def write(folder: Path, tables: Sequence[Sequence[Result]], about: str) -> None:
    """The tables as markdown, and every number as CSV."""
    (folder / "attention.md").write_text(markdown(tables, about))
    with (folder / "attention.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(field.name for field in fields(Result))
        for results in tables:
            for result in results:
                values = [getattr(result, field.name) for field in fields(Result)]
                writer.writerow(json.dumps(v) if isinstance(v, (list, tuple, dict)) else v for v in values)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
