"""Attention over two processes: ours, that of others, and dense attention on one, side by side in one run.

    make bench
    python -m benchmarks.attention --sizes 1024,4096 --rounds 5 --no-backward

Every round runs each contestant once, in an order of its own, so that what disturbs the machine disturbs all of them.
One thread for each process; gloo; batch 1, 8 heads of 64, fp32. Before it is timed, each result is held against dense
attention's.
"""

from __future__ import annotations

import os
import pickle
import platform
import tempfile
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from torch.multiprocessing.spawn import start_processes

from benchmarks.optional_peers import contestants_of_optional_peers
from benchmarks.ours import contestants_of_ours, dense
from benchmarks.peers import contestants_of_peers
from benchmarks.plot import draw
from benchmarks.problem import make_problem, solve
from benchmarks.race import Result, race
from benchmarks.tables import LEGEND, show, write

RANKS = 2


def run_rank(rank: int, folder: str, settings: tuple[list[int], list[bool], list[bool], int, float]) -> None:
    """One process: race on every problem; the first one leaves the results in ``folder``."""
    sizes, causals, backwards, rounds, seconds = settings
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of peers that call what torch deprecates
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS, timeout=timedelta(minutes=5)
    )
    console = _console()
    contestants = [dense(), *contestants_of_ours(), *contestants_of_peers(), *contestants_of_optional_peers()]
    tables: list[list[Result]] = []
    for causal in causals:
        for tokens in sizes:
            problem = make_problem(tokens, rank, RANKS, causal)
            for backward in backwards:
                results = race(contestants, problem, solve(problem, backward), backward, rounds, seconds)
                tables.append(results)
                if rank == 0:
                    show(console, results)
    if rank == 0:
        Path(folder, "tables").write_bytes(pickle.dumps(tables))
    dist.destroy_process_group()


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=160)


def main(
    sizes: Annotated[str, typer.Option(help="Tokens, separated by commas.")] = "1024,4096,16384",
    rounds: Annotated[int, typer.Option(min=2, help="How often each contestant is timed.")] = 15,
    seconds: Annotated[float, typer.Option(help="Fewer rounds (but 5) where a table would take longer.")] = 120.0,
    backward: Annotated[bool, typer.Option(help="Also time forward and backward together.")] = True,
    causal: Annotated[bool, typer.Option(help="Also causal attention.")] = False,
    out: Annotated[Path, typer.Option(help="The folder for tables and the picture.")] = Path("benchmarks/out"),
) -> None:
    """Time attention over two processes, ours and others', beside dense attention on one."""
    os.environ["OMP_NUM_THREADS"] = "1"  # read by the processes that are started below
    lengths = [int(size) for size in sizes.split(",")]
    settings = (lengths, [False, True] if causal else [False], [False, True] if backward else [False], rounds, seconds)
    with tempfile.TemporaryDirectory() as folder:
        start_processes(run_rank, args=(folder, settings), nprocs=RANKS, start_method="spawn")
        tables: list[list[Result]] = pickle.loads(Path(folder, "tables").read_bytes())
    out.mkdir(parents=True, exist_ok=True)
    about = (
        f"{RANKS} gloo processes of one thread on {os.cpu_count()} cores ({platform.machine()}), "
        f"torch {torch.__version__}, batch 1, 8 heads of 64, fp32."
    )
    write(out, tables, about)
    is_drawn = draw(out / "attention.png", tables)
    console = _console()
    console.print(LEGEND)
    console.print(f"Written: {out}/attention.md, attention.csv" + (", attention.png" if is_drawn else ""))
    if not is_drawn:
        console.print("No picture: matplotlib is not installed.")


if __name__ == "__main__":
    typer.run(main)
