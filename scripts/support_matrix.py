"""Verify a tiny random model of every supported type; without --only, rewrite the table in docs/models.md.

    python scripts/support_matrix.py                    # all types; about 20 seconds on two cores
    python scripts/support_matrix.py --only qwen3_5     # print one row, write nothing

Each model is saved as a checkpoint and goes through what `zorro-verl verify` does, in float64: as a whole, and where it
has linear attention with both ways of sharing it.
"""

from __future__ import annotations

import argparse
import platform
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tiny_models
import torch
import transformers

from zorro_verl.checkpoint import quiet_loading
from zorro_verl.families import SUPPORTED_MODEL_TYPES
from zorro_verl.measuring import hardware
from zorro_verl.verify import Report, verify

PAGE = Path(__file__).resolve().parent.parent / "docs" / "models.md"
BEGIN, END = "<!-- support matrix, written by scripts/support_matrix.py -->", "<!-- end of the support matrix -->"
QUANTITIES = ("log_probs", "entropy", "gradients")
KINDS = {
    "full_attention": "full",
    "sliding_attention": "sliding",
    "linear_attention": "linear",
    "mixture_of_experts": "MoE",
}


@dataclass(frozen=True)
class Row:
    """One type in the matrix."""

    report: Report

    def text(self) -> str:
        report = self.report
        layers = ", ".join(f"{report.layers[kind]} {word}" for kind, word in KINDS.items() if report.layers.get(kind))
        worst = {difference.quantity: difference.worst for difference in report.differences}
        numbers = " | ".join(f"{worst[quantity]:.0e}" if worst[quantity] else "0" for quantity in QUANTITIES)
        return f"| `{report.model_type}` | `{report.model_class}` | {layers} | {numbers} | {self.verdict} |"

    @property
    def verdict(self) -> str:
        return "equal" if self.report.equal else "**differs**"


def row(name: str) -> Row:
    """Verify a type."""
    with tempfile.TemporaryDirectory() as folder:
        with quiet_loading():
            tiny_models.build(name).save_pretrained(folder)
        return Row(verify(folder, "float64", layer_by_layer=False))


def section(rows: Sequence[Row]) -> str:
    """The text between the markers."""
    some = rows[0].report
    return "\n".join(
        (
            "| model type | class | layers of the tiny model | log-probs | entropy | gradients | |",
            "|---|---|---|---|---|---|---|",
            *(r.text() for r in rows),
            "",
            f"`python scripts/support_matrix.py`: {some.rows} rows, {some.groups} prompts, token ratio "
            f"{some.token_ratio:.2f}, float64 (allowed: 5e-6, with Gated DeltaNet 2e-5); "
            "hybrids with both `expand` and `fork`. Python "
            f"{platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}, "
            f"{hardware()}.",
        )
    )


def write(text: str) -> None:
    """Put the text between the markers of the page."""
    before, rest = PAGE.read_text().split(BEGIN)
    after = rest.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", nargs="+", choices=SUPPORTED_MODEL_TYPES, metavar="TYPE", help="print these rows and write nothing"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    torch.set_num_threads(1)
    rows = []
    for name in options.only or SUPPORTED_MODEL_TYPES:
        rows.append(row(name))
        print(rows[-1].text(), file=sys.stdout if options.only else sys.stderr, flush=True)
    if not options.only:
        write(section(rows))
    return 0 if all(r.verdict == "equal" for r in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
