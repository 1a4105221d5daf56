"""The command `zorro-verl`: tables for a person, exit codes for a script.

Exit codes: 0 is success, 1 a difference or a problem that was found, 2 a mistake in what was asked or a file that can't
be read, said in one line, 130 an interrupt. `--help` loads neither torch nor transformers.
"""

from __future__ import annotations

from typing import Annotated

import typer

from zorro_verl import __version__
from zorro_verl.commands.analyze import analyze
from zorro_verl.commands.bench import bench
from zorro_verl.commands.doctor import doctor
from zorro_verl.commands.plan import plan
from zorro_verl.commands.show import show
from zorro_verl.commands.verify import verify

app = typer.Typer(
    help="Train GRPO and PPO actors in veRL without recomputing the shared prompt for every rollout.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # help in plain text, which keeps its lines whole at 80 columns
    pretty_exceptions_enable=False,
)
app.command(short_help="Check this environment, and a model, for strategy=zorro.")(doctor)
app.command(short_help="Predict speed-up and memory from numbers alone.")(plan)
app.command(short_help="Say what sharing saves on dumped rollouts.")(analyze)
app.command(short_help="Draw what a micro-batch shares.")(show)
app.command(short_help="Compare a checkpoint with and without sharing.")(verify)
app.command(short_help="Time a model with and without sharing.")(bench)


def show_version(wanted: bool) -> None:
    """Answer ``--version``."""
    if wanted:
        typer.echo(f"zorro-verl {__version__}")
        raise typer.Exit


@app.callback()
def zorro_verl(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """What comes before a command."""
