"""Where the shared prompts end in rows that don't say it: the longest common prefixes of clusters of rows.

Rows are sorted, so that those with a common prefix are neighbours, and the lengths that neighbours have in common make
a tree: its leaves are rows, an inner node joins the rows that agree on a prefix. Sharing a prefix of d tokens among n
rows saves (n - 1) d of them. From the leaves up, each node takes its rows as one cluster or leaves them as its children
clustered them, whichever saves more; a chat template that all rows begin with does not hide the prompts behind it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zorro_verl.grouping import Rows, mix, number_by_first_appearance, ranges


def find_shared_prefixes(rows: Rows) -> tuple[Tensor, Tensor]:
    """``(B,)`` prompt length of each row and ``(B,)`` its group, int64 on the host; ``rows.prompt_lens`` isn't read.

    Tokens and positions both count. The last token of a row is never shared. A row that shares nothing is a group of
    its own. Groups are numbered by first appearance.
    """
    order, common = _neighbours(rows)
    clusters = _clusters(order.tolist(), common.tolist(), rows.num_rows)
    prompt_lens, group_index = torch.ones(rows.num_rows, dtype=torch.int64), torch.arange(rows.num_rows)
    for members, depth in clusters:
        prompt_lens[members] = depth
        group_index[members] = members[0]
    return prompt_lens, number_by_first_appearance(group_index)


def value_ids(values: Tensor) -> Tensor:
    """``(N, K)`` of any dtype -> ``(N,)`` int64 that are equal exactly where rows of ``values`` are equal bit for bit.

    A 64-bit hash in one pass; every row is then compared with the first of its hash, and a row that differs from it
    gets a number of its own. So a collision costs sharing and never a result.
    """
    if values.shape[0] == 0:
        return torch.empty(0, dtype=torch.int64, device=values.device)
    bits = values.detach().contiguous().view(torch.uint8)
    words = torch.nn.functional.pad(bits, (0, -bits.shape[1] % 8)).view(torch.int64)
    salt = mix(torch.arange(1, words.shape[1] + 1, device=values.device))
    ids = torch.unique(mix(words ^ salt).sum(1), return_inverse=True)[1]
    place = torch.arange(ids.numel(), device=values.device)
    first = torch.full_like(place, ids.numel()).scatter_reduce_(0, ids, place, "amin")
    same = (words == words[first[ids]]).all(1)
    return torch.where(same, ids, ids.numel() + place)


def value_ids_where(valid: Tensor, *values: Tensor) -> Tensor:
    """``(B, S)`` int64: `value_ids` of ``(B, S, K)`` values side by side, by their bits; 0 where ``valid`` is False."""
    bits = [x[valid].detach().contiguous().view(torch.uint8) for x in values]
    return torch.zeros(valid.shape, dtype=torch.int64, device=valid.device).masked_scatter_(
        valid, value_ids(torch.cat(bits, 1))
    )


def _neighbours(rows: Rows) -> tuple[Tensor, Tensor]:
    """The rows in lexicographic order, and the ``(B - 1,)`` prefix lengths that neighbours have in common, capped."""
    device, longest = rows.tokens.device, int(rows.lens.max())
    ids = value_ids(torch.stack([rows.tokens, *torch.atleast_2d(rows.position_ids)], 1))
    row = torch.arange(rows.num_rows, device=device).repeat_interleave(rows.lens.to(device), output_size=ids.numel())
    table = torch.full((rows.num_rows, longest), -1, device=device)
    table[row, ranges(torch.zeros_like(rows.lens), rows.lens, device)] = ids
    order = torch.unique(table, dim=0, return_inverse=True)[1].argsort(stable=True)
    table = table[order]
    common = (table[1:] == table[:-1]).cumprod(1).sum(1).cpu()
    lens = rows.lens[order.cpu()]
    return order.cpu(), common.minimum(torch.minimum(lens[1:], lens[:-1]) - 1)


class _Node:
    """Rows that agree on a prefix: how they were clustered so far, and which of them are in no cluster yet."""

    __slots__ = ("rows", "clusters", "saved", "loose")

    def __init__(self, rows: list[int]):
        self.rows = rows
        self.clusters: list[tuple[list[int], int]] = []
        self.saved = 0
        self.loose = list(rows)

    def join(self, others: list[_Node], depth: int) -> None:
        """Take ``others`` in; all rows agree on ``depth`` tokens."""
        for other in others:
            self.rows += other.rows
            self.clusters += other.clusters
            self.saved += other.saved
            self.loose += other.loose
        apart = self.saved + max(0, len(self.loose) - 1) * depth
        together = (len(self.rows) - 1) * depth
        if depth > 0 and together >= apart:
            self.clusters, self.loose = [(sorted(self.rows), depth)], []
        elif len(self.loose) > 1 and depth > 0:
            self.clusters.append((sorted(self.loose), depth))
            self.loose = []
        self.saved = max(apart, together)


def _clusters(order: list[int], common: list[int], num_rows: int) -> list[tuple[list[int], int]]:
    """``(rows, prefix length)`` of each cluster of at least two rows.

    Neighbours' common lengths are walked with a stack of open nodes of growing depth, as for the largest rectangle
    under a histogram: a shorter length closes every node that is deeper.
    """
    open_nodes: list[tuple[int, list[_Node]]] = [(0, [])]  # (depth, children so far)
    for i, row in enumerate(order):
        node = _Node([row])
        depth = common[i] if i < num_rows - 1 else 0
        while open_nodes[-1][0] > depth:
            closed_depth, children = open_nodes.pop()
            node = _joined([*children, node], closed_depth)
        if open_nodes[-1][0] < depth:
            open_nodes.append((depth, [node]))
        else:
            open_nodes[-1][1].append(node)
    return _joined(open_nodes[0][1], 0).clusters


def _joined(children: list[_Node], depth: int) -> _Node:
    first, *others = children
    first.join(others, depth)
    return first
