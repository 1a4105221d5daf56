"""`zorro-verl plan`: what sharing saves, and what fits, from numbers alone."""

from __future__ import annotations


def plan() -> None:
    """Not there yet."""
