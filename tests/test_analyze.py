"""`zorro-verl analyze`: figures against brute force, pictures by what is in them, a mistake in one line."""

import json
import random
import sys
from array import array

import numpy as np
import pytest
import tiny_models
import tiny_tokenizer
import torch
from typer.testing import CliRunner

from zorro_verl.analysis import ROLLOUTS, Quantiles, Setup, collect_steps, foresee, summarize, tree_total
from zorro_verl.charts import chart_statistics, check_plot, save
from zorro_verl.cli import app
from zorro_verl.commands.analyze import _three_digits, record
from zorro_verl.drawing import make_rows
from zorro_verl.grouping import find_prompt_groups
from zorro_verl.known_models import config_of
from zorro_verl.prediction import predict
from zorro_verl.rollouts import Measure, Row, Step

TINY = "Qwen3-0.6B"


def ragged_steps(seed=0, steps=3):
    """``(step, sample, prompt, response)`` with prompts of few tokens, so that many begin alike and some are equal."""
    rng = random.Random(seed)
    found = []
    for step in range(steps):
        rows = []
        for sample in range(rng.randint(3, 9)):
            prompt = [7, 7] + [rng.randint(1, 2) for _ in range(rng.randint(1, 6))]
            rows += [(step, f"{step}-{sample}", prompt, [3] * rng.randint(0, 9)) for _ in range(rng.randint(1, 5))]
        rng.shuffle(rows)
        found += rows
    return found


def as_rows(found, measure=Measure.TOKEN_IDS, file="x"):
    return [
        Row(array("i", prompt), array("i", response), Step(file, step), sample, f"{file}:{n}", measure)
        for n, (step, sample, prompt, response) in enumerate(found, 1)
    ]


def summary(found, **options):
    return summarize(collect_steps(as_rows(found, **options)))


def trie_size(prompts):
    """Nodes of a trie, made of dicts."""
    root, count = {}, 0
    for prompt in prompts:
        node = root
        for token in prompt:
            count += token not in node
            node = node.setdefault(token, {})
    return count


# Figures.


@pytest.mark.parametrize("seed", range(8))
def test_figures_against_brute_force(seed):
    found = ragged_steps(seed)
    statistics = summary(found)
    by_step = {step: [row for row in found if row[0] == step] for step in dict.fromkeys(row[0] for row in found)}
    packed = overlap = prompts = 0
    sizes, prompt_lengths, largest, ratios = [], [], 0, dict.fromkeys(ROLLOUTS, (0, 0))
    for step, rows in by_step.items():
        groups = {}
        for _, _, prompt, response in rows:
            groups.setdefault(tuple(prompt), []).append(len(response))
        packed += sum(len(prompt) + sum(lens) for prompt, lens in groups.items())
        overlap += sum(map(len, groups)) - trie_size(groups)
        prompts += len(groups)
        sizes += map(len, groups.values())
        prompt_lengths += map(len, groups)
        largest = max(largest, *(len(prompt) + sum(lens) for prompt, lens in groups.items()))
        for n in ROLLOUTS:
            plain = sum(n * (len(prompt) + np.mean(lens)) for prompt, lens in groups.items())
            shared = sum(len(prompt) + n * np.mean(lens) for prompt, lens in groups.items())
            ratios[n] = ratios[n][0] + plain, ratios[n][1] + shared
        kept = statistics.steps[list(by_step).index(step)]
        real = find_prompt_groups(make_rows([(prompt, response) for *_, prompt, response in rows]))
        assert kept.rows.groups == real.tolist()
    total = sum(len(prompt) + len(response) for *_, prompt, response in found)
    assert (statistics.num_rows, statistics.num_prompts, len(statistics.steps)) == (len(found), prompts, len(by_step))
    assert (statistics.tokens, statistics.packed, statistics.largest_group) == (total, packed, largest)
    assert (statistics.overlap, statistics.overlap_share) == (overlap, overlap / packed)
    assert statistics.token_ratio == pytest.approx(total / packed)
    assert sum(([share.size] * share.groups for share in statistics.sizes), []) == sorted(sizes)
    assert sum(share.tokens for share in statistics.sizes) == total
    assert sum(share.packed for share in statistics.sizes) == packed
    assert sorted(statistics.prompt_lengths) == sorted(prompt_lengths)
    assert sorted(statistics.response_lengths) == sorted(len(row[3]) for row in found)
    assert statistics.ratio_of_rollouts == {n: pytest.approx(plain / shared) for n, (plain, shared) in ratios.items()}
    assert overlap > 0


def test_token_ratio_of_one_size():
    """256 prompts of 40 with 8 responses of 5: n (P + R) / (P + n R)."""
    found = [(1, str(p), [p + 1] * 40, [0] * 5) for p in range(256) for _ in range(8)]
    statistics = summary(found)
    assert statistics.token_ratio == pytest.approx(8 * 45 / (40 + 40))
    assert statistics.ratio_of_rollouts[8] == pytest.approx(statistics.token_ratio)
    assert [(share.size, share.groups, share.token_ratio) for share in statistics.sizes] == [(8, 256, 4.5)]
    assert statistics.overlap == 0


def test_steps_do_not_share():
    same = [(step, "s", [1, 2, 3], [4]) for step in (1, 1, 2)]
    statistics = summary(same)
    assert (statistics.packed, statistics.num_prompts, statistics.overlap) == (5 + 4, 2, 0)
    files = as_rows(same[:1], file="a") + as_rows(same[:1], file="b")
    assert summarize(collect_steps(files)).num_prompts == 2


def test_a_file_is_done_before_the_next_one():
    """Of all files but the one that is being read, lengths alone are kept."""
    rows = [row for file in "abc" for row in as_rows([(1, "s", [1], [2])], file=file)]
    read = []

    def reading():
        for row in rows:
            read.append(row.step.file)
            yield row

    steps = collect_steps(reading())
    assert next(steps).step.file == "a"
    assert read == ["a", "b"]


@pytest.mark.parametrize("count", [1, 2, 9, 10, 11, 100, 199])
def test_quantiles(count):
    lengths = random.Random(count).choices(range(50), k=count)
    expected = np.quantile(lengths, [0.1, 0.5, 0.9, 0.99, 1], method="inverted_cdf").tolist()
    assert list(Quantiles.of(lengths)) == expected


@pytest.mark.parametrize("seed", range(20))
def test_prefix_trees(seed):
    """Token ids whose bytes sort in another order than they do, one prompt the beginning of another, equal ones."""
    rng = random.Random(seed)
    prompts = [[rng.choice([1, 255, 256, 2**24, 2**31 - 1]) for _ in range(rng.randint(0, 5))] for _ in range(12)]
    assert tree_total(array("i", prompt).tobytes() for prompt in prompts) == trie_size(prompts)


def test_rows_of_one_sample_that_differ():
    prompts = [list(range(1, 40)), [*range(1, 30), 99, *range(31, 40)]]
    found = [(1, "a", prompts[0], [5]), (1, "b", [8], [5]), (1, "a", prompts[1], [5]), (1, "c", [9, 1], [1])]
    found += [(1, "c", [9, 2], [1]), (1, "c", [9, 3], [1])]
    statistics = summary(found)
    assert (statistics.samples_differing, statistics.sample_overlap) == (2, 29 + 2)
    difference = statistics.difference
    assert (difference.sample, difference.one, difference.other, difference.position) == ("a", "x:1", "x:3", 30)
    assert list(difference.one_has) == list(range(18, 40))[:24]
    assert list(difference.other_has) == [*range(18, 30), 99, *range(31, 40)][:24]
    alike = summary([(1, "a", prompts[0], [5]), (2, "a", prompts[1], [5]), (1, None, [1], []), (1, None, [2], [])])
    assert (alike.samples_differing, alike.difference) == (0, None)


# Predictions.


@pytest.fixture(scope="module")
def config():
    return config_of(TINY)


def test_predictions_are_sums_over_steps(config):
    found = [
        (step, f"{step}-{p}", [p + 1] * (100 * step), [0] * 50) for step in (1, 2) for p in range(4) for _ in range(4)
    ]
    statistics = summary(found)
    outlook = foresee(config, statistics, Setup(ranks=2))
    assert (outlook.setup.budget, outlook.setup.ranks) == (200 + 4 * 50, 2)
    assert [way.name for way in outlook.ways] == ["stock", "row_placed", "group_placed"]
    predictions = [predict(config, step.rows, ranks=2, budget=400) for step in statistics.steps]
    for forecast in outlook.ways:
        ways = [getattr(prediction, forecast.name) for prediction in predictions]
        for call in ("log_prob", "update"):
            passes = [getattr(way, call) for way in ways]
            stock = sum(getattr(prediction.stock, call).slowest for prediction in predictions)
            speedup, ratio, memory = (
                getattr(forecast, f"{call}_{what}") for what in ("speedup", "token_ratio", "memory")
            )
            assert speedup == pytest.approx(stock / sum(one.slowest for one in passes))
            assert ratio == pytest.approx(statistics.tokens / sum(one.tokens for one in passes))
            assert memory == max(one.memory for one in passes)
        assert forecast.groups_cut == sum(way.update.groups_cut for way in ways)
    stock, by_row, by_group = outlook.ways
    assert stock.update_speedup == 1
    assert by_group.update_speedup > by_row.update_speedup > 1
    assert by_group.update_token_ratio == pytest.approx(statistics.token_ratio)


@pytest.mark.parametrize("ragged_first", [True, False])
def test_without_verl_there_is_no_stock_unless_all_steps_are_of_one_length(config, monkeypatch, ragged_first):
    for name in [name for name in sys.modules if name.partition(".")[0] == "verl"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "verl", None)
    rows = {
        alike: [(p, [p + 1] * 10, [0] * (5 if alike else p + r + 1)) for p in range(4) for r in range(4)]
        for alike in (True, False)
    }
    found = [(step, *row) for step, alike in enumerate((not ragged_first, ragged_first)) for row in rows[alike]]
    outlook = foresee(config, summary(found), Setup(ranks=2))
    assert [(way.name, way.log_prob_speedup) for way in outlook.ways] == [("group_placed", None)]
    assert len(outlook.notes) == 1
    assert "veRL" in outlook.notes[0]
    alone = foresee(config, summary([(0, *row) for row in rows[True]]), Setup(ranks=2))
    assert [way.name for way in alone.ways] == ["stock", "group_placed"]
    assert alone.ways[1].update_speedup > 1


def test_characters_predict_nothing(config):
    statistics = summary([(1, None, [1], [2])], measure=Measure.CHARACTERS)
    with pytest.raises(ValueError, match="--model: expected lengths in tokens, got characters; add --tokenizer MODEL"):
        foresee(config, statistics, Setup())


# Pictures.


def test_what_is_drawn(config):
    found = ragged_steps(3)
    statistics = summary(found)
    outlook = foresee(config, statistics, Setup(ranks=2))
    lengths, ratios, times = chart_statistics(statistics, outlook).axes[:3]
    assert (lengths.get_xlabel(), lengths.get_ylabel()) == ("length (tokens)", "how many")
    labels = [text.get_text() for text in lengths.get_legend().get_texts()]
    assert labels == [f"prompts, each once ({statistics.num_prompts})", f"responses ({len(found)})"]
    bars = [sum(patch.get_height() for patch in container.patches) for container in lengths.containers]
    assert bars == [statistics.num_prompts, len(found)]

    points = {tuple(point) for point in ratios.collections[0].get_offsets().round(6).tolist()}
    groups = {}
    for step, _, prompt, response in found:
        groups.setdefault((step, tuple(prompt)), []).append(len(response))
    expected = {
        (len(prompt), round((len(prompt) * len(lens) + sum(lens)) / (len(prompt) + sum(lens)), 6))
        for (_, prompt), lens in groups.items()
    }
    assert points == expected
    assert ratios.get_xlabel() == "length of its prompt (tokens)"
    assert ratios.lines[0].get_ydata()[0] == statistics.token_ratio

    heights = [[bar.get_height() for bar in container.patches] for container in times.containers]
    assert heights == [[1 / way.log_prob_speedup, 1 / way.update_speedup] for way in outlook.ways]
    assert [label.get_text() for label in times.get_xticklabels()] == ["compute_log_prob", "update_actor"]
    assert (times.get_xlabel(), times.get_ylabel()) == ("on 2 data-parallel ranks", "time / time of stock")
    said = "predicted time of the model's passes in a step, stock = 1, by floating-point work"
    assert times.get_title().replace("\n", " ") == said


def test_two_panels_without_a_model():
    statistics = summary([(1, "a", [1] * 9, [2] * n) for n in (0, 1)], measure=Measure.CHARACTERS)
    panels = chart_statistics(statistics, None).axes
    assert [panel.get_xlabel() for panel in panels] == ["length (characters)", "length of its prompt (characters)"]
    assert panels[1].get_title() == "token ratio of each group of 2 rows"
    assert sum(patch.get_height() for patch in panels[0].containers[1].patches) == 2  # the empty response as well


def test_places_for_pictures(tmp_path, monkeypatch):
    for path in (tmp_path / "x.pdf", tmp_path / "nowhere" / "x.png"):
        with pytest.raises(ValueError, match=r"--plot: expected a .png file in a folder that is there, got"):
            check_plot(path)
    check_plot(tmp_path / "x.png")
    check_plot(None)
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(ValueError, match=r"--plot: expected a file that can be written, got '.*' \(Is a directory\)"):
        save(chart_statistics(summary([(1, None, [1], [2])]), None), tmp_path / "folder.png")
    monkeypatch.setattr(sys, "meta_path", [])
    monkeypatch.delitem(sys.modules, "matplotlib", raising=False)
    with pytest.raises(ValueError, match=r"--plot: expected matplotlib, got none; pip install 'zorro-verl\[plot\]'"):
        check_plot(tmp_path / "x.png")


# The command.


def command(*arguments):
    return CliRunner().invoke(app, ["analyze", *map(str, arguments)])


@pytest.fixture
def dump(tmp_path):
    file = tmp_path / "4.jsonl"
    records = [
        {"input": f"question {p}, asked at {time}\n", "output": "x" * length, "uid": f"{p}_{rollout}_0", "step": 4}
        for p, times in enumerate((["10:31", "10:31"], ["10:31", "10:32"]))
        for rollout, (time, length) in enumerate(zip(times, (5, 7), strict=True))
    ]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer.build().save_pretrained(folder)
    return folder


def test_the_tables(dump, tokenizer):
    result = command(dump, "--tokenizer", tokenizer)
    assert result.exit_code == 0, result.output
    text = " ".join(result.output.split())
    for words in (
        "4 rows, 3 prompts, 1 step rows of a prompt: 2 of 1, 1 of 2",
        "length in tokens 10 % median 90 % 99 % longest",
        "prompts, each once 27 27 27 27 27",
        "responses 5 5 7 7 7",
        "tokens: 132 in rows, 105 with each prompt once token ratio: 1.26",
        "largest group: 39 packed tokens; ppo_max_token_len_per_gpu of at least this keeps it whole",
        "prefixes that prompts have in common beyond that: 34 tokens, 32.4% of the packed ones",
        "this package shares whole prompts only",
        "1 sample has rows with different prompts, which do not share.",
        f"{dump}:3 and {dump}:4 are of one sample, and differ from token 26 on: ",
        "'sked at 10:31\\n' and 'sked at 10:32\\n'",
        "a date or a random id in the prompt's template",
        "Note: a dump's text is without special tokens, and is tokenized again",
    ):
        assert words in text, (words, text)
    assert "characters" not in text


def test_one_row(dump):
    dump.write_text(dump.read_text().splitlines()[0])
    assert command(dump).stdout.startswith("1 row, 1 prompt, 1 step\n")


def test_characters_are_called_so(dump):
    text = " ".join(command(dump).output.split())
    assert "length in characters" in text
    assert "Note: lengths are in characters, as text without --tokenizer has no tokens" in text
    assert "ppo_max_token_len_per_gpu" not in text


def test_json_and_picture(dump, tokenizer, tmp_path):
    picture = tmp_path / "x.png"
    result = command(dump, "--tokenizer", tokenizer, "--model", TINY, "--dp", 2, "--plot", picture, "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert (report["unit"], report["rows"], report["prompts"], report["packed"]) == ("tokens", 4, 3, 105)
    assert report["group_sizes"] == {"1": 2, "2": 1}
    difference = {"sample": "1", "rows": [f"{dump}:3", f"{dump}:4"], "position_from_1": 26}
    assert report["first_difference"] == difference
    assert [(step["step"], step["rows"], step["token_ratio"]) for step in report["steps"]] == [(4, 4, 132 / 105)]
    prediction = report["prediction"]
    assert (prediction["ranks"], prediction["ppo_max_token_len_per_gpu"]) == (2, 128)
    assert [way["name"] for way in prediction["ways"]] == ["stock", "row_placed", "group_placed"]
    assert prediction["assumes"] == {
        "dtype": "bfloat16",
        "enable_gradient_checkpointing": True,
        "logits_optimization": "none",
        "ppo_mini_batch_size": None,
        "ulysses_sequence_parallel_size": 1,
    }
    assert picture.read_bytes().startswith(b"\x89PNG\r\n")


def test_the_table_of_a_prediction(dump, tokenizer):
    asked = "--tokenizer", tokenizer, "--model", TINY, "--budget", 1000
    text = " ".join(command(dump, *asked).output.split())
    assert "predicted on 1 data-parallel rank, ppo_max_token_len_per_gpu=1000" in text
    assert "predicted on 2 data-parallel ranks, " in command(dump, *asked, "--dp", 2).output
    assert "memory, GiB" in text
    said = "gradient checkpointing, logits_optimization=none, one mini-batch a step, no sequence parallelism."
    assert f"Assumed: bfloat16, {said}" in text
    (way,) = (way for way in json.loads(command(dump, *asked, "--json").stdout)["prediction"]["ways"][2:])
    told = f"zorro {way['log_prob_token_ratio']:.2f} / {way['update_token_ratio']:.2f} "
    told += f"{way['log_prob_speedup']:.2f} / {way['update_speedup']:.2f} "
    told += f"{way['log_prob_memory'] / 2**30:.4f} / {way['update_memory'] / 2**30:.3f} 0"
    assert told in text, (told, text)


@pytest.mark.parametrize(
    ("number", "text"), [(1234.5, "1,234"), (100.2, "100"), (23.456, "23.5"), (1.5, "1.50"), (0.00123456, "0.00123")]
)
def test_three_digits(number, text):
    assert _three_digits(number) == text


def test_how_rows_are_trained_on(config):
    """Mini-batches cut groups and logits cost memory: what is said to be assumed is what is computed."""
    found = [(1, str(p), [p + 1] * 40, [0] * 9) for p in range(6) for _ in range(4)]
    statistics = summary(found)
    counts = [Setup(mini_batch=size).mini_batches(statistics.steps[0].rows) for size in (1, 4, 6, 9, None)]
    assert counts == [6, 2, 1, 1, 1]
    setup = Setup(ranks=4, budget=200, mini_batch=3, logits_optimization="memory")
    way = foresee(config, statistics, setup).ways[-1]
    options = {"ranks": 4, "budget": 200, "mini_batches": 2, "logits_optimization": "memory"}
    predicted = predict(config, statistics.steps[0].rows, **options).group_placed
    assert (way.update_memory, way.groups_cut) == (predicted.update.memory, predicted.update.groups_cut)
    plain = foresee(config, statistics, Setup(ranks=4, budget=200)).ways[-1]
    assert (way.update_memory, way.groups_cut) != (plain.update_memory, plain.groups_cut)
    assert "logits_optimization=memory, ppo_mini_batch_size=3, " in str(setup)


def test_the_command_hands_on_how_rows_are_trained_on(dump, tokenizer):
    asked = "--tokenizer", tokenizer, "--model", TINY, "--mini-batch", 2, "--logits-optimization", "compute"
    prediction = json.loads(command(dump, *asked, "--json").stdout)["prediction"]
    assert (prediction["assumes"]["ppo_mini_batch_size"], prediction["assumes"]["logits_optimization"]) == (
        2,
        "compute",
    )


def test_padding_is_left_out_and_counted(dump, tokenizer):
    """As veRL's V1 trainers write it: without a text."""
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    without = json.loads(command(dump, "--tokenizer", tokenizer, "--json").stdout)
    records = [json.loads(line) for line in dump.read_text().splitlines()]
    records += [{"input": "", "output": "", "uid": f"pad{'0a' * 16}_{n}_0"} for n in range(3)]
    columns = ([record[name] for record in records] for name in ("input", "output", "uid"))
    inputs, outputs, uids = columns
    PPOTrainer._write_generations(inputs, outputs, [None] * 7, [1.0] * 7, {"uid": uids}, str(dump.parent), 4)
    report = json.loads(command(dump, "--tokenizer", tokenizer, "--json").stdout)
    assert report == without | {"padding_rows": 3}
    text = " ".join(command(dump, "--tokenizer", tokenizer).output.split())
    assert "Note: 3 rows are left out, which veRL added so that a step's rows divide: nobody sampled them." in text
    dump.write_text(dump.read_text().splitlines()[-1])
    assert command(dump).stderr == "zorro-verl analyze: FILE: expected at least one row, got none\n"


def test_a_model_whose_memory_is_not_known(dump, tokenizer, tmp_path):
    tiny_models.build("gemma3_text", torch.float32).config.save_pretrained(tmp_path / "model")
    result = command(dump, "--tokenizer", tokenizer, "--model", tmp_path / "model")
    assert result.exit_code == 0, result.output
    assert "gemma3_text" in result.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("nowhere.jsonl",),
            "FILE: expected a dump of rollouts or a folder of them, got 'nowhere.jsonl': no such file",
        ),
        (("{dump}", "--dp", "2"), "--dp: expected --model as well, whose prediction it changes, got none"),
        (("{dump}", "--dp", "2", "--mini-batch", "3"), "--dp, --mini-batch: expected --model as well"),
        (("{dump}", "--logits-optimization", "memory"), "--logits-optimization: expected --model as well"),
        (
            ("{dump}", "--model", TINY, "--logits-optimization", "x"),
            "--logits-optimization: expected none or compute or memory, got 'x'",
        ),
        (("{dump}", "--model", TINY, "--dp", "0"), "--dp: expected at least 1, got 0"),
        (("{dump}", "--model", TINY, "--budget", "-5"), "--budget: expected at least 1, got -5"),
        (("{dump}", "--model", TINY, "--mini-batch", "0"), "--mini-batch: expected at least 1, got 0"),
        (("{dump}", "--model", TINY), "--model: expected lengths in tokens, got characters; add --tokenizer MODEL"),
        (("{dump}", "--model", "./nowhere"), "model: expected a checkpoint folder with a config.json"),
        (("{dump}", "--tokenizer", "{dump}"), "--tokenizer: expected one that can be read, got"),
        (("{dump}", "--prompt-column", "question"), "{dump}:1: expected a prompt in 'question', got the columns input"),
        (("{dump}", "--plot", "x.svg"), "--plot: expected a .png file"),
        (("{empty}",), "FILE: expected at least one row, got none"),
        (("{dump}", "{dump}"), "FILE: expected each file once, got '{dump}' twice"),
    ],
)
def test_a_mistake_is_one_line(dump, tmp_path, arguments, said):
    (tmp_path / "empty.jsonl").write_text("")
    places = {"dump": dump, "empty": tmp_path / "empty.jsonl"}
    result = command(*(argument.format(**places) for argument in arguments))
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"zorro-verl analyze: {said.format(**places)}"), line


def test_a_budget_below_the_longest_row(dump, tokenizer):
    result = command(dump, "--tokenizer", tokenizer, "--model", TINY, "--budget", 20)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert "max_token_len_per_gpu: expected at least" in line


def test_records_without_a_difference_or_a_model():
    report = record(summary([(1, None, [1, 2], [3])]), None)
    assert (report["first_difference"], report["prediction"]) == (None, None)
    assert (report["prompt_length"]["median"], report["total"], report["read_from"]) == (2, 3, ["token ids"])
