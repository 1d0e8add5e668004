"""One process of a torchrun launch: ``parallelize`` on gloo against the model itself, measured and written as JSON.

Every scenario returns findings: an error (relative, to be tiny) or a truth (to hold), on this rank.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from cpcompile import ContextParallelOutput, parallelize
from cpcompile.reference import error
from tests.models import case, flux_inputs, plan_without

Findings: TypeAlias = "dict[str, float | bool]"
Gradients: TypeAlias = "dict[str, torch.Tensor]"


def cotangent(out: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """A fixed random cotangent."""
    return torch.randn(out.shape, generator=torch.Generator().manual_seed(seed), dtype=out.dtype)


def gradients(model: nn.Module) -> Gradients:
    """Copies of what is in ``.grad``."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def whole(model: nn.Module, *calls: Mapping[str, Any]) -> tuple[list[torch.Tensor], Gradients]:
    """Outputs of some calls on one device, and what their backward passes leave in ``.grad``."""
    model.zero_grad()
    outputs = []
    for seed, kwargs in enumerate(calls):
        (out,) = model(**kwargs)
        (out * cotangent(out, seed)).sum().backward()
        outputs.append(out.detach())
    found = gradients(model)
    model.zero_grad()
    return outputs, found


def worst(mine: Gradients, want: Gradients) -> float:
    """The largest error of a gradient, relative to its own scale; infinite where one is missing."""
    if mine.keys() != want.keys():
        return float("inf")
    return max(error(mine[name], want[name]) for name in want)


def everywhere(tensor: torch.Tensor) -> list[torch.Tensor]:
    """All ranks' tensors of this shape."""
    found = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(found, tensor.contiguous())
    return found


def is_identical(*tensors: torch.Tensor) -> bool:
    """Whether all ranks hold the same bits."""
    return all(torch.equal(tensor, other) for tensor in tensors for other in everywhere(tensor))


def summed(mine: Gradients) -> Gradients:
    """What a wrapper that sums over the ranks would leave."""
    return {name: torch.stack(everywhere(gradient)).sum(0) for name, gradient in mine.items()}


def forward_and_backward(name: str, mesh: Any = None, kind: str = "ulysses") -> Findings:
    """One call and its ``.backward()``; the same again adds the same gradients."""
    model, kwargs = case(name)
    (want,), want_gradients = whole(model, kwargs)
    parallel = parallelize(model, mesh=mesh, example_inputs=kwargs)
    (out,) = parallel(**kwargs)
    (out * cotangent(out)).sum().backward()
    mine = gradients(model)
    sites = [site.kind for site in parallel.report().sites]
    model.zero_grad()
    return {
        "output": error(out.detach(), want),
        "gradients": worst(mine, want_gradients),
        "outputs are identical on all ranks": is_identical(out.detach()),
        "gradients are identical on all ranks": is_identical(*mine.values()),
        "attention is divided": kind in sites and set(sites) <= {kind, "local"},
        "nothing was gathered for lack of a rule": not parallel.report().fallbacks,
    }


def unequal(name: str) -> Findings:
    """The comparison itself: this rank's share of the gradients is not the whole."""
    model, kwargs = case(name)
    _, want = whole(model, kwargs)
    (out,) = parallelize(model, grad_sync=False)(**kwargs)
    (out * cotangent(out)).sum().backward()
    mine = gradients(model)
    model.zero_grad()
    return {"raw gradients are not the whole": worst(mine, want) > 1e-3}


def accumulation() -> Findings:
    """Two calls of two inputs, two backward passes, one ``.grad``."""
    model, first = case("flux_small")
    second = flux_inputs(text=7, image=63, seed=5)
    _, want = whole(model, first, second)
    parallel = parallelize(model)
    for seed, kwargs in enumerate((first, second)):
        (out,) = parallel(**kwargs)
        (out * cotangent(out, seed)).sum().backward()
    mine = gradients(model)
    model.zero_grad()
    return {"gradients": worst(mine, want), "differs from one call's": worst(mine, whole(model, first)[1]) > 1e-3}


def two_lengths() -> Findings:
    """Each length has a program of its own; the first is found again."""
    model, _ = case("flux_small")
    parallel = parallelize(model)
    calls = [flux_inputs(text=text, image=image, seed=3) for text, image in ((7, 63), (16, 32), (7, 63))]
    found: Findings = {}
    programs = []
    with torch.no_grad():
        for index, kwargs in enumerate(calls):
            found[f"output {index}"] = error(parallel(**kwargs)[0], model(**kwargs)[0])
            programs.append(parallel.graph_module())
    return found | {"two programs": programs[0] is programs[2] and programs[0] is not programs[1]}


def input_gradients() -> Findings:
    """Inputs that require grad get the whole gradient on every rank."""
    model, kwargs = case("flux_small")
    names = ("hidden_states", "encoder_hidden_states", "pooled_projections")
    found: list[list[torch.Tensor]] = []
    for called in (model, parallelize(model)):
        own = kwargs | {name: kwargs[name].clone().requires_grad_() for name in names}
        (out,) = called(**own)
        (out * cotangent(out)).sum().backward()
        found.append([own[name].grad for name in names])
    model.zero_grad()
    return {name: error(mine, want) for name, want, mine in zip(names, *found, strict=True)} | {
        "identical on all ranks": is_identical(*found[1])
    }


def gradient_modes() -> Findings:
    """What a wrapper that averages, or sums, over the ranks makes of each mode; raw gradients are whole or parts.

    The last linear runs on a gathered value: its gradients are equal on all ranks, all others are parts.
    """
    model, kwargs = case("flux_small")
    plan = plan_without("flux_small", ("proj_out",)) | {"norm_out": ContextParallelOutput(gather_dim=1)}
    _, want = whole(model, kwargs)
    modes: dict[str, Gradients] = {}
    for mode in (True, "mean", "sum", False):
        (out,) = parallelize(model, plan, grad_sync=mode)(**kwargs)
        (out * cotangent(out)).sum().backward()
        modes[str(mode)] = gradients(model)
        model.zero_grad()
    mean = {name: total / dist.get_world_size() for name, total in summed(modes["mean"]).items()}
    raw, raw_sum = modes["False"], summed(modes["False"])
    is_whole = {name: error(raw[name], want[name]) <= 1e-5 for name in want}
    is_part = {name: error(raw_sum[name], want[name]) <= 1e-5 for name in want}
    return {
        "True": worst(modes["True"], want),
        "mean": worst(mean, want),
        "sum": worst(summed(modes["sum"]), want),
        "raw gradients are wholes or parts": all(is_whole[name] != is_part[name] for name in want),
        "those behind the gather are whole": {n for n in want if is_whole[n]} == {"proj_out.weight", "proj_out.bias"},
        "the mean mode does not sum": worst(modes["mean"], want) > 1e-3,
        "the sum mode does not sum": worst(modes["sum"], want) > 1e-3,
    }


def shards_as_outputs() -> Findings:
    """Outputs left where they are: the loss is the sum of the ranks' losses, whether those are shards or whole."""
    model, kwargs = case("flux_small")
    (want,), want_gradients = whole(model, kwargs)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    sizes = [(63 + ranks - 1 - index) // ranks for index in range(ranks)]
    own = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))

    (shard,) = parallelize(model, plan_without("flux_small", ("proj_out",)), gather_outputs=False)(**kwargs)
    is_shard = shard.shape == want[:, own].shape
    (shard * cotangent(want)[:, own]).sum().backward()
    of_shards = gradients(model)
    model.zero_grad()

    (full,) = parallelize(model, gather_outputs=False)(**kwargs)
    ((full * cotangent(full)).sum() / ranks).backward()
    of_full = gradients(model)
    model.zero_grad()
    return {
        "a shard": is_shard,
        "shard": error(shard.detach(), want[:, own]) if is_shard else float("inf"),
        "gradients of shards": worst(of_shards, want_gradients),
        "gathered by the plan": error(full.detach(), want),
        "gradients of what the plan gathers": worst(of_full, want_gradients),
    }


def on_a_mesh(name: str, ring: int, ulysses: int) -> Findings:
    """Over two axes, made by the caller."""
    mesh = init_device_mesh("cpu", (ring, ulysses), mesh_dim_names=("ring", "ulysses"))
    return forward_and_backward(name, mesh, "unified" if ulysses > 1 else "ring")


SCENARIOS: dict[int, dict[str, Callable[[], Findings]]] = {
    2: {
        "flux": lambda: forward_and_backward("flux_small_even"),
        "wan": lambda: forward_and_backward("wan_small_even"),
        "image to video": lambda: forward_and_backward("wan_i2v_small"),
        "ring": lambda: on_a_mesh("wan_small", 2, 1),
        "unequal": lambda: unequal("wan_small"),
        "accumulation": accumulation,
        "two lengths": two_lengths,
        "input gradients": input_gradients,
        "gradient modes": gradient_modes,
        "shards as outputs": shards_as_outputs,
    },
    4: {
        "flux, uneven": lambda: forward_and_backward("flux_small"),
        "wan, uneven": lambda: forward_and_backward("wan_small"),
        "flux, ring x ulysses": lambda: on_a_mesh("flux_small", 2, 2),
        "wan, ring x ulysses": lambda: on_a_mesh("wan_small", 2, 2),
    },
}
"""Ranks -> what they run."""


def main(folder: str) -> None:
    """Run this launch's scenarios and write this rank's findings into ``folder``."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    torch.set_num_threads(1)
    rank = dist.get_rank()
    found = {name: scenario() for name, scenario in SCENARIOS[dist.get_world_size()].items()}
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
