"""Small files in the public format of each data set that the recipes train on, the same at every call.

The text is made up. Questions have a few dozen characters, so that prompts stay short even where every character is a
token. `python scripts/recipes/samples.py FOLDER` writes all three.
"""

import json
import random
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import pyarrow
import pyarrow.parquet

THINGS = ("pens", "eggs", "cups", "keys", "nuts", "figs")
CITIES = ("Oslo", "Rome", "Lima", "Bern", "Kyiv", "Riga")


def write_gsm8k(folder: Path, rows: int = 64) -> Path:
    """openai/gsm8k: main/train-*.parquet of `rows` rows and main/test-*.parquet of an eighth of it."""
    rng = random.Random("gsm8k")
    (folder / "main").mkdir(parents=True)
    for split, count in (("train", rows), ("test", max(2, rows // 8))):
        problems = [gsm8k_problem(rng, split, number) for number in range(count)]
        pyarrow.parquet.write_table(
            pyarrow.Table.from_pylist(problems), folder / "main" / f"{split}-00000-of-00001.parquet"
        )
    return folder


def gsm8k_problem(rng: random.Random, split: str, number: int) -> dict[str, str]:
    """The first of a split has a thousands separator in its answer, as some of GSM8K's have."""
    a, b = (1200, 34) if number == 0 else (rng.randint(2, 99), rng.randint(2, 99))
    thing = rng.choice(THINGS)
    question = f"{split.title()} {number}: Ann has {a} {thing} and buys {b}. How many {thing}?"
    return {"question": question, "answer": f"She has {a}+{b}=<<{a}+{b}={a + b}>>{a + b} {thing}.\n#### {a + b:,}"}


def write_docqa(folder: Path, rows: int = 48, long_rows: int = 4, long_sentences: int = 400) -> Path:
    """Tongyi-Zhiwen/DocQA-RL-1.6K: train.parquet of `rows` rows, the last `long_rows` of them on long documents."""
    rng = random.Random("docqa")
    folder.mkdir(parents=True)
    problems = [docqa_row(rng, number, long_sentences if number >= rows - long_rows else 2) for number in range(rows)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(problems), folder / "train.parquet")
    return folder


def docqa_row(rng: random.Random, number: int, sentences: int) -> dict:
    """By turns a choice, a number with a fraction and a name."""
    city, other = rng.sample(CITIES, 2)
    price = rng.randint(100, 999) / 8
    filler = " ".join(f"Note {i}: {rng.choice(THINGS)}." for i in range(sentences))
    document = f"{filler} Shop {number} is in {city}; a lamp is {price} there."
    data_source, ability, question, form, truth = (
        (
            "long_toc_choices_0_20000",
            "doc-mc",
            f"Where is shop {number}?\n(A) {other}\n(B) {city}",
            "The correct answer is (insert answer here)",
            "The correct answer is (B).",
        ),
        (
            "docmath_0_20000",
            "doc-math",
            "What do three lamps cost?",
            "Therefore, the answer is (insert answer here)",
            f"Therefore, the answer is {3 * price}.",
        ),
        (
            "musique_0_20000",
            "doc-qa",
            f"In which city is shop {number}?",
            "Therefore, the answer is (insert answer here)",
            f"Therefore, the answer is {city}.",
        ),
    )[number % 3]
    content = f'<text>\n{document}\n</text>\n\n{question}\n\nFormat your response as follows: "{form}".'
    return {
        "data_source": data_source,
        "prompt": [{"role": "user", "content": content}],
        "ability": ability,
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"index": number},
    }


def write_bird(folder: Path, rows: int = 32, databases: int = 4, dev: bool = True) -> Path:
    """BIRD's train, and a smaller dev on a database of its own: questions, tables and SQLite files, as unpacked."""
    rng = random.Random("bird")
    write_bird_part(rng, folder / "train", "train", rows, [f"shop_{number}" for number in range(databases)])
    if dev:
        write_bird_part(rng, folder / "dev_20240627", "dev", max(2, rows // 4), ["market"])
    return folder


def write_bird_part(rng: random.Random, folder: Path, part: str, rows: int, databases: list[str]) -> None:
    for name in databases:
        path = folder / f"{part}_databases" / name / f"{name}.sqlite"
        path.parent.mkdir(parents=True)
        write_shop(rng, path)
    questions = [bird_question(rng, number, databases[number % len(databases)]) for number in range(rows)]
    (folder / f"{part}.json").write_text(json.dumps(questions, indent=1))
    (folder / f"{part}_gold.sql").write_text("".join(f"{each['SQL']}\t{each['db_id']}\n" for each in questions))


def write_shop(rng: random.Random, path: Path) -> None:
    """Two tables of a few rows."""
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE shop (id INTEGER PRIMARY KEY, city TEXT)")
        connection.execute("CREATE TABLE item (shop INTEGER REFERENCES shop, name TEXT, price REAL)")
        connection.executemany("INSERT INTO shop VALUES (?, ?)", enumerate(rng.sample(CITIES, 4)))
        items = [(rng.randrange(4), thing, rng.randint(1, 40) / 4) for thing in THINGS for _ in range(3)]
        connection.executemany("INSERT INTO item VALUES (?, ?, ?)", items)


def bird_question(rng: random.Random, number: int, database: str) -> dict[str, str]:
    """By turns without and with a piece of evidence. No two have the same price, and so no two are the same."""
    price, thing = 1 + number / 8 + rng.randrange(12) / 100, rng.choice(THINGS)
    price = f"{price:.2f}"
    question, evidence, query = (
        (f"What costs more than {price}?", "", f"SELECT DISTINCT name FROM item WHERE price > {price}"),
        (
            f"How many cheap {thing} are there?",
            f"cheap: price < {price}",
            f"SELECT COUNT(*) FROM item WHERE name = '{thing}' AND price < {price}",
        ),
        (
            f"Which cities sell {thing} for more than {price}, dearest first?",
            "",
            "SELECT city FROM shop JOIN item ON item.shop = shop.id "
            f"WHERE name = '{thing}' AND price > {price} ORDER BY price DESC",
        ),
    )[number % 3]
    return {"db_id": database, "question": question, "evidence": evidence, "SQL": query}


if __name__ == "__main__":
    target = Path(sys.argv[1])
    for name, write in (("gsm8k", write_gsm8k), ("bird", write_bird), ("docqa", write_docqa)):
        print(write(target / name))
