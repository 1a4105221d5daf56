"""What sharing gives, predicted: by hand, against the engine's own counts, and against both placements."""

import builtins
import random

import pytest
import torch
from tiny import flat_rows, tiny_model
from torch.utils.flop_counter import FlopCounterMode
from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions

from zorro_verl.batching import place_groups
from zorro_verl.flops import ModelWork
from zorro_verl.heads import SharedPrompt
from zorro_verl.known_models import config_of
from zorro_verl.media import Media
from zorro_verl.memory import activation_memory, scoring_memory
from zorro_verl.micro_batches import MicroBatches
from zorro_verl.models import install
from zorro_verl.packing import build_plan
from zorro_verl.prediction import RowLengths, Speed, predict

CONFIG = tiny_model("qwen3").config
MODEL = ModelWork.of(CONFIG)
LAYERS = MODEL._replace(head=0)


def ragged(seed, prompts=12, shuffled=False):
    """Groups of 1 to 6 rows."""
    rng = random.Random(seed)
    rows = []
    for group in range(prompts):
        prompt = rng.randint(5, 300)
        rows += [(group, prompt, rng.randint(0, 80)) for _ in range(rng.randint(1, 6))]
    if shuffled:
        rng.shuffle(rows)
    return RowLengths(*map(list, zip(*rows, strict=True)))


def engine_batch(lengths):
    """Rows of these lengths as the engine looks at them: random tokens, a prompt of its own for each group."""
    g = torch.Generator().manual_seed(0)
    prompts = {}
    rows = []
    for group, prompt, response in zip(lengths.groups, lengths.prompts, lengths.responses, strict=True):
        if group not in prompts:
            prompts[group] = torch.cat([torch.tensor([group + 1]), torch.randint(1, 50, (prompt - 1,), generator=g)])
        rows.append((prompts[group], torch.randint(1, 50, (response,), generator=g)))
    flat = flat_rows(rows)
    return MicroBatches(flat, Media([None] * len(rows), None))


def test_one_group_by_hand():
    """A prompt of 10 tokens with responses of 4 and 6, on one rank: 30 tokens of rows, 20 packed."""
    rows = RowLengths([0, 0], [10, 10], [4, 6])
    found = predict(CONFIG, rows, ranks=1, budget=100, checkpointing=True)
    assert (rows.tokens, rows.packed, rows.token_ratio) == (30, 20, 1.5)
    work = LAYERS.of_groups([(10, [4, 6])])
    stock, shared = (work.counted, MODEL.head * 30), (work.executed, MODEL.head * 10)
    assert found.stock.log_prob[:6] == (30, sum(stock), sum(stock), 2, 1, 1)
    assert found.group_placed.log_prob[:6] == (20, sum(shared), sum(shared), 1, 0, 1)
    assert found.stock.update.work == 4 * stock[0] + 3 * stock[1]
    assert found.group_placed.update.work == 4 * shared[0] + 3 * shared[1]
    assert found.row_placed == found.group_placed, "there is one rank"
    assert found.speedup(found.stock) == (1, 1)
    speedup = found.speedup(found.group_placed)
    assert speedup.log_prob == sum(stock) / sum(shared)
    assert speedup.update == (4 * stock[0] + 3 * stock[1]) / (4 * shared[0] + 3 * shared[1]) != speedup.log_prob
    assert found.token_ratio(found.group_placed) == (1.5, 1.5)


@pytest.mark.parametrize(
    ("options", "layers", "head"),
    [
        ({"checkpointing": False}, 3, 3),
        ({"checkpointing": True}, 4, 3),
        ({"checkpointing": True, "logits_optimization": "compute"}, 4, 3),
        ({"checkpointing": True, "logits_optimization": "memory"}, 4, 4),
    ],
)
def test_what_an_update_computes_again(options, layers, head):
    found = predict(CONFIG, RowLengths([0, 0], [10, 10], [4, 6]), ranks=1, budget=100, **options)
    work = LAYERS.of_groups([(10, [4, 6])])
    assert found.group_placed.update.work == layers * work.executed + head * MODEL.head * 10
    assert found.group_placed.log_prob.work == work.executed + MODEL.head * 10
    if layers == head:
        assert found.speedup(found.group_placed).log_prob == found.speedup(found.group_placed).update


def test_a_critic_has_a_head_of_one_feature():
    found = predict(CONFIG, RowLengths([0], [10], [4]), ranks=1, budget=100, head_features=1)
    assert found.stock.log_prob.work == LAYERS.of_groups([(10, [4])]).counted + CONFIG.hidden_size * 14


@pytest.mark.parametrize("budget", [400, 4000])
@pytest.mark.parametrize("seed", range(4))
def test_one_rank_is_what_the_engine_counts(seed, budget):
    """Tokens, pieces, cut groups and multiply-adds of `MicroBatches` on real rows; the smaller budget cuts groups."""
    lengths = ragged(seed, shuffled=True)
    head = MODEL.head * sum(lengths.responses)
    found = predict(CONFIG, lengths, ranks=1, budget=budget).row_placed.log_prob
    batch = engine_batch(lengths).select(verls_order(lengths, 1))
    micro_batches = batch.split(budget, "budget")
    counts = batch.counts(micro_batches, LAYERS.of_groups)
    summary = counts.summary()
    assert (found.tokens, found.work) == (counts.tokens_packed, counts.work_executed + head)
    assert found.prompts == sum(len(call) for call in counts.calls)
    assert found.groups_cut == summary["groups_split"]
    assert (found.groups_cut > 0) == (budget == 400)
    assert found.micro_batches == len(micro_batches)
    assert lengths.tokens == counts.tokens_total
    assert lengths.token_ratio >= lengths.tokens / found.tokens


def verls_order(lengths, ranks):
    """Rows as verl's trainers hand them out: they call this with a tensor."""
    workload = calculate_workload(torch.tensor(lengths.prompts) + torch.tensor(lengths.responses))
    partitions = get_seqlen_balanced_partitions(workload, k_partitions=ranks, equal_size=True)
    return [row for partition in partitions for row in partition]


def counted_by_engine(lengths, order, ranks, mini_batches, budget, layers=1, head=1):
    """Packed tokens and the slowest ranks' multiply-adds, as engines count them with as many micro-batches on each."""
    size = len(order) // ranks // mini_batches
    tokens = slowest = 0
    for m in range(mini_batches):
        cells = [order[(r * mini_batches + m) * size :][:size] for r in range(ranks)]
        batches = [engine_batch(RowLengths(*([c[row] for row in cell] for c in columns(lengths)))) for cell in cells]
        most = max(len(batch.split(budget, "budget")) for batch in batches)
        work = []
        for batch, cell in zip(batches, cells, strict=True):
            counts = batch.counts(batch.split(budget, "budget", most), LAYERS.of_groups)
            tokens += counts.tokens_packed
            scored = sum(lengths.responses[row] for row in cell)
            work.append(layers * counts.work_executed + head * MODEL.head * scored)
        slowest += max(work)
    return tokens, slowest


def columns(lengths):
    return lengths.groups, lengths.prompts, lengths.responses


@pytest.mark.parametrize("seed", range(3))
def test_group_placed_is_the_placement_of_training(seed):
    """Four ranks and two mini-batches of ragged groups, with the rows that verl adds."""
    lengths = ragged(seed, prompts=30)
    found = predict(CONFIG, lengths, ranks=4, budget=500, log_prob_budget=900, mini_batches=2)
    filled = lengths.filled(8)
    fillers = range(len(lengths.groups), len(filled.groups))
    assert found.rows == filled
    order = place_groups(*columns(filled), 4, 2, fillers)
    tokens, slowest = counted_by_engine(filled, order, 4, 1, 900)
    assert (found.group_placed.log_prob.tokens, found.group_placed.log_prob.slowest) == (tokens, slowest)
    tokens, slowest = counted_by_engine(filled, order, 4, 2, 500, layers=4, head=3)
    assert (found.group_placed.update.tokens, found.group_placed.update.slowest) == (tokens, slowest)
    assert len(found.rows.groups) % 8 == 0


@pytest.mark.parametrize("seed", range(3))
def test_row_placed_and_stock_are_verls_placement(seed):
    lengths = ragged(seed, prompts=24, shuffled=True).filled(4)
    found = predict(CONFIG, lengths, ranks=4, budget=2000)
    order = verls_order(lengths, 4)
    tokens, slowest = counted_by_engine(lengths, order, 4, 1, 2000)
    assert (found.row_placed.log_prob.tokens, found.row_placed.log_prob.slowest) == (tokens, slowest)
    of_rows = [
        LAYERS.of_groups([(lengths.prompts[row], [lengths.responses[row]])]).executed
        + MODEL.head * (lengths.prompts[row] + lengths.responses[row])
        for row in range(len(lengths.groups))
    ]
    size = len(order) // 4
    assert found.stock.log_prob.slowest == max(sum(of_rows[row] for row in order[r * size :][:size]) for r in range(4))
    assert found.stock.log_prob.work == sum(of_rows)
    assert found.stock.log_prob.prompts == len(lengths.groups)
    assert found.group_placed.log_prob.tokens < tokens < found.stock.log_prob.tokens == lengths.tokens
    assert found.group_placed.log_prob.groups_cut <= 1 < found.row_placed.log_prob.groups_cut


def test_every_mini_batch_waits_for_its_slowest_rank():
    """Without sharing and with rows whose order verl's placement of ranks leaves uneven inside them."""
    rows = RowLengths(list(range(8)), [90, 10, 70, 40, 20, 60, 30, 80], [1] * 8)
    one, two = (predict(CONFIG, rows, ranks=2, budget=500, mini_batches=count).stock for count in (1, 2))
    order = verls_order(rows, 2)
    cost = [4 * LAYERS.of_groups([(p, [1])]).executed + 3 * MODEL.head * (p + 1) for p in rows.prompts]
    first, second = ([cost[row] for row in order[r * 4 :][:4]] for r in range(2))
    assert one.update.slowest == max(sum(first), sum(second))
    assert two.update.slowest == max(sum(first[:2]), sum(second[:2])) + max(sum(first[2:]), sum(second[2:]))
    assert two.update.slowest > one.update.slowest, "or the lengths above show nothing"
    assert two.update.work == one.update.work == sum(cost)
    assert (one.update.micro_batches, two.update.micro_batches, two.log_prob) == (1, 2, one.log_prob)


def test_ranks_run_as_many_micro_batches_each():
    """The other rank's one group of two rows is cut, because this one needs two micro-batches."""
    rows = RowLengths([0, 0, 1, 1], [30, 30, 10, 10], [20, 20, 5, 5])
    found = predict(CONFIG, rows, ranks=2, budget=60).group_placed.log_prob
    assert found.micro_batches == 2
    assert (found.prompts, found.groups_cut) == (4, 2)
    assert found.tokens == 100 + 30


def test_fillers_are_no_groups_of_the_user():
    rows = RowLengths([0, 0, 0], [10, 10, 10], [5, 5, 5])
    found = predict(CONFIG, rows, ranks=4, budget=200)
    assert found.rows.tokens == 45 + 128
    assert found.group_placed.log_prob.groups_cut == 1
    padded = predict(CONFIG, RowLengths([0, 1], [10, 10], [5, 5]), ranks=4, budget=200).group_placed.log_prob
    assert (padded.prompts, padded.groups_cut) == (4, 0)


def test_rows_that_are_alike():
    rows = RowLengths.alike(prompts=256, n=8, prompt_tokens=4096, response_tokens=512)
    assert rows.token_ratio == pytest.approx(4.5)
    assert rows.packed == 256 * (4096 + 8 * 512)


@pytest.mark.parametrize("shared", [True, False])
def test_seconds_are_the_operations_of_a_real_forward(shared):
    """At one operation a second. Attention is counted by hand: the counter takes whole squares for causal ones."""
    model = tiny_model("qwen3", torch.float32, vocab_size=200)
    lengths = RowLengths.alike(2, 4, 24, 6)
    g = torch.Generator().manual_seed(0)
    prompts = [torch.randint(1, 200, (24,), generator=g) for _ in range(2)]
    rows = [(p, torch.randint(1, 200, (6,), generator=g)) for p in prompts for _ in range(4)]
    found = predict(model.config, lengths, ranks=1, budget=1000)
    way, speed = found.group_placed if shared else found.stock, Speed(1e-12, 1.0)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        if shared:
            install(model, "sdpa")
            flat = flat_rows(rows)
            plan = build_plan(flat)
            kept = SharedPrompt(plan, flat.tokens[plan.label_index], 1.0, False, "none")
            inputs = {"input_ids": plan.pack(flat.tokens)[None], "position_ids": plan.pack(flat.position_ids)[None]}
            model(**inputs, use_cache=False, zorro=kept)
        else:
            for prompt, response in rows:
                model(torch.cat([prompt, response])[None])  # as verl's engine, whose head runs on every token
    linear = counter.get_flop_counts()["Global"][torch.ops.aten.mm]  # not bmm, which rotary embeddings take
    work = ModelWork.of(model.config)
    attention, plain = (w.of_groups([(24, [6] * 4)] * 2) for w in (work, work._replace(per_pair=0)))
    pick = (lambda w: w.executed) if shared else (lambda w: w.counted)
    forward = found.seconds(way.log_prob, speed)
    assert linear == pytest.approx(forward - 2 * (pick(attention) - pick(plain)))
    head = 2 * work.head * 2 * 4 * (6 if shared else 30)
    assert found.seconds(way.update, speed) == pytest.approx(4 * forward - head), "checkpointing repeats the layers"


def test_more_gpus_and_a_lower_utilisation():
    """Rows of as many ranks on twice the GPUs, half as much of their peak, and whole groups on four ranks."""
    rows = RowLengths.alike(8, 4, 100, 10)
    one = predict(CONFIG, rows, ranks=1, budget=1000)
    wide = predict(CONFIG, rows, ranks=1, budget=1000, sequence_parallel=2)
    four = predict(CONFIG, rows, ranks=4, budget=1000)
    for call in ("log_prob", "update"):
        seconds = one.seconds(getattr(one.stock, call), Speed(100, 0.5))
        assert seconds == pytest.approx(2 * getattr(one.stock, call).work / 50e12)
        assert wide.seconds(getattr(wide.stock, call), Speed(100, 0.5)) == pytest.approx(seconds / 2)
        assert four.seconds(getattr(four.stock, call), Speed(100, 0.5)) == pytest.approx(seconds / 4)
        assert one.seconds(getattr(one.stock, call), Speed(100, 0.25)) == pytest.approx(seconds * 2)


@pytest.mark.parametrize("numbers", [(0, 0.4), (float("nan"), 0.4), (float("inf"), 0.4), (989, 0), (989, 1.5)])
def test_a_speed_that_cannot_be(numbers):
    with pytest.raises(ValueError, match="peak_tflops, utilisation: expected a number above 0 and a share"):
        Speed(*numbers)


def test_memory_is_of_the_largest_micro_batch():
    """Two groups fit one micro-batch, which has 100 + 100 tokens, of 2 x 2 responses of 20; budgets are per GPU."""
    config, rows = config_of("Qwen3-0.6B"), RowLengths.alike(2, 2, 60, 20)
    options = {"logits_optimization": "compute", "sequence_parallel": 2}
    found = predict(config, rows, ranks=1, budget=150, log_prob_budget=50, **options)
    assert found.group_placed.update.shapes == ((200, 80),)
    assert found.group_placed.log_prob.shapes == ((100, 40),)
    expected = activation_memory(config, 200, 80, checkpointing=True, **options).peak
    assert found.group_placed.update.memory == expected
    assert found.group_placed.log_prob.memory == scoring_memory(config, 100, 40, **options).peak
    assert found.stock.update.shapes == ((160, 160),), "four rows of 80 tokens in two micro-batches, all of them scored"
    stock = activation_memory(config, 160, 160, checkpointing=True, stock=True, **options).peak
    assert found.stock.update.memory == stock
    uneven = RowLengths([0, 1, 2], [60, 60, 60], [1, 200, 30])
    memory = predict(config, uneven, ranks=1, budget=265).group_placed.update
    assert sorted(memory.shapes) == [(151, 31), (260, 200)]
    assert memory.memory == activation_memory(config, 260, 200, checkpointing=True).peak


def test_memory_of_other_models_is_none_with_the_reason():
    config = tiny_model("olmo2").config
    found = predict(config, RowLengths([0, 0], [10, 10], [4, 6]), ranks=1, budget=100)
    assert found.group_placed.update.memory is None is found.stock.log_prob.memory
    assert "not predicted for models of type olmo2" in found.no_memory
    assert found.speedup(found.group_placed).update > 1
    assert predict(CONFIG, RowLengths([0], [1], [1]), ranks=1, budget=2).no_memory is None


def test_rows_of_one_length_fill_micro_batches():
    found = predict(CONFIG, RowLengths.alike(16, 64, 16, 8), ranks=1, budget=192, ask_verl=False)
    assert found.stock.update.micro_batches == 16 * 64 // 8
    assert found.stock.update.shapes == ((192, 192),)


def test_without_verl(monkeypatch):
    """What it doesn't place isn't known, but for rows of one length."""
    original = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name.startswith("verl"):
            raise ImportError("No module named 'verl'")
        return original(name, *args, **kwargs)

    lengths, alike = ragged(0), RowLengths.alike(4, 2, 10, 5)
    known = predict(CONFIG, alike, ranks=2, budget=100)
    monkeypatch.setattr(builtins, "__import__", refuse)
    found = predict(CONFIG, lengths, ranks=1, budget=4000)
    assert (found.stock, found.row_placed) == (None, None)
    assert "No module named 'verl'" in found.no_verl
    assert found.speedup(found.group_placed) is None
    found = predict(CONFIG, alike, ranks=2, budget=100, ask_verl=False)
    assert found.stock == known.stock
    assert (found.row_placed, found.group_placed) == (None, known.group_placed)


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        (([], [], []), "at least one of each"),
        (([0], [1, 1], [1]), r"as many groups, prompts and responses.*\(1, 2, 1\)"),
        (([0], [0], [1]), "prompts of at least 1 token"),
        (([0], [1], [-1]), "responses of at least 0, got 1 and -1"),
        (([7, 7], [5, 6], [1, 1]), "expected one prompt length in group 7, got 5 and 6"),
    ],
)
def test_rows_that_cannot_be(columns, words):
    with pytest.raises(ValueError, match=words):
        RowLengths(*columns)


@pytest.mark.parametrize("name", ["ranks", "budget", "mini_batches", "sequence_parallel"])
def test_counts_that_cannot_be(name):
    with pytest.raises(ValueError, match=f"{name}: expected at least 1, got 0"):
        predict(CONFIG, RowLengths([0], [1], [1]), **{"ranks": 1, "budget": 9} | {name: 0})


@pytest.mark.parametrize(
    ("budgets", "key"),
    [
        ({"budget": 13, "log_prob_budget": 14}, "ppo_max_token_len_per_gpu"),
        ({"budget": 14, "log_prob_budget": 13}, "log_prob_max_token_len_per_gpu"),
    ],
)
def test_a_budget_below_a_row_names_its_setting(budgets, key):
    with pytest.raises(ValueError, match=f"^{key}: expected at least 14 tokens"):
        predict(CONFIG, RowLengths([0], [10], [4]), ranks=1, **budgets)
