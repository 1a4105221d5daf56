"""The benchmark beside other implementations: its protocol, and that only what is right and runs gets a speed-up."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import bench_peers
import pytest
import torch
from bench_cpu import CONFIG, SHAPES, TOLERANCE
from peers import plain, varlen_emulation, zorro
from peers.batch import Batch
from peers.cases import CASES, RAGGED, Case
from peers.causal_sdpa import causal_attention
from peers.environments import OWN, Overlay
from peers.process import Failed, Process
from peers.race import Contestant, Difference
from peers.standings import table
from peers.worker import Steps

from zorro_verl.measuring import Effort

STUB = (str(Path(__file__).with_name("peer_stub.py")),)
UNEVEN = Case("uneven", ((12, (5, 1, 7)), (9, (6, 2)), (10, (3,))))


def stub(name: str, baseline: str = "plain", **changes: object) -> Contestant:
    return replace(Contestant(name, OWN, baseline, "a stub", STUB), **changes)


def race(tmp_path: Path, *contestants: Contestant, limit: float = 120):
    """Name -> result, and the standings of them all."""
    standings = bench_peers.measure(UNEVEN, contestants, tmp_path, Effort(2), limit)
    return {result.contestant.name: result for result in standings.results}, standings


def process(tmp_path: Path, code: str, limit: float = 120) -> Process:
    return Process((sys.executable, "-c", code), {}, tmp_path / "log", limit)


# --- one process


def test_each_question_gets_its_answer(tmp_path):
    worker = process(tmp_path, "for line in open(0): print('{\"echo\": \"' + line.strip() + '\"}', flush=True)")
    assert worker.ask("one", "echo") == {"echo": "one"}
    assert worker.ask("two", "echo") == {"echo": "two"}
    worker.close()
    assert worker.process.returncode == 0


def test_what_hangs_is_given_up_and_ended(tmp_path):
    worker = process(tmp_path, "import time; time.sleep(100)", limit=0.5)
    with pytest.raises(Failed, match="no answer within 0.5 s"):
        worker.ask("step")
    assert worker.process.wait(timeout=4) < 0  # it may not take a core from the others until the end
    worker.close()


def test_the_limit_is_for_the_whole_answer(tmp_path):
    slow = "import time\nfor _ in range(60):\n    print('{', end='', flush=True)\n    time.sleep(0.1)"
    worker = process(tmp_path, slow, limit=1)
    with pytest.raises(Failed, match="no answer within 1 s"):
        worker.ask("step")
    worker.close()


def test_an_end_names_the_exit_code_and_the_last_line(tmp_path):
    worker = process(tmp_path, "import sys; print('loading', file=sys.stderr); sys.exit('no such kernel\\n')")
    with pytest.raises(Failed, match="exit code 1: no such kernel"):
        worker.ask("step")


def test_an_answer_without_what_was_asked_for_is_refused(tmp_path):
    worker = process(tmp_path, "for line in open(0): print('{\"wall\": 1}', flush=True)")
    with pytest.raises(Failed, match="expected an answer to step with wall, cpu, got"):
        worker.ask("step", "wall", "cpu")
    worker.close()


def test_a_program_that_is_not_there(tmp_path):
    with pytest.raises(Failed, match="could not start"):
        Process((str(tmp_path / "python"),), {}, tmp_path / "log", 1)


def test_what_libraries_print_is_no_answer(tmp_path):
    code = """
from peers.worker import answer_channel
with answer_channel() as channel:
    print("Setting accelerator to CPU", flush=True)
    print('{"wall": 1}', file=channel)
    input()
"""
    worker = Process((sys.executable, "-c", code), {"PYTHONPATH": str(OWN.path[0])}, tmp_path / "log", 200)
    assert worker.ask("step", "wall") == {"wall": 1}
    worker.close()
    assert "Setting accelerator" in (tmp_path / "log").read_text()


# --- a race of stubs


def test_what_is_right_gets_a_speed_up_and_what_is_wrong_the_number(tmp_path):
    wrong = {
        "off-log-prob": "wrong: differs from plain: log-probs by 1.0e-03, gradients by 0.0e+00 of the largest",
        "off-gradient": "wrong: differs from plain: log-probs by 0.0e+00, gradients by 1.0e-03 of the largest",
        "nan": "gradients by nan",
        "short": "wrong: log_probs is (2,), expected (3,)",
        "partial": "wrong: bias is None, expected (2,)",
        "silent": "wrong: left no results",
    }
    results, standings = race(tmp_path, stub("plain"), stub("fast"), *map(stub, wrong))
    assert results["plain"].status == results["fast"].status == "ok"
    assert standings.speed_up(results["fast"]) == 4
    assert standings.speed_up(results["plain"]) is None
    for name, status in wrong.items():
        assert status in results[name].status
        assert results[name].timing is None
        assert standings.speed_up(results[name]) is None
    assert "| fast | 0.250 | 4.00 | - | 1 | 0e+00, 0e+00 | ok |" in table(standings)
    assert "| off-log-prob | - | - | - | 1 | 1e-03, 0e+00 | wrong: differs" in table(standings)


def test_what_does_not_run_is_listed_with_its_reason_and_keeps_nobody_up(tmp_path):
    empty = Overlay(tmp_path / "empty", bench_peers.PREFIX_GROUPER.requirements)
    results, standings = race(
        tmp_path,
        stub("plain"),
        stub("crashes"),
        stub("talks"),
        stub("crashes-later"),
        stub("absent", environment=empty),
        stub("fast"),
    )
    assert "exit code 1: ModuleNotFoundError: no module named attention" in results["crashes"].status
    assert "got 'Setting up'" in results["talks"].status
    assert "exit code 1: out of memory" in results["crashes-later"].status
    assert "lacks prefix-grouper==" in results["absent"].status
    assert "--setup" in results["absent"].status
    assert standings.speed_up(results["fast"]) == 4


def test_a_speed_up_is_counted_by_the_plain_model_of_the_same_environment(tmp_path):
    results, standings = race(tmp_path, stub("plain"), stub("fast", baseline="fast"), stub("other", baseline="fast"))
    assert standings.speed_up(results["other"]) == 0.25


def test_nothing_is_judged_without_a_plain_model(tmp_path):
    results, _ = race(tmp_path, stub("plain", program=("-c", "raise SystemExit('broken')")), stub("fast"))
    assert "broken" in results["plain"].status
    assert results["fast"].status == "not judged: plain, which it is held against, did not run"


def test_results_of_an_earlier_case_do_not_count(tmp_path):
    race(tmp_path, stub("plain"), stub("fast"))
    (tmp_path / "fast.safetensors").rename(tmp_path / "silent.safetensors")
    results, _ = race(tmp_path, stub("plain"), stub("silent"))
    assert results["silent"].status == "wrong: left no results"


# --- the contestants that need no other environment


def test_the_report(tmp_path, capsys):
    path = tmp_path / "out.json"
    entered = [contestant for contestant in bench_peers.CONTESTANTS if contestant.environment is OWN]
    options = ["--shapes", "24,6,4", "--rounds", "1", "--seconds", "0", "--json", str(path)]
    assert bench_peers.main(options, [*entered, stub("off-log-prob")]) == 1  # a wrong one of this environment
    report = json.loads(path.read_text())
    assert all(report[key] for key in ("hardware", "load", "versions", "command", "method"))
    assert [of["name"] for of in report["contestants"]] == ["plain", "zorro", "off-log-prob"]
    assert "zorro-verl" in report["contestants"][1]["versions"]
    (result,) = report["results"]
    assert result["shape"] == "24,6,4"
    assert result["groups"] == [[24, [6, 6, 6, 6]]]
    plain, zorro, wrong = result["contestants"]
    assert plain["status"] == zorro["status"] == "ok"
    assert zorro["speed_up"] == pytest.approx(plain["seconds"] / zorro["seconds"])
    assert zorro["of_bound"] == pytest.approx(zorro["speed_up"] / result["flop_bound"])
    assert all(0 <= value <= TOLERANCE for value in zorro["difference"].values())
    assert zorro["peak_bytes"] > 0
    assert wrong["status"].startswith("wrong: ")
    assert wrong["speed_up"] is None
    assert "| zorro |" in capsys.readouterr().out


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The model, and an uneven batch."""
    folder = tmp_path_factory.mktemp("peers")
    bench_peers.save_random_model(folder)
    Batch.random(UNEVEN.groups, CONFIG.vocab_size).save(folder / "batch.safetensors")
    return folder


def test_uneven_rows_agree(folder):
    for module in (plain, zorro):
        Steps(module.Contestant, folder).compare(folder / f"{module.__name__}.safetensors")
    difference = Difference.between(folder / "peers.zorro.safetensors", folder / "peers.plain.safetensors")
    assert difference.accepted, str(difference)


def test_the_plain_contestant_is_the_model_on_each_row_alone(folder):
    steps = Steps(plain.Contestant, folder)
    expected = []
    for row, mask in zip(steps.batch.input_ids, steps.batch.attention_mask.bool(), strict=True):
        tokens = row[mask]
        count = int(mask[steps.batch.prompt_width :].sum())
        logits = steps.model(input_ids=tokens[None]).logits[0, -count - 1 : -1]
        expected.append(logits.log_softmax(-1).gather(1, tokens[-count:, None])[:, 0])
    torch.testing.assert_close(steps.step(), torch.cat(expected), atol=TOLERANCE, rtol=0)


# --- what stands in for kernels that a CPU lacks


def by_hand(query, key, value, scaling, key_mask):
    """``(heads, T, D)`` for one row, query by query."""
    key, value = (x.repeat_interleave(query.shape[0] // key.shape[0], 0) for x in (key, value))
    first = key.shape[1] - query.shape[1]
    outputs = []
    for index in range(query.shape[1]):
        seen = key_mask[: first + index + 1].nonzero()[:, 0]
        scores = (query[:, index, None] * key[:, seen]).sum(-1) * scaling
        outputs.append((scores.softmax(-1)[..., None] * value[:, seen]).sum(1))
    return torch.stack(outputs, 1)


@pytest.mark.parametrize(("queries", "keys"), [(5, 5), (3, 8), (1, 4)])
def test_the_last_query_sees_all_keys(queries, keys):
    query, key, value = torch.randn(2, 4, queries, 8), torch.randn(2, 2, keys, 8), torch.randn(2, 2, keys, 8)
    found = causal_attention(query, key, value, 0.3)
    for row in range(2):
        expected = by_hand(query[row], key[row], value[row], 0.3, torch.ones(keys))
        torch.testing.assert_close(found[row], expected)


def test_no_query_sees_padding_and_padding_makes_no_nan():
    query, key, value = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
    mask = torch.tensor([[False, False, True, True, True]])
    query.requires_grad_()
    found = causal_attention(query, key, value, 0.3, mask)
    expected = by_hand(query[0, :, 2:], key[0, :, 2:], value[0, :, 2:], 0.3, torch.ones(3))
    torch.testing.assert_close(found[0, :, 2:], expected)
    found.sum().backward()
    assert query.grad.isfinite().all()


def test_the_emulated_kernel_keeps_sequences_apart():
    query, key, value = torch.randn(1, 4, 6, 8), torch.randn(1, 2, 11, 8), torch.randn(1, 2, 11, 8)
    starts = {"cu_seq_lens_q": torch.tensor([0, 2, 6]), "cu_seq_lens_k": torch.tensor([0, 7, 11])}
    found, _ = varlen_emulation.varlen_attention(None, query, key, value, None, scaling=0.3, **starts)
    first = by_hand(query[0, :, :2], key[0, :, :7], value[0, :, :7], 0.3, torch.ones(7))
    second = by_hand(query[0, :, 2:], key[0, :, 7:], value[0, :, 7:], 0.3, torch.ones(4))
    torch.testing.assert_close(found[0].transpose(0, 1), torch.cat([first, second], 1))


# --- cases and set-up


def test_cases():
    assert [case.name for case in CASES] == [*map(str, SHAPES), "ragged"]
    full = Case.parse("24,6,4")
    assert full.groups == ((24, (6, 6, 6, 6)),)
    assert full.token_ratio == 120 / 48
    assert 1 < full.bound < 120 / 48
    assert Case.parse("ragged") is RAGGED
    assert RAGGED.bound is None  # the plain model's padding is no work that has to be done
    assert UNEVEN.token_ratio == 6 * (12 + 7) / (12 + 13 + 9 + 8 + 10 + 3)


def test_an_environment_that_cannot_be_made_keeps_no_other_from_being_made(capsys):
    made = []

    class Broken:
        def set_up(self):
            raise SystemExit("[setup] no such package")

    class Whole:
        def set_up(self):
            made.append(self)

    contestants = [stub(name, environment=kind()) for name, kind in (("a", Broken), ("b", Whole))]
    assert bench_peers.set_up(contestants) == 1
    assert len(made) == 1
    assert "no such package" in capsys.readouterr().err
