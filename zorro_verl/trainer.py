"""The wraps of verl's trainers for ``strategy=zorro``: groups are placed whole, and the step's log says what it gave.

Each is inert unless actor or critic has that strategy:

    _balance_batch               see `zorro_verl.placement`
    _update_actor,               verl would average the workers' counts over ranks and mini-batches; they are summed
    _compute_old_log_prob,       and logged under their own names, without the ``actor/`` prefix that verl adds
    _compute_ref_log_prob,
    _update_critic,
    _compute_values
    _compute_metrics,            where verl logs its throughput, the throughput that was executed is logged too
    compute_throughout_metrics
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

from zorro_verl.metrics import ShareCounts
from zorro_verl.placement import balance_batch, legacy_balance_batch

# Where a step's metrics wait in the legacy trainer's batch: most of its methods are handed no dict to log to.
_WAITING = "zorro_metrics"


def wrap_ppo_trainer(module: ModuleType) -> None:
    """Wrap ``PPOTrainer`` of ``verl.trainer.ppo.v1.trainer_base``. A second call changes nothing."""
    _wrap(
        module.PPOTrainer,
        _balance_batch=functools.partial(balance_batch, module),
        _update_actor=_update_actor,
        _compute_old_log_prob=_compute_old_log_prob,
        _compute_ref_log_prob=_compute_ref_log_prob,
        _compute_values=_compute_values,
        _update_critic=_update_critic,
        _compute_metrics=_compute_metrics,
    )


def wrap_legacy_trainer(module: ModuleType) -> None:
    """Wrap ``RayPPOTrainer`` of ``verl.trainer.ppo.ray_trainer``, which runs with ``trainer.use_v1=False``."""
    _wrap(
        module.RayPPOTrainer,
        _balance_batch=functools.partial(legacy_balance_batch, module),
        _update_actor=_legacy_update_actor,
        _compute_old_log_prob=_legacy_compute_old_log_prob,
        _compute_ref_log_prob=_legacy_compute_ref_log_prob,
        _compute_values=_legacy_compute_values,
        _update_critic=_legacy_update_critic,
    )
    if not hasattr(module.compute_throughout_metrics, "wrapped_by_zorro"):
        module.compute_throughout_metrics = _with_waiting(module.compute_throughout_metrics)


def _wrap(trainer: type, **wraps: Callable) -> None:
    for name, wrap in wraps.items():
        original = getattr(trainer, name)
        if not hasattr(original, "wrapped_by_zorro"):
            setattr(trainer, name, _only_for_zorro(original, wrap))


def _only_for_zorro(original: Callable, wrap: Callable) -> Callable:
    @functools.wraps(original)
    def method(self, *args, **kwargs):
        if not _shares_prompts(self):
            return original(self, *args, **kwargs)
        return wrap(original, self, *args, **kwargs)

    method.wrapped_by_zorro = True
    return method


def _shares_prompts(trainer: Any) -> bool:
    """Whether a role of this trainer does; a critic's strategy says nothing where there is no critic."""
    if trainer.config.actor_rollout_ref.actor.strategy == "zorro":
        return True
    return getattr(trainer, "use_critic", False) and trainer.config.critic.strategy == "zorro"


class _Report(NamedTuple):
    """What the workers say of one call."""

    counts: ShareCounts
    mfu: float | None  # verl's, the mean over its optimizer steps; None where verl measures none

    def training_metrics(self, epochs: int) -> dict[str, float]:
        return self.counts.step_metrics(epochs) | self._mfu_executed("zorro")

    def scoring_metrics(self, name: str) -> dict[str, float]:
        return {f"zorro/{name}/token_ratio": self.counts.token_ratio} | self._mfu_executed(f"zorro/{name}")

    def _mfu_executed(self, prefix: str) -> dict[str, float]:
        return {} if self.mfu is None else {f"{prefix}/mfu_executed": self.counts.executed_mfu(self.mfu)}


def _update_actor(original: Callable, self: Any, batch: Any, metrics: dict) -> Any:
    with _reports(self.actor_rollout_wg, "update_actor") as reports:
        batch = original(self, batch, metrics)
    for report in reports:
        metrics.update(report.training_metrics(self.config.actor_rollout_ref.actor.ppo_epochs))
    return batch


def _legacy_update_actor(original: Callable, self: Any, batch: Any) -> Any:
    with _reports(self.actor_rollout_wg, "update_actor") as reports:
        output = original(self, batch)
    for report in reports:
        metrics = report.training_metrics(self.config.actor_rollout_ref.actor.ppo_epochs)
        output.meta_info["metrics"].update(metrics)
        _let_wait(batch, metrics)
    return output


def _compute_old_log_prob(original: Callable, self: Any, batch: Any, metrics: dict) -> Any:
    with _reports(self.actor_rollout_wg, "compute_log_prob") as reports:
        batch = original(self, batch, metrics)
    for report in reports:
        metrics.update(report.scoring_metrics("old_log_prob"))
    return batch


def _legacy_compute_old_log_prob(original: Callable, self: Any, batch: Any) -> Any:
    with _reports(self.actor_rollout_wg, "compute_log_prob") as reports:
        output = original(self, batch)
    for report in reports:
        _let_wait(batch, report.scoring_metrics("old_log_prob"))
    return output


def _compute_ref_log_prob(original: Callable, self: Any, batch: Any, metrics: dict) -> Any:
    with _reports(*_reference(self)) as reports:
        batch = original(self, batch, metrics)
    for report in reports:
        metrics.update(report.scoring_metrics("ref"))
    return batch


def _legacy_compute_ref_log_prob(original: Callable, self: Any, batch: Any) -> Any:
    with _reports(*_reference(self)) as reports:
        output = original(self, batch)
    for report in reports:
        _let_wait(batch, report.scoring_metrics("ref"))
    return output


def _compute_values(original: Callable, self: Any, batch: Any, metrics: dict) -> Any:
    with _reports(self.critic_wg, "infer_batch") as reports:
        batch = original(self, batch, metrics)
    for report in reports:
        metrics.update(report.scoring_metrics("values"))
    return batch


def _legacy_compute_values(original: Callable, self: Any, batch: Any) -> Any:
    with _reports(self.critic_wg, "infer_batch") as reports:
        output = original(self, batch)
    for report in reports:
        _let_wait(batch, report.scoring_metrics("values"))
    return output


def _update_critic(original: Callable, self: Any, batch: Any, metrics: dict) -> Any:
    with _reports(self.critic_wg, "train_mini_batch") as reports:
        batch = original(self, batch, metrics)
    for report in reports:
        metrics.update(report.scoring_metrics("critic"))
    return batch


def _legacy_update_critic(original: Callable, self: Any, batch: Any) -> Any:
    with _reports(self.critic_wg, "train_mini_batch") as reports:
        output = original(self, batch)
    for report in reports:
        output.meta_info["metrics"].update(report.scoring_metrics("critic"))
    return output


def _compute_metrics(original: Callable, self: Any, batch: Any, metrics: dict, *args: Any, **kwargs: Any) -> None:
    original(self, batch, metrics, *args, **kwargs)
    metrics.update(_executed_throughput(metrics))


def _let_wait(batch: Any, metrics: dict[str, float]) -> None:
    batch.meta_info[_WAITING] = batch.meta_info.get(_WAITING, {}) | metrics


def _with_waiting(original: Callable) -> Callable:
    """The legacy trainer's last word on a step, and what waited in its batch; inert for batches without."""

    @functools.wraps(original)
    def compute_throughout_metrics(batch: Any, *args: Any, **kwargs: Any) -> dict[str, float]:
        metrics = original(batch, *args, **kwargs) | batch.meta_info.get(_WAITING, {})
        return metrics | _executed_throughput(metrics)

    compute_throughout_metrics.wrapped_by_zorro = True
    return compute_throughout_metrics


def _executed_throughput(metrics: dict[str, float]) -> dict[str, float]:
    """verl's tokens per second and GPU with each prompt once; nothing in a step that trained no actor."""
    if "zorro/token_ratio" not in metrics:
        return {}
    return {"zorro/throughput_executed": metrics["perf/throughput"] / metrics["zorro/token_ratio"]}


def _reference(trainer: Any) -> tuple[Any, str]:
    """The worker group that scores for the reference policy, and its method."""
    if trainer.ref_in_actor:
        return trainer.actor_rollout_wg, "compute_log_prob"
    return trainer.ref_policy_wg, "compute_ref_log_prob"


@contextmanager
def _reports(worker_group: Any, name: str) -> Iterator[list[_Report]]:
    """Collect what ``worker_group.name(...)`` reports; the counts are taken out before verl reduces the metrics."""
    method, reports = getattr(worker_group, name), []

    @functools.wraps(method)
    def reporting(*args, **kwargs):
        output, source = _arrived(method(*args, **kwargs))
        metrics = (source.extra_info or {}).get("metrics") if hasattr(source, "extra_info") else source["metrics"]
        # A scoring call's metrics come once per rank, each already gathered over all of them.
        metrics = metrics[0] if isinstance(metrics, list) else metrics
        counts = ShareCounts.pop_from(metrics) if metrics else None
        if counts is not None:
            reports.append(_Report(counts, _mean(metrics.get("mfu"))))
        return output

    setattr(worker_group, name, reporting)
    try:
        yield reports
    finally:
        setattr(worker_group, name, method)


def _arrived(output: Any) -> tuple[Any, Any]:
    """What a worker group gave, for verl, and where its metrics are; a critic's methods give futures of both.

    verl waits for these at once in any case.
    """
    if not hasattr(output, "futures"):
        return output, output
    import ray

    results = ray.get(output.futures)
    if hasattr(results[0], "extra_info"):  # keys of verl's store, and verl looks no further
        return output, results[0]
    result = output.get()
    return SimpleNamespace(get=lambda: result), result


def _mean(values: float | list[float] | None) -> float | None:
    return sum(values) / len(values) if isinstance(values, list) else values
