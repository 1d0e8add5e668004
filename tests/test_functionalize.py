"""Writes into the graph's own buffers, in every order that a model may make and read them."""

import pytest
import torch
from torch import nn

from tests import toys


class ReadAfterLaterWrites(nn.Module):
    def forward(self, x):
        out = torch.zeros_like(x)
        first = out.add_(x)
        second = first.mul_(2)
        out.add_(1)
        return second * 1 + first


class WritesThroughTheResultOfAWrite(nn.Module):
    def forward(self, x):
        out = torch.zeros_like(x)
        whole = out.add_(x)
        whole[..., 0].mul_(3).add_(1)
        part = whole[..., 1:3].copy_(x[..., 0:2])
        whole[..., 0:2].add_(5)
        flat = out.view(-1)
        out.mul_(2)
        return part * flat.sum() + whole[..., 0:2]


class PiecesOfABuffer(nn.Module):
    def forward(self, x):
        both = x * 1
        left, right = both[..., :4], both[..., 4:]
        left.add_(1)
        right.copy_(left)
        return left.relu_() + right


class ConstantAndDetachInPlace(nn.Module):
    def forward(self, x):
        scaled = x * torch.tensor([2.0])
        scaled.detach_()
        return scaled * x + torch.zeros_like(x).add_(1)


@pytest.mark.parametrize(
    "make", [ReadAfterLaterWrites, WritesThroughTheResultOfAWrite, PiecesOfABuffer, ConstantAndDetachInPlace]
)
def test_values_and_gradients_are_the_models_own(make):
    built = toys.build(make)
    assert not any(
        node.op == "call_function" and getattr(node.target, "_schema", None) and node.target._schema.is_mutable
        for node in built.rewritten.normalized.graph.nodes
    )
    x = torch.randn(2, 7, 8, requires_grad=True)
    mine, want = built.rewritten.normalized(x)[0], built.model(x)
    assert torch.equal(mine, want)
    assert torch.equal(torch.autograd.grad(mine.sum(), x)[0], torch.autograd.grad(want.sum(), x)[0])
