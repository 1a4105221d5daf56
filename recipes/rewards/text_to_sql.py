"""The reward of a text-to-SQL answer: 1.0 if its query returns what the reference query returns, else 0.0.

    reward.custom_reward_function.path=recipes/rewards/text_to_sql.py

BIRD's own rule of execution accuracy: both queries run on the question's database and their rows are compared as sets.
The order of rows and how often one occurs do not count; the order of columns does, their names don't.

The query is what stands in the last ```sql block behind the reasoning, or all of it where there is no block. It runs
read-only and may do nothing but read: writing, attaching, pragmas, a second statement, an error, or more than
`time_limit` seconds are 0.0. What is wrong with the reference query or the database is a ValueError.

SQLite looks at the clock between its own steps; values of a million bytes at most keep each of them short. Every call
opens its own connection, so that any thread or process may call it. Needs Python 3.11 and, on every node that scores
answers, the database under the path in `extra_info`.
"""

import re
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

TIME_LIMIT = 5.0  # seconds of an answer's query
REFERENCE_TIME_LIMIT = 60.0  # seconds; the preparation kept those that take less than TIME_LIMIT on an idle machine
ROW_LIMIT = 10_000  # of a reference query: a process keeps the rows of the last 256
VALUE_LIMIT = 1_000_000  # bytes of one value or row
STEPS = 10_000  # of SQLite between two looks at the clock: a fraction of a millisecond

READING = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}
QUERY_ERRORS = (sqlite3.Error, ValueError)  # a ValueError: no query, or characters that none may have
# Of the database, not of a query: its disk is gone, another process holds it.
DATABASE_ERRORS = {
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_NOTADB,
}


def compute_score(data_source, solution_str, ground_truth, extra_info=None, time_limit=TIME_LIMIT, **kwargs) -> float:
    """Takes the answer's text, the reference query and `extra_info["database"]`, the path of a SQLite file.

    `time_limit` is set by reward.custom_reward_function.reward_kwargs.time_limit.
    """
    database = (extra_info or {}).get("database")
    if not database:
        raise ValueError("extra_info has no 'database': prepare the data with recipes/data/text_to_sql.py")
    expected = reference_rows(database, ground_truth)
    found = set()
    try:
        with reading(database, time_limit) as connection:
            for row in rows_of(connection, query_of(solution_str)):
                if row not in expected:
                    return 0.0
                found.add(row)
    except QUERY_ERRORS as error:
        if getattr(error, "sqlite_errorcode", 0) & 0xFF in DATABASE_ERRORS:
            raise ValueError(f"database {database} can't be read: {error}") from error
        return 0.0
    return float(found == expected)


def query_of(answer: str) -> str:
    """The last ```sql block behind the reasoning; an unclosed one reaches to the end."""
    if "<think>" in answer and "</think>" not in answer:
        return ""
    final = answer.rpartition("</think>")[2]
    blocks = re.split(r"```sql\b", final, flags=re.IGNORECASE)
    return blocks[-1].partition("```")[0] if len(blocks) > 1 else final


@lru_cache(maxsize=256)  # all answers of a group need the same rows
def reference_rows(database: str, query: str, time_limit: float = REFERENCE_TIME_LIMIT) -> frozenset[tuple]:
    """The rows of a reference query; ValueError when it or the database is broken, or gives too many."""
    if not Path(database).is_file():
        raise ValueError(f"database {database} is not there: prepare the data where all nodes see it")
    rows = set()
    try:
        with reading(database, time_limit) as connection:
            for count, row in enumerate(rows_of(connection, query), 1):
                if count > ROW_LIMIT:
                    raise ValueError(f"it gives more than {ROW_LIMIT} rows")
                rows.add(row)
    except QUERY_ERRORS as error:
        raise ValueError(f"reference query failed on {database}: {error}: {query}") from error
    return frozenset(rows)


def rows_of(connection: sqlite3.Connection, query: str) -> sqlite3.Cursor:
    """The rows of a query; ValueError for what is none, such as an empty text, which is not the same as no rows."""
    cursor = connection.execute(query)
    if cursor.description is None:
        raise ValueError("it is no query")
    return cursor


@contextmanager
def reading(database: str, time_limit: float) -> Iterator[sqlite3.Connection]:
    """A connection that reads, and fails with sqlite3.OperationalError after `time_limit` seconds."""
    end = time.monotonic() + time_limit
    connection = sqlite3.connect(f"{Path(database).absolute().as_uri()}?mode=ro", uri=True)
    try:
        connection.text_factory = bytes  # some of BIRD's texts are no UTF-8
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, VALUE_LIMIT)
        connection.set_authorizer(lambda action, *_: sqlite3.SQLITE_OK if action in READING else sqlite3.SQLITE_DENY)
        connection.set_progress_handler(lambda: time.monotonic() > end, STEPS)
        yield connection
    finally:
        connection.close()
