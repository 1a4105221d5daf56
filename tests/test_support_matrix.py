"""The support matrix of docs/models.md: it lists what the code supports, as the README does, and its numbers hold."""

import re
from pathlib import Path

import pytest
import support_matrix
import tiny_models

from zorro_verl.families import SUPPORTED_MODEL_TYPES

ROOT = Path(__file__).resolve().parent.parent
MATRIX = support_matrix.PAGE.read_text().split(support_matrix.BEGIN)[1].split(support_matrix.END)[0]
ROWS = re.findall(r"^\| `(\w+)` \| `(\w+)` \| (.*?) \| (.*) \| (.*) \| (.*) \| (.*) \|$", MATRIX, re.MULTILINE)


def test_every_supported_type_has_its_row_and_its_tiny_model():
    assert [row[0] for row in ROWS] == list(SUPPORTED_MODEL_TYPES)
    assert set(tiny_models.MODELS) == set(SUPPORTED_MODEL_TYPES)


def test_the_readme_lists_the_same_types():
    (line,) = (line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("| models |"))
    assert set(re.findall(r"`(\w+)`", line)) == set(SUPPORTED_MODEL_TYPES)


def test_every_verdict_is_equal_and_within_the_tolerance():
    hybrids = {name for name, _, layers, *_ in ROWS if "linear" in layers}
    for name, _, _, *numbers, verdict in ROWS:
        assert verdict == "equal", name
        assert all(float(number) <= (2e-5 if name in hybrids else 5e-6) for number in numbers), name
    assert hybrids == {name for name in SUPPORTED_MODEL_TYPES if name.startswith(("qwen3_next", "qwen3_5"))}


@pytest.mark.parametrize("name", ["olmo3", "mixtral", "qwen3_5_text"])
def test_rows_come_out_again(name):
    """Class, layers and verdict as they stand; numbers of the size of rounding."""
    written = next(row for row in ROWS if row[0] == name)
    found = support_matrix.row(name)
    assert found.report.linear_attention == (("expand", "fork") if "linear" in written[2] else ())
    _, _, model_class, layers, *_, verdict, _ = (cell.strip().strip("`") for cell in found.text().split("|"))
    assert (model_class, layers, verdict) == (written[1], written[2], written[6])


def test_help_says_that_a_bare_run_rewrites_the_page(capsys):
    with pytest.raises(SystemExit):
        support_matrix.main(["--help"])
    assert "without --only, rewrite the table in docs/models.md" in " ".join(capsys.readouterr().out.split())


def test_the_page_is_rewritten_between_its_markers(monkeypatch, tmp_path):
    page = tmp_path / "models.md"
    page.write_text(f"before\n{support_matrix.BEGIN}\nold\n{support_matrix.END}\nafter\n")
    monkeypatch.setattr(support_matrix, "PAGE", page)
    for _ in range(2):
        support_matrix.write("new")
    assert page.read_text() == f"before\n{support_matrix.BEGIN}\n\nnew\n\n{support_matrix.END}\nafter\n"
