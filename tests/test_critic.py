"""Critics that share prompts: against the plain value model on one unpadded row at a time, and verl's own critic."""

import json
from functools import partial
from types import SimpleNamespace

import pytest
import tiny_models
import torch
from fresh_process import run_python
from omegaconf import OmegaConf
from ranks import run_ranks
from test_engine import full_gradients, ragged_batch, responses
from test_engine_family import positions_of, rows_of, text_rows
from test_throughput import counts_of_call, run_config
from test_verl_config import prepared
from tiny import jagged, tiny_model, tokens, verl_batch, worst_gradient
from transformers import AutoModelForTokenClassification

from zorro_verl.throughput import wrap_throughput
from zorro_verl.trainer import wrap_legacy_trainer, wrap_ppo_trainer

TOLERANCE = 2e-5
NAMES = ("qwen3", "qwen3_moe", "qwen3_next", "qwen3_5")
# Whole heads for each of two ranks.
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "linear_num_value_heads": 4, "linear_num_key_heads": 2}
CLIP = 0.5


def build_critic(path, strategy, checkpointing=False, model=None, engine=None, zorro=None, dtype="fp32", seed=0):
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine import EngineRegistry

    stock = strategy != "zorro"
    model_config = HFModelConfig(
        path=path,
        load_tokenizer=False,
        enable_gradient_checkpointing=checkpointing,
        **{"use_remove_padding": False, "override_config": {"attn_implementation": "sdpa"} if stock else {}}
        | (model or {}),
    )
    model_config.model_type = "value_model"
    precision = {"param_dtype": dtype, "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    engine_config = FSDPEngineConfig(
        strategy="fsdp2", mixed_precision=precision, use_torch_compile=False, **engine or {}
    )
    object.__setattr__(engine_config, "strategy", strategy)
    if zorro is not None:
        object.__setattr__(engine_config, "zorro", zorro)
    built = EngineRegistry.new(
        "value_model",
        strategy,
        model_config=model_config,
        engine_config=engine_config,
        optimizer_config=FSDPOptimizerConfig(lr=1e-2, total_training_steps=10),
        checkpoint_config=CheckpointConfig(save_contents=["hf_model"]),
    )
    torch.manual_seed(seed)
    built.initialize()
    return built


def critic_batch(rows, seed=0, **settings):
    """verl's batch with what a critic's update reads; old values lie on both sides of the clip's range."""
    g = torch.Generator().manual_seed(seed + 100)
    data = verl_batch([row[:2] for row in rows], seed, use_remove_padding=False, **settings)
    for key, scale in (("values", 1.0), ("returns", 2.0)):
        data[key] = jagged([scale * torch.randn(len(row[1]), generator=g) for row in rows])
    return data


def value_loss_function(**options):
    from verl.workers.config import FSDPCriticConfig
    from verl.workers.utils.losses import value_loss

    return partial(
        value_loss,
        config=FSDPCriticConfig(strategy="fsdp2", ppo_micro_batch_size_per_gpu=1, cliprange_value=CLIP, **options),
    )


def plain_values(model, rows):
    """``(L,)`` values of each row by the unpatched model."""
    values = []
    for prompt, response, *_ in rows:
        ids = torch.cat([prompt, response])[None]
        values.append(model(ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0, :, 0])
    return values


def oracle(path, batches):
    """Values of each batch's responses, and the gradients of verl's loss over the rows of all batches."""
    from verl.utils import tensordict_utils as tu

    model = AutoModelForTokenClassification.from_pretrained(path, dtype=torch.float32)
    assert model.num_labels == 1
    num_tokens = sum(int(data["loss_mask"].values().sum()) for _, data in batches)
    num_rows = sum(len(rows) for rows, _ in batches)
    expected = []
    for rows, data in batches:
        values, data = plain_values(model, rows), data.copy()
        tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=num_tokens, global_batch_size=num_rows)
        loss, metrics = value_loss_function()(model_output={"values": jagged(values)}, data=data)
        assert 0.2 < metrics["critic/vf_clipfrac"] < 0.8, "a branch of the clip would go untested"
        loss.backward()
        expected.append([v.detach()[len(row[0]) - 1 : -1] for v, row in zip(values, rows, strict=True)])
    # A vision tower runs on an image of zeros where no row has one, and its gradients are zeros.
    grads = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
    return expected, grads


def check_values(expected, output, rows, data):
    values = output["model_output"]["values"]
    assert values.dtype == torch.float32
    for row, (a, b) in enumerate(zip(expected, responses(values, data), strict=True)):
        assert not len(a) or (a - b).abs().max() <= TOLERANCE, row
    for (prompt, *_), whole in zip(rows, values.unbind(), strict=True):
        assert not whole[: len(prompt) - 1].any(), "verl has values of prompt tokens there, and reads none of them"
        assert whole[-1] == 0


def critics(rank, paths, size, checkpointing):
    """Every model in one process; the plain ones first, since verl changes classes when it loads a model of theirs."""
    from zorro_verl.options import ZorroOptions

    replicas = torch.distributed.get_world_size() // size
    replica = rank // size
    batches = [(text_rows(r), critic_batch(text_rows(r), seed=r)) for r in range(replicas)]
    truths = {name: oracle(path, batches) for name, path in paths.items()}
    rows, data = batches[replica]
    for name, path in paths.items():
        expected, grads = truths[name]
        for options in (ZorroOptions(), ZorroOptions(attn_implementation="eager", linear_attention="expand")):
            engine = build_critic(
                path, "zorro", checkpointing, zorro=options, engine={"ulysses_sequence_parallel_size": size}
            )
            assert engine.module.is_gradient_checkpointing == checkpointing
            scored = []
            hook = engine.module.score.register_forward_hook(lambda head, args, out, n=scored: n.append(len(out)))
            with engine.eval_mode():
                output = engine.infer_batch(critic_batch(rows, seed=replica))
            hook.remove()
            assert scored == [-(-sum(len(row[1]) for row in rows) // size)], "each rank scores its share of responses"
            check_values(expected[replica], output, rows, data)
            assert output["metrics"]["zorro/tokens_packed"][0] < output["metrics"]["zorro/tokens_total"][0]
            with engine.train_mode():
                engine.optimizer_zero_grad()
                settings = {"max_token_len_per_gpu": 140 // size, "global_batch_size": len(rows) * replicas}
                cut = critic_batch(rows, seed=replica, **settings)
                metrics = engine.forward_backward_batch(cut, value_loss_function())["metrics"]
                got = full_gradients(engine)
            assert len(metrics["zorro/pieces"][0]) > 3, "the budget cut none of three groups"
            assert worst_gradient(grads, got) <= TOLERANCE, (name, options)
            assert grads["score.weight"].abs().max() > 0
            assert grads["score.bias"].abs().max() > 0
            if name not in ("qwen3", "qwen3_next") or torch.distributed.get_world_size() > 1:
                break


def save_value_model(model, path, **config):
    """The checkpoint of a value model, by way of its language model's: the head's weights matter."""
    model.save_pretrained(path)
    value_model = AutoModelForTokenClassification.from_pretrained(path, num_labels=1, dtype=torch.float32)
    with torch.no_grad():
        value_model.score.weight.normal_(0, 0.3, generator=torch.Generator().manual_seed(7))
        value_model.score.bias.fill_(0.25)
    value_model.save_pretrained(path)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    paths = {name: str(tmp_path_factory.mktemp(name)) for name in NAMES}
    for name, path in paths.items():
        save_value_model(tiny_models.build(name, torch.float32, **HEADS), path)
    return paths


@pytest.fixture(scope="module")
def language_model(tmp_path_factory):
    path = tmp_path_factory.mktemp("language_model")
    tiny_model(dtype=torch.float32, tie_word_embeddings=True).save_pretrained(path)
    return str(path)


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "size", "checkpointing"), [(1, 1, False), (2, 1, True), (2, 2, False)])
def test_critics_equal_the_plain_value_model(checkpoints, world_size, size, checkpointing):
    run_ranks(critics, world_size, checkpoints, size, checkpointing, timeout=300)


def images_on_one_rank(rank, path):
    """The vision tower runs on both ranks, as FSDP needs it to, and values are those of the plain model with images."""
    from verl.utils import tensordict_utils as tu

    rows = rows_of("qwen3_5", rank)
    positions = positions_of("qwen3_5", rows)
    plain = AutoModelForTokenClassification.from_pretrained(path, dtype=torch.float32)
    expected = []
    for (prompt, response, media), places in zip(rows, positions, strict=True):
        ids = torch.cat([prompt, response])[None]
        mask = torch.ones_like(ids)
        with torch.no_grad():
            values = plain(ids, attention_mask=mask, position_ids=places.unsqueeze(-2), use_cache=False, **media or {})
        expected.append(values.logits[0, len(prompt) - 1 : -1, 0])
    data = critic_batch(rows, seed=rank)
    data["position_ids"] = jagged(positions)
    if any(media for *_, media in rows):
        tu.assign_non_tensor_stack(data, "multi_modal_inputs", [media for *_, media in rows])
    engine = build_critic(path, "zorro")
    with engine.eval_mode():
        check_values(expected, engine.infer_batch(data.copy()), rows, data)
    with engine.train_mode():
        engine.train_batch(data, value_loss_function())


@pytest.mark.slow
def test_one_ranks_images_do_not_stop_the_other(checkpoints):
    run_ranks(images_on_one_rank, 2, checkpoints["qwen3_5"], timeout=120)


def like_stock(rank, path, language_model):
    """verl's own critic, with the CPU runtime's loader: the same values, loss, gradients, grad norm; the same head."""
    rows = ragged_batch()[rank * 8 : rank * 8 + 8]
    data = partial(critic_batch, rows, seed=rank, global_batch_size=16)
    found = []
    for strategy in ("fsdp2", "zorro"):
        engine = build_critic(path, strategy)
        with engine.eval_mode():
            values = responses(engine.infer_batch(data())["model_output"]["values"], data())
        with engine.train_mode():
            engine.optimizer_zero_grad()
            loss = sum(engine.forward_backward_batch(data(), value_loss_function())["loss"])
            grads = full_gradients(engine)
            norms = [engine.train_batch(data(), value_loss_function())["metrics"]["grad_norm"] for _ in range(3)]
        fresh = build_critic(language_model, strategy, seed=rank + 5)
        head = {name: p.full_tensor() for name, p in fresh.module.named_parameters() if "score" in name}
        found.append((values, loss, grads, norms, head, fresh.module.config.architectures))
    (values, loss, grads, norms, head, _), (values_b, loss_b, grads_b, norms_b, head_b, architectures) = found
    for a, b in zip(values, values_b, strict=True):
        assert (a - b).abs().max() <= TOLERANCE
    assert loss == pytest.approx(loss_b, abs=TOLERANCE)
    assert worst_gradient(grads, grads_b) <= TOLERANCE
    assert norms == pytest.approx(norms_b, rel=1e-4)
    assert norms[0] != pytest.approx(norms[-1], rel=1e-2), "no step was made: the comparison is blind"
    assert head.keys() == {"score.weight", "score.bias"}
    for name in head:
        assert torch.equal(head[name], head_b[name]), "a fresh head is drawn as verl's is, by rank 0"
    assert architectures == ["Qwen3ForTokenClassification"]


@pytest.mark.slow
def test_a_critic_equals_verls_own(checkpoints, language_model):
    run_ranks(like_stock, 2, checkpoints["qwen3"], language_model)


def half_precision(rank, path):
    """Values in the dtype in which verl's critic stores them, no further from the truth than its."""
    rows = ragged_batch()
    model = AutoModelForTokenClassification.from_pretrained(path, dtype=torch.float64)
    truth = torch.cat(
        [v.detach()[len(row[0]) - 1 : -1] for v, row in zip(plain_values(model, rows), rows, strict=True)]
    )
    errors = []
    for strategy in ("fsdp2", "zorro"):
        engine, data = build_critic(path, strategy, dtype="bf16"), critic_batch(rows)
        with engine.eval_mode():
            values = engine.infer_batch(data)["model_output"]["values"]
        assert values.dtype == torch.bfloat16
        errors.append((torch.cat(responses(values, data)) - truth).square().mean().sqrt().item())
    assert 0 < errors[1] <= 1.5 * errors[0]


@pytest.mark.slow
def test_values_have_the_dtype_of_verls(checkpoints):
    run_ranks(half_precision, 1, checkpoints["qwen3"])


def odd_batches(rank, path):
    """Rows that share nothing, loss modes, masks with holes, no temperature needed; and errors in the critic's keys."""
    g = torch.Generator().manual_seed(1)
    prompt = tokens(7, g)
    rows = [(prompt, tokens(n, g)) for n in (5, 1, 3)] + [(tokens(3, g), tokens(4, g))]
    stock, zorro = build_critic(path, "fsdp2"), build_critic(path, "zorro")

    def compare(name, change=lambda data: None, these=rows, loss=None, **settings):
        grads, losses = [], []
        with stock.train_mode(), zorro.train_mode():
            for engine in (stock, zorro):
                data = critic_batch(these, **settings)
                change(data)
                engine.optimizer_zero_grad()
                losses.append(sum(engine.forward_backward_batch(data, value_loss_function(**loss or {}))["loss"]))
                grads.append(full_gradients(engine))
        assert losses[0] == pytest.approx(losses[1], abs=TOLERANCE), name
        assert worst_gradient(*grads) <= TOLERANCE, name

    def tool_tokens(data):
        mask = jagged([torch.tensor([1, 0, 0, 1, 1]), torch.tensor([1]), torch.tensor([0, 1, 1]), torch.ones(4).long()])
        data["response_mask"] = data["loss_mask"] = mask

    compare("tool tokens out of the loss", tool_tokens)
    compare("one prompt token, one response token", these=[(prompt[:1], tokens(1, g)) for _ in range(3)])
    compare("every row alone", these=[(tokens(n, g), tokens(3, g)) for n in (4, 2, 9)])
    for mode in ("seq-mean-token-sum", "seq-mean-token-mean"):
        compare(f"{mode}, groups cut", loss={"loss_agg_mode": mode}, max_token_len_per_gpu=14)
    for settings, message in (
        ({"max_token_len_per_gpu": 11}, r"critic\.ppo_infer_max_token_len_per_gpu.*12 tokens"),
        ({"max_token_len_per_gpu": None}, r"token budget.*critic\.ppo_infer_max_token_len_per_gpu"),
        (
            {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": None},
            r"set \+critic\.fsdp\.micro_batch_size_per_gpu",
        ),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            zorro.infer_batch(critic_batch(rows, **settings))
        assert "actor" not in str(caught.value)


@pytest.mark.slow
def test_odd_batches_equal_verls_own(checkpoints):
    run_ranks(odd_batches, 1, checkpoints["qwen3"])


def saved(rank, paths):
    for path, folder in paths:
        build_critic(path, "zorro").save_checkpoint(folder)


@pytest.mark.slow
def test_a_checkpoint_is_a_value_model(checkpoints, language_model, tmp_path):
    """Also where the run began with a language model, whose class has no place for the head."""
    paths = {"value": checkpoints["qwen3"], "language": language_model}
    run_ranks(saved, 1, [(path, str(tmp_path / name)) for name, path in paths.items()])
    for name, path in paths.items():
        folder = tmp_path / name / "huggingface"
        model, found = AutoModelForTokenClassification.from_pretrained(folder, output_loading_info=True)
        assert type(model).__name__ == "Qwen3ForTokenClassification"
        assert model.num_labels == 1
        architectures = json.loads((folder / "config.json").read_text())["architectures"]
        assert architectures == ["Qwen3ForTokenClassification"], "what verl's merger goes by"
        assert not found["missing_keys"]
        if name == "value":
            before = AutoModelForTokenClassification.from_pretrained(path)
            torch.testing.assert_close(model.score.weight.float(), before.score.weight.float(), rtol=1e-2, atol=1e-3)


def refused_at_start(rank, path, odd):
    from zorro_verl.options import ZorroOptions

    for where, settings, message in (
        (path, {"model": {"use_liger": True}}, r"critic\.model\.use_liger"),
        (path, {"model": {"lora_rank": 4}}, r"critic\.model\.lora_rank: expected 0, got 4"),
        (path, {"model": {"override_config": {"attention_dropout": 0.1}}}, r"\+critic\.model\.override_config"),
        (path, {"engine": {"ulysses_sequence_parallel_size": 3}}, r"^critic\.fsdp\.ulysses_sequence_par"),
        (path, {"engine": {"qat": SimpleNamespace(enable=True)}}, r"critic\.fsdp\.qat\.enable"),
        (path, {"zorro": ZorroOptions(base_strategy="fsdp")}, "base_strategy.*fsdp2"),
        (odd["olmo2"], {}, r"critic\.model\.path: .*got 'olmo2'.*critic\.strategy=fsdp2.*Supported: qwen3"),
        (odd["gpt_neox"], {}, r"model_type: .*got 'gpt_neox'.*critic\.strategy=fsdp2"),
        (odd["labels"], {}, r"critic\.model\.path: expected a score head of one label.*got one of 3"),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            build_critic(where, "zorro", **settings)
        assert "actor_rollout_ref.model" not in str(caught.value)


@pytest.fixture(scope="module")
def odd_checkpoints(tmp_path_factory):
    """Models that can't be critics."""
    paths = {name: str(tmp_path_factory.mktemp(name)) for name in ("olmo2", "gpt_neox", "labels")}
    for name in ("olmo2", "gpt_neox"):
        tiny_model(name, dtype=torch.float32).save_pretrained(paths[name])
    tiny_model(dtype=torch.float32).save_pretrained(paths["labels"])
    three = AutoModelForTokenClassification.from_pretrained(paths["labels"], num_labels=3)
    three.save_pretrained(paths["labels"])
    return paths


@pytest.mark.slow
def test_what_cannot_be_a_critic_is_refused_at_start(language_model, odd_checkpoints):
    run_ranks(refused_at_start, 1, language_model, odd_checkpoints)


GAE = ("algorithm.adv_estimator=gae", "critic.strategy=zorro")


@pytest.mark.parametrize("actor", ["zorro", "fsdp2"])
def test_bad_critics_stop_on_the_driver(language_model, odd_checkpoints, actor):
    settings = (f"actor_rollout_ref.actor.strategy={actor}", *GAE)
    config = prepared(language_model, *settings, f"critic.model.path={language_model}")
    assert config.critic._target_ == "verl.workers.config.FSDPCriticConfig"
    for path, override, message in (
        (language_model, "critic.model.lora_rank=4", r"critic\.model\.lora_rank"),
        (language_model, "critic.model.use_liger=True", r"critic\.model\.use_liger"),
        (language_model, "critic.fsdp.qat.enable=True", r"critic\.fsdp\.qat\.enable"),
        (language_model, "+critic.zorro.use_split_attention=False", r"critic\.zorro.*actor_rollout_ref\.actor\.zorro"),
        (language_model, "+critic.model.override_config.attention_dropout=0.1", r"\+critic\.model\.override_config"),
        (odd_checkpoints["olmo2"], "trainer.device=cuda", r"critic\.model\.path.*olmo2"),
        (odd_checkpoints["labels"], "trainer.device=cuda", r"critic\.model\.path.*one label"),
    ):
        with pytest.raises(ValueError, match=message):
            prepared(language_model, *settings, f"critic.model.path={path}", override)
    # A run without a critic does not ask what its config says of one.
    unused = ("algorithm.adv_estimator=grpo", "critic.strategy=zorro", f"critic.model.path={odd_checkpoints['olmo2']}")
    prepared(language_model, settings[0], *unused)


def test_the_critic_gets_the_actors_options(language_model):
    from verl.utils.config import omega_conf_to_dataclass

    def engine_of(*overrides):
        paths = (f"critic.model.path={language_model}", "critic.ppo_micro_batch_size_per_gpu=1")
        config = prepared(language_model, *GAE[:1], *paths, *overrides)
        critic = {key: value for key, value in config.critic.items() if key not in ("model", "profiler")}
        return omega_conf_to_dataclass(type(config)(critic)).engine

    option = "+actor_rollout_ref.actor.zorro.use_split_attention=False"
    for actor in ("zorro", "fsdp2"):
        engine = engine_of("critic.strategy=zorro", f"actor_rollout_ref.actor.strategy={actor}", option)
        assert engine.strategy == "zorro"
        assert not engine.zorro.use_split_attention
    assert not hasattr(engine_of("critic.strategy=fsdp2", "actor_rollout_ref.actor.strategy=zorro", option), "zorro")
    assert not hasattr(engine_of("critic.strategy=zorro", "actor_rollout_ref.actor.strategy=fsdp2"), "zorro")


class Future:
    """What a worker group gives for a method that it does not wait for."""

    def __init__(self, results):
        self.futures = results

    def get(self):
        return {"metrics": dict(self.futures[0]["metrics"])}


def critic_groups():
    trained = {"metrics": counts_of_call(2) | {"mfu": [0.3, 0.5], "loss": [1.0]}}
    keys = SimpleNamespace(extra_info={"metrics": counts_of_call(2) | {"mfu": 0.2}})
    return SimpleNamespace(
        train_mini_batch=lambda batch: Future([trained]),
        infer_batch=lambda batch: Future([keys if batch == "keys" else {"metrics": counts_of_call(2)}]),
    )


def trainer_class(actor, critic, use_critic, legacy):
    """As much of verl's trainers as the wraps touch."""

    class Trainer:
        config = OmegaConf.merge(run_config(actor), {"critic": {"strategy": critic}})
        critic_wg = critic_groups()

        def _nothing(self, *args, **kwargs):
            raise AssertionError

        _balance_batch = _update_actor = _compute_old_log_prob = _compute_ref_log_prob = _compute_metrics = _nothing

        def _update_critic(self, batch, metrics=None):
            output = self.critic_wg.train_mini_batch(batch).get()["metrics"]
            if not legacy:
                metrics |= {f"critic/{name}": value for name, value in output.items()}
                return batch
            return SimpleNamespace(meta_info={"metrics": {f"critic/{name}": value for name, value in output.items()}})

        def _compute_values(self, batch, metrics=None):
            future = self.critic_wg.infer_batch(batch)
            return "values" if legacy and future.get() else (batch, future.futures)

    Trainer.use_critic = use_critic
    return Trainer


COMBINATIONS = [("zorro", "zorro"), ("fsdp2", "zorro")]
CRITIC_STEP = {"critic/mfu", "critic/loss", "zorro/critic/token_ratio", "zorro/critic/mfu_executed"}
CRITIC_STEP |= {"zorro/token_ratio_best"}


@pytest.fixture
def arrived(monkeypatch):
    """Results are there already."""
    import ray

    monkeypatch.setattr(ray, "get", lambda results: results)


@pytest.mark.parametrize(("actor", "critic"), COMBINATIONS)
def test_a_step_of_v1_says_what_the_critic_shared(arrived, actor, critic):
    module = SimpleNamespace(PPOTrainer=trainer_class(actor, critic, use_critic=True, legacy=False))
    wrap_ppo_trainer(module)
    trainer, metrics = module.PPOTrainer(), {}
    assert trainer._compute_values("keys", metrics=metrics)[0] == "keys"
    assert metrics == {"zorro/values/token_ratio": 2, "zorro/values/mfu_executed": pytest.approx(0.2 / 4)}
    metrics.clear()
    assert trainer._update_critic("keys", metrics=metrics) == "keys"
    assert metrics.keys() == CRITIC_STEP, "raw counts would be averaged by verl, and logged"
    assert metrics["zorro/critic/token_ratio"] == 2
    assert metrics["zorro/critic/mfu_executed"] == pytest.approx(0.4 / 4)


@pytest.mark.parametrize(("actor", "critic"), COMBINATIONS)
def test_a_step_of_the_legacy_trainer_says_what_the_critic_shared(arrived, actor, critic):
    module = SimpleNamespace(
        RayPPOTrainer=trainer_class(actor, critic, use_critic=True, legacy=True),
        compute_throughout_metrics=lambda batch, timing_raw, n_gpus: {"perf/throughput": 1000.0},
    )
    wrap_legacy_trainer(module)
    wrap_throughput(module)
    trainer, batch = module.RayPPOTrainer(), SimpleNamespace(meta_info={})
    assert trainer._compute_values(batch) == "values"
    metrics = trainer._update_critic(batch).meta_info["metrics"]
    metrics |= module.compute_throughout_metrics(batch, {}, 1)
    assert metrics.keys() == CRITIC_STEP | {"perf/throughput", "zorro/values/token_ratio"}
    assert metrics["zorro/critic/token_ratio"] == metrics["zorro/values/token_ratio"] == 2


@pytest.mark.parametrize(("critic", "use_critic"), [("fsdp2", True), ("zorro", False)])
def test_without_a_critic_that_shares_nothing_is_wrapped(critic, use_critic):
    module = SimpleNamespace(PPOTrainer=trainer_class("fsdp2", critic, use_critic, legacy=False))
    wrap_ppo_trainer(module)
    trainer = module.PPOTrainer()
    metrics = {}
    trainer._update_critic("keys", metrics)
    assert "zorro/critic/token_ratio" not in metrics


def test_the_critic_is_registered_or_says_why_not():
    output = run_python(
        """
        import sys
        from omegaconf import OmegaConf
        import verl
        from verl.workers.engine import EngineRegistry
        import zorro_verl.critic, zorro_verl.plugin as plugin

        registered = EngineRegistry._engines["value_model"]["zorro"]
        assert registered == dict.fromkeys(("cuda", "npu", "cpu"), zorro_verl.critic.DeduplicatedCritic), registered

        # A critic that can't be imported leaves the actor as it is.
        del EngineRegistry._engines["value_model"]["zorro"]
        sys.modules["zorro_verl.critic"] = None
        plugin.after_import("verl.workers.engine", plugin.register_critic)
        try:
            EngineRegistry.new("value_model", "zorro")
        except ValueError as error:
            assert "zorro_verl.critic" in str(error), error
            print("REFUSED")
        assert EngineRegistry.get_engine_cls("language_model", "zorro").__name__ == "DeduplicatedActor"

        # A trainer that can't be wrapped refuses a critic's strategy, too.
        class Trainer:
            def __init__(self, config):
                self.built = True

        plugin.refuse_trainer(Trainer, "zorro", "the reason")
        actor = {"actor": {"strategy": "fsdp2"}}
        assert Trainer(OmegaConf.create({"actor_rollout_ref": actor, "critic": {"strategy": "fsdp"}})).built
        try:
            Trainer(OmegaConf.create({"actor_rollout_ref": actor, "critic": {"strategy": "zorro"}}))
        except ValueError as error:
            assert "the reason" in str(error)
            print("REFUSED TRAINER")
        """
    )
    assert "REFUSED\n" in output
    assert "REFUSED TRAINER" in output


def test_the_critic_imported_before_verl_registers_itself():
    output = run_python(
        """
        from zorro_verl.critic import DeduplicatedCritic
        from verl.workers.engine import EngineRegistry
        assert set(EngineRegistry._engines["value_model"]["zorro"].values()) == {DeduplicatedCritic}
        """
    )
    assert "could not" not in output, output
