"""Whether a checkpoint's log-probs, entropies and gradients stay what they are when prompts are shared.

`verify` loads any supported checkpoint, builds a ragged batch and compares the model with the seam to the model
without, on one unpadded row at a time. A model that is large for the memory is compared layer by layer.
"""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from zorro_verl.equivalence import (
    TOLERANCES,
    Batch,
    Comparison,
    Difference,
    Sharing,
    Sizes,
    plain_outcome,
    ragged_batch,
    shared_outcome,
    use_runnable_experts,
    widened,
)
from zorro_verl.families import auto_class, check_supported, text_config
from zorro_verl.layer_loading import LayeredCheckpoint
from zorro_verl.layerwise import compare_layer

T = TypeVar("T")
Track = Callable[[Iterable[T], str, int], Iterable[T]]
DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "float32": torch.float32,
        "bfloat16": torch.bfloat16,
        "float64": torch.float64,
        "float16": torch.float16,
    }
)
# Weights, two sets of gradients and what else a step needs, at once, of the free memory.
SHARE_FOR_WEIGHTS = 0.25


@dataclass(frozen=True)
class Report:
    """What was compared, and what came out.

    Attributes:
        model: the folder or hub name.
        model_class, model_type: of the model that was loaded.
        dtype, device, attention, linear_attention: what it ran with.
        versions: of Python, torch and transformers.
        layers: how many there are of each kind.
        rows, groups: rows and distinct prompts of the batch.
        tokens_total, tokens_packed: tokens of all rows, and of them through the shared model.
        layer_by_layer: whether layers were compared one at a time.
        oracle: the arithmetic that both sides were compared with, None when with each other.
        differences: by quantity, the largest.
        notes: what this comparison did not reach.
    """

    model: str
    model_class: str
    model_type: str
    dtype: str
    device: str
    attention: str
    linear_attention: str
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
        """Everything, for `json.dump`."""
        differences = [asdict(difference) | {"equal": difference.equal} for difference in self.differences]
        verdict = {"equal": self.equal, "token_ratio": self.token_ratio}
        return asdict(self) | {"differences": differences} | verdict


def untracked(items: Iterable[T], what: str, total: int) -> Iterable[T]:
    """No progress is shown."""
    return items


def verify(
    model: str,
    dtype: str | None = None,
    device: str = "cpu",
    sharing: Sharing = Sharing(),  # noqa: B008
    sizes: Sizes = Sizes(),  # noqa: B008
    seed: int = 0,
    layer_by_layer: bool | None = None,
    track: Track = untracked,
) -> Report:
    """Compare a checkpoint with the seam to the checkpoint without it.

    Args:
        model: a folder, or a name on the hub.
        dtype: one of `DTYPES`; float32 on a CPU and bfloat16 elsewhere when None.
        device: "cpu" or "cuda".
        sharing: how the seam shares.
        sizes: of the batch.
        seed: of its tokens, its shape and the loss.
        layer_by_layer: None decides by the free memory.
        track: wraps what takes long, given what it is and how many there are.

    Raises:
        ValueError: a checkpoint that can't be had or is not supported, a dtype, a device or an attention that isn't
            there.
    """
    dtype = dtype or ("float32" if device == "cpu" else "bfloat16")
    if dtype not in DTYPES:
        raise ValueError(f"dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
    if device != "cpu" and not (device.startswith("cuda") and torch.cuda.is_available()):
        raise ValueError(f"device: expected cpu, or cuda where torch finds one, got {device!r}")
    config = config_of(model)
    sharing = _runnable(sharing, DTYPES[dtype], device)
    whole = skeleton(config)
    sharing.install(whole, device)  # refuses before a weight is read
    wide_dtype = None if DTYPES[dtype] in TOLERANCES else _wide_dtype(config, device)
    if layer_by_layer is None:
        layer_by_layer = not _fits(whole, wide_dtype or DTYPES[dtype], device)
    batch = ragged_batch(text_tokens(config), sizes, seed, device)
    with quiet_loading():
        if layer_by_layer:
            checkpoint = LayeredCheckpoint(model, config, skeleton(config), DTYPES[dtype], device)
            differences = _largest(_layers(checkpoint, batch, sharing, wide_dtype, track))
        else:
            differences = _whole(load(model, config, DTYPES[dtype], device), batch, sharing, wide_dtype)
    plan = batch.plan
    return Report(
        model=model,
        model_class=type(whole).__name__,
        model_type=config.model_type,
        dtype=dtype,
        device=device if device == "cpu" else torch.cuda.get_device_name(),
        attention=sharing.attn_implementation,
        linear_attention=sharing.linear_attention,
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


def config_of(model: str) -> PretrainedConfig:
    """The config of a checkpoint of a supported type."""
    looks_local = model.startswith((".", "/", "~")) or Path(model).exists()
    if looks_local and not (Path(model) / "config.json").is_file():
        raise ValueError(f"model: expected a checkpoint folder with a config.json, got {model!r}")
    try:
        config = AutoConfig.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"model: expected a checkpoint folder or a name on a hub that can be reached, got {model!r} "
            f"({str(error).strip().splitlines()[0]})"
        ) from error
    check_supported(config)
    return config


def load(model: str, config: PretrainedConfig, dtype: torch.dtype, device: str) -> PreTrainedModel:
    """The model that veRL would load."""
    try:
        loaded, found = auto_class(config).from_pretrained(model, dtype=dtype, output_loading_info=True)
    except OSError as error:
        raise ValueError(f"model: {str(error).strip().splitlines()[0]}") from error
    if lacking := sorted(found["missing_keys"]):  # would be random
        raise ValueError(f"model: the checkpoint lacks {', '.join(lacking[:3])}{' and more' * (len(lacking) > 3)}")
    use_runnable_experts(loaded)
    return loaded.to(device)


def skeleton(config: PretrainedConfig) -> PreTrainedModel:
    """The model that veRL would load, without weights."""
    with torch.device("meta"):
        return auto_class(config).from_config(config)


def layer_kinds(model: PreTrainedModel) -> Mapping[str, int]:
    """How many decoder layers there are of each kind, and how many of them are mixtures of experts."""
    text = text_config(model.config)
    layers = model.get_decoder().layers
    kinds = getattr(text, "layer_types", None)
    if kinds is None:
        windowed = getattr(text, "sliding_window", None) is not None
        kinds = ["sliding_attention" if windowed else "full_attention"] * len(layers)
    experts = sum(any(name.endswith("experts") for name, _ in layer.named_modules()) for layer in layers)
    return Counter(kinds) | ({"mixture_of_experts": experts} if experts else {})


def text_tokens(config: PretrainedConfig) -> Tensor:
    """The token ids of text: all but those that the config gives another meaning (images, padding, ends)."""
    special: set[int] = set()
    for part in (config, text_config(config)):
        for name, value in vars(part).items():
            if name.endswith(("_token_id", "_token_index")) and value is not None:
                special.update(value if isinstance(value, list | tuple) else [value])
    ids = torch.arange(text_config(config).vocab_size)
    return ids[~torch.isin(ids, torch.tensor(sorted(special), dtype=torch.int64))]


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Within this context, transformers says only what is an error, and shows no progress of its own."""
    logging = transformers.utils.logging
    verbosity, had_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if had_bars:
            logging.enable_progress_bar()


def _runnable(sharing: Sharing, dtype: torch.dtype, device: str) -> Sharing:
    """On CUDA, flash attention is for 16 bits: what is not chosen becomes the dense reference elsewhere."""
    if sharing.attn_implementation == "auto" and device != "cpu" and dtype in TOLERANCES:
        return Sharing("eager", sharing.linear_attention)
    return sharing


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
        return torch.cuda.mem_get_info()[0]
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        return 1024 * next(int(line.split()[1]) for line in meminfo.open() if line.startswith("MemAvailable"))
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2  # a guess where the system keeps no count


def _whole(
    model: PreTrainedModel, batch: Batch, sharing: Sharing, wide_dtype: torch.dtype | None
) -> Iterable[Difference]:
    wide = None if wide_dtype is None else plain_outcome(widened(model, wide_dtype), batch)
    plain = plain_outcome(model, batch)
    with sharing.on(model):
        shared = shared_outcome(model, batch)
    return Comparison(batch, model.dtype).differences(plain, shared, wide)


def _layers(
    checkpoint: LayeredCheckpoint, batch: Batch, sharing: Sharing, wide_dtype: torch.dtype | None, track: Track
) -> Iterator[Difference]:
    hidden = None
    for layer in track(range(checkpoint.num_layers), "layers", checkpoint.num_layers):
        differences, hidden = compare_layer(checkpoint, layer, batch, hidden, sharing, wide_dtype)
        yield from differences


def _largest(differences: Iterable[Difference]) -> list[Difference]:
    """Of each quantity the one that is furthest from its tolerance, what is not a number first."""
    largest: dict[str, Difference] = {}
    for difference in differences:
        known = largest.get(difference.quantity)
        if known is None or (known.worst == known.worst and not difference.worst <= known.worst):
            largest[difference.quantity] = difference
    return list(largest.values())


def _notes(config: PretrainedConfig, batch: Batch) -> tuple[str, ...]:
    window = getattr(text_config(config), "sliding_window", None)
    kinds = getattr(text_config(config), "layer_types", None)
    if window and (kinds is None or "sliding_attention" in kinds) and batch.plan.longest_row <= window:
        return (
            f"no row reaches beyond the sliding window of {window} tokens (longest: {batch.plan.longest_row}); "
            "a larger --prompt does",
        )
    return ()
