"""`zorro-verl show`: one micro-batch, drawn."""

from __future__ import annotations


def show() -> None:
    """Not there yet."""
