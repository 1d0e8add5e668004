"""Rules of lookups by index tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cpcompile.errors import Refusal
from cpcompile.layout import Dim, Layout, Partial, Segment, sharded, whole
from cpcompile.passes.rules import lookups
from tests.rule_harness import ask, check, refused
from tests.rule_layouts import CP2, CP3, GRID, RING, ULYSSES, few, layouts_of, meshes, one

aten = torch.ops.aten


def tensor(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def indices(*shape: int, below: int = 3) -> torch.Tensor:
    return torch.randint(below, shape)


CASES: list[tuple[Any, list[Any]]] = [
    (aten.embedding.default, [tensor(5, 4), indices(2, 12)]),
    (aten.embedding.default, [tensor(5, 4), indices(12), 2]),
    (aten.index_select.default, [tensor(2, 12), 1, indices(8)]),
    (aten.index_select.default, [tensor(4, 12), -2, indices(6)]),
    (aten.gather.default, [tensor(2, 12), 1, indices(2, 6)]),
    (aten.gather.default, [tensor(6, 12, 2), 0, indices(4, 12, 2)]),
    (aten.index.Tensor, [tensor(12, 4), [indices(6)]]),
    (aten.index.Tensor, [tensor(2, 12, 4), [None, indices(6)]]),
    (aten.index.Tensor, [tensor(4, 6, 12), [indices(8), indices(2, 8)]]),
    (aten.index.Tensor, [tensor(4, 12, 6), [indices(8), None, indices(8)]]),
    (aten.index.Tensor, [tensor(2, 4, 6, 12), [None, indices(6, 1), indices(4)]]),
]


def test_every_rule_has_a_case() -> None:
    assert set(lookups.RULES) == {target for target, _ in CASES}


def drawn(data: st.DataObject, args: Sequence[Any], mesh: Any) -> list[Layout]:
    tensors = [x for arg in args for x in (arg if isinstance(arg, list) else [arg]) if isinstance(x, torch.Tensor)]
    found: list[Layout] = []
    for x in tensors:
        kept = data.draw(st.sampled_from([True, False, False]))
        mine = layouts_of(x.shape, mesh, partial=x.is_floating_point())
        found.append(Layout.replicated(x.shape) if kept else data.draw(mine))
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{tuple(case[1][0].shape)}")
@given(data=st.data())
@few(40)
def test_lookups(case: tuple[Any, list[Any]], data: st.DataObject) -> None:
    target, args = case
    mesh = data.draw(meshes())
    check(target, args, drawn(data, args, mesh), mesh)


def test_results_lie_as_the_indices_do() -> None:
    mixed = Dim.of(Segment(4), sharded(8, [CP2]))
    table, tokens = Layout.replicated((5, 4)), one((2, 12), 1, mixed)
    answer = check(aten.embedding.default, (tensor(5, 4), indices(2, 12)), [table, tokens], (CP2,), free=True)
    assert answer.results == (one((2, 12, 4), 1, mixed),)
    rows = one((12,), 0, mixed)
    for target, args in [
        (aten.index_select.default, (tensor(5, 4), 0, indices(12))),
        (aten.index.Tensor, (tensor(5, 4), [indices(12)])),
    ]:
        assert check(target, args, [table, rows], (CP2,), free=True).results == (one((12, 4), 0, mixed),)
    answer = check(
        aten.gather.default, (tensor(2, 5), 1, indices(2, 12)), [Layout.replicated((2, 5)), tokens], (CP2,), free=True
    )
    assert answer.results == (tokens,)


def test_the_dimension_looked_up_in_is_gathered_alone() -> None:
    layout = Layout((sharded(6, [RING]), sharded(12, [ULYSSES])))
    answer = check(aten.index_select.default, (tensor(6, 12), 1, indices(4)), [layout, Layout.replicated((4,))], GRID)
    assert answer.results == (one((6, 4), 0, sharded(6, [RING])),)
    answer = check(aten.index.Tensor, (tensor(6, 12), [indices(4)]), [layout, Layout.replicated((4,))], GRID)
    assert answer.results == (one((4, 12), 1, sharded(12, [ULYSSES])),)


def test_an_axis_divides_one_dimension() -> None:
    layout, rows = one((6, 12), 1, sharded(12, [CP3])), one((9,), 0, sharded(9, [CP3]))
    for target, args in [
        (aten.index_select.default, (tensor(6, 12), 0, indices(9))),
        (aten.index.Tensor, (tensor(6, 12), [indices(9)])),
    ]:
        assert check(target, args, [layout, rows], (CP3,)).results == (one((9, 12), 1, sharded(12, [CP3])),)


def test_pending_sums_pass() -> None:
    pending = Layout((whole(6), whole(12)), (Partial(CP3),))
    rows = one((9,), 0, sharded(9, [CP3]))
    for target, args in [
        (aten.index_select.default, (tensor(6, 12), 0, indices(9))),
        (aten.index.Tensor, (tensor(6, 12), [indices(9)])),
    ]:
        for index in (Layout.replicated((9,)), rows):
            assert check(target, args, [pending, index], (CP3,)).results[0].partial == (Partial(CP3),)


def test_what_depends_on_values_or_on_all_ranks_is_refused() -> None:
    layout = one((12, 4), 0, sharded(12, [CP3]))
    mask = torch.arange(12) % 2 == 0
    assert "mask" in refused(aten.index.Tensor, (tensor(12, 4), [mask]), [layout, Layout.replicated((12,))])
    args = (tensor(5, 4), indices(12), -1, True)
    table = Layout.replicated((5, 4))
    assert "all ranks" in refused(aten.embedding.default, args, [table, one((12,), 0, sharded(12, [CP3]))])
    few_rows = (tensor(12, 4), 1, indices(6, 4))
    assert "fewer" in refused(aten.gather.default, few_rows, [layout, Layout.replicated((6, 4))])
    assert isinstance(
        ask(aten.index_select.default, (tensor(), 0, indices(1, below=1)), [Layout(()), table_of_one()]), Refusal
    )


def table_of_one() -> Layout:
    return Layout.replicated((1,))
