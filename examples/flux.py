"""Flux over many ranks, equal to Flux on one.

Alone, on simulated ranks (threads of this process, no launch, no GPU):

    python examples/flux.py --ulysses 4

On real processes, gloo on CPUs or NCCL on GPUs:

    torchrun --standalone --nproc-per-node 2 examples/flux.py
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import cpcompile


def tiny() -> tuple[nn.Module, dict[str, Any]]:
    """A Flux transformer of random weights, and one call's arguments: 16 text and 63 image tokens."""
    from diffusers import FluxTransformer2DModel

    torch.manual_seed(0)
    model = FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=[4, 4, 8],
    )
    batch, image, text = 1, 63, 16
    kwargs = {
        "hidden_states": torch.randn(batch, image, 4),
        "encoder_hidden_states": torch.randn(batch, text, 32),
        "pooled_projections": torch.randn(batch, 32),
        "timestep": torch.rand(batch),
        "img_ids": torch.randint(0, 8, (image, 3)).float(),
        "txt_ids": torch.zeros(text, 3),
        "return_dict": False,
    }
    return model, kwargs


def on_processes() -> None:
    """One rank of a torchrun launch: parallelize, run forward and backward, compare with the model itself."""
    use_cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if use_cuda else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    model, kwargs = tiny()
    model = model.to(device)
    kwargs = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in kwargs.items()}

    parallel = cpcompile.parallelize(model, example_inputs=kwargs)

    (single,) = model(**kwargs)
    (ours,) = parallel(**kwargs)
    cotangent = torch.randn(single.shape, generator=torch.Generator().manual_seed(1)).to(device)
    parameters = list(model.parameters())
    wanted = torch.autograd.grad(single, parameters, cotangent)
    found = torch.autograd.grad(ours, parameters, cotangent)
    error = ((ours - single).abs().max() / single.abs().max()).item()
    grad_error = max(((f - w).abs().max() / w.abs().max()).item() for f, w in zip(found, wanted, strict=True))
    for rank in range(dist.get_world_size()):
        dist.barrier()
        if rank == dist.get_rank():
            print(
                f"rank {rank} of {dist.get_world_size()}: error {error:.2g}, gradient error {grad_error:.2g}",
                flush=True,
            )
    dist.barrier()
    if dist.get_rank() == 0:
        print(parallel.report(), flush=True)
    dist.destroy_process_group()
    if not (error <= 1e-5 and grad_error <= 1e-5):
        raise SystemExit("NOT EQUAL")


def on_simulated_ranks(ring: int, ulysses: int) -> None:
    """All ranks in this process."""
    model, kwargs = tiny()
    report = cpcompile.check(model, ring=ring, ulysses=ulysses, kwargs=kwargs, backward=True)
    print(report)
    if not report.ok:
        raise SystemExit(1)


def main() -> None:
    """Run on the processes of a torchrun launch where there is one, on simulated ranks otherwise."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ring", type=int, default=1)
    parser.add_argument("--ulysses", type=int, default=4)
    options = parser.parse_args()
    if "WORLD_SIZE" in os.environ:
        on_processes()
    else:
        on_simulated_ranks(options.ring, options.ulysses)


if __name__ == "__main__":
    main()
