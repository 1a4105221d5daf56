"""The Triton kernel behind `merge.merge_`: outputs and log-sum-exps are read and written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 2048  # elements of one head's output per program


@triton.jit
def _merge_kernel(
    out,
    lse,
    part,
    part_lse,
    num_rows,
    out_row,
    out_head,
    out_column,
    part_row,
    part_head,
    part_column,
    lse_head,
    lse_row,
    part_lse_head,
    part_lse_row,
    D: tl.constexpr,
    ACC: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """``ROWS`` queries of one head. Offsets are int64: rows x heads x D may pass 2**31."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    row_inside = rows < num_rows
    inside = row_inside[:, None] & (columns < D)[None, :]

    lse_at = lse + head * lse_head + rows * lse_row
    old_lse = tl.load(lse_at, mask=row_inside, other=0).to(ACC)
    new_lse = tl.load(part_lse + head * part_lse_head + rows * part_lse_row, mask=row_inside, other=0).to(ACC)
    largest = tl.maximum(old_lse, new_lse)
    # A query that sees no key: the difference of two -inf would be NaN.
    base = tl.where(largest == float("-inf"), 0.0, largest)
    old_weight, new_weight = tl.exp(old_lse - base), tl.exp(new_lse - base)
    total = old_weight + new_weight
    divisor = tl.where(total == 0.0, 1.0, total)

    out_at = out + rows[:, None] * out_row + head * out_head + columns[None, :] * out_column
    part_at = part + rows[:, None] * part_row + head * part_head + columns[None, :] * part_column
    old = tl.load(out_at, mask=inside, other=0).to(ACC)
    new = tl.load(part_at, mask=inside, other=0).to(ACC)
    merged = old * (old_weight / divisor)[:, None] + new * (new_weight / divisor)[:, None]
    tl.store(out_at, merged.to(out.dtype.element_ty), mask=inside)
    merged_lse = tl.where(total == 0.0, float("-inf"), base + tl.log(divisor))
    tl.store(lse_at, merged_lse.to(lse.dtype.element_ty), mask=row_inside)


def merge_(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """See `merge.merge_`; ``out`` must have an element."""
    rows, heads, head_dim = out.shape
    columns = triton.next_power_of_2(head_dim)
    tile = max(1, TILE // columns)
    _merge_kernel[(triton.cdiv(rows, tile), heads)](
        out,
        lse,
        part,
        part_lse,
        rows,
        *out.stride(),
        *part.stride(),
        *lse.stride(),
        *part_lse.stride(),
        D=head_dim,
        ACC=tl.float64 if lse.dtype == torch.float64 else tl.float32,
        ROWS=tile,
        COLUMNS=columns,
    )
