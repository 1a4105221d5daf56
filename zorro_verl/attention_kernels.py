"""The attention that a user names, as the kernels that run it on a device."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from zorro_verl.flash_kernels import (
    FlashAttention2Kernels,
    FlashAttention3Kernels,
    FlashAttention4Kernels,
    FlashKernels,
    TorchVarlenKernels,
)
from zorro_verl.varlen import CpuKernels, Kernels

PACKAGES = (FlashAttention2Kernels, FlashAttention3Kernels, FlashAttention4Kernels)
ATTENTION_IMPLEMENTATIONS = ("auto", "eager", "sdpa", *(kernels.name for kernels in PACKAGES))


@functools.cache  # a package is looked at once; the kernels hold no state
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
        if device == "cuda":
            _check_architecture(TorchVarlenKernels)
        return _SdpaKernels()
    if device != "cuda":
        raise ValueError(f"attn_implementation={attn_implementation}: needs a cuda device, got {device}; use sdpa")
    (package,) = (kernels for kernels in PACKAGES if kernels.name == attn_implementation)
    _check_architecture(package)
    return package()


class _SdpaKernels:
    """torch's own flash attention, chosen by where the tensors are: a model may move after it was installed."""

    name = "sdpa"

    def __init__(self):
        self._cpu, self._other = CpuKernels(), TorchVarlenKernels()

    def arrange(self, q, k, v):
        return self._on(q).arrange(q, k, v)

    def forward(self, q, k, v, call, scale):
        return self._on(q).forward(q, k, v, call, scale)

    def backward(self, grad, q, k, v, out, lse, call, scale):
        return self._on(q).backward(grad, q, k, v, out, lse, call, scale)

    def _on(self, q: Tensor) -> Kernels:
        return self._cpu if q.device.type == "cpu" else self._other


def _check_architecture(kernels: type[FlashKernels]) -> None:
    if not torch.cuda.is_available():  # torch says so itself, as soon as something is put on the device
        return
    major, minor = torch.cuda.get_device_capability()
    if major < kernels.oldest or (kernels.newest is not None and major > kernels.newest):
        newest = "or later" if kernels.newest is None else f"to {kernels.newest}.x"
        raise ValueError(
            f"attn_implementation={kernels.name}: needs a GPU of compute capability {kernels.oldest}.x {newest}, "
            f"got {major}.{minor}; use {kernels.instead}"
        )
