"""The forward of a patched model: a padded batch in, each shared prompt computed once, logits in the batch's shape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from threading import get_ident
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from zorro_verl.families import text_config
from zorro_verl.layer_call import LayerConfig
from zorro_verl.log_probs import check_temperature
from zorro_verl.metrics import call_stats
from zorro_verl.models import SeamForward, kernels_for, name_of, seam_of
from zorro_verl.padded_plan import check_response_length
from zorro_verl.patched_call import UNSHARED_REASONS, PatchedCall
from zorro_verl.reconstruct import gather_rows
from zorro_verl.router import ASK, ask_backbone, asked_of_routers, balancing_loss, has_router, with_balancing_loss
from zorro_verl.varlen import Kernels


class PatchCounts(NamedTuple):
    """Of one call of a patched model or layer; ``unshared`` says why its ``rows`` could not be, else it is None."""

    tokens_total: int = 0
    tokens_packed: int = 0
    groups: int = 0
    rows: int = 0
    unshared: str | None = None

    def stats(self) -> Mapping[str, Any]:
        """Under the names of `DeduplicatedActor.stats`."""
        fallback = {reason: self.rows if reason == self.unshared else 0 for reason in UNSHARED_REASONS}
        return MappingProxyType(call_stats(self.tokens_total, self.tokens_packed, self.groups, fallback))


class PatchedForward(SeamForward):
    """The ``forward`` of one patched model. A call with ``zorro=`` is the seam's.

    A call with a cache, whose keys and values have to stand in the batch's own shape, runs as the plain model does and
    is counted, and so do one with ``inputs_embeds`` that have a gradient and one with images or videos. Logits are
    divided by the temperature in every call but those that ``model.generate`` makes, which has a temperature of its
    own.

    Args:
        model, kernels, split: see `SeamForward`.
        response_length: responses stand in the last so many columns; None to find prompts from the tokens.
        temperature: one float, or ``(B,)``, above 0; a call's own ``temperature=`` goes before it.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        kernels: Kernels | None,
        split: bool,
        response_length: int | None = None,
        temperature: float | Tensor = 1.0,
    ):
        super().__init__(model, kernels, split)
        self.response_length = check_response_length(response_length)
        self.temperature = check_temperature(temperature, zero=False)
        self.generating = Counter()  # calls of generate that are under way, by thread
        self.counts = PatchCounts()
        self.outer: SeamForward | None = None  # what comes back when this one goes
        self.retired = False
        self.own_generate: Any = None
        self.router_hook: Any = None
        self.backward_config: LayerConfig | None = None  # what led the layers in a backward after this went

    def attach(self) -> None:
        """As the seam's; and ``generate``, too."""
        super().attach()
        if has_router(self.model):
            self.router_hook = self.model.model.register_forward_pre_hook(ask_backbone, with_kwargs=True)
        self.own_generate = self.model.__dict__.get("generate")
        self.model.generate = _PlainGenerate(self)

    def detach(self) -> None:
        super().detach()
        if self.router_hook is not None:
            self.router_hook.remove()
        if isinstance(self.model.__dict__.get("generate"), _PlainGenerate):  # else somebody has put another one there
            del self.model.generate
            if self.own_generate is not None:
                self.model.generate = self.own_generate

    def retire(self) -> None:
        """Go for good: now, or when what is on top of it goes."""
        self.retired = True
        if seam_of(self.model) is self:
            self.detach()
            outer = self.outer
            while isinstance(outer, PatchedForward) and outer.retired:
                outer = outer.outer
            if outer is not None:
                outer.attach()

    @property
    def stats(self) -> Mapping[str, Any]:
        """The last call's counts, under the names of `DeduplicatedActor.stats`."""
        return self.counts.stats()

    def __call__(self, *args: Any, zorro: Any = None, **kwargs: Any) -> Any:
        if args and args[0] is self.model:  # accelerate binds a forward that it unwraps as if it were the class's
            args = args[1:]
        if zorro is not None:
            return super().__call__(*args, zorro=zorro, **kwargs)
        model, call = self.model, self._read(*args, **kwargs)
        if call is None:
            return type(model).forward(model, *args, **kwargs)
        output = type(model).forward(model, **call.inputs, return_dict=True)
        kind, fields = type(output), dict(output)
        del output  # and with it the packed row's logits, once they are copied to the rows
        _check_head(fields.get("logits"), call)
        fields["logits"] = _divided(fields["logits"], call.temperature)
        if call.plan is not None:
            if call.runs_again:
                self._prepare_backward(fields)
            self._to_rows(fields, call)
        fields["logits"] = _divided_per_row(fields["logits"], call.temperature)
        if call.loss_arguments:
            fields["loss"] = self._loss(fields, call)
        output = kind(**fields)
        return output if call.return_dict else output.to_tuple()

    def _to_rows(self, fields: dict[str, Any], call: PatchedCall) -> None:
        """The packed row's outputs in the batch's shape."""
        fields["logits"] = gather_rows(fields["logits"][0], call.place)
        if "hidden_states" in fields:
            fields["hidden_states"] = tuple(gather_rows(x[0], call.index) for x in fields["hidden_states"])
        if "router_logits" in fields:
            packed = fields["router_logits"]
            fields["router_logits"] = tuple(gather_rows(x, call.index.flatten()) for x in packed)
            if call.aux_loss:
                fields["aux_loss"] = balancing_loss(self.model, packed, call.plan)
        elif call.aux_loss:
            raise ValueError(
                f"output_router_logits: expected router_logits from {name_of(type(self.model).forward)}, got none; "
                "leave it False"
            )

    def _loss(self, fields: Mapping[str, Any], call: PatchedCall) -> Tensor:
        arguments = call.loss_arguments
        if not getattr(self.model, "accepts_loss_kwargs", True):  # forwards that hand nothing but labels to the loss
            arguments = {"labels": arguments["labels"]}
        vocabulary = text_config(self.model.config).vocab_size
        loss = self.model.loss_function(logits=fields["logits"], vocab_size=vocabulary, **arguments)
        return with_balancing_loss(self.model, loss, fields["aux_loss"]) if "aux_loss" in fields else loss

    def _prepare_backward(self, fields: Mapping[str, Any]) -> None:
        """Checkpointed layers run again in the backward, and have to meet the seam's attention after unpatch(), too."""
        for output in (fields["logits"], *fields.get("hidden_states", ()), *fields.get("router_logits", ())):
            if output.requires_grad:
                output.register_hook(self._lead_backward)

    def _lead_backward(self, grad: Tensor) -> None:
        if self.layer_config() is None:
            self.lead_layers()
            self.backward_config = self.layer_config()
        if self.layer_config() is self.backward_config:  # a backward that failed has left its own behind
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        if self.layer_config() is self.backward_config:  # and not a seam's that came in the meantime
            self.release_layers()

    @torch.compiler.disable  # host arithmetic on what the tokens are: nothing to compile, and new in every batch
    def _read(self, *args: Any, **kwargs: Any) -> PatchedCall | None:
        """What a call asks for; None for one that `generate` makes."""
        if self.generating[get_ident()]:
            return None
        model, config = self.model, text_config(self.model.config)
        runs_again = model.training and model.is_gradient_checkpointing  # transformers then makes no cache
        arguments = self.__signature__.bind(*args, **kwargs).arguments
        arguments |= arguments.pop("kwargs", {})
        if config.output_attentions:
            arguments.setdefault("output_attentions", True)
        router_logits = arguments.pop("output_router_logits", None) if has_router(model) else None
        caches = config.use_cache and not runs_again
        call = PatchedCall(arguments, self.response_length, caches, self.axes)
        given = self.temperature if call.temperature is None else call.temperature
        call.temperature = check_temperature(given, call.num_rows, zero=False)
        if call.return_dict is None:
            call.return_dict = model.config.return_dict
        if call.plan is None:
            if router_logits is not None:
                call.inputs["output_router_logits"] = router_logits
            self.counts = PatchCounts(call.num_tokens, call.num_tokens, 0, call.num_rows, call.unshared)
            return call
        self.counts = PatchCounts(call.num_tokens, call.plan.num_tokens, call.plan.num_groups, call.num_rows)
        if model.training and getattr(model.get_input_embeddings(), "neftune_noise_alpha", None):
            raise ValueError(
                "neftune_noise_alpha: expected none, got noise on embeddings, which differs from row to row; unpatch() "
                "the model, or train without it"
            )
        call.inputs["zorro"] = self._layer_call(call.plan)
        if has_router(model):
            asked, call.aux_loss = asked_of_routers(model, router_logits)
            call.inputs |= {"output_router_logits": False, ASK: asked}
        call.runs_again = runs_again
        return call


class _PlainGenerate:
    """``generate`` of a patched model: the plain model's, whatever arguments it calls the forward with."""

    def __init__(self, forward: PatchedForward):
        self.forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model, own, thread = self.forward.model, self.forward.own_generate, get_ident()
        self.forward.generating[thread] += 1
        try:
            return type(model).generate(model, *args, **kwargs) if own is None else own(*args, **kwargs)
        finally:
            self.forward.generating[thread] -= 1


def patch(
    model: PreTrainedModel,
    attn_implementation: str,
    use_split_attention: bool,
    response_length: int | None = None,
    temperature: float | Tensor = 1.0,
    on_top: bool = False,
) -> PatchedForward:
    """Give ``model`` a `PatchedForward`.

    A seam that is no patch, such as the actor's, comes back when this one is retired. A patch is replaced for good, or
    with ``on_top`` comes back, too.

    Raises:
        ValueError: an unsupported model, an attention that can't run on its device, or a bad option.
    """
    kernels = kernels_for(model, attn_implementation)
    forward = PatchedForward(model, kernels, use_split_attention, response_length, temperature)
    outer = seam_of(model)
    forward.attach()
    while isinstance(outer, PatchedForward) and not on_top:
        outer = outer.outer
    forward.outer = outer
    return forward


def _check_head(logits: Tensor | None, call: PatchedCall) -> None:
    """A forward put on the class, such as veRL's, may not know ``logits_to_keep``, or give no logits."""
    kept = None if call.plan is None else call.inputs["logits_to_keep"].numel()
    if logits is None or kept not in (None, logits.shape[1]):
        expected = "all" if kept is None else kept
        got = "no logits" if logits is None else logits.shape[1]
        raise ValueError(
            f"logits_to_keep: expected logits of {expected} positions from the model's own forward, got {got}; "
            "another forward has been put on its class, which a patched model can't use"
        )


def _divided(logits: Tensor, temperature: float | Tensor) -> Tensor:
    """``(..., V)`` logits over one temperature; as they are when rows have their own."""
    return logits if isinstance(temperature, Tensor) or temperature == 1 else logits / temperature


def _divided_per_row(logits: Tensor, temperature: float | Tensor) -> Tensor:
    """``(B, K, V)`` logits over ``(B,)`` temperatures, in their own dtype; as they are when there is one for all."""
    if not isinstance(temperature, Tensor):
        return logits
    return (logits / temperature.to(logits.device).reshape(-1, 1, 1)).to(logits.dtype)
