"""`zorro-verl show`: one micro-batch, drawn."""

from __future__ import annotations

import os
import re
import sys
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.text import Text
from rich.tree import Tree

from zorro_verl.commands.dumps import Plot, PromptColumn, ResponseColumn, Tokenizer, check_at_least_one
from zorro_verl.commands.terminal import Json, errors_in_one_line, make_console, print_json, show_progress

if TYPE_CHECKING:  # `zorro-verl --help` does without torch
    from collections.abc import Iterable, Mapping

    from zorro_verl.drawing import Segment
    from zorro_verl.forest import VarlenCall
    from zorro_verl.packing import Plan
    from zorro_verl.rollouts import Columns, Row

_MOST_CELLS = 64  # of the picture in a terminal, on each side
_NAMES = 22  # columns of a terminal for the names beside it


class RowRange(NamedTuple):
    """Rows of a step, numbered from 0."""

    first: int = 0
    end: int | None = 16  # the first that is not meant; None for all

    @classmethod
    def of(cls, text: str) -> RowRange:
        """``A:B``, of which either may be left out.

        Raises:
            ValueError: anything else, or no row between.
        """
        found = re.fullmatch(r"(\d*):(\d*)", text)
        bounds = found and cls(int(found[1] or 0), int(found[2]) if found[2] else None)
        if bounds is None or (bounds.end is not None and bounds.end <= bounds.first):
            raise ValueError(f"--rows: expected A:B with A below B, the first row is 0, got {text!r}")
        return bounds

    def of_step(self, rows: Iterable[Row]) -> list[Row]:
        """Those that are meant, of a step's."""
        first, end = (None if bound is None else min(bound, sys.maxsize) for bound in self)
        return list(islice(rows, first, end))

    def __str__(self) -> str:
        return f"{self.first}:{'' if self.end is None else self.end}"


class MicroBatch(NamedTuple):
    """What is drawn."""

    plan: Plan
    prompt_lens: list[int]  # of each row
    first: int  # number of its first row in the step of the dump
    unit: str  # of lengths, tokens or characters


def show(
    batch: Annotated[
        str,
        typer.Argument(metavar="BATCH", help="A dump of rollouts, or lengths such as '6:3,4,2 4:2' or '512:64x8'."),
    ],
    step: Annotated[int | None, typer.Option(metavar="N", help="Of a dump, the step; by default the first.")] = None,
    rows: Annotated[
        str | None,
        typer.Option(metavar="A:B", help="Of a dump, the rows from A up to B of the step; 0:16 by default."),
    ] = None,
    tokenizer: Tokenizer = None,
    prompt_column: PromptColumn = None,
    response_column: ResponseColumn = None,
    window: Annotated[
        int | None, typer.Option(metavar="TOKENS", help="Draw a layer with a sliding window of this size.")
    ] = None,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Draw what a micro-batch shares: its prompts with their responses, and which tokens attend to which.

    BATCH is a dump as for `analyze`, or lengths: the tokens of a prompt, a colon, and the tokens of each of its
    responses; 64x8 stands for eight responses of 64.
    """
    with errors_in_one_line("show"):
        check_at_least_one(window=window)
        from zorro_verl.charts import MOST_CELLS, chart_blocks, check_plot, save
        from zorro_verl.drawing import count_blocks, segments
        from zorro_verl.rollouts import Columns

        check_plot(plot)
        bounds = RowRange() if rows is None else RowRange.of(rows)
        if os.path.exists(batch):  # a Path raises for a name that is too long to be one
            micro = _of_dump(Path(batch), step, bounds, tokenizer, Columns(prompt_column, response_column))
        else:
            columns = {"--prompt-column": prompt_column, "--response-column": response_column}
            micro = _of_shape(batch, {"--step": step, "--rows": rows, "--tokenizer": tokenizer, **columns})
        found = [s if s.row is None else s._replace(row=s.row + micro.first) for s in segments(micro.plan)]
        if plot is not None:
            title = f"{micro.unit} of the rows and packed: {micro.plan.num_row_tokens:,} -> {micro.plan.num_tokens:,}"
            save(chart_blocks(count_blocks(micro.plan, MOST_CELLS, window), found, title), plot)
        if as_json:
            print_json(record(micro, found, window))
        else:
            draw(micro, found, window)


def _of_shape(text: str, dump_options: Mapping[str, object]) -> MicroBatch:
    from zorro_verl.drawing import parse_shape, rows_of_shape
    from zorro_verl.packing import build_plan

    shape = parse_shape(text)
    given = [name for name, value in dump_options.items() if value is not None]
    if given:
        raise ValueError(f"{', '.join(given)}: expected a dump as BATCH, of which it says what to read, got {text!r}")
    return MicroBatch(build_plan(rows_of_shape(shape)), [prompt for prompt, lens in shape for _ in lens], 0, "tokens")


def _of_dump(path: Path, step: int | None, bounds: RowRange, tokenizer: str | None, columns: Columns) -> MicroBatch:
    from zorro_verl.drawing import make_rows
    from zorro_verl.packing import build_plan
    from zorro_verl.rollouts import find_files, load_tokenizer, read_rows, rows_of_step

    reader = load_tokenizer(tokenizer) if tokenizer is not None else None
    files = find_files([path])
    named = [file for file in files if file.stem == str(step)] or files
    shown = show_progress(named, "Looking for the step", len(named))  # counts files: their rows aren't counted first
    rows = chain.from_iterable(read_rows([file], columns, reader) for file in shown)
    found = bounds.of_step(rows_of_step(rows, step))
    if not found:
        which = "" if step is None else f" of step {step}"
        raise ValueError(f"--rows: expected rows that are in the dump, got none of {bounds}{which}; see --step")
    packed = make_rows([(row.prompt, row.response) for row in found])
    return MicroBatch(build_plan(packed), packed.prompt_lens.tolist(), bounds.first, found[0].measure.unit)


def draw(micro: MicroBatch, found: list[Segment], window: int | None) -> None:
    """Numbers, tree, block picture and calls, on standard output."""
    from zorro_verl.drawing import Marks, call_lines, count_blocks, count_pairs, reach

    console, plan = make_console(), micro.plan
    marks = Marks.of(console.encoding)
    num_rows, before, after = len(micro.prompt_lens), *(count_pairs(p, window) for p in (plan.unshared, plan))

    def say(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True)

    say(f"{num_rows:,} row{'s' * (num_rows > 1)}, {plan.num_groups:,} prompt{'s' * (plan.num_groups > 1)}")
    say(f"  {micro.unit:<16} {plan.num_row_tokens:,} -> {plan.num_tokens:,} (token ratio {plan.token_ratio:.2f})")
    say(f"  attention pairs  {before:,} -> {after:,} (ratio {before / after:.2f})")
    console.print(forest_tree(micro, found))
    blocks = count_blocks(plan, max(1, min(_MOST_CELLS, (console.width - _NAMES) // 2)), window)
    if blocks.cell == 1:
        say(f"which {micro.unit} (lines) attend to which (columns): {marks.full} does, {marks.none} doesn't")
    else:
        say(
            f"cells of {blocks.cell} x {blocks.cell} {micro.unit}, lines attend to columns: {marks.full} all, "
            f"{marks.partly} some, {marks.none} none of them"
        )
    for line in blocks.lines(found, marks):
        say(f"  {line}")
    say("attention calls of a layer" + ("" if window is None else f" with a window of {window} {micro.unit}"))
    if window is not None and reach(plan, window) is None:
        say("  no row is longer than the window, which therefore changes nothing")
    for line in call_lines(plan, window):
        say(f"  {line}")


def forest_tree(micro: MicroBatch, found: list[Segment]) -> Tree:
    """Prompts with their responses, and where they lie in the packed row."""
    from zorro_verl.drawing import Kind

    tree = Tree(Text(f"packed row [0:{micro.plan.num_tokens})"))
    prompts: dict[int, Tree] = {}
    for segment in found:
        where, lens = f"{segment.label} [{segment.start}:{segment.end})", f"{segment.num_tokens} {micro.unit}"
        if segment.row is None:
            prompts[segment.group] = tree.add(Text(f"{where} {lens}"))
        elif segment.kind is Kind.RESPONSE:
            prompts[segment.group].add(Text(f"{where} {lens}"))
        else:
            prompt = micro.prompt_lens[segment.row - micro.first]
            lens = f"{prompt} + {segment.num_tokens - prompt} {micro.unit}"
            tree.add(Text(f"{where} {lens}, alone with its prompt"))
    return tree


def record(micro: MicroBatch, found: list[Segment], window: int | None) -> dict[str, Any]:
    """What is drawn, for a program; of the calls all bounds."""
    from zorro_verl.drawing import count_pairs, reach

    plan = micro.plan
    return {
        "unit": micro.unit,
        "rows": len(micro.prompt_lens),
        "prompts": plan.num_groups,
        "total": plan.num_row_tokens,
        "packed": plan.num_tokens,
        "token_ratio": plan.token_ratio,
        "window": window,
        "attention_pairs": {"rows": count_pairs(plan.unshared, window), "packed": count_pairs(plan, window)},
        "segments": [
            {"kind": s.kind.value, "prompt": s.group, "row": s.row, "start": s.start, "end": s.end} for s in found
        ],
        "calls": [call_record(call) for call in plan.forest.calls(reach(plan, window))],
    }


def call_record(call: VarlenCall) -> dict[str, Any]:
    """One attention call's arguments."""
    return {
        "causal": call.causal,
        "window": call.window,
        "query_start": call.query_start,
        "num_keys": call.num_keys,
        "key_index": None if call.key_index is None else call.key_index.tolist(),
        "cu_seqlens_q": call.cu_seqlens_q.tolist(),
        "cu_seqlens_k": call.cu_seqlens_k.tolist(),
    }
