"""Write the measured tables of README.md and the pages in docs from the JSON files in docs/results.

    python scripts/results_table.py                   # rewrite what stands between the markers
    python scripts/results_table.py --check           # exit code 1 if a page is not what the results say
    python scripts/results_table.py --results FOLDER  # from results in another folder

A page holds a table between ``<!-- results: NAME -->`` and ``<!-- /results -->``, with NAME one of `BLOCKS`. Below each
stand the command, the hardware and the versions that its file names.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measuring import markdown_header, markdown_row, number, verdict

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"
MARKED = re.compile(r"<!-- results: ([\w-]+) -->\n.*?<!-- /results -->", re.DOTALL)
REQUIRED = ("hardware", "versions", "command")
DESCRIBED = ("model", "models", "heads", "method", "limits")  # what was run, and how, as far as a file says
MIB, GIB = 2**20, 2**30

Record = Mapping[str, Any]


class BadResult(ValueError):
    """A file that can't be shown, or a page that asks for what there is not."""


@dataclass(frozen=True)
class Block:
    """A table and where it comes from.

    Attributes:
        file: in the results' folder.
        command: what measures it.
        table: markdown, from what the file holds.
        missing: said in place of the table while there is no such file.
    """

    file: str
    command: str
    table: Callable[[Record], str]
    missing: str = "Not measured yet"

    def text(self, results: Path, page: Path) -> str:
        """What a page says: the table and its origin."""
        path = results / self.file
        if not path.exists():
            return f"{self.missing}. The command for it: `{self.command}`."
        record = read(path)
        return f"{self.table(record)}\n\n{origin(record, self.file, page)}"


def read(path: Path) -> Record:
    """A result.

    Raises:
        BadResult: it is not JSON, or does not say where, with what or how it was measured.
    """
    try:
        record = json.loads(path.read_text())
    except ValueError as error:
        raise BadResult(f"{path.name}: expected JSON, got what can't be read ({error}); measure it again") from error
    if not isinstance(record, dict):
        raise BadResult(f"{path.name}: expected an object, got a {type(record).__name__}; measure it again")
    lacking = [key for key in REQUIRED if not record.get(key)]
    if lacking:
        raise BadResult(f"{path.name}: expected {', '.join(REQUIRED)}, got no {', '.join(lacking)}; measure it again")
    return record


def origin(record: Record, file: str, page: Path) -> str:
    link = Path(os.path.relpath(RESULTS / file, page.parent)).as_posix()
    parts = [record["hardware"], record["versions"]]
    parts += [f"{key} {record[key]}" for key in ("cuda", "load") if key in record]
    parts += [record[key] for key in DESCRIBED if key in record]
    return f"`{record['command']}` ([figures]({link})): {'; '.join(parts)}."


def table(columns: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    return "\n".join([markdown_header(columns), *map(markdown_row, rows)])


def percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}".replace("%", " %")


def arrow(values: Iterable[float | None], form: str, unit: float = 1) -> str:
    return " -> ".join(number(value if value is None else value / unit, form) for value in values)


def shape(point: Record) -> str:
    return f"{point['P']}, {point['R']}, {point['n']}"


def worst(differences: Iterable[float]) -> str:
    return f"{max(differences):.0e}"


def cpu(record: Record) -> str:
    columns = (
        "P, R, n",
        "tokens, padded -> packed",
        "speed-up",
        "FLOP bound",
        "of bound",
        "peak MiB, plain -> shared",
    )
    rows = (
        (
            shape(result),
            arrow(result["tokens"].values(), ".0f"),
            f"{result['speed_up']:.2f}",
            f"{result['flop_bound']:.2f}",
            percent(result["share_of_bound"]),
            arrow(result["peak_bytes"].values(), ".0f", MIB),
        )
        for result in record["results"]
    )
    return table(columns, rows)


def cpu_details(record: Record) -> str:
    columns = (
        "P, R, n",
        "token ratio",
        "seconds, plain -> shared",
        "clock",
        "speed-up",
        "of bound",
        "speed target",
        "peak MiB, plain -> shared",
        "memory target",
        "largest difference",
    )
    rows = (
        (
            shape(result),
            f"{result['token_ratio']:.2f}",
            arrow((result[side][result["clock"]] for side in ("plain_s", "shared_s")), ".3f"),
            result["clock"],
            f"{result['speed_up']:.2f}",
            percent(result["share_of_bound"]),
            verdict(result["on_target"]),
            arrow(result["peak_bytes"].values(), ".0f", MIB),
            verdict(result["memory_on_target"]),
            worst(result["difference"].values()),
        )
        for result in record["results"]
    )
    return table(columns, rows)


def points(record: Record) -> list[Record]:
    """Of all sweeps, each shape once."""
    distinct = {shape(point): point for sweep in record["sweeps"].values() for point in sweep}
    return list(distinct.values())


PHASES = ("compute_log_prob", "update_actor")


def engine_line(record: Record) -> str:
    """The largest of each sweep."""
    rows = []
    for sweep in record["sweeps"].values():
        last = sweep[-1]
        cells = [shape(last), f"{last['flop_bound']:.2f}"]
        for phase in PHASES:
            cells += [f"{last[phase]['speed_up']:.2f}", percent(last[phase]["share_of_bound"])]
        rows.append(cells)
    return table(("P, R, n", "FLOP bound", "`compute_log_prob`", "of bound", "`update_actor`", "of bound"), rows)


def engine(record: Record) -> str:
    columns = ["P, R, n", "tokens, rows -> packed", "FLOP bound"]
    for phase in PHASES:
        columns += [f"`{phase}`, seconds", "speed-up", "of bound"]
    rows = []
    for point in points(record):
        cells = [
            shape(point),
            arrow((point["tokens_rows"], point["tokens_packed"]), ".0f"),
            f"{point['flop_bound']:.2f}",
        ]
        for phase in (point[name] for name in PHASES):
            cells.append(arrow((phase[side][phase["clock"]] for side in ("stock_s", "zorro_s")), ".3f"))
            cells += [f"{phase['speed_up']:.2f}", percent(phase["share_of_bound"])]
        rows.append((*cells, worst(point["difference"].values())))
    layouts = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in record["seconds_of_layouts"].items())
    said = f"Stock rows: {record['stock_layout']}, the faster of its layouts here ({layouts})."
    if record["left_out"]:
        said += f" Left out: P, R, n = {'; '.join(record['left_out'])}."
    return f"{table((*columns, 'largest difference'), rows)}\n\n{said}"


def attention(record: Record) -> str:
    columns = (
        "",
        "tokens, rows -> packed",
        "bound",
        "forward, ms",
        "speed-up",
        "forward + backward, ms",
        "speed-up",
        "of bound",
        "stock runs",
        "largest difference",
    )

    def milliseconds(one: Record) -> str:
        sides = one["stock_s"][one["compared_with"]], one["split_s"]
        return arrow((side[one["clock"]] for side in sides), ".1f", 1e-3)

    rows = []
    for result in record["results"]:
        forward, both = result["forward"], result["forward_backward"]
        rows.append(
            (
                result["case"],
                arrow((result["tokens_rows"], result["tokens_packed"]), ".0f"),
                f"{result['flop_bound']:.2f}",
                milliseconds(forward),
                f"{forward['speed_up']:.2f}",
                milliseconds(both),
                f"{both['speed_up']:.2f}",
                percent(both["share_of_bound"]),
                both["compared_with"],
                worst(result["difference"].values()),
            )
        )
    return table(columns, rows)


def head(record: Record) -> str:
    rows = (
        (f"`{mode}`", number(m["peak_bytes"] and m["peak_bytes"] / MIB, ".0f"), f"{m['seconds']:.1f}")
        for mode, m in record["modes"].items()
    )
    said = f"{record['head']}; all logits are {record['logits']}. Largest difference: {record['difference']:.0e}."
    return f"{table(('`logits_optimization`', 'peak MiB', 'seconds'), rows)}\n\n{said}"


def plan(record: Record) -> str:
    columns = (
        "case",
        "groups x rows",
        "tokens, rows -> packed",
        "one pass, ms",
        "grouping",
        "indices",
        "tables",
        "grouping + indices, passes",
        "target",
    )
    rows = []
    for result in record["results"]:
        seconds = result["seconds"]
        rows.append(
            (
                result["case"],
                f"{result['groups']} x {result['rows']}",
                arrow((result["row_tokens"], result["packed_tokens"]), ".0f"),
                *(f"{1e3 * seconds[name]:.2f}" for name in ("one_pass", "grouping", "indices", "tables")),
                f"{result['grouping_and_indices_passes']:.2f}",
                verdict(result["on_target"]),
            )
        )
    return table(columns, rows)


def peers(record: Record) -> str:
    """Speed-up over the plain model of the same environment, a column for each shape."""
    cases = record["results"]
    found = {entry["name"]: [] for entry in record["contestants"] if entry["name"] != entry["baseline"]}
    for case in cases:
        for entry in case["contestants"]:
            if entry["name"] in found:
                found[entry["name"]].append(
                    number(entry["speed_up"], ".2f") if entry["status"] == "ok" else "no figure"
                )
    bounds = [number(case["flop_bound"], ".2f") for case in cases]
    rows = [(f"`{name}`", *cells) for name, cells in found.items()] + [("*FLOP bound*", *bounds)]
    return f"{table(('', *(case['shape'].replace(',', ', ') for case in cases)), rows)}\n\n{who(record)}"


def who(record: Record) -> str:
    lines = [f"* `{entry['name']}`: {entry['what']} ({entry['versions']})" for entry in record["contestants"]]
    return "\n".join(lines)


def peers_details(record: Record) -> str:
    columns = (
        "P, R, n",
        "contestant",
        "seconds",
        "speed-up",
        "of bound",
        "peak MiB",
        "difference, log-prob, gradient",
        "status",
    )
    rows = []
    for case in record["results"]:
        for entry in case["contestants"]:
            difference = entry["difference_from_plain"]
            rows.append(
                (
                    case["shape"].replace(",", ", "),
                    f"`{entry['name']}`",
                    number(entry["seconds"], ".3f"),
                    number(entry["speed_up"], ".2f"),
                    percent(entry["of_bound"]),
                    number(entry["peak_bytes"] and entry["peak_bytes"] / MIB, ".0f"),
                    ", ".join(f"{value:.0e}" for value in difference.values()) if difference else "-",
                    entry["status"],
                )
            )
    return table(columns, rows)


def gpu(record: Record) -> str:
    """The cases that have a target: our fastest against the baseline, or its stand-in where it has no time."""
    check_gpu(record)
    columns = (
        "",
        "token ratio",
        "FLOP bound",
        "ms, stock -> shared",
        "rounds",
        "speed-up",
        "of bound",
        "speed target",
        "peak GiB, stock -> shared",
        "memory target",
        "TFLOP/s",
    )
    rows, without = [], list(record["left_out"])
    for case in record["cases"]:
        stock, ours = fastest(case, "baseline", "stand-in"), fastest(case, "ours")
        if case["speed"] == "no target":
            continue
        if stock is None or ours is None:
            without.append(gpu_case(case))
            continue
        row_by_row = stock["role"] == "stand-in"
        rows.append(
            (
                gpu_case(case),
                f"{case['token_ratio']:.2f}",
                f"{case['bound']:.2f}",
                f"{1e3 * stock['seconds']:.2f}{' (row by row)' if row_by_row else ''} -> {1e3 * ours['seconds']:.2f}",
                str(ours["rounds"]),
                f"{ours['speed_up']:.2f}",
                percent(ours["share_of_bound"]),
                case["speed"],
                f"{missing_peak(case) if row_by_row else gib(stock['peak'])} -> {gib(ours['peak'])}",
                case["memory"],
                number(ours["teraflops"], ".0f"),
            )
        )
    said = [f"Without a figure: {'; '.join(without)}."] if without else []
    return "\n\n".join([table(columns, rows), *said])


def gpu_kernels(record: Record) -> str:
    """The cases that have none, with all their contestants: attention alone, the head, veRL's engine."""
    check_gpu(record)
    columns = ("", "contestant", "ms", "rounds", "speed-up", "of bound", "TFLOP/s", "peak GiB", "difference", "status")
    rows = []
    for case in (case for case in record["cases"] if case["speed"] == "no target"):
        for entry in case["contestants"]:
            compared = [e for name, e in entry["differences"].items() if name.endswith(("worst row", "gradients"))]
            rows.append(
                (
                    gpu_case(case),
                    entry["name"],
                    number(entry["seconds"] and 1e3 * entry["seconds"], ".2f"),
                    str(entry["rounds"] or "-"),
                    number(entry["speed_up"], ".2f"),
                    percent(entry["share_of_bound"]),
                    number(entry["teraflops"], ".0f"),
                    gib(entry["peak"]),
                    worst(compared) if compared else "-",
                    ": ".join(filter(None, (entry["status"], entry["reason"]))).replace("|", "\\|"),
                )
            )
    return table(columns, rows)


def check_gpu(record: Record) -> None:
    if "cuda" not in record:
        raise BadResult("gpu.json: expected a run with --device cuda, got one of a CPU; remove the file")


def gpu_case(case: Record) -> str:
    return f"{case['level']}, {case['size']}, {case['shape'].replace(',', ', ')}, {case['work']}"


def gib(peak: float | None) -> str:
    return number(peak if peak is None else peak / GIB, ".2f")


def missing_peak(case: Record) -> str:
    """Of a baseline that has no time."""
    (baseline,) = (entry for entry in case["contestants"] if entry["role"] == "baseline")
    return "does not fit" if baseline["status"] == "out of memory" else "does not run"


def fastest(case: Record, *roles: str) -> Record | None:
    timed = [entry for entry in case["contestants"] if entry["role"] in roles and entry["seconds"] is not None]
    return min(timed, key=lambda entry: entry["seconds"], default=None)


def measured_by(script: str, file: str, *options: str) -> str:
    return " ".join(["python", f"scripts/{script}", *options, "--json", f"docs/results/{file}"])


_CPU = ("cpu.json", measured_by("bench_cpu.py", "cpu.json"))
_ENGINE = (
    "engine.json",
    measured_by("bench_engine.py", "engine.json", "--plot", "docs/images/engine.png"),
)
_GPU = ("gpu.json", measured_by("bench_gpu.py", "gpu.json"))
_PEERS = ("peers.json", measured_by("bench_peers.py", "peers.json"))
BLOCKS = {
    "cpu": Block(*_CPU, cpu),
    "cpu-details": Block(*_CPU, cpu_details),
    "engine-line": Block(*_ENGINE, engine_line),
    "engine": Block(*_ENGINE, engine),
    "attention": Block("attention.json", measured_by("bench_attention.py", "attention.json"), attention),
    "head": Block("head.json", measured_by("bench_head.py", "head.json"), head),
    "plan": Block("plan.json", measured_by("bench_plan.py", "plan.json"), plan),
    "peers": Block(*_PEERS, peers),
    "peers-details": Block(*_PEERS, peers_details),
    "gpu": Block(*_GPU, gpu, "Not yet measured on a GPU"),
    "gpu-kernels": Block(*_GPU, gpu_kernels, "Not yet measured on a GPU"),
}


def filled(text: str, page: Path, results: Path) -> str:
    """The page's text with what the results say between its markers.

    Raises:
        BadResult: a marker with a name that is none, or a file that lacks what it has to say of itself.
    """

    def block(match: re.Match[str]) -> str:
        name = match[1]
        if name not in BLOCKS:
            raise BadResult(f"{page.name}: expected a marker with one of {', '.join(BLOCKS)}, got {name}")
        return f"<!-- results: {name} -->\n\n{BLOCKS[name].text(results, page)}\n\n<!-- /results -->"

    return MARKED.sub(block, text)


def names_of_stale(old: str, new: str) -> list[str]:
    """The tables that differ between two texts of a page."""
    return [was[1] for was, now in zip(MARKED.finditer(old), MARKED.finditer(new), strict=True) if was[0] != now[0]]


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a page is out of date")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER", help="default: docs/results")
    options = parser.parse_args(argv)
    try:
        texts = {page: (page.read_text(), filled(page.read_text(), page, options.results)) for page in pages()}
    except BadResult as error:
        print(error, file=sys.stderr)
        return 1
    stale = {page: names_of_stale(old, new) for page, (old, new) in texts.items() if new != old}
    for page, names in stale.items():
        if not options.check:
            page.write_text(texts[page][1])
        what = "not what the results say" if options.check else "written"
        print(f"{page.relative_to(ROOT)}: {what}: {', '.join(names)}")
    if not stale:
        print("the tables are in order")
    elif options.check:
        print("`python scripts/results_table.py` rewrites them")
    return int(options.check and bool(stale))


if __name__ == "__main__":
    raise SystemExit(main())
