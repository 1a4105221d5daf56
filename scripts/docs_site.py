"""A hook of MkDocs: pages of docs/ link to files of the repository, and the site holds those files.

On a code host `../recipes/cluster/slurm.sh` is the file itself. In the site such a link leads to a page below
``repository/`` that shows it: a Markdown file as it reads, any other with its lines, a folder as a list. A link to a
file that isn't there is left as it is, and MkDocs then reports it as broken.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

OUTSIDE = "repository"  # the folder of the site for what lies outside of docs/
LINK = re.compile(r"(?<=\]\()(?!\w+:|/)([^)#\s]+)")  # of a local [text](target#anchor): its target
LANGUAGES = {".sh": "bash", ".py": "python", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml", ".json": "json"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each file and folder that pages link to, and for what these link to in turn."""
    root, docs = _folders(config)
    waiting = [docs / file.src_uri for file in files.documentation_pages()]
    waiting += [root / place.removeprefix(f"{OUTSIDE}/") for place in _menu(config.nav) if place.startswith(OUTSIDE)]
    seen = set()
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        place = _place(path, root, docs)
        if files.get_file_from_path(place) is None:
            files.append(
                File.generated(config, place, content=_content(path, root), inclusion=InclusionLevel.NOT_IN_NAV)
            )
        if path.suffix == ".md":
            targets = (_target(link, path, root) for link in LINK.findall(path.read_text()))
            waiting += [target for target in targets if target is not None]
        elif path.is_dir():
            waiting += _listing(path)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links at where the site has their targets."""
    root, docs = _folders(config)
    place = page.file.src_uri
    source = root / place.removeprefix(f"{OUTSIDE}/") if place.startswith(f"{OUTSIDE}/") else docs / place
    if source.suffix != ".md" or not source.is_file():  # made here, with links of the site
        return markdown

    def there(link: re.Match) -> str:
        target = _target(link[0], source, root)
        return link[0] if target is None else os.path.relpath(_place(target, root, docs), os.path.dirname(place))

    return LINK.sub(there, markdown)


def _folders(config: MkDocsConfig) -> tuple[Path, Path]:
    return Path(config.config_file_path).resolve().parent, Path(config.docs_dir).resolve()


def _menu(nav: object) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    elif isinstance(nav, list | dict):
        for part in nav.values() if isinstance(nav, dict) else nav:
            yield from _menu(part)


def _target(link: str, source: Path, root: Path) -> Path | None:
    """The file or folder of the repository that a local link of a page leads to, None if there is none."""
    target = Path(os.path.normpath(source.parent / link))
    return target if target.is_relative_to(root) and target.exists() else None


def _place(path: Path, root: Path, docs: Path) -> str:
    """Where the site has a file or folder of the repository."""
    place = path.relative_to(docs) if path.is_relative_to(docs) else OUTSIDE / path.relative_to(root)
    if path.is_dir():
        return (place / "index.md").as_posix()
    return place.as_posix() if path.suffix == ".md" or path.is_relative_to(docs) else f"{place.as_posix()}.md"


def _listing(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if not path.name.startswith((".", "__pycache__")))


def _content(path: Path, root: Path) -> str:
    if path.suffix == ".md":
        return path.read_text()
    title = f"---\nsearch: {{exclude: true}}\n---\n\n# {path.relative_to(root).as_posix()}\n\n"
    if path.is_dir():
        docs = root / "docs"
        here = os.path.dirname(_place(path, root, docs))
        places = [(inside.name, os.path.relpath(_place(inside, root, docs), here)) for inside in _listing(path)]
        return title + "".join(f"* [{name}]({place})\n" for name, place in places)
    return f"{title}````{LANGUAGES.get(path.suffix, 'text')}\n{path.read_text()}````\n"
