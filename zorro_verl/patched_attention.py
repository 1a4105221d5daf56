"""The forward of one patched attention layer: padded hidden states in and out, each shared prompt computed once.

A layer sees no tokens. Rows share the prefix on which their hidden states and position embeddings are equal bit for
bit; or what the caller says they share.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zorro_verl.grouping import exclusive_cumsum, ranges
from zorro_verl.interleaved import as_lists, partition
from zorro_verl.models import (
    ATTENTION_NAME,
    SharedAttention,
    check_causal,
    check_training,
    check_window,
    sliding_window,
)
from zorro_verl.padded_plan import build_padded_plan
from zorro_verl.patched_forward import PatchCounts
from zorro_verl.prefixes import value_ids
from zorro_verl.reconstruct import gather_rows
from zorro_verl.varlen import Kernels


class PatchedAttention:
    """The ``forward`` of one attention layer, ``(B, S, E)`` in and out; zeros at padding.

    A call with ``past_key_values``, which wants keys and values in the batch's own shape, runs as the plain layer does
    and is counted. Gradients of a shared prompt arrive at the hidden states of its first row, summed over the group.

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
        if response_length is not None and (type(response_length) is not int or response_length < 1):
            raise ValueError(f"response_len: expected None or an int of at least 1, got {response_length!r}")
        if prompt_groups is not None and response_length is None:
            raise ValueError("response_len: expected a width beside prompt_groups, which says nothing of it, got None")
        self.layer = layer
        self.kernels = kernels
        self.split = split
        self.response_length = response_length
        self.prompt_groups = None if prompt_groups is None else as_lists(prompt_groups)
        self.counts = PatchCounts()

    def attach(self) -> None:
        """Become the layer's forward, in place of another patch if there is one."""
        previous = self.layer.__dict__.get("forward")
        if previous is not None and not isinstance(previous, PatchedAttention):
            raise ValueError(
                f"attention_layer.forward: expected the class's own, got {previous!r:.80}; remove it first"
            )
        self.layer.forward = self

    def detach(self) -> None:
        """Leave the layer as it was."""
        del self.layer.forward

    @property
    def stats(self) -> Mapping[str, Any]:
        """The last call's counts, under the names of `DeduplicatedActor.stats`; the only fallback is a cache."""
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
        if hidden_states.dim() != 3:
            raise ValueError(f"hidden_states: expected (B, S, E), got {tuple(hidden_states.shape)}")
        cos, sin = (_per_row(x, hidden_states) for x in position_embeddings)
        plan, index, valid = self._plan(hidden_states, cos, sin, attention_mask)
        pack = lambda x: plan.pack(x[valid], dim=0)[None]  # noqa: E731
        shared = SharedAttention(plan, self.kernels, self.split)
        config = layer.config
        # The layer looks its attention up in the config that all layers share; only this call of it is meant.
        layer.config = copy.copy(config)
        layer.config.stock_config = getattr(config, "stock_config", config)
        layer.config._attn_implementation = ATTENTION_NAME
        try:
            output, _ = stock(layer, pack(hidden_states), (pack(cos), pack(sin)), None, None, zorro=shared)
        finally:
            layer.config = config
        return gather_rows(output[0], index), None

    @torch.compiler.disable  # host arithmetic on what the rows share
    def _plan(self, hidden_states: Tensor, cos: Tensor, sin: Tensor, attention_mask: Tensor | None):
        """The plan, ``(B, S)`` the packed token of each position, and ``(B, S)`` bool where there are tokens."""
        valid = _valid(attention_mask, hidden_states)
        ids = torch.zeros(valid.shape, dtype=torch.int64, device=valid.device)
        positions = ids
        if self.prompt_groups is None:
            ids = ids.clone()
            ids[valid] = value_ids(torch.cat([_bytes(x[valid]) for x in (hidden_states, cos, sin)], 1))
        groups = self._groups(hidden_states, cos, sin, valid)
        plan, index = build_padded_plan(ids, positions, valid, self.response_length, groups)
        check_window(getattr(self.layer, "sliding_window", sliding_window(self.layer.config)), plan.longest_row)
        self.counts = PatchCounts(plan.num_row_tokens, plan.num_tokens, plan.num_groups)
        return plan, index, valid

    def _groups(self, hidden_states: Tensor, cos: Tensor, sin: Tensor, valid: Tensor) -> Tensor | None:
        """``(B,)`` on the host, of the groups that the caller gave; None when they are to be found."""
        if self.prompt_groups is None:
            return None
        num_rows, width = valid.shape
        order, sizes = partition(self.prompt_groups, num_rows)
        if self.response_length >= width:
            raise ValueError(f"response_len: expected a width below {width} columns, got {self.response_length}")
        group_index, first = torch.empty_like(order), torch.empty_like(order)
        group_index[order] = torch.arange(sizes.numel()).repeat_interleave(sizes)
        first[order] = order[exclusive_cumsum(sizes)[:-1]].repeat_interleave(sizes)
        prompt = valid.clone()
        prompt[:, width - self.response_length :] = False
        counts = prompt.sum(1).cpu()
        unlike = counts != counts[first]
        if not bool(unlike.any()):
            own = prompt.flatten().nonzero().flatten()
            source = own[ranges(exclusive_cumsum(counts)[first], counts, own.device)]
            for values in (hidden_states, cos, sin):
                flat = values.flatten(0, 1)
                unlike[(own[~_close(flat[own], flat[source])] // width).cpu()] = True
        if bool(unlike.any()):
            row = int(unlike.nonzero()[0])
            raise ValueError(
                f"prompt_groups: expected equal prompts in a group, got row {row} unlike row {int(first[row])}; "
                "leave prompt_groups out to have them found"
            )
        return group_index


def _valid(attention_mask: Tensor | None, hidden_states: Tensor) -> Tensor:
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
    if not torch.equal(visible & valid[:, :, None], causal & valid[:, :, None]):
        raise ValueError(
            "attention_mask: expected a causal one with padding, got another (a sliding window, or several sequences "
            "in one row?), which a patched layer can't follow"
        )
    return valid


def _per_row(embedding: Tensor, hidden_states: Tensor) -> Tensor:
    """``(1, S, D)`` or ``(B, S, D)`` -> ``(B, S, D)``."""
    rows, columns = hidden_states.shape[:2]
    if embedding.dim() != 3 or embedding.shape[0] not in (1, rows) or embedding.shape[1] != columns:
        raise ValueError(f"position_embeddings: expected ({rows} or 1, {columns}, D), got {tuple(embedding.shape)}")
    return embedding.expand(rows, -1, -1)


def _bytes(values: Tensor) -> Tensor:
    return values.detach().contiguous().view(torch.uint8)


def _close(a: Tensor, b: Tensor) -> Tensor:
    """``(n,)`` bool: equal up to what the order of additions in different rows of a batch can make of them."""
    tolerance = 1e-5 if a.dtype in (torch.float32, torch.float64) else 2**-6
    return (a - b).abs().amax(1) <= tolerance * a.abs().amax(1)
