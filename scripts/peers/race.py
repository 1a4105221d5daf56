"""Contestants by turns on one case: who computes the right thing, in what time, in how much memory."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from bench_cpu import TOLERANCE
from peers.environments import Environment
from peers.process import Failed, Process
from safetensors.torch import load_file
from virtual_environment import ROOT

from zorro_verl.measuring import Effort, Timing, time_interleaved

PLAIN = "plain"  # the contestant that all are held against


@dataclass(frozen=True)
class Contestant:
    """Attributes:
    name: also what `peers.worker` knows it by.
    environment: where it runs.
    baseline: the plain model of the same environment, by which its speed-up is counted; itself for that model.
    what: one line for the report.
    program: what the environment's Python runs.
    """

    name: str
    environment: Environment
    baseline: str
    what: str
    program: tuple[str, ...] = ("-m", "peers.worker")

    def start(self, folder: Path, limit: float) -> Process:
        """Its process, which takes the model and the batch from the folder.

        Raises:
            Failed: it lacks something, or does not start.
        """
        if lacking := self.environment.lacking():
            raise Failed(f"not run: lacks {', '.join(lacking)}; `python scripts/bench_peers.py --setup` installs it")
        # The last is what every worker measures with.
        path = os.pathsep.join(map(str, (*self.environment.path, ROOT)))
        variables = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        command = (str(self.environment.python), *self.program, self.name, str(folder))
        return Process(command, variables, folder / f"{self.name}.log", limit)


@dataclass(frozen=True)
class Difference:
    """From another contestant's results on the same batch."""

    log_prob: float  # largest absolute difference
    gradient: float  # largest difference over all parameters, as a share of the largest gradient

    @classmethod
    def between(cls, result: Path, reference: Path) -> Difference:
        """Raises:
        Failed: there is no result, or it lacks a tensor that the reference has, or has it in another shape.
        """
        if not result.exists():
            raise Failed("wrong: left no results")
        found, expected = ({name: x.double() for name, x in load_file(path).items()} for path in (result, reference))
        shapes = [{name: tuple(x.shape) for name, x in results.items()} for results in (found, expected)]
        if shapes[0] != shapes[1]:
            odd = sorted(name for name in shapes[0] | shapes[1] if shapes[0].get(name) != shapes[1].get(name))
            raise Failed(f"wrong: {odd[0]} is {shapes[0].get(odd[0])}, expected {shapes[1].get(odd[0])}")
        log_prob = (found.pop("log_probs") - expected.pop("log_probs")).abs().max().item()
        largest = max(gradient.abs().max() for gradient in expected.values())
        gradient = torch.stack([(found[name] - expected[name]).abs().max() for name in expected]).max() / largest
        return cls(log_prob, gradient.item())

    @property
    def accepted(self) -> bool:
        return self.log_prob <= TOLERANCE and self.gradient <= TOLERANCE

    def __str__(self) -> str:
        return f"log-probs by {self.log_prob:.1e}, gradients by {self.gradient:.1e} of the largest"


@dataclass(frozen=True)
class Result:
    """Of one contestant on one case. What was not found out, or does not count, is None."""

    contestant: Contestant
    status: str = "ok"
    versions: str | None = None
    peak_bytes: int | None = None
    from_baseline: Difference | None = None  # the plain model of its environment
    from_plain: Difference | None = None  # the plain model of this environment
    timing: Timing | None = None


class Dropout(Exception):
    """A contestant that failed between the others' turns."""

    def __init__(self, name: str, failure: Failed):
        super().__init__(name, failure)
        self.name, self.failure = name, failure


class Race:
    """The contestants' processes on one case, and what is known of each."""

    def __init__(self, contestants: Sequence[Contestant], folder: Path, limit: float, stack: contextlib.ExitStack):
        self.folder = folder
        self.results = {contestant.name: Result(contestant) for contestant in contestants}
        self.processes: dict[str, Process] = {}
        for contestant in contestants:
            self.result_file(contestant.name).unlink(missing_ok=True)  # of another case
            try:
                process = contestant.start(folder, limit)
            except Failed as failure:
                self.drop(contestant.name, failure)
            else:
                self.processes[contestant.name] = stack.enter_context(contextlib.closing(process))

    def note(self, name: str, **found: object) -> None:
        self.results[name] = replace(self.results[name], **found)

    def drop(self, name: str, failure: Failed) -> None:
        self.note(name, status=str(failure))
        self.processes.pop(name, None)

    def compare(self) -> None:
        """One step of each; keeps those whose results agree with both plain models'."""
        for name, process in list(self.processes.items()):
            try:
                answer = process.ask("compare", "peak_bytes", "versions")
                self.note(name, peak_bytes=answer["peak_bytes"], versions=answer["versions"])
            except Failed as failure:
                self.drop(name, failure)
        for name in list(self.processes):
            try:
                self.judge(name)
            except Failed as failure:
                self.drop(name, failure)

    def judge(self, name: str) -> None:
        references = {"from_baseline": self.results[name].contestant.baseline, "from_plain": PLAIN}
        found = {}
        for kind, reference in references.items():
            if self.results[reference].versions is None:
                raise Failed(f"not judged: {reference}, which it is held against, did not run")
            if reference != name:
                found[kind] = Difference.between(self.result_file(name), self.result_file(reference))
        self.note(name, **found)
        for kind, difference in found.items():
            if not difference.accepted:
                raise Failed(f"wrong: differs from {references[kind]}: {difference} (allowed: {TOLERANCE:.0e})")

    def result_file(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"

    def run(self, effort: Effort) -> None:
        """Time those that are left. When one of them fails, the others start again."""
        while self.processes:
            steps = [partial(self.step, name, process) for name, process in self.processes.items()]
            try:
                timings = time_interleaved(steps, effort, watch=lambda step: step())
            except Dropout as dropout:
                self.drop(dropout.name, dropout.failure)
                continue
            for name, timing in zip(self.processes, timings, strict=True):
                self.note(name, timing=timing)
            break

    @staticmethod
    def step(name: str, process: Process) -> Timing:
        try:
            answer = process.ask("step", "wall", "cpu")
        except Failed as failure:
            raise Dropout(name, failure) from None
        return Timing(wall=answer["wall"], cpu=answer["cpu"])
