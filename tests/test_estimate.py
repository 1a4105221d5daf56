"""What a model takes of GPUs: by hand, and against its own parameters."""

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from zorro_verl.estimate import ModelSize, shard_memory

# As published by the models' makers, in billions.
PUBLISHED = {
    "qwen3": (
        8.2,
        {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
    ),
    "qwen3_moe": (30.5, {"hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "num_experts": 128}),
}


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


def test_no_gpus():
    with pytest.raises(ValueError, match="gpus: expected at least 1, got 0"):
        shard_memory(ModelSize(1, 1, 1), 0)
