"""What went wrong in the published package that this one replaces: the right value, for each of its known bugs.

Patched model and stand-alone actor, dense and flash attention, against the unpatched model row by row.
"""

import copy
import pickle

import pytest
import torch
from subjects import FLOAT64, KINDS, Actor, PatchedModel, assert_rows, check, loss_of, make_subject, oracle
from tiny import VOCAB, batch_b0, gradients, padded_batch, shuffled, tiny_model, tokens, worst_gradient

import zorro_verl
from zorro_verl import log_probs
from zorro_verl.batching import place_groups, split_micro_batches
from zorro_verl.log_probs import LOGITS_OPTIMIZATIONS
from zorro_verl.models import uninstall

ROWS = shuffled(batch_b0(), 0)
BATCH = padded_batch(ROWS)


@pytest.fixture(params=KINDS)
def make(request, tmp_path):
    """Builds the subject of this test for a model; ``patched=`` and ``actor=`` are options of one of them."""

    def build(plain=None, patched=None, actor=None, **options):
        kind = request.param
        options |= (patched if kind.startswith("patched") else actor) or {}
        return make_subject(kind, tiny_model() if plain is None else plain, tmp_path, **options)

    return build


def group(prompt_len, response_lens, seed=0):
    g = torch.Generator().manual_seed(seed)
    prompt = tokens(prompt_len, g)
    return [(prompt, tokens(n, g)) for n in response_lens]


def interleaved(*groups):
    return [row for rows in zip(*groups, strict=True) for row in rows]


def test_b01_next_batch_of_another_shape(make):
    """Masks of the first batch were kept on the model and used for every later one."""
    plain, subject = tiny_model(), make()
    same_total = padded_batch(group(4, (7, 2, 5, 8, 1, 6, 7)) + group(8, (0,), seed=1))
    assert subject.values(BATCH)[0]
    packed = subject.stats["tokens_packed"]
    subject.values(same_total)
    assert subject.stats["tokens_packed"] == packed, "only equal totals went wrong in silence"
    longer = padded_batch(interleaved(group(9, (8, 3, 6)), group(2, (1, 4, 8), seed=1)), prompt_width=12)
    for batch in (BATCH, same_total, longer, padded_batch(ROWS[:2]), BATCH):
        check(subject, plain, batch)


@pytest.mark.parametrize("lens", [((5, 5, 5), (5, 5, 5)), ((4, 8, 1), (2, 6, 3))], ids=["equal", "ragged"])
def test_b02_groups_that_are_not_adjacent(make, lens):
    """Rows a, b, a, b were given each other's prompts."""
    subject = make()
    batch = padded_batch(interleaved(group(6, lens[0]), group(3, lens[1], seed=1)), response_width=8)
    check(subject, tiny_model(), batch)
    assert subject.stats["groups"] == 2
    assert subject.stats["tokens_packed"] == 6 + 3 + sum(map(sum, lens))


def test_b03_equal_ids_under_different_masks(make):
    """Prompts were compared by ids, padding included and the mask left out."""
    subject = make()
    rows = group(5, (4, 2, 5, 3, 6, 1, 8, 3, 7))
    batch = padded_batch(rows)
    for row in range(9):  # three kinds of prompt, of 4, 4 and 3 tokens
        for column in ((0,), (1,), (0, 1))[row % 3]:
            batch["attention_mask"][row, column] = 0
    batch["position_ids"] = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    check(subject, tiny_model(), batch)
    assert subject.stats["groups"] == 3
    assert subject.stats["tokens_packed"] == 4 + 4 + 3 + 39


@pytest.mark.parametrize("width", [6, 8, 13])
def test_b04_batch_of_another_response_width(make, width):
    """Rows were cut at the width that the model was patched for, whatever the batch's own."""
    rows = shuffled(group(5, (4, 6, 1)) + group(3, (2, 0, 5), seed=1), 1)
    for response_len in (8, 1, 500):
        subject = make(patched={"response_len": response_len})
        check(subject, tiny_model(), padded_batch(rows, response_width=width))
    assert subject.stats["token_ratio"] > 1.3, "a response length that can't be is no reason not to look"


def test_b05_equal_prompts_at_different_positions(make):
    """The positions of a group's first row were used for all of its rows."""
    subject = make()
    batch = padded_batch(interleaved(group(5, (4, 2, 6)), group(5, (3, 8, 1))))
    batch["position_ids"][1::2] *= 3
    check(subject, tiny_model(), batch)
    assert subject.stats["groups"] == 2


@pytest.mark.parametrize("reentrant", [False, True])
def test_b06_two_forwards_before_a_backward(make, reentrant):
    """Checkpointed layers of the first forward ran again by the metadata of the second."""
    plain, subject = tiny_model(), make()
    subject.model.train()
    subject.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    batches = [BATCH, padded_batch(group(4, (5, 2, 8), seed=3))]
    losses = [loss_of(subject.values(batch)) for batch in batches]
    for batch, loss in zip(batches, losses, strict=True):
        loss.backward()
        loss_of(oracle(plain, batch, subject)).backward()
    assert worst_gradient(gradients(plain), gradients(subject.model)) <= FLOAT64


@pytest.mark.parametrize("positions", ["with the gap", "closed up"])
def test_b07_holes_in_the_mask(make, positions):
    """Attention took a jump of positions, as masked turns of a dialogue leave it, for the start of another sequence."""
    subject = make()
    batch = padded_batch(interleaved(group(5, (8, 6, 7)), group(4, (7, 8, 5), seed=1)))
    batch["attention_mask"][:, 7:9] = 0  # in the responses
    batch["attention_mask"][::2, 2] = 0  # in the prompts of one group
    if positions == "closed up":
        batch["position_ids"] = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    check(subject, tiny_model(), batch)
    assert subject.stats["groups"] == 2


def test_b08_layers_with_a_sliding_window(make):
    """One mask served the layers with a window and those without."""
    longest = max(len(p) + len(r) for p, r in ROWS)
    wide, narrow, narrowest = (
        tiny_model(sliding_window=n, use_sliding_window=True, max_window_layers=1) for n in (longest, longest - 1, 4)
    )
    for plain in (wide, narrow, narrowest):
        check(make(plain), plain, BATCH)
    subject = make(narrowest)
    far = zip(oracle(wide, BATCH, subject)[0], oracle(narrowest, BATCH, subject)[0], strict=True)
    assert max((a - b).abs().max() for a, b in far if len(a)) > 1e-3


def test_b09_mixture_of_experts(make):
    """The router's auxiliary loss was dropped without a word."""
    plain = tiny_model("qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    subject = make(plain)
    for model in (plain, subject.model):
        model.set_experts_implementation("eager")  # their default, a grouped product, has no float64
    check(subject, plain, BATCH)
    assert subject.stats["token_ratio"] > 1.3
    if isinstance(subject, PatchedModel):
        ids, mask = BATCH["input_ids"], BATCH["attention_mask"]
        arguments = {"labels": ids.masked_fill(mask == 0, -100), "output_router_logits": True, "use_cache": False}
        outputs = [model(ids, mask, **arguments) for model in (plain, subject.model)]
        for name in ("aux_loss", "loss"):
            plain.zero_grad()
            subject.model.zero_grad()
            losses = [output[name] for output in outputs]
            torch.testing.assert_close(*losses, atol=FLOAT64, rtol=0)
            for loss in losses:
                loss.backward(retain_graph=True)
            assert worst_gradient(gradients(plain), gradients(subject.model)) <= FLOAT64


def test_b10_copies_have_weights_of_their_own(make):
    """A deep copy, made for a reference policy, went on computing with the original's weights."""
    subject = make()
    twin = copy.deepcopy(subject)
    with torch.no_grad():
        for parameter in subject.model.parameters():
            parameter.mul_(0.5)
    check(twin, tiny_model(), BATCH)
    assert not gradients(subject.model)
    halved = tiny_model()
    halved.load_state_dict(subject.model.state_dict())
    check(subject, halved, BATCH)


@pytest.mark.parametrize("temperature", [0.5, 1.7, torch.tensor([0.5, 2.0, 1.0, 0.7, 1.3, 0.9, 1.1, 3.0])])
def test_b11_temperature_of_the_call(make, temperature):
    """A temperature given with a call was ignored in favour of the one at patch time, and one per row crashed."""
    plain, subject = tiny_model(), make(patched={"temperature": 4.0})
    check(subject, plain, BATCH, temperature)
    if isinstance(subject, PatchedModel):
        subject.patcher.patch(temperature=temperature)
        assert_rows(oracle(plain, BATCH, subject, temperature), subject.values(BATCH))
        for bad in (0.0, -1.0, torch.tensor([1.0] * 7 + [0.0])):
            with pytest.raises(ValueError, match="temperature: expected values above 0"):
                subject.values(BATCH, temperature=bad)
    with pytest.raises(ValueError, match=r"temperature: expected a float or \(8,\)"):
        subject.values(BATCH, temperature=torch.ones(3))


def test_b12_empty_responses(make):
    """A response without a token crashed the batch, and so did a group of them."""
    plain, subject = tiny_model(), make()
    some = group(5, (3, 0, 0, 4)) + group(2, (0, 0, 0), seed=1) + group(4, (0,), seed=2)
    check(subject, plain, padded_batch(shuffled(some, 2), response_width=8))
    none = padded_batch(group(5, (0, 0, 0)) + group(2, (0,), seed=1), response_width=8)
    assert_rows(oracle(plain, none, subject), subject.values(none))


def test_b12_empty_prompts(make):
    """A row without a prompt crashed the batch without saying why."""
    subject = make()
    batch = padded_batch([*group(5, (3, 2, 4)), (torch.tensor([], dtype=torch.int64), torch.tensor([4, 5, 6]))])
    if isinstance(subject, Actor):
        with pytest.raises(ValueError, match=r"prompt.*\[3\]"):
            subject.values(batch)
    else:
        check(subject, tiny_model(), batch)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_b13_one_response_token(make, temperature):
    """A batch of one-token responses lost a dimension when the temperature was not 1."""
    plain, subject = tiny_model(), make(patched={"response_len": 1})
    for rows in (group(5, (1, 1, 1)) + group(3, (1,), seed=1), group(4, (1,))):
        check(subject, plain, padded_batch(rows), temperature)


def parts_of(rows, num_ranks):
    """The rows of each rank, as groups are placed on them."""
    keys = [tuple(p.tolist()) for p, _ in rows]
    lens = [len(p) for p, _ in rows], [len(r) for _, r in rows]
    order = place_groups([keys.index(key) for key in keys], *lens, num_ranks, 1)
    assert sorted(order) == list(range(len(rows)))
    size = len(rows) // num_ranks
    return [[rows[i] for i in order[rank * size : (rank + 1) * size]] for rank in range(num_ranks)]


def test_b14_no_more_rows_than_ranks(make):
    """With as many ranks as rows, or more, callers were handed something else than they unpacked."""
    rows = group(5, (3, 2)) + group(4, (6,), seed=1)
    subject, plain = make(), tiny_model()
    for num_ranks in (1, 3):
        for part in parts_of(rows, num_ranks):
            check(subject, plain, padded_batch(part))
    assert split_micro_batches([0], [5], [3], budget=8) == [[0]]
    with pytest.raises(ValueError, match="batch: expected a multiple of 4 ranks x 1 mini-batches rows, got 3"):
        parts_of(rows, 4)
    with pytest.raises(ValueError, match="micro-batches: expected at least 2 rows.*got 1"):
        split_micro_batches([0], [5], [3], budget=8, min_count=2)


def test_b15_groups_that_do_not_fill_the_ranks(make):
    """Groups of 3, 3 and 4 on two ranks ended in an error that nobody was meant to see."""
    rows = shuffled(group(5, (3, 2, 8)) + group(4, (6, 1, 1), seed=1) + group(7, (2, 2, 5, 4), seed=2), 0)
    subject, plain, groups = make(), tiny_model(), 0
    for part in parts_of(rows, 2):
        assert len(part) == 5
        check(subject, plain, padded_batch(part, response_width=8))
        groups += subject.stats["groups"]
    assert groups == 4, "one group is cut, once"


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("rows_per_chunk", [1, 2, 5, 100])
def test_b16_memory_mode_in_one_process(tmp_path, monkeypatch, attention, rows_per_chunk):
    """The mode without logits asked for a process group, and for at least as many rows as it had shards."""
    monkeypatch.setattr(log_probs, "CHUNK_BYTES", 4 * VOCAB * rows_per_chunk)
    plain = tiny_model()
    subject = Actor(plain, attention, tmp_path, logits_optimization="memory")
    assert not torch.distributed.is_initialized()
    few, alone = padded_batch(group(4, (2, 0, 3))), padded_batch(group(4, (5,)))
    for batch in (BATCH, few, alone):
        check(subject, plain, batch)
    functional = torch.autograd.grad(loss_of(subject.values(BATCH)), list(subject.model.parameters()))
    expected = torch.autograd.grad(loss_of(oracle(plain, BATCH, subject)), list(plain.parameters()))
    scale = max(float(g.abs().max()) for g in expected)
    assert max(float((a - b).abs().max()) for a, b in zip(expected, functional, strict=True)) <= FLOAT64 * scale


def test_b17_without_split_attention(make):
    """The other of the two attention strategies crashed in every batch."""
    plain, subject = tiny_model(), make(use_split_attention=False)
    for batch in (BATCH, padded_batch(interleaved(group(6, (4, 8, 1)), group(3, (2, 6, 3), seed=1)))):
        check(subject, plain, batch)
        assert subject.stats["token_ratio"] > 1
    packed, subject = subject.stats["tokens_packed"], make()
    subject.values(batch)
    assert subject.stats["tokens_packed"] == packed


def test_b17_padded_and_unpadded(make):
    """Only batches without padding could be asked for: any padding, on any side, has to give the same."""
    subject = make()
    expected = subject.values(BATCH)
    for widths in ({"prompt_width": 20}, {"pad": 7}, {"prompt_width": 9, "pad": VOCAB - 1}):
        for a, b in zip(expected, subject.values(padded_batch(ROWS, **widths)), strict=True):
            assert all(map(torch.equal, a, b))


@pytest.mark.parametrize("use_unpad", [False, True])
def test_b17_padded_tensors(use_unpad):
    """Reconstruction from the padded form, in values and gradients."""
    cut = zorro_verl.ZoRRoTrain
    ids, mask, embedding = BATCH["input_ids"], BATCH["attention_mask"], tiny_model().get_input_embeddings()
    found = cut.find_prompt_groups(ids, 8, attention_mask=mask)
    packed, positions, info = cut.create_deduplicated_batch(
        ids, BATCH["position_ids"], 8, *found, attention_mask=mask, use_unpad=use_unpad
    )
    assert packed.shape == positions.shape
    got = cut.reconstruct_sequences(embedding(packed), info)
    expected = embedding(ids) * mask[..., None]
    assert torch.equal(got, expected)
    weights = torch.randn(expected.shape, dtype=torch.float64)
    (a,), (b,) = (torch.autograd.grad((x * weights).sum(), embedding.weight) for x in (expected, got))
    assert (a - b).abs().max() <= 1e-10


@pytest.mark.slow
def test_b18_compiled():
    """The compiler met dozens of graph breaks, from reading tensors on the host one by one."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    plain, graphs = tiny_model(), []
    subject = PatchedModel(plain, "sdpa", response_len=None)
    backend = lambda module, inputs: graphs.append(module) or module.forward  # noqa: E731
    compiled, counts = torch.compile(subject.model, backend=backend), []
    model, subject.model = subject.model, compiled
    breaks = torch._dynamo.utils.counters["graph_break"]
    for i in range(10):
        batch = padded_batch(shuffled(batch_b0(i), i)[: 5 + i % 4])
        model.zero_grad()
        plain.zero_grad()
        expected, got = oracle(plain, batch, subject), subject.values(batch)
        assert_rows(expected, got)
        if i < 3:
            for values in (expected, got):
                loss_of(values).backward()
            assert worst_gradient(gradients(plain), gradients(model)) <= FLOAT64
        if i == 0:
            assert sum(breaks.values()) <= 1, breaks
        counts.append(len(graphs))
    assert counts[0] > 0
    assert counts[1:] == counts[1:2] * 9, "another shape was compiled anew"


def test_b19_no_mask_and_no_positions(make):
    """A call without position_ids or attention_mask died of an attribute of None."""
    plain, subject = tiny_model(), make()
    full = padded_batch(interleaved(group(5, (4, 4, 4)), group(5, (4, 4, 4), seed=1)))
    for batch, missing in ((BATCH, ["position_ids"]), (full, ["attention_mask"]), (full, list(BATCH)[1:3])):
        given = {name: value for name, value in batch.items() if name not in missing}
        if isinstance(subject, Actor):
            with pytest.raises(ValueError, match=f"batch: expected the keys.*no .*{missing[0]}"):
                subject.actor.forward(given)
        else:
            logits = subject.model(**{name: x for name, x in given.items() if name != "responses"}).logits
            for row, (ids, mask) in enumerate(zip(batch["input_ids"], batch["attention_mask"].bool(), strict=True)):
                expected = plain(ids[mask][None], use_cache=False).logits[0]
                assert (logits[row][mask] - expected).abs().max() <= FLOAT64, (row, missing)


def test_b20_generate(make):
    """A patched model could not generate."""
    plain, subject = tiny_model(dtype=torch.float32), make(tiny_model(dtype=torch.float32), {"temperature": 4.0})
    prompts = padded_batch([(p, r[:0]) for p, r in ROWS])
    inputs = {name: prompts[name][:, :-1] for name in ("input_ids", "attention_mask")}
    for options in (
        {"do_sample": False},
        {"do_sample": True, "temperature": 0.5},
        {"use_cache": False},
        {"num_beams": 2},
    ):
        options |= {"max_new_tokens": 5, "pad_token_id": 0}
        torch.manual_seed(0)
        expected = plain.generate(**inputs, **options)
        torch.manual_seed(0)
        assert torch.equal(subject.model.generate(**inputs, **options), expected), options
    assert_rows(oracle(plain, BATCH, subject), subject.values(BATCH, temperature=1.0), 2e-5)


def test_b20_labels(make):
    """``labels=`` was accepted and ignored."""
    plain, subject = tiny_model(), make()
    for row, (p, r) in enumerate(ROWS):  # one by one and padded on the right, where stock models agree with themselves
        ids = torch.cat([p, r])[None]
        if ids.shape[1] > 1:
            assert abs(subject.model(ids, labels=ids).loss - plain(ids, labels=ids).loss) <= FLOAT64, row
    ids = torch.nn.utils.rnn.pad_sequence([torch.cat(row) for row in ROWS], batch_first=True, padding_value=0)
    mask = (torch.arange(ids.shape[1]) < torch.tensor([len(p) + len(r) for p, r in ROWS])[:, None]).long()
    labels = ids.masked_fill(mask == 0, -100)
    for model in (plain, subject.model):
        model.zero_grad()
        model.loss = model(ids, attention_mask=mask, labels=labels, use_cache=False).loss
        model.loss.backward()
    assert abs(plain.loss - subject.model.loss) <= FLOAT64
    assert worst_gradient(gradients(plain), gradients(subject.model)) <= FLOAT64


def test_b20_pickle(make):
    """A patched model could not be pickled."""
    subject = pickle.loads(pickle.dumps(make()))
    check(subject, tiny_model(), BATCH)


def test_b20_nothing_left_behind(make):
    """There was no way back, and attributes stayed on the modules."""
    plain, subject = tiny_model(), make()
    subject.values(BATCH)
    if isinstance(subject, PatchedModel):
        subject.patcher.unpatch()
    else:
        uninstall(subject.model)
    for module in subject.model.modules():
        assert not {"forward", "generate"} & vars(module).keys()
        assert not [name for name, x in vars(module).items() if type(x).__module__.startswith("zorro_verl")]
    assert subject.model.config._attn_implementation == "sdpa"
    assert torch.equal(subject.model(BATCH["input_ids"]).logits, plain(BATCH["input_ids"]).logits)


def test_b21_bfloat16(make):
    """Log-probs came back in bfloat16, with more than twice the plain model's error."""
    errors = torch.zeros(2, dtype=torch.float64)
    for seed in range(3):
        plain = tiny_model(dtype=torch.bfloat16, seed=seed)
        subject = make(plain)
        with torch.no_grad():
            truth = oracle(copy.deepcopy(plain).double(), BATCH, subject)[0]
            pair = oracle(plain, BATCH, subject)[0], subject.values(BATCH)[0]
        assert {x.dtype for x in pair[1]} == {torch.float32}
        errors += torch.stack([(torch.cat(list(x)) - torch.cat(truth)).square().mean() for x in pair])
    assert 0 < errors[1] <= 1.5**2 * errors[0], errors.sqrt()


@pytest.mark.parametrize("mode", LOGITS_OPTIMIZATIONS)
@pytest.mark.parametrize("trained", ["lm_head.weight", "model.layers.0.self_attn.q_proj.weight"])
def test_b22_one_trained_parameter(make, mode, trained):
    """With a frozen backbone, log-probs of the mode without logits had no gradient."""
    plain, subject = tiny_model(), make(actor={"logits_optimization": mode})
    for model in (plain, subject.model):
        model.requires_grad_(False).get_parameter(trained).requires_grad_()
    check(subject, plain, BATCH)
    assert gradients(subject.model).keys() == {trained}
    assert gradients(subject.model)[trained].any()


# What was promised of the options and calls, and not kept.


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_calls_as_documented(attention):
    """The documented arguments were not those of the code: patch(), model(input_ids), the context manager, a layer."""
    plain, model = tiny_model(), tiny_model()
    ids = padded_batch(interleaved(group(6, (5, 5, 5)), group(6, (5, 5, 5), seed=1)))["input_ids"]
    expected = torch.stack([plain(row[None]).logits[0] for row in ids])
    same = lambda: bool((model(ids).logits - expected).abs().max() <= FLOAT64)  # noqa: E731
    patcher = zorro_verl.Qwen3ModelOncePatcher(model, use_split_attention=True, attn_implementation=attention)
    for rollout_n in (10, 3, None):  # a hint: groups have the size that they have
        patcher.patch(response_len=5, rollout_n=rollout_n, temperature=1.0)
        assert same()
        assert patcher.stats["tokens_packed"] == 2 * 6 + 6 * 5
    patcher.unpatch()
    with zorro_verl.Qwen3ModelPatcher(model, use_split_attention=True, attn_implementation=attention) as found:
        assert same()
        assert found.stats["token_ratio"] > 1
    assert "forward" not in vars(model)
    layer = zorro_verl.QwenAttentionPatcher(model.model.layers[1].self_attn, True, attention)
    layer.patch()
    assert same()
    layer.unpatch()
    assert same()


def test_a_prompt_with_its_padding_on_another_side_is_the_same_prompt(make):
    """Prompts were only found equal when their padding lay in the same columns."""
    subject, rows = make(), group(5, (4, 2, 6))
    batch = padded_batch(rows, prompt_width=8, response_width=8)
    right = torch.cat([torch.arange(3, 8), torch.arange(3), torch.arange(8, 16)])
    for name in ("input_ids", "attention_mask", "position_ids"):
        batch[name][1] = batch[name][1, right]
    check(subject, tiny_model(), batch)
    assert subject.stats["groups"] == 1
    assert subject.stats["tokens_packed"] == 5 + 12


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_an_adapter_around_the_model(attention):
    """A wrapper was taken for the class that it wraps, unseen."""
    from peft import LoraConfig, get_peft_model

    def adapted():
        torch.manual_seed(3)
        config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
        return get_peft_model(tiny_model(), config).double()

    plain = adapted()
    subject = PatchedModel(plain, attention)
    check(subject, plain, BATCH)
    assert gradients(subject.model)
    assert all("lora_" in name for name in gradients(subject.model))
    with subject.model.disable_adapter():
        assert_rows(oracle(tiny_model(), BATCH, subject), subject.values(BATCH))


def test_statistics_are_printed(capsys):
    """The batch statistics printed nothing."""
    numbers = zorro_verl.analyze_normal_batch_via_attention_mask(BATCH["input_ids"], BATCH["attention_mask"], 8)
    assert numbers["response_count"] == len(ROWS)
    assert "resp count=8" in capsys.readouterr().out
