"""The plug-in: callbacks after imports, registration by both of verl's routes, loud failures, inert otherwise."""

import importlib
import inspect
import logging
import sys
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
from fresh_process import run_python

from zorro_verl.post_import import PostImportFinder, after_import
from zorro_verl.refusal import refuse_trainer, refusing_engine
from zorro_verl.wrapping import wrap_once


@pytest.fixture
def module_path(tmp_path, monkeypatch):
    """A folder on the path, and an import system that forgets what came from it."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]
    for finder in [f for f in sys.meta_path if isinstance(f, PostImportFinder)]:
        for name in [n for n in finder._callbacks if n.startswith("made_")]:
            del finder._callbacks[name]


def test_a_callback_runs_after_the_module_and_before_its_importer_goes_on(module_path):
    (module_path / "made_late.py").write_text("value = 1\n")
    seen = []
    after_import("made_late", lambda module: seen.append(module.value))
    assert seen == []
    import made_late

    assert seen == [1]
    assert type(made_late.__loader__).__name__ == "SourceFileLoader"
    assert inspect.getsource(made_late) == "value = 1\n"


def test_a_callback_runs_at_once_for_a_module_that_is_there(module_path):
    (module_path / "made_early.py").write_text("value = 2\n")
    import made_early

    seen = []
    after_import("made_early", lambda module: seen.append(module))
    assert seen == [made_early]


def test_a_reloaded_and_a_reimported_module_is_extended_again(module_path):
    (module_path / "made_again.py").write_text("extended = False\n")

    def extend(module):
        module.extended = True

    after_import("made_again", extend)
    module = importlib.import_module("made_again")
    assert module.extended
    assert importlib.reload(module).extended
    del sys.modules["made_again"]
    assert importlib.import_module("made_again").extended


def test_the_same_callback_registered_twice_runs_once(module_path):
    (module_path / "made_once.py").write_text("")
    count = []

    def extend(module):
        count.append(module)

    after_import("made_once", extend)
    after_import("made_once", extend)
    importlib.import_module("made_once")
    assert len(count) == 1


def test_a_failing_callback_is_a_warning_and_the_module_is_whole(module_path, caplog):
    (module_path / "made_whole.py").write_text("value = 3\n")
    seen = []

    def fail(module):
        raise RuntimeError("no such thing")

    after_import("made_whole", fail)
    after_import("made_whole", lambda module: seen.append(module.value))
    with caplog.at_level(logging.WARNING):
        import made_whole
    assert made_whole.value == 3
    assert seen == [3]
    [record] = caplog.records
    assert "made_whole" in record.getMessage()
    assert "no such thing" in record.exc_text


def test_an_error_of_the_module_itself_is_not_swallowed(module_path):
    (module_path / "made_broken.py").write_text("raise KeyError('its own')\n")
    seen = []
    after_import("made_broken", seen.append)
    with pytest.raises(KeyError, match="its own"):
        importlib.import_module("made_broken")
    assert seen == []


def test_stand_ins_raise_the_reason_and_only_when_asked_for():
    class Engine:
        pass

    with pytest.raises(ValueError, match="the reason"):
        refusing_engine(Engine, "the reason")("any", config="at all")

    class Config:
        def __init__(self, strategy):
            self.actor_rollout_ref = self.actor = self
            self.strategy = strategy

    class Trainer:
        def __init__(self, config):
            self.built = True

    refuse_trainer(Trainer, "zorro", "the reason")
    assert Trainer(Config("fsdp2")).built
    with pytest.raises(ValueError, match="the reason"):
        Trainer(Config("zorro"))


def test_a_function_is_wrapped_once():
    class Owner:
        def method(self, x):
            """Said of it."""
            return x

    stock = Owner.method
    for _ in range(2):
        wrap_once(Owner, "method", lambda original: lambda self, x: original(self, x) + 1)
    assert Owner().method(1) == 2
    assert Owner.method.__wrapped__ is stock
    assert (Owner.method.__name__, Owner.method.__doc__) == ("method", "Said of it.")
    assert list(inspect.signature(Owner.method).parameters) == ["self", "x"]


def test_every_method_of_verls_engines_that_is_overridden_has_its_signature_checked():
    """By the class of verl's that has it next: what the override calls with ``super()``, or stands for."""
    import zorro_verl.actor
    import zorro_verl.critic
    from zorro_verl.plugin import ENGINE, SIGNATURES

    checked = {(s.owner, s.method) for s in SIGNATURES if s.module == ENGINE}
    overridden = set()
    for engine in (zorro_verl.actor.DeduplicatedActor, zorro_verl.critic.DeduplicatedCritic):
        verls = [c for c in engine.__mro__ if c.__module__.startswith("verl.workers.engine")]
        ours = [c for c in engine.__mro__ if c.__module__.startswith("zorro_verl")]
        names = {name for c in ours for name, value in vars(c).items() if inspect.isfunction(value)}
        owners = {name: next((c.__name__ for c in verls if name in vars(c)), None) for name in names}
        overridden |= {(owner, name) for name, owner in owners.items() if owner is not None}
    assert {name for _, name in overridden} >= {"__init__", "_init_device_mesh", "_build_module", "train_batch"}
    assert overridden <= checked, overridden - checked


@pytest.mark.slow
def test_every_function_of_verl_that_is_replaced_has_its_signature_checked_and_stands_in_the_table():
    output = run_python(
        """
        import importlib, inspect, sys
        import zorro_verl.plugin as plugin

        plugin.check_verl(*(signature.module for signature in plugin.SIGNATURES))
        checked = {(s.module, ".".join(part for part in s[1:3] if part)) for s in plugin.SIGNATURES}
        replaced = set()
        for name in [name for name in sys.modules if name.partition(".")[0] == "verl"]:
            found = list(vars(sys.modules[name]).values())
            found += [value for owner in found if inspect.isclass(owner) for value in vars(owner).values()]
            for value in found:
                if inspect.isfunction(value) and hasattr(value, "wrapped_by_zorro"):
                    replaced.add((value.__module__, value.__qualname__))
        assert {module for module, _ in replaced} >= {plugin.TRAINER, plugin.LEGACY_TRAINER, *plugin.WRAPS}, replaced
        assert replaced <= checked, replaced - checked
        for module, function in replaced:
            row = f"{module}.{function.partition('.')[0]}".removeprefix("verl.")
            assert f"| `{row}` |" in plugin.__doc__, row
        print("CHECKED", len(replaced))
        """
    )
    assert "CHECKED" in output
    assert "could not" not in output, output


@pytest.mark.parametrize(
    ("settings", "more"),
    [
        ({}, {"TRAINER"}),
        ({"trainer": {"use_v1": False}}, {"LEGACY_TRAINER", "THROUGHPUT"}),
        (
            {"trainer": {"use_v1": True, "v1": {"trainer_mode": "separate_async"}}},
            {"TRAINER", "DETACH_WORKER", "FSDP_WEIGHTS", "AGGREGATOR"},
        ),
        ({"distillation": {"enabled": True}}, {"TRAINER", "DISTILLATION"}),
        ({"critic": {"shuffle": True}}, {"TRAINER", "WORKER"}),
    ],
)
def test_the_driver_checks_what_its_run_needs(settings, more, monkeypatch):
    """Before Ray is started, so that the run doesn't end in a worker, or go on with less than it asked for."""
    from omegaconf import OmegaConf

    from zorro_verl import plugin, verl_config

    seen, told = [], []
    monkeypatch.setattr(plugin, "check_verl", lambda *modules: seen.append(set(modules)))
    for name in ("check_run", "spread_options"):
        monkeypatch.setattr(verl_config, name, told.append)
    device = types.SimpleNamespace(auto_set_device=told.append)
    plugin.wrap_auto_set_device(device)
    base = {"trainer": {"device": "cuda"}, "actor_rollout_ref": {"actor": {"strategy": "zorro"}}}
    config = OmegaConf.merge(base, settings)
    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    device.auto_set_device(config)
    assert seen == [{plugin.ENGINE, plugin.DEVICE, *(getattr(plugin, name) for name in more)}]
    assert told == [config] * 3
    config.actor_rollout_ref.actor.strategy = "fsdp2"
    device.auto_set_device(config)
    assert len(seen) == 1


# What verl looks like without the plug-in, as far as the plug-in could touch it.
LOOK = """
    import logging, os, sys
    from omegaconf import OmegaConf
    import verl
    assert not any(name.startswith("zorro_verl.cpu_runtime") for name in sys.modules), "CPU runtime loaded"
    assert "verl.workers.engine" not in sys.modules, "import verl has become heavy"

    import verl.trainer.ppo.v1.trainer_base as trainer
    import verl.utils.device as device
    import verl.utils.distributed as distributed
    from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
    from verl.plugin.platform import PlatformRegistry, get_platform
    from verl.workers.engine import EngineRegistry
    from verl.workers.engine.fsdp import transformer_impl
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY
    from verl.workers.rollout.llm_server import LLMServerClient
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    def told(config):
        config = OmegaConf.create(config)
        OmegaConf.set_struct(config, True)
        try:
            device.auto_set_device(config)
        except Exception as error:
            return repr(error)
        return OmegaConf.to_container(config)

    actor = {"strategy": "fsdp2"}
    ray = {"ray_init": {"num_cpus": None}}
    engines = {
        model_type: {
            backend: {str(key): engine.__qualname__ for key, engine in registered.items()}
            for backend, registered in backends.items() if backend != "zorro"
        }
        for model_type, backends in EngineRegistry._engines.items()
    }
    print("LOOK", {
        "platforms": PlatformRegistry.registered_names(),
        "platform": get_platform().device_name,
        "environment": {k: v for k, v in os.environ.items() if "PLATFORM" in k},
        "engines": engines,
        "rollouts": sorted(_ROLLOUT_REGISTRY),
        "replicas": sorted(RolloutReplicaRegistry._registry),
        "functions": [
            function.__code__.co_filename.rpartition("site-packages")[2]
            for function in (
                distributed.initialize_global_process_group_ray,
                AgentLoopWorker._run_agent_loop,
                LLMServerClient._acquire_server,
            )
        ],
        "offload": transformer_impl.CPUOffloadPolicy.__module__,
        "device_name": transformer_impl.device_name,
        "told": [
            told({"trainer": {"device": "cuda"}, "actor_rollout_ref": {"actor": actor}, "ray_kwargs": ray}),
            told({"trainer": {"device": "npu"}, "actor_rollout_ref": {"actor": actor}, "ray_kwargs": ray}),
            told({"trainer": {"device": "cpu"}, "model": {}}),
            told({"trainer": {}}),
            told({}),
        ],
    })
"""


@pytest.mark.slow
def test_without_zorro_and_without_the_cpu_verl_is_as_it_was():
    def look(plugins):
        output = run_python(LOOK, VERL_USE_EXTERNAL_PLUGINS=plugins)
        return [line for line in output.splitlines() if line.startswith("LOOK")]

    with ThreadPoolExecutor(2) as pool:
        without, installed = pool.map(look, ("none", "auto"))
    assert len(without) == 1
    assert installed == without


REGISTERED = """
    import importlib, logging, sys
    import verl
    assert "zorro_verl.plugin" in sys.modules, "not loaded by verl"
    assert "zorro_verl.actor" not in sys.modules and "verl.workers.engine" not in sys.modules, "not lazy"
    from verl.workers.engine import EngineRegistry
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer
    import zorro_verl.actor, zorro_verl.plugin

    def check():
        registered = EngineRegistry._engines["language_model"]["zorro"]
        assert registered == dict.fromkeys(("cuda", "npu", "cpu"), zorro_verl.actor.DeduplicatedActor), registered
        assert EngineRegistry.get_engine_cls("language_model", "zorro") is zorro_verl.actor.DeduplicatedActor
        assert PPOTrainer._balance_batch.__wrapped__.__module__ == "verl.trainer.ppo.v1.trainer_base"
        assert not hasattr(PPOTrainer._balance_batch.__wrapped__, "__wrapped__"), "wrapped twice"
        assert sum(type(finder).__name__ == "PostImportFinder" for finder in sys.meta_path) == 1

    check()
    importlib.import_module("zorro_verl.plugin")
    importlib.reload(zorro_verl.plugin)
    check()
    importlib.reload(importlib.import_module("verl.workers.engine"))
    check()
    print("REGISTERED")
"""


@pytest.mark.parametrize(
    "route",
    [
        pytest.param(
            {"VERL_USE_EXTERNAL_MODULES": "zorro_verl.plugin", "VERL_USE_EXTERNAL_PLUGINS": "none"}, id="environment"
        ),
        pytest.param({"VERL_USE_EXTERNAL_MODULES": "zorro_verl.plugin"}, id="both"),
    ],
)
def test_the_engine_and_the_trainer_are_registered_once_by_every_route(route):
    output = run_python(REGISTERED, **route)
    assert "REGISTERED" in output
    assert "could not" not in output, output


@pytest.mark.parametrize("first", ["actor", "critic", "engine", "data_proto"])
def test_whatever_is_imported_before_verl_the_engines_are_registered(first):
    output = run_python(
        f"""
        import zorro_verl.{first}
        from verl.workers.engine import EngineRegistry
        from zorro_verl.actor import DeduplicatedActor
        from zorro_verl.critic import DeduplicatedCritic
        assert set(EngineRegistry._engines["language_model"]["zorro"].values()) == {{DeduplicatedActor}}
        assert set(EngineRegistry._engines["value_model"]["zorro"].values()) == {{DeduplicatedCritic}}
        """
    )
    assert "could not" not in output, output


def test_what_is_wrong_is_a_warning_and_an_error_for_zorro_only():
    output = run_python(
        """
        import sys
        from omegaconf import OmegaConf
        import verl
        installed, verl.__version__ = verl.__version__, "0.10.0.dev0"
        from verl.utils.device import auto_set_device
        from verl.workers import engine
        from verl.workers.engine import EngineRegistry
        from verl.trainer.ppo.v1.trainer_base import PPOTrainer
        import zorro_verl.plugin as plugin

        def error(call, *args):
            try:
                call(*args)
            except ValueError as error:
                return str(error)
            raise AssertionError(f"{call} did not raise")

        def config(strategy):
            actor = {"actor": {"strategy": strategy}}
            return OmegaConf.create({"trainer": {"device": "cuda"}, "actor_rollout_ref": actor})

        # verl of another version: the worker, the task runner and the driver name both versions.
        for call in (
            lambda: EngineRegistry.new("language_model", "zorro", None, engine_config=None),
            lambda: PPOTrainer.__init__(object(), config("zorro")),
            lambda: auto_set_device(config("zorro")),
        ):
            message = error(call)
            assert "0.10.0.dev0" in message and ">=0.9.1,<0.10" in message and "strategy" in message, message
        auto_set_device(config("fsdp2"))
        assert EngineRegistry.get_engine_cls("language_model", "fsdp2").__name__ == "FSDPEngineWithLMHead"

        # A module of this package that cannot be imported.
        verl.__version__ = installed
        del EngineRegistry._engines["language_model"]["zorro"]
        sys.modules["zorro_verl.actor"] = None
        plugin.after_import("verl.workers.engine", plugin.register_engine)
        message = error(EngineRegistry.new, "language_model", "zorro")
        assert "zorro_verl.actor" in message and "ModuleNotFoundError" in message, message

        # A method of verl that is gone, and one with other parameters.
        transformer_impl = sys.modules[plugin.ENGINE]
        plugin.check_verl(plugin.ENGINE)
        transformer_impl.FSDPEngineWithLMHead.forward_step = lambda self, batch: None
        message = error(plugin.check_verl, plugin.ENGINE)
        assert "forward_step" in message and "loss_function" in message and "batch" in message, message
        del transformer_impl.FSDPEngine._build_fsdp_module
        message = error(plugin.check_verl, plugin.ENGINE)
        assert "_build_fsdp_module" in message and installed in message, message
        print("CHECKED")
        """
    )
    assert "CHECKED" in output
    assert output.count("WARNING") >= 2
    assert "zorro-verl could not extend verl.workers.engine (register_engine failed)" in output


@pytest.mark.ray
@pytest.mark.timeout(120)
def test_a_ray_worker_that_imports_only_verl_finds_the_engine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("r", numbered=True)
    output = run_python(
        f"""
        import sys
        import ray
        ray.init(num_cpus=2, include_dashboard=False, _temp_dir={str(folder)!r}, log_to_driver=False)

        @ray.remote
        class Worker:
            def engine(self):
                import verl
                from verl.workers.engine import EngineRegistry
                return EngineRegistry.get_engine_cls("language_model", "zorro").__qualname__

        assert "zorro_verl" not in sys.modules
        try:
            print("FOUND", ray.get(Worker.remote().engine.remote(), timeout=90))
        finally:
            ray.shutdown()
        """,
        timeout=115,
    )
    assert "FOUND DeduplicatedActor" in output
