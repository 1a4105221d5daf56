"""What the entry point `verl.plugins` loads: it makes `strategy=zorro` and the CPU runtime known to verl.

Importing this module is the installation. It imports the standard library only, reads two environment variables and
leaves callbacks for the moment when verl's own modules have been executed. What is wrapped, and why:

| verl | process | why |
|---|---|---|
| `workers.engine` | every worker | `zorro_verl.actor` and `.critic` register their engines for backend "zorro" |
| `trainer.ppo.v1.trainer_base.PPOTrainer` | task runner | `zorro_verl.trainer` keeps groups whole, adds metrics |
| `trainer.ppo.ray_trainer.RayPPOTrainer` | task runner | the same for `trainer.use_v1=False` and what is built on it |
| `trainer.ppo.metric_utils.compute_throughout_metrics` | task runner | brings these metrics into the log |
| `workers.engine_workers.TrainingWorker` | every worker | `shuffle=True` draws mini-batches by group, not by row |
| `experimental.separation.engine_workers.DetachActorWorker` | workers of `separate_async` | sets weights aside |
| `trainer.ppo.v1.utils.MetricsAggregator` | task runner | sums counts over the updates of a step of `separate_async` |
| `experimental.fully_async_policy.detach_utils.MetricsAggregator` | its trainer | the same between two weight updates |
| `trainer.distillation.losses.compute_topk_loss` | workers | takes "zorro" for the "fsdp2" that it shards as |
| `utils.device.auto_set_device` | driver | sees the config before Ray starts: early errors, `trainer.device=cpu` |
| Ray's own `init` | driver | once, after it has connected: `zorro_verl.nodes` compares what the nodes have |

With `trainer.device=cpu` or `VERL_PLATFORM=cpu`, and only then, `zorro_verl.cpu_runtime.hooks` adds its own.

With another strategy and another device all of this is inert. A failure here is a warning that leaves `import verl`
whole. For `strategy=zorro` it becomes a ValueError with the reason, raised by a stand-in in verl's registry.
"""

import importlib
import inspect
import logging
import os
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

from zorro_verl.post_import import after_import, logger
from zorro_verl.refusal import asks_for, refuse_trainer, refusing_engine
from zorro_verl.wrapping import wrap_once

SUPPORTED_VERL = ">=0.9.1,<0.10"
STRATEGY = "zorro"
DEVICES = ("cuda", "npu", "cpu")

ENGINE = "verl.workers.engine.fsdp.transformer_impl"
TRAINER = "verl.trainer.ppo.v1.trainer_base"
LEGACY_TRAINER = "verl.trainer.ppo.ray_trainer"
WORKER = "verl.workers.engine_workers"
DETACH_WORKER = "verl.experimental.separation.engine_workers"
FSDP_WEIGHTS = "verl.utils.fsdp_utils"
THROUGHPUT = "verl.trainer.ppo.metric_utils"
AGGREGATOR = "verl.trainer.ppo.v1.utils"
FULLY_ASYNC_AGGREGATOR = "verl.experimental.fully_async_policy.detach_utils"
DISTILLATION = "verl.trainer.distillation.losses"
DEVICE = "verl.utils.device"

# Where one of these fails it is a warning, and a run with strategy=zorro has what stands beside it.
WRAPS = {
    WORKER: ("zorro_verl.shuffling", "wrap_training_worker"),  # groups that a shuffle cuts are counted as cut
    DETACH_WORKER: ("zorro_verl.detach", "wrap_detach_worker"),  # verl's own error: an unsupported strategy
    THROUGHPUT: ("zorro_verl.throughput", "wrap_throughput"),  # metrics of the legacy trainer are not logged
    AGGREGATOR: ("zorro_verl.update_counts", "wrap_metrics_aggregator"),  # counts are averages
    FULLY_ASYNC_AGGREGATOR: ("zorro_verl.update_counts", "wrap_fully_async_aggregator"),  # the same
    DISTILLATION: ("zorro_verl.distillation", "wrap_topk_loss"),  # verl's own error: an unsupported strategy
}


class Signature(NamedTuple):
    """A method of verl that is overridden, wrapped or called, with the parameters that this package relies on.

    `owner` is empty for a function of the module.
    """

    module: str
    owner: str
    method: str
    parameters: tuple[str, ...]


SIGNATURES = (
    Signature(
        ENGINE, "FSDPEngine", "__init__", ("model_config", "engine_config", "optimizer_config", "checkpoint_config")
    ),
    Signature(ENGINE, "FSDPEngine", "_init_device_mesh", ()),
    Signature(ENGINE, "FSDPEngine", "_build_module", ()),
    Signature(ENGINE, "FSDPEngine", "_build_fsdp_module", ("module",)),
    Signature(ENGINE, "FSDPEngine", "forward_backward_batch", ("data", "loss_function", "forward_only")),
    Signature(ENGINE, "FSDPEngine", "_gradient_sync_context", ("is_last_micro_batch",)),
    Signature(ENGINE, "FSDPEngine", "is_mp_src_rank_with_outputs", ()),
    Signature(ENGINE, "FSDPEngine", "optimizer_step", ()),
    Signature(ENGINE, "BaseEngine", "train_batch", ("data", "loss_function")),
    Signature(ENGINE, "", "enable_activation_offloading", ("model", "strategy", "enable_ckpt")),
    Signature(ENGINE, "FSDPEngineWithLMHead", "prepare_model_inputs", ("micro_batch",)),
    Signature(
        ENGINE,
        "FSDPEngineWithLMHead",
        "prepare_model_outputs",
        ("output", "output_args", "micro_batch", "logits_processor_func"),
    ),
    Signature(ENGINE, "FSDPEngineWithLMHead", "forward_step", ("micro_batch", "loss_function", "forward_only")),
    Signature(
        ENGINE,
        "FSDPEngineWithValueHead",
        "prepare_model_outputs",
        ("output", "output_args", "micro_batch", "logits_processor_func"),
    ),
    Signature(TRAINER, "PPOTrainer", "_balance_batch", ("batch", "metrics", "logging_prefix", "keep_minibatch")),
    Signature(TRAINER, "PPOTrainer", "_compute_old_log_prob", ("batch", "metrics")),
    Signature(TRAINER, "PPOTrainer", "_compute_ref_log_prob", ("batch", "metrics")),
    Signature(TRAINER, "PPOTrainer", "_update_actor", ("batch", "metrics")),
    Signature(TRAINER, "PPOTrainer", "_compute_metrics", ("batch", "metrics", "timing_raw", "global_steps", "epoch")),
    Signature(TRAINER, "PPOTrainer", "_compute_values", ("batch", "metrics")),
    Signature(TRAINER, "PPOTrainer", "_update_critic", ("batch", "metrics")),
    Signature(
        LEGACY_TRAINER, "RayPPOTrainer", "_balance_batch", ("batch", "metrics", "logging_prefix", "keep_minibatch")
    ),
    Signature(LEGACY_TRAINER, "RayPPOTrainer", "_update_actor", ("batch",)),
    Signature(LEGACY_TRAINER, "RayPPOTrainer", "_compute_old_log_prob", ("batch",)),
    Signature(LEGACY_TRAINER, "RayPPOTrainer", "_compute_ref_log_prob", ("batch",)),
    Signature(LEGACY_TRAINER, "RayPPOTrainer", "_compute_values", ("batch",)),
    Signature(LEGACY_TRAINER, "RayPPOTrainer", "_update_critic", ("batch",)),
    Signature(WORKER, "TrainingWorker", "train_mini_batch", ("data",)),
    Signature(DETACH_WORKER, "DetachActorWorker", "_get_strategy_handlers", ()),
    Signature(FSDP_WEIGHTS, "", "fsdp1_sharded_save_to_cpu", ("model",)),
    Signature(FSDP_WEIGHTS, "", "fsdp1_sharded_load_from_cpu", ("model", "cpu_sharded_state")),
    Signature(FSDP_WEIGHTS, "", "fsdp2_sharded_save_to_cpu", ("model",)),
    Signature(FSDP_WEIGHTS, "", "fsdp2_sharded_load_from_cpu", ("model", "cpu_sharded_state", "target_spec")),
    Signature(THROUGHPUT, "", "compute_throughout_metrics", ("batch", "timing_raw", "n_gpus")),
    Signature(AGGREGATOR, "MetricsAggregator", "_special_metrics_aggregate", ("aggregated",)),
    Signature(
        FULLY_ASYNC_AGGREGATOR,
        "MetricsAggregator",
        "_special_metrics_aggergate",
        ("aggregated", "rollout_resource_utilization"),
    ),
    Signature(DEVICE, "", "auto_set_device", ("config",)),
    Signature(
        DISTILLATION,
        "",
        "compute_topk_loss",
        ("config", "distillation_config", "data", "student_logits", "data_format"),
    ),
)


def check_verl(*modules: str) -> None:
    """Raise a ValueError unless verl's version and the signatures in `modules` are those that this package extends.

    Without arguments only the version is checked; otherwise the modules are imported.
    """
    # Imported here: the module itself stays on the standard library, and verl may be on its way in right now.
    import verl
    from packaging.specifiers import SpecifierSet

    if not SpecifierSet(SUPPORTED_VERL).contains(verl.__version__, prereleases=True):
        raise ValueError(
            f"strategy={STRATEGY} supports verl {SUPPORTED_VERL}, but verl {verl.__version__} is installed: "
            f"install a supported version (pip install 'verl{SUPPORTED_VERL}') "
            "or choose another actor_rollout_ref.actor.strategy"
        )
    for signature in SIGNATURES:
        if signature.module in modules:
            _check_signature(signature, verl.__version__)


def _check_signature(signature: Signature, version: str) -> None:
    name = ".".join(part for part in signature[:3] if part)
    owner = importlib.import_module(signature.module)
    if signature.owner:
        owner = getattr(owner, signature.owner, None)
    method = getattr(owner, signature.method, None)
    if method is None:
        raise ValueError(f"strategy={STRATEGY} extends {name}, which verl {version} does not have")
    found = tuple(inspect.signature(method).parameters)[1 if signature.owner else 0 :]
    if found != signature.parameters:
        raise ValueError(
            f"strategy={STRATEGY} extends {name}{signature.parameters}, "
            f"but in the installed verl {version} its parameters are {found}"
        )


def register_engine(engine_module: ModuleType) -> None:
    """Register the engine of actor and reference with verl, or a stand-in that raises why it could not be."""
    _register(engine_module, "language_model", "zorro_verl.actor")


def register_critic(engine_module: ModuleType) -> None:
    """The same for the critic's engine."""
    _register(engine_module, "value_model", "zorro_verl.critic")


def _register(engine_module: ModuleType, model_type: str, name: str) -> None:
    registry = engine_module.EngineRegistry
    try:
        check_verl(ENGINE)
        engine = importlib.import_module(name)
        # Imported first, it brings verl's engines in, and this callback: it registers itself when it is done.
        if not getattr(engine.__spec__, "_initializing", False):
            engine.register(registry)
    except Exception as error:
        stand_in = refusing_engine(engine_module.BaseEngine, _reason(error))
        # Written, not registered: verl refuses a key twice, and a broken import may have come as far as registering.
        registry._engines.setdefault(model_type, {})[STRATEGY] = dict.fromkeys(DEVICES, stand_in)
        raise


def wrap_trainer(trainer_module: ModuleType) -> None:
    """Wrap verl's trainer, or let it raise why it could not be wrapped when its config asks for `strategy=zorro`."""
    _wrap_trainer(trainer_module, TRAINER, "PPOTrainer", "wrap_ppo_trainer")


def wrap_legacy_trainer(trainer_module: ModuleType) -> None:
    """The same for the trainer behind `trainer.use_v1=False`."""
    _wrap_trainer(trainer_module, LEGACY_TRAINER, "RayPPOTrainer", "wrap_legacy_trainer")


def _wrap_trainer(trainer_module: ModuleType, name: str, trainer: str, wrap: str) -> None:
    try:
        check_verl(name)
        getattr(importlib.import_module("zorro_verl.trainer"), wrap)(trainer_module)
    except Exception as error:
        refuse_trainer(getattr(trainer_module, trainer), STRATEGY, _reason(error))
        raise


def wrap(module: ModuleType) -> None:
    """Wrap what `WRAPS` has for this module of verl."""
    ours, function = WRAPS[module.__name__]
    check_verl(module.__name__, *((FSDP_WEIGHTS,) if module.__name__ == DETACH_WORKER else ()))
    getattr(importlib.import_module(ours), function)(module)


def wrap_auto_set_device(device_module: ModuleType) -> None:
    """Look at the run's config where verl's own `main` first does, in the driver and before Ray is started."""
    wrap_once(device_module, "auto_set_device", _looking_at_the_run)


def _looking_at_the_run(original: Callable) -> Callable:
    def auto_set_device(config):
        actor = getattr(getattr(config, "actor_rollout_ref", None), "actor", None)
        # SFT configs have no actor: the CPU runtime is about verl's RL trainer.
        if actor is not None and "cpu" in (getattr(config.trainer, "device", None), chosen_platform()):
            importlib.import_module("zorro_verl.cpu_runtime.run").prepare_run(config)
        if asks_for(config, STRATEGY):
            check_verl(ENGINE, DEVICE, *_extended_for(config))
            run_config = importlib.import_module("zorro_verl.verl_config")
            run_config.check_run(config)
            run_config.spread_options(config)
            importlib.import_module("zorro_verl.nodes").check_once_connected()
        original(config)

    return auto_set_device


def _extended_for(config: Any) -> Iterator[str]:
    """Modules of verl that this run needs as this package knows them, beside those of every run."""
    if getattr(config.trainer, "use_v1", True):
        yield TRAINER
        if getattr(getattr(config.trainer, "v1", None), "trainer_mode", None) == "separate_async":
            yield from (DETACH_WORKER, FSDP_WEIGHTS, AGGREGATOR)
    else:
        yield from (LEGACY_TRAINER, THROUGHPUT)
    actor, critic = getattr(config.actor_rollout_ref, "actor", None), getattr(config, "critic", None)
    if getattr(actor, "shuffle", False) or getattr(critic, "shuffle", False):
        yield WORKER
    if getattr(getattr(config, "distillation", None), "enabled", False):
        yield DISTILLATION


def chosen_platform() -> str:
    """The platform that the environment names, as verl reads it; empty when verl is to find out by itself."""
    return os.environ.get("VERL_PLATFORM", "").strip().lower()


def _reason(error: Exception) -> str:
    if isinstance(error, ValueError):
        return str(error)
    return (
        f"strategy={STRATEGY} could not be registered with verl ({type(error).__name__}: {error}); "
        "the warning at import has the traceback"
    )


def install() -> None:
    """Leave the callbacks. Calling it again, after a reload or by verl's second discovery route, changes nothing."""
    # verl's own loggers follow this variable below a root that shows warnings only; so do ours.
    logging.getLogger("zorro_verl").setLevel(os.environ.get("VERL_LOGGING_LEVEL", "INFO"))
    after_import("verl.workers.engine", register_engine)
    after_import("verl.workers.engine", register_critic)
    after_import(TRAINER, wrap_trainer)
    after_import(LEGACY_TRAINER, wrap_legacy_trainer)
    for name in WRAPS:
        after_import(name, wrap)
    after_import(DEVICE, wrap_auto_set_device)
    if chosen_platform() == "cpu":
        importlib.import_module("zorro_verl.cpu_runtime.hooks").install()


try:
    install()
except Exception:
    logger.warning("zorro-verl could not install itself; verl goes on without it", exc_info=True)
