"""The Hydra configs that are shipped: each composes, veRL builds and validates it, and every option is documented."""

import copy
import dataclasses
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_models
import tiny_tokenizer
import torch
import yaml
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from zorro_verl.options import ZorroOptions

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
ACTOR = CONFIGS / "actor" / "zorro_actor.yaml"
# Files that Hydra can be started with; what they are made of is not started by itself.
EXAMPLES = sorted(path.stem for path in CONFIGS.glob("*.yaml") if "searchpath" in path.read_text())
PATHS = ("model", "train", "validation", "output")


@functools.cache
def example(name, *overrides):
    with initialize_config_module("zorro_verl.configs", version_base=None):
        return compose(name, list(overrides))


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """What an example leaves open, by name."""
    folder = tmp_path_factory.mktemp("material")
    tokenizer = tiny_tokenizer.build()
    tokenizer.save_pretrained(folder / "model")
    tiny_models.build("qwen3", torch.float32, vocab_size=len(tokenizer)).save_pretrained(folder / "model")
    files = {"train": "train.parquet", "validation": "validation.parquet"}
    return {name: f"{folder}/{files.get(name, name)}" for name in PATHS}


def test_there_is_one_example_of_each_algorithm():
    assert EXAMPLES == ["zorro_grpo", "zorro_ppo"]
    assert [example(name).algorithm.adv_estimator for name in EXAMPLES] == ["grpo", "gae"]


@pytest.mark.parametrize("name", EXAMPLES)
def test_verl_takes_an_example(name, paths):
    """With the four paths given, what veRL's main does before it starts Ray, and what its workers build."""
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import omega_conf_to_dataclass, validate_config
    from verl.utils.device import auto_set_device

    config = copy.deepcopy(example(name, *(f"paths.{key}={value}" for key, value in paths.items())))
    auto_set_device(config)
    validate_config(config, need_reference_policy(config), need_critic(config))
    built = OmegaConf.to_container(config, resolve=True)
    assert built["data"]["train_files"] == paths["train"]
    assert built["data"]["val_files"] == paths["validation"]
    assert built["trainer"]["default_local_dir"] == f"{paths['output']}/checkpoints"

    section = config.actor_rollout_ref
    actor, rollout = (omega_conf_to_dataclass(section[role]) for role in ("actor", "rollout"))
    assert actor.engine.strategy == section.ref.strategy == "zorro"
    assert actor.engine.zorro == ZorroOptions()
    assert omega_conf_to_dataclass(section.model).path == paths["model"]
    budgets = [actor.ppo_max_token_len_per_gpu, section.ref.log_prob_max_token_len_per_gpu]
    budgets.append(rollout.log_prob_max_token_len_per_gpu)
    assert need_critic(config) == (name == "zorro_ppo")
    if need_critic(config):
        critic = omega_conf_to_dataclass(config.critic)
        assert critic.engine.strategy == "zorro"
        assert critic.engine.zorro == ZorroOptions(), "the actor's"
        assert critic.model.path == paths["model"]
        budgets.append(critic.ppo_infer_max_token_len_per_gpu)
    group = config.data.max_prompt_length + rollout.n * config.data.max_response_length
    assert group <= min(budgets)
    assert rollout.max_model_len == config.data.max_prompt_length + config.data.max_response_length
    assert config.data.train_batch_size % actor.ppo_mini_batch_size == 0
    assert actor.ppo_mini_batch_size % config.trainer.n_gpus_per_node == 0


@pytest.mark.parametrize("given", [(), PATHS[:1], PATHS[1:]], ids=len)
@pytest.mark.parametrize("name", EXAMPLES)
def test_missing_paths_are_named_together(name, given, paths):
    from verl.utils.device import auto_set_device

    config = copy.deepcopy(example(name, *(f"paths.{key}={paths[key]}" for key in given)))
    missing = sorted(f"paths.{key}" for key in PATHS if key not in given)
    with pytest.raises(ValueError, match=f"^{', '.join(missing)}: expected values"):
        auto_set_device(config)


def test_the_command_in_an_examples_head_starts_verl(tmp_path):
    """As far as the question for the one path that is left out."""
    head = (CONFIGS / "zorro_grpo.yaml").read_text().replace("\\\n#", "")
    command = re.search(r"python3 (-m verl\.trainer\.main_ppo .*)", head)[1].split()
    assert [part.partition("=")[0] for part in command[-4:]] == [f"paths.{name}" for name in PATHS]
    result = subprocess.run([sys.executable, *command[:-1]], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert result.returncode == 1
    assert "ValueError: paths.output: expected values, got none" in result.stderr


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_head_of_an_example_names_it(name):
    assert f"--config-path pkg://zorro_verl.configs --config-name {name} " in (CONFIGS / f"{name}.yaml").read_text()


def test_options_are_the_dataclasss_and_each_is_documented():
    """What it is, with its default, and when to change it, in the comment above it; every choice by name."""
    text = ACTOR.read_text()
    listed = yaml.safe_load(text)["zorro"]
    assert listed.pop("_target_") == f"{ZorroOptions.__module__}.{ZorroOptions.__name__}"
    assert listed == dataclasses.asdict(ZorroOptions())
    for name, default in listed.items():
        comment = re.search(rf"((?:^  #.*\n)+)^  {name}: ", text, re.MULTILINE)[1]
        assert f"Default {default}" in comment, name
        assert "Change it" in comment, name
        for choice in choices(name):
            assert re.search(rf"\b{choice}\b", comment), f"{name}={choice}"


def choices(name):
    """As the option's own error lists them."""
    with pytest.raises(ValueError) as error:
        ZorroOptions(**{name: object()})
    listed = re.search(r"expected one of \((.*)\), got", str(error.value))[1]
    return [choice.strip("' ") for choice in listed.split(",")]


@pytest.mark.parametrize("path", sorted(CONFIGS.rglob("*.yaml")), ids=lambda path: path.stem)
def test_every_file_says_what_it_is_and_how_it_is_used(path):
    head = path.read_text().partition("\n\n")[0].partition("\ndefaults")[0]
    assert head.startswith("# ")
    assert "main_ppo" in head or "searchpath" in head or "Not to be run by itself" in head
