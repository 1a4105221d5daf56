"""A model with shared prompts against the same model without: log-probs, an update, and the memory of one.

The plain side is the Hugging Face model on the padded rows of one group, sdpa, its head on the rows that predict a
response token: what is measured is sharing alone. Both sides start from token ids; finding the groups and building the
plan is inside the measured time. Nothing is timed before log-probs and gradients of the two agree on the very batch.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel, Qwen3Config

from zorro_verl import checkpoint, known_models
from zorro_verl.checkpoint import filled, one_line, quiet_loading
from zorro_verl.equivalence import (
    TOLERANCES,
    Comparison,
    Difference,
    Outcome,
    Sharing,
    Track,
    take_gradients,
    untracked,
    use_runnable_experts,
    value_dtype,
    widened,
)
from zorro_verl.equivalence import Batch as NamedRows
from zorro_verl.families import auto_class, text_config
from zorro_verl.flops import flop_bound_speedup
from zorro_verl.grouping import Rows, find_prompt_groups
from zorro_verl.heads import SharedPrompt
from zorro_verl.measuring import (
    Effort,
    Shape,
    Timing,
    check_device,
    clock_for,
    cuda_stopwatch,
    in_own_process,
    out_of_memory,
    peak_allocated,
    peak_resident,
    stopwatch,
    time_interleaved,
)
from zorro_verl.models import install
from zorro_verl.packing import build_plan
from zorro_verl.verify import DTYPES, text_tokens
from zorro_verl.verify_request import check_device_name, local_folder

CALLS = ("log_prob", "update")  # a forward alone, and forward + backward
PLAIN, SHARED = "plain", "shared"
WARM_UP = Shape(8, 4, 2)
# The oracle of 16 bits. Float64 would need attention that stores all scores on a GPU, and is no nearer for this.
WIDE = torch.float32


def small_config() -> PretrainedConfig:
    """Of the Qwen3 that is timed where none is asked for: large enough that products are what takes the time."""
    return Qwen3Config(
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=2048,
        tie_word_embeddings=False,
    )


@dataclass(frozen=True)
class Subject:
    """The model that is timed, and on what: enough to build it again in another process.

    Attributes:
        config: its layers may be fewer than the model's.
        name: what the model was called.
        all_layers: how many the model has.
        weights: the checkpoint that they are read from; random where None.
        dtype, device: of the model.
        attn_implementation: of the seam, see `zorro_verl.models.install`.
    """

    config: PretrainedConfig
    name: str
    all_layers: int
    weights: str | None = None
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    attn_implementation: str = "auto"

    @classmethod
    def of(
        cls,
        model: str | None = None,
        random_weights: bool = False,
        layers: int | None = None,
        dtype: str | None = None,
        device: str = "cpu",
        attn_implementation: str = "auto",
    ) -> Subject:
        """What the command's options ask for.

        Args:
            model: a folder or a name on the hub; `small_config` with random weights when None.
            random_weights: take the config alone, of any model that `zorro_verl.known_models.config_of` finds.
            layers: keep the first so many layers; all when None.
            dtype: one of `zorro_verl.verify.DTYPES`; float32 on a CPU and bfloat16 elsewhere when None.
            device: "cpu", "cuda" or "cuda:N".
            attn_implementation: as above.

        Raises:
            ValueError: a model that can't be had or isn't supported, too many layers, a dtype or a device that isn't
                there.
        """
        check_device_name(device)
        check_device(device)
        dtype = dtype or ("float32" if device == "cpu" else "bfloat16")
        if dtype not in DTYPES:
            raise ValueError(f"dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
        if model is None:
            config = small_config()
        else:
            config = known_models.config_of(model) if random_weights else checkpoint.config_of(model)
        return cls(
            config=with_layers(config, layers),
            name=model or "a small Qwen3",
            all_layers=text_config(config).num_hidden_layers,
            weights=None if random_weights else model,
            dtype=DTYPES[dtype],
            device=device,
            attn_implementation=attn_implementation,
        )

    def build(self) -> PreTrainedModel:
        """The model, as Hugging Face ships it."""
        if self.weights is None:
            torch.manual_seed(0)
            with quiet_loading(), one_line("no model can be built from its config"), torch.device(self.device):
                model = auto_class(self.config).from_config(self.config, dtype=self.dtype)
            use_runnable_experts(model)
        else:
            source = local_folder(self.weights) or self.weights
            try:
                model = filled(auto_class(self.config), source, config=self.config, dtype=self.dtype).to(self.device)
            except ValueError as error:
                raise ValueError(f"{error}; --random-weights needs no more than the config") from error
        model.set_attn_implementation("sdpa")
        return model


def with_layers(config: PretrainedConfig, layers: int | None) -> PretrainedConfig:
    """The same model with its first layers alone; ``config`` itself where None."""
    if layers is None:
        return config
    config = copy.deepcopy(config)
    text = text_config(config)
    if not 1 <= layers <= text.num_hidden_layers:
        raise ValueError(f"layers: expected 1 to {text.num_hidden_layers}, the model's own, got {layers}")
    text.num_hidden_layers = layers
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:layers]
    return config


@dataclass(frozen=True)
class Batch:
    """The rows of one group, padded (all are full: nothing to pad), and a loss.

    Attributes:
        input_ids: ``(n, P + R)`` int64, the prompt in every row.
        responses: ``(n, R)``, their last columns.
        weights: ``(n, R)`` float32, of each log-prob in the loss.
    """

    input_ids: Tensor
    responses: Tensor
    weights: Tensor

    @classmethod
    def random(cls, shape: Shape, token_ids: Tensor, device: str) -> Batch:
        """Tokens out of ``token_ids`` ``(K,)``, the same for the same shape."""
        generator = torch.Generator().manual_seed(shape.P + shape.R + shape.n)
        responses = token_ids[torch.randint(token_ids.numel(), (shape.n, shape.R), generator=generator)]
        prompt = token_ids[torch.randint(token_ids.numel(), (1, shape.P), generator=generator)]
        input_ids = torch.cat([prompt.expand(shape.n, -1), responses], 1)
        weights = torch.randn(shape.n, shape.R, generator=generator)
        return cls(input_ids.to(device), responses.to(device), weights.to(device))

    @property
    def rows(self) -> Rows:
        """The same without padding; found anew at each call, as in training."""
        positions = torch.arange(self.input_ids.shape[1], device=self.input_ids.device).expand_as(self.input_ids)
        return Rows.from_padded(self.input_ids, torch.ones_like(self.input_ids), positions, self.responses.shape[1])

    def row(self, index: int) -> Batch:
        """One row alone."""
        part = slice(index, index + 1)
        return Batch(self.input_ids[part], self.responses[part], self.weights[part])

    def loss(self, log_probs: Tensor) -> Tensor:
        """The weighted sum of all log-probs."""
        return (log_probs * self.weights).sum()


def plain_log_probs(model: PreTrainedModel, batch: Batch) -> Tensor:
    """``(n, R)``: the model as it is, the head on the rows that predict a response token."""
    end = batch.input_ids.shape[1] - 1
    predictors = torch.arange(end - batch.responses.shape[1], end, device=batch.input_ids.device)
    logits = model(input_ids=batch.input_ids, use_cache=False, logits_to_keep=predictors).logits.flatten(0, 1)
    labels = batch.responses.flatten()
    losses = torch.nn.functional.cross_entropy(logits.to(value_dtype(model)), labels, reduction="none")
    return -losses.view_as(batch.responses)


def shared_log_probs(model: PreTrainedModel, batch: Batch) -> Tensor:
    """``(n, R)``: the same with every distinct prompt computed once, from the padded batch to the rows' own order."""
    rows = batch.rows
    plan = build_plan(rows, find_prompt_groups(rows))
    shared = SharedPrompt(plan, labels=rows.tokens[plan.label_index])
    packed = {"input_ids": plan.pack(rows.tokens)[None], "position_ids": plan.pack(rows.position_ids)[None]}
    return model(**packed, use_cache=False, zorro=shared)["log_probs"].view_as(batch.responses)


@dataclass(frozen=True)
class Contestant:
    """One side, with what it makes of a batch."""

    name: str
    model: PreTrainedModel
    log_probs: Callable[[PreTrainedModel, Batch], Tensor]

    def ready(self, call: str, batch: Batch) -> Callable[[], Tensor]:
        """What is timed, for one of `CALLS`; it returns the log-probs, ``(n, R)``."""
        self.model.train(call == "update")
        return partial(self._update if call == "update" else self._log_prob, batch)

    def _log_prob(self, batch: Batch) -> Tensor:
        with torch.no_grad():
            return self.log_probs(self.model, batch)

    def _update(self, batch: Batch) -> Tensor:
        """Leaves gradients on the model."""
        self.model.zero_grad(set_to_none=True)
        log_probs = self.log_probs(self.model, batch)
        batch.loss(log_probs).backward()
        return log_probs.detach()

    def outcome(self, batch: Batch) -> Outcome:
        """Of both calls, in the host's memory: the device needs its own for the next side."""
        values = {name: self.ready(call, batch)().flatten().cpu() for call, name in zip(CALLS, QUANTITIES, strict=True)}
        return Outcome(values, {name: gradient.cpu() for name, gradient in take_gradients(self.model).items()})


QUANTITIES = ("log_probs", "log_probs of the update")


def wide_outcome(model: PreTrainedModel, batch: Batch) -> Outcome:
    """What both calls would be in `WIDE`: the plain model on one row at a time, which needs least memory."""
    wide = widened(model, WIDE).train()
    found = []
    for index in range(batch.input_ids.shape[0]):
        row = batch.row(index)
        log_probs = plain_log_probs(wide, row)
        row.loss(log_probs).backward()
        found.append(log_probs.detach())
    log_probs = torch.cat(found).flatten().cpu()
    gradients = {name: gradient.cpu() for name, gradient in take_gradients(wide).items()}
    return Outcome(dict.fromkeys(QUANTITIES, log_probs), gradients)


@dataclass(frozen=True)
class Pair:
    """The times of both sides."""

    plain: Timing
    shared: Timing

    @property
    def clock(self) -> str:
        """ "wall", or "cpu" where a side had to wait for its core."""
        return clock_for((self.plain, self.shared))

    @property
    def speed_up(self) -> float:
        """Times faster with sharing."""
        return self.plain.by(self.clock) / self.shared.by(self.clock)


class Contestants:
    """The plain and the shared model, with the same parameters."""

    def __init__(self, subject: Subject):
        self.subject = subject
        model = subject.build()
        # A copy of the modules alone: what they hold in parameters and buffers stays one.
        tensors = [*model.parameters(), *model.buffers()]
        shared = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
        install(shared, subject.attn_implementation)
        self.plain = Contestant(PLAIN, model, plain_log_probs)
        self.shared = Contestant(SHARED, shared, shared_log_probs)

    @property
    def both(self) -> tuple[Contestant, Contestant]:
        """In the order of all pairs."""
        return self.plain, self.shared

    def batch(self, shape: Shape) -> Batch:
        """The one that is compared and timed at this shape."""
        return Batch.random(shape, text_tokens(self.subject.config), self.subject.device)

    def compare(self, batch: Batch) -> tuple[Difference, ...]:
        """Of both calls; the warm-up, too. In 16 bits as errors against `WIDE`, see `zorro_verl.equivalence`."""
        model = self.plain.model
        wide = None if model.dtype in TOLERANCES else wide_outcome(model, batch)
        plain, shared = (contestant.outcome(batch) for contestant in self.both)
        plain.check_finite()
        return tuple(Comparison(NamedRows(batch.rows), model).differences(plain, shared, wide))

    def time(self, call: str, batch: Batch, effort: Effort) -> Pair:
        """One of `CALLS`, by turns."""
        watch = stopwatch if self.subject.device == "cpu" else cuda_stopwatch
        return Pair(*time_interleaved([contestant.ready(call, batch) for contestant in self.both], effort, watch))

    def peak(self, contestant: Contestant, batch: Batch) -> int:
        """Most bytes of one update above weights and gradients, on a GPU."""
        update = contestant.ready("update", batch)
        update()  # leaves the gradients
        return peak_allocated(update)


def peak_on_host(subject: Subject, name: str, shape: Shape) -> int | None:
    """The same on a CPU, in a process of its own; None where the system has no count."""
    return in_own_process(_peak_resident, subject, name, shape)


def _peak_resident(subject: Subject, name: str, shape: Shape) -> int | None:
    contestants = Contestants(subject)
    contestant = next(one for one in contestants.both if one.name == name)
    # What is loaded once is no part of an update, nor are the gradients it leaves.
    contestant.ready("update", contestants.batch(WARM_UP))()
    return peak_resident(contestant.ready("update", contestants.batch(shape)))


@dataclass(frozen=True)
class Result:
    """Of one shape.

    Attributes:
        bound: floating-point operations of the plain model over those of the shared one.
        differences: between the two, by quantity.
        log_prob, update: times of a forward alone and of forward + backward; None where results differ.
        peaks: bytes of one update above weights and gradients, plain and shared; None where nothing was measured.
    """

    shape: Shape
    bound: float
    differences: tuple[Difference, ...]
    log_prob: Pair | None = None
    update: Pair | None = None
    peaks: tuple[int | None, int | None] = (None, None)

    @property
    def equal(self) -> bool:
        """Whether both sides compute the same."""
        return all(difference.equal for difference in self.differences)

    def as_json(self) -> dict[str, Any]:
        """Everything, for `json.dump`."""
        calls = {call: self._times(getattr(self, call)) for call in CALLS}
        return {
            **asdict(self.shape),
            "tokens": {"padded": self.shape.tokens_padded, "packed": self.shape.tokens_packed},
            "token_ratio": self.shape.token_ratio,
            "flop_bound": self.bound,
            "equal": self.equal,
            "differences": [_difference(difference) for difference in self.differences],
            **calls,
            "peak_bytes": dict(zip((PLAIN, SHARED), self.peaks, strict=True)),
        }

    def _times(self, pair: Pair | None) -> dict[str, Any] | None:
        if pair is None:
            return None
        found = {"plain_s": asdict(pair.plain), "shared_s": asdict(pair.shared), "clock": pair.clock}
        return found | {"speed_up": pair.speed_up, "share_of_bound": pair.speed_up / self.bound}


def _difference(difference: Difference) -> dict[str, Any]:
    """What is not a number is None, which JSON has."""
    found = {name: getattr(difference, name) for name in ("quantity", "tolerance", "measure", "where", "equal")}
    return found | {"worst": difference.worst if math.isfinite(difference.worst) else None}


@dataclass(frozen=True)
class Report:
    """What was timed, and what came out.

    Attributes:
        model: what it was called.
        model_class, model_type, hidden_size, vocabulary: of the model that was timed.
        layers, layers_of_model: how many were timed, and how many the model has.
        weights: "random" or "the checkpoint's".
        dtype, device: what it ran with.
        attention: what the shared side's attention ran on; the plain side's is sdpa.
        method: what was timed, and how often.
        oracle: the arithmetic that both sides were compared with, None when with each other.
        results: a shape each.
    """

    model: str
    model_class: str
    model_type: str
    hidden_size: int
    vocabulary: int
    layers: int
    layers_of_model: int
    weights: str
    dtype: str
    device: str
    attention: str
    method: str
    oracle: str | None
    results: tuple[Result, ...]

    @property
    def equal(self) -> bool:
        """Whether both sides computed the same at every shape."""
        return all(result.equal for result in self.results)

    def as_json(self) -> dict[str, Any]:
        """Everything, for `json.dump`."""
        facts = {name: value for name, value in vars(self).items() if name != "results"}
        return {**facts, "equal": self.equal, "results": [result.as_json() for result in self.results]}


def bench(
    subject: Subject, shapes: Sequence[Shape], effort: Effort, memory: bool = True, track: Track[Any] = untracked
) -> Report:
    """Compare and time a model with sharing and without, shape by shape. A shape whose results differ has no figure.

    Args:
        subject: the model.
        shapes: of the groups.
        effort: for each call at each shape.
        memory: whether to measure the peak of an update, on a CPU in two more processes a shape.
        track: wraps what takes long, given what it is and how many there are.

    Raises:
        ValueError: a model that can't be loaded or trained, an attention that can't run, memory that doesn't suffice.
    """
    with quiet_loading(), _on(subject.device):
        contestants = Contestants(subject)
        trials = [Trial(contestants, shape, effort, memory) for shape in shapes]
        stages = [stage for trial in trials for stage in trial.stages]
        for stage in track(stages, "benchmark", len(stages)):
            stage()
        attention = Sharing(subject.attn_implementation).attention_of(contestants.shared.model)
    text = text_config(subject.config)
    return Report(
        model=subject.name,
        model_class=type(contestants.plain.model).__name__,
        model_type=subject.config.model_type,
        hidden_size=text.hidden_size,
        vocabulary=text.vocab_size,
        layers=text.num_hidden_layers,
        layers_of_model=subject.all_layers,
        weights="random" if subject.weights is None else "the checkpoint's",
        dtype=_name(subject.dtype),
        device=subject.device,
        attention=attention,
        method=f"log_prob: forward alone; update: forward + backward; plain: padded rows, sdpa, head on response rows; "
        f"{effort} of each call",
        oracle=None if subject.dtype in TOLERANCES else _name(WIDE),
        results=tuple(trial.result for trial in trials),
    )


class Trial:
    """One shape in stages: both sides compared, each call timed, the peak of each side.

    After a difference, those that follow do nothing.
    """

    def __init__(self, contestants: Contestants, shape: Shape, effort: Effort, memory: bool):
        self.contestants, self.effort = contestants, effort
        self.result = Result(shape, flop_bound_speedup(contestants.subject.config, [shape.group]), ())
        work: list[Callable[[Batch], Mapping[str, Any]]] = [
            self._compare,
            *(partial(self._time, call) for call in CALLS),
            *[self._peaks] * memory,
        ]
        self.stages = [partial(self._run, stage) for stage in work]

    def _run(self, stage: Callable[[Batch], Mapping[str, Any]]) -> None:
        if not self.result.equal:
            return
        with within_memory(self.result.shape):
            found = stage(self.contestants.batch(self.result.shape))
        self.result = replace(self.result, **found)

    def _compare(self, batch: Batch) -> Mapping[str, Any]:
        return {"differences": self.contestants.compare(batch)}

    def _time(self, call: str, batch: Batch) -> Mapping[str, Any]:
        return {call: self.contestants.time(call, batch, self.effort)}

    def _peaks(self, batch: Batch) -> Mapping[str, Any]:
        subject, both = self.contestants.subject, self.contestants.both
        if subject.device == "cpu":
            return {"peaks": tuple(peak_on_host(subject, one.name, self.result.shape) for one in both)}
        return {"peaks": tuple(self.contestants.peak(one, batch) for one in both)}


@contextmanager
def within_memory(shape: Shape) -> Iterator[None]:
    """Within this context, what says that memory did not suffice becomes a ValueError that says at which shape."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not (out_of_memory(error) or isinstance(error, MemoryError)):
            raise
        reason = " ".join(str(error).split())
        raise ValueError(
            f"shape={shape}: out of memory; expected a smaller --shape, fewer --layers or a narrower --dtype "
            f"({reason:.160})"
        ) from error


def _on(device: str) -> AbstractContextManager[Any]:
    """The current GPU is the device."""
    return nullcontext() if device == "cpu" else torch.cuda.device(device)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
