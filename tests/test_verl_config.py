"""The run's config on the driver: the group's options reach actor and reference, and bad runs stop before Ray."""

import pytest
import tiny_models
import torch
from hydra import compose, initialize_config_module
from tiny import tiny_model

GROUP = ["hydra.searchpath=[pkg://zorro_verl.configs]", "actor@actor_rollout_ref.actor=zorro_actor"]
MODEL = "actor_rollout_ref.model"
TOP_K = ["distillation.enabled=True", "distillation.distillation_loss.loss_mode=forward_kl_topk"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tiny_model(dtype=torch.float32).save_pretrained(path)
    return str(path)


def prepared(folder, *overrides):
    """The config as verl's main composes it, after the first thing that main does with it."""
    from verl.utils.device import auto_set_device

    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=[f"{MODEL}.path={folder}", *overrides])
    auto_set_device(config)
    return config


def test_the_reference_gets_the_actors_options(folder):
    config = prepared(folder, *GROUP, "actor_rollout_ref.actor.zorro.logits_optimization=memory")
    assert config.actor_rollout_ref.ref._target_ == config.actor_rollout_ref.actor._target_
    assert config.actor_rollout_ref.ref.zorro.logits_optimization == "memory"


def test_options_work_without_the_group(folder):
    from verl.utils.config import omega_conf_to_dataclass

    config = prepared(
        folder,
        "actor_rollout_ref.actor.strategy=zorro",
        "+actor_rollout_ref.actor.zorro.logits_optimization=memory",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
    )
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    assert actor.engine.zorro.logits_optimization == "memory"
    assert config.actor_rollout_ref.ref.zorro.logits_optimization == "memory"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["actor_rollout_ref.actor.use_prefix_grouper=True"], "use_prefix_grouper"),
        (
            ["+actor_rollout_ref.actor.zorro.logits_optimisation=memory"],
            "actor.zorro: expected options of attn_implementation, .*logits_optimization.*, got logits_optimisation",
        ),
        (
            [*TOP_K, "+actor_rollout_ref.actor.zorro.logits_optimization=memory"],
            "zorro.logits_optimization: expected none or compute.*got memory",
        ),
        ([*TOP_K, f"{MODEL}.use_fused_kernels=True"], "use_fused_kernels"),
        ([*TOP_K, "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2"], "ulysses_sequence_parallel_size"),
        (
            ["actor_rollout_ref.actor.ulysses_sequence_parallel_size=3"],
            "actor.ulysses_sequence_parallel_size: expected a divisor of \\d, the model's num_attention_heads, got 3",
        ),
        *(
            ([f"actor_rollout_ref.actor.ulysses_sequence_parallel_size={size}"], f"parallel_size: expected {message}")
            for size, message in ((0, "an integer of at least 1"), (2, "a divisor of 3 ranks .trainer.nnodes x"))
        ),
        (["actor_rollout_ref.ref.ulysses_sequence_parallel_size=2"], "ref.ulysses_sequence_parallel_size.*3 ranks"),
        ([f"+{MODEL}.override_config.attention_dropout=0.1"], "attention_dropout.*override_config"),
        ([f"+{MODEL}.override_config.model_type=gpt_neox"], "model_type.*strategy=fsdp2"),
    ],
)
def test_bad_runs_stop_on_the_driver(folder, overrides, message):
    with pytest.raises(ValueError, match=message):
        prepared(folder, "actor_rollout_ref.actor.strategy=zorro", "trainer.n_gpus_per_node=3", *overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        ["trainer.v1.trainer_mode=separate_async"],
        [f"{MODEL}.use_fused_kernels=True", "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2"],
        [*TOP_K, "+actor_rollout_ref.actor.zorro.logits_optimization=compute"],
        ["distillation.enabled=True", f"{MODEL}.use_fused_kernels=True"],  # its loss is one of log-probs
    ],
)
def test_good_runs_pass(folder, overrides):
    prepared(folder, "actor_rollout_ref.actor.strategy=zorro", *overrides)


@pytest.mark.parametrize(("factor", "warns"), [("null", True), ("64", False)])
def test_a_loss_that_depends_on_micro_batches_is_warned_of(folder, caplog, factor, warns):
    actor = "actor_rollout_ref.actor"
    mode = f"{actor}.loss_agg_mode=seq-mean-token-sum-norm"
    prepared(folder, f"{actor}.strategy=zorro", mode, f"{actor}.loss_scale_factor={factor}")
    assert any("loss_scale_factor" in record.message for record in caplog.records) == warns


def test_a_config_with_a_text_part_is_checked_there(tmp_path):
    tiny_models.build("qwen3_5", torch.float32).save_pretrained(tmp_path)
    zorro, override = "actor_rollout_ref.actor.strategy=zorro", f"+{MODEL}.override_config"
    prepared(tmp_path, zorro)
    prepared(tmp_path, zorro, f"{override}.attention_dropout=0.1")  # the text model does not read it there
    key = rf"attention_dropout.*{override[1:]}.text_config.attention_dropout=0"
    for place in ("override_config", "override_config.model_config"):
        with pytest.raises(ValueError, match=key):
            prepared(tmp_path, zorro, f"+{MODEL}.{place}.text_config.attention_dropout=0.1")


def test_other_strategies_are_left_alone(folder):
    before = prepared(folder)
    assert "zorro" not in before.actor_rollout_ref.ref
    prepared(folder, "actor_rollout_ref.actor.use_prefix_grouper=True", "critic.strategy=fsdp")
