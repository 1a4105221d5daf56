"""veRL's keys of rows, ``<uid>_<session>_<index>``: the prompt that a row was drawn from, and what is no rollout."""

from __future__ import annotations

import re

_KEY = re.compile(r"(.+)_\d+_(\d+)")
_PADDING = re.compile(r"pad[0-9a-f]{32}_\d+_0")


def sample_of(key: object) -> str | None:
    """The prompt that a row is a rollout of, by its key; None where that isn't said.

    A session may have several outputs, and each but the first goes on from its own turns: its prompt is its own. A key
    of another form is taken as the prompt's name.
    """
    if key is None:
        return None
    numbered = _KEY.fullmatch(str(key))
    if numbered is None:
        return str(key)
    return numbered[1] if int(numbered[2]) == 0 else None


def is_padding(key: object) -> bool:
    """Whether veRL's V1 trainers added this row so that a step's rows divide: nobody sampled it, its loss is 0."""
    return _PADDING.fullmatch(str(key)) is not None
