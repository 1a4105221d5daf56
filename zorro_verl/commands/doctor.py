"""`zorro-verl doctor`: what is installed here, which attention will run, and what stands in the way."""

from __future__ import annotations


def doctor() -> None:
    """Not there yet."""
