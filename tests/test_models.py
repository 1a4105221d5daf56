"""The seam on Hugging Face models against the unpatched model on one unpadded row at a time."""

import copy
import inspect
import pickle
import subprocess
import sys
import types
from functools import cache
from threading import Thread

import pytest
import tiny_models
import torch
from ranks import run_ranks
from tiny import (
    VOCAB,
    batch_b0,
    flat_rows,
    gradients,
    padded_batch,
    per_row,
    shuffled,
    tiny_model,
    tokens,
    worst_gradient,
)
from transformers import AutoConfig, AutoModelForCausalLM

from zorro_verl.attention_kernels import resolve_kernels
from zorro_verl.families import check_supported
from zorro_verl.grouping import Rows
from zorro_verl.heads import SharedPrompt
from zorro_verl.log_probs import LOGITS_OPTIMIZATIONS
from zorro_verl.models import install, uninstall
from zorro_verl.packing import build_plan
from zorro_verl.varlen import CpuKernels

# Hugging Face keeps norms, RoPE and softmax in float32 even in a float64 model; real bugs are off by more than 0.1.
TOLERANCE = 5e-6
ROWS = shuffled(batch_b0(), 0)
KINDS = {"plain": None, "non-reentrant": False, "reentrant": True}


def installed(model, **options):
    """The seam on a copy of ``model``."""
    model = copy.deepcopy(model)
    install(model, **options)
    return model


def checkpointed(model, kind):
    """Training mode, with a kind of gradient checkpointing."""
    model.train()
    if KINDS[kind] is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": KINDS[kind]})
    return model


def shared_call(model, rows, temperature=1.0, logits_optimization="none", position_ids=None):
    """Each row's log-probs and entropies from one packed call."""
    flat = flat_rows(rows)
    if position_ids is not None:
        flat = Rows(flat.tokens, position_ids, flat.cu_seqlens, flat.prompt_lens)
    plan = build_plan(flat)
    if isinstance(temperature, torch.Tensor):
        temperature = temperature[plan.label_row]
    shared = SharedPrompt(plan, flat.tokens[plan.label_index], temperature, True, logits_optimization)
    out = model(
        input_ids=plan.pack(flat.tokens)[None],
        position_ids=plan.pack(flat.position_ids)[None],
        use_cache=False,
        zorro=shared,
    )
    lens = flat.response_lens.tolist()
    return out["log_probs"].split(lens), out["entropy"].split(lens)


def loss_of(log_probs, entropies, seed=0):
    """A sum in which every token has a weight of its own."""
    g = torch.Generator().manual_seed(seed)
    draw = lambda x: torch.randn(len(x), generator=g, dtype=torch.float64)  # noqa: E731
    return sum((x * draw(x)).sum() + 0.3 * (e * draw(e)).sum() for x, e in zip(log_probs, entropies, strict=True))


def assert_rows(expected, got, tolerance=TOLERANCE):
    """Every row by itself: a group's first is blind to most bugs."""
    for name, reference, values in zip(("log_probs", "entropy"), expected, got, strict=True):
        for row, (a, b) in enumerate(zip(reference, values, strict=True)):
            assert a.shape == b.shape, (name, row)
            if len(a):
                assert (a - b).abs().max() <= tolerance, (name, row)


@cache
def plain_model(model_type="qwen3", **config):
    return tiny_model(model_type, **config)


@cache
def oracle(model_type="qwen3", temperature=1.0):
    """Values and gradients of `ROWS` from the unpatched model, computed once."""
    model = copy.deepcopy(plain_model(model_type))
    values = per_row(model, ROWS, temperature)
    loss_of(*values).backward()
    return [[x.detach() for x in part] for part in values], gradients(model)


@pytest.mark.parametrize(
    ("model_type", "options", "kind", "mode"),
    [
        pytest.param("qwen3", {}, "plain", "none", id="qwen3"),
        pytest.param("qwen2", {}, "plain", "none", id="qwen2"),
        pytest.param("llama", {}, "plain", "none", id="llama"),
        pytest.param("mistral", {}, "plain", "none", id="mistral"),
        pytest.param("qwen3", {"attn_implementation": "eager"}, "plain", "none", id="qwen3-eager"),
        pytest.param("qwen3", {"use_split_attention": False}, "plain", "none", id="qwen3-unsplit"),
        pytest.param("qwen3", {}, "plain", "compute", id="qwen3-compute"),
        pytest.param("qwen3", {}, "plain", "memory", id="qwen3-memory"),
        pytest.param("qwen3", {}, "non-reentrant", "none", id="qwen3-checkpointed"),
        pytest.param("qwen3", {}, "reentrant", "none", id="qwen3-checkpointed-reentrant"),
        pytest.param(
            "qwen2",
            {"attn_implementation": "eager", "use_split_attention": False},
            "non-reentrant",
            "memory",
            id="qwen2-eager-unsplit-checkpointed-memory",
        ),
        pytest.param("llama", {}, "reentrant", "memory", id="llama-checkpointed-reentrant-memory"),
        pytest.param("llama", {"attn_implementation": "eager"}, "plain", "compute", id="llama-eager-compute"),
        pytest.param("mistral", {"use_split_attention": False}, "reentrant", "compute", id="mistral-unsplit-reentrant"),
        pytest.param("mistral", {}, "non-reentrant", "memory", id="mistral-checkpointed-memory"),
    ],
)
def test_equals_the_plain_model_row_by_row(model_type, options, kind, mode):
    model = checkpointed(installed(plain_model(model_type), **options), kind)
    values = shared_call(model, ROWS, logits_optimization=mode)
    expected, expected_gradients = oracle(model_type)
    assert_rows(expected, values)
    loss_of(*values).backward()
    assert worst_gradient(expected_gradients, gradients(model)) <= TOLERANCE


def test_the_oracle_is_sharp():
    """Predictions that all look alike would hide a wrong one."""
    (log_probs, entropies), grads = oracle()
    assert torch.cat(log_probs).std() > 0.3
    assert torch.cat(entropies).std() > 0.01
    assert all(g.abs().max() > 0 for g in grads.values())


@pytest.mark.parametrize("temperature", [0.5, 1.7])
def test_temperature(temperature):
    """Log-probs and entropy are both of the scaled logits."""
    assert_rows(oracle(temperature=temperature)[0], shared_call(installed(plain_model()), ROWS, temperature))


def test_temperature_per_row():
    """Siblings share the hidden state of the prompt's last token, and each scales it by its own temperature."""
    temperature = [0.5, 2.0, 0.7, 1.3, 0.9, 1.0, 1.7, 3.0]
    got = shared_call(installed(plain_model()), ROWS, torch.tensor(temperature))
    assert_rows(per_row(plain_model(), ROWS, temperature), got)


# Influence: who sees whom, by exact equality.


def flipped(rows, row, place):
    """``rows`` with one token of one row's response changed."""
    prompt, response = rows[row]
    response = response.clone()
    response[place] = response[place] % (VOCAB - 1) + 1
    return [*rows[:row], (prompt, response), *rows[row + 1 :]]


SEAMS = [
    pytest.param({"attn_implementation": "sdpa"}, id="sdpa"),
    pytest.param({"attn_implementation": "eager"}, id="eager"),
    pytest.param({"attn_implementation": "sdpa", "use_split_attention": False}, id="sdpa-unsplit"),
    pytest.param({"attn_implementation": "eager", "use_split_attention": False}, id="eager-unsplit"),
]


@pytest.mark.parametrize("options", SEAMS)
def test_a_token_moves_only_what_follows_it_in_its_own_row(options):
    model = installed(plain_model(), **options)
    with torch.no_grad():
        before = shared_call(model, ROWS)
        for row, (_, response) in enumerate(ROWS):
            for place in {0, len(response) // 2, len(response) - 1} if len(response) else ():
                after = shared_call(model, flipped(ROWS, row, place))
                for other in range(len(ROWS)):
                    same = [torch.equal(a[other], b[other]) for a, b in zip(before, after, strict=True)]
                    assert all(same) == (other != row) or len(ROWS[other][1]) == 0, (row, place, other)
                # The flipped token's own entropy comes from the tokens before it, its log-prob from itself too.
                assert torch.equal(before[0][row][:place], after[0][row][:place])
                assert torch.equal(before[1][row][: place + 1], after[1][row][: place + 1])
                assert not (before[0][row][place:] == after[0][row][place:]).any()


@pytest.mark.parametrize("options", SEAMS)
def test_a_prompt_token_moves_every_sibling_and_nobody_else(options):
    model = installed(plain_model(), **options)
    with torch.no_grad():
        before = shared_call(model, ROWS)
        for prompt in {tuple(p.tolist()): p for p, _ in ROWS}.values():
            for place in range(len(prompt)):
                other_prompt = prompt.clone()
                other_prompt[place] = 60 - other_prompt[place]
                members = [torch.equal(p, prompt) for p, _ in ROWS]
                rows = [(other_prompt if m else p, r) for m, (p, r) in zip(members, ROWS, strict=True)]
                after = shared_call(model, rows)
                for row, member in enumerate(members):
                    for a, b in zip(before, after, strict=True):
                        if member:
                            assert not (a[row] == b[row]).any(), (place, row)
                        else:
                            assert torch.equal(a[row], b[row]), (place, row)


@pytest.mark.parametrize("kind", ["non-reentrant", "reentrant"])
def test_no_future_under_checkpointing(kind):
    model = checkpointed(installed(plain_model()), kind)
    row = max(range(len(ROWS)), key=lambda i: len(ROWS[i][1]))
    before, after = shared_call(model, ROWS)[0], shared_call(model, flipped(ROWS, row, -1))[0]
    assert torch.equal(before[row][:-1], after[row][:-1])


# The bugs of the field, by name.


def test_first_response_token_of_every_sibling():
    """The one hidden state of the prompt's end predicts a first token for each sibling."""
    g = torch.Generator().manual_seed(7)
    prompt, other = tokens(6, g), tokens(3, g)
    firsts = [4, 9, 17, 33]
    rows = [(prompt, torch.tensor([first, *tokens(2, g).tolist()])) for first in firsts]
    rows = [rows[0], (other, tokens(3, g)), *rows[1:], (other, tokens(1, g)), (other, torch.tensor([5]))]
    got = shared_call(installed(plain_model()), rows)
    expected = per_row(plain_model(), rows)
    for row, (a, b) in enumerate(zip(expected[0], got[0], strict=True)):
        assert abs(a[0] - b[0]) <= TOLERANCE, row
    assert len({round(x[0].item(), 4) for x in got[0]}) == len(rows), "the test needs first tokens that differ"
    assert_rows(expected, got)


def test_duplicate_predictor_gradients_sum():
    """The gradient of the prompt's last hidden state is the sum over the siblings that it predicts for."""
    rows = ROWS
    model, plain, seen = installed(plain_model()), copy.deepcopy(plain_model()), []

    def keep(module, args, output):
        output.retain_grad()
        seen.append(output)

    for m in (model, plain):
        m.model.norm.register_forward_hook(keep)
    loss_of(*shared_call(model, rows)).backward()
    (packed,) = seen
    seen.clear()
    loss_of(*per_row(plain, rows)).backward()
    plan = build_plan(flat_rows(rows))
    for group in range(plan.num_groups):
        members = [i for i, g in enumerate(plan.group_index.tolist()) if g == group]
        prompt_len = len(rows[members[0]][0])
        place = int(plan.unpack_index[flat_rows(rows).cu_seqlens[members[0]] + prompt_len - 1])
        expected = sum(seen[i].grad[0, prompt_len - 1] for i in members)
        assert (packed.grad[0, place] - expected).abs().max() <= TOLERANCE * expected.abs().max(), group


def test_identical_responses_count_twice():
    """One response may equal, or begin, another: each is a row of its own, in values and in gradients."""
    prompt, twice = torch.tensor([3, 1, 4, 1, 5]), torch.tensor([7, 8, 9])
    responses = [twice, twice, torch.tensor([7, 8, 9, 10]), twice[:2], torch.tensor([20, 21, 22]), twice[:0]]
    rows = [(prompt, r) for r in responses]
    advantages = [0.9, -0.4, 0.3, -1.0, 0.2, 5.0]
    model, plain = installed(plain_model()), copy.deepcopy(plain_model())
    got, expected = shared_call(model, rows), per_row(plain, rows)
    assert_rows(expected, got)
    for m, values in ((model, got[0]), (plain, expected[0])):
        sum(a * x.sum() for a, x in zip(advantages, values, strict=True)).backward(retain_graph=True)
        m.total = gradients(m)
    assert worst_gradient(plain.total, model.total) <= TOLERANCE
    for row in (0, 1, 2, 3):
        for m, values in ((model, got[0]), (plain, expected[0])):
            m.zero_grad()
            values[row].sum().backward(retain_graph=True)
            m.total = gradients(m)
        assert worst_gradient(plain.total, model.total) <= TOLERANCE, row


@pytest.mark.parametrize("seed", range(6))
def test_output_in_input_order(seed):
    model = installed(plain_model())
    order = shuffled(range(len(ROWS)), seed)
    with torch.no_grad():
        got = shared_call(model, [ROWS[i] for i in order])
    assert_rows([[part[i] for i in order] for part in oracle()[0]], got)


def test_second_batch_of_another_shape():
    """Nothing of a batch stays on the model: another one, longer and wider, and then the first again."""
    model = installed(plain_model())
    g = torch.Generator().manual_seed(11)
    prompts = [tokens(9, g), tokens(2, g)]
    other = [(prompts[i % 2], tokens(n, g)) for i, n in enumerate((9, 1, 4, 12, 0, 3, 7, 2, 5, 5))]
    for rows in (ROWS, other, other[:3], ROWS):
        assert_rows(per_row(plain_model(), rows), shared_call(model, rows))
    assert vars(model).keys() - vars(plain_model()).keys() == {"forward"}


@pytest.mark.parametrize("kind", ["non-reentrant", "reentrant"])
def test_two_forwards_before_backward_with_checkpointing(kind):
    """What a layer recomputes must follow the plan that it ran with, not the last one."""
    model, plain = checkpointed(installed(plain_model()), kind), copy.deepcopy(plain_model())
    g = torch.Generator().manual_seed(12)
    prompt = tokens(4, g)
    other = [(prompt, tokens(n, g)) for n in (5, 2, 8)]
    losses = [loss_of(*shared_call(model, rows)) for rows in (ROWS, other)]
    stock = model(padded_batch(other)["input_ids"], use_cache=False).logits.float().square().mean()
    for loss in (losses[0], stock, losses[1]):
        loss.backward()
    for rows in (ROWS, other):
        loss_of(*per_row(plain, rows)).backward()
    plain(padded_batch(other)["input_ids"], use_cache=False).logits.float().square().mean().backward()
    assert worst_gradient(gradients(plain), gradients(model)) <= TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
def test_layers_run_on_the_packed_row_also_when_recomputed(kind):
    model, lengths = checkpointed(installed(plain_model()), kind), []
    model.model.layers[1].mlp.register_forward_pre_hook(lambda module, args: lengths.append(args[0].shape[1]))
    loss_of(*shared_call(model, ROWS)).backward()
    packed = (5 + 1 + 7) + 35  # the three prompts once, and all responses
    assert lengths == [packed] * (1 if kind == "plain" else 2)


def test_multi_turn_holes():
    """Tool tokens carry no loss, and are context all the same: the loss mask has no say in what is seen."""
    prompt = torch.tensor([3, 1, 4, 1, 5])
    turn = [[11, 12, 31, 32, 33, 13, 14], [11, 12, 41, 42, 43, 13, 14], [15, 16, 17], [11, 12, 31]]
    rows = [(prompt, torch.tensor(t)) for t in turn]
    model = installed(plain_model())
    expected, got = per_row(plain_model(), rows), shared_call(model, rows)
    assert_rows(expected, got)
    changed = [(prompt, torch.tensor([11, 12, 31, 34, 33, 13, 14])), *rows[1:]]
    moved, wanted = shared_call(model, changed)[0][0], per_row(plain_model(), changed)[0][0]
    assert torch.equal(moved[:2], got[0][0][:2])
    assert ((moved - got[0][0])[5:].abs() > 1e-3).all(), "the tool's answer moves what is said after it"
    assert (moved - wanted).abs().max() <= TOLERANCE
    # Only tokens in the loss have a gradient through their own prediction.
    mask = torch.tensor([1.0, 1, 0, 0, 0, 1, 1])
    (grad,) = torch.autograd.grad((got[0][0] * mask).sum(), got[0][0])
    assert grad.tolist() == mask.tolist()


def per_row_at(model, rows, position_ids):
    """`per_row` at given positions; a mask of ones keeps transformers from guessing at packing from their jumps."""
    log_probs, entropies = [], []
    for (prompt, response), positions in zip(rows, position_ids, strict=True):
        ids = torch.cat([prompt, response])[None]
        out = model(ids, attention_mask=torch.ones_like(ids), position_ids=positions[None], use_cache=False)
        log_p = out.logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        log_probs.append(log_p.gather(-1, response[:, None])[:, 0])
        entropies.append(-(log_p.exp() * log_p).sum(-1))
    return log_probs, entropies


def test_positions_that_jump():
    """Positions go in as they came, with holes, an offset, a return to 0: bounds are never guessed from them."""
    prompt = torch.tensor([3, 1, 4, 1, 5])
    rows = [(prompt, torch.tensor(r)) for r in ([11, 12, 13, 14], [21, 22], [31, 32, 33], [41])]
    rows.append((torch.tensor([9, 2, 6]), torch.tensor([5, 3])))
    at = [0, 1, 2, 5, 6]
    position_ids = [
        torch.tensor(p) for p in (at + [7, 8, 12, 13], at + [0, 1], at + [7, 20, 21], at + [30], [40, 41, 50, 51, 52])
    ]
    got = shared_call(installed(plain_model()), rows, position_ids=torch.cat(position_ids))
    expected = per_row_at(plain_model(), rows, position_ids)
    assert_rows(expected, got)
    straight = shared_call(installed(plain_model()), rows)
    assert all((a - b).abs().max() > 1e-3 for a, b in zip(got[0], straight[0], strict=True)), "positions are read"


def test_no_mask_reaches_attention_and_bounds_come_from_the_plan():
    model = installed(plain_model())
    calls, masks = [], []

    class Recording(CpuKernels):
        def forward(self, q, k, v, call, scale):
            calls.append(call)
            return super().forward(q, k, v, call, scale)

    model.forward.kernels = Recording()
    for layer in model.model.layers:
        layer.register_forward_pre_hook(
            lambda module, args, kwargs: masks.append(kwargs["attention_mask"]), with_kwargs=True
        )
    # Positions with a zero everywhere: whoever cut there would make a segment of every token.
    flat = flat_rows(ROWS)
    shared_call(model, ROWS, position_ids=flat.position_ids * 0)
    assert [mask.numel() for mask in masks] == [0, 0]
    segments = 2 + 7 + 1  # the two prompts that are shared, their responses, the row that is alone
    assert [call.cu_seqlens_q.numel() - 1 for call in calls] == [segments, 2] * 2
    assert [len(call.blocks) for call in calls] == [segments - 1, 2] * 2, "an empty response is no block"
    assert [call.causal for call in calls] == [True, False] * 2


def test_without_split_attention_the_rows_run_as_they_were():
    model, calls = installed(plain_model(), use_split_attention=False), []

    class Recording(CpuKernels):
        def forward(self, q, k, v, call, scale):
            calls.append(call)
            return super().forward(q, k, v, call, scale)

    model.forward.kernels = Recording()
    shared_call(model, ROWS)
    assert [call.causal for call in calls] == [True, True], "one call a layer, and no rectangle"
    assert calls[0].cu_seqlens_q.diff().tolist() == [len(p) + len(r) for p, r in ROWS]


# The model stays a model.


def test_deepcopy_is_independent():
    model = installed(plain_model())
    other = copy.deepcopy(model)
    assert other.forward.model is other
    with torch.no_grad():
        other.lm_head.weight.mul_(0.5)
    assert_rows(oracle()[0], shared_call(model, ROWS))
    loss_of(*shared_call(other, ROWS)).backward()
    assert gradients(other)
    assert not gradients(model)
    uninstall(other)
    assert_rows(oracle()[0], shared_call(model, ROWS))


def test_pickle():
    model = pickle.loads(pickle.dumps(installed(plain_model())))
    assert model.forward.model is model
    values = shared_call(model, ROWS)
    loss_of(*values).backward()
    assert_rows(oracle()[0], values)
    assert worst_gradient(oracle()[1], gradients(model)) <= TOLERANCE


UNPICKLE_PROGRAM = """
import pickle, sys
model, arguments = pickle.load(open(sys.argv[1], "rb"))
pickle.dump(model(**arguments)["log_probs"].detach(), open(sys.argv[2], "wb"))
"""


def test_pickle_into_a_fresh_process(tmp_path):
    """A process that has never seen the seam gets it, and the plan, from the pickle alone."""
    model = installed(plain_model())
    flat = flat_rows(ROWS)
    plan = build_plan(flat)
    arguments = {
        "input_ids": plan.pack(flat.tokens)[None],
        "position_ids": plan.pack(flat.position_ids)[None],
        "zorro": SharedPrompt(plan, flat.tokens[plan.label_index]),
    }
    (tmp_path / "in").write_bytes(pickle.dumps((model, arguments)))
    subprocess.run([sys.executable, "-c", UNPICKLE_PROGRAM, tmp_path / "in", tmp_path / "out"], check=True, timeout=120)
    assert torch.equal(pickle.loads((tmp_path / "out").read_bytes()), model(**arguments)["log_probs"])


def test_train_and_eval_give_the_same():
    model = installed(plain_model())
    for mode in (model.train, model.eval):
        mode()
        assert_rows(oracle()[0], shared_call(model, ROWS))


def test_parameters_and_state_dict_are_untouched():
    plain, model = plain_model(), installed(plain_model())
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert [n for n, _ in model.named_modules()] == [n for n, _ in plain.named_modules()]
    assert [n for n, _ in model.named_buffers()] == [n for n, _ in plain.named_buffers()]
    assert inspect.signature(model.forward) == inspect.signature(plain.forward), "libraries look arguments up in it"
    model.load_state_dict(plain.state_dict())


def test_saved_checkpoint_knows_nothing_of_the_seam(tmp_path):
    model = installed(plain_model())
    model.save_pretrained(tmp_path)
    assert "zorro" not in (tmp_path / "config.json").read_text()
    assert_rows(oracle()[0], shared_call(model, ROWS))
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert reloaded.config._attn_implementation == "sdpa"
    assert type(reloaded) is type(model)
    assert_rows(oracle()[0], per_row(reloaded, ROWS))


def padded_stock_call(model):
    """Right-padded: transformers' eager attention gives NaN for a float64 query that sees nothing."""
    ids = torch.nn.utils.rnn.pad_sequence([torch.cat(row) for row in ROWS], batch_first=True)
    mask = (torch.arange(ids.shape[1]) < torch.tensor([len(p) + len(r) for p, r in ROWS])[:, None]).long()
    return model(ids, attention_mask=mask, labels=torch.where(mask == 1, ids, -100), use_cache=False)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", KINDS)
def test_stock_calls_are_the_plain_models(attention, kind):
    """Logits, loss and gradients, bit by bit; also when a checkpointed layer runs again after the call is over."""
    plain = copy.deepcopy(plain_model())
    plain.set_attn_implementation(attention)
    model = checkpointed(installed(plain), kind)
    checkpointed(plain, kind)
    expected, got = padded_stock_call(plain), padded_stock_call(model)
    assert torch.equal(expected.logits, got.logits)
    assert torch.equal(expected.loss, got.loss)
    shared = loss_of(*shared_call(model, ROWS))  # in between, as a reference policy and an actor may share a model
    expected.loss.backward()
    got.loss.backward()
    for name, grad in gradients(plain).items():
        assert torch.equal(grad, gradients(model)[name]), name
    model.zero_grad()
    shared.backward()
    assert worst_gradient(oracle()[1], gradients(model)) <= TOLERANCE


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_generate_is_the_plain_models(attention):
    plain = copy.deepcopy(plain_model()).float()
    plain.set_attn_implementation(attention)
    model = installed(plain)
    batch = padded_batch([(p, r[:0]) for p, r in ROWS], response_width=1)
    arguments = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    ids, mask = batch["input_ids"][:, :-1], batch["attention_mask"][:, :-1]
    expected = plain.generate(ids, attention_mask=mask, **arguments)
    assert expected.shape == (len(ROWS), ids.shape[1] + 6)
    assert torch.equal(model.generate(ids, attention_mask=mask, **arguments), expected)
    assert_rows(oracle()[0], shared_call(model, ROWS), 2e-5)


def test_a_stock_call_that_fails_leaves_the_seam_whole():
    model = installed(plain_model())
    with pytest.raises(IndexError):
        model(torch.tensor([[VOCAB + 5]]))
    assert_rows(oracle()[0], shared_call(model, ROWS))


def test_uninstall_leaves_nothing():
    plain, model = plain_model(), installed(plain_model())
    shared_call(model, ROWS)
    uninstall(model)
    assert vars(model).keys() == vars(plain).keys()
    assert model.config.to_dict() == plain.config.to_dict()
    assert model.config._attn_implementation == plain.config._attn_implementation == "sdpa"
    assert_rows(oracle()[0], per_row(model, ROWS))
    with pytest.raises(ValueError, match="seam installed.*plain Qwen3ForCausalLM"):
        uninstall(model)


def test_uninstall_of_a_seam_that_was_bound_to_its_model():
    model = installed(plain_model())
    model.forward = types.MethodType(model.forward, model)
    uninstall(model)
    assert vars(model).keys() == vars(plain_model()).keys()


def test_installing_twice_replaces_the_seam():
    model = installed(plain_model(), attn_implementation="eager")
    install(model, attn_implementation="sdpa", use_split_attention=False)
    assert model.forward.kernels is not None
    assert model.forward.split is False
    assert_rows(oracle()[0], shared_call(model, ROWS))
    uninstall(model)
    assert model.config._attn_implementation == "sdpa"
    assert "forward" not in vars(model)


def test_one_model_of_many():
    """The seam is the model's own: the plain one beside it, of the same class, is as it was."""
    plain, model = copy.deepcopy(plain_model()), installed(plain_model())
    shared_call(model, ROWS)
    assert "forward" not in vars(plain)
    assert_rows(oracle()[0], per_row(plain, ROWS))


# Precision, sharding, adapters.


def rms_against(expected, got):
    return (torch.cat(list(expected)) - torch.cat(list(got)).double()).detach().square().mean().sqrt().item()


def test_autocast_is_as_good_as_the_plain_models():
    """Against float64, under autocast to bfloat16 as verl runs the forward."""
    g = torch.Generator().manual_seed(5)
    prompts = [tokens(20, g), tokens(7, g), tokens(1, g)]
    rows = shuffled([(p, tokens(n, g)) for p in prompts for n in (3, 12, 20, 9)], 1)
    errors = torch.zeros(3, 2, dtype=torch.float64)
    for seed in range(3):
        exact = tiny_model(seed=seed)
        plain = copy.deepcopy(exact).float()
        model = installed(plain)
        reference = per_row(exact, rows)
        with torch.autocast("cpu", torch.bfloat16):
            results = per_row(plain, rows), shared_call(model, rows)
        for values in (reference, *results):
            loss_of(*values).backward()
        scale = max(float(p.grad.abs().max()) for p in exact.parameters())
        for i, (m, values) in enumerate(zip((plain, model), results, strict=True)):
            assert {x.dtype for part in values for x in part} == {torch.float32}
            for kind in (0, 1):
                errors[kind, i] += rms_against(reference[kind], values[kind])
            flat = [[p.grad.flatten() / scale for p in x.parameters()] for x in (exact, m)]
            errors[2, i] += rms_against(*flat)
    assert (errors > 0).all()
    assert (errors[:, 1] <= 1.5 * errors[:, 0]).all(), errors


def shard(model, mesh, policy=None):
    from torch.distributed.fsdp import fully_shard

    options = {"mesh": mesh} | ({"mp_policy": policy} if policy else {})
    for layer in model.model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def fsdp2_rank(rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

    mesh = init_device_mesh("cpu", (1,))
    g = torch.Generator().manual_seed(12)
    prompt = tokens(4, g)
    batches = [ROWS, [(prompt, tokens(n, g)) for n in (5, 2, 8)]]
    plain = tiny_model()
    losses = [loss_of(*per_row(plain, rows)) for rows in batches]
    sum(losses).backward()
    expected = gradients(plain)
    for kind, mode in (("plain", "memory"), ("non-reentrant", "none"), ("reentrant", "compute")):
        model = shard(checkpointed(installed(tiny_model()), kind), mesh)
        in_flight = [shared_call(model, rows, logits_optimization=mode) for rows in batches]
        for rows, values in zip(batches, in_flight, strict=True):
            assert_rows(per_row(plain, rows), values)
            loss_of(*values).backward()
        got = {name: grad.full_tensor() for name, grad in gradients(model).items()}
        assert worst_gradient(expected, got) <= TOLERANCE, (kind, mode)

    # Mixed precision casts what a forward is called with; a plan and its temperatures are not for casting.
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = shard(installed(tiny_model(dtype=torch.float32)), mesh, policy)
    fine = torch.linspace(1.0, 1.001, len(ROWS))  # bfloat16 would make them all 1
    warm, plain_values = shared_call(model, ROWS, fine)[0], shared_call(model, ROWS)[0]
    assert {x.dtype for x in warm} == {torch.float32}
    assert not torch.equal(warm[-1], plain_values[-1])


def test_fsdp2_with_two_forwards_in_flight():
    run_ranks(fsdp2_rank, 1)


@pytest.mark.parametrize("mode", LOGITS_OPTIMIZATIONS)
def test_tied_embeddings(mode):
    """One matrix is embedding and head: its gradient has both halves."""
    plain = copy.deepcopy(plain_model(tie_word_embeddings=True))
    model = installed(plain)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    expected, got = per_row(plain, ROWS), shared_call(model, ROWS, logits_optimization=mode)
    assert_rows(expected, got)
    for values in (expected, got):
        loss_of(*values).backward()
    assert worst_gradient(gradients(plain), gradients(model)) <= TOLERANCE


@pytest.mark.parametrize("task_type", ["CAUSAL_LM", None])
def test_lora(task_type):
    """As verl does it: the seam first, the adapter around it. Off, the adapter leaves the reference policy."""
    from peft import LoraConfig, get_peft_model

    def with_adapter(model):
        torch.manual_seed(3)
        config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type=task_type)
        return get_peft_model(model, config).double()

    plain, model = with_adapter(copy.deepcopy(plain_model())), with_adapter(installed(plain_model()))
    expected, got = per_row(plain, ROWS), shared_call(model, ROWS)
    assert_rows(expected, got)
    assert all(len(a) == 0 or (a - b).abs().max() > 1e-2 for a, b in zip(got[0], oracle()[0][0], strict=True))
    with model.disable_adapter():
        assert_rows(oracle()[0], shared_call(model, ROWS))
    got = shared_call(model, ROWS)
    for values in (expected, got):
        loss_of(*values).backward()
    names = gradients(model).keys()
    assert names
    assert all("lora_" in name for name in names)
    assert worst_gradient(gradients(plain), gradients(model)) <= TOLERANCE


# Refusals.


def test_calls_of_the_backbone_and_of_layers_are_stock_calls():
    """They bring no plan, and get the masks and the attention of the plain model, padding included."""
    model, batch = installed(plain_model()), padded_batch(ROWS)
    arguments = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], "use_cache": False}
    expected = plain_model().model(**arguments).last_hidden_state
    assert torch.equal(model.model(**arguments).last_hidden_state, expected)


def test_a_forward_that_loses_the_plan_is_noticed():
    """A packed row without its plan would have no mask at all: future and siblings could be seen."""
    model = installed(plain_model())
    layer = model.model.layers[1]
    forward = layer.forward
    layer.forward = lambda *args, zorro=None, **kwargs: forward(*args, **kwargs)
    with pytest.raises(ValueError, match=r"Qwen3Attention: expected the plan .* zorro=, got none"):
        shared_call(model, ROWS)


@pytest.mark.parametrize("kind", ["non-reentrant", "reentrant"])
def test_a_seam_put_on_between_forward_and_backward(kind):
    """Layers of a plain forward that run again do so with their own attention."""
    model, plain = (checkpointed(copy.deepcopy(plain_model()), kind) for _ in range(2))
    batch = padded_batch(ROWS)
    losses = [
        m(batch["input_ids"], batch["attention_mask"], use_cache=False).logits.square().mean() for m in (model, plain)
    ]
    install(model)
    for loss in losses:
        loss.backward()
    assert worst_gradient(gradients(plain), gradients(model)) <= TOLERANCE


@pytest.mark.parametrize("name", ["qwen3", "llama", "mistral", "gemma3_text", "qwen3_moe"])
def test_generate_with_a_static_cache(name):
    """Its masks are made before the forward, from the model's config."""
    plain = tiny_models.build(name, torch.float32)
    model, batch = installed(plain), padded_batch(ROWS)
    arguments = {
        "attention_mask": batch["attention_mask"][:, :7],
        "cache_implementation": "static",
        "eos_token_id": None,
    }
    tokens_of = [
        m.generate(batch["input_ids"][:, :7], max_new_tokens=6, do_sample=False, **arguments) for m in (model, plain)
    ]
    assert torch.equal(*tokens_of)


def test_stock_and_shared_calls_in_two_threads():
    model, failures = installed(plain_model()), []
    batch, expected = padded_batch(ROWS), oracle()[0]
    stock = plain_model()(batch["input_ids"], batch["attention_mask"]).logits.detach()

    def run(call):
        try:
            for _ in range(30):
                with torch.no_grad():
                    call()
        except BaseException as error:
            failures.append(error)

    threads = [
        Thread(target=run, args=(lambda: assert_rows(expected, shared_call(model, ROWS)),)),
        Thread(
            target=run,
            args=(
                lambda: torch.testing.assert_close(model(batch["input_ids"], batch["attention_mask"]).logits, stock),
            ),
        ),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failures, failures[0]


def test_bidirectional_attention_is_refused():
    model = copy.deepcopy(plain_model())
    model.config.is_causal = False
    with pytest.raises(ValueError, match="is_causal: expected True"):
        install(model)
    model.config.is_causal = True
    install(model)
    model.config.is_causal = False
    with pytest.raises(ValueError, match="is_causal: expected True"):
        shared_call(model, ROWS)


def test_another_attention_set_behind_the_seam():
    """It is the stock calls': with it, the layers of a shared call would cut siblings off from their prompt."""
    model = installed(plain_model())
    model.set_attn_implementation("eager")
    assert_rows(oracle()[0], shared_call(model, ROWS))
    seen = []
    attention = model.model.layers[0].self_attn
    attention.register_forward_hook(lambda module, args, output: seen.append(output[1] is not None))
    model(ROWS[0][0][None])
    assert seen == [True], "eager attention returns its weights"
    uninstall(model)
    assert model.config._attn_implementation == attention.config._attn_implementation == "eager"


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_model_of_the_same_config_is_plain(when):
    """Whether it was there before the seam, or is made from the config of a model that has one."""
    model = copy.deepcopy(plain_model())
    other = type(model)(model.config) if when == "before" else None
    install(model)
    other = other or AutoModelForCausalLM.from_config(model.config)
    other.to(torch.float64).load_state_dict(model.state_dict())
    assert_rows(per_row(plain_model(), ROWS), per_row(other, ROWS))
    assert_rows(oracle()[0], shared_call(model, ROWS))
    model.config.output_hidden_states = True
    assert model(ROWS[0][0][None]).hidden_states is not None, "the layers follow the model's config"


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"attention_mask": torch.ones(1, 48, dtype=torch.int64)}, "attention_mask"),
        ({"use_cache": True}, "use_cache"),
        ({"labels": torch.ones(1, 48, dtype=torch.int64)}, "labels"),
        ({"input_ids": torch.ones(1, 47, dtype=torch.int64)}, r"input_ids.*\(1, 48\).*\(1, 47\)"),
        ({"input_ids": torch.ones(2, 48, dtype=torch.int64)}, r"input_ids.*\(1, 48\).*\(2, 48\)"),
    ],
)
def test_bad_calls_with_a_plan_are_refused(extra, message):
    flat = flat_rows(ROWS)
    plan = build_plan(flat)
    arguments = {
        "input_ids": plan.pack(flat.tokens)[None],
        "position_ids": plan.pack(flat.position_ids)[None],
        "zorro": SharedPrompt(plan, flat.tokens[plan.label_index]),
    }
    model = installed(plain_model())
    model(**arguments, attention_mask=None, use_cache=False, labels=None, return_dict=None)
    with pytest.raises(ValueError, match=message):
        model(**arguments | extra)


def test_bad_requests_are_refused():
    plan = build_plan(flat_rows(ROWS))
    with pytest.raises(ValueError, match="logits_optimization.*'fused'"):
        SharedPrompt(plan, plan.label_index, logits_optimization="fused")
    with pytest.raises(ValueError, match=r"labels.*\(35,\).*\(34,\)"):
        SharedPrompt(plan, plan.label_index[1:])
    flat = flat_rows(ROWS)
    shared = SharedPrompt(plan, flat.tokens[plan.label_index], temperature=torch.ones(8))
    with pytest.raises(ValueError, match=r"temperature.*\(35\).*\(8,\)"):
        installed(plain_model())(
            input_ids=plan.pack(flat.tokens)[None], position_ids=plan.pack(flat.position_ids)[None], zorro=shared
        )


def test_unknown_model_types_are_refused():
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", n_layer=1, n_head=1, n_embd=8, vocab_size=9))
    with pytest.raises(ValueError, match="model_type: expected.*'gpt2'.*strategy=fsdp2.*qwen3"):
        install(model)
    assert "forward" not in vars(model)


@pytest.mark.parametrize("model_type", ["qwen3", "qwen2", "llama", "mistral"])
def test_attention_dropout_is_refused_in_training_only(model_type):
    """Dropped attention has a mask for every row; a shared prompt would have one for all siblings."""
    plain = copy.deepcopy(plain_model(model_type))
    for config in {id(m.config): m.config for m in plain.modules() if hasattr(m, "config")}.values():
        config.attention_dropout = 0.3
    model = installed(plain)
    model.train()
    with pytest.raises(ValueError, match=r"attention_dropout.*0\.3.*override_config\.attention_dropout=0"):
        shared_call(model, ROWS)
    model.eval()
    assert_rows(oracle(model_type)[0], shared_call(model, ROWS))


@pytest.mark.parametrize("options", SEAMS)
@pytest.mark.parametrize(
    ("model_type", "config"),
    [("qwen3", {"use_sliding_window": True, "max_window_layers": 1}), ("mistral", {})],
)
def test_a_sliding_window(model_type, config, options):
    """The longest row of B0 has 15 tokens: a window of 15 sees all of it, one of 5 reaches into some prompts."""
    assert max(len(p) + len(r) for p, r in ROWS) == 15
    log_probs = {}
    for window in (15, 14, 5):
        plain = tiny_model(model_type, sliding_window=window, **config)
        expected = per_row(plain, ROWS)
        assert_rows(expected, shared_call(installed(plain, **options), ROWS))
        log_probs[window] = torch.cat(expected[0])
    assert (log_probs[5] - log_probs[15]).abs().max() > 0.1, "the config does make a window"


@pytest.mark.parametrize(
    "config",
    [
        pytest.param({"use_sliding_window": False}, id="switched-off"),
        pytest.param({"use_sliding_window": True, "layer_types": ["full_attention"] * 2}, id="no-such-layer"),
    ],
)
def test_a_window_that_no_layer_uses_is_none(config):
    model = tiny_model("qwen3", sliding_window=4, **config)
    assert_rows(per_row(model, ROWS), shared_call(installed(model), ROWS))


def rope_config(rope_type):
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4} if rope_type == "longrope" else {}
    return AutoConfig.for_model(
        "llama",
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=4,
        rope_parameters={"rope_type": rope_type, "factor": 2.0, "rope_theta": 10000.0, **factors},
    )


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_positions_that_depend_on_the_batch_are_refused(rope_type):
    with pytest.raises(ValueError, match=f"rope_type.*'{rope_type}'.*strategy=fsdp2"):
        check_supported(rope_config(rope_type))
    check_supported(rope_config("linear"))


@pytest.mark.parametrize(
    ("name", "device", "message"),
    [
        ("flash", "cuda", "attn_implementation: expected one of.*'flash'"),
        ("flash_attention_2", "cpu", "attn_implementation=flash_attention_2.*cuda.*cpu.*sdpa"),
        ("flash_attention_3", "cpu", "attn_implementation=flash_attention_3.*cuda.*cpu.*sdpa"),
        ("flash_attention_4", "meta", "attn_implementation=flash_attention_4.*cuda.*meta.*sdpa"),
        ("flash_attention_2", "cuda", "attn_implementation=flash_attention_2.*pip install flash-attn"),
        ("flash_attention_3", "cuda", "attn_implementation=flash_attention_3.*hopper"),
        ("flash_attention_4", "cuda", "attn_implementation=flash_attention_4.*pip install --pre flash-attn-4"),
        ("sdpa", "npu", "attn_implementation=sdpa.*npu.*eager"),
    ],
)
def test_attention_that_cannot_run_is_refused(monkeypatch, name, device, message):
    for package in ("flash_attn", "flash_attn_interface"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ValueError, match=message):
        resolve_kernels(name, device)


def test_attention_choices():
    assert resolve_kernels("eager", "cpu") is resolve_kernels("eager", "cuda") is None
    assert resolve_kernels("auto", "npu") is None
    for name in ("auto", "sdpa"):
        assert resolve_kernels(name, "cpu") is not None
        assert resolve_kernels(name, "cuda") is not None
    with pytest.raises(ValueError, match="attn_implementation"):
        installed(plain_model(), attn_implementation="flash_attention_2")


def test_memory_mode_refuses_a_head_that_is_no_linear():
    model = installed(plain_model())
    model.lm_head = torch.nn.Sequential(model.lm_head)
    with pytest.raises(ValueError, match="logits_optimization=memory.*Sequential.*compute"):
        shared_call(model, ROWS, logits_optimization="memory")
    assert_rows(oracle()[0], shared_call(model, ROWS, logits_optimization="compute"))
