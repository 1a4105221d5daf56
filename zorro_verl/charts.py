"""Pictures for `zorro-verl analyze` and `zorro-verl show`, with matplotlib, which is loaded when one is asked for."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from zorro_verl.analysis import Outlook, Statistics
from zorro_verl.drawing import Blocks, Pairs, Segment

if TYPE_CHECKING:  # the extra `plot`
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_CELLS = 200  # of the picture of a micro-batch, on each side
_MOST_LINES = 100  # between segments; more of them would hide what they part
_LABELS = 50  # that find room, one below the other
_COLOURS = {
    Pairs.PROMPT_ITSELF: "tab:blue",
    Pairs.RESPONSE_ITSELF: "tab:orange",
    Pairs.ALONE_ITSELF: "tab:gray",
    Pairs.RESPONSE_PROMPT: "tab:green",
}
WAYS = {
    "stock": "stock fsdp2",
    "row_placed": "shared, veRL's placement",
    "group_placed": "zorro",
}


def check_plot(path: Path | None) -> None:
    """Before any work is done: is there what draws, and a place to draw to?

    Raises:
        ValueError: matplotlib isn't installed, the folder isn't there, or the file is no PNG.
    """
    if path is None:
        return
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot: expected matplotlib, got none; pip install 'zorro-verl[plot]'")
    if path.suffix != ".png" or not path.parent.is_dir():
        raise ValueError(f"--plot: expected a .png file in a folder that is there, got {str(path)!r}")


def save(figure: Figure, path: Path) -> None:
    """Write the picture.

    Raises:
        ValueError: it can't be written there.
    """
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise ValueError(
            f"--plot: expected a file that can be written, got {str(path)!r} ({error.strerror})"
        ) from error


def chart_statistics(statistics: Statistics, outlook: Outlook | None) -> Figure:
    """Lengths, the token ratio of every group and, where it was predicted, the time of the model's calls."""
    from matplotlib.figure import Figure

    timed = outlook is not None and outlook.ways[0].name == "stock"
    figure = Figure(figsize=(5 * (2 + timed), 4), layout="constrained")
    panels = figure.subplots(1, 2 + timed)
    _lengths(panels[0], statistics)
    _ratios(panels[1], statistics)
    if outlook is not None and timed:
        _times(panels[2], outlook)
    return figure


def chart_blocks(blocks: Blocks, found: Sequence[Segment], title: str) -> Figure:
    """Which packed tokens attend to which, coloured by what they are.

    Args:
        blocks: at most `MOST_CELLS` on a side.
        found: the segments, whose names stand at the axes.
        title: of the picture.
    """
    from matplotlib.colors import to_rgb
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(8, 8), layout="constrained")
    panel = figure.subplots()
    edge = blocks.pairs.shape[1] * blocks.cell
    present = [kind for kind in Pairs if blocks.pairs[kind.value].any()]
    shares = blocks.shares().numpy()
    for kind in present:
        red, green, blue = to_rgb(_COLOURS[kind])
        share = shares[kind.value]
        colours = share[..., None] * [0, 0, 0, 1] + [red, green, blue, 0]  # the more of a cell, the stronger
        panel.imshow(colours, extent=(0, edge, edge, 0), interpolation="nearest", label=kind.label)
    panel.set(xlim=(0, blocks.num_tokens), ylim=(blocks.num_tokens, 0), title=title)
    panel.set(xlabel="key (packed token)", ylabel="query (packed token)")
    filled = [segment for segment in found if segment.num_tokens]
    for segment in filled if len(filled) <= _MOST_LINES else ():
        panel.axhline(segment.start, color="0.8", linewidth=0.5)
        panel.axvline(segment.start, color="0.8", linewidth=0.5)
    named: list[Segment] = []
    for segment in filled:
        if not named or sum(segment[1:3]) - sum(named[-1][1:3]) >= 2 * blocks.num_tokens / _LABELS:
            named.append(segment)
    names = panel.secondary_yaxis("right")
    names.set_yticks([(s.start + s.end) / 2 for s in named], [s.label for s in named], fontsize=8)
    names.tick_params(length=0)
    handles = [Patch(color=_COLOURS[kind], label=kind.label) for kind in present]
    panel.legend(handles=handles, loc="upper right", fontsize=9)
    return figure


def _lengths(panel: Axes, statistics: Statistics) -> None:
    from numpy import geomspace

    # Lengths range over orders of magnitude; an empty response has no place on such an axis, and stands at 1.
    lengths = {
        "prompts, each once": statistics.prompt_lengths,
        "responses": [max(1, length) for length in statistics.response_lengths],
    }
    shortest, longest = min(map(min, lengths.values())), max(map(max, lengths.values()))
    edges = geomspace(shortest, max(longest, shortest + 1) * 1.001, 41).tolist()
    for (label, values), colour in zip(lengths.items(), ("tab:blue", "tab:orange"), strict=True):
        panel.hist(values, bins=edges, label=f"{label} ({len(values):,})", color=colour, alpha=0.6)
    panel.set(title="lengths", xlabel=f"length ({statistics.unit})", ylabel="how many", xscale="log", yscale="log")
    panel.set_ylim(bottom=0.7)  # one is to be seen
    panel.legend()


def _ratios(panel: Axes, statistics: Statistics) -> None:
    points = [
        (rows.prompts[members[0]], len(members), total / (total - (len(members) - 1) * rows.prompts[members[0]]))
        for rows in (step.rows for step in statistics.steps)
        for members in rows.by_group()
        for total in [sum(rows.prompts[row] + rows.responses[row] for row in members)]
    ]
    prompts, sizes, ratios = zip(*points, strict=True)
    dots = panel.scatter(prompts, ratios, c=sizes, s=12, alpha=0.7, rasterized=True, cmap="viridis")
    panel.axhline(statistics.token_ratio, color="tab:red", label=f"all rows: {statistics.token_ratio:.2f}")
    panel.set(
        title="token ratio of each group",
        xlabel=f"length of its prompt ({statistics.unit})",
        ylabel="rows' tokens / packed tokens" if statistics.unit == "tokens" else "rows / packed (characters)",
        ylim=(0, 1.1 * max(ratios)),
    )
    if len(set(sizes)) > 1:
        panel.figure.colorbar(dots, ax=panel, label="rows of the group")
    else:
        panel.set_title(f"token ratio of each group of {sizes[0]} rows")
    panel.legend(loc="lower right")


def _times(panel: Axes, outlook: Outlook) -> None:
    from numpy import arange

    colours = ("0.6", "tab:orange", "tab:blue")
    width = 0.8 / len(outlook.ways)
    for i, (way, colour) in enumerate(zip(outlook.ways, colours, strict=False)):
        times = [1 / speedup for speedup in (way.log_prob_speedup, way.update_speedup) if speedup is not None]
        bars = panel.bar(
            arange(2) + (i - (len(outlook.ways) - 1) / 2) * width, times, width, label=WAYS[way.name], color=colour
        )
        panel.bar_label(bars, fmt="%.2f")
    panel.set_xticks([0, 1], ["compute_log_prob", "update_actor"])
    panel.set(
        title="predicted time of the model's passes in a step,\nstock = 1, by floating-point work",
        xlabel=f"on {outlook.setup.ranks} data-parallel rank{'s' * (outlook.setup.ranks > 1)}",
        ylabel="time / time of stock",
        ylim=(0, 1.1 + 0.14 * len(outlook.ways)),  # with room for the legend
    )
    panel.legend(loc="upper right", fontsize=8)
