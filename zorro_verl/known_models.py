"""A model's config by its name: without a network of those whose sizes are here, else from where they are."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from zorro_verl import checkpoint
from zorro_verl.families import check_supported
from zorro_verl.verify_request import local_folder

_OWNER = "Qwen"
_FIELDS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
_SHARED = {"head_dim": 128, "vocab_size": 151936}
_DENSE = {"model_type": "qwen3", "tie_word_embeddings": False}
_TIED = {"model_type": "qwen3", "tie_word_embeddings": True}
_EXPERTS = {"model_type": "qwen3_moe", "tie_word_embeddings": False, "num_experts": 128, "num_experts_per_tok": 8}


def _sizes(*sizes: int, **others: Any) -> Mapping[str, Any]:
    return MappingProxyType({**_SHARED, **dict(zip(_FIELDS, sizes, strict=True)), **others})


# As in their published configs.
_KNOWN: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "Qwen3-0.6B": _sizes(1024, 3072, 28, 16, 8, **_TIED),
        "Qwen3-1.7B": _sizes(2048, 6144, 28, 16, 8, **_TIED),
        "Qwen3-4B": _sizes(2560, 9728, 36, 32, 8, **_TIED),
        "Qwen3-8B": _sizes(4096, 12288, 36, 32, 8, **_DENSE),
        "Qwen3-14B": _sizes(5120, 17408, 40, 40, 8, **_DENSE),
        "Qwen3-32B": _sizes(5120, 25600, 64, 64, 8, **_DENSE),
        "Qwen3-30B-A3B": _sizes(2048, 6144, 48, 32, 4, **_EXPERTS, moe_intermediate_size=768),
        "Qwen3-235B-A22B": _sizes(4096, 12288, 94, 64, 4, **_EXPERTS, moe_intermediate_size=1536),
    }
)


def config_of(name: str) -> PretrainedConfig:
    """The config of a model of a supported type, see `read_config`."""
    config = read_config(name)
    check_supported(config)
    return config


def read_config(name: str) -> PretrainedConfig:
    """The config of a model of any type that transformers knows.

    Args:
        name: of a known model with or without its owner, a checkpoint folder, the path of a config.json, or a name on
            the hub.

    Raises:
        ValueError: there is no such model, or the hub can't be reached.
    """
    known = _KNOWN.get(name.removeprefix(f"{_OWNER}/"))
    if known is not None and not Path(name).exists():
        return AutoConfig.for_model(**known)
    if name.endswith(".json"):
        file = Path(name).expanduser()
        if file.name != "config.json" or not file.is_file():
            raise ValueError(f"model: expected a config.json, a checkpoint folder or a name, got {name!r}")
        return checkpoint.read_config(str(file.absolute().parent))
    if local_folder(name) is not None:
        return checkpoint.read_config(name)
    try:
        return checkpoint.read_config(name)
    except ValueError as error:
        raise ValueError(f"{error}; known without a network: {', '.join(_KNOWN)}") from error
