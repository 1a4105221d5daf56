"""Forward + backward on a CPU: the plain Hugging Face model on padded rows against the same model with shared prompts.

    python scripts/bench_cpu.py                          # the table, then JSON
    python scripts/bench_cpu.py --check --json out.json  # exit 1 when a shape misses its target

What is compared and timed is `zorro_verl.benchmark`, on one thread; here are its targets and its table. A speed-up is
printed only when log-probs and gradients of the two agree on the very batch that is timed. Beside it stands the bound:
the quotient of the multiplications that the two need (linear layers, attention, head). Memory is what one step needs
beside weights and gradients; of the plain model's, no more than 1 / (0.8 x token ratio) should be left.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from measuring import (
    P_R_N,
    Disagreement,
    agree,
    as_argument,
    command_line,
    count,
    duration,
    markdown_header,
    markdown_row,
    verdict,
    write_json,
)

from zorro_verl.benchmark import Contestants, Pair, Subject, peak_on_host, small_config
from zorro_verl.equivalence import TOLERANCES, Difference
from zorro_verl.flops import flop_bound_speedup
from zorro_verl.measuring import Effort, Shape, environment

CONFIG = small_config()
TOLERANCE = TOLERANCES[torch.float32]  # log-probs absolutely, gradients as a share of the largest gradient
SHARE_OF_BOUND = 0.98  # target where a prompt is shared
SPEED_ALONE = 0.95  # target where nothing is shared
SHARE_OF_TOKEN_RATIO = 0.8  # target of what memory is saved

SHAPES = tuple(map(Shape.parse, ("512,64,8", "1024,128,8", "2048,128,8", "256,256,8", "256,256,1")))


def bound(shape: Shape) -> float:
    """Multiplications of the plain model over the shared one's."""
    return flop_bound_speedup(CONFIG, [shape.group])


@dataclass(frozen=True)
class Largest:
    """Differences between the two sides."""

    log_prob: float  # absolute
    gradient: float  # as a share of the largest gradient

    @classmethod
    def of(cls, differences: Sequence[Difference]) -> Largest:
        gradient = next(d.worst for d in differences if d.quantity == "gradients")
        return cls(max(d.worst for d in differences if d.quantity != "gradients"), gradient)


@dataclass(frozen=True)
class Result:
    shape: Shape
    times: Pair
    difference: Largest
    plain_peak: int | None
    shared_peak: int | None

    @property
    def share_of_bound(self) -> float:
        return self.times.speed_up / bound(self.shape)

    @property
    def on_target(self) -> bool:
        return self.times.speed_up >= SPEED_ALONE if self.shape.n == 1 else self.share_of_bound >= SHARE_OF_BOUND

    @property
    def memory_on_target(self) -> bool | None:
        """None where it was not measured."""
        if self.plain_peak is None or self.shared_peak is None:
            return None
        return self.shared_peak <= self.plain_peak / (SHARE_OF_TOKEN_RATIO * self.shape.token_ratio)

    def as_dict(self) -> dict:
        return {
            **asdict(self.shape),
            "tokens": {"padded": self.shape.tokens_padded, "packed": self.shape.tokens_packed},
            "plain_s": asdict(self.times.plain),
            "shared_s": asdict(self.times.shared),
            "clock": self.times.clock,
            "speed_up": self.times.speed_up,
            "token_ratio": self.shape.token_ratio,
            "flop_bound": bound(self.shape),
            "share_of_bound": self.share_of_bound,
            "on_target": self.on_target,
            "difference": asdict(self.difference),
            "peak_bytes": {"plain": self.plain_peak, "shared": self.shared_peak},
            "memory_on_target": self.memory_on_target,
        }


def subject() -> Subject:
    return Subject(small_config(), "Qwen3", CONFIG.num_hidden_layers, attn_implementation="sdpa")


def measure(contestants: Contestants, shape: Shape, effort: Effort, memory: bool) -> Result:
    batch = contestants.batch(shape)
    found = Largest.of(contestants.compare(batch))  # the warm-up, too
    agree({"log-probs": found.log_prob, "gradients": found.gradient}, TOLERANCE)
    times = contestants.time("update", batch, effort)
    peaks = [peak_on_host(contestants.subject, one.name, shape) if memory else None for one in contestants.both]
    return Result(shape, times, found, *peaks)


def surroundings(effort: Effort) -> dict[str, str]:
    return environment(
        command_line(),
        "transformers",
        model=f"Qwen3, {CONFIG.num_hidden_layers} layers, hidden {CONFIG.hidden_size}, float32, random weights",
        method=f"forward + backward, {effort}",
    )


COLUMNS = (
    "P, R, n",
    "tokens, padded -> packed",
    "ratio",
    "plain s",
    "shared s",
    "speed-up",
    "FLOP bound",
    "of bound",
    "speed target",
    "peak MiB, plain -> shared",
    "memory target",
    "max diff log-prob, gradient",
    "clock",
)


def table_row(result: Result) -> str:
    shape, times = result.shape, result.times
    peaks = [f"{peak / 2**20:.0f}" if peak is not None else "-" for peak in (result.plain_peak, result.shared_peak)]
    cells = (
        f"{shape.P}, {shape.R}, {shape.n}",
        f"{shape.tokens_padded} -> {shape.tokens_packed}",
        f"{shape.token_ratio:.2f}",
        f"{times.plain.by(times.clock):.3f}",
        f"{times.shared.by(times.clock):.3f}",
        f"{times.speed_up:.2f}",
        f"{bound(shape):.2f}",
        f"{result.share_of_bound:.0%}",
        verdict(result.on_target),
        " -> ".join(peaks),
        verdict(result.memory_on_target),
        f"{result.difference.log_prob:.0e}, {result.difference.gradient:.0e}",
        times.clock,
    )
    return markdown_row(cells)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--shapes",
        type=as_argument(Shape.parse),
        nargs="+",
        default=SHAPES,
        metavar="P,R,n",
        help=f"{P_R_N} (default: {' '.join(map(str, SHAPES))})",
    )
    parser.add_argument("--rounds", type=count, default=7, help="interleaved runs of each side, at least (default: 7)")
    parser.add_argument("--seconds", type=duration, default=20, help="least time for each shape (default: 20)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the JSON here instead of to the terminal")
    parser.add_argument("--no-memory", dest="memory", action="store_false", help="leave out peak memory")
    parser.add_argument("--check", action="store_true", help="exit 1 when a shape misses its target")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    torch.set_num_threads(1)
    effort = Effort(options.rounds, options.seconds)
    start = surroundings(effort)
    print("\n".join(f"{key}: {value}" for key, value in start.items()), flush=True)
    print(f"\n{markdown_header(COLUMNS)}", flush=True)
    contestants = Contestants(subject())
    results = []
    for shape in options.shapes:
        try:
            results.append(measure(contestants, shape, effort, options.memory))
        except Disagreement as error:
            print(f"P, R, n = {shape}: {error}", file=sys.stderr)
            return 1
        print(table_row(results[-1]), flush=True)
    if any(result.times.clock == "cpu" for result in results):
        print('\nclock "cpu": wall time was over 5 % longer than CPU time there, another process held the core.')
    record = {**start, "results": [result.as_dict() for result in results]}
    if options.json:
        write_json(options.json, record)
    else:
        print(f"\n{json.dumps(record, indent=1)}")
    missed = any(not result.on_target or result.memory_on_target is False for result in results)
    return int(options.check and missed)


if __name__ == "__main__":
    raise SystemExit(main())
