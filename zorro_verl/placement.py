"""Where a step's rows go: verl balances row by row, which tears groups apart; here they are placed by group."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from zorro_verl.batching import place_groups
from zorro_verl.grouping import Rows, exclusive_cumsum, find_prompt_groups
from zorro_verl.ratio_warning import RatioWarning
from zorro_verl.row_keys import sample_of


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
    sampled = {key: i for i, key in enumerate(batch.keys)}
    batch = original(self, batch, metrics, logging_prefix, keep_minibatch)
    # Back to the order that was sampled; rows that verl added to make the count come out are the last.
    batch.reorder(sorted(range(len(batch.keys)), key=lambda row: sampled.get(batch.keys[row], len(sampled))))
    fields = module.tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=["prompts"])
    prompts, seq_lens = fields["prompts"], [tag["seq_len"] for tag in batch.tags]
    rows = _prompt_rows(prompts.values(), prompts.offsets())
    padding = [row for row, tag in enumerate(batch.tags) if tag.get("is_padding", False)]
    samples = [sample_of(key) for key in batch.keys]
    batch.reorder(_group_order(module, self, rows, seq_lens, padding, samples, metrics, logging_prefix))
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
    """The same for ``RayPPOTrainer._balance_batch``, which adds no rows, and whose order would only be undone."""
    prompts, mask = batch.batch["prompts"], batch.batch["attention_mask"]
    valid = mask[:, : prompts.shape[1]].bool()
    rows = _prompt_rows(prompts[valid], exclusive_cumsum(valid.sum(1)))
    uids = list(batch.non_tensor_batch.get("uid", [None] * rows.num_rows))
    order = _group_order(module, self, rows, mask.sum(1).tolist(), [], uids, metrics, logging_prefix)
    batch.reorder(torch.tensor(order))


def _prompt_rows(tokens: torch.Tensor, cu_seqlens: torch.Tensor) -> Rows:
    # Placement looks at tokens only; where rows are packed, positions count too.
    return Rows(tokens, torch.zeros_like(tokens), cu_seqlens, cu_seqlens.diff())


def _group_order(
    module: ModuleType,
    trainer: Any,
    prompts: Rows,
    seq_lens: list[int],
    padding: list[int],
    uids: list[str | None],
    metrics: dict,
    logging_prefix: str,
) -> list[int]:
    """The order of the rows in which verl's equal chunks hold whole groups; its balance goes into ``metrics``."""
    groups = find_prompt_groups(prompts).tolist()
    prompt_lens = prompts.prompt_lens.tolist()
    response_lens = [seq - prompt for seq, prompt in zip(seq_lens, prompt_lens, strict=True)]
    RatioWarning.of(trainer).check_prompts(prompts, groups, sum(response_lens), uids)
    num_ranks = data_parallel_ranks(trainer.actor_rollout_wg, "actor")
    slices = _slices(trainer, len(seq_lens) // num_ranks, num_ranks)
    order = place_groups(groups, prompt_lens, response_lens, num_ranks, slices, padding)

    per_rank = len(order) // num_ranks
    partitions = [order[i : i + per_rank] for i in range(0, len(order), per_rank)]
    metrics.update(module.log_seqlen_unbalance(seqlen_list=seq_lens, partitions=partitions, prefix=logging_prefix))
    return order


def data_parallel_ranks(worker_group: Any, mesh: str) -> int:
    """Those of a role, by its mesh: "actor", or a critic's "train". Workers of one sequence share the same rows."""
    if mesh not in worker_group._dispatch_info:
        worker_group._dispatch_info[mesh] = worker_group._query_dispatch_info(mesh)
    return max(worker_group._dispatch_info[mesh]) + 1


def _slices(trainer: Any, rows_per_rank: int, num_ranks: int) -> int:
    """Into how many equal slices a rank's rows are cut by the mini-batches of the roles that share prompts.

    The critic has a mini-batch size and ranks of its own. Where its slices and the actor's lie inside one another, the
    finer ones keep groups whole for both; else the actor's count, as it has the larger part of the work.
    """
    config = trainer.config
    roles = [(config.actor_rollout_ref.actor, num_ranks)]
    if trainer.use_critic:
        roles.append((config.critic, data_parallel_ranks(trainer.critic_wg, "train")))
    counts = []
    for role, ranks in roles:
        slice_rows = role.ppo_mini_batch_size * config.actor_rollout_ref.rollout.n // ranks
        if role.strategy == "zorro" and slice_rows and rows_per_rank % slice_rows == 0:
            counts.append(rows_per_rank // slice_rows)
    if not counts:
        return 1
    return max(counts) if max(counts) % min(counts) == 0 else counts[0]
