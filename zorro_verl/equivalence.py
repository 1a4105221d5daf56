"""Whether a model computes with the seam what it computes without: a ragged batch, both sides, their differences.

The reference is the unpatched model on one unpadded row at a time. In float64 and float32 the two sides are compared
with each other. In bfloat16 and float16 that would prove nothing, since both are far from the truth and may be equally
far: there both are compared with wider arithmetic, and sharing may not be further from it than the plain model, within
`ROUNDED`. A router's near-tie may then fall either way, on either side, and a token that went to another expert is far
off by luck: of a model with experts the worst quarter of the tokens is left out, and more is allowed.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from zorro_verl.grouping import Rows, exclusive_cumsum
from zorro_verl.heads import SharedPrompt
from zorro_verl.mixers import linear_layers
from zorro_verl.models import install, seam_of, uninstall
from zorro_verl.packing import Plan, build_plan
from zorro_verl.verify_request import Sizes


class Allowed(NamedTuple):
    """What 16-bit arithmetic is allowed, in multiples of the plain model's error.

    Attributes:
        values: of many tokens together; for few, more by as much as chance would have it.
        gradients: of any one parameter: of a handful of numbers, the plain side may be near by luck.
        least_error: what a parameter's gradient may be off in any case, as a part of its norm, before it is multiplied.
    """

    values: float
    gradients: float
    least_error: float


TOLERANCES: Mapping[torch.dtype, float] = MappingProxyType({torch.float64: 5e-6, torch.float32: 2e-5})
ROUNDED = Allowed(values=1.5, gradients=3, least_error=0.03)
ROUNDED_EXPERTS = Allowed(values=2, gradients=3, least_error=0.2)

T = TypeVar("T")
# Wraps what takes long, given what it is and how many there are.
Track = Callable[[Iterable[T], str, int], Iterable[T]]


def untracked(items: Iterable[T], what: str, total: int) -> Iterable[T]:
    """No progress is shown."""
    return items


@dataclass(frozen=True)
class Sharing:
    """How the seam shares: the arguments of `zorro_verl.models.install`.

    Attributes:
        attn_implementation: as there.
        linear_attention: as there; None where a model has no such layers.
    """

    attn_implementation: str = "auto"
    linear_attention: str | None = None

    @contextmanager
    def on(self, model: PreTrainedModel, device: str | None = None) -> Iterator[None]:
        """The seam is on the model within this context."""
        install(model, self.attn_implementation, device=device, linear_attention=self.linear_attention or "auto")
        try:
            yield
        finally:
            uninstall(model)

    def attention_of(self, model: PreTrainedModel) -> str:
        """What attention runs on in a model that has the seam on."""
        if seam_of(model).kernels is None:
            return "eager"
        return "sdpa" if self.attn_implementation == "auto" else self.attn_implementation


class Batch:
    """Rows, the plan that packs them, and a loss in which each value has a weight of its own.

    Attributes:
        rows, plan: the batch.
        labels: ``(R,)`` the response tokens.
        weights: ``(2, R)`` float64, of the log-probs and the entropies in the loss.
        temperature: ``(R,)`` float32, each row's own.
    """

    def __init__(self, rows: Rows, seed: int = 0):
        self.rows = rows
        self.plan: Plan = build_plan(rows)
        self.labels = rows.tokens[self.plan.label_index]
        generator = torch.Generator().manual_seed(seed)
        weights = torch.randn(2, self.labels.numel(), generator=generator, dtype=torch.float64)
        self.weights = (weights * torch.tensor([[1.0], [0.3]])).to(rows.tokens.device)
        temperature = 0.8 + 0.6 * torch.rand(rows.num_rows, generator=generator)
        self.temperature = temperature.to(rows.tokens.device)[self.plan.label_row]

    def response_rows(self) -> Iterator[tuple[Tensor, slice, int]]:
        """Of every row with a response: its ``(1, L)`` tokens, where its response tokens lie in R, prompt tokens."""
        bounds, ends = self.rows.cu_seqlens.tolist(), self.rows.response_lens.cumsum(0).tolist()
        for i, (prompt, end) in enumerate(zip(self.rows.prompt_lens.tolist(), ends, strict=True)):
            response = bounds[i + 1] - bounds[i] - prompt
            if response:
                yield self.rows.tokens[None, bounds[i] : bounds[i + 1]], slice(end - response, end), prompt

    def loss(self, log_probs: Tensor, entropy: Tensor, where: slice = slice(None)) -> Tensor:
        """The weighted sum of the response tokens at ``where``."""
        log_prob_weights, entropy_weights = self.weights[:, where].to(log_probs.dtype)
        return (log_probs * log_prob_weights).sum() + (entropy * entropy_weights).sum()

    def response_token(self, index: int) -> str:
        """Which of the R response tokens that is, in words."""
        row = int(self.plan.label_row[index])
        first = int(exclusive_cumsum(self.rows.response_lens)[row])
        return f"row {row}, response token {index - first}"

    def row_token(self, index: int) -> str:
        """Which of the N tokens that is, in words."""
        row = int(torch.searchsorted(self.rows.cu_seqlens, index, right=True)) - 1
        return f"row {row}, token {index - int(self.rows.cu_seqlens[row])}"

    def packed_token(self, index: int) -> str:
        """Which of the T packed tokens that is, in words."""
        return self.row_token(int(self.plan.token_index[index]))


def ragged_batch(token_ids: Tensor, sizes: Sizes, seed: int = 0, device: str = "cpu") -> Batch:
    """Rows of random tokens in random order: a lone row, a group with a one-token prompt, larger groups.

    One response is empty, one has a single token, one is as long as asked.

    Args:
        token_ids: ``(K,)`` the token ids to draw from.
    """
    generator = torch.Generator().manual_seed(seed)

    def between(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    def draw(count: int) -> Tensor:
        return token_ids[torch.randint(token_ids.numel(), (count,), generator=generator)]

    larger = sizes.rows - 4
    count = max(1, larger // 4)
    members = [1, 3, *(larger // count + (i < larger % count) for i in range(count))]
    prompts = [max(2, sizes.prompt // 2), 1, sizes.prompt, *(between(1, sizes.prompt) for _ in range(count - 1))]
    fixed = {2: [sizes.response, 0, 1]}
    pieces = []
    for group, (size, prompt_len) in enumerate(zip(members, prompts, strict=True)):
        prompt, lens = draw(prompt_len), fixed.get(group, [])
        pieces += [(prompt, draw(n)) for n in lens + [between(1, sizes.response) for _ in range(size - len(lens))]]
    pieces = [pieces[i] for i in torch.randperm(len(pieces), generator=generator)]
    lens = torch.tensor([len(prompt) + len(response) for prompt, response in pieces])
    rows = Rows(
        torch.cat([torch.cat(piece) for piece in pieces]).to(device),
        torch.cat([torch.arange(n) for n in lens.tolist()]).to(device),
        exclusive_cumsum(lens),
        torch.tensor([len(prompt) for prompt, _ in pieces]),
    )
    return Batch(rows, seed)


@dataclass(frozen=True)
class Outcome:
    """What one side computed.

    Attributes:
        values: by quantity, one entry or one vector a token.
        gradients: by parameter.
    """

    values: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]

    def check_finite(self, where: str = "") -> None:
        """Refuse the plain model's NaN and infinity: nothing can be compared with them.

        Raises:
            ValueError: names the first quantity, or the parameter of the gradient, and ``where``.
        """
        for names, kind in ((self.values, ""), (self.gradients, "gradient of ")):
            for name, tensor in names.items():
                if not bool(tensor.isfinite().all()):
                    raise ValueError(
                        f"model: the unpatched model gives values that are not finite ({where}{kind}{name}); "
                        "check its weights, or compare in another dtype"
                    )


def plain_outcome(model: PreTrainedModel, batch: Batch, track: Track = untracked) -> Outcome:
    """The unpatched model, one unpadded row at a time."""
    log_probs, entropy = torch.zeros(2, batch.labels.numel(), device=batch.labels.device, dtype=value_dtype(model))
    rows = track(batch.response_rows(), "plain rows", int((batch.rows.response_lens > 0).sum()))
    for tokens, where, prompt in rows:
        logits = model(input_ids=tokens, use_cache=False).logits[0, prompt - 1 : -1]
        row_log_probs, row_entropy = values_of(logits, batch.labels[where], batch.temperature[where])
        batch.loss(row_log_probs, row_entropy, where).backward()
        log_probs[where], entropy[where] = row_log_probs.detach(), row_entropy.detach()
    return Outcome({"log_probs": log_probs, "entropy": entropy}, take_gradients(model))


def shared_outcome(model: PreTrainedModel, batch: Batch) -> Outcome:
    """The model with the seam installed, in one packed call."""
    out = shared_call(model, batch)
    batch.loss(out["log_probs"], out["entropy"]).backward()
    return Outcome({name: out[name].detach() for name in ("log_probs", "entropy")}, take_gradients(model))


def shared_call(
    model: PreTrainedModel, batch: Batch, tokens: Tensor | None = None, labels: Tensor | None = None
) -> Mapping[str, Tensor]:
    """Log-probs and entropy of the packed batch; its own tokens and labels unless others are given."""
    rows, plan = batch.rows, batch.plan
    return model(
        input_ids=plan.pack(rows.tokens if tokens is None else tokens)[None],
        position_ids=plan.pack(rows.position_ids)[None],
        use_cache=False,
        zorro=SharedPrompt(plan, batch.labels if labels is None else labels, batch.temperature, calculate_entropy=True),
    )


def value_dtype(model: PreTrainedModel) -> torch.dtype:
    """Log-probs and entropies are float32, of a float64 model float64."""
    return torch.float64 if model.dtype == torch.float64 else torch.float32


def values_of(logits: Tensor, labels: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """``(r, V)`` logits, ``(r,)`` labels and temperatures -> log-probs and entropies ``(r,)``, written out."""
    wide = logits.to(torch.float64 if logits.dtype == torch.float64 else torch.float32)
    wide = (wide / temperature[:, None]).log_softmax(-1)
    return wide.gather(-1, labels[:, None])[:, 0], -(wide.exp() * wide).sum(-1)


def take_gradients(model: nn.Module) -> Mapping[str, Tensor]:
    """The gradients of all parameters that have one, taken off the model."""
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad(set_to_none=True)
    return gradients


def widened(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """A copy of the model in wider arithmetic."""
    wide = copy.deepcopy(model).to(dtype)
    use_runnable_experts(wide)
    return wide


def has_experts(model: PreTrainedModel) -> bool:
    """Whether some layer is a mixture of experts."""
    return any(name.endswith(".experts") for name, _ in model.named_modules())


def use_runnable_experts(model: PreTrainedModel) -> None:
    """In float64, experts run in a loop: their default, a grouped product, does not have it."""
    if model.dtype == torch.float64 and has_experts(model):
        model.set_experts_implementation("eager")


@dataclass(frozen=True)
class Difference:
    """One quantity of both sides.

    Attributes:
        quantity: what was compared.
        worst: the largest difference (`measure` says of what kind).
        where: the token or parameter that it was found at.
        tolerance: the most that is allowed.
        measure: "absolute", "relative" (to the largest entry of the token, or of all gradients), or "error ratio" (to
            the plain model's error: RMS over tokens, or in the norm of one parameter's gradient).
        linear_attention: how linear layers shared, None where there are none.
    """

    quantity: str
    worst: float
    where: str
    tolerance: float
    measure: str
    linear_attention: str | None = None

    @property
    def part(self) -> float:
        """The difference as a part of what is allowed."""
        return self.worst / self.tolerance

    @property
    def equal(self) -> bool:
        """Whether the difference is within the tolerance; one that is not a number isn't."""
        return self.worst <= self.tolerance


class Comparison:
    """Differences between outcomes, in one arithmetic.

    Args:
        batch: says what the tokens of a quantity are called.
        model: whose outcomes they are.
        prefix: in front of the token that a difference is at.
    """

    def __init__(self, batch: Batch, model: PreTrainedModel, prefix: str = ""):
        self.batch, self.prefix = batch, prefix
        self.allowed = ROUNDED_EXPERTS if has_experts(model) else ROUNDED
        self.left_out = 0.25 if has_experts(model) else 0.0
        # Gated DeltaNet's recurrence runs in float32 in every model.
        exact = model.dtype == torch.float64 and not linear_layers(model)
        self.tolerance = TOLERANCES[torch.float64 if exact else torch.float32]

    def differences(self, plain: Outcome, shared: Outcome, wide: Outcome | None = None) -> list[Difference]:
        """All quantities and the gradients; ``wide`` is the oracle of 16-bit arithmetic."""
        if plain.gradients.keys() != shared.gradients.keys():
            name = min(plain.gradients.keys() ^ shared.gradients.keys())
            return [Difference("gradients", math.nan, f"{name}: on one side only", self.tolerance, "relative")]
        if wide is not None:
            values = [self._rounded(q, plain.values[q], shared.values[q], wide.values[q]) for q in plain.values]
            return [*values, self._rounded_gradients(plain.gradients, shared.gradients, wide.gradients)]
        values = [self._value(q, plain.values[q], shared.values[q]) for q in plain.values]
        return [*values, self._gradients(plain.gradients, shared.gradients)]

    def _value(self, quantity: str, expected: Tensor, got: Tensor) -> Difference:
        error, measure = (expected - got).abs(), "absolute"
        if quantity == "input gradients":  # a token may have hardly any: against the largest of all
            error, measure = error.amax(-1) / expected.abs().max(), "relative"
        elif error.dim() > 1:  # vectors: against the largest entry of each
            error, measure = error.amax(-1) / expected.abs().amax(-1), "relative"
        index = int(error.argmax())  # argmax takes NaN for the largest
        return self._difference(
            quantity, float(error[index]), self.prefix + self._token(quantity, expected, index), measure
        )

    def _token(self, quantity: str, values: Tensor, index: int) -> str:
        if quantity == "input gradients":
            return self.batch.packed_token(index)
        return self.batch.response_token(index) if values.dim() == 1 else self.batch.row_token(index)

    def _gradients(self, expected: Mapping[str, Tensor], got: Mapping[str, Tensor]) -> Difference:
        names = list(expected)
        scale = torch.stack([expected[name].abs().max() for name in names]).max()
        errors = torch.stack([(expected[name] - got[name]).abs().max() for name in names]) / scale
        index = int(errors.argmax())
        return self._difference("gradients", float(errors[index]), names[index], "relative")

    def _difference(self, quantity: str, worst: float, where: str, measure: str) -> Difference:
        where = where if worst != 0 else "the same everywhere"
        return Difference(quantity, worst, where, self.tolerance, measure)

    def _rounded(self, quantity: str, plain: Tensor, shared: Tensor, wide: Tensor) -> Difference:
        """Squared errors over tokens: the shared side's as a multiple of the plain side's."""
        plain_error, shared_error = (
            (side.to(wide.dtype) - wide).square().view(wide.shape[0], -1).sum(-1) for side in (plain, shared)
        )
        kept = max(1, round((1 - self.left_out) * wide.shape[0]))
        worst = _ratio(*(error.sort().values[:kept].sum().sqrt() for error in (plain_error, shared_error)))
        if not bool(shared.isfinite().all()):  # sorted, it would be left out
            worst = math.nan
        tokens = f"all tokens but the worst {self.left_out:.0%}" if self.left_out else "all tokens"
        allowed = self.allowed.values * (1 + kept**-0.5)  # two RMS of n errors scatter by 1 / sqrt(n) about their ratio
        return Difference(quantity, worst, f"{self.prefix}{tokens}", allowed, "error ratio")

    def _rounded_gradients(
        self, plain: Mapping[str, Tensor], shared: Mapping[str, Tensor], wide: Mapping[str, Tensor]
    ) -> Difference:
        """The same of each parameter, of which the worst counts: together the largest would hide the others."""
        names = list(plain)
        norms = torch.stack([wide[name].norm() for name in names])
        plain_errors, shared_errors = (
            torch.stack([(side[name].to(wide[name].dtype) - wide[name]).norm() for name in names])
            for side in (plain, shared)
        )
        # One whose gradient is next to nothing is measured against the largest.
        least = self.allowed.least_error * norms.clamp(min=1e-3 * float(norms.max()))
        ratios = shared_errors / torch.maximum(plain_errors, least)
        index = int(ratios.argmax())
        return Difference("gradients", float(ratios[index]), names[index], self.allowed.gradients, "error ratio")


def _ratio(plain: Tensor, shared: Tensor) -> float:
    return 0.0 if shared == 0 else float(shared / plain)


def differences_of(
    ways: Iterable[Sharing],
    model: PreTrainedModel,
    run: Callable[[PreTrainedModel], Outcome],
    comparison: Comparison,
    plain: Outcome,
    wide: Outcome | None,
) -> Iterator[Difference]:
    """What ``run`` gives with the seam on the model, each way, against the plain model's outcome."""
    for sharing in ways:
        with sharing.on(model):
            shared = run(model)
        for difference in comparison.differences(plain, shared, wide):
            yield replace(difference, linear_attention=sharing.linear_attention)
