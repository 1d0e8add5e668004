"""What a rewritten program does, in a user's words: sites, fallbacks, inserted reshards, bytes, notes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text
from torch import fx

from cpcompile.assemble import all_coords
from cpcompile.costs import all_reduce_bytes, numbered, numbered_site, reshard_bytes, ring_bytes
from cpcompile.cotangents import has_gradient
from cpcompile.decision import Decision, decision, is_tensor, module_of, tensor_operands
from cpcompile.graphs import source_line
from cpcompile.layout import Axis, Layout
from cpcompile.ops import neutral


@dataclass(frozen=True)
class SiteReport:
    """One attention call.

    bytes_sent: by each rank in the forward pass, in rank order. considered: where the mesh left the kind open, what
    each possible one sends, the largest number of bytes over the ranks.
    """

    node: str
    module: str
    kind: str
    query: str
    key: str
    bytes_sent: tuple[int, ...]
    reason: str
    considered: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class FallbackReport:
    """An operator that runs on gathered operands, and why."""

    node: str
    module: str
    operator: str
    reason: str
    bytes_sent: tuple[int, ...]
    source: str | None


@dataclass(frozen=True)
class ReshardReport:
    """A change of layout that the plan did not ask for. ``node`` is what it was inserted for."""

    node: str
    module: str
    kind: str
    source: str
    target: str
    bytes_sent: tuple[int, ...]
    why: str


@dataclass(frozen=True)
class Report:
    """All of it.

    bytes_sent: by each rank in the forward pass, predicted from the layouts. gradients: where they are left raw, for
    each parameter whether every rank holds the whole of it ("full") or a term of its sum ("pending").
    """

    axes: tuple[Axis, ...]
    sites: tuple[SiteReport, ...]
    fallbacks: tuple[FallbackReport, ...]
    inserted: tuple[ReshardReport, ...]
    notes: tuple[str, ...]
    bytes_sent: tuple[int, ...]
    gradients: tuple[tuple[str, str], ...] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        ranks = " x ".join(f"{axis.name} {axis.size}" for axis in self.axes)
        yield Text(f"{ranks}: {len(self.sites)} attention sites, {len(self.fallbacks)} fallbacks", style="bold")
        yield _sites_table(self.sites)
        if self.fallbacks:
            yield _table(
                "gathered operators",
                ("module", "operator", "why", "sent"),
                ((x.module or "(root)", x.operator, x.reason, largest(x.bytes_sent)) for x in self.fallbacks),
            )
        if self.inserted:
            yield _table(
                "reshards that the plan did not ask for",
                ("module", "for", "kind", "from", "to", "sent"),
                (
                    (x.module or "(root)", x.node, x.kind, x.source, x.target, largest(x.bytes_sent))
                    for x in self.inserted
                ),
            )
        if self.gradients:
            yield _table("raw gradients", ("parameter", "on each rank"), self.gradients)
        for note in self.notes:
            yield Text(f"note: {note}", style="yellow")
        yield Text(f"forward pass: at most {largest(self.bytes_sent)} leave a rank")

    def __str__(self) -> str:
        return rendered(self)


def rendered(what: object) -> str:
    """Plain text of anything that rich can print."""
    console = Console(width=140, no_color=True, highlight=False)
    with console.capture() as captured:
        console.print(what)
    return captured.get()


def _sites_table(sites: Iterable[SiteReport]) -> Table:
    """Sites that differ in nothing but their module's number share a row."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for site in sites:
        others = ", ".join(f"{kind} {largest([sent])}" for kind, sent in site.considered if kind != site.kind)
        remarks = [remark for remark in (site.reason, others and f"not {others}") if remark]
        kind = f"{site.kind} ({'; '.join(remarks)})" if remarks else site.kind
        rows.setdefault((kind, site.query, site.key, largest(site.bytes_sent)), []).append(site.module or "(root)")
    named = (
        (modules[0] if len(modules) == 1 else f"{modules[0]} ... {modules[-1]}", str(len(modules)), *row)
        for row, modules in rows.items()
    )
    return _table("attention", ("module", "sites", "kind", "query", "key", "sent"), named)


def _table(title: str, columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def largest(sizes: Iterable[int]) -> str:
    """The largest of some byte counts in a short form."""
    count = max(sizes, default=0)
    unit = min(int(math.log2(count) // 10), 4) if count else 0
    return f"{count} B" if unit == 0 else f"{count / 1024**unit:.1f} {'KMGT'[unit - 1]}iB"


def make_report(
    module: fx.GraphModule,
    axes: tuple[Axis, ...],
    notes: Iterable[str],
    *,
    raw_gradients: bool = False,
    known: Mapping[Any, int] | None = None,
) -> Report:
    """Read a rewritten graph's decisions; with ``raw_gradients`` what each parameter's gradient is on a rank.

    Where sizes are symbols, ``known`` has their values in the captured call, for which bytes are given.
    """
    ranks = all_coords(axes)
    sites: list[SiteReport] = []
    fallbacks: list[FallbackReport] = []
    inserted: list[ReshardReport] = []
    sent: dict[fx.Node, tuple[int, ...]] = {}
    for node in module.graph.nodes:
        if node.target in neutral.RESHARDS:
            sent[node] = _bytes_of(node, ranks, known or {})
        elif decision(node).site is not None:
            sent[node] = _ring_of(node, ranks, known or {})
    nothing = (0,) * len(ranks)
    total = _sum([nothing, *sent.values()])
    for node in module.graph.nodes:
        made = decision(node)
        if made.site is not None:
            around = [n for n in (*_behind(node), *node.users) if n in sent and decision(n).why == "site"]
            query, key = str(_outside(node, 0)), str(_outside(node, 1))
            moved = _sum(sent[n] for n in dict.fromkeys((node, *around)))
            sites.append(
                SiteReport(
                    node.name,
                    module_of(node),
                    made.site.kind,
                    query,
                    key,
                    moved,
                    made.site.reason,
                    made.site.considered,
                )
            )
        if made.fallback is not None:
            around = [n for n in node.all_input_nodes if n in sent and n.target in neutral.RESHARDS]
            moved = _sum([nothing, *(sent[n] for n in around)])
            operator = str(node.target).removeprefix("aten.")
            fallbacks.append(
                FallbackReport(node.name, module_of(node), operator, made.fallback, moved, source_line(node))
            )
        if node.target in neutral.RESHARDS and made.why not in ("plan", "site"):
            (operand,) = tensor_operands(node)
            inserted.append(
                ReshardReport(
                    _target_name(node),
                    module_of(node),
                    str(node.target).removeprefix("cpcompile.").removesuffix(".default"),
                    str(decision(operand).layout),
                    str(made.layout),
                    sent[node],
                    made.why or "rule",
                )
            )
    gradients = tuple(
        (str(node.target), decision(node).cotangent.value)
        for node in module.graph.nodes
        if raw_gradients and node.op == "get_attr" and is_tensor(node) and has_gradient(node)
    )
    return Report(axes, tuple(sites), tuple(fallbacks), tuple(inserted), tuple(notes), total, gradients)


def _target_name(node: fx.Node) -> str:
    """What a reshard was inserted for: the value it changes and its first user."""
    users = [user.name for user in node.users]
    return f"{node.all_input_nodes[0].name} -> {users[0] if users else '-'}"


def _behind(node: fx.Node) -> list[fx.Node]:
    """The nodes that made a site's operands, through the items of a packed exchange."""
    found: list[fx.Node] = []
    for operand in node.all_input_nodes:
        source = operand.args[0] if operand.args else None
        found.append(source if isinstance(source, fx.Node) and not is_tensor(source) else operand)
    return found


def _outside(node: fx.Node, index: int) -> Layout:
    """How the query (0) or key (1) of a site lies before its exchange."""
    operand = tensor_operands(node)[index]
    source = operand.args[0] if operand.args else None
    if isinstance(source, fx.Node) and source.target is neutral.exchange:
        item = operand.args[1]
        assert isinstance(item, int)
        return decision(tensor_operands(source)[item]).layout
    if isinstance(source, fx.Node) and operand.target is neutral.shard and decision(operand).why == "site":
        return decision(source).layout
    return decision(operand).layout


def _bytes_of(node: fx.Node, ranks: list[dict[str, int]], known: Mapping[Any, int]) -> tuple[int, ...]:
    """Bytes that each rank sends for a reshard in the forward pass."""
    made: Decision = decision(node)
    operands = tensor_operands(node)
    if node.target is neutral.reduce:
        group = math.prod(partial.axis.size for partial in decision(operands[0]).layout.partial)
        itemsize = neutral.accumulation_dtype(operands[0].meta["val"].dtype).itemsize
        return tuple(all_reduce_bytes(numbered(made.layout, known), itemsize, group, ranks))
    changes = [
        (numbered(decision(operand).layout, known), numbered(target, known), operand.meta["val"].dtype.itemsize)
        for operand, target in zip(operands, made.results, strict=True)
        if target is not None
    ]
    return _sum(tuple(reshard_bytes(*change, ranks)) for change in changes)


def _ring_of(node: fx.Node, ranks: list[dict[str, int]], known: Mapping[Any, int]) -> tuple[int, ...]:
    """Bytes that each rank sends inside an attention call."""
    site = decision(node).site
    assert site is not None
    key, value = tensor_operands(node)[1:3]
    found = ring_bytes(numbered_site(site, known), key.meta["val"].dtype, ranks, shared=key is value)
    return tuple(sent.forward for sent in found)


def _sum(rows: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(map(sum, zip(*rows, strict=True)))
