"""Every option of verl's engine, model, actor and optimizer configs with ``strategy=zorro``, against the stock engine.

Each option is a parameter that is marked with what the table in ``docs/verl.md`` says of it, see
`scripts/feature_table.py`. All cases run one after the other in one spawned process, or in two ranks.
"""

import re
import traceback
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, replace
from functools import partial

import feature_table
import pytest
import tiny_models
import torch
from ranks import run_ranks
from test_engine import TOLERANCE, full_gradients, local_rows, ragged_batch, responses
from test_verl_config import prepared
from tiny import jagged, tiny_model, verl_batch

ACTOR, FSDP, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.actor.fsdp_config", "actor_rollout_ref.model"
LAYERS = 3  # verl offloads activations of models with at least as many


@dataclass(frozen=True)
class Case:
    """What both engines are given, ``zorro`` the one of that name only."""

    model: dict = field(default_factory=dict)
    engine: dict = field(default_factory=dict)
    optimizer: dict = field(default_factory=dict)
    loss: dict = field(default_factory=dict)
    batch: dict = field(default_factory=dict)
    zorro: dict = field(default_factory=dict)
    ranks: int = 1
    checkpoint: str = "dense"


def option(keys, note="", verdict="works", **settings):
    """A case for the configs' ``keys``, separated by spaces."""
    name = settings.pop("name", keys.split()[0])
    return pytest.param(Case(**settings), id=name, marks=pytest.mark.feature(keys, verdict, note))


SPLIT_NORM = "`seq-mean-token-sum-norm` depends on micro-batches until `loss_scale_factor` is set: a WARNING at start"
SPLIT_MODES = "every `loss_mode`; `geo_mean`, `clip_cov` and `kl_cov` depend on micro-batches, as with fsdp2"

EQUAL_TO_STOCK = [
    option("actor.strategy", "`zorro`; the engine underneath is `zorro.base_strategy`"),
    option("actor.fsdp_config.param_offload", engine={"param_offload": True}),
    option("actor.fsdp_config.optimizer_offload", engine={"optimizer_offload": True}),
    option("actor.fsdp_config.offload_policy", engine={"offload_policy": True}),
    option("actor.fsdp_config.forward_only", "the reference policy shares prompts, too", engine={"forward_only": True}),
    option("actor.fsdp_config.wrap_policy", engine={"wrap_policy": {"transformer_layer_cls_to_wrap": ["Qwen3MLP"]}}),
    option(
        "actor.fsdp_config.reshard_after_forward actor.fsdp_config.forward_prefetch",
        engine={"reshard_after_forward": False, "forward_prefetch": True},
        ranks=2,
    ),
    option(
        "actor.fsdp_config.fsdp_size actor.fsdp_config.use_no_sync_for_gradient_accumulation",
        "HSDP meshes, too",
        engine={"fsdp_size": 1, "use_no_sync_for_gradient_accumulation": True},
        batch={"max_token_len_per_gpu": 60},
        ranks=2,
    ),
    option(
        "model.lora_rank actor.fsdp_config.use_no_sync_for_gradient_accumulation",
        name="lora-in-two-ranks",
        model={"lora_rank": 4, "enable_gradient_checkpointing": True},
        engine={"param_offload": True, "use_no_sync_for_gradient_accumulation": False},
        batch={"max_token_len_per_gpu": 60},
        ranks=2,
    ),
    option("actor.fsdp_config.full_determinism actor.fsdp_config.seed", engine={"full_determinism": True, "seed": 7}),
    option(
        "actor.entropy_from_logits_with_chunking",
        "means `zorro.logits_optimization=compute`",
        engine={"entropy_from_logits_with_chunking": True},
    ),
    option(
        "actor.use_dynamic_bsz actor.ppo_micro_batch_size_per_gpu actor.ppo_max_token_len_per_gpu",
        "budgets count packed tokens; a fixed size means rows of the longest length",
        batch={"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 2},
    ),
    option(
        "model.use_fused_kernels",
        "means `zorro.logits_optimization=memory`",
        model={"use_fused_kernels": True},
    ),
    option(
        "actor.pad_to_length actor.fsdp_config.pad_to_length_bucket",
        "the packed length becomes a multiple of the bucket",
        engine={"pad_to_length": True, "pad_to_length_bucket": 64},
    ),
    option("actor.calculate_sum_pi_squared", batch={"calculate_sum_pi_squared": True}),
    option("model.enable_gradient_checkpointing", model={"enable_gradient_checkpointing": True}),
    option(
        "model.enable_activation_offload",
        "with gradient checkpointing, which is on by default, and for models without linear attention",
        model={"enable_activation_offload": True, "enable_gradient_checkpointing": True},
    ),
    option(
        "model.enable_activation_offload",
        name="activation-offload-and-head-in-chunks",
        model={"enable_activation_offload": True, "enable_gradient_checkpointing": True},
        zorro={"logits_optimization": "memory"},
    ),
    option(
        "model.override_config",
        "its `attn_implementation` is used where `zorro.attn_implementation` is `auto`; dropout of layers is refused",
        model={"override_config": {"rms_norm_eps": 1e-2}},
    ),
    option("model.trust_remote_code", "for models of supported types", model={"trust_remote_code": True}),
    option("model.lora_rank model.lora_alpha model.target_modules", model={"lora_rank": 4, "lora_alpha": 32}),
    option(
        "model.target_modules model.exclude_modules",
        name="chosen-lora-modules",
        model={"lora_rank": 4, "target_modules": ["q_proj", "down_proj"], "exclude_modules": r".*1\.self_attn.*"},
    ),
    option(
        "model.lora_adapter_path",
        model={"lora_rank": 4, "lora_adapter_path": "adapter", "target_modules": ["v_proj"]},
    ),
    option(
        "model.target_parameters",
        "of experts, as PEFT does it",
        model={"lora_rank": 4, "target_modules": ["q_proj"], "target_parameters": ["mlp.experts.down_proj"]},
        checkpoint="moe",
    ),
    option(
        "model.lora",
        "`lora.merge=True`: merged weights go to the rollout",
        model={"lora_rank": 4, "lora": {"merge": True}},
    ),
    option(
        "actor.optim.optimizer actor.optim.optimizer_impl actor.optim.override_optimizer_config",
        optimizer={"optimizer": "SGD", "override_optimizer_config": {"momentum": 0.9}},
    ),
    option("actor.optim.clip_grad", optimizer={"clip_grad": 1e-3}),
    option(
        "actor.optim.lr_scheduler_type actor.optim.lr_warmup_steps actor.optim.min_lr_ratio actor.optim.num_cycles",
        optimizer={"lr_scheduler_type": "cosine", "lr_warmup_steps": 1, "min_lr_ratio": 0.1},
    ),
    option("actor.optim.lr actor.optim.weight_decay actor.optim.betas", optimizer={"lr": 0.1, "weight_decay": 0.5}),
]

# veRL's own losses of the log-probs and entropies that the cases above compare: nothing that they need is missing.
LOSSES = [
    option("actor.entropy_coeff actor.calculate_entropy", loss={"entropy_coeff": 0.3}),
    option("actor.calculate_entropy", name="no-entropy", batch={"calculate_entropy": False}),
    option("actor.clip_ratio_c", loss={"clip_ratio_c": 1.5}),
    option(
        "actor.clip_ratio actor.clip_ratio_low actor.clip_ratio_high",
        loss={"clip_ratio": 0.05, "clip_ratio_low": 0.02, "clip_ratio_high": 0.1},
    ),
    *(
        option(
            "actor.use_kl_loss actor.kl_loss_coef actor.kl_loss_type",
            name=f"kl-loss-{kind}",
            loss={"use_kl_loss": True, "kl_loss_coef": 0.5, "kl_loss_type": kind},
        )
        for kind in ("kl", "abs", "mse", "low_var_kl", "k3+")
    ),
    *(
        option("actor.loss_agg_mode actor.loss_scale_factor", SPLIT_NORM, name=mode, loss={"loss_agg_mode": mode})
        for mode in ("token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
    ),
    *(
        option("actor.policy_loss", SPLIT_MODES, name=mode, loss={"policy_loss": {"loss_mode": mode}})
        for mode in ("dppo_tv", "dppo_kl", "gspo", "gpg", "clip_cov", "kl_cov", "geo_mean", "cispo")
    ),
    option("actor.policy_loss", SPLIT_MODES, name="dro", loss={"policy_loss": {"loss_mode": "dro", "dro_beta": 0.1}}),
    option("actor.tau_pos actor.tau_neg", loss={"policy_loss": {"loss_mode": "sapo"}, "tau_pos": 1.2, "tau_neg": 1.5}),
    option(
        "algorithm.rollout_correction",
        "importance weights, and `bypass_mode`",
        batch={"rollout_is_weights": True},
    ),
    option(
        "algorithm.rollout_correction",
        name="bypass_mode",
        loss={"policy_loss": {"loss_mode": "bypass_mode", "rollout_correction": {"rollout_is": "token"}}},
    ),
]

WITHOUT_EFFECT = [
    option("actor.fsdp_config.dtype", "as with fsdp2", "no effect", engine={"dtype": "float16"}),
    option("actor.fsdp_config.use_orig_params", "as with fsdp2", "no effect", engine={"use_orig_params": True}),
    option("actor.fsdp_config.turbo_config", "as with fsdp2", "no effect", engine={"turbo_config": {"a": 1}}),
    option(
        "actor.fsdp_config.use_torch_compile actor.use_torch_compile",
        "verl compiles its entropy; here the entropy has a formula of its own",
        "no effect",
        engine={"use_torch_compile": True},
    ),
    option(
        "actor.entropy_checkpointing",
        "the entropy keeps nothing for its backward in any case",
        "no effect",
        engine={"entropy_checkpointing": True},
    ),
    option(
        "actor.entropy_from_logits_chunk_size",
        "chunks have 64 MiB on a CPU, 512 MiB elsewhere",
        "no effect",
        engine={"entropy_from_logits_chunk_size": 3, "entropy_from_logits_with_chunking": True},
    ),
    option(
        "model.fused_kernel_options",
        "no kernel of verl's runs",
        "no effect",
        model={"fused_kernel_options": {"impl_backend": "triton"}},
    ),
    option("model.use_remove_padding", "rows are always packed", "no effect", model={"use_remove_padding": True}),
    option("model.tiled_mlp", "as with fsdp2", "no effect", model={"tiled_mlp": {"enabled": True, "num_shards": 2}}),
    option("model.mtp", "as with fsdp2; it is for the rollout", "no effect", model={"mtp": {"enable": True}}),
    option(
        "actor.grad_clip actor.use_rollout_log_probs actor.freeze_vision_tower actor.use_fused_kernels "
        "actor.ppo_infer_micro_batch_size_per_gpu actor.ppo_infer_max_token_len_per_gpu",
        "as with fsdp2; use `actor.optim.clip_grad`, `model.use_fused_kernels` and `rollout.log_prob_*`",
        "no effect",
        loss={"use_fused_kernels": True, "grad_clip": 1e-6, "use_rollout_log_probs": True, "freeze_vision_tower": True},
    ),
]


def of_ranks(parameters, ranks):
    return [p for p in parameters if p.values[0].ranks == ranks]


def named(parameters):
    return [(p.id, p.values[0]) for p in parameters]


def build(folder, strategy, case):
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig, MtpConfig
    from verl.workers.engine import EngineRegistry

    from zorro_verl.options import ZorroOptions

    model = {"use_remove_padding": False, "enable_gradient_checkpointing": False, "override_config": {}} | case.model
    if "lora_adapter_path" in model:
        model["lora_adapter_path"] = f"{folder}/{model['lora_adapter_path']}"
    if "mtp" in model:
        model["mtp"] = MtpConfig(**model["mtp"])
    if strategy != "zorro":
        model["override_config"] = model["override_config"] | {"attn_implementation": "sdpa"}
    model_config = HFModelConfig(path=f"{folder}/{case.checkpoint}", load_tokenizer=False, **model)
    fp32 = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    engine_config = FSDPEngineConfig(
        **{"strategy": "fsdp2", "mixed_precision": fp32, "use_torch_compile": False} | case.engine
    )
    object.__setattr__(engine_config, "strategy", strategy)
    if strategy == "zorro":
        object.__setattr__(engine_config, "zorro", ZorroOptions(**case.zorro))
    # eps: without it Adam's first step is the sign of a gradient, and turns rounding into a difference
    optimizer = {"lr": 1e-2, "total_training_steps": 10, "override_optimizer_config": {"eps": 1e-2}} | case.optimizer
    engine = EngineRegistry.new(
        "language_model",
        strategy,
        model_config=model_config,
        engine_config=engine_config,
        optimizer_config=FSDPOptimizerConfig(**optimizer),
        checkpoint_config=CheckpointConfig(),
    )
    engine.initialize()
    fill_adapters(engine.module)
    return engine


def fill_adapters(module):
    """The same random numbers in the adapters of every engine; PEFT's B is zero at first, and A random."""
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in module.named_parameters():
            if "lora_" in name:
                full = torch.randn(p.shape, generator=g) / 4
                p.copy_(torch.distributed.tensor.distribute_tensor(full, p.device_mesh, p.placements))


def loss_of(case):
    from verl.trainer.config import RolloutCorrectionConfig
    from verl.workers.config import FSDPActorConfig, PolicyLossConfig
    from verl.workers.utils.losses import ppo_loss

    options = {"entropy_coeff": 0.01, "use_kl_loss": True, "loss_scale_factor": 16} | case.loss
    policy = dict(options.get("policy_loss", {}))
    if "rollout_correction" in policy:
        policy["rollout_correction"] = RolloutCorrectionConfig(**policy["rollout_correction"])
    options["policy_loss"] = PolicyLossConfig(**policy)
    config = FSDPActorConfig(strategy="fsdp2", rollout_n=4, ppo_micro_batch_size_per_gpu=2, **options)
    return partial(ppo_loss, config=config)


def batch_of(case, rank, world_size, stock):
    rows = local_rows(ragged_batch(), rank, world_size)
    settings = dict(case.batch)
    weights = settings.pop("rollout_is_weights", False)
    data = verl_batch(
        rows,
        seed=rank,
        temperature=0.7,
        global_batch_size=len(rows) * world_size,
        **({"use_remove_padding": False} if stock else {}) | settings,
    )
    if weights:
        g = torch.Generator().manual_seed(rank)
        data["rollout_is_weights"] = jagged([torch.rand(len(r), generator=g) * 2 for _, r in rows])
    if "bypass_mode" in str(case.loss):
        data["rollout_log_probs"] = data["old_log_probs"]
    return data


@dataclass
class Observed:
    """What an engine gave: rows of values, gradients, one number each, and weights after a step."""

    values: dict = field(default_factory=dict)
    gradients: dict = field(default_factory=dict)
    numbers: dict = field(default_factory=dict)
    weights: dict = field(default_factory=dict)


def observe(engine, case, rank, world_size, stock):
    seen, batch = Observed(), partial(batch_of, case, rank, world_size, stock)
    lora = case.model.get("lora_rank", 0) > 0
    with engine.eval_mode():
        score(engine, batch(), seen.values, "")
    if lora:
        with engine.eval_mode(), engine.disable_adapter():
            score(engine, batch(), seen.values, "no adapter: ")
    if not case.engine.get("forward_only"):
        torch.manual_seed(0)  # some losses choose tokens at random
        with engine.train_mode():
            output = engine.train_batch(batch(), loss_of(case))
            seen.gradients = full_gradients(engine)
        seen.numbers = {"loss": sum(output["loss"]), "grad_norm": output["metrics"]["grad_norm"]}
        seen.numbers["lr"] = engine.lr_scheduler_step()
    seen.weights = exported(engine, case)
    return seen


def exported(engine, case):
    """What goes to the rollout: all weights, with LoRA the base's and the adapter's, or merged ones (in bfloat16)."""
    lora, found = case.model.get("lora_rank", 0) > 0, {}
    for synced in (True, False) if lora else (True,):
        weights, peft = engine.get_per_tensor_param(base_sync_done=synced)
        assert (peft is not None) == (lora and not case.model.get("lora"))
        found |= {f"{name}, base_sync_done={synced}": tensor.clone() for name, tensor in weights}
    return found


def score(engine, data, values, prefix):
    output = engine.infer_batch(data)
    for key, value in output["model_output"].items():
        values[prefix + key] = responses(value, data)
    if "zorro/tokens_packed" in output["metrics"]:
        rows = data["input_ids"].offsets()[-1].item()
        assert output["metrics"]["zorro/tokens_total"] == [rows]
        assert output["metrics"]["zorro/tokens_packed"][0] < rows - 40, "nothing was shared"


def close(expected, got, tolerance):
    """Raise with the name of what differs."""
    assert expected.values.keys() == got.values.keys()
    for name, rows in expected.values.items():
        for row, (a, b) in enumerate(zip(rows, got.values[name], strict=True)):
            assert b.dtype == torch.float32
            assert (a - b).abs().max() <= tolerance, f"{name} of row {row}: {(a - b).abs().max()}"
    for kind in ("gradients", "weights"):
        a, b = getattr(expected, kind), getattr(got, kind)
        assert a.keys() == b.keys(), kind
        scale = max([float(x.abs().max()) for x in a.values()], default=1)
        for name in a:
            allowed = tolerance if a[name].dtype == torch.float32 else 2**-8  # one step of bfloat16
            assert (a[name] - b[name]).abs().max() <= allowed * scale, f"{kind} {name}, {scale=}"
    for name, number in expected.numbers.items():
        assert got.numbers[name] == pytest.approx(number, rel=10 * tolerance, abs=tolerance), name


def run_cases(rank, folder, cases, against_stock):
    """The traceback of each case that failed, by name."""
    failures, world_size = {}, torch.distributed.get_world_size()
    let_activations_be_offloaded()
    for name, case in cases:
        try:
            run_case(rank, folder, world_size, case, against_stock)
        except Exception:
            failures[name] = traceback.format_exc()
        finally:
            torch.use_deterministic_algorithms(False)
    return failures


def let_activations_be_offloaded():
    """On a machine without an accelerator, too: verl copies them into pinned memory."""
    from verl.utils.activation_offload import SynchronizedGroupOffloadHandler as Handler

    Handler.offload = staticmethod(partial(Handler.offload, pin_memory=False))


def oracle(case):
    """The stock engine without what it would answer with other numbers, or with a patch of the model's class.

    Its gradients with offloaded activations are wrong: it takes different views of a tensor for the same.
    """
    dropped = ("enable_activation_offload", "use_fused_kernels")
    return replace(case, model={name: x for name, x in case.model.items() if name not in dropped})


def check_answer(engine, case):
    """What verl's own flags are answered with, as the numbers can't tell; and no class of transformers is patched."""
    fused, chunked = (case.model.get("use_fused_kernels"), case.engine.get("entropy_from_logits_with_chunking"))
    if fused or chunked:
        assert engine.options.logits_optimization == ("memory" if fused else "compute")
    if case.checkpoint == "dense":
        from transformers import Qwen3ForCausalLM

        assert Qwen3ForCausalLM.forward.__module__.startswith("transformers")


def seen_lengths(engine):
    """A list that fills with the packed lengths that the embedding sees."""
    lengths, embedding = [], engine.module.get_input_embeddings()
    embedding.register_forward_pre_hook(lambda module, args: lengths.append(args[0].shape[-1]))
    return lengths


def run_case(rank, folder, world_size, case, against_stock):
    bare = Case(engine={"entropy_from_logits_with_chunking": True}) if "chunk" in str(case.engine) else Case()
    reference = build(folder, "fsdp2", oracle(case)) if against_stock else build(folder, "zorro", bare)
    engine = build(folder, "zorro", case)
    for name, weight in exported(reference, case if against_stock else bare).items():
        assert torch.equal(weight, exported(engine, case)[name]), name
    check_answer(engine, case)
    expected = observe(reference, case if against_stock else bare, rank, world_size, stock=against_stock)
    lengths = seen_lengths(engine)
    got = observe(engine, case, rank, world_size, stock=False)
    if bucket := case.engine.get("pad_to_length_bucket"):
        assert lengths
        assert all(length % bucket == 0 for length in lengths)
    close(expected, got, TOLERANCE if against_stock else 0)
    if case.model.get("lora_rank"):
        assert all("lora_" in name for name in got.gradients)
        with_and_without = (got.values[prefix + "log_probs"] for prefix in ("", "no adapter: "))
        change = [(a - b).abs().max() for a, b in zip(*with_and_without, strict=True)]
        assert max(change) > 0.01, "the adapter changes nothing: the comparison is blind"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of a dense model, an adapter for it, and a mixture of experts."""
    from peft import LoraConfig, get_peft_model

    path = tmp_path_factory.mktemp("tiny")
    model = tiny_model(dtype=torch.float32, num_hidden_layers=LAYERS)
    model.save_pretrained(path / "dense")
    get_peft_model(model, LoraConfig("CAUSAL_LM", r=4, target_modules=["v_proj"])).save_pretrained(path / "adapter")
    tiny_models.build("qwen3_moe", torch.float32).save_pretrained(path / "moe")
    return str(path)


@pytest.fixture(scope="module")
def checkpoint(folder):
    return f"{folder}/dense"


@pytest.fixture(scope="module")
def one_rank(folder):
    return run_ranks(run_cases, 1, folder, named(of_ranks(EQUAL_TO_STOCK, 1)), True, timeout=250)[0]


@pytest.fixture(scope="module")
def two_ranks(folder):
    first, second = run_ranks(run_cases, 2, folder, named(of_ranks(EQUAL_TO_STOCK, 2)), True, timeout=250)
    return second | first


@pytest.fixture(scope="module")
def losses(folder):
    return run_ranks(run_cases, 1, folder, named(LOSSES), True, timeout=250)[0]


@pytest.fixture(scope="module")
def without_effect(folder):
    return run_ranks(run_cases, 1, folder, named(WITHOUT_EFFECT), False, timeout=250)[0]


@pytest.mark.parametrize("case", of_ranks(EQUAL_TO_STOCK, 1))
def test_equal_to_stock(one_rank, case, request):
    assert_passed(one_rank, request)


@pytest.mark.slow
@pytest.mark.parametrize("case", of_ranks(EQUAL_TO_STOCK, 2))
def test_equal_to_stock_in_two_ranks(two_ranks, case, request):
    assert_passed(two_ranks, request)


@pytest.mark.slow
@pytest.mark.parametrize("case", LOSSES)
def test_losses_equal_stock(losses, case, request):
    assert_passed(losses, request)


@pytest.mark.slow
@pytest.mark.parametrize("case", WITHOUT_EFFECT)
def test_changes_nothing(without_effect, case, request):
    assert_passed(without_effect, request)


def assert_passed(failures, request):
    name = request.node.callspec.id
    assert name not in failures, failures[name]


# Overrides of a run's command line, and what they are refused for.
REFUSED = [
    ("actor.use_prefix_grouper", "prompts are shared without it", f"{ACTOR}.use_prefix_grouper=True"),
    ("model.use_liger", "it is not tested with shared prompts", f"{MODEL}.use_liger=True"),
    ("actor.fsdp_config.qat", "", f"{FSDP}.qat.enable=True"),
    ("actor.qat", "", f"{ACTOR}.qat.enable=True"),
    (
        "actor.fsdp_config.router_replay",
        "verl replays routes with other engines than FSDP only",
        f"+{FSDP}.router_replay.mode=R2",
    ),
]


@pytest.mark.parametrize(
    "override",
    [
        pytest.param(override, marks=pytest.mark.feature(key, "refused", note), id=key)
        for key, note, override in REFUSED
    ],
)
def test_refused_on_the_driver(checkpoint, override):
    name = override.lstrip("+").partition("=")[0]
    with pytest.raises(ValueError, match=rf"^{re.escape(name)}: expected"):
        prepared(checkpoint, f"{ACTOR}.strategy=zorro", override)
    prepared(checkpoint, override)  # any other strategy: no matter


def test_every_unsupported_option_has_its_refusal():
    from zorro_verl.actor_options import UNSUPPORTED

    refused = {override.lstrip("+").partition("=")[0] for _, _, override in REFUSED}
    for name, *_ in UNSUPPORTED:
        assert any(override.endswith(f".{name}") for override in refused), name


@pytest.mark.parametrize("checkpointing", [True, False])
def test_activations_are_offloaded_with_checkpointing_only(checkpoint, checkpointing):
    overrides = [f"{MODEL}.enable_activation_offload=True", f"{MODEL}.enable_gradient_checkpointing={checkpointing}"]
    with nullcontext() if checkpointing else pytest.raises(ValueError, match=f"{MODEL}.enable_activation_offload"):
        prepared(checkpoint, f"{ACTOR}.strategy=zorro", *overrides)


def test_activations_of_linear_attention_stay(tmp_path):
    tiny_models.build("qwen3_5_text", torch.float32).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"{MODEL}.enable_activation_offload.*linear attention"):
        prepared(str(tmp_path), f"{ACTOR}.strategy=zorro", f"{MODEL}.enable_activation_offload=True")


def test_the_references_section_is_checked_where_it_shares(checkpoint):
    override = "actor_rollout_ref.ref.fsdp_config.qat.enable=True"
    with pytest.raises(ValueError, match=r"^actor_rollout_ref.ref.fsdp_config.qat.enable: expected"):
        prepared(checkpoint, f"{ACTOR}.strategy=zorro", override)
    prepared(checkpoint, f"{ACTOR}.strategy=zorro", "actor_rollout_ref.ref.strategy=fsdp2", override)


# Fields of verl's configs that the table leaves out: verl fills them itself, or they never meet this package.
ELSEWHERE = {
    "actor": "checkpoint engine fsdp_config global_batch_info model_config optim ppo_epochs "
    "ppo_micro_batch_size ppo_mini_batch_size profiler rollout_n "
    "use_remove_padding",
    "actor.fsdp_config": "infer_max_token_len_per_gpu infer_micro_batch_size_per_gpu max_token_len_per_gpu "
    "micro_batch_size_per_gpu use_dynamic_bsz use_fused_kernels use_remove_padding strategy "
    "entropy_checkpointing entropy_from_logits_chunk_size entropy_from_logits_with_chunking pad_to_length",
    "model": "architectures custom_chat_template external_lib generation_config hf_config hf_config_path "
    "local_hf_config_path local_path local_tokenizer_path load_tokenizer model_type path processor tokenizer "
    "tokenizer_path use_shm",
    "actor.optim": "grad_clip lr_warmup_steps_ratio total_training_steps warmup_style zero_indexed_step",
}


def test_every_option_of_verl_is_in_the_table_or_known_to_be_none_of_it():
    from verl.workers.config import FSDPActorConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig

    told = {feature.key for feature in feature_table.collect()}
    for place, config in (
        ("actor", FSDPActorConfig),
        ("actor.fsdp_config", FSDPEngineConfig),
        ("model", HFModelConfig),
        ("actor.optim", FSDPOptimizerConfig),
    ):
        names = {f.name for f in fields(config)} - {"_target_"}
        in_table = {key.removeprefix(f"{place}.") for key in told if key.rpartition(".")[0] == place}
        assert in_table <= names, place
        assert set(ELSEWHERE[place].split()) <= names, place
        assert names == in_table | set(ELSEWHERE[place].split()), place


def test_the_table_of_the_page_is_what_the_tests_say():
    page = feature_table.PAGE.read_text()
    written = page.split(feature_table.BEGIN)[1].split(feature_table.END)[0].strip()
    assert written == feature_table.section(feature_table.collect()), "run python scripts/feature_table.py"


def test_a_key_has_one_verdict_and_all_its_notes():
    marks = [("a.x a.y", "works", "one"), ("a.x", "works", "two"), ("a.y", "works", "one"), ("b", "refused", "")]
    features = feature_table.merge(marks)
    assert [(f.key, f.verdict, f.note) for f in features] == [
        ("a.x", "works", "one; two"),
        ("a.y", "works", "one"),
        ("b", "refused", ""),
    ]
    with pytest.raises(ValueError, match="one verdict"):
        feature_table.merge([*marks, ("b", "works", "")])
    with pytest.raises(ValueError, match="expected a verdict of"):
        feature_table.merge([("a", "fine", "")])


def test_the_page_is_rewritten_between_its_markers(monkeypatch, tmp_path):
    page = tmp_path / "verl.md"
    page.write_text(f"before\n{feature_table.BEGIN}\nold\n{feature_table.END}\nafter\n")
    monkeypatch.setattr(feature_table, "PAGE", page)
    for _ in range(2):
        feature_table.write("new")
    assert page.read_text() == f"before\n{feature_table.BEGIN}\n\nnew\n\n{feature_table.END}\nafter\n"
