"""Softmax attention over a forest of segments: the dense reference, split attention, attention within a window.

          keys:  P0 P1 P2 | a0 a1 | b0 b1
    P0 P1 P2     1  .  .    .  .    .  .       self call    P on P, a on a, b on b, causal
                 1  1  .    .  .    .  .
                 1  1  1    .  .    .  .
    a0 a1        1  1  1    1  .    .  .       cross call   [a b] on P, full
                 1  1  1    1  1    .  .
    b0 b1        1  1  1    .  .    1  .       merged by log-sum-exp where both see keys
                 1  1  1    .  .    1  1

With ``O_i, L_i`` the output and log-sum-exp of each call, ``L = log(sum_i exp L_i)`` and
``O = sum_i exp(L_i - L) O_i`` (Rabe and Staats, 2021; Dao et al., 2022). All tensors are ``(tokens, heads, D)``.

A sliding window of 3 tokens leaves of a's and b's sight of P a part that is no rectangle:

          keys:  P1 P2 a0 a1 | P1 P2 b0 b1
    a0 a1         1  1  1  .                   one call over copies of the keys: the tail of P that the window reaches
                  .  1  1  1                   in front of each response's own, causal within the window
    b0 b1                       1  1  1  .
                                .  1  1  1
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from zorro_verl.forest import Forest
from zorro_verl.packing import Plan
from zorro_verl.varlen import Kernels

MAX_REFERENCE_TOKENS = 16384


def reference_attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> Tensor:
    """Attention under an explicit mask: the specification, and what ``attn_implementation=eager`` runs.

    Args:
        q: ``(T, Hq, D)``; k, v: ``(T, Hkv, D)`` with Hq a multiple of Hkv.
        visible: ``(T, T)`` bool, row sees column.
        scale: factor on the scores.

    Returns:
        ``(T, Hq, D)`` of q's dtype; the softmax runs in float32, or float64 for float64 inputs.
    """
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    scores = scores.masked_fill(~visible, -torch.inf)
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1, dtype=dtype).to(q.dtype), v)


def split_attention(q: Tensor, k: Tensor, v: Tensor, forest: Forest, scale: float, kernels: Kernels) -> Tensor:
    """The same attention in one causal call plus one rectangular call per level: no mask, no copy of K or V.

    Args:
        q: ``(T, Hq, D)``; k, v: ``(T, Hkv, D)`` with Hq a multiple of Hkv.
        forest: the segments the T tokens belong to.
        scale: factor on the scores.
        kernels: what computes the calls.

    Returns:
        ``(T, Hq, D)`` of q's dtype. Partial results are merged in float32 (float64 for float64 inputs).
    """
    return _SplitAttention.apply(q, k, v, forest, scale, kernels)


class _SplitAttention(torch.autograd.Function):
    """Owns its backward: autograd through the kernels' log-sum-exp would drop that gradient without a word."""

    @staticmethod
    def forward(ctx, q, k, v, forest, scale, kernels):
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        out, lse = kernels.forward(q, k, v, forest.self_call, scale)
        if forest.cross_calls:
            out = out.to(lse.dtype)
            for call in forest.cross_calls:
                first, keys = call.query_start, call.num_keys
                part, part_lse = kernels.forward(q[first:], k[:keys], v[:keys], call, scale)
                _merge_(out[first:], lse[:, first:], part, part_lse)
            out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.forest, ctx.scale, ctx.kernels = forest, scale, kernels
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        q, k, v, out, lse = ctx.saved_tensors
        forest, scale, kernels = ctx.forest, ctx.scale, ctx.kernels
        grad = grad.contiguous()
        dq, dk, dv = kernels.backward(grad, q, k, v, out, lse, forest.self_call, scale)
        if forest.cross_calls:
            dq, dk, dv = (g.to(lse.dtype) for g in (dq, dk, dv))
            for call in forest.cross_calls:
                first, keys = call.query_start, call.num_keys
                part = kernels.backward(
                    grad[first:], q[first:], k[:keys], v[:keys], out[first:], lse[:, first:], call, scale
                )
                for total, piece in zip((dq[first:], dk[:keys], dv[:keys]), part, strict=True):
                    total += piece
            dq, dk, dv = dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
        return dq, dk, dv, None, None, None


def _merge_(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Fold ``(part, part_lse)`` into ``(out, lse)`` in place."""
    # The two weights exp(L_i - L) add up to one, and the second is a sigmoid: one pass over the outputs.
    out.lerp_(part.to(out.dtype), torch.sigmoid(part_lse - lse).T[..., None])
    lse.copy_(torch.logaddexp(lse, part_lse))


def window_attention(
    q: Tensor, k: Tensor, v: Tensor, forest: Forest, window: int, scale: float, kernels: Kernels
) -> Tensor:
    """Attention in which a token sees the last ``window`` tokens of its row, itself included.

    Args:
        q: ``(T, Hq, D)``; k, v: ``(T, Hkv, D)`` with Hq a multiple of Hkv.
        forest: the segments the T tokens belong to.
        window: at least 1.
        scale: factor on the scores.
        kernels: what computes the call.

    Returns:
        ``(T, Hq, D)`` of q's dtype. Copies of K and V, one for each segment that sees them, live within the forward
        and within the backward only; their gradients are summed in float32 (float64 for float64 inputs).
    """
    return _WindowAttention.apply(q, k, v, forest.window_call(window), scale, kernels)


class _WindowAttention(torch.autograd.Function):
    """Owns its backward, to gather keys and values anew there: autograd would keep the copies from the forward."""

    @staticmethod
    def forward(ctx, q, k, v, call, scale, kernels):
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        out, lse = kernels.forward(q, k[call.key_index], v[call.key_index], call, scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.call, ctx.scale, ctx.kernels = call, scale, kernels
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        q, k, v, out, lse = ctx.saved_tensors
        call, index = ctx.call, ctx.call.key_index
        dq, *copies = ctx.kernels.backward(grad.contiguous(), q, k[index], v[index], out, lse, call, ctx.scale)
        dk, dv = (torch.zeros(k.shape, dtype=lse.dtype, device=k.device) for _ in copies)
        for total, copy in zip((dk, dv), copies, strict=True):
            total.index_add_(0, index, copy.to(lse.dtype))
        return dq, dk.to(k.dtype), dv.to(v.dtype), None, None, None


def plan_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan,
    scale: float,
    kernels: Kernels | None,
    split: bool = True,
    window: int | None = None,
) -> Tensor:
    """Attention of one layer over a packed micro-batch.

    Args:
        q: ``(T, Hq, D)``; k, v: ``(T, Hkv, D)``.
        plan: the micro-batch's plan.
        scale: factor on the scores.
        kernels: what computes it; None runs the dense reference.
        split: False shares everything but attention, which then runs on the rows as they were.
        window: the layer's sliding window: a token sees the last so many tokens of its row, itself included, whatever
            its position ids are. None for all.

    Raises:
        ValueError: a window below 1, or the dense reference on more than `MAX_REFERENCE_TOKENS` tokens.
    """
    if window is not None and window < 1:
        raise ValueError(
            f"sliding_window: expected None or at least 1 token, got {window}; set it in the model's config"
        )
    if window is not None and plan.longest_row <= window:
        window = None
    if not split:
        rows = plan.unshared
        q, k, v = (plan.unpack(x, 0) for x in (q, k, v))
        return plan.pack(plan_attention(q, k, v, rows, scale, kernels, window=window), 0)
    if kernels is not None and window is not None:
        return window_attention(q, k, v, plan.forest, window, scale, kernels)
    if kernels is not None:
        return split_attention(q, k, v, plan.forest, scale, kernels)
    if plan.num_tokens > MAX_REFERENCE_TOKENS:
        raise ValueError(
            f"attn_implementation=eager: expected at most {MAX_REFERENCE_TOKENS} packed tokens (it builds a dense "
            f"mask), got {plan.num_tokens}; use attn_implementation=sdpa or a smaller token budget"
        )
    return reference_attention(q, k, v, plan.dense_mask(window), scale)
