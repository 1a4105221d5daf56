"""A run's config: the dataclass behind the group ``zorro_actor``, and what is checked before verl starts Ray."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from omegaconf import DictConfig, OmegaConf, open_dict
from transformers import AutoConfig
from verl.utils.model import update_model_config
from verl.workers.config import FSDPActorConfig

from zorro_verl.actor_options import check_options
from zorro_verl.families import check_supported, check_training
from zorro_verl.options import ZorroOptions


@dataclass
class ZorroActorConfig(FSDPActorConfig):
    """verl's FSDP actor config plus ``zorro``. verl hands an engine its engine config only, so the options go along."""

    strategy: str = "zorro"
    zorro: ZorroOptions = field(default_factory=ZorroOptions)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self.engine, "zorro", self.zorro)


def spread_options(config: DictConfig) -> None:
    """Make ``+actor.zorro.*`` work without the config group, and give the reference policy the actor's options.

    verl's own actor dataclass takes no ``zorro``, and its ``ref`` section has no place for any.

    Args:
        config: the run's whole config, changed in place before verl hands it to its workers.
    """
    actor, ref = config.actor_rollout_ref.actor, config.actor_rollout_ref.ref
    if "zorro" not in actor:
        return
    with open_dict(config):
        if actor._target_ == f"{FSDPActorConfig.__module__.rsplit('.', 1)[0]}.{FSDPActorConfig.__name__}":
            actor._target_ = f"{__name__}.{ZorroActorConfig.__name__}"
            actor.zorro._target_ = f"{ZorroOptions.__module__}.{ZorroOptions.__name__}"
        if ref.strategy == "zorro":
            ref._target_ = actor._target_
            ref.zorro = actor.zorro


def check_run(config: DictConfig) -> None:
    """Refuse, while nothing has been started yet, what ``strategy=zorro`` would get wrong or leave without effect."""
    for place in ("actor_rollout_ref.actor", "actor_rollout_ref.actor.fsdp_config", "actor_rollout_ref.model"):
        check_options(OmegaConf.select(config, place), place)
    if OmegaConf.select(config, "distillation.enabled", default=False):
        raise ValueError("distillation.enabled: expected False with actor.strategy=zorro, got True; use strategy=fsdp2")
    if OmegaConf.select(config, "critic.strategy") == "zorro":
        raise ValueError("critic.strategy: expected fsdp2 or fsdp, got zorro; it is for actor and reference only")
    if OmegaConf.select(config, "trainer.v1.trainer_mode") == "separate_async":
        raise ValueError(
            "trainer.v1.trainer_mode: expected sync or colocate_async with actor.strategy=zorro, got separate_async"
        )
    check_model(config)


def check_model(config: DictConfig) -> None:
    """Refuse an unsupported model while nothing has been started yet.

    Only where the checkpoint is a folder of this machine; the workers check every model when they have it.
    """
    model = config.actor_rollout_ref.model
    if not os.path.isdir(model.path):
        return
    hf_config = AutoConfig.from_pretrained(model.path, trust_remote_code=model.get("trust_remote_code", False))
    override = OmegaConf.to_container(model.get("override_config") or OmegaConf.create({}))
    update_model_config(hf_config, override.get("model_config", override))
    check_supported(hf_config)
    check_training(hf_config, training=True)
