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

from collections.abc import Iterable, Sequence
from typing import cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from zorro_verl.attention_kernels import resolve_kernels
from zorro_verl.forest import Forest, VarlenCall
from zorro_verl.merge import merge_
from zorro_verl.packing import Plan
from zorro_verl.varlen import Kernels, lse_dtype

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
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1, dtype=lse_dtype(q)).to(q.dtype), v)


def split_attention(
    q: Tensor, k: Tensor, v: Tensor, forest: Forest, scale: float, kernels: Kernels, window: int | None = None
) -> Tensor:
    """The same attention by kernels: no mask, and no copy of K or V but within a window.

    Args:
        q: ``(T, Hq, D)``; k, v: ``(T, Hkv, D)`` with Hq a multiple of Hkv.
        forest: the segments the T tokens belong to.
        scale: factor on the scores.
        kernels: what computes the calls.
        window: a token sees the last so many tokens of its row, itself included; at least 1. None for all.

    Returns:
        ``(T, Hq, D)`` of q's dtype. Partial results are merged in float32 (float64 for float64 inputs). In a window,
        copies of K and V, one for each segment that sees them, live within the forward and within the backward only.
    """
    if torch.compiler.is_compiling():
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        return _attention_op(q, k, v, list(forest.tables(window)), scale, kernels.name)[0]
    return _Attention.apply(q, k, v, forest.calls(window), scale, kernels)


class _Attention(torch.autograd.Function):
    """Owns its backward: autograd through the kernels' log-sum-exp would drop that gradient without a word."""

    @staticmethod
    def forward(ctx, q, k, v, calls, scale, kernels):
        q, k, v = kernels.arrange(q, k, v)
        out, lse = _forward(q, k, v, calls, scale, kernels)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.settings = calls, scale, kernels
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return *_backward(grad.contiguous(), *ctx.saved_tensors, *ctx.settings), None, None, None


def _forward(
    q: Tensor, k: Tensor, v: Tensor, calls: Sequence[VarlenCall], scale: float, kernels: Kernels
) -> tuple[Tensor, Tensor]:
    """``out`` ``(T, Hq, D)`` and ``lse`` ``(Hq, T)`` over all calls, of which the first has every query."""
    own, *others = calls
    out, lse = kernels.forward(q, own.keys(k), own.keys(v), own, scale)
    if others:
        first = others[0].query_start
        # Merged in place, and so rounded after each call: for more than one, in the precision of the sums.
        total = out[first:] if len(others) == 1 else out[first:].to(lse.dtype)
        for call in others:
            part = kernels.forward(q[call.query_start :], call.keys(k), call.keys(v), call, scale)
            merge_(total[call.query_start - first :], lse[:, call.query_start :], *part)
        if len(others) > 1:
            out[first:] = total
    return out, lse


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    calls: Sequence[VarlenCall],
    scale: float,
    kernels: Kernels,
) -> tuple[Tensor, Tensor, Tensor]:
    """``dq, dk, dv``, given the merged ``out`` and ``lse``."""
    own, *others = calls
    # A kernel gives terms in q's dtype. Two are added in float32 and rounded once in any case; more are summed in that.
    sums = lse.dtype if len(others) > 1 else None
    dq, dk, dv = kernels.backward(grad, q, own.keys(k), own.keys(v), out, lse, own, scale)
    dk, dv = (own.sum_keys(x, k.shape[0], lse.dtype) for x in (dk, dv))
    dq, dk, dv = (x.to(sums or x.dtype) for x in (dq, dk, dv))
    for call in others:
        first, keys = call.query_start, call.num_keys
        part = kernels.backward(
            grad[first:], q[first:], call.keys(k), call.keys(v), out[first:], lse[:, first:], call, scale
        )
        for total, piece in zip((dq[first:], dk[:keys], dv[:keys]), part, strict=True):
            total += piece
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


# What a compiled layer calls instead, as one node of its graph. A call's numbers ride in tensors: as Python numbers
# they would be constants of the graph, which every batch would compile anew.


@torch.library.custom_op("zorro_verl::attention", mutates_args=())
def _attention_op(
    q: Tensor, k: Tensor, v: Tensor, tables: list[Tensor], scale: float, kernels: str
) -> tuple[Tensor, Tensor]:
    out, lse = _forward(q, k, v, VarlenCall.from_tensors(*tables), scale, _kernels(kernels, q))
    return out.contiguous(), lse.contiguous()  # a compiled graph relies on the strides that the fake below has


@torch.library.custom_op("zorro_verl::attention_backward", mutates_args=())
def _attention_backward_op(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    tables: list[Tensor],
    scale: float,
    kernels: str,
) -> tuple[Tensor, Tensor, Tensor]:
    calls = VarlenCall.from_tensors(*tables)
    return _backward(grad, q, k, v, out, lse, calls, scale, _kernels(kernels, q))


def _kernels(name: str, q: Tensor) -> Kernels:
    return cast(Kernels, resolve_kernels(name, q.device.type))  # never the dense reference, which is no operator


@_attention_op.register_fake
def _(q, k, v, tables, scale, kernels):
    return torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0], dtype=lse_dtype(q))


@_attention_backward_op.register_fake
def _(grad, q, k, v, out, lse, tables, scale, kernels):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _save(ctx, inputs, output):
    q, k, v, tables, ctx.scale, ctx.kernels = inputs
    ctx.save_for_backward(q, k, v, *output, *tables)


def _differentiate(ctx, grad, _):
    q, k, v, out, lse, *tables = ctx.saved_tensors
    grads = _attention_backward_op(grad.contiguous(), q, k, v, out, lse, tables, ctx.scale, ctx.kernels)
    return *grads, [None] * len(tables), None, None


_attention_op.register_autograd(_differentiate, setup_context=_save)


def prepare_attention(plan: Plan, kernels: Kernels | None, split: bool, windows: Iterable[int | None]) -> None:
    """Build what `plan_attention` reads of a plan, for layers with these windows: once, before the first of them."""
    if not split:
        _, plan = plan.unpack_index, plan.unshared  # the index takes values there
    for window in windows:
        window = _reach(plan, window)
        if kernels is not None:
            plan.forest.tables(window)
        elif plan.num_tokens <= MAX_REFERENCE_TOKENS:
            plan.dense_mask(window)


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
    if not split:
        rows = plan.unshared
        q, k, v = (plan.unpack(x, 0) for x in (q, k, v))
        return plan.pack(plan_attention(q, k, v, rows, scale, kernels, window=window), 0)
    window = _reach(plan, window)
    if kernels is not None:
        return split_attention(q, k, v, plan.forest, scale, kernels, window)
    if plan.num_tokens > MAX_REFERENCE_TOKENS:
        raise ValueError(
            f"attn_implementation=eager: expected at most {MAX_REFERENCE_TOKENS} packed tokens (it builds a dense "
            f"mask), got {plan.num_tokens}; use attn_implementation=sdpa or a smaller token budget"
        )
    return reference_attention(q, k, v, plan.dense_mask(window), scale)


def _reach(plan: Plan, window: int | None) -> int | None:
    """None for a window that holds every row."""
    if window is not None and window < 1:
        raise ValueError(
            f"sliding_window: expected None or at least 1 token, got {window}; set it in the model's config"
        )
    return None if window is None or plan.longest_row <= window else window
