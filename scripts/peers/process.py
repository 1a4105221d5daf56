"""The driver's end of a worker: a process that answers each line with a line of JSON, within a time limit."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class Failed(Exception):
    """The process ended, hung or answered what it should not; the text says which."""


class Process:
    """Started at once. Whoever starts one closes it, for example with `contextlib.closing`."""

    def __init__(self, command: Sequence[str], variables: Mapping[str, str], log: Path, limit: float):
        """
        Args:
            command: what to run.
            variables: added to this process's environment.
            log: takes what the process writes to standard error.
            limit: the longest that an answer may take, in seconds; the first one includes the start.

        Raises:
            Failed: there is no such program.
        """
        self.log, self.limit, self.received = log, limit, b""
        pipe = subprocess.PIPE
        with log.open("wb") as errors:
            try:
                self.process = subprocess.Popen(
                    command, stdin=pipe, stdout=pipe, stderr=errors, bufsize=0, env={**os.environ, **variables}
                )
            except OSError as error:
                raise Failed(f"failed: could not start: {error}") from None

    def ask(self, question: str, *keys: str) -> dict[str, Any]:
        """The answer to one line.

        Raises:
            Failed: the process ended, gave no answer in time, or not a JSON object with these keys.
        """
        try:
            self.process.stdin.write(f"{question}\n".encode())
        except BrokenPipeError:
            raise self.ended() from None
        line = self.read_line(time.monotonic() + self.limit)
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict) or not answer.keys() >= set(keys):
            got = line.decode(errors="replace")
            raise Failed(f"failed: expected an answer to {question} with {', '.join(keys)}, got {got!r}")
        return answer

    def read_line(self, deadline: float) -> bytes:
        out = self.process.stdout
        with selectors.DefaultSelector() as selector:
            selector.register(out, selectors.EVENT_READ)
            while b"\n" not in self.received:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    self.process.kill()
                    raise Failed(f"failed: no answer within {self.limit:g} s")
                if not (chunk := out.read(4096)):
                    raise self.ended()
                self.received += chunk
        line, _, self.received = self.received.partition(b"\n")
        return line

    def ended(self) -> Failed:
        """Why there will be no further answer: the exit code, and the last line that the process wrote."""
        self.close()
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return Failed(f"failed: exit code {self.process.returncode}: {lines[-1].strip() if lines else 'no message'}")

    def close(self) -> None:
        """End the process, if it has not ended, and wait for it."""
        self.process.stdin.close()
        try:
            self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
