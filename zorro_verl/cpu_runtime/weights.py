"""The actor's weights into the rollout model: by name, complete, and with tied tensors checked."""

from collections.abc import Mapping

import torch
from torch import nn


@torch.no_grad()
def load_weights(model: nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Copy `weights` into `model`. A tensor that is missing, unknown, or at odds with its tied twin is a ValueError."""
    own = model.state_dict(keep_vars=True)
    unknown = sorted(set(weights) - set(own))
    if unknown:
        raise ValueError(
            f"the actor sends {len(unknown)} tensors that the rollout model does not have, {unknown[0]} among them. "
            "With LoRA set actor_rollout_ref.model.lora.merge=True: rollout.name=hf takes merged weights"
        )
    loaded: dict[int, str] = {}  # storage -> name
    for name, weight in weights.items():
        target = own[name]
        storage = target.data_ptr()
        if storage in loaded and not torch.equal(target, weight.to(target.dtype)):
            raise ValueError(
                f"the rollout model ties {name} to {loaded[storage]}, but the actor sends two different tensors"
            )
        target.copy_(weight)
        loaded[storage] = name
    missing = sorted(name for name, target in own.items() if target.data_ptr() not in loaded)
    if missing:
        raise ValueError(
            f"the actor sends no weights for {len(missing)} tensors of the rollout model, {missing[0]} first"
        )
