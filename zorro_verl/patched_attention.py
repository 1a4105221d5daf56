"""The forward of one patched attention layer: padded hidden states in and out, each shared prompt computed once.

A layer sees no tokens. Rows share the prefix on which their hidden states and position embeddings are equal bit for
bit; or what the caller says they share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zorro_verl.families import check_causal, check_training, window_of
from zorro_verl.interleaved import as_lists, first_of_rows, partition, prompt_pairs
from zorro_verl.layer_call import SharedCall, led_config
from zorro_verl.models import check_noise, name_of
from zorro_verl.padded_plan import build_padded_plan, check_response_length
from zorro_verl.patched_forward import PatchCounts
from zorro_verl.prefixes import value_ids_where
from zorro_verl.reconstruct import gather_rows
from zorro_verl.varlen import Kernels


class PatchedAttention:
    """The ``forward`` of one attention layer, ``(B, S, E)`` in and out; zeros at padding.

    A call with ``past_key_values``, which wants keys and values in the batch's own shape, runs as the plain layer does
    and is counted. Gradients of a shared prompt arrive at the hidden states of its first row, summed over the group.
    The layer sees what it does inside its model: what stands before in the row, within its own sliding window if it
    has one, whether the mask says so (``(B, 1, S, S)``) or only where padding is (None, ``(B, S)``).

    Args:
        layer: such as ``model.model.layers[0].self_attn``.
        kernels, split: see `zorro_verl.models.SeamForward`.
        response_length: responses stand in the last so many columns; None to find where rows stop being equal.
        prompt_groups: rows that share their prompt, as `ZoRRoTrain.find_prompt_groups` gives them.
    """

    def __init__(
        self,
        layer: nn.Module,
        kernels: Kernels | None,
        split: bool,
        response_length: int | None = None,
        prompt_groups: Sequence[Sequence[int]] | None = None,
    ):
        if prompt_groups is not None and response_length is None:
            raise ValueError("response_len: expected a width beside prompt_groups, which says nothing of it, got None")
        self.layer = layer
        self.kernels = kernels
        self.split = split
        self.response_length = check_response_length(response_length)
        self.first = None  # of each row's group, as the caller gave them
        if prompt_groups is not None:
            groups = as_lists(prompt_groups)
            self.first = first_of_rows(*partition(groups, sum(map(len, groups))))
        self.counts = PatchCounts()

    def attach(self) -> None:
        """Become the layer's forward, in place of another patch if there is one."""
        previous = self.layer.__dict__.get("forward")
        if previous is not None and not isinstance(previous, PatchedAttention):
            raise ValueError(
                f"attention_layer.forward: expected the class's own, got {name_of(previous)}; remove it first"
            )
        self.layer.forward = self

    def detach(self) -> None:
        """Leave the layer as it was."""
        del self.layer.forward

    @property
    def stats(self) -> Mapping[str, Any]:
        """The last call's counts, under the names of `DeduplicatedActor.stats`."""
        return self.counts.stats()

    def __call__(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        zorro: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        layer, stock = self.layer, type(self.layer).forward
        if zorro is not None:  # the whole model is patched, and says how attention runs
            kwargs["zorro"] = zorro
        if kwargs.get("output_attentions"):
            raise ValueError("output_attentions: a patched layer has no weights to return, got True; unpatch() it")
        if zorro is not None or past_key_values is not None:
            rows, columns = hidden_states.shape[:2]
            self.counts = PatchCounts(rows * columns, rows * columns, 0, rows, None if zorro else "use_cache")
            return stock(layer, hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)
        check_causal(layer.config)
        check_training(layer.config, layer.training)
        check_noise(layer)
        if hidden_states.dim() != 3:
            raise ValueError(f"hidden_states: expected (B, S, E), got {tuple(hidden_states.shape)}")
        cos, sin = (_per_row(x, hidden_states) for x in position_embeddings)
        plan, index, source = self._plan(hidden_states, cos, sin, attention_mask)
        pack = lambda x: x.flatten(0, 1)[source][None]  # noqa: E731
        windows = {window_of(layer.config, layer.layer_idx)}
        shared = SharedCall(plan, self.kernels, self.split, windows=windows)
        config = layer.config
        # The layer looks its attention up in the config that all layers share; only this call of it is meant.
        layer.config = led_config(config)
        try:
            output, _ = stock(layer, pack(hidden_states), (pack(cos), pack(sin)), None, None, zorro=shared)
        finally:
            layer.config = config
        return gather_rows(output[0], index), None

    @torch.compiler.disable  # host arithmetic on what the rows share
    def _plan(self, hidden_states: Tensor, cos: Tensor, sin: Tensor, attention_mask: Tensor | None):
        """What `build_padded_plan` returns."""
        valid = _valid(attention_mask, hidden_states, window_of(self.layer.config, self.layer.layer_idx))
        positions = torch.zeros(valid.shape, dtype=torch.int64, device=valid.device)
        groups = self._groups(hidden_states, cos, sin, valid)
        ids = value_ids_where(valid, hidden_states, cos, sin) if groups is None else positions
        plan, index, source = build_padded_plan(ids, positions, valid, self.response_length, groups)
        self.counts = PatchCounts(plan.num_row_tokens, plan.num_tokens, plan.num_groups)
        return plan, index, source

    def _groups(self, hidden_states: Tensor, cos: Tensor, sin: Tensor, valid: Tensor) -> Tensor | None:
        """``(B,)`` on the host, the first row of each row's group as the caller gave it; None without any."""
        if self.first is None:
            return None
        first, (num_rows, width) = self.first, valid.shape
        if first.numel() != num_rows:
            raise ValueError(f"prompt_groups: expected each of the batch's {num_rows} rows, got {first.numel()}")
        if self.response_length >= width:
            raise ValueError(f"response_len: expected a width below {width} columns, got {self.response_length}")
        counts = valid[:, : width - self.response_length].sum(1).cpu()
        unlike = counts != counts[first]
        if not bool(unlike.any()):
            own, source = prompt_pairs(valid, width - self.response_length, counts, first)
            for values in (hidden_states, cos, sin):
                flat = values.flatten(0, 1)
                unlike[(own[~_close(flat[own], flat[source])] // width).cpu()] = True
        if bool(unlike.any()):
            row = int(unlike.nonzero()[0])
            raise ValueError(
                f"prompt_groups: expected equal prompts in a group, got row {row} unlike row {int(first[row])}; "
                "leave prompt_groups out to have them found"
            )
        return first


def _valid(attention_mask: Tensor | None, hidden_states: Tensor, window: int | None) -> Tensor:
    """``(B, S)`` bool from a mask as models hand it to their layers: none, ``(B, S)``, or causal ``(B, 1, S, S)``."""
    shape = hidden_states.shape[:2]
    if attention_mask is not None and not isinstance(attention_mask, Tensor):
        raise ValueError(f"attention_mask: expected None or a tensor, got {type(attention_mask).__name__}")
    if attention_mask is None:
        return torch.ones(shape, dtype=torch.bool, device=hidden_states.device)
    if attention_mask.shape == shape:
        return attention_mask != 0
    rows, heads, *square = attention_mask.shape if attention_mask.dim() == 4 else (0, 0)
    if rows not in (1, shape[0]) or heads != 1 or square != [shape[1], shape[1]]:
        raise ValueError(
            f"attention_mask: expected None, (B, S) or (B, 1, S, S) with (B, S) = {tuple(shape)}, "
            f"got {tuple(attention_mask.shape)}"
        )
    visible = attention_mask[:, 0] if attention_mask.dtype == torch.bool else attention_mask[:, 0] == 0
    visible = visible.expand(shape[0], -1, -1)
    valid = visible.diagonal(dim1=1, dim2=2)
    causal = valid[:, None, :] & torch.ones(square, dtype=torch.bool, device=valid.device).tril()
    if window is not None:
        place = valid.cumsum(1)  # in the row without padding, as the plan counts
        causal &= place[:, None, :] > place[:, :, None] - window
    if not torch.equal(visible & valid[:, :, None], causal & valid[:, :, None]):
        raise ValueError(
            f"attention_mask: expected a causal one with padding and the layer's window ({window}), got another "
            "(another window, padding inside a row, or several sequences in one row?), which a patched layer can't "
            "follow"
        )
    return valid


def _per_row(embedding: Tensor, hidden_states: Tensor) -> Tensor:
    """``(1, S, D)`` or ``(B, S, D)`` -> ``(B, S, D)``."""
    rows, columns = hidden_states.shape[:2]
    if embedding.dim() != 3 or embedding.shape[0] not in (1, rows) or embedding.shape[1] != columns:
        raise ValueError(f"position_embeddings: expected ({rows} or 1, {columns}, D), got {tuple(embedding.shape)}")
    return embedding.expand(rows, -1, -1)


def _close(a: Tensor, b: Tensor) -> Tensor:
    """``(n,)`` bool: equal up to what the order of additions in different rows of a batch can make of them."""
    tolerance = 1e-5 if a.dtype in (torch.float32, torch.float64) else 2**-6
    return (a - b).abs().amax(1) <= tolerance * a.abs().amax(1)
