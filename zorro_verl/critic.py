"""`DeduplicatedCritic`: veRL's FSDP critic with each prompt of a micro-batch sent through the value model once."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict
from verl.models.transformers.monkey_patch import apply_monkey_patch
from verl.utils.fsdp_utils import get_init_weight_context_manager
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithValueHead

from zorro_verl.engine import SharedEngine
from zorro_verl.grouping import Rows
from zorro_verl.heads import SharedValues
from zorro_verl.metrics import ShareCounts
from zorro_verl.packing import Plan
from zorro_verl.sequence_parallel import Slices
from zorro_verl.value_models import (
    as_value_model,
    check_adapters,
    check_value_model,
    critic_keys,
    in_critic_keys,
    load_value_model,
)


class ValueEngine(FSDPEngineWithValueHead):
    """veRL's critic with the attention of its config: veRL's own loader asks for flash_attention_2 in any case."""

    def _build_module(self) -> torch.nn.Module:
        config, engine_config = self.model_config.hf_config, self.engine_config
        dtype = engine_config.model_dtype or ("bf16" if engine_config.forward_only else "fp32")
        as_value_model(config)
        # As in verl, rank 0 alone reads the weights, and FSDP hands them on. A head for values is tied to nothing.
        init_context = get_init_weight_context_manager(use_meta_tensor=True, mesh=self.device_mesh)
        with init_context():
            module = load_value_model(
                self.model_config.local_path,
                config,
                PrecisionType.to_dtype(dtype),
                self.model_config.trust_remote_code,
            )
        # Of a vision tower, verl lets it run where a rank has no images, too, since FSDP's ranks wait for each other.
        apply_monkey_patch(
            model=module,
            use_remove_padding=self.use_remove_padding,
            ulysses_sp_size=self.ulysses_sequence_parallel_size,
            use_fused_kernels=False,
        )
        if self.model_config.enable_gradient_checkpointing:
            module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return module


class DeduplicatedCritic(SharedEngine, ValueEngine):
    """What verl's registry returns for ``critic.strategy=zorro``, see `zorro_verl.engine`.

    Values stand where verl looks for them, at the positions that response tokens come from; they are zero elsewhere,
    where verl's engine has values of prompt tokens that nobody reads.

    Raises:
        ValueError: a model, option or combination that can't be shared exactly, with the config key to change.
    """

    model_key = "critic.model"
    engine_key = "critic.fsdp"
    head_features = 1

    def __init__(self, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any):
        with critic_keys():
            model_config, engine_config = self._start(model_config, engine_config)
        super().__init__(model_config, engine_config, optimizer_config, checkpoint_config)

    def _check(self, model_config: Any, engine_config: Any) -> None:
        super()._check(model_config, engine_config)
        check_adapters(model_config)
        check_value_model(model_config.hf_config)

    def _micro_batches(self, data: TensorDict) -> tuple[list[TensorDict], list[list[int]], ShareCounts]:
        with critic_keys():
            return super()._micro_batches(data)

    def _token_budget(self, data: TensorDict, longest_row: int) -> tuple[int, str]:
        budget, key = super()._token_budget(data, longest_row)
        return budget, in_critic_keys(key)

    def request(self, micro_batch: TensorDict, rows: Rows, plan: Plan, tokens: Slices) -> SharedValues:
        return SharedValues(plan, tokens)


def register(registry: type[EngineRegistry]) -> None:
    """Make `DeduplicatedCritic` what verl finds for ``critic.strategy=zorro``. Once; verl refuses a key twice."""
    if "zorro" not in registry._engines.get("value_model", {}):
        registry.register("value_model", "zorro", ["cuda", "npu", "cpu"])(DeduplicatedCritic)


register(EngineRegistry)
