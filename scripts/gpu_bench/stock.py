"""The baseline's parts: attention of each row on its own as torch ships it, and a model that runs on it."""

from __future__ import annotations

import inspect

import torch
from gpu_bench.batch import Piece
from gpu_bench.contest import NotRun
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

ATTENTION_NAME = "bench_stock_varlen"
PEAKED = 2.0  # scores of random weights have a deviation of one; a trained model's attention is sharper


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    bounds: list[tuple[int, int, int, int]],
    scale: float,
) -> Tensor:
    """Causal attention of query block i on key block i, aligned at their ends; differentiable.

    Args:
        q: ``(Tq, Hq, D)``; k, v: ``(Tk, Hkv, D)``.
        cu_seqlens, longest: of queries and of keys.
        bounds: the same blocks as ``(q0, q1, k0, k1)`` on the host.
        scale: factor on the scores.

    Half precision on CUDA runs torch's flash attention, all blocks in one call. Everything else (a CPU, and the
    float32 that errors are measured against) runs `scaled_dot_product_attention` on one block at a time.
    """
    if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16):
        check_int32(q, cu_seqlens[0].numel() - 1)
        return _torch_varlen(q, k, v, *cu_seqlens, *longest, scale)
    return torch.cat([_block(q[q0:q1], k[k0:k1], v[k0:k1], scale) for q0, q1, k0, k1 in bounds])


def check_int32(q: Tensor, blocks: int) -> None:
    """Refuse what the backward of flash attention 2 addresses beyond 32 bits: it faults, and ends the process."""
    tokens, heads, head_dim = q.shape
    elements = (tokens + 128 * blocks) * heads * (-(-head_dim // 32) * 32)
    if elements >= 2**31:
        raise NotRun(f"flash attention 2's backward counts its {elements} accumulators in 32 bits: too many tokens")


def _torch_varlen(q, k, v, cu_q, cu_k, max_q, max_k, scale) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    options = {"scale": scale, "window_size": (-1, 0)}  # which is how it spells causal
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:  # torch 2.11 takes fewer heads without being told
        options["enable_gqa"] = q.shape[1] != k.shape[1]
    return varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, **options)


def _block(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    repeats = q.shape[1] // k.shape[1]
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)))
    queries, keys = q.shape[2], k.shape[2]
    mask = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return out[0].transpose(0, 1)


def _attention(module, query, key, value, attention_mask, scaling=None, bench_rows: Piece | None = None, **_):
    """As transformers calls it, ``(1, heads, N, D)``; the rows come with the forward's keyword arguments."""
    q, k, v = (x.squeeze(0).transpose(0, 1).to(value.dtype) for x in (query, key, value))
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    piece = bench_rows
    blocks = [(start, end, start, end) for start, end in piece.bounds]
    out = varlen_attention(q, k, v, (piece.cu_seqlens,) * 2, (piece.longest,) * 2, blocks, scale)
    return out[None], None


AttentionInterface.register(ATTENTION_NAME, _attention)


def build_model(config: PretrainedConfig, device: str, seed: int = 0) -> PreTrainedModel:
    """A model of random bfloat16 weights that attends as `varlen_attention` does."""
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=ATTENTION_NAME)
    with torch.no_grad():
        for layer in model.model.layers:
            # Scores of deviation one make attention the average of all tokens, whichever these are.
            layer.self_attn.q_norm.weight.fill_(PEAKED)
    return model


def hidden_states(model: PreTrainedModel, piece: Piece) -> Tensor:
    """``(R, E)`` hidden states that predict the response tokens of some rows."""
    hidden = model.model(
        input_ids=piece.tokens,
        position_ids=piece.positions,
        attention_mask=torch.empty((1, 1, 0, 0), dtype=torch.bool, device=piece.tokens.device),  # made by nobody else
        use_cache=False,
        bench_rows=piece,
    ).last_hidden_state
    return hidden[0].index_select(0, piece.predictors)


def set_checkpointing(model: nn.Module, on: bool) -> None:
    """Whether the forward of every layer is run again in the backward."""
    if on:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    else:
        model.gradient_checkpointing_disable()
