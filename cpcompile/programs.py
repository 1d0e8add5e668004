"""The compiled programs of one parallel module: found again by what a capture is valid for, else made."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import fx, nn

from cpcompile.agreement import agree, claim_of
from cpcompile.autocast import ambient
from cpcompile.capture import Captured
from cpcompile.compiled import captured_call, compile_call
from cpcompile.fingerprint import Fingerprint
from cpcompile.mesh import Ranks
from cpcompile.pipeline import Options, Rewritten, bind_groups, lower, shortest_sizes
from cpcompile.plan import ResolvedPlan
from cpcompile.report import Report
from cpcompile.show import text
from cpcompile.trees import Structure, flatten

InputsMode: TypeAlias = Literal["check", "broadcast"]

_serial = itertools.count()  # parallel modules in the order in which they were made, which is the same on all ranks


@dataclass(frozen=True)
class Settings:
    """What a parallel module was told. timeout_seconds: how long ranks wait for each other before a new program."""

    options: Options
    strict: bool = False
    dynamic: bool = False
    inputs: InputsMode = "check"
    timeout_seconds: float = 300.0


@dataclass(frozen=True)
class Program:
    """One compiled kind of call: for calls whose shapes ``matches`` accepts, on the model as ``fingerprint`` saw it."""

    captured: Captured
    rewritten: Rewritten
    report: Report
    module: fx.GraphModule
    matches: Callable[[Sequence[Sequence[int]]], bool]
    fingerprint: Fingerprint


class Programs:
    """All programs of one parallel module."""

    def __init__(self, model: nn.Module, plan: ResolvedPlan, ranks: Ranks, settings: Settings) -> None:
        self._model = model
        self._plan = plan
        self._ranks = ranks
        self._settings = settings
        self.name = next(_serial)
        self._made = 0
        self._programs: dict[Any, list[Program]] = {}
        self.latest: Program | None = None

    def find(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Program, list[torch.Tensor]]:
        """The program for a call, made if there is none, and the call's tensors.

        Raises:
            RanksDisagreeError: the ranks came to a new program with different things, or not all of them came.
        """
        tensors, structure = flatten((tuple(args), dict(kwargs)))
        shapes = [tensor.shape for tensor in tensors]
        candidates = self._programs.setdefault(_call_key(tensors, structure), [])
        current: dict[int, bool] = {}
        for program in candidates:
            seen = id(program.fingerprint)
            if program.matches(shapes):
                if seen not in current:
                    current[seen] = program.fingerprint.holds()
                if current[seen]:
                    self.latest = program
                    return program, tensors
        program = self._compile(args, kwargs, tensors)
        candidates.append(program)
        self.latest = program
        return program, tensors

    def _compile(self, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Sequence[torch.Tensor]) -> Program:
        ranks, settings = self._ranks, self._settings
        fingerprint = self._fingerprint()
        shapes = [tensor.shape for tensor in tensors]
        for dynamic in (True, False) if settings.dynamic else (False,):
            captured = captured_call(self._model, self._plan, args, kwargs, dynamic=dynamic)
            rewritten, report = compile_call(captured, ranks.axes, settings.options, strict=settings.strict)
            matches = captured.sizes.matcher(shortest_sizes(rewritten))
            if matches(
                shapes
            ):  # not where symbols are taken to be as long as there are ranks, and this call is shorter
                break
        if len(ranks.members) > 1:
            values = settings.inputs == "check"
            claim = claim_of(captured.names, tensors, self._model, text(rewritten.module), values=values)
            agree(claim, self.name, self._made, ranks.members, settings.timeout_seconds)
        self._made += 1
        module = lower(rewritten, ranks.coords)
        bind_groups(module, ranks.groups)
        return Program(captured, rewritten, report, module, matches, fingerprint)

    def _fingerprint(self) -> Fingerprint:
        """One for all programs of the same state of the model."""
        for program in itertools.chain.from_iterable(self._programs.values()):
            if program.fingerprint.holds():
                return program.fingerprint
        return Fingerprint(self._model)


def _call_key(tensors: Sequence[torch.Tensor], structure: Structure) -> Any:
    """What a program is valid for but for shapes: tensors' metadata, every value that is no tensor, the modes."""
    metadata = tuple((x.dtype, x.device, x.requires_grad, x.dim(), x.layout) for x in tensors)
    autocast = ambient(tensor.device.type for tensor in tensors)
    return metadata, structure.key(), autocast, torch.is_grad_enabled()
