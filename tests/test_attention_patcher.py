"""One patched attention layer against the plain layer on one unpadded row at a time."""

import copy
import pickle

import pytest
import torch
from tiny import batch_b0, gradients, padded_batch, shuffled, tiny_model, worst_gradient
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from zorro_verl import Qwen3ModelOncePatcher, QwenAttentionPatcher, ZoRRoTrain
from zorro_verl.models import install, uninstall

FLOAT64 = 5e-6
FLOAT32 = 2e-5
ROWS = shuffled(batch_b0(), 1)
BATCH = padded_batch(ROWS)
MASK = BATCH["attention_mask"].bool()
WIDTH = BATCH["responses"].shape[1]
GROUPS = ZoRRoTrain.find_prompt_groups(BATCH["input_ids"], WIDTH, BATCH["attention_mask"])[0]


class Case:
    """Hidden states and position embeddings of `ROWS`, as the model's first layer would get them, and its attention."""

    def __init__(self, model_type="qwen3", dtype=torch.float64, attention="sdpa", layer=0, **config):
        self.model = tiny_model(model_type, dtype, **config)
        self.model.set_attn_implementation(attention)
        self.layer = self.model.model.layers[layer].self_attn
        self.plain = copy.deepcopy(self.layer)
        self.embedding = torch.nn.Parameter(
            torch.randn(61, 32, dtype=dtype, generator=torch.Generator().manual_seed(5))
        )

    def inputs(self, ids=BATCH["input_ids"], position_ids=BATCH["position_ids"]):
        hidden = self.embedding[ids]
        return hidden, self.model.model.rotary_emb(hidden, position_ids)

    def row_outputs(self, rows=ROWS):
        """The oracle."""
        outputs = []
        for row in rows:
            ids = torch.cat(row)[None]
            outputs.append(self.plain(*self.inputs(ids, torch.arange(ids.shape[1])[None]), None)[0][0])
        return outputs


def per_row(values, mask=MASK):
    return [row[keep] for row, keep in zip(values, mask, strict=True)]


def assert_rows(expected, got, tolerance=FLOAT64):
    for row, (a, b) in enumerate(zip(expected, got, strict=True)):
        torch.testing.assert_close(b, a, atol=tolerance, rtol=0, msg=lambda m, row=row: f"row {row}: {m}")


def loss_of(values):
    g = torch.Generator().manual_seed(0)
    return sum((x * torch.randn(x.shape, generator=g, dtype=x.dtype)).sum() for x in values)


def patched(layer, attn_implementation="auto", use_split_attention=True, **settings):
    patcher = QwenAttentionPatcher(layer, use_split_attention, attn_implementation)
    patcher.patch(**settings)
    return patcher


@pytest.mark.parametrize("settings", [{}, {"response_len": WIDTH}, {"response_len": WIDTH, "prompt_groups": GROUPS}])
@pytest.mark.parametrize(
    ("model_type", "attention", "split"),
    [("qwen3", "sdpa", True), ("qwen3", "eager", True), ("qwen3", "sdpa", False), ("qwen2", "sdpa", True)]
    + [("llama", "eager", False), ("mistral", "sdpa", True)],
)
def test_outputs_and_gradients_equal_rows(model_type, attention, split, settings):
    case = Case(model_type)
    patcher = patched(case.layer, attention, split, **settings)
    output, weights = case.layer(*case.inputs(), BATCH["attention_mask"])
    assert weights is None
    assert not output[~MASK].any()
    got, expected = per_row(output), case.row_outputs()
    assert_rows(expected, got)
    assert patcher.stats["tokens_total"] == 79
    assert patcher.stats["tokens_packed"] == (48 if settings else 51)
    loss_of(got).backward()
    got_embedding, case.embedding.grad = case.embedding.grad, None
    loss_of(expected).backward()
    assert worst_gradient(gradients(case.plain), gradients(case.layer)) <= FLOAT64
    assert (got_embedding - case.embedding.grad).abs().max() <= FLOAT64 * case.embedding.grad.abs().max()


def test_projections_run_on_the_packed_row():
    case, lengths = Case(), []
    patched(case.layer, response_len=WIDTH)
    case.layer.k_proj.register_forward_pre_hook(lambda module, args: lengths.append(args[0].shape[1]))
    case.layer(*case.inputs(), BATCH["attention_mask"])
    assert lengths == [48]


def causal(mask, dtype=torch.bool):
    """``(B, 1, S, S)`` as models hand it to their layers."""
    seen = mask[:, None, None, :] & mask[:, None, :, None] & torch.ones(mask.shape[1], mask.shape[1]).tril().bool()
    return (
        seen if dtype == torch.bool else torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)
    )


@pytest.mark.parametrize("mask", [MASK, MASK.int(), causal(MASK), causal(MASK, torch.float64)])
def test_masks_as_models_make_them(mask):
    case = Case()
    patched(case.layer)
    assert_rows(case.row_outputs(), per_row(case.layer(*case.inputs(), mask)[0]))


def test_no_mask():
    case = Case()
    rows = [(p, torch.cat([r, torch.full((15 - len(p) - len(r),), 9)])) for p, r in ROWS]
    ids = torch.stack([torch.cat(row) for row in rows])
    patched(case.layer)
    got = case.layer(*case.inputs(ids, torch.arange(15)[None]))[0]
    assert_rows(case.row_outputs(rows), got)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("layers", [[0], [1], [0, 1]])
def test_inside_a_plain_model(layers, attention):
    case = Case(dtype=torch.float32, attention=attention)
    plain = copy.deepcopy(case.model)
    patchers = [patched(case.model.model.layers[i].self_attn) for i in layers]
    arguments = {"attention_mask": BATCH["attention_mask"], "position_ids": BATCH["position_ids"], "use_cache": False}
    got, expected = (m(BATCH["input_ids"], **arguments).logits[MASK] for m in (case.model, plain))
    torch.testing.assert_close(got, expected, atol=FLOAT32, rtol=0)
    assert all(p.stats["token_ratio"] > 1 for p in patchers)
    for logits in (got, expected):
        loss_of(logits[None].log_softmax(-1)).backward()
    assert worst_gradient(gradients(plain), gradients(case.model)) <= FLOAT32


@pytest.mark.parametrize("reentrant", [False, True])
def test_under_checkpointing_with_two_forwards_in_flight(reentrant):
    case = Case(dtype=torch.float32)
    model, plain = case.model.train(), copy.deepcopy(case.model).train()
    for layer in model.model.layers:
        patched(layer.self_attn)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    batches = [padded_batch(rows) for rows in (ROWS, ROWS[2:7])]
    for m in (model, plain):
        losses = []
        for batch in batches:
            arguments = {name: batch[name] for name in ("input_ids", "attention_mask", "position_ids")}
            logits = m(**arguments, use_cache=False).logits[batch["attention_mask"].bool()]
            losses.append(loss_of(logits[None].log_softmax(-1)))
        for loss in losses:
            loss.backward()
    assert worst_gradient(gradients(plain), gradients(model)) <= FLOAT32


def test_a_cache_gets_every_row():
    """Keys and values of a cache stand in the batch's own shape, so such a call is the plain layer's."""
    case = Case()
    plain = copy.deepcopy(case.model)
    patcher = patched(case.layer)
    ids = torch.tensor([3, 1, 4, 1, 5, 9]).expand(4, 6)
    got, expected = case.model(ids), plain(ids)
    assert torch.equal(got.logits, expected.logits)
    assert patcher.stats["token_ratio"] == 1
    assert patcher.stats["fallback"]["use_cache"] == 4
    assert torch.equal(
        case.model.generate(ids, max_new_tokens=4, do_sample=False),
        plain.generate(ids, max_new_tokens=4, do_sample=False),
    )


@pytest.mark.parametrize("first", ["layer", "model"])
def test_inside_a_patched_model(first):
    """And out again, in either order."""
    case = Case()
    plain = copy.deepcopy(case.model)
    layer_patcher = patched(case.layer)
    for put in (Qwen3ModelOncePatcher(case.model).patch, lambda: install(case.model)):
        put()
        got = case.model(BATCH["input_ids"], BATCH["attention_mask"], BATCH["position_ids"], use_cache=False).logits
        expected = plain(BATCH["input_ids"], BATCH["attention_mask"], BATCH["position_ids"], use_cache=False).logits
        torch.testing.assert_close(got[MASK], expected[MASK], atol=FLOAT64, rtol=0)
    if first == "layer":
        layer_patcher.unpatch()
    uninstall(case.model)
    layer_patcher.unpatch()
    assert case.layer.config is case.model.config
    hidden, positions = case.inputs()
    assert torch.equal(case.layer(hidden, positions, None)[0], case.plain(hidden, positions, None)[0])


def test_unpatch_leaves_nothing():
    case = Case()
    first, second = patched(case.layer), patched(case.layer, "eager")
    first.unpatch()
    assert "forward" in vars(case.layer)
    second.patch(response_len=3)
    case.layer(*case.inputs(), BATCH["attention_mask"])
    second.unpatch()
    second.unpatch()
    assert vars(case.layer).keys() == vars(case.plain).keys()
    assert case.layer.config is case.model.config
    assert case.model.config._attn_implementation == "sdpa"
    hidden, positions = case.inputs()
    assert torch.equal(case.layer(hidden, positions, None)[0], case.plain(hidden, positions, None)[0])
    with pytest.raises(ValueError, match=r"call patch\(\) first"):
        second.stats  # noqa: B018


def test_a_wrap_around_the_patch_is_not_lost():
    case = Case()
    patcher = patched(case.layer)
    inner = case.layer.forward
    case.layer.forward = lambda *args, **kwargs: inner(*args, **kwargs)
    with pytest.raises(ValueError, match=r"attention_layer\.forward: expected the patch, got .* around it"):
        patcher.unpatch()
    case.layer.forward = inner
    patcher.unpatch()
    assert "forward" not in vars(case.layer)


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_are_independent(clone):
    case = Case()
    patched(case.layer)
    twin = clone(case.model)
    expected = case.row_outputs()
    with torch.no_grad():
        for parameter in case.layer.parameters():
            parameter.zero_()
    assert_rows(expected, per_row(twin.model.layers[0].self_attn(*case.inputs(), BATCH["attention_mask"])[0]))


def test_positions_are_part_of_a_prompt():
    """Equal hidden states at other positions are another prompt."""
    case = Case()
    patched(case.layer)
    ids = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6]).expand(4, 8)
    positions = torch.arange(8).repeat(4, 1)
    positions[1, 4:] += 5
    got = case.layer(*case.inputs(ids, positions))[0]
    expected = [case.plain(*case.inputs(ids[i : i + 1], positions[i : i + 1]), None)[0][0] for i in range(4)]
    assert_rows(expected, got)


def swapped(groups):
    (a, *others), (b, *more), *rest = groups
    return [[b, *others], [a, *more], *rest]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prompt_groups": GROUPS}, "response_len: expected a width beside prompt_groups"),
        ({"response_len": 0}, "response_len: expected None or an int"),
        ({"response_len": 15, "prompt_groups": GROUPS}, "response_len: expected a width below 15"),
        ({"response_len": WIDTH, "prompt_groups": GROUPS[1:]}, "prompt_groups: expected each row of 0.."),
        ({"response_len": WIDTH, "prompt_groups": [*GROUPS, [0]]}, "prompt_groups: expected each row of 0.."),
        ({"response_len": WIDTH, "prompt_groups": swapped(GROUPS)}, "prompt_groups: expected equal prompts"),
        ({"response_len": 3, "prompt_groups": GROUPS}, "prompt_groups: expected equal prompts"),
    ],
)
def test_bad_groups_are_named(settings, message):
    case = Case()

    def run():
        patched(case.layer, **settings)
        case.layer(*case.inputs(), BATCH["attention_mask"])

    with pytest.raises(ValueError, match=message):
        run()


@pytest.mark.parametrize(
    "groups", [5, [0, 1], [["0", 1]], [[0.0, 1.0]], [[False, True]], [[0, 1], []], b"ab", iter([[0, 1, 2]])]
)
def test_groups_of_another_kind_are_named(groups):
    case = Case()

    def run():
        patched(case.layer, response_len=WIDTH, prompt_groups=groups)
        case.layer(*case.inputs(), BATCH["attention_mask"])

    with pytest.raises(ValueError, match="prompt_groups: expected"):
        run()


def test_groups_of_another_batch_are_named():
    case = Case()
    patched(case.layer, response_len=WIDTH, prompt_groups=[[0, 1], [2]])
    with pytest.raises(ValueError, match="prompt_groups: expected each of the batch's 8 rows, got 3"):
        case.layer(*case.inputs(), BATCH["attention_mask"])


def test_groups_as_tuples():
    case = Case()
    patched(case.layer, response_len=WIDTH, prompt_groups=tuple(map(tuple, GROUPS)))
    assert_rows(case.row_outputs(), per_row(case.layer(*case.inputs(), BATCH["attention_mask"])[0]))


def test_prompts_that_are_nearly_equal_are_not_taken_for_it():
    case = Case()
    patched(case.layer, response_len=WIDTH, prompt_groups=GROUPS)
    hidden, positions = case.inputs()
    noise = (
        torch.rand(hidden.shape, dtype=hidden.dtype, generator=torch.Generator().manual_seed(0)) * hidden.abs().max()
    )
    case.layer(hidden + 1e-8 * noise, positions, BATCH["attention_mask"])
    with pytest.raises(ValueError, match="prompt_groups: expected equal prompts"):
        case.layer(hidden + 1e-3 * noise, positions, BATCH["attention_mask"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h, p, m: (h[0], p, m), r"hidden_states: expected \(B, S, E\), got \(15, 32\)"),
        (lambda h, p, m: (h, (p[0][:3], p[1][:3]), m), "position_embeddings: expected"),
        (lambda h, p, m: (h, p, [1]), "attention_mask: expected None or a tensor, got list"),
    ],
)
def test_bad_inputs_of_a_layer_are_named(change, message):
    case = Case()
    patched(case.layer)
    with pytest.raises(ValueError, match=message):
        case.layer(*change(*case.inputs(), BATCH["attention_mask"]))


def test_groups_that_differ_only_in_tokens_are_named():
    """Prompts of one length that are not the same."""
    case = Case()
    patched(case.layer, response_len=3, prompt_groups=[[0, 1, 2]])
    ids = torch.tensor([[1, 2, 3, 4, 5, 6], [1, 2, 3, 7, 8, 9], [1, 4, 3, 1, 1, 1]])
    with pytest.raises(ValueError, match="prompt_groups: .* got row 2 unlike row 0"):
        case.layer(*case.inputs(ids, torch.arange(6)[None]))


def test_rows_without_a_prompt_share_nothing():
    case = Case()
    mask = MASK.clone()
    mask[:3, : 15 - WIDTH] = False
    rows = [(ids[keep], ids[:0]) for ids, keep in zip(BATCH["input_ids"], mask, strict=True)]
    groups = [[0, 1, 2], [3], [4], [5], [6], [7]]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    for settings in ({}, {"response_len": WIDTH}, {"response_len": WIDTH, "prompt_groups": groups}):
        patched(case.layer, **settings)
        got = per_row(case.layer(*case.inputs(position_ids=positions), mask)[0], mask)
        for expected, value in zip(
            case.row_outputs([r for r in rows if len(r[0])]), [x for x in got if len(x)], strict=True
        ):
            torch.testing.assert_close(value, expected, atol=FLOAT64, rtol=0)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(8, 14), r"attention_mask: expected None, \(B, S\)"),
        (torch.ones(8, 1, 15, 16), "attention_mask: expected None"),
        (torch.ones(8, 2, 15, 15), "attention_mask: expected None"),
        (torch.ones(8, 1, 15, 15).bool(), "attention_mask: expected a causal one"),
        (torch.ones(8, 1, 15, 15).tril().triu(-3).bool(), "attention_mask: expected a causal one"),
    ],
)
def test_masks_that_sharing_cannot_follow_are_named(mask, message):
    case = Case()
    patched(case.layer)
    with pytest.raises(ValueError, match=message):
        case.layer(*case.inputs(), mask)


def test_what_is_no_attention_layer_is_named():
    case = Case()
    with pytest.raises(ValueError, match="attention_layer: expected an attention layer .* got Qwen3MLP"):
        QwenAttentionPatcher(case.model.model.layers[0].mlp)
    with pytest.raises(ValueError, match="cuda"):
        QwenAttentionPatcher(case.layer, attn_implementation="flash_attention_2")
    case.layer.forward = lambda *args: None
    with pytest.raises(ValueError, match=r"attention_layer\.forward: expected the class's own"):
        patched(case.layer)


def test_dropout_is_refused():
    case = Case("mistral")
    patched(case.layer)
    case.layer.train()
    case.model.config.attention_dropout = 0.5
    with pytest.raises(ValueError, match="attention_dropout"):
        case.layer(*case.inputs(), BATCH["attention_mask"])


# Layers with a sliding window. The longest of `ROWS` has 15 tokens, the longest prompt 7.


def qwen_window(window):
    """The second layer has the window, the first has none."""
    return {"model_type": "qwen3", "use_sliding_window": True, "sliding_window": window, "max_window_layers": 1}


def mistral_window(window):
    """Both layers have it, and know it from their config."""
    return {"model_type": "mistral", "sliding_window": window}


def model_rows(model):
    """The oracle: logits of the plain model, one unpadded row at a time."""
    return [model(torch.cat(row)[None], use_cache=False).logits[0] for row in ROWS]


def model_batch(model):
    arguments = {name: BATCH[name] for name in ("input_ids", "attention_mask", "position_ids")}
    return per_row(model(**arguments, use_cache=False).logits)


@pytest.mark.parametrize("window", [1, 4, 7, 14, 15, 16])
@pytest.mark.parametrize(
    ("config", "layers", "split", "attention"),
    [
        (qwen_window, [0, 1], True, "sdpa"),
        (qwen_window, [0, 1], True, "eager"),
        (qwen_window, [1], True, "eager"),
        (qwen_window, [0], True, "sdpa"),
        (qwen_window, [1], False, "sdpa"),
        (mistral_window, [0, 1], True, "sdpa"),
        (mistral_window, [0, 1], False, "eager"),
    ],
)
def test_windows_inside_a_plain_model(config, layers, split, attention, window):
    """The mask is the one that the model hands to each of its layers."""
    # At padding, a plain eager layer makes NaNs in float64: its mask's lowest value is none that its softmax can hold.
    dtype, tolerance = (torch.float32, FLOAT32) if (attention, layers) == ("eager", [1]) else (torch.float64, FLOAT64)
    case = Case(dtype=dtype, attention=attention, **config(window))
    plain = copy.deepcopy(case.model)
    patchers = [patched(case.model.model.layers[i].self_attn, attention, split) for i in layers]
    got, expected = model_batch(case.model), model_rows(plain)
    assert_rows(expected, got, tolerance)
    assert all(p.stats["token_ratio"] > 1 for p in patchers)
    for logits in (got, expected):
        loss_of([x.log_softmax(-1) for x in logits]).backward()
    assert worst_gradient(gradients(plain), gradients(case.model)) <= tolerance


def test_the_windows_above_bite():
    for config in (qwen_window, mistral_window):
        wide = model_rows(Case(**config(15)).model)
        for window in (1, 4, 7, 14):
            narrow = model_rows(Case(**config(window)).model)
            assert max((a - b).abs().max() for a, b in zip(wide, narrow, strict=True)) > 0.01


@pytest.mark.parametrize("kind", ["none", "flat", "bool", "added"])
@pytest.mark.parametrize("settings", [{}, {"response_len": WIDTH, "prompt_groups": GROUPS}])
@pytest.mark.parametrize("config", [qwen_window, mistral_window])
def test_masks_of_a_layer_with_a_window(config, settings, kind):
    """Of four dimensions or not, the layer does what it does inside its model. (Alone and without a mask, a plain
    layer sees its whole row: no model asks it to, as rows longer than the window come with a mask.)"""
    case = Case(layer=1, **config(4))
    rows, (hidden, positions) = ROWS, case.inputs()
    mask = MASK
    if kind == "none":
        settings = {}
        rows = [(p, torch.cat([r, torch.full((15 - len(p) - len(r),), 9)])) for p, r in ROWS]
        hidden, positions = case.inputs(torch.stack([torch.cat(row) for row in rows]), torch.arange(15)[None])
        mask = torch.ones_like(MASK)
    expected = []
    for row in rows:
        inputs = case.inputs(torch.cat(row)[None], torch.arange(len(row[0]) + len(row[1]))[None])
        own_mask = create_sliding_window_causal_mask(case.model.config, inputs[0], None, past_key_values=None)
        expected.append(case.plain(*inputs, own_mask)[0][0])
    patched(case.layer, **settings)
    handed = {"none": None, "flat": BATCH["attention_mask"]}.get(kind, windowed(MASK, 4))
    if kind == "added":
        handed = torch.zeros(handed.shape, dtype=hidden.dtype).masked_fill(~handed, torch.finfo(hidden.dtype).min)
    got = per_row(case.layer(hidden, positions, handed)[0], mask)
    assert_rows(expected, got)
    got = loss_of(got)
    got.backward()
    loss_of(expected).backward()
    assert worst_gradient(gradients(case.plain), gradients(case.layer)) <= FLOAT64


def windowed(mask, window):
    """``(B, 1, S, S)``: the causal mask of rows without holes, within a window."""
    return causal(mask) & torch.ones(mask.shape[1], mask.shape[1]).triu(1 - window).bool()


def test_masks_are_as_transformers_makes_them():
    config = Case(**mistral_window(4)).model.config
    hidden = torch.zeros(*MASK.shape, 32)
    for expected, make in ((causal(MASK), create_causal_mask), (windowed(MASK, 4), create_sliding_window_causal_mask)):
        made = make(config, hidden, MASK, past_key_values=None)
        assert torch.equal(made & MASK[:, None, :, None], expected)


def with_a_hole():
    """Transformers counts the columns of a padded batch, also those inside a row; a plan does not."""
    mask = MASK.clone()
    longest = mask.sum(1).argmax()
    mask[longest, 8] = False
    return windowed(mask, 4)


@pytest.mark.parametrize(
    ("layer", "mask"),
    [
        pytest.param(1, windowed(MASK, 3), id="narrower"),
        pytest.param(1, windowed(MASK, 5), id="wider"),
        pytest.param(1, causal(MASK), id="none"),
        pytest.param(1, with_a_hole(), id="padding-inside"),
        pytest.param(0, windowed(MASK, 4), id="layer-without-a-window"),
    ],
)
def test_masks_of_another_window_are_named(layer, mask):
    case = Case(layer=layer, **qwen_window(4))
    patched(case.layer)
    message = (
        rf"attention_mask: expected a causal one with padding and the layer's window \({'4' if layer else 'None'}\)"
    )
    with pytest.raises(ValueError, match=message):
        case.layer(*case.inputs(), mask)


def test_a_window_in_the_config_is_read_at_every_call():
    case = Case("mistral", sliding_window=100)
    plain = copy.deepcopy(case.model)
    for layer in case.model.model.layers:
        patched(layer.self_attn)
    for window in (100, 5, None):
        case.model.config.sliding_window = plain.config.sliding_window = window
        assert_rows(model_rows(plain), model_batch(case.model))
