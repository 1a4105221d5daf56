"""The memory formula, against what torch's own profiler sees allocated in a step of a real model."""

from types import SimpleNamespace

import pytest
import torch
from tiny import flat_rows, tiny_model
from torch.profiler import ProfilerActivity, profile

from zorro_verl import log_probs, memory
from zorro_verl.heads import SharedPrompt
from zorro_verl.memory import LAYERS_KNOWN, ActivationMemory, activation_memory, largest_token_budget
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
EXPERTS = MID | {"num_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 128, "vocab_size": 512}
EXPERTS |= {"mlp_only_layers": [], "decoder_sparse_step": 1}
SHARED = [(160, [40] * 4)] * 2  # 640 packed tokens, 320 of them responses'
SHARED_MORE = [(320, [20] * 16)]  # as many
LONG_PROMPT, LONG_RESPONSES = [(600, [10] * 4)], [(20, [155] * 4)]


def measured(sizes, groups, *, checkpointing, model_type="qwen3", dtype="float32", mode="none", entropy=True):
    """The peak of live bytes in forward and backward: beside weights, gradients and what was there before."""
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
    install(model, "sdpa")
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    flat = flat_rows(rows)

    def step():
        plan = build_plan(flat)
        shared = SharedPrompt(plan, flat.tokens[plan.label_index], 1.0, entropy, mode)
        inputs = {"input_ids": plan.pack(flat.tokens)[None], "position_ids": plan.pack(flat.position_ids)[None]}
        outputs = model(**inputs, use_cache=False, zorro=shared)
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


def predicted(sizes, groups, *, model_type="qwen3", mode="none", entropy=True, **options) -> ActivationMemory:
    responses = sum(n for _, lens in groups for n in lens)
    tokens = responses + sum(prompt for prompt, _ in groups)
    config = SimpleNamespace(model_type=model_type, **sizes)
    return activation_memory(
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
