"""One call's rows: cut into micro-batches that keep groups whole, and exact counts of what these share."""

from __future__ import annotations

from collections.abc import Sequence

from zorro_verl.batching import packed_tokens, split_micro_batches
from zorro_verl.grouping import Rows, prompt_fingerprints
from zorro_verl.metrics import ShareCounts


class MicroBatches:
    """The rows of one call of the engine, as lengths and prompt fingerprints on the host."""

    def __init__(self, rows: Rows):
        self.fingerprints: list[int] = prompt_fingerprints(rows).tolist()
        self.prompt_lens: list[int] = rows.prompt_lens.tolist()
        self.response_lens: list[int] = rows.response_lens.tolist()

    def split(self, budget: int, budget_key: str, min_count: int = 1) -> list[list[int]]:
        """Rows of each micro-batch, see `zorro_verl.batching.split_micro_batches`."""
        return split_micro_batches(
            self.fingerprints, self.prompt_lens, self.response_lens, budget, budget_key, min_count
        )

    def counts(self, micro_batches: Sequence[Sequence[int]]) -> ShareCounts:
        """What sharing within each of these micro-batches gives."""
        counts = ShareCounts()
        for rows in micro_batches:
            prompts = {self.fingerprints[row]: self.prompt_lens[row] for row in rows}
            responses = [self.response_lens[row] for row in rows]
            counts.add_micro_batch(
                sum(responses) + sum(self.prompt_lens[row] for row in rows),
                packed_tokens(sum(prompts.values()), responses),
                [self.fingerprints[row] for row in rows],
            )
        return counts


def token_budget(
    use_dynamic_bsz: bool, max_token_len: int | None, micro_batch_size: int | None, longest_row: int
) -> tuple[int, str]:
    """Packed tokens of one micro-batch, and the config key that set them.

    Without dynamic batch sizes the micro-batch size is a grant of memory: that many rows as long as the longest.

    Raises:
        ValueError: the setting that counts is None, or a size below 1.
    """
    if use_dynamic_bsz:
        if max_token_len is None:
            raise ValueError(
                "max_token_len_per_gpu: expected a token budget with use_dynamic_bsz=True, got none; set "
                "actor_rollout_ref.actor.ppo_max_token_len_per_gpu (rollout/ref: log_prob_max_token_len_per_gpu)"
            )
        return int(max_token_len), "ppo_max_token_len_per_gpu (log_prob_max_token_len_per_gpu for log-probs)"
    if micro_batch_size is None:
        raise ValueError(
            "micro_batch_size_per_gpu: expected a size with use_dynamic_bsz=False, got none; set "
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu (rollout/ref: log_prob_micro_batch_size_per_gpu)"
        )
    key = "ppo_micro_batch_size_per_gpu (log_prob_micro_batch_size_per_gpu for log-probs)"
    if micro_batch_size < 1:
        raise ValueError(f"{key}: expected at least 1 row, got {micro_batch_size}")
    return int(micro_batch_size) * longest_row, key
