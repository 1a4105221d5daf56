"""What a user installs: wheel and sdist, in an empty environment; metadata, entry points, configs, the lock file."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from importlib.metadata import PackageNotFoundError, distribution, requires
from pathlib import Path

import build_dist
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PIP = (sys.executable, "-m", "pip", "--quiet", "--no-input", "--disable-pip-version-check")


def run(*command: str | Path, cwd: Path) -> str:
    finished = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=240)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A copy of the repository, so that no earlier build gets in and nothing is left behind."""
    source = tmp_path_factory.mktemp("source")
    skip = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for entry in ("zorro_verl", "configs", "tests", "scripts", "docs"):
        shutil.copytree(ROOT / entry, source / entry, ignore=skip)
    for entry in ("pyproject.toml", "MANIFEST.in", *build_dist.IN_SDIST):
        shutil.copy(ROOT / entry, source)
    return source


@pytest.fixture(scope="module")
def built(source, tmp_path_factory) -> tuple[Path, Path]:
    """The wheel and the sdist, built offline; the wheel from the sdist."""
    return build_dist.build(source, tmp_path_factory.mktemp("built"))


@pytest.fixture(scope="module")
def wheel(built) -> Path:
    return built[0]


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """A folder with the installed wheel, to be put on the path of a new process."""
    target = tmp_path_factory.mktemp("installed")
    run(*PIP, "install", "--no-deps", "--no-index", "--target", target, wheel, cwd=target)
    return target


def metadata_file(wheel: Path, name: str) -> str:
    with zipfile.ZipFile(wheel) as archive:
        member = next(member for member in archive.namelist() if member.endswith(f".dist-info/{name}"))
        return archive.read(member).decode()


@pytest.fixture(scope="module")
def metadata(wheel) -> Message:
    return Parser().parsestr(metadata_file(wheel, "METADATA"))


@pytest.fixture(scope="module")
def requirements(metadata) -> list[Requirement]:
    return [Requirement(line) for line in metadata.get_all("Requires-Dist")]


def test_the_wheel_holds_the_package_and_its_configs_and_nothing_else(wheel):
    expected = {path.relative_to(ROOT).as_posix() for path in (ROOT / "zorro_verl").rglob("*.py")}
    expected.add("zorro_verl/py.typed")
    for pattern in ("*.py", "*.yaml"):
        expected |= {f"zorro_verl/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / "configs").rglob(pattern)}
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert found == expected
    assert any(name.endswith(".yaml") for name in found)


def test_the_sdist_builds_the_same_wheel_as_the_repository(source, built, tmp_path):
    wheel, sdist = built
    build_dist.check_sdist(sdist, source)
    again, none = build_dist.build(source, tmp_path, "--wheel")
    assert none is None
    assert build_dist.contents(wheel) == build_dist.contents(again)


def test_the_sdist_holds_what_a_reader_wants_and_no_tests(built):
    with tarfile.open(built[1]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"} <= names
    assert "configs/actor/zorro_actor.yaml" in names
    assert not {name.partition("/")[0] for name in names} & {"tests", "scripts", "docs", "recipes", "requirements"}


def test_what_is_lacking_or_too_much_in_a_build_is_named(source, built, tmp_path):
    wheel, sdist = built
    shutil.copytree(source, tmp_path / "more")
    (tmp_path / "more" / "zorro_verl" / "forgotten.py").touch()
    (tmp_path / "more" / "zorro_verl" / "cells.py").unlink()
    with pytest.raises(build_dist.DistError, match=r"\.whl: it lacks zorro_verl/forgotten\.py$"):
        build_dist.check_wheel(wheel, tmp_path / "more")
    (tmp_path / "more" / "zorro_verl" / "forgotten.py").unlink()
    with pytest.raises(build_dist.DistError, match=r"\.tar\.gz: it should not have zorro_verl/cells\.py$"):
        build_dist.check_sdist(sdist, tmp_path / "more")


def closure(*names: str) -> set[str]:
    """Distributions that are needed for these to run here."""
    found: set[str] = set()
    waiting = [*names]
    while waiting:
        name = waiting.pop()
        try:
            required = distribution(name).requires or []
        except PackageNotFoundError:  # of another system or another Python
            continue
        if name not in found:
            found.add(name)
            lines = (Requirement(line) for line in required)
            waiting += [r.name for r in lines if r.marker is None or r.marker.evaluate({"extra": ""})]
    return found


@pytest.fixture(scope="module")
def empty_environment(tmp_path_factory) -> Path:
    """A virtual environment with what the command line needs, as links, and nothing else."""
    environment = tmp_path_factory.mktemp("empty")
    run(sys.executable, "-m", "venv", "--without-pip", environment, cwd=environment)
    (packages,) = environment.glob("lib/python*/site-packages")
    for name in closure("typer", "rich", "packaging"):
        here = distribution(name)
        for top in {file.parts[0] for file in here.files or () if file.parts[0] not in ("..", "__pycache__")}:
            (packages / top).symlink_to(here.locate_file(top))
    return environment


def test_it_installs_and_runs_in_an_empty_environment(wheel, empty_environment):
    """The wheel comes from the sdist. `make dist` lets pip install both, with what it fetches from the index."""
    python = empty_environment / "bin" / "python"
    run(*PIP, "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=empty_environment)
    build_dist.check_installed(python)


def test_name_licence_and_python(metadata):
    assert metadata["Name"] == "zorro-verl"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.10"
    assert metadata["License-File"] == "LICENSE"
    assert "Typing :: Typed" in metadata.get_all("Classifier")


def test_an_environment_with_verl_needs_nothing_more(requirements):
    """torch, transformers and what the command line needs, which transformers brings; the rest are extras."""
    required = {r.name: r.specifier for r in requirements if not r.marker}
    assert set(required) == {
        "torch",
        "transformers",
        "httpx",
        "huggingface_hub",
        "packaging",
        "rich",
        "safetensors",
        "typer",
    }
    assert str(required["torch"]) == ">=2.11"
    in_verl = (Requirement(line) for line in requires("verl"))
    assert required["transformers"] == next(r.specifier for r in in_verl if r.name == "transformers" and not r.marker)


def test_extras(metadata):
    assert set(metadata.get_all("Provides-Extra")) == {"verl", "demo", "flash", "fla", "triton", "plot", "docs", "dev"}


def test_the_entry_points_name_the_command_and_the_plug_in(wheel):
    assert metadata_file(wheel, "entry_points.txt").split() == [
        *("[console_scripts]", "zorro-verl", "=", "zorro_verl.cli:app"),
        *("[verl.plugins]", "zorro", "=", "zorro_verl.plugin"),
    ]
    assert (ROOT / "zorro_verl" / "plugin.py").is_file()


@pytest.mark.parametrize("where", ["wheel", "editable"])
def test_hydra_finds_the_config_group(where, request, tmp_path):
    path = request.getfixturevalue("installed") if where == "wheel" else ROOT
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from hydra import initialize_config_module\n"
        "from hydra.core.global_hydra import GlobalHydra\n"
        "import zorro_verl.configs\n"
        "with initialize_config_module('zorro_verl.configs', version_base=None):\n"
        "    print(zorro_verl.configs.__file__, *GlobalHydra.instance().config_loader().get_group_options('actor'))\n"
    )
    file, *options = run(sys.executable, "-c", code, path, cwd=tmp_path).split()
    folder = path / "zorro_verl" / "configs" if where == "wheel" else ROOT / "configs"
    assert Path(file).parent == folder
    assert options == ["zorro_actor"]


def locked() -> dict[str, str]:
    lines = (
        line.partition("#")[0].strip() for line in (ROOT / "requirements" / "cpu.lock.txt").read_text().splitlines()
    )
    pairs = [line.split("==") for line in lines if line]
    assert all(len(pair) == 2 for pair in pairs), "every line of the lock file is name==version"
    return {canonicalize_name(name): version for name, version in pairs}


def test_the_lock_file_satisfies_the_wheel(requirements):
    """What the CPU set-up installs lies in the ranges that the wheel and its extras for a CPU ask for."""
    versions = locked()
    for requirement in requirements:
        name = canonicalize_name(requirement.name)
        extra = str(requirement.marker or "")
        if name == "zorro-verl" or any(f'"{skip}"' in extra for skip in ("flash", "fla", "triton")):
            continue
        assert name in versions, f"{requirement} is not in the lock file"
        assert requirement.specifier.contains(versions[name]), f"{requirement} against {versions[name]}"
    assert "+" not in versions["torch"], "a local suffix would tie the set-up to one index"
