"""Engine against engine: verl's stock fsdp2 and zorro on the same batch."""

import copy
from functools import partial

import pytest
import torch
from ranks import run_ranks
from tiny import shuffled, tiny_model, tokens, verl_batch

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
        use_remove_padding=False,
        enable_gradient_checkpointing=checkpointing,
        override_config={"attn_implementation": "sdpa"} if stock else {},
        **model or {},
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


def ppo_loss_function():
    from verl.workers.config import FSDPActorConfig
    from verl.workers.utils.losses import ppo_loss

    config = FSDPActorConfig(
        strategy="fsdp2", rollout_n=4, ppo_micro_batch_size_per_gpu=2, entropy_coeff=0.01, use_kl_loss=True
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


def compare_engines(rank, path, world_size, checkpointing, settings):
    rows = local_rows(ragged_batch(), rank, world_size)
    build = partial(build_engine, path, checkpointing=checkpointing)
    stock, zorro = build("fsdp2"), build("zorro")
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
        pytest.param(2, False, {"max_token_len_per_gpu": 40}, id="two-ranks-groups-cut-by-the-budget"),
        pytest.param(1, True, {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 1}, id="fixed-size-one"),
    ],
)
def test_zorro_equals_stock(checkpoint, world_size, checkpointing, settings):
    run_ranks(compare_engines, world_size, checkpoint, world_size, checkpointing, settings)
