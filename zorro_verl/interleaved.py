"""A padded batch as one row, each prompt before its responses, ``[P1][R11][R12]..[P2]..``; and the way back."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zorro_verl.grouping import Rows, exclusive_cumsum, ranges
from zorro_verl.masks import dense, describe, zeros_and_ones


class CheckedBatch(NamedTuple):
    """A padded batch whose arguments were checked."""

    input_ids: Tensor
    valid: Tensor  # (B, S) bool
    position_ids: Tensor  # (B, S)
    rows: Rows
    prompt_width: int

    @classmethod
    def read(
        cls,
        input_ids: Tensor,
        response_length: int,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        length_name: str = "response_length",
    ) -> CheckedBatch:
        dense("input_ids", input_ids)
        if input_ids.dim() != 2 or input_ids.dtype != torch.int64 or input_ids.shape[1] < 2:
            raise ValueError(f"input_ids: expected (B, S) int64 of at least 2 columns, got {describe(input_ids)}")
        columns = input_ids.shape[1]
        if type(response_length) is bool or not isinstance(response_length, int) or not 1 <= response_length < columns:
            raise ValueError(
                f"{length_name}: expected an int in 1..{columns - 1}, less than the {columns} columns of input_ids, "
                f"got {response_length!r}"
            )
        valid = torch.ones_like(input_ids, dtype=torch.bool)
        if attention_mask is not None:
            check_like(input_ids, "attention_mask", attention_mask)
            valid = zeros_and_ones("attention_mask", attention_mask)
        if position_ids is None:
            position_ids = (valid.cumsum(1) - 1).clamp(min=0)
        check_like(input_ids, "position_ids", position_ids)
        if position_ids.dtype == torch.bool or position_ids.is_floating_point() or position_ids.is_complex():
            raise ValueError(f"position_ids: expected integers, got {position_ids.dtype}")
        rows = Rows.from_padded(input_ids, valid, position_ids, response_length)
        return cls(input_ids, valid, position_ids, rows, columns - response_length)

    def prompt_tokens(self, first_of_row: Tensor) -> tuple[Tensor, Tensor]:
        """Every valid prompt token, and the one that stands in its place in the first row of its group.

        Both as indices into the flattened batch; ``first_of_row`` is ``(B,)`` on the host.
        """
        lens, columns = self.rows.prompt_lens, self.input_ids.shape[1]
        _same_prompt((lens != lens[first_of_row]).nonzero(), first_of_row, "another prompt length")
        own, source = prompt_pairs(self.valid, self.prompt_width, lens, first_of_row)
        for values, difference in ((self.input_ids, "other tokens"), (self.position_ids, "other positions")):
            differs = values.flatten()[own] != values.flatten()[source]
            _same_prompt(own[differs] // columns, first_of_row, difference)
        return own, source


@dataclass(frozen=True, eq=False, repr=False)
class ReconstructionInfo(Mapping[str, Any]):
    """Where every token of a padded batch lies in its packed row. Never changed; readable by attribute and by name.

    The packed row is a list of segments, ``[Prompt_1][Response_1_1][Response_1_2]...[Prompt_2]...``, each with all of
    its columns, or with those of the attention mask only when ``use_unpad``.

    Attributes:
        batch_size, seq_len: B and the columns of the padded batch.
        prompt_len, response_length: the columns of the prompt and of the response.
        use_unpad: whether padding columns were dropped.
        prompt_groups: the rows of each group, in packed order.
        num_tokens: T.
        token_index: ``(T,)`` the token behind each packed one, as an index into the flattened ``(B * seq_len,)`` batch.
        reconstruct_index: ``(B, seq_len)`` the packed token of each token of the batch, -1 at padding.
        cu_seqlens: ``(segments + 1,)`` where each segment starts in the packed row, and T.
        segment_row: ``(segments,)`` the row of each segment; of a prompt, the first of its group.
        segment_is_prompt: ``(segments,)`` bool.
        is_token: ``(T,)`` bool, False where the packed row holds padding.

    Index tensors are int64 on the device of the batch.
    """

    batch_size: int
    seq_len: int
    prompt_len: int
    response_length: int
    use_unpad: bool
    prompt_groups: tuple[tuple[int, ...], ...]
    num_tokens: int
    token_index: Tensor
    reconstruct_index: Tensor
    cu_seqlens: Tensor
    segment_row: Tensor
    segment_is_prompt: Tensor
    is_token: Tensor

    def visible(self) -> Tensor:
        """``(T, T)`` bool: may the row's token see the column's? Itself, what stands before it, and its prompt.

        ``model(ids, attention_mask=info.visible()[None, None], position_ids=positions)`` runs a plain model on the
        packed row: exact, and quadratic in T. For short rows and references.
        """
        segment = torch.arange(self.segment_row.numel(), device=self.cu_seqlens.device)
        segment = segment.repeat_interleave(self.cu_seqlens.diff(), output_size=self.num_tokens)
        group, in_prompt = self.segment_is_prompt.cumsum(0)[segment], self.segment_is_prompt[segment]
        own = (segment[:, None] == segment) | ((group[:, None] == group) & in_prompt)
        # Padding sees itself, so that no row of the softmax is empty.
        return (own & self.is_token).tril() | torch.eye(self.num_tokens, dtype=torch.bool, device=segment.device)

    def __repr__(self) -> str:
        groups, rows = len(self.prompt_groups), self.batch_size
        return f"ReconstructionInfo({rows} rows of {self.seq_len} columns, {groups} prompts, {self.num_tokens} packed)"

    def __getitem__(self, name: str) -> Any:
        if name not in set(self):
            raise KeyError(name)
        return getattr(self, name)

    def __iter__(self) -> Iterator[str]:
        return (field.name for field in fields(self))

    def __len__(self) -> int:
        return len(fields(self))

    # Tensors have no single truth value, so two infos are compared by identity.
    __eq__ = object.__eq__
    __hash__ = object.__hash__


def interleave(batch: CheckedBatch, order: Tensor, sizes: Tensor, use_unpad: bool) -> ReconstructionInfo:
    """The layout of a batch whose rows share prompts.

    Args:
        order: ``(B,)`` int64 on the host, every row once, group after group.
        sizes: ``(G,)`` int64 on the host, rows of each group, at least 1.
        use_unpad: without the columns that the mask leaves out.

    Raises:
        ValueError: rows of one group with other prompt tokens or positions.
    """
    rows, device = batch.rows, batch.input_ids.device
    num_rows, columns = batch.input_ids.shape
    width, response_length = batch.prompt_width, columns - batch.prompt_width
    group_starts = exclusive_cumsum(sizes)[:-1]
    first, first_of_row = order[group_starts], first_of_rows(order, sizes)
    own, source = batch.prompt_tokens(first_of_row)

    is_prompt = torch.zeros(first.numel() + num_rows, dtype=torch.bool)
    is_prompt[group_starts + torch.arange(first.numel())] = True
    segment_row = torch.empty(is_prompt.shape, dtype=torch.int64)
    segment_row[is_prompt], segment_row[~is_prompt] = first, order
    lengths = torch.where(is_prompt, width, response_length)
    token_index = ranges(segment_row * columns + torch.where(is_prompt, 0, width), lengths, device)
    if use_unpad:
        token_index = token_index[batch.valid.flatten()[token_index]]
        lengths = torch.where(is_prompt, rows.prompt_lens[segment_row], rows.response_lens[segment_row])

    place = torch.full((batch.input_ids.numel(),), -1, device=device)
    place[token_index] = torch.arange(token_index.numel(), device=device)
    reconstruct_index = place.masked_fill(~batch.valid.flatten(), -1)
    reconstruct_index[own] = place[source]
    return ReconstructionInfo(
        batch_size=num_rows,
        seq_len=columns,
        prompt_len=width,
        response_length=response_length,
        use_unpad=use_unpad,
        prompt_groups=tuple(tuple(members.tolist()) for members in order.split(sizes.tolist())),
        num_tokens=token_index.numel(),
        token_index=token_index,
        reconstruct_index=reconstruct_index.view(num_rows, columns),
        cu_seqlens=exclusive_cumsum(lengths).to(device),
        segment_row=segment_row.to(device),
        segment_is_prompt=is_prompt.to(device),
        is_token=batch.valid.flatten()[token_index],
    )


def as_lists(prompt_groups: Sequence[Sequence[int]]) -> list[list[int]]:
    """The groups as lists of ints; a ValueError where they are nothing of the kind."""
    try:
        groups = [[operator.index(row) for row in group] for group in prompt_groups]
    except (TypeError, RuntimeError) as error:
        raise ValueError(f"prompt_groups: expected lists of row indices, got {prompt_groups!r:.80}") from error
    if any(isinstance(row, bool) for group in groups for row in group) or isinstance(prompt_groups, bytes):
        raise ValueError(f"prompt_groups: expected lists of row indices, got {prompt_groups!r:.80}")
    return groups


def partition(prompt_groups: Sequence[Sequence[int]], num_rows: int) -> tuple[Tensor, Tensor]:
    """``(B,)`` the rows in the order of the groups, and ``(G,)`` the size of each group; int64 on the host.

    Raises:
        ValueError: groups that are not every row once, or an empty one.
    """
    groups = as_lists(prompt_groups)
    order = list(chain.from_iterable(groups))
    count = Counter(order)
    wrong = sorted(row for row in {*count, *range(num_rows)} if count[row] != (0 <= row < num_rows))
    if wrong or [] in groups:
        raise ValueError(
            f"prompt_groups: expected each row of 0..{num_rows - 1} in exactly one group and no group empty, got "
            + (f"row(s) {wrong[:8]} missing, twice or out of range" if wrong else "an empty group")
        )
    return torch.tensor(order), torch.tensor([len(group) for group in groups])


def first_of_rows(order: Tensor, sizes: Tensor) -> Tensor:
    """``(B,)``: the first row of each row's group, of groups as `partition` gives them."""
    first = torch.empty_like(order)
    first[order] = order[exclusive_cumsum(sizes)[:-1]].repeat_interleave(sizes)
    return first


def prompt_pairs(valid: Tensor, prompt_width: int, prompt_lens: Tensor, first_of_row: Tensor) -> tuple[Tensor, Tensor]:
    """Every prompt token, and the one in its place in the first row of its group, which has as many.

    Both as indices into the flattened ``(B * S,)`` batch; ``(B,)`` prompt_lens and first_of_row are on the host.
    """
    in_prompt = valid.clone()
    in_prompt[:, prompt_width:] = False
    own = in_prompt.flatten().nonzero().flatten()
    return own, own[ranges(exclusive_cumsum(prompt_lens)[first_of_row], prompt_lens, own.device)]


def _same_prompt(unlike: Tensor, first_of_row: Tensor, difference: str) -> None:
    if unlike.numel() > 0:
        row = int(unlike.flatten()[0])
        raise ValueError(
            f"prompt_groups: expected rows with the same prompt in a group, got row {row} with {difference} than row "
            f"{int(first_of_row[row])}, the first of its group; give find_prompt_groups the same attention_mask= and "
            "position_ids="
        )


def check_like(reference: Tensor, name: str, value: Tensor, what: str = "the shape of input_ids") -> None:
    """A ValueError that names ``value`` where it isn't a tensor of the reference's shape and device."""
    dense(name, value)
    if value.shape != reference.shape or value.device != reference.device:
        raise ValueError(
            f"{name}: expected a tensor of shape {tuple(reference.shape)} ({what}) on {reference.device}, "
            f"got {describe(value)} on {value.device}"
        )
