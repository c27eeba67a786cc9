"""Whatever the files of a session say, no command lets a terminal take it for an order."""

from __future__ import annotations

import contextlib
import json
import shutil
import sqlite3
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from measured_layers import window
from played import Played
from profiled import stored
from recorded import operation, written
from rich.text import Text

from traceml_ray import text
from traceml_ray.cli import main
from traceml_ray.signals.output.records import Output
from traceml_ray.store.session import DATABASE
from traceml_ray.terminal import top
from traceml_ray.terminal.screen import Screen

HOSTILE = "\x1b]0;title\x07\x1b[2J\x9b31m\x08\r\x7f\u202etxt\u2066\u200b\u2028\U000e0041"
"""A title, an empty screen, C1, a line written over, text that runs backwards, invisible characters."""
NAME = f"se{HOSTILE}ss"
STRUCTURE = {
    *("label", "stage", "stages", "confidence", "pattern", "kind", "status", "severity", "reason", "state"),
    *("process_id", "stream", "clock", "by", "format", "file", "word", "monitor"),
}
"""Columns, and keys of objects in them, of which a reader takes known words only."""
COMMANDS = (
    ("report",), ("report", "--json"), ("status",), ("status", "--json"), ("top", "--once"),
    ("bundles",), ("dump",), ("profile",), ("profile", "--list"), ("profile", "--table"),
    ("profile", "--json"), ("profile", "--diff", "1,0"), ("layers",), ("layers", "--json"), ("stop",),
    ("analyze",), ("analyze", "--json"), ("compare",), ("compare", "--json"),
    ("export", "--format", "csv"), ("export", "--format", "perfetto"),
)  # fmt: skip
CONTROL = {"Cc", "Cf", "Cs", "Zl", "Zp"}


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A session of two ranks, one of which has died, with a bundle, layers, output and a profile."""
    folder = tmp_path_factory.mktemp("hostile") / "sessions" / NAME
    played = Played(folder, 2, per_node=1, late=1, onset=20)
    for second in range(20):
        lines = [Output(1, played.clock(), [f"line {second}"], "open", 1)]
        played.play(5, output=lines, layers=[window({"block": (1.0, 2.0)}, number=second)])
    played.dies(1, -9, "RuntimeError: boom")
    played.end(1)
    trace = [operation("aten::mm", 20_000, 10_000), operation("aten::add", 60_000, 9_000)]
    stored(folder, "p", dict.fromkeys((0, 1), lambda path: written(path, trace)))
    return folder


def _hostile(value: Any, key: str, spares: set[str]) -> Any:
    """Every text in `value` with HOSTILE in it, but for those under the keys `spares`."""
    if key in spares or (isinstance(value, str) and value[:4].isdigit() and "T" in value):  # or a moment
        return value
    if isinstance(value, dict):
        return {name: _hostile(inside, name, spares) for name, inside in value.items()}
    if isinstance(value, list):
        return [_hostile(inside, key, spares) for inside in value]
    return value + HOSTILE if isinstance(value, str) else value


def _column(value: Any, key: str, spares: set[str]) -> Any:
    with contextlib.suppress(ValueError, TypeError):
        inside = json.loads(value)
        if isinstance(inside, (dict, list, str)):
            return json.dumps(_hostile(inside, key, spares), ensure_ascii=False)
        return value
    return _hostile(value, key, spares)


def poison(folder: Path, spares: set[str]) -> int:
    """Change every text of the session's files; return how many."""
    changed = 0
    for path in folder.rglob(DATABASE):
        with contextlib.closing(sqlite3.connect(path)) as db, db:
            for (table,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
                for column in [row[1] for row in db.execute(f"PRAGMA table_info({table})")]:
                    if column in spares or (table, column) == ("meta", "key"):
                        continue
                    rows = db.execute(f"SELECT rowid, {column} FROM {table} WHERE typeof({column}) = 'text'")
                    for row, value in rows.fetchall():
                        key = column
                        if table == "meta":
                            (key,) = db.execute("SELECT key FROM meta WHERE rowid = ?", (row,)).fetchone()
                        new = _column(value, key, spares)
                        changed += new != value
                        db.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = ?", (new, row))
    for path in folder.rglob("*.json"):
        manifest = _hostile(json.loads(path.read_bytes()), "", spares)
        path.write_text(json.dumps(manifest, ensure_ascii=False))
        changed += 1
    return changed


def controls(shown: str) -> list[str]:
    """What in a text is an order for a terminal."""
    return [f"{ord(c):#x}" for c in shown if c != "\n" and unicodedata.category(c) in CONTROL]


@pytest.mark.parametrize("spares", [STRUCTURE, {"file"}], ids=["readable", "all"])
def test_no_command_prints_a_control_character_of_a_session(
    session: Path,
    spares: set[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(top, "exit_soon", lambda _code: None)  # it ends this process, as `exit_now` does
    monkeypatch.setattr(top, "exit_now", lambda code: code)
    folder = Path(shutil.copytree(session, tmp_path / "sessions" / NAME))
    assert poison(folder, spares) > 40
    seen = 0
    for name, *options in COMMANDS:
        more = [*options, *(["--sessions", str(folder.parent)])]
        given = [str(folder), str(session)] if name == "compare" else [str(folder)]
        more += ["-o", str(tmp_path / options[1])] if name == "export" else []
        code = main([name, *given, *more])
        out, err = capfd.readouterr()
        assert not controls(out + err), (name, options, controls(out + err), ascii(out + err)[:2000])
        if spares is STRUCTURE:
            assert code == (1 if name in ("dump", "stop") or (name, *options) == ("profile",) else 0), err
        if "--json" in options and code == 0:
            json.loads(out)
        seen += text.one_line(HOSTILE)[:20] in out + err
    assert seen > (12 if spares is STRUCTURE else 3), "what it says is shown, written out"
    assert main(["sessions", "--sessions", str(folder.parent)]) == 0
    assert main(["sessions", "--sessions", str(folder.parent), "--json"]) == 0
    assert main(["report", "--sessions", str(folder.parent), HOSTILE]) == 2
    assert main(["analyze", HOSTILE]) == 2
    assert main(["compare", str(folder), HOSTILE]) == 2
    with contextlib.suppress(SystemExit):
        main(["report", f"--{HOSTILE}"])
    assert not controls("".join(capfd.readouterr()))


def test_panel_of_a_terminal_has_no_order_but_its_own() -> None:
    sent: list[str] = []
    Screen(sent.append, None).draw([Text(f"a{HOSTILE}b")])
    (frame,) = sent
    assert "a\ufffd]0;title\ufffd[2J" in frame and frame.endswith("b"), "rich leaves BEL out"
    assert not {*HOSTILE} & {*frame} & {*"\x07\x9b\x08\r\x7f\u202e\u2066\u200b\u2028\U000e0041"}


def test_json_that_is_shown_says_the_same(capfd: pytest.CaptureFixture[str]) -> None:
    text.show(json.dumps({HOSTILE: [HOSTILE, "é 漢 ≈"]}, ensure_ascii=False))
    shown = capfd.readouterr().out
    assert not controls(shown) and "é 漢 ≈" in shown
    assert json.loads(shown) == {HOSTILE: [HOSTILE, "é 漢 ≈"]}
