"""Patched models of every kind: with experts, with linear attention, with a vision tower beside the text model."""

import copy
import pickle
import threading
from functools import cache

import pytest
import tiny_models
import torch
from float64 import Float64
from fresh_process import run_python
from test_family import state_of
from test_model_patcher import assert_rows, call, loss_of, row_logits, rows_of
from tiny import batch_b0, gradients, padded_batch, shuffled, tokens, worst_gradient
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from zorro_verl import Qwen3ModelOncePatcher
from zorro_verl.mixers import linear_layers, shared_mixer_of
from zorro_verl.qwen_model_patcher import Qwen3ModelPatcher

EXACT = 1e-11  # in float64 throughout
FLOAT64 = 5e-6
FLOAT32 = 2e-5
HYBRID = ("qwen3_next", "qwen3_5_text", "qwen3_5", "qwen3_5_moe_text", "qwen3_5_moe")
COMPOSITE = ("qwen3_5", "qwen3_5_moe")
ROWS = shuffled(batch_b0(), 1)
BATCH = padded_batch(ROWS)
IDS, MASK = BATCH["input_ids"], BATCH["attention_mask"]
WIDTH = BATCH["responses"].shape[1]
NONE = torch.empty(0, dtype=torch.long)


@cache
def built(name, dtype):
    return tiny_models.build(name, dtype)


def pair(name, dtype=torch.float64):
    """A model to patch and the same, plain."""
    return copy.deepcopy(built(name, dtype)), copy.deepcopy(built(name, dtype))


def patched(model, attn_implementation="auto", use_split_attention=True, **settings):
    patcher = Qwen3ModelOncePatcher(model, use_split_attention, attn_implementation)
    patcher.patch(**settings)
    return patcher


@cache
def oracle(name):
    """Logits and gradients of one unpadded row at a time, in float64 throughout."""
    plain = copy.deepcopy(built(name, torch.float64))
    with torch.enable_grad(), Float64():
        logits = row_logits(plain, ROWS)
        loss_of(logits).backward()
    return [x.detach() for x in logits], gradients(plain)


def check(name, model, **arguments):
    """Every row's logits and every parameter's gradient."""
    expected, expected_gradients = oracle(name)
    model.zero_grad()
    with Float64():
        got = call(model, ROWS, **arguments)
        assert_rows(expected, got, EXACT)
        loss_of(got).backward()
    assert worst_gradient(expected_gradients, gradients(model)) <= EXACT


@pytest.mark.parametrize(
    ("name", "attention", "split", "response_len"),
    [(name, "auto", True, WIDTH if i % 2 else None) for i, name in enumerate(tiny_models.MODELS)]
    + [(name, "eager", False, None) for name in ("mixtral", "qwen3_next", "qwen3_5_moe")],
)
def test_logits_and_gradients_equal_rows(name, attention, split, response_len):
    model, _ = pair(name)
    patcher = patched(model, attention, split, response_len=response_len)
    check(name, model)
    assert patcher.stats["token_ratio"] > 1.5


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5"])
def test_padding_carries_no_meaning(name):
    """On either side, and in a batch of one."""
    model, _ = pair(name)
    patched(model)
    expected, _ = oracle(name)
    right = padded_batch([(torch.cat(row), NONE) for row in ROWS], response_width=3)
    with Float64():
        for batch in (padded_batch(ROWS, prompt_width=20, pad=7), padded_batch(ROWS, response_width=15), right):
            logits = model(batch["input_ids"], batch["attention_mask"]).logits
            assert_rows(expected, rows_of(logits, batch["attention_mask"].bool()), EXACT)
        for i in range(3):
            row, own = slice(i, i + 1), MASK[i : i + 1] > 0
            assert_rows(expected[row], rows_of(model(IDS[row], MASK[row]).logits, own), EXACT)


def test_several_sequences_in_one_row_are_kept_apart():
    """Where a plain hybrid model's linear layers carry on from one into the next."""
    model, plain = pair("qwen3_5_text")
    patcher = patched(model)
    sequences = [torch.cat(row) for row in ROWS]
    ids, positions = torch.cat(sequences)[None], torch.cat([torch.arange(len(x)) for x in sequences])[None]
    with Float64():
        logits, mixed = (m(ids, position_ids=positions, use_cache=False).logits[0] for m in (model, plain))
    assert patcher.stats["token_ratio"] > 1.5
    lengths = [len(x) for x in sequences]
    assert_rows(oracle("qwen3_5_text")[0], logits.split(lengths), EXACT)
    assert (mixed - logits).abs().max() > 1e-3


# The life of a patch on mixers.


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_moe"])
def test_unpatch_leaves_nothing(name):
    model, _ = pair(name)
    before = state_of(model)
    patcher = patched(model, temperature=0.5)
    model(IDS, MASK)
    with Qwen3ModelPatcher(model), Qwen3ModelPatcher(model, temperature=2.0):
        model(IDS, MASK)
    assert all(len(layer._forward_pre_hooks) == 1 for layer, _ in linear_layers(model))
    patched(model).unpatch()
    patcher.unpatch()
    assert state_of(model) == before


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_moe"])
def test_copies_are_independent(name, clone):
    model, plain = pair(name)
    patched(model)
    twin = clone(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    check(name, twin)
    assert not gradients(model)
    Qwen3ModelOncePatcher(twin).unpatch()
    assert {n: v.keys() for n, v in state_of(twin).items()} == {n: v.keys() for n, v in state_of(plain).items()}
    assert not any(shared_mixer_of(layer) or layer._forward_hooks for layer, _ in linear_layers(twin))
    assert torch.equal(twin(IDS).logits, plain(IDS).logits)
    assert all(shared_mixer_of(layer) for layer, _ in linear_layers(model))


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_moe"])
def test_saved_as_if_never_patched(name, tmp_path):
    model, plain = pair(name, torch.float32)
    patched(model)
    model.save_pretrained(tmp_path)
    auto = AutoModelForImageTextToText if name in COMPOSITE else AutoModelForCausalLM
    loaded = auto.from_pretrained(tmp_path)
    assert loaded.config.get_text_config()._attn_implementation == "sdpa"
    assert torch.equal(loaded(IDS).logits, plain(IDS).logits)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_moe"])
def test_checkpointing_with_two_forwards_and_a_backward_after_the_block(name, reentrant):
    model, plain = pair(name)
    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    before = state_of(model)
    batches = (ROWS, ROWS[2:7])
    with Qwen3ModelPatcher(model):
        losses = [loss_of(call(model, rows)) for rows in batches]
    assert not any(shared_mixer_of(layer) for layer, _ in linear_layers(model))
    for loss in losses:
        loss.backward()
    for rows in batches:
        loss_of(row_logits(plain, rows)).backward()
    assert worst_gradient(gradients(plain), gradients(model)) <= FLOAT64
    assert state_of(model) == before


def test_a_backward_that_fails_after_the_block_is_cleaned_up_by_the_next():
    model, plain = pair("qwen3_next", torch.float32)
    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    before = state_of(model)
    with Qwen3ModelPatcher(model):
        losses = [loss_of(call(model, ROWS)) for _ in range(2)]

    def fail(gradient):
        raise RuntimeError("out of memory")

    failing = model.model.embed_tokens.weight.register_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        losses[0].backward()
    failing.remove()
    model.zero_grad()
    losses[1].backward()
    loss_of(row_logits(plain, ROWS)).backward()
    assert worst_gradient(gradients(plain), gradients(model)) <= FLOAT32
    assert state_of(model) == before


@pytest.mark.slow
def test_compiled():
    """The kernels that follow the plan are no business of the compiler's."""
    model, plain = pair("qwen3_next", torch.float32)
    patched(model)
    compiled = torch.compile(model, backend="eager")
    for rows in (ROWS, ROWS[2:7]):
        batch = padded_batch(rows)
        with torch.no_grad():
            logits = compiled(batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False).logits
            assert_rows(row_logits(plain, rows), rows_of(logits, batch["attention_mask"].bool()), FLOAT32)


def test_shared_and_cached_calls_in_two_threads():
    model, _ = pair("qwen3_next", torch.float32)
    patched(model)
    calls = {"shared": {}, "cached": {"use_cache": True}}
    with torch.no_grad():
        expected = {key: model(IDS, **arguments).logits for key, arguments in calls.items()}
    results = {key: [] for key in calls}

    def run(key):
        with torch.no_grad():
            results[key].extend(model(IDS, **calls[key]).logits for _ in range(10))

    threads = [threading.Thread(target=run, args=(key,)) for key in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    for key, values in results.items():
        assert len(values) == 10
        for value in values:
            torch.testing.assert_close(value, expected[key], atol=FLOAT32, rtol=0)


@pytest.mark.parametrize("options", [{"do_sample": False}, {"do_sample": True, "use_cache": False}])
@pytest.mark.parametrize("name", ["mixtral", "qwen3_next", "qwen3_5_moe"])
def test_generate_is_the_plain_models(name, options):
    model, plain = pair(name, torch.float32)
    patched(model, temperature=0.3, response_len=2)
    outputs = []
    for m in (model, plain):
        torch.manual_seed(0)
        outputs.append(m.generate(IDS[:, :7], attention_mask=MASK[:, :7], max_new_tokens=8, **options))
    assert torch.equal(*outputs)
    assert_rows([x / 0.3 for x in row_logits(plain, ROWS)], call(model, ROWS), FLOAT32 * 4)


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_moe"])
def test_a_cache_runs_as_the_plain_model_and_is_counted(name):
    model, plain = pair(name)
    patcher = patched(model)
    ids = torch.tensor([3, 1, 4, 1, 5, 9]).expand(4, 6)
    got, expected = model(ids, use_cache=True), plain(ids, use_cache=True)
    assert torch.equal(got.logits, expected.logits)
    assert patcher.stats["fallback"] == {"use_cache": 4, "inputs_embeds_grad": 0, "multimodal": 0}
    new = torch.tensor([[2], [6], [5], [3]])
    got, expected = (m(new, past_key_values=o.past_key_values) for m, o in ((model, got), (plain, expected)))
    assert torch.equal(got.logits, expected.logits)


# Models with a vision tower.


def images(sides=(4, 8)):
    """Rows of one prompt with an image each, and what goes with them: pixels, grids, token types."""
    g = torch.Generator().manual_seed(0)
    vision = tiny_models.config_of("qwen3_5").vision_config
    patch = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    counts = [side * side // vision.spatial_merge_size**2 for side in sides]
    prompts = [torch.tensor([5, 6, 59, *[57] * n, 60, 7]) for n in counts]
    rows = [(p, tokens(4, g) % 50 + 1) for p in prompts for _ in range(2)]
    batch = padded_batch(rows)
    grid = torch.tensor([[1, side, side] for side in sides]).repeat_interleave(2, 0)
    pixels = torch.randn(int(grid.prod(1).sum()), patch, generator=g, dtype=torch.float64)
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    types = (batch["input_ids"] == 57).int()
    return inputs | {"pixel_values": pixels, "image_grid_thw": grid, "mm_token_type_ids": types}


@pytest.mark.parametrize("name", COMPOSITE)
def test_images_run_as_the_plain_model_and_are_counted(name):
    model, plain = pair(name)
    patcher, inputs = patched(model, temperature=0.5), images()
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    got, expected = (m(**inputs, use_cache=False) for m in (model, plain))
    assert torch.equal(got.logits, expected.logits / 0.5)
    assert patcher.stats["fallback"] == {"use_cache": 0, "inputs_embeds_grad": 0, "multimodal": 4}
    assert patcher.stats["token_ratio"] == 1
    assert patcher.stats["tokens_total"] == int(inputs["attention_mask"].sum())
    patcher.patch()
    got, expected = (m(**inputs, labels=labels, use_cache=False).loss for m in (model, plain))
    torch.testing.assert_close(got, expected, atol=EXACT, rtol=0)
    for loss in (got, expected):
        loss.backward()
    assert worst_gradient(gradients(plain), gradients(model)) == 0
    assert any("visual" in key for key in gradients(model))
    generated = [m.generate(**inputs, max_new_tokens=3, do_sample=False, eos_token_id=None) for m in (model, plain)]
    assert torch.equal(*generated)
    check(name, model)


@pytest.mark.parametrize("key", ["pixel_values", "image_grid_thw", "mm_token_type_ids"])
def test_each_sign_of_an_image_counts(key):
    model, _ = pair("qwen3_5")
    patcher, inputs = patched(model), images()
    media = {"pixel_values", "image_grid_thw", "mm_token_type_ids"}
    call_with = {name: value for name, value in inputs.items() if name not in media or name == key}
    if key == "pixel_values":  # no image can be read without its grid
        call_with["image_grid_thw"] = inputs["image_grid_thw"]
        call_with["mm_token_type_ids"] = torch.zeros_like(inputs["mm_token_type_ids"])
    if key == "image_grid_thw":
        call_with["mm_token_type_ids"] = torch.zeros_like(inputs["mm_token_type_ids"])
    model(**call_with)
    assert patcher.stats["fallback"]["multimodal"] == 4


def test_token_types_of_text_do_no_harm():
    model, _ = pair("qwen3_5")
    patcher = patched(model)
    check("qwen3_5", model, mm_token_type_ids=torch.zeros_like(IDS))
    assert not any(patcher.stats["fallback"].values())


def jumping(axes):
    """Positions as images leave them in mid-prompt, of rows that are equal but for one axis of one row."""
    positions = (MASK.cumsum(1) - 1).clamp(min=0).repeat(axes, 1, 1)
    jumps = torch.tensor([0, 5, 2, 9])[-axes:, None, None]
    return positions + jumps * (positions > 1)


@pytest.mark.parametrize("axes", [3, 4])
@pytest.mark.parametrize("name", ["qwen3_5_text", "qwen3_5", "qwen3_5_moe"])
def test_positions_with_axes_are_gathered(name, axes):
    model, plain = pair(name)
    patcher, positions = patched(model), jumping(axes)
    with Float64():
        got = call(model, ROWS, position_ids=positions)
        expected = [
            plain(IDS[i : i + 1, m], MASK[i : i + 1, m], positions[:, i : i + 1, m], use_cache=False).logits[0]
            for i, m in enumerate(MASK.bool())
        ]
    assert patcher.stats["tokens_packed"] == 51
    assert_rows(expected, got, EXACT)
    loss_of(got).backward()
    loss_of(expected).backward()
    assert worst_gradient(gradients(plain), gradients(model)) <= EXACT
    assert max((a - b).abs().max() for a, b in zip(expected, oracle(name)[0], strict=True)) > 1e-3


@pytest.mark.parametrize("axis", range(4))
@pytest.mark.parametrize("response_len", [None, WIDTH])
def test_prompts_that_differ_in_one_axis_are_not_shared(axis, response_len):
    model, plain = pair("qwen3_5_text")
    patcher, positions = patched(model, response_len=response_len), jumping(4)
    row = next(i for i, (prompt, _) in enumerate(ROWS) if len(prompt) == 7)
    positions[axis, row, 3:] += 1
    with Float64():
        got = call(model, ROWS, position_ids=positions)
        own = MASK[row].bool()
        arguments = (IDS[row : row + 1, own], MASK[row : row + 1, own], positions[:, row : row + 1, own])
        expected = plain(*arguments, use_cache=False).logits[0]
    assert patcher.stats["tokens_packed"] > 51
    assert_rows([expected], [got[row]], EXACT)


def test_sequences_are_told_apart_by_the_texts_positions():
    """The first of four axes. With three the plain model knows of no text position, and looks for none."""
    model, plain = pair("qwen3_5_text")
    patcher = patched(model)
    ids, positions = torch.tensor([[3, 1, 4, 3, 1, 4]]), torch.tensor([[0, 1, 2, 0, 1, 2]])
    apart = [plain(ids[:, :3], use_cache=False).logits] * 2
    for given in (positions, positions.expand(4, 1, 6)):
        got = model(ids, position_ids=given, use_cache=False).logits
        torch.testing.assert_close(got, torch.cat(apart, 1), atol=FLOAT64, rtol=0)
        assert patcher.stats["tokens_total"] == 6
    given = positions.expand(3, 1, 6)
    got, expected = (m(ids, position_ids=given, use_cache=False).logits for m in (model, plain))
    torch.testing.assert_close(got, expected, atol=FLOAT64, rtol=0)
    assert (got - torch.cat(apart, 1)).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("name", "shape", "allowed"),
    [
        ("qwen3_5", (2, 8, 15), r"\(8, 15\) or \(3, B, S\) or \(4, B, S\) integers"),
        ("qwen3_5", (3, 7, 15), r"\(8, 15\) or \(3, B, S\) or \(4, B, S\) integers"),
        ("qwen3_next", (3, 8, 15), r"\(8, 15\) integers"),
    ],
)
def test_positions_of_another_shape_are_named(name, shape, allowed):
    model, _ = pair(name)
    patched(model)
    with pytest.raises(ValueError, match=r"position_ids: expected \(B, S\) = " + allowed):
        model(IDS, MASK, torch.zeros(shape, dtype=torch.long))


@pytest.mark.parametrize("name", COMPOSITE)
def test_what_else_a_call_can_ask_for(name):
    model, plain = pair(name)
    patcher = patched(model)
    labels = IDS.masked_fill(MASK == 0, -100)
    arguments = {"labels": labels, "output_hidden_states": True, "num_items_in_batch": torch.tensor(7)}
    with Float64():
        got, expected = (m(IDS, MASK, use_cache=False, **arguments) for m in (model, plain))
    assert patcher.stats["token_ratio"] > 1.5
    assert got.keys() == expected.keys()
    torch.testing.assert_close(got.loss, expected.loss, atol=EXACT, rtol=0)
    for a, b in zip(got.hidden_states, expected.hidden_states, strict=True):
        torch.testing.assert_close(a[MASK == 1], b[MASK == 1], atol=EXACT, rtol=0)
    for keep in (1, torch.tensor([14, 2, 9, 9])):
        with Float64():
            got, expected = (m(IDS, MASK, use_cache=False, logits_to_keep=keep).logits for m in (model, plain))
        where = MASK[:, -1:] == 1 if isinstance(keep, int) else MASK[:, keep] == 1
        torch.testing.assert_close(got[where], expected[where], atol=EXACT, rtol=0)
    loss, logits, *_ = model(IDS, MASK, labels=labels, return_dict=False)
    assert loss.dim() == 0
    assert logits.shape == (8, 15, tiny_models.VOCAB)
    with pytest.raises(ValueError, match="output_attentions"):
        model(IDS, MASK, output_attentions=True)


def test_settings_of_the_text_config():
    model, _ = pair("qwen3_5")
    patcher = patched(model)
    model.config.text_config.output_hidden_states = True
    assert len(model(IDS, MASK).hidden_states) == 4
    model.config.text_config._output_attentions = True
    with pytest.raises(ValueError, match="output_attentions"):
        model(IDS, MASK)
    assert patcher.stats["token_ratio"] > 1.5


@pytest.mark.parametrize("name", COMPOSITE)
def test_embeddings_instead_of_tokens_also_after_generate(name):
    """`generate` leaves rope_deltas on the model, which shift the positions of whole rows."""
    model, _ = pair(name)
    patcher = patched(model, response_len=WIDTH)
    expected, _ = oracle(name)
    for _ in range(2):
        with Float64(), torch.no_grad():
            embeddings = model.get_input_embeddings()(IDS)
            got = rows_of(model(inputs_embeds=embeddings, attention_mask=MASK).logits, MASK.bool())
        assert patcher.stats["tokens_packed"] == 48
        assert_rows(expected, got, EXACT)
        check(name, model)
        model.generate(IDS[:, :7], attention_mask=MASK[:, :7], max_new_tokens=2)
        assert model.model.rope_deltas is not None


@pytest.mark.slow
def test_under_the_forwards_that_verl_puts_on_the_classes():
    """They know no logits_to_keep and compute all logits: right where all are asked for, and an error where not."""
    run_python(
        """
        import sys
        sys.path[:0] = ["tests", "scripts"]
        import copy, pytest, torch
        from float64 import Float64
        from test_patched_family import IDS, MASK, call, check, oracle, pair, patched
        from verl.models.transformers.monkey_patch import apply_monkey_patch

        name = "qwen3_5_moe"
        oracle(name)  # of the class's own forward
        model, _ = pair(name)
        own = type(model).forward
        apply_monkey_patch(model, use_remove_padding=True)
        assert type(model).forward is not own
        patcher = patched(model)
        for parameter in model.model.visual.parameters():
            parameter.requires_grad = False  # verl runs the tower in every call, for gradients of zero
        check(name, model)
        assert patcher.stats["token_ratio"] > 1.5
        with pytest.raises(ValueError, match="logits_to_keep: expected logits of 3 positions .*, got 43"):
            model(IDS[:3], attention_mask=MASK[:3] | 1, logits_to_keep=1)
        with pytest.raises(ValueError, match="output_router_logits: expected router_logits from forward_with_normal"):
            model(IDS, attention_mask=MASK, output_router_logits=True)
        apply_monkey_patch(model, use_remove_padding=True, use_fused_kernels=True, fused_kernels_backend="torch")
        with pytest.raises(ValueError, match="logits_to_keep: expected logits of 51 positions .*, got no logits"):
            model(IDS, attention_mask=MASK)
        """,
        PYTHONPATH=".",
    )


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_next"])
def test_float32_with_the_default_experts(name):
    model, plain = pair(name, torch.float32)
    patched(model)
    got, expected = call(model, ROWS), row_logits(plain, ROWS)
    log_p = [[x.log_softmax(-1) for x in values] for values in (expected, got)]
    assert_rows(*log_p, FLOAT32)
    loss_of(got).backward()
    loss_of(expected).backward()
    assert worst_gradient(gradients(plain), gradients(model)) <= FLOAT32
