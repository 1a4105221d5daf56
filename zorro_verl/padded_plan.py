"""A padded batch as a plan, and where each of its positions lies in the packed row."""

from __future__ import annotations

import torch
from torch import Tensor

from zorro_verl.grouping import Rows, exclusive_cumsum, find_prompt_groups, number_by_first_appearance
from zorro_verl.packing import Plan
from zorro_verl.prefixes import find_shared_prefixes


def build_padded_plan(
    ids: Tensor,
    position_ids: Tensor,
    valid: Tensor,
    response_length: int | None = None,
    group_index: Tensor | None = None,
    sequence: Tensor | None = None,
) -> tuple[Plan, Tensor, Tensor]:
    """The plan of a padded batch; ``(B, S)`` the packed token of each of its positions, -1 at padding; and the way in:
    ``(T,)`` the position of each packed token in the flattened batch.

    Args:
        ids, position_ids: ``(B, S)`` int64. Prompts are shared where both are equal.
        valid: ``(B, S)`` bool, at least one of them True. Rows without a token are left out.
        response_length: responses stand in the last so many columns. When it is None, or leaves no column to a
            prompt, or no two prompts are then the same, prompts end where their rows stop being equal.
        group_index: ``(B,)`` on the host: rows taken for equal up to their responses without a look at ``ids``; goes
            with a response_length below S.
        sequence: ``(B, S)`` int64, the number of the sequence in its row, when rows hold several one after another;
            each is then a row of the plan, and response_length is not looked at.
    """
    columns = ids.shape[1]
    places = valid.flatten().nonzero().flatten()
    owner = places // columns
    if sequence is not None:
        owner = owner * columns + sequence.flatten()[places]
    cu_seqlens = exclusive_cumsum(torch.unique_consecutive(owner, return_counts=True)[1].cpu())
    prompt_columns = 0 if sequence is not None or response_length is None else columns - response_length
    bounded = prompt_columns > 0
    prompt_lens, kept = torch.ones(cu_seqlens.numel() - 1, dtype=torch.int64), None
    if bounded:
        kept = valid.any(1).cpu()
        prompt_lens = valid[:, :prompt_columns].sum(1).cpu()[kept]
    # A row that begins in the response columns has its first token taken for a prompt, which others may share.
    tokens, positions = (values.flatten()[places] for values in (ids, position_ids))
    rows = Rows(tokens, positions, cu_seqlens, prompt_lens.clamp(min=1))
    if group_index is not None:
        alone = -1 - torch.arange(prompt_lens.numel())
        found = number_by_first_appearance(torch.where(prompt_lens == 0, alone, group_index[kept]))
    elif bounded:
        found = find_prompt_groups(rows)
    if group_index is None and (not bounded or int(found.max()) + 1 == rows.num_rows):
        prompt_lens, found = find_shared_prefixes(rows)
        rows = Rows(tokens, positions, cu_seqlens, prompt_lens)
    plan = Plan(rows, found)
    index = torch.full((ids.numel(),), -1, device=ids.device)
    index[places] = plan.unpack_index
    return plan, index.view_as(ids), places[plan.token_index]


def check_response_length(response_len: int | None) -> int | None:
    """What a patcher was told of the responses' columns, or a ValueError that names it."""
    if response_len is not None and (type(response_len) is not int or response_len < 1):
        raise ValueError(f"response_len: expected None or an int of at least 1, got {response_len!r}")
    return response_len
