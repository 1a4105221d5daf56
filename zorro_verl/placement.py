"""Where a step's rows go: verl balances row by row, which tears groups apart; here they are placed again, group-wise."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from zorro_verl.batching import place_groups
from zorro_verl.grouping import Rows, exclusive_cumsum, find_prompt_groups, first_rows


def balance_batch(
    module: ModuleType,
    original: Callable,
    self: Any,
    batch: Any,
    metrics: dict,
    logging_prefix: str = "global_seqlen",
    keep_minibatch: bool = False,
) -> Any:
    """In place of ``PPOTrainer._balance_batch``, after it: ``batch`` in an order that keeps groups whole."""
    batch = original(self, batch, metrics, logging_prefix, keep_minibatch)
    fields = module.tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=["prompts"])
    prompts, seq_lens = fields["prompts"], [tag["seq_len"] for tag in batch.tags]
    num_ranks = max(self.actor_rollout_wg._dispatch_info["actor"]) + 1
    rows = _prompt_rows(prompts.values(), prompts.offsets())
    batch.reorder(_group_order(module, self.config, rows, seq_lens, num_ranks, metrics, logging_prefix))
    return batch


def legacy_balance_batch(
    module: ModuleType,
    original: Callable,
    self: Any,
    batch: Any,
    metrics: dict,
    logging_prefix: str = "global_seqlen",
    keep_minibatch: bool = False,
) -> None:
    """The same for ``RayPPOTrainer._balance_batch``, which works in place."""
    original(self, batch, metrics, logging_prefix, keep_minibatch)
    prompts, mask = batch.batch["prompts"], batch.batch["attention_mask"]
    valid = mask[:, : prompts.shape[1]].bool()
    rows = _prompt_rows(prompts[valid], exclusive_cumsum(valid.sum(1)))
    num_ranks = self._get_dp_size(self.actor_rollout_wg, "actor")
    seq_lens = mask.sum(1).tolist()
    order = _group_order(module, self.config, rows, seq_lens, num_ranks, metrics, logging_prefix)
    batch.reorder(torch.tensor(order))


def _prompt_rows(tokens: torch.Tensor, cu_seqlens: torch.Tensor) -> Rows:
    # Placement looks at tokens only; where rows are packed, positions count too.
    return Rows(tokens, torch.zeros_like(tokens), cu_seqlens, cu_seqlens.diff())


def _group_order(
    module: ModuleType,
    config: Any,
    prompts: Rows,
    seq_lens: list[int],
    num_ranks: int,
    metrics: dict,
    logging_prefix: str,
) -> list[int]:
    """The order of the rows in which verl's equal chunks hold whole groups; its balance goes into ``metrics``."""
    groups = find_prompt_groups(prompts)
    prompt_lens = prompts.prompt_lens.tolist()
    response_lens = [seq - prompt for seq, prompt in zip(seq_lens, prompt_lens, strict=True)]
    mini_batch_rows = config.actor_rollout_ref.actor.ppo_mini_batch_size * config.actor_rollout_ref.rollout.n
    num_mini_batches = len(seq_lens) // mini_batch_rows if len(seq_lens) % mini_batch_rows == 0 else 1
    order = place_groups(groups.tolist(), prompt_lens, response_lens, num_ranks, num_mini_batches)

    per_rank = len(order) // num_ranks
    partitions = [order[i : i + per_rank] for i in range(0, len(order), per_rank)]
    metrics.update(module.log_seqlen_unbalance(seqlen_list=seq_lens, partitions=partitions, prefix=logging_prefix))
    shared = sum(prompt_lens[row] for row in first_rows(groups).tolist()) + sum(response_lens)
    metrics["zorro/token_ratio_best"] = sum(seq_lens) / max(1, shared)
    return order
