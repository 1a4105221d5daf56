"""`make setup` sees what is missing or broken in an environment, so that it can mend it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "setup_cpu.py"


@pytest.fixture
def setup_cpu(tmp_path, monkeypatch):
    """The script as a module, looking at an environment and a lock file of this test."""
    spec = importlib.util.spec_from_file_location("setup_cpu", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(module, "STAMP", tmp_path / ".venv" / "setup.stamp")
    monkeypatch.setattr(module, "LOCK", tmp_path / "lock.txt")
    module.LOCK.write_text("# exact versions\nTyping_Extensions==4.1\ntorch==2.13.0  # first\n")
    hold(module, "typing_extensions", "4.1")
    hold(module, "torch", "2.13.0+cpu")
    hold(module, "zorro_verl", "0.1.0")
    return module


def hold(module, name: str, version: str) -> Path:
    """Lay a distribution of one file into the environment as pip does; returns its dist-info folder."""
    site = module.VENV / "lib" / "python3.11" / "site-packages"
    info = site / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (site / f"{name}.py").write_text("x = 1\n")
    (info / "METADATA").write_text("Name\n")
    record = (f"{name}.py,sha256=abc,6", f'"{info.name}/METADATA",sha256=abc,5', f"{info.name}/RECORD,,")
    (info / "RECORD").write_text("\n".join(record) + "\n")
    return info


def test_a_whole_environment_lacks_nothing(setup_cpu):
    assert setup_cpu.lacking() == []


def test_a_truncated_file_is_seen(setup_cpu):
    (setup_cpu.dist_infos()[0].parent / "torch.py").write_text("")
    assert setup_cpu.lacking() == ["torch==2.13.0"]


def test_a_lost_file_is_seen(setup_cpu):
    (setup_cpu.dist_infos()[0].parent / "typing_extensions.py").unlink()
    assert setup_cpu.lacking() == ["typing-extensions==4.1"]


def test_an_interrupted_install_is_seen(setup_cpu):
    for info in setup_cpu.dist_infos():
        (info / "RECORD").unlink()
    assert setup_cpu.lacking() == ["typing-extensions==4.1", "torch==2.13.0", "zorro-verl"]


def test_another_version_is_seen(setup_cpu):
    setup_cpu.LOCK.write_text("typing-extensions==4.2\ntorch==2.13.0\n")
    assert setup_cpu.lacking() == ["typing-extensions==4.2"]


def test_a_changed_lock_file_is_seen(setup_cpu):
    before = setup_cpu.fingerprint()
    setup_cpu.LOCK.write_text("torch==2.13.0\n")
    assert setup_cpu.fingerprint() != before


def test_an_environment_without_a_python_is_not_usable(setup_cpu):
    assert not setup_cpu.is_usable()
    assert not setup_cpu.in_order()
