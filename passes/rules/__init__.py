"""The table of rules: one file a family, one function an operator or a kind of operators.

To add an operator, write its rule in the family's file, enter it in that file's ``RULES``, and give it a case in the
family's ``tests/test_rules_*.py``: the numeric property holds for every rule or it is not one.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch._ops import OpOverload

from cpcompile.passes.rules import joins, lookups, pointwise, products, reductions, views
from cpcompile.passes.rules.call import Rule

RULES: dict[OpOverload, Rule] = {
    **pointwise.RULES,
    **views.RULES,
    **joins.RULES,
    **products.RULES,
    **lookups.RULES,
    **reductions.RULES,
}


def rule_for(target: OpOverload, own: Mapping[OpOverload, Rule] | None = None) -> Rule | None:
    """The rule of an operator: the user's, the table's, or the one of all operators tagged pointwise."""
    if own and target in own:
        return own[target]
    if target in RULES:
        return RULES[target]
    return pointwise.pointwise if torch.Tag.pointwise in target.tags else None
