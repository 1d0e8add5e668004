"""The device mesh in the compiler's terms: axes that share the sequence, this rank's coordinates, process groups."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cpcompile.errors import MeshError, Problem
from cpcompile.layout import Axis

NAMED_AXES = ("ring", "ulysses")
"""Mesh dimensions that share the sequence, outermost first; others (``dp``, ``cfg``) are left alone."""


@dataclass(frozen=True)
class Ranks:
    """This rank's place.

    axes: those that share the sequence. coords: this rank's index along each. groups: the name of the process group
    along each set of axes. members: the global ranks that share this rank's sequence, in order.
    """

    axes: tuple[Axis, ...]
    coords: dict[str, int]
    groups: dict[str, str]
    members: tuple[int, ...]


def ranks_of(mesh: DeviceMesh | None, device_type: str) -> Ranks:
    """Read a mesh, and make the process groups that it lacks, in one order on all ranks.

    Args:
        mesh: with dimensions named "ring" (outer) and/or "ulysses" (inner), or of one dimension of any name; None
            takes all processes as one "ulysses" axis.
        device_type: where the model lives, for a mesh that is made here.

    Raises:
        MeshError: there is no process group, or no dimension that could share the sequence.
    """
    if mesh is None:
        if not dist.is_initialized():
            raise MeshError(
                [
                    Problem(
                        "mesh=None",
                        "torch.distributed is not initialized",
                        "start with torchrun and call torch.distributed.init_process_group(), or pass a DeviceMesh; "
                        "cpcompile.check() needs neither",
                    )
                ]
            )
        mesh = init_device_mesh(device_type, (dist.get_world_size(),), mesh_dim_names=("ulysses",))
    axes = _axes(mesh)
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise MeshError(
            [Problem("mesh", f"rank {dist.get_rank()} is not in the mesh", "call parallelize on the mesh's ranks only")]
        )
    coords = {axis.name: coordinate[index] for axis, index in axes}
    live = [(axis, index) for axis, index in axes if axis.size > 1]
    groups = {".".join(axis.name for axis, _ in along): _group(mesh, [i for _, i in along]) for along in _sets(live)}
    members = tuple(_members(mesh, [index for _, index in axes]))
    return Ranks(tuple(axis for axis, _ in live), coords, groups, members)


def _axes(mesh: DeviceMesh) -> list[tuple[Axis, int]]:
    names = mesh.mesh_dim_names or tuple(f"cp{index}" if mesh.ndim > 1 else "cp" for index in range(mesh.ndim))
    found = [(Axis(name, mesh.size(names.index(name))), names.index(name)) for name in NAMED_AXES if name in names]
    if not found and mesh.ndim == 1:
        found = [(Axis(names[0], mesh.size()), 0)]
    if not found:
        raise MeshError(
            [
                Problem(
                    f"mesh {tuple(mesh.shape)} with dimensions {names}",
                    "none of its dimensions is called ring or ulysses",
                    'name the dimensions that share the sequence: init_device_mesh(..., mesh_dim_names=("ring", '
                    '"ulysses"))',
                )
            ]
        )
    if [index for _, index in found] != sorted(index for _, index in found):
        raise MeshError(
            [Problem(f"mesh dimensions {names}", "ulysses stands outside ring", 'order them ("ring", "ulysses")')]
        )
    return found


def _sets(axes: list[tuple[Axis, int]]) -> list[tuple[tuple[Axis, int], ...]]:
    return [along for count in range(1, len(axes) + 1) for along in itertools.combinations(axes, count)]


def _group(mesh: DeviceMesh, dims: list[int]) -> str:
    """The name of this rank's group along mesh dimensions, its ranks in the mesh's order."""
    ranks = _members(mesh, dims)
    if ranks != sorted(ranks):
        raise MeshError(
            [Problem(f"mesh ranks {ranks}", "they are not in ascending order", "number the mesh's ranks in its order")]
        )
    group = mesh.get_group(dims[0]) if len(dims) == 1 else dist.new_group(ranks, use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    return group.group_name


def _members(mesh: DeviceMesh, dims: list[int]) -> list[int]:
    """The global ranks that differ from this one along ``dims`` only."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    index = tuple(slice(None) if dim in dims else coordinate[dim] for dim in range(mesh.ndim))
    ranks: list[int] = mesh.mesh[index].flatten().tolist()
    return ranks
