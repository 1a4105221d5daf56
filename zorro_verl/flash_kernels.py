"""Flash attention for CUDA devices behind one adapter: torch's own, and the packages flash-attn 2, 3 and 4.

They compute the same from the same arguments, under names that differ between packages and releases. `Entry` finds a
release's names once, when the kernels are made. `FlashKernels` is all that they have in common; a package adds where
its functions are, and what it can't do.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zorro_verl.forest import VarlenCall
from zorro_verl.varlen import lse_dtype

DTYPES = (torch.float16, torch.bfloat16)
MAX_HEAD_DIM = 256
MAX_SEGMENTS = 2**16 - 1  # a dimension of CUDA's grid
MAX_INDEX = 2**31 - 1
LOWER_BUDGET = "lower actor_rollout_ref.actor.ppo_max_token_len_per_gpu, the token budget of a micro-batch"

# What an argument means, and its names in torch and in the releases.
NAMES = {
    "q": ("q", "query"),
    "k": ("k", "key"),
    "v": ("v", "value"),
    "cu_seqlens_q": ("cu_seqlens_q", "cum_seq_q"),
    "cu_seqlens_k": ("cu_seqlens_k", "cum_seq_k"),
    "max_seqlen_q": ("max_seqlen_q", "max_q"),
    "max_seqlen_k": ("max_seqlen_k", "max_k"),
    "scale": ("softmax_scale", "scale"),
    "causal": ("causal", "is_causal"),
    "grad": ("dout", "grad_out"),
    "out": ("out",),
    "lse": ("softmax_lse", "lse", "logsumexp"),
    "dq": ("dq",),
    "dk": ("dk",),
    "dv": ("dv",),
    "deterministic": ("deterministic",),
    "rng_state": ("rng_state",),
    "unused": ("unused",),
}
FORWARD = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "scale", "causal")
BACKWARD = (*FORWARD, "grad", "out", "lse")
IN_PLACE = ("dq", "dk", "dv", "deterministic")

# What is not used, for functions that want it said.
NONE = """alibi_slopes k_new v_new qv out cu_seqlens_k_new seqused_q seqused_k sequed_q sequed_k page_table kv_batch_idx
    leftpad_k rotary_cos rotary_sin seqlens_rotary q_descale k_descale v_descale"""
UNUSED = {"dropout_p": 0.0, "softcap": 0.0, "return_debug_mask": False} | dict.fromkeys(NONE.split())


class Entry:
    """A function of a release, called by what its arguments mean.

    Args:
        function: a Python function, a ``torch.library.custom_op`` or an operator of torch.
        label: what errors call it.
        meanings: of `NAMES`, all that it is called with besides ``window``.
        window: the names that the two bounds of a window may have, or the one name of the pair, in order of preference.

    Raises:
        ValueError: an argument that it has not, or one that it can't do without and this module doesn't know.
    """

    def __init__(
        self, function: Callable[..., Any], label: str, meanings: tuple[str, ...], window: tuple[tuple[str, ...], ...]
    ):
        self._function = function
        required = _required(function)
        self._names = {meaning: _present(NAMES[meaning], required, label) for meaning in meanings}
        names = next((names for names in window if set(names) <= required.keys()), None)
        if names is None:
            raise ValueError(f"{label}: expected one of the arguments {window}, got {tuple(required)}")
        self._window = names
        known = {*self._names.values(), *self._window}
        self._constants = {x: UNUSED[x] for x in required if required[x] and x in UNUSED and x not in known}
        if "return_lse" in required:
            self._constants["return_lse"] = True
        if missing := [x for x in required if required[x] and x not in known and x not in self._constants]:
            raise ValueError(f"{label}: it can't be called without {missing}, of which this version knows nothing")

    def __call__(self, window: tuple[int | None, int | None], **values: Any) -> Any:
        named = {self._names[meaning]: value for meaning, value in values.items()}
        bounds = window if len(self._window) == 2 else (window,)
        return self._function(**named, **dict(zip(self._window, bounds, strict=True)), **self._constants)


class FlashKernels:
    """What the adapters have in common; a subclass is made without arguments.

    Attributes:
        name: the ``attn_implementation`` it is.
        package, install: what has to be installed, and how.
        oldest, newest: the compute capabilities it runs on, without their minor part; None for all later ones.
        instead: the ``attn_implementation`` that errors advise.
        functions: ``module.function`` of forward and backward.
        backward_meanings: what the backward takes.
        windows: see `Entry`.
        unbounded: how it says that a window has no bound.
        head_dim_step: head sizes have to be multiples of it.
        heads_share_index: whether one 32-bit index counts over the elements of all heads, or of one head.

    Raises:
        ValueError: the package is missing, or its functions are others than these.
    """

    name: str
    package: str
    install: str
    oldest: int
    newest: int | None = None
    instead = "sdpa"
    functions: tuple[str, str]
    backward_meanings: tuple[str, ...] = BACKWARD + IN_PLACE
    windows: tuple[tuple[str, ...], ...] = (("window_size_left", "window_size_right"),)
    unbounded: int | None = -1
    head_dim_step = 8
    heads_share_index = True

    def __init__(self):
        forward, backward = self.functions
        self._forward = Entry(*self._load(forward), FORWARD, self.windows)
        self._backward = Entry(*self._load(backward), self.backward_meanings, self.windows)

    def __reduce__(self):
        """Copies and pickles are made anew, from the package that is there."""
        return type(self), ()

    def arrange(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return q.contiguous(), k.contiguous(), v.contiguous()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: VarlenCall, scale: float) -> tuple[Tensor, Tensor]:
        """See `varlen.Kernels`; q, k, v in float16 or bfloat16."""
        self._check(q, k, call, q.requires_grad or k.requires_grad or v.requires_grad)
        if not q.shape[0] or not k.shape[0]:  # kernels have no grid of nothing
            return torch.zeros_like(q), q.new_full((q.shape[1], q.shape[0]), -torch.inf, dtype=lse_dtype(q))
        out, lse, *_ = self._forward(**self._arguments(q, k, v, call, scale))
        return out, lse.masked_fill(lse == torch.inf, -torch.inf)  # +inf of flash-attn 2: a query without keys

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: VarlenCall, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `varlen.Kernels`; the sum over a block runs in a fixed order under torch's deterministic algorithms."""
        self._check(q, k, call, True)
        if not q.shape[0] or not k.shape[0]:
            return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        merged = {"grad": grad.contiguous(), "out": out.contiguous(), "lse": lse.contiguous()}
        return self._gradients(**self._arguments(q, k, v, call, scale), **merged)

    def _gradients(self, **arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (arguments[x] for x in "qkv")
        # Zeros: a kernel may leave out the keys that no query looks at.
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        deterministic = torch.are_deterministic_algorithms_enabled()
        self._backward(**arguments, dq=dq, dk=dk, dv=dv, deterministic=deterministic)
        return dq, dk, dv

    def _arguments(self, q: Tensor, k: Tensor, v: Tensor, call: VarlenCall, scale: float) -> dict[str, Any]:
        return {
            "q": q,
            "k": k,
            "v": v,
            "cu_seqlens_q": call.cu_seqlens_q,
            "cu_seqlens_k": call.cu_seqlens_k,
            # A bound. From one query a block, flash-attn 2 infers that no block is empty, and takes another path.
            "max_seqlen_q": max(call.max_seqlen_q, 2),
            "max_seqlen_k": call.max_seqlen_k,
            "scale": scale,
            "causal": call.causal,
            "window": (self.unbounded, self.unbounded) if call.window is None else (call.window - 1, 0),
        }

    def _check(self, q: Tensor, k: Tensor, call: VarlenCall, gradient: bool) -> None:
        """Limits of the kernels, from shapes alone: nothing is read from the device."""
        heads, head_dim = q.shape[1:]
        segments = call.cu_seqlens_q.shape[0] - 1
        where = f"attn_implementation={self.name}"
        if q.dtype not in DTYPES:
            raise ValueError(
                f"{where}: expected float16 or bfloat16 on {q.device.type}, got {q.dtype}; use "
                "attn_implementation=eager or a bfloat16 model"
            )
        if head_dim > MAX_HEAD_DIM or head_dim % self.head_dim_step:
            raise ValueError(
                f"{where}: expected a head size of at most {MAX_HEAD_DIM} that is a multiple of {self.head_dim_step}, "
                f"got {head_dim}; use attn_implementation={self.instead}"
            )
        if segments > MAX_SEGMENTS:
            raise ValueError(
                f"{where}: expected at most {MAX_SEGMENTS} segments in a micro-batch, got {segments}; {LOWER_BUDGET}"
            )
        if gradient:
            # Of the float32 sum of dQ, in which each segment is followed by a block of 128 rows.
            tokens, step = max(q.shape[0], k.shape[0]), 32 if head_dim <= 128 else 64
            heads, width = heads if self.heads_share_index else 1, -(-head_dim // step) * step
            elements = (tokens + 128 * segments) * heads * width
            if elements > MAX_INDEX:
                raise ValueError(
                    f"{where}: its backward counts in 32 bits: expected (tokens + 128 x segments) x heads x head size "
                    f"of at most {MAX_INDEX}, got ({tokens} + 128 x {segments}) x {heads} x {width} = {elements}; "
                    f"{LOWER_BUDGET}"
                )

    def _load(self, path: str) -> tuple[Callable[..., Any], str]:
        """The function and what errors call it."""
        module, _, name = path.rpartition(".")
        where = f"attn_implementation={self.name}"
        try:
            function = getattr(importlib.import_module(module), name, None)
        except ImportError as error:
            raise ValueError(f"{where}: {self.package} can't be imported ({error}); {self.install}") from error
        label = f"{where}: {path} of {self.package} {_version(self.package)}"
        if function is None:
            raise ValueError(f"{label}: there is no such function; {self.install}")
        return function, label


class TorchVarlenKernels(FlashKernels):
    """torch's own variable-length flash attention.

    Its backward is deterministic under ``torch.use_deterministic_algorithms(True)``; with ``warn_only=True`` torch
    warns and runs the other.
    """

    name = "sdpa"
    oldest = 8
    instead = "eager"
    functions = ("_flash_attention_forward", "_flash_attention_backward")
    backward_meanings = (*BACKWARD, "rng_state", "unused")

    def _load(self, path):
        label = f"attn_implementation=sdpa: aten.{path} of torch {torch.__version__}"
        return getattr(torch.ops.aten, path).default, label

    def _gradients(self, **arguments):
        state = torch.empty(2, dtype=torch.uint64, device=arguments["q"].device)  # of a dropout that never runs
        return self._backward(**arguments, rng_state=state, unused=state[:0])


class FlashAttention2Kernels(FlashKernels):
    """The package flash-attn, 2.8.3 and later: Ampere GPUs and newer."""

    name = "flash_attention_2"
    package = "flash-attn"
    install = "`pip install flash-attn`, 2.8.3 or later"
    oldest = 8
    functions = (
        "flash_attn.flash_attn_interface._flash_attn_varlen_forward",
        "flash_attn.flash_attn_interface._flash_attn_varlen_backward",
    )


class FlashAttention3Kernels(FlashKernels):
    """FlashAttention 3, the package ``flash_attn_interface``: Hopper GPUs."""

    name = "flash_attention_3"
    package = "flash_attn_3"
    install = "build the folder `hopper` of the flash-attention repository"
    oldest = newest = 9
    functions = ("flash_attn_interface._flash_attn_forward", "flash_attn_interface._flash_attn_backward")
    windows = (*FlashKernels.windows, ("window_size",))
    heads_share_index = False


class FlashAttention4Kernels(FlashKernels):
    """FlashAttention 4, the package flash-attn-4: Hopper and Blackwell GPUs."""

    name = "flash_attention_4"
    package = "flash-attn-4"
    install = "`pip install --pre flash-attn-4`"
    oldest, newest = 9, 12
    functions = ("flash_attn.cute.interface._flash_attn_fwd", "flash_attn.cute.interface._flash_attn_bwd")
    unbounded = None
    head_dim_step = 32  # with others, early releases gave wrong gradients and said nothing


def _required(function: Callable[..., Any]) -> dict[str, bool]:
    """The parameters of a function in their order, and whether each has to be given."""
    if isinstance(function, torch._ops.OpOverload):
        return {x.name: not x.has_default_value() for x in function._schema.arguments}
    signature = inspect.signature(getattr(function, "_init_fn", function))  # what `torch.library.custom_op` wraps
    return {name: x.default is inspect.Parameter.empty for name, x in signature.parameters.items()}


def _present(names: tuple[str, ...], required: dict[str, bool], label: str) -> str:
    for name in names:
        if name in required:
            return name
    raise ValueError(f"{label}: expected an argument {' or '.join(names)}, got {tuple(required)}")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # built in place
        return "of unknown version"
