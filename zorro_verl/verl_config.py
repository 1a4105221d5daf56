"""The config dataclass behind the Hydra group ``actor@actor_rollout_ref.actor=zorro_actor``."""

from __future__ import annotations

from dataclasses import dataclass, field

from verl.workers.config import FSDPActorConfig

from zorro_verl.options import ZorroOptions


@dataclass
class ZorroActorConfig(FSDPActorConfig):
    """verl's FSDP actor config plus ``zorro``. verl hands an engine its engine config only, so the options go along."""

    strategy: str = "zorro"
    zorro: ZorroOptions = field(default_factory=ZorroOptions)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self.engine, "zorro", self.zorro)
