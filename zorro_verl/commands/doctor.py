"""`zorro-verl doctor`: what is installed here, which attention will run, and what stands in the way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from zorro_verl.commands.terminal import Json, errors_in_one_line, make_console, make_table, print_json, show_progress
from zorro_verl.findings import TOPICS
from zorro_verl.verify_request import local_folder

if TYPE_CHECKING:  # loads what it examines: `zorro-verl --help` does without
    from zorro_verl.doctor import Report
    from zorro_verl.model_support import ModelSupport


def doctor(
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Look at a model, too: a name such as Qwen3-32B, a checkpoint folder or a config.json. "
            "Weights are not read.",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Check this environment, and a model, for strategy=zorro.

    Says which packages, kernels and devices are here, which versions are supported, which attention will run, and
    whether veRL knows the plug-in. Exits with 0 when training can work here, with 1 and a line for each problem and its
    fix when it can't, with 2 on a mistake.
    """
    with errors_in_one_line("doctor"):
        if model is not None:
            local_folder(model.removesuffix("config.json"))

        from zorro_verl.doctor import examine

        report = examine(model, show_progress)
        if as_json:
            print_json(report.as_json())
        else:
            show(report)
    raise typer.Exit(0 if report.works else 1)


def show(report: Report) -> None:
    """The report as tables and lines, on standard output."""
    console = make_console()
    console.print(f"[bold]zorro-verl {report.version}[/bold]")
    for topic in TOPICS:
        facts = [fact for fact in report.facts if fact.topic == topic]
        has_expected = any(fact.expected for fact in facts)
        table = make_table(topic.replace("_", "-"), "found", *(("supported",) if has_expected else ()))
        for fact in facts:
            found = "[dim]not installed[/dim]" if topic in ("packages", "kernels") else "[dim]none[/dim]"
            found = found if fact.found is None else escape(fact.found)
            table.add_row(escape(fact.name), found, *((escape(fact.expected or ""),) if has_expected else ()))
        console.print(table)
    if report.model is not None and report.model.model_class is not None:
        show_model(report.model, console)
    for note in report.notes:
        console.print(f"Note: {escape(note)}.", soft_wrap=True)
    for problem in report.problems:
        console.print(f"[bold red]Problem[/bold red]: {escape(problem.line)}", soft_wrap=True)
    verdict = "[bold green]Training with strategy=zorro can work here.[/bold green]"
    count = len(report.problems)
    console.print(verdict if report.works else f"[bold red]{count} problem{'s' * (count > 1)}.[/bold red]")


def show_model(model: ModelSupport, console: Console) -> None:
    """What a model shares, and what it asks of a run."""
    console.print(f"[bold]{escape(model.name)}[/bold]: {model.model_type}, loaded by veRL as {model.model_class}")
    table = make_table("layers", ">number", "what is shared")
    for layers in model.layers:
        window = f" of {layers.window}" if layers.window else ""
        table.add_row(f"{layers.kind.replace('_', ' ')}{window}", str(layers.count), layers.sharing)
    console.print(table)
    if model.linear_rule:
        console.print(f"  linear attention is computed by {model.linear_rule}")
    heads = ", ".join(f"{name} {count}" for name, count in model.heads)
    sizes = ", ".join(map(str, model.sequence_parallel_sizes))
    console.print(f"  ulysses_sequence_parallel_size: {sizes} ({heads})")
    console.print(f"  critic: {'possible' if model.critic else 'not possible'}")
