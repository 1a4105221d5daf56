"""The comparison of a large model, layer by layer, in the memory of one layer and the two ends.

Every layer is compared as a function: both sides get the hidden states that the plain model has come to, and a weighted
sum of what leaves the layer is the loss. The first layer starts from the embeddings, the last one ends in log-probs and
entropies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from zorro_verl.equivalence import (
    Batch,
    Comparison,
    Difference,
    Outcome,
    Sharing,
    differences_of,
    shared_call,
    take_gradients,
    value_dtype,
    values_of,
    widened,
)
from zorro_verl.layer_loading import LayeredCheckpoint


class Passage:
    """What goes into a model's only decoder layer and what leaves it.

    Attributes:
        entering: ``(1, L, E)`` hidden states that take the place of the embeddings; None leaves these.
        entered, left: what the layer got and gave in the last call.
    """

    def __init__(self, entering: Tensor | None):
        self.entering = entering
        self.entered: Tensor | None = None
        self.left: Tensor | None = None

    def enter(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple, dict] | None:
        """A forward pre-hook."""
        if self.entering is None:
            self.entered = args[0]
            return None
        self.entered = self.entering
        return (self.entering, *args[1:]), kwargs

    def leave(self, layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """A forward hook."""
        self.left = output[0] if isinstance(output, tuple) else output


@contextmanager
def passage(model: PreTrainedModel, entering: Tensor | None) -> Iterator[Passage]:
    """Watch, and feed, the model's only layer within this context."""
    (layer,) = model.get_decoder().layers
    watched = Passage(entering)
    hooks = (
        layer.register_forward_pre_hook(watched.enter, with_kwargs=True),
        layer.register_forward_hook(watched.leave),
    )
    try:
        yield watched
    finally:
        for hook in hooks:
            hook.remove()


class Stage:
    """One layer between given hidden states and a loss.

    Args:
        batch: the rows.
        layer: its index in the checkpoint.
        entering: ``(N, E)`` hidden states of the rows' tokens; None in the first layer.
        weights: ``(N, E)`` of what leaves the layer in the loss; None in the last layer, whose loss is the batch's own.
    """

    def __init__(self, batch: Batch, layer: int, entering: Tensor | None, weights: Tensor | None):
        self.batch, self.layer, self.entering, self.weights = batch, layer, entering, weights
        # A layer in the middle has no vocabulary: its model knows one word.
        self.tokens = batch.rows.tokens if entering is None or weights is None else batch.rows.tokens * 0

    def plain(self, model: PreTrainedModel) -> tuple[Outcome, Tensor]:
        """One unpadded row at a time; also what left the layer, ``(N, E)``."""
        batch, left, entered_gradients = self.batch, [], []
        values = torch.zeros(2, batch.labels.numel(), device=batch.labels.device, dtype=value_dtype(model))
        bounds, done = batch.rows.cu_seqlens.tolist(), 0
        for start, stop, prompt in zip(bounds, bounds[1:], batch.rows.prompt_lens.tolist(), strict=False):
            where = slice(done, done := done + stop - start - prompt)
            entering = None if self.entering is None else self._leaf(self.entering[start:stop], model)
            with passage(model, entering) as watched:
                logits = model(input_ids=self.tokens[None, start:stop], use_cache=False).logits[0, prompt - 1 : -1]
            left.append(watched.left.detach()[0])
            if self.weights is None:
                log_probs, entropy = values_of(logits, batch.labels[where], batch.temperature[where])
                values[:, where] = torch.stack([log_probs, entropy]).detach()
                loss = batch.loss(log_probs, entropy, where)
            else:
                loss = self._layer_loss(watched.left[0], slice(start, stop))
            loss.backward()
            if entering is not None:
                entered_gradients.append(entering.grad[0])
        gradient = None
        if entered_gradients:  # a shared token has the gradients of all its copies
            gradient = self._packed_sum(torch.cat(entered_gradients))
        left = torch.cat(left)
        return self._outcome(model, left, values[0], values[1], gradient), left

    def shared(self, model: PreTrainedModel) -> Outcome:
        """The model with the seam installed, in one packed call."""
        batch, plan = self.batch, self.batch.plan
        entering = None if self.entering is None else self._leaf(self.entering[plan.token_index], model)
        labels = batch.labels if self.weights is None else batch.labels * 0
        with passage(model, entering) as watched:
            out = shared_call(model, batch, self.tokens, labels)
        left = watched.left[0][plan.unpack_index]
        if self.weights is None:
            loss = batch.loss(out["log_probs"], out["entropy"])
        else:
            loss = self._layer_loss(left, slice(None))
        loss.backward()
        gradient = None if entering is None else entering.grad[0]
        return self._outcome(model, left.detach(), out["log_probs"].detach(), out["entropy"].detach(), gradient)

    def _leaf(self, hidden: Tensor, model: PreTrainedModel) -> Tensor:
        return hidden[None].to(model.dtype, copy=True).requires_grad_()

    def _layer_loss(self, left: Tensor, where: slice) -> Tensor:
        return (left * self.weights[where].to(left.dtype)).sum()

    def _packed_sum(self, rows: Tensor) -> Tensor:
        packed = rows.new_zeros(self.batch.plan.num_tokens, rows.shape[-1])
        return packed.index_add_(0, self.batch.plan.unpack_index, rows)

    def _outcome(
        self, model: PreTrainedModel, left: Tensor, log_probs: Tensor, entropy: Tensor, gradient: Tensor | None
    ) -> Outcome:
        values = {"layer outputs": left} if self.weights is not None else {"log_probs": log_probs, "entropy": entropy}
        if gradient is not None:
            values["input gradients"] = gradient
        gradients = take_gradients(model)
        return Outcome(values, {name.replace("layers.0.", f"layers.{self.layer}."): g for name, g in gradients.items()})


def compare_layer(
    checkpoint: LayeredCheckpoint,
    layer: int,
    batch: Batch,
    entering: Tensor | None,
    ways: Sequence[Sharing],
    wide_dtype: torch.dtype | None,
) -> tuple[list[Difference], Tensor]:
    """The differences in one layer, and what leaves it.

    Args:
        entering: ``(N, E)`` the hidden states that the layer gets, None in the first.
        ways: how the seam shares, one after the other.
        wide_dtype: of the oracle that both sides are compared with; None compares them with each other.

    Raises:
        ValueError: the plain model gives values that are not finite.
    """
    last = layer == checkpoint.num_layers - 1
    model = checkpoint.load(layer, with_ends=last or entering is None)
    weights = None if last else _weights(model, batch, layer)
    stage = Stage(batch, layer, entering, weights)
    wide = None if wide_dtype is None else stage.plain(widened(model, wide_dtype))[0]
    plain, left = stage.plain(model)
    where = f"layer {layer}, "
    plain.check_finite(where)
    comparison = Comparison(batch, model, where)
    differences = list(differences_of(ways, model, stage.shared, comparison, plain, wide))
    # All copies of a shared prompt go on from the same values, also where the kernels round rows of different length
    # differently.
    packed = left[batch.plan.token_index]
    return differences, packed[batch.plan.unpack_index]


def _weights(model: PreTrainedModel, batch: Batch, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    size = (batch.rows.tokens.numel(), model.config.get_text_config().hidden_size)
    return torch.randn(size, generator=generator).to(batch.rows.tokens.device)
