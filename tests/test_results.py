"""The tables of README and docs are what the files in docs/results say, and each file says where it comes from."""

import json
import re
import shlex
from pathlib import Path

import bench_cpu
import pytest
import results_table
import torch

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted((ROOT / "docs" / "results").glob("*.json"))
SIMULATED = {"placement.json"}  # nothing is timed but for one line: any hardware gives the same
ORIGIN = {
    "hardware": "a machine",
    "versions": "torch 9",
    "command": "python scripts/x.py",
    "load": "0.1",
    "method": "m",
}
PAGE = ROOT / "docs" / "benchmarks.md"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_result_says_where_it_comes_from(path):
    record = json.loads(path.read_text())
    for key in results_table.REQUIRED:
        assert record.get(key) or (key == "hardware" and path.name in SIMULATED), key
    python, script, *words = shlex.split(record["command"])
    assert python == "python"
    assert (ROOT / script).exists()
    assert f"docs/results/{path.name}" in words, "measured for another place"
    assert not any(word.startswith("/") for word in words), "a path of one machine"


def test_the_pages_say_what_the_results_say(capsys):
    code = results_table.main(["--check"])
    assert code == 0, capsys.readouterr()


def test_every_table_stands_on_a_page():
    shown = {page.name: set(results_table.MARKED.findall(page.read_text())) for page in results_table.pages()}
    assert set().union(*shown.values()) == set(results_table.BLOCKS)
    assert {"cpu", "engine-line"} <= shown["README.md"]


@pytest.mark.parametrize("name", results_table.BLOCKS)
def test_the_command_of_a_table_is_one_that_runs(name):
    block = results_table.BLOCKS[name]
    python, script, *words = block.command.split()
    assert (python, (ROOT / script).exists()) == ("python", True)
    for option in (word for word in words if word.startswith("--")):
        source = (ROOT / script).read_text() + "".join(p.read_text() for p in (ROOT / "scripts").glob("*/command.py"))
        assert f'"{option}"' in source


def write(folder, name, record):
    (folder / name).write_text(json.dumps(record))
    return folder


def test_a_measured_table_is_written_with_its_origin(tmp_path):
    """From what the benchmark itself writes."""
    threads = torch.get_num_threads()
    path = tmp_path / "cpu.json"
    options = ["--shapes", "24,6,4", "--rounds", "1", "--seconds", "0", "--no-memory", "--json", str(path)]
    assert bench_cpu.main(options) == 0
    torch.set_num_threads(threads)
    record = json.loads(path.read_text())
    (result,) = record["results"]
    short = results_table.BLOCKS["cpu"].text(tmp_path, ROOT / "README.md")
    row = f"| 24, 6, 4 | 120 -> 48 | {result['speed_up']:.2f} | {result['flop_bound']:.2f} | "
    assert row + f"{100 * result['share_of_bound']:.0f} % | - -> - |" in short
    for key in ("hardware", "versions", "command", "load"):
        assert record[key] in short
    assert "(docs/results/cpu.json)" in short
    assert "(results/cpu.json)" in results_table.BLOCKS["cpu-details"].text(tmp_path, PAGE)


def test_the_largest_points_of_the_engine_are_the_readmes(tmp_path):
    def phase(speed_up):
        timing = {"wall": 0.25, "cpu": 9.0}
        return {"stock_s": timing, "zorro_s": timing, "clock": "wall", "speed_up": speed_up, "share_of_bound": 0.914}

    def point(prompt, n):
        shape = {"P": prompt, "R": 64, "n": n, "tokens_rows": 900, "tokens_packed": 300, "flop_bound": 5.0}
        calls = {"compute_log_prob": phase(4.5), "update_actor": phase(4.75)}
        return {**shape, **calls, "difference": {"log_probs": 1e-6, "metrics": 3e-6}}

    layouts = {"stock_layout": "padded", "seconds_of_layouts": {"padded": 1.0, "remove-padding": 2.0}}
    sweeps = {"n": [point(1024, 1), point(1024, 8)], "P": [point(1024, 8), point(8192, 8)]}
    write(tmp_path, "engine.json", {**ORIGIN, **layouts, "left_out": ["1024,64,32"], "sweeps": sweeps})
    line = results_table.BLOCKS["engine-line"].text(tmp_path, PAGE)
    assert [row for row in line.splitlines() if row.startswith("| 1024") or row.startswith("| 8192")] == [
        "| 1024, 64, 8 | 5.00 | 4.50 | 91 % | 4.75 | 91 % |",
        "| 8192, 64, 8 | 5.00 | 4.50 | 91 % | 4.75 | 91 % |",
    ]
    full = results_table.BLOCKS["engine"].text(tmp_path, PAGE)
    assert full.count("| 1024, 64, 8 | 900 -> 300 | 5.00 | 0.250 -> 0.250 | 4.50 | 91 % |") == 1
    assert "padded, the faster" in full
    assert "Left out: P, R, n = 1024,64,32." in full


def test_a_peer_that_is_wrong_has_no_figure(tmp_path):
    def entry(name, status, speed_up):
        figures = {"seconds": 1.0, "of_bound": None, "peak_bytes": 3 * 2**20, "difference_from_plain": None}
        return {"name": name, "status": status, "speed_up": speed_up} | figures

    names = [("plain", "plain"), ("zorro", "plain"), ("other", "plain")]
    described = [{"name": n, "what": f"the {n}", "baseline": b, "versions": "torch 9"} for n, b in names]
    entries = [entry("plain", "ok", None), entry("zorro", "ok", 4.0), entry("other", "wrong: off by 1", 9.0)]
    case = {"shape": "512,64,8", "flop_bound": 4.04, "contestants": entries}
    write(tmp_path, "peers.json", {**ORIGIN, "contestants": described, "results": [case]})
    short = results_table.BLOCKS["peers"].text(tmp_path, PAGE)
    assert "| `zorro` | 4.00 |\n| `other` | no figure |\n| *FLOP bound* | 4.04 |" in short
    assert "* `other`: the other (torch 9)" in short
    full = results_table.BLOCKS["peers-details"].text(tmp_path, PAGE)
    assert "| 512, 64, 8 | `zorro` | 1.000 | 4.00 | - | 3 | - | ok |" in full
    assert "wrong: off by 1" in full


def test_a_gpus_figures_come_from_a_gpu(tmp_path):
    block = results_table.BLOCKS["gpu"]
    text = block.text(tmp_path, ROOT / "README.md")
    assert text.startswith("Not yet measured on a GPU")
    assert block.command in text
    assert not re.search(r"\d", text.replace(block.command, "")), "no number where nothing was measured"

    def entry(name, role, seconds, **figures):
        measured = {"seconds": seconds, "rounds": 3, "peak": 2**31, "teraflops": 400.0}
        return {"name": name, "role": role} | measured | figures

    ours = {"speed_up": 3.5, "share_of_bound": 0.92}
    contestants = [
        entry("varlen", "baseline", 0.35),
        entry("slow", "ours", 0.2, **ours),
        entry("split", "ours", 0.1, **ours),
        entry("peer", "peer", 0.01),
    ]
    case = {"level": "model", "size": "8B", "shape": "4096,1024,16", "work": "update", "bound": 3.8, "token_ratio": 4.0}
    case |= {"speed": "met", "memory": "MISSED", "contestants": contestants}
    untargeted = case | {"speed": "no target", "level": "op"}
    failed = case | {"work": "forward", "contestants": [entry("varlen", "baseline", None), *contestants[1:]]}
    record = {**ORIGIN, "cases": [case, untargeted, failed], "left_out": ["layer, 8B: the time was up"]}
    record |= {"models": "random weights", "heads": "the memory mode"}
    with pytest.raises(results_table.BadResult, match="--device cuda"):
        block.text(write(tmp_path, "gpu.json", record), PAGE)
    text = block.text(write(tmp_path, "gpu.json", record | {"cuda": "13"}), PAGE)
    row = (
        "| model, 8B, 4096, 1024, 16, update | 4.00 | 3.80 | 350.00 -> 100.00 | 3 | 3.50 | 92 % | met | 2.00 -> 2.00 | "
    )
    assert row + "MISSED" in text
    assert text.count("| 4.00 | 3.80 |") == 1, "cases without a target stay out"
    assert "Without a figure: layer, 8B: the time was up; model, 8B, 4096, 1024, 16, forward." in text
    assert "random weights; the memory mode; m." in text


@pytest.mark.parametrize(("status", "said"), [("out of memory", "does not fit"), ("not run", "does not run")])
def test_a_stand_in_is_named_and_its_peak_is_not_the_baselines(status, said, tmp_path):
    def entry(name, role, seconds, **figures):
        measured = {"seconds": seconds, "rounds": 3, "peak": 2**31, "teraflops": 400.0}
        return {"name": name, "role": role} | measured | figures

    contestants = [
        entry("varlen", "baseline", None, status=status, peak=None),
        entry("row by row", "stand-in", 0.7, status="timed"),
        entry("zorro", "ours", 0.1, speed_up=7.0, share_of_bound=0.92),
    ]
    case = {"level": "model", "size": "8B", "shape": "4,1,8", "work": "update", "bound": 7.6, "token_ratio": 8.0}
    case |= {"speed": "met", "memory": "met", "contestants": contestants}
    write(tmp_path, "gpu.json", {**ORIGIN, "cuda": "13", "cases": [case], "left_out": []})
    text = results_table.BLOCKS["gpu"].text(tmp_path, PAGE)
    row = "| model, 8B, 4, 1, 8, update | 8.00 | 7.60 | 700.00 (row by row) -> 100.00 | 3 | 7.00 | 92 % | met | "
    assert f"{row}{said} -> 2.00 | met | 400 |" in text


def test_kernels_of_a_gpu_stand_beside_the_others(tmp_path):
    """Contestants without a figure, too, with their reason; cases with a target have a table of their own."""

    def entry(name, status, seconds, reason="", differences=None, share=None):
        timed = {"seconds": seconds, "peak": 2**30 if seconds else None, "teraflops": 250.0 if seconds else None}
        timed |= {
            "rounds": 2 if seconds else 0,
            "speed_up": 0.02 / seconds if seconds else None,
            "share_of_bound": share,
        }
        return {"name": name, "status": status, "reason": reason, "differences": differences or {}} | timed

    differences = {"out": 9.0, "out, worst token": 9.0, "out, worst row": 0.002, "gradients": 0.004}
    contestants = [
        entry("varlen", "timed", 0.02),
        entry("split", "timed", 0.01, differences=differences, share=0.8),
        entry("FlexAttention", "out of memory", None, "no room for a | mask"),
    ]
    case = {"level": "op", "size": "8B", "shape": "4096,1024,16", "work": "forward", "speed": "no target"}
    case["contestants"] = contestants
    record = {**ORIGIN, "cases": [case | {"level": "model", "speed": "met"}, case]}
    block = results_table.BLOCKS["gpu-kernels"]
    with pytest.raises(results_table.BadResult, match="--device cuda"):
        block.text(write(tmp_path, "gpu.json", record), PAGE)
    text = block.text(write(tmp_path, "gpu.json", record | {"cuda": "13"}), PAGE)
    assert [line for line in text.splitlines() if line.startswith("| op")] == [
        "| op, 8B, 4096, 1024, 16, forward | varlen | 20.00 | 2 | 1.00 | - | 250 | 1.00 | - | timed |",
        "| op, 8B, 4096, 1024, 16, forward | split | 10.00 | 2 | 2.00 | 80 % | 250 | 1.00 | 4e-03 | timed |",
        "| op, 8B, 4096, 1024, 16, forward | FlexAttention | - | - | - | - | - | - | - | "
        "out of memory: no room for a \\| mask |",
    ]
    assert "| model" not in text


def test_a_result_without_origin_is_refused(tmp_path):
    record = {key: value for key, value in ORIGIN.items() if key != "versions"}
    with pytest.raises(results_table.BadResult, match=r"plan.json: expected .*, got no versions"):
        results_table.BLOCKS["plan"].text(write(tmp_path, "plan.json", record | {"results": []}), PAGE)


def test_an_unknown_table_is_refused(tmp_path):
    with pytest.raises(results_table.BadResult, match="got gpus"):
        results_table.filled("<!-- results: gpus -->\n<!-- /results -->", PAGE, tmp_path)


def test_a_page_is_rewritten_between_its_markers_only(tmp_path, monkeypatch, capsys):
    page = tmp_path / "page.md"
    page.write_text("before\n\n<!-- results: gpu -->\nold\n<!-- /results -->\n\nafter\n")
    monkeypatch.setattr(results_table, "pages", lambda: [page])
    monkeypatch.setattr(results_table, "ROOT", tmp_path)
    options = ["--results", str(tmp_path)]
    assert results_table.main([*options, "--check"]) == 1
    assert "page.md: not what the results say: gpu\n" in capsys.readouterr().out
    assert "old" in page.read_text()
    assert results_table.main(options) == 0
    written = page.read_text()
    assert written.startswith("before\n\n<!-- results: gpu -->\n\nNot yet measured")
    assert written.endswith("<!-- /results -->\n\nafter\n")
    capsys.readouterr()
    assert results_table.main([*options, "--check"]) == 0
    assert capsys.readouterr().out == "the tables are in order\n"


def test_only_the_table_that_differs_is_named(tmp_path, monkeypatch, capsys):
    record = {**ORIGIN, "head": "a head", "logits": "9 MiB", "difference": 1e-6, "modes": {}}
    write(tmp_path, "head.json", record)
    current = results_table.filled("<!-- results: head -->\n<!-- /results -->\n", tmp_path / "page.md", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(current + "<!-- results: gpu -->\nold\n<!-- /results -->\n")
    monkeypatch.setattr(results_table, "pages", lambda: [page])
    monkeypatch.setattr(results_table, "ROOT", tmp_path)
    assert results_table.main(["--results", str(tmp_path), "--check"]) == 1
    assert "not what the results say: gpu\n" in capsys.readouterr().out


@pytest.mark.parametrize(("text", "said"), [("{", "expected JSON"), ("[]", "expected an object, got a list")])
def test_a_file_that_is_no_result_is_one_line(text, said, tmp_path, monkeypatch, capsys):
    (tmp_path / "gpu.json").write_text(text)
    page = tmp_path / "page.md"
    page.write_text("<!-- results: gpu -->\nold\n<!-- /results -->\n")
    monkeypatch.setattr(results_table, "pages", lambda: [page])
    assert results_table.main(["--results", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert f"gpu.json: {said}" in error
    assert error.count("\n") == 1
