"""A user's padded batch, checked, and as the jagged rows that verl's engine and loss read."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from zorro_verl.grouping import Rows, exclusive_cumsum, ranges
from zorro_verl.verl_rows import check_tokens

INPUTS = ("input_ids", "attention_mask", "position_ids", "responses")
LOSS_INPUTS = ("old_log_probs", "advantages")
OPTIONAL_LOSS_INPUTS = ("ref_log_prob", "rollout_is_weights")


class PaddedBatch:
    """One batch on the model's device.

    Args:
        batch: a mapping of tensors, a TensorDict or a verl ``DataProto``.
        device: where the model is.
        vocabulary: token ids that the model has.
        required: keys that this call needs beside `INPUTS`.

    Attributes:
        tensors: the batch's tensors by name, where the user put them.
        settings: a DataProto's ``meta_info``, else empty.
        rows: the batch without its padding.
        valid: ``(B, R)`` bool on the device: which columns of ``responses`` hold a token.

    Raises:
        ValueError: a missing key, a wrong shape or dtype, images, or a row without a prompt.
    """

    def __init__(self, batch: Any, device: torch.device, vocabulary: int, required: tuple[str, ...] = ()):
        is_data_proto = hasattr(batch, "meta_info")
        source = batch.batch if is_data_proto else batch
        if not hasattr(source, "items"):
            raise ValueError(f"batch: expected a mapping of tensors or a DataProto, got {type(batch).__name__}")
        if is_data_proto and any(batch.non_tensor_batch.get("multi_modal_inputs", ())):
            raise ValueError("multi_modal_inputs: expected text-only rows, got images or other media")
        self.settings: Mapping[str, Any] = batch.meta_info if is_data_proto else {}
        self.tensors = {str(key): value for key, value in source.items() if isinstance(value, Tensor)}
        keys = INPUTS + required
        missing = [key for key in keys if key not in self.tensors]
        if missing:
            raise ValueError(f"batch: expected the keys {list(keys)}, got no {missing} in {sorted(self.tensors)}")
        responses = self.tensors["responses"]
        if responses.dim() != 2 or responses.shape[0] != self.tensors["input_ids"].shape[0]:
            raise ValueError(f"responses: expected (B, R), got {tuple(responses.shape)}")
        self.width = responses.shape[1]
        ids, mask, positions = (self.tensors[name].to(device) for name in INPUTS[:3])
        self.rows = rows = Rows.from_padded(ids, mask, positions, self.width)
        check_tokens(rows, vocabulary)
        if rows.position_ids.dim() != 1:
            raise ValueError(f"position_ids: expected (B, S) for a text model, got {rows.position_ids.shape[0]} axes")
        self.valid = mask[:, -self.width :].bool()
        if bool((self.valid & (ids[:, -self.width :] != responses.to(device))).any()):
            raise ValueError(
                f"responses: expected the last {self.width} columns of input_ids wherever attention_mask is 1, got "
                "others; input_ids are left-padded prompts followed by these responses"
            )

    def jagged(self, temperature: float | Tensor, calculate_entropy: bool, loss: bool = False) -> TensorDict:
        """verl's layout: jagged rows of valid tokens, and with ``loss`` what its policy loss reads.

        Args:
            temperature: one float, or ``(B,)``.
            calculate_entropy: whether the entropy is wanted.
            loss: whether the batch is trained on.
        """
        rows, device = self.rows, self.rows.tokens.device
        if not isinstance(temperature, Tensor | Real) or isinstance(temperature, bool):
            raise ValueError(f"temperature: expected a float or a tensor, got {type(temperature).__name__}")
        if not bool(torch.as_tensor(temperature >= 0).all()):
            raise ValueError(f"temperature: expected values of at least 0, got {temperature}")
        if isinstance(temperature, Tensor) and temperature.dim() > 0 and temperature.shape != (rows.num_rows,):
            raise ValueError(f"temperature: expected a float or ({rows.num_rows},), got {tuple(temperature.shape)}")
        prompt_tokens = ranges(rows.cu_seqlens[:-1], rows.prompt_lens, device)
        fields = {
            "input_ids": _nested(rows.tokens, rows.lens),
            "position_ids": _nested(rows.position_ids, rows.lens),
            "prompts": _nested(rows.tokens[prompt_tokens], rows.prompt_lens),
            "responses": self._response("responses"),
        }
        if loss:
            names = LOSS_INPUTS + tuple(name for name in OPTIONAL_LOSS_INPUTS if name in self.tensors)
            fields |= {name: self._response(name) for name in names}
            fields["response_mask"] = self._response("response_mask")
        data = TensorDict(fields, batch_size=rows.num_rows)
        if isinstance(temperature, Tensor) and temperature.dim() > 0:
            data["temperature"] = temperature.to(device)
        else:
            data.set_non_tensor("temperature", float(temperature))
        data.set_non_tensor("calculate_entropy", calculate_entropy)
        return data

    def unpack(self, values: Tensor, rows: Tensor, into: Tensor) -> None:
        """Write ``(R,)`` values of these rows' response tokens to their places in ``into`` ``(B, R)``."""
        valid = self.valid[rows]
        into[rows] = into.new_zeros(valid.shape).masked_scatter(valid, values)

    def _response(self, name: str) -> Tensor:
        value = self.tensors.get(name, self.valid) if name == "response_mask" else self.tensors[name]
        if name == "response_mask":
            value = value != 0  # summed by the loss, which in a short dtype would round
        if value.shape != self.valid.shape:
            raise ValueError(f"{name}: expected (B, R) = {tuple(self.valid.shape)}, got {tuple(value.shape)}")
        return _nested(value.to(self.valid.device)[self.valid], self.rows.response_lens)


def _nested(values: Tensor, lens: Tensor) -> Tensor:
    # Without its length bounds a jagged tensor pads to the sum of its rows.
    return torch.nested.nested_tensor_from_jagged(
        values, exclusive_cumsum(lens).to(values.device), min_seqlen=int(lens.min()), max_seqlen=int(lens.max())
    )
