"""The environments that contestants run in, and how those beside `.venv` are made."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from virtual_environment import ROOT, VirtualEnvironment, fingerprint, not_held, phase, pins, run, set_up

AGAIN = "python scripts/bench_peers.py --setup"
REQUIREMENTS = ROOT / "requirements"
SCRIPTS = ROOT / "scripts"


@dataclass(frozen=True)
class OwnEnvironment:
    """The one that runs this."""

    python: Path = Path(sys.executable)
    path: tuple[Path, ...] = (SCRIPTS, ROOT)  # what its contestants import from, before what is installed

    def lacking(self) -> Sequence[str]:
        """What a contestant in it would miss."""
        return ()

    def set_up(self) -> None:
        """Install what is missing."""


@dataclass(frozen=True)
class Overlay:
    """The one that runs this, and a folder of more packages before it. They have to need nothing else."""

    folder: Path
    requirements: Path
    python: Path = Path(sys.executable)

    @property
    def path(self) -> tuple[Path, ...]:
        return self.folder, SCRIPTS, ROOT

    def lacking(self) -> Sequence[str]:
        return not_held(pins(self.requirements), sorted(self.folder.glob("*.dist-info")))

    def set_up(self) -> None:
        if self.lacking():
            with phase(f"{self.folder.relative_to(ROOT)}"):
                pip = (self.python, "-m", "pip", "install", "-qq", "--no-input", "--disable-pip-version-check")
                options = ("--no-deps", "--upgrade", "--target", self.folder)
                try:
                    run(*pip, *options, "--requirement", self.requirements)
                except subprocess.CalledProcessError as error:
                    raise SystemExit(f"[setup] this failed: {shlex.join(map(str, error.cmd))}") from None


@dataclass(frozen=True)
class ArcticEnvironment:
    """A virtual environment with the published package and the release of transformers that it asks for."""

    folder: Path = ROOT / ".versions" / "peers-arctic"
    requirements: Path = REQUIREMENTS / "peers-arctic.txt"
    path: tuple[Path, ...] = (SCRIPTS,)

    @property
    def environment(self) -> VirtualEnvironment:
        return VirtualEnvironment(self.folder, pins(self.requirements))

    @property
    def python(self) -> Path:
        return self.environment.python

    @property
    def mark(self) -> str:
        return fingerprint(self.requirements, __file__)

    def lacking(self) -> Sequence[str]:
        return self.environment.lacking() if self.environment.is_usable() else ["its Python"]

    def set_up(self) -> None:
        set_up(self.environment, self.requirements, self.mark, self.install, again=AGAIN)

    def install(self) -> None:
        environment = self.environment
        packages = dict(environment.wanted)
        torch, deepspeed = (f"{name}=={packages.pop(name)}" for name in ("torch", "deepspeed"))
        with phase(torch):
            environment.install("--no-warn-conflicts", "--constraint", self.requirements, torch)
        with phase(f"the other {len(packages)} packages of {self.requirements.relative_to(ROOT)}"):
            environment.install("--no-deps", *(f"{name}=={version}" for name, version in packages.items()))
        with phase(deepspeed):  # from source, which imports torch; none of its kernels is compiled
            environment.install("--no-deps", "--no-build-isolation", deepspeed, DS_BUILD_OPS="0")
        environment.check()


Environment = OwnEnvironment | Overlay | ArcticEnvironment
OWN = OwnEnvironment()
PREFIX_GROUPER = Overlay(ROOT / ".versions" / "peers-prefix-grouper", REQUIREMENTS / "peers-prefix-grouper.txt")
ARCTIC = ArcticEnvironment()
