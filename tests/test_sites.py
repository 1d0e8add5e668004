"""Which kind a site becomes, and that each kind gives one device's numbers and gradients through the whole path."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cpcompile.check_report import CheckReport
from cpcompile.compiled import captured_call, plan_of
from cpcompile.config import ContextParallelConfig, ParallelConfig, site_options
from cpcompile.layout import Axis
from cpcompile.pipeline import Options
from cpcompile.simulate import check_captured
from cpcompile.site import SiteOptions
from tests.small_models import SPLIT, Input, Tower, kinds, rand, sharp

OPEN = (Axis("cp", 3),)


def checked(
    model: nn.Module, plan: dict[str, Any], *args: Any, axes: tuple[Axis, ...] = OPEN, **sites: Any
) -> CheckReport:
    model = sharp(model)
    captured = captured_call(model, plan_of(model, plan), args, {})
    options = Options(verify=True, sites=SiteOptions(**sites))
    report = check_captured(model, captured, axes, args, {}, options, backward=True, tolerance=1e-10)
    assert report.ok, str(report)
    assert not report.fallbacks
    assert report.report.bytes_sent == report.bytes_sent, "what is predicted is what runs"
    return report


def test_an_axis_of_any_name_takes_the_kind_that_sends_least() -> None:
    report = checked(Tower(depth=1), SPLIT, rand(2, 12, 16))
    (site,) = report.sites
    assert site.kind == "ulysses"
    considered = dict(site.considered)
    assert set(considered) == {"ulysses", "ring", "gathered"}
    assert considered["ulysses"] == max(site.bytes_sent) < considered["ring"] == considered["gathered"]
    assert "not ring" in str(report.report)


def test_too_few_heads_leave_the_ring() -> None:
    (site,) = checked(Tower(16, 2, depth=1), SPLIT, rand(2, 12, 16)).sites
    assert site.kind == "ring"
    assert "2 heads" in site.reason
    assert dict(site.considered)["ring"] == max(site.bytes_sent)


@pytest.mark.parametrize("size", [12, 13])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("axes", [(Axis("ring", 3),), (Axis("ring", 2), Axis("ulysses", 2))], ids=["ring", "unified"])
def test_blocks_from_neighbour_to_neighbour(size: int, causal: bool, wide: bool, axes: tuple[Axis, ...]) -> None:
    model = Tower(causal=causal, depth=1)
    report = checked(model, SPLIT, rand(2, size, 16, grad=True), axes=axes, rotation="alltoall", wide=wide)
    assert kinds(report) == ["unified" if len(axes) > 1 else "ring"]


class Pooling(nn.Module):
    """A few queries that every rank has, over divided tokens."""

    def __init__(self, queries: int) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.zeros(1, 2, queries, 8))
        self.to_k, self.to_v = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        k, v = (to(x).unflatten(-1, (2, 8)).transpose(1, 2) for to in (self.to_k, self.to_v))
        return F.scaled_dot_product_attention(self.queries.expand(x.shape[0], -1, -1, -1), k, v)


def test_queries_of_all_ranks_let_results_travel() -> None:
    (site,) = checked(Pooling(1), SPLIT, rand(2, 60, 16, grad=True), axes=(Axis("ring", 3),)).sites
    assert site.kind == "merge"
    # B*H*Sq*(E + 1)*e to two others
    assert site.bytes_sent == (2 * 2 * 1 * (8 + 1) * 8 * 2,) * 3


class Biased(nn.Module):
    """Attention with a learnt number for each head and pair of tokens, or for what is broadcast over."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = x.unflatten(-1, (4, 4)).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads * 2, heads, attn_mask=self.bias).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("rotation", ["allgather", "alltoall"])
@pytest.mark.parametrize("shape", [(4, 11, 11), (11, 11), (1, 11), (4, 1, 11), (2, 1, 1, 11), (2, 4, 11, 11)], ids=str)
def test_a_mask_has_its_gradient_in_the_ring(shape: tuple[int, ...], rotation: str) -> None:
    report = checked(Biased(*shape), SPLIT, rand(2, 11, 16), axes=(Axis("ring", 3),), rotation=rotation)
    assert kinds(report) == ["ring"]


def test_a_configuration_reaches_the_sites() -> None:
    config = ContextParallelConfig(ring_degree=2, rotate_method="alltoall", convert_to_fp32=False)
    for given in (config, ParallelConfig(config)):
        assert site_options(given) == SiteOptions("alltoall", wide=False)
    assert site_options(None) == SiteOptions("allgather", wide=True)


def test_text_on_every_rank_and_causal_rows_in_a_ring() -> None:
    class Joint(nn.Module):
        def forward(self, text: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            heads = torch.cat([text, x], 1).unflatten(-1, (2, 4)).transpose(1, 2)
            out = F.scaled_dot_product_attention(heads, heads * 2, heads, is_causal=True)
            return out.transpose(1, 2).flatten(2)[:, text.shape[1] :]

    plan = {"": {"x": Input(1)}}
    for rotation in ("allgather", "alltoall"):
        report = checked(
            Joint(),
            plan,
            rand(2, 5, 8, grad=True),
            rand(2, 13, 8, seed=1, grad=True),
            axes=(Axis("ring", 3),),
            rotation=rotation,
        )
        assert kinds(report) == ["ring"]
