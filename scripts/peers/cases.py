"""What contestants are measured on: the groups of a batch, and the most that sharing prompts can save on them."""

from __future__ import annotations

from dataclasses import dataclass

from bench_cpu import CONFIG, SHAPES

from zorro_verl.flops import flop_bound_speedup
from zorro_verl.measuring import Shape


@dataclass(frozen=True)
class Case:
    """The groups of one batch: each prompt's length, and the lengths of its responses."""

    name: str
    groups: tuple[tuple[int, tuple[int, ...]], ...]

    @classmethod
    def parse(cls, text: str) -> Case:
        """``"512,64,8"`` as `Shape.parse`, or ``"ragged"``."""
        if text == RAGGED.name:
            return RAGGED
        prompt, responses = Shape.parse(text).group
        return cls(text, ((prompt, tuple(responses)),))

    @property
    def padded(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """The same rows at the batch's width."""
        width = max(prompt for prompt, _ in self.groups)
        length = max(max(responses) for _, responses in self.groups)
        return tuple((width, (length,) * len(responses)) for _, responses in self.groups)

    @property
    def bound(self) -> float | None:
        """Multiplications of the plain model over those of what shares every prompt; None where rows are padded.

        Under a padding mask the plain model multiplies pairs that no model needs, so that nothing would bound it.
        """
        return flop_bound_speedup(CONFIG, self.groups) if self.padded == self.groups else None

    @property
    def token_ratio(self) -> float:
        padded = sum(prompt * len(responses) + sum(responses) for prompt, responses in self.padded)
        return padded / sum(prompt + sum(responses) for prompt, responses in self.groups)


RAGGED = Case(
    "ragged",
    (
        (512, (128, 40, 96, 17, 64, 120, 33, 80)),
        (300, (50, 128, 22, 75, 101, 64, 90, 12)),
        (410, (99, 31, 60, 128, 45, 84, 70, 26)),
        (350, (64, 110, 128, 20, 38, 93, 57, 72)),
    ),
)

CASES = (*(Case.parse(str(shape)) for shape in SHAPES), RAGGED)
