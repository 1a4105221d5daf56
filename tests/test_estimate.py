"""Estimates: by hand, against the model's own parameters, and against the work that the flop counter sees."""

import pytest
import torch
from tiny import flat_rows, tiny_model
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from zorro_verl.estimate import Batch, ModelSize, pass_seconds, shard_memory
from zorro_verl.flops import ModelWork
from zorro_verl.heads import SharedPrompt
from zorro_verl.models import install
from zorro_verl.packing import build_plan

# As published by the models' makers, in billions.
PUBLISHED = {
    "qwen3": (
        8.2,
        {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
    ),
    "qwen3_moe": (30.5, {"hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "num_experts": 128}),
}


def test_token_ratio_of_the_readme():
    batch = Batch(prompts=256, rollouts=8, prompt_tokens=4096, response_tokens=512)
    assert batch.token_ratio == pytest.approx(4.5)
    assert batch.group_tokens == 4096 + 8 * 512


@pytest.mark.parametrize("model_type", PUBLISHED)
def test_parameters_of_known_models(model_type):
    billions, sizes = PUBLISHED[model_type]
    kv = {"qwen3": 8, "qwen3_moe": 4}[model_type]
    config = AutoConfig.for_model(
        model_type, head_dim=128, num_key_value_heads=kv, vocab_size=151936, tie_word_embeddings=False, **sizes
    )
    size = ModelSize.of(config)
    assert size.total / 1e9 == pytest.approx(billions, abs=0.05)
    assert size.total == size.layer * sizes["num_hidden_layers"] + size.outside
    assert size.outside == 2 * 151936 * sizes["hidden_size"] + sizes["hidden_size"]
    critic = ModelSize.of(config, head_features=1)
    assert critic.outside == (151936 + 1 + 1) * sizes["hidden_size"]
    assert critic.layer == size.layer


def test_tied_weights_count_once():
    config = AutoConfig.for_model(
        "qwen3", hidden_size=64, vocab_size=1000, num_hidden_layers=2, tie_word_embeddings=True
    )
    model = AutoModelForCausalLM.from_config(config)
    size = ModelSize.of(config)
    assert size.total == sum(p.numel() for p in model.parameters())
    assert size.outside == 1000 * 64 + 64


@pytest.mark.parametrize("shared", [True, False])
def test_seconds_are_the_operations_of_a_real_forward(shared):
    """At one operation a second. Attention is counted by hand: the counter takes whole squares for causal ones."""
    batch = Batch(prompts=2, rollouts=4, prompt_tokens=24, response_tokens=6)
    model = tiny_model("qwen3", torch.float32, vocab_size=200)
    g = torch.Generator().manual_seed(0)
    prompts = [torch.randint(1, 200, (24,), generator=g) for _ in range(batch.prompts)]
    rows = [(p, torch.randint(1, 200, (6,), generator=g)) for p in prompts for _ in range(batch.rollouts)]
    seconds = pass_seconds(model.config, batch, 1, peak_flops=1.0, utilisation=1.0, shared=shared)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        if shared:
            install(model, "sdpa")
            flat = flat_rows(rows)
            plan = build_plan(flat)
            kept = SharedPrompt(plan, flat.tokens[plan.label_index], 1.0, False, "none")
            inputs = {"input_ids": plan.pack(flat.tokens)[None], "position_ids": plan.pack(flat.position_ids)[None]}
            model(**inputs, use_cache=False, zorro=kept)
        else:
            for prompt, response in rows:
                model(torch.cat([prompt, response])[None])  # as verl's engine, whose head runs on every token
    operations = counter.get_flop_counts()["Global"]
    linear = operations[torch.ops.aten.mm]  # not bmm, which rotary embeddings take
    group = batch.prompt_tokens, [batch.response_tokens] * batch.rollouts
    work = ModelWork.of(model.config)
    without_attention = work._replace(per_pair=0).of_groups([group] * batch.prompts)
    with_attention = work.of_groups([group] * batch.prompts)
    of_prompts = work.head * batch.prompts * batch.rollouts * batch.prompt_tokens
    pick = (lambda w: w.executed) if shared else (lambda w: w.counted + of_prompts)
    assert linear == 2 * pick(without_attention)
    assert seconds.forward == 2 * pick(with_attention)
    scored = batch.prompts * batch.rollouts * (6 if shared else 30)
    assert seconds.update == 4 * seconds.forward - 2 * work.head * scored, "checkpointing repeats layers, not the head"
    options = {"peak_flops": 1.0, "utilisation": 1.0, "shared": shared}
    recomputed = pass_seconds(model.config, batch, 1, logits_optimization="memory", **options)
    assert recomputed == (seconds.forward, 4 * seconds.forward)


def test_more_gpus_and_a_lower_utilisation():
    config = tiny_model("qwen3").config
    batch = Batch(8, 4, 100, 10)
    one = pass_seconds(config, batch, 1, peak_flops=1e9, utilisation=0.5)
    assert pass_seconds(config, batch, 4, peak_flops=1e9, utilisation=0.5).forward == pytest.approx(one.forward / 4)
    assert pass_seconds(config, batch, 1, peak_flops=1e9, utilisation=0.25).update == pytest.approx(2 * one.update)
    plain = pass_seconds(config, batch, 1, peak_flops=1e9, utilisation=0.5, checkpointing=False)
    assert plain.update == pytest.approx(3 * one.forward)
    critic = pass_seconds(config, batch, 1, peak_flops=1e9, utilisation=0.5, head_features=1)
    assert critic.forward < one.forward


def test_shards_of_an_8b_model_on_eight_gpus():
    """16 bytes a parameter over all GPUs, and on each what is gathered."""
    memory = shard_memory(ModelSize(total=8_000, layer=200, outside=1_000), 8)
    assert memory == (4_000, 4_000, 8_000, 1_000 * 4 + 200 * 10)
    assert shard_memory(ModelSize(total=8_001, layer=200, outside=1_000), 8).weights == 4_004, "the largest shard"


def test_sizes_take_no_memory_and_the_largest_layer():
    """A model of hundreds of gigabytes, whose first layer is dense and smaller than those with experts."""
    config = AutoConfig.for_model(
        "qwen3_moe", hidden_size=16384, num_hidden_layers=4, num_experts=512, mlp_only_layers=[0], vocab_size=1000
    )
    size = ModelSize.of(config)
    assert size.total > 4e10
    assert size.layer * 3 < size.total < size.layer * 3.1


@pytest.mark.parametrize(
    "change", [{"batch": Batch(0, 8, 10, 10)}, {"gpus": 0}, {"peak_flops": 0.0}, {"utilisation": 1.5}]
)
def test_what_cannot_be(change):
    arguments = {"config": tiny_model("qwen3").config, "batch": Batch(1, 1, 1, 1), "gpus": 1}
    arguments |= {"peak_flops": 1.0, "utilisation": 1.0}
    with pytest.raises(ValueError, match="batch, gpus, peak_flops and utilisation: expected"):
        pass_seconds(**arguments | change)
    with pytest.raises(ValueError, match="gpus: expected at least 1, got 0"):
        shard_memory(ModelSize(1, 1, 1), 0)
