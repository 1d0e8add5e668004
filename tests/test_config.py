"""Degrees instead of a mesh: accepted and refused as the published objects are, and more where they stop."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from cpcompile import ContextParallelConfig, MeshError, ParallelConfig
from cpcompile.config import configured_mesh


@pytest.fixture
def world() -> Iterator[Callable[[int], None]]:
    """Starts a world of some ranks, of which this process is the first; nothing is sent."""

    def start(size: int) -> None:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)

    yield start
    if dist.is_initialized():
        dist.destroy_process_group()


def mesh(**sizes: int) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


@pytest.mark.parametrize(
    ("ring", "ulysses", "shape"), [(None, 2, (1, 2)), (3, None, (3, 1)), (2, 2, (2, 2)), (1, 4, (1, 4))]
)
def test_degrees(ring: int | None, ulysses: int | None, shape: tuple[int, int]) -> None:
    config = ContextParallelConfig(ring_degree=ring, ulysses_degree=ulysses)
    assert config.mesh_shape == shape
    assert config.mesh_dim_names == ("ring", "ulysses")
    assert config.convert_to_fp32
    assert config.rotate_method == "allgather"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "one rank shares nothing"),
        ({"ring_degree": 1, "ulysses_degree": 1}, "make one of them 2 or more"),
        ({"ring_degree": 0, "ulysses_degree": 2}, "ring_degree=0: a degree is at least 1"),
        ({"ring_degree": -1, "ulysses_degree": 0}, "2 problems"),
        ({"ulysses_degree": 2, "rotate_method": "mail"}, "use allgather or alltoall"),
    ],
)
def test_degrees_that_are_refused(arguments: dict, words: str) -> None:
    with pytest.raises(MeshError, match=words):
        ContextParallelConfig(**arguments)
    with pytest.raises(ValueError, match=words):  # what the published objects raise
        ContextParallelConfig(**arguments)


def test_both_methods_of_rotation() -> None:
    assert ContextParallelConfig(ring_degree=2, rotate_method="alltoall").rotate_method == "alltoall"


def test_setup(world: Callable[[int], None]) -> None:
    world(4)
    config = ContextParallelConfig(ring_degree=2, ulysses_degree=2)
    config.setup(0, 4, torch.device("cpu"), mesh(ring=2, ulysses=2))
    ParallelConfig(context_parallel_config=config).setup(0, 4, torch.device("cpu"))
    ParallelConfig().setup(0, 4, torch.device("cpu"))


def test_more_ranks_than_processes(world: Callable[[int], None]) -> None:
    world(4)
    with pytest.raises(MeshError, match="their product 8 exceeds the world size 4"):
        ContextParallelConfig(ring_degree=2, ulysses_degree=4).setup(0, 4, torch.device("cpu"), mesh(ring=2, ulysses=2))


def test_a_mesh_that_contradicts_the_degrees(world: Callable[[int], None]) -> None:
    world(4)
    config = ContextParallelConfig(ulysses_degree=2)
    for attempt in (
        lambda: config.setup(0, 4, torch.device("cpu"), mesh(ulysses=4)),
        lambda: configured_mesh(config, mesh(ulysses=4), "cpu"),
        lambda: configured_mesh(ParallelConfig(config), mesh(ring=1, ulysses=4), "cpu"),
    ):
        with pytest.raises(MeshError, match="its ulysses dimension has 4 ranks, ulysses_degree is 2"):
            attempt()
    with pytest.raises(MeshError, match="its ring dimension has 2 ranks, ring_degree is 1"):
        configured_mesh(config, mesh(ring=2, ulysses=2), "cpu")


def test_the_mesh_is_made_from_the_degrees(world: Callable[[int], None]) -> None:
    world(4)
    made = configured_mesh(ContextParallelConfig(ring_degree=2, ulysses_degree=2), None, "cpu")
    assert tuple(made.shape) == (2, 2)
    assert made.mesh_dim_names == ("ring", "ulysses")
    with pytest.raises(MeshError, match="they make 2 ranks of a world of 4"):
        configured_mesh(ContextParallelConfig(ulysses_degree=2), None, "cpu")
    own = mesh(dp=2, ulysses=2)
    assert configured_mesh(ContextParallelConfig(ulysses_degree=2, mesh=own), None, "cpu") is own


def test_without_processes() -> None:
    with pytest.raises(MeshError, match="start with torchrun"):
        configured_mesh(ContextParallelConfig(ulysses_degree=2), None, "cpu")
    with pytest.raises(MeshError, match="it holds no context parallelism"):
        configured_mesh(ParallelConfig(), None, "cpu")


def test_the_published_objects(world: Callable[[int], None]) -> None:
    from diffusers import ContextParallelConfig as PublishedConfig
    from diffusers.models._modeling_parallel import ParallelConfig as PublishedParallelConfig

    world(4)
    published = PublishedConfig(ulysses_degree=4)
    assert tuple(configured_mesh(published, None, "cpu").shape) == (1, 4)
    assert tuple(configured_mesh(PublishedParallelConfig(published), None, "cpu").shape) == (1, 4)
    with pytest.raises(MeshError, match="its ulysses dimension has 2 ranks, ulysses_degree is 4"):
        configured_mesh(published, mesh(dp=2, ulysses=2), "cpu")
