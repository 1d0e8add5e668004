"""Bytes and collectives counted as they run, against the formulas for each kind of attention.

Legend: B batch, H heads, D head dim, S tokens, P ranks, e bytes an element; T_r tokens and h_r heads of rank r.
Every model here has as many key/value heads as heads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import TypeAlias

import pytest
import torch
from torch import nn

from cpcompile import ContextParallelInput
from cpcompile.check_report import CheckReport
from cpcompile.compiled import captured_call, compile_call, plan_of
from cpcompile.pipeline import Options
from cpcompile.simulate import check_captured, mesh_axes
from tests.models import BATCH, HEAD_DIM, HEADS, capture_of, case, checked, reference_of

ELEMENT = 4
ROW = BATCH * HEAD_DIM * ELEMENT
"""Bytes of one token in one head: B * D * e."""

TEXT = (":encoder_hidden_states", ":txt_ids")

ALL_TO_ALL, ALL_GATHER, REDUCE_SCATTER = "all_to_all_single", "all_gather_into_tensor", "reduce_scatter_tensor"

Sent: TypeAlias = "list[int]"


@cache
def traffic(name: str, ring: int, ulysses: int, removed: tuple[str, ...] = ()) -> CheckReport:
    """A case with raw gradients: what then moves in the backward pass, moves for attention."""
    model, kwargs = case(name)
    options = Options(grad_sync="none")
    captured, axes = capture_of(name, removed), mesh_axes(ring, ulysses)
    return check_captured(model, captured, axes, (), kwargs, options, backward=True, against=reference_of(name))


def shares(size: int, ranks: int) -> list[int]:
    """How many of some tokens or heads each rank has."""
    return [(size + ranks - 1 - rank) // ranks for rank in range(ranks)]


def ulysses_sent(tokens: Sequence[int]) -> Sent:
    """B*D*e*[T_r*(H - h_r) + 2*T_r*(heads of the others) + h_r*(S - T_r)]: queries, keys and values, then outputs."""
    heads = shares(HEADS, len(tokens))
    return [ROW * (3 * own * (HEADS - h) + h * (sum(tokens) - own)) for own, h in zip(tokens, heads, strict=True)]


def ulysses_received(tokens: Sequence[int]) -> Sent:
    """The other end of each pair of ``ulysses_sent``: what the backward pass sends."""
    heads = shares(HEADS, len(tokens))
    return [ROW * (3 * h * (sum(tokens) - own) + own * (HEADS - h)) for own, h in zip(tokens, heads, strict=True)]


def ring_sent(tokens: Sequence[int]) -> Sent:
    """2*B*H*D*e*T*(P - 1): keys and values to all others, T those of the rank that has most (a gather takes as many of
    each). The backward pass sends as much again, and as much of gradients."""
    return len(tokens) * [2 * ROW * HEADS * max(tokens) * (len(tokens) - 1)]


def output_sent(tokens: Sequence[int], channels: int) -> Sent:
    """The gather of the model's output."""
    return [BATCH * channels * ELEMENT * own * (len(tokens) - 1) for own in tokens]


def total(*parts: tuple[int, Sent]) -> tuple[int, ...]:
    """Sum over several kinds of traffic, each so many times."""
    return tuple(sum(times * sent[rank] for times, sent in parts) for rank in range(len(parts[0][1])))


@pytest.mark.parametrize(("ring", "ulysses"), [(1, 2), (1, 4), (2, 1), (4, 1)])
def test_flux_where_sizes_divide(ring: int, ulysses: int) -> None:
    ranks = ring * ulysses
    kind, sent = ("ulysses", ulysses_sent) if ring == 1 else ("ring", ring_sent)
    image, text = shares(64, ranks), shares(16, ranks)
    tokens = [a + b for a, b in zip(image, text, strict=True)]
    report = traffic("flux_small_even", ring, ulysses)
    assert [(site.kind, site.bytes_sent) for site in report.sites] == 2 * [(kind, tuple(sent(tokens)))]
    assert report.bytes_sent == total((2, sent(tokens)), (1, output_sent(image, channels=4)))
    times = 2 if kind == "ulysses" else 4  # even shares: the mirror is the same number
    assert report.backward_bytes_sent == total((times, sent(tokens)))
    if kind == "ulysses":
        assert report.collectives == Counter({ALL_TO_ALL: 2 * 2, ALL_GATHER: 1})
        assert report.backward_collectives == Counter({ALL_TO_ALL: 2 * 2})
    else:
        assert report.collectives == Counter({ALL_GATHER: 2 + 1})
        assert report.backward_collectives == Counter({ALL_GATHER: 2, REDUCE_SCATTER: 2})


def test_ring_of_two_by_ulysses_of_two() -> None:
    # (2 + 2g)*N*(U - 1)/(P*U) + 2g*N*(R - 1)/P with g = 1: 4*N/8 + 2*N/4 = N = B*S*H*D*e. Backward: N/2 + 2*N/2.
    report = traffic("flux_small_even", 2, 2)
    everything = ROW * HEADS * (64 + 16)
    assert [site.bytes_sent for site in report.sites] == 2 * [4 * (everything,)]
    assert report.bytes_sent == total((2, 4 * [everything]), (1, output_sent(shares(64, 4), channels=4)))
    assert report.backward_bytes_sent == 4 * (2 * everything * 3 // 2,)
    assert report.collectives == Counter({ALL_TO_ALL: 4, ALL_GATHER: 2 + 1})
    assert report.backward_collectives == Counter({ALL_TO_ALL: 4, ALL_GATHER: 2, REDUCE_SCATTER: 2})


@pytest.mark.parametrize("ranks", [2, 4])
def test_text_on_every_rank_adds_its_outputs(ranks: int) -> None:
    image = shares(64, ranks)
    of_text = ROW * HEADS * 16 * (ranks - 1) // ranks  # N_t*(P - 1)/P, in the exchange of the outputs
    site = [sent + of_text for sent in ulysses_sent(image)]
    report = traffic("flux_small_even", 1, ranks, TEXT)
    assert [found.bytes_sent for found in report.sites] == 2 * [tuple(site)]
    assert report.bytes_sent == total((2, site), (1, output_sent(image, channels=4)))
    assert report.collectives == Counter({ALL_TO_ALL: 4, ALL_GATHER: 1})


def test_text_on_every_rank_does_not_travel_in_the_ring() -> None:
    image = shares(64, 2)
    site = [sent + ROW * HEADS * 16 // 2 for sent in ring_sent(image)]  # outputs of the text, each computed once
    report = traffic("flux_small_even", 2, 1, TEXT)
    assert [found.bytes_sent for found in report.sites] == 2 * [tuple(site)]
    assert report.bytes_sent == total((2, site), (1, output_sent(image, channels=4)))
    assert report.collectives == Counter({ALL_GATHER: 2 + 1, ALL_TO_ALL: 2})


@pytest.mark.parametrize("name", ["wan_small_even", "wan_i2v_small"])
@pytest.mark.parametrize(("ring", "ulysses"), [(1, 2), (1, 3), (3, 1)])
def test_cross_attention_of_wan_moves_nothing(name: str, ring: int, ulysses: int) -> None:
    ranks = ring * ulysses
    video = shares(48, ranks)
    sent = ulysses_sent if ring == 1 else ring_sent
    report = traffic(name, ring, ulysses)
    own, *cross = report.sites
    assert own.bytes_sent == tuple(sent(video))
    assert cross
    assert all(site.kind == "local" and site.bytes_sent == (0,) * ranks for site in cross)
    assert report.bytes_sent == total((1, sent(video)), (1, output_sent(video, channels=16)))
    assert report.backward_bytes_sent == (total((2, sent(video))) if ring > 1 else tuple(ulysses_received(video)))
    assert sum(report.collectives.values()) == (3 if ring == 1 else 2)
    assert sum(report.backward_collectives.values()) == 2


def test_uneven_tokens_and_heads_by_hand() -> None:
    # Text 7 over 3 ranks: 3, 2, 2. Image 63: 21 each. Together T = 24, 23, 23 of S = 70. Heads 4: h = 2, 1, 1.
    # One token in one head: B*D*e = 2*16*4 = 128 bytes.
    # In, for each of query, key and value: all own tokens in the heads of the others.
    #   rank 0: 24 tokens * 2 heads * 3 = 144     ranks 1 and 2: 23 * 3 * 3 = 207
    # Out: the tokens of the others in the own heads.
    #   rank 0: 46 tokens * 2 heads     =  92     ranks 1 and 2: 47 * 1     =  47
    # A site sends (144 + 92)*128 = 30208, and (207 + 47)*128 = 32512; there are two.
    # The output: 21 tokens * 4 channels * 2 batches * 4 bytes to 2 ranks = 1344.
    report = traffic("flux_small", 1, 3)
    assert [site.bytes_sent for site in report.sites] == 2 * [(30208, 32512, 32512)]
    assert report.bytes_sent == (2 * 30208 + 1344, 2 * 32512 + 1344, 2 * 32512 + 1344)
    # Backward, rank 0: gradients of 46 tokens in 2 heads, 3 times, and of its outputs in the heads of the others:
    # (46*2*3 + 24*2)*128 = 41472. Ranks 1 and 2: (47*1*3 + 23*3)*128 = 26880.
    assert report.backward_bytes_sent == (2 * 41472, 2 * 26880, 2 * 26880)
    assert report.collectives == Counter({ALL_TO_ALL: 4, ALL_GATHER: 1})
    # Over a ring of 2: text 4 and 3, image 32 and 31, so 36 and 34 tokens, keys and values, 4 heads; each sends 36:
    # 2*36*4*128 = 36864; the output 32*32 = 1024 and 31*32 = 992. Backward: the same again, and their gradients.
    report = traffic("flux_small", 2, 1)
    assert [site.bytes_sent for site in report.sites] == 2 * [(36864, 36864)]
    assert report.bytes_sent == (2 * 36864 + 1024, 2 * 36864 + 992)
    assert report.backward_bytes_sent == (4 * 36864, 4 * 36864)


@pytest.mark.parametrize("mesh", [(1, 2), (1, 3), (1, 4), (2, 1), (3, 1), (2, 2)], ids=str)
@pytest.mark.parametrize("name", ["flux_small", "wan_small", "wan_i2v_small"])
def test_predicted_is_counted(name: str, mesh: tuple[int, int]) -> None:
    report = traffic(name, *mesh)
    assert report.report.bytes_sent == report.bytes_sent
    assert min(report.bytes_sent) > 0


def test_gradients_of_all_parameters_are_summed_at_once() -> None:
    raw, summed = traffic("wan_small", 1, 3), checked("wan_small", 1, 3)
    assert summed.ok
    assert not raw.ok, "without the sum gradients are no rank's"
    assert summed.backward_collectives - raw.backward_collectives == Counter({"all_reduce": 1})
    assert summed.bytes_sent == raw.bytes_sent


class Pooled(nn.Module):
    """One linear before the sum over the tokens, one behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.behind = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.behind(self.before(x).mean(1).relu())


def test_raw_gradients_are_named() -> None:
    """Parameters behind a sum over all tokens have whole gradients on every rank, those before it terms of a sum."""
    model = Pooled()
    plan = plan_of(model, {"": {"x": ContextParallelInput(split_dim=1)}})
    captured = captured_call(model, plan, (torch.randn(2, 6, 4),), {})
    _, report = compile_call(captured, mesh_axes(1, 2), Options(grad_sync="none"))
    assert dict(report.gradients) == {
        "before.weight": "pending",
        "before.bias": "pending",
        "behind.weight": "full",
        "behind.bias": "full",
    }
    assert "raw gradients" in str(report)
    assert not compile_call(captured, mesh_axes(1, 2), Options())[1].gradients
