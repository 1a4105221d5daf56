"""What a step of training will take, from numbers alone: seconds of the model's passes, and memory of one GPU.

Estimates, to choose hardware and settings by before anything has run. Seconds are floating-point work over what a GPU
does at a utilisation that is assumed. Rollouts are not in them: generation reads weights and keys from memory, of which
multiply-adds say little. Memory is tensors alone, as in `zorro_verl.memory`.

The work of a pass is that of `zorro_verl.flops`. An update costs three forwards, as a backward has two products for
each of a forward; where that runs again in the backward, four. veRL's own engine runs the head on every token, this
package on those of responses.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from zorro_verl.flops import ModelWork

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


class Batch(NamedTuple):
    """The rows of one training step, all of them alike."""

    prompts: int
    rollouts: int  # of each prompt, n
    prompt_tokens: int
    response_tokens: int

    @property
    def token_ratio(self) -> float:
        """Tokens of the rows over tokens with each prompt once: n (P + R) / (P + n R)."""
        return self.rollouts * (self.prompt_tokens + self.response_tokens) / self.group_tokens

    @property
    def group_tokens(self) -> int:
        """Packed tokens of one prompt with its responses."""
        return self.prompt_tokens + self.rollouts * self.response_tokens


class PassSeconds(NamedTuple):
    """Of one step, on all GPUs together."""

    forward: float  # each of compute_log_prob and the reference pass
    update: float


def pass_seconds(
    config: Any,
    batch: Batch,
    gpus: int,
    *,
    peak_flops: float,
    utilisation: float,
    shared: bool = True,
    checkpointing: bool = True,
    logits_optimization: str = "none",
    head_features: int | None = None,
) -> PassSeconds:
    """How long the model's passes over a step's batch take.

    Args:
        config: as for `ModelWork.of`.
        batch: the step's rows.
        gpus: how many compute.
        peak_flops: of one of them, floating-point operations per second (a multiply-add is two).
        utilisation: what share of them the passes reach, above 0 and at most 1.
        shared: each prompt once; False for veRL's own engine.
        checkpointing, logits_optimization: as for `update_costs`.
        head_features: as for `ModelWork.of`; 1 for a critic.

    Raises:
        ValueError: a number that can't be, or what `ModelWork.of` refuses.
    """
    if min(batch) < 1 or gpus < 1 or peak_flops <= 0 or not 0 < utilisation <= 1:
        raise ValueError(
            "batch, gpus, peak_flops and utilisation: expected at least 1 of each count, and 0 < utilisation <= 1, got "
            f"{tuple(batch)}, {gpus}, {peak_flops} and {utilisation}"
        )
    model = ModelWork.of(config, head_features)
    layers = model._replace(head=0).of_groups([(batch.prompt_tokens, [batch.response_tokens] * batch.rollouts)])
    scored = batch.rollouts * (batch.response_tokens + (0 if shared else batch.prompt_tokens))
    work = layers.executed if shared else layers.counted, model.head * scored
    seconds = 2 * batch.prompts / (gpus * peak_flops * utilisation)
    return PassSeconds(
        *(seconds * costs.of(*work) for costs in (SCORING, update_costs(checkpointing, logits_optimization)))
    )


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
            head_features: of another head, as for `pass_seconds`; 1 for a critic.
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
