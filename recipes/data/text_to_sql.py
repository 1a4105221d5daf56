"""BIRD -> veRL's format: the schema of a database and a question, to be answered with a SQL query.

    mkdir -p bird && cd bird && for part in train dev; do
        curl -O https://bird-bench.oss-cn-beijing.aliyuncs.com/$part.zip && unzip $part.zip && rm $part.zip &&
        (cd $part* && unzip ${part}_databases.zip); done
    python3 recipes/data/text_to_sql.py --source bird --out data/bird --tokenizer Qwen/Qwen3-8B --max-prompt-tokens 8192

The data set: BIRD (https://bird-bench.github.io, train of 2023, dev of June 2024; 33 GB unpacked), as its archives
unpack: train/train.json (9,428 questions) with the keys `question`, `evidence`, `SQL` and `db_id`, the databases in
train/train_databases/<db_id>/<db_id>.sqlite, and the same under dev*/ with dev in place of train. The questions of dev
become validation.parquet; without dev, all questions on a share of train's databases do.

A prompt holds the CREATE TABLE statements of the database file, on request some values of every column, the evidence
and the question. Questions on one database have the schema in common and are different prompts all the same.

Every reference query is run once, which takes a while: questions whose query fails, takes longer than an answer's may,
returns too many rows or none are left out. `extra_info.database` is the absolute path of the database, for
recipes/rewards/text_to_sql.py: it has to be there on every node that scores answers.
"""

import argparse
import json
import random
import sqlite3
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from prompt_files import PreparationError, Prompt, Selection, arguments_of, exit_code, load_reward, need_folder, write

DOWNLOAD = (
    "mkdir -p {source} && cd {source} && for part in train dev; do "
    "curl -O https://bird-bench.oss-cn-beijing.aliyuncs.com/$part.zip && unzip $part.zip && rm $part.zip && "
    "(cd $part* && unzip ${{part}}_databases.zip); done"
)
INSTRUCTION = "Answer with one SQLite query in a ```sql block."
SAMPLED_ROWS = 1000  # of a table, of which example values are taken
VALUE_LENGTH = 40  # characters of an example value


@dataclass(frozen=True)
class Question:
    index: int
    question: str
    evidence: str
    query: str
    database: Path


def read_questions(folder: Path, part: str, download: str) -> list[Question]:
    """The questions of `folder`/`part`.json, whose databases are all there."""
    path = folder / f"{part}.json"
    if not path.is_file():
        raise PreparationError(f"{path} is not there; the command that brings it: {download}")
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise PreparationError(f"{path} is no JSON ({error}); the command that brings it: {download}") from error
    questions = []
    for index, row in enumerate(rows):
        missing = [key for key in ("question", "evidence", "SQL", "db_id") if key not in row]
        if missing:
            raise PreparationError(
                f"{path}, question {index} has no {', '.join(missing)}, it has {', '.join(row)}; "
                f"the command that brings the format that is expected: {download}"
            )
        database = folder / f"{part}_databases" / row["db_id"] / f"{row['db_id']}.sqlite"
        if not database.is_file():
            raise PreparationError(f"{database} is not there; the command that brings it: {download}")
        questions.append(Question(index, row["question"], row["evidence"] or "", row["SQL"], database.absolute()))
    return questions


def read_parts(arguments: argparse.Namespace) -> tuple[list[Question], list[Question]]:
    """Questions for training and for validation."""
    download = DOWNLOAD.format(source=arguments.source)
    need_folder(arguments.source, download)
    train = read_questions(arguments.source / "train", "train", download)
    dev_folders = [path.parent for path in arguments.source.glob("dev*/dev.json")]
    if len(dev_folders) > 1:
        raise PreparationError(f"{arguments.source} has {', '.join(map(str, dev_folders))}: leave one of them there")
    if dev_folders:
        return train, read_questions(dev_folders[0], "dev", download)
    databases = sorted({question.database for question in train})
    count = max(1, round(arguments.validation_share * len(databases)))
    drawn = set(random.Random(arguments.seed).sample(databases, min(count, len(databases))))
    print(f"{arguments.source} has no dev*/dev.json: questions on {count} of train's databases are for validation")
    return [each for each in train if each.database not in drawn], [each for each in train if each.database in drawn]


def schema_of(database: Path, example_values: int) -> str:
    """The CREATE TABLE statements as they stand in the file, each with `example_values` values of every column."""
    connection = sqlite3.connect(f"{database.as_uri()}?mode=ro", uri=True)
    try:
        connection.text_factory = lambda text: text.decode(errors="replace")
        tables = connection.execute(
            "SELECT name, sql FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite\\_%' ESCAPE '\\'"
        ).fetchall()
        return "\n".join(sql + ";" + examples_of(connection, name, example_values) for name, sql in tables)
    except sqlite3.Error as error:
        raise PreparationError(f"{database} can't be read as a SQLite database: {error}") from error
    finally:
        connection.close()


def examples_of(connection: sqlite3.Connection, table: str, count: int) -> str:
    """A comment line for every column, from the table's first rows."""
    if count == 0:
        return ""
    lines = []
    for _, column, *_ in connection.execute(f"PRAGMA table_info({quoted(table)})").fetchall():
        values = connection.execute(
            f"SELECT DISTINCT c FROM (SELECT {quoted(column)} AS c FROM {quoted(table)} LIMIT {SAMPLED_ROWS}) "
            f"WHERE c IS NOT NULL AND typeof(c) <> 'blob' LIMIT {count}"
        ).fetchall()
        if values:
            lines.append(f"\n-- {column}: {', '.join(shortened(value) for (value,) in values)}")
    return "".join(lines)


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def shortened(value: str | int | float) -> str:
    text = repr(value)
    return text if len(text) <= VALUE_LENGTH else text[:VALUE_LENGTH] + "..."


def prompt_of(question: Question, split: str, schema: str) -> Prompt:
    evidence = f"{question.evidence.strip()}\n" if question.evidence.strip() else ""
    content = f"{schema}\n\n{evidence}{question.question.strip()}\n{INSTRUCTION}"
    messages = [{"role": "user", "content": content}]
    return Prompt(
        question.index, split, "bird", messages, "text-to-sql", question.query, database=str(question.database)
    )


def prompts_of(questions: Sequence[Question], split: str, example_values: int, selection: Selection) -> list[Prompt]:
    """Those whose reference query works and whose prompt is not too long."""
    reward = load_reward("text_to_sql")
    schemas = {each: schema_of(each, example_values) for each in {question.database for question in questions}}
    print(f"{split}: running the queries of {len(questions)} questions on {len(schemas)} databases")
    prompts = []
    for question in questions:
        try:
            rows = reward.reference_rows(str(question.database), question.query, reward.TIME_LIMIT)
        except ValueError:
            selection.leave_out(1, "whose query fails or returns too much")
            continue
        if not rows:  # any query without rows would be right
            selection.leave_out(1, "whose query returns nothing")
            continue
        prompts += selection.keep([prompt_of(question, split, schemas[question.database])])
    return prompts


def prepare(arguments: argparse.Namespace) -> None:
    if not 0 < arguments.validation_share < 1:
        raise PreparationError(f"--validation-share {arguments.validation_share}: expected a number between 0 and 1")
    if arguments.example_values < 0:
        raise PreparationError(f"--example-values {arguments.example_values}: expected 0 or more")
    train, validation = read_parts(arguments)
    selection = Selection(arguments.tokenizer, arguments.max_prompt_tokens)
    write(
        arguments.out,
        prompts_of(train, "train", arguments.example_values, selection),
        prompts_of(validation, "validation", arguments.example_values, selection),
        selection,
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments_of(__doc__)
    parser.add_argument(
        "--example-values", type=int, default=0, metavar="N", help="values of every column in the prompt (default: 0)"
    )
    parser.add_argument(
        "--validation-share", type=float, default=0.1, metavar="X", help="of the databases, without dev (default: 0.1)"
    )
    return exit_code(prepare, parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
