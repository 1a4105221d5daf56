"""Model and layer level: compute_log_prob and update_actor, stock on the rows as they are and with shared prompts."""

from __future__ import annotations

import copy
from typing import NamedTuple

import torch
from gpu_bench.batch import Batch, Piece
from gpu_bench.comparison import Results
from gpu_bench.contest import Contestant
from gpu_bench.stock import build_model, hidden_states, set_checkpointing
from gpu_bench.work import CHECKPOINTED_UPDATE, FORWARD, UPDATE, Passes, operations
from torch import Tensor
from transformers import PretrainedConfig

from zorro_verl.grouping import Rows, find_prompt_groups
from zorro_verl.heads import SharedPrompt
from zorro_verl.log_probs import log_probs_from_hidden, log_probs_from_logits
from zorro_verl.models import install
from zorro_verl.packing import build_plan


class Work(NamedTuple):
    """What is done with a batch."""

    name: str
    passes: Passes
    backward: bool = False
    checkpointing: bool = False


COMPUTE_LOG_PROB = Work("compute_log_prob", FORWARD)
UPDATE_ACTOR = Work("update_actor", UPDATE, backward=True)
CHECKPOINTED = Work("update_actor, layers checkpointed", CHECKPOINTED_UPDATE, backward=True, checkpointing=True)

# Of the engine level; here, since the plan of a run needs no veRL.
ENGINE_LOG_PROB = Work("compute_log_prob, with entropy", FORWARD)
ENGINE_UPDATE = Work("update_actor, with the optimizer", UPDATE, backward=True)


class SharedHidden(SharedPrompt):
    """Asks an installed model for the hidden states that predict responses, and for no head."""

    __slots__ = ()

    def outputs(self, model, hidden, scored):
        return {"values": hidden}


class ModelLevel:
    """A stock model and one with shared prompts, which have their parameters in common.

    Args:
        config: sizes of the model.
        device: where it lives.
        attention: what the shared model's attention runs on, see `zorro_verl.attention_kernels.resolve_kernels`.
        logits_optimization: of both heads; None leaves the head out, and the last hidden states are what is compared.
    """

    def __init__(self, config: PretrainedConfig, device: str, attention: str, logits_optimization: str | None):
        self.config, self.attention, self.logits_optimization = config, attention, logits_optimization
        self.stock = build_model(config, device)
        # A copy of the modules alone: what they hold in parameters and buffers stays one.
        tensors = [*self.stock.parameters(), *self.stock.buffers()]
        self.shared = copy.deepcopy(self.stock, {id(tensor): tensor for tensor in tensors})
        install(self.shared, attn_implementation=attention)
        generator = torch.Generator().manual_seed(1)
        self._direction = torch.randn(config.hidden_size, generator=generator).to(device)

    def passes(self, work: Work) -> Passes:
        if self.logits_optimization is None:
            return work.passes.without_head()
        return work.passes.with_head_recomputed() if self.logits_optimization == "memory" else work.passes

    def contestants(self, batch: Batch, work: Work, whole_gradients: bool = False) -> tuple[Contestant, ...]:
        """
        Args:
            batch: the rows.
            work: what to do with them.
            whole_gradients: compare the gradients of all parameters, not of the first layer's alone.
        """
        full = operations(self.config, batch.groups, self.passes(work), shared=False)
        less = operations(self.config, batch.groups, self.passes(work), shared=True)

        def stock(pieces: list[Piece]):
            return lambda: _StockStep(self, batch, work, whole_gradients, pieces)

        return (
            Contestant("stock varlen on duplicated tokens", "baseline", stock([batch.whole]), full),
            Contestant("stock varlen, one row at a time", "stand-in", stock(batch.single_rows), full),
            Contestant("zorro", "ours", lambda: _SharedStep(self, batch, work, whole_gradients), less),
        )

    def reference(self, batch: Batch, work: Work) -> Results:
        """The stock model in float32, on one row at a time."""
        exact = copy.copy(self)
        exact.stock = copy.deepcopy(self.stock).float()
        step = _StockStep(exact, batch, work, True, batch.single_rows)
        step.reset()
        step.run()
        return step.results()

    def close(self) -> None:
        """Drop the gradients, which stay from run to run."""
        self.stock.zero_grad(set_to_none=True)

    def values_of(self, hidden: Tensor, piece: Piece) -> Tensor:
        """The stock head: the package's own, so that sharing alone is compared."""
        if self.logits_optimization is None:
            return hidden
        head = self.stock.lm_head
        if self.logits_optimization == "memory":
            return log_probs_from_hidden(hidden, head.weight, head.bias, piece.labels, 1.0, False).log_probs
        chunked = self.logits_optimization == "compute"
        return log_probs_from_logits(head(hidden), piece.labels, 1.0, False, chunked=chunked).log_probs

    def output_grad(self, weights: Tensor, dtype: torch.dtype) -> Tensor:
        """The gradient of the loss in what the model puts out, log-probs or hidden states."""
        if self.logits_optimization is None:
            return torch.outer(weights, self._direction).to(dtype)
        return weights


class _ModelStep:
    """One side of the comparison. Gradients are allocated before a run: they are no activations."""

    def __init__(self, level: ModelLevel, batch: Batch, work: Work, whole_gradients: bool):
        self.level, self.batch, self.work = level, batch, work
        layer = level.stock.model.layers[0]
        self.compared = dict((level.stock if whole_gradients else layer).named_parameters())
        self.parameters = list(level.stock.parameters())
        self.model = level.stock

    def reset(self) -> None:
        self.values = None
        self.model.train(self.work.backward)
        set_checkpointing(self.model, self.work.checkpointing)
        for parameter in self.parameters:
            if not self.work.backward:
                parameter.grad = None
            elif parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            else:
                parameter.grad.zero_()

    def results(self) -> Results:
        names = self.compared if self.work.backward else {}
        gradients = {name: parameter.grad.clone() for name, parameter in names.items()}
        return Results({"values": self.values}, self.batch.rows.response_lens.tolist(), gradients)


class _StockStep(_ModelStep):
    def __init__(self, level, batch, work, whole_gradients, pieces: list[Piece]):
        super().__init__(level, batch, work, whole_gradients)
        self.pieces = pieces
        dtype = next(level.stock.parameters()).dtype
        self.grads = [level.output_grad(piece.weights, dtype) for piece in pieces] if work.backward else []

    def run(self) -> None:
        found = []
        with torch.set_grad_enabled(self.work.backward):
            for number, piece in enumerate(self.pieces):
                values = self.level.values_of(hidden_states(self.model, piece), piece)
                if self.work.backward:
                    values.backward(self.grads[number])
                found.append(values.detach())
        self.values = found[0] if len(found) == 1 else torch.cat(found)


class _SharedStep(_ModelStep):
    """Groups are found and the plan is built within the measured time, as they are for every micro-batch."""

    def __init__(self, level, batch, work, whole_gradients):
        super().__init__(level, batch, work, whole_gradients)
        self.model = level.shared
        dtype = next(level.stock.parameters()).dtype
        self.grad = level.output_grad(batch.weights, dtype) if work.backward else None

    def run(self) -> None:
        with torch.set_grad_enabled(self.work.backward):
            values = self._values()
        if self.work.backward:
            values.backward(self.grad)
        self.values = values.detach()

    def _values(self) -> Tensor:
        rows: Rows = self.batch.rows
        plan = build_plan(rows, find_prompt_groups(rows))
        labels = rows.tokens[plan.label_index]
        mode = self.level.logits_optimization
        if mode is None:
            call, name = SharedHidden(plan, labels), "values"
        else:
            call, name = SharedPrompt(plan, labels, logits_optimization=mode), "log_probs"
        packed = {"input_ids": plan.pack(rows.tokens)[None], "position_ids": plan.pack(rows.position_ids)[None]}
        return self.model(**packed, use_cache=False, zorro=call)[name]
