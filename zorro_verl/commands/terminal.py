"""What all commands share: an error in one line, a bar on long work, tables, and JSON on request."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, TypeVar

import typer
from rich import box
from rich.console import Console
from rich.progress import track as rich_track
from rich.table import Table

T = TypeVar("T")

# Of every command that finds something out: what it would show as tables, for a program.
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


@contextmanager
def errors_in_one_line(command: str) -> Iterator[None]:
    """Turn what a user can mend into one line on standard error and exit code 2, and an interrupt into 130.

    A ValueError is a mistake in what was asked, an OSError a file or folder that can't be read or written. A device may
    have too little memory, or lack a kernel. Anything else is a fault of this package, and keeps its traceback.
    """
    try:
        yield
    except BrokenPipeError:  # `| head` has seen enough; the interpreter of the command line ends in silence
        raise
    except (ValueError, OSError) as error:
        typer.echo(f"zorro-verl {command}: {_line(error)}", err=True)
        raise typer.Exit(2) from error
    except (RuntimeError, MemoryError) as error:
        if not _is_of_the_device(error):
            raise
        reason = f"{type(error).__name__}: {_line(error)}"
        typer.echo(f"zorro-verl {command}: it could not be done here ({reason:.300})", err=True)
        raise typer.Exit(2) from error
    except KeyboardInterrupt as error:
        typer.echo(f"zorro-verl {command}: interrupted", err=True)
        raise typer.Exit(130) from error


def _is_of_the_device(error: RuntimeError | MemoryError) -> bool:
    from zorro_verl.measuring import out_of_memory

    lacks = isinstance(error, MemoryError | NotImplementedError) or out_of_memory(error)
    return lacks or "CUDA" in str(error)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())


def show_progress(items: Iterable[T], what: str, total: int) -> Iterable[T]:
    """The items, with a bar on standard error which goes away at the end."""
    console = Console(stderr=True)
    return rich_track(items, what, total, console=console, transient=True, disable=not console.is_terminal)


def print_json(record: Mapping[str, Any]) -> None:
    """On standard output; a number that is none is a fault of ours, and not valid JSON."""
    typer.echo(json.dumps(record, indent=2, allow_nan=False))


def make_console() -> Console:
    """Standard output, 120 columns wide where it is no terminal; what its encoding lacks is escaped."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 120
    return console


def make_table(*headings: str) -> Table:
    """Without frames; headings of numbers are right-aligned by ``>`` in front."""
    table = Table(box=box.SIMPLE_HEAD)
    for heading in headings:
        justify = "right" if heading.startswith(">") else "left"
        table.add_column(heading.removeprefix(">"), justify=justify, overflow="fold")
    return table
