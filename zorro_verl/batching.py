"""Where rows go: groups whole over ranks and mini-batches, and micro-batches under a budget of packed tokens.

Host arithmetic on row lengths; nothing here changes a result, only how much of it is shared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

# verl's estimate of a row's work is LINEAR_WORK * s + s**2 (verl.utils.seqlen_balancing.calculate_workload, from the
# FLOPs of a 7B layer); a packed group is counted in the same units, so that the two balance alike.
LINEAR_WORK = 24576

Work = Callable[[list[int]], int]


def packed_tokens(prompt_len: int, response_lens: Sequence[int]) -> int:
    """Tokens sent through the model for rows of one prompt."""
    return prompt_len + sum(response_lens)


def packed_work(prompt_len: int, response_lens: Sequence[int]) -> int:
    """Work of rows of one prompt, in verl's units: linear in packed tokens, plus twice the attended pairs."""
    pairs = prompt_len**2 + sum(r * (2 * prompt_len + r) for r in response_lens)
    return LINEAR_WORK * packed_tokens(prompt_len, response_lens) + pairs


def rows_by_group(group_index: Sequence[int]) -> list[list[int]]:
    """Row indices of each group, groups in order of first appearance."""
    groups: dict[int, list[int]] = {}
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
) -> list[int]:
    """A permutation of the rows, rank after rank and mini-batch after mini-batch, that keeps groups whole.

    verl hands rank r the r-th of ``num_ranks`` equal chunks and walks it in ``num_mini_batches`` equal slices, so
    every (rank, mini-batch) cell holds the same number of rows. Groups fill mini-batches in their own order and are
    then spread over its ranks by packed work. A group that fits nowhere whole fills what room is left.

    Raises:
        ValueError: a row count that doesn't divide into the cells.
    """
    num_rows = len(group_index)
    if num_rows % (num_ranks * num_mini_batches):
        raise ValueError(
            f"batch: expected a multiple of {num_ranks} ranks x {num_mini_batches} mini-batches rows, got {num_rows}"
        )
    cell = num_rows // (num_ranks * num_mini_batches)
    work = lambda rows: packed_work(prompt_lens[rows[0]], [response_lens[r] for r in rows])  # noqa: E731

    in_order = _fill(rows_by_group(group_index), [cell * num_ranks] * num_mini_batches, lambda _: 0)
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    for mini_batch in in_order:
        heaviest_first = sorted(mini_batch, key=lambda rows: (-len(rows), -work(rows)))
        for rank, pieces in enumerate(_fill(heaviest_first, [cell] * num_ranks, work)):
            ranks[rank] += [row for piece in pieces for row in piece]
    return [row for rows in ranks for row in rows]


def _fill(groups: list[list[int]], capacities: list[int], work: Work) -> list[list[list[int]]]:
    """Put groups into cells of fixed row counts: whole where they fit, and cut only for the room that is left."""
    cells, homeless = _place_whole(groups, capacities, work, tightest=False)
    if homeless:  # spreading by load left gaps: the tightest fit may leave fewer
        tight_cells, tight_homeless = _place_whole(groups, capacities, work, tightest=True)
        if sum(map(len, tight_homeless)) < sum(map(len, homeless)):
            cells, homeless = tight_cells, tight_homeless
    room = [capacity - sum(map(len, cell)) for capacity, cell in zip(capacities, cells, strict=True)]
    for rows in homeless:
        while rows:
            # The tightest cell that takes all that is left, else the roomiest.
            cell = min(range(len(cells)), key=lambda c: (room[c] < len(rows), abs(room[c] - len(rows))))
            rows_here, rows = rows[: room[cell]], rows[room[cell] :]
            cells[cell].append(rows_here)
            room[cell] -= len(rows_here)
    return cells


def _place_whole(
    groups: list[list[int]], capacities: list[int], work: Work, tightest: bool
) -> tuple[list[list[list[int]]], list[list[int]]]:
    """Each group, in the order given, into the least loaded (or the tightest) cell with room; and those without."""
    cells: list[list[list[int]]] = [[] for _ in capacities]
    room, load = list(capacities), [0] * len(capacities)
    homeless = []
    for rows in groups:
        fitting = [c for c in range(len(cells)) if room[c] >= len(rows)]
        if not fitting:
            homeless.append(rows)
            continue
        cell = min(fitting, key=(lambda c: room[c]) if tightest else (lambda c: load[c]))
        cells[cell].append(rows)
        room[cell] -= len(rows)
        load[cell] += work(rows)
    return cells, homeless


def _first_fit(items: list[int], sizes: list[int], capacity: int) -> list[list[int]]:
    """First-fit decreasing: items into as few bins as it finds; every item is known to fit an empty bin."""
    bins: list[list[int]] = []
    room: list[int] = []
    for size, item in sorted(zip(sizes, items, strict=True), key=lambda pair: -pair[0]):
        for i, free in enumerate(room):
            if size <= free:
                bins[i].append(item)
                room[i] -= size
                break
        else:
            bins.append([item])
            room.append(capacity - size)
    return bins


def _least_loaded(costs: list[int], count: int) -> list[list[int]]:
    """Longest processing time first: items into exactly ``count`` bins of similar cost, none empty."""
    bins: list[list[int]] = [[] for _ in range(count)]
    load = [0] * count
    for item in sorted(range(len(costs)), key=lambda i: -costs[i]):
        lightest = min(range(count), key=lambda b: (load[b], len(bins[b])))
        bins[lightest].append(item)
        load[lightest] += costs[item]
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
