"""Masks of 0 and 1: checked, and as the blocks that a variable-length attention kernel takes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad


def zeros_and_ones(name: str, mask: Tensor) -> Tensor:
    """A mask of any dtype as bool; a ValueError that names it where it holds anything but 0 and 1."""
    dense(name, mask)
    if mask.dtype == torch.bool:
        return mask
    other = mask[(mask != 0) & (mask != 1)]
    if other.numel() > 0:
        raise ValueError(f"{name}: expected 0 and 1 only, got {other[0].item()}")
    return mask == 1


def block_bounds(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Where the blocks of a block-diagonal mask start, in queries and in keys.

    Args:
        mask: ``(total_q, total_kv)`` bool. Blocks follow each other on the diagonal and cover every query and every
            key. A block of n queries and m >= n keys is causal from its bottom right corner: its i-th query sees the
            first m - n + 1 + i of its keys.

    Returns:
        Two ``(blocks + 1,)`` int64 tensors on the mask's device, each ending with the total. There is one way at most
        to read a mask so: blocks share no keys, so two rows belong to one block exactly when they start at one key.

    Raises:
        ValueError: any other mask, with the row that does not fit.
    """
    num_queries, num_keys = mask.shape
    start, count = mask.view(torch.uint8).argmax(1), mask.sum(1)
    end = start + count
    key = torch.arange(num_keys, device=mask.device)
    as_a_run = (key >= start[:, None]) & (key < end[:, None])
    _refuse_row(count == 0, "row {} sees no key (has its block more queries than keys?)")
    _refuse_row((as_a_run != mask).any(1), "row {} sees keys that are not neighbours")

    start_before, end_before = pad(start[:-1], (1, 0), value=-1), pad(end[:-1], (1, 0))
    opens = start != start_before
    fits = torch.where(opens, start == end_before, end == end_before + 1)
    _refuse_row(~fits, "row {} neither sees one key more than the row before it nor begins behind that row's last key")
    if int(end[-1]) != num_keys:
        raise ValueError(f"mask: expected every key in a block, got {num_keys} keys and blocks of {int(end[-1])}")
    first_row = opens.nonzero().flatten()
    return pad(first_row, (0, 1), value=num_queries), pad(start[first_row], (0, 1), value=num_keys)


def dense(name: str, value: Any) -> None:
    """A ValueError that names ``value`` where it is no ordinary tensor, with all of its values at hand."""
    if not isinstance(value, Tensor):
        raise ValueError(f"{name}: expected a tensor, got {describe(value)}")
    if value.layout != torch.strided or value.is_nested or value.is_meta:
        kind = "nested" if value.is_nested else "meta" if value.is_meta else value.layout
        raise ValueError(f"{name}: expected a dense tensor, got a {kind} one")


def describe(value: Any) -> str:
    """What came, for an error: shape and dtype of a tensor, else the type."""
    return f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else type(value).__name__


def _refuse_row(bad: Tensor, what: str) -> None:
    if bool(bad.any()):
        raise ValueError(
            "mask: expected blocks on the diagonal, each causal from its bottom right corner, got a mask whose "
            f"{what.format(int(bad.nonzero()[0]))}; such a mask needs a kernel that takes masks"
        )
