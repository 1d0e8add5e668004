"""What a plan may ask and what a call may leave out: optional tensors, lists, tuples, repeated and tied modules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

from cpcompile import PlanError, check, parallelize
from tests.small_models import SPLIT, Block, Feedforward, Input, Output, Tower, covered, equal, padding, rand, sharp


class Optional(nn.Module):
    """A tensor that the caller may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.more = Block(), nn.Linear(16, 16)

    def forward(self, x, extra=None, *, mask=None):
        if extra is not None:
            x = x + self.more(extra)
        return self.block(x, mask=None if mask is None else mask[:, None, None, :])


OPTIONAL = {"": {"x": Input(1), "extra": Input(1), "mask": Input(1)}}


@pytest.mark.parametrize("kwargs", [{}, {"extra": None}, {"extra": rand(2, 9, 16, seed=1), "mask": None}])
def test_planned_inputs_left_out_or_none(kwargs):
    for report in covered(equal(Optional(), OPTIONAL, rand(2, 9, 16), **kwargs)):
        absent = {"extra", "mask"} - {name for name, value in kwargs.items() if value is not None}
        assert all(any(name in note for note in report.report.notes) for name in absent)


@pytest.fixture
def alone():
    """A mesh of this process alone."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=HashStore())
    yield DeviceMesh("cpu", [0], mesh_dim_names=("ulysses",))
    dist.destroy_process_group()


def test_calls_of_several_kinds_through_one_parallel_module(alone):
    model = sharp(Optional())
    parallel = parallelize(model, OPTIONAL, alone)
    x, extra, mask = rand(2, 9, 16), rand(2, 9, 16, seed=1), padding(9, 5, size=9)
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((x,), {}),
        ((x,), {}),
        ((x, None), {"mask": None}),
        ((x, extra), {}),
        ((x,), {"extra": extra, "mask": mask}),
        ((), {"x": x, "mask": mask}),
        ((x,), {}),
        ((x[:, :5],), {"extra": extra[:, :5]}),
    ]
    for args, kwargs in calls:
        assert torch.equal(parallel(*args, **kwargs), model(*args, **kwargs))


def test_the_plan_gathers_what_is_not_sharded():
    plan = {**SPLIT, "blocks.0": Output(1), "blocks.1": Output(1), "out": Output(1)}

    for report in covered(equal(Tower(), plan, rand(2, 9, 16))):
        assert sum("nothing to gather" in note for note in report.report.notes) == 2


@pytest.mark.parametrize(
    "plan", [{"": {"x": Input(-2)}}, {"embed": {"input": Input(1)}}, {"embed": {0: Input(1, split_output=True)}}]
)
def test_the_split_stands_anywhere(plan):
    covered(equal(Tower(), plan, rand(3, 9, 16)))


@pytest.mark.parametrize("dims", [(0,), (2,), (0, 1), (1, 2)])
def test_a_plan_that_shards_the_wrong_dimension_is_equal_all_the_same(dims):
    plan: dict[str, Any] = {"": {"x": Input(dims[0])}}
    if len(dims) > 1:
        plan["blocks.1"] = {"x": Input(dims[1])}
    equal(Tower(), plan, rand(4, 6, 16, grad=True))


class HeadsSplit(nn.Module):
    """Named values of an attention, so that a plan can shard any dimension of any of them."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.qkv = nn.Identity(), nn.Identity(), nn.Identity(), nn.Linear(16, 48)

    def forward(self, x):
        heads = [part.unflatten(-1, (4, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)]
        q, k, v = (module(part) for module, part in zip((self.q, self.k, self.v), heads, strict=True))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("q", [None, 0, 1, 2, 3])
@pytest.mark.parametrize("k", [None, 0, 1, 2, 3])
def test_query_and_key_sharded_along_any_dimension(q, k):
    plan = {
        name: {"input": Input(dim)}
        for name, dim in (("q", q), ("k", k), ("v", None if k == 3 else k))
        if dim is not None
    }
    plan = plan or {"v": {"input": Input(3)}}
    equal(HeadsSplit(), plan, rand(4, 6, 16), meshes=[(2, 2)])


class Twice(nn.Module):
    """One module called twice, on different tensors, and a second name for another."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.ff, self.unused = Block(), Feedforward(), Feedforward()
        self.same = self.ff

    def forward(self, x):
        x = self.block(self.ff(x))
        return self.block(x) + self.same(x)


@pytest.mark.parametrize("plan", [{"block": {"x": Input(1)}}, {"ff": {"x": Input(1)}}, {"same": {"x": Input(1)}}])
def test_modules_called_twice_and_tied_ones(plan):
    covered(equal(Twice(), plan, rand(2, 7, 16)))


def test_every_call_is_split_and_gathered():
    plan = {"block": {"x": Input(1)}, "block.ff": Output(1)}
    for report in equal(Twice(), plan, rand(2, 7, 16)):
        assert len(report.sites) == 2
        assert all("7 " in site.query for site in report.sites)


def test_a_module_that_is_never_called_is_noted():
    plan = {**SPLIT, "unused": {"x": Input(1)}}
    for report in equal(Twice(), plan, rand(2, 7, 16)):
        assert any("unused" in note and "not called" in note for note in report.report.notes)


def test_tied_weights():
    model = Tower()
    model.blocks[1].ff.up.weight = model.blocks[0].ff.up.weight
    covered(equal(model, SPLIT, rand(2, 7, 16)))


def test_expected_dims_that_do_not_match_leave_the_tensor_whole():
    plan = {"": {"x": Input(1), "context": Input(1, expected_dims=2)}}
    for report in covered(equal(Tower(cross=True), plan, rand(2, 7, 16), rand(2, 4, 16, seed=1))):
        assert any("context" in note and "3 dimensions" in note for note in report.report.notes)


class Lists(nn.Module):
    """Takes lists of tensors, gives dicts, lists and tuples of them."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.mix = Block(), nn.Linear(16, 16)

    def forward(self, streams, extra):
        a, b = self.block(streams[0]), self.mix(streams[1])
        return {"a": [a, None], "b": (b, b + extra["shift"]), "sum": a.sum(), "text": "fixed"}


@pytest.mark.parametrize("plan", [[Input(1), Input(1)], [Input(1), None], [None, Input(1)]])
def test_lists_of_tensors_with_lists_of_entries(plan):
    args = [rand(2, 7, 16), rand(2, 9, 16, seed=1)], {"shift": rand(9, 16, seed=2, grad=True)}
    covered(equal(Lists(), {"": {"streams": plan}}, *args))


def test_a_list_of_entries_that_is_too_long_is_refused():
    with pytest.raises(PlanError, match="2 items"):
        check(
            Lists(), {"": {"streams": [Input(1)] * 3}}, ulysses=2, args=([rand(2, 7, 16)] * 2, {"shift": rand(7, 16)})
        )


class Pair(NamedTuple):
    sample: torch.Tensor
    extra: torch.Tensor | None


@dataclass
class Plain:
    sample: torch.Tensor
    extra: Any = None


class Ordered(dict):
    """A dict with attributes, as model outputs are."""


pytree.register_pytree_node(
    Ordered,
    lambda value: (list(value.values()), list(value)),
    lambda values, keys: Ordered(zip(keys, values, strict=True)),
    serialized_type_name="tests.Ordered",
)


class Returning(nn.Module):
    """Wraps its result as it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x, how="tensor", return_dict=True):
        out = self.block(x)
        if not return_dict:
            return (out, None)
        if how == "nested":
            return {"pair": Pair(out, None), "plain": Plain(out.mean(dim=1), [out, 3])}
        return {"named": Pair(out, None), "plain": Plain(out), "dict": Ordered(sample=out, n=3), "tuple": (None, out)}[
            how
        ]


@pytest.mark.parametrize("how", ["named", "plain", "dict", "tuple", "nested"])
def test_results_of_every_build(how, alone):
    covered(equal(Returning(), SPLIT, rand(2, 7, 16), how))
    model = sharp(Returning())
    parallel = parallelize(model, SPLIT, alone)
    for kwargs in ({"how": how}, {"return_dict": False}, {"how": how}):
        got, want = parallel(rand(2, 7, 16), **kwargs), model(rand(2, 7, 16), **kwargs)
        assert type(got) is type(want)
        assert repr(got) == repr(want)


@pytest.mark.parametrize("plan", [{"block": [Output(1), None]}, {"block": {0: Input(1, split_output=True)}}])
def test_a_tuple_output_with_a_none_in_it(plan):
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Returning()

        def forward(self, x):
            out, nothing = self.block(x, return_dict=False)
            assert nothing is None
            return out * 2

    covered(equal(Inner(), {**SPLIT, **plan} if "gather" in repr(plan) else plan, rand(2, 7, 16)))


def test_two_plans_on_one_model():
    model, x = Tower(), rand(2, 9, 16)
    before = {name: value.clone() for name, value in sharp(model).state_dict().items()}
    for plan in (SPLIT, {"blocks.1": {"x": Input(1)}}, SPLIT, {"": {"x": Input(0)}}):
        equal(model, plan, x)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_models_of_different_head_counts_through_one_process(alone):
    for heads in (2, 4, 8):
        model = sharp(Tower(16, heads))
        parallel = parallelize(parallelize(model, SPLIT, alone)._parallel_model, SPLIT, alone)
        assert torch.equal(parallel(rand(2, 9, 16)), model(rand(2, 9, 16)))
