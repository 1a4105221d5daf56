"""The parts of `make demo` that need no trainer: material, log reading, verdicts, the processes of a run."""

import importlib
import json
import os
import random
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import run_log
import torch
import trainer_process

DEMO = Path(__file__).parents[1] / "scripts" / "demo"


@pytest.fixture(scope="module")
def demo():
    """Imports a module of the demo, whose folder is on the path while it runs as a script."""
    sys.path.insert(0, str(DEMO))
    yield importlib.import_module
    sys.path.remove(str(DEMO))


@pytest.fixture(scope="module")
def material(demo):
    return demo("material")


@pytest.fixture(scope="module")
def problems(material):
    return material.make_problems(200, seed=0)


@pytest.fixture(scope="module")
def tokenizer(material, problems):
    return material.build_tokenizer(problems)


def record_of(demo, step, **values):
    named = {"critic/score/mean": 0.5, "timing_s/step": 2.0, "actor/loss": 0.1, "actor/grad_norm": 1.0}
    named |= {"timing_s/gen": 1.0, "timing_s/old_log_prob": 1.0, "timing_s/ref": 1.0, "timing_s/update_actor": 1.0}
    named |= {"perf/total_num_tokens": 800.0, "response_length/mean": 3.0}
    return run_log.Record(step, named | {name.replace("__", "/"): value for name, value in values.items()})


# material


def test_a_prompt_of_the_training_data_starts_a_supervised_sequence(demo, material, problems, tokenizer):
    problem, *shots = problems[: material.SHOTS + 1]
    prompt = tokenizer.apply_chat_template(
        material.few_shot_chat(problem, shots), add_generation_prompt=True, tokenize=True, return_dict=True
    )["input_ids"]
    answered = [*material.few_shot_chat(problem, shots), material.assistant(problem.answer)]
    tokens, is_answer = demo("warm_start").encode(tokenizer, [answered])

    assert tokens[0, : len(prompt)].tolist() == prompt
    assert 390 < len(prompt) < 430
    assert is_answer[0, len(prompt) :].tolist() == [True] * (len(problem.answer) + 1) + [False]


def test_labels_are_the_answers_and_their_end_tokens(demo, material, problems, tokenizer):
    chats = [material.demonstration(problems, random.Random(0), shots, wrong=0.5) for shots in (3, 1)]
    tokens, is_answer = demo("warm_start").encode(tokenizer, chats)

    for chat, row, mask in zip(chats, tokens, is_answer, strict=True):
        answers = [turn["content"] for turn in chat if turn["role"] == "assistant"]
        assert tokenizer.decode(row[mask]) == "".join(f"{answer}<|im_end|>" for answer in answers)
    assert tokens[1, -1] == tokenizer.pad_token_id


def test_demonstrations_are_of_all_styles_and_mostly_right(demo, material, problems):
    rng = random.Random(0)
    answer_of = {problem.question: problem.answer for problem in problems}
    turns = [turn["content"] for _ in range(200) for turn in material.demonstration(problems, rng, 12, wrong=0.15)]
    pairs = list(zip(turns[::2], turns[1::2], strict=True))
    report = demo("report")

    bare = sum(report.is_bare(answer) for _, answer in pairs) / len(pairs)
    right = sum(report.first_number(answer) == answer_of[question] for question, answer in pairs) / len(pairs)
    assert bare == pytest.approx(material.STYLE_WEIGHTS[0], abs=0.05)
    assert 0.85 < right < 0.93  # another problem's answer may be the same


def test_no_shot_is_the_question(material, problems):
    rng = random.Random(0)
    for problem in problems[:50]:
        shots = material.draw_shots(problem, problems, rng)
        assert len(shots) == material.SHOTS
        assert problem.factors not in [shot.factors for shot in shots]


def test_material_is_the_same_every_time(material, problems, tokenizer):
    again = material.make_problems(200, seed=0)
    assert again == problems
    assert material.build_tokenizer(again).get_vocab() == tokenizer.get_vocab()
    one, other = (material.build_model(tokenizer, seed=3).state_dict() for _ in range(2))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_reward_is_the_verifiers(demo, material, problems):
    compute_score = demo("reward").compute_score
    problem = next(p for p in problems if p.answer == "12")
    row = material.verl_row(problem, problems[:3], index=0, split="train")

    def score(text):
        return compute_score(row["data_source"], text, None, row["extra_info"])

    assert score(" 12\n") == 1.0
    assert 0.0 < score("It is 12") < 0.5
    assert score("13") == score("") == 0.0


def test_warm_start_is_built_once_and_again_after_a_change(demo, tmp_path):
    warm_start = demo("warm_start")
    tiny = warm_start.WarmStart(steps=2, train_problems=3, validation_problems=2)
    said = []
    warm_start.ensure(tmp_path / "m", tiny, said.append)
    assert {path.name for path in (tmp_path / "m").iterdir()} == {
        "model",
        "train.parquet",
        "validation.parquet",
        "built.json",
    }
    built = (tmp_path / "m" / "train.parquet").stat().st_mtime_ns

    warm_start.ensure(tmp_path / "m", tiny, said.append)
    assert (tmp_path / "m" / "train.parquet").stat().st_mtime_ns == built
    assert "already there" in said[-1]

    (tmp_path / "m" / "model" / "model.safetensors").unlink()
    warm_start.ensure(tmp_path / "m", tiny, said.append)
    assert (tmp_path / "m" / "model" / "model.safetensors").exists()

    built = (tmp_path / "m" / "train.parquet").stat().st_mtime_ns
    warm_start.ensure(tmp_path / "m", replace(tiny, seed=1), said.append)
    assert (tmp_path / "m" / "train.parquet").stat().st_mtime_ns != built


# log reading


def test_metrics_are_read_while_the_file_grows(demo, tmp_path):
    metrics = run_log.MetricsFile(tmp_path / "metrics.jsonl")
    assert metrics.new_records() == []
    line = json.dumps({"step": 1, "data": {"timing_s/step": 2.0, "critic/score/mean": 0.25, "note": "é"}}) + "\n"
    with metrics.path.open("w") as file:
        file.write(line + line[:10])
        file.flush()
        (record,) = metrics.new_records()
        assert (record.step, record.reward, record.is_training_step) == (1, 0.25, True)
        assert metrics.new_records() == []
        file.write(line[10:])
    assert len(metrics.new_records()) == 1


def test_validation_line_and_checkpoint_time(demo):
    validation = run_log.parse_record(json.dumps({"step": 0, "data": {"val-core/products/acc/mean@4": 0.3}}))
    assert not validation.is_training_step
    assert validation.validation_reward == 0.3
    last = record_of(demo, 9, timing_s__step=5.0, timing_s__save_checkpoint=1.5)
    assert last.seconds == 3.5
    assert last.validation_reward is None


def test_samples_are_compared_whatever_their_order(demo, tmp_path):
    lines = [json.dumps({"input": "3 * 5", "output": text, "gts": "15", "score": 1.0}) for text in ("15", "It is 15")]
    for name, order in (("a", lines), ("b", lines[::-1]), ("c", [lines[0]] * 2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.jsonl").write_text("\n".join(order) + "\n")

    def read(name, length):
        return run_log.samples_of_step(tmp_path / name, record_of(demo, 1, response_length__mean=length))

    assert read("a", 3.0) == read("b", 3.0)
    assert read("a", 3.0) != read("c", 3.0)
    assert read("a", 3.0) != read("b", 3.5)
    run_log.wait_for_dump(tmp_path / "a", 1, rows=2)
    with pytest.raises(TimeoutError, match="expected 3 generations"):
        run_log.wait_for_dump(tmp_path / "a", 1, rows=3, seconds=0.0)


def test_error_is_the_last_traceback_without_noise(demo, tmp_path):
    log = tmp_path / "console.log"
    log.write_text(
        "Traceback (most recent call last):\nValueError: an older one\n"
        "\x1b[36m(TaskRunnerV1 pid=1)\x1b[0m Traceback (most recent call last):\n"
        "\x1b[36m(SimpleStorageUnit pid=2)\x1b[0m WARNING - target_num_threads 8 should not exceed\n"
        "\x1b[36m(TaskRunnerV1 pid=1)\x1b[0m ValueError: actor.strategy must be something else\n"
    )
    assert run_log.last_error(log) == (
        "Traceback (most recent call last):\nValueError: actor.strategy must be something else"
    )


# verdicts


def test_learning_is_more_than_two_standard_errors(demo):
    report = demo("report")
    rising = report.learning([0.3, 0.4] * 2 + [0.5] * 8 + [0.7, 0.8] * 2)
    assert (rising.first, rising.last) == pytest.approx((0.35, 0.75))
    assert rising.standard_error == pytest.approx((2 * (0.01 / 3) / 4) ** 0.5)
    assert rising.can_be_judged
    assert rising.happened
    assert not report.learning([0.3, 0.6] * 8).happened
    assert not report.learning([0.8] * 8 + [0.3] * 8).happened

    # By a standard error of 1.9 above, and of 2.1.
    gain = rising.standard_error
    for factor, verdict in ((1.9, False), (2.1, True)):
        assert report.learning([0.3, 0.4] * 6 + [0.3 + factor * gain, 0.4 + factor * gain] * 2).happened is verdict


@pytest.mark.parametrize("steps", [1, 2, 6, 15])
def test_few_steps_are_not_judged(demo, steps):
    report = demo("report")
    result = report.learning([0.1] * steps)
    assert not result.can_be_judged
    assert report.render_learning(result).startswith("Too few steps")


def test_divergence_is_the_first_step_with_other_samples(demo):
    report = demo("report")
    losses = [0.5, 0.4, 0.3, 0.2]
    one = report.Run(
        "zorro", [record_of(demo, i + 1, actor__loss=x) for i, x in enumerate(losses)], ["a", "b", "c", "d"]
    )
    steps = [record_of(demo, i + 1, actor__loss=x + 0.01 * i, actor__grad_norm=1.5) for i, x in enumerate(losses[:3])]
    other = report.Run("fsdp2", steps, ["a", "b", "x"])

    result = report.compare(one, other)
    assert result.diverged_at == 3
    assert (result.while_same.steps, result.common.steps) == (2, 3)
    assert result.while_same.loss == pytest.approx(0.01)
    assert result.common.loss == pytest.approx(0.02)
    assert result.common.grad_norm_relative == pytest.approx(0.5)
    assert "diverged at step 3" in report.render_comparison(result)

    assert report.compare(one, one).diverged_at is None
    at_once = report.compare(one, report.Run("fsdp2", steps, ["x", "b", "c"]))
    assert (at_once.diverged_at, at_once.while_same) == (1, None)


def test_styles_are_counted(demo):
    report = demo("report")
    texts = ["15", "It is 15", "5", "15, I think", "none"]
    style = report.style([run_log.Generation("3 * 5", text, "15", score=0.2) for text in texts])
    assert (style.bare, style.right_in_any_style, style.reward) == pytest.approx((0.4, 0.6, 0.2))


def test_table_and_plot(demo):
    report = demo("report")
    packed = {"zorro__tokens_total": 800.0, "zorro__tokens_packed": 100.0, "timing_s__update_actor": 0.25}
    zorro = report.Run("zorro", [record_of(demo, i, critic__score__mean=i / 4, **packed) for i in range(1, 5)], [0] * 4)
    stock = report.Run("fsdp2", [record_of(demo, i) for i in range(1, 3)], [0] * 2)
    table = report.render_table(zorro, stock)
    cells = {line.split("  ")[0]: line.split() for line in table.splitlines()[1:]}

    assert cells["training steps"][-2:] == ["2", "4"]
    assert cells["tokens a step, before -> packed"][-4:] == ["800", "800", "->", "100"]
    assert cells["token ratio"][-2:] == ["1.00", "8.00"]
    assert cells["seconds in update_actor (median)"][-3:] == ["1.00", "0.25", "4.00x"]
    assert "fsdp2" not in report.render_table(zorro, None)

    plot = report.render_plot([zorro, stock], width=20, height=5).splitlines()
    assert plot[1].startswith("  1.00 |")
    assert plot[1].endswith("z")
    assert plot[5].startswith("  0.25 |")


def test_plot_is_saved(demo, tmp_path, monkeypatch):
    monkeypatch.setenv("MPLCONFIGDIR", str(tmp_path))
    report = demo("report")
    report.save_plot([report.Run("zorro", [record_of(demo, 1), record_of(demo, 2)], [0, 0])], tmp_path / "reward.png")
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")


# the run


def test_overrides_compose_with_verl_and_differ_in_the_strategy_only(demo, tmp_path):
    from hydra import compose, initialize_config_module

    trainer_run = demo("trainer_run")
    configs = {}
    for strategy in ("zorro", "fsdp2"):
        folder = trainer_run.RunFolder(tmp_path / "run")
        asked = trainer_run.overrides(strategy, trainer_run.Settings(steps=5), tmp_path, folder, tmp_path / "ray")
        with initialize_config_module("verl.trainer.config", version_base=None):
            configs[strategy] = compose("ppo_trainer", [o for o in asked if not o.startswith("hydra.")])
    zorro, stock = configs["zorro"], configs["fsdp2"]

    assert (zorro.actor_rollout_ref.actor.strategy, zorro.actor_rollout_ref.ref.strategy) == ("zorro", "zorro")
    assert Path(zorro.reward.custom_reward_function.path).is_file()
    assert zorro.trainer.save_freq == zorro.trainer.test_freq == zorro.trainer.total_training_steps == 5
    assert zorro.actor_rollout_ref.ref.log_prob_use_dynamic_bsz
    zorro.actor_rollout_ref.actor.strategy = "fsdp2"
    assert zorro == stock


def test_arguments(demo, monkeypatch, tmp_path, capsys):
    parse = demo("run").parse_arguments
    monkeypatch.setenv("STEPS", "6")
    monkeypatch.setenv("BASELINE", "0")
    assert (parse([]).steps, parse([]).no_baseline) == (6, True)
    assert (parse(["--steps", "7"]).steps, parse(["--out", str(tmp_path)]).out) == (7, tmp_path)
    monkeypatch.setenv("STEPS", "0")
    with pytest.raises(SystemExit):
        parse([])
    assert "STEPS must be at least 1" in capsys.readouterr().err


@pytest.mark.timeout(60)
def test_the_end_of_a_run_takes_every_process_with_it(tmp_path):
    """Also one that has left the session, ignores SIGINT and SIGTERM, and whose parent is gone."""
    stubborn = (
        "import signal, time;"
        "[signal.signal(each, signal.SIG_IGN) for each in (signal.SIGINT, signal.SIGTERM)];"
        "print('up', flush=True); time.sleep(99)"
    )
    main = (
        "import subprocess, sys, time;"
        f"subprocess.Popen([sys.executable, '-c', {stubborn!r}], start_new_session=True);"
        "time.sleep(99)"
    )
    environment = trainer_process.environment(trainer_process.RunFolder(tmp_path), "mark-of-the-test")
    process = subprocess.Popen(
        [sys.executable, "-c", main], env=environment, start_new_session=True, stdout=subprocess.PIPE
    )
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(99)"])
    try:
        assert process.stdout.readline() == b"up\n"
        assert len(trainer_process.processes_marked("mark-of-the-test")) == 2
        trainer_process.end(process, "mark-of-the-test")
        assert process.poll() is not None
        deadline = time.monotonic() + 5
        while trainer_process.processes_marked("mark-of-the-test") and time.monotonic() < deadline:
            time.sleep(0.1)
        assert trainer_process.processes_marked("mark-of-the-test") == []
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_a_process_that_ends_meanwhile_is_no_error(monkeypatch):
    """Ray's workers do, once their raylet is gone."""
    ended = subprocess.Popen(["true"])
    gone = psutil.Process(ended.pid)
    ended.wait()
    monkeypatch.setattr(trainer_process, "processes_marked", lambda mark: [gone])
    trainer_process.end(ended, "any")


def test_no_other_ray_cluster_is_joined(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")
    assert "RAY_ADDRESS" not in trainer_process.environment(trainer_process.RunFolder(tmp_path), "mark")
    assert os.environ["RAY_ADDRESS"] == "127.0.0.1:6379"
    with trainer_process.temporary_ray_folder() as folder:
        assert len(str(folder)) < 40
    assert not folder.exists()
