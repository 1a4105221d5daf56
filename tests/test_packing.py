"""The plan of a packed batch: every index tensor against hand-written and brute-force ones."""

import random
import subprocess
import sys

import pytest
import torch
from tiny import batch_b0, flat_rows, shuffled

from zorro_verl.forest import Forest
from zorro_verl.grouping import find_prompt_groups
from zorro_verl.packing import build_plan


def plan_of(rows):
    return build_plan(flat_rows(rows))


def row(prompt_len, response_len, first=1):
    return torch.arange(first, first + prompt_len), torch.arange(50, 50 + response_len)


def hand_written_rows():
    """P=3 with R=2 twice, and a row of its own with P=2, R=1 in between."""
    return [row(3, 2), row(2, 1, first=9), row(3, 2)]


def test_hand_written_example():
    """Rows P0 P1 P2 a0 a1 | Q0 Q1 c0 | P0 P1 P2 b0 b1, packed as P0 P1 P2 | Q0 Q1 c0 | a0 a1 | b0 b1."""
    plan = plan_of(hand_written_rows())
    assert (plan.num_row_tokens, plan.num_tokens, plan.num_groups, plan.longest_row) == (13, 10, 2, 5)
    assert plan.token_ratio == 1.3
    assert plan.group_index.tolist() == [0, 1, 0]
    #                                     P0 P1 P2 Q0 Q1 c0 a0 a1  b0  b1
    assert plan.token_index.tolist() == [0, 1, 2, 5, 6, 7, 3, 4, 11, 12]
    assert plan.unpack_index.tolist() == [0, 1, 2, 6, 7, 3, 4, 5, 0, 1, 2, 8, 9]
    # Response tokens a0 a1 c0 b0 b1 and the tokens before them: P2 a0 Q1 P2 b0.
    assert plan.label_index.tolist() == [3, 4, 7, 11, 12]
    assert plan.predictor_slot.tolist() == [2, 3, 6, 10, 11]
    assert plan.predictor_index.tolist() == [2, 6, 4, 2, 8]
    assert plan.label_row.tolist() == [0, 0, 1, 2, 2]

    forest = plan.forest
    assert forest.lengths.tolist() == [3, 3, 2, 2]
    assert forest.parents.tolist() == [-1, -1, 0, 0]
    assert forest.order.tolist() == [0, 1, 2, 3]
    assert forest.starts.tolist() == [0, 3, 6, 8]
    assert forest.segment_index().tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 3, 3]
    own = forest.self_call
    assert own.causal
    assert own.blocks == [(0, 3, 0, 3), (3, 6, 3, 6), (6, 8, 6, 8), (8, 10, 8, 10)]
    assert own.cu_seqlens_q.tolist() == own.cu_seqlens_k.tolist() == [0, 3, 6, 8, 10]
    (cross,) = forest.cross_calls
    assert not cross.causal
    assert (cross.query_start, cross.num_keys) == (6, 3)
    assert cross.blocks == [(0, 4, 0, 3)]
    assert cross.cu_seqlens_q.tolist() == [0, 4]
    assert cross.cu_seqlens_k.tolist() == [0, 3]
    assert (cross.max_seqlen_q, cross.max_seqlen_k) == (4, 3)
    assert cross.cu_seqlens_q.dtype == cross.cu_seqlens_k.dtype == torch.int32

    drawing = """
        1.........
        11........
        111.......
        ...1......
        ...11.....
        ...111....
        111...1...
        111...11..
        111.....1.
        111.....11
    """.split()
    assert plan.dense_mask().int().tolist() == [[int(c == "1") for c in line] for line in drawing]


def test_hand_written_window():
    """The same rows, of which a token sees its own and the two before it."""
    plan = plan_of(hand_written_rows())
    call = plan.forest.window_call(3)
    assert (call.window, call.causal, call.query_start, call.num_keys) == (3, True, 0, 14)
    #                                  P0 P1 P2  Q0 Q1 c0  P1 P2 a0 a1  P1 P2 b0 b1
    assert call.key_index.tolist() == [0, 1, 2, 3, 4, 5, 1, 2, 6, 7, 1, 2, 8, 9]
    assert call.cu_seqlens_q.tolist() == [0, 3, 6, 8, 10]
    assert call.cu_seqlens_k.tolist() == [0, 3, 6, 10, 14]
    assert call.blocks == [(0, 3, 0, 3), (3, 6, 3, 6), (6, 8, 6, 10), (8, 10, 10, 14)]
    assert (call.max_seqlen_q, call.max_seqlen_k) == (3, 4)
    assert call.cu_seqlens_q.dtype == call.cu_seqlens_k.dtype == torch.int32
    assert call.key_index.dtype == torch.int64
    drawing = """
        1.........
        11........
        111.......
        ...1......
        ...11.....
        ...111....
        .11...1...
        ..1...11..
        .11.....1.
        ..1.....11
    """.split()
    assert plan.dense_mask(3).int().tolist() == [[int(c == "1") for c in line] for line in drawing]
    assert [call.window for call in (plan.forest.self_call, *plan.forest.cross_calls)] == [None, None]
    assert [call.key_index for call in (plan.forest.self_call, *plan.forest.cross_calls)] == [None, None]


def test_a_window_over_empty_segments():
    """root(3) <- empty <- mid(1) <- leaf(2), leaf(0): the leaf of two reaches into the root."""
    forest = Forest(torch.tensor([3, 0, 1, 2, 0]), torch.tensor([-1, 0, 1, 2, 2]))
    # packed: r0 r1 r2 | m0 | l0 l1
    assert forest.window_call(1).key_index.tolist() == [0, 1, 2, 3, 4, 5]
    assert forest.window_call(3).key_index.tolist() == [0, 1, 2, 1, 2, 3, 2, 3, 4, 5]
    assert forest.window_call(3).cu_seqlens_k.tolist() == [0, 3, 3, 6, 10, 10], "no keys for segments without a token"
    assert forest.window_call(9).key_index.tolist() == [0, 1, 2, 0, 1, 2, 3, 0, 1, 2, 3, 4, 5]


def test_roots_that_are_alone_stand_behind_those_with_children():
    """Only then is the key block of the cross call a prefix of the packed row."""
    plan = plan_of([row(4, 3, first=20), *hand_written_rows()])
    assert plan.forest.order.tolist() == [1, 0, 2, 3, 4]
    assert plan.token_index.tolist()[:3] == [7, 8, 9]
    assert plan.forest.cross_calls[0].num_keys == 3


def test_a_row_of_its_own_is_one_segment():
    plan = plan_of([row(2, 3), row(3, 1, first=9)])
    assert plan.forest.lengths.tolist() == [5, 4]
    assert plan.forest.cross_calls == []
    assert plan.token_ratio == 1.0
    assert plan.predictor_index.tolist() == [1, 2, 3, 7]


def test_empty_responses_and_one_token_prompts():
    """An empty response has no label, no predictor and no query; its prompt is there all the same."""
    plan = plan_of([row(1, 0), row(1, 2), row(1, 0), row(2, 0, first=9)])
    assert plan.token_index.tolist() == [0, 5, 6, 2, 3]
    assert plan.unpack_index.tolist() == [0, 0, 3, 4, 0, 1, 2]
    assert plan.predictor_index.tolist() == [0, 3]
    assert plan.label_row.tolist() == [1, 1]
    assert plan.forest.cross_calls[0].blocks == [(0, 2, 0, 1)]


def test_only_empty_responses():
    plan = plan_of([row(3, 0), row(3, 0)])
    assert (plan.num_tokens, plan.num_row_tokens) == (3, 6)
    assert plan.forest.cross_calls == []
    assert plan.predictor_index.numel() == plan.label_index.numel() == plan.label_row.numel() == 0


def test_token_ratio_is_what_the_formula_says():
    n, p, r = 8, 30, 7
    assert plan_of([row(p, r)] * n).token_ratio == pytest.approx(n * (p + r) / (p + n * r))


def random_rows(seed):
    rng = random.Random(seed)
    rows = []
    for group in range(rng.randint(1, 5)):
        prompt = torch.tensor([group, *(rng.randrange(60) for _ in range(rng.randint(0, 6)))])
        rows += [
            (prompt, torch.randint(0, 60, (rng.choice((0, 1, 2, 7)),), generator=torch.Generator().manual_seed(seed)))
            for _ in range(rng.randint(1, 4))
        ]
    return shuffled(rows, seed)


@pytest.mark.parametrize("seed", range(30))
def test_indices_of_random_batches(seed):
    """Everything the plan says of each row token, from the rows themselves in plain Python."""
    rows = random_rows(seed)
    flat = flat_rows(rows)
    plan = build_plan(flat)
    prompts = {tuple(p.tolist()): len(p) for p, _ in rows}
    assert plan.num_groups == len(prompts)
    assert plan.num_tokens == sum(prompts.values()) + sum(len(r) for _, r in rows)
    assert plan.longest_row == max(len(p) + len(r) for p, r in rows)
    for index in (plan.token_index, plan.unpack_index, plan.predictor_index, plan.predictor_slot, plan.label_index):
        assert index.dtype == torch.int64

    assert torch.equal(plan.unpack(plan.pack(flat.tokens)), flat.tokens)
    assert torch.equal(plan.unpack(plan.pack(flat.position_ids)), flat.position_ids)
    packed_ids = torch.arange(plan.num_tokens)
    assert torch.equal(plan.pack(plan.unpack(packed_ids)), packed_ids), "every packed token belongs to some row"

    owner, slot, labels, slots, start = {}, 0, [], [], 0
    for i, (prompt, response) in enumerate(rows):
        for offset in range(len(prompt) + len(response)):
            in_prompt = offset < len(prompt)
            segment = ("prompt", tuple(prompt.tolist())) if in_prompt else ("response", i)
            place = owner.setdefault((segment, offset), int(plan.unpack_index[slot]))
            assert place == plan.unpack_index[slot], "the tokens of a shared prompt share a place"
            slot += 1
        labels += range(start + len(prompt), start + len(prompt) + len(response))
        slots += [i] * len(response)
        start += len(prompt) + len(response)
    assert len(set(owner.values())) == len(owner), "no two tokens share a place otherwise"
    assert plan.label_index.tolist() == labels
    assert plan.predictor_slot.tolist() == [label - 1 for label in labels]
    assert plan.label_row.tolist() == slots
    assert torch.equal(plan.predictor_index, plan.unpack_index[plan.predictor_slot])


def test_pack_and_unpack_along_any_axis():
    flat = flat_rows(shuffled(batch_b0(), 1))
    plan = build_plan(flat)
    values = torch.randn(3, plan.num_tokens, 2, generator=torch.Generator().manual_seed(0))
    spread = plan.unpack(values, 1)
    assert spread.shape == (3, plan.num_row_tokens, 2)
    assert torch.equal(plan.pack(spread, 1), values)
    assert torch.equal(plan.unpack(values[:, :, 0]), spread[:, :, 0])
    assert torch.equal(plan.unpack(values[0], 0), spread[0])


def test_gradient_of_unpack_sums_over_copies():
    plan = plan_of(hand_written_rows())
    packed = torch.zeros(plan.num_tokens, dtype=torch.float64, requires_grad=True)
    weights = torch.arange(1.0, plan.num_row_tokens + 1, dtype=torch.float64)
    (plan.unpack(packed) * weights).sum().backward()
    # P0 P1 P2 are row tokens 0, 1, 2 and 8, 9, 10; all others occur once.
    assert packed.grad.tolist() == [1 + 9, 2 + 10, 3 + 11, 6, 7, 8, 4, 5, 12, 13]


def test_unshared_plan_is_the_rows_as_they_were():
    plan = plan_of(hand_written_rows())
    assert plan.unshared.num_tokens == plan.num_row_tokens
    assert plan.unshared.token_index.tolist() == list(range(13))
    assert plan.unshared.forest.cross_calls == []
    assert plan.unshared is plan.unshared, "built once, not once a layer"


def test_groups_can_be_given():
    """Whoever cut a batch may say what to share; sharing nothing is one group a row."""
    flat = flat_rows(hand_written_rows())
    assert build_plan(flat, torch.tensor([0, 1, 2])).num_tokens == 13
    assert build_plan(flat, find_prompt_groups(flat)).num_tokens == 10
    with pytest.raises(ValueError, match=r"group_index.*\(3,\).*\(2,\)"):
        build_plan(flat, torch.tensor([0, 1]))


def random_forest(rng, depth=3):
    """Segment lengths (some 0) and parents, parents in no particular order."""
    count = rng.randint(1, 12)
    levels, parents = [], []
    for segment in range(count):
        candidates = [s for s in range(segment) if levels[s] < depth]
        parent = rng.choice([-1, *candidates]) if candidates else -1
        parents.append(parent)
        levels.append(0 if parent < 0 else levels[parent] + 1)
    relabel = list(range(count))
    rng.shuffle(relabel)
    renamed = [0] * count
    for segment, parent in enumerate(parents):
        renamed[relabel[segment]] = -1 if parent < 0 else relabel[parent]
    lengths = [rng.choice((0, 1, 1, 2, 3, 5)) for _ in range(count)]
    return torch.tensor(lengths), torch.tensor(renamed)


def lineage(parents, segment):
    """The ancestors of a segment, nearest first."""
    found = []
    while parents[segment] >= 0:
        segment = int(parents[segment])
        found.append(segment)
    return found


FORESTS = [random_forest(random.Random(seed)) for seed in range(150)]


def test_random_forests_reach_every_depth():
    depths = [max(len(lineage(parents, s)) for s in range(len(parents))) for _, parents in FORESTS]
    assert set(depths) == {0, 1, 2, 3}


@pytest.mark.parametrize("case", [slice(0, 50), slice(50, 100), slice(100, 150)], ids=["a", "b", "c"])
def test_visibility_against_brute_force(case):
    for lengths, parents in FORESTS[case]:
        forest = Forest(lengths, parents)
        starts = forest.starts.tolist()
        tokens = {starts[s] + i: (s, i) for s in range(len(lengths)) for i in range(int(lengths[s]))}
        assert sorted(tokens) == list(range(forest.num_tokens)), "segments tile the packed row"
        expected = [
            [
                tokens[k][0] in lineage(parents, tokens[q][0])
                or (tokens[k][0] == tokens[q][0] and tokens[k][1] <= tokens[q][1])
                for k in range(forest.num_tokens)
            ]
            for q in range(forest.num_tokens)
        ]
        assert forest.visible().tolist() == expected
        assert forest.segment_index().tolist() == [tokens[t][0] for t in range(forest.num_tokens)]


@pytest.mark.parametrize("window", [1, 2, 3, 5, 100])
def test_windows_against_brute_force(window):
    """What is visible, and what the call computes, from its device tensors as a kernel reads them."""
    for lengths, parents in FORESTS:
        forest = Forest(lengths, parents)
        if forest.num_tokens == 0:
            continue
        starts = forest.starts.tolist()
        expected = torch.zeros(forest.num_tokens, forest.num_tokens, dtype=torch.int64)
        for s in range(len(lengths)):
            segments = [*reversed(lineage(parents, s)), s]
            row = [starts[t] + i for t in segments for i in range(int(lengths[t]))]
            for place in range(len(row) - int(lengths[s]), len(row)):
                expected[row[place], row[max(0, place - window + 1) : place + 1]] = 1
        assert torch.equal(forest.visible(window).long(), expected)

        call, computed = forest.window_call(window), torch.zeros_like(expected)
        bounds = zip(*(x[i:].tolist() for x in (call.cu_seqlens_q, call.cu_seqlens_k) for i in (0, 1)), strict=False)
        for q0, q1, k0, k1 in bounds:
            for q in range(q0, q1):
                own = k1 - (q1 - q)
                for key in call.key_index[max(k0, own - window + 1) : own + 1].tolist():
                    computed[q, key] += 1
        assert torch.equal(computed, expected)
        lens_q, lens_k = call.cu_seqlens_q.diff(), call.cu_seqlens_k.diff()
        assert (call.max_seqlen_q, call.max_seqlen_k) == (int(lens_q.max()), int(lens_k.max()))
        assert call.num_keys == call.key_index.numel() == int(call.cu_seqlens_k[-1])
        bounds = zip(*(x[i:].tolist() for x in (call.cu_seqlens_q, call.cu_seqlens_k) for i in (0, 1)), strict=False)
        assert call.blocks == [b for b in bounds if b[1] > b[0]]


def covered(call, num_tokens):
    """Which (query, key) pairs a call computes, from its device tensors as a kernel reads them."""
    pairs = torch.zeros(num_tokens, num_tokens, dtype=torch.int64)
    bounds_q, bounds_k = call.cu_seqlens_q.tolist(), call.cu_seqlens_k.tolist()
    assert len(bounds_q) == len(bounds_k)
    assert bounds_q[0] == bounds_k[0] == 0
    assert bounds_k[-1] == call.num_keys <= num_tokens
    assert call.query_start + bounds_q[-1] == num_tokens, "queries are the whole rest of the packed row"
    assert call.max_seqlen_q == max(b - a for a, b in zip(bounds_q[:-1], bounds_q[1:], strict=True))
    assert call.max_seqlen_k == max(b - a for a, b in zip(bounds_k[:-1], bounds_k[1:], strict=True))
    blocks = []
    for q0, q1, k0, k1 in zip(bounds_q[:-1], bounds_q[1:], bounds_k[:-1], bounds_k[1:], strict=True):
        if q1 > q0:
            blocks.append((q0, q1, k0, k1))
        block = torch.ones(q1 - q0, k1 - k0, dtype=torch.int64)
        if call.causal:
            assert (q0, q1) == (k0, k1), "causal blocks are square: no alignment to get wrong"
            block = block.tril()
        pairs[call.query_start + q0 : call.query_start + q1, k0:k1] += block
    assert call.blocks == blocks, "the host's copy of the bounds leaves out empty query blocks only"
    return pairs


@pytest.mark.parametrize("case", [slice(0, 75), slice(75, 150)], ids=["a", "b"])
def test_calls_compute_every_visible_pair_once(case):
    for lengths, parents in FORESTS[case]:
        forest = Forest(lengths, parents)
        if forest.num_tokens == 0:
            continue
        assert forest.self_call.query_start == 0
        pairs = sum(covered(call, forest.num_tokens) for call in (forest.self_call, *forest.cross_calls))
        assert torch.equal(pairs, forest.visible().long())
        depth = max(len(lineage(parents, s)) for s in range(len(lengths)))
        assert len(forest.cross_calls) <= depth, "one cross call a level"


def test_calls_of_zero_length_segments():
    """root(0) <- mid(2) <- leaf(0), leaf(3): the leaves see a keyless root and a mid of two."""
    forest = Forest(torch.tensor([0, 2, 0, 3]), torch.tensor([-1, 0, 1, 1]))
    near, far = forest.cross_calls
    assert near.blocks == [(0, 2, 0, 0), (2, 5, 0, 2)]
    assert far.blocks == [(0, 3, 0, 0)]
    assert (near.query_start, far.query_start) == (0, 2)


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        pytest.param([-1, 2], r"parents.*-1\.\.1", id="too-large"),
        pytest.param([-2, -1], r"parents.*-1\.\.1", id="too-small"),
        pytest.param([-1, 1], "own ancestor", id="own-parent"),
        pytest.param([1, 0], "own ancestor", id="cycle-of-two"),
        pytest.param([-1, 3, 1, 2, 0], "own ancestor", id="cycle-beside-a-tree"),
    ],
)
def test_bad_parents_are_refused(parents, message):
    with pytest.raises(ValueError, match=message):
        Forest(torch.ones(len(parents), dtype=torch.int64), torch.tensor(parents))


def test_more_tokens_than_int32_counts_are_refused_before_anything_is_allocated():
    lengths = torch.tensor([2**30, 2**30])
    with pytest.raises(ValueError, match=f"2147483647 packed tokens.*got {2**31}.*token budget"):
        Forest(lengths, torch.tensor([-1, 0]))
    forest = Forest(lengths - 1, torch.tensor([-1, 0]))
    assert forest.starts.tolist() == [0, 2**30 - 1]
    assert forest.cross_calls[0].cu_seqlens_q.tolist() == [0, 2**30 - 1]


MEMORY_PROGRAM = """
import resource, torch
from zorro_verl.grouping import Rows
from zorro_verl.packing import build_plan

def rows(prompt, response, n):
    lens = torch.full((n,), prompt + response)
    tokens = torch.cat([torch.arange(prompt), torch.randint(0, 9, (response,))]).repeat(n)
    cu_seqlens = torch.nn.functional.pad(lens.cumsum(0), (1, 0))
    return Rows(tokens, torch.arange(prompt + response).repeat(n), cu_seqlens, torch.full((n,), prompt))

build_plan(rows(8, 2, 4))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
plan = build_plan(rows(14000, 2000, 8))
assert plan.num_tokens == 30000, plan.num_tokens
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def test_planning_takes_no_memory_to_speak_of():
    """A dense mask of 30k packed tokens would be 900 MB."""
    run = subprocess.run([sys.executable, "-c", MEMORY_PROGRAM], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) < 200
