"""Random rows that share prompts, and what each side of a comparison needs of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from gpu_bench.work import Group

from zorro_verl.grouping import Rows
from zorro_verl.measuring import Shape
from zorro_verl.packing import Plan, build_plan

ALONE = 8  # rows, each with a prompt of its own, of a shape with one response


def groups_of(shape: Shape) -> list[Group]:
    """One group of a shape; of a shape in which nothing is shared, as many as make a micro-batch."""
    return [shape.group] * (ALONE if shape.n == 1 else 1)


class Batch:
    """Rows on a device: tokens, positions, and a random weight for each response token.

    Attributes:
        groups: the lengths of prompts and responses.
        rows, plan: as the package takes and builds them.
        labels: ``(R,)`` the response tokens.
        weights: ``(R,)`` float32, what the loss multiplies log-probs with.
    """

    def __init__(self, groups: Sequence[Group], vocabulary: int, device: str, seed: int = 0):
        generator = torch.Generator().manual_seed(seed)
        tokens, positions, lens, prompts = [], [], [], []
        for prompt_len, response_lens in groups:
            prompt = torch.randint(vocabulary, (prompt_len,), generator=generator)
            for response_len in response_lens:
                tokens += [prompt, torch.randint(vocabulary, (response_len,), generator=generator)]
                positions.append(torch.arange(prompt_len + response_len))
                lens.append(prompt_len + response_len)
                prompts.append(prompt_len)
        starts = torch.tensor([0, *lens]).cumsum(0)
        self.groups = list(groups)
        self.device = device
        self.rows = Rows(torch.cat(tokens).to(device), torch.cat(positions).to(device), starts, torch.tensor(prompts))
        self.plan: Plan = build_plan(self.rows)
        self.labels = self.rows.tokens[self.plan.label_index]
        self.weights = torch.randn(self.labels.numel(), generator=generator).to(device)

    @property
    def token_ratio(self) -> float:
        return self.plan.token_ratio

    @cached_property
    def whole(self) -> Piece:
        """All rows at once."""
        return Piece(self, 0, self.rows.num_rows)

    @cached_property
    def single_rows(self) -> list[Piece]:
        return [Piece(self, row, row + 1) for row in range(self.rows.num_rows)]


class Piece:
    """Some rows, one after the other, as a stock model takes them: unpadded, with the bounds of each row.

    Attributes:
        tokens, positions: ``(1, N)``.
        cu_seqlens: ``(rows + 1,)`` int32 on the device.
        longest: tokens of the longest row.
        bounds: first and last token of each row, on the host.
        predictors: ``(R,)`` the tokens of this piece that predict a response token.
        labels, weights: the batch's, of these rows.
    """

    def __init__(self, batch: Batch, first: int, end: int):
        rows, plan = batch.rows, batch.plan
        starts = rows.cu_seqlens[first : end + 1]
        start, stop = int(starts[0]), int(starts[-1])
        scored = slice(int(rows.response_lens[:first].sum()), int(rows.response_lens[:end].sum()))
        self.tokens, self.positions = rows.tokens[None, start:stop], rows.position_ids[None, start:stop]
        bounds = (starts - start).tolist()
        self.bounds = list(zip(bounds[:-1], bounds[1:], strict=True))
        self.cu_seqlens = (starts - start).to(batch.device, torch.int32)
        self.longest = int(starts.diff().max())
        self.predictors = plan.predictor_slot[scored] - start
        self.labels, self.weights = batch.labels[scored], batch.weights[scored]
