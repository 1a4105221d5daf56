"""The shapes of Qwen3 models, of which random weights are built: nothing is downloaded."""

from __future__ import annotations

from transformers import Qwen3Config

SIZES = {
    "0.6B": {
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "intermediate_size": 3072,
        "tie_word_embeddings": True,
    },
    "8B": {
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "intermediate_size": 12288,
        "tie_word_embeddings": False,
    },
    "32B": {
        "hidden_size": 5120,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "intermediate_size": 25600,
        "tie_word_embeddings": False,
    },
    "tiny": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 128,
        "vocab_size": 512,
        "tie_word_embeddings": False,
    },
}
COMMON = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936}


def config_of(size: str, layers: int | None = None, vocabulary: int | None = None) -> Qwen3Config:
    """The config of a size, with as many layers and words as it has unless others are asked for."""
    values = COMMON | SIZES[size]
    if layers is not None:
        values["num_hidden_layers"] = layers
    if vocabulary is not None:
        values["vocab_size"] = vocabulary
    return Qwen3Config(**values)
