"""What sharing prompts gives on the rows of one training step: tokens, work, the slowest rank and memory.

Predicted from lengths and a model's config, nothing is run. Three ways of computing the same rows are compared:

    stock          strategy=fsdp2: verl's placement, every row on its own, the head on every token
    row_placed     prompts shared where verl's placement happens to leave their rows together
    group_placed   strategy=zorro: groups kept whole over ranks, mini-batches and micro-batches

Rows are placed by the code that does it in training: `zorro_verl.batching`, and verl's own for its placement. All
micro-batches are cut by `zorro_verl.batching`. verl's own engine fills those of `stock` in another order, from which
their number and memory may differ a little, but not the work: there every row is on its own. A step waits for its
slowest rank, so that a speed-up is the quotient of the slowest ranks' work. It is a bound: norms, softmax, memory
traffic and communication cost nothing in it.

An update costs a decoder layer three forwards, four with gradient checkpointing, and the head three, four where its
logits are computed again (``logits_optimization=memory``, and verl's fused kernels). Scoring is one forward of both. So
the two speed-ups are nearly the same number. They differ by the head's share of the work, and where mini-batches or a
smaller budget cut groups, or leave ranks with less even work.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from zorro_verl.batching import packed_tokens, place_groups, rows_by_group, split_micro_batches
from zorro_verl.estimate import SCORING, PassCosts, update_costs
from zorro_verl.flops import ModelWork
from zorro_verl.memory import activation_memory, scoring_memory, why_unknown

FILLER = (127, 1)  # prompt and response tokens of the rows that verl adds until a count divides
_BUDGET_KEY = "ppo_max_token_len_per_gpu"
_LOG_PROB_KEY = "log_prob_max_token_len_per_gpu"


@dataclass(frozen=True)
class RowLengths:
    """The rows of one training step as lengths in tokens, in the order in which they were sampled.

    Attributes:
        groups: of each row, a number that rows of the same prompt have in common.
        prompts: tokens of each row's prompt, at least 1.
        responses: tokens of each row's response, at least 0.

    Raises:
        ValueError: no rows, another number of each, a length that can't be, or a group with prompts of two lengths.
    """

    groups: Sequence[int]
    prompts: Sequence[int]
    responses: Sequence[int]

    def __post_init__(self) -> None:
        counts = len(self.groups), len(self.prompts), len(self.responses)
        if not counts[0] or len(set(counts)) > 1:
            raise ValueError(
                f"rows: expected as many groups, prompts and responses, at least one of each, got {counts}"
            )
        if min(self.prompts) < 1 or min(self.responses) < 0:
            raise ValueError(
                "rows: expected prompts of at least 1 token and responses of at least 0, got "
                f"{min(self.prompts)} and {min(self.responses)}"
            )
        for group in self.by_group():
            lengths = sorted({self.prompts[row] for row in group})
            if len(lengths) > 1:
                raise ValueError(
                    f"rows: expected one prompt length in group {self.groups[group[0]]}, got {lengths[0]} and "
                    f"{lengths[-1]}"
                )

    @classmethod
    def alike(cls, prompts: int, n: int, prompt_tokens: int, response_tokens: int) -> RowLengths:
        """``prompts`` groups of ``n`` rows, all of them of the same lengths."""
        rows = prompts * n
        return cls([row // n for row in range(rows)], [prompt_tokens] * rows, [response_tokens] * rows)

    def by_group(self) -> list[list[int]]:
        """Row indices of each group, in order of first appearance."""
        return rows_by_group(self.groups)

    @property
    def tokens(self) -> int:
        """Of all rows, a prompt counted once per row."""
        return sum(self.prompts) + sum(self.responses)

    @property
    def packed(self) -> int:
        """Tokens with each prompt once."""
        return sum(packed_tokens(self.prompts[g[0]], [self.responses[r] for r in g]) for g in self.by_group())

    @property
    def token_ratio(self) -> float:
        """`tokens` over `packed`: what these rows allow if no group is cut."""
        return self.tokens / self.packed

    def filled(self, multiple: int) -> RowLengths:
        """With rows as verl adds them until their number is a multiple; they share a short prompt of their own."""
        more = -len(self.groups) % multiple
        prompt, response = FILLER
        return RowLengths(
            [*self.groups, *[max(self.groups) + 1] * more],
            [*self.prompts, *[prompt] * more],
            [*self.responses, *[response] * more],
        )


class Pass(NamedTuple):
    """A call over a step's rows on all ranks: ``compute_log_prob``, or ``update_actor`` with all its mini-batches."""

    tokens: int  # that go through the model
    work: int  # multiply-adds on all ranks
    slowest: int  # multiply-adds of the slowest rank, which the others wait for in each mini-batch
    prompts: int  # how many prompts are computed, a prompt each time
    groups_cut: int  # groups whose prompt is computed more than once
    micro_batches: int  # that every rank runs one after the other
    shapes: tuple[tuple[int, int], ...]  # tokens and scored tokens of micro-batches, over the GPUs of a row; each once
    memory: int | None  # bytes on each GPU

    def with_memory(self, peak: Callable[[int, int, bool], int], stock: bool) -> Pass:
        """The same with the memory of the micro-batch that takes the most, by a formula of tokens and scored tokens."""
        return self._replace(memory=max(peak(tokens, scored, stock) for tokens, scored in self.shapes))


class Way(NamedTuple):
    """One of the three ways of computing a step's rows."""

    log_prob: Pass
    update: Pass


class PerCall(NamedTuple):
    """A number for each of the two calls."""

    log_prob: float
    update: float


@dataclass(frozen=True)
class Speed:
    """What a GPU is assumed to compute.

    Attributes:
        peak_tflops: 10^12 floating-point operations per second that it can do at most.
        utilisation: what share of them the passes reach, above 0 and at most 1.

    Raises:
        ValueError: a number that can't be.
    """

    peak_tflops: float
    utilisation: float

    def __post_init__(self) -> None:
        if not 0 < self.peak_tflops < math.inf or not 0 < self.utilisation <= 1:
            raise ValueError(
                "peak_tflops, utilisation: expected a number above 0 and a share of at most 1, got "
                f"{self.peak_tflops:.12g} and {self.utilisation:.12g}"
            )

    @property
    def flops(self) -> float:
        """Floating-point operations per second that are reached."""
        return self.peak_tflops * 1e12 * self.utilisation


class Prediction(NamedTuple):
    """What `predict` gives.

    Attributes:
        rows: the step's, with the rows that verl adds.
        stock, row_placed: None where `no_verl` says why.
        no_verl: why verl's placement is not known; None where it is.
        no_memory: why memory is not predicted for this model; None where it is.
        gpus_per_rank: over how many GPUs a row is spread.
    """

    rows: RowLengths
    stock: Way | None
    row_placed: Way | None
    group_placed: Way
    no_verl: str | None
    no_memory: str | None
    gpus_per_rank: int

    def speedup(self, way: Way) -> PerCall | None:
        """Time of `stock` over that of one of the ways, as floating-point work bounds it; None without `stock`."""
        if self.stock is None:
            return None
        return PerCall(*(stock.slowest / own.slowest for stock, own in zip(self.stock, way, strict=True)))

    def token_ratio(self, way: Way) -> PerCall:
        """Tokens of the rows over those that go through the model."""
        return PerCall(*(self.rows.tokens / own.tokens for own in way))

    def seconds(self, one: Pass, speed: Speed) -> float:
        """What a call takes on GPUs of this speed; a multiply-add is two operations."""
        return 2 * one.slowest / (self.gpus_per_rank * speed.flops)


def predict(
    config: Any,
    rows: RowLengths,
    *,
    ranks: int,
    budget: int,
    log_prob_budget: int | None = None,
    mini_batches: int = 1,
    checkpointing: bool = True,
    logits_optimization: str = "none",
    head_features: int | None = None,
    sequence_parallel: int = 1,
    dtype: str = "bfloat16",
    ask_verl: bool = True,
) -> Prediction:
    """What sharing prompts gives on a step's rows.

    Args:
        config: of a Hugging Face model, as for `ModelWork.of`; memory is known for `zorro_verl.memory.LAYERS_KNOWN`.
        rows: of the whole step. Short ones are added until ``ranks`` times ``mini_batches`` divides their number. verl
            adds up to a multiple of its ranks and of the rows of a mini-batch; the two are the same where
            ``ppo_mini_batch_size`` times ``rollout.n`` is a multiple of the ranks and divides the rows.
        ranks: data-parallel ranks: GPUs over ``sequence_parallel``.
        budget: ``ppo_max_token_len_per_gpu``, tokens of a micro-batch per GPU: packed ones, and in `stock` those of its
            rows.
        log_prob_budget: ``log_prob_max_token_len_per_gpu``; the same by default, as in verl.
        mini_batches: optimizer steps on a step's rows: ``train_batch_size`` over ``ppo_mini_batch_size``.
        checkpointing: ``enable_gradient_checkpointing``.
        logits_optimization: "none", "compute" or "memory"; `stock` then runs verl's fused kernels for "memory".
        head_features: outputs of the head for one token; the vocabulary by default, 1 for a critic.
        sequence_parallel: GPUs that a row is spread over, ``ulysses_sequence_parallel_size``.
        dtype: in which the model computes.
        ask_verl: False doesn't import verl: `row_placed` is None, and so is `stock` unless all rows are of one length.

    Raises:
        ValueError: a count below 1, a budget below the longest row, or what `ModelWork.of` refuses.
    """
    counts = {"ranks": ranks, "budget": budget, "mini_batches": mini_batches, "sequence_parallel": sequence_parallel}
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{name}: expected at least 1, got {count}")
    filled = rows.filled(ranks * mini_batches)
    fillers = range(len(rows.groups), len(filled.groups))
    no_memory = why_unknown(config)
    update = update_costs(checkpointing, logits_optimization)

    shape: dict[str, Any] = {"dtype": dtype, "sequence_parallel": sequence_parallel, "head_features": head_features}
    shape |= {"logits_optimization": logits_optimization}

    def scoring_peak(tokens: int, scored: int, stock: bool) -> int:
        return scoring_memory(config, tokens, scored, stock=stock, **shape).peak

    def training_peak(tokens: int, scored: int, stock: bool) -> int:
        return activation_memory(config, tokens, scored, stock=stock, checkpointing=checkpointing, **shape).peak

    def way(order: Sequence[int], shared: bool) -> Way:
        counter = _Counter(filled, fillers, ModelWork.of(config, head_features), shared)
        whole = [_cut(order, ranks)]
        steps = list(zip(*(_cut(own, mini_batches) for own in whole[0]), strict=True))
        scored = counter.run(whole, (log_prob_budget or budget) * sequence_parallel, _LOG_PROB_KEY, SCORING)
        trained = counter.run(steps, budget * sequence_parallel, _BUDGET_KEY, update)
        if no_memory is not None:
            return Way(scored, trained)
        return Way(scored.with_memory(scoring_peak, not shared), trained.with_memory(training_peak, not shared))

    by_group = place_groups(filled.groups, filled.prompts, filled.responses, ranks, mini_batches, fillers)
    by_row, no_verl = _place_rows(filled, ranks) if ask_verl else (None, "veRL's placement was not asked for")
    stock_order = by_row
    if by_row is None and len(set(zip(filled.prompts, filled.responses, strict=True))) == 1:
        stock_order = list(range(len(filled.groups)))  # any order is as good
    return Prediction(
        rows=filled,
        stock=None if stock_order is None else way(stock_order, shared=False),
        row_placed=None if by_row is None else way(by_row, shared=True),
        group_placed=way(by_group, shared=True),
        no_verl=no_verl,
        no_memory=no_memory,
        gpus_per_rank=sequence_parallel,
    )


class _Counter(NamedTuple):
    """Counts what ranks compute, a micro-batch after the other."""

    rows: RowLengths
    fillers: range  # verl's own rows, whose prompt is no group of the user's
    model: ModelWork
    shared: bool

    def run(self, steps: Sequence[Sequence[Sequence[int]]], budget: int, budget_key: str, costs: PassCosts) -> Pass:
        """What one call takes, given the rows of every rank in each mini-batch."""
        shapes: Counter[tuple[int, int]] = Counter()  # tokens and scored tokens of micro-batches
        prompts: Counter[int] = Counter()  # how often each group's is computed
        total = slowest = micro_batches = 0
        for ranks in steps:
            cut = [self._split(own, budget, budget_key) for own in ranks]
            most = max(map(len, cut))
            micro_batches += most
            work = []
            for own, split in zip(ranks, cut, strict=True):
                if len(split) < most:  # ranks run equally many: FSDP's collectives would wait for ever
                    split = self._split(own, budget, budget_key, most)
                work.append(0)
                for pieces in split:
                    groups = [(self.rows.prompts[p[0]], [self.rows.responses[r] for r in p]) for p in pieces]
                    tokens = sum(packed_tokens(*group) for group in groups)
                    scored = sum(sum(responses) for _, responses in groups) if self.shared else tokens
                    layers = self.model._replace(head=0).of_groups(groups).executed
                    work[-1] += costs.of(layers, self.model.head * scored)
                    shapes[tokens, scored] += 1
                    prompts.update(self.rows.groups[piece[0]] for piece in pieces)
            total += sum(work)
            slowest += max(work)
        filler_group = {self.rows.groups[row] for row in self.fillers}
        return Pass(
            tokens=sum(tokens * count for (tokens, _), count in shapes.items()),
            work=total,
            slowest=slowest,
            prompts=prompts.total(),
            groups_cut=sum(count > 1 for group, count in prompts.items() if group not in filler_group),
            micro_batches=micro_batches,
            shapes=tuple(shapes),
            memory=None,
        )

    def _split(self, own: Sequence[int], budget: int, budget_key: str, min_count: int = 1) -> list[list[list[int]]]:
        """Micro-batches of some rows, each of them its pieces of groups; without sharing every row is a piece."""
        index = [self.rows.groups[row] if self.shared else row for row in own]
        prompts, responses = [self.rows.prompts[row] for row in own], [self.rows.responses[row] for row in own]
        batches = split_micro_batches(index, prompts, responses, budget, budget_key, min_count)
        return [
            [[own[batch[i]] for i in piece] for piece in rows_by_group([index[i] for i in batch])] for batch in batches
        ]


def _place_rows(rows: RowLengths, ranks: int) -> tuple[list[int] | None, str | None]:
    """The order in which verl hands rows to its ranks, or why that isn't known."""
    try:
        from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions
    except ImportError as error:
        return None, f"veRL places rows by code of its own, which can't be imported here ({error})"
    import torch

    workload = calculate_workload(torch.tensor(rows.prompts) + torch.tensor(rows.responses)).tolist()
    partitions = get_seqlen_balanced_partitions(workload, k_partitions=ranks, equal_size=True)
    return [row for partition in partitions for row in partition], None


def _cut(rows: Sequence[int], parts: int) -> list[Sequence[int]]:
    """Equal chunks, as verl hands them out."""
    size = len(rows) // parts
    return [rows[i : i + size] for i in range(0, len(rows), size)]
