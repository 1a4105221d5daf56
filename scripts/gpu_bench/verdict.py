"""What a case's figures say: speed-up, share of the bound, and whether speed and memory meet their targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from gpu_bench.contest import SHARE_OF_BOUND, SHARE_OF_RATIO, SPEED_ALONE, Case, Entry
from measuring import verdict


@dataclass(frozen=True)
class Outcome:
    """A case and how its contestants fared.

    Attributes:
        wrong: why nothing was timed; empty when ours agree.
    """

    case: Case
    entries: Sequence[Entry]
    wrong: str

    @property
    def baseline(self) -> Entry | None:
        """What times are compared with: the stock model on the whole batch, or on a row at a time."""
        return next((e for e in self.entries if e.role in ("baseline", "stand-in") and e.seconds is not None), None)

    @property
    def ours(self) -> Entry | None:
        """The fastest of ours."""
        timed = [entry for entry in self.entries if entry.role == "ours" and entry.seconds is not None]
        return min(timed, key=lambda entry: entry.seconds, default=None)

    def speed_up(self, entry: Entry) -> float | None:
        if self.baseline is None or entry.seconds is None:
            return None
        return self.baseline.seconds / entry.seconds

    def share_of_bound(self, entry: Entry) -> float | None:
        speed_up = self.speed_up(entry)
        return None if speed_up is None or entry.role in ("baseline", "stand-in") else speed_up / self.case.bound

    @property
    def speed(self) -> str:
        """ "met", "MISSED", or why it can't be said."""
        if not self.case.has_target:
            return "no target"
        if self.ours is None or self.baseline is None:
            return "not measured"
        if self.case.token_ratio == 1:
            return verdict(self.speed_up(self.ours) >= SPEED_ALONE)
        return verdict(self.share_of_bound(self.ours) >= SHARE_OF_BOUND)

    @property
    def memory(self) -> str:
        """The same of the bytes of activations. A baseline that did not fit needs more than there was."""
        if not self.case.has_target:
            return "no target"
        whole = next(entry for entry in self.entries if entry.role == "baseline")
        ours = self.ours
        if ours is None or ours.peak is None:
            return "not measured"
        allowance = 1 / (SHARE_OF_RATIO * self.case.token_ratio)
        if whole.peak is not None:
            return verdict(ours.peak <= whole.peak * allowance)
        if whole.status == "not run":
            return "unknown: the baseline does not run"
        if whole.room is not None and ours.peak <= whole.room * allowance:
            return "met"
        return "unknown: the baseline does not fit"

    def as_dict(self) -> dict:
        case = self.case
        return {
            "level": case.level,
            "size": case.size,
            "shape": case.shape,
            "work": case.work,
            "bound": case.bound,
            "token_ratio": case.token_ratio,
            "wrong": self.wrong,
            "speed": self.speed,
            "memory": self.memory,
            "contestants": [self._entry(entry) for entry in self.entries],
        }

    def _entry(self, entry: Entry) -> dict:
        return {
            **asdict(entry),
            "teraflops": entry.teraflops,
            "speed_up": self.speed_up(entry),
            "share_of_bound": self.share_of_bound(entry),
        }
