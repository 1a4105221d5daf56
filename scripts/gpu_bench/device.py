"""Seconds and bytes of a run on the device at hand: CUDA events and the allocator's peak, or the host's clock."""

from __future__ import annotations

import gc
import subprocess
from collections.abc import Callable
from dataclasses import dataclass

import torch

from zorro_verl.measuring import Timing, cuda_stopwatch, hardware, peak_allocated, stopwatch


@dataclass(frozen=True)
class Device:
    """Where the benchmark runs.

    Attributes:
        type: "cuda" or "cpu".
    """

    type: str

    @property
    def is_cuda(self) -> bool:
        return self.type == "cuda"

    def watch(self, step: Callable[[], object]) -> Timing:
        """One run. On CUDA both numbers are the GPU's, from the first kernel's start to the last one's end."""
        return cuda_stopwatch(step) if self.is_cuda else stopwatch(step)

    def peak(self, step: Callable[[], object]) -> int | None:
        """Most bytes allocated during a run above those at its start; None on a CPU, whose allocator counts none."""
        if self.is_cuda:
            return peak_allocated(step)
        step()
        return None

    def free(self) -> int | None:
        """Bytes that tensors could still take up: the driver's, and the cache's unused ones; None on a CPU."""
        if not self.is_cuda:
            return None
        return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()

    def collect(self) -> None:
        """Free what nobody refers to any more, into the allocator's cache; nothing to gain from that on a CPU."""
        if self.is_cuda:
            gc.collect()

    def clear(self) -> None:
        """The same, and give the cache back to the driver. What runs next has to ask for its memory again."""
        if self.is_cuda:
            self.collect()
            torch.cuda.empty_cache()

    def describe(self) -> dict[str, str]:
        """What the hardware is, for the report."""
        if not self.is_cuda:
            return {"hardware": hardware()}
        return {
            "hardware": hardware(self.type),
            "cuda": f"{torch.version.cuda}, driver, clocks and power limit: {_nvidia_smi()}",
        }


def _nvidia_smi() -> str:
    query = "--query-gpu=driver_version,clocks.sm,clocks.max.sm,power.limit"
    try:
        found = subprocess.run(
            ["nvidia-smi", query, "--format=csv,noheader"], capture_output=True, text=True, timeout=20
        )
    except (FileNotFoundError, subprocess.TimeoutExpired) as error:
        return f"unknown ({type(error).__name__})"
    return found.stdout.strip().partition("\n")[0] or "unknown"
