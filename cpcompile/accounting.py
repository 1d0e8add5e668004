"""Collectives counted as they run: how many, and the bytes that leave this rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]
from torch.utils._python_dispatch import TorchDispatchMode

_c10d = torch.ops._c10d_functional


@dataclass
class Traffic:
    """What one rank sent. collectives: how often each kind ran. bytes_sent: bytes that left the rank."""

    collectives: Counter[str] = field(default_factory=Counter)
    bytes_sent: int = 0


class CountTraffic(TorchDispatchMode):
    """Counts the functional collectives of this thread that run inside it.

    An all-to-all sends what its splits say (a rank's own share has none), an all-gather the local tensor to each other
    rank, a reduce-scatter all but the rank's own share, an all-reduce both of these (the ring algorithm).
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.traffic = Traffic()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        count = _COUNTED.get(func)
        if count is not None:
            self.traffic.collectives[func._schema.name.removeprefix("_c10d_functional::")] += 1
            self.traffic.bytes_sent += count(*args)
        return func(*args, **(kwargs or {}))


def _all_to_all(x: torch.Tensor, _out: list[int], sent: list[int], _group: str) -> int:
    row = x.numel() // x.shape[0] if x.shape[0] else 0
    return sum(sent) * row * x.element_size()


def _all_gather(x: torch.Tensor, ranks: int, _group: str) -> int:
    return x.numel() * x.element_size() * (ranks - 1)


def _reduce_scatter(x: torch.Tensor, _op: str, ranks: int, _group: str) -> int:
    return x.numel() * x.element_size() * (ranks - 1) // ranks


def _all_reduce(x: torch.Tensor, _op: str, group: str) -> int:
    ranks = dist.get_world_size(_resolve_process_group(group))  # type: ignore[arg-type]
    return 2 * x.numel() * x.element_size() * (ranks - 1) // ranks


_COUNTED: dict[Any, Callable[..., int]] = {
    _c10d.all_to_all_single.default: _all_to_all,
    _c10d.all_gather_into_tensor.default: _all_gather,
    _c10d.reduce_scatter_tensor.default: _reduce_scatter,
    _c10d.all_reduce.default: _all_reduce,
}
