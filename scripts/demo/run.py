"""`make demo`: GRPO with veRL's own trainer on this machine, once with strategy=zorro, once with the stock fsdp2."""

import argparse
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "scripts"))  # what several programs share

import report  # noqa: E402
import trainer_run  # noqa: E402
import warm_start  # noqa: E402
from run_log import Record, read_generations, samples_of_step, wait_for_dump  # noqa: E402
from terminal import interrupt_once, make_clocked_print  # noqa: E402
from trainer_process import RunFolder, TrainerFailed  # noqa: E402

OK, NOT_LEARNED, FAILED, INTERRUPTED = 0, 1, 2, 130


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Each option has an environment variable, because `make demo STEPS=30` hands its variables on that way."""
    variables = os.environ
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__)
    option = parser.add_argument
    option("--steps", type=int, default=variables.get("STEPS", "20"), help="training steps; also STEPS=")
    option("--out", type=Path, default=variables.get("DEMO_OUT") or REPOSITORY / "demo-out", help="also DEMO_OUT=")
    option("--no-baseline", action="store_true", default=variables.get("BASELINE") == "0", help="also BASELINE=0")
    options = parser.parse_args(arguments)
    if options.steps < 1:
        parser.error(f"STEPS must be at least 1, got {options.steps}")
    return options


def main(options: argparse.Namespace) -> int:
    say = make_clocked_print()
    machine = report.machine()
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    settings = trainer_run.Settings(steps=options.steps)
    material = out / "material"
    warm_start.ensure(material, warm_start.WarmStart(), say)

    zorro_folder = RunFolder(out / "zorro")
    zorro = run_strategy("zorro", settings, material, zorro_folder, say)
    checkpoint = zorro_folder.checkpoints / f"global_step_{settings.steps}"
    if not checkpoint.is_dir():
        raise TrainerFailed(f"main_ppo ended well, but left no checkpoint {checkpoint}")

    stock = None
    if not options.no_baseline:
        budget = zorro.clock[-1]
        say(f"fsdp2: the stock engine, same seeds, for the same {budget:.0f} s of training")
        stock = run_strategy("fsdp2", settings, material, RunFolder(out / "fsdp2"), say, budget)

    runs = [run for run in (zorro, stock) if run]
    result = report.learning(zorro.rewards)
    styles = [
        (name, report.style(read_generations(zorro_folder.validation, step)))
        for name, step in (("before", 0), (f"after step {settings.steps}", settings.steps))
    ]
    comparison = report.compare(zorro, stock) if stock else None
    report.save_plot(runs, out / "reward.png")
    save_summary(out / "summary.json", machine, runs, result, styles, comparison)

    print(f"\n{report.render_plot(runs)}\n\n{report.render_table(zorro, stock)}\n")
    if comparison:
        print(f"{report.render_comparison(comparison)}\n")
    print("What was learned (fresh draws of the same 100 facts; no prompt shows its own answer):")
    print(f"{report.render_styles(styles)}\n")
    print(report.render_learning(result))
    print(f"\nMachine    {machine}")
    print(f"Checkpoint {checkpoint}\nFigure     {out / 'reward.png'}\nNumbers    {out / 'summary.json'}")
    say("done")
    return NOT_LEARNED if result.can_be_judged and not result.happened else OK


def run_strategy(
    strategy: str,
    settings: trainer_run.Settings,
    material: Path,
    folder: RunFolder,
    say: Callable[[str], None],
    budget: float | None = None,
) -> report.Run:
    """Trains and shows a line a step; with a budget it stops after the step in which that many seconds were reached."""
    run = report.Run(strategy, [], [])

    def on_record(record: Record) -> None:
        if not record.is_training_step:
            say(f"{strategy}: validation reward {record.validation_reward:.3f} before training")
            return
        wait_for_dump(folder.rollouts, record.step, settings.prompts * settings.rollouts)
        run.steps.append(record)
        run.samples.append(samples_of_step(folder.rollouts, record))
        say(progress_line(strategy, record, settings.steps))

    def enough(records: list[Record]) -> bool:
        return budget is not None and bool(run.steps) and run.clock[-1] >= budget

    say(f"{strategy}: starting Ray and {settings.ranks} FSDP2 ranks (a minute); all that they print is in {folder.log}")
    trainer_run.train(strategy, settings, material, folder, on_record, enough)
    return run


def progress_line(strategy: str, record: Record, steps: int) -> str:
    line = f"{strategy}: step {record.step:>2}/{steps}  reward {record.reward:.3f}  {record.seconds:5.1f} s"
    ratio = record.values.get("zorro/token_ratio")
    if ratio is not None:
        line += f"  zorro/token_ratio {ratio:.2f}"
    if record.validation_reward is not None:
        line += f"  validation reward {record.validation_reward:.3f}"
    return line


def save_summary(
    path: Path,
    machine: str,
    runs: list[report.Run],
    result: report.Learning,
    styles: list[tuple[str, report.Style]],
    comparison: report.Comparison | None,
) -> None:
    """Every number of the report, for scripts."""
    summary = {
        "machine": machine,
        "learning": asdict(result),
        "style": {name: asdict(style) for name, style in styles},
        "comparison": comparison and asdict(comparison),
        "runs": {
            run.strategy: {"clock": run.clock, "steps": [{"step": step.step, **step.values} for step in run.steps]}
            for run in runs
        },
    }
    path.write_text(json.dumps(summary, indent=1))


if __name__ == "__main__":
    options = parse_arguments()
    interrupt_once()
    os.environ.setdefault("MPLCONFIGDIR", str(options.out / "matplotlib"))
    try:
        sys.exit(main(options))
    except TrainerFailed as error:
        print(f"\n{error}", file=sys.stderr)
        sys.exit(FAILED)
    except KeyboardInterrupt:
        print("\ninterrupted; nothing is left running")
        sys.exit(INTERRUPTED)
