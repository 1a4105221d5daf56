"""A step's metrics in verl's own loggers, read back: console, tensorboard, wandb offline, file."""

import json
import struct

import numpy
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_throughput import documented_metrics
from test_updates import WHOLE, config, legacy_step, trainer_of
from tiny_run import logged_steps

pytestmark = pytest.mark.timeout(120)


def steps():
    """Two steps of verl's trainer with every documented metric, and no two values alike."""
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer
    from verl.utils.metric import reduce_metrics

    step = reduce_metrics(legacy_step(trainer_of(RayPPOTrainer, config(), WHOLE), scoring=True))
    assert set(documented_metrics()) == {name for name in step if name.startswith("zorro/")}
    ours = {name: value + 1 / (3 + i) for i, (name, value) in enumerate(step.items())}
    return [step | ours, {name: 7 * value for name, value in ours.items()}]


def wandb_history(path):
    """Metrics by step from a run's records: blocks of 32 KiB after 7 bytes, each with crc, length, type."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, place, parts, history = path.read_bytes(), 7, b"", {}
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768  # no room for a record: zeros up to the next block
            continue
        length, kind = struct.unpack_from("<HB", data, place + 4)
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record, parts = Record.FromString(parts), b""
            for item in record.history.item:
                name = item.key or "/".join(item.nested_key)
                history.setdefault(record.history.step.num, {})[name] = json.loads(item.value_json)
    return history


def test_what_verls_loggers_wrote_is_what_the_step_said(tmp_path, monkeypatch, capsys):
    from verl.utils.tracking import Tracking

    for name, value in {
        "TENSORBOARD_DIR": f"{tmp_path}/events",
        "VERL_FILE_LOGGER_PATH": f"{tmp_path}/metrics.jsonl",
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(tmp_path),
        "WANDB_SILENT": "true",
    }.items():
        monkeypatch.setenv(name, value)
    logged = steps()
    tracking = Tracking("project", "run", ["console", "tensorboard", "wandb", "file"], config={"trainer": {}})
    for number, step in enumerate(logged, start=1):
        tracking.log(data=step, step=number)
    tracking.finish()

    console = logged_steps(capsys.readouterr().out)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
    (run,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    history = wandb_history(run)
    events = EventAccumulator(str(tmp_path / "events")).Reload()
    for number, step in enumerate(logged, start=1):
        for name in documented_metrics():
            assert console[number - 1][name] == step[name]
            assert lines[number - 1]["data"][name] == step[name]
            assert history[number][name] == step[name]
            scalars = {event.step: event.value for event in events.Scalars(name)}
            assert scalars[number] == numpy.float32(step[name]), "which is all that tensorboard holds"
