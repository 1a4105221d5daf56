"""The wraps of verl's trainers for ``strategy=zorro``: groups are placed whole, and the step's log says what it gave.

Each is inert for any other strategy:

    _balance_batch          see `zorro_verl.placement`
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

from zorro_verl.metrics import ShareCounts
from zorro_verl.placement import balance_batch, legacy_balance_batch


def wrap_ppo_trainer(module: ModuleType) -> None:
    """Wrap ``PPOTrainer`` of ``verl.trainer.ppo.v1.trainer_base``. A second call changes nothing."""
    _wrap(
        module.PPOTrainer,
        _balance_batch=functools.partial(balance_batch, module),
        _update_actor=_update_actor,
        _compute_old_log_prob=_compute_old_log_prob,
        _compute_ref_log_prob=_compute_ref_log_prob,
    )


def wrap_legacy_trainer(module: ModuleType) -> None:
    """Wrap ``RayPPOTrainer`` of ``verl.trainer.ppo.ray_trainer``, which runs with ``trainer.use_v1=False``."""
    _wrap(
        module.RayPPOTrainer,
        _balance_batch=functools.partial(legacy_balance_batch, module),
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
