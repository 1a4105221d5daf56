"""Gated DeltaNet over a forest of segments: its causal convolution and its recurrence, exact on every path.

Both carry something from token to token: the convolution its last ``width - 1`` inputs, the recurrence a matrix per
head. A response starts from what its prompt left behind, not from zeros and not from its neighbour. Two ways:

    rows           packed             expand: one call                 fork: one call per round
    P P | a a      P P | a a | b      [P P a a] [P P b]                round 0  [P P] -> state
    P P | b                           each row scans its own prompt    round 1  state -> [a a], state -> [b]

A round holds the segments with equally many non-empty ancestors: the states they start from are ready together. An
empty segment takes no part, and its descendants start where its own ancestors end.

The kernels are the mixer's own and are handed in; nothing here depends on how they compute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from zorro_verl.forest import Forest
from zorro_verl.grouping import exclusive_cumsum, ranges, to_device
from zorro_verl.packing import Plan

LINEAR_ATTENTION = ("auto", "expand", "fork")

# What a further round has to save for `auto` to fork, in tokens: a call costs the same whatever it holds. The rule in
# torch was measured forward and backward, on one and two threads with two head sizes. Where 224 tokens or fewer were
# saved in very short rows, fork took up to twice as long; from 390 on it was 1.3 to 4.4 times faster. The other figure
# is an estimate for flash-linear-attention: some 10 ms of host time a call against some 0.2 us a token.
FORK_MIN_TOKENS = 256
FORK_MIN_TOKENS_VARLEN = 65536


class LinearPlan:
    """How the Gated DeltaNet layers compute one micro-batch: built once, read by every layer.

    A plain class for the same reason as the plan.

    Args:
        plan: the micro-batch's plan.
        mode: "expand" scans the rows as they were: one call, but query, key, value, g, beta and output of all N row
            tokens exist at once, the plain model's peak. "fork" scans each packed token once, in one call per round,
            and keeps a float32 state of ``(heads, K, V)`` for each segment that starts from one or leaves one.
            "auto" takes what should be faster.
        varlen: True if the rule reads ``cu_seqlens``, as flash-linear-attention's does. False gives it padded
            batches, because the rule of transformers in torch ignores ``cu_seqlens``, or has no such argument.
        width: kernel size of the widest convolution.

    Attributes:
        mode: "expand" or "fork".
        num_tokens: T.
        width: as given.

    Raises:
        ValueError: a mode that is none of `LINEAR_ATTENTION`.
    """

    def __init__(self, plan: Plan, mode: str = "auto", varlen: bool = False, width: int = 4):
        if mode not in LINEAR_ATTENTION:
            raise ValueError(f"linear_attention: expected one of {', '.join(LINEAR_ATTENTION)}, got {mode!r}")
        device = plan.token_index.device
        segments = _Segments(plan.forest)
        if mode == "auto":
            least = (FORK_MIN_TOKENS_VARLEN if varlen else FORK_MIN_TOKENS) * (segments.num_rounds - 1)
            mode = "fork" if plan.num_row_tokens - plan.num_tokens >= least else "expand"
        self.mode, self.width = mode, width

        # (L,) what to convolve, 0 a zero and t + 1 packed token t; and (T,) where their results stand.
        self._window_index, self._own_index = segments.windows(width, device)
        self._scan_index = self._packed_index = None  # None: tokens are scanned where they lie in the packed row
        if mode == "expand" and segments.num_rounds > 1:
            segments = _Segments(plan.unshared.forest)
            self._scan_index, self._packed_index = plan.unpack_index, plan.token_index
        elif not segments.packed_round_by_round:
            scan_index = segments.round_by_round()
            self._scan_index, self._packed_index = (
                to_device(index, device) for index in (scan_index, scan_index.argsort())
            )
        self._rounds = list(segments.rounds(varlen, device))

    @property
    def num_tokens(self) -> int:
        return self._own_index.shape[0]  # a size may change from batch to batch: torch.compile takes ints for constant


def causal_conv(conv: Callable[[Tensor], Tensor], x: Tensor, width: int, plan: LinearPlan) -> Tensor:
    """The mixer's causal convolution, every token's window filled from its own path.

    Args:
        conv: ``(1, C, L) -> (1, C, L)``: the stock depthwise convolution with zeros on its left, and its activation.
        x: ``(1, C, T)`` packed inputs.
        width: its kernel size.
        plan: the micro-batch's linear plan.

    Returns:
        ``(1, C, T)``: one call of ``conv`` over the segments, each behind the last ``width - 1`` inputs of its path.

    Raises:
        ValueError: x isn't the plan's packed row, or a kernel that is wider than the plan's.
    """
    _check_packed("x", x, 2, plan)
    if width > plan.width:
        raise ValueError(
            f"width: expected at most the plan's {plan.width}, got {width}; build the plan with this width"
        )
    # Token-major on both sides: so mixers lay x out, and rows of C values are what gathers copy best.
    windows = torch.nn.functional.pad(x.transpose(1, 2), (0, 0, 1, 0)).index_select(1, plan._window_index)
    return conv(windows.transpose(1, 2)).transpose(1, 2).index_select(1, plan._own_index).transpose(1, 2)


def gated_delta_rule(
    rule: Callable[..., tuple[Tensor, Tensor | None]],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    plan: LinearPlan,
    **options: Any,
) -> Tensor:
    """The mixer's recurrence, every segment started from the state at the end of its path.

    States go from call to call as the rule gives them: float32, whatever the inputs are.

    Args:
        rule: the stock ``chunk_gated_delta_rule``, returning ``(output, final state or None)``.
        query, key: ``(1, T, H, K)`` packed; value: ``(1, T, H, V)``; g, beta: ``(1, T, H)``.
        plan: the micro-batch's linear plan.
        options: handed to ``rule`` as they are. Not ``initial_state``, ``output_final_state`` or ``cu_seqlens``.

    Returns:
        ``(1, T, H, V)`` of the rule's output dtype.

    Raises:
        ValueError: query isn't the plan's packed row.
    """
    _check_packed("query", query, 1, plan)
    inputs = _reordered((query, key, value, g, beta), plan._scan_index)
    outputs, state = [], None
    for step in plan._rounds:
        output, state = step.run(rule, inputs, state, options)
        outputs.append(output)
    (packed,) = _reordered([outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)], plan._packed_index)
    return packed


class _Segments:
    """The non-empty segments of a forest in packed order, all ``(S,)`` int64 on the host.

    Attributes:
        starts, lengths: their tokens in the packed row.
        parents: each one's nearest non-empty ancestor among them, or -1.
        depths: how many non-empty ancestors each has.
        num_rounds: 1 more than the largest of them.
    """

    def __init__(self, forest: Forest):
        lengths = forest.lengths
        parents, depths = torch.full_like(lengths, -1), torch.zeros_like(lengths)
        for ancestor in forest.ancestors:
            full = (ancestor >= 0) & (lengths[ancestor] > 0)
            parents = torch.where(full & (depths == 0), ancestor, parents)
            depths += full
        members = forest.order[lengths[forest.order] > 0]
        place = torch.empty_like(lengths)
        place[members] = torch.arange(members.numel())
        self.starts, self.lengths, self.depths = forest.starts[members], lengths[members], depths[members]
        self.parents = torch.where(self.depths > 0, place[parents[members]], -1)
        self.num_rounds = int(self.depths.max()) + 1

    @property
    def packed_round_by_round(self) -> bool:
        """Is every round a run of the packed row? Not if a segment has both an empty ancestor and a full one."""
        return bool((self.depths.diff() >= 0).all())

    def round_by_round(self) -> Tensor:
        """``(T,)`` int64 on the host: the packed tokens, round after round."""
        order = self.depths.argsort(stable=True)
        return ranges(self.starts[order], self.lengths[order])

    def rounds(self, varlen: bool, device: torch.device) -> Iterator[_Round]:
        """The calls of the rule, over tokens that lie round by round."""
        place, start = torch.empty_like(self.starts), 0
        for depth in range(self.num_rounds):
            members = (self.depths == depth).nonzero().flatten()
            place[members] = torch.arange(members.numel())
            parents = place[self.parents[members]] if depth else None
            last = depth + 1 == self.num_rounds
            yield _Round(start, self.lengths[members], parents, last, varlen, device)
            start += int(self.lengths[members].sum())

    def windows(self, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Each segment behind the ``width - 1`` tokens before it.

        Returns:
            ``(L,)`` int64: what to convolve, 0 a zero and ``t + 1`` packed token t; and ``(T,)`` where results stand.
        """
        sources = torch.cat([self.tokens_before(width - 1), self.starts[:, None]], 1)
        runs = torch.ones_like(sources)
        runs[:, -1] = self.lengths
        own = exclusive_cumsum(runs.sum(1))[:-1] + width - 1
        return ranges(sources.flatten() + 1, runs.flatten(), device), ranges(own, self.lengths, device)

    def tokens_before(self, count: int) -> Tensor:
        """``(S, count)`` int64: the packed tokens that end where each path's segment starts, -1 before the row."""
        tokens = torch.full((self.starts.numel(), count), -1)
        distance = torch.arange(count, 0, -1).expand_as(tokens)
        ancestor = self.parents
        for _ in range(1, self.num_rounds):
            ends = torch.where(ancestor >= 0, self.starts[ancestor] + self.lengths[ancestor], 0)[:, None]
            lengths = torch.where(ancestor >= 0, self.lengths[ancestor], 0)[:, None]
            tokens = torch.where((distance > 0) & (distance <= lengths), ends - distance, tokens)
            distance = distance - lengths
            ancestor = torch.where(ancestor >= 0, self.parents[ancestor], -1)
        return tokens


class _Round:
    """One call of the rule, over segments whose states are ready.

    Args:
        start: where their tokens start.
        lengths: ``(n,)`` int64 on the host, tokens of each, none 0.
        parents: ``(n,)`` int64 on the host, places in the round before; None for the first round.
        last: no round follows, so no state is asked for.
        varlen: the call takes ``cu_seqlens``; else a batch with zeros on the right, which change neither output nor
            state: a token with k = beta = g = 0 adds nothing and decays nothing.
        device: where the tokens are.
    """

    def __init__(
        self, start: int, lengths: Tensor, parents: Tensor | None, last: bool, varlen: bool, device: torch.device
    ):
        self.tokens = slice(start, start + int(lengths.sum()))
        self.parents = None if parents is None else to_device(parents, device)
        self.last = last
        self.shape = (lengths.numel(), int(lengths.max()))
        self.cu_seqlens = self.slots = None
        if varlen:
            # One tensor for all layers: flash-linear-attention keeps what it derives from it by identity.
            self.cu_seqlens = to_device(exclusive_cumsum(lengths), device)
        elif int(lengths.min()) < self.shape[1]:
            self.slots = ranges(torch.arange(self.shape[0]) * self.shape[1], lengths, device)

    def run(
        self,
        rule: Callable[..., tuple[Tensor, Tensor | None]],
        inputs: Sequence[Tensor],
        states: Tensor | None,
        options: dict[str, Any],
    ) -> tuple[Tensor, Tensor | None]:
        """``(1, t, H, V)`` outputs of the segments and, but for the last round, their ``(n, H, K, V)`` states."""
        inputs = [x[:, self.tokens] for x in inputs]
        if self.cu_seqlens is not None:
            options = options | {"cu_seqlens": self.cu_seqlens}
        else:
            inputs = [self._pad(x) for x in inputs]
        query, key, value, g, beta = inputs
        output, final = rule(
            query,
            key,
            value,
            g=g,
            beta=beta,
            initial_state=None if self.parents is None or states is None else states.index_select(0, self.parents),
            output_final_state=not self.last,
            **options,
        )
        return output if self.cu_seqlens is not None else self._unpad(output), final

    def _pad(self, x: Tensor) -> Tensor:
        if self.slots is None:
            return x[0].unflatten(0, self.shape)
        batch = x.new_zeros(self.shape[0] * self.shape[1], *x.shape[2:])
        return batch.index_copy_(0, self.slots, x[0]).unflatten(0, self.shape)

    def _unpad(self, x: Tensor) -> Tensor:
        x = x.flatten(0, 1)
        return (x if self.slots is None else x.index_select(0, self.slots))[None]


def _reordered(tensors: Sequence[Tensor], index: Tensor | None) -> Sequence[Tensor]:
    return tensors if index is None else [x.index_select(1, index) for x in tensors]


def _check_packed(name: str, x: Tensor, axis: int, plan: LinearPlan) -> None:
    if x.shape[0] != 1 or x.shape[axis] != plan.num_tokens:
        raise ValueError(
            f"{name}: expected one packed row of {plan.num_tokens} tokens on axis {axis}, got {tuple(x.shape)}; "
            "hand the layer the row that its plan describes"
        )
