"""Real processes: gloo on CPUs, launched by torchrun, outputs and gradients equal to the model on one device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed_worker import SCENARIOS, Findings

ROOT = Path(__file__).resolve().parents[1]
LAUNCH_SECONDS = 200


def launch(ranks: int, folder: Path) -> list[dict[str, Findings]]:
    """Run the worker on so many processes, and read what each rank found."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += ["--module", "tests.distributed_worker", str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            printed, _ = process.communicate(timeout=LAUNCH_SECONDS)
        except subprocess.TimeoutExpired:
            process.terminate()  # the launcher stops its workers
            printed, _ = process.communicate(timeout=30)
            pytest.fail(f"{ranks} processes took more than {LAUNCH_SECONDS} s:\n{printed[-4000:]}")
    assert process.returncode == 0, printed[-4000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


def problems(found: list[dict[str, Findings]]) -> list[str]:
    """Every error that is too large, and every truth that does not hold."""
    return [
        f"rank {rank}, {scenario}: {name} is {value}"
        for rank, scenarios in enumerate(found)
        for scenario, findings in scenarios.items()
        for name, value in findings.items()
        if not (value if isinstance(value, bool) else value <= 1e-5)
    ]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("ranks", SCENARIOS)
def test_processes_are_equal_to_one_device(ranks: int, tmp_path: Path) -> None:
    found = launch(ranks, tmp_path)
    for scenarios in found:
        assert scenarios.keys() == SCENARIOS[ranks].keys()
        assert all(scenarios.values())
    assert problems(found) == []


def test_problems_are_seen() -> None:
    found: list[dict[str, Findings]] = [{"a": {"error": 2e-5, "truth": True}}, {"a": {"error": 0.0, "truth": False}}]
    found += [{"a": {"error": float("nan"), "truth": True}}]
    assert problems(found) == ["rank 0, a: error is 2e-05", "rank 1, a: truth is False", "rank 2, a: error is nan"]
