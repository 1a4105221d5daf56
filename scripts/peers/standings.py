"""The results of one case as a table, and as what JSON holds."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from measuring import markdown_header, markdown_row, number
from peers.cases import Case
from peers.race import Result

from zorro_verl.measuring import clock_for


@dataclass(frozen=True)
class Standings:
    """The results of one case."""

    case: Case
    results: tuple[Result, ...]

    @property
    def clock(self) -> str:
        return clock_for([result.timing for result in self.results if result.timing])

    def seconds(self, result: Result) -> float | None:
        return result.timing and result.timing.by(self.clock)

    def speed_up(self, result: Result) -> float | None:
        baseline = next(other for other in self.results if other.contestant.name == result.contestant.baseline)
        if result.timing is None or baseline.timing is None or baseline is result:
            return None
        return self.seconds(baseline) / self.seconds(result)

    def of_bound(self, result: Result) -> float | None:
        speed_up, bound = self.speed_up(result), self.case.bound
        return None if speed_up is None or bound is None else speed_up / bound

    def as_dict(self) -> dict:
        return {
            "shape": self.case.name,
            "groups": self.case.groups,
            "token_ratio": self.case.token_ratio,
            "flop_bound": self.case.bound,
            "clock": self.clock,
            "contestants": [
                {
                    "name": result.contestant.name,
                    "status": result.status,
                    "seconds": self.seconds(result),
                    "speed_up": self.speed_up(result),
                    "of_bound": self.of_bound(result),
                    "peak_bytes": result.peak_bytes,
                    "difference": result.from_baseline and asdict(result.from_baseline),
                    "difference_from_plain": result.from_plain and asdict(result.from_plain),
                }
                for result in self.results
            ],
        }


COLUMNS = ("contestant", "seconds", "speed-up", "of bound", "peak MiB", "max diff log-prob, gradient", "status")


def table(standings: Standings) -> str:
    case = standings.case
    numbers = f"token ratio {case.token_ratio:.2f}, FLOP bound {number(case.bound, '.2f')}, {standings.clock} clock"
    lines = [f"P, R, n = {case.name}: {numbers}", "", markdown_header(COLUMNS)]
    for result in standings.results:
        difference, peak = result.from_plain, result.peak_bytes
        cells = (
            result.contestant.name,
            number(standings.seconds(result), ".3f"),
            number(standings.speed_up(result), ".2f"),
            number(standings.of_bound(result), ".0%"),
            number(peak and peak / 2**20, ".0f"),
            f"{difference.log_prob:.0e}, {difference.gradient:.0e}" if difference else "-",
            result.status,
        )
        lines.append(markdown_row(cells))
    return "\n".join(lines)
