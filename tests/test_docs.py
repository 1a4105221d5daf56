"""The examples in the documentation run and print what they say."""

import doctest
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.name)
def test_examples(page):
    result = doctest.testfile(str(page), module_relative=False, optionflags=doctest.REPORT_NDIFF)
    assert result.failed == 0
    assert result.attempted > 0 or ">>>" not in page.read_text()
