"""What placing rows by group saves: simulated steps over 1 to 64 ranks, placed by this package and by verl.

    python scripts/simulate_placement.py                 # 1000 steps of 64 prompts x 8, as in docs/placement.md
    python scripts/simulate_placement.py --steps 20      # a quick look; writes nothing
    python scripts/simulate_placement.py --json docs/results/placement.json --plot docs/images/placement.svg

Lengths are drawn, nothing is computed on a model. A rank computes each of its prompts once, under either placement:
what differs is how often a prompt is met on several ranks. verl's placement is its own code, called as its trainers do.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import math
import multiprocessing
import os
import random
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions

from zorro_verl.batching import packed_tokens, packed_work, place_groups, rows_by_group

RANKS = (1, 2, 4, 8, 16, 32, 64)
VERL_EVERY = 10
SLICE_STEPS = 2  # recorded as well, so that a test can draw them again
PADDING = (127, 1)  # prompt and response of the rows that verl adds (verl.trainer.ppo.padding_utils)


@dataclass(frozen=True)
class Lengths:
    """Log-normal lengths in tokens: median, standard deviation of the logarithm, cap."""

    median: int
    sigma: float
    most: int

    def draw(self, rng: random.Random) -> int:
        return min(self.most, max(1, round(rng.lognormvariate(math.log(self.median), self.sigma))))


@dataclass(frozen=True)
class Workload:
    """Steps of ``prompts`` groups with ``fewest`` to ``rollouts`` rows each, uniform."""

    name: str
    fewest: int
    rollouts: int = 8
    prompts: int = 64
    prompt: Lengths = Lengths(1024, 0.9, 16384)
    response: Lengths = Lengths(512, 0.8, 4096)


WORKLOADS = (Workload("equal groups", fewest=8), Workload("ragged groups", fewest=1))


@dataclass(frozen=True)
class Step:
    """Group, prompt length and response length of each row; rows from ``num_rows`` on are padding."""

    groups: list[int]
    prompt_lens: list[int]
    response_lens: list[int]
    num_rows: int

    @classmethod
    def draw(cls, workload: Workload, seed: int) -> Step:
        rng = random.Random(seed)
        rows = []
        for group in range(workload.prompts):
            prompt_len = workload.prompt.draw(rng)
            size = rng.randint(workload.fewest, workload.rollouts)
            rows += [(group, prompt_len, workload.response.draw(rng)) for _ in range(size)]
        groups, prompt_lens, response_lens = (list(column) for column in zip(*rows, strict=True))
        return cls(groups, prompt_lens, response_lens, len(rows))

    def padded(self, ranks: int) -> Step:
        """With rows added until they divide by the ranks, as verl adds them."""
        more = -self.num_rows % ranks
        prompt_len, response_len = PADDING
        return Step(
            self.groups + [-1] * more,
            self.prompt_lens + [prompt_len] * more,
            self.response_lens + [response_len] * more,
            self.num_rows,
        )

    @property
    def tokens(self) -> int:
        return sum(self.prompt_lens) + sum(self.response_lens)

    def by_group(self, ranks: int) -> list[list[int]]:
        padding = range(self.num_rows, len(self.groups))
        order = place_groups(self.groups, self.prompt_lens, self.response_lens, ranks, 1, padding)
        return [order[i : i + len(order) // ranks] for i in range(0, len(order), len(order) // ranks)]

    def by_row(self, ranks: int) -> list[list[int]]:
        lengths = torch.tensor(self.prompt_lens) + torch.tensor(self.response_lens)
        return get_seqlen_balanced_partitions(calculate_workload(lengths), k_partitions=ranks, equal_size=True)

    def packed(self, rows: Sequence[int]) -> tuple[int, int]:
        """Tokens and work of a rank that holds these rows and computes each of their prompts once."""
        tokens = work = 0
        for members in rows_by_group([self.groups[row] for row in rows]):
            chosen = [rows[i] for i in members]
            shape = self.prompt_lens[chosen[0]], [self.response_lens[row] for row in chosen]
            tokens += packed_tokens(*shape)
            work += packed_work(*shape)
        return tokens, work


@dataclass
class Totals:
    """Sums over the steps of one placement over some ranks."""

    steps: int = 0
    tokens: int = 0  # of rows
    packed: int = 0  # computed
    slowest: int = 0  # packed work of the slowest rank, which the others wait for
    imbalance: float = 0.0  # that over the mean

    def add(self, step: Step, ranks: Sequence[Sequence[int]]) -> None:
        tokens, work = zip(*(step.packed(rows) for rows in ranks), strict=True)
        self.steps += 1
        self.tokens += step.tokens
        self.packed += sum(tokens)
        self.slowest += max(work)
        self.imbalance += max(work) * len(work) / sum(work)

    @property
    def token_ratio(self) -> float:
        return round(self.tokens / self.packed, 4)

    @property
    def slowest_over_mean(self) -> float:
        return round(self.imbalance / self.steps, 4)


def compare(workload: Workload, num_ranks: int, num_steps: int) -> tuple[dict, list[float]]:
    """What both placements give over these ranks, and the seconds that each placement by group took.

    verl's is slow, and is made in every ``VERL_EVERY``-th step. What is compared with it is of these steps as well.
    """
    ours, bound, verls, same_ours, same_bound, seconds = *(Totals() for _ in range(5)), []
    for seed in range(num_steps):
        step = Step.draw(workload, seed).padded(num_ranks)
        start = time.perf_counter()
        ranks = step.by_group(num_ranks)
        seconds.append(time.perf_counter() - start)
        everything = [range(len(step.groups))]
        ours.add(step, ranks)
        bound.add(step, everything)
        if seed % VERL_EVERY == 0:
            verls.add(step, step.by_row(num_ranks))
            same_ours.add(step, ranks)
            same_bound.add(step, everything)
    result = {
        "ranks": num_ranks,
        "token_ratio_of_all_steps": {"placed_by_group": ours.token_ratio, "no_group_cut": bound.token_ratio},
        # From here on: of the steps that verl placed as well.
        "token_ratio": {
            "placed_by_group": same_ours.token_ratio,
            "verl": verls.token_ratio,
            "no_group_cut": same_bound.token_ratio,
        },
        "slowest_over_mean": {"placed_by_group": same_ours.slowest_over_mean, "verl": verls.slowest_over_mean},
        "work_of_the_slowest_verl_over_by_group": round(verls.slowest / same_ours.slowest, 4),
    }
    return result, seconds


def run(num_steps: int, processes: int = 1) -> tuple[dict[str, list[dict]], float]:
    """Results of each workload, and the median milliseconds of a placement over the most ranks."""
    tasks = [(workload, num_ranks, num_steps) for workload in WORKLOADS for num_ranks in reversed(RANKS)]
    if processes > 1:
        with multiprocessing.get_context("fork").Pool(processes) as pool:
            done = pool.starmap(compare, tasks, chunksize=1)
    else:
        done = list(itertools.starmap(compare, tasks))
    results: dict[str, list[dict]] = {workload.name: [] for workload in WORKLOADS}
    for (workload, _, _), (result, _) in zip(tasks, done, strict=True):
        results[workload.name].insert(0, result)
    return results, statistics.median(done[0][1]) * 1000


def table(results: dict[str, list[dict]]) -> str:
    lines = []
    for name, rows in results.items():
        lines += [
            f"{name}, the steps that verl placed too",
            "ranks   by group   verl    bound   slowest/mean: by group   verl   slowest: verl/by group",
        ]
        for row in rows:
            ratio, slowest = row["token_ratio"], row["slowest_over_mean"]
            lines.append(
                f"{row['ranks']:5d}   {ratio['placed_by_group']:8.3f}   {ratio['verl']:5.3f}   "
                f"{ratio['no_group_cut']:5.3f}   {slowest['placed_by_group']:22.3f}   {slowest['verl']:5.3f}"
                f"{row['work_of_the_slowest_verl_over_by_group']:25.3f}"
            )
    return "\n".join(lines)


def plot(results: dict[str, list[dict]], path: Path) -> None:
    """Token ratio against ranks, a panel for each workload."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "placement"  # the same file from the same figures
    figure, panels = plt.subplots(1, len(results), figsize=(9, 3.4), sharey=True, layout="constrained")
    for panel, (name, rows) in zip(panels, results.items(), strict=True):
        ranks = [row["ranks"] for row in rows]
        for key, label, style in (
            ("no_group_cut", "no group cut (bound)", {"color": "0.6", "linewidth": 5, "alpha": 0.6}),
            ("placed_by_group", "placed by group", {"color": "tab:blue", "marker": "o"}),
            ("verl", "verl's placement", {"color": "tab:orange", "marker": "s"}),
        ):
            panel.plot(ranks, [row["token_ratio"][key] for row in rows], label=label, **style)
        panel.set(title=name, xlabel="data-parallel ranks", xscale="log", ylim=(1, None))
        panel.set_xticks(ranks, map(str, ranks))
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("tokens of rows / tokens computed")
    panels[0].legend(loc="lower left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="needs matplotlib")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    options = parser.parse_args(arguments)
    results, milliseconds = run(options.steps, options.processes)
    print(table(results))
    print(f"a placement over {RANKS[-1]} ranks takes {milliseconds:.1f} ms (median)")
    if options.json:
        record = {
            "command": shlex.join(["python", "scripts/simulate_placement.py", *(arguments or sys.argv[1:])]),
            "versions": {name: importlib.metadata.version(name) for name in ("verl", "torch")},
            "workloads": [asdict(workload) for workload in WORKLOADS],
            "steps": options.steps,
            "steps_placed_by_verl_as_well": -(-options.steps // VERL_EVERY),
            "results": results,
            "milliseconds_per_placement": round(milliseconds, 1),
            "slice": {"steps": SLICE_STEPS, "results": run(SLICE_STEPS)[0]},
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    if options.plot:
        plot(results, options.plot)


if __name__ == "__main__":
    main()
