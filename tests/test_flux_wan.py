"""Flux and Wan under the plans that they are published with: every rank's outputs and gradients are one device's.

Flux          text and image divided, every attention exchanged
Wan           video divided, cross attention to whole texts and images stays local
"""

from __future__ import annotations

import pytest

import cpcompile
from cpcompile.check_report import CheckReport
from tests.models import IMAGE_KEYS, TEXT_KEYS, case, checked

TOLERANCE = 1e-5

MESHES = {
    (1, 2): "ulysses",
    (1, 3): "ulysses",
    (1, 4): "ulysses",
    (2, 1): "ring",
    (3, 1): "ring",
    (2, 2): "unified",
}
"""(ring, ulysses) -> what attention among sharded tokens becomes."""


def axes_name(ring: int, ulysses: int) -> str:
    """The axes of a mesh as layouts print them."""
    return ".".join(name for name, size in (("ring", ring), ("ulysses", ulysses)) if size > 1)


def assert_equal(report: CheckReport) -> None:
    """All ranks have one device's numbers, and no operator was gathered for lack of a rule."""
    assert report.ok, str(report)
    assert report.max_error <= TOLERANCE
    assert report.max_grad_error <= TOLERANCE
    assert report.worst_gradient, "no gradient was compared"
    assert not report.fallbacks
    assert report.bytes_sent == report.report.bytes_sent, "predicted bytes are not those that were sent"


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", ["flux", "flux_uneven"])
def test_flux_divides_text_and_image(name: str, mesh: tuple[int, int]) -> None:
    report = checked(name, *mesh)
    assert_equal(report)
    along = axes_name(*mesh)
    text, image = (16, 64) if name == "flux" else (7, 63)
    tokens = f"(2) (4) ({text} {along} ++ {image} {along}) (16)"
    assert [site.module for site in report.sites] == [
        "transformer_blocks.0.attn",
        "transformer_blocks.1.attn",
        "single_transformer_blocks.0.attn",
        "single_transformer_blocks.1.attn",
    ]
    assert {(site.kind, site.query, site.key) for site in report.sites} == {(MESHES[mesh], tokens, tokens)}
    assert not report.inserted
    assert not report.report.notes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        *((name, mesh) for name in ("wan", "wan_uneven", "wan_i2v", "wan_i2v_uneven") for mesh in MESHES),
        ("wan_tokens", (1, 2)),
        ("wan_tokens", (2, 2)),
    ],
    ids=str,
)
def test_wan_divides_video_alone(name: str, mesh: tuple[int, int]) -> None:
    report = checked(name, *mesh)
    assert_equal(report)
    size = 48 if name in ("wan", "wan_i2v") else 45
    video = f"(2) (4) ({size} {axes_name(*mesh)}) (16)"
    texts = (IMAGE_KEYS, TEXT_KEYS) if "i2v" in name else (5,)
    nothing = (0,) * (mesh[0] * mesh[1])
    for block in range(2):
        own = [site for site in report.sites if site.module == f"blocks.{block}.attn1"]
        assert [(site.kind, site.query, site.key) for site in own] == [(MESHES[mesh], video, video)]
        assert min(own[0].bytes_sent) > 0
        cross = [site for site in report.sites if site.module == f"blocks.{block}.attn2"]
        assert [(site.kind, site.query, site.key, site.bytes_sent) for site in cross] == [
            ("local", video, f"(2) (4) ({keys}) (16)", nothing) for keys in texts
        ]
    assert len(report.sites) == 2 * (1 + len(texts))
    assert not report.inserted


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        *((name, mesh) for name in ("flux", "wan", "wan_i2v") for mesh in ((1, 2), (2, 2))),
        *((f"{name}_uneven", (3, 1)) for name in ("flux", "wan", "wan_i2v")),
    ],
    ids=str,
)
def test_attention_on_local_shards_is_seen_as_wrong(name: str, mesh: tuple[int, int]) -> None:
    report = checked(name, *mesh, policy="local", verify=False)
    assert not report.ok
    assert report.max_error > 1e-3
    assert report.max_grad_error > 1e-3
    assert {site.kind for site in report.sites} == {"local"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["flux_uneven", "wan_uneven", "wan_i2v"])
def test_through_the_public_check(name: str) -> None:
    model, kwargs = case(name)
    report = cpcompile.check(model, ulysses=2, kwargs=kwargs, backward=True)
    assert_equal(report)
    assert report.max_error == checked(name, 1, 2).max_error
    assert report.sites == checked(name, 1, 2).sites
