"""Shared prompts of rows that don't say where they end, and ids of equal values."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zorro_verl import prefixes
from zorro_verl.grouping import Rows, exclusive_cumsum
from zorro_verl.prefixes import find_shared_prefixes, value_ids


def rows_of(lists, positions=None):
    lens = torch.tensor([len(x) for x in lists])
    positions = positions or [range(len(x)) for x in lists]
    flat = lambda parts: torch.tensor([x for part in parts for x in part])  # noqa: E731
    return Rows(flat(lists), flat(positions), exclusive_cumsum(lens), torch.ones_like(lens))


def clusters(lists, positions=None):
    """``{rows: prefix length}`` of each group with more than one row."""
    prompt_lens, groups = find_shared_prefixes(rows_of(lists, positions))
    members = {}
    for row, group in enumerate(groups.tolist()):
        members.setdefault(group, []).append(row)
    assert list(members) == list(range(len(members))), "groups are numbered by first appearance"
    for rows in members.values():
        assert len({int(prompt_lens[r]) for r in rows}) == 1
    return {tuple(rows): int(prompt_lens[rows[0]]) for rows in members.values() if len(rows) > 1}


@pytest.mark.parametrize(
    ("lists", "expected"),
    [
        pytest.param([[1, 2, 3, 9], [1, 2, 3, 8], [1, 2, 3, 7, 7]], {(0, 1, 2): 3}, id="one prompt"),
        pytest.param(
            [[1, 2, 3, 9], [4, 5, 6, 9], [1, 2, 3, 8], [4, 5, 6, 8], [1, 2, 3, 7], [4, 5, 6, 7]],
            {(0, 2, 4): 3, (1, 3, 5): 3},
            id="two prompts interleaved",
        ),
        pytest.param(
            [[0, 1, 2, 3, 9], [0, 4, 5, 6, 9], [0, 1, 2, 3, 8], [0, 4, 5, 6, 8], [0, 7, 7]],
            {(0, 2): 4, (1, 3): 4},
            id="a template that all begin with does not hide the prompts",
        ),
        pytest.param(
            [[0, 0, 0, 0, 1], [0, 0, 0, 0, 2], [0, 0, 0, 0, 3, 3, 1], [0, 0, 0, 0, 3, 3, 2]],
            {(0, 1, 2, 3): 4},
            id="two responses that begin alike do not break their group",
        ),
        pytest.param(
            [[5, 6, 1, 1, 1], [5, 6, 2, 2, 9], [5, 6, 2, 2, 8], [5, 6, 3, 3, 1]],
            {(0, 1, 2, 3): 2},
            id="a tie goes to the larger cluster",
        ),
        pytest.param(
            [[5, 6, 1], [5, 6, 2, 2, 2, 2, 9], [5, 6, 2, 2, 2, 2, 8], [5, 6, 3]],
            {(0, 3): 2, (1, 2): 6},
            id="rows that a deeper cluster leaves behind still share",
        ),
        pytest.param([[1, 2, 3]] * 3, {(0, 1, 2): 2}, id="the last token of a row is never shared"),
        pytest.param([[1, 2], [1, 2, 3], [1, 2, 3]], {(0, 1, 2): 1}, id="a row that is the beginning of another"),
        pytest.param([[1], [1], [1]], {}, id="rows of one token share nothing"),
        pytest.param([[1, 2, 3], [2, 2, 3], [3, 2, 3]], {}, id="nothing in common"),
        pytest.param([[1, 2, 3]], {}, id="one row"),
    ],
)
def test_clusters(lists, expected):
    assert clusters(lists) == expected


def test_positions_count():
    lists = [[1, 2, 3, 9], [1, 2, 3, 8], [1, 2, 3, 7]]
    assert clusters(lists, [range(4), range(4), (0, 1, 5, 6)]) == {(0, 1, 2): 2}
    assert clusters(lists, [range(4), range(4), (0, 4, 5, 6)]) == {(0, 1): 3}


def saved(partition):
    return sum((len(rows) - 1) * depth for rows, depth in partition.items())


def best_saving(lists):
    """Over every way to partition the rows, by brute force: the tokens that its groups' common prefixes save."""

    def common(rows):
        parts = [lists[r] for r in rows]
        agreed = sum(1 for _ in itertools.takewhile(lambda column: len(set(column)) == 1, zip(*parts, strict=False)))
        return min(agreed, min(len(p) for p in parts) - 1)

    def partitions(rows):
        if not rows:
            yield []
            return
        first, *rest = rows
        for size in range(len(rest) + 1):
            for others in itertools.combinations(rest, size):
                left = [r for r in rest if r not in others]
                for more in partitions(left):
                    yield [[first, *others], *more]

    return max(
        sum((len(rows) - 1) * common(rows) for rows in partition) for partition in partitions(list(range(len(lists))))
    )


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), min_size=1, max_size=6))
def test_what_is_shared_is_equal_and_nearly_all_that_can_be(lists):
    found = clusters(lists)
    for rows, depth in found.items():
        assert len({tuple(lists[r][:depth]) for r in rows}) == 1
        assert all(depth < len(lists[r]) for r in rows)
    best = best_saving(lists)
    assert saved(found) <= best
    # From the leaves up is greedy: a row left behind is not offered to an ancestor that would have been better off.
    assert saved(found) >= 0.7 * best


def test_a_thousand_rows_need_no_recursion():
    lists = [[*range(i), 5000 + i] for i in range(1, 1200)]  # every row one token deeper than the last
    assert saved(clusters(lists)) > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
@pytest.mark.parametrize("width", [1, 3, 8])
def test_ids_are_equal_where_values_are(dtype, width):
    g = torch.Generator().manual_seed(0)
    distinct = torch.randint(-9, 9, (7, width), generator=g).unique(dim=0).to(dtype)
    which = torch.randint(len(distinct), (40,), generator=g)
    ids = value_ids(distinct[which])
    assert torch.equal(ids[:, None] == ids[None], which[:, None] == which[None])


def test_bits_decide():
    ids = value_ids(torch.tensor([[0.0], [-0.0], [float("nan")], [float("nan")], [1.0], [1.0 + 2**-23]]))
    assert (ids[2] == ids[3]).item()
    assert ids.unique().numel() == 5


def test_hashes_that_collide_cost_sharing_and_no_result(monkeypatch):
    monkeypatch.setattr(prefixes, "mix", lambda x: x * 0)
    values = torch.tensor([[1], [2], [1], [3], [2]])
    ids = value_ids(values)
    same = ids[:, None] == ids[None]
    assert not (same & (values != values.T)).any()
    lists = [[1, 2, 9], [1, 3, 9], [1, 2, 8], [1, 2, 7]]
    for rows, depth in clusters(lists).items():
        assert len({tuple(lists[r][:depth]) for r in rows}) == 1


def test_no_values():
    assert value_ids(torch.empty(0, 3)).shape == (0,)
