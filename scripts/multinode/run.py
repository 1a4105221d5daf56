"""`make demo-multinode`: the long-context recipe in its tiny form on two Ray nodes, one of which is killed on the way.

What runs is `recipes/grpo_qwen3_32b_long_context.sh` with strategy=zorro, on two nodes that `ray start` made in network
namespaces of their own. In the middle of a step the second node is killed. Started again, it joins the cluster, and the
same command goes on from its last checkpoint.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(SCRIPTS), str(SCRIPTS / "recipes")]  # what several programs share

import cluster  # noqa: E402
import network  # noqa: E402
import trainer_process  # noqa: E402
from run_log import MetricsFile, Record, last_error  # noqa: E402
from terminal import interrupt_once, make_clocked_print  # noqa: E402
from tiny_recipe import TinyForm  # noqa: E402

REPOSITORY = SCRIPTS.parent
RECIPE = REPOSITORY / "recipes" / "grpo_qwen3_32b_long_context.sh"
SAVE_EVERY = 2  # steps
LAST_WHOLE_STEP = 3  # before the kill: one more than the checkpoint has
PATIENCE = 100  # seconds that the command is given to end by itself after the kill
FAILED, INTERRUPTED = 2, 130
METRICS = ("zorro/token_ratio", "zorro/token_ratio_best", "zorro/groups_split")

Say = Callable[[str], None]
Nodes = tuple[cluster.Node, cluster.Node]


class DemoFailed(RuntimeError):
    """Something else happened than the demo shows; the message says what."""


@dataclass
class Run:
    """One call of the recipe.

    Attributes:
        folder: its log and metrics.
        records: of the training steps.
        ranks: by the address of their node, as seen after each step.
        exit_code: None while it runs.
        killed_processes: of the second node; 0 when it was left alone.
        seconds_to_end: from the kill to the end of the command; None where it had to be interrupted.
    """

    folder: trainer_process.RunFolder
    records: list[Record] = field(default_factory=list)
    ranks: dict[str, list[int]] = field(default_factory=dict)
    exit_code: int | None = None
    killed_processes: int = 0
    seconds_to_end: float | None = None

    @property
    def error(self) -> str:
        """The end of its log."""
        return last_error(self.folder.log)

    @property
    def named_error(self) -> str:
        """Of Ray: the last exception in the log, by its name."""
        names = re.findall(r"^ray\.exceptions\.(\w+)", self.error, re.MULTILINE)
        return names[-1] if names else ""

    @property
    def end(self) -> str:
        """How the command ended after a kill."""
        if self.seconds_to_end is None:
            return f"the command still waited {PATIENCE} s later for what was on that node, and was interrupted"
        return (
            f"the command ended {self.seconds_to_end:.0f} s later with exit code {self.exit_code}"
            f"{', ' + self.named_error if self.named_error else ''}"
        )

    @property
    def last_lines(self) -> list[str]:
        """Of the error; or what Ray said of the node where there was none."""
        if self.seconds_to_end is not None:
            return self.error.splitlines()[-6:]
        return [line for line in self.folder.log.read_text(errors="replace").splitlines() if "marked dead" in line]

    def summary(self) -> dict[str, object]:
        steps = [
            {"step": each.step, "reward": each.reward, "seconds": each.seconds} | {name: each[name] for name in METRICS}
            for each in self.records
        ]
        found = {"exit_code": self.exit_code, "ranks": self.ranks, "steps": steps, "log": str(self.folder.log)}
        if self.killed_processes:
            found |= {"killed_processes": self.killed_processes, "seconds_to_end": self.seconds_to_end}
            found |= {"named_error": self.named_error, "last_lines": self.last_lines}
        return found


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Two have an environment variable, because `make demo-multinode STEPS=6` hands its variables on that way."""
    variables = os.environ
    parser = argparse.ArgumentParser(
        prog="make demo-multinode", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    option = parser.add_argument
    option("--steps", type=int, default=variables.get("STEPS", "4"), help="training steps; also STEPS=")
    option("--out", type=Path, default=variables.get("DEMO_OUT") or REPOSITORY / "demo-out", help="also DEMO_OUT=")
    option("--ranks", type=int, default=1, help="of each node; from 2 on, rows are sliced over two of them")
    option("--no-kill", action="store_true", help="train to the end undisturbed")
    options = parser.parse_args(arguments)
    least = 1 if options.no_kill else LAST_WHOLE_STEP + 1
    if options.steps < least:
        parser.error(f"STEPS must be at least {least}, got {options.steps}")
    return options


def main(options: argparse.Namespace, say: Say) -> None:
    folder = options.out.resolve() / "multinode"
    shutil.rmtree(folder, ignore_errors=True)  # the recipe would go on from a checkpoint of an earlier demo
    form = TinyForm(RECIPE, folder, steps=options.steps, nodes=2, ranks=options.ranks)
    form.prepare()
    variables = cluster.with_token(trainer_process.environment(form.run_folder, mark=""))
    with network.two_places(say) as places:
        say("`ray start` on both")
        with cluster.two_nodes(places, form.ranks, variables) as nodes:
            runs = train_twice(form, nodes, say) if not options.no_kill else [train(form, nodes, "whole", say)]
            report = {
                "nodes": [{"address": place.address, "namespace": place.namespace} for place in places],
                "runs": [run.summary() for run in runs],
            }
    path = folder / "summary.json"
    path.write_text(json.dumps(report, indent=1))
    print(f"\n{summary(runs)}\n")
    print(f"Checkpoint {form.run_folder.checkpoints / f'global_step_{form.steps}'}\nNumbers    {path}")
    say("done")


def train_twice(form: TinyForm, nodes: Nodes, say: Say) -> list[Run]:
    """With the second node killed on the way, and from the last checkpoint to the end.

    Raises:
        DemoFailed: the first run ended well, or the second one did not go on from the checkpoint.
    """
    second = nodes[1]
    first = train(form, nodes, "killed", say, kill_after=LAST_WHOLE_STEP)
    say(f"{first.end}. Its last lines:")
    print("\n".join(f"        {line}" for line in first.last_lines))
    say(f"This says that a node is gone, not why: on {second.place.address} see the system's log, and Ray's in")
    print(f"        {second.folder}/session_latest/logs/raylet.out, which is gone with a machine that is gone")
    second.start()
    say(f"{second.place.address} has joined again. The same command:")
    resumed = train(form, nodes, "resumed", say)
    expected = LAST_WHOLE_STEP // SAVE_EVERY * SAVE_EVERY + 1
    if resumed.records[0].step != expected:
        raise DemoFailed(f"expected the second run to go on with step {expected}, got step {resumed.records[0].step}")
    return [first, resumed]


def train(form: TinyForm, nodes: Nodes, name: str, say: Say, kill_after: int | None = None) -> Run:
    """The recipe as on any cluster: started once, on the head.

    Args:
        form: prepared.
        nodes: where it runs, the head first.
        name: of the folder for its log.
        say: is given a line for each step.
        kill_after: the step after which the second node is killed, in the middle of the next one.

    Raises:
        DemoFailed: its exit code is not 0, or is 0 although a node was killed.
    """
    head, second = nodes
    run = Run(trainer_process.RunFolder(form.run_folder.path / name))
    run.folder.path.mkdir(parents=True)
    mark = uuid.uuid4().hex
    variables = trainer_process.environment(run.folder, mark) | form.variables | {"RAY_ADDRESS": head.address}
    variables |= {key: value for key, value in head.variables.items() if key.startswith("RAY_AUTH_")}
    command = [*head.place.enter, "bash", str(form.recipe), *form.overrides(), *overrides(form, run.folder)]
    say(
        f"the recipe on {head.place.address} (a minute until its first step); all that it prints is in {run.folder.log}"
    )
    with run.folder.log.open("w") as log:
        process = subprocess.Popen(
            command,
            cwd=run.folder.path,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            for record in trainer_process.follow(process, MetricsFile(run.folder.metrics)):
                run.records.append(record)
                run.ranks = {node.place.address: node.ranks() for node in nodes}
                say(progress_line(record, form.steps, run.ranks))
                if record.step == kill_after:
                    time.sleep(record.seconds / 2)
                    run.killed_processes, killed_at = second.kill(), time.monotonic()
                    say(f"{second.place.address} is killed in the middle of step {record.step + 1}")
                    with contextlib.suppress(subprocess.TimeoutExpired):  # it may wait for what was on that node
                        process.wait(PATIENCE)
                        run.seconds_to_end = time.monotonic() - killed_at
                    break
        finally:
            trainer_process.end(process, mark)
    run.exit_code = process.returncode
    killed = run.killed_processes > 0
    if (run.exit_code != 0) != killed or killed != (kill_after is not None):
        raise DemoFailed(f"the recipe ended with exit code {run.exit_code}; {run.folder.log} ends with:\n\n{run.error}")
    return run


def overrides(form: TinyForm, folder: trainer_process.RunFolder) -> list[str]:
    """Behind the tiny form's own: checkpoints to go on from, and rows whole where a node has one rank."""
    whole_rows = ["actor_rollout_ref.actor.ulysses_sequence_parallel_size=1"] if form.ranks == 1 else []
    # veRL's task runner reads it, which has its node's environment and not that of this command.
    variable = f"++ray_kwargs.ray_init.runtime_env.env_vars.VERL_FILE_LOGGER_PATH={folder.metrics}"
    return [variable, f"trainer.save_freq={SAVE_EVERY}", "trainer.resume_mode=auto", *whole_rows]


def progress_line(record: Record, steps: int, ranks: dict[str, list[int]]) -> str:
    places = ", ".join(f"{' '.join(map(str, found))} on {address}" for address, found in ranks.items())
    return (
        f"step {record.step}/{steps}  reward {record.reward:.3f}  token_ratio {record['zorro/token_ratio']:.2f} of "
        f"{record['zorro/token_ratio_best']:.2f}  groups_split {record['zorro/groups_split']:.0f}  ranks {places}"
    )


def summary(runs: list[Run]) -> str:
    """The demo in a few lines."""
    ratios = [record["zorro/token_ratio"] for run in runs for record in run.records]
    cut = sum(record["zorro/groups_split"] for run in runs for record in run.records)
    lines = [f"Sharing    token ratio {min(ratios):.2f} to {max(ratios):.2f}; {cut:.0f} groups cut between ranks"]
    if len(runs) == 2:
        first, resumed = runs
        lost = first.records[-1].step - resumed.records[0].step + 1
        lines += [
            f"Killed     {first.killed_processes} processes; {first.end}",
            f"Resumed    with step {resumed.records[0].step}: finished steps that had to be computed again: {lost}",
        ]
    return "\n".join(lines)


if __name__ == "__main__":
    options = parse_arguments()
    interrupt_once()
    try:
        main(options, make_clocked_print())
    except (DemoFailed, cluster.NodeFailed) as error:
        print(f"\n{error}", file=sys.stderr)
        sys.exit(FAILED)
    except KeyboardInterrupt:
        print("\ninterrupted; all processes have been ended", file=sys.stderr)
        sys.exit(INTERRUPTED)
