"""A capture is valid for the model it saw: whatever changes on the model is seen at the next call."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh

from cpcompile import ContextParallelInput, ParallelModule, parallelize
from cpcompile.fingerprint import Fingerprint

PLAN = {"": {"x": ContextParallelInput(split_dim=1)}}


class Adapted(nn.Module):
    """A linear with adapters beside it, each with a scale: the state that adapter libraries keep on modules."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8)
        self.down, self.up = nn.ModuleDict(), nn.ModuleDict()
        self.scaling: dict[str, float] = {}
        self.active: list[str] = []
        self.merged = False
        self.add("first")
        self.active.append("first")

    def add(self, name: str) -> None:
        self.down[name], self.up[name] = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)
        self.scaling[name] = 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.base(x)
        for name in self.active:
            y = y + self.scaling[name] * self.up[name](self.down[name](x))
        return y


class Model(nn.Module):
    """Two adapted linears, a dropout, a buffer and a plain number."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Adapted(), Adapted()
        self.dropout = nn.Dropout(0.5)
        self.gain = 1.0
        self.register_buffer("shift", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gain * self.dropout(self.two(torch.relu(self.one(x)))) + self.shift


@pytest.fixture
def parallel() -> Iterator[ParallelModule]:
    """The model over a mesh of this process alone, called once."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=HashStore())
    torch.manual_seed(0)
    module = parallelize(Model().eval(), PLAN, DeviceMesh("cpu", [0], mesh_dim_names=("ulysses",)))
    module(x=data())
    yield module
    dist.destroy_process_group()


def data() -> torch.Tensor:
    return torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(1))


def replace_parameter(model: Model) -> None:
    model.one.base.weight = nn.Parameter(torch.randn(8, 8))


def add_adapter(model: Model) -> None:
    model.two.add("second")
    model.two.active.append("second")


def replace_module(model: Model) -> None:
    model.two = Adapted()


def hook(model: Model) -> None:
    model.one.register_forward_hook(lambda _module, _args, output: output * 2)


def other_forward(model: Model) -> None:
    model.one.forward = lambda x: x * 3  # type: ignore[method-assign]


CHANGES: dict[str, Callable[[Model], object]] = {
    "a number": lambda model: setattr(model, "gain", 2.0),
    "a scale in a dict": lambda model: model.two.scaling.update(first=3.0),
    "a list": lambda model: model.one.active.clear(),
    "a parameter": replace_parameter,
    "a buffer": lambda model: model.register_buffer("shift", torch.zeros(8)),
    "an adapter more": add_adapter,
    "a module": replace_module,
    "a hook": hook,
    "a forward": other_forward,
    "double precision": lambda model: model.double(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
def test_no_change_of_the_model_is_missed(parallel: ParallelModule, change: Callable[[Model], object]) -> None:
    model: Model = parallel._parallel_model
    before = parallel(x=data())
    change(model)
    x = data().to(model.two.base.weight.dtype)
    after = parallel(x=x)
    assert torch.equal(after, model(x=x))
    assert not torch.equal(after, before)


def test_values_change_freely(parallel: ParallelModule, captures: list[int]) -> None:
    model: Model = parallel._parallel_model
    before = parallel(x=data())
    with torch.no_grad():
        model.one.base.weight.mul_(2)
        model.shift.add_(1)
    model.load_state_dict({name: value + 0.1 for name, value in model.state_dict().items()})
    assert torch.equal(parallel(x=data()), model(x=data()))
    assert not torch.equal(parallel(x=data()), before)
    assert not captures


def test_what_changes_back_is_found_again(parallel: ParallelModule, captures: list[int]) -> None:
    model: Model = parallel._parallel_model
    for gain in (1.0, 2.0, 1.0, 2.0, 1.0):
        model.gain = gain
        assert torch.equal(parallel(x=data()), model(x=data()))
    assert len(captures) == 1


def test_modes(parallel: ParallelModule, captures: list[int]) -> None:
    model: Model = parallel._parallel_model
    parallel.train()
    assert model.training
    torch.manual_seed(3)
    ours = parallel(x=data())
    torch.manual_seed(3)
    assert torch.equal(ours, model(x=data()))
    parallel.eval()
    assert torch.equal(parallel(x=data()), model(x=data()))
    assert len(captures) == 1
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            result = parallel(x=data())
        assert not result.requires_grad
        assert torch.equal(result, model(x=data()))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(parallel(x=data()), model(x=data()))
    assert torch.equal(parallel(x=data()), model(x=data()))
    model.one.requires_grad_(False)
    parallel(x=data()).sum().backward()
    assert model.one.base.weight.grad is None
    assert model.two.base.weight.grad is not None


@pytest.fixture
def captures(parallel: ParallelModule, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with every capture after the first call."""
    found: list[int] = []
    export = torch.export.export

    def counted(*args, **kwargs):
        found.append(1)
        return export(*args, **kwargs)

    monkeypatch.setattr(torch.export, "export", counted)
    return found


def test_asking_costs_microseconds_a_module() -> None:
    model = nn.ModuleList(Model() for _ in range(50))
    fingerprint = Fingerprint(model)
    start = time.perf_counter()
    for _ in range(20):
        assert fingerprint.holds()
    assert (time.perf_counter() - start) / 20 / len(list(model.modules())) < 50e-6  # some twenty times what it takes
