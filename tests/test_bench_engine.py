"""The engine benchmark: it compares before it times, counts the stock head in the bound, and reports every point."""

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import bench_engine
import pytest
import torch
from bench_engine import CONFIG, SWEEPS, Shape
from measuring import Disagreement
from ranks import run_ranks
from transformers import Qwen3ForCausalLM

SCRIPT = Path(bench_engine.__file__)
SMALL = Shape(24, 8, 3)


def test_the_bound_counts_the_stock_head_on_every_token():
    """One response of one token on a prompt of one, twice: every number can be counted by hand."""
    linear = 4 * (128 * 128 * 2 + 128 * 64 * 2 + 3 * 128 * 384)
    pair, head = 4 * 2 * 128, 128 * 1024
    stock = 4 * linear + 6 * pair + 4 * head  # tokens P a, P b; pairs PP aP aa, twice
    shared = 3 * linear + 5 * pair + 2 * head  # tokens P a b; pairs PP aP aa bP bb
    assert bench_engine.bound(Shape(1, 1, 2)) == pytest.approx(stock / shared)


@pytest.mark.parametrize(("shape", "rounds"), [("1024,64,1", 15), ("1024,64,8", 9), ("8192,64,8", 3)])
def test_short_points_get_more_rounds(shape, rounds):
    assert bench_engine.effort_for(Shape.parse(shape), 3).rounds == rounds


def test_a_quick_run_lists_what_it_leaves_out():
    quick = bench_engine.sweeps_of(argparse.Namespace(shapes=None, quick=True))
    missing = bench_engine.left_out(quick)
    assert "1024,64,32" in missing
    assert "8192,64,8" in missing
    asked = {str(shape) for sweep in quick for shape in sweep.shapes}
    assert asked | set(missing) == {str(shape) for sweep in SWEEPS for shape in sweep.shapes}
    assert not asked & set(missing)
    assert bench_engine.left_out(SWEEPS) == []


def agree_then_differ(rank, model):
    """The differences of two workers with equal weights, and what is said once one weight of ours is another.

    The stock engine cuts the three rows in two and one: a mean over its micro-batches is none over rows.
    """
    bench_engine.TOKEN_BUDGET = 70
    stock, zorro = (bench_engine.Worker(strategy, model, "padded") for strategy in bench_engine.STRATEGIES)
    record = bench_engine.measure(stock, zorro, SMALL, rank, 1)
    batch = bench_engine.draw_batch(SMALL, rank)
    batch = bench_engine.with_old_log_probs(batch, stock.compute_log_prob(batch)["log_probs"])
    metrics = zorro.update_actor(batch)
    with torch.no_grad():
        dict(zorro._worker.engine.module.named_parameters())["model.layers.2.self_attn.v_proj.weight"].mul_(1.5)
    try:
        bench_engine.measure(stock, zorro, SMALL, rank, 1)
    except Disagreement as error:
        return record, metrics, str(error)
    return record, metrics, None


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    Qwen3ForCausalLM(CONFIG).save_pretrained(path)
    return str(path)


def test_figures_only_where_the_engines_agree(model):
    ((record, metrics, refusal),) = run_ranks(agree_then_differ, 1, model)
    assert record["difference"].keys() == {"log_probs", "entropy", "gradients", "metrics"}
    for phase in bench_engine.PHASES:
        assert record[phase]["speed_up"] > 0
        assert record[phase]["share_of_bound"] == record[phase]["speed_up"] / record["flop_bound"]
    assert metrics["zorro/tokens_packed"] == SMALL.tokens_packed, "the second worker shares its prompts"
    assert metrics["grad_norm"] > 0
    assert refusal is not None
    differences = {name: float(value) for name, value in re.findall(r"(\w+) by ([\d.e+-]+)", refusal)}
    assert differences.keys() == record["difference"].keys()
    assert min(differences.values()) > bench_engine.TOLERANCE


@pytest.mark.slow
def test_the_report(tmp_path):
    path = tmp_path / "out.json"
    command = [sys.executable, SCRIPT, "--shapes", "24,8,3", "16,4,1", "--rounds", "1", "--ranks", "2", "--json", path]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    finished = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)
    assert finished.returncode == 0, finished.stderr
    report = json.loads(path.read_text())
    assert all(report[key] for key in ("hardware", "versions", "command", "load", "method"))
    assert report["stock_layout"] == min(report["seconds_of_layouts"], key=report["seconds_of_layouts"].get)
    (points,) = report["sweeps"].values()
    assert [(p["tokens_rows"], p["tokens_packed"]) for p in points] == [(96, 48), (20, 20)]
    lines = finished.stdout.splitlines()
    assert sum(line.startswith("| 24, 8, 3 | 96 -> 48 |") for line in lines) == 1, "rank 0 alone prints"


def test_the_plot_shows_both_calls_over_both_sweeps():
    pytest.importorskip("matplotlib")

    def phase(seconds):
        return {"stock_s": {"wall": seconds, "cpu": 9.0}, "zorro_s": {"wall": 1.0, "cpu": 9.0}, "clock": "wall"}

    point = {"P": 8, "R": 4, "n": 2, "flop_bound": 2.0, "compute_log_prob": phase(3.0), "update_actor": phase(6.0)}
    figure = bench_engine.draw({"sweeps": {"n": [point, point | {"n": 4}], "P": [point, point | {"P": 16}]}})
    found = {
        panel.get_title(): {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in panel.lines}
        for panel in figure.axes
    }
    assert list(found) == [
        "compute_log_prob, P = 8, R = 4",
        "compute_log_prob, R = 4, n = 2",
        "update_actor, P = 8, R = 4",
        "update_actor, R = 4, n = 2",
    ]
    update = found["update_actor, R = 4, n = 2"]
    assert update == {
        "stock / FLOP bound": ([8, 16], [3.0, 3.0]),
        "fsdp2 (stock)": ([8, 16], [6.0, 6.0]),
        "zorro": ([8, 16], [1.0, 1.0]),
    }
