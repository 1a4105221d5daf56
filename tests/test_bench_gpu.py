"""The GPU benchmark, on a CPU: it runs to its end, counts right, and gives no figure where results differ."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from gpu_bench import attention, command, models, schedule, stock, work
from gpu_bench.batch import Batch, groups_of
from gpu_bench.comparison import Results, disagreement, errors, imprecision
from gpu_bench.contest import Budget, Case, Contestant, Entry, NotRun, check_precision, run_case
from gpu_bench.device import Device
from gpu_bench.sizes import config_of
from gpu_bench.verdict import Outcome
from transformers import AutoModelForCausalLM

from zorro_verl.measuring import Effort, Shape, Timing, out_of_memory

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "bench_gpu.py"
CPU = Device("cpu")
ONCE = Effort(1)
GIB = 2**30


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """Of the tiny form of everything, in a process of its own."""
    path = tmp_path_factory.mktemp("gpu") / "out.json"
    command_line = [sys.executable, SCRIPT, "--device", "cpu", "--tiny", "--json", path]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    finished = subprocess.run(command_line, capture_output=True, text=True, timeout=400, env=environment)
    assert finished.returncode == 0, finished.stderr
    return json.loads(path.read_text()) | {"printed": finished.stdout}


@pytest.mark.slow
def test_every_level_runs_to_its_end(report):
    """Two shapes: three works of the model, two of a layer and of attention; head and engine at one shape."""
    levels = [case["level"] for case in report["cases"]]
    assert {level: levels.count(level) for level in schedule.LEVELS} == {
        "model": 6,
        "layer": 4,
        "op": 4,
        "head": 2,
        "engine": 2,
    }
    assert not report["left_out"]
    assert not report["wrong"]


@pytest.mark.slow
def test_it_says_where_it_ran(report):
    for key in ("hardware", "load", "versions", "command", "optional", "method", "equality"):
        assert report[key]
    assert (
        report["command"] == "python scripts/bench_gpu.py --device cpu --tiny --json " + report["command"].split()[-1]
    )


@pytest.mark.slow
def test_results_were_compared_before_anything_was_timed(report):
    """Against float32 at each level, and with the baseline in every case, gradients too."""
    compared = {(case["level"], case["work"]): case for case in report["precision"]}
    for case in report["cases"]:
        exact = compared.get((case["level"], case["work"].removesuffix(", layers checkpointed")))
        for contestant in (entry for entry in case["contestants"] if entry["role"] == "ours" and entry["seconds"]):
            others = next(c for c in exact["contestants"] if c["name"] == contestant["name"])
            for found in (contestant["differences"], others["differences"]):
                assert ("gradients" in found) == ("update" in case["work"] or "backward" in case["work"])
                assert any("worst row" in name for name in found) or (case["level"], "gradients" in found) == (
                    "engine",
                    True,
                )


@pytest.mark.slow
def test_no_contestant_is_dropped_in_silence(report):
    """Whoever has no time has a reason, in the file and in the table."""
    for case in report["cases"]:
        for contestant in case["contestants"]:
            assert (contestant["seconds"] is None) == bool(contestant["reason"])
            assert contestant["name"] in report["printed"]
            assert contestant["reason"] in report["printed"]
    names = {contestant["name"] for case in report["cases"] for contestant in case["contestants"]}
    assert {
        "stock varlen on duplicated tokens",
        "zorro",
        "split attention, sdpa",
        "split attention, flash_attention_2",
        "gathered K/V, one varlen call",
        "FlexAttention, block mask",
        "veRL linear_cross_entropy (Triton)",
        "veRL FusedLinearForPPO (torch)",
        "Liger fused linear cross entropy, no entropy",
    } <= names


def break_plans(monkeypatch, wrong_for):
    """Make a shared model's first response start from another token than its prompt's last, in some batches."""
    right = models.build_plan

    def build(rows, groups):
        plan = right(rows, groups)
        if wrong_for(rows):
            plan.predictor_index[0] = 0
        return plan

    monkeypatch.setattr(models, "build_plan", build)


def run_layers(tmp_path, *more):
    path = tmp_path / "out.json"
    code = command.main(["--device", "cpu", "--tiny", "--levels", "layer", "--json", str(path), *more])
    return code, json.loads(path.read_text())


def test_one_wrong_token_and_no_figure(monkeypatch, tmp_path, capsys):
    """It is noticed against float32, and then no shape has its turn."""
    break_plans(monkeypatch, lambda rows: True)
    code, found = run_layers(tmp_path)
    assert code == 1
    assert found["cases"] == []
    assert len(found["left_out"]) == 4
    assert all("not precise" in name for name in found["left_out"])
    assert "times the stock one's" in capsys.readouterr().err


def test_a_shape_that_is_wrong_gets_no_figure_and_the_others_do(monkeypatch, tmp_path, capsys):
    """Of the tiny shapes one has four rows; the batch that is compared with float32 has not."""
    break_plans(monkeypatch, lambda rows: rows.num_rows == 4)
    code, found = run_layers(tmp_path)
    assert code == 1
    by_shape = {}
    for case in found["cases"]:
        seconds = [contestant["seconds"] for contestant in case["contestants"]]
        by_shape.setdefault(case["shape"], []).append(any(seconds))
        speed_ups = [contestant["speed_up"] for contestant in case["contestants"]]
        assert any(speed_ups) == any(seconds)
    assert by_shape == {"48,16,4": [False, False], "24,8,1": [True, True]}
    assert "zorro: with the baseline, values by" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_attention_that_forgets_the_prompt_is_noticed(monkeypatch):
    """Split attention without its cross call, in bfloat16."""
    right = attention.split_attention

    def forgetful(q, k, v, forest, scale, kernels):
        out = right(q, k, v, forest, scale, kernels)
        first = forest.cross_calls[0].query_start
        alone = Batch([(1, [15])] * 4, 8, "cpu", seed=1).plan.forest
        return torch.cat([out[:first], right(q[first:], k[first:], v[first:], alone, scale, kernels)])

    monkeypatch.setattr(attention, "split_attention", forgetful)
    batch = Batch([(48, [16] * 4)], 64, "cpu")
    level = attention.AttentionLevel(config_of("tiny"), "cpu")
    contestants = level.contestants(batch, attention.FORWARD)
    case = Case("op", "tiny", "48,16,4", "forward", contestants, 1.0, 1.0)
    entries, wrong = run_case(case, CPU, ONCE, Budget(60))
    assert "split attention, sdpa: with the baseline, out by" in wrong
    assert all(entry.seconds is None for entry in entries)


def test_the_stock_model_is_hugging_faces():
    """The same weights with transformers' own attention, on one row, in float32."""
    config = config_of("tiny")
    model = stock.build_model(config, "cpu").float()
    with torch.device("cpu"):
        plain = AutoModelForCausalLM.from_config(config_of("tiny"), dtype=torch.float32, attn_implementation="sdpa")
    plain.load_state_dict(model.state_dict())
    batch = Batch([(20, [7, 5])], config.vocab_size, "cpu")
    found = stock.hidden_states(model, batch.whole)
    rows = [plain.model(piece.tokens, position_ids=piece.positions) for piece in batch.single_rows]
    expected = torch.cat([rows[0].last_hidden_state[0, 19:26], rows[1].last_hidden_state[0, 19:24]])
    assert (found - expected).abs().max() < 1e-5


# (P, R, n): tokens, attention, update with its layers checkpointed of the 0.6B and the 8B model
RATIOS = {
    (1024, 1024, 8): (1.78, 1.28, 1.54, 1.71),
    (4096, 1024, 16): (4.00, 2.50, 2.99, 3.64),
    (16384, 1024, 16): (8.50, 5.90, 6.30, 7.39),
    (32768, 4096, 8): (4.50, 3.24, 3.35, 3.77),
}


def quotient(config, groups, passes):
    """Operations of the rows as they are over those of the shared ones."""
    return work.operations(config, groups, passes, False) / work.operations(config, groups, passes, True)


@pytest.mark.parametrize(("shape", "expected"), RATIOS.items(), ids=str)
def test_bounds_of_real_models(shape, expected):
    """Numbers of a derivation that was made for itself, to two digits."""
    groups = groups_of(Shape(*shape))
    small, large = (config_of(size) for size in ("0.6B", "8B"))
    found = (
        Shape(*shape).token_ratio,
        quotient(large, groups, work.ATTENTION),
        quotient(small, groups, work.CHECKPOINTED_UPDATE),
        quotient(large, groups, work.CHECKPOINTED_UPDATE),
    )
    assert found == pytest.approx(expected, abs=0.006)


def test_operations_by_hand():
    """A prompt of two tokens, responses of one and of two, hidden size 64, 4 heads of 16, 2 of them of keys."""
    config = config_of("tiny")
    linear = 2 * 2 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128)  # of a token, two layers
    pair, head = 2 * 4 * 64, 2 * 64 * 512
    groups = [(2, [1, 2])]
    rows = 7 * linear + (6 + 10) * pair + 3 * head
    packed = 5 * linear + (3 + (2 + 1) + (4 + 3)) * pair + 3 * head
    assert work.operations(config, groups, work.FORWARD, shared=False) == rows
    assert work.operations(config, groups, work.FORWARD, shared=True) == packed
    update = 3 * 5 * linear + 3.5 * 13 * pair + 4 * 3 * head
    assert work.operations(config, groups, work.UPDATE.with_head_recomputed(), shared=True) == update


def test_a_forward_never_projects_twice():
    assert work.FORWARD.with_head_recomputed() == work.FORWARD
    assert work.ATTENTION.with_head_recomputed() == work.ATTENTION


class Fixed:
    """A contestant that gives fixed values, or fails."""

    def __init__(self, value=1.0, fails=None):
        self.value, self.fails, self.runs = value, fails, 0

    def reset(self):
        pass

    def run(self):
        self.runs += 1
        if self.fails:
            raise self.fails

    def results(self):
        return Results({"values": torch.full((4, 2), self.value)}, [3, 1], {})


def contest(**steps):
    """A case of fixed contestants: ``baseline=``, ``stand_in=``, ``ours=``, ``peer=``."""
    contestants = tuple(
        Contestant(role, role.replace("_", "-"), lambda step=step: step, 100.0) for role, step in steps.items()
    )
    return Case("model", "tiny", "4,2,2", "forward", contestants, 2.0, 2.0, has_target=True)


def fare(effort=ONCE, budget=60.0, **steps):
    entries, wrong = run_case(contest(**steps), CPU, effort, Budget(budget))
    return {entry.name: entry for entry in entries}, wrong


def memory_error():
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 80 GiB")


def test_a_baseline_without_room_is_a_result_and_its_stand_in_is_compared():
    entries, wrong = fare(baseline=Fixed(fails=memory_error()), stand_in=Fixed(), ours=Fixed(), peer=Fixed(9.0))
    assert not wrong
    assert (entries["baseline"].status, entries["baseline"].seconds) == ("out of memory", None)
    assert "80 GiB" in entries["baseline"].reason
    assert entries["stand_in"].status == entries["ours"].status == "timed"
    assert entries["peer"].status == "disagrees"


def test_the_stand_in_is_not_run_where_the_baseline_fits():
    stand_in = Fixed()
    entries, _ = fare(baseline=Fixed(), stand_in=stand_in, ours=Fixed())
    assert (stand_in.runs, entries["stand_in"].status) == (0, "not run")


def test_nothing_to_compare_with_and_nothing_is_run():
    ours = Fixed()
    entries, wrong = fare(baseline=Fixed(fails=memory_error()), stand_in=Fixed(fails=memory_error()), ours=ours)
    assert not wrong
    assert (entries["ours"].status, ours.runs) == ("not compared", 0)


def test_a_peer_that_fails_has_its_reason_and_the_others_go_on():
    broken, absent = Fixed(fails=RuntimeError("no kernel\nfor this")), Fixed(fails=NotRun("liger is not installed"))
    entries, wrong = fare(baseline=Fixed(), ours=Fixed(), peer=broken, other=absent)
    assert not wrong
    assert entries["peer"].reason == "RuntimeError: no kernel for this"
    assert entries["other"].reason == "liger is not installed"
    assert entries["ours"].status == "timed"


def test_ours_that_fail_are_no_reason_for_exit_code_0():
    _, wrong = fare(baseline=Fixed(), ours=Fixed(fails=RuntimeError("no kernel")))
    assert wrong == "ours: RuntimeError: no kernel"


def test_memory_that_ends_while_timing_is_a_result():
    class Later(Fixed):
        def run(self):
            self.runs += 1
            if self.runs > 1:
                raise memory_error()

    entries, wrong = fare(effort=Effort(3), baseline=Fixed(), ours=Fixed(), peer=Later())
    assert not wrong
    assert (entries["peer"].status, entries["peer"].seconds) == ("out of memory", None)
    assert entries["ours"].rounds == 3


class Caching:
    """A device whose runs take 1 s, and 100 s while the allocator's cache does not hold what this step needs."""

    type, is_cuda = "cpu", False

    def __init__(self):
        self.cached = set()

    def watch(self, step):
        seconds = 1.0 if step.__self__ in self.cached else 100.0
        step()
        self.cached.add(step.__self__)
        return Timing(seconds, seconds)

    def peak(self, step):
        step()

    def free(self):
        return None

    def collect(self):
        pass

    def clear(self):
        self.cached.clear()


class FailsAt(Fixed):
    """One that finds no memory in some of its runs, of which the first is the warm-up."""

    def __init__(self, *runs):
        super().__init__()
        self.failing = runs

    def run(self):
        self.runs += 1
        if self.runs in self.failing:
            raise memory_error()


@pytest.mark.parametrize("fails_at", [1, 2, 3])
@pytest.mark.parametrize("budget", [0.0, 60.0])
def test_no_run_that_follows_an_emptied_cache_is_timed(fails_at, budget):
    """Neither the first after a peer without memory, nor those of the turn in which it found none."""
    device, case = Caching(), contest(baseline=Fixed(), ours=Fixed(), peer=FailsAt(fails_at))
    for contestant in case.contestants:
        step = contestant.prepare()
        step.results = lambda step=step, right=step.results: device.cached.add(step) or right()  # warm from its warm-up
    entries, wrong = run_case(case, device, Effort(2), Budget(budget))
    assert not wrong
    baseline, ours, peer = entries
    assert (baseline.seconds, ours.seconds) == (1.0, 1.0)
    assert baseline.rounds == ours.rounds
    assert (peer.status, peer.seconds) == ("timed", 1.0) if peer.rounds else ("out of memory", None)


def test_rounds_end_with_the_budget():
    ours = Fixed()
    entries, _ = fare(effort=Effort(50), budget=0.0, baseline=Fixed(), ours=ours)
    assert (entries["ours"].rounds, ours.runs) == (1, 2)


def test_cases_end_with_the_budget(tmp_path):
    code, found = run_layers(tmp_path, "--seconds", "0.000001")
    assert code == 0
    assert found["cases"] == []
    assert len(found["left_out"]) == 4
    assert all(name.endswith("the time was up") for name in found["left_out"])
    assert run_layers(tmp_path, "--seconds", "0.000001", "--check")[0] == 1


def test_a_wrong_row_among_many_right_ones_is_seen():
    right = Results({"values": torch.zeros(1000, 2)}, [10] * 100, {})
    wrong = Results({"values": torch.zeros(1000, 2).index_fill(0, torch.arange(30, 40), 0.2)}, [10] * 100, {})
    found = errors(right, wrong)
    assert found["values"] == pytest.approx(0.02)
    assert found["values, worst row"] == pytest.approx(0.2)
    assert disagreement(found, {}) == "values, worst row by 2.0e-01 (allowed: 0.05)"
    assert fare(baseline=Fixed(), ours=Fixed(float("nan")))[1]


def test_a_wrong_first_token_of_a_long_row_is_seen():
    """The row's root mean square alone would not tell."""
    right = Results({"values": torch.zeros(1024)}, [1024], {})
    wrong = Results({"values": torch.zeros(1024).index_fill(0, torch.tensor([0]), 1.0)}, [1024], {})
    assert disagreement(errors(right, wrong), {}) == "values, worst token by 1.0e+00 (allowed: 0.3)"


def test_gradients_are_compared_by_their_norm():
    expected = Results({}, [], {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([0.0, 12.0])})
    got = Results({}, [], {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([0.0, 13.3])})
    found = errors(expected, got)
    assert found == pytest.approx({"gradients": 0.1, "gradients, worst": 1.3 / 12})
    assert disagreement(found, {}) == "gradients by 1.0e-01 (allowed: 0.05)"
    assert not disagreement(found, {"gradients": 0.04})


def test_what_differs_may_be_as_large_as_stock_errors_make_it():
    found = {"values": 0.1, "values, worst row": 0.1, "values, worst token": 0.6}
    assert not disagreement(found, {"values": 0.034, "values, worst row": 0.034, "values, worst token": 0.16})
    stock_errors = {"values": 0.033, "values, worst row": 0.033, "values, worst token": 0.14}
    wrong = disagreement(found, stock_errors).split(", ")
    assert wrong[0] == "values by 1.0e-01 (allowed: 0.099)"
    assert wrong[-1] == "worst token by 6.0e-01 (allowed: 0.56)"


def test_an_error_of_half_as_much_again_is_allowed_and_no_more():
    assert not imprecision({"values": 0.010}, {"values": 0.015})
    assert imprecision({"values": 0.010}, {"values": 0.0151}) == "values: 1.5e-02 against 1.0e-02"
    assert imprecision({"values": 0.010}, {"values": float("nan")})


def test_the_worst_tensors_gradient_has_no_limit():
    """Next to nothing, it may be all rounding; all gradients together have one."""
    stock_errors = {"gradients": 0.01, "gradients, worst": 0.05}
    assert not imprecision(stock_errors, {"gradients": 0.01, "gradients, worst": 0.4})
    assert imprecision(stock_errors, {"gradients": 0.02, "gradients, worst": 0.05}).startswith("gradients: ")


def test_without_a_float32_reference_nothing_is_timed():
    def exact():
        raise RuntimeError("float32 is missing")

    entries, wrong = check_precision(contest(baseline=Fixed(), ours=Fixed()), exact, CPU)
    assert wrong == "the float32 reference: RuntimeError: float32 is missing"
    assert all(entry.reason for entry in entries)


def test_an_engine_that_takes_too_long_is_ended_and_listed():
    options = command.arguments(["--device", "cpu", "--tiny"])
    found = command.engine_in_own_process(options, seconds=-1.0, grace=0.2)
    assert found == {"not_run": ["engine: its process was ended after 0 s, the time was up"]}


def test_what_was_measured_is_written_before_the_engines_turn(monkeypatch, tmp_path):
    path, seen = tmp_path / "out.json", []

    def engine(options, seconds):
        seen.append(json.loads(path.read_text())["cases"])
        return {"not_run": ["engine: ended"]}

    monkeypatch.setattr(command, "engine_in_own_process", engine)
    levels = ["--levels", "layer", "engine", "--shapes", "24,8,1", "--json", str(path)]
    assert command.main(["--device", "cpu", "--tiny", *levels]) == 0
    found = json.loads(path.read_text())
    assert seen == [found["cases"]]
    assert len(found["cases"]) == 2
    assert found["not_run"] == ["engine: ended"]


@pytest.mark.slow
def test_the_engines_process_gets_the_attention_that_was_asked_for():
    options = command.arguments(["--device", "cpu", "--tiny", "--attention", "flash_attention_2"])
    found = command.engine_in_own_process(options, seconds=100.0)
    assert "attn_implementation=flash_attention_2: needs a cuda device" in " ".join(found["wrong"])


def outcome(ours, baseline=1.0, ratio=2.0, bound=2.0, ours_peak=None, baseline_peak=None, room=None):
    whole, one_by_one, mine = (Entry(role, role, 1e12) for role in ("baseline", "stand-in", "ours"))
    mine.seconds, mine.peak = ours, ours_peak
    if room is None:
        whole.seconds, whole.peak = baseline, baseline_peak
    else:
        whole.room, one_by_one.seconds, one_by_one.peak = room, baseline, 1
    return Outcome(Case("model", "", "", "", (), bound, ratio, True), [whole, one_by_one, mine], "")


@pytest.mark.parametrize(
    ("found", "speed"),
    [
        (outcome(1 / 1.81), "met"),
        (outcome(1 / 1.79), "MISSED"),
        (outcome(1 / 0.98, ratio=1.0, bound=1.0), "met"),
        (outcome(1 / 0.97, ratio=1.0, bound=1.0), "MISSED"),
        (outcome(None), "not measured"),
        (outcome(1 / 1.81, room=GIB), "met"),
    ],
)
def test_the_verdict_on_speed(found, speed):
    assert found.speed == speed


@pytest.mark.parametrize(
    ("found", "memory"),
    [
        (outcome(1, ours_peak=10 * GIB, baseline_peak=16 * GIB), "met"),
        (outcome(1, ours_peak=10.1 * GIB, baseline_peak=16 * GIB), "MISSED"),
        (outcome(1, ours_peak=10 * GIB, room=16 * GIB), "met"),
        (outcome(1, ours_peak=11 * GIB, room=16 * GIB), "unknown: the baseline does not fit"),
        (outcome(1), "not measured"),
    ],
)
def test_the_verdict_on_memory(found, memory):
    """A token ratio of 2: at most the baseline's over 0.8 x 2; of a baseline that did not fit, what it had."""
    assert found.memory == memory


def test_memory_of_a_baseline_that_cannot_run_is_unknown():
    found = outcome(1, ours_peak=GIB, room=16 * GIB)
    found.entries[0].fail("not run", "too many tokens for 32 bits")
    assert found.memory == "unknown: the baseline does not run"


def test_figures_of_a_case():
    found = outcome(0.5)
    ours = found.entries[2]
    assert (found.speed_up(ours), found.share_of_bound(ours), ours.teraflops) == (2.0, 1.0, 2.0)
    assert found.share_of_bound(found.entries[0]) is None


@pytest.mark.parametrize(("arguments", "limit"), [([], 360), (["--quick"], 120)])
def test_the_plan_fits_its_time(arguments, limit, capsys):
    assert command.main([*arguments, "--dry-run"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert "an estimate" in last
    assert 0 < int(last.split()[1]) < limit
    assert command.arguments(arguments).seconds < limit


def test_without_verl_the_engine_level_is_listed_as_not_run(monkeypatch, tmp_path):
    monkeypatch.setattr(schedule.importlib.util, "find_spec", lambda name: None)
    path = tmp_path / "out.json"
    assert command.main(["--device", "cpu", "--tiny", "--levels", "engine", "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert found["cases"] == []
    assert len(found["not_run"]) == 2
    assert all(name.endswith("verl and tensordict not installed") for name in found["not_run"])


def test_a_level_that_cannot_be_made_is_listed_and_the_exit_code_is_1(tmp_path, capsys):
    code, found = run_layers(tmp_path, "--attention", "flash_attention_2")
    assert code == 1
    assert len(found["not_run"]) == 4
    assert "needs a cuda device" in capsys.readouterr().err


def test_an_attention_that_is_not_there_is_told_the_choices(capsys):
    with pytest.raises(SystemExit):
        command.arguments(["--attention", "nonsense"])
    printed = capsys.readouterr().err
    assert "'nonsense'" in printed
    assert all(name in printed for name in ("auto", "sdpa", "eager", "flash_attention_2"))


def test_the_times_of_the_tiny_model_have_no_target(tmp_path, capsys):
    assert run_layers(tmp_path, "--shapes", "24,8,1", "--check")[0] == 0
    printed = capsys.readouterr().out
    assert "speed: no target, memory: no target" in printed
    assert "MISSED" not in printed


def test_nothing_of_a_case_is_kept_when_it_is_over(monkeypatch, tmp_path):
    """A model that stayed would take the memory of the next."""
    made = []

    class Watched(models.ModelLevel):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            made.append(weakref.ref(self.stock))

    monkeypatch.setattr(schedule, "ModelLevel", Watched)
    runs, right = [], command.Run.as_dict
    monkeypatch.setattr(command.Run, "as_dict", lambda run: runs.append(run) or right(run))
    assert run_layers(tmp_path)[0] == 0
    gc.collect()
    assert runs[0].outcomes
    assert [reference() for reference in made] == [None]


def test_a_gpu_that_is_not_there(capsys):
    if torch.cuda.is_available():
        pytest.skip("this machine has one")
    assert command.main([]) == 1
    assert "--device cpu --tiny" in capsys.readouterr().err


def test_what_flash_attention_2_counts_in_32_bits():
    """32 heads of 128: up to 524288 tokens, less 128 for each row."""
    stock.check_int32(torch.empty(524288 - 8 * 128 - 1, 32, 128, device="meta"), 8)
    with pytest.raises(NotRun, match="32 bits"):
        stock.check_int32(torch.empty(524288 - 8 * 128, 32, 128, device="meta"), 8)


def test_what_counts_as_out_of_memory():
    assert out_of_memory(memory_error())
    assert out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"))
    assert not out_of_memory(RuntimeError("an illegal memory access was encountered"))
    assert not out_of_memory(MemoryError())
