"""Exact totals over micro-batches, mini-batches, epochs and ranks, in the form in which verl gathers metrics."""

from itertools import chain

import pytest

from zorro_verl.estimate import PassCosts
from zorro_verl.flops import Work
from zorro_verl.metrics import FALLBACK_REASONS, ShareCounts, skipped_step_metric

NAMES = {
    "zorro/tokens_total",
    "zorro/tokens_packed",
    "zorro/token_ratio",
    "zorro/flop_ratio",
    "zorro/groups",
    "zorro/groups_split",
    "zorro/skipped_steps",
    *(f"zorro/fallback/{reason}" for reason in FALLBACK_REASONS),
}


def counts_of(*micro_batches):
    """Counts of micro-batches given as ``{prompt: rows}``: prompts of 10 tokens, responses of 2, 7 and 3 of work.

    The head takes 1 of the 3, and 5 on a prompt.
    """
    counts = ShareCounts()
    for groups in micro_batches:
        rows = sum(groups.values())
        fingerprints = [prompt for prompt, n in groups.items() for _ in range(n)]
        counts.prompt_lens |= dict.fromkeys(groups, 10)
        work = Work(10 * rows, 7 * len(groups) + 3 * rows, rows, 5 * rows)
        counts.add_micro_batch(12 * rows, 10 * len(groups) + 2 * rows, fingerprints, [False] * rows, work)
    return counts


def trained(steps):
    """What a driver gets of ``steps[mini-batch][rank]`` counts: verl's worker flattens ranks, then mini-batches."""
    from verl.utils.py_functional import append_to_dict

    metrics = {}
    for ranks in steps:
        gathered = {}
        for rank, counts in enumerate(ranks):
            reported = (
                counts.to_metrics() | {"pg_loss": [0.1, 0.2]} | skipped_step_metric(rank == 0 and ranks is steps[0])
            )
            for key, value in reported.items():
                gathered.setdefault(key, []).append(value)
        append_to_dict(metrics, {key: list(chain.from_iterable(value)) for key, value in gathered.items()})
    return metrics


def inferred(ranks):
    """The same for log-probs, which verl leaves as one list a rank."""
    metrics = {"loss": 0.0}
    for counts in ranks:
        for key, value in counts.to_metrics().items():
            metrics.setdefault(key, []).append(value)
    return metrics


def test_totals_over_ranks_and_mini_batches():
    metrics = trained(
        [
            [counts_of({"a": 4}, {"b": 4}), counts_of({"c": 4, "d": 4})],
            [counts_of({"e": 4, "f": 4}), counts_of({"g": 4}, {"h": 4})],
        ]
    )
    counts = ShareCounts.pop_from(metrics)
    assert metrics == {"pg_loss": [0.1, 0.2] * 4}, "nothing of ours is left for verl to average"
    step = counts.step_metrics(epochs=1)
    assert step.keys() == NAMES
    assert step["zorro/tokens_total"] == 8 * 4 * 12
    assert step["zorro/tokens_packed"] == 8 * (10 + 4 * 2)
    assert step["zorro/token_ratio"] == pytest.approx(384 / 144)
    assert step["zorro/flop_ratio"] == pytest.approx(8 * 4 * 10 / (8 * (7 + 4 * 3)))
    assert step["zorro/groups"] == 8
    assert step["zorro/groups_split"] == 0
    assert step["zorro/skipped_steps"] == 1
    assert all(step[f"zorro/fallback/{reason}"] == 0 for reason in FALLBACK_REASONS)


def test_the_best_ratio_and_what_keeps_a_step_from_it():
    """Prompts of 10: ``a`` is on two ranks, and on one of them in two micro-batches; ``b`` is whole."""
    ranks = [counts_of({"a": 2, "b": 3}, {"a": 1}), counts_of({"a": 1}, {"c": 1})]
    counts = ShareCounts.pop_from(trained([ranks]))
    assert counts.repeats(epochs=1) == (10, 10, 0)
    assert counts.token_ratio == 8 * 12 / (50 + 16)
    assert counts.token_ratio_best(epochs=1) == 8 * 12 / (30 + 16)
    assert sorted(counts.rows_by_prompt(epochs=1)) == [1, 3, 4]


@pytest.mark.parametrize("epochs", [1, 2, 3])
def test_the_best_ratio_has_each_prompt_once_in_each_epoch(epochs):
    steps = [[counts_of({"a": 4}, {"b": 1}, {"c": 3}), counts_of({"c": 1})]] * epochs
    counts = ShareCounts.pop_from(trained(steps))
    assert counts.token_ratio_best(epochs) == epochs * 9 * 12 / (epochs * (30 + 18))
    assert counts.repeats(epochs) == (10 * epochs, 0, 0)
    assert counts.rows_by_prompt(epochs) == [4, 1, 4]


def test_nothing_is_lost_where_no_group_is_cut():
    """To the last digit: dashboards compare the two."""
    steps = [[counts_of({"a": 4}, {"b": 1}), counts_of({"c": 3})]]
    counts = ShareCounts.pop_from(trained(steps))
    assert counts.token_ratio_best(1) == counts.token_ratio == 8 * 12 / (30 + 16)


def test_rows_with_media_could_be_shared_at_best():
    """Three rows of "a" left alone beside two that share, and two of "b" alone."""
    counts = ShareCounts()
    counts.add_micro_batch(84, 64, "aaaaabb", [True] * 3 + [False] * 2 + [True] * 2, Work(0, 0, 0, 0))
    counts.prompt_lens = {"a": 10, "b": 10}
    assert counts.repeats(1) == (0, 0, 40)
    assert counts.token_ratio_best(1) == 84 / (64 - 40)


def test_what_workers_say_beside_counts_arrives_once():
    """As texts and flags that verl could not average, from every rank and mini-batch, and from scoring."""
    one, other = counts_of({"a": 2}), counts_of({"b": 2})
    one.shared = other.shared = "Model: attention of 2 layers shared"
    other.over_budget = 1
    for metrics in (trained([[one, other], [other, one]]), inferred([other, one, other])):
        counts = ShareCounts.pop_from(metrics)
        assert counts.shared == "Model: attention of 2 layers shared"
        assert counts.over_budget == 2
        assert counts.prompt_lens == {"a": 10, "b": 10}
        assert not any(name.startswith("zorro/") for name in metrics)


def test_what_a_worker_tells_is_harmless_to_who_averages_it():
    """A trainer of someone's own, which calls the workers itself, reduces all that they report."""
    from verl.utils.metric import reduce_metrics

    counts = counts_of({"a": 2}, {"b": 2})
    counts.prompt_lens, counts.shared = {1: 10, 2: 10}, "Modèle: attention of 2 layers shared"
    told = {name: values for name, values in counts.to_metrics().items() if name != "zorro/pieces"}
    assert all(isinstance(float(value), float) for value in reduce_metrics(told).values())
    assert ShareCounts.pop_from(counts.to_metrics()).shared == counts.shared


def test_plain_floats_only():
    """Loggers take no tensors, and a mean of ints and floats changes type from step to step."""
    step = ShareCounts.pop_from(trained([[counts_of({"a": 1, "b": 3}, {"b": 1})]])).step_metrics(epochs=1)
    assert {type(value) for value in step.values()} == {float}


def test_a_group_cut_over_micro_batches_and_ranks_is_one_group():
    """``a`` lies in three micro-batches of two ranks; two of its rows went through the model alone."""
    ranks = [counts_of({"a": 2, "b": 3}, {"a": 1}), counts_of({"a": 1, "c": 1})]
    step = ShareCounts.pop_from(trained([ranks])).step_metrics(epochs=1)
    assert step["zorro/groups"] == 3
    assert step["zorro/groups_split"] == 1
    assert step["zorro/fallback/group_cut"] == 2
    assert step["zorro/tokens_packed"] == (20 + 10) + (10 + 2) + (20 + 4)


def test_rows_with_media_count_where_they_could_have_been_shared():
    """Rows of prompt "a" stay alone on two ranks, beside one of it without media; "b" has one row, "c" is cut."""
    counts = [ShareCounts() for _ in range(2)]
    counts[0].add_micro_batch(60, 50, "aaabc", [True, True, False, True, False], Work(60, 50, 0, 0))
    counts[1].add_micro_batch(36, 34, "acc", [True, False, False], Work(36, 34, 0, 0))
    step = ShareCounts.pop_from(trained([counts])).step_metrics(epochs=1)
    assert step["zorro/fallback/multimodal"] == 3
    assert step["zorro/fallback/group_cut"] == 1
    assert step["zorro/groups_split"] == 1
    assert step["zorro/groups"] == 3


def test_a_row_that_is_alone_in_its_group_is_no_fallback():
    step = counts_of({"a": 1, "b": 1}, {"c": 1}).step_metrics(epochs=1)
    assert step["zorro/groups"] == 3
    assert step["zorro/groups_split"] == step["zorro/fallback/group_cut"] == 0
    assert step["zorro/token_ratio"] == step["zorro/flop_ratio"] == 1


@pytest.mark.parametrize("epochs", [1, 2, 3])
def test_epochs_see_each_group_again(epochs):
    """A group that is whole in each epoch was not cut by being seen twice; one cut in each was cut each time."""
    steps = [[counts_of({"a": 4}, {"b": 1}, {"c": 3}), counts_of({"c": 1})]] * epochs
    step = ShareCounts.pop_from(trained(steps)).step_metrics(epochs)
    assert step["zorro/groups"] == 3 * epochs
    assert step["zorro/groups_split"] == epochs
    assert step["zorro/fallback/group_cut"] == epochs
    assert step["zorro/tokens_total"] == 9 * 12 * epochs
    assert step["zorro/flop_ratio"] == pytest.approx(9 * 10 / (4 * 7 + 9 * 3))  # "c" is computed twice an epoch


def test_log_probs_are_gathered_one_level_deeper():
    counts = ShareCounts.pop_from(metrics := inferred([counts_of({"a": 4}), counts_of({"b": 2}, {"c": 2})]))
    assert metrics == {"loss": 0.0}
    assert counts.token_ratio == pytest.approx(8 * 12 / (30 + 16))
    assert counts.flop_ratio == pytest.approx(8 * 10 / (3 * 7 + 8 * 3))
    assert counts.summary()["groups"] == 3


def test_utilisation_of_what_was_executed():
    """verl's number counts 80 of work, 45 of which was executed."""
    counts = counts_of({"a": 4}, {"b": 2, "c": 2})
    assert counts.executed_mfu(0.4) == pytest.approx(0.4 * 45 / 80)
    assert counts_of({"a": 1}, {"b": 1}).executed_mfu(0.4) == 0.4, "the same number where nothing is shared"
    assert ShareCounts().executed_mfu(0.4) == 0


def test_the_speed_up_weighs_layers_and_head_by_what_a_pass_costs():
    """Of 8 rows of 3 prompts, as they arrive from two ranks: the stock head runs on prompts, too."""
    counts = ShareCounts.pop_from(trained([[counts_of({"a": 4}), counts_of({"b": 2, "c": 2})]]))
    assert counts.speed_up(PassCosts(1, 1)) == 8 * (9 + 6) / (3 * 7 + 8 * 3)
    assert counts.speed_up(PassCosts(4, 3)) == 8 * (4 * 9 + 3 * 6) / (4 * (3 * 7 + 8 * 2) + 3 * 8)
    assert ShareCounts().speed_up(PassCosts(4, 3)) == 0


def test_work_of_large_models_is_added_exactly():
    """A 70B model on a million tokens is past what a float holds to the last digit, and so is its sum."""
    counts = ShareCounts()
    for work in (Work(10**17 + 1, 10**16 + 1, 0, 0), Work(1, 1, 0, 0)):
        counts.add_micro_batch(2, 2, "a", [False], work)
    total = ShareCounts.pop_from(trained([[counts, counts]]))
    assert (total.work_counted, total.work_executed) == (2 * 10**17 + 4, 2 * 10**16 + 4)


def test_metrics_of_another_engine_are_left_alone():
    metrics = {"pg_loss": [0.1]}
    assert ShareCounts.pop_from(metrics) is None
    assert metrics == {"pg_loss": [0.1]}


def test_nothing_counted_is_no_division_by_zero():
    step = ShareCounts().step_metrics(epochs=1)
    assert step.keys() == NAMES
    assert step["zorro/token_ratio"] == 0


def test_reasons_are_a_closed_list():
    """Dashboards rely on them: each is there in each step, and none comes and goes."""
    assert FALLBACK_REASONS == ("group_cut", "multimodal")
    assert set(ShareCounts().summary()["fallback"]) == set(FALLBACK_REASONS)
    assert set(counts_of({"a": 1}, {"a": 1}).summary()["fallback"]) == set(FALLBACK_REASONS)
