"""The command line: ``cpcompile dump`` shows graphs, ``cpcompile check`` compares with the single device."""

from __future__ import annotations

import enum
import importlib.util
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from torch import nn

from cpcompile.assemble import all_coords
from cpcompile.compiled import captured_call, compile_call, plan_of
from cpcompile.errors import CPCompileError
from cpcompile.pipeline import Options, lower, planned
from cpcompile.show import text
from cpcompile.simulate import check as check_model
from cpcompile.simulate import mesh_axes

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)

Source = Annotated[
    str, typer.Argument(metavar="FILE.py:FUNCTION", help="A function that returns (model, kwargs), or a plan as third.")
]
Ring = Annotated[int, typer.Option(help="Ranks along the ring axis.")]
Ulysses = Annotated[int, typer.Option(help="Ranks along the ulysses axis.")]


class Stage(enum.StrEnum):
    """How far a graph has come."""

    captured = "captured"
    planned = "planned"
    rewritten = "rewritten"
    lowered = "lowered"


@app.command()
def dump(
    source: Source,
    ring: Ring = 1,
    ulysses: Ulysses = 1,
    stage: Annotated[Stage, typer.Option(help="Which graph to show.")] = Stage.rewritten,
    rank: Annotated[int, typer.Option(help="Whose program, for the lowered stage.")] = 0,
    dynamic: Annotated[bool, typer.Option("--dynamic", help="Capture sizes as symbols.")] = False,
) -> None:
    """Show the graph of one call as text, layouts beside it as comments."""
    model, kwargs, plan = _load(source)
    with _errors():
        axes = mesh_axes(ring, ulysses)
        captured = captured_call(model, plan_of(model, plan), (), kwargs, dynamic=dynamic)
        if stage is Stage.captured:
            print(text(captured.module))
            return
        if stage is Stage.planned:
            print(text(planned(captured, axes, Options())))
            return
        rewritten, _ = compile_call(captured, axes, Options())
        if stage is Stage.rewritten:
            print(text(rewritten.module))
            return
        ranks = all_coords(rewritten.axes)
        if not 0 <= rank < len(ranks):
            _stop(f"rank {rank}: there are ranks 0 to {len(ranks) - 1}")
        print(text(lower(rewritten, ranks[rank]), coords=ranks[rank]))


@app.command()
def check(
    source: Source,
    ring: Ring = 1,
    ulysses: Ulysses = 1,
    backward: Annotated[bool, typer.Option(help="Compare gradients too.")] = True,
    bisect: Annotated[bool, typer.Option("--bisect", help="Name the first value that differs.")] = False,
) -> None:
    """Run all ranks in this process and compare with the model itself. Exit code 1 where they are not equal."""
    model, kwargs, plan = _load(source)
    with _errors():
        report = check_model(model, plan, ring=ring, ulysses=ulysses, kwargs=kwargs, backward=backward, bisect=bisect)
    Console().print(report)
    if not report.ok:
        raise typer.Exit(1)


def _load(source: str) -> tuple[nn.Module, Mapping[str, Any], Mapping[str, Any] | None]:
    """The model, the call and the plan that a function in a file makes."""
    path, _, name = source.rpartition(":")
    if not path or not name:
        _stop(f"{source}: say FILE.py:FUNCTION")
    file = Path(path)
    if not file.is_file():
        _stop(f"{path}: there is no such file")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        _stop(f"{path}: not a Python file")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(file.stem, module)
    sys.path.insert(0, str(file.parent))
    spec.loader.exec_module(module)
    function: Callable[[], Any] | None = getattr(module, name, None)
    if not callable(function):
        _stop(f"{path}: it has no function {name}")
    assert function is not None
    made = function()
    if not isinstance(made, tuple) or len(made) not in (2, 3) or not isinstance(made[0], nn.Module):
        _stop(f"{source}: it must return (model, kwargs) or (model, kwargs, plan)")
    return made[0], made[1], made[2] if len(made) == 3 else None


def _stop(message: str) -> None:
    Console(stderr=True).print(message, style="red", highlight=False, markup=False)
    raise typer.Exit(2)


class _errors:
    """Errors that cpcompile raises on purpose end the command with their message and code 2."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, _type: object, error: BaseException | None, _traceback: object) -> None:
        if isinstance(error, CPCompileError):
            _stop(str(error))
