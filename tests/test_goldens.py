"""Every pass on a small model: the graph's text before and after, compared with what is stored in ``goldens``.

``UPDATE_GOLDENS=1 python -m pytest tests/test_goldens.py`` writes the texts anew: read the difference before you keep
it.
"""

import difflib
import os
from pathlib import Path

import pytest

from cpcompile.layout import Axis
from cpcompile.show import rich_text, text
from tests import toys

GOLDENS = Path(__file__).parent / "goldens"
TWO_AXES = (Axis("ring", 2), Axis("ulysses", 2))
CASES = {
    "inline": (toys.Region, toys.PLAN, toys.AXES),
    "functionalize": (toys.Rope, toys.PLAN, toys.AXES),
    "normalize": (toys.Casts, toys.PLAN, toys.AXES),
    "propagate": (toys.Fallback, toys.GATHERED, toys.AXES),
    "reshard": (toys.Fallback, toys.GATHERED, toys.AXES),
    "attention": (toys.Attend, toys.PLAN, TWO_AXES),
    "cotangents": (toys.Pooled, toys.PLAN, toys.AXES),
    "enter": (toys.Pooled, toys.PLAN, toys.AXES),
    "lower": (toys.Fallback, toys.GATHERED, toys.AXES),
}


def before_and_after(name):
    make, plan, axes = CASES[name]
    found = toys.stages(make, plan, axes)
    order = list(found)
    first = next(index for index, stage in enumerate(order) if stage.split(",")[0] == name)
    shown = [order[first - 1], *(stage for stage in order[first:] if stage.split(",")[0] == name)]
    return "\n".join(f"## after {stage}\n\n{found[stage]}" for stage in shown)


def compare(name, printed):
    path = GOLDENS / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDENS"):
        path.write_text(printed)
    stored = path.read_text() if path.exists() else ""
    if printed != stored:
        difference = difflib.unified_diff(stored.splitlines(), printed.splitlines(), path.name, "now", lineterm="")
        pytest.fail("\n".join(difference), pytrace=False)


@pytest.mark.parametrize("name", CASES)
def test_pass(name):
    compare(name, before_and_after(name))


def test_a_toy_of_two_layers_through_all_passes():
    found = toys.stages(toys.Toy, toys.GATHERED)
    compare("toy", "\n".join(f"## after {stage}\n\n{printed}" for stage, printed in found.items()))


def test_every_golden_is_compared():
    assert {path.stem for path in GOLDENS.glob("*.txt")} == {*CASES, "toy"}


def test_the_text_is_the_same_every_time():
    assert toys.stages(toys.Toy) == toys.stages(toys.Toy)


def test_long_lists_are_cut_and_layouts_can_be_left_out():
    module = toys.build(toys.Attend, axes=TWO_AXES).module
    assert "#" in text(module)
    assert "#" not in text(module, layouts=False)
    assert "= parameter" in text(module)
    assert "= parameter" not in text(module, parameters=False)


def test_every_node_has_a_line_and_a_name_of_its_own():
    module = toys.build(toys.Toy, toys.GATHERED).module
    lines = text(module).splitlines()
    assert len(lines) == len(module.graph.nodes)
    names = [line.split(" = ")[0] for line in lines[:-1]]
    assert len(set(names)) == len(names)
    assert "torch.ops" not in text(module)
    assert ".default" not in text(module)


def test_colour_changes_no_letter():
    module = toys.build(toys.Toy, toys.GATHERED).module
    assert rich_text(module).plain == text(module)
    assert rich_text(module).spans
