"""analyse: read a first propagation, and say what the next one should be told.

In: a graph with decisions. Out: ``Advice``, and the graph as it was: of how many indices shards should be multiples, so
that a view into rows (windows, merged patches) cuts no row, which symbolic sizes meet, and which splits would give
ranks unequal work in causal attention. Nothing is refused.

    %m = mark(%x, 0)                     # (2) (18 cp) (8): 9 and 9
    %w = view(%m, [2, 6, 3, 8])          # refused: rows of 3             advice: shards of 18 are multiples of 3
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import fx

from cpcompile.decision import decision, layout_of, shape_of, tensor_operands
from cpcompile.errors import Refusal
from cpcompile.layout import Layout, Segment, sharded
from cpcompile.ops.markers import mark
from cpcompile.orders import plain_rows
from cpcompile.reshape import first_unequal, reshape
from cpcompile.sizes import Size

aten = torch.ops.aten

_VIEWS = (
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.flatten.using_ints,
    aten.unflatten.int,
)
_MAX_GRANULE = 1024


@dataclass(frozen=True)
class Advice:
    """granules: for dimensions of a size, of how many indices shards should be multiples. unequal: the first two sizes
    of sharded segments that meet and are not known to be equal. zigzag: the sizes whose splits had better be in that
    order. conflicts: how many operators run gathered, and how many operands outside attention change their sharding."""

    granules: Mapping[Size, Size] = field(default_factory=dict)
    unequal: tuple[Size, Size] | None = None
    zigzag: frozenset[Size] = frozenset()
    conflicts: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Analyse:
    """The pass; it has no options."""

    name: ClassVar[str] = "analyse"

    def __call__(self, module: fx.GraphModule) -> Advice:
        """Read the decisions of ``module``."""
        granules: dict[Size, Size] = {}
        for node in module.graph.nodes:
            if node.op == "call_function" and node.target in _VIEWS and decision(node).fallback is not None:
                for size, granule in _granules(layout_of(tensor_operands(node)[0]), shape_of(node.meta["val"])):
                    granules.setdefault(size, granule)
        return Advice(granules, _unequal(module), _uneven_work(module), _conflicts(module))


def _granules(layout: Layout, shape: tuple[Size, ...]) -> Iterator[tuple[Size, Size]]:
    """For the one sharded dimension of a view that was refused, the smallest coarser granule under which it is not."""
    for index, dim in enumerate(layout.dims):
        (part, *more) = dim.parts
        if more or not isinstance(part, Segment) or part.is_replicated or not isinstance(part.size, int):
            continue
        if not isinstance(part.granule, int):
            continue
        for granule in range(2 * part.granule, min(part.size, _MAX_GRANULE) + 1, part.granule):
            if part.size % granule == 0:
                coarse = layout.with_dim(index, sharded(part.size, part.axes, granule))
                if coarse.is_sharded and not isinstance(reshape(coarse, shape), Refusal):
                    yield part.size, granule
                    break


def _uneven_work(module: fx.GraphModule) -> frozenset[Size]:
    """The sizes of splits that reach a site in plain order, where zigzag would do better."""
    found = {size for node in module.graph.nodes if (site := decision(node).site) for size in plain_rows(site)}
    if not found:
        return frozenset()
    marked = [decision(node).layout for node in module.graph.nodes if node.target is mark]
    return frozenset(dim.size for layout in marked for dim in layout.dims if dim.axes and dim.size in found)


def _conflicts(module: fx.GraphModule) -> tuple[int, int]:
    fallbacks = changes = 0
    for node in module.graph.nodes:
        made = decision(node)
        if made.fallback is not None:
            fallbacks += 1
        elif made.site is None and node.op != "output" and node.target is not mark:
            for operand, needed in zip(tensor_operands(node), made.operands, strict=True):
                own = layout_of(operand)
                changes += own.is_sharded and own != needed
    return fallbacks, changes


def _unequal(module: fx.GraphModule) -> tuple[Size, Size] | None:
    for node in module.graph.nodes:
        if node.op == "output" or decision(node).fallback is not None:
            continue
        for operand, needed in zip(tensor_operands(node), decision(node).operands, strict=True):
            for own, wanted in zip(layout_of(operand).dims, needed.dims, strict=True):
                if own != wanted and not own.is_replicated and not wanted.is_replicated:
                    pair = first_unequal(own, wanted)
                    if pair is not None:
                        return pair
    return None
