"""What the benchmarks share: who runs when, what counts as equal, which clock, how much memory."""

import argparse
import json
import math
import sys
from pathlib import Path

import pytest
import torch
from measuring import Disagreement, agree, as_argument, command_line

from zorro_verl.measuring import (
    Effort,
    Shape,
    Timing,
    clock_for,
    environment,
    in_own_process,
    peak_resident,
    time_interleaved,
)

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"


def test_by_turns_another_one_goes_first():
    order = []
    steps = [lambda name=name: order.append(name) for name in "abc"]
    time_interleaved(steps, Effort(3))
    assert "".join(order) == "abccbaabc"


def test_rounds_go_on_until_the_seconds_have_passed():
    runs = []
    time_interleaved([lambda: runs.append(sum(range(20_000)))], Effort(1, 0.05))
    assert len(runs) > 1


def test_the_median_of_each_clock_is_taken():
    times = iter([Timing(5, 1), Timing(1, 2), Timing(2, 9)])
    assert time_interleaved([lambda: None], Effort(3), watch=lambda _: next(times)) == [Timing(2, 2)]


def test_one_that_had_to_wait_for_its_core_is_enough_to_count_cpu_time(monkeypatch):
    quiet, waited = Timing(1.0, 1.0), Timing(1.2, 1.0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert clock_for([quiet, quiet]) == "wall"
    assert clock_for([quiet, waited]) == "cpu"
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)  # whose CPU time has both in it, and their spinning
    assert clock_for([quiet, waited]) == "wall"
    assert (waited.by("wall"), waited.by("cpu")) == (1.2, 1.0)


@pytest.mark.parametrize("wrong", [2e-5, math.nan])
def test_no_figure_where_results_differ(wrong):
    agree({"outputs": 1e-5, "gradients": 0.0}, 1e-5)
    with pytest.raises(Disagreement, match="outputs by .*, gradients by .*no figure"):
        agree({"outputs": 1e-5, "gradients": wrong}, 1e-5)


def copied_ones():
    """The peak of 64 MiB and its copy, above 256 MiB that were there before."""
    torch.ones(160 << 20)  # 640 MiB that are gone by then
    before = torch.ones(64 << 20)
    peak = peak_resident(lambda: torch.ones(16 << 20).add(1))
    assert before.numel()
    return peak


def test_peak_memory_is_what_was_there_at_once():
    peak = in_own_process(copied_ones)
    if peak is None:
        pytest.skip("this system has no high-water mark of a process")
    assert 128 << 20 <= peak < 160 << 20


def refuse():
    raise ValueError(f"with {torch.get_num_threads()} threads")


def test_a_process_of_its_own_has_as_many_threads_and_its_errors_come_back():
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with pytest.raises(ValueError, match="with 3 threads"):
            in_own_process(refuse)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("text", ["", "1,2", "1,2,3,4", "0,2,3", "1,-2,3", "a,b,c", "1.5,2,3", "²,2,3"])
def test_a_shape_is_three_numbers_above_0(text):
    assert Shape.parse("8, 4 ,2") == Shape(8, 4, 2)
    with pytest.raises(ValueError, match="shape: expected prompt tokens, response tokens and responses"):
        Shape.parse(text)
    with pytest.raises(argparse.ArgumentTypeError, match="shape: expected prompt tokens"):  # what argparse shows
        as_argument(Shape.parse)(text)


@pytest.mark.parametrize(("rounds", "seconds"), [(0, 1.0), (-1, 1.0), (1, -1.0), (1, math.nan), (1, math.inf)])
def test_an_effort_ends(rounds, seconds):
    with pytest.raises(ValueError, match="rounds: expected|seconds: expected"):
        Effort(rounds, seconds)


def test_a_result_says_where_it_comes_from(monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(SCRIPTS / "bench_cpu.py"), "--shapes", "8,4,2"])
    found = environment(command_line(), "transformers", method="by hand")
    assert found["command"] == "python scripts/bench_cpu.py --shapes 8,4,2"
    assert "transformers 5" in found["versions"]
    assert "thread" in found["hardware"]
    assert found["method"] == "by hand"
    assert json.dumps(found)
