"""Half precisions: errors against the stock engine in float32, and the loss scaler of float16."""

import pytest
import torch
from ranks import run_ranks
from test_features import Case, batch_of, build, folder, loss_of, observe  # noqa: F401

BF16, FP16 = ({"param_dtype": x, "reduce_dtype": "fp32", "buffer_dtype": "fp32"} for x in ("bf16", "fp16"))
PRECISIONS = {
    "mixed_precision-bf16": {"mixed_precision": BF16},
    "mixed_precision-fp16": {"mixed_precision": FP16},
    "model_dtype-bf16": {"mixed_precision": BF16, "model_dtype": "bf16"},
}


def root_mean_square(differences):
    return float(torch.cat([x.flatten().double() for x in differences]).square().mean().sqrt())


def errors(truth, seen):
    """Root mean square errors of log-probs, entropy and gradients."""
    rows = {
        key: root_mean_square(a - b for a, b in zip(truth.values[key], seen.values[key], strict=True))
        for key in truth.values
    }
    gradients = root_mean_square(truth.gradients[key] - seen.gradients[key].float() for key in truth.gradients)
    return rows | {"gradients": gradients}


def measure(rank, path):
    """The errors of both engines in every precision."""
    truth = observe(build(path, "fsdp2", Case()), Case(), rank, 1, stock=True)
    result = {}
    for name, settings in PRECISIONS.items():
        case = Case(engine=settings)
        result[name] = [
            errors(truth, observe(build(path, strategy, case), case, rank, 1, stock=strategy == "fsdp2"))
            for strategy in ("fsdp2", "zorro")
        ]
    return result


@pytest.fixture(scope="module")
def measured(folder):  # noqa: F811
    return run_ranks(measure, 1, folder)[0]


@pytest.mark.feature(
    "actor.fsdp_config.mixed_precision actor.fsdp_config.model_dtype",
    "works",
    "bfloat16 and float16, with verl's loss scaler: errors at most 1.5 times the stock engine's",
)
@pytest.mark.parametrize("name", PRECISIONS)
def test_errors_are_at_most_those_of_stock(measured, name):
    stock, zorro = measured[name]
    for quantity, error in stock.items():
        assert 0 < zorro[quantity] <= 1.5 * error, quantity


def scaled_steps(rank, path):
    """verl's scaler is for accelerators and does nothing on a CPU: one that works there takes its place."""
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    case, seen, scales = Case(), [], []
    assert type(build(path, "zorro", Case(engine={"mixed_precision": FP16})).scaler) is ShardedGradScaler
    for strategy in ("fsdp2", "zorro"):
        engine = build(path, strategy, case)
        engine.scaler = ShardedGradScaler(device="cpu", init_scale=2.0**10, growth_interval=1)
        stock = strategy == "fsdp2"
        seen.append(observe(engine, case, rank, 1, stock))
        scales.append([engine.scaler.get_scale()])
        before = {name: p.full_tensor().clone() for name, p in engine.module.named_parameters()}
        data = batch_of(case, rank, 1, stock)
        data["advantages"] = data["advantages"] * torch.nan
        with engine.train_mode():
            metrics = engine.train_batch(data, loss_of(case))["metrics"]
        assert all(torch.equal(before[name], p.full_tensor()) for name, p in engine.module.named_parameters())
        scales[-1].append(engine.scaler.get_scale())
    assert metrics["zorro/skipped_steps"] == [1]
    assert seen[1].numbers["grad_norm"] == pytest.approx(seen[0].numbers["grad_norm"], rel=2e-4)
    return max(errors(*seen).values()), scales


@pytest.mark.slow
def test_the_loss_scaler_scales_and_skips_as_in_stock(folder):  # noqa: F811
    worst, scales = run_ranks(scaled_steps, 1, folder)[0]
    assert worst <= 2e-5
    assert scales == [[2.0**11, 2.0**10]] * 2
