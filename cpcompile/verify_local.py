"""The invariants of one rank's lowered graph.

Each lowered operator is held against its origin, the node of the rank-neutral graph that it comes from: its operands,
its local shape, which shard it is, along which group it exchanges, and which backward it has.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx

from cpcompile.alignment import explode
from cpcompile.assemble import shard
from cpcompile.decision import Cotangent, decision, tensor_operands
from cpcompile.findings import Findings
from cpcompile.layout import Coords
from cpcompile.local_values import LocalValues, Spec, run_on_shapes, run_piece
from cpcompile.ops import collectives, neutral
from cpcompile.ops.markers import mark
from cpcompile.transfer import moved_axes
from cpcompile.verify_ring import ring_laws

aten = torch.ops.aten
_wait = torch.ops._c10d_functional.wait_tensor.default


def verify_lowered(module: fx.GraphModule, coords: Coords) -> None:
    """Check the program of the rank at ``coords``, its groups still named by axes.

    Raises:
        VerificationError: all invariants that do not hold.
    """
    findings = Findings(f"lower, on the rank at {place(coords)}")
    if findings.lint(module):
        for node in module.graph.nodes:
            _check_target(node, findings)
        local = run_on_shapes(module, coords)
        for node, law in local.failures.items():
            findings.add(node, law)
        _Lowered(module, coords, local, findings).check()
    findings.raise_all()


def place(coords: Coords) -> str:
    """Where a rank is, in words."""
    return ", ".join(f"{name}={index}" for name, index in coords.items())


def is_raw_collective(node: fx.Node) -> bool:
    """Whether a node starts a functional collective itself."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and target.namespace == "_c10d_functional" and target is not _wait


def origin_of(node: fx.Node) -> fx.Node | None:
    """The rank-neutral node that a collective comes from, found behind it."""
    while "origin" not in node.meta:
        if not node.users:
            return None
        node = next(iter(node.users))
    origin: fx.Node = node.meta["origin"]
    if origin.target is operator.getitem:
        source = origin.args[0]
        assert isinstance(source, fx.Node)
        return source
    return origin


def _check_target(node: fx.Node, findings: Findings) -> None:
    if node.target in neutral.NEUTRAL:
        findings.add(node, "a rank-neutral operator survives")
    if node.target is mark:
        findings.add(node, "a marker survives")
    if node.op == "call_function" and is_raw_collective(node):
        assert isinstance(node.target, torch._ops.OpOverload)
        gives_list = "List" in str(node.target._schema.returns[0].type)
        for result in list(node.users) if gives_list else [node]:
            waits = sum(user.target is _wait for user in result.users)
            if waits != 1 or len(result.users) != 1:
                others = len(result.users) - waits
                law = f"a collective is waited for once and has no other use, not {waits} waits and {others} other uses"
                findings.add(result, law)


@dataclass(frozen=True)
class _Lowered:
    """A lowered graph beside the one that it comes from."""

    module: fx.GraphModule
    coords: Coords
    local: LocalValues
    findings: Findings

    def check(self) -> None:
        """Go through the rank-neutral graph."""
        made = {node.meta["origin"]: node for node in self.module.graph.nodes if "origin" in node.meta}
        for origin in next(iter(made)).graph.nodes if made else ():
            value = origin.meta.get("val")
            if origin.op in ("placeholder", "get_attr") or isinstance(
                value, (int, float, torch.SymInt, torch.SymFloat)
            ):
                continue
            if origin.target is operator.getitem and origin.args[0].target in (neutral.exchange, neutral.enter):
                self._item(origin, origin.args[0], made)
            elif origin.target in (neutral.exchange, neutral.enter):
                continue  # its items stand for it
            elif origin not in made:
                self.findings.add(origin, "it was lowered to nothing")
            else:
                self._node(origin, made[origin], made)

    def _item(self, item: fx.Node, packed: fx.Node, made: Mapping[fx.Node, fx.Node]) -> None:
        if item not in made:
            self.findings.add(item, "it was lowered to nothing")
            return
        index = item.args[1]
        assert isinstance(index, int)
        operand = tensor_operands(packed)[index]
        if packed.target is neutral.exchange:
            self._exchange(packed, item, operand, index, made)
            return
        entered = made[item].args[0]
        if not isinstance(entered, fx.Node) or entered.target is not collectives.enter_sum:
            self.findings.add(item, f"{self._name(made[item])} is not what enters")
        elif entered.args[0][index] is not made.get(operand):  # type: ignore[index]
            self.findings.add(item, f"{self._name(operand)} should enter here, another value does")

    def _node(self, origin: fx.Node, lowered: fx.Node, made: Mapping[fx.Node, fx.Node]) -> None:
        if origin.target is neutral.shard:
            self._shard(origin, lowered, made)
        elif origin.target in (neutral.gather, neutral.all_to_all):
            self._exchange(origin, origin, tensor_operands(origin)[0], 0, made)
        else:
            self._call(origin, lowered, made)

    def _name(self, node: fx.Node) -> str:
        return self.findings.name(node)

    def _call(self, origin: fx.Node, lowered: fx.Node, made: Mapping[fx.Node, fx.Node]) -> None:
        """An operator runs on the local values of its own operands."""
        operands = tensor_operands(origin)
        if origin.op == "call_function" and decision(origin).target is not None:
            operands = operands[:1]
        taken: list[fx.Node] = []
        fx.node.map_arg((lowered.args, lowered.kwargs), taken.append)
        taken = [node for node in taken if isinstance(self.local.values.get(node), Spec)]
        wanted = [made.get(operand) for operand in operands]
        if taken != wanted:
            one, other = (", ".join(self._name(n) if n else "?" for n in nodes) for nodes in (taken, wanted))
            self.findings.add(
                origin, f"{self._name(lowered)} takes ({one}) where the values of its operands are ({other})"
            )
        if lowered not in self.local.failures:
            for law in ring_laws(origin, lowered, self.coords, self.local):
                self.findings.add(origin, f"{self._name(lowered)}: {law}")
        if origin.target is neutral.pend and lowered.target is not collectives.pend_on_one:
            self.findings.add(origin, f"{self._name(lowered)} does not keep the cotangent on one rank")
        if origin.target is neutral.reduce:
            self._reduce(origin, lowered)

    def _reduce(self, origin: fx.Node, lowered: fx.Node) -> None:
        if lowered.target is not collectives.all_reduce:
            self.findings.add(origin, f"what is pending is not reduced: {self._name(lowered)} is no all-reduce")
            return
        _, group, full, _ = lowered.args
        axes = {partial.axis.name for partial in decision(tensor_operands(origin)[0]).layout.partial}
        if set(str(group).split(".")) != axes:
            self.findings.add(
                origin, f"{self._name(lowered)} sums over {group}, what is pending is so over {sorted(axes)}"
            )
        if full is not (decision(origin).cotangent is not Cotangent.PENDING):
            state = decision(origin).cotangent.value
            self.findings.add(origin, f"{self._name(lowered)} has not the backward for a {state} cotangent")

    def _exchange(
        self, origin: fx.Node, result: fx.Node, operand: fx.Node, index: int, made: Mapping[fx.Node, fx.Node]
    ) -> None:
        """``result``, item ``index`` of an exchange, is made of ``operand`` by a collective and reshapes alone.

        Which elements go where is a matter of all ranks: see ``verify_ranks``.
        """
        lowered = made.get(result)
        item = lowered if lowered is None else _before_reshape(lowered)
        exchanged = item.args[0] if item is not None and item.target is operator.getitem else None
        if item is None or not isinstance(exchanged, fx.Node) or exchanged.target is not collectives.exchange_blocks:
            self.findings.add(
                origin, f"{'nothing' if lowered is None else self._name(lowered)} exchanges {self._name(operand)}"
            )
            return
        if item.args[1] != index:
            self.findings.add(origin, f"{self._name(item)} should be item {index} of {self._name(exchanged)}")
        tensors, group, full = exchanged.args[0], exchanged.args[8], exchanged.args[9]
        sent = tensors[index]  # type: ignore[index]
        assert isinstance(sent, fx.Node)
        layouts = decision(operand).layout, decision(result).layout
        if sent is not made.get(operand) and _before_reshape(sent) is not made.get(operand):
            self.findings.add(
                origin, f"{self._name(exchanged)} sends {self._name(sent)} in place of {self._name(operand)}"
            )
        else:
            self._promised(origin, sent, self.local.shape(explode(*layouts).source, self.coords))
        self._promised(origin, item, self.local.shape(explode(*layouts).target, self.coords))
        moved = moved_axes(*layouts)
        if isinstance(moved, tuple) and not {axis.name for axis in moved} <= set(str(group).split(".")):
            self.findings.add(
                origin, f"{self._name(exchanged)} runs over {group}: {layouts[0]} to {layouts[1]} needs more"
            )
        if full is not (decision(origin).cotangent is Cotangent.FULL):
            state = decision(origin).cotangent.value
            self.findings.add(origin, f"{self._name(exchanged)} has not the backward for a {state} cotangent")

    def _promised(self, origin: fx.Node, node: fx.Node, shape: tuple[int, ...]) -> None:
        found = self.local.values.get(node)
        if isinstance(found, Spec) and found.shape != shape:
            self.findings.add(origin, f"{self._name(node)} is of shape {found.shape}, the exchange is one of {shape}")

    def _shard(self, origin: fx.Node, lowered: fx.Node, made: Mapping[fx.Node, fx.Node]) -> None:
        """Run on an index tensor, the slices give the shard that the layout means."""
        if lowered in self.local.failures:
            return
        (operand,) = tensor_operands(origin)
        source, target = (self.local.numbered(decision(node).layout) for node in (operand, origin))
        kept = [one != other for one, other in zip(source.dims, target.dims, strict=True)]
        shape = [self.local.number(size) for size in source.shape]
        sizes = [size if keep else 1 for keep, size in zip(kept, shape, strict=True)]
        index = torch.arange(torch.Size(sizes).numel()).reshape(sizes).expand(shape)
        got = run_piece(lowered, made[operand], shard(index, source, self.coords), self.local)
        if isinstance(got, str):
            law = f"{self._name(lowered)} is not sliced of {self._name(made[operand])} alone, but made by {got}"
            self.findings.add(origin, law)
            return
        wanted = shard(index, target, self.coords)
        for dim, keep in enumerate(kept):
            if not keep and got.shape[dim]:  # all lines along it are alike
                got, wanted = got.narrow(dim, 0, 1), wanted.narrow(dim, 0, 1)
        if not torch.equal(got, wanted):
            first, own = (str(x.flatten()[0].item()) if x.numel() else "nothing" for x in (got, wanted))
            law = f"{self._name(lowered)} is not this rank's shard: it starts at element {first}, {target} at {own}"
            self.findings.add(origin, law)


def _before_reshape(node: fx.Node) -> fx.Node:
    if node.target is aten.reshape.default and isinstance(node.args[0], fx.Node):
        return node.args[0]
    return node
