"""``parallelize``: a model over the ranks of a mesh, called like the model, equal to the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh

from cpcompile.capture import Captured
from cpcompile.compiled import captured_call, compile_call, plan_of
from cpcompile.errors import CPCompileError, Problem, UnsupportedError
from cpcompile.mesh import Ranks, ranks_of
from cpcompile.pipeline import GradSync, Options, Rewritten, bind_groups, lower
from cpcompile.plan import ResolvedPlan
from cpcompile.report import Report
from cpcompile.trees import Structure, flatten

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
    example_inputs: ExampleInputs | None = None,
    strict: bool = False,
    gather_outputs: bool = True,
    grad_sync: bool | Literal["all_reduce", "mean", "sum", "none"] = True,
) -> ParallelModule:
    """The model, run over the ranks of ``mesh`` with its sequence divided as ``plan`` says.

    The result takes the model's own arguments (global, the same on every rank) and gives the model's own result. It
    shares the model's parameters; the model itself is left as it was.

    Args:
        model: any module that one call of can be captured as one graph.
        plan: module name -> ``{argument: ContextParallelInput}`` or ``ContextParallelOutput``; None takes the model's
            ``_cp_plan``.
        mesh: see ``cpcompile.mesh.ranks_of``; None takes all processes.
        example_inputs: a call's arguments (a dict of keywords, a sequence of positional ones, or a pair of both), to
            compile now instead of at the first call.
        strict: refuse operators that would have to run on gathered operands.
        gather_outputs: whether outputs are whole on every rank. Without it each rank gets its shards, and the loss is
            the sum of the ranks' losses.
        grad_sync: True makes parameters' gradients whole on every rank; "mean" and "sum" leave that to a wrapper that
            takes the mean or sum over the ranks; False leaves them raw.

    Raises:
        PlanError, MeshError, CaptureError, FallbackError, UnsupportedError: before anything runs.
    """
    if grad_sync not in _GRAD_SYNC:
        raise UnsupportedError(
            [Problem(f"grad_sync={grad_sync!r}", "there is no such mode", f"use one of {list(_GRAD_SYNC)}")]
        )
    resolved = plan_of(model, plan)
    ranks = ranks_of(mesh, _device_type(model))
    options = Options(gather_outputs=gather_outputs, grad_sync=_GRAD_SYNC[grad_sync])
    module = ParallelModule(model, resolved, ranks, options, strict=strict)
    if example_inputs is not None:
        args, kwargs = _call_arguments(example_inputs)
        module._entry(args, kwargs)
    return module


@dataclass(frozen=True)
class _Entry:
    """One compiled kind of call."""

    captured: Captured
    rewritten: Rewritten
    report: Report
    program: fx.GraphModule


class ParallelModule(nn.Module):
    """A model that runs over the ranks. Parameters, submodules and attributes are the model's own."""

    def __init__(self, model: nn.Module, plan: ResolvedPlan, ranks: Ranks, options: Options, *, strict: bool) -> None:
        super().__init__()
        own = self.__dict__
        own["_parallel_model"] = model
        own["_parallel_plan"] = plan
        own["_parallel_ranks"] = ranks
        own["_parallel_options"] = options
        own["_parallel_strict"] = strict
        own["_parallel_entries"] = {}
        own["_parallel_last"] = None
        for shared in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            own[shared] = getattr(model, shared)
        own["training"] = model.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model. Takes its arguments, gives its result."""
        entry, tensors = self._entry(args, kwargs)
        return entry.captured.output.build(entry.program(*tensors))

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
        entry = self._latest()
        if stage == "captured":
            return entry.captured.module
        if stage == "normalized":
            return entry.rewritten.normalized
        if stage == "rewritten":
            return entry.rewritten.module
        if rank is None:
            return entry.program
        from cpcompile.assemble import all_coords

        return lower(entry.rewritten, all_coords(entry.rewritten.axes)[rank])

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

    def _latest(self) -> _Entry:
        if self._parallel_last is None:
            raise CPCompileError("nothing was compiled yet: call the module once, or pass example_inputs=")
        entry: _Entry = self._parallel_last
        return entry

    def _entry(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[_Entry, list[torch.Tensor]]:
        """The compiled program for a call, made if there is none, and the call's tensors."""
        tensors, structure = flatten((tuple(args), dict(kwargs)))
        _refuse_autocast(tensors)
        key = (_call_key(tensors, structure), _model_key(self._parallel_model))
        entries: dict[Any, _Entry] = self._parallel_entries
        if key not in entries:
            entries[key] = self._compile(args, kwargs)
        self.__dict__["_parallel_last"] = entries[key]
        return entries[key], tensors

    def _compile(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Entry:
        ranks: Ranks = self._parallel_ranks
        captured = captured_call(self._parallel_model, self._parallel_plan, args, kwargs)
        rewritten, report = compile_call(captured, ranks.axes, self._parallel_options, strict=self._parallel_strict)
        program = lower(rewritten, ranks.coords)
        bind_groups(program, ranks.groups)
        return _Entry(captured, rewritten, report, program)


def _call_key(tensors: Sequence[torch.Tensor], structure: Structure) -> Any:
    """What a captured call is valid for: its tensors' metadata and every value that is no tensor."""
    metadata = tuple((tuple(x.shape), x.dtype, x.device, x.requires_grad, x.layout) for x in tensors)
    return metadata, structure.key()


def _model_key(model: nn.Module) -> Any:
    """What a capture holds of the model itself: which tensors it has, and each module's mode."""
    tensors = (*model.parameters(), *model.buffers())
    held = tuple((id(x), x.dtype, x.device, x.requires_grad) for x in tensors)
    return held, tuple(module.training for module in model.modules())


def _refuse_autocast(tensors: Sequence[torch.Tensor]) -> None:
    for device_type in {tensor.device.type for tensor in tensors}:
        if torch.is_autocast_enabled(device_type):
            raise UnsupportedError(
                [
                    Problem(
                        f"torch.autocast({device_type!r}) around the call",
                        "a program that was compiled without autocast would run under it",
                        "convert the model instead (model.to(torch.bfloat16)), or leave the autocast region",
                    )
                ]
            )


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
