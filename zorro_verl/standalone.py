"""The actor without veRL's trainer: one process, a plain Hugging Face model, no process group, no Ray."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from verl.workers.config import FSDPActorConfig
from verl.workers.utils.losses import ppo_loss

from zorro_verl.grouping import Rows, exclusive_cumsum, prompt_fingerprints, ranges
from zorro_verl.metrics import ShareCounts
from zorro_verl.models import check_supported, install
from zorro_verl.options import ZorroOptions
from zorro_verl.packing import Plan
from zorro_verl.verl_rows import check_tokens

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
    "get_data_parallel_rank",
    "get_data_parallel_size",
    "get_data_parallel_group",
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
        model_name_or_path: str,
        device: str | torch.device = "cuda",
        logits_optimization: str = "none",
        use_split_attention: bool = True,
        attn_implementation: str = "auto",
        dtype: torch.dtype | str | None = None,
        actor_config: FSDPActorConfig | None = None,
    ) -> None:
        """Load the model and put the seam on it.

        Args:
            model_name_or_path: a hub name or a folder; no tokenizer is needed.
            device: where the model runs.
            logits_optimization, use_split_attention, attn_implementation: see `ZorroOptions`.
            dtype: a torch dtype or its name; the checkpoint's own when None.
            actor_config: options of verl's policy loss; verl's defaults when None. Copied.
        """
        self.options = ZorroOptions(
            attn_implementation=attn_implementation,
            use_split_attention=use_split_attention,
            logits_optimization=logits_optimization,
        )
        if torch.device(device).type == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"device: expected one that is there, got {device!r} without CUDA; use device='cpu'")
        check_supported(AutoConfig.from_pretrained(model_name_or_path))
        model = AutoModelForCausalLM.from_pretrained(
            model_name_or_path, dtype=_dtype(dtype), attn_implementation="sdpa"
        )
        self.module = model.to(device)
        install(self.module, attn_implementation, use_split_attention)
        self.actor_config = copy.deepcopy(actor_config) if actor_config is not None else _default_actor_config()
        self._counts = ShareCounts()
        for name in ENGINE_METHODS:
            setattr(self, name, partial(_refuse, name))

    @property
    def model(self) -> torch.nn.Module:
        """The model itself; stand-alone a plain Hugging Face module with ordinary gradients."""
        return self.module

    @property
    def stats(self) -> Mapping[str, Any]:
        """The last call's counts: tokens_total, tokens_packed, token_ratio, groups, groups_split, fallback."""
        return MappingProxyType(dict(self._counts.summary()))

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
                padding may lie anywhere.
            temperature: one float, or ``(B,)``; divides the logits.
            calculate_entropy: whether to compute the entropy.

        Raises:
            ValueError: a missing key, a wrong shape or dtype, or a row without a prompt.
        """
        output, _, _ = self._forward(_tensors(batch), temperature, calculate_entropy)
        return ActorOutput(output["log_probs"], output.get("entropy"))

    def compute_policy_loss_and_backward(
        self, batch: Mapping[str, Tensor], temperature: float | Tensor = 1.0, gradient_accumulation: int = 1
    ) -> dict[str, float]:
        """One forward, verl's policy loss, and the backward of ``loss / gradient_accumulation``.

        Args:
            batch: as for `forward`, with ``old_log_probs`` and ``advantages`` ``(B, R)``, and optionally
                ``response_mask`` (which response tokens enter the loss) and ``ref_log_prob``.
            temperature: one float, or ``(B,)``.
            gradient_accumulation: how many calls one optimizer step is made of. ``.grad`` is added to.

        Returns:
            verl's loss metrics as floats; ``actor/policy_loss`` is the undivided loss.
        """
        if gradient_accumulation < 1:
            raise ValueError(f"gradient_accumulation: expected at least 1, got {gradient_accumulation}")
        tensors = _tensors(batch)
        required = ("old_log_probs", "advantages") + (("ref_log_prob",) if self.actor_config.use_kl_loss else ())
        _require(tensors, required)
        config = copy.copy(self.actor_config)
        object.__setattr__(config, "global_batch_info", {})
        calculate_entropy = bool(config.calculate_entropy or config.entropy_coeff)
        output, rows, plan = self._forward(tensors, temperature, calculate_entropy)
        data = _loss_inputs(tensors, rows)
        loss, metrics = ppo_loss(config, self.prepare_model_outputs(output, {"plan": plan}, data, None), data)
        (loss / gradient_accumulation).backward()
        values = {name: float(m.aggregate() if hasattr(m, "aggregate") else m) for name, m in metrics.items()}
        return {"actor/policy_loss": loss.item()} | values

    def _forward(
        self, tensors: dict[str, Tensor], temperature: float | Tensor, calculate_entropy: bool
    ) -> tuple[dict[str, Tensor], Rows, Plan]:
        _require(tensors, ("input_ids", "attention_mask", "position_ids", "responses"))
        device = next(self.module.parameters()).device
        responses = tensors["responses"]
        if responses.dim() != 2 or responses.shape[0] != tensors["input_ids"].shape[0]:
            raise ValueError(f"responses: expected (B, R), got {tuple(responses.shape)}")
        names = ("input_ids", "attention_mask", "position_ids")
        rows = Rows.from_padded(*(tensors[name].to(device) for name in names), responses.shape[1])
        check_tokens(rows, self.module.get_input_embeddings().num_embeddings)
        if rows.position_ids.dim() != 1:
            raise ValueError(f"position_ids: expected (B, S) for a text model, got {rows.position_ids.shape[0]} axes")
        if not isinstance(temperature, Tensor | float | int):
            raise ValueError(f"temperature: expected a float or a tensor, got {type(temperature).__name__}")
        if isinstance(temperature, Tensor) and temperature.dim() > 0 and temperature.shape != (rows.num_rows,):
            raise ValueError(f"temperature: expected a float or ({rows.num_rows},), got {tuple(temperature.shape)}")
        inputs, plan = self.pack(rows, temperature, calculate_entropy)
        self._counts = ShareCounts()
        self._counts.add_micro_batch(plan.num_row_tokens, plan.num_tokens, prompt_fingerprints(rows).tolist())
        return self.module(**inputs, use_cache=False), rows, plan


def _loss_inputs(tensors: dict[str, Tensor], rows: Rows) -> TensorDict:
    """The batch as verl's loss reads it: jagged rows of valid tokens, normalised over this batch."""
    device = rows.tokens.device
    width = tensors["responses"].shape[1]
    valid = tensors["attention_mask"].to(device)[:, -width:].bool()
    longest = int(rows.response_lens.max())
    offsets = exclusive_cumsum(rows.response_lens).to(device)

    def jagged(name: str, default: Tensor | None = None) -> Tensor:
        value = tensors.get(name, default)
        if name == "response_mask":
            value = value != 0  # summed below, which in a short dtype would round
        if value.shape != valid.shape:
            raise ValueError(f"{name}: expected (B, R) = {tuple(valid.shape)}, got {tuple(value.shape)}")
        # Without its length bounds a jagged tensor pads to the sum of its rows.
        return torch.nested.nested_tensor_from_jagged(
            value.to(device)[valid], offsets, min_seqlen=int(rows.response_lens.min()), max_seqlen=longest
        )

    fields = {name: jagged(name) for name in ("responses", "old_log_probs", "advantages")}
    fields |= {name: jagged(name) for name in ("ref_log_prob", "rollout_is_weights") if name in tensors}
    fields["response_mask"] = jagged("response_mask", valid)
    fields["input_ids"] = torch.nested.nested_tensor_from_jagged(rows.tokens, rows.cu_seqlens.to(device))
    prompt_tokens = ranges(rows.cu_seqlens[:-1], rows.prompt_lens, device)
    fields["prompts"] = torch.nested.nested_tensor_from_jagged(
        rows.tokens[prompt_tokens], exclusive_cumsum(rows.prompt_lens).to(device)
    )
    num_tokens = int(fields["response_mask"].values().sum())
    data = TensorDict(fields, batch_size=rows.num_rows)
    # A batch without a token in the loss has loss 0: any divisor but 0 says so.
    for key, value in (
        ("dp_size", 1),
        ("batch_num_tokens", max(1, num_tokens)),
        ("global_batch_size", rows.num_rows),
        ("max_response_len", longest),
    ):
        data.set_non_tensor(key, value)
    return data


def _tensors(batch: Any) -> dict[str, Tensor]:
    source = batch.batch if hasattr(batch, "meta_info") else batch
    if not hasattr(source, "items"):
        raise ValueError(f"batch: expected a mapping of tensors or a DataProto, got {type(batch).__name__}")
    return {str(key): value for key, value in source.items() if isinstance(value, Tensor)}


def _require(tensors: Mapping[str, Tensor], keys: tuple[str, ...]) -> None:
    missing = [key for key in keys if key not in tensors]
    if missing:
        raise ValueError(f"batch: expected the keys {list(keys)}, got no {missing} in {sorted(tensors)}")


def _dtype(dtype: torch.dtype | str | None) -> torch.dtype | str:
    if dtype is None:
        return "auto"
    if isinstance(dtype, str):
        found = getattr(torch, dtype, None)
        if not isinstance(found, torch.dtype):
            raise ValueError(f"dtype: expected a torch dtype or its name, got {dtype!r}")
        return found
    return dtype


def _default_actor_config() -> FSDPActorConfig:
    # Sizes and rollout n are required by the dataclass and not read by the loss.
    return FSDPActorConfig(strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=1)


def _refuse(name: str, *args: Any, **kwargs: Any) -> None:
    raise RuntimeError(
        f"DeduplicatedActor.{name} is part of verl's engine and needs verl's worker: run "
        "`python -m verl.trainer.main_ppo ... actor_rollout_ref.actor.strategy=zorro`. Stand-alone, use forward, "
        "compute_policy_loss_and_backward and actor.model"
    )
