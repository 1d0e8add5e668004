"""Graphs as text: one node a line, in the order of the graph, what the passes decided as comments beside it.

    %hidden_states = input                                     # (2) (64) (8)           pending
    %shard = cp.shard(%hidden_states)                          # (2) (64 cp) (8)        local    plan
    %linear = linear(%shard, %proj.weight, %proj.bias)         # (2) (64 cp) (16)       local
    return %gather                                             # (2) (64) (16)

The same printer serves captured graphs (global shapes), rewritten ones (layouts, cotangents, reasons) and lowered ones
(local shapes, where it is told which rank they are of).
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from cpcompile.decision import Cotangent, Decision, tensor_operands
from cpcompile.layout import Coords, Layout
from cpcompile.ops import collectives, lowered, neutral

if TYPE_CHECKING:
    from rich.text import Text

_END = 2**63 - 1
_SHORT = {"scaled_dot_product_attention": "sdpa", "banded_attention": "banded"}
_ENTER = (neutral.enter, collectives.enter_sum)
_NAMESPACES = {"aten": "", "cpcompile": "cp.", "_c10d_functional": "c10d."}
_MAX_CODE, _MAX_LAYOUT = 88, 44  # columns; what is longer pushes its own comment to the right
_DTYPES = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c"}


class Names(Mapping[fx.Node, str]):
    """A name for every node of a graph, the same in every printed form of it.

    A parameter has its dotted name, and again as ``enter.`` that name once it has entered. A node of a lowered graph is
    called what its origin is called. Any other node has its own name without that of the overload which fx appends.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._names: dict[fx.Node, str] = {}
        origins: dict[fx.Graph, Names] = {}
        taken: set[str] = set()
        late: list[fx.Node] = []
        for node in graph.nodes:
            origin = node.meta.get("origin")
            if isinstance(origin, fx.Node):
                if origin.graph not in origins:
                    origins[origin.graph] = Names(origin.graph)
                name = origins[origin.graph][origin]
            else:
                name = self._dotted(node) or f"%{node.name}"
                if _base(node) is not None:
                    late.append(node)
                    continue
            taken.add(name)
            self._names[node] = name
        for node in late:
            base, number = _base(node) or ("", "")
            name = f"%{base}{number}"
            count = 0
            while name in taken:
                count += 1
                name = f"%{base}_{count}"
            taken.add(name)
            self._names[node] = name

    def _dotted(self, node: fx.Node) -> str | None:
        if node.op == "get_attr":
            return f"%{node.target}"
        packed = node.args[0] if node.target is operator.getitem else None
        if isinstance(packed, fx.Node) and packed.target in _ENTER:
            entered = packed.args[0][node.args[1]]  # type: ignore[index]
            return f"%enter.{self._names[entered].removeprefix('%')}"  # type: ignore[index]
        return None

    def __getitem__(self, node: fx.Node) -> str:
        return self._names.get(node, f"%{node.name}")

    def __iter__(self) -> Iterator[fx.Node]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _base(node: fx.Node) -> tuple[str, str] | None:
    """The short name of a node's operator and the node's number, where fx named it by its operator."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    name = node.target._schema.name.partition("::")[2].lstrip("_")
    match = re.fullmatch(rf"_*{re.escape(name)}(_{node.target._overloadname.lower()})?(_\d+)?", node.name)
    return (_SHORT.get(name, name), match[2] or "") if match else None


def operator_name(target: Any) -> str:
    """What a call is printed as: ``linear``, ``cp.shard``."""
    if isinstance(target, torch._ops.OpOverload):
        namespace, _, name = target._schema.name.partition("::")
        return _NAMESPACES.get(namespace, f"{namespace}.") + _SHORT.get(name, name)
    return getattr(target, "__name__", str(target))


def text(
    module: fx.GraphModule,
    *,
    layouts: bool = True,
    coords: Coords | None = None,
    parameters: bool = True,
    max_items: int | None = 16,
) -> str:
    """A graph as readable text.

    Args:
        module: a captured, rewritten or lowered graph; bodies of regions that it holds are printed below it.
        layouts: write comments.
        coords: of the rank that a lowered graph is of; without them its comments have no shapes.
        parameters: give parameters and buffers lines of their own, beside being used by name.
        max_items: lists of literals that are longer are cut in the middle.
    """
    names = Names(module.graph)
    lines: list[tuple[str, tuple[str, ...]]] = []
    bodies: list[tuple[str, fx.GraphModule]] = []
    for node in module.graph.nodes:
        if node.op == "get_attr" and isinstance(value := operator.attrgetter(str(node.target))(module), fx.GraphModule):
            bodies.append((names[node], value))
        elif not parameters and (node.op == "get_attr" or names[node].startswith("%enter.")):
            continue
        else:
            lines.append((_code(node, names, max_items), _comments(node, coords) if layouts else ()))
    printed = _aligned(lines)
    for name, body in bodies:
        inner = text(body, layouts=layouts, coords=coords, parameters=parameters, max_items=max_items)
        printed += ["", f"{name}:", *(f"    {line}" for line in inner.splitlines())]
    return "\n".join(printed) + "\n"


def rich_text(module: fx.GraphModule, **options: Any) -> Text:
    """The same text in colour, for a rich console; ``options`` are those of ``text``."""
    from rich.text import Text

    found = Text(text(module, **options), no_wrap=True)
    found.highlight_regex(r"#.*", "dim")
    found.highlight_regex(r"%[\w.]+", "cyan")
    found.highlight_regex(r"\bcp\.\w+", "bold magenta")
    found.highlight_regex(r"(?<== )(?!cp\.)\w+(?=\()|^return\b", "bold")
    found.highlight_regex(r"\bpending\b", "yellow")
    found.highlight_regex(r"\bfallback: .*", "bold red")
    return found


def _code(node: fx.Node, names: Names, max_items: int | None) -> str:
    def show(value: Any) -> str:
        return _value(value, names, max_items)

    if node.op == "placeholder":
        return f"{names[node]} = input"
    if node.op == "get_attr":
        value = operator.attrgetter(str(node.target))(node.graph.owning_module)
        return f"{names[node]} = {'parameter' if isinstance(value, torch.nn.Parameter) else 'buffer'}"
    if node.op == "output":
        values = node.args[0]
        return f"return {', '.join(map(show, values)) if isinstance(values, (list, tuple)) else show(values)}"
    if node.target is operator.getitem:
        return f"{names[node]} = {show(node.args[0])}[{show(node.args[1])}]"
    given = list(map(show, node.args))
    if node.target in lowered.LOWERED:
        assert isinstance(node.target, torch._ops.OpOverload)
        schema = node.target._schema.arguments
        given = [value if not at else f"{schema[at].name}={value}" for at, value in enumerate(given)]
    passed = [*given, *(f"{name}={show(value)}" for name, value in node.kwargs.items())]
    return f"{names[node]} = {operator_name(node.target)}({', '.join(passed)})"


def _value(value: Any, names: Names, max_items: int | None) -> str:
    if isinstance(value, fx.Node):
        return names[value]
    if isinstance(value, (list, tuple)):
        items = [_value(item, names, max_items) for item in value]
        if max_items is not None and len(items) > max_items and not any(isinstance(item, fx.Node) for item in value):
            half = max_items // 2
            items = [*items[:half], f"... {len(items) - 2 * half} more ...", *items[-half:]]
        return f"[{', '.join(items)}]"
    if isinstance(value, int) and not isinstance(value, bool) and value == _END:
        return ":"
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return str(value).removeprefix("torch.")
    if isinstance(value, str):
        return repr(value)
    return str(value)


def _comments(node: fx.Node, coords: Coords | None) -> tuple[str, ...]:
    """What stands beside a node: how it lies, its cotangent, and remarks."""
    origin = node.meta.get("origin")
    if isinstance(origin, fx.Node):
        return _lowered_comments(origin, coords)
    made = node.meta.get("cp")
    if not isinstance(made, Decision):
        return (_shapes(node.meta.get("val")),)
    if node.op == "output":
        return (", ".join(map(str, made.operands)),)
    lies = "; ".join(str(layout) for layout in made.results if layout is not None)
    state = "" if made.cotangent is Cotangent.NONE else made.cotangent.value
    remarks = [*_wants(node, made), made.why if node.target in neutral.RESHARDS and made.why else ""]
    if made.site is not None:
        reason = f" ({made.site.reason})" if made.site.reason else ""
        remarks.append(f"site: {made.site.kind}{reason}")
    if made.fallback:
        remarks.append(f"fallback: {made.fallback}")
    if made.note:
        remarks.append(f"note: {made.note}")
    return lies, state, "; ".join(remark for remark in remarks if remark)


def _wants(node: fx.Node, made: Decision) -> Iterator[str]:
    """Where operands must become something else first, and where a result returns to another layout."""
    operands = tensor_operands(node)
    if len(operands) == len(made.operands) and node.target not in neutral.RESHARDS:
        for position, (operand, wanted) in enumerate(zip(operands, made.operands, strict=True)):
            given = operand.meta.get("cp")
            seen = given.results if isinstance(given, Decision) and given.returns is None else given and given.returns
            if seen and seen[0] != wanted:
                yield f"operand {position} as {wanted}"
    if made.returns is not None:
        yield f"returns to {'; '.join(str(layout) for layout in made.returns if layout is not None)}"


def _lowered_comments(origin: fx.Node, coords: Coords | None) -> tuple[str, ...]:
    made = origin.meta.get("cp")
    if not isinstance(made, Decision) or origin.op == "output":
        return ()
    shapes = ""
    if coords is not None:
        shapes = "; ".join(_local_shape(layout, coords) for layout in made.results if layout is not None)
    change = operator_name(origin.target) if origin.target in neutral.NEUTRAL else ""
    return shapes, f"{change} ({made.why})" if change and made.why else change


def _local_shape(layout: Layout, coords: Coords) -> str:
    return f"[{', '.join(map(str, layout.local_shape(coords)))}]"


def _shapes(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return "; ".join(_shapes(item) for item in value)
    if not isinstance(value, torch.Tensor):
        return "" if value is None else type(value).__name__.replace("SymInt", "int")
    dtype = re.sub(r"^[a-z]+", lambda name: _DTYPES.get(name[0], name[0]), str(value.dtype).removeprefix("torch."))
    return f"{dtype}[{', '.join(map(str, value.shape))}]"


def _aligned(lines: list[tuple[str, tuple[str, ...]]]) -> list[str]:
    """Code and comments in columns."""
    start = max((len(code) for code, _ in lines if len(code) <= _MAX_CODE), default=0)
    widths: dict[int, int] = {}
    for _, comments in lines:
        for column, comment in enumerate(comments[:-1]):
            if len(comment) <= _MAX_LAYOUT:
                widths[column] = max(widths.get(column, 0), len(comment))
    printed: list[str] = []
    for code, comments in lines:
        columns = [comment.ljust(widths.get(column, 0)) for column, comment in enumerate(comments)]
        comment = "  ".join(column for column in columns if column).rstrip()
        printed.append(f"{code:<{start}}  # {comment}" if comment else code)
    return printed
