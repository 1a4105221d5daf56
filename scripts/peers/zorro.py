"""Contestant: this project, from the padded rows on; finding the groups is part of its step."""

from __future__ import annotations

from peers.batch import Batch
from torch import Tensor, nn

from zorro_verl.grouping import Rows, find_prompt_groups
from zorro_verl.heads import SharedPrompt
from zorro_verl.models import install
from zorro_verl.packing import build_plan

PACKAGES = ("transformers", "zorro-verl")


class Contestant:
    def __init__(self, model: nn.Module, batch: Batch):
        install(model, attn_implementation="sdpa", use_split_attention=True)
        self.model, self.batch = model, batch

    def log_probs(self) -> Tensor:
        """Of every response token, row by row."""
        batch = self.batch
        rows = Rows.from_padded(batch.input_ids, batch.attention_mask, batch.position_ids, int(batch.response_length))
        plan = build_plan(rows, find_prompt_groups(rows))
        shared = SharedPrompt(plan, labels=rows.tokens[plan.label_index])
        packed = {"input_ids": plan.pack(rows.tokens)[None], "position_ids": plan.pack(rows.position_ids)[None]}
        return self.model(**packed, use_cache=False, zorro=shared)["log_probs"]
