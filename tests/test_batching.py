"""Where rows go: groups whole wherever they fit, every row exactly once, budgets and cell sizes kept."""

import random
import time
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zorro_verl.batching import (
    _best_swap,
    packed_tokens,
    packed_work,
    place_groups,
    rows_by_group,
    split_micro_batches,
)

hypothesis_settings = partial(settings, deadline=None, derandomize=True, database=None)

# Groups of ragged size, ``(prompt length, response lengths)``, and a seed that shuffles their rows.
GROUPS = st.lists(
    st.tuples(st.integers(1, 30), st.lists(st.integers(0, 20), min_size=1, max_size=6)), min_size=1, max_size=6
)
SEED = st.integers(0, 1000)


def batch_of(groups, seed=None):
    """Group index, prompt lengths and response lengths of the rows of these groups, shuffled by a seed."""
    rows = [(g, p, r) for g, (p, responses) in enumerate(groups) for r in responses]
    if seed is not None:
        random.Random(seed).shuffle(rows)
    return [list(column) for column in zip(*rows, strict=True)]


def tokens_of(batch, rows):
    """Packed tokens of some rows: each of their prompts once, and their responses."""
    group_index, prompt_lens, response_lens = batch
    prompts = {group_index[r]: prompt_lens[r] for r in rows}
    return sum(prompts.values()) + sum(response_lens[r] for r in rows)


def pieces_of(batch, batches):
    """How many micro-batches each group occurs in."""
    return [sum(any(r in rows for r in b) for b in batches) for rows in rows_by_group(batch[0])]


def test_rows_by_group():
    assert rows_by_group([7, -3, 7, 7, 5, -3]) == [[0, 2, 3], [1, 5], [4]]


def test_packed_tokens_and_work():
    assert packed_tokens(5, [2, 0, 3]) == 10
    # One response: as verl counts a row of 7, in its own units.
    assert packed_work(5, [2]) == 24576 * 7 + 7**2
    # The prompt's share once, and twice the pairs of each response with the prompt and with itself.
    assert packed_work(5, [2, 3]) == 24576 * 10 + 5**2 + (2 * 5 * 2 + 2**2) + (2 * 5 * 3 + 3**2)


def test_work_is_in_verls_units():
    import torch
    from verl.utils.seqlen_balancing import calculate_workload

    for prompt, response in ((5, 2), (400, 30), (1, 0)):
        assert packed_work(prompt, [response]) == int(calculate_workload(torch.tensor([prompt + response]))[0])


# Micro-batches.


def test_one_micro_batch_when_all_fits():
    batch = batch_of([(5, [2, 3]), (4, [1, 1, 1])], seed=0)
    assert split_micro_batches(*batch, budget=17) == [[0, 1, 2, 3, 4]]


def test_groups_stay_whole_when_they_fit():
    """Interleaved groups of 10 packed tokens each under a budget of two groups."""
    batch = batch_of([(4, [2, 2, 2])] * 6, seed=3)
    batches = split_micro_batches(*batch, budget=20)
    assert pieces_of(batch, batches) == [1] * 6
    assert [tokens_of(batch, b) for b in batches] == [20, 20, 20]


def test_the_budget_counts_packed_tokens():
    """Eight rows of 110 tokens are 880, and 180 packed: one micro-batch under a budget of 180, not five."""
    batch = batch_of([(100, [10] * 8)])
    assert split_micro_batches(*batch, budget=180) == [list(range(8))]
    assert pieces_of(batch, split_micro_batches(*batch, budget=179)) == [2]


def test_a_group_over_the_budget_is_cut_and_its_prompt_repeated():
    batch = batch_of([(10, [5] * 7), (6, [1, 1])], seed=1)
    batches = split_micro_batches(*batch, budget=25)  # three responses of 5 beside a prompt of 10
    assert pieces_of(batch, batches) == [3, 1]
    assert max(tokens_of(batch, b) for b in batches) <= 25
    assert [len(b) for b in batches] == [3, 3, 3], "3 + 3 + 1 rows of the one, and the last has room for the other"


def test_a_row_over_the_budget_is_an_error_that_names_the_key():
    batch = batch_of([(4, [1, 2]), (7, [3, 5])])
    with pytest.raises(ValueError, match=r"ppo_max_token_len_per_gpu.*at least 12 tokens.*7 prompt \+ 5 resp.*got 11"):
        split_micro_batches(*batch, budget=11, budget_key="ppo_max_token_len_per_gpu")
    assert split_micro_batches(*batch, budget=12)


def test_more_micro_batches_than_rows_is_an_error():
    batch = batch_of([(4, [1, 2])])
    assert sorted(split_micro_batches(*batch, budget=99, min_count=2)) == [[0], [1]]
    with pytest.raises(ValueError, match="at least 3 rows.*got 2"):
        split_micro_batches(*batch, budget=99, min_count=3)


def test_a_count_that_another_rank_needs_cuts_no_group_while_groups_are_many():
    batch = batch_of([(4, [2, 2, 2])] * 6, seed=5)
    for count in (1, 2, 3, 4, 5, 6):
        batches = split_micro_batches(*batch, budget=1000, min_count=count)
        assert len(batches) == count
        assert pieces_of(batch, batches) == [1] * 6
    batches = split_micro_batches(*batch, budget=1000, min_count=8)
    assert len(batches) == 8
    assert sum(pieces_of(batch, batches)) == 8, "two of the six are cut, once each"


def test_micro_batches_are_balanced():
    """What the budget leaves free is spread: no full micro-batch beside one with a single row."""
    batch = batch_of([(10, [5, 5])] * 4)
    assert [tokens_of(batch, b) for b in split_micro_batches(*batch, budget=79)] == [40, 40]


def test_balance_never_breaks_the_budget():
    """3 3 | 2 2 2 fits two micro-batches of 6 exactly; spreading the largest first would make it 7 and 5."""
    batch = batch_of([(2, [1]), (2, [1]), (1, [1]), (1, [1]), (1, [1])])
    assert split_micro_batches(*batch, budget=6) == [[0, 1], [2, 3, 4]]


def test_more_micro_batches_than_a_full_packing_has_cut_no_group():
    """Eleven groups of 5 tokens and twelve of 3 fill ten micro-batches of 10, and another rank needs eleven.

    Spread over eleven, the largest first, they would be 5 + 3 each, and the last 3 over the budget in any of them: one
    of the ten is parted instead, between two groups.
    """
    batch = batch_of([(4, [1])] * 11 + [(2, [1])] * 12)
    assert len(split_micro_batches(*batch, budget=10)) == 10
    batches = split_micro_batches(*batch, budget=10, min_count=11)
    assert len(batches) == 11
    assert sorted(r for b in batches for r in b) == list(range(23))
    assert max(tokens_of(batch, b) for b in batches) <= 10
    twice = batch_of([(3, [1, 1])] * 11 + [(1, [1, 1])] * 12)
    batches = split_micro_batches(*twice, budget=10, min_count=11)
    assert len(batches) == 11
    assert pieces_of(twice, batches) == [1] * 23


@hypothesis_settings(max_examples=400)
@given(groups=GROUPS, seed=SEED, slack=st.integers(0, 120), more=st.integers(0, 8))
def test_micro_batches_keep_their_promises(groups, seed, slack, more):
    batch = batch_of(groups, seed)
    group_index, prompt_lens, response_lens = batch
    budget = max(p + r for p, r in zip(prompt_lens, response_lens, strict=True)) + slack
    min_count = min(1 + more, len(group_index))
    batches = split_micro_batches(*batch, budget, min_count=min_count)
    assert sorted(r for b in batches for r in b) == list(range(len(group_index))), "every row exactly once"
    assert all(batches), "no micro-batch is empty"
    assert all(b == sorted(b) for b in batches)
    assert len(batches) >= min_count
    assert max(tokens_of(batch, b) for b in batches) <= budget
    if len(batches) > min_count or more == 0:
        whole = [tokens_of(batch, rows) <= budget for rows in rows_by_group(group_index)]
        for fits, pieces in zip(whole, pieces_of(batch, batches), strict=True):
            assert fits == (pieces == 1), "cut exactly when it is over the budget"
    assert batches == split_micro_batches(*batch, budget, min_count=min_count), "the same on every call"


def test_the_number_of_micro_batches_is_near_the_least_possible():
    """First-fit decreasing is within 11/9 of the optimum, and that is at least the total over the budget."""
    for seed in range(40):
        rng = random.Random(seed)
        batch = batch_of([(rng.randint(5, 40), [rng.randint(0, 9) for _ in range(4)]) for _ in range(20)], seed)
        batches = split_micro_batches(*batch, budget=200)
        least = -(-tokens_of(batch, range(80)) // 200)
        assert len(batches) <= 11 / 9 * least + 1, seed


def test_thousands_of_rows_take_no_time():
    """Host arithmetic between two steps: seconds here would be seconds of every step. It takes 10 to 30 ms."""
    rng = random.Random(0)
    for most, num_mini_batches in ((8, 1), (8, 4), (16, 4)):
        sizes = [rng.randint(1, most) for _ in range(1024)] if most == 16 else [most] * 1024
        sizes[0] += -sum(sizes) % (64 * num_mini_batches)
        batch = batch_of([(rng.randint(100, 900), [rng.randint(1, 400) for _ in range(n)]) for n in sizes], 1)
        start = time.process_time()
        place_groups(*batch, num_ranks=64, num_mini_batches=num_mini_batches)
        assert time.process_time() - start < 0.2
        split_micro_batches(*batch, budget=16384)
        assert time.process_time() - start < 2


def test_thousands_of_prompts_on_few_ranks_take_no_time():
    """Each cell holds thousands of groups then, and pairs of them are millions. It takes 30 to 80 ms."""
    rng = random.Random(0)
    groups = [(rng.randint(100, 9000), [rng.randint(1, 4000) for _ in range(2)]) for _ in range(8192)]
    batch = batch_of(groups)
    start = time.process_time()
    order = place_groups(*batch, num_ranks=2, num_mini_batches=1)
    assert time.process_time() - start < 0.5
    work = [packed_work(*group) for group in groups]
    ranks = [sum(work[row // 2] for row in rank) for rank in cells_of(order, 2, 1)]
    assert max(ranks) / min(ranks) < 1 + 1e-9


@hypothesis_settings(max_examples=200)
@given(
    heavier=st.lists(st.tuples(st.integers(0, 40), st.booleans()), min_size=1, max_size=12),
    lighter=st.lists(st.tuples(st.integers(0, 40), st.booleans()), max_size=12),
    gap=st.integers(0, 30),
)
def test_the_swap_is_the_best_of_all_pairs(heavier, lighter, gap):
    groups = heavier + lighter  # (cost, kind)
    cells = [{}, {}]
    for group in sorted(range(len(groups)), key=lambda g: (groups[g][0], g)):
        cost, kind = groups[group]
        cells[group >= len(heavier)].setdefault(kind, []).append((cost, group))
    pairs = [(a, b) for a in range(len(heavier)) for b in range(len(heavier), len(groups))]
    less = {(a, b): groups[a][0] - groups[b][0] for a, b in pairs if groups[a][1] == groups[b][1]}
    distances = {pair: abs(2 * d - gap) for pair, d in less.items() if 0 < d < gap}
    swap = _best_swap(*cells, gap)
    assert (swap is None) == (not distances)
    if swap is not None:
        assert distances[swap] == min(distances.values())


# Placement over ranks and mini-batches.


def cells_of(order, num_ranks, num_mini_batches):
    """Rows of each (rank, mini-batch), as verl hands them out: equal chunks of equal slices."""
    size = len(order) // (num_ranks * num_mini_batches)
    return [order[i : i + size] for i in range(0, len(order), size)]


CELLS = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 2), (2, 4)]


@pytest.mark.parametrize(("num_ranks", "num_mini_batches"), CELLS)
@pytest.mark.parametrize("seed", range(5))
def test_equal_groups_stay_whole(num_ranks, num_mini_batches, seed):
    """verl's row-wise balance keeps 8 of 800 such groups together."""
    rng = random.Random(seed)
    count = num_ranks * num_mini_batches * 3
    batch = batch_of([(rng.randint(5, 40), [rng.randint(0, 30) for _ in range(4)]) for _ in range(count)], seed)
    order = place_groups(*batch, num_ranks, num_mini_batches)
    assert sorted(order) == list(range(count * 4))
    cells = cells_of(order, num_ranks, num_mini_batches)
    assert {len(c) for c in cells} == {12}
    assert pieces_of(batch, cells) == [1] * count


def test_mini_batches_keep_the_order_of_groups():
    """The first mini-batch of all ranks together holds the first groups, so that shuffling stays whoever's it was."""
    batch = batch_of([(4, [1] * 2)] * 8)
    first, second, third, fourth = cells_of(place_groups(*batch, 2, 2), 2, 2)  # rank 0: first, second
    assert sorted(first + third) == list(range(8))
    assert sorted(second + fourth) == list(range(8, 16))


@pytest.mark.parametrize(
    ("sizes", "num_ranks", "pieces"),
    [
        pytest.param([8, 8], 4, [2, 2], id="twice-a-cell"),
        pytest.param([3, 3, 3, 3], 3, [1, 1, 1, 3], id="one-row-of-room-in-each-cell"),
        pytest.param([6, 6, 4, 4, 4, 4], 4, [1, 1, 1, 1, 2, 2], id="rests-fit-whole-into-what-others-left"),
        pytest.param([1, 4, 2, 3, 4, 2], 4, [1, 1, 1, 1, 1, 1], id="largest-first-fits-all"),
    ],
)
def test_unequal_groups_are_cut_no_more_than_they_must(sizes, num_ranks, pieces):
    batch = batch_of([(4, [1] * n) for n in sizes])
    assert pieces_of(batch, cells_of(place_groups(*batch, num_ranks, 1), num_ranks, 1)) == pieces


def fewest_cuts(sizes, num_cells):
    """Over all ways to part the groups into sets that fill cells exactly: a set that fills k cells takes k - 1 cuts."""
    cell = sum(sizes) // num_cells
    total, most_sets = [0], [0]
    for chosen in range(1, 1 << len(sizes)):
        members = [g for g in range(len(sizes)) if chosen >> g & 1]
        total.append(total[chosen ^ 1 << members[0]] + sizes[members[0]])
        most_sets.append(max(most_sets[chosen ^ 1 << g] for g in members) + (total[chosen] % cell == 0))
    return num_cells - most_sets[-1]


def test_cuts_are_as_few_as_brute_force_finds():
    total = 0
    for seed in range(150):
        rng = random.Random(seed)
        num_cells, most = rng.randint(2, 6), rng.choice((4, 8, 12))
        sizes = [rng.randint(1, most) for _ in range(rng.randint(4, 10))]
        sizes[0] += -sum(sizes) % num_cells
        batch = batch_of([(5, [4] * n) for n in sizes], seed)
        pieces = pieces_of(batch, cells_of(place_groups(*batch, num_cells, 1), num_cells, 1))
        assert sum(pieces) - len(pieces) == fewest_cuts(sizes, num_cells), seed
        total += sum(pieces) - len(pieces)
    assert total > 100, "too easy"


@pytest.mark.parametrize("sizes", [(1, 2, 2, 2, 3, 3, 5), (3, 4, 4, 5, 6, 7, 7, 7, 8)])
def test_neither_way_to_choose_is_enough(sizes):
    """Over three cells: where alike cells need a cut and the largest groups first do not, and the other way round."""
    batch = batch_of([(5, [4] * n) for n in sizes], seed=0)
    assert pieces_of(batch, cells_of(place_groups(*batch, 3, 1), 3, 1)) == [1] * len(sizes)


@pytest.mark.parametrize(("num_ranks", "num_mini_batches"), [(8, 1), (8, 2), (16, 1), (32, 2)])
def test_ragged_groups_that_are_many_fit_without_a_cut(num_ranks, num_mini_batches):
    """What filters and partial rollouts leave: sizes from 1 to 8. No cut at all is the least there can be."""
    for seed in range(5):
        rng = random.Random(seed)
        sizes = [rng.randint(1, 8) for _ in range(256)]
        sizes += [1] * (-sum(sizes) % (num_ranks * num_mini_batches))
        batch = batch_of([(rng.randint(50, 1500), [rng.randint(1, 500) for _ in range(n)]) for n in sizes], seed)
        cells = cells_of(place_groups(*batch, num_ranks, num_mini_batches), num_ranks, num_mini_batches)
        assert pieces_of(batch, cells) == [1] * len(sizes)


def test_the_shortest_prompt_is_cut():
    """Two cells of six rows, three groups of four: one has to be cut, and its prompt is what is computed twice."""
    for shortest in range(3):
        batch = batch_of([(3 if g == shortest else 90, [1] * 4) for g in range(3)])
        pieces = pieces_of(batch, cells_of(place_groups(*batch, 2, 1), 2, 1))
        assert pieces == [2 if g == shortest else 1 for g in range(3)]


def test_groups_longer_than_a_mini_batch_are_cut_over_the_mini_batches_of_one_rank():
    """Scoring passes see all of a rank's rows at once, and find these groups whole."""
    rng = random.Random(2)
    batch = batch_of([(rng.randint(20, 900), [rng.randint(3, 90) for _ in range(8)]) for _ in range(4)], seed=2)
    order = place_groups(*batch, num_ranks=4, num_mini_batches=2)
    assert pieces_of(batch, cells_of(order, 4, 2)) == [2] * 4
    assert pieces_of(batch, cells_of(order, 4, 1)) == [1] * 4


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_fillers_go_where_groups_leave_room_and_are_spread(num_ranks):
    """Nine groups of four in 64 rows: three mini-batches get two of them and one three, none only padding."""
    batch = batch_of([(20, [3] * 4)] * 9 + [(127, [1] * 28)])
    fillers = range(36, 64)
    order = place_groups(*batch, num_ranks, 4, fillers)
    assert sorted(order) == list(range(64))
    cells = cells_of(order, num_ranks, 4)
    assert pieces_of(batch, cells)[:9] == [1] * 9
    real = [sum(row < 36 for cell in cells[m::4] for row in cell) for m in range(4)]
    assert sorted(real) == [8, 8, 8, 12]


def test_whole_ranks_are_balanced_too():
    """Mini-batches whose heaviest cell lay always on the first rank would make that rank the slowest scorer."""
    batch = batch_of([(500 + 400 * (g % 4), [50] * 2) for g in range(64)])
    order = place_groups(*batch, num_ranks=4, num_mini_batches=16)
    work = [sum(packed_work(batch[1][row], [50, 50]) for row in rank[::2]) for rank in cells_of(order, 4, 1)]
    assert max(work) / min(work) < 1.01


@hypothesis_settings(max_examples=400)
@given(groups=GROUPS, seed=SEED, cells=st.sampled_from(CELLS))
def test_placement_keeps_its_promises(groups, seed, cells):
    num_ranks, num_mini_batches = cells
    rows = sum(len(r) for _, r in groups)
    groups = [*groups, *[(3, [1])] * (-rows % (num_ranks * num_mini_batches))]
    batch = batch_of(groups, seed)
    order = place_groups(*batch, num_ranks, num_mini_batches)
    assert sorted(order) == list(range(len(batch[0]))), "a permutation"
    pieces = pieces_of(batch, cells_of(order, num_ranks, num_mini_batches))
    # Room that is left over in a cell is what makes a cut, and a cut fills it.
    assert sum(pieces) - len(pieces) < num_ranks * num_mini_batches
    assert order == place_groups(*batch, num_ranks, num_mini_batches)


def test_rows_that_do_not_divide_are_an_error():
    batch = batch_of([(4, [1] * 6)])
    with pytest.raises(ValueError, match="multiple of 2 ranks x 2 mini-batches.*got 6"):
        place_groups(*batch, 2, 2)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_are_as_balanced_as_karmarkar_karp_makes_them(num_ranks):
    """Over equal groups, against verl's own balancer on the same work: the slowest rank sets the step's time."""
    from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions

    ratios = []
    for seed in range(30):
        rng = random.Random(seed)
        groups = [(rng.randint(50, 1500), [rng.randint(1, 500) for _ in range(4)]) for _ in range(num_ranks * 8)]
        batch = batch_of(groups, seed)
        work = [packed_work(p, r) for p, r in groups]
        ours = [
            sum(work[batch[0][row]] / 4 for row in cell)
            for cell in cells_of(place_groups(*batch, num_ranks, 1), num_ranks, 1)
        ]
        partitions = get_seqlen_balanced_partitions(work, num_ranks, equal_size=True)
        theirs = [sum(work[g] for g in part) for part in partitions]
        assert sum(ours) == pytest.approx(sum(theirs))
        ratios.append(max(ours) / max(theirs))
    assert max(ratios) <= 1.005, max(ratios)
    assert sum(ratios) / len(ratios) <= 1.001


def test_a_tight_fit_is_found_where_spreading_by_load_would_cut():
    groups = [g for g, size in enumerate((3, 3, 2, 2, 2)) for _ in range(size)]
    order = place_groups(groups, [5] * 12, [4] * 12, num_ranks=2, num_mini_batches=1)
    ranks = [{groups[row] for row in order[i : i + 6]} for i in (0, 6)]
    assert not ranks[0] & ranks[1]
