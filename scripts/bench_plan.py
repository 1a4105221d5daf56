"""What planning a micro-batch costs on one CPU thread: groups, segment tables and token-level indices.

    python scripts/bench_plan.py                         # every case, then JSON
    python scripts/bench_plan.py --cases even --check    # exit 1 when a target is missed

The yardstick is one pass over the row tokens: ``tokens[index]`` with the int64 index of every row token in order, which
reads a token and its place and writes a token. A plain copy of the tokens stands beside it. All run by turns in one
process; medians count. `grouping` hashes every prompt and compares it with the first of its group, positions included;
`plan` is what every call builds, and `everything` has the two index tensors too that only some calls ask for; `tables`
is the part that grows with segments and not with tokens, and `indices` all the rest of `everything`. Groups are
compared with those of plain Python first, and row tokens with what the plan makes of them; no figure is printed where
they differ.

Targets, for 64 groups of 16 rows: tables within 2 ms; grouping and indices, together, within 3 passes. The small case
stands for what a plan costs at least, whatever it is of.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from measuring import Disagreement, agree, command_line, count, duration, write_json
from torch import Tensor

from zorro_verl.forest import Forest
from zorro_verl.grouping import Rows, exclusive_cumsum, find_prompt_groups
from zorro_verl.measuring import Effort, Timing, clock_for, environment, time_interleaved
from zorro_verl.packing import Plan, build_plan

TARGET_GROUPS = 64
MOST_PASSES = 3.0
MOST_SECONDS_OF_TABLES = 2e-3
VOCABULARY = 150_000
STEPS = ("one_pass", "copy", "grouping", "plan", "everything", "tables")


@dataclass(frozen=True)
class Case:
    """Groups of rows whose lengths are drawn within ``spread`` of P and R (0: all alike), in a random order."""

    groups: int
    rows: int
    P: int
    R: int
    spread: float = 0.0
    axes: int = 0

    def build(self) -> Rows:
        generator = torch.Generator().manual_seed(0)
        prompt_lens = self._lengths(self.P, self.groups, generator).repeat_interleave(self.rows)
        response_lens = self._lengths(self.R, self.groups * self.rows, generator)
        prompts = [torch.randint(VOCABULARY, (n,), generator=generator) for n in prompt_lens[:: self.rows].tolist()]
        order = torch.randperm(self.groups * self.rows, generator=generator)
        pieces: list[Tensor] = []
        for row in order.tolist():
            response = torch.randint(VOCABULARY, (int(response_lens[row]),), generator=generator)
            pieces += [prompts[row // self.rows], response]
        lens = (prompt_lens + response_lens)[order]
        position_ids = torch.cat([torch.arange(n) for n in lens.tolist()])
        if self.axes:
            position_ids = position_ids.repeat(self.axes, 1)
        return Rows(torch.cat(pieces), position_ids, exclusive_cumsum(lens), prompt_lens[order])

    def _lengths(self, mean: int, count: int, generator: torch.Generator) -> Tensor:
        least, most = int(mean * (1 - self.spread)), int(mean * (1 + self.spread))
        return torch.randint(least, most + 1, (count,), generator=generator)


CASES = {
    "even": Case(64, 16, 4096, 512),
    "ragged": Case(64, 16, 4096, 512, spread=0.5),
    "axes": Case(64, 16, 4096, 512, axes=3),
    "small": Case(4, 8, 256, 64, spread=0.5),
}


def check(rows: Rows) -> None:
    """The groups are those of plain Python, and the plan gives back the rows."""
    numbers: dict[bytes, int] = {}
    expected = []
    for start, length in zip(rows.cu_seqlens[:-1].tolist(), rows.prompt_lens.tolist(), strict=True):
        part = slice(start, start + length)
        prompt = torch.stack([rows.tokens[part], *torch.atleast_2d(rows.position_ids)[:, part]])
        expected.append(numbers.setdefault(prompt.numpy().tobytes(), len(numbers)))
    groups = find_prompt_groups(rows)
    plan = build_plan(rows, groups)
    differences = {
        "groups": (groups - torch.tensor(expected)).abs().max(),
        "tokens": (plan.unpack(plan.pack(rows.tokens)) - rows.tokens).abs().max(),
        "positions": (plan.unpack(plan.pack(rows.position_ids)) - rows.position_ids).abs().max(),
    }
    agree({name: float(value) for name, value in differences.items()}, 0.0)


@dataclass(frozen=True)
class Result:
    name: str
    case: Case
    row_tokens: int
    packed_tokens: int
    one_pass: Timing
    copy: Timing
    grouping: Timing
    plan: Timing
    everything: Timing
    tables: Timing

    @property
    def clock(self) -> str:
        return clock_for([getattr(self, step) for step in STEPS])

    @property
    def seconds(self) -> dict[str, float]:
        times = {step: getattr(self, step).by(self.clock) for step in STEPS}
        return times | {"indices": times["everything"] - times["tables"]}

    @property
    def passes(self) -> float:
        """Grouping and indices in passes over the row tokens."""
        return (self.seconds["grouping"] + self.seconds["indices"]) / self.seconds["one_pass"]

    @property
    def on_target(self) -> bool | None:
        """None for a case without a target."""
        if self.case.groups < TARGET_GROUPS:
            return None
        return self.passes <= MOST_PASSES and self.seconds["tables"] <= MOST_SECONDS_OF_TABLES

    def as_dict(self) -> dict:
        return {
            "case": self.name,
            **asdict(self.case),
            "row_tokens": self.row_tokens,
            "packed_tokens": self.packed_tokens,
            "seconds": self.seconds,
            "clock": self.clock,
            "passes": {name: seconds / self.seconds["one_pass"] for name, seconds in self.seconds.items()},
            "grouping_and_indices_passes": self.passes,
            "on_target": self.on_target,
        }

    def line(self) -> str:
        times = (f"{name} {1e3 * seconds:.2f}" for name, seconds in self.seconds.items())
        verdict = {True: ", target met", False: ", target MISSED", None: ""}[self.on_target]
        return f"{self.name}: {', '.join(times)} ms ({self.clock}); {self.passes:.2f} passes{verdict}"


def whole_plan(rows: Rows, groups: Tensor) -> tuple[Tensor, Tensor]:
    plan = Plan(rows, groups)
    return plan.unpack_index, plan.label_row


def measure(name: str, effort: Effort) -> Result:
    case = CASES[name]
    rows = case.build()
    check(rows)  # the warm-up, too
    tokens, index = rows.tokens, torch.arange(rows.tokens.numel())
    groups = find_prompt_groups(rows)
    plan = Plan(rows, groups)
    lengths, parents = plan.forest.lengths, plan.forest.parents
    steps = (
        lambda: tokens[index],
        lambda: tokens.clone(),
        lambda: find_prompt_groups(rows),
        lambda: Plan(rows, groups),
        lambda: whole_plan(rows, groups),
        lambda: Forest(lengths, parents),
    )
    return Result(name, case, plan.num_row_tokens, plan.num_tokens, *time_interleaved(steps, effort))


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--rounds", type=count, default=15, help="least interleaved runs of each (default: 15)")
    parser.add_argument("--seconds", type=duration, default=5, help="least time for each case (default: 5)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the JSON here instead of to the terminal")
    parser.add_argument("--check", action="store_true", help="exit 1 when a target is missed")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    torch.set_num_threads(1)
    effort = Effort(options.rounds, options.seconds)
    surroundings = environment(command_line(), method=str(effort))
    print("\n".join(f"{key}: {value}" for key, value in surroundings.items()), flush=True)
    results = []
    for name in options.cases:
        try:
            results.append(measure(name, effort))
        except Disagreement as error:
            print(f"{name}: {error}", file=sys.stderr)
            return 1
        print(results[-1].line(), flush=True)
    record = {**surroundings, "results": [result.as_dict() for result in results]}
    if options.json:
        write_json(options.json, record)
    else:
        print(json.dumps(record, indent=1))
    return int(options.check and any(result.on_target is False for result in results))


if __name__ == "__main__":
    raise SystemExit(main())
