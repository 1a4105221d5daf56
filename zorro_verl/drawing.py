"""A micro-batch as a person sees it: its segments, and which tokens attend to which, in blocks of a size that fits.

What is drawn is read from the attention calls that run, block by block, and not from what they ought to compute.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import Enum
from math import ceil
from typing import NamedTuple

import torch
from torch import Tensor

from zorro_verl.forest import VarlenCall
from zorro_verl.grouping import Rows, exclusive_cumsum
from zorro_verl.packing import Plan

_MOST_BOUNDS = 10  # of a call, that are written out


class Kind(Enum):
    """What a segment is."""

    PROMPT = "prompt"  # of several rows
    RESPONSE = "response"  # whose prompt is another segment
    ALONE = "row alone"  # prompt and response of a row that shares with nobody


class Pairs(Enum):
    """What attends to what; the value is the first index of `Blocks.pairs`."""

    PROMPT_ITSELF = 0
    RESPONSE_ITSELF = 1
    ALONE_ITSELF = 2
    RESPONSE_PROMPT = 3

    @property
    def label(self) -> str:
        return ("prompt on itself", "response on itself", "row alone, on itself", "response on its prompt")[self.value]


class Segment(NamedTuple):
    """A run of packed tokens."""

    kind: Kind
    start: int
    end: int
    row: int | None  # of the batch; None for a shared prompt
    group: int  # which prompt

    @property
    def num_tokens(self) -> int:
        return self.end - self.start

    @property
    def label(self) -> str:
        return f"prompt {self.group}" if self.row is None else f"row {self.row}"


class Marks(NamedTuple):
    """What a cell is drawn as: all of its pairs attend, some do, or none does."""

    full: str
    partly: str
    none: str

    @classmethod
    def of(cls, encoding: str) -> Marks:
        """Those that text in this encoding can carry."""
        try:
            "".join(BLOCK_MARKS).encode(encoding)
        except UnicodeEncodeError:
            return cls("#", "+", ".")
        return BLOCK_MARKS


BLOCK_MARKS = Marks("█", "▒", "·")


class Blocks(NamedTuple):
    """Attended pairs of packed tokens, counted in cells of ``cell`` x ``cell``."""

    pairs: Tensor  # (4, K, K) int64: kind of pair as in `Pairs`, queries, keys
    cell: int  # tokens
    num_tokens: int

    def shares(self) -> Tensor:
        """``(4, K, K)`` float64: of each cell's pairs the share that attends."""
        return self.pairs / self._sizes()

    def lines(self, found: Sequence[Segment] = (), marks: Marks = BLOCK_MARKS) -> list[str]:
        """A line for each row of cells.

        Args:
            found: the segments, whose names follow the lines that they begin in.
            marks: of the cells.
        """
        seen = self.pairs.sum(0)
        kinds = (seen > 0).int() + (seen == self._sizes()).int()
        names: dict[int, list[str]] = {}
        for segment in found:
            if segment.num_tokens:
                names.setdefault(segment.start // self.cell, []).append(segment.label)
        lines = [" ".join((marks.none, marks.partly, marks.full)[kind] for kind in line) for line in kinds.tolist()]
        for number, (first, *others) in names.items():
            lines[number] += f"  {first}" + f" and {len(others)} more" * bool(others)
        return lines

    def _sizes(self) -> Tensor:
        edges = torch.arange(self.pairs.shape[1] + 1) * self.cell
        lens = edges.clamp(max=self.num_tokens).diff()
        return lens[:, None] * lens[None, :]


def parse_shape(text: str) -> list[tuple[int, list[int]]]:
    """``6:3,4,2 4:2``: a prompt of 6 tokens with three responses, and one of 4 with one; ``64x8`` is 64 eight times.

    Raises:
        ValueError: anything else, or a prompt without a token.
    """
    groups: list[tuple[int, list[int]]] = []
    for part in text.split():
        if not re.fullmatch(r"[1-9]\d*:\d+(x[1-9]\d*)?(,\d+(x[1-9]\d*)?)*", part):
            groups = []
            break
        prompt, _, responses = part.partition(":")
        lens: list[int] = []
        for response in responses.split(","):
            length, _, times = response.partition("x")
            lens += [int(length)] * int(times or 1)
        groups.append((int(prompt), lens))
    if not groups:
        raise ValueError(
            "BATCH: expected a dump that is there, or lengths such as '6:3,4,2 4:2' or '512:64x8' (tokens of a prompt, "
            f"and of each of its responses), got {text!r}"
        )
    return groups


def rows_of_shape(groups: Sequence[tuple[int, Sequence[int]]]) -> Rows:
    """Rows of these lengths, group after group; the prompts of no two groups are the same."""
    rows = [([group + 1] * prompt, [0] * length) for group, (prompt, lens) in enumerate(groups) for length in lens]
    return make_rows(rows)


def make_rows(rows: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Rows:
    """Prompts and responses as token ids, without padding, as the batch that a model would get."""
    lens = torch.tensor([len(prompt) + len(response) for prompt, response in rows])
    tokens = torch.tensor([token for prompt, response in rows for part in (prompt, response) for token in part])
    positions = torch.cat([torch.arange(int(length)) for length in lens])
    prompt_lens = torch.tensor([len(prompt) for prompt, _ in rows])
    return Rows(tokens, positions, exclusive_cumsum(lens), prompt_lens)


def segments(plan: Plan) -> list[Segment]:
    """The plan's segments in packed order."""
    forest, group_index = plan.forest, plan.group_index
    shared = group_index.bincount()[group_index] > 1
    children = shared.nonzero().flatten().tolist()
    row_of = {plan.num_groups + i: row for i, row in enumerate(children)}
    row_of |= {int(group_index[row]): row for row in (~shared).nonzero().flatten().tolist()}
    found = []
    for segment in forest.order.tolist():
        start, row = int(forest.starts[segment]), row_of.get(segment)
        group = segment if row is None else int(group_index[row])
        kind = Kind.PROMPT if row is None else Kind.ALONE if segment < plan.num_groups else Kind.RESPONSE
        found.append(Segment(kind, start, start + int(forest.lengths[segment]), row, group))
    return found


def reach(plan: Plan, window: int | None) -> int | None:
    """The window that a layer's attention runs with: none where it holds every row."""
    return None if window is None or plan.longest_row <= window else window


def count_pairs(plan: Plan, window: int | None = None) -> int:
    """How many pairs of a query and a key one head's attention computes, in a layer with this window or without."""
    return int(count_blocks(plan, 1, window).pairs.sum())


def count_blocks(plan: Plan, most_cells: int, window: int | None = None) -> Blocks:
    """The pairs that a layer's attention calls compute, in at most ``most_cells`` x ``most_cells`` cells.

    Args:
        plan: of the micro-batch.
        most_cells: at least 1.
        window: of a layer with a sliding window, in tokens, the query's own included; None for a layer without.
    """
    cell, window = ceil(plan.num_tokens / most_cells), reach(plan, window)
    size = ceil(plan.num_tokens / cell)
    pairs = torch.zeros(len(Pairs), size, size, dtype=torch.int64)
    itself = {segment.start: Pairs[f"{segment.kind.name}_ITSELF"] for segment in segments(plan) if segment.num_tokens}
    for call in plan.forest.calls(window):
        for q0, q1, k0, k1 in call.blocks:
            # From here on keys are the segment's own; those before are its ancestors'.
            own = k1 - (q1 - q0) if call.causal else k1
            for start, end, kind in ((k0, own, Pairs.RESPONSE_PROMPT), (own, k1, itself[call.query_start + q0])):
                for run in _runs(call, start, end):
                    counted = _count(call, (q0, q1), own, run, cell, size)
                    line = (call.query_start + q0) // cell
                    pairs[kind.value, line : line + counted.shape[0]] += counted
    return Blocks(pairs, cell, plan.num_tokens)


class _Run(NamedTuple):
    """Keys of a call that lie side by side in the packed row."""

    start: int  # among the call's keys
    end: int
    packed: int  # where the first of them lies


def _runs(call: VarlenCall, start: int, end: int) -> list[_Run]:
    """What a call's keys [start, end) consist of."""
    if start == end or call.key_index is None:
        return [_Run(start, end, start)] if start < end else []
    places = call.key_index[start:end].cpu()
    firsts = [0, *((places.diff() != 1).nonzero().flatten() + 1).tolist()]
    return [
        _Run(start + first, start + last, int(places[first]))
        for first, last in zip(firsts, [*firsts[1:], end - start], strict=True)
    ]


def _count(call: VarlenCall, queries: tuple[int, int], own: int, run: _Run, cell: int, size: int) -> Tensor:
    """Pairs of a block's queries with one run of its keys, ``(lines, size)``: the cells from the first query's line on.

    Its cost is that of the cells, however long the segments are: of each cell the pairs are summed in closed form.

    Args:
        queries: the block's, in a causal call of its keys from ``own`` on.
    """
    first, last = (call.query_start + query for query in queries)
    edges = torch.tensor([first, *range((first // cell + 1) * cell, last, cell), last])  # of lines of cells
    # Of the run's keys before x, those in each column are x + shift within these bounds.
    shift = run.packed - run.start - torch.arange(size) * cell
    low, high = ((bound + shift).clamp(0, cell) for bound in (run.start, run.end))
    if not call.causal:
        return edges.diff()[:, None] * (high - low)

    def before(offset: int) -> Tensor:
        return _sum_clamped(edges[:, None] + (offset + shift), low, high).diff(dim=0)

    offset = own - first + 1  # a query sees the keys before its own place + 1, and of those the window's
    return before(offset) - (low * edges.diff()[:, None] if call.window is None else before(offset - call.window))


def _sum_clamped(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """An integer function whose step from x to x + 1 is x between ``low`` and ``high``: differences of it are sums."""
    inside = x.clamp(low, high)
    return low * x.clamp(max=low) + (inside * (inside - 1) - low * (low - 1)) // 2 + high * (x - high).clamp(min=0)


def call_lines(plan: Plan, window: int | None = None) -> list[str]:
    """The attention calls of a layer: what each computes, and below that the bounds of its blocks."""
    lines = []
    for call in plan.forest.calls(reach(plan, window)):
        asked = f"queries [{call.query_start}:{call.query_start + int(call.cu_seqlens_q[-1])})"
        if call.window is not None:
            copies = call.num_keys - plan.num_tokens
            lines.append(
                f"window: every segment on itself and the end of its prompt, causal, {asked}, {call.num_keys} keys, "
                f"{copies} of them copies"
            )
        elif call.causal:
            lines.append(f"self: every segment on itself, causal, {asked}")
        else:
            lines.append(f"cross: responses on their prompt, full rectangles, {asked} keys [0:{call.num_keys})")
        queries, keys = call.cu_seqlens_q.tolist(), call.cu_seqlens_k.tolist()
        if queries == keys:
            lines.append(f"  cu_seqlens {_shortened(queries)}")
        else:
            lines += [f"  cu_seqlens_q {_shortened(queries)}", f"  cu_seqlens_k {_shortened(keys)}"]
    return lines


def _shortened(bounds: list[int]) -> str:
    if len(bounds) <= _MOST_BOUNDS:
        return str(bounds)
    start = ", ".join(map(str, bounds[: _MOST_BOUNDS - 2]))
    return f"[{start}, ..., {bounds[-1]}] ({len(bounds)} of them)"
