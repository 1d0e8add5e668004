"""Autocast: around the call, in regions, and inside composite operators, equal to the model under the same autocast."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cpcompile import ContextParallelInput, check
from cpcompile.capture import capture
from cpcompile.pipeline import Options, rewrite
from cpcompile.plan import resolve_plan
from cpcompile.simulate import mesh_axes
from tests.models import flux, wan

# torch's own, of an RMS norm whose input autocast has made narrower than its weight.
pytestmark = pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")

PLAN = {"": {"x": ContextParallelInput(split_dim=1)}}


class Regions(nn.Module):
    """Operators that autocast converts, widens, leaves alone, or converts inside; regions on and off."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm, self.rms = nn.LayerNorm(8), nn.RMSNorm(8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.inner(x)
        with torch.autocast("cpu", enabled=False):
            exact = self.inner(x.float())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            low = self.outer(x)
            with torch.autocast("cpu", enabled=False):
                low = low + self.outer(x.float())
        q = low.unsqueeze(1)
        attended = nn.functional.scaled_dot_product_attention(q, q, q)[:, 0]
        product = torch.einsum("bsc,dc->bsd", x, self.outer.weight)
        return self.norm(x) + exact + torch.cat([attended, x], -1)[..., :8] + self.rms(product), low.softmax(-1)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("ulysses", [2, 3])
def test_regions_on_and_off(dtype: torch.dtype | None, ulysses: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 9, 8)
    with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
        report = check(Regions(), PLAN, ulysses=ulysses, args=(x,), backward=True)
    assert report.ok, str(report)
    assert not report.fallbacks
    assert report.tolerance == 4e-2  # eight bits of mantissa


@pytest.mark.parametrize("build", [flux, wan])
def test_real_models_under_autocast(build) -> None:
    model, kwargs = build()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        report = check(model, ulysses=2, kwargs=kwargs, backward=True)
    assert report.ok, str(report)
    assert not report.fallbacks


def test_casts_are_nodes_and_exact() -> None:
    """The program with its casts written out gives, without autocast, bit for bit what the model gives under it."""
    torch.manual_seed(0)
    model, x = Regions(), torch.randn(2, 9, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        captured = capture(model, resolve_plan(PLAN, model), (x,), {})
        wanted = model(x)
    found = rewrite(captured, mesh_axes(1, 2), Options(verify=True)).normalized(x)
    assert [value.dtype for value in found] == [value.dtype for value in wanted]
    assert all(torch.equal(mine, want) for mine, want in zip(found, wanted, strict=True))


def test_without_the_casts_the_program_is_another_one() -> None:
    torch.manual_seed(0)
    model, x = Regions(), torch.randn(2, 9, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        wanted, _ = model(x)
    assert (model(x)[0] - wanted).abs().max() > 1e-3
