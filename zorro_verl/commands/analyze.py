"""`zorro-verl analyze`: what sharing saves on rollouts that were dumped."""

from __future__ import annotations

from math import floor, log10
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from zorro_verl.commands.dumps import Plot, PromptColumn, ResponseColumn, Tokenizer, check_at_least_one
from zorro_verl.commands.terminal import Json, errors_in_one_line, make_console, make_table, print_json, show_progress

if TYPE_CHECKING:  # `zorro-verl --help` does without torch
    from array import array
    from collections.abc import Callable

    from zorro_verl.analysis import Outlook, Quantiles, Setup, Statistics

_GIB = 2**30


def analyze(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE", help="Dumps (.jsonl, .parquet) or folders of them, as trainer.rollout_data_dir."
        ),
    ],
    tokenizer: Tokenizer = None,
    prompt_column: PromptColumn = None,
    response_column: ResponseColumn = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Predict speed-up and memory for this model: a checkpoint folder, a config.json, or a name.",
        ),
    ] = None,
    dp: Annotated[
        int | None, typer.Option(metavar="N", help="Data-parallel ranks of the prediction; 1 by default.")
    ] = None,
    budget: Annotated[
        int | None,
        typer.Option(
            metavar="TOKENS",
            help="ppo_max_token_len_per_gpu of the prediction; by default what holds the largest group.",
        ),
    ] = None,
    mini_batch: Annotated[
        int | None,
        typer.Option(
            metavar="PROMPTS", help="ppo_mini_batch_size of the prediction; by default all prompts of a step."
        ),
    ] = None,
    logits_optimization: Annotated[
        str | None,
        typer.Option(metavar="MODE", help="Of the prediction: none, compute or memory; none by default."),
    ] = None,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Say what sharing saves on rollouts: groups, lengths, token ratio, and what prompts have in common beyond that.

    Reads what veRL writes to trainer.rollout_data_dir, or parquet with prompts and responses as text or token ids.
    Text is measured in characters unless --tokenizer is given. Nothing is run on a model.
    """
    with errors_in_one_line("analyze"):
        check_at_least_one(dp=dp, budget=budget, mini_batch=mini_batch)
        from zorro_verl.analysis import collect_steps, foresee, summarize
        from zorro_verl.charts import chart_statistics, check_plot, save
        from zorro_verl.rollouts import Columns, find_files, load_tokenizer, read_rows

        check_plot(plot)
        setup = _setup(model, dp, budget, mini_batch, logits_optimization)
        found = find_files(files)
        config = _config(model)
        reader = load_tokenizer(tokenizer) if tokenizer is not None else None
        rows = read_rows(found, Columns(prompt_column, response_column), reader, show_progress)
        statistics = summarize(collect_steps(rows))
        outlook = None if config is None else foresee(config, statistics, setup, show_progress)
        if plot is not None:
            save(chart_statistics(statistics, outlook), plot)
        if as_json:
            print_json(record(statistics, outlook))
        else:
            show(statistics, outlook, reader)


def _setup(
    model: str | None, dp: int | None, budget: int | None, mini_batch: int | None, logits_optimization: str | None
) -> Setup:
    from zorro_verl.analysis import Setup
    from zorro_verl.log_probs import LOGITS_OPTIMIZATIONS

    asked = {"--dp": dp, "--budget": budget, "--mini-batch": mini_batch, "--logits-optimization": logits_optimization}
    given = [name for name, value in asked.items() if value is not None]
    if model is None and given:
        raise ValueError(f"{', '.join(given)}: expected --model as well, whose prediction it changes, got none")
    mode = logits_optimization or "none"
    if mode not in LOGITS_OPTIMIZATIONS:
        raise ValueError(f"--logits-optimization: expected {' or '.join(LOGITS_OPTIMIZATIONS)}, got {mode!r}")
    return Setup(dp or 1, budget, mini_batch, mode)


def _config(model: str | None) -> Any:
    if model is None:
        return None
    from zorro_verl.known_models import config_of

    return config_of(model)


def record(statistics: Statistics, outlook: Outlook | None) -> dict[str, Any]:
    """What is shown, for a program; lengths and positions in ``unit``, memory in bytes."""
    difference = statistics.difference
    return {
        "unit": statistics.unit,
        "read_from": sorted(measure.value for measure in statistics.measures),
        "rows": statistics.num_rows,
        "prompts": statistics.num_prompts,
        "padding_rows": statistics.padding,
        "group_sizes": {str(share.size): share.groups for share in statistics.sizes},
        "prompt_length": statistics.prompt_quantiles._asdict(),
        "response_length": statistics.response_quantiles._asdict(),
        "total": statistics.tokens,
        "packed": statistics.packed,
        "token_ratio": statistics.token_ratio,
        "token_ratio_by_group_size": {str(share.size): share.token_ratio for share in statistics.sizes},
        "token_ratio_of_n": {str(n): ratio for n, ratio in statistics.ratio_of_rollouts.items()},
        "largest_group": statistics.largest_group,
        "prefix_overlap": statistics.overlap,
        "prefix_overlap_share": statistics.overlap_share,
        "prefix_overlap_of_samples": statistics.sample_overlap,
        "samples_with_different_prompts": statistics.samples_differing,
        "first_difference": None
        if difference is None
        else {
            "sample": difference.sample,
            "rows": [difference.one, difference.other],
            "position_from_1": difference.position,
        },
        "steps": [
            {
                "file": step.step.file,
                "step": step.step.number,
                "rows": len(step.rows.groups),
                "prompts": len(step.rows.by_group()),
                "total": step.rows.tokens,
                "packed": step.rows.packed,
                "token_ratio": step.rows.token_ratio,
            }
            for step in statistics.steps
        ],
        "prediction": None
        if outlook is None
        else {
            "ranks": outlook.setup.ranks,
            "ppo_max_token_len_per_gpu": outlook.setup.budget,
            "assumes": {
                "dtype": outlook.setup.dtype,
                "enable_gradient_checkpointing": outlook.setup.checkpointing,
                "logits_optimization": outlook.setup.logits_optimization,
                "ppo_mini_batch_size": outlook.setup.mini_batch,
                "ulysses_sequence_parallel_size": outlook.setup.sequence_parallel,
            },
            "ways": [way._asdict() for way in outlook.ways],
            "notes": list(outlook.notes),
        },
    }


def show(statistics: Statistics, outlook: Outlook | None, tokenizer: Any) -> None:
    """The statistics as tables, on standard output."""
    console = make_console()
    s = statistics
    counts = ((s.num_rows, "row"), (s.num_prompts, "prompt"), (len(s.steps), "step"))
    counted = ", ".join(f"{number:,} {what}{'s' * (number > 1)}" for number, what in counts)
    sizes = ", ".join(f"{share.groups:,} of {share.size}" for share in s.sizes[:6])
    more = f" and {len(s.sizes) - 6} other sizes" * (len(s.sizes) > 6)
    console.print(f"[bold]{counted}[/bold]\n  rows of a prompt: {sizes}{more}")
    console.print(_lengths_table(s.unit, s.prompt_quantiles, s.response_quantiles))
    ratios = [step.rows.token_ratio for step in s.steps]
    by_step = f" (steps: {min(ratios):.2f} to {max(ratios):.2f})" * (len(ratios) > 1)
    budget = "; ppo_max_token_len_per_gpu of at least this keeps it whole" * (s.unit == "tokens")
    console.print(
        f"  {s.unit}: {s.tokens:,} in rows, {s.packed:,} with each prompt once\n"
        f"  token ratio: [bold]{s.token_ratio:.2f}[/bold]{by_step}\n"
        f"  largest group: {s.largest_group:,} packed {s.unit}{budget}\n"
        f"  prefixes that prompts have in common beyond that: {s.overlap:,} {s.unit}, {s.overlap_share:.1%} of the "
        "packed ones\n"
        "    (a full prefix tree over each step would spare them; this package shares whole\n    prompts only)"
    )
    table = make_table("rows of a prompt (n)", *(f">{n}" for n in s.ratio_of_rollouts))
    table.add_row("token ratio with these lengths", *(f"{ratio:.2f}" for ratio in s.ratio_of_rollouts.values()))
    console.print(table)
    if outlook is not None:
        _show_outlook(outlook)
    for text in warnings(s, tokenizer):
        console.print(f"  [bold red]Warning:[/bold red] {escape(text)}")
    for text in notes(s):
        console.print(f"  Note: {escape(text)}")


def _lengths_table(unit: str, prompts: Quantiles, responses: Quantiles) -> Any:
    table = make_table(f"length in {unit}", ">10 %", ">median", ">90 %", ">99 %", ">longest")
    table.add_row("prompts, each once", *(f"{length:,}" for length in prompts))
    table.add_row("responses", *(f"{length:,}" for length in responses))
    return table


def _show_outlook(outlook: Outlook) -> None:
    from zorro_verl.charts import WAYS

    console = make_console()
    ranks, budget = outlook.setup.ranks, outlook.setup.budget
    console.print(
        f"  predicted on {ranks:,} data-parallel rank{'s' * (ranks > 1)}, ppo_max_token_len_per_gpu={budget}, "
        "log_prob / update:\n    speed-up as floating-point work bounds it, memory of the largest micro-batch"
    )
    table = make_table("", ">token ratio", ">speed-up", ">memory, GiB", ">groups cut")
    for way in outlook.ways:
        table.add_row(
            WAYS[way.name],
            f"{way.log_prob_token_ratio:.2f} / {way.update_token_ratio:.2f}",
            _pair(way.log_prob_speedup, way.update_speedup, "{:.2f}".format),
            _pair(way.log_prob_memory, way.update_memory, lambda size: _three_digits(size / _GIB)),
            "" if way.name == "stock" else f"{way.groups_cut:,}",
        )
    console.print(table)
    console.print(f"  Assumed: {outlook.setup}.")
    for note in outlook.notes:
        console.print(f"  Note: {escape(note)}")


def _pair(log_prob: float | None, update: float | None, text: Callable[[float], str]) -> str:
    return "" if log_prob is None or update is None else f"{text(log_prob)} / {text(update)}"


def _three_digits(number: float) -> str:
    """A positive number with three significant digits, and without an exponent."""
    return f"{number:,.{max(0, 2 - floor(log10(number)))}f}"


def warnings(statistics: Statistics, tokenizer: Any) -> list[str]:
    """What keeps rows from sharing that were to share."""
    difference = statistics.difference
    if difference is None:
        return []
    text = _reader(statistics, tokenizer)
    one, other = text(difference.one_has), text(difference.other_has)
    samples = statistics.samples_differing
    return [
        f"{'1 sample has' if samples == 1 else f'{samples:,} samples have'} rows with different prompts, which do not "
        f"share. {difference.one} and {difference.other} are of one sample, and differ from {statistics.unit[:-1]} "
        f"{difference.position} on: {one!r} and {other!r}. This is often a date or a random id in the prompt's "
        f"template; without it, {statistics.sample_overlap:,} {statistics.unit} and more would be shared."
    ]


def _reader(statistics: Statistics, tokenizer: Any) -> Callable[[array[int]], Any]:
    if statistics.unit == "characters":
        return lambda points: "".join(map(chr, points))
    return list if tokenizer is None else lambda ids: tokenizer.decode(list(ids))


def notes(statistics: Statistics) -> list[str]:
    """What the lengths are not."""
    from zorro_verl.rollouts import Measure

    found = []
    if statistics.padding:
        rows = "1 row is" if statistics.padding == 1 else f"{statistics.padding:,} rows are"
        found.append(f"{rows} left out, which veRL added so that a step's rows divide: nobody sampled them.")
    if Measure.CHARACTERS in statistics.measures:
        found.append(
            "lengths are in characters, as text without --tokenizer has no tokens; ratios in tokens are similar, "
            "budgets are not."
        )
    if Measure.TEXT in statistics.measures:
        found.append(
            "a dump's text is without special tokens, and is tokenized again: rows in training are a few tokens longer."
        )
    elif Measure.CHARACTERS in statistics.measures:
        found.append("a dump's text is without special tokens.")
    return found
