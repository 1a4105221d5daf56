"""Makes one run of verl's RL trainer a CPU run: platform, Ray slots, and the few settings that have no CPU meaning.

Called in the driver with the whole config, before verl validates it and starts Ray. What is changed in the config is
logged at INFO; what the user has set is left alone or refused.
"""

import importlib
import logging
import os
import sys

from omegaconf import DictConfig, OmegaConf, open_dict

from zorro_verl.cpu_runtime import hooks
from zorro_verl.cpu_runtime.stock import FSDP1_REFUSAL

logger = logging.getLogger(__name__)

STRATEGIES = ("fsdp2", "zorro")
WEIGHTS_BACKEND = "gloo"


def prepare_run(config: DictConfig) -> None:
    """Check the run, choose the platform for this process and all workers, and fill in what has one value on a CPU."""
    _check_strategies(config)
    _check_weights_backend(config)
    choose_platform()
    with open_dict(config):
        config.trainer.device = "cpu"
        _describe_ray(config)
        for role in ("actor_rollout_ref", "critic"):
            _choose_attention(config, role)
        for key in ("actor_rollout_ref.actor.fsdp_config", "actor_rollout_ref.ref.fsdp_config", "critic.fsdp"):
            _switch_off_compilation(config, key)


def choose_platform() -> None:
    """Make this process a CPU process, although verl has looked for an accelerator while it was imported."""
    os.environ["VERL_PLATFORM"] = "cpu"
    hooks.install()
    platforms = importlib.import_module("verl.plugin.platform.platform_manager")
    if platforms.get_platform().device_name != "cpu":
        platforms.set_platform(platforms.PlatformRegistry.get("cpu")())
    # These keep the device's name from when they were imported.
    for name in ("verl.workers.engine.fsdp.transformer_impl", "verl.experimental.separation.engine_workers"):
        if name in sys.modules:
            sys.modules[name].device_name = "cpu"


def _check_strategies(config: DictConfig) -> None:
    from verl.trainer.ppo.utils import need_critic

    strategies = {"actor_rollout_ref.actor.strategy": config.actor_rollout_ref.actor.strategy}
    if need_critic(config):
        strategies["critic.strategy"] = config.critic.strategy
    for key, strategy in strategies.items():
        if strategy == "fsdp":
            raise ValueError(f"{key}: {FSDP1_REFUSAL}; set {key}=fsdp2")
        if strategy not in STRATEGIES:
            raise ValueError(f"{key} must be one of {STRATEGIES} with trainer.device=cpu, got {strategy}")


def _check_weights_backend(config: DictConfig) -> None:
    if not _has_own_rollouts(config):
        return
    engine = config.actor_rollout_ref.rollout.checkpoint_engine
    if engine.backend != WEIGHTS_BACKEND and not engine.custom_backend_module:
        raise ValueError(
            "with trainer.device=cpu and trainer.v1.trainer_mode=separate_async weights go from process to process: "
            f"actor_rollout_ref.rollout.checkpoint_engine.backend must be {WEIGHTS_BACKEND}, got {engine.backend}"
        )


def _has_own_rollouts(config: DictConfig) -> bool:
    """Whether rollout servers run beside the trainer's workers, in slots of their own."""
    return config.trainer.use_v1 and OmegaConf.select(config, "trainer.v1.trainer_mode") == "separate_async"


def _describe_ray(config: DictConfig) -> None:
    """Tell every worker on every node its platform, and a Ray that is started here its logical slots."""
    ray_init = config.ray_kwargs.ray_init
    OmegaConf.update(ray_init, "runtime_env.env_vars.VERL_PLATFORM", "cpu", force_add=True)
    slots = config.trainer.n_gpus_per_node
    if _joins_a_cluster(ray_init):
        logger.info(
            "trainer.device=cpu: each node of the Ray cluster needs %d logical slots (ray start --num-gpus)", slots
        )
        return
    if _has_own_rollouts(config):
        slots += config.actor_rollout_ref.rollout.nnodes * config.actor_rollout_ref.rollout.n_gpus_per_node
    if ray_init.get("num_gpus") is None:
        ray_init.num_gpus = slots
    if ray_init.get("num_cpus") is None:
        ray_init.num_cpus = _logical_cpus(config, slots)
    if ray_init.get("include_dashboard") is None:
        ray_init.include_dashboard = False
    logger.info(
        "trainer.device=cpu: Ray is started with num_gpus=%d logical slots and num_cpus=%d",
        ray_init.num_gpus,
        ray_init.num_cpus,
    )


def _joins_a_cluster(ray_init: DictConfig) -> bool:
    # `ray.init` refuses resources when it connects to a running cluster; this is how it decides.
    from ray._private.services import canonicalize_bootstrap_address

    return canonicalize_bootstrap_address(ray_init.get("address"), ray_init.get("_temp_dir")) is not None


def _logical_cpus(config: DictConfig, slots: int) -> int:
    """What verl's actors reserve: three a slot, one a storage unit, one each for the task runner and its controller."""
    storage_units = OmegaConf.select(config, "transfer_queue.backend.SimpleStorage.num_data_storage_units", default=0)
    return max(os.cpu_count() or 1, 3 * slots + storage_units + 4)


def _choose_attention(config: DictConfig, role: str) -> None:
    model = OmegaConf.select(config, f"{role}.model")
    if model is None:
        return
    override = model.get("override_config") or {}
    if "attn_implementation" in override.get("model_config", override):
        return
    # verl's implicit flash_attention_2 has no CPU kernel.
    OmegaConf.update(model, "override_config.attn_implementation", "sdpa", force_add=True)
    logger.info("trainer.device=cpu: %s.model.override_config.attn_implementation=sdpa", role)


def _switch_off_compilation(config: DictConfig, key: str) -> None:
    fsdp_config = OmegaConf.select(config, key)
    if fsdp_config is not None and fsdp_config.get("use_torch_compile"):
        # verl compiles the entropy by default: the same numbers, after a minute of a C++ compiler that may be missing.
        fsdp_config.use_torch_compile = False
        logger.info("trainer.device=cpu: %s.use_torch_compile=False", key)
