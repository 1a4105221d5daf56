"""What computes on this machine: its devices, the kernels that are here, and the attention that a run will use."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING

from zorro_verl.findings import Findings, described, in_one_line
from zorro_verl.installation import examine_optional, recorded_version, requirement_of

if TYPE_CHECKING:
    from zorro_verl.flash_kernels import FlashKernels

CUDA_DEVICE_FILE = Path("/dev/nvidia0")


def examine_devices(findings: Findings) -> None:
    """What torch was built for, and what it sees."""
    if findings.hinders("torch"):
        return
    import torch

    build = (
        f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}" * bool(torch.version.hip)
    )
    findings.fact("machine", "torch is built for", build or "CPUs only")
    devices = [_shown(torch.cuda.get_device_properties(i)) for i in range(torch.cuda.device_count())]
    findings.fact("machine", "GPUs that torch sees", "; ".join(devices) or None)
    _examine_choice(bool(devices), findings)
    if device_type() != "cpu":
        return
    if CUDA_DEVICE_FILE.exists():
        findings.note(
            f"torch sees no GPU though {CUDA_DEVICE_FILE} is there: this torch is built for {build or 'CPUs only'}, "
            "which may be another CUDA than the driver's"
        )
    findings.note(
        "no accelerator here: what is said of attention is for this machine's CPU, where training takes "
        "trainer.device=cpu; run doctor again where the GPUs are"
    )


def _examine_choice(has_gpus: bool, findings: Findings) -> None:
    """The device that veRL would take."""
    if findings.hinders("verl"):
        return
    choice = importlib.import_module("verl.utils.device").get_device_name()
    doubt = ", its default where it finds no accelerator" if choice == "cuda" and not has_gpus else ""
    findings.fact("machine", "device that veRL takes", choice + doubt)


def device_type() -> str:
    """What a run would compute on here: "cuda", "npu" or "cpu"."""
    import torch

    from zorro_verl.plugin import chosen_platform

    if chosen_platform() == "cpu":
        return "cpu"
    if torch.cuda.is_available():
        return "cuda"
    return "npu" if hasattr(torch, "npu") and torch.npu.is_available() else "cpu"


def examine_kernels(findings: Findings) -> None:
    """Every kernel that this package can use, whether it does here or not."""
    if not findings.hinders("torch"):
        from zorro_verl.attention_kernels import PACKAGES
        from zorro_verl.flash_kernels import TorchVarlenKernels

        _examine_flash(TorchVarlenKernels, "torch's varlen flash attention", "torch", findings)
        for kernels in PACKAGES:
            _examine_flash(kernels, kernels.name, kernels.package, findings)
    examine_optional(findings)


def _examine_flash(kernels: type[FlashKernels], name: str, package: str, findings: Findings) -> None:
    """A package is there when its functions are, under the names that the adapter knows."""
    version = recorded_version(package) or "unknown version"
    try:
        kernels()
    except ValueError as error:
        absent = isinstance(error.__cause__, ModuleNotFoundError)
        findings.fact("kernels", name, None if absent else f"{version}, which can't be used", requirement_of(package))
        if not absent:
            findings.note(str(error))
    except Exception as error:  # a binary for another torch, and whatever else an import may raise
        findings.fact("kernels", name, f"{version}, which can't be imported", requirement_of(package))
        findings.note(f"{name}: its import fails ({described(error)}); {kernels.install}")
    else:
        findings.fact("kernels", name, version, requirement_of(package))


def examine_attention(findings: Findings) -> None:
    """What ``attn_implementation=auto`` runs on here, and what computes Gated DeltaNet."""
    if findings.hinders("torch"):
        findings.fact("machine", "attention (auto)", "not examined, see the problems with torch")
        return
    from zorro_verl.attention_kernels import resolve_kernels

    device = device_type()
    try:
        kernels = resolve_kernels("auto", device)
    except ValueError as error:
        findings.fact("machine", "attention (auto)", None)
        findings.problem(
            "attention",
            f"attention: {error}, by +actor_rollout_ref.actor.zorro.attn_implementation=NAME",
        )
        return
    if kernels is None:
        findings.fact("machine", "attention (auto)", f"eager on {device}: the dense reference, slow and large")
    else:
        findings.fact("machine", "attention (auto)", f"{kernels.name} on {device}: torch's own flash attention")
    if device == "cuda":
        _examine_merge(findings)
    if not findings.hinders("transformers"):
        _examine_linear(device, findings)


def _examine_merge(findings: Findings) -> None:
    """Outputs of two calls become one by a Triton kernel on CUDA, or by torch ops where triton is not installed."""
    try:
        importlib.import_module("zorro_verl.triton_merge")
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        findings.note("without triton torch ops merge attention, slower; pip install 'zorro-verl[triton]'")


def _examine_linear(device: str, findings: Findings) -> None:
    """transformers takes flash-linear-attention and causal-conv1d where they are, and CUDA is."""
    from transformers.utils.import_utils import is_causal_conv1d_available, is_flash_linear_attention_available

    fast, conv = is_flash_linear_attention_available(), is_causal_conv1d_available()
    rule = "flash-linear-attention" if fast else "transformers' rule in torch ops"
    findings.fact(
        "machine",
        "linear attention, if a model has it",
        f"{rule}, {'causal-conv1d' if conv else 'torch'} convolution",
    )
    if device == "cuda" and not fast:
        findings.note(
            "models with linear attention run it in torch ops, with a launch for each chunk of 64 tokens and step; "
            "pip install 'zorro-verl[fla]'"
        )


def _shown(properties: object) -> str:
    name, major, minor, memory = (getattr(properties, x) for x in ("name", "major", "minor", "total_memory"))
    return in_one_line(f"{name} (compute capability {major}.{minor}, {memory / 2**30:.0f} GiB)")
