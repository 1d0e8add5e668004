"""One rank of a launch in which the ranks disagree. Prints what each scene ended with, one JSON line a scene."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from cpcompile import ContextParallelInput, RanksDisagreeError, parallelize

PLAN = {"": {"latents": ContextParallelInput(split_dim=1)}}
TIMEOUT_SECONDS = 5.0


class Model(nn.Module):
    """A linear, attention, and noise that is drawn inside; a scale that an adapter library would set."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.25)
        self.scale = 1.0

    def forward(self, latents: torch.Tensor, *, noise: bool = False) -> torch.Tensor:
        q = self.inner(latents).unsqueeze(1)
        y = self.scale * nn.functional.scaled_dot_product_attention(q, q, q)[:, 0]
        y = self.dropout(y)
        return y + torch.randn(y.shape) if noise else y


def model_of(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model().eval()


def latents_of(seed: int = 0, length: int = 6) -> torch.Tensor:
    return torch.randn(2, length, 8, generator=torch.Generator().manual_seed(seed))


def rank() -> int:
    return int(os.environ["RANK"])


def last() -> bool:
    return rank() == int(os.environ["WORLD_SIZE"]) - 1


def make(model: nn.Module, **options: object) -> nn.Module:
    return parallelize(model, PLAN, timeout_seconds=TIMEOUT_SECONDS, **options)  # type: ignore[arg-type]


def another_seed() -> None:
    make(model_of())(latents_of(seed=7 if last() else 0))


def another_shape() -> None:
    make(model_of())(latents_of(length=5 if last() else 6))


def another_weight() -> None:
    make(model_of(seed=5 if last() else 0))(latents_of())


def another_argument() -> None:
    make(model_of())(latents_of(), noise=last())


def broadcast() -> None:
    """Rank 0's latents are everybody's, and an input that requires grad has the gradient of what was computed."""
    model, own = model_of(), latents_of(seed=rank()).requires_grad_()
    result = make(model, inputs="broadcast")(own)
    theirs = latents_of(seed=0).requires_grad_()
    wanted = model(theirs)
    result.square().sum().backward()
    wanted.square().sum().backward()
    assert (result - wanted).abs().max() < 1e-6
    assert own.grad is not None
    assert theirs.grad is not None
    assert (own.grad - theirs.grad).abs().max() < 1e-5 * theirs.grad.abs().max()


def one_draw() -> None:
    """Noise and dropout are those of one device with rank 0's generator; the others' own generators go on."""
    model = model_of().train()
    parallel = make(model)
    torch.manual_seed(100 + rank())
    before = torch.get_rng_state()
    found = parallel(latents_of(), noise=True)
    after = torch.get_rng_state()
    torch.manual_seed(100)
    wanted = model(latents_of(), noise=True)
    assert (found - wanted).abs().max() < 1e-6
    expected = torch.get_rng_state() if rank() == 0 else before
    assert torch.equal(after, expected)


def agreed() -> None:
    model = model_of()
    parallel = make(model)
    for length in (6, 7, 6):
        assert (parallel(latents_of(length=length)) - model(latents_of(length=length))).abs().max() < 1e-6


def alone() -> None:
    """One rank changes its model and so comes to a new program alone: the others run the old one."""
    model = model_of()
    parallel = make(model)
    parallel(latents_of())
    if last():
        model.scale = 2.0
    parallel(latents_of())


SCENES: dict[str, Callable[[], None]] = {
    scene.__name__: scene
    for scene in (agreed, another_seed, another_shape, another_weight, another_argument, broadcast, one_draw, alone)
}


def main() -> None:
    """Run the scenes named on the command line, in order."""
    dist.init_process_group("gloo")
    for name in sys.argv[1:]:
        start = time.monotonic()
        try:
            SCENES[name]()
            ended = "well"
        except RanksDisagreeError as error:
            ended = str(error)
        sys.stdout.write(
            json.dumps({"scene": name, "rank": rank(), "ended": ended, "seconds": time.monotonic() - start}) + "\n"
        )
        sys.stdout.flush()
    if "alone" in sys.argv:
        time.sleep(3 * TIMEOUT_SECONDS if last() else 0)  # it lives on: the others must not need its end
    else:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
