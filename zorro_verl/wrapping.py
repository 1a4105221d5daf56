"""Replacing a function of verl by one around it, once."""

import functools
from collections.abc import Callable
from typing import Any


def wrap_once(owner: Any, name: str, make: Callable[[Callable], Callable]) -> None:
    """Replace ``owner.name`` by ``make(original)``, unless that has been done before.

    What replaces it has its name and signature, the original as ``__wrapped__``, and the mark ``wrapped_by_zorro``.

    Args:
        owner: a module or a class.
        name: of a function in it.
        make: takes the original function and gives the one around it.
    """
    original = getattr(owner, name)
    if hasattr(original, "wrapped_by_zorro"):
        return
    wrapped = functools.wraps(original)(make(original))
    wrapped.wrapped_by_zorro = True
    setattr(owner, name, wrapped)
