"""`zorro-verl bench`: a model with sharing against the same model without, timed."""

from __future__ import annotations


def bench() -> None:
    """Not there yet."""
