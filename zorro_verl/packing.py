"""The plan of a packed batch: a forest of segments and every index tensor that follows from it.

A segment is a run of tokens with a parent segment; a token sees its own segment up to itself and all of its
ancestors. Prompts are roots, responses their children; deeper forests are built the same way. Segments are packed
level by level, every level in the order of its parents, and roots that have children before roots that have none:

    rows                      packed, T = 9                      what each packed token sees
    P P P | a a               P P P | a a | b b | Q Q Q'         P: P          a: P, a       Q: Q
    P P P | b b                 prompt  responses  alone                       b: P, b
    Q Q | c                                                      (a row that is alone stays one segment)

In this order all descendants at one distance are a contiguous block of queries, and their ancestors a contiguous
block of keys, in the same order. So attention needs one causal call over all segments and one rectangular call per
distance, all on views.

In a layer with a sliding window a token sees the last tokens of its row only. What it sees of its ancestors is then no
rectangle: each segment takes a copy of the tail of its ancestors that its window reaches, in front of its own keys,
and one causal call with a window does.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from zorro_verl.grouping import Rows, exclusive_cumsum, find_prompt_groups, first_rows, ranges

MAX_PACKED_TOKENS = 2**31 - 1


class VarlenCall:
    """One variable-length attention call: query block i attends to key block i.

    Attributes:
        cu_seqlens_q, cu_seqlens_k: ``(n + 1,)`` int32 on the device, block bounds relative to the views.
        max_seqlen_q, max_seqlen_k: the longest block.
        query_start: the queries are ``q[query_start:]``; as many as ``cu_seqlens_q`` counts.
        num_keys: the keys are ``k[:num_keys]``.
        key_index: ``(num_keys,)`` int64 on the device: the keys are ``k[key_index]`` instead; None without a window.
        blocks: the non-empty query blocks as ``(q0, q1, k0, k1)`` on the host, for kernels that loop.
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
        "blocks",
        "causal",
        "window",
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
        self.cu_seqlens_q = cu_q.to(device, torch.int32)
        self.cu_seqlens_k = self.cu_seqlens_q if key_lens is query_lens else cu_k.to(device, torch.int32)
        self.max_seqlen_q = int(query_lens.max())
        self.max_seqlen_k = int(key_lens.max())
        self.query_start = query_start
        self.num_keys = int(cu_k[-1])
        self.key_index = key_index
        self.causal = causal
        self.window = window
        bounds = torch.stack([cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:]], 1)
        self.blocks = [tuple(b) for b in bounds[query_lens > 0].tolist()]


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
        self.cross_calls = []
        for distance, ancestor in enumerate(self.ancestors, start=1):
            keys = torch.cat(levels[: len(levels) - distance])
            if distance == len(levels) - 1:  # only roots are keys: those without children stand last
                keys = keys[is_parent[keys]]
            query_lens = torch.zeros_like(lengths).index_add_(0, ancestor.clamp(min=0), lengths * (ancestor >= 0))
            query_start = int(sum(lengths[level].sum() for level in levels[:distance]))
            call = VarlenCall(query_lens[keys], lengths[keys], query_start, False, device)
            if call.blocks:
                self.cross_calls.append(call)

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
        starts, lens = [self.starts], [self.lengths]
        for ancestor in self.ancestors:
            ancestor_len = torch.where(ancestor >= 0, self.lengths[ancestor], 0)
            taken = torch.minimum(missing, ancestor_len)
            starts.append(self.starts[ancestor] + ancestor_len - taken)
            lens.append(taken)
            missing = missing - taken
        starts, lens = (torch.stack(pieces[::-1], 1)[self.order] for pieces in (starts, lens))  # the root comes first
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


class Plan:
    """How the rows of one micro-batch are packed: built once, read by every layer, never changed.

    A plain class on purpose: it rides through ``model(**kwargs)``, and FSDP2 rebuilds dataclasses, dicts and tuples
    on the way and casts the float tensors in them.

    Attributes:
        forest: the segments and their attention calls.
        token_index: ``(T,)`` the row token behind each packed token: ``packed = row_values[token_index]``.
        unpack_index: ``(N,)`` the packed token of each row token: ``row_values = packed[unpack_index]``.
        predictor_slot: ``(R,)`` the row token that predicts each response token (the one before it).
        predictor_index: ``(R,)`` the same in the packed row; a shared prompt's last token appears once per response.
        label_index: ``(R,)`` the response tokens themselves, as row tokens.
        label_row: ``(R,)`` the row of each response token.
        group_index: ``(B,)`` on the host, the group of each row.
        num_groups, num_row_tokens, num_tokens: G, N, T.
        longest_row: tokens of the longest row.

    All but ``group_index`` are int64 on the device of the rows' tokens.
    """

    def __init__(self, rows: Rows, group_index: Tensor):
        if group_index.shape != rows.prompt_lens.shape:
            raise ValueError(f"group_index: expected ({rows.num_rows},), got {tuple(group_index.shape)}")
        device = rows.tokens.device
        starts, response_lens = rows.cu_seqlens[:-1], rows.response_lens
        first = first_rows(group_index)
        shared = group_index.bincount()[group_index] > 1
        children = shared.nonzero().flatten()

        root_lens = torch.where(shared[first], rows.prompt_lens[first], rows.lens[first])
        lengths = torch.cat([root_lens, response_lens[children]])
        parents = torch.cat([torch.full_like(root_lens, -1), group_index[children]])
        sources = torch.cat([starts[first], (starts + rows.prompt_lens)[children]])
        self.forest = forest = Forest(lengths, parents, device)

        prompt_starts = forest.starts[group_index]
        response_starts = prompt_starts + rows.prompt_lens
        response_starts[children] = forest.starts[first.numel() :]
        predictor_slots = starts + rows.prompt_lens - 1

        self.group_index = group_index
        self.num_groups = first.numel()
        self.num_row_tokens = rows.tokens.numel()
        self.num_tokens = forest.num_tokens
        self.longest_row = int(rows.lens.max())
        self.token_index = ranges(sources[forest.order], lengths[forest.order], device)
        self.unpack_index = ranges(
            torch.stack([prompt_starts, response_starts], 1).flatten(),
            torch.stack([rows.prompt_lens, response_lens], 1).flatten(),
            device,
        )
        self.predictor_slot = ranges(predictor_slots, response_lens, device)
        self.predictor_index = self.unpack_index[self.predictor_slot]
        self.label_index = self.predictor_slot + 1
        self.label_row = torch.arange(rows.num_rows, device=device).repeat_interleave(
            response_lens.to(device), output_size=self.predictor_slot.numel()
        )
        self._rows = rows
        self._dense_masks: dict[int | None, Tensor] = {}

    @property
    def token_ratio(self) -> float:
        """Row tokens per packed token, N / T: how much work sharing saves outside attention."""
        return self.num_row_tokens / max(1, self.num_tokens)

    def dense_mask(self, window: int | None = None) -> Tensor:
        """``(T, T)`` bool on the device: the forest's visibility, for the dense reference; built once per window."""
        if window not in self._dense_masks:
            self._dense_masks[window] = self.forest.visible(window).to(self.token_index.device)
        return self._dense_masks[window]

    @cached_property
    def unshared(self) -> Plan:
        """The plan of the same rows with nothing shared: T = N, every row one causal segment."""
        return Plan(self._rows, torch.arange(self._rows.num_rows))

    def pack(self, values: Tensor, dim: int = -1) -> Tensor:
        """``(..., N)`` values of row tokens to ``(..., T)`` packed ones (of each group's first row)."""
        return values.index_select(dim, self.token_index)

    def unpack(self, values: Tensor, dim: int = -1) -> Tensor:
        """``(..., T)`` packed values to ``(..., N)`` in the rows' own order; the gradient sums over copies."""
        return values.index_select(dim, self.unpack_index)


def build_plan(rows: Rows, group_index: Tensor | None = None) -> Plan:
    """The plan that packs ``rows``, each shared prompt once.

    Args:
        rows: the micro-batch.
        group_index: ``(B,)`` groups as `find_prompt_groups` gives them, which is what runs when it is None.
    """
    return Plan(rows, find_prompt_groups(rows) if group_index is None else group_index)
