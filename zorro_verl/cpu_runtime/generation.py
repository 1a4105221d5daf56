"""Sampling over Hugging Face `generate`: one prefill for each distinct prompt, one row of random numbers per request.

No Ray and no verl in here: what `PromptSharingGenerator.generate` draws for a request is a function of the weights and
of that request.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.cache_utils import DynamicLayer

from zorro_verl.cpu_runtime.seeding import request_seed, uniforms

# A prompt's keys and values, layer by layer: (kv_heads, tokens, head_dim) each. Empty for a prompt of one token.
PromptState = list[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Sampling:
    """How the tokens of a request are chosen. `temperature` 0 is greedy; `top_k` -1 and `top_p` 1 keep every token."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    ignore_eos: bool = False

    @classmethod
    def from_verl(cls, params: Mapping) -> "Sampling":
        """From the sampling parameters of verl's agent loop; one that cannot be honoured is a ValueError."""
        sampling = cls(
            temperature=float(params.get("temperature", 1.0)),
            top_p=float(params.get("top_p", 1.0)),
            top_k=int(params.get("top_k", -1)),
            ignore_eos=bool(params.get("ignore_eos", False)),
        )
        known = {"temperature", "top_p", "top_k", "ignore_eos", "repetition_penalty", "logprobs", "seed"}
        known |= {"max_tokens", "max_new_tokens"}
        unknown = sorted(set(params) - known)
        if unknown:
            raise ValueError(f"rollout.name=hf knows the sampling parameters {sorted(known)}, got {unknown} besides")
        if params.get("repetition_penalty", 1.0) != 1.0:
            raise ValueError(
                "rollout.name=hf samples from the policy itself: repetition_penalty must be 1.0, "
                f"got {params['repetition_penalty']}"
            )
        if sampling.temperature < 0:
            raise ValueError(f"rollout.temperature must be 0 (greedy) or positive, got {sampling.temperature}")
        if not 0 < sampling.top_p <= 1:
            raise ValueError(f"rollout.top_p must be in (0, 1], got {sampling.top_p}")
        return sampling

    def warpers(self) -> list[LogitsProcessor]:
        """What turns logits into those of the distribution that is drawn from."""
        if self.temperature == 0:
            return []
        warpers = []
        if self.temperature != 1:
            warpers.append(TemperatureLogitsWarper(self.temperature))
        if self.top_k > 0:
            warpers.append(TopKLogitsWarper(self.top_k))
        if self.top_p < 1:
            warpers.append(TopPLogitsWarper(self.top_p))
        return warpers


@dataclass(frozen=True)
class Request:
    """A prompt, how to continue it, and the seed of its draws."""

    prompt: tuple[int, ...]
    max_tokens: int
    seed: int
    sampling: Sampling = Sampling()

    def __post_init__(self):
        if not self.prompt:
            raise ValueError("a prompt needs at least one token, got none: look at the dataset and the chat template")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")


@dataclass(frozen=True)
class Completion:
    """The tokens up to and with the end token, and the log-probability of each under the distribution drawn from."""

    token_ids: list[int]
    log_probs: list[float]


class SeededDraw(LogitsProcessor):
    """Chooses every row's token from the row's own random numbers and leaves it as the only possible one.

    A draw inverts the cumulative distribution at one number in [0, 1), so that a token depends on nothing but the row's
    distribution and its number. `generate` then takes the maximum, which is the choice.
    """

    def __init__(self, numbers: torch.Tensor | None):
        self._numbers = numbers  # (rows, steps); None is greedy
        self.log_probs: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        log_probs = scores.float().log_softmax(-1)
        if self._numbers is None:
            chosen = log_probs.argmax(-1, keepdim=True)
        else:
            cumulative = log_probs.double().exp().cumsum(-1)
            step = len(self.log_probs)
            threshold = self._numbers[:, step : step + 1] * cumulative[:, -1:]
            # The first token whose cumulative probability exceeds the number: never one of probability zero.
            chosen = torch.searchsorted(cumulative, threshold, right=True).clamp_(max=scores.shape[-1] - 1)
        self.log_probs.append(log_probs.gather(-1, chosen))
        return torch.full_like(scores, float("-inf")).scatter_(-1, chosen, 0.0)


class PromptSharingGenerator:
    """Generates for batches of requests; the state of a prompt is computed once and kept until the weights change.

    A prompt's first tokens, all but the last, are prefilled alone and without padding: its state does not depend on its
    neighbours. `kept_tokens` bounds the prompts that are kept from one batch to the next.
    """

    def __init__(self, model: PreTrainedModel, end_tokens: Sequence[int], pad_token: int, kept_tokens: int):
        self._model = model.eval()
        # A checkpoint's own generation settings (top_k and so on) would be mixed into every call.
        self._model.generation_config = GenerationConfig()
        self._end_tokens = sorted(set(end_tokens))
        self._pad_token = pad_token
        self._kept_tokens = kept_tokens
        self._states: OrderedDict[tuple[int, ...], PromptState] = OrderedDict()

    @property
    def model(self) -> PreTrainedModel:
        return self._model

    def forget_prompts(self) -> None:
        """Drop every prompt's state: the weights have changed."""
        self._states.clear()

    @torch.inference_mode()
    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Complete the requests, in their order. Those that sample alike run together."""
        by_sampling: dict[Sampling, list[int]] = {}
        for index, request in enumerate(requests):
            by_sampling.setdefault(request.sampling, []).append(index)
        completions: dict[int, Completion] = {}
        for sampling, indices in by_sampling.items():
            batch = [requests[index] for index in indices]
            completions.update(zip(indices, self._generate_alike(sampling, batch), strict=True))
        return [completions[index] for index in range(len(requests))]

    def _generate_alike(self, sampling: Sampling, batch: Sequence[Request]) -> list[Completion]:
        prompts = [request.prompt for request in batch]
        width = max(map(len, prompts))
        steps = max(request.max_tokens for request in batch)
        draw = SeededDraw(None if sampling.temperature == 0 else _numbers(batch, steps))
        output = self._model.generate(
            torch.tensor([[self._pad_token] * (width - len(prompt)) + list(prompt) for prompt in prompts]),
            attention_mask=torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]),
            past_key_values=self._batch_cache(prompts, width - 1),
            logits_processor=LogitsProcessorList([*sampling.warpers(), draw]),
            generation_config=GenerationConfig(
                do_sample=False,
                max_new_tokens=steps,
                eos_token_id=None if sampling.ignore_eos else self._end_tokens,
                pad_token_id=self._pad_token,
            ),
        )
        tokens = output[:, width:].tolist()
        log_probs = torch.cat(draw.log_probs, dim=1).tolist()
        ends = set() if sampling.ignore_eos else set(self._end_tokens)
        lengths = [_length(row, request.max_tokens, ends) for row, request in zip(tokens, batch, strict=True)]
        return [
            Completion(row[:length], row_log_probs[:length])
            for row, row_log_probs, length in zip(tokens, log_probs, lengths, strict=True)
        ]

    def _batch_cache(self, prompts: Sequence[tuple[int, ...]], width: int) -> DynamicCache | None:
        """The prompts' states side by side, padded on the left to `width`; None where no prompt has one."""
        if width == 0:
            return None
        distinct = {prompt: self._state(prompt) for prompt in dict.fromkeys(prompts)}
        self._drop_oldest()
        row_of = {prompt: row for row, prompt in enumerate(distinct)}
        rows = torch.tensor([row_of[prompt] for prompt in prompts])
        first = next(state for state in distinct.values() if state)
        layers = []
        for layer, (key, value) in enumerate(first):
            keys = key.new_zeros(len(distinct), key.shape[0], width, key.shape[2])
            values = value.new_zeros(len(distinct), value.shape[0], width, value.shape[2])
            for row, state in enumerate(distinct.values()):
                if state:
                    start = width - state[layer][0].shape[1]
                    keys[row, :, start:], values[row, :, start:] = state[layer]
            layers.append((keys[rows], values[rows]))
        return DynamicCache(layers, config=self._model.config)

    def _state(self, prompt: tuple[int, ...]) -> PromptState:
        if prompt not in self._states:
            cache = DynamicCache(config=self._model.config)
            if not all(type(layer) is DynamicLayer for layer in cache.layers):
                raise ValueError(
                    "rollout.name=hf shares the keys and values of full attention layers, but "
                    f"{self._model.config.model_type} has layers of another kind: choose another rollout.name"
                )
            if len(prompt) > 1:
                self._model(torch.tensor([prompt[:-1]]), past_key_values=cache, use_cache=True, logits_to_keep=1)
            self._states[prompt] = [(layer.keys[0], layer.values[0]) for layer in cache.layers if layer.is_initialized]
        self._states.move_to_end(prompt)
        return self._states[prompt]

    def _drop_oldest(self) -> None:
        total = sum(map(len, self._states))
        while total > self._kept_tokens:
            prompt, _ = self._states.popitem(last=False)
            total -= len(prompt)


def _numbers(batch: Sequence[Request], steps: int) -> torch.Tensor:
    return torch.stack([uniforms(request_seed(request.seed, request.prompt), steps) for request in batch])


def _length(tokens: Sequence[int], limit: int, ends: set[int]) -> int:
    return next((index + 1 for index, token in enumerate(tokens[:limit]) if token in ends), min(limit, len(tokens)))
