"""Forward + backward on a CPU: the plain Hugging Face model on padded rows against the same model with shared prompts.

    python scripts/bench_cpu.py                          # the table, then JSON
    python scripts/bench_cpu.py --check --json out.json  # exit 1 when a shape misses its target

The baseline is sdpa on the whole batch with the head on response rows only, so what is measured is sharing alone. Both
sides start from token ids and end with gradients; finding the groups and building the plan is inside the measured time.
A speed-up is printed only when log-probs and gradients of the two agree on the very batch that is timed. Beside it
stands the bound: the quotient of the multiplications that the two need (linear layers, attention, head).
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from zorro_verl.flops import flop_bound_speedup
from zorro_verl.grouping import Rows, find_prompt_groups
from zorro_verl.heads import SharedPrompt
from zorro_verl.models import install
from zorro_verl.packing import build_plan

CONFIG = Qwen3Config(
    hidden_size=256,
    intermediate_size=768,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    vocab_size=2048,
    tie_word_embeddings=False,
)
TOLERANCE = 2e-5  # float32: log-probs absolutely, gradients as a share of the largest gradient
SHARE_OF_BOUND = 0.98  # target where a prompt is shared
SPEED_ALONE = 0.95  # target where nothing is shared
NOISY = 1.05  # wall time over CPU time: above it the process had to wait for its core


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
        return cls(*map(int, text.split(",")))

    @property
    def tokens_padded(self) -> int:
        return self.n * (self.P + self.R)

    @property
    def tokens_packed(self) -> int:
        return self.P + self.n * self.R if self.n > 1 else self.P + self.R

    @property
    def token_ratio(self) -> float:
        return self.tokens_padded / self.tokens_packed

    def bound(self) -> float:
        """Multiplications of the plain model over the shared one's."""
        return flop_bound_speedup(CONFIG, [(self.P, [self.R] * self.n)])


SHAPES = tuple(map(Shape.parse, ("512,64,8", "1024,128,8", "2048,128,8", "256,256,8", "256,256,1")))


class Batch:
    """The padded batch of one shape (all rows are full: nothing to pad) and the weight of every response token."""

    def __init__(self, shape: Shape):
        generator = torch.Generator().manual_seed(shape.P + shape.R + shape.n)
        prompt = torch.randint(CONFIG.vocab_size, (1, shape.P), generator=generator).expand(shape.n, -1)
        self.responses = torch.randint(CONFIG.vocab_size, (shape.n, shape.R), generator=generator)
        self.response_length = shape.R
        self.input_ids = torch.cat([prompt, self.responses], 1)
        self.attention_mask = torch.ones_like(self.input_ids)
        self.position_ids = torch.arange(shape.P + shape.R).expand(shape.n, -1)
        self.weights = torch.randn(shape.n, shape.R, generator=generator)


def plain_log_probs(model: Qwen3ForCausalLM, batch: Batch) -> Tensor:
    """``(n, R)``: the model as Hugging Face ships it, the head on the rows that predict a response token."""
    end = batch.input_ids.shape[1] - 1
    predictors = torch.arange(end - batch.response_length, end)
    logits = model(input_ids=batch.input_ids, use_cache=False, logits_to_keep=predictors).logits.flatten(0, 1)
    losses = torch.nn.functional.cross_entropy(logits, batch.responses.flatten(), reduction="none")
    return -losses.view_as(batch.responses)


def shared_log_probs(model: Qwen3ForCausalLM, batch: Batch) -> Tensor:
    """``(n, R)``: the same with every distinct prompt computed once, from the padded batch to the rows' own order."""
    rows = Rows.from_padded(batch.input_ids, batch.attention_mask, batch.position_ids, batch.response_length)
    plan = build_plan(rows, find_prompt_groups(rows))
    shared = SharedPrompt(plan, labels=rows.tokens[plan.label_index])
    packed = {"input_ids": plan.pack(rows.tokens)[None], "position_ids": plan.pack(rows.position_ids)[None]}
    return model(**packed, use_cache=False, zorro=shared)["log_probs"].view_as(batch.responses)


@dataclass(frozen=True)
class Contestant:
    name: str
    model: Qwen3ForCausalLM
    log_probs: Callable[[Qwen3ForCausalLM, Batch], Tensor]

    def step(self, batch: Batch) -> Tensor:
        """One forward and backward; leaves gradients on the model and returns the log-probs."""
        self.model.zero_grad(set_to_none=True)
        log_probs = self.log_probs(self.model, batch)
        (log_probs * batch.weights).sum().backward()
        return log_probs.detach()


def contestants() -> tuple[Contestant, Contestant]:
    """The plain and the shared model, with equal weights."""
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(CONFIG).train()
    model.set_attn_implementation("sdpa")
    shared = copy.deepcopy(model)
    install(shared, attn_implementation="sdpa", use_split_attention=True)
    return Contestant("plain", model, plain_log_probs), Contestant("shared", shared, shared_log_probs)


class Disagreement(Exception):
    """The two models do not compute the same thing, so their times cannot be compared."""


@dataclass(frozen=True)
class Difference:
    log_prob: float  # largest absolute difference
    gradient: float  # largest difference over all parameters, as a share of the largest gradient

    def check(self) -> None:
        if not (self.log_prob <= TOLERANCE and self.gradient <= TOLERANCE):
            raise Disagreement(
                f"the models disagree: log-probs by {self.log_prob:.1e}, gradients by {self.gradient:.1e} of the "
                f"largest (allowed: {TOLERANCE:.0e}); no speed-up is reported"
            )


def difference(plain: Contestant, shared: Contestant, batch: Batch) -> Difference:
    """Of one step of both on the same batch."""
    log_prob = (plain.step(batch) - shared.step(batch)).abs().max().item()
    pairs = [(a.grad, b.grad) for a, b in zip(plain.model.parameters(), shared.model.parameters(), strict=True)]
    largest = max(a.abs().max().item() for a, _ in pairs)
    return Difference(log_prob, max((a - b).abs().max().item() for a, b in pairs) / largest)


@dataclass(frozen=True)
class Effort:
    """How often a shape is run: so many rounds, and more until so many seconds have passed (short runs vary most)."""

    rounds: int
    seconds: float


@dataclass(frozen=True)
class Timing:
    """Medians in seconds. CPU time is what counts when another process took the core (wall is then longer)."""

    wall: float
    cpu: float

    @classmethod
    def of(cls, runs: Sequence[tuple[float, float]]) -> Timing:
        return cls(*(statistics.median(times) for times in zip(*runs, strict=True)))


def time_interleaved(both: Sequence[Contestant], batch: Batch, effort: Effort) -> list[Timing]:
    """One after the other, by turns first: drift of the machine meets both alike."""
    runs: list[list[tuple[float, float]]] = [[] for _ in both]
    started = time.perf_counter()
    for turn in itertools.count():
        if turn >= effort.rounds and time.perf_counter() - started >= effort.seconds:
            break
        order = list(enumerate(both))
        for index, contestant in order if turn % 2 == 0 else reversed(order):
            wall, cpu = time.perf_counter(), time.process_time()
            contestant.step(batch)
            runs[index].append((time.perf_counter() - wall, time.process_time() - cpu))
    return [Timing.of(times) for times in runs]


def peak_memory(name: str, shape: Shape) -> int | None:
    """Peak resident bytes above the start of one step, in a process of its own; None where the system has no count."""
    if not Path("/proc/self/clear_refs").exists():
        return None
    command = [sys.executable, __file__, "--peak-memory-of", name, "--shapes", str(shape)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def measure_peak_memory(name: str, shape: Shape) -> int:
    contestant = next(c for c in contestants() if c.name == name)
    contestant.step(Batch(Shape(8, 4, 2)))  # what is loaded once is no part of a step
    contestant.model.zero_grad(set_to_none=True)
    batch = Batch(shape)
    Path("/proc/self/clear_refs").write_text("5")  # sets the high-water mark back to what is resident now
    before = status_bytes("VmRSS")
    contestant.step(batch)
    return status_bytes("VmHWM") - before


def status_bytes(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


@dataclass(frozen=True)
class Result:
    shape: Shape
    plain: Timing
    shared: Timing
    difference: Difference
    plain_peak: int | None
    shared_peak: int | None

    @property
    def noisy(self) -> bool:
        return any(timing.wall > NOISY * timing.cpu for timing in (self.plain, self.shared))

    @property
    def clock(self) -> str:
        return "cpu" if self.noisy else "wall"

    @property
    def speed_up(self) -> float:
        return getattr(self.plain, self.clock) / getattr(self.shared, self.clock)

    @property
    def share_of_bound(self) -> float:
        return self.speed_up / self.shape.bound()

    @property
    def on_target(self) -> bool:
        return self.speed_up >= SPEED_ALONE if self.shape.n == 1 else self.share_of_bound >= SHARE_OF_BOUND

    def as_dict(self) -> dict:
        return {
            **asdict(self.shape),
            "plain_s": asdict(self.plain),
            "shared_s": asdict(self.shared),
            "clock": self.clock,
            "speed_up": self.speed_up,
            "token_ratio": self.shape.token_ratio,
            "flop_bound": self.shape.bound(),
            "share_of_bound": self.share_of_bound,
            "on_target": self.on_target,
            "difference": asdict(self.difference),
            "peak_bytes": {"plain": self.plain_peak, "shared": self.shared_peak},
        }


def measure(both: tuple[Contestant, Contestant], shape: Shape, effort: Effort, memory: bool) -> Result:
    batch = Batch(shape)
    found = difference(*both, batch)  # the warm-up, too
    found.check()
    plain, shared = time_interleaved(both, batch, effort)
    peaks = [peak_memory(contestant.name, shape) if memory else None for contestant in both]
    return Result(shape, plain, shared, found, *peaks)


def hardware() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.processor()
    return f"{name}, {os.cpu_count()} cores, {torch.get_num_threads()} thread used"


def environment(effort: Effort) -> dict[str, str]:
    return {
        "hardware": hardware(),
        "load": " ".join(f"{load:.1f}" for load in os.getloadavg()) + " (1, 5, 15 minutes, at the start)",
        "versions": f"Python {platform.python_version()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}",
        "model": f"Qwen3, {CONFIG.num_hidden_layers} layers, hidden {CONFIG.hidden_size}, float32, random weights",
        "method": f"forward + backward, medians over at least {effort.rounds} interleaved rounds, {effort.seconds:g} s",
        "command": shlex.join(["python", *sys.argv]),
    }


HEADER = (
    "| P, R, n | tokens, padded -> packed | ratio | plain s | shared s | speed-up | FLOP bound | of bound "
    "| peak MiB, plain -> shared | max diff log-prob, gradient | clock | target |\n" + "|---" * 12 + "|"
)


def table_row(result: Result) -> str:
    shape, clock = result.shape, result.clock
    peaks = [f"{peak / 2**20:.0f}" if peak is not None else "-" for peak in (result.plain_peak, result.shared_peak)]
    cells = (
        f"{shape.P}, {shape.R}, {shape.n}",
        f"{shape.tokens_padded} -> {shape.tokens_packed}",
        f"{shape.token_ratio:.2f}",
        f"{getattr(result.plain, clock):.3f}",
        f"{getattr(result.shared, clock):.3f}",
        f"{result.speed_up:.2f}",
        f"{shape.bound():.2f}",
        f"{result.share_of_bound:.0%}",
        " -> ".join(peaks),
        f"{result.difference.log_prob:.0e}, {result.difference.gradient:.0e}",
        clock,
        "met" if result.on_target else "MISSED",
    )
    return f"| {' | '.join(cells)} |"


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", type=Shape.parse, nargs="+", default=SHAPES, metavar="P,R,n")
    parser.add_argument("--rounds", type=int, default=7, help="least interleaved runs of each side (default: 7)")
    parser.add_argument("--seconds", type=float, default=20, help="least time for each shape (default: 20)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the JSON here instead of to the terminal")
    parser.add_argument("--no-memory", dest="memory", action="store_false", help="leave out peak memory")
    parser.add_argument("--check", action="store_true", help="exit 1 when a shape misses its target")
    parser.add_argument("--peak-memory-of", choices=("plain", "shared"), help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    torch.set_num_threads(1)
    if options.peak_memory_of:
        print(measure_peak_memory(options.peak_memory_of, *options.shapes))
        return 0
    effort = Effort(options.rounds, options.seconds)
    surroundings = environment(effort)
    print("\n".join(f"{key}: {value}" for key, value in surroundings.items()), flush=True)
    print(f"\n{HEADER}", flush=True)
    both = contestants()
    results = []
    for shape in options.shapes:
        try:
            results.append(measure(both, shape, effort, options.memory))
        except Disagreement as error:
            print(f"P, R, n = {shape}: {error}", file=sys.stderr)
            return 1
        print(table_row(results[-1]), flush=True)
    if any(result.noisy for result in results):
        print('\nclock "cpu": wall time was over 5 % longer than CPU time there, another process held the core.')
    report = json.dumps({**surroundings, "results": [result.as_dict() for result in results]}, indent=2)
    if options.json:
        options.json.write_text(report + "\n")
    else:
        print(f"\n{report}")
    return int(options.check and not all(result.on_target for result in results))


if __name__ == "__main__":
    raise SystemExit(main())
