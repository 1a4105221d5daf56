"""Which models share prompts exactly: the supported types, and what of a config is refused by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import transformers
from packaging.specifiers import SpecifierSet
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig

SUPPORTED_TRANSFORMERS = ">=5.5.3,!=5.6.0,<5.11"

DENSE_TYPES = (
    "qwen3",
    "qwen2",
    "llama",
    "mistral",
    "ministral",
    "gemma",
    "gemma3_text",
    "glm4",
    "olmo2",
    "olmo3",
    "phi3",
    "seed_oss",
    "smollm3",
    "starcoder2",
)
MOE_TYPES = ("qwen3_moe", "qwen2_moe", "mixtral", "olmoe")
# Types without the suffix are those of whole checkpoints, where a vision tower stands beside the text model.
HYBRID_TYPES = ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
SUPPORTED_MODEL_TYPES = DENSE_TYPES + MOE_TYPES + HYBRID_TYPES

# Which layers get a mask with the config's sliding window: those that `layer_types` calls so, or all of them.
_WINDOW_BY_LAYER = frozenset(("qwen2", "qwen3", "qwen2_moe", "ministral", "gemma3_text", "olmo3", "smollm3"))
_WINDOW_EVERYWHERE = frozenset(("mistral", "mixtral", "phi3", "starcoder2", "qwen3_moe"))

LAYER_TYPES = ("full_attention", "sliding_attention", "linear_attention")

_WHY_NOT: Mapping[str, str] = MappingProxyType(
    {
        "gpt_oss": "its attention sinks are not implemented",
        "gemma2": "its attention and logit softcap are not implemented",
        "granite": "its logits are scaled after the head",
        "cohere": "its logits are scaled after the head",
        "cohere2": "its logits are scaled after the head",
        "gemma3": "only its text models are, gemma3_text",
    }
)
# A dropout draws one mask per row in the plain model, and a jitter one per token; a shared prompt would have one.
_NOISE = (
    "attention_dropout",
    "resid_pdrop",
    "embd_pdrop",
    "residual_dropout",
    "embedding_dropout",
    "hidden_dropout",
    "router_jitter_noise",
)
_PLAIN_MODEL = "use the plain model, in veRL with actor_rollout_ref.actor.strategy=fsdp2"


def check_transformers() -> None:
    """Raise a ValueError outside the range of transformers whose forwards this package follows."""
    if not SpecifierSet(SUPPORTED_TRANSFORMERS).contains(transformers.__version__, prereleases=True):
        raise ValueError(
            f"transformers: expected a version in {SUPPORTED_TRANSFORMERS}, got {transformers.__version__}; "
            f"pip install 'transformers{SUPPORTED_TRANSFORMERS}'"
        )


def text_config(config: PretrainedConfig) -> PretrainedConfig:
    """The config of the text model: a checkpoint with a vision tower holds it as a part, others are it."""
    return config.get_text_config()


def head_counts(config: PretrainedConfig) -> dict[str, int]:
    """By the names of the config: heads that sequence parallelism divides over ranks."""
    text = text_config(config)
    names = ["num_attention_heads", "num_key_value_heads"]
    if "linear_attention" in (getattr(text, "layer_types", None) or ()):
        names.append("linear_num_value_heads")  # their keys and queries come to a mixer's recurrence in as many heads
    return {name: count for name in names if (count := getattr(text, name, None)) is not None}


def auto_class(config: PretrainedConfig) -> type:
    """The class that veRL loads a checkpoint with: with its vision tower where it has one."""
    has_vision = type(config) in AutoModelForImageTextToText._model_mapping.keys()
    return AutoModelForImageTextToText if has_vision else AutoModelForCausalLM


def check_supported(config: PretrainedConfig) -> None:
    """Refuse what sharing would get wrong on this architecture, by name, before anything runs.

    Raises:
        ValueError: a version of transformers, a model type, or a feature of the config that is not supported.
    """
    check_transformers()
    text = text_config(config)
    check_causal(text)
    if config.model_type not in SUPPORTED_MODEL_TYPES:
        reason = _WHY_NOT.get(config.model_type, "it has not been tested")
        raise ValueError(
            f"model_type: expected a supported one, got {config.model_type!r} ({reason}); {_PLAIN_MODEL}. Supported: "
            f"{', '.join(SUPPORTED_MODEL_TYPES)}"
        )
    for rope_type in _rope_types(getattr(text, "rope_parameters", None) or {}):
        if rope_type in ("dynamic", "longrope"):
            raise ValueError(
                "rope_type: expected frequencies that don't depend on the batch's longest row, "
                f"got {rope_type!r}; {_PLAIN_MODEL}"
            )
    for layer_type in set(getattr(text, "layer_types", None) or ()):
        if layer_type not in LAYER_TYPES:
            raise ValueError(f"layer_types: expected kinds among {LAYER_TYPES}, got {layer_type!r}; {_PLAIN_MODEL}")
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(text, name, None) is not None:
            raise ValueError(f"{name}: expected None, got {getattr(text, name)}; {_PLAIN_MODEL}")


def window_of(config: PretrainedConfig, layer: int) -> int | None:
    """Tokens of its row, itself included, that a token sees in a layer; None for all.

    Args:
        config: of a text model of a supported type.
        layer: its index.
    """
    by_layer = config.model_type in _WINDOW_BY_LAYER and config.layer_types[layer] == "sliding_attention"
    return (config.sliding_window or None) if by_layer or config.model_type in _WINDOW_EVERYWHERE else None


def windows_of(config: PretrainedConfig) -> set[int | None]:
    """Of all layers that have attention."""
    types = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    return {window_of(config, layer) for layer, kind in enumerate(types) if kind != "linear_attention"}


def _rope_types(rope: Mapping[str, Any]) -> Iterable[str]:
    """Of all layers, or of each kind of layer where these differ."""
    kinds = [value for value in rope.values() if isinstance(value, Mapping)] or [rope]
    return [kind.get("rope_type", "default") for kind in kinds]


def check_causal(config: PretrainedConfig) -> None:
    """A model that looks ahead has no prompt that is the same for every response."""
    if not getattr(config, "is_causal", True):
        raise ValueError("is_causal: expected True, got False; use the plain model for bidirectional attention")
    if getattr(config, "use_bidirectional_attention", False):
        raise ValueError(
            "use_bidirectional_attention: expected False, got True; use the plain model for bidirectional attention"
        )


def check_training(config: PretrainedConfig, training: bool) -> None:
    """Noise differs from row to row in the plain model; a shared prompt would have one for all."""
    text = text_config(config)
    for name in _NOISE:
        amount = getattr(text, name, None) or 0.0
        if training and amount > 0:
            key = name if text is config else f"text_config.{name}"
            raise ValueError(
                f"{name}: expected 0 in training, got {amount}; set it to 0 in the model's config, in veRL "
                f"with +actor_rollout_ref.model.override_config.{key}=0"
            )
