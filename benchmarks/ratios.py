"""Times set against each other round by round, because a machine's speed drifts between rounds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median, quantiles

from benchmarks.race import Result

OURS = "cpcompile"


def milliseconds(result: Result) -> float:
    """The median over the rounds."""
    return 1e3 * median(result.seconds)


def ratios(result: Result, reference: Result) -> list[float]:
    """A time against another's in the same round, for each round."""
    return [mine / other for mine, other in zip(result.seconds, reference.seconds, strict=True)]


def ratio(result: Result, reference: Result) -> float:
    """The median over the rounds."""
    return median(ratios(result, reference))


def to_ideal(result: Result, results: Sequence[Result]) -> float:
    """Against dense attention's time divided by the ranks."""
    return result.ranks * ratio(result, _dense(results))


def fastest_peer(results: Sequence[Result], kind: str | None = None) -> Result | None:
    """The fastest of those that are right, of one kind or of all."""
    peers = [
        result
        for result in results
        if result.family not in (OURS, "dense") and result.status == "right" and kind in (None, result.kind)
    ]
    return min(peers, key=milliseconds, default=None)


def verdicts(results: Sequence[Result]) -> Iterator[str]:
    """For each of ours, a line that sets it against the ideal, the fastest peer and the fastest of its kind."""
    fastest = fastest_peer(results)
    for result in results:
        if result.family != OURS or not result.seconds:
            continue
        parts = [f"{_spread(result, _dense(results), result.ranks)} x dense/{result.ranks}"]
        if fastest is not None:
            parts.append(f"{_spread(result, fastest)} x the fastest peer ({fastest.contestant})")
        alike = fastest_peer(results, result.kind)
        if alike is not None and alike is not fastest:
            parts.append(f"{_spread(result, alike)} x the fastest {result.kind} ({alike.contestant})")
        yield f"{result.contestant}: " + ", ".join(parts)


def _dense(results: Sequence[Result]) -> Result:
    return next(result for result in results if result.family == "dense")


def _spread(result: Result, reference: Result, times: int = 1) -> str:
    """The median of the ratios, and the middle half of them."""
    low, middle, high = (times * ratio for ratio in quantiles(ratios(result, reference), method="inclusive"))
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"
