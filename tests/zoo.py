"""More real models, with their own plans: tiny configurations, random weights (MiniLM: trained ones)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import nn

from cpcompile.capture import Captured
from cpcompile.compiled import captured_call, plan_of
from cpcompile.reference import Reference, reference
from examples.minilm import SENTENCES, minilm

Case = tuple[nn.Module, dict[str, Any], Mapping[str, Any] | None]


def flux2(text: int, image: int) -> Case:
    """Text and image in one attention, ids of four axes."""
    from diffusers import Flux2Transformer2DModel

    torch.manual_seed(0)
    model = Flux2Transformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=32,
        timestep_guidance_channels=32,
        axes_dims_rope=(4, 4, 4, 4),
    )
    return (
        model,
        {
            "hidden_states": torch.randn(2, image, 4),
            "encoder_hidden_states": torch.randn(2, text, 32),
            "timestep": torch.rand(2),
            "img_ids": torch.randint(0, 9, (image, 4)).float(),
            "txt_ids": torch.zeros(text, 4),
            "guidance": torch.rand(2),
            "return_dict": False,
        },
        None,
    )


def qwen_image(text: int, height: int, width: int, *, padded: bool) -> Case:
    """Text before the image, padded in one of two samples, or all of it seen."""
    from diffusers import QwenImageTransformer2DModel

    torch.manual_seed(0)
    model = QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=16,
        axes_dims_rope=(8, 4, 4),
    )
    kwargs: dict[str, Any] = {
        "hidden_states": torch.randn(2, height * width, 16),
        "encoder_hidden_states": torch.randn(2, text, 16),
        "timestep": torch.rand(2),
        "img_shapes": [[(1, height, width)]] * 2,
        "return_dict": False,
    }
    if padded:
        mask = torch.ones(2, text, dtype=torch.bool)
        mask[0, text - 3 :] = False
        kwargs["encoder_hidden_states_mask"] = mask
    return model, kwargs, None


def ltx(text: int, frames: int, height: int, width: int) -> Case:
    """Video tokens, cross attention to padded text that its plan splits too."""
    from diffusers import LTXVideoTransformer3DModel

    torch.manual_seed(0)
    model = LTXVideoTransformer3DModel(
        in_channels=8,
        out_channels=8,
        num_attention_heads=4,
        attention_head_dim=8,
        cross_attention_dim=32,
        num_layers=2,
        caption_channels=32,
    )
    mask = torch.ones(2, text)
    mask[0, text - 4 :] = 0
    return (
        model,
        {
            "hidden_states": torch.randn(2, frames * height * width, 8),
            "encoder_hidden_states": torch.randn(2, text, 32),
            "timestep": torch.rand(2) * 1000,
            "encoder_attention_mask": mask,
            "num_frames": frames,
            "height": height,
            "width": width,
            "return_dict": False,
        },
        None,
    )


def sentences(count: int) -> Case:
    """The first sentences, embedded by the trained MiniLM: 16 or 19 tokens."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a checkpoint with a head that is not loaded
        return minilm(SENTENCES[:count])


CASES: dict[str, Callable[[], Case]] = {
    "flux2": lambda: flux2(16, 64),
    "flux2_uneven": lambda: flux2(7, 63),
    "qwen_image": lambda: qwen_image(8, 8, 8, padded=True),
    "qwen_image_uneven": lambda: qwen_image(7, 7, 9, padded=True),
    "qwen_image_unpadded": lambda: qwen_image(7, 6, 6, padded=False),
    "ltx": lambda: ltx(16, 3, 4, 4),
    "ltx_uneven": lambda: ltx(13, 3, 3, 5),
    "minilm": lambda: sentences(2),
    "minilm_uneven": lambda: sentences(6),
}


@cache
def case(name: str) -> Case:
    """The model, the call and the plan of a case."""
    return CASES[name]()


@cache
def captured(name: str) -> Captured:
    """A case's call, captured."""
    model, kwargs, plan = case(name)
    return captured_call(model, plan_of(model, plan), (), kwargs)


@cache
def reference_of(name: str) -> Reference:
    """What one device computes, gradients too."""
    model, kwargs, _ = case(name)
    return reference(model, (), kwargs, backward=True)
