"""A WARNING, once per trainer, that prompts are shared far less than they could be: the reason, and what mends it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from zorro_verl.batching import rows_by_group
from zorro_verl.grouping import Rows
from zorro_verl.metrics import ShareCounts

logger = logging.getLogger(__name__)

# Below this share of what could be, a quarter more tokens go through the model than have to. Equal groups lose nothing
# when they are placed, and ragged ones an eighth at worst in a thousand simulated steps on up to 64 ranks: that is no
# news. A ratio is never below 1, so that a batch with little to share, and one of single rows, is no reason to warn.
FAR_BELOW = 0.8


class Update(NamedTuple):
    """How a run's config has an update cut its rows."""

    name: str  # "update_actor" or "update_critic"
    key: str  # of the role in the config
    budget_key: str  # in the config: what bounds the packed tokens of a micro-batch
    mini_batch_size: int  # in prompts
    rollouts: int  # rows of a prompt
    ranks: int  # data-parallel ones
    placed: bool  # whether rows were placed by group


class RatioWarning:
    """What a trainer asks in every step, and hears of at most once: of its updates, and of its prompts."""

    def __init__(self) -> None:
        self._update_given = self._prompts_given = False

    @classmethod
    def of(cls, trainer: Any) -> RatioWarning:
        """The one of a trainer, which keeps it."""
        return vars(trainer).setdefault("zorro_ratio_warning", cls())

    def check(self, counts: ShareCounts, epochs: int, update: Callable[[], Update]) -> None:
        """Warn if an update's token ratio is far below the best.

        Where a token budget is too small for a group, the engine has said so with its figures, see
        `zorro_verl.budget_warning`; nothing is said of it here.

        Args:
            counts: of the whole update.
            epochs: passes over the rows in it.
            update: gives how it was cut; asked where there is something to say.
        """
        best = counts.token_ratio_best(epochs)
        if self._update_given or counts.token_ratio >= FAR_BELOW * best:
            return
        repeats = counts.repeats(epochs)
        if repeats.micro_batches == max(repeats) and counts.over_budget:
            return
        self._update_given, how = True, update()
        if repeats.placement == max(repeats):
            reason = _misplaced(how, counts.rows_by_prompt(epochs))
        elif repeats.micro_batches == max(repeats):
            reason = (
                f"{how.ranks} data-parallel ranks run equally many micro-batches, as many as the one that needs most, "
                f"and others cut groups for it. Raise {how.budget_key} if memory allows, "
                f"or {how.key}.ppo_mini_batch_size."
            )
        else:
            reason = "rows with images or videos go through the model whole. There is nothing to set: none are shared."
        logger.warning(
            "%s: the token ratio is %.2f, and this batch allows %.2f: %s Results are the same. Said once.",
            how.name,
            counts.token_ratio,
            best,
            reason,
        )

    def check_prompts(
        self, prompts: Rows, groups: Sequence[int], response_tokens: int, uids: Sequence[str | None]
    ) -> None:
        """Warn if rows that were drawn from one prompt could share far more if their prompts were the same.

        Args:
            prompts: ``(N,)`` rows, as far as their prompts go.
            groups: ``(N,)`` which rows have the same prompt.
            response_tokens: of all rows.
            uids: ``(N,)`` which rows were drawn from the same prompt of the data set; None for a row that has reason to
                differ, such as a later turn.
        """
        if self._prompts_given:
            return
        lens = prompts.prompt_lens.tolist()
        distinct = [rows[0] for rows in rows_by_group(groups) if uids[rows[0]] is not None]
        drawn = [[distinct[i] for i in part] for part in rows_by_group([uids[row] for row in distinct])]
        torn = [rows for rows in drawn if len(rows) > 1]
        lost = sum(sum(lens[row] for row in rows) - max(lens[row] for row in rows) for rows in torn)
        packed = sum(lens[rows[0]] for rows in rows_by_group(groups)) + response_tokens
        if packed - lost >= FAR_BELOW * packed:
            return
        self._prompts_given = True
        first, second = torn[0][:2]
        total = sum(lens) + response_tokens
        logger.warning(
            "prompts: this batch allows a token ratio of %.2f, and %.2f if rows that were drawn from one prompt had "
            "its tokens in common. Two of them, of %d and %d tokens, differ from token %d on, and only whole prompts "
            "are shared. Look for a date or a random id in the chat template, a system prompt or the agent loop, and "
            "make it the same for all rows of a prompt. Results are the same. Said once.",
            total / packed,
            total / (packed - lost),
            lens[first],
            lens[second],
            _first_difference(prompts, first, second),
        )


def _misplaced(update: Update, group_sizes: Sequence[int]) -> str:
    """Why groups lie in several mini-batches or on several ranks, and what to set."""
    rows = update.mini_batch_size * update.rollouts // update.ranks
    size = f"{update.key}.ppo_mini_batch_size"
    if not update.placed:
        return (
            "trainer.balance_batch=False leaves rows where they were drawn, and groups in several mini-batches or on "
            "several ranks. Set trainer.balance_batch=True."
        )
    if update.mini_batch_size % update.ranks:
        return (
            f"{size}={update.mini_batch_size} on {update.ranks} data-parallel ranks is {rows} rows for each of them, "
            f"no whole number of groups of {update.rollouts}. Set it to a multiple of {update.ranks}."
        )
    return (
        f"groups of {min(group_sizes)} to {max(group_sizes)} rows can't be put whole into mini-batches of {rows} rows "
        f"on each of {update.ranks} data-parallel ranks. With a larger {size} fewer of them are cut."
    )


def _first_difference(prompts: Rows, first: int, second: int) -> int:
    """The first token, counted from 1, in which two prompts differ; the shorter may be a prefix of the longer."""
    length = int(prompts.prompt_lens[[first, second]].min())
    one, other = (prompts.tokens[start : start + length] for start in prompts.cu_seqlens[[first, second]].tolist())
    different = (one != other).nonzero()
    return int(different[0]) + 1 if len(different) else length + 1
