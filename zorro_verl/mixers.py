"""The seam on Gated DeltaNet layers: a call's plan reaches the mixer, and its conv and recurrence follow it.

A mixer keeps the kernels of its conv and its recurrence as attributes; on an installed model these are the ones here,
which run the mixer's own kernels along the plan. Its forward stays what it is, Hugging Face's or verl's. Not every
such forward hands its keyword arguments on to the mixer (transformers 5.5.3 and verl's don't), but every model hands
them to its decoder layers: hooks there say which plan the layer runs under, in this call and in the one that
checkpointing makes of it in the backward.
"""

from __future__ import annotations

import functools
from threading import local
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zorro_verl.linear_attention import LinearPlan, causal_conv, gated_delta_rule
from zorro_verl.packing import Plan
from zorro_verl.sequence_parallel import Slices


class LinearCall(Protocol):
    """What a decoder layer is called with as ``zorro=``."""

    tokens: Slices
    linear: LinearPlan  # as `plan_of_mixers` makes it


class _Running(local):
    call: LinearCall | None = None


# The call that a layer is in, by thread: two may run the same model at once, and a backward may run layers again in a
# thread of its own. No attribute of anything that a mixer holds: torch.compile takes what it finds there for constant.
_running = _Running()


class SharedMixer:
    """The conv and the recurrence of one mixer, by plan. Deep-copies and pickles with its model.

    Args:
        layer: the decoder layer.
        mixer: the Gated DeltaNet in it.
    """

    def __init__(self, layer: nn.Module, mixer: nn.Module):
        self.layer, self.mixer = layer, mixer
        self.stock_conv, self.stock_rule = mixer.causal_conv1d_fn, mixer.chunk_gated_delta_rule
        self.hooks: tuple[Any, ...] = ()

    def attach(self) -> None:
        """Take the place of the mixer's kernels."""
        self.mixer.causal_conv1d_fn = self.conv
        self.mixer.chunk_gated_delta_rule = self.untraced_rule if takes_cu_seqlens(self.stock_rule) else self.rule
        self.hooks = (
            self.layer.register_forward_pre_hook(self.enter, with_kwargs=True),
            self.layer.register_forward_hook(self.leave, always_call=True),
        )

    def detach(self) -> None:
        """Leave mixer and layer as they were, but for kernels that others have put there."""
        if self._owns(self.mixer.causal_conv1d_fn):
            self.mixer.causal_conv1d_fn = self.stock_conv
        if self._owns(self.mixer.chunk_gated_delta_rule):
            self.mixer.chunk_gated_delta_rule = self.stock_rule
        for hook in self.hooks:
            hook.remove()

    def enter(self, layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Before the decoder layer runs."""
        # Also where there is none: an interrupt in a layer leaves without its hooks.
        _running.call = None
        if kwargs.get("zorro") is None:
            return
        mixer = self.mixer
        if not (self._owns(mixer.causal_conv1d_fn) and self._owns(mixer.chunk_gated_delta_rule)):
            raise ValueError(
                f"{type(mixer).__name__}: expected the kernels that follow the plan, got others that were put on it "
                "since; set kernels first, then install or patch"
            )
        _running.call = kwargs["zorro"]

    def leave(self, layer: nn.Module, args: tuple, output: Any) -> None:
        """After it has, or has failed."""
        _running.call = None

    def conv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, seq_idx: Any = None
    ) -> Tensor:
        """The mixer's ``causal_conv1d_fn``: ``(B, C, L)`` -> ``(B, C, L)``."""
        call = _running.call
        if call is None:
            return self._stock_conv(x, weight, bias, activation, seq_idx)
        _refuse(seq_idx=seq_idx)
        tokens = call.tokens
        (x,) = tokens.to_heads(x[0].T)  # a channel is a head of its own
        weight, bias = (None if p is None else tokens.own_heads(p) for p in (weight, bias))
        stock = functools.partial(self._stock_conv, weight=weight, bias=bias, activation=activation)
        out = causal_conv(stock, x.T[None], weight.shape[-1], call.linear)
        return tokens.to_tokens(out[0].T).T[None]

    def _stock_conv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, seq_idx: Any = None
    ) -> Tensor:
        """The mixer's own kernel, or what every mixer does without one."""
        if self.stock_conv is not None:
            return self.stock_conv(x=x, weight=weight, bias=bias, activation=activation, seq_idx=seq_idx)
        if seq_idx is not None:
            raise ValueError(
                "seq_idx: expected None without the package causal-conv1d, got packed sequences; uninstall the "
                "seam for this call, or install causal-conv1d"
            )
        channels, width = weight.shape
        return F.silu(F.conv1d(x, weight[:, None], bias, padding=width - 1, groups=channels)[..., : x.shape[-1]])

    def rule(self, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **options: Any) -> Any:
        """The mixer's ``chunk_gated_delta_rule``: the output ``(B, L, H, V)``, and the final state if asked for."""
        call = _running.call
        if call is None:
            if options.get("cu_seqlens") is not None and not takes_cu_seqlens(self.stock_rule):
                raise ValueError(
                    "cu_seqlens: expected None without flash-linear-attention, got packed sequences; uninstall the "
                    "seam for this call, or install flash-linear-attention"
                )
            return self.stock_rule(query, key, value, g=g, beta=beta, **options)
        normalise = options.pop("use_qk_l2norm_in_kernel")
        _refuse(**options)
        inputs = [x[None] for x in call.tokens.to_heads(*(x[0] for x in (query, key, value, g, beta)))]
        out = gated_delta_rule(self.stock_rule, *inputs, call.linear, use_qk_l2norm_in_kernel=normalise)
        return call.tokens.to_tokens(out[0])[None], None

    @torch.compiler.disable  # as that rule itself is: one break around all its calls
    def untraced_rule(self, *args: Any, **options: Any) -> Any:
        """`rule` where the stock one is flash-linear-attention's."""
        return self.rule(*args, **options)

    def _owns(self, kernel: Any) -> bool:
        return getattr(kernel, "__self__", None) is self


def takes_cu_seqlens(rule: Any) -> bool:
    """Whether a recurrence honours ``cu_seqlens``: flash-linear-attention's does, transformers' ignores it."""
    return rule.__module__.partition(".")[0] == "fla"


def _refuse(**options: Any) -> None:
    for name, value in options.items():
        if value is not None and value is not False:
            raise ValueError(f"{name}: expected none beside a plan, got {value!r:.60}; a shared call has no cache")


def linear_layers(model: nn.Module) -> list[tuple[nn.Module, nn.Module]]:
    """Each decoder layer with a Gated DeltaNet, and that mixer."""
    return [
        (layer, mixer)
        for layer in model.modules()
        for mixer in layer.children()
        if hasattr(mixer, "chunk_gated_delta_rule") and hasattr(mixer, "causal_conv1d_fn")
    ]


@torch.compiler.disable  # host arithmetic on what is shared: nothing to compile, and new in every batch
def plan_of_mixers(model: nn.Module, plan: Plan, mode: str) -> LinearPlan | None:
    """What all Gated DeltaNets of ``model``, attached as below, follow in one call; None where it has none.

    Args:
        mode: one of `zorro_verl.linear_attention.LINEAR_ATTENTION`.
    """
    shared = [shared_mixer_of(layer) for layer, _ in linear_layers(model)]
    if not shared:
        return None
    varlen = all(takes_cu_seqlens(one.stock_rule) for one in shared)
    return LinearPlan(plan, mode, varlen, max(one.mixer.conv_kernel_size for one in shared))


def attach_mixers(model: nn.Module) -> None:
    """Let every Gated DeltaNet of ``model`` follow the plan of a call."""
    for layer, mixer in linear_layers(model):
        if shared_mixer_of(layer) is None:
            SharedMixer(layer, mixer).attach()


def detach_mixers(model: nn.Module) -> None:
    """Leave every layer of ``model``, which may be a copy of the one that they were attached to, as it was."""
    for layer, _ in linear_layers(model):
        if shared := shared_mixer_of(layer):
            shared.detach()


def shared_mixer_of(layer: nn.Module) -> SharedMixer | None:
    """What makes the mixer of a decoder layer follow the plan, if something does."""
    owners = (getattr(hook, "__self__", None) for hook in layer._forward_pre_hooks.values())
    return next((owner for owner in owners if isinstance(owner, SharedMixer)), None)
