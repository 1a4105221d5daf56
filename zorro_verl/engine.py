"""verl's FSDP engine over shared prompts: what actor and critic have in common.

It replaces how a batch is cut into micro-batches, what goes into the model and how the model's output is read. Loss,
optimizer, sharding, checkpoints and weight export stay verl's.
"""

from __future__ import annotations

import copy
import functools
import logging
from contextlib import nullcontext
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.distributed import ProcessGroup
from verl.utils import tensordict_utils as tu
from verl.utils.activation_offload import enable_activation_offloading
from verl.utils.device import get_device_name

from zorro_verl.actor_options import check_offload, check_options, engine_options
from zorro_verl.budget_warning import BudgetWarning
from zorro_verl.distillation import check_teacher, teach
from zorro_verl.families import check_supported, check_training, head_counts
from zorro_verl.flops import ModelWork
from zorro_verl.grouping import Rows
from zorro_verl.heads import SharedPrompt, SharedValues
from zorro_verl.media import Media, Vision
from zorro_verl.metrics import ShareCounts, skipped_step_metric
from zorro_verl.micro_batches import MicroBatches, check_count, token_budget
from zorro_verl.models import install
from zorro_verl.options import CONFIG_KEY
from zorro_verl.packing import Plan, build_plan
from zorro_verl.sequence_parallel import Slices, check_heads
from zorro_verl.summary import what_is_shared
from zorro_verl.verl_rows import GROUPS, check_batch, groups_from_verl, rows_from_verl

logger = logging.getLogger(__name__)


class SharedEngine:
    """The part of an engine that shares prompts, in front of verl's ``FSDPEngineWithLMHead``.

    Attributes:
        head_features: outputs of the head for one token; None for the vocabulary.
        model_key, engine_key: where a run's config holds the model and the engine's options, for errors.
        sequence_parallel_group: the ranks that a packed row is sliced over; None for one.
    """

    model_key = "actor_rollout_ref.model"
    engine_key = "actor_rollout_ref.actor.fsdp_config"
    head_features: int | None = None
    sequence_parallel_group: ProcessGroup | None = None
    pad_to_length: bool = False

    def _start(self, model_config: Any, engine_config: Any) -> tuple[Any, Any]:
        """Refuse what would be wrong or ignored later, and give copies of verl's configs that its engine builds from.

        Raises:
            ValueError: a model, option or combination that can't be shared exactly, with the config key to change.
        """
        self.options = engine_options(engine_config, model_config)
        self._warn_of_budget = BudgetWarning()
        self._check(model_config, engine_config)
        if not model_config.use_remove_padding and torch.distributed.get_rank() == 0:
            logger.info("model.use_remove_padding=False makes no difference to strategy=zorro: rows are always packed")
        engine_config, model_config = copy.copy(engine_config), copy.copy(model_config)
        changes = {
            # verl refuses to slice padded rows; here none are.
            "use_remove_padding": model_config.use_remove_padding or engine_config.ulysses_sequence_parallel_size > 1,
            # verl would replace the forward of the model's class; `logits_optimization` has the same in it.
            "use_fused_kernels": False,
            "hf_config": copy.deepcopy(model_config.hf_config),
        }
        for name, value in changes.items():
            object.__setattr__(model_config, name, value)
        object.__setattr__(engine_config, "strategy", self.options.base_strategy)
        # The seam replaces attention in a moment; until then the model has to build without flash-attn.
        model_config.hf_config._attn_implementation = "sdpa"
        return model_config, engine_config

    def _check(self, model_config: Any, engine_config: Any) -> None:
        check_supported(model_config.hf_config)
        check_training(model_config.hf_config, training=not engine_config.forward_only)
        # A reference is an actor that only scores, made from a section of its own.
        place = self.engine_key.replace(".actor.", ".ref.") if engine_config.forward_only else self.engine_key
        check_options(engine_config, place)
        check_options(model_config, self.model_key)
        check_offload(model_config, model_config.hf_config, self.model_key)
        ranks, world = engine_config.ulysses_sequence_parallel_size, torch.distributed.get_world_size()
        if engine_config.pad_to_length:
            check_count(f"{place}.pad_to_length_bucket", engine_config.pad_to_length_bucket)
        check_heads(f"{place}.ulysses_sequence_parallel_size", ranks, head_counts(model_config.hf_config))
        if world % ranks:
            raise ValueError(
                f"{place}.ulysses_sequence_parallel_size: expected a divisor of {world} ranks, got {ranks}"
            )
        if self.options.base_strategy == "fsdp" and get_device_name() == "cpu":
            raise ValueError(
                f"{CONFIG_KEY}.base_strategy: expected fsdp2 on a CPU, got fsdp (FSDP1 needs an accelerator)"
            )

    def _init_device_mesh(self) -> None:
        super()._init_device_mesh()
        # Under this name verl's patches of attention and of vision-language models find it, and slice once more.
        self.sequence_parallel_group, self.ulysses_parallel_group = self.ulysses_parallel_group, None

    def _build_module(self) -> torch.nn.Module:
        module = super()._build_module()
        attention = self.options.attn_implementation
        if attention == "auto":
            # verl's own default of flash_attention_2 is no request: only what the user wrote counts.
            attention = self.model_config.override_config.get("attn_implementation", "auto")
        options = self.options
        install(module, attention, options.use_split_attention, get_device_name(), options.linear_attention)
        self._shared = what_is_shared(module)
        self._dense, self._axes = module.forward.kernels is None, module.forward.axes
        work = ModelWork.of(module.config, self.head_features)
        self._count_work = functools.partial(work.of_groups, share_attention=options.use_split_attention)
        return module

    def _build_fsdp_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """As the parent's, but activations are offloaded in the text backbone only.

        verl counts the calls of every sharded module, and one that is left out upsets its count: a vision tower without
        images, or the head with ``logits_optimization=memory``, which runs by another forward.
        """
        asked = self.model_config.enable_activation_offload
        object.__setattr__(self.model_config, "enable_activation_offload", False)
        module = super()._build_fsdp_module(module)
        if asked:
            checkpointing = self.model_config.enable_gradient_checkpointing
            enable_activation_offloading(module.get_decoder(), self.engine_config.strategy, checkpointing)
        return module

    def forward_backward_batch(self, data: TensorDict, loss_function: Any, forward_only: bool = False) -> dict:
        """As the parent's, over micro-batches that keep groups whole and are budgeted in packed tokens.

        Raises:
            ValueError: bad data on any data-parallel rank, raised on all of them so that none waits for another.
        """
        # Imported here: once verl's engines are executed the plug-in imports the actor, and with it this module.
        from verl.workers.engine.utils import postprocess_batch_func

        data = data.copy()  # shallow: the settings below are this call's, not the caller's
        micro_batches, indices, counts = self._micro_batches(data)
        group = self.get_data_parallel_group()
        num_tokens = data["loss_mask"].sum().to(get_device_name())
        torch.distributed.all_reduce(num_tokens, group=group)
        settings = {
            "sp_size": self.ulysses_sequence_parallel_size,
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
            trace = torch.profiler.record_function(f"micro_batch{i}")
            with torch.set_grad_enabled(not forward_only), sync, trace:
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
            module = self.module
            rows, media = rows_from_verl(data, Vision.of(module.config))
            check_batch(data, rows, module.get_input_embeddings().num_embeddings, self._axes)
            check_teacher(data, self.options.logits_optimization, self.ulysses_sequence_parallel_size)
            media.check(rows)
            if self.get_data_parallel_size() > 1 and len(media.kinds) > 1:
                raise ValueError(
                    "multi_modal_inputs: expected images or videos on a rank, got both: the vision tower would run "
                    "twice there and once elsewhere, and ranks would wait for each other; train on one kind at a time"
                )
            if isinstance(data["temperature"], Tensor) and data["temperature"].dim() > 0:
                # A field of the rows: what is none goes whole into every micro-batch.
                data.set("temperature", data["temperature"].expand(rows.num_rows))
            batch = MicroBatches(rows, media)
            budget = self._token_budget(data, batch.longest_row)
            indices = batch.split(*budget)
            if self._dense:
                batch.check_dense(indices, self.options.use_split_attention)
        except Exception as error:
            failure = error  # raised below, on every rank: the others would wait for this one in a collective
        most = self._agree(failure, len(indices), len(data))
        if len(indices) < most:
            indices = batch.split(*budget, min_count=most)
        over_budget = self._warn_of_budget.check(batch, indices, *budget)
        data.set(GROUPS, torch.tensor(batch.group_index))
        micro_batches = [tu.index_select_tensor_dict(data, torch.tensor(part)) for part in indices]
        counts = batch.counts(indices, self._count_work)
        counts.prompt_lens = dict(zip(batch.fingerprints, batch.prompt_lens, strict=True))
        counts.over_budget, counts.shared = int(over_budget), self._shared
        return micro_batches, indices, counts

    def _token_budget(self, data: TensorDict, longest_row: int) -> tuple[int, str]:
        """Packed tokens of a micro-batch, over all ranks that it is sliced over, and the config key that sets them."""
        setting = functools.partial(tu.get_non_tensor_data, data, default=None)
        use_dynamic_bsz = tu.get_non_tensor_data(data, "use_dynamic_bsz", default=True)
        sizes = setting("max_token_len_per_gpu"), setting("micro_batch_size_per_gpu")
        budget, key = token_budget(use_dynamic_bsz, *sizes, longest_row)
        ranks = self.ulysses_sequence_parallel_size
        if not use_dynamic_bsz or ranks == 1:
            return budget, key
        return budget * ranks, f"{key} x {ranks} ranks of a sequence"

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
        """verl's micro-batch of jagged rows -> the packed model inputs and the plan to read the output with.

        Where it is cut from a call's rows it brings their groups; else they are found here.
        """
        rows, media = rows_from_verl(micro_batch, Vision.of(self.module.config))
        plan = build_plan(rows, groups_from_verl(micro_batch))
        multiple = self.pad_to_length_bucket if self.pad_to_length else 1
        tokens = Slices(plan.num_tokens, self.sequence_parallel_group, multiple)
        request = self.request(micro_batch, rows, plan, tokens)
        return packed_inputs(rows, media, plan) | {"zorro": request}, {"plan": plan}

    def request(self, micro_batch: TensorDict, rows: Rows, plan: Plan, tokens: Slices) -> SharedPrompt | SharedValues:
        """What the model is asked for."""
        raise NotImplementedError

    def prepare_model_outputs(
        self,
        output: dict[str, Tensor],
        output_args: dict[str, Any],
        micro_batch: TensorDict,
        logits_processor_func: Any,
    ) -> dict[str, Tensor]:
        """``(R,)`` values of response tokens -> jagged rows in verl's layout: at the position that predicts them.

        Of the same dtype; zero at prompt positions and at each row's last position.
        """
        plan, offsets = output_args["plan"], micro_batch["input_ids"].offsets()
        if "logits" in output:
            output = output | teach(output.pop("logits"), plan, micro_batch, logits_processor_func)
        jagged = {}
        for name, values in output.items():
            full = values.new_zeros(plan.num_row_tokens).index_copy(0, plan.predictor_slot, values)
            jagged[name] = torch.nested.nested_tensor_from_jagged(full, offsets)
        return jagged

    def train_batch(self, data: TensorDict, loss_function: Any) -> dict:
        output = super().train_batch(data, loss_function)
        if not self.is_mp_src_rank_with_outputs():  # of the ranks of one sequence the first speaks
            return output
        grad_norm = output["metrics"]["grad_norm"]
        skipped = not torch.isfinite(torch.tensor(grad_norm)).item()
        reporter = self.get_data_parallel_rank() == 0
        if skipped and reporter:
            logger.warning("grad_norm is %s: this optimizer step was skipped, as verl does", grad_norm)
        output["metrics"].update(skipped_step_metric(skipped and reporter))
        return output


def packed_inputs(rows: Rows, media: Media, plan: Plan) -> dict[str, Any]:
    """What the model is called with for ``rows``: each distinct prompt once, and rows with media whole."""
    inputs = {
        "input_ids": plan.pack(rows.tokens)[None],
        "position_ids": plan.pack(rows.position_ids).unsqueeze(-2),
    }
    return inputs | media.model_inputs(rows.tokens.device)
