"""Models beyond the main job, with the plans that they publish: equal, forward and backward, nothing gathered."""

from __future__ import annotations

import pytest
import torch

from cpcompile import check
from cpcompile.check_report import CheckReport
from cpcompile.compiled import captured_call, plan_of
from cpcompile.pipeline import Options
from cpcompile.simulate import check_captured, mesh_axes
from cpcompile.site import SiteOptions
from examples.minilm import PLAN, SENTENCES, minilm, ranking
from tests.models import checked as checked_case
from tests.zoo import CASES, captured, case, reference_of


def checked(name: str, ring: int, ulysses: int, options: Options) -> CheckReport:
    model, kwargs, _ = case(name)
    axes = mesh_axes(ring, ulysses)
    return check_captured(model, captured(name), axes, (), kwargs, options, backward=True, against=reference_of(name))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("ring", "ulysses"), [(1, 2), (1, 3), (2, 1), (2, 2)])
def test_equal(name: str, ring: int, ulysses: int) -> None:
    report = checked(name, ring, ulysses, Options(verify=True))
    assert report.ok, str(report)
    assert report.max_error <= 1e-5
    assert not report.fallbacks
    kind = "ring" if ulysses == 1 else "unified" if ring > 1 else "ulysses"
    assert {site.kind for site in report.sites} == {kind}


@pytest.mark.parametrize(("ring", "ulysses"), [(1, 3), (2, 2)])
def test_a_timestep_for_every_token(ring: int, ulysses: int) -> None:
    report = checked_case("wan_tokens_small", ring, ulysses)
    assert report.ok, str(report)
    assert not report.fallbacks
    assert not report.report.notes, "the timestep is split"


# Not MiniLM: the rows and the keys of its mask cannot both lie over one axis, so even there the site is gathered.
@pytest.mark.parametrize("name", ["flux2", "qwen_image_uneven", "ltx"])
def test_local_attention_is_not_equal(name: str) -> None:
    report = checked(name, 1, 2, Options(sites=SiteOptions(policy="local")))
    assert not report.ok
    assert report.max_error > 1e-3


@pytest.mark.parametrize(
    ("name", "module", "key"),
    [
        ("qwen_image_uneven", "transformer_blocks.0", "encoder_hidden_states"),
        ("qwen_image_uneven", "pos_embed", 1),
        ("ltx_uneven", "", "encoder_attention_mask"),
        ("ltx_uneven", "rope", 0),
        ("flux2_uneven", "", "encoder_hidden_states"),
    ],
)
def test_one_entry_less(name: str, module: str, key: str | int) -> None:
    model, kwargs, _ = case(name)
    plan = {place: dict(found) if isinstance(found, dict) else found for place, found in model._cp_plan.items()}
    del plan[module][key]
    report = check(model, {place: found for place, found in plan.items() if found}, ulysses=2, kwargs=kwargs)
    assert report.ok, str(report)
    assert not report.fallbacks


def test_trained_weights_rank_sentences_alike() -> None:
    """One symbolic capture serves sentences of every length, and the ranking is that of one device."""
    model, kwargs, plan = case("minilm_uneven")
    together = captured_call(model, plan_of(model, plan), (), kwargs, dynamic=True)
    for count in (2, 3, 4, 5, 6):
        _, call, _ = minilm(SENTENCES[:count])
        report = check_captured(model, together, mesh_axes(1, 3), (), call, Options(), backward=count == 4)
        assert report.ok, str(report)
        assert not report.fallbacks
    longer = {name: torch.cat([value, value], dim=1)[:, :29] for name, value in kwargs.items()}
    assert check_captured(model, together, mesh_axes(1, 3), (), longer, Options()).ok
    with torch.no_grad():
        order = ranking(model(**kwargs))
    assert order[0] == 1, "soda bread needs no yeast"
    assert order[-1] in (3, 5), "trains and computers are no bread"
    assert check(model, PLAN, ring=2, ulysses=2, kwargs=kwargs).max_error < 1e-5
