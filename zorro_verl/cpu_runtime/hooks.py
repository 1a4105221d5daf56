"""Which of verl's modules the CPU runtime extends, once a process is known to run on the CPU.

| verl | what is added | why |
|---|---|---|
| `plugin.platform.platform_manager` | platform "cpu" | verl has none |
| `utils.distributed` | backend "cpu:gloo" | verl composes "cpu:gloo,cpu:gloo", which torch refuses |
| `utils.model.load_valuehead_model` | the config's attention | verl asks for flash_attention_2 in any case |
| `workers.engine` | the stock engine `fsdp2` | verl registers it for cuda and npu only |
| `workers.rollout.base`, `workers.rollout.replica` | rollout "hf" | verl's server engines need an accelerator |
| `checkpoint_engine.base` | backend "gloo" | verl's backends for `separate_async` move weights between devices |
| `workers.rollout.llm_server` | requests named by prompt | siblings share a server, and the prompt's keys and values |
| `experimental.agent_loop.agent_loop` | a seed for every request | verl names requests at random |

The last two do nothing for another `rollout.name`.
"""

from types import ModuleType

from zorro_verl.post_import import after_import


def install() -> None:
    """Leave the callbacks; calling it again changes nothing."""
    after_import("verl.plugin.platform.platform_manager", register_platform)
    after_import("verl.utils.distributed", use_gloo_once)
    after_import("verl.utils.model", load_value_head_as_configured)
    after_import("verl.workers.engine", register_stock_engines)
    after_import("verl.workers.rollout.base", register_adapter)
    after_import("verl.workers.rollout.replica", register_replica)
    after_import("verl.checkpoint_engine.base", register_checkpoint_engine)
    after_import("verl.workers.rollout.llm_server", route_by_prompt)
    after_import("verl.experimental.agent_loop.agent_loop", seed_requests)


# What the callbacks need is imported inside them: each import waits for verl's module to be there.


def register_platform(platform_manager: ModuleType) -> None:
    from zorro_verl.cpu_runtime.platform import CpuPlatform

    if platform_manager.PlatformRegistry.get("cpu") is None:
        platform_manager.PlatformRegistry.register("cpu")(CpuPlatform)


def use_gloo_once(distributed: ModuleType) -> None:
    from zorro_verl.cpu_runtime.stock import use_gloo_once

    use_gloo_once(distributed)


def load_value_head_as_configured(model_utils: ModuleType) -> None:
    from zorro_verl.cpu_runtime.stock import load_value_head_as_configured

    load_value_head_as_configured(model_utils)


def register_stock_engines(engine: ModuleType) -> None:
    from zorro_verl.cpu_runtime.stock import register_stock_engines

    register_stock_engines(engine)


def register_adapter(rollout_base: ModuleType) -> None:
    rollout_base._ROLLOUT_REGISTRY[("hf", "async")] = "zorro_verl.cpu_runtime.rollout.HFWeightSender"


def register_replica(rollout_replica: ModuleType) -> None:
    def load():
        from zorro_verl.cpu_runtime.rollout import HFReplica

        return HFReplica

    rollout_replica.RolloutReplicaRegistry.register("hf", load)


def register_checkpoint_engine(checkpoint_engine: ModuleType) -> None:
    from zorro_verl.cpu_runtime.checkpoint_engine import GlooCheckpointEngine

    checkpoint_engine.CheckpointEngineRegistry.register("gloo")(GlooCheckpointEngine)


def route_by_prompt(llm_server: ModuleType) -> None:
    from zorro_verl.cpu_runtime.routing import route_by_prompt

    route_by_prompt(llm_server)


def seed_requests(agent_loop: ModuleType) -> None:
    from zorro_verl.cpu_runtime.seeding import seed_requests

    seed_requests(agent_loop)
