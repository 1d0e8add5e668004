"""Masks read as conditions on positions: one file for what moves indices, one for what makes and joins values.

To read one more operator, write a function from its call to a value (or None) and enter it in its file's table; the
property in ``tests/test_masks.py`` compares what is read with the mask that the operators make.
"""

from __future__ import annotations

from cpcompile.passes.masks import moves, numbers
from cpcompile.passes.masks.reader import Reader


def reader() -> Reader:
    """A reader of one graph."""
    return Reader({**moves.OPERATORS, **numbers.OPERATORS})
