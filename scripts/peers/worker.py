"""One contestant in a process of its own: takes a command a line, gives an answer a line.

    python -m peers.worker NAME FOLDER      # FOLDER holds the model, and the batch that this contestant is timed on

Commands: `compare` answers with the peak memory of a first step and the versions, and leaves what the step computed in
FOLDER/NAME.safetensors; `step` answers with the time of one more.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import json
import os
import platform
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import TextIO

import torch
from peers.batch import Batch, load_model
from safetensors.torch import save_file
from torch import Tensor

from zorro_verl.measuring import peak_resident, stopwatch

# What a contestant is called -> the module that holds it, and the class there.
CONTESTANTS = {
    "plain": ("plain", "Contestant"),
    "zorro": ("zorro", "Contestant"),
    "prefix-grouper": ("prefix_grouper", "Contestant"),
    "prefix-grouper-response-head": ("prefix_grouper", "ResponseHead"),
    "arctic-plain": ("plain", "Contestant"),
    "arctic-sdpa": ("arctic", "Contestant"),
    "arctic-flash-emulated": ("arctic", "EmulatedFlash"),
}


class Steps:
    """One contestant, with its model, on its batch."""

    def __init__(self, prepare: type, folder: Path):
        model = load_model(folder)
        self.warm_up(prepare, copy.deepcopy(model))
        self.batch = Batch.load(folder / "batch.safetensors")
        self.model, self.contestant = model, prepare(model, self.batch)

    @staticmethod
    def warm_up(prepare: type, model: torch.nn.Module) -> None:
        """What is loaded or compiled once is no part of a step."""
        batch = Batch.random([(8, [4, 4])], model.config.vocab_size)
        (prepare(model, batch).log_probs() * batch.weights).sum().backward()

    def step(self) -> Tensor:
        """One forward and backward; leaves gradients on the model and returns the log-probs."""
        self.model.zero_grad(set_to_none=True)
        log_probs = self.contestant.log_probs()
        (log_probs * self.batch.weights).sum().backward()
        return log_probs.detach()

    def compare(self, path: Path) -> int | None:
        """Write what one step computes: the log-probs, and the gradient of every parameter; returns its peak memory."""
        log_probs: list[Tensor] = []
        peak = peak_resident(lambda: log_probs.append(self.step()))
        save_file({"log_probs": log_probs[0]} | {name: p.grad for name, p in self.model.named_parameters()}, path)
        return peak


def versions(module: ModuleType) -> str:
    packages = [f"{name} {version(name)}" for name in ("torch", *module.PACKAGES)]
    return ", ".join([f"Python {platform.python_version()}", *packages])


def answers(name: str, folder: Path) -> Iterator[dict]:
    """One for each line on standard input."""
    module_name, class_name = CONTESTANTS[name]
    module = importlib.import_module(f"peers.{module_name}")
    steps = Steps(getattr(module, class_name), folder)
    for line in sys.stdin:
        match line.strip():
            case "compare":
                peak = steps.compare(folder / f"{name}.safetensors")
                yield {"peak_bytes": peak, "versions": versions(module)}
            case "step":
                timing = stopwatch(steps.step)
                yield {"wall": timing.wall, "cpu": timing.cpu}
            case other:
                raise SystemExit(f"expected the command compare or step, got {other!r}")


@contextlib.contextmanager
def answer_channel() -> Iterator[TextIO]:
    """Standard output for answers alone: what libraries print goes to standard error meanwhile."""
    with os.fdopen(os.dup(1), "w", buffering=1) as channel:
        os.dup2(2, 1)
        yield channel


def main() -> None:
    torch.set_num_threads(1)
    name, folder = sys.argv[1:]
    with answer_channel() as channel:
        for answer in answers(name, Path(folder)):
            print(json.dumps(answer), file=channel)


if __name__ == "__main__":
    main()
