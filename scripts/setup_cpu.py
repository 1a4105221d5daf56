"""Bring `.venv` to what `requirements/cpu.lock.txt` says; returns at once when it is already so.

Standard library only, so that any Python of the right version can run it. Safe to run again after an interruption, and
safe to run twice at the same time.
"""

from __future__ import annotations

import platform
import sys

from virtual_environment import ROOT, VirtualEnvironment, fingerprint, phase, pins, run, set_up

LOCK = ROOT / "requirements" / "cpu.lock.txt"
OLDEST, TOO_NEW = (3, 11), (3, 13)
ENVIRONMENT = VirtualEnvironment(ROOT / ".venv", pins(LOCK), ("zorro-verl",), OLDEST, TOO_NEW)


def install() -> None:
    torch = f"torch=={ENVIRONMENT.wanted['torch']}"
    # With its dependencies: a build for an accelerator brings libraries that the lock file cannot name.
    with phase(torch):
        ENVIRONMENT.install("--no-warn-conflicts", "--constraint", LOCK, torch)
    with phase(f"the other {len(ENVIRONMENT.wanted) - 1} packages of {LOCK.relative_to(ROOT)}"):
        ENVIRONMENT.install("--no-deps", "--requirement", LOCK)
    with phase("zorro-verl from this folder"):
        ENVIRONMENT.install("--no-deps", "--no-build-isolation", "--editable", ROOT)
    with phase("check"):
        run(ENVIRONMENT.python, "-m", "pip", "check")
        ENVIRONMENT.check()


def main() -> None:
    if not OLDEST <= sys.version_info[:2] < TOO_NEW:
        raise SystemExit(
            f"[setup] the lock file is for Python 3.11 and 3.12, this is {platform.python_version()}: "
            "make setup PYTHON=/path/to/python3.11"
        )
    mark = fingerprint(LOCK, ROOT / "pyproject.toml", __file__)
    set_up(ENVIRONMENT, LOCK, mark, install, again="make setup")


if __name__ == "__main__":
    main()
