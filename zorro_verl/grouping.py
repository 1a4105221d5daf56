"""Which rows of a batch share a prompt: decided by tokens and positions, but for rows that are to stay alone.

Legend of shape letters, used in the whole package:

    B  rows (samples)            N  tokens of all rows, no padding       E  hidden size
    G  distinct prompts          T  tokens sent through the model        V  vocabulary
    S  segments                  R  response tokens of all rows          Hq, Hkv, D  heads and head dimension
"""

from __future__ import annotations

import torch
from torch import Tensor


class Rows:
    """A batch as flat, unpadded rows, each a prompt followed by its response.

    Attributes:
        tokens: ``(N,)`` int64, row after row.
        position_ids: ``(N,)`` int64, or ``(A, N)`` with A axes of rotary positions.
        cu_seqlens: ``(B + 1,)`` int64 on the host: where each row starts in ``tokens``.
        prompt_lens: ``(B,)`` int64 on the host: prompt tokens of each row, at least 1.
        alone: ``(B,)`` bool on the host: rows that share with nobody, for what their tokens don't say of their prompt.

    The row bounds live on the host because segment tables are small and are built there; everything that has one
    entry per token stays on the device of ``tokens``.
    """

    __slots__ = ("tokens", "position_ids", "cu_seqlens", "prompt_lens", "alone")

    def __init__(
        self,
        tokens: Tensor,
        position_ids: Tensor,
        cu_seqlens: Tensor,
        prompt_lens: Tensor,
        alone: Tensor | None = None,
    ):
        if tokens.dim() != 1 or tokens.dtype != torch.int64:
            raise ValueError(f"tokens: expected a (N,) int64 tensor, got {tuple(tokens.shape)} {tokens.dtype}")
        if position_ids.shape[-1] != tokens.shape[0]:
            raise ValueError(
                f"position_ids: expected {tokens.shape[0]} positions on the last axis, got {tuple(position_ids.shape)}"
            )
        self.tokens = tokens
        self.position_ids = position_ids
        self.cu_seqlens = cu_seqlens.to("cpu", torch.int64)
        self.prompt_lens = prompt_lens.to("cpu", torch.int64)
        self.alone = torch.zeros_like(self.prompt_lens, dtype=torch.bool) if alone is None else alone.cpu()
        lens = self.cu_seqlens.diff()
        if lens.numel() == 0:
            raise ValueError("input_ids: expected at least one row, got an empty batch")
        if int(self.cu_seqlens[-1]) != tokens.shape[0] or self.prompt_lens.shape != lens.shape:
            raise ValueError(
                f"cu_seqlens: expected {self.prompt_lens.numel()} rows over {tokens.shape[0]} tokens, "
                f"got {lens.numel()} rows over {int(self.cu_seqlens[-1])}"
            )
        if self.alone.dtype != torch.bool or self.alone.shape != lens.shape:
            raise ValueError(f"alone: expected ({lens.numel()},) bool, got {_describe(self.alone)}")
        bad = ((self.prompt_lens < 1) | (self.prompt_lens > lens)).nonzero().flatten().tolist()
        if bad:
            raise ValueError(
                f"input_ids: expected at least one prompt token in every row, got none in row(s) {bad[:8]}; "
                "the first response token has nothing to be predicted from. Drop these rows or check "
                "attention_mask and the prompt width"
            )

    @classmethod
    def from_padded(
        cls,
        input_ids: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor,
        response_length: int,
        alone: Tensor | None = None,
    ) -> Rows:
        """Rows of a padded ``(B, S)`` batch whose last ``response_length`` columns hold the responses.

        Where the padding lies, and which token it is written with, carries no meaning: the mask alone decides.
        ``position_ids`` is ``(B, S)`` or ``(B, A, S)``.
        """
        if input_ids.dim() != 2 or input_ids.dtype != torch.int64:
            raise ValueError(f"input_ids: expected a (B, S) int64 tensor, got {_describe(input_ids)}")
        if attention_mask.shape != input_ids.shape:
            raise ValueError(
                f"attention_mask: expected the shape of input_ids {tuple(input_ids.shape)}, "
                f"got {tuple(attention_mask.shape)}"
            )
        shape = tuple(position_ids.shape)
        if len(shape) not in (2, 3) or (shape[0], shape[-1]) != tuple(input_ids.shape):
            raise ValueError(f"position_ids: expected (B, S) = {tuple(input_ids.shape)} or (B, A, S), got {shape}")
        if position_ids.is_floating_point() or position_ids.is_complex():
            raise ValueError(f"position_ids: expected an integer tensor, got {position_ids.dtype}")
        if not 1 <= response_length < input_ids.shape[1]:
            raise ValueError(
                f"responses: expected a width in 1..{input_ids.shape[1] - 1} (input_ids has {input_ids.shape[1]} "
                f"columns), got {response_length}"
            )
        valid = attention_mask.bool()
        lens = valid.sum(1)
        prompt_lens = valid[:, : input_ids.shape[1] - response_length].sum(1)
        if position_ids.dim() == 3:
            position_ids = position_ids.transpose(0, 1)[:, valid]
        else:
            position_ids = position_ids[valid]
        return cls(input_ids[valid], position_ids.long(), exclusive_cumsum(lens.cpu()), prompt_lens, alone)

    @property
    def num_rows(self) -> int:
        return self.prompt_lens.numel()

    @property
    def lens(self) -> Tensor:
        """``(B,)`` int64 on the host: tokens of each row."""
        return self.cu_seqlens.diff()

    @property
    def response_lens(self) -> Tensor:
        """``(B,)`` int64 on the host: response tokens of each row, 0 for an empty response."""
        return self.lens - self.prompt_lens


def prompt_fingerprints(rows: Rows) -> Tensor:
    """``(B,)`` int64 on the host: a hash of each row's prompt, over tokens, positions and length.

    A sum of 64-bit mixed (token, position, offset) triples, so one pass over the prompt tokens and no loop over rows.
    Equal prompts have equal fingerprints; the reverse is checked token by token in `find_prompt_groups`.
    """
    row, offset, index = _prompt_tokens(rows)
    value = mix(rows.tokens[index] + 1) ^ mix(offset * 3 + 1)
    for axis in torch.atleast_2d(rows.position_ids):
        value = mix(value ^ axis[index])
    device = rows.tokens.device
    total = torch.zeros(rows.num_rows, dtype=torch.int64, device=device).index_add_(0, row, mix(value))
    return mix(total + rows.prompt_lens.to(device)).cpu()


def find_prompt_groups(rows: Rows) -> Tensor:
    """``(B,)`` int64 on the host: the group of each row, groups numbered by first appearance.

    Two rows are in one group exactly when their prompts have the same tokens at the same positions. Cost is linear
    in the prompt tokens, with one device synchronisation. A row that is `Rows.alone` is a group of its own.
    """
    group = _by_prompt(rows)
    if not bool(rows.alone.any()):
        return group
    return number_by_first_appearance(torch.where(rows.alone, rows.num_rows + torch.arange(rows.num_rows), group))


def _by_prompt(rows: Rows) -> Tensor:
    group = number_by_first_appearance(prompt_fingerprints(rows))
    while True:
        first = first_rows(group)
        same = _same_prompt(rows, first[group])
        if bool(same.all()):
            return group
        # A hash collision: rows unlike the first row of their group leave it together and are compared again.
        group = number_by_first_appearance(torch.where(same, group, group + rows.num_rows))


def first_rows(group_index: Tensor) -> Tensor:
    """``(G,)`` int64: the first row of each group."""
    rows = torch.arange(group_index.numel())
    first = torch.full((int(group_index.max()) + 1,), group_index.numel())
    return first.scatter_reduce_(0, group_index, rows, "amin")


def exclusive_cumsum(lengths: Tensor) -> Tensor:
    """``(n + 1,)``: 0 and the running sums of ``(n,)`` lengths."""
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0))


def ranges(starts: Tensor, lengths: Tensor, device: torch.device | str = "cpu") -> Tensor:
    """``concat(arange(s, s + l) for s, l in zip(starts, lengths))`` as one vectorised int64 tensor on ``device``."""
    total = int(lengths.sum())
    shift = (starts - exclusive_cumsum(lengths)[:-1]).to(device)
    return torch.arange(total, device=device) + shift.repeat_interleave(lengths.to(device), output_size=total)


def number_by_first_appearance(keys: Tensor) -> Tensor:
    """``(n,)`` keys -> the number of each distinct key, in order of first appearance."""
    group = torch.unique(keys, return_inverse=True)[1]
    rank = torch.empty(int(group.max()) + 1, dtype=torch.int64)
    rank[first_rows(group).argsort()] = torch.arange(rank.numel())
    return rank[group]


def _prompt_tokens(rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
    """Row, offset within the row and index into ``rows.tokens`` of every prompt token."""
    device, total = rows.tokens.device, int(rows.prompt_lens.sum())
    row = torch.arange(rows.num_rows, device=device).repeat_interleave(rows.prompt_lens.to(device), output_size=total)
    offset = ranges(torch.zeros_like(rows.prompt_lens), rows.prompt_lens, device)
    return row, offset, rows.cu_seqlens[:-1].to(device)[row] + offset


def _same_prompt(rows: Rows, other: Tensor) -> Tensor:
    """``(B,)`` bool on the host: is row b's prompt the prompt of row ``other[b]``?"""
    row, offset, index = _prompt_tokens(rows)
    same_len = rows.prompt_lens == rows.prompt_lens[other]
    partner = torch.where(same_len, other, torch.arange(rows.num_rows)).to(row.device)
    other_index = rows.cu_seqlens[:-1].to(row.device)[partner][row] + offset
    differs = rows.tokens[index] != rows.tokens[other_index]
    for axis in torch.atleast_2d(rows.position_ids):
        differs |= axis[index] != axis[other_index]
    count = torch.zeros(rows.num_rows, dtype=torch.int64, device=row.device).index_add_(0, row, differs.long())
    return same_len & (count == 0).cpu()


def mix(x: Tensor) -> Tensor:
    """A hash of each int64: the finaliser of SplitMix64 (Steele, Lea and Flood, 2014), in arithmetic that wraps."""
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * (0xBF58476D1CE4E5B9 - (1 << 64))
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * (0x94D049BB133111EB - (1 << 64))
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def _describe(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype}"
