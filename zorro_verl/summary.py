"""What a run says once of its sharing, as an INFO after its first update: what is shared, by what, what it saves.

The console shows it: `import verl` gives the root a handler that takes every level, in the task runner as in any other
process, and `zorro_verl.plugin` sets the level of this package's loggers. VERL_LOGGING_LEVEL=WARNING hides it.
"""

from __future__ import annotations

import logging
from typing import Any

from transformers import PreTrainedModel

from zorro_verl.estimate import PassCosts
from zorro_verl.families import text_config
from zorro_verl.metrics import ShareCounts
from zorro_verl.mixers import linear_layers, shared_mixer_of, takes_cu_seqlens
from zorro_verl.options import CONFIG_KEY

logger = logging.getLogger(__name__)


def what_is_shared(model: PreTrainedModel) -> str:
    """The model's class, its layers by how they share, and the kernels that do it; of an installed model."""
    seam, linear = model.forward, linear_layers(model)
    layers = text_config(model.config).num_hidden_layers - len(linear)
    kernels = "eager (the dense reference)" if seam.kernels is None else seam.kernels.name
    kernels += " (torch's own flash attention)" if kernels == "sdpa" else ""
    if seam.split:
        text = f"{type(model).__name__}: attention of {layers} layers shared, by {kernels}"
    else:
        text = f"{type(model).__name__}: attention of {layers} layers on whole rows, by {kernels}, all else shared"
        text += f" ({CONFIG_KEY}.use_split_attention=False)"
    if linear:
        rule = shared_mixer_of(linear[0][0]).stock_rule
        by = "flash-linear-attention" if takes_cu_seqlens(rule) else "the rule of transformers"
        text += f"; linear attention of {len(linear)} layers shared, by {by} (linear_attention={seam.linear_attention})"
    return text


class Summary:
    """What a trainer says after its first update, and never again."""

    def __init__(self) -> None:
        self._given = False

    @classmethod
    def of(cls, trainer: Any) -> Summary:
        """The one of a trainer, which keeps it."""
        return vars(trainer).setdefault("zorro_summary", cls())

    def give(self, counts: ShareCounts, epochs: int, update: str, costs: PassCosts) -> None:
        """Log it, if it has not been.

        Args:
            counts: of the whole update.
            epochs: passes over the rows in it.
            update: "update_actor" or "update_critic".
            costs: of it, as `zorro_verl.prediction` takes them.
        """
        if self._given:
            return
        self._given = True
        rows = counts.rows_by_prompt(epochs)
        logger.info(
            "strategy=zorro, first %s: %s prompts in %s rows%s; %s tokens of rows, %s through the model: %.2f times "
            "fewer, of %.2f that the batch allows. Predicted speed-up of %s over fsdp2: %.2f, by multiply-adds. %s.",
            update,
            f"{len(rows):,}",
            f"{sum(rows):,}",
            f", {epochs} epochs" if epochs > 1 else "",
            f"{counts.tokens_total:,}",
            f"{counts.tokens_packed:,}",
            counts.token_ratio,
            counts.token_ratio_best(epochs),
            update,
            counts.speed_up(costs),
            counts.shared,
        )
