"""Which rows of a batch share a prompt: decided by tokens and positions, but for rows that are to stay alone.

Legend of shape letters, used in the whole package:

    B  rows (samples)            N  tokens of all rows, no padding       E  hidden size
    G  distinct prompts          T  tokens sent through the model        V  vocabulary
    S  segments                  R  response tokens of all rows          Hq, Hkv, D  heads and head dimension
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable

import torch
from torch import Tensor

BLOCK = 64  # tokens that are hashed and compared at once
# Tokens that are copied at once: on a CPU a copy should stay in its caches; elsewhere each chunk costs a few launches.
CHUNK = 2**16
ACCELERATOR_CHUNK = 2**22


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
    """``(B,)`` int64 on the host: a hash of each row's prompt, over tokens, length, first and last positions.

    The same for equal prompts, whatever rows stand around them, on every device and in every process; the reverse is
    checked token by token in `find_prompt_groups`. Within a block of tokens it is multilinear: each token times an odd
    weight of its place in the block. The sums are mixed with the number of their block.
    """
    blocks = _Blocks(rows.cu_seqlens[:-1], rows.prompt_lens, rows.tokens.device)
    weights = mix(torch.arange(1, BLOCK + 1, device=blocks.row.device)) | 1
    sums = mix(blocks.number + 1) + blocks.map(lambda values: (values * weights).sum(1), rows.tokens)
    total = blocks.sum_by_row(mix(sums))
    starts, lens = to_device(torch.stack([rows.cu_seqlens[:-1], rows.prompt_lens]), total.device)
    for axis in torch.atleast_2d(rows.position_ids):
        for ends in (starts, starts + lens - 1):
            total = mix(total) + axis[ends]
    return mix(total + lens).cpu()


def find_prompt_groups(rows: Rows, fingerprints: Tensor | None = None) -> Tensor:
    """``(B,)`` int64 on the host: the group of each row, groups numbered by first appearance.

    Two rows are in one group exactly when their prompts have the same tokens at the same positions. Cost is linear
    in the prompt tokens, and the host waits for the device twice. Each further prompt of the same hash takes the
    comparison once more: one of the same tokens that differs in positions between its ends. A row that is
    `Rows.alone` is a group of its own.

    Args:
        rows: the rows.
        fingerprints: `prompt_fingerprints` of them, where they are at hand.
    """
    keys = prompt_fingerprints(rows) if fingerprints is None else fingerprints
    # A hash may be any number: made small, it leaves numbers for rows that have to leave their group.
    group = number_by_first_appearance(keys)
    apart = rows.num_rows + torch.arange(rows.num_rows)
    group = number_by_first_appearance(torch.where(rows.alone, apart, group))
    while True:
        same = _same_prompt(rows, first_rows(group)[group])
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


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """A small host tensor on ``device``, in its turn: torch waits for nothing, as pageable memory is staged at once."""
    return tensor.to(device, non_blocking=True)


def ranges(starts: Tensor, lengths: Tensor, device: torch.device | str = "cpu", step: int = 1) -> Tensor:
    """``concat(s + step * arange(l) for s, l in zip(starts, lengths))`` as one vectorised int64 tensor on ``device``.

    ``starts`` and ``lengths`` are int64 on the host.
    """
    filled = lengths > 0
    starts, lengths = starts[filled], lengths[filled]
    bounds = exclusive_cumsum(lengths)
    # A running sum of steps: those within a range, and from the last entry of one to the first of the next.
    jumps = starts.clone()
    jumps[1:] -= starts[:-1] + step * (lengths[:-1] - 1)
    first, jumps = to_device(torch.stack([bounds[:-1], jumps]), device)
    steps = torch.full((int(bounds[-1]),), step, dtype=torch.int64, device=device)
    steps[first] = jumps
    return steps.cumsum_(0)


def number_by_first_appearance(keys: Tensor) -> Tensor:
    """``(n,)`` keys -> the number of each distinct key, in order of first appearance."""
    group = torch.unique(keys, return_inverse=True)[1]
    rank = torch.empty(int(group.max()) + 1, dtype=torch.int64)
    rank[first_rows(group).argsort()] = torch.arange(rank.numel())
    return rank[group]


class _Blocks:
    """Prompts in blocks of `BLOCK` tokens; the last one holds a prompt's last 1 to `BLOCK`, and repeats the very last.

    Whole blocks are copied, which is several times faster than token by token.

    Args:
        starts: ``(n,)`` int64 on the host: where each prompt starts among the tokens.
        lengths: ``(n,)`` int64 on the host: tokens of each, at least 1.
        device: where the tokens are.

    Attributes:
        row: ``(m,)`` int64 on the device: the prompt of each block, full ones first, then the last ones.
        number: ``(m,)`` int64 on the device: of each block within its prompt.
    """

    def __init__(self, starts: Tensor, lengths: Tensor, device: torch.device):
        full = (lengths - 1) // BLOCK
        count = int(full.sum())
        starts, lengths, full = to_device(torch.stack([starts, lengths, full]), device)
        rows = torch.arange(lengths.numel(), device=device)
        row = rows.repeat_interleave(full, output_size=count)
        number = torch.arange(count, device=device) - (full.cumsum(0) - full)[row]
        self.row, self.number = torch.cat([row, rows]), torch.cat([number, full])
        self._starts = starts[row] + number * BLOCK
        place = full[:, None] * BLOCK + torch.arange(BLOCK, device=device)
        self._last = starts[:, None] + place.minimum(lengths[:, None] - 1)

    def map(self, function: Callable[..., Tensor], column: Tensor, shift: Tensor | None = None) -> Tensor:
        """``(m,)``: ``function`` of a copy of the blocks of a ``(N,)`` column, ``(blocks, BLOCK)`` at a time.

        With ``shift``, ``(n,)`` on the device, it gets a second argument: the blocks so many tokens further on.
        """
        shifts = None if shift is None else shift[self.row]
        count = self._starts.numel()
        results = []
        step = (CHUNK if column.device.type == "cpu" else ACCELERATOR_CHUNK) // BLOCK
        for i in range(0, count, step):
            part = slice(i, min(i + step, count))
            windows, starts = column.unfold(0, BLOCK, 1), self._starts[part]
            others = [] if shifts is None else [windows.index_select(0, starts + shifts[part])]
            results.append(function(windows.index_select(0, starts), *others))
        others = [] if shift is None else [column[self._last + shift[:, None]]]
        results.append(function(column[self._last], *others))
        return torch.cat(results)

    def sum_by_row(self, values: Tensor) -> Tensor:
        """``(m,)`` int64 values of blocks, summed for each prompt: ``(n,)``."""
        total = torch.zeros(self._last.shape[0], dtype=torch.int64, device=values.device)
        return total.index_add_(0, self.row, values)


def _columns(rows: Rows) -> list[Tensor]:
    """All that makes a prompt, ``(N,)`` each: tokens, and positions on every axis."""
    return [rows.tokens, *torch.atleast_2d(rows.position_ids)]


def _same_prompt(rows: Rows, other: Tensor) -> Tensor:
    """``(B,)`` bool on the host: is row b's prompt the prompt of row ``other[b]``?"""
    same = rows.prompt_lens == rows.prompt_lens[other]
    asked = (same & (other != torch.arange(rows.num_rows))).nonzero().flatten()
    if asked.numel() == 0:
        return same
    starts, device = rows.cu_seqlens[:-1], rows.tokens.device
    blocks = _Blocks(starts[asked], rows.prompt_lens[asked], device)
    shift = to_device((starts[other] - starts)[asked], device)
    differing = (blocks.map(lambda a, b: a.ne_(b).sum(1), column, shift) for column in _columns(rows))
    same[asked] = (blocks.sum_by_row(functools.reduce(operator.add, differing)) == 0).cpu()
    return same


def mix(x: Tensor) -> Tensor:
    """A hash of each int64: the finaliser of SplitMix64 (Steele, Lea and Flood, 2014), in arithmetic that wraps."""
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * (0xBF58476D1CE4E5B9 - (1 << 64))
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * (0x94D049BB133111EB - (1 << 64))
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def _describe(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype}"
