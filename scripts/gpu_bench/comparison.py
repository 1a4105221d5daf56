"""How far results of two contestants are apart, and how far they may be."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# bfloat16 against bfloat16: values as root mean squares, gradients as a share of their norm; or so many times what the
# stock one is off from float32 on short rows, where that is more. The extreme of many tokens grows with their number.
TOLERANCES = {"worst token": 0.3, "worst row": 0.05, "gradients": 0.05}
TIMES_STOCK = {"worst token": 4.0, "worst row": 3.0, "gradients": 3.0}
PRECISION = 1.5  # an error against float32 may be so many times the stock one's
ROUNDING = 1e-6  # float32's own, below which errors are not compared
WORST_TENSOR = "gradients, worst"  # reported, never judged: of a gradient that is next to nothing, all is rounding
EXTREMES = ("worst token", WORST_TENSOR)


class Results(NamedTuple):
    """What a run computed, in a layout that all contestants of a case have in common.

    Attributes:
        values: ``(tokens, ...)`` each; what a contestant does not compute is not there, and not compared.
        lens: how the tokens lie in rows (or segments).
        gradients: by name; empty for a forward.
    """

    values: dict[str, Tensor]
    lens: list[int]
    gradients: dict[str, Tensor]


def errors(expected: Results, got: Results) -> dict[str, float]:
    """Root mean squares of values, over all, in the worst row and of the worst token; norms of gradients, by which all
    of them and the worst tensor's are off."""
    found: dict[str, float] = {}
    for name in expected.values.keys() & got.values.keys():
        difference = expected.values[name].float() - got.values[name].float()
        squares = difference.square_().reshape(difference.shape[0], -1).mean(1)
        found[name] = squares.mean().sqrt().item()
        found[f"{name}, worst token"] = squares.max().sqrt().item()
        rows = [part.mean() for part in squares.split(expected.lens) if part.numel()]
        found[f"{name}, worst row"] = torch.stack(rows).max().sqrt().item()
    if expected.gradients:
        pairs = [(g.float(), got.gradients[name].float()) for name, g in expected.gradients.items()]
        wrong = torch.stack([(a - b).norm() for a, b in pairs])
        norms = torch.stack([a.norm() for a, _ in pairs])
        found["gradients"] = (wrong.norm() / norms.norm()).item()
        found[WORST_TENSOR] = (wrong / norms).nan_to_num(posinf=float("inf")).max().item()
    return found


def disagreement(differences: dict[str, float], stock: dict[str, float]) -> str:
    """What differs by more than bfloat16 explains; empty when nothing does.

    Args:
        differences: from the baseline.
        stock: the stock errors against float32, by the same names; empty where they were not measured.

    `WORST_TENSOR` has no limit.
    """
    found = []
    for name, difference in differences.items():
        kind = name.partition(", ")[2] or ("gradients" if name == "gradients" else "worst row")
        if name == WORST_TENSOR:
            continue
        limit = max(TOLERANCES[kind], TIMES_STOCK[kind] * stock.get(name, 0.0))
        if not difference <= limit:
            found.append(f"{name} by {difference:.1e} (allowed: {limit:.2g})")
    return ", ".join(found)


def imprecision(stock: dict[str, float], ours: dict[str, float]) -> str:
    """Which of our errors against float32 are out of proportion to the stock ones; empty when none is.

    The extremes have no limit here: which token is the worst is chance, and so is which tensor's gradient.
    """
    found = [
        f"{name}: {error:.1e} against {stock[name]:.1e}"
        for name, error in ours.items()
        if not error <= PRECISION * stock[name] + ROUNDING and not name.endswith(EXTREMES)
    ]
    return ", ".join(found)
