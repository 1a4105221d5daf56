"""What the demo says at its end: was something learned, what, how fast, and do the two strategies agree."""

import math
import os
import platform
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import accumulate
from pathlib import Path
from statistics import mean, median, variance

from run_log import Generation, Record

STEPS_TO_JUDGE = 16
PHASES = ("old_log_prob", "ref", "update_actor")


@dataclass(frozen=True)
class Run:
    """The training steps of one strategy, and what was sampled in each."""

    strategy: str
    steps: list[Record]
    samples: list[tuple[Counter, float]]  # as `samples_of_step` gives them

    @property
    def rewards(self) -> list[float]:
        return [step.reward for step in self.steps]

    @property
    def clock(self) -> list[float]:
        """Seconds of training at the end of each step; start-up, validation and checkpoint not counted."""
        return list(accumulate(step.seconds for step in self.steps))

    def median_seconds(self, phase: str) -> float:
        return median(step[f"timing_s/{phase}"] for step in self.steps)


@dataclass(frozen=True)
class Learning:
    """Mean reward of the first and the last quarter of the steps."""

    steps: int
    first: float
    last: float
    standard_error: float  # of last - first

    @property
    def can_be_judged(self) -> bool:
        return self.steps >= STEPS_TO_JUDGE

    @property
    def happened(self) -> bool:
        return self.last - self.first > 2 * self.standard_error


def learning(rewards: Sequence[float]) -> Learning:
    quarter = max(1, len(rewards) // 4)
    first, last = rewards[:quarter], rewards[-quarter:]
    error = math.sqrt((variance(first) + variance(last)) / quarter) if quarter > 1 else math.nan
    return Learning(len(rewards), mean(first), mean(last), error)


@dataclass(frozen=True)
class Difference:
    """The largest ones between two runs over their first steps."""

    steps: int
    loss: float
    grad_norm: float
    grad_norm_relative: float


@dataclass(frozen=True)
class Comparison:
    diverged_at: int | None  # the first step in which the two sampled different tokens
    common: Difference  # over all steps that both have
    while_same: Difference | None  # over the steps before that; none if they differ from the first


def compare(one: Run, other: Run) -> Comparison:
    common = min(len(one.steps), len(other.steps))
    pairs = zip(one.samples[:common], other.samples[:common], strict=True)
    same = next((index for index, (a, b) in enumerate(pairs) if a != b), common)
    return Comparison(
        diverged_at=one.steps[same].step if same < common else None,
        common=difference(one.steps[:common], other.steps[:common]),
        while_same=difference(one.steps[:same], other.steps[:same]) if same else None,
    )


def difference(one: Sequence[Record], other: Sequence[Record]) -> Difference:
    pairs = list(zip(one, other, strict=True))
    grad_norms = [abs(a["actor/grad_norm"] - b["actor/grad_norm"]) for a, b in pairs]
    return Difference(
        steps=len(pairs),
        loss=max(abs(a["actor/loss"] - b["actor/loss"]) for a, b in pairs),
        grad_norm=max(grad_norms),
        grad_norm_relative=max(d / a["actor/grad_norm"] for d, (a, _) in zip(grad_norms, pairs, strict=True)),
    )


@dataclass(frozen=True)
class Style:
    """Shares of the sampled answers. The verifier pays in full for an answer that is both right and bare."""

    bare: float
    right_in_any_style: float
    reward: float


def style(generations: Sequence[Generation]) -> Style:
    return Style(
        bare=mean(is_bare(g.response) for g in generations),
        right_in_any_style=mean(first_number(g.response) == g.answer for g in generations),
        reward=mean(g.score for g in generations),
    )


def is_bare(response: str) -> bool:
    return re.fullmatch(r"\d+", response.strip()) is not None


def first_number(response: str) -> str | None:
    found = re.search(r"\d+", response)
    return found and found[0]


def render_learning(result: Learning) -> str:
    change = f"reward {result.first:.3f} -> {result.last:.3f}, first to last quarter of {result.steps} steps"
    if not result.can_be_judged:
        return f"Too few steps to judge learning (it takes {STEPS_TO_JUDGE}): {change}"
    verdict = "Learned" if result.happened else "NOT learned"
    return (
        f"{verdict}: {change}; +{result.last - result.first:.3f}, two standard errors {2 * result.standard_error:.3f}"
    )


def render_styles(rows: Sequence[tuple[str, Style]]) -> str:
    header = ("validation, sampled", "bare number", "right in any style", "reward")
    cells = [(name, f"{s.bare:.0%}", f"{s.right_in_any_style:.0%}", f"{s.reward:.2f}") for name, s in rows]
    return render_columns([header, *cells])


def render_table(zorro: Run, stock: Run | None) -> str:
    """Rows are quantities; the last column says by how much zorro is faster."""
    runs = [run for run in (stock, zorro) if run]
    rows = [("", *(run.strategy for run in runs), "")]
    rows.append(("training steps", *(str(len(run.steps)) for run in runs), ""))
    rows.append(("training seconds", *(f"{run.clock[-1]:.0f}" for run in runs), ""))
    quarters = [learning(run.rewards) for run in runs]
    rows.append(("reward, first -> last quarter", *(f"{q.first:.2f} -> {q.last:.2f}" for q in quarters), ""))
    rows.append(("tokens a step, before -> packed", *(render_tokens(run) for run in runs), ""))
    rows.append(("token ratio", *(f"{token_ratio(run):.2f}" for run in runs), ""))
    for phase in (*PHASES, "gen", "step"):
        seconds = [run.median_seconds(phase) for run in runs]
        rows.append(timing_row(f"seconds in {phase} (median)", seconds))
        if phase == PHASES[-1]:
            rows.append(
                timing_row("  the three together", [sum(run.median_seconds(p) for p in PHASES) for run in runs])
            )
    return render_columns(rows)


def timing_row(name: str, seconds: Sequence[float]) -> tuple[str, ...]:
    faster = f"{seconds[0] / seconds[1]:.2f}x" if len(seconds) == 2 else ""
    return (name, *(f"{s:.2f}" for s in seconds), faster)


def token_ratio(run: Run) -> float:
    """Of the whole run. The stock engine sends every row's prompt through the model."""
    before, packed = (sum(step.values.get(f"zorro/tokens_{k}", 1.0) for step in run.steps) for k in ("total", "packed"))
    return before / packed


def render_tokens(run: Run) -> str:
    if "zorro/tokens_packed" not in run.steps[0].values:
        return f"{mean(step['perf/total_num_tokens'] for step in run.steps):,.0f}"
    before, packed = (mean(step[f"zorro/tokens_{kind}"] for step in run.steps) for kind in ("total", "packed"))
    return f"{before:,.0f} -> {packed:,.0f}"


def render_comparison(result: Comparison) -> str:
    lines = []
    if result.while_same is None:
        lines.append("Different tokens were sampled in the first step already: loss and grad norm can't be compared.")
    else:
        lines.append(f"Largest difference while the same tokens were sampled: {render_difference(result.while_same)}")
    if result.diverged_at is None:
        lines.append(f"Sampled tokens: the same in all {result.common.steps} common steps.")
    else:
        lines.append(
            f"Sampled tokens: diverged at step {result.diverged_at}. Rounding decides a draw sooner or later; "
            f"from then on the two train on different data. Over all common steps: {render_difference(result.common)}"
        )
    return "\n".join(lines)


def render_difference(d: Difference) -> str:
    return (
        f"loss {d.loss:.1e}, grad norm {d.grad_norm:.1e} (relative {d.grad_norm_relative:.1e}) "
        f"over {d.steps} step{'s' if d.steps > 1 else ''}"
    )


def render_columns(rows: Sequence[tuple[str, ...]]) -> str:
    """The first column to the left, the others to the right."""
    first, *others = zip(*rows, strict=True)
    aligned = [[cell.ljust(max(map(len, first))) for cell in first]]
    aligned += [[cell.rjust(max(map(len, column))) for cell in column] for column in others]
    return "\n".join("  ".join(row).rstrip() for row in zip(*aligned, strict=True))


def render_plot(runs: Sequence[Run], width: int = 72, height: int = 14) -> str:
    """Reward against seconds of training, one letter a step, the strategy's first."""
    end = max(run.clock[-1] for run in runs)
    low, high = (f(reward for run in runs for reward in run.rewards) for f in (min, max))
    canvas = [[" "] * width for _ in range(height)]
    for run in runs:
        for seconds, reward in zip(run.clock, run.rewards, strict=True):
            row = round((high - reward) / ((high - low) or 1.0) * (height - 1))
            canvas[row][round(seconds / end * (width - 1))] = run.strategy[0]
    lines = []
    for index, row in enumerate(canvas):
        label = {0: f"{high:.2f}", height - 1: f"{low:.2f}"}.get(index, "")
        lines.append(f"{label:>6} |{''.join(row)}".rstrip())
    legend = "  ".join(f"{run.strategy[0]} = {run.strategy}" for run in runs)
    axis = f"{'0 s':<{width // 2}}{f'{end:.0f} s':>{width - width // 2}}"
    return "\n".join([f"reward   ({legend})", *lines, f"       +{'-' * width}", f"        {axis}"])


def save_plot(runs: Sequence[Run], path: Path) -> None:
    import matplotlib  # here: it takes a second, and nothing before the end needs it

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for run in runs:
        axes.plot(run.clock, run.rewards, marker="o", markersize=3, label=f"strategy={run.strategy}")
    axes.set(
        xlabel="seconds of training", ylabel="mean reward of a step", title="GRPO on this machine's CPU, same seeds"
    )
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def machine() -> str:
    """What the seconds are measured on, and what else it is busy with."""
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else None
    packages = (f"{name} {version(name)}" for name in ("zorro-verl", "verl", "torch", "transformers"))
    name = found[1] if found else platform.machine()
    load = f"load average before {os.getloadavg()[0]:.1f}"
    return f"{os.cpu_count()} x {name}, {load}, Python {platform.python_version()}, {', '.join(packages)}"
