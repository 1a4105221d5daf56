"""The CPU as verl's "device module": `torch.cpu`, and what verl calls on `torch.cuda` besides."""

import torch
from torch.cpu import *  # noqa: F403
from torch.cpu import synchronize as synchronize

get_rng_state = torch.get_rng_state
set_rng_state = torch.set_rng_state
manual_seed = torch.manual_seed
manual_seed_all = torch.manual_seed


def is_available() -> bool:
    """False: verl reads it as "is there an accelerator whose memory can be measured or freed"."""
    return False


def get_device_name(device=None) -> str:
    """The key of verl's table of peak FLOP/s."""
    return "CPU"


def empty_cache() -> None: ...


def ipc_collect() -> None: ...


def reset_peak_memory_stats(device=None) -> None: ...


def memory_allocated(device=None) -> int:
    return 0


def memory_reserved(device=None) -> int:
    return 0


def max_memory_allocated(device=None) -> int:
    return 0


def max_memory_reserved(device=None) -> int:
    return 0


def mem_get_info(device=None) -> tuple[int, int]:
    return 0, 0
