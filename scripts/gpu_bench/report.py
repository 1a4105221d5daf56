"""How a run reads in a terminal: where it ran, errors against float32, a table for each case."""

from __future__ import annotations

import argparse
from importlib.metadata import PackageNotFoundError, version

from gpu_bench.comparison import PRECISION, TIMES_STOCK, TOLERANCES
from gpu_bench.contest import LONG_ROUND, Entry
from gpu_bench.verdict import Outcome
from measuring import markdown_header, markdown_row, number

from zorro_verl.measuring import Effort

OPTIONAL = ("triton", "flash-attn", "flash-attn-3", "flash-attn-4", "liger-kernel", "verl")
COLUMNS = ("contestant", "ms", "rounds", "speed-up", "of bound", "TFLOP/s", "peak GiB", "difference", "")


def optional_versions() -> dict[str, str]:
    """What is installed of the libraries that contestants need."""
    found = []
    for package in OPTIONAL:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            found.append(f"no {package}")
    return {"optional": ", ".join(found)}


def settings(options: argparse.Namespace) -> dict[str, str]:
    """What was run, and how."""
    return {
        "models": f"Qwen3 {', '.join(options.sizes)}, {options.layers} layers, bfloat16, random weights",
        "heads": f"logits_optimization={options.logits_optimization} on both sides, on response rows only",
        "method": f"medians over {_rounds(options.effort)}; the host's work counts, from the call to the last kernel's "
        "end; peak: bytes allocated during a run above those before it, where gradients are allocated already; "
        "TFLOP/s: executed multiply-adds count two, of masked attention those that the mask needs",
        "equality": f"error against float32 at most {PRECISION} times the stock one's on short rows; then against the "
        f"baseline at the timed shape, in bfloat16: at most {TOLERANCES}, or {TIMES_STOCK} times the stock error on "
        "short rows, the larger; values as root mean squares, gradients (of the first layer; of all inputs at op "
        "and head level) as a share of their norm",
        "limits": "flash attention 2's backward addresses (tokens + 128 rows) x heads x head size in 32 bits; a "
        "contestant beyond that is not run",
    }


def _rounds(effort: Effort) -> str:
    """How often a case is run; the table says how often it was."""
    fewer = f", {min(effort.rounds, 2)} where a round takes over {LONG_ROUND:g} s"
    more = f" or more, until {effort.seconds:g} s have passed" if effort.seconds else ""
    return f"{effort.rounds} interleaved rounds{more}{fewer}, fewer when the time is up; the table says how many"


def precision_lines(outcome: Outcome) -> str:
    """Every contestant's errors against float32."""
    case = outcome.case
    lines = [f"\nerrors against float32: {case.level}, {case.size}, {case.work}"]
    if outcome.wrong:
        lines.append(f"WRONG: {outcome.wrong}")
    for entry in outcome.entries:
        errors = ", ".join(f"{name} {error:.1e}" for name, error in sorted(entry.differences.items()))
        reason = entry.reason and f"{entry.status}: {entry.reason}"
        lines.append(f"  {entry.name}: {'; '.join(filter(None, (errors, reason)))}")
    return "\n".join(lines)


def table(outcome: Outcome) -> str:
    """A case, a line for each contestant, those that did not run with their reason."""
    case = outcome.case
    bound = (
        f"token ratio {case.token_ratio:.2f}, bound {case.bound:.2f}; speed: {outcome.speed}, memory: {outcome.memory}"
    )
    lines = [f"\n{case.title}", bound]
    if outcome.wrong:
        return "\n".join([*lines, f"WRONG, nothing is timed: {outcome.wrong}"])
    return "\n".join([*lines, markdown_header(COLUMNS), *(_row(outcome, entry) for entry in outcome.entries)])


def _row(outcome: Outcome, entry: Entry) -> str:
    compared = {name: e for name, e in entry.differences.items() if name.endswith(("worst row", "gradients"))}
    worst = max(compared.values(), default=None)
    cells = (
        entry.name,
        number(entry.seconds and entry.seconds * 1e3, ".2f"),
        str(entry.rounds or "-"),
        number(outcome.speed_up(entry), ".2f"),
        number(outcome.share_of_bound(entry), ".0%"),
        number(entry.teraflops, ".0f"),
        number(entry.peak and entry.peak / 2**30, ".2f"),
        number(worst, ".0e"),
        "" if entry.status == "timed" else f"{entry.status}: {entry.reason}",
    )
    return markdown_row(cells)
