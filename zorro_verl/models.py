"""The seam on a Hugging Face decoder: attention by plan, head on predictor rows, installed and removed per model.

Two things change on an installed model. Its layers read a config that names the attention function registered here, so
every layer asks it for attention and finds the micro-batch's plan among the forward's keyword arguments; transformers
hands these through unchanged, also when a checkpointed layer is run again. And the top-level ``forward``, as an
attribute of this one model, answers calls that carry ``zorro=SharedPrompt(...)`` with log-probs and entropy, and those
with ``zorro=SharedValues(...)`` with values. Linear layers get kernels that follow the plan, too, see `mixers`. A call
without a plan is the stock forward, and its layers' attention the model's own.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from zorro_verl.attention_kernels import resolve_kernels
from zorro_verl.families import check_causal, check_supported, check_training, text_config, windows_of
from zorro_verl.heads import SharedPrompt, SharedValues
from zorro_verl.layer_call import ATTENTION_NAME, LayerConfig, SharedCall, led_config, no_mask
from zorro_verl.linear_attention import LINEAR_ATTENTION
from zorro_verl.media import MODEL_INPUTS, Vision
from zorro_verl.mixers import attach_mixers, detach_mixers, plan_of_mixers
from zorro_verl.packing import Plan
from zorro_verl.sequence_parallel import Slices
from zorro_verl.varlen import Kernels

_NOISE_OF_LAYERS = frozenset(("attention_dropout", "residual_dropout", "embedding_dropout", "jitter_noise"))


class SeamForward:
    """The ``forward`` of one installed model. Deep-copies and pickles with it, as it holds it by reference.

    The layers, and only they, read a config of their own, which names the seam's attention: backbone and model keep
    the model's, and so do their masks, whatever is built from ``model.config``, and another model that shares it.

    Args:
        model: the model.
        kernels: what attention runs on; None is the dense reference.
        split: False runs attention on the rows as they were, and shares all else.
        linear_attention: one of `LINEAR_ATTENTION`, for models with linear layers.
    """

    def __init__(self, model: PreTrainedModel, kernels: Kernels | None, split: bool, linear_attention: str = "auto"):
        if linear_attention not in LINEAR_ATTENTION:
            raise ValueError(f"linear_attention: expected one of {LINEAR_ATTENTION}, got {linear_attention!r}")
        self.model = model
        self.kernels = kernels
        self.split = split
        self.linear_attention = linear_attention
        self.axes = position_axes(model)

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
        """Let the layers ask for the seam's attention, and linear ones follow the plan."""
        self._set_layer_config(led_config(text_config(self.model.config)))
        attach_mixers(self.model)

    def release_layers(self) -> None:
        """Give them the model's own config and kernels back."""
        detach_mixers(self.model)
        self._set_layer_config(text_config(self.model.config))

    def _set_layer_config(self, config: PretrainedConfig) -> None:
        own = text_config(self.model.config)
        for module in self.model.modules():
            if not isinstance(module, PreTrainedModel) and (_is_led(module) or module.__dict__.get("config") is own):
                module.config = config

    def layer_config(self) -> LayerConfig | None:
        """What layers of the model read while a seam leads them, this one or another; None when none does."""
        return next((module.config for module in self.model.modules() if _is_led(module)), None)

    @property
    def __signature__(self) -> inspect.Signature:
        signature = inspect.signature(type(self.model).forward)
        return signature.replace(parameters=list(signature.parameters.values())[1:])

    def __call__(self, *args: Any, zorro: SharedPrompt | SharedValues | None = None, **kwargs: Any) -> Any:
        if zorro is None:
            return type(self.model).forward(self.model, *args, **kwargs)
        return self._shared(zorro, *args, **kwargs)

    def _shared(
        self, zorro: SharedPrompt | SharedValues, input_ids: Tensor, position_ids: Tensor, **others: Any
    ) -> dict[str, Tensor]:
        """``input_ids`` ``(1, T)`` packed by the plan -> ``log_probs`` (and what else is asked for) ``(R,)``.

        Wrappers such as PEFT's hand on every argument of a stock forward, unset ones as None.
        """
        model, plan, tokens = self.model, zorro.plan, zorro.tokens
        others = {name: value for name, value in others.items() if value is not None and value is not False}
        media = {name: others.pop(name) for name in MODEL_INPUTS if name in others and Vision.of(model.config)}
        if others:
            raise ValueError(
                f"a call with zorro= takes input_ids and position_ids, got {', '.join(others)} too: the plan says what "
                "is seen, and only log-probs and entropy come out"
            )
        if input_ids.shape != (1, plan.num_tokens):
            raise ValueError(f"input_ids: expected (1, {plan.num_tokens}) packed tokens, got {tuple(input_ids.shape)}")
        shape = tuple(position_ids.shape) if isinstance(position_ids, Tensor) else None
        if shape not in [(1, plan.num_tokens), *((axes, 1, plan.num_tokens) for axes in self.axes)]:
            raise ValueError(
                f"position_ids: expected (1, {plan.num_tokens}), the rows' own packed by the plan, got {shape}"
            )
        with _sliced(model, tokens):
            hidden = model.model(
                input_ids=input_ids,
                position_ids=position_ids,
                attention_mask=no_mask(input_ids),
                use_cache=False,
                output_hidden_states=False,  # whatever the config says: nobody looks at them
                output_router_logits=False,
                zorro=self._layer_call(plan, tokens),
                **media,
            ).last_hidden_state.squeeze(0)
        # Prompts fill some slices and responses others: each rank scores its share of the responses, not of its slice.
        scored = Slices(plan.predictor_index.numel(), tokens.group)
        hidden = tokens.whole(hidden).index_select(0, scored.own(plan.predictor_index))
        return {name: scored.whole(values) for name, values in zorro.outputs(model, hidden, scored).items()}

    def _layer_call(self, plan: Plan, tokens: Slices | None = None) -> SharedCall:
        """What every layer of a call gets, after the checks that need the call."""
        config = text_config(self.model.config)
        check_causal(config)
        check_training(self.model.config, self.model.training)
        check_noise(self.model)
        linear = plan_of_mixers(self.model, plan, self.linear_attention)
        return SharedCall(plan, self.kernels, self.split, linear, tokens, windows_of(config))


@contextmanager
def _sliced(model: PreTrainedModel, tokens: Slices) -> Iterator[None]:
    """Let the text backbone, and what is below it, see this rank's slice; a vision tower before it sees all."""
    if tokens.whole_here:
        yield
        return

    def slice_inputs(backbone: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        dims = {"input_ids": -1, "position_ids": -1, "inputs_embeds": 1}
        own = {name: tokens.own(kwargs[name], dim) for name, dim in dims.items() if kwargs.get(name) is not None}
        return args, kwargs | own

    hook = model.get_decoder().register_forward_pre_hook(slice_inputs, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


def seam_of(model: PreTrainedModel) -> SeamForward | None:
    """The seam that runs when ``model`` is called, if it has one; accelerate may have bound it to the model."""
    forward = model.__dict__.get("forward")
    forward = getattr(forward, "__func__", forward)
    return forward if isinstance(forward, SeamForward) else None


def _is_led(module: nn.Module) -> bool:
    return getattr(module.__dict__.get("config"), "_attn_implementation", None) == ATTENTION_NAME


def install(
    model: PreTrainedModel,
    attn_implementation: str = "auto",
    use_split_attention: bool = True,
    device: str | None = None,
    linear_attention: str = "auto",
) -> None:
    """Put the seam on ``model``, in place. Parameters, state dict keys and stock calls stay as they are.

    Args:
        model: a ``...ForCausalLM``, a ``...ForConditionalGeneration`` around a text model, or, for `SharedValues`, a
            ``...ForTokenClassification``, of a type in `zorro_verl.families.SUPPORTED_MODEL_TYPES`.
        attn_implementation: one of `ATTENTION_IMPLEMENTATIONS`; see `resolve_kernels`.
        use_split_attention: False shares projections, MLPs and head only.
        device: type of the device it will run on; the parameters' own when None.
        linear_attention: how Gated DeltaNet layers share, see `zorro_verl.linear_attention.LinearPlan`.

    Raises:
        ValueError: an unsupported model or an attention that can't run on the model's device.
    """
    kernels = kernels_for(model, attn_implementation, device, heads=("lm_head", "score"))
    SeamForward(model, kernels, use_split_attention, linear_attention).attach()


def uninstall(model: PreTrainedModel) -> None:
    """Take the seam off again; nothing of it is left on the model."""
    seam = seam_of(model)
    if seam is None:
        raise ValueError(f"model: expected one with the seam installed, got a plain {type(model).__name__}")
    seam.detach()


def kernels_for(
    model: PreTrainedModel,
    attn_implementation: str,
    device: str | None = None,
    heads: tuple[str, ...] = ("lm_head",),
) -> Kernels | None:
    """`resolve_kernels` for a model that a seam can be put on, with one of ``heads``.

    Raises:
        ValueError: not a model with a head, of a supported type, or an attention that can't run on its device.
    """
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"model: expected a transformers PreTrainedModel, got {type(model).__name__}")
    check_supported(model.config)
    if not (hasattr(model, "model") and any(hasattr(model, head) for head in heads)):
        raise ValueError(
            f"model: expected a ...ForCausalLM with a backbone and {' or '.join(heads)}, got {type(model).__name__}"
        )
    return resolve_kernels(attn_implementation, device or next(model.parameters()).device.type)


def check_attention_layer(layer: nn.Module) -> None:
    """Refuse what is no attention layer of a supported model."""
    arguments = inspect.signature(type(layer).forward).parameters
    if not hasattr(layer, "config") or not {"position_embeddings", "past_key_values"} <= arguments.keys():
        raise ValueError(
            "attention_layer: expected an attention layer such as model.model.layers[0].self_attn, "
            f"got {type(layer).__name__}"
        )
    check_supported(layer.config)


def check_noise(model: nn.Module) -> None:
    """Refuse noise that layers were built with, whatever the config says by now; dropout of adapters is allowed."""
    if not model.training:
        return
    for name, module in model.named_modules():
        # Asked for by name, what a module lacks is looked up among its parameters, buffers and submodules first.
        own = vars(module)
        keys = _NOISE_OF_LAYERS & own.keys()
        if isinstance(module, nn.Dropout) and "lora" not in name:
            keys |= {"p"}
        for key in keys:
            if isinstance(own[key], float) and own[key] > 0:
                raise ValueError(
                    f"{name}.{key}: expected 0 in training, got {own[key]}; build the model anew with its config at 0"
                )


def position_axes(model: nn.Module) -> tuple[int, ...]:
    """How many axes ``position_ids`` may have beside none: for time, height and width, or these below one of the text.

    Only a multi-modal rotary embedding reads them.
    """
    return (3, 4) if any(hasattr(module, "mrope_section") for module in model.modules()) else ()


def name_of(forward: Any) -> str:
    """A forward in an error message."""
    return getattr(forward, "__qualname__", type(forward).__name__)
