"""Joint attention over text and image: both sharded, or one whole on every rank; padded, short, in either order."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.small_models import MESHES, Attention, Input, Joint, Output, covered, equal, padding, rand

BOTH = {"": {"text": Input(1), "image": Input(1)}}
IMAGE = {"": {"image": Input(1)}}
WIDE = (*MESHES, (1, 4), (4, 1))
PLANS = {"both": BOTH, "image": IMAGE, "text": {"": {"text": Input(1)}}}


@pytest.mark.parametrize(("text", "image"), [(7, 16), (1, 8), (16, 7)])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_text_and_image(text, image, plan):
    args = rand(2, text, 16, grad=True), rand(2, image, 16, seed=1, grad=True)
    for report in covered(equal(Joint(), plan, *args, meshes=WIDE)):
        assert len(report.sites) == 2


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_image_before_text(plan):
    args = rand(2, 7, 16), rand(2, 9, 16, seed=1)
    covered(equal(Joint(image_first=True), plan, *args))


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("dtype", [torch.bool, torch.float64])
def test_padded_text_and_padded_image(plan, dtype):
    valid = torch.cat([padding(3, 4, size=4), padding(6, 2, size=6)], dim=1)[:, None, None, :]
    mask = valid if dtype is torch.bool else torch.zeros(valid.shape, dtype=dtype).masked_fill(~valid, float("-inf"))
    args = rand(2, 4, 16), rand(2, 6, 16, seed=1)
    covered(equal(Joint(), plan, *args, mask, meshes=WIDE))


class PaddedJoint(nn.Module):
    """The joint mask is built inside, of the two that come in."""

    def __init__(self, image_first: bool) -> None:
        super().__init__()
        self.image_first, self.joint = image_first, Joint(image_first=image_first)

    def forward(self, text, image, text_valid, image_valid):
        masks = [image_valid, text_valid] if self.image_first else [text_valid, image_valid]
        return self.joint(text, image, torch.cat(masks, dim=1)[:, None, None, :])


@pytest.mark.parametrize(
    ("image_first", "sharded"),
    [(False, ()), (True, ()), (False, ("image_valid",)), (True, ("text_valid", "image_valid"))],
)
@pytest.mark.parametrize("plan", [BOTH, IMAGE], ids=["both", "image"])
def test_a_joint_mask_built_inside(image_first, sharded, plan):
    plan = {"": {**plan[""], **{name: Input(1) for name in sharded}}}
    args = rand(2, 5, 16), rand(2, 8, 16, seed=1), padding(3, 5, size=5), padding(8, 6, size=8)
    equal(PaddedJoint(image_first), plan, *args)


def test_a_text_that_every_rank_holds_counts_once():
    for report in equal(Joint(depth=1), IMAGE, rand(1, 3, 16), rand(1, 8, 16, seed=1)):
        (site,) = report.sites
        assert "3 ++ 8" in site.key


def test_a_segment_shorter_than_the_ranks_stays_whole_and_is_noted():
    (report,) = equal(Joint(), BOTH, rand(2, 1, 16), rand(2, 8, 16, seed=1), meshes=[(1, 2)])
    assert any("text" in note and "every rank keeps all" in note for note in report.report.notes)
    (report,) = equal(Joint(), BOTH, rand(2, 3, 16), rand(2, 8, 16, seed=1), meshes=[(2, 2)])
    assert any("3 indices for 4 ranks" in note for note in report.report.notes)


def test_everything_shorter_than_the_ranks_runs_whole():
    (report,) = equal(Joint(), BOTH, rand(2, 2, 16), rand(2, 3, 16, seed=1), meshes=[(1, 4)])
    assert len(report.report.notes) == 2
    assert not any(report.bytes_sent)


class JoinedBlock(nn.Module):
    """A block over [text, image] in one tensor, its output cut by a python slice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attn, self.gate = nn.LayerNorm(16), Attention(), nn.Linear(16, 16)

    def forward(self, text, image, temb):
        joined = torch.cat([text, image], dim=1)
        residual = joined
        joined = residual + self.gate(temb)[:, None] * self.attn(self.norm(joined))
        return joined[:, : text.shape[1]], joined[:, text.shape[1] :]


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_one_stream_of_text_and_image_cut_by_slices(plan):
    args = rand(2, 5, 16, grad=True), rand(2, 9, 16, seed=1, grad=True), rand(2, 16, seed=2, grad=True)
    covered(equal(JoinedBlock(), plan, *args))


class CutElsewhere(nn.Module):
    """The joint sequence is cut at a place that is no boundary: what does not align is gathered."""

    def forward(self, text, image):
        joined = torch.cat([text, image], dim=1)
        return joined[:, :3].sin(), joined[:, 3:].cos(), joined[:, -2:], joined[:, 6]


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_a_cut_inside_a_sharded_segment(plan):
    args = rand(2, 5, 16, grad=True), rand(2, 9, 16, seed=1, grad=True)
    equal(CutElsewhere(), plan, *args)


class ThreeStreams(nn.Module):
    """Reference image, text and image in one attention; the text goes on alone, and all meet again."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.text, self.out = nn.Linear(16, 48), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, reference, text, image):
        joined = torch.cat([reference, text, image], dim=1)
        q, k, v = (part.unflatten(-1, (4, 4)).transpose(1, 2) for part in self.qkv(joined).chunk(3, -1))
        out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        first, second, third = out.split([reference.shape[1], text.shape[1], image.shape[1]], dim=1)
        return self.out(torch.cat([third, self.text(second) + text, first], dim=1))


@pytest.mark.parametrize("names", [("image",), ("image", "reference"), ("text", "reference"), ("text",)])
def test_three_streams_joined_in_another_order(names):
    args = rand(2, 6, 16), rand(2, 3, 16, seed=1), rand(2, 9, 16, seed=2)
    covered(equal(ThreeStreams(), {"": {name: Input(1) for name in names}}, *args))


def test_the_plan_gathers_the_image_between_blocks():
    plan = {**BOTH, "attn.0": [None, Output(1)]}
    equal(Joint(), plan, rand(2, 5, 16), rand(2, 9, 16, seed=1))
