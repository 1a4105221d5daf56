"""Value models: which types have one, how a checkpoint is loaded as one, and errors in the critic's own keys."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AutoModelForTokenClassification, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES

from zorro_verl.families import SUPPORTED_MODEL_TYPES

VALUE_MODEL_TYPES = tuple(
    name for name in SUPPORTED_MODEL_TYPES if name in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES
)
# verl's V1 trainer takes one key for values and updates, and neither trainer reads the critic's micro-batch sizes.
_BUDGET = "+critic.ppo_infer_max_token_len_per_gpu (critic.ppo_max_token_len_per_gpu in updates of the legacy trainer)"
_SIZE = "+critic.fsdp.micro_batch_size_per_gpu (+critic.fsdp.infer_micro_batch_size_per_gpu for values)"
_KEYS = (
    ("actor_rollout_ref.actor.strategy", "critic.strategy"),
    ("actor_rollout_ref.model", "critic.model"),
    ("actor_rollout_ref.actor.ppo_max_token_len_per_gpu (rollout/ref: log_prob_max_token_len_per_gpu)", _BUDGET),
    ("ppo_max_token_len_per_gpu (log_prob_max_token_len_per_gpu for log-probs)", _BUDGET),
    ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu (rollout/ref: log_prob_micro_batch_size_per_gpu)", _SIZE),
    ("ppo_micro_batch_size_per_gpu (log_prob_micro_batch_size_per_gpu for log-probs)", _SIZE),
)


def in_critic_keys(text: str) -> str:
    """``text`` with the critic's config keys in place of the actor's."""
    for actor, critic in _KEYS:
        text = text.replace(actor, critic)
    return text


@contextmanager
def critic_keys() -> Iterator[None]:
    """Errors of the checks that a critic shares with the actor come out in its own keys."""
    try:
        yield
    except ValueError as error:
        raise ValueError(in_critic_keys(str(error))) from None  # the same in other words


def check_adapters(model: Any) -> None:
    """Refuse LoRA, which verl builds for models that generate only; ``model`` is a critic's ``model`` section."""
    if getattr(model, "lora_rank", 0) > 0:
        raise ValueError(
            f"critic.model.lora_rank: expected 0, got {model.lora_rank}; set it to 0, since verl's adapters need a "
            "model that generates, and a value model doesn't. critic.strategy=fsdp2 fails, too"
        )


def check_value_model(config: PretrainedConfig) -> None:
    """Refuse a checkpoint that can't be loaded as a value model.

    Args:
        config: of a supported type, as it stands in the checkpoint.

    Raises:
        ValueError: a type without a head for values in transformers, or a head of several labels.
    """
    if config.model_type not in VALUE_MODEL_TYPES:
        raise ValueError(
            "critic.model.path: expected a model with a ...ForTokenClassification in transformers, whose score head "
            f"gives the values, got {config.model_type!r}; take another critic model, or critic.strategy=fsdp2, which "
            f"also knows the v_head of trl. Supported: {', '.join(VALUE_MODEL_TYPES)}"
        )
    if _has_score(config) and config.num_labels != 1:
        raise ValueError(
            f"critic.model.path: expected a score head of one label, the value, got one of {config.num_labels}; take "
            "a checkpoint with one label, or one without a head"
        )


def as_value_model(config: PretrainedConfig) -> None:
    """Make ``config`` that of a value model, in place: one label, no dropout before the head."""
    config.num_labels = 1
    config.classifier_dropout = 0.0
    config.architectures = [MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES[config.model_type]]


def load_value_model(
    path: str | os.PathLike, config: PretrainedConfig, dtype: torch.dtype, trust_remote_code: bool = False
) -> PreTrainedModel:
    """A checkpoint with the ``score`` head that it has, or with a fresh one; transformers warns of that.

    Args:
        config: what `as_value_model` made; its attention is the one that is built.
    """
    module = AutoModelForTokenClassification.from_pretrained(
        path, config=config, dtype=dtype, trust_remote_code=trust_remote_code
    )
    return module.to(dtype)  # some types keep a few parameters in float32, and FSDP wants one dtype


def _has_score(config: PretrainedConfig) -> bool:
    return any("ForTokenClassification" in name for name in config.architectures or ())
