"""A warning, once per engine, that a token budget is too small for a whole group."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

from zorro_verl.batching import packed_tokens, rows_by_group
from zorro_verl.micro_batches import MicroBatches

logger = logging.getLogger(__name__)


class BudgetWarning:
    """What an engine asks in every call. The first time that a group does not fit it is said in the log."""

    def __init__(self) -> None:
        self._given = False

    def check(self, batch: MicroBatches, micro_batches: Sequence[Sequence[int]], budget: int, budget_key: str) -> bool:
        """Whether the largest group of ``batch`` was cut because it needs more than ``budget`` packed tokens.

        Args:
            batch: the rows of one call.
            micro_batches: what `MicroBatches.split` made of it.
            budget, budget_key: what it was made with.
        """
        groups = rows_by_group(batch.group_index)
        largest = max(groups, key=lambda rows: _packed(batch, rows))
        needed, responses = _packed(batch, largest), sum(batch.response_lens[row] for row in largest)
        if needed <= budget:
            return False
        if self._given:
            return True
        self._given = True
        pieces = [
            [rows[i] for i in piece]
            for rows in micro_batches
            for piece in rows_by_group([batch.group_index[r] for r in rows])
        ]
        copies = sum(batch.group_index[piece[0]] == batch.group_index[largest[0]] for piece in pieces)
        total = sum(batch.prompt_lens) + sum(batch.response_lens)
        logger.warning(
            "%s: the largest group of this batch needs %d packed tokens (%d of its prompt + %d of %d responses), and a "
            "micro-batch may have %d: the group is cut, and its prompt computed %d times. Results are the same, but "
            "this batch's token ratio is %.2f instead of %.2f. If memory allows, raise it %.2f-fold. Said once.",
            budget_key,
            needed,
            needed - responses,
            responses,
            len(largest),
            budget,
            copies,
            total / sum(_packed(batch, piece) for piece in pieces),
            total / sum(_packed(batch, rows) for rows in groups),
            math.ceil(100 * needed / budget) / 100,  # rounded up: what is written here has to be enough
        )
        return True


def _packed(batch: MicroBatches, rows: Sequence[int]) -> int:
    """Tokens of some rows of one group, as they go through the model."""
    return packed_tokens(batch.prompt_lens[rows[0]], [batch.response_lens[row] for row in rows])
