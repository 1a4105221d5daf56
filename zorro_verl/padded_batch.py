"""A user's padded batch, checked, and as the jagged rows that verl's engine and loss read."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from transformers import PreTrainedModel
from verl.utils import tensordict_utils as tu

from zorro_verl.grouping import Rows, exclusive_cumsum, ranges
from zorro_verl.log_probs import check_temperature
from zorro_verl.media import Vision
from zorro_verl.micro_batches import MicroBatches
from zorro_verl.verl_rows import GROUPS, MEDIA, check_axes, check_tokens, media_of

INPUTS = ("input_ids", "attention_mask", "position_ids", "responses")
LOSS_INPUTS = ("old_log_probs", "advantages")
TENSORS = INPUTS + LOSS_INPUTS + ("response_mask", "ref_log_prob", "rollout_is_weights")
SETTINGS = ("temperature", "use_dynamic_bsz", "max_token_len", "micro_batch_size")


class PaddedBatch:
    """One batch on the model's device.

    Args:
        batch: a mapping of tensors, a TensorDict or a verl ``DataProto``. None is as good as absent.
        model: what will read it.
        axes: how many axes its ``position_ids`` may have, see `zorro_verl.models.position_axes`.
        required: keys that this call needs beside `INPUTS`.

    Attributes:
        tensors: those of `TENSORS` that are there, where the user put them.
        settings: those of `SETTINGS` that are there: in a DataProto's ``meta_info``, or beside the tensors, as
            ``DataProto.to_tensordict`` puts them.
        rows: the batch without its padding.
        media: what its rows bring beside tokens.
        groups: which rows share their prompt, found once for all that is done with the batch.
        valid: ``(B, R)`` bool on the device: which columns of ``responses`` hold a token.

    Raises:
        ValueError: a missing key, one that is no tensor or is there twice, a wrong shape or dtype, media or axes of
            positions that the model does not take, or a row without a prompt.
    """

    def __init__(
        self,
        batch: Any,
        model: PreTrainedModel,
        axes: tuple[int, ...],
        required: tuple[str, ...] = (),
    ):
        fields = _fields(batch)
        self.settings = {key: _scalar(fields[key]) for key in SETTINGS if key in fields}
        self.tensors = {key: fields[key] for key in TENSORS if key in fields}
        for key, value in self.tensors.items():
            if not isinstance(value, Tensor):
                raise ValueError(f"{key}: expected a tensor, got {type(value).__name__}; use torch.as_tensor")
        keys = INPUTS + required
        missing = [key for key in keys if key not in self.tensors]
        if missing:
            raise ValueError(f"batch: expected the keys {list(keys)}, got no {missing} beside {sorted(fields)}")
        responses, num_rows = self.tensors["responses"], len(torch.atleast_1d(self.tensors["input_ids"]))
        if responses.is_nested or responses.dim() != 2 or responses.shape[0] != num_rows:
            raise ValueError(f"responses: expected padded (B, R), got {tuple(responses.shape)}")
        self.width = responses.shape[1]
        device = next(model.parameters()).device
        ids, mask, positions = (self.tensors[name].to(device) for name in INPUTS[:3])
        self.media = media = media_of(fields.get(MEDIA), num_rows, Vision.of(model.config))
        self.rows = rows = Rows.from_padded(ids, mask, positions, self.width, media.present)
        check_tokens(rows, model.get_input_embeddings().num_embeddings)
        check_axes(rows, axes)
        media.check(rows)
        self.valid = mask[:, -self.width :].bool()
        if bool((self.valid & (ids[:, -self.width :] != responses.to(device))).any()):
            raise ValueError(
                f"responses: expected the last {self.width} columns of input_ids wherever attention_mask is 1, got "
                "others; input_ids are left-padded prompts followed by these responses"
            )
        self.groups = MicroBatches(rows, media)

    def jagged(
        self, temperature: float | Tensor, calculate_entropy: bool, loss_inputs: tuple[str, ...] = ()
    ) -> TensorDict:
        """verl's layout: jagged rows of valid tokens, and beside ``loss_inputs`` the mask of tokens in the loss.

        Args:
            temperature: one float, or ``(B,)``.
            calculate_entropy: whether the entropy is wanted.
            loss_inputs: what the policy loss reads, for a batch that is trained on; ``rollout_is_weights`` too where
                it is there. Zero at tokens that are not in the loss, for NaN times a mask of 0 is NaN.
        """
        rows, device = self.rows, self.rows.tokens.device
        check_temperature(temperature, rows.num_rows)
        prompt_tokens = ranges(rows.cu_seqlens[:-1], rows.prompt_lens, device)
        fields = {
            "input_ids": _nested(rows.tokens, rows.lens),
            "position_ids": _nested(rows.position_ids, rows.lens, jagged_dim=rows.position_ids.dim()),
            "prompts": _nested(rows.tokens[prompt_tokens], rows.prompt_lens),
            "responses": _nested(self._of_responses("responses"), rows.response_lens),
            GROUPS: torch.tensor(self.groups.group_index),
        }
        if loss_inputs:
            # A bool, which the loss sums exactly; all tokens when there is no mask.
            in_loss = self._of_responses("response_mask") != 0
            fields["response_mask"] = _nested(in_loss, rows.response_lens)
            for name in loss_inputs + tuple({"rollout_is_weights"} & self.tensors.keys()):
                values = self._of_responses(name).masked_fill(~in_loss, 0)
                fields[name] = _nested(values, rows.response_lens)
        data = TensorDict(fields, batch_size=rows.num_rows)
        if bool(rows.alone.any()):
            tu.assign_non_tensor_stack(data, MEDIA, self.media.rows)
        if isinstance(temperature, Tensor) and temperature.dim() > 0:
            data["temperature"] = temperature.to(device).expand(rows.num_rows)
        else:
            data.set_non_tensor("temperature", float(temperature))
        data.set_non_tensor("calculate_entropy", calculate_entropy)
        return data

    def unpack(self, values: Tensor, rows: Tensor, into: Tensor) -> None:
        """Write ``(R,)`` values of these rows' response tokens to their places in ``into`` ``(B, R)``."""
        valid = self.valid[rows]
        into[rows] = into.new_zeros(valid.shape).masked_scatter(valid, values)

    def _of_responses(self, name: str) -> Tensor:
        value = self.tensors.get(name, self.valid) if name == "response_mask" else self.tensors[name]
        if value.shape != self.valid.shape:
            raise ValueError(f"{name}: expected (B, R) = {tuple(self.valid.shape)}, got {tuple(value.shape)}")
        return value.detach().to(self.valid.device)[self.valid]


def _fields(batch: Any) -> dict[str, Any]:
    """What is read here of all that the batch holds, by name."""
    parts = (batch.batch, batch.non_tensor_batch, batch.meta_info) if hasattr(batch, "meta_info") else (batch,)
    fields: dict[str, Any] = {}
    for part in parts:
        if part is None and len(parts) > 1:
            continue
        if not hasattr(part, "keys"):
            raise ValueError(f"batch: expected a mapping of tensors or a DataProto, got {type(part).__name__}")
        for key in (*TENSORS, *SETTINGS, MEDIA):
            value = part[key] if key in part.keys() else None  # items() of a TensorDict would wrap what is no tensor
            if value is not None and key in fields:
                raise ValueError(f"{key}: expected once in a DataProto, got it beside the tensors and in meta_info")
            if value is not None:
                fields[key] = value
    return fields


def _scalar(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.dim() == 0 else value


def _nested(values: Tensor, lens: Tensor, jagged_dim: int = 1) -> Tensor:
    # Without its length bounds a jagged tensor pads to the sum of its rows.
    return torch.nested.nested_tensor_from_jagged(
        values,
        exclusive_cumsum(lens).to(values.device),
        jagged_dim=jagged_dim,
        min_seqlen=int(lens.min()),
        max_seqlen=int(lens.max()),
    )
