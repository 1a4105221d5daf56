"""The two calls that veRL's FSDP actor has always had, on a ``DataProto`` in this process."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from verl.utils import tensordict_utils as tu
from verl.utils.metric import reduce_metrics
from verl.utils.py_functional import append_to_dict, rename_dict
from verl.workers.config import FSDPActorConfig

from zorro_verl.actor_options import advance, check_optimizer, fsdp_options, max_norm
from zorro_verl.families import check_training
from zorro_verl.metrics import ShareCounts, skipped_step_metric
from zorro_verl.micro_batches import MicroBatches, check_count, token_budget
from zorro_verl.padded_batch import PaddedBatch
from zorro_verl.shuffling import GroupShuffle
from zorro_verl.standalone import Standalone

logger = logging.getLogger(__name__)


class MiniBatch(NamedTuple):
    """Rows of one optimizer step, and how they are cut; micro-batches count within these rows."""

    rows: Tensor
    groups: MicroBatches
    micro_batches: list[list[int]]


class DataProtoActor(Standalone):
    """`Standalone` with ``compute_log_prob`` and ``update_policy``.

    Both read ``temperature`` (1 when absent; one float, or ``(B,)``), ``use_dynamic_bsz``, ``max_token_len`` and
    ``micro_batch_size`` from the batch's ``meta_info``, or from the TensorDict or mapping itself where that is the
    batch, and what is not there from ``actor_config``: ``use_dynamic_bsz``,
    ``ppo_max_token_len_per_gpu`` and ``ppo_micro_batch_size_per_gpu``. A budget or a size that is there alone needs no
    ``use_dynamic_bsz``. The budget of a micro-batch counts packed tokens, and a size of m rows grants m times the
    longest row; a group is cut only where it alone needs more.

    Attributes:
        optimizer: set it, or the first `update_policy` builds verl's from ``actor_config.optim``, whose defaults are
            AdamW, lr 1e-3, weight decay 0.01 and a constant schedule.
        lr_scheduler: stepped once per `update_policy`, as verl does, when it is one of this optimizer; built with the
            optimizer, None beside a given one.
    """

    optimizer: Optimizer | None
    lr_scheduler: LRScheduler | None

    def compute_log_prob(self, data: Any, calculate_entropy: bool = False) -> dict[str, Tensor]:
        """Log-probs of all response tokens, in eval mode and without a graph.

        Args:
            data: a verl ``DataProto`` (or a mapping of tensors) as `forward` takes it.
            calculate_entropy: whether to compute the entropy.

        Returns:
            ``log_probs`` and, when asked for, ``entropys``: ``(B, R)`` in nats, zero at padding, where the batch lies.
            float32, or float64 for a float64 model.
        """
        read = self._read(data)
        batch = read.jagged(read.settings.get("temperature", 1.0), calculate_entropy)
        micro_batches = read.groups.split(*self._budget(read.settings, read.groups))
        dtype = torch.float64 if self.module.dtype == torch.float64 else torch.float32
        names = {"log_probs": "log_probs"} | ({"entropy": "entropys"} if calculate_entropy else {})
        result = {name: torch.zeros(read.valid.shape, dtype=dtype, device=read.valid.device) for name in names.values()}
        with torch.no_grad(), _mode(self.module, training=False):
            for rows in map(torch.tensor, micro_batches):
                inputs, _ = self.prepare_model_inputs(tu.index_select_tensor_dict(batch, rows))
                output = self.module(**inputs, use_cache=False)
                for name, values in output.items():
                    read.unpack(values, rows, into=result[names[name]])
        self._stats = read.groups.counts(micro_batches, self._count_work).summary()
        return {name: values.to(read.tensors["responses"].device) for name, values in result.items()}

    def update_policy(self, data: Any) -> dict[str, float]:
        """``ppo_epochs`` over the mini-batches of ``data``, an optimizer step for each, in train mode.

        A mini-batch is ``ppo_mini_batch_size`` consecutive rows of the batch, or with ``shuffle`` rows that are drawn
        by group; a smaller batch is one. Groups are whole in consecutive ones when rows are ordered by prompt and the
        size is a multiple of the rows per prompt. The size counts rows here, as in verl's worker; verl's trainer
        multiplies its own by ``rollout.n`` before the worker sees it.

        The loss is normalised over a mini-batch, so that micro-batches make no difference to the step, with verl's
        loss modes ``geo_mean``, ``clip_cov`` and ``kl_cov`` excepted, whose formulas work on one micro-batch at a
        time. The metrics ``ppo_kl`` and ``pg_clipfrac*`` are means over micro-batches.

        Gradients that were there before are dropped, and none are left. They are clipped over all of the model's
        parameters at ``optim.clip_grad`` or ``grad_clip``, 1 by default. A step whose grad norm is not finite is
        skipped with a warning, and so is one without a token in the loss, where verl's worker would take a step of
        zero gradients (with momentum and weight decay).

        Args:
            data: a verl ``DataProto`` (or a mapping of tensors) as `compute_policy_loss_and_backward` takes it.

        Returns:
            What verl's trainer logs for its worker, means over the mini-batches: ``actor/pg_loss``, ``actor/loss``,
            ``actor/grad_norm``, ``actor/lr``, ...; and the ``zorro/`` counts over the whole call.

        Raises:
            ValueError: as `compute_policy_loss_and_backward`; rows that don't divide into mini-batches; a size,
                budget, optimizer or scheduler that can't be. All of it before the first step.
        """
        if torch.is_inference_mode_enabled():
            raise ValueError("update_policy: expected to run outside of torch.inference_mode(), got a call under it")
        self._check_trainable()
        read, config = self._read(data, self._loss_inputs()), self.actor_config
        temperature = read.settings.get("temperature", 1.0)
        batch = read.jagged(temperature, self._needs_entropy(), self._loss_inputs())
        norm, mini_batches = max_norm(config), self._mini_batches(read)
        optimizer, lr_scheduler = self._optimizer()
        loss_config, metrics = self._loss_config(read.width), {}
        try:
            with torch.enable_grad(), _mode(self.module, training=True):
                for mini_batch in mini_batches:
                    self._drop_gradients(optimizer)
                    append_to_dict(metrics, self._step(batch, mini_batch, loss_config, optimizer, norm))
                    # Theirs from the first step on: a call that fails before it leaves no optimizer behind.
                    self.optimizer, self.lr_scheduler = optimizer, lr_scheduler
        finally:
            self._drop_gradients(optimizer)
        advance(lr_scheduler, optimizer)
        counts = ShareCounts.pop_from(metrics)
        self._stats = counts.summary(config.ppo_epochs)
        metrics["lr"] = [optimizer.param_groups[0]["lr"]]
        logged = reduce_metrics(rename_dict(metrics, "actor/"))
        return {name: float(value) for name, value in logged.items()} | counts.step_metrics(config.ppo_epochs)

    def _mini_batches(self, read: PaddedBatch) -> list[MiniBatch]:
        """Every step of an `update_policy`, cut and checked: what can't be done is known before the first of them."""
        config, in_config = self.actor_config, "; set it in actor_config"
        num_rows, epochs = read.rows.num_rows, check_count("ppo_epochs", config.ppo_epochs, in_config)
        size = min(check_count("ppo_mini_batch_size", config.ppo_mini_batch_size, in_config), num_rows)
        if num_rows % size:
            raise ValueError(
                f"ppo_mini_batch_size: expected a divisor of the batch's {num_rows} rows, got {size}; set it in "
                "actor_config, or drop rows"
            )
        if type(config.data_loader_seed) is not int:
            raise ValueError(f"data_loader_seed: expected an int, got {config.data_loader_seed!r}{in_config}")
        result: list[MiniBatch] = []
        check_training(self.module.config, training=True)
        index = TensorDict({"row": torch.arange(num_rows)}, batch_size=num_rows)
        drawn = {}
        if config.shuffle:
            groups = torch.tensor(read.groups.group_index)
            drawn["sampler"] = GroupShuffle(read.rows, num_rows // size, config.data_loader_seed, groups)
        for part in tu.make_iterator(index, size, epochs, config.data_loader_seed, drawn):
            own = read.groups.select(part["row"].tolist())
            micro_batches = own.split(*self._budget(read.settings, own))
            if self._dense:
                own.check_dense(micro_batches, self.options.use_split_attention)
            result.append(MiniBatch(part["row"], own, micro_batches))
        return result

    def _optimizer(self) -> tuple[Optimizer, LRScheduler | None]:
        """The user's, or verl's as ``actor_config.optim`` says."""
        optimizer, lr_scheduler = self.optimizer, self.lr_scheduler
        if optimizer is None:
            self.optimizer_config = fsdp_options(self.actor_config.optim)
            self.rank = None  # of no process group; verl's builder prints on rank 0
            optimizer = self._build_optimizer(self.module)
            lr_scheduler = self._build_lr_scheduler(optimizer)
        check_optimizer(optimizer, lr_scheduler, self.module)
        return optimizer, lr_scheduler

    def _drop_gradients(self, optimizer: Optimizer) -> None:
        """Those of parameters in no optimizer, too: they would count in the norm that is clipped."""
        optimizer.zero_grad()
        self.module.zero_grad()

    def _step(
        self, batch: TensorDict, step: MiniBatch, config: FSDPActorConfig, optimizer: Optimizer, norm: float
    ) -> dict[str, Any]:
        """One optimizer step; its metrics by the names of verl's worker, and its counts as lists."""
        mini_batch = tu.index_select_tensor_dict(batch, step.rows)
        loss, metrics = self._accumulate(mini_batch, step.micro_batches, config)
        grad_norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), norm).item()
        empty = not bool(mini_batch["response_mask"].values().any())
        skipped = empty or not math.isfinite(grad_norm)
        if skipped:
            reason = "no token of the mini-batch is in the loss" if empty else f"grad_norm is {grad_norm}"
            logger.warning("%s: this optimizer step was skipped", reason)
        else:
            optimizer.step()
        metrics |= {"loss": loss, "grad_norm": grad_norm}
        counts = step.groups.counts(step.micro_batches, self._count_work)
        return metrics | counts.to_metrics() | skipped_step_metric(skipped)

    def _budget(self, settings: Mapping[str, Any], groups: MicroBatches) -> tuple[int, str]:
        config = self.actor_config
        sizes = (config.ppo_micro_batch_size_per_gpu, config.ppo_micro_batch_size)
        size = next((size for size in sizes if size is not None), None)
        given = {"max_token_len", "micro_batch_size"} & settings.keys()
        dynamic = given == {"max_token_len"} if len(given) == 1 else config.use_dynamic_bsz
        budget, key = token_budget(
            settings.get("use_dynamic_bsz", dynamic),
            settings.get("max_token_len", config.ppo_max_token_len_per_gpu),
            settings.get("micro_batch_size", size),
            groups.longest_row,
        )
        return budget, f"{key}, or max_token_len and micro_batch_size in meta_info"


@contextmanager
def _mode(module: torch.nn.Module, training: bool) -> Iterator[None]:
    """Train or eval mode for the while; each submodule gets back what it had."""
    before = [(submodule, submodule.training) for submodule in module.modules()]
    module.train(training)
    try:
        yield
    finally:
        for submodule, was_training in before:
            submodule.training = was_training
