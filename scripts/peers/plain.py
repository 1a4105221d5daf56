"""Contestant: the model as Hugging Face ships it, on the padded rows, with the head on response columns only."""

from __future__ import annotations

from peers.batch import Batch
from torch import Tensor, nn

PACKAGES = ("transformers",)


class Contestant:
    def __init__(self, model: nn.Module, batch: Batch):
        self.model, self.batch = model, batch

    def log_probs(self) -> Tensor:
        """Of every response token, row by row."""
        batch, columns = self.batch, int(self.batch.response_length) + 1
        logits = self.model(
            input_ids=batch.input_ids,
            attention_mask=batch.attention_mask,
            position_ids=batch.position_ids,
            use_cache=False,
            logits_to_keep=columns,
        ).logits[:, :-1]
        return picked_log_probs(logits[batch.response_mask], batch.responses[batch.response_mask])


def picked_log_probs(logits: Tensor, labels: Tensor) -> Tensor:
    """``(tokens,)``: the log-probs of the labels ``(tokens,)`` under logits ``(tokens, V)``."""
    return -nn.functional.cross_entropy(logits, labels, reduction="none")
