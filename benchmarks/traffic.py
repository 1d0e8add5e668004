"""Collectives counted as they run, functional ones and those of torch.distributed: how many, and the bytes sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]

from cpcompile.accounting import CountTraffic


class CountSent(CountTraffic):
    """Counts what this rank sends to others inside it. What it sends to itself leaves no rank, and counts nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name in _COUNTED_HERE:
            self.traffic.collectives[name.rpartition("::")[2].strip("_")] += 1
            self.traffic.bytes_sent += _COUNTED_HERE[name](*args)
            return func(*args, **(kwargs or {}))
        if name.startswith(("c10d::", "_c10d_functional")) and name not in _COUNTED_THERE | _SILENT:
            raise NotImplementedError(f"{name} is a collective that is not counted")
        return super().__torch_dispatch__(func, types, args, kwargs)


def _bytes(*tensors: torch.Tensor) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def _split(x: torch.Tensor, sizes: list[int], rank: int, ranks: int) -> int:
    """Bytes of an all-to-all, less this rank's own share; no sizes mean equal ones."""
    if not sizes:
        return _bytes(x) * (ranks - 1) // ranks
    return _bytes(x) * (sum(sizes) - sizes[rank]) // max(sum(sizes), 1)


def _functional_all_to_all(x: torch.Tensor, _received: list[int], sent: list[int], group: Any) -> int:
    resolved = _resolve_process_group(group)
    return _split(x, sent, dist.get_rank(resolved), dist.get_world_size(resolved))


def _all_to_all(_out: torch.Tensor, x: torch.Tensor, _group: Any, _received: Any, sent: Any, *_: Any) -> int:
    return _split(x, sent, dist.get_rank(), dist.get_world_size())  # every group of more than one rank is the world


_COUNTED_HERE: dict[str, Callable[..., int]] = {
    "_c10d_functional::all_to_all_single": _functional_all_to_all,
    "c10d::alltoall_base_": _all_to_all,
    "c10d::_allgather_base_": lambda out, x, *_: _bytes(out) - _bytes(x),
    "c10d::allgather_": lambda outs, xs, *_: sum(map(_bytes, outs[0])) - _bytes(*xs),
    "c10d::_reduce_scatter_base_": lambda out, x, *_: _bytes(x) - _bytes(out),
    "c10d::send": lambda tensors, *_: _bytes(*tensors),
}

_COUNTED_THERE = {
    f"_c10d_functional::{name}" for name in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce")
}

_SILENT = {
    "c10d::recv_",
    "c10d::recv_any_source_",
    "c10d::barrier",
    "_c10d_functional::wait_tensor",
    "_c10d_functional::_wrap_tensor_autograd",
}
