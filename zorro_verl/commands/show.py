"""`zorro-verl show`: one micro-batch, drawn."""

from __future__ import annotations

import os
import re
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.text import Text
from rich.tree import Tree

from zorro_verl.commands.terminal import Json, errors_in_one_line, make_console, print_json, show_progress

if TYPE_CHECKING:  # `zorro-verl --help` does without torch
    from zorro_verl.drawing import Segment
    from zorro_verl.forest import VarlenCall
    from zorro_verl.packing import Plan
    from zorro_verl.rollouts import Columns

_MOST_CELLS = 64  # of the picture in a terminal, on each side
_NAMES = 22  # columns of a terminal for the names beside it


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
    rows: Annotated[str, typer.Option(metavar="A:B", help="Of a dump, the rows from A up to B of the step.")] = "0:16",
    tokenizer: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Tokenizer of the model, a folder or a name on the hub, for text."),
    ] = None,
    prompt_column: Annotated[
        str | None, typer.Option(metavar="NAME", help="Column of prompts; by default the usual names.")
    ] = None,
    response_column: Annotated[
        str | None, typer.Option(metavar="NAME", help="Column of responses; by default the usual names.")
    ] = None,
    window: Annotated[
        int | None, typer.Option(metavar="TOKENS", min=1, help="Draw a layer with a sliding window of this size.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw it as a picture as well.")] = None,
    as_json: Json = False,
) -> None:
    """Draw what a micro-batch shares: its prompts with their responses, and which tokens attend to which.

    BATCH is a dump as for `analyze`, or lengths: the tokens of a prompt, a colon, and the tokens of each of its
    responses; 64x8 stands for eight responses of 64.
    """
    with errors_in_one_line("show"):
        from zorro_verl.charts import MOST_CELLS, chart_blocks, check_plot, save
        from zorro_verl.drawing import count_blocks, segments
        from zorro_verl.rollouts import Columns

        check_plot(plot)
        micro = _micro_batch(batch, step, rows, tokenizer, Columns(prompt_column, response_column))
        found = [s if s.row is None else s._replace(row=s.row + micro.first) for s in segments(micro.plan)]
        if plot is not None:
            title = f"{micro.unit} of the rows and packed: {micro.plan.num_row_tokens:,} -> {micro.plan.num_tokens:,}"
            save(chart_blocks(count_blocks(micro.plan, MOST_CELLS, window), found, title), plot)
        if as_json:
            print_json(record(micro, found, window))
        else:
            draw(micro, found, window)


def _micro_batch(batch: str, step: int | None, rows: str, tokenizer: str | None, columns: Columns) -> MicroBatch:
    from zorro_verl.drawing import make_rows, parse_shape, rows_of_shape
    from zorro_verl.packing import build_plan
    from zorro_verl.rollouts import find_files, load_tokenizer, read_rows, rows_of_step

    if not os.path.exists(batch):  # a Path raises for a name that is too long to be one
        shape = parse_shape(batch)
        return MicroBatch(
            build_plan(rows_of_shape(shape)), [prompt for prompt, lens in shape for _ in lens], 0, "tokens"
        )
    bounds = re.fullmatch(r"(\d*):(\d*)", rows)
    first, end = (int(bounds[1] or 0), int(bounds[2]) if bounds[2] else None) if bounds else (0, 0)
    if end is not None and end <= first:
        raise ValueError(f"--rows: expected A:B with A below B, the first row is 0, got {rows!r}")
    reader = load_tokenizer(tokenizer) if tokenizer is not None else None
    files = find_files([Path(batch)])
    named = [file for file in files if file.stem == str(step)]
    chosen = rows_of_step(read_rows(named or files, columns, reader, show_progress), step)
    found = list(islice(chosen, first, end))
    if not found:
        which = "" if step is None else f" of step {step}"
        raise ValueError(f"--rows: expected rows that are in the dump, got none of {rows}{which}; see --step")
    unit = found[0].measure.unit
    packed = make_rows([(row.prompt, row.response) for row in found])
    return MicroBatch(build_plan(packed), packed.prompt_lens.tolist(), first, unit)


def draw(micro: MicroBatch, found: list[Segment], window: int | None) -> None:
    """Numbers, tree, block picture and calls, on standard output."""
    from zorro_verl.drawing import FULL, NONE, PARTLY, call_lines, count_blocks, count_pairs, reach

    console, plan = make_console(), micro.plan
    num_rows, before, after = len(micro.prompt_lens), *(count_pairs(p, window) for p in (plan.unshared, plan))

    def say(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True)

    say(f"{num_rows:,} row{'s' * (num_rows > 1)}, {plan.num_groups:,} prompt{'s' * (plan.num_groups > 1)}")
    say(f"  {micro.unit:<16} {plan.num_row_tokens:,} -> {plan.num_tokens:,} (token ratio {plan.token_ratio:.2f})")
    say(f"  attention pairs  {before:,} -> {after:,} (ratio {before / after:.2f})")
    console.print(forest_tree(micro, found))
    blocks = count_blocks(plan, max(1, min(_MOST_CELLS, (console.width - _NAMES) // 2)), window)
    if blocks.cell == 1:
        say(f"which {micro.unit} (lines) attend to which (columns): {FULL} does, {NONE} doesn't")
    else:
        say(
            f"cells of {blocks.cell} x {blocks.cell} {micro.unit}, lines attend to columns: {FULL} all, {PARTLY} some, "
            f"{NONE} none of them"
        )
    for line in blocks.lines(found):
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
