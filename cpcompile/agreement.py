"""Ranks agree, or stop: before a new program runs, all ranks show each other what they are about to run it on.

Over the process group's store, with a timeout, so that a rank that comes alone ends with a message and not in a hang.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]

from cpcompile.errors import Problem, RanksDisagreeError
from cpcompile.mesh import Ranks

_TOGETHER = "call the module on every rank with the same kinds of arguments, and change the model on all of them"
_SAMPLE = 64  # elements of each parameter that are compared


@dataclass(frozen=True)
class Claim:
    """What one rank is about to run. Each part is a name and a digest; ``inputs`` names the call's tensors."""

    inputs: Mapping[str, str]
    parameters: Mapping[str, str]
    program: str

    def text(self) -> str:
        """The claim as it travels."""
        return json.dumps({"inputs": self.inputs, "parameters": self.parameters, "program": self.program})


def claim_of(
    names: Sequence[str], tensors: Sequence[torch.Tensor], model: nn.Module, program: str, *, values: bool
) -> Claim:
    """This rank's claim; with ``values`` the inputs' numbers are part of it, else only their shapes and dtypes."""
    inputs = {
        name: f"{tuple(tensor.shape)} {tensor.dtype}" + (f" {digest(tensor)}" if values else "")
        for name, tensor in zip(names, tensors, strict=True)
    }
    parameters = {
        name: f"{tuple(x.shape)} {x.dtype} {x.requires_grad} {digest(x.detach().reshape(-1)[:_SAMPLE])}"
        for name, x in (*model.named_parameters(), *model.named_buffers())
    }
    return Claim(inputs, parameters, hashlib.blake2b(program.encode(), digest_size=16).hexdigest())


def digest(tensor: torch.Tensor) -> str:
    """A digest of a tensor's numbers."""
    plain = tensor.detach().to("cpu").contiguous()
    raw = ctypes.string_at(plain.data_ptr(), plain.numel() * plain.element_size()) if plain.numel() else b""
    return hashlib.blake2b(raw, digest_size=16).hexdigest()


def agree(mine: Claim, module: int, program: int, ranks: Sequence[int], timeout_seconds: float) -> None:
    """Compare this rank's claim with those of all ``ranks``, which must come to the same program of the same module.

    Raises:
        RanksDisagreeError: on every rank, where a claim differs; or where some ranks did not come in time.
    """
    store, me, key = _store(), dist.get_rank(), f"{module}/{program}"
    store.set(f"{key}/{me}", mine.text())
    claims: dict[int, Mapping[str, object]] = {}
    missing: list[int] = []
    for rank in ranks:
        try:
            store.wait([f"{key}/{rank}"], timedelta(seconds=0.001 if missing else timeout_seconds))
        except dist.DistStoreError:
            missing.append(rank)
            continue
        claims[rank] = json.loads(store.get(f"{key}/{rank}"))
    if missing:
        law = (
            f"rank {me} compiled a call that {_ranks(missing)} did not come to in {timeout_seconds:g} seconds: "
            "the ranks were called with different arguments, or the model was changed on some of them"
        )
        store.set(f"{module}/stopped", law)
        raise RanksDisagreeError([Problem(f"program {key}", law, _TOGETHER)])
    problems = [*_differing(claims, "inputs"), *_differing(claims, "parameters"), *_program(claims)]
    if problems:
        raise RanksDisagreeError(problems)


@contextlib.contextmanager
def together(module: int, ranks: Ranks) -> Iterator[None]:
    """Inside, a collective that fails because another rank stopped ends with that rank's reason.

    A rank that stops alone takes its groups down with it, so that the others do not wait for it.

    Raises:
        RanksDisagreeError: another rank stopped, or this one did.
    """
    if len(ranks.members) == 1:
        yield
        return
    try:
        yield
    except RanksDisagreeError:
        if _store().check([f"{module}/stopped"]):
            _leave(ranks)
        raise
    except RuntimeError as error:
        if not _store().check([f"{module}/stopped"]):
            raise
        law = _store().get(f"{module}/stopped").decode()
        raise RanksDisagreeError([Problem("a collective of this program", law, _TOGETHER)]) from error


def _leave(ranks: Ranks) -> None:
    """Take this rank's groups down. Aborting them is not enough where the backend is gloo: its peers wait on."""
    for name in dict.fromkeys(ranks.groups.values()):
        with contextlib.suppress(RuntimeError, ValueError, AssertionError):  # gone with the default group
            dist.destroy_process_group(_resolve_process_group(name))  # type: ignore[arg-type]
    gc.collect()


def _store() -> PrefixStore:
    return PrefixStore("cpcompile", dist.distributed_c10d._get_default_store())


def broadcast(tensors: Sequence[torch.Tensor], ranks: Ranks) -> list[torch.Tensor]:
    """The tensors of the first rank, on all of them. A tensor that requires grad keeps its own gradient."""
    if len(ranks.members) == 1:
        return list(tensors)
    group = _resolve_process_group(ranks.groups[".".join(axis.name for axis in ranks.axes)])  # type: ignore[arg-type]
    received: list[torch.Tensor] = []
    for tensor in tensors:
        buffer = tensor.detach().clone(memory_format=torch.contiguous_format)
        dist.broadcast(buffer, ranks.members[0], group=group)
        received.append(_Received.apply(tensor, buffer) if tensor.requires_grad else buffer)  # type: ignore[no-untyped-call]
    return received


class _Received(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mine: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
        return theirs

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


def _differing(claims: Mapping[int, Mapping[str, object]], part: str) -> list[Problem]:
    found: list[Problem] = []
    first = min(claims)
    names = dict.fromkeys(name for claim in claims.values() for name in _part(claim, part))
    what = "the tensor" if part == "inputs" else "the parameter or buffer"
    remedy = (
        'give every rank the same (draw it with the same seed), or parallelize(..., inputs="broadcast")'
        if part == "inputs"
        else "load the same weights on every rank before parallelize"
    )
    for name in names:
        values = {rank: _part(claim, part).get(name) for rank, claim in claims.items()}
        others = [rank for rank, value in values.items() if value != values[first]]
        if others:
            law = f"{what} on {_ranks(others)} is not the one on rank {first}"
            metadata = {str(value).rsplit(" ", 1)[0] for value in values.values()}
            if len(metadata) > 1:
                law += f" ({'; '.join(sorted(metadata))})"
            found.append(Problem(name, law, remedy))
    return found


def _program(claims: Mapping[int, Mapping[str, object]]) -> list[Problem]:
    first = min(claims)
    others = [rank for rank, claim in claims.items() if claim["program"] != claims[first]["program"]]
    if not others:
        return []
    law = f"the program on {_ranks(others)} is not the one on rank {first}"
    remedy = "use the same model code, plan and non-tensor arguments on every rank"
    return [Problem("the rewritten graph", law, remedy)]


def _part(claim: Mapping[str, object], part: str) -> Mapping[str, str]:
    found = claim[part]
    assert isinstance(found, dict)
    return found


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
