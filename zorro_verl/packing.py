"""The plan of a packed batch: its forest of segments and every index tensor that follows from it.

Prompts are roots of the forest, responses their children; deeper forests are built the same way:

    rows                      packed, T = 9                      what each packed token sees
    P P P | a a               P P P | a a | b b | Q Q Q'         P: P          a: P, a       Q: Q
    P P P | b b                 prompt  responses  alone                       b: P, b
    Q Q | c                                                      (a row that is alone stays one segment)
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from zorro_verl.forest import Forest
from zorro_verl.grouping import Rows, find_prompt_groups, first_rows, ranges


class Plan:
    """How the rows of one micro-batch are packed: built once, read by every layer, never changed.

    The host does not wait for the device to build it. Tables with an entry for each segment are made on the host, and
    what has one for each token on the device, from these.

    A plain class on purpose: it rides through ``model(**kwargs)``, and FSDP2 rebuilds dataclasses, dicts and tuples
    on the way and casts the float tensors in them.

    Attributes:
        forest: the segments and their attention calls.
        token_index: ``(T,)`` the row token behind each packed token: ``packed = row_values[token_index]``.
        unpack_index: ``(N,)`` the packed token of each row token: ``row_values = packed[unpack_index]``. Made when it
            is first asked for, as `label_row` is: most calls need neither.
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
        self.predictor_slot = ranges(predictor_slots, response_lens, device)
        last = prompt_starts + rows.prompt_lens - 1  # predicts a response's first token, as each of these the next
        first_tokens = (response_lens > 0).long()
        self.predictor_index = _pairs(last, first_tokens, response_starts, response_lens - first_tokens, device)
        self.label_index = self.predictor_slot + 1
        self._rows, self._starts = rows, (prompt_starts, response_starts)
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
    def unpack_index(self) -> Tensor:
        (prompts, responses), rows = self._starts, self._rows
        return _pairs(prompts, rows.prompt_lens, responses, rows.response_lens, self.token_index.device)

    @cached_property
    def label_row(self) -> Tensor:
        rows = torch.arange(self._rows.num_rows)
        return ranges(rows, self._rows.response_lens, self.label_index.device, step=0)

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


def _pairs(
    starts: Tensor, lengths: Tensor, other_starts: Tensor, other_lengths: Tensor, device: torch.device
) -> Tensor:
    """`ranges` of each row's two pieces, one behind the other."""
    both_starts, both_lengths = (
        torch.stack(pair, 1).flatten() for pair in ((starts, other_starts), (lengths, other_lengths))
    )
    return ranges(both_starts, both_lengths, device)
