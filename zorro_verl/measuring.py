"""How a figure is taken: shapes, interleaved timing, peak memory of a step, and where it was measured.

What is compared runs by turns in one process, and a median counts. What a process holds in memory is read in one of its
own, and every result can say on what, with what and by which command it was measured.
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

import torch

T = TypeVar("T")

NOISY = 1.05  # wall time over CPU time: above it the process had to wait for its core
PROCESS = Path("/proc/self")
# What allocators say of memory that isn't there, when they raise no error of its own kind.
NO_MEMORY = ("out of memory", "can't allocate memory", "cublas_status_alloc_failed")


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
        """``"512,64,8"``, as command lines name a shape.

        Raises:
            ValueError: anything but three whole numbers above 0.
        """
        numbers = text.split(",")
        if len(numbers) != 3 or not all(number.strip().isdecimal() and int(number) > 0 for number in numbers):
            raise ValueError(
                f"shape: expected prompt tokens, response tokens and responses, such as 512,64,8, got {text!r}"
            )
        return cls(*map(int, numbers))

    @property
    def group(self) -> tuple[int, list[int]]:
        """As `zorro_verl.flops` takes it: the prompt's length, and the length of each response."""
        return self.P, [self.R] * self.n

    @property
    def tokens_padded(self) -> int:
        """Of all rows."""
        return self.n * (self.P + self.R)

    @property
    def tokens_packed(self) -> int:
        """With the prompt once."""
        return self.P + self.n * self.R

    @property
    def token_ratio(self) -> float:
        """Times fewer tokens."""
        return self.tokens_padded / self.tokens_packed


@dataclass(frozen=True)
class Effort:
    """How often a thing is run: so many rounds, and more until so many seconds have passed (short runs vary most)."""

    rounds: int
    seconds: float = 0.0

    def __post_init__(self):
        if self.rounds < 1:
            raise ValueError(f"rounds: expected at least 1, got {self.rounds}")
        if not 0 <= self.seconds < math.inf:
            raise ValueError(f"seconds: expected 0 or more, got {self.seconds}")

    def __str__(self) -> str:
        return f"medians over at least {self.rounds} interleaved rounds and {self.seconds:g} s"


@dataclass(frozen=True)
class Timing:
    """Seconds. CPU time is what counts when another process took the core (wall is then longer)."""

    wall: float
    cpu: float

    @classmethod
    def median(cls, runs: Sequence[Timing]) -> Timing:
        """Of each clock."""
        return cls(statistics.median(run.wall for run in runs), statistics.median(run.cpu for run in runs))

    @property
    def noisy(self) -> bool:
        """Whether the process had to wait."""
        return self.wall > NOISY * self.cpu

    def by(self, clock: str) -> float:
        """Seconds on the clock "wall" or "cpu"."""
        return self.cpu if clock == "cpu" else self.wall


def clock_for(timings: Sequence[Timing]) -> str:
    """The clock that all of these are compared by: "wall", or "cpu" where one of them had to wait for its core.

    With several threads it is "wall" in any case: their CPU time counts each one's, and those that spin as they wait.
    """
    return "cpu" if torch.get_num_threads() == 1 and any(timing.noisy for timing in timings) else "wall"


def stopwatch(step: Callable[[], object]) -> Timing:
    """One run on the host. What runs on an accelerator needs a watch of its own."""
    wall, cpu = time.perf_counter(), time.process_time()
    step()
    return Timing(time.perf_counter() - wall, time.process_time() - cpu)


def cuda_stopwatch(step: Callable[[], object]) -> Timing:
    """One run on the current GPU, whose clock both numbers are by: from the first kernel's start to the last's end."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    step()
    end.record()
    end.synchronize()
    seconds = start.elapsed_time(end) / 1e3
    return Timing(seconds, seconds)


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


def peak_allocated(work: Callable[[], object]) -> int:
    """Most bytes that tensors take on the current GPU during ``work`` above those at its start."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def in_own_process(function: Callable[..., T], *arguments: object) -> T:
    """What ``function`` returns, or raises, in a fresh process with as many threads; both ends have to pickle."""
    fresh = multiprocessing.get_context("spawn")
    threads = torch.get_num_threads()
    with ProcessPoolExecutor(1, fresh, initializer=torch.set_num_threads, initargs=(threads,)) as process:
        return process.submit(function, *arguments).result()


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory did not suffice, whoever raised it."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error).lower() for text in NO_MEMORY)


def check_device(device: str) -> None:
    """Raise a ValueError for a device, named as "cpu", "cuda" or "cuda:N", that torch doesn't have."""
    if device == "cpu":
        return
    if not torch.cuda.is_available():
        raise ValueError(f"device: expected cpu, as torch finds no CUDA here, got {device!r}")
    if (torch.device(device).index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device: expected one of {torch.cuda.device_count()} CUDA devices, got {device!r}")


def hardware(device: str = "cpu") -> str:
    """The CPU and how much of it this process uses; in front of it the GPU where that is the device."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.processor()
    threads = torch.get_num_threads()
    host = f"{name}, {os.cpu_count()} cores, {threads} thread{'s' if threads > 1 else ''} used"
    if device == "cpu":
        return host
    gpu = torch.cuda.get_device_properties(device)
    memory, processors = gpu.total_memory / 2**30, gpu.multi_processor_count
    return f"{gpu.name}, {memory:.0f} GiB, {processors} multiprocessors; {host}"


def environment(command: str, *packages: str, **more: str) -> dict[str, str]:
    """What a result has to say of itself: hardware, load, versions and command, the same keys for all benchmarks.

    Args:
        command: what was typed.
        packages: distributions whose versions matter beside Python's and torch's.
        more: further lines (the model, the method), or another text for one of the keys above.
    """
    versions = [f"Python {platform.python_version()}", f"torch {torch.__version__}"]
    return {
        "hardware": hardware(),
        "load": " ".join(f"{load:.1f}" for load in os.getloadavg()) + " (1, 5, 15 minutes, at the start)",
        "versions": ", ".join(versions + [f"{package} {version(package)}" for package in packages]),
        "command": command,
    } | more
