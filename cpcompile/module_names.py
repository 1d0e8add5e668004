"""Which modules of a model a dotted name with wildcards means."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches

from torch import nn


@dataclass(frozen=True)
class Match:
    """What a pattern found: modules by their full names, and names that a fuller model of this kind would have.

    Neither of both means that the pattern names nothing that such a model could have.
    """

    found: tuple[tuple[str, nn.Module], ...] = ()
    absent: tuple[str, ...] = ()

    @property
    def unknown(self) -> bool:
        """Whether the pattern makes no sense for this model."""
        return not self.found and not self.absent


def match_modules(model: nn.Module, pattern: str) -> Match:
    """Expand ``""`` (the root), a full name, or a name in which ``*`` stands for any one child."""
    if pattern == "":
        return Match(found=(("", model),))
    full_names = {id(module): name for name, module in reversed(list(model.named_modules(remove_duplicate=False)))}
    return _walk(model, "", pattern.split("."), full_names)


def kind(name: str) -> str:
    """Return the name with ``*`` for each number: ``blocks.7.attn`` and ``blocks.8.attn`` are of one kind."""
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def closest_names(model: nn.Module, pattern: str) -> list[str]:
    """Return the existing module names that are most like the pattern, or else those of the model's children."""
    names = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    if "*" in pattern:
        names += [kind(name) for name in names]
    unique = list(dict.fromkeys(names))
    return get_close_matches(pattern, unique, n=3) or [name for name, _ in model.named_children()]


def _walk(module: nn.Module, name: str, parts: list[str], full_names: dict[int, str]) -> Match:
    if not parts:
        return Match(found=((name, module),))
    head, *rest = parts
    if head == "*":
        return _walk_children(module, name, rest, full_names)
    # getattr, not the table of children: wrappers (checkpoint, compile) hand on the names of the module inside.
    child = getattr(module, head, module)
    if isinstance(child, nn.Module) and child is not module:
        child_name = _join(name, head) if module._modules.get(head) is child else full_names.get(id(child))
        return Match() if child_name is None else _walk(child, child_name, rest, full_names)
    absent = Match(absent=(_join(name, *parts),))
    if child is None:  # an optional part that this configuration of the model leaves out
        return absent
    if head.isdecimal() and _is_series(module):
        siblings = _walk_children(module, name, rest, full_names)
        return Match() if siblings.unknown else absent
    return Match()


def _walk_children(module: nn.Module, name: str, rest: list[str], full_names: dict[int, str]) -> Match:
    children = list(module.named_children())
    if not children:
        return Match(absent=(_join(name, "*", *rest),)) if _is_series(module) else Match()
    matches = {key: _walk(child, _join(name, key), rest, full_names) for key, child in children}
    if all(match.unknown for match in matches.values()):
        return Match()
    absent = [(_join(name, key, *rest),) if match.unknown else match.absent for key, match in matches.items()]
    return Match(tuple(pair for match in matches.values() for pair in match.found), sum(absent, ()))


def _is_series(module: nn.Module) -> bool:
    """Whether the module is a list of like modules, of which a shallower model has fewer."""
    if isinstance(module, nn.Sequential):
        return len({type(child) for child in module.children()}) <= 1
    return isinstance(module, nn.ModuleList)


def _join(*parts: str) -> str:
    return ".".join(part for part in parts if part)
