"""Which packages this Python has, whether they can be imported, and which versions this one works with."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import platform
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError
from types import ModuleType
from typing import TYPE_CHECKING

import zorro_verl
from zorro_verl.findings import Findings, described

if TYPE_CHECKING:
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet

OURS = "zorro-verl"
# Brings each of `NEEDED`, in a version that fits.
REINSTALL = f"pip install --force-reinstall '{OURS}[verl]'"
# In the order in which one needs the other; a missing one is said once.
NEEDED = ("torch", "transformers", "ray", "verl")
# Of the project's own environment; others that `requires-python` allows are untested.
TESTED_PYTHON = ("3.11", "3.12")
# Distributions of optional kernels whose module has another name.
OPTIONAL = (("triton", "triton"), ("flash-linear-attention", "fla"), ("causal-conv1d", "causal_conv1d"))


def examine_python(findings: Findings) -> None:
    """Version, against what the package asks for and is tested with."""
    version = platform.python_version()
    ours = distribution()
    expected = None if ours is None else ours.metadata["Requires-Python"]
    findings.fact("packages", "Python", version, expected)
    if expected is not None and not allows(expected, version):
        findings.problem("Python", f"Python: expected {expected}, got {version}; make an environment with a newer one")
    elif version.rpartition(".")[0] not in TESTED_PYTHON:
        findings.note(f"Python {version} is untested: the project's own environment has {' or '.join(TESTED_PYTHON)}")


def examine_package(name: str, findings: Findings) -> None:
    """One of `NEEDED`: there, in range, and whole."""
    expected = requirement_of(name)
    wanted = f"{name}{expected or ''}"
    mend = f"pip install '{wanted}'"
    if importlib.util.find_spec(name) is None:
        findings.fact("packages", name, None, expected)
        findings.problem(name, f"{name}: expected {expected or 'to be installed'}, got none; {_install(name, mend)}")
        return
    recorded = recorded_version(name)
    try:
        module = importlib.import_module(name)
    except Exception as error:  # whatever a broken installation raises
        findings.fact("packages", name, f"{recorded or 'unknown version'}, which can't be imported", expected)
        lacking = error.name if isinstance(error, ModuleNotFoundError) else None
        if lacking is None or not findings.hinders(lacking.partition(".")[0]):  # else it is said there
            mend = f"pip install {lacking}" if lacking else f"pip install --force-reinstall '{wanted}'"
            findings.problem(
                name, f"{name}: expected to be importable, got {described(error)}; {_advice(lacking, mend)}"
            )
        return
    version = version_of(module) or recorded
    findings.fact("packages", name, version or "unknown version", expected)
    if version and expected and not allows(expected, version):
        findings.problem(name, f"{name}: expected {expected}, got {version}; {mend}")
    elif version and recorded and not _alike(version, recorded):
        findings.note(
            f"{name} {version} is imported, from {module.__file__}, and pip has {recorded} on record: two installations"
        )


def examine_requirements(findings: Findings) -> None:
    """What this package and veRL's trainer need besides, by what pip has on record."""
    ours = distribution()
    if ours is None:
        findings.problem(
            "plug-in",
            f"{OURS}: expected to be installed in this Python, got none (imported from {_place()}), so that veRL "
            f"doesn't know it; pip install {OURS}, or `pip install -e .` in a clone",
        )
        return
    for requirement in requirements("", "verl"):
        if requirement.name in NEEDED:
            continue
        version = recorded_version(requirement.name)
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            findings.problem(
                "requirements",
                f"{requirement.name}: expected {requirement.specifier or 'to be installed'}, got {version or 'none'}; "
                f"pip install '{OURS}[verl]'",
            )


def examine_optional(findings: Findings) -> None:
    """Packages that linear attention and merging run on where there is a GPU."""
    for name, module in OPTIONAL:
        found = importlib.util.find_spec(module) is not None
        version = (recorded_version(name) or "unknown version") if found else None
        expected = requirement_of(name)
        findings.fact("kernels", name, version, expected)
        if version is not None and recorded_version(name) and expected and not allows(expected, version):
            findings.note(
                f"{name} {version} is untested: this package expects {expected}; pip install '{name}{expected}'"
            )


def distribution() -> Distribution | None:
    """What pip has on record of this package: the first on the path, which is the one that is imported."""
    try:
        return importlib.metadata.distribution(OURS)
    except PackageNotFoundError:
        return None


def requirements(*extras: str) -> Iterator[Requirement]:
    """What this package requires under each of ``extras``; none when it is not installed."""
    from packaging.requirements import Requirement

    ours = distribution()
    for line in (ours.requires if ours else None) or ():
        requirement = Requirement(line)
        if requirement.marker is None and "" in extras:
            yield requirement
        elif requirement.marker is not None and any(requirement.marker.evaluate({"extra": x}) for x in extras if x):
            yield requirement


def requirement_of(name: str) -> str | None:
    """The versions of a package that this one works with, in the notation of pip; veRL says which Ray it does."""
    from packaging.requirements import Requirement

    known = [*requirements("", "verl", "triton", "fla", "flash")]
    if recorded_version("verl"):
        known += map(Requirement, importlib.metadata.requires("verl") or ())
    found = next((each.specifier for each in known if each.name == name), None)
    return _in_order(found) if found else None


def _in_order(specifiers: SpecifierSet) -> str:
    """From the oldest version to the newest, as a person would write it."""
    from packaging.version import Version

    return ",".join(map(str, sorted(specifiers, key=lambda one: Version(one.version.removesuffix(".*")))))


def recorded_version(name: str) -> str | None:
    """By pip's records; None for what was built in place, or is not there."""
    try:
        return importlib.metadata.version(name)
    except PackageNotFoundError:
        return None


def version_of(module: ModuleType) -> str | None:
    """What a module says of itself."""
    version = getattr(module, "__version__", None)
    return None if version is None else str(version)


def allows(expected: str, version: str) -> bool:
    """Whether a version lies in a range."""
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(expected).contains(version, prereleases=True)


def _alike(version: str, other: str) -> bool:
    from packaging.version import Version

    return Version(version).public == Version(other).public  # without the build, such as +cpu


def _install(name: str, alone: str) -> str:
    """veRL alone lacks what its trainer imports, and a torch for CUDA comes from its own index."""
    if name in ("ray", "verl"):
        return f"pip install '{OURS}[verl]'"
    return alone


def _advice(lacking: str | None, mend: str) -> str:
    import os

    modules = os.environ.get("VERL_USE_EXTERNAL_MODULES", "")
    if lacking is not None and lacking in modules.split(","):
        return f"take {lacking} out of VERL_USE_EXTERNAL_MODULES={modules}, or install it"
    return mend


def _place() -> str:
    return str(zorro_verl.__path__[0])
