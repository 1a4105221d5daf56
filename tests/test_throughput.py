"""Effective throughput: what is counted is what ran, each rank's once, and verl's numbers stand beside ours."""

import importlib
import logging
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf
from ranks import run_ranks
from test_engine import build_engine, local_rows, ppo_loss_function, ragged_batch
from tiny import batch_b0, flat_rows, tiny_model, tokens, verl_batch

from zorro_verl.budget_warning import BudgetWarning
from zorro_verl.flops import ModelWork, Work
from zorro_verl.heads import SharedPrompt
from zorro_verl.media import Media
from zorro_verl.metrics import ShareCounts
from zorro_verl.micro_batches import MicroBatches
from zorro_verl.models import install, uninstall
from zorro_verl.packing import build_plan
from zorro_verl.throughput import let_wait, wrap_throughput
from zorro_verl.trainer import wrap_legacy_trainer, wrap_ppo_trainer


def documented_metrics():
    """The names in the tables of docs/metrics.md that say what a metric means."""
    page = (Path(__file__).parent.parent / "docs" / "metrics.md").read_text()
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `zorro/")]
    return [name for row in rows for name in re.findall(r"`(zorro/[a-z_/]+)`", row)]


def groups_of(rows):
    """A list of (prompt, response) as ``(prompt length, response lengths)``, by tokens."""
    groups = {}
    for prompt, response in rows:
        groups.setdefault(tuple(prompt.tolist()), []).append(len(response))
    return [(len(prompt), responses) for prompt, responses in groups.items()]


def linear_work(model, run):
    """Multiply-adds of every linear layer while ``run()`` runs; the head's apart."""
    work = {"head": 0, "others": 0}

    def count(module, args, output):
        work["head" if module is model.lm_head else "others"] += output.numel() * module.in_features

    hooks = [m.register_forward_hook(count) for m in model.modules() if isinstance(m, torch.nn.Linear)]
    with torch.no_grad():
        run()
    for hook in hooks:
        hook.remove()
    return work


def test_counted_is_what_the_plain_model_does_and_executed_what_ran():
    """Linear layers are watched in both forwards; pairs are those of the picture of who sees whom."""
    model, rows = tiny_model(), batch_b0()
    plain = linear_work(model, lambda: [model(torch.cat(row)[None], use_cache=False) for row in rows])
    flat = flat_rows(rows)
    plan = build_plan(flat)
    install(model, "eager")
    shared = SharedPrompt(plan, flat.tokens[plan.label_index])
    inputs = {"input_ids": plan.pack(flat.tokens)[None], "position_ids": plan.pack(flat.position_ids)[None]}
    packed = linear_work(model, lambda: model(**inputs, use_cache=False, zorro=shared))
    uninstall(model)

    per_pair = model.config.num_hidden_layers * 2 * model.config.num_attention_heads * model.config.head_dim
    row_pairs = sum(n * (n + 1) // 2 for n in (len(p) + len(r) for p, r in rows))
    work = ModelWork.of(model.config).of_groups(groups_of(rows))
    assert work.counted == plain["others"] + per_pair * row_pairs + packed["head"]
    assert work.executed == packed["others"] + per_pair * int(plan.forest.visible().sum()) + packed["head"]
    head = model.lm_head.in_features * model.lm_head.out_features
    assert packed["head"] == head * sum(len(r) for _, r in rows)
    assert plain["head"] == head * sum(len(p) + len(r) for p, r in rows), "verl counts these"


def worker(engine, config):
    """As much of verl's worker as reads an engine's output."""
    from verl.utils.flops_counter import FlopsCounter
    from verl.workers.engine_workers import TrainingWorker

    stub = SimpleNamespace(engine=engine, device_name="cpu", flops_counter=FlopsCounter(config))
    return partial(TrainingWorker._postprocess_output, stub, delta_time=0.5, images_seqlens=None)


def reported(rank, path, world_size, sequence_parallel):
    """What verl's worker makes of two training calls and a scoring call of one engine, under two budgets."""
    data_parallel = world_size // sequence_parallel
    settings = {"ulysses_sequence_parallel_size": sequence_parallel}
    engine = build_engine(path, "zorro", model={"use_remove_padding": True}, engine=settings)
    rows = ragged_batch()
    lens = [len(p) + len(r) for p, r in rows]
    own = local_rows(rows, rank // sequence_parallel, data_parallel)
    finish = worker(engine, engine.module.config)
    results = []
    for budget in (4096, 34 // sequence_parallel):
        batch = verl_batch(own, max_token_len_per_gpu=budget, global_batch_size=len(rows))
        with engine.train_mode():
            engine.optimizer_zero_grad()
            output = engine.forward_backward_batch(batch, ppo_loss_function())
        results.append(finish(output, global_token_num=lens, forward_only=False)["metrics"])
    with engine.eval_mode():
        output = engine.infer_batch(verl_batch(own))
    return [*results, finish(output, global_token_num=lens, forward_only=True)["metrics"]]


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", [1, 2])
def test_engines_report_what_they_did_once(tmp_path, sequence_parallel):
    """Two ranks: of the batch, or of the sequence; every rank then holds the same totals."""
    model = tiny_model(dtype=torch.float32)
    model.save_pretrained(tmp_path)
    ranks = run_ranks(reported, 2, str(tmp_path), 2, sequence_parallel)
    rows, count = ragged_batch(), ModelWork.of(model.config).of_groups
    per_rank = [
        count(groups_of(local_rows(rows, rank, 2 // sequence_parallel))) for rank in range(2 // sequence_parallel)
    ]
    whole, cut, scored = (ShareCounts.pop_from(metrics) for metrics in ranks[0])
    for counts in (whole, scored):
        assert counts.work_counted == sum(work.counted for work in per_rank)
        assert counts.work_executed == sum(work.executed for work in per_rank)
        assert counts.tokens_total == sum(len(p) + len(r) for p, r in rows)
    assert cut.work_counted == whole.work_counted
    assert cut.work_executed > whole.work_executed, (
        "34 tokens hold the prompt of 23 with one response of 9, and no more"
    )
    for metrics in ranks[0]:
        mfu = metrics["mfu"]
        assert mfu > 0, "verl knows the peak of a CPU, and Qwen3's cost"
    assert whole.executed_mfu(ranks[0][0]["mfu"]) == pytest.approx(
        ranks[0][0]["mfu"] * sum(w.executed for w in per_rank) / sum(w.counted for w in per_rank), rel=1e-12
    )
    assert ranks[0][2]["mfu"] == pytest.approx(ranks[0][0]["mfu"] / 3), "same tokens and time, without a backward"


def counts_of_call(rows):
    """One call's counts in the form in which workers report, with hand-made work of 4 to 1."""
    counts = ShareCounts()
    counts.add_micro_batch(120, 60, [1] * rows, [False] * rows, Work(400, 100, 0, 0))
    counts.prompt_lens = {1: 60}
    return counts.to_metrics()


class Output:
    """What V1's worker group gives: keys without data, and metrics."""

    def __init__(self, metrics):
        self.extra_info = {"metrics": metrics}

    def __getitem__(self, name):
        return self.extra_info[name]


def run_config(strategy):
    """As much of a run's as the wraps read."""
    model = {"enable_gradient_checkpointing": True, "use_fused_kernels": False}
    role = {"strategy": strategy, "ppo_epochs": 1}
    roles = {"actor_rollout_ref": {"actor": role, "model": model}, "critic": role | {"model": model}}
    return OmegaConf.create(roles | {"trainer": {"balance_batch": True}})


def v1_module(strategy="zorro"):
    """A module with as much of verl's trainer as the wraps touch, which logs what verl's does."""

    class PPOTrainer:
        config = run_config(strategy)
        ref_in_actor = False
        actor_rollout_wg = SimpleNamespace(
            update_actor=lambda batch: {"metrics": counts_of_call(2) | {"mfu": [0.3, 0.5], "loss": [1.0]}},
            compute_log_prob=lambda batch: Output([counts_of_call(2)]),
        )
        ref_policy_wg = SimpleNamespace(compute_ref_log_prob=lambda batch: Output([counts_of_call(2) | {"mfu": 0.2}]))
        critic_wg = SimpleNamespace(
            infer_batch=lambda batch: {"metrics": counts_of_call(2) | {"mfu": 0.2}},
            train_mini_batch=lambda batch: {"metrics": counts_of_call(2) | {"mfu": [0.2]}},
        )

        def _balance_batch(self, batch, metrics):
            raise AssertionError

        def _update_actor(self, batch, metrics):
            output = self.actor_rollout_wg.update_actor(batch)["metrics"]
            assert output.keys() == {"mfu", "loss"}, "what verl would average"
            metrics["perf/mfu/actor"] = sum(output.pop("mfu")) / 2
            return batch

        def _compute_old_log_prob(self, batch, metrics):
            self.actor_rollout_wg.compute_log_prob(batch)
            return batch

        def _compute_ref_log_prob(self, batch, metrics):
            self.ref_policy_wg.compute_ref_log_prob(batch)
            return batch

        def _compute_values(self, batch, metrics):
            self.critic_wg.infer_batch(batch)
            return batch

        def _update_critic(self, batch, metrics):
            self.critic_wg.train_mini_batch(batch)
            return batch

        def _compute_metrics(self, batch, metrics, timing_raw, global_steps, epoch):
            metrics["perf/throughput"] = 1000.0

    return SimpleNamespace(PPOTrainer=PPOTrainer)


def v1_step(trainer):
    metrics = {}
    trainer._compute_old_log_prob("batch", metrics=metrics)
    trainer._compute_ref_log_prob("batch", metrics)
    trainer._compute_values("batch", metrics)
    trainer._update_critic("batch", metrics)
    trainer._update_actor("batch", metrics=metrics)
    trainer._compute_metrics("batch", metrics, {"step": 1.0}, global_steps=1, epoch=0)
    return metrics


def test_both_numbers_are_in_the_step_of_v1():
    module = v1_module()
    wrap_ppo_trainer(module)
    wrap_ppo_trainer(module)
    metrics = v1_step(module.PPOTrainer())
    assert metrics["perf/mfu/actor"] == pytest.approx(0.4)
    assert metrics["zorro/mfu_executed"] == pytest.approx(0.4 / 4)
    assert metrics["zorro/ref/mfu_executed"] == pytest.approx(0.2 / 4)
    assert "zorro/old_log_prob/mfu_executed" not in metrics, "verl measured none"
    assert metrics["zorro/flop_ratio"] == 4
    assert metrics["perf/throughput"] == 1000
    assert metrics["zorro/throughput_executed"] == 1000 * 60 / 120
    assert metrics["zorro/old_log_prob/token_ratio"] == metrics["zorro/ref/token_ratio"] == 2


def test_every_metric_is_documented_and_no_other():
    module, legacy = v1_module(), legacy_module()
    wrap_ppo_trainer(module)
    wrap_legacy_trainer(legacy)
    wrap_throughput(legacy)
    step, batch = v1_step(module.PPOTrainer()), SimpleNamespace(meta_info={})
    legacy.RayPPOTrainer()._compute_old_log_prob(batch)
    step |= legacy.compute_throughout_metrics(batch, {}, 1)
    assert sorted(documented_metrics()) == sorted(name for name in step if name.startswith("zorro/"))


def test_a_step_without_an_update_has_no_executed_throughput():
    """While a critic warms up, the actor isn't trained: nothing says how much was shared in the step."""
    module = v1_module()
    wrap_ppo_trainer(module)
    metrics = {}
    module.PPOTrainer()._compute_metrics("batch", metrics, {}, global_steps=1, epoch=0)
    assert metrics == {"perf/throughput": 1000}


def legacy_module(strategy="zorro"):
    class RayPPOTrainer:
        config = v1_module(strategy).PPOTrainer.config
        ref_in_actor = True
        actor_rollout_wg = SimpleNamespace(
            update_actor=lambda batch: {"metrics": counts_of_call(2) | {"mfu": [0.3, 0.5]}},
            compute_log_prob=lambda batch: {"metrics": counts_of_call(2) | {"mfu": 0.2}},
        )
        critic_wg = v1_module(strategy).PPOTrainer.critic_wg

        def _balance_batch(self, batch, metrics):
            raise AssertionError

        def _update_actor(self, batch):
            metrics = self.actor_rollout_wg.update_actor(batch)["metrics"]
            return SimpleNamespace(meta_info={"metrics": {"perf/mfu/actor": metrics["mfu"]}})

        def _compute_old_log_prob(self, batch):
            return "log probs", self.actor_rollout_wg.compute_log_prob(batch)["metrics"]["mfu"]

        def _compute_ref_log_prob(self, batch):
            self.actor_rollout_wg.compute_log_prob(batch)
            return "ref log probs"

        def _compute_values(self, batch):
            return self.critic_wg.infer_batch(batch)["metrics"]["mfu"]

        def _update_critic(self, batch):
            output = self.critic_wg.train_mini_batch(batch)["metrics"]
            assert output.keys() == {"mfu"}, "what verl would average"
            return output

    def compute_throughout_metrics(batch, timing_raw, n_gpus):
        return {"perf/throughput": 1000.0}

    return SimpleNamespace(RayPPOTrainer=RayPPOTrainer, compute_throughout_metrics=compute_throughout_metrics)


def test_both_numbers_are_in_the_step_of_the_legacy_trainer():
    """Its methods are handed no metrics: what they measure waits in the step's batch until verl logs its throughput."""
    module = legacy_module()
    for _ in range(2):
        wrap_legacy_trainer(module)
        wrap_throughput(module)
    trainer, batch = module.RayPPOTrainer(), SimpleNamespace(meta_info={})
    assert trainer._compute_old_log_prob(batch) == ("log probs", 0.2)
    assert trainer._compute_ref_log_prob(batch) == "ref log probs"
    assert trainer._compute_values(batch) == 0.2
    assert trainer._update_critic(batch) == {"mfu": [0.2]}
    updated = trainer._update_actor(batch).meta_info["metrics"]
    metrics = module.compute_throughout_metrics(batch=batch, timing_raw={}, n_gpus=1)
    assert updated["perf/mfu/actor"] == [0.3, 0.5]
    assert updated["zorro/mfu_executed"] == metrics["zorro/mfu_executed"] == pytest.approx(0.4 / 4)
    assert metrics["zorro/old_log_prob/mfu_executed"] == metrics["zorro/ref/mfu_executed"] == pytest.approx(0.2 / 4)
    assert metrics["zorro/old_log_prob/token_ratio"] == metrics["zorro/ref/token_ratio"] == 2
    assert metrics["zorro/values/mfu_executed"] == metrics["zorro/critic/mfu_executed"] == pytest.approx(0.2 / 4)
    assert metrics["zorro/values/token_ratio"] == metrics["zorro/critic/token_ratio"] == 2
    assert metrics["zorro/throughput_executed"] == 500
    fresh = SimpleNamespace(meta_info={})
    assert module.compute_throughout_metrics(fresh, {}, 1) == {"perf/throughput": 1000}, "each batch has its own"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "verl.trainer.ppo.ray_trainer",
        "verl.experimental.separation.ray_trainer",  # which one step off-policy and fully asynchronous are built on
    ],
)
def test_what_waits_reaches_the_log_of_every_legacy_trainer(name):
    """Each imports verl's function by name: it has to be ours by then."""
    trainer = importlib.import_module(name)
    batch = SimpleNamespace(meta_info={"global_token_num": [600, 600]})
    stock = {"perf/total_num_tokens": 1200, "perf/time_per_step": 2.0, "perf/throughput": 300.0}
    assert trainer.compute_throughout_metrics(batch, {"step": 2.0}, 2) == stock
    let_wait(batch, {"zorro/token_ratio": 3.0})
    let_wait(batch, {"zorro/ref/token_ratio": 2.0})
    waited = {"zorro/token_ratio": 3.0, "zorro/ref/token_ratio": 2.0, "zorro/throughput_executed": 100.0}
    assert trainer.compute_throughout_metrics(batch=batch, timing_raw={"step": 2.0}, n_gpus=2) == stock | waited


@pytest.mark.parametrize(("make", "wrap"), [(v1_module, wrap_ppo_trainer), (legacy_module, wrap_legacy_trainer)])
def test_other_strategies_see_nothing(make, wrap):
    module = make("fsdp2")
    wrap(module)
    if wrap is wrap_legacy_trainer:
        wrap_throughput(module)
        batch = SimpleNamespace(meta_info={})
        module.RayPPOTrainer()._compute_old_log_prob(batch)
        assert batch.meta_info == {}
        assert module.compute_throughout_metrics(batch, {}, 1) == {"perf/throughput": 1000}
    else:
        metrics = {}
        module.PPOTrainer()._compute_metrics("batch", metrics, {}, 1, 0)
        module.PPOTrainer()._compute_old_log_prob("batch", metrics)
        assert metrics == {"perf/throughput": 1000}


def micro_batches_of(*groups):
    """Rows given as ``(prompt length, response lengths)``, group after group."""
    g = torch.Generator().manual_seed(0)
    rows = [(prompt, tokens(n, g)) for length, lens in groups for prompt in [tokens(length, g)] for n in lens]
    return MicroBatches(flat_rows(rows), Media([None] * len(rows), None))


KEY = "ppo_max_token_len_per_gpu (log_prob_max_token_len_per_gpu for log-probs)"


def test_a_budget_below_a_group_is_said_once(caplog):
    """A group of 10 + 4 * 4 comes in two pieces, each with the prompt: with a group of 2, 38 tokens and not 28."""
    batch, warning = micro_batches_of((10, [4] * 4), (1, [1])), BudgetWarning()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            warning.check(batch, batch.split(20, KEY), 20, KEY)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    text = record.getMessage()
    assert text.startswith(f"{KEY}: the largest group of this batch needs 26 packed tokens (10 of its prompt + 16 of 4")
    assert "a micro-batch may have 20" in text
    assert "its prompt computed 2 times" in text
    assert f"token ratio is {58 / 38:.2f} instead of {58 / 28:.2f}" in text
    assert "raise it 1.30-fold" in text


def test_a_budget_that_holds_every_group_is_no_warning(caplog):
    """Also where other reasons cut: another rank needs three micro-batches."""
    batch, warning = micro_batches_of((10, [4] * 4), (1, [1])), BudgetWarning()
    with caplog.at_level(logging.WARNING):
        warning.check(batch, batch.split(26, KEY), 26, KEY)
        warning.check(batch, batch.split(30, KEY, min_count=4), 30, KEY)
    assert not caplog.records


def test_a_later_batch_is_still_looked_at(caplog):
    warning, small, large = BudgetWarning(), micro_batches_of((3, [1, 1])), micro_batches_of((10, [4] * 4))
    with caplog.at_level(logging.WARNING):
        warning.check(small, small.split(20, KEY), 20, KEY)
        warning.check(large, large.split(20, KEY), 20, KEY)
    assert len(caplog.records) == 1
