"""Degrees instead of a mesh: the published configuration objects, and the mesh that they stand for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cpcompile.errors import MeshError, Problem
from cpcompile.site import SiteOptions


@dataclass
class ContextParallelConfig:
    """How many ranks share a sequence, by which attention.

    Args:
        ring_degree: ranks along the outer axis; None means 1.
        ulysses_degree: ranks along the inner axis, neighbours in the sequence; None means 1. Both may exceed 1.
        convert_to_fp32: keep the ring's output and log-sum-exp in fp32 while blocks are merged.
        rotate_method: "allgather" gathers keys and values in one collective, "alltoall" passes them on block by block.
        mesh: a mesh of the caller's, with dimensions named "ring" and/or "ulysses" beside any others.

    Raises:
        MeshError: a degree below 1, both of them 1, or an unknown ``rotate_method``.
    """

    ring_degree: int | None = None
    ulysses_degree: int | None = None
    convert_to_fp32: bool = True
    rotate_method: Literal["allgather", "alltoall"] = "allgather"
    mesh: DeviceMesh | None = None

    _rank: int | None = field(default=None, init=False, repr=False, compare=False)
    _world_size: int | None = field(default=None, init=False, repr=False, compare=False)
    _device: torch.device | None = field(default=None, init=False, repr=False, compare=False)
    _mesh: DeviceMesh | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.ring_degree = 1 if self.ring_degree is None else self.ring_degree
        self.ulysses_degree = 1 if self.ulysses_degree is None else self.ulysses_degree
        problems = [
            Problem(f"{name}={degree}", "a degree is at least 1", "use 1 (or None) for an axis that is not wanted")
            for name, degree in (("ring_degree", self.ring_degree), ("ulysses_degree", self.ulysses_degree))
            if degree < 1
        ]
        if not problems and self.ring_degree * self.ulysses_degree == 1:
            problems.append(
                Problem("ring_degree=1, ulysses_degree=1", "one rank shares nothing", "make one of them 2 or more")
            )
        if self.rotate_method not in ("allgather", "alltoall"):
            problems.append(
                Problem(f"rotate_method={self.rotate_method!r}", "there is no such method", "use allgather or alltoall")
            )
        if problems:
            raise MeshError(problems)

    @property
    def mesh_shape(self) -> tuple[int, int]:
        """Ranks along each axis, outer first."""
        assert self.ring_degree is not None
        assert self.ulysses_degree is not None
        return (self.ring_degree, self.ulysses_degree)

    @property
    def mesh_dim_names(self) -> tuple[str, str]:
        """The axes' names, outer first."""
        return ("ring", "ulysses")

    def setup(self, rank: int, world_size: int, device: torch.device, mesh: DeviceMesh) -> None:
        """Settle on the processes and the mesh.

        Raises:
            MeshError: more ranks than processes, or a mesh whose sizes are not the degrees.
        """
        ring, ulysses = self.mesh_shape
        problems: list[Problem] = []
        if ring * ulysses > world_size:
            problems.append(
                Problem(
                    f"ring_degree={ring}, ulysses_degree={ulysses}",
                    f"their product {ring * ulysses} exceeds the world size {world_size}",
                    "lower a degree, or start more processes",
                )
            )
        problems += mesh_contradicts(mesh, {"ring": ring, "ulysses": ulysses})
        if problems:
            raise MeshError(problems)
        self._rank, self._world_size, self._device, self._mesh = rank, world_size, device, mesh


@dataclass
class ParallelConfig:
    """What a model is divided by: context parallelism, if anything."""

    context_parallel_config: ContextParallelConfig | None = None

    def setup(self, rank: int, world_size: int, device: torch.device, *, mesh: DeviceMesh | None = None) -> None:
        """Settle on the processes and the mesh; see ``ContextParallelConfig.setup``."""
        config = self.context_parallel_config
        if config is not None:
            mesh = mesh or config.mesh or mesh_from(config, device.type)
            config.setup(rank, world_size, device, mesh)


def mesh_contradicts(mesh: DeviceMesh, degrees: dict[str, int]) -> list[Problem]:
    """Where a mesh has other sizes than the degrees say; a degree of 1 needs no dimension."""
    names = mesh.mesh_dim_names or ()
    found: list[Problem] = []
    for name, degree in degrees.items():
        size = mesh.size(names.index(name)) if name in names else 1
        if size != degree:
            found.append(
                Problem(
                    f"mesh {tuple(mesh.shape)} with dimensions {names}",
                    f"its {name} dimension has {size} ranks, {name}_degree is {degree}",
                    "make the mesh from the degrees (mesh_shape, mesh_dim_names), or the degrees from the mesh",
                )
            )
    return found


def mesh_from(config: Any, device_type: str) -> DeviceMesh:
    """The mesh of a configuration over all processes.

    Raises:
        MeshError: there is no process group, or the degrees do not fill the world.
    """
    ring, ulysses = config.mesh_shape
    world_size = dist.get_world_size() if dist.is_initialized() else None
    if world_size != ring * ulysses:
        law = (
            "torch.distributed is not initialized"
            if world_size is None
            else f"they make {ring * ulysses} ranks of a world of {world_size}"
        )
        remedy = (
            "start with torchrun and call torch.distributed.init_process_group()"
            if world_size is None
            else 'pass a mesh with a further dimension for the other processes, as ("dp", "ring", "ulysses")'
            if ring * ulysses < world_size
            else "lower a degree, or start more processes"
        )
        raise MeshError([Problem(f"ring_degree={ring}, ulysses_degree={ulysses}", law, remedy)])
    return init_device_mesh(device_type, config.mesh_shape, mesh_dim_names=config.mesh_dim_names)


def configured_mesh(config: Any, mesh: DeviceMesh | None, device_type: str) -> DeviceMesh:
    """The mesh that a configuration (ours or diffusers', alone or in a ``ParallelConfig``) means.

    Raises:
        MeshError: the mesh and the degrees contradict each other, or there is no context parallelism in it.
    """
    inner = getattr(config, "context_parallel_config", config)
    if inner is None or not hasattr(inner, "mesh_shape"):
        raise MeshError(
            [Problem(f"config={config!r}", "it holds no context parallelism", "pass a ContextParallelConfig")]
        )
    found = mesh if mesh is not None else getattr(inner, "mesh", None)
    found = found if found is not None else mesh_from(inner, device_type)
    ring, ulysses = inner.mesh_shape
    problems = mesh_contradicts(found, {"ring": ring, "ulysses": ulysses})
    if problems:
        raise MeshError(problems)
    return found


def site_options(config: Any) -> SiteOptions:
    """What a configuration (ours or diffusers', alone or in a ``ParallelConfig``, or None) asks of attention."""
    inner = getattr(config, "context_parallel_config", config)
    if inner is None:
        return SiteOptions()
    return SiteOptions(getattr(inner, "rotate_method", "allgather"), bool(getattr(inner, "convert_to_fp32", True)))
