"""Build the wheel and the sdist into dist/ from the files that git tracks, and try both as a user gets them.

    python scripts/build_dist.py                    # a minute; needs the index, for typer, rich, packaging, setuptools
    python scripts/build_dist.py --dependencies     # also with torch, transformers and whatever they bring: gigabytes

Each is installed by pip into a virtual environment of its own that has nothing else in it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# What the command line needs to say its version and its help, and `doctor` to say what is missing.
LIGHT = ("typer>=0.12", "rich>=13", "packaging")
IN_SDIST = ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
CONFIGS = """
import sys; sys.path.insert(0, sys.argv[1])
from hydra import initialize_config_module
from hydra.core.global_hydra import GlobalHydra
import zorro_verl.configs
with initialize_config_module("zorro_verl.configs", version_base=None):
    print(zorro_verl.configs.__file__, *GlobalHydra.instance().config_loader().get_group_options("actor"))
"""
PLUG_IN = """
from importlib.metadata import entry_points
(plug_in,) = entry_points(group="verl.plugins", name="zorro")
print(plug_in.load().__file__)
"""


class DistError(Exception):
    """What is wrong with a build, in a line."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="the folder for both (default: dist)")
    parser.add_argument("--dependencies", action="store_true", help="install all that the package requires, too")
    arguments = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory(prefix="zorro-verl-dist-") as folder:
            make(arguments.out.resolve(), Path(folder), arguments.dependencies)
    except DistError as error:
        print(f"[dist] {error}", file=sys.stderr)
        return 1
    return 0


def make(out: Path, work: Path, dependencies: bool) -> None:
    """Build into ``out`` and check everything, with ``work`` for what goes away."""
    source = work / "source"
    copied, left_out = copy_tracked(source)
    say(f"{copied} tracked files" + (f"; NOT in it: {left_out} files that git does not track yet" if left_out else ""))
    wheel, sdist = build(source, work / "built")
    check_wheel(wheel, source)
    say(f"{wheel.name}: package, configs and py.typed, nothing else")
    check_sdist(sdist, source)
    again, _ = build(source, work / "again", "--wheel")
    if contents(wheel) != contents(again):
        raise DistError(f"{sdist.name}: the wheel that it builds differs from the one that the repository builds")
    say(f"{sdist.name}: package, configs and {', '.join(IN_SDIST)}; it builds the same wheel as the repository")
    for artifact in (wheel, sdist):
        try_out(artifact, work / f"environment-{artifact.suffix[1:]}", dependencies)
        with_what = (
            "all that it requires" if dependencies else f"{', '.join(LIGHT)}; torch and transformers are left out"
        )
        say(
            f"{artifact.name}: installs into an empty environment, with {with_what}; there run --version, --help, "
            "doctor, the plug-in's entry point and Hydra's look-up of the configs"
        )
    out.mkdir(parents=True, exist_ok=True)
    for artifact in (wheel, sdist):
        shutil.copy2(artifact, out)
        say(f"wrote {out / artifact.name}")


def copy_tracked(target: Path) -> tuple[int, int]:
    """Copy what git tracks, as it stands in the working tree; how many files that are, and how many it doesn't know."""
    tracked = [name for name in git("ls-files", "-z").split("\0") if name and (ROOT / name).is_file()]
    for name in tracked:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target / name)
    return len(tracked), len([x for x in git("ls-files", "-z", "--others", "--exclude-standard").split("\0") if x])


def build(source: Path, out: Path, *options: str) -> tuple[Path, Path | None]:
    """The wheel, built from the sdist as pip would, and the sdist; with ``--wheel`` the first, of the source."""
    run(sys.executable, "-m", "build", "--no-isolation", *options, "--outdir", out, source)
    return next(out.glob("*.whl")), next(out.glob("*.tar.gz"), None)


def check_wheel(wheel: Path, source: Path) -> None:
    """Every module, config and the mark of a typed package, and nothing else."""
    expected = {name for name in names_below(source / "zorro_verl", "zorro_verl") if name.endswith((".py", "py.typed"))}
    expected |= names_below(source / "configs", "zorro_verl/configs")
    found = {name for name in contents(wheel) if ".dist-info/" not in name}
    compare(wheel, found, expected)
    if "zorro_verl/py.typed" not in found or not any(name.endswith(".yaml") for name in found):
        raise DistError(f"{wheel.name}: expected configs and zorro_verl/py.typed, got {len(found)} other files")


def check_sdist(sdist: Path, source: Path) -> None:
    """What builds the wheel, and what a reader wants beside it; no tests, scripts or docs."""
    with tarfile.open(sdist) as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    generated = {name for name in names if ".egg-info/" in name or name in ("PKG-INFO", "setup.cfg")}
    expected = names_below(source / "zorro_verl", "zorro_verl") | names_below(source / "configs", "configs")
    compare(sdist, names - generated, expected | {*IN_SDIST, "MANIFEST.in"})


def compare(artifact: Path, found: set[str], expected: set[str]) -> None:
    if lacking := sorted(expected - found):
        raise DistError(f"{artifact.name}: it lacks {', '.join(lacking)}")
    if surplus := sorted(found - expected):
        raise DistError(f"{artifact.name}: it should not have {', '.join(surplus)}")


def names_below(folder: Path, prefix: str) -> set[str]:
    return {f"{prefix}/{path.relative_to(folder).as_posix()}" for path in folder.rglob("*") if path.is_file()}


def contents(wheel: Path) -> dict[str, int]:
    """The checksum of every file in it, by name."""
    with zipfile.ZipFile(wheel) as archive:
        return {member.filename: member.CRC for member in archive.infolist()}


def try_out(artifact: Path, environment: Path, dependencies: bool) -> None:
    """Install into a new environment, and use there what can be used."""
    run(sys.executable, "-m", "venv", environment)
    python = environment / "bin" / "python"
    pip = (python, "-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input", "install")
    if dependencies:
        run(*pip, artifact)
    else:
        run(*pip, *LIGHT)
        run(*pip, "--no-deps", artifact)
    check_installed(python)


def check_installed(python: Path) -> None:
    """The command, the entry point and the configs of the package that is installed for a Python, and no other's."""
    command = python.parent / "zorro-verl"
    packages = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    version = run(python, "-c", "from importlib.metadata import version; print(version('zorro-verl'))").strip()
    expect("--version", f"zorro-verl {version}", run(command, "--version"))
    expect("--help", "doctor", run(command, "--help"))
    expect("the entry point", str(packages), run(python, "-c", PLUG_IN))
    # There is no veRL in it: doctor has to say so, with 1, and to say it as it says it elsewhere.
    expect("doctor", "pip install 'zorro-verl[verl]'", run(command, "doctor", code=1))
    # Hydra comes with veRL: this environment's, on the installed package.
    expect("Hydra", f"{packages / 'zorro_verl' / 'configs'}", run(sys.executable, "-c", CONFIGS, packages))
    expect("Hydra", "zorro_actor", run(sys.executable, "-c", CONFIGS, packages))


def expect(what: str, words: str, output: str) -> None:
    if words not in output:
        raise DistError(f"{what}: expected {words!r}, got {output.strip()!r:.300}")


def git(*arguments: str) -> str:
    return run("git", "-C", ROOT, *arguments)


def run(*command: str | Path, code: int = 0) -> str:
    """Standard output of a command, in a neutral folder and without this one on its path."""
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    finished = subprocess.run(
        [str(part) for part in command], cwd=tempfile.gettempdir(), env=clean, capture_output=True, text=True
    )
    if finished.returncode != code:
        said = (finished.stderr.strip() or finished.stdout.strip()).splitlines()[-15:]
        raise DistError("\n".join([f"{' '.join(map(str, command))} ended with {finished.returncode}:", *said]))
    return finished.stdout


def say(text: str) -> None:
    print(f"[dist] {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
