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
    """A pair of kernels on packed ``(tokens, heads, D)`` tensors; k and v may have fewer heads than q (GQA).

    Attributes:
        name: the ``attn_implementation`` that gives them.
    """

    name: str

    def arrange(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The same values as the kernels want them in memory; done once, for all calls and the backward."""

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
    """torch's flash attention for CPUs, one call per run of equal blocks: float64, float32 and bfloat16."""

    name = "sdpa"

    def arrange(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return q, k, v  # layers hand over views of (heads, tokens, D), which is what torch's kernel is fastest on

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: VarlenCall, scale: float) -> tuple[Tensor, Tensor]:
        if not call.blocks:
            return torch.empty_like(q), q.new_empty(q.shape[1], 0, dtype=lse_dtype(q))
        outs, lses = [], []
        for tile in _tiles(call, q.dtype):
            queries = _heads_first(q, tile.q0, tile.q1, tile.parts)
            if tile.k0 == tile.k1:
                out = torch.zeros_like(queries)
                lse = torch.full(queries.shape[:3], -torch.inf, dtype=lse_dtype(q), device=q.device)
            else:
                out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                    queries,
                    _heads_first(k, tile.k0, tile.k1, tile.parts),
                    _heads_first(v, tile.k0, tile.k1, tile.parts),
                    0.0,
                    tile.causal,
                    attn_mask=tile.mask,
                    scale=scale,
                )
            outs.append(_tokens_first(out))
            lses.append(lse.transpose(0, 1).flatten(1))
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
    """Queries ``q0:q1`` on keys ``k0:k1``: all, causal from the top left, or under a ``mask`` to add to the scores.

    Both are ``parts`` equal ones, of which each sees its own.
    """

    parts: int
    q0: int
    q1: int
    k0: int
    k1: int
    causal: bool
    mask: Tensor | None


def _tiles(call: VarlenCall, dtype: torch.dtype) -> Iterator[_Tile]:
    """The runs of a call; in a window, `WINDOW_TILE` queries of a block at a time on the keys that these reach."""
    if call.window is None:
        yield from (_Tile(*run, call.causal, None) for run in call.runs)
        return
    for q0, q1, k0, k1 in call.blocks:
        to_key = k1 - q1  # a query's own key
        for first in range(q0, q1, WINDOW_TILE):
            end = min(first + WINDOW_TILE, q1)
            start = max(k0, first + to_key - call.window + 1)
            own = first + to_key - start  # the first query's own key, counted from the tile's first
            hidden = torch.full((end - first, end + to_key - start), -torch.inf, dtype=dtype)
            mask = hidden.triu(own + 1) + hidden.tril(own - call.window)
            yield _Tile(1, first, end, start, end + to_key, False, mask)


def _tile_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tile: _Tile, scale: float
) -> tuple[Tensor, ...]:
    """``dq, dk, dv`` of one tile's queries and keys."""
    gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        _heads_first(grad, tile.q0, tile.q1, tile.parts),
        _heads_first(q, tile.q0, tile.q1, tile.parts),
        _heads_first(k, tile.k0, tile.k1, tile.parts),
        _heads_first(v, tile.k0, tile.k1, tile.parts),
        _heads_first(out, tile.q0, tile.q1, tile.parts),
        lse[:, tile.q0 : tile.q1].unflatten(1, (tile.parts, -1)).transpose(0, 1).contiguous(),
        0.0,
        tile.causal,
        attn_mask=tile.mask,
        scale=scale,
    )
    return tuple(_tokens_first(gradient) for gradient in gradients)


def _heads_first(x: Tensor, start: int, end: int, count: int) -> Tensor:
    """``(count, heads, tokens of a part, D)`` view of ``(tokens, heads, D)``."""
    return x[start:end].unflatten(0, (count, -1)).transpose(1, 2)


def _tokens_first(x: Tensor) -> Tensor:
    """The way back, a view where the kernel lays its results out as it was given them."""
    return x.transpose(1, 2).flatten(0, 1)


def _join(pieces: list[Tensor], dim: int) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


def lse_dtype(q: Tensor) -> torch.dtype:
    """Of the log-sum-exp of attention on inputs like q."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32
