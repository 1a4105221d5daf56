"""Asynchronous trainers: weights set aside and taken back by verl's own worker, counts of several updates."""

import types

import pytest
import torch
from omegaconf import OmegaConf
from ranks import run_ranks
from test_features import Case, batch_of, build, folder, loss_of  # noqa: F401


def worker_of(engine, strategy):
    """verl's worker as far as it sets weights aside; it is made by Ray, with much else."""
    from verl.experimental.separation.engine_workers import DetachActorWorker

    worker = object.__new__(DetachActorWorker)
    worker.config, worker._strategy_handlers = OmegaConf.create({"actor": {"strategy": strategy}}), None
    worker.actor = types.SimpleNamespace(engine=engine)
    return worker


def a_step_of_two_updates(rank, path, world_size):
    """As the trainer does it: the rows of the second update are scored with the weights before the first."""
    case = Case(engine={"param_offload": True})
    engine = build(path, "zorro", case)
    worker = worker_of(engine, "zorro")

    def weights():
        return {name: p.full_tensor().clone() for name, p in engine.module.named_parameters()}

    def update():
        with engine.train_mode():
            engine.train_batch(batch_of(case, rank, world_size, False), loss_of(case))

    first = weights()
    worker.save_model_to_cpu(0)
    update()
    second = weights()
    assert any(not torch.equal(first[name], second[name]) for name in first)
    for _ in range(2):
        worker.save_model_to_cpu(1)
        worker.restore_model_from_cpu(0)
        assert all(torch.equal(first[name], p) for name, p in weights().items())
        worker.restore_model_from_cpu(1)
        assert all(torch.equal(second[name], p) for name, p in weights().items())
        worker.clear_cpu_model(1)
    update()
    worker.restore_model_from_cpu(0)
    assert all(torch.equal(first[name], p) for name, p in weights().items())
    for strategy in ("fsdp2", "fsdp"):
        handlers = [handler.__module__ for handler in worker_of(engine, strategy)._get_strategy_handlers()]
        assert handlers == ["verl.utils.fsdp_utils"] * 2
    with pytest.raises(NotImplementedError, match="nonesuch"):
        worker_of(engine, "nonesuch")._get_strategy_handlers()


@pytest.mark.feature(
    "trainer.v1.trainer_mode",
    "works",
    "`sync`, `colocate_async` and `separate_async`, each in whole runs on CPUs",
)
@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_weights_are_set_aside_and_taken_back(folder, world_size):  # noqa: F811
    run_ranks(a_step_of_two_updates, world_size, folder, world_size)


def test_the_handlers_of_fsdp1_are_verls():
    from verl.utils.fsdp_utils import fsdp1_sharded_load_from_cpu, fsdp1_sharded_save_to_cpu

    from zorro_verl.detach import weight_handlers

    assert weight_handlers("fsdp") == (fsdp1_sharded_save_to_cpu, fsdp1_sharded_load_from_cpu)


def two_updates(aggregator, **more):
    """A step of two updates, as its trainer hands them over."""
    updates = [
        {"zorro/tokens_total": 90.0, "zorro/tokens_packed": 30.0, "zorro/token_ratio": 3.0, "zorro/groups": 4.0},
        {"zorro/tokens_total": 20.0, "zorro/tokens_packed": 20.0, "zorro/token_ratio": 1.0, "zorro/groups": 2.0},
    ]
    ratios = [
        {"zorro/token_ratio_best": 3.0, "zorro/ref/token_ratio": 2.0, "zorro/flop_ratio": 4.0},
        {"zorro/token_ratio_best": 2.0, "zorro/ref/token_ratio": 4.0, "zorro/flop_ratio": 2.0},
    ]
    others = {"zorro/fallback/group_cut": 1.0, "zorro/values/token_ratio": 2.0, "actor/loss": 5.0}
    for metrics in (counts | ratio for counts, ratio in zip(updates, ratios, strict=True)):
        aggregator.add_step_metrics(metrics | others | more, sample_count=8)
    return aggregator.get_aggregated_metrics()


ADDED = {
    "zorro/tokens_total": 110.0,
    "zorro/tokens_packed": 50.0,
    "zorro/token_ratio": 2.2,
    "zorro/groups": 6.0,
    "zorro/fallback/group_cut": 2.0,
    "zorro/token_ratio_best": 110 / (30 + 10),
    "zorro/ref/token_ratio": 110 / (45 + 5),
    "zorro/values/token_ratio": 2.0,
    "zorro/flop_ratio": 3.0,
    "actor/loss": 5.0,
}


def test_counts_of_several_updates_are_added():
    import verl.trainer.ppo.v1.trainer_base  # noqa: F401  as in the task runner
    from verl.trainer.ppo.v1.utils import MetricsAggregator

    assert two_updates(MetricsAggregator()) == ADDED
    stock = MetricsAggregator()
    stock.add_step_metrics({"actor/loss": 5.0})
    assert stock.get_aggregated_metrics() == {"actor/loss": 5.0}


def test_ratios_of_a_step_that_trained_no_actor_are_averages():
    """While `critic_warmup` lasts, there are no tokens of an update to weigh them by."""
    import verl.trainer.ppo.v1.trainer_base  # noqa: F401
    from verl.trainer.ppo.v1.utils import MetricsAggregator

    aggregator = MetricsAggregator()
    for ratio in (2.0, 4.0):
        aggregator.add_step_metrics({"zorro/values/token_ratio": ratio}, sample_count=8)
    assert aggregator.get_aggregated_metrics() == {"zorro/values/token_ratio": 3.0}


@pytest.mark.slow
def test_counts_of_a_fully_asynchronous_step_are_added():
    """There verl makes the throughput of the step from its tokens and its time, and so is the executed one."""
    from verl.experimental.fully_async_policy.detach_utils import MetricsAggregator

    perf = {"perf/throughput": 7.0, "perf/total_num_tokens": 110.0, "perf/time_per_step": 5.0}
    metrics = two_updates(MetricsAggregator(total_gpus=2), **perf, **{"zorro/throughput_executed": 3.0})
    throughput = {"perf/throughput": 220 / (10 * 2), "perf/total_num_tokens": 220.0, "perf/time_per_step": 10.0}
    assert metrics == ADDED | throughput | {"zorro/throughput_executed": pytest.approx(11 / 2.2)}
    stock = MetricsAggregator(total_gpus=2)
    stock.add_step_metrics({"actor/loss": 5.0}, sample_count=8)
    assert stock.get_aggregated_metrics() == {"actor/loss": 5.0}


def test_ratios_that_some_updates_lack_and_utilisations_stay_averages():
    from zorro_verl.update_counts import total_counts

    values = {"zorro/tokens_total": [90.0, 20.0], "zorro/token_ratio": [3.0, 1.0], "zorro/mfu_executed": [0.4, 0.2]}
    lacking = {"zorro/ref/token_ratio": [2.0], "zorro/token_ratio_best": [2.0]}
    assert total_counts(values | lacking) == {"zorro/tokens_total": 110.0, "zorro/token_ratio": 110.0 / 50.0}
