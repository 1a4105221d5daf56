"""The memory formula, against what torch's own profiler sees allocated in a step of a real model."""

from types import SimpleNamespace

import pytest
import torch
from tiny import flat_rows, tiny_model
from torch.profiler import ProfilerActivity, profile

from zorro_verl import log_probs, memory
from zorro_verl.heads import SharedPrompt
from zorro_verl.memory import (
    LAYERS_KNOWN,
    ActivationMemory,
    activation_memory,
    largest_token_budget,
    scoring_memory,
    why_unknown,
)
from zorro_verl.models import install
from zorro_verl.packing import build_plan

TOLERANCE = 0.15
TINY = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
}
MID = TINY | {
    "hidden_size": 192,
    "intermediate_size": 576,
    "num_attention_heads": 6,
    "head_dim": 32,
    "vocab_size": 4096,
}
# Heads as wide as two hidden states, no grouped queries, and a narrow MLP: attention's backward is the largest moment.
WIDE = TINY | {"head_dim": 32, "num_key_value_heads": 4, "intermediate_size": 64}
GROUPED_WIDE = TINY | {"hidden_size": 32, "intermediate_size": 16, "head_dim": 64}
ONE_KEY = GROUPED_WIDE | {"num_key_value_heads": 1}
EXPERTS = MID | {"num_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 128, "vocab_size": 512}
EXPERTS |= {"mlp_only_layers": [], "decoder_sparse_step": 1}
SHARED = [(160, [40] * 4)] * 2  # 640 packed tokens, 320 of them responses'
SHARED_MORE = [(320, [20] * 16)]  # as many
# So many that the scratch of torch's attention, in 16 bits 0.8 MB for any number of tokens, is small beside them.
LONGER = [(4000, [5] * 4)]
LONG_PROMPT, LONG_RESPONSES = [(600, [10] * 4)], [(20, [155] * 4)]


class GradientInPlace(torch.autograd.Function):
    """Logits to a loss; the backward gives the logits' own memory as their gradient."""

    @staticmethod
    def forward(ctx, logits):
        ctx.save_for_backward(logits)
        return logits[..., 0].sum()

    @staticmethod
    def backward(ctx, grad):
        return ctx.saved_tensors[0].mul_(grad)


def measured(
    sizes,
    groups,
    *,
    checkpointing=False,
    model_type="qwen3",
    dtype="float32",
    mode="none",
    entropy=True,
    scoring=False,
    stock=False,
):
    """The peak of live bytes in forward and backward: beside weights, gradients and what was there before.

    ``scoring`` is a forward without a graph. ``stock`` is the plain model on one row, which makes logits of all tokens;
    their gradient takes their place, as in flash-attn's cross-entropy.
    """
    g = torch.Generator().manual_seed(0)
    draw = lambda n: torch.randint(1, sizes["vocab_size"], (n,), generator=g)  # noqa: E731
    rows = [(prompt, draw(n)) for length, lens in groups for prompt in [draw(length)] for n in lens]
    model = tiny_model(
        model_type,
        getattr(torch, dtype),
        **sizes,
        max_position_embeddings=4096,
        attention_dropout=0.0,
        residual_dropout=0.0,
    )
    if not stock:
        install(model, "sdpa")
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train(not scoring)
    flat = flat_rows(rows)

    def step():
        with torch.set_grad_enabled(not scoring):
            return forward_backward() if not stock else plain(flat.tokens[None])

    def plain(tokens):
        loss = GradientInPlace.apply(model(tokens, use_cache=False).logits)
        if not scoring:
            loss.backward()

    def forward_backward():
        plan = build_plan(flat)
        shared = SharedPrompt(plan, flat.tokens[plan.label_index], 1.0, entropy, mode)
        inputs = {"input_ids": plan.pack(flat.tokens)[None], "position_ids": plan.pack(flat.position_ids)[None]}
        outputs = model(**inputs, use_cache=False, zorro=shared)
        if not scoring:
            sum(values.sum() for values in outputs.values()).backward()

    step()  # from here on gradients are there, to be added to
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        step()
    events = [e for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def predicted(
    sizes, groups, *, model_type="qwen3", mode="none", entropy=True, formula=activation_memory, **options
) -> ActivationMemory:
    responses = sum(n for _, lens in groups for n in lens)
    tokens = responses + sum(prompt for prompt, _ in groups)
    config = SimpleNamespace(model_type=model_type, **sizes)
    return formula(
        config, tokens, responses, logits_optimization=mode, calculate_entropy=entropy, **{"dtype": "float32"} | options
    )


CASES = {
    "plain": (MID, SHARED, {"checkpointing": False}),
    "checkpointing": (MID, SHARED, {"checkpointing": True}),
    "bfloat16": (MID, SHARED, {"checkpointing": False, "dtype": "bfloat16"}),
    "bfloat16-checkpointing": (MID, SHARED, {"checkpointing": True, "dtype": "bfloat16"}),
    "long-prompt": (MID, LONG_PROMPT, {"checkpointing": True}),
    "long-responses": (MID, LONG_RESPONSES, {"checkpointing": True}),
    "long-responses-no-entropy": (MID, LONG_RESPONSES, {"checkpointing": True, "entropy": False}),
    "compute": (MID, LONG_RESPONSES, {"checkpointing": True, "mode": "compute"}),
    "compute-bfloat16": (MID, LONG_RESPONSES, {"checkpointing": True, "mode": "compute", "dtype": "bfloat16"}),
    "memory": (MID, LONG_RESPONSES, {"checkpointing": True, "mode": "memory"}),
    "memory-bfloat16": (MID, LONG_RESPONSES, {"checkpointing": True, "mode": "memory", "dtype": "bfloat16"}),
    "tiny": (TINY, SHARED, {"checkpointing": False}),
    "tiny-checkpointing": (TINY, SHARED, {"checkpointing": True}),
    "wide-heads": (WIDE, SHARED, {"checkpointing": True}),
    "wide-queries": (ONE_KEY, LONGER, {"checkpointing": True}),
    "wide-queries-bfloat16": (ONE_KEY, LONGER, {"checkpointing": True, "dtype": "bfloat16"}),
    "experts": (EXPERTS, SHARED, {"checkpointing": False, "model_type": "qwen3_moe"}),
    "experts-checkpointing": (EXPERTS, SHARED, {"checkpointing": True, "model_type": "qwen3_moe"}),
    "experts-wide": (
        EXPERTS | {"moe_intermediate_size": 256},
        SHARED,
        {"checkpointing": True, "model_type": "qwen3_moe"},
    ),
    "experts-few": (EXPERTS | {"num_experts_per_tok": 2}, SHARED, {"checkpointing": True, "model_type": "qwen3_moe"}),
    "experts-bfloat16": (
        EXPERTS,
        SHARED,
        {"checkpointing": True, "model_type": "qwen3_moe", "dtype": "bfloat16"},
    ),
    **{
        name: (TINY, SHARED, {"checkpointing": True, "model_type": name})
        for name in LAYERS_KNOWN
        if name not in ("qwen3", "qwen3_moe")
    },
}


@pytest.mark.parametrize("case", CASES)
def test_the_peak_is_as_predicted(case, monkeypatch):
    """Two to three chunks of the head in the chunked modes."""
    monkeypatch.setattr(log_probs, "CHUNK_BYTES", 4 << 20)
    monkeypatch.setattr(memory, "ACCELERATOR_CHUNK_BYTES", 4 << 20)
    sizes, groups, options = CASES[case]
    peak, formula = measured(sizes, groups, **options), predicted(sizes, groups, **options).peak
    assert formula == pytest.approx(peak, rel=TOLERANCE), f"measured {peak}, predicted {formula}: {formula / peak:.3f}"


# Long prompts, where a layer is the largest moment, and long responses, where the head is.
SCORED = [(1200, [5] * 4)]
SCORING = {
    "mlp": (MID, SCORED, {}),
    "mlp-bfloat16": (MID, SCORED, {"dtype": "bfloat16"}),
    "llama": (MID, SCORED, {"model_type": "llama"}),
    "keys": (WIDE, SCORED, {}),  # as wide as queries
    "keys-bfloat16": (WIDE, LONGER, {"dtype": "bfloat16"}),
    "keys-bfloat16-llama": (WIDE, LONGER, {"dtype": "bfloat16", "model_type": "llama"}),
    "queries": (ONE_KEY, SCORED, {}),
    "query-norm": (ONE_KEY, SCORED, {"dtype": "bfloat16"}),
    "experts": (EXPERTS, SCORED, {"model_type": "qwen3_moe"}),
    "experts-wide": (EXPERTS | {"moe_intermediate_size": 256}, SCORED, {"model_type": "qwen3_moe"}),
    "experts-few": (EXPERTS | {"num_experts_per_tok": 2}, SCORED, {"model_type": "qwen3_moe", "dtype": "bfloat16"}),
    "head": (MID, LONG_RESPONSES, {}),
    "head-bfloat16": (MID, LONG_RESPONSES, {"dtype": "bfloat16"}),
    "head-no-entropy": (MID, LONG_RESPONSES, {"entropy": False}),
    "head-compute": (MID, LONG_RESPONSES, {"mode": "compute"}),
    "head-memory": (MID, LONG_RESPONSES, {"mode": "memory", "dtype": "bfloat16"}),
}


@pytest.mark.parametrize("case", SCORING)
def test_the_peak_of_scoring_is_as_predicted(case, monkeypatch):
    monkeypatch.setattr(log_probs, "CHUNK_BYTES", 4 << 20)
    monkeypatch.setattr(memory, "ACCELERATOR_CHUNK_BYTES", 4 << 20)
    sizes, groups, options = SCORING[case]
    peak = measured(sizes, groups, scoring=True, **options)
    formula = predicted(sizes, groups, formula=scoring_memory, **options).peak
    assert formula == pytest.approx(peak, rel=0.03), f"measured {peak}, predicted {formula}: {formula / peak:.3f}"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("scoring", [True, False])
def test_stock_has_logits_of_all_tokens_once(scoring, dtype):
    """One row, of which ten tokens are a response: the head is the largest moment all the same."""
    options = {"dtype": dtype} | ({} if scoring else {"checkpointing": True})
    groups, formula = [(700, [10])], scoring_memory if scoring else activation_memory
    peak = measured(MID, groups, scoring=scoring, stock=True, **options)
    ours = predicted(MID, groups, formula=formula, **options)
    config = SimpleNamespace(model_type="qwen3", **MID)
    stock = formula(config, 710, 10, stock=True, **options)
    assert (stock.layers, stock.layer) == (ours.layers, ours.layer)
    assert stock.head > 2 * ours.head
    assert 0.87 < stock.peak / peak < 1.02, "what it takes at least, and not much less"


def test_stock_with_fused_kernels_keeps_512_tokens_of_logits():
    config, options = SimpleNamespace(model_type="qwen3", **MID), {"logits_optimization": "memory", "stock": True}
    states = 710 * 192 * 2
    assert scoring_memory(config, 710, 710, **options).head == states + 512 * 4096 * 4
    trained = activation_memory(config, 710, 710, checkpointing=True, **options).head
    assert trained == 710 * 192 * 6 + states + 512 * 4096 * 4 + 192 * 4096 * 2


def test_a_critic_has_no_vocabulary():
    config = config_8b()
    actor, critic = (scoring_memory(config, 4096, 2048, head_features=features).head for features in (None, 1))
    assert (actor - critic) == 2048 * (151936 - 1) * (2 + 4 + 4)


def test_the_largest_budget_for_scoring():
    room = 30 << 30
    budget = largest_token_budget(config_8b(), room, 0.5, scoring=True)
    peak = lambda tokens: scoring_memory(config_8b(), tokens, -(-tokens // 2)).peak  # noqa: E731
    assert peak(budget) <= room < peak(budget + 1)
    assert budget > largest_token_budget(config_8b(), room, 0.5, checkpointing=True)


def test_why_memory_is_unknown():
    assert why_unknown(config_8b()) is None
    assert "not predicted for models of type mamba" in why_unknown(SimpleNamespace(model_type="mamba"))
    dense = SimpleNamespace(model_type="qwen3_moe", **EXPERTS | {"mlp_only_layers": [0]})
    assert "expected experts in every layer" in why_unknown(dense)


def test_packed_tokens_alone_count():
    """Two prompts with four responses, and one with sixteen: as many packed tokens, as much memory."""
    a, b = (measured(MID, groups, checkpointing=True) for groups in (SHARED, SHARED_MORE))
    assert a == pytest.approx(b, rel=0.02)
    assert predicted(MID, SHARED, checkpointing=True) == predicted(MID, SHARED_MORE, checkpointing=True)


def test_twice_the_packed_tokens_take_twice_the_memory():
    a, b = (measured(TINY, groups, checkpointing=True) for groups in (SHARED, SHARED * 2))
    assert b == pytest.approx(2 * a, rel=0.05)


def config_8b():
    """Qwen3-8B's sizes."""
    return SimpleNamespace(
        model_type="qwen3",
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
    )


def test_by_hand():
    """Ten packed tokens of which four are responses', bfloat16; numbers from the module's docstring, and no loop."""
    sizes = {"hidden_size": 8, "intermediate_size": 20, "num_hidden_layers": 3, "num_attention_heads": 2}
    config = SimpleNamespace(model_type="qwen2", num_key_value_heads=1, vocab_size=50, **sizes)
    layer = 2 * 8 * 8 + (8 + 4) * 2 + (8 + 4) * 2 + 4 * 2 + 4 * 20 * 2
    gradients = (2 * 20 + 8) * 2
    head = 10 * 8 * 6 + 4 * 8 * 2 + 4 * 50 * (2 + 4 + 4)
    plain = activation_memory(config, 10, 4, checkpointing=False)
    assert plain == (3 * 10 * layer, 10 * gradients, head)
    saved = activation_memory(config, 10, 4, checkpointing=True)
    assert saved == (3 * 10 * 8 * 2, 10 * (layer + gradients), head)
    assert saved.peak == 3 * 10 * 8 * 2 + 10 * (layer + gradients)


def test_experts_by_hand():
    """The same where each token takes two of five experts."""
    sizes = {"hidden_size": 8, "moe_intermediate_size": 6, "num_hidden_layers": 3, "num_attention_heads": 2}
    sizes |= {"head_dim": 4, "num_experts": 5, "num_experts_per_tok": 2}
    config = SimpleNamespace(model_type="qwen3_moe", num_key_value_heads=1, vocab_size=50, **sizes)
    layer = 2 * 8 * 8 + (8 + 4) * 8 + (8 + 4) * 2 + 4 * 2 + 2 * ((2 * 8 + 4 * 6) * 2 + 32) + 8 * 5
    plain = activation_memory(config, 10, 4, checkpointing=False)
    assert plain[:2] == (3 * 10 * layer, 10 * 2 * 2 * 8 * 2)


def test_sequence_parallelism_divides_what_is_spread():
    """But every device gathers the last hidden states, to score its share of the responses."""
    one = activation_memory(config_8b(), 32768, 16384, checkpointing=True)
    four = activation_memory(config_8b(), 32768, 16384, checkpointing=True, sequence_parallel=4)
    assert (four.layers, four.layer) == (one.layers / 4, one.layer / 4)
    assert four.head == one.head / 4 + 32768 * 4096 * 2


def test_the_budget_that_fits_is_the_largest():
    room = 30 << 30
    options = {"checkpointing": True, "logits_optimization": "none"}
    budget = largest_token_budget(config_8b(), room, 0.5, **options)
    peak = lambda tokens: activation_memory(config_8b(), tokens, -(-tokens // 2), **options).peak  # noqa: E731
    assert peak(budget) <= room < peak(budget + 1)
    assert largest_token_budget(config_8b(), room, **options) < budget, "responses cost more than prompts"
    assert largest_token_budget(config_8b(), room, checkpointing=True, logits_optimization="memory") > budget


@pytest.mark.parametrize("logits_optimization", ["none", "memory"])
def test_the_budget_of_sliced_rows_is_per_device(logits_optimization):
    """verl gives a micro-batch the budget times the devices of a row, and each of them has its room."""
    room, options = 30 << 30, {"checkpointing": True, "logits_optimization": logits_optimization}
    budget = largest_token_budget(config_8b(), room, 0.5, sequence_parallel=4, **options)

    def peak(budget):
        return activation_memory(config_8b(), 4 * budget, 2 * budget, sequence_parallel=4, **options).peak

    assert peak(budget) <= room < peak(budget + 1)
    alone = largest_token_budget(config_8b(), room, 0.5, **options)
    # The gathered states are the head's, and with "memory" a layer's backward is the larger of the two.
    assert budget < alone if logits_optimization == "none" else budget == alone
    one = peak(1)
    assert largest_token_budget(config_8b(), one, 0.5, sequence_parallel=4, **options) == 1
    with pytest.raises(ValueError, match=f"at least {one} bytes, what one token per device takes, got {one - 1}"):
        largest_token_budget(config_8b(), one - 1, 0.5, sequence_parallel=4, **options)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"config": SimpleNamespace(model_type="mixtral")},
            "config: expected a model's config, .*qwen3.*got mixtral",
        ),
        (
            {"config": SimpleNamespace(model_type="qwen3_moe", **EXPERTS | {"mlp_only_layers": [1]})},
            r"config: expected experts in every layer, got mlp_only_layers=\[1\] and decoder_sparse_step=1",
        ),
        (
            {"config": SimpleNamespace(model_type="qwen3_moe", **EXPERTS | {"decoder_sparse_step": 2})},
            r"config: expected experts in every layer, got mlp_only_layers=\[\] and decoder_sparse_step=2",
        ),
        ({"dtype": "float8"}, "dtype: expected one of float32, bfloat16, float16, got 'float8'"),
        ({"logits_optimization": "best"}, "logits_optimization: expected one of .*, got 'best'"),
        ({"response_tokens": 11}, "response_tokens of 0 up to it .* got 10, 11 and 1"),
        ({"sequence_parallel": 0}, "sequence_parallel of at least 1, got 10, 4 and 0"),
    ],
)
def test_what_cannot_be(change, words):
    arguments = {"config": config_8b(), "tokens": 10, "response_tokens": 4, "checkpointing": True}
    with pytest.raises(ValueError, match=words):
        activation_memory(**arguments | change)


def test_no_room():
    with pytest.raises(ValueError, match="available: expected at least [0-9]+ bytes, .* per device takes, got 1000"):
        largest_token_budget(config_8b(), 1000, checkpointing=True)
    with pytest.raises(ValueError, match=r"response_share: expected 0 to 1, got 1.5"):
        largest_token_budget(config_8b(), 1 << 30, 1.5, checkpointing=True)
