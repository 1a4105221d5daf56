"""The wraps of verl's trainers for ``strategy=zorro``: groups are placed whole, and the step's log says what it gave.

Each is inert for any other strategy:

    _balance_batch          verl balances row by row, which tears groups apart; the rows are placed again, group-wise
    _update_actor,          verl would average the workers' counts over ranks and mini-batches; they are summed and
    _compute_old_log_prob,  logged under their own names, without the ``actor/`` prefix that verl adds
    _compute_ref_log_prob
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

from zorro_verl.batching import place_groups
from zorro_verl.grouping import Rows, exclusive_cumsum, find_prompt_groups, first_rows
from zorro_verl.metrics import ShareCounts


def wrap_ppo_trainer(module: ModuleType) -> None:
    """Wrap ``PPOTrainer`` of ``verl.trainer.ppo.v1.trainer_base``. A second call changes nothing."""
    _wrap(
        module.PPOTrainer,
        _balance_batch=functools.partial(_balance_batch, module),
        _update_actor=_update_actor,
        _compute_old_log_prob=_compute_old_log_prob,
        _compute_ref_log_prob=_compute_ref_log_prob,
    )


def wrap_legacy_trainer(module: ModuleType) -> None:
    """Wrap ``RayPPOTrainer`` of ``verl.trainer.ppo.ray_trainer``, which runs with ``trainer.use_v1=False``."""
    _wrap(
        module.RayPPOTrainer,
        _balance_batch=functools.partial(_legacy_balance_batch, module),
        _update_actor=_legacy_update_actor,
    )


def _wrap(trainer: type, **wraps: Callable) -> None:
    for name, wrap in wraps.items():
        original = getattr(trainer, name)
        if not hasattr(original, "wrapped_by_zorro"):
            setattr(trainer, name, _only_for_zorro(original, wrap))


def _only_for_zorro(original: Callable, wrap: Callable) -> Callable:
    @functools.wraps(original)
    def method(self, *args, **kwargs):
        if self.config.actor_rollout_ref.actor.strategy != "zorro":
            return original(self, *args, **kwargs)
        return wrap(original, self, *args, **kwargs)

    method.wrapped_by_zorro = True
    return method


def _balance_batch(
    module: ModuleType,
    original: Callable,
    self: Any,
    batch: Any,
    metrics: dict,
    logging_prefix: str = "global_seqlen",
    keep_minibatch: bool = False,
) -> Any:
    batch = original(self, batch, metrics, logging_prefix, keep_minibatch)
    fields = module.tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=["prompts"])
    prompts, seq_lens = fields["prompts"], [tag["seq_len"] for tag in batch.tags]
    num_ranks = max(self.actor_rollout_wg._dispatch_info["actor"]) + 1
    rows = _prompt_rows(prompts.values(), prompts.offsets())
    batch.reorder(_group_order(module, self.config, rows, seq_lens, num_ranks, metrics, logging_prefix))
    return batch


def _legacy_balance_batch(
    module: ModuleType,
    original: Callable,
    self: Any,
    batch: Any,
    metrics: dict,
    logging_prefix: str = "global_seqlen",
    keep_minibatch: bool = False,
) -> None:
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


def _update_actor(original: Callable, self: Any, batch: Any, metrics: dict) -> Any:
    with _reports(self.actor_rollout_wg, "update_actor") as reports:
        batch = original(self, batch, metrics)
    for counts in reports:
        metrics.update(counts.step_metrics(self.config.actor_rollout_ref.actor.ppo_epochs))
    return batch


def _legacy_update_actor(original: Callable, self: Any, batch: Any) -> Any:
    with _reports(self.actor_rollout_wg, "update_actor") as reports:
        output = original(self, batch)
    for counts in reports:
        output.meta_info["metrics"].update(counts.step_metrics(self.config.actor_rollout_ref.actor.ppo_epochs))
    return output


def _compute_old_log_prob(original: Callable, self: Any, batch: Any, metrics: dict) -> Any:
    with _reports(self.actor_rollout_wg, "compute_log_prob") as reports:
        batch = original(self, batch, metrics)
    for counts in reports:
        metrics["zorro/old_log_prob/token_ratio"] = counts.token_ratio
    return batch


def _compute_ref_log_prob(original: Callable, self: Any, batch: Any, metrics: dict) -> Any:
    worker_group, method = (
        (self.actor_rollout_wg, "compute_log_prob")
        if self.ref_in_actor
        else (self.ref_policy_wg, "compute_ref_log_prob")
    )
    with _reports(worker_group, method) as reports:
        batch = original(self, batch, metrics)
    for counts in reports:
        metrics["zorro/ref/token_ratio"] = counts.token_ratio
    return batch


@contextmanager
def _reports(worker_group: Any, name: str) -> Iterator[list[ShareCounts]]:
    """Collect the counts that ``worker_group.name(...)`` reports, taken out before verl reduces the metrics."""
    method, reports = getattr(worker_group, name), []

    @functools.wraps(method)
    def reporting(*args, **kwargs):
        output = method(*args, **kwargs)
        metrics = (output.extra_info or {}).get("metrics") if hasattr(output, "extra_info") else output["metrics"]
        # A scoring call's metrics come once per rank, each already gathered over all of them.
        metrics = metrics[0] if isinstance(metrics, list) else metrics
        counts = ShareCounts.pop_from(metrics) if metrics else None
        if counts is not None:
            reports.append(counts)
        return output

    setattr(worker_group, name, reporting)
    try:
        yield reports
    finally:
        setattr(worker_group, name, method)
