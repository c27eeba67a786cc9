"""Tables and wrapped lines of the text faces: the same wherever they are written."""

from __future__ import annotations

import subprocess
import sys
from operator import itemgetter

import pytest

from traceml_ray.document.model import Column, Facts, Table
from traceml_ray.document.text import WIDTH, laid_out, page

ROWS = [("0", "host-0", "", "a" * 70 + " and what follows"), ("1", "n\x1b[31m", "", "[bold]x[/bold] :smile:")]
COLUMNS = [
    Column(name, itemgetter(index), "words" if index else "figures")
    for index, name in enumerate(("rank", "node", "name", "end"))
]


def _blocks() -> str:
    ranks = Table("Ranks", COLUMNS, ROWS)
    return page([Facts(("Why", "late " * 30), ("", "")), [], ranks])


@pytest.mark.parametrize(
    "environ",
    [
        {"COLUMNS": "40", "LINES": "3"},
        {"FORCE_COLOR": "1", "COLORTERM": "truecolor", "TERM": "xterm-256color"},
        {"TERM": "dumb", "NO_COLOR": "1", "TTY_COMPATIBLE": "1"},
        {"JUPYTER_COLUMNS": "30", "PYTHONIOENCODING": "ascii"},
    ],
)
def test_layout_takes_nothing_from_the_terminal(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = _blocks()
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert _blocks() == text


def test_layout_is_plain_and_within_its_width() -> None:
    lines = _blocks().splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert lines[0].startswith("Why        late late")
    assert lines[1].startswith(" " * 11 + "late")
    rank, wrapped, other = lines[5:8]
    assert lines[4].split() == ["rank", "node", "end"], "a column without any value is left out"
    assert (rank.split()[:2], wrapped.split()) == (["0", "host-0"], ["follows"])
    assert other.split() == ["1", "n\\u001b[31m", "[bold]x[/bold]", ":smile:"]


def test_number_and_unit_stay_on_one_line() -> None:
    for width in range(60, 100):
        lines = laid_out(Facts(("Why", "x" * width + " 40.2 ms of 3 GB, 12 % more, 5 steps")))
        assert not any(line.endswith(("40.2", "3", "12")) for line in lines), lines
        assert " ".join(line.strip() for line in lines).endswith(" 40.2 ms of 3 GB, 12 % more, 5 steps")


def test_rich_is_imported_only_where_a_report_is_written() -> None:
    """Neither by what runs in a training process nor by importing the reports."""
    code = (
        "import sys, traceml_ray.api, traceml_ray.agent.bootstrap, traceml_ray.agent.rank_agent\n"
        "import traceml_ray.driver, traceml_ray.reports.files\n"
        "from traceml_ray.document import model, text\n"
        "assert 'rich' not in sys.modules\n"
        "text.laid_out(model.Facts(('a', 'b')))\n"
        "assert 'rich' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)
