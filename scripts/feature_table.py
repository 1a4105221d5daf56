"""Write the table of verl's options in docs/verl.md: what the tests say of each with ``strategy=zorro``.

    python scripts/feature_table.py            # rewrite the table
    python scripts/feature_table.py --check    # exit code 1 if it is not what the tests say

Tests carry ``@pytest.mark.feature(keys, verdict, note)``: config keys below ``actor_rollout_ref`` (or from the top),
separated by spaces, one of `VERDICTS`, and a note of one line or none. They are collected, not run.
"""

from __future__ import annotations

import argparse
import contextlib
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "verl.md"
BEGIN, END = "<!-- options, written by scripts/feature_table.py -->", "<!-- end of the options -->"
VERDICTS = ("works", "counted", "no effect", "refused")


@dataclass(frozen=True)
class Feature:
    """What a test says of one option."""

    key: str
    verdict: str
    note: str

    @property
    def place(self) -> str:
        return self.key.rpartition(".")[0]

    @property
    def name(self) -> str:
        return self.key.rpartition(".")[2]


class Collector:
    """A pytest plug-in that keeps what was collected."""

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.marks = [mark.args for item in session.items for mark in item.iter_markers("feature")]


def collect() -> list[Feature]:
    """One for each key, from all tests that carry the mark.

    Raises:
        ValueError: a verdict that is none, or two of one key.
    """
    collector, output = Collector(), io.StringIO()
    files = [str(path) for path in sorted((ROOT / "tests").glob("test_*.py")) if "feature(" in path.read_text()]
    with contextlib.redirect_stdout(output):
        code = pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", *files], plugins=[collector])
    if code != pytest.ExitCode.OK:
        raise ValueError(f"tests: expected a collection without errors, got\n{output.getvalue()}")
    return merge(collector.marks)


def merge(marks: Iterable[tuple[str, str, str]]) -> list[Feature]:
    """Marks -> one feature for each key, with the notes of all its marks."""
    verdicts: dict[str, str] = {}
    notes: dict[str, list[str]] = {}
    for keys, verdict, note in marks:
        if verdict not in VERDICTS:
            raise ValueError(f"feature {keys}: expected a verdict of {VERDICTS}, got {verdict!r}")
        for key in keys.split():
            if verdicts.setdefault(key, verdict) != verdict:
                raise ValueError(f"feature {key}: expected one verdict in all tests, got {verdicts[key]} and {verdict}")
            if note and note not in notes.setdefault(key, []):
                notes[key].append(note)
    return [Feature(key, verdicts[key], "; ".join(notes.get(key, ()))) for key in sorted(verdicts)]


def section(features: Sequence[Feature]) -> str:
    """The text between the markers: options of one place with the same words in one line."""
    lines: dict[tuple[str, int, str], list[str]] = {}
    for feature in features:
        line = (feature.place, VERDICTS.index(feature.verdict), feature.note)
        lines.setdefault(line, []).append(f"`{feature.name}`")
    rows = [
        f"| `{place}` | {', '.join(names)} | {VERDICTS[verdict]} | {note} |"
        for (place, verdict, note), names in sorted(lines.items())
    ]
    return "\n".join(("| | options | | |", "|---|---|---|---|", *rows))


def write(text: str) -> None:
    """Put the text between the markers of the page."""
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.split(END)[1]}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if the table is out of date")
    options = parser.parse_args(argv)
    text = section(collect())
    if options.check:
        return int(PAGE.read_text().split(BEGIN)[1].split(END)[0].strip() != text)
    write(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
