"""Patchers of a whole Hugging Face model: call sites stay as they are, each shared prompt is computed once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from zorro_verl.models import name_of, seam_of
from zorro_verl.patched_forward import PatchedForward, patch


class Qwen3ModelOncePatcher:
    """Patches a model for a whole training run.

        patcher = Qwen3ModelOncePatcher(model)
        patcher.patch(response_len=512, rollout_n=10, temperature=1.0)
        output = model(input_ids, attention_mask=attention_mask)
        output.logits                          # (B, S, V), the batch's own shape and order
        patcher.unpatch()

    A patched model is called as before: ``attention_mask``, ``position_ids``, ``inputs_embeds``, ``labels``,
    ``logits_to_keep``, ``output_hidden_states``, ``output_router_logits``, ``generate``. It can be copied, pickled,
    saved, checkpointed and compiled. Logits at padding positions are zero. A call with ``use_cache=True``,
    ``past_key_values``, images or videos runs unshared, and `stats` counts it; one that asks for what sharing does not
    compute (``output_attentions``, a 4-D mask) is a ValueError that names the argument.

    Args:
        model: a ``...ForCausalLM`` or ``...ForConditionalGeneration`` of a supported type, or a PEFT model around one.
        use_split_attention: False shares projections, MLPs and head, and runs attention on the rows as they were.
        attn_implementation: "auto", "eager", "sdpa", "flash_attention_2", "flash_attention_3" or
            "flash_attention_4".
    """

    def __init__(self, model: PreTrainedModel, use_split_attention: bool = True, attn_implementation: str = "auto"):
        self.model = model.get_base_model() if hasattr(model, "get_base_model") else model
        self.use_split_attention = use_split_attention
        self.attn_implementation = attn_implementation
        # A copy of a patched model has the patch, and a patcher of its own takes it off.
        current = seam_of(self.model) if isinstance(self.model, PreTrainedModel) else None
        self._forward: PatchedForward | None = current if isinstance(current, PatchedForward) else None

    def patch(
        self, response_len: int | None = None, rollout_n: int | None = None, temperature: float | Tensor = 1.0
    ) -> None:
        """Patch the model, in place of a patch that it may have.

        Args:
            response_len: responses stand in the last so many columns of a batch. Only a hint of where prompts end:
                a batch of another width is computed right, and shares what it then can. None: prompts are the longest
                common prefixes of clusters of rows.
            rollout_n: accepted and not needed: groups may have any size.
            temperature: divides the logits; one float, or ``(B,)`` for each row of every batch. A call may bring its
                own as ``model(..., temperature=)``.

        Raises:
            ValueError: an unsupported model, an attention that can't run on its device, or a bad option.
        """
        check_rollout_n(rollout_n)
        self._forward = self._patched(response_len, temperature)

    def _patched(self, response_len: int | None, temperature: float | Tensor, on_top: bool = False) -> PatchedForward:
        return patch(self.model, self.attn_implementation, self.use_split_attention, response_len, temperature, on_top)

    def unpatch(self) -> None:
        """Leave the model as it was. Nothing happens when another patch has replaced this one, or none is there.

        Raises:
            ValueError: something else has wrapped the patched forward in the meantime.
        """
        if self._forward is None:
            return
        current = self.model.__dict__.get("forward")
        if current is not None and seam_of(self.model) is None:
            raise ValueError(f"model.forward: expected the patch, got {name_of(current)} around it; unwrap it first")
        self._forward.retire()
        self._forward = None

    @property
    def stats(self) -> Mapping[str, Any]:
        """The last call's counts, under the names of `DeduplicatedActor.stats`."""
        if self._forward is None:
            raise ValueError("stats: expected a patched model, got none; call patch() first")
        return self._forward.stats


class Qwen3ModelPatcher(Qwen3ModelOncePatcher):
    """The same for the length of a ``with`` block, after which the model is as it was before, patched or not.

        with Qwen3ModelPatcher(model):
            output = model(input_ids)

    Args:
        model, use_split_attention, attn_implementation: see `Qwen3ModelOncePatcher`.
        response_len, rollout_n, temperature: see `Qwen3ModelOncePatcher.patch`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        use_split_attention: bool = True,
        attn_implementation: str = "auto",
        response_len: int | None = None,
        rollout_n: int | None = None,
        temperature: float | Tensor = 1.0,
    ):
        super().__init__(model, use_split_attention, attn_implementation)
        check_rollout_n(rollout_n)
        self._settings = {"response_len": response_len, "temperature": temperature}
        self._before: list[PatchedForward | None] = []

    def __enter__(self) -> Qwen3ModelPatcher:
        self._before.append(self._forward)
        self._forward = self._patched(**self._settings, on_top=True)
        return self

    def __exit__(self, *exception: Any) -> None:
        self.unpatch()
        self._forward = self._before.pop()


def check_rollout_n(rollout_n: int | None) -> None:
    """The hint is not needed; what can't be one is a mistake all the same."""
    if rollout_n is not None and (type(rollout_n) is not int or rollout_n < 1):
        raise ValueError(f"rollout_n: expected None or an int of at least 1, got {rollout_n!r}")
