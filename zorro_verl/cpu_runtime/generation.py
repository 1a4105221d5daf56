"""Generation with a Hugging Face model: prompts are computed once, siblings decode side by side, draws are seeded.

No Ray and no verl in here: what `PromptSharingGenerator.generate` draws for a request is a function of the weights and
of that request. Greedy it is the model's own `generate`, which knows neither a shared prompt nor a seed per row.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    DynamicCache,
    LogitsProcessorList,
    PreTrainedModel,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.cache_utils import DynamicLayer, LinearAttentionLayer

from zorro_verl.cpu_runtime.seeding import request_seed, uniforms


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
        sampling = cls(
            temperature=float(params.get("temperature", 1.0)),
            top_p=float(params.get("top_p", 1.0)),
            top_k=int(params.get("top_k", -1)),
            ignore_eos=bool(params.get("ignore_eos", False)),
        )
        if sampling.temperature < 0:
            raise ValueError(f"rollout.temperature must be 0 (greedy) or positive, got {sampling.temperature}")
        if not 0 < sampling.top_p <= 1:
            raise ValueError(f"rollout.top_p must be in (0, 1], got {sampling.top_p}")
        return sampling

    def warpers(self) -> LogitsProcessorList:
        """What turns logits into those of the distribution that is drawn from."""
        warpers = LogitsProcessorList()
        if self.temperature not in (0, 1):
            warpers.append(TemperatureLogitsWarper(self.temperature))
        if self.temperature and self.top_k > 0:
            warpers.append(TopKLogitsWarper(self.top_k))
        if self.temperature and self.top_p < 1:
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
    """The tokens up to and with the end token, and the log-probability of each under the distribution drawn from.

    Not `finished` where the generation was stopped before the last token.
    """

    token_ids: list[int]
    log_probs: list[float]
    finished: bool = True


# Of a request that was stopped before its first token.
NOTHING = Completion([], [], finished=False)


@dataclass(frozen=True)
class PromptState:
    """What is kept of a prompt: two tensors a layer, and the logits after it.

    Of a full attention layer keys and values, (kv_heads, tokens, head_dim); of a linear one the conv's last inputs,
    (channels, width), and the recurrent state, (heads, key_dim, value_dim).
    """

    layers: list[tuple[torch.Tensor, torch.Tensor]]
    logits: torch.Tensor
    length: int


class PromptSharingGenerator:
    """Generates for batches of requests; the state of a prompt is computed once and kept until the weights change.

    A prompt is computed alone and without padding, so its state does not depend on its neighbours. Then each row of the
    batch is a prompt, and its siblings are the row's columns: in every step the model gets (prompts, siblings) tokens,
    with a mask under which a column sees the row's prompt and its own tokens. Keys and values of a prompt are never
    copied for its siblings. In a model with linear attention, whose state has no columns, every sibling is a row with a
    copy of the prompt's state. `kept_tokens` bounds the prompts that are kept from one batch to the next.
    """

    def __init__(self, model: PreTrainedModel, end_tokens: Sequence[int], kept_tokens: int):
        self._model = model.eval()
        self._end_tokens = torch.tensor(sorted(set(end_tokens)), dtype=torch.long)
        self._kept_tokens = kept_tokens
        self._states: OrderedDict[tuple[int, ...], PromptState] = OrderedDict()

    @property
    def model(self) -> PreTrainedModel:
        return self._model

    def forget_prompts(self) -> None:
        """Drop every prompt's state: the weights have changed."""
        self._states.clear()

    @torch.inference_mode()
    def generate(self, requests: Sequence[Request], stopped: Callable[[], bool] = lambda: False) -> list[Completion]:
        """Complete the requests, in their order. Those that sample alike run together.

        Once `stopped()` says so, no further call of the model begins, and requests get the tokens that they have.
        """
        alike: dict[Sampling, list[int]] = {}
        for index, request in enumerate(requests):
            alike.setdefault(request.sampling, []).append(index)
        completions: dict[int, Completion] = {}
        for sampling, indices in alike.items():
            batch = [requests[index] for index in indices]
            completions.update(zip(indices, self._generate_alike(sampling, batch, stopped), strict=True))
        return [completions[index] for index in range(len(requests))]

    def _generate_alike(
        self, sampling: Sampling, batch: Sequence[Request], stopped: Callable[[], bool]
    ) -> list[Completion]:
        states = {}
        for prompt in dict.fromkeys(request.prompt for request in batch):
            if stopped():
                return [NOTHING] * len(batch)
            states[prompt] = self._state(prompt)
        self._drop_oldest()
        row, column = _places(batch)
        limits = torch.tensor([request.max_tokens for request in batch])
        numbers = None
        if sampling.temperature:
            seeds = [request_seed(request.seed, request.prompt) for request in batch]
            numbers = torch.stack([uniforms(seed, int(limits.max())) for seed in seeds])
        ends = self._end_tokens[:0] if sampling.ignore_eos else self._end_tokens
        warpers = sampling.warpers()

        step_model = _SiblingSteps(self._model, list(states.values()), siblings=int(column.max()) + 1)
        logits = torch.stack([state.logits for state in states.values()])[row]
        lengths = torch.zeros_like(limits)
        running = torch.ones_like(limits, dtype=torch.bool)
        tokens, log_probs = [], []
        while True:
            chosen, log_prob = draw(warpers(None, logits.float()), None if numbers is None else numbers[:, len(tokens)])
            tokens.append(chosen)
            log_probs.append(log_prob)
            lengths += running
            running &= (lengths < limits) & ~torch.isin(chosen, ends)
            if not running.any() or stopped():
                break
            logits = step_model(chosen, row, column)
        return [
            Completion(row_tokens[:length], row_log_probs[:length], finished=not cut)
            for row_tokens, row_log_probs, length, cut in zip(
                torch.stack(tokens, 1).tolist(),
                torch.stack(log_probs, 1).tolist(),
                lengths.tolist(),
                running.tolist(),
                strict=True,
            )
        ]

    def _state(self, prompt: tuple[int, ...]) -> PromptState:
        if prompt not in self._states:
            cache = DynamicCache(config=self._model.config)
            if not all(type(layer) in (DynamicLayer, LinearAttentionLayer) for layer in cache.layers):
                raise ValueError(
                    "rollout.name=hf shares the state of full and linear attention layers, but "
                    f"{self._model.config.model_type} has layers of another kind: choose another rollout.name"
                )
            output = self._model(torch.tensor([prompt]), past_key_values=cache, use_cache=True, logits_to_keep=1)
            layers = [
                (layer.conv_states[0], layer.recurrent_states[0])
                if _is_linear(layer)
                else (layer.keys[0], layer.values[0])
                for layer in cache.layers
            ]
            self._states[prompt] = PromptState(layers, output.logits[0, -1], len(prompt))
        self._states.move_to_end(prompt)
        return self._states[prompt]

    def _drop_oldest(self) -> None:
        total = sum(map(len, self._states))
        while total > self._kept_tokens:
            prompt, _ = self._states.popitem(last=False)
            total -= len(prompt)


class _SiblingSteps:
    """Runs the model on one token of every sibling of every prompt, and remembers what they have said so far."""

    def __init__(self, model: PreTrainedModel, states: Sequence[PromptState], siblings: int):
        self._cache = DynamicCache(config=model.config)
        self._columns = siblings
        if any(map(_is_linear, self._cache.layers)):
            states, siblings = [state for state in states for _ in range(siblings)], 1
        lengths = torch.tensor([state.length for state in states])
        width = int(lengths.max())
        self._model = model
        for layer, (first, second) in zip(self._cache.layers, _by_layer(states), strict=True):
            if _is_linear(layer):
                layer.update_conv_state(torch.stack(first))
                layer.update_recurrent_state(torch.stack(second))
            else:
                layer.update(_padded(first, width), _padded(second, width))
        self._positions = lengths[:, None].repeat(1, siblings)
        sees_prompt = torch.arange(width) < lengths[:, None]
        self._mask = _additive(sees_prompt[:, None, None].expand(-1, 1, siblings, -1), model.dtype)
        # Each step adds one column a sibling; a sibling sees its own.
        own = torch.eye(siblings, dtype=torch.bool).expand(len(states), 1, siblings, siblings)
        self._own = _additive(own, model.dtype)

    def __call__(self, chosen: torch.Tensor, row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
        """The next logits of the requests at (row, column), whose last token is `chosen`."""
        if self._positions.shape[1] == 1:
            row, column = row * self._columns + column, torch.zeros_like(column)
        tokens = torch.zeros_like(self._positions)  # a place without a request computes something that nobody reads
        tokens[row, column] = chosen
        self._mask = torch.cat([self._mask, self._own], -1)
        output = self._model(
            tokens,
            attention_mask=self._mask,
            position_ids=self._positions,
            past_key_values=self._cache,
            use_cache=True,
        )
        self._positions = self._positions + 1
        return output.logits[row, column]


def draw(logits: torch.Tensor, numbers: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """One token a row and its log-probability: the likeliest, or the one at which the row's number in [0, 1) falls.

    The number is looked up in the cumulative distribution, so that a token depends on nothing but the row's own
    distribution and number.
    """
    log_probs = logits.log_softmax(-1)
    if numbers is None:
        chosen = log_probs.argmax(-1, keepdim=True)
    else:
        cumulative = log_probs.double().exp().cumsum(-1)
        # The first token whose cumulative probability exceeds the number: never one of probability zero.
        chosen = torch.searchsorted(cumulative, numbers[:, None] * cumulative[:, -1:], right=True)
        chosen.clamp_(max=logits.shape[-1] - 1)
    return chosen[:, 0], log_probs.gather(-1, chosen)[:, 0]


def _places(batch: Sequence[Request]) -> tuple[torch.Tensor, torch.Tensor]:
    """The row of each request's prompt, prompts by first appearance, and the request's place among its siblings."""
    rows: dict[tuple[int, ...], int] = {}
    siblings: Counter[tuple[int, ...]] = Counter()
    places = []
    for request in batch:
        places.append((rows.setdefault(request.prompt, len(rows)), siblings[request.prompt]))
        siblings[request.prompt] += 1
    row, column = torch.tensor(places).unbind(1)
    return row, column


def _is_linear(layer: Any) -> bool:
    return isinstance(layer, LinearAttentionLayer)


def _by_layer(states: Sequence[PromptState]) -> Iterator[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    for layer in zip(*(state.layers for state in states), strict=True):
        first, second = zip(*layer, strict=True)
        yield first, second


def _padded(states: Sequence[torch.Tensor], width: int) -> torch.Tensor:
    """(kv_heads, tokens, head_dim) of each prompt side by side, zeros after the last token."""
    heads, _, head_dim = states[0].shape
    batch = states[0].new_zeros(len(states), heads, width, head_dim)
    for row, state in enumerate(states):
        batch[row, :, : state.shape[1]] = state
    return batch


def _additive(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The mask in the form that every attention implementation of Hugging Face adds to its scores."""
    return torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, torch.finfo(dtype).min)
