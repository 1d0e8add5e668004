"""The command line, as a user types it."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from cpcompile.cli import app
from cpcompile.pipeline import Options
from cpcompile.site import SiteOptions

SOURCE = """
import torch
from torch import nn
from cpcompile import ContextParallelInput


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        q = self.inner(x).unsqueeze(1)
        return nn.functional.scaled_dot_product_attention(q, q, q)[:, 0]


def made():
    torch.manual_seed(0)
    return Tiny(), {"x": torch.randn(2, 6, 8)}, {"": {"x": ContextParallelInput(split_dim=1)}}


def unplanned():
    return made()[:2]


def mistaken():
    return (*made()[:2], {"": {"y": ContextParallelInput(split_dim=1)}})


def nothing():
    return None
"""


@pytest.fixture
def source(tmp_path: Path) -> str:
    """A file with a model, a call and a plan."""
    file = tmp_path / "tiny_source.py"
    file.write_text(SOURCE)
    return str(file)


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == code, result.output
    return result.output


@pytest.mark.parametrize(
    ("stage", "present", "absent"),
    [
        ("captured", ["cp.mark(%x, 0)", "sdpa(", "f32[2, 6, 8]"], ["cp.shard", "ulysses"]),
        ("planned", ["cp.mark(%x, 0)", "(2) (6 ulysses) (8)"], ["cp.shard", "cp.exchange"]),
        ("rewritten", ["cp.shard(%x)", "cp.gather(", "(2) (6 ulysses) (8)"], ["cp.mark"]),
        ("lowered", ["slice(%x, 1, 0, 3)", "cp.exchange_blocks("], ["cp.shard("]),
    ],
)
def test_dump(source: str, stage: str, present: list[str], absent: list[str]) -> None:
    output = run("dump", f"{source}:made", "--ulysses", "2", "--stage", stage)
    assert all(words in output for words in present), output
    assert not any(words in output.split("#")[0] for words in absent), output
    assert output.strip().splitlines()[-1].startswith("return ")


def test_dump_of_another_rank(source: str) -> None:
    assert "slice(%x, 1, 3, 6)" in run("dump", f"{source}:made", "--ulysses", "2", "--stage", "lowered", "--rank", "1")
    assert "there are ranks 0 to 1" in run(
        "dump", f"{source}:made", "--ulysses", "2", "--stage", "lowered", "--rank", "2", code=2
    )


def test_dump_of_symbols(source: str) -> None:
    output = run("dump", f"{source}:made", "--ulysses", "2", "--dynamic")
    assert "(6 ulysses)" not in output
    assert " ulysses) (8)" in output


def test_check(source: str) -> None:
    output = run("check", f"{source}:made", "--ring", "2")
    assert "equal" in output
    assert "NOT EQUAL" not in output
    assert "ring" in output


def test_check_says_by_its_exit_code_that_they_differ(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cpcompile.simulate.Options", lambda **options: Options(sites=SiteOptions(policy="local")))
    output = run("check", f"{source}:made", "--ulysses", "2", "--bisect", code=1)
    assert "NOT EQUAL" in output
    assert "first difference: scaled_dot_product_attention" in output


@pytest.mark.parametrize(
    ("function", "options", "words"),
    [
        ("missing", ["--ulysses", "2"], "it has no function missing"),
        ("nothing", ["--ulysses", "2"], "it must return (model, kwargs) or (model, kwargs, plan)"),
        ("unplanned", ["--ulysses", "2"], "there is no plan"),
        ("mistaken", ["--ulysses", "2"], "'y'"),
        ("made", [], "one rank shares nothing"),
        ("made", ["--ring", "0"], "a mesh axis has at least one rank"),
    ],
)
@pytest.mark.parametrize("command", ["dump", "check"])
def test_mistakes(source: str, command: str, function: str, options: list[str], words: str) -> None:
    assert words in " ".join(run(command, f"{source}:{function}", *options, code=2).split())


def test_no_file() -> None:
    assert "there is no such file" in run("dump", "nowhere.py:made", code=2)
    assert "say FILE.py:FUNCTION" in run("dump", "nowhere", code=2)


def test_the_example() -> None:
    output = run("dump", "examples/flux.py:tiny", "--ulysses", "4")
    assert "(1) (16 ulysses ++ 63 ulysses) (4) (16)" in output
