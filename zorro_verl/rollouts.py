"""Rollouts that were dumped, row by row: veRL's jsonl or parquet, as token ids or, without a tokenizer, characters."""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from zorro_verl.row_keys import is_padding, sample_of

# In order of preference: what was sampled comes before what it was decoded to.
PROMPT_COLUMNS = ("prompt_ids", "prompt_token_ids", "prompts", "prompt", "input")
RESPONSE_COLUMNS = ("response_ids", "response_token_ids", "responses", "response", "output")
SUFFIXES = (".jsonl", ".parquet")

_CHUNK = 256  # records that are tokenized at once
_BYTES = 2**20  # of a file that are read at once to count its lines

# Items and what is done with them, then their number: `commands.terminal.show_progress`, or what counts as quietly.
Progress = Callable[[Iterable[Any], str, int], Iterable[Any]]


class Measure(Enum):
    """What a row's prompt and response were, and so what their lengths count."""

    TOKEN_IDS = "token ids"
    TEXT = "text, tokenized again"
    CHARACTERS = "characters"

    @property
    def unit(self) -> str:
        return "characters" if self is Measure.CHARACTERS else "tokens"


class Step(NamedTuple):
    """One batch of a trainer. Rows of different steps never meet, so they never share."""

    file: str
    number: int | None  # None where neither a row nor the file's name says it

    def __str__(self) -> str:
        return self.file if self.number is None else f"step {self.number} of {self.file}"


class Row(NamedTuple):
    """A prompt and one response to it."""

    prompt: array[int]  # int32: token ids, or code points of characters; at least one
    response: array[int]
    step: Step
    sample: str | None  # the prompt that it is a rollout of, by what the trainer says; see `row_keys.sample_of`
    where: str  # file:line, or file:row of parquet, both from 1
    measure: Measure


class Padding(NamedTuple):
    """A row that veRL added so that a step's rows divide. Its dump shows nothing of it, and it is no rollout."""

    step: Step


class Columns(NamedTuple):
    """Names of the columns to read; None takes the first that is there of `PROMPT_COLUMNS`, `RESPONSE_COLUMNS`."""

    prompt: str | None = None
    response: str | None = None


USUAL = Columns()


def find_files(paths: Sequence[Path]) -> list[Path]:
    """The files that are meant, those of a folder in the order of its steps.

    Raises:
        ValueError: a path that isn't there, a folder without dumps, or a file that is meant twice.
    """
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = [file for file in path.iterdir() if file.suffix in SUFFIXES]
            if not inside:
                raise ValueError(f"FILE: expected {' or '.join(SUFFIXES)} files in the folder {str(path)!r}, got none")
            files += sorted(inside, key=lambda file: (_number(file) is None, _number(file) or 0, file.name))
        elif path.exists():
            files.append(path)
        else:
            raise ValueError(f"FILE: expected a dump of rollouts or a folder of them, got {str(path)!r}: no such file")
    seen: set[Path] = set()
    for file in files:  # rows of a file that is read twice would be one step with twice the rollouts
        if file.resolve() in seen:
            raise ValueError(f"FILE: expected each file once, got {str(file)!r} twice")
        seen.add(file.resolve())
    return files


def read_rows(
    files: Sequence[Path], columns: Columns = USUAL, tokenizer: Any = None, progress: Progress | None = None
) -> Iterator[Row | Padding]:
    """The rows of all files in their order; of a file no more than a few hundred are held at a time.

    Args:
        files: as `find_files` gives them.
        columns: which to read.
        tokenizer: of transformers; without it text is taken as characters.
        progress: shows how many records have been read, unless one of the files is a pipe.

    Raises:
        ValueError: what can't be read, with its file and line; token ids beside text that no tokenizer reads.
    """
    records: Iterator[_Record | Padding] = (record for file in files for record in _records(file, columns))
    if progress is not None and all(file.is_file() for file in files):  # to count a pipe's records is to consume them
        records = iter(progress(records, "Reading rollouts", sum(_count(file) for file in files)))
    unit = None
    while chunk := list(islice(records, _CHUNK)):
        for row in _rows(chunk, tokenizer):
            if isinstance(row, Padding):
                yield row
                continue
            unit = unit or row.measure.unit
            if row.measure.unit != unit:
                raise ValueError(
                    f"{row.where}: expected {unit} as in the rows before, got {row.measure.unit}; "
                    "text and token ids together need --tokenizer"
                )
            yield row


def rows_of_step(rows: Iterable[Row | Padding], number: int | None) -> Iterator[Row]:
    """Those of the step with this number, or of the first row's step; what comes after its file is not read.

    Raises:
        ValueError: there is no row at all, or none of this step.
    """
    step: Step | None = None
    seen: set[int | None] = set()
    for row in rows:
        if isinstance(row, Padding):
            continue
        seen.add(row.step.number)
        if step is None and number in (None, row.step.number):
            step = row.step
        if row.step == step:
            yield row
        elif step is not None and row.step.file != step.file:
            return
    if not seen:
        raise ValueError("FILE: expected at least one row, got none")
    if step is None:
        raise ValueError(f"--step: expected {_range(seen)}, got {number}")


def load_tokenizer(name: str) -> Any:
    """The tokenizer of a folder, or of a name on the hub. Code that comes with it is not run.

    Raises:
        ValueError: none is there, none can be reached, or it takes such code.
    """
    from transformers import AutoTokenizer

    from zorro_verl.checkpoint import check_reachable, quiet_loading

    folder = Path(name).expanduser()
    if not folder.exists():
        check_reachable(name, "tokenizer_config.json", "--tokenizer", "tokenizer")
    try:
        with quiet_loading():
            # Else it would ask on the terminal whether to run the code, and a script would wait for an answer.
            return AutoTokenizer.from_pretrained(folder if folder.exists() else name, trust_remote_code=False)
    except Exception as error:  # the reader of tokenizer.json raises no narrower one
        reason = " ".join(str(error).split())
        raise ValueError(f"--tokenizer: expected one that can be read, got {name!r} ({reason:.200})") from error


class _Record(NamedTuple):
    where: str
    step: Step
    sample: str | None
    prompt: Any
    responses: list[Any]


def _records(file: Path, columns: Columns) -> Iterator[_Record | Padding]:
    for line, record in _parquet(file, columns) if file.suffix == ".parquet" else _jsonl(file):
        where = f"{file}:{line}"
        number = record["step"] if type(record.get("step")) is int else _number(file)
        step = Step(str(file), number)
        if is_padding(record.get("uid")):
            yield Padding(step)
            continue
        prompt = _column(record, columns.prompt, PROMPT_COLUMNS, "prompt", where)
        response = _column(record, columns.response, RESPONSE_COLUMNS, "response", where)
        if response == [] and isinstance(prompt, str):
            raise ValueError(f"{where}: expected at least one response, got an empty list")
        # A list of responses to one prompt, as a generation job writes it, makes as many rows.
        several = isinstance(response, list) and response and isinstance(response[0], str | list)
        yield _Record(where, step, sample_of(record.get("uid")), prompt, response if several else [response])


def _jsonl(file: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    with _opened(file) as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:  # the latter of lists in lists in lists
                raise ValueError(f"{file}:{number}: expected JSON, got what can't be read ({error})") from error
            if not isinstance(record, dict):
                raise ValueError(
                    f"{file}:{number}: expected a JSON object with a prompt and a response, got {_shown(record)}"
                )
            yield number, record


def _parquet(file: Path, columns: Columns) -> Iterator[tuple[int, Mapping[str, Any]]]:
    arrow, parquet = _parquet_file(file)
    wanted = {*PROMPT_COLUMNS, *RESPONSE_COLUMNS, "uid", "step", *filter(None, columns)}
    number = 0
    try:
        for batch in parquet.iter_batches(
            _CHUNK, columns=[name for name in parquet.schema_arrow.names if name in wanted]
        ):
            for number, record in enumerate(batch.to_pylist(), number + 1):  # noqa: B020
                yield number, record
    except (OSError, arrow.ArrowException) as error:
        raise ValueError(f"{file}: expected a parquet file, got what can't be read ({_line(error)})") from error


def _parquet_file(file: Path) -> tuple[Any, Any]:
    """Its reader, after pyarrow itself, whose exceptions are wanted."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError(f"{file}: expected pyarrow to read parquet with, got none; pip install pyarrow") from error
    try:
        return pyarrow, pyarrow.parquet.ParquetFile(file)
    except (OSError, pyarrow.ArrowException) as error:
        raise ValueError(f"{file}: expected a parquet file, got what can't be read ({_line(error)})") from error


def _count(file: Path) -> int:
    """Records, without reading them."""
    if file.suffix == ".parquet":
        return int(_parquet_file(file)[1].metadata.num_rows)
    with _opened(file) as handle:
        return sum(block.count(b"\n") for block in iter(lambda: handle.read(_BYTES), b""))


def _opened(file: Path) -> Any:
    try:
        return file.open("rb")
    except OSError as error:
        raise ValueError(f"FILE: expected a file that can be read, got {str(file)!r} ({error.strerror})") from error


def _column(record: Mapping[str, Any], name: str | None, usual: Sequence[str], what: str, where: str) -> Any:
    there = [key for key in ((name,) if name else usual) if key in record]
    present = [key for key in there if record[key] is not None]
    if not present:
        if there:
            raise ValueError(f"{where}: expected a {what}, got null in {' and in '.join(map(repr, there))}")
        expected = repr(name) if name else " or ".join(usual)
        raise ValueError(
            f"{where}: expected a {what} in {expected}, got the columns {', '.join(map(str, record)) or 'of none'}; "
            f"--{what}-column names another"
        )
    return record[present[0]]


def _rows(records: Sequence[_Record | Padding], tokenizer: Any) -> Iterator[Row | Padding]:
    ids: dict[str, array[int]] = {}
    if tokenizer is not None:
        sampled = (record for record in records if isinstance(record, _Record))
        values = (value for record in sampled for value in (record.prompt, *record.responses))
        texts = list(dict.fromkeys(value for value in values if isinstance(value, str)))
        if texts:  # special tokens were in the prompt already, and are not written a second time
            encoded = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
            ids = {text: array("i", tokens) for text, tokens in zip(texts, encoded, strict=True)}
    for record in records:
        if isinstance(record, Padding):
            yield record
            continue
        prompt, prompt_measure = _values(record.prompt, "prompt", record.where, ids, tokenizer)
        if not prompt:
            raise ValueError(f"{record.where}: expected at least one token in the prompt, got none")
        for value in record.responses:
            response, measure = _values(value, "response", record.where, ids, tokenizer)
            if {prompt_measure, measure} == {Measure.TOKEN_IDS, Measure.CHARACTERS}:
                raise ValueError(
                    f"{record.where}: expected prompt and response both as token ids or both as text, got one of each; "
                    "text beside token ids needs --tokenizer"
                )
            told = measure if prompt_measure is Measure.TOKEN_IDS else prompt_measure
            yield Row(prompt, response, record.step, record.sample, record.where, told)


def _values(
    value: Any, what: str, where: str, ids: Mapping[str, array[int]], tokenizer: Any
) -> tuple[array[int], Measure]:
    if isinstance(value, str):
        if tokenizer is not None:
            return ids[value], Measure.TEXT
        points: array[int] = array("i")
        points.frombytes(value.encode(f"utf-32-{sys.byteorder[0]}e", "surrogatepass"))
        return points, Measure.CHARACTERS
    if what == "prompt" and _is_chat(value):
        return _template(value, where, tokenizer), Measure.TEXT
    if isinstance(value, list) and all(type(token) is int and 0 <= token < 2**31 for token in value):
        return array("i", value), Measure.TOKEN_IDS
    chat = ", or chat messages" if what == "prompt" else ""
    raise ValueError(f"{where}: expected the {what} as text or as a list of token ids{chat}, got {_shown(value)}")


def _is_chat(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(m, dict) and "role" in m for m in value)


def _template(messages: list[Any], where: str, tokenizer: Any) -> array[int]:
    if tokenizer is None:
        raise ValueError(f"{where}: expected --tokenizer, whose template makes a prompt of chat messages, got none")
    try:
        return array("i", tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))
    except Exception as error:  # a template is a program, and raises what it likes
        raise ValueError(
            f"{where}: expected chat messages that the tokenizer's template takes, got {_shown(messages)} "
            f"({type(error).__name__}: {_line(error):.200})"
        ) from error


def _number(file: Path) -> int | None:
    """The step that a dump is named after; the number of a pipe, as in /dev/fd/63, is none."""
    return int(file.stem) if file.suffix and file.stem.isdecimal() else None


def _range(found: Iterable[int | None]) -> str:
    steps = [number for number in found if number is not None]
    if not steps:
        return "none, as no row says its step"
    return f"one of {min(steps)} to {max(steps)}" if len(steps) > 1 else str(*steps)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())
