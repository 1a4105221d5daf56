"""veRL's asynchronous trainers in whole runs: their recipes in the tiny form; groups, counts and weights checked."""

import json
import time

import pytest
import recipe as recipes
import tiny_recipe
import trainer_process

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

STEPS, PROMPTS, ROLLOUTS = 3, 8, 4
# Probabilities of trainer and server under the same weights, in float32. Under others they are 1e-3 apart and more.
ROUNDING = 1e-5


@pytest.fixture
def left_behind(monkeypatch):
    """What a run that ended by itself leaves running, before `trainer_process` sweeps it."""
    end, left = trainer_process.end, []

    def end_later(process, mark):
        if process.poll() is not None:
            deadline = time.monotonic() + 20
            while trainer_process.processes_marked(mark) and time.monotonic() < deadline:
                time.sleep(0.5)
            left.extend(each.cmdline() for each in trainer_process.processes_marked(mark))
        end(process, mark)

    monkeypatch.setattr(trainer_process, "end", end_later)
    return left


def run(mode, folder, *arguments):
    """The metrics of each step of the recipe's tiny form on two ranks, as far as they are the same in both modes."""
    form = tiny_recipe.TinyForm(recipes.RECIPES / f"grpo_qwen3_8b_{mode}.sh", folder, steps=STEPS)
    form.prepare()
    records = form.run(lambda record: None, f"actor_rollout_ref.rollout.n={ROLLOUTS}", *arguments)
    assert [record.step for record in records] == list(range(1, STEPS + 1))
    for record in records:
        dump = [json.loads(line) for line in (form.run_folder.rollouts / f"{record.step}.jsonl").open()]
        assert len({row["input"] for row in dump}) == PROMPTS
        check_sharing(record.values, len(dump))
    return [record.values for record in records]


def check_sharing(step, rows):
    """Whole groups, counts of the whole step, and the ratio as it follows from veRL's own mean lengths."""
    prompt, response = step["prompt_length/mean"], step["response_length/mean"]
    assert rows == PROMPTS * ROLLOUTS
    assert step["zorro/groups"] == PROMPTS
    assert step["zorro/groups_split"] == step["zorro/fallback/group_cut"] == step["zorro/fallback/multimodal"] == 0
    assert step["zorro/tokens_total"] == pytest.approx(rows * (prompt + response))
    assert step["zorro/tokens_packed"] == pytest.approx(PROMPTS * (prompt + ROLLOUTS * response))
    for name in ("token_ratio", "token_ratio_best", "old_log_prob/token_ratio", "ref/token_ratio"):
        assert step[f"zorro/{name}"] == pytest.approx((prompt + response) / (prompt / ROLLOUTS + response)), name
    assert step["zorro/token_ratio"] > 2
    assert 1 < step["zorro/flop_ratio"] < step["zorro/token_ratio"]
    assert step["zorro/skipped_steps"] == 0
    assert step["actor/grad_norm"] > 0


def test_colocate_async(tmp_path, left_behind):
    """A batch ahead: the second step's rows are a step old."""
    steps = run("colocate_async", tmp_path)
    assert not left_behind
    assert steps[0]["training/off_policy/trajectory_staleness_worst/max"] == 0
    assert any(step["training/off_policy/trajectory_staleness/max"] > 0 for step in steps)
    for step in steps:
        if step["training/off_policy/trajectory_staleness_worst/max"] == 0:
            assert step["training/rollout_probs_diff_max"] < ROUNDING
        if step["training/off_policy/trajectory_staleness/min"] > 0:
            assert step["training/rollout_probs_diff_max"] > 100 * ROUNDING
            assert step["rollout_corr/rollout_is_max"] > 1 + 100 * ROUNDING


def test_separate_async(tmp_path, left_behind):
    """Nothing ahead: every row of a step is drawn from the weights that its first update starts from.

    Those are on the server's own slot since the update of weights before; and the second update scores its rows with
    them although the first has moved the trainer's. So that both agree with what the server said, in every step.
    """
    steps = run("separate_async", tmp_path, "trainer.v1.separate_async.num_warmup_batches=0")
    assert not left_behind
    for step in steps:
        assert step["training/off_policy/trajectory_staleness_worst/max"] == 0
        assert step["training/rollout_probs_diff_max"] < ROUNDING
        assert step["rollout_corr/rollout_is_max"] == pytest.approx(1, abs=100 * ROUNDING)
    # The weights did move: a first update alone has no distance to the reference.
    assert 100 * ROUNDING < steps[0]["actor/kl_loss"] < steps[-1]["actor/kl_loss"]
