"""The one property that every rule has to pass, on real numbers.

A call on global tensors is asked of its rule; the tensors are sharded as the answer wants them, every rank runs the
local call, and the results, assembled as the answer promises, are the global call's. The same for gradients: cotangents
enter as their layout has them (a shard's at its owner, of what several ranks hold a term on each, of a pending sum the
whole on every rank), and the operands' gradients, assembled in the same way, are the global call's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves, tree_map

from cpcompile.assemble import all_coords, disagreement, unshard
from cpcompile.errors import Refusal
from cpcompile.layout import Coords, Layout
from cpcompile.ops.neutral import accumulation_dtype
from cpcompile.passes.rules import rule_for
from cpcompile.passes.rules.bind import bind, localized
from cpcompile.passes.rules.call import Answer, Call, Operand, Result
from cpcompile.reshape import is_slice_of
from cpcompile.sizes import Size
from tests.strategies import Mesh

Kwargs = Mapping[str, Any] | None


def ask(target: OpOverload, args: Sequence[Any], layouts: Sequence[Layout], kwargs: Kwargs = None) -> Answer | Refusal:
    """What the rule says to a call on ``args``, whose tensors lie as ``layouts``, in their order."""
    rule = rule_for(target)
    assert rule is not None, f"there is no rule for {target}"
    return rule(call_of(target, args, layouts, kwargs or {}))


def call_of(target: OpOverload, args: Sequence[Any], layouts: Sequence[Layout], kwargs: Mapping[str, Any]) -> Call:
    """The call in a rule's terms."""
    tensors = _tensors((args, kwargs))
    of = {id(x): Operand(layout, x.dtype) for x, layout in zip(tensors, layouts, strict=True)}
    for tensor, layout in zip(tensors, layouts, strict=True):
        assert layout.shape == tuple(tensor.shape)
        assert layout.axis_conflict() is None
    results = tuple(Result(tuple(x.shape), x.dtype) for x in _results(target(*args, **kwargs)))
    return Call(target, bind(target, args, kwargs, lambda x: of[id(x)]), results)


def check(
    target: OpOverload,
    args: Sequence[Any],
    layouts: Sequence[Layout],
    mesh: Mesh,
    *,
    kwargs: Kwargs = None,
    free: bool = False,
    values: bool = True,
) -> Answer:
    """The property. ``free``: nothing but slicing may be asked of any operand. ``values``: False where results have no
    values of their own (``empty``)."""
    kwargs = kwargs or {}
    answer = ask(target, args, layouts, kwargs)
    assert isinstance(answer, Answer), f"{target} of {[str(layout) for layout in layouts]}: {answer.reason}"
    needed = needed_layouts(target, args, kwargs, answer)
    for layout in (*needed, *answer.results):
        assert layout.axis_conflict() is None, f"{layout}: {layout.axis_conflict()}"
    for layout, wanted in zip(layouts, needed, strict=True):
        assert layout.shape == wanted.shape
        assert wanted.partial in ((), layout.partial), "no operand becomes a pending sum"
        if free:
            slices = all(is_slice_of(has, gets) for has, gets in zip(layout.dims, wanted.dims, strict=True))
            assert slices, f"{target}: {layout} has to become {wanted}"
            assert layout.partial == wanted.partial, f"{target}: {layout} has to become {wanted}"
    _Property(target, args, kwargs, answer, needed, mesh).run(values=values)
    return answer


def refused(target: OpOverload, args: Sequence[Any], layouts: Sequence[Layout], *, kwargs: Kwargs = None) -> str:
    """The reason for which a rule has to refuse a call."""
    answer = ask(target, args, layouts, kwargs)
    assert isinstance(answer, Refusal), f"{target} of {[str(layout) for layout in layouts]} is not refused: {answer}"
    return answer.reason


def needed_layouts(
    target: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], answer: Answer
) -> tuple[Layout, ...]:
    """The layouts that an answer wants, for each tensor of a call in order."""
    names = [argument.name for argument in target._schema.arguments]
    passed = {**dict(zip(names, args, strict=False)), **kwargs}
    assert set(answer.operands) <= set(passed), "the answer names operands that were not passed"
    return tuple(_needed(passed, answer))


def _needed(passed: Mapping[str, Any], answer: Answer) -> Iterator[Layout]:
    for name, value in passed.items():
        wanted = answer.operands.get(name)
        for index, item in enumerate(value if isinstance(value, (list, tuple)) else [value]):
            if isinstance(item, torch.Tensor):
                if wanted is None:
                    yield Layout.replicated(item.shape)
                else:
                    yield wanted if isinstance(wanted, Layout) else wanted[index]


class _Property:
    def __init__(
        self,
        target: OpOverload,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        answer: Answer,
        needed: Sequence[Layout],
        mesh: Mesh,
    ) -> None:
        self.target, self.args, self.kwargs, self.answer, self.needed = target, args, kwargs, answer, needed
        self.mesh = mesh
        self.places = all_coords(mesh)
        self.random = torch.Generator().manual_seed(0)

    def run(self, *, values: bool) -> None:
        globals_ = [_leaf(x) for x in _tensors((self.args, self.kwargs))]
        expected = _results(self._call(self.target, globals_, self.args, self.kwargs))
        eps = max(
            torch.finfo(x.dtype).eps for x in (torch.zeros((), dtype=torch.float64), *_inexact(globals_ + expected))
        )
        self.tolerance = max(8 * eps, 1e-12)
        shards = [self._scattered(x.detach(), layout) for x, layout in zip(globals_, self.needed, strict=True)]
        operands = [[_leaf(shard[rank]) for shard in shards] for rank in range(len(self.places))]
        found = [self._local(rank, mine) for rank, mine in enumerate(operands)]
        assert len(expected) == len(self.answer.results) == len(found[0])
        for index, (want, layout) in enumerate(zip(expected, self.answer.results, strict=True)):
            self._compare(want, layout, [results[index] for results in found], values=values)
        if values and any(x.requires_grad for x in expected):
            self._gradients(globals_, expected, operands, found)

    def _call(self, target: Any, tensors: Sequence[torch.Tensor], args: Any, kwargs: Any) -> Any:
        taken = iter(tensors)
        args, kwargs = tree_map(lambda x: next(taken) if isinstance(x, torch.Tensor) else x, (args, kwargs))
        return target(*args, **kwargs)

    def _local(self, rank: int, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The rank's results, from the call that lowering would write."""
        coords = self.places[rank]
        taken = iter(tensors)
        args, kwargs = tree_map(
            lambda x: next(taken) if isinstance(x, torch.Tensor) else x, (tuple(self.args), dict(self.kwargs))
        )

        def size_of(value: Any) -> Size:
            return value if isinstance(value, int) else value.local_size(coords)

        target, args, kwargs = localized(self.target, args, kwargs, self.answer.arguments, self.answer.target, size_of)
        return _results(target(*args, **kwargs))

    def _compare(self, want: torch.Tensor, layout: Layout, locals_: list[torch.Tensor], *, values: bool) -> None:
        what = f"{self.target}: {layout}"
        assert tuple(want.shape) == layout.shape, what
        for coords, local in zip(self.places, locals_, strict=True):
            assert tuple(local.shape) == layout.local_shape(coords), f"{what} at {coords}"
            held = {want.dtype, accumulation_dtype(want.dtype)} if layout.partial else {want.dtype}
            assert local.dtype in held, f"{what}: {local.dtype}"
        if not values:
            return
        by_rank = {rank: local.detach() for rank, local in enumerate(locals_)}
        scale = 1 + (want.detach().abs().max().item() if want.numel() and want.dtype is not torch.bool else 0)
        assert disagreement(by_rank, layout, self.mesh) <= self.tolerance * scale, what
        self._close(unshard(by_rank, layout, self.mesh), want.detach(), what)

    def _close(self, found: torch.Tensor, want: torch.Tensor, what: str) -> None:
        tolerance = self.tolerance * (1 + (want.abs().max().item() if want.numel() and want.dtype != torch.bool else 0))
        torch.testing.assert_close(
            found, want, rtol=0, atol=tolerance, check_dtype=False, equal_nan=True, msg=lambda text: f"{what}\n{text}"
        )

    def _gradients(
        self,
        globals_: list[torch.Tensor],
        expected: list[torch.Tensor],
        operands: list[list[torch.Tensor]],
        found: list[list[torch.Tensor]],
    ) -> None:
        with_grad = [index for index, x in enumerate(expected) if x.requires_grad]
        cotangents = [self._rand(expected[index].detach()) for index in with_grad]
        want = _grad([expected[index] for index in with_grad], globals_, cotangents)
        scattered = [self._terms(g, self.answer.results[index]) for g, index in zip(cotangents, with_grad, strict=True)]
        by_rank = [
            _grad(
                [results[index] for index in with_grad],
                mine,
                [terms[rank].to(results[index].dtype) for terms, index in zip(scattered, with_grad, strict=True)],
            )
            for rank, (results, mine) in enumerate(zip(found, operands, strict=True))
        ]
        for position, layout in enumerate(self.needed):
            gradient = want[position]
            if gradient is not None:
                what = f"{self.target}: gradient of operand {position}, {layout}"
                self._close(self._summed([grads[position] for grads in by_rank], layout, what), gradient, what)

    def _scattered(self, x: torch.Tensor, layout: Layout) -> list[torch.Tensor]:
        """What every rank holds of a global tensor: of a pending sum a random term."""
        terms: dict[tuple[int, ...], torch.Tensor] = {(): x}
        for pending in layout.partial:
            more: dict[tuple[int, ...], torch.Tensor] = {}
            for key, value in terms.items():
                if pending.op == "sum":
                    parts = [self._rand(value) for _ in range(pending.axis.size - 1)]
                    parts.append(value - sum(parts, torch.zeros_like(value)))
                else:
                    parts = [value - torch.arange(3).to(value)[index % 3] for index in range(pending.axis.size)]
                more |= {(*key, index): part for index, part in enumerate(parts)}
            terms = more
        return [
            _held(terms[tuple(coords[pending.axis.name] for pending in layout.partial)], layout, coords).clone()
            for coords in self.places
        ]

    def _first_of(self, layout: Layout) -> list[int]:
        """For every rank the first one that differs only along the pending axes: both have one cotangent."""
        names = {pending.axis.name for pending in layout.partial}
        places = [{**coords, **dict.fromkeys(names & set(coords), 0)} for coords in self.places]
        return [self.places.index(place) for place in places]

    def _terms(self, g: torch.Tensor, layout: Layout) -> list[torch.Tensor]:
        """Cotangents that add up to ``g``: of what several ranks hold random terms, over pending axes all the same."""
        first = self._first_of(layout)
        left, holders = g.clone(), torch.zeros(g.shape)
        for rank in sorted(set(first)):
            holders[_grid(layout, self.places[rank])] += 1
        terms: dict[int, torch.Tensor] = {}
        for rank in sorted(set(first)):
            grid = _grid(layout, self.places[rank])
            rest = left[grid]
            terms[rank] = torch.where(holders[grid] == 1, rest, self._rand(rest))
            left[grid] = rest - terms[rank]
            holders[grid] -= 1
        return [terms[rank] for rank in first]

    def _summed(self, gradients: list[torch.Tensor | None], layout: Layout, what: str) -> torch.Tensor:
        """The gradient behind the ranks' own: a sum over those that hold an element, equal over pending axes."""
        found = [g for g in gradients if g is not None]
        assert len(found) == len(gradients), f"{what}: not on every rank"
        out = found[0].new_zeros([int(size) for size in layout.shape])
        for rank, first in enumerate(self._first_of(layout)):
            if rank == first:
                out[_grid(layout, self.places[rank])] += found[rank]
            else:
                self._close(found[rank], found[first], f"{what}: over the ranks of a pending sum")
        return out

    def _rand(self, like: torch.Tensor) -> torch.Tensor:
        dtype = torch.complex128 if like.dtype.is_complex else torch.float64
        return torch.randn(like.shape, generator=self.random, dtype=dtype).to(like.dtype)


def _results(value: Any) -> list[torch.Tensor]:
    return [value] if isinstance(value, torch.Tensor) else list(value)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _inexact(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [x for x in tensors if x.is_floating_point() or x.is_complex()]


def _leaf(x: torch.Tensor) -> torch.Tensor:
    return x.detach().clone().requires_grad_(x.is_floating_point() or x.is_complex())


def _grad(
    outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], cotangents: Sequence[torch.Tensor]
) -> list[torch.Tensor | None]:
    wanted = [x for x in inputs if x.requires_grad]
    grads = iter(torch.autograd.grad(outputs, wanted, cotangents, allow_unused=True))
    return [next(grads) if x.requires_grad else None for x in inputs]


def _grid(layout: Layout, coords: Coords) -> tuple[torch.Tensor, ...]:
    """Advanced indices of what a rank holds."""
    indices = [torch.tensor(dim.indices(coords), dtype=torch.long) for dim in layout.dims]
    return torch.meshgrid(*indices, indexing="ij") if indices else ()


def _held(x: torch.Tensor, layout: Layout, coords: Coords) -> torch.Tensor:
    return x[_grid(layout, coords)]
