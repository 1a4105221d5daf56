"""Ulysses sequence parallelism: the exchanges by themselves, and engines whose rows are sliced over ranks."""

import pytest
import tiny_models
import torch
from ranks import run_ranks
from test_engine import build_engine, full_gradients
from test_engine_family import batch_of, oracle, rows_of, weighted, worst_row
from test_engine_family import responses as responses_of
from tiny import worst_gradient

from zorro_verl.sequence_parallel import Slices, check_heads

TOLERANCE = 2e-5
NAMES = ("qwen3", "qwen3_moe", "qwen3_next", "qwen3_5")
# Four query heads on two key heads, and as many heads of linear attention: whole heads for each of four ranks.
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "linear_num_value_heads": 4, "linear_num_key_heads": 2}


def items(count, *shape, seed=0):
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def exchanges(rank, size, count, multiple):
    """Attention-like work on slices: the same values, and gradients of the sum of all ranks' losses."""
    slices = Slices(count, torch.distributed.group.WORLD, multiple)
    assert slices.per_rank * size % multiple == 0
    x, kv = items(count, 8, 3).requires_grad_(), items(count, 2, 5, seed=1).requires_grad_()
    weights = items(count, 8, 3, seed=2)

    def mixed(x, kv):  # each token looks at all of them, head by head
        kv = kv.repeat_interleave(x.shape[1] // kv.shape[1], 1)
        return x.cumsum(0) * kv.sum(-1, keepdim=True).cumsum(0).flip(0)

    own, own_kv = slices.own(x, 0), slices.own(kv, 0)
    assert own.shape[0] == slices.per_rank
    heads, kv_heads = slices.to_heads(own, own_kv)
    torch.testing.assert_close(heads, slices.own_heads(x.transpose(0, 1)).transpose(0, 1), rtol=0, atol=0)
    assert kv_heads.shape[1] == max(1, 2 // size)
    out = slices.whole(slices.to_tokens(mixed(heads, kv_heads)))
    expected = mixed(x, kv)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    got = torch.autograd.grad((out * weights).sum(), (x, kv))
    truth = torch.autograd.grad((expected * weights).sum(), (x, kv))
    for a, b in zip(got, truth, strict=True):
        torch.distributed.all_reduce(a)
        torch.testing.assert_close(a / size, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", [2, 4])
def test_slices_and_heads_are_exchanged_exactly(size):
    run_ranks(all_exchanges, size, size)


def all_exchanges(rank, size):
    for count, multiple in ((0, 1), (1, 1), (7, 1), (8, 1), (13, 16), (16, 16)):
        exchanges(rank, size, count, multiple)
    # Queries of one dtype beside gates of another, as in bfloat16 training, each in an exchange of its own.
    slices = Slices(7, torch.distributed.group.WORLD)
    x, gates = items(7, 8, 3).bfloat16(), items(7, 4, seed=1)
    got = slices.to_heads(slices.own(x, 0), slices.own(gates, 0))
    for whole, heads in zip((x, gates), got, strict=True):
        assert heads.dtype == whole.dtype
        assert torch.equal(heads, slices.own_heads(whole.transpose(0, 1)).transpose(0, 1))
    with pytest.raises(ValueError, match="ulysses_sequence_parallel_size.*divisor of 3"):
        Slices(8, torch.distributed.group.WORLD).to_heads(torch.ones(8 // size, 3, 2))


def test_one_rank_pads_and_drops_by_itself():
    slices, x = Slices(5, None, 4), items(5, 2, 3)
    assert torch.equal(slices.own(x, 0), torch.cat([x, x[-1:], x[-1:], x[-1:]]))
    (heads,) = slices.to_heads(slices.own(x, 0))
    assert torch.equal(heads, x)
    assert torch.equal(slices.to_tokens(x), torch.cat([x, torch.zeros(3, 2, 3)]))
    assert torch.equal(slices.whole(slices.own(x, 0)), x)
    whole = Slices(5)
    assert whole.own(x, 0) is x
    assert whole.to_tokens(x) is x


def test_heads_that_do_not_divide_are_refused():
    check_heads("key", 4, {"num_attention_heads": 8, "num_key_value_heads": 2})
    for name, count in (("num_attention_heads", 6), ("num_key_value_heads", 3), ("linear_num_value_heads", 2)):
        with pytest.raises(ValueError, match=f"key: expected a divisor.*{count}, the model's {name}, got 4"):
            check_heads("key", 4, {name: count})


def scaled_loss(model_output, data, dp_group=None):
    """FSDP takes the mean over all ranks; those of one sequence have the same loss, and count once."""
    values = [responses_of(model_output[key], data) for key in ("log_probs", "entropy")]
    return weighted(*values, data) * data["dp_size"], {}


def sliced_engines(rank, paths, size, checkpointing):
    """Every model, its rows sliced over ``size`` ranks, against the plain model on one unpadded row at a time."""
    from zorro_verl.families import auto_class
    from zorro_verl.options import ZorroOptions

    replicas = torch.distributed.get_world_size() // size
    replica = rank // size
    expected = {}
    for name, path in paths.items():
        rows = rows_of(name, replica)
        data = batch_of(name, rows, seed=replica)
        config = tiny_models.AutoConfig.from_pretrained(path)
        plain = auto_class(config).from_pretrained(path, dtype=torch.float32)
        log_probs, entropies, grads = oracle(name, rows, data, plain)
        expected[name] = rows, data, (log_probs, entropies, {k: g / size for k, g in grads.items()})
    for name, path in paths.items():
        rows, data, truth = expected[name]
        for options in (ZorroOptions(), ZorroOptions(use_split_attention=False, logits_optimization="memory")):
            parallel = {"ulysses_sequence_parallel_size": size}
            engine = build_engine(path, "zorro", checkpointing, zorro=options, engine=parallel)
            assert engine.get_data_parallel_size() == replicas
            with engine.eval_mode():
                output = engine.infer_batch(batch_of(name, rows, seed=replica))
            assert worst_row(truth, output["model_output"], data) <= TOLERANCE, (name, options)
            assert output["metrics"]["zorro/tokens_packed"][0] < output["metrics"]["zorro/tokens_total"][0]
            with engine.train_mode():
                engine.optimizer_zero_grad()
                cut = batch_of(name, rows, seed=replica, max_token_len_per_gpu=160 // size)
                engine.forward_backward_batch(cut, scaled_loss)
                grads = full_gradients(engine)
                metrics = engine.train_batch(cut, scaled_loss)["metrics"]
            assert worst_gradient(truth[2], grads) <= TOLERANCE, (name, options)
            norm = torch.stack([g.norm() for g in truth[2].values()]).norm()
            assert ("grad_norm" in metrics) == (rank % size == 0)
            assert metrics.get("grad_norm", norm) == pytest.approx(float(norm), rel=TOLERANCE)
            if name not in ("qwen3", "qwen3_next"):
                break


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    paths = {name: str(tmp_path_factory.mktemp(name)) for name in NAMES}
    for name, path in paths.items():
        tiny_models.build(name, torch.float32, **HEADS).save_pretrained(path)
    return paths


@pytest.mark.feature(
    "actor.ulysses_sequence_parallel_size actor.fsdp_config.ulysses_sequence_parallel_size",
    "works",
    "a divisor of the model's heads; compared with the plain model, on 2 and 4 ranks",
)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "size", "checkpointing", "names"),
    [(2, 2, False, NAMES), (4, 2, True, ("qwen3", "qwen3_5")), (4, 4, False, NAMES[:3])],
)
def test_sliced_rows_equal_the_plain_model(checkpoints, world_size, size, checkpointing, names):
    paths = {name: checkpoints[name] for name in names}
    run_ranks(sliced_engines, world_size, paths, size, checkpointing, timeout=300)
