"""``zorro/*`` counts of a step that makes several updates: verl averages what these report, counts are summed.

Both wraps are inert for updates that report no counts.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

from zorro_verl.throughput import executed_throughput
from zorro_verl.wrapping import wrap_once


def wrap_metrics_aggregator(module: ModuleType) -> None:
    """Wrap ``MetricsAggregator`` of ``verl.trainer.ppo.v1.utils``. A second call changes nothing."""
    wrap_once(module.MetricsAggregator, "_special_metrics_aggregate", _summing)


def wrap_fully_async_aggregator(module: ModuleType) -> None:
    """The same for that of ``verl.experimental.fully_async_policy.detach_utils``, whose method verl spells so."""
    wrap_once(module.MetricsAggregator, "_special_metrics_aggergate", _summing)


def _summing(original: Callable) -> Callable:
    def aggregate(self, aggregated, *args, **kwargs):
        aggregated = original(self, aggregated | total_counts(self.metric_values), *args, **kwargs)
        if "zorro/throughput_executed" in aggregated:  # of the updates; verl's own is by now that of the step
            aggregated |= executed_throughput(aggregated)
        return aggregated

    return aggregate


def total_counts(values: dict[str, list[float]]) -> dict[str, float]:
    """A step's ``zorro/*`` counts from those of its updates: sums, and the token ratios of all their tokens.

    Every pass of an update runs over the same rows, so that its tokens over the ratio are what the pass packed, or with
    ``token_ratio_best`` could have packed. Other ratios, of work and of time, stay averages.
    """
    ours = {name: x for name, x in values.items() if name.startswith("zorro/")}
    counts = {name: sum(x) for name, x in ours.items() if not name.endswith(("ratio", "ratio_best", "_executed"))}
    totals = ours.get("zorro/tokens_total", [])
    for name, ratios in ours.items():
        if name.endswith(("token_ratio", "token_ratio_best")) and len(ratios) == len(totals):
            counts[name] = sum(totals) / sum(total / ratio for total, ratio in zip(totals, ratios, strict=True))
    return counts
