"""`zorro-verl verify`: a checkpoint with sharing against the same checkpoint without."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from zorro_verl.commands.model_options import DeviceOption, DtypeOption
from zorro_verl.commands.terminal import Json, errors_in_one_line, make_console, make_table, print_json, show_progress
from zorro_verl.verify_request import Sizes, check_device_name, local_folder

if TYPE_CHECKING:  # loads torch and transformers: `zorro-verl --help` does without
    from zorro_verl.verify import Report


class LinearAttention(str, Enum):
    """How Gated DeltaNet layers share."""

    both = "both"
    auto = "auto"
    expand = "expand"
    fork = "fork"


def verify(
    checkpoint: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="A checkpoint folder, or a name on the hub.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="The same, as an option.", show_default=False)
    ] = None,
    dtype: DtypeOption = None,
    device: DeviceOption = "cpu",
    attn_implementation: Annotated[
        str, typer.Option(metavar="NAME", help="auto, eager, sdpa or flash_attention_2, _3 or _4.")
    ] = "auto",
    linear_attention: Annotated[
        LinearAttention,
        typer.Option(metavar="WAY", help="How Gated DeltaNet layers share: expand, fork, auto, or both in turn."),
    ] = LinearAttention.both,
    rows: Annotated[int, typer.Option(metavar="N", help="Rows of the batch.")] = 10,
    prompt: Annotated[int, typer.Option(metavar="N", help="Tokens of its longest prompt.")] = 70,
    response: Annotated[int, typer.Option(metavar="N", help="Tokens of its longest response.")] = 12,
    seed: Annotated[int, typer.Option(metavar="N", help="Of tokens, shape and loss.")] = 0,
    layer_by_layer: Annotated[
        bool | None,
        typer.Option(
            "--layer-by-layer/--whole",
            help="One decoder layer in memory at a time, or all; by default what fits.",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare a checkpoint that shares prompts with the same checkpoint that doesn't.

    Log-probs, entropy and the gradient of every parameter, on a ragged batch of random tokens, against the unpatched
    model on one unpadded row at a time. Exits with 1 where they differ by more than rounding, with 2 on a mistake.
    """
    with errors_in_one_line("verify"):
        if (checkpoint is None) == (model is None):
            raise ValueError("model: expected one checkpoint, as MODEL or as --model MODEL")
        name = model if checkpoint is None else checkpoint
        local_folder(name)
        check_device_name(device)
        sizes = Sizes(rows, prompt, response)

        from zorro_verl.verify import verify as compare

        report = compare(
            name,
            dtype and dtype.value,
            device,
            attn_implementation,
            linear_attention.value,
            sizes,
            seed,
            layer_by_layer,
            show_progress,
        )
        if as_json:
            print_json(report.as_json())
        else:
            show(report)
    raise typer.Exit(0 if report.equal else 1)


def show(report: Report) -> None:
    """The report as text and a table, on standard output."""
    console = make_console()
    kinds = ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in report.layers.items())
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    linear = f", linear attention {' and '.join(report.linear_attention)}" if report.linear_attention else ""
    how = "layer by layer" if report.layer_by_layer else "as a whole"
    console.print(
        f"[bold]{escape(report.model)}[/bold]: {report.model_class} ({report.model_type}), compared {how}\n"
        f"  layers: {kinds}\n"
        f"  batch: {report.rows} rows, {report.groups} prompts, {report.tokens_total} tokens -> "
        f"{report.tokens_packed} (token ratio {report.token_ratio:.2f})\n"
        f"  {report.dtype} on {report.device}, attention {report.attention}{linear}\n"
        f"  {versions}"
    )
    by_way = ("sharing",) if len(report.linear_attention) > 1 else ()
    table = make_table("quantity", "difference", "allowed", *by_way, "where", "verdict")
    for d in report.differences:
        style = ".2f" if d.measure == "error ratio" else ".1e"
        verdict = "equal" if d.equal else "[bold red]differs[/bold red]"
        way = (d.linear_attention,) if by_way else ()
        table.add_row(d.quantity, f"{d.worst:{style}}", f"{d.tolerance:{style}}", *way, d.where, verdict)
    console.print(table)
    console.print(f"  {measures(report)}")
    for note in report.notes:
        console.print(f"  Note: {escape(note)}.")
    console.print("[bold green]Equal.[/bold green]" if report.equal else "[bold red]NOT equal.[/bold red]")


def measures(report: Report) -> str:
    """What a difference is a number of."""
    if report.oracle is not None:
        return (
            f"Errors against {report.oracle}, as multiples of the unpatched model's on one unpadded row at a time: "
            "RMS over tokens, and of the parameter whose gradient is worst."
        )
    vectors = ", layer outputs to the token's largest" if report.layer_by_layer else ""
    return (
        "Largest differences from the unpatched model on one unpadded row at a time; gradients relative to the largest"
        f"{vectors}."
    )
