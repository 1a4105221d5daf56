"""`zorro-verl bench`: a model with sharing against the same model without, timed."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from zorro_verl.commands.model_options import DeviceOption, DtypeOption
from zorro_verl.commands.terminal import Json, errors_in_one_line, make_console, make_table, print_json, show_progress
from zorro_verl.verify_request import check_device_name, local_folder

if TYPE_CHECKING:  # loads torch and transformers: `zorro-verl --help` does without
    from collections.abc import Mapping

    from zorro_verl.benchmark import Report, Result

# Both ends of what sharing saves, and what it costs where there is nothing to share: about a minute on a CPU.
SHAPES = ("512,64,8", "256,256,8", "256,256,1")
MIB = 2**20


def bench(
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="A checkpoint folder, or a name on the hub, or what --random-weights allows; by default a small Qwen3 "
            "with random weights.",
            show_default=False,
        ),
    ] = None,
    random_weights: Annotated[
        bool,
        typer.Option(
            "--random-weights",
            help="Take the config of MODEL alone: a name such as Qwen3-32B, a checkpoint folder or a config.json.",
        ),
    ] = False,
    layers: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Keep the first N layers, so that a large model fits; by default all.", show_default=False
        ),
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            metavar="P,R,n",
            help="A group: a prompt of P tokens with n responses of R tokens each. May be given several times "
            f"(default: {' and '.join(SHAPES)}).",
            show_default=False,
        ),
    ] = None,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = None,
    attn_implementation: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="Of the model that shares: auto, eager, sdpa or flash_attention_2, _3 or _4."
        ),
    ] = "auto",
    rounds: Annotated[int, typer.Option(metavar="N", help="Runs of each side, by turns, at least.")] = 3,
    seconds: Annotated[float, typer.Option(metavar="S", help="Least time for each call at each shape.")] = 2.0,
    memory: Annotated[
        bool, typer.Option("--memory/--no-memory", help="Measure the peak memory of an update, or leave it out.")
    ] = True,
    as_json: Json = False,
) -> None:
    """Time a model that shares prompts against the same model that doesn't.

    A forward alone (log_prob) and forward + backward (update) on the rows of one group. The plain side is the Hugging
    Face model on padded rows. Log-probs and gradients of the two are compared first: a shape at which they differ by
    more than rounding gets no figure, and the exit code is 1; a mistake's is 2. Uses as many CPU threads as torch
    would (OMP_NUM_THREADS).
    """
    with errors_in_one_line("bench"):
        check_device_name(device)
        if model is not None:
            local_folder(model.removesuffix("config.json") if random_weights else model)

        from zorro_verl import benchmark
        from zorro_verl.measuring import Effort, Shape, environment, hardware

        shapes = [Shape.parse(text) for text in shape or SHAPES]
        effort = Effort(rounds, seconds)
        subject = benchmark.Subject.of(
            model, random_weights, layers, dtype and dtype.value, device, attn_implementation
        )
        typed = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
        surroundings = environment(typed, "transformers", hardware=hardware(device))
        report = benchmark.bench(subject, shapes, effort, memory, show_progress)
        if as_json:
            print_json({**surroundings, **report.as_json()})
        else:
            show(report, surroundings)
    raise typer.Exit(0 if report.equal else 1)


def show(report: Report, surroundings: Mapping[str, str]) -> None:
    """The report as text and a table, on standard output."""
    console = make_console()
    cut = f" of its {report.layers_of_model}" if report.layers < report.layers_of_model else ""
    console.print(
        f"[bold]{escape(report.model)}[/bold]: {report.model_class} ({report.model_type}), "
        f"{report.layers}{cut} layers, hidden {report.hidden_size}, vocabulary {report.vocabulary}, "
        f"{report.weights} weights\n"
        f"  {report.dtype} on {report.device}, attention {report.attention}\n"
        f"  {report.method}"
    )
    for key, value in surroundings.items():
        console.print(f"  {key}: {escape(value)}")
    table = make_table(
        "P, R, n", "call", ">ratio", ">plain s", ">shared s", ">speed-up", ">bound", ">of bound", ">peak MiB"
    )
    for result in report.results:
        for cells in rows_of(result):
            table.add_row(*cells)
    console.print(table)
    console.print(
        "  ratio: tokens of all rows to those that the shared model computes; bound: the same of floating-point "
        "operations; peak: of an update beside weights and gradients, plain -> shared."
    )
    pairs = [pair for result in report.results for pair in (result.log_prob, result.update) if pair is not None]
    if any(pair.clock == "cpu" for pair in pairs):
        console.print("  *: CPU time, as another process held the core.")
    for result in report.results:
        console.print(f"  {compared(result, report.oracle)}")
    console.print("[bold green]Equal.[/bold green]" if report.equal else "[bold red]NOT equal.[/bold red]")


def rows_of(result: Result) -> list[tuple[str, ...]]:
    """A row for each call; one without figures where results differ."""
    shape, ratio = str(result.shape).replace(",", ", "), f"{result.shape.token_ratio:.2f}"
    bound = f"{result.bound:.2f}"
    if result.log_prob is None or result.update is None:
        return [(shape, "[bold red]differs[/bold red]", ratio, "-", "-", "-", bound, "-", "-")]
    peaks = " -> ".join("-" if peak is None else f"{peak / MIB:.0f}" for peak in result.peaks)
    found: list[tuple[str, ...]] = []
    for call, pair in (("log_prob", result.log_prob), ("update", result.update)):
        found.append(
            (
                shape,
                call + "*" * (pair.clock == "cpu"),
                ratio,
                f"{pair.plain.by(pair.clock):.3f}",
                f"{pair.shared.by(pair.clock):.3f}",
                f"{pair.speed_up:.2f}",
                bound,
                f"{pair.speed_up / result.bound:.0%}",
                peaks if call == "update" else "",
            )
        )
    return found


def compared(result: Result, oracle: str | None) -> str:
    """How far the two sides are apart."""
    unit = "" if oracle is None else f", in multiples of the plain model's error against {oracle}"
    style = ".1e" if oracle is None else ".2f"
    found = [
        f"{'' if d.equal else '[bold red]'}{d.quantity} {d.worst:{style}} (allowed {d.tolerance:{style}})"
        f"{'' if d.equal else '[/bold red]'}"
        for d in result.differences
    ]
    return f"differences at {str(result.shape).replace(',', ', ')}: {', '.join(found)}{unit}"
