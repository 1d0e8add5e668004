"""The benchmarks' own counts: what is alive on a rank, what leaves it, and how times are set against each other."""

from __future__ import annotations

import pytest
import torch

from benchmarks.memory import block_bytes, peak_alive
from benchmarks.race import Result, Status
from benchmarks.ratios import fastest_peer, ratio, to_ideal
from benchmarks.traffic import CountSent
from cpcompile.layout import Axis
from cpcompile.threads import run_ranks

TOKENS = 64
c10d = torch.ops._c10d_functional


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_two_blocks_are_alive_where_they_go_from_neighbour_to_neighbour(ranks: int) -> None:
    peak = peak_alive(TOKENS, ranks, "alltoall")
    block = block_bytes(TOKENS, ranks)
    assert (peak.forward_bytes, peak.backward_bytes) == (2 * block, 2 * block)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_all_blocks_are_alive_where_they_are_gathered(ranks: int) -> None:
    assert peak_alive(TOKENS, ranks, "allgather").forward_bytes >= ranks * block_bytes(TOKENS, ranks)


def test_what_a_rank_sends_to_itself_is_not_counted() -> None:
    def program(coords: dict[str, int], groups: dict[str, str]) -> tuple[dict[str, int], int]:
        with CountSent() as sent:
            x, uneven = torch.zeros(4, 10), [2, 1, 1, 0]
            for splits, received in (([1] * 4, [1] * 4), (uneven, [uneven[coords["cp"]]] * 4)):
                c10d.wait_tensor(c10d.all_to_all_single(x, received, splits, groups["cp"]))
            c10d.wait_tensor(c10d.all_gather_into_tensor(x, 4, groups["cp"]))
        return dict(sent.traffic.collectives), sent.traffic.bytes_sent

    row = 10 * 4
    collectives, bytes_sent = run_ranks((Axis("cp", 4),), program)[0]
    assert collectives == {"all_to_all_single": 2, "all_gather_into_tensor": 1}
    assert bytes_sent == (3 + 2 + 3 * 4) * row


def result(family: str, *seconds: float, status: Status = "right") -> Result:
    return Result(family, family, "ring", TOKENS, 2, False, False, status, "", list(seconds))


def test_times_are_set_against_each_other_round_by_round() -> None:
    dense, ours = result("dense", 2.0, 20.0, 4.0), result("cpcompile", 1.1, 11.0, 2.0)
    assert to_ideal(ours, [dense, ours]) == pytest.approx(1.1)
    assert to_ideal(dense, [dense, ours]) == 2.0
    fast, wrong = result("torch", 1.0, 10.0, 1.0), result("yunchang", 0.1, 0.1, 0.1, status="wrong")
    assert fastest_peer([dense, ours, fast, wrong]) is fast
    assert ratio(ours, fast) == pytest.approx(1.1)
