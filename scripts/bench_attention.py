"""Attention alone on a CPU: split attention over shared prompts against SDPA on the rows as they were.

    python scripts/bench_attention.py
    python scripts/bench_attention.py --json docs/results/attention.json

The stock side runs each row by itself, and all rows as one batch padded on the right (a causal mask needs nothing
else there); the faster of the two is compared. Both sides start from queries, keys and values in the layout that their
model gives them. A figure is printed only when outputs agree row by row, and gradients too. The bound is the quotient
of the query-key pairs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
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
    largest,
    markdown_header,
    markdown_row,
    write_json,
)
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence

from zorro_verl.attention import split_attention
from zorro_verl.flops import ModelWork
from zorro_verl.grouping import Rows, exclusive_cumsum
from zorro_verl.measuring import Effort, Shape, Timing, clock_for, environment, time_interleaved
from zorro_verl.packing import Plan, build_plan
from zorro_verl.varlen import CpuKernels

HEADS, KEY_HEADS, HEAD_DIM = 4, 2, 64  # of the model of bench_cpu.py
SCALE = HEAD_DIM**-0.5
TOLERANCE = 2e-5  # float32: outputs absolutely, gradients as a share of the largest gradient
SHAPES = tuple(map(Shape.parse, ("512,64,8", "1024,128,8", "2048,128,8", "256,256,8", "256,256,1")))

Group = tuple[int, list[int]]  # a prompt's length, and those of its responses


@dataclass(frozen=True)
class Case:
    name: str
    groups: list[Group]

    @property
    def rows(self) -> list[tuple[int, int]]:
        """Prompt and response length of each row, a group after the other."""
        return [(prompt, response) for prompt, responses in self.groups for response in responses]

    def plan(self) -> Plan:
        lens = torch.tensor([prompt + response for prompt, response in self.rows])
        nothing = torch.zeros(int(lens.sum()), dtype=torch.int64)
        prompts = torch.tensor([prompt for prompt, _ in self.rows])
        sizes = torch.tensor([len(responses) for _, responses in self.groups])
        rows = Rows(nothing, nothing, exclusive_cumsum(lens), prompts)
        return build_plan(rows, torch.arange(len(self.groups)).repeat_interleave(sizes))

    def bound(self) -> float:
        """Query-key pairs of the rows over those of the forest."""
        work = ModelWork(per_token=0, per_pair=1, windows=((None, 1),), head=0).of_groups(self.groups)
        return work.counted / work.executed


def ragged_groups() -> list[Group]:
    """Eight groups of 1 to 12 rows, prompts of up to 1024 tokens, responses of up to 256."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda low, high, count: torch.randint(low, high + 1, (count,), generator=generator).tolist()  # noqa: E731
    return [(prompt, draw(1, 256, size)) for prompt, size in zip(draw(64, 1024, 8), draw(1, 12, 8), strict=True)]


def case_of(shape: Shape) -> Case:
    return Case(f"P, R, n = {shape.P}, {shape.R}, {shape.n}", [shape.group])


def all_cases() -> list[Case]:
    many = Case("64 groups of P, R, n = 64, 16, 16", [Shape(64, 16, 16).group] * 64)
    return [*map(case_of, SHAPES), many, Case("8 ragged groups", ragged_groups())]


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of ``(B, L, heads, D)`` rows."""
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    out = scaled_dot_product_attention(*heads_first, is_causal=True, scale=SCALE, enable_gqa=True)
    return out.transpose(1, 2)


def row_by_row(lens: Sequence[int], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    rows = zip(*(x.split(lens) for x in (q, k, v)), strict=True)
    return torch.cat([attend(*(x[None] for x in row))[0] for row in rows])


def shared(plan: Plan, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return split_attention(q, k, v, plan.forest, SCALE, CpuKernels())


@dataclass(frozen=True)
class Contestant:
    """A way to compute attention on inputs of its own, and the gradient that comes back to it."""

    name: str
    attention: Callable[[Tensor, Tensor, Tensor], Tensor]
    inputs: tuple[Tensor, Tensor, Tensor]
    grad: Tensor

    def forward(self) -> Tensor:
        with torch.no_grad():
            return self.attention(*self.inputs)

    def forward_backward(self) -> tuple[Tensor, ...]:
        """The output, and dq, dk, dv."""
        out = self.attention(*self.inputs)
        return out.detach(), *torch.autograd.grad(out, self.inputs, self.grad)


def contestants(case: Case) -> tuple[list[Contestant], dict[str, float]]:
    """Stock ways first, split attention last, on the same values; and by how much the results differ at most."""
    plan, lens = case.plan(), [prompt + response for prompt, response in case.rows]
    generator = torch.Generator().manual_seed(1)
    draw = partial(torch.randn, generator=generator)
    packed = [draw(plan.num_tokens, heads, HEAD_DIM) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    rows = [plan.unpack(x, 0) for x in packed]
    row_grad = draw(plan.num_row_tokens, HEADS, HEAD_DIM)
    into_packed = partial(sum_of_copies, plan)

    pad = lambda x: pad_sequence(x.split(lens), batch_first=True)  # noqa: E731
    found = [
        Contestant("row by row", partial(row_by_row, lens), leaves(rows), row_grad),
        Contestant("one padded batch", attend, leaves(map(pad, rows)), pad(row_grad)),
        Contestant("split", partial(shared, plan), leaves(packed), into_packed(row_grad)),
    ]
    (out, *grads), (padded_out, *padded_grads), (split_out, *split_grads) = (c.forward_backward() for c in found)
    valid = pad(torch.ones(plan.num_row_tokens, dtype=torch.bool))
    differences = {"outputs": 0.0}
    for other in (padded_out[valid], plan.unpack(split_out, 0)):
        for row, other_row in zip(out.split(lens), other.split(lens), strict=True):
            differences["outputs"] = max(differences["outputs"], largest(row - other_row))
    for name, expected, padded, got in zip(("dq", "dk", "dv"), grads, padded_grads, split_grads, strict=True):
        expected = into_packed(expected)
        differences[name] = max(largest(expected - g) for g in (into_packed(padded[valid]), got)) / largest(expected)
    return found, differences


def sum_of_copies(plan: Plan, values: Tensor) -> Tensor:
    """``(N, ...)`` values of row tokens added up over the copies of each packed token."""
    return values.new_zeros(plan.num_tokens, *values.shape[1:]).index_add_(0, plan.unpack_index, values)


def leaves(tensors) -> tuple[Tensor, ...]:
    return tuple(x.clone().requires_grad_() for x in tensors)


@dataclass(frozen=True)
class Comparison:
    """One pass, forward alone or with its backward."""

    stock: dict[str, Timing]
    split: Timing

    @property
    def clock(self) -> str:
        return clock_for([*self.stock.values(), self.split])

    @property
    def fastest(self) -> str:
        return min(self.stock, key=lambda name: self.stock[name].by(self.clock))

    @property
    def speed_up(self) -> float:
        return self.stock[self.fastest].by(self.clock) / self.split.by(self.clock)

    def as_dict(self, bound: float) -> dict:
        return {
            "stock_s": {name: asdict(timing) for name, timing in self.stock.items()},
            "split_s": asdict(self.split),
            "compared_with": self.fastest,
            "clock": self.clock,
            "speed_up": self.speed_up,
            "share_of_bound": self.speed_up / bound,
        }


def measure(case: Case, effort: Effort) -> dict:
    """The record of one case."""
    entrants, differences = contestants(case)
    agree(differences, TOLERANCE)
    passes = {}
    for name in ("forward", "forward_backward"):
        *stock, split = time_interleaved([getattr(entrant, name) for entrant in entrants], effort)
        stock = {entrant.name: timing for entrant, timing in zip(entrants, stock, strict=False)}
        passes[name] = Comparison(stock, split).as_dict(case.bound())
    plan = case.plan()
    sizes = {"rows": len(case.rows), "tokens_rows": plan.num_row_tokens, "tokens_packed": plan.num_tokens}
    return {"case": case.name, **sizes, "flop_bound": case.bound(), **passes, "difference": differences}


COLUMNS = (
    "",
    "tokens, rows -> packed",
    "bound",
    "forward ms, stock -> split",
    "speed-up",
    "forward + backward ms",
    "speed-up",
    "of bound",
    "stock runs",
    "max diff out, dq, dk, dv",
    "clock",
)


def table_row(result: dict) -> str:
    def milliseconds(one: dict) -> str:
        stock = one["stock_s"][one["compared_with"]]
        return " -> ".join(f"{1000 * timing[one['clock']]:.1f}" for timing in (stock, one["split_s"]))

    forward, both = result["forward"], result["forward_backward"]
    cells = (
        result["case"],
        f"{result['tokens_rows']} -> {result['tokens_packed']}",
        f"{result['flop_bound']:.2f}",
        milliseconds(forward),
        f"{forward['speed_up']:.2f}",
        milliseconds(both),
        f"{both['speed_up']:.2f}",
        f"{both['share_of_bound']:.0%}",
        both["compared_with"],
        ", ".join(f"{difference:.0e}" for difference in result["difference"].values()),
        both["clock"],
    )
    return markdown_row(cells)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--shapes",
        type=as_argument(Shape.parse),
        nargs="+",
        metavar="P,R,n",
        help=f"these in place of all cases: {P_R_N}",
    )
    parser.add_argument("--rounds", type=count, default=7, help="interleaved runs of each side, at least (default: 7)")
    parser.add_argument("--seconds", type=duration, default=5, help="least time for each case and pass (default: 5)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the JSON here instead of to the terminal")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    torch.set_num_threads(1)
    effort = Effort(options.rounds, options.seconds)
    start = environment(
        command_line(),
        operation=f"causal attention, {HEADS} query and {KEY_HEADS} key heads of {HEAD_DIM}, float32",
        method=f"stock is the faster of row by row and one padded batch; {effort}",
    )
    print("\n".join(f"{key}: {value}" for key, value in start.items()))
    print(f"\n{markdown_header(COLUMNS)}", flush=True)
    results = []
    for case in map(case_of, options.shapes) if options.shapes else all_cases():
        try:
            results.append(measure(case, effort))
        except Disagreement as error:
            print(f"{case.name}: {error}", file=sys.stderr)
            return 1
        print(table_row(results[-1]), flush=True)
    record = {**start, "results": results}
    if options.json:
        write_json(options.json, record)
    else:
        print(f"\n{json.dumps(record, indent=1)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
