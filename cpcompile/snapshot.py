"""Tracing leaves the model as it was: its modules' attributes, and what their lists and dicts hold."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn


@contextlib.contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Whatever the body does to the modules' attributes (a cache filled with traced tensors) is undone after it."""
    before = [(module, dict(module.__dict__), _contents(module)) for module in model.modules()]
    try:
        yield
    finally:
        for module, attributes, contents in before:
            for container, held in contents:
                _restore(container, held)
            if _differs(module.__dict__, attributes):
                module.__dict__.clear()
                module.__dict__.update(attributes)


def _contents(module: nn.Module) -> list[tuple[Any, Any]]:
    return [(value, value.copy()) for value in module.__dict__.values() if isinstance(value, (list, dict, set))]


def _restore(container: Any, held: Any) -> None:
    if isinstance(container, dict):
        if _differs(container, held):
            container.clear()
            container.update(held)
    elif isinstance(container, list):
        if len(container) != len(held) or any(a is not b for a, b in zip(container, held, strict=True)):
            container[:] = held
    elif container != held:
        container.clear()
        container.update(held)


def _differs(now: dict[Any, Any], before: dict[Any, Any]) -> bool:
    return now.keys() != before.keys() or any(now[key] is not before[key] for key in before)
