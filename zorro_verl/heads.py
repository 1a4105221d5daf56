"""What a call with a plan asks for: log-probs and entropy of the responses, or their values, from predictor rows."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor, nn

from zorro_verl.log_probs import LOGITS_OPTIMIZATIONS, Scores, log_probs_from_hidden, log_probs_from_logits
from zorro_verl.packing import Plan
from zorro_verl.sequence_parallel import Slices


class SharedPrompt:
    """What a call asks of an installed model: ``model(input_ids, position_ids, use_cache=False, zorro=this)``.

    A plain class, since it passes through FSDP2 (see `zorro_verl.packing.Plan`). Router logits and their loss are not
    computed, whatever the config says: veRL's loss has no part for them.

    Attributes:
        plan: the plan that packed ``input_ids``.
        labels: ``(R,)`` int64, the response tokens in the rows' own order.
        temperature: one float, or ``(R,)``; divides the logits.
        calculate_entropy: whether the entropy is wanted.
        logits_optimization: "none" (all response logits at once), "compute" (softmax in chunks) or "memory"
            (projection in chunks, recomputed in the backward). Same values and gradients from all three.
        calculate_sum_pi_squared: whether the sum of squared probabilities is wanted; it has no gradient.
        tokens: how the packed row lies over ranks.
    """

    __slots__ = (
        "plan",
        "labels",
        "temperature",
        "calculate_entropy",
        "logits_optimization",
        "calculate_sum_pi_squared",
        "tokens",
    )

    def __init__(
        self,
        plan: Plan,
        labels: Tensor,
        temperature: float | Tensor = 1.0,
        calculate_entropy: bool = False,
        logits_optimization: str = "none",
        calculate_sum_pi_squared: bool = False,
        tokens: Slices | None = None,
    ):
        if logits_optimization not in LOGITS_OPTIMIZATIONS:
            raise ValueError(
                f"logits_optimization: expected one of {LOGITS_OPTIMIZATIONS}, got {logits_optimization!r}"
            )
        if labels.shape != plan.label_index.shape:
            raise ValueError(f"labels: expected {tuple(plan.label_index.shape)}, got {tuple(labels.shape)}")
        self.plan = plan
        self.labels = labels
        self.temperature = temperature
        self.calculate_entropy = calculate_entropy
        self.logits_optimization = logits_optimization
        self.calculate_sum_pi_squared = calculate_sum_pi_squared
        self.tokens = tokens or Slices(plan.num_tokens)

    def outputs(self, model: nn.Module, hidden: Tensor, scored: Slices) -> dict[str, Tensor]:
        """``(r, E)`` hidden states of this rank's predictor rows -> ``(r,)`` of each value that is wanted, by name."""
        lm_head: Any = model.lm_head
        if self.logits_optimization != "memory":
            return self._scores_of(lm_head(hidden), scored)
        if not isinstance(lm_head, nn.Linear):
            raise ValueError(
                f"logits_optimization=memory: expected a plain linear lm_head, got {type(lm_head).__name__}; "
                "use logits_optimization=compute"
            )
        # The head is called as a module, with another forward for this call: FSDP may have wrapped it by itself, and
        # then its weight is whole between the hooks of a call only.
        project = functools.partial(_project, lm_head, *self._wanted(scored), self.calculate_sum_pi_squared)
        lm_head.forward = project  # type: ignore[method-assign, assignment]  # of this one module, for this call
        try:
            scores: Scores = lm_head(hidden)
            return scores.by_name()
        finally:
            del lm_head.forward

    def _scores_of(self, logits: Tensor, scored: Slices) -> dict[str, Tensor]:
        chunked, squares = self.logits_optimization == "compute", self.calculate_sum_pi_squared
        return log_probs_from_logits(logits, *self._wanted(scored), chunked, squares).by_name()

    def _wanted(self, scored: Slices) -> tuple[Tensor, float | Tensor, bool]:
        """Labels and temperature of this rank's share, and whether the entropy is wanted."""
        temperature = self.temperature
        if isinstance(temperature, Tensor) and temperature.numel() > 1:
            temperature = scored.own(temperature)
        return scored.own(self.labels), temperature, self.calculate_entropy


def _project(
    lm_head: nn.Linear,
    labels: Tensor,
    temperature: float | Tensor,
    calculate_entropy: bool,
    squares: bool,
    hidden: Tensor,
) -> Scores:
    weight, bias = lm_head.weight, lm_head.bias
    return log_probs_from_hidden(hidden, weight, bias, labels, temperature, calculate_entropy, squares)


class SharedValues:
    """The same of a value model, one with a ``score`` head: the value of each state that a response token comes from.

    Attributes:
        plan, tokens: as `SharedPrompt`'s.
    """

    __slots__ = ("plan", "tokens")

    def __init__(self, plan: Plan, tokens: Slices | None = None):
        self.plan = plan
        self.tokens = tokens or Slices(plan.num_tokens)

    def outputs(self, model: nn.Module, hidden: Tensor, scored: Slices) -> dict[str, Tensor]:
        """``(r, E)`` hidden states of this rank's predictor rows -> ``(r,)`` values in the dtype of the forward.

        So verl stores them, where log-probs are float32.
        """
        score: Any = model.score
        return {"values": score(hidden).squeeze(-1)}
