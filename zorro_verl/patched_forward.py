"""The forward of a patched model: a padded batch in, each shared prompt computed once, logits in the batch's shape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from zorro_verl.metrics import call_stats
from zorro_verl.models import SeamForward, SharedAttention, kernels_for
from zorro_verl.patched_call import PatchedCall
from zorro_verl.reconstruct import gather_rows
from zorro_verl.varlen import Kernels


class PatchCounts(NamedTuple):
    """Of one call of a patched model or layer; ``unshared`` are rows that a cache left so."""

    tokens_total: int = 0
    tokens_packed: int = 0
    groups: int = 0
    unshared: int = 0

    def stats(self) -> Mapping[str, Any]:
        """Under the names of `DeduplicatedActor.stats`."""
        return call_stats(self.tokens_total, self.tokens_packed, self.groups, {"use_cache": self.unshared})


class PatchedForward(SeamForward):
    """The ``forward`` of one patched model. A call with ``zorro=`` is the seam's.

    A call with a cache, whose keys and values have to stand in the batch's own shape, runs as the plain model does and
    is counted. Logits are divided by the temperature in every call but those that ``model.generate`` makes, which has
    a temperature of its own.

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
        if response_length is not None and (type(response_length) is not int or response_length < 1):
            raise ValueError(f"response_len: expected None or an int of at least 1, got {response_length!r}")
        self.response_length = response_length
        self.temperature = _checked(temperature)
        self.generating = False
        self.counts = PatchCounts()
        self.outer: SeamForward | None = None
        self.own_generate: Any = None

    def attach(self) -> None:
        """As the seam's; and ``generate``, too. A seam that is no patch, such as the actor's, comes back in the end."""
        previous = self.model.__dict__.get("forward")
        outer = previous.outer if isinstance(previous, PatchedForward) else previous
        super().attach()
        self.outer = outer
        self.own_generate = self.model.__dict__.get("generate")
        self.model.generate = _PlainGenerate(self.model, self.own_generate)

    def detach(self) -> None:
        super().detach()
        if isinstance(self.model.__dict__.get("generate"), _PlainGenerate):  # else somebody has put another one there
            del self.model.generate
            if self.own_generate is not None:
                self.model.generate = self.own_generate
        if self.outer is not None:
            self.outer.attach()

    @property
    def stats(self) -> Mapping[str, Any]:
        """The last call's counts, under the names of `DeduplicatedActor.stats`; the only fallback is a cache."""
        return self.counts.stats()

    def __call__(self, *args: Any, zorro: Any = None, **kwargs: Any) -> Any:
        if zorro is not None:
            return super().__call__(*args, zorro=zorro, **kwargs)
        if self.generating:
            return self._stock(*args, **kwargs)
        model, (call, attention) = self.model, self._read(*args, **kwargs)
        if attention is None:
            output = self._stock(**call.inputs, return_dict=True)
        else:
            output = type(model).forward(model, **call.inputs, return_dict=True, zorro=attention)
            if call.checkpointed:
                self._prepare_backward(output.logits, *(output.hidden_states or ()))
            output.logits = gather_rows(output.logits[0], call.place)
            if output.hidden_states is not None:
                output.hidden_states = tuple(gather_rows(hidden[0], call.index) for hidden in output.hidden_states)
        output.logits = _divided(output.logits, call.temperature)
        if call.loss_arguments:
            arguments = {"labels": None} | call.loss_arguments
            loss = model.loss_function(logits=output.logits, vocab_size=model.config.vocab_size, **arguments)
            output = type(output)(loss=loss, **output)
        return output if call.return_dict else output.to_tuple()

    def _prepare_backward(self, *outputs: Tensor) -> None:
        """Checkpointed layers run again in the backward, and have to meet the seam's attention after unpatch(), too."""
        for output in outputs:
            if output.requires_grad:
                output.register_hook(self._lead_backward)

    def _lead_backward(self, grad: Tensor) -> None:
        if not isinstance(self.model.__dict__.get("forward"), SeamForward):
            self.lead_modules()
            torch.autograd.Variable._execution_engine.queue_callback(self.release_modules)

    @torch.compiler.disable  # host arithmetic on what the tokens are: nothing to compile, and new in every batch
    def _read(self, *args: Any, **kwargs: Any) -> tuple[PatchedCall, SharedAttention | None]:
        arguments = self.__signature__.bind(*args, **kwargs).arguments
        arguments |= arguments.pop("kwargs", {})
        if self.model.config.output_attentions:
            arguments.setdefault("output_attentions", True)
        call = PatchedCall(arguments, self.response_length)
        call.temperature = self.temperature if call.temperature is None else _checked(call.temperature)
        if call.return_dict is None:
            call.return_dict = self.model.config.return_dict
        call.checkpointed = self.model.training and self.model.is_gradient_checkpointing
        if call.plan is None:
            self.counts = PatchCounts(call.num_tokens, call.num_tokens, 0, call.num_rows)
            return call, None
        self.counts = PatchCounts(call.num_tokens, call.plan.num_tokens, call.plan.num_groups)
        return call, self._attention(call.plan)


class _PlainGenerate:
    """``generate`` of a patched model: the plain model's, whatever arguments it calls the forward with."""

    def __init__(self, model: PreTrainedModel, own: Any):
        self.model = model
        self.own = own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = self.model.forward
        forward.generating = True
        try:
            return self.own(*args, **kwargs) if self.own else type(self.model).generate(self.model, *args, **kwargs)
        finally:
            forward.generating = False


def patch(
    model: PreTrainedModel,
    attn_implementation: str,
    use_split_attention: bool,
    response_length: int | None = None,
    temperature: float | Tensor = 1.0,
) -> PatchedForward:
    """Give ``model`` a `PatchedForward`, in place of a seam that it may have.

    Raises:
        ValueError: an unsupported model, an attention that can't run on its device, or a bad option.
    """
    kernels = kernels_for(model, attn_implementation)
    forward = PatchedForward(model, kernels, use_split_attention, response_length, temperature)
    forward.attach()
    return forward


def _checked(temperature: float | Tensor) -> float | Tensor:
    number = isinstance(temperature, int | float) and not isinstance(temperature, bool)
    if not (number or isinstance(temperature, Tensor)):
        raise ValueError(f"temperature: expected a float or a (B,) tensor, got {type(temperature).__name__}")
    if not bool(torch.as_tensor(temperature > 0).all()):
        raise ValueError(f"temperature: expected values above 0, got {temperature}")
    return temperature


def _divided(logits: Tensor, temperature: float | Tensor) -> Tensor:
    """``(B, K, V)`` logits over one temperature or ``(B,)``, in their own dtype."""
    if not isinstance(temperature, Tensor):
        return logits if temperature == 1 else logits / temperature
    if temperature.dim() > 1 or temperature.numel() not in (1, logits.shape[0]):
        raise ValueError(f"temperature: expected a float or ({logits.shape[0]},), got {tuple(temperature.shape)}")
    return (logits / temperature.to(logits.device).reshape(-1, 1, 1)).to(logits.dtype)
