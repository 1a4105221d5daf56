"""How demos talk and are interrupted: a clock before each line, and one signal that starts the cleaning up."""

import signal
import time
from collections.abc import Callable

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def make_clocked_print() -> Callable[[str], None]:
    """A `print` with minutes and seconds since now."""
    started = time.monotonic()

    def say(line: str) -> None:
        minutes, seconds = divmod(int(time.monotonic() - started), 60)
        print(f"[{minutes}:{seconds:02}] {line}", flush=True)

    return say


def interrupt_once() -> None:
    """From here on the first signal is a KeyboardInterrupt; a second one may not cut the cleaning up short."""
    for each in SIGNALS:
        signal.signal(each, _interrupt)


def _interrupt(signum: int, frame: object) -> None:
    for each in SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt
