"""Reads what a run of veRL's trainer left: metrics by step, dumped generations, the error at the end of its log."""

import json
import re
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

NOISE = re.compile(r"target_num_threads|Warning|warn\(|\bINFO\b|\bDEBUG\b|it/s\]|^\s*$")
RAY_PREFIX = re.compile(r"^(\x1b\[\d+m)*\([\w:.]+ pid=\d+[^)]*\)(\x1b\[\d+m)* ?")
ANSI = re.compile(r"\x1b\[[\d;]*[A-Za-z]")


@dataclass(frozen=True)
class Record:
    """One line of veRL's file logger. Step 0 holds the validation before training."""

    step: int
    values: dict[str, float]

    def __getitem__(self, name: str) -> float:
        return self.values[name]

    @property
    def is_training_step(self) -> bool:
        return "timing_s/step" in self.values

    @property
    def reward(self) -> float:
        return self["critic/score/mean"]

    @property
    def seconds(self) -> float:
        """Of the step as veRL measures it, without writing the checkpoint."""
        return self["timing_s/step"] - self.values.get("timing_s/save_checkpoint", 0.0)

    @property
    def validation_reward(self) -> float | None:
        return next((v for name, v in self.values.items() if name.startswith("val-core/")), None)


def parse_record(line: str) -> Record:
    entry = json.loads(line)
    return Record(entry["step"], {k: float(v) for k, v in entry["data"].items() if isinstance(v, int | float)})


class MetricsFile:
    """veRL's file logger, read while it grows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0

    def new_records(self) -> list[Record]:
        """What was added since the last call; a line without its end waits for the next one."""
        if not self.path.exists():
            return []
        with self.path.open() as file:
            file.seek(self.offset)
            added = file.read()
        complete = added[: added.rfind("\n") + 1]
        self.offset += len(complete.encode())
        return [parse_record(line) for line in complete.splitlines()]


@dataclass(frozen=True)
class Generation:
    prompt: str
    response: str
    answer: str  # the right one
    score: float


def read_generations(folder: Path, step: int) -> list[Generation]:
    """A dump of `trainer.rollout_data_dir` or `trainer.validation_data_dir`; the order of its lines means nothing."""
    lines = (folder / f"{step}.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    return [Generation(e["input"], e["output"], e["gts"], e["score"]) for e in entries]


def samples_of_step(folder: Path, record: Record) -> tuple[Counter, float]:
    """What was sampled in a step, comparable between runs: prompts with responses, and the tokens that they took."""
    texts = Counter((g.prompt, g.response) for g in read_generations(folder, record.step))
    return texts, record["response_length/mean"]


def wait_for_dump(folder: Path, step: int, rows: int, seconds: float = 30.0) -> None:
    """veRL writes a dump in a thread of its own, so a step's metrics may be there first."""
    path, deadline = folder / f"{step}.jsonl", time.monotonic() + seconds
    while not path.exists() or path.read_text().count("\n") < rows:
        if time.monotonic() > deadline:
            raise TimeoutError(f"expected {rows} generations in {path} within {seconds:.0f} s of the step's metrics")
        time.sleep(0.1)


def last_error(log: Path, lines: int = 40) -> str:
    """The last traceback in the log, else its last lines; without Ray's prefixes and the chatter of other libraries."""
    text = log.read_text(errors="replace").splitlines()
    clean = [RAY_PREFIX.sub("", ANSI.sub("", line)) for line in text]
    clean = [line for line in clean if not NOISE.search(line)]
    starts = [i for i, line in enumerate(clean) if "Traceback (most recent call last)" in line]
    return "\n".join(clean[starts[-1] if starts else 0 :][-lines:])
