"""What the updates of verl's own trainers log and say: the best ratio by every route, one summary, one warning."""

import logging
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf
from ranks import run_ranks
from test_engine import build_engine, ppo_loss_function, ragged_batch
from test_ratio_warning import TORN, counts_of
from tiny import tiny_model, verl_batch

from zorro_verl.metrics import ShareCounts

WHOLE = [[{"a": 4}], [{"b": 4}]]


def config(actor="zorro", critic="zorro", **trainer):
    update = {"ppo_epochs": 1, "data_loader_seed": 1, "shuffle": False, "ppo_mini_batch_size": 2}
    update |= {"use_dynamic_bsz": True, "entropy_coeff": 0.0, "calculate_entropy": False}
    rollout = {"n": 4, "temperature": 1.0, "multi_turn": {"enable": False}}
    return OmegaConf.create(
        {
            "actor_rollout_ref": {"actor": {"strategy": actor} | update, "rollout": rollout},
            "critic": {"strategy": critic} | update,
            "trainer": {"balance_batch": True, "critic_warmup": 0} | trainer,
        }
    )


def reported(calls):
    """What a worker group gives of an update, with what verl's trainers look for."""
    from verl.utils import tensordict_utils as tu

    counts = counts_of(*calls)
    counts.shared = "Model: attention of 2 layers shared, by sdpa"
    return tu.get_tensordict({}, {"metrics": counts.to_metrics() | {"mfu": [0.1]}})


class Future:
    """What a critic's worker group gives, by the time that it has arrived."""

    def __init__(self, output):
        self.output = output

    def __getitem__(self, name):
        return self.output[name]

    def get(self):
        return self.output


def trainer_of(cls, settings, calls, critic_calls=None):
    """A trainer of verl's whose workers report these calls, in place of workers."""
    trainer = object.__new__(cls)
    trainer.config, trainer.use_critic, trainer.global_steps = settings, True, 1
    mesh = {name: [0, 1] for name in ("actor", "train")}
    trainer.actor_rollout_wg = SimpleNamespace(_dispatch_info=mesh, update_actor=lambda batch: reported(calls))
    train = lambda batch: Future(reported(critic_calls or calls))  # noqa: E731
    trainer.critic_wg = SimpleNamespace(_dispatch_info=mesh, train_mini_batch=train)
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


def legacy_step(trainer, critic=True, actor=True):
    """The same of the legacy trainer: what updates give, and what waits in the batch."""
    from verl import DataProto
    from verl.trainer.ppo.ray_trainer import compute_throughout_metrics

    columns = {name: torch.ones(8, 6, dtype=torch.int64) for name in ("input_ids", "attention_mask", "position_ids")}
    batch = DataProto.from_single_dict(columns | {"response_mask": torch.ones(8, 3, dtype=torch.int64)})
    batch.meta_info["global_token_num"] = [6] * 8
    metrics = {}
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


def test_the_token_budget_is_named_as_the_role_has_it(caplog):
    from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

    more = [[{"a": 2}, {"a": 2}], [{"b": 2}, {"b": 2}]]
    for dynamic, actor, expected in (
        (True, "zorro", "Raise ppo_max_token_len_per_gpu (log_prob"),
        (False, "zorro", "Raise ppo_micro_batch_size_per_gpu (log_prob"),
        (True, "fsdp2", "Raise +critic.ppo_infer_max_token_len_per_gpu (critic.ppo_max_token_len_per_gpu in"),
    ):
        caplog.clear()
        settings = config(actor=actor)
        for role in (settings.actor_rollout_ref.actor, settings.critic):
            role.use_dynamic_bsz = dynamic
        with caplog.at_level(logging.WARNING, "zorro_verl"):
            v1_step(trainer_of(PPOTrainerSync, settings, more), actor=actor == "zorro")
        (text,) = said(caplog, logging.WARNING)
        assert expected in text


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
