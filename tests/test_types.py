"""What `make lint` has a type checker read: the core, which imports torch alone, with nothing overlooked in silence."""

from __future__ import annotations

import re
from pathlib import Path

from test_imports import PACKAGE, TORCH_ONLY

ROOT = Path(__file__).resolve().parent.parent
# A comment of its own says why.
REASONED_IGNORE = re.compile(r"# type: ignore\[[a-z, -]+\]  # \w+")


def checked_modules() -> list[str]:
    """`modules` of [tool.mypy], a name a line; Python 3.10 has no reader of TOML."""
    section = (ROOT / "pyproject.toml").read_text().partition("[tool.mypy]")[2].partition("[[")[0]
    return re.findall(r'"(zorro_verl[\w.]*)"', section.partition("modules = [")[2].partition("]")[0])


def test_what_is_checked_is_the_core():
    assert checked_modules() == [f"zorro_verl{name}" for name in TORCH_ONLY]


def test_every_ignored_line_names_the_error_and_says_why():
    for path in PACKAGE.rglob("*.py"):
        for line in path.read_text().splitlines():
            assert "type: ignore" not in line or REASONED_IGNORE.search(line), f"{path.name}: {line.strip()}"
