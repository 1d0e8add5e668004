"""One generator for all ranks: draws inside a program are the single device's, whatever each rank's own seed."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]
from torch.utils._python_dispatch import TorchDispatchMode

from cpcompile.mesh import Ranks

_one_at_a_time = threading.Lock()


class DrawFrom(TorchDispatchMode):
    """Draws of this thread come from a generator state of its own: simulated ranks share the CPU's default one."""

    def __init__(self, state: torch.Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._state = state.clone()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        with _one_at_a_time:
            others = torch.get_rng_state()
            torch.set_rng_state(self._state)
            result = func(*args, **(kwargs or {}))
            self._state = torch.get_rng_state()
            torch.set_rng_state(others)
        return result


@contextlib.contextmanager
def shared_draws(ranks: Ranks, device: torch.device) -> Iterator[None]:
    """Inside, all ranks draw from the first rank's generators; outside, each goes on with its own."""
    states = [torch.get_rng_state()]
    if device.type != "cpu":
        states.append(torch.get_device_module(device).get_rng_state(device))
    if len(ranks.members) == 1:
        yield
        return
    group = _resolve_process_group(ranks.groups[".".join(axis.name for axis in ranks.axes)])  # type: ignore[arg-type]
    for index, state in enumerate(states):
        shared = state.clone().to(device)
        dist.broadcast(shared, ranks.members[0], group=group)
        _set(index, shared.cpu(), device)
    try:
        yield
    finally:
        if dist.get_rank() != ranks.members[0]:
            for index, state in enumerate(states):
                _set(index, state, device)


def _set(index: int, state: torch.Tensor, device: torch.device) -> None:
    if index == 0:
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)
