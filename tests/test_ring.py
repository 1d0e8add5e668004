"""The ring operator against dense attention: drawn layouts, masks, heads and dtypes; all ranks in one process."""

from __future__ import annotations

from typing import Any

import hypothesis
import torch
from hypothesis import strategies as st

from cpcompile.assemble import all_coords, shard, unshard
from cpcompile.layout import Axis, Dim, Layout, Segment, segments_of, whole
from cpcompile.ops.ring import ring_attention
from cpcompile.positions import stretches
from cpcompile.threads import run_ranks
from tests.attention_matrix import LUCK, WITHIN, Case, cases, worst
from tests.strategies import layouts_profile


def numbers(dim: Dim, axis: Axis) -> list[int]:
    """The flat form of the runs of every rank."""
    return [n for coords in all_coords((axis,)) for run in stretches(dim, coords) for n in (run.start, run.length)]


def ring(case: Case, axis: Axis, queries: Dim, keys: Dim, rotation: str) -> tuple[torch.Tensor, ...]:
    """Output and gradients, assembled from what every rank computes."""
    rows = Layout((whole(1), whole(1), queries, whole(1)))
    columns = Layout((whole(1), whole(1), keys, whole(1)))
    resident = [int(run.resident) for run in stretches(keys, {axis.name: 0})]

    def program(coords: dict[str, int], groups: dict[str, str]) -> tuple[torch.Tensor, ...]:
        q, k, v, grad = (
            shard(x, layout, coords).clone()
            for x, layout in ((case.q, rows), (case.k, columns), (case.v, columns), (case.grad, rows))
        )
        mask = case.mask
        if mask is not None and mask.shape[-2] > 1:
            mask = mask.index_select(-2, torch.tensor(queries.indices(coords), dtype=torch.int64))
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        value = k if case.shared else v
        right = 0 if case.causal else None
        group = groups.get(axis.name, "")
        out = ring_attention(
            q, k, value, mask, numbers(queries, axis), numbers(keys, axis), resident, None, right, case.scale,
            axis.size, coords[axis.name], group, rotation, True, case.shared,
        )  # fmt: skip
        if coords[axis.name]:  # of rows that all ranks hold, what they are told of the gradient adds up to it
            at = 0
            for run in stretches(queries, coords):
                assert isinstance(run.length, int)
                if run.resident:
                    grad[:, :, at : at + run.length] = 0
                at += run.length
        grads = torch.autograd.grad(out, (q, k) if case.shared else (q, k, v), grad)
        return out.detach(), *grads

    ranks: list[Any] = run_ranks((axis,), program)
    found: list[torch.Tensor] = []
    for index, layout in enumerate((rows, rows, columns, columns)[: len(ranks[0])]):
        sizes = ranks[0][index].shape
        full = Layout(tuple(dim if i == 2 else whole(sizes[i]) for i, dim in enumerate(layout.dims)))
        locals_ = {rank: values[index] for rank, values in enumerate(ranks)}
        if index and full.dims[2].axes and any(not segment.axes for segment in segments_of(full.dims[2])):
            found.append(summed(locals_, full, axis))
        elif index and full.dims[2].is_replicated:
            found.append(sum(locals_.values()))
        else:
            found.append(unshard(locals_, full, (axis,)))
    return tuple(found)


def summed(locals_: dict[int, torch.Tensor], layout: Layout, axis: Axis) -> torch.Tensor:
    """A gradient whose replicated stretches are terms of a sum and whose sharded ones are not."""
    total = torch.zeros([dim.size for dim in layout.dims], dtype=locals_[0].dtype)
    for coords in all_coords((axis,)):
        total.index_add_(2, torch.tensor(layout.dims[2].indices(coords), dtype=torch.int64), locals_[coords[axis.name]])
    return total


@st.composite
def sequences(draw: st.DrawFn, axis: Axis, *, shared: bool = True) -> Dim:
    """Segments in a row: sharded either way, two halves of a zigzag, or held by all."""
    parts: list[Segment] = []
    for kind in draw(
        st.lists(st.sampled_from(["plain", "zigzag", "all"] if shared else ["plain", "zigzag"]), min_size=1, max_size=3)
    ):
        if kind == "all":
            parts.append(Segment(draw(st.integers(1, 5))))
        elif kind == "plain":
            parts.append(Segment(draw(st.integers(0, 20)), (axis,)))
        else:
            first = draw(st.integers(axis.size, 12))
            parts += [Segment(first, (axis,)), Segment(first - draw(st.integers(0, 1)), (axis,), descending=True)]
    if not any(part.axes and part.size for part in parts) or Dim.of(*parts).size < 4:
        parts.append(Segment(draw(st.integers(max(axis.size, 4), 16)), (axis,)))
    return Dim.of(*parts)


def test_ring_is_dense_attention() -> None:
    ratios: list[float] = []

    @hypothesis.settings(layouts_profile, max_examples=250)
    @hypothesis.given(st.data())
    def draws(data: st.DataObject) -> None:
        axis = Axis("ring", data.draw(st.integers(1, 8)))
        rotation = data.draw(st.sampled_from(["allgather", "alltoall", "merge"]))
        keys = data.draw(sequences(axis))
        if rotation == "merge":
            queries = whole(data.draw(st.integers(1, 6)))
        else:
            queries = keys if data.draw(st.booleans()) else data.draw(sequences(axis))
        case = data.draw(cases(int(str(queries.size)), int(str(keys.size))))
        hypothesis.note(f"{case!r} {rotation} over {axis.size}: ({queries}) to ({keys})")
        for error, allowed in worst(ring(case, axis, queries, keys, rotation), case):
            ratios.append(error / allowed)
            assert error <= LUCK * allowed, (
                f"{case!r} {rotation} P={axis.size} ({queries}) ({keys}): {error} > {allowed}"
            )

    draws()
    within = sum(ratio <= 1 for ratio in ratios) / len(ratios)
    assert within >= WITHIN, f"{within:.1%} of {len(ratios)} errors are within what is allowed"
