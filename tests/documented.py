"""What README and docs tell a reader to type: their fenced blocks, and the commands in these and in code spans."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PAGES = (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")))
# A code span that begins with one of these words, and has another one, is a command.
PROGRAMS = ("zorro-verl", "make", "python", "python3", "pip", "hf", "ray", "bash", "git", ".venv/bin/python")

_FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"(?<!`)`([^`]+)`(?!`)")
_ASSIGNMENT = re.compile(r"[A-Z_]+=.*")
# Of a loop in bash; what stands between them are commands.
_LOOP = ("for ", "done", "do", "if ", "fi", "then")


class Block(NamedTuple):
    """What stands between two fences."""

    page: str
    line: int
    language: str
    text: str

    @property
    def is_doctest(self) -> bool:
        return ">>>" in self.text


class Command(NamedTuple):
    """A line of a shell, its continuations joined and its comments gone."""

    page: str
    line: int
    variables: dict[str, str]
    words: tuple[str, ...]

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}: {shlex.join(self.words)}"


def blocks(*languages: str) -> Iterator[Block]:
    """Of all pages, those in one of the languages; of every language when none is named."""
    for page in PAGES:
        text = page.read_text()
        for match in _FENCE.finditer(text):
            if not languages or match[2] in languages:
                line = text.count("\n", 0, match.start()) + 1
                yield Block(str(page.relative_to(ROOT)), line, match[2], match[3])


def outputs(page: str) -> list[tuple[Block, Block]]:
    """Of a page each bash block with the text block behind it, which shows what it prints."""
    found = [block for block in blocks() if block.page == page]
    return [(a, b) for a, b in zip(found, found[1:], strict=False) if (a.language, b.language) == ("bash", "text")]


def commands() -> list[Command]:
    """All commands: of bash blocks, and of code spans outside of blocks."""
    found = [command for block in blocks("bash", "diff") for command in commands_of(block)]
    for page in PAGES:
        text = page.read_text()
        outside = _FENCE.sub(lambda match: "\n" * match[0].count("\n"), text)
        for match in _SPAN.finditer(outside):
            line, span = outside.count("\n", 0, match.start()) + 1, " ".join(match[1].split())
            if _is_command(span):
                found.append(_command(str(page.relative_to(ROOT)), line, span))
    return found


def commands_of(block: Block) -> Iterator[Command]:
    """Of a diff both sides: what was typed before, and what is typed now."""
    if block.language == "diff":
        lines = [line for line in block.text.splitlines() if not line.startswith("@@")]
        for side in "-+":
            text = "\n".join(line[1:] for line in lines if line[:1] in (side, " "))
            if text.split()[:1] in (["python3"], ["python"]):
                yield _command(block.page, block.line, text.replace("\\\n", " ").replace("\n", " "))
        return
    start = None
    pending = ""
    for number, raw in enumerate(block.text.splitlines(), block.line + 1):
        start = start or number
        pending += raw.removesuffix("\\") if raw.endswith("\\") else raw
        if raw.endswith("\\"):
            continue
        if shlex.split(pending, comments=True) and not pending.strip().startswith(_LOOP):
            yield _command(block.page, start, pending)
        start, pending = None, ""


def _is_command(span: str) -> bool:
    words = span.split()
    if "; " in span:  # a message that begins with the package's name
        return False
    return len(words) > 1 and (words[0] in PROGRAMS or words[0].startswith("recipes/"))


def _command(page: str, line: int, text: str) -> Command:
    words = shlex.split(text, comments=True)
    variables = {}
    while len(words) > 1 and _ASSIGNMENT.fullmatch(words[0]):
        name, _, value = words.pop(0).partition("=")
        variables[name] = value
    return Command(page, line, variables, tuple(words))
