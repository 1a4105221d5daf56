"""Options of the commands that read dumped rollouts and draw pictures of them, each of them said once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Tokenizer = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="The model's tokenizer, for text: a folder, or a name on the hub."),
]
PromptColumn = Annotated[
    str | None, typer.Option(metavar="NAME", help="Column of prompts; by default the usual names.")
]
ResponseColumn = Annotated[
    str | None, typer.Option(metavar="NAME", help="Column of responses; by default the usual names.")
]
Plot = Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw a picture as well, with matplotlib.")]


def check_at_least_one(**options: int | None) -> None:
    """Options by their names with underscores; None where one isn't given.

    Raises:
        ValueError: one is below 1.
    """
    for name, value in options.items():
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')}: expected at least 1, got {value}")
