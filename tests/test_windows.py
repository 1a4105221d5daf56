"""Attention within a sliding window, against dense attention on every path by itself.

The window counts tokens of the unpadded row, so it reaches from a response into the tail of its prompt, and in deeper
forests over several segments, empty ones among them.
"""

import random
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from zorro_verl import varlen
from zorro_verl.attention import plan_attention, reference_attention, split_attention
from zorro_verl.forest import Forest
from zorro_verl.grouping import Rows, exclusive_cumsum
from zorro_verl.packing import build_plan
from zorro_verl.varlen import CpuKernels

SCALE = 0.4
HEAD_DIM = 8
HEADS = [(4, 4), (4, 2), (4, 1)]
KERNELS = CpuKernels()

hypothesis_settings = partial(settings, deadline=None, derandomize=True, database=None)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """So that short rows have several."""
    monkeypatch.setattr(varlen, "WINDOW_TILE", 2)


def band(length, window):
    """``(L, L)`` bool: each token sees itself and the ``window - 1`` before it, or all of them without a window."""
    rows = [[k <= q and (window is None or k > q - window) for k in range(length)] for q in range(length)]
    return torch.tensor(rows, dtype=torch.bool).view(length, length)


def dense(q, k, v, window):
    """One row: ``(L, heads, D)``."""
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * SCALE
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~band(len(q), window), -torch.inf).softmax(-1), v)


def path(parents, segment):
    """The segment behind its ancestors, the root first."""
    found = [segment]
    while parents[found[0]] >= 0:
        found.insert(0, int(parents[found[0]]))
    return found


def path_by_path(q, k, v, lengths, parents, window):
    """Each segment at the end of its own path from the root; tokens segment after segment."""
    bounds = exclusive_cumsum(lengths).tolist()
    outputs = []
    for segment in range(len(lengths)):
        index = torch.cat([torch.arange(bounds[s], bounds[s + 1]) for s in path(parents, segment)])
        row = dense(q[index], k[index], v[index], window)
        outputs.append(row[len(index) - int(lengths[segment]) :])
    return torch.cat(outputs)


def through_forest(q, k, v, lengths, parents, attend):
    """``attend(q, k, v, forest)`` on packed tensors, with tokens segment after segment outside."""
    forest = Forest(lengths, parents)
    bounds = exclusive_cumsum(lengths).tolist()
    pack = torch.cat([torch.arange(bounds[s], bounds[s + 1]) for s in forest.order.tolist()])
    return attend(q[pack], k[pack], v[pack], forest)[pack.argsort()]


def draw(tokens, heads, seed=0, dtype=torch.float64):
    """q, k, v and a weight for every output."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(tokens, h, HEAD_DIM) for h in (heads[0], heads[1], heads[1], heads[0])]
    *values, weights = (torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes)
    return values, weights


def results(values, weights, attend):
    """Output, dq, dk and dv."""
    leaves = [x.clone().requires_grad_() for x in values]
    out = attend(*leaves)
    gradients = torch.autograd.grad((out * weights).sum(), leaves)
    return dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *gradients), strict=True))


def assert_same(expected, got, tolerance=1e-10):
    for name, value in expected.items():
        worst = float((value - got[name]).abs().max())
        assert worst <= tolerance, f"{name}: {worst}"


def windowed(q, k, v, forest, window):
    return split_attention(q, k, v, forest, SCALE, KERNELS, window)


def reference(q, k, v, forest, window):
    return reference_attention(q, k, v, forest.visible(window), SCALE)


def random_forest(drawn):
    """``(parent choice, length)`` pairs as lengths and parents of a forest of depth 3 at most, in any order."""
    levels, parents = [], []
    for segment, (choice, _) in enumerate(drawn):
        candidates = [-1, *(s for s in range(segment) if levels[s] < 3)]
        parents.append(candidates[choice % len(candidates)])
        levels.append(0 if parents[-1] < 0 else levels[parents[-1]] + 1)
    rename = list(range(len(drawn)))
    random.Random(len(drawn)).shuffle(rename)
    lengths, renamed = torch.zeros(len(drawn), dtype=torch.int64), torch.full((len(drawn),), -1)
    for segment, parent in enumerate(parents):
        lengths[rename[segment]] = drawn[segment][1]
        renamed[rename[segment]] = -1 if parent < 0 else rename[parent]
    return lengths, renamed


FORESTS = st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 5)), min_size=1, max_size=12)


@hypothesis_settings(max_examples=250)
@given(drawn=FORESTS, window=st.integers(1, 3), heads=st.sampled_from(HEADS), seed=st.integers(0, 2**16))
def test_narrow_windows_over_forests(drawn, window, heads, seed):
    compare(*random_forest(drawn), window, heads, seed)


@hypothesis_settings(max_examples=150)
@given(drawn=FORESTS, less=st.integers(-1, 5), heads=st.sampled_from(HEADS), seed=st.integers(0, 2**16))
def test_windows_about_as_long_as_the_longest_path(drawn, less, heads, seed):
    lengths, parents = random_forest(drawn)
    longest = max(int(lengths[path(parents, s)].sum()) for s in range(len(lengths)))
    compare(lengths, parents, max(1, longest - less), heads, seed)


def compare(lengths, parents, window, heads, seed=0):
    if not lengths.sum():
        return
    values, weights = draw(int(lengths.sum()), heads, seed)
    where = {"lengths": lengths, "parents": parents}
    expected = results(values, weights, partial(path_by_path, **where, window=window))
    for attend in (windowed, reference):
        got = results(values, weights, partial(through_forest, **where, attend=partial(attend, window=window)))
        assert_same(expected, got)


@pytest.mark.parametrize("window", range(1, 12))
@pytest.mark.parametrize("lengths", [[4, 0, 2, 3], [4, 1, 1, 3], [1, 0, 0, 5], [0, 2, 0, 2], [6, 0, 0, 1]])
def test_a_window_that_reaches_over_segments(lengths, window):
    """A chain to depth 3 with a sibling of everything on the way, and a tree beside it."""
    lengths = torch.tensor([*lengths, 2, 3, 1, 5])
    parents = torch.tensor([-1, 0, 1, 2, 0, 1, 2, -1])
    compare(lengths, parents, window, (4, 2))


@pytest.mark.parametrize("tile", [1, 2, 3, 256])
def test_any_tile(monkeypatch, tile):
    monkeypatch.setattr(varlen, "WINDOW_TILE", tile)
    lengths, parents = torch.tensor([7, 5, 1, 6, 3]), torch.tensor([-1, 0, 0, 1, -1])
    for window in (1, 2, 4, 9, 30):
        compare(lengths, parents, window, (4, 2))


def test_many_tiles_of_the_usual_size(monkeypatch):
    """Keys beyond the CPU kernel's own block of 512, of which a query may see none."""
    monkeypatch.setattr(varlen, "WINDOW_TILE", 256)
    lengths, parents = torch.tensor([700, 300, 520]), torch.tensor([-1, 0, 0])
    for window in (5, 600):
        compare(lengths, parents, window, (2, 1))


@pytest.mark.parametrize("heads", [(2, 2), (2, 1)])
def test_gradcheck(heads):
    lengths, parents = torch.tensor([3, 1, 2, 1, 1]), torch.tensor([-1, 0, 0, 1, -1])
    (q, k, v), _ = draw(int(lengths.sum()), heads)
    inputs = [x[..., :2].clone().requires_grad_() for x in (q, k, v)]
    forest = Forest(lengths, parents)
    assert torch.autograd.gradcheck(lambda q, k, v: windowed(q, k, v, forest, 3), inputs)


def plan_of(groups, seed=0):
    """``(prompt length, response lengths)`` as a plan, with rows shuffled."""
    rows = [(g, p, r) for g, (p, responses) in enumerate(groups) for r in responses]
    random.Random(seed).shuffle(rows)
    prompt_lens, lens = torch.tensor([p for _, p, _ in rows]), torch.tensor([p + r for _, p, r in rows])
    tokens = torch.cat([torch.full((p + r,), g) for g, p, r in rows])
    return build_plan(Rows(tokens, tokens * 0, exclusive_cumsum(lens), prompt_lens))


def row_by_row(q, k, v, plan, window):
    """The oracle on packed tensors; each row computes its own copy of the prompt, which counts once."""
    lens = plan.unshared.forest.lengths.tolist()
    rows = zip(*(plan.unpack(x, 0).split(lens) for x in (q, k, v)), strict=True)
    return torch.cat([dense(*row, window) for row in rows])


GROUPS = [(9, [4, 0, 1, 7, 3]), (1, [5, 2, 6]), (5, [8]), (6, [1, 1, 10, 12])]  # the longest row has 18


@pytest.mark.parametrize("window", [1, 2, 3, 6, 17, 18, 19, None])
@pytest.mark.parametrize("heads", HEADS)
def test_plans_equal_rows(window, heads):
    plan = plan_of(GROUPS)
    assert plan.longest_row == 18
    values, weights = draw(plan.num_tokens, heads)
    weights = torch.randn(plan.num_row_tokens, heads[0], HEAD_DIM, dtype=torch.float64)
    expected = results(values, weights, partial(row_by_row, plan=plan, window=window))
    for kernels in (KERNELS, None):
        for split in (True, False):
            got = results(
                values,
                weights,
                lambda q, k, v, kernels=kernels, split=split: plan.unpack(
                    plan_attention(q, k, v, plan, SCALE, kernels, split, window), 0
                ),
            )
            assert_same(expected, got)


@pytest.mark.parametrize("window", [18, 19, 10**9])
@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("kernels", [KERNELS, None])
def test_a_window_that_does_not_bite_changes_nothing(window, split, kernels, monkeypatch):
    plan = plan_of(GROUPS)
    values, weights = draw(plan.num_tokens, (4, 2))
    attend = partial(plan_attention, plan=plan, scale=SCALE, kernels=kernels, split=split)
    expected = results(values, weights, attend)
    monkeypatch.setattr(Forest, "window_call", None)
    got = results(values, weights, partial(attend, window=window))
    assert all(torch.equal(expected[name], got[name]) for name in expected)


@pytest.mark.parametrize("window", [0, -1])
def test_an_empty_window_is_named(window):
    plan = plan_of(GROUPS)
    with pytest.raises(ValueError, match=f"sliding_window: expected None or at least 1 token, got {window}"):
        plan_attention(*draw(plan.num_tokens, (4, 2))[0], plan, SCALE, KERNELS, window=window)


def test_inputs_and_gradient_in_any_memory_layout():
    plan = plan_of(GROUPS)
    values, weights = draw(plan.num_tokens, (4, 2))
    turned = lambda x: x.transpose(0, 1).contiguous().transpose(0, 1)  # noqa: E731
    seen = []

    class Recording(CpuKernels):
        def arrange(self, q, k, v):
            return q.contiguous(), k.contiguous(), v.contiguous()

        def backward(self, grad, q, k, v, out, lse, call, scale):
            seen.extend([grad, q, k, v, out])
            return super().backward(grad, q, k, v, out, lse, call, scale)

    def through_turned(q, k, v):
        out = plan_attention(turned(q), turned(k), turned(v), plan, SCALE, Recording(), window=4)
        return out.transpose(0, 1).contiguous().index_select(0, torch.arange(4)).transpose(0, 1)

    expected = results(values, weights, partial(plan_attention, plan=plan, scale=SCALE, kernels=KERNELS, window=4))
    assert_same(expected, results(values, weights, through_turned))
    assert len(seen) == 5
    assert all(x.is_contiguous() for x in seen), "kernels on a GPU index by strides that they assume"


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("attend", ["windowed", "unshared", "reference"])
def test_float32(heads, attend):
    plan = plan_of(GROUPS)
    values, weights = draw(plan.num_tokens, heads)
    expected = results(values, weights, partial(plan_attention, plan=plan, scale=SCALE, kernels=None, window=4))
    values, weights = [x.float() for x in values], weights.float()
    arguments = {"windowed": (KERNELS, True), "unshared": (KERNELS, False), "reference": (None, True)}[attend]
    got = results(values, weights, lambda q, k, v: plan_attention(q, k, v, plan, SCALE, *arguments, window=4))
    for name, value in got.items():
        assert value.dtype == torch.float32
        assert (value - expected[name]).abs().max() <= 2e-5 * expected[name].abs().max(), name


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("window", [3, 16, 50])
def test_bfloat16_is_as_good_as_masked_attention_in_bfloat16(heads, window, monkeypatch):
    """Against float64, the errors of both; agreement with each other would prove nothing."""
    monkeypatch.setattr(varlen, "WINDOW_TILE", 32)
    plan = plan_of([(33, [17, 5, 9, 40]), (64, [20, 20, 1]), (7, [11])])
    values, weights = draw(plan.num_tokens, heads, dtype=torch.bfloat16)

    def plain(q, k, v):
        rows = zip(*(plan.unpack(x, 0).split(plan.unshared.forest.lengths.tolist()) for x in (q, k, v)), strict=True)
        outputs = [
            scaled_dot_product_attention(
                *(x.transpose(0, 1)[None] for x in row),
                attn_mask=band(len(row[0]), window),
                scale=SCALE,
                enable_gqa=True,
            )[0].transpose(0, 1)
            for row in rows
        ]
        return plan.pack(torch.cat(outputs), 0)

    def exact(q, k, v):
        return plan.pack(row_by_row(q, k, v, plan, window), 0)

    expected = results([x.double() for x in values], weights.double(), exact)
    plain = results(values, weights, plain)
    got = results(values, weights, partial(plan_attention, plan=plan, scale=SCALE, kernels=KERNELS, window=window))
    rms = lambda a, b: float((a.double() - b.double()).square().mean().sqrt())  # noqa: E731
    for name, value in got.items():
        assert value.dtype == torch.bfloat16
        assert 0 < rms(expected[name], value) <= 1.5 * rms(expected[name], plain[name]), name


class SumTypes(TorchDispatchMode):
    """What the sums of copies' gradients are made in."""

    def __init__(self):
        super().__init__()
        self.dtypes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.index_add_.default:
            self.dtypes.append(args[0].dtype)
        return func(*args, **(kwargs or {}))


def test_gradients_of_many_copies_are_summed_in_float32():
    """A sum of 500 in bfloat16 stops growing at 256 times its terms."""
    plan = plan_of([(5, [1] * 500)])
    values, _ = draw(plan.num_tokens, (2, 1), dtype=torch.bfloat16)
    weights = torch.ones(plan.num_tokens, 2, HEAD_DIM, dtype=torch.bfloat16)
    attend = partial(plan_attention, plan=plan, scale=SCALE, kernels=KERNELS, window=3)
    expected = results([x.double() for x in values], weights.double(), attend)["dv"]
    with SumTypes() as sums:
        got = results(values, weights, attend)["dv"]
    assert sums.dtypes == [torch.float32] * 2, "on a GPU, sums in bfloat16 are rounded at every step"
    assert expected[4].max() > 256
    assert (got[3:5] / expected[3:5] - 1).abs().max() < 2**-8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_runs_are_bit_identical(dtype):
    plan = plan_of(GROUPS)
    values, weights = draw(plan.num_tokens, (4, 2), dtype=dtype)
    attend = partial(plan_attention, plan=plan, scale=SCALE, kernels=KERNELS, window=4)
    first, second = results(values, weights, attend), results(values, weights, attend)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_what_is_built_once_and_what_is_kept():
    """For the backward: q, k, v, the output and the log-sum-exp, and no copy of keys and values for each response."""
    plan = plan_of([(20, [3] * 8)])
    values, weights = draw(plan.num_tokens, (4, 2))
    leaves = [x.clone().requires_grad_() for x in values]
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(tuple(x.shape)) or x, lambda x: x):
        plan_attention(*leaves, plan, SCALE, KERNELS, window=9)
    q, kv, lse = (44, 4, HEAD_DIM), (44, 2, HEAD_DIM), (4, 44)
    assert kept == [q, kv, kv, q, lse]
    forest = plan.forest
    assert forest.window_call(9) is forest.window_call(9)
    assert forest.window_call(9).num_keys == 20 + 8 * (8 + 3)
    assert forest.window_call(8).num_keys == 20 + 8 * (7 + 3)
    assert plan.dense_mask(9) is plan.dense_mask(9)
    assert plan.dense_mask() is plan.dense_mask()
    assert not torch.equal(plan.dense_mask(), plan.dense_mask(9))
    assert not torch.equal(plan.dense_mask(8), plan.dense_mask(9))


class Largest(TorchDispatchMode):
    """The most numbers in any tensor that an operation returns, and the pairs of queries and keys that were scored."""

    def __init__(self):
        super().__init__()
        self.numel = self.pairs = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        returned = result if isinstance(result, (tuple, list)) else [result]
        self.numel = max([self.numel, *(x.numel() for x in returned if isinstance(x, torch.Tensor))])
        if func is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default:
            self.pairs += args[0].shape[2] * args[1].shape[2]
        return result


def test_long_rows_cost_what_their_window_does(monkeypatch):
    """A mask of the prompt alone would have 36 million entries; the largest tensor here is q, k, v or a tile's mask."""
    monkeypatch.setattr(varlen, "WINDOW_TILE", 256)
    window = 64
    plan = plan_of([(6000, [300, 500])])
    values, weights = draw(plan.num_tokens, (1, 1), dtype=torch.float32)
    with Largest() as largest:
        results(values, weights, partial(plan_attention, plan=plan, scale=SCALE, kernels=KERNELS, window=window))
    tokens = 6800 + 2 * (window - 1)
    assert largest.numel <= max(tokens * HEAD_DIM, 256 * (256 + window))
    assert largest.pairs <= tokens * (256 + window)


# Mutants: the comparison above must tell each of these from the real thing.


@pytest.mark.parametrize("change", ["one-more", "one-less", "own-segment-only", "by-packed-place"])
def test_mutants_of_the_window(change):
    lengths, parents = torch.tensor([6, 0, 4, 3, 5]), torch.tensor([-1, 0, 1, 1, 0])
    values, weights = draw(int(lengths.sum()), (4, 2))
    where = {"lengths": lengths, "parents": parents}
    expected = results(values, weights, partial(path_by_path, **where, window=4))

    def attend(q, k, v, forest):
        segment, place = forest.segment_index(), torch.arange(forest.num_tokens)
        visible = {
            "one-more": forest.visible(5),
            "one-less": forest.visible(3),
            "own-segment-only": forest.visible(4) & (segment[:, None] == segment[None, :]),
            "by-packed-place": forest.visible() & (place[:, None] - place[None, :] < 4),
        }[change]
        return reference_attention(q, k, v, visible, SCALE)

    got = results(values, weights, partial(through_forest, **where, attend=attend))
    with pytest.raises(AssertionError, match="out"):
        assert_same(expected, got, 1e-2)
