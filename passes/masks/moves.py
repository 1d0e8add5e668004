"""Operators of masks that move indices: views, slices, transposes, and positions looked up by positions."""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from cpcompile.passes.masks.reader import Arguments, Reader, sizes, table
from cpcompile.passes.masks.values import Choice, Source, Value, as_integer, opaque
from cpcompile.predicates import Affine, Atom, Condition
from cpcompile.sizes import Size, multiply


def _moved(value: Value | None, limits: Callable[[Affine], Affine], node: fx.Node) -> Value | None:
    """A value seen through an operator that moves indices: one condition is then said by ``node``, several are not."""
    if isinstance(value, Affine):
        return limits(value)
    if isinstance(value, Choice):
        condition = _moved(value.condition, limits, node)
        assert isinstance(condition, Condition)
        sources = tuple(Atom(None, atom.limit) for atom in condition.atoms)  # the node's numbers are no booleans
        readable = all(atom.limit is not None for atom in condition.atoms)
        return Choice(Condition(sources, condition.never), value.yes, value.no) if readable else None
    if isinstance(value, Condition) and value.atoms:
        if len(value.atoms) > 1 and any(atom.limit is None for atom in value.atoms):
            return opaque(node)
        alone = Source(node) if len(value.atoms) == 1 else None
        return Condition(tuple(Atom(alone, None if a.limit is None else limits(a.limit)) for a in value.atoms))
    return value


def _renamed(dims: dict[int, int]) -> Callable[[Affine], Affine]:
    return lambda limit: Affine.of(limit.constant, ((dims[dim], c) for dim, c in limit.coefficients if dim in dims))


def _unsqueeze(reader: Reader, node: fx.Node, arguments: Arguments) -> Value | None:
    count = len(sizes(node))
    at = arguments["dim"] % count - count
    dims = {dim: dim if dim > at else dim - 1 for dim in range(-count, 0)}
    value = reader.read(arguments["self"])
    if not isinstance(value, Condition) or len(value.atoms) < 2:
        return _moved(value, _renamed(dims), node)
    atoms: list[Atom] = []
    for atom in value.atoms:
        source = atom.source
        if isinstance(source, Source):  # its own dimension may be further left than what it has
            own = source.node.meta["val"].dim() + len(source.unsqueezed)
            source = Source(source.node, (*source.unsqueezed, at)) if -at <= own + 1 else source
        atoms.append(Atom(source, None if atom.limit is None else _renamed(dims)(atom.limit)))
    return Condition(tuple(atoms))


def _expand(reader: Reader, node: fx.Node, arguments: Arguments) -> Value | None:
    value = reader.read(arguments["self"])
    return value if isinstance(value, (Affine, Condition, Choice)) else None


def _view(reader: Reader, node: fx.Node, arguments: Arguments) -> Value | None:
    """Only views that add or drop dimensions of size one."""
    source = arguments["self"]
    before, after = ([d for d, size in sizes(x).items() if size != 1] for x in (source, node))
    if [sizes(source)[d] for d in before] != [sizes(node)[d] for d in after]:
        return None
    return _moved(reader.read(source), _renamed(dict(zip(before, after, strict=True))), node)


def _permute(reader: Reader, node: fx.Node, arguments: Arguments) -> Value | None:
    count = len(sizes(node))
    if "dims" in arguments:
        order = [dim % count for dim in arguments["dims"]]
    else:
        order = list(range(count))
        one, other = (arguments.get(name, default) % count for name, default in (("dim0", 0), ("dim1", 1)))
        order[one], order[other] = order[other], order[one]
    dims = {old - count: new - count for new, old in enumerate(order)}
    return _moved(reader.read(arguments["self"]), _renamed(dims), node)


def _slice(reader: Reader, node: fx.Node, arguments: Arguments) -> Value | None:
    source = arguments["self"]
    count = len(sizes(source))
    dim = (arguments["dim"] or 0) % count - count
    start, step, size = arguments["start"] or 0, arguments["step"], sizes(source)[dim]
    if not isinstance(start, int) or not isinstance(step, int) or ((start < 0 or not isinstance(size, int)) and start):
        return None
    first = min(start, size) if isinstance(size, int) else start

    def sliced(limit: Affine) -> Affine:
        kept = [(d, c * step if d == dim else c) for d, c in limit.coefficients]
        return Affine.of(limit.constant, kept).plus(multiply(first, limit.dims.get(dim, 0)))

    return _moved(reader.read(source), sliced, node)


def _index(reader: Reader, node: fx.Node, arguments: Arguments) -> Value | None:
    """Every dimension by a tensor of known positions."""
    source = arguments["self"]
    count = len(sizes(source))
    value = reader.read(source)
    at = [None if index is None else as_integer(reader.read(index)) for index in arguments["indices"]]
    if len(at) != count or value is None:
        return None
    known = [index for index in at if index is not None]
    if len(known) != count:
        return None

    def substituted(limit: Affine) -> Affine:
        result = Affine(limit.constant)
        for dim, c in limit.coefficients:
            result = result + known[dim].times(c)
        return result

    for index, size in zip(known, sizes(source).values(), strict=True):
        if index.over([(0, n) for n in sizes(node).values()]) != "all" or not _below(index, size, node):
            return None  # from the end, or outside
    return _moved(value, substituted, node)


def _below(index: Affine, size: Size, node: fx.Node) -> bool:
    rest = index.times(-1).plus(size).plus(-1)
    return rest.over([(0, n) for n in sizes(node).values()]) == "all"


OPERATORS = table(
    [
        ("unsqueeze", ("default",), _unsqueeze),
        ("expand", ("default",), _expand),
        ("view", ("default",), _view),
        ("reshape", ("default",), _view),
        ("squeeze", ("dim",), _view),
        ("permute", ("default",), _permute),
        ("transpose", ("int",), _permute),
        ("t", ("default",), _permute),
        ("slice", ("Tensor",), _slice),
        ("index", ("Tensor",), _index),
    ]
)
