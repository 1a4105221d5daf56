"""Groups whole in what verl's own code hands out: both trainers, padding rows, a critic, and shuffled mini-batches."""

import inspect
import json
import logging
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
from omegaconf import OmegaConf
from tiny import jagged, verl_batch
from tiny_run import logged_steps, make_material, overrides, run_trainer

from zorro_verl.batching import place_groups
from zorro_verl.options import ZorroOptions


def prompts_of(sizes, length=6):
    """Rows of distinct prompts, one prompt's rows after the other, as a sampler hands them over."""
    return [torch.arange(length + g % 3) * 7 + g for g, size in enumerate(sizes) for _ in range(size)]


def config(mini_batch, strategy="zorro", critic=None):
    return OmegaConf.create(
        {
            "actor_rollout_ref": {
                "actor": {"strategy": strategy, "ppo_mini_batch_size": mini_batch},
                "rollout": {"n": 4},
            },
            "critic": {"strategy": "zorro", "ppo_mini_batch_size": critic or mini_batch},
            "trainer": {"critic_warmup": 0},
        }
    )


def trainer_of(cls, settings, ranks, critic_ranks=None):
    """A trainer of verl's without workers: two of them for each data-parallel rank, as with sequence parallelism."""
    trainer = object.__new__(cls)
    trainer.config, trainer.global_steps, trainer.use_critic = settings, 1, critic_ranks is not None
    group = lambda mesh, n: SimpleNamespace(  # noqa: E731
        _dispatch_info={}, _query_dispatch_info=lambda name: {mesh: [w // 2 for w in range(2 * n)]}[name]
    )
    trainer.actor_rollout_wg = group("actor", ranks)
    trainer.critic_wg = group("train", critic_ranks or ranks)
    trainer.tokenizer = SimpleNamespace(eos_token_id=0)
    return trainer


class Store:
    """TransferQueue's calls that verl's balancing makes, over a dict."""

    def __init__(self, prompts, keys):
        self.rows = {key: {"prompts": p} for key, p in zip(keys, prompts, strict=True)}

    def kv_batch_get(self, keys, partition_id, select_fields=None):
        if select_fields is None:
            return [self.rows[key] for key in keys]
        return {"prompts": jagged([self.rows[key]["prompts"] for key in keys])}

    def kv_batch_put(self, keys, partition_id, fields, tags):
        self.rows |= {key: {"prompts": p} for key, p in zip(keys, fields["prompts"].unbind(), strict=True)}


def balanced(
    monkeypatch, prompts, settings, ranks, critic_ranks=None, response=lambda i: 3 + i % 5, mode="Sync", keys=None
):
    """Rows (or ``pad...`` keys) in the order in which ``_balance_batch`` leaves them, and its metrics."""
    from transfer_queue import KVBatchMeta
    from verl.trainer.ppo import padding_utils
    from verl.trainer.ppo.v1 import trainer_base, trainer_colocate_async, trainer_separate_async, trainer_sync

    modules = {"Sync": trainer_sync, "ColocateAsync": trainer_colocate_async, "SeparateAsync": trainer_separate_async}
    keys = keys or [f"{i}_0_0" for i in range(len(prompts))]
    store = Store(prompts, keys)
    for module in (trainer_base, padding_utils):
        monkeypatch.setattr(module, "tq", store)
    tags = [{"seq_len": len(p) + response(i), "prompt_len": len(p)} for i, p in enumerate(prompts)]
    batch = KVBatchMeta(partition_id="train", keys=list(keys), tags=tags)
    trainer = trainer_of(getattr(modules[mode], f"PPOTrainer{mode}"), settings, ranks, critic_ranks)
    metrics = {}
    batch = trainer._balance_batch(batch, metrics)
    rows = [key if key.startswith("pad") else keys.index(key) for key in batch.keys]
    for row, tag in zip(rows, batch.tags, strict=True):
        assert tag == tags[row] if isinstance(row, int) else tag["is_padding"], "a tag left its row"
    return rows, metrics


def legacy_balanced(prompts, settings, ranks, critic_ranks=None, response=lambda i: 3 + i % 5, uids=None):
    from verl import DataProto
    from verl.experimental.separation.ray_trainer import SeparateRayPPOTrainer

    width = max(map(len, prompts))
    mask = torch.zeros(len(prompts), width + 8, dtype=torch.int64)
    padded = torch.zeros(len(prompts), width, dtype=torch.int64)
    for i, prompt in enumerate(prompts):
        padded[i, width - len(prompt) :] = prompt
        mask[i, width - len(prompt) : width + response(i)] = 1
    columns = {"prompts": padded, "attention_mask": mask, "row": torch.arange(len(prompts))}
    batch = DataProto.from_single_dict(columns | ({"uid": numpy.array(uids, dtype=object)} if uids else {}))
    metrics = {}
    trainer_of(SeparateRayPPOTrainer, settings, ranks, critic_ranks)._balance_batch(batch, metrics)
    assert torch.equal(batch.batch["prompts"], padded[batch.batch["row"]])
    return batch.batch["row"].tolist(), metrics


def cells(rows, ranks, mini_batches):
    size = len(rows) // (ranks * mini_batches)
    return [rows[i : i + size] for i in range(0, len(rows), size)]


def pieces(sizes, parts):
    """Into how many parts each group was put."""
    group_of = [g for g, size in enumerate(sizes) for _ in range(size)]
    met = [{group_of[row] for row in part if isinstance(row, int)} for part in parts]
    return [sum(g in groups for groups in met) for g in range(len(sizes))]


@pytest.mark.parametrize("mode", ["Sync", "ColocateAsync", "SeparateAsync"])
def test_equal_groups_stay_whole(monkeypatch, mode):
    """Sixteen groups of four over four ranks and two mini-batches; verl's own order tears nearly all of them."""
    sizes = [4] * 16
    rows, metrics = balanced(monkeypatch, prompts_of(sizes), config(8), ranks=4, mode=mode)
    assert sorted(rows) == list(range(64))
    assert pieces(sizes, cells(rows, 4, 2)) == [1] * 16
    first = {row // 4 for part in cells(rows, 4, 2)[::2] for row in part}
    assert first == set(range(8)), "the groups that were sampled first are the first mini-batch"
    assert metrics["global_seqlen/balanced_max"] >= metrics["global_seqlen/balanced_min"]
    torn, _ = balanced(monkeypatch, prompts_of(sizes), config(8, strategy="fsdp2"), ranks=4, mode=mode)
    assert sum(pieces(sizes, cells(torn, 4, 2))) > 32, "with another strategy verl's order stands"


def test_the_legacy_trainer_and_those_made_from_it_keep_groups_whole():
    sizes = [4] * 16
    rows, metrics = legacy_balanced(prompts_of(sizes), config(8), ranks=4)
    assert sorted(rows) == list(range(64))
    assert pieces(sizes, cells(rows, 4, 2)) == [1] * 16
    assert {row // 4 for part in cells(rows, 4, 2)[::2] for row in part} == set(range(8))
    assert metrics["global_seqlen/balanced_max"] >= metrics["global_seqlen/balanced_min"]
    torn, _ = legacy_balanced(prompts_of(sizes), config(8, strategy="fsdp2"), ranks=4)
    assert sum(pieces(sizes, cells(torn, 4, 2))) > 32


def with_an_id(num_rows):
    """Rows of one prompt, but for its third token."""
    return [torch.cat((torch.arange(2), torch.tensor([50 + i]), torch.arange(3, 40))) for i in range(num_rows)]


def test_prompts_that_differ_where_they_should_not_are_said_once(monkeypatch, caplog):
    """By verl's ids of the prompts that were drawn, in both trainers; in V1 a key has them, and which output it is."""
    with caplog.at_level(logging.WARNING, "zorro_verl"):
        balanced(monkeypatch, with_an_id(8), config(2), 2, keys=[f"id{i // 4}_{i % 4}_0" for i in range(8)])
        legacy_balanced(with_an_id(8), config(2), 2, uids=[f"id{i // 4}" for i in range(8)])
    texts = [record.getMessage() for record in caplog.records if record.name.startswith("zorro_verl")]
    assert len(texts) == 2
    assert all("of 40 and 40 tokens, differ from token 3 on" in text for text in texts)
    assert all(f"token ratio of {1.0:.2f}, and {(320 + 37) / (80 + 37):.2f} if rows" in text for text in texts)


def test_prompts_that_have_reason_to_differ_are_not(monkeypatch, caplog):
    """Rows that share as they should, one row each of a prompt, later outputs of a session, keys of another kind."""
    whole = [prompt for prompt in with_an_id(2) for _ in range(4)]
    with caplog.at_level(logging.WARNING, "zorro_verl"):
        balanced(monkeypatch, whole, config(2), 2, keys=[f"id{i // 4}_{i % 4}_0" for i in range(8)])
        balanced(monkeypatch, with_an_id(8), config(2), 2, keys=[f"id{i}_0_0" for i in range(8)])
        balanced(monkeypatch, with_an_id(8), config(2), 2, keys=[f"id_0_{i + 1}" for i in range(8)])
        balanced(monkeypatch, with_an_id(8), config(2), 2, keys=[f"row{i}" for i in range(8)])
        legacy_balanced(whole, config(2), 2, uids=[f"id{i // 4}" for i in range(8)])
        legacy_balanced(with_an_id(8), config(2), 2)
    assert not [record for record in caplog.records if record.name.startswith("zorro_verl")]


def test_no_trainer_of_verls_brings_a_balance_of_its_own():
    """What would pass by the wraps: an override in a subclass."""
    from verl.experimental.fully_async_policy import fully_async_trainer
    from verl.experimental.one_step_off_policy import ray_trainer
    from verl.experimental.separation import ray_trainer as separation
    from verl.trainer.ppo.v1 import trainer_colocate_async, trainer_separate_async, trainer_sync

    for module in (
        fully_async_trainer,
        ray_trainer,
        separation,
        trainer_sync,
        trainer_colocate_async,
        trainer_separate_async,
    ):
        assert "def _balance_batch" not in inspect.getsource(module)


@pytest.mark.parametrize("ranks", [1, 2])
def test_padding_rows_fill_the_gaps_and_every_mini_batch_has_something_to_learn(monkeypatch, ranks):
    """Nine prompts where the critic's mini-batches ask for thirty-two rows: verl adds 28 rows of padding."""
    sizes = [4] * 9
    rows, _ = balanced(monkeypatch, prompts_of(sizes), config(4, critic=8), ranks, critic_ranks=ranks)
    assert len(rows) == 64
    assert sorted(row for row in rows if isinstance(row, int)) == list(range(36))
    parts = cells(rows, ranks, 4)
    assert pieces(sizes, parts) == [1] * 9
    real = [sum(isinstance(row, int) for part in parts[m::4] for row in part) for m in range(4)]
    assert sorted(real) == [8, 8, 8, 12]


@pytest.mark.parametrize(
    ("ranks", "mini_batches", "cell", "sizes"), [(1, 3, 5, [1, 2, 3]), (2, 2, 4, [3, 4]), (3, 3, 12, [1, 4, 5, 6])]
)
def test_no_mini_batch_is_padding_alone(ranks, mini_batches, cell, sizes):
    groups = [g for g, size in enumerate(sizes) for _ in range(size)]
    num_rows = ranks * mini_batches * cell
    fillers = list(range(len(groups), num_rows))
    groups += [len(sizes)] * len(fillers)
    order = place_groups(groups, [9] * num_rows, [1] * num_rows, ranks, mini_batches, fillers)
    parts = torch.tensor(order).view(ranks, mini_batches, cell).transpose(0, 1).flatten(1)
    assert sorted(order) == list(range(num_rows))
    assert all((part < fillers[0]).any() for part in parts)


def test_ragged_groups_are_cut_as_seldom_as_can_be(monkeypatch):
    """What filters and partial rollouts leave; and a count that doesn't divide, which verl pads."""
    sizes = [1, 4, 2, 3, 4, 4, 1, 3, 2, 4, 4, 3, 1, 4]  # 40 rows, four cells of 12 with eight of padding
    for ranks, mini_batches in ((4, 1), (2, 2), (1, 2)):
        rows, _ = balanced(monkeypatch, prompts_of(sizes), config(12 // mini_batches), ranks)
        assert len(rows) == 48
        assert pieces(sizes, cells(rows, ranks, mini_batches)) == [1] * 14
    rows, _ = legacy_balanced(prompts_of(sizes), config(10), ranks=4)
    assert pieces(sizes, cells(rows, 4, 1)) == [1] * 14


@pytest.mark.parametrize(
    ("critic_mini_batch", "critic_ranks", "slices"),
    [
        pytest.param(4, 4, 4, id="finer-than-the-actors"),
        pytest.param(16, 4, 2, id="coarser"),
        pytest.param(8, 2, 2, id="on-fewer-ranks"),
        pytest.param(8, 8, 4, id="on-more-ranks"),
    ],
)
def test_the_critics_mini_batches_keep_groups_whole_as_well(critic_mini_batch, critic_ranks, slices):
    """Its chunks are those of its own data-parallel ranks.

    Groups of three and of one: rows in order of size, as they were placed, a finer slice would cut.
    """
    sizes = [3, 1] * 16
    settings = config(8, critic=critic_mini_batch)
    rows, _ = legacy_balanced(prompts_of(sizes), settings, ranks=4, critic_ranks=critic_ranks)
    assert pieces(sizes, cells(rows, 4, 2)) == [1] * 32
    critic_slices = 64 // (critic_mini_batch * 4)
    assert pieces(sizes, cells(rows, critic_ranks, critic_slices)) == [1] * 32
    assert pieces(sizes, cells(rows, 4, slices)) == [1] * 32


# Shuffled mini-batches.


class Engine:
    """What verl's worker asks of an engine, here one that writes down what it is handed."""

    def __init__(self, options, rank=0, ranks=1):
        if options is not None:
            self.options = options
        self.rank, self.ranks, self.seen = rank, ranks, []

    def get_data_parallel_rank(self):
        return self.rank

    def get_data_parallel_size(self):
        return self.ranks

    def get_data_parallel_group(self):
        return None

    def is_mp_src_rank_with_outputs(self):
        return False

    def train_mode(self, **kwargs):
        import contextlib

        return contextlib.nullcontext()


def shuffled_mini_batches(monkeypatch, sizes, mini_batch_size, engine, epochs=2, shuffle=True, seed=1, rows=None):
    """Rows of each mini-batch that verl's own ``TrainingWorker.train_mini_batch`` walks through."""
    from verl.utils import tensordict_utils as tu
    from verl.workers import engine_workers

    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: 1)
    monkeypatch.setattr(
        torch.distributed, "all_gather_object", lambda out, value, group=None: out.__setitem__(0, value)
    )
    prompts = prompts_of(sizes)
    data = verl_batch([(p, torch.full((1 + i % 3,), 5)) for i, p in enumerate(prompts)] if rows is None else rows)
    data["row"] = torch.arange(len(data))
    settings = {"mini_batch_size": mini_batch_size, "epochs": epochs, "seed": seed}
    tu.assign_non_tensor(data, **settings, dataloader_kwargs={"shuffle": shuffle})
    worker = object.__new__(engine_workers.TrainingWorker)
    worker.engine, worker.profiler = engine, SimpleNamespace(step=lambda: None)
    seen = []
    worker.train_batch = lambda part: seen.append(part["row"].tolist())
    engine_workers.TrainingWorker.train_mini_batch(worker, data)
    return seen


@pytest.mark.feature("actor.shuffle actor.data_loader_seed", "works", "whole groups are drawn, anew in each epoch")
def test_shuffle_draws_whole_groups_anew_each_epoch(monkeypatch):
    sizes = [4] * 12
    draw = lambda **kwargs: shuffled_mini_batches(monkeypatch, sizes, 8, Engine(ZorroOptions()), **kwargs)  # noqa: E731
    seen = draw()
    assert [len(part) for part in seen] == [8] * 12
    for epoch in (seen[:6], seen[6:]):
        assert sorted(row for part in epoch for row in part) == list(range(48))
        assert pieces(sizes, epoch) == [1] * 12
    together = [{frozenset(row // 4 for row in part) for part in epoch} for epoch in (seen[:6], seen[6:])]
    assert together[0] != together[1], "epochs differ"
    assert [row for part in seen for row in part][:48] != list(range(48)), "shuffled"
    assert draw() == seen, "the seed decides"
    assert draw(seed=2) != seen
    other_rank = Engine(ZorroOptions(), rank=1)
    assert shuffled_mini_batches(monkeypatch, sizes, 8, other_rank) == draw(seed=2), "as in verl: seed + rank"


def test_every_group_meets_every_mini_batch(monkeypatch):
    """Over 60 epochs the group that came first lands in each of three mini-batches about as often."""
    seen = shuffled_mini_batches(monkeypatch, [4] * 6, 8, Engine(ZorroOptions()), epochs=60)
    where = [next(m for m in range(3) if 0 in seen[3 * epoch + m]) for epoch in range(60)]
    assert all(10 <= where.count(m) <= 30 for m in range(3))


def test_shuffle_with_ragged_groups_keeps_mini_batches_equal_and_cuts_little(monkeypatch):
    sizes = [5, 3, 4, 4, 2, 6, 1, 7, 8, 3, 3, 2]  # six mini-batches of eight, all of whole groups
    seen = shuffled_mini_batches(monkeypatch, sizes, 8, Engine(ZorroOptions()), epochs=4)
    assert [len(part) for part in seen] == [8] * 24
    for epoch in (seen[i : i + 6] for i in range(0, 24, 6)):
        assert sorted(row for part in epoch for row in part) == list(range(48))
        assert pieces(sizes, epoch) == [1] * 12
    sizes = [3, 2] * 4
    seen = shuffled_mini_batches(monkeypatch, sizes, 10, Engine(ZorroOptions(), ranks=2), epochs=3)
    assert [len(part) for part in seen] == [5] * 12, "ranks share a mini-batch"
    assert all(pieces(sizes, seen[i : i + 4]) == [1] * 8 for i in (0, 4, 8))
    seen = shuffled_mini_batches(monkeypatch, [3, 3, 3, 3], 4, Engine(ZorroOptions()), epochs=3)
    assert all(sum(pieces([3] * 4, seen[i : i + 3])) == 6 for i in (0, 3, 6)), "two cuts have to be"


def test_shuffle_is_verls_for_other_engines_and_off_when_it_is_off(monkeypatch):
    sizes = [4] * 12
    stock = shuffled_mini_batches(monkeypatch, sizes, 8, Engine(None))
    assert sum(pieces(sizes, stock[:6])) > 30
    reference = torch.utils.data.DataLoader(
        torch.arange(48), batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(1)
    )
    assert stock == [part.tolist() for _ in range(2) for part in reference]
    in_order = shuffled_mini_batches(monkeypatch, sizes, 8, Engine(ZorroOptions()), epochs=1, shuffle=False)
    assert [row for part in in_order for row in part] == list(range(48))


def test_rows_that_the_engine_refuses_reach_the_engine(monkeypatch):
    """It refuses them on all ranks together; an error before would leave the other ranks waiting."""
    prompt = torch.arange(5)
    rows = [(prompt, torch.ones(2).long()), (prompt[:0], torch.ones(3).long())] * 4
    seen = shuffled_mini_batches(monkeypatch, [], 2, Engine(ZorroOptions()), epochs=1, rows=rows)
    assert sorted(row for part in seen for row in part) == list(range(8))


def test_the_worker_is_registered_with_verl_as_before():
    """Dispatch goes by attributes of the method, and what comes over the wire becomes rows before the wrap sees it."""
    from verl.single_controller.base.decorator import MAGIC_ATTR
    from verl.workers.engine_workers import TrainingWorker

    method = TrainingWorker.train_mini_batch
    assert method.__name__ == "train_mini_batch"
    assert method.wrapped_by_zorro
    assert set(getattr(method, MAGIC_ATTR)) == {"dispatch_mode", "execute_mode", "blocking"}
    layer = method
    while hasattr(layer, "__wrapped__"):
        layer = layer.__wrapped__
        assert getattr(layer, MAGIC_ATTR, getattr(method, MAGIC_ATTR)) == getattr(method, MAGIC_ATTR)
    assert "engine_workers" in layer.__code__.co_filename
    assert not getattr(method, MAGIC_ATTR)["blocking"]


# The figures in the documentation.


def test_the_recorded_figures_are_those_of_the_simulation():
    """A slice of it, drawn and placed again; the rest is the same code with more steps."""
    import simulate_placement

    record = json.loads((Path(__file__).parent.parent / "docs" / "results" / "placement.json").read_text())
    assert record["slice"]["results"] == simulate_placement.run(record["slice"]["steps"])[0]
    assert record["steps"] == 1000
    for rows in record["results"].values():
        assert [row["ranks"] for row in rows] == list(simulate_placement.RANKS)
        for row in rows:
            ratio = row["token_ratio"]
            assert ratio["placed_by_group"] <= ratio["no_group_cut"]
            assert ratio["verl"] < ratio["placed_by_group"] or row["ranks"] == 1
    equal = record["results"]["equal groups"]
    assert all(row["token_ratio"]["placed_by_group"] == row["token_ratio"]["no_group_cut"] for row in equal)


@pytest.mark.ray
@pytest.mark.timeout(400)
@pytest.mark.parametrize("use_v1", [True, False])
def test_shuffled_epochs_of_a_real_run_cut_no_group(tmp_path, use_v1):
    make_material(tmp_path)
    arguments = [
        *overrides(tmp_path, "zorro"),
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.actor.ppo_epochs=2",
        "actor_rollout_ref.actor.shuffle=True",
        "data.train_batch_size=8",
        f"trainer.use_v1={use_v1}",
    ]
    code, output = run_trainer(arguments, tmp_path, timeout=360)
    assert code == 0, output[-4000:]
    steps = [step for step in logged_steps(output) if "zorro/token_ratio" in step]
    assert len(steps) == 2, output[-4000:]
    for step in steps:
        assert step["zorro/groups"] == 16, "eight in each epoch"
        assert step["zorro/groups_split"] == 0
        assert step["zorro/token_ratio"] == pytest.approx(step["zorro/token_ratio_best"])
