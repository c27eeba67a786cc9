"""`report.html`: what is on it, that nothing of a session becomes markup, its size, and its failures."""

from __future__ import annotations

import base64
import hashlib
import re
import struct
import zlib
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from played import Played

from traceml_ray.cli import main
from traceml_ray.document import drawing
from traceml_ray.document.elements import Markup, sentence, tag
from traceml_ray.document.svg import png
from traceml_ray.errors import Errors
from traceml_ray.reports import files, page
from traceml_ray.reports.document import ChartData, read_chart_data
from traceml_ray.reports.summary import report_of
from traceml_ray.settings import Settings
from traceml_ray.store.session import SessionFolder
from traceml_ray.store.session_file import SessionFile
from traceml_ray.store.summary_shape import EventInfo
from traceml_ray.wire import messages as wire

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>'\"&`</style>\x1b[31m\ud800"
SENT = HOSTILE.replace("\ud800", "")
"""Where only Unicode goes."""
VOID = {"meta", "img", "path", "rect", "line"}


class Parsed(HTMLParser):
    """Elements and text of a page; anything that is not closed in order is an error."""

    def __init__(self, data: bytes) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(data.decode())
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not (self._open and self._open[-1] == "style"):
            self.text += f"{data}\n"

    def count(self) -> Counter[str]:
        return Counter(name for name, _ in self.elements)

    def alts(self) -> list[str | None]:
        images = [
            attributes
            for name, attributes in self.elements
            if attributes.get("role") == "img" or name == "img"
        ]
        return [attributes.get("alt") or attributes.get("aria-label") for attributes in images]


def read(folder: Path) -> Parsed:
    return Parsed((folder / "report.html").read_bytes())


@pytest.fixture(scope="module")
def late(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A session of eight ranks, of which one is late from the middle on."""
    folder = tmp_path_factory.mktemp("sessions") / "late"
    played = Played(folder, 8, late=5, onset=150)
    played.memory_s = 5
    for _ in range(6):
        played.play(50)
    played.end()
    return folder


def of(folder: Path) -> ChartData:
    with SessionFile(folder / "session.sqlite") as session:
        return read_chart_data(report_of(session, Settings().thresholds))


def test_end_of_a_run_writes_a_page_with_verdict_charts_and_tables(late: Path) -> None:
    parsed = read(late)
    for words in (
        *("Straggler: rank 5 (host-1) in data", "Look at the DataLoader workers", "confidence high"),
        *("8 of 8 ranks", "Step time", "Worst ÷ median rank", "Busy time by rank", "onset, step 150"),
        *("Where a step's time goes", "A step before the onset, and since", "Suspects", "Episodes"),
        *("How it was run", "Settings that differ from the defaults", "2,400 stored"),
        f"traceml-ray dashboard {late}",
    ):
        assert words in parsed.text, words
    assert all(parsed.alts()), "each image says what it shows"
    assert parsed.count()["table"] >= 8
    assert parsed.count()["caption"] == parsed.count()["table"], "each table has a name"


def test_page_has_one_script_no_style_of_elements_and_nothing_from_elsewhere(late: Path) -> None:
    data = (late / "report.html").read_text()
    parsed = Parsed(data.encode())
    assert not {"link", "iframe", "object", "form", "base", "a"} & parsed.count().keys()
    for name, attributes in parsed.elements:
        assert not [
            key for key in attributes if key.startswith("on") or key in ("style", "href", "srcset")
        ], name
        assert attributes.get("src", "data:image/png;base64,").startswith("data:image/png;base64,")  # type: ignore[union-attr]
    assert "url(" not in data and "@import" not in data
    assert not re.search(r"https?://", data)
    policy = next(attributes["content"] for _, attributes in parsed.elements if "http-equiv" in attributes)
    assert policy and parsed.count()["script"] == 1
    for kind in ("style", "script"):
        inside = re.search(rf"<{kind}>(.*?)</{kind}>", data, re.DOTALL)
        assert inside
        digest = base64.b64encode(hashlib.sha256(inside[1].encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy


def test_what_a_session_holds_never_becomes_markup(tmp_path: Path) -> None:
    """Names, messages, tracebacks, commands and settings may be anybody's."""
    played = Played(tmp_path / "s", 2, late=None, hostname=SENT, name=SENT)
    played.play(20, environment={"torch": SENT, SENT: "x"})
    event = wire.Event("note", played.clock(), message=SENT)
    played.aggregator.ingest(played.relays[0].message(events=[event]))
    played.dies(1, 1, f"RuntimeError: {SENT}")
    played.end(1)
    parsed = read(tmp_path / "s")
    assert parsed.count()["script"] == 1, "ours"
    assert parsed.count()["img"] == 1, "the heatmap"
    assert not any(key.startswith("on") for _, attributes in parsed.elements for key in attributes)
    assert parsed.text.count("<script>alert(1)</script>") >= 3
    assert "\x1b" not in parsed.text
    shown = of(tmp_path / "s")
    nasty = shown._replace(summary=_everywhere(shown.summary), settings={HOSTILE: HOSTILE})
    again = Parsed(page.render(nasty, Path(f"/tmp/{HOSTILE}")))
    assert again.count()["script"] == 1
    assert again.count()["img"] == 1
    assert not any(key.startswith("on") for _, attributes in again.elements for key in attributes)


def test_page_names_the_bundles_as_the_text_does(tmp_path: Path) -> None:
    played = Played(tmp_path / "s", 2, late=None)
    played.play(20)
    for minute in range(5):
        (tmp_path / "s" / "bundles" / f"20231114T22130{minute}Z-killed").mkdir(parents=True)
    played.end()
    report, page_text = (tmp_path / "s" / "report.txt").read_text(), read(tmp_path / "s").text
    assert "5 bundles of incidents" in report and "5 bundles of incidents" in page_text
    for minute in (2, 3, 4):
        name = f"bundles/20231114T22130{minute}Z-killed"
        assert name in report and name in page_text


def _everywhere(value: Any, key: str = "") -> Any:
    """Return a summary with a hostile text in place of each that is not one of our own words."""
    if isinstance(value, msgspec.Struct):
        return type(value)(**_everywhere(msgspec.structs.asdict(value)))
    if isinstance(value, dict):
        return {name: _everywhere(item, name) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_everywhere(item, key) for item in value)
    kept_keys = {"label", "severity", "kind", "pattern", "name", "status", "id", "run", "stages", "stage"}
    kept_keys |= {"tone", "subject"}
    times = {"time", "started_at", "ended_at", "last_seen"}
    return HOSTILE if isinstance(value, str) and key not in kept_keys | times else value


def test_dead_ranks_have_their_last_words_on_the_page(tmp_path: Path) -> None:
    played = Played(tmp_path / "s", 4, late=None)
    played.play(30)
    played.dies(3, 1, "ValueError: loss is nan\nat batch 7")
    played.end(1)
    text = read(tmp_path / "s").text
    assert "Ranks that died, the first cause first" in text
    assert 'File "train.py", line 7, in step' in text
    assert "rank 3 (host-0): " in text


def test_session_without_any_step_has_a_page(tmp_path: Path) -> None:
    played = Played(tmp_path / "s", 2, late=None)
    played.end()
    parsed = read(tmp_path / "s")
    assert "Telemetry limited" in parsed.text
    assert parsed.count()["img"] == 0


def test_page_of_1024_ranks_is_bounded_and_a_part_too_large_says_so(late: Path) -> None:
    shown = of(late)
    assert shown.columns is not None
    steps, rng = len(shown.columns.first), np.random.default_rng(0)
    columns = msgspec.structs.replace(
        shown.columns,
        ranks=[*range(1024)],
        nodes=[f"host-{rank // 8:03}" for rank in range(1024)],
        z=rng.integers(0, 256, (1024, steps), np.uint8),
    )
    nobody = dict.fromkeys(("time", "rank", "node", "step", "stage"))
    event = EventInfo(**nobody, kind="note", message="x" * 2000, data={})
    summary = msgspec.structs.replace(shown.summary, events=[event] * 1000)
    large = shown._replace(columns=columns, summary=summary)
    data = page.render(large, late)
    assert len(data) < page.MAX_BYTES // 2
    assert "worst of host-" in Parsed(data).text
    verdict = msgspec.structs.replace(summary.verdict, why="y" * page.MAX_BYTES)
    wordy = msgspec.structs.replace(summary, verdict=verdict)
    data = page.render(large._replace(summary=wordy), late)
    assert len(data) <= page.MAX_BYTES
    assert "The verdict takes 2" in Parsed(data).text


def test_page_that_cannot_be_made_is_counted_and_nothing_else_is_missing(
    late: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> bytes:
        raise ZeroDivisionError

    errors, folder = Errors(), SessionFolder(tmp_path)
    monkeypatch.setattr(page, "render", broken)
    with SessionFile(late / "session.sqlite") as session:
        summary = files.write_reports(folder, session, Settings().thresholds, errors=errors)
    assert summary.verdict.rank == 5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.txt", "summary.json"]
    assert dict(errors) == {"report.html: ZeroDivisionError": 1}


def test_report_writes_the_page_where_it_is_told_to(
    late: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = (late / "report.html").read_bytes()
    (late / "report.html").unlink()
    assert main(["report", str(late), "--html"]) == 0
    assert (late / "report.html").read_bytes() == written, "the same as at the end of the run"
    assert main(["report", str(late), "--html", "-o", str(tmp_path / "x.html")]) == 0
    assert (tmp_path / "x.html").read_bytes() == written
    assert capsys.readouterr().out.splitlines() == [str(late / "report.html"), str(tmp_path / "x.html")]
    (late / "report.html").unlink()
    assert main(["report", "--html", str(late)]) == 0
    assert (late / "report.html").read_bytes() == written
    assert main(["report", str(late), "-o", str(tmp_path / "x.txt")]) == 0
    assert (tmp_path / "x.txt").read_text().startswith(f"traceml-ray · session {late.name}")
    assert main(["report", str(late), "--html", "-o", str(tmp_path / "no" / "x.html")]) == 1


def test_image_of_the_heatmap_has_a_pixel_for_each_cell() -> None:
    levels = np.array([[0, 127, 254], [255, 127, 200]], np.uint8)
    data = png(levels, drawing.heat_palette())
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    chunks, position = {}, 8
    while position < len(data):
        (size,) = struct.unpack(">I", data[position : position + 4])
        name, body = data[position + 4 : position + 8], data[position + 8 : position + 8 + size]
        assert struct.unpack(">I", data[position + 8 + size : position + 12 + size])[0] == zlib.crc32(
            name + body
        )
        chunks[name], position = body, position + 12 + size
    assert struct.unpack(">II", chunks[b"IHDR"][:8]) == (3, 2)
    rows = zlib.decompress(chunks[b"IDAT"])
    assert [*rows[1:4], *rows[5:8]] == levels.flatten().tolist()
    assert chunks[b"tRNS"][127] < 32, "the median shows the ground"


def test_text_is_escaped_and_only_markup_is_not() -> None:
    assert tag("p", "<b>", Markup("<i/>"), cls='"x') == '<p class="&quot;x">&lt;b&gt;<i/></p>'
    assert sentence("late out of `data<` at 2026-01-02T03:04:05.6+00:00") == (
        "late out of <code>data&lt;</code> at "
        '<time datetime="2026-01-02T03:04:05.6+00:00" data-date="named">2026-01-02 03:04:05 UTC</time>'
    )
    assert type(tag("p", "x") + "<b>") is str, "what is joined by hand is text again"
