"""The attention that a user names, as the kernels that run it on a device."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from zorro_verl.varlen import CpuKernels, FlashAttention2Kernels, Kernels, TorchVarlenKernels

ATTENTION_IMPLEMENTATIONS = ("auto", "eager", "sdpa", "flash_attention_2", "flash_attention_3")


def resolve_kernels(attn_implementation: str, device: str) -> Kernels | None:
    """The kernels behind an attention name on a device type; None is the dense reference.

    "auto" is "sdpa" on a CPU and on CUDA, "eager" elsewhere (npu). "sdpa" is torch's own flash attention on both.

    Raises:
        ValueError: an unknown name, or one that can't run here, with what would have to be installed.
    """
    if attn_implementation not in ATTENTION_IMPLEMENTATIONS:
        raise ValueError(
            f"attn_implementation: expected one of {ATTENTION_IMPLEMENTATIONS}, got {attn_implementation!r}"
        )
    if attn_implementation == "auto":
        attn_implementation = "sdpa" if device in ("cpu", "cuda", "meta") else "eager"
    if attn_implementation == "eager":
        return None
    if attn_implementation == "sdpa":
        if device not in ("cpu", "cuda", "meta"):
            raise ValueError(f"attn_implementation=sdpa: expected a cpu or cuda device, got {device}; use eager")
        return _SdpaKernels()
    if attn_implementation == "flash_attention_3":
        raise ValueError(
            "attn_implementation=flash_attention_3: this version has no adapter for it; use sdpa, or "
            "flash_attention_2 with flash-attn installed"
        )
    if device != "cuda":
        raise ValueError(f"attn_implementation={attn_implementation}: needs a cuda device, got {device}; use sdpa")
    if importlib.util.find_spec("flash_attn") is None:
        raise ValueError("attn_implementation=flash_attention_2: flash-attn is missing, `pip install flash-attn`")
    return FlashAttention2Kernels()


class _SdpaKernels:
    """torch's own flash attention, chosen by where the tensors are: a model may move after it was installed."""

    def forward(self, q, k, v, call, scale):
        return self._on(q).forward(q, k, v, call, scale)

    def backward(self, grad, q, k, v, out, lse, call, scale):
        return self._on(q).backward(grad, q, k, v, out, lse, call, scale)

    def _on(self, q: Tensor) -> Kernels:
        if q.device.type == "cpu":
            return CpuKernels()
        if q.dtype not in (torch.float16, torch.bfloat16):
            raise ValueError(
                f"attn_implementation=sdpa: expected float16 or bfloat16 on {q.device.type}, got {q.dtype}; "
                "use attn_implementation=eager or a bfloat16 model"
            )
        return TorchVarlenKernels()
