"""What the benchmark scripts share beside `zorro_verl.measuring`: their arguments, their rule and their reports.

The rule: no figure where the results differ (`agree`).
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

T = TypeVar("T")

CHECKOUT = Path(__file__).resolve().parent.parent
P_R_N = "prompt tokens, response tokens and responses of a group, such as 512,64,8"


def as_argument(parse: Callable[[str], T]) -> Callable[[str], T]:
    """The same as a ``type=`` of argparse, which keeps the text of an error of its own kind alone."""

    def parsed(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parsed


def count(text: str) -> int:
    """An argument of a command line that is a whole number above 0."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def duration(text: str) -> float:
    """An argument of a command line in seconds."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"expected seconds, 0 or more, got {text!r}")
    return seconds


def command_line() -> str:
    """What was typed to run this script, from the checkout's folder."""
    script = Path(sys.argv[0]).resolve()
    name = script.relative_to(CHECKOUT) if script.is_relative_to(CHECKOUT) else script.name
    return shlex.join(["python", str(name), *sys.argv[1:]])


class Disagreement(Exception):
    """What is compared does not compute the same thing, so the times cannot be compared."""


def agree(differences: Mapping[str, float], tolerance: float) -> None:
    """Raise `Disagreement` unless every difference, named by what differs, is within the tolerance (NaN is not)."""
    if not all(difference <= tolerance for difference in differences.values()):
        found = ", ".join(f"{name} by {difference:.1e}" for name, difference in differences.items())
        raise Disagreement(f"the results disagree: {found} (allowed: {tolerance:.0e}); no figure is reported")


def largest(x: Tensor) -> float:
    return x.abs().max().item()


def write_json(path: Path, record: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")


def number(value: float | None, form: str) -> str:
    """In this format; "-" for what was not measured."""
    return "-" if value is None else format(value, form)


def verdict(met: bool | None) -> str:
    """A target's; "-" for what was not measured."""
    return "-" if met is None else "met" if met else "MISSED"


def markdown_row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def markdown_header(columns: Sequence[str]) -> str:
    return f"{markdown_row(columns)}\n{'|---' * len(columns)}|"
