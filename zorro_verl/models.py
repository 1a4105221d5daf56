"""The seam on a Hugging Face decoder: attention by plan, head on predictor rows, installed and removed per model.

Two things change on an installed model. Its layers read a config that names the attention function registered here, so
every layer asks it for attention and finds the micro-batch's plan among the forward's keyword arguments; transformers
hands these through unchanged, also when a checkpointed layer is run again. And the top-level ``forward``, as an
attribute of this one model, answers calls that carry ``zorro=SharedPrompt(...)`` with log-probs and entropy. A call
without a plan is the stock forward, and its layers' attention the model's own.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import inspect
import sys
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel

from zorro_verl.attention import plan_attention
from zorro_verl.log_probs import LOGITS_OPTIMIZATIONS, log_probs_from_hidden, log_probs_from_logits
from zorro_verl.packing import Plan
from zorro_verl.varlen import CpuKernels, FlashAttention2Kernels, Kernels, TorchVarlenKernels

SUPPORTED_MODEL_TYPES = ("qwen3", "qwen2", "llama", "mistral")
ATTENTION_IMPLEMENTATIONS = ("auto", "eager", "sdpa", "flash_attention_2", "flash_attention_3")
ATTENTION_NAME = "zorro"


class SharedPrompt:
    """What a call asks of an installed model: ``model(input_ids, position_ids, use_cache=False, zorro=this)``.

    A plain class, since it passes through FSDP2 (see `zorro_verl.packing.Plan`).

    Attributes:
        plan: the plan that packed ``input_ids``.
        labels: ``(R,)`` int64, the response tokens in the rows' own order.
        temperature: one float, or ``(R,)``; divides the logits.
        calculate_entropy: whether the entropy is wanted.
        logits_optimization: "none" (all response logits at once), "compute" (softmax in chunks) or "memory"
            (projection in chunks, recomputed in the backward). Same values and gradients from all three.
    """

    __slots__ = ("plan", "labels", "temperature", "calculate_entropy", "logits_optimization")

    def __init__(
        self,
        plan: Plan,
        labels: Tensor,
        temperature: float | Tensor = 1.0,
        calculate_entropy: bool = False,
        logits_optimization: str = "none",
    ):
        if logits_optimization not in LOGITS_OPTIMIZATIONS:
            raise ValueError(
                f"logits_optimization: expected one of {LOGITS_OPTIMIZATIONS}, got {logits_optimization!r}"
            )
        if labels.shape != plan.label_index.shape:
            raise ValueError(f"labels: expected {tuple(plan.label_index.shape)}, got {tuple(labels.shape)}")
        self.plan = plan
        self.labels = labels
        self.temperature = temperature
        self.calculate_entropy = calculate_entropy
        self.logits_optimization = logits_optimization


class SharedAttention:
    """Attention of every layer in a call with a plan."""

    __slots__ = ("plan", "kernels", "split")

    def __init__(self, plan: Plan, kernels: Kernels | None, split: bool):
        self.plan, self.kernels, self.split = plan, kernels, split

    @torch.compiler.disable  # on a CPU a loop over this batch's segments: traced, every batch would be compiled anew
    def __call__(self, module, query, key, value, attention_mask, scaling=None, **kwargs) -> tuple[Tensor, None]:
        # Under autocast a normalisation may hand over float32 queries and keys beside bfloat16 values.
        q, k, v = (x.squeeze(0).transpose(0, 1).to(value.dtype) for x in (query, key, value))
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return plan_attention(q, k, v, self.plan, scale, self.kernels, self.split)[None], None


def zorro_attention(module, query, key, value, attention_mask, zorro=None, **kwargs):
    """The attention function registered with transformers: by the plan, or in a call without one the model's own."""
    if zorro is not None:
        return zorro(module, query, key, value, attention_mask, **kwargs)
    if attention_mask is not None and attention_mask.numel() == 0:
        raise ValueError(
            f"{type(module).__name__}: expected the plan of a packed row as the keyword argument zorro=, got none; a "
            "forward on the way here does not hand its keyword arguments on"
        )
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    function = AttentionInterface().get_interface(module.config.stock_config._attn_implementation, eager)
    return function(module, query, key, value, attention_mask, **kwargs)


AttentionInterface.register(ATTENTION_NAME, zorro_attention)


def no_mask(like: Tensor) -> Tensor:
    """The mask of a packed row: none is needed, and one of four dimensions keeps transformers from making it.

    It is empty, so that an attention which does look at it fails.
    """
    return torch.empty((1, 1, 0, 0), dtype=torch.bool, device=like.device)


class SeamForward:
    """The ``forward`` of one installed model. Deep-copies and pickles with it, as it holds it by reference.

    The layers, and only they, read a config of their own, which names the seam's attention: backbone and model keep
    the model's, and so do their masks, whatever is built from ``model.config``, and another model that shares it.

    Args:
        model: the model.
        kernels: what attention runs on; None is the dense reference.
        split: False runs attention on the rows as they were, and shares all else.
    """

    def __init__(self, model: PreTrainedModel, kernels: Kernels | None, split: bool):
        self.model = model
        self.kernels = kernels
        self.split = split

    def attach(self) -> None:
        """Become the model's forward, in place of another seam if there is one."""
        previous = self.model.__dict__.get("forward")
        if seam := seam_of(self.model):
            seam.detach()
        elif getattr(previous, "__func__", previous) not in (None, type(self.model).forward):
            raise ValueError(
                f"model.forward: expected the one of {type(self.model).__name__}, got {name_of(previous)}, which "
                "something else (accelerate's hooks?) put on this model; patch first, then prepare"
            )
        self.model.forward = self
        self.lead_layers()

    def detach(self) -> None:
        """Leave the model as it was."""
        self.release_layers()
        del self.model.forward

    def lead_layers(self) -> None:
        """Let the layers ask for the seam's attention."""
        self._set_layer_config(led_config(self.model.config))

    def release_layers(self) -> None:
        """Give them the model's own config back."""
        self._set_layer_config(self.model.config)

    def _set_layer_config(self, config: PretrainedConfig) -> None:
        for module in self.model.modules():
            if not isinstance(module, PreTrainedModel) and (
                _is_led(module) or module.__dict__.get("config") is self.model.config
            ):
                module.config = config

    def leads(self) -> bool:
        """Whether layers of the model ask for a seam's attention now, this one's or another's."""
        return any(map(_is_led, self.model.modules()))

    @property
    def __signature__(self) -> inspect.Signature:
        signature = inspect.signature(type(self.model).forward)
        return signature.replace(parameters=list(signature.parameters.values())[1:])

    def __call__(self, *args: Any, zorro: SharedPrompt | None = None, **kwargs: Any) -> Any:
        if zorro is None:
            return type(self.model).forward(self.model, *args, **kwargs)
        return self._shared(zorro, *args, **kwargs)

    def _shared(self, zorro: SharedPrompt, input_ids: Tensor, position_ids: Tensor, **others: Any) -> dict[str, Tensor]:
        """``input_ids`` ``(1, T)`` packed by the plan -> ``log_probs`` (and ``entropy``) ``(R,)``.

        Wrappers such as PEFT's hand on every argument of a stock forward, unset ones as None.
        """
        model, plan = self.model, zorro.plan
        asked = [name for name, value in others.items() if value is not None and value is not False]
        if asked:
            raise ValueError(
                f"a call with zorro= takes input_ids and position_ids, got {', '.join(asked)} too: the plan says what "
                "is seen, and only log-probs and entropy come out"
            )
        if input_ids.shape != (1, plan.num_tokens):
            raise ValueError(f"input_ids: expected (1, {plan.num_tokens}) packed tokens, got {tuple(input_ids.shape)}")
        hidden = model.model(
            input_ids=input_ids,
            position_ids=position_ids,
            attention_mask=no_mask(input_ids),
            use_cache=False,
            zorro=self._attention(plan),
        ).last_hidden_state.squeeze(0)
        hidden = hidden.index_select(0, plan.predictor_index)
        log_probs, entropy = _head(model.lm_head, hidden, zorro)
        return {"log_probs": log_probs, "entropy": entropy} if zorro.calculate_entropy else {"log_probs": log_probs}

    def _attention(self, plan: Plan) -> SharedAttention:
        """What every layer of a call gets as ``zorro=``, after the checks that need the call's rows."""
        check_causal(self.model.config)
        check_training(self.model.config, self.model.training)
        check_window(sliding_window(self.model.config), plan.longest_row)
        return SharedAttention(plan, self.kernels, self.split)


def led_config(config: PretrainedConfig) -> PretrainedConfig:
    """A copy for layers that names the seam's attention, and knows the config that it stands for."""
    led = copy.copy(config)
    led.stock_config = getattr(config, "stock_config", config)
    led._attn_implementation = ATTENTION_NAME
    return led


def seam_of(model: PreTrainedModel) -> SeamForward | None:
    """The seam that runs when ``model`` is called, if it has one; accelerate may have bound it to the model."""
    forward = model.__dict__.get("forward")
    forward = getattr(forward, "__func__", forward)
    return forward if isinstance(forward, SeamForward) else None


def _is_led(module: nn.Module) -> bool:
    return getattr(module.__dict__.get("config"), "_attn_implementation", None) == ATTENTION_NAME


def _head(lm_head: nn.Module, hidden: Tensor, zorro: SharedPrompt) -> tuple[Tensor, Tensor | None]:
    if zorro.logits_optimization != "memory":
        chunked = zorro.logits_optimization == "compute"
        return log_probs_from_logits(lm_head(hidden), zorro.labels, zorro.temperature, zorro.calculate_entropy, chunked)
    if not isinstance(lm_head, nn.Linear):
        raise ValueError(
            f"logits_optimization=memory: expected a plain linear lm_head, got {type(lm_head).__name__}; "
            "use logits_optimization=compute"
        )
    # The head is called as a module, with another forward for this call: FSDP may have wrapped it by itself, and then
    # its weight is whole between the hooks of a call only.
    lm_head.forward = functools.partial(_project, lm_head, zorro)
    try:
        return lm_head(hidden)
    finally:
        del lm_head.forward


def _project(lm_head: nn.Linear, zorro: SharedPrompt, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
    return log_probs_from_hidden(
        hidden, lm_head.weight, lm_head.bias, zorro.labels, zorro.temperature, zorro.calculate_entropy
    )


def install(
    model: PreTrainedModel,
    attn_implementation: str = "auto",
    use_split_attention: bool = True,
    device: str | None = None,
) -> None:
    """Put the seam on ``model``, in place. Parameters, state dict keys and stock calls stay as they are.

    Args:
        model: a ``...ForCausalLM`` of a type in `SUPPORTED_MODEL_TYPES`.
        attn_implementation: one of `ATTENTION_IMPLEMENTATIONS`; see `resolve_kernels`.
        use_split_attention: False shares projections, MLPs and head only.
        device: type of the device it will run on; the parameters' own when None.

    Raises:
        ValueError: an unsupported model or an attention that can't run on the model's device.
    """
    kernels = kernels_for(model, attn_implementation, device)
    SeamForward(model, kernels, use_split_attention).attach()


def uninstall(model: PreTrainedModel) -> None:
    """Take the seam off again; nothing of it is left on the model."""
    seam = seam_of(model)
    if seam is None:
        raise ValueError(f"model: expected one with the seam installed, got a plain {type(model).__name__}")
    seam.detach()


def kernels_for(model: PreTrainedModel, attn_implementation: str, device: str | None = None) -> Kernels | None:
    """`resolve_kernels` for a model that a seam can be put on.

    Raises:
        ValueError: not a ``...ForCausalLM`` of a supported type, or an attention that can't run on its device.
    """
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"model: expected a transformers PreTrainedModel, got {type(model).__name__}")
    check_supported(model.config)
    if not (hasattr(model, "model") and hasattr(model, "lm_head")):
        raise ValueError(f"model: expected a ...ForCausalLM with a backbone and lm_head, got {type(model).__name__}")
    return resolve_kernels(attn_implementation, device or next(model.parameters()).device.type)


def resolve_kernels(attn_implementation: str, device: str) -> Kernels | None:
    """The kernels behind an attention name on a device type; None is the dense reference.

    "auto" is "sdpa" on a CPU and on CUDA, "eager" elsewhere (npu). "sdpa" is torch's own flash attention on both.

    Raises:
        ValueError: an unknown name, or one that can't run here, with what would have to be installed.
    """
    if attn_implementation not in ATTENTION_IMPLEMENTATIONS:
        raise ValueError(
            f"attn_implementation: expected one of {ATTENTION_IMPLEMENTATIONS}, got {attn_implementation!r}"
        )
    if attn_implementation == "auto":
        attn_implementation = "sdpa" if device in ("cpu", "cuda", "meta") else "eager"
    if attn_implementation == "eager":
        return None
    if attn_implementation == "sdpa":
        if device not in ("cpu", "cuda", "meta"):
            raise ValueError(f"attn_implementation=sdpa: expected a cpu or cuda device, got {device}; use eager")
        return _SdpaKernels()
    if attn_implementation == "flash_attention_3":
        raise ValueError(
            "attn_implementation=flash_attention_3: this version has no adapter for it; use sdpa, or "
            "flash_attention_2 with flash-attn installed"
        )
    if device != "cuda":
        raise ValueError(f"attn_implementation={attn_implementation}: needs a cuda device, got {device}; use sdpa")
    if importlib.util.find_spec("flash_attn") is None:
        raise ValueError("attn_implementation=flash_attention_2: flash-attn is missing, `pip install flash-attn`")
    return FlashAttention2Kernels()


class _SdpaKernels:
    """torch's own flash attention, chosen by where the tensors are: a model may move after it was installed."""

    def forward(self, q, k, v, call, scale):
        return self._on(q).forward(q, k, v, call, scale)

    def backward(self, grad, q, k, v, out, lse, call, scale):
        return self._on(q).backward(grad, q, k, v, out, lse, call, scale)

    def _on(self, q: Tensor) -> Kernels:
        if q.device.type == "cpu":
            return CpuKernels()
        if q.dtype not in (torch.float16, torch.bfloat16):
            raise ValueError(
                f"attn_implementation=sdpa: expected float16 or bfloat16 on {q.device.type}, got {q.dtype}; "
                "use attn_implementation=eager or a bfloat16 model"
            )
        return TorchVarlenKernels()


def check_supported(config: PretrainedConfig) -> None:
    """Refuse what sharing would get wrong on this architecture, by name, before anything runs."""
    check_causal(config)
    if config.model_type not in SUPPORTED_MODEL_TYPES:
        raise ValueError(
            f"model_type: expected one of {SUPPORTED_MODEL_TYPES}, got {config.model_type!r}; "
            "use the plain model, in veRL with actor_rollout_ref.actor.strategy=fsdp2"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    rope_type = rope.get("rope_type", "default")
    if rope_type in ("dynamic", "longrope"):
        raise ValueError(
            f"rope_type: expected frequencies that don't depend on the batch's longest row, got {rope_type!r}; "
            "use the plain model, in veRL with actor_rollout_ref.actor.strategy=fsdp2"
        )


def check_causal(config: PretrainedConfig) -> None:
    """A model that looks ahead has no prompt that is the same for every response."""
    if not getattr(config, "is_causal", True):
        raise ValueError("is_causal: expected True, got False; use the plain model for bidirectional attention")


def check_attention_layer(layer: nn.Module) -> None:
    """Refuse what is no attention layer of a supported model."""
    arguments = inspect.signature(type(layer).forward).parameters
    if not hasattr(layer, "config") or not {"position_embeddings", "past_key_values"} <= arguments.keys():
        raise ValueError(
            "attention_layer: expected an attention layer such as model.model.layers[0].self_attn, "
            f"got {type(layer).__name__}"
        )
    check_supported(layer.config)


def check_training(config: PretrainedConfig, training: bool) -> None:
    """Attention dropout draws one mask per row in the stock model; a shared prompt would have one for all."""
    dropout = getattr(config, "attention_dropout", 0.0)
    if training and dropout > 0:
        raise ValueError(
            f"attention_dropout: expected 0 in training, got {dropout}; set it to 0 in the model's config, in veRL "
            "with +actor_rollout_ref.model.override_config.attention_dropout=0"
        )


def check_window(window: int | None, longest_row: int) -> None:
    """A sliding window is no window as long as no row is longer; beyond that sharing does not implement it."""
    if window is not None and longest_row > window:
        raise ValueError(
            f"sliding_window: expected rows of at most {window} tokens, got one of {longest_row}; shorten prompts or "
            "responses, or use the plain model, in veRL with actor_rollout_ref.actor.strategy=fsdp2"
        )


def name_of(forward: Any) -> str:
    """A forward in an error message."""
    return getattr(forward, "__qualname__", type(forward).__name__)


def sliding_window(config: PretrainedConfig) -> int | None:
    """The window of the layers that have one, None when no layer has."""
    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None and "sliding_attention" not in layer_types:
        return None
    return window
