"""Ranks agree, or stop: real processes that were given different things."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache

import pytest

from tests.agreement_worker import TIMEOUT_SECONDS

pytestmark = pytest.mark.distributed

RANKS = 3
TOGETHER = ("agreed", "another_seed", "another_shape", "another_weight", "another_argument", "broadcast", "one_draw")


@cache
def launched(*scenes: str) -> dict[str, list[dict]]:
    """What every rank says of every scene, of one launch."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    done = subprocess.run(
        [*command, "-m", "tests.agreement_worker", *scenes],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert done.returncode == 0, done.stderr
    return {scene: [line for line in lines if line["scene"] == scene] for scene in scenes}


def endings(scene: str) -> list[str]:
    ranks = launched(*TOGETHER)[scene]
    assert len(ranks) == RANKS
    assert all(rank["seconds"] < 3 * TIMEOUT_SECONDS for rank in ranks), "no rank hangs"
    return [rank["ended"] for rank in ranks]


@pytest.mark.parametrize("scene", ["agreed", "broadcast", "one_draw"])
def test_ranks_that_agree(scene: str) -> None:
    assert endings(scene) == ["well"] * RANKS


@pytest.mark.parametrize(
    ("scene", "words"),
    [
        ("another_seed", ["latents: the tensor on rank 2 is not the one on rank 0", 'inputs="broadcast"']),
        ("another_shape", ["latents: the tensor on rank 2 is not", "(2, 5, 8)", "(2, 6, 8)"]),
        ("another_weight", ["inner.weight: the parameter or buffer on rank 2 is not", "load the same weights"]),
        ("another_argument", ["the program on rank 2 is not the one on rank 0", "non-tensor arguments"]),
    ],
)
def test_every_rank_says_what_differs_and_where(scene: str, words: list[str]) -> None:
    for ended in endings(scene):
        assert all(word in ended for word in words), ended


def test_a_rank_that_comes_alone_ends_all_with_its_reason() -> None:
    for rank in launched("alone")["alone"]:
        assert "rank 2 compiled a call that ranks 0, 1 did not come to in 5 seconds" in rank["ended"]
        assert rank["seconds"] < 3 * TIMEOUT_SECONDS
