"""What a capture took from the model itself, watched: a change of any of it makes the capture stale.

Export guards a call's arguments, not the model's attributes. Here every plain attribute of every module (a LoRA scale,
a mode, a list of active adapters, a hook), every parameter and buffer, and the submodules themselves are remembered as
they were when the model was captured. Asking costs about a microsecond a module.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

_CONTAINERS = (dict, list, set)
_UNUSED = frozenset(vars(nn.Module())) - {
    "training",
    "_parameters",
    "_buffers",
    "_modules",
    "_forward_hooks",
    "_forward_pre_hooks",
}
"""What nn.Module keeps on every module that a forward pass does not look at."""


class Fingerprint:
    """The state of a model that a capture depends on.

    Attributes are compared by identity and then by value; the contents of lists, dicts and sets that hang on a module
    likewise (one level deep). Numbers inside tensors may change freely: a program reads the model's own tensors.
    """

    def __init__(self, model: nn.Module) -> None:
        self._attributes: list[tuple[dict[str, Any], int, Callable[[Any], Any], Any]] = []
        self._containers: list[tuple[Any, Any]] = []
        self._empty: list[Any] = []
        for module in model.modules():
            own = module.__dict__
            names = [name for name in own if name not in _UNUSED]
            if len(names) > 1:
                take = operator.itemgetter(*names)
                self._attributes.append((own, len(own), take, take(own)))
            for name in names:
                value = own[name]
                if isinstance(value, _CONTAINERS):
                    if value:
                        self._containers.append((value, value.copy()))
                    else:
                        self._empty.append(value)
        self._tensors: list[torch.Tensor] = [*model.parameters(), *model.buffers()]
        self._metadata = self._read()

    def holds(self) -> bool:
        """Whether the model still is as it was."""
        try:
            for own, count, take, before in self._attributes:
                if len(own) != count or take(own) != before:
                    return False
            if any(map(len, self._empty)):
                return False
            for container, before in self._containers:
                if container != before:
                    return False
        except (KeyError, RuntimeError, ValueError):  # an attribute is gone, or two tensors were compared by value
            return False
        return self._read() == self._metadata

    def _read(self) -> list[tuple[torch.dtype, torch.device, bool]]:
        return [(tensor.dtype, tensor.device, tensor.requires_grad) for tensor in self._tensors]
