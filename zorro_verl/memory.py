"""What one micro-batch takes of a device's memory beside weights, gradients and optimizer, from its packed tokens.

Training first. With T packed tokens on the device, R of them responses', and bytes b of the model's dtype, a decoder
layer of hidden size H, heads of width A in all, keys of width K, and a gated MLP of width I keeps for its backward

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
and values. Where queries are normalised, the backward of that norm takes T 24A for six float32 copies of them, when
the rest of attention is gone but for the gradients of keys and values, and the first norm is still there. Either is
more only in a model whose heads are wide and whose MLP is not.

The final norm keeps T H (4 + b), the head its R hidden states. It makes R V logits. Their statistics and their gradient
take float32 copies, two at most; ``compute`` and ``memory`` make these for a chunk of rows at a time, ``compute`` keeps
a gradient beside the logits, and ``memory`` has no more logits than a chunk's either.

Scoring, a pass without a backward, keeps none of that. While a layer runs there are the embeddings, its input, its
residual and its normalised input, and inside it at most

    attention           T max(4A + 2K, 2A + 5K) b    while queries or keys are rotated; one H less beside them
    query norm          T A (8 + b)                  likewise, where they are normalised and b < 4
    MLP                 T 3I b                       or T k (max(H + 4I, 4H) b + 32), and 8 bytes per expert

Then the head takes its R hidden states and the forward's part of the above.

In veRL's own engine layers take the same for as many tokens, of rows as they are, and the head runs on all of them. Of
that is counted what it takes at least: logits once, which flash-attn's cross-entropy writes their gradient over (of 512
tokens in float32 where ``memory`` stands for veRL's fused kernels), and the gradients of hidden states and weight.

Where a packed row is spread over s devices, T and R are one device's share, a part in s of the row's. Each device then
gathers the last hidden states of the whole row besides, s T H b, to score its share of the responses.

The largest of these moments is `ActivationMemory.peak`. It says nothing of how many rows share a prompt: for the same
packed tokens it is the same. Counted are tensors; an allocator's fragmentation and a kernel's scratch are not. That of
torch's attention on a CPU in 16 bits is about a MiB for each thread, however many tokens there are.
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
_FUSED_ROWS = 512  # in veRL's fused kernels
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
    head_features: int | None = None,
    stock: bool = False,
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
        head_features: outputs of the head for one token; the vocabulary by default, 1 for a critic.
        stock: the head of veRL's own engine, which runs on all tokens; what it takes at least.

    Raises:
        ValueError: a model whose layers are others, a size that is missing, or an argument that can't be.
    """
    part = _Part.of(
        config, tokens, response_tokens, logits_optimization, dtype, sequence_parallel, head_features, stock
    )
    hidden, layer, size = part.hidden, _Layer.of(config, part.size), part.size
    kept, recomputed = layer.kept, 0
    if checkpointing:
        # In float32 the norm keeps its input as it is, and that is what the layer keeps anyway.
        kept, recomputed = hidden * size, layer.kept - (hidden * size if size == 4 else 0)
    head = part.own * hidden * (4 + size) + part.gathered + part.trained(calculate_entropy)
    layers = config_size(config, "num_hidden_layers") * part.own * kept
    return ActivationMemory(layers, part.own * (recomputed + layer.gradients), head)


def scoring_memory(
    config: Any,
    tokens: int,
    response_tokens: int,
    *,
    logits_optimization: str = "none",
    dtype: str = "bfloat16",
    calculate_entropy: bool = True,
    sequence_parallel: int = 1,
    head_features: int | None = None,
    stock: bool = False,
) -> ActivationMemory:
    """What scoring one micro-batch takes of each device, as ``compute_log_prob`` and the reference do: without a graph.

    Args:
        config, tokens, response_tokens, logits_optimization, dtype: as for `activation_memory`.
        calculate_entropy, sequence_parallel, head_features, stock: as well. veRL's scoring pass takes the entropy.

    Raises:
        ValueError: as `activation_memory`.
    """
    part = _Part.of(
        config, tokens, response_tokens, logits_optimization, dtype, sequence_parallel, head_features, stock
    )
    head = part.gathered + part.scored(calculate_entropy)
    return ActivationMemory(0, part.own * _running(config, part.size), head)


def why_unknown(config: Any) -> str | None:
    """Why memory isn't predicted for this model, or None where it is."""
    model_type = getattr(config, "model_type", None)
    if model_type not in LAYERS_KNOWN:
        return f"memory is not predicted for models of type {model_type}, only for {', '.join(LAYERS_KNOWN)}"
    try:
        activation_memory(config, 1, 1, checkpointing=True)
    except ValueError as error:
        return f"memory is not predicted for this model: {error}"
    return None


def largest_token_budget(
    config: Any,
    available: int,
    response_share: float = 1.0,
    *,
    sequence_parallel: int = 1,
    scoring: bool = False,
    **options: Any,
) -> int:
    """The largest ``ppo_max_token_len_per_gpu`` whose micro-batches fit ``available`` bytes of each device.

    It is per device, as in verl's config: a micro-batch has ``sequence_parallel`` times as many packed tokens.

    Args:
        config: as for `activation_memory`.
        available: bytes that weights, gradients, optimizer and rollout leave free on a device.
        response_share: of the packed tokens of a micro-batch, from 0 to 1; 1 is the worst case.
        sequence_parallel: over how many devices a row is spread, ``ulysses_sequence_parallel_size``.
        scoring: the largest ``log_prob_max_token_len_per_gpu`` instead, by `scoring_memory`.
        options: the other arguments of `activation_memory`, or of `scoring_memory`.

    Raises:
        ValueError: as `activation_memory`; a share that can't be, or room for less than one token.
    """
    if not 0 <= response_share <= 1:
        raise ValueError(f"response_share: expected 0 to 1, got {response_share}")
    formula = scoring_memory if scoring else activation_memory

    def peak(budget: int) -> int:
        tokens = budget * sequence_parallel  # verl multiplies its budgets by the devices of a row, and so do we
        responses = math.ceil(tokens * response_share)
        return formula(config, tokens, responses, sequence_parallel=sequence_parallel, **options).peak

    if peak(1) > available:
        raise ValueError(
            f"available: expected at least {peak(1)} bytes, what one token per device takes, got {available}"
        )
    # Every token takes a byte at least, so that the answer is within the range.
    return bisect.bisect_right(range(1, available + 1), available, key=peak)


def _running(config: Any, size: int) -> int:
    """Bytes per token while one layer runs and nothing is kept, at the largest moment."""
    hidden, queries, keys, head_dim = _widths(config)
    in_attention = (3 * hidden + max(4 * queries + 2 * keys, 2 * queries + 5 * keys)) * size
    in_norm = 3 * hidden * size + queries * (8 + size) if config.model_type in _QUERY_KEY_NORM and size < 4 else 0
    in_mlp = 4 * hidden * size + _mlp_running(config, hidden, size)
    return 2 * head_dim * size + max(in_attention, in_norm, in_mlp)


def _mlp_running(config: Any, hidden: int, size: int) -> int:
    """Bytes per token inside the MLP while nothing is kept."""
    taken = config_size(config, "num_experts_per_tok", 0)
    if not taken:
        return 3 * config_size(config, "intermediate_size") * size
    inner = config_size(config, "moe_intermediate_size")
    in_experts = taken * (max(hidden + 4 * inner, 4 * hidden) * size + 32)
    return in_experts + 8 * config_size(config, "num_experts")


def _widths(config: Any) -> tuple[int, int, int, int]:
    """Of a hidden state, all queries, all keys, and one head."""
    hidden, heads = config_size(config, "hidden_size"), config_size(config, "num_attention_heads")
    head_dim = config_size(config, "head_dim", hidden // heads)
    return hidden, heads * head_dim, config_size(config, "num_key_value_heads", heads) * head_dim, head_dim


class _Layer(NamedTuple):
    """Bytes per token of one layer."""

    kept: int  # for its backward, without checkpointing
    gradients: int  # beside what is kept, at the largest moment of its backward

    @classmethod
    def of(cls, config: Any, size: int) -> _Layer:
        hidden, queries, keys, head_dim = _widths(config)
        norm, (mlp, in_mlp) = hidden * (4 + 2 * size), _mlp(config, hidden, size)
        normalised = (queries + keys) * ((4 + 2 * size) if config.model_type in _QUERY_KEY_NORM else size)
        kept = 2 * norm + normalised + (queries + keys) * size + 4 * (queries // head_dim) + mlp
        in_attention = (3 * queries + 4 * keys + hidden) * size - mlp - norm
        moments = [in_mlp, in_attention]
        if config.model_type in _QUERY_KEY_NORM:
            moments.append(6 * 4 * queries + norm + (2 * keys + hidden) * size - kept)
        return cls(kept, max(moments))


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


class _Part(NamedTuple):
    """One device's part of a micro-batch, checked."""

    size: int  # bytes of a number
    hidden: int
    vocabulary: int  # or other outputs of the head
    own: int  # tokens
    rows: int  # tokens that the head runs on
    gathered: int  # bytes of the last hidden states of the whole row, where it is spread
    mode: str
    stock: bool

    @classmethod
    def of(
        cls,
        config: Any,
        tokens: int,
        response_tokens: int,
        mode: str,
        dtype: str,
        sequence_parallel: int,
        head_features: int | None,
        stock: bool,
    ) -> _Part:
        model_type = getattr(config, "model_type", None)
        if model_type not in LAYERS_KNOWN:
            raise ValueError(
                "config: expected a model's config, such as AutoConfig.from_pretrained(...) gives, of type "
                f"{', '.join(LAYERS_KNOWN)}, got {model_type or repr(config)}"
            )
        if dtype not in _BYTES:
            raise ValueError(f"dtype: expected one of {', '.join(_BYTES)}, got {dtype!r}")
        if mode not in LOGITS_OPTIMIZATIONS:
            raise ValueError(f"logits_optimization: expected one of {', '.join(LOGITS_OPTIMIZATIONS)}, got {mode!r}")
        if not 0 <= response_tokens <= tokens or tokens < 1 or sequence_parallel < 1:
            raise ValueError(
                "tokens: expected at least 1, response_tokens of 0 up to it and sequence_parallel of at least 1, got "
                f"{tokens}, {response_tokens} and {sequence_parallel}"
            )
        size, own = _BYTES[dtype], math.ceil(tokens / sequence_parallel)
        hidden = config_size(config, "hidden_size")
        features = config_size(config, "vocab_size") if head_features is None else head_features
        # Each device scores its share of the responses, wherever they were computed; veRL's own scores its own tokens.
        gathered = tokens * hidden * size if sequence_parallel > 1 and not stock else 0
        rows = own if stock else math.ceil(response_tokens / sequence_parallel)
        return cls(size, hidden, features, own, rows, gathered, mode, stock)

    def trained(self, calculate_entropy: bool) -> int:
        """The largest moment of the head's forward and backward."""
        size, weight = self.size, self.hidden * self.vocabulary  # and its gradient, in float32 too where chunks add up
        states = self.rows * self.hidden * size
        if self.stock:
            return self.scored(calculate_entropy) + weight * size
        logits, in_chunk = self._logits, self._in_chunk
        gradient = in_chunk * self.vocabulary * (4 + (4 if calculate_entropy else size if size < 4 else 0))
        if self.mode == "memory":
            backward = logits + gradient + states + weight * (size + (4 if size < 4 else 0))
        else:
            if in_chunk < self.rows:  # chunks are written into one gradient
                gradient += self.rows * self.vocabulary * size
            backward = max(logits + gradient, logits + states + weight * size)
        return max(self.scored(calculate_entropy), states + backward)

    def scored(self, calculate_entropy: bool) -> int:
        """The largest moment of the head's forward. What veRL's own takes at least is its logits."""
        states = self.rows * self.hidden * self.size
        if self.stock:
            return states + self._logits
        # float32 logits are their own first copy; the log-softmax is another, and so is what entropy is summed from.
        copies = 1 if self.size == 4 and not calculate_entropy else 2
        return states + self._logits + copies * self._in_chunk * self.vocabulary * 4

    @property
    def _logits(self) -> int:
        """Bytes of those that are there at the same time; veRL's fused kernels have them in float32."""
        if self.mode == "memory":
            return self._in_chunk * self.vocabulary * (4 if self.stock else self.size)
        return self.rows * self.vocabulary * self.size

    @property
    def _in_chunk(self) -> int:
        """Tokens whose logits are worked on at the same time."""
        if self.mode == "none":
            return self.rows
        most = _FUSED_ROWS if self.stock else max(1, ACCELERATOR_CHUNK_BYTES // (4 * self.vocabulary))
        return min(self.rows, most)
