"""Dumped rollouts as rows: what veRL writes, parquet in all its forms, and one line for what can't be read."""

import io
import json
import os
import sys
import uuid
from array import array
from itertools import islice
from pathlib import Path

import httpx
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tiny_tokenizer
from tokenizers.processors import TemplateProcessing

from zorro_verl import checkpoint
from zorro_verl.rollouts import (
    Columns,
    Measure,
    Padding,
    Step,
    find_files,
    load_tokenizer,
    read_rows,
    rows_of_step,
)

CHAT = [{"role": "user", "content": "2+3?"}]
GOOD = {"prompt": [1], "response": [2]}


def write_jsonl(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def write_parquet(path, records):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)
    return path


WRITERS = {".jsonl": write_jsonl, ".parquet": write_parquet}


@pytest.fixture(params=WRITERS)
def dump(request, tmp_path):
    """Writes records to a new file of either kind."""
    return lambda records, name="dump": WRITERS[request.param](tmp_path / f"{name}{request.param}", records)


def texts(row):
    return "".join(map(chr, row.prompt)), "".join(map(chr, row.response))


def ids(text, tokenizer):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


# What veRL writes.


def write_by_v1(folder, step, inputs, outputs, uids):
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    PPOTrainer._write_generations(
        inputs, outputs, [None] * len(inputs), [np.float32(1)] * len(inputs), {"uid": uids}, str(folder), step
    )


def write_by_legacy(folder, step, inputs, outputs, uids):
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    RayPPOTrainer._write_generations(
        inputs, outputs, ["7"] * len(inputs), [0.5] * len(inputs), {"request_id": uids}, str(folder), step
    )


@pytest.mark.parametrize(("write", "samples"), [(write_by_v1, ["a", "a", "b_1"]), (write_by_legacy, [None] * 3)])
def test_a_folder_of_dumps_that_verl_writes(tmp_path, write, samples):
    for step in (10, 2):
        write(tmp_path, step, ["héllo 🙂\n", "héllo 🙂\n", "x"], ["1", "", "\u2028two"], ["a_0_0", "a_1_0", "b_1_0_0"])
    files = find_files([tmp_path])
    assert [file.name for file in files] == ["2.jsonl", "10.jsonl"]
    rows = list(read_rows(files))
    assert [row.step.number for row in rows] == [2, 2, 2, 10, 10, 10]
    assert [texts(row) for row in rows[:3]] == [("héllo 🙂\n", "1"), ("héllo 🙂\n", ""), ("x", "\u2028two")]
    assert [row.sample for row in rows[:3]] == samples
    assert {row.measure for row in rows} == {Measure.CHARACTERS}
    assert [row.where for row in rows[:4]] == [f"{files[0]}:{n}" for n in (1, 2, 3)] + [f"{files[1]}:1"]


def test_padding_is_no_rollout(tmp_path):
    """veRL's V1 trainers add rows until a count divides, and dump them without a text."""
    uids = ["a_0_0", f"pad{uuid.uuid4().hex}_0_0", "a_1_0", f"pad{uuid.uuid4().hex}_11_0"]
    write_by_v1(tmp_path, 3, ["p", "", "p", ""], ["1", "", "22", ""], uids)
    step = Step(str(tmp_path / "3.jsonl"), 3)
    for tokenizer in (None, tiny_tokenizer.build()):
        rows = list(read_rows(find_files([tmp_path]), tokenizer=tokenizer))
        assert (rows[1], rows[3]) == (Padding(step), Padding(step))
        assert [row.where for row in (rows[0], rows[2])] == [f"{step.file}:1", f"{step.file}:3"]
        assert list(rows_of_step(rows, 3)) == [rows[0], rows[2]]


def test_steps(dump):
    """By the row, else by the file's name; files of different runs stay apart."""
    row = {"prompt": [1], "response": [2]}
    named, other, said = dump([row], "3"), dump([row], "rollouts"), dump([row | {"step": 5}, row | {"step": 4}], "9")
    steps = [row.step for row in read_rows([named, other, said])]
    assert steps == [Step(str(named), 3), Step(str(other), None), Step(str(said), 5), Step(str(said), 4)]
    assert [str(step).partition(" of ")[0] for step in steps] == ["step 3", str(other), "step 5", "step 4"]
    assert [row.step.number for row in rows_of_step(read_rows([named, said]), 4)] == [4]
    assert [row.step.number for row in rows_of_step(read_rows([named, said]), None)] == [3]
    for files, number, expected in (
        ([named], 8, "3"),
        ([named, other, said], 8, "one of 3 to 5"),
        ([other], 8, "none, as no row says its step"),
    ):
        with pytest.raises(ValueError, match=f"--step: expected {expected}, got 8"):
            list(rows_of_step(read_rows(files), number))
    with pytest.raises(ValueError, match="FILE: expected at least one row, got none"):
        list(rows_of_step([Padding(Step("x", 1))], 1))


def test_what_comes_after_a_step_is_not_read(tmp_path):
    first, second = tmp_path / "1.jsonl", tmp_path / "2.jsonl"
    write_jsonl(first, [GOOD] * 300)
    write_jsonl(second, [GOOD] * 300 + [{}])
    assert len(list(rows_of_step(read_rows([first, second]), 1))) == 300
    with pytest.raises(ValueError, match="2.jsonl:301"):
        list(rows_of_step(read_rows([first, second]), 2))


# Forms of prompts and responses.


def test_token_ids(dump):
    (row,) = read_rows([dump([{"prompts": [5, 6], "responses": [7], "uid": "s"}])])
    assert (row.prompt, row.response, row.measure) == (array("i", [5, 6]), array("i", [7]), Measure.TOKEN_IDS)
    assert (row.sample, row.measure.unit) == ("s", "tokens")


def test_text_without_a_tokenizer_is_characters(dump):
    (row,) = read_rows([dump([{"prompt": "né🙂", "response": "z"}])])
    assert (list(row.prompt), row.measure.unit) == ([ord("n"), ord("é"), 0x1F642], "characters")


def test_half_a_character(tmp_path):
    """Tokens that were sampled may end in the middle of one, and JSON can say it."""
    file = tmp_path / "x.jsonl"
    file.write_text('{"prompt": "p", "response": "a\\ud83d"}\n')
    (row,) = read_rows([file])
    assert list(row.response) == [ord("a"), 0xD83D]


def test_text_with_a_tokenizer(dump):
    """Nothing is added to it, and equal texts are tokenized once."""
    tokenizer, asked = tiny_tokenizer.build(), []
    start = [(tiny_tokenizer.START, tokenizer.convert_tokens_to_ids(tiny_tokenizer.START))]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(f"{tiny_tokenizer.START} $A", special_tokens=start)
    assert tokenizer("x")["input_ids"] != ids("x", tokenizer)

    def counting(texts, **options):
        asked.extend(texts)
        return tokenizer(texts, **options)

    records = [{"input": "prompt", "output": answer} for answer in ("yes", "no", "yes", "prompt")]
    rows = list(read_rows([dump(records)], tokenizer=counting))
    assert [list(row.response) for row in rows] == [ids(record["output"], tokenizer) for record in records]
    assert {tuple(row.prompt) for row in rows} == {tuple(ids("prompt", tokenizer))}
    assert sorted(asked) == ["no", "prompt", "yes"]
    assert rows[0].measure is Measure.TEXT


def test_chat_messages_take_the_template(dump):
    tokenizer = tiny_tokenizer.build()
    (row,) = read_rows([dump([{"prompt": CHAT, "response": "5"}])], tokenizer=tokenizer)
    assert list(row.prompt) == ids("<|im_start|>user\n2+3?<|im_end|>\n<|im_start|>assistant\n", tokenizer)
    assert row.measure is Measure.TEXT


@pytest.mark.parametrize("responses", [["a", "bc"], [[7], [8, 9]]])
def test_a_list_of_responses_makes_as_many_rows(dump, responses):
    prompt = "p" if isinstance(responses[0], str) else [1]
    rows = list(read_rows([dump([{"prompt": prompt, "responses": responses}])]))
    assert [len(row.response) for row in rows] == [1, 2]
    assert rows[0].prompt == rows[1].prompt
    assert rows[0].where == rows[1].where


def test_no_response_token_at_all(dump):
    rows = list(read_rows([dump([{"prompt": [1], "responses": tokens} for tokens in ([], [3])])]))
    assert [len(row.response) for row in rows] == [0, 1]


def test_columns(dump):
    """Token ids come before text of the same rows; a name that is asked for comes before all."""
    record = {"prompt": "text", "prompt_ids": [1, 2], "response": "t", "response_ids": [3], "mine": [9], "yours": [8]}
    (row,) = read_rows([dump([record])])
    assert (list(row.prompt), list(row.response)) == ([1, 2], [3])
    (row,) = read_rows([dump([record])], Columns("mine", "yours"))
    assert (list(row.prompt), list(row.response)) == ([9], [8])


def test_parquet_reads_no_other_columns(tmp_path, monkeypatch):
    file = write_parquet(tmp_path / "x.parquet", [{"prompt": [1], "response": [2], "images": b"large"}])
    asked = []
    read = pyarrow.parquet.ParquetFile.iter_batches
    monkeypatch.setattr(
        pyarrow.parquet.ParquetFile,
        "iter_batches",
        lambda self, size, columns: asked.append(columns) or read(self, size, columns=columns),
    )
    assert len(list(read_rows([file]))) == 1
    assert asked == [["prompt", "response"]]


# Large files.


def test_rows_come_before_the_file_has_been_read(tmp_path):
    file = write_jsonl(tmp_path / "x.jsonl", [{"prompt": [1], "response": [2]}] * 600)
    with file.open("a") as handle:
        handle.write("{broken\n")
    rows = read_rows([file])
    assert len(list(islice(rows, 500))) == 500
    with pytest.raises(ValueError, match=r"x.jsonl:601: expected JSON"):
        list(rows)


def test_progress_knows_how_many_records_there_are(dump):
    seen = []

    def progress(items, what, total):
        seen.append((what, total))
        return items

    files = [dump([{"prompt": [1], "response": [2]}] * count, str(count)) for count in (300, 4)]
    assert len(list(read_rows(files, progress=progress))) == 304
    assert seen == [("Reading rollouts", 304)]


@pytest.fixture
def piped():
    """The path of a pipe that holds these bytes."""
    ends = []

    def fill(content):
        reading, writing = os.pipe()
        ends.append(reading)
        with open(writing, "wb") as pipe:
            pipe.write(content)
        return Path(f"/dev/fd/{reading}")

    yield fill
    for end in ends:
        os.close(end)


def test_a_pipe_is_read_once(piped, tmp_path):
    """Its records aren't counted first, which would leave none to read, and its number is no step's."""
    pipe = piped(json.dumps(GOOD).encode() + b"\n")
    file = write_jsonl(tmp_path / "2.jsonl", [GOOD])
    rows = list(read_rows(find_files([pipe, file]), progress=lambda items, what, total: items))
    assert [row.step for row in rows] == [Step(str(pipe), None), Step(str(file), 2)]


# What can't be read.


def test_json_that_is_nested_too_deeply(tmp_path):
    file = write_jsonl(tmp_path / "x.jsonl", [GOOD])
    with file.open("a") as handle:
        handle.write("[" * 100_000 + "\n")
    with pytest.raises(ValueError, match="x.jsonl:2: expected JSON, got what can't be read"):
        list(read_rows([file]))


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ([1, 2], r"expected a JSON object with a prompt and a response, got \[1, 2\]"),
        (
            {"question": "?", "answer": 1},
            r"expected a prompt in prompt_ids or .*, got the columns question, answer; --prompt-column names another",
        ),
        ({"prompt": [1], "reply": 2}, "expected a response in .* got the columns prompt, reply; --response-column"),
        ({}, "got the columns of none"),
        ({"input": None, "output": "a"}, "expected a prompt, got null in 'input'"),
        (
            {"prompt": [1], "responses": None, "output": None},
            "expected a response, got null in 'responses' and in 'out",
        ),
        ({"input": "p", "output": []}, "expected at least one response, got an empty list"),
        ({"prompt": 3, "response": [2]}, "expected the prompt as text or as a list of token ids, or chat.*, got 3"),
        ({"prompt": [-1], "response": [2]}, r"expected the prompt .*, got \[-1\]"),
        ({"prompt": [2**31], "response": [2]}, "expected the prompt"),
        ({"prompt": [1], "response": [True]}, r"expected the response as text or as a list of token ids, got \[True\]"),
        ({"prompt": [], "response": [2]}, "expected at least one token in the prompt, got none"),
        ({"prompt": CHAT, "response": "5"}, "expected --tokenizer, whose template makes a prompt of chat messages"),
        ({"prompt": [1], "response": "x"}, "prompt and response both as token ids or both as text, got one of each"),
        (
            {"prompt": "p", "response": "x"},
            "expected tokens as in the rows before, got characters; .* need --tokenizer",
        ),
    ],
)
def test_a_row_that_is_wrong(tmp_path, record, said):
    file = write_jsonl(tmp_path / "x.jsonl", [GOOD, record])
    with pytest.raises(ValueError, match=f"{file}:2: .*{said}"):
        list(read_rows([file]))


def test_a_template_that_refuses(tmp_path):
    tokenizer = tiny_tokenizer.build()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    file = write_jsonl(tmp_path / "x.jsonl", [{"prompt": CHAT, "response": "5"}])
    with pytest.raises(ValueError, match="x.jsonl:1: expected chat messages .*roles must alternate"):
        list(read_rows([file], tokenizer=tokenizer))


def test_bytes_that_are_no_text(tmp_path):
    file = tmp_path / "x.jsonl"
    file.write_bytes(b'{"prompt": "\xff"}\n')
    with pytest.raises(ValueError, match="x.jsonl:1: expected JSON"):
        list(read_rows([file]))


def test_empty_lines_are_no_rows(tmp_path):
    file = write_jsonl(tmp_path / "x.jsonl", [GOOD])
    file.write_text(f"\n{file.read_text()}\n \n")
    (row,) = read_rows([file])
    assert row.where == f"{file}:2"


def test_a_file_that_is_no_parquet(tmp_path):
    file = tmp_path / "x.parquet"
    file.write_text("no parquet")
    with pytest.raises(ValueError, match="x.parquet: expected a parquet file, got"):
        list(read_rows([file]))


def test_parquet_that_breaks_off(tmp_path):
    """Its end, which says what is in it, is there; a page is not."""
    file = write_parquet(tmp_path / "x.parquet", [{"prompt": list(range(999)), "response": [2]}])
    content = file.read_bytes()
    file.write_bytes(content[:4] + b"\0" * 200 + content[204:])
    with pytest.raises(ValueError, match="x.parquet: expected a parquet file, got what can't be read"):
        list(read_rows([file]))


def test_parquet_without_pyarrow(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match="expected pyarrow to read parquet with, got none; pip install pyarrow"):
        list(read_rows([tmp_path / "x.parquet"]))


def test_paths(tmp_path):
    with pytest.raises(ValueError, match="FILE: expected a dump of rollouts or a folder of them, got '.*nothing'"):
        find_files([tmp_path / "nothing"])
    with pytest.raises(ValueError, match=r"expected .jsonl or .parquet files in the folder .*, got none"):
        find_files([tmp_path])
    file = write_jsonl(tmp_path / "x.jsonl", [GOOD])
    other = write_jsonl(tmp_path / "y.jsonl", [GOOD])
    assert find_files([tmp_path]) == find_files([file, other]) == [file, other]
    link = tmp_path.parent / f"{tmp_path.name}.jsonl"
    link.symlink_to(file)
    for twice in ([file, file], [file, tmp_path / ".." / tmp_path.name / "x.jsonl"], [tmp_path, file], [file, link]):
        with pytest.raises(ValueError, match=r"FILE: expected each file once, got '.*jsonl' twice"):
            find_files(twice)
    with pytest.raises(ValueError, match=r"FILE: expected a file that can be read, got '.*' \(Is a directory\)"):
        list(read_rows([tmp_path]))


def test_tokenizers(tmp_path):
    tiny_tokenizer.build().save_pretrained(tmp_path / "folder")
    loaded = load_tokenizer(str(tmp_path / "folder"))
    assert ids("ab", loaded) == ids("ab", tiny_tokenizer.build())
    with pytest.raises(ValueError, match="--tokenizer: expected one that can be read, got "):
        load_tokenizer(str(tmp_path))
    (tmp_path / "folder" / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(ValueError, match=r"--tokenizer: expected one that can be read, got '.*folder' \(.+\)"):
        load_tokenizer(str(tmp_path / "folder"))


def test_code_that_comes_with_a_tokenizer_is_not_run(tmp_path, monkeypatch):
    """Nor is it asked for: whoever answers yes would have it run."""
    ran = tmp_path / "ran"
    tiny_tokenizer.build().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "own.py").write_text(
        "from pathlib import Path\n"
        "from transformers import PreTrainedTokenizerFast\n"
        f"Path({str(ran)!r}).touch()\n"
        "class Own(PreTrainedTokenizerFast):\n    pass\n"
    )
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    with pytest.raises(ValueError, match="--tokenizer: expected one that can be read, got .* custom code"):
        load_tokenizer(str(tmp_path))
    assert (ran.exists(), sys.stdin.read()) == (False, "y\n")


def test_a_hub_that_is_away(monkeypatch):
    def unreachable(url):
        raise httpx.ConnectError(f"no route to {url}")

    monkeypatch.setattr(checkpoint, "get_hf_file_metadata", unreachable)
    with pytest.raises(
        ValueError, match=r"--tokenizer: .*, got 'nobody/nothing' \(no route to .*tokenizer_config.json"
    ):
        load_tokenizer("nobody/nothing")
    assert not Path("nobody").exists()
