"""Runs a piece of Python in a process of its own: what is loaded, wrapped and registered is state of a process."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap

# Set by an outer environment they would change what the tests look at.
FOREIGN = (
    "VERL_PLATFORM",
    "VERL_USE_EXTERNAL_MODULES",
    "VERL_USE_EXTERNAL_PLUGINS",
    "VERL_LOGGING_LEVEL",
    "RAY_ADDRESS",
)


def run_python(code: str, *, timeout: float = 150, **environment: str) -> str:
    """Standard output and error of `code`; the test fails with both if it does not end well and in time."""
    inherited = {name: value for name, value in os.environ.items() if name not in FOREIGN}
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=inherited | {"OMP_NUM_THREADS": "1"} | environment,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # whatever a Ray cluster has left
    assert process.returncode == 0, output
    return output
