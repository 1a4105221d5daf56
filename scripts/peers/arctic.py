"""Contestant: `arctic-platform`, the published package, through its patcher of a whole Qwen3 model.

Its sdpa path keeps the masks of the first batch that a patched model sees, so a model is patched for each batch and the
masks are warm when time is taken. Its flash path, the one for production, runs here with an emulated kernel.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from peers.batch import Batch
from torch import Tensor, nn

PACKAGES = ("transformers", "arctic-platform", "deepspeed", "triton")
# Their __init__ modules import a server, with ray and vllm; the trainer's modules need none of that.
PARENTS = ("rl", "rl/utils")


class Contestant:
    attention = "sdpa"

    def __init__(self, model: nn.Module, batch: Batch):
        enter_parents()
        from arctic_platform.rl.zorro_train.qwen_model_patcher import Qwen3ModelOncePatcher

        self.model, self.batch = model, batch
        model.config._attn_implementation = self.attention
        Qwen3ModelOncePatcher(
            model,
            response_len=int(batch.response_length),
            max_token_len=batch.input_ids.numel(),
            rollout_n=int(batch.row_counts[0]),
            temperature=1.0,
            logits_optimization="none",
            world_size=1,
            use_unpad=True,
            use_split_attention=True,
        ).patch_forward()

    def log_probs(self) -> Tensor:
        """Of every response token, row by row."""
        batch = self.batch
        return self.model(
            input_ids=batch.input_ids,
            attention_mask=batch.attention_mask,
            position_ids=batch.position_ids,
            calculate_entropy=False,
            use_cache=False,
        )["logprobs"]


class EmulatedFlash(Contestant):
    def __init__(self, model: nn.Module, batch: Batch):
        from peers import varlen_emulation

        varlen_emulation.register()
        self.attention = varlen_emulation.NAME
        super().__init__(model, batch)


def enter_parents() -> None:
    """Give Python the packages around the trainer without what their own __init__ modules import."""
    (root,) = find_spec("arctic_platform").submodule_search_locations
    for parent in PARENTS:
        name = ".".join(("arctic_platform", *parent.split("/")))
        if name not in sys.modules:
            package = ModuleType(name)
            package.__path__ = [str(Path(root, parent))]
            sys.modules[name] = package
