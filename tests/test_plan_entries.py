"""A plan can cost speed, never correctness: each entry of a published plan taken away, alone.

Attention among the tokens that the rest of the plan divides is still exchanged, from the same shards; the compiler
inserts what is missing, and names it.
"""

from __future__ import annotations

import pytest

from cpcompile import ContextParallelOutput, PlanError, check
from cpcompile.check_report import CheckReport
from tests.models import case, checked

MESHES = ((1, 3), (2, 2))

FLUX, WAN = "flux_small", "wan_small"

FIRST_INSERTED = {
    (FLUX, ":hidden_states"): ("shard", "transformer_blocks.0.attn"),
    (FLUX, ":encoder_hidden_states"): ("shard", "transformer_blocks.0.attn"),
    (FLUX, ":img_ids"): ("shard", "transformer_blocks.0.attn"),
    (FLUX, ":txt_ids"): ("shard", "transformer_blocks.0.attn"),
    (FLUX, "proj_out"): ("gather", ""),
    (WAN, "rope:0"): ("shard", "blocks.0.attn1"),
    (WAN, "rope:1"): ("shard", "blocks.0.attn1"),
    (WAN, "blocks.0:hidden_states"): ("shard", "blocks.0.attn1"),
    (WAN, "proj_out"): ("gather", ""),
    (WAN, ":timestep"): None,
    ("wan_i2v_small", "rope:0"): ("shard", "blocks.0.attn1"),
    ("wan_i2v_small", "rope:1"): ("shard", "blocks.0.attn1"),
    ("wan_i2v_small", "blocks.0:hidden_states"): ("shard", "blocks.0.attn1"),
    ("wan_i2v_small", "proj_out"): ("gather", ""),
    ("wan_i2v_small", ":timestep"): None,
    ("wan_tokens_small", "rope:0"): ("shard", "blocks.0.attn1"),
    ("wan_tokens_small", "rope:1"): ("shard", "blocks.0.attn1"),
    ("wan_tokens_small", "blocks.0:hidden_states"): ("shard", "blocks.0"),
    ("wan_tokens_small", "proj_out"): ("gather", ""),
    ("wan_tokens_small", ":timestep"): ("shard", "blocks.0"),
}
"""(case, entry) -> the kind and the module of the first reshard that stands in for the entry. A timestep for each video
has no sequence, and its entry does nothing; one for each token has one."""


def entries(name: str) -> set[str]:
    """The entries of a case's own plan."""
    plan = case(name)[0]._cp_plan
    return {
        f"{module}:{key}" if keys else module
        for module, value in plan.items()
        for keys in [isinstance(value, dict)]
        for key in (value if keys else [None])
    }


def sites_of(report: CheckReport) -> list[tuple[str, str, str, str]]:
    """What each attention became, and the shards it started from."""
    return [(site.module, site.kind, site.query, site.key) for site in report.sites]


def test_every_entry_of_every_plan_is_taken_away() -> None:
    for name in {name for name, _ in FIRST_INSERTED}:
        assert entries(name) == {entry for other, entry in FIRST_INSERTED if other == name}


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize(("name", "entry"), FIRST_INSERTED)
def test_one_entry_less_is_still_equal_and_as_parallel(name: str, entry: str, mesh: tuple[int, int]) -> None:
    full, less = checked(name, *mesh), checked(name, *mesh, (entry,))
    assert full.ok
    assert not full.inserted
    assert less.ok, str(less)
    assert less.max_error <= 1e-5
    assert less.max_grad_error <= 1e-5
    assert sites_of(less) == sites_of(full)
    assert any(site.kind != "local" for site in less.sites)
    paid = [sum(made.bytes_sent[rank] for made in less.inserted) for rank in range(len(less.bytes_sent))]
    allowed = [sent + extra for sent, extra in zip(full.bytes_sent, paid, strict=True)]
    assert all(sent <= limit for sent, limit in zip(less.bytes_sent, allowed, strict=True))
    assert less.bytes_sent == less.report.bytes_sent
    # The last gather only moves to the output, and a shard of what every rank holds is a slice.
    assert less.bytes_sent == full.bytes_sent

    expected = FIRST_INSERTED[name, entry]
    if expected is None:
        assert not less.inserted
        return
    first = less.inserted[0]
    assert (first.kind, first.module) == expected
    assert {made.kind for made in less.inserted} == {first.kind}
    printed = str(less)
    assert "reshards that the plan did not ask for" in printed
    assert first.node in printed
    assert (max(paid) > 0) == (first.kind == "gather")


@pytest.mark.parametrize(
    ("mesh", "kind", "along"),
    [
        ((1, 2), "ulysses", "ulysses"),
        ((1, 3), "ulysses", "ulysses"),
        ((2, 1), "ring", "ring"),
        ((2, 2), "unified", "ring.ulysses"),
    ],
    ids=str,
)
def test_text_on_every_rank_counts_once(mesh: tuple[int, int], kind: str, along: str) -> None:
    report = checked(FLUX, *mesh, (":encoder_hidden_states", ":txt_ids"))
    assert report.ok, str(report)
    assert report.max_error <= 1e-5
    assert report.max_grad_error <= 1e-5
    tokens = f"(2) (4) (7 ++ 63 {along}) (16)"
    assert {(site.kind, site.query, site.key) for site in report.sites} == {(kind, tokens, tokens)}
    assert not report.fallbacks


@pytest.mark.parametrize(
    "removed",
    [(":hidden_states", ":img_ids"), (":hidden_states", ":encoder_hidden_states", ":txt_ids")],
    ids=["image", "text and latents"],
)
def test_several_entries_less_are_still_equal(removed: tuple[str, ...]) -> None:
    report = checked(FLUX, 1, 2, removed)
    assert report.ok, str(report)
    assert {site.kind for site in report.sites} <= {"ulysses", "local"}


@pytest.mark.parametrize("name", ["wan_small", "wan_i2v_small"])
def test_a_timestep_without_a_sequence_is_noted(name: str) -> None:
    note = "timestep: it has 1 dimensions where the plan expects 2; left as it is"
    assert checked(name, 1, 3).report.notes == (note,)
    assert checked(name, 1, 3, (":timestep",)).report.notes == ()
    assert note in str(checked(name, 1, 3))


def test_a_timestep_for_each_token_is_split() -> None:
    report = checked("wan_tokens_small", 1, 3)
    assert report.ok
    assert report.report.notes == ()


def test_a_plan_that_splits_nothing_is_refused() -> None:
    model, kwargs = case(FLUX)
    with pytest.raises(PlanError, match="it splits no tensor of this model, so nothing would be sharded"):
        check(model, {"proj_out": ContextParallelOutput(gather_dim=1)}, ulysses=2, kwargs=kwargs)


def test_a_plan_whose_only_tensor_has_no_sequence_is_refused() -> None:
    model, kwargs = case(WAN)
    plan = {"": model._cp_plan[""]}
    with pytest.raises(PlanError, match="nothing at all is sharded under it: timestep: it has 1 dimensions") as caught:
        check(model, plan, ulysses=2, kwargs=kwargs)
    assert "fix: name a tensor of this call that has the sequence as a dimension" in str(caught.value)
