"""``parallelize``: a model over the ranks of a mesh, called like the model, equal to the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, TypeAlias

import torch
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh

from cpcompile.agreement import broadcast, together
from cpcompile.assemble import all_coords
from cpcompile.autocast import switched_off
from cpcompile.compiled import plan_of
from cpcompile.config import configured_mesh, site_options
from cpcompile.errors import CPCompileError, Problem, UnsupportedError
from cpcompile.generators import shared_draws
from cpcompile.mesh import Ranks, ranks_of
from cpcompile.pipeline import GradSync, Options, lower
from cpcompile.plan import ResolvedPlan
from cpcompile.programs import InputsMode, Program, Programs, Settings
from cpcompile.report import Report
from cpcompile.trees import flatten

ExampleInputs: TypeAlias = "Mapping[str, Any] | Sequence[Any]"
Stage: TypeAlias = Literal["captured", "normalized", "rewritten", "lowered"]

_GRAD_SYNC: dict[bool | str, GradSync] = {
    True: "all_reduce",
    "all_reduce": "all_reduce",
    "mean": "mean",
    "sum": "sum",
    False: "none",
    "none": "none",
}


def parallelize(
    model: nn.Module,
    plan: Mapping[str, Any] | None = None,
    mesh: DeviceMesh | None = None,
    *,
    config: Any = None,
    example_inputs: ExampleInputs | None = None,
    strict: bool = False,
    gather_outputs: bool = True,
    grad_sync: bool | Literal["all_reduce", "mean", "sum", "none"] = True,
    dynamic: bool = False,
    inputs: InputsMode = "check",
    timeout_seconds: float = 300.0,
) -> ParallelModule:
    """The model, run over the ranks of ``mesh`` with its sequence divided as ``plan`` says.

    The result takes the model's own arguments (global, the same on every rank) and gives the model's own result. It
    shares the model's parameters; the model itself is left as it was.

    Args:
        model: any module that one call of can be captured as one graph.
        plan: module name -> ``{argument: ContextParallelInput}`` or ``ContextParallelOutput``; None takes the model's
            ``_cp_plan``.
        mesh: see ``cpcompile.mesh.ranks_of``; None takes all processes.
        config: a ``ContextParallelConfig`` or ``ParallelConfig`` (diffusers' own too); the mesh is made from its
            degrees where none is given, and must not contradict them where one is.
        example_inputs: a call's arguments (a dict of keywords, a sequence of positional ones, or a pair of both), to
            compile now instead of at the first call.
        strict: refuse operators that would have to run on gathered operands.
        gather_outputs: whether outputs are whole on every rank. Without it each rank gets its shards, and the loss is
            the sum of the ranks' losses.
        grad_sync: True makes parameters' gradients whole on every rank; "mean" and "sum" leave that to a wrapper that
            takes the mean or sum over the ranks; False leaves them raw.
        dynamic: capture sizes as symbols, so that one program serves calls of every length. Without it, a call with
            other sizes is captured anew.
        inputs: "check" compares the call's tensors between ranks before a new program runs; "broadcast" gives every
            rank those of the first one, at every call.
        timeout_seconds: how long the ranks wait for each other before a new program runs.

    Raises:
        PlanError, MeshError, CaptureError, FallbackError, UnsupportedError, RanksDisagreeError: before anything runs.
    """
    if grad_sync not in _GRAD_SYNC:
        raise UnsupportedError(
            [Problem(f"grad_sync={grad_sync!r}", "there is no such mode", f"use one of {list(_GRAD_SYNC)}")]
        )
    if inputs not in ("check", "broadcast"):
        raise UnsupportedError([Problem(f"inputs={inputs!r}", "there is no such mode", 'use "check" or "broadcast"')])
    resolved = plan_of(model, plan)
    if config is not None:
        mesh = configured_mesh(config, mesh, _device_type(model))
    ranks = ranks_of(mesh, _device_type(model))
    options = Options(gather_outputs=gather_outputs, grad_sync=_GRAD_SYNC[grad_sync], sites=site_options(config))
    module = ParallelModule(model, resolved, ranks, Settings(options, strict, dynamic, inputs, timeout_seconds))
    if example_inputs is not None:
        module._program(*_call_arguments(example_inputs))
    return module


class ParallelModule(nn.Module):
    """A model that runs over the ranks. Parameters, submodules and attributes are the model's own."""

    def __init__(self, model: nn.Module, plan: ResolvedPlan, ranks: Ranks, settings: Settings) -> None:
        super().__init__()
        own = self.__dict__
        own["_parallel_model"] = model
        own["_parallel_ranks"] = ranks
        own["_parallel_broadcasts"] = settings.inputs == "broadcast"
        own["_parallel_programs"] = Programs(model, plan, ranks, settings)
        for shared in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            own[shared] = getattr(model, shared)
        own["training"] = model.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model. Takes its arguments, gives its result."""
        with together(self._parallel_programs.name, self._parallel_ranks):
            program, tensors = self._program(args, kwargs)
            with self._shared_draws(program, tensors), switched_off(program.captured.autocast):
                return program.captured.output.build(program.module(*tensors))

    def report(self) -> Report:
        """What was sharded, what each attention became, how many bytes move, and why, for the latest kind of call.

        Raises:
            CPCompileError: nothing was compiled yet.
        """
        return self._latest().report

    def graph_module(self, stage: Stage = "lowered", rank: int | None = None) -> fx.GraphModule:
        """The graph of the latest kind of call at a stage; lowered, that of this rank or of another one.

        Raises:
            CPCompileError: nothing was compiled yet.
        """
        program = self._latest()
        if stage == "captured":
            return program.captured.module
        if stage == "normalized":
            return program.rewritten.normalized
        if stage == "rewritten":
            return program.rewritten.module
        if rank is None:
            return program.module
        return lower(program.rewritten, all_coords(program.rewritten.axes)[rank])

    def train(self, mode: bool = True) -> ParallelModule:
        """Set the model's mode."""
        self._parallel_model.train(mode)
        self.__dict__["training"] = mode
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_parallel_model"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if "_parallel_model" in self.__dict__:
            setattr(self._parallel_model, name, value)
        else:
            super().__setattr__(name, value)

    def _program(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Program, list[torch.Tensor]]:
        """The program for a call, and the call's tensors: those of the first rank where they are broadcast."""
        tensors, structure = flatten((tuple(args), dict(kwargs)))
        if self._parallel_broadcasts:
            args, kwargs = structure.build(broadcast(tensors, self._parallel_ranks))
        programs: Programs = self._parallel_programs
        return programs.find(args, kwargs)

    def _shared_draws(self, program: Program, tensors: Sequence[torch.Tensor]) -> AbstractContextManager[None]:
        """Random draws of the program are the same on all ranks, where it makes any."""
        if not program.rewritten.draws:
            return nullcontext()
        device = tensors[0].device if tensors else torch.device(_device_type(self._parallel_model))
        return shared_draws(self._parallel_ranks, device)

    def _latest(self) -> Program:
        programs: Programs = self._parallel_programs
        if programs.latest is None:
            raise CPCompileError("nothing was compiled yet: call the module once, or pass example_inputs=")
        return programs.latest


def _call_arguments(example_inputs: ExampleInputs) -> tuple[Sequence[Any], Mapping[str, Any]]:
    if isinstance(example_inputs, Mapping):
        return (), example_inputs
    if (
        len(example_inputs) == 2
        and isinstance(example_inputs[0], (tuple, list))
        and isinstance(example_inputs[1], Mapping)
    ):
        return example_inputs[0], example_inputs[1]
    return tuple(example_inputs), {}


def _device_type(model: nn.Module) -> str:
    parameter = next(model.parameters(), None)
    return "cpu" if parameter is None else parameter.device.type
