"""verl's training batch, jagged or with dense responses, as `Rows`."""

from __future__ import annotations

import torch
from tensordict import TensorDict

from zorro_verl.grouping import Rows


def rows_from_verl(data: TensorDict) -> Rows:
    """The rows of a TensorDict as verl's worker builds it.

    Args:
        data: ``input_ids`` and ``position_ids`` jagged over prompt + response; ``responses`` jagged (V1 trainer), or
            dense with ``attention_mask`` (V0).

    Raises:
        ValueError: a missing or dense key, multi-modal rows, or an empty prompt.
    """
    for key in ("input_ids", "position_ids", "responses"):
        if key not in data.keys():
            raise ValueError(
                f"{key}: expected in the batch, got keys {sorted(map(str, data.keys()))}; strategy=zorro trains and "
                "scores responses to prompts (verl's PPO and GRPO), not plain sequences"
            )
    input_ids, position_ids, responses = data["input_ids"], data["position_ids"], data["responses"]
    for name, value in (("input_ids", input_ids), ("position_ids", position_ids)):
        if not value.is_nested:
            raise ValueError(f"{name}: expected a jagged tensor (verl's no-padding layout), got {tuple(value.shape)}")
    if any(dict(inputs) for inputs in _per_row(data, "multi_modal_inputs")):
        raise ValueError(
            "multi_modal_inputs: expected text-only rows for this model type, got images or other media; "
            "use actor_rollout_ref.actor.strategy=fsdp2"
        )
    if responses.is_nested:
        response_lens = responses.offsets().diff()
    elif "attention_mask" in data.keys():
        response_lens = data["attention_mask"][:, -responses.shape[1] :].sum(1)
    else:
        raise ValueError("attention_mask: expected beside dense responses, got none")
    cu_seqlens = input_ids.offsets()
    positions = position_ids.values()
    return Rows(input_ids.values(), positions.long(), cu_seqlens, cu_seqlens.diff().cpu() - response_lens.cpu())


def _per_row(data: TensorDict, key: str) -> list:
    if key not in data.keys():
        return []
    value = data[key]
    return value.tolist() if hasattr(value, "tolist") and not isinstance(value, torch.Tensor) else list(value)
