"""One call's rows: cut into micro-batches that keep groups whole, and exact counts of what these share."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any

from zorro_verl.attention import MAX_REFERENCE_TOKENS
from zorro_verl.batching import packed_tokens, rows_by_group, split_micro_batches
from zorro_verl.flops import Work
from zorro_verl.grouping import Rows, find_prompt_groups, prompt_fingerprints
from zorro_verl.media import Media
from zorro_verl.metrics import ShareCounts
from zorro_verl.options import CONFIG_KEY

# The multiply-adds of groups, each its prompt length and its response lengths: `ModelWork.of_groups` of the model.
CountWork = Callable[[Sequence[tuple[int, list[int]]]], Work]


class MicroBatches:
    """The rows of one call, as lengths, prompt fingerprints and groups on the host: the one look at its prompts.

    Args:
        rows: the batch.
        media: what its rows bring beside tokens.

    Attributes:
        fingerprints: of each row's prompt and its media, for counts over calls and ranks.
        group_index: the group of each row in this call; `zorro_verl.verl_rows.GROUPS` takes it to its micro-batches.
        alone: which rows share with nobody; what they could have shared is counted still.
        prompt_lens, response_lens: tokens of each row.
    """

    def __init__(self, rows: Rows, media: Media):
        fingerprints = prompt_fingerprints(rows)
        self.group_index: list[int] = find_prompt_groups(rows, fingerprints).tolist()
        self.fingerprints: list[int] = (fingerprints ^ media.fingerprints(rows)).tolist()
        self.alone: list[bool] = rows.alone.tolist()
        self.prompt_lens: list[int] = rows.prompt_lens.tolist()
        self.response_lens: list[int] = rows.response_lens.tolist()

    def select(self, rows: Sequence[int]) -> MicroBatches:
        """These rows alone, in this order."""
        part = copy.copy(self)
        for name, values in vars(self).items():
            setattr(part, name, [values[row] for row in rows])
        return part

    @property
    def longest_row(self) -> int:
        return max(map(sum, zip(self.prompt_lens, self.response_lens, strict=True)))

    def split(self, budget: int, budget_key: str, min_count: int = 1) -> list[list[int]]:
        """Rows of each micro-batch, see `zorro_verl.batching.split_micro_batches`."""
        return split_micro_batches(
            self.group_index, self.prompt_lens, self.response_lens, budget, budget_key, min_count
        )

    def counts(self, micro_batches: Sequence[Sequence[int]], count_work: CountWork) -> ShareCounts:
        """What sharing within each of these micro-batches gives."""
        counts = ShareCounts()
        for rows in micro_batches:
            counts.add_micro_batch(
                *self._tokens(rows),
                [self.fingerprints[row] for row in rows],
                [self.alone[row] for row in rows],
                count_work(self._groups(rows)),
            )
        return counts

    def _groups(self, rows: Sequence[int]) -> list[tuple[int, list[int]]]:
        """The prompt length and the response lengths of each group of these rows."""
        groups = [[rows[i] for i in group] for group in rows_by_group([self.group_index[row] for row in rows])]
        return [(self.prompt_lens[group[0]], [self.response_lens[row] for row in group]) for group in groups]

    def _tokens(self, rows: Sequence[int]) -> tuple[int, int]:
        """Tokens of these rows, with a prompt for each, and with each prompt once."""
        groups = self._groups(rows)
        total = sum(len(responses) * prompt + sum(responses) for prompt, responses in groups)
        return total, sum(packed_tokens(*group) for group in groups)

    def check_dense(self, micro_batches: Sequence[Sequence[int]], split: bool) -> None:
        """The dense reference builds a mask over a whole micro-batch; unless ``split``, over its rows as they were.

        Raises:
            ValueError: a micro-batch that is too long for it.
        """
        longest = max(self._tokens(rows)[1 if split else 0] for rows in micro_batches)
        if longest > MAX_REFERENCE_TOKENS:
            raise ValueError(
                f"{CONFIG_KEY}.attn_implementation: expected micro-batches of at most {MAX_REFERENCE_TOKENS} tokens "
                f"with eager, got one of {longest}; use sdpa or a smaller token budget"
            )


def check_count(name: str, value: Any, instead: str = "") -> int:
    """``value`` as an int of at least 1, or a ValueError that names it and says what to do ``instead``."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name}: expected an integer of at least 1, got {value!r}{instead}")
    return int(value)


def token_budget(
    use_dynamic_bsz: bool, max_token_len: int | None, micro_batch_size: int | None, longest_row: int
) -> tuple[int, str]:
    """Packed tokens of one micro-batch, and the config key that set them.

    Without dynamic batch sizes the micro-batch size is a grant of memory: that many rows as long as the longest.

    Raises:
        ValueError: the setting that counts is None or no integer of at least 1.
    """
    if not isinstance(use_dynamic_bsz, bool):
        raise ValueError(f"use_dynamic_bsz: expected True or False, got {use_dynamic_bsz!r}")
    if use_dynamic_bsz:
        if max_token_len is None:
            raise ValueError(
                "max_token_len_per_gpu: expected a token budget with use_dynamic_bsz=True, got none; set "
                "actor_rollout_ref.actor.ppo_max_token_len_per_gpu (rollout/ref: log_prob_max_token_len_per_gpu)"
            )
        key = "ppo_max_token_len_per_gpu (log_prob_max_token_len_per_gpu for log-probs)"
        return check_count(f"max_token_len_per_gpu, {key}", max_token_len), key
    if micro_batch_size is None:
        raise ValueError(
            "micro_batch_size_per_gpu: expected a size with use_dynamic_bsz=False, got none; set "
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu (rollout/ref: log_prob_micro_batch_size_per_gpu)"
        )
    key = "ppo_micro_batch_size_per_gpu (log_prob_micro_batch_size_per_gpu for log-probs)"
    return check_count(f"micro_batch_size_per_gpu, {key}", micro_batch_size) * longest_row, key
