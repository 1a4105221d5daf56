"""The actor's weights into the rollout model: by name, complete, experts stacked, and with tied tensors checked."""

from collections.abc import Mapping

import torch
from torch import nn


@torch.no_grad()
def load_weights(model: nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Copy `weights` into `model`. A tensor that is missing, unknown, or at odds with its tied twin is a ValueError."""
    own = model.state_dict(keep_vars=True)
    weights = stack_experts(weights, own)
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


def stack_experts(weights: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Put the matrices of single experts together, where the model holds those of a layer as one tensor.

    verl sends ``experts.3.gate_proj.weight`` and its like, as vLLM reads them. transformers' models have
    ``experts.gate_up_proj`` (experts, 2 x inner, hidden) and ``experts.down_proj`` (experts, hidden, inner).
    """
    stacked = dict(weights)
    for name, target in own.items():
        base, _, kind = name.rpartition(".")
        if not base.endswith(".experts") or name in stacked:
            continue
        kinds = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
        parts = [[f"{base}.{expert}.{each}.weight" for each in kinds] for expert in range(len(target))]
        if all(part in stacked for expert in parts for part in expert):
            stacked[name] = torch.stack([torch.cat([stacked.pop(part) for part in expert]) for expert in parts])
    return stacked
