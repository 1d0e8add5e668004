"""Real models of a few thousand random parameters, one call of each, and what the tests share between them.

Models, captures and references are made once in a process and never changed: nothing here writes to them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from cpcompile.capture import Captured
from cpcompile.check_report import CheckReport
from cpcompile.compiled import captured_call, plan_of
from cpcompile.pipeline import Options
from cpcompile.reference import Reference, reference
from cpcompile.simulate import check_captured, mesh_axes
from cpcompile.site import SiteOptions

Case: TypeAlias = "tuple[nn.Module, dict[str, Any]]"

BATCH, HEADS, HEAD_DIM = 2, 4, 16
IMAGE_KEYS, TEXT_KEYS = 257, 512
"""What an image encoder gives, and the text that an image-to-video model takes for granted behind it."""


def flux(
    *, text: int = 16, image: int = 64, layers: int = 2, single_layers: int = 2, batch: int = BATCH, seed: int = 0
) -> Case:
    """Flux: text and image in one attention; the ids of both are random, so that no two tokens rotate alike."""
    from diffusers import FluxTransformer2DModel

    torch.manual_seed(seed)
    model = FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=layers,
        num_single_layers=single_layers,
        attention_head_dim=HEAD_DIM,
        num_attention_heads=HEADS,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=[4, 4, 8],
    )
    return model, flux_inputs(text=text, image=image, batch=batch, seed=seed + 1)


def flux_inputs(*, text: int, image: int, batch: int = BATCH, seed: int = 1) -> dict[str, Any]:
    """Arguments of one call of ``flux``."""
    torch.manual_seed(seed)
    return {
        "hidden_states": torch.randn(batch, image, 4),
        "encoder_hidden_states": torch.randn(batch, text, 32),
        "pooled_projections": torch.randn(batch, 32),
        "timestep": torch.rand(batch),
        "img_ids": torch.randn(image, 3),
        "txt_ids": torch.randn(text, 3),
        "return_dict": False,
    }


def wan(
    *,
    latents: tuple[int, int, int] = (3, 8, 8),
    image_to_video: bool = False,
    token_timesteps: bool = False,
    layers: int = 2,
    batch: int = BATCH,
    seed: int = 0,
) -> Case:
    """Wan: self attention over the video, cross attention to a text (and to an image), one timestep or one a token."""
    from diffusers import WanTransformer3DModel

    torch.manual_seed(seed)
    image: dict[str, Any] = {"image_dim": 16, "added_kv_proj_dim": HEADS * HEAD_DIM} if image_to_video else {}
    model = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=HEADS,
        attention_head_dim=HEAD_DIM,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=32,
        ffn_dim=32,
        num_layers=layers,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32,
        **image,
    )
    frames, height, width = latents
    torch.manual_seed(seed + 1)
    timestep = torch.arange(3, 3 + 4 * batch, 4)
    if token_timesteps:
        timestep = torch.randint(0, 1000, (batch, frames * height * width // 4))
    kwargs = {
        "hidden_states": torch.randn(batch, 4, *latents),
        "timestep": timestep,
        "encoder_hidden_states": torch.randn(batch, TEXT_KEYS if image_to_video else 5, 16),
        "return_dict": False,
    }
    if image_to_video:
        kwargs["encoder_hidden_states_image"] = torch.randn(batch, IMAGE_KEYS, 16)
    return model, kwargs


CASES: dict[str, Callable[[], Case]] = {
    "flux": flux,
    "flux_uneven": lambda: flux(text=7, image=63),
    "wan": wan,
    "wan_uneven": lambda: wan(latents=(3, 6, 10)),
    "wan_i2v": lambda: wan(image_to_video=True),
    "wan_i2v_uneven": lambda: wan(latents=(3, 6, 10), image_to_video=True),
    "wan_tokens": lambda: wan(latents=(3, 6, 10), token_timesteps=True),
    "flux_small_even": lambda: flux(layers=1, single_layers=1),
    "wan_small_even": lambda: wan(layers=1),
    "flux_small": lambda: flux(text=7, image=63, layers=1, single_layers=1),
    "wan_small": lambda: wan(latents=(3, 6, 10), layers=1),
    "wan_i2v_small": lambda: wan(image_to_video=True, layers=1),
    "wan_tokens_small": lambda: wan(latents=(3, 6, 10), token_timesteps=True, layers=1),
}
"""An even case has 64 image and 16 text tokens, or 48 of video, others 63 and 7, or 45. Small ones are shallow."""


@cache
def case(name: str) -> Case:
    """The model and the arguments of a case."""
    return CASES[name]()


@cache
def reference_of(name: str) -> Reference:
    """What one device computes, gradients too."""
    model, kwargs = case(name)
    return reference(model, (), kwargs, backward=True)


def plan_without(name: str, removed: tuple[str, ...]) -> dict[str, Any]:
    """A case's own plan less the entries ``removed``, each named "module" or "module:argument"."""
    model, _ = case(name)
    plan: Mapping[str, Any] = model._cp_plan  # type: ignore[assignment]
    kept: dict[str, Any] = {}
    for module, value in plan.items():
        if module in removed:
            continue
        kept[module] = value
        if isinstance(value, Mapping):
            kept[module] = {key: entry for key, entry in value.items() if f"{module}:{key}" not in removed}
    return {module: value for module, value in kept.items() if value != {}}


@cache
def capture_of(name: str, removed: tuple[str, ...] = ()) -> Captured:
    """A case's call, captured under its own plan less some entries."""
    model, kwargs = case(name)
    return captured_call(model, plan_of(model, plan_without(name, removed)), (), kwargs)


@cache
def checked(
    name: str,
    ring: int = 1,
    ulysses: int = 1,
    removed: tuple[str, ...] = (),
    *,
    gather_at: str | None = None,
    policy: Literal["auto", "local"] = "auto",
    verify: bool = True,
) -> CheckReport:
    """A case on simulated ranks, forward and backward; ``Options`` says what the keywords mean."""
    model, kwargs = case(name)
    options = Options(
        gather_at=frozenset({gather_at} if gather_at else ()), sites=SiteOptions(policy=policy), verify=verify
    )
    captured, axes = capture_of(name, removed), mesh_axes(ring, ulysses)
    return check_captured(model, captured, axes, (), kwargs, options, backward=True, against=reference_of(name))
