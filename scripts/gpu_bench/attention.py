"""Op level: attention of one layer, by the package's kernels and by the other ways to share a prompt.

stock varlen on duplicated tokens    every row with its own copy of the prompt
split attention, <kernels>           the package's: a causal and a rectangular call on views, merged
gathered K/V, one varlen call        every response's keys behind a copy of its prompt's; autograd does the rest
FlexAttention, block mask            one call under a mask of which empty blocks are left out
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from gpu_bench.batch import Batch
from gpu_bench.comparison import Results
from gpu_bench.contest import Contestant, NotRun
from gpu_bench.models import Work
from gpu_bench.stock import PEAKED, varlen_attention
from gpu_bench.work import ATTENTION, ATTENTION_UPDATE, operations
from torch import Tensor
from transformers import PretrainedConfig

from zorro_verl.attention import reference_attention, split_attention
from zorro_verl.attention_kernels import ATTENTION_IMPLEMENTATIONS, resolve_kernels

FORWARD = Work("forward", ATTENTION)
FORWARD_BACKWARD = Work("forward + backward", ATTENTION_UPDATE, backward=True)
DENSE = ("auto", "eager")  # no kernels of their own


class AttentionLevel:
    """Random queries, keys and values of one layer, peaked as a trained model's.

    Args:
        config: number and size of the heads.
        device: where it runs.
    """

    def __init__(self, config: PretrainedConfig, device: str):
        self.config, self.device = config, device
        self.heads = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
        self.scale = config.head_dim**-0.5

    def contestants(self, batch: Batch, work: Work) -> tuple[Contestant, ...]:
        full, less = (operations(self.config, batch.groups, work.passes, shared) for shared in (False, True))
        full, less = full / self.config.num_hidden_layers, less / self.config.num_hidden_layers
        step = partial(_AttentionStep, Inputs(self, batch), work)

        def split(name: str):
            return lambda: step(_split(batch, self.scale, name, self.device))

        ours = [name for name in ATTENTION_IMPLEMENTATIONS if name not in DENSE]
        return (
            Contestant("stock varlen on duplicated tokens", "baseline", lambda: _DuplicatedStep(*step.args), full),
            *(Contestant(f"split attention, {name}", "ours", split(name), less) for name in ours),
            Contestant("gathered K/V, one varlen call", "peer", lambda: step(_gathered(batch, self.scale)), less),
            Contestant("FlexAttention, block mask", "peer", lambda: step(_flex(batch, self.scale)), less),
        )

    def close(self) -> None:
        """Its inputs go with the contestants."""

    def reference(self, batch: Batch, work: Work) -> Results:
        """The dense reference in float32, under the plan's mask."""
        visible = batch.plan.dense_mask()
        exact = Inputs(self, batch, torch.float32)
        step = _AttentionStep(exact, work, lambda q, k, v: reference_attention(q, k, v, visible, self.scale))
        step.reset()
        step.run()
        return step.results()


class Inputs:
    """The packed layer, made anew from one seed: all contestants get the same.

    Attributes:
        q, k, v, grad: ``(T, heads, D)`` of one dtype; bfloat16's values, whatever the dtype.
        copies: ``(T, 1, 1)`` how many rows each packed token is part of.
    """

    def __init__(self, level: AttentionLevel, batch: Batch, dtype: torch.dtype = torch.bfloat16):
        self.level, self.batch, self.dtype = level, batch, dtype

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        level, plan = self.level, self.batch.plan
        generator = torch.Generator(level.device).manual_seed(2)
        sizes = [(plan.num_tokens, heads, level.config.head_dim) for heads in (*level.heads, level.heads[0])]
        q, k, v, grad = (
            torch.randn(size, generator=generator, device=level.device, dtype=torch.bfloat16) for size in sizes
        )
        return tuple(x.to(self.dtype) for x in (q * PEAKED, k, v, grad))

    @property
    def copies(self) -> Tensor:
        return self.batch.plan.unpack_index.bincount(minlength=self.batch.plan.num_tokens)[:, None, None]


class _AttentionStep:
    """A contestant that works on the packed layer."""

    def __init__(self, inputs: Inputs, work: Work, attend: Callable[[Tensor, Tensor, Tensor], Tensor]):
        self.batch, self.work, self.attend = inputs.batch, work, attend
        *leaves, self.grad = inputs.tensors()
        self.leaves = [leaf.requires_grad_(work.backward) for leaf in leaves]

    def reset(self) -> None:
        self.out, self.gradients = None, ()

    def run(self) -> None:
        with torch.set_grad_enabled(self.work.backward):
            out = self.attend(*self.leaves)
        if self.work.backward:
            self.gradients = torch.autograd.grad(out, self.leaves, self.grad)
        self.out = out.detach()

    def results(self) -> Results:
        forest = self.batch.plan.forest
        lens = forest.lengths[forest.order].tolist()
        gradients = dict(zip(("dq", "dk", "dv"), map(self.packed_grad, self.gradients), strict=False))
        return Results({"out": self.packed(self.out)}, lens, gradients)

    def packed(self, values: Tensor) -> Tensor:
        return values

    def packed_grad(self, grad: Tensor) -> Tensor:
        return grad


class _DuplicatedStep(_AttentionStep):
    """The stock way. A copy's output has its share of the gradient, so that the copies' gradients sum to the same."""

    def __init__(self, inputs: Inputs, work: Work):
        super().__init__(inputs, work, self._attend)
        plan = self.batch.plan
        self.grad = plan.unpack((self.grad / inputs.copies).to(self.grad.dtype), 0)
        self.leaves = [plan.unpack(leaf.detach(), 0).requires_grad_(work.backward) for leaf in self.leaves]
        self.scale = inputs.level.scale
        self.piece = self.batch.whole

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        piece = self.piece
        blocks = [(start, end, start, end) for start, end in piece.bounds]
        return varlen_attention(q, k, v, (piece.cu_seqlens,) * 2, (piece.longest,) * 2, blocks, self.scale)

    def packed(self, values: Tensor) -> Tensor:
        return self.batch.plan.pack(values, 0)

    def packed_grad(self, grad: Tensor) -> Tensor:
        plan = self.batch.plan
        total = torch.zeros(plan.num_tokens, *grad.shape[1:], device=grad.device)
        # Rounded as the packed gradients are: to add up in float32 and stay there is no option of theirs.
        return total.index_add_(0, plan.unpack_index, grad.float()).to(grad.dtype)


def _split(batch: Batch, scale: float, name: str, device: str):
    try:
        kernels = resolve_kernels(name, device)
    except ValueError as error:
        raise NotRun(str(error)) from error
    return lambda q, k, v: split_attention(q, k, v, batch.plan.forest, scale, kernels)


def _gathered(batch: Batch, scale: float):
    """A window that no row exceeds makes the plan gather every segment's whole path."""
    call = batch.plan.forest.window_call(batch.plan.longest_row)
    cu_seqlens, longest = (call.cu_seqlens_q, call.cu_seqlens_k), (call.max_seqlen_q, call.max_seqlen_k)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = k.index_select(0, call.key_index), v.index_select(0, call.key_index)
        return varlen_attention(q, keys, values, cu_seqlens, longest, call.blocks, scale)

    return attend


def _flex(batch: Batch, scale: float):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    forest, device = batch.plan.forest, batch.device
    segment = forest.segment_index()
    parent = forest.parents[segment].to(device)
    segment = segment.to(device)
    if len(forest.ancestors) > 1:
        raise NotRun("its mask looks one level up, and this forest is deeper")

    def visible(b, h, query, key):
        own = (segment[query] == segment[key]) & (query >= key)
        return own | (parent[query] == segment[key])

    make, attention = create_block_mask, flex_attention
    if torch.device(device).type == "cuda":
        # Dynamic: the kernels of one shape serve the next. Beyond the limit dynamo would run it uncompiled.
        torch._dynamo.config.recompile_limit = 64
        make, attention = torch.compile(create_block_mask), torch.compile(flex_attention, dynamic=True)
    tokens = forest.num_tokens
    mask = make(visible, None, None, tokens, tokens, device=device)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        return attention(q, k, v, block_mask=mask, scale=scale, enable_gqa=True)[0].transpose(0, 1)

    return attend
