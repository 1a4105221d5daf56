"""The wraps of verl's trainers for ``strategy=zorro``: groups are placed whole, and the step's log says what it gave.

Each is inert unless actor or critic has that strategy:

    _balance_batch               see `zorro_verl.placement`
    _update_actor,               verl would average the workers' counts over ranks and mini-batches; they are summed
    _compute_old_log_prob,       and logged under their own names, without the ``actor/`` prefix that verl adds
    _compute_ref_log_prob,
    _compute_values,
    _update_critic              the updates also bring `zorro_verl.summary` and `zorro_verl.ratio_warning` into the log
    _compute_metrics             where V1 logs its throughput, the throughput that was executed is logged too; for the
                                 legacy trainer see `zorro_verl.throughput`
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

from zorro_verl.estimate import PassCosts, update_costs
from zorro_verl.metrics import ShareCounts
from zorro_verl.placement import balance_batch, data_parallel_ranks, legacy_balance_batch
from zorro_verl.ratio_warning import RatioWarning, Update
from zorro_verl.summary import Summary
from zorro_verl.throughput import executed_throughput, let_wait
from zorro_verl.wrapping import wrap_once


def wrap_ppo_trainer(module: ModuleType) -> None:
    """Wrap ``PPOTrainer`` of ``verl.trainer.ppo.v1.trainer_base``. A second call changes nothing."""
    _wrap(
        module.PPOTrainer,
        _balance_batch=functools.partial(balance_batch, module),
        _update_actor=_update_actor,
        _compute_old_log_prob=_reporting("old_log_prob", _old_log_prob),
        _compute_ref_log_prob=_reporting("ref", _ref_log_prob),
        _compute_values=_reporting("values", _values),
        _update_critic=_update_critic,
        _compute_metrics=_compute_metrics,
    )


def wrap_legacy_trainer(module: ModuleType) -> None:
    """Wrap ``RayPPOTrainer`` of ``verl.trainer.ppo.ray_trainer``, which runs with ``trainer.use_v1=False``."""
    _wrap(
        module.RayPPOTrainer,
        _balance_batch=functools.partial(legacy_balance_batch, module),
        _update_actor=_legacy_update_actor,
        _compute_old_log_prob=_legacy_reporting("old_log_prob", _old_log_prob),
        _compute_ref_log_prob=_legacy_reporting("ref", _ref_log_prob),
        _compute_values=_legacy_reporting("values", _values),
        _update_critic=_legacy_update_critic,
    )


def _wrap(trainer: type, **wraps: Callable) -> None:
    for name, wrap in wraps.items():
        wrap_once(trainer, name, functools.partial(_only_for_zorro, wrap=wrap))


def _only_for_zorro(original: Callable, wrap: Callable) -> Callable:
    def method(self, *args, **kwargs):
        if not _shares_prompts(self):
            return original(self, *args, **kwargs)
        return wrap(original, self, *args, **kwargs)

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
        return self.counts.step_metrics(epochs) | self.best(epochs) | self._mfu_executed("zorro")

    def call_metrics(self, name: str) -> dict[str, float]:
        return {f"zorro/{name}/token_ratio": self.counts.token_ratio} | self._mfu_executed(f"zorro/{name}")

    def best(self, epochs: int) -> dict[str, float]:
        return {"zorro/token_ratio_best": self.counts.token_ratio_best(epochs)}

    def _mfu_executed(self, prefix: str) -> dict[str, float]:
        return {} if self.mfu is None else {f"{prefix}/mfu_executed": self.counts.executed_mfu(self.mfu)}


def _update_actor(original: Callable, self: Any, batch: Any, metrics: dict) -> Any:
    with _reports(self.actor_rollout_wg, "update_actor") as reports:
        batch = original(self, batch, metrics)
    for report in reports:
        metrics.update(_actor_metrics(self, report, placed=True))
    return batch


def _legacy_update_actor(original: Callable, self: Any, batch: Any) -> Any:
    with _reports(self.actor_rollout_wg, "update_actor") as reports:
        output = original(self, batch)
    for report in reports:
        metrics = _actor_metrics(self, report, placed=self.config.trainer.balance_batch)
        output.meta_info["metrics"].update(metrics)
        let_wait(batch, metrics)
    return output


def _actor_metrics(trainer: Any, report: _Report, placed: bool) -> dict[str, float]:
    """Of an update; what is to be said of it is said."""
    epochs, costs = trainer.config.actor_rollout_ref.actor.ppo_epochs, _actor_costs(trainer.config.actor_rollout_ref)
    _say(trainer, report.counts, epochs, costs, "update_actor", functools.partial(_actor_cut, trainer, placed))
    return report.training_metrics(epochs)


def _update_critic(original: Callable, self: Any, batch: Any, metrics: dict) -> Any:
    with _reports(*_critic_update(self)) as reports:
        batch = original(self, batch, metrics)
    for report in reports:
        metrics.update(_critic_metrics(self, report, "+critic.ppo_infer_max_token_len_per_gpu", placed=True))
    return batch


def _legacy_update_critic(original: Callable, self: Any, batch: Any) -> Any:
    with _reports(*_critic_update(self)) as reports:
        output = original(self, batch)
    budget_key, placed = "critic.ppo_max_token_len_per_gpu", self.config.trainer.balance_batch
    for report in reports:
        let_wait(batch, _critic_metrics(self, report, budget_key, placed))
    return output


def _critic_metrics(trainer: Any, report: _Report, budget_key: str, placed: bool) -> dict[str, float]:
    """With the best ratio, which no other call gives while a critic warms up, and where it alone shares.

    Args:
        budget_key: the critic's token budget in updates; each of verl's trainers reads another.
        placed: whether rows were placed by group.
    """
    epochs = trainer.config.critic.ppo_epochs
    if trainer.config.actor_rollout_ref.actor.strategy != "zorro":
        costs = update_costs(trainer.config.critic.model.enable_gradient_checkpointing)
        update = functools.partial(_critic_cut, trainer, budget_key, placed)
        _say(trainer, report.counts, epochs, costs, "update_critic", update)
    return report.call_metrics("critic") | report.best(epochs)


def _say(
    trainer: Any, counts: ShareCounts, epochs: int, costs: PassCosts, name: str, update: Callable[[], Update]
) -> None:
    Summary.of(trainer).give(counts, epochs, name, costs)
    RatioWarning.of(trainer).check(counts, epochs, update)


def _actor_costs(config: Any) -> PassCosts:
    """Of an update; ``config`` is a run's ``actor_rollout_ref``."""
    options = config.actor.get("zorro") or {}
    logits = "memory" if config.model.use_fused_kernels else options.get("logits_optimization", "none")
    return update_costs(config.model.enable_gradient_checkpointing, logits)


def _actor_cut(trainer: Any, placed: bool) -> Update:
    config, key = trainer.config.actor_rollout_ref, "actor_rollout_ref.actor"
    budget = "ppo_max_token_len_per_gpu" if config.actor.use_dynamic_bsz else "ppo_micro_batch_size_per_gpu"
    ranks = data_parallel_ranks(trainer.actor_rollout_wg, "actor")
    sizes = config.actor.ppo_mini_batch_size, config.rollout.n, ranks
    return Update("update_actor", key, f"{key}.{budget}", *sizes, placed)


def _critic_cut(trainer: Any, budget_key: str, placed: bool) -> Update:
    config, rollouts = trainer.config.critic, trainer.config.actor_rollout_ref.rollout.n
    if not config.fsdp.get("use_dynamic_bsz", True):
        budget_key = "+critic.fsdp.micro_batch_size_per_gpu"
    sizes = config.ppo_mini_batch_size, rollouts, data_parallel_ranks(trainer.critic_wg, "train")
    return Update("update_critic", "critic", budget_key, *sizes, placed)


def _reporting(name: str, call: Callable[[Any], tuple[Any, str]]) -> Callable:
    """Around a method of V1 that takes metrics to log to; ``call(trainer)`` is the worker group and method it calls."""

    def method(original: Callable, self: Any, batch: Any, metrics: dict) -> Any:
        with _reports(*call(self)) as reports:
            batch = original(self, batch, metrics)
        for report in reports:
            metrics.update(report.call_metrics(name))
        return batch

    return method


def _legacy_reporting(name: str, call: Callable[[Any], tuple[Any, str]]) -> Callable:
    """The same around a method of the legacy trainer, which takes none."""

    def method(original: Callable, self: Any, batch: Any) -> Any:
        with _reports(*call(self)) as reports:
            output = original(self, batch)
        for report in reports:
            let_wait(batch, report.call_metrics(name))
        return output

    return method


def _old_log_prob(trainer: Any) -> tuple[Any, str]:
    return trainer.actor_rollout_wg, "compute_log_prob"


def _ref_log_prob(trainer: Any) -> tuple[Any, str]:
    if trainer.ref_in_actor:
        return trainer.actor_rollout_wg, "compute_log_prob"
    return trainer.ref_policy_wg, "compute_ref_log_prob"


def _values(trainer: Any) -> tuple[Any, str]:
    return trainer.critic_wg, "infer_batch"


def _critic_update(trainer: Any) -> tuple[Any, str]:
    return trainer.critic_wg, "train_mini_batch"


def _compute_metrics(original: Callable, self: Any, batch: Any, metrics: dict, *args: Any, **kwargs: Any) -> None:
    original(self, batch, metrics, *args, **kwargs)
    metrics.update(executed_throughput(metrics))


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
