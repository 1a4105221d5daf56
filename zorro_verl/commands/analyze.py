"""`zorro-verl analyze`: what sharing saves on rollouts that were dumped."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from zorro_verl.commands.terminal import Json, errors_in_one_line, make_console, make_table, print_json, show_progress

if TYPE_CHECKING:  # `zorro-verl --help` does without torch
    from array import array
    from collections.abc import Callable

    from zorro_verl.analysis import Outlook, Quantiles, Statistics

_GIB, _MIB = 2**30, 2**20


def analyze(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE", help="Dumps (.jsonl, .parquet) or folders of them, as trainer.rollout_data_dir."
        ),
    ],
    tokenizer: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Tokenizer of the model, a folder or a name on the hub, for text."),
    ] = None,
    prompt_column: Annotated[
        str | None, typer.Option(metavar="NAME", help="Column of prompts; by default the usual names.")
    ] = None,
    response_column: Annotated[
        str | None, typer.Option(metavar="NAME", help="Column of responses; by default the usual names.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="CONFIG", help="Predict speed-up and memory for this model: a folder or a name."),
    ] = None,
    dp: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Data-parallel ranks of the prediction; 1 by default.", show_default=False
        ),
    ] = None,
    budget: Annotated[
        int | None,
        typer.Option(
            metavar="TOKENS",
            min=1,
            help="ppo_max_token_len_per_gpu of the prediction; by default what holds the largest group.",
        ),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw lengths, ratios and predicted times.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Say what sharing saves on rollouts: groups, lengths, token ratio, and what prompts have in common beyond that.

    Reads what veRL writes to trainer.rollout_data_dir, or parquet with prompts and responses as text or token ids.
    Text is measured in characters unless --tokenizer is given. Nothing is run on a model.
    """
    with errors_in_one_line("analyze"):
        from zorro_verl.analysis import collect_steps, foresee, summarize
        from zorro_verl.charts import chart_statistics, check_plot, save
        from zorro_verl.rollouts import Columns, find_files, load_tokenizer, read_rows

        check_plot(plot)
        if model is None and (dp is not None or budget is not None):
            raise ValueError("--dp, --budget: expected --model as well, for which they predict, got none")
        found = find_files(files)
        config = _config(model)
        reader = load_tokenizer(tokenizer) if tokenizer is not None else None
        rows = read_rows(found, Columns(prompt_column, response_column), reader, show_progress)
        statistics = summarize(collect_steps(rows))
        outlook = None if config is None else foresee(config, statistics, dp or 1, budget, show_progress)
        if plot is not None:
            save(chart_statistics(statistics, outlook), plot)
        if as_json:
            print_json(record(statistics, outlook))
        else:
            show(statistics, outlook, reader)


def _config(model: str | None) -> Any:
    if model is None:
        return None
    from zorro_verl.known_models import config_of

    return config_of(model)


def record(statistics: Statistics, outlook: Outlook | None) -> dict[str, Any]:
    """What is shown, for a program; lengths in ``unit``, memory in bytes."""
    difference = statistics.difference
    return {
        "unit": statistics.unit,
        "read_from": sorted(measure.value for measure in statistics.measures),
        "rows": statistics.num_rows,
        "prompts": statistics.num_prompts,
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
            "position": difference.position,
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
            "ranks": outlook.ranks,
            "ppo_max_token_len_per_gpu": outlook.budget,
            "ways": [way._asdict() for way in outlook.ways],
            "notes": list(outlook.notes),
        },
    }


def show(statistics: Statistics, outlook: Outlook | None, tokenizer: Any) -> None:
    """The statistics as tables, on standard output."""
    console = make_console()
    s = statistics
    steps = "1 step" if len(s.steps) == 1 else f"{len(s.steps):,} steps"
    sizes = ", ".join(f"{share.groups:,} of {share.size}" for share in s.sizes[:6])
    more = f" and {len(s.sizes) - 6} other sizes" * (len(s.sizes) > 6)
    console.print(
        f"[bold]{s.num_rows:,} rows, {s.num_prompts:,} prompts, {steps}[/bold]\n  rows of a prompt: {sizes}{more}"
    )
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
    console.print(
        f"  predicted on {outlook.ranks} data-parallel rank(s), ppo_max_token_len_per_gpu={outlook.budget}, "
        "log_prob / update:\n    speed-up as floating-point work bounds it, memory of the largest micro-batch"
    )
    sizes = [size for way in outlook.ways for size in (way.log_prob_memory, way.update_memory) if size is not None]
    unit = "GiB" if max(sizes, default=0) >= _GIB else "MiB"
    table = make_table("", ">token ratio", ">speed-up", f">memory, {unit}", ">groups cut")
    for way in outlook.ways:
        table.add_row(
            WAYS[way.name],
            f"{way.log_prob_token_ratio:.2f} / {way.update_token_ratio:.2f}",
            _pair(way.log_prob_speedup, way.update_speedup),
            _pair(*(m and m / (_GIB if unit == "GiB" else _MIB) for m in (way.log_prob_memory, way.update_memory))),
            "" if way.name == "stock" else f"{way.groups_cut:,}",
        )
    console.print(table)
    for note in outlook.notes:
        console.print(f"  Note: {escape(note)}")


def _pair(log_prob: float | None, update: float | None) -> str:
    return "" if log_prob is None or update is None else f"{log_prob:.2f} / {update:.2f}"


def warnings(statistics: Statistics, tokenizer: Any) -> list[str]:
    """What keeps rows from sharing that were to share."""
    difference = statistics.difference
    if difference is None:
        return []
    text = _reader(statistics, tokenizer)
    one, other = text(difference.one_has), text(difference.other_has)
    return [
        f"{statistics.samples_differing:,} sample(s) have rows with different prompts, which do not share. "
        f"{difference.one} and {difference.other} are of one sample, and first differ at {statistics.unit[:-1]} "
        f"{difference.position}: {one!r} and {other!r}. This is often a date or a random id in the prompt's template; "
        f"without it, {statistics.sample_overlap:,} {statistics.unit} and more would be shared."
    ]


def _reader(statistics: Statistics, tokenizer: Any) -> Callable[[array[int]], Any]:
    if statistics.unit == "characters":
        return lambda points: "".join(map(chr, points))
    return list if tokenizer is None else lambda ids: tokenizer.decode(list(ids))


def notes(statistics: Statistics) -> list[str]:
    """What the lengths are not."""
    from zorro_verl.rollouts import Measure

    found = []
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
