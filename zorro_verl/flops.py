"""How much sharing can save: the multiply-adds of a batch's rows as they are over those of its packed rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple


def flop_bound_speedup(config: Any, groups: Iterable[tuple[int, Sequence[int]]]) -> float:
    """The speed-up that is left when everything but the model's products costs nothing; 1.0 where nothing is shared.

    Counted are the linear layers, attention over the pairs that may see each other, and the head on response tokens
    only, in both cases; the backward costs both the same multiple. Norms, biases, gates and routers are not counted.

    Args:
        config: a Hugging Face config, of which attributes are read: ``hidden_size``, ``num_hidden_layers``,
            ``num_attention_heads``, ``vocab_size``, ``intermediate_size`` and, where there are any,
            ``num_key_value_heads``, ``head_dim``, ``layer_types``, ``sliding_window``, the sizes of experts and of
            linear attention. A composite config is read at its ``text_config``.
        groups: the prompt length of each group and the response lengths of its rows, in tokens without padding.

    Raises:
        ValueError: no groups, a group without rows, a length that cannot be, an attribute that is missing.
    """
    model = _Model.of(getattr(config, "text_config", config))
    total = saved = 0
    for number, (prompt, responses) in enumerate(groups):
        if prompt < 1 or not responses or min(responses) < 0:
            raise ValueError(
                "groups: expected a prompt length of at least 1 and response lengths of at least 0, one for each row, "
                f"got {prompt} and {list(responses)} in group {number}"
            )
        total += sum(model.sequence(prompt + response) + model.head * response for response in responses)
        saved += (len(responses) - 1) * model.sequence(prompt)
    if not total:
        raise ValueError("groups: expected at least one group, got none")
    return total / (total - saved)


class _Model(NamedTuple):
    """Multiply-adds of a model."""

    per_token: int  # linear layers
    per_pair: int  # attention of one layer, scores and sums
    windows: tuple[int | None, ...]  # the attention window of each layer with attention
    head: int  # per token

    @classmethod
    def of(cls, config: Any) -> _Model:
        hidden, layers, heads = (_get(config, f) for f in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
        head_dim = _get(config, "head_dim", hidden // heads)
        heads_width, kv_width = heads * head_dim, _get(config, "num_key_value_heads", heads) * head_dim
        window = _get(config, "sliding_window", 0) or None
        types = _get(config, "layer_types", ["full_attention" if window is None else "sliding_attention"] * layers)
        windows = [window if kind == "sliding_attention" else None for kind in types if kind != "linear_attention"]
        linear_layers = layers - len(windows)
        per_token = sum(3 * hidden * _mlp_width(config, layer) for layer in range(layers))
        per_token += len(windows) * 2 * hidden * (heads_width + kv_width)
        if linear_layers:
            per_token += linear_layers * _linear_attention(config, hidden)
        return cls(per_token, 2 * heads_width, tuple(windows), hidden * _get(config, "vocab_size"))

    def sequence(self, length: int) -> int:
        """One causal sequence without its head."""
        return self.per_token * length + self.per_pair * sum(_pairs(length, window) for window in self.windows)


def _pairs(length: int, window: int | None) -> int:
    """Query-key pairs of a causal sequence in which a token sees at most ``window`` tokens, itself included."""
    full = length if window is None else min(length, window)
    return full * (full + 1) // 2 + (length - full) * full


def _mlp_width(config: Any, layer: int) -> int:
    """Inner features that one token passes in a layer: those of its experts, or of the dense MLP."""
    experts = _get(config, "num_experts_per_tok", 0)
    dense = layer in _get(config, "mlp_only_layers", ()) or (layer + 1) % _get(config, "decoder_sparse_step", 1) != 0
    if not experts or dense:
        return _get(config, "intermediate_size")
    own = _get(config, "moe_intermediate_size", 0) or _get(config, "intermediate_size")  # Mixtral and OLMoE have one
    return experts * own + _get(config, "shared_expert_intermediate_size", 0)


def _linear_attention(config: Any, hidden: int) -> int:
    """A gated delta rule per token: its projections, and three products with the state of each head."""
    key_dim, value_dim = _get(config, "linear_key_head_dim"), _get(config, "linear_value_head_dim")
    value_heads = _get(config, "linear_num_value_heads")
    keys, values = key_dim * _get(config, "linear_num_key_heads"), value_dim * value_heads
    return hidden * (2 * keys + 3 * values) + 3 * value_heads * key_dim * value_dim


def _get(config: Any, name: str, default: Any = None) -> Any:
    value = getattr(config, name, None)
    if value is None:
        value = default
    if default is None and (type(value) is not int or value < 1):
        got = "none" if value is None else repr(value)
        raise ValueError(f"config: expected a model config with {name} above 0, got {got} in {type(config).__name__}")
    return value
