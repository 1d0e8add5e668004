"""analyse: shards that are multiples of what a later view takes for a row, so that no row is cut."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cpcompile import CheckReport, ContextParallelInput, check

PLAN = {"": {"x": ContextParallelInput(split_dim=1)}}


class Windows(nn.Module):
    """Tokens in windows of some size, each window mixed in itself; then, perhaps, merged in patches of another."""

    def __init__(self, window: int, patch: int = 1) -> None:
        super().__init__()
        self.window, self.patch = window, patch
        self.inner, self.merged = nn.Linear(8, 8), nn.Linear(8 * patch, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, channels = x.shape
        q = self.inner(x).view(batch, tokens // self.window, self.window, channels)
        mixed = nn.functional.scaled_dot_product_attention(q, q, q).reshape(batch, tokens, channels)
        y = (x + mixed).view(batch, tokens // self.patch, self.patch * channels)
        return self.merged(y)


def run(model: nn.Module, tokens: int, ulysses: int) -> CheckReport:
    torch.manual_seed(0)
    return check(model, PLAN, ulysses=ulysses, args=(torch.randn(2, tokens, 8),), backward=True)


@pytest.mark.parametrize(("tokens", "ulysses"), [(24, 2), (20, 2), (20, 3), (12, 3), (28, 4)])
def test_windows_are_not_cut(tokens: int, ulysses: int) -> None:
    report = run(Windows(4), tokens, ulysses)
    assert report.ok, str(report)
    assert not report.fallbacks
    assert [site.kind for site in report.sites] == ["local"], "windows lie whole on a rank, as a batch does"
    assert [step.kind for step in report.inserted] == ["gather"], "the output alone"


def test_rows_of_two_sizes() -> None:
    """Windows of 4 and patches of 3: shards are multiples of 12."""
    report = run(Windows(4, patch=3), 60, 2)
    assert report.ok, str(report)
    assert not report.fallbacks
    assert "(2) (15 ulysses g3) (4) (8)" in {site.query for site in report.sites}


def test_fewer_rows_than_ranks_are_gathered() -> None:
    report = run(Windows(4), 8, 3)
    assert report.ok, str(report)
    assert [fallback.operator for fallback in report.fallbacks] == ["view.default"]


def test_lengths_that_fit_are_left_alone() -> None:
    report = run(Windows(4), 16, 2)
    assert report.ok
    assert {site.query for site in report.sites} == {"(2) (4 ulysses) (4) (8)"}
