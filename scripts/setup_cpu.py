"""Bring `.venv` to what `requirements/cpu.lock.txt` says; returns at once when it is already so.

Standard library only, so that any Python of the right version can run it. Safe to run again after an interruption, and
safe to run twice at the same time.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
LOCK = ROOT / "requirements" / "cpu.lock.txt"
STAMP = VENV / "setup.stamp"
OLDEST, TOO_NEW = (3, 11), (3, 13)
PIP_INSTALL = (str(PYTHON), "-m", "pip", "install", "-qq", "--no-input", "--disable-pip-version-check")


def normal_name(name: str) -> str:
    """One spelling of a distribution's name: `typing_extensions` and `Typing.Extensions` are one."""
    return re.sub(r"[-_.]+", "-", name).lower()


def locked() -> dict[str, str]:
    """Name -> version of every line of the lock file."""
    lines = (line.partition("#")[0].strip() for line in LOCK.read_text().splitlines())
    pairs = (line.split("==") for line in lines if line)
    return {normal_name(name): version for name, version in pairs}


def dist_infos() -> list[Path]:
    return sorted(VENV.glob("lib/python3.*/site-packages/*.dist-info"))


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


def lacking() -> list[str]:
    """What the lock file and this project ask for and `.venv` does not hold whole."""
    held = {}
    for dist_info in dist_infos():
        name, _, version = dist_info.stem.partition("-")
        if is_whole(dist_info):
            held[normal_name(name)] = version.partition("+")[0]
    wrong = [f"{name}=={version}" for name, version in locked().items() if held.get(name) != version]
    return wrong if "zorro-verl" in held else [*wrong, "zorro-verl"]


def fingerprint() -> str:
    """Changes whenever what this script would install changes."""
    digest = hashlib.sha256()
    for path in (LOCK, ROOT / "pyproject.toml", Path(__file__)):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def in_order() -> bool:
    return STAMP.is_file() and STAMP.read_text() == fingerprint() and is_usable() and not lacking()


def is_usable() -> bool:
    """Whether `.venv` has a Python of the right version that starts, has pip, and was made for this very folder."""
    pip = VENV / "bin" / "pip"
    if not pip.is_file() or str(VENV) not in pip.read_text()[:1000]:
        return False
    question = f"import sys; sys.exit(not {OLDEST} <= sys.version_info[:2] < {TOO_NEW})"
    try:
        return subprocess.run([PYTHON, "-I", "-S", "-c", question], capture_output=True).returncode == 0
    except OSError:
        return False


@contextlib.contextmanager
def phase(what: str) -> Iterator[None]:
    print(f"[setup] {what} ...", flush=True)
    start = time.monotonic()
    yield
    print(f"[setup] {what}: {time.monotonic() - start:.0f} s", flush=True)


def run(*command: str | Path) -> None:
    subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, check=True)


def install() -> None:
    """Make what is missing. What was installed in part is forgotten first, so that pip installs it over the remains."""
    STAMP.unlink(missing_ok=True)
    if not is_usable():
        with phase(f"environment with Python {sys.version_info.major}.{sys.version_info.minor}"):
            run(sys.executable, "-m", "venv", "--clear", VENV)
    for dist_info in dist_infos():
        if not is_whole(dist_info):
            shutil.rmtree(dist_info)
    torch = f"torch=={locked()['torch']}"
    # With its dependencies: a build for an accelerator brings libraries that the lock file cannot name.
    with phase(torch):
        run(*PIP_INSTALL, "--no-warn-conflicts", "--constraint", LOCK, torch)
    with phase(f"the other {len(locked()) - 1} packages of {LOCK.relative_to(ROOT)}"):
        run(*PIP_INSTALL, "--no-deps", "--requirement", LOCK)
    with phase("zorro-verl from this folder"):
        run(*PIP_INSTALL, "--no-deps", "--no-build-isolation", "--editable", ROOT)
    with phase("check"):
        run(PYTHON, "-m", "pip", "check")
        if missing := lacking():
            raise SystemExit(f"[setup] pip reported success, but these are not installed whole: {', '.join(missing)}")
    STAMP.write_text(fingerprint())


def main() -> None:
    if not OLDEST <= sys.version_info[:2] < TOO_NEW:
        raise SystemExit(
            f"[setup] the lock file is for Python 3.11 and 3.12, this is {platform.python_version()}: "
            "make setup PYTHON=/path/to/python3.11"
        )
    with LOCK.open() as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("[setup] waiting for another set-up of this folder", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        if in_order():
            return
        try:
            install()
        except subprocess.CalledProcessError as error:
            command = shlex.join(map(str, error.cmd))
            raise SystemExit(f"[setup] this failed: {command}\n[setup] `make setup` goes on from here") from None
    print(f"[setup] {VENV.name} is ready", flush=True)


if __name__ == "__main__":
    main()
