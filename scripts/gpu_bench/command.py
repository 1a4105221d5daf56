"""The command: its options, the run, and its exit code."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from gpu_bench.batch import Batch, groups_of
from gpu_bench.contest import Budget, check_precision, run_case
from gpu_bench.device import Device
from gpu_bench.models import CHECKPOINTED, ModelLevel
from gpu_bench.report import optional_versions, precision_lines, settings, table
from gpu_bench.schedule import ASSUMED_RATE, ASSUMED_START, LEVELS, SMALL_GROUPS, TINY_GROUPS, Piece, pieces
from gpu_bench.sizes import SIZES
from gpu_bench.verdict import Outcome
from measuring import P_R_N, as_argument, command_line, count, duration, write_json

from zorro_verl.attention_kernels import ATTENTION_IMPLEMENTATIONS
from zorro_verl.log_probs import LOGITS_OPTIMIZATIONS
from zorro_verl.measuring import Effort, Shape, environment

SCRIPT = Path(__file__).resolve().parent.parent / "bench_gpu.py"
GRACE = 60.0  # seconds that the engine level's process may take beyond its budget: it starts, and a case ends
SHAPES = tuple(map(Shape.parse, ("4096,1024,16", "16384,1024,16", "32768,4096,8", "4096,1024,1")))
QUICK_SHAPES = tuple(map(Shape.parse, ("4096,1024,16", "4096,1024,1")))
TINY_SHAPES = tuple(map(Shape.parse, ("48,16,4", "24,8,1")))


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench_gpu.py", description="Sharing prompts on a GPU, beside stock kernels.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="one size, two layers, one shape shared and one not")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and short rows: does the script run?")
    parser.add_argument("--sizes", nargs="+", choices=tuple(SIZES), help="default: 8B 0.6B, with --quick 8B")
    parser.add_argument("--layers", type=int, help="of the models (default: 4, with --quick 2)")
    parser.add_argument("--levels", nargs="+", choices=LEVELS, help="default: all, with --quick all but engine")
    parser.add_argument(
        "--shapes",
        type=as_argument(Shape.parse),
        nargs="+",
        metavar="P,R,n",
        help=f"{P_R_N} (default: {' '.join(map(str, SHAPES))}, with --quick {' '.join(map(str, QUICK_SHAPES))})",
    )
    parser.add_argument(
        "--attention",
        choices=ATTENTION_IMPLEMENTATIONS,
        default="auto",
        help="attn_implementation of the shared model (default: auto)",
    )
    parser.add_argument("--logits-optimization", choices=LOGITS_OPTIMIZATIONS, default="memory", help="of both sides")
    parser.add_argument("--rounds", type=count, default=3, help="least timed runs of each contestant (default: 3)")
    parser.add_argument("--seconds", type=duration, help="when to stop (default: 340, with --quick 110)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results here")
    parser.add_argument("--check", action="store_true", help="exit 1 when a target is missed or left out, too")
    parser.add_argument("--dry-run", action="store_true", help="print what would run and an estimate of its time")
    options = parser.parse_args(argv)
    short = options.quick or options.tiny
    options.levels = options.levels or [level for level in LEVELS if level != "engine" or not options.quick]
    options.sizes = options.sizes or (["tiny"] if options.tiny else ["8B"] if options.quick else ["8B", "0.6B"])
    shapes = TINY_SHAPES if options.tiny else QUICK_SHAPES if options.quick else SHAPES
    options.shapes = tuple(options.shapes or shapes)
    options.layers = options.layers or (2 if short else 4)
    options.seconds = options.seconds or (110.0 if options.quick else 340.0)
    options.effort = Effort(1) if options.tiny else Effort(options.rounds, 0.3)  # short runs vary most
    return options


def scheduled(options: argparse.Namespace) -> Iterator[Piece]:
    return pieces(
        options.levels,
        options.sizes,
        options.layers,
        options.shapes,
        options.device,
        options.attention,
        options.logits_optimization,
    )


def dry_run(options: argparse.Namespace) -> int:
    """The plan of a run, from lengths alone: no model and no batch is built."""
    total = ASSUMED_START
    for piece in scheduled(options):
        seconds = piece.total_estimate(options.effort.rounds)
        total += seconds
        cases = len(piece.shapes) * len(piece.works)
        print(f"{piece.level:6} {piece.label:24} {cases:2} cases, about {seconds:4.0f} s")
    print(
        f"about {total:.0f} s in all on one H200: an estimate, not a measurement, from the operations at "
        f"{ASSUMED_RATE / 1e12:.0f} TFLOP/s; a run stops by itself after {options.seconds:.0f} s"
    )
    return 0


@dataclass
class Run:
    """What has come of a run so far.

    Attributes:
        precision: errors against float32, by level, size and work.
        outcomes: of the cases that had their turn.
        left_out: cases that the time did not hold, or that were not precise.
        not_run: what this machine can't run at all.
        ended: levels that an error ended, with the error.
    """

    device: Device
    effort: Effort
    budget: Budget
    small: list
    precision: list[Outcome] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    not_run: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)

    @property
    def wrong(self) -> list[str]:
        found = [f"{o.case.title}: {o.wrong}" for o in (*self.precision, *self.outcomes) if o.wrong]
        return self.ended + found

    def take(self, piece: Piece) -> None:
        """Errors against float32 first; a level that is not precise gets no time."""
        turns = [(shape, work) for shape in piece.shapes for work in piece.works]
        names = [f"{piece.level}, {piece.label}, P,R,n = {shape}, {work.name}" for shape, work in turns]
        if piece.missing:
            self.not_run += [f"{name}: {piece.missing}" for name in names]
            return
        if self.budget.left <= 0:
            self.left_out += [f"{name}: the time was up" for name in names]
            return
        try:
            self._measure(piece, turns, names)
        except Exception as error:  # as for a contestant: the other pieces go on, and what there is gets written
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            done = {outcome.case.title for outcome in self.outcomes}
            self.not_run += [f"{name}: {reason}" for name in names if name not in done]
            self.ended.append(f"{piece.level}, {piece.label}: {reason}")

    def _measure(self, piece: Piece, turns: list, names: list[str]) -> None:
        self.device.clear()
        level = piece.build()
        try:
            self._measure_level(piece, level, turns, names)
        finally:
            level.close()

    def _measure_level(self, piece: Piece, level, turns: list, names: list[str]) -> None:
        stock_errors, imprecise = self._against_float32(piece, level)
        if imprecise:
            self.left_out += [f"{name}: not precise" for name in names]
            return
        for (shape, work), name in zip(turns, names, strict=True):
            if self.device.is_cuda and self.budget.left <= piece.estimate(shape, work, 1):
                self.left_out.append(f"{name}: the time was up")
                continue
            batch = self._batch(groups_of(shape), piece)
            case = piece.case(level, batch, str(shape), work, stock_errors[work.backward])
            entries, wrong = run_case(case, self.device, self.effort, self.budget)
            self.outcomes.append(Outcome(replace(case, contestants=()), entries, wrong))
            print(table(self.outcomes[-1]), flush=True)
            self.device.clear()

    def _against_float32(self, piece: Piece, level) -> tuple[dict[bool, dict[str, float]], bool]:
        """The stock errors without and with a backward, and whether ours are out of proportion."""
        batch, stock_errors, imprecise = self._batch(self.small, piece), {}, False
        options = {"whole_gradients": True} if isinstance(level, ModelLevel) else {}
        for work in piece.works:
            if work is CHECKPOINTED:  # computes what the update without does
                continue
            case = piece.case(level, batch, "short, ragged", work, **options)
            entries, wrong = check_precision(case, lambda work=work: level.reference(batch, work), self.device)
            self.precision.append(Outcome(replace(case, contestants=()), entries, wrong))
            print(precision_lines(self.precision[-1]), flush=True)
            stock_errors[work.backward] = entries[0].differences
            imprecise = imprecise or bool(wrong)
            self.device.clear()
        return stock_errors, imprecise

    def _batch(self, groups: list, piece: Piece) -> Batch:
        return Batch(groups, piece.config.vocab_size, self.device.type)

    def as_dict(self) -> dict:
        return {
            "precision": [outcome.as_dict() for outcome in self.precision],
            "cases": [outcome.as_dict() for outcome in self.outcomes],
            "left_out": self.left_out,
            "not_run": self.not_run,
            "wrong": self.wrong,
        }


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    if options.dry_run:
        return dry_run(options)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("--device cuda: expected a GPU that torch sees; without one, --device cpu --tiny", file=sys.stderr)
        return 1
    device = Device(options.device)
    surroundings = environment(
        command_line(), "transformers", **device.describe(), **optional_versions(), **settings(options)
    )
    print("\n".join(f"{key}: {value}" for key, value in surroundings.items()), flush=True)
    small = TINY_GROUPS if options.tiny else SMALL_GROUPS
    run = Run(device, options.effort, Budget(options.seconds), small)
    apart = len(options.levels) > 1 and "engine" in options.levels
    for piece in scheduled(options):
        if piece.level != "engine" or not apart:
            run.take(piece)
    found = run.as_dict()
    if apart:
        if options.json:  # whatever becomes of the other process
            write_json(options.json, surroundings | found)
        device.clear()
        for key, more in engine_in_own_process(options, run.budget.left).items():
            found[key] = found[key] + more
    print()
    for key in ("left_out", "not_run"):
        for name in found[key]:
            print(f"{key.replace('_', ' ')}: {name}")
    missed = [case for case in found["cases"] if "MISSED" in (case["speed"], case["memory"])]
    print(f"{len(found['cases'])} cases, {len(missed)} below a target, {len(found['left_out'])} left out")
    if options.json:
        write_json(options.json, surroundings | found)
    for text in found["wrong"]:
        print(text, file=sys.stderr)
    return int(bool(found["wrong"]) or (options.check and bool(missed or found["left_out"])))


def engine_in_own_process(options: argparse.Namespace, seconds: float, grace: float = GRACE) -> dict[str, list]:
    """The engine level's part of the results: veRL and its process group want a process to themselves.

    Args:
        options: of this run.
        seconds: that its cases may take.
        grace: seconds beyond, after which the process is ended.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "engine.json")
        command = [sys.executable, str(SCRIPT), "--levels", "engine", "--device", options.device, "--json", str(path)]
        command += ["--sizes", *options.sizes, "--shapes", *map(str, options.shapes), "--layers", str(options.layers)]
        command += ["--rounds", str(options.rounds), "--seconds", str(max(seconds, 1e-3))]
        command += ["--attention", options.attention, *(["--tiny"] if options.tiny else [])]
        limit = max(seconds, 0.0) + grace
        try:
            code = subprocess.run(command, timeout=limit).returncode
        except subprocess.TimeoutExpired:
            return {"not_run": [f"engine: its process was ended after {limit:.0f} s, the time was up"]}
        if path.exists():
            results = json.loads(path.read_text())
            return {key: results[key] for key in ("precision", "cases", "left_out", "not_run", "wrong")}
    return {"not_run": [f"engine: its process ended with exit code {code}, see above"]}
