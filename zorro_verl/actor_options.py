"""What verl's configs ask of an engine: options that are refused, and those that are read in one process."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import fields, replace
from numbers import Real
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from verl.workers.config import FSDPActorConfig, FSDPOptimizerConfig, OptimizerConfig

from zorro_verl.families import text_config
from zorro_verl.options import ZorroOptions

# Of verl's model, engine and actor config: what sharing would get wrong or leave without effect. Not here is
# entropy_checkpointing: the entropy keeps nothing for its backward in any case.
UNSUPPORTED = (
    ("use_prefix_grouper", False, "prompts are shared without it"),
    ("use_liger", False, "it is not tested with shared prompts"),
    ("qat.enable", False, "use strategy=fsdp2"),
    ("router_replay.mode", "disabled", "verl replays routes with other engines than FSDP only"),
)
# What a whole engine has, and one process with a plain model has not.
ENGINE_ONLY = (
    ("ulysses_sequence_parallel_size", 1, "there is one process"),
    ("pad_to_length", False, "packed lengths are as they are"),
    ("use_fused_kernels", False, "use logits_optimization=memory, which keeps no logits either"),
    ("calculate_sum_pi_squared", False, "compute_log_prob has log-probs and entropies only"),
)
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_options(config: Any, place: str, unsupported: Sequence[tuple[str, Any, str]] = UNSUPPORTED) -> None:
    """Refuse a config that sets one of ``unsupported``; ``place`` is where it stands, for the error."""
    for name, expected, instead in unsupported:
        value = config
        for part in name.split("."):
            value = getattr(value, part, None)
        if value is not None and value != expected:
            raise ValueError(f"{place}.{name}: expected {expected}, got {value}; {instead}")


def check_offload(model_config: Any, hf_config: Any, place: str) -> None:
    """Refuse an offload of activations that would give wrong gradients, the way that verl does it.

    It takes different views of an offloaded tensor for the same one, which only the inputs of whole layers survive. And
    it runs a checkpointed layer again without the layer's hooks, which lead linear attention along the plan.
    """
    if not model_config.enable_activation_offload:
        return
    name = f"{place}.enable_activation_offload"
    if not model_config.enable_gradient_checkpointing:
        raise ValueError(f"{name}: expected with enable_gradient_checkpointing=True, got it without")
    if "linear_attention" in (getattr(text_config(hf_config), "layer_types", None) or ()):
        raise ValueError(f"{name}: expected False for {hf_config.model_type}, which has linear attention, got True")


def engine_options(engine_config: Any, model_config: Any) -> ZorroOptions:
    """The options of an engine: what its config brings along, and what verl's own flags ask for."""
    options = with_chunking(getattr(engine_config, "zorro", None) or ZorroOptions(), engine_config)
    if model_config.use_fused_kernels:  # no logits are kept, which is what "memory" does
        return replace(options, logits_optimization="memory")
    return options


def with_chunking(options: ZorroOptions, *configs: Any) -> ZorroOptions:
    """verl's flag for an entropy in chunks asks for what "compute" does."""
    asked = any(getattr(config, "entropy_from_logits_with_chunking", False) for config in configs)
    if asked and options.logits_optimization == "none":
        return replace(options, logits_optimization="compute")
    return options


def resolve_options(options: ZorroOptions, config: FSDPActorConfig) -> ZorroOptions:
    """The constructor's options beside those of an ``actor_config``, which can only say the same.

    Raises:
        ValueError: an option that differs from ``actor_config.zorro``, one of `UNSUPPORTED`, or of `ENGINE_ONLY`.
    """
    check_options(config, "actor_config", UNSUPPORTED + ENGINE_ONLY)
    check_options(config.fsdp_config, "actor_config.fsdp_config", UNSUPPORTED + ENGINE_ONLY)
    given = getattr(config, "zorro", options)
    for name in ("attn_implementation", "use_split_attention", "logits_optimization"):
        theirs, ours = getattr(given, name), getattr(options, name)
        if theirs != ours:
            raise ValueError(
                f"{name}: expected {theirs!r} as in actor_config.zorro, got {ours!r}; give both the same value"
            )
    # The constructor has no argument for it: the config alone says.
    options = replace(options, linear_attention=given.linear_attention)
    return with_chunking(options, config, config.fsdp_config)


def resolve_dtype(dtype: torch.dtype | str | None) -> torch.dtype | str:
    """A dtype or its name, as ``from_pretrained`` takes it; "auto" for None."""
    if dtype is None:
        return "auto"
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or found not in DTYPES:
        raise ValueError(f"dtype: expected one of {', '.join(map(str, DTYPES))} or its name, got {dtype!r}")
    return found


def resolve_device(device: torch.device | str) -> torch.device:
    """The device, when it is there."""
    try:
        there = torch.empty(0, device=torch.device(device)).device
    except (RuntimeError, AssertionError, TypeError) as error:  # torch has another for each way of not being there
        reason = str(error).splitlines()[0]
        raise ValueError(f"device: expected one that is there, got {device!r} ({reason}); use device='cpu'") from error
    if there.type == "meta":
        raise ValueError("device: expected one that computes, got 'meta'; use device='cpu' or 'cuda'")
    return there


def max_norm(config: FSDPActorConfig) -> float:
    """verl's engine clips at ``optim.clip_grad``, its older actor did at ``grad_clip``: whichever differs from 1."""
    norms = {"optim.clip_grad": config.optim.clip_grad, "grad_clip": config.get("grad_clip", 1.0)}
    for name, norm in norms.items():
        if not isinstance(norm, Real) or isinstance(norm, bool) or not norm > 0:
            raise ValueError(f"{name}: expected a number above 0, got {norm!r}; set it in actor_config")
    asked = {norm for norm in norms.values() if norm != 1.0}
    if len(asked) > 1:
        raise ValueError(
            f"grad_clip: expected the value of optim.clip_grad, {config.optim.clip_grad}, got {config.grad_clip}; "
            "set one of the two in actor_config"
        )
    return asked.pop() if asked else 1.0


def fsdp_options(optim: OptimizerConfig) -> FSDPOptimizerConfig:
    """verl's dataclass holds the base class unless told otherwise, and its builder reads fields of the derived one."""
    if isinstance(optim, FSDPOptimizerConfig):
        return optim
    return FSDPOptimizerConfig(**{field.name: getattr(optim, field.name) for field in fields(OptimizerConfig)})


def check_optimizer(optimizer: Optimizer, lr_scheduler: LRScheduler | None, module: nn.Module) -> None:
    """Refuse an optimizer that would move nothing of ``module``, and a scheduler that waits for a metric."""
    held = {id(p) for group in getattr(optimizer, "param_groups", ()) for p in group["params"]}
    if not any(id(p) in held for p in module.parameters() if p.requires_grad):
        raise ValueError(
            "optimizer: expected one over parameters of actor.model that require a gradient, got "
            f"{getattr(optimizer, '__name__', type(optimizer).__name__)} over none of them; build it from "
            "actor.model.parameters()"
        )
    if isinstance(lr_scheduler, ReduceLROnPlateau) and lr_scheduler.optimizer is optimizer:
        raise ValueError(
            "lr_scheduler: expected one that steps without a metric, got ReduceLROnPlateau; step it yourself and leave "
            "actor.lr_scheduler None"
        )


def advance(lr_scheduler: LRScheduler | None, optimizer: Optimizer) -> None:
    """A step of the schedule, if it is this optimizer's; also when all of the optimizer's were skipped, as in verl."""
    if getattr(lr_scheduler, "optimizer", None) is optimizer:
        with warnings.catch_warnings():  # torch takes a schedule ahead of a skipped step for a mistake
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
            lr_scheduler.step()
