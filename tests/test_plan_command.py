"""`zorro-verl plan`: what fits by the memory formulas, when it pays, and settings that veRL takes."""

import json
import math
import re
from dataclasses import replace
from types import SimpleNamespace

import estimates
import pytest
import recipe as recipes
import tiny_models
import torch
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from typer.testing import CliRunner
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from zorro_verl.actor_options import engine_options
from zorro_verl.advice import cautions, counted, flags, misfits, objections, overrides, pays
from zorro_verl.cli import app
from zorro_verl.estimate import ModelSize, shard_memory
from zorro_verl.known_models import config_of
from zorro_verl.memory import activation_memory, scoring_memory
from zorro_verl.planning import Plan, Question

LONG = Question(prompt=16384, response=4096, n=8, prompts=256, gpus=32, hbm=141e9)
MIDDLE = Question(prompt=8192, response=2048, n=8, prompts=256, gpus=8, hbm=80e9)


def plan(question, model="Qwen3-32B"):
    return Plan(config_of(model), question)


def run(*arguments):
    result = CliRunner().invoke(app, ["plan", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def ask(*arguments):
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


SMALL = "Qwen3-0.6B"
LENGTHS = ("--prompt", 16384, "--response", 4096, "--n", 8)


@pytest.mark.parametrize("change", [{}, {"logits_optimization": "memory"}, {"sequence_parallel": 4}])
def test_the_largest_budgets_fit_and_one_token_more_does_not(change):
    answer = plan(replace(LONG, **change))
    config, question = answer.config, answer.question
    shard = shard_memory(ModelSize.of(config), 32)
    assert answer.free == 141e9 - 14.1e9 - sum(shard)
    options = {"sequence_parallel": question.sequence_parallel, "logits_optimization": question.logits_optimization}

    def update(budget):
        tokens = budget * question.sequence_parallel
        return activation_memory(config, tokens, math.ceil(tokens * 2 / 3), checkpointing=True, **options).peak

    def log_prob(budget):
        tokens = budget * question.sequence_parallel
        return scoring_memory(config, tokens, math.ceil(tokens * 2 / 3), **options).peak

    for peak, budget in zip((update, log_prob), answer.largest, strict=True):
        assert peak(budget) <= answer.free < peak(budget + 1)
    assert all(0 <= most - own for most, own in zip(answer.largest, answer.budgets, strict=True))
    assert answer.budgets.update % 1024 == 0
    assert answer.budgets.log_prob <= 2 * answer.budgets.update
    assert answer.shared.update.memory <= answer.free
    assert answer.shared.log_prob.memory <= answer.free
    assert answer.holds_group
    assert answer.copies == 1
    assert (objections(answer), misfits(answer), cautions(answer)) == ([], [], [])


def test_a_budget_is_not_more_than_a_rank_has_tokens():
    answer = plan(replace(MIDDLE, prompts=8), "Qwen3-0.6B")
    assert answer.largest.update > answer.budgets.update == 8192 + 8 * 2048
    steps = plan(replace(MIDDLE, prompts=64, mini_batch=8), "Qwen3-0.6B")
    assert steps.budgets == (answer.budgets.update, 2 * answer.budgets.update), "an optimizer step of one group"
    assert steps.largest.log_prob > steps.budgets.log_prob


def test_rounding_never_drops_a_row():
    """Where a budget holds a group, or three of its rows, by a few tokens."""
    odd = plan(replace(MIDDLE, response=2000), "Qwen3-8B")
    assert odd._rounded(odd.question.group_tokens + 1, 32) == odd.question.group_tokens
    assert odd._rounded(odd.question.tokens_of(3) + 5, 32) == odd.question.tokens_of(3)
    assert odd._rounded(odd.question.tokens_of(3) + 900, 32) == 14 * 1024


def test_a_group_that_is_cut():
    """8 GPUs of 80 GB hold a few of sixteen long responses of Qwen3-8B: its prompt is computed again for more."""
    question = Question(16384, 8192, 16, 64, 8, 80e9)
    answer = plan(question, "Qwen3-8B")
    assert not answer.holds_group
    rows = max(k for k in range(1, 17) if question.tokens_of(k) <= answer.largest.update)
    assert question.tokens_of(rows) <= answer.budgets.update < question.tokens_of(rows + 1)
    taken = [
        activation_memory(answer.config, question.tokens_of(k), k * 8192, checkpointing=True).peak
        for k in (rows, rows + 1)
    ]
    assert taken[0] <= answer.free < taken[1]
    assert answer.copies == math.ceil(16 / rows) > 1
    assert answer.shared.update.memory == taken[0]
    assert answer.speedup.update < answer.speedup_of_whole_groups.update
    (caution,) = cautions(answer)
    assert f"computes its prompt {answer.copies:g} times" in caution
    assert f"{answer.speedup.update:.2f} instead of {answer.speedup_of_whole_groups.update:.2f}" in caution
    assert caution.endswith(f"Whole with {flags(question, answer.remedy)}.")
    assert plan(answer.remedy, "Qwen3-8B").holds_group
    assert len(question.changes(answer.remedy)) == 1
    assert objections(answer) == []


def test_the_remedy_is_what_has_to_change():
    without = replace(MIDDLE, checkpointing=False)
    assert flags(without, plan(without, "Qwen3-8B").remedy) == "--checkpointing"
    cut = Question(2048, 8192, 8, 64, 8, 80e9)
    assert flags(cut, plan(cut, "Qwen3-8B").remedy) == "--logits-optimization memory"
    both = replace(cut, response=32768)
    assert flags(both, plan(both, "Qwen3-8B").remedy) == "--sequence-parallel 4 --logits-optimization memory"
    nothing = replace(cut, prompts=8, n=2048)
    answer = plan(nothing, "Qwen3-8B")
    assert answer.remedy is None
    assert "No setting was found that holds a whole group" in " ".join(cautions(answer))


@pytest.mark.parametrize("gpus", [8, 64])
def test_what_does_not_fit_says_what_would(gpus):
    """Both parts of the memory, which are more than the limit, and settings that hold it when they are asked for."""
    question = Question(100_000, 4000, 8, 256, gpus, 80e9)
    answer = plan(question)
    (sentence,) = misfits(answer)
    state, row, limit = map(float, re.findall(r"([0-9.]+) GiB(?: of state| for a| ?, 90%)", sentence))
    taken = activation_memory(answer.config, 104_000, 4000, checkpointing=True).peak
    taken = max(taken, scoring_memory(answer.config, 104_000, 4000).peak)
    assert (state, row) == pytest.approx((sum(answer.shard) / 2**30, taken / 2**30), abs=0.05)
    assert state + row > limit == pytest.approx(72e9 / 2**30, abs=0.05)
    assert "one row of 104000 tokens" in sentence
    assert "with these settings no number of GPUs would hold it" in sentence
    assert f"It fits with {flags(question, answer.rescue)}." in sentence
    assert plan(answer.rescue).largest is not None
    assert (answer.rescue.gpus > gpus, answer.rescue.sequence_parallel > 1) == (gpus == 8, True)
    lines = run("--prompt", 100_000, "--response", 4000, "--model", "Qwen3-32B", "--gpus", gpus).stdout.splitlines()
    assert lines[1].startswith("It doesn't fit: ")
    assert [line for line in lines if "pays" in line][0].startswith("Where it fits, it pays: ")


def test_a_gain_that_is_little():
    text = run("--prompt", 150, "--response", 1000, "--model", SMALL).stdout
    assert "It hardly pays: compute_log_prob up to 1.1" in text
    assert "It pays" not in text


@pytest.mark.parametrize("response", [16, 1000])
def test_the_budget_without_logits_is_named_where_it_is_larger(response):
    """For short responses logits are few."""
    question = replace(MIDDLE, prompt=16000, response=response)
    without = plan(replace(question, logits_optimization="memory"), "Qwen3-8B")
    most, own = without.largest.update, plan(question, "Qwen3-8B").largest.update
    arguments = ("--prompt", 16000, "--response", response, "--model", "Qwen3-8B")
    line = f"With --logits-optimization memory: ppo_max_token_len_per_gpu up to {most}\n"
    assert (line in run(*arguments).stdout) == (most >= 1.1 * own) == (response == 1000)
    assert "With --logits" not in run(*arguments, "--logits-optimization", "memory").stdout


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"n": 1}, "with n = 1 no two rows have a prompt in common"),
        ({"prompt": 100}, "a prompt of 100 tokens is short beside 16384 of its responses"),
        ({"prompt": 1}, "a prompt of 1 token is short"),
        ({"prompts": 1}, "groups are cut so often that little is shared"),
    ],
)
def test_when_it_does_not_pay(change, words):
    answer = plan(replace(MIDDLE, **change), "Qwen3-8B")
    assert not pays(answer)
    assert [words in sentence for sentence in objections(answer)] == [True]
    assert misfits(answer) == []
    assert (pays(plan(MIDDLE, "Qwen3-8B")), objections(plan(MIDDLE, "Qwen3-8B"))) == (True, [])


def test_what_pays_less_still_pays():
    """Four prompts on eight ranks: each is computed twice."""
    answer = plan(replace(MIDDLE, prompts=4), "Qwen3-8B")
    assert answer.copies == 2
    assert pays(answer)
    assert objections(answer) == []
    assert cautions(answer) == [
        "It pays less than it could: an optimizer step has 4 prompts for 8 data-parallel ranks, so that groups are "
        "cut. Raise --prompts or --sequence-parallel."
    ]


def test_the_speedup_of_whole_groups_is_of_uncut_ones():
    """Eight ranks get 4 or 5 of 36 groups, and some of them half; those of one prompt get a row each."""
    whole = tuple(plan(replace(MIDDLE, prompts=32), "Qwen3-8B").speedup)
    for prompts in (36, 1):
        answer = plan(replace(MIDDLE, prompts=prompts), "Qwen3-8B")
        assert tuple(answer.speedup_of_whole_groups) == pytest.approx(whole)
        assert max(answer.speedup) < min(whole)


def test_few_groups_on_a_rank_are_said():
    answers = {
        change: cautions(plan(replace(MIDDLE, prompts=change[0], mini_batch=change[1]), "Qwen3-8B"))
        for change in ((8, None), (24, None), (32, None), (36, None), (256, 32))
    }
    assert answers[8, None][0].startswith("A rank has only 1 group in an optimizer step")
    assert answers[8, None][0].endswith("Raise --prompts.")
    assert "only 3 groups" in answers[24, None][0]
    assert answers[32, None] == answers[256, 32] == []
    divide = "An optimizer step's 36 prompts don't divide over 8 data-parallel ranks: some groups are cut."
    assert answers[36, None] == [divide]


def test_an_optimizer_step_is_what_counts():
    """Of 48 prompts in four steps of 12, ranks get one group and a half."""
    answer = plan(replace(MIDDLE, prompts=48, mini_batch=12), "Qwen3-8B")
    few, divide = cautions(answer)
    assert "only 1.5 groups" in few
    assert few.endswith("Raise --mini-batch.")
    assert "12 prompts don't divide over 8" in divide
    assert answer.copies > 1 == answer.shared.log_prob.prompts / 48
    assert answer.shared.update.micro_batches >= 4
    assert answer.speedup.update < answer.speedup.log_prob


def test_numbers_with_their_nouns():
    found = [counted(number, "group") for number in (1, 0.5, 4 / 3, 2, 1048576)]
    assert found == ["1 group", "0.5 groups", "1.33 groups", "2 groups", "1048576 groups"]


def test_a_model_that_does_not_fit_says_how_many_gpus_would():
    """The stated number fits a row of its longest, and one GPU fewer does not."""
    question = replace(LONG, gpus=8, hbm=80e9, prompts=15 * 16)
    answer = plan(question)
    assert answer.largest is None is answer.budgets
    assert pays(answer)
    (sentence,) = misfits(answer)
    assert sentence.startswith("It doesn't fit: 71.4 GiB of state and gathered weights")
    assert sentence.count("90% of 74.5 GiB")
    needed = answer.gpus_needed
    assert plan(replace(question, gpus=needed, prompts=needed * 8)).largest is not None
    fewer = replace(question, gpus=needed - 1, prompts=(needed - 1) * 8)
    assert plan(fewer).largest is None
    assert answer.speedup == answer.speedup_of_whole_groups, "what it would give if it did"


def test_what_fits_on_no_number_of_gpus():
    answer = plan(replace(LONG, hbm=12e9))
    assert answer.gpus_needed is None is answer.gpus_suggested
    assert answer.rescue is None
    assert "no number of GPUs would hold it. No other settings were found that do:" in misfits(answer)[0]


@pytest.mark.parametrize(("prompts", "width"), [(256, 1), (256, 2), (96, 4)])
def test_the_suggested_gpus_are_taken_as_they_are(prompts, width):
    """The question itself, with that many GPUs: it divides, it fits, and no number between would do both."""
    asked = ("--prompt", 16384, "--response", 4096, "--model", "Qwen3-32B", "--prompts", prompts)
    asked += ("--sequence-parallel", width)
    short = ask(*asked, "--gpus", 8)
    (sentence,) = short["misfits"]
    suggested = int(re.search(r"; (\d+) GPUs would hold it", sentence)[1])
    assert suggested == short["memory"]["gpus_suggested"] >= short["memory"]["gpus_needed"]
    assert ask(*asked, "--gpus", suggested)["fits"] is True
    for gpus in range(short["memory"]["gpus_needed"], suggested, width):
        assert run(*asked, "--gpus", gpus).exit_code == 2


def test_no_number_of_gpus_that_rows_divide_over():
    answer = plan(replace(LONG, gpus=2, hbm=80e9, prompts=2, n=1))
    assert answer.gpus_suggested is None
    (sentence,) = misfits(answer)
    assert f"{answer.gpus_needed} GPUs or more would hold it, but 2 x 1 rows divide over none" in sentence
    assert "change --prompts." in sentence


def test_it_agrees_with_the_table_of_recipes():
    """Token ratio, memory and seconds of a step of Qwen3-32B on long documents."""
    recipe = next(each for each in recipes.every() if each.stem == "grpo_qwen3_32b_long_context")
    table = estimates.estimate(recipe)
    question = replace(LONG, sequence_parallel=4, logits_optimization="memory", mini_batch=64)
    assert table.question == question
    answer = plan(question)
    shard = answer.shard
    assert table.question.lengths.token_ratio == pytest.approx(answer.prediction.rows.token_ratio)
    assert (shard.weights + shard.gradients + shard.optimizer, shard.gathered) == (table.state, table.gathered)
    budget = 24576 * 4
    options = {"sequence_parallel": 4, "logits_optimization": "memory", "checkpointing": True}
    assert activation_memory(answer.config, budget, round(budget * 2 / 3), **options).peak == table.activations
    assert answer.largest.update > 24576
    for way, seconds in ((answer.stock, table.stock_seconds), (answer.shared, table.shared_seconds)):
        scored, trained = (answer.prediction.seconds(one, estimates.SPEED) for one in way)
        assert 2 * scored + trained == pytest.approx(seconds), "old and reference log-probs"
    assert table.rollout == pytest.approx(0.7 * 141e9 + answer.resident)


@pytest.fixture(scope="module")
def verls_config():
    def composed(settings):
        with initialize_config_module("verl.trainer.config", version_base=None):
            return compose("ppo_trainer", settings)

    return composed


@pytest.mark.parametrize("mode", ["none", "compute", "memory"])
def test_verl_takes_the_settings(mode, verls_config):
    """And the engine reads from them what was planned for."""
    question = replace(MIDDLE, logits_optimization=mode, sequence_parallel=2, offload=True)
    answer = plan(question, "Qwen3-8B")
    config = verls_config(overrides(answer))
    actor = config.actor_rollout_ref.actor
    assert (actor.strategy, actor.use_dynamic_bsz, actor.ulysses_sequence_parallel_size) == ("zorro", True, 2)
    assert (config.data.train_batch_size, config.actor_rollout_ref.rollout.n) == (256, 8)
    assert actor.ppo_mini_batch_size == 256
    assert config.critic.ppo_mini_batch_size == 256, "it follows"
    assert actor.ppo_max_token_len_per_gpu == answer.budgets.update
    for role in ("rollout", "ref"):
        assert config.actor_rollout_ref[role].log_prob_max_token_len_per_gpu == answer.budgets.log_prob
        assert config.actor_rollout_ref[role].log_prob_use_dynamic_bsz
    assert actor.fsdp_config.param_offload
    assert actor.fsdp_config.optimizer_offload
    model = config.actor_rollout_ref.model
    assert model.enable_gradient_checkpointing is True
    OmegaConf.resolve(actor.fsdp_config)
    assert engine_options(actor.fsdp_config, model).logits_optimization == mode


@pytest.mark.parametrize(("prompts", "mini_batch", "multiple"), [(64, None, 512), (512, None, 4096), (512, 64, 512)])
def test_verl_pads_nothing_and_takes_the_steps_that_were_predicted(prompts, mini_batch, multiple, verls_config):
    """By the multiple to which veRL's own trainer fills a batch, and the rows of its mini-batches."""
    answer = plan(replace(MIDDLE, prompts=prompts, mini_batch=mini_batch), "Qwen3-8B")
    config = verls_config(overrides(answer))
    trainer = SimpleNamespace(use_critic=False, config=config, global_steps=1)
    rows = config.data.train_batch_size * config.actor_rollout_ref.rollout.n
    assert PPOTrainer._get_required_batch_multiple(trainer, answer.question.ranks) == multiple
    assert rows % multiple == 0
    assert rows // multiple == answer.question.mini_batches
    assert len(answer.prediction.rows.groups) == rows


def test_settings_that_are_off(verls_config):
    settings = overrides(plan(replace(MIDDLE, checkpointing=False, response=128), "Qwen3-0.6B"))
    assert "actor_rollout_ref.model.enable_gradient_checkpointing=False" in settings
    assert not [each for each in settings if "offload" in each or "ulysses" in each or "fused" in each]
    assert verls_config(settings).actor_rollout_ref.model.enable_gradient_checkpointing is False


def test_offload_is_what_sampling_gains():
    stays, goes = (plan(replace(LONG, offload=offload)) for offload in (False, True))
    assert (stays.resident, goes.resident) == (stays.shard.weights + stays.shard.optimizer, 0)
    assert stays.largest == goes.largest
    assert (stays.rollout_share, goes.rollout_share) == (0.8, 0.9)
    assert stays.rollout_share * 141e9 + stays.resident <= 0.9 * 141e9


def test_the_command_of_the_readme():
    result = run(*LENGTHS, "--model", "Qwen3-32B", "--gpus", 32, "--hbm", 141)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert len(lines) <= 25
    assert max(map(len, lines)) <= 120
    text = " ".join(result.stdout.split())
    answer = plan(LONG)
    assert "It pays: compute_log_prob up to 3.00 times faster, update_actor 2.99 times" in text
    assert f"ppo_max_token_len_per_gpu={answer.largest.update}, " in text
    assert f"suggested {answer.budgets.update} ({answer.shared.update.memory / 2**30:.1f} GiB)" in text
    assert "A group is 49152 packed tokens; a micro-batch holds" in text
    assert "on 32 GPUs of 141 GB = 131.3 GiB; a step has 256 prompts x 8 responses" in text
    assert "weights 3.8 + gradients 3.8 + optimizer 7.6 + gathered by FSDP 10.3 + left free 13.1 (10%)" in text
    assert f"While sampling, {answer.resident / 2**30:.1f} GiB stay" in text
    assert text.count(" GB") == 1, "the data sheet's"
    assert "Estimates, not measured" in text
    pasted = result.stdout.partition("Settings for veRL:\n")[2].partition("Estimates")[0].replace("\\\n", " ").split()
    assert pasted == overrides(answer)
    settings = result.stdout.partition("Settings for veRL:\n")[2].partition("Estimates")[0].splitlines()
    assert max(map(len, settings)) <= 104
    assert len(settings) == 6


def test_one_of_each_in_words():
    text = " ".join(
        run("--prompt", 900, "--response", 9, "--n", 1, "--prompts", 1, "--gpus", 1, "--model", SMALL).stdout.split()
    )
    assert "on 1 GPU of 80 GB = 74.5 GiB; a step has 1 prompt x 1 response of 900 + 9 tokens" in text


def test_json_has_the_same_numbers():
    found = ask(*LENGTHS, "--model", "Qwen/Qwen3-32B", "--gpus", 32, "--hbm", 141, "--peak-tflops", 500)
    answer = plan(LONG)
    assert (found["pays"], found["fits"], found["misfits"], found["remedy"]) == (True, True, [], None)
    assert found["memory"]["rollout_share"] == answer.rollout_share
    assert found["memory"]["gpus_needed"] == answer.gpus_needed < 32
    assert (found["peak_tflops"], found["utilisation"]) == (500, 0.4)
    assert found["speedup"] == answer.speedup._asdict()
    assert found["token_ratio"]["update"] == found["token_ratio_best"] == pytest.approx(10 / 3)
    assert found["largest_budgets"] == answer.largest._asdict()
    assert found["overrides"] == overrides(answer)
    assert found["memory"]["micro_batch"]["update"] == answer.shared.update.memory
    assert found["memory"]["micro_batch_fsdp2_at_least"]["update"] == answer.stock.update.memory
    assert found["seconds"]["zorro"]["update"] == 2 * answer.shared.update.slowest / (500e12 * 0.4)
    assert found["question"]["hbm"] == 141e9


def test_it_exits_with_0_when_it_does_not_pay():
    found = ask("--prompt", 50, "--response", 500, "--n", 1, "--model", "Qwen3-0.6B")
    assert found["pays"] is False
    assert len(found["objections"]) == 1
    found = ask("--prompt", 16384, "--response", 4096, "--model", "Qwen3-32B")
    assert (found["pays"], found["fits"], len(found["misfits"])) == (True, False, 1), "it pays where it fits"
    result = run("--prompt", 16384, "--response", 4096, "--model", "Qwen3-32B")
    assert result.exit_code == 0
    assert "It doesn't fit" in result.stdout
    assert "Settings for veRL" not in result.stdout


def test_a_hybrid_has_a_speedup_and_no_memory(tmp_path):
    tiny_models.build("qwen3_next", torch.float32).config.save_pretrained(tmp_path)
    arguments = ("--prompt", 400, "--response", 50, "--model", tmp_path, "--hbm", 24)
    found = ask(*arguments)
    assert found["memory"] is None is found["budgets"]
    assert (found["pays"], found["fits"], found["misfits"], found["remedy"]) == (True, None, [], None)
    assert found["speedup"]["update"] > 2
    assert "models of type qwen3_next" in found["no_memory"]
    assert not [each for each in found["overrides"] if "max_token_len" in each]
    text = " ".join(run(*arguments).stdout.split())
    assert "Memory is not predicted for models of type qwen3_next" in text
    assert "A group is 800 packed tokens: ppo_max_token_len_per_gpu should hold one" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--prompt", 0), "prompt: expected at least 1, got 0"),
        (("--n", 0), "n: expected at least 1, got 0"),
        (("--hbm", -1), "hbm: expected 0.1 to 1000000 GB, got -1"),
        (("--hbm", "nan"), "hbm: expected 0.1 to 1000000 GB, got nan"),
        (("--hbm", "inf"), "GB, got inf"),
        (("--hbm", "1e300"), "GB, got 1e+300"),
        (("--hbm", "-1.23456789"), "GB, got -1.23456789"),
        (("--utilisation", "nan"), "got 989 and nan"),
        (("--utilisation", "inf"), "got 989 and inf"),
        (("--peak-tflops", "inf"), "got inf and 0.4"),
        (("--sequence-parallel", 3), "sequence_parallel: expected a divisor of the number of GPUs, 8, got 3"),
        (("--prompts", 3, "--n", 1), "step x n to be a multiple of the 8 data-parallel ranks, got 3 x 1"),
        (("--mini-batch", 0), "mini_batch: expected at least 1, got 0"),
        (("--mini-batch", 48), "mini_batch: expected a divisor of the 256 prompts of a step, got 48"),
        (("--mini-batch", 4, "--n", 1), "mini_batch: expected prompts of an optimizer step x n to be a multiple of"),
        (("--logits-optimization", "best"), "logits_optimization: expected none or compute or memory, got 'best'"),
        (("--gpus", 48, "--sequence-parallel", 48), "sequence_parallel: expected a divisor of 64"),
        (("--utilisation", 1.5), "got 989 and 1.5"),
        (("--peak-tflops", 0), "got 0 and 0.4"),
        (("--peak-tflops", "nan"), "got nan and 0.4"),
        (("--model", "./nowhere"), "model: expected a checkpoint folder"),
    ],
)
def test_wrong_numbers_are_one_line_and_2(arguments, words):
    given = ["--prompt", 1024, "--response", 64, "--model", "Qwen3-32B", *arguments]
    result = run(*given)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("zorro-verl plan: ")
    assert words in line
