"""`zorro-verl analyze`: what sharing saves on rollouts that were dumped."""

from __future__ import annotations


def analyze() -> None:
    """Not there yet."""
