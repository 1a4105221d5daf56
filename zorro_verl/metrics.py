"""What was shared: exact counts of a call on one rank, and the ``zorro/*`` metrics of a step made of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from zorro_verl.estimate import PassCosts
from zorro_verl.flops import Work

# Why a row that has siblings in the batch went through the model on its own. Closed: each is logged in every step.
FALLBACK_REASONS = ("group_cut", "multimodal")

_TOKENS_TOTAL = "zorro/tokens_total"
_TOKENS_PACKED = "zorro/tokens_packed"
_PIECES = "zorro/pieces"
_WORK_COUNTED = "zorro/work_counted"
_WORK_EXECUTED = "zorro/work_executed"
_WORK_HEAD = "zorro/work_head"
_WORK_PROMPT_HEAD = "zorro/work_prompt_head"
_PROMPTS = "zorro/prompts"
_OVER_BUDGET = "zorro/over_budget"
_SHARED = "zorro/shared"
_SKIPPED = "zorro/skipped_steps"


class Repeats(NamedTuple):
    """Tokens of prompts that went through the model again though they had been through it once, by what did that."""

    placement: int  # a group's rows are in several mini-batches, or on several data-parallel ranks
    micro_batches: int  # they are in several micro-batches of one mini-batch on one rank
    media: int  # they are left alone because they have images or videos


class ShareCounts:
    """Counts over any number of micro-batches, mini-batches, ranks and epochs.

    Attributes:
        tokens_total: tokens of all rows, prompts counted once per row.
        tokens_packed: tokens that went through the model.
        work_counted, work_executed, work_head, work_prompt_head: multiply-adds of a forward, see
            `zorro_verl.flops.Work`.
        calls: for each call of the engine, in their order, ``(fingerprint, rows, alone)`` of each group in each
            micro-batch: a group that was cut has several, and one more for its rows that share with nobody.
        prompt_lens: tokens of each prompt, by fingerprint; empty where nobody asks for `token_ratio_best`.
        over_budget: calls whose largest group needs more than a micro-batch may have.
        shared: what the workers say of their model, see `zorro_verl.summary.what_is_shared`.
        skipped_steps: optimizer steps that were skipped because the grad norm was not finite, or, stand-alone, because
            no token was in the loss.
    """

    def __init__(self) -> None:
        self.tokens_total = 0
        self.tokens_packed = 0
        self.work_counted = 0
        self.work_executed = 0
        self.work_head = 0
        self.work_prompt_head = 0
        self.calls: list[tuple[tuple[int, int, bool], ...]] = [()]
        self.prompt_lens: Mapping[int, int] = {}
        self.over_budget = 0
        self.shared = ""
        self.skipped_steps = 0

    def add_micro_batch(
        self,
        tokens_total: int,
        tokens_packed: int,
        fingerprints: Sequence[int],
        alone: Sequence[bool],
        work: Work,
    ) -> None:
        """Count one micro-batch: a prompt fingerprint for each row, and which rows were to share with nobody."""
        self.tokens_total += tokens_total
        self.tokens_packed += tokens_packed
        self.work_counted += work.counted
        self.work_executed += work.executed
        self.work_head += work.head
        self.work_prompt_head += work.prompt_head
        pieces = Counter(zip(fingerprints, alone, strict=True))
        self.calls[-1] += tuple((fingerprint, rows, apart) for (fingerprint, apart), rows in pieces.items())

    def to_metrics(self) -> dict[str, list[Any]]:
        """In the form that verl gathers over ranks and concatenates over mini-batches: every value a list."""
        return {
            _TOKENS_TOTAL: [self.tokens_total],
            _TOKENS_PACKED: [self.tokens_packed],
            _WORK_COUNTED: [self.work_counted],
            _WORK_EXECUTED: [self.work_executed],
            _WORK_HEAD: [self.work_head],
            _WORK_PROMPT_HEAD: [self.work_prompt_head],
            _PIECES: list(self.calls),
            _PROMPTS: list(self.prompt_lens.items()),
            _OVER_BUDGET: [self.over_budget],
            # As numbers: a trainer of someone's own, which averages whatever its workers report, has no use for a text.
            _SHARED: [*self.shared.encode(), 0],
        }

    @classmethod
    def pop_from(cls, metrics: dict[str, Any]) -> ShareCounts | None:
        """Take the counts out of a worker's gathered metrics; None when it reported none."""
        if _PIECES not in metrics:
            return None
        counts = cls()
        counts.tokens_total = sum(_flat(metrics.pop(_TOKENS_TOTAL)))
        counts.tokens_packed = sum(_flat(metrics.pop(_TOKENS_PACKED)))
        counts.work_counted = sum(_flat(metrics.pop(_WORK_COUNTED)))
        counts.work_executed = sum(_flat(metrics.pop(_WORK_EXECUTED)))
        counts.work_head = sum(_flat(metrics.pop(_WORK_HEAD)))
        counts.work_prompt_head = sum(_flat(metrics.pop(_WORK_PROMPT_HEAD)))
        counts.calls = _flat(metrics.pop(_PIECES))
        counts.prompt_lens = dict(_flat(metrics.pop(_PROMPTS)))
        counts.over_budget = sum(_flat(metrics.pop(_OVER_BUDGET)))
        texts = bytes(_flat(metrics.pop(_SHARED)))  # the same from every rank and mini-batch
        counts.shared = texts.partition(b"\0")[0].decode()
        counts.skipped_steps = sum(_flat(metrics.pop(_SKIPPED, [])))
        return counts

    @property
    def token_ratio(self) -> float:
        return self.tokens_total / max(1, self.tokens_packed)

    def token_ratio_best(self, epochs: int) -> float:
        """What the token ratio would be with each prompt once in each epoch, rows with images and all."""
        return self.tokens_total / max(1, self.tokens_packed - sum(self.repeats(epochs)))

    @property
    def flop_ratio(self) -> float:
        """What verl counts over what was executed; 1 when nothing is shared."""
        return self.work_counted / max(1, self.work_executed)

    def speed_up(self, costs: PassCosts) -> float:
        """Over veRL's own engine, as far as multiply-adds go: all rows in full, its head on every token of them."""
        own = costs.of(self.work_executed - self.work_head, self.work_head)
        stock = costs.of(self.work_counted - self.work_head, self.work_head + self.work_prompt_head)
        return stock / max(1, own)

    def executed_mfu(self, mfu: float) -> float:
        """verl's model FLOPs utilisation, which counts a prompt once per row, for the work that was executed."""
        return mfu / self.flop_ratio if self.work_executed else 0.0

    def summary(self, epochs: int = 1) -> Mapping[str, Any]:
        """The counts under their public names, ``fallback`` a mapping from each reason to rows.

        A group is one distinct prompt in one epoch. It was split when it came in several pieces, and its rows that
        then went through the model alone are its fallback, and so are those with media if it has other rows. Epochs
        are equal runs of calls.
        """
        groups = split = cut = multimodal = 0
        for calls in self._epochs(epochs):
            pieces = [piece for call in calls for piece in call]
            members: Counter[int] = Counter()
            for fingerprint, rows, _ in pieces:
                members[fingerprint] += rows
            count = Counter(fingerprint for fingerprint, _, alone in pieces if not alone)
            groups += len(members)
            split += sum(n > 1 for n in count.values())
            cut += sum(rows == 1 and count[fingerprint] > 1 for fingerprint, rows, alone in pieces if not alone)
            multimodal += sum(rows for fingerprint, rows, alone in pieces if alone and members[fingerprint] > 1)
        return {
            "tokens_total": self.tokens_total,
            "tokens_packed": self.tokens_packed,
            "token_ratio": self.token_ratio,
            "groups": groups,
            "groups_split": split,
            "fallback": {"group_cut": cut, "multimodal": multimodal},
        }

    def repeats(self, epochs: int) -> Repeats:
        """Why ``tokens_packed`` is more than each prompt once in each epoch, and each response; adds up to the tokens.

        Raises:
            KeyError: ``prompt_lens`` were not told.
        """
        placement = micro_batches = media = 0
        for calls in self._epochs(epochs):
            pieces, homes, alone_rows = Counter[int](), Counter[int](), Counter[int]()
            for call in calls:
                shared = [fingerprint for fingerprint, _, alone in call if not alone]
                pieces.update(shared)
                homes.update(set(shared))
                for fingerprint, rows, alone in call:
                    alone_rows[fingerprint] += rows * alone
            for fingerprint, rows in alone_rows.items():
                length = self.prompt_lens[fingerprint]
                placement += length * max(0, homes[fingerprint] - 1)
                micro_batches += length * (pieces[fingerprint] - homes[fingerprint])
                media += length * (rows if homes[fingerprint] else rows - 1)
        return Repeats(placement, micro_batches, media)

    def rows_by_prompt(self, epochs: int) -> list[int]:
        """How many rows each prompt has, in one epoch."""
        members: Counter[int] = Counter()
        for call in next(self._epochs(epochs)):
            for fingerprint, rows, _ in call:
                members[fingerprint] += rows
        return list(members.values())

    def _epochs(self, epochs: int) -> Iterator[list[tuple[tuple[int, int, bool], ...]]]:
        """The calls of each epoch: equal runs of them."""
        per_epoch = max(1, len(self.calls) // epochs)
        for start in range(0, len(self.calls), per_epoch):
            yield self.calls[start : start + per_epoch]

    def step_metrics(self, epochs: int) -> dict[str, float]:
        """The metrics of an ``update_actor``, as they stand in the step's log."""
        summary = dict(self.summary(epochs))
        fallback = summary.pop("fallback")
        metrics = {f"zorro/{name}": float(value) for name, value in summary.items()}
        metrics |= {f"zorro/fallback/{reason}": float(rows) for reason, rows in fallback.items()}
        metrics["zorro/flop_ratio"] = self.flop_ratio
        metrics[_SKIPPED] = float(self.skipped_steps)
        return metrics


def call_stats(tokens_total: int, tokens_packed: int, groups: int, fallback: Mapping[str, int]) -> Mapping[str, Any]:
    """The counts of one call that was not cut, under the public names."""
    return {
        "tokens_total": tokens_total,
        "tokens_packed": tokens_packed,
        "token_ratio": tokens_total / max(1, tokens_packed),
        "groups": groups,
        "groups_split": 0,
        "fallback": dict(fallback),
    }


def skipped_step_metric(skipped: bool) -> dict[str, list[int]]:
    """One rank's word on whether its optimizer step was skipped, in the form verl gathers."""
    return {_SKIPPED: [int(skipped)]}


def _flat(values: list[Any]) -> list[Any]:
    """verl gathers a list per rank, and flattens them for training but not for inference."""
    return [item for value in values for item in (value if isinstance(value, list) else [value])]
