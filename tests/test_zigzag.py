"""Causal attention over a ring takes tokens in zigzag: equal work for all ranks, without being asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from cpcompile.assemble import all_coords
from cpcompile.compiled import captured_call, compile_call, plan_of
from cpcompile.decision import decision
from cpcompile.layout import Axis, Dim, sharded
from cpcompile.orders import zigzag
from cpcompile.pipeline import Options, rewrite, shortest_sizes
from cpcompile.simulate import check_captured
from cpcompile.site import Site
from tests.small_models import SPLIT, Input, Tower, kinds, rand, sharp
from tests.test_sites import checked

RING, ULYSSES = Axis("ring", 3), Axis("ulysses", 2)


def sites_of(model: nn.Module, plan: dict[str, Any], *args: Any, axes: tuple[Axis, ...]) -> list[Site]:
    model = sharp(model)
    graph = rewrite(captured_call(model, plan_of(model, plan), args, {}), axes, Options()).module.graph
    return [site for node in graph.nodes if (site := decision(node).site)]


def pairs(rows: Dim, axes: Sequence[Axis]) -> list[int]:
    """How many (query, key) pairs each rank computes where row i sees keys 0..i."""
    return [sum(row + 1 for row in rows.indices(coords)) for coords in all_coords(axes)]


@given(size=st.integers(1, 400), ranks=st.integers(1, 8), granule=st.integers(1, 4))
def test_ranks_have_equal_work_to_within_a_block(size: int, ranks: int, granule: int) -> None:
    size *= granule
    axes = (Axis("ring", ranks),)
    dim = zigzag(size, axes, granule)
    assert dim.size == size
    if ranks == 1 or size // granule < 2 * ranks:
        assert dim == sharded(size, axes, granule)
        return
    work = pairs(dim, axes)
    if size % (2 * ranks * granule) == 0:
        assert len(set(work)) == 1
    # Parts of a half differ by one granule of rows. A row of the first half sees half of the keys at most.
    assert max(work) - min(work) <= granule * (size // 2 + size)


@pytest.mark.parametrize("axes", [(RING,), (RING, ULYSSES), (Axis("ring", 8),)], ids=str)
def test_each_rank_has_a_head_and_a_tail(axes: tuple[Axis, ...]) -> None:
    size = 96
    (site,) = sites_of(Tower(causal=True, depth=1), SPLIT, rand(1, size, 16), axes=axes)
    rows = site.query.dims[-2]
    ring = axes[:1]
    assert rows == Dim.of(sharded(size // 2, ring), sharded(size // 2, ring, descending=True))
    assert len(set(pairs(rows, axes))) == 1


def test_two_axes_of_a_ring_are_evened_out_together() -> None:
    axes = (RING, ULYSSES)
    (site,) = sites_of(Tower(16, 1, causal=True, depth=1), SPLIT, rand(1, 48, 16), axes=axes)
    assert site.kind == "ring"
    assert len(set(pairs(site.query.dims[-2], axes))) == 1


@pytest.mark.parametrize("rotation", ["allgather", "alltoall"])
@pytest.mark.parametrize("size", [12, 13, 17])
@pytest.mark.parametrize("axes", [(RING,), (RING, ULYSSES), (Axis("ring", 2), Axis("ulysses", 3))], ids=str)
def test_numbers_are_those_of_one_device(size: int, axes: tuple[Axis, ...], rotation: str) -> None:
    report = checked(Tower(causal=True), SPLIT, rand(2, size, 16, grad=True), axes=axes, rotation=rotation)
    assert kinds(report) == ["unified" if len(axes) > 1 else "ring"] * 2
    assert all("-" in site.query for site in report.report.sites)
    assert {reshard.why for reshard in report.report.inserted} == {"output"}, "nothing else changes hands"


@pytest.mark.parametrize("size", [3, 4, 5, 6, 7])
def test_a_sequence_too_short_for_two_parts_stays_in_order(size: int) -> None:
    report = checked(Tower(causal=True, depth=1), SPLIT, rand(2, size, 16, grad=True), axes=(RING,))
    assert all(("-" in site.query) == (size >= 6) for site in report.report.sites)


def test_without_causal_rows_the_order_is_plain() -> None:
    for site in sites_of(Tower(depth=2), SPLIT, rand(1, 48, 16), axes=(RING,)):
        assert site.query.dims[-2] == sharded(48, (RING,))


def test_ulysses_has_whole_rows_and_no_use_for_it() -> None:
    (site,) = sites_of(Tower(causal=True, depth=1), SPLIT, rand(1, 48, 16), axes=(ULYSSES,))
    assert site.query.dims[-2].is_replicated
    report = checked(Tower(causal=True, depth=1), SPLIT, rand(1, 48, 16), axes=(ULYSSES,))
    assert "-" not in report.report.sites[0].query


class Windows(nn.Module):
    """Tokens in rows of six around causal attention: half a row is no shard that a view could give."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.row = Tower(causal=True, depth=1), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.tower(x).unflatten(1, (-1, 6))
        return self.row(rows.transpose(2, 3)).transpose(2, 3).flatten(1, 2)


def test_an_order_that_other_operators_cannot_take_is_given_up() -> None:
    for size, turned in ((12, False), (24, True)):
        report = checked(Windows(), SPLIT, rand(2, size, 16, grad=True), axes=(Axis("ring", 2),))
        assert ("-" in report.report.sites[0].query) == turned


class Streams(nn.Module):
    """Two inputs that meet in one causal attention, and rotary tables that are split like the first."""

    def forward(self, x: torch.Tensor, table: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
        tokens = torch.cat([x * table, more], 1).unflatten(-1, (2, 4)).transpose(1, 2)
        return F.scaled_dot_product_attention(tokens, tokens * 2, tokens, is_causal=True).transpose(1, 2).flatten(2)


def test_all_splits_that_meet_are_in_one_order() -> None:
    plan = {"": {"x": Input(1), "table": Input(0), "more": Input(1)}}
    args = rand(2, 12, 8, grad=True), rand(12, 8, seed=1), rand(2, 18, 8, seed=2, grad=True)
    report = checked(Streams(), plan, *args, axes=(RING,))
    assert report.report.sites[0].query.count("-") == 2
    (site,) = sites_of(Streams(), plan, *args, axes=(RING,))
    assert len(set(pairs(site.query.dims[-2], (RING,)))) == 1


class Joint(nn.Module):
    def forward(self, text: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        heads = torch.cat([text, x], 1).unflatten(-1, (2, 4)).transpose(1, 2)
        out = F.scaled_dot_product_attention(heads, heads * 2, heads, is_causal=True)
        return out.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("rotation", ["allgather", "alltoall"])
def test_text_of_every_rank_is_shared_out_in_the_same_order(rotation: str) -> None:
    args = rand(2, 6, 8, grad=True), rand(2, 13, 8, seed=1, grad=True)
    report = checked(Joint(), {"": {"x": Input(1)}}, *args, axes=(RING,), rotation=rotation)
    assert kinds(report) == ["ring"]
    (site,) = sites_of(Joint(), {"": {"x": Input(1)}}, args[0], rand(2, 18, 8), axes=(RING,))
    assert len(set(pairs(site.query.dims[-2], (RING,)))) == 1


def test_one_program_in_zigzag_serves_every_length() -> None:
    model = sharp(Tower(causal=True))
    captured = captured_call(model, plan_of(model, SPLIT), (rand(2, 24, 16, grad=True),), {}, dynamic=True)
    rewritten, _ = compile_call(captured, (RING,), Options(verify=True))
    serves = captured.sizes.matcher(shortest_sizes(rewritten))
    for size in (24, 25, 6, 31, 47):
        args = (rand(2, size, 16, grad=True),)
        report = check_captured(model, captured, (RING,), args, {}, Options(), backward=True, tolerance=1e-10)
        assert report.ok, str(report)
        assert all("-" in site.query for site in report.report.sites)
        assert serves([args[0].shape])
    assert not serves([(2, 5, 16)]), "its second half has fewer tokens than ranks"
