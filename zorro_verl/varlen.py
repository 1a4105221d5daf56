"""Variable-length attention kernels behind two functions: forward gives ``(out, lse)``, backward takes them merged.

The backward of a flash-attention kernel recomputes the probabilities as ``exp(scores - lse)``. Called with the output
and log-sum-exp merged over several key blocks it therefore gives the exact gradients of the merged attention for the
block at hand. That is the one property every kernel here is used for. Its own autograd is not: it drops the gradient
of the log-sum-exp.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from zorro_verl.packing import VarlenCall


class Kernels(Protocol):
    """A pair of kernels on packed ``(tokens, heads, D)`` tensors; k and v may have fewer heads than q (GQA)."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: VarlenCall, scale: float) -> tuple[Tensor, Tensor]:
        """``out`` ``(Tq, Hq, D)`` of q's dtype and ``lse`` ``(Hq, Tq)`` in float32 (float64 for float64 inputs).

        A query block without keys gives ``out = 0`` and ``lse = -inf``.
        """

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: VarlenCall, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """``dq, dk, dv`` for this call's blocks, given the merged ``out`` and ``lse``."""


class CpuKernels:
    """torch's flash attention for CPUs, one call per query block: float64, float32 and bfloat16."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: VarlenCall, scale: float) -> tuple[Tensor, Tensor]:
        if not call.blocks:
            return torch.empty_like(q), q.new_empty(q.shape[1], 0, dtype=_lse_dtype(q))
        outs, lses = [], []
        for q0, q1, k0, k1 in call.blocks:
            queries = _heads_first(q, q0, q1)
            if k0 == k1:
                out = torch.zeros_like(queries)
                lse = torch.full(queries.shape[:3], -torch.inf, dtype=_lse_dtype(q), device=q.device)
            else:
                out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                    queries, _heads_first(k, k0, k1), _heads_first(v, k0, k1), 0.0, call.causal, scale=scale
                )
            outs.append(out[0].transpose(0, 1))
            lses.append(lse[0])
        return _join(outs, 0), _join(lses, 1)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: VarlenCall, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        if not call.blocks or not k.shape[0]:
            return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        dqs, dks, dvs = [], [], []
        keys = 0
        for q0, q1, k0, k1 in call.blocks:
            if k0 > keys:  # keys in between that no query looks at
                dks.append(torch.zeros_like(k[keys:k0]))
                dvs.append(torch.zeros_like(v[keys:k0]))
            keys = k1
            if k0 == k1:
                dqs.append(torch.zeros_like(q[q0:q1]))
                continue
            gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                _heads_first(grad, q0, q1),
                _heads_first(q, q0, q1),
                _heads_first(k, k0, k1),
                _heads_first(v, k0, k1),
                _heads_first(out, q0, q1),
                lse[:, q0:q1].contiguous()[None],
                0.0,
                call.causal,
                scale=scale,
            )
            for pieces, gradient in zip((dqs, dks, dvs), gradients, strict=True):
                pieces.append(gradient[0].transpose(0, 1))
        if keys < k.shape[0] or not dks:
            dks.append(torch.zeros_like(k[keys:]))
            dvs.append(torch.zeros_like(v[keys:]))
        return _join(dqs or [torch.zeros_like(q)], 0), _join(dks, 0), _join(dvs, 0)


class TorchVarlenKernels:
    """torch's own variable-length flash attention for CUDA: float16 and bfloat16, one launch for all blocks."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: VarlenCall, scale: float) -> tuple[Tensor, Tensor]:
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
        )
        return out, _keyless_to_minus_inf(lse)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: VarlenCall, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
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
        )


class FlashAttention2Kernels:
    """The flash-attn 2 package: float16 and bfloat16, one launch for all blocks."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: VarlenCall, scale: float) -> tuple[Tensor, Tensor]:
        from flash_attn.flash_attn_interface import _flash_attn_varlen_forward

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
        )
        return out, _keyless_to_minus_inf(lse)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: VarlenCall, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        from flash_attn.flash_attn_interface import _flash_attn_varlen_backward

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
            window_size_left=-1,
            window_size_right=-1,
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


def _lse_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _keyless_to_minus_inf(lse: Tensor) -> Tensor:
    """CUDA flash attention writes +inf for a query without keys, so that its backward gives zeros."""
    return lse.masked_fill(lse == torch.inf, -torch.inf)
