"""Attention over a forest against causal attention on every row by itself, and mutants that must be told apart.

The first sibling of a group and groups of one are blind to most bugs, so groups are large and rows are compared one by
one.
"""

import random
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zorro_verl import attention
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


def causal(q, k, v, mask=None, softmax_dtype=None):
    """Plain causal attention of one row: ``(L, heads, D)``, in the inputs' own precision."""
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    if mask is None:
        mask = torch.ones(len(q), len(k)).tril() > 0
    scores = torch.einsum("qhd,khd->hqk", q, k) * SCALE
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1, dtype=softmax_dtype).to(q.dtype)
    return torch.einsum("hqk,khd->qhd", weights, v)


class Batch:
    """Rows of q, k, v that share prompts, and a weight for every output of every row.

    ``groups`` holds ``(prompt length, response lengths)``; rows come shuffled. Leaves are the tensors of each distinct
    prompt and each response: what both ways of computing attention start from and give gradients of.
    """

    def __init__(self, groups, heads, seed=0, dtype=torch.float64):
        generator = torch.Generator().manual_seed(seed)
        shape = lambda n: ((n, heads[0], HEAD_DIM), (n, heads[1], HEAD_DIM), (n, heads[1], HEAD_DIM))  # noqa: E731
        draw = lambda n: [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shape(n)]  # noqa: E731
        self.prompts = [draw(p) for p, _ in groups]
        self.rows = [(g, draw(r)) for g, (_, responses) in enumerate(groups) for r in responses]
        random.Random(seed).shuffle(self.rows)
        self.weights = [
            torch.randn(len(self.prompts[g][0]) + len(r[0]), heads[0], HEAD_DIM, generator=generator).to(dtype)
            for g, r in self.rows
        ]
        prompt_lens = torch.tensor([len(self.prompts[g][0]) for g, _ in self.rows])
        lens = prompt_lens + torch.tensor([len(r[0]) for _, r in self.rows])
        tokens = torch.cat([torch.full((n,), g) for (g, _), n in zip(self.rows, lens.tolist(), strict=True)])
        self.plan = build_plan(Rows(tokens, tokens * 0, exclusive_cumsum(lens), prompt_lens))

    def to(self, dtype):
        copy = object.__new__(Batch)
        copy.prompts = [[x.to(dtype) for x in p] for p in self.prompts]
        copy.rows = [(g, [x.to(dtype) for x in r]) for g, r in self.rows]
        copy.weights = [w.to(dtype) for w in self.weights]
        copy.plan = self.plan
        return copy

    def run(self, attend_rows):
        """Each row's output, and the gradient of each leaf under names that tell dq from dk from dv."""
        leaves = {
            f"d{name} of {owner}": x.detach().clone().requires_grad_()
            for owner, tensors in [
                *((f"prompt {g}", p) for g, p in enumerate(self.prompts)),
                *((f"row {i}", r) for i, (_, r) in enumerate(self.rows)),
            ]
            for name, x in zip("qkv", tensors, strict=True)
        }
        rows = [
            [torch.cat([leaves[f"d{x} of prompt {g}"], leaves[f"d{x} of row {i}"]]) for x in "qkv"]
            for i, (g, _) in enumerate(self.rows)
        ]
        outputs = attend_rows(rows)
        sum((out * w).sum() for out, w in zip(outputs, self.weights, strict=True)).backward()
        named = {f"out of row {i}": out.detach() for i, out in enumerate(outputs)}
        return named | {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in leaves.items()}

    def row_by_row(self):
        return self.run(lambda rows: [causal(*row) for row in rows])

    def packed(self, attend):
        """Through the plan: ``attend(q, k, v)`` sees packed tensors."""

        def attend_rows(rows):
            q, k, v = (self.plan.pack(torch.cat(x), 0) for x in zip(*rows, strict=True))
            out = self.plan.unpack(attend(q, k, v), 0)
            return out.split([len(row[0]) for row in rows])

        return self.run(attend_rows)

    def split(self, q, k, v):
        return plan_attention(q, k, v, self.plan, SCALE, KERNELS)


def assert_same(expected, got, tolerance, relative=False):
    """Each row's output and each leaf's gradient; ``relative`` to the largest output, dq, dk or dv of the batch."""
    assert expected.keys() == got.keys()
    for kind in ("out", "dq", "dk", "dv"):
        names = [name for name in expected if name.startswith(kind) and expected[name].numel()]
        scale = max(float(expected[name].abs().max()) for name in names) if relative else 1.0
        for name in names:
            worst = float((expected[name].double() - got[name].double()).abs().max())
            assert worst <= tolerance * scale, f"{name}: {worst}"


GROUPS = st.lists(
    st.tuples(st.integers(1, 7), st.lists(st.integers(0, 5), min_size=1, max_size=5)), min_size=1, max_size=4
)


@hypothesis_settings(max_examples=250)
@given(groups=GROUPS, heads=st.sampled_from(HEADS), seed=st.integers(0, 2**16))
def test_split_attention_equals_causal_rows(groups, heads, seed):
    batch = Batch(groups, heads, seed)
    assert_same(batch.row_by_row(), batch.packed(batch.split), 1e-10)


@hypothesis_settings(max_examples=60)
@given(groups=GROUPS, heads=st.sampled_from(HEADS), seed=st.integers(0, 2**16))
def test_reference_and_unshared_attention_equal_causal_rows(groups, heads, seed):
    batch = Batch(groups, heads, seed)
    expected = batch.row_by_row()
    for kernels in (None, KERNELS):
        for split in (True, False):
            attend = partial(plan_attention, plan=batch.plan, scale=SCALE, kernels=kernels, split=split)
            assert_same(expected, batch.packed(attend), 1e-10)


FORESTS = st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 4)), min_size=1, max_size=12)


def forest_of(drawn, depth):
    """``(parent choice, length)`` pairs as lengths and parents of a forest of at most this depth, in any order."""
    levels, parents = [], []
    for segment, (choice, _) in enumerate(drawn):
        candidates = [-1, *(s for s in range(segment) if levels[s] < depth)]
        parents.append(candidates[choice % len(candidates)])
        levels.append(0 if parents[-1] < 0 else levels[parents[-1]] + 1)
    rename = list(range(len(drawn)))
    random.Random(len(drawn)).shuffle(rename)
    lengths = torch.zeros(len(drawn), dtype=torch.int64)
    renamed = torch.full((len(drawn),), -1)
    for segment, parent in enumerate(parents):
        lengths[rename[segment]] = drawn[segment][1]
        renamed[rename[segment]] = -1 if parent < 0 else rename[parent]
    return lengths, renamed


def paths_one_by_one(q, k, v, lengths, parents):
    """Each segment at the end of its own path from the root, as a causal row; tokens segment after segment."""
    bounds = exclusive_cumsum(lengths).tolist()
    outputs = []
    for segment in range(len(lengths)):
        path = [segment]
        while parents[path[0]] >= 0:
            path.insert(0, int(parents[path[0]]))
        index = torch.cat([torch.arange(bounds[s], bounds[s + 1]) for s in path])
        row = causal(q[index], k[index], v[index])
        outputs.append(row[len(index) - int(lengths[segment]) :])
    return torch.cat(outputs)


def forest_values(lengths, heads, seed):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda h: torch.randn(int(lengths.sum()), h, HEAD_DIM, dtype=torch.float64, generator=generator)  # noqa: E731
    return [draw(heads[0]), draw(heads[1]), draw(heads[1])], draw(heads[0])


def through_forest(q, k, v, lengths, parents, attend):
    """``attend(q, k, v, forest)`` on packed tensors, with tokens segment after segment outside."""
    forest = Forest(lengths, parents)
    bounds = exclusive_cumsum(lengths).tolist()
    pack = torch.cat([torch.arange(bounds[s], bounds[s + 1]) for s in forest.order.tolist()])
    return attend(q[pack], k[pack], v[pack], forest)[pack.argsort()]


@hypothesis_settings(max_examples=250)
@given(drawn=FORESTS, heads=st.sampled_from(HEADS), seed=st.integers(0, 2**16))
def test_forests_to_depth_three_equal_causal_paths(drawn, heads, seed):
    lengths, parents = forest_of(drawn, depth=3)
    if not lengths.sum():
        return
    values, weights = forest_values(lengths, heads, seed)
    results = []
    for attend in (
        partial(paths_one_by_one, lengths=lengths, parents=parents),
        partial(through_forest, lengths=lengths, parents=parents, attend=split),
        partial(through_forest, lengths=lengths, parents=parents, attend=reference),
    ):
        leaves = [x.clone().requires_grad_() for x in values]
        out = attend(*leaves)
        results.append([out, *torch.autograd.grad((out * weights).sum(), leaves)])
    for got in results[1:]:
        for name, a, b in zip(("out", "dq", "dk", "dv"), results[0], got, strict=True):
            assert (a - b).abs().max() <= 1e-10, name


def split(q, k, v, forest):
    return split_attention(q, k, v, forest, SCALE, KERNELS)


def reference(q, k, v, forest):
    return reference_attention(q, k, v, forest.visible(), SCALE)


RAGGED = [(9, [4, 0, 1, 7, 3]), (1, [5, 2, 6]), (5, [8]), (17, [1, 1, 30, 12])]


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("attend", ["split", "reference", "unshared"])
def test_float32(heads, attend):
    batch = Batch(RAGGED, heads, dtype=torch.float32)
    settings = {"split": (KERNELS, True), "reference": (None, True), "unshared": (KERNELS, False)}[attend]
    got = batch.packed(lambda q, k, v: plan_attention(q, k, v, batch.plan, SCALE, *settings))
    assert {x.dtype for x in got.values()} == {torch.float32}
    assert_same(batch.to(torch.float64).row_by_row(), got, 2e-5, relative=True)


def rms(expected, got, kind):
    """Root mean square of the error over all leaves of one kind."""
    errors = [(expected[name] - got[name].double()).flatten() for name in expected if name.startswith(kind)]
    return float(torch.cat(errors).square().mean().sqrt())


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("attend", ["split", "reference"])
def test_bfloat16_is_as_good_as_causal_attention_in_bfloat16(heads, seed, attend):
    """Against float64, the errors of both; agreement with each other would prove nothing."""
    batch = Batch([(33, [17, 5, 9, 40]), (64, [20, 20, 1]), (7, [11])], heads, seed, torch.bfloat16)

    def flash(rows):
        return [
            torch.nn.functional.scaled_dot_product_attention(
                *(x.transpose(0, 1)[None] for x in row), is_causal=True, scale=SCALE, enable_gqa=True
            )[0].transpose(0, 1)
            for row in rows
        ]

    def eager(rows):
        """As transformers' eager attention: scores in bfloat16, their softmax in float32."""
        return [causal(*row, softmax_dtype=torch.float32) for row in rows]

    kernels, plain = (KERNELS, flash) if attend == "split" else (None, eager)
    expected, plain = batch.to(torch.float64).row_by_row(), batch.run(plain)
    got = batch.packed(lambda q, k, v: plan_attention(q, k, v, batch.plan, SCALE, kernels))
    assert {x.dtype for x in got.values()} == {torch.bfloat16}
    for kind in ("out", "dq", "dk", "dv"):
        assert 0 < rms(expected, got, kind) <= 1.5 * rms(expected, plain, kind), kind


@pytest.mark.parametrize("heads", [(2, 2), (2, 1)])
def test_gradcheck(heads):
    lengths, parents = torch.tensor([2, 1, 1, 1, 1]), torch.tensor([-1, 0, 0, 1, -1])
    (q, k, v), _ = forest_values(lengths, heads, 0)
    inputs = [x[..., :2].clone().requires_grad_() for x in (q, k, v)]
    forest = Forest(lengths, parents)
    assert torch.autograd.gradcheck(lambda q, k, v: split(q, k, v, forest), inputs)


def test_two_runs_are_bit_identical():
    for dtype in (torch.float32, torch.bfloat16):
        batch = Batch(RAGGED, (4, 2), dtype=dtype)
        first, second = batch.packed(batch.split), batch.packed(batch.split)
        assert all(torch.equal(first[name], second[name]) for name in first)


def test_half_precision_is_rounded_once_however_many_calls_there_are():
    """Along a chain of segments each is merged from a call per ancestor; rounded after every one, it would be 1.4 x."""
    lengths, parents = torch.full((13,), 6), torch.arange(-1, 12)
    forest, generator = Forest(lengths, parents), torch.Generator().manual_seed(0)
    shapes = [(4, HEAD_DIM), (2, HEAD_DIM), (2, HEAD_DIM), (4, HEAD_DIM)]
    *values, weight = (torch.randn(78, *shape, generator=generator).bfloat16() for shape in shapes)

    def run(dtype):
        leaves = [x.to(dtype).requires_grad_() for x in values]
        out = split_attention(*leaves, forest, SCALE, KERNELS)
        (out * weight.to(dtype)).sum().backward()
        return [out.detach(), *(x.grad for x in leaves)]

    assert len(forest.cross_calls) == 12
    errors = [float((a - b).norm() / a.norm()) for a, b in zip(run(torch.float64), run(torch.bfloat16), strict=True)]
    assert all(error <= bound for error, bound in zip(errors, (2.6e-3, 4.6e-3, 4.8e-3, 4.2e-3), strict=True)), errors


def test_inputs_and_gradient_in_any_memory_layout():
    """Models hand over transposed views, and their gradient comes back transposed."""
    batch = Batch(RAGGED, (4, 2))
    seen = []

    class Recording(CpuKernels):
        def arrange(self, q, k, v):
            return q.contiguous(), k.contiguous(), v.contiguous()

        def backward(self, grad, q, k, v, out, lse, call, scale):
            seen.extend([grad, q, k, v, out])
            return super().backward(grad, q, k, v, out, lse, call, scale)

    def attend(q, k, v, kernels):
        q, k, v = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v))
        assert not q.is_contiguous()
        out = plan_attention(q, k, v, batch.plan, SCALE, kernels)
        heads = torch.arange(out.shape[1])
        return out.transpose(0, 1).contiguous().index_select(0, heads).transpose(0, 1)

    for kernels in (KERNELS, Recording()):
        assert_same(batch.row_by_row(), batch.packed(partial(attend, kernels=kernels)), 1e-10)
    assert len(seen) == 10
    assert all(x.is_contiguous() for x in seen), "kernels on a GPU index by strides that they assume"


def test_the_scores_may_be_large():
    """exp of an unmerged log-sum-exp would overflow where a rollout's scores differ by hundreds."""
    batch = Batch(RAGGED, (4, 2))
    for tensors in [*batch.prompts, *(r for _, r in batch.rows)]:
        tensors[0] *= 60
        tensors[1] *= 60
    expected, got = batch.row_by_row(), batch.packed(batch.split)
    assert all(x.isfinite().all() for x in got.values())
    assert_same(expected, got, 1e-10, relative=True)


def test_reference_refuses_long_batches(monkeypatch):
    batch = Batch([(6, [2, 2])], (4, 2))
    monkeypatch.setattr(attention, "MAX_REFERENCE_TOKENS", 9)
    with pytest.raises(ValueError, match="attn_implementation=eager.*at most 9 packed tokens.*got 10.*sdpa"):
        batch.packed(lambda q, k, v: plan_attention(q, k, v, batch.plan, SCALE, None))
    batch.packed(batch.split)


def test_kernels_are_called_once_a_level():
    """However many rows and groups: one causal call and one rectangle, on views of the packed tensors."""
    batch = Batch(RAGGED, (4, 2))
    calls = []

    class Recording(CpuKernels):
        def forward(self, q, k, v, call, scale):
            calls.append((call.causal, len(q), len(k), q.untyped_storage().data_ptr(), k.untyped_storage().data_ptr()))
            return super().forward(q, k, v, call, scale)

    batch.packed(lambda q, k, v: plan_attention(q, k, v, batch.plan, SCALE, Recording()))
    (own, *q_and_k), (cross, *cross_views) = calls
    assert (own, cross) == (True, False)
    total, prompts, alone = batch.plan.num_tokens, 9 + 1 + 17, 5 + 8
    assert q_and_k[:2] == [total, total]
    assert cross_views[:2] == [total - prompts - alone, prompts]
    assert cross_views[2:] == q_and_k[2:], "no copy of the queries or keys"


# Mutants: the comparison above must tell each of these from the real thing.


def dense_call(q, k, v, blocks):
    """Output and log-sum-exp of ``(q0, q1, k0, k1, causal)`` blocks in plain, differentiable torch."""
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    outs, lses = [], []
    for q0, q1, k0, k1, is_causal in blocks:
        scores = torch.einsum("qhd,khd->hqk", q[q0:q1], k[k0:k1]) * SCALE
        if is_causal:
            scores = scores.masked_fill(torch.ones(q1 - q0, k1 - k0).tril() == 0, -torch.inf)
        outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[k0:k1]))
        lses.append(scores.logsumexp(-1))
    return torch.cat(outs), torch.cat(lses, 1)


def merge_by_autograd(q, k, v, forest, detach_lse=False, detach_prompt=False):
    """Split attention whose backward is left to autograd."""
    own, (cross,) = forest.self_call, forest.cross_calls
    out, lse = dense_call(q, k, v, [(*b, True) for b in own.blocks])
    first, prompt_k, prompt_v = cross.query_start, k[: cross.num_keys], v[: cross.num_keys]
    if detach_prompt:
        prompt_k, prompt_v = prompt_k.detach(), prompt_v.detach()
    part, part_lse = dense_call(q[first:], prompt_k, prompt_v, [(*b, False) for b in cross.blocks])
    lse = lse[:, first:]
    if detach_lse:
        lse, part_lse = lse.detach(), part_lse.detach()
    merged = torch.logaddexp(lse, part_lse)
    weigh = lambda values, weight: values * (weight - merged).exp().T[..., None]  # noqa: E731
    return torch.cat([out[:first], weigh(out[first:], lse) + weigh(part, part_lse)])


MUTANT_GROUPS = [(5, [3, 4, 2]), (1, [2, 2, 5, 1]), (7, [4])]


def test_control_merge_by_autograd_is_exact():
    batch = Batch(MUTANT_GROUPS, (4, 2))
    attend = partial(merge_by_autograd, forest=batch.plan.forest)
    assert_same(batch.row_by_row(), batch.packed(attend), 1e-10)


def test_mutant_without_the_gradient_of_the_log_sum_exp():
    """What autograd makes of kernels that return a log-sum-exp without a gradient: the forward stays exact."""
    batch = Batch(MUTANT_GROUPS, (4, 2))
    got = batch.packed(partial(merge_by_autograd, forest=batch.plan.forest, detach_lse=True))
    expected = batch.row_by_row()
    outputs = {name for name in expected if name.startswith("out")}
    assert_same({n: expected[n] for n in outputs}, {n: got[n] for n in outputs}, 1e-10)
    with pytest.raises(AssertionError, match="d[qk] of"):
        assert_same(expected, got, 1e-2)


def test_mutant_with_a_detached_prompt():
    batch = Batch(MUTANT_GROUPS, (4, 2))
    got = batch.packed(partial(merge_by_autograd, forest=batch.plan.forest, detach_prompt=True))
    with pytest.raises(AssertionError, match="d[kv] of prompt 0"):
        assert_same(batch.row_by_row(), got, 1e-2)


def test_mutant_backward_with_each_calls_own_log_sum_exp():
    class Unmerged(CpuKernels):
        def backward(self, grad, q, k, v, out, lse, call, scale):
            return super().backward(grad, q, k, v, *self.forward(q, k, v, call, scale), call, scale)

    batch = Batch(MUTANT_GROUPS, (4, 2))
    got = batch.packed(lambda q, k, v: plan_attention(q, k, v, batch.plan, SCALE, Unmerged()))
    with pytest.raises(AssertionError, match="d[qkv] of"):
        assert_same(batch.row_by_row(), got, 1e-2)


def test_mutant_that_leaks_between_siblings():
    """Causal over the whole packed group. The first sibling of each group is right, which is why one is not enough."""
    batch = Batch(MUTANT_GROUPS, (4, 2))
    segment = batch.plan.forest.segment_index()
    parents = batch.plan.forest.parents
    root = torch.where(parents < 0, torch.arange(len(parents)), parents)[segment]
    place = torch.arange(len(segment))
    leaky = (root[:, None] == root[None, :]) & (place[:, None] >= place[None, :])
    got = batch.packed(lambda q, k, v: reference_attention(q, k, v, leaky, SCALE))
    expected = batch.row_by_row()
    groups = batch.plan.group_index.tolist()
    for row, group in enumerate(groups):
        first = row == groups.index(group)
        error = float((expected[f"out of row {row}"] - got[f"out of row {row}"]).abs().max())
        assert error <= 1e-10 if first else error > 1e-2, row


@pytest.mark.parametrize("bottom_right", [True, False])
def test_mutant_with_causality_aligned_to_the_top_left(bottom_right):
    """Response queries over prompt and response keys: the two conventions of flash attention, of which one is right."""
    batch = Batch(MUTANT_GROUPS, (4, 2))

    def attend(rows):
        outputs = []
        for (q, k, v), (g, _) in zip(rows, batch.rows, strict=True):
            p = len(batch.prompts[g][0])
            mask = torch.ones(len(q) - p, len(k)).tril(diagonal=p if bottom_right else 0) > 0
            outputs.append(torch.cat([causal(q[:p], k[:p], v[:p]), causal(q[p:], k, v, mask)]))
        return outputs

    got = batch.run(attend)
    if bottom_right:
        assert_same(batch.row_by_row(), got, 1e-10)
        return
    with pytest.raises(AssertionError, match="out of row"):
        assert_same(batch.row_by_row(), got, 1e-2)
