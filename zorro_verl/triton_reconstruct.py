"""The Triton kernels behind `reconstruct.gather_rows`: a masked gather, and its gradient without atomics.

A row that many places read gets the sum of their gradients. Each source row has its own program, which adds the copies
up in one register block in the order in which they stand, so the sum is the same in every run and, for half precision,
is rounded once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

MAX_BLOCK = 1024  # columns per program


@triton.jit
def _gather_kernel(values, index, out, row_stride, column_stride, num_columns, BLOCK: tl.constexpr):
    """One row of ``out`` and one block of columns. Offsets are int64: rows x columns may pass 2**31."""
    n = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(index + n)
    readable = columns < tl.where(row >= 0, num_columns, 0)
    block = tl.load(values + row * row_stride + columns * column_stride, mask=readable, other=0)
    tl.store(out + n * num_columns + columns, block, mask=columns < num_columns)


@triton.jit
def _segment_sum_kernel(
    grads, order, bounds, out, row_stride, column_stride, num_columns, ACC: tl.constexpr, BLOCK: tl.constexpr
):
    """One source row and one block of columns: the sum of ``grads[order[bounds[t] : bounds[t + 1]]]``."""
    t = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < num_columns
    total = tl.zeros((BLOCK,), dtype=ACC)
    for copy in range(tl.load(bounds + t), tl.load(bounds + t + 1)):
        n = tl.load(order + copy)
        total += tl.load(grads + n * row_stride + columns * column_stride, mask=inside, other=0).to(ACC)
    tl.store(out + t * num_columns + columns, total.to(out.dtype.element_ty), mask=inside)


class GatherRows(torch.autograd.Function):
    """``values (T, H)``, ``index (n,)`` int64 in -1..T-1 -> ``(n, H)``; -1 gives a row of zeros.

    The backward is deterministic, accumulates in float32 (float64 for float64), and has no backward of its own.
    """

    @staticmethod
    def forward(ctx, values: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.num_rows = values.shape[0]
        out = values.new_empty(index.shape[0], values.shape[1])
        if out.numel() > 0:
            grid, block = _launch(out)
            _gather_kernel[grid](values, index, out, *values.stride(), out.shape[1], BLOCK=block)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grads: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        out = grads.new_empty(ctx.num_rows, grads.shape[1])
        if out.numel() > 0:
            # Stable, so that the copies of a row are added in the order of the index; entries of -1 come before all.
            targets, order = torch.sort(index, stable=True)
            bounds = torch.searchsorted(targets, torch.arange(ctx.num_rows + 1, device=index.device))
            grid, block = _launch(out)
            acc = tl.float64 if grads.dtype == torch.float64 else tl.float32
            _segment_sum_kernel[grid](grads, order, bounds, out, *grads.stride(), out.shape[1], ACC=acc, BLOCK=block)
        return out, None


def _launch(out: Tensor) -> tuple[tuple[int, int], int]:
    """The grid over rows and column blocks of ``out``, and the columns per block."""
    rows, columns = out.shape
    block = min(MAX_BLOCK, triton.next_power_of_2(columns))
    return (rows, triton.cdiv(columns, block)), block
