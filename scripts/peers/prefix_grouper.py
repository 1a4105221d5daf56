"""Contestant: PrefixGrouper, as its tutorial uses it, through its own registration with transformers.

It hands the padding masks of its two calls to an attention function that transformers knows by name. It was written for
flash-attention; a CPU has sdpa, which takes such masks through `padded_attention`. The prompts are given to it already
separated from their rows, so that finding the groups costs it nothing.
"""

from __future__ import annotations

import torch
from peers.batch import Batch
from peers.causal_sdpa import causal_attention
from peers.plain import picked_log_probs
from prefix_grouper import PrefixGrouper
from prefix_grouper.utils.register_transformers import register_attention
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

PACKAGES = ("transformers", "prefix_grouper")
ATTENTION = "padded_causal_sdpa"


class Contestant:
    """The documented use: logits of all tokens, of which it then takes those of the responses."""

    def __init__(self, model: nn.Module, batch: Batch):
        register_attention()
        ALL_ATTENTION_FUNCTIONS.register(ATTENTION, padded_attention)
        model.set_attn_implementation("prefix_grouper_attention")
        self.model, self.batch = model, batch
        first_rows = batch.row_counts.cumsum(0) - batch.row_counts
        self.prompts = batch.input_ids[first_rows, : batch.prompt_width]
        self.prompt_mask = batch.attention_mask[first_rows, : batch.prompt_width].bool()

    def log_probs(self) -> Tensor:
        """Of every response token, row by row."""
        batch = self.batch
        grouper = PrefixGrouper.from_ungrouped_masks(
            prefix_mask=self.prompt_mask,
            suffix_mask=batch.response_mask,
            group_sizes=batch.row_counts.tolist(),
            padding_mode="right",
            device=batch.input_ids.device,
        )
        _, _, predictors, mask = grouper.split_output(self.forward(grouper), include_prefix_last=1)
        mask = mask[:, 1:]
        return picked_log_probs(self.logits(predictors[:, :-1][mask]), batch.responses[mask])

    def inputs(self, grouper: PrefixGrouper) -> dict:
        batch = self.batch
        return {
            "input_ids": grouper.concat_input(self.prompts, self.prompt_mask, batch.responses, batch.response_mask),
            "attention_mask": grouper.padding_mask,
            "position_ids": positions(grouper),
            "use_cache": False,
            "prefix_grouper": grouper,
            "prefix_grouper_attn_func": ATTENTION,
        }

    def forward(self, grouper: PrefixGrouper) -> Tensor:
        return self.model(**self.inputs(grouper)).logits

    def logits(self, predictors: Tensor) -> Tensor:
        return predictors


class ResponseHead(Contestant):
    """The same with the hidden states split in place of the logits, so that the head runs on response tokens only."""

    def forward(self, grouper: PrefixGrouper) -> Tensor:
        return self.model.model(**self.inputs(grouper)).last_hidden_state

    def logits(self, predictors: Tensor) -> Tensor:
        return self.model.lm_head(predictors)


def positions(grouper: PrefixGrouper) -> Tensor:
    """``(groups, length)``: every response counts on from its prompt."""
    rows = [
        torch.cat([torch.arange(info.prefix_len), *(torch.arange(n) + info.prefix_len for n in info.suffix_lens)])
        for info in grouper.group_info
    ]
    return nn.utils.rnn.pad_sequence(rows, batch_first=True)


def padded_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    *,
    scaling: float,
    **others: object,
) -> tuple[Tensor, None]:
    """Causal attention with the last query at the last key, under the padding mask ``(rows, keys)``.

    Returns:
        ``(rows, T, heads, D)``, and None in place of the attention weights.
    """
    mask = None if attention_mask.all() else attention_mask
    return causal_attention(query, key, value, scaling, mask).transpose(1, 2), None
