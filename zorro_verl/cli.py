"""The command `zorro-verl`: tables for a person, exit codes for a script.

Exit codes: 0 is success, 1 a comparison that found a difference, 2 a mistake in what was asked, said in one line.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import track as rich_track
from rich.table import Table

if TYPE_CHECKING:  # loads torch and transformers: `zorro-verl --help` does without
    from zorro_verl.verify import Report

T = TypeVar("T")

app = typer.Typer(
    help="Train GRPO and PPO actors in veRL without recomputing the shared prompt for every rollout.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


class Dtype(str, Enum):
    """What `verify` computes in."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float64 = "float64"
    float16 = "float16"


class LinearAttention(str, Enum):
    """How Gated DeltaNet layers share."""

    auto = "auto"
    expand = "expand"
    fork = "fork"


@app.callback()
def zorro_verl() -> None:
    """Commands come after the name, also while there is one."""


@app.command()
def verify(
    model: Annotated[str, typer.Option(help="A checkpoint folder, or a name on the hub.")],
    dtype: Annotated[
        Dtype | None, typer.Option(help="float32 on a CPU and bfloat16 on CUDA by default.", show_default=False)
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    attn_implementation: Annotated[
        str, typer.Option(help="auto, eager, sdpa, flash_attention_2 or flash_attention_3.")
    ] = "auto",
    linear_attention: Annotated[
        LinearAttention, typer.Option(help="How Gated DeltaNet layers share.")
    ] = LinearAttention.auto,
    rows: Annotated[int, typer.Option(help="Rows of the batch.")] = 10,
    prompt: Annotated[int, typer.Option(help="Tokens of its longest prompt.")] = 70,
    response: Annotated[int, typer.Option(help="Tokens of its longest response.")] = 12,
    seed: Annotated[int, typer.Option(help="Of tokens, shape and loss.")] = 0,
    layer_by_layer: Annotated[
        bool | None,
        typer.Option(
            "--layer-by-layer/--whole",
            help="One decoder layer in memory at a time; by default where the whole model would not fit.",
            show_default=False,
        ),
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write everything here, too.")] = None,
) -> None:
    """Compare a checkpoint that shares prompts with the same checkpoint that doesn't.

    Log-probs, entropy and the gradient of every parameter, on a ragged batch of random tokens, against the unpatched
    model on one unpadded row at a time. Exits with 1 where they differ by more than rounding, with 2 on a mistake.
    """
    from zorro_verl.equivalence import Sharing, Sizes
    from zorro_verl.verify import verify as compare

    try:
        report = compare(
            model,
            dtype and dtype.value,
            device,
            Sharing(attn_implementation, linear_attention.value),
            Sizes(rows, prompt, response),
            seed,
            layer_by_layer,
            show_progress,
        )
    except ValueError as error:
        typer.echo(f"zorro-verl verify: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(2) from error
    if json_file is not None:
        json_file.write_text(json.dumps(report.as_json(), indent=2) + "\n")
    show(report)
    raise typer.Exit(0 if report.equal else 1)


def show_progress(items: Iterable[T], what: str, total: int) -> Iterable[T]:
    """A bar on standard error, which goes away at the end."""
    return rich_track(items, what, total, console=Console(stderr=True), transient=True)


def show(report: Report) -> None:
    """The report as text and a table, on standard output."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 120
    kinds = ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in report.layers.items())
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    how = "layer by layer" if report.layer_by_layer else "as a whole"
    console.print(
        f"[bold]{escape(report.model)}[/bold]: {report.model_class} ({report.model_type}), compared {how}\n"
        f"  layers: {kinds}\n"
        f"  batch: {report.rows} rows, {report.groups} prompts, {report.tokens_total} tokens -> "
        f"{report.tokens_packed} (token ratio {report.token_ratio:.2f})\n"
        f"  {report.dtype} on {report.device}, attention {report.attention}, "
        f"linear attention {report.linear_attention}\n"
        f"  {versions}"
    )
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("quantity", "difference", "allowed", "where", "verdict"):
        table.add_column(heading, overflow="fold")
    for d in report.differences:
        style = ".2f" if d.measure == "error ratio" else ".1e"
        verdict = "equal" if d.equal else "[bold red]differs[/bold red]"
        table.add_row(d.quantity, f"{d.worst:{style}}", f"{d.tolerance:{style}}", d.where, verdict)
    console.print(table)
    console.print(f"  {measures(report)}")
    for note in report.notes:
        console.print(f"  Note: {note}.")
    console.print("[bold green]Equal.[/bold green]" if report.equal else "[bold red]NOT equal.[/bold red]")


def measures(report: Report) -> str:
    """What a difference is a number of."""
    if report.oracle is not None:
        return (
            f"RMS errors against {report.oracle}, as multiples of the unpatched model's on one unpadded row at a time."
        )
    vectors = ", layer outputs to the token's largest" if report.layer_by_layer else ""
    return (
        "Largest differences from the unpatched model on one unpadded row at a time; gradients relative to the largest"
        f"{vectors}."
    )
