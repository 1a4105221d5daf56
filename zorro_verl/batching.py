"""Where rows go: groups whole over ranks and mini-batches, and micro-batches under a budget of packed tokens.

Host arithmetic on row lengths; nothing here changes a result, only how much of it is shared.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Sequence
from heapq import heapify, heappop, heappush, heapreplace

from zorro_verl.cells import Cell, Kind, fill_cells

# verl's estimate of a row's work is LINEAR_WORK * s + s**2 (verl.utils.seqlen_balancing.calculate_workload, from the
# FLOPs of a 7B layer); a packed group is counted in the same units, so that the two balance alike.
LINEAR_WORK = 24576


def packed_tokens(prompt_len: int, response_lens: Sequence[int]) -> int:
    """Tokens sent through the model for rows of one prompt."""
    return prompt_len + sum(response_lens)


def packed_work(prompt_len: int, response_lens: Sequence[int]) -> int:
    """Work of rows of one prompt, in verl's units: linear in packed tokens, plus twice the attended pairs."""
    pairs = prompt_len**2 + sum(r * (2 * prompt_len + r) for r in response_lens)
    return LINEAR_WORK * packed_tokens(prompt_len, response_lens) + pairs


def rows_by_group(group_index: Sequence[Hashable]) -> list[list[int]]:
    """Row indices of each group, groups in order of first appearance."""
    groups: dict[Hashable, list[int]] = {}
    for row, group in enumerate(group_index):
        groups.setdefault(group, []).append(row)
    return list(groups.values())


def split_micro_batches(
    group_index: Sequence[int],
    prompt_lens: Sequence[int],
    response_lens: Sequence[int],
    budget: int,
    budget_key: str = "max_token_len_per_gpu",
    min_count: int = 1,
) -> list[list[int]]:
    """Rows of each micro-batch: whole groups, at most ``budget`` packed tokens, at least ``min_count`` of them.

    A group over the budget is cut into as few pieces as first-fit finds, its prompt repeated in each. More
    micro-batches than the budget asks for (another rank needs them) are made by halving. ``budget_key`` names the
    setting behind the budget in errors.

    Raises:
        ValueError: a single row over the budget, or fewer rows than ``min_count``.
    """
    if min_count > len(group_index):
        raise ValueError(
            f"micro-batches: expected at least {min_count} rows (the count another data-parallel rank needs), "
            f"got {len(group_index)}; verl hands every rank the same number of rows"
        )
    tokens = lambda rows: packed_tokens(prompt_lens[rows[0]], [response_lens[r] for r in rows])  # noqa: E731
    pieces: list[list[int]] = []
    for rows in rows_by_group(group_index):
        longest = max(rows, key=lambda r: response_lens[r])
        if tokens([longest]) > budget:
            raise ValueError(
                f"{budget_key}: expected at least {tokens([longest])} tokens, the length of one row "
                f"({prompt_lens[longest]} prompt + {response_lens[longest]} response), got {budget}"
            )
        prompt_len = prompt_lens[rows[0]]
        pieces += _first_fit(rows, [response_lens[r] for r in rows], budget - prompt_len)

    costs = [tokens(piece) for piece in pieces]
    bins = _first_fit(list(range(len(pieces))), costs, budget)
    balanced = _least_loaded(costs, min(max(len(bins), min_count), len(pieces)))
    if max(sum(costs[p] for p in b) for b in balanced) <= budget:
        bins = balanced
    batches = [[pieces[p] for p in b] for b in bins]
    while len(batches) < min_count:
        batches.append(_halve(max(batches, key=lambda b: (len(b) > 1, sum(map(len, b))))))
    return [sorted(row for piece in batch for row in piece) for batch in batches]


def place_groups(
    group_index: Sequence[int],
    prompt_lens: Sequence[int],
    response_lens: Sequence[int],
    num_ranks: int,
    num_mini_batches: int,
    fillers: Sequence[int] = (),
) -> list[int]:
    """A permutation of the rows, rank after rank and mini-batch after mini-batch, that keeps groups whole.

    verl hands rank r the r-th of ``num_ranks`` equal chunks and walks it in ``num_mini_batches`` equal slices, so
    every (rank, mini-batch) cell holds the same number of rows. Where these can't be made of whole groups, as few are
    cut as `zorro_verl.cells` finds, those with short prompts; the pieces of one go to mini-batches of the same rank
    first, where a pass over all of a rank's rows finds it whole. Groups of one size fill mini-batches in their own
    order and are spread over ranks by packed work. ``fillers`` are rows that were added to make the count come out:
    they are spread over the cells evenly, and fill what room groups leave.

    Raises:
        ValueError: a row count that doesn't divide into the cells.
    """
    num_rows = len(group_index)
    if num_rows % (num_ranks * num_mini_batches):
        raise ValueError(
            f"batch: expected a multiple of {num_ranks} ranks x {num_mini_batches} mini-batches rows, got {num_rows}"
        )
    free = set(fillers)
    groups = rows_by_group([(group, row if row in free else None) for row, group in enumerate(group_index)])
    kinds = [(len(rows), rows[0] in free) for rows in groups]
    parts = fill_cells(kinds, [prompt_lens[rows[0]] for rows in groups], num_rows // (num_ranks * num_mini_batches))
    cells = [cell for part in parts for cell in part]  # rank r's are r * num_mini_batches and those that follow
    work = lambda rows: packed_work(prompt_lens[rows[0]], [response_lens[r] for r in rows])  # noqa: E731

    placed: list[list[int]] = [[] for _ in cells]
    load = [0] * len(cells)
    rest = dict(enumerate(groups))
    for c, cell in enumerate(cells):
        for group, number in cell.pieces:
            piece, rest[group] = rest[group][:number], rest[group][number:]
            placed[c] += piece
            load[c] += work(piece)
    waiting: dict[Kind, list[int]] = {}
    for group, rows in rest.items():
        if len(rows) == kinds[group][0]:
            waiting.setdefault(kinds[group], []).append(group)

    cost = [work(rows) for rows in groups]
    for first in range(num_mini_batches):
        mini_batch = range(first, len(cells), num_mini_batches)
        members: dict[int, list[int]] = {c: [] for c in mini_batch}
        for kind in sorted(waiting, reverse=True):
            number = sum(cells[c].whole[kind] for c in mini_batch)
            here, waiting[kind] = waiting[kind][:number], waiting[kind][number:]
            _spread(here, cost, {c: cells[c].whole[kind] for c in mini_batch if cells[c].whole[kind]}, members, load)
        _even_out(members, kinds, cost, load)
        for c, inside in members.items():
            placed[c] += [row for group in inside for row in groups[group]]
    return [row for rank in _rank_cells(parts, load, num_ranks, num_mini_batches) for c in rank for row in placed[c]]


def _spread(
    groups: list[int], cost: list[int], room: dict[int, int], members: dict[int, list[int]], load: list[int]
) -> None:
    """The costliest group first, each into the least loaded cell that has ``room`` for one more of this kind."""
    lightest = [(load[c], c) for c in room]
    heapify(lightest)
    for group in sorted(groups, key=lambda g: -cost[g]):
        c = heappop(lightest)[1]
        members[c].append(group)
        load[c] += cost[group]
        room[c] -= 1
        if room[c]:
            heappush(lightest, (load[c], c))


def _even_out(members: dict[int, list[int]], kinds: list[Kind], cost: list[int], load: list[int]) -> None:
    """Swap groups of one kind out of the most loaded cell for as long as that makes the larger of two loads smaller."""
    by_cost: dict[int, dict[Kind, list[tuple[int, int]]]] = {c: {} for c in members}
    for c, groups in members.items():
        for group in sorted(groups, key=lambda g: (cost[g], g)):
            by_cost[c].setdefault(kinds[group], []).append((cost[group], group))
    while True:
        heaviest = max(members, key=lambda c: load[c])
        for other in sorted(members, key=lambda c: load[c]):
            swap = _best_swap(by_cost[heaviest], by_cost[other], load[heaviest] - load[other])
            if swap is not None:
                break
        else:
            return
        for c, away, here in ((heaviest, *swap), (other, *reversed(swap))):
            alike = by_cost[c][kinds[away]]
            alike.remove((cost[away], away))
            insort(alike, (cost[here], here))
            members[c][members[c].index(away)] = here
            load[c] += cost[here] - cost[away]


def _best_swap(
    heavier: dict[Kind, list[tuple[int, int]]], lighter: dict[Kind, list[tuple[int, int]]], gap: int
) -> tuple[int, int] | None:
    """A group of either cell whose costs differ by half the ``gap`` as nearly as any two of one kind do.

    Groups are ``(cost, group)``, sorted. None where no swap makes the larger of the two loads smaller.
    """
    best = None
    for kind, groups in heavier.items():
        others = lighter.get(kind, [])
        for cost, group in groups:
            above = bisect_left(others, (cost - gap // 2,))
            for other_cost, other in others[max(above - 1, 0) : above + 1]:
                if 0 < cost - other_cost < gap:
                    found = abs(2 * (cost - other_cost) - gap), group, other
                    best = found if best is None else min(best, found)
    return best and best[1:]


def _rank_cells(parts: list[list[Cell]], load: list[int], num_ranks: int, num_mini_batches: int) -> list[list[int]]:
    """The cells of each rank, one of every mini-batch: those that share a cut group stay, others even ranks out."""
    bound = sum(len(part) for part in parts if len(part) > 1)  # these come first
    ranks = [list(range(r * num_mini_batches, (r + 1) * num_mini_batches)) for r in range(num_ranks)]
    total = [0] * num_ranks
    for m in range(num_mini_batches):
        movable = [r for r in range(num_ranks) if ranks[r][m] >= bound]
        heaviest_first = sorted((ranks[r][m] for r in movable), key=lambda c: -load[c])
        for r, c in zip(sorted(movable, key=lambda r: total[r]), heaviest_first, strict=True):
            ranks[r][m] = c
        for r in range(num_ranks):
            total[r] += load[ranks[r][m]]
    return ranks


def _first_fit(items: list[int], sizes: list[int], capacity: int) -> list[list[int]]:
    """First-fit decreasing: items into as few bins as it finds; every item is known to fit an empty bin."""
    bins: list[list[int]] = []
    room: list[int] = []
    first, last = 0, None
    for size, item in sorted(zip(sizes, items, strict=True), key=lambda pair: -pair[0]):
        if size != last:  # bins that had no room for an item have none for another of its size
            first, last = 0, size
        while first < len(bins) and size > room[first]:
            first += 1
        if first == len(bins):
            bins.append([])
            room.append(capacity)
        bins[first].append(item)
        room[first] -= size
    return bins


def _least_loaded(costs: list[int], count: int) -> list[list[int]]:
    """Longest processing time first: items into exactly ``count`` bins of similar cost, none empty."""
    bins: list[list[int]] = [[] for _ in range(count)]
    lightest = [(0, 0, b) for b in range(count)]  # a bin's load and items; sorted, and so a heap
    for item in sorted(range(len(costs)), key=lambda i: -costs[i]):
        load, items, b = lightest[0]
        bins[b].append(item)
        heapreplace(lightest, (load + costs[item], items + 1, b))
    return bins


def _halve(batch: list[list[int]]) -> list[list[int]]:
    """Take half of a micro-batch out of it, in place: pieces if it has several, else rows of its one piece."""
    if len(batch) > 1:
        half = batch[len(batch) // 2 :]
        del batch[len(batch) // 2 :]
        return half
    rows = batch.pop()
    batch.append(rows[: len(rows) // 2])
    return [rows[len(rows) // 2 :]]
