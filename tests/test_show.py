"""`zorro-verl show`: the drawing is of the calls that run, the pictures hold what they show, a mistake is one line."""

import json
import random

import pytest
import tiny_tokenizer
import torch
from matplotlib.colors import to_hex
from torch.utils._python_dispatch import TorchDispatchMode
from typer.testing import CliRunner

from zorro_verl.charts import MOST_CELLS, chart_blocks
from zorro_verl.cli import app
from zorro_verl.drawing import (
    BLOCK_MARKS,
    Kind,
    Pairs,
    call_lines,
    count_blocks,
    count_pairs,
    make_rows,
    parse_shape,
    rows_of_shape,
    segments,
)
from zorro_verl.packing import build_plan

FULL, PARTLY, NONE = BLOCK_MARKS

SMALL = """\
4 rows, 2 prompts
  tokens           18 -> 12 (token ratio 1.50)
  attention pairs  55 -> 43 (ratio 1.28)
packed row [0:12)
├── prompt 0 [0:3) 3 tokens
│   ├── row 0 [6:8) 2 tokens
│   ├── row 1 [8:12) 4 tokens
│   └── row 2 [12:12) 0 tokens
└── row 3 [3:6) 2 + 1 tokens, alone with its prompt
which tokens (lines) attend to which (columns): █ does, · doesn't
  █ · · · · · · · · · · ·  prompt 0
  █ █ · · · · · · · · · ·
  █ █ █ · · · · · · · · ·
  · · · █ · · · · · · · ·  row 3
  · · · █ █ · · · · · · ·
  · · · █ █ █ · · · · · ·
  █ █ █ · · · █ · · · · ·  row 0
  █ █ █ · · · █ █ · · · ·
  █ █ █ · · · · · █ · · ·  row 1
  █ █ █ · · · · · █ █ · ·
  █ █ █ · · · · · █ █ █ ·
  █ █ █ · · · · · █ █ █ █
attention calls of a layer
  self: every segment on itself, causal, queries [0:12)
    cu_seqlens [0, 3, 6, 8, 12, 12]
  cross: responses on their prompt, full rectangles, queries [6:12) keys [0:3)
    cu_seqlens_q [0, 6]
    cu_seqlens_k [0, 3]
"""

WINDOW = """\
  · █ █ · · · █ · · · · ·  row 0
  · · █ · · · █ █ · · · ·
  · █ █ · · · · · █ · · ·  row 1
  · · █ · · · · · █ █ · ·
  · · · · · · · · █ █ █ ·
  · · · · · · · · · █ █ █
attention calls of a layer with a window of 3 tokens
  window: every segment on itself and the end of its prompt, causal, queries [0:12), 16 keys, 4 of them copies
    cu_seqlens_q [0, 3, 6, 8, 12, 12]
    cu_seqlens_k [0, 3, 6, 10, 16, 16]
"""


def command(*arguments):
    return CliRunner().invoke(app, ["show", *map(str, arguments)])


def random_plan(seed):
    """Groups of one to five rows in any order, some of them empty."""
    rng = random.Random(seed)
    rows = [
        ([group + 1] * length, [0] * rng.randint(0, 9))
        for group, length in enumerate(rng.choices(range(1, 14), k=rng.randint(1, 5)))
        for _ in range(rng.randint(1, 5))
    ]
    rng.shuffle(rows)
    return build_plan(make_rows(rows))


def cells_of(visible, cell):
    """Sums over cells of ``(T, T)``."""
    size = -(-visible.shape[0] // cell)
    padded = torch.zeros(size * cell, size * cell, dtype=torch.int64)
    padded[: visible.shape[0], : visible.shape[0]] = visible
    return padded.view(size, cell, size, cell).sum((1, 3))


# Drawn is what runs.


@pytest.mark.parametrize("window", [None, 1, 2, 5, 12])
@pytest.mark.parametrize("seed", range(12))
def test_calls_are_counted_as_what_may_be_seen(seed, window):
    plan = random_plan(seed)
    visible = plan.forest.visible(window)
    for most in (1, 2, 7, plan.num_tokens, plan.num_tokens + 9):
        blocks = count_blocks(plan, most, window)
        assert blocks.pairs.shape[1] <= most
        assert torch.equal(blocks.pairs.sum(0), cells_of(visible, blocks.cell))
    assert count_pairs(plan, window) == int(visible.sum())


@pytest.mark.parametrize("seed", range(6))
def test_kinds_of_pairs(seed):
    """By the segments of query and key."""
    plan = random_plan(seed)
    kind_at = {}
    for number, segment in enumerate(segments(plan)):
        kind_at |= dict.fromkeys(range(segment.start, segment.end), (segment.kind, number))
    pairs = count_blocks(plan, plan.num_tokens, window=4).pairs
    for kind, query, key in pairs.nonzero().tolist():
        (query_kind, own), (key_kind, other) = kind_at[query], kind_at[key]
        expected = {
            Pairs.PROMPT_ITSELF: (Kind.PROMPT, Kind.PROMPT, True),
            Pairs.RESPONSE_ITSELF: (Kind.RESPONSE, Kind.RESPONSE, True),
            Pairs.ALONE_ITSELF: (Kind.ALONE, Kind.ALONE, True),
            Pairs.RESPONSE_PROMPT: (Kind.RESPONSE, Kind.PROMPT, False),
        }
        assert (query_kind, key_kind, own == other) == expected[Pairs(kind)]


@pytest.mark.parametrize("seed", range(6))
def test_segments_hold_their_rows(seed):
    """What a segment is said to hold is what the plan packs there."""
    rng = random.Random(seed)
    rows = [([rng.randint(1, 3)] * 2, [10 + n] * rng.randint(0, 4)) for n in range(8)]
    plan = build_plan(make_rows(rows))
    packed = plan.pack(make_rows(rows).tokens).tolist()
    found = segments(plan)
    assert [segment.start for segment in found] == [0, *(segment.end for segment in found[:-1])]
    assert sorted(s.row for s in found if s.row is not None) == list(range(8))
    for segment in found:
        tokens = packed[segment.start : segment.end]
        if segment.kind is Kind.PROMPT:
            members = (plan.group_index == segment.group).nonzero().flatten().tolist()
            assert len(members) > 1
            assert all(rows[member][0] == tokens for member in members)
        else:
            prompt, response = rows[segment.row]
            assert tokens == (response if segment.kind is Kind.RESPONSE else prompt + response)
            assert segment.group == plan.group_index[segment.row]


def test_cells_say_all_some_or_none():
    """Cells of 2 over 5 tokens: the last ones are narrower, and full all the same."""
    lines = count_blocks(build_plan(rows_of_shape([(4, [1])])), 3).lines()
    assert lines == [f"{PARTLY} {NONE} {NONE}", f"{FULL} {PARTLY} {NONE}", f"{FULL} {FULL} {FULL}"]


def test_long_lists_of_bounds_are_shortened():
    lines = call_lines(build_plan(rows_of_shape([(3, [1] * 40)])))
    assert lines[1] == "  cu_seqlens [0, 3, 4, 5, 6, 7, 8, 9, ..., 43] (42 of them)"
    assert lines[3:] == ["  cu_seqlens_q [0, 40]", "  cu_seqlens_k [0, 3]"]


def test_a_large_micro_batch():
    """No matrix of all of its tokens is made: this one would take 270 GB."""
    plan = build_plan(rows_of_shape([(200_000, [20_000] * 16)]))
    pairs = 200_000 * 200_001 // 2 + 16 * (20_000 * 20_001 // 2 + 20_000 * 200_000)
    assert count_pairs(plan) == pairs
    assert int(count_blocks(plan, 50).pairs.sum()) == pairs


@pytest.mark.parametrize("window", [None, 1000])
def test_memory_does_not_grow_with_a_segment_times_the_cells(window):
    """What is counted of each query, for each column, would be 800 MB an array."""
    plan = build_plan(rows_of_shape([(300_000, [200_000])]))
    plan.forest.calls(window)  # their key indices are as long as the row
    largest = 0

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            made = func(*args, **(kwargs or {}))
            largest = max(largest, made.numel() if isinstance(made, torch.Tensor) else 0)
            return made

    with Sizes():
        blocks = count_blocks(plan, MOST_CELLS, window)
    seen = 500_000 if window is None else window
    assert int(blocks.pairs.sum()) == seen * (seen + 1) // 2 + (500_000 - seen) * seen
    assert largest <= max(4 * MOST_CELLS**2, 0 if window is None else plan.num_tokens)


# Text.


def test_a_small_micro_batch():
    result = command("3:2,4,0 2:1")
    assert result.exit_code == 0, result.output
    assert result.stdout == SMALL


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_without_blocks(encoding):
    """Marks and lines of a tree that any encoding carries, in the same places."""
    result = CliRunner(charset=encoding).invoke(app, ["show", "3:2,4,0 2:1"])
    assert result.exit_code == 0, result.output
    lines, expected = result.stdout.splitlines(), SMALL.splitlines()
    assert lines[4:9] == [
        "+-- prompt 0 [0:3) 3 tokens",
        "|   +-- row 0 [6:8) 2 tokens",
        "|   +-- row 1 [8:12) 4 tokens",
        "|   `-- row 2 [12:12) 0 tokens",
        "`-- row 3 [3:6) 2 + 1 tokens, alone with its prompt",
    ]
    plain = str.maketrans({FULL: "#", PARTLY: "+", NONE: "."})
    assert lines[9:] == [line.translate(plain) for line in expected[9:]]
    large = CliRunner(charset=encoding).invoke(app, ["show", "600:64x8"]).stdout
    assert "lines attend to columns: # all, + some, . none of them" in large


def test_a_window():
    result = command("3:2,4,0 2:1", "--window", 3)
    assert result.stdout.endswith(WINDOW)
    assert "attention pairs  42 -> 30 (ratio 1.40)" in result.stdout


def test_a_window_that_no_row_exceeds():
    wide, none = (command("3:2,4,0 2:1", *window).stdout for window in (("--window", 7), ()))
    told = "attention calls of a layer with a window of 7 tokens\n  no row is longer than the window, which therefore"
    assert told in wide
    assert wide.splitlines()[-5:] == none.splitlines()[-5:]


def test_large_ones_are_scaled():
    result = command("600:64x8")
    lines = result.stdout.splitlines()
    (scale,) = (line for line in lines if line.startswith("cells of "))
    assert scale == "cells of 23 x 23 tokens, lines attend to columns: █ all, ▒ some, · none of them"
    picture = [line for line in lines if line.startswith("  ") and line[2] in FULL + PARTLY + NONE]
    assert len(picture) == -(-(600 + 8 * 64) // 23)
    assert picture[0].split() == [PARTLY, *NONE * (len(picture) - 1), "prompt", "0"]
    assert picture[25].split()[:26] == [*FULL * 25, PARTLY]
    assert max(map(len, lines)) <= 120


def test_many_rows_begin_in_one_cell():
    assert "  row 1 and 3 more\n" in command("300:0,2,1,2,90").stdout  # row 0 has no token


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("6:3,4,2 4:2", [(6, [3, 4, 2]), (4, [2])]),
        ("512:64x3", [(512, [64, 64, 64])]),
        ("5:1x2,0", [(5, [1, 1, 0])]),
    ],
)
def test_shapes(text, groups):
    assert parse_shape(text) == groups
    plan = build_plan(rows_of_shape(groups))
    assert plan.group_index.tolist() == [g for g, (_, lens) in enumerate(groups) for _ in lens]


def test_json():
    report = json.loads(command("3:2,4,0 2:1", "--window", 3, "--json").stdout)
    assert (report["rows"], report["prompts"], report["total"], report["packed"]) == (4, 2, 18, 12)
    assert report["attention_pairs"] == {"rows": 42, "packed": 30}
    assert report["segments"][1] == {"kind": "row alone", "prompt": 1, "row": 3, "start": 3, "end": 6}
    (call,) = report["calls"]
    plan = build_plan(rows_of_shape([(3, [2, 4, 0]), (2, [1])]))
    assert call["key_index"] == plan.forest.window_call(3).key_index.tolist()
    assert (call["causal"], call["window"], call["num_keys"]) == (True, 3, 16)
    assert len(json.loads(command("3:2,4,0 2:1", "--json").stdout)["calls"]) == 2


# Dumps.


@pytest.fixture
def dumps(tmp_path):
    """Steps 3 and 11: two prompts with three rows each."""
    for step in (3, 11):
        rows = [{"input": f"step {step}, prompt {p}", "output": "y" * r, "step": step} for p in "ab" for r in (1, 2, 3)]
        (tmp_path / f"{step}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def shown(*arguments):
    result = command(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_rows_of_a_step(dumps):
    first = shown(dumps)
    assert (first["rows"], first["prompts"], first["unit"]) == (6, 2, "characters")
    assert first["packed"] == 2 * len("step 3, prompt a") + 2 * (1 + 2 + 3)
    part = shown(dumps, "--step", 11, "--rows", "2:5")
    assert (part["rows"], part["prompts"]) == (3, 2)
    assert part["packed"] == 2 * len("step 11, prompt a") + 3 + 1 + 2
    kinds = [(segment["kind"], segment["row"]) for segment in part["segments"]]
    assert kinds == [("prompt", None), ("row alone", 2), ("response", 3), ("response", 4)]
    assert shown(dumps, "--rows", ":2")["rows"] == 2
    assert shown(dumps / "11.jsonl", "--rows", "4:")["rows"] == 2
    assert shown(dumps, "--rows", f"1:{10**30}")["rows"] == 5


def test_no_more_is_read_than_is_drawn(dumps):
    """Neither the files after it nor what stands behind its rows."""
    (dumps / "12.jsonl").mkdir()
    file = dumps / "3.jsonl"
    file.write_text(file.read_text() * 50 + "{broken\n")
    assert shown(dumps)["rows"] == 16
    assert shown(dumps, "--step", 11)["rows"] == 6
    assert "3.jsonl:301: expected JSON" in command(dumps, "--rows", "290:").stderr


def test_padding_is_not_drawn(dumps):
    file = dumps / "3.jsonl"
    padding = json.dumps({"input": "", "output": "", "uid": f"pad{'0' * 32}_0_0", "step": 3})
    file.write_text(f"{padding}\n{file.read_text()}{padding}\n")
    whole = shown(file)
    assert (whole["rows"], whole["segments"][0]["end"]) == (6, len("step 3, prompt a"))


def test_tokens_of_a_dump(dumps, tmp_path):
    tiny_tokenizer.build().save_pretrained(tmp_path / "tokenizer")
    result = command(dumps / "3.jsonl", "--tokenizer", tmp_path / "tokenizer")
    assert "prompt 0 [0:16) 16 tokens" in result.stdout
    assert "prompt 0 [0:16) 16 characters" in command(dumps / "3.jsonl").stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("6:3;4",), "BATCH: expected a dump that is there, or lengths such as '6:3,4,2 4:2' or '512:64x8'"),
        (("0:3",), "BATCH: "),
        (("",), "BATCH: "),
        (("gone.jsonl",), "BATCH: "),
        (("5:1 " * 200 + "x",), "BATCH: "),
        (("{dumps}", "--rows", "4"), "--rows: expected A:B with A below B, the first row is 0, got '4'"),
        (("{dumps}", "--rows", "4:4"), "--rows: expected A:B"),
        (("{dumps}", "--rows", "90:"), "--rows: expected rows that are in the dump, got none of 90:; see --step"),
        (("{dumps}", "--step", "7"), "--step: expected one of 3 to 11, got 7"),
        (("{dumps}/3.jsonl", "--step", "7"), "--step: expected 3, got 7"),
        (("{empty}",), "FILE: expected at least one row, got none"),
        (("5:1", "--step", "3"), "--step: expected a dump as BATCH, of which it says what to read, got '5:1'"),
        (("5:1", "--rows", "5:9"), "--rows: expected a dump as BATCH"),
        (
            ("5:1", "--tokenizer", "nowhere", "--prompt-column", "p", "--response-column", "r"),
            "--tokenizer, --prompt-column, --response-column: expected a dump as BATCH",
        ),
        (("gone.jsonl", "--step", "3"), "BATCH: "),
        (("{dumps}", "--rows", "x", "--tokenizer", "nowhere"), "--rows: expected A:B with A below B"),
        (("5:1", "--window", "0"), "--window: expected at least 1, got 0"),
        (("5:1", "--plot", "x.jpg"), "--plot: expected a .png file"),
    ],
)
def test_a_mistake_is_one_line(dumps, tmp_path_factory, arguments, said):
    empty = tmp_path_factory.mktemp("empty") / "1.jsonl"
    empty.touch()
    result = command(*(argument.format(dumps=dumps, empty=empty) for argument in arguments))
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"zorro-verl show: {said}"), line


# The picture.


def test_what_is_painted():
    plan = build_plan(rows_of_shape([(3, [2, 4, 0]), (2, [1])]))
    blocks, found = count_blocks(plan, MOST_CELLS), segments(plan)
    (panel,) = chart_blocks(blocks, found, "title").axes
    colours = {
        text.get_text(): patch
        for text, patch in zip(panel.get_legend().get_texts(), panel.get_legend().get_patches(), strict=True)
    }
    assert len(panel.images) == len(colours) == 4
    painted = torch.zeros(12, 12)
    for image in panel.images:
        kind = next(kind for kind in Pairs if kind.label == image.get_label())
        pixels = torch.tensor(image.get_array().data)
        assert torch.equal(pixels[..., 3], blocks.pairs[kind.value].double())
        assert to_hex(pixels[0, 0, :3].tolist()) == to_hex(colours[kind.label].get_facecolor())
        assert list(image.get_extent()) == [0, 12, 12, 0]
        painted += pixels[..., 3]
    assert torch.equal(painted.bool(), plan.forest.visible())
    assert (panel.get_xlabel(), panel.get_ylabel()) == ("key (packed token)", "query (packed token)")
    (names,) = panel.child_axes
    assert [label.get_text() for label in names.get_yticklabels()] == ["prompt 0", "row 3", "row 0", "row 1"]
    assert names.get_yticks().tolist() == [1.5, 4.5, 7, 10]


def test_cells_of_a_large_picture():
    """Cells are partly painted where part of their pairs attends, and names that would overlap are left out."""
    plan = build_plan(rows_of_shape([(500, [40] * 4 + [1] * 99)]))
    blocks, found = count_blocks(plan, 50), segments(plan)
    (panel,) = chart_blocks(blocks, found, "title").axes
    edge = blocks.cell * blocks.pairs.shape[1]
    shares = sum(torch.tensor(image.get_array().data)[..., 3] for image in panel.images)
    assert float(shares[0, 0]) == pytest.approx((blocks.cell + 1) / 2 / blocks.cell)
    assert edge > plan.num_tokens == panel.get_xlim()[1]
    labels = [label.get_text() for label in panel.child_axes[0].get_yticklabels()]
    assert labels[:5] == ["prompt 0", "row 0", "row 1", "row 2", "row 3"]
    assert 5 < len(labels) < 15
    assert not list(panel.lines)  # 104 segments: lines between them would hide them


def test_the_file(tmp_path):
    picture = tmp_path / "x.png"
    result = command("30:3,4 4:2", "--plot", picture)
    assert result.exit_code == 0, result.output
    assert picture.read_bytes().startswith(b"\x89PNG\r\n")
    assert result.stdout.startswith("3 rows, 2 prompts")
    assert command("30:3").stdout.startswith("1 row, 1 prompt\n")
