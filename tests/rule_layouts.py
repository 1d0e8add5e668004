"""Random layouts of tensors of given shapes, for the property of the rules."""

from __future__ import annotations

from collections.abc import Sequence

import hypothesis
from hypothesis import strategies as st

from cpcompile.layout import Axis, Dim, Layout, Partial, Segment, multiplied, sharded, whole
from cpcompile.sizes import divisors
from tests.strategies import Mesh

CP2, CP3, CP4 = Axis("cp", 2), Axis("cp", 3), Axis("cp", 4)
RING, ULYSSES = Axis("ring", 2), Axis("ulysses", 3)
GRID = (RING, ULYSSES)


def few(count: int) -> hypothesis.settings:
    """``count`` examples, the same in every run."""
    return hypothesis.settings(
        derandomize=True,
        deadline=None,
        max_examples=count,
        print_blob=True,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate),
    )


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    """One axis of 1 to 6 ranks, or ring and ulysses."""
    if draw(st.booleans()):
        return (Axis("cp", draw(st.sampled_from([2, 3, 4, 1, 5, 6]))),)
    ring, ulysses = draw(st.sampled_from([(2, 2), (2, 3), (3, 2), (1, 2), (3, 1)]))
    return (Axis("ring", ring), Axis("ulysses", ulysses))


@st.composite
def dims_of(draw: st.DrawFn, size: int, axes: Mesh) -> Dim:
    """A dim of ``size`` indices over ``axes``: sharded, joined, mixed, zigzag, granules or rows; whole if too short."""
    kind = draw(st.sampled_from(["plain", "plain", "mixed", "joint", "zigzag", "granule", "rows", "mixed rows"]))
    if kind in ("mixed", "joint") and size >= 2:
        at = draw(st.integers(1, size - 1))
        first = whole(at) if kind == "mixed" else sharded(at, axes)
        pieces = [first, sharded(size - at, axes)]
        return Dim.of(*(reversed(pieces) if draw(st.booleans()) else pieces))
    if kind == "zigzag" and axes and size >= 2 * axes[0].size:
        half = (size + 1) // 2
        return Dim.of(Segment(half, axes[:1]), Segment(size - half, axes[:1], descending=True))
    if kind == "granule":
        return sharded(size, axes, draw(st.sampled_from(divisors(size)))) if size else whole(0)
    if kind in ("rows", "mixed rows") and size:
        rows = draw(st.sampled_from(divisors(size)))
        row = size // rows
        inner = Dim.of(whole(row // 2), sharded(row - row // 2, axes)) if kind != "rows" else sharded(row, axes)
        found = multiplied(whole(rows), inner)
        assert found is not None
        return found
    return sharded(size, axes)


@st.composite
def layouts_of(draw: st.DrawFn, shape: Sequence[int], mesh: Mesh, *, partial: bool = False) -> Layout:
    """A layout of a tensor of ``shape``: every axis divides one dimension or none, or, if allowed, is pending."""
    count = len(shape)
    places = [*range(count), *range(count), -1] + [-2] * partial  # -1: the axis is not used
    owners = [draw(st.sampled_from(places)) for _ in mesh]
    if len(mesh) == 2 and draw(st.booleans()):
        owners[1] = owners[0]
    dims = []
    for index, size in enumerate(shape):
        axes = tuple(axis for axis, owner in zip(mesh, owners, strict=True) if owner == index)
        dims.append(draw(dims_of(size, axes)) if axes else whole(size))
    pending = [Partial(axis) for axis, owner in zip(mesh, owners, strict=True) if owner == -2 and axis.size > 1]
    return Layout(tuple(dims), tuple(pending))


def one(shape: Sequence[int], index: int, dim: Dim) -> Layout:
    """A layout in which one dimension is ``dim`` and the others are whole."""
    return Layout.replicated(shape).with_dim(index, dim)
