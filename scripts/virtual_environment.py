"""A virtual environment: what it holds whole, whether it can be used, and how a set-up of it runs.

Standard library only, so that any Python can run it. A set-up is safe to run again after an interruption, and safe to
run twice at the same time.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def normal_name(name: str) -> str:
    """One spelling of a distribution's name: `typing_extensions` and `Typing.Extensions` are one."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(path: Path) -> dict[str, str]:
    """Name -> version of every line of a lock file."""
    lines = (line.partition("#")[0].strip() for line in path.read_text().splitlines())
    pairs = (line.split("==") for line in lines if line)
    return {normal_name(name): version for name, version in pairs}


def fingerprint(*paths: Path | str) -> str:
    """Changes whenever one of these files or this one does."""
    digest = hashlib.sha256()
    for path in (*paths, __file__):
        digest.update(Path(path).read_bytes())
    return digest.hexdigest()


def is_whole(dist_info: Path) -> bool:
    """Whether every file that pip recorded is there in full size. An interrupted install lacks RECORD, its last."""
    record = dist_info / "RECORD"
    if not record.is_file():
        return False
    for line in record.read_text().splitlines():
        name, _, size = line.rsplit(",", 2)
        if not size or "/__pycache__/" in name:  # RECORD itself and compiled files, which pip makes anew
            continue
        try:
            if (dist_info.parent / name.strip('"')).stat().st_size != int(size):
                return False
        except OSError:
            return False
    return True


def not_held(wanted: Mapping[str, str], dist_infos: list[Path]) -> list[str]:
    """What is wanted, as ``name==version``, and not among these in whole. A wanted ``2.13.0`` takes ``2.13.0+cpu``."""
    held = set()
    for dist_info in filter(is_whole, dist_infos):
        name, _, version = dist_info.stem.partition("-")
        held |= {(normal_name(name), version), (normal_name(name), version.partition("+")[0])}
    return [f"{name}=={version}" for name, version in wanted.items() if (name, version) not in held]


@dataclass(frozen=True)
class VirtualEnvironment:
    """An environment as it should be.

    Attributes:
        folder: where it lies.
        wanted: name -> version of what comes from an index.
        projects: names of what comes from folders of this repository, in any version.
        oldest, too_new: its Python is at least the one and below the other; by default the one that runs this.
    """

    folder: Path
    wanted: Mapping[str, str]
    projects: tuple[str, ...] = ()
    oldest: tuple[int, ...] = sys.version_info[:3]
    too_new: tuple[int, ...] = (*sys.version_info[:2], sys.version_info[2] + 1)

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def stamp(self) -> Path:
        """Holds the fingerprint of the last set-up that came to its end."""
        return self.folder / "setup.stamp"

    def dist_infos(self) -> list[Path]:
        return sorted(self.folder.glob("lib/python3.*/site-packages/*.dist-info"))

    def lacking(self) -> list[str]:
        """What is asked for and not held whole."""
        infos = self.dist_infos()
        names = {normal_name(info.stem.partition("-")[0]) for info in infos if is_whole(info)}
        return not_held(self.wanted, infos) + [name for name in self.projects if name not in names]

    def is_usable(self) -> bool:
        """Whether there is a Python of a right version that starts, and pip, made for this very folder."""
        pip = self.folder / "bin" / "pip"
        if not pip.is_file() or str(self.folder) not in pip.read_text()[:1000]:
            return False
        question = f"import sys; sys.exit(not {self.oldest} <= sys.version_info[:3] < {self.too_new})"
        try:
            return subprocess.run([self.python, "-I", "-S", "-c", question], capture_output=True).returncode == 0
        except OSError:
            return False

    def in_order(self, fingerprint: str) -> bool:
        stamped = self.stamp.is_file() and self.stamp.read_text() == fingerprint
        return stamped and self.is_usable() and not self.lacking()

    def prepare(self) -> None:
        """A Python where there is none to use. What was installed in part is forgotten: pip installs it once more."""
        self.stamp.unlink(missing_ok=True)
        if not self.is_usable():
            with phase(f"environment with Python {sys.version_info.major}.{sys.version_info.minor}"):
                run(sys.executable, "-m", "venv", "--clear", self.folder)
        for dist_info in self.dist_infos():
            if not is_whole(dist_info):
                shutil.rmtree(dist_info)

    def install(self, *arguments: str | Path, **variables: str) -> None:
        """``pip install`` with these arguments, and these variables added to pip's environment."""
        pip = (self.python, "-m", "pip", "install", "-qq", "--no-input", "--disable-pip-version-check")
        run(*pip, *arguments, **variables)

    def check(self) -> None:
        if missing := self.lacking():
            raise SystemExit(f"[setup] pip reported success, but these are not installed whole: {', '.join(missing)}")


def set_up(
    environment: VirtualEnvironment, lock: Path, fingerprint: str, install: Callable[[], None], again: str
) -> None:
    """Install what is missing, and return at once when nothing is.

    Args:
        environment: what is to be brought into order.
        lock: the file that says what it holds; only one set-up that reads it runs at a time.
        fingerprint: of all that decides what is installed.
        install: does it.
        again: the command that goes on after a failure.

    Raises:
        SystemExit: a command failed.
    """
    with lock.open() as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("[setup] waiting for another set-up of this folder", flush=True)
            fcntl.flock(held, fcntl.LOCK_EX)
        if environment.in_order(fingerprint):
            return
        try:
            environment.prepare()
            install()
        except subprocess.CalledProcessError as error:
            command = shlex.join(map(str, error.cmd))
            raise SystemExit(f"[setup] this failed: {command}\n[setup] `{again}` goes on from here") from None
        environment.stamp.write_text(fingerprint)
    print(f"[setup] {environment.folder.relative_to(ROOT)} is ready", flush=True)


@contextlib.contextmanager
def phase(what: str) -> Iterator[None]:
    print(f"[setup] {what} ...", flush=True)
    start = time.monotonic()
    yield
    print(f"[setup] {what}: {time.monotonic() - start:.0f} s", flush=True)


def run(*command: str | Path, **variables: str) -> None:
    subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, check=True, env={**os.environ, **variables})
