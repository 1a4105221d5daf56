"""Callbacks that run right after a named module has been executed, without importing that module.

A plug-in is loaded inside `import verl`, too early to import what it extends: that would make every `import verl` heavy
and freeze verl's choice of a device. One finder at the head of `sys.meta_path` lets the other finders do their work and
calls back after the module's own code ran. It fires at every execution, so that a reloaded module is extended again:
callbacks must be idempotent. One that raises is a warning, because the module that was asked for is whole without it.
"""

import logging
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType

Callback = Callable[[ModuleType], None]

logger = logging.getLogger(__name__)


class PostImportFinder:
    """Finds nothing by itself: it adds the callbacks to the spec that the other finders return."""

    def __init__(self):
        self._callbacks: dict[str, dict[str, Callback]] = {}

    def add(self, module_name: str, callback: Callback) -> None:
        # Keyed by the callback's own name: a second registration replaces the first.
        self._callbacks.setdefault(module_name, {})[f"{callback.__module__}.{callback.__qualname__}"] = callback

    def find_spec(self, name, path=None, target=None) -> ModuleSpec | None:
        if name not in self._callbacks:
            return None
        finders = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        spec = next((spec for finder in finders if (spec := finder.find_spec(name, path, target)) is not None), None)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            self._call_back_after(spec)
        return spec

    def _call_back_after(self, spec: ModuleSpec) -> None:
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if module.__name__ == spec.name:  # a loader may serve several modules
                for callback in list(self._callbacks[spec.name].values()):
                    call(callback, module)

        # On the instance, so that the loader keeps its class: inspect and importlib.resources ask for it.
        spec.loader.exec_module = exec_module


def after_import(module_name: str, callback: Callback) -> None:
    """Call `callback(module)` after each execution of `module_name`, and at once if it has been executed already."""
    _installed_finder().add(module_name, callback)
    if module_name in sys.modules:
        call(callback, sys.modules[module_name])


def call(callback: Callback, module: ModuleType) -> None:
    """Call back; an error is a warning with its traceback."""
    try:
        callback(module)
    except Exception:
        logger.warning(
            "zorro-verl could not extend %s (%s failed); verl goes on without it",
            module.__name__,
            callback.__qualname__,
            exc_info=True,
        )


def _installed_finder() -> PostImportFinder:
    for finder in sys.meta_path:
        # By name: after a reload of this module the finder in place is of the class's former self.
        if (type(finder).__module__, type(finder).__qualname__) == (__name__, PostImportFinder.__qualname__):
            return finder
    finder = PostImportFinder()
    sys.meta_path.insert(0, finder)
    return finder
