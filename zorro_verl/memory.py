"""What one micro-batch takes of a device's memory beside weights, gradients and optimizer, from its packed tokens.

With T packed tokens on the device, R of them responses', and bytes b of the model's dtype, a decoder layer of hidden
size H, heads of width A in all, keys of width K, and a gated MLP of width I keeps for its backward

    norms (two)         T 2H (4 + 2b)        the input in float32, and normalised before and after the weight
    queries and keys    T (A + K) (4 + 2b)   the same where they are normalised too, else T (A + K) b
    attention           T (A + K) b          its output and the values, and 4 bytes of log-sum-exp per head
    MLP                 T 4I b               both projections, the activation, the product

Where the MLP is a mixture of which each token takes k experts of inner width I, it keeps T k (2H + 4I) b instead: the
token for each of its experts, the same four, and what each expert gives. Its router keeps 8 bytes per expert and 32 for
each that is taken. Gradients then are T k 2H b.

With gradient checkpointing a layer keeps its input alone, T H b, and the rest is there for one layer at a time. While
that layer's backward runs, the gradients of its MLP and of its output take T (2I + H) b more. Later, when the MLP and
the second norm are gone, those of attention take T (3A + 4K + H) b: its output's, and its two calls' of queries, keys
and values. That is more only in a model whose heads are wide and whose MLP is not.

The final norm keeps T H (4 + b), the head its R hidden states. It makes R V logits. Their statistics and their gradient
take float32 copies, two at most; ``compute`` and ``memory`` make these for a chunk of rows at a time, ``compute`` keeps
a gradient beside the logits, and ``memory`` has no more logits than a chunk's either.

Where a packed row is spread over s devices, T and R are one device's share, a part in s of the row's. Each device then
gathers the last hidden states of the whole row besides, s T H b, to score its share of the responses.

The largest of these moments is `ActivationMemory.peak`. It says nothing of how many rows share a prompt: for the same
packed tokens it is the same. Counted are tensors; an allocator's fragmentation and a kernel's scratch are not.
"""

from __future__ import annotations

import bisect
import math
from typing import Any, NamedTuple

from zorro_verl.flops import config_size
from zorro_verl.log_probs import ACCELERATOR_CHUNK_BYTES, LOGITS_OPTIMIZATIONS

# Decoders with layers as above: two norms before, a gated MLP or experts. And those that normalise queries and keys.
LAYERS_KNOWN = ("llama", "ministral", "mistral", "qwen2", "qwen3", "qwen3_moe", "seed_oss", "smollm3")
_QUERY_KEY_NORM = ("qwen3", "qwen3_moe")
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class ActivationMemory(NamedTuple):
    """Bytes on one device."""

    layers: int  # what all layers keep for the backward, from the forward on
    layer: int  # what the backward of one layer takes beside that
    head: int  # what final norm, logits and loss take beside it, before

    @property
    def peak(self) -> int:
        return self.layers + max(self.layer, self.head)


def activation_memory(
    config: Any,
    tokens: int,
    response_tokens: int,
    *,
    checkpointing: bool,
    logits_optimization: str = "none",
    dtype: str = "bfloat16",
    calculate_entropy: bool = True,
    sequence_parallel: int = 1,
) -> ActivationMemory:
    """What training on one micro-batch takes of each device.

    Args:
        config: of a Hugging Face decoder, one of `LAYERS_KNOWN`.
        tokens: packed tokens of the whole micro-batch, over all devices that its row is spread over: at most
            ``ppo_max_token_len_per_gpu`` times ``sequence_parallel``.
        response_tokens: how many of them are responses'.
        checkpointing: ``enable_gradient_checkpointing``.
        logits_optimization: "none", "compute" or "memory".
        dtype: in which the model computes, "float32", "bfloat16" or "float16".
        calculate_entropy: whether the loss takes the entropy, or logits are divided by a temperature.
        sequence_parallel: over how many devices a row is spread.

    Raises:
        ValueError: a model whose layers are others, a size that is missing, or an argument that can't be.
    """
    model_type = getattr(config, "model_type", None)
    if model_type not in LAYERS_KNOWN:
        raise ValueError(
            "config: expected a model's config, such as AutoConfig.from_pretrained(...) gives, of type "
            f"{', '.join(LAYERS_KNOWN)}, got {model_type or repr(config)}"
        )
    if dtype not in _BYTES:
        raise ValueError(f"dtype: expected one of {', '.join(_BYTES)}, got {dtype!r}")
    if logits_optimization not in LOGITS_OPTIMIZATIONS:
        expected = ", ".join(LOGITS_OPTIMIZATIONS)
        raise ValueError(f"logits_optimization: expected one of {expected}, got {logits_optimization!r}")
    if not 0 <= response_tokens <= tokens or tokens < 1 or sequence_parallel < 1:
        raise ValueError(
            "tokens: expected at least 1, response_tokens of 0 up to it and sequence_parallel of at least 1, got "
            f"{tokens}, {response_tokens} and {sequence_parallel}"
        )
    size, own = _BYTES[dtype], math.ceil(tokens / sequence_parallel)
    hidden, layer = config_size(config, "hidden_size"), _Layer.of(config, size)
    kept, recomputed = layer.kept, 0
    if checkpointing:
        # In float32 the norm keeps its input as it is, and that is what the layer keeps anyway.
        kept, recomputed = hidden * size, layer.kept - (hidden * size if size == 4 else 0)
    head = own * hidden * (4 + size)
    if sequence_parallel > 1:
        head += tokens * hidden * size  # gathered: each device scores its share of the responses
    rows = math.ceil(response_tokens / sequence_parallel)
    head += _head(rows, hidden, config_size(config, "vocab_size"), size, logits_optimization, calculate_entropy)
    layers = config_size(config, "num_hidden_layers") * own * kept
    return ActivationMemory(layers, own * (recomputed + layer.gradients), head)


def largest_token_budget(
    config: Any, available: int, response_share: float = 1.0, *, sequence_parallel: int = 1, **options: Any
) -> int:
    """The largest ``ppo_max_token_len_per_gpu`` whose micro-batches fit ``available`` bytes of each device.

    It is per device, as in verl's config: a micro-batch has ``sequence_parallel`` times as many packed tokens.

    Args:
        config: as for `activation_memory`.
        available: bytes that weights, gradients, optimizer and rollout leave free on a device.
        response_share: of the packed tokens of a micro-batch, from 0 to 1; 1 is the worst case.
        sequence_parallel: over how many devices a row is spread, ``ulysses_sequence_parallel_size``.
        options: the other arguments of `activation_memory`.

    Raises:
        ValueError: as `activation_memory`; a share that can't be, or room for less than one token.
    """
    if not 0 <= response_share <= 1:
        raise ValueError(f"response_share: expected 0 to 1, got {response_share}")

    def peak(budget: int) -> int:
        tokens = budget * sequence_parallel  # verl multiplies its budgets by the devices of a row, and so do we
        responses = math.ceil(tokens * response_share)
        return activation_memory(config, tokens, responses, sequence_parallel=sequence_parallel, **options).peak

    if peak(1) > available:
        raise ValueError(
            f"available: expected at least {peak(1)} bytes, what one token per device takes, got {available}"
        )
    # Every token takes a byte at least, so that the answer is within the range.
    return bisect.bisect_right(range(1, available + 1), available, key=peak)


class _Layer(NamedTuple):
    """Bytes per token of one layer."""

    kept: int  # for its backward, without checkpointing
    gradients: int  # beside what is kept, at the largest moment of its backward

    @classmethod
    def of(cls, config: Any, size: int) -> _Layer:
        hidden, heads = config_size(config, "hidden_size"), config_size(config, "num_attention_heads")
        head_dim = config_size(config, "head_dim", hidden // heads)
        queries, keys = heads * head_dim, config_size(config, "num_key_value_heads", heads) * head_dim
        norm, (mlp, in_mlp) = hidden * (4 + 2 * size), _mlp(config, hidden, size)
        normalised = (queries + keys) * ((4 + 2 * size) if config.model_type in _QUERY_KEY_NORM else size)
        kept = 2 * norm + normalised + (queries + keys) * size + 4 * heads + mlp
        in_attention = (3 * queries + 4 * keys + hidden) * size - mlp - norm
        return cls(kept, max(in_mlp, in_attention))


def _mlp(config: Any, hidden: int, size: int) -> tuple[int, int]:
    """Bytes per token: what it keeps, and its gradients at their largest moment."""
    taken = config_size(config, "num_experts_per_tok", 0)
    if not taken:
        inner = config_size(config, "intermediate_size")
        return 4 * inner * size, (2 * inner + hidden) * size
    if config_size(config, "mlp_only_layers", ()) or config_size(config, "decoder_sparse_step", 1) != 1:
        raise ValueError(
            "config: expected experts in every layer, got mlp_only_layers="
            f"{config_size(config, 'mlp_only_layers', ())} and decoder_sparse_step="
            f"{config_size(config, 'decoder_sparse_step', 1)}"
        )
    inner = config_size(config, "moe_intermediate_size")
    kept = taken * ((2 * hidden + 4 * inner) * size + 32) + 8 * config_size(config, "num_experts")
    return kept, taken * 2 * hidden * size


def _head(rows: int, hidden: int, vocabulary: int, size: int, mode: str, calculate_entropy: bool) -> int:
    """The largest moment of the head's forward and backward, over ``rows`` scored tokens."""
    in_chunk = rows if mode == "none" else min(rows, max(1, ACCELERATOR_CHUNK_BYTES // (4 * vocabulary)))
    logits = (in_chunk if mode == "memory" else rows) * vocabulary * size
    # float32 logits are their own first copy; the log-softmax is another, and so is what the entropy is summed from.
    copies = 1 if size == 4 and not calculate_entropy else 2
    forward = logits + copies * in_chunk * vocabulary * 4
    gradient = in_chunk * vocabulary * (4 + (4 if calculate_entropy else size if size < 4 else 0))
    # From here on through the linear layer: its weight's gradient, in float32 too where chunks are added up.
    states, weight = rows * hidden * size, hidden * vocabulary * size
    if mode == "memory":
        backward = logits + gradient + states + weight + hidden * vocabulary * (4 if size < 4 else 0)
    else:
        if in_chunk < rows:  # chunks are written into one gradient
            gradient += rows * vocabulary * size
        backward = max(logits + gradient, logits + states + weight)
    return states + max(forward, backward)
