"""The documentation: it builds without a broken link, is up to date, and every command in it can be read."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from traceml_ray import cli
from traceml_ray.launchers import torchrun
from traceml_ray.launchers.arguments import marked

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "launchers/recipes/README.md"])
MAX_WORDS = {"README.md": 900, "CONTRIBUTING.md": 1_200, "benchmarks/RESULTS.md": 2_500}


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_site_builds_without_a_broken_link(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert built.returncode == 0, built.stdout + built.stderr
    pages = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.html")}
    assert {"index.html", "symptoms/hang.html", "results.html", "architecture.html"} <= pages
    source = r'<(?:script|img|link rel="(?:stylesheet|preload|icon)")[^>]* (?:src|href)="(https?://[^"]+)"'
    fetched = {url for page in pages for url in re.findall(source, (tmp_path / page).read_text())}
    assert fetched == set(), "a page fetches files from elsewhere"


@pytest.mark.parametrize("page", ["README.md", "launchers/recipes/README.md", "tests/README.md"])
def test_links_of_a_page_outside_of_the_site_lead_somewhere(page: str) -> None:
    path = ROOT / page
    for link, anchor in re.findall(r"\]\((?!https?:)([^)#\s]+)#?([^)\s]*)\)", path.read_text()):
        target = path.parent / link
        assert target.exists(), link
        headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE) if anchor else []
        slugs = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
        assert not anchor or anchor in slugs, f"{link}#{anchor}"


def test_reference_pages_are_up_to_date() -> None:
    pages, folder = load("reference_pages"), DOCS / "reference"
    formats = (folder / "formats.md").read_text()
    assert (folder / "commands.md").read_text() == pages.commands_page(), "run `make api`"
    assert (folder / "settings.md").read_text() == pages.settings_page(), "run `make api`"
    assert formats == pages.formats_page(formats), "run `make api`"


def test_every_setting_and_threshold_says_what_it_means() -> None:
    silent = re.findall(
        r"^\| `(\w+)` .*\|  \|$", (DOCS / "reference" / "settings.md").read_text(), re.MULTILINE
    )
    assert silent == [], "write a sentence under the field"


@pytest.mark.parametrize("path", MAX_WORDS)
def test_page_is_short_enough_to_be_read(path: str) -> None:
    words = len((ROOT / path).read_text().split())
    assert words <= MAX_WORDS[path]


def commands() -> Iterator[Any]:
    """Yield each command line of ours in a block of shell of a page, without its comment."""
    ours = re.compile(r"(?:^|\s)(traceml-ray|python -m traceml_ray\.launch)(?=\s)")
    for page in PAGES:
        text = page.read_text().replace("\\\n", " ")
        blocks = re.findall(r"```bash\n(.*?)```", text, re.S) + re.findall(r"^ {4}(\S.*)$", text, re.M)
        for number, line in enumerate(line for block in blocks for line in block.splitlines()):
            if (match := ours.match(line)) and "…" not in line and not re.search(r"\b[A-Z]{4,}\b", line):
                name = f"{page.relative_to(ROOT)}:{number}"
                yield pytest.param(line[match.start(1) :], id=name)


@pytest.mark.parametrize("line", list(commands()))
def test_command_in_a_page_is_one_that_can_be_called(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = shlex.split(line, comments=True)
    words = words[: words.index("|")] if "|" in words else words
    if words[0] == "python":
        torchrun._parse(words[3:])
        return
    monkeypatch.setattr(cli._Parser, "exit", lambda *why: pytest.fail(str(why[-1])))
    assert callable(cli._parser().parse_args(marked(words[1:])).command)
