"""A stand-in for flash-attention's varlen kernel where there is none: one call of torch's sdpa for each sequence.

It lets code that only a GPU would reach run on a CPU. What it costs is not what the kernel costs.
"""

from __future__ import annotations

import torch
from peers.causal_sdpa import causal_attention
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "varlen_emulated"


def register() -> None:
    """Make it an attention implementation of transformers, which builds no mask for a name that it does not know."""
    ALL_ATTENTION_FUNCTIONS.register(NAME, varlen_attention)


def varlen_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    scaling: float,
    cu_seq_lens_q: Tensor,
    cu_seq_lens_k: Tensor,
    **others: object,
) -> tuple[Tensor, None]:
    """Causal attention inside each sequence, the last query seeing the last key; without dropout.

    Args:
        query: ``(1, heads, T, D)``, the sequences one after the other.
        key, value: ``(1, kv_heads, S, D)``.
        cu_seq_lens_q, cu_seq_lens_k: ``(sequences + 1,)`` where each sequence starts, and the end of the last.

    Returns:
        ``(1, T, heads, D)``, and None in place of the attention weights.
    """
    queries, keys = (starts.diff().tolist() for starts in (cu_seq_lens_q, cu_seq_lens_k))
    sequences = zip(query.split(queries, 2), key.split(keys, 2), value.split(keys, 2), strict=True)
    outputs = [causal_attention(*sequence, scaling) for sequence in sequences]
    return torch.cat(outputs, 2).transpose(1, 2), None
