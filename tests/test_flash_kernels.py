"""The adapters for CUDA's flash attention, over emulations with the real signatures and each library's conventions.

No kernel of theirs runs here. An emulation takes exactly the arguments of a release, checks what its C++ checks, and
computes block by block what its documentation and source say: what a query without keys gets, which gradients are
written, what is left as it was. The oracle is dense attention on every path of a forest by itself.
"""

from __future__ import annotations

import copy
import functools
import importlib
import importlib.metadata
import inspect
import itertools
import pickle
import sys
import types
from functools import partial
from typing import NamedTuple, Optional

import pytest
import torch
from torch import Tensor

from zorro_verl import flash_kernels
from zorro_verl.attention import split_attention
from zorro_verl.attention_kernels import ATTENTION_IMPLEMENTATIONS, resolve_kernels
from zorro_verl.flash_kernels import (
    FlashAttention2Kernels,
    FlashAttention3Kernels,
    FlashAttention4Kernels,
    TorchVarlenKernels,
)
from zorro_verl.forest import Forest, VarlenCall
from zorro_verl.varlen import CpuKernels

SCALE = 0.2
HEAD_DIM = 32  # the least that all of them take
HEADS = [(4, 4), (4, 2), (4, 1)]


# Parameters of the real functions, as read in the release that is named.

FLASH_2_FORWARD = """q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int = -1,
    window_size_right: int = -1, softcap: float = 0.0, alibi_slopes: Optional[Tensor] = None,
    return_softmax: bool = False, block_table: Optional[Tensor] = None, leftpad_k: Optional[Tensor] = None,
    seqused_k: Optional[Tensor] = None, zero_tensors: bool = False"""
FLASH_2_BACKWARD = """dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor,
    dq: Optional[Tensor], dk: Optional[Tensor], dv: Optional[Tensor], cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    max_seqlen_q: int, max_seqlen_k: int, dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int,
    window_size_right: int, softcap: float, alibi_slopes: Optional[Tensor], deterministic: bool,
    rng_state: Optional[Tensor] = None, zero_tensors: bool = False"""
FLASH_2_6_FORWARD = """q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale,
    causal, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, return_softmax=False, block_table=None,
    leftpad_k=None, seqused_k=None"""
FLASH_3_FORWARD = """q: Tensor, k: Tensor, v: Tensor, k_new: Optional[Tensor] = None, v_new: Optional[Tensor] = None,
    qv: Optional[Tensor] = None, out_: Optional[Tensor] = None, cu_seqlens_q: Optional[Tensor] = None,
    cu_seqlens_k: Optional[Tensor] = None, cu_seqlens_k_new: Optional[Tensor] = None,
    seqused_q: Optional[Tensor] = None, seqused_k: Optional[Tensor] = None, max_seqlen_q: Optional[int] = None,
    max_seqlen_k: Optional[int] = None, page_table: Optional[Tensor] = None, kv_batch_idx: Optional[Tensor] = None,
    leftpad_k: Optional[Tensor] = None, rotary_cos: Optional[Tensor] = None, rotary_sin: Optional[Tensor] = None,
    seqlens_rotary: Optional[Tensor] = None, q_descale: Optional[Tensor] = None, k_descale: Optional[Tensor] = None,
    v_descale: Optional[Tensor] = None, softmax_scale: Optional[float] = None, causal: bool = False,
    window_size_left: int = -1, window_size_right: int = -1, attention_chunk: int = 0, softcap: float = 0.0,
    rotary_interleaved: bool = True, scheduler_metadata: Optional[Tensor] = None, num_splits: int = 1,
    pack_gqa: Optional[bool] = None, sm_margin: int = 0"""
FLASH_3_BACKWARD = """dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor,
    cu_seqlens_q: Optional[Tensor] = None, cu_seqlens_k: Optional[Tensor] = None, sequed_q: Optional[Tensor] = None,
    sequed_k: Optional[Tensor] = None, max_seqlen_q: Optional[int] = None, max_seqlen_k: Optional[int] = None,
    dq: Optional[Tensor] = None, dk: Optional[Tensor] = None, dv: Optional[Tensor] = None,
    softmax_scale: Optional[float] = None, is_causal: bool = False, window_size_left: int = -1,
    window_size_right: int = -1, softcap: float = 0.0, deterministic: bool = False, sm_margin: int = 0"""
FLASH_3_TUPLE_FORWARD = """q, k, v, k_new, v_new, qv, out, cu_seqlens_q, cu_seqlens_k, cu_seqlens_k_new, seqused_q,
    seqused_k, max_seqlen_q, max_seqlen_k, page_table, kv_batch_idx, leftpad_k, rotary_cos, rotary_sin, seqlens_rotary,
    q_descale, k_descale, v_descale, softmax_scale, causal, window_size=(-1, -1), attention_chunk=0, softcap=0.0,
    rotary_interleaved=True, scheduler_metadata=None, num_splits=1, pack_gqa=None, sm_margin=0"""
FLASH_3_TUPLE_BACKWARD = """dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, sequed_q, sequed_k,
    max_seqlen_q, max_seqlen_k, dq, dk, dv, softmax_scale, causal, window_size=(-1, -1), softcap=0.0,
    deterministic=False, sm_margin=0"""
FLASH_4_FORWARD = """q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None,
    max_seqlen_q=None, max_seqlen_k=None, min_seqlen_k=None, page_table=None, softmax_scale=None, causal=False,
    softcap=None, window_size_left=None, window_size_right=None, learnable_sink=None, tile_mn=None, mma_pv_is_rs=None,
    intra_wg_overlap=None, num_threads=384, num_splits=1, pack_gqa=None, _arch=None, score_mod=None, mask_mod=None,
    block_sparse_tensors=None, return_lse=False, out=None, lse=None, aux_tensors=None, aux_scalars=None, q_descale=None,
    k_descale=None, v_descale=None, gather_kv_indices=None, scheduler_metadata=None, seqlen_k_per_split=None,
    disable_scheduler_metadata=False, gather_bwd_recompute_p=False"""
FLASH_4_BACKWARD = """q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None,
    window_size_right=None, m_block_size=64, n_block_size=128, num_threads=256, pack_gqa=False, num_stages_Q=2,
    num_stages_dO=2, SdP_swapAB=False, dKV_swapAB=False, dQ_swapAB=False, AtomLayoutMSdP=2, AtomLayoutNdKV=2,
    AtomLayoutMdQ=2, V_in_regs=False, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None,
    max_seqlen_q=None, max_seqlen_k=None, deterministic=False, dq=None, dk=None, dv=None, score_mod=None,
    score_mod_bwd=None, mask_mod=None, aux_tensors=None, aux_scalars=None, block_sparse_tensors=None, dlse=None,
    learnable_sink=None"""
FLASH_4_FIRST_BACKWARD = """q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, m_block_size=64,
    n_block_size=128, num_threads=256, num_stages_Q=2, num_stages_dO=2, SdP_swapAB=False, dKV_swapAB=False,
    dQ_swapAB=False, AtomLayoutMSdP=2, AtomLayoutNdKV=2, AtomLayoutMdQ=2, V_in_regs=False"""
# torch 2.13; the forward has two more at the end.
TORCH_FORWARD = """Tensor query, Tensor key, Tensor value, Tensor? cum_seq_q, Tensor? cum_seq_k, SymInt max_q,
    SymInt max_k, float dropout_p, bool is_causal, bool return_debug_mask, *, float? scale=None,
    SymInt? window_size_left=None, SymInt? window_size_right=None, Tensor? seqused_k=None, Tensor? alibi_slopes=None"""
TORCH_BACKWARD = """Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp,
    Tensor cum_seq_q, Tensor cum_seq_k, SymInt max_q, SymInt max_k, float dropout_p, bool is_causal,
    Tensor rng_state, Tensor unused, *,
    float? scale=None, SymInt? window_size_left=None, SymInt? window_size_right=None"""


def blocks_of(call):
    """Bounds and mask of each block: a query's own key is aligned to the bottom right."""
    cu_q, cu_k, causal, (left, right) = call["cu_q"], call["cu_k"], call["causal"], call["window"]
    for cu, longest in ((cu_q, call["max_q"]), (cu_k, call["max_k"])):
        assert cu.dtype == torch.int32
        assert cu.is_contiguous()
        assert longest >= cu.diff().max(), "the grid would not reach the longest block"
    assert cu_q[-1] == call["q"].shape[0]
    assert cu_k[-1] == call["k"].shape[0]
    assert {left, right} <= {-1, None} or (causal and left >= 0 and right == 0)
    for q0, q1, k0, k1 in zip(*(x.tolist() for x in (cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:])), strict=True):
        own = torch.arange(q1 - q0)[:, None] + (k1 - k0) - (q1 - q0)
        key = torch.arange(k1 - k0)[None, :]
        seen = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool)
        if causal:
            seen &= key <= own
        if left is not None and left >= 0:
            seen &= key >= own - left
        yield slice(q0, q1), slice(k0, k1), seen


def accumulate(x):
    """As kernels do: in float32, here float64 for float64."""
    return x if x.dtype == torch.float64 else x.float()


def scores_of(q, k, seen, scale):
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    return (torch.einsum("qhd,khd->hqk", q, k) * scale).masked_fill(~seen, -torch.inf)


def emulate_forward(call, keyless):
    q, k, v = (accumulate(call[x]) for x in "qkv")
    out, lse = torch.full_like(q, torch.nan), q.new_full((q.shape[1], q.shape[0]), torch.nan)
    for queries, keys, seen in blocks_of(call):
        scores = scores_of(q[queries], k[keys], seen, call["scale"])
        if not seen.shape[1]:
            out[queries], lse[:, queries] = 0, keyless
            continue
        values = v[keys].repeat_interleave(q.shape[1] // v.shape[1], 1)
        out[queries] = torch.einsum("hqk,khd->qhd", scores.softmax(-1).nan_to_num(0), values)
        lse[:, queries] = scores.logsumexp(-1).masked_fill(~seen.any(1), keyless)
    return out.to(call["q"].dtype), lse


def emulate_backward(call, dq, dk, dv):
    """Writes all of dq; of dk and dv what some query of the block looks at."""
    assert call["lse"].is_contiguous(), "read without strides"
    assert call["grad"].is_contiguous(), "releases of flash-attn 4 count with its strides in 32 bits"
    assert call["out"].is_contiguous()
    assert call["lse"].dtype == accumulate(call["q"]).dtype
    grad, q, k, v, out = (accumulate(call[x]) for x in ("grad", "q", "k", "v", "out"))
    repeats = q.shape[1] // k.shape[1]
    fold = lambda x: x.unflatten(1, (-1, repeats)).sum(2)  # noqa: E731
    for queries, keys, seen in blocks_of(call):
        lse = call["lse"][:, queries, None]
        weights = (scores_of(q[queries], k[keys], seen, call["scale"]) - lse.masked_fill(lse == -torch.inf, 0)).exp()
        g = grad[queries]
        values = v[keys].repeat_interleave(repeats, 1)
        inner = torch.einsum("qhd,khd->hqk", g, values) - (g * out[queries]).sum(-1).T[..., None]
        inner = inner * weights * call["scale"]
        dq[queries] = torch.einsum("hqk,khd->qhd", inner, k[keys].repeat_interleave(repeats, 1)).to(dq.dtype)
        if seen.shape[0]:
            dk[keys] = fold(torch.einsum("hqk,qhd->khd", inner, q[queries])).to(dk.dtype)
            dv[keys] = fold(torch.einsum("hqk,qhd->khd", weights, g)).to(dv.dtype)


def check_tensors(call, names):
    for name in names:
        x = call[name]
        assert x.dtype == call["q"].dtype
        assert x.stride(-1) == 1
        assert x.shape[2] % 8 == 0
        assert x.shape[2] <= 256


def flash_2_forward(call):
    """flash-attn 2 and torch: +inf for a query without keys."""
    check_tensors(call, "qkv")
    q, k = call["q"], call["k"]
    if call["max_q"] == 1 and q.shape[1] > k.shape[1] and call["window"] == (-1, -1):
        q.reshape(len(call["cu_q"]) - 1, -1, q.shape[1] // k.shape[1], q.shape[2])  # decoding: one query each
    assert call["max_k"], "a launch over no block"
    return emulate_forward(call, torch.inf)


def flash_2_backward(call, dq, dk, dv):
    check_tensors(call, ("grad", "q", "k", "v", "out"))
    assert call["max_k"], "a launch over no block"
    emulate_backward(call, dq, dk, dv)


def flash_3_forward(call):
    """flash-attn 3 and 4: -inf for a query without keys."""
    check_tensors(call, "qkv")
    return emulate_forward(call, -torch.inf)


class Recorder:
    """Builds functions of a release, and remembers what their calls said."""

    def __init__(self):
        self.calls = []

    def function(self, signature, body):
        """A Python function with exactly these parameters."""
        scope = {"Tensor": Tensor, "Optional": Optional, "body": body}
        exec(f"def function({signature}):\n    return body(locals())", scope)
        return scope["function"]

    def read(self, x, **names):
        """What the arguments mean, in one vocabulary."""
        window = x["window_size"] if "window_size" in x else (x["window_size_left"], x["window_size_right"])
        call = {
            "q": x["q"],
            "k": x["k"],
            "v": x["v"],
            "cu_q": x["cu_seqlens_q"],
            "cu_k": x["cu_seqlens_k"],
            "max_q": x["max_seqlen_q"],
            "max_k": x["max_seqlen_k"],
            "scale": x["softmax_scale"],
            "causal": x["is_causal"] if "is_causal" in x else x["causal"],
            "window": tuple(window),
        } | {name: x[key] for name, key in names.items()}
        self.calls.append(call | {"deterministic": x.get("deterministic")})
        return call


recorders = itertools.count()  # names of operators are taken for good


def as_operator(function, returns, mutates=()):
    """As the releases wrap it: a ``torch.library.custom_op``."""
    function.__annotations__["return"] = returns
    return torch.library.custom_op(f"zorro_emulation::f{next(recorders)}", function, mutates_args=mutates)


def flash_attn_2(recorder, monkeypatch, forward=FLASH_2_FORWARD):
    """flash-attn 2.8.3: custom operators; gradients in place."""

    def forward_body(x):
        assert (x["dropout_p"], x["softcap"], x["alibi_slopes"], x["block_table"]) == (0.0, 0.0, None, None)
        out, lse = flash_2_forward(recorder.read(x))
        return out, lse, out.new_empty(0), torch.empty(2, dtype=torch.int64)

    def backward_body(x):
        assert (x["dropout_p"], x["softcap"], x["alibi_slopes"], x["rng_state"]) == (0.0, 0.0, None, None)
        call = recorder.read(x, grad="dout", out="out", lse="softmax_lse")
        flash_2_backward(call, x["dq"], x["dk"], x["dv"])
        return call["lse"].clone()

    fwd, bwd = recorder.function(forward, forward_body), recorder.function(FLASH_2_BACKWARD, backward_body)
    interface = types.ModuleType("flash_attn.flash_attn_interface")
    if forward == FLASH_2_FORWARD:
        fwd = as_operator(fwd, tuple[Tensor, Tensor, Tensor, Tensor])
        bwd = as_operator(bwd, Tensor, ("dq", "dk", "dv"))
    interface._flash_attn_varlen_forward, interface._flash_attn_varlen_backward = fwd, bwd
    install(monkeypatch, {"flash_attn": types.ModuleType("flash_attn"), interface.__name__: interface})


def flash_attn_3(recorder, monkeypatch):
    """The main branch of flash-attention in 2026: custom operators, a window in two arguments."""

    def forward_body(x):
        assert all(x[name] is None for name in ("k_new", "qv", "out_", "seqused_q", "seqused_k", "page_table"))
        out, lse = flash_3_forward(recorder.read(x))
        return out, lse, out.new_empty(0), lse.new_empty(0)

    def backward_body(x):
        assert (x["sequed_q"], x["sequed_k"]) == (None, None)
        call = recorder.read(x, grad="dout", out="out", lse="softmax_lse")
        emulate_backward(call, x["dq"], x["dk"], x["dv"])
        return call["lse"].clone()

    interface = types.ModuleType("flash_attn_interface")
    interface._flash_attn_forward = as_operator(
        recorder.function(FLASH_3_FORWARD, forward_body), tuple[Tensor, Tensor, Tensor, Tensor]
    )
    interface._flash_attn_backward = as_operator(
        recorder.function(FLASH_3_BACKWARD, backward_body), Tensor, ("dq", "dk", "dv")
    )
    install(monkeypatch, {"flash_attn_interface": interface})


def flash_attn_3_tuple(recorder, monkeypatch):
    """The folder ``hopper`` of flash-attn 2.8.3: functions, a window as a tuple, most arguments without defaults."""

    def forward_body(x):
        assert all(x[name] is None for name in ("k_new", "qv", "out", "seqused_q", "seqused_k", "page_table"))
        return *flash_3_forward(recorder.read(x)), None, None

    def backward_body(x):
        assert (x["sequed_q"], x["sequed_k"]) == (None, None)
        emulate_backward(recorder.read(x, grad="dout", out="out", lse="softmax_lse"), x["dq"], x["dk"], x["dv"])
        return x["dq"], x["dk"], x["dv"], None

    interface = types.ModuleType("flash_attn_interface")
    interface._flash_attn_forward = recorder.function(FLASH_3_TUPLE_FORWARD, forward_body)
    interface._flash_attn_backward = recorder.function(FLASH_3_TUPLE_BACKWARD, backward_body)
    install(monkeypatch, {"flash_attn_interface": interface})


def flash_attn_4(recorder, monkeypatch, backward=FLASH_4_BACKWARD):
    """flash-attn-4 4.0.0b36, which comes without a ``flash_attn/__init__.py``."""

    def check(x):
        assert x["window_size_left"] is None or x["window_size_left"] >= 0, "no window is None here"

    def forward_body(x):
        check(x)
        assert (x["qv"], x["out"], x["lse"], x["page_table"], x["softcap"]) == (None,) * 5
        out, lse = flash_3_forward(recorder.read(x))
        return out, lse if x["return_lse"] else None, None, None, None

    def backward_body(x):
        check(x)
        call = recorder.read(x, grad="dout", out="out", lse="lse")
        emulate_backward(call, x["dq"], x["dk"], x["dv"])
        return x["dq"], x["dk"], x["dv"]

    interface = types.ModuleType("flash_attn.cute.interface")
    interface._flash_attn_fwd = recorder.function(FLASH_4_FORWARD, forward_body)
    interface._flash_attn_bwd = recorder.function(backward, backward_body)
    names = ("flash_attn", "flash_attn.cute")
    install(monkeypatch, {name: namespace(name) for name in names} | {interface.__name__: interface})


def namespace(name):
    package = types.ModuleType(name)
    package.__path__ = []
    return package


def install(monkeypatch, modules):
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)


def torch_operators(recorder, monkeypatch):
    """torch's two operators; their dk and dv are zero where no query looks, as their kernel writes them."""

    def read(name, args, kwargs):
        names = [x.name for x in getattr(torch.ops.aten, name).default._schema.arguments]
        x = dict(zip(names, args, strict=False)) | kwargs
        assert x["dropout_p"] == 0.0
        call = {
            "q": x["query"],
            "k": x["key"],
            "v": x["value"],
            "cu_q": x["cum_seq_q"],
            "cu_k": x["cum_seq_k"],
            "max_q": x["max_q"],
            "max_k": x["max_k"],
            "scale": x["scale"],
            "causal": x["is_causal"],
            "window": (x["window_size_left"], x["window_size_right"]),
        }
        recorder.calls.append(call | {"deterministic": None})
        return call, x

    def forward(*args, **kwargs):
        call, x = read("_flash_attention_forward", args, kwargs)
        assert x["return_debug_mask"] is False
        out, lse = flash_2_forward(call)
        return out, lse, torch.empty(2, dtype=torch.uint64), torch.empty(0), torch.empty(0)

    def backward(*args, **kwargs):
        call, x = read("_flash_attention_backward", args, kwargs)
        call |= {"grad": x["grad_out"], "out": x["out"], "lse": x["logsumexp"]}
        gradients = tuple(torch.zeros_like(call[name]) for name in "qkv")
        flash_2_backward(call, *gradients)
        return gradients

    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", backward, "CPU")
    return library._destroy


class Release(NamedTuple):
    kernels: type
    install: object


RELEASES = {
    "torch": Release(TorchVarlenKernels, torch_operators),
    "flash-attn-2": Release(FlashAttention2Kernels, flash_attn_2),
    "flash-attn-3": Release(FlashAttention3Kernels, flash_attn_3),
    "flash-attn-3-tuple": Release(FlashAttention3Kernels, flash_attn_3_tuple),
    "flash-attn-4": Release(FlashAttention4Kernels, flash_attn_4),
}


@pytest.fixture(params=RELEASES)
def emulated(request, monkeypatch):
    """Kernels over an emulated release, in float64 too, and the recorder of its calls."""
    monkeypatch.setattr(flash_kernels, "DTYPES", (*flash_kernels.DTYPES, torch.float64))
    release, recorder = RELEASES[request.param], Recorder()
    remove = release.install(recorder, monkeypatch)
    yield release.kernels(), recorder
    if remove is not None:
        remove()


# The oracle.


def path_of(parents, segment):
    """The segment behind its ancestors, the root first."""
    found = [segment]
    while parents[found[0]] >= 0:
        found.insert(0, int(parents[found[0]]))
    return found


def path_by_path(values, weights, lengths, parents, window):
    """Each segment at the end of its own path, as one dense causal row; output and gradients, segment after segment."""
    leaves = [[x.clone().requires_grad_() for x in value.split(lengths)] for value in values]
    outputs = []
    for segment, length in enumerate(lengths):
        q, k, v = (torch.cat([x[s] for s in path_of(parents, segment)]) for x in leaves)
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        place = torch.arange(len(q))
        back = place[:, None] - place[None, :]
        seen = (back >= 0) & (back < (window or len(q) + 1))
        scores = (torch.einsum("qhd,khd->hqk", q, k) * SCALE).masked_fill(~seen, -torch.inf)
        outputs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)[len(q) - length :])
    (torch.cat(outputs) * weights).sum().backward()
    outputs = [x.detach() for x in outputs]
    return outputs, *([torch.zeros_like(x) if x.grad is None else x.grad for x in leaf] for leaf in leaves)


def through_forest(values, weights, lengths, parents, window, kernels):
    """The same through packed tensors, ``split_attention`` and the kernels."""
    forest = Forest(torch.tensor(lengths), torch.tensor(parents))
    bounds = list(itertools.accumulate(lengths, initial=0))
    pack = torch.cat([torch.arange(bounds[s], bounds[s + 1]) for s in forest.order.tolist()])
    leaves = [x.clone().requires_grad_() for x in values]
    packed = [x[pack] for x in leaves]
    if window is None:
        out = split_attention(*packed, forest, SCALE, kernels)
    else:
        out = split_attention(*packed, forest, SCALE, kernels, window)
    out = out[pack.argsort()]
    (out * weights).sum().backward()
    return tuple(x.split(lengths) for x in (out.detach(), *(x.grad for x in leaves)))


def draw(tokens, heads, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = [(tokens, h, HEAD_DIM) for h in (heads[0], heads[1], heads[1], heads[0])]
    *values, weights = (torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shape)
    return values, weights


FORESTS = {
    # Prompts of three and more responses, empty ones among them, and rows that are alone.
    "groups": ([9, 1, 5, 4, 0, 1, 7, 3, 5, 2, 6, 8, 3], [-1, -1, -1, 0, 0, 0, 0, 0, 1, 1, 1, 2, -1]),
    "one-token-each": ([1, 1, 1, 1, 0, 1, 1], [-1, 0, 0, 0, 0, 0, -1]),
    "empty-segments": ([0, 3, 0, 2, 0, 4, 0], [-1, 0, -1, 2, 1, 1, -1]),
    "deep": ([6, 2, 3, 1, 4, 0, 2, 5, 3, 1, 7], [-1, 0, 0, 1, 1, 1, 3, 3, 4, 6, -1]),
    "alone": ([5, 1, 7], [-1, -1, -1]),
}


@functools.cache
def case_of(forest, window, heads):
    """Arguments of `through_forest`, and what it should give."""
    lengths, parents = FORESTS[forest]
    arguments = *draw(sum(lengths), heads), lengths, parents, window
    return arguments, path_by_path(*arguments)


@pytest.mark.parametrize("forest", FORESTS)
@pytest.mark.parametrize(
    ("window", "heads"),
    [(None, (4, 4)), (None, (4, 2)), (None, (4, 1)), (1, (4, 2)), (3, (4, 4)), (3, (4, 1)), (17, (4, 2))],
)
def test_attention_equals_every_path_by_itself(emulated, forest, window, heads):
    kernels, recorder = emulated
    arguments, expected = case_of(forest, window, heads)
    got = through_forest(*arguments, kernels)
    assert recorder.calls
    for name, wanted, found in zip(("out", "dq", "dk", "dv"), expected, got, strict=True):
        for segment, (a, b) in enumerate(zip(wanted, found, strict=True)):
            assert a.shape == b.shape
            if a.numel():
                assert float((a - b).abs().max()) <= 1e-10, f"{name} of segment {segment}"


@pytest.mark.parametrize("window", [None, 9])
def test_bfloat16_errs_no_more_than_kernels_on_a_cpu(emulated, window):
    kernels, _ = emulated
    lengths, parents = [33, 64, 7, 17, 5, 0, 9, 40, 20, 20, 1, 11], [-1, -1, -1, 0, 0, 0, 0, 0, 1, 1, 1, 2]
    values, weights = draw(sum(lengths), (4, 2), torch.bfloat16)
    arguments = lengths, parents, window
    expected = path_by_path([x.double() for x in values], weights.double(), *arguments)
    results = [through_forest(values, weights, *arguments, x) for x in (kernels, CpuKernels())]
    assert {x.dtype for x in results[0][0]} == {torch.bfloat16}
    for number, name in enumerate(("out", "dq", "dk", "dv")):
        exact = torch.cat(list(expected[number])).double()
        ours, theirs = (float((torch.cat(list(x[number])).double() - exact).square().mean().sqrt()) for x in results)
        assert 0 < ours <= 1.5 * theirs, name


# Segments of no token and of one, in every position of a call.

KINDS = [(0, 0), (0, 2), (1, 0), (1, 1), (3, 1), (1, 3), (0, 1), (2, 0)]


def call_of(kinds, causal=False):
    queries, keys = (torch.tensor(x) for x in zip(*kinds, strict=True))
    return VarlenCall(queries, queries if causal else keys, 0, causal, "cpu")


def block_by_block(grad, q, k, v, kinds):
    """``out``, ``lse`` and gradients of rectangles, by autograd; 0 and -inf where there is no key."""
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    parts = [x.split([kind[side] for kind in kinds]) for x, side in zip(leaves, (0, 1, 1), strict=True)]
    outs, lses = [], []
    for queries, keys, values in zip(*parts, strict=True):
        repeats = q.shape[1] // k.shape[1]
        scores = torch.einsum("qhd,khd->hqk", queries, keys.repeat_interleave(repeats, 1)) * SCALE
        weights = scores.softmax(-1) if scores.shape[-1] else scores
        outs.append(torch.einsum("hqk,khd->qhd", weights, values.repeat_interleave(repeats, 1)))
        lses.append(
            scores.detach().logsumexp(-1) if scores.shape[-1] else scores.new_full(scores.shape[:2], -torch.inf)
        )
    out = torch.cat(outs)
    gradients = torch.autograd.grad((out * grad).sum(), leaves) if out.numel() else [x * 0 for x in leaves]
    return out.detach(), torch.cat(lses, 1), *gradients


def test_blocks_of_no_token_and_of_one(emulated):
    kernels, _ = emulated
    for kinds in (*itertools.product(KINDS, repeat=2), *itertools.product(KINDS[:5], repeat=3)):
        call = call_of(kinds)
        queries, keys = (sum(x) for x in zip(*kinds, strict=True))
        (q, *_), grad = draw(queries, (2, 1))
        (_, k, v), _ = draw(keys, (2, 1), seed=1)
        out, lse = kernels.forward(q, k, v, call, SCALE)
        got = out, lse, *kernels.backward(grad, q, k, v, out, lse, call, SCALE)
        wanted = block_by_block(grad, q, k, v, kinds)
        for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), wanted, got, strict=True):
            assert a.shape == b.shape, (name, kinds)
            torch.testing.assert_close(b, a, atol=1e-12, rtol=0, msg=f"{name} of {kinds}")
        unseen = torch.tensor([not n for n, m in kinds for _ in range(m)], dtype=torch.bool)
        blind = torch.tensor([not m for n, m in kinds for _ in range(n)], dtype=torch.bool)
        nothing = out[blind], got[2][blind], got[3][unseen], got[4][unseen]
        assert not any(x.any() for x in nothing), kinds  # exactly
        assert torch.equal(lse[0] == -torch.inf, blind), kinds


@pytest.mark.parametrize("lengths", [[0], [1], [0, 1], [1, 0], [1, 0, 1, 1], [0, 3, 0, 0, 1, 0]])
def test_causal_segments_of_no_token_and_of_one(emulated, lengths):
    kernels, _ = emulated
    call = call_of([(n, n) for n in lengths], causal=True)
    (q, k, v), grad = draw(sum(lengths), (4, 2))
    out, lse = kernels.forward(q, k, v, call, SCALE)
    assert lse.shape == (4, sum(lengths))
    assert lse.isfinite().all()
    got = out.split(lengths), *(x.split(lengths) for x in kernels.backward(grad, q, k, v, out, lse, call, SCALE))
    wanted = path_by_path((q, k, v), grad, lengths, [-1] * len(lengths), None)
    for a, b in zip(wanted, got, strict=True):
        torch.testing.assert_close(list(b), [x.detach() for x in a], atol=1e-12, rtol=0)


def test_keys_that_no_query_looks_at_get_zeros_of_the_adapter(emulated, monkeypatch):
    """Where the buffer that an allocation gives is dirty, as on a GPU."""
    kernels, _ = emulated
    monkeypatch.setattr(torch, "empty_like", lambda x: torch.full_like(x, torch.nan))
    call = call_of([(2, 3), (0, 4), (1, 0)])
    (q, *_), grad = draw(3, (4, 2))
    (_, k, v), _ = draw(7, (4, 2), seed=1)
    out, lse = kernels.forward(q, k, v, call, SCALE)
    dq, dk, dv = kernels.backward(grad, q, k, v, out, lse, call, SCALE)
    assert not dk[3:].any()
    assert not dv[3:].any()
    assert dk[:3].all()
    assert not dq[2:].any()


# What the kernels are told.


@pytest.mark.parametrize("deterministic", [False, True])
def test_deterministic_algorithms(emulated, deterministic):
    """torch's operator asks for itself; the packages are told."""
    kernels, recorder = emulated
    lengths, parents = FORESTS["groups"]
    torch.use_deterministic_algorithms(deterministic)
    try:
        through_forest(*draw(sum(lengths), (4, 2)), lengths, parents, None, kernels)
    finally:
        torch.use_deterministic_algorithms(False)
    asked = [x["deterministic"] for x in recorder.calls if "grad" in x]
    told = {x["deterministic"] for x in recorder.calls} - {None}
    assert told == (set() if isinstance(kernels, TorchVarlenKernels) else {deterministic}), asked


def test_gradient_and_views_in_any_layout(emulated):
    """A gradient that comes back transposed, and the view of the log-sum-exp of later queries."""
    kernels, _ = emulated
    lengths, parents = FORESTS["groups"]
    values, weights = draw(sum(lengths), (4, 2))
    transposed = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (*values, weights)]
    assert not transposed[0].is_contiguous()
    wanted = through_forest(values, weights, lengths, parents, None, kernels)
    got = through_forest(transposed[:3], transposed[3], lengths, parents, None, kernels)
    for a, b in zip(wanted, got, strict=True):
        torch.testing.assert_close(list(b), list(a), atol=1e-12, rtol=0)

    call = call_of([(n, n) for n in lengths], causal=True)
    out, lse = kernels.forward(*values, call, SCALE)
    merged = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (weights, out, lse)]
    assert not any(x.is_contiguous() for x in merged)
    wanted = kernels.backward(weights, *values, out, lse, call, SCALE)
    torch.testing.assert_close(kernels.backward(merged[0], *values, *merged[1:], call, SCALE), wanted)


def test_nothing_is_read_from_the_device(monkeypatch):
    """On the meta device there is nothing to read: each look at a value is an error."""
    recorder, release = Recorder(), types.ModuleType("flash_attn_interface")
    forward = lambda x: (torch.empty_like(x["q"]), x["q"].new_empty(x["q"].shape[1::-1], dtype=torch.float32))  # noqa: E731
    release._flash_attn_forward = recorder.function(FLASH_3_TUPLE_FORWARD, forward)
    release._flash_attn_backward = recorder.function(FLASH_3_TUPLE_BACKWARD, lambda x: None)
    install(monkeypatch, {"flash_attn_interface": release})
    kernels = FlashAttention3Kernels()
    lengths = torch.tensor([3, 0, 2])
    call = VarlenCall(lengths, lengths, 0, True, "meta")
    q, k = (torch.empty(5, heads, 64, dtype=torch.bfloat16, device="meta") for heads in (4, 2))
    with pytest.raises(RuntimeError, match=r"meta"):
        call.cu_seqlens_q[0].item()
    out, lse = kernels.forward(q, k, k, call, SCALE)
    assert [x.shape for x in kernels.backward(q, q, k, k, out, lse, call, SCALE)] == [q.shape, k.shape, k.shape]


# Limits.


def large(tokens, heads, head_dim, requires_grad=True):
    return torch.empty(tokens, heads, head_dim, dtype=torch.bfloat16, device="meta", requires_grad=requires_grad)


def test_an_index_of_32_bits_is_refused_before_a_kernel_runs(emulated):
    kernels, recorder = emulated
    per_head = isinstance(kernels, FlashAttention3Kernels)
    heads, segments = (2, 40) if per_head else (64, 40)
    width = 128 if per_head else heads * 128
    most = (2**31 - 1) // width - 128 * segments
    lengths = torch.tensor([most - segments + 1] + [1] * (segments - 1))

    def forest(lengths):
        return Forest(lengths, torch.full((segments,), -1), "meta")

    lengths[0] += 1
    q = large(most + 1, heads, 128)
    with pytest.raises(
        ValueError,
        match=rf"attn_implementation={kernels.name}: .*32 bits.*got \({most + 1} \+ 128 x {segments}\) x "
        rf"{1 if per_head else heads} x 128 = {(most + 1 + 128 * segments) * width}; lower "
        r"actor_rollout_ref\.actor\.ppo_max_token_len_per_gpu",
    ):
        split_attention(q, q, q, forest(lengths), SCALE, kernels)
    call = forest(lengths).self_call
    with pytest.raises(ValueError, match="32 bits"):
        kernels.backward(q, q, q, q, q, large(heads, most + 1, 1), call, SCALE)
    assert not recorder.calls
    kernels._check(large(most, heads, 128), large(most, heads, 128), call, True)  # one token less
    kernels._check(q, q, call, False)  # log-probs alone have no backward
    with pytest.raises(ValueError, match="32 bits"):  # keys count as queries do
        kernels._check(large(5, heads, 128), q, call, True)


@pytest.mark.parametrize(("head_dim", "width"), [(8, 32), (32, 32), (40, 64), (128, 128), (136, 192), (256, 256)])
def test_the_index_counts_padded_heads(head_dim, width):
    tokens = 2**31 // width
    call = call_of([(1, 1)])
    kernels = TorchVarlenKernels()
    with pytest.raises(ValueError, match=rf" x 1 x {width} = {(tokens + 1) * width}"):
        kernels._check(large(tokens - 127, 1, head_dim), large(1, 1, head_dim), call, True)
    kernels._check(large(tokens - 129, 1, head_dim), large(1, 1, head_dim), call, True)


def test_limits_of_shapes(emulated, monkeypatch):
    kernels, recorder = emulated
    call = call_of([(3, 3)], causal=True)
    for head_dim in (12, 264):
        x = torch.zeros(3, 2, head_dim, dtype=torch.bfloat16)
        with pytest.raises(ValueError, match=rf"attn_implementation={kernels.name}: .*head size.*got {head_dim}; use"):
            kernels.forward(x, x, x, call, SCALE)
    if isinstance(kernels, FlashAttention4Kernels):
        x = torch.zeros(3, 2, 72, dtype=torch.bfloat16)
        with pytest.raises(ValueError, match=r"flash_attention_4: .*multiple of 32, got 72; .*sdpa"):
            kernels.forward(x, x, x, call, SCALE)
    x = torch.zeros(3, 2, 64)
    with pytest.raises(ValueError, match=rf"={kernels.name}: expected float16 or bfloat16 on cpu, got torch.float32"):
        kernels.forward(x, x, x, call, SCALE)
    many = torch.ones(2**16, dtype=torch.int64)
    x = large(2**16, 2, 64, False)
    with pytest.raises(ValueError, match=r"at most 65535 segments in a micro-batch, got 65536; lower actor_"):
        kernels.forward(x, x, x, VarlenCall(many, many, 0, True, "meta"), SCALE)
    assert not recorder.calls


# Releases.


@pytest.mark.parametrize(
    ("release", "module", "signatures"),
    [
        ("flash-attn-2", "flash_attn.flash_attn_interface", (FLASH_2_FORWARD, FLASH_2_BACKWARD)),
        ("flash-attn-3", "flash_attn_interface", (FLASH_3_FORWARD, FLASH_3_BACKWARD)),
        ("flash-attn-3-tuple", "flash_attn_interface", (FLASH_3_TUPLE_FORWARD, FLASH_3_TUPLE_BACKWARD)),
        ("flash-attn-4", "flash_attn.cute.interface", (FLASH_4_FORWARD, FLASH_4_BACKWARD)),
    ],
)
def test_emulations_have_the_signatures_of_the_table(release, module, signatures, monkeypatch):
    RELEASES[release].install(Recorder(), monkeypatch)
    names = [x.rpartition(".")[2] for x in RELEASES[release].kernels.functions]
    for name, signature in zip(names, signatures, strict=True):
        function = getattr(sys.modules[module], name)
        found = inspect.signature(getattr(function, "_init_fn", function)).parameters
        wanted = [x.split(":")[0].split("=")[0].strip() for x in split_parameters(signature)]
        assert list(found) == wanted
        assert [x for x in found if found[x].default is inspect.Parameter.empty] == [
            name for name, text in zip(wanted, split_parameters(signature), strict=True) if "=" not in text
        ]


def split_parameters(signature):
    """At the commas that are in no bracket."""
    parts, depth = [""], 0
    for character in signature:
        depth += (character in "([") - (character in ")]")
        if character == "," and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return parts


@pytest.mark.parametrize(
    ("name", "wanted"),
    [("_flash_attention_forward", TORCH_FORWARD), ("_flash_attention_backward", TORCH_BACKWARD)],
)
def test_torch_has_the_operators_of_the_table(name, wanted):
    found = str(getattr(torch.ops.aten, name).default._schema).partition("(")[2]
    assert found.startswith(" ".join(wanted.split()))


def test_a_release_is_looked_at_once(emulated, monkeypatch):
    kernels, _ = emulated
    monkeypatch.setattr(flash_kernels, "_required", lambda function: pytest.fail("looked at again"))
    lengths, parents = FORESTS["groups"]
    through_forest(*draw(sum(lengths), (4, 2)), lengths, parents, None, kernels)


@pytest.mark.parametrize(
    ("kernels", "emulate", "package", "message"),
    [
        (
            FlashAttention2Kernels,
            partial(flash_attn_2, forward=FLASH_2_6_FORWARD),
            "flash-attn",
            r"flash_attn_interface\._flash_attn_varlen_forward of flash-attn 1\.2\.3: .*window_size_left",
        ),
        (
            FlashAttention4Kernels,
            partial(flash_attn_4, backward=FLASH_4_FIRST_BACKWARD),
            "flash-attn-4",
            r"interface\._flash_attn_bwd of flash-attn-4 1\.2\.3: expected an argument cu_seqlens_q",
        ),
        (
            FlashAttention4Kernels,
            partial(flash_attn_4, backward="new_thing, " + FLASH_4_BACKWARD),
            "flash-attn-4",
            r"_flash_attn_bwd of flash-attn-4 1\.2\.3: it can't be called without \['new_thing'\]",
        ),
    ],
    ids=["flash-attn 2.6", "the first flash-attn 4", "one more argument"],
)
def test_another_release_is_refused_by_name(kernels, emulate, package, message, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", {package: "1.2.3"}.__getitem__)
    emulate(Recorder(), monkeypatch)
    with pytest.raises(ValueError, match=f"^attn_implementation={kernels.name}: .*{message}"):
        kernels()


def test_a_release_without_the_function_is_refused(monkeypatch):
    install(monkeypatch, {"flash_attn_interface": types.ModuleType("flash_attn_interface")})
    with pytest.raises(ValueError, match=r"flash_attention_3: .*_forward of flash_attn_3 of unknown version"):
        FlashAttention3Kernels()


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("flash_attention_2", "flash-attn can't be imported .*pip install flash-attn"),
        ("flash_attention_3", "flash_attn_3 can't be imported .*hopper"),
        ("flash_attention_4", "flash-attn-4 can't be imported .*pip install --pre flash-attn-4"),
    ],
)
def test_a_missing_package_is_named(name, package, monkeypatch):
    for module in ("flash_attn", "flash_attn_interface"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=rf"^attn_implementation={name}: {package}"):
        resolve_kernels(name, "cuda")


def test_flash_attn_4_alone_is_no_flash_attn_2(monkeypatch):
    """Both are packages of the name ``flash_attn``."""
    flash_attn_4(Recorder(), monkeypatch)
    with pytest.raises(ValueError, match="^attn_implementation=flash_attention_2: flash-attn can't be imported"):
        FlashAttention2Kernels()
    assert FlashAttention4Kernels().name == "flash_attention_4"


@pytest.fixture
def nothing_resolved():
    resolve_kernels.cache_clear()
    yield
    resolve_kernels.cache_clear()


@pytest.mark.parametrize(
    ("release", "capability", "said"),
    [
        ("torch", (7, 0), r"8\.x or later, got 7\.0; use eager"),
        ("flash-attn-2", (8, 0), None),
        ("flash-attn-2", (7, 5), r"8\.x or later, got 7\.5; use sdpa"),
        ("flash-attn-3", (9, 0), None),
        ("flash-attn-3", (8, 0), r"compute capability 9\.x to 9\.x, got 8\.0; use sdpa"),
        ("flash-attn-3", (10, 0), r"compute capability 9\.x to 9\.x, got 10\.0; use sdpa"),
        ("flash-attn-4", (10, 0), None),
        ("flash-attn-4", (8, 9), r"compute capability 9\.x to 12\.x, got 8\.9; use sdpa"),
    ],
)
@pytest.mark.usefixtures("nothing_resolved")
def test_a_gpu_that_it_does_not_run_on_is_refused(release, capability, said, monkeypatch):
    kernels = RELEASES[release].kernels
    if release != "torch":
        RELEASES[release].install(Recorder(), monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    if said is None:
        assert isinstance(resolve_kernels(kernels.name, "cuda"), kernels)
    else:
        with pytest.raises(ValueError, match=f"^attn_implementation={kernels.name}: .*{said}"):
            resolve_kernels(kernels.name, "cuda")


@pytest.mark.usefixtures("nothing_resolved")
def test_kernels_are_made_once_and_know_their_name(monkeypatch):
    flash_attn_2(Recorder(), monkeypatch)
    for name in ("sdpa", "flash_attention_2"):
        kernels = resolve_kernels(name, "cuda")
        assert kernels.name == name
        assert resolve_kernels(name, "cuda") is kernels
    assert CpuKernels().name == resolve_kernels("auto", "cpu").name == "sdpa"
    assert set(ATTENTION_IMPLEMENTATIONS) >= {release.kernels.name for release in RELEASES.values()}


def test_kernels_are_copied_with_a_model(emulated):
    kernels, recorder = emulated
    for again in (copy.deepcopy(kernels), pickle.loads(pickle.dumps(kernels))):
        assert type(again) is type(kernels)
        before = len(recorder.calls)
        lengths, parents = FORESTS["groups"]
        through_forest(*draw(sum(lengths), (4, 2)), lengths, parents, None, again)
        assert len(recorder.calls) > before


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4"])
def test_the_kernels_on_a_gpu(name):
    """Errors against float64 are no more than 1.5 times those of the kernels for CPUs."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if name != "sdpa" and not installed(name):
        with pytest.raises(ValueError, match=f"^attn_implementation={name}: .*(can't be imported|needs a GPU)"):
            resolve_kernels(name, "cuda")
        return
    kernels = resolve_kernels(name, "cuda")
    for forest, window, heads in itertools.product(FORESTS, (None, 3), HEADS):
        lengths, parents = FORESTS[forest]
        values, weights = draw(sum(lengths), heads, torch.bfloat16)
        arguments = lengths, parents, window
        exact = path_by_path([x.double() for x in values], weights.double(), *arguments)
        plain = through_forest(values, weights, *arguments, CpuKernels())
        got = on_a_gpu(values, weights, *arguments, kernels)
        for number, kind in enumerate(("out", "dq", "dk", "dv")):
            truth = torch.cat(list(exact[number])).double()
            ours, theirs = (
                float((torch.cat(list(x[number])).double() - truth).square().mean().sqrt()) for x in (got, plain)
            )
            assert ours <= 1.5 * theirs + 1e-6, (forest, window, heads, kind)


def installed(name):
    """Whether the package's module is there, and the GPU one that it runs on."""
    (release,) = {x.kernels for x in RELEASES.values() if x.kernels.name == name}
    try:
        importlib.import_module(release.functions[0].rpartition(".")[0])
    except ImportError:
        return False
    return release.oldest <= torch.cuda.get_device_capability()[0] <= (release.newest or 99)


def on_a_gpu(values, weights, lengths, parents, window, kernels):
    forest = Forest(torch.tensor(lengths), torch.tensor(parents), "cuda")
    bounds = list(itertools.accumulate(lengths, initial=0))
    pack = torch.cat([torch.arange(bounds[s], bounds[s + 1]) for s in forest.order.tolist()]).cuda()
    leaves = [x.cuda().requires_grad_() for x in values]
    packed = [x[pack] for x in leaves]
    if window is None:
        out = split_attention(*packed, forest, SCALE, kernels)
    else:
        out = split_attention(*packed, forest, SCALE, kernels, window)
    out = out[pack.argsort()]
    (out * weights.cuda()).sum().backward()
    return tuple(x.cpu().split(lengths) for x in (out.detach(), *(x.grad for x in leaves)))
