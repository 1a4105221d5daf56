"""The head's memory: measured in fresh processes at a real vocabulary, and the benchmark's report."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from bench_head import Head, measure

from zorro_verl.log_probs import CHUNK_BYTES
from zorro_verl.measuring import in_own_process

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "bench_head.py"
ROWS, HIDDEN, VOCABULARY = 640, 16, 151936
LOGITS, WEIGHT = 4 * ROWS * VOCABULARY, 4 * HIDDEN * VOCABULARY
SLACK = 32 << 20  # what the allocator and the thread pool keep


def run(*arguments):
    command = [sys.executable, SCRIPT, *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)


def peak(mode):
    found = in_own_process(measure, mode, Head(ROWS, HIDDEN, VOCABULARY), 1).peak_bytes
    if found is None:
        pytest.skip("this system has no high-water mark of a process")
    return found


def test_memory_mode_is_bounded_by_its_chunk():
    """Three chunks at once, the logits and two more of the softmax, and the gradient of the weight."""
    bound = 3 * CHUNK_BYTES + WEIGHT + SLACK
    assert bound < LOGITS, "the bound would not tell"
    assert peak("memory") <= bound


def test_without_it_all_logits_are_there_at_once():
    assert peak("none") > LOGITS


@pytest.mark.slow
def test_the_report(tmp_path):
    path = tmp_path / "out.json"
    sizes = ("--rows", 40, "--hidden", 8, "--vocabulary", 997, "--rounds", 1)
    finished = run(*sizes, "--json", path)
    assert finished.returncode == 0, finished.stderr
    assert [line.split(" | ")[0] for line in finished.stdout.splitlines()[-3:]] == ["| none", "| compute", "| memory"]
    report = json.loads(path.read_text())
    assert report["difference"] <= 2e-5
    assert all(report[key] for key in ("hardware", "versions", "command", "load"))
    assert report["modes"].keys() == {"none", "compute", "memory"}
