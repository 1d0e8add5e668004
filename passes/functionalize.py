"""functionalize: writes into the graph's own buffers become values.

In: pre-dispatch ATen with in-place calls. Out: the same values, every in-place call replaced by its functional form
and scattered back through the views it wrote to, in operators that have derivatives. Refused (``UnsupportedError``):
a write to an input, a parameter or a buffer of the model, and a write through a view that has no inverse here.

    %out  = empty_like(%x)                      %out  = empty_like(%x)
    %even = slice(%out, 3, 0, None, 2)    ->    %v    = expand(%y, ...)
    %_    = copy_(%even, %y)                    %out1 = slice_scatter(%out, %v, 3, 0, None, 2)
    use(%out)                                   use(%out1)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from cpcompile.errors import Problem, UnsupportedError
from cpcompile.graphs import emit, source_line

aten = torch.ops.aten


@dataclass(frozen=True)
class Functionalize:
    """The pass; it has no options."""

    name: ClassVar[str] = "functionalize"

    def __call__(self, module: fx.GraphModule) -> None:
        """Rewrite ``module`` in place."""
        for node in module.graph.nodes:
            if node.target is aten.detach_.default:  # writes no numbers
                node.target = aten.detach.default
        written = [node for node in module.graph.nodes if _is_write(node)]
        if written:
            _Rewriter(module.graph).run()


def _is_write(node: fx.Node) -> bool:
    return (
        node.op == "call_function"
        and isinstance(node.target, torch._ops.OpOverload)
        and node.target._schema.is_mutable
        and any(arg.alias_info is not None and arg.alias_info.is_write for arg in node.target._schema.arguments[:1])
    )


def _storage(node: fx.Node) -> Any:
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None


class _Rewriter:
    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._views: dict[fx.Node, fx.Node] = {}  # view -> the node it is a view of
        self._root: dict[fx.Node, fx.Node] = {}  # view or buffer -> buffer
        self._version: dict[fx.Node, int] = {}  # buffer -> writes so far
        self._now: dict[fx.Node, tuple[int, fx.Node]] = {}  # view or buffer -> its value as of a version
        self._made: set[fx.Node] = set()

    def run(self) -> None:
        for node in list(self._graph.nodes):
            if node in self._made:
                continue
            if _is_write(node):
                self._write(node)
                continue
            parent = self._parent(node)  # before its operands become other nodes
            self._refresh_operands(node)
            if parent is not None:
                self._views[node] = self._written(parent)
                self._root[node] = self._root[parent]
                self._now[node] = (self._version[self._root[parent]], node)
            elif node.op != "output":
                self._root[node] = node
                self._version[node] = 0
                self._now[node] = (0, node)
        for node in reversed(list(self._graph.nodes)):
            if _is_write(node):  # whatever used it reads the value since
                self._graph.erase_node(node)

    def _parent(self, node: fx.Node) -> fx.Node | None:
        """The operand that a node's value shares memory with."""
        storage = _storage(node)
        if storage is None or node.op != "call_function":
            return None
        for operand in node.all_input_nodes:
            source = operand
            if isinstance(operand.meta.get("val"), (list, tuple)):  # an item of a split: a view of what was split
                source = next((n for n in operand.all_input_nodes if _storage(n) == storage), operand)
            if _storage(source) == storage and source in self._root:
                return source
        return None

    def _refresh_operands(self, node: fx.Node) -> None:
        """Whatever the node reads is the value after all writes so far."""
        stale = [n for n in node.all_input_nodes if n in self._root and self._version[self._root[n]] > 0]
        if stale:
            with self._graph.inserting_before(node):
                fresh = {old: self._current(old) for old in stale}
            for old, new in fresh.items():
                if old is not new:
                    node.replace_input_with(old, new)

    def _current(self, node: Any) -> fx.Node:
        """The value now of a view or buffer: views are taken anew from their parent's value."""
        node = self._written(node)
        root = self._root[node]
        version, value = self._now[node]
        if version == self._version[root] or node is root:
            return value
        fresh = self._replay(node, self._current(self._views[node]))
        self._now[node] = (self._version[root], fresh)
        return fresh

    def _replay(self, node: fx.Node, value: fx.Node) -> fx.Node:
        """The view ``node``, taken of ``value`` in place of its operand."""
        if node.all_input_nodes and isinstance(node.all_input_nodes[0].meta.get("val"), (list, tuple)):
            split = node.all_input_nodes[0]
            again = self._emit(split.target, [value, *split.args[1:]], split.kwargs, split)
            return self._emit(node.target, [again, *node.args[1:]], {}, node)
        return self._emit(node.target, [value, *node.args[1:]], node.kwargs, node)

    def _write(self, node: fx.Node) -> None:
        target = node.args[0]
        assert isinstance(target, fx.Node)
        assert isinstance(node.target, torch._ops.OpOverload)
        target = self._written(target)
        root = self._root[target]
        if root.op in ("placeholder", "get_attr"):
            what = "its input" if root.op == "placeholder" else "its parameter or buffer"
            raise UnsupportedError([self._problem(node, f"the model writes to {what} {root.target} in place")])
        self._refresh_operands(node)
        with self._graph.inserting_before(node):
            value = self._functional(node, self._current(target))
            self._store(node, target, value)
        self._root[node], self._views[node] = root, target

    def _written(self, node: fx.Node) -> fx.Node:
        """The view or buffer that a write's result is; any other node itself."""
        return self._views[node] if _is_write(node) else node

    def _functional(self, node: fx.Node, current: fx.Node) -> fx.Node:
        """What the written view holds afterwards."""
        assert isinstance(node.target, torch._ops.OpOverload)
        wanted = current.meta["val"]
        if node.target is aten.copy_.default:
            value = node.args[1]
            assert isinstance(value, fx.Node)
            if value.meta["val"].shape != wanted.shape:
                value = self._emit(aten.expand.default, [value, list(wanted.shape)], {}, node)
        else:
            name = node.target._schema.name.removeprefix("aten::").removesuffix("_")
            packet = getattr(aten, name, None)
            overload = getattr(packet, node.target._overloadname, None)
            if overload is None:
                raise UnsupportedError([self._problem(node, f"{node.target} has no functional form")])
            value = self._emit(overload, [current, *node.args[1:]], node.kwargs, node)
        if value.meta["val"].dtype != wanted.dtype:
            value = self._emit(aten.to.dtype, [value, wanted.dtype], {}, node)
        return value

    def _store(self, node: fx.Node, view: fx.Node, value: fx.Node) -> None:
        """``view`` now holds ``value``: so do, through it, its parent and in the end the buffer."""
        root = self._root[view]
        chain = [(view, value)]
        while view is not root:
            parent = self._views[view]
            value = self._scatter(node, view, self._current(parent), value)
            view = parent
            chain.append((view, value))
        self._version[root] += 1
        for changed, now in chain:
            self._now[changed] = (self._version[root], now)

    def _scatter(self, node: fx.Node, view: fx.Node, parent: fx.Node, value: fx.Node) -> fx.Node:
        """The parent's value with ``value`` where ``view`` looks."""
        target, args = view.target, view.args
        shape = list(parent.meta["val"].shape)
        if target is aten.slice.Tensor:
            return self._emit(aten.slice_scatter.default, [parent, value, *args[1:]], view.kwargs, node)
        if target is aten.select.int:
            return self._emit(aten.select_scatter.default, [parent, value, *args[1:]], {}, node)
        if target in (aten.alias.default, aten.detach.default, aten.to.dtype, aten.contiguous.default):
            return value
        if target is aten.transpose.int:
            return self._emit(target, [value, *args[1:]], {}, node)
        if target is aten.permute.default:
            order = [dim % len(shape) for dim in args[1]]  # type: ignore[union-attr, operator]
            inverse = sorted(range(len(order)), key=order.__getitem__)
            return self._emit(target, [value, inverse], {}, node)
        if target in (
            aten.view.default,
            aten.reshape.default,
            aten.flatten.using_ints,
            aten.unflatten.int,
            aten.unsqueeze.default,
            aten.squeeze.dim,
        ):
            return self._emit(aten.reshape.default, [value, shape], {}, node)
        split = view.all_input_nodes[0]
        if isinstance(split.meta.get("val"), (list, tuple)):
            return self._scatter_item(node, view, split, parent, value)
        raise UnsupportedError([self._problem(node, f"a write through {target} cannot be made functional")])

    def _scatter_item(self, node: fx.Node, view: fx.Node, split: fx.Node, parent: fx.Node, value: fx.Node) -> fx.Node:
        """A write to one piece of a split."""
        index = view.args[1]
        assert isinstance(index, int)
        dim = split.kwargs.get("dim", split.args[-1] if len(split.args) > 1 else 0)
        if split.target is aten.unbind.int:
            dim = split.args[1] if len(split.args) > 1 else split.kwargs.get("dim", 0)
            return self._emit(aten.select_scatter.default, [parent, value, dim, index], {}, node)
        if split.target in (aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default):
            dim = split.args[2] if len(split.args) > 2 else split.kwargs.get("dim", 0)
            assert isinstance(dim, int)
            start = sum(piece.shape[dim] for piece in split.meta["val"][:index])
            stop = start + split.meta["val"][index].shape[dim]
            return self._emit(aten.slice_scatter.default, [parent, value, dim, start, stop, 1], {}, node)
        raise UnsupportedError([self._problem(node, f"a write through {split.target} cannot be made functional")])

    def _emit(self, target: Any, args: list[Any], kwargs: Any, like: fx.Node) -> fx.Node:
        node = emit(self._graph, target, args, kwargs, like=like)
        self._made.add(node)
        return node

    def _problem(self, node: fx.Node, law: str) -> Problem:
        return Problem(source_line(node) or str(node), law, "write to a new tensor instead")
