"""lower: the rank-neutral graph becomes the program of one rank.

In: a graph with decisions, and this rank's coordinates. Out: a new GraphModule over the same parameters in which every
reshard is a slice or a collective of this rank, and every literal size is this rank's. Groups are named by their mesh
axes ("ring.ulysses"): ``bind_groups`` puts a process's own group names there. Nothing is refused.

    %s = cp.shard(%x)      # (2) (64 cp) (C)          %s = slice(%x, 1, 32, 64)
    %v = view(%s, [2, 64, 4, 16])               ->    %v = reshape(%s, [2, 32, 4, 16])
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule

from cpcompile.alignment import explode
from cpcompile.decision import Cotangent, Decision, GradSync, decision, tensor_operands
from cpcompile.heads import head_map
from cpcompile.layout import Axis, Coords, Dim, Layout
from cpcompile.ops import collectives, lowered, neutral
from cpcompile.ops.ring import ring_attention
from cpcompile.passes.rules.bind import bind, localized
from cpcompile.positions import flat, group_runs
from cpcompile.site import Site
from cpcompile.sizes import Size, as_size
from cpcompile.symbols import SizeWriter
from cpcompile.transfer import Block, blocks, moved_axes, own_ranges, peers

aten = torch.ops.aten


@dataclass(frozen=True)
class Lower:
    """The pass. axes: the mesh's, outermost first. coords: this rank's. grad_sync: as ``enter`` was told."""

    axes: tuple[Axis, ...]
    coords: Coords
    grad_sync: GradSync = "all_reduce"
    name: ClassVar[str] = "lower"

    def __call__(self, module: fx.GraphModule) -> fx.GraphModule:
        """The rank's program: a new module, ``module`` stays as it is."""
        return _Lowering(self, module).run()


@dataclass(frozen=True)
class _Exchange:
    """The arguments of one ``exchange_blocks``, sizes not yet written."""

    reshaped: tuple[tuple[Size, ...] | None, ...]
    shapes: tuple[Size, ...]
    send: tuple[Size, ...]
    receive: tuple[Size, ...]
    send_counts: tuple[int, ...]
    receive_counts: tuple[int, ...]
    group: tuple[Axis, ...]
    rank: int
    alike: bool


@dataclass
class _Lowering:
    options: Lower
    module: fx.GraphModule
    graph: fx.Graph = field(default_factory=fx.Graph)
    env: dict[fx.Node, Any] = field(default_factory=dict)
    plans: dict[tuple[tuple[Layout, ...], tuple[Layout, ...]], _Exchange] = field(default_factory=dict)
    origin: fx.Node | None = None

    def run(self) -> fx.GraphModule:
        self.sizes = SizeWriter(self.graph)
        nodes = list(self.module.graph.nodes)
        for node in nodes:
            if node.op in ("placeholder", "get_attr"):
                self._take_meta(self._copied(node), node)
        for node in nodes:
            if node.op == "placeholder" and isinstance(node.meta.get("val"), torch.Tensor):
                self.sizes.learn(self.env[node], node.meta["val"])
        for node in nodes:
            if node.op in ("placeholder", "get_attr"):
                continue
            self.origin = node
            self.env[node] = self._lowered(node)
            if isinstance(self.env[node], fx.Node):
                self._take_meta(self.env[node], node)
        return _LazyGraphModule(self.module, self.graph, class_name="Lowered")  # its code is made at the first run

    def _copied(self, node: fx.Node) -> fx.Node:
        self.env[node] = self.graph.node_copy(node, lambda old: self.env[old])
        made = self.env[node]
        assert isinstance(made, fx.Node)
        return made

    def _take_meta(self, made: fx.Node, node: fx.Node) -> None:
        made.meta = {key: node.meta[key] for key in ("nn_module_stack", "stack_trace") if key in node.meta}
        made.meta["origin"] = node

    def _call(self, target: Any, *args: Any) -> fx.Node:
        node = self.graph.call_function(target, args)
        origin = self.origin
        assert origin is not None
        for key in ("nn_module_stack", "stack_trace"):
            if key in origin.meta:
                node.meta[key] = origin.meta[key]
        return node

    def _lowered(self, node: fx.Node) -> Any:
        value = node.meta.get("val")
        if isinstance(value, (torch.SymInt, int)) and not isinstance(value, bool) and node.op == "call_function":
            return self.sizes.write(as_size(value))
        special: dict[Any, Callable[[fx.Node], Any]] = {
            neutral.shard: self._shard,
            neutral.gather: self._single_exchange,
            neutral.all_to_all: self._single_exchange,
            neutral.exchange: self._packed_exchange,
            neutral.reduce: self._reduce,
            neutral.pend: self._pend,
            neutral.enter: self._enter,
        }
        if node.op == "call_function" and node.target in special:
            return special[node.target](node)
        if node.target is operator.getitem and isinstance(self.env.get(node.args[0]), list):  # type: ignore[arg-type]
            return self.env[node.args[0]][node.args[1]]  # type: ignore[index]
        made: Decision | None = node.meta.get("cp")
        if made is not None and made.site is not None and made.site.ring is not None:
            return self._ring_attention(node, made.site)
        if node.op == "call_function" and made is not None and (made.arguments or made.target is not None):
            return self._local_call(node, made)
        return self._copied(node)

    def _local_call(self, node: fx.Node, made: Decision) -> fx.Node:
        def size_of(dim: Dim | Size) -> Any:
            return self.sizes.write(dim.local_size(self.options.coords) if isinstance(dim, Dim) else dim)

        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda old: self.env[old])
        target, new_args, new_kwargs = localized(node.target, args, kwargs, made.arguments, made.target, size_of)
        return self.graph.call_function(target, new_args, new_kwargs)

    def _ring_attention(self, node: fx.Node, site: Site) -> fx.Node:
        call = site.ring
        assert call is not None
        assert isinstance(node.target, torch._ops.OpOverload)
        runs = group_runs(call, site.query.dims[-2], site.key.dims[-2], self.options.coords)
        given = bind(node.target, node.args, node.kwargs, lambda value: value)
        q, k, v, mask = (given[name] for name in ("query", "key", "value", "attn_mask"))
        group, heads = call.axes, head_map(site.query, site.key, self.options.coords)
        return self._call(
            ring_attention,
            *(None if operand is None else self.env[operand] for operand in (q, k, v, mask)),
            self._sizes(flat(runs.queries)),
            self._sizes(flat(runs.keys)),
            [int(resident) for resident in runs.resident],
            *(None if limit is None else self.sizes.write(limit) for limit in (call.left, call.right)),
            fx.node.map_arg(given["scale"], lambda old: self.env[old]),
            len(runs.keys),
            runs.rank,
            group_name(group),
            call.rotation,
            call.wide,
            k is v,
            heads.repeat,
            heads.offset,
        )

    def _shard(self, node: fx.Node) -> fx.Node:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        pair = explode(decision(source).layout, decision(node).layout)
        value: fx.Node = self.env[source]
        value = self._reshaped(value, pair.source, decision(source).layout)
        for dim, (whole, wanted) in enumerate(zip(pair.source.dims, pair.target.dims, strict=True)):
            if whole == wanted:
                continue
            pieces = [
                self._call(aten.slice.Tensor, value, dim, self.sizes.write(start), self.sizes.write(start + length))
                for start, length in own_ranges(whole, wanted, self.options.coords)
            ] or [self._call(aten.slice.Tensor, value, dim, 0, 0)]
            value = pieces[0] if len(pieces) == 1 else self._call(aten.cat.default, pieces, dim)
        return self._reshaped(value, decision(node).layout, pair.target)

    def _reshaped(self, value: fx.Node, wanted: Layout, has: Layout) -> fx.Node:
        if wanted.dims == has.dims:
            return value
        shape = [self.sizes.write(size) for size in wanted.local_shape(self.options.coords)]
        return self._call(aten.reshape.default, value, shape)

    def _single_exchange(self, node: fx.Node) -> Any:
        (value,) = self._exchanged(node, [tensor_operands(node)[0]], [decision(node).layout])
        return value

    def _packed_exchange(self, node: fx.Node) -> list[Any]:
        layouts = [layout for layout in decision(node).results if layout is not None]
        return self._exchanged(node, tensor_operands(node), layouts)

    def _exchanged(self, node: fx.Node, operands: Sequence[fx.Node], targets: Sequence[Layout]) -> list[Any]:
        sources = tuple(decision(operand).layout for operand in operands)
        key = (sources, tuple(targets))
        if key not in self.plans:
            self.plans[key] = _plan_exchange(sources, tuple(targets), self.options.axes, self.options.coords)
        plan = self.plans[key]
        values = [
            self.env[operand]
            if shape is None
            else self._call(aten.reshape.default, self.env[operand], self._sizes(shape))
            for operand, shape in zip(operands, plan.reshaped, strict=True)
        ]
        group_size = 1
        for axis in plan.group:
            group_size *= axis.size
        exchanged = self._call(
            collectives.exchange_blocks,
            values,
            self._sizes(plan.shapes),
            self._sizes(plan.send),
            self._sizes(plan.receive),
            list(plan.send_counts),
            list(plan.receive_counts),
            group_size,
            plan.rank,
            group_name(plan.group),
            decision(node).cotangent is Cotangent.FULL,
            plan.alike,
        )
        results: list[Any] = []
        for index, (source, target) in enumerate(zip(sources, targets, strict=True)):
            item = self._call(operator.getitem, exchanged, index)
            results.append(self._reshaped(item, target, explode(source, target).target))
        return results

    def _sizes(self, sizes: Sequence[Size]) -> list[Any]:
        return [self.sizes.write(size) for size in sizes]

    def _reduce(self, node: fx.Node) -> fx.Node:
        operand = tensor_operands(node)[0]
        pending = decision(operand).layout.partial
        assert all(partial.op == "sum" for partial in pending), "only pending sums are made"
        group = tuple(axis for axis in self.options.axes if any(axis == partial.axis for partial in pending))
        full = decision(node).cotangent is not Cotangent.PENDING
        return self._call(collectives.all_reduce, self.env[operand], group_name(group), full, node.meta["val"].dtype)

    def _pend(self, node: fx.Node) -> fx.Node:
        keep = all(self.options.coords[axis.name] == 0 for axis in self.options.axes)
        return self._call(collectives.pend_on_one, self.env[tensor_operands(node)[0]], keep)

    def _enter(self, node: fx.Node) -> list[fx.Node]:
        ranks = 1
        for axis in self.options.axes:
            ranks *= axis.size
        scale = {"mean": float(ranks), "sum": 1.0 / ranks}.get(self.options.grad_sync, 1.0)
        values = [self.env[operand] for operand in tensor_operands(node)]
        entered = self._call(
            collectives.enter_sum, values, group_name(self.options.axes), self.options.grad_sync == "all_reduce", scale
        )
        return [self._call(operator.getitem, entered, index) for index in range(len(values))]


def group_name(group: Sequence[Axis]) -> str:
    """The name of a group of ranks in a lowered graph: the mesh axes that it lies along."""
    return ".".join(axis.name for axis in group)


def bind_groups(module: fx.GraphModule, names: Mapping[str, str]) -> None:
    """Put this process's group names in place of the axes' names."""
    for node in module.graph.nodes:
        if node.op == "call_function" and node.target in lowered.GROUP_ARGUMENT:
            index = lowered.GROUP_ARGUMENT[node.target]
            args = list(node.args)
            args[index] = names[args[index]] if args[index] else ""
            node.args = tuple(args)
    module.recompile()


def _plan_exchange(
    sources: tuple[Layout, ...], targets: tuple[Layout, ...], axes: Sequence[Axis], coords: Coords
) -> _Exchange:
    """What this rank sends and receives for a packed change of layouts, in the order that ``exchange_blocks`` wants."""
    pairs = [explode(source, target) for source, target in zip(sources, targets, strict=True)]
    moved: set[Axis] = set()
    for source, target in zip(sources, targets, strict=True):
        moved_here = moved_axes(source, target)
        assert isinstance(moved_here, tuple)
        moved |= set(moved_here)
    group = tuple(axis for axis in axes if axis in moved)
    others = peers(group, coords)
    sent = [[blocks(pair, group, coords, peer) for peer in others] for pair in pairs]
    received = [[blocks(pair, group, peer, coords) for peer in others] for pair in pairs]
    reshaped = tuple(
        None if pair.source.dims == source.dims else pair.source.local_shape(coords)
        for pair, source in zip(pairs, sources, strict=True)
    )
    return _Exchange(
        reshaped=reshaped,
        shapes=tuple(size for pair in pairs for size in pair.target.local_shape(coords)),
        send=tuple(_flat(sent, lambda block: block.source)),
        receive=tuple(_flat(received, lambda block: block.target)),
        send_counts=tuple(len(to_peer) for by_peer in sent for to_peer in by_peer),
        receive_counts=tuple(len(of_peer) for by_peer in received for of_peer in by_peer),
        group=group,
        rank=others.index(dict(coords)),
        alike=_all_alike(sent, received),
    )


def _flat(by_tensor: list[list[tuple[Block, ...]]], start: Callable[[Block], tuple[Size, ...]]) -> list[Size]:
    return [
        size
        for by_peer in by_tensor
        for found in by_peer
        for block in found
        for pair in zip(start(block), block.lengths, strict=True)
        for size in pair
    ]


def _all_alike(sent: list[list[tuple[Block, ...]]], received: list[list[tuple[Block, ...]]]) -> bool:
    """Whether each peer gets the same boxes, some at all, and all ranks send equally much: one all-gather does it."""
    for by_peer, of_peer in zip(sent, received, strict=True):
        boxes = [[(block.source, block.lengths) for block in found] for found in by_peer]
        sizes = [[block.lengths for block in found] for found in of_peer]
        if any(other != boxes[0] for other in boxes) or any(other != sizes[0] for other in sizes):
            return False
    return any(found for by_peer in sent for found in by_peer)
