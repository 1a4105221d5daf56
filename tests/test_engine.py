"""Engine against engine: verl's stock fsdp2 and zorro on the same batch."""

import copy
from functools import partial

import pytest
import torch
from ranks import run_ranks
from tiny import jagged, shuffled, tiny_model, tokens, verl_batch, worst_gradient

TOLERANCE = 2e-5


def ragged_batch():
    """Sixteen rows of four groups, interleaved: of 4, 5, 3 and 4 rows."""
    g = torch.Generator().manual_seed(3)
    rows = [
        (p, tokens(n, g)) for p, ns in ((tokens(23, g), (4, 9, 1, 7)), (tokens(11, g), (3, 3, 8, 2, 5))) for n in ns
    ]
    rows += [(p, tokens(n, g)) for p, ns in ((tokens(1, g), (6, 2, 4)), (tokens(17, g), (1, 1, 12, 5))) for n in ns]
    return shuffled(rows, 5)


def build_engine(path, strategy, checkpointing=False, forward_only=False, model=None, engine=None, zorro=None):
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine import EngineRegistry

    stock = strategy != "zorro"
    model_config = HFModelConfig(
        path=path,
        load_tokenizer=False,
        enable_gradient_checkpointing=checkpointing,
        override_config={"attn_implementation": "sdpa"} if stock else {},
        **{"use_remove_padding": False} | (model or {}),
    )
    model_config.model_type = "language_model"
    fp32 = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    engine_config = FSDPEngineConfig(
        strategy="fsdp2", mixed_precision=fp32, use_torch_compile=False, forward_only=forward_only, **engine or {}
    )
    object.__setattr__(engine_config, "strategy", strategy)
    if zorro is not None:
        object.__setattr__(engine_config, "zorro", zorro)
    before = copy.deepcopy((vars(engine_config), model_config.hf_config.to_dict()))
    engine = EngineRegistry.new(
        "language_model",
        strategy,
        model_config=model_config,
        engine_config=engine_config,
        optimizer_config=FSDPOptimizerConfig(lr=1e-2, total_training_steps=10),
        checkpoint_config=CheckpointConfig(),
    )
    engine.initialize()
    assert (vars(engine_config), model_config.hf_config.to_dict()) == before, "the caller's configs were changed"
    return engine


def ppo_loss_function(**options):
    from verl.workers.config import FSDPActorConfig
    from verl.workers.utils.losses import ppo_loss

    config = FSDPActorConfig(
        strategy="fsdp2", rollout_n=4, ppo_micro_batch_size_per_gpu=2, entropy_coeff=0.01, use_kl_loss=True, **options
    )
    return partial(ppo_loss, config=config)


def full_gradients(engine):
    """All gradients as plain tensors: each rank contributes its shard."""
    return {
        name: (p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad).clone()
        for name, p in engine.module.named_parameters()
        if p.grad is not None
    }


def responses(output, data):
    from verl.workers.utils.padding import response_from_nested

    return [r.float() for r in response_from_nested(output, data["response_mask"]).unbind()]


def local_rows(rows, rank, world_size):
    per_rank = len(rows) // world_size
    return rows[rank * per_rank : (rank + 1) * per_rank]


def compare_engines(rank, path, world_size, checkpointing, settings, mode):
    from zorro_verl.options import ZorroOptions

    rows = local_rows(ragged_batch(), rank, world_size)
    build = partial(build_engine, path, checkpointing=checkpointing)
    stock, zorro = build("fsdp2"), build("zorro", zorro=ZorroOptions(logits_optimization=mode))
    stock_ref, zorro_ref = build("fsdp2", forward_only=True), build("zorro", forward_only=True)
    batch = partial(verl_batch, rows, seed=rank, temperature=0.7, global_batch_size=len(rows) * world_size)
    stock_settings = {"use_remove_padding": False}
    worst = {}

    packed = sum({tuple(p.tolist()): len(p) for p, _ in rows}.values()) + sum(len(r) for _, r in rows)
    for name, a, b in (("actor", stock, zorro), ("ref", stock_ref, zorro_ref)):
        with a.eval_mode(), b.eval_mode():
            data = batch(**stock_settings)
            expected = a.infer_batch(data)["model_output"]
            got = b.infer_batch(batch(**settings))
        for key in ("log_probs", "entropy"):
            assert got["model_output"][key].dtype == torch.float32
            for row, (x, y) in enumerate(
                zip(responses(expected[key], data), responses(got["model_output"][key], data), strict=True)
            ):
                worst[f"{name}/{key}"] = max(worst.get(f"{name}/{key}", 0), float((x - y).abs().max()))
                assert (x - y).abs().max() <= TOLERANCE, (name, key, row)
        if not settings:
            assert got["metrics"]["zorro/tokens_packed"] == [packed]

    losses = []
    with stock.train_mode(), zorro.train_mode():
        for step in range(5):
            outputs, grads = [], []
            for engine, flags in ((stock, stock_settings), (zorro, settings)):
                engine.optimizer_zero_grad()
                outputs.append(engine.forward_backward_batch(batch(**flags), ppo_loss_function()))
                grads.append(full_gradients(engine))
                engine.optimizer_step()
            if not settings:
                assert outputs[1]["metrics"]["zorro/tokens_packed"] == [packed]
            scale = max(float(g.abs().max()) for g in grads[0].values())
            assert grads[0].keys() == grads[1].keys()
            assert scale > 0
            if step == 0:  # later steps compare trajectories, which drift apart by what Adam makes of rounding
                difference = max(float((grads[0][k] - grads[1][k]).abs().max()) for k in grads[0]) / scale
                worst["gradient"] = difference
                assert difference <= TOLERANCE, difference
            losses.append([sum(output["loss"]) for output in outputs])
    for a, b in losses:
        assert a == pytest.approx(b, abs=10 * TOLERANCE)
    assert abs(losses[0][0] - losses[-1][0]) > 1e-3, "five steps changed nothing: the comparison is blind"
    return worst


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    tiny_model(dtype=torch.float32).save_pretrained(path)
    return str(path)


@pytest.mark.parametrize(
    ("world_size", "checkpointing", "settings"),
    [
        pytest.param(1, False, {}, id="one-rank"),
        pytest.param(2, True, {}, id="two-ranks-checkpointing"),
        pytest.param(
            2, False, {"max_token_len_per_gpu": 40}, id="two-ranks-groups-cut-by-the-budget", marks=pytest.mark.slow
        ),
        pytest.param(
            1,
            True,
            {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 1},
            id="fixed-size-one",
            marks=pytest.mark.slow,
        ),
        pytest.param(2, True, {"logits_optimization": "memory"}, id="two-ranks-head-in-chunks", marks=pytest.mark.slow),
    ],
)
def test_zorro_equals_stock(checkpoint, world_size, checkpointing, settings):
    settings = dict(settings)
    mode = settings.pop("logits_optimization", "none")
    run_ranks(compare_engines, world_size, checkpoint, world_size, checkpointing, settings, mode)


def fewer_groups_on_one_rank(rank, path):
    """Rank 0 holds one group of eight, rank 1 eight prompts: their own micro-batch counts would differ."""
    g = torch.Generator().manual_seed(11)
    shared, others = tokens(20, g), [tokens(20, g) for _ in range(8)]
    rows = [(shared if rank == 0 else others[i], tokens(4, g)) for i in range(8)]
    settings = {"max_token_len_per_gpu": 60, "global_batch_size": 16}
    stock, zorro = build_engine(path, "fsdp2"), build_engine(path, "zorro")
    grads = []
    with stock.train_mode(), zorro.train_mode():
        for engine in (stock, zorro):
            data = verl_batch(rows, seed=rank, use_remove_padding=False, **settings)
            output = engine.forward_backward_batch(data, ppo_loss_function())
            grads.append(full_gradients(engine))
    assert worst_gradient(*grads) <= TOLERANCE
    return len(output["loss"]), output["metrics"]["zorro/pieces"][0]


@pytest.mark.slow
def test_ranks_agree_on_the_micro_batch_count(checkpoint):
    (count, pieces), (other_count, _) = run_ranks(fewer_groups_on_one_rank, 2, checkpoint)
    assert count == other_count >= 4
    assert len(pieces) == count, "the one group of rank 0 was cut as often as rank 1 needed, and counted"


def data_error_on_one_rank(rank, path):
    """Both ranks stay alive through every error, as Ray's actors do: one that waited would run into the time limit."""
    g = torch.Generator().manual_seed(rank)
    rows = [(tokens(5, g), tokens(4, g)) for _ in range(4)]  # two of them fill a micro-batch
    no_prompt = [*rows[:2], (rows[2][0][:0], rows[2][1]), rows[3]]
    unknown = [*rows[:3], (rows[3][0], rows[3][1] + 1000)]
    engine = build_engine(path, "zorro")
    positions = jagged([torch.arange(n) for n in (8, 10, 9, 9)])
    for these, change, message in (
        (no_prompt, {}, r"row\(s\) \[2\].*rank 1"),
        (unknown, {}, "input_ids: expected tokens"),
        (rows, {"temperature": torch.ones(4, 1)}, "temperature"),
        (rows, {"temperature": torch.tensor([1.0, 1.0, float("nan"), 1.0])}, "temperature: expected values"),
        (rows, {"temperature": None}, "temperature"),
        (rows, {"rollout_is_weights": jagged([torch.ones(n) for n in (3, 5, 4, 4)])}, "rollout_is_weights"),
        (rows, {"position_ids": positions}, "position_ids"),
        (rows, {"position_ids": jagged([torch.arange(9.0)] * 4)}, "position_ids"),
        (rows, {"advantages": jagged([torch.ones(n) for n in (3, 5, 4, 4)])}, "advantages"),
        (rows, {"loss_mask": None}, "loss_mask"),
        (rows[:1], {}, "batch: expected at least 2 rows on every data-parallel rank"),
    ):
        data = verl_batch(these if rank == 1 else rows, global_batch_size=8, max_token_len_per_gpu=20)
        for key, value in change.items() if rank == 1 else ():
            data.pop(key, None)
            if value is not None:
                data[key] = value
        with engine.train_mode(), pytest.raises(ValueError, match=message):
            engine.forward_backward_batch(data, ppo_loss_function())
    good = [(tokens(5, g), tokens(4, g)) for _ in range(4)]
    with engine.train_mode():
        engine.forward_backward_batch(verl_batch(good, global_batch_size=8), ppo_loss_function())


@pytest.mark.slow
def test_a_data_error_is_raised_on_every_rank(checkpoint):
    run_ranks(data_error_on_one_rank, 2, checkpoint)


def odd_batches(rank, path):
    """One engine, one odd batch after the other, each against the stock engine."""
    g = torch.Generator().manual_seed(1)
    stock, zorro = build_engine(path, "fsdp2"), build_engine(path, "zorro")
    prompt, alone = tokens(7, g), tokens(3, g)
    rows = [(prompt, tokens(n, g)) for n in (5, 1, 3)] + [(alone, tokens(4, g))]

    def compare(name, change=lambda data: None, these=rows, loss=None, **settings):
        grads, outputs = [], []
        with stock.train_mode(), zorro.train_mode():
            for engine in (stock, zorro):
                data = verl_batch(these, use_remove_padding=False, **settings)
                change(data)
                engine.optimizer_zero_grad()
                outputs.append(engine.forward_backward_batch(data, ppo_loss_function(**loss or {})))
                grads.append(full_gradients(engine))
        assert sum(outputs[0]["loss"]) == pytest.approx(sum(outputs[1]["loss"]), abs=TOLERANCE), name
        assert worst_gradient(*grads) <= TOLERANCE, name

    def tool_tokens(data):
        mask = jagged([torch.tensor([1, 0, 0, 1, 1]), torch.tensor([1]), torch.tensor([0, 1, 1]), torch.ones(4).long()])
        data["response_mask"] = data["loss_mask"] = mask

    compare("tool tokens out of the loss", tool_tokens)
    compare("a temperature per row", temperature=torch.tensor([0.5, 2.0, 1.0, 0.7]))
    per_row = torch.tensor([0.5, 2.0, 1.0, 0.7])
    compare(
        "a temperature per row in each micro-batch", lambda d: d.set("temperature", per_row), max_token_len_per_gpu=14
    )
    with zorro.eval_mode():  # where it is no field of the rows, verl's engine fails
        whole, cut = (
            zorro.infer_batch(verl_batch(rows, temperature=per_row, max_token_len_per_gpu=budget))["model_output"]
            for budget in (1000, 14)
        )
    assert (whole["log_probs"].values() - cut["log_probs"].values()).abs().max() <= TOLERANCE
    compare("every row alone", these=[(tokens(n, g), tokens(3, g)) for n in (4, 2, 9)])
    compare("one row", these=rows[:1])
    compare("one prompt token, one response token", these=[(prompt[:1], tokens(1, g)) for _ in range(3)])
    compare("identical rows", these=[rows[0]] * 3 + [rows[1]])
    for mode in ("token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"):
        loss = {"loss_agg_mode": mode, "loss_scale_factor": 16}
        compare(f"{mode}, groups cut over micro-batches", loss=loss, max_token_len_per_gpu=14)

    fixed = verl_batch(rows, use_dynamic_bsz=False, micro_batch_size_per_gpu=1)
    with zorro.eval_mode():
        first, second = (zorro.infer_batch(fixed)["metrics"] for _ in range(2))
        assert first == second, "the caller's batch was changed"
        for change, message in (
            ({"pop": "responses"}, "responses"),
            ({"distillation_use_topk": True}, "teacher_logprobs"),
            ({"max_token_len_per_gpu": 11}, "ppo_max_token_len_per_gpu.*12 tokens"),
        ):
            pop = change.pop("pop", None)
            data = verl_batch(rows, **change)
            if pop:
                data.pop(pop)
            with pytest.raises(ValueError, match=message):
                zorro.infer_batch(data)

    before = {name: p.full_tensor().clone() for name, p in zorro.module.named_parameters()}
    with zorro.train_mode():
        data = verl_batch(rows)
        data["advantages"] = jagged([x * torch.nan for x in data["advantages"].unbind()])
        output = zorro.train_batch(data, ppo_loss_function())
    assert output["metrics"]["zorro/skipped_steps"] == [1]
    assert all(torch.equal(before[name], p.full_tensor()) for name, p in zorro.module.named_parameters())


@pytest.mark.slow
def test_odd_batches_equal_stock(checkpoint):
    run_ranks(odd_batches, 1, checkpoint)


def refused_at_start(rank, path):
    from zorro_verl.options import ZorroOptions

    for settings, message in (
        ({"engine": {"ulysses_sequence_parallel_size": 0}}, "ulysses_sequence_parallel_size: .* at least 1, got 0"),
        ({"engine": {"ulysses_sequence_parallel_size": 3}}, "ulysses_sequence_parallel_size: .*num_attention_heads"),
        ({"engine": {"ulysses_sequence_parallel_size": 2}}, "ulysses_sequence_parallel_size: .*divisor of 1 ranks"),
        ({"engine": {"pad_to_length": True, "pad_to_length_bucket": 0}}, "pad_to_length_bucket: .* at least 1, got 0"),
        ({"model": {"use_liger": True}}, "use_liger"),
        ({"zorro": ZorroOptions(base_strategy="fsdp")}, "base_strategy.*fsdp2"),
        ({"zorro": ZorroOptions(attn_implementation="flash_attention_2")}, "flash_attention_2.*cuda"),
    ):
        with pytest.raises(ValueError, match=message):
            build_engine(path, "zorro", **settings)


def test_what_cannot_be_shared_is_refused_at_start(checkpoint):
    run_ranks(refused_at_start, 1, checkpoint)


@pytest.mark.slow
def test_another_model_type_is_refused_at_start(tmp_path):
    tiny_model("gpt_neox", dtype=torch.float32).save_pretrained(tmp_path)
    with pytest.raises(AssertionError, match="model_type: expected .*got 'gpt_neox'.*strategy=fsdp2"):
        run_ranks(build_engine_of, 1, str(tmp_path))


def build_engine_of(rank, path):
    build_engine(path, "zorro")


def lora_equals_stock(rank, path):
    """Adapter-only gradients, and the reference's log-probs with the adapter switched off."""
    engines = [build_engine(path, strategy, model={"lora_rank": 4}) for strategy in ("fsdp2", "zorro")]
    g = torch.Generator().manual_seed(2)
    prompt = tokens(9, g)
    rows = [(prompt, tokens(n, g)) for n in (4, 2, 6)]
    grads, scored = [], []
    for engine in engines:
        torch.manual_seed(0)
        with torch.no_grad():
            for name, p in engine.module.named_parameters():
                if "lora_" in name:  # B starts at zero, A at random
                    p.copy_(torch.distributed.tensor.distribute_tensor(torch.randn(p.shape), p.device_mesh))
        with engine.eval_mode(), engine.disable_adapter():
            data = verl_batch(rows, use_remove_padding=False)
            scored.append(responses(engine.infer_batch(data)["model_output"]["log_probs"], data))
        with engine.train_mode():
            engine.forward_backward_batch(verl_batch(rows, use_remove_padding=False), ppo_loss_function())
            grads.append(full_gradients(engine))
    for a, b in zip(*scored, strict=True):
        assert (a - b).abs().max() <= TOLERANCE
    assert grads[0]
    assert all("lora_" in name for name in grads[0])
    assert worst_gradient(*grads) <= TOLERANCE


@pytest.mark.slow
def test_lora_equals_stock(checkpoint):
    run_ranks(lora_equals_stock, 1, checkpoint)


def chunked_entropy_is_compute(rank, path):
    engine = build_engine(path, "zorro", engine={"entropy_from_logits_with_chunking": True})
    assert engine.options.logits_optimization == "compute"


@pytest.mark.slow
def test_verls_flag_for_chunked_entropy_is_honoured(checkpoint):
    run_ranks(chunked_entropy_is_compute, 1, checkpoint)
