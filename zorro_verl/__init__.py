"""zorro-verl: train GRPO and PPO actors in veRL without recomputing the shared prompt for every rollout.

Read in the order the data flows: `grouping` -> `packing` -> `varlen`, `attention` -> `log_probs` -> `models` ->
`batching` -> `actor` -> `trainer`; for patched models `prefixes` -> `padded_plan` -> `patched_call` ->
`patched_forward`. Importing this package imports torch at most; the names below load their modules
when they are first used.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_EXPORTS = {
    "DeduplicatedActor": "actor",
    "Qwen3ModelOncePatcher": "qwen_model_patcher",
    "Qwen3ModelPatcher": "qwen_model_patcher",
    "QwenAttentionPatcher": "qwen_attention_patcher",
    "ZoRRoTrain": "zorro_train",
    "analyze_normal_batch_via_attention_mask": "zorro_train",
}

__all__ = [*_EXPORTS, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_EXPORTS[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
