"""The weights that ``trainer.v1.trainer_mode=separate_async`` sets aside, by the functions of the base strategy.

That trainer makes several local updates a step. It scores the rows of all of them with the step's first weights, which
its worker sets aside on the CPU with functions that verl chooses by ``actor.strategy``. With another strategy
than zorro the wrap is inert.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import nn
from verl.utils import fsdp_utils

from zorro_verl.wrapping import wrap_once


def wrap_detach_worker(module: ModuleType) -> None:
    """Wrap ``DetachActorWorker`` of ``verl.experimental.separation.engine_workers``. A second call changes nothing."""
    wrap_once(module.DetachActorWorker, "_get_strategy_handlers", _by_base_strategy)


def _by_base_strategy(original: Callable) -> Callable:
    def _get_strategy_handlers(self):
        if self.config.actor.strategy != "zorro":
            return original(self)
        return weight_handlers(self.actor.engine.options.base_strategy)

    return _get_strategy_handlers


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
