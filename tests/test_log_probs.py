"""Log-probs and entropy in all three modes against ``log_softmax().gather()`` and against verl's own functions."""

import math

import pytest
import torch

from zorro_verl import log_probs
from zorro_verl.log_probs import LOGITS_OPTIMIZATIONS, log_probs_from_hidden, log_probs_from_logits

ROWS, HIDDEN, VOCAB = 7, 6, 11
ROWS_PER_CHUNK = 3  # doesn't divide ROWS


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    monkeypatch.setattr(log_probs, "CHUNK_BYTES", 4 * VOCAB * ROWS_PER_CHUNK)


class Head:
    """Hidden states, head weights and labels; every tensor a leaf that wants a gradient."""

    def __init__(self, rows=ROWS, dtype=torch.float64, bias=False, seed=0, spread=1.0):
        generator = torch.Generator().manual_seed(seed)
        draw = lambda *shape: (torch.randn(*shape, generator=generator, dtype=torch.float64) * spread).to(dtype)  # noqa: E731
        self.hidden = draw(rows, HIDDEN).requires_grad_()
        self.weight = draw(VOCAB, HIDDEN).requires_grad_()
        self.bias = draw(VOCAB).requires_grad_() if bias else None
        self.labels = torch.randint(0, VOCAB, (rows,), generator=generator)
        self.weights = draw(2, rows).double()

    def logits(self):
        return torch.nn.functional.linear(self.hidden, self.weight, self.bias)

    def leaves(self):
        return [x for x in (self.hidden, self.weight, self.bias) if x is not None and x.requires_grad]


def expected(head, temperature, logits=None):
    """The definition, in the precision of the logits but at least float32."""
    logits = head.logits() if logits is None else logits
    logits = logits.to(torch.float64 if logits.dtype == torch.float64 else torch.float32)
    log_p = (logits / torch.as_tensor(temperature, dtype=logits.dtype).reshape(-1, 1)).log_softmax(-1)
    return log_p.gather(-1, head.labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def computed(head, mode, temperature=1.0, calculate_entropy=True):
    return scores(head, mode, temperature, calculate_entropy)[:2]


def scores(head, mode, temperature, calculate_entropy, calculate_sum_pi_squared=False):
    wanted = {"calculate_sum_pi_squared": calculate_sum_pi_squared}
    if mode == "memory":
        head_of = (head.hidden, head.weight, head.bias, head.labels)
        return log_probs_from_hidden(*head_of, temperature, calculate_entropy, **wanted)
    chunked = mode == "compute"
    return log_probs_from_logits(head.logits(), head.labels, temperature, calculate_entropy, chunked, **wanted)


def gradients(head, log_prob, entropy):
    """Gradients of a weighted sum of log-probs and entropies."""
    loss = (log_prob * head.weights[0]).sum()
    if entropy is not None:
        loss = loss + (entropy * head.weights[1]).sum()
    return torch.autograd.grad(loss, head.leaves())


def assert_same(expected, got, tolerance=1e-12, relative=False):
    """``relative`` to the largest element of each expected tensor."""
    for a, b in zip(expected, got, strict=True):
        assert a.shape == b.shape
        if a.numel():
            assert (a - b).abs().max() <= tolerance * (a.abs().max() if relative else 1.0)


PER_ROW = torch.tensor([0.5, 1.0, 2.0, 0.7, 1.3, 0.9, 1.7], dtype=torch.float64)


@pytest.mark.parametrize("mode", LOGITS_OPTIMIZATIONS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7, torch.tensor(1.7), PER_ROW], ids=["1", "0.7", "tensor", "per-row"])
def test_values_and_gradients(mode, bias, temperature):
    head = Head(bias=bias)
    reference, got = expected(head, temperature), computed(head, mode, temperature)
    assert all(x.dtype == torch.float64 for x in got)
    assert_same(reference, got)
    assert_same(gradients(head, *reference), gradients(head, *got))


@pytest.mark.parametrize("mode", LOGITS_OPTIMIZATIONS)
@pytest.mark.parametrize("output", [0, 1], ids=["log-prob", "entropy"])
def test_gradient_of_one_output_alone(mode, output):
    """The other output then has no gradient at all, which is another path through the backward."""
    head = Head(bias=True)
    grads = [
        torch.autograd.grad((values[output] * head.weights[0]).sum(), head.leaves())
        for values in (expected(head, PER_ROW), computed(head, mode, PER_ROW))
    ]
    assert_same(*grads)


@pytest.mark.parametrize("mode", LOGITS_OPTIMIZATIONS)
def test_without_entropy(mode):
    head = Head()
    log_prob, entropy = computed(head, mode, 0.7, calculate_entropy=False)
    assert entropy is None
    reference = expected(head, 0.7)[0]
    assert_same([reference], [log_prob])
    assert_same(gradients(head, reference, None), gradients(head, log_prob, None))


@pytest.mark.parametrize("mode", LOGITS_OPTIMIZATIONS)
@pytest.mark.parametrize("entropy", [False, True])
def test_sum_of_squared_probabilities(mode, entropy):
    """As verl's formula, without a gradient of its own, and the others keep theirs."""
    from verl.utils.torch_functional import calculate_sum_pi_squared_from_logits

    head = Head(bias=True, spread=2.0)
    got = scores(head, mode, PER_ROW, entropy, calculate_sum_pi_squared=True)
    truth = calculate_sum_pi_squared_from_logits(head.logits() / PER_ROW[:, None])
    assert_same([truth], [got.sum_pi_squared])
    assert not got.sum_pi_squared.requires_grad
    reference = expected(head, PER_ROW)
    assert_same(gradients(head, reference[0], reference[1] if entropy else None), gradients(head, *got[:2]))
    assert scores(head, mode, PER_ROW, entropy).sum_pi_squared is None


@pytest.mark.parametrize("mode", ["compute", "memory"])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 6])
def test_any_number_of_rows_against_the_chunk_size(mode, rows):
    head = Head(rows)
    assert_same(expected(head, 1.0), computed(head, mode))


@pytest.mark.parametrize("mode", LOGITS_OPTIMIZATIONS)
def test_no_rows(mode):
    """A micro-batch of empty responses: nothing to score, and zero gradients rather than none."""
    head = Head(rows=0, bias=True)
    log_prob, entropy = computed(head, mode)
    assert log_prob.shape == entropy.shape == (0,)
    for leaf, grad in zip(head.leaves(), gradients(head, log_prob, entropy), strict=True):
        assert grad.shape == leaf.shape
        assert not grad.any()


@pytest.mark.parametrize("mode", LOGITS_OPTIMIZATIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_float32_out_of_any_precision(mode, dtype):
    """The statistics run in float32: as good as the definition is on the same logits."""
    head = Head(dtype=dtype)
    reference, got = expected(head, 0.7), computed(head, mode, 0.7)
    assert all(x.dtype == torch.float32 for x in got)
    assert_same(reference, got, 1e-5)
    grads = gradients(head, *got)
    assert all(g.dtype == dtype for g in grads)
    assert_same(gradients(head, *reference), grads, 1e-5 if dtype == torch.float32 else 3e-2, relative=True)


@pytest.mark.parametrize("mode", LOGITS_OPTIMIZATIONS)
@pytest.mark.parametrize("trained", ["head", "hidden"])
def test_only_one_side_trained(mode, trained):
    head = Head(bias=True)
    for leaf in (head.weight, head.bias) if trained == "hidden" else (head.hidden,):
        leaf.requires_grad_(False)
    assert len(head.leaves()) == (1 if trained == "hidden" else 2)
    assert_same(gradients(head, *expected(head, 1.3)), gradients(head, *computed(head, mode, 1.3)))


@pytest.mark.parametrize("mode", LOGITS_OPTIMIZATIONS)
def test_nothing_trained(mode):
    head = Head()
    with torch.no_grad():
        log_prob, entropy = computed(head, mode)
    assert not log_prob.requires_grad
    assert not entropy.requires_grad


@pytest.mark.parametrize("mode", LOGITS_OPTIMIZATIONS)
def test_autocast(mode):
    """Under autocast the projection runs in bfloat16, as the stock head's would; gradients keep the leaves' dtype."""
    head = Head(dtype=torch.float32, bias=True)
    with torch.autocast("cpu", torch.bfloat16):
        logits = head.logits()
        assert logits.dtype == torch.bfloat16
        reference = expected(head, 0.7, logits)
        got = computed(head, mode, 0.7)
    assert all(x.dtype == torch.float32 for x in got)
    assert_same(reference, got, 1e-5)
    grads = gradients(head, *got)
    assert all(g.dtype == torch.float32 for g in grads)
    assert_same(gradients(head, *reference), grads, 2e-2, relative=True)


@pytest.mark.parametrize("mode", LOGITS_OPTIMIZATIONS)
def test_autocast_leaves_float64_alone(mode):
    """As it does with a linear's arguments."""
    head = Head(bias=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert head.logits().dtype == torch.float64
        got = computed(head, mode, 0.7)
    assert all(x.dtype == torch.float64 for x in got)
    reference = expected(head, 0.7)
    assert_same(reference, got)
    assert_same(gradients(head, *reference), gradients(head, *got))


@pytest.mark.parametrize("mode", LOGITS_OPTIMIZATIONS)
@pytest.mark.parametrize("temperature", [0.0, torch.tensor([1.0, 0.0, 2.0, 0.0, 1.0, 1e-9, 1.0])], ids=["all", "some"])
def test_temperature_zero_is_finite(mode, temperature):
    """verl clamps the temperature at 1e-8: greedy rows get huge, finite logits and finite gradients."""
    head = Head(dtype=torch.float32)
    floor = torch.as_tensor(temperature).clamp(min=1e-8).expand(ROWS)
    reference, got = expected(head, floor), computed(head, mode, temperature)
    assert_same(reference, got, 1e-5, relative=True)
    grads = gradients(head, *got)
    assert all(x.isfinite().all() for x in (*got, *grads))
    assert_same(gradients(head, *reference), grads, 1e-5, relative=True)


@pytest.mark.parametrize("mode", LOGITS_OPTIMIZATIONS)
@pytest.mark.parametrize("temperature", [1e-1, 1e-2, 1e-3, torch.tensor([1.0, 1e-3, 1e-2, 2.0, 5e-3, 1e-3, 1.0])])
@pytest.mark.parametrize("output", [0, 1], ids=["log-prob", "entropy"])
def test_cold_logits_keep_their_digits(mode, temperature, output):
    """Float32 against float64 on the same logits, of hundreds and nearly tied: what differs is our own arithmetic."""
    generator, coldest = torch.Generator().manual_seed(1), float(torch.as_tensor(temperature).min())
    noise = torch.randint(0, 2**12, (ROWS, VOCAB), generator=generator) * 2.0 ** round(math.log2(8 * coldest) - 12)
    logits = (300 + noise).requires_grad_()
    head = Head(dtype=torch.float32)
    head.hidden, head.weight = logits, torch.eye(VOCAB)  # exact, and so is its backward
    reference, got = expected(head, temperature, logits.double()), computed(head, mode, temperature)
    assert reference[1].max() > 0.1, "every choice is sure: there is no gradient to get wrong"
    assert_same(reference, got, 2e-5)
    (a,), (b,) = (torch.autograd.grad((x[output] * head.weights[0]).sum(), logits) for x in (reference, got))
    assert_same([a], [b], 2e-5, relative=True)


@pytest.mark.parametrize("shape", [(ROWS - 1,), (ROWS, 1), (2,)])
@pytest.mark.parametrize("mode", LOGITS_OPTIMIZATIONS)
def test_bad_temperature_shapes_are_refused(mode, shape):
    with pytest.raises(ValueError, match=rf"temperature.*\({ROWS}\).*\({shape[0]},"):
        computed(Head(), mode, torch.ones(shape))


@pytest.mark.parametrize("mode", LOGITS_OPTIMIZATIONS)
@pytest.mark.parametrize("spread", [1e-3, 1.0, 30.0])
def test_invariants(mode, spread):
    """No probability above 1, and an entropy between 0 and that of a uniform choice."""
    head = Head(dtype=torch.float32, spread=spread)
    log_prob, entropy = computed(head, mode)
    assert log_prob.max() <= 1e-6
    assert entropy.min() >= -1e-6
    assert entropy.max() <= math.log(VOCAB) + 1e-5


@pytest.mark.parametrize("mode", LOGITS_OPTIMIZATIONS)
def test_gradcheck(mode):
    head = Head(rows=4, bias=True)
    inputs = head.leaves()

    def function(hidden, weight, bias):
        head.hidden, head.weight, head.bias = hidden, weight, bias
        return computed(head, mode, PER_ROW[:4])

    assert torch.autograd.gradcheck(function, inputs)


def saved_sizes(head, mode):
    """Elements of each distinct tensor that autograd keeps for the backward, leaves apart."""
    sizes = {}

    def pack(tensor):
        sizes[tensor.untyped_storage().data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        outputs = computed(head, mode)
    for leaf in head.leaves():
        sizes.pop(leaf.untyped_storage().data_ptr(), None)
    assert all(x.requires_grad for x in outputs)
    return sorted(sizes.values())


@pytest.mark.parametrize(("mode", "logits_kept"), [("none", 1), ("compute", 1), ("memory", 0)])
def test_what_is_kept_for_the_backward(mode, logits_kept):
    """At most the logits themselves, and in memory mode nothing of the vocabulary's size."""
    sizes = saved_sizes(Head(rows=40), mode)
    assert len([n for n in sizes if n >= 40 * VOCAB // 2]) == logits_kept, sizes
    assert sum(n for n in sizes if n < 40 * VOCAB // 2) <= 6 * 40, sizes


def test_memory_mode_makes_no_more_logits_than_a_chunk(monkeypatch):
    """Neither forward nor backward projects more rows at a time than the chunk holds."""
    head, projected = Head(rows=40), []
    linear = torch.nn.functional.linear

    def recording(x, weight, bias=None):
        projected.append(len(x))
        return linear(x, weight, bias)

    monkeypatch.setattr(torch.nn.functional, "linear", recording)
    gradients(head, *computed(head, "memory"))
    assert max(projected) == ROWS_PER_CHUNK
    assert sum(projected) == 2 * 40, "once forward, once recomputed"


@pytest.mark.parametrize(("mode", "rows"), [("none", 40), ("compute", ROWS_PER_CHUNK), ("memory", ROWS_PER_CHUNK)])
def test_the_softmax_runs_on_as_many_rows_as_its_mode_says(monkeypatch, mode, rows):
    """Forward and backward: float32 copies of all logits are what the chunked modes are there to avoid."""
    head, widths = Head(rows=40), []
    for name in ("_statistics", "_logits_grad"):
        function = getattr(log_probs, name)

        def recording(logits, *args, function=function):
            widths.append(len(logits))
            return function(logits, *args)

        monkeypatch.setattr(log_probs, name, recording)
    gradients(head, *computed(head, mode))
    assert max(widths) == rows
    assert sum(widths) == 2 * 40


def test_chunks_never_fall_below_one_row(monkeypatch):
    monkeypatch.setattr(log_probs, "CHUNK_BYTES", 1)
    head = Head()
    for mode in ("compute", "memory"):
        assert_same(expected(head, 1.0), computed(head, mode))


@pytest.mark.parametrize("mode", LOGITS_OPTIMIZATIONS)
def test_against_verl(mode):
    from verl.utils.torch_functional import entropy_from_logits, logprobs_from_logits

    head = Head(dtype=torch.float32, spread=2.0)
    scaled = head.logits() / 0.7
    reference = logprobs_from_logits(scaled, head.labels, inplace_backward=False), entropy_from_logits(scaled)
    got = computed(head, mode, 0.7)
    assert_same(reference, got, 1e-5)
    assert_same(gradients(head, *reference), gradients(head, *got), 1e-5, relative=True)


@pytest.mark.parametrize("mode", LOGITS_OPTIMIZATIONS)
def test_logits_are_left_as_they_were(mode):
    """Several readers may hold the head's output; nothing is divided in place."""
    head = Head()
    before = [head.hidden.clone(), head.weight.clone(), logits := head.logits().detach()]
    copy = logits.clone()
    if mode != "memory":
        log_probs_from_logits(logits, head.labels, 0.5, True, mode == "compute")
    gradients(head, *computed(head, mode, 0.5))
    assert torch.equal(logits, copy)
    assert torch.equal(head.hidden, before[0])
    assert torch.equal(head.weight, before[1])


@pytest.mark.parametrize("mode", LOGITS_OPTIMIZATIONS)
def test_non_finite_logits_stay_visible(mode):
    """Nothing is papered over: verl skips the step at the grad norm, and it must see the NaN there."""
    head = Head()
    with torch.no_grad():
        head.hidden[2, 0] = torch.nan
    log_prob, entropy = computed(head, mode)
    assert log_prob.isnan().tolist() == entropy.isnan().tolist() == [False, False, True, False, False, False, False]
    assert gradients(head, log_prob, entropy)[1].isnan().any()


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("start", ["logits", "hidden"])
def test_in_a_compiled_function(start, entropy):
    """torch.compile hands the backward a gradient of what was not asked for, too."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 6, generator=generator, dtype=torch.float64) for n in (9, VOCAB))
    labels = torch.randint(VOCAB, (9,), generator=generator)

    def loss(hidden, weight):
        if start == "hidden":
            scores = log_probs_from_hidden(hidden, weight, None, labels, 1.0, entropy)
        else:
            scores = log_probs_from_logits(hidden @ weight.T, labels, 1.0, entropy)
        return sum(values.cos().sum() for values in scores.by_name().values())

    torch._dynamo.reset()
    results = []
    for function in (loss, torch.compile(loss, backend="aot_eager", fullgraph=True)):
        leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
        results.append([*torch.autograd.grad(function(*leaves), leaves)])
    for a, b in zip(*results, strict=True):
        assert torch.allclose(a, b, atol=1e-12)
