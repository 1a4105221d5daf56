"""One run of veRL's trainer as a process: started in its own folder, followed step by step, ended with all it began.

Whatever the command, it carries a mark in its environment that every descendant inherits, by which they are found.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from run_log import MetricsFile, Record, last_error

RUN_MARK = "ZORRO_RUN"


@dataclass(frozen=True)
class RunFolder:
    """Where one run leaves what it leaves."""

    path: Path

    @property
    def log(self) -> Path:
        return self.path / "console.log"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def rollouts(self) -> Path:
        return self.path / "rollouts"

    @property
    def validation(self) -> Path:
        return self.path / "validation"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"


class TrainerFailed(RuntimeError):
    """main_ppo ended with an error; the message holds the end of its log."""


def environment(folder: RunFolder, mark: str) -> dict[str, str]:
    """This process's environment without what would lead to another Ray cluster or to the network."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "RAY_NAMESPACE")}
    return inherited | {
        RUN_MARK: mark,
        "VERL_FILE_LOGGER_PATH": str(folder.metrics),
        "HYDRA_FULL_ERROR": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",
        "PYTHONUNBUFFERED": "1",
    }


def run(
    command: Sequence[str],
    folder: RunFolder,
    on_record: Callable[[Record], None],
    enough: Callable[[list[Record]], bool] = lambda records: False,
    variables: Mapping[str, str] | None = None,
) -> list[Record]:
    """Runs a trainer's command to its end, or until `enough` says so; what it started is gone afterwards.

    Args:
        command: ends in a run of ``verl.trainer.main_ppo`` whose logger includes ``file``.
        folder: emptied first.
        on_record: called with each step's metrics as they are written.
        enough: called with all records so far; True ends the run.
        variables: of the environment, beside those of `environment`.

    Raises:
        TrainerFailed: the command ended with another exit code than 0.
    """
    shutil.rmtree(folder.path, ignore_errors=True)
    folder.path.mkdir(parents=True)
    mark = uuid.uuid4().hex
    records: list[Record] = []
    with folder.log.open("w") as log:
        process = subprocess.Popen(
            command,
            cwd=folder.path,
            env=environment(folder, mark) | (variables or {}),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            for record in follow(process, MetricsFile(folder.metrics)):
                records.append(record)
                on_record(record)
                if enough(records):
                    return records
        finally:
            end(process, mark)
    if process.returncode != 0:
        raise TrainerFailed(
            f"{Path(command[0]).name} ... ended with exit code {process.returncode}. The end of its log, all of which "
            f"is in {folder.log}:\n\n{last_error(folder.log)}"
        )
    return records


def follow(process: subprocess.Popen, metrics: MetricsFile) -> Iterator[Record]:
    """Records as they are written; ends when the process has ended."""
    while process.poll() is None:
        yield from metrics.new_records()
        time.sleep(0.2)
    yield from metrics.new_records()


def end(process: subprocess.Popen, mark: str) -> None:
    """Asks the trainer first, so that Ray takes its own down; then sweeps what still carries this run's mark."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    leftover = processes_marked(mark)
    for each in leftover:
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended meanwhile
            each.terminate()
    for each in psutil.wait_procs(leftover, timeout=5)[1]:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()


def processes_marked(mark: str) -> list[psutil.Process]:
    """By the environment, which every descendant inherits: Ray's workers change their titles, sessions and parents."""
    return [each for each in psutil.process_iter() if has_mark(each, mark)]


def has_mark(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get(RUN_MARK) == mark
    except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
        return False


@contextlib.contextmanager
def temporary_ray_folder() -> Iterator[Path]:
    """A folder for Ray with a short name: it puts sockets there, whose paths may not be longer than 107 bytes."""
    base = tempfile.gettempdir()
    folder = Path(tempfile.mkdtemp(prefix="zorro-", dir=base if len(base) < 30 else "/tmp"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
