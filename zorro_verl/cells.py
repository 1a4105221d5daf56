"""Groups of rows into cells that hold equally many rows each, with as few groups cut as can be found.

Host arithmetic on group sizes. Groups that fill k cells among themselves need k - 1 cuts at most: each of these cells
but the last is closed with the beginning of a group. So cuts are fewest where the groups fall apart into as many such
sets as possible. That is bin packing; but sizes are small whole numbers and many groups are of one size, so sets of a
given sum are looked up in bit sets instead of searched.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

# Groups that are exchangeable: of one size, and fillers (rows that may go anywhere) or not.
Kind = tuple[int, bool]


class Cell(NamedTuple):
    """What one cell takes: how many whole groups of each kind, and pieces ``(group, number of its rows)``."""

    whole: Counter[Kind]
    pieces: list[tuple[int, int]]


def fill_cells(kinds: Sequence[Kind], cut_costs: Sequence[int], cell: int) -> list[list[Cell]]:
    """Which kinds of groups meet in which cell, in sets of neighbouring cells that share cut groups.

    Args:
        kinds: size and kind of each group; the sizes sum up to a multiple of ``cell``.
        cut_costs: what a cut of each group costs: of those that may be cut, the cheapest are.
        cell: rows of a cell.
    """
    num_cells = sum(size for size, _ in kinds) // cell
    counts = Counter(kinds)
    # Alike cells balance best; where that leaves a rest that needs more cuts, the largest groups go first.
    sets = min((_exact_sets(counts, cell, num_cells, alike) for alike in (True, False)), key=lambda sets: -len(sets))
    cheapest: dict[Kind, list[int]] = defaultdict(list)
    for group in sorted(range(len(kinds)), key=lambda g: cut_costs[g], reverse=True):
        cheapest[kinds[group]].append(group)
    # Those with the most rows that are no fillers come first: dealt in this order, they reach every mini-batch.
    sets.sort(key=lambda s: (-s[0], -sum(size * n for (size, free), n in s[1].items() if not free)))
    return [_cut(members, k, cell, cheapest, cut_costs) for k, members in sets]


def _exact_sets(counts: Counter[Kind], cell: int, num_cells: int, alike: bool) -> list[tuple[int, Counter[Kind]]]:
    """All groups in sets that fill k cells exactly each, small k first: ``(k, how many of each kind)``."""
    left, sets, k = Counter(counts), [], 1
    while num_cells:
        members = _alike(left, k * cell, k, num_cells) if alike else None
        if members is None:
            members = _of_sum(left, k * cell)
        if members is None:
            k += 1
            continue
        sets.append((k, members))
        left -= members
        num_cells -= k
    return sets


def _alike(left: Counter[Kind], rows: int, k: int, num_cells: int) -> Counter[Kind] | None:
    """As ``_of_sum``, with the k cells' even share of every kind in it; None if the odd rest doesn't add up."""
    share = Counter({kind: count * k // num_cells for kind, count in left.items() if kind[0] <= rows})
    rest = _of_sum(left - share, rows - _rows(share))
    return None if rest is None else +share + rest


def _of_sum(left: Counter[Kind], rows: int) -> Counter[Kind] | None:
    """Groups of exactly ``rows`` rows, the largest that are possible; None if there are no such groups."""
    kinds = sorted((kind for kind in left if kind[0] <= rows), key=lambda kind: (kind[0], not kind[1]))
    reachable = [1]  # bit r is set when the kinds so far can sum up to r
    within = (1 << rows + 1) - 1
    for kind in kinds:
        sums, count, step = reachable[-1], left[kind], 1
        while count:  # any number up to the count is a sum of these steps
            step = min(step, count)
            sums |= sums << step * kind[0] & within
            count -= step
            step *= 2
        reachable.append(sums)
    if not reachable[-1] >> rows & 1:
        return None
    chosen: Counter[Kind] = Counter()
    for kind, below in zip(reversed(kinds), reversed(reachable[:-1]), strict=True):
        number = min(left[kind], rows // kind[0])
        while not below >> rows - number * kind[0] & 1:
            number -= 1
        if number:
            chosen[kind] = number
            rows -= number * kind[0]
    return chosen


def _largest_sum(left: Counter[Kind], room: int) -> Counter[Kind]:
    while (chosen := _of_sum(left, room)) is None:
        room -= 1
    return chosen


def _cut(
    left: Counter[Kind], k: int, cell: int, cheapest: dict[Kind, list[int]], cut_costs: Sequence[int]
) -> list[Cell]:
    """Lay groups out over k cells that they fill: each cell is closed with a piece that goes on in the next one."""
    if k == 1:
        return [Cell(left, [])]
    cells = []
    group, uncut = -1, 0  # the group that is being cut, and how many of its rows are left
    for _ in range(k):
        pieces = []
        whole = _largest_sum(left, cell)
        room = cell - _rows(whole)
        if uncut < room:  # else one more piece of it closes this cell as well
            if uncut:
                pieces.append((group, uncut))
                whole = _largest_sum(left, cell - uncut)
                room = cell - uncut - _rows(whole)
            if room:
                # All that is left is longer than the room. What is longer than a cell is cut anyway.
                kind = min(left - whole, key=lambda kind: (kind[0] <= cell, cut_costs[cheapest[kind][-1]]))
                group = cheapest[kind].pop()
                left = left - Counter([kind])
                uncut = kind[0]
        if room:
            pieces.append((group, room))
            uncut -= room
        left = left - whole
        cells.append(Cell(whole, pieces))
    return cells


def _rows(groups: Counter[Kind]) -> int:
    return sum(size * count for (size, _), count in groups.items())
