"""Routers of mixture-of-experts models on a packed row: their logits asked for, and their balancing loss.

The loss is a mean over tokens, so a prompt that stands in the packed row once weighs as many times as it has copies.
Weights on T packed tokens are the cheaper of the two exact ways: the model's own loss makes several tensors of
``(L, T, K, E)`` for L layers, K choices and E experts, and would make them of all B x S positions if the logits were
copied back to the rows first.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from zorro_verl.families import text_config
from zorro_verl.packing import Plan

ASK = "zorro_router_logits"


def has_router(model: PreTrainedModel) -> bool:
    """Whether the model has routers whose logits can be asked for."""
    return hasattr(text_config(model.config), "output_router_logits")


def asked_of_routers(model: PreTrainedModel, output_router_logits: bool | None) -> tuple[bool, bool]:
    """Whether a call of the plain model returns router logits, and whether it computes their loss."""
    config = text_config(model.config).output_router_logits
    logits = bool(config if output_router_logits is None else output_router_logits)
    # A forward that does not name the argument leaves the config to its backbone, which computes no loss.
    named = "output_router_logits" in inspect.signature(type(model).forward).parameters
    return logits, logits if named else bool(output_router_logits)


def ask_backbone(backbone: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A backbone's forward pre-hook: a call with ``ASK`` records router logits.

    The forward around it is told that none are wanted, or it would compute the loss of the packed row as it is.
    """
    asked = kwargs.pop(ASK, False)
    return args, (kwargs | {"output_router_logits": True} if asked else kwargs)


def copies(plan: Plan) -> Tensor:
    """``(1, T)`` float32: the row tokens that each packed token stands for."""
    return plan.unpack_index.bincount(minlength=plan.num_tokens)[None].float()


def balancing_loss(model: PreTrainedModel, router_logits: tuple[Tensor, ...], plan: Plan) -> Tensor:
    """The model's own auxiliary loss over all tokens of all rows.

    Args:
        model: the model that computed ``router_logits``.
        router_logits: ``(T, E)`` of each layer with a router.
        plan: the plan that packed the row.
    """
    loss = _load_balancing_loss(type(model))
    return loss(router_logits, _setting(model, "num_experts"), _setting(model, "num_experts_per_tok"), copies(plan))


def with_balancing_loss(model: PreTrainedModel, loss: Tensor, aux_loss: Tensor) -> Tensor:
    """The loss of the labels and, in the model's own proportion, the auxiliary one."""
    return loss + (_setting(model, "router_aux_loss_coef") * aux_loss).to(loss)


def _setting(model: PreTrainedModel, name: str) -> Any:
    """Text models read it when they are built, those with a vision tower from the config in every call."""
    return getattr(model, name) if hasattr(model, name) else getattr(text_config(model.config), name)


def _load_balancing_loss(kind: type) -> Callable[..., Tensor]:
    """The function beside the model's class, which FSDP2 or a user may have derived another one from."""
    for base in kind.__mro__:
        loss = getattr(sys.modules[base.__module__], "load_balancing_loss_func", None)
        if loss is not None:
            return loss
    raise ValueError(
        f"output_router_logits: expected a load_balancing_loss_func beside {kind.__name__}, got none; leave it False"
    )
