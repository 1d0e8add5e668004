"""Masks are read back as bands of positions: what is read is what the operators make, and what cannot be read stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from cpcompile.capture import Captured
from cpcompile.compiled import captured_call, plan_of
from cpcompile.layout import Axis
from cpcompile.ops.banded import band_mask, banded_attention
from cpcompile.pipeline import Options, rewrite
from cpcompile.predicates import Affine, Atom, Band, Condition, split_band
from tests.small_models import SPLIT, padding, rand, sharp
from tests.test_sites import checked

INF, LOWEST = float("inf"), torch.finfo(torch.float64).min
CAUSAL = Band(None, 0)
HEADS, HEAD_DIM = 4, 4

MakeMask = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def at(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions of queries (a column) and of keys (a row)."""
    positions = torch.arange(x.shape[1], device=x.device)
    return positions[:, None], positions[None, :]


def causal(x: torch.Tensor) -> torch.Tensor:
    q, k = at(x)
    return k <= q


def square(x: torch.Tensor, fill: float, dtype: Any = torch.float64) -> torch.Tensor:
    return torch.full((x.shape[1], x.shape[1]), fill, dtype=dtype, device=x.device)


def by_lookup(x: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """As a function of (batch, query, key) is evaluated for all of them."""
    positions = torch.arange(x.shape[1])
    b, q, k = torch.arange(x.shape[0])[:, None, None, None], positions[:, None], positions
    ids = torch.arange(3, x.shape[1] + 3)[None].expand(x.shape[0], -1)
    return (ids[b, k[None, None, None]] <= ids[b, q[None, None]]) & keys[b, k[None, None, None]]


def document_ids(x: torch.Tensor) -> torch.Tensor:
    """One document: every position follows the one before."""
    ids = torch.arange(x.shape[1])[None].expand(x.shape[0], -1)
    document = (torch.diff(ids, prepend=ids[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    return causal(x) & (document[:, None, :, None] == document[:, None, None, :])


READ: dict[str, tuple[MakeMask, Band, int]] = {
    "compare": (lambda x, _: causal(x), CAUSAL, 0),
    "greater": (lambda x, _: at(x)[0] + 1 > at(x)[1], CAUSAL, 0),
    "difference": (lambda x, _: at(x)[0] - at(x)[1] >= 0, CAUSAL, 0),
    "twice": (lambda x, _: at(x)[0] * 2 + 1 - at(x)[1] * 2 >= 0, CAUSAL, 0),
    "tril": (lambda x, _: square(x, True, torch.bool).tril(), CAUSAL, 0),
    "not triu": (lambda x, _: ~square(x, True, torch.bool).triu(1), CAUSAL, 0),
    "triu of numbers": (lambda x, _: square(x, -INF).triu(1), CAUSAL, 0),
    "lowest": (lambda x, _: square(x, LOWEST).triu(1), CAUSAL, 0),
    "masked fill": (lambda x, _: square(x, 0.0).masked_fill(~causal(x), -INF), CAUSAL, 0),
    "fill of zeros": (lambda x, _: square(x, 0.0).masked_fill(square(x, 1.0).tril() == 0, -INF), CAUSAL, 0),
    "one minus": (lambda x, _: (1.0 - square(x, 1.0).tril()) * LOWEST, CAUSAL, 0),
    "where": (lambda x, _: torch.where(causal(x), 0.0, -INF).double(), CAUSAL, 0),
    "four dimensions": (lambda x, _: causal(x)[None, None].expand(x.shape[0], 1, -1, -1), CAUSAL, 0),
    "transposed": (lambda x, _: (at(x)[0].t() >= at(x)[1].t()).transpose(0, 1).t().t(), CAUSAL, 0),
    "window": (lambda x, _: causal(x) & (at(x)[0] - at(x)[1] < 5), Band(4, 0), 0),
    "both sides": (lambda x, _: (at(x)[1] > at(x)[0] - 4) & (at(x)[1] < at(x)[0] + 3), Band(3, 2), 0),
    "band of numbers": (lambda x, _: square(x, True, torch.bool).triu(-3).tril(2), Band(3, 2), 0),
    "not itself": (lambda x, _: at(x)[1] < at(x)[0], Band(None, -1), 0),
    "narrower wins": (lambda x, _: causal(x) & (at(x)[1] <= at(x)[0] + 3), CAUSAL, 0),
    "nothing hidden": (lambda x, _: at(x)[1] <= at(x)[0] + 1000, Band(), 0),
    "sliced": (
        lambda x, _: (torch.arange(99)[:, None] >= torch.arange(99))[2 : x.shape[1] + 2, 2 : x.shape[1] + 2],
        CAUSAL,
        0,
    ),
    "shifted": (
        lambda x, _: (torch.arange(99)[:, None] >= torch.arange(99))[2 : x.shape[1] + 2, : x.shape[1]],
        Band(None, 2),
        0,
    ),
    "or nothing": (lambda x, _: causal(x) | (at(x)[1] < 0), CAUSAL, 0),
    "documents": (lambda x, _: document_ids(x), CAUSAL, 0),
    "padding": (lambda x, keys: causal(x) & keys[:, None, None, :], CAUSAL, 1),
    "padding and window": (
        lambda x, keys: keys[:, None, None] & (causal(x) & (at(x)[0] - at(x)[1] < 5)),
        Band(4, 0),
        1,
    ),
    "lookup": (by_lookup, CAUSAL, 1),
    "only padding": (lambda x, keys: keys[:, None, None].expand(-1, 1, x.shape[1], -1), Band(), 1),
    "two tensors": (lambda x, keys: causal(x) & keys[:, None, None] & (x[:, None, :, :1] < 9), CAUSAL, 2),
    "two of a later dimension": (lambda x, keys: (causal(x) & keys[:1] & (x[0, :, 0] < 9))[None], CAUSAL, 2),
    "later dimension": (lambda x, keys: ((at(x)[1] <= at(x)[0]) & keys[:1])[None], CAUSAL, 1),
}
"""Ways to write a mask: the band in it, and how many conditions are left of it as tensors."""

STAYS: dict[str, MakeMask] = {
    "prefix": lambda x, _: causal(x) | (at(x)[1] < 4),
    "every other": lambda x, _: (at(x)[0] - at(x)[1]) % 2 == 0,
    "not so low": lambda x, _: square(x, -3.0).triu(1),
    "rows that see nothing, lowest": lambda x, _: square(x, LOWEST).triu(0),
    "padding added": lambda x, keys: square(x, LOWEST).triu(1) + ((~keys).double() * LOWEST)[:, None, None],
    "blocks": lambda x, _: at(x)[0] // 4 >= at(x)[1] // 4,
    "values": lambda x, _: (x[:, None, :, :1] > x[:, None, None, :, 0]) | causal(x),
}
"""Masks that are not bands, or cannot be told to be."""


class Masked(nn.Module):
    def __init__(self, mask: MakeMask, *, bias: bool = False) -> None:
        super().__init__()
        self.mask, self.qkv = mask, nn.Linear(16, 3 * HEADS * HEAD_DIM)
        self.bias = nn.Parameter(torch.zeros(HEADS, 1, 1)) if bias else None

    def forward(self, x: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, HEAD_DIM)).permute(2, 0, 3, 1, 4)
        mask = self.mask(x, keys)
        if self.bias is not None:
            mask = mask + self.bias * (at(x)[0] - at(x)[1]).abs()
        return F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2)


def inputs(size: int = 13) -> tuple[torch.Tensor, torch.Tensor]:
    return rand(2, size, 16, grad=True), padding(size, size - 4, size=size)


def captured(model: nn.Module, **options: Any) -> Captured:
    return captured_call(model, plan_of(model, SPLIT), inputs(), {}, **options)


def call(model: nn.Module) -> torch.fx.Node:
    """The attention call, once masks are read."""
    graph = rewrite(captured(model), (), Options()).normalized.graph
    (found,) = (node for node in graph.nodes if "attention" in str(node.target) and node.op == "call_function")
    return found


def is_square(node: torch.fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.shape[-2:] == (13, 13)


@pytest.mark.parametrize("name", READ)
def test_the_band_in_a_mask(name: str) -> None:
    make, band, rest = READ[name]
    node = call(sharp(Masked(make)))
    if band.is_open or (band == CAUSAL and not rest):
        assert node.target is torch.ops.aten.scaled_dot_product_attention.default
        assert node.kwargs["is_causal"] == (not band.is_open)
    else:
        assert node.target is banded_attention
        assert node.args[4:] == (band.left, band.right)
    assert (node.args[3] is None) == (rest == 0)
    if rest < 2:
        assert not any(is_square(other) for other in node.graph.nodes), "no mask of all pairs is made"


@pytest.mark.parametrize("name", [*READ, *STAYS])
def test_what_is_read_is_the_mask(name: str) -> None:
    model = sharp(Masked(READ[name][0] if name in READ else STAYS[name]))
    x, keys = inputs()
    program = rewrite(captured(model), (), Options()).normalized
    (found,) = program(x, keys)
    assert torch.allclose(found, model(x, keys), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", STAYS)
def test_what_is_no_band_stays_a_mask(name: str) -> None:
    node = call(sharp(Masked(STAYS[name])))
    assert node.target is torch.ops.aten.scaled_dot_product_attention.default
    assert isinstance(node.args[3] if len(node.args) > 3 else node.kwargs["attn_mask"], torch.fx.Node)
    assert not node.kwargs.get("is_causal", False)


def test_numbers_that_are_added_stay_without_the_band() -> None:
    node = call(sharp(Masked(READ["triu of numbers"][0], bias=True)))
    assert node.target is banded_attention
    assert node.args[4:] == (None, 0)
    report = checked(Masked(READ["triu of numbers"][0], bias=True), SPLIT, *inputs(), axes=(Axis("ring", 3),))
    assert report.report.sites[0].kind == "ring"


@pytest.mark.parametrize(
    "axes", [(Axis("ring", 3),), (Axis("ulysses", 2),), (Axis("ring", 2), Axis("ulysses", 2))], ids=str
)
@pytest.mark.parametrize(
    "name",
    [
        "compare",
        "lowest",
        "window",
        "both sides",
        "not itself",
        "lookup",
        "padding and window",
        "prefix",
        "two tensors",
    ],
)
def test_over_ranks(name: str, axes: tuple[Axis, ...]) -> None:
    make = READ[name][0] if name in READ else STAYS[name]
    model = Masked(make)
    report = checked(model, SPLIT, *inputs(), axes=axes)
    assert report.report.sites[0].kind == {"ring": "ring", "ulysses": "ulysses"}.get(
        axes[-1].name if len(axes) == 1 else "", "unified"
    )


def test_no_rank_makes_a_mask_of_all_pairs() -> None:
    from cpcompile.pipeline import lower_ranks

    for axes in ((), (Axis("ring", 3),), (Axis("ulysses", 2),)):
        for module in lower_ranks(rewrite(captured(sharp(Masked(READ["padding and window"][0]))), axes, Options())):
            for node in module.graph.nodes:
                assert node.target is not banded_attention
                assert not is_square(node)


def test_a_program_for_every_length() -> None:
    model = sharp(Masked(READ["padding"][0]))
    program = captured(model, dynamic=True)
    graph = rewrite(program, (), Options()).normalized
    assert any(node.target is banded_attention for node in graph.graph.nodes)
    for size in (9, 13, 20):
        x, keys = inputs(size)
        assert torch.allclose(graph(x, keys)[0], model(x, keys), rtol=0, atol=1e-12)


def test_dropout_keeps_its_mask() -> None:
    class Dropping(Masked):
        def forward(self, x: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
            q = self.qkv(x).unflatten(-1, (3, HEADS, HEAD_DIM)).permute(2, 0, 3, 1, 4)[0]
            return F.scaled_dot_product_attention(q, q, q, self.mask(x, keys), dropout_p=0.5).transpose(1, 2).flatten(2)

    node = call(sharp(Dropping(READ["window"][0])))
    assert node.target is torch.ops.aten.scaled_dot_product_attention.default
    assert node.args[4] == 0.5


limits = st.none() | st.integers(-6, 12)


@given(left=limits, right=limits, queries=st.integers(1, 9), keys=st.integers(1, 9))
def test_every_row_sees_a_key_where_that_is_said(left: int | None, right: int | None, queries: int, keys: int) -> None:
    rows = band_mask(queries, keys, left, right, torch.device("cpu")).any(-1)
    if Band(left, right).shows_every_row(queries, keys):
        assert rows.all()
    if queries == keys and left in (None, 3) and right in (None, 0, 2):
        assert Band(left, right).shows_every_row(queries, keys)


numbers = st.integers(-3, 3)


@given(
    conditions=st.lists(st.tuples(numbers, numbers, numbers, st.integers(-9, 9)), min_size=1, max_size=3),
    queries=st.integers(1, 7),
    keys=st.integers(1, 7),
)
def test_a_condition_is_its_band_and_its_rest(
    conditions: list[tuple[int, int, int, int]], queries: int, keys: int
) -> None:
    b, q, k = torch.arange(2)[:, None, None], torch.arange(queries)[:, None], torch.arange(keys)
    wanted = torch.ones(2, queries, keys, dtype=torch.bool)
    atoms: list[Atom] = []
    for index, (over_b, over_q, over_k, constant) in enumerate(conditions):
        wanted &= over_b * b + over_q * q + over_k * k + constant >= 0
        atoms.append(Atom(index, Affine.of(constant, [(-3, over_b), (-2, over_q), (-1, over_k)])))
    band, rest = split_band(Condition(tuple(atoms)), (2, queries, keys))
    found = band_mask(queries, keys, band.left, band.right, torch.device("cpu")).expand(2, -1, -1).clone()
    for atom in rest:
        over_b, over_q, over_k, constant = conditions[int(str(atom.source))]
        found &= over_b * b + over_q * q + over_k * k + constant >= 0
    assert torch.equal(found, wanted)
