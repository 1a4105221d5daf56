"""The documentation: examples print what they say, links lead somewhere, the site builds, quoted messages exist."""

from __future__ import annotations

import ast
import doctest
import functools
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import sharing_figure
import yaml

from zorro_verl.options import CONFIG_KEY, ZorroOptions

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
ALL_PAGES = [*PAGES, *sorted(ROOT.glob("*.md"))]
FENCE = re.compile(r"^( *)(`{3,})(.*)\n(?:.*\n)*?\1\2$", re.MULTILINE)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")

by_name = {"ids": lambda page: page.name}


@pytest.mark.parametrize("page", PAGES, **by_name)
def test_examples(page):
    result = doctest.testfile(str(page), module_relative=False, optionflags=doctest.REPORT_NDIFF)
    assert result.failed == 0
    assert result.attempted > 0 or ">>>" not in page.read_text()


@pytest.mark.parametrize("page", PAGES, **by_name)
def test_blocks_say_what_they_are(page):
    """A fence has a language, and nothing is a block by its indentation."""
    text = page.read_text()
    assert {match[3] for match in FENCE.finditer(text)} <= {"bash", "python", "text", "diff"}
    prose = FENCE.sub("", text)
    assert "```" not in prose
    indented = re.findall(r"(?:^|\n)\n(    \S.*)", prose)
    assert not [line for line in indented if not line.lstrip().startswith(("* ", "- "))]


def test_the_figure_is_what_its_script_draws():
    assert sharing_figure.FIGURE.read_text() == sharing_figure.draw()


# Links, by the rules of a code host.


def anchors(page: Path) -> set[str]:
    """Of its headings; the second of one name has a number."""
    found: dict[str, int] = {}
    for heading in re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), re.MULTILINE):
        text = LINK.sub(lambda link: link[0][1:].partition("]")[0], heading)
        slug = re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")
        found[slug] = found.get(slug, -1) + 1
    return {f"{slug}-{i}" if i else slug for slug, count in found.items() for i in range(count + 1)}


@pytest.mark.parametrize("page", ALL_PAGES, **by_name)
def test_local_links_lead_somewhere(page):
    for link in LINK.findall(FENCE.sub("", page.read_text())):
        if re.match(r"\w+:", link):
            continue
        place, _, anchor = link.partition("#")
        target = Path(os.path.normpath(page.parent / place)) if place else page
        assert target.is_relative_to(ROOT), link
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


# The site.


def sources(folder: Path) -> Path:
    """A copy of all that the site is made of."""
    for entry in ("docs", "recipes", "configs"):
        shutil.copytree(ROOT / entry, folder / entry, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "scripts").mkdir()
    files = (*ROOT.glob("*.md"), ROOT / "LICENSE", ROOT / "mkdocs.yml", ROOT / "scripts" / "docs_site.py")
    for path in files:
        shutil.copy(path, folder / path.relative_to(ROOT))
    return folder


def build(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, env=environment)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = sources(tmp_path_factory.mktemp("site"))
    done = build(folder)
    assert done.returncode == 0, done.stderr
    return folder / "build" / "site"


def test_every_page_is_in_the_menu_once():
    def leaves(nav) -> Iterator[str]:
        for entry in nav:
            for value in entry.values():
                yield from leaves(value) if isinstance(value, list) else [value]

    menu = list(leaves(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    assert sorted(menu) == sorted([*(page.name for page in PAGES), "repository/CHANGELOG.md"])


def test_the_site_holds_the_files_that_pages_link_to(site):
    def page(place: str) -> str:
        return (site / place / "index.html").read_text()

    script = (ROOT / "recipes" / "cluster" / "slurm.sh").read_text()
    shown = re.sub(r"<[^>]*>", "", page("repository/recipes/cluster/slurm.sh"))
    assert script.splitlines()[0] in shown
    assert script.splitlines()[-1].split("$")[0] in shown
    assert 'href="../repository/recipes/cluster/slurm.sh/"' in page("multi-node")
    assert 'href="../../verl/"' in page("repository/CHANGELOG"), "its docs/verl.md is a page of the site"
    assert 'href="zorro_grpo.yaml/"' in page("repository/configs"), "a folder is a list of its files"
    assert (site / "results" / "cpu.json").is_file()
    assert 'href="cpu.json"' in page("results")


def test_the_site_asks_no_other_host(site):
    for page in site.rglob("*.html"):
        assert not re.findall(r'(?:src|data|srcset)="(?:https?:)?//[^"]*"', page.read_text()), page
        assert not re.findall(r'<link [^>]*href="(?:https?:)?//[^"]*"', page.read_text()), page
    for style in site.rglob("*.css"):
        assert not re.findall(r"(?:@import|url\()[\"' ]*(?:https?:)?//", style.read_text()), style


MISTAKES = (
    ("verl.md", "[x](nowhere.md)", "link 'nowhere.md'"),
    ("verl.md", "[x](models.md#nowhere)", "link 'models.md#nowhere'"),
    ("verl.md", "[x](#not-here)", "link '#not-here'"),
    ("verl.md", "[x](../recipes/nowhere.sh)", "link '../recipes/nowhere.sh'"),
    ("verl.md", "![x](images/nowhere.svg)", "link 'images/nowhere.svg'"),
    ("verl.md", "[x](/models.md)", "absolute link '/models.md'"),
    ("../CHANGELOG.md", "[x](docs/gone.md)", "link 'docs/gone.md'"),
    ("orphan.md", "# In no menu", 'not included in the "nav" configuration:\n  - orphan.md'),
)


def test_what_leads_nowhere_ends_the_build(tmp_path):
    """Each is a warning, of which one is enough."""
    folder = sources(tmp_path)
    for page, text, _ in MISTAKES:
        with (folder / "docs" / page).open("a") as file:
            file.write(f"\n{text}\n")
    done = build(folder)
    assert done.returncode == 1
    assert f"Aborted with {len(MISTAKES)} warnings in strict mode!" in done.stdout
    for page, _, said in MISTAKES:
        assert said in done.stderr, (page, done.stderr)


# Messages: what operations.md quotes is what the code says.

ANY = "\0"  # in a template or a quotation: some value
OTHERS = (
    ("verl", "workers/engine/base.py"),
    ("verl", "single_controller/ray/base.py"),
    ("ray", "exceptions.py"),
    ("hydra", "_internal/config_loader_impl.py"),
)
CONSTANTS = {"CONFIG_KEY": CONFIG_KEY, "STRATEGY": "zorro"}
LONGEST = 1000  # characters; longer strings are docstrings
LEAST_KNOWN = 0.6  # of a quotation has to be the template's own words, so that no template of values alone is taken


class Quotation(NamedTuple):
    """A message as a page has it."""

    text: str
    section: str


def quotations() -> list[Quotation]:
    """All code of several words in the first column of the tables below "Messages"."""
    section, found = "", []
    for line in (DOCS / "operations.md").read_text().partition("\n## Messages\n")[2].splitlines():
        section = line.lstrip("# ") if line.startswith("#") else section
        if line.startswith("| "):
            codes = re.findall(r"`([^`]+)`", line.split(" | ")[0])
            found += [Quotation(code, section) for code in codes if " " in code]
    return found


def piece(part: ast.expr) -> str:
    """Of an f-string."""
    if isinstance(part, ast.Constant):
        return part.value
    return CONSTANTS.get(part.value.id, ANY) if isinstance(part.value, ast.Name) else ANY


@functools.cache
def templates() -> tuple[str, ...]:
    """Every string in the sources, with `ANY` for what is put into it."""
    paths = [Path(importlib.util.find_spec(package).origin).parent / place for package, place in OTHERS]
    found = set()
    for path in (*(ROOT / "zorro_verl").rglob("*.py"), *paths):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                text = "".join(map(piece, node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                text = node.value
            else:
                continue
            found.add(re.sub(r"%(?:\.\d)?[sdf]", ANY, text))
    return tuple(text for text in found if " " in text and len(text) < LONGEST)


def known(quotation: str, template: str) -> int:
    """How many characters of a quotation are the template's, if it can be how the template begins; else -1.

    `ANY` in either stands for any part of the other.
    """
    best = [[-1] * (len(template) + 1) for _ in range(len(quotation))] + [[0] * (len(template) + 1)]
    for i in range(len(quotation) - 1, -1, -1):
        for j in range(len(template), -1, -1):
            ways = []
            if quotation[i] == ANY:
                ways.append(best[i + 1][j])
                if j < len(template):
                    ways.append(best[i][j + 1])
            if j < len(template) and template[j] == ANY:
                ways += [best[i][j + 1], best[i + 1][j]]
            if j < len(template) and quotation[i] == template[j] != ANY and best[i + 1][j + 1] >= 0:
                ways.append(1 + best[i + 1][j + 1])
            best[i][j] = max(ways, default=-1)
    return best[0][0]


def is_said(message: str) -> bool:
    """Whether some template gives the message; ``...`` in front stands for what comes before it."""
    text = re.sub(r"<[^>]*>|^\.\.\. ", ANY, re.sub(r"^\w+Error: ", "", message))
    words = {text[i : i + 12] for i in range(len(text) - 11) if ANY not in text[i : i + 12]}
    fixed = len(text.replace(ANY, ""))
    return any(
        known(text, template) >= LEAST_KNOWN * fixed
        for template in templates()
        if any(word in template for word in words)
    )


def raised(call, *arguments, **options) -> str:
    with pytest.raises(ValueError) as caught:
        call(*arguments, **options)
    return str(caught.value)


def of_options() -> str:
    from zorro_verl.actor_options import check_options  # and veRL

    return raised(check_options, SimpleNamespace(use_prefix_grouper=True), "actor_rollout_ref.actor")


# Made of values and a table's words: said by the code itself.
COMPOSED = {
    "actor_rollout_ref.actor.use_prefix_grouper: expected False, got True; prompts are shared without it": of_options,
    "actor_rollout_ref.actor.zorro.attn_implementation: expected one of <names>, got <name>": lambda: raised(
        ZorroOptions, attn_implementation="sdp"
    ),
}
IN_C = ("torch.OutOfMemoryError: CUDA out of memory",)


def test_there_are_messages_of_every_kind():
    sections = [quotation.section for quotation in quotations()]
    assert sections.count("At start") > 15
    assert sections.count("While it runs") > 10
    assert sections.count("veRL and Ray") > 3


@pytest.mark.parametrize("message", [quotation.text for quotation in quotations()])
def test_quoted_messages_are_those_of_the_code(message):
    if message in COMPOSED:
        pattern = ".*".join(map(re.escape, re.split(r"<[^>]*>", message)))
        assert re.fullmatch(pattern, COMPOSED[message]())
    elif message in IN_C:
        import torch

        assert issubclass(torch.OutOfMemoryError, RuntimeError)
    else:
        assert is_said(message)


@pytest.mark.parametrize(
    "message",
    [
        "transformers: expected a release in <range>, got <version>",
        "<kernel>: its backward counts in 64 bits",
        "grad_norm is <value>: this optimizer step was made, as verl does",
        "<key>: expected a divisor of <ranks> GPUs (trainer.nnodes x trainer.n_gpus_per_node), got <size>",
    ],
)
def test_a_message_that_went_stale_is_noticed(message):
    assert not is_said(message)
