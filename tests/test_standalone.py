"""The stand-alone actor: one process, a plain model, the seed's calls."""

import copy

import numpy as np
import pytest
import tiny_models
import torch
from tensordict import TensorDict
from tiny import batch_b0, gradients, padded_batch, per_row, shuffled, tiny_model, worst_gradient

from zorro_verl import Qwen3ModelOncePatcher
from zorro_verl.actor import DeduplicatedActor
from zorro_verl.standalone import ENGINE_METHODS

FLOAT64 = 5e-6
FLOAT32 = 2e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tiny_model(dtype=torch.float32).save_pretrained(path)
    return str(path)


@pytest.fixture
def rows():
    return shuffled(batch_b0(), 1)


def make_actor(folder, **options):
    return DeduplicatedActor(model_name_or_path=folder, device="cpu", **options)


def training_batch(rows, seed=0, **widths):
    batch = padded_batch(rows, **widths)
    g = torch.Generator().manual_seed(seed)
    shape = batch["responses"].shape
    batch["old_log_probs"] = -4 + 0.3 * torch.randn(shape, generator=g)
    batch["advantages"] = torch.randn(shape, generator=g)
    return batch


@pytest.mark.parametrize("dtype", ["float64", torch.float32])
@pytest.mark.parametrize("mode", ["none", "compute", "memory"])
def test_forward_equals_rows(folder, rows, dtype, mode):
    actor = make_actor(folder, dtype=dtype, logits_optimization=mode, attn_implementation="eager")
    output = actor.forward(padded_batch(rows), temperature=0.7, calculate_entropy=True)
    plain = tiny_model(dtype=actor.model.dtype)
    log_probs, entropies = per_row(plain, rows, 0.7)
    lens = [len(r) for _, r in rows]
    tolerance = FLOAT64 if dtype == "float64" else FLOAT32
    assert output.logprobs.dtype == output.entropy.dtype == plain.dtype
    for row, (a, b, c, d) in enumerate(
        zip(output.logprobs.split(lens), log_probs, output.entropy.split(lens), entropies, strict=True)
    ):
        assert len(a) == lens[row]
        torch.testing.assert_close(a, b, atol=tolerance, rtol=0, msg=lambda m, row=row: f"row {row}: {m}")
        torch.testing.assert_close(c, d, atol=tolerance, rtol=0, msg=lambda m, row=row: f"row {row}: {m}")
    assert actor.forward(padded_batch(rows)).entropy is None


def test_stats_count_the_last_call(folder, rows):
    actor = make_actor(folder)
    actor.forward(padded_batch(rows))
    assert actor.stats == {
        "tokens_total": 79,
        "tokens_packed": 48,
        "token_ratio": 79 / 48,
        "groups": 3,
        "groups_split": 0,
        "fallback": {"group_cut": 0, "multimodal": 0},
    }
    actor.forward(padded_batch(rows[:1]))
    assert actor.stats["groups"] == 1


def test_padding_carries_no_meaning(folder, rows):
    actor = make_actor(folder)
    expected = actor.forward(padded_batch(rows)).logprobs
    for widths in ({"prompt_width": 20}, {"response_width": 15}, {"pad": 7}):
        assert torch.equal(actor.forward(padded_batch(rows, **widths)).logprobs, expected), widths


def test_temperature_per_row(folder, rows):
    actor = make_actor(folder, dtype="float64")
    temperatures = torch.tensor([0.5, 2.0, 1.0, 0.7, 1.3, 0.9, 1.1, 0.6], dtype=torch.float64)
    got = actor.forward(padded_batch(rows), temperature=temperatures).logprobs
    expected = torch.cat(per_row(tiny_model(), rows, temperatures.tolist())[0])
    torch.testing.assert_close(got, expected, atol=FLOAT64, rtol=0)


def expected_loss(plain, rows, batch, response_mask, config):
    """verl's own vanilla loss on log-probs of the unpatched model, one row at a time."""
    from verl.trainer.ppo.core_algos import compute_policy_loss_vanilla

    width = batch["responses"].shape[1]
    log_probs = [torch.nn.functional.pad(x, (0, width - len(x))) for x in per_row(plain, rows)[0]]
    config = copy.copy(config)
    object.__setattr__(
        config,
        "global_batch_info",
        {"dp_size": 1, "batch_num_tokens": int(response_mask.sum()), "global_batch_size": len(rows)}
        | config.global_batch_info,
    )
    loss, metrics = compute_policy_loss_vanilla(
        old_log_prob=batch["old_log_probs"],
        log_prob=torch.stack(log_probs),
        advantages=batch["advantages"],
        response_mask=response_mask,
        loss_agg_mode=config.loss_agg_mode,
        config=config,
    )
    return loss


@pytest.mark.parametrize(
    ("masked", "options"),
    [
        (False, {}),
        (True, {}),
        (False, {"logits_optimization": "compute"}),
        (False, {"logits_optimization": "memory"}),
        (False, {"use_split_attention": False}),
        (False, {"attn_implementation": "eager"}),
    ],
)
def test_policy_loss_and_gradients(folder, rows, masked, options):
    actor = make_actor(folder, dtype="float64", **options)
    actor.model.train()
    batch = training_batch(rows)
    mask = batch["attention_mask"][:, -batch["responses"].shape[1] :].clone()
    if masked:
        mask[:, 1] = 0  # a token written by a tool: context, not loss
        batch["response_mask"] = mask
    plain = tiny_model()
    loss = expected_loss(plain, rows, batch, mask, actor.actor_config)
    (loss / 4).backward()
    metrics = actor.compute_policy_loss_and_backward(batch, gradient_accumulation=4)
    assert type(metrics["actor/policy_loss"]) is float
    assert metrics["actor/policy_loss"] == pytest.approx(float(loss), abs=FLOAT64)
    assert worst_gradient(gradients(plain), gradients(actor.model)) <= FLOAT64
    once = gradients(actor.model)
    actor.compute_policy_loss_and_backward(batch, gradient_accumulation=4)
    assert worst_gradient({k: 2 * g for k, g in once.items()}, gradients(actor.model)) <= FLOAT64


def test_options_of_verls_loss_pass_through(folder, rows):
    from verl.workers.config import FSDPActorConfig

    config = FSDPActorConfig(
        strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=1, use_kl_loss=True, kl_loss_coef=0.5
    )
    before = copy.deepcopy(vars(config))
    actor = make_actor(folder, actor_config=config)
    batch = training_batch(rows)
    with pytest.raises(ValueError, match="ref_log_prob"):
        actor.compute_policy_loss_and_backward(batch)
    batch["ref_log_prob"] = batch["old_log_probs"] - 0.5
    metrics = actor.compute_policy_loss_and_backward(batch)
    assert metrics["kl_loss"] > 0
    assert metrics["actor/policy_loss"] == pytest.approx(metrics["actor/pg_loss"] + 0.5 * metrics["kl_loss"], abs=1e-6)
    assert vars(config) == before


@pytest.mark.parametrize("mode", ["none", "compute", "memory"])
def test_entropy_gradient(folder, rows, mode):
    from verl.workers.config import FSDPActorConfig

    config = FSDPActorConfig(strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=1, entropy_coeff=0.4)
    actor = make_actor(folder, dtype="float64", logits_optimization=mode, actor_config=config)
    batch, plain = training_batch(rows), tiny_model()
    batch["advantages"].zero_()  # what is left of the loss is the entropy
    metrics = actor.compute_policy_loss_and_backward(batch, temperature=0.7)
    entropy = torch.cat(per_row(plain, rows, 0.7)[1]).mean()
    (-0.4 * entropy).backward()
    assert metrics["actor/entropy_loss"] == pytest.approx(float(entropy.detach()), abs=FLOAT64)
    assert metrics["actor/policy_loss"] == pytest.approx(-0.4 * float(entropy.detach()), abs=FLOAT64)
    assert worst_gradient(gradients(plain), gradients(actor.model)) <= FLOAT64


@pytest.mark.parametrize("scale", [None, 5])
def test_a_sequence_loss_is_divided_by_the_width_unless_told_otherwise(folder, rows, scale):
    """As in verl, whose scale is the width of the padded responses when none is set."""
    from verl.workers.config import FSDPActorConfig

    config = FSDPActorConfig(
        strategy="fsdp2",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        loss_agg_mode="seq-mean-token-sum-norm",
        loss_scale_factor=scale,
    )
    actor = make_actor(folder, dtype="float64", actor_config=config)
    batch = training_batch(rows, response_width=11)
    mask = batch["attention_mask"][:, -11:]
    config = copy.deepcopy(config)
    config.global_batch_info["loss_scale_factor"] = scale
    loss = expected_loss(tiny_model(), rows, batch, mask, config)
    assert actor.compute_policy_loss_and_backward(batch)["actor/policy_loss"] == pytest.approx(
        float(loss.detach()), abs=FLOAT64
    )


def test_no_token_in_the_loss(folder, rows):
    actor = make_actor(folder)
    batch = training_batch(rows)
    batch["response_mask"] = torch.zeros_like(batch["responses"])
    assert actor.compute_policy_loss_and_backward(batch)["actor/policy_loss"] == 0
    grads = gradients(actor.model)
    assert grads.keys() == dict(actor.model.named_parameters()).keys()
    assert all(not g.any() for g in grads.values())


def test_a_batch_of_empty_responses(folder, rows):
    actor = make_actor(folder)
    empty = [(p, r[:0]) for p, r in rows]
    assert actor.forward(padded_batch(empty), calculate_entropy=True).logprobs.shape == (0,)
    assert actor.compute_policy_loss_and_backward(training_batch(empty))["actor/policy_loss"] == 0


def test_tensordict_and_dataproto_are_batches(folder, rows):
    from verl import DataProto

    actor = make_actor(folder)
    batch = padded_batch(rows)
    expected = actor.forward(batch).logprobs
    assert torch.equal(actor.forward(TensorDict(batch, batch_size=len(rows))).logprobs, expected)
    assert torch.equal(actor.forward(DataProto.from_single_dict(batch)).logprobs, expected)


@pytest.mark.parametrize("temperature", [0.0, torch.tensor([0.0, 1.0] * 4)], ids=["all", "some"])
def test_temperature_zero_is_verls_floor(folder, rows, temperature):
    """verl's engine divides by 1e-8 then: huge log-probs, but no NaN in values or gradients."""
    actor = make_actor(folder, dtype="float64")
    output = actor.forward(padded_batch(rows), temperature=temperature, calculate_entropy=True)
    floor = torch.as_tensor(temperature).clamp(min=1e-8).expand(len(rows)).tolist()
    expected = torch.cat(per_row(tiny_model(), rows, floor)[0])
    torch.testing.assert_close(output.logprobs, expected, atol=0, rtol=FLOAT64)
    assert output.entropy.isfinite().all()
    (output.logprobs.sum() + output.entropy.sum()).backward()
    assert all(g.isfinite().all() for g in gradients(actor.model).values())


def test_positions_that_jump(folder, rows):
    """The truth is the model on one unpadded row with its position ids; equal tokens elsewhere share nothing."""
    actor, plain = make_actor(folder, dtype="float64"), tiny_model()
    batch, g = padded_batch(rows), torch.Generator().manual_seed(4)
    jumps = torch.randint(1, 4, (len(rows), batch["input_ids"].shape[1]), generator=g)
    jumps[1:] = jumps[0]
    batch["position_ids"] = jumps.cumsum(1)
    batch["position_ids"][::2] += 7
    got = actor.forward(batch).logprobs.split([len(r) for _, r in rows])
    mask = batch["attention_mask"].bool()
    for row, (prompt, response) in enumerate(rows):
        positions = batch["position_ids"][row][mask[row]][None]
        # Without a mask transformers would take every jump for the start of another sequence.
        ones = torch.ones_like(positions)
        ids = torch.cat([prompt, response])[None]
        logits = plain(ids, attention_mask=ones, position_ids=positions, use_cache=False).logits[0]
        log_p = logits[len(prompt) - 1 : -1].log_softmax(-1) if len(response) else logits[:0]
        expected = log_p.gather(-1, response[:, None])[:, 0]
        torch.testing.assert_close(got[row], expected, atol=FLOAT64, rtol=0, msg=lambda m, row=row: f"row {row}: {m}")
    assert 3 < actor.stats["groups"] <= 6


def test_responses_have_to_be_the_end_of_the_rows(folder, rows):
    actor, batch = make_actor(folder), padded_batch(rows, response_width=12)
    expected = actor.forward(batch).logprobs
    valid = batch["attention_mask"][:, -12:].bool()
    batch["responses"] = torch.where(valid, batch["responses"], 9)
    assert torch.equal(actor.forward(batch).logprobs, expected), "padding carries no meaning"
    batch["responses"] = torch.where(valid, (batch["responses"] + 1) % 61, 0)
    with pytest.raises(ValueError, match="responses: expected the last 12 columns of input_ids"):
        actor.forward(batch)


def test_grad_mode_is_the_callers(folder, rows):
    actor = make_actor(folder)
    assert actor.forward(padded_batch(rows)).logprobs.requires_grad
    with torch.no_grad():
        assert not actor.forward(padded_batch(rows)).logprobs.requires_grad


def test_bfloat16_gives_float32_as_close_to_the_truth_as_the_plain_model(folder, rows):
    actor = make_actor(folder, dtype="bfloat16")
    got = actor.forward(padded_batch(rows)).logprobs
    assert got.dtype == torch.float32
    truth = torch.cat(per_row(tiny_model(dtype=torch.bfloat16).double(), rows)[0])
    plain = torch.cat(per_row(tiny_model(dtype=torch.bfloat16), rows)[0])
    rms = lambda x: float((x.double() - truth).pow(2).mean().sqrt())  # noqa: E731
    assert rms(got) <= 1.5 * rms(plain)


def test_it_leaves_the_process_alone(folder, rows):
    actor = make_actor(folder)
    assert not torch.distributed.is_initialized()
    assert type(actor.model).__name__ == "Qwen3ForCausalLM"
    assert all(type(p) is torch.nn.Parameter for p in actor.model.parameters())


def test_the_model_is_a_plain_one_for_other_calls(folder, rows):
    actor = make_actor(folder)
    actor.forward(padded_batch(rows))
    plain = tiny_model(dtype=torch.float32)
    ids = rows[0][0][None]
    torch.testing.assert_close(actor.model(ids).logits, plain(ids).logits)
    assert torch.equal(
        actor.model.generate(ids, max_new_tokens=4, do_sample=False),
        plain.generate(ids, max_new_tokens=4, do_sample=False),
    )


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "torch.float32", torch.float64, None])
def test_dtype_is_a_name_or_the_checkpoints(folder, rows, dtype):
    actor = make_actor(folder, dtype=dtype)
    expected = torch.float32 if dtype is None else dtype
    expected = getattr(torch, expected.removeprefix("torch.")) if isinstance(expected, str) else expected
    assert actor.model.dtype == expected
    assert actor.forward(padded_batch(rows)).logprobs.dtype == (
        torch.float64 if expected == torch.float64 else torch.float32
    )


@pytest.mark.parametrize("name", ENGINE_METHODS)
def test_engine_methods_name_the_verl_way(folder, name):
    with pytest.raises(RuntimeError, match=f"{name}.*strategy=zorro"):
        getattr(make_actor(folder), name)()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: b.pop("responses"), "responses"),
        (lambda b: b.pop("attention_mask"), "attention_mask"),
        (lambda b: b.update(input_ids=b["input_ids"].float()), "input_ids"),
        (lambda b: b.update(position_ids=b["position_ids"][:, 1:]), "position_ids"),
        (lambda b: b.update(attention_mask=b["attention_mask"][:, 1:]), "attention_mask"),
        (lambda b: b.update(responses=b["input_ids"]), "responses"),
        (lambda b: b["attention_mask"].zero_(), "prompt"),
        (lambda b: b["attention_mask"][2, :7].zero_(), r"row\(s\) \[2\]"),
        (lambda b: b.pop("old_log_probs"), "old_log_probs"),
        (lambda b: b.pop("advantages"), "advantages"),
        (lambda b: b.update(advantages=b["advantages"][:, 1:]), "advantages"),
    ],
)
def test_bad_batches_are_named(folder, rows, change, message):
    actor = make_actor(folder)
    batch = training_batch(rows, prompt_width=7)
    change(batch)
    with pytest.raises(ValueError, match=message):
        actor.compute_policy_loss_and_backward(batch)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"logits_optimization": "fast"}, "logits_optimization"),
        ({"attn_implementation": "flash"}, "attn_implementation"),
        ({"attn_implementation": "flash_attention_2"}, "cuda"),
        *(
            ({"dtype": dtype}, "dtype: expected one of torch.float16")
            for dtype in ("float33", float, 32, np.float32, torch.int64, "float8_e4m3fn", "")
        ),
        *(
            ({"device": device}, "device: expected")
            for device in ("xyz", "meta", None, *([] if torch.cuda.is_available() else ["cuda", 0]))
        ),
    ],
    ids=str,
)
def test_bad_options_are_named(folder, options, message):
    with pytest.raises(ValueError, match=message):
        DeduplicatedActor(**{"model_name_or_path": folder, "device": "cpu"} | options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"calculate_sum_pi_squared": True}, "actor_config.calculate_sum_pi_squared: expected False, got True"),
        ({"use_fused_kernels": True}, "use_fused_kernels.*logits_optimization=memory"),
        ({"use_prefix_grouper": True}, "use_prefix_grouper"),
        ({"pad_to_length": True}, "pad_to_length"),
        ({"ulysses_sequence_parallel_size": 2}, "ulysses_sequence_parallel_size: expected 1, got 2"),
        ({"fsdp_config": {"pad_to_length": True}}, "actor_config.fsdp_config.pad_to_length"),
        ({"fsdp_config": {"qat": {"enable": True}}}, "qat.enable"),
    ],
)
def test_options_that_would_be_ignored_are_refused(folder, options, message):
    from verl.workers.config import FSDPEngineConfig, QATEngineConfig

    if fsdp := options.get("fsdp_config"):
        fsdp = {key: QATEngineConfig(**value) if key == "qat" else value for key, value in fsdp.items()}
        options = options | {"fsdp_config": FSDPEngineConfig(**fsdp)}
    with pytest.raises(ValueError, match=message):
        make_actor(folder, actor_config=fsdp_actor_config(**options))


def fsdp_actor_config(**options):
    from verl.workers.config import FSDPActorConfig

    return FSDPActorConfig(strategy="fsdp2", rollout_n=1, use_dynamic_bsz=True, **options)


@pytest.mark.parametrize(("given", "expected"), [("none", "compute"), ("memory", "memory")])
def test_verls_flag_for_chunks_asks_for_compute(folder, given, expected):
    config = fsdp_actor_config(entropy_from_logits_with_chunking=True)
    assert make_actor(folder, actor_config=config, logits_optimization=given).options.logits_optimization == expected


@pytest.mark.parametrize("mode", ["auto", "expand", "fork"])
def test_how_linear_layers_share_is_said_in_the_config(tmp_path, mode):
    from zorro_verl.options import ZorroOptions
    from zorro_verl.verl_config import ZorroActorConfig

    tiny_models.build("qwen3_next").save_pretrained(tmp_path)
    config = ZorroActorConfig(rollout_n=1, use_dynamic_bsz=True, zorro=ZorroOptions(linear_attention=mode))
    assert make_actor(tmp_path, actor_config=config).model.forward.linear_attention == mode


def test_options_are_said_once(folder):
    from zorro_verl.options import ZorroOptions
    from zorro_verl.verl_config import ZorroActorConfig

    options = {"logits_optimization": "memory", "use_split_attention": False, "attn_implementation": "eager"}
    config = ZorroActorConfig(rollout_n=1, use_dynamic_bsz=True, zorro=ZorroOptions(**options))
    assert make_actor(folder, actor_config=config, **options).options == config.zorro
    for name in options:
        others = {key: value for key, value in options.items() if key != name}
        with pytest.raises(ValueError, match=f"{name}: expected .* as in actor_config.zorro"):
            make_actor(folder, actor_config=config, **others)


def test_a_mask_of_any_dtype_counts_the_same(folder):
    g = torch.Generator().manual_seed(0)
    rows = [(torch.arange(1, 6), torch.randint(1, 61, (300,), generator=g)) for _ in range(3)]
    actor = make_actor(folder)
    losses = set()
    for dtype in (torch.int64, torch.bool, torch.bfloat16):
        batch = training_batch(rows)
        batch["response_mask"] = torch.ones_like(batch["responses"]).to(dtype)
        losses.add(actor.compute_policy_loss_and_backward(batch)["actor/policy_loss"])
    assert len(losses) == 1, "900 tokens are not a bfloat16"


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        *(({}, {"gradient_accumulation": n}, "gradient_accumulation") for n in (0, -1, 2.5, True, "2", None)),
        ({}, {"temperature": "0.7"}, "temperature"),
        ({"input_ids": 61}, {}, "input_ids: expected tokens in 0..60"),
    ],
)
def test_bad_arguments_are_named(folder, rows, change, options, message):
    batch = training_batch(rows)
    for key, value in change.items():
        batch[key] = torch.where(batch["attention_mask"] == 1, value, 0)
    with pytest.raises(ValueError, match=message):
        make_actor(folder).compute_policy_loss_and_backward(batch, **options)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_backward_needs_gradients(folder, rows, mode):
    actor = make_actor(folder)
    with mode(), pytest.raises(ValueError, match="compute_policy_loss_and_backward: expected gradients"):
        actor.compute_policy_loss_and_backward(training_batch(rows))
    actor.model.requires_grad_(False)
    with pytest.raises(ValueError, match=r"actor\.model: expected parameters that require a gradient"):
        actor.compute_policy_loss_and_backward(training_batch(rows))


@pytest.mark.parametrize(
    "key",
    ["input_ids", "responses", "response_mask", "advantages", "old_log_probs", "ref_log_prob", "rollout_is_weights"],
)
@pytest.mark.parametrize("kind", [np.asarray, torch.Tensor.tolist], ids=["array", "list"])
def test_what_is_no_tensor_is_not_dropped(folder, rows, key, kind):
    from verl import DataProto

    batch = training_batch(rows)
    batch["response_mask"] = torch.ones_like(batch["responses"])
    batch[key] = kind(batch.get(key, batch["advantages"]))
    actor = make_actor(folder)
    with pytest.raises(ValueError, match=f"{key}: expected a tensor, got (ndarray|list)"):
        actor.compute_policy_loss_and_backward(batch)
    if isinstance(batch[key], np.ndarray):
        with pytest.raises(ValueError, match=f"{key}: expected a tensor, got ndarray"):
            actor.compute_policy_loss_and_backward(DataProto.from_single_dict(batch))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("key", ["advantages", "old_log_probs", "ref_log_prob", "rollout_is_weights"])
def test_values_outside_the_loss_do_not_matter(folder, rows, key, value):
    config = fsdp_actor_config(use_kl_loss=True, kl_loss_coef=0.3)
    batch = training_batch(rows)
    batch["ref_log_prob"], batch["rollout_is_weights"] = batch["old_log_probs"] - 0.1, torch.ones(8, 8)
    batch["response_mask"] = batch["attention_mask"][:, -8:].clone()
    batch["response_mask"][:, 1] = 0
    losses, grads = [], []
    for outside in (0.5, value):
        batch[key] = batch[key].masked_fill(batch["response_mask"] == 0, outside)
        actor = make_actor(folder, dtype="float64", actor_config=config)
        losses.append(actor.compute_policy_loss_and_backward(batch)["actor/policy_loss"])
        grads.append(gradients(actor.model))
    assert losses[0] == losses[1]
    assert worst_gradient(*grads) == 0


def test_a_reference_that_nothing_reads_may_have_any_shape(folder, rows):
    actor, batch = make_actor(folder), training_batch(rows)
    expected = actor.compute_policy_loss_and_backward(batch)
    batch["ref_log_prob"] = torch.zeros(8, 3)
    assert actor.compute_policy_loss_and_backward(batch) == expected


def test_stats_are_read_only_in_depth(folder, rows):
    actor = make_actor(folder)
    actor.forward(padded_batch(rows))
    with pytest.raises(TypeError):
        actor.stats["groups"] = 9
    with pytest.raises(TypeError):
        actor.stats["fallback"]["group_cut"] = 9


@pytest.mark.parametrize("ids", [torch.tensor(1), torch.arange(15)], ids=["0-d", "1-d"])
def test_input_ids_of_another_rank_are_named(folder, rows, ids):
    with pytest.raises(ValueError, match="input_ids|responses"):
        make_actor(folder).forward(padded_batch(rows) | {"input_ids": ids})


def test_a_batch_that_is_no_mapping(folder):
    with pytest.raises(ValueError, match="batch: expected a mapping"):
        make_actor(folder).forward(None)


def test_temperature_of_another_length(folder, rows):
    with pytest.raises(ValueError, match="temperature"):
        make_actor(folder).forward(padded_batch(rows), temperature=torch.ones(3))


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("a-folder",), {}, "expected model_name_or_path=<a name or a folder>.* got str"),
        ((), {}, "expected model_name_or_path=.* got NoneType"),
        (("model",), {"device": "cpu"}, "expected model_name_or_path=.* got Qwen3ForCausalLM"),
        ((), {"model_name_or_path": "model"}, "model_name_or_path: expected a name or a folder, got Qwen3ForCausalLM"),
        (
            (),
            {"model_name_or_path": "x", "actor_config": {}},
            "actor_config: expected a verl FSDPActorConfig, got dict",
        ),
    ],
)
def test_a_constructor_called_otherwise_says_how(arguments, options, message):
    model = tiny_model()
    arguments = [model if x == "model" else x for x in arguments]
    options = {name: model if value == "model" else value for name, value in options.items()}
    with pytest.raises(ValueError, match=message):
        DeduplicatedActor(*arguments, **options)


@pytest.mark.parametrize("temperature", [-1.0, float("nan"), True, torch.tensor([1.0, -0.5] + [1.0] * 6)])
def test_temperatures_that_mean_nothing_are_refused(folder, rows, temperature):
    with pytest.raises(ValueError, match="temperature: expected"):
        make_actor(folder).forward(padded_batch(rows), temperature=temperature)


def test_a_patch_on_the_actors_model_gives_it_back(folder, rows):
    actor = make_actor(folder)
    expected = actor.forward(padded_batch(rows)).logprobs
    patcher = Qwen3ModelOncePatcher(actor.model)
    patcher.patch(temperature=0.5)
    patcher.unpatch()
    assert torch.equal(actor.forward(padded_batch(rows)).logprobs, expected)
