"""The invariants of all ranks' lowered graphs together.

Ranks run the same collectives in the same order, and each exchange, simulated over all ranks on index tensors, gives
every rank the shards that its layout means. Equal exchanges are simulated once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import fx

from cpcompile.alignment import Pair, explode
from cpcompile.assemble import all_coords, shard
from cpcompile.decision import decision, tensor_operands
from cpcompile.findings import Findings
from cpcompile.layout import Axis, Coords, Layout, whole
from cpcompile.local_values import LocalValues, run_on_shapes
from cpcompile.ops import collectives, lowered
from cpcompile.ops.ring import ring_attention
from cpcompile.show import operator_name
from cpcompile.sizes import Size
from cpcompile.transfer import peers
from cpcompile.verify_local import is_raw_collective, origin_of, place

Box: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""Start and length of each dimension."""

_FLAGS: Mapping[Any, tuple[int, ...]] = {
    collectives.exchange_blocks: (9, 10),
    collectives.all_reduce: (2,),
    collectives.enter_sum: (2,),
    ring_attention: (6, 10, 13, 14, 15),
}
"""Arguments that decide which collectives an operator runs, forward and backward."""


def verify_ranks(lowered_by_rank: Sequence[fx.GraphModule], axes: Sequence[Axis]) -> None:
    """Check the programs of all ranks of a mesh of ``axes`` (in rank order, groups named by axes) against each other.

    Raises:
        VerificationError: all invariants that do not hold.
    """
    findings = Findings("lower, over all ranks")
    ranks = all_coords(axes)
    runs = [[node for node in module.graph.nodes if _is_collective(node)] for module in lowered_by_rank]
    _check_pends(lowered_by_rank, findings)
    count = _common(runs, ranks, findings)
    local = [LocalValues() for _ in ranks]
    if any(_has_symbols(node) for node in runs[0]):
        local = [run_on_shapes(module, coords) for module, coords in zip(lowered_by_rank, ranks, strict=True)]
    known: dict[Any, list[str]] = {}
    for nodes in zip(*(run[:count] for run in runs), strict=True):
        if nodes[0].target is collectives.exchange_blocks:
            for law in _exchange_laws(nodes, local, ranks, axes, known):
                findings.add(nodes[0], law)
    findings.raise_all()


def _is_collective(node: fx.Node) -> bool:
    return node.op == "call_function" and (node.target in lowered.GROUP_ARGUMENT or is_raw_collective(node))


def _has_symbols(node: fx.Node) -> bool:
    """Whether sizes in an exchange's arguments are computed in the graph."""
    found: list[fx.Node] = []
    fx.node.map_arg(node.args[1:], found.append)
    return node.target is collectives.exchange_blocks and bool(found)


def _signature(node: fx.Node) -> tuple[Any, ...]:
    """What must be the same on all ranks: operator, group, flags, and the change of layout that it stands for."""
    origin = origin_of(node)
    if node.target in lowered.GROUP_ARGUMENT:
        group = node.args[lowered.GROUP_ARGUMENT[node.target]]
        flags: tuple[Any, ...] = tuple(node.args[index] for index in _FLAGS[node.target])
    else:
        group, flags = node.args[-1], ()
    return node.target, group, flags, None if origin is None else origin.name


def _common(runs: Sequence[Sequence[fx.Node]], ranks: Sequence[Coords], findings: Findings) -> int:
    """How many collectives all ranks have in common, from the first on."""
    count = len(runs[0])
    for run, coords in zip(runs[1:], ranks[1:], strict=True):
        for position in range(max(len(run), len(runs[0]))):
            one, other = (nodes[position] if position < len(nodes) else None for nodes in (run, runs[0]))
            if one is None or other is None or _signature(one) != _signature(other):
                node = one or other
                assert node is not None
                theirs, first = (_described(n, findings) for n in (one, other))
                law = f"collective {position + 1} of the rank at {place(coords)} is {theirs}, on the first rank {first}"
                findings.add(node, f"all ranks run the same collectives in the same order: {law}")
                count = min(count, position)
                break
    return count


def _described(node: fx.Node | None, findings: Findings) -> str:
    if node is None:
        return "missing"
    target, group, flags, _ = _signature(node)
    origin = origin_of(node)
    name = "nothing" if origin is None else findings.name(origin)
    return f"{operator_name(target)}({', '.join(map(str, flags))}) over {group} for {name}"


def _check_pends(lowered_by_rank: Sequence[fx.GraphModule], findings: Findings) -> None:
    """What is kept on one rank is kept on exactly one."""
    by_origin: dict[fx.Node, list[fx.Node]] = {}
    for module in lowered_by_rank:
        for node in module.graph.nodes:
            if node.target is collectives.pend_on_one:
                by_origin.setdefault(node.meta["origin"], []).append(node)
    for nodes in by_origin.values():
        kept = sum(bool(node.args[1]) for node in nodes)
        if kept != 1:
            findings.add(nodes[0], f"its cotangent is kept on one rank, not on {kept}")


@dataclass(frozen=True)
class _Exchange:
    """One rank's arguments of an exchange: boxes by tensor and peer."""

    shapes: tuple[tuple[int, ...], ...]
    send: tuple[tuple[tuple[Box, ...], ...], ...]
    receive: tuple[tuple[tuple[Box, ...], ...], ...]
    rank: int

    @staticmethod
    def of(arguments: Sequence[Any], counts: Sequence[int]) -> _Exchange:
        """Read the arguments; ``counts`` are the exchanged tensors' numbers of dimensions."""
        shapes, send, receive, send_counts, receive_counts, group_size, rank = arguments
        ends = [sum(counts[: index + 1]) for index in range(len(counts))]
        return _Exchange(
            tuple(tuple(shapes[end - count : end]) for end, count in zip(ends, counts, strict=True)),
            _boxes(send, send_counts, counts, group_size),
            _boxes(receive, receive_counts, counts, group_size),
            rank,
        )


def _boxes(
    flat: Sequence[int], box_counts: Sequence[int], counts: Sequence[int], group_size: int
) -> tuple[tuple[tuple[Box, ...], ...], ...]:
    numbers, boxes = iter(flat), iter(box_counts)

    def box(count: int) -> Box:
        pairs = [(next(numbers), next(numbers)) for _ in range(count)]
        return tuple(start for start, _ in pairs), tuple(length for _, length in pairs)

    return tuple(tuple(tuple(box(count) for _ in range(next(boxes))) for _ in range(group_size)) for count in counts)


def _exchange_laws(
    nodes: Sequence[fx.Node],
    local: Sequence[LocalValues],
    ranks: Sequence[Coords],
    axes: Sequence[Axis],
    known: dict[Any, list[str]],
) -> list[str]:
    origin = origin_of(nodes[0])
    if origin is None:
        return ["it stands for no change of layout"]
    sources = [local[0].numbered(decision(operand).layout) for operand in tensor_operands(origin)]
    targets = [local[0].numbered(layout) for layout in decision(origin).results if layout is not None]
    arguments = [values.argument(tuple(node.args[1:8])) for values, node in zip(local, nodes, strict=True)]
    alike, group_name = bool(nodes[0].args[10]), str(nodes[0].args[8])
    key = (tuple(sources), tuple(targets), group_name, alike, str(arguments))
    if key not in known:
        pairs = list(zip(sources, targets, strict=True))
        counts = [len(explode(source, target).source.dims) for source, target in pairs]
        exchanges = [_Exchange.of(argument, counts) for argument in arguments]
        group = [axis for axis in axes if axis.name in group_name.split(".")]
        simulated = _Simulated(exchanges, group, ranks, alike)
        known[key] = [law for index, pair in enumerate(pairs) for law in simulated.laws(index, *pair)]
    return known[key]


@dataclass(frozen=True)
class _Simulated:
    """An exchange of all ranks."""

    exchanges: Sequence[_Exchange]
    group: Sequence[Axis]
    ranks: Sequence[Coords]
    alike: bool

    def laws(self, index: int, source: Layout, target: Layout) -> list[str]:
        """What is wrong with tensor ``index``, which should go from ``source`` to ``target``."""
        pair = explode(source, target)
        found: list[str] = []
        for coords, exchange in zip(self.ranks, self.exchanges, strict=True):
            if exchange.shapes[index] != pair.target.local_shape(coords):
                shape = pair.target.local_shape(coords)
                found.append(
                    f"the rank at {place(coords)} makes room for {exchange.shapes[index]}, its shard is {shape}"
                )
            if peers(self.group, coords)[exchange.rank] != dict(coords):
                found.append(f"the rank at {place(coords)} takes itself for number {exchange.rank} of its group")
            if self.alike and len(set(exchange.send[index])) != 1:
                found.append(f"the rank at {place(coords)} sends unlike blocks, which no all-gather does")
        return found or self._moved(index, source, target, pair)

    def _moved(self, index: int, source: Layout, target: Layout, pair: Pair) -> list[str]:
        """The exchange of an index tensor, which has only the dimensions along which something moves."""
        if 0 in source.shape:  # there are no elements
            return []
        kept, kept_inside = self._kept(index, source, target, pair)
        shape = [int(size) if keep else 1 for keep, size in zip(kept, source.shape, strict=True)]
        numbers = torch.arange(torch.Size(shape).numel()).reshape(shape)
        small = [
            Layout(tuple(dim if keep else whole(1) for keep, dim in zip(kept, layout.dims, strict=True)))
            for layout in (source, target)
        ]
        held = [
            shard(numbers, small[0], coords).reshape(_shrunk(pair.source.local_shape(coords), kept_inside))
            for coords in self.ranks
        ]
        found: list[str] = []
        for coords, exchange in zip(self.ranks, self.exchanges, strict=True):
            out = torch.full(_shrunk(exchange.shapes[index], kept_inside), -1)
            for number, peer in enumerate(peers(self.group, coords)):
                sender = self.ranks.index(peer)
                sent = self.exchanges[sender].send[index][exchange.rank]
                boxes = exchange.receive[index][number]
                between = f"from the rank at {place(peer)} to the one at {place(coords)}"
                if [lengths for _, lengths in sent] != [lengths for _, lengths in boxes]:
                    found.append(f"{between} what is sent is not what is awaited: {_sizes(sent)}, {_sizes(boxes)}")
                    continue
                for (at, lengths), (to, _) in zip(sent, boxes, strict=True):
                    piece, room = (
                        _part(x, start, lengths, kept_inside) for x, start in ((held[sender], at), (out, to))
                    )
                    if piece is None or room is None:
                        found.append(f"{between} a block lies outside its tensor")
                    else:
                        room.copy_(piece)
            wanted = shard(numbers, small[1], coords)
            if out.numel() != wanted.numel() or not torch.equal(out.reshape(wanted.shape), wanted):
                found.append(
                    f"the rank at {place(coords)} gets other elements than its shard of {target}, from {source}"
                )
        return found

    def _kept(self, index: int, source: Layout, target: Layout, pair: Pair) -> tuple[list[bool], list[bool]]:
        """Along which dimensions something moves: of the tensor, and of the exploded one."""
        kept: list[bool] = []
        inside: list[bool] = []
        for one, other in zip(source.dims, target.dims, strict=True):
            count = len(explode(Layout((one,)), Layout((other,))).source.dims)
            moves = count > 1 or one != other or not self._is_passed_whole(index, len(inside), pair)
            kept.append(moves)
            inside.extend([moves] * count)
        return kept, inside

    def _is_passed_whole(self, index: int, dim: int, pair: Pair) -> bool:
        """Whether all blocks have all of an exploded dimension that lies alike before and after."""
        return all(
            (start[dim], lengths[dim]) == (0, pair.source.dims[dim].local_size(coords))
            for coords, exchange in zip(self.ranks, self.exchanges, strict=True)
            for boxes in (*exchange.send[index], *exchange.receive[index])
            for start, lengths in boxes
        )


def _shrunk(shape: Sequence[Size], kept: Sequence[bool]) -> list[int]:
    return [int(size) if keep else 1 for keep, size in zip(kept, shape, strict=True)]


def _part(x: torch.Tensor, start: Sequence[int], lengths: Sequence[int], kept: Sequence[bool]) -> torch.Tensor | None:
    for dim, keep in enumerate(kept):
        if keep:
            if not 0 <= start[dim] <= start[dim] + lengths[dim] <= x.shape[dim]:
                return None
            x = x.narrow(dim, start[dim], lengths[dim])
    return x


def _sizes(boxes: Sequence[Box]) -> str:
    return " + ".join("x".join(map(str, lengths)) for _, lengths in boxes) or "nothing"
