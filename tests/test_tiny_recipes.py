"""Recipes really run: their own scripts and preparations, with veRL's trainer, tiny on a CPU; and what they'd take."""

import json
import re
import subprocess
import sys

import estimates
import pytest
import recipe as recipes
import tiny_recipe
from hydra import compose, initialize_config_module

EVERY = {each.stem: each for each in recipes.every()}
# Long documents run in tests/test_multinode.py, and text-to-SQL in tests/test_async_trainers.py, under both
# asynchronous recipes; the same scripts with other arguments are left to `make recipe`.
RUN_HERE = ("ppo_qwen3_0.6b_gsm8k", "grpo_qwen3_30b_a3b_gsm8k")


@pytest.mark.ray
@pytest.mark.parametrize("name", RUN_HERE)
def test_a_recipe_runs(name, tmp_path):
    form = tiny_recipe.TinyForm(EVERY[name], tmp_path / name)
    form.prepare()
    records = form.run(lambda record: None)

    assert [record.step for record in records] == [1, 2]
    rollouts = int(recipes.settings(recipes.command_line(form.recipe, form.variables))["actor_rollout_ref.rollout.n"])
    for record in records:
        values = record.values
        dump = [json.loads(line) for line in (form.run_folder.rollouts / f"{record.step}.jsonl").open()]
        prompts = {row["input"] for row in dump}
        assert len(dump) == len(prompts) * rollouts
        assert values["zorro/groups"] == len(prompts)
        assert values["zorro/groups_split"] == 0
        assert values["zorro/token_ratio"] == values["zorro/token_ratio_best"]
        # A token a character: the ratio of the texts themselves.
        lengths = [(row["input"], len(row["output"])) for row in dump]
        total = sum(len(text) + n for text, n in lengths)
        packed = sum(len(text) for text in prompts) + sum(n for _, n in lengths)
        assert values["zorro/token_ratio"] == pytest.approx(total / packed, rel=0.1)
        assert values["zorro/token_ratio"] > 2
        assert values["actor/grad_norm"] > 0, "rows of a group have different rewards"
        if name.startswith("ppo"):
            assert values["zorro/critic/token_ratio"] == values["zorro/values/token_ratio"] > 2
            assert values["critic/grad_norm"] > 0
        else:
            assert values["zorro/ref/token_ratio"] == values["zorro/token_ratio"]


@pytest.mark.parametrize("name", EVERY)
def test_a_recipe_names_one_preparation(name):
    python, script, *options = recipes.preparation(EVERY[name])
    assert (python, (recipes.RECIPES.parent / script).is_file()) == ("python3", True)
    assert {"--source", "--out"} <= set(options)


@pytest.mark.parametrize("strategy", ["zorro", "fsdp2"])
@pytest.mark.parametrize("name", EVERY)
def test_the_tiny_form_of_every_recipe_composes(name, strategy, tmp_path):
    form = tiny_recipe.TinyForm(EVERY[name], tmp_path, strategy)
    arguments = recipes.command_line(form.recipe, form.variables, *form.overrides())[2:]
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", [each for each in arguments if not each.startswith("hydra.")])
    assert (config.trainer.device, config.actor_rollout_ref.rollout.name) == ("cpu", "hf")
    assert config.actor_rollout_ref.actor.strategy == strategy


def test_a_recipe_is_prepared_again(tmp_path):
    """For another strategy, say, in the same folder."""
    form = tiny_recipe.TinyForm(EVERY["grpo_qwen3_0.6b_gsm8k"], tmp_path)
    for _ in range(2):
        form.prepare()
        assert (form.material / "data" / "train.parquet").is_file()


def test_settings_are_what_counts_last():
    arguments = ["-m", "verl.trainer.main_ppo", "data.seed=1", "++a.b=x=y", "data.seed=2"]
    assert recipes.settings(arguments) == {"data.seed": "2", "a.b": "x=y"}


def test_a_recipe_that_fails_says_why(tmp_path):
    broken = tmp_path / "broken.sh"
    broken.write_text("echo 'no such thing' >&2\nexit 3\n")
    with pytest.raises(ValueError, match="expected a recipe that calls Python, got no such thing"):
        recipes.command_line(broken, {})
    with pytest.raises(ValueError, match="expected one line .* got 0"):
        recipes.preparation(broken)


def test_unknown_recipe_and_steps_are_one_line(capsys):
    for argv, words in (
        (["recipes/none.sh"], "expected a recipe, one of grpo_"),
        ([str(EVERY[RUN_HERE[0]]), "--steps", "0"], "STEPS"),
        ([str(EVERY[RUN_HERE[0]]), "--strategy", ""], "STRATEGY: expected zorro or fsdp2, got"),
    ):
        with pytest.raises(SystemExit) as ended:
            tiny_recipe.main(argv)
        assert ended.value.code == 2
        assert words in capsys.readouterr().err.splitlines()[-1]


def test_a_misspelt_key_is_one_line_before_anything_is_prepared(tmp_path, capsys):
    text = EVERY["grpo_qwen3_0.6b_gsm8k"].read_text()
    recipe = tmp_path / "grpo_misspelt.sh"
    recipe.write_text(text.replace("actor.ppo_mini_batch_size=", "actor.ppo_mini_batchsize="))
    assert tiny_recipe.main([str(recipe), "--out", str(tmp_path / "out")]) == 1
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert "ppo_mini_batchsize" in said[0]
    assert not (tmp_path / "out").exists()


def test_the_table_of_estimates_is_up_to_date(capsys):
    assert estimates.main(["--check"]) == 0, capsys.readouterr().out


@pytest.mark.parametrize("name", EVERY)
def test_a_recipe_fits_its_gpus(name):
    """While a model trains and while vLLM samples; a tenth of the GPU is left to allocator, NCCL and CUDA itself."""
    e = estimates.estimate(EVERY[name])
    assert e.state + e.gathered + e.activations < 0.9 * e.question.hbm
    assert e.rollout < 0.9 * e.question.hbm
    assert e.shared_seconds < e.stock_seconds


def test_an_estimate_follows_the_recipe(tmp_path, monkeypatch):
    """Not the environment; and half the GPUs take twice as long."""
    monkeypatch.setenv("NNODES", "1")
    recipe = EVERY["grpo_qwen3_32b_long_context"]
    whole = estimates.estimate(recipe)
    assert whole.question.gpus == 32
    text = recipe.read_text().replace("NNODES=${NNODES:-4}", "NNODES=${NNODES:-2}")
    half_recipe = tmp_path / recipe.name
    half_recipe.write_text(text)
    half = estimates.estimate(half_recipe)
    assert half.shared_seconds == pytest.approx(2 * whole.shared_seconds)
    assert half.state > 1.9 * whole.state


def test_the_script_needs_no_path(tmp_path):
    """It is started from anywhere."""
    result = subprocess.run(
        [sys.executable, tiny_recipe.__file__, "--help"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0
    assert re.search(r"recipe in its tiny form", result.stdout)
