"""`zorro-verl doctor`: what is whole passes, and each thing that is amiss is a line with its fix, never a traceback."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tiny_models
from fresh_process import FOREIGN
from rich.console import Console
from transformers import AutoConfig
from typer.testing import CliRunner

from zorro_verl import __version__, doctor
from zorro_verl.cli import app
from zorro_verl.families import SUPPORTED_TRANSFORMERS
from zorro_verl.findings import Findings
from zorro_verl.installation import examine_package, requirement_of

ROOT = Path(__file__).resolve().parent.parent
INSTALLED = Path(distribution("transformers").locate_file(""))
ENTRY_POINT = "[verl.plugins]\nzorro = zorro_verl.plugin\n"


def command(*arguments: str) -> tuple[int, str]:
    """Exit code and output of the command, in this process."""
    result = CliRunner().invoke(app, ["doctor", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.output
    return result.exit_code, result.output


def report_of(*arguments: str) -> tuple[int, dict[str, Any]]:
    result = CliRunner().invoke(app, ["doctor", *arguments, "--json"])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.output
    return result.exit_code, json.loads(result.stdout)


@pytest.fixture(autouse=True)
def no_foreign_variables(monkeypatch):
    for name in FOREIGN:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    """Makes a folder that has a config.json alone."""

    def make(model_type: str, **config: Any) -> str:
        folder = tmp_path_factory.mktemp(model_type)
        if model_type in tiny_models.MODELS:
            saved = tiny_models.build(model_type, **config).config
        else:
            saved = AutoConfig.for_model(model_type, **config)
        saved.save_pretrained(folder)
        return str(folder)

    return make


# A whole environment.


def test_this_environment_is_whole():
    code, output = command()
    assert code == 0, output
    assert "can work here" in output.splitlines()[-1]
    assert "Problem" not in output


def test_tables_fit_80_columns(monkeypatch, model_folder):
    """Whole words in them: nothing is cut, and no name is broken over lines."""
    narrow = lambda: Console(width=80, highlight=False)  # noqa: E731
    monkeypatch.setattr("zorro_verl.commands.doctor.make_console", narrow)
    code, output = command("--model", model_folder("qwen3_5_moe"))
    assert code == 0, output
    lines = [line for line in output.splitlines() if not line.startswith(("Note: ", "Problem: "))]
    assert max(map(len, lines)) <= 80
    assert "…" not in output
    names = {fact["name"] for facts in report_of()[1]["facts"].values() for fact in facts}
    assert names <= {line[2:].split("   ")[0] for line in lines}
    for words in (">=5.5.3,!=5.6.0,<5.11", "zorro = zorro_verl.plugin (zorro-verl", "mixture of experts"):
        assert words in output


def test_json_says_it_all():
    code, report = report_of()
    assert code == 0, report
    assert list(report) == ["works", "version", "model", "problems", "notes", "facts"]
    assert (report["works"], report["version"], report["model"], report["problems"]) == (True, __version__, None, [])
    assert list(report["facts"]) == ["packages", "kernels", "machine", "plug_in"]
    assert all(list(fact) == ["name", "found", "expected"] for facts in report["facts"].values() for fact in facts)
    packages = {fact["name"]: fact for fact in report["facts"]["packages"]}
    assert list(packages) == ["Python", "torch", "transformers", "ray", "verl"]
    assert packages["verl"] == {"name": "verl", "found": "0.9.1", "expected": ">=0.9.1,<0.10"}
    assert packages["transformers"]["expected"] == SUPPORTED_TRANSFORMERS


def test_verls_registry_is_asked_on_every_device():
    _, report = report_of()
    found = {fact["name"]: fact["found"] for fact in report["facts"]["plug_in"]}
    assert found["entry point of verl.plugins"] == f"zorro = zorro_verl.plugin (zorro-verl {__version__})"
    assert found["language_model engine"] == "DeduplicatedActor on cuda, npu, cpu"
    assert found["value_model engine"] == "DeduplicatedCritic on cuda, npu, cpu"
    assert found["signatures of what is wrapped"] == "11 of 11 modules of verl as expected"


def test_kernels_and_the_attention_of_this_machine():
    _, report = report_of()
    kernels = {fact["name"]: fact["found"] for fact in report["facts"]["kernels"]}
    assert kernels["torch's varlen flash attention"].startswith("2.")
    assert kernels["flash_attention_2"] is kernels["flash-linear-attention"] is None
    machine = {fact["name"]: fact["found"] for fact in report["facts"]["machine"]}
    assert machine["attention (auto)"] == "sdpa on cpu: torch's own flash attention"
    assert machine["linear attention, if a model has it"].startswith("transformers' rule in torch ops")


def test_ranges_are_those_of_the_package():
    from zorro_verl.plugin import SUPPORTED_VERL

    assert requirement_of("transformers") == SUPPORTED_TRANSFORMERS
    assert requirement_of("verl") == SUPPORTED_VERL
    assert requirement_of("torch") == ">=2.11"
    assert requirement_of("flash-linear-attention") == ">=0.5.2"


# Models.


def test_a_model_with_windows(model_folder):
    code, report = report_of("--model", model_folder("qwen3", **tiny_models.WINDOWED, use_sliding_window=True))
    assert code == 0, report
    model = report["model"]
    assert (model["model_type"], model["model_class"], model["supported"]) == ("qwen3", "Qwen3ForCausalLM", True)
    kinds = {(layers["kind"], layers["count"], layers["window"]) for layers in model["layers"]}
    assert kinds == {("full_attention", 1, None), ("sliding_attention", 1, tiny_models.WINDOW)}
    assert model["heads"] == [["num_attention_heads", 4], ["num_key_value_heads", 2]]
    assert model["sequence_parallel_sizes"] == [1, 2, 4]
    assert (model["critic"], model["linear_rule"]) == (True, None)


def test_a_hybrid_with_experts_and_a_vision_tower(model_folder):
    folder = model_folder("qwen3_5_moe")
    code, report = report_of("--model", folder)
    assert code == 0, report
    model = report["model"]
    assert {layers["kind"]: layers["count"] for layers in model["layers"]} == {
        "linear_attention": 2,
        "full_attention": 1,
        "mixture_of_experts": 3,
        "vision_tower": 1,
    }
    assert model["model_class"] == "Qwen3_5MoeForConditionalGeneration"
    assert model["linear_rule"] == "transformers' rule in torch ops"
    assert model["critic"] is False
    assert any("can't be a critic" in note and "ForTokenClassification" in note for note in report["notes"])
    assert ["linear_num_value_heads", 4] in model["heads"]
    code, output = command("--model", folder)
    assert (code, output.count("Qwen3_5MoeForConditionalGeneration")) == (0, 1)


@pytest.mark.parametrize("name", ["Qwen3-32B", "Qwen/Qwen3-32B"])
def test_a_model_is_known_without_a_network(monkeypatch, name):
    def refuse(*arguments: Any) -> None:
        raise OSError("no network")

    monkeypatch.setattr("zorro_verl.checkpoint.get_hf_file_metadata", refuse)
    code, report = report_of("--model", name)
    assert code == 0, report
    model = report["model"]
    assert (model["name"], model["model_type"]) == (name, "qwen3")
    assert [(layers["kind"], layers["count"]) for layers in model["layers"]] == [("full_attention", 64)]
    assert model["sequence_parallel_sizes"] == [1, 2, 4, 8, 16, 32, 64]
    code, output = command("--model", "Qwen/Qwen3-33B")
    assert (code, output.count("\n")) == (2, 1), output
    assert "no network); known without a network: Qwen3-0.6B" in output


def test_a_config_of_its_own(model_folder):
    name = f"{model_folder('qwen3')}/config.json"
    code, report = report_of("--model", name)
    assert (code, report["model"]["name"], report["model"]["model_type"]) == (0, name, "qwen3")


def test_a_model_with_dropout_is_a_problem_with_the_key_that_mends_it(model_folder):
    code, report = report_of("--model", model_folder("qwen3", attention_dropout=0.1))
    [problem] = report["problems"]
    assert (code, report["works"], report["model"]["supported"]) == (1, False, False)
    assert problem["about"] == "model"
    assert "attention_dropout: expected 0 in training, got 0.1" in problem["line"]
    assert "+actor_rollout_ref.model.override_config.attention_dropout=0" in problem["line"]
    assert report["model"]["layers"] != []


@pytest.mark.parametrize(
    ("model_type", "config", "reason"),
    [
        ("gpt2", {}, "model_type: expected a supported one, got 'gpt2'"),
        ("qwen3", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope_type"),
    ],
)
def test_an_unsupported_model_is_one_line(model_folder, model_type, config, reason):
    folder = model_folder(model_type, **config)
    code, output = command("--model", folder)
    lines = [line for line in output.splitlines() if line.startswith("Problem: ")]
    assert (code, len(lines)) == (1, 1), output
    assert reason in lines[0]
    assert "strategy=fsdp2" in lines[0]
    assert output.splitlines()[-1] == "1 problem."


def test_mistakes_are_said_in_one_line(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "no_such_type"}')
    for name, words in (("./nowhere", "config.json"), (str(tmp_path), "no_such_type")):
        code, output = command("--model", name)
        assert (code, output.count("\n")) == (2, 1), output
        assert output.startswith("zorro-verl doctor: model: ")
        assert words in output


# Environments in which something is amiss, as they are: folders with links to what is installed here.


class Ran(NamedTuple):
    code: int
    report: dict[str, Any]
    errors: str

    @property
    def lines(self) -> list[str]:
        return [problem["line"] for problem in self.report["problems"]]


@pytest.fixture
def environment(tmp_path):
    """Makes an environment of what is installed here, without some packages and with some in place of others."""

    def make(without: tuple[str, ...] = (), entry_points: str | None = ENTRY_POINT, version=__version__) -> Path:
        folder = tmp_path / "packages"
        folder.mkdir()
        hidden = (*(name.lower() for name in without), "zorro_verl", "__editable__")
        for entry in INSTALLED.iterdir():
            if not entry.name.lower().replace("-", ".").split(".")[0].startswith(hidden):
                (folder / entry.name).symlink_to(entry)
        (folder / "zorro_verl").symlink_to(ROOT / "zorro_verl")
        record(folder, "zorro-verl", version, entry_points)
        return folder

    return make


def record(folder: Path, name: str, version: str, entry_points: str | None) -> None:
    """What pip leaves of an installation: the one that is here, under another version."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    lines = distribution("zorro-verl").read_text("METADATA").splitlines()
    metadata = [f"Version: {version}" if line.startswith("Version: ") else line for line in lines]
    (info / "METADATA").write_text("\n".join(f"Name: {name}" if x.startswith("Name: ") else x for x in metadata))
    if entry_points:
        (info / "entry_points.txt").write_text(entry_points)


def stub(folder: Path, name: str, code: str, version: str) -> None:
    """A package that has a version and does what ``code`` does when it is imported."""
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(code)
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def run_in(folder: Path, **variables: str) -> Ran:
    """`zorro-verl doctor --json` where nothing but this folder is installed."""
    finished = start_in(folder, "--json", **variables)
    assert "Traceback" not in finished.stderr, finished.stderr
    return Ran(finished.returncode, json.loads(finished.stdout), finished.stderr)


def start_in(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name not in FOREIGN}
    return subprocess.run(
        [sys.executable, "-S", "-c", "from zorro_verl.cli import app; app()", "doctor", *arguments],
        env=inherited | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"} | variables,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_nothing_is_installed(environment):
    folder = environment(without=("torch", "transformers", "verl", "ray", "transferqueue"))
    ran = run_in(folder)
    assert ran.code == 1
    assert ran.lines == [
        "torch: expected >=2.11, got none; pip install 'torch>=2.11'",
        "transformers: expected >=5.5.3,!=5.6.0,<5.11, got none; pip install 'transformers>=5.5.3,!=5.6.0,<5.11'",
        "ray: expected to be installed, got none; pip install 'zorro-verl[verl]'",
        "verl: expected >=0.9.1,<0.10, got none; pip install 'zorro-verl[verl]'",
        "TransferQueue: expected >=0.1.10, got none; pip install 'zorro-verl[verl]'",
    ]


def test_this_package_is_installed_without_verl(environment):
    """What `pip install zorro-verl` gives: one command mends it all, and a model can be looked at."""
    folder = environment(without=("verl", "ray", "transferqueue", "transfer_queue"))
    finished = start_in(folder, "--model", "Qwen3-32B", COLUMNS="80")
    assert finished.returncode == 1, finished.stderr
    mend = "pip install 'zorro-verl[verl]'"
    assert finished.stdout.splitlines()[-4:] == [
        f"Problem: ray: expected to be installed, got none; {mend}",
        f"Problem: verl: expected >=0.9.1,<0.10, got none; {mend}",
        f"Problem: TransferQueue: expected >=0.1.10, got none; {mend}",
        "3 problems.",
    ]
    assert "Qwen3-32B: qwen3, loaded by veRL as Qwen3ForCausalLM" in finished.stdout


def test_help_needs_none_of_what_it_examines(environment):
    folder = environment(without=("torch", "transformers", "verl", "ray", "huggingface", "packaging"))
    finished = start_in(folder, "--help")
    assert finished.returncode == 0, finished.stderr
    assert "--model MODEL" in finished.stdout
    assert "--json" in finished.stdout


@pytest.mark.parametrize("place", range(len(doctor.PROBES)), ids=[probe.about for probe in doctor.PROBES])
def test_a_probe_that_fails_is_a_problem_with_its_mend_and_the_others_go_on(monkeypatch, place):
    def fail(findings: Findings) -> None:
        raise OSError("libcudart.so.12: cannot open\nshared object file")

    failing = doctor.PROBES[place]._replace(run=fail)
    monkeypatch.setattr(doctor, "PROBES", (failing, doctor.Probe("another", doctor.examine_python)))
    code, report = report_of()
    assert code == 1
    of_torch = failing.about in ("devices", "kernels", "attention")
    mend = "install a torch that is built for this machine" if of_torch else "pip install --force-reinstall 'zorro-verl"
    [problem] = report["problems"]
    assert problem["about"] == failing.about
    assert problem["line"].startswith(
        f"{failing.about}: expected to be examined, got OSError: libcudart.so.12: cannot open; {mend}"
    )
    assert [fact["name"] for fact in report["facts"]["packages"]] == ["Python"]


def test_packages_of_other_versions_and_broken_ones(environment):
    """Also this package: another version's record stands ahead of the one that is imported."""
    folder = environment(without=("torch", "transformers", "verl", "ray"), version="0.0.9")
    stub(folder, "torch", "__version__ = '2.9.1+cu128'", "2.9.1")
    stub(folder, "transformers", "raise RuntimeError('built for another torch\\nand more')", "5.9.0")
    stub(folder, "ray", "__version__ = '2.60.0'", "2.60.0")
    stub(folder, "verl", "import numpy_of_another_name", "0.9.1")
    stub(folder, "other", "", "1.0")
    (folder / "other-1.0.dist-info" / "entry_points.txt").write_text("[verl.plugins]\nzorro = other\n")
    ran = run_in(folder)
    assert ran.code == 1
    assert ran.lines[:3] == [
        "torch: expected >=2.11, got 2.9.1+cu128; pip install 'torch>=2.11'",
        "transformers: expected to be importable, got RuntimeError: built for another torch; "
        "pip install --force-reinstall 'transformers>=5.5.3,!=5.6.0,<5.11'",
        "verl: expected to be importable, got ModuleNotFoundError: No module named 'numpy_of_another_name'; "
        "pip install numpy_of_another_name",
    ]
    other, version = ran.lines[3:]
    assert "got zorro = other (other 1.0), too; pip uninstall other" in other
    assert f"expected zorro-verl {__version__}, which is imported" in version
    assert "got the entry point of 0.0.9" in version


def test_an_entry_point_is_missing(environment):
    ran = run_in(environment(entry_points=None))
    assert (ran.code, len(ran.lines)) == (1, 1), ran.lines
    assert "expected an entry point zorro = zorro_verl.plugin in the group verl.plugins, got none" in ran.lines[0]
    assert ran.lines[0].endswith("pip install --force-reinstall --no-deps zorro-verl")


def test_verl_is_told_to_load_no_plug_in(environment):
    ran = run_in(environment(), VERL_USE_EXTERNAL_PLUGINS="none")
    assert (ran.code, len(ran.lines)) == (1, 1), ran.lines
    assert "got 'none', so that veRL doesn't load it; unset VERL_USE_EXTERNAL_PLUGINS" in ran.lines[0]


def test_verls_other_route_will_do(environment):
    """The CPU runtime is on here, too."""
    variables = {"VERL_USE_EXTERNAL_MODULES": "zorro_verl.plugin", "VERL_PLATFORM": "cpu"}
    ran = run_in(environment(entry_points=None), **variables)
    assert (ran.code, ran.lines) == (0, [])
    facts = {fact["name"]: fact["found"] for topic in ran.report["facts"].values() for fact in topic}
    assert facts["device that veRL takes"] == "cpu"
    assert facts["VERL_PLATFORM"] == "cpu"
    assert facts["language_model engine"] == "DeduplicatedActor on cuda, npu, cpu"
    assert ran.errors == ""


def test_another_verl_behind_the_same_version(environment):
    """A method that is overridden has another parameter, and a package of its trainer's is missing."""
    folder = environment(without=("verl", "transferqueue", "transfer_queue"))
    shutil.copytree(INSTALLED / "verl", folder / "verl", copy_function=os.symlink)
    record_of_verl = next(INSTALLED.glob("verl-*.dist-info"))
    (folder / record_of_verl.name).symlink_to(record_of_verl)
    engine = folder / "verl" / "workers" / "engine" / "fsdp" / "transformer_impl.py"
    text = engine.read_text()
    changed = text.replace("def optimizer_step(self)", "def optimizer_step(self, closure=None)")
    assert changed != text
    engine.unlink()
    engine.write_text(changed)
    ran = run_in(folder)
    assert ran.code == 1
    assert ran.lines[0] == "TransferQueue: expected >=0.1.10, got none; pip install 'zorro-verl[verl]'"
    assert len(ran.lines) == 2, ran.lines
    assert "FSDPEngine.optimizer_step" in ran.lines[1]
    assert ran.lines[1].endswith("pip install --force-reinstall 'verl>=0.9.1,<0.10'")
    found = {fact["name"]: fact["found"] for fact in ran.report["facts"]["plug_in"]}
    assert found["language_model engine"].startswith("a stand-in, since strategy=zorro extends verl")


def test_two_installations_of_a_package_are_a_note(tmp_path, monkeypatch):
    stub(tmp_path, "doubled", "__version__ = '2.0'", "1.0")
    monkeypatch.syspath_prepend(tmp_path)
    findings = Findings()
    examine_package("doubled", findings)
    assert findings.problems == []
    [note] = findings.notes
    assert note.startswith("doubled 2.0 is imported, from ")
    assert note.endswith("pip has 1.0 on record: two installations")
