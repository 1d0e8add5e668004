"""Changes of layout: the blocks that ranks send each other fill every shard, each element once and from one sender."""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Sequence

import pytest
import sympy
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from cpcompile.alignment import explode
from cpcompile.assemble import all_coords, shard
from cpcompile.errors import Refusal
from cpcompile.layout import Axis, Coords, Dim, Layout, Segment, sharded, whole
from cpcompile.sizes import Size, ceil_div
from cpcompile.transfer import Block, blocks, elements_sent, kind_of, moved_axes, own_ranges, peers
from tests.strategies import CP3, Mesh, counted, layouts, layouts_profile, meshes, number, product_of

CP2, DP = Axis("cp", 2), Axis("dp", 2)
RING, ULYSSES = Axis("ring", 2), Axis("ulysses", 2)
S = sympy.Symbol("s", integer=True, positive=True)


def _box(starts: Sequence[Size], lengths: Sequence[Size]) -> tuple[slice, ...]:
    return tuple(
        slice(number(start), number(start) + number(length)) for start, length in zip(starts, lengths, strict=True)
    )


def _local_shape(layout: Layout, coords: Coords) -> list[int]:
    return [number(size) for size in layout.local_shape(coords)]


def _exchange(source: Layout, target: Layout, mesh: Mesh, group: tuple[Axis, ...]) -> dict[int, int]:
    """Run the exchange on numbers and check every rank's result; elements sent to others, by rank."""
    x, places = counted(source), all_coords(mesh)
    pair = explode(source, target)
    sent: dict[int, int] = collections.Counter(dict.fromkeys(range(len(places)), 0))
    locals_ = [shard(x, source, coords).reshape(_local_shape(pair.source, coords)) for coords in places]
    for needer in places:
        result = torch.full(_local_shape(pair.target, needer), -1)
        fills = torch.zeros_like(result)
        mine = set(shard(x, source, needer).flatten().tolist())
        for holder in peers(group, needer):
            rank = places.index(holder)
            for block in blocks(pair, group, holder, needer):
                assert number(block.numel) > 0
                values = locals_[rank][_box(block.source, block.lengths)]
                result[_box(block.target, block.lengths)] = values
                fills[_box(block.target, block.lengths)] += 1
                if holder != needer:
                    sent[rank] += number(block.numel)
                    assert not mine & set(values.flatten().tolist()), "the receiver has it already"
        assert (fills == 1).all(), f"{source} -> {target}: not one sender for each element"
        wanted = shard(x, target, needer)
        assert torch.equal(result.reshape(wanted.shape), wanted), f"{source} -> {target}"
    return dict(sent)


def _check(source: Layout, target: Layout, mesh: Mesh) -> None:
    kind, group = kind_of(source, target), moved_axes(source, target)
    assert not isinstance(kind, Refusal)
    assert isinstance(group, tuple)
    sent = _exchange(source, target, mesh, group)
    assert sent == {rank: elements_sent(source, target, coords) for rank, coords in enumerate(all_coords(mesh))}
    if kind in ("none", "shard"):
        assert group == ()
        assert not any(sent.values())
        pair, x = explode(source, target), counted(source)
        for coords in all_coords(mesh):
            local = shard(x, source, coords).reshape(_local_shape(pair.source, coords))
            for index, (s, t) in enumerate(zip(pair.source.dims, pair.target.dims, strict=True)):
                ranges = [(number(start), number(length)) for start, length in own_ranges(s, t, coords)]
                local = torch.cat([local.narrow(index, *it) for it in ranges] or [local.narrow(index, 0, 0)], index)
            wanted = shard(x, target, coords)
            assert torch.equal(local.reshape(wanted.shape), wanted)
    if kind == "none":
        assert source == target
    if kind == "gather":
        assert target.dims == tuple(dim.without(dim.axes & frozenset(group)) for dim in source.dims)
    more = tuple(mesh)  # packed with other tensors, an exchange may run along more axes than this one needs
    assert sum(_exchange(source, target, mesh, more).values()) == sum(sent.values())


@st.composite
def changes(draw: st.DrawFn, mesh: Mesh) -> tuple[Layout, Layout]:
    """Two layouts of one shape: the chunks of each dimension are whole or sharded, over other axes before and after."""
    count = draw(st.integers(1, 3))
    owners = [[draw(st.integers(0, count)) for _ in mesh] for _ in range(2)]
    found: list[tuple[Dim, Dim]] = []
    for index in range(count):
        axes = [tuple(axis for axis, of in zip(mesh, side, strict=True) if of == index) for side in owners]
        chunks = draw(st.lists(st.tuples(st.integers(1, 9), st.sampled_from([1, 1, 2])), min_size=1, max_size=3))
        down = draw(st.integers(0, 3)) == 0
        sides: list[Dim] = []
        for mine in axes:
            picked = [mine[: draw(st.integers(0, len(mine)))] if draw(st.booleans()) else mine for _ in chunks]
            parts = [Segment(n * g, use, down, g) for (n, g), use in zip(chunks, picked, strict=True)]
            sides.append(Dim.of(*parts))
        found.append((sides[0], sides[1]))
    if count == 3 and draw(st.booleans()):  # flattened: batch and sequence
        (a, b), (c, d), last = found
        if not a.axes & c.axes and not b.axes & d.axes:
            found = [(product_of(a, c), product_of(b, d)), last]
    return Layout(tuple(s for s, _ in found)), Layout(tuple(t for _, t in found))


@layouts_profile
@given(st.data(), meshes())
def test_every_exchange_gives_the_target(data: st.DataObject, mesh: Mesh) -> None:
    source, target = data.draw(changes(mesh))
    kind = kind_of(source, target)
    assume(not isinstance(kind, Refusal))
    _check(source, target, mesh)


@layouts_profile
@given(st.data(), meshes())
def test_gathers_and_shards_of_any_layout(data: st.DataObject, mesh: Mesh) -> None:
    layout = data.draw(layouts(mesh))
    everything = Layout.replicated(layout.shape)
    gone = frozenset(axis for axis in mesh if data.draw(st.booleans()))
    dims = [dim.gathered(gone) for dim in layout.dims]
    fewer = Layout(tuple(dim for dim in dims if dim is not None))
    others = [everything, fewer] if len(fewer.dims) == len(dims) else [everything]
    for other in others:
        for source, target in ((layout, other), (other, layout)):
            kind = kind_of(source, target)
            assert not isinstance(kind, Refusal)
            if source == target:
                assert kind == "none"
            else:
                assert kind == ("gather" if source is layout else "shard")
            _check(source, target, mesh)


@layouts_profile
@given(
    st.data(), meshes(), st.integers(1, 20), st.integers(1, 9), st.sampled_from(["whole", "text", "joint", "zigzag"])
)
def test_ulysses(data: st.DataObject, mesh: Mesh, size: int, heads: int, kind: str) -> None:
    """Sequence to heads and back over the inner axis alone, the outer one stays: (B) (S ring.ulysses) (H) (D)."""
    ring, ulysses = mesh[-2:]
    batch = sharded(2, mesh[:-2])
    seqs: list[Dim] = []
    for axes in ((ring, ulysses), (ring,)):
        image = Dim.of(Segment(size, axes))
        if kind == "text":
            image = Dim.of(whole(5), image)
        elif kind == "joint":
            image = Dim.of(Segment(7, axes), image)
        elif kind == "zigzag":
            half = ceil_div(size, 2)
            image = Dim.of(Segment(half, axes), Segment(size - half, axes, descending=True))
        seqs.append(image)
    spread = Layout((batch, seqs[0], whole(heads), whole(2)))
    inside = Layout((batch, seqs[1], Dim.of(Segment(heads, (ulysses,))), whole(2)))
    assert set(moved_axes(spread, inside)) == ({ulysses} if ulysses.size > 1 else set())  # type: ignore[arg-type]
    for source, target in ((spread, inside), (inside, spread)):
        _check(source, target, mesh)
    flat = Layout((product_of(product_of(batch, seqs[0]), whole(2 * heads)),))
    assert not isinstance(kind_of(flat, Layout((flat.dims[0].without([ulysses]),))), Refusal)
    assert data is not None


def test_the_exchange_of_the_design() -> None:
    """Text replicated, image sharded: each rank sends its image tokens of the others' heads, and no text."""
    joint = Dim.of(whole(16), sharded(64, [CP2]))
    source = Layout((whole(2), whole(4), joint, whole(8)))
    target = Layout((whole(2), sharded(4, [CP2]), whole(80), whole(8)))
    assert kind_of(source, target) == "all_to_all"
    assert elements_sent(source, target, {"cp": 0}) == 2 * 2 * 32 * 8
    assert elements_sent(target, source, {"cp": 0}) == 2 * 2 * (16 + 32) * 8
    _check(source, target, (CP2,))
    _check(target, source, (CP2,))


def test_kinds() -> None:
    seq, heads = sharded(64, [RING, ULYSSES]), sharded(6, [ULYSSES])
    assert kind_of(Layout((seq,)), Layout((seq,))) == "none"
    assert kind_of(Layout((whole(64),)), Layout((seq,))) == "shard"
    assert kind_of(Layout((sharded(64, [RING]),)), Layout((seq,))) == "shard"
    assert kind_of(Layout((seq,)), Layout((sharded(64, [RING]),))) == "gather"
    assert kind_of(Layout((seq,)), Layout((product_of(whole(2), sharded(32, [ULYSSES])),))) == "gather"
    assert kind_of(Layout((seq,)), Layout((sharded(64, [ULYSSES]),))) == "all_to_all"
    assert kind_of(Layout((seq, whole(6))), Layout((sharded(64, [RING]), heads))) == "all_to_all"
    part = Layout((Dim.of(seq, sharded(16, [RING])),))
    assert kind_of(part, Layout((Dim.of(seq, whole(16)),))) == "all_to_all"
    _check(part, Layout((Dim.of(seq, whole(16)),)), (RING, ULYSSES))
    zigzag = Dim.of(Segment(32, (CP2,)), Segment(32, (CP2,), descending=True))
    assert kind_of(Layout((zigzag,)), Layout((sharded(64, [CP2]),))) == "all_to_all"
    _check(Layout((zigzag,)), Layout((sharded(64, [CP2]),)), (CP2,))


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (product_of(whole(2), sharded(9, [CP2])), whole(18)),
        (whole(18), product_of(whole(2), sharded(9, [CP2]))),
        (product_of(sharded(2, [DP]), sharded(9, [CP2])), sharded(18, [DP])),
        (product_of(sharded(2, [DP]), sharded(9, [CP2])), product_of(whole(2), sharded(9, [CP2]))),
        (Dim.of(product_of(sharded(4, [DP]), sharded(9, [CP2])), sharded(6, [CP2])), whole(42)),
        (whole(42), Dim.of(product_of(sharded(4, [DP]), sharded(9, [CP2])), sharded(6, [CP2]))),
        (
            Dim.of(product_of(sharded(3, [DP]), sharded(9, [CP2])), sharded(6, [CP2])),
            Dim.of(product_of(sharded(3, [DP]), sharded(9, [CP2])), whole(6)),
        ),
        (
            Dim.of(product_of(sharded(3, [DP]), Dim.of(whole(3), sharded(6, [CP2]))), sharded(6, [CP2])),
            Dim.of(product_of(sharded(3, [DP]), whole(9)), whole(6)),
        ),
        (
            Dim.of(product_of(sharded(3, [DP]), Dim.of(whole(3), sharded(6, [CP2]))), sharded(6, [CP2])),
            Dim.of(product_of(whole(3), Dim.of(whole(3), sharded(6, [CP2]))), sharded(6, [CP2])),
        ),
    ],
    ids=str,
)
def test_rows_of_rows(source: Dim, target: Dim) -> None:
    _check(Layout((source, whole(2))), Layout((target, whole(2))), (DP, CP2))


def test_a_wrong_exchange_is_found_out() -> None:
    source, target = Layout((sharded(8, [RING]),)), Layout((whole(8),))
    with pytest.raises(AssertionError, match="not one sender"):
        _exchange(source, target, (RING,), ())
    wrong = Layout((Dim.of(Segment(8, (RING,), descending=True)),))
    assert isinstance(moved_axes(source, wrong), tuple)
    with pytest.raises(AssertionError, match="not one sender"):
        _exchange(source, wrong, (RING,), ())


def _symbolic_changes(s: Size) -> list[tuple[Layout, Layout]]:
    seq, heads = Dim((Segment(s, (CP3,)),)), sharded(7, [CP3])
    joint = Dim.of(whole(5), seq)
    both = Dim.of(Segment(s + 2, (CP3,)), seq)
    nested = Dim((Segment(s, (CP3, ULYSSES)),))
    flat = product_of(whole(2), seq)
    return [
        (Layout((seq, whole(2))), Layout((whole(s), whole(2)))),
        (Layout((whole(s), whole(2))), Layout((seq, whole(2)))),
        (Layout((seq, whole(7))), Layout((whole(s), heads))),
        (Layout((whole(s), heads)), Layout((seq, whole(7)))),
        (Layout((joint, whole(7))), Layout((whole(s + 5), heads))),
        (Layout((whole(s + 5), heads)), Layout((joint, whole(7)))),
        (Layout((both, whole(7))), Layout((whole(2 * s + 2), heads))),
        (Layout((whole(2 * s + 2), heads)), Layout((both, whole(7)))),
        (Layout((nested, whole(4))), Layout((seq, sharded(4, [ULYSSES])))),
        (Layout((seq, sharded(4, [ULYSSES]))), Layout((nested, whole(4)))),
        (Layout((flat, whole(2))), Layout((whole(2 * s), whole(2)))),
        (Layout((whole(2 * s), whole(2))), Layout((flat, whole(2)))),
        (
            Layout((product_of(sharded(2, [DP]), seq), whole(7))),
            Layout((product_of(sharded(2, [DP]), whole(s)), heads)),
        ),
        (Layout((product_of(sharded(4, [DP]), seq),)), Layout((product_of(sharded(4, [DP]), whole(s)),))),
        (Layout((Dim((Segment(4 * s, (CP3,), granule=4),)), whole(7))), Layout((whole(4 * s), heads))),
    ]


def _numbers(block: Block, value: int) -> Block | None:
    """The block where the symbol has a value; None where it is empty then."""
    starts, ends, lengths = (
        tuple(int(sympy.sympify(size).subs(S, value)) for size in sizes)
        for sizes in (block.source, block.target, block.lengths)
    )
    return Block(starts, ends, lengths) if math.prod(lengths) else None


@pytest.mark.parametrize("index", range(len(_symbolic_changes(S))))
def test_symbolic_blocks_are_the_numeric_ones(index: int) -> None:
    source, target = _symbolic_changes(S)[index]
    kind, group = kind_of(source, target), moved_axes(source, target)
    assert not isinstance(kind, Refusal), kind
    assert isinstance(group, tuple)
    mesh = (DP, CP3, ULYSSES)
    for value in (6, 7, 8, 20):
        numeric = _symbolic_changes(value)[index]
        assert kind_of(*numeric) == kind
        assert moved_axes(*numeric) == group
        _check(*numeric, mesh)
        for holder, needer in itertools.product(all_coords(mesh), repeat=2):
            if holder not in peers(group, needer):
                continue
            symbolic = [_numbers(block, value) for block in blocks(explode(source, target), group, holder, needer)]
            expected = blocks(explode(*numeric), group, holder, needer)
            assert [block for block in symbolic if block is not None] == list(expected)
        for coords in all_coords(mesh):
            sent = sympy.sympify(elements_sent(source, target, coords)).subs(S, value)
            assert sent == elements_sent(*numeric, coords)


def test_symbols_that_no_exchange_can_state_are_refused() -> None:
    seq = Dim((Segment(S, (CP3,)),))
    assert isinstance(kind_of(Layout((seq,)), Layout((Dim((Segment(S, (CP3,), True),)),))), Refusal)
    assert isinstance(kind_of(Layout((seq,)), Layout((Dim((Segment(S, (ULYSSES,)),)),))), Refusal)
    rows = Dim.of(product_of(sharded(4, [DP]), seq), whole(3))
    assert isinstance(kind_of(Layout((rows,)), Layout((whole(4 * S + 3),))), Refusal)
    other = sympy.Symbol("t", integer=True, positive=True)
    moved = kind_of(Layout((Dim.of(whole(S), seq),)), Layout((Dim.of(whole(other), whole(2 * S - other)),)))
    assert moved == "gather"
