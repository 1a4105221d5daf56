"""`DeduplicatedActor`: veRL's FSDP actor with each prompt of a micro-batch sent through the model once.

As an engine it is what verl's registry returns for ``strategy=zorro``; it replaces how a batch is cut into
micro-batches, what goes into the model and how the model's output is read. Loss, optimizer, sharding, checkpoints and
weight export stay verl's. Built from a model name instead, it is the stand-alone harness of `zorro_verl.standalone`
and `zorro_verl.data_proto`.
"""

from __future__ import annotations

import copy
import functools
import logging
import os
from contextlib import nullcontext
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_name
from verl.workers.config import FSDPActorConfig
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.engine.utils import postprocess_batch_func

from zorro_verl.actor_options import check_options, with_chunking
from zorro_verl.data_proto import DataProtoActor
from zorro_verl.families import check_supported, check_training
from zorro_verl.grouping import Rows
from zorro_verl.media import Media, Vision
from zorro_verl.metrics import ShareCounts, skipped_step_metric
from zorro_verl.micro_batches import MicroBatches, token_budget
from zorro_verl.models import SharedPrompt, install, position_axes
from zorro_verl.options import CONFIG_KEY, ZorroOptions
from zorro_verl.packing import Plan, build_plan
from zorro_verl.verl_rows import check_batch, rows_from_verl

logger = logging.getLogger(__name__)


class DeduplicatedActor(DataProtoActor, FSDPEngineWithLMHead):
    """veRL's FSDP engine with shared prompts; or, given ``model_name_or_path``, one process without veRL's trainer.

    As an engine (verl builds it): ``DeduplicatedActor(model_config, engine_config, optimizer_config,
    checkpoint_config)``. The configs are copied, never changed.

    Stand-alone: ``DeduplicatedActor(model_name_or_path=..., device=..., ...)``, see `Standalone.build`; then it has
    ``forward`` and ``compute_policy_loss_and_backward``, and veRL's ``compute_log_prob`` and ``update_policy``.

    Raises:
        ValueError: a model, option or combination that can't be shared exactly, with the config key to change.
    """

    def __init__(
        self,
        model_config: Any = None,
        engine_config: Any = None,
        optimizer_config: Any = None,
        checkpoint_config: Any = None,
        *,
        model_name_or_path: str | os.PathLike | None = None,
        device: str | torch.device = "cuda",
        logits_optimization: str = "none",
        use_split_attention: bool = True,
        attn_implementation: str = "auto",
        dtype: torch.dtype | str | None = None,
        actor_config: FSDPActorConfig | None = None,
    ):
        if (model_config is None) == (model_name_or_path is None) or isinstance(model_config, str | torch.nn.Module):
            raise ValueError(
                "DeduplicatedActor: expected model_name_or_path=<a name or a folder>, or from verl its four configs, "
                f"got {type(model_config if model_name_or_path is None else model_name_or_path).__name__}"
            )
        if model_name_or_path is not None:
            self.build(
                model_name_or_path,
                device,
                logits_optimization,
                use_split_attention,
                attn_implementation,
                dtype,
                actor_config,
            )
            return
        self.options = with_chunking(getattr(engine_config, "zorro", None) or ZorroOptions(), engine_config)
        self._check(model_config, engine_config)
        if not model_config.use_remove_padding and torch.distributed.get_rank() == 0:
            logger.info("model.use_remove_padding=False makes no difference to strategy=zorro: rows are always packed")
        engine_config = copy.copy(engine_config)
        object.__setattr__(engine_config, "strategy", self.options.base_strategy)
        model_config = copy.copy(model_config)
        # The seam replaces attention in a moment; until then the model has to build without flash-attn.
        object.__setattr__(model_config, "hf_config", copy.deepcopy(model_config.hf_config))
        model_config.hf_config._attn_implementation = "sdpa"
        super().__init__(model_config, engine_config, optimizer_config, checkpoint_config)

    def _check(self, model_config: Any, engine_config: Any) -> None:
        """Refuse at start what would be wrong or ignored later."""
        check_supported(model_config.hf_config)
        check_training(model_config.hf_config, training=not engine_config.forward_only)
        check_options(engine_config, "actor_rollout_ref.actor.fsdp_config")
        check_options(model_config, "actor_rollout_ref.model")
        if self.options.base_strategy == "fsdp" and get_device_name() == "cpu":
            raise ValueError(
                f"{CONFIG_KEY}.base_strategy: expected fsdp2 on a CPU, got fsdp (FSDP1 needs an accelerator)"
            )

    def _build_module(self) -> torch.nn.Module:
        module = super()._build_module()
        attention = self.options.attn_implementation
        if attention == "auto":
            # verl's own default of flash_attention_2 is no request: only what the user wrote counts.
            attention = self.model_config.override_config.get("attn_implementation", "auto")
        options = self.options
        install(module, attention, options.use_split_attention, get_device_name(), options.linear_attention)
        self._dense = module.forward.kernels is None
        return module

    def forward_backward_batch(self, data: TensorDict, loss_function: Any, forward_only: bool = False) -> dict:
        """As the parent's, over micro-batches that keep groups whole and are budgeted in packed tokens.

        Raises:
            ValueError: bad data on any data-parallel rank, raised on all of them so that none waits for another.
        """
        data = data.copy()  # shallow: the settings below are this call's, not the caller's
        micro_batches, indices, counts = self._micro_batches(data)
        group = self.get_data_parallel_group()
        num_tokens = data["loss_mask"].sum().to(get_device_name())
        torch.distributed.all_reduce(num_tokens, group=group)
        settings = {
            "sp_size": 1,
            "dp_size": self.get_data_parallel_size(),
            "batch_num_tokens": num_tokens.item(),
            "use_dynamic_bsz": True,  # tells postprocess_batch_func to put rows back by indices
        }
        return_model_output = tu.get_non_tensor_data(data, "return_model_output", default=False)
        tu.assign_non_tensor(data, **settings)
        outputs = []
        for i, rows in enumerate(micro_batches):
            tu.assign_non_tensor(rows, **settings)
            last = i == len(micro_batches) - 1
            sync = nullcontext() if forward_only else self._gradient_sync_context(is_last_micro_batch=last)
            with torch.set_grad_enabled(not forward_only), sync:
                loss, output = self.forward_step(rows, loss_function=loss_function, forward_only=forward_only)
                if not forward_only:
                    (loss if self.scaler is None else self.scaler.scale(loss)).backward()
                    if not return_model_output:
                        output.pop("model_output")  # full-length rows of the whole mini-batch would pile up
            outputs.append(output)
        result = postprocess_batch_func(outputs, indices, data)
        result["metrics"].update(counts.to_metrics())
        return result

    def _micro_batches(self, data: TensorDict) -> tuple[list[TensorDict], list[list[int]], ShareCounts]:
        """Cut ``data`` into micro-batches, as many on every data-parallel rank, and count what they share."""
        failure, indices = None, []
        try:
            _refuse_flags(data)
            module = self.module
            rows, media = rows_from_verl(data, Vision.of(module.config))
            check_batch(data, rows, module.get_input_embeddings().num_embeddings, position_axes(module))
            media.check(rows)
            if self.get_data_parallel_size() > 1 and len(media.kinds) > 1:
                raise ValueError(
                    "multi_modal_inputs: expected images or videos on a rank, got both: the vision tower would run "
                    "twice there and once elsewhere, and ranks would wait for each other; train on one kind at a time"
                )
            batch = MicroBatches(rows, media)
            budget = _token_budget(data, int(rows.lens.max()))
            indices = batch.split(*budget)
            if self._dense:
                batch.check_dense(indices, self.options.use_split_attention)
        except Exception as error:
            failure = error  # raised below, on every rank: the others would wait for this one in a collective
        most = self._agree(failure, len(indices), len(data))
        if len(indices) < most:
            indices = batch.split(*budget, min_count=most)
        micro_batches = [tu.index_select_tensor_dict(data, torch.tensor(part)) for part in indices]
        return micro_batches, indices, batch.counts(indices)

    def _agree(self, failure: Exception | None, count: int, num_rows: int) -> int:
        """The largest micro-batch count of any data-parallel rank; FSDP's collectives hang when ranks differ."""
        text = f"{failure} (data-parallel rank {self.get_data_parallel_rank()})" if failure else None
        words: list[Any] = [None] * self.get_data_parallel_size()
        torch.distributed.all_gather_object(words, (text, count, num_rows), group=self.get_data_parallel_group())
        failures = [word for word, _, _ in words if word is not None]
        if failures:
            raise ValueError("; ".join(failures)) from failure
        most, fewest_rows = max(count for _, count, _ in words), min(num_rows for _, _, num_rows in words)
        if most > fewest_rows:
            raise ValueError(
                f"batch: expected at least {most} rows on every data-parallel rank, the micro-batches that one of them "
                f"needs, got {fewest_rows} on another; verl hands every rank the same number of rows"
            )
        return most

    def prepare_model_inputs(self, micro_batch: TensorDict) -> tuple[dict[str, Any], dict[str, Any]]:
        """verl's micro-batch of jagged rows -> the packed model inputs and the plan to read the output with."""
        rows, media = rows_from_verl(micro_batch, Vision.of(self.module.config))
        calculate_entropy = tu.get_non_tensor_data(micro_batch, "calculate_entropy", default=False)
        inputs, plan = self.pack(rows, media, micro_batch["temperature"], calculate_entropy)
        return inputs, {"plan": plan}

    def prepare_model_outputs(
        self,
        output: dict[str, Tensor],
        output_args: dict[str, Any],
        micro_batch: TensorDict,
        logits_processor_func: Any,
    ) -> dict[str, Tensor]:
        """``(R,)`` values of response tokens -> jagged rows in verl's layout: at the position that predicts them.

        float32; zero at prompt positions and at each row's last position.
        """
        plan, offsets = output_args["plan"], micro_batch["input_ids"].offsets()
        jagged = {}
        for name, values in output.items():
            full = values.new_zeros(plan.num_row_tokens).index_copy(0, plan.predictor_slot, values)
            jagged[name] = torch.nested.nested_tensor_from_jagged(full, offsets)
        return jagged

    def pack(
        self, rows: Rows, media: Media, temperature: float | Tensor, calculate_entropy: bool
    ) -> tuple[dict[str, Any], Plan]:
        """What the model is called with for ``rows``: each distinct prompt once, and rows with media whole."""
        plan = build_plan(rows)
        if isinstance(temperature, Tensor) and temperature.dim() > 0:
            temperature = temperature.to(rows.tokens.device)[plan.label_row]
        shared = SharedPrompt(
            plan, rows.tokens[plan.label_index], temperature, calculate_entropy, self.options.logits_optimization
        )
        positions = plan.pack(rows.position_ids)
        inputs = {"input_ids": plan.pack(rows.tokens)[None], "position_ids": positions.unsqueeze(-2), "zorro": shared}
        return inputs | media.model_inputs(rows.tokens.device), plan

    def train_batch(self, data: TensorDict, loss_function: Any) -> dict:
        output = super().train_batch(data, loss_function)
        grad_norm = output["metrics"]["grad_norm"]
        skipped = not torch.isfinite(torch.tensor(grad_norm)).item()
        reporter = self.get_data_parallel_rank() == 0
        if skipped and reporter:
            logger.warning("grad_norm is %s: this optimizer step was skipped, as verl does", grad_norm)
        output["metrics"].update(skipped_step_metric(skipped and reporter))
        return output


def register(registry: type[EngineRegistry]) -> None:
    """Make `DeduplicatedActor` what verl finds for ``strategy=zorro``. Once; verl refuses a key twice."""
    if "zorro" not in registry._engines.get("language_model", {}):
        registry.register("language_model", "zorro", ["cuda", "npu", "cpu"])(DeduplicatedActor)


def _token_budget(data: TensorDict, longest_row: int) -> tuple[int, str]:
    setting = functools.partial(tu.get_non_tensor_data, data, default=None)
    use_dynamic_bsz = tu.get_non_tensor_data(data, "use_dynamic_bsz", default=True)
    return token_budget(
        use_dynamic_bsz, setting("max_token_len_per_gpu"), setting("micro_batch_size_per_gpu"), longest_row
    )


def _refuse_flags(data: TensorDict) -> None:
    """What a batch can ask for that needs logits of every position, which are never made here."""
    for flag, key in (
        ("distillation_use_topk", "distillation"),
        ("calculate_sum_pi_squared", "actor_rollout_ref.actor.calculate_sum_pi_squared"),
    ):
        if tu.get_non_tensor_data(data, flag, default=False):
            raise ValueError(f"{key}: expected False with strategy=zorro, got True; use strategy=fsdp2")


register(EngineRegistry)
