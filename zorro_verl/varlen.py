"""Variable-length attention kernels behind two functions: forward gives ``(out, lse)``, backward takes them merged.

The backward of a flash-attention kernel recomputes the probabilities as ``exp(scores - lse)``. Called with the output
and log-sum-exp merged over several key blocks it therefore gives the exact gradients of the merged attention for the
block at hand. That is the one property every kernel here is used for. Its own autograd is not: it drops the gradient
of the log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from zorro_verl.forest import VarlenCall

WINDOW_TILE = 128  # queries of a block that are computed at once in a window: their mask has that many rows


class Kernels(Protocol):
    """A pair of kernels on packed ``(tokens, heads, D)`` tensors; k and v may have fewer heads than q (GQA)."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: VarlenCall, scale: float) -> tuple[Tensor, Tensor]:
        """``out`` ``(Tq, Hq, D)`` of q's dtype and ``lse`` ``(Hq, Tq)`` in float32 (float64 for float64 inputs).

        A query block without keys gives ``out = 0`` and ``lse = -inf``. k and v are the call's keys: views, or
        gathered by its ``key_index``.
        """

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: VarlenCall, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """``dq, dk, dv`` for this call's blocks, given the merged ``out`` and ``lse``; dk, dv may be in lse's dtype."""


class CpuKernels:
    """torch's flash attention for CPUs, one call per query block or tile of one: float64, float32 and bfloat16."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: VarlenCall, scale: float) -> tuple[Tensor, Tensor]:
        if not call.blocks:
            return torch.empty_like(q), q.new_empty(q.shape[1], 0, dtype=_lse_dtype(q))
        outs, lses = [], []
        for tile in _tiles(call, q.dtype):
            queries = _heads_first(q, tile.q0, tile.q1)
            if tile.k0 == tile.k1:
                out = torch.zeros_like(queries)
                lse = torch.full(queries.shape[:3], -torch.inf, dtype=_lse_dtype(q), device=q.device)
            else:
                out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                    queries,
                    _heads_first(k, tile.k0, tile.k1),
                    _heads_first(v, tile.k0, tile.k1),
                    0.0,
                    tile.causal,
                    attn_mask=tile.mask,
                    scale=scale,
                )
            outs.append(out[0].transpose(0, 1))
            lses.append(lse[0])
        return _join(outs, 0), _join(lses, 1)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: VarlenCall, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        if not call.blocks or not k.shape[0]:
            return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        if call.window is not None:
            return self._window_backward(grad, q, k, v, out, lse, call, scale)
        dqs, dks, dvs = [], [], []
        keys = 0
        for tile in _tiles(call, q.dtype):
            if tile.k0 > keys:  # keys in between that no query looks at
                dks.append(torch.zeros_like(k[keys : tile.k0]))
                dvs.append(torch.zeros_like(v[keys : tile.k0]))
            keys = tile.k1
            if tile.k0 == tile.k1:
                dqs.append(torch.zeros_like(q[tile.q0 : tile.q1]))
                continue
            gradients = _tile_backward(grad, q, k, v, out, lse, tile, scale)
            for pieces, gradient in zip((dqs, dks, dvs), gradients, strict=True):
                pieces.append(gradient)
        if keys < k.shape[0] or not dks:
            dks.append(torch.zeros_like(k[keys:]))
            dvs.append(torch.zeros_like(v[keys:]))
        return _join(dqs or [torch.zeros_like(q)], 0), _join(dks, 0), _join(dvs, 0)

    def _window_backward(self, grad, q, k, v, out, lse, call, scale):
        """Neighbouring tiles have keys in common, whose gradients are summed in lse's dtype."""
        dqs = []
        dk, dv = (torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in (k, v))
        for tile in _tiles(call, q.dtype):
            dq, *gradients = _tile_backward(grad, q, k, v, out, lse, tile, scale)
            dqs.append(dq)
            for total, gradient in zip((dk, dv), gradients, strict=True):
                total[tile.k0 : tile.k1] += gradient
        return _join(dqs, 0), dk, dv


class _Tile(NamedTuple):
    """Queries ``q0:q1`` on keys ``k0:k1``: all, causal from the top left, or under a ``mask`` to add to the scores."""

    q0: int
    q1: int
    k0: int
    k1: int
    causal: bool
    mask: Tensor | None


def _tiles(call: VarlenCall, dtype: torch.dtype) -> Iterator[_Tile]:
    """The blocks of a call; in a window, `WINDOW_TILE` queries of a block at a time on the keys that these reach."""
    for q0, q1, k0, k1 in call.blocks:
        if call.window is None:
            yield _Tile(q0, q1, k0, k1, call.causal, None)
            continue
        to_key = k1 - q1  # a query's own key
        for first in range(q0, q1, WINDOW_TILE):
            end = min(first + WINDOW_TILE, q1)
            start = max(k0, first + to_key - call.window + 1)
            own = first + to_key - start  # the first query's own key, counted from the tile's first
            hidden = torch.full((end - first, end + to_key - start), -torch.inf, dtype=dtype)
            mask = hidden.triu(own + 1) + hidden.tril(own - call.window)
            yield _Tile(first, end, start, end + to_key, False, mask)


def _tile_backward(grad, q, k, v, out, lse, tile, scale) -> tuple[Tensor, ...]:
    """``dq, dk, dv`` of one tile's queries and keys."""
    gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        _heads_first(grad, tile.q0, tile.q1),
        _heads_first(q, tile.q0, tile.q1),
        _heads_first(k, tile.k0, tile.k1),
        _heads_first(v, tile.k0, tile.k1),
        _heads_first(out, tile.q0, tile.q1),
        lse[:, tile.q0 : tile.q1].contiguous()[None],
        0.0,
        tile.causal,
        attn_mask=tile.mask,
        scale=scale,
    )
    return tuple(gradient[0].transpose(0, 1) for gradient in gradients)


class TorchVarlenKernels:
    """torch's own variable-length flash attention for CUDA: float16 and bfloat16, one launch for all blocks."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: VarlenCall, scale: float) -> tuple[Tensor, Tensor]:
        left, right = _window_size(call)
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q,
            k,
            v,
            call.cu_seqlens_q,
            call.cu_seqlens_k,
            call.max_seqlen_q,
            call.max_seqlen_k,
            0.0,
            call.causal,
            False,
            scale=scale,
            window_size_left=left,
            window_size_right=right,
        )
        return out, _keyless_to_minus_inf(lse)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: VarlenCall, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        left, right = _window_size(call)
        unused = torch.empty(2, dtype=torch.uint64, device=q.device)  # the state of a dropout that never runs
        return torch.ops.aten._flash_attention_backward(
            grad.contiguous(),
            q,
            k,
            v,
            out.contiguous(),
            lse.contiguous(),
            call.cu_seqlens_q,
            call.cu_seqlens_k,
            call.max_seqlen_q,
            call.max_seqlen_k,
            0.0,
            call.causal,
            unused,
            unused[:0],
            scale=scale,
            window_size_left=left,
            window_size_right=right,
        )


class FlashAttention2Kernels:
    """The flash-attn 2 package: float16 and bfloat16, one launch for all blocks."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: VarlenCall, scale: float) -> tuple[Tensor, Tensor]:
        from flash_attn.flash_attn_interface import _flash_attn_varlen_forward

        left, right = _window_size(call)
        out, lse, *_ = _flash_attn_varlen_forward(
            q,
            k,
            v,
            call.cu_seqlens_q,
            call.cu_seqlens_k,
            call.max_seqlen_q,
            call.max_seqlen_k,
            dropout_p=0.0,
            softmax_scale=scale,
            causal=call.causal,
            window_size_left=left,
            window_size_right=right,
        )
        return out, _keyless_to_minus_inf(lse)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: VarlenCall, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        from flash_attn.flash_attn_interface import _flash_attn_varlen_backward

        left, right = _window_size(call)
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        _flash_attn_varlen_backward(
            grad.contiguous(),
            q,
            k,
            v,
            out.contiguous(),
            lse.contiguous(),
            dq,
            dk,
            dv,
            call.cu_seqlens_q,
            call.cu_seqlens_k,
            call.max_seqlen_q,
            call.max_seqlen_k,
            dropout_p=0.0,
            softmax_scale=scale,
            causal=call.causal,
            window_size_left=left,
            window_size_right=right,
            softcap=0.0,
            alibi_slopes=None,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        return dq, dk, dv


def _heads_first(x: Tensor, start: int, end: int) -> Tensor:
    """``(1, heads, end - start, D)`` view of ``(tokens, heads, D)``."""
    return x[start:end].transpose(0, 1)[None]


def _join(pieces: list[Tensor], dim: int) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


def _window_size(call: VarlenCall) -> tuple[int, int]:
    """Keys that a query sees to the left and right of its own, as flash attention counts them; -1 for all."""
    return (-1, -1) if call.window is None else (call.window - 1, 0)


def _lse_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _keyless_to_minus_inf(lse: Tensor) -> Tensor:
    """CUDA flash attention writes +inf for a query without keys, so that its backward gives zeros."""
    return lse.masked_fill(lse == torch.inf, -torch.inf)
