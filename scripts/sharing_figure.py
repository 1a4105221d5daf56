"""Draw docs/images/sharing.svg: the rows of docs/how-it-works.md, the packed row, and who attends to whom.

    python scripts/sharing_figure.py

Everything in the picture is read off the plan that the package makes of these rows.
"""

from __future__ import annotations

from pathlib import Path

import torch

from zorro_verl.grouping import Rows, find_prompt_groups
from zorro_verl.packing import Plan, build_plan

FIGURE = Path(__file__).resolve().parent.parent / "docs" / "images" / "sharing.svg"
CELL = 26
COLOURS = ("#4c78a8", "#72a87a", "#f2a541", "#d9694f", "#9a9a9a")  # of segments: a prompt, a lone row, responses
FAINT = "#c3d5ea"  # responses on their prompt
LEFT, TOP = 16, 44  # of the first row
MATRIX = 300  # where the packed row begins


def example() -> tuple[Rows, Plan]:
    """Four rows of two prompts, of which one is shared by three."""
    rows = Rows(
        tokens=torch.tensor([11, 12, 13, 21, 22, 41, 42, 51, 11, 12, 13, 31, 32, 33, 11, 12, 13]),
        position_ids=torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 3, 4, 5, 0, 1, 2]),
        cu_seqlens=torch.tensor([0, 5, 8, 14, 17]),
        prompt_lens=torch.tensor([3, 2, 3, 3]),
    )
    return rows, build_plan(rows, find_prompt_groups(rows))


def cell(column: float, line: float, colour: str, number: int | None = None) -> str:
    """A square of the grid, with a token in it or none."""
    square = f'<rect x="{column:g}" y="{line:g}" width="{CELL}" height="{CELL}" fill="{colour}" stroke="#fff"/>'
    if number is None:
        return square
    return f'{square}<text x="{column + CELL / 2:g}" y="{line + 17:g}" fill="#fff">{number}</text>'


def words(text: str, x: int, y: int) -> str:
    """A line of explanation."""
    return f'<text x="{x}" y="{y}" fill="#333" text-anchor="start">{text}</text>'


def draw() -> str:
    """The picture, as SVG."""
    rows, plan = example()
    lengths = plan.forest.lengths.tolist()
    segment = [index for index, length in enumerate(lengths) for _ in range(length)]  # of each packed token
    packed, visible = plan.pack(rows.tokens).tolist(), plan.forest.visible().tolist()
    parts = [words("rows, as they came", LEFT, 20), words("packed row, and what each token sees", MATRIX, 20)]
    token = 0
    for line, length in enumerate(rows.lens.tolist()):
        for column in range(length):
            colour = COLOURS[segment[int(plan.unpack_index[token])]]
            parts.append(cell(LEFT + CELL * column, TOP + 1.5 * CELL * line, colour, int(rows.tokens[token])))
            token += 1
    x, y = MATRIX - 68, TOP + 2.5 * CELL
    parts.append(f'<path d="M{x} {y}h30m-8 -6l8 6l-8 6" fill="none" stroke="#333" stroke-width="2"/>')
    for index, number in enumerate(packed):
        colour = COLOURS[segment[index]]
        parts.append(cell(MATRIX, TOP + CELL * (index + 1), colour, number))
        parts.append(cell(MATRIX + CELL * (index + 1), TOP, colour, number))
        for key, seen in enumerate(visible[index]):
            if seen:
                own = segment[index] == segment[key]
                place = MATRIX + CELL * (key + 1), TOP + CELL * (index + 1)
                parts.append(cell(*place, colour if own else FAINT))
    bottom = TOP + CELL * (len(packed) + 1)
    parts += [
        words("triangles: the self call, every segment on itself, causal", MATRIX, bottom + 22),
        words("rectangle: the cross call, responses on their prompt", MATRIX, bottom + 40),
    ]
    width, height = MATRIX + CELL * (len(packed) + 1) + 60, bottom + 54
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="13" text-anchor="middle">'
    )
    return "\n".join([head, f'<rect width="{width}" height="{height}" fill="#fff"/>', *parts, "</svg>", ""])


if __name__ == "__main__":
    FIGURE.write_text(draw())
