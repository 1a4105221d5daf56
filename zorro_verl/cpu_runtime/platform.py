"""verl's platform "cpu": gloo, and logical Ray slots in place of accelerators."""

from contextlib import nullcontext

import torch
from verl.plugin.platform import PlatformBase

from zorro_verl.cpu_runtime import device_module


class CpuPlatform(PlatformBase):
    """Never detected, only chosen: `trainer.device=cpu` or `VERL_PLATFORM=cpu`.

    verl counts and places its workers by Ray's "GPU" resource. That is a number which `ray.init(num_gpus=...)` declares
    and which needs no hardware: one slot stands for one worker process.
    """

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = device_module

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return False

    def current_device(self) -> str:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None: ...

    def synchronize(self, device_index: int | None = None) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    def nvtx_range(self, msg: str):
        return nullcontext()

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None: ...
