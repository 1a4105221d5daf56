"""One decoder layer of a checkpoint as a model of its own, in the memory of one layer.

The model is the checkpoint's own class with a config of a single layer, and Hugging Face's loader fills it, from a
state dict that holds this layer's tensors alone, under the name of the first layer. So whatever the loader does on the
way, such as stacking the weights of experts, stays its job.
"""

from __future__ import annotations

import copy
import json
import re
from collections import defaultdict
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from zorro_verl.checkpoint import filled, one_line, quiet_loading
from zorro_verl.families import text_config
from zorro_verl.verify_request import local_folder

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
# Other modules have layers and norms too: vision towers, heads for several tokens (`mtp.layers.0`).
_LAYER = re.compile(r"^((?:model\.|language_model\.)*layers\.)(\d+)(\..*)$")
_ENDS = re.compile(r"^(?:model\.|language_model\.)*(?:embed_tokens|norm|lm_head)\.")


class LayeredCheckpoint:
    """A checkpoint whose layers are loaded one at a time.

    Args:
        name: a folder or a hub name.
        config: its config.
        whole: the whole model without weights, on the meta device.
        dtype: of the loaded layers.
        device: of the loaded layers.

    Raises:
        ValueError: the checkpoint has no safetensors files, or they can't be read.
    """

    def __init__(self, name: str, config: PretrainedConfig, whole: PreTrainedModel, dtype: torch.dtype, device: str):
        self.config, self.whole, self.dtype, self.device = config, whole, dtype, device
        self.files = _files_of(name)
        self.num_layers = text_config(config).num_hidden_layers

    def load(self, layer: int, with_ends: bool) -> PreTrainedModel:
        """The model of one layer, with embeddings, norm and head, or with a vocabulary of one random word instead.

        Raises:
            ValueError: the checkpoint lacks some of its tensors, or the layer is another one when it stands alone.
        """
        wanted = _LAYER if not with_ends else re.compile(f"{_LAYER.pattern}|{_ENDS.pattern}")
        model = filled(
            type(self.whole),
            None,
            wanted=lambda name: wanted.match(name) is not None,
            shown=lambda name: name.replace("layers.0.", f"layers.{layer}."),
            config=one_layer_config(self.config, layer, with_ends),
            state_dict=self._read(layer, with_ends),
            dtype=self.dtype,
        )
        alone, inside = (_shapes(m.get_decoder().layers[i]) for m, i in ((model, 0), (self.whole, layer)))
        if alone != inside:
            name = min(alone.items() ^ inside.items())[0]
            raise ValueError(f"layer {layer}: {name} differs when the layer stands alone; compare the model as --whole")
        return model.to(self.device)

    def _read(self, layer: int, with_ends: bool) -> dict[str, Tensor]:
        tensors = {}
        for file, keys in self.files.items():
            renamed = {key: new for key in keys if (new := _renamed(key, layer, with_ends)) is not None}
            if renamed:
                with one_line(f"{file} can't be read"), safe_open(file, framework="pt") as opened:
                    tensors |= {new: opened.get_tensor(key) for key, new in renamed.items()}
        return tensors


def _renamed(key: str, layer: int, with_ends: bool) -> str | None:
    """The name of a tensor in a model of that layer alone; None when it is no part of it."""
    if found := _LAYER.match(key):
        return f"{found[1]}0{found[3]}" if int(found[2]) == layer else None
    return key if with_ends and _ENDS.match(key) else None


def _files_of(name: str) -> dict[Path, list[str]]:
    folder = local_folder(name)
    if folder is None:
        with quiet_loading(), one_line(f"{name!r} can't be downloaded"):
            folder = Path(snapshot_download(name, allow_patterns=[SINGLE, INDEX, "*.safetensors"]))
    files: dict[Path, list[str]] = defaultdict(list)
    if (folder / INDEX).is_file():
        with one_line(f"{folder / INDEX} can't be read"):
            for key, file in json.loads((folder / INDEX).read_text())["weight_map"].items():
                files[folder / file].append(key)
    elif (folder / SINGLE).is_file():
        with one_line(f"{folder / SINGLE} can't be read"), safe_open(folder / SINGLE, framework="pt") as opened:
            files[folder / SINGLE] = list(opened.keys())
    else:
        others = sorted(path.name for path in folder.glob("pytorch_model*.bin"))
        found = f"{others[0]}, which is read by --whole only" if others else "no weights"
        raise ValueError(f"model: expected {SINGLE} or {INDEX} in {folder}, got {found}")
    return dict(files)


def one_layer_config(config: PretrainedConfig, layer: int, with_ends: bool) -> PretrainedConfig:
    """The config of a model that consists of one layer of another one."""
    config = copy.deepcopy(config)
    text = text_config(config)
    num_layers = text.num_hidden_layers
    dense = getattr(text, "mlp_only_layers", None)
    if dense is not None:  # indices, and every so-many-th layer
        sparse = layer not in dense and (layer + 1) % text.decoder_sparse_step == 0
        text.mlp_only_layers, text.decoder_sparse_step = [] if sparse else [0], 1
    for name, value in vars(text).items():  # what has one entry a layer
        if isinstance(value, list) and len(value) == num_layers and name != "mlp_only_layers":
            setattr(text, name, [value[layer]])
    text.num_hidden_layers = 1
    if not with_ends:
        text.vocab_size, text.pad_token_id = 1, None
    vision = getattr(config, "vision_config", None)
    if hasattr(vision, "depth"):
        vision.depth = 0
    return config


def _shapes(layer: nn.Module) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in layer.named_parameters()}
