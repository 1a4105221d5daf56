"""A case: contestants that compute the same thing are compared, and timed by turns when they agree."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from gpu_bench.comparison import PRECISION, Results, disagreement, errors, imprecision
from gpu_bench.device import Device

from zorro_verl.measuring import Effort, Timing, clock_for, out_of_memory

SHARE_OF_BOUND = 0.90  # target where a prompt is shared
SPEED_ALONE = 0.98  # target where nothing is shared
SHARE_OF_RATIO = 0.80  # activations may take the baseline's bytes over this share of the token ratio
LONG_ROUND = 4.0  # seconds: rounds that take longer vary little, and two of them do


class NotRun(Exception):
    """A contestant can't run here; the text says why."""


class Step(Protocol):
    """A contestant that is ready: what it needs is on the device."""

    def reset(self) -> None:
        """Before every run, outside the measured time."""

    def run(self) -> None:
        """What is measured."""

    def results(self) -> Results:
        """Of the last run."""


@dataclass(frozen=True)
class Contestant:
    """One way to do a case's work.

    Attributes:
        name: as the report says it.
        role: "baseline"; "stand-in" (for a baseline that does not fit into memory); "ours"; "peer".
        prepare: makes it ready; whatever it raises is the reason why it did not run.
        operations: floating-point operations of one run.
    """

    name: str
    role: str
    prepare: Callable[[], Step]
    operations: float


@dataclass(frozen=True)
class Case:
    """One piece of work at one shape.

    Attributes:
        level, size, shape, work: its name.
        contestants: the baseline first, its stand-in behind it.
        bound: operations of the baseline over ours.
        token_ratio: tokens of the rows over packed ones.
        has_target: whether speed and memory are judged.
        stock_errors: the baseline's against float32 on short rows, by what is compared.
    """

    level: str
    size: str
    shape: str
    work: str
    contestants: tuple[Contestant, ...]
    bound: float
    token_ratio: float
    has_target: bool = False
    stock_errors: dict[str, float] = field(default_factory=dict)

    @property
    def title(self) -> str:
        return f"{self.level}, {self.size}, P,R,n = {self.shape}, {self.work}"


@dataclass
class Entry:
    """How a contestant fared; holds nothing of what it needed, so that this can be freed.

    Attributes:
        name, role, operations: the contestant's.
        status: "ready", "timed", "not run", "not compared", "out of memory" or "disagrees".
        reason: for all but the first two.
        differences: from the baseline's results, by what is compared.
        seconds, rounds, peak: median, timed runs, and bytes above the start; None where there are none.
        room: bytes that were free before a run that did not fit.
    """

    name: str
    role: str
    operations: float
    status: str = "ready"
    reason: str = ""
    differences: dict[str, float] = field(default_factory=dict)
    seconds: float | None = None
    rounds: int = 0
    peak: int | None = None
    room: int | None = None

    @classmethod
    def of(cls, contestant: Contestant) -> Entry:
        return cls(contestant.name, contestant.role, contestant.operations)

    @property
    def teraflops(self) -> float | None:
        return None if self.seconds is None else self.operations / self.seconds / 1e12

    def fail(self, status: str, reason: str) -> None:
        self.status, self.reason = status, reason


class Budget:
    """The seconds that the whole benchmark may take."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self._started = time.perf_counter()

    @property
    def left(self) -> float:
        return self.seconds - (time.perf_counter() - self._started)


def check_precision(case: Case, exact: Callable[[], Results], device: Device) -> tuple[list[Entry], str]:
    """Every contestant's errors against float32, as ``differences``, and what is wrong with ours (nothing: empty).

    Args:
        exact: computes the float32 results.
    """
    entries = [Entry.of(contestant) for contestant in case.contestants]
    try:
        reference = exact()
    except Exception as error:  # as for a contestant: the other levels go on
        for entry in entries:
            entry.fail("not run", "no float32 reference to compare with")
        return entries, f"the float32 reference: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
    for entry, contestant in zip(entries, case.contestants, strict=True):
        if entry.role == "stand-in":
            entry.fail("not run", "the baseline fits")
        elif (step := _start(entry, contestant, device)) is not None:
            entry.differences = errors(reference, step.results())
        step = None
    stock = next(entry for entry in entries if entry.role == "baseline")
    if not stock.differences:
        return entries, f"the baseline: {stock.status}, {stock.reason}"
    for entry in entries:
        if entry.role == "ours" and entry.differences:
            if wrong := imprecision(stock.differences, entry.differences):
                entry.fail("disagrees", f"error against float32 over {PRECISION} times the stock one's: {wrong}")
            elif wrong := disagreement(entry.differences, stock.differences):
                entry.fail("disagrees", f"error against float32: {wrong}")
    return entries, _what_is_wrong(entries)


def run_case(case: Case, device: Device, effort: Effort, budget: Budget) -> tuple[list[Entry], str]:
    """Compare, then time by turns. Also gives what is wrong with ours (nothing: empty), and then nothing was timed."""
    entries = [Entry.of(contestant) for contestant in case.contestants]
    ready: list[tuple[Entry, Step]] = []
    expected, cold = None, False
    for entry, contestant in zip(entries, case.contestants, strict=True):
        if entry.role == "stand-in" and expected is not None:
            entry.fail("not run", "the whole batch fits")
        elif expected is None and entry.role not in ("baseline", "stand-in"):
            entry.fail("not compared", "no baseline to compare with")
        elif (step := _start(entry, contestant, device)) is not None:
            found = step.results()
            if expected is None:
                expected = found
            else:
                entry.differences = errors(expected, found)
            if wrong := disagreement(entry.differences, case.stock_errors):
                entry.fail("disagrees", f"with the baseline, {wrong}")
            else:
                ready.append((entry, step))
        else:
            cold = bool(ready)  # what did not run had the cache emptied, that of those before it too
        step = found = None  # else it lives on through the next one's run
    wrong = _what_is_wrong(entries)
    expected = None
    device.collect()
    if not wrong:
        _time_by_turns(ready, cold, device, effort, budget)
    return entries, wrong


def _what_is_wrong(entries: Sequence[Entry]) -> str:
    """Ours have to agree wherever they run, and one of them has to run where there is something to compare with."""
    ours = [entry for entry in entries if entry.role == "ours"]
    bad = [entry for entry in ours if entry.status == "disagrees"]
    if not bad and all(entry.status == "not run" for entry in ours):
        bad = ours
    return "; ".join(f"{entry.name}: {entry.reason}" for entry in bad)


def _start(entry: Entry, contestant: Contestant, device: Device) -> Step | None:
    """Make a contestant ready and run it once: whatever is compiled or tuned is then; None when it can't run."""
    entry.room = device.free()
    try:
        step = contestant.prepare()
        entry.room = device.free()
        step.reset()
        step.run()
        step.results()
        return step
    except Exception as error:  # whoever wrote the contestant: the others go on, and the report has the reason
        _note(entry, error)
    step = None
    device.clear()
    return None


def _note(entry: Entry, error: Exception) -> None:
    if out_of_memory(error):
        entry.fail("out of memory", str(error).partition("\n")[0][:200])
    elif isinstance(error, NotRun):
        entry.fail("not run", str(error))
    else:
        entry.fail("not run", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")


def _time_by_turns(ready: list[tuple[Entry, Step]], cold: bool, device: Device, effort: Effort, budget: Budget) -> None:
    """One after the other, by turns first; at least one round, and no other that the budget does not hold.

    Args:
        cold: the allocator's cache was emptied. The next turn then asks the driver for memory, and does not count.
            The same holds where a contestant fails, of its turn and of the next.
    """
    runs: dict[str, list[Timing]] = {entry.name: [] for entry, _ in ready}
    started, last, rounds = time.perf_counter(), 0.0, 0
    for turn in itertools.count():
        begun = time.perf_counter()
        least = min(effort.rounds, 2) if last > LONG_ROUND else effort.rounds
        if rounds >= least and begun - started >= effort.seconds:
            break
        if rounds and budget.left < last:
            break
        order = [(entry, step) for entry, step in ready if entry.status == "ready"]
        if not order:
            break
        found = [(entry, _time_once(entry, step, device)) for entry, step in (order, order[::-1])[turn % 2]]
        failed = any(timing is None for _, timing in found)
        if not (cold or failed):
            rounds += 1
            for entry, timing in found:
                runs[entry.name].append(timing)
        cold, last = failed, time.perf_counter() - begun
    clock = clock_for([timing for timings in runs.values() for timing in timings])
    for entry, _ in ready:
        if entry.status == "ready":
            entry.status, entry.rounds = "timed", len(runs[entry.name])
            entry.seconds = Timing.median(runs[entry.name]).by(clock)


def _time_once(entry: Entry, step: Step, device: Device) -> Timing | None:
    """None, with the reason in the entry and the cache emptied, where it fails."""
    timings: list[Timing] = []
    try:
        step.reset()
        peak = device.peak(lambda: timings.append(device.watch(step.run)))
    except Exception as error:
        _note(entry, error)
    else:
        entry.peak = peak if entry.peak is None else max(peak, entry.peak)
        return timings[0]
    device.clear()
    return None
