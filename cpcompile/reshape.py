"""The algebra of layouts under views: cut, factor, reshape, and the meeting of two layouts of one tensor.

Each function answers with a layout, or with a ``Refusal`` that says which cut does not fall on a boundary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cpcompile.errors import Refusal
from cpcompile.layout import Dim, Layout, Part, Product, Segment, multiplied, whole
from cpcompile.sizes import Size, add, at_most, divide, product, subtract


def cut(dim: Dim, start: Size, stop: Size) -> Dim | Refusal:
    """The indices ``start <= i < stop`` of a dim. Whole segments may be cut anywhere, sharded ones at their ends."""
    if at_most(stop, start):
        return whole(0)
    found: list[Part | Dim] = []
    base: Size = 0
    for part in dim.parts:
        end = add(base, part.size)
        piece = _cut_part(part, base, end, start, stop)
        if isinstance(piece, Refusal):
            return Refusal(f"cut {start}:{stop} of ({dim}): {piece.reason}")
        if piece is not None:
            found.append(piece)
        base = end
    return Dim.of(*found)


def _cut_part(part: Part, base: Size, end: Size, start: Size, stop: Size) -> Part | Dim | Refusal | None:
    """What ``start:stop`` keeps of the part that lies at ``base:end``."""
    if at_most(end, start) or at_most(stop, base):
        return None
    if at_most(start, base) and at_most(end, stop):
        return part
    low = base if at_most(start, base) else start if at_most(base, start) else None
    high = end if at_most(end, stop) else stop if at_most(stop, end) else None
    if low is None or high is None:
        return Refusal("the order of its symbolic bounds is not known")
    if isinstance(part, Segment):
        if part.is_replicated:
            return Segment(subtract(high, low))
        return Refusal(f"it falls inside the sharded segment ({part})")
    low, high = subtract(low, base), subtract(high, base)
    first, last = divide(low, part.inner.size), divide(high, part.inner.size)
    if first is not None and last is not None:  # whole rows
        rows = _cut_part(part.outer, 0, part.outer.size, first, last)
        if isinstance(rows, Refusal) or rows is None:
            return rows
        outer = multiplied(Dim.of(rows), part.inner)
        assert outer is not None
        return outer
    stride = part.inner.size
    if not (isinstance(low, int) and isinstance(high, int) and isinstance(stride, int) and part.outer.is_replicated):
        return Refusal(f"it does not fall between the rows of ({part})")
    row, last_row = low // stride, (high - 1) // stride
    pieces: list[Dim] = []
    for index in range(row, last_row + 1):
        piece = cut(part.inner, max(low - index * stride, 0), min(high - index * stride, stride))
        if isinstance(piece, Refusal):
            return piece
        pieces.append(piece)
    return Dim.of(*pieces)


def factor(dim: Dim, outer: Size, inner: Size) -> tuple[Dim, Dim] | Refusal:
    """The dims that a view of one dim as (outer, inner) gives, row-major."""
    if inner == 1:
        return dim, whole(1)
    if outer == 1:
        return whole(1), dim
    if dim.is_replicated:
        return whole(outer), whole(inner)
    found = _factor_single(dim.parts[0], outer, inner) if len(dim.parts) == 1 else _factor_parts(dim, inner)
    return found or _factor_pieces(dim, outer, inner) or Refusal(f"({dim}) does not align with rows of {inner}")


def _factor_single(part: Part, outer: Size, inner: Size) -> tuple[Dim, Dim] | None:
    if isinstance(part, Segment):
        rows = part.in_units_of(inner)
        return _factor_axes(part, inner) if rows is None else (Dim.of(rows), whole(inner))
    below = part.inner.size
    if inner == below:
        return Dim.of(part.outer), part.inner
    if (copies := divide(inner, below)) is not None:
        split = factor(Dim.of(part.outer), outer, copies)
        if isinstance(split, Refusal) or (joined := multiplied(split[1], part.inner)) is None:
            return None
        return split[0], joined
    if (rows_below := divide(below, inner)) is not None:
        split = factor(part.inner, rows_below, inner)
        if isinstance(split, Refusal) or (joined := multiplied(Dim.of(part.outer), split[0])) is None:
            return None
        return joined, split[1]
    return None


def _factor_axes(segment: Segment, inner: Size) -> tuple[Dim, Dim] | None:
    """Outer axes divide the rows, inner ones the columns: (128 dp.cp) as rows of 64."""
    for depth in range(1, len(segment.axes)):
        split = segment.split_at(depth)
        if split is not None and split[1].size == inner:
            return Dim.of(split[0]), Dim.of(split[1])
    return None


def _factor_parts(dim: Dim, inner: Size) -> tuple[Dim, Dim] | None:
    """Every run of parts that fills whole rows factors alike: (64 cp ++ 16 cp) as rows of 4."""
    outers: list[Dim] = []
    inners: set[Dim] = set()
    group: list[Part] = []
    for part in dim.parts:
        group.append(part)
        run = Dim.of(*group)
        rows = divide(run.size, inner)
        if rows is None:
            continue
        if run == dim:
            return None
        split = factor(run, rows, inner)
        if isinstance(split, Refusal):
            return None
        outers.append(split[0])
        inners.add(split[1])
        group = []
    return (Dim.of(*outers), inners.pop()) if not group and len(inners) == 1 else None


def _factor_pieces(dim: Dim, outer: Size, inner: Size) -> tuple[Dim, Dim] | None:
    """All rows are cut alike: a row-major repetition whose copies share a boundary segment."""
    if not isinstance(outer, int) or not isinstance(inner, int) or outer > 64:
        return None
    row = cut(dim, 0, inner)
    if isinstance(row, Refusal):
        return None
    same = all(cut(dim, index * inner, (index + 1) * inner) == row for index in range(1, outer))
    return (whole(outer), row) if same else None


def merge(dims: Sequence[Dim]) -> Dim | Refusal:
    """The dim that flattening these dims gives, row-major."""
    result = whole(1)
    for dim in dims:
        joined = multiplied(result, dim)
        if joined is None:
            return Refusal(f"({result}) and ({dim}) share an axis, so no rank holds a row of both")
        result = joined
    return result


def split_dim(dim: Dim, shape: Sequence[Size]) -> tuple[Dim, ...] | Refusal:
    """The dims that a view of one dim as ``shape`` gives."""
    found: list[Dim] = []
    rest = dim
    for index, size in enumerate(shape):
        halves = factor(rest, size, product(shape[index + 1 :]))
        if isinstance(halves, Refusal):
            return halves
        found.append(halves[0])
        rest = halves[1]
    return tuple(found)


def reshape(layout: Layout, shape: Sequence[Size]) -> Layout | Refusal:
    """The layout of a row-major view of the tensor with ``shape``; partial values pass through views."""
    dims = layout.dims
    head = 0
    while head < min(len(dims), len(shape)) and dims[head].size == shape[head]:
        head += 1
    tail = 0
    while tail < min(len(dims), len(shape)) - head and dims[-1 - tail].size == shape[-1 - tail]:
        tail += 1
    middle = dims[head : len(dims) - tail]
    target = tuple(shape[head : len(shape) - tail])
    if any(size == 0 for size in shape):
        if layout.is_sharded:
            return Refusal("a view of an empty tensor")
        return replace(layout, dims=tuple(whole(size) for size in shape))
    if not target and middle:  # only ones go; a rank may hold nothing of a one, then it holds nothing of its neighbour
        if all(dim == whole(1) for dim in middle):
            return replace(layout, dims=(*dims[:head], *dims[len(dims) - tail :]))
        head, tail, middle, target = 0, 0, dims, tuple(shape)
    merged = merge(middle)
    if isinstance(merged, Refusal):
        return merged
    pieces = split_dim(merged, target)
    if isinstance(pieces, Refusal):
        return pieces
    return replace(layout, dims=(*dims[:head], *pieces, *dims[len(dims) - tail :]))


def meet(left: Dim, right: Dim) -> Dim | Refusal:
    """The dim in which two layouts of equal size agree at no cost: what either holds whole is sliced like the other."""
    if isinstance(left.size, int) and isinstance(right.size, int) and left.size != right.size:
        return Refusal(f"({left}) and ({right}) differ in size")
    if left == right or right.is_replicated:
        return left
    if left.is_replicated:
        return right
    if (finer := _finer(left, right)) is not None:
        return finer
    met: list[Part | Dim] = []
    lefts, rights = list(left.parts), list(right.parts)
    while lefts and rights:
        a, b = lefts.pop(0), rights.pop(0)
        if (agreed := _meet_parts(a, b)) is not None:
            met.append(agreed)
        elif _is_whole(a) and a.size != b.size and at_most(b.size, a.size):
            met.append(b)
            lefts.insert(0, Segment(subtract(a.size, b.size)))
        elif _is_whole(b) and a.size != b.size and at_most(a.size, b.size):
            met.append(a)
            rights.insert(0, Segment(subtract(b.size, a.size)))
        elif isinstance(a, Product) and (rows := _first_row(a)) is not None:
            lefts[:0], rights[:0] = rows, [b]
        elif isinstance(b, Product) and (rows := _first_row(b)) is not None:
            lefts[:0], rights[:0] = [a], rows
        else:
            return Refusal(f"({left}) meets ({right})")
    return Dim.of(*met) if not lefts and not rights else Refusal(f"({left}) meets ({right})")


def _meet_parts(a: Part, b: Part) -> Part | Dim | None:
    if a == b:
        return a
    if a.size != b.size:
        return None
    if _is_whole(a) or _is_whole(b):
        return b if _is_whole(a) else a
    if isinstance(a, Product) and isinstance(b, Product) and a.inner.size == b.inner.size:
        outer, inner = meet(Dim.of(a.outer), Dim.of(b.outer)), meet(a.inner, b.inner)
        return None if isinstance(outer, Refusal) or isinstance(inner, Refusal) else multiplied(outer, inner)
    return _finer(Dim.of(a), Dim.of(b))


def _finer(left: Dim, right: Dim) -> Dim | None:
    """The one of two dims that divides the other's shares further."""
    for fine, coarse in ((left, right), (right, left)):
        if fine.axes > coarse.axes and fine.gathered(fine.axes - coarse.axes) == coarse:
            return fine
    return None


def _is_whole(part: Part) -> bool:
    return isinstance(part, Segment) and part.is_replicated


def _first_row(part: Product) -> list[Part] | None:
    """The product with its first row written out."""
    if not part.outer.is_replicated or not isinstance(part.outer.size, int) or part.outer.size < 2:
        return None
    rest = Dim.of(Product(Segment(part.outer.size - 1), part.inner)) if part.outer.size > 2 else part.inner
    return [*part.inner.parts, *rest.parts]


def is_slice_of(whole_dim: Dim, target: Dim) -> bool:
    """Whether a rank that holds ``whole_dim`` already holds all that ``target`` asks of it."""
    return meet(whole_dim, target) == target


def first_unequal(left: Dim, right: Dim) -> tuple[Size, Size] | None:
    """The sizes of the first two parts that differ between dims of equal size, where both are divided alike."""
    for a, b in zip(left.parts, right.parts, strict=False):
        if a.size != b.size:
            alike = isinstance(a, Segment) and isinstance(b, Segment) and a.axes == b.axes and not a.is_replicated
            symbolic = not (isinstance(a.size, int) and isinstance(b.size, int))
            return (a.size, b.size) if alike and symbolic else None
    return None
