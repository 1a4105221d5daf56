"""What ``trainer.v1.trainer_mode=separate_async`` needs: weights set aside by the base strategy, counts of all updates.

That trainer makes several local updates a step. It scores the rows of all of them with the step's first weights, which
its worker sets aside on the CPU with functions that verl chooses by ``actor.strategy``, and it averages what the
updates report. Both wraps are inert without ``strategy=zorro``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import nn
from verl.utils import fsdp_utils


def wrap_detach_worker(module: ModuleType) -> None:
    """Wrap ``DetachActorWorker`` of ``verl.experimental.separation.engine_workers``. A second call changes nothing."""
    original = module.DetachActorWorker._get_strategy_handlers
    if hasattr(original, "wrapped_by_zorro"):
        return

    @functools.wraps(original)
    def _get_strategy_handlers(self):
        if self.config.actor.strategy != "zorro":
            return original(self)
        return weight_handlers(self.actor.engine.options.base_strategy)

    _get_strategy_handlers.wrapped_by_zorro = True
    module.DetachActorWorker._get_strategy_handlers = _get_strategy_handlers


def weight_handlers(base_strategy: str) -> tuple[Callable[[nn.Module], Any], Callable[[nn.Module, Any], None]]:
    """``save(module)`` -> this rank's weights on the CPU, and ``restore(module, saved)``, for "fsdp2" or "fsdp"."""
    if base_strategy == "fsdp":
        return fsdp_utils.fsdp1_sharded_save_to_cpu, fsdp_utils.fsdp1_sharded_load_from_cpu
    return _save, _restore


def _save(module: nn.Module) -> Any:
    weights, spec = fsdp_utils.fsdp2_sharded_save_to_cpu(module)
    if next(module.parameters()).device.type == "cpu":
        # As with param_offload: what verl saved are the weights themselves, and the next restore would write over them.
        weights = {name: (tensor.clone(), layout) for name, (tensor, layout) in weights.items()}
    return weights, spec


def _restore(module: nn.Module, saved: Any) -> None:
    # verl takes the saved pair apart itself, for the strategies that it knows by name.
    fsdp_utils.fsdp2_sharded_load_from_cpu(module, *saved)


def wrap_metrics_aggregator(module: ModuleType) -> None:
    """Wrap ``MetricsAggregator`` of ``verl.trainer.ppo.v1.utils``. A second call changes nothing."""
    original = module.MetricsAggregator._special_metrics_aggregate
    if hasattr(original, "wrapped_by_zorro"):
        return

    @functools.wraps(original)
    def _special_metrics_aggregate(self, aggregated):
        return original(self, aggregated | total_counts(self.metric_values))

    _special_metrics_aggregate.wrapped_by_zorro = True
    module.MetricsAggregator._special_metrics_aggregate = _special_metrics_aggregate


def total_counts(values: dict[str, list[float]]) -> dict[str, float]:
    """A step's ``zorro/*`` counts from those of its updates: sums, and their quotient. Other ratios stay averages."""
    ours = {name: sum(x) for name, x in values.items() if name.startswith("zorro/")}
    counts = {name: total for name, total in ours.items() if not name.endswith(("ratio", "ratio_best", "_executed"))}
    if "zorro/tokens_packed" in counts:
        counts["zorro/token_ratio"] = counts["zorro/tokens_total"] / max(1, counts["zorro/tokens_packed"])
    return counts
