"""Floating-point operations of a batch: what bounds the speed-up of sharing prompts, and what TFLOP/s count.

One multiply-add counts as two operations. Counted are linear layers, attention over the pairs that may see each other,
and the head on response tokens, in the stock model too; norms, rotary embeddings, softmax and loss are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from zorro_verl.flops import ModelWork

Group = tuple[int, Sequence[int]]  # tokens of a prompt, and of each of its responses


class Passes(NamedTuple):
    """How many times the operations of a forward each part costs.

    A backward costs a linear layer two forwards, and attention two and a half, since it computes its scores anew.
    """

    linear: float
    attention: float
    head: float

    def without_head(self) -> Passes:
        return self._replace(head=0)

    def with_head_recomputed(self) -> Passes:
        """With ``logits_optimization=memory``, whose backward projects once more."""
        return self._replace(head=self.head + 1) if self.head > 1 else self


FORWARD = Passes(1, 1, 1)
UPDATE = Passes(3, 3.5, 3)
CHECKPOINTED_UPDATE = Passes(4, 4.5, 3)  # every layer's forward runs twice
ATTENTION = Passes(0, 1, 0)
ATTENTION_UPDATE = Passes(0, 3.5, 0)


def operations(config: Any, groups: Sequence[Group], passes: Passes, shared: bool) -> float:
    """Floating-point operations on rows that share their group's prompt, or on the rows as they are."""
    work = ModelWork.of(config)
    layers = sum(count for _, count in work.windows)
    tokens = pairs = scored = 0
    for prompt, responses in groups:
        copies = 1 if shared else len(responses)
        tokens += copies * prompt + sum(responses)
        pairs += copies * _triangle(prompt) + sum(prompt * response + _triangle(response) for response in responses)
        scored += sum(responses)
    linear = work.per_token * tokens * passes.linear
    attention = work.per_pair * layers * pairs * passes.attention
    return 2 * (linear + attention + work.head * scored * passes.head)


def _triangle(length: int) -> int:
    return length * (length + 1) // 2
