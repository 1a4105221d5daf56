"""The CPU benchmark: its bound, its report, and that it refuses to compare models that disagree."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

from zorro_verl import benchmark
from zorro_verl.measuring import Timing

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "bench_cpu.py"


@pytest.fixture(scope="module")
def bench():
    spec = importlib.util.spec_from_file_location("bench_cpu", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    threads = torch.get_num_threads()
    spec.loader.exec_module(module)
    yield module
    torch.set_num_threads(threads)
    del sys.modules[spec.name]


def test_the_bound_counts_linear_layers_attention_and_head(bench):
    """One response of one token on a prompt of one, twice: every number can be counted by hand."""
    shape = bench.Shape(P=1, R=1, n=2)
    linear = 2 * 4 * (256 * 256 * 2 + 256 * 128 * 2 + 3 * 256 * 768)
    attention, head = 4 * 4 * 256, 2 * 256 * 2048 * 2
    padded = 4 * linear + 6 * attention + head  # tokens P a, P b; pairs PP aP aa, twice
    packed = 3 * linear + 5 * attention + head  # tokens P a b; pairs PP aP aa bP bb
    assert bench.bound(shape) == pytest.approx(padded / packed)
    assert shape.token_ratio == 4 / 3


def test_nothing_shared_means_a_bound_of_one(bench):
    assert bench.bound(bench.Shape(256, 256, 1)) == 1
    assert bench.Shape(256, 256, 1).token_ratio == 1


def test_the_report(bench, tmp_path, capsys):
    path = tmp_path / "out.json"
    assert (
        bench.main(
            ["--shapes", "24,6,4", "10,5,1", "--rounds", "1", "--seconds", "0", "--no-memory", "--json", str(path)]
        )
        == 0
    )
    report = json.loads(path.read_text())
    assert [(r["P"], r["R"], r["n"]) for r in report["results"]] == [(24, 6, 4), (10, 5, 1)]
    assert {r["memory_on_target"] for r in report["results"]} == {None}
    for key in ("hardware", "versions", "command", "load"):
        assert report[key]
    for result in report["results"]:
        assert result["speed_up"] > 0
        assert result["difference"]["log_prob"] <= 2e-5
    assert "| 24, 6, 4 | 120 -> 48 | 2.50 |" in capsys.readouterr().out


def test_peak_memory_is_taken_in_a_process_of_its_own(bench):
    """The logits alone are 200 x 2048 float32, and their gradient as much again."""
    assert bench.peak_on_host(bench.subject(), "shared", bench.Shape(8, 100, 2)) > 2 * 200 * 2048 * 4


def test_models_that_disagree_get_no_speed_up(bench, tmp_path, capsys, monkeypatch):
    """The first response of the shared side starts from another token than its prompt's last."""
    right = benchmark.build_plan

    def build(*arguments):
        plan = right(*arguments)
        plan.predictor_index[0] = 0
        return plan

    monkeypatch.setattr(benchmark, "build_plan", build)
    path = tmp_path / "out.json"
    assert (
        bench.main(["--shapes", "24,6,4", "--rounds", "1", "--seconds", "0", "--no-memory", "--json", str(path)]) == 1
    )
    captured = capsys.readouterr()
    assert "the results disagree: log-probs by" in captured.err
    assert "24, 6, 4" not in captured.out
    assert not path.exists()


def result_of(bench, shape, plain=1.0, shared=1.0, wall=None, peaks=(None, None)):
    times = bench.Pair(Timing(wall or plain, plain), Timing(shared, shared))
    return bench.Result(bench.Shape(*shape), times, bench.Largest(0.0, 0.0), *peaks)


@pytest.mark.parametrize(("wall", "clock"), [(1.0, "wall"), (1.2, "cpu")])
def test_cpu_time_counts_when_the_process_had_to_wait(bench, wall, clock):
    result = result_of(bench, (8, 4, 2), wall=wall, shared=0.5)
    assert result.times.clock == clock
    assert result.times.speed_up == (wall if clock == "wall" else 1.0) / 0.5


def test_a_missed_target_fails_only_when_checked(bench):
    assert not result_of(bench, (512, 64, 8), plain=1, shared=1).on_target
    assert result_of(bench, (512, 64, 8), plain=4, shared=1).on_target


@pytest.mark.parametrize(("peak", "verdict"), [(277, True), (279, False), (None, None)])
def test_the_memory_target_is_the_baseline_over_most_of_the_token_ratio(bench, peak, verdict):
    """4.5 times fewer tokens: of 1000 bytes, 1000 / (0.8 x 4.5) = 277.8 may be left."""
    result = result_of(bench, (512, 64, 8), peaks=(1000, peak))
    assert result.memory_on_target is verdict
    assert result.as_dict()["memory_on_target"] is verdict
