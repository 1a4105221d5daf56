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
    """A step's ``zorro/*`` counts from those of its updates: sums, and their quotient. Other ratios stay averages."""
    ours = {name: sum(x) for name, x in values.items() if name.startswith("zorro/")}
    counts = {name: total for name, total in ours.items() if not name.endswith(("ratio", "ratio_best", "_executed"))}
    if "zorro/tokens_packed" in counts:
        counts["zorro/token_ratio"] = counts["zorro/tokens_total"] / max(1, counts["zorro/tokens_packed"])
    return counts
