"""`compute_log_prob` and `update_policy` against verl's own worker on the same ``DataProto``."""

import copy
import logging
from functools import partial

import pytest
import torch
from ranks import run_ranks
from tiny import batch_b0, padded_batch, per_row, shuffled, tiny_model, tokens

from zorro_verl.flops import flop_bound_speedup

FLOAT64 = 5e-6
FLOAT32 = 2e-5
LOSS_AGG_MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
ADAM = {"lr": 1e-2, "override_optimizer_config": {"eps": 1e-3}}  # rounding in a zero gradient moves no parameter
DYNAMIC = {"use_dynamic_bsz": True}
FIXED = {"use_dynamic_bsz": False, "ppo_micro_batch_size_per_gpu": 2}

SCENARIOS = {
    "in order, groups cut by the mini-batches": {"actor": DYNAMIC},
    "shuffled, micro-batches of a size": {"actor": FIXED | {"shuffle": True, "data_loader_seed": 7}, "parts": True},
    "shuffled, micro-batches under a budget": {
        "actor": DYNAMIC | {"ppo_max_token_len_per_gpu": 40, "shuffle": True},
        "parts": True,
    },
    "entropy, KL and a temperature": {
        "actor": DYNAMIC | {"entropy_coeff": 0.05, "use_kl_loss": True, "kl_loss_coef": 0.3},
        "temperature": 0.7,
        "holes": True,
    },
    "clipped, with warm-up": {
        "actor": DYNAMIC,
        "optim": {"clip_grad": 0.05, "lr_warmup_steps": 2, "lr_scheduler_type": "cosine", "total_training_steps": 9},
        "calls": 3,
    },
    **{
        mode: {"actor": FIXED | {"loss_agg_mode": mode}, "optim": {"lr": 1e-3}, "holes": True, "parts": True}
        for mode in LOSS_AGG_MODES
    },
}


def make_actor(folder, **options):
    from zorro_verl.actor import DeduplicatedActor  # not in a spawned rank before it has chosen verl's platform

    return DeduplicatedActor(model_name_or_path=folder, device="cpu", **options)


def interleaved_rows():
    """Sixteen rows of five prompts in no order: groups of 4, 5, 3, 3 and 1, with an empty response among them."""
    g = torch.Generator().manual_seed(3)
    groups = ((9, (4, 9, 1, 7)), (5, (3, 3, 8, 2, 5)), (1, (6, 0, 4)), (7, (1, 12, 5)), (3, (4,)))
    return shuffled([(p, tokens(n, g)) for length, ns in groups for p in [tokens(length, g)] for n in ns], 5)


def training_tensors(rows, holes=False):
    batch, g = padded_batch(rows), torch.Generator().manual_seed(0)
    shape, width = batch["responses"].shape, batch["responses"].shape[1]
    valid = batch["attention_mask"][:, -width:]
    batch["prompts"] = batch["input_ids"][:, :-width]
    batch["response_mask"] = valid * (torch.rand(shape, generator=g) > 0.4) if holes else valid.clone()
    for name in ("old_log_probs", "ref_log_prob"):
        batch[name] = -4 + 0.3 * torch.randn(shape, generator=g)
    batch["advantages"] = torch.randn(shape, generator=g)
    return batch


def data_proto(rows, temperature=1.0, holes=False, **settings):
    from verl import DataProto

    meta_info = {"temperature": temperature} | settings
    return DataProto.from_single_dict(training_tensors(rows, holes), meta_info=meta_info)


def actor_config(optim=None, **options):
    from verl.workers.config import FSDPActorConfig, FSDPOptimizerConfig

    defaults = {"strategy": "fsdp2", "rollout_n": 1, "ppo_mini_batch_size": 8, "ppo_epochs": 2, "use_dynamic_bsz": True}
    return FSDPActorConfig(optim=FSDPOptimizerConfig(**ADAM | (optim or {})), **defaults | options)


class StockWorker:
    """verl's `TrainingWorker` with the stock engine, called as verl's trainer calls it."""

    def __init__(self, path, config):
        from verl.trainer.config import CheckpointConfig
        from verl.workers.config import FSDPEngineConfig, HFModelConfig, TrainingWorkerConfig
        from verl.workers.engine_workers import TrainingWorker
        from verl.workers.utils.losses import ppo_loss

        model = HFModelConfig(
            path=path,
            load_tokenizer=False,
            use_remove_padding=False,
            enable_gradient_checkpointing=False,
            override_config={"attn_implementation": "sdpa"},
        )
        fp32 = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
        self.worker = TrainingWorker(
            TrainingWorkerConfig(
                model_type="language_model",
                model_config=model,
                engine_config=FSDPEngineConfig(strategy="fsdp2", mixed_precision=fp32, use_torch_compile=False),
                optimizer_config=config.optim,
                checkpoint_config=CheckpointConfig(),
            )
        )
        self.worker.reset()
        self.worker.set_loss_fn(partial(ppo_loss, config=copy.deepcopy(config)))
        self.config = config

    def _batch(self, data, **settings):
        from verl.utils import tensordict_utils as tu
        from verl.workers.utils.padding import left_right_2_no_padding

        batch = left_right_2_no_padding(data.to_tensordict())
        size = self.config.ppo_micro_batch_size_per_gpu or 1
        budget = {"use_dynamic_bsz": self.config.use_dynamic_bsz, "micro_batch_size_per_gpu": size}
        budget["max_token_len_per_gpu"] = self.config.ppo_max_token_len_per_gpu
        tu.assign_non_tensor(batch, **budget, **settings)
        return batch

    def compute_log_prob(self, data):
        from verl.utils import tensordict_utils as tu
        from verl.workers.utils.padding import no_padding_2_padding

        batch = self._batch(data, calculate_entropy=True, compute_loss=False)
        output = self.worker.infer_batch(batch)
        return [no_padding_2_padding(tu.get(output, name), batch).float() for name in ("log_probs", "entropy")]

    def update_actor(self, data):
        from verl.utils import tensordict_utils as tu
        from verl.utils.metric import reduce_metrics
        from verl.utils.py_functional import rename_dict

        config = self.config
        batch = self._batch(
            data,
            calculate_entropy=config.calculate_entropy or config.entropy_coeff != 0.0,
            global_batch_size=config.ppo_mini_batch_size,
            mini_batch_size=config.ppo_mini_batch_size,
            epochs=config.ppo_epochs,
            seed=config.data_loader_seed,
            dataloader_kwargs=self._draws(data) if config.shuffle else {},
            compute_loss=True,
        )
        return reduce_metrics(rename_dict(tu.get(self.worker.train_mini_batch(batch), "metrics"), "actor/"))

    def _draws(self, data):
        """verl draws rows one by one; here by group, as the actor does."""
        from zorro_verl.shuffling import GroupShuffle
        from zorro_verl.verl_rows import rows_from_verl

        rows, _ = rows_from_verl(self._batch(data))
        size = min(self.config.ppo_mini_batch_size, rows.num_rows)
        return {"sampler": GroupShuffle(rows, rows.num_rows // size, self.config.data_loader_seed)}

    def parameters(self):
        return {name: p.full_tensor().detach().clone() for name, p in self.worker.engine.module.named_parameters()}


def largest(a, b):
    return float((a - b).abs().max())


def against_verls_worker(rank, path, rows):
    """For each scenario the largest differences; in verl's process, so beside a process group that is not ours."""
    start = dict(tiny_model(dtype=torch.float32).named_parameters())
    results = {}
    for name, scenario in SCENARIOS.items():
        config = actor_config(scenario.get("optim"), **scenario["actor"])
        stock = StockWorker(path, config)
        actor = make_actor(path, actor_config=config)
        data = partial(data_proto, rows, scenario.get("temperature", 1.0), scenario.get("holes", False))
        valid = data().batch["attention_mask"][:, -data().batch["responses"].shape[1] :].bool()
        result = {"zero at padding": True, "calls": []}
        for call in range(scenario.get("calls", 1)):
            scored = actor.compute_log_prob(data(), calculate_entropy=True)
            for key, expected in zip(("log_probs", "entropys"), stock.compute_log_prob(data()), strict=True):
                result[f"{key} before call {call}"] = largest(expected[valid], scored[key][valid])
                result["zero at padding"] &= not scored[key][~valid].any()
            result["calls"].append((stock.update_actor(data()), actor.update_policy(data())))
        expected, got = stock.parameters(), dict(actor.model.named_parameters())
        assert expected.keys() == got.keys()
        result["moved"] = max(largest(expected[key], start[key]) for key in got)
        result["parameters"] = max(largest(expected[key], got[key]) for key in got)
        results[name] = result
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tiny_model(dtype=torch.float32).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def results(folder):
    return run_ranks(against_verls_worker, 1, folder, interleaved_rows(), timeout=200)[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_same_as_verls_worker(results, name):
    result = results[name]
    assert result.pop("zero at padding")
    assert result.pop("moved") > 2e-3, "the steps changed nothing: the comparison is blind"
    for expected, got in result.pop("calls"):
        names = {key for key in expected if not key.startswith(("actor/perf", "actor/mfu"))}
        assert names == {key for key in got if not key.startswith("zorro/")}
        if SCENARIOS[name].get("parts"):  # verl averages these over micro-batches, and ours are others
            names -= {"actor/ppo_kl", "actor/pg_clipfrac", "actor/pg_clipfrac_lower"}
        for key in names:
            assert type(got[key]) is float
            assert got[key] == pytest.approx(float(expected[key]), abs=FLOAT32, rel=FLOAT32), key
    for key, difference in result.items():
        assert difference <= FLOAT32, key


@pytest.fixture
def rows():
    return shuffled(batch_b0(), 1)


def by_row(output, rows):
    return [values[: len(response)] for values, (_, response) in zip(output, rows, strict=True)]


def parameters(actor):
    return {name: p.detach().clone() for name, p in actor.model.named_parameters()}


def assert_equal_parameters(expected, got, tolerance):
    assert expected.keys() == got.keys()
    for name in expected:
        assert largest(expected[name], got[name]) <= tolerance, name


@pytest.mark.parametrize(
    ("settings", "packed", "split"),
    [
        ({}, 48, 0),
        ({"max_token_len": 48}, 48, 0),
        ({"use_dynamic_bsz": True, "max_token_len": 20, "micro_batch_size": 8}, 60, 2),
        ({"micro_batch_size": 1}, 65, 2),
        ({"use_dynamic_bsz": False, "micro_batch_size": 4, "max_token_len": 1}, 48, 0),
    ],
)
def test_log_probs_equal_rows(folder, rows, settings, packed, split):
    actor = make_actor(folder, dtype="float64")
    output = actor.compute_log_prob(data_proto(rows, 0.7, **settings), calculate_entropy=True)
    assert output.keys() == {"log_probs", "entropys"}
    for name, expected in zip(("log_probs", "entropys"), per_row(tiny_model(), rows, 0.7), strict=True):
        assert output[name].shape == (len(rows), 8)
        assert output[name].dtype == torch.float64
        assert not output[name].requires_grad
        for row, (a, b) in enumerate(zip(by_row(output[name], rows), expected, strict=True)):
            torch.testing.assert_close(a, b, atol=FLOAT64, rtol=0, msg=lambda m, row=row: f"row {row}: {m}")
        assert output[name].count_nonzero() == sum(len(r) for _, r in rows), "zero at padding"
    assert (actor.stats["groups"], actor.stats["groups_split"], actor.stats["tokens_packed"]) == (3, split, packed)


def test_log_probs_without_entropy_per_row_temperatures_and_a_plain_mapping(folder, rows):
    actor = make_actor(folder, dtype="float64")
    temperatures = torch.tensor([0.5, 2.0, 1.0, 0.7, 1.3, 0.9, 1.1, 0.6], dtype=torch.float64)
    output = actor.compute_log_prob(data_proto(rows, temperatures))
    assert output.keys() == {"log_probs"}
    expected = torch.cat(per_row(tiny_model(), rows, temperatures.tolist())[0])
    torch.testing.assert_close(torch.cat(by_row(output["log_probs"], rows)), expected, atol=FLOAT64, rtol=0)
    plain = actor.compute_log_prob(padded_batch(rows))["log_probs"]
    assert torch.equal(plain, actor.compute_log_prob(data_proto(rows, 1.0))["log_probs"])


@pytest.mark.parametrize(("dtype", "expected"), [("float32", torch.float32), ("bfloat16", torch.float32)])
def test_scores_are_float32(folder, rows, dtype, expected):
    output = make_actor(folder, dtype=dtype).compute_log_prob(data_proto(rows), calculate_entropy=True)
    assert {values.dtype for values in output.values()} == {expected}


def test_modes_are_given_back(folder, rows):
    actor = make_actor(folder, dtype="float64")
    seen, forward = [], actor.model.model.forward
    actor.model.model.forward = lambda *args, **kwargs: seen.append(actor.model.training) or forward(*args, **kwargs)
    for frozen in (True, False):
        actor.model.train(not frozen)
        actor.model.lm_head.train(frozen)
        modes = [m.training for m in actor.model.modules()]
        actor.compute_log_prob(data_proto(rows))
        actor.update_policy(data_proto(rows))
        assert [m.training for m in actor.model.modules()] == modes
        with pytest.raises(ValueError, match="temperature"):
            actor.compute_log_prob(data_proto(rows, "cold"))
        assert [m.training for m in actor.model.modules()] == modes
    assert seen == [False, True] * 2


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_micro_batches_make_no_difference(folder, rows, mode):
    """All of a mini-batch at once, or in pieces that cut its groups: the same steps, for each way to average a loss."""
    steps = []
    for settings in (
        {},
        {"use_dynamic_bsz": True, "max_token_len": 16},
        {"micro_batch_size": 1, "use_dynamic_bsz": False},
    ):
        config = actor_config(ADAM | {"clip_grad": 1e6}, loss_agg_mode=mode, ppo_mini_batch_size=4, entropy_coeff=0.1)
        actor = make_actor(folder, dtype="float64", actor_config=config)
        metrics = actor.update_policy(data_proto(rows, 0.8, holes=True, **settings))
        steps.append((metrics["actor/loss"], metrics["actor/grad_norm"], parameters(actor), metrics))
    for loss, norm, after, _ in steps[1:]:
        assert loss == pytest.approx(steps[0][0], abs=FLOAT64)
        assert norm == pytest.approx(steps[0][1], abs=FLOAT64)
        assert_equal_parameters(steps[0][2], after, FLOAT64)
    assert steps[0][3]["zorro/tokens_packed"] < steps[1][3]["zorro/tokens_packed"], "nothing was cut"


def test_counts_over_epochs_and_mini_batches(folder):
    g = torch.Generator().manual_seed(0)
    prompts = [tokens(6, g) for _ in range(4)]
    rows = [(p, tokens(2, g)) for p in prompts for _ in range(4)]
    actor = make_actor(folder, actor_config=actor_config(ppo_mini_batch_size=8, ppo_epochs=3))
    counts = {key: value for key, value in actor.update_policy(data_proto(rows)).items() if key.startswith("zorro/")}
    assert counts == {
        "zorro/tokens_total": 3 * 16 * 8,
        "zorro/tokens_packed": 3 * (4 * 6 + 16 * 2),
        "zorro/token_ratio": 128 / 56,
        "zorro/groups": 12,
        "zorro/groups_split": 0,
        "zorro/fallback/group_cut": 0,
        "zorro/fallback/multimodal": 0,
        "zorro/flop_ratio": flop_bound_speedup(actor.model.config, [(6, [2] * 4)]),
        "zorro/skipped_steps": 0,
    }
    assert actor.stats["groups"] == 12
    actor = make_actor(folder, actor_config=actor_config(ppo_mini_batch_size=2, ppo_epochs=1))
    counts = actor.update_policy(data_proto(rows))
    assert counts["zorro/groups_split"] == 4, "verl's mini-batches of two rows halve every group"
    assert counts["zorro/tokens_packed"] == 8 * 6 + 16 * 2


def test_a_given_optimizer_is_used(folder, rows):
    """And takes the same step as the two calls of the harness, clipped."""
    config = actor_config({"clip_grad": 0.01}, ppo_epochs=1)
    actor, by_hand = (make_actor(folder, dtype="float64", actor_config=config) for _ in range(2))
    actor.optimizer = torch.optim.SGD(actor.model.parameters(), lr=0.5)
    metrics = actor.update_policy(data_proto(rows))
    assert isinstance(actor.optimizer, torch.optim.SGD)
    assert actor.lr_scheduler is None
    assert metrics["actor/lr"] == 0.5
    assert all(p.grad is None or not p.grad.any() for p in actor.model.parameters())

    losses = by_hand.compute_policy_loss_and_backward(data_proto(rows))
    norm = torch.nn.utils.clip_grad_norm_(by_hand.model.parameters(), 0.01)
    torch.optim.SGD(by_hand.model.parameters(), lr=0.5).step()
    assert metrics["actor/loss"] == pytest.approx(losses["actor/policy_loss"], abs=1e-12)
    assert metrics["actor/grad_norm"] == pytest.approx(float(norm), abs=FLOAT64)
    assert_equal_parameters(parameters(by_hand), parameters(actor), 1e-12)


@pytest.mark.parametrize(
    ("options", "norm"),
    [
        ({"optim": {"clip_grad": 0.01}}, 0.01),
        ({"grad_clip": 0.01}, 0.01),
        ({"optim": {"clip_grad": 9.0}}, None),
        ({"optim": {"clip_grad": 0.01}, "grad_clip": 0.01}, 0.01),
    ],
)
def test_gradients_are_clipped_where_the_config_says(folder, rows, options, norm):
    actor = make_actor(folder, dtype="float64", actor_config=actor_config(ppo_epochs=1, **options))
    before = parameters(actor)
    actor.optimizer = torch.optim.SGD(actor.model.parameters(), lr=1.0)
    unclipped = actor.update_policy(data_proto(rows))["actor/grad_norm"]
    moved = sum(float((p - before[name]).pow(2).sum()) for name, p in actor.model.named_parameters()) ** 0.5
    assert unclipped > 0.01
    assert moved == pytest.approx(norm or unclipped, rel=1e-4)


def test_the_plain_optimizer_config_is_adamw(folder, rows):
    from verl.workers.config import FSDPActorConfig, OptimizerConfig

    optim = OptimizerConfig(lr=0.02, weight_decay=0.3)
    config = FSDPActorConfig(strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=8, optim=optim)
    actor = make_actor(folder, actor_config=config)
    metrics = actor.update_policy(data_proto(rows))
    assert metrics["actor/lr"] == 0.02
    (group,) = actor.optimizer.param_groups
    assert isinstance(actor.optimizer, torch.optim.AdamW)
    assert (group["weight_decay"], group["betas"]) == (0.3, (0.9, 0.999))
    first = actor.optimizer
    actor.update_policy(data_proto(rows))
    assert actor.optimizer is first
    assert all(state["step"] == 2 for state in first.state.values()), "its moments were kept"


@pytest.mark.parametrize(
    ("change", "message", "loss"),
    [
        (lambda b: b["advantages"].mul_(torch.nan), "grad_norm is nan", "nan"),
        (lambda b: b["response_mask"].zero_(), "no token", 0.0),
    ],
    ids=["nan", "no-token"],
)
def test_a_step_without_a_usable_gradient_is_skipped(folder, rows, caplog, change, message, loss):
    actor = make_actor(folder, actor_config=actor_config(ppo_epochs=1))
    actor.update_policy(data_proto(rows))  # moments that would move the parameters under a zero gradient
    before, data = parameters(actor), data_proto(rows)
    change(data.batch)
    with caplog.at_level(logging.WARNING, "zorro_verl"):
        metrics = actor.update_policy(data)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert message in caplog.text
    assert metrics["zorro/skipped_steps"] == 1
    assert str(metrics["actor/loss"]) == str(loss)
    assert_equal_parameters(before, parameters(actor), 0)


def test_the_callers_batch_and_config_are_left_alone(folder, rows):
    config, data = actor_config(), data_proto(rows, micro_batch_size=1)
    before = copy.deepcopy((vars(config), data.meta_info, dict(data.batch.items())))
    actor = make_actor(folder, actor_config=config)
    actor.compute_log_prob(data)
    with torch.no_grad():
        actor.update_policy(data)
    assert vars(config) == before[0]
    assert data.meta_info == before[1]
    assert data.batch.keys() == before[2].keys()
    assert all(torch.equal(data.batch[key], before[2][key]) for key in before[2])


def test_a_small_batch_is_one_mini_batch(folder, rows):
    actor = make_actor(folder)  # verl's default of 256 rows a mini-batch
    metrics = actor.update_policy(training_tensors(rows))
    assert metrics["zorro/groups_split"] == 0
    assert all(state["step"] == 1 for state in actor.optimizer.state.values())


@pytest.mark.parametrize(
    ("options", "settings", "drop", "message"),
    [
        ({"ppo_mini_batch_size": 3}, {}, None, "ppo_mini_batch_size: expected a divisor of the batch's 8 rows, got 3"),
        ({"ppo_mini_batch_size": 0}, {}, None, "ppo_mini_batch_size.*got 0"),
        ({"ppo_epochs": 0}, {}, None, "ppo_epochs"),
        ({"grad_clip": 2.0, "optim": {"clip_grad": 3.0}}, {}, None, "grad_clip: expected .*3.0, got 2.0"),
        ({"use_kl_loss": True}, {}, "ref_log_prob", "ref_log_prob"),
        ({}, {}, "old_log_probs", "old_log_probs"),
        ({}, {}, "responses", "responses"),
        ({}, {"max_token_len": 10}, None, "max_token_len.*expected at least 1[0-9] tokens.*got 10"),
        ({}, {"use_dynamic_bsz": False}, None, "micro_batch_size"),
        *(({}, {"micro_batch_size": n}, None, "micro_batch_size") for n in (0, -1, "2", 2.5, [2], float("inf"))),
        *(({}, {"max_token_len": n}, None, "max_token_len") for n in (0, -1, "x", [2], float("inf"), 64.0)),
        ({}, {"use_dynamic_bsz": "no"}, None, "use_dynamic_bsz: expected True or False, got 'no'"),
        *(({"ppo_mini_batch_size": n}, {}, None, "ppo_mini_batch_size: expected") for n in (-1, 2.0, "4", None)),
        *(({"ppo_epochs": n}, {}, None, "ppo_epochs: expected") for n in (-1, 1.5, None)),
        ({"grad_clip": None}, {}, None, "grad_clip: expected a number above 0, got None"),
        ({"optim": {"clip_grad": None}}, {}, None, "clip_grad: expected a number above 0, got None"),
        ({"optim": {"clip_grad": -1.0}}, {}, None, "clip_grad"),
        ({"policy_loss": {"loss_mode": "none of them"}}, {}, None, "none of them"),
        ({}, {"temperature": torch.ones(3)}, None, "temperature"),
    ],
)
def test_what_cannot_be_done_is_named(folder, rows, options, settings, drop, message):
    from verl.workers.config import PolicyLossConfig

    if "policy_loss" in options:
        options = options | {"policy_loss": PolicyLossConfig(**options["policy_loss"])}
    actor = make_actor(folder, actor_config=actor_config(**options))
    data, before = data_proto(rows, **settings), parameters(actor)
    if drop:
        data.batch.pop(drop)
    with pytest.raises(ValueError, match=message):
        actor.update_policy(data)
    assert_nothing_happened(actor, before)


def assert_nothing_happened(actor, before):
    assert_equal_parameters(before, parameters(actor), 0)
    assert all(p.grad is None for p in actor.model.parameters())
    assert actor.optimizer is None
    assert actor.lr_scheduler is None


def shortest_first(rows):
    return sorted(rows, key=lambda row: len(row[0]) + len(row[1]))


def test_a_budget_too_small_for_a_later_mini_batch_is_known_before_the_first_step(folder):
    rows = shortest_first(interleaved_rows())
    assert max(len(p) + len(r) for p, r in rows[:8]) <= 12
    actor = make_actor(folder, actor_config=actor_config())
    before = parameters(actor)
    with pytest.raises(ValueError, match="max_token_len.*got 12"):
        actor.update_policy(data_proto(rows, max_token_len=12))
    assert_nothing_happened(actor, before)


def test_what_a_model_cannot_do_later_is_known_before_the_first_step(tmp_path, monkeypatch):
    from zorro_verl import micro_batches

    rows = shortest_first(interleaved_rows())
    for name, config, attention, message in (
        ("dropout", {"attention_dropout": 0.1}, "auto", "attention_dropout"),
        ("dense", {}, "eager", "attn_implementation: expected micro-batches of at most 60 tokens"),
    ):
        monkeypatch.setattr(micro_batches, "MAX_REFERENCE_TOKENS", 60)
        tiny_model(dtype=torch.float32, **config).save_pretrained(tmp_path / name)
        actor = make_actor(tmp_path / name, attn_implementation=attention, actor_config=actor_config())
        before = parameters(actor)
        with pytest.raises(ValueError, match=message):
            actor.update_policy(data_proto(rows))
        assert_nothing_happened(actor, before)


def test_a_window_that_bites_is_right(tmp_path, rows):
    model = tiny_model("mistral", dtype=torch.float64, sliding_window=6)
    model.save_pretrained(tmp_path)
    scored = make_actor(tmp_path, dtype="float64").compute_log_prob(data_proto(rows))["log_probs"]
    assert min(len(p) + len(r) for p, r in rows) < 6 < max(len(p) for p, _ in rows)
    for values, expected in zip(scored, per_row(model, rows)[0], strict=True):
        assert not len(expected) or (values[: len(expected)] - expected).abs().max() <= FLOAT64


@pytest.mark.parametrize("mode", ["shared", "unshared"])
def test_the_dense_reference_is_asked_for_what_it_builds(folder, rows, monkeypatch, mode):
    """Packed tokens, 48 here, when attention is split, and else the 79 of the rows as they were."""
    from zorro_verl import micro_batches

    options = {"attn_implementation": "eager", "use_split_attention": mode == "shared"}
    actor = make_actor(folder, actor_config=actor_config(ppo_epochs=1), **options)
    limit = {"shared": 48, "unshared": 79}[mode]
    monkeypatch.setattr(micro_batches, "MAX_REFERENCE_TOKENS", limit)
    actor.update_policy(data_proto(rows))
    monkeypatch.setattr(micro_batches, "MAX_REFERENCE_TOKENS", limit - 1)
    with pytest.raises(ValueError, match=f"got one of {limit}"):
        actor.update_policy(data_proto(rows))


def test_gradients_are_dropped_when_a_step_fails(folder, rows):
    actor = make_actor(folder, actor_config=actor_config(ppo_epochs=1, ppo_mini_batch_size=8))
    layer, calls = actor.model.model.layers[1], []
    stock = layer.forward

    def fails_in_the_second(*args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("out of memory")
        return stock(*args, **kwargs)

    layer.forward = fails_in_the_second
    before = parameters(actor)
    with pytest.raises(RuntimeError, match="out of memory"):
        actor.update_policy(data_proto(rows, micro_batch_size=1))
    assert_nothing_happened(actor, before)


@pytest.mark.parametrize("mode", ["inference", "frozen"])
def test_update_policy_needs_gradients(folder, rows, mode):
    actor = make_actor(folder, actor_config=actor_config())
    actor.model.requires_grad_(mode != "frozen")
    with torch.inference_mode(mode == "inference"), pytest.raises(ValueError, match="update_policy|actor.model"):
        actor.update_policy(data_proto(rows))
    assert actor.optimizer is None


def test_settings_stand_beside_the_tensors_too(folder, rows):
    """In a TensorDict as verl makes it of a DataProto, and in a mapping."""
    temperatures = torch.tensor([0.5, 2.0, 1.0, 0.7, 1.3, 0.9, 1.1, 0.6])
    for temperature in (0.5, temperatures):
        data = data_proto(rows, temperature, micro_batch_size=1, use_dynamic_bsz=False)
        mapping = dict(data.batch.items()) | data.meta_info
        results = []
        for batch in (data, data.to_tensordict(), mapping):
            actor = make_actor(folder, dtype="float64", actor_config=actor_config())
            scored = actor.compute_log_prob(batch)["log_probs"]
            packed = actor.stats["tokens_packed"]
            results.append((packed, scored, actor.update_policy(batch)))
        for packed, scored, metrics in results:
            assert packed == 65, "groups cut by a size of one row"
            assert torch.equal(scored, results[0][1])
            assert metrics == results[0][2]
        assert not torch.equal(results[0][1], actor.compute_log_prob(training_tensors(rows))["log_probs"])


def test_a_temperature_beside_the_tensors_of_a_dataproto(folder, rows):
    temperatures = torch.tensor([0.5, 2.0, 1.0, 0.7, 1.3, 0.9, 1.1, 0.6])
    actor, data = make_actor(folder), data_proto(rows)
    data.batch["temperature"] = temperatures
    with pytest.raises(ValueError, match="temperature: expected once"):
        actor.compute_log_prob(data)
    data.meta_info = {}
    expected = actor.compute_log_prob(data_proto(rows, temperatures))["log_probs"]
    assert torch.equal(actor.compute_log_prob(data)["log_probs"], expected)


@pytest.mark.parametrize("key", ["temperature", "max_token_len", "micro_batch_size", "use_dynamic_bsz"])
def test_bad_settings_beside_the_tensors_are_named(folder, rows, key):
    with pytest.raises(ValueError, match=f"{key}.*: expected"):
        make_actor(folder).compute_log_prob(training_tensors(rows) | {key: "x"})


def test_gradients_of_parameters_in_no_optimizer_do_not_scale_the_step(folder, rows):
    moved = []
    for stale in (False, True):
        actor = make_actor(folder, dtype="float64", actor_config=actor_config(ppo_epochs=1))
        head = actor.model.lm_head.weight
        before = head.detach().clone()
        actor.optimizer = torch.optim.SGD([head], lr=1.0)
        if stale:
            actor.update_policy(data_proto(rows))
            for p in actor.model.parameters():
                p.grad = torch.full_like(p, 9.0)
            head.data.copy_(before)
        norm = actor.update_policy(data_proto(rows))["actor/grad_norm"]
        assert all(p.grad is None for p in actor.model.parameters())
        moved.append((norm, head.detach() - before))
    assert moved[0][0] == pytest.approx(moved[1][0], abs=1e-12)
    assert largest(moved[0][1], moved[1][1]) <= 1e-12


@pytest.mark.parametrize("kind", ["another model's", "a frozen parameter's", "a class"])
def test_an_optimizer_that_moves_nothing_is_refused(folder, rows, kind):
    actor = make_actor(folder, actor_config=actor_config())
    frozen = actor.model.lm_head.weight.requires_grad_(False)
    actor.optimizer = {
        "another model's": torch.optim.SGD(tiny_model().parameters(), lr=1.0),
        "a frozen parameter's": torch.optim.SGD([frozen], lr=1.0),
        "a class": torch.optim.SGD,
    }[kind]
    with pytest.raises(ValueError, match="optimizer: expected one over parameters of actor.model.*got SGD"):
        actor.update_policy(data_proto(rows))


def test_a_scheduler_is_stepped_with_its_own_optimizer_only(folder, rows):
    actor = make_actor(folder, actor_config=actor_config({"lr_warmup_steps": 8}, ppo_epochs=1))
    actor.update_policy(data_proto(rows))
    scheduler = actor.lr_scheduler
    assert scheduler.last_epoch == 1
    actor.optimizer = torch.optim.SGD(actor.model.parameters(), lr=0.5)
    actor.update_policy(data_proto(rows))
    assert scheduler.last_epoch == 1
    actor.lr_scheduler = torch.optim.lr_scheduler.StepLR(actor.optimizer, 1, 0.5)
    assert [actor.update_policy(data_proto(rows))["actor/lr"] for _ in range(2)] == [0.25, 0.125]
    before = parameters(actor)
    actor.lr_scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(actor.optimizer)
    with pytest.raises(ValueError, match="lr_scheduler: expected one that steps without a metric"):
        actor.update_policy(data_proto(rows))
    assert_equal_parameters(before, parameters(actor), 0)


def test_a_schedule_goes_on_without_a_warning_when_the_first_step_is_skipped(folder, rows, recwarn):
    actor, data = make_actor(folder, actor_config=actor_config({"lr_warmup_steps": 4}, ppo_epochs=1)), data_proto(rows)
    data.batch["response_mask"].zero_()
    assert actor.update_policy(data)["actor/lr"] == 0.0025, "a step of the schedule per call, as in verl"
    assert not [str(w.message) for w in recwarn if "lr_scheduler" in str(w.message)]


def test_media_are_refused_for_a_text_model(folder, rows):
    import numpy as np
    from verl import DataProto

    images = np.array([{}] * 7 + [{"pixel_values": torch.ones(1)}], dtype=object)
    data = DataProto.from_single_dict(padded_batch(rows) | {"multi_modal_inputs": images})
    actor = make_actor(folder)
    for batch in (data, data.to_tensordict(), padded_batch(rows) | {"multi_modal_inputs": images.tolist()}):
        with pytest.raises(ValueError, match="multi_modal_inputs"):
            actor.compute_log_prob(batch)
    images[-1] = None
    actor.compute_log_prob(DataProto.from_single_dict(padded_batch(rows) | {"multi_modal_inputs": images}))
