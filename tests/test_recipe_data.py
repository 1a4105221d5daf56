"""The data of the recipes: public formats -> veRL's, read by veRL's own data set, scored as veRL calls a reward."""

import asyncio
import importlib
import json
import os
import re
import resource
import shlex
import shutil
import sqlite3
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import datasets
import numpy
import pyarrow
import pyarrow.parquet
import pytest
import torch
from omegaconf import OmegaConf
from tiny_run import make_material
from transformers import AutoTokenizer
from verl import DataProto
from verl.trainer.ppo.reward import get_custom_reward_fn, load_reward_manager
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.utils.reward_score import default_compute_score

ROOT = Path(__file__).parents[1]
DATA = ROOT / "recipes" / "data"
REWARDS = ROOT / "recipes" / "rewards"
NAMES = ("gsm8k", "text_to_sql", "long_context_qa")
LONGEST = 400  # characters, which are the tokens of the tests' tokenizer: all samples but the long documents


@pytest.fixture(scope="module")
def script():
    """Imports what stands beside the scripts, whose folders are on the path while they run."""
    folders = [str(DATA), str(ROOT / "scripts" / "recipes")]
    sys.path[:0] = folders
    yield importlib.import_module
    for folder in folders:
        sys.path.remove(folder)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """The path of one whose tokens are characters."""
    folder = tmp_path_factory.mktemp("tokenizer")
    make_material(folder)
    return str(folder / "model")


@pytest.fixture(scope="module")
def length(tokenizer):
    """The tokens of a chat, counted by themselves."""
    loaded = AutoTokenizer.from_pretrained(tokenizer)

    def count(messages):
        return len(
            loaded(loaded.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))["input_ids"]
        )

    return count


@pytest.fixture(scope="module")
def samples(script, tmp_path_factory):
    """A folder with a small copy of each public data set, by the name of its script. Not to be changed."""
    folder = tmp_path_factory.mktemp("samples")
    return write_samples(script, folder)


def write_samples(script, folder, names=NAMES):
    writers = script("samples")
    write = {"gsm8k": writers.write_gsm8k, "text_to_sql": writers.write_bird, "long_context_qa": writers.write_docqa}
    for name in names:
        write[name](folder / name)
    return folder


@pytest.fixture
def own_samples(script, tmp_path):
    """The same, to be changed by a test."""
    return lambda name: write_samples(script, tmp_path / "source", [name]) / name


@pytest.fixture(scope="module")
def prepared(script, samples, tokenizer, tmp_path_factory):
    """What the scripts make of the samples, by name."""
    out = tmp_path_factory.mktemp("prepared")
    for name in NAMES:
        limit = ["--tokenizer", tokenizer, "--max-prompt-tokens", str(LONGEST)]
        assert script(name).main(["--source", str(samples / name), "--out", str(out / name), *limit]) == 0
    return out


def rows_of(folder, split="train"):
    return pyarrow.parquet.read_table(folder / f"{split}.parquet").to_pylist()


def rewrite(path, change):
    """Changes the rows of a parquet file."""
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(change(pyarrow.parquet.read_table(path).to_pylist())), path)


def reward_of(name, **kwargs):
    """The reward function as veRL's workers load it."""
    function = {"path": str(REWARDS / f"{name}.py"), "name": "compute_score", "reward_kwargs": kwargs}
    return get_custom_reward_fn(OmegaConf.create({"reward": {"custom_reward_function": function}}))


# the scripts as commands


@pytest.mark.parametrize("name", NAMES)
def test_the_command_writes_two_files_the_same_in_another_process(name, samples, tokenizer, prepared, tmp_path):
    command = [sys.executable, DATA / f"{name}.py", "--source", name, "--out", tmp_path / "out"]
    if name == "long_context_qa":  # the others leave nothing out, and transformers takes seconds to import
        command += ["--tokenizer", tokenizer, "--max-prompt-tokens", str(LONGEST)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=samples, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    files = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert files == {path.name: path.read_bytes() for path in (prepared / name).iterdir()}
    assert sorted(files) == ["train.parquet", "validation.parquet"]
    assert "prompts left out" in done.stdout.splitlines()[-1]


@pytest.mark.parametrize("name", NAMES)
def test_the_last_line_says_what_was_done(name, script, samples, tokenizer, length, prepared, tmp_path, capsys):
    train, validation = rows_of(prepared / name), rows_of(prepared / name, "validation")
    lengths = sorted(length(row["prompt"]) for row in train + validation)
    arguments = ["--source", str(samples / name), "--out", str(tmp_path), "--tokenizer", tokenizer]
    arguments += ["--max-prompt-tokens", str(LONGEST)]
    assert script(name).main(arguments) == 0
    left_out = "0 prompts left out" if name != "long_context_qa" else "4 prompts left out (4 longer than 400 tokens)"
    assert capsys.readouterr().out.splitlines()[-1] == (
        f"{tmp_path}: train.parquet {len(train)} rows, validation.parquet {len(validation)} rows; {left_out}; "
        f"tokens of a prompt: 5% {lengths[int(0.05 * (len(lengths) - 1))]}, 50% {lengths[(len(lengths) - 1) // 2]}, "
        f"95% {lengths[int(0.95 * (len(lengths) - 1))]}, longest {lengths[-1]}"
    )


@pytest.mark.parametrize("name", NAMES)
def test_the_commands_of_a_docstring_are_those_of_the_script(name, script, tmp_path, monkeypatch, capsys):
    """argparse takes them, and the command that the error names is the documented one."""
    module = script(name)
    source = {"gsm8k": "gsm8k", "text_to_sql": "bird", "long_context_qa": "docqa"}[name]
    commands = re.findall(rf"python3 recipes/data/{name}\.py (.*)", module.__doc__)
    assert commands
    monkeypatch.chdir(tmp_path)
    for command in commands:
        assert module.main(shlex.split(command)) == 1
        assert f"error: {source} is no folder" in capsys.readouterr().err
    assert " ".join(module.DOWNLOAD.format(source=source).split()) in " ".join(module.__doc__.split())


@pytest.mark.parametrize("recipe", sorted(ROOT.glob("recipes/*.sh")), ids=lambda path: path.stem)
def test_the_preparation_that_a_recipe_names_is_one_that_the_script_takes(
    recipe, script, tmp_path, monkeypatch, capsys
):
    commands = re.findall(r"^# +python3 recipes/data/(\w+)\.py (.*?)(?: +#.*)?$", recipe.read_text(), re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    for name, command in commands:
        assert script(name).main(shlex.split(command)) == 1
        assert "is no folder" in capsys.readouterr().err


def test_the_download_of_bird_unpacks_into_what_the_script_reads(script, samples, tmp_path):
    """With a curl and an unzip that find the samples, packed as BIRD's archives are, in a folder."""
    packed, tools = tmp_path / "packed", tmp_path / "tools"
    for part, folder in (("train", "train"), ("dev", "dev_20240627")):
        copy = tmp_path / part / folder
        shutil.copytree(samples / "text_to_sql" / folder, copy)
        shutil.make_archive(copy / f"{part}_databases", "zip", copy, f"{part}_databases")
        shutil.rmtree(copy / f"{part}_databases")
        shutil.make_archive(packed / part, "zip", tmp_path / part)
    tools.mkdir()
    (tools / "curl").write_text(f'#!/bin/sh\n[ "$1" = -O ] && cp {packed}/$(basename "$2") .\n')
    (tools / "unzip").write_text(f'#!/bin/sh\nexec {sys.executable} -m zipfile -e "$1" .\n')
    for tool in tools.iterdir():
        tool.chmod(0o755)
    command = script("text_to_sql").DOWNLOAD.format(source="bird")
    environment = os.environ | {"PATH": f"{tools}:{os.environ['PATH']}"}
    subprocess.run(["bash", "-ec", command], cwd=tmp_path, env=environment, check=True, timeout=60)
    bird = tmp_path / "bird"
    assert script("text_to_sql").main(["--source", str(bird), "--out", str(tmp_path / "out")]) == 0
    assert sorted(path.name for path in bird.iterdir()) == ["dev_20240627", "train"]


# what veRL makes of the files


@pytest.fixture
def datasets_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


def load(folder, split, tokenizer, longest):
    config = {"max_prompt_length": longest, "filter_overlong_prompts_workers": 1, "return_raw_chat": True}
    tokenizer = AutoTokenizer.from_pretrained(tokenizer)
    return RLHFDataset(str(folder / f"{split}.parquet"), tokenizer, OmegaConf.create(config))


@pytest.mark.parametrize("name", NAMES)
def test_verl_reads_every_row_and_counts_the_same_tokens(name, prepared, tokenizer, length, datasets_cache):
    for split in ("train", "validation"):
        rows = rows_of(prepared / name, split)
        lengths = [length(row["prompt"]) for row in rows]
        loaded = load(prepared / name, split, tokenizer, max(lengths))
        assert len(loaded) == len(rows)
        for row, item in zip(rows, loaded, strict=True):
            assert item["raw_prompt"] == row["prompt"]
            assert {key: item[key] for key in ("data_source", "reward_model")} == {
                key: row[key] for key in ("data_source", "reward_model")
            }
            assert item["extra_info"]["index"] == row["extra_info"]["index"]
            assert item["extra_info"]["split"] == split
        shorter = load(prepared / name, split, tokenizer, max(lengths) - 1)
        assert len(shorter) == sum(length < max(lengths) for length in lengths) < len(rows)


# what is missing


def remove(path):
    return lambda source: shutil.rmtree(source / path) if (source / path).is_dir() else (source / path).unlink()


def overwrite(path, content):
    return lambda source: (source / path).write_bytes(content)


def edit(path, change):
    return lambda source: rewrite(source / path, lambda rows: [change(row) for row in rows])


def edit_json(path, change):
    def apply(source):
        rows = json.loads((source / path).read_text())
        (source / path).write_text(json.dumps([change(row) for row in rows]))

    return apply


def without(key):
    return lambda row: {name: value for name, value in row.items() if name != key}


GSM8K_TRAIN = "main/train-00000-of-00001.parquet"
GSM8K_TEST = "main/test-00000-of-00001.parquet"
DATABASE = "train/train_databases/shop_1/shop_1.sqlite"
DOWNLOADS = {
    "gsm8k": "hf download openai/gsm8k --repo-type dataset --local-dir {source}",
    "text_to_sql": "mkdir -p {source} && cd {source} && for part in train dev; do curl -O https://bird-bench",
    "long_context_qa": "hf download Tongyi-Zhiwen/DocQA-RL-1.6K --repo-type dataset --local-dir {source}",
}


@pytest.mark.parametrize(
    ("name", "spoil", "said"),
    [
        ("gsm8k", shutil.rmtree, "{source} is no folder"),
        ("gsm8k", remove(GSM8K_TEST), "{source} has no main/test-*.parquet"),
        ("gsm8k", remove("main"), "{source} has no main/train-*.parquet"),
        ("gsm8k", overwrite(GSM8K_TRAIN, b"version https://git-lfs"), "{source}/" + GSM8K_TRAIN + " can't be read"),
        (
            "gsm8k",
            edit(GSM8K_TRAIN, without("answer")),
            "{source}/" + GSM8K_TRAIN + " has no column answer, it has question",
        ),
        ("text_to_sql", shutil.rmtree, "{source} is no folder"),
        ("text_to_sql", remove("train/train.json"), "{source}/train/train.json is not there"),
        ("text_to_sql", overwrite("train/train.json", b"[{"), "{source}/train/train.json is no JSON"),
        (
            "text_to_sql",
            edit_json("train/train.json", without("SQL")),
            "{source}/train/train.json, question 0 has no SQL",
        ),
        (
            "text_to_sql",
            edit_json("dev_20240627/dev.json", without("evidence")),
            "dev.json, question 0 has no evidence",
        ),
        ("text_to_sql", remove(DATABASE), "{source}/" + DATABASE + " is not there"),
        ("text_to_sql", remove("dev_20240627/dev_databases"), "market.sqlite is not there"),
        ("long_context_qa", shutil.rmtree, "{source} is no folder"),
        ("long_context_qa", remove("train.parquet"), "{source} has no **/train*.parquet"),
        ("long_context_qa", overwrite("train.parquet", b""), "{source}/train.parquet can't be read"),
        ("long_context_qa", edit("train.parquet", without("reward_model")), "train.parquet has no column reward_model"),
    ],
)
def test_one_line_says_what_is_missing_and_what_brings_it(
    name, spoil, said, script, own_samples, tokenizer, tmp_path, capsys
):
    source = own_samples(name)
    spoil(source)
    assert script(name).main(["--source", str(source), "--out", str(tmp_path / "out"), "--tokenizer", tokenizer]) == 1
    line = error_line(capsys)
    assert said.format(source=source) in line
    assert DOWNLOADS[name].format(source=source) in line
    assert not (tmp_path / "out").exists()


def error_line(capsys):
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    return line


def no_answer(row):
    return row | {"answer": "It is 42."}


def no_text(row):
    return row | {"reward_model": {"style": "rule", "ground_truth": ["42"]}}


def no_chat(row):
    return row | {"prompt": "What is it?"}


@pytest.mark.parametrize(
    ("name", "spoil", "more", "said"),
    [
        (
            "gsm8k",
            edit(GSM8K_TEST, no_answer),
            [],
            "{source}/main, test row 0: no question, or no answer that ends in '#### 72'",
        ),
        ("gsm8k", None, ["--shots", "64"], "--shots 64: expected 0 to 63, as train has 64 different problems"),
        ("gsm8k", None, ["--shots", "-1"], "--shots -1: expected 0 to 63"),
        ("gsm8k", None, ["--max-prompt-tokens", "9"], "--max-prompt-tokens needs --tokenizer"),
        (
            "text_to_sql",
            overwrite(DATABASE, b"nothing " * 200),
            [],
            "{source}/" + DATABASE + " can't be read as a SQLite",
        ),
        ("text_to_sql", None, ["--example-values", "-1"], "--example-values -1: expected 0 or more"),
        ("text_to_sql", None, ["--validation-share", "1"], "--validation-share 1.0: expected a number between 0 and 1"),
        (
            "text_to_sql",
            lambda source: shutil.copytree(source / "dev_20240627", source / "dev"),
            [],
            "leave one of them",
        ),
        (
            "long_context_qa",
            edit("train.parquet", no_text),
            [],
            "row 0 of train: expected text in reward_model.ground_truth",
        ),
        (
            "long_context_qa",
            edit("train.parquet", no_chat),
            [],
            "row 0 of train: expected messages with role and content",
        ),
        (
            "long_context_qa",
            None,
            ["--validation-share", "0"],
            "--validation-share 0.0: expected a number between 0 and 1",
        ),
        ("long_context_qa", None, [], "--max-prompt-tokens needs --tokenizer"),
    ],
)
def test_one_line_says_what_is_wrong(name, spoil, more, said, script, own_samples, tmp_path, capsys):
    source = own_samples(name)
    if spoil:
        spoil(source)
    assert script(name).main(["--source", str(source), "--out", str(tmp_path / "out"), *more]) == 1
    assert said.format(source=source) in error_line(capsys)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", NAMES)
def test_a_limit_that_nothing_meets_is_one_line(name, script, samples, tokenizer, tmp_path, capsys):
    arguments = ["--source", str(samples / name), "--out", str(tmp_path / "out"), "--tokenizer", tokenizer]
    assert script(name).main([*arguments, "--max-prompt-tokens", "9"]) == 1
    count = {"gsm8k": 72, "text_to_sql": 40, "long_context_qa": 48}[name]
    assert f"train.parquet would have no prompt: {count} prompts left out ({count} longer than 9 tokens)" in error_line(
        capsys
    )
    assert not (tmp_path / "out").exists()


def test_one_line_says_that_a_tokenizer_is_none(script, samples, tokenizer, tmp_path, capsys):
    empty, silent = tmp_path / "empty", tmp_path / "silent"
    empty.mkdir()
    loaded = AutoTokenizer.from_pretrained(tokenizer)
    loaded.chat_template = None
    loaded.save_pretrained(silent)
    for folder in (empty, silent):
        arguments = ["--source", str(samples / "gsm8k"), "--out", str(tmp_path / "out"), "--tokenizer", str(folder)]
        assert script("gsm8k").main(arguments) == 1
        assert f"--tokenizer {folder} has no tokenizer with a chat template" in error_line(capsys)
        assert not (tmp_path / "out").exists()


def test_a_full_disk_leaves_the_files_that_were_there(script, own_samples, tmp_path):
    source, out = own_samples("gsm8k"), tmp_path / "out"
    assert script("gsm8k").main(["--source", str(source), "--out", str(out)]) == 0
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    rewrite(source / GSM8K_TEST, lambda rows: rows * 4000)  # train fits into what is left, validation does not
    size = len(before["train.parquet"]) + 1000
    done = subprocess.run(
        [sys.executable, DATA / "gsm8k.py", "--source", source, "--out", out],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size)),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert re.fullmatch(rf"error: --out {out} can't be written: .*File too large.*\n", done.stderr)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


@pytest.mark.parametrize("inside", [".", "prepared"])
def test_an_out_in_the_source_is_one_line(inside, script, own_samples, tokenizer, capsys):
    """It would replace the data set's files, or the next call would read what this one writes."""
    source = own_samples("long_context_qa")
    before = {path: path.read_bytes() for path in source.iterdir()}
    arguments = ["--source", str(source), "--out", str(source / inside), "--tokenizer", tokenizer]
    assert script("long_context_qa").main(arguments) == 1
    assert f"--out {source / inside} is in --source {source}" in error_line(capsys)
    assert {path: path.read_bytes() for path in source.iterdir()} == before


def test_an_empty_tokenizer_is_one_line(script, samples, tmp_path, capsys):
    arguments = ["--source", str(samples / "gsm8k"), "--out", str(tmp_path / "out"), "--tokenizer", ""]
    assert script("gsm8k").main(arguments) == 1
    assert "--tokenizer has no tokenizer with a chat template" in error_line(capsys)


def test_an_out_that_is_a_file_is_one_line(script, samples, tmp_path, capsys):
    (tmp_path / "out").write_text("mine")
    assert script("gsm8k").main(["--source", str(samples / "gsm8k"), "--out", str(tmp_path / "out")]) == 1
    assert f"--out {tmp_path / 'out'} can't be written" in error_line(capsys)
    assert (tmp_path / "out").read_text() == "mine"


# GSM8K


def shots_of(row):
    return [message["content"] for message in row["prompt"][:-1] if message["role"] == "user"]


@pytest.fixture(scope="module")
def with_shots(script, samples, tmp_path_factory):
    """The rows of the training file with five shots, by seed."""

    def prepare(seed):
        out = tmp_path_factory.mktemp("shots")
        arguments = ["--source", str(samples / "gsm8k"), "--out", str(out), "--shots", "5", "--seed", str(seed)]
        assert script("gsm8k").main(arguments) == 0
        return rows_of(out), rows_of(out, "validation")

    return prepare


def test_shots_are_other_problems_each_once_and_with_their_solutions(with_shots, samples):
    train, validation = with_shots(0)
    source = pyarrow.parquet.read_table(samples / "gsm8k" / "main" / "train-00000-of-00001.parquet").to_pylist()
    solutions = {row["question"]: row["answer"] for row in source}
    for row in train + validation:
        *turns, asked = row["prompt"]
        assert [turn["role"] for turn in row["prompt"]] == ["user", "assistant"] * 5 + ["user"]
        shots = shots_of(row)
        assert len(set(shots)) == 5
        assert asked["content"] not in shots
        for question, answer in zip(turns[::2], turns[1::2], strict=True):
            written = solutions[question["content"].partition("\n")[0]]
            assert answer["content"] == re.sub("<<.*?>>", "", written).replace(",", "")
    assert len({tuple(shots_of(row)) for row in train}) > len(train) / 2  # every question has its own


def test_shots_never_hold_the_question_where_nearly_every_problem_is_drawn(script, own_samples, tmp_path):
    source = own_samples("gsm8k")
    rewrite(source / "main" / "train-00000-of-00001.parquet", lambda rows: rows[:6] + rows[:6])
    arguments = ["--source", str(source), "--out", str(tmp_path / "out"), "--shots", "5"]
    assert script("gsm8k").main(arguments) == 0
    rows = rows_of(tmp_path / "out")
    questions = {row["prompt"][-1]["content"] for row in rows}
    assert (len(rows), len(questions)) == (12, 6)
    for row in rows:
        assert set(shots_of(row)) == questions - {row["prompt"][-1]["content"]}


def test_a_seed_names_the_shots(with_shots):
    first = with_shots(0)
    assert with_shots(0) == first
    other = with_shots(1)
    assert [row["prompt"][-1] for row in other[0]] == [row["prompt"][-1] for row in first[0]]
    assert sum(shots_of(a) != shots_of(b) for a, b in zip(other[0], first[0], strict=True)) > len(first[0]) / 2


def test_the_test_rows_are_for_validation(prepared):
    for split, name in (("train", "Train"), ("validation", "Test")):
        for index, row in enumerate(rows_of(prepared / "gsm8k", split)):
            assert row["prompt"][0]["content"].startswith(f"{name} {index}: ")
            assert row["extra_info"] == {"index": index, "split": split}


def test_verl_scores_gsm8k_by_its_name(prepared):
    row = rows_of(prepared / "gsm8k")[0]
    assert "1200" in row["prompt"][0]["content"]
    score = {
        answer: default_compute_score(row["data_source"], answer, row["reward_model"]["ground_truth"])
        for answer in ("So\n#### 1,234", "So\n#### 1234", "So\n#### 1235", "So 1234")
    }
    assert list(score.values()) == [1.0, 1.0, 0.0, 0.0]


# long documents


def test_the_validation_share_is_drawn_from_what_fits(script, samples, tokenizer, prepared, tmp_path):
    def prepare(*more):
        arguments = ["--source", str(samples / "long_context_qa"), "--out", str(tmp_path), "--tokenizer", tokenizer]
        assert script("long_context_qa").main([*arguments, "--max-prompt-tokens", str(LONGEST), *more]) == 0
        return rows_of(tmp_path), rows_of(tmp_path, "validation")

    def places(rows):
        return [row["extra_info"]["index"] for row in rows]

    train, validation = prepare("--validation-share", "0.25")
    assert len(validation) == 11
    assert sorted(places(train) + places(validation)) == list(range(44))  # 48 rows, the last 4 are too long
    assert prepare("--validation-share", "0.25") == (train, validation)
    assert places(prepare("--validation-share", "0.25", "--seed", "1")[1]) != places(validation)
    assert prepare("--max-prompt-tokens", "100000")[0][-1]["extra_info"]["index"] >= 44
    assert {row["ability"] for row in train} == {"doc-mc", "doc-math", "doc-qa"}


def test_a_ground_truth_that_no_answer_matches_is_left_out(script, own_samples, tokenizer, tmp_path, capsys):
    source = own_samples("long_context_qa")

    def spoil(rows):
        rows[0]["reward_model"]["ground_truth"] = "The correct answer is (E)."
        rows[2]["reward_model"]["ground_truth"] = "Therefore, the answer is ???"
        return rows

    rewrite(source / "train.parquet", spoil)
    arguments = ["--source", str(source), "--out", str(tmp_path / "out"), "--tokenizer", tokenizer]
    assert script("long_context_qa").main(arguments) == 0
    assert "2 prompts left out (2 whose ground truth has no answer)" in capsys.readouterr().out
    kept = rows_of(tmp_path / "out") + rows_of(tmp_path / "out", "validation")
    assert sorted(row["extra_info"]["index"] for row in kept) == [1, *range(3, 48)]


CHOICE = "The correct answer is (B)."
WHOLE = "Therefore, the answer is 1,234."
FRACTION = "Therefore, the answer is 6.4492577269408615."
NAME = 'Therefore, the answer is "The Old Mill".'


@pytest.mark.parametrize(
    ("truth", "answer", "score"),
    [
        (CHOICE, "The correct answer is (B)", 1.0),
        (CHOICE, "**The correct answer is (B) in Rome.**", 1.0),
        (CHOICE, "The correct answer is B. Rome", 1.0),
        (CHOICE, "<think>The correct answer is (A)</think>The correct answer is: **(B)**", 1.0),
        (CHOICE, "The correct answer is (A). No, the correct answer is (B).", 1.0),
        (CHOICE, "The correct answer is (A)", 0.0),
        (CHOICE, "The correct answer is (A) or (B)", 0.0),
        (CHOICE, "The correct answer is Bern", 0.0),
        (CHOICE, "<think>The correct answer is (B)", 0.0),
        (CHOICE, "(B)", 0.0),
        (CHOICE, "<think>The correct answer is (B)</think>I don't know.", 0.0),
        ("B", "The correct answer is (B) in Rome", 1.0),
        ("The correct answer is (E)", "The correct answer is (F)", 0.0),
        ("B", "The correct answer is (C)", 0.0),
        (WHOLE, "Therefore, the answer is 1234.", 1.0),
        (WHOLE, "the answer is $1,234.00 in all", 1.0),
        (WHOLE, "the answer is 1235", 0.0),
        (WHOLE, "the answer is -1234", 0.0),
        ("Therefore, the answer is -1234.", "the answer is \N{MINUS SIGN}1234", 1.0),
        ("Therefore, the answer is -12.5.", "the answer is -12.51", 1.0),
        (WHOLE, "THE ANSWER IS 1234", 1.0),
        (WHOLE, "the answer is 1234\nas 5 and 6 show", 1.0),
        (WHOLE, "the answer is 1.234e3", 1.0),
        (WHOLE, "the answer is 1234, which that answer isn't", 1.0),
        (WHOLE, "the answer is 1234 and every other answer isolated", 1.0),
        (WHOLE, "the answer is\r\n1234", 1.0),
        ("Therefore, the answer is 1,200 pens.", "the answer is 1200 pens", 1.0),
        ("Therefore, the answer is ???", "the answer is !!!", 0.0),
        (WHOLE, "the answer is 1234 or 1235", 0.0),
        (WHOLE, "the answer is twelve", 0.0),
        (FRACTION, "the answer is 6.45%", 1.0),
        (FRACTION, "the answer is 6.4405", 1.0),
        (FRACTION, "the answer is 6.43", 0.0),
        (FRACTION, "the answer is 645%", 1.0),
        (FRACTION, "the answer is 645", 0.0),
        (FRACTION, "the answer is 6.45 to 6.5", 0.0),
        (FRACTION, "the answer is nan", 0.0),
        (FRACTION, "the answer is 1e999999", 0.0),
        (NAME, "So the answer is\nthe old  MILL!", 1.0),
        (NAME, "the answer is an old mill", 1.0),
        (NAME, "the answer is the old mill in Rome", 0.0),
        (NAME, "the answer is mill", 0.0),
        (NAME, "the answer is", 0.0),
        (NAME, "the answer is ...", 0.0),
        (NAME, "", 0.0),
        (NAME, "answer is " * 100_000, 0.0),
        ("Therefore, the answer is 3.5 stars.", "the answer is 35 stars", 0.0),
    ],
)
def test_an_answer_on_a_document_is_compared_as_its_ground_truth_is_written(truth, answer, score):
    assert reward_of("long_context_qa")("docqa", answer, truth, extra_info={}) == score


@pytest.mark.parametrize("truth", [None, "", " \n", ["42"], 42])
def test_a_ground_truth_that_is_no_text_is_an_error(truth):
    with pytest.raises(ValueError, match="ground_truth: expected text"):
        reward_of("long_context_qa")("docqa", "the answer is 42", truth)


# text to SQL


def test_a_prompt_holds_schema_evidence_and_question(script, samples, prepared, tmp_path):
    row = rows_of(prepared / "text_to_sql")[1]
    (message,) = row["prompt"]
    schema, rest = message["content"].split("\n\n")
    assert schema == (
        "CREATE TABLE shop (id INTEGER PRIMARY KEY, city TEXT);\n"
        "CREATE TABLE item (shop INTEGER REFERENCES shop, name TEXT, price REAL);"
    )
    source = json.loads((samples / "text_to_sql" / "train" / "train.json").read_text())[1]
    assert rest == f"{source['evidence']}\n{source['question']}\nAnswer with one SQLite query in a ```sql block."
    assert row["reward_model"]["ground_truth"] == source["SQL"]
    database = Path(row["extra_info"]["database"])
    assert (
        database
        == samples / "text_to_sql" / "train" / "train_databases" / source["db_id"] / f"{source['db_id']}.sqlite"
    )


def test_example_values_come_from_the_database(script, own_samples, tmp_path):
    source = own_samples("text_to_sql")
    name = 'odd "name" here'
    with sqlite3.connect(source / "train" / "train_databases" / "shop_0" / "shop_0.sqlite") as connection:
        connection.execute(
            f'CREATE TABLE odd ("{name.replace(chr(34), chr(34) * 2)}" TEXT, [empty] TEXT, picture BLOB, tale TEXT)'
        )
        connection.executemany(
            "INSERT INTO odd VALUES (?, NULL, x'ff00', NULL)", [("a",), ("b",), ("a",), ("c",), (None,)]
        )
        connection.execute("UPDATE odd SET tale = CAST(x'ff' AS TEXT) || ?", ["x" * 100])
    connection.close()
    arguments = ["--source", str(source), "--out", str(tmp_path / "out"), "--example-values", "2"]
    assert script("text_to_sql").main(arguments) == 0
    content = rows_of(tmp_path / "out")[0]["prompt"][0]["content"]
    # None of the columns that have none or bytes, and no more than 40 characters.
    tale = "'\N{REPLACEMENT CHARACTER}" + "x" * 38 + "..."
    assert f"tale TEXT);\n-- {name}: 'a', 'b'\n-- tale: {tale}\n\n" in content
    assert re.search(r"-- price: [\d.]+, [\d.]+\n", content)


def test_evidence_that_is_null_is_none(script, own_samples, tmp_path):
    source = own_samples("text_to_sql")
    edit_json("train/train.json", lambda row: row | {"evidence": None})(source)
    assert script("text_to_sql").main(["--source", str(source), "--out", str(tmp_path / "out")]) == 0
    assert ");\n\nHow many cheap" in rows_of(tmp_path / "out")[1]["prompt"][0]["content"]


def test_without_dev_whole_databases_are_for_validation(script, own_samples, tmp_path, capsys):
    source = own_samples("text_to_sql")
    shutil.rmtree(source / "dev_20240627")

    def databases(split):
        return {row["extra_info"]["database"] for row in rows_of(tmp_path / "out", split)}

    def prepare(seed):
        arguments = ["--source", str(source), "--out", str(tmp_path / "out"), "--validation-share", "0.5"]
        assert script("text_to_sql").main([*arguments, "--seed", str(seed)]) == 0
        return databases("train"), databases("validation")

    train, validation = prepare(0)
    assert (len(train), len(validation), len(train | validation)) == (2, 2, 4)
    assert "questions on 2 of train's databases are for validation" in capsys.readouterr().out
    assert prepare(0) == (train, validation)
    assert any(prepare(seed) != (train, validation) for seed in range(1, 6))


ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT MAX(i) FROM n"


@pytest.mark.timeout(60, method="thread")  # a signal would wait for SQLite to return
def test_a_question_whose_own_query_cannot_be_scored_is_left_out(script, own_samples, tmp_path, capsys, monkeypatch):
    source = own_samples("text_to_sql")
    path = source / "train" / "train.json"
    questions = json.loads(path.read_text())
    broken = ["SELECT nothing FROM nowhere", "DELETE FROM shop", "SELECT 1; SELECT 2", "", ENDLESS, "SELECT 1 WHERE 0"]
    for question, query in zip(questions, broken, strict=False):
        question["SQL"] = query
    path.write_text(json.dumps(questions))
    module = script("text_to_sql")
    reward = module.load_reward("text_to_sql")
    reward.TIME_LIMIT = 0.2
    monkeypatch.setattr(module, "load_reward", lambda name: reward)
    assert module.main(["--source", str(source), "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "6 prompts left out (5 whose query fails or returns too much" in said
    assert "1 whose query returns nothing" in said
    assert [row["extra_info"]["index"] for row in rows_of(tmp_path / "out")] == list(range(6, 32))


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    """A database of seven items in a folder of its own."""
    path = tmp_path_factory.mktemp("database") / "a shop.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE item (name TEXT, price REAL)")
        prices = {"pens": 4, "eggs": 6.5, "cups": 4, "keys": 1, "nuts": 9, "figs": None, "jam": 2}
        connection.executemany("INSERT INTO item VALUES (?, ?)", prices.items())
    connection.close()
    return str(path)


CHEAP = "SELECT name, price FROM item WHERE price < 5 ORDER BY price"


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        (f"```sql\n{CHEAP}\n```", 1.0),
        (CHEAP, 1.0),
        (f"```SQL\n{CHEAP};\n``` is it.", 1.0),
        (f"<think>```sql\nSELECT 1\n```</think>\nIt is\n```sql\n{CHEAP}\n```", 1.0),
        (f"```sql\nSELECT 1\n```\nor rather\n```sql\n{CHEAP}\n```", 1.0),
        (f"```sql\n{CHEAP}", 1.0),
        (f"```sql\n{CHEAP} DESC\n```", 1.0),  # rows are a set
        ("SELECT name, price FROM item WHERE price < 5 UNION ALL SELECT name, price FROM item WHERE price < 2", 1.0),
        ("WITH cheap AS (SELECT * FROM item WHERE price < 5) SELECT name AS n, CAST(price AS INT) FROM cheap", 1.0),
        (f"```sql\n{CHEAP}\n```\nor rather\n```sql\nSELECT 1\n```", 0.0),
        ("SELECT price, name FROM item WHERE price < 5", 0.0),
        ("SELECT name FROM item WHERE price < 5", 0.0),
        ("SELECT name, price FROM item WHERE price < 4", 0.0),
        ("SELECT name, price FROM item", 0.0),
        ("SELECT name, price FROM item WHERE price > 100", 0.0),
        (f"<think>```sql\n{CHEAP}\n```", 0.0),
        (f"<think>```sql\n{CHEAP}\n```</think>I don't know.", 0.0),
        ("The cheap ones are pens, cups and keys.", 0.0),
        ("", 0.0),
        ("```sql\n```", 0.0),
        ("```sqlite\nSELECT 1\n```", 0.0),
        (f"```sql\n{CHEAP}\n```\n```sqlite\nSELECT 1\n```", 1.0),
        (";", 0.0),
        ("SELEC name", 0.0),
        ("SELECT name, price FROM nowhere", 0.0),
        (f"{CHEAP}; {CHEAP}", 0.0),
        (f"{CHEAP}; DROP TABLE item", 0.0),
        ("SELECT '\0'", 0.0),
        ("SELECT '\ud800'", 0.0),
        ("(" * 100_000, 0.0),
        ("SELECT " + "1," * 100_000, 0.0),
        ("```sql" * 10_000, 0.0),
    ],
)
def test_a_query_is_right_when_it_returns_the_same_set_of_rows(answer, score, shop):
    assert reward_of("text_to_sql")("bird", answer, CHEAP, extra_info={"database": shop}) == score


NOTHING = "SELECT name FROM item WHERE price > 100"


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        (NOTHING, 1.0),
        ("SELECT name, price FROM item WHERE price > 200", 1.0),  # of no rows, BIRD's rule compares none
        ("", 0.0),
        (";", 0.0),
        ("-- none", 0.0),
        ("```sql\n```", 0.0),
        ("REINDEX", 0.0),
        ("<think>none</think>", 0.0),
    ],
)
def test_no_rows_are_the_answer_of_a_query_alone(answer, score, shop):
    assert reward_of("text_to_sql")("bird", answer, NOTHING, extra_info={"database": shop}) == score


@pytest.mark.parametrize(
    "answer",
    [
        "DROP TABLE item",
        "DELETE FROM item",
        "UPDATE item SET price = 0 RETURNING name, price",
        "WITH cheap AS (SELECT 1) INSERT INTO item SELECT 'x', 1 FROM cheap",
        "CREATE TABLE other AS SELECT * FROM item",
        "CREATE TEMP TABLE other AS SELECT * FROM item",
        "ATTACH DATABASE '{folder}/other.sqlite' AS other",
        "VACUUM INTO '{folder}/other.sqlite'",
        "VACUUM",
        "BEGIN EXCLUSIVE",
        "PRAGMA journal_mode = WAL",
        "PRAGMA writable_schema = 1",
        "SELECT load_extension('{folder}/other')",
        "SELECT hex(zeroblob(900000000))",
        "SELECT group_concat(hex(zeroblob(500000))) FROM item",
    ],
)
def test_an_answer_reads_and_does_nothing_else(answer, shop):
    folder = Path(shop).parent
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    started = time.monotonic()
    answer = answer.format(folder=folder)
    assert reward_of("text_to_sql")("bird", answer, CHEAP, extra_info={"database": shop}) == 0.0
    assert time.monotonic() - started < 4  # no query of these runs into the limit of five seconds
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_the_file_is_opened_for_reading_only_whatever_the_authorizer_lets_through(script, shop):
    with script("prompt_files").load_reward("text_to_sql").reading(shop, 5.0) as connection:
        connection.set_authorizer(None)
        with pytest.raises(sqlite3.OperationalError, match="readonly database"):
            connection.execute("DELETE FROM item")


@pytest.mark.parametrize(("size", "score"), [(500_000, 1.0), (2_000_000, 0.0)])
def test_a_value_has_at_most_a_million_bytes(size, score, shop):
    answer, reference = f"SELECT length(zeroblob({size}))", f"SELECT {size}"
    assert reward_of("text_to_sql")("bird", answer, reference, extra_info={"database": shop}) == score


PRODUCT = ", ".join(f"item AS t{i}" for i in range(9))  # 7 ** 9 rows, 40 million


@pytest.mark.timeout(60, method="thread")  # a signal would wait for SQLite to return
@pytest.mark.parametrize(
    ("answer", "reference"),
    [
        (ENDLESS, CHEAP),
        (ENDLESS.replace("MAX(i)", "'pens'"), "SELECT name FROM item"),
        (f"SELECT COUNT(*) FROM {PRODUCT}", CHEAP),
        (f"SELECT t0.name FROM {PRODUCT}", "SELECT name FROM item"),  # forty million right rows
        (f"SELECT t0.name FROM {PRODUCT} ORDER BY random()", "SELECT name FROM item"),
    ],
)
def test_an_answer_has_so_much_time(answer, reference, shop):
    score = reward_of("text_to_sql", time_limit=0.3)
    started = time.monotonic()
    assert score("bird", answer, reference, extra_info={"database": shop}) == 0.0
    assert 0.3 <= time.monotonic() - started < 5
    assert score("bird", reference, reference, extra_info={"database": shop}) == 1.0


def test_rows_that_are_wrong_end_a_query_early(shop):
    started = time.monotonic()
    score = reward_of("text_to_sql", time_limit=60)
    assert score("bird", f"SELECT t8.name, t8.price FROM {PRODUCT}", CHEAP, extra_info={"database": shop}) == 0.0
    assert time.monotonic() - started < 5


@pytest.mark.timeout(60, method="thread")  # a signal would wait for SQLite to return
def test_threads_score_at_once(shop):
    answers = [(CHEAP, 1.0), ("SELECT name FROM item", 0.0), ("DROP TABLE item", 0.0), (ENDLESS, 0.0)] * 8
    score = reward_of("text_to_sql", time_limit=0.1)
    with ThreadPoolExecutor(8) as pool:
        scores = list(pool.map(lambda each: score("bird", each[0], CHEAP, extra_info={"database": shop}), answers))
    assert scores == [expected for _, expected in answers]


@pytest.mark.parametrize(
    ("reference", "extra_info", "said"),
    [
        (CHEAP, None, "extra_info has no 'database'"),
        (CHEAP, {"index": 3}, "extra_info has no 'database'"),
        (CHEAP, {"database": "/nowhere/x.sqlite"}, "database /nowhere/x.sqlite is not there"),
        ("SELECT colour FROM item", {}, "reference query failed .* no such column: colour"),
        ("DROP TABLE item", {}, "reference query failed .* not authorized"),
        ("SELECT 1; SELECT 2", {}, "reference query failed .* one statement"),
        ("", {}, "reference query failed .* it is no query"),
        ("-- none", {}, "reference query failed .* it is no query"),
        (f"SELECT t0.rowid * 7 + t1.rowid FROM {PRODUCT}", {}, "reference query failed .* more than 10000 rows"),
    ],
)
def test_a_broken_reference_is_an_error(reference, extra_info, said, shop):
    extra_info = {"database": shop} if extra_info == {} else extra_info
    with pytest.raises(ValueError, match=said):
        reward_of("text_to_sql")("bird", CHEAP, reference, extra_info=extra_info)


def test_a_broken_database_is_an_error(tmp_path):
    path = tmp_path / "x.sqlite"
    path.write_bytes(b"no database " * 100)
    with pytest.raises(ValueError, match="reference query failed .* not a database"):
        reward_of("text_to_sql")("bird", CHEAP, CHEAP, extra_info={"database": str(path)})


@pytest.mark.parametrize("spoil", [Path.unlink, lambda path: path.write_bytes(b"no database " * 1000)])
def test_a_database_that_is_lost_later_is_an_error(spoil, shop, tmp_path):
    """The rows of the reference are known by then; every answer would be wrong without a word."""
    path, score = tmp_path / "x.sqlite", reward_of("text_to_sql")
    shutil.copy(shop, path)
    assert score("bird", CHEAP, CHEAP, extra_info={"database": str(path)}) == 1.0
    spoil(path)
    with pytest.raises(ValueError, match=f"database {path} can't be read"):
        score("bird", CHEAP, CHEAP, extra_info={"database": str(path)})


def test_a_database_that_another_process_holds_is_an_error(shop, tmp_path):
    path, score = tmp_path / "x.sqlite", reward_of("text_to_sql")
    shutil.copy(shop, path)
    assert score("bird", CHEAP, CHEAP, extra_info={"database": str(path)}) == 1.0
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    with pytest.raises(ValueError, match="database is locked"):
        score("bird", CHEAP, CHEAP, extra_info={"database": str(path)})
    holder.close()


def test_text_that_is_no_utf_8_is_compared(tmp_path):
    path = tmp_path / "x.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE t AS SELECT CAST(x'ff41' AS TEXT) AS c")
    connection.close()
    score = reward_of("text_to_sql")
    assert score("bird", "SELECT c FROM t", "SELECT c FROM t", extra_info={"database": str(path)}) == 1.0
    assert score("bird", "SELECT 'A'", "SELECT c FROM t", extra_info={"database": str(path)}) == 0.0


@pytest.mark.parametrize("name", ["text_to_sql", "long_context_qa"])
def test_verls_reward_manager_scores_a_prepared_row(name, prepared, tokenizer):
    """The whole way: response tokens -> text -> the recipe's function, with what the row says."""
    loaded = AutoTokenizer.from_pretrained(tokenizer)
    row = rows_of(prepared / name)[0]
    right = row["reward_model"]["ground_truth"]
    function = {"path": str(REWARDS / f"{name}.py"), "name": "compute_score"}
    manager = {"source": "register", "name": "naive"}
    config = OmegaConf.create({"reward": {"custom_reward_function": function, "reward_manager": manager}})
    scores = []
    for answer in (right, "SELECT 'the answer is something else'"):
        tokens = loaded(answer, return_tensors="pt")["input_ids"]
        data = DataProto.from_dict(
            tensors={"responses": tokens, "attention_mask": torch.ones_like(tokens)},
            non_tensors={
                key: numpy.array([row[key]], dtype=object) for key in ("data_source", "reward_model", "extra_info")
            },
        )

        async def score(data=data):
            return await load_reward_manager(config, loaded).run_single(data)

        scores.append(asyncio.run(score())["reward_score"])
    assert scores == [1.0, 0.0]
