"""`zorro-verl bench`: figures where both sides agree, none where they don't, a mistake in one line."""

import json
from pathlib import Path

import pytest
import tiny_models
import torch
from typer.testing import CliRunner

from zorro_verl import benchmark, equivalence
from zorro_verl.benchmark import Contestants, Subject, small_config, with_layers
from zorro_verl.checkpoint import quiet_loading
from zorro_verl.cli import app
from zorro_verl.commands.bench import compared, rows_of
from zorro_verl.equivalence import Difference
from zorro_verl.measuring import Effort, Shape, Timing

QUICK = ("--shape", "24,6,4", "--rounds", 1, "--seconds", 0)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folders of tiny models, each saved once."""
    folders = {}

    def folder_of(name, dtype="float32", **config):
        key = repr((name, dtype, config))
        if key not in folders:
            folders[key] = str(tmp_path_factory.mktemp(name))
            with quiet_loading():
                tiny_models.build(name, getattr(torch, dtype), **config).save_pretrained(folders[key])
        return folders[key]

    return folder_of


def command(*arguments):
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


def report_of(*arguments):
    """The exit code and what the command prints with --json."""
    result = command(*QUICK, "--no-memory", *arguments, "--json")
    assert result.exception is None or isinstance(result.exception, SystemExit), result.output
    return result.exit_code, json.loads(result.stdout)


def mistake(*arguments):
    """The one line that a mistake is."""
    result = command(*arguments)
    assert result.exit_code == 2, result.output
    assert not result.stdout
    (line,) = result.stderr.splitlines()
    assert line.startswith("zorro-verl bench: ")
    return line


def break_plans(monkeypatch):
    """The shared side's first response starts from another token than its prompt's last."""
    right = benchmark.build_plan

    def build(*arguments):
        plan = right(*arguments)
        plan.predictor_index[0] = 0
        return plan

    monkeypatch.setattr(benchmark, "build_plan", build)


# What is timed.


@pytest.mark.parametrize("name", ["qwen3", "gemma3_text", "qwen3_moe", "qwen3_5"])
def test_models_of_every_kind_are_timed(saved, name):
    code, report = report_of("--model", saved(name), "--shape", "9,5,1")
    assert (code, report["equal"]) == (0, True), report
    assert (report["model_type"], report["weights"]) == (name, "the checkpoint's")
    assert [(r["P"], r["R"], r["n"]) for r in report["results"]] == [(24, 6, 4), (9, 5, 1)]
    for result in report["results"]:
        for call in ("log_prob", "update"):
            times = result[call]
            plain, shared = (times[side][times["clock"]] for side in ("plain_s", "shared_s"))
            assert times["speed_up"] == pytest.approx(plain / shared)
            assert times["share_of_bound"] == pytest.approx(plain / shared / result["flop_bound"])
    shared, alone = report["results"]
    assert (shared["token_ratio"], alone["token_ratio"]) == (120 / 48, 1)
    assert shared["flop_bound"] > 1.2
    assert alone["flop_bound"] == 1


def test_the_record(saved):
    _, report = report_of()
    for key in ("hardware", "load", "versions", "command", "method"):
        assert report[key]
    assert (report["layers"], report["layers_of_model"], report["hidden_size"]) == (4, 4, 256)
    assert (report["dtype"], report["device"], report["attention"], report["oracle"]) == (
        "float32",
        "cpu",
        "sdpa",
        None,
    )
    (result,) = report["results"]
    assert result["tokens"] == {"padded": 120, "packed": 48}
    assert result["peak_bytes"] == {"plain": None, "shared": None}
    assert {d["quantity"] for d in result["differences"]} == {"log_probs", "log_probs of the update", "gradients"}
    assert all(d["equal"] and d["worst"] <= d["tolerance"] == 2e-5 for d in result["differences"])


def test_bfloat16_is_compared_with_float32(saved):
    code, report = report_of("--model", saved("qwen3"), "--dtype", "bfloat16")
    assert (code, report["oracle"], report["dtype"]) == (0, "float32", "bfloat16"), report
    differences = report["results"][0]["differences"]
    assert all(d["measure"] == "error ratio" and d["worst"] > 0.2 for d in differences)


def test_the_table_fits_100_columns(saved):
    """Of long numbers."""
    result = benchmark.Result(Shape(32768, 8192, 16), 12.34, (), *pairs(123.456, 23.456), (98765 << 20, 12345 << 20))
    rows = rows_of(result)
    assert rows[1][0] == "32768, 8192, 16"
    assert rows[1][-1] == "98765 -> 12345"
    widths = [max(map(len, column)) for column in zip(*rows, TITLES, strict=True)]
    assert sum(widths) + 2 * len(widths) <= 100


TITLES = ("P, R, n", "call", "ratio", "plain s", "shared s", "speed-up", "bound", "of bound", "peak MiB")


def pairs(plain, shared):
    pair = benchmark.Pair(Timing(plain, plain), Timing(shared, shared))
    return pair, pair


def test_what_the_terminal_shows(saved):
    result = command(*QUICK, "--model", saved("qwen3"), "--no-memory")
    assert result.exit_code == 0
    for words in ("Qwen3ForCausalLM (qwen3)", "hardware: ", "versions: ", "command: ", "load: ", "24, 6, 4", *TITLES):
        assert words in result.output, words
    assert result.output.rstrip().endswith("Equal.")


def test_layers_are_cut_and_the_result_says_so(saved):
    folder = saved("gemma3_text")
    code, report = report_of("--model", folder, "--layers", 1)
    assert (code, report["layers"], report["layers_of_model"]) == (0, 1, 2)
    shown = command(*QUICK, "--model", folder, "--layers", 1, "--no-memory").output
    assert "1 of its 2 layers" in " ".join(shown.split())
    whole, cut = (Contestants(Subject.of(folder, layers=layers)).plain.model for layers in (None, 1))
    assert len(cut.model.layers) == 1
    expected = dict(whole.named_parameters())
    assert all(torch.equal(p, expected[name]) for name, p in cut.named_parameters()), "the checkpoint's own weights"


def test_kinds_of_layers_are_cut_alike():
    config = tiny_models.build("qwen3_5", torch.float32).config
    kinds = config.get_text_config().layer_types
    assert with_layers(config, 1).get_text_config().layer_types == kinds[:1]
    assert len(config.get_text_config().layer_types) == len(kinds), "the model's own stay"


def test_a_config_is_enough_with_random_weights(saved, tmp_path):
    folder = saved("qwen3")
    (tmp_path / "config.json").write_text((Path(folder) / "config.json").read_text())
    assert "--random-weights" in mistake(*QUICK, "--model", tmp_path)
    for name in (tmp_path, tmp_path / "config.json"):
        code, report = report_of("--model", name, "--random-weights")
        assert (code, report["weights"]) == (0, "random")


def test_a_config_is_known_without_a_network(monkeypatch):
    """Of the model itself; a hub without one is asked where weights are."""

    def refuse(*arguments):
        raise OSError("no network")

    monkeypatch.setattr("zorro_verl.checkpoint.get_hf_file_metadata", refuse)
    subject = Subject.of("Qwen3-32B", random_weights=True, layers=2)
    assert (subject.name, subject.all_layers, subject.weights) == ("Qwen3-32B", 64, None)
    assert (subject.config.num_hidden_layers, subject.config.hidden_size) == (2, 5120)
    assert "on a hub that can be reached, got 'Qwen3-32B' (no network)" in mistake("--model", "Qwen3-32B")


def test_the_peaks_of_both_sides_stand_beside_their_times(monkeypatch):
    monkeypatch.setattr(benchmark, "peak_on_host", lambda subject, name, shape: {"plain": 3, "shared": 2}[name])
    report = benchmark.bench(Subject.of(), [Shape(8, 4, 2)], Effort(1))
    assert report.results[0].as_json()["peak_bytes"] == {"plain": 3, "shared": 2}


def test_the_threads_of_the_user_are_kept(monkeypatch):
    set_to = []
    monkeypatch.setattr(torch, "set_num_threads", set_to.append)
    _, report = report_of("--shape", "8,4,2")
    threads = torch.get_num_threads()
    assert report["hardware"].endswith(f"{threads} thread{'s' if threads > 1 else ''} used")
    assert not set_to


def test_help_names_the_attention_that_there_is():
    """The same in `verify`."""
    from zorro_verl.options import ZorroOptions

    for name in ("bench", "verify"):
        output = " ".join(CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "200"}).output.split())
        assert "auto, eager, sdpa or flash_attention_2, _3 or _4." in output, name
    with pytest.raises(ValueError, match="'auto', 'eager', 'sdpa', 'flash_attention_2', 'flash_attention_3', 'fl.*_4'"):
        ZorroOptions(attn_implementation="none")


# What differs.


def test_what_differs_gets_no_figure(monkeypatch):
    break_plans(monkeypatch)
    code, report = report_of()
    assert (code, report["equal"]) == (1, False)
    (result,) = report["results"]
    assert (result["log_prob"], result["update"]) == (None, None)
    assert any(not d["equal"] and d["worst"] > 1e-3 for d in result["differences"])
    shown = command(*QUICK, "--no-memory")
    assert shown.exit_code == 1
    assert "differs" in shown.output
    assert shown.output.rstrip().endswith("NOT equal.")


def test_gradients_alone_may_differ(monkeypatch):
    """The loss of the shared side counts twice."""
    right = benchmark.shared_log_probs

    def doubled(model, batch):
        log_probs = right(model, batch)
        return log_probs + (log_probs - log_probs.detach())

    monkeypatch.setattr(benchmark, "shared_log_probs", doubled)
    code, report = report_of()
    equal = {d["quantity"]: d["equal"] for d in report["results"][0]["differences"]}
    assert code == 1
    assert equal == {"log_probs": True, "log_probs of the update": True, "gradients": False}


def test_one_shape_that_differs_leaves_the_others_their_figures(monkeypatch):
    right = benchmark.Contestants.compare

    def compare(self, batch):
        found = right(self, batch)
        return (
            (Difference("log_probs", float("nan"), "row 0", 2e-5, "absolute"),) if len(batch.responses) == 2 else found
        )

    monkeypatch.setattr(benchmark.Contestants, "compare", compare)
    code, report = report_of("--shape", "8,4,2")
    assert code == 1
    assert [result["equal"] for result in report["results"]] == [True, False]
    assert report["results"][0]["update"] is not None
    assert report["results"][1]["differences"][0]["worst"] is None, "JSON has no NaN"


def test_in_bfloat16_a_wrong_model_is_further_from_float32(monkeypatch, saved):
    break_plans(monkeypatch)
    code, report = report_of("--model", saved("qwen3"), "--dtype", "bfloat16")
    assert code == 1
    assert max(d["worst"] for d in report["results"][0]["differences"]) > 5


def test_how_far_apart_is_said_in_words():
    differs = Difference("log_probs", 0.5, "row 0", 2e-5, "absolute")
    result = benchmark.Result(Shape(8, 4, 2), 1.5, (differs,))
    assert "log_probs 5.0e-01 (allowed 2.0e-05)" in compared(result, None)
    assert "multiples of the plain model's error against float32" in compared(result, "float32")
    assert [row[3:6] for row in rows_of(result)] == [("-", "-", "-")]


# Mistakes.


def test_mistakes_are_one_line(saved, tmp_path):
    folder = saved("qwen3")
    assert "expected a checkpoint folder" in mistake("--model", tmp_path / "nothing")
    assert "got '512,64'" in mistake("--shape", "512,64")
    assert "got 'x,y,z'" in mistake("--shape", "x,y,z")
    assert "layers: expected 1 to" in mistake("--model", folder, "--layers", 99)
    assert "layers: expected 1 to" in mistake("--layers", 0)
    assert "rounds: expected at least 1" in mistake("--rounds", 0)
    assert "seconds: expected 0 or more" in mistake("--seconds", -1)
    assert "attn_implementation: expected one of" in mistake(*QUICK, "--attn-implementation", "nonsense")
    assert "device: expected cpu, cuda or cuda:N" in mistake("--device", "tpu")


def test_a_model_that_is_not_supported(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    line = mistake("--model", tmp_path, "--random-weights")
    assert "model_type: expected a supported one, got 'gpt2'" in line


def test_a_gpu_that_is_not_there():
    if torch.cuda.is_available():
        pytest.skip("this machine has one")
    assert "torch finds no CUDA here" in mistake("--device", "cuda")


def test_what_runs_out_of_memory_is_told_the_way_out():
    """More bytes than any process can address."""
    line = mistake("--shape", "1,100000000000,1000", *QUICK[2:])
    assert "shape=1,100000000000,1000: out of memory; expected a smaller --shape, fewer --layers" in line


def test_a_dropout_in_training_is_refused(saved):
    folder = saved("qwen3", attention_dropout=0.1)
    assert "attention_dropout: expected 0 in training" in mistake(*QUICK, "--model", folder)


def test_the_oracle_of_16_bits_is_the_plain_model():
    """Row by row, in float32: what a float32 model computes on the whole batch."""
    contestants = Contestants(Subject(small_config(), "small", 4))
    batch = contestants.batch(Shape(9, 5, 3))
    plain, wide = contestants.plain.outcome(batch), benchmark.wide_outcome(contestants.plain.model, batch)
    comparison = equivalence.Comparison(equivalence.Batch(batch.rows), contestants.plain.model)
    assert all(difference.equal for difference in comparison.differences(plain, wide))
