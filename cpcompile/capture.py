"""A model becomes one global graph: pre-dispatch ATen, the model's own parameters, a marker where the plan acts.

In: a model, its resolved plan, one call's arguments. Out: a ``Captured`` whose graph takes the call's tensors in order
and returns the output's tensors in order, with sizes as one device sees them. Refused: a model that Python control
flow, data-dependent sizes or unknown objects keep from being one graph (``CaptureError``, with the user's line).
"""

from __future__ import annotations

import contextlib
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo.config
import torch.fx.experimental._config
from torch import fx, nn
from torch.export import Dim
from torch.export.graph_signature import InputKind
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from cpcompile.autocast import Autocast, ambient
from cpcompile.errors import CaptureError
from cpcompile.graphs import source_line
from cpcompile.marking import Marking
from cpcompile.plan import ResolvedPlan
from cpcompile.snapshot import untouched
from cpcompile.symbols import Sizes
from cpcompile.trees import Structure, flatten


@dataclass(frozen=True)
class Captured:
    """One captured call.

    module: a GraphModule over the model's own parameters; its placeholders are the call's tensors in order.
    inputs, output: how arguments and result are built of tensors and of values that the capture holds fixed.
    names: for each placeholder, what the caller calls it.
    notes: what the plan asked for and the call did not have.
    sizes: for which shapes of the tensors the capture is valid. autocast: what was switched on around the call.
    """

    module: fx.GraphModule
    inputs: Structure
    output: Structure
    names: tuple[str, ...]
    plan: ResolvedPlan
    notes: tuple[str, ...]
    sizes: Sizes
    autocast: tuple[Autocast, ...] = ()


class _Call(nn.Module):
    """The model as a function of its tensors alone: whatever else the call passed is fixed."""

    def __init__(self, model: nn.Module, inputs: Structure, output: Callable[[Structure], None]) -> None:
        super().__init__()
        self.model = model
        self._inputs = inputs
        self._output = output  # export puts a module's attributes back, so the structure goes out through a function

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        args, kwargs = self._inputs.build(tensors)
        leaves, structure = flatten(self.model(*args, **kwargs))
        self._output(structure)
        return tuple(leaves)


def capture(
    model: nn.Module, plan: ResolvedPlan, args: Sequence[Any], kwargs: Mapping[str, Any], *, dynamic: bool = False
) -> Captured:
    """Capture one call of ``model`` as a graph, with markers where ``plan`` acts. The model is left as it was.

    With ``dynamic``, every size of the tensors that the model itself does not pin down becomes a symbol.

    Raises:
        CaptureError: the call cannot be one graph.
        PlanError: the plan does not fit the tensors that the call brings.
    """
    tensors, inputs = flatten((tuple(args), dict(kwargs)))
    names = inputs.leaf_names(model)
    outputs: list[Structure] = []
    call = _Call(model, inputs, outputs.append)
    marking = Marking(plan)
    autocast = ambient(tensor.device.type for tensor in tensors)
    examples = tuple(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors)
    shapes = (tuple(dict.fromkeys(range(tensor.dim()), Dim.AUTO) for tensor in tensors),) if dynamic else None
    with untouched(model), marking.hooked(model), _tracing():
        try:
            exported = torch.export.export(call, examples, dynamic_shapes=shapes, strict=False)
        except Exception as error:
            marking.raise_problems()
            raise _capture_error(error) from error
    marking.raise_problems()
    _refuse_unknown(exported.graph)
    module = _shared(exported, model, names)
    fakes = [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"]
    sizes = Sizes.of(fakes, tensors)
    return Captured(module, inputs, outputs[-1], names, plan, (*plan.notes, *marking.notes()), sizes, autocast)


def _refuse_unknown(graph: fx.Graph) -> None:
    """Refuse sizes that only the data give (the tokens of a boolean index), and what is no call of an operator."""
    for node in graph.nodes:
        if getattr(node.target, "__module__", "").startswith("torch._functorch"):
            law = "torch.vmap hides a dimension from every operator in it"
            raise CaptureError(law, source_line(node), remedy="write the dimension out")
        values = node.meta.get("val")
        values = values if isinstance(values, (list, tuple)) else (values,)
        if any(isinstance(x, (torch.Tensor, torch.SymInt)) and free_unbacked_symbols(x) for x in values):
            law = f"{node.target} gives a size that depends on data: no rank could know it before it runs"
            raise CaptureError(law, source_line(node), remedy="mask the values instead of selecting them")


@contextlib.contextmanager
def _tracing() -> Iterator[None]:
    """Equal sizes of the example call are no reason to be equal in others, floats are no symbols, and what a forward
    assigns is no reason to warn: it is put back (``untouched``)."""
    with (
        torch._dynamo.config.patch(specialize_float=True),
        torch.fx.experimental._config.patch(use_duck_shape=False),  # type: ignore[attr-defined]
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", "The tensor attributes? .* (was|were) assigned during export")
        yield


def _shared(exported: torch.export.ExportedProgram, model: nn.Module, names: Sequence[str]) -> fx.GraphModule:
    """The exported graph with parameters, buffers and constants as attributes: the model's own objects."""
    root = nn.Module()
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    specs = iter(exported.graph_signature.input_specs)
    own_names = iter(names)
    for node in exported.graph.nodes:
        if node.op != "placeholder":
            env[node] = graph.node_copy(node, lambda old: env[old])
            env[node].meta = dict(node.meta)
            continue
        spec = next(specs)
        if spec.kind is InputKind.USER_INPUT:
            new = graph.placeholder(_identifier(next(own_names)))
        elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            assert spec.target is not None
            name = spec.target.removeprefix("model.")
            _set_attribute(root, name, _get_attribute(model, name))
            new = graph.get_attr(name)
        elif spec.kind is InputKind.CONSTANT_TENSOR:
            assert spec.target is not None
            name = "constant_" + spec.target.replace(".", "_")
            root.register_buffer(name, exported.constants[spec.target], persistent=False)
            new = graph.get_attr(name)
        else:
            raise CaptureError(f"the model uses an object that a graph cannot hold: {spec.target} ({spec.kind.name})")
        new.meta = dict(node.meta)
        env[node] = new
    for name, submodule in exported.graph_module.named_children():  # bodies of higher-order operators
        if isinstance(submodule, fx.GraphModule):
            root.add_module(name, submodule)
    return fx.GraphModule(root, graph, class_name="Captured")


def _identifier(name: str) -> str:
    return "".join(char if char.isalnum() else "_" for char in name)


def _get_attribute(model: nn.Module, name: str) -> Any:
    owner, _, leaf = name.rpartition(".")
    return getattr(model.get_submodule(owner), leaf)


def _set_attribute(root: nn.Module, name: str, value: torch.Tensor) -> None:
    """Put a tensor into ``root`` under its full name, with plain modules on the way."""
    *owners, leaf = name.split(".")
    for owner in owners:
        if owner not in root._modules:
            root.add_module(owner, nn.Module())
        child = root._modules[owner]
        assert child is not None
        root = child
    if isinstance(value, nn.Parameter):
        root.register_parameter(leaf, value)
    else:
        root.register_buffer(leaf, value)


_INTERNAL = ("/torch/", "/cpcompile/", "/passes/", "<frozen", "<eval_with_key>", "<string>")


def _capture_error(error: Exception) -> CaptureError:
    """The error with the innermost line of the user's code on its way."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not any(part in frame.filename for part in _INTERNAL)]
    reason = str(error).strip().split("\n\n")[0] or type(error).__name__
    if not own:
        return CaptureError(f"{type(error).__name__}: {reason}")
    frame = own[-1]
    return CaptureError(
        f"{type(error).__name__}: {reason}", f"{frame.filename}:{frame.lineno} in {frame.name}", frame.line
    )
