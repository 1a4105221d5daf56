"""Where verl computes a step's throughput: the executed one too, and metrics that had no other way into the log.

The methods of verl's legacy trainer, and of those built on it, are handed a batch and no dict to log to. What they
measure waits in the batch until verl computes its throughput from it.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from zorro_verl.wrapping import wrap_once

_WAITING = "zorro_metrics"


def let_wait(batch: Any, metrics: dict[str, float]) -> None:
    """Keep ``metrics`` in ``batch.meta_info`` until the step's throughput is computed from this batch."""
    batch.meta_info[_WAITING] = batch.meta_info.get(_WAITING, {}) | metrics


def executed_throughput(metrics: dict[str, float]) -> dict[str, float]:
    """verl's tokens per second and GPU with each prompt once; nothing in a step that trained no actor."""
    if "zorro/token_ratio" not in metrics:
        return {}
    return {"zorro/throughput_executed": metrics["perf/throughput"] / metrics["zorro/token_ratio"]}


def wrap_throughput(module: ModuleType) -> None:
    """Wrap ``compute_throughout_metrics`` of ``verl.trainer.ppo.metric_utils``. A second call changes nothing.

    At its source: several of verl's trainers import the function by name. Inert for batches in which nothing waits.
    """
    wrap_once(module, "compute_throughout_metrics", _with_waiting)


def _with_waiting(original: Callable) -> Callable:
    def compute_throughout_metrics(batch: Any, *args: Any, **kwargs: Any) -> dict[str, float]:
        metrics = original(batch, *args, **kwargs) | batch.meta_info.get(_WAITING, {})
        return metrics | executed_throughput(metrics)

    return compute_throughout_metrics
