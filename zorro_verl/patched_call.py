"""A call of a patched model, read: the batch's plan, the inputs of the packed row, and where its outputs belong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from zorro_verl.padded_plan import build_padded_plan
from zorro_verl.prefixes import value_ids

# Of what a stock forward hands on as **kwargs, these are the loss's.
_LOSS_ARGUMENTS = ("labels", "num_items_in_batch", "ignore_index", "shift_labels")


class PatchedCall:
    """What the arguments of a stock forward ask for.

    Args:
        arguments: by name, as the stock forward takes them, and ``temperature``; unset ones may be None or missing.
        response_length: see `build_padded_plan`.

    Attributes:
        inputs: arguments for the stock forward: of the packed row, or as they came when ``plan`` is None.
        plan: None for a call with a cache, which has to stay as it is.
        index: ``(B, S)`` int64, the packed token of each position, -1 at padding.
        place: ``(B, K)`` int64, the same for the K columns whose logits are kept, among those that the head computes.
        temperature: what the call brought, or None.
        loss_arguments: labels and what goes to the loss with them; empty without labels.
        return_dict: what the call said, or None.
        num_rows, num_tokens: B, and the tokens of all rows.
        checkpointed: set by the forward: whether layers run again in the backward.

    Raises:
        ValueError: an argument of the wrong shape or dtype, or one that sharing can't answer.
    """

    def __init__(self, arguments: Mapping[str, Any], response_length: int | None):
        given = {name: value for name, value in arguments.items() if value is not None}
        self.temperature = given.pop("temperature", None)
        self.return_dict = given.pop("return_dict", None)
        loss_arguments = {name: given.pop(name) for name in _LOSS_ARGUMENTS if name in given}
        self.loss_arguments = loss_arguments if {"labels", "shift_labels"} & loss_arguments.keys() else {}
        name, values = _batch(given)
        self.num_rows = values.shape[0]
        self.checkpointed = False
        self.plan = self.index = self.place = None
        if "past_key_values" in given or given.get("use_cache", False):
            self.num_tokens = values.shape[0] * values.shape[1]
            self.inputs = given
            return

        del given[name]
        given.pop("use_cache", None)
        valid = _valid(given.pop("attention_mask", None), values)
        positions = _positions(given.pop("position_ids", None), valid)
        keep = given.pop("logits_to_keep", 0)
        hidden_states = given.pop("output_hidden_states", None)
        _refuse(given)
        ids = values.long() if name == "input_ids" else _ids(values, valid)
        self.plan, self.index = build_padded_plan(ids, positions, valid, response_length)
        self.num_tokens = self.plan.num_row_tokens

        kept = self.index[:, slice(-keep, None) if isinstance(keep, int) else keep]
        needed, place = torch.unique(kept, return_inverse=True)
        padding = int(needed.numel() > 0 and needed[0] < 0)  # -1 sorts first
        self.place = place - padding
        self.inputs = {
            name: self.plan.pack(values[valid], dim=0)[None],
            "position_ids": self.plan.pack(positions[valid])[None],
            "use_cache": False,
            "logits_to_keep": needed[padding:],
            "output_hidden_states": hidden_states,
        }


def _batch(given: Mapping[str, Any]) -> tuple[str, Tensor]:
    """``input_ids`` ``(B, S)`` or ``inputs_embeds`` ``(B, S, E)``, whichever came."""
    if ("input_ids" in given) == ("inputs_embeds" in given):
        raise ValueError("input_ids: expected either input_ids or inputs_embeds, got both or neither")
    name = "input_ids" if "input_ids" in given else "inputs_embeds"
    values = given[name]
    if name == "input_ids" and (values.dim() != 2 or values.is_floating_point()):
        raise ValueError(f"input_ids: expected (B, S) integers, got {tuple(values.shape)} {values.dtype}")
    if name == "inputs_embeds" and (values.dim() != 3 or not values.is_floating_point()):
        raise ValueError(f"inputs_embeds: expected (B, S, E) floats, got {tuple(values.shape)} {values.dtype}")
    return name, values


def _valid(attention_mask: Tensor | None, values: Tensor) -> Tensor:
    """``(B, S)`` bool."""
    shape = values.shape[:2]
    if attention_mask is None:
        return torch.ones(shape, dtype=torch.bool, device=values.device)
    if not isinstance(attention_mask, Tensor) or attention_mask.shape != shape:
        raise ValueError(f"attention_mask: expected (B, S) = {tuple(shape)} or None, got {_short(attention_mask)}")
    return attention_mask.to(values.device) != 0


def _positions(position_ids: Tensor | None, valid: Tensor) -> Tensor:
    """``(B, S)`` int64; by default columns counted from each row's first token, so that padding carries no meaning."""
    if position_ids is None:
        return torch.arange(valid.shape[1], device=valid.device) - valid.int().argmax(1, keepdim=True)
    if position_ids.is_floating_point() or position_ids.shape not in (valid.shape, (1, valid.shape[1])):
        raise ValueError(f"position_ids: expected (B, S) = {tuple(valid.shape)} integers, got {_short(position_ids)}")
    return position_ids.to(valid.device).long().expand(valid.shape)


def _ids(embeddings: Tensor, valid: Tensor) -> Tensor:
    """``(B, S)`` int64 that stand for the tokens behind embeddings: equal where these are equal bit for bit."""
    ids = torch.zeros(valid.shape, dtype=torch.int64, device=valid.device)
    ids[valid] = value_ids(embeddings[valid])
    return ids


def _refuse(others: Mapping[str, Any]) -> None:
    for name, value in others.items():
        if value is not False:
            raise ValueError(
                f"{name}: a patched model takes no such argument, got {_short(value)}; unpatch() it for this call"
            )


def _short(value: Any) -> str:
    return f"a {tuple(value.shape)} {value.dtype} tensor" if isinstance(value, Tensor) else f"{value!r:.60}"
