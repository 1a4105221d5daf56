"""`DeduplicatedActor`: veRL's FSDP actor with each prompt of a micro-batch sent through the model once.

As an engine it is what verl's registry returns for ``strategy=zorro``, see `zorro_verl.engine`. Built from a model
name instead, it is the stand-alone harness of `zorro_verl.standalone` and `zorro_verl.data_proto`.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPActorConfig
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from zorro_verl.data_proto import DataProtoActor
from zorro_verl.distillation import TaughtPrompt, is_taught
from zorro_verl.engine import SharedEngine, packed_inputs
from zorro_verl.grouping import Rows
from zorro_verl.heads import SharedPrompt
from zorro_verl.packing import Plan, build_plan
from zorro_verl.padded_batch import PaddedBatch
from zorro_verl.sequence_parallel import Slices


class DeduplicatedActor(DataProtoActor, SharedEngine, FSDPEngineWithLMHead):
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
        model_config, engine_config = self._start(model_config, engine_config)
        super().__init__(model_config, engine_config, optimizer_config, checkpoint_config)

    def request(self, micro_batch: TensorDict, rows: Rows, plan: Plan, tokens: Slices) -> SharedPrompt:
        wanted = (
            tu.get_non_tensor_data(micro_batch, name, default=False)
            for name in ("calculate_entropy", "calculate_sum_pi_squared")
        )
        kind = TaughtPrompt if is_taught(micro_batch) else SharedPrompt
        return self._scoring(rows, plan, micro_batch["temperature"], *wanted, tokens=tokens, kind=kind)

    def pack(
        self, read: PaddedBatch, temperature: float | Tensor, calculate_entropy: bool
    ) -> tuple[dict[str, Any], Plan]:
        """What the model is called with to score a batch's rows, and their plan."""
        plan = build_plan(read.rows, torch.tensor(read.groups.group_index))
        request = self._scoring(read.rows, plan, temperature, calculate_entropy)
        return packed_inputs(read.rows, read.media, plan) | {"zorro": request}, plan

    def _scoring(
        self,
        rows: Rows,
        plan: Plan,
        temperature: float | Tensor,
        calculate_entropy: bool,
        calculate_sum_pi_squared: bool = False,
        tokens: Slices | None = None,
        kind: type[SharedPrompt] = SharedPrompt,
    ) -> SharedPrompt:
        if isinstance(temperature, Tensor) and temperature.dim() > 0:
            temperature = temperature.to(rows.tokens.device)[plan.label_row]
        return kind(
            plan,
            rows.tokens[plan.label_index],
            temperature,
            calculate_entropy,
            self.options.logits_optimization,
            calculate_sum_pi_squared,
            tokens,
        )


def register(registry: type[EngineRegistry]) -> None:
    """Make `DeduplicatedActor` what verl finds for ``strategy=zorro``. Once; verl refuses a key twice."""
    if "zorro" not in registry._engines.get("language_model", {}):
        registry.register("language_model", "zorro", ["cuda", "npu", "cpu"])(DeduplicatedActor)


register(EngineRegistry)
