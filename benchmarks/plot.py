"""Results as a picture: each kind of attention against the ideal, over the length of the sequence."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path

from benchmarks.race import Result
from benchmarks.ratios import OURS, to_ideal


def draw(file: Path, tables: Sequence[Sequence[Result]]) -> bool:
    """Write the picture; False where matplotlib is not installed."""
    try:
        matplotlib = importlib.import_module("matplotlib")
        matplotlib.use("Agg")
        pyplot = importlib.import_module("matplotlib.pyplot")
    except ModuleNotFoundError:
        return False
    panels = list(dict.fromkeys((results[0].causal, results[0].backward) for results in tables))
    figure, axes = pyplot.subplots(1, len(panels), figsize=(7 * len(panels), 5), squeeze=False, layout="constrained")
    for (causal, backward), axis in zip(panels, axes[0], strict=True):
        mine = [results for results in tables if (results[0].causal, results[0].backward) == (causal, backward)]
        names = dict.fromkeys(result.contestant for results in mine for result in results if result.seconds)
        for index, name in enumerate(names):
            points = [
                (result.tokens, to_ideal(result, results), result)
                for results in mine
                for result in results
                if result.contestant == name and result.seconds and result.family != "dense"
            ]
            if not points:
                continue
            is_ours, is_wrong = points[0][2].family == OURS, any(point[2].status == "wrong" for point in points)
            axis.plot(
                [point[0] for point in points],
                [point[1] for point in points],
                label=f"{name} (WRONG)" if is_wrong else name,
                color=f"C{index % 10}",
                marker="o" if points[0][2].kind == "ring" else "s",
                linewidth=2.5 if is_ours else 1.0,
                linestyle="-" if is_ours else "--",
            )
        axis.axhline(1.0, color="black", linewidth=0.8)
        axis.set_xscale("log", base=2)
        axis.set_xticks(lengths := sorted({results[0].tokens for results in mine}), [str(length) for length in lengths])
        axis.set_xlabel("tokens")
        axis.set_ylabel(f"time / (dense on one process / {mine[0][0].ranks})")
        axis.set_title(("causal, " if causal else "") + ("forward and backward" if backward else "forward"))
        axis.legend(fontsize="small")
    figure.savefig(file, dpi=150)
    pyplot.close(figure)
    return True
