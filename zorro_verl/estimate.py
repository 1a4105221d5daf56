"""What a pass costs in forwards of a model, and what the model itself takes of a GPU's memory, from its config alone.

An update costs three forwards, as a backward has two products for each of a forward; where that runs again in the
backward, four. Memory is tensors alone, as in `zorro_verl.memory`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

_FLOAT32, _BFLOAT16 = 4, 2


class PassCosts(NamedTuple):
    """How many forwards of the decoder layers, and of the head, a pass costs."""

    layers: int
    head: int

    def of(self, layers: int, head: int) -> int:
        """Multiply-adds, from those of one forward."""
        return self.layers * layers + self.head * head


SCORING = PassCosts(1, 1)


def update_costs(checkpointing: bool, logits_optimization: str = "none") -> PassCosts:
    """Of forward and backward: a backward costs two forwards, and what is computed again costs one more.

    Args:
        checkpointing: ``enable_gradient_checkpointing``, which computes the layers again.
        logits_optimization: "memory" (and verl's fused kernels) compute logits again.
    """
    return PassCosts(4 if checkpointing else 3, 4 if logits_optimization == "memory" else 3)


class ModelSize(NamedTuple):
    """Parameters."""

    total: int
    layer: int  # of the largest decoder layer
    outside: int  # of embedding, head and final norm

    @classmethod
    def of(cls, config: Any, head_features: int | None = None) -> ModelSize:
        """Those of the model that a Hugging Face config describes; nothing is allocated.

        Args:
            config: of a language model.
            head_features: of the head for one token; the vocabulary by default, 1 for a critic.
        """
        import torch
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        layers = [sum(p.numel() for p in layer.parameters()) for layer in model.model.layers]
        if head_features is None:
            total = sum(p.numel() for p in model.parameters())
        else:
            total = sum(p.numel() for p in model.model.parameters()) + head_features * config.hidden_size
        return cls(total, max(layers), total - sum(layers))


class ShardMemory(NamedTuple):
    """Bytes on one GPU that do not depend on the batch."""

    weights: int
    gradients: int
    optimizer: int
    gathered: int  # what FSDP holds whole while layers run


def shard_memory(size: ModelSize, gpus: int) -> ShardMemory:
    """What FSDP2 holds of a model while it trains in veRL's mixed precision, sharded over all GPUs.

    Weights, gradients and AdamW's two moments are float32. Gathered are, in bfloat16, what is outside of the decoder
    layers, with its gradient, two layers (one runs, the next is on its way), and a layer's gradient, also in float32
    for its reduction. veRL's ``param_offload`` and ``optimizer_offload`` change nothing here: they bring back all that
    is offloaded before a model trains, and free weights and optimizer at other times. Gradients go after each update.

    Args:
        size: of the model.
        gpus: over which it is sharded.

    Raises:
        ValueError: no GPUs.
    """
    if gpus < 1:
        raise ValueError(f"gpus: expected at least 1, got {gpus}")
    shard = -(-size.total // gpus)
    gathered = size.outside * 2 * _BFLOAT16 + size.layer * (3 * _BFLOAT16 + _FLOAT32)
    return ShardMemory(shard * _FLOAT32, shard * _FLOAT32, 2 * shard * _FLOAT32, gathered)
