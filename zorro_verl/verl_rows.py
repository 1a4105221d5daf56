"""verl's training batch, jagged or with dense responses, as `Rows`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from tensordict import NonTensorData, TensorDict
from torch import Tensor

from zorro_verl.grouping import Rows, number_by_first_appearance
from zorro_verl.log_probs import check_temperature
from zorro_verl.media import Media, Vision

MEDIA = "multi_modal_inputs"
GROUPS = "zorro_groups"  # the group of each row: found once for all rows of a call, and selected with them
# What verl's losses read of each response token.
PER_RESPONSE_TOKEN = (
    "response_mask",
    "loss_mask",
    "old_log_probs",
    "advantages",
    "ref_log_prob",
    "rollout_log_probs",
    "rollout_is_weights",
    "values",
    "returns",
)


def rows_from_verl(data: TensorDict, vision: Vision | None = None) -> tuple[Rows, Media]:
    """The rows of a TensorDict as verl's worker builds it, and the media that they bring.

    Args:
        data: ``input_ids`` and ``position_ids`` jagged over prompt + response; ``responses`` jagged (V1 trainer), or
            dense with ``attention_mask`` (V0); ``multi_modal_inputs`` a dict or None for each row, if any has media.
        vision: of the model.

    Raises:
        ValueError: a missing or dense key, media that the model does not take, or an empty prompt.
    """
    for key in ("input_ids", "position_ids", "responses"):
        if key not in data.keys():
            raise ValueError(
                f"{key}: expected in the batch, got keys {sorted(map(str, data.keys()))}; strategy=zorro trains and "
                "scores responses to prompts (verl's PPO and GRPO), not plain sequences"
            )
    input_ids, position_ids, responses = data["input_ids"], data["position_ids"], data["responses"]
    for name, value in (("input_ids", input_ids), ("position_ids", position_ids)):
        if not value.is_nested or value.lengths() is not None:
            raise ValueError(f"{name}: expected jagged rows without holes (verl's no-padding layout)")
        if value.is_floating_point():
            raise ValueError(f"{name}: expected integers, got {value.dtype}")
    if responses.is_nested:
        response_lens = responses.offsets().diff()
    elif "attention_mask" in data.keys():
        response_lens = data["attention_mask"][:, -responses.shape[1] :].bool().sum(1)
    else:
        raise ValueError("attention_mask: expected beside dense responses, got none")
    cu_seqlens = input_ids.offsets().cpu()
    positions = position_ids.values()
    prompt_lens = cu_seqlens.diff() - response_lens.cpu()
    media = media_of(data[MEDIA] if MEDIA in data.keys() else None, cu_seqlens.numel() - 1, vision)
    return Rows(input_ids.values().long(), positions.long(), cu_seqlens, prompt_lens, media.present), media


def groups_from_verl(data: TensorDict) -> Tensor | None:
    """``(B,)`` int64 on the host: the groups of some rows of a call as a plan takes them; None if nobody found them."""
    return number_by_first_appearance(data[GROUPS].cpu()) if GROUPS in data.keys() else None


def media_of(given: Any, num_rows: int, vision: Vision | None) -> Media:
    """The media of a batch from its ``multi_modal_inputs``, which may be absent.

    Raises:
        ValueError: not one entry for each row, or as `Media`.
    """
    if given is None:
        return Media([None] * num_rows, vision)
    if not isinstance(given, Iterable) or getattr(given, "ndim", 1) == 0:
        raise ValueError(f"{MEDIA}: expected an entry for each of {num_rows} rows, got {type(given).__name__}")
    items = [item.data if isinstance(item, NonTensorData) else item for item in given]
    if len(items) != num_rows:
        raise ValueError(f"{MEDIA}: expected an entry for each of {num_rows} rows, got {len(items)}")
    return Media(items, vision)


def check_batch(data: TensorDict, rows: Rows, vocabulary: int, axes: tuple[int, ...]) -> None:
    """Refuse what would otherwise fail later and on one rank only, where the others would wait for it.

    Raises:
        ValueError: a missing mask or temperature, rows that don't line up between fields, or a token that the model
            doesn't have.
    """
    for key in ("loss_mask", "temperature"):
        if key not in data.keys():
            raise ValueError(f"{key}: expected in the batch, got none")
    check_temperature(data["temperature"], rows.num_rows)
    check_tokens(rows, vocabulary)
    check_axes(rows, axes)
    positions = data["position_ids"].offsets().cpu()
    if not torch.equal(positions, rows.cu_seqlens):
        raise ValueError("position_ids: expected rows as long as those of input_ids, got others")
    lens = rows.response_lens
    for key in PER_RESPONSE_TOKEN:
        value = data.get(key, None)
        if isinstance(value, torch.Tensor) and value.is_nested and not torch.equal(value.offsets().diff().cpu(), lens):
            raise ValueError(f"{key}: expected rows as long as the responses, got others")


def check_tokens(rows: Rows, vocabulary: int) -> None:
    """Raise a ValueError for a token id outside of the model's embedding."""
    low, high = (int(x) for x in torch.aminmax(rows.tokens))
    if low < 0 or high >= vocabulary:
        raise ValueError(f"input_ids: expected tokens in 0..{vocabulary - 1}, got {low}..{high}")


def check_axes(rows: Rows, axes: tuple[int, ...]) -> None:
    """Raise a ValueError for positions with axes that the model does not take."""
    shape = rows.position_ids.shape[:-1]
    if shape and shape[0] not in axes:
        allowed = f"or {' or '.join(map(str, axes))} axes" if axes else "as the model has no mrope_section"
        raise ValueError(f"position_ids: expected one for each token, {allowed}, got {shape[0]} axes")
