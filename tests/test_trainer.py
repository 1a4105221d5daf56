"""verl's own trainer on the CPU with ``actor.strategy=zorro``: Ray, FSDP2 over gloo, a reference policy, validation."""

import json
import re

import numpy
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_throughput import documented_metrics
from tiny_run import logged_steps, make_material, overrides, run_trainer

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]

COUNTS = ("tokens_total", "tokens_packed", "groups", "groups_split", "fallback/group_cut", "fallback/multimodal")


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    return make_material(tmp_path_factory.mktemp("material"))


def test_a_hybrid_model_with_a_vision_tower_trains(tmp_path):
    """Text rows of a checkpoint that verl loads with its vision tower, and whose weights the rollout takes by name.

    Its rows are sliced over two ranks.
    """
    make_material(tmp_path, "qwen3_5")
    arguments = [*overrides(tmp_path, "zorro"), "actor_rollout_ref.rollout.calculate_log_probs=True"]
    arguments += ["actor_rollout_ref.rollout.dtype=float32", "actor_rollout_ref.model.use_remove_padding=True"]
    arguments += ["actor_rollout_ref.actor.ulysses_sequence_parallel_size=2"]
    code, output = run_trainer(arguments, tmp_path, timeout=360)
    assert code == 0, output[-4000:]
    steps = [step for step in logged_steps(output) if "zorro/token_ratio" in step]
    assert len(steps) == 2, output[-4000:]
    for step in steps:
        assert step["zorro/groups"] == 4
        assert step["zorro/groups_split"] == step["zorro/fallback/multimodal"] == 0
        assert step["zorro/token_ratio"] > 1.5
        assert step["training/rollout_probs_diff_max"] < 1e-5
    assert steps[0]["actor/grad_norm"] > 0


def test_one_override_trains_with_whole_groups(material):
    """Two ranks, two mini-batches a step, dynamic micro-batches, checkpointing, validation, a checkpoint at the end."""
    arguments = [
        *overrides(material, "zorro"),
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.actor.entropy_coeff=0.01",
        "actor_rollout_ref.actor.use_dynamic_bsz=True",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=192",
        "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True",
        "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=192",
        "actor_rollout_ref.rollout.dtype=float32",
        "actor_rollout_ref.rollout.calculate_log_probs=True",
        "trainer.test_freq=2",
        "trainer.save_freq=2",
        f"trainer.default_local_dir={material}/checkpoints",
        "trainer.logger=[console,tensorboard,file]",
    ]
    places = {"TENSORBOARD_DIR": f"{material}/events", "VERL_FILE_LOGGER_PATH": f"{material}/metrics.jsonl"}
    code, output = run_trainer(arguments, material, timeout=360, variables=places)
    assert code == 0, output[-4000:]
    steps = [step for step in logged_steps(output) if "zorro/token_ratio" in step]
    assert len(steps) == 2, output[-4000:]
    for step in steps:
        assert all(f"zorro/{name}" in step for name in COUNTS)
        assert step["zorro/groups"] == 4
        assert step["zorro/groups_split"] == step["zorro/fallback/group_cut"] == step["zorro/skipped_steps"] == 0
        assert step["zorro/token_ratio"] == step["zorro/tokens_total"] / step["zorro/tokens_packed"]
        for name in ("zorro/token_ratio_best", "zorro/old_log_prob/token_ratio", "zorro/ref/token_ratio"):
            assert step["zorro/token_ratio"] == pytest.approx(step[name]), name
        assert step["zorro/token_ratio"] > 1.5
        assert 1 < step["zorro/flop_ratio"] < step["zorro/token_ratio"]
        assert step["zorro/mfu_executed"] == pytest.approx(step["perf/mfu/actor"] / step["zorro/flop_ratio"])
        assert step["zorro/mfu_executed"] > 0
        assert step["zorro/throughput_executed"] == pytest.approx(step["perf/throughput"] / step["zorro/token_ratio"])
        assert {name for name in step if name.startswith("zorro/")} <= set(documented_metrics())
        assert not any(name.startswith("actor/zorro") for name in step)
        # The rollout server is a plain model: had the engine scored other tokens, these would part.
        assert step["training/rollout_probs_diff_max"] < 1e-5
    check_loggers(material, steps)
    check_summary(output, steps[0])
    assert 0 < steps[0]["actor/kl_loss"] < steps[1]["actor/kl_loss"]  # the first mini-batch's is 0
    assert steps[0]["actor/grad_norm"] > 0
    assert any("val-core" in name or "val-aux" in name for step in logged_steps(output) for name in step)
    assert (material / "checkpoints" / "global_step_2" / "actor").is_dir()


def check_loggers(folder, steps):
    """What verl's loggers have written says what the console said; tensorboard holds float32."""
    events = EventAccumulator(str(folder / "events")).Reload()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    for number, step in enumerate(steps, start=1):
        for name in (name for name in step if name.startswith("zorro/")):
            scalars = {event.step: event.value for event in events.Scalars(name)}
            assert scalars[number] == numpy.float32(step[name]), name
            assert [line["data"][name] for line in lines if line["step"] == number and name in line["data"]] == [
                step[name]
            ]


def check_summary(output, step):
    """One line, where a user looks, whose numbers are those of the first step; and no warning."""
    (line,) = (line for line in output.splitlines() if "strategy=zorro, first" in line)
    total, packed = (f"{int(step[f'zorro/{name}']):,}" for name in ("tokens_total", "tokens_packed"))
    ratio, best = (f"{step[f'zorro/{name}']:.2f}" for name in ("token_ratio", "token_ratio_best"))
    assert "INFO" in line
    assert f"first update_actor: 4 prompts in 16 rows; {total} tokens of rows, {packed} through the model" in line
    assert f"{ratio} times fewer, of {best} that the batch allows" in line
    speed_up = float(re.search(r"speed-up of update_actor over fsdp2: ([\d.]+), by multiply-adds", line).group(1))
    assert speed_up > step["zorro/flop_ratio"] > 1, "the head on prompts counts, too"
    assert "Qwen3ForCausalLM: attention of 2 layers shared, by sdpa (torch's own flash attention)." in line
    assert not re.findall("WARNING.*token ratio", output)


def test_a_critic_shares_prompts_too(material):
    """PPO with GAE: values and updates over whole groups, two mini-batches in two epochs, drawn by group."""
    precision = [f"+critic.fsdp.mixed_precision.{kind}_dtype=fp32" for kind in ("param", "reduce", "buffer")]
    arguments = [
        *overrides(material, "zorro"),
        *precision,
        "algorithm.adv_estimator=gae",
        "critic.strategy=zorro",
        f"critic.model.path={material}/model",
        "critic.optim.lr=1e-3",
        "critic.ppo_mini_batch_size=2",
        "critic.ppo_micro_batch_size_per_gpu=4",
        "+critic.ppo_infer_max_token_len_per_gpu=192",
        "critic.ppo_epochs=2",
        "critic.shuffle=True",
    ]
    code, output = run_trainer(arguments, material, timeout=360)
    assert code == 0, output[-4000:]
    steps = [step for step in logged_steps(output) if "zorro/token_ratio" in step]
    assert len(steps) == 2, output[-4000:]
    for step in steps:
        for name in ("zorro/token_ratio", "zorro/values/token_ratio", "zorro/critic/token_ratio"):
            assert step[name] == pytest.approx(step["zorro/token_ratio_best"]), name
        assert step["zorro/token_ratio_best"] > 1.5
        assert not any(name.startswith("critic/zorro") for name in step)
        assert step["critic/grad_norm"] > 0
        assert step["critic/returns/max"] > 0
    # The critic's weights moved between the two, and with them what it says.
    assert steps[0]["critic/values/mean"] != pytest.approx(steps[1]["critic/values/mean"], rel=1e-3)
