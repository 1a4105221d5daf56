"""Patched models against the plain model: on one unpadded row at a time, or called in the same way."""

import copy
import pickle
import subprocess
import sys
import types

import pytest
import torch
from tiny import batch_b0, gradients, padded_batch, shuffled, tiny_model, tokens, worst_gradient
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForTokenClassification

from zorro_verl import Qwen3ModelOncePatcher
from zorro_verl.models import install, uninstall
from zorro_verl.qwen_model_patcher import Qwen3ModelPatcher

FLOAT64 = 5e-6
FLOAT32 = 2e-5
ROWS = shuffled(batch_b0(), 1)
BATCH = padded_batch(ROWS)
MASK = BATCH["attention_mask"].bool()
WIDTH = BATCH["responses"].shape[1]


def pair(model_type="qwen3", dtype=torch.float64, **config):
    """A model to patch and the same, plain."""
    model = tiny_model(model_type, dtype, **config)
    return model, copy.deepcopy(model)


def patched(model, attn_implementation="auto", use_split_attention=True, **settings):
    patcher = Qwen3ModelOncePatcher(model, use_split_attention, attn_implementation)
    patcher.patch(**settings)
    return patcher


def rows_of(values, mask=MASK):
    """``(B, S, V)`` as a list of each row's own positions."""
    return [row[keep] for row, keep in zip(values, mask, strict=True)]


def row_logits(model, rows=ROWS):
    """The oracle: each row alone and unpadded."""
    return [model(torch.cat(row)[None], use_cache=False).logits[0] for row in rows]


def assert_rows(expected, got, tolerance=FLOAT64):
    for row, (a, b) in enumerate(zip(expected, got, strict=True)):
        assert a.shape == b.shape, row
        torch.testing.assert_close(b, a, atol=tolerance, rtol=0, msg=lambda m, row=row: f"row {row}: {m}")


def loss_of(logits, seed=0):
    """A sum over every position of every row, each with weights of its own."""
    g = torch.Generator().manual_seed(seed)
    return sum((x.log_softmax(-1) * torch.randn(x.shape, generator=g, dtype=x.dtype)).sum() for x in logits)


def call(model, rows=ROWS, **arguments):
    batch = padded_batch(rows)
    arguments = {"attention_mask": batch["attention_mask"]} | arguments
    return rows_of(model(batch["input_ids"], **arguments).logits, batch["attention_mask"].bool())


@pytest.mark.parametrize("response_len", [None, WIDTH])
@pytest.mark.parametrize(
    ("model_type", "attention", "split"),
    [
        ("qwen3", "eager", True),
        ("qwen3", "sdpa", True),
        ("qwen3", "eager", False),
        ("qwen3", "sdpa", False),
        ("qwen2", "sdpa", True),
        ("llama", "sdpa", True),
        ("mistral", "sdpa", True),
    ],
)
def test_logits_and_gradients_equal_rows(model_type, attention, split, response_len):
    model, plain = pair(model_type)
    patched(model, attention, split, response_len=response_len)
    got, expected = call(model), row_logits(plain)
    assert_rows(expected, got)
    loss_of(got).backward()
    loss_of(expected).backward()
    assert worst_gradient(gradients(plain), gradients(model)) <= FLOAT64


def test_the_documented_call():
    model, plain = pair(dtype=torch.float32)
    patcher = Qwen3ModelOncePatcher(model, use_split_attention=True, attn_implementation="eager")
    patcher.patch(response_len=512, rollout_n=10, temperature=1.0)
    input_ids = torch.cat([tokens(9, torch.Generator().manual_seed(1)).expand(4, 9), torch.arange(1, 13).view(4, 3)], 1)
    output = model(input_ids)
    assert patcher.stats == {
        "tokens_total": 48,
        "tokens_packed": 9 + 4 * 3,
        "token_ratio": 48 / 21,
        "groups": 1,
        "groups_split": 0,
        "fallback": {"use_cache": 0, "inputs_embeds_grad": 0, "multimodal": 0},
    }
    patcher.unpatch()
    with Qwen3ModelPatcher(model, use_split_attention=True):
        inside = model(input_ids)
    for logits in (output.logits, inside.logits):
        torch.testing.assert_close(logits, plain(input_ids).logits, atol=FLOAT32, rtol=0)


def test_only_the_packed_row_goes_through_the_layers():
    model, _ = pair()
    patcher, lengths = patched(model, response_len=WIDTH), []
    model.model.layers[1].mlp.register_forward_pre_hook(lambda module, args: lengths.append(args[0].shape[1]))
    model.lm_head.register_forward_pre_hook(lambda module, args: lengths.append(args[0].shape[1]))
    call(model)
    assert lengths == [48, 48] == [patcher.stats["tokens_packed"]] * 2
    lengths.clear()
    model(BATCH["input_ids"], BATCH["attention_mask"], logits_to_keep=WIDTH + 1)
    assert lengths == [48, 35 + 3], "the head runs on responses and the last token of each prompt"


def test_a_response_length_that_fits_nothing_is_replaced_by_a_search():
    """Rows that are padded on the right: their last columns are no responses, and no two prompts of one width equal."""
    model, plain = pair()
    patcher = patched(model, response_len=2)
    prompt, none = tokens(6, torch.Generator().manual_seed(4)), torch.empty(0, dtype=torch.long)
    rows = [(torch.cat([prompt, torch.arange(i, i + n)]), none) for i, n in ((1, 3), (9, 5), (20, 4), (30, 5))]
    ids, mask = (torch.nn.utils.rnn.pad_sequence(x, True) for x in ([r for r, _ in rows], [r > 0 for r, _ in rows]))
    assert_rows(row_logits(plain, rows), rows_of(model(ids, mask).logits, mask))
    assert patcher.stats["tokens_packed"] == 6 + 17


@pytest.mark.parametrize("response_len", [None, 1, WIDTH - 1, WIDTH, WIDTH + 2, 14, 15, 512])
def test_a_response_length_of_another_batch_is_no_error(response_len):
    """Where the boundary lies decides what is shared, never what comes out."""
    model, plain = pair()
    patched(model, response_len=response_len)
    assert_rows(row_logits(plain), call(model))


def test_padding_carries_no_meaning():
    """Wherever it lies, and with whatever token; where there is padding logits are finite."""
    model, plain = pair()
    patched(model)
    expected = row_logits(plain)
    right = padded_batch([(torch.cat(row), torch.empty(0, dtype=torch.long)) for row in ROWS], response_width=3)
    for batch in (padded_batch(ROWS, prompt_width=20, pad=7), padded_batch(ROWS, response_width=15), right):
        logits = model(batch["input_ids"], batch["attention_mask"]).logits
        assert torch.isfinite(logits).all()
        assert_rows(expected, rows_of(logits, batch["attention_mask"].bool()))


def test_rows_without_a_token():
    model, plain = pair()
    for response_len in (None, WIDTH):
        patched(model, response_len=response_len)
        mask = BATCH["attention_mask"].clone()
        mask[3] = 0
        logits = model(BATCH["input_ids"], mask).logits
        assert not logits[3].any()
        got = [x for x in rows_of(logits, mask.bool()) if len(x)]
        assert_rows([x for row, x in enumerate(row_logits(plain)) if row != 3], got)
    output = model(BATCH["input_ids"], torch.zeros_like(mask), use_cache=False)
    assert output.logits.shape == (8, 15, 61)


def test_holes_and_positions_are_as_in_the_plain_call():
    """A masked token inside a row leaves its gap in the positions, as it does in the plain model."""
    model, plain = pair(dtype=torch.float32)
    patched(model)
    ids = torch.cat([tokens(6, torch.Generator().manual_seed(3)).expand(4, 6), torch.arange(1, 33).view(4, 8)], 1)
    mask = torch.ones_like(ids)
    mask[:2, 8:10] = 0
    mask[3, :2] = 0
    got, expected = model(ids, mask).logits, plain(ids, mask, use_cache=False).logits
    torch.testing.assert_close(got[mask == 1], expected[mask == 1], atol=FLOAT32, rtol=0)


def test_positions_given():
    model, plain = pair()
    patched(model)
    ids = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6]).expand(4, 8)
    positions = torch.arange(8).repeat(4, 1)
    positions[1, 5:] += 7
    positions[2, 2:] += 3
    got = model(ids, position_ids=positions).logits
    # The plain model takes a jump for the start of another sequence unless the mask says otherwise.
    mask = torch.ones(1, 1, 8, 8, dtype=torch.bool).tril()
    expected = [plain(ids[i : i + 1], mask, positions[i : i + 1], use_cache=False).logits[0] for i in range(4)]
    assert_rows(expected, got)
    assert_rows([expected[0]] * 4, model(ids, position_ids=torch.arange(8)[None]).logits)


def test_rows_without_a_prompt():
    """A plain model does not ask for one; a row of one response token is a whole row."""
    model, plain = pair()
    patched(model, response_len=3)
    rows = [([], [4, 7, 1]), ([], [4]), ([], [4, 7, 2]), ([5, 6], [1]), ([5, 6], [2, 3]), ([5, 6], [])]
    rows = [(torch.tensor(p, dtype=torch.long), torch.tensor(r, dtype=torch.long)) for p, r in rows]
    assert_rows(row_logits(plain, rows), call(model, rows))


@pytest.mark.parametrize("use_cache", [None, False])
def test_several_sequences_in_one_row(use_cache):
    """Without mask and cache, positions that start anew mean other sequences, as in batches that are not padded."""
    model, plain = pair()
    patcher = patched(model, response_len=3)
    sequences = [torch.cat(row) for row in ROWS]
    ids = torch.cat(sequences)[None]
    positions = torch.cat([torch.arange(len(x)) for x in sequences])[None]
    got = model(ids, position_ids=positions, use_cache=use_cache).logits
    expected = plain(ids, position_ids=positions, use_cache=use_cache).logits
    torch.testing.assert_close(got, expected, atol=FLOAT64, rtol=0)
    if use_cache is False:
        assert patcher.stats["tokens_packed"] == 51, "and prompts are found among the sequences"
        assert_rows(row_logits(plain), got[0].split([len(x) for x in sequences]))
        loss_of(got[0].split([len(x) for x in sequences])).backward()
        loss_of(row_logits(plain)).backward()
        assert worst_gradient(gradients(plain), gradients(model)) <= FLOAT64


def test_several_sequences_in_one_row_under_checkpointing():
    """transformers makes no cache then, whatever the config says."""
    model, plain = (m.train() for m in pair())
    for m in (model, plain):
        m.gradient_checkpointing_enable()
    patched(model)
    ids, positions = tokens(12, torch.Generator().manual_seed(5))[None], torch.arange(6).repeat(2)[None]
    got, expected = (m(ids, position_ids=positions).logits for m in (model, plain))
    torch.testing.assert_close(got, expected, atol=FLOAT64, rtol=0)


def test_the_config_may_change_while_patched():
    """Its layers read some of it in every call."""
    model, plain = pair("mistral", sliding_window=100)
    wide = row_logits(plain)
    patched(model)
    assert_rows(wide, call(model))
    model.config.output_hidden_states = True
    assert len(model(BATCH["input_ids"]).hidden_states) == 3
    for m in (model, plain):
        m.config.sliding_window = 4
    narrow = row_logits(plain)
    assert max((a - b).abs().max() for a, b in zip(wide, narrow, strict=True)) > 1e-3
    assert_rows(narrow, call(model))


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("sliding_window", [1, 4, 7, 100])
def test_layers_with_a_sliding_window(sliding_window, split):
    """Shorter than the responses, shorter than the prompts, and longer than any row."""
    model, plain = pair("mistral", sliding_window=sliding_window)
    patcher = patched(model, use_split_attention=split)
    got, expected = call(model), row_logits(plain)
    assert patcher.stats["tokens_packed"] == 51
    assert_rows(expected, got)
    loss_of(got).backward()
    loss_of(expected).backward()
    assert worst_gradient(gradients(plain), gradients(model)) <= FLOAT64


def test_a_mask_for_all_rows():
    model, plain = pair()
    patched(model)
    ids = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6]).expand(4, 8)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1]])
    assert_rows(row_logits(plain, [(ids[0, 2:], ids[0, :0])] * 4), model(ids, mask).logits[:, 2:])


# What else a call can ask for.


def labels_of(batch=BATCH):
    return batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_labels(temperature):
    """Hugging Face's own loss, on the divided logits."""
    model, plain = pair()
    patched(model, temperature=temperature)
    output = model(BATCH["input_ids"], BATCH["attention_mask"], labels=labels_of())
    reference = plain(BATCH["input_ids"], BATCH["attention_mask"], use_cache=False)
    expected = plain.loss_function(reference.logits / temperature, labels_of(), plain.config.vocab_size)
    torch.testing.assert_close(output.loss, expected, atol=FLOAT64, rtol=0)
    output.loss.backward()
    expected.backward()
    assert worst_gradient(gradients(plain), gradients(model)) <= FLOAT64
    assert output.to_tuple()[0] is output.loss


def test_arguments_of_the_loss_are_handed_on():
    model, plain = pair()
    patched(model)
    arguments = {"labels": labels_of(), "num_items_in_batch": torch.tensor(7)}
    got = model(BATCH["input_ids"], BATCH["attention_mask"], **arguments).loss
    expected = plain(BATCH["input_ids"], BATCH["attention_mask"], use_cache=False, **arguments).loss
    torch.testing.assert_close(got, expected, atol=FLOAT64, rtol=0)
    shifted = torch.nn.functional.pad(labels_of(), (0, 1), value=-100)[:, 1:].contiguous()
    got = model(BATCH["input_ids"], BATCH["attention_mask"], labels=labels_of(), shift_labels=shifted).loss
    expected = model(BATCH["input_ids"], BATCH["attention_mask"], labels=labels_of()).loss
    torch.testing.assert_close(got, expected, atol=FLOAT64, rtol=0)


@pytest.mark.parametrize("keep", [0, 1, 3, 15, torch.tensor([14, 2, 9, 9]), torch.tensor([], dtype=torch.long)])
def test_logits_to_keep(keep):
    model, plain = pair()
    patched(model)
    got = model(BATCH["input_ids"], BATCH["attention_mask"], logits_to_keep=keep).logits
    expected = plain(BATCH["input_ids"], BATCH["attention_mask"], use_cache=False, logits_to_keep=keep).logits
    mask = MASK[:, slice(-keep, None) if isinstance(keep, int) else keep]
    assert got.shape == expected.shape
    torch.testing.assert_close(got[mask], expected[mask], atol=FLOAT64, rtol=0)


def test_hidden_states():
    model, plain = pair()
    patched(model)
    arguments = {"attention_mask": BATCH["attention_mask"], "output_hidden_states": True}
    got = model(BATCH["input_ids"], **arguments).hidden_states
    expected = plain(BATCH["input_ids"], use_cache=False, **arguments).hidden_states
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a[MASK], b[MASK], atol=FLOAT64, rtol=0)


def test_a_tuple_when_asked():
    model, plain = pair()
    patched(model)
    ids, mask = BATCH["input_ids"], BATCH["attention_mask"]
    loss, logits = model(ids, mask, labels=labels_of(), return_dict=False)
    expected = plain(ids, mask, labels=labels_of(), return_dict=False, use_cache=False)
    torch.testing.assert_close(loss, expected[0], atol=FLOAT64, rtol=0)
    assert logits.shape == expected[1].shape


def test_embeddings_instead_of_tokens():
    """Prompts are then what is equal bit for bit."""
    model, plain = pair()
    patcher = patched(model, response_len=WIDTH)
    for p in (model.get_input_embeddings().weight, plain.get_input_embeddings().weight):
        p.requires_grad = False
    embeddings = model.get_input_embeddings()(BATCH["input_ids"])
    got = rows_of(model(inputs_embeds=embeddings, attention_mask=BATCH["attention_mask"]).logits)
    assert patcher.stats["tokens_packed"] == 48
    expected = row_logits(plain)
    assert_rows(expected, got)
    loss_of(got).backward()
    loss_of(expected).backward()
    assert worst_gradient(gradients(plain), gradients(model)) <= FLOAT64


def test_embeddings_with_a_gradient_keep_it_row_by_row():
    """Two rows that are equal by chance may come from two parameters."""
    model, plain = pair(dtype=torch.float32)
    patcher = patched(model)
    rows = [torch.randn(6, 32, generator=torch.Generator().manual_seed(0)).repeat(1, 1) for _ in range(3)]
    grads = []
    for m in (model, plain):
        leaves = [row.clone().requires_grad_() for row in rows]
        logits = m(inputs_embeds=torch.stack(leaves), use_cache=False).logits
        (logits.log_softmax(-1)[:, :, 7] * torch.arange(1.0, 4)[:, None]).sum().backward()
        grads.append(torch.stack([leaf.grad for leaf in leaves]))
    torch.testing.assert_close(*grads, atol=FLOAT32, rtol=0)
    assert patcher.stats["fallback"] == {"use_cache": 0, "inputs_embeds_grad": 3, "multimodal": 0}


def test_embeddings_that_differ_are_not_shared():
    """Two prompts of one length, told apart by their embeddings alone."""
    model, plain = pair()
    patcher = patched(model, response_len=3)
    ids = torch.tensor([[5, 6, 7, 8], [5, 9, 7, 8]]).repeat_interleave(3, 0)
    ids = torch.cat([ids, torch.arange(1, 19).view(6, 3)], 1)
    got = model(inputs_embeds=model.get_input_embeddings()(ids).detach()).logits
    assert patcher.stats["groups"] == 2
    assert_rows(row_logits(plain, [(row, row[:0]) for row in ids]), got)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_a_cache_runs_as_the_plain_model_and_is_counted(temperature):
    model, plain = pair()
    patcher = patched(model, temperature=temperature)
    ids = torch.tensor([3, 1, 4, 1, 5, 9]).expand(4, 6)
    got, expected = model(ids, use_cache=True), plain(ids, use_cache=True)
    assert patcher.stats["fallback"] == {"use_cache": 4, "inputs_embeds_grad": 0, "multimodal": 0}
    assert patcher.stats["token_ratio"] == 1
    torch.testing.assert_close(got.logits, expected.logits / temperature, atol=FLOAT64, rtol=0)
    for a, b in zip(got.past_key_values, expected.past_key_values, strict=True):
        assert torch.equal(a[0], b[0])
    new = torch.tensor([[2], [6], [5], [3]])
    got, expected = (m(new, past_key_values=o.past_key_values) for m, o in ((model, got), (plain, expected)))
    torch.testing.assert_close(got.logits, expected.logits / temperature, atol=FLOAT64, rtol=0)
    model(ids)
    assert not any(patcher.stats["fallback"].values())


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": False},
        {"do_sample": True, "temperature": 0.8},
        {"do_sample": True, "use_cache": False},
        {"num_beams": 3, "do_sample": False},
        {"do_sample": False, "cache_implementation": "static"},
    ],
)
def test_generate_is_the_plain_models(options):
    """It has a temperature of its own; the patch's would be a second one."""
    model, plain = pair(dtype=torch.float32)
    patched(model, temperature=0.3, response_len=2)
    ids, mask = BATCH["input_ids"][:, :7], BATCH["attention_mask"][:, :7]
    outputs = []
    for m in (model, plain):
        torch.manual_seed(0)
        outputs.append(m.generate(ids, attention_mask=mask, max_new_tokens=8, eos_token_id=None, **options))
    assert torch.equal(*outputs)
    assert_rows([x / 0.3 for x in row_logits(plain)], call(model), FLOAT32 * 4)


def test_generate_has_its_own_temperature_whatever_is_around_the_forward():
    model, plain = pair(dtype=torch.float32)
    patched(model, temperature=0.25)
    inner, ids = model.forward, ROWS[0][0][None]
    model.forward = lambda *args, **kwargs: inner(*args, **kwargs)
    arguments = {"max_new_tokens": 5, "do_sample": False, "output_scores": True, "return_dict_in_generate": True}
    arguments["eos_token_id"] = None
    got, assisted, expected = (
        m.generate(ids, **arguments, **others)
        for m, others in ((model, {}), (model, {"assistant_model": model}), (plain, {}))
    )
    for output in (got, assisted):
        torch.testing.assert_close(output.scores, expected.scores, atol=FLOAT32, rtol=0)


def test_temperature():
    model, plain = pair()
    expected = row_logits(plain)
    temperatures = torch.linspace(0.5, 2, len(ROWS), dtype=torch.float64)
    per_row = [x / t for x, t in zip(expected, temperatures, strict=True)]
    patched(model, temperature=0.7)
    assert_rows([x / 0.7 for x in expected], call(model))
    assert_rows([x / 2 for x in expected], call(model, temperature=2))
    assert_rows(per_row, call(model, temperature=temperatures))
    assert_rows([x / 0.7 for x in expected], call(model))
    patched(model, temperature=temperatures)
    assert_rows(per_row, call(model))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"temperature": 0.0}, "temperature: expected values above 0, got 0.0"),
        ({"temperature": torch.tensor([1.0, -1.0] * 4)}, "temperature: expected values above 0"),
        ({"temperature": torch.ones(3)}, r"temperature: expected a float or \(8,\), got \(3,\)"),
        ({"temperature": "hot"}, "temperature: expected a float"),
        ({"output_attentions": True}, "output_attentions: a patched model takes no such argument, got True"),
        ({"cu_seq_lens_q": torch.ones(3)}, r"cu_seq_lens_q: .* got a \(3,\)"),
        ({"attention_mask": torch.ones(8, 1, 15, 15)}, r"attention_mask: expected \(B, S\) = \(8, 15\)"),
        ({"attention_mask": {"full_attention": None}}, "attention_mask: expected"),
        ({"position_ids": torch.ones(8, 14, dtype=torch.long)}, "position_ids: expected"),
        ({"position_ids": torch.ones(8, 15)}, "position_ids: expected .* integers"),
        ({"inputs_embeds": torch.ones(8, 15, 32)}, "input_ids: expected either input_ids or inputs_embeds"),
        ({"input_ids": [[1, 2]]}, "input_ids: expected a tensor, got list"),
        ({"position_ids": [[0, 1]]}, "position_ids: expected"),
        ({"input_ids": torch.ones(8, 15)}, r"input_ids: expected \(B, S\) integers"),
        ({"input_ids": torch.ones(8, dtype=torch.long)}, r"input_ids: expected \(B, S\) integers"),
        ({"typo": 1}, "typo: a patched model takes no such argument"),
    ],
)
def test_what_sharing_cannot_answer_is_named(arguments, message):
    model, _ = pair()
    patched(model)
    with pytest.raises(ValueError, match=message):
        model(**{"input_ids": BATCH["input_ids"]} | arguments)


def test_tokens_of_a_call_that_is_not_shared_are_those_of_the_mask():
    model, _ = pair()
    patcher = patched(model)
    model(BATCH["input_ids"], BATCH["attention_mask"], use_cache=True)
    assert patcher.stats["tokens_total"] == patcher.stats["tokens_packed"] == 79


def test_attentions_asked_for_in_the_config():
    model, _ = pair()
    patched(model)
    model.config._output_attentions = True
    with pytest.raises(ValueError, match="output_attentions"):
        model(BATCH["input_ids"])


# The life of a patch.


def is_plain(model, plain):
    assert vars(model).keys() == vars(plain).keys()
    assert model.config.to_dict() == plain.config.to_dict()
    assert model.config._attn_implementation == plain.config._attn_implementation
    assert torch.equal(model(BATCH["input_ids"]).logits, plain(BATCH["input_ids"]).logits)
    return True


def test_unpatch_leaves_nothing():
    model, plain = pair()
    patcher = patched(model)
    call(model)
    patcher.unpatch()
    assert is_plain(model, plain)
    patcher.unpatch()
    with pytest.raises(ValueError, match=r"call patch\(\) first"):
        patcher.stats  # noqa: B018


def test_a_second_patch_replaces_the_first():
    model, plain = pair()
    first = patched(model, temperature=0.5)
    second = patched(model, "eager", temperature=2.0)
    assert_rows([x / 2 for x in row_logits(plain)], call(model))
    first.unpatch()
    assert_rows([x / 2 for x in row_logits(plain)], call(model))
    second.patch(temperature=4.0)
    assert_rows([x / 4 for x in row_logits(plain)], call(model))
    second.unpatch()
    assert is_plain(model, plain)


def test_nested_blocks_leave_what_they_found():
    model, plain = pair()
    expected = row_logits(plain)
    outer = patched(model, temperature=0.5)
    with Qwen3ModelPatcher(model, rollout_n=4, temperature=2.0):
        with Qwen3ModelPatcher(model, temperature=4.0):
            assert_rows([x / 4 for x in expected], call(model))
        assert_rows([x / 2 for x in expected], call(model))
    assert_rows([x / 0.5 for x in expected], call(model))
    outer.unpatch()
    assert is_plain(model, plain)


def test_the_actors_seam_and_a_patch_replace_each_other():
    model, plain = pair()
    install(model)
    patcher = patched(model)
    assert_rows(row_logits(plain), call(model))
    install(model)
    patcher.unpatch()
    uninstall(model)
    assert is_plain(model, plain)
    install(model)
    seam = model.forward
    patched(model)
    patcher = patched(model, temperature=2.0)
    with Qwen3ModelPatcher(model):
        assert_rows(row_logits(plain), call(model))
    patcher.unpatch()
    assert model.forward is seam, "the actor goes on with its model"
    uninstall(model)
    assert is_plain(model, plain)


def test_exceptions_leave_the_patch_whole():
    model, plain = pair()
    patcher = patched(model)
    handle = model.model.layers[1].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("stop")))
    for arguments in ({}, {"use_cache": True}):
        with pytest.raises(RuntimeError, match="stop"):
            model(BATCH["input_ids"], **arguments)
    with pytest.raises(RuntimeError, match="stop"):
        model.generate(BATCH["input_ids"][:1], max_new_tokens=2)
    handle.remove()
    assert_rows(row_logits(plain, ROWS[:5]), call(model, ROWS[:5]))
    patcher.unpatch()
    with pytest.raises(RuntimeError, match="in the block"), Qwen3ModelPatcher(model):
        raise RuntimeError("in the block")
    assert is_plain(model, plain)


def test_a_patch_that_fails_changes_nothing():
    model, plain = pair()
    with pytest.raises(ValueError, match="attn_implementation"):
        patched(model, "flash_attention_2")
    assert is_plain(model, plain)
    patched(model, temperature=0.5)
    with pytest.raises(ValueError, match="attn_implementation"):
        patched(model, "flashy")
    assert_rows([x / 0.5 for x in row_logits(plain)], call(model))


def test_another_forward_on_the_model_is_not_lost():
    model, _ = pair()
    model.forward = lambda *args, **kwargs: None
    with pytest.raises(ValueError, match=r"model\.forward: expected the one of Qwen3ForCausalLM"):
        patched(model)
    assert model(1) is None


def test_a_wrap_around_the_patch_is_not_lost():
    model, plain = pair()
    patcher = patched(model)
    inner = model.forward
    model.forward = lambda *args, **kwargs: inner(*args, **kwargs)
    with pytest.raises(ValueError, match=r"model\.forward: expected the patch, got .* around it"):
        patcher.unpatch()
    model.forward = inner
    patcher.unpatch()
    assert is_plain(model, plain)


def test_blocks_that_end_in_any_order():
    model, plain = pair()
    once = patched(model, temperature=0.5)
    patcher, other = Qwen3ModelPatcher(model, temperature=2.0), Qwen3ModelPatcher(model)
    with patcher, patcher:
        assert_rows([x / 2 for x in row_logits(plain)], call(model))
    assert_rows([x / 0.5 for x in row_logits(plain)], call(model))
    patcher.__enter__()
    other.__enter__()
    patcher.__exit__(None, None, None)
    assert_rows(row_logits(plain), call(model))
    other.__exit__(None, None, None)
    assert_rows([x / 0.5 for x in row_logits(plain)], call(model))
    with other:
        once.unpatch()
    assert is_plain(model, plain)


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_is_unpatched_by_a_patcher_of_its_own(clone):
    model, plain = pair()
    patcher = patched(model, temperature=0.5)
    twin = clone(model)
    Qwen3ModelOncePatcher(twin).unpatch()
    assert is_plain(twin, plain)
    assert_rows([x / 0.5 for x in row_logits(plain)], call(model))
    patcher.unpatch()
    assert is_plain(model, plain)


def test_a_forward_bound_to_its_model():
    """accelerate leaves it so when it unwraps a model."""
    model, plain = pair()
    patcher = patched(model, temperature=0.5)
    model.forward = types.MethodType(model.forward, model)
    assert_rows([x / 0.5 for x in row_logits(plain)], call(model))
    patcher.unpatch()
    assert is_plain(model, plain)
    model.forward = types.MethodType(type(model).forward, model)
    patched(model)
    assert_rows(row_logits(plain), call(model))


def test_noise_on_embeddings_is_refused():
    model, plain = pair()
    patched(model)
    model.get_input_embeddings().neftune_noise_alpha = 5.0
    assert_rows(row_logits(plain), call(model.eval()))
    with pytest.raises(ValueError, match="neftune_noise_alpha"):
        call(model.train())


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_are_independent(how):
    model, plain = pair()
    patched(model, temperature=0.5)
    twin = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert_rows([x / 0.5 for x in row_logits(plain)], call(twin))
    assert torch.equal(
        twin.generate(ROWS[0][0][None], max_new_tokens=4, do_sample=False),
        plain.generate(ROWS[0][0][None], max_new_tokens=4, do_sample=False),
    )


def test_pickle_into_a_fresh_process(tmp_path):
    model, plain = pair()
    patched(model)
    torch.save(model, tmp_path / "model.pt")
    torch.save(BATCH, tmp_path / "batch.pt")
    code = (
        "import sys, torch\n"
        "model, batch = (torch.load(p, weights_only=False) for p in sys.argv[1:3])\n"
        "torch.save(model(batch['input_ids'], batch['attention_mask']).logits.detach(), sys.argv[3])\n"
    )
    paths = [str(tmp_path / name) for name in ("model.pt", "batch.pt", "logits.pt")]
    subprocess.run([sys.executable, "-c", code, *paths], check=True, timeout=120)
    assert_rows(row_logits(plain), rows_of(torch.load(paths[2])))


def test_saved_as_if_never_patched(tmp_path):
    model, plain = pair(dtype=torch.float32)
    keys = model.state_dict().keys()
    patched(model)
    assert model.state_dict().keys() == keys
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config._attn_implementation == "sdpa"
    assert torch.equal(loaded(BATCH["input_ids"]).logits, plain(BATCH["input_ids"]).logits)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_with_two_forwards_in_flight(reentrant):
    model, plain = pair()
    patched(model)
    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    other = ROWS[2:7]
    losses = [loss_of(call(model, rows)) for rows in (ROWS, other)]
    for loss in losses:
        loss.backward()
    for rows in (ROWS, other):
        loss_of(row_logits(plain, rows)).backward()
    assert worst_gradient(gradients(plain), gradients(model)) <= FLOAT64


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("output", ["logits", "hidden_states"])
def test_checkpointing_with_the_backward_after_the_block(reentrant, output):
    """Layers run again when the model is plain once more."""
    model, plain = pair()
    for m in (model, plain):
        m.train()
        m.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        m.enable_input_require_grads()
    arguments = {"attention_mask": BATCH["attention_mask"], "output_hidden_states": True, "use_cache": False}
    with Qwen3ModelPatcher(model):
        got = model(BATCH["input_ids"], **arguments)
    expected = plain(BATCH["input_ids"], **arguments)
    for m, out in ((model, got), (plain, expected)):
        values = out.logits if output == "logits" else out.hidden_states[-1]
        loss_of(rows_of(values)).backward()
        assert m.lm_head.weight.grad is None or output == "logits"
    assert worst_gradient(gradients(plain), gradients(model)) <= FLOAT64
    assert torch.equal(model(BATCH["input_ids"]).logits, plain(BATCH["input_ids"]).logits)
    assert all(m.__dict__.get("config", model.config) is model.config for m in model.modules())


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(
    "wrap", [lambda f, m: types.MethodType(f, m), lambda f, m: lambda *args, **kwargs: f(*args, **kwargs)]
)
def test_checkpointing_step_after_step_under_a_wrap(reentrant, wrap):
    model, plain = pair()
    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    patched(model)
    model.forward = wrap(model.forward, model)
    for _ in range(3):
        loss_of(call(model)).backward()
        loss_of(row_logits(plain)).backward()
    assert worst_gradient(gradients(plain), gradients(model)) <= 3 * FLOAT64


def test_an_error_in_such_a_backward_is_no_lasting_harm():
    model, plain = pair()
    model.train()
    model.gradient_checkpointing_enable()
    with Qwen3ModelPatcher(model):
        loss = model(BATCH["input_ids"], BATCH["attention_mask"]).logits.sum()

    def stop(*_):
        raise RuntimeError("stop")

    handle = model.model.layers[0].mlp.register_forward_pre_hook(stop)
    with pytest.raises(RuntimeError, match="stop"):
        loss.backward()
    handle.remove()
    with Qwen3ModelPatcher(model):
        assert_rows(row_logits(plain), call(model))
    model.eval()
    assert torch.equal(model(BATCH["input_ids"]).logits, plain(BATCH["input_ids"]).logits)


@pytest.mark.parametrize("when", ["before", "after", "gone"])
def test_a_generate_of_the_users_own_stays(when):
    model, _ = pair()
    own = lambda *args: "own"  # noqa: E731
    if when == "before":
        model.generate = own
    patcher = patched(model)
    if when == "after":
        model.generate = own
    if when == "gone":
        del model.generate
    else:
        assert model.generate() == "own"
    patcher.unpatch()
    assert vars(model).get("generate") is (None if when == "gone" else own)


def test_train_and_eval():
    model, plain = pair(attention_dropout=0.2)
    plain.eval()
    patched(model)
    model.eval()
    assert_rows(row_logits(plain), call(model))
    with pytest.raises(ValueError, match="attention_dropout"):
        call(model.train())


def test_lora():
    from peft import LoraConfig, get_peft_model

    model, _ = pair()
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    plain = copy.deepcopy(model)
    patcher = patched(model)
    got, expected = call(model), row_logits(plain)
    assert patcher.stats["token_ratio"] > 1.5
    assert_rows(expected, got)
    loss_of(got).backward()
    loss_of(expected).backward()
    assert worst_gradient(gradients(plain), gradients(model)) <= FLOAT64
    with model.disable_adapter(), plain.disable_adapter():
        assert_rows(row_logits(plain), call(model))
    ids = ROWS[0][0][None]
    generated = [m.generate(input_ids=ids, max_new_tokens=4, do_sample=False) for m in (model, plain)]
    assert torch.equal(*generated)
    patcher.unpatch()
    assert torch.equal(model(ids).logits, plain(ids).logits)


def test_tied_embeddings():
    model, plain = pair(tie_word_embeddings=True)
    patched(model)
    loss_of(call(model)).backward()
    loss_of(row_logits(plain)).backward()
    assert worst_gradient(gradients(plain), gradients(model)) <= FLOAT64


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda model: model.model, r"model: expected a \.\.\.ForCausalLM"),
        (lambda model: model.lm_head, "model: expected a transformers PreTrainedModel, got Linear"),
        (lambda model: None, "model: expected a transformers PreTrainedModel, got NoneType"),
    ],
)
def test_what_cannot_be_patched_is_named(make, message):
    model, plain = pair()
    with pytest.raises(ValueError, match=message):
        patched(make(model))
    assert is_plain(model, plain)


@pytest.mark.parametrize("response_len", [0, -1, 2.0, True])
def test_bad_response_lengths_are_named(response_len):
    with pytest.raises(ValueError, match="response_len: expected None or an int"):
        patched(pair()[0], response_len=response_len)


@pytest.mark.parametrize("rollout_n", [0, 2.0, "x"])
def test_bad_rollout_counts_are_named(rollout_n):
    with pytest.raises(ValueError, match="rollout_n: expected None or an int"):
        patched(pair()[0], rollout_n=rollout_n)


def test_a_value_model_is_no_language_model():
    config = Qwen3Config(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_labels=1)
    with pytest.raises(ValueError, match="ForCausalLM with a backbone and lm_head, got Qwen3ForTokenClassification"):
        Qwen3ModelOncePatcher(Qwen3ForTokenClassification(config)).patch(response_len=2)
