"""The attention benchmark: its bound, its comparison with SDPA, and its report."""

import json

import bench_attention
import pytest
import torch

from zorro_verl.attention import split_attention
from zorro_verl.varlen import CpuKernels

RAGGED = bench_attention.Case("ragged", [(5, [3, 1, 4]), (2, [6]), (7, [2, 2])])


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_the_bound_counts_pairs():
    """Rows of P a and P b: 3 pairs each; shared: PP aP aa bP bb."""
    assert bench_attention.Case("two", [(1, [1, 1])]).bound() == 6 / 5


def test_all_ways_agree_on_ragged_groups():
    entrants, differences = bench_attention.contestants(RAGGED)
    assert [entrant.name for entrant in entrants] == ["row by row", "one padded batch", "split"]
    assert differences.keys() == {"outputs", "dq", "dk", "dv"}
    assert max(differences.values()) <= 2e-6


def with_another_scale(plan, q, k, v):
    return split_attention(q, k, v, plan.forest, 1.01 * bench_attention.SCALE, CpuKernels())


def test_a_wrong_split_shows_in_every_difference(monkeypatch):
    monkeypatch.setattr(bench_attention, "shared", with_another_scale)
    _, differences = bench_attention.contestants(RAGGED)
    assert min(differences.values()) > 10 * bench_attention.TOLERANCE


def test_the_report(tmp_path, capsys):
    path = tmp_path / "out.json"
    arguments = ["--shapes", "24,6,4", "10,5,1", "--rounds", "1", "--seconds", "0", "--json", str(path)]
    assert bench_attention.main(arguments) == 0
    report = json.loads(path.read_text())
    assert all(report[key] for key in ("hardware", "versions", "command", "load"))
    shared, alone = report["results"]
    assert (shared["tokens_rows"], shared["tokens_packed"], alone["flop_bound"]) == (120, 48, 1.0)
    for name in ("forward", "forward_backward"):
        one = shared[name]
        stock = one["stock_s"][one["compared_with"]][one["clock"]]
        assert stock == min(timing[one["clock"]] for timing in one["stock_s"].values())
        assert one["speed_up"] == stock / one["split_s"][one["clock"]]
    assert "| P, R, n = 24, 6, 4 | 120 -> 48 |" in capsys.readouterr().out


def test_what_disagrees_gets_no_figure(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(bench_attention, "shared", with_another_scale)
    path = tmp_path / "out.json"
    assert bench_attention.main(["--shapes", "24,6,4", "--rounds", "1", "--seconds", "0", "--json", str(path)]) == 1
    captured = capsys.readouterr()
    assert "results disagree: outputs by" in captured.err
    assert "24, 6, 4" not in captured.out
    assert not path.exists()


def test_default_cases_have_many_short_groups_and_ragged_ones():
    *_, many, ragged = bench_attention.all_cases()
    assert (len(many.groups), {len(responses) for _, responses in many.groups}) == (64, {16})
    assert len({len(responses) for _, responses in ragged.groups}) > 3
