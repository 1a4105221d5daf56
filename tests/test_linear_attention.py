"""Gated DeltaNet and its convolution over a plan, against both run on the full path of every row alone.

Packed tensors are the leaves of both ways, so the oracle's gradients of a shared token are sums over its rows. The
first row of a group and rows that are alone are blind to most bugs: groups have three or more, rows are compared one
by one.
"""

import random
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import conv1d, pad, silu
from torch.overrides import TorchFunctionMode
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

from zorro_verl.forest import Forest
from zorro_verl.grouping import Rows, exclusive_cumsum, number_by_first_appearance
from zorro_verl.linear_attention import (
    FORK_MIN_TOKENS,
    FORK_MIN_TOKENS_VARLEN,
    LinearPlan,
    causal_conv,
    gated_delta_rule,
)
from zorro_verl.packing import build_plan

HEADS, K, V, CHANNELS = 2, 4, 3, 5
NAMES = ("query", "key", "value", "g", "beta")
WAYS = [("expand", False), ("expand", True), ("fork", False), ("fork", True)]
RAGGED = [
    *[(1, [0, 1, 70]), (2, [3, 64, 2]), (3, [65, 1, 63, 0]), (4, [2, 70, 3]), (63, [1, 64, 65]), (64, [63, 2, 0])],
    *[(65, [70, 1, 3]), (66, [64, 63, 1]), (130, [2, 65, 70]), (5, [9]), (70, [3]), (64, [0]), (2, [1])],
]


class KeepFloat64(TorchFunctionMode):
    """The rule in torch casts to float32: that leaves float64 tensors as they are, so that 1e-10 shows.

    It is on in the forward alone; the backward differentiates the operations that ran.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        is_double = bool(args) and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64
        if is_double and (func is torch.Tensor.float or (func is torch.Tensor.to and args[1:] == (torch.float32,))):
            return args[0]
        return func(*args, **(kwargs or {}))


def padded_rule(*args, **options):
    """transformers' rule as a plain batch: anything it would silently ignore is an error here."""
    assert options.keys() <= {"g", "beta", "initial_state", "output_final_state", "use_qk_l2norm_in_kernel"}
    with KeepFloat64():
        return torch_chunk_gated_delta_rule(*args, **options)


def varlen_rule(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
    cu_seqlens=None, **kwargs,
):  # fmt: skip
    """flash-linear-attention's signature and checks over the rule in torch, one sequence at a time."""
    assert not kwargs
    assert q.shape[0] == 1
    assert cu_seqlens.dtype == torch.int64
    bounds = cu_seqlens.tolist()
    assert bounds[0] == 0
    assert bounds[-1] == q.shape[1] == k.shape[1] == v.shape[1] == g.shape[1] == beta.shape[1]
    assert min(b - a for a, b in zip(bounds[:-1], bounds[1:], strict=True)) > 0
    if initial_state is not None:
        assert initial_state.shape == (len(bounds) - 1, v.shape[2], k.shape[3], v.shape[3])
        # Its kernels read and write states in float32; float64 stands in for it where the inputs are float64.
        assert initial_state.dtype == (torch.float64 if q.dtype == torch.float64 else torch.float32)
    outputs, states = [], []
    for i, (a, b) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
        output, state = padded_rule(
            *(x[:, a:b] for x in (q, k, v)),
            g=g[:, a:b],
            beta=beta[:, a:b],
            initial_state=None if initial_state is None else initial_state[i : i + 1],
            output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        )
        outputs.append(output)
        states.append(state)
    return torch.cat(outputs, 1), torch.cat(states) if output_final_state else None


class Spy:
    """A rule that records how it was called."""

    def __init__(self, varlen=False):
        self.rule, self.calls, self.finals = varlen_rule if varlen else padded_rule, [], []

    def __call__(self, *args, **options):
        self.calls.append(SimpleNamespace(inputs=(*args, options["g"], options["beta"]), options=options))
        output, final = self.rule(*args, **options)
        self.finals.append(final)
        return output, final


def plan_of(groups, seed=0):
    """The plan of shuffled rows, ``groups`` as (prompt length, response lengths)."""
    rows = [(group, p, r) for group, (p, responses) in enumerate(groups) for r in responses]
    random.Random(seed).shuffle(rows)
    group_index = number_by_first_appearance(torch.tensor([group for group, _, _ in rows]))
    prompt_lens = torch.tensor([p for _, p, _ in rows])
    lens = prompt_lens + torch.tensor([r for _, _, r in rows])
    tokens = torch.zeros(int(lens.sum()), dtype=torch.int64)
    return build_plan(Rows(tokens, tokens, exclusive_cumsum(lens), prompt_lens), group_index)


class DeepPlan:
    """What `LinearPlan` reads of a plan, over a forest of any depth: rows are the paths of its childless segments.

    `Plan` itself has two levels.
    """

    def __init__(self, lengths, parents):
        self.forest = Forest(torch.tensor(lengths), torch.tensor(parents))
        starts, paths = self.forest.starts.tolist(), []
        for segment in sorted(set(range(len(lengths))) - set(parents)):
            path = []
            while segment >= 0:
                path = [*range(starts[segment], starts[segment] + lengths[segment]), *path]
                segment = parents[segment]
            paths.append(torch.tensor(path, dtype=torch.int64))
        self.unpack_index = torch.cat(paths)
        self.num_row_tokens, self.num_tokens = self.unpack_index.numel(), self.forest.num_tokens
        packed = self.unpack_index.tolist()
        self.token_index = torch.tensor([packed.index(token) for token in range(self.num_tokens)])
        row_lens = torch.tensor([len(path) for path in paths])
        self.unshared = SimpleNamespace(forest=Forest(row_lens, torch.full_like(row_lens, -1)))


def paths_of(plan):
    """Each row's tokens in the packed row."""
    return [path for path in plan.unpack_index.split(plan.unshared.forest.lengths.tolist()) if path.numel()]


def rule_inputs(plan, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(1, plan.num_tokens, HEADS, *shape, generator=generator, dtype=torch.float64)  # noqa: E731
    # Forget slowly: what a prompt left behind has to show at the end of a response.
    inputs = draw(K), draw(K), draw(V), -0.02 * draw().abs(), draw().sigmoid()
    return [x.to(dtype).requires_grad_() for x in inputs]


def rule_of_rows(inputs, paths, rule=padded_rule):
    """The oracle: every row's full path alone."""
    outputs = []
    for path in paths:
        q, k, v, g, beta = (x[:, path] for x in inputs)
        outputs.append(rule(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0])
    return outputs


def rule_of_plan(inputs, plan, mode, varlen, rule=None):
    rule = rule or (varlen_rule if varlen else padded_rule)
    return gated_delta_rule(rule, *inputs, LinearPlan(plan, mode, varlen), use_qk_l2norm_in_kernel=True)


def with_gradients(outputs, leaves, seed=7):
    """Rows' outputs, and the gradients of a sum in which every output of every row has its own weight."""
    generator = torch.Generator().manual_seed(seed)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) for x in outputs]
    loss = sum((x * w).sum() for x, w in zip(outputs, weights, strict=True))
    gradients = torch.autograd.grad(loss, leaves)
    assert all(gradient.abs().max() > 0 for gradient in gradients)
    return [x.detach() for x in outputs], gradients


def assert_same(expected, got, tolerance, names, relative=False):
    """Row by row, and gradient by gradient; ``relative`` to the largest output, and of each gradient."""
    outputs = [(f"row {i}", *pair) for i, pair in enumerate(zip(expected[0], got[0], strict=True))]
    scale = max(float(x.abs().max()) for x in expected[0]) if relative else 1.0
    for name, a, b in outputs:
        assert float((a.double() - b.double()).abs().max()) <= tolerance * scale, name
    for name, a, b in zip(names, expected[1], got[1], strict=True):
        scale = float(a.abs().max()) if relative else 1.0
        assert float((a.double() - b.double()).abs().max()) <= tolerance * scale, f"gradient of {name}"


@pytest.fixture(scope="module")
def ragged():
    plan = plan_of(RAGGED)
    inputs, paths = rule_inputs(plan), paths_of(plan)
    return plan, inputs, paths, with_gradients(rule_of_rows(inputs, paths), inputs)


@pytest.mark.parametrize(("mode", "varlen"), WAYS)
def test_rule_equals_every_row_alone(ragged, mode, varlen):
    plan, inputs, paths, expected = ragged
    out = rule_of_plan(inputs, plan, mode, varlen)
    assert_same(expected, with_gradients([out[:, path] for path in paths], inputs), 1e-10, NAMES)


@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize(
    "groups",
    [
        pytest.param([(6, [4, 4, 4])], id="one-group-of-equal-lengths"),
        pytest.param([(64, [64, 64, 64]), (64, [64, 64, 64])], id="whole-chunks"),
        pytest.param([(7, [0, 0, 0]), (3, [0, 0, 2])], id="empty-responses"),
        pytest.param([(4, [3]), (2, [70]), (9, [0])], id="nothing-shared"),
        pytest.param([(4, [3])], id="one-row"),
    ],
)
def test_rule_and_conv_on_regular_batches(groups, varlen):
    plan = plan_of(groups)
    inputs, paths = rule_inputs(plan), paths_of(plan)
    expected = with_gradients(rule_of_rows(inputs, paths), inputs)
    for mode in ("expand", "fork"):
        out = rule_of_plan(inputs, plan, mode, varlen)
        assert_same(expected, with_gradients([out[:, path] for path in paths], inputs), 1e-10, NAMES)
    assert_conv_is_exact(plan, 4)


def assert_conv_is_exact(plan, width, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x, weight, bias = (
        torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in ((1, CHANNELS, plan.num_tokens), (CHANNELS, 1, width), (CHANNELS,))
    )
    calls = []

    def conv(x):
        calls.append(x.shape)
        return silu(conv1d(pad(x, (width - 1, 0)), weight, bias, groups=CHANNELS))

    paths, names = paths_of(plan), ("x", "weight", "bias")
    expected = with_gradients([conv(x[:, :, path]) for path in paths], (x, weight, bias))
    calls.clear()
    out = causal_conv(conv, x, width, LinearPlan(plan, width=width))
    assert len(calls) == 1
    assert out.shape == x.shape
    assert_same(expected, with_gradients([out[:, :, path] for path in paths], (x, weight, bias)), 1e-10, names)


@pytest.mark.parametrize("width", [1, 2, 3, 4, 6])
def test_conv_equals_every_row_alone(width):
    """With 4 taps, the first tokens of a response see a prompt of one to three tokens and zeros before it."""
    assert_conv_is_exact(plan_of(RAGGED), width)


def test_a_plan_serves_convolutions_up_to_its_width():
    plan = plan_of([(3, [2, 1, 4]), (1, [5])])
    x = torch.randn(1, CHANNELS, plan.num_tokens, dtype=torch.float64)
    shared = LinearPlan(plan, width=4)
    for width in (4, 2, 1):
        taps = torch.ones(CHANNELS, 1, width, dtype=torch.float64)
        conv = lambda x: conv1d(pad(x, (width - 1, 0)), taps, groups=CHANNELS)  # noqa: B023, E731
        out = causal_conv(conv, x, width, shared)
        for path in paths_of(plan):
            assert torch.allclose(out[:, :, path], conv(x[:, :, path]), atol=1e-12, rtol=0)
    with pytest.raises(ValueError, match="width: expected at most the plan's 4, got 5"):
        causal_conv(conv, x, 5, shared)


# Two roots, one of them empty; empty segments in the middle, at the end, and above segments of several depths.
#   0(5) <- 1(0) <- 3(2) <- 6(3)     0 <- 2(65) <- 4(0) <- 7(4)     2 <- 5(1) <- 8(2), 9(0)
#   10(0) <- 11(2) <- 12(1), 13(66)     0 <- 14(0) <- 15(3), 16(1)     17(4)
HAND_BUILT = (
    [5, 0, 65, 2, 0, 1, 3, 4, 2, 0, 0, 2, 1, 66, 0, 3, 1, 4],
    [-1, 0, 0, 1, 2, 2, 3, 4, 5, 5, -1, 10, 11, 11, 0, 14, 14, -1],
)


def random_forest(seed):
    rng = random.Random(seed)
    size, parents, depths = rng.randint(6, 14), [], []
    for segment in range(size):
        choices = [s for s in range(segment) if depths[s] < 3]
        parents.append(rng.choice(choices) if choices and rng.random() < 0.85 else -1)
        depths.append(depths[parents[-1]] + 1 if parents[-1] >= 0 else 0)
    lengths = [rng.choice([0, 0, 1, 2, 3, 7, 64, 66]) for _ in range(size)]
    return [lengths[0] or 1, *lengths[1:]], parents


FORESTS = [HAND_BUILT, *(random_forest(seed) for seed in range(12))]


@pytest.mark.parametrize("forest", FORESTS, ids=["by-hand", *map(str, range(12))])
def test_deep_forests_equal_every_path_alone(forest):
    plan = DeepPlan(*forest)
    inputs, paths = rule_inputs(plan), paths_of(plan)
    expected = with_gradients(rule_of_rows(inputs, paths), inputs)
    for mode, varlen in WAYS:
        spy = Spy(varlen)
        out = rule_of_plan(inputs, plan, mode, varlen, spy)
        assert len(spy.calls) <= (1 if mode == "expand" else 4)
        assert_same(expected, with_gradients([out[:, path] for path in paths], inputs), 1e-10, NAMES)
    for width in (2, 4):
        assert_conv_is_exact(plan, width)


def test_forests_hold_the_hard_cases():
    depths = [len(Forest(*map(torch.tensor, forest)).cross_calls) for forest in FORESTS]
    assert max(depths) == 3
    out_of_order = [LinearPlan(DeepPlan(*forest), "fork")._scan_index is not None for forest in FORESTS]
    assert out_of_order[0], "0 <- 1(0) <- 3 is ready before 0 <- 2 <- 5 and packed behind it"
    assert not all(out_of_order)


@pytest.mark.parametrize("varlen", [False, True])
def test_calls_of_fork(varlen):
    """States are asked for where somebody starts from them; every call gets the mixer's options and nothing else."""
    plan = plan_of([(5, [3, 0, 3]), (4, [3])])
    spy, inputs = Spy(varlen), rule_inputs(plan)
    rule_of_plan(inputs, plan, "fork", varlen, spy)
    first, second = spy.calls
    extra = {"cu_seqlens"} if varlen else set()
    for call in spy.calls:
        assert call.options.keys() - extra == {
            *("g", "beta", "initial_state", "output_final_state", "use_qk_l2norm_in_kernel")
        }
        assert call.options["use_qk_l2norm_in_kernel"] is True
    assert first.options["initial_state"] is None
    assert first.options["output_final_state"] is True
    assert second.options["initial_state"].shape == (2, HEADS, K, V)
    assert second.options["output_final_state"] is False
    if varlen:
        assert [call.options["cu_seqlens"].tolist() for call in spy.calls] == [[0, 5, 12], [0, 3, 6]]
        for call in spy.calls:
            assert [x.untyped_storage().data_ptr() for x in call.inputs] == [
                x.untyped_storage().data_ptr() for x in inputs
            ], "views of the packed row"
    else:
        assert [call.inputs[0].shape[:2] for call in spy.calls] == [(2, 7), (2, 3)]


def many_groups(seed):
    """Ragged: empty and one-token responses, rows that are alone, groups of all sizes."""
    rng = random.Random(seed)
    return [(rng.randint(1, 20), [rng.choice([0, 1, 2, 9]) for _ in range(rng.randint(1, 6))]) for _ in range(6)]


MANY = {
    "ragged": many_groups(0),
    "all-but-one-empty": [(3, [0, 0]) for _ in range(8)] + [(4, [0, 5]), (2, [0])],
    "alone-and-shared": [*((n + 1, [n]) for n in range(9)), (5, [2, 2]), (1, [1, 0, 3])],
    "all-empty": [(n + 1, [0, 0, 0]) for n in range(9)],
    "all-alone": [(n + 1, [n]) for n in range(9)],
}


@pytest.mark.parametrize(("mode", "varlen"), WAYS)
@pytest.mark.parametrize("groups", MANY)
def test_a_layer_calls_each_kernel_as_often_for_many_groups_as_for_one(groups, mode, varlen):
    """The convolution once; the rule once, and in fork mode once more where responses have tokens."""
    plan = plan_of(MANY[groups])
    spy, inputs, linear_plan, convolved = Spy(varlen), rule_inputs(plan), LinearPlan(plan, mode, varlen), []
    gated_delta_rule(spy, *inputs, linear_plan, use_qk_l2norm_in_kernel=True)
    follows = any(len(responses) > 1 and any(responses) for _, responses in MANY[groups])
    assert len(spy.calls) == (2 if mode == "fork" and follows else 1)
    scanned = plan.num_row_tokens if mode == "expand" and follows else plan.num_tokens
    if varlen:
        assert sum(call.inputs[0].shape[1] for call in spy.calls) == scanned, "each token as often as it has to be"
    causal_conv(lambda x: convolved.append(x.shape) or x, torch.ones(1, CHANNELS, plan.num_tokens), 4, linear_plan)
    assert len(convolved) == 1


@pytest.mark.parametrize("mode", ["expand", "fork"])
def test_one_call_without_states_where_nothing_is_shared(mode):
    plan = plan_of([(5, [3]), (4, [4]), (2, [7])])
    spy, inputs = Spy(), rule_inputs(plan)
    rule_of_plan(inputs, plan, mode, False, spy)
    (call,) = spy.calls
    assert call.options["initial_state"] is None
    assert call.options["output_final_state"] is False
    assert call.inputs[0].shape[:2] == (3, 9)


@pytest.mark.parametrize(("mode", "varlen"), WAYS)
def test_no_copy_where_tokens_lie_as_the_rule_wants_them(mode, varlen):
    """Rows of one length that share nothing are a batch as they are, and with ``cu_seqlens`` any rows are."""
    plan, spy = plan_of([(5, [3]), (4, [4]), (2, [6])]), Spy(varlen)
    inputs = rule_inputs(plan)
    rule_of_plan(inputs, plan, mode, varlen, spy)
    assert [x.data_ptr() for x in spy.calls[0].inputs] == [x.data_ptr() for x in inputs]


def test_cu_seqlens_are_the_same_tensors_in_every_layer():
    """flash-linear-attention synchronises once per tensor object that it has not seen."""
    plan, spy = plan_of([(5, [3, 4, 2])]), Spy(varlen=True)
    inputs, linear_plan = rule_inputs(plan), LinearPlan(plan, "fork", varlen=True)
    for _ in range(2):
        gated_delta_rule(spy, *inputs, linear_plan)
    bounds = [call.options["cu_seqlens"] for call in spy.calls]
    assert bounds[0] is bounds[2]
    assert bounds[1] is bounds[3]


@pytest.mark.parametrize(("mode", "varlen"), WAYS)
def test_float32(mode, varlen):
    plan = plan_of(RAGGED)
    inputs, paths = rule_inputs(plan, torch.float32), paths_of(plan)
    expected = with_gradients(rule_of_rows(inputs, paths), inputs)
    out = rule_of_plan(inputs, plan, mode, varlen)
    assert out.dtype == torch.float32
    assert_same(expected, with_gradients([out[:, path] for path in paths], inputs), 2e-5, NAMES, relative=True)


@pytest.mark.parametrize("varlen", [False, True])
def test_float32_outputs_are_bit_equal_where_prompts_are_whole_chunks(varlen):
    plan = plan_of([(64, [1, 70, 3]), (128, [64, 0, 65, 9]), (192, [5])])
    inputs, paths = rule_inputs(plan, torch.float32), paths_of(plan)
    out = rule_of_plan(inputs, plan, "fork", varlen)
    for path, row in zip(paths, rule_of_rows(inputs, paths), strict=True):
        assert torch.equal(out[:, path], row)


@pytest.mark.parametrize("varlen", [False, True])
def test_bfloat16_is_as_good_as_rows_alone_and_its_states_stay_float32(varlen):
    plan = plan_of(RAGGED)
    inputs, paths = rule_inputs(plan, torch.bfloat16), paths_of(plan)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    expected = with_gradients(rule_of_rows(exact, paths), exact)
    plain = with_gradients(rule_of_rows(inputs, paths), inputs)
    spy = Spy(varlen)
    out = rule_of_plan(inputs, plan, "fork", varlen, spy)
    got = with_gradients([out[:, path] for path in paths], inputs)
    assert out.dtype == torch.bfloat16
    assert all(x.dtype == torch.bfloat16 for call in spy.calls for x in call.inputs)
    assert spy.finals[0].dtype == spy.calls[1].options["initial_state"].dtype == torch.float32

    def rms(results, part):
        errors = [(a - b.double()).flatten() for a, b in zip(expected[part], results[part], strict=True)]
        return float(torch.cat(errors).square().mean().sqrt())

    for part in (0, 1):
        assert 0 < rms(got, part) <= 1.5 * rms(plain, part)


@pytest.mark.parametrize(("mode", "varlen"), WAYS)
def test_siblings_do_not_feel_each_other(mode, varlen):
    """Flipping a token of one response leaves every other row bit-identical."""
    plan = plan_of([(5, [6, 4, 70]), (3, [2, 2, 1])])
    inputs, paths = [x.detach() for x in rule_inputs(plan)], paths_of(plan)
    before = rule_of_plan(inputs, plan, mode, varlen)
    for changed in range(len(paths)):
        others = [x.clone() for x in inputs]
        for x in others:
            x[:, paths[changed][-1]] *= -1
        after = rule_of_plan(others, plan, mode, varlen)
        same = [torch.equal(before[:, path], after[:, path]) for path in paths]
        assert same == [i != changed for i in range(len(paths))]


@pytest.mark.parametrize(
    ("varlen", "least"), [pytest.param(False, FORK_MIN_TOKENS, id="padded"), (True, FORK_MIN_TOKENS_VARLEN)]
)
def test_auto_forks_from_so_many_saved_tokens_on(varlen, least):
    assert (FORK_MIN_TOKENS, FORK_MIN_TOKENS_VARLEN) == (256, 65536)
    for prompt, mode in ((least // 2, "fork"), (least // 2 - 1, "expand")):
        assert LinearPlan(plan_of([(prompt, [1, 2, 3])]), "auto", varlen).mode == mode
    assert LinearPlan(plan_of([(4, [1, 2, 3])]), "fork", varlen).mode == "fork"
    assert LinearPlan(plan_of([(least, [1, 2, 3])]), "expand", varlen).mode == "expand"


def test_auto_asks_every_further_round_to_pay():
    """0 <- 1 <- (2, 3): two further rounds, and 2 * least tokens are saved, or one fewer."""
    for length, mode in ((2 * FORK_MIN_TOKENS, "fork"), (2 * FORK_MIN_TOKENS - 1, "expand")):
        assert LinearPlan(DeepPlan([length - 1, 1, 1, 1], [-1, 0, 1, 1])).mode == mode


@pytest.mark.parametrize(("mode", "varlen"), WAYS)
def test_layers_never_read_a_value_back(mode, varlen):
    """On the meta device no tensor has values to read."""
    prompt_lens, lens = torch.tensor([3, 3, 3, 2]), torch.tensor([5, 3, 7, 4])
    tokens = torch.zeros(19, dtype=torch.int64, device="meta")
    plan = build_plan(Rows(tokens, tokens, exclusive_cumsum(lens), prompt_lens), torch.tensor([0, 0, 0, 1]))
    linear_plan = LinearPlan(plan, mode, varlen)
    inputs = [x.to("meta") for x in rule_inputs(plan)]

    def rule(q, k, v, g, beta, initial_state, output_final_state, cu_seqlens=None):
        sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
        return torch.zeros_like(v), v.new_zeros(sequences, HEADS, K, V) if output_final_state else None

    assert gated_delta_rule(rule, *inputs, linear_plan).shape == inputs[2].shape
    x = torch.zeros(1, CHANNELS, plan.num_tokens, device="meta")
    assert causal_conv(lambda x: x * 2, x, 4, linear_plan).shape == x.shape
    indices = [linear_plan._window_index, linear_plan._own_index, *(step.parents for step in linear_plan._rounds[1:])]
    assert {index.device.type for index in indices} == {"meta"}


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="linear_attention: expected one of auto, expand, fork, got 'chunked'"):
        LinearPlan(plan_of([(2, [1])]), "chunked")


@pytest.mark.parametrize(("batch", "extra"), [(2, 0), (1, 1), (1, -1)])
def test_another_row_than_the_plans_is_refused(batch, extra):
    plan = plan_of([(3, [2, 2, 1])])
    inputs = [torch.zeros(batch, plan.num_tokens + extra, *x.shape[2:]) for x in rule_inputs(plan)]
    with pytest.raises(ValueError, match=r"query: expected one packed row of 8 tokens on axis 1, got"):
        gated_delta_rule(padded_rule, *inputs, LinearPlan(plan, "fork"))
    with pytest.raises(ValueError, match="x: expected one packed row of 8 tokens on axis 2"):
        causal_conv(lambda x: x, inputs[0].flatten(2).transpose(1, 2), 4, LinearPlan(plan))
