"""Two partial results of attention, over different keys of the same queries, as one."""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 2**22  # elements of a half-precision output that are held in float32 at once: 16 MiB


def merge_(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Fold ``(part, part_lse)`` into ``(out, lse)`` in place.

    With ``L = log(exp lse + exp part_lse)`` the output is ``exp(lse - L) out + exp(part_lse - L) part``, computed in
    the dtype of ``lse`` and rounded once into that of ``out``. A query that sees no key has an output of 0 and a
    log-sum-exp of -inf, in either part or in both.

    On a CUDA device one Triton kernel reads and writes everything once. Elsewhere, and on a CUDA device without triton,
    torch ops compute the same in chunks.

    Args:
        out: ``(T, H, D)`` in float16, bfloat16, float32 or float64; a view may have any strides.
        lse: ``(H, T)`` in float32, float64 for an ``out`` in float64; a view may have any strides.
        part: like ``out``, in any floating dtype.
        part_lse: like ``lse``.
    """
    merge = _triton() if out.is_cuda else None
    if merge is None:
        _plain(out, lse, part, part_lse)
    elif out.numel():
        with torch.cuda.device(out.device):  # Triton launches on the current device
            merge(out, lse, part, part_lse)


def _plain(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    # The two weights add up to one, and the second is a sigmoid. Where neither sees a key it would be NaN.
    weight = torch.sigmoid(part_lse - lse).masked_fill_(part_lse == -torch.inf, 0).T[..., None]
    rows = max(1, CHUNK // max(1, out[:1].numel()))
    if out.dtype == lse.dtype:  # nothing to convert
        rows = max(1, out.shape[0])
    for old, new, share in zip(out.split(rows), part.split(rows), weight.split(rows), strict=True):
        merged = old.to(lse.dtype)
        merged.lerp_(new.to(lse.dtype), share)
        if merged is not old:
            old.copy_(merged)
    torch.logaddexp(lse, part_lse, out=lse)


def _triton():
    """The same by a Triton kernel; None where triton is not installed."""
    try:
        from zorro_verl.triton_merge import merge_
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        return None
    return merge_
