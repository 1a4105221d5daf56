"""Patcher of one attention layer, for those who want sharing in some layers only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from zorro_verl.attention_kernels import resolve_kernels
from zorro_verl.models import check_attention_layer, name_of
from zorro_verl.patched_attention import PatchedAttention


class QwenAttentionPatcher:
    """Patches one attention layer of a supported model: ``(B, S, E)`` in and out, each shared prompt computed once.

        patcher = QwenAttentionPatcher(model.model.layers[0].self_attn)
        patcher.patch()
        patcher.unpatch()

    Args:
        attention_layer: the layer; the model around it stays as it is.
        use_split_attention: False shares the projections only, and runs attention on the rows as they were.
        attn_implementation: "auto", "eager", "sdpa", "flash_attention_2", "flash_attention_3" or
            "flash_attention_4".

    Raises:
        ValueError: not an attention layer of a supported type, or an attention that can't run on its device.
    """

    def __init__(self, attention_layer: nn.Module, use_split_attention: bool = True, attn_implementation: str = "auto"):
        check_attention_layer(attention_layer)
        self.attention_layer = attention_layer
        self.use_split_attention = use_split_attention
        self.kernels = resolve_kernels(attn_implementation, next(attention_layer.parameters()).device.type)
        self._forward: PatchedAttention | None = None

    def patch(self, response_len: int | None = None, prompt_groups: Sequence[Sequence[int]] | None = None) -> None:
        """Patch the layer, in place of a patch that it may have.

        Args:
            response_len: responses stand in the last so many columns; None to find where rows stop being equal.
            prompt_groups: rows that share their prompt, for every batch to come; None to find them in each batch, by
                the bits of hidden states and position embeddings.

        Raises:
            ValueError: prompt_groups without response_len, or that don't hold every row once; in a call, a batch of
                another size, prompts of a group that differ, or an attention mask that isn't causal with padding.
        """
        self._forward = PatchedAttention(
            self.attention_layer, self.kernels, self.use_split_attention, response_len, prompt_groups
        )
        self._forward.attach()

    def unpatch(self) -> None:
        """Leave the layer as it was. Nothing happens when another patch has replaced this one, or none is there.

        Raises:
            ValueError: something else has wrapped the patched forward in the meantime.
        """
        current = self.attention_layer.__dict__.get("forward")
        if self._forward is not None and current is self._forward:
            self._forward.detach()
        elif self._forward is not None and current is not None and not isinstance(current, PatchedAttention):
            raise ValueError(
                f"attention_layer.forward: expected the patch, got {name_of(current)} around it; unwrap it first"
            )
        self._forward = None

    @property
    def stats(self) -> Mapping[str, Any]:
        """The last call's counts, under the names of `DeduplicatedActor.stats`."""
        if self._forward is None:
            raise ValueError("stats: expected a patched layer, got none; call patch() first")
        return self._forward.stats
