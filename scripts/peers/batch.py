"""The batch and the model that every contestant gets, as files: written once, read in each environment."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM


@dataclass(frozen=True)
class Batch:
    """Rows of shared prompts as veRL lays them out: the prompt padded on the left, the response on the right.

    Attributes:
        input_ids: ``(B, P + R)`` int64.
        attention_mask: ``(B, P + R)`` int64, 1 at tokens.
        position_ids: ``(B, P + R)`` int64, counting a row's tokens from 0.
        weights: ``(tokens,)`` float32, what the log-prob of each response token is multiplied by in the loss.
        row_counts: ``(groups,)`` int64, how many rows share each prompt; a group's rows are neighbours.
        response_length: ``()`` int64, the R columns of the responses.
    """

    input_ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor
    weights: Tensor
    row_counts: Tensor
    response_length: Tensor

    @classmethod
    def random(cls, groups: Sequence[tuple[int, Sequence[int]]], vocabulary: int, seed: int = 0) -> Batch:
        """Random tokens.

        Args:
            groups: the prompt length of each group and the response lengths of its rows, in tokens.
            vocabulary: tokens are drawn from ``0..vocabulary - 1``.
            seed: of the tokens and the weights.
        """
        generator = torch.Generator().manual_seed(seed)
        width, length = max(prompt for prompt, _ in groups), max(max(responses) for _, responses in groups)
        rows = sum(len(responses) for _, responses in groups)
        ids = torch.zeros(rows, width + length, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        row = 0
        for prompt, responses in groups:
            tokens = torch.randint(vocabulary, (prompt,), generator=generator)
            for response in responses:
                ids[row, width - prompt : width] = tokens
                ids[row, width : width + response] = torch.randint(vocabulary, (response,), generator=generator)
                mask[row, width - prompt : width + response] = 1
                row += 1
        weights = torch.randn(int(mask[:, width:].sum()), generator=generator)
        counts = torch.tensor([len(responses) for _, responses in groups])
        positions = (mask.cumsum(1) - 1).clamp(min=0) * mask
        return cls(ids, mask, positions, weights, counts, torch.tensor(length))

    @classmethod
    def load(cls, path: Path) -> Batch:
        return cls(**load_file(path))

    def save(self, path: Path) -> None:
        save_file({field.name: getattr(self, field.name) for field in fields(self)}, path)

    @property
    def prompt_width(self) -> int:
        return self.input_ids.shape[1] - int(self.response_length)

    @property
    def responses(self) -> Tensor:
        """``(B, R)`` int64."""
        return self.input_ids[:, self.prompt_width :]

    @property
    def response_mask(self) -> Tensor:
        """``(B, R)`` bool."""
        return self.attention_mask[:, self.prompt_width :].bool()


def save_model(folder: Path, sizes: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
    """Sizes, rather than a config file: releases of transformers do not read each other's in every point."""
    (folder / "sizes.json").write_text(json.dumps(sizes))
    save_file({name: weight.contiguous() for name, weight in weights.items()}, folder / "weights.safetensors")


def load_model(folder: Path) -> Qwen3ForCausalLM:
    """The Qwen3 model of this environment's transformers with the saved weights, in training mode, with sdpa."""
    model = Qwen3ForCausalLM(Qwen3Config(**json.loads((folder / "sizes.json").read_text())))
    model.load_state_dict(load_file(folder / "weights.safetensors"))
    model.set_attn_implementation("sdpa")
    return model.train()
