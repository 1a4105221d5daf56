"""verl's own FSDP2 engine on the CPU: registration, and the three calls around it that assume an accelerator."""

from collections.abc import Callable
from types import ModuleType

from torch.distributed.fsdp import CPUOffloadPolicy
from transformers import AutoModelForTokenClassification

from zorro_verl.refusal import refusing_engine
from zorro_verl.wrapping import wrap_once

FSDP1_REFUSAL = (
    "strategy=fsdp (FSDP1) does not run on a CPU: verl builds it with sync_module_states=True, which torch allows for "
    "accelerators only"
)


class PageableOffloadPolicy(CPUOffloadPolicy):
    """verl asks for pinned memory for the reference policy; pinning needs an accelerator."""

    def __init__(self, pin_memory: bool = False):
        super().__init__(pin_memory=False)


def register_stock_engines(engine: ModuleType) -> None:
    """Register verl's FSDP engines for the device "cpu": `fsdp2` as it is, `fsdp` as a refusal that names `fsdp2`."""
    from verl.workers.engine.fsdp import transformer_impl

    transformer_impl.CPUOffloadPolicy = PageableOffloadPolicy
    engines = {
        "language_model": transformer_impl.FSDPEngineWithLMHead,
        "value_model": transformer_impl.FSDPEngineWithValueHead,
    }
    refusal = refusing_engine(
        engine.BaseEngine,
        f"{FSDP1_REFUSAL}; set actor_rollout_ref.actor.strategy=fsdp2, for a critic critic.strategy=fsdp2",
    )
    for model_type, engine_class in engines.items():
        backends = engine.EngineRegistry._engines[model_type]
        for backend, registered in (("fsdp2", engine_class), ("fsdp", refusal)):
            if "cpu" not in backends[backend]:
                engine.EngineRegistry.register(model_type, backend, device="cpu")(registered)


def load_value_head_as_configured(model_utils: ModuleType) -> None:
    """Load a critic with the attention of its config: verl asks for flash_attention_2, which has no CPU kernel."""

    def load_valuehead_model(local_path, torch_dtype, model_config, trust_remote_code):
        return AutoModelForTokenClassification.from_pretrained(
            local_path,
            dtype=torch_dtype,
            config=model_config,
            attn_implementation=model_config._attn_implementation,
            trust_remote_code=trust_remote_code,
        )

    model_utils.load_valuehead_model = load_valuehead_model


def use_gloo_once(distributed: ModuleType) -> None:
    """Give verl's process group the backend that it would compose wrongly where the device is the CPU itself."""
    wrap_once(distributed, "initialize_global_process_group_ray", _over_gloo)


def _over_gloo(original: Callable) -> Callable:
    def initialize_global_process_group_ray(timeout_second=None, backend=None):
        return original(timeout_second, backend or "cpu:gloo")

    return initialize_global_process_group_ray
