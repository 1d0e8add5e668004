"""Random meshes, dims and layouts for the property tests, and helpers to look at what every rank holds."""

from __future__ import annotations

import math
from collections.abc import Sequence

import hypothesis
import torch
from hypothesis import strategies as st

from cpcompile.assemble import all_coords
from cpcompile.layout import Axis, Dim, Layout, Part, Product, Segment, multiplied, sharded, whole
from cpcompile.sizes import ceil_div

hypothesis.settings.register_profile(
    "layouts",
    derandomize=True,  # the same examples in every run
    deadline=None,
    max_examples=150,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.filter_too_much],
)
layouts_profile = hypothesis.settings.get_profile("layouts")

CP3 = Axis("cp", 3)
Mesh = tuple[Axis, ...]


@st.composite
def meshes(draw: st.DrawFn, *, most: int = 8) -> Mesh:
    """Ring outer, ulysses inner, sometimes a dp axis outside both: 1 to ``most`` ranks."""
    dp = draw(st.sampled_from([1, 1, 2])) if most >= 2 else 1
    ring = draw(st.integers(1, most // dp))
    ulysses = draw(st.integers(1, most // dp // ring))
    axes = (Axis("ring", ring), Axis("ulysses", ulysses))
    return (Axis("dp", dp), *axes) if dp > 1 else axes


@st.composite
def segments(draw: st.DrawFn, axes: Mesh, *, largest: int = 12, short: bool = True) -> Segment:
    """A run over some of ``axes``; where not ``short``, every rank holds something of it."""
    picked = tuple(axis for axis in axes if axis.size > 1 and draw(st.booleans()))
    granule = draw(st.sampled_from([1, 1, 1, 2, 3]))
    least = 0 if short else math.prod(axis.size for axis in picked)
    units = draw(st.integers(least, max(least, largest // granule)))
    return Segment(units * granule, picked, draw(st.booleans()), granule)


@st.composite
def parts(draw: st.DrawFn, axes: Mesh, *, depth: int = 2, short: bool = True) -> list[Part]:
    """One part, or the two halves of a zigzag."""
    kind = draw(st.sampled_from(["segment", "segment", "segment", "zigzag", "product"]))
    if kind == "zigzag" and axes:
        axis = draw(st.sampled_from(axes))
        size = draw(st.integers(0 if short else 2 * axis.size, 2 * axis.size + 6))
        first = ceil_div(size, 2)
        return [Segment(first, (axis,)), Segment(size - first, (axis,), descending=True)]
    if kind == "product" and depth:
        split = draw(st.integers(0, len(axes)))
        outer = draw(segments(axes[:split], largest=4, short=short))
        return [Product(outer, draw(dims(axes[split:], depth=depth - 1, short=short)))]
    return [draw(segments(axes, short=short))]


@st.composite
def dims(draw: st.DrawFn, axes: Mesh, *, depth: int = 2, short: bool = True) -> Dim:
    """A dim over some of ``axes``, nested at most ``depth`` products deep and not too long to look at."""
    found: list[Part] = []
    for _ in range(draw(st.integers(1, 3))):
        found.extend(draw(parts(axes, depth=depth, short=short)))
    dim = Dim.of(*found)
    hypothesis.assume(number(dim.size) <= 400)
    return dim


@st.composite
def layouts(draw: st.DrawFn, mesh: Mesh, *, most_dims: int = 3) -> Layout:
    """A layout that obeys the law: an axis divides one dimension at most."""
    count = draw(st.integers(1, most_dims))
    owners = [draw(st.integers(0, count)) for _ in mesh]  # the last: no dimension
    found: list[Dim] = []
    for index in range(count):
        axes = tuple(axis for axis, owner in zip(mesh, owners, strict=True) if owner == index)
        found.append(draw(dims(axes, depth=2 if index == 0 else 1)) if axes else whole(draw(st.integers(1, 4))))
    layout = Layout(tuple(found))
    hypothesis.assume(math.prod(number(size) for size in layout.shape) <= 4000)
    return layout


@st.composite
def meshes_and_dims(draw: st.DrawFn, *, short: bool = True) -> tuple[Mesh, Dim]:
    """A mesh and a dim over it."""
    mesh = draw(meshes())
    return mesh, draw(dims(mesh, short=short))


@st.composite
def meshes_and_layouts(draw: st.DrawFn) -> tuple[Mesh, Layout]:
    """A mesh and a layout over it."""
    mesh = draw(meshes())
    return mesh, draw(layouts(mesh))


@st.composite
def bricks(draw: st.DrawFn, mesh: Mesh, count: int, *, larger: int = 1) -> list[Dim]:
    """Dims that models have: sharded, whole, joined or zigzag, every axis in one of them at most."""
    owners = [draw(st.integers(0, count)) for _ in mesh]
    found: list[Dim] = []
    for index in range(count):
        axes = tuple(axis for axis, owner in zip(mesh, owners, strict=True) if owner == index)
        size = draw(st.integers(1, 9)) * larger
        kind = draw(st.sampled_from(["plain", "plain", "text", "joint", "zigzag"]))
        dim = sharded(size, axes)
        if kind == "text":
            dim = Dim.of(Segment(draw(st.integers(1, 5)) * larger), dim)
        elif kind == "joint":
            dim = Dim.of(sharded(draw(st.integers(1, 5)) * larger, axes), dim)
        elif kind == "zigzag" and axes and size >= 2 * axes[0].size:
            half = ceil_div(size, 2)
            dim = Dim.of(Segment(half, axes[:1]), Segment(size - half, axes[:1], descending=True))
        found.append(dim)
    return found


def number(size: object) -> int:
    """The size, which has to be a number here."""
    assert isinstance(size, int)
    return size


def held(dim: Dim, mesh: Sequence[Axis]) -> list[list[int]]:
    """The indices that each rank holds."""
    return [dim.indices(coords) for coords in all_coords(mesh)]


def counted(layout: Layout) -> torch.Tensor:
    """A tensor of the layout's shape, every element different."""
    shape = [number(size) for size in layout.shape]
    return torch.arange(math.prod(shape)).reshape(shape)


def product_of(outer: Dim, inner: Dim) -> Dim:
    """The row-major product, which has to exist."""
    dim = multiplied(outer, inner)
    assert dim is not None
    return dim
