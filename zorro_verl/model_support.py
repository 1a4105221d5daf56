"""Whether a model can share prompts, which of its layers do and how, and what it asks of a run; no weight is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from zorro_verl.findings import Findings

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

# Of every kind of decoder layer, beside norms, projections and MLP, which run on packed tokens in all of them.
SHARING: Mapping[str, str] = MappingProxyType(
    {
        "full_attention": "a prompt attends once; responses attend to it and to themselves",
        "sliding_attention": "the same, within each row's own window",
        "linear_attention": "responses start from their prompt's state, or rows scan it again where that is faster",
        "mixture_of_experts": "prompt tokens are routed once; router losses count them per row",
    }
)


@dataclass(frozen=True)
class LayerKind:
    """Layers that share alike.

    Attributes:
        kind: "full_attention", "sliding_attention", "linear_attention", "mixture_of_experts" or "vision_tower".
        count: how many layers there are; 1 for a vision tower.
        sharing: what is done once for a prompt, in words.
        window: tokens that a token sees, of sliding attention.
    """

    kind: str
    count: int
    sharing: str
    window: int | None = None


@dataclass(frozen=True)
class ModelSupport:
    """What is known of a model from its config.

    Attributes:
        name, model_type: as asked for, and as its config says.
        supported: whether it can be trained with ``strategy=zorro`` as it is.
        model_class: the class that veRL loads for actor and reference; None when it is refused.
        layers: by kind.
        linear_rule: what computes linear attention, None without any.
        critic: whether it can be a critic.
        sequence_parallel_sizes: what ``ulysses_sequence_parallel_size`` may be, as far as heads go.
        heads: counts by the names of the config.
    """

    name: str
    model_type: str | None
    supported: bool
    model_class: str | None = None
    layers: tuple[LayerKind, ...] = ()
    linear_rule: str | None = None
    critic: bool = False
    sequence_parallel_sizes: tuple[int, ...] = ()
    heads: tuple[tuple[str, int], ...] = ()


def examine_model(name: str, findings: Findings) -> ModelSupport:
    """The config of a checkpoint, against what sharing gets right.

    Args:
        name: as for `zorro_verl.known_models.read_config`.

    Raises:
        ValueError: a config that is not there or can't be read.
    """
    from zorro_verl.checkpoint import skeleton
    from zorro_verl.families import check_supported, check_training, head_counts
    from zorro_verl.known_models import read_config
    from zorro_verl.value_models import check_value_model

    config = read_config(name)
    try:
        check_supported(config)
    except ValueError as error:
        findings.problem("model", f"model: {name} can't share prompts: {error}")
        return ModelSupport(name, None, False)
    model = skeleton(config)
    try:
        check_training(config, training=True)
    except ValueError as error:
        findings.problem("model", f"model: {name} can't be trained as it is: {error}")
    critic = True
    try:
        check_value_model(config)
    except ValueError as error:
        critic = False
        findings.note(f"the model can't be a critic: {error}")
    heads = head_counts(config)
    return ModelSupport(
        name,
        config.model_type,
        not findings.hinders("model"),
        type(model).__name__,
        tuple(_layers(config, model)),
        _linear_rule(model),
        critic,
        tuple(size for size in range(1, max(heads.values()) + 1) if _divides(size, heads)),
        tuple(heads.items()),
    )


def _layers(config: PretrainedConfig, model: PreTrainedModel) -> Iterator[LayerKind]:
    from zorro_verl.families import text_config, windows_of
    from zorro_verl.media import Vision
    from zorro_verl.verify import layer_kinds

    window = max((window for window in windows_of(text_config(config)) if window), default=None)
    for kind, count in layer_kinds(model).items():
        yield LayerKind(kind, count, SHARING[kind], window if kind == "sliding_attention" else None)
    if Vision.of(config):
        yield LayerKind("vision_tower", 1, "not shared: rows with images or videos go through the model whole")


def _linear_rule(model: PreTrainedModel) -> str | None:
    from zorro_verl.mixers import linear_layers, takes_cu_seqlens

    rules = [mixer.chunk_gated_delta_rule for _, mixer in linear_layers(model)]
    if not rules:
        return None
    return "flash-linear-attention" if takes_cu_seqlens(rules[0]) else "transformers' rule in torch ops"


def _divides(size: int, heads: Mapping[str, int]) -> bool:
    from zorro_verl.sequence_parallel import check_heads

    try:
        check_heads("size", size, heads)
    except ValueError:  # the answer
        return False
    return True
