"""Copies of rows by index, with rows of zeros where there is nothing to copy; the gradient sums over the copies."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def gather_rows(values: Tensor, index: Tensor) -> Tensor:
    """``values (T, ...)`` and ``index`` int64 of any shape -> ``index.shape + values.shape[1:]``.

    An entry t of ``index``, in 0..T-1, gives ``values[t]``; an entry of -1 gives zeros, and no gradient to any row.
    Entries outside -1..T-1 are the caller's error and are not looked for. Differentiable once in floating-point
    ``values``.

    On a CUDA device Triton kernels run, whose backward is a deterministic sum over the copies, accumulated in float32
    (float64 for float64). Elsewhere, and on a CUDA device without triton, torch ops give the same values.

    Raises:
        ValueError: ``values`` is a scalar, or ``index`` is not int64 or not on the device of ``values``.
    """
    if values.dim() == 0:
        raise ValueError("values: expected a (T, ...) tensor, got a scalar")
    if index.dtype != torch.int64:
        raise ValueError(f"index: expected an int64 tensor, got {index.dtype}")
    if index.device != values.device:
        raise ValueError(f"index: expected a tensor on the device of values, {values.device}, got {index.device}")
    rest = values.shape[1:]
    flat_values, flat_index = values.reshape(values.shape[0], math.prod(rest)), index.reshape(-1)
    gather = _triton() if values.is_cuda and values.is_floating_point() else None
    if gather is None:
        rows = _plain(flat_values, flat_index)
    else:
        with torch.cuda.device(values.device):  # Triton launches on the current device; autograd sets it by itself
            rows = gather(flat_values, flat_index)
    return rows.view(index.shape + rest)


def _plain(values: Tensor, index: Tensor) -> Tensor:
    if values.shape[0] == 0:  # a row to point at, for an index of nothing but -1
        values = torch.cat([values, values.new_zeros(1, values.shape[1])])
    rows = values.index_select(0, index.clamp(min=0))
    return rows.masked_fill_((index < 0)[:, None], 0)  # in place: a second copy would be as large as the batch


def _triton():
    """The same by Triton kernels; None where triton is not installed."""
    try:
        from zorro_verl.triton_reconstruct import GatherRows
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        return None
    return GatherRows.apply
