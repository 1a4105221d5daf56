"""An examination of this Python, this machine and a model: can a run with ``strategy=zorro`` work here?

Each probe stands on its own. What it can't find out, because a package is missing, broken or another version, is a
problem with a line of its own and no reason to stop: a broken installation is what an examination is for.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Protocol

import zorro_verl
from zorro_verl.findings import TOPICS, Finding, Findings, Problem, described
from zorro_verl.installation import NEEDED, REINSTALL, examine_package, examine_python, examine_requirements
from zorro_verl.machine import examine_attention, examine_devices, examine_kernels
from zorro_verl.model_support import ModelSupport, examine_model
from zorro_verl.registration import examine_plug_in

_TORCH = "install a torch that is built for this machine: for its driver's CUDA, or for CPUs"


class Probe(NamedTuple):
    """One part of an examination."""

    about: str
    run: Callable[[Findings], None]
    mend: str = REINSTALL  # what to do where it fails


# In order: veRL is imported before anything of this package that would tell it of the plug-in.
PROBES = (
    Probe("Python", examine_python),
    *(Probe(name, functools.partial(examine_package, name)) for name in NEEDED),
    Probe("requirements", examine_requirements),
    Probe("plug-in", examine_plug_in),
    Probe("devices", examine_devices, _TORCH),
    Probe("kernels", examine_kernels, _TORCH),
    Probe("attention", examine_attention, _TORCH),
)


class Track(Protocol):
    """Wraps what takes long, given what it is and how many there are."""

    def __call__(self, items: Iterable[Any], what: str, total: int) -> Iterable[Any]: ...


@dataclass(frozen=True)
class Report:
    """What an examination came to.

    Attributes:
        version: of this package.
        facts: what is here, in the order of the tables.
        model: of the model that was asked about.
        problems: why training can't work, one line each.
        notes: what is worth knowing and hinders nothing.
    """

    version: str
    facts: tuple[Finding, ...]
    model: ModelSupport | None
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]

    @property
    def works(self) -> bool:
        """Whether training with ``strategy=zorro`` can work here, as far as one can tell without running it."""
        return not self.problems

    def as_json(self) -> dict[str, Any]:
        """Everything, for `json.dumps`; a fact stands under its topic."""
        record = asdict(self)
        facts: dict[str, list[dict[str, Any]]] = {topic: [] for topic in TOPICS}
        for fact in record.pop("facts"):
            facts[fact.pop("topic")].append(fact)
        return {"works": self.works} | record | {"facts": facts}


def examine(model: str | None, track: Track) -> Report:
    """Look at everything, and at a model if there is a name.

    Raises:
        ValueError: a model's config that is not there or can't be read.
    """
    findings, support = Findings(), None
    with _gathered_warnings() as records, _quiet():
        for probe in track(PROBES, "looking", len(PROBES)):
            with findings.probing(probe.about, probe.mend):
                probe.run(findings)
        if model is not None:
            support = _examine_model(model, findings)
    for record in records:  # where the plug-in fails, verl goes on without it
        if not findings.hinders("plug-in", *NEEDED):
            error = record.exc_info[1] if record.exc_info else None
            reason = f" ({described(error)})" if error else ""
            findings.problem(
                "plug-in", f"plug-in: expected no warning, got {record.getMessage()!r}{reason}; {REINSTALL}"
            )
    return Report(
        zorro_verl.__version__, tuple(findings.facts), support, tuple(findings.problems), tuple(findings.notes)
    )


def _examine_model(name: str, findings: Findings) -> ModelSupport | None:
    if findings.hinders("torch", "transformers"):
        findings.note(f"{name} was not examined, which takes torch and transformers")
        return None
    return examine_model(name, findings)


class _Gathering(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@contextmanager
def _gathered_warnings() -> Iterator[list[logging.LogRecord]]:
    """Within this context what this package warns of comes into a list, in place of a traceback on the terminal."""
    ours, handler = logging.getLogger("zorro_verl"), _Gathering()
    handlers, propagate = ours.handlers, ours.propagate
    ours.handlers, ours.propagate = [handler], False
    try:
        yield handler.records
    finally:
        ours.handlers, ours.propagate = handlers, propagate


@contextmanager
def _quiet() -> Iterator[None]:
    """Within this context packages that are imported say nothing of themselves, and nothing on standard output."""
    root = logging.getLogger()
    handlers = root.handlers
    root.handlers = [logging.NullHandler()]
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
            warnings.simplefilter("ignore")
            yield
    finally:
        root.handlers = handlers
