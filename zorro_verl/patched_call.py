"""A call of a patched model, read: the batch's plan, the inputs of the packed row, and where its outputs belong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from zorro_verl.layer_call import no_mask
from zorro_verl.media import MODEL_INPUTS
from zorro_verl.padded_plan import build_padded_plan
from zorro_verl.prefixes import value_ids_where

UNSHARED_REASONS = ("use_cache", "inputs_embeds_grad", "multimodal")
_ANSWERED = (
    "input_ids inputs_embeds attention_mask position_ids use_cache logits_to_keep output_hidden_states "
    "mm_token_type_ids"
).split()
# Of what a stock forward hands on as **kwargs, these are the loss's.
_LOSS_ARGUMENTS = ("labels", "num_items_in_batch", "ignore_index", "shift_labels")


class PatchedCall:
    """What the arguments of a stock forward ask for.

    Args:
        arguments: by name, as the stock forward takes them, and ``temperature``; unset ones may be None or missing.
        response_length: see `build_padded_plan`.
        cache_by_default: what ``use_cache=None`` means to the plain model. It matters where positions start anew in
            mid-row and there is no mask: without a cache transformers takes that for several sequences.
        axes: how many axes ``position_ids`` may have, ``(A, B, S)``, see `zorro_verl.models.position_axes`.

    Attributes:
        inputs: arguments for the stock forward: of the packed row, or as they came when ``plan`` is None.
        plan: None for a call that has to stay as it is.
        unshared: why it has to, one of `UNSHARED_REASONS`; None where there is a plan, or no token.
        index: ``(B, S)`` int64, the packed token of each position, -1 at padding.
        place: ``(B, K)`` int64, the same for the K columns whose logits are kept, among those that the head computes.
        temperature: what the call brought, or None.
        loss_arguments: labels and what goes to the loss with them; empty without labels.
        return_dict: what the call said, or None.
        runs_again: whether checkpointed layers run again in the backward; the forward knows.
        aux_loss: whether the routers' loss is wanted; the forward knows.
        num_rows, num_tokens: B, and the tokens of all rows.

    Raises:
        ValueError: an argument of the wrong shape or dtype, or one that sharing can't answer.
    """

    def __init__(
        self,
        arguments: Mapping[str, Any],
        response_length: int | None,
        cache_by_default: bool,
        axes: tuple[int, ...] = (),
    ):
        given = {name: value for name, value in arguments.items() if value is not None}
        self.temperature = given.pop("temperature", None)
        self.return_dict = given.pop("return_dict", None)
        loss_arguments = {name: given.pop(name) for name in _LOSS_ARGUMENTS if name in given}
        self.loss_arguments = loss_arguments if "labels" in loss_arguments else {}
        name, values = _batch(given)
        mask, positions = given.get("attention_mask"), given.get("position_ids")
        self.num_rows, self.num_tokens = values.shape[0], values.shape[0] * values.shape[1]
        self.plan = self.index = self.place = self.unshared = None
        self.runs_again = self.aux_loss = False
        self.inputs = given
        if "past_key_values" in given or given.get("use_cache", False):
            self.unshared = "use_cache"
        elif name == "inputs_embeds" and values.requires_grad and torch.is_grad_enabled():
            # Rows that are equal may come from parameters that are not one: a shared row has one gradient for all.
            self.unshared = "inputs_embeds_grad"
        elif _has_media(given):
            self.unshared = "multimodal"
        if self.unshared is not None:
            if isinstance(mask, Tensor) and mask.dim() == 2:  # of a longer cache, or of other kinds: as the model's
                self.num_tokens = int((mask[:, -values.shape[1] :] != 0).expand(self.num_rows, -1).sum())
            return
        valid = _valid(mask, values)
        if not bool(valid.any()):
            self.num_tokens = 0
            return
        packed = mask is None and positions is not None and not given.get("use_cache", cache_by_default)
        positions = _positions(positions, valid, axes)
        sequence = _sequences(positions) if packed else None
        ids = values.long() if name == "input_ids" else value_ids_where(valid, values)
        where = positions if positions.dim() == 2 else value_ids_where(valid, positions.movedim(0, -1))
        plan, self.index, source = build_padded_plan(ids, where, valid, response_length, sequence=sequence)
        self.plan, self.num_tokens = plan, plan.num_row_tokens

        keep = given.get("logits_to_keep", 0)
        kept = self.index[:, slice(-keep, None) if isinstance(keep, int) else keep]
        needed, place = torch.unique(kept, return_inverse=True)
        padding = int(needed.numel() > 0 and needed[0] < 0)  # -1 sorts first
        self.place = place - padding
        _refuse({key: value for key, value in given.items() if key not in _ANSWERED})
        self.inputs = {
            name: values.flatten(0, 1)[source][None],
            "position_ids": positions.flatten(-2)[..., source].unsqueeze(-2),
            "attention_mask": no_mask(values),
            "use_cache": False,
            "logits_to_keep": needed[padding:],
        }
        if "output_hidden_states" in given:  # else the config decides
            self.inputs["output_hidden_states"] = given["output_hidden_states"]


def _batch(given: Mapping[str, Any]) -> tuple[str, Tensor]:
    """``input_ids`` ``(B, S)`` or ``inputs_embeds`` ``(B, S, E)``, whichever came."""
    if ("input_ids" in given) == ("inputs_embeds" in given):
        raise ValueError("input_ids: expected either input_ids or inputs_embeds, got both or neither")
    name = "input_ids" if "input_ids" in given else "inputs_embeds"
    values = given[name]
    if not isinstance(values, Tensor):
        raise ValueError(f"{name}: expected a tensor, got {type(values).__name__}")
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
    if not isinstance(attention_mask, Tensor) or attention_mask.shape not in (shape, (1, shape[1])):
        raise ValueError(f"attention_mask: expected (B, S) = {tuple(shape)} or None, got {_short(attention_mask)}")
    return (attention_mask.to(values.device) != 0).expand(shape)


def _positions(position_ids: Tensor | None, valid: Tensor, axes: tuple[int, ...]) -> Tensor:
    """``(B, S)`` or ``(A, B, S)`` int64, as they came; by default columns counted from each row's first token, so that
    padding carries no meaning.
    """
    if position_ids is None:
        return torch.arange(valid.shape[1], device=valid.device) - valid.int().argmax(1, keepdim=True)
    wrong = not isinstance(position_ids, Tensor) or position_ids.is_floating_point()
    own = () if wrong else position_ids.shape[:-2]
    allowed = [(), *((count,) for count in axes)]
    if wrong or own not in allowed or position_ids.shape[-2:] not in (valid.shape, (1, valid.shape[1])):
        more = "".join(f" or ({count}, B, S)" for count in axes)
        raise ValueError(
            f"position_ids: expected (B, S) = {tuple(valid.shape)}{more} integers, got {_short(position_ids)}"
        )
    return position_ids.to(valid.device).long().expand(own + valid.shape)


def _sequences(positions: Tensor) -> Tensor | None:
    """``(B, S)`` the number of the sequence in its row; transformers looks for them in positions of the text's own."""
    if positions.dim() == 3 and positions.shape[0] == 3:
        return None
    text = positions if positions.dim() == 2 else positions[0]
    return (text.diff(prepend=text[:, :1] - 1) != 1).cumsum(1)


def _has_media(given: Mapping[str, Any]) -> bool:
    """Whether a call brings images or videos: prompts are then more than their tokens and positions."""
    types = given.get("mm_token_type_ids")
    return any(name in given for name in MODEL_INPUTS) or (types is not None and bool(types.any()))


def _refuse(others: Mapping[str, Any]) -> None:
    for name, value in others.items():
        if value is not False:
            raise ValueError(
                f"{name}: a patched model takes no such argument, got {_short(value)}; unpatch() it for this call"
            )


def _short(value: Any) -> str:
    return f"a {tuple(value.shape)} {value.dtype} tensor" if isinstance(value, Tensor) else f"{value!r:.60}"
