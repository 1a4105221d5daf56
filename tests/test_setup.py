"""`make setup` and its like see what is missing or broken in an environment, so that they can mend it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import virtual_environment
from peers.environments import Overlay
from virtual_environment import VirtualEnvironment, fingerprint, not_held, pins, set_up

TYPING, TORCH = "typing-extensions==4.1", "torch==2.13.0"


@pytest.fixture
def lock(tmp_path):
    path = tmp_path / "lock.txt"
    path.write_text("# exact versions\nTyping_Extensions==4.1\ntorch==2.13.0  # first\n")
    return path


@pytest.fixture
def environment(tmp_path, lock, monkeypatch):
    """An environment that holds what the lock file asks for, and this project."""
    monkeypatch.setattr(virtual_environment, "ROOT", tmp_path)
    environment = VirtualEnvironment(tmp_path / ".venv", pins(lock), ("zorro-verl",))
    site = environment.folder / "lib" / "python3.11" / "site-packages"
    hold(site, "typing_extensions", "4.1")
    hold(site, "torch", "2.13.0+cpu")
    hold(site, "zorro_verl", "0.1.0")
    return environment


def hold(site: Path, name: str, version: str) -> Path:
    """Lay a distribution of one file into a folder as pip does; returns its dist-info folder."""
    info = site / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (site / f"{name}.py").write_text("x = 1\n")
    (info / "METADATA").write_text("Name\n")
    record = (f"{name}.py,sha256=abc,6", f'"{info.name}/METADATA",sha256=abc,5', f"{info.name}/RECORD,,")
    (info / "RECORD").write_text("\n".join(record) + "\n")
    return info


def test_a_whole_environment_lacks_nothing(environment):
    assert environment.lacking() == []


def test_a_truncated_file_is_seen(environment):
    (environment.dist_infos()[0].parent / "torch.py").write_text("")
    assert environment.lacking() == [TORCH]


def test_a_lost_file_is_seen(environment):
    (environment.dist_infos()[0].parent / "typing_extensions.py").unlink()
    assert environment.lacking() == [TYPING]


def test_an_interrupted_install_is_seen(environment):
    for info in environment.dist_infos():
        (info / "RECORD").unlink()
    assert environment.lacking() == [TYPING, TORCH, "zorro-verl"]


def test_another_version_is_seen(environment):
    newer = replace(environment, wanted={"typing-extensions": "4.2", "torch": "2.13.0"})
    assert newer.lacking() == ["typing-extensions==4.2"]


def test_a_build_that_is_named_has_to_be_that_build(environment):
    assert replace(environment, wanted={"torch": "2.13.0+cpu"}).lacking() == []
    assert replace(environment, wanted={"torch": "2.13.0+cu130"}).lacking() == ["torch==2.13.0+cu130"]


def test_a_changed_lock_file_is_seen(lock):
    before = fingerprint(lock)
    assert fingerprint(lock) == before
    lock.write_text("torch==2.13.0\n")
    assert fingerprint(lock) != before


def test_an_environment_without_a_python_is_not_usable(environment):
    environment.stamp.write_text("1")
    assert not environment.is_usable()
    assert not environment.in_order("1")


def give_python(environment: VirtualEnvironment, pip_of: Path) -> None:
    (environment.folder / "bin").mkdir()
    environment.python.symlink_to(sys.executable)
    (environment.folder / "bin" / "pip").write_text(f"#!{pip_of}/bin/python\n")


def test_a_python_of_another_version_or_from_another_folder_is_not_usable(environment):
    give_python(environment, environment.folder)
    assert environment.is_usable()
    assert replace(environment, oldest=(3, 9), too_new=(4,)).is_usable()
    assert not replace(environment, oldest=(3, 9), too_new=sys.version_info[:3]).is_usable()
    assert not replace(environment, oldest=(4,), too_new=(5,)).is_usable()
    (environment.folder / "bin" / "pip").write_text("#!/elsewhere/.venv/bin/python\n")
    assert not environment.is_usable()


def test_a_set_up_runs_once_and_again_when_something_changed(environment, lock):
    give_python(environment, environment.folder)
    runs = []
    for mark in ("1", "1", "2"):
        set_up(environment, lock, mark, lambda: runs.append(environment.stamp.exists()), again="make setup")
    assert runs == [False, False]  # and none counts as done before it is
    assert environment.in_order("2")


def test_a_set_up_forgets_what_is_there_in_part(environment, lock):
    give_python(environment, environment.folder)
    (torch,) = (info for info in environment.dist_infos() if info.name.startswith("torch"))
    (torch / "RECORD").unlink()
    set_up(environment, lock, "1", lambda: None, again="make setup")
    assert not torch.exists()


def test_a_set_up_that_fails_names_the_command_and_does_not_count(environment, lock):
    give_python(environment, environment.folder)

    def install():
        subprocess.run([sys.executable, "-c", "raise SystemExit(3)"], check=True)

    with pytest.raises(SystemExit, match=r"this failed: .*SystemExit\(3\)(?s:.*)`make setup` goes on"):
        set_up(environment, lock, "1", install, again="make setup")
    assert not environment.stamp.exists()


def test_a_folder_of_packages_beside_the_environment(tmp_path, lock):
    overlay = Overlay(tmp_path / "overlay", lock)
    assert overlay.lacking() == [TYPING, TORCH]
    infos = [hold(overlay.folder, "typing_extensions", "4.1"), hold(overlay.folder, "torch", "2.13.0")]
    assert overlay.lacking() == not_held(pins(lock), infos) == []
