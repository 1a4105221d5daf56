"""Stand-ins for what could not be registered: they raise the reason when, and only when, they are asked for."""

import functools
from typing import Any


def refusing_engine(base_engine: type, reason: str) -> type:
    """An engine class for verl's registry whose construction is a ValueError with `reason`."""

    class RefusingEngine(base_engine):
        def __init__(self, *args, **kwargs):
            raise ValueError(reason)

    return RefusingEngine


def asks_for(config: Any, strategy: str) -> bool:
    """Whether actor or critic of a run's config has this `strategy`. SFT configs have neither."""
    actor = getattr(getattr(config, "actor_rollout_ref", None), "actor", None)
    return strategy in (getattr(role, "strategy", None) for role in (actor, getattr(config, "critic", None)))


def refuse_trainer(trainer_class: type, strategy: str, reason: str) -> None:
    """Let `trainer_class` raise a ValueError with `reason` when its config asks for `strategy`."""
    build = trainer_class.__init__

    @functools.wraps(build)
    def __init__(self, config, *args, **kwargs):
        if asks_for(config, strategy):
            raise ValueError(reason)
        build(self, config, *args, **kwargs)

    trainer_class.__init__ = __init__
