"""Which kind of attention a site becomes.

Axes called ring or ulysses say it. Where that cannot be, or an axis has another name, or queries are everyone's, the
kinds that can be are compared: by the bytes that leave a rank, then by the keys and values that are on one, then in the
order ulysses, ring, gathered. Sizes that are symbols count as what they were in the captured call: every rank chooses
alike, and a choice can cost speed, never correctness.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from cpcompile.costs import numbered, numbered_site, resident_elements, site_bytes
from cpcompile.errors import Refusal
from cpcompile.layout import Axis
from cpcompile.passes.rules.kinds import Attended, gathered, local, merged, shared_out
from cpcompile.site import Site, SiteOptions
from cpcompile.transfer import kind_of


@dataclass(frozen=True)
class Setting:
    """What a choice depends on beside the call's layouts.

    axes: the mesh's, outermost first. known: what the symbols were in the captured call.
    """

    axes: tuple[Axis, ...] = ()
    options: SiteOptions = field(default_factory=SiteOptions)
    known: Mapping[Any, int] = field(default_factory=dict)


def choose(call: Attended, setting: Setting, dtype: torch.dtype, *, shared: bool = False) -> Site | Refusal:
    """The site of a call whose keys and values are of ``dtype``; shared: they are one tensor."""
    options, axes = setting.options, call.key_axes
    if not axes:
        return local(call, options)
    by_name = tuple(axis for axis in axes if axis.name == "ulysses")
    is_open = any(axis.name not in ("ring", "ulysses") for axis in axes)
    with_open = tuple(axis for axis in axes if axis.name != "ring")
    heads_over = (with_open, by_name) if is_open else (by_name,)
    found: list[Site | Refusal] = [
        shared_out(call, heads, _rest(axes, heads), options) for heads in dict.fromkeys(heads_over)
    ]
    if is_open:
        found.append(gathered(call, by_name, options, ""))
    if not call.rows.axes & frozenset(axes):
        found.append(merged(call, options))
    found = [_reachable(call, site) for site in found]
    refused = next((site.reason for site in found if isinstance(site, Refusal)), "")
    possible = [site for site in found if isinstance(site, Site)]
    if not possible:
        return _instead(call, by_name, options, refused)
    if len(possible) == 1 and not is_open:
        return possible[0]
    return _cheapest(call, possible, refused, setting, dtype, shared)


def _instead(call: Attended, heads: tuple[Axis, ...], options: SiteOptions, reason: str) -> Site | Refusal:
    """Where nothing that the names say can be: the ring over all axes, else keys and values are gathered."""
    axes = call.key_axes
    tries = [gathered(call, (), options, reason)]
    if heads:
        tries.insert(0, shared_out(call, (), axes, options))
    if heads and heads != axes:
        tries.insert(0, gathered(call, heads, options, reason))
    for attempt in tries:
        site = _reachable(call, attempt)
        if isinstance(site, Site):
            return replace(site, reason=reason)
    return Refusal(reason)


def _cheapest(
    call: Attended, sites: list[Site], refused: str, setting: Setting, dtype: torch.dtype, shared: bool
) -> Site:
    known = setting.known
    outside = tuple(numbered(x, known) for x in (call.query, call.key, call.value, call.result))
    sent: list[int] = []
    order: list[tuple[int, int, int]] = []
    for index, site in enumerate(sites):
        as_numbers = numbered_site(site, known)
        sent.append(max(site_bytes(as_numbers, outside, dtype, setting.axes, shared)))
        order.append((sent[-1], resident_elements(as_numbers, setting.axes), index))
    considered = tuple((site.kind, count) for site, count in zip(sites, sent, strict=True))
    chosen = sites[min(order)[2]]
    return replace(chosen, considered=considered, reason=chosen.reason or refused)


def _reachable(call: Attended, site: Site | Refusal) -> Site | Refusal:
    """The site, or why its operands or its output are no one exchange away."""
    if isinstance(site, Refusal):
        return site
    changes = (
        (call.query, site.query),
        (call.key, site.key),
        (call.value, site.value),
        (site.result, call.result),
    )
    for source, target in changes:
        kind = kind_of(source, target)
        if isinstance(kind, Refusal):
            return kind
    return site


def _rest(axes: tuple[Axis, ...], heads: tuple[Axis, ...]) -> tuple[Axis, ...]:
    return tuple(axis for axis in axes if axis not in heads)
