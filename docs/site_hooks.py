"""
Hooks of mkdocs: pages of the repository outside of `docs/` become pages of the site.

Links are written for GitHub, relative to the file. A link that leaves `docs/` is rewritten: to the page that
the file became, or to a copy of the file. A folder has no page, so its link becomes plain text.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = {
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "benchmarks/RESULTS.md": "results.md",
    "README.md": "index.md",
}
"""File of the repository → page of the site."""
SOURCES = {page: path for path, page in PAGES.items() if page != "index.md"}
COPIES = "source/"
"""Folder of the site with copies of linked files."""
_LINK = re.compile(r"\]\((?!https?:|mailto:|#)([^)#\s]+)(#[^)\s]*)?\)")
_CODE = re.compile(r"`[^`\n]+`")
_FOLDER = re.compile(r"\[([^\]]+)\]\(folder:\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages, and a copy of every file outside of `docs/` that a page links to."""
    for name, path in SOURCES.items():
        files.append(File.generated(config, name, content=(ROOT / path).read_text()))
    pages = [file for file in files if file.src_uri.endswith(".md")]
    for path in sorted({target for page in pages for target in _copied(page)}):
        files.append(File.generated(config, _copy(path), abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite the links of a page."""
    here = page.file.src_uri
    rewritten = _LINK.sub(lambda match: f"]({_target(here, match[1])}{match[2] or ''})", markdown)
    # A bar in code is escaped for GitHub's tables, and must not be for those of mkdocs.
    rewritten = _CODE.sub(lambda match: match[0].replace("\\|", "|"), rewritten)
    return _FOLDER.sub(r"\1", rewritten)


def _copied(file: File) -> list[str]:
    """Return the repository's files, of those that have no page, that a page links to."""
    paths = [_in_repository(file.src_uri, match[1]) for match in _LINK.finditer(file.content_string)]
    return [path for path in paths if _is_copied(path)]


def _copy(path: str) -> str:
    """Return the page that has a copy: as text, so that a browser shows it."""
    return f"{COPIES}{path}.txt"


def _is_copied(path: str) -> bool:
    return not path.startswith("docs/") and path not in PAGES and (ROOT / path).is_file()


def _in_repository(page: str, link: str) -> str:
    """Return the path in the repository that a link of a page has."""
    source = SOURCES.get(page, f"docs/{page}")
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), link))


def _target(page: str, link: str) -> str:
    path = _in_repository(page, link)
    if (ROOT / path).is_dir():
        return "folder:"
    to = PAGES.get(path) or (_copy(path) if _is_copied(path) else path.removeprefix("docs/"))
    return posixpath.relpath(to, posixpath.dirname(page) or ".")
