"""Every command and snippet of README and docs runs here, or is read by its program here and run by another test."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import metadata
from pathlib import Path

import documented
import pytest
import recipe as recipes
import torch
from documented import ROOT, Command, commands_of
from hydra import compose, initialize_config_module
from hydra.errors import HydraException
from packaging.requirements import Requirement
from tiny import batch_b0, padded_batch, tiny_model
from tiny_run import make_material
from typer.testing import CliRunner
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils.config import omega_conf_to_dataclass

from zorro_verl.cli import app
from zorro_verl.verl_config import spread_options

COMMANDS = documented.commands()
MAIN_PPO = ("-m", "verl.trainer.main_ppo")
# What a page calls "the rest of your command".
ABBREVIATION = re.compile(r"\.\.\..*|…|else|unchanged")
# Checkpoints that pages name as if they were there.
HUB_NAMES = re.compile(r"Qwen/\S+|/checkpoints/\S+|MODEL|NAME|FOLDER")
# What makes a command quick; of an option that is given twice the last one counts.
QUICK = {"bench": ["--rounds", "1", "--seconds", "0", "--no-memory"]}
# The test that runs what a page names, where that takes longer than a page's test may.
RUN_BY = {
    "scripts/bench_cpu.py": "test_bench.py",
    "scripts/bench_engine.py": "test_bench_engine.py",
    "scripts/bench_peers.py": "test_bench_peers.py",
    "scripts/bench_gpu.py": "test_bench_gpu.py",
    "scripts/bench_attention.py": "test_bench_attention.py",
    "scripts/bench_head.py": "test_bench_head.py",
    "scripts/bench_plan.py": "test_plan_cost.py",
    "scripts/results_table.py": "test_results.py",
    "scripts/simulate_placement.py": "test_placement.py",
    "scripts/support_matrix.py": "test_support_matrix.py",
    "scripts/tiny_models.py": "test_verify.py",
    "scripts/verify_equivalence.py": "test_verify.py",
    "scripts/build_dist.py": "test_packaging.py",
    "scripts/recipes/estimates.py": "test_tiny_recipes.py",
    "scripts/feature_table.py": "test_features.py",
    "recipes/data/": "test_recipe_data.py",
    "recipes/cluster/start_ray.sh": "test_cluster_scripts.py",
    "verl.model_merger": "test_checkpoints.py",
}
# The same of make's targets, and what stands in that test because it runs what the target runs.
TARGETS_RUN_BY = {
    "setup": ("test_setup.py", "set_up(environment"),
    "demo": ("test_demo.py", 'demo("trainer_run")'),
    "recipe": ("test_tiny_recipes.py", "tiny_recipe.TinyForm("),
    "demo-multinode": ("test_multinode.py", "[sys.executable, SCRIPT, "),
    "bench": ("test_bench.py", "bench.main("),
    "bench-gpu": ("test_bench_gpu.py", "command.main("),
    "docs": ("test_docs.py", '"mkdocs", "build", "--strict"'),
    "dist": ("test_packaging.py", "build_dist.check_installed("),
}
# What checks this very suite, or needs another environment: continuous integration runs lint and test; the others are
# run before a release, and by nobody here.
RUN_BY_HAND = {"test", "test-fast", "lint", "format", "test-versions", "setup-vllm"}


def by_program(*programs: str) -> list[Command]:
    return [c for c in COMMANDS if Path(c.words[0]).name in programs or c.words[0] in programs]


def named(commands: list[Command]):
    return pytest.mark.parametrize("command", commands, ids=lambda c: c.where)


def main_ppo(commands: list[Command]) -> list[Command]:
    return [c for c in commands if MAIN_PPO == c.words[1:3]]


ZORRO_VERL = by_program("zorro-verl")
PYTHON = by_program("python", "python3")
TRAINER = main_ppo(PYTHON)
MERGER = [c for c in PYTHON if c.words[1:3] == ("-m", "verl.model_merger")]
MODULES = [c for c in PYTHON if c.words[1:2] == ("-m",) and c not in TRAINER + MERGER]
SCRIPTS = [c for c in PYTHON if c.words[1].endswith(".py")]
RECIPES = [c for c in COMMANDS if c.words[0].startswith("recipes/")]
MAKE = by_program("make")
PIP = by_program("pip")
OTHERS = by_program("hf", "ray", "git", "bash", "cd")


def test_every_command_is_in_a_list_that_is_tested():
    known = [*ZORRO_VERL, *TRAINER, *MERGER, *MODULES, *SCRIPTS, *RECIPES, *MAKE, *PIP, *OTHERS]
    assert [c.where for c in COMMANDS if c not in known] == []


# The package's own commands: run, on a tiny checkpoint and a dump in place of those that a page names.


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    """A folder with what pages say is there: a tiny checkpoint, and the model and the rollouts of a demo."""
    folder = tmp_path_factory.mktemp("clone")
    make_material(folder)
    for place in ("build/tiny-qwen3", "demo-out/material/model"):
        shutil.copytree(folder / "model", folder / place)
    rollouts = folder / "demo-out/zorro/rollouts"
    rows = [(f"{prompt}+1=", str(row) * (row + 1)) for prompt in range(40, 44) for row in range(4)]
    uids = [f"{number // 4}_{number % 4}_0" for number in range(len(rows))]
    for step in (1, 2):
        inputs, outputs = zip(*rows, strict=True)
        scores = [0.0] * len(rows)
        PPOTrainer._write_generations(inputs, outputs, scores, scores, {"uid": uids}, str(rollouts), step)
    return folder


@named(ZORRO_VERL)
def test_our_commands_run(command, clone, monkeypatch):
    monkeypatch.chdir(clone)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    words = [HUB_NAMES.sub("build/tiny-qwen3", word) for word in command.words[1:]]
    words += QUICK.get(words[0], [])
    result = CliRunner().invoke(app, words if len(words) > 1 else [*words, "--help"])
    assert result.exit_code == 0, result.output


def shown() -> list[tuple[Command, str]]:
    """The commands whose output is the same everywhere, and what the page says it is."""
    pairs = [(command, text.text) for bash, text in documented.outputs("docs/cli.md") for command in commands_of(bash)]
    return [(command, text) for command, text in pairs if command.words[1] in ("plan", "show")]


@pytest.mark.parametrize(("command", "text"), shown(), ids=lambda x: x.where if isinstance(x, Command) else "")
def test_the_page_shows_what_is_printed(command, text):
    output = CliRunner().invoke(app, list(command.words[1:])).output
    trimmed = [line.rstrip() for line in output.strip().splitlines()]
    assert [line.rstrip() for line in text.strip().splitlines()] == trimmed


def test_two_commands_are_held_to_their_output():
    assert {command.words[1] for command, _ in shown()} == {"plan", "show"}


@named(MAKE)
def test_make_knows_the_target_and_a_test_runs_it(command):
    target, *variables = command.words[1:]
    subprocess.run(["make", "-n", target, *variables], cwd=ROOT, check=True, capture_output=True, timeout=30)
    if target not in RUN_BY_HAND:
        file, words = TARGETS_RUN_BY[target]
        assert words in (ROOT / "tests" / file).read_text(), f"{file} does not run what `make {target}` runs"


def run_by_another_test(what: str) -> None:
    """Whether another test file has this program in it."""
    key = next((known for known in RUN_BY if what == known or (known.endswith("/") and what.startswith(known))), None)
    assert key is not None, f"no test runs {what}"
    program = what.removesuffix(".py").rpartition("/")[2]
    text = (ROOT / "tests" / RUN_BY[key]).read_text()
    assert re.search(rf"\b{re.escape(program)}\b", text), f"{RUN_BY[key]} does not run {what}"


@named(SCRIPTS)
def test_a_script_knows_its_options_and_a_test_runs_it(command):
    script = command.words[1]
    known = help_of(script)
    for word in command.words[2:]:
        if word.startswith("--"):
            assert re.search(rf"(?<![\w-]){re.escape(word.partition('=')[0])}\b", known), word
    run_by_another_test(script)


@functools.cache
def help_of(script: str) -> str:
    command = [sys.executable, str(ROOT / script), "--help"]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "scripts"), "COLUMNS": "200"}
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120, env=environment).stdout


@named(MERGER)
def test_verls_merger_knows_its_options(command):
    from verl.model_merger.base_model_merger import parse_args

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["merger", *command.words[3:]])
        assert parse_args().backend == "fsdp"
    run_by_another_test("verl.model_merger")


@named(PIP)
def test_pip_is_given_packages_that_are_there(command):
    assert command.words[1] == "install"
    extras = metadata("zorro-verl").get_all("Provides-Extra")
    for word in command.words[2:]:
        if word.startswith("-") or word == "dist/*.whl":  # what `make dist` leaves, and test_packaging.py installs
            continue
        requirement = Requirement(word)
        if requirement.name == "zorro-verl":
            assert requirement.extras <= set(extras), word
        else:
            metadata(requirement.name)


@named([c for c in OTHERS if c.words[0] == "hf"])
def test_the_hub_is_asked_in_words_that_it_knows(command):
    """Without a network it gets as far as to ask."""
    arguments = [*command.words[1:-1], "/nonexistent"] if "--local-dir" in command.words else command.words[1:]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    finished = subprocess.run(
        [Path(sys.executable).parent / "hf", *arguments], capture_output=True, text=True, timeout=60, env=environment
    )
    assert re.search("offline|outgoing", finished.stderr + finished.stdout, re.IGNORECASE), finished.stderr


# veRL's own command: composed by Hydra, and its actor built, as the trainer does it before anything starts.


def composed(words: list[str]):
    """The config that veRL's main_ppo would run with; a page's "and the rest of your command" is left out."""
    words, name, module = list(words), "ppo_trainer", "verl.trainer.config"
    if words[:1] == ["--config-path"]:
        module, name = words[1].removeprefix("pkg://"), words[3]
        words = words[4:]
    words = [word for word in words if not ABBREVIATION.fullmatch(word)]
    with initialize_config_module(module, version_base=None):
        return compose(name, [word for word in words if not word.startswith("hydra.run.")])


def check_config(config) -> None:
    """As veRL's main_ppo and its workers read it."""
    spread_options(config)
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    assert actor.strategy in ("zorro", "fsdp2", "fsdp")


def with_batch_size(words) -> list[str]:
    """veRL wants one of the two before it builds an actor."""
    key = "actor_rollout_ref.actor.use_dynamic_bsz"
    return [*words] if any(word.startswith(key) for word in words) else [f"{key}=True", *words]


@named(TRAINER)
def test_verl_takes_the_command(command):
    words = command.words[3:]
    check_config(composed(words if words[:1] == ("--config-path",) else with_batch_size(words)))


@named([c for c in RECIPES if c.words[0].endswith(".sh") and "cluster" not in c.words[0]])
def test_a_recipe_takes_its_arguments(command):
    variables = {name: value.replace("$strategy", "zorro") for name, value in command.variables.items()}
    words = recipes.command_line(ROOT / command.words[0], variables, *command.words[1:])
    assert tuple(words[:2]) == MAIN_PPO
    check_config(composed(words[2:]))


@named([c for c in RECIPES if "cluster" in c.words[0]])
def test_cluster_scripts_are_run_by_their_test(command):
    assert (ROOT / command.words[0]).exists()
    run_by_another_test(command.words[0])


@pytest.mark.parametrize("block", list(documented.blocks("bash")), ids=lambda block: f"{block.page}:{block.line}")
def test_bash_can_read_the_block(block):
    subprocess.run(["bash", "-n"], input=block.text, text=True, check=True, timeout=30)


def test_an_unknown_setting_is_noticed():
    """What the tests above rely on."""
    with pytest.raises(HydraException):
        composed(["actor_rollout_ref.actor.no_such_setting=1"])


# Snippets of Python that are no doctests: run as they stand, but for the checkpoint and the device that they name.


def snippets() -> list[documented.Block]:
    return [block for block in documented.blocks("python") if not block.is_doctest]


@pytest.mark.parametrize("block", snippets(), ids=lambda block: f"{block.page}:{block.line}")
def test_a_snippet_runs(block, clone):
    text = block.text.replace("Qwen/Qwen3-0.6B", str(clone / "build/tiny-qwen3")).replace('"cuda"', '"cpu"')
    model = tiny_model(dtype=torch.float32)
    batch = padded_batch(batch_b0())
    batch |= {name: torch.zeros(batch["responses"].shape) - 1 for name in ("old_log_probs", "advantages")}
    names = {"batch": batch, "model": model} | long_rows(model.config.vocab_size)
    exec(compile(text, f"{block.page}:{block.line}", "exec"), names)
    if "DeduplicatedActor" in text:
        assert names["actor"].stats["token_ratio"] > 1
        assert names["output"].logprobs.shape == names["output"].entropy.shape
        assert "actor/policy_loss" in names["metrics"]
    else:
        assert names["output"].logits.shape[:2] == names["input_ids"].shape


def long_rows(vocabulary: int) -> dict[str, torch.Tensor]:
    """What the README's patched model is called with: three rows of a prompt, with 512 response tokens."""
    prompt = torch.arange(1, 9).repeat(3, 1)
    input_ids = torch.cat([prompt, torch.randint(vocabulary, (3, 512))], 1)
    return {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids), "labels": input_ids}
