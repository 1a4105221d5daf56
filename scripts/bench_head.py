"""The vocabulary head in its three modes: peak memory and seconds of forward + backward, log-probs and entropy.

    python scripts/bench_head.py                                 # 2048 response tokens, vocabulary 151936
    python scripts/bench_head.py --rows 4096 --hidden 1024 --json out.json

Each mode runs in a process of its own, from hidden states to the gradients of hidden states and weight. Nothing is
printed unless values and gradients of all modes agree. Peak memory is what is resident above the inputs (the weight is
one of them), at its highest.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from measuring import Disagreement, agree, command_line, count, write_json
from torch import Tensor

from zorro_verl.log_probs import CHUNK_BYTES, LOGITS_OPTIMIZATIONS, log_probs_from_hidden, log_probs_from_logits
from zorro_verl.measuring import environment, in_own_process, peak_resident

TOLERANCE = 2e-5  # float32: values absolutely, gradients as a share of the largest gradient


@dataclass(frozen=True)
class Head:
    """R response tokens, hidden size E, V words."""

    rows: int
    hidden: int
    vocabulary: int

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(self.rows, self.hidden, generator=generator)
        weight = torch.randn(self.vocabulary, self.hidden, generator=generator).mul_(self.hidden**-0.5)
        labels = torch.randint(self.vocabulary, (self.rows,), generator=generator)
        return hidden.requires_grad_(), weight.requires_grad_(), labels


@dataclass(frozen=True)
class Measurement:
    seconds: float  # median
    peak_bytes: int | None  # None where the system has no count


def step(mode: str, hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs and entropy, and into ``.grad`` the gradients of the mean of both."""
    hidden.grad = weight.grad = None
    if mode == "memory":
        values = log_probs_from_hidden(hidden, weight, None, labels, 1.0, True)
    else:
        logits = torch.nn.functional.linear(hidden, weight)
        values = log_probs_from_logits(logits, labels, 1.0, True, chunked=mode == "compute")
    (values[0].mean() + values[1].mean()).backward()
    return tuple(x.detach() for x in values[:2])


def measure(mode: str, head: Head, rounds: int, results: Path | None = None) -> Measurement:
    """In this process, which has to be a fresh one: memory that was used before hides what a step needs."""
    step(mode, *Head(2, 4, 8).inputs())  # what is loaded once is no part of a step
    inputs = head.inputs()
    seconds, values = [], ()

    def steps() -> None:
        nonlocal values
        for _ in range(rounds):
            started = time.perf_counter()
            values = step(mode, *inputs)
            seconds.append(time.perf_counter() - started)

    peak = peak_resident(steps)
    if results is not None:
        torch.save([*values, inputs[0].grad, inputs[1].grad], results)
    return Measurement(statistics.median(seconds), peak)


def differences(expected: Path, got: Path) -> list[float]:
    """Of log-probs and entropy absolutely, of both gradients as a share of the largest."""
    pairs = list(zip(torch.load(expected), torch.load(got), strict=True))
    scales = [1.0, 1.0, *(a.abs().max().item() for a, _ in pairs[2:])]
    return [(a - b).abs().max().item() / scale for (a, b), scale in zip(pairs, scales, strict=True)]


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=count, default=2048, help="response tokens (default: 2048)")
    parser.add_argument("--hidden", type=count, default=256, help="hidden size (default: 256)")
    parser.add_argument("--vocabulary", type=count, default=151936, help="words (default: 151936, Qwen3's)")
    parser.add_argument("--rounds", type=count, default=3, help="steps of each mode (default: 3)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the numbers here, too")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    torch.set_num_threads(1)
    head = Head(options.rows, options.hidden, options.vocabulary)
    start = environment(
        command_line(),
        head=f"{head.rows} response tokens, hidden {head.hidden}, vocabulary {head.vocabulary}, float32",
        logits=f"{4 * head.rows * head.vocabulary / 2**20:.0f} MiB, a chunk {CHUNK_BYTES / 2**20:.0f} MiB, "
        f"the weight's gradient {4 * head.hidden * head.vocabulary / 2**20:.0f} MiB",
    )
    found, worst = {}, 0.0
    with tempfile.TemporaryDirectory() as folder:
        files = {mode: Path(folder, mode) for mode in LOGITS_OPTIMIZATIONS}
        for mode, file in files.items():
            found[mode] = in_own_process(measure, mode, head, options.rounds, file)
            worst = max(worst, *differences(files["none"], file))
    try:
        agree({"values and gradients of the modes": worst}, TOLERANCE)
    except Disagreement as error:
        print(error, file=sys.stderr)
        return 1
    print("\n".join(f"{key}: {value}" for key, value in start.items()))
    print(f"largest difference of values and gradients: {worst:.0e}\n")
    print("| logits_optimization | peak MiB | seconds |\n|---|---|---|")
    for mode, m in found.items():
        peak = "-" if m.peak_bytes is None else f"{m.peak_bytes / 2**20:.0f}"
        print(f"| {mode} | {peak} | {m.seconds:.2f} |")
    if options.json:
        modes = {mode: asdict(m) for mode, m in found.items()}
        write_json(options.json, {**start, "difference": worst, "modes": modes})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
