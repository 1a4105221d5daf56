"""Causal attention through torch's sdpa, for contestants whose own kernel a CPU does not have."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, key_mask: Tensor | None = None
) -> Tensor:
    """``(rows, heads, T, D)``: the last query sees all keys, each one before it one key less.

    Args:
        query: ``(rows, heads, T, D)``.
        key, value: ``(rows, kv_heads, S, D)`` with ``S >= T``.
        scaling: what the scores are multiplied by.
        key_mask: ``(rows, S)`` bool, False at padding; None without padding.
    """
    queries, keys = query.shape[2], key.shape[2]
    if key_mask is None and queries == keys:
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    mask = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(keys - queries)
    if key_mask is not None:
        mask = mask & key_mask[:, None, None]  # a query without a key gets zeros
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling, enable_gqa=True)
