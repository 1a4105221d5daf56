"""What the updates of verl's own trainers log and say: the best ratio by every route, one summary, one warning."""

import logging
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf
from ranks import run_ranks
from test_engine import build_engine, ppo_loss_function, ragged_batch
from test_ratio_warning import TORN, counts_of
from test_throughput import documented_metrics
from tiny import tiny_model, verl_batch

from zorro_verl.metrics import ShareCounts

MODEL = {"enable_gradient_checkpointing": True, "use_fused_kernels": False}
WHOLE = [[{"a": 4}], [{"b": 4}]]


def config(actor="zorro", critic="zorro", **trainer):
    update = {"ppo_epochs": 1, "data_loader_seed": 1, "shuffle": False, "ppo_mini_batch_size": 2}
    update |= {"use_dynamic_bsz": True, "entropy_coeff": 0.0, "calculate_entropy": False}
    rollout = {"n": 4, "temperature": 1.0, "multi_turn": {"enable": False}}
    return OmegaConf.create(
        {
            "actor_rollout_ref": {"actor": {"strategy": actor} | update, "rollout": rollout, "model": dict(MODEL)},
            "critic": {"strategy": critic, "fsdp": {}, "model": dict(MODEL)} | update,
            "trainer": {"balance_batch": True, "critic_warmup": 0} | trainer,
        }
    )


def reported(calls, mfu=None, **outputs):
    """What a worker group gives of an update, or with an ``mfu`` of scoring, with what verl's trainers look for."""
    from verl.utils import tensordict_utils as tu

    counts = counts_of(*calls)
    counts.shared = "Model: attention of 2 layers shared, by sdpa"
    counts.work_counted, counts.work_executed, counts.work_head, counts.work_prompt_head = 600, 100, 20, 80
    return tu.get_tensordict(outputs, {"metrics": counts.to_metrics() | {"mfu": [0.1] if mfu is None else mfu}})


def scored(calls, *names):
    """The same of scoring: values of all tokens under these names."""

    def call(batch):
        offsets = batch["input_ids"].offsets()
        zeros = torch.nested.nested_tensor_from_jagged(torch.zeros(int(offsets[-1])), offsets)
        return reported(calls, mfu=0.2, **dict.fromkeys(names, zeros))

    return call


class Future:
    """What a critic's worker group gives, by the time that it has arrived."""

    def __init__(self, output):
        self.output = output

    def __getitem__(self, name):
        return self.output[name]

    def get(self):
        return self.output


def trainer_of(cls, settings, calls, critic_calls=None):
    """A trainer of verl's whose worker groups give what workers would report of these calls."""
    trainer = object.__new__(cls)
    trainer.config, trainer.use_critic, trainer.global_steps = settings, True, 1
    mesh = {name: [0, 1] for name in ("actor", "train")}
    trainer.ref_in_actor, values = False, scored(calls, "values")
    trainer.actor_rollout_wg = SimpleNamespace(
        _dispatch_info=mesh,
        update_actor=lambda batch: reported(calls),
        compute_log_prob=scored(calls, "log_probs", "entropy"),
    )
    trainer.ref_policy_wg = SimpleNamespace(compute_ref_log_prob=scored(calls, "log_probs"))
    trainer.critic_wg = SimpleNamespace(
        _dispatch_info=mesh,
        train_mini_batch=lambda batch: Future(reported(critic_calls or calls)),
        infer_batch=lambda batch: Future(values(batch)),
    )
    return trainer


def v1_step(trainer, critic=True, actor=True):
    """The metrics of a step of V1, as far as updates go."""
    metrics = {}
    batch = SimpleNamespace(extra_info={})
    if critic:
        trainer._update_critic(batch, metrics)
    if actor:
        trainer._update_actor(batch, metrics)
    return metrics


def legacy_step(trainer, critic=True, actor=True, scoring=False):
    """The same of the legacy trainer: what updates give, and what waits in the batch."""
    from verl import DataProto
    from verl.trainer.ppo.ray_trainer import compute_throughout_metrics

    columns = dict.fromkeys(("input_ids", "attention_mask", "position_ids"), torch.ones(8, 6, dtype=torch.int64))
    columns |= dict.fromkeys(("prompts", "responses", "response_mask"), torch.ones(8, 3, dtype=torch.int64))
    batch = DataProto.from_single_dict(columns)
    batch.meta_info["global_token_num"] = [6] * 8
    metrics = {}
    if scoring:
        _, metrics["perf/mfu/actor_infer"] = trainer._compute_old_log_prob(batch)
        trainer._compute_ref_log_prob(batch)
        trainer._compute_values(batch)
    if critic:
        metrics |= trainer._update_critic(batch).meta_info["metrics"]
    if actor:
        metrics |= trainer._update_actor(batch).meta_info["metrics"]
    return metrics | compute_throughout_metrics(batch, {"step": 1.0}, 1)


@pytest.fixture(params=["v1", "v1-separate-async", "legacy", "separate"])
def route(request):
    """A trainer class of verl's, and what a step of it does."""
    from verl.experimental.separation.ray_trainer import SeparateRayPPOTrainer
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer
    from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync
    from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

    return {
        "v1": (PPOTrainerSync, v1_step),
        "v1-separate-async": (PPOTrainerSeparateAsync, v1_step),
        "legacy": (RayPPOTrainer, legacy_step),
        "separate": (SeparateRayPPOTrainer, legacy_step),
    }[request.param]


def said(caplog, level):
    ours = (record for record in caplog.records if record.name.startswith("zorro_verl"))
    return [record.getMessage() for record in ours if record.levelno == level]


@pytest.mark.parametrize("balance_batch", [True, False])
def test_the_best_ratio_is_in_every_step(route, balance_batch):
    """Whether or not rows were placed: it comes with the counts."""
    cls, step = route
    metrics = step(trainer_of(cls, config(balance_batch=balance_batch), TORN), critic=False)
    assert metrics["zorro/token_ratio_best"] == 880 / 280
    assert metrics["zorro/token_ratio"] == 880 / 480


def test_a_whole_step_of_the_legacy_trainers_has_every_documented_metric():
    from verl.experimental.separation.ray_trainer import SeparateRayPPOTrainer
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    for cls in (RayPPOTrainer, SeparateRayPPOTrainer):
        metrics = legacy_step(trainer_of(cls, config(), WHOLE), scoring=True)
        assert sorted(name for name in metrics if name.startswith("zorro/")) == sorted(documented_metrics())
        for name in ("old_log_prob", "ref", "values", "critic"):
            assert metrics[f"zorro/{name}/token_ratio"] == 880 / 280
            mfu = 0.1 if name == "critic" else 0.2
            assert metrics[f"zorro/{name}/mfu_executed"] == pytest.approx(mfu / 6)
        assert metrics["zorro/mfu_executed"] == pytest.approx(0.1 / 6)
        assert metrics["zorro/flop_ratio"] == 6
        assert metrics["zorro/throughput_executed"] == pytest.approx(8 * 6 / (880 / 280))


def test_while_a_critic_warms_up_the_best_ratio_is_its_own(route):
    cls, step = route
    metrics = step(trainer_of(cls, config(), WHOLE), actor=False)
    assert metrics["zorro/critic/token_ratio"] == metrics["zorro/token_ratio_best"] == 880 / 280
    assert "zorro/token_ratio" not in metrics


def test_the_first_update_of_the_actor_is_summed_up_once(route, caplog):
    cls, step = route
    trainer = trainer_of(cls, config(), WHOLE)
    with caplog.at_level(logging.INFO, "zorro_verl"):
        step(trainer, actor=False)
        assert not said(caplog, logging.INFO), "a critic that warms up"
        for _ in range(3):
            step(trainer)
    (text,) = said(caplog, logging.INFO)
    assert text.startswith("strategy=zorro, first update_actor: 2 prompts in 8 rows; 880 tokens of rows, 280 through")
    assert text.endswith("Model: attention of 2 layers shared, by sdpa.")
    assert not said(caplog, logging.WARNING)


def test_a_critic_that_shares_alone_has_the_word(route, caplog):
    cls, step = route
    trainer = trainer_of(cls, config(actor="fsdp2"), WHOLE, critic_calls=TORN)
    trainer.config.critic.ppo_mini_batch_size = 3
    with caplog.at_level(logging.INFO, "zorro_verl"):
        for _ in range(2):
            step(trainer, actor=False)
    (text,) = said(caplog, logging.INFO)
    assert text.startswith("strategy=zorro, first update_critic: 2 prompts in 8 rows")
    (text,) = said(caplog, logging.WARNING)
    assert text.startswith("update_critic: the token ratio is")
    assert "critic.ppo_mini_batch_size=3 on 2 data-parallel ranks is 6 rows" in text


def test_a_critic_beside_an_actor_leaves_the_word_to_it(route, caplog):
    cls, step = route
    with caplog.at_level(logging.INFO, "zorro_verl"):
        step(trainer_of(cls, config(), WHOLE, critic_calls=TORN))
    (text,) = said(caplog, logging.INFO)
    assert "first update_actor" in text
    assert not said(caplog, logging.WARNING)


def test_a_low_ratio_is_said_once_with_the_setting(route, caplog):
    """`balance_batch` is the legacy trainer's: V1 balances in any case."""
    cls, step = route
    v1 = step is v1_step
    cases = (
        (config(balance_batch=False), "larger" if v1 else "Set trainer.balance_batch=True."),
        (config(), "can't be put whole into mini-batches of 4 rows on each of 2"),
    )
    for settings, expected in cases:
        caplog.clear()
        trainer = trainer_of(cls, settings, TORN)
        with caplog.at_level(logging.WARNING, "zorro_verl"):
            for _ in range(3):
                step(trainer, critic=False)
        (text,) = said(caplog, logging.WARNING)
        assert expected in text


def test_the_token_budget_is_the_one_that_the_trainer_reads(route, caplog):
    """Of the critic each trainer reads another, and `critic.use_dynamic_bsz` none of them."""
    cls, step = route
    more = [[{"a": 2}, {"a": 2}], [{"b": 2}, {"b": 2}]]
    budget = "+critic.ppo_infer_max_token_len_per_gpu" if step is v1_step else "critic.ppo_max_token_len_per_gpu"
    for actor, key, dynamic, expected in (
        ("zorro", "actor_rollout_ref.actor.use_dynamic_bsz", True, "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"),
        (
            "zorro",
            "actor_rollout_ref.actor.use_dynamic_bsz",
            False,
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
        ),
        ("fsdp2", "critic.use_dynamic_bsz", True, budget),
        ("fsdp2", "critic.use_dynamic_bsz", False, budget),
        ("fsdp2", "critic.fsdp.use_dynamic_bsz", False, "+critic.fsdp.micro_batch_size_per_gpu"),
    ):
        caplog.clear()
        settings = config(actor=actor)
        OmegaConf.update(settings, key, dynamic)
        with caplog.at_level(logging.WARNING, "zorro_verl"):
            step(trainer_of(cls, settings, more), critic=actor != "zorro", actor=actor == "zorro")
        (text,) = said(caplog, logging.WARNING)
        assert f"Raise {expected} if memory allows" in text


@pytest.mark.parametrize(
    ("role", "settings", "costs"),
    [
        ("actor", {}, (4, 3)),
        ("actor", {"model.enable_gradient_checkpointing": False}, (3, 3)),
        ("actor", {"model.use_fused_kernels": True}, (4, 4)),
        ("actor", {"actor.zorro.logits_optimization": "memory"}, (4, 4)),
        ("actor", {"actor.zorro.linear_attention": "fork"}, (4, 3)),
        ("critic", {}, (4, 3)),
        ("critic", {"model.enable_gradient_checkpointing": False}, (3, 3)),
    ],
)
def test_the_speed_up_is_weighed_by_what_the_role_computes_again(route, caplog, role, settings, costs):
    """Of layers 580 in full and 80 executed, of the head 20, and 80 more on prompts."""
    cls, step = route
    run = config() if role == "actor" else config(actor="fsdp2")
    for name, value in settings.items():
        OmegaConf.update(run.actor_rollout_ref if role == "actor" else run.critic, name, value, force_add=True)
    with caplog.at_level(logging.INFO, "zorro_verl"):
        step(trainer_of(cls, run, WHOLE), critic=role == "critic", actor=role == "actor")
    (text,) = said(caplog, logging.INFO)
    layers, head = costs
    expected = (layers * 580 + head * 100) / (layers * 80 + head * 20)
    assert f"Predicted speed-up of update_{role} over fsdp2: {expected:.2f}, by multiply-adds." in text


def told_by_an_engine(rank, path):
    """Counts of three calls of one engine, the second and third with a budget below its groups; and its warnings."""
    texts = []
    logging.getLogger("zorro_verl.budget_warning").addFilter(lambda record: texts.append(record.getMessage()))
    engine, counts = build_engine(path, "zorro"), []
    for budget in (4096, 34, 34):
        batch = verl_batch(ragged_batch(), max_token_len_per_gpu=budget, global_batch_size=16)
        with engine.train_mode():
            engine.optimizer_zero_grad()
            metrics = engine.forward_backward_batch(batch, ppo_loss_function())["metrics"]
        counts.append(ShareCounts.pop_from(metrics))
    return counts, texts


@pytest.mark.slow
def test_an_engine_tells_what_trainers_say(tmp_path):
    tiny_model(dtype=torch.float32).save_pretrained(tmp_path)
    ((counts, texts),) = run_ranks(told_by_an_engine, 1, str(tmp_path))
    rows = ragged_batch()
    packed = sum({tuple(p.tolist()): len(p) for p, _ in rows}.values()) + sum(len(r) for _, r in rows)
    assert [each.over_budget for each in counts] == [0, 1, 1]
    assert len(texts) == 1, "once for each engine"
    for each in counts:
        assert each.tokens_total / each.token_ratio_best(1) == pytest.approx(packed)
        assert each.shared.startswith("Qwen3ForCausalLM: attention of ")
    assert counts[0].repeats(1) == (0, 0, 0)
    assert counts[1].repeats(1).micro_batches == counts[1].tokens_packed - packed > 0
