"""What fits the memory of GPUs, and what sharing prompts then gives: from lengths, a model and its settings.

Estimates, made of those of `zorro_verl.prediction`, `zorro_verl.memory` and `zorro_verl.estimate`. All rows of a step
are taken to be of the same lengths.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

from zorro_verl.batching import packed_tokens
from zorro_verl.estimate import ModelSize, ShardMemory, shard_memory
from zorro_verl.families import head_counts
from zorro_verl.log_probs import LOGITS_OPTIMIZATIONS
from zorro_verl.memory import activation_memory, largest_token_budget, scoring_memory, why_unknown
from zorro_verl.prediction import PerCall, Prediction, RowLengths, Way, predict
from zorro_verl.sequence_parallel import check_heads

GB, GIB = 10**9, 2**30  # a data sheet's unit, and the one in which memory is shown
# Of a GPU: the allocator's fragmentation, NCCL and CUDA, and what the rollout engine keeps while it sleeps.
MARGIN = 0.1
_ROUND = 1024  # tokens
_LEAST_GB, _MOST_GB = 0.1, 10**6  # of a GPU; far beyond both ends of what there is
_WIDTHS = (1, 2, 4, 8)  # GPUs of a node that a row is spread over
_MORE_GPUS = 32  # four nodes: so far a larger number is looked for that rows divide over


_T = TypeVar("_T")


@dataclass(frozen=True)
class Question:
    """What is planned for.

    Attributes:
        prompt, response: tokens of each row.
        n: responses of a prompt, ``rollout.n``.
        prompts: of a step, ``data.train_batch_size``.
        gpus: that train.
        hbm: bytes of memory of one of them.
        sequence_parallel: ``ulysses_sequence_parallel_size``.
        logits_optimization: "none", "compute" or "memory".
        checkpointing: ``enable_gradient_checkpointing``.
        offload: ``param_offload`` and ``optimizer_offload``, which free memory while the rollout samples.
        mini_batch: prompts of an optimizer step, ``ppo_mini_batch_size``; all of them by default.

    Raises:
        ValueError: a number or a mode that can't be.
    """

    prompt: int
    response: int
    n: int
    prompts: int
    gpus: int
    hbm: float
    sequence_parallel: int = 1
    logits_optimization: str = "none"
    checkpointing: bool = True
    offload: bool = False
    mini_batch: int | None = None

    def __post_init__(self) -> None:
        for name in ("prompt", "response", "n", "prompts", "gpus", "sequence_parallel", "mini_batch"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}: expected at least 1, got {value}")
        bytes_of_gpu(self.hbm / GB)
        if self.logits_optimization not in LOGITS_OPTIMIZATIONS:
            raise ValueError(
                f"logits_optimization: expected {' or '.join(LOGITS_OPTIMIZATIONS)}, got {self.logits_optimization!r}"
            )
        if self.gpus % self.sequence_parallel:
            raise ValueError(
                f"sequence_parallel: expected a divisor of the number of GPUs, {self.gpus}, got "
                f"{self.sequence_parallel}"
            )
        if self.prompts % self.step_prompts:
            raise ValueError(
                f"mini_batch: expected a divisor of the {self.prompts} prompts of a step, got {self.mini_batch}"
            )
        if not self.divides_over(self.gpus):
            raise ValueError(
                f"{'prompts' if self.mini_batch is None else 'mini_batch'}: expected prompts of an optimizer step x n "
                f"to be a multiple of the {self.ranks} data-parallel ranks, got {self.step_prompts} x {self.n}"
            )

    def divides_over(self, gpus: int) -> bool:
        """Whether each data-parallel rank of so many GPUs gets as many rows of an optimizer step; veRL asks for it."""
        return self.step_prompts * self.n % (gpus // self.sequence_parallel) == 0

    @property
    def step_prompts(self) -> int:
        """Prompts of an optimizer step."""
        return self.prompts if self.mini_batch is None else self.mini_batch

    @property
    def mini_batches(self) -> int:
        """Optimizer steps on the rows of a training step."""
        return self.prompts // self.step_prompts

    @property
    def lengths(self) -> RowLengths:
        """Of all rows."""
        return RowLengths.alike(self.prompts, self.n, self.prompt, self.response)

    @property
    def ranks(self) -> int:
        """Data-parallel ranks."""
        return self.gpus // self.sequence_parallel

    @property
    def group_tokens(self) -> int:
        """Packed tokens of a prompt with all its responses."""
        return self.tokens_of(self.n)

    def tokens_of(self, rows: int) -> int:
        """Packed tokens of a prompt with some of its responses."""
        return packed_tokens(self.prompt, [self.response] * rows)

    @property
    def groups_per_rank(self) -> float:
        """In an optimizer step."""
        return self.step_prompts / self.ranks

    def changes(self, other: Question) -> dict[str, Any]:
        """The settings that another question has other values of, and its values."""
        theirs = asdict(other)
        return {name: theirs[name] for name, value in asdict(self).items() if theirs[name] != value}


def bytes_of_gpu(hbm: float) -> float:
    """Of a GPU with so many GB of memory.

    Raises:
        ValueError: a number that no GPU has.
    """
    if not _LEAST_GB <= hbm <= _MOST_GB:
        raise ValueError(f"hbm: expected {_LEAST_GB:g} to {_MOST_GB} GB, got {hbm:.12g}")
    return hbm * GB


class Budgets(NamedTuple):
    """Packed tokens of a micro-batch per GPU."""

    update: int  # ppo_max_token_len_per_gpu
    log_prob: int  # log_prob_max_token_len_per_gpu


class Plan:
    """The numbers that answer a question about one model; they are computed when they are asked for.

    Args:
        config: of a supported Hugging Face model.
        question: lengths, GPUs and settings.

    Attributes:
        no_memory: why memory isn't predicted for this model; None where it is. Without it there are no `budgets`, and
            what needs `shard` must not be asked for.

    Raises:
        ValueError: heads that sequence parallelism doesn't divide.
    """

    def __init__(self, config: Any, question: Question):
        check_heads("sequence_parallel", question.sequence_parallel, head_counts(config))
        self.config, self.question = config, question
        self.no_memory = why_unknown(config)

    @cached_property
    def size(self) -> ModelSize:
        """Parameters of the model."""
        return ModelSize.of(self.config)

    @cached_property
    def shard(self) -> ShardMemory:
        """Bytes on each GPU that don't depend on the batch."""
        return shard_memory(self.size, self.question.gpus)

    @property
    def margin(self) -> int:
        """Bytes that are left free."""
        return round(MARGIN * self.question.hbm)

    @property
    def free(self) -> int:
        """Bytes of each GPU that are left to micro-batches; below 0 where the model itself doesn't fit."""
        return int(self.question.hbm) - self.margin - sum(self.shard)

    @property
    def resident(self) -> int:
        """Bytes of weights and optimizer that stay on each GPU while the rollout engine samples."""
        return 0 if self.question.offload else self.shard.weights + self.shard.optimizer

    @property
    def rollout_share(self) -> float:
        """``rollout.gpu_memory_utilization`` at most: what `resident` and `margin` leave of a GPU, in steps of 0.05."""
        share = 1 - (self.resident + self.margin) / self.question.hbm
        return max(0.0, math.floor(share * 20) / 20)

    @cached_property
    def largest(self) -> Budgets | None:
        """The largest budgets that fit; None where not one row does, or memory isn't predicted."""
        if self.no_memory is not None:
            return None
        update, log_prob = (self._largest(self.question, scoring) for scoring in (False, True))
        return None if update is None or log_prob is None else Budgets(update, log_prob)

    @property
    def largest_without_logits(self) -> int | None:
        """The largest ``ppo_max_token_len_per_gpu`` with ``logits_optimization=memory``, as `largest`."""
        if self.no_memory is not None:
            return None
        return self._largest(replace(self.question, logits_optimization="memory"), scoring=False)

    def _largest(self, question: Question, scoring: bool) -> int | None:
        """Of one of the two passes. Where groups are cut, below what one more of their rows takes."""
        fitting = [rows for rows in range(1, question.n + 1) if self._taken(question, rows, scoring) <= self.free]
        if not fitting:
            return None
        rows = fitting[-1]
        share = rows * question.response / question.tokens_of(rows)
        options = _options(question) | ({} if scoring else {"checkpointing": question.checkpointing})
        budget = largest_token_budget(self.config, self.free, share, scoring=scoring, **options)
        if rows == question.n:
            return budget
        return min(budget, (question.tokens_of(rows + 1) - 1) // question.sequence_parallel)

    @cached_property
    def budgets(self) -> Budgets | None:
        """What to set: the largest that fit, in round numbers, but not more than a rank has tokens in a pass.

        For log-probs twice the update's at most: they keep nothing, but larger ones than that fill no GPU better.
        """
        if self.largest is None:
            return None
        groups = self.question.groups_per_rank
        update = self._rounded(self.largest.update, groups)
        log_prob = self._rounded(self.largest.log_prob, groups * self.question.mini_batches)
        return Budgets(update, min(2 * update, log_prob))

    def _rounded(self, budget: int, groups: float) -> int:
        """Down, for a pass over so many groups, but not below as many rows of a prompt as the budget holds."""
        question, width = self.question, self.question.sequence_parallel
        pieces = [math.ceil(question.tokens_of(rows) / width) for rows in range(1, question.n + 1)]
        rank = math.ceil(groups * question.group_tokens / width)
        return max(max(piece for piece in pieces if piece <= budget), min(budget - budget % _ROUND, rank))

    @property
    def holds_group(self) -> bool:
        """Whether micro-batches hold a whole group; True where memory isn't predicted."""
        if self.no_memory is not None:
            return True
        return self.budgets is not None and self._holds_group(self.question)

    @cached_property
    def prediction(self) -> Prediction:
        """What sharing gives with the budgets to set; where there are none, with such as hold a whole group."""
        question = self.question
        budgets = self.budgets or Budgets(question.group_tokens, question.group_tokens)
        return self._predict(question.lengths, question.ranks, question.mini_batches, budgets)

    @property
    def stock(self) -> Way:
        """veRL's own engine, with the same budgets."""
        return _known(self.prediction.stock)

    @property
    def shared(self) -> Way:
        """This package."""
        return self.prediction.group_placed

    @property
    def speedup(self) -> PerCall:
        """Over veRL's own engine, as far as floating-point work bounds it."""
        return _known(self.prediction.speedup(self.shared))

    @cached_property
    def speedup_of_whole_groups(self) -> PerCall:
        """The same if neither micro-batches nor placement cut a group."""
        question = self.question
        one = RowLengths.alike(1, question.n, question.prompt, question.response)
        found = self._predict(one, 1, 1, Budgets(question.group_tokens, question.group_tokens))
        return _known(found.speedup(found.group_placed))

    @property
    def copies(self) -> float:
        """How often the update computes a prompt, on average."""
        return self.shared.update.prompts / self.question.prompts

    @property
    def taken_by_row(self) -> int:
        """Bytes of each GPU for a micro-batch of one row."""
        return self._most_taken(self.question, 1)

    @cached_property
    def gpus_needed(self) -> int | None:
        """How many GPUs at least hold the model and a micro-batch of one row; None where no number does."""
        return self._gpus_for(self.question, 1)

    @property
    def gpus_suggested(self) -> int | None:
        """The next number from `gpus_needed` on that rows divide over; None where there is none within four nodes."""
        return None if self.gpus_needed is None else _that_divide(self.question, self.gpus_needed)

    @cached_property
    def remedy(self) -> Question | None:
        """What lets a micro-batch hold a whole group, by as few GPUs and changes as do; None if it does already."""
        return None if self.holds_group else self._with_room_for(self.question.n)

    @cached_property
    def rescue(self) -> Question | None:
        """What lets a micro-batch hold one row, likewise; None without, if it does, or where memory isn't predicted."""
        return None if self.no_memory is not None or self.largest is not None else self._with_room_for(1)

    def _with_room_for(self, rows: int) -> Question | None:
        """The same with as few GPUs, then as few changes, as hold a micro-batch of so many rows of a prompt."""
        others = self._variants(rows)
        return min(others, key=lambda other: (other.gpus, len(self.question.changes(other))), default=None)

    def _variants(self, rows: int) -> Iterator[Question]:
        """Other settings that veRL would take, each on the first number of GPUs, from those asked for on, that does."""
        question = self.question
        for width in _WIDTHS:
            if width % question.sequence_parallel or not _divides(self.config, width):
                continue
            for mode in (question.logits_optimization, "memory"):
                for checkpointing in (question.checkpointing, True):
                    settings: dict[str, Any] = {"logits_optimization": mode, "checkpointing": checkpointing}
                    # One rank: any rows divide.
                    row = replace(question, gpus=width, sequence_parallel=width, **settings)
                    needed = self._gpus_for(row, rows)
                    asked = math.ceil(question.gpus / width) * width
                    gpus = None if needed is None else _that_divide(row, max(needed, asked))
                    if gpus is not None:
                        yield replace(row, gpus=gpus)

    def _gpus_for(self, question: Question, rows: int) -> int | None:
        """How many GPUs at least hold the model and a micro-batch of so many rows of a prompt, with these settings."""
        free = int(question.hbm) - self.margin - self.shard.gathered - self._most_taken(question, rows)
        if free <= 0:
            return None
        whole = shard_memory(self.size, 1)
        state = whole.weights + whole.gradients + whole.optimizer
        return math.ceil(state / free / question.sequence_parallel) * question.sequence_parallel

    def _holds_group(self, question: Question) -> bool:
        return self._most_taken(question, question.n) <= self.free

    def _most_taken(self, question: Question, rows: int) -> int:
        """By the pass that takes more."""
        return max(self._taken(question, rows, scoring) for scoring in (False, True))

    def _taken(self, question: Question, rows: int, scoring: bool) -> int:
        """Bytes of each GPU for a micro-batch of so many rows of one prompt."""
        tokens, responses, options = question.tokens_of(rows), rows * question.response, _options(question)
        if scoring:
            return scoring_memory(self.config, tokens, responses, **options).peak
        return activation_memory(self.config, tokens, responses, checkpointing=question.checkpointing, **options).peak

    def _predict(self, rows: RowLengths, ranks: int, mini_batches: int, budgets: Budgets) -> Prediction:
        return predict(
            self.config,
            rows,
            ranks=ranks,
            budget=budgets.update,
            log_prob_budget=budgets.log_prob,
            mini_batches=mini_batches,
            checkpointing=self.question.checkpointing,
            ask_verl=False,
            **_options(self.question),
        )


def _options(question: Question) -> dict[str, Any]:
    return {
        "logits_optimization": question.logits_optimization,
        "sequence_parallel": question.sequence_parallel,
    }


def _that_divide(question: Question, gpus: int) -> int | None:
    """The next number of GPUs from this one on that rows divide over; None where there is none within four nodes."""
    numbers = range(gpus, gpus + _MORE_GPUS + 1, question.sequence_parallel)
    return next((number for number in numbers if question.divides_over(number)), None)


def _known(found: _T | None) -> _T:
    if found is None:
        raise AssertionError("rows of one length that divide over ranks need no placement of veRL's")
    return found


def _divides(config: Any, width: int) -> bool:
    """Whether `check_heads` takes it."""
    heads = head_counts(config)
    return all(
        not count % width or (name == "num_key_value_heads" and not width % count) for name, count in heads.items()
    )
