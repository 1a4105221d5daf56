"""What an examination comes to: facts to show, notes, and problems, each with its way out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

TOPICS = ("packages", "kernels", "machine", "plug_in")


@dataclass(frozen=True)
class Finding:
    """A fact.

    Attributes:
        topic: one of `TOPICS`, the table that it stands in.
        name: what it is about.
        found: what is there; None for nothing.
        expected: a version range or the like, None where any will do.
    """

    topic: str
    name: str
    found: str | None
    expected: str | None = None


@dataclass(frozen=True)
class Problem:
    """Why training with ``strategy=zorro`` can't work.

    Attributes:
        about: one of the four packages, "requirements" (others), "plug-in", "attention" or "model".
        line: what was expected, what is there, and what mends it, in one line.
    """

    about: str
    line: str


@dataclass
class Findings:
    """What has been found so far, in order."""

    facts: list[Finding] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def fact(self, topic: str, name: str, found: str | None, expected: str | None = None) -> None:
        self.facts.append(Finding(topic, name, found, expected))

    def problem(self, about: str, text: str) -> None:
        """``text`` in one line; the same said twice is one problem."""
        problem = Problem(about, in_one_line(text))
        if problem not in self.problems:
            self.problems.append(problem)

    def note(self, text: str) -> None:
        self.notes.append(in_one_line(text))

    def hinders(self, *names: str) -> bool:
        """Whether there is a problem with one of ``names``."""
        return any(problem.about in names for problem in self.problems)

    @contextmanager
    def probing(self, about: str, mend: str) -> Iterator[None]:
        """Within this context an error is a problem, which ``mend`` is the way out of, and the examination goes on."""
        try:
            yield
        except (Exception, SystemExit) as error:  # whatever a broken installation raises
            self.problem(about, f"{about}: expected to be examined, got {described(error)}; {mend}")


def in_one_line(text: object) -> str:
    return " ".join(str(text).split())


def described(error: BaseException) -> str:
    """The class of an error and its first line."""
    return f"{type(error).__name__}: {in_one_line(str(error).strip().partition(chr(10))[0])}".removesuffix(": ")
