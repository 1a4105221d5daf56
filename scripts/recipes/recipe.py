"""What a recipe says without being run: the command line that it hands to veRL, and the preparation that it names."""

import os
import re
import shlex
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from hydra import compose, initialize_config_module
from omegaconf import DictConfig

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
VARIABLES = ("STRATEGY", "MODEL", "CRITIC_MODEL", "DATA", "OUT", "NNODES", "GPUS_PER_NODE", "PYTHON")
# Takes the place of Python in a recipe and writes down what it is called with.
_STUB = '#!/bin/sh\nfor argument; do printf "%s\\0" "$argument"; done\n'
_PREPARATION = re.compile(r"^#\s+(python3 recipes/data/\S+\.py .*)$", re.MULTILINE)


def every() -> list[Path]:
    """All recipes, by name."""
    return sorted(RECIPES.glob("*.sh"))


def command_line(recipe: Path, variables: Mapping[str, str], *arguments: str) -> list[str]:
    """What a recipe calls Python with, ``-m verl.trainer.main_ppo`` first.

    Args:
        recipe: its file.
        variables: of `VARIABLES`; those that aren't here are as if nobody had set them.
        arguments: of the recipe.

    Raises:
        ValueError: the recipe ended with an error, whose words are in the message.
    """
    with tempfile.TemporaryDirectory() as folder:
        stub = Path(folder) / "python"
        stub.write_text(_STUB)
        stub.chmod(0o755)
        inherited = {name: value for name, value in os.environ.items() if name not in VARIABLES}
        environment = inherited | variables | {"PYTHON": str(stub)}
        command = ["bash", str(recipe), *arguments]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    if result.returncode:
        raise ValueError(f"{recipe}: expected a recipe that calls Python, got {result.stderr.strip()}")
    return result.stdout.split("\0")[:-1]


def settings(arguments: list[str]) -> dict[str, str]:
    """The value of each key of a command line; the last one counts, as for Hydra."""
    pairs = (argument.split("=", 1) for argument in arguments if "=" in argument)
    return {key.lstrip("+"): value for key, value in pairs}


def composed(recipe: Path) -> DictConfig:
    """A recipe's config as veRL composes it, whatever the environment says."""
    arguments = command_line(recipe, {})[2:]
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", [each for each in arguments if not each.startswith("hydra.")])


def complaints(recipe: Path) -> list[str]:
    """What would cut groups, or end the run late, when all lengths are at their limits: a line each."""
    config, found = composed(recipe), []
    actor, ref, rollout = (config.actor_rollout_ref[role] for role in ("actor", "ref", "rollout"))
    node, batch = config.trainer.n_gpus_per_node, config.data.train_batch_size
    group = config.data.max_prompt_length + rollout.n * config.data.max_response_length
    budgets = [
        ("actor_rollout_ref.actor.ppo_max_token_len_per_gpu", actor, actor.ppo_max_token_len_per_gpu),
        ("actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu", actor, rollout.log_prob_max_token_len_per_gpu),
        ("actor_rollout_ref.ref.log_prob_max_token_len_per_gpu", ref, ref.log_prob_max_token_len_per_gpu),
    ]
    mini_batches = [("actor_rollout_ref.actor", actor, actor)]
    if config.algorithm.adv_estimator == "gae":
        critic = config.critic
        for name in ("ppo_max_token_len_per_gpu", "ppo_infer_max_token_len_per_gpu"):
            budgets.append((f"critic.{name}", critic.fsdp, critic[name]))
        mini_batches.append(("critic", critic, critic.fsdp))
    for key, owner, budget in budgets:
        width = owner.ulysses_sequence_parallel_size
        if group > budget * width:
            found.append(f"{key}={budget} on {width} GPUs is below a group of {group} tokens, which would be cut")
    for place, owner, engine in mini_batches:
        width, prompts = engine.ulysses_sequence_parallel_size, owner.ppo_mini_batch_size
        if node % width:
            found.append(f"{place}: ulysses_sequence_parallel_size={width} does not divide the {node} GPUs of a node")
        ranks = config.trainer.nnodes * node // width
        if prompts % ranks:
            found.append(f"{place}.ppo_mini_batch_size={prompts} does not divide into whole groups on {ranks} ranks")
        if batch % prompts:
            found.append(f"data.train_batch_size={batch} is no multiple of {place}.ppo_mini_batch_size={prompts}")
    return found


def preparation(recipe: Path) -> list[str]:
    """The words of the command in a recipe's head that prepares its data.

    Raises:
        ValueError: there is none, or more than one.
    """
    lines = _PREPARATION.findall(recipe.read_text())
    if len(lines) != 1:
        raise ValueError(f"{recipe}: expected one line '# python3 recipes/data/<name>.py ...', got {len(lines)}")
    return shlex.split(lines[0], comments=True)
