"""How much sharing can save: the multiply-adds of a batch's rows as they are over those of its packed rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple


class Work(NamedTuple):
    """Multiply-adds of one forward over some rows."""

    counted: int  # as if no row shared anything, the head on response tokens alone
    executed: int
    head: int  # in both of them: what the head takes
    prompt_head: int  # in neither: the head on the prompt of every row, which veRL's own engine runs, too


def flop_bound_speedup(config: Any, groups: Iterable[tuple[int, Sequence[int]]]) -> float:
    """The speed-up that is left when everything but the model's products costs nothing; 1.0 where nothing is shared.

    Args:
        config: as for `ModelWork.of`.
        groups: the prompt length of each group and the response lengths of its rows, in tokens without padding.

    Raises:
        ValueError: no groups, a group without rows, a length that cannot be, an attribute that is missing.
    """
    groups = list(groups)
    for number, (prompt, responses) in enumerate(groups):
        if prompt < 1 or not responses or min(responses) < 0:
            raise ValueError(
                "groups: expected a prompt length of at least 1 and response lengths of at least 0, one for each row, "
                f"got {prompt} and {list(responses)} in group {number}"
            )
    work = ModelWork.of(config).of_groups(groups)
    if not work.counted:
        raise ValueError("groups: expected at least one group, got none")
    return work.counted / work.executed


class ModelWork(NamedTuple):
    """Multiply-adds of a model's forward.

    Counted are the linear layers, attention over the pairs that may see each other, and the head on response tokens
    only. Norms, biases, gates, routers and vision towers are not, nor is the embedding, which multiplies nothing.
    """

    per_token: int  # linear layers
    per_pair: int  # attention of one layer, scores and sums
    windows: tuple[tuple[int | None, int], ...]  # each attention window (None: no window), and how many layers have it
    head: int  # per response token

    @classmethod
    def of(cls, config: Any, head_features: int | None = None) -> ModelWork:
        """The model that a Hugging Face config describes.

        Args:
            config: of it are read ``hidden_size``, ``num_hidden_layers``, ``num_attention_heads``, ``vocab_size``,
                ``intermediate_size`` and, where there are any, ``num_key_value_heads``, ``head_dim``,
                ``layer_types``, ``sliding_window``, the sizes of experts and of linear attention. A composite config
                is read at its ``text_config``.
            head_features: outputs of the head for one token; ``vocab_size`` by default, 1 for a value model.

        Raises:
            ValueError: an attribute that is missing.
        """
        config = getattr(config, "text_config", config)
        hidden, layers, heads = (
            config_size(config, f) for f in ("hidden_size", "num_hidden_layers", "num_attention_heads")
        )
        head_dim = config_size(config, "head_dim", hidden // heads)
        heads_width, kv_width = heads * head_dim, config_size(config, "num_key_value_heads", heads) * head_dim
        window = config_size(config, "sliding_window", 0) or None
        types = config_size(
            config, "layer_types", ["full_attention" if window is None else "sliding_attention"] * layers
        )
        windows = [window if kind == "sliding_attention" else None for kind in types if kind != "linear_attention"]
        linear_layers = layers - len(windows)
        per_token = sum(3 * hidden * _mlp_width(config, layer) for layer in range(layers))
        per_token += len(windows) * 2 * hidden * (heads_width + kv_width)
        if linear_layers:
            per_token += linear_layers * _linear_attention(config, hidden)
        head = hidden * (config_size(config, "vocab_size") if head_features is None else head_features)
        return cls(per_token, 2 * heads_width, tuple(Counter(windows).items()), head)

    def of_groups(self, groups: Iterable[tuple[int, Sequence[int]]], share_attention: bool = True) -> Work:
        """Rows of shared prompts: all of them in full, against each prompt once.

        Args:
            groups: the prompt length of each group and the response lengths of its rows, in tokens.
            share_attention: False where attention runs on the rows as they were (``use_split_attention=False``), so
                that a prompt's linear layers alone are shared.
        """
        layers = saved = scored = prompts = 0
        for prompt, responses in groups:
            layers += sum(self._sequence(prompt + response) for response in responses)
            saved += (len(responses) - 1) * (self._sequence(prompt) if share_attention else self.per_token * prompt)
            scored += sum(responses)
            prompts += prompt * len(responses)
        head = self.head * scored
        return Work(layers + head, layers - saved + head, head, self.head * prompts)

    def _sequence(self, length: int) -> int:
        """One causal sequence without its head."""
        pairs = sum(layers * _pairs(length, window) for window, layers in self.windows)
        return self.per_token * length + self.per_pair * pairs


def _pairs(length: int, window: int | None) -> int:
    """Query-key pairs of a causal sequence in which a token sees at most ``window`` tokens, itself included."""
    full = length if window is None else min(length, window)
    return full * (full + 1) // 2 + (length - full) * full


def _mlp_width(config: Any, layer: int) -> int:
    """Inner features that one token passes in a layer: those of its experts, or of the dense MLP."""
    experts = config_size(config, "num_experts_per_tok", 0)
    dense = (
        layer in config_size(config, "mlp_only_layers", ())
        or (layer + 1) % config_size(config, "decoder_sparse_step", 1) != 0
    )
    if not experts or dense:
        return config_size(config, "intermediate_size")
    # Mixtral and OLMoE have one size for both.
    own = config_size(config, "moe_intermediate_size", 0) or config_size(config, "intermediate_size")
    return experts * own + config_size(config, "shared_expert_intermediate_size", 0)


def _linear_attention(config: Any, hidden: int) -> int:
    """A gated delta rule per token: its projections, and three products with the state of each head."""
    key_dim, value_dim = config_size(config, "linear_key_head_dim"), config_size(config, "linear_value_head_dim")
    value_heads = config_size(config, "linear_num_value_heads")
    keys, values = key_dim * config_size(config, "linear_num_key_heads"), value_dim * value_heads
    return hidden * (2 * keys + 3 * values) + 3 * value_heads * key_dim * value_dim


def config_size(config: Any, name: str, default: Any = None) -> Any:
    """An attribute of a config; without a ``default`` it has to be there, and above 0."""
    value = getattr(config, name, None)
    if value is None:
        value = default
    if default is None and (type(value) is not int or value < 1):
        got = "none" if value is None else repr(value)
        raise ValueError(f"config: expected a model config with {name} above 0, got {got} in {type(config).__name__}")
    return value
