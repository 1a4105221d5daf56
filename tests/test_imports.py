"""Which module may import what: one-way arrows inside the package, third-party packages only where they belong."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import zorro_verl

PACKAGE = Path(__file__).resolve().parent.parent / "zorro_verl"

# In reading order. A module may import from those before it, and at its top level only these third-party packages.
MODULES: dict[str, set[str]] = {
    "__init__": set(),
    "post_import": set(),
    "wrapping": set(),
    "refusal": set(),
    "options": set(),
    "flops": set(),
    "grouping": {"torch"},
    "forest": {"torch"},
    "packing": {"torch"},
    "prefixes": {"torch"},
    "padded_plan": {"torch"},
    "varlen": {"torch"},
    "flash_kernels": {"torch"},
    "attention_kernels": {"torch"},
    "triton_merge": {"torch", "triton"},
    "merge": {"torch"},
    "attention": {"torch"},
    "linear_attention": {"torch"},
    "log_probs": {"torch"},
    "memory": {"torch"},
    "estimate": set(),
    "triton_reconstruct": {"torch", "triton"},
    "reconstruct": {"torch"},
    "masks": {"torch"},
    "interleaved": {"torch"},
    "zorro_train": {"torch"},
    "cells": set(),
    "batching": {"torch"},
    "prediction": set(),
    "metrics": {"torch"},
    "media": {"torch"},
    "micro_batches": {"torch"},
    "budget_warning": set(),
    "sequence_parallel": {"torch"},
    "heads": {"torch"},
    "families": {"transformers", "packaging"},
    "mixers": {"torch"},
    "layer_call": {"torch", "transformers"},
    "models": {"torch", "transformers"},
    "router": {"torch", "transformers"},
    "patched_call": {"torch"},
    "patched_forward": {"torch", "transformers"},
    "patched_attention": {"torch"},
    "qwen_model_patcher": {"torch", "transformers"},
    "qwen_attention_patcher": {"torch"},
    "value_models": {"torch", "transformers"},
    "verl_rows": {"torch", "tensordict"},
    "summary": {"transformers"},
    "shuffling": {"torch", "tensordict", "verl"},
    "actor_options": {"torch", "verl"},
    "distillation": {"torch", "tensordict", "verl"},
    "verl_config": {"omegaconf", "transformers", "verl"},
    "padded_batch": {"torch", "tensordict", "transformers", "verl"},
    "standalone": {"torch", "tensordict", "transformers", "verl"},
    "data_proto": {"torch", "tensordict", "verl"},
    "engine": {"torch", "tensordict", "verl"},
    "actor": {"torch", "tensordict", "transformers", "verl"},
    "critic": {"torch", "tensordict", "verl"},
    "throughput": set(),
    "update_counts": set(),
    "ratio_warning": set(),
    "row_keys": set(),
    "placement": {"torch", "tensordict", "verl"},
    "trainer": {"torch", "tensordict", "verl"},
    "detach": {"torch", "verl"},
    "nodes": set(),
    "plugin": set(),
    "verify_request": set(),
    "measuring": {"torch"},
    "equivalence": {"torch", "transformers"},
    "checkpoint": {"torch", "transformers", "huggingface_hub", "safetensors", "httpx"},
    "known_models": {"transformers"},
    "planning": set(),
    "advice": set(),
    "rollouts": set(),
    "analysis": set(),
    "drawing": {"torch"},
    "charts": set(),
    "layer_loading": {"torch", "transformers", "huggingface_hub", "safetensors"},
    "layerwise": {"torch", "transformers"},
    "verify": {"torch", "transformers"},
    "benchmark": {"torch", "transformers"},
    "findings": set(),
    "installation": set(),
    "registration": set(),
    "machine": set(),
    "model_support": set(),
    "doctor": set(),
    "commands": set(),
    "commands.terminal": {"typer", "rich"},
    "commands.dumps": {"typer"},
    "commands.model_options": {"typer"},
    "commands.doctor": {"typer", "rich"},
    "commands.plan": {"typer", "rich"},
    "commands.analyze": {"typer", "rich"},
    "commands.show": {"typer", "rich"},
    "commands.verify": {"typer", "rich"},
    "commands.bench": {"typer", "rich"},
    "cli": {"typer"},
}
# The CPU runtime knows nothing of sharing, and sharing nothing of the CPU runtime.
RUNTIME = "cpu_runtime"
RUNTIME_NEEDS = {"post_import", "refusal", "wrapping"}
RUNTIME_PACKAGES = {"torch", "transformers", "verl", "ray", "omegaconf", "tensordict", "transfer_queue"}
RUNTIME_LIGHT = {"cpu_runtime", "cpu_runtime.hooks"}  # loaded with every `import verl`

# Optional or heavy: imported inside the function that needs them.
INSIDE_FUNCTIONS: dict[str, set[str]] = {
    "estimate": {"torch", "transformers"},
    "prediction": {"torch", "verl"},
    "nodes": {"ray"},
    "installation": {"packaging"},
    "machine": {"torch", "transformers"},
    "model_support": {"transformers"},
    "rollouts": {"pyarrow", "transformers"},
    "charts": {"matplotlib", "numpy"},
    "plugin": {"packaging", "torch", "verl"},
    "engine": {"verl"},
    "actor": {"verl"},
    "placement": {"verl"},
    "trainer": {"ray", "verl"},
}

TORCH_ONLY = (
    "",
    ".grouping",
    ".forest",
    ".packing",
    ".prefixes",
    ".padded_plan",
    ".varlen",
    ".flash_kernels",
    ".attention_kernels",
    ".merge",
    ".attention",
    ".linear_attention",
    ".log_probs",
    ".memory",
    ".estimate",
    ".reconstruct",
    ".flops",
    ".masks",
    ".interleaved",
    ".zorro_train",
    ".cells",
    ".batching",
    ".prediction",
    ".rollouts",
    ".analysis",
    ".drawing",
    ".metrics",
    ".media",
    ".micro_batches",
    ".budget_warning",
    ".sequence_parallel",
    ".heads",
    ".measuring",
)
BLOCKED = ("verl", "transformers", "flash_attn", "fla", "triton", "ray", "tensordict", "numpy", "hydra", "omegaconf")


class Import(NamedTuple):
    module: str  # dotted, as written
    line: int
    at_top: bool


def module_names() -> list[str]:
    paths = sorted(PACKAGE.rglob("*.py"))
    names = (path.relative_to(PACKAGE).with_suffix("").as_posix().replace("/", ".") for path in paths)
    return [name.removesuffix(".__init__") for name in names]


def source(name: str) -> Path:
    path = PACKAGE / name.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def imports(name: str) -> Iterator[Import]:
    """Every import statement of a module; those under `if TYPE_CHECKING:` run never and count as inside a function."""

    def visit(node: ast.AST, at_top: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from (Import(alias.name, child.lineno, at_top) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{name}:{child.lineno} is a relative import"
                names = [alias.name for alias in child.names]
                submodules = [n for n in names if source_exists(f"{child.module}.{n}")]
                yield from (Import(f"{child.module}.{n}", child.lineno, at_top) for n in submodules)
                if len(submodules) < len(names):
                    yield Import(child.module, child.lineno, at_top)
            else:
                lazy = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or (
                    isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test)
                )
                yield from visit(child, at_top and not lazy)

    yield from visit(ast.parse(source(name).read_text()), True)


def source_exists(dotted: str) -> bool:
    return dotted.startswith("zorro_verl.") and source(dotted.removeprefix("zorro_verl.")).exists()


def own(imported: Import) -> str | None:
    """The module of this package that is imported, or None."""
    root, _, name = imported.module.partition(".")
    return (name or "__init__") if root == "zorro_verl" else None


def third_party(imported: Import) -> str | None:
    root = imported.module.partition(".")[0]
    return None if root in sys.stdlib_module_names or root == "zorro_verl" else root


def in_runtime(name: str) -> bool:
    return name.partition(".")[0] == RUNTIME


def test_every_module_has_its_line_in_the_table():
    core = {name for name in module_names() if not in_runtime(name)}
    assert core == set(MODULES)


@pytest.mark.parametrize("name", module_names())
def test_imports_inside_the_package_go_one_way(name):
    order = list(MODULES)
    for imported in imports(name):
        target = own(imported)
        if target is None:
            continue
        where = f"{name}:{imported.line} imports {target}"
        if in_runtime(name):
            assert in_runtime(target) or target in RUNTIME_NEEDS, where
        elif in_runtime(target):
            assert name == "plugin", where
        elif imported.at_top or name != "plugin":  # the plug-in loads all the others, when verl is ready for them
            assert order.index(target) < order.index(name), where


@pytest.mark.parametrize("name", module_names())
def test_third_party_imports_stand_where_they_belong(name):
    if in_runtime(name):
        at_top = set() if name in RUNTIME_LIGHT else RUNTIME_PACKAGES
        inside = RUNTIME_PACKAGES
    else:
        at_top = MODULES[name]
        inside = at_top | INSIDE_FUNCTIONS.get(name, set())
    for imported in imports(name):
        root = third_party(imported)
        allowed = at_top if imported.at_top else inside
        assert root is None or root in allowed, f"{name}:{imported.line} imports {root}"


def run_fresh(code: str) -> str:
    """Standard output of ``code`` in a new process in which the blocked packages cannot be imported."""
    prelude = (
        "import sys\n"
        f"BLOCKED = {set(BLOCKED)!r}\n"
        "class Blocker:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in BLOCKED:\n"
        "            raise ModuleNotFoundError(f'{name} is blocked in this test', name=name)\n"
        "sys.meta_path.insert(0, Blocker())\n"
    )
    return run_python(prelude + code)


def run_python(code: str) -> str:
    """Standard output of ``code`` in a new process."""
    command = [sys.executable, "-c", code]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def test_the_core_imports_torch_and_nothing_else():
    modules = ", ".join(f"zorro_verl{name}" for name in TORCH_ONLY)
    added = run_fresh(
        "import torch\n"
        "roots = lambda: {name.partition('.')[0] for name in sys.modules}\n"
        "before = roots()\n"
        f"import {modules}\n"
        "print(*sorted(roots() - before - set(sys.stdlib_module_names)))\n"
    )
    assert added.split() == ["zorro_verl"]


def test_the_package_itself_and_the_plug_in_do_without_torch():
    loaded = run_fresh(
        "BLOCKED.add('torch')\n"
        "import zorro_verl, zorro_verl.plugin\n"
        "print(*(name for name in sys.modules if name.startswith('zorro_verl')))\n"
    )
    assert "zorro_verl.plugin" in loaded.split()
    assert "zorro_verl.actor" not in loaded.split()


def test_every_exported_name_is_there():
    """A list in ``__all__`` that names what isn't there breaks `from zorro_verl import *` for everyone."""
    names = run_python("from zorro_verl import *; print(*sorted(n for n in dir() if not n.startswith('_')))").split()
    assert names == sorted(set(zorro_verl.__all__) - {"__version__"})
    assert set(zorro_verl.__all__) <= set(dir(zorro_verl))
    with pytest.raises(AttributeError, match="no attribute 'Qwen3ModelTwicePatcher'"):
        zorro_verl.Qwen3ModelTwicePatcher  # noqa: B018
