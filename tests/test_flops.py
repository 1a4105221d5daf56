"""The FLOP bound, against numbers counted by hand."""

from types import SimpleNamespace

import pytest
from transformers import AutoConfig

from zorro_verl.families import SUPPORTED_MODEL_TYPES
from zorro_verl.flops import ModelWork, Work, flop_bound_speedup

# Per token: linear layers 2 * (2 * 8 * 8 + 2 * 8 * 4 + 3 * 8 * 10) = 864, head 8 * 50 = 400. Per pair: 2 * 2 * 8 = 32.
SIZES = {
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 2,
    "intermediate_size": 10,
    "vocab_size": 50,
}


def bound(*groups, **sizes):
    return flop_bound_speedup(SimpleNamespace(**SIZES | sizes), groups)


def test_two_rows_of_one_prompt():
    # Prompt 3, responses 1 and 3: rows of 4 and 6 tokens with 10 and 21 pairs; packed, the prompt's 3 and 6 count once.
    as_they_are = 864 * 10 + 32 * 31 + 400 * 4
    packed = 864 * 7 + 32 * 25 + 400 * 4
    assert bound((3, [1, 3])) == as_they_are / packed


def test_groups_add_up():
    """Prompt 3 with responses of 1 and 3, and prompt 2 with responses of 0, 2 and 2 (rows of 2, 4, 4 tokens)."""
    as_they_are = 864 * (10 + 10) + 32 * (31 + 3 + 10 + 10) + 400 * (4 + 4)
    packed = 864 * (7 + 6) + 32 * (25 + 3 + 7 + 7) + 400 * (4 + 4)
    assert bound((3, [1, 3]), (2, [0, 2, 2])) == as_they_are / packed


def test_work_of_rows():
    """One layer's numbers twice: 864 per token, 32 per pair, 400 per response token, over a shared prompt of 3."""
    model = ModelWork.of(SimpleNamespace(**SIZES))
    head, prompt_head = 400 * 4, 400 * 6
    expected = Work(864 * 10 + 32 * 31 + head, 864 * 7 + 32 * 25 + head, head, prompt_head)
    assert model.of_groups([(3, [1, 3])]) == expected
    assert model.of_groups([(3, [1, 3]), (2, [5])]).executed == 864 * 14 + 32 * (25 + 28) + 400 * 9
    assert model.of_groups([]) == Work(0, 0, 0, 0)


def test_work_with_attention_on_the_rows_as_they_were():
    """Of the second row's prompt its linear layers are saved, its 6 pairs are not."""
    work = ModelWork.of(SimpleNamespace(**SIZES)).of_groups([(3, [1, 3])], share_attention=False)
    assert work[:2] == (864 * 10 + 32 * 31 + 400 * 4, 864 * 7 + 32 * 31 + 400 * 4)


def test_work_of_a_value_model():
    """A head with one output."""
    work = ModelWork.of(SimpleNamespace(**SIZES | {"vocab_size": None}), head_features=1).of_groups([(3, [1, 3])])
    assert work == Work(864 * 10 + 32 * 31 + 8 * 4, 864 * 7 + 32 * 25 + 8 * 4, 8 * 4, 8 * 6)


def test_nothing_shared():
    assert bound((5, [7]), (3, [0]), (1, [2])) == 1


def test_heads_by_default():
    """No head_dim: hidden over heads, 2; no num_key_value_heads: as many as heads."""
    linear = 2 * (4 * 8 * 8 + 3 * 8 * 10)
    assert bound((1, [0, 0]), head_dim=None, num_key_value_heads=None) == 2
    got = bound((1, [1, 1]), head_dim=None, num_key_value_heads=None)
    assert got == (linear * 4 + 32 * 6 + 800) / (linear * 3 + 32 * 5 + 800)


def test_a_window_bounds_what_a_token_sees():
    """A window of 2 in one layer of two: rows of 4 tokens have 1 + 2 + 2 + 2 pairs there, prompts of 3 have 5."""
    got = bound((3, [1, 1]), sliding_window=2, layer_types=["full_attention", "sliding_attention"])
    assert got == (864 * 8 + 16 * 2 * (10 + 7) + 800) / (864 * 5 + 16 * (2 * 17 - 11) + 800)
    everywhere = bound((3, [1, 1]), sliding_window=2)
    assert everywhere == (864 * 8 + 32 * 14 + 800) / (864 * 5 + 32 * 9 + 800)


def test_experts():
    """Two experts of 3 and a shared one of 1; a dense layer has 10."""
    experts = {"num_experts_per_tok": 2, "moe_intermediate_size": 3, "shared_expert_intermediate_size": 1}
    attention = 2 * (2 * 8 * 8 + 2 * 8 * 4)
    for where, widths in (({"mlp_only_layers": [0]}, 10 + 7), ({"decoder_sparse_step": 2}, 10 + 7), ({}, 7 + 7)):
        linear = attention + 3 * 8 * widths
        assert bound((1, [1, 1]), **experts, **where) == (linear * 4 + 32 * 6 + 800) / (linear * 3 + 32 * 5 + 800)


def test_linear_attention_sees_no_pairs():
    sizes = {
        "linear_key_head_dim": 3,
        "linear_value_head_dim": 5,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
    }
    linear = 864 - (2 * 8 * 8 + 2 * 8 * 4) + 8 * (2 * 3 + 3 * 10) + 3 * 2 * 3 * 5
    got = bound((1, [1, 1]), **sizes, layer_types=["linear_attention", "full_attention"])
    assert got == (linear * 4 + 16 * 6 + 800) / (linear * 3 + 16 * 5 + 800)


def test_experts_as_wide_as_the_config_says_of_mlps():
    """Mixtral's and OLMoE's configs have one width."""
    linear = 2 * (2 * 8 * 8 + 2 * 8 * 4) + 2 * 3 * 8 * 20
    assert bound((1, [1, 1]), num_experts_per_tok=2) == (linear * 4 + 32 * 6 + 800) / (linear * 3 + 32 * 5 + 800)


@pytest.mark.parametrize("model_type", SUPPORTED_MODEL_TYPES)
def test_configs_of_transformers_are_understood(model_type):
    """Long prompts, many short responses: what is shared comes near the number of rows."""
    config = AutoConfig.for_model(model_type)
    assert 7.5 < flop_bound_speedup(config, [(4000, [1] * 8)]) < 8
    assert flop_bound_speedup(config, [(4000, [1])]) == 1


@pytest.mark.parametrize(
    "groups", [[], [(3, [])], [(0, [1])], [(3, [1, -1])]], ids=["none", "no-rows", "no-prompt", "negative"]
)
def test_lengths_that_cannot_be(groups):
    with pytest.raises(ValueError, match="groups: expected"):
        bound(*groups)


def test_a_config_that_lacks_a_size():
    with pytest.raises(
        ValueError, match="config: expected a model config with vocab_size above 0, got none in SimpleNamespace"
    ):
        bound((3, [1]), vocab_size=None)
