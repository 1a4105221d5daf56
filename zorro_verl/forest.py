"""A forest of segments in packed order, and the attention calls between them.

A segment is a run of tokens with a parent segment; a token sees its own segment up to itself and all of its
ancestors. Segments are packed level by level, every level in the order of its parents, and roots that have children
before roots that have none. So all descendants at one distance are a contiguous block of queries, and their ancestors
a contiguous block of keys, in the same order: attention needs one causal call over all segments and one rectangular
call per distance, all on views.

In a layer with a sliding window a token sees the last tokens of its row only. What it sees of its ancestors is then no
rectangle: each segment takes a copy of the tail of its ancestors that its window reaches, in front of its own keys,
and one causal call with a window does.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zorro_verl.grouping import exclusive_cumsum, ranges, to_device

MAX_PACKED_TOKENS = 2**31 - 1


class VarlenCall:
    """One variable-length attention call: query block i attends to key block i.

    Attributes:
        cu_seqlens_q, cu_seqlens_k: ``(n + 1,)`` int32 on the device, block bounds relative to the views.
        max_seqlen_q, max_seqlen_k: the longest block.
        query_start: the queries are ``q[query_start:]``; as many as ``cu_seqlens_q`` counts.
        num_keys: the keys are ``k[:num_keys]``.
        key_index: ``(num_keys,)`` int64 on the device: the keys are ``k[key_index]`` instead; None without a window.
        causal: True where a block's last query sees all of its keys and each query before it one key less, False
            for a full rectangle. Without a window, causal blocks are square.
        window: the most keys that a causal query sees, its last ones; None for all.
    """

    __slots__ = (
        "cu_seqlens_q",
        "cu_seqlens_k",
        "max_seqlen_q",
        "max_seqlen_k",
        "query_start",
        "num_keys",
        "key_index",
        "causal",
        "window",
        "_table",
        "_blocks",
        "_runs",
    )

    def __init__(
        self,
        query_lens: Tensor,
        key_lens: Tensor,
        query_start: int,
        causal: bool,
        device: torch.device | str,
        window: int | None = None,
        key_index: Tensor | None = None,
    ):
        cu_q, cu_k = exclusive_cumsum(query_lens), exclusive_cumsum(key_lens)
        cu_seqlens_q = to_device(cu_q.int(), device)
        cu_seqlens_k = cu_seqlens_q if key_lens is query_lens else to_device(cu_k.int(), device)
        longest = int(query_lens.max()), int(key_lens.max())
        numbers = torch.tensor([query_start, int(cu_k[-1]), *longest, causal, window or 0])
        blocks = torch.stack([cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:]], 1)[query_lens > 0]
        self._read(torch.cat([numbers, blocks.flatten()]), cu_seqlens_q, cu_seqlens_k, key_index)

    def _read(self, table: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, key_index: Tensor | None) -> None:
        self._table, self.cu_seqlens_q, self.cu_seqlens_k = table, cu_seqlens_q, cu_seqlens_k
        self.query_start, self.num_keys, self.max_seqlen_q, self.max_seqlen_k, causal, window = table[:6].tolist()
        self.causal, self.window = bool(causal), window or None
        self.key_index = None if self.window is None else key_index
        self._blocks: list[tuple[int, ...]] | None = None
        self._runs: list[tuple[int, int, int, int, int]] | None = None

    @staticmethod
    def to_tensors(calls: Sequence[VarlenCall]) -> tuple[Tensor, Tensor, Tensor]:
        """All that calls say, as three vectors however many they are: numbers on the host, bounds, keys of a window.

        None but the last, without a window, has a length of 0 or 1, which torch.compile takes for a constant.
        """
        numbers = [torch.tensor([call.cu_seqlens_q.numel(), call._table.numel()]) for call in calls]
        tables = torch.cat([x for call, sizes in zip(calls, numbers, strict=True) for x in (sizes, call._table)])
        bounds = torch.cat([x for call in calls for x in (call.cu_seqlens_q, call.cu_seqlens_k)])
        key_index = calls[0].key_index
        return tables, bounds, tables[:0] if key_index is None else key_index

    @classmethod
    def from_tensors(cls, tables: Tensor, bounds: Tensor, key_index: Tensor) -> list[VarlenCall]:
        """The calls of which `to_tensors` gave these."""
        calls = []
        while tables.numel():
            count, size = tables[:2].tolist()
            call = cls.__new__(cls)
            call._read(tables[2 : 2 + size], bounds[:count], bounds[count : 2 * count], key_index)
            calls.append(call)
            tables, bounds = tables[2 + size :], bounds[2 * count :]
        return calls

    @property
    def blocks(self) -> list[tuple[int, ...]]:
        """The non-empty query blocks as ``(q0, q1, k0, k1)`` on the host, for kernels that loop."""
        if self._blocks is None:
            self._blocks = [tuple(block) for block in self._table[6:].view(-1, 4).tolist()]
        return self._blocks

    @property
    def runs(self) -> list[tuple[int, int, int, int, int]]:
        """Neighbouring blocks with as many queries and keys as each other as one: ``(how many, q0, q1, k0, k1)``."""
        if self._runs is None:
            runs: list[tuple[int, int, int, int, int]] = []
            for block in self.blocks:
                count, q0, q1, k0, k1 = runs[-1] if runs else (0, 0, 0, 0, 0)
                next_q0, next_q1, next_k0, next_k1 = block
                adjoins = count and (q1, k1) == (next_q0, next_k0)
                if adjoins and (q1 - q0, k1 - k0) == (count * (next_q1 - next_q0), count * (next_k1 - next_k0)):
                    runs[-1] = (count + 1, q0, next_q1, k0, next_k1)
                else:
                    runs.append((1, next_q0, next_q1, next_k0, next_k1))
            self._runs = runs
        return self._runs

    def keys(self, x: Tensor) -> Tensor:
        """Of ``(T, heads, D)`` keys or values those that the call's blocks are of."""
        return x[: self.num_keys] if self.key_index is None else x[self.key_index]

    def sum_keys(self, gradient: Tensor, num_tokens: int, dtype: torch.dtype) -> Tensor:
        """``(T, heads, D)``: the gradient of `keys`' argument; where keys are copies, summed in ``dtype``.

        Without a window the call has to be one of every token.
        """
        if self.key_index is None:
            return gradient
        total = gradient.new_zeros(num_tokens, *gradient.shape[1:], dtype=dtype)
        return total.index_add_(0, self.key_index, gradient.to(dtype))


class Forest:
    """Segments in packed order, and the attention calls between them.

    Args:
        lengths: ``(S,)`` int64 on the host, tokens of each segment; 0 is allowed.
        parents: ``(S,)`` int64 on the host, the parent segment or -1 for a root.
        device: where the calls' ``cu_seqlens`` live.

    Attributes:
        order: ``(S,)`` the segments in packed order.
        starts: ``(S,)`` where each segment starts in the packed row.
        ancestors: ``(S,)`` tensors, one per distance 1, 2, ...: each segment's ancestor there, or -1.
        num_tokens: T.
        self_call: every segment causal on itself.
        cross_calls: one call per distance 1, 2, ...: segments on their ancestor at that distance.

    Raises:
        ValueError: a parent that is out of range or its own ancestor, or more than 2**31 - 1 packed tokens.
    """

    def __init__(self, lengths: Tensor, parents: Tensor, device: torch.device | str = "cpu"):
        num_segments = lengths.numel()
        self.lengths, self.parents = lengths, parents
        if bool(((parents >= num_segments) | (parents < -1)).any()):
            raise ValueError(f"parents: expected indices in -1..{num_segments - 1}, got {parents.tolist()}")
        self.num_tokens = int(lengths.sum())
        if self.num_tokens > MAX_PACKED_TOKENS:
            raise ValueError(
                f"lengths: expected at most {MAX_PACKED_TOKENS} packed tokens (cu_seqlens are int32), "
                f"got {self.num_tokens}; lower the token budget of a micro-batch"
            )
        ancestors = [parents]  # the last one holds no ancestor
        while bool((ancestors[-1] >= 0).any()):
            if len(ancestors) > num_segments:
                raise ValueError("parents: expected a forest, got a segment that is its own ancestor")
            last = ancestors[-1]
            ancestors.append(torch.where(last >= 0, parents[last.clamp(min=0)], -1))
        depth = (torch.stack(ancestors) >= 0).sum(0)
        self.ancestors = ancestors[:-1]

        rank = torch.zeros(num_segments, dtype=torch.int64)
        is_parent = torch.zeros(num_segments, dtype=torch.bool)
        is_parent[parents[parents >= 0]] = True
        levels, placed = [], 0
        for level in range(len(ancestors)):
            members = (depth == level).nonzero().flatten()
            key = (~is_parent[members]).long() if level == 0 else rank[parents[members]]
            members = members[key.argsort(stable=True)]
            rank[members] = torch.arange(placed, placed + members.numel())
            placed += members.numel()
            levels.append(members)
        self.order = torch.cat(levels)
        self.starts = torch.empty_like(lengths)
        self.starts[self.order] = exclusive_cumsum(lengths[self.order])[:-1]

        ordered = lengths[self.order]
        self.self_call = VarlenCall(ordered, ordered, 0, True, device)
        self._window_calls: dict[int, VarlenCall] = {}
        self._tables: dict[int | None, tuple[Tensor, Tensor, Tensor]] = {}
        self.cross_calls = []
        for distance, ancestor in enumerate(self.ancestors, start=1):
            keys = torch.cat(levels[: len(levels) - distance])
            if distance == len(levels) - 1:  # only roots are keys: those without children stand last
                keys = keys[is_parent[keys]]
            query_lens = torch.zeros_like(lengths).index_add_(0, ancestor.clamp(min=0), lengths * (ancestor >= 0))
            query_start = int(sum(lengths[level].sum() for level in levels[:distance]))
            call = VarlenCall(query_lens[keys], lengths[keys], query_start, False, device)
            if call.max_seqlen_q > 0:
                self.cross_calls.append(call)

    def calls(self, window: int | None) -> list[VarlenCall]:
        """What attention calls for a layer with this window, or with none: first a call of every query."""
        return [self.self_call, *self.cross_calls] if window is None else [self.window_call(window)]

    def tables(self, window: int | None) -> tuple[Tensor, Tensor, Tensor]:
        """These calls as tensors, see `VarlenCall.to_tensors`; made once for each window."""
        if window not in self._tables:
            self._tables[window] = VarlenCall.to_tensors(self.calls(window))
        return self._tables[window]

    def window_call(self, window: int) -> VarlenCall:
        """Every segment on the tail of its ancestors within ``window`` and on itself; built once for each window.

        Args:
            window: tokens of its row that a token sees, itself included; at least 1.
        """
        if window not in self._window_calls:
            self._window_calls[window] = self._build_window_call(window)
        return self._window_calls[window]

    def _build_window_call(self, window: int) -> VarlenCall:
        # A segment's first token is the one that reaches back furthest. One without a token reaches nothing.
        missing = torch.where(self.lengths > 0, window - 1, 0)
        all_starts, all_lens = [self.starts], [self.lengths]
        for ancestor in self.ancestors:
            ancestor_len = torch.where(ancestor >= 0, self.lengths[ancestor], 0)
            taken = torch.minimum(missing, ancestor_len)
            all_starts.append(self.starts[ancestor] + ancestor_len - taken)
            all_lens.append(taken)
            missing = missing - taken
        # The root comes first.
        starts, lens = (torch.stack(pieces[::-1], 1)[self.order] for pieces in (all_starts, all_lens))
        device = self.self_call.cu_seqlens_q.device
        key_index = ranges(starts.flatten(), lens.flatten(), device)
        return VarlenCall(self.lengths[self.order], lens.sum(1), 0, True, device, window, key_index)

    def segment_index(self) -> Tensor:
        """``(T,)`` int64 on the host: the segment of each packed token."""
        return self.order.repeat_interleave(self.lengths[self.order])

    def visible(self, window: int | None = None) -> Tensor:
        """``(T, T)`` bool on the host: may the row's token see the column's? For references and drawings only.

        Args:
            window: tokens of its row that a token sees, itself included; None for all.
        """
        lineage = torch.eye(self.lengths.numel(), dtype=torch.bool)
        before = torch.zeros_like(self.lengths)  # tokens of each segment's ancestors
        for ancestor in self.ancestors:
            has = (ancestor >= 0).nonzero().flatten()
            lineage[has, ancestor[has]] = True
            before[has] += self.lengths[ancestor[has]]
        segment = self.segment_index()
        position = torch.arange(self.num_tokens)
        past = position[:, None] >= position[None, :]
        visible = lineage[segment][:, segment] & (past | (segment[:, None] != segment[None, :]))
        if window is not None:
            place = position + (before - self.starts)[segment]  # in the row
            visible &= place[:, None] - place[None, :] < window
        return visible
