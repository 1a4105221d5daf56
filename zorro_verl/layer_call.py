"""What a layer of an installed model sees of a call: its attention by the plan, and a config that asks for it."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig

from zorro_verl.attention import plan_attention, prepare_attention
from zorro_verl.families import window_of
from zorro_verl.linear_attention import LinearPlan
from zorro_verl.packing import Plan
from zorro_verl.sequence_parallel import Slices
from zorro_verl.varlen import Kernels

ATTENTION_NAME = "zorro"


class SharedCall:
    """What every layer of a call with a plan gets as ``zorro=``: how attention and linear attention run.

    A plain class, since it passes through FSDP2 (see `zorro_verl.packing.Plan`).

    Attributes:
        plan, kernels, split: see `SeamForward`.
        linear: what linear layers follow; None where the model has none.
        tokens: how the packed row lies over ranks.

    Args:
        windows: those of the layers, for which everything is built here: a layer only reads.
    """

    __slots__ = ("plan", "kernels", "split", "linear", "tokens")

    def __init__(
        self,
        plan: Plan,
        kernels: Kernels | None,
        split: bool,
        linear: LinearPlan | None = None,
        tokens: Slices | None = None,
        windows: Iterable[int | None] = (None,),
    ):
        self.plan, self.kernels, self.split, self.linear = plan, kernels, split, linear
        self.tokens = tokens or Slices(plan.num_tokens)
        prepare_attention(plan, kernels, split, windows)

    def attention(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        """Attention of one layer, called as transformers calls a registered function."""
        for name in _UNKNOWN_TO_KERNELS & others.keys():
            if others[name] is not None and not (isinstance(others[name], float) and others[name] == 0):
                raise ValueError(f"{name}: expected none, got it from {type(module).__name__}; use the plain model")
        window = window_of(module.config, module.layer_idx)
        check_layer_window(module, others.get("sliding_window"), window)
        # Under autocast a normalisation may hand over float32 queries and keys beside bfloat16 values.
        q, k, v = (x.squeeze(0).transpose(0, 1).to(value.dtype) for x in (query, key, value))
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        q, k, v = self.tokens.to_heads(q, k, v)
        out = plan_attention(q, k, v, self.plan, scale, self.kernels, self.split, window)
        return self.tokens.to_tokens(out)[None], None


# What some layers hand to their attention, and no kernel here computes.
_UNKNOWN_TO_KERNELS = frozenset(("softcap", "s_aux", "dropout"))


def check_layer_window(layer: nn.Module, handed: int | None, window: int | None) -> None:
    """Refuse a layer that has another window than the masks of its model, which are made from the config in each call.

    Layers keep the window that they were built with, if they keep one, and most hand it to their attention; which of
    the two holds in the plain model would depend on its attention.
    """
    own = handed if handed is not None else getattr(layer, "sliding_window", window)
    if (own or None) != window:
        raise ValueError(
            f"sliding_window: expected {own} in the config, as in its layer {layer.layer_idx}, got {window}; build the "
            "model anew with the window, and the layer_types, that it is to have"
        )


def zorro_attention(module, query, key, value, attention_mask, zorro=None, **kwargs):
    """The attention function registered with transformers: by the plan, or in a call without one the model's own."""
    if zorro is not None:
        return zorro.attention(module, query, key, value, **kwargs)
    if attention_mask is not None and attention_mask.numel() == 0:
        raise ValueError(
            f"{type(module).__name__}: expected the plan of a packed row as the keyword argument zorro=, got none; a "
            "forward on the way here does not hand its keyword arguments on"
        )
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    function = AttentionInterface().get_interface(module.config.stock_config._attn_implementation, eager)
    return function(module, query, key, value, attention_mask, **kwargs)


AttentionInterface.register(ATTENTION_NAME, zorro_attention)


def no_mask(like: Tensor) -> Tensor:
    """The mask of a packed row: none is needed, and one of four dimensions keeps transformers from making it.

    It is empty, so that an attention which does look at it fails.
    """
    return torch.empty((1, 1, 0, 0), dtype=torch.bool, device=like.device)


class LayerConfig:
    """A layer's view of its model's config: all that it says, now and later, but for the attention, the seam's.

    Layers read some settings when they are built and some, such as ``sliding_window``, in every call.
    """

    _attn_implementation = ATTENTION_NAME

    def __init__(self, stock_config: PretrainedConfig):
        self.stock_config = stock_config

    def __getattr__(self, name: str) -> Any:
        if name == "stock_config" or name.startswith("__"):  # copy and pickle ask before there is one
            raise AttributeError(name)
        return getattr(self.stock_config, name)


def led_config(config: PretrainedConfig | LayerConfig) -> LayerConfig:
    """What layers read instead of ``config`` while a seam leads them."""
    return LayerConfig(getattr(config, "stock_config", config))
