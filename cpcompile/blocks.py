"""Which kernel calls a rank's queries need against some keys: pure arithmetic over positions.

Positions are global. A key at position k is visible to a query at position q when ``q - k <= left`` and
``k - q <= right`` (None: no limit), so causal attention, aligned top-left, is left None and right 0. Rows that see
nothing of the keys have no call.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

Mode: TypeAlias = Literal["all", "causal", "band"]
"""Every key is visible to every row; as the square causal mask has it; or a mask is made from the positions."""

_MIN_ROWS = 256  # of a call inside a window: below it, calls cost more than the keys that they leave out


@dataclass(frozen=True)
class Run:
    """``length`` neighbours: where they start in the sequence and in the block (of ``source``) that holds them."""

    start: int
    length: int
    local: int
    source: int = 0


@dataclass(frozen=True)
class Piece:
    """One kernel call: these rows against these runs of keys."""

    rows: Run
    keys: tuple[Run, ...]
    mode: Mode = "all"


def pieces(queries: Sequence[Run], keys: Sequence[Run], left: int | None, right: int | None) -> tuple[Piece, ...]:
    """The calls that give every visible pair exactly once. Queries and keys lie in ascending order within a run."""
    numbers = [*(n for run in (*queries, *keys) for n in (run.start, run.length, run.local)), left or 0, right or 0]
    if all(type(number) is int for number in numbers):
        return _known(tuple(queries), tuple(keys), left, right)
    return tuple(_pieces(queries, keys, left, right))


@functools.lru_cache(maxsize=4096)
def _known(queries: tuple[Run, ...], keys: tuple[Run, ...], left: int | None, right: int | None) -> tuple[Piece, ...]:
    return tuple(_pieces(queries, keys, left, right))


def _pieces(queries: Sequence[Run], keys: Sequence[Run], left: int | None, right: int | None) -> Iterator[Piece]:
    if left is None and right is None:
        if found := tuple(run for run in keys if type(run.length) is not int or run.length):  # a symbol is not asked
            yield Piece(_every(queries), found)
        return
    queries, keys = [run for run in queries if run.length], [run for run in keys if run.length]
    if not queries or not keys:
        return
    if left is None and right == 0 and _ascending(queries) and _positions(queries) == _positions(keys):
        yield Piece(_every(queries), tuple(keys), "causal")
        return
    for query in queries:
        if left is None:
            assert right is not None
            yield from _triangular(query, keys, right)
        else:
            yield from _banded(query, keys, left, right)


def _triangular(query: Run, keys: Sequence[Run], right: int) -> Iterator[Piece]:
    """Rows cut where their view of some run changes its kind: whole, none, or the square causal mask."""
    begin, end = query.start, query.start + query.length
    marks = {mark - right for key in keys for mark in (key.start, key.start + key.length)}
    cuts = [begin, *sorted(mark for mark in marks if begin < mark < end), end]
    for first, last in itertools.pairwise(cuts):
        rows = Run(first, last - first, query.local + first - begin)
        seen: list[Run] = []
        square: list[Run] = []
        for key in keys:
            if key.start + key.length <= first + right + 1:
                seen.append(key)
            elif key.start <= last - 1 + right:
                before = first + right - key.start
                seen.append(_part(key, 0, before))
                square.append(_part(key, before, last - first))
        if seen := [key for key in seen if key.length]:
            yield Piece(rows, tuple(seen))
        for key in square:
            yield Piece(rows, (key,), "causal")


def _banded(query: Run, keys: Sequence[Run], left: int, right: int | None) -> Iterator[Piece]:
    """Rows in chunks about as long as the window, each with the keys that some row of it sees."""
    step = max(left + 1, _MIN_ROWS)
    for offset in range(0, query.length, step):
        rows = Run(query.start + offset, min(step, query.length - offset), query.local + offset)
        last = rows.start + rows.length - 1
        seen: list[Run] = []
        every = True
        for key in keys:
            low = max(key.start, rows.start - left)
            high = key.start + key.length if right is None else min(key.start + key.length, last + right + 1)
            if low < high:
                seen.append(_part(key, low - key.start, high - low))
                every = every and last - low <= left and (right is None or high - 1 - rows.start <= right)
        if seen:
            yield Piece(rows, tuple(seen), "all" if every else "band")


def spans(runs: Sequence[Run]) -> list[tuple[int, int, int]]:
    """Where to find runs: (source, first, length), what is neighbours in memory as one."""
    found: list[tuple[int, int, int]] = []
    for run in runs:
        if found and found[-1][0] == run.source and found[-1][1] + found[-1][2] == run.local:
            found[-1] = (run.source, found[-1][1], found[-1][2] + run.length)
        else:
            found.append((run.source, run.local, run.length))
    return found


def sees_any(queries: Sequence[Run], keys: Sequence[Run], left: int | None, right: int | None) -> bool:
    """Whether some query sees some key."""
    if left is None and right is None:
        return True
    return bool(pieces(queries, keys, left, right))


def _every(queries: Sequence[Run]) -> Run:
    total = 0
    for run in queries:
        total = total + run.length
    return Run(queries[0].start if queries else 0, total, 0)


def _part(run: Run, offset: int, length: int) -> Run:
    return Run(run.start + offset, length, run.local + offset, run.source)


def _positions(runs: Sequence[Run]) -> list[tuple[int, int]]:
    return [(run.start, run.length) for run in runs]


def _ascending(runs: Sequence[Run]) -> bool:
    return all(a.start + a.length <= b.start for a, b in itertools.pairwise(runs))
