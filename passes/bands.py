"""bands: what an attention mask says about positions becomes part of the attention call.

In: a normalized graph. Out: each mask that contains a band (causal, a window) is gone from its call, or reduced to what
is not positions (padding): the call is ``is_causal``, or ``banded_attention``. A mask that is not read completely, or
whose hidden numbers are finite where some row might see nothing else, stays as it is: nothing is refused.

    %c = le(%k, %q)                  # [S, S]
    %m = and(%c, %padding)           # [B, 1, S, S]    ->    %o = banded_attention(%q, %k, %v, %padding, None, 0)
    %o = sdpa(%q, %k, %v, %m)
"""

from __future__ import annotations

from dataclasses import dataclass
from types import NoneType
from typing import Any, ClassVar

import torch
from torch import fx

from cpcompile.decision import is_tensor, shape_of
from cpcompile.graphs import emit
from cpcompile.ops.banded import banded_attention
from cpcompile.passes.masks import reader as new_reader
from cpcompile.passes.masks.reader import Reader
from cpcompile.passes.masks.values import Choice, Source, negated
from cpcompile.passes.rules.bind import bind
from cpcompile.predicates import Atom, Band, Condition, split_band

aten = torch.ops.aten


@dataclass(frozen=True)
class Read:
    """A mask as a band, conditions that are left, and numbers that are added (a bias)."""

    band: Band
    rest: tuple[Atom, ...] = ()
    bias: fx.Node | None = None


@dataclass(frozen=True)
class Bands:
    """The pass; it has no options."""

    name: ClassVar[str] = "bands"

    def __call__(self, module: fx.GraphModule) -> None:
        """Rewrite ``module`` in place."""
        reader = new_reader()
        masks: dict[tuple[fx.Node, tuple[Atom, ...]], fx.Node] = {}
        changed = False
        for node in list(module.graph.nodes):
            if node.target is aten.scaled_dot_product_attention.default:
                changed |= _swap(module.graph, node, reader, masks)
        if changed:
            module.graph.eliminate_dead_code()


def _swap(
    graph: fx.Graph, node: fx.Node, reader: Reader, masks: dict[tuple[fx.Node, tuple[Atom, ...]], fx.Node]
) -> bool:
    given = bind(aten.scaled_dot_product_attention.default, node.args, node.kwargs, lambda operand: operand)
    mask = given["attn_mask"]
    if not isinstance(mask, fx.Node) or given["is_causal"]:
        return False
    queries, keys = (shape_of(given[name].meta["val"])[-2] for name in ("query", "key"))
    found = _read(reader, mask, queries, keys)
    if found is None or not all(isinstance(limit, (int, NoneType)) for limit in (found.band.left, found.band.right)):
        return False
    band = found.band
    plain = band.is_open or (band == Band(None, 0) and not found.rest and found.bias is None)
    if given["dropout_p"] and not plain:
        return False
    rest = found.bias
    if found.rest:
        if (mask, found.rest) not in masks:  # sites share it, as they share the mask
            with graph.inserting_before(mask.next):
                masks[mask, found.rest] = _conjunction(graph, found.rest, mask)
        rest = masks[mask, found.rest]
    with graph.inserting_before(node):
        if plain:
            arguments = {**_kept(given), "is_causal": not band.is_open, "dropout_p": given["dropout_p"]}
            operands = [given[name] for name in ("query", "key", "value")]
            new = emit(graph, node.target, [*operands, rest], arguments, like=node, value=node.meta["val"])
        else:
            operands = [given["query"], given["key"], given["value"], rest]
            limits = [band.left, band.right]
            new = emit(
                graph, banded_attention, [*operands, *limits], {**_kept(given)}, like=node, value=node.meta["val"]
            )
    node.replace_all_uses_with(new)
    graph.erase_node(node)
    return True


def _kept(given: dict[str, Any]) -> dict[str, Any]:
    return {name: given[name] for name in ("scale", "enable_gqa")}


def _read(reader: Reader, mask: fx.Node, queries: Any, keys: Any) -> Read | None:
    """What a mask of an attention call over so many queries and keys says; None: nothing is gained."""
    shape = shape_of(mask.meta["val"])
    if len(shape) < 2 or shape[-1] != keys or shape[-2] not in (queries, 1):
        return None
    value, bias = reader.read(mask), None
    if value is None and mask.target is aten.add.Tensor:
        value, bias = _with_bias(reader, mask)
    if isinstance(value, Choice):
        return _numbers(value, bias, mask, queries, keys)
    if not isinstance(value, Condition) or value.never:
        return None
    band, rest = split_band(value, shape)
    if any(atom.source is None for atom in rest):
        return None
    gained = not band.is_open or not rest or all(_is_smaller(atom, mask) for atom in rest)
    return Read(band, rest) if gained else None


def _numbers(value: Choice, bias: fx.Node | None, mask: fx.Node, queries: Any, keys: Any) -> Read | None:
    """A mask of numbers: nothing is added where keys are visible, so much elsewhere that they weigh nothing."""
    kept: Condition | None = value.condition
    hides = value.no
    if value.yes != 0 and value.no == 0:
        kept, hides = negated(value.condition, None), value.yes
    elif value.yes != 0:
        return None
    if kept is None or kept.never:
        return None
    band, rest = split_band(kept, shape_of(mask.meta["val"]))
    if rest:
        return None
    hidden = hides == float("-inf") or (
        bias is None  # which may hide what the band shows
        and hides <= torch.finfo(mask.meta["val"].dtype).min / 2
        and band.shows_every_row(queries, keys)
    )
    return Read(band, bias=bias) if hidden or band.is_open else None


def _with_bias(reader: Reader, mask: fx.Node) -> tuple[Choice | None, fx.Node | None]:
    """A sum of a mask that is read and numbers that are not."""
    for one, other in (mask.args[:2], mask.args[1::-1]):
        if isinstance(one, fx.Node) and isinstance(other, fx.Node) and is_tensor(other):
            value = reader.read(one)
            same = other.meta["val"].dtype == mask.meta["val"].dtype and mask.kwargs.get("alpha", 1) == 1
            if isinstance(value, Choice) and same:
                return value, other
    return None, None


def _is_smaller(atom: Atom, mask: fx.Node) -> bool:
    """Whether a condition's own tensor is whole only after broadcasting, so that the mask need not be made."""
    assert isinstance(atom.source, Source)
    own = shape_of(atom.source.node.meta["val"])
    return atom.source.node is not mask and (len(own) < 2 or 1 in own[-2:])


def _conjunction(graph: fx.Graph, atoms: tuple[Atom, ...], mask: fx.Node) -> fx.Node:
    """One boolean tensor; the graph's insertion point is behind the mask."""
    found: fx.Node | None = None
    for atom in atoms:
        assert isinstance(atom.source, Source)
        part = atom.source.node
        for dim in atom.source.unsqueezed:
            part = emit(graph, aten.unsqueeze.default, [part, dim], like=mask)
        if found is not None:
            part = emit(graph, aten.logical_and.default, [found, part], like=mask)
        found = part
    assert found is not None
    return found
