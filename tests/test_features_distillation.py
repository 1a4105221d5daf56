"""On-policy distillation: verl's losses against a teacher, on shared prompts, against the stock engine."""

from functools import partial

import pytest
import torch
from ranks import run_ranks
from test_engine import full_gradients
from test_features import TOLERANCE, Case, batch_of, build, folder  # noqa: F401
from tiny import VOCAB, jagged, worst_gradient

TOP = 4
MODES = {
    "top-k": {"loss_mode": "forward_kl_topk", "use_policy_gradient": False, "use_task_rewards": True},
    "top-k-alone": {"loss_mode": "forward_kl_topk", "use_policy_gradient": False, "use_task_rewards": False},
    "top-k-in-chunks": {"loss_mode": "forward_kl_topk", "use_policy_gradient": False, "use_chunked_topk": True},
    "top-k-as-reward": {"loss_mode": "forward_kl_topk", "use_policy_gradient": True},
    "k3": {"loss_mode": "k3", "use_policy_gradient": False},
    "k1-as-reward": {"loss_mode": "k1", "use_policy_gradient": True},
}


def taught_batch(case, rank, world_size, stock, mode):
    data, g = batch_of(case, rank, world_size, stock), torch.Generator().manual_seed(7)
    topk = mode["loss_mode"] == "forward_kl_topk"
    logits = [torch.randn(n, VOCAB, generator=g) * 3 for n in data["input_ids"].offsets().diff().tolist()]
    best = [x.log_softmax(-1).topk(TOP if topk else 1) for x in logits]
    data["teacher_logprobs"] = jagged([x.values for x in best])
    data["teacher_ids"] = jagged([x.indices for x in best])
    only = topk and not mode.get("use_task_rewards", True)
    for key, value in {"distillation_use_topk": topk, "distillation_only": only}.items():
        data.set_non_tensor(key, value)
    return data


def loss_of(strategy, mode):
    from verl.trainer.distillation.losses import distillation_ppo_loss
    from verl.workers.config import DistillationConfig, DistillationLossConfig, FSDPActorConfig

    settings = {"rollout_n": 4, "ppo_micro_batch_size_per_gpu": 2, "entropy_coeff": 0.01}
    return partial(
        distillation_ppo_loss,
        config=FSDPActorConfig(strategy=strategy, **settings),
        distillation_config=DistillationConfig(distillation_loss=DistillationLossConfig(topk=TOP, **mode)),
    )


def distil(rank, path, name):
    """Both engines' gradients, and what they report, after a step of one kind of distillation."""
    mode, grads, reports = MODES[name], [], []
    for strategy in ("fsdp2", "zorro"):
        case = Case(batch={"max_token_len_per_gpu": 60} if strategy == "zorro" else {})  # the stock engine's is whole
        engine = build(path, strategy, case)
        with engine.train_mode():
            output = engine.train_batch(taught_batch(case, 0, 1, strategy == "fsdp2", mode), loss_of(strategy, mode))
            grads.append(full_gradients(engine))
        reports.append(output["metrics"])
    return worst_gradient(*grads), reports


def equal_to_stock(rank, path):
    results = {}
    for name in MODES:
        worst, (stock, zorro) = distil(rank, path, name)
        shared = zorro["zorro/tokens_packed"][0] < zorro["zorro/tokens_total"][0] - 40
        results[name] = worst, shared, stock["grad_norm"], zorro["grad_norm"]
        assert {key for key in stock if "distillation" in key} == {key for key in zorro if "distillation" in key}
    return results


@pytest.fixture(scope="module")
def results(folder):  # noqa: F811
    return run_ranks(equal_to_stock, 1, folder)[0]


@pytest.mark.feature(
    "distillation.distillation_loss.loss_mode",
    "works",
    "all of them; top-k with `zorro.logits_optimization` none or compute and without sequence parallelism",
)
@pytest.mark.parametrize("name", MODES)
def test_distillation_equals_stock(results, name):
    worst, shared, *norms = results[name]
    assert worst <= TOLERANCE
    assert shared
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    assert norms[0] > 1e-3


def refused(rank, path):
    from zorro_verl.options import ZorroOptions

    def engine_of(**settings):
        return build(path, "zorro", Case(**settings))

    mode = MODES["top-k"]
    for settings, change, message in (
        ({"zorro": {"logits_optimization": "memory"}}, {}, "logits_optimization: expected none or compute"),
        ({"model": {"use_fused_kernels": True}}, {}, "use_fused_kernels"),
        ({}, {"teacher_ids": None}, "teacher_ids: expected jagged rows"),
        ({}, {"teacher_logprobs": jagged([torch.zeros(3, TOP)] * 16)}, "teacher_logprobs: expected jagged rows"),
    ):
        engine, data = engine_of(**settings), taught_batch(Case(), 0, 1, False, mode)
        for key, value in change.items():
            data.pop(key)
            if value is not None:
                data[key] = value
        with engine.train_mode(), pytest.raises(ValueError, match=message):
            engine.train_batch(data, loss_of("zorro", mode))
    assert ZorroOptions().logits_optimization == "none"


@pytest.mark.slow
def test_a_top_k_loss_without_its_logits_or_its_teacher_is_refused(folder):  # noqa: F811
    run_ranks(refused, 1, folder)


def test_other_strategies_keep_verls_choice_of_a_loss():
    """A stand-in for verl's module: the wrap hands on what it got, but for the name zorro."""
    import types

    from zorro_verl.distillation import wrap_topk_loss

    module = types.SimpleNamespace(compute_topk_loss=lambda config, *args: (config.strategy, *args))
    wrap_topk_loss(module)
    wrapped = module.compute_topk_loss
    wrap_topk_loss(module)
    assert module.compute_topk_loss is wrapped
    config = types.SimpleNamespace(strategy="zorro")
    assert wrapped(config, 1) == ("fsdp2", 1)
    assert config.strategy == "zorro"
    assert wrapped(types.SimpleNamespace(strategy="megatron"), 2) == ("megatron", 2)
