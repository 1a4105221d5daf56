"""Forward + backward on a CPU: the plain Hugging Face model on padded rows against the same model with shared prompts.

    python scripts/bench_cpu.py                          # the table, then JSON
    python scripts/bench_cpu.py --check --json out.json  # exit 1 when a shape misses its target

The baseline is sdpa on the whole batch with the head on response rows only, so what is measured is sharing alone. Both
sides start from token ids and end with gradients; finding the groups and building the plan is inside the measured time.
A speed-up is printed only when log-probs and gradients of the two agree on the very batch that is timed. Beside it
stands the bound: the quotient of the multiplications that the two need (linear layers, attention, head). Memory is what
one step needs beside weights and gradients; of the plain model's, no more than 1 / (0.8 x token ratio) should be left.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from measuring import (
    Disagreement,
    Effort,
    Shape,
    Timing,
    agree,
    clock_for,
    count,
    duration,
    environment,
    json_of_own_process,
    markdown_header,
    markdown_row,
    peak_resident,
    time_interleaved,
    verdict,
    write_json,
)
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
SHARE_OF_TOKEN_RATIO = 0.8  # target of what memory is saved

SHAPES = tuple(map(Shape.parse, ("512,64,8", "1024,128,8", "2048,128,8", "256,256,8", "256,256,1")))


def bound(shape: Shape) -> float:
    """Multiplications of the plain model over the shared one's."""
    return flop_bound_speedup(CONFIG, [shape.group])


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


@dataclass(frozen=True)
class Difference:
    log_prob: float  # largest absolute difference
    gradient: float  # largest difference over all parameters, as a share of the largest gradient


def difference(plain: Contestant, shared: Contestant, batch: Batch) -> Difference:
    """Of one step of both on the same batch."""
    log_prob = (plain.step(batch) - shared.step(batch)).abs().max().item()
    pairs = [(a.grad, b.grad) for a, b in zip(plain.model.parameters(), shared.model.parameters(), strict=True)]
    largest = max(a.abs().max().item() for a, _ in pairs)
    return Difference(log_prob, max((a - b).abs().max().item() for a, b in pairs) / largest)


def peak_memory(name: str, shape: Shape) -> int | None:
    """Peak resident bytes of one step above weights and gradients, in a process of its own.

    None where the system has no count.
    """
    return json_of_own_process(__file__, "--peak-memory-of", name, "--shapes", shape)


def measure_peak_memory(name: str, shape: Shape) -> int | None:
    contestant = next(c for c in contestants() if c.name == name)
    contestant.step(Batch(Shape(8, 4, 2)))  # what is loaded once is no part of a step, nor are the gradients it leaves
    return peak_resident(partial(contestant.step, Batch(shape)))


@dataclass(frozen=True)
class Result:
    shape: Shape
    plain: Timing
    shared: Timing
    difference: Difference
    plain_peak: int | None
    shared_peak: int | None

    @property
    def clock(self) -> str:
        return clock_for((self.plain, self.shared))

    @property
    def speed_up(self) -> float:
        return self.plain.by(self.clock) / self.shared.by(self.clock)

    @property
    def share_of_bound(self) -> float:
        return self.speed_up / bound(self.shape)

    @property
    def on_target(self) -> bool:
        return self.speed_up >= SPEED_ALONE if self.shape.n == 1 else self.share_of_bound >= SHARE_OF_BOUND

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
            "plain_s": asdict(self.plain),
            "shared_s": asdict(self.shared),
            "clock": self.clock,
            "speed_up": self.speed_up,
            "token_ratio": self.shape.token_ratio,
            "flop_bound": bound(self.shape),
            "share_of_bound": self.share_of_bound,
            "on_target": self.on_target,
            "difference": asdict(self.difference),
            "peak_bytes": {"plain": self.plain_peak, "shared": self.shared_peak},
            "memory_on_target": self.memory_on_target,
        }


def measure(both: tuple[Contestant, Contestant], shape: Shape, effort: Effort, memory: bool) -> Result:
    batch = Batch(shape)
    found = difference(*both, batch)  # the warm-up, too
    agree({"log-probs": found.log_prob, "gradients": found.gradient}, TOLERANCE)
    plain, shared = time_interleaved([partial(contestant.step, batch) for contestant in both], effort)
    peaks = [peak_memory(contestant.name, shape) if memory else None for contestant in both]
    return Result(shape, plain, shared, found, *peaks)


def surroundings(effort: Effort) -> dict[str, str]:
    return environment(
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
    shape, clock = result.shape, result.clock
    peaks = [f"{peak / 2**20:.0f}" if peak is not None else "-" for peak in (result.plain_peak, result.shared_peak)]
    cells = (
        f"{shape.P}, {shape.R}, {shape.n}",
        f"{shape.tokens_padded} -> {shape.tokens_packed}",
        f"{shape.token_ratio:.2f}",
        f"{result.plain.by(clock):.3f}",
        f"{result.shared.by(clock):.3f}",
        f"{result.speed_up:.2f}",
        f"{bound(shape):.2f}",
        f"{result.share_of_bound:.0%}",
        verdict(result.on_target),
        " -> ".join(peaks),
        verdict(result.memory_on_target),
        f"{result.difference.log_prob:.0e}, {result.difference.gradient:.0e}",
        clock,
    )
    return markdown_row(cells)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", type=Shape.parse, nargs="+", default=SHAPES, metavar="P,R,n")
    parser.add_argument("--rounds", type=count, default=7, help="interleaved runs of each side, at least (default: 7)")
    parser.add_argument("--seconds", type=duration, default=20, help="least time for each shape (default: 20)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the JSON here instead of to the terminal")
    parser.add_argument("--no-memory", dest="memory", action="store_false", help="leave out peak memory")
    parser.add_argument("--check", action="store_true", help="exit 1 when a shape misses its target")
    parser.add_argument("--peak-memory-of", choices=("plain", "shared"), help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    torch.set_num_threads(1)
    if options.peak_memory_of:
        print(json.dumps(measure_peak_memory(options.peak_memory_of, *options.shapes)))
        return 0
    effort = Effort(options.rounds, options.seconds)
    start = surroundings(effort)
    print("\n".join(f"{key}: {value}" for key, value in start.items()), flush=True)
    print(f"\n{markdown_header(COLUMNS)}", flush=True)
    both = contestants()
    results = []
    for shape in options.shapes:
        try:
            results.append(measure(both, shape, effort, options.memory))
        except Disagreement as error:
            print(f"P, R, n = {shape}: {error}", file=sys.stderr)
            return 1
        print(table_row(results[-1]), flush=True)
    if any(result.clock == "cpu" for result in results):
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
