"""The actor without veRL's trainer: one process, a plain Hugging Face model, no process group, no Ray."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor
from transformers import AutoConfig
from verl.utils import tensordict_utils as tu
from verl.utils.metric import reduce_metrics
from verl.utils.py_functional import append_to_dict
from verl.workers.config import FSDPActorConfig
from verl.workers.utils.losses import ppo_loss

from zorro_verl.actor_options import resolve_device, resolve_dtype, resolve_options
from zorro_verl.families import auto_class, check_supported
from zorro_verl.flops import ModelWork
from zorro_verl.log_probs import check_temperature
from zorro_verl.metrics import ShareCounts
from zorro_verl.micro_batches import check_count
from zorro_verl.models import install
from zorro_verl.options import ZorroOptions
from zorro_verl.padded_batch import LOSS_INPUTS, PaddedBatch

# What an engine does inside verl, and which this class does not do outside of it.
ENGINE_METHODS = (
    "initialize",
    "train_batch",
    "infer_batch",
    "forward_backward_batch",
    "train_mode",
    "eval_mode",
    "optimizer_step",
    "optimizer_zero_grad",
    "lr_scheduler_step",
    "save_checkpoint",
    "load_checkpoint",
    "to",
    "get_per_tensor_param",
    "get_per_tensor_param_shard",
    "get_per_tensor_param_delta_shard",
    "prime_delta_snapshots",
    "disable_adapter",
    "forward_step",
    "get_data_parallel_rank",
    "get_data_parallel_size",
    "get_data_parallel_group",
    "get_context_parallel_group",
    "get_model_parallel_group",
    "is_mp_src_rank_with_outputs",
)


class ActorOutput(NamedTuple):
    """Log-probs and entropy in nats of all valid response tokens, packed 1-D in the batch's own order.

    float32, or float64 for a float64 model. ``entropy`` is None when it was not asked for.
    """

    logprobs: Tensor
    entropy: Tensor | None


class Standalone:
    """The part of `DeduplicatedActor` that works on a batch of padded tensors in this process."""

    def build(
        self,
        model_name_or_path: str | os.PathLike,
        device: str | torch.device,
        logits_optimization: str,
        use_split_attention: bool,
        attn_implementation: str,
        dtype: torch.dtype | str | None,
        actor_config: FSDPActorConfig | None,
    ) -> None:
        """Load the model and put the seam on it.

        Args:
            model_name_or_path: a hub name or a folder; no tokenizer is needed.
            device: where the model runs.
            logits_optimization, use_split_attention, attn_implementation: see `ZorroOptions`.
            dtype: float64, float32, bfloat16 or float16, as a torch dtype or its name; the checkpoint's own when None.
            actor_config: options of verl's policy loss, and sizes, epochs and optimizer of ``update_policy``; verl's
                defaults when None, with micro-batches under its token budget. Copied. What configures verl's worker
                (FSDP, checkpoints, the profiler) is not read.

        Raises:
            ValueError: a model, device, dtype or option that can't be, or an option of ``actor_config`` that would be
                ignored.
        """
        if not isinstance(model_name_or_path, str | os.PathLike):
            raise ValueError(
                f"model_name_or_path: expected a name or a folder, got {type(model_name_or_path).__name__}; patch a "
                "model that is loaded already with Qwen3ModelOncePatcher"
            )
        if not isinstance(actor_config, FSDPActorConfig | None):
            raise ValueError(f"actor_config: expected a verl FSDPActorConfig, got {type(actor_config).__name__}")
        self.actor_config = copy.deepcopy(actor_config) if actor_config is not None else _default_actor_config()
        options = ZorroOptions(
            attn_implementation=attn_implementation,
            use_split_attention=use_split_attention,
            logits_optimization=logits_optimization,
        )
        self.options = resolve_options(options, self.actor_config)
        device, dtype = resolve_device(device), resolve_dtype(dtype)
        config = AutoConfig.from_pretrained(model_name_or_path)
        check_supported(config)
        model = auto_class(config).from_pretrained(model_name_or_path, dtype=dtype, attn_implementation="sdpa")
        self.module = model.to(device)
        linear_attention = self.options.linear_attention
        install(self.module, attn_implementation, use_split_attention, linear_attention=linear_attention)
        self._dense, self._axes = self.module.forward.kernels is None, self.module.forward.axes
        work = ModelWork.of(config)
        self._count_work = partial(work.of_groups, share_attention=use_split_attention)
        self.optimizer = self.lr_scheduler = None
        self._stats = ShareCounts().summary()
        for name in ENGINE_METHODS:
            setattr(self, name, partial(_refuse, name))

    @property
    def model(self) -> torch.nn.Module:
        """The model itself; stand-alone a plain Hugging Face module with ordinary gradients."""
        return self.module

    @property
    def stats(self) -> Mapping[str, Any]:
        """The last call's tokens_total, tokens_packed, token_ratio, groups, groups_split and fallback; read-only."""
        fallback = MappingProxyType(dict(self._stats["fallback"]))
        return MappingProxyType({**self._stats, "fallback": fallback})

    def forward(
        self,
        batch: Mapping[str, Tensor],
        temperature: float | Tensor = 1.0,
        calculate_entropy: bool = False,
    ) -> ActorOutput:
        """Log-probs (and entropy) of every valid response token.

        Args:
            batch: a mapping of tensors, a TensorDict or a verl ``DataProto``: ``input_ids`` ``(B, S)`` int64,
                ``attention_mask`` and ``position_ids`` ``(B, S)``, ``responses`` ``(B, R)``. Rows come in any order;
                padding may lie anywhere. A model with a vision tower also takes ``position_ids`` ``(B, A, S)``, and
                ``multi_modal_inputs``, for each row a dict (``pixel_values``, ``image_grid_thw``, ...) or None.
            temperature: one float, or ``(B,)``; divides the logits. One that stands in the batch is not read here.
            calculate_entropy: whether to compute the entropy.

        Raises:
            ValueError: a missing key, one that holds no tensor, a wrong shape or dtype, ``responses`` that are not the
                end of ``input_ids``, or a row without a prompt.
        """
        read = self._read(batch)
        temperature = check_temperature(temperature, read.rows.num_rows)
        if isinstance(temperature, Tensor):
            temperature = temperature.expand(read.rows.num_rows)
        inputs, _ = self.pack(read, temperature, calculate_entropy)
        output = self.module(**inputs, use_cache=False)
        self._count_whole(read)
        return ActorOutput(output["log_probs"], output.get("entropy"))

    def compute_policy_loss_and_backward(
        self, batch: Mapping[str, Tensor], temperature: float | Tensor = 1.0, gradient_accumulation: int = 1
    ) -> dict[str, float]:
        """One forward, verl's policy loss, and the backward of ``loss / gradient_accumulation``.

        Args:
            batch: as for `forward`, with ``old_log_probs`` and ``advantages`` ``(B, R)``, and optionally
                ``response_mask`` (which response tokens enter the loss; what stands elsewhere is not read),
                ``rollout_is_weights``, and ``ref_log_prob``, which ``use_kl_loss`` needs and nothing else reads.
            temperature: one float, or ``(B,)``; one that stands in the batch is not read here.
            gradient_accumulation: how many calls one optimizer step is made of. ``.grad`` is added to.

        Returns:
            verl's loss metrics as floats; ``actor/policy_loss`` is the undivided loss.

        Raises:
            ValueError: as `forward`; gradients that are switched off; or a model whose parameters are all frozen.
        """
        check_count("gradient_accumulation", gradient_accumulation)
        if not torch.is_grad_enabled():
            raise ValueError(
                "compute_policy_loss_and_backward: expected gradients to be on, got a call under torch.no_grad() or "
                "torch.inference_mode(); use forward or compute_log_prob there"
            )
        self._check_trainable()
        read = self._read(batch, self._loss_inputs())
        data = read.jagged(temperature, self._needs_entropy(), self._loss_inputs())
        whole = [range(read.rows.num_rows)]
        loss, metrics = self._accumulate(data, whole, self._loss_config(read.width), gradient_accumulation)
        self._count_whole(read)
        return {"actor/policy_loss": loss} | metrics

    def _accumulate(
        self, data: TensorDict, micro_batches: Sequence[Sequence[int]], config: FSDPActorConfig, divisor: int = 1
    ) -> tuple[float, dict[str, float]]:
        """Forward, verl's loss over all of ``data``, and the backward of its share, of each micro-batch.

        Returns the loss, undivided, and verl's metrics of it.
        """
        settings = {
            "dp_size": 1,
            # A batch without a token in the loss has loss 0: any divisor but 0 says so.
            "batch_num_tokens": max(1, int(data["response_mask"].values().sum())),
            "global_batch_size": len(data),
        }
        total, metrics = 0.0, {}
        for rows in micro_batches:
            part = tu.index_select_tensor_dict(data, torch.tensor(rows))
            tu.assign_non_tensor(part, **settings)
            inputs, args = self.prepare_model_inputs(part)
            output = self.prepare_model_outputs(self.module(**inputs, use_cache=False), args, part, None)
            loss, values = ppo_loss(config, output, part)
            (loss / divisor).backward()
            total += loss.detach()
            append_to_dict(metrics, values)
        return float(total), {name: float(value) for name, value in reduce_metrics(metrics).items()}

    def _read(self, batch: Any, required: tuple[str, ...] = ()) -> PaddedBatch:
        return PaddedBatch(batch, self.module, self._axes, required)

    def _count_whole(self, read: PaddedBatch) -> None:
        counts = read.groups.counts([range(read.rows.num_rows)], self._count_work)
        self._stats = counts.summary()

    def _check_trainable(self) -> None:
        if not any(p.requires_grad for p in self.module.parameters()):
            raise ValueError(
                "actor.model: expected parameters that require a gradient, got all of them frozen; use forward or "
                "compute_log_prob, or requires_grad_(True)"
            )

    def _loss_inputs(self) -> tuple[str, ...]:
        return LOSS_INPUTS + (("ref_log_prob",) if self.actor_config.use_kl_loss else ())

    def _needs_entropy(self) -> bool:
        return bool(self.actor_config.calculate_entropy or self.actor_config.entropy_coeff)

    def _loss_config(self, width: int) -> FSDPActorConfig:
        """A copy for verl's loss to write into; the padded width is what verl divides by when it is given no scale."""
        config = copy.copy(self.actor_config)
        object.__setattr__(config, "global_batch_info", {})
        if config.loss_scale_factor is None:
            object.__setattr__(config, "loss_scale_factor", width)
        return config


def _default_actor_config() -> FSDPActorConfig:
    # With neither budget nor size given, verl's own token budget keeps groups whole; a size of 1 would cut them.
    return FSDPActorConfig(strategy="fsdp2", rollout_n=1, use_dynamic_bsz=True)


def _refuse(name: str, *args: Any, **kwargs: Any) -> None:
    raise RuntimeError(
        f"DeduplicatedActor.{name} is part of verl's engine and needs verl's worker: run "
        "`python -m verl.trainer.main_ppo ... actor_rollout_ref.actor.strategy=zorro`. Stand-alone, use forward, "
        "compute_policy_loss_and_backward, compute_log_prob, update_policy and actor.model"
    )
