"""The two calls that veRL's FSDP actor has always had, on a ``DataProto`` in this process."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.utils.metric import reduce_metrics
from verl.utils.py_functional import append_to_dict, rename_dict
from verl.workers.config import FSDPActorConfig, FSDPOptimizerConfig, OptimizerConfig

from zorro_verl.grouping import Rows
from zorro_verl.metrics import ShareCounts, skipped_step_metric
from zorro_verl.micro_batches import MicroBatches, token_budget
from zorro_verl.standalone import Standalone
from zorro_verl.verl_rows import rows_from_verl

logger = logging.getLogger(__name__)


class DataProtoActor(Standalone):
    """`Standalone` with ``compute_log_prob`` and ``update_policy``.

    Both read ``temperature`` (1 when absent), ``use_dynamic_bsz``, ``max_token_len`` and ``micro_batch_size`` from the
    batch's ``meta_info``, and what is not there from ``actor_config``: ``use_dynamic_bsz``,
    ``ppo_max_token_len_per_gpu`` and ``ppo_micro_batch_size_per_gpu``. A budget or a size that is there alone needs no
    ``use_dynamic_bsz``. The budget of a micro-batch counts packed tokens, and a size of m rows grants m times the
    longest row; a group is cut only where it alone needs more.

    Attributes:
        optimizer: set it, or the first `update_policy` builds verl's from ``actor_config.optim``.
        lr_scheduler: stepped once per `update_policy`, as verl does; built with the optimizer, None beside a given one.
    """

    optimizer: torch.optim.Optimizer | None
    lr_scheduler: torch.optim.lr_scheduler.LRScheduler | None

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
        groups = MicroBatches(read.rows)
        micro_batches = groups.split(*self._budget(read.settings, read.rows))
        dtype = torch.float64 if self.module.dtype == torch.float64 else torch.float32
        names = {"log_probs": "log_probs"} | ({"entropy": "entropys"} if calculate_entropy else {})
        result = {name: torch.zeros(read.valid.shape, dtype=dtype, device=read.valid.device) for name in names.values()}
        with torch.no_grad(), _mode(self.module, training=False):
            for rows in map(torch.tensor, micro_batches):
                inputs, _ = self.prepare_model_inputs(tu.index_select_tensor_dict(batch, rows))
                output = self.module(**inputs, use_cache=False)
                for name, values in output.items():
                    read.unpack(values, rows, into=result[names[name]])
        self._stats = groups.counts(micro_batches).summary()
        return {name: values.to(read.tensors["responses"].device) for name, values in result.items()}

    def update_policy(self, data: Any) -> dict[str, float]:
        """``ppo_epochs`` over the mini-batches of ``data``, an optimizer step for each, in train mode.

        Mini-batches have ``ppo_mini_batch_size`` rows (all of a smaller batch) and, shuffled or not, the rows that
        verl's worker takes; gradients that were there before are dropped. The loss is normalised over a mini-batch, so
        that micro-batches make no difference. A step whose grad norm is not finite, or that has no token in its loss,
        is skipped with a warning.

        Args:
            data: a verl ``DataProto`` (or a mapping of tensors) as `compute_policy_loss_and_backward` takes it.

        Returns:
            What verl's trainer logs for its worker, means over the mini-batches: ``actor/pg_loss``, ``actor/loss``,
            ``actor/grad_norm``, ``actor/lr``, ...; and the ``zorro/`` counts over the whole call.

        Raises:
            ValueError: as `compute_policy_loss_and_backward`, or rows that don't divide into mini-batches.
        """
        read, config = self._read(data, self._loss_inputs()), self.actor_config
        num_rows, epochs = read.rows.num_rows, config.ppo_epochs
        size = min(config.ppo_mini_batch_size, num_rows)
        if size < 1 or num_rows % size:
            raise ValueError(
                f"ppo_mini_batch_size: expected a divisor of the batch's {num_rows} rows, got "
                f"{config.ppo_mini_batch_size}; set it in actor_config, or drop rows"
            )
        if epochs < 1:
            raise ValueError(f"ppo_epochs: expected at least 1, got {epochs}; set it in actor_config")
        batch = read.jagged(read.settings.get("temperature", 1.0), self._needs_entropy(), loss=True)
        if self.optimizer is None:
            self.optimizer_config = _fsdp_options(config.optim)
            self.rank = None  # of no process group; verl's builder prints on rank 0
            self.optimizer = self._build_optimizer(self.module)
            self.lr_scheduler = self._build_lr_scheduler(self.optimizer)
        loss_config, metrics = self._loss_config(read.width), {}
        shuffle = {"shuffle": config.shuffle}
        with torch.enable_grad(), _mode(self.module, training=True):
            for mini_batch in tu.make_iterator(batch, size, epochs, config.data_loader_seed, shuffle):
                append_to_dict(metrics, self._update(mini_batch, read.settings, loss_config))
        self.optimizer.zero_grad()
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()
        counts = ShareCounts.pop_from(metrics)
        self._stats = counts.summary(epochs)
        metrics["lr"] = [self.optimizer.param_groups[0]["lr"]]
        logged = reduce_metrics(rename_dict(metrics, "actor/"))
        return {name: float(value) for name, value in logged.items()} | counts.step_metrics(epochs)

    def _update(self, mini_batch: TensorDict, settings: Mapping[str, Any], config: FSDPActorConfig) -> dict[str, Any]:
        """One optimizer step; its metrics by the names of verl's worker, and its counts as lists."""
        rows = rows_from_verl(mini_batch)
        groups = MicroBatches(rows)
        micro_batches = groups.split(*self._budget(settings, rows))
        self.optimizer.zero_grad()
        loss, metrics = self._accumulate(mini_batch, micro_batches, config)
        grad_norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), _max_norm(config)).item()
        empty = not bool(mini_batch["response_mask"].values().any())
        skipped = empty or not torch.isfinite(torch.tensor(grad_norm)).item()
        if skipped:
            reason = "no token of the mini-batch is in the loss" if empty else f"grad_norm is {grad_norm}"
            logger.warning("%s: this optimizer step was skipped", reason)
        else:
            self.optimizer.step()
        metrics |= {"loss": loss, "grad_norm": grad_norm}
        return metrics | groups.counts(micro_batches).to_metrics() | skipped_step_metric(skipped)

    def _budget(self, settings: Mapping[str, Any], rows: Rows) -> tuple[int, str]:
        config = self.actor_config
        size = config.ppo_micro_batch_size_per_gpu or config.ppo_micro_batch_size
        given = {"max_token_len", "micro_batch_size"} & settings.keys()
        dynamic = given == {"max_token_len"} if len(given) == 1 else config.use_dynamic_bsz
        budget, key = token_budget(
            settings.get("use_dynamic_bsz", dynamic),
            settings.get("max_token_len", config.ppo_max_token_len_per_gpu),
            settings.get("micro_batch_size", size),
            int(rows.lens.max()),
        )
        return budget, f"{key}, or max_token_len and micro_batch_size in meta_info"


def _fsdp_options(optim: OptimizerConfig) -> FSDPOptimizerConfig:
    """verl's dataclass holds the base class unless told otherwise, and its builder reads fields of the derived one."""
    if isinstance(optim, FSDPOptimizerConfig):
        return optim
    return FSDPOptimizerConfig(**{field.name: getattr(optim, field.name) for field in fields(OptimizerConfig)})


def _max_norm(config: FSDPActorConfig) -> float:
    """verl's engine clips at ``optim.clip_grad``, its older actor did at ``grad_clip``: whichever differs from 1."""
    asked = {norm for norm in (config.optim.clip_grad, config.get("grad_clip", 1.0)) if norm != 1.0}
    if len(asked) > 1:
        raise ValueError(
            f"grad_clip: expected the value of optim.clip_grad, {config.optim.clip_grad}, got {config.grad_clip}; "
            "set one of the two in actor_config"
        )
    return asked.pop() if asked else 1.0


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
