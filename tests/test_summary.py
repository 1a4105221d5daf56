"""The line of a trainer's first update: what it says of the model and of the batch, once, and whose update it is."""

import logging

import pytest
import tiny_models
import torch
from tiny import tiny_model

from zorro_verl.batching import rows_by_group, split_micro_batches
from zorro_verl.estimate import PassCosts, update_costs
from zorro_verl.flops import ModelWork, Work
from zorro_verl.known_models import config_of
from zorro_verl.metrics import ShareCounts
from zorro_verl.models import install
from zorro_verl.prediction import RowLengths, predict
from zorro_verl.summary import Summary, what_is_shared


def test_attention_and_its_kernels():
    model = tiny_model()
    layers = model.config.num_hidden_layers
    install(model, "auto", device="cpu")
    text = f"Qwen3ForCausalLM: attention of {layers} layers shared, by "
    assert what_is_shared(model) == text + "sdpa (torch's own flash attention)"
    install(model, "eager")
    assert what_is_shared(model) == text + "eager (the dense reference)"


def test_attention_that_is_not_shared():
    model = tiny_model()
    install(model, "eager", use_split_attention=False)
    text = what_is_shared(model)
    assert f"attention of {model.config.num_hidden_layers} layers on whole rows, by eager (the dense reference)" in text
    assert "all else shared (actor_rollout_ref.actor.zorro.use_split_attention=False)" in text


@pytest.mark.parametrize("linear_attention", ["auto", "fork"])
def test_layers_of_two_kinds(linear_attention):
    model = tiny_models.build("qwen3_5", torch.float32)
    install(model, "sdpa", linear_attention=linear_attention)
    kinds = model.config.get_text_config().layer_types
    full, linear = kinds.count("full_attention"), kinds.count("linear_attention")
    assert linear > 0 < full
    text = what_is_shared(model)
    assert f"attention of {full} layers shared, by sdpa" in text
    assert f"; linear attention of {linear} layers shared, by " in text
    assert text.endswith(f"(linear_attention={linear_attention})")


def counts():
    """Two prompts of 1,000 and 100 tokens, 4 rows of each, responses of 10, in two epochs."""
    result = ShareCounts()
    result.calls = []
    for _ in range(2):
        call = ShareCounts()
        work = Work(counted=600, executed=100, head=20, prompt_head=80)
        call.add_micro_batch(4480, 1180, [1] * 4 + [2] * 4, [False] * 8, work)
        result.calls += call.calls
        for name in ("tokens_total", "tokens_packed", *(f"work_{field}" for field in Work._fields)):
            setattr(result, name, getattr(result, name) + getattr(call, name))
    result.prompt_lens, result.shared = {1: 1000, 2: 100}, "Model: attention of 2 layers shared, by sdpa"
    return result


def test_the_line(caplog):
    summary = Summary()
    with caplog.at_level(logging.INFO, "zorro_verl"):
        for update in ("update_actor", "update_critic"):
            summary.give(counts(), 2, update, PassCosts(4, 3))
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert record.getMessage() == (
        "strategy=zorro, first update_actor: 2 prompts in 8 rows, 2 epochs; 8,960 tokens of rows, 2,360 through the "
        f"model: 3.80 times fewer, of 3.80 that the batch allows. Predicted speed-up of update_actor over fsdp2: "
        f"{(4 * 580 + 3 * 100) / (4 * 80 + 3 * 20):.2f}, by multiply-adds. Model: attention of 2 layers shared, by "
        "sdpa."
    )


@pytest.mark.parametrize("head_features", [None, 1])
@pytest.mark.parametrize("logits_optimization", ["none", "memory"])
@pytest.mark.parametrize("checkpointing", [True, False])
def test_the_speed_up_is_that_of_plan(checkpointing, logits_optimization, head_features):
    """Of actor and critic; on rows that a budget cuts, too."""
    config, lengths = config_of("Qwen3-0.6B"), RowLengths.alike(4, 8, 4096, 512)
    costs = update_costs(checkpointing, logits_optimization)
    ratios = []
    for budget in (2 * 8192, 6144):
        told = ShareCounts()
        for rows in split_micro_batches(lengths.groups, lengths.prompts, lengths.responses, budget, "budget"):
            groups = [(4096, [512] * len(group)) for group in rows_by_group([lengths.groups[row] for row in rows])]
            work = ModelWork.of(config, head_features).of_groups(groups)
            told.add_micro_batch(1, 1, [lengths.groups[row] for row in rows], [False] * len(rows), work)
        predicted = predict(
            config,
            lengths,
            ranks=1,
            budget=budget,
            checkpointing=checkpointing,
            logits_optimization=logits_optimization,
            head_features=head_features,
        )
        ratios.append(told.speed_up(costs))
        assert ratios[-1] == predicted.speedup(predicted.group_placed).update
    assert ratios[0] > ratios[1] > 1
    if (checkpointing, logits_optimization, head_features) == (True, "none", None):
        assert f"{ratios[0]:.2f}" == "4.27", "and a count of the head on responses alone gives 3.67"
