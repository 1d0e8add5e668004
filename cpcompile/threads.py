"""Many ranks in one process, a thread each, on torch.testing's threaded process group: the only file that knows it."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store

from cpcompile.assemble import all_coords
from cpcompile.errors import SimulationError
from cpcompile.layout import Axis

T = TypeVar("T")

_one_at_a_time = threading.Lock()


def run_ranks(axes: Sequence[Axis], program: Callable[[dict[str, int], dict[str, str]], T]) -> list[T]:
    """Run ``program(coords, groups)`` once for each rank of a mesh of ``axes``, and return the results in rank order.

    ``groups`` names the process group along every set of axes ("ring", "ulysses", "ring.ulysses").

    Raises:
        SimulationError: a rank failed; its exception is the cause, the others were stopped.
    """
    from torch._C import _distributed_c10d
    from torch.testing._internal.distributed.multi_threaded_pg import (
        ProcessLocalGroup,
        _install_threaded_pg,
        _uninstall_threaded_pg,
    )

    ranks = all_coords(axes)
    results: list[Any] = [None] * len(ranks)
    failures: queue.Queue[tuple[int, BaseException]] = queue.Queue()

    def run(rank: int, store: Store) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=len(ranks), store=store)
            try:
                results[rank] = program(ranks[rank], _groups(axes, ranks, rank))
            finally:
                dist.destroy_process_group()
        except SystemExit:
            pass  # stopped because another rank failed
        except BaseException as error:
            failures.put((rank, error))
            ProcessLocalGroup.exception_handle(error)

    with _one_at_a_time:
        _distributed_c10d._set_thread_isolation_mode(True)  # type: ignore[attr-defined]
        ProcessLocalGroup.reset()
        _install_threaded_pg()
        try:
            store = HashStore()
            threads = [threading.Thread(target=run, args=(rank, store), daemon=True) for rank in range(len(ranks))]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            _uninstall_threaded_pg()
            ProcessLocalGroup.reset()
            _distributed_c10d._set_thread_isolation_mode(False)  # type: ignore[attr-defined]
    if not failures.empty():
        rank, error = failures.get()
        raise SimulationError(f"rank {rank} of {len(ranks)} failed: {type(error).__name__}: {error}") from error
    return results


def _groups(axes: Sequence[Axis], ranks: Sequence[dict[str, int]], rank: int) -> dict[str, str]:
    """The names of this rank's groups along every set of axes."""
    found: dict[str, str] = {}
    for count in range(1, len(axes) + 1):
        for along in itertools.combinations(axes, count):
            name = ".".join(axis.name for axis in along)
            free = {axis.name for axis in along}
            members: dict[tuple[int, ...], list[int]] = {}
            for other, coords in enumerate(ranks):
                members.setdefault(tuple(coords[a.name] for a in axes if a.name not in free), []).append(other)
            for group_ranks in members.values():
                group = dist.new_group(group_ranks)
                if rank in group_ranks:
                    found[name] = group.group_name
    return found
