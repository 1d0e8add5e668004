"""Symbolic sizes: one capture, one rewriting and one lowering per rank serve calls of every length."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh

from cpcompile import check, parallelize
from cpcompile.capture import Captured
from cpcompile.compiled import captured_call, compile_call, plan_of
from cpcompile.pipeline import Options, Rewritten, shortest_sizes
from cpcompile.reference import reference
from cpcompile.simulate import check_captured, mesh_axes
from cpcompile.trees import flatten
from tests.models import flux, flux_inputs, wan

TEXT_IMAGE = [(16, 64), (7, 63), (30, 20), (9, 100), (3, 33), (17, 17)]
VIDEO = [(3, 8, 8), (4, 8, 8), (3, 6, 10), (5, 4, 6), (2, 8, 12), (3, 12, 4)]


@cache
def flux_captured() -> tuple[torch.nn.Module, Captured]:
    """Flux, captured at one pair of lengths."""
    model, kwargs = flux(layers=1, single_layers=1)
    return model, captured_call(model, plan_of(model, None), (), kwargs, dynamic=True)


@cache
def wan_captured() -> tuple[torch.nn.Module, Captured]:
    """Wan, captured at one size of the video."""
    model, kwargs = wan(layers=1)
    return model, captured_call(model, plan_of(model, None), (), kwargs, dynamic=True)


def matcher(rewritten: Rewritten) -> Callable[[dict[str, Any]], bool]:
    """Whether a rewritten program serves a call."""
    matches = rewritten.captured.sizes.matcher(shortest_sizes(rewritten))
    return lambda kwargs: matches([tensor.shape for tensor in flatten(((), kwargs))[0]])


def equal(model: torch.nn.Module, captured: Captured, kwargs: dict[str, Any], ring: int, ulysses: int) -> None:
    against = reference(model, (), kwargs, backward=True)
    axes = mesh_axes(ring, ulysses)
    report = check_captured(model, captured, axes, (), kwargs, Options(), backward=True, against=against)
    assert report.ok, str(report)
    assert not report.fallbacks
    assert not report.inserted


@pytest.mark.parametrize(("text", "image"), TEXT_IMAGE)
def test_one_capture_of_flux_serves_every_length(text: int, image: int) -> None:
    model, captured = flux_captured()
    kwargs = flux_inputs(text=text, image=image)
    equal(model, captured, kwargs, 1, 3)
    rewritten, _ = compile_call(captured, mesh_axes(1, 3), Options(verify=True))
    assert matcher(rewritten)(kwargs)


@pytest.mark.parametrize("latents", VIDEO)
def test_one_capture_of_wan_serves_every_size(latents: tuple[int, int, int]) -> None:
    model, captured = wan_captured()
    _, kwargs = wan(layers=1, latents=latents)
    equal(model, captured, kwargs, 1, 3)


@pytest.mark.parametrize(("ring", "ulysses"), [(2, 1), (2, 2)])
def test_symbols_over_other_meshes(ring: int, ulysses: int) -> None:
    model, captured = flux_captured()
    equal(model, captured, flux_inputs(text=9, image=50), ring, ulysses)
    model, captured = wan_captured()
    equal(model, captured, wan(layers=1, latents=(3, 6, 10))[1], ring, ulysses)


def test_lengths_that_meet_are_taken_for_equal_and_checked() -> None:
    _model, captured = flux_captured()
    rewritten, report = compile_call(captured, mesh_axes(1, 3), Options())
    assert len(captured.sizes.assumed) == 1, "ids and tokens of the text; those of the image follow"
    assert not report.inserted
    serves = matcher(rewritten)
    call = flux_inputs(text=16, image=64)
    assert serves(call)
    ids = {"txt_ids": torch.randn(10, 3), "img_ids": torch.randn(70, 3)}
    assert not serves({**call, **ids}), "the same sum, other parts"
    assert not serves({**call, "txt_ids": torch.randn(10, 3)})
    assert not serves(flux_inputs(text=2, image=64)), "fewer text tokens than ranks"
    assert not serves({**call, "hidden_states": torch.randn(2, 64, 5)}), "another number of channels"
    assert not serves({**call, "timestep": torch.rand(3)}), "another batch in one argument"


def test_ids_that_do_not_match_the_lengths_get_a_capture_of_their_own() -> None:
    model, _ = flux_captured()
    call = {**flux_inputs(text=16, image=64), "txt_ids": torch.randn(10, 3), "img_ids": torch.randn(70, 3)}
    report = check(model, ulysses=3, kwargs=call, backward=True, dynamic=True)
    assert report.ok, str(report)
    assert any(step.kind == "gather" for step in report.inserted), "the rotary table moves where its parts differ"
    captured = captured_call(model, plan_of(model, None), (), call, dynamic=True)
    rewritten, _ = compile_call(captured, mesh_axes(1, 3), Options())
    assert captured.sizes.distinct
    assert not captured.sizes.assumed
    serves = matcher(rewritten)
    assert serves(call)
    assert not serves(flux_inputs(text=16, image=64)), "left to the program in which they are equal"


@pytest.fixture
def alone():
    """A mesh of this process alone."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=HashStore())
    yield DeviceMesh("cpu", [0], mesh_dim_names=("ulysses",))
    dist.destroy_process_group()


def test_nothing_is_captured_twice(alone: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    captures = 0
    export = torch.export.export

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal captures
        captures += 1
        return export(*args, **kwargs)

    monkeypatch.setattr(torch.export, "export", counted)
    model, _ = flux_captured()
    parallel = parallelize(model, mesh=alone, dynamic=True)
    for text, image in TEXT_IMAGE * 2:
        kwargs = flux_inputs(text=text, image=image)
        assert torch.equal(parallel(**kwargs)[0], model(**kwargs)[0])
    assert captures == 1
    static = parallelize(model, mesh=alone)
    for text, image in TEXT_IMAGE[:2] * 2:
        kwargs = flux_inputs(text=text, image=image)
        assert torch.equal(static(**kwargs)[0], model(**kwargs)[0])
    assert captures == 3


def test_a_length_shorter_than_the_ranks_has_sizes_of_its_own() -> None:
    model, _ = flux_captured()
    report = check(model, ulysses=3, kwargs=flux_inputs(text=2, image=30), backward=True, dynamic=True)
    assert report.ok, str(report)
    assert any("2 indices for 3 ranks; every rank keeps all" in note for note in report.report.notes)
    report = check(model, ulysses=3, kwargs=flux_inputs(text=3, image=30), dynamic=True)
    assert report.ok, str(report)
    assert any("the bytes are those of the captured call" in note for note in report.report.notes)
    assert report.report.bytes_sent == report.bytes_sent


def test_asking_costs_microseconds() -> None:
    _, captured = wan_captured()
    rewritten, _ = compile_call(captured, mesh_axes(1, 3), Options())
    matches = captured.sizes.matcher(shortest_sizes(rewritten))
    shapes = [tensor.shape for tensor in flatten(((), wan(layers=1)[1]))[0]]
    assert matches(shapes)
    start = time.perf_counter()
    for _ in range(1000):
        matches(shapes)
    assert time.perf_counter() - start < 0.2  # 200 microseconds each: ten times what it takes
