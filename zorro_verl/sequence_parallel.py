"""Sequence parallelism: a packed row in equal slices over ranks, and heads over ranks where tokens look at each other.

DeepSpeed-Ulysses (Jacobs et al., 2023) over a plan. T packed tokens are padded to a multiple of the ranks, and each
rank runs its slice through everything that works token by token. Attention and linear attention need whole rows: there
the ranks trade, and each gets all T tokens of its share of the heads, so that a plan holds on every rank as it is.

    rank 0   tokens 0 1 2   heads a b    to_heads   tokens 0 1 2 3 4   heads a
    rank 1   tokens 3 4 .   heads a b   <-------->  tokens 0 1 2 3 4   heads b
                                         to_tokens

The dot is padding, a copy of the last token, which is dropped before any token could look at it.

Gradients are those of the sum of all ranks' losses, which is what FSDP's average over the same ranks undoes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


class Slices:
    """How a number of items, tokens of a packed row or scores, lie in equal slices over the ranks of a group.

    A plain class, since it passes through FSDP2 (see `zorro_verl.packing.Plan`).

    Args:
        count: items of the whole, N below.
        group: the ranks; None for this one alone, which then holds them all.
        multiple: the padded whole is a multiple of it, also for one rank.

    Attributes:
        size, rank: how many ranks, and which this is.
        per_rank: items of a slice, t below; ``size * per_rank`` is the padded whole.
        whole_here: whether this rank's slice is all there is, without padding: then `own`, `to_heads` and `to_tokens`
            give back what they got, and look at no number that torch.compile could take for constant.
    """

    def __init__(self, count: int, group: ProcessGroup | None = None, multiple: int = 1):
        self.count, self.group = count, group
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        unit = math.lcm(self.size, multiple)
        self.per_rank = -(-count // unit) * unit // self.size
        self.whole_here = self.size == 1 and self.per_rank == count

    def own(self, values: Tensor, dim: int = -1) -> Tensor:
        """This rank's slice: N items of ``values`` along ``dim`` -> t of them. Padding repeats the last one."""
        if self.whole_here:
            return values
        start = min(self.rank * self.per_rank, self.count)
        here = min(self.per_rank, self.count - start)
        part = values.narrow(dim, start, here)
        if here == self.per_rank:
            return part
        shape = [-1] * values.dim()
        shape[dim] = self.per_rank - here
        return torch.cat([part, values.narrow(dim, self.count - 1, 1).expand(shape)], dim)

    def whole(self, values: Tensor) -> Tensor:
        """All ranks' slices: ``(t, ...)`` -> ``(N, ...)``, padding dropped."""
        if self.group is not None and self.size > 1:
            values = _Gather.apply(values, self.group)
        return values[: self.count]

    def to_heads(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """``(t, H, ...)`` of every head of this rank's tokens -> ``(N, H / size, ...)`` of all tokens of its heads.

        Heads of the first tensor have to divide. Of the others there may be fewer than ranks, and each is copied: key
        and value heads of grouped queries come out beside the query heads that they belong to. One exchange for each
        dtype.

        Raises:
            ValueError: heads that don't divide.
        """
        if self.whole_here:
            return tensors
        if self.size == 1:
            return tuple(x[: self.count] for x in tensors)
        if tensors[0].shape[1] % self.size:
            raise _indivisible(tensors[0].shape[1], self.size)
        parts = [self._head_parts(x) for x in tensors]
        received = list(parts)  # each is replaced by what comes in its place
        for dtype in dict.fromkeys(x.dtype for x in parts):
            members = [i for i, x in enumerate(parts) if x.dtype == dtype]
            sent = torch.cat([parts[i].flatten(2) for i in members], 2).transpose(0, 1)
            pieces = _Trade.apply(sent, self.group).flatten(0, 1)[: self.count]
            for i, piece in zip(members, pieces.split([parts[i].shape[2:].numel() for i in members], 1), strict=True):
                received[i] = piece.unflatten(1, parts[i].shape[2:])
        return tuple(received)

    def to_tokens(self, values: Tensor) -> Tensor:
        """``(N, h, ...)`` of all tokens of this rank's heads -> ``(t, size * h, ...)`` of every head of its tokens.

        Padding comes out as zeros.
        """
        if self.whole_here:
            return values
        padding = values.new_zeros(self.size * self.per_rank - self.count, *values.shape[1:])
        values = torch.cat([values, padding])
        if self.size == 1:
            return values
        received = _Trade.apply(values.unflatten(0, (self.size, self.per_rank)), self.group)
        return received.transpose(0, 1).flatten(1, 2)

    def own_heads(self, values: Tensor) -> Tensor:
        """Of values per head ``(H, ...)``, the same on all ranks, those whose heads `to_heads` gives this rank."""
        return values.unflatten(0, (self.size, values.shape[0] // self.size))[self.rank]

    def _head_parts(self, x: Tensor) -> Tensor:
        """``(t, H, ...)`` -> ``(t, size, heads of each rank, ...)``."""
        heads = x.shape[1]
        if heads < self.size and self.size % heads == 0:
            x = x.repeat_interleave(self.size // heads, 1)
        elif heads % self.size:
            raise _indivisible(heads, self.size)
        return x.unflatten(1, (self.size, x.shape[1] // self.size))  # not -1: there may be no token


def check_heads(key: str, size: int, heads: Mapping[str, int]) -> None:
    """Refuse ranks that a model's heads don't divide over, before anything runs.

    Args:
        key: of the config, which set the size.
        size: ranks of a sequence-parallel group.
        heads: counts by the names of the model's config; of ``num_key_value_heads`` there may be fewer than ranks.

    Raises:
        ValueError: heads that don't divide.
    """
    if type(size) is not int or size < 1:
        raise ValueError(f"{key}: expected an integer of at least 1, got {size!r}")
    for name, count in heads.items():
        few = name == "num_key_value_heads"
        if count % size and not (few and size % count == 0):
            expected = f"a divisor{' or a multiple' if few else ''} of {count}, the model's {name}"
            raise ValueError(f"{key}: expected {expected}, got {size}; set it to one that fits all of {dict(heads)}")


def _indivisible(heads: int, size: int) -> ValueError:
    return ValueError(
        f"ulysses_sequence_parallel_size: expected a divisor of {heads}, the heads of a layer, got {size}"
    )


class _Trade(torch.autograd.Function):
    """``(size, ...)``: piece r goes to rank r, and the piece that comes from rank r stands there. Its own adjoint."""

    @staticmethod
    def forward(ctx, pieces, group):
        ctx.group = group
        return _trade(pieces, group)

    @staticmethod
    def backward(ctx, grad):
        return _trade(grad, ctx.group), None


def _trade(pieces: Tensor, group: ProcessGroup) -> Tensor:
    pieces = pieces.contiguous()
    received = torch.empty_like(pieces)
    dist.all_to_all_single(received, pieces, group=group)
    return received


class _Gather(torch.autograd.Function):
    """``(t, ...)`` of each rank -> ``(size * t, ...)`` on all; the gradient of a slice is summed over the ranks."""

    @staticmethod
    def forward(ctx, own, group):
        ctx.group = group
        whole = own.new_empty(dist.get_world_size(group) * own.shape[0], *own.shape[1:])
        dist.all_gather_into_tensor(whole, own.contiguous(), group=group)
        return whole

    @staticmethod
    def backward(ctx, grad):
        own = grad.new_empty(grad.shape[0] // dist.get_world_size(ctx.group), *grad.shape[1:])
        dist.reduce_scatter_tensor(own, grad.contiguous(), group=ctx.group)
        return own, None
