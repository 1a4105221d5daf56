"""Whether a checkpoint's log-probs, entropies and gradients stay what they are when prompts are shared.

`verify` loads any supported checkpoint, builds a ragged batch and compares the model with the seam to the model
without, on one unpadded row at a time. A model that is large for the memory is compared layer by layer.
"""

from __future__ import annotations

import math
import os
import platform
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from zorro_verl.checkpoint import config_of, load, quiet_loading, skeleton
from zorro_verl.equivalence import (
    TOLERANCES,
    Batch,
    Comparison,
    Difference,
    Sharing,
    Track,
    differences_of,
    plain_outcome,
    ragged_batch,
    shared_outcome,
    untracked,
    widened,
)
from zorro_verl.families import check_training, text_config, window_of
from zorro_verl.layer_loading import LayeredCheckpoint
from zorro_verl.layerwise import compare_layer
from zorro_verl.linear_attention import LINEAR_ATTENTION, LinearPlan
from zorro_verl.measuring import check_device
from zorro_verl.mixers import linear_layers, takes_cu_seqlens
from zorro_verl.packing import Plan
from zorro_verl.verify_request import Sizes, check_device_name

BOTH = "both"
DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "float32": torch.float32,
        "bfloat16": torch.bfloat16,
        "float64": torch.float64,
        "float16": torch.float16,
    }
)
# Weights, two sets of gradients and what else a step needs, at once, of the free memory. Weights count in the widest
# arithmetic of the comparison: those of a bfloat16 model at the size of float64, their oracle's.
SHARE_FOR_WEIGHTS = 0.25


@dataclass(frozen=True)
class Report:
    """What was compared, and what came out.

    Attributes:
        model: the folder or hub name.
        model_class, model_type: of the model that was loaded.
        dtype, device, attention: what it ran with.
        linear_attention: the ways in which linear layers shared, one after the other; none without such layers.
        versions: of Python, torch and transformers.
        layers: how many there are of each kind.
        rows, groups: rows and distinct prompts of the batch.
        tokens_total, tokens_packed: tokens of all rows, and of them through the shared model.
        layer_by_layer: whether layers were compared one at a time.
        oracle: the arithmetic that both sides were compared with, None when with each other.
        differences: by quantity, the largest.
        notes: what this comparison did not reach, and why training is refused where it is.
    """

    model: str
    model_class: str
    model_type: str
    dtype: str
    device: str
    attention: str
    linear_attention: tuple[str, ...]
    versions: Mapping[str, str]
    layers: Mapping[str, int]
    rows: int
    groups: int
    tokens_total: int
    tokens_packed: int
    layer_by_layer: bool
    oracle: str | None
    differences: tuple[Difference, ...]
    notes: tuple[str, ...]

    @property
    def equal(self) -> bool:
        """The verdict."""
        return all(difference.equal for difference in self.differences)

    @property
    def token_ratio(self) -> float:
        """Times fewer tokens that went through the shared model."""
        return self.tokens_total / self.tokens_packed

    def as_json(self) -> dict[str, Any]:
        """Everything, for `json.dump`; a difference that is not a number is None, which JSON has."""
        verdict = {"equal": self.equal, "token_ratio": self.token_ratio}
        return asdict(self) | {"differences": [_difference_as_json(d) for d in self.differences]} | verdict


def _difference_as_json(difference: Difference) -> dict[str, Any]:
    worst = difference.worst if math.isfinite(difference.worst) else None
    return asdict(difference) | {"worst": worst, "equal": difference.equal}


def verify(
    model: str,
    dtype: str | None = None,
    device: str = "cpu",
    attn_implementation: str = "auto",
    linear_attention: str = BOTH,
    sizes: Sizes = Sizes(),  # noqa: B008
    seed: int = 0,
    layer_by_layer: bool | None = None,
    track: Track = untracked,
) -> Report:
    """Compare a checkpoint with the seam to the checkpoint without it.

    Args:
        model: a folder, or a name on the hub.
        dtype: one of `DTYPES`; float32 on a CPU and bfloat16 elsewhere when None.
        device: "cpu", "cuda" or "cuda:N".
        attn_implementation: of the seam, see `zorro_verl.models.install`.
        linear_attention: of the seam, or "both" for expand and fork, one after the other.
        sizes: of the batch.
        seed: of its tokens, its shape and the loss.
        layer_by_layer: None decides by the free memory.
        track: wraps what takes long, given what it is and how many there are.

    Raises:
        ValueError: a checkpoint that can't be had, is not supported or gives values that are not finite; a dtype, a
            device or an attention that isn't there.
    """
    dtype = dtype or ("float32" if device == "cpu" else "bfloat16")
    if dtype not in DTYPES:
        raise ValueError(f"dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
    check_device_name(device)
    check_device(device)
    config = config_of(model)
    whole = skeleton(config)
    batch = ragged_batch(text_tokens(config), sizes, seed, device)
    ways = _ways(whole, _runnable(attn_implementation, DTYPES[dtype], device), linear_attention, batch.plan)
    with ways[0].on(whole, torch.device(device).type):  # refuses before a weight is read
        attention = ways[0].attention_of(whole)
    wide_dtype = None if DTYPES[dtype] in TOLERANCES else _wide_dtype(config, device)
    if layer_by_layer is None:
        layer_by_layer = not _fits(whole, wide_dtype or DTYPES[dtype], device)
    with quiet_loading():
        if layer_by_layer:
            checkpoint = LayeredCheckpoint(model, config, whole, DTYPES[dtype], device)
            differences = _layers(checkpoint, batch, ways, wide_dtype, track)
        else:
            differences = _whole(load(model, config, DTYPES[dtype], device), batch, ways, wide_dtype, track)
        differences = _largest(differences)
    plan = batch.plan
    return Report(
        model=model,
        model_class=type(whole).__name__,
        model_type=config.model_type,
        dtype=dtype,
        device=device if device == "cpu" else torch.cuda.get_device_name(device),
        attention=attention,
        linear_attention=tuple(way.linear_attention for way in ways if way.linear_attention is not None),
        versions={
            "Python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        layers=layer_kinds(whole),
        rows=batch.rows.num_rows,
        groups=plan.num_groups,
        tokens_total=plan.num_row_tokens,
        tokens_packed=plan.num_tokens,
        layer_by_layer=layer_by_layer,
        oracle=None if wide_dtype is None else str(wide_dtype).removeprefix("torch."),
        differences=tuple(differences),
        notes=_notes(config, batch),
    )


def layer_kinds(model: PreTrainedModel) -> Mapping[str, int]:
    """How many decoder layers there are of each kind, and how many of them are mixtures of experts."""
    text = text_config(model.config)
    layers = model.get_decoder().layers
    kinds = list(getattr(text, "layer_types", None) or ["full_attention"] * len(layers))
    kinds = ["sliding_attention" if window_of(text, i) else kind for i, kind in enumerate(kinds)]
    experts = sum(any(name.endswith("experts") for name, _ in layer.named_modules()) for layer in layers)
    return dict(Counter(kinds)) | ({"mixture_of_experts": experts} if experts else {})


def text_tokens(config: PretrainedConfig) -> Tensor:
    """The token ids of text: all but those that the config gives another meaning (images, padding, ends)."""
    special: set[int] = set()
    for part in (config, text_config(config)):
        for name, value in vars(part).items():
            if name.endswith(("_token_id", "_token_index")) and value is not None:
                special.update(value if isinstance(value, list | tuple) else [value])
    ids = torch.arange(text_config(config).vocab_size)
    return ids[~torch.isin(ids, torch.tensor(sorted(special), dtype=torch.int64))]


def _runnable(attn_implementation: str, dtype: torch.dtype, device: str) -> str:
    """Flash attention on CUDA is for 16 bits: what is not chosen becomes the dense reference elsewhere."""
    if attn_implementation.startswith("flash_attention") and dtype in TOLERANCES:
        raise ValueError(
            f"attn_implementation={attn_implementation}: expected eager with {dtype}, as it computes in 16 bits"
        )
    return "eager" if attn_implementation == "auto" and device != "cpu" and dtype in TOLERANCES else attn_implementation


def _ways(model: PreTrainedModel, attn_implementation: str, linear_attention: str, plan: Plan) -> tuple[Sharing, ...]:
    """How the seam shares, one comparison each: where there are linear layers, as expand or fork."""
    if linear_attention not in (BOTH, *LINEAR_ATTENTION):
        raise ValueError(
            f"linear_attention: expected one of {', '.join((BOTH, *LINEAR_ATTENTION))}, got {linear_attention!r}"
        )
    rules = [mixer.chunk_gated_delta_rule for _, mixer in linear_layers(model)]
    if not rules:
        return (Sharing(attn_implementation),)
    if linear_attention == BOTH:
        return tuple(Sharing(attn_implementation, way) for way in ("expand", "fork"))
    return (Sharing(attn_implementation, LinearPlan(plan, linear_attention, takes_cu_seqlens(rules[0])).mode),)


def _wide_dtype(config: PretrainedConfig, device: str) -> torch.dtype:
    """What the oracle computes in: float64, which the GPU kernels of linear attention don't have."""
    linear = "linear_attention" in (getattr(text_config(config), "layer_types", None) or ())
    return torch.float32 if linear and device != "cpu" else torch.float64


def _fits(model: PreTrainedModel, dtype: torch.dtype, device: str) -> bool:
    needed = sum(parameter.numel() for parameter in model.parameters()) * dtype.itemsize
    return needed <= SHARE_FOR_WEIGHTS * free_memory(device)


def free_memory(device: str) -> int:
    """Bytes."""
    if device != "cpu":
        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        return 1024 * next(int(line.split()[1]) for line in meminfo.open() if line.startswith("MemAvailable"))
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2  # a guess where the system keeps no count


def _whole(
    model: PreTrainedModel, batch: Batch, ways: Sequence[Sharing], wide_dtype: torch.dtype | None, track: Track
) -> Iterator[Difference]:
    wide = None if wide_dtype is None else plain_outcome(widened(model, wide_dtype), batch, track)
    plain = plain_outcome(model, batch, track)
    plain.check_finite()
    tracked = track(ways, "shared calls", len(ways))
    comparison = Comparison(batch, model)
    yield from differences_of(tracked, model, lambda seamed: shared_outcome(seamed, batch), comparison, plain, wide)


def _layers(
    checkpoint: LayeredCheckpoint,
    batch: Batch,
    ways: Sequence[Sharing],
    wide_dtype: torch.dtype | None,
    track: Track,
) -> Iterator[Difference]:
    hidden = None
    for layer in track(range(checkpoint.num_layers), "layers", checkpoint.num_layers):
        differences, hidden = compare_layer(checkpoint, layer, batch, hidden, ways, wide_dtype)
        yield from differences


def _largest(differences: Iterable[Difference]) -> list[Difference]:
    """Of each quantity the one that is largest for its tolerance, what is not a number first."""
    largest: dict[str, Difference] = {}
    for difference in differences:
        known = largest.get(difference.quantity)
        if known is None or (known.part == known.part and not difference.part <= known.part):
            largest[difference.quantity] = difference
    return list(largest.values())


def _notes(config: PretrainedConfig, batch: Batch) -> tuple[str, ...]:
    notes = []
    text = text_config(config)
    window = max((window_of(text, layer) or 0 for layer in range(text.num_hidden_layers)), default=0)
    if batch.plan.longest_row <= window:
        notes.append(
            f"no row reaches beyond the sliding window of {window} tokens (longest: {batch.plan.longest_row}); "
            "a larger --prompt does"
        )
    try:
        check_training(config, True)
    except ValueError as error:  # log-probs of an evaluated model are equal all the same
        notes.append(f"training is refused with this config: {error}")
    return tuple(notes)
