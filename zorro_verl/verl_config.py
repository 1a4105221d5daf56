"""A run's config: the dataclass behind the group ``zorro_actor``, and what is checked before verl starts Ray."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field, fields

from omegaconf import DictConfig, OmegaConf, open_dict
from transformers import AutoConfig, PretrainedConfig
from verl.trainer.distillation.losses import get_distillation_loss_settings
from verl.trainer.ppo.utils import need_critic
from verl.utils.model import update_model_config
from verl.workers.config import FSDPActorConfig, FSDPCriticConfig

from zorro_verl.actor_options import check_offload, check_options
from zorro_verl.distillation import check_teaching
from zorro_verl.families import check_supported, check_training, head_counts
from zorro_verl.options import CONFIG_KEY, ZorroOptions
from zorro_verl.sequence_parallel import check_heads
from zorro_verl.value_models import check_adapters, check_value_model, critic_keys

logger = logging.getLogger(__name__)


@dataclass
class ZorroActorConfig(FSDPActorConfig):
    """verl's FSDP actor config plus ``zorro``. verl hands an engine its engine config only, so the options go along."""

    strategy: str = "zorro"
    zorro: ZorroOptions = field(default_factory=ZorroOptions)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self.engine, "zorro", self.zorro)


@dataclass
class ZorroCriticConfig(FSDPCriticConfig):
    """verl's FSDP critic config plus the actor's ``zorro``."""

    strategy: str = "zorro"
    zorro: ZorroOptions = field(default_factory=ZorroOptions)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self.engine, "zorro", self.zorro)


def spread_options(config: DictConfig) -> None:
    """Make ``+actor.zorro.*`` work without the config group, and give reference policy and critic the same options.

    verl's own dataclasses of actor and critic take no ``zorro``, and its ``ref`` section has no place for any.

    Args:
        config: the run's whole config, changed in place before verl hands it to its workers.
    """
    actor, ref = config.actor_rollout_ref.actor, config.actor_rollout_ref.ref
    if "zorro" not in actor:
        return
    with open_dict(config):
        if actor._target_ == _verl_name(FSDPActorConfig):
            actor._target_ = f"{__name__}.{ZorroActorConfig.__name__}"
            actor.zorro._target_ = f"{ZorroOptions.__module__}.{ZorroOptions.__name__}"
        if ref.strategy == "zorro":
            ref._target_ = actor._target_
            ref.zorro = actor.zorro
        critic = config.critic
        if critic.strategy == "zorro" and critic._target_ == _verl_name(FSDPCriticConfig):
            critic._target_ = f"{__name__}.{ZorroCriticConfig.__name__}"
            critic.zorro = actor.zorro


def _verl_name(config: type) -> str:
    """The name under which verl's own configs have one of its dataclasses."""
    return f"{config.__module__.rsplit('.', 1)[0]}.{config.__name__}"


def check_run(config: DictConfig) -> None:
    """Refuse, while nothing has been started yet, what ``strategy=zorro`` would get wrong or leave without effect."""
    _check_paths(config)
    _check_names(config)
    if config.actor_rollout_ref.actor.strategy == "zorro":
        _check_actor(config)
    if config.critic.strategy == "zorro" and need_critic(config):
        with critic_keys():
            _check_critic(config)


def _check_paths(config: DictConfig) -> None:
    """Name what one of this package's examples leaves open, all of it, and here: a worker would name one by one."""
    paths = config.get("paths") or {}
    missing = sorted(f"paths.{name}" for name in paths if OmegaConf.is_missing(paths, name))
    if missing:
        raise ValueError(f"{', '.join(missing)}: expected values, got none; write {missing[0]}=... and so on")


def _check_names(config: DictConfig) -> None:
    """Refuse an option that there is none of, which Hydra can't know of one that was added with ``+``."""
    known = [each.name for each in fields(ZorroOptions)]
    for name in config.actor_rollout_ref.actor.get("zorro") or ():
        if name not in known and name != "_target_":
            raise ValueError(f"{CONFIG_KEY}: expected options of {', '.join(known)}, got {name}")


def _check_actor(config: DictConfig) -> None:
    places = ["model", "actor", "actor.fsdp_config"]
    if config.actor_rollout_ref.ref.strategy == "zorro":
        places += ["ref", "ref.fsdp_config"]
    for place in places:
        check_options(OmegaConf.select(config, f"actor_rollout_ref.{place}"), f"actor_rollout_ref.{place}")
    _check_distillation(config)
    actor = config.actor_rollout_ref.actor
    _warn_of_norm(actor)
    hf_config = check_model(config.actor_rollout_ref.model, "actor_rollout_ref.model")
    for key in (
        "actor.ulysses_sequence_parallel_size",
        *(f"{place}.ulysses_sequence_parallel_size" for place in places),
    ):
        _check_ranks(config, f"actor_rollout_ref.{key}", hf_config)


def _check_ranks(config: DictConfig, key: str, hf_config: PretrainedConfig | None) -> None:
    """Refuse a sequence-parallel size that heads or the trainer's ranks don't divide over."""
    size, world = OmegaConf.select(config, key, default=1), config.trainer.nnodes * config.trainer.n_gpus_per_node
    check_heads(key, size, {} if hf_config is None else head_counts(hf_config))
    if world % size:
        raise ValueError(
            f"{key}: expected a divisor of {world} ranks (trainer.nnodes x trainer.n_gpus_per_node), got {size}"
        )


def _warn_of_norm(actor: DictConfig) -> None:
    """verl's one aggregation of losses that depends on how rows are cut into micro-batches, with any strategy."""
    if actor.loss_agg_mode == "seq-mean-token-sum-norm" and actor.loss_scale_factor is None:
        logger.warning(
            "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm divides by the longest response of each "
            "micro-batch while actor_rollout_ref.actor.loss_scale_factor is not set: the loss then depends on how rows "
            "are cut, with strategy=fsdp2 too. Set it, to data.max_response_length for instance."
        )


def _check_critic(config: DictConfig) -> None:
    critic = config.critic
    if "zorro" in critic:
        raise ValueError(
            "critic.zorro: expected nothing there, as the critic has the actor's options, got "
            f"{dict(critic.zorro)}; set them under actor_rollout_ref.actor.zorro"
        )
    check_options(critic.fsdp, "critic.fsdp")
    check_options(critic.model, "critic.model")
    check_adapters(critic.model)
    hf_config = check_model(critic.model, "critic.model")
    if hf_config is not None:
        check_value_model(hf_config)
    _check_ranks(config, "critic.fsdp.ulysses_sequence_parallel_size", hf_config)


def _check_distillation(config: DictConfig) -> None:
    """Refuse a top-k loss where no rank would have the logits that it needs."""
    if not OmegaConf.select(config, "distillation.enabled", default=False):
        return
    if get_distillation_loss_settings(config.distillation.distillation_loss.loss_mode).use_topk:
        actor, model = config.actor_rollout_ref.actor, config.actor_rollout_ref.model
        asked = "memory" if model.use_fused_kernels else OmegaConf.select(actor, "zorro.logits_optimization")
        sizes = actor.ulysses_sequence_parallel_size, actor.fsdp_config.ulysses_sequence_parallel_size
        check_teaching(asked or "none", max(sizes))


def check_model(model: DictConfig, place: str) -> PretrainedConfig | None:
    """Refuse an unsupported model while nothing has been started yet, and give its config.

    Only where the checkpoint is a folder of this machine, else there is None; the workers check every model when they
    have it.
    """
    if model.path is None:
        raise ValueError(f"{place}.path: expected a name or a folder, got null")
    if not os.path.isdir(model.path):
        return None
    hf_config = AutoConfig.from_pretrained(model.path, trust_remote_code=model.get("trust_remote_code", False))
    override = OmegaConf.to_container(model.get("override_config") or OmegaConf.create({}))
    update_model_config(hf_config, override.get("model_config", override))
    check_supported(hf_config)
    check_training(hf_config, training=True)
    check_offload(model, hf_config, place)
    return hf_config
