"""The sizes of the models that recipes train, as in their published configs, so that estimates need no download."""

from transformers import AutoConfig, PretrainedConfig

_SHARED = {"head_dim": 128, "vocab_size": 151936}
_DENSE = {"model_type": "qwen3", "num_key_value_heads": 8, **_SHARED}
_SIZES = {
    "Qwen/Qwen3-0.6B": _DENSE
    | {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16}
    | {"tie_word_embeddings": True},
    "Qwen/Qwen3-8B": _DENSE
    | {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32}
    | {"tie_word_embeddings": False},
    "Qwen/Qwen3-32B": _DENSE
    | {"hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64}
    | {"tie_word_embeddings": False},
    "Qwen/Qwen3-30B-A3B": _SHARED
    | {"model_type": "qwen3_moe", "num_key_value_heads": 4, "tie_word_embeddings": False}
    | {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32}
    | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
}


def config_of(name: str) -> PretrainedConfig:
    """The config of one of these models.

    Raises:
        ValueError: the sizes of that model aren't here.
    """
    if name not in _SIZES:
        raise ValueError(f"name: expected one of {', '.join(_SIZES)}, got {name}")
    return AutoConfig.for_model(**_SIZES[name])
