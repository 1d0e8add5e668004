"""What the packaging lists by hand is complete."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import cpcompile.passes

ROOT = Path(__file__).parent.parent


def test_every_package_is_listed():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {file.parent for top in ("cpcompile", "passes") for file in (ROOT / top).rglob("*.py")}
    names = {".".join(folder.relative_to(ROOT).parts).removeprefix("cpcompile.") for folder in folders}
    assert set(listed) == {name if name == "cpcompile" else f"cpcompile.{name}" for name in names}


def test_the_link_to_the_passes_is_relative():
    link = ROOT / "cpcompile" / "passes"
    assert link.is_symlink()
    assert link.readlink() == Path("../passes")
    assert cpcompile.passes.__name__ == "cpcompile.passes"


@pytest.mark.parametrize("code", ["import passes", "import passes.rules"])
def test_the_passes_are_imported_as_a_part_of_the_package_only(code):
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "import cpcompile.passes, not passes" in done.stderr
