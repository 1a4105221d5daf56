"""What fits the memory of GPUs, and what sharing prompts then gives: from lengths, a model and its settings.

Estimates, made of those of `zorro_verl.prediction`, `zorro_verl.memory` and `zorro_verl.estimate`. All rows of a step
are taken to be of the same lengths.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from zorro_verl.batching import packed_tokens
from zorro_verl.estimate import ModelSize, ShardMemory, shard_memory
from zorro_verl.families import head_counts
from zorro_verl.memory import activation_memory, largest_token_budget, scoring_memory, why_unknown
from zorro_verl.prediction import Prediction, RowLengths, Speedup, Way, predict
from zorro_verl.sequence_parallel import check_heads

GB = 10**9
MARGIN = (
    0.1  # of a GPU: the allocator's fragmentation, NCCL and CUDA, and what the rollout engine keeps while it sleeps
)
_ROUND = 1024  # tokens
_WIDTHS = (1, 2, 4, 8)  # GPUs of a node that a row is spread over


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

    Raises:
        ValueError: a number that can't be.
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

    def __post_init__(self) -> None:
        for name in ("prompt", "response", "n", "prompts", "gpus", "sequence_parallel"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if not 0 < self.hbm < math.inf:
            raise ValueError(f"hbm: expected GB above 0, got {self.hbm / GB:g}")
        if self.gpus % self.sequence_parallel:
            raise ValueError(
                f"sequence_parallel: expected a divisor of the {self.gpus} GPUs, got {self.sequence_parallel}"
            )
        if self.rows % self.ranks:
            raise ValueError(
                f"prompts: expected prompts x n to be a multiple of the {self.ranks} data-parallel ranks, got "
                f"{self.prompts} x {self.n}"
            )

    @property
    def rows(self) -> int:
        return self.prompts * self.n

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
        return self.prompts / self.ranks

    def changes(self, other: Question) -> dict[str, Any]:
        """The settings that another question has other values of, and its values."""
        theirs = asdict(other)
        return {name: theirs[name] for name, value in asdict(self).items() if theirs[name] != value}


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
        update, log_prob = (self._largest(scoring) for scoring in (False, True))
        return None if update is None or log_prob is None else Budgets(update, log_prob)

    def _largest(self, scoring: bool) -> int | None:
        """Of one of the two passes. Where groups are cut, below what one more of their rows takes."""
        question = self.question
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
        """What to set: the largest that fit, in round numbers, but not more than a rank has tokens in a step.

        For log-probs twice the update's at most: they keep nothing, but larger ones than that fill no GPU better.
        """
        if self.largest is None:
            return None
        update = self._rounded(self.largest.update)
        return Budgets(update, min(2 * update, self._rounded(self.largest.log_prob)))

    def _rounded(self, budget: int) -> int:
        """Down, but not below as many rows of a prompt as the budget holds."""
        question, width = self.question, self.question.sequence_parallel
        pieces = [math.ceil(question.tokens_of(rows) / width) for rows in range(1, question.n + 1)]
        rank = math.ceil(question.groups_per_rank * question.group_tokens / width)
        return max(max(piece for piece in pieces if piece <= budget), min(budget - budget % _ROUND, rank))

    @property
    def holds_group(self) -> bool:
        """Whether micro-batches hold a whole group; True where memory isn't predicted."""
        if self.no_memory is not None:
            return True
        return self.budgets is not None and self._holds_group(self.question)

    @cached_property
    def whole(self) -> Prediction:
        """What sharing gives if micro-batches hold a whole group."""
        return self._predict(Budgets(self.question.group_tokens, self.question.group_tokens))

    @cached_property
    def prediction(self) -> Prediction:
        """What sharing gives with the budgets to set; where there are none, `whole`."""
        return self.whole if self.budgets is None else self._predict(self.budgets)

    @property
    def stock(self) -> Way:
        """veRL's own engine, with the same budgets."""
        return _stock(self.prediction)

    @property
    def shared(self) -> Way:
        """This package."""
        return self.prediction.group_placed

    @property
    def speedup(self) -> Speedup:
        """Over veRL's own engine, as far as floating-point work bounds it."""
        return Speedup(*(a.slowest / b.slowest for a, b in zip(self.stock, self.shared, strict=True)))

    @property
    def speedup_of_whole_groups(self) -> Speedup:
        """The same if micro-batches hold a whole group."""
        ways = _stock(self.whole), self.whole.group_placed
        return Speedup(*(a.slowest / b.slowest for a, b in zip(*ways, strict=True)))

    @property
    def copies(self) -> float:
        """How often the update computes a prompt, on average."""
        return self.shared.update.prompts / self.question.prompts

    @cached_property
    def gpus_needed(self) -> int | None:
        """How many GPUs hold the model and a micro-batch of one row; None where no number does."""
        question = self.question
        taken = max(self._taken(question, 1, scoring) for scoring in (False, True))
        free = int(question.hbm) - self.margin - self.shard.gathered - taken
        if free <= 0:
            return None
        whole = shard_memory(self.size, 1)
        state = whole.weights + whole.gradients + whole.optimizer
        return math.ceil(state / free / question.sequence_parallel) * question.sequence_parallel

    @cached_property
    def remedy(self) -> Question | None:
        """The same with as few other settings as let a micro-batch hold a whole group; None if there are none."""
        by_changes = sorted(self._variants(), key=lambda other: len(self.question.changes(other)))
        return next((other for other in by_changes if self._holds_group(other)), None)

    def _variants(self) -> Iterator[Question]:
        """Other settings that veRL would take."""
        question = self.question
        for width in _WIDTHS:
            if width % question.sequence_parallel or question.gpus % width or not _divides(self.config, width):
                continue
            for mode in (question.logits_optimization, "memory"):
                for checkpointing in (question.checkpointing, True):
                    yield replace(
                        question, sequence_parallel=width, logits_optimization=mode, checkpointing=checkpointing
                    )

    def _holds_group(self, question: Question) -> bool:
        return all(self._taken(question, question.n, scoring) <= self.free for scoring in (False, True))

    def _taken(self, question: Question, rows: int, scoring: bool) -> int:
        """Bytes of each GPU for a micro-batch of so many rows of one prompt."""
        tokens, responses, options = question.tokens_of(rows), rows * question.response, _options(question)
        if scoring:
            return scoring_memory(self.config, tokens, responses, **options).peak
        return activation_memory(self.config, tokens, responses, checkpointing=question.checkpointing, **options).peak

    def _predict(self, budgets: Budgets) -> Prediction:
        question = self.question
        return predict(
            self.config,
            RowLengths.alike(question.prompts, question.n, question.prompt, question.response),
            ranks=question.ranks,
            budget=budgets.update,
            log_prob_budget=budgets.log_prob,
            checkpointing=question.checkpointing,
            ask_verl=False,
            **_options(question),
        )


def _options(question: Question) -> dict[str, Any]:
    return {
        "logits_optimization": question.logits_optimization,
        "sequence_parallel": question.sequence_parallel,
    }


def _stock(prediction: Prediction) -> Way:
    if prediction.stock is None:
        raise RuntimeError(f"rows of one length that divide over ranks need no placement: {prediction.no_verl}")
    return prediction.stock


def _divides(config: Any, width: int) -> bool:
    """Whether `check_heads` takes it."""
    heads = head_counts(config)
    return all(
        not count % width or (name == "num_key_value_heads" and not width % count) for name, count in heads.items()
    )
