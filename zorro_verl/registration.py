"""Whether veRL, in this Python, knows `strategy=zorro`: the entry point, the registry, and what is wrapped.

The order matters. veRL is imported first and asked what it knows; `zorro_verl.plugin` would install itself when it is
imported here, and hide that veRL had not found it.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import EntryPoint, entry_points

import zorro_verl
from zorro_verl.findings import Findings, described
from zorro_verl.installation import NEEDED, OURS, REINSTALL, distribution

GROUP, PLUG_IN = "verl.plugins", "zorro_verl.plugin"
ENGINES = (("language_model", "DeduplicatedActor"), ("value_model", "DeduplicatedCritic"))
# Of verl, what changes which plug-ins, platform and engines a process has.
VARIABLES = (
    "VERL_USE_EXTERNAL_MODULES",
    "VERL_USE_EXTERNAL_PLUGINS",
    "VERL_PLATFORM",
    "VERL_ENGINE_DEVICE",
    "VERL_ENGINE_VENDOR",
)


def examine_plug_in(findings: Findings) -> None:
    """The entry point, then veRL itself, when it can be imported."""
    for name in VARIABLES:
        if name in os.environ:
            findings.fact("plug_in", name, os.environ[name])
    found = _examine_entry_points(findings)
    if findings.hinders(*NEEDED):
        findings.fact("plug_in", "registered with veRL", "not examined, see the problems above")
        return
    if _loaded(findings, found):
        with findings.probing("plug-in", REINSTALL):
            _examine_signatures(findings)
        with findings.probing("plug-in", REINSTALL):
            _examine_registry(findings)


def _examine_entry_points(findings: Findings) -> list[EntryPoint]:
    """Those of the group that are this package's, or take its name."""
    ours = distribution()
    found = [each for each in entry_points(group=GROUP) if each.name == "zorro" or each.value == PLUG_IN]
    findings.fact("plug_in", f"entry point of {GROUP}", "; ".join(map(_shown, found)) or None)
    version = zorro_verl.__version__
    for each in found:
        if (each.name, each.value) != ("zorro", PLUG_IN) or each.dist is None or each.dist.name != OURS:
            owner = each.dist.name if each.dist else "what brings it"
            findings.problem(
                "plug-in",
                f"plug-in: expected zorro = {PLUG_IN} of {OURS} alone, got {_shown(each)}, too; pip uninstall {owner}",
            )
    if ours is not None and ours.version != version:
        findings.problem(
            "plug-in",
            f"plug-in: expected {OURS} {version}, which is imported from {zorro_verl.__path__[0]}, got the entry point "
            f"of {ours.version}, from {ours.locate_file('')}; pip uninstall {OURS}, until it is gone, then install one",
        )
    if ours is not None and not any(each.value == PLUG_IN for each in found) and PLUG_IN not in _external_modules():
        findings.problem(
            "plug-in",
            f"plug-in: expected an entry point zorro = {PLUG_IN} in the group {GROUP}, got none with {OURS} "
            f"{ours.version}; pip install --force-reinstall --no-deps {OURS}",
        )
    return found


def _loaded(findings: Findings, found: Sequence[EntryPoint]) -> bool:
    """Whether veRL has loaded the plug-in by one of its two routes."""
    importlib.import_module("verl")
    loaded = PLUG_IN in sys.modules
    findings.fact("plug_in", "loaded by `import verl`", "yes" if loaded else "no")
    if loaded:
        return True
    policy = os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto")
    if any(each.value == PLUG_IN for each in found):
        try:
            importlib.import_module(PLUG_IN)
        except Exception as error:  # verl keeps it to its debug log
            findings.problem("plug-in", f"plug-in: expected {PLUG_IN} to load, got {described(error)}; {REINSTALL}")
        else:
            findings.problem(
                "plug-in",
                f"plug-in: expected VERL_USE_EXTERNAL_PLUGINS to be auto or to name zorro, got {policy!r}, so that "
                "veRL doesn't load it; unset VERL_USE_EXTERNAL_PLUGINS, or add zorro",
            )
    return False


def _examine_registry(findings: Findings) -> None:
    """What verl would build on each device, and on the one that it takes here."""
    registry = importlib.import_module("verl.workers.engine").EngineRegistry
    plugin = importlib.import_module(PLUG_IN)
    for model_type, expected in ENGINES:
        answers = {}
        for device in plugin.DEVICES:
            with _environment(VERL_ENGINE_DEVICE=device):
                answers[device] = _engine_of(registry, model_type, plugin.STRATEGY)
        shown = "; ".join(f"{name} on {', '.join(d for d in answers if answers[d] == name)}" for name in _once(answers))
        findings.fact("plug_in", f"{model_type} engine", shown)
        for answer in _once(answers):
            if answer != expected and not findings.hinders("plug-in"):  # else it is why
                findings.problem(
                    "plug-in",
                    f"plug-in: expected verl's registry to have {expected} for ({model_type!r}, {plugin.STRATEGY!r}), "
                    f"got {answer}; {REINSTALL}",
                )
    here = _engine_of(registry, "language_model", plugin.STRATEGY)
    if here != ENGINES[0][1] and not findings.hinders("plug-in"):
        findings.problem(
            "plug-in",
            f"plug-in: expected {ENGINES[0][1]} on the device that veRL takes here, got {here}; unset "
            "VERL_ENGINE_DEVICE and VERL_ENGINE_VENDOR",
        )


def _engine_of(registry: type, model_type: str, strategy: str) -> str:
    """The class's name, or why there is none. A stand-in says why when, and only when, it is built."""
    try:
        engine = registry.get_engine_cls(model_type, strategy)
    except (AssertionError, ValueError) as error:
        return described(error)
    if engine.__module__ == "zorro_verl.refusal":
        try:
            engine()
        except ValueError as error:
            return f"a stand-in, since {error}"
    return engine.__name__


def _examine_signatures(findings: Findings) -> None:
    """Of what is wrapped, overridden or called; only some runs use what not every run does."""
    plugin = importlib.import_module(PLUG_IN)
    every_run = (plugin.ENGINE, plugin.TRAINER, plugin.DEVICE)
    modules = tuple(dict.fromkeys(signature.module for signature in plugin.SIGNATURES))
    wrong = 0
    for module in modules:
        try:
            plugin.check_verl(module)
        except Exception as error:  # also what a module of verl raises that can't be imported
            wrong += 1
            if isinstance(error, ModuleNotFoundError) and findings.hinders("requirements"):
                continue  # it is named there
            if module in every_run:
                findings.problem(
                    "plug-in",
                    f"plug-in: expected {module} as this package extends it, got {described(error)}; "
                    f"pip install --force-reinstall 'verl{plugin.SUPPORTED_VERL}'",
                )
            else:
                findings.note(f"what {module} does is not extended here: {described(error)}")
    found = f"{len(modules) - wrong} of {len(modules)} modules of verl as expected"
    findings.fact("plug_in", "signatures of what is wrapped", found)


def _shown(each: EntryPoint) -> str:
    return f"{each.name} = {each.value}" + (f" ({each.dist.name} {each.dist.version})" if each.dist else "")


def _external_modules() -> list[str]:
    return os.environ.get("VERL_USE_EXTERNAL_MODULES", "").split(",")


def _once(answers: dict[str, str]) -> list[str]:
    return list(dict.fromkeys(answers.values()))


@contextmanager
def _environment(**variables: str) -> Iterator[None]:
    """Within this context these are set."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
