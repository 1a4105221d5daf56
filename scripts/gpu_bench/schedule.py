"""What is run, in which order, and about how long it takes."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from gpu_bench import attention, head
from gpu_bench.attention import AttentionLevel
from gpu_bench.batch import Batch, groups_of
from gpu_bench.contest import LONG_ROUND, Case
from gpu_bench.head import HeadLevel
from gpu_bench.models import (
    CHECKPOINTED,
    COMPUTE_LOG_PROB,
    ENGINE_LOG_PROB,
    ENGINE_UPDATE,
    UPDATE_ACTOR,
    ModelLevel,
    Work,
)
from gpu_bench.sizes import config_of
from gpu_bench.work import Group, operations
from transformers import PretrainedConfig

from zorro_verl.measuring import Shape

LEVELS = ("model", "layer", "op", "head", "engine")  # in the order of what matters most, should the time be up
LAYER_VOCABULARY = 1024  # the layer level embeds tokens, and has no head
SMALL_GROUPS: list[Group] = [(320, [96, 128, 64, 80]), (200, [90]), (512, [128, 128])]  # against float32
TINY_GROUPS: list[Group] = [(40, [24, 32, 20]), (24, [30]), (64, [24, 24])]

# Estimates, for the plan of a run before there are figures: nothing of it was measured.
ASSUMED_RATE = 4.5e14  # operations a second: less than matrix products reach on an H200, more than flash attention 2
ASSUMED_CASE = 0.3  # seconds: the batch, the host, runs too small to fill the GPU
ASSUMED_START = 20.0  # imports and CUDA
ASSUMED_PIECE = {
    "model": 5.0,
    "layer": 2.0,
    "op": 25.0,
    "head": 10.0,
    "engine": 35.0,
}  # float32 comparisons, and what is compiled
ASSUMED_OURS = {"model": 1, "layer": 1, "op": 3, "head": 7, "engine": 1}  # contestants that do about as much as ours

Level = ModelLevel | AttentionLevel | HeadLevel  # or an EngineLevel, which has the same methods


@dataclass(frozen=True)
class Piece:
    """A level at one size, with all that it does.

    Attributes:
        build: makes the level, when its turn comes: models take memory.
        config: what the level's operations are counted by.
        works: what is timed.
        shapes: at which shapes.
    """

    level: str
    size: str
    build: Callable[[], Level]
    config: PretrainedConfig
    works: tuple[Work, ...]
    shapes: tuple[Shape, ...]

    @property
    def label(self) -> str:
        layers = self.config.num_hidden_layers
        counted = {"model": f", {layers} layers", "layer": ", 1 layer", "engine": f", {layers} layers"}
        return f"Qwen3-{self.size}{counted.get(self.level, '')}"

    @property
    def has_target(self) -> bool:
        """Times of the tiny model say nothing."""
        return self.level in ("model", "layer") and self.size != "tiny"

    @property
    def missing(self) -> str:
        """What would have to be installed for it; empty when nothing is missing."""
        absent = [name for name in ("verl", "tensordict") if importlib.util.find_spec(name) is None]
        return f"{' and '.join(absent)} not installed" if self.level == "engine" and absent else ""

    def case(
        self,
        level: Level,
        batch: Batch,
        shape: str,
        work: Work,
        stock_errors: dict[str, float] | None = None,
        **options: bool,
    ) -> Case:
        """One of its works on one batch."""
        contestants = level.contestants(batch, work, **options)
        least = min(contestant.operations for contestant in contestants if contestant.role == "ours")
        return Case(
            level=self.level,
            size=self.label,
            shape=shape,
            work=work.name,
            contestants=contestants,
            bound=contestants[0].operations / least,
            token_ratio=1.0 if self.level == "head" else batch.token_ratio,
            has_target=self.has_target,
            stock_errors=stock_errors or {},
        )

    def estimate(self, shape: Shape, work: Work, rounds: int) -> float:
        """Seconds of a case on one H200, from its operations."""
        passes = work.passes.without_head() if self.level == "layer" else work.passes
        full, less = (operations(self.config, groups_of(shape), passes, shared) for shared in (False, True))
        if self.level == "op":
            full, less = full / self.config.num_hidden_layers, less / self.config.num_hidden_layers
        once = (full + ASSUMED_OURS[self.level] * less) / ASSUMED_RATE
        return ASSUMED_CASE + (1 + (min(rounds, 2) if once > LONG_ROUND else rounds)) * once

    def total_estimate(self, rounds: int) -> float:
        found = [self.estimate(shape, work, rounds) for shape in self.shapes for work in self.works]
        return ASSUMED_PIECE[self.level] + sum(found)


def pieces(
    levels: Sequence[str],
    sizes: Sequence[str],
    layers: int,
    shapes: tuple[Shape, ...],
    device: str,
    attention_name: str,
    logits_optimization: str,
) -> Iterator[Piece]:
    """All pieces of a run, in the order of `LEVELS` and of the sizes.

    Kernels are compared at the first size alone, and veRL's engines, which write a checkpoint, at the last.
    """
    for name in (name for name in LEVELS if name in levels):
        for size in _SIZES_OF.get(name, lambda sizes: sizes)(sizes):
            yield _PIECES[name](size, layers, shapes, device, attention_name, logits_optimization)


def _model(size, layers, shapes, device, attention_name, logits_optimization) -> Piece:
    config = config_of(size, layers)
    works = (COMPUTE_LOG_PROB, UPDATE_ACTOR, CHECKPOINTED)
    return Piece(
        "model", size, lambda: ModelLevel(config, device, attention_name, logits_optimization), config, works, shapes
    )


def _layer(size, layers, shapes, device, attention_name, logits_optimization) -> Piece:
    config = config_of(size, 1, LAYER_VOCABULARY)
    works = (COMPUTE_LOG_PROB, UPDATE_ACTOR)
    return Piece("layer", size, lambda: ModelLevel(config, device, attention_name, None), config, works, shapes)


def _op(size, layers, shapes, device, *_) -> Piece:
    config = config_of(size, layers)
    works = (attention.FORWARD, attention.FORWARD_BACKWARD)
    return Piece("op", size, lambda: AttentionLevel(config, device), config, works, shapes)


def _head(size, layers, shapes, device, *_) -> Piece:
    config = config_of(size, layers)
    works = (head.FORWARD, head.FORWARD_BACKWARD)
    return Piece("head", size, lambda: HeadLevel(config, device), config, works, shapes[:1])


def _engine(size, layers, shapes, device, attention_name, *_) -> Piece:
    config = config_of(size, layers)

    def build() -> Level:
        from gpu_bench.engine import EngineLevel  # imports what only veRL brings

        return EngineLevel(config, device, attention_name)

    return Piece("engine", size, build, config, (ENGINE_LOG_PROB, ENGINE_UPDATE), shapes[:1])


_SIZES_OF = {
    "op": lambda sizes: sizes[:1],
    "head": lambda sizes: sizes[:1],
    "engine": lambda sizes: sizes[-1:],
}
_PIECES = {"model": _model, "layer": _layer, "op": _op, "head": _head, "engine": _engine}
