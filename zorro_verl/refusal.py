"""Stand-ins for what could not be registered: they raise the reason when, and only when, they are asked for."""

import functools


def refusing_engine(base_engine: type, reason: str) -> type:
    """An engine class for verl's registry whose construction is a ValueError with `reason`."""

    class RefusingEngine(base_engine):
        def __init__(self, *args, **kwargs):
            raise ValueError(reason)

    return RefusingEngine


def refuse_trainer(trainer_class: type, strategy: str, reason: str) -> None:
    """Let `trainer_class` raise a ValueError with `reason` when its config asks for `strategy`."""
    build = trainer_class.__init__

    @functools.wraps(build)
    def __init__(self, config, *args, **kwargs):
        if config.actor_rollout_ref.actor.strategy == strategy:
            raise ValueError(reason)
        build(self, config, *args, **kwargs)

    trainer_class.__init__ = __init__
