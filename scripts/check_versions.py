"""Run the model tests under other versions of transformers than the environment's.

    python scripts/check_versions.py                        # the ends of the supported range, and one in between
    python scripts/check_versions.py --versions 5.5.3 -- -k qwen3_5 -x

Each version is laid into a folder of its own below .versions, which stands before the environment on the path; all else
is the environment's. A folder that is there is used again.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
OVERLAYS = ROOT / ".versions"
VERSIONS = ("5.5.3", "5.9.0", "5.10.4")
TESTS = (
    "test_models.py",
    "test_family.py",
    "test_windows.py",
    "test_linear_attention.py",
    "test_router.py",
    "test_patched_family.py",
    "test_model_patcher.py",
    "test_attention_patcher.py",
    "test_verify.py",
)


@dataclass(frozen=True)
class Result:
    version: str
    passed: int
    failed: int
    skipped: int
    seconds: float
    complete: bool  # pytest came to its end, and ran something

    @property
    def good(self) -> bool:
        return self.complete and not self.failed


def overlay(version: str) -> Path:
    """The folder that holds this version alone, made when it is not there."""
    folder = OVERLAYS / version
    if not list(folder.glob(f"transformers-{version}.dist-info/RECORD")):
        shutil.rmtree(folder, ignore_errors=True)
        pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-input", "--disable-pip-version-check")
        subprocess.run((*pip, "--no-deps", "--target", folder, f"transformers=={version}"), check=True)
    return folder


def unmet(folder: Path) -> list[str]:
    """What the version in the folder asks for and the environment does not hold."""
    (distribution,) = importlib.metadata.distributions(path=[str(folder)], name="transformers")
    requirements = (Requirement(line) for line in distribution.requires or ())
    return [
        f"{r} (found {found})"
        for r in requirements
        if r.marker is None and not r.specifier.contains(found := importlib.metadata.version(r.name), prereleases=True)
    ]


def environment(version: str) -> dict[str, str]:
    """The variables under which this version is what `import transformers` finds."""
    # Two files at a time on two cores: with a thread for each core the processes get in each other's way.
    variables = {"OMP_NUM_THREADS": "1"} | os.environ
    if version != importlib.metadata.version("transformers"):
        folder = overlay(version)
        if lacking := unmet(folder):
            raise SystemExit(f"transformers {version} needs what this environment does not hold: {', '.join(lacking)}")
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, (str(folder), variables.get("PYTHONPATH"))))
    question = (sys.executable, "-c", "import transformers; print(transformers.__version__)")
    found = subprocess.run(question, env=variables, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    if found != version:
        raise SystemExit(f"expected to import transformers {version}, got {found}")
    return variables


def run_tests(version: str, tests: Sequence[Path], pytest_arguments: Sequence[str]) -> Result:
    """Run the tests under one version; their output goes to standard output."""
    variables = environment(version)
    report = OVERLAYS / f"{version}.xml"
    OVERLAYS.mkdir(exist_ok=True)
    report.unlink(missing_ok=True)
    two_files_at_a_time = ("-n", "2", "--dist", "loadfile")
    command = (sys.executable, "-m", "pytest", "-q", *two_files_at_a_time, f"--junitxml={report}", *tests)
    start = time.monotonic()
    finished = subprocess.run((*command, *pytest_arguments), cwd=ROOT, env=variables)
    seconds = time.monotonic() - start
    if not report.is_file():
        return Result(version, 0, 0, 0, seconds, complete=False)
    suite = ElementTree.parse(report).getroot().find("testsuite")
    total, skipped = int(suite.get("tests")), int(suite.get("skipped"))
    failed = int(suite.get("failures")) + int(suite.get("errors"))
    passed = total - failed - skipped
    return Result(version, passed, failed, skipped, seconds, complete=finished.returncode in (0, 1) and passed > 0)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--versions", nargs="+", default=VERSIONS, metavar="VERSION", help="of transformers")
    parser.add_argument("pytest", nargs="*", metavar="-- ARGUMENT", help="passed to pytest")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    tests = [ROOT / "tests" / name for name in TESTS]
    results = []
    for version in options.versions:
        print(f"\n== transformers {version}", flush=True)
        results.append(run_tests(version, tests, options.pytest))
    print("\n| transformers | passed | failed | skipped | seconds | |\n|---|---|---|---|---|---|")
    for r in results:
        verdict = "ok" if r.good else "FAILED" if r.complete else "DID NOT RUN"
        print(f"| {r.version} | {r.passed} | {r.failed} | {r.skipped} | {r.seconds:.0f} | {verdict} |")
    return 0 if all(r.good for r in results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
