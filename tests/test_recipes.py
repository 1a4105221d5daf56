"""Every recipe as veRL reads it: composed, validated, and held to what its comments promise. None is run here."""

import copy
import functools
import inspect
import re
import subprocess

import pytest
import ray
import recipe as recipes
import tiny_models
import tiny_tokenizer
import torch
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf, open_dict

from zorro_verl.known_models import config_of

EVERY = recipes.every()
RECIPES = pytest.mark.parametrize("recipe", EVERY, ids=lambda recipe: recipe.stem)
STRATEGIES = pytest.mark.parametrize("strategy", ["zorro", "fsdp2"])
PAIRS = [(ppo, ppo.with_name(ppo.name.replace("ppo_", "grpo_", 1))) for ppo in EVERY if ppo.stem.startswith("ppo_")]
OVERRIDE = re.compile(r"^ +(?:\+\+)?[a-z][\w.]*=")


@functools.cache
def settings(recipe, strategy="zorro"):
    """What the recipe sets, by key, with nothing else in its environment."""
    return recipes.settings(recipes.command_line(recipe, {"STRATEGY": strategy, "OUT": "/out"}))


def models_of(recipe):
    """The names of the models that it trains: the actor's, and with a critic the critic's."""
    own = settings(recipe)
    names = {"${actor_rollout_ref.model.path}": own["actor_rollout_ref.model.path"]}
    return [
        names.get(own[key], own[key]) for key in ("actor_rollout_ref.model.path", "critic.model.path") if key in own
    ]


@pytest.fixture(scope="module")
def composed(tmp_path_factory):
    """A function that composes what veRL's main does from a recipe's command line, with tiny models of its types."""

    @functools.cache
    def folder(name):
        path = tmp_path_factory.mktemp("model")
        model_type, tokenizer = config_of(name).model_type, tiny_tokenizer.build()
        tokenizer.save_pretrained(path)
        tiny_models.build(model_type, torch.float32, vocab_size=len(tokenizer)).save_pretrained(path)
        return str(path)

    @functools.cache
    def composed(recipe, strategy="zorro", *arguments):
        folders = map(folder, models_of(recipe))
        variables = {"STRATEGY": strategy, **dict(zip(("MODEL", "CRITIC_MODEL"), folders, strict=False))}
        module, name, *overrides = recipes.command_line(recipe, variables, *arguments)
        assert (module, name) == ("-m", "verl.trainer.main_ppo")
        with initialize_config_module("verl.trainer.config", version_base=None):
            return compose("ppo_trainer", overrides)

    return composed


@RECIPES
def test_bash_takes_it(recipe):
    subprocess.run(["bash", "-n", recipe], check=True, timeout=20)
    assert recipe.stat().st_mode & 0o111, "not executable"
    assert "\nset -euo pipefail\n" in recipe.read_text()


@RECIPES
@STRATEGIES
def test_verl_takes_it(recipe, strategy, composed):
    """What veRL's main does before it starts Ray, and the dataclasses that its workers build; what they don't know, or
    this package refuses, is an error."""
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import omega_conf_to_dataclass, validate_config
    from verl.utils.device import auto_set_device
    from verl.workers.config import HFModelConfig, RolloutConfig

    config = copy.deepcopy(composed(recipe, strategy))
    auto_set_device(config)  # this package's checks, and its options for reference and critic
    validate_config(config, need_reference_policy(config), need_critic(config))

    section = config.actor_rollout_ref
    assert isinstance(omega_conf_to_dataclass(section.model), HFModelConfig)
    assert isinstance(omega_conf_to_dataclass(section.rollout), RolloutConfig)
    assert omega_conf_to_dataclass(section.actor).engine.strategy == strategy
    with open_dict(section.ref):  # the worker takes these out first
        for name in ("micro_batch_size", "micro_batch_size_per_gpu", "use_dynamic_bsz", "max_token_len_per_gpu"):
            section.ref.pop(f"log_prob_{name}")
        section.ref.use_dynamic_bsz = True
    assert omega_conf_to_dataclass(section.ref).engine.strategy == strategy
    assert need_critic(config) == recipe.stem.startswith("ppo_")
    if need_critic(config):
        critic = omega_conf_to_dataclass(config.critic)
        assert critic.engine.strategy == strategy
        assert critic.ppo_infer_max_token_len_per_gpu == section.actor.ppo_max_token_len_per_gpu
    omega_conf_to_dataclass(config.algorithm)
    OmegaConf.to_container(config.trainer, resolve=True)


@RECIPES
def test_strategies_differ_in_nothing_else(recipe):
    ours, verls = settings(recipe, "zorro"), settings(recipe, "fsdp2")
    assert {key for key in ours | verls if ours.get(key) != verls.get(key)} == {"actor_rollout_ref.actor.strategy"}
    assert not [key for key in ours if ".zorro." in key]


@RECIPES
def test_whole_groups_everywhere(recipe, composed):
    """On ranks, in mini-batches, and in every budget of tokens, when all lengths are at their maximum."""
    assert recipes.complaints(recipe) == []
    config = composed(recipe)
    rollout = config.actor_rollout_ref.rollout
    prompt, response = config.data.max_prompt_length, config.data.max_response_length
    assert config.actor_rollout_ref.model.use_remove_padding
    assert config.actor_rollout_ref.actor.use_dynamic_bsz

    sampling = rollout.n_gpus_per_node if rollout.nnodes else config.trainer.n_gpus_per_node
    assert sampling % rollout.tensor_model_parallel_size == 0, "a server is on one node"
    assert rollout.max_model_len == prompt + response
    assert config.data.filter_overlong_prompts
    assert rollout.n > 1, "nothing to share"


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("ppo_max_token_len_per_gpu=24576", "ppo_max_token_len_per_gpu=12287", "is below a group of 49152 tokens"),
        ("rollout.log_prob_max_token_len_per_gpu=49152", "rollout.log_prob_max_token_len_per_gpu=1", "below a group"),
        ("ref.log_prob_max_token_len_per_gpu=49152", "ref.log_prob_max_token_len_per_gpu=1", "below a group"),
        ("ppo_mini_batch_size=64", "ppo_mini_batch_size=60", "does not divide into whole groups on 8 ranks"),
        (
            "train_batch_size=256",
            "train_batch_size=250",
            "is no multiple of actor_rollout_ref.actor.ppo_mini",
        ),
        (
            "ulysses_sequence_parallel_size=4",
            "ulysses_sequence_parallel_size=3",
            "does not divide the 8 GPUs",
        ),
    ],
)
def test_numbers_that_cut_groups_are_complained_of(old, new, complaint, tmp_path):
    text = (recipes.RECIPES / "grpo_qwen3_32b_long_context.sh").read_text()
    assert text.count(old) == 1
    changed = tmp_path / "changed.sh"
    changed.write_text(text.replace(old, new))
    assert any(complaint in found for found in recipes.complaints(changed))


@RECIPES
def test_every_setting_is_explained(recipe):
    """By a comment beside it or above; one above speaks for two lines at most."""
    lines = recipe.read_text().splitlines()
    places = [place for place, line in enumerate(lines) if OVERRIDE.match(line)]
    assert places
    for place in places:
        above = [lines[place - 1]] + ([lines[place - 2]] if OVERRIDE.match(lines[place - 1]) else [])
        assert " # " in lines[place] or any(line.lstrip().startswith("# ") for line in above), lines[place]


@pytest.fixture(scope="module")
def verls_own():
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer")


@RECIPES
def test_settings_can_be_overridden(recipe, composed, verls_own):
    """All of them, by arguments: a plain `+` could not. `++` is for what veRL's own config does not show."""
    arguments = recipes.command_line(recipe, {"OUT": "/out"})
    assert not [each for each in arguments if re.match(r"\+[^+]", each)]
    added = [each for each in arguments if each.startswith("++")]
    for key in (each[2:].split("=")[0] for each in added):
        assert OmegaConf.select(verls_own, key) is None, f"{key} needs no ++"
    config = composed(recipe, "zorro", *added, "trainer.total_epochs=77", "data.seed=5")
    assert config.trainer.total_epochs == 77
    assert config.data.seed == 5


@RECIPES
def test_added_keys_are_read(recipe):
    """Hydra knows all others. Ray's are arguments of its own, the template's are Qwen3's, and what is added to actor,
    rollout or critic is checked where their dataclasses are built."""
    for key in (each[2:].split("=")[0] for each in recipes.command_line(recipe, {}) if each.startswith("++")):
        section, _, name = key.rpartition(".")
        if key.startswith("ray_kwargs.ray_init."):
            assert key.split(".")[2] in inspect.signature(ray.init).parameters
        elif section == "data.apply_chat_template_kwargs":
            assert name == "enable_thinking"
        else:
            assert key.split(".")[0] in ("critic", "actor_rollout_ref")


def test_an_unknown_key_is_an_error(composed):
    with pytest.raises(Exception, match="total_epoch"):
        composed(EVERY[0], "zorro", "trainer.total_epoch=1")


@RECIPES
def test_paths(recipe, composed):
    from verl.trainer.ppo.reward import get_custom_reward_fn

    own = recipes.settings(recipes.command_line(recipe, {"DATA": "some/data", "OUT": "some/out"}))
    for key in ("data.train_files", "data.val_files", "trainer.default_local_dir", "hydra.run.dir"):
        assert own[key].startswith("/"), "Ray's processes have folders of their own"
    assert own["data.train_files"].endswith("/some/data/train.parquet")
    assert own["data.val_files"].endswith("/some/data/validation.parquet")
    assert own["trainer.default_local_dir"].endswith("/some/out/checkpoints")
    script = recipes.preparation(recipe)[1]
    assert (recipes.RECIPES.parent / script).is_file()
    reward = get_custom_reward_fn(composed(recipe))
    assert (reward is None) == ("gsm8k" in recipe.stem)  # whose reward is veRL's own


@RECIPES
def test_variables_are_those_that_all_recipes_have(recipe):
    used = set(re.findall(r"\$\{([A-Z_]+):-", recipe.read_text()))
    assert used <= set(recipes.VARIABLES)
    # OUT alone is said where a recipe is built on another, as runs are kept apart.
    assert "OUT" in used


@RECIPES
def test_many_nodes_are_said_at_the_top(recipe):
    own, head = settings(recipe), recipe.read_text().partition("\nset -euo")[0]
    many = own["trainer.nnodes"] != "1"
    assert (own.get("ray_kwargs.ray_init.address") == "auto") == many
    many = many or "actor_rollout_ref.rollout.nnodes" in own  # a rollout of its own
    for line in ("ray start --head", "ray start --address=", "recipes/cluster/start_ray.sh", "on the head"):
        assert (line in head) == many, line


@pytest.mark.parametrize(("ppo", "grpo"), PAIRS, ids=lambda recipe: recipe.stem)
def test_ppo_differs_from_grpo_in_critic_and_advantages(ppo, grpo):
    theirs, ours = settings(grpo), settings(ppo)
    differing = {key for key in theirs | ours if theirs.get(key) != ours.get(key)}
    allowed = ("algorithm.adv_estimator", "algorithm.gamma", "algorithm.lam", "trainer.critic_warmup", "critic.")
    assert {key for key in differing if not key.startswith(allowed)} == {"trainer.max_critic_ckpt_to_keep"}
    assert {"algorithm.adv_estimator", "critic.strategy", "critic.model.path"} <= differing


def test_both_algorithms_and_all_sizes_are_there():
    sizes = {(recipe.stem.split("_")[0], settings(recipe)["actor_rollout_ref.model.path"]) for recipe in EVERY}
    for name in ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-8B", "Qwen/Qwen3-32B"):
        assert {("grpo", name), ("ppo", name)} <= sizes
    assert ("grpo", "Qwen/Qwen3-30B-A3B") in sizes
