"""Lets vLLM on a CPU take new weights from veRL after every step. vLLM calls `install` in each of its processes.

`vllm.model_executor.layers.utils.dispatch_cpu_unquantized_gemm` packs a linear layer's weight for the CPU and drops the
weight itself, so that the next one finds no parameter to go to. It is wrapped to keep the weight, at the price of its
memory: veRL's update fills it and has vLLM pack it anew.
"""

import inspect
from collections.abc import Callable
from types import ModuleType

from zorro_verl.wrapping import wrap_once

PACKING = "dispatch_cpu_unquantized_gemm"
PARAMETERS = ("layer", "remove_weight")


def install() -> None:
    """Wrap vLLM's packing, once. Calling it again changes nothing."""
    from vllm.model_executor.layers import utils

    keep_weights(utils)


def keep_weights(layer_utils: ModuleType) -> None:
    """Wrap the packing of this module.

    Raises:
        ValueError: if it doesn't have the parameters that it is expected to have.
    """
    found = tuple(inspect.signature(getattr(layer_utils, PACKING)).parameters)
    if found != PARAMETERS:
        raise ValueError(
            f"zorro-vllm-cpu wraps vLLM's {PACKING}{PARAMETERS}, but in the installed vLLM its parameters are {found}: "
            "install the version that `make setup-vllm` does"
        )
    wrap_once(layer_utils, PACKING, _keeping_the_weight)


def _keeping_the_weight(original: Callable) -> Callable:
    def dispatch_cpu_unquantized_gemm(layer, remove_weight: bool) -> None:
        original(layer, remove_weight=False)

    return dispatch_cpu_unquantized_gemm
