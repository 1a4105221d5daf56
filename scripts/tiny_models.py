"""Tiny random models, one of each supported type, whose predictions, routing and decay matter.

    python scripts/tiny_models.py qwen3_5_moe tiny-checkpoint --dtype bfloat16  # a folder without a tokenizer
    python scripts/tiny_models.py --list

A fresh model predicts nearly the same for every input and forgets within a few tokens: a wrong prompt would hardly
show. Here weights are enlarged, norms and biases differ from their neutral start, and recurrent states last.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)

VOCAB = 61
WINDOW = 6  # bites on rows of a prompt and a few tokens

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 0,
}
WINDOWED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
SHARED_EXPERT = EXPERTS | {"shared_expert_intermediate_size": 24}
# With the partial rotary embedding of this family, 16 of a head's dimensions make 2 pairs, those of 32 make 4.
DELTA_NET = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
MROPE = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    }
}
VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": SIZES["hidden_size"],
    "num_position_embeddings": 16,
}
PLACEHOLDERS = {"image_token_id": 57, "video_token_id": 58, "vision_start_token_id": 59, "vision_end_token_id": 60}

# What a type adds to `SIZES`, or changes of them.
MODELS: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3": {},
    "llama": {},
    "mistral": {"sliding_window": WINDOW},
    "ministral": WINDOWED,
    "gemma": {"num_key_value_heads": 1},
    "gemma3_text": WINDOWED,
    "phi3": {},
    "olmo2": {},
    "olmo3": WINDOWED,
    "smollm3": {"no_rope_layers": [1, 0]},
    "glm4": {},
    "seed_oss": {"attention_dropout": 0.0, "residual_dropout": 0.0},
    "starcoder2": {"sliding_window": WINDOW},
    "qwen2_moe": SHARED_EXPERT
    | {"num_hidden_layers": 3, "decoder_sparse_step": 1, "mlp_only_layers": [1]}
    | {"use_sliding_window": True, "sliding_window": WINDOW}
    | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "qwen3_moe": EXPERTS | {"num_hidden_layers": 3, "decoder_sparse_step": 1, "mlp_only_layers": [1]},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "qwen3_next": DELTA_NET | SHARED_EXPERT,
    "qwen3_5_text": DELTA_NET | MROPE,
    "qwen3_5": DELTA_NET | MROPE,
    "qwen3_5_moe_text": DELTA_NET | MROPE | SHARED_EXPERT,
    "qwen3_5_moe": DELTA_NET | MROPE | SHARED_EXPERT,
}
COMPOSITE = ("qwen3_5", "qwen3_5_moe")


def config_of(name: str, **config: Any) -> PretrainedConfig:
    """The configuration of an entry; ``config`` adds to it or changes it (in a composite one, its text part)."""
    if name not in MODELS:
        raise ValueError(f"name: expected one of {', '.join(MODELS)}, got {name!r}")
    settings = SIZES | MODELS[name] | config
    if name not in COMPOSITE:
        return AutoConfig.for_model(name, **settings)
    shared = {"tie_word_embeddings": settings["tie_word_embeddings"]}
    return AutoConfig.for_model(name, text_config=settings, vision_config=VISION, **PLACEHOLDERS, **shared)


def build(name: str, dtype: torch.dtype = torch.float64, seed: int = 0, **config: Any) -> PreTrainedModel:
    """The model of an entry: same name, seed and config, same weights.

    Experts run in a loop in float64, which their default, a grouped product, does not have.
    """
    auto = AutoModelForImageTextToText if name in COMPOSITE else AutoModelForCausalLM
    torch.manual_seed(seed)
    model = auto.from_config(config_of(name, **config), attn_implementation="sdpa").float()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("A_log"):
                parameter.uniform_(-4, -1)  # a state loses 2 to 40 % a token
            elif parameter.dim() > 1:
                parameter.mul_(6)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    if dtype == torch.float64 and any(module_name.endswith(".experts") for module_name, _ in model.named_modules()):
        model.set_experts_implementation("eager")
    return model.to(dtype).eval()


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="list the names and end")
    parser.add_argument("name", nargs="?", choices=MODELS, metavar="NAME", help="a model type; --list shows them")
    parser.add_argument("folder", nargs="?", type=Path, metavar="FOLDER", help="where the checkpoint is written")
    parser.add_argument("--dtype", choices=("float64", "float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    if not options.list and options.folder is None:
        parser.error("expected NAME and FOLDER, or --list")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    if options.list:
        print("\n".join(MODELS))
        return 0
    model = build(options.name, getattr(torch, options.dtype), options.seed)
    model.save_pretrained(options.folder)
    size = sum(parameter.numel() for parameter in model.parameters())
    print(f"{options.folder}: {type(model).__name__}, {size:,} parameters in {options.dtype}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
