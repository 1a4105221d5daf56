"""What rollouts share, in numbers: groups, lengths, the token ratio, and prefixes that prompts have in common.

Rows share a prompt where all of its tokens are the same, as `zorro_verl.grouping` decides when a model runs; here it is
decided from the rows of a dump, one at a time, of which lengths and each distinct prompt are kept until its step ends.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, NamedTuple

from zorro_verl.batching import packed_tokens
from zorro_verl.prediction import FILLER, Pass, Prediction, RowLengths, Way, predict
from zorro_verl.rollouts import Measure, Padding, Progress, Row, Step

ROLLOUTS = (1, 2, 4, 8, 16, 32)  # of a prompt, for which the token ratio is told
_BEFORE, _AFTER = 12, 12  # tokens or characters that are shown around a difference


class Difference(NamedTuple):
    """Two rows of one sample whose prompts differ."""

    sample: str
    one: str  # file:line
    other: str
    position: int  # of the first token or character that differs, from 1
    one_has: array[int]  # what stands there, with a little before it
    other_has: array[int]


@dataclass(frozen=True)
class StepRows:
    """What is kept of one step.

    Attributes:
        rows: lengths and groups, in the order of the dump.
        padding: rows that veRL added to it, which are not among them.
        prompt_total: tokens of the distinct prompts.
        tree_total: of these, what is left when each prefix that several begin with counts once.
        samples_differing: how many samples have rows whose prompts differ.
        sample_overlap: tokens that such prompts share at their start, beyond the first of each sample.
        difference: the first such pair of rows; None without one.
        measures: what the rows were read from.
    """

    step: Step
    rows: RowLengths
    padding: int
    prompt_total: int
    tree_total: int
    samples_differing: int
    sample_overlap: int
    difference: Difference | None
    measures: frozenset[Measure]


class Quantiles(NamedTuple):
    """Of lengths: the smallest that at least this share of them do not exceed."""

    p10: int
    median: int
    p90: int
    p99: int
    most: int

    @classmethod
    def of(cls, lengths: Sequence[int]) -> Quantiles:
        ordered = sorted(lengths)
        return cls(*(ordered[max(0, ceil(len(ordered) * percent / 100) - 1)] for percent in (10, 50, 90, 99, 100)))


class SizeShare(NamedTuple):
    """All groups of one size."""

    size: int  # rows of a group
    groups: int
    tokens: int  # of their rows
    packed: int  # with each prompt once

    @property
    def token_ratio(self) -> float:
        return self.tokens / self.packed


@dataclass(frozen=True)
class Statistics:
    """What all steps of a dump share. Lengths are in ``unit``: tokens, or characters of text without a tokenizer.

    Attributes:
        prompt_lengths, response_lengths: of distinct prompts, and of all rows.
        prompt_quantiles, response_quantiles: of these.
        padding: rows that veRL added to steps, which count nowhere else.
        tokens, packed: of all rows, and with each prompt once in its step.
        largest_group: packed tokens of the largest group: the token budget of a micro-batch that holds it.
        sizes: groups by their number of rows, small ones first.
        ratio_of_rollouts: for each of `ROLLOUTS`, the token ratio with as many responses to each prompt, of the
            lengths that its responses have on average.
        overlap: tokens that prompts of one step share at their start beyond whole prompts.
        sample_overlap: how many of them lie between rows of one sample, whose prompts were to be the same.
        samples_differing, difference: as in `StepRows`, over all steps.
    """

    unit: str
    measures: frozenset[Measure]
    num_rows: int
    num_prompts: int
    padding: int
    steps: tuple[StepRows, ...]
    prompt_lengths: tuple[int, ...]
    response_lengths: tuple[int, ...]
    prompt_quantiles: Quantiles
    response_quantiles: Quantiles
    tokens: int
    packed: int
    largest_group: int
    sizes: tuple[SizeShare, ...]
    ratio_of_rollouts: dict[int, float]
    overlap: int
    sample_overlap: int
    samples_differing: int
    difference: Difference | None

    @property
    def token_ratio(self) -> float:
        return self.tokens / self.packed

    @property
    def overlap_share(self) -> float:
        """Of the packed tokens, how many a full prefix tree over each step's prompts would spare."""
        return self.overlap / self.packed


class Forecast(NamedTuple):
    """One way of computing all steps, predicted, beside `stock`; see `zorro_verl.prediction`."""

    name: str
    log_prob_token_ratio: float
    log_prob_speedup: float | None  # over stock; None where verl's placement is not known
    log_prob_memory: int | None  # bytes of the largest micro-batch on a GPU, beside weights; None where not known
    update_token_ratio: float
    update_speedup: float | None
    update_memory: int | None
    groups_cut: int  # in update_actor, over all steps


class Setup(NamedTuple):
    """How rows are trained on, as `zorro_verl.prediction.predict` assumes it."""

    ranks: int = 1  # data-parallel ones
    budget: int | None = None  # ppo_max_token_len_per_gpu, log_prob's as well; None for what holds the largest group
    mini_batch: int | None = None  # ppo_mini_batch_size, in prompts; None for all of a step at once
    logits_optimization: str = "none"
    checkpointing: bool = True
    dtype: str = "bfloat16"
    sequence_parallel: int = 1

    def mini_batches(self, rows: RowLengths) -> int:
        """Optimizer steps on a step's rows."""
        return 1 if self.mini_batch is None else ceil(len(rows.by_group()) / self.mini_batch)

    def __str__(self) -> str:
        return ", ".join(
            (
                self.dtype,
                f"{'' if self.checkpointing else 'no '}gradient checkpointing",
                f"logits_optimization={self.logits_optimization}",
                "one mini-batch a step" if self.mini_batch is None else f"ppo_mini_batch_size={self.mini_batch}",
                "no sequence parallelism"
                if self.sequence_parallel == 1
                else f"ulysses_sequence_parallel_size={self.sequence_parallel}",
            )
        )


class Outlook(NamedTuple):
    """Predictions for all steps of a dump together."""

    ways: tuple[Forecast, ...]  # stock and row_placed where verl is installed, then group_placed
    setup: Setup  # its budget is never None
    notes: tuple[str, ...]


def collect_steps(rows: Iterable[Row | Padding]) -> Iterator[StepRows]:
    """What is kept of each step; the rows of a file may come in any order, and files one after the other."""
    open_steps: dict[Step, _Collector] = {}
    file = None
    for row in rows:
        if row.step.file != file:
            yield from _close(open_steps.values())
            open_steps.clear()
            file = row.step.file
        if row.step not in open_steps:
            open_steps[row.step] = _Collector(row.step)
        open_steps[row.step].add(row)
    yield from _close(open_steps.values())


def summarize(steps: Iterable[StepRows]) -> Statistics:
    """Statistics over all steps.

    Raises:
        ValueError: no rows.
    """
    steps = tuple(steps)
    if not steps:
        raise ValueError("FILE: expected at least one row, got none")
    groups = [
        (step.rows.prompts[members[0]], [step.rows.responses[row] for row in members])
        for step in steps
        for members in step.rows.by_group()
    ]
    prompt_lengths = tuple(prompt for prompt, _ in groups)
    response_lengths = tuple(length for _, responses in groups for length in responses)
    measures = frozenset().union(*(step.measures for step in steps))
    return Statistics(
        unit=next(iter(measures)).unit,
        measures=measures,
        num_rows=len(response_lengths),
        num_prompts=len(groups),
        padding=sum(step.padding for step in steps),
        steps=steps,
        prompt_lengths=prompt_lengths,
        response_lengths=response_lengths,
        prompt_quantiles=Quantiles.of(prompt_lengths),
        response_quantiles=Quantiles.of(response_lengths),
        tokens=sum(step.rows.tokens for step in steps),
        packed=sum(step.rows.packed for step in steps),
        largest_group=max(packed_tokens(*group) for group in groups),
        sizes=_by_size(groups),
        ratio_of_rollouts={n: _ratio(groups, n) for n in ROLLOUTS},
        overlap=sum(step.prompt_total - step.tree_total for step in steps),
        sample_overlap=sum(step.sample_overlap for step in steps),
        samples_differing=sum(step.samples_differing for step in steps),
        difference=next((step.difference for step in steps if step.difference), None),
    )


def foresee(config: Any, statistics: Statistics, setup: Setup, progress: Progress | None = None) -> Outlook:
    """What the three ways of `zorro_verl.prediction.predict` take for these steps.

    Args:
        config: of a Hugging Face model.
        statistics: of rows in tokens.
        setup: how they are trained on.
        progress: shows how many steps have been placed.

    Raises:
        ValueError: lengths in characters, or what `predict` refuses.
    """
    if statistics.unit != "tokens":
        raise ValueError("--model: expected lengths in tokens, got characters; add --tokenizer MODEL, the model's own")
    budget = max(statistics.largest_group, sum(FILLER)) if setup.budget is None else setup.budget
    steps: Iterable[StepRows] = statistics.steps
    if progress is not None:
        steps = progress(steps, "Placing rows", len(statistics.steps))
    predictions = [
        predict(
            config,
            step.rows,
            ranks=setup.ranks,
            budget=budget,
            mini_batches=setup.mini_batches(step.rows),
            checkpointing=setup.checkpointing,
            logits_optimization=setup.logits_optimization,
            sequence_parallel=setup.sequence_parallel,
            dtype=setup.dtype,
        )
        for step in steps
    ]
    ways = ("stock", "row_placed", "group_placed")  # without veRL those that it places are known of some steps at most
    names = [name for name in ways if all(getattr(step, name) is not None for step in predictions)]
    said = [note for step in predictions for note in (step.no_verl, step.no_memory) if note is not None]
    notes = tuple(dict.fromkeys(said))
    return Outlook(tuple(_forecast(predictions, name) for name in names), setup._replace(budget=budget), notes)


def common_length(one: bytes, other: bytes) -> int:
    """Tokens that two prompts have in common at their start; both are int32 one after the other."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low // _WIDTH


def tree_total(prompts: Iterable[bytes]) -> int:
    """Tokens of the prefix tree over prompts: each of their prefixes once, however many begin with it."""
    total, last = 0, b""
    for prompt in sorted(prompts):  # what shares the longest prefix with a prompt then stands beside it
        total += len(prompt) // _WIDTH - common_length(last, prompt)
        last = prompt
    return total


_WIDTH = array("i").itemsize


class _Collector:
    """A step while its rows come in."""

    def __init__(self, step: Step):
        self._step = step
        self._group_of: dict[bytes, int] = {}
        self._rows: tuple[list[int], list[int], list[int]] = ([], [], [])
        self._prompts_of: dict[str, dict[bytes, str]] = {}  # of each sample: its prompts, and where they stand
        self._measures: set[Measure] = set()
        self._padding = 0

    @property
    def sampled(self) -> bool:
        """Whether there is any row that veRL didn't add."""
        return bool(self._measures)

    def add(self, row: Row | Padding) -> None:
        if isinstance(row, Padding):
            self._padding += 1
            return
        prompt = row.prompt.tobytes()
        group = self._group_of.setdefault(prompt, len(self._group_of))
        for column, value in zip(self._rows, (group, len(row.prompt), len(row.response)), strict=True):
            column.append(value)
        if row.sample is not None:
            self._prompts_of.setdefault(row.sample, {}).setdefault(prompt, row.where)
        self._measures.add(row.measure)

    def close(self) -> StepRows:
        differing = {sample: prompts for sample, prompts in self._prompts_of.items() if len(prompts) > 1}
        return StepRows(
            self._step,
            RowLengths(*self._rows),
            self._padding,
            _total(self._group_of),
            tree_total(self._group_of),
            len(differing),
            sum(_total(prompts) - tree_total(prompts) for prompts in differing.values()),
            next((_difference(sample, prompts) for sample, prompts in differing.items()), None),
            frozenset(self._measures),
        )


def _close(steps: Iterable[_Collector]) -> Iterator[StepRows]:
    return (step.close() for step in steps if step.sampled)


def _total(prompts: Iterable[bytes]) -> int:
    return sum(len(prompt) // _WIDTH for prompt in prompts)


def _difference(sample: str, prompts: dict[bytes, str]) -> Difference:
    (one, where_one), (other, where_other), *_ = prompts.items()
    alike = common_length(one, other)
    around = slice(max(0, alike - _BEFORE) * _WIDTH, (alike + _AFTER) * _WIDTH)
    return Difference(sample, where_one, where_other, alike + 1, array("i", one[around]), array("i", other[around]))


def _by_size(groups: Sequence[tuple[int, list[int]]]) -> tuple[SizeShare, ...]:
    counts: Counter[int] = Counter()
    tokens: Counter[int] = Counter()
    packed: Counter[int] = Counter()
    for prompt, responses in groups:
        size = len(responses)
        counts[size] += 1
        tokens[size] += size * prompt + sum(responses)
        packed[size] += packed_tokens(prompt, responses)
    return tuple(SizeShare(size, counts[size], tokens[size], packed[size]) for size in sorted(counts))


def _ratio(groups: Sequence[tuple[int, list[int]]], rollouts: int) -> float:
    prompts = sum(prompt for prompt, _ in groups)
    responses = rollouts * sum(sum(lengths) / len(lengths) for _, lengths in groups)
    return (rollouts * prompts + responses) / (prompts + responses)


def _forecast(predictions: Sequence[Prediction], name: str) -> Forecast:
    """Sums over steps, and the largest memory."""
    ways: list[Way] = [getattr(prediction, name) for prediction in predictions]
    stock = [prediction.stock for prediction in predictions if prediction.stock is not None]
    comparable = len(stock) == len(ways)
    tokens = sum(prediction.rows.tokens for prediction in predictions)

    def total(which: Callable[[Way], Pass]) -> tuple[float, float | None, int | None]:
        """Token ratio, speed-up and memory of one of the two calls."""
        passes = [which(way) for way in ways]
        work = sum(one.slowest for one in passes)
        return (
            tokens / sum(one.tokens for one in passes),
            sum(which(way).slowest for way in stock) / work if comparable else None,
            max((one.memory for one in passes if one.memory is not None), default=None),
        )

    log_prob, update = total(lambda way: way.log_prob), total(lambda way: way.update)
    return Forecast(name, *log_prob, *update, sum(way.update.groups_cut for way in ways))
