"""verl's top-k distillation on shared prompts: its loss gets the logits that predict response tokens, and no others.

The loss of a position needs the student's whole distribution there. verl hands its loss the logits of every token;
those of prompts are never looked at, and never made here. Losses of one log-prob per token need nothing of this.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import ModuleType

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from verl.utils import tensordict_utils as tu

from zorro_verl.heads import SharedPrompt
from zorro_verl.log_probs import MIN_TEMPERATURE
from zorro_verl.options import CONFIG_KEY
from zorro_verl.packing import Plan
from zorro_verl.sequence_parallel import Slices
from zorro_verl.wrapping import wrap_once

TEACHER = ("teacher_logprobs", "teacher_ids")


class TaughtPrompt(SharedPrompt):
    """A `SharedPrompt` whose outputs hold the ``(R, V)`` logits as well, divided by the temperature."""

    __slots__ = ()

    def outputs(self, model: nn.Module, hidden: Tensor, scored: Slices) -> dict[str, Tensor]:
        logits, temperature = model.lm_head(hidden), self.temperature
        outputs = self._scores_of(logits, scored)
        if isinstance(temperature, Tensor) or temperature != 1:  # else a second (R, V) for nothing
            temperature = torch.as_tensor(temperature, dtype=logits.dtype, device=logits.device)
            logits = logits / temperature.clamp(min=MIN_TEMPERATURE).reshape(-1, 1)
        return outputs | {"logits": logits}


def is_taught(data: TensorDict) -> bool:
    """Whether the batch asks for a top-k loss."""
    return tu.get_non_tensor_data(data, "distillation_use_topk", default=False)


def check_teacher(data: TensorDict, logits_optimization: str, sequence_parallel_size: int) -> None:
    """Refuse a top-k loss that would get no logits, a part of them, or other rows of the teacher.

    Raises:
        ValueError: with the key to change.
    """
    if not is_taught(data):
        return
    check_teaching(logits_optimization, sequence_parallel_size)
    for key in TEACHER:
        offsets = data[key].offsets() if key in data.keys() and data[key].is_nested else None
        if offsets is None or not torch.equal(offsets, data["input_ids"].offsets()):
            raise ValueError(f"{key}: expected jagged rows as long as those of input_ids, got others")


def check_teaching(logits_optimization: str, sequence_parallel_size: int) -> None:
    """The part of `check_teacher` that a run's config tells."""
    if logits_optimization == "memory":
        raise ValueError(
            f"{CONFIG_KEY}.logits_optimization: expected none or compute with a top-k distillation loss, which needs "
            "logits, got memory (or model.use_fused_kernels)"
        )
    if sequence_parallel_size > 1:
        raise ValueError(
            "actor_rollout_ref.actor.ulysses_sequence_parallel_size: expected 1 with a top-k distillation loss, got "
            f"{sequence_parallel_size}; use strategy=fsdp2"
        )


def teach(logits: Tensor, plan: Plan, micro_batch: TensorDict, loss: Callable) -> dict[str, Tensor]:
    """What verl's loss makes of ``(R, V)`` logits and the teacher's values at the same positions: each ``(R,)``."""
    slots = plan.predictor_slot
    ends = torch.tensor([0, slots.numel()], device=slots.device)  # the loss looks at values only, not at rows
    cut = {key: micro_batch[key].values().index_select(0, slots) for key in TEACHER}
    data = TensorDict({key: torch.nested.nested_tensor_from_jagged(x, ends) for key, x in cut.items()}, batch_size=[])
    outputs = loss(student_logits=logits[None], data=data)
    return {name: values.squeeze(0) for name, values in outputs.items()}


def wrap_topk_loss(module: ModuleType) -> None:
    """Wrap ``compute_topk_loss`` of ``verl.trainer.distillation.losses``, which chooses by ``actor.strategy``.

    Inert for other strategies. A second call changes nothing.
    """
    wrap_once(module, "compute_topk_loss", _as_fsdp2)


def _as_fsdp2(original: Callable) -> Callable:
    def compute_topk_loss(config, *args, **kwargs):
        if config.strategy == "zorro":
            config = copy.copy(config)
            object.__setattr__(config, "strategy", "fsdp2")
        return original(config, *args, **kwargs)

    return compute_topk_loss
