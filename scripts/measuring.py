"""What all benchmarks share: shapes, interleaved timing, peak memory of a process, and where a figure was taken.

The rules that it stands for: what is compared runs by turns in one process and a median is reported; no figure where
the results differ (`agree`); and each result says on what, with what and by which command it was measured.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

NOISY = 1.05  # wall time over CPU time: above it the process had to wait for its core
CHECKOUT = Path(__file__).resolve().parent.parent
PROCESS = Path("/proc/self")


@dataclass(frozen=True)
class Shape:
    """One group: a prompt of P tokens with n responses of R tokens each."""

    P: int
    R: int
    n: int

    def __str__(self) -> str:
        return f"{self.P},{self.R},{self.n}"

    @classmethod
    def parse(cls, text: str) -> Shape:
        """``"512,64,8"``, as command lines name a shape."""
        numbers = text.split(",")
        if len(numbers) != 3 or not all(number.strip().isdigit() and int(number) > 0 for number in numbers):
            raise argparse.ArgumentTypeError(
                f"expected prompt tokens, response tokens and responses, such as 512,64,8, got {text!r}"
            )
        return cls(*map(int, numbers))

    @property
    def group(self) -> tuple[int, list[int]]:
        """As `zorro_verl.flops` takes it: the prompt's length, and the length of each response."""
        return self.P, [self.R] * self.n

    @property
    def tokens_padded(self) -> int:
        return self.n * (self.P + self.R)

    @property
    def tokens_packed(self) -> int:
        return self.P + self.n * self.R if self.n > 1 else self.P + self.R

    @property
    def token_ratio(self) -> float:
        return self.tokens_padded / self.tokens_packed


def count(text: str) -> int:
    """An argument of a command line that is a whole number above 0."""
    if not text.isdigit() or int(text) < 1:
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


class Disagreement(Exception):
    """What is compared does not compute the same thing, so the times cannot be compared."""


def agree(differences: Mapping[str, float], tolerance: float) -> None:
    """Raise `Disagreement` unless every difference, named by what differs, is within the tolerance (NaN is not)."""
    if not all(difference <= tolerance for difference in differences.values()):
        found = ", ".join(f"{name} by {difference:.1e}" for name, difference in differences.items())
        raise Disagreement(f"the results disagree: {found} (allowed: {tolerance:.0e}); no figure is reported")


def largest(x: Tensor) -> float:
    return x.abs().max().item()


@dataclass(frozen=True)
class Effort:
    """How often a thing is run: so many rounds, and more until so many seconds have passed (short runs vary most)."""

    rounds: int
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"medians over at least {self.rounds} interleaved rounds and {self.seconds:g} s"


@dataclass(frozen=True)
class Timing:
    """Seconds. CPU time is what counts when another process took the core (wall is then longer)."""

    wall: float
    cpu: float

    @classmethod
    def median(cls, runs: Sequence[Timing]) -> Timing:
        return cls(statistics.median(run.wall for run in runs), statistics.median(run.cpu for run in runs))

    @property
    def noisy(self) -> bool:
        return self.wall > NOISY * self.cpu

    def by(self, clock: str) -> float:
        return self.cpu if clock == "cpu" else self.wall


def clock_for(timings: Sequence[Timing]) -> str:
    """The clock that all of these are compared by: "wall", or "cpu" where one of them had to wait for its core."""
    return "cpu" if any(timing.noisy for timing in timings) else "wall"


def stopwatch(step: Callable[[], object]) -> Timing:
    """One run on the host. What runs on an accelerator needs a watch of its own."""
    wall, cpu = time.perf_counter(), time.process_time()
    step()
    return Timing(time.perf_counter() - wall, time.process_time() - cpu)


def time_interleaved(
    steps: Sequence[Callable[[], object]],
    effort: Effort,
    watch: Callable[[Callable[[], object]], Timing] = stopwatch,
) -> list[Timing]:
    """The median of each step, run one after the other, by turns first: drift of the machine meets all alike."""
    runs: list[list[Timing]] = [[] for _ in steps]
    started = time.perf_counter()
    for turn in itertools.count():
        if turn >= effort.rounds and time.perf_counter() - started >= effort.seconds:
            break
        order = list(enumerate(steps))
        for index, step in order if turn % 2 == 0 else reversed(order):
            runs[index].append(watch(step))
    return [Timing.median(timings) for timings in runs]


def peak_resident(work: Callable[[], object]) -> int | None:
    """Most bytes resident during ``work`` above those at its start; None where the system keeps no such count.

    To be called in a process of its own: memory that was used and freed before hides what the work needs.
    """
    reset = PROCESS / "clear_refs"
    if not reset.exists():
        work()
        return None
    reset.write_text("5")  # sets the high-water mark back to what is resident now
    before = _status_bytes("VmRSS")
    work()
    return _status_bytes("VmHWM") - before


def _status_bytes(field: str) -> int:
    line = next(line for line in (PROCESS / "status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def json_of_own_process(script: Path | str, *arguments: object) -> Any:
    """What a script prints as JSON when it is run with these arguments in a fresh process of this Python."""
    command = [sys.executable, str(script), *map(str, arguments)]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)


def hardware() -> str:
    """The CPU and how much of it this process uses."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.processor()
    threads = torch.get_num_threads()
    return f"{name}, {os.cpu_count()} cores, {threads} thread{'s' if threads > 1 else ''} used"


def environment(*packages: str, **more: str) -> dict[str, str]:
    """What a result has to say of itself: hardware, load, versions and command, the same keys for all benchmarks.

    Args:
        packages: distributions whose versions matter beside Python's and torch's.
        more: further lines (the model, the method), or another text for one of the keys above.
    """
    versions = [f"Python {platform.python_version()}", f"torch {torch.__version__}"]
    script = Path(sys.argv[0]).resolve()
    name = script.relative_to(CHECKOUT) if script.is_relative_to(CHECKOUT) else script.name
    return {
        "hardware": hardware(),
        "load": " ".join(f"{load:.1f}" for load in os.getloadavg()) + " (1, 5, 15 minutes, at the start)",
        "versions": ", ".join(versions + [f"{package} {version(package)}" for package in packages]),
        "command": shlex.join(["python", str(name), *sys.argv[1:]]),
    } | more


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
