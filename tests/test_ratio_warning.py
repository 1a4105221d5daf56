"""One warning when prompts are shared far less than they could be: each reason, its setting, and silence otherwise."""

import logging

import pytest
import torch

from zorro_verl.flops import Work
from zorro_verl.grouping import Rows, exclusive_cumsum, find_prompt_groups
from zorro_verl.metrics import ShareCounts
from zorro_verl.ratio_warning import FAR_BELOW, RatioWarning, Update

PROMPT, RESPONSE = 100, 10


def counts_of(*calls, over_budget=0, alone=()):
    """Each call a list of micro-batches ``{prompt: rows}``; prompts of 100 tokens, responses of 10."""
    total = ShareCounts()
    total.calls = []
    for micro_batches in calls:
        counts = ShareCounts()
        for groups in micro_batches:
            rows = [name for name, n in groups.items() for _ in range(n)]
            apart = [name in alone for name in rows]
            packed = PROMPT * (len(set(groups) - set(alone)) + sum(apart)) + RESPONSE * len(rows)
            counts.add_micro_batch((PROMPT + RESPONSE) * len(rows), packed, rows, apart, Work(0, 0, 0, 0))
        total.tokens_total += counts.tokens_total
        total.tokens_packed += counts.tokens_packed
        total.calls += counts.calls
    total.prompt_lens = dict.fromkeys("abcdefgh", PROMPT)
    total.over_budget = over_budget
    return total


def update(mini_batch_size=4, rollouts=4, ranks=2, placed=True):
    key = "actor_rollout_ref.actor"
    return Update("update_actor", key, f"{key}.ppo_max_token_len_per_gpu", mini_batch_size, rollouts, ranks, placed)


def said(caplog, counts, how, epochs=1):
    caplog.clear()
    with caplog.at_level(logging.INFO):
        warning = RatioWarning()
        for _ in range(3):
            warning.check(counts, epochs, lambda: how)
    assert all(record.levelno == logging.WARNING for record in caplog.records)
    return [record.getMessage() for record in caplog.records]


TORN = [[{"a": 2, "b": 2}], [{"a": 2, "b": 2}]]  # each prompt on both ranks: 280 + 280 tokens of 880, and 280 is enough


def test_ranks_that_divide_no_mini_batch_into_whole_groups(caplog):
    (text,) = said(caplog, counts_of(*TORN), update(mini_batch_size=3))
    assert text.startswith(f"update_actor: the token ratio is {880 / 480:.2f}, and this batch allows {880 / 280:.2f}: ")
    assert (
        "actor_rollout_ref.actor.ppo_mini_batch_size=3 on 2 data-parallel ranks is 6 rows for each of them, no" in text
    )
    assert "groups of 4. Set it to a multiple of 2." in text
    assert text.endswith("Said once.")


def test_rows_that_were_not_placed(caplog):
    (text,) = said(caplog, counts_of(*TORN), update(placed=False))
    assert "Set trainer.balance_batch=True." in text


def test_groups_of_sizes_that_fill_no_mini_batch(caplog):
    counts = counts_of([{"a": 2, "b": 1}], [{"a": 2, "b": 1}])
    (text,) = said(caplog, counts, update())
    assert "groups of 2 to 4 rows can't be put whole into mini-batches of 8 rows on each of 2 data-parallel" in text
    assert "larger actor_rollout_ref.actor.ppo_mini_batch_size" in text


def test_another_rank_that_needs_more_micro_batches(caplog):
    counts = counts_of([{"a": 2}, {"a": 2}], [{"b": 2}, {"b": 2}])
    (text,) = said(caplog, counts, update())
    assert "Raise actor_rollout_ref.actor.ppo_max_token_len_per_gpu if memory allows, or" in text
    assert "or actor_rollout_ref.actor.ppo_mini_batch_size." in text


def test_a_budget_below_a_group_is_left_to_the_engine(caplog):
    """Which has said so with its figures; but only where that is what costs most."""
    counts = counts_of([{"a": 2}, {"a": 2}], [{"b": 2}, {"b": 2}], over_budget=1)
    assert said(caplog, counts, update()) == []
    (text,) = said(caplog, counts_of(*TORN, over_budget=1), update(placed=False))
    assert "balance_batch" in text


def test_rows_with_images(caplog):
    (text,) = said(caplog, counts_of([{"a": 4, "b": 4}], alone="a"), update())
    assert "images or videos go through the model whole. There is nothing to set" in text


def test_the_larger_cause_is_named(caplog):
    counts = counts_of([{"a": 2}, {"a": 1}], [{"a": 1}], [{"a": 4}])
    (text,) = said(caplog, counts, update(placed=False))
    assert "balance_batch" in text, "two repeats by placement, one by micro-batches"
    counts = counts_of([{"a": 1}, {"a": 1}, {"a": 1}], [{"a": 1}])
    (text,) = said(caplog, counts, update(placed=False))
    assert "Raise actor_rollout_ref.actor.ppo_max_token_len_per_gpu" in text, "one and two"


@pytest.mark.parametrize(
    "counts",
    [
        pytest.param(counts_of([{"a": 4, "b": 4}], [{"c": 4, "d": 4}]), id="nothing-is-lost"),
        pytest.param(counts_of([dict.fromkeys("abcd", 1)], [dict.fromkeys("efgh", 1)]), id="single-rows"),
        pytest.param(counts_of([dict.fromkeys("abcdefg", 4)], [{"g": 1, "h": 3}]), id="little-is-lost"),
    ],
)
def test_silence(caplog, counts):
    assert said(caplog, counts, update(mini_batch_size=3, placed=False)) == []


@pytest.mark.parametrize("epochs", [1, 2, 3])
def test_a_group_that_is_seen_again_in_each_epoch_is_not_cut(caplog, epochs):
    whole, torn = [[{"a": 4}], [{"b": 4}]], TORN
    assert said(caplog, counts_of(*whole * epochs), update(), epochs) == []
    assert len(said(caplog, counts_of(*torn * epochs), update(), epochs)) == 1


def test_the_bound(caplog):
    """Just above it nothing is said: 1,000 tokens could be 800."""
    counts = ShareCounts()
    counts.add_micro_batch(1000, 1000, "aab", [True, True, False], Work(0, 0, 0, 0))
    counts.prompt_lens = {"a": 200, "b": 1}
    assert counts.token_ratio == 1 == FAR_BELOW * counts.token_ratio_best(1)
    assert said(caplog, counts, update()) == []
    counts.prompt_lens = {"a": 201, "b": 1}
    assert len(said(caplog, counts, update())) == 1


def rows_of(prompts):
    tokens = [torch.tensor(prompt) for prompt in prompts]
    lens = torch.tensor([len(prompt) for prompt in tokens])
    return Rows(torch.cat(tokens), torch.zeros(int(lens.sum()), dtype=torch.int64), exclusive_cumsum(lens), lens)


def said_of_prompts(caplog, prompts, uids, responses=20):
    caplog.clear()
    rows, warning = rows_of(prompts), RatioWarning()
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            warning.check_prompts(rows, find_prompt_groups(rows).tolist(), responses, uids)
    return [record.getMessage() for record in caplog.records]


def drawn(ident):
    """Thirty tokens whose fifth is ``ident``."""
    return [1, 2, 3, 4, ident, *range(6, 31)]


def test_prompts_with_a_random_id(caplog):
    prompts = [drawn(100 + i) for i in range(8)]
    uids = ["x"] * 4 + ["y"] * 4
    (text,) = said_of_prompts(caplog, prompts, uids)
    assert f"a token ratio of {260 / 260:.2f}, and {260 / 80:.2f} if rows that were drawn from one prompt" in text
    assert "of 30 and 30 tokens, differ from token 5 on" in text
    (text,) = said_of_prompts(caplog, [drawn(7)[: 26 + i] for i in range(4)], ["x"] * 4)
    assert "of 26 and 27 tokens, differ from token 27 on" in text


def test_prompts_that_differ_for_a_reason(caplog):
    """Other prompts, one row each of a prompt, later turns, and a single odd row."""
    prompts = [drawn(100 + i) for i in range(8)]
    assert said_of_prompts(caplog, prompts, list("abcdefgh")) == []
    assert said_of_prompts(caplog, prompts, [None] * 8) == []
    assert said_of_prompts(caplog, prompts, ["x", *[None] * 7]) == []
    assert said_of_prompts(caplog, [drawn(7)] * 7 + [drawn(8)], ["x"] * 8, responses=400) == []
    assert said_of_prompts(caplog, [drawn(7)] * 8, ["x"] * 4 + ["y"] * 4) == []


@pytest.mark.parametrize("prompts_first", [True, False])
def test_prompts_and_updates_are_told_of_apart(caplog, prompts_first):
    rows, warning = rows_of([drawn(100 + i) for i in range(8)]), RatioWarning()
    groups = find_prompt_groups(rows).tolist()
    for prompts in (prompts_first, not prompts_first) * 2:
        if prompts:
            warning.check_prompts(rows, groups, 20, ["x"] * 8)
        else:
            warning.check(counts_of(*TORN), 1, lambda: update(placed=False))
    of_prompts, of_update = caplog.records if prompts_first else reversed(caplog.records)
    assert of_prompts.getMessage().startswith("prompts: this batch allows")
    assert of_update.getMessage().startswith("update_actor: the token ratio is")
