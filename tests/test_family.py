"""Every supported type against its unpatched model on one unpadded row at a time; what is not supported, by name."""

import copy
import pickle
from contextlib import nullcontext
from functools import cache
from threading import Thread

import pytest
import tiny_models
import torch
from float64 import Float64
from fresh_process import run_python
from test_models import assert_rows, loss_of, shared_call
from tiny import batch_b0, flat_rows, gradients, per_row, shuffled, tokens, worst_gradient
from transformers import AutoConfig
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from zorro_verl import families
from zorro_verl.families import HYBRID_TYPES, SUPPORTED_MODEL_TYPES, check_supported, check_training
from zorro_verl.heads import SharedPrompt
from zorro_verl.layer_call import SharedCall
from zorro_verl.linear_attention import LinearPlan
from zorro_verl.mixers import _running, linear_layers, shared_mixer_of
from zorro_verl.models import install, position_axes, seam_of, uninstall
from zorro_verl.packing import build_plan

EXACT = 1e-11  # in float64 throughout
FLOAT32 = 2e-5
NAMES = tuple(tiny_models.MODELS)
TEXT = {name: tiny_models.config_of(name).get_text_config() for name in NAMES}
HYBRID = HYBRID_TYPES
MOE = tuple(name for name in NAMES if hasattr(TEXT[name], "num_experts_per_tok"))
WINDOWED = tuple(
    name
    for name in NAMES
    if getattr(TEXT[name], "sliding_window", None)
    and "sliding_attention" in (getattr(TEXT[name], "layer_types", None) or ["sliding_attention"])
)
ROWS = shuffled(batch_b0(), 0)
KINDS = {"non-reentrant": False, "reentrant": True}


def long_rows(seed=0):
    """Prompts and responses on both sides of the recurrence's chunks of 64 and of the conv's window of 4."""
    g = torch.Generator().manual_seed(seed)
    groups = [(66, (5, 1, 70)), (3, (4, 0, 6, 64)), (130, (2, 63, 65)), (64, (1, 9)), (1, (3, 3, 2)), (65, (7,))]
    prompts = [(tokens(p, g), responses) for p, responses in groups]
    return shuffled([(p, tokens(r, g)) for p, responses in prompts for r in responses], seed)


LONG = long_rows()


def installed(model, **options):
    model = copy.deepcopy(model)
    install(model, **options)
    return model


@cache
def plain_model(name, dtype=torch.float64):
    return tiny_models.build(name, dtype)


@cache
def oracle(name, dtype=torch.float64, long=False):
    """Values and gradients of the unpatched model, computed once; float64 stays float64."""
    model = copy.deepcopy(plain_model(name, dtype))
    with torch.enable_grad(), Float64() if dtype == torch.float64 else nullcontext():
        values = per_row(model, LONG if long else ROWS)
        loss_of(*values).backward()
    return [[x.detach() for x in part] for part in values], gradients(model)


def check(name, model, rows=ROWS, dtype=torch.float64, tolerance=EXACT, **call):
    """Every row's values and every parameter's gradient."""
    with Float64() if dtype == torch.float64 else nullcontext():
        values = shared_call(model, rows, **call)
        loss_of(*values).backward()
    expected, expected_gradients = oracle(name, dtype, rows is LONG)
    assert_rows(expected, values, tolerance)
    assert worst_gradient(expected_gradients, gradients(model)) <= tolerance


def check_against(plain):
    """`check` for a model that no other test has; its own values."""
    model = installed(plain)
    with Float64():
        expected, got = per_row(plain, ROWS), shared_call(model, ROWS)
        for values in (expected, got):
            loss_of(*values).backward()
    assert_rows(expected, got, EXACT)
    assert worst_gradient(gradients(plain), gradients(model)) <= EXACT
    return expected


def test_the_models_are_those_that_are_supported():
    assert set(NAMES) == set(SUPPORTED_MODEL_TYPES)
    for name in NAMES:
        assert plain_model(name).config.model_type == name
    for name in HYBRID:
        assert {"linear_attention", "full_attention"} <= set(TEXT[name].layer_types)
    assert {"mistral", "gemma3_text", "starcoder2"} <= set(WINDOWED)
    assert {"mixtral", "qwen3_next", "qwen3_5_moe"} <= set(MOE)


@pytest.mark.parametrize("name", NAMES)
def test_the_oracle_is_sharp(name):
    """Predictions that all look alike would hide a wrong one; a parameter without a gradient, a wrong gradient."""
    (log_probs, entropies), grads = oracle(name)
    assert torch.cat(log_probs).std() > 0.2
    assert torch.cat(entropies).std() > 0.005
    silent = {n for n, g in grads.items() if not g.abs().max() > 0}
    assert all("visual" in n for n in silent), silent


@pytest.mark.parametrize("mode", ["none", "memory"])
@pytest.mark.parametrize("name", NAMES)
def test_equals_the_plain_model_row_by_row(name, mode):
    check(name, installed(plain_model(name)), logits_optimization=mode)


@pytest.mark.parametrize("split", [True, False], ids=["eager", "eager-unsplit"])
@pytest.mark.parametrize("name", NAMES)
def test_the_dense_reference_does_too(name, split):
    check(name, installed(plain_model(name), attn_implementation="eager", use_split_attention=split))


@pytest.mark.parametrize("name", NAMES)
def test_in_float32_with_the_default_experts(name):
    check(name, installed(plain_model(name, torch.float32)), dtype=torch.float32, tolerance=FLOAT32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_gradient_checkpointing(name, kind):
    model = installed(plain_model(name, torch.float32))
    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": KINDS[kind]})
    check(name, model, dtype=torch.float32, tolerance=FLOAT32)


@pytest.mark.parametrize("name", [*HYBRID, "qwen3_moe", "gemma3_text"])
def test_in_bfloat16_no_worse_than_the_plain_model(name):
    """The error against the same weights in float64, over all tokens."""
    plain = plain_model(name, torch.bfloat16)
    exact = copy.deepcopy(plain).double()
    if name in MOE:
        exact.set_experts_implementation("eager")
    with torch.no_grad():
        with Float64():
            truth = torch.cat(per_row(exact, LONG)[0])
        rms = lambda values: (torch.cat(list(values)).double() - truth).square().mean().sqrt()  # noqa: E731
        assert rms(shared_call(installed(plain), LONG)[0]) <= 1.5 * rms(per_row(plain, LONG)[0])


# Windows.


@pytest.mark.parametrize("name", WINDOWED)
def test_the_windows_bite(name):
    """Without this the rows would be too short to tell a window from none."""
    wide = tiny_models.build(name, sliding_window=64)
    wide.load_state_dict(plain_model(name).state_dict())
    with torch.no_grad():
        far = [(a - b).abs().max() for a, b in zip(per_row(wide, ROWS)[0], oracle(name)[0][0], strict=True) if len(a)]
    assert max(far) > 0.1


@pytest.mark.parametrize("window", [1, 2, 14, 15, 16])
def test_windows_around_the_longest_row(window):
    assert max(len(p) + len(r) for p, r in ROWS) == 15
    plain = tiny_models.build("gemma3_text", sliding_window=window)
    check_against(plain)


SWITCHED_ON = {
    "qwen2": {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]},
    "qwen3": {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]},
    "qwen3_moe": {"use_sliding_window": True},
    "mixtral": {},
    "phi3": {},
    "smollm3": {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]},
}


@pytest.mark.parametrize("name", SWITCHED_ON)
def test_windows_that_are_off_by_default(name):
    off = plain_model(name)
    plain = tiny_models.build(name, sliding_window=4, **SWITCHED_ON[name])
    plain.load_state_dict(off.state_dict())
    expected = check_against(plain)
    far = [(a - b).abs().max() for a, b in zip(expected[0], oracle(name)[0][0], strict=True) if len(a)]
    assert max(far) > 0.1, "the config does make a window"


@pytest.mark.parametrize("name", ["gemma3_text", "qwen2_moe", "olmo3", "ministral"])
def test_a_window_that_changes_after_the_layers_were_built_is_refused(name):
    """The plain model makes its masks from the config in every call, and flash attention takes the layer's window."""
    model = installed(plain_model(name))
    model.config.sliding_window = 3
    with pytest.raises(ValueError, match="sliding_window: expected 6 in the config, as in its layer 0, got 3"):
        shared_call(model, ROWS)


@pytest.mark.parametrize("name", ["mistral", "starcoder2"])
def test_a_window_that_layers_read_from_the_config_may_change(name):
    model, plain = installed(plain_model(name)), copy.deepcopy(plain_model(name))
    for subject in (model, plain):
        subject.config.sliding_window = 3
    with torch.no_grad(), Float64():
        assert_rows(per_row(plain, ROWS), shared_call(model, ROWS), EXACT)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("olmoe", {"sliding_window": 5}),
        ("smollm3", {"use_sliding_window": False, "sliding_window": 5, "layer_types": ["sliding_attention"] * 2}),
    ],
)
def test_a_window_of_which_layer_and_mask_do_not_agree_is_refused(name, config):
    with pytest.raises(ValueError, match="sliding_window: expected .* in the config"):
        shared_call(installed(tiny_models.build(name, **config)), ROWS)


# Linear attention.


@pytest.mark.parametrize("way", ["expand", "fork"])
@pytest.mark.parametrize("name", HYBRID)
def test_both_ways_of_linear_attention(name, way):
    check(name, installed(plain_model(name), linear_attention=way), LONG)


@pytest.mark.parametrize("way", ["expand", "fork"])
def test_both_ways_in_float32(way):
    name = "qwen3_next"
    model = installed(plain_model(name, torch.float32), linear_attention=way)
    check(name, model, LONG, dtype=torch.float32, tolerance=FLOAT32)


@pytest.mark.parametrize("way", ["expand", "fork"])
def test_a_token_moves_only_what_follows_it_in_its_own_row(way):
    """Bit for bit: nothing of a row reaches another one, by the conv's window or by the recurrence's state."""
    model = installed(plain_model("qwen3_5_text"), linear_attention=way)
    with torch.no_grad():
        before = shared_call(model, LONG)
        for row in [i for i, (_, r) in enumerate(LONG) if len(r) > 1][::5]:
            prompt, response = LONG[row]
            for place in {0, len(response) // 2}:
                flipped = response.clone()
                flipped[place] = flipped[place] % (tiny_models.VOCAB - 1) + 1
                after = shared_call(model, [*LONG[:row], (prompt, flipped), *LONG[row + 1 :]])
                for other in range(len(LONG)):
                    same = [torch.equal(a[other], b[other]) for a, b in zip(before, after, strict=True)]
                    assert all(same) == (other != row), (row, place, other)
                assert torch.equal(before[0][row][:place], after[0][row][:place])
                assert not (before[0][row][place:] == after[0][row][place:]).any()


def packed_fields(rows):
    """What a row of several sequences looks like to a stock model: positions that start anew."""
    lens = [len(p) + len(r) for p, r in rows]
    ids = torch.cat([torch.cat(row) for row in rows])
    return ids[None], torch.cat([torch.arange(n) for n in lens])[None], lens


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_text"])
def test_stock_packing_mixes_samples_and_sharing_does_not(name):
    """A packed row runs through the recurrence and the conv of the stock model as if it were one sample."""
    model = installed(plain_model(name))
    rows = [(p, r) for p, r in LONG if len(r)]
    ids, positions, lens = packed_fields(rows)
    with torch.no_grad(), Float64():
        expected = per_row(plain_model(name), rows)
        logits = plain_model(name)(ids, position_ids=positions, use_cache=False).logits[0].split(lens)
        stock = [
            x[len(p) - 1 : -1].log_softmax(-1).gather(-1, r[:, None])[:, 0]
            for x, (p, r) in zip(logits, rows, strict=True)
        ]
        worst = [float((a - b).abs().max()) for a, b in zip(expected[0], stock, strict=True)]
        assert sorted(worst)[len(worst) // 2] > 0.1
        assert_rows(expected, shared_call(model, rows), EXACT)


def like_fla(query, key, value, g, beta, initial_state=None, output_final_state=False, cu_seqlens=None, **options):
    """A recurrence with the interface of flash-linear-attention: sequences in one row, told apart by cu_seqlens."""
    assert query.shape[0] == 1
    assert cu_seqlens.dtype == torch.int64
    outs, states = [], []
    for i, (start, end) in enumerate(zip(cu_seqlens.tolist(), cu_seqlens.tolist()[1:], strict=False)):
        assert end > start, "no empty sequence"
        parts = (x[:, start:end] for x in (query, key, value, g, beta))
        state = None if initial_state is None else initial_state[i : i + 1]
        out, final = torch_chunk_gated_delta_rule(
            *parts, initial_state=state, output_final_state=output_final_state, **options
        )
        outs.append(out)
        states.append(final)
    return torch.cat(outs, 1), torch.cat(states) if output_final_state else None


like_fla.__module__ = "fla.ops.gated_delta_rule.chunk"


def like_causal_conv1d(x, weight, bias=None, activation=None, seq_idx=None):
    """A conv with the interface of the package causal-conv1d."""
    assert activation == "silu"
    assert seq_idx is None
    padded = torch.nn.functional.pad(x, (weight.shape[-1] - 1, 0))
    return torch.nn.functional.silu(torch.nn.functional.conv1d(padded, weight[:, None], bias, groups=x.shape[1]))


@pytest.mark.parametrize("way", ["expand", "fork"])
def test_kernels_that_take_cu_seqlens(way):
    """What a mixer has on a GPU with flash-linear-attention and causal-conv1d, by their interfaces."""
    name = "qwen3_next"
    model = copy.deepcopy(plain_model(name))
    for _, mixer in linear_layers(model):
        mixer.chunk_gated_delta_rule, mixer.causal_conv1d_fn = like_fla, like_causal_conv1d
    install(model, linear_attention=way)
    check(name, model, LONG)


def test_an_unknown_way_is_refused():
    with pytest.raises(ValueError, match="linear_attention: expected one of.*expand.*'both'"):
        installed(plain_model("qwen3_next"), linear_attention="both")


# The seam on a mixer.


def state_of(model):
    """What an installation could leave behind: attributes, hooks and configs of every module."""
    return {
        name: {key: list(value) if key.endswith("_hooks") else value for key, value in vars(module).items()}
        for name, module in model.named_modules()
    }


@pytest.mark.parametrize("name", HYBRID)
def test_uninstall_leaves_nothing(name):
    model = copy.deepcopy(plain_model(name))
    before = state_of(model)
    install(model)
    assert all(shared_mixer_of(layer) for layer, _ in linear_layers(model))
    install(model)  # once more, in place of the first
    assert all(len(layer._forward_pre_hooks) == 1 for layer, _ in linear_layers(model))
    uninstall(model)
    assert state_of(model) == before


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_have_mixers_of_their_own(copied):
    name = "qwen3_next"
    model = installed(plain_model(name))
    twin = copied(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    check(name, twin)
    assert not gradients(model)
    before = state_of(plain_model(name))
    uninstall(twin)
    assert {n: v.keys() for n, v in state_of(twin).items()} == {n: v.keys() for n, v in before.items()}
    assert not any(shared_mixer_of(layer) or layer._forward_hooks for layer, _ in linear_layers(twin))
    assert seam_of(model) is not None


@pytest.mark.parametrize("kind", KINDS)
def test_two_forwards_before_a_backward(kind):
    """The layers that run again have to find the plan of their own call."""
    name = "qwen3_5_text"
    plain = copy.deepcopy(plain_model(name, torch.float32))
    model = installed(plain)
    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": KINDS[kind]})
    batches = (ROWS, LONG[:7])
    for subject, call in ((plain, per_row), (model, shared_call)):
        losses = [loss_of(*call(subject, rows)) for rows in batches]
        for loss in losses:
            loss.backward()
    assert worst_gradient(gradients(plain), gradients(model)) <= FLOAT32


def test_stock_and_shared_calls_in_two_threads():
    name, results = "qwen3_next", {"stock": [], "shared": []}
    model = installed(plain_model(name, torch.float32))
    ids = torch.cat(LONG[0])[None]
    calls = {
        "stock": lambda: model(ids, use_cache=False).logits,
        "shared": lambda: torch.cat(shared_call(model, LONG[:6])[0]),
    }
    with torch.no_grad():
        expected = {key: call() for key, call in calls.items()}

    def run(key):
        with torch.no_grad():
            results[key].extend(calls[key]() for _ in range(8))

    threads = [Thread(target=run, args=(key,)) for key in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    for key, values in results.items():
        assert len(values) == 8
        for value in values:
            torch.testing.assert_close(value, expected[key], atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5"])
def test_stock_calls_are_the_plain_model_bit_for_bit(name):
    model, plain = installed(plain_model(name)), plain_model(name)
    ids = torch.cat(LONG[0])[None]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, plain(ids).logits)
        for module in (model, plain):
            module.generation_config.eos_token_id = None
        generated = [m.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0) for m in (model, plain)]
    assert torch.equal(*generated)


def test_a_layer_that_fails_leaves_no_plan_behind():
    model = installed(plain_model("qwen3_next"))
    _, mixer = linear_layers(model)[0]
    mixer.in_proj_ba.weight.data = mixer.in_proj_ba.weight.data[:, :-1]
    with pytest.raises(RuntimeError):
        shared_call(model, ROWS)
    assert _running.call is None


def test_an_interrupt_in_a_layer_leaves_no_plan_behind():
    """torch runs no hook after one: the next call of as many tokens would scan them by the old plan."""
    plain = plain_model("qwen3_next")
    model = installed(plain)
    _, mixer = linear_layers(model)[0]

    def interrupt(*_):
        raise KeyboardInterrupt

    hook = mixer.out_proj.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        shared_call(model, ROWS)
    hook.remove()
    tokens = build_plan(flat_rows(ROWS)).pack(flat_rows(ROWS).tokens)[None]
    expected, got = (m(tokens, use_cache=False).logits for m in (plain, model))
    assert torch.equal(expected, got)


def test_packed_sequences_without_a_plan_need_the_packages():
    """The rule in torch would run them as one, and so would the plain conv."""
    model = installed(plain_model("qwen3_next"))
    _, mixer = linear_layers(model)[0]
    x = torch.ones(1, 2, 4)
    with pytest.raises(ValueError, match="cu_seqlens: expected None without flash-linear-attention"):
        mixer.chunk_gated_delta_rule(x, x, x, g=x, beta=x, cu_seqlens=torch.tensor([0, 1, 2]))
    with pytest.raises(ValueError, match="seq_idx: expected None without the package causal-conv1d"):
        mixer.causal_conv1d_fn(x, weight=x[0], bias=None, activation="silu", seq_idx=torch.tensor([[0, 1]]))


@pytest.mark.parametrize(("name", "value"), [("s_aux", torch.zeros(2)), ("softcap", 50.0), ("dropout", 0.1)])
def test_what_no_kernel_computes_is_refused_where_a_layer_hands_it_over(name, value):
    model, rows = installed(plain_model("qwen3")), flat_rows(ROWS)
    layer = model.model.layers[0].self_attn
    call = SharedCall(build_plan(rows), None, True)
    q, k = torch.zeros(1, 4, rows.num_rows, 8), torch.zeros(1, 2, rows.num_rows, 8)
    with pytest.raises(ValueError, match=f"{name}: expected none, got it from Qwen3Attention"):
        call.attention(layer, q, k, k, **{name: value})


STOCK = {"causal_conv1d_fn": "stock_conv", "chunk_gated_delta_rule": "stock_rule"}


@pytest.mark.parametrize("kernels", [("causal_conv1d_fn",), ("chunk_gated_delta_rule",), tuple(STOCK)])
def test_kernels_that_are_put_on_an_installed_mixer_are_refused(kernels):
    """They would run over the packed row as if that were one sequence."""
    name = "qwen3_next"
    model = installed(plain_model(name))
    (layer, mixer), *_ = linear_layers(model)
    stock = {kernel: getattr(shared_mixer_of(layer), STOCK[kernel]) for kernel in STOCK}
    for kernel in kernels:
        setattr(mixer, kernel, stock[kernel])
    with pytest.raises(ValueError, match="kernels that follow the plan"):
        shared_call(model, ROWS)
    uninstall(model)
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer, _ in linear_layers(model))
    assert {kernel: getattr(mixer, kernel) for kernel in STOCK} == stock
    install(model)
    check(name, model)


# Positions with axes.


@pytest.mark.parametrize(
    ("name", "positions"),
    [
        ("qwen3", None),
        ("qwen3_5", None),
        ("qwen3", lambda p: p[:, :1]),
        ("qwen3_5", lambda p: p[:, :1]),
        ("qwen3", lambda p: p.expand(3, 1, -1)),
        ("qwen3_5", lambda p: p.expand(2, 1, -1)),
        ("qwen3", lambda p: p[0]),
    ],
)
def test_positions_that_are_not_the_packed_rows_are_refused(name, positions):
    """Without them transformers counts along the packed row, and one would serve all tokens."""
    rows = flat_rows(ROWS)
    plan = build_plan(rows)
    shared = SharedPrompt(plan, rows.tokens[plan.label_index])
    given = positions and positions(plan.pack(rows.position_ids)[None])
    with pytest.raises(ValueError, match=rf"position_ids: expected \(1, {plan.num_tokens}\)"):
        installed(plain_model(name))(input_ids=plan.pack(rows.tokens)[None], position_ids=given, zorro=shared)


def axes_of(rows, axes):
    """Positions as images leave them: rows jump after a prompt's second token, each axis by another distance."""
    jumps = torch.tensor([0, 5, 2, 9])[:axes, None]
    columns = [torch.arange(len(p) + len(r)) + jumps * (torch.arange(len(p) + len(r)) > 1) for p, r in rows]
    return torch.cat(columns, 1)


@pytest.mark.parametrize("axes", [3, 4])
@pytest.mark.parametrize("name", ["qwen3_5_text", "qwen3_5", "qwen3_5_moe"])
def test_positions_with_axes_are_gathered(name, axes):
    plain = copy.deepcopy(plain_model(name))
    model, rows, positions = installed(plain), flat_rows(ROWS), axes_of(ROWS, axes)
    rows.position_ids = positions
    plan = build_plan(rows)
    assert plan.num_groups == 3
    shared = SharedPrompt(plan, rows.tokens[plan.label_index], calculate_entropy=True)
    with Float64():
        out = model(
            input_ids=plan.pack(rows.tokens)[None], position_ids=plan.pack(positions).unsqueeze(1), zorro=shared
        )
        got = [out[key].split(rows.response_lens.tolist()) for key in ("log_probs", "entropy")]
        expected, start = ([], []), 0
        for prompt, response in ROWS:
            ids = torch.cat([prompt, response])[None]
            own = positions[:, None, start : start + ids.shape[1]]
            start += ids.shape[1]
            # Text positions that jump would be taken for several sequences; a mask of ones says that they aren't.
            logits = plain(ids, attention_mask=torch.ones_like(ids), position_ids=own, use_cache=False).logits[0]
            log_p = logits[len(prompt) - 1 : len(prompt) - 1 + len(response)].log_softmax(-1)
            expected[0].append(log_p.gather(-1, response[:, None])[:, 0])
            expected[1].append(-(log_p.exp() * log_p).sum(-1))
        for values in (expected, got):
            loss_of(*values).backward()
    assert_rows(expected, got, EXACT)
    assert worst_gradient(gradients(plain), gradients(model)) <= EXACT
    flat = per_row(plain, ROWS)
    far = max((a - b).abs().max() for a, b in zip(flat[0], expected[0], strict=True) if len(a))
    assert far > 1e-3, "positions make a difference"


def test_axes_are_for_multi_modal_rotary_embeddings():
    """Whose sections may be the default, of which the config says nothing."""
    for name in NAMES:
        assert position_axes(plain_model(name)) == ((3, 4) if "qwen3_5" in name else ()), name
    assert position_axes(tiny_models.build("qwen3_5_text", rope_parameters=None, head_dim=256)) == (3, 4)


@pytest.mark.parametrize("axis", range(4))
def test_prompts_that_differ_in_one_axis_are_not_shared(axis):
    rows = flat_rows(ROWS)
    rows.position_ids = axes_of(ROWS, 4)
    first = next(i for i, (p, _) in enumerate(ROWS) if len(p) == 7)
    rows.position_ids[axis, int(rows.cu_seqlens[first]) + 3] += 1
    assert build_plan(rows).num_groups == 4


@pytest.mark.slow
def test_under_the_forwards_that_verl_puts_on_the_classes():
    """They hand none of their keyword arguments on to the mixers, and run the vision tower in every call."""
    run_python(
        """
        import sys
        sys.path[:0] = ["tests", "scripts"]
        import copy
        import torch
        import tiny_models
        from float64 import Float64
        from test_family import LONG, EXACT
        from test_models import assert_rows, loss_of, shared_call
        from tiny import gradients, per_row, worst_gradient
        from verl.models.transformers.monkey_patch import apply_monkey_patch
        from zorro_verl.models import install

        names = ("qwen3_5", "qwen3_5_moe")
        plain = {name: tiny_models.build(name) for name in names}
        expected = {}
        for name, model in plain.items():
            with Float64():
                expected[name] = per_row(model, LONG)
                loss_of(*expected[name]).backward()
        forwards = {name: type(model).forward for name, model in plain.items()}
        for name, model in plain.items():
            subject = copy.deepcopy(model)
            subject.zero_grad()
            apply_monkey_patch(subject, use_remove_padding=True)
            assert type(subject).forward is not forwards[name]
            for way in ("expand", "fork"):
                install(subject, linear_attention=way)
                with Float64():
                    values = shared_call(subject, LONG)
                    loss_of(*values).backward()
                assert_rows(expected[name], values, EXACT)
                found = {n: g for n, g in gradients(subject).items() if "visual" not in n}
                assert worst_gradient(gradients(model), found) <= EXACT
                subject.zero_grad()
        """,
        PYTHONPATH=".",
    )


# What is refused.


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("gpt_oss", "attention sinks"),
        ("gemma2", "softcap"),
        ("granite", "scaled after the head"),
        ("cohere", "scaled after the head"),
        ("gemma3", "gemma3_text"),
        ("mamba", "not been tested"),
    ],
)
def test_types_that_are_not_supported_say_why(model_type, reason):
    with pytest.raises(ValueError, match=f"model_type: expected.*'{model_type}'.*strategy=fsdp2.*qwen3") as error:
        check_supported(AutoConfig.for_model(model_type))
    assert reason in str(error.value)


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping: expected None, got 50"),
        ("gemma3_text", {"final_logit_softcapping": 30.0}, "final_logit_softcapping: expected None, got 30"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention: expected False"),
        ("qwen3_5", {"layer_types": ["full_attention", "chunked_attention", "linear_attention"]}, "layer_types"),
    ],
)
def test_features_that_are_not_supported_are_named(name, config, message):
    plain = tiny_models.config_of(name)
    check_supported(plain)
    for key, value in config.items():
        setattr(plain.get_text_config(), key, value)
    with pytest.raises(ValueError, match=message):
        check_supported(plain)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        *((name, "attention_dropout") for name in NAMES if hasattr(TEXT[name], "attention_dropout")),
        ("phi3", "resid_pdrop"),
        ("phi3", "embd_pdrop"),
        ("seed_oss", "residual_dropout"),
        ("starcoder2", "embedding_dropout"),
        ("mixtral", "router_jitter_noise"),
    ],
)
def test_noise_is_refused_in_training_only(name, key):
    """It differs from row to row in the plain model; a shared prompt would have one for all siblings."""
    config = tiny_models.config_of(name)
    text = config.get_text_config()
    assert hasattr(text, key)
    check_training(config, training=True)
    setattr(text, key, 0.1)
    check_training(config, training=False)
    with pytest.raises(ValueError, match=rf"{key}.*0\.1.*override_config\.(text_config\.)?{key}=0"):
        check_training(config, training=True)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("qwen3", "attention_dropout"),
        ("phi3", "resid_pdrop"),
        ("seed_oss", "residual_dropout"),
        ("starcoder2", "embedding_dropout"),
        ("mixtral", "router_jitter_noise"),
    ],
)
def test_noise_stays_refused_when_only_the_config_forgets_it(name, key):
    """Layers keep what they were built with."""
    model = installed(tiny_models.build(name, torch.float32, **{key: 0.2}))
    setattr(model.config, key, 0.0)
    shared_call(model, ROWS)
    model.train()
    with pytest.raises(ValueError, match=r"model\..*: expected 0 in training, got 0\.2; build the model anew"):
        shared_call(model, ROWS)


@pytest.mark.parametrize("version", ["5.5.2", "5.6.0", "5.11.0", "4.57.1"])
def test_versions_of_transformers_outside_the_range(monkeypatch, version):
    # As that module has it: transformers puts another object in its own place when one of its models is imported.
    monkeypatch.setattr(families.transformers, "__version__", version)
    with pytest.raises(ValueError, match=rf"transformers: expected a version in >=5.5.3.*<5.11, got {version}"):
        installed(plain_model("qwen3"))


@pytest.mark.parametrize("way", ["auto", "expand", "fork"])
def test_one_linear_plan_serves_all_layers_of_a_call(monkeypatch, way):
    built = []

    class Counted(LinearPlan):
        def __init__(self, *args):
            built.append(args)
            super().__init__(*args)

    monkeypatch.setattr("zorro_verl.mixers.LinearPlan", Counted)
    model = installed(plain_model("qwen3_next"), linear_attention=way)
    assert len(linear_layers(model)) == 2
    shared_call(model, ROWS)
    ((plan, asked, varlen, width),) = built
    assert plan.num_row_tokens == sum(len(p) + len(r) for p, r in ROWS)
    assert (asked, varlen, width) == (way, False, 4)
