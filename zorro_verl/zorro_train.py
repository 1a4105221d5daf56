"""`ZoRRoTrain`: padded batches to one packed row and back, as plain tensor functions; and the statistics of a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from zorro_verl.flops import flop_bound_speedup
from zorro_verl.grouping import exclusive_cumsum, find_prompt_groups, first_rows
from zorro_verl.interleaved import CheckedBatch, ReconstructionInfo, check_like, interleave, partition
from zorro_verl.masks import block_bounds, describe, zeros_and_ones
from zorro_verl.reconstruct import gather_rows


class ZoRRoTrain:
    """Prompt deduplication on tensors alone: no model, no patching."""

    @staticmethod
    def find_prompt_groups(
        input_ids: Tensor,
        response_length: int,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> tuple[list[list[int]], Tensor]:
        """Which rows have the same prompt: the same valid tokens at the same positions, wherever the padding stands.

        Args:
            input_ids: ``(B, S)`` int64, each row a prompt and then a response of ``response_length`` columns.
            response_length: in 1..S-1.
            attention_mask: ``(B, S)`` of 0 and 1, any dtype. None: every column is a token.
            position_ids: ``(B, S)`` integers. None: the running count of valid tokens.

        Returns:
            The rows of each group, groups by first appearance, and ``(G, S - response_length)``: the prompt columns of
            each group's first row.

        Raises:
            ValueError: an argument of another shape, dtype or device, mask values other than 0 and 1, a row without
                a prompt token.
        """
        batch = CheckedBatch.read(input_ids, response_length, attention_mask, position_ids)
        group_index = find_prompt_groups(batch.rows)
        members = group_index.argsort(stable=True).split(group_index.bincount().tolist())
        first = first_rows(group_index).to(input_ids.device)
        return [rows.tolist() for rows in members], input_ids[first, : batch.prompt_width]

    @staticmethod
    def create_deduplicated_batch(
        input_ids: Tensor,
        position_ids: Tensor | None,
        response_length: int,
        prompt_groups: Sequence[Sequence[int]],
        unique_prompts: Tensor,
        attention_mask: Tensor | None = None,
        use_unpad: bool = False,
    ) -> tuple[Tensor, Tensor, ReconstructionInfo]:
        """Each prompt once, followed by its responses: ``[Prompt_1][Response_1_1][Response_1_2]...[Prompt_2]...``.

        Args:
            input_ids, response_length, attention_mask: see `find_prompt_groups`.
            position_ids: ``(B, S)`` integers, or None for the running count of valid tokens.
            prompt_groups: rows with the same prompt; every row in one group. Groups and rows are packed in this order.
            unique_prompts: ``(G, S - response_length)`` int64, the prompt columns of each group's first row.
            use_unpad: drop the columns that the mask leaves out. False keeps all of them, so that the packed row has
                G prompts and B responses of full width.

        Returns:
            ``(1, T)`` tokens, ``(1, T)`` positions and the way back.

        Raises:
            ValueError: bad arguments as in `find_prompt_groups`; groups that are no partition of the rows, or that join
                rows with other prompt tokens or positions; unique_prompts that are not those of the groups.
        """
        batch = CheckedBatch.read(input_ids, response_length, attention_mask, position_ids)
        if not isinstance(use_unpad, bool):
            raise ValueError(f"use_unpad: expected True or False, got {describe(use_unpad)}")
        order, sizes = partition(prompt_groups, batch.rows.num_rows)
        first = order[exclusive_cumsum(sizes)[:-1]].to(input_ids.device)
        _check_unique_prompts(unique_prompts, input_ids[first, : batch.prompt_width])
        info = interleave(batch, order, sizes, use_unpad)
        ids, positions = (values.flatten()[info.token_index][None] for values in (input_ids, batch.position_ids))
        return ids, positions, info

    @staticmethod
    def reconstruct_sequences(dedup_hidden: Any, info: ReconstructionInfo) -> Tensor:
        """Packed values back in the shape of the batch; zero wherever the attention mask is 0.

        Differentiable: the gradient of a prompt token is the sum over the rows that share it.

        Args:
            dedup_hidden: ``(1, T, ...)`` of any dtype, or the output of a Hugging Face model, of which ``logits`` are
                taken, else ``last_hidden_state``.
            info: what `create_deduplicated_batch` returned.

        Returns:
            ``(B, S, ...)``.

        Raises:
            ValueError: an info of something else, values of another shape or on another device.
        """
        if not isinstance(info, ReconstructionInfo):
            raise ValueError(
                f"info: expected the ReconstructionInfo that create_deduplicated_batch returns, got {describe(info)}"
            )
        hidden = dedup_hidden
        if not isinstance(hidden, Tensor):
            logits = getattr(dedup_hidden, "logits", None)
            hidden = getattr(dedup_hidden, "last_hidden_state", None) if logits is None else logits
        expected = f"(1, {info.num_tokens}, ...) values on {info.token_index.device}"
        if not isinstance(hidden, Tensor):
            raise ValueError(f"dedup_hidden: expected {expected}, or a model's output, got {describe(dedup_hidden)}")
        if hidden.shape[:2] != (1, info.num_tokens) or hidden.device != info.token_index.device:
            raise ValueError(f"dedup_hidden: expected {expected}, got {describe(hidden)} on {hidden.device}")
        return gather_rows(hidden[0], info.reconstruct_index)

    @staticmethod
    def attention_mask_to_flash_attn_params(mask: Tensor) -> dict[str, Tensor | int]:
        """The arguments with which a variable-length attention kernel sees what ``mask`` shows.

        Args:
            mask: ``(total_q, total_kv)`` of 0 and 1, any dtype: blocks on the diagonal, block by block, every query in
                one of them and every key. A block of n queries and m >= n keys is causal from its bottom right corner:
                its i-th query sees the first m - n + i + 1 of its keys. (The kernels' ``causal=True``.)

        Returns:
            ``cu_seqlens_q`` and ``cu_seqlens_k``, ``(blocks + 1,)`` int32 on the device of the mask, and
            ``max_seqlen_q`` and ``max_seqlen_k``, int.

        Raises:
            ValueError: any other mask, with the row that does not fit.
        """
        visible = zeros_and_ones("mask", mask)
        if mask.dim() != 2 or mask.numel() == 0:
            raise ValueError(f"mask: expected a (total_q, total_kv) tensor with both above 0, got {describe(mask)}")
        bounds_q, bounds_k = block_bounds(visible)
        return {
            "cu_seqlens_q": bounds_q.int(),
            "cu_seqlens_k": bounds_k.int(),
            "max_seqlen_q": int(bounds_q.diff().max()),
            "max_seqlen_k": int(bounds_k.diff().max()),
        }


def analyze_normal_batch_via_attention_mask(
    input_ids: Tensor, attention_mask: Tensor, padded_response_len: int, config: Any = None
) -> Mapping[str, Any]:
    """Print what sharing prompts would save in a padded batch, in one line, and return the numbers.

    Args:
        input_ids, attention_mask: ``(B, S)``, see `ZoRRoTrain.find_prompt_groups`.
        padded_response_len: the columns of the responses, in 1..S-1.
        config: a Hugging Face model config, for ``flop_bound_speedup``.

    Returns:
        In tokens: ``prompt_lens`` (of each distinct prompt, by first appearance), ``response_min``, ``response_mean``,
        ``response_max``, ``non_pad_tokens`` (each distinct prompt and every response, without padding). In rows:
        ``response_count``, ``group_sizes`` (of each distinct prompt). As numbers: ``unique_prompts``,
        ``non_pad_fraction`` (ones of the mask over all of its columns), ``token_ratio`` (ones of the mask over
        ``non_pad_tokens``) and, with ``config``, ``flop_bound_speedup`` (see `flops`).

    Raises:
        ValueError: as `ZoRRoTrain.find_prompt_groups`; ``padded_response_len`` outside 1..S-1; a config without sizes.
    """
    batch = CheckedBatch.read(input_ids, padded_response_len, attention_mask, None, "padded_response_len")
    rows, group_index = batch.rows, find_prompt_groups(batch.rows)
    sizes = group_index.bincount().tolist()
    prompt_lens = rows.prompt_lens[first_rows(group_index)].tolist()
    responses = rows.response_lens
    total, shared = int(rows.lens.sum()), sum(prompt_lens) + int(responses.sum())
    stats = {
        "prompt_lens": tuple(prompt_lens),
        "response_count": rows.num_rows,
        "response_min": int(responses.min()),
        "response_mean": int(responses.sum()) / rows.num_rows,
        "response_max": int(responses.max()),
        "non_pad_tokens": shared,
        "non_pad_fraction": total / input_ids.numel(),
        "token_ratio": total / shared,
        "unique_prompts": len(prompt_lens),
        "group_sizes": tuple(sizes),
    }
    if config is not None:
        by_group = (part.tolist() for part in responses[group_index.argsort(stable=True)].split(sizes))
        stats["flop_bound_speedup"] = flop_bound_speedup(config, zip(prompt_lens, by_group, strict=True))
    lens = ",".join(map(_kibi, prompt_lens))
    low, mean, high = (_kibi(stats[f"response_{name}"]) for name in ("min", "mean", "max"))
    print(  # noqa: T201 - this line is what the function is for
        f"batch stats: prompt lens: {lens} resp count={rows.num_rows}/min={low}/mean={mean}/max={high} "
        f"non-pad-tokens={shared / 1000:.1f}K/{stats['non_pad_fraction']:.1%}"
    )
    return MappingProxyType(stats)


def _check_unique_prompts(unique_prompts: Tensor, columns: Tensor) -> None:
    check_like(columns, "unique_prompts", unique_prompts, "the prompt columns of each group's first row")
    if unique_prompts.dtype != torch.int64:
        raise ValueError(f"unique_prompts: expected an int64 tensor, got {unique_prompts.dtype}")
    differs = (unique_prompts != columns).any(1)
    if bool(differs.any()):
        raise ValueError(
            "unique_prompts: expected the prompt columns of each group's first row, got another prompt for group "
            f"{int(differs.nonzero()[0])}; use what find_prompt_groups returned beside prompt_groups"
        )


def _kibi(tokens: float) -> str:
    return f"{tokens / 1024:.1f}Ki"
