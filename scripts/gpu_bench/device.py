"""Seconds and bytes of a run on the device at hand: CUDA events and the allocator's peak, or the host's clock."""

from __future__ import annotations

import gc
import subprocess
from collections.abc import Callable
from dataclasses import dataclass

import torch
from measuring import Timing, hardware, stopwatch


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
        if not self.is_cuda:
            return stopwatch(step)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        step()
        end.record()
        end.synchronize()
        seconds = start.elapsed_time(end) / 1e3
        return Timing(seconds, seconds)

    def peak(self, step: Callable[[], object]) -> int | None:
        """Most bytes allocated during a run above those at its start; None on a CPU, whose allocator counts none."""
        if not self.is_cuda:
            step()
            return None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

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
        properties = torch.cuda.get_device_properties(0)
        return {
            "hardware": f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, "
            f"{properties.multi_processor_count} multiprocessors; {hardware()}",
            "cuda": f"{torch.version.cuda}, driver, clocks and power limit: {_nvidia_smi()}",
        }


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that the device's memory did not suffice, whoever raised it."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(
        text in str(error).lower() for text in ("out of memory", "cublas_status_alloc_failed")
    )


def _nvidia_smi() -> str:
    query = "--query-gpu=driver_version,clocks.sm,clocks.max.sm,power.limit"
    try:
        found = subprocess.run(
            ["nvidia-smi", query, "--format=csv,noheader"], capture_output=True, text=True, timeout=20
        )
    except (FileNotFoundError, subprocess.TimeoutExpired) as error:
        return f"unknown ({type(error).__name__})"
    return found.stdout.strip().partition("\n")[0] or "unknown"
