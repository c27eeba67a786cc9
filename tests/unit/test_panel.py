"""What the terminal shows of a session, at the sizes that windows have, and what is sent of it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from measured_layers import measured
from msgspec.structs import replace
from played import Played, look, session_of
from rich.color import ColorSystem
from rich.text import Text
from sessions import SECOND
from snapshot import Snapshot as Kept
from terminal_screen import TerminalScreen

from traceml_ray.analysis.labels import LABELS
from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.dash_app.session_pages import SessionPages
from traceml_ray.document.drawing import time_scale
from traceml_ray.reports.answers import QUESTIONS
from traceml_ray.signals.output.records import Output
from traceml_ray.signals.view import SLOW_RANKS
from traceml_ray.signals.views import PAGES
from traceml_ray.stages import SYNC_WAIT
from traceml_ray.store import query
from traceml_ray.terminal import sections
from traceml_ray.terminal.panel import line, panel
from traceml_ray.terminal.screen import Screen
from traceml_ray.terminal.snapshot import PANES, Choice, PanelState, take_snapshot
from traceml_ray.terminal.top import Control, Keys, press
from traceml_ray.views.ranks import busy_lines
from traceml_ray.views.run_state import LOADS, RunState
from traceml_ray.views.session_poll import SessionPoll
from traceml_ray.views.source import StoredSource
from traceml_ray.wire import messages as wire

SIZES = ((80, 24), (120, 40), (200, 60))
NO_FACTS = {"id": "demo", **dict.fromkeys(("world_size", "nnodes", "strategy", "restarted"))}


def followed(played: Played, seconds: int = 18) -> SessionPoll:
    poll = SessionPoll(played.source, clock=played.clock, timer=played.clock.timer)
    for _ in range(seconds):
        played.play(5)
        poll.poll()
    assert not poll.errors
    return poll


def seen(poll: SessionPoll, choice: Choice | None = None) -> PanelState:
    chosen = choice or Choice()
    return poll.make(lambda: take_snapshot(poll, poll.newest, chosen))[1]


def text(newest: PanelState, width: int, height: int, choice: Choice | None = None) -> str:
    lines = panel(newest, choice or Choice(), width, height)
    assert len(lines) == height and {line.cell_len for line in lines} == {width}
    return "\n".join(line.plain for line in lines)


@pytest.fixture
def played(tmp_path: Path) -> Played:
    """A session of 16 ranks on 4 nodes, with rank 5 late."""
    made = Played(tmp_path / "demo", 16, onset=35)
    made.memory_s = 5
    return made


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> SessionPoll:
    """The same as it stands after half a minute, for tests that only look at it."""
    return followed(Played(tmp_path_factory.mktemp("job") / "demo", 16, onset=35))


def in_state(played: Played, state: str) -> SessionPoll:
    poll = followed(played)
    if state == "stale":
        played.source.down = True
        played.clock.tick()
    if state == "hang":
        for second in range(25):
            waits = wire.OpenStage(played.step, SYNC_WAIT, (second + 1) * SECOND)
            played.play(0, silent=(5,), open=waits)
    if state == "finished":
        played.end()
    poll.poll()
    return poll


@pytest.mark.parametrize("state", ["live", "stale", "hang", "finished"])
def test_panel_at_the_sizes_of_windows(played: Played, kept: Any, state: str) -> None:
    newest = seen(in_state(played, state))
    assert newest.state == ("live" if state == "hang" else state)
    assert newest.verdict and newest.verdict.judged.label == ("hang" if state == "hang" else "straggler")
    kept(newest)


@pytest.fixture
def kept(snapshot: Kept) -> Any:
    """Compares the panel at all sizes with what is kept."""
    return lambda newest: [snapshot("top", text(newest, width, height)) for width, height in SIZES]


def test_panel_of_one_rank(tmp_path: Path, kept: Any) -> None:
    kept(seen(followed(Played(tmp_path / "demo", 1, late=None, gpus=0))))


def test_single_process_is_no_kind_of_parallel_job(tmp_path: Path) -> None:
    played = Played(tmp_path / "demo", 1, late=None)
    poll = SessionPoll(played.source, clock=played.clock, timer=played.clock.timer)
    played.play(5, strategy="single")
    poll.poll()
    assert text(seen(poll), 80, 24).startswith("┌─ TraceML  (1 rank) ─")


def test_panel_of_1024_ranks_has_the_slowest_ones(tmp_path: Path, kept: Any) -> None:
    played = Played(tmp_path / "demo", 1024, per_node=8, gpus=8, onset=10)
    newest = seen(followed(played, 8))
    small = text(newest, 80, 24)
    assert "slowest of 1,024" in small and "rank5       3" in small and "… 125 more nodes (key 2)" in small
    kept(newest)


def test_panel_has_all_that_the_design_has(job: SessionPoll) -> None:
    shown = text(seen(job), 120, 40)
    for words in (
        "TraceML — Multi-Node DDP  (4 nodes × 4 processes = 16 ranks)",
        "SESSION demo │ STEP 89 │ GLOBAL SKEW 62 % │ STRAGGLER rank 5",
        *("NODE SUMMARY", "median=", "worst=", "(rank 5)", "skew=", "← +", "vs host-"),
        *("RANK GRID", "rank0 ", "rank15", "▲", "Verdict", "Why ", "Next ", "Cost "),
        *("EXPOSED TIME", "NODE HEALTH", "CPU 50 %", "VRAM", "MEMORY", "EVENTS"),
    ):
        assert words in shown, words


def test_all_that_is_shown_is_in_the_answers_that_the_web_app_asks_for(played: Played) -> None:
    asked: dict[str, set[str]] = {"top": set(), "web": set()}
    reply, who = played.source.reply, "web"

    def noted(message: bytes) -> bytes:
        requests, watching = query.decode(message, QUESTIONS)
        assert watching, "a view keeps no session alive"
        asked[who] |= {type(request).__name__ for request in requests}
        return reply(message)

    played.source.reply = noted  # type: ignore[method-assign]
    poll = followed(played)
    pages = SessionPages(played.source, clock=played.clock, timer=played.clock.timer)
    pages.poll()
    for page in ("overview", "ranks", "memory", "events", "layers"):
        look(pages, page)
    look(pages, "rank", rank=5)
    who = "top"
    for pane in (*PANES[:-1], "layers"):
        seen(poll, Choice(pane))
        poll.poll()
    assert asked["top"] and asked["top"] <= asked["web"]


@pytest.mark.parametrize("pane", [*PANES, "help", "rank"])
@pytest.mark.parametrize("size", [(1, 1), (20, 5), (40, 10), (79, 23), (300, 100)])
def test_any_pane_fits_into_any_window(job: SessionPoll, pane: str, size: tuple[int, int]) -> None:
    choice = Choice("ranks", rank=5) if pane == "rank" else Choice(pane, scroll=3)
    shown = text(seen(job, choice), *size, choice)
    if size != (1, 1):
        assert "├─ " in shown, "something of the pane is shown, however small the window is"
        assert all(line[-1] in "┐┤│┘" for line in shown.splitlines()), "the frame is whole"
    if pane == "overview" and size == (20, 5):
        assert "Verdict" in shown


def test_pane_of_layers(played: Played, snapshot: Kept) -> None:
    poll, choice = followed(played), Choice("layers")
    none = text(seen(poll, choice), 300, 40, choice)
    assert "No layer has been measured" in none and "traceml-ray layers SESSION --steps 20" in none
    measured(played)
    poll.poll()
    for width, height in SIZES:
        snapshot("top", text(seen(poll, choice), width, height, choice))
    slowest = Choice("layers", "time", scroll=1)
    shown = text(seen(poll, slowest), 120, 20, slowest)
    assert "from 2 of 8" in shown and shown.index("blocks.1.mlp") < shown.index("head") < shown.index("qkv")
    played.end()
    stored = SessionPoll(StoredSource(played.folder), clock=played.clock, timer=played.clock.timer)
    stored.poll()
    assert seen(stored, choice).answers == seen(poll, choice).answers


def test_each_page_of_signals_is_a_pane_and_shows_what_their_views_have(played: Played) -> None:
    assert {*PAGES} <= {*PANES}
    poll = followed(played)
    choice = Choice("signals")
    shown = text(seen(poll, choice), 120, 40, choice)
    assert "[5 signals]" in shown and "THROUGHPUT" in shown and "125,033 tokens/s" in shown
    row = next(line for line in shown.splitlines() if "│ Throughput " in line)
    assert {*row} & {*"▁▂▃▄▅▆▇█"}, "a number has its line"


def test_each_signal_has_a_line_before_one_has_two() -> None:
    lines = [[Text("a1"), Text("a2"), Text("a3")], [Text("b1")], [Text("c1"), Text("c2")]]
    shown = [[line.plain for line in sections._first_lines(lines, most)] for most in range(8)]
    assert shown[:4] == [[], ["a1 …"], ["a1 …", "b1"], ["a1 …", "b1", "c1 …"]]
    assert shown[5] == ["a1", "a2 …", "b1", "c1", "c2"]
    assert shown[6] == shown[7] == ["a1", "a2", "a3", "b1", "c1", "c2"]


def test_pane_of_memory_has_the_fullest_ranks_first_where_that_was_chosen(played: Played) -> None:
    newest = seen(followed(played), Choice("memory"))
    memory = newest.answers["memory"]
    rows = [replace(row, used_bytes=row.total_bytes) if row.rank == 3 else row for row in memory.ranks]
    newest = dataclasses.replace(newest, answers={"memory": replace(memory, ranks=rows)})

    def ranks(choice: Choice) -> list[str]:
        rows = text(newest, 120, 40, choice).partition("MEMORY OF RANKS")[2].splitlines()
        return [row.split()[1] for row in rows[2:-1] if " GPU " in row]

    assert ranks(Choice("memory"))[:2] == ["0", "1"]
    by_use = Choice("memory", "time")
    assert ranks(by_use)[0] == "3" and "the worst first" in text(newest, 120, 40, by_use)


def test_last_lines_of_a_rank_that_died_stand_below_the_verdict(played: Played) -> None:
    poll = followed(played)
    lines = [Output(2, played.clock(), ["Traceback (most recent call last):", "CUDA error \x1b[31m漢"])]
    played.play(output=lines)
    played.dies(5, -9)
    poll.poll()
    newest = seen(poll)
    shown = text(newest, 80, 24)
    assert "◆ rank lost: rank 5 (host-1)" in shown and "LAST OUTPUT OF RANK 5" in shown
    assert "! CUDA error" in shown and "漢" in shown and "\x1b" not in shown
    assert "rank5  " in shown and "◆" in shown.partition("RANK GRID")[2]
    chosen = Choice("output", rank=3)
    assert "LAST OUTPUT OF RANK 3" in text(seen(poll, chosen), 80, 24, chosen)


def test_session_without_a_run_says_what_is_awaited(played: Played) -> None:
    poll = session_of(played)
    shown = text(seen(poll), 80, 24)
    assert "starting · no rank yet" in shown and "The run is starting" in shown
    assert "STRAGGLER n/a" in shown and "STEP n/a" in shown


def test_stored_session_shows_what_the_live_one_showed(played: Played) -> None:
    poll = followed(played)
    played.end()
    poll.poll()
    stored = SessionPoll(StoredSource(played.folder), clock=played.clock, timer=played.clock.timer)
    stored.poll()
    live, file = seen(poll), seen(stored)
    assert live.verdict and file.verdict
    assert (live.step, live.named, live.verdict.why) == (file.step, file.named, file.verdict.why)
    assert line(file, "12:00:00").startswith("12:00:00 ") and "rank 5 (host-1) in data" in line(file, "")


def test_stored_session_shows_the_steps_in_which_a_rank_was_late(played: Played) -> None:
    played.memory_s = 60
    followed(played)  # late from step 35 to 89
    played.late = None
    for _ in range(60):
        played.play(5)
    played.end()
    poll = SessionPoll(StoredSource(played.folder), clock=played.clock, timer=played.clock.timer)
    poll.poll()
    newest = seen(poll)
    shown = text(newest, 120, 40)
    first, last = newest.steps or (0, 0)
    assert 30 <= first <= 40 and 85 <= last <= 95
    assert newest.verdict and newest.verdict.judged.label == "straggler"
    assert "GLOBAL SKEW 62 %" in shown and f"NODE SUMMARY, steps {first}–{last}" in shown
    assert "rank5     31" in shown and f"Since step {first}" in shown and "so far" not in shown
    report = " ".join((played.folder / "report.txt").read_text().split())
    assert f"(of all steps; the named cause was in steps {first}–{last})" in report
    ranks = seen(poll, Choice("ranks"))
    (late,) = [row for row in ranks.rows if row["rank"] == 5]
    assert late["over"] == pytest.approx(1.62, abs=0.05) and late["stages"]["data"] > 12


def test_pane_of_ranks_is_in_the_order_that_was_chosen(job: SessionPoll) -> None:
    def column(choice: Choice, number: int, height: int = 40) -> list[float]:
        rows = [row.split() for row in text(seen(job, choice), 120, height, choice).splitlines()]
        return [float(row[number]) for row in rows if "running" in row]

    by_rank, by_time = Choice("ranks"), Choice("ranks", "time")
    assert column(by_rank, 1) == [rank for rank in range(16) if rank != 5]
    busy = column(by_time, -10)
    assert len(busy) == 15 and busy == sorted(busy, reverse=True)
    assert column(Choice("ranks", scroll=4), 1, 20)[0] == 3  # the named one is above them


def test_line_by_step_shows_who_became_slower_and_when(job: SessionPoll) -> None:
    for width in (80, 120):
        choice = Choice("ranks")
        rows = text(seen(job, choice), width, 40, choice).partition("÷ med")[2].splitlines()[1:17]
        lines = {row.split()[1]: {*row} & {*"▁▂▃▄▅▆▇█"} for row in rows if "▲" not in row}
        late = next(row for row in rows if "▲ 5" in row)
        assert "▁▇██████" in late, "step 35 is the tenth of the newest 64"
        assert len(lines) == 15 and {*map(tuple, lines.values())} == {("▁",)}, "noise is drawn flat"


@pytest.mark.parametrize("width", [60, 79, 80, 100, 120, 200])
def test_head_has_the_time_of_the_newest_steps_where_there_is_room(job: SessionPoll, width: int) -> None:
    head = text(seen(job), width, 24).splitlines()[1]
    assert "SESSION demo" in head and "STEP 89" in head
    assert ("▁▇██████" in head) == (width in (79, 80)) and ("STEP TIME 32.7 ms ▁" in head) == (width > 80)
    assert "…" not in head or width < 79


def test_pane_of_nodes_has_their_load_now_and_before_and_what_the_verdict_costs(played: Played) -> None:
    poll, choice = followed(played), Choice("nodes")
    shown = text(seen(poll, choice), 160, 24, choice)
    assert all(name in shown for name in ("costs", "CPU past", "RAM past", "GPU past", "°C past"))
    late = next(row for row in shown.splitlines() if "▲ host-1" in row)
    assert "36 %" in late and "50 %  ▅▅▅▅▅▅▅▅" in late, "half of the scale, which is that of all it can be"
    assert "CPU past" in text(seen(poll, choice), 80, 24, choice)
    small = text(seen(poll, choice), 20, 5, choice)
    assert "NODES" in small and "▲ host-1" in small and "VERDICT" not in small, "what was chosen"


def test_nothing_is_said_of_gpus_where_there_are_none_and_of_a_node_alone_that_it_is_slower(
    tmp_path: Path,
) -> None:
    poll = followed(Played(tmp_path / "demo", 4, late=None, gpus=0), 5)
    pane = text(seen(poll, Choice("nodes")), 160, 24, Choice("nodes"))
    table = pane.partition("├─ NODES")[2]
    assert "CPU past" in table and not any(word in table for word in ("GPU", "VRAM", "°C", "slower", "n/a"))
    overview = text(seen(poll), 120, 40)
    assert "host-0  CPU 40 %  RAM 39 %  " in overview and "°C" not in overview


def test_verdict_has_the_lines_that_a_pane_leaves(job: SessionPoll) -> None:
    choice = Choice("memory")
    low, high = (text(seen(job, choice), 80, height, choice) for height in (24, 60))
    assert "Cost" not in low and "MEMORY OF RANKS" in low
    assert "Cost" in high and "Since step 35" in high and "   15  " in high


def test_monitor_that_starts_has_no_coverage_to_show() -> None:
    shown = text(PanelState("starting", "starting", "The monitor starts.", "", facts=NO_FACTS), 80, 24)
    assert " starting ─┤" in shown


def test_loads_of_nodes_are_those_that_polls_bring_after_a_few_at_first(played: Played) -> None:
    def loads(poll: SessionPoll) -> dict[str, list[int]]:
        run = poll.newest
        assert run is not None
        return {node: [load.t_ns for load in newest] for node, newest in run.loads.items()}

    played.memory_s = 60
    before = followed(played, 30)
    poll = session_of(played)
    first = loads(poll)
    assert {*map(len, first.values())} == {24} and len(first) == 4
    assert all(times == sorted(times) and times == loads(before)[node][-24:] for node, times in first.items())
    poll.poll()
    assert loads(poll) == first, "what is known already adds nothing"
    played.play(5)
    poll.poll()
    assert {*map(len, loads(poll).values())} == {25}
    (asked,) = [q for q in poll.newest.questions(0.0) if isinstance(q, query.GetNodeSamples)]  # type: ignore[union-attr]
    assert asked.last == 1, "a tick asks for the newest one alone"
    for _ in range(LOADS):
        played.play(1, judge=False)
        poll.poll()
    assert {*map(len, loads(poll).values())} == {LOADS}


def test_history_of_a_large_job_comes_with_its_polls_alone() -> None:
    run = RunState("run", Thresholds())
    for now, ranks, last in ((0.0, SLOW_RANKS - 1, 24), (100.0, SLOW_RANKS, 1)):
        run.ranks = dict.fromkeys(range(ranks))  # type: ignore[arg-type]
        (asked,) = [q for q in run.questions(now) if isinstance(q, query.GetNodeSamples)]
        assert asked.last == last


def test_line_of_a_large_job_is_left_out_where_its_lines_are_nodes() -> None:
    columns = SimpleNamespace(by="node", z=np.zeros((2, 8), np.uint8), ranks=[0, 8])
    assert busy_lines(columns, 8) is None and busy_lines(None, 8) is None  # type: ignore[arg-type]
    line = busy_lines(SimpleNamespace(by="rank", z=np.array([[127, 255, 254]]), ranks=[3]), 2)  # type: ignore[arg-type]
    assert line is not None and line(3) == [None, pytest.approx(4.0)] and line(0) == []


def test_scale_of_times_keeps_noise_flat_and_one_spike_off_the_scale() -> None:
    assert time_scale(np.array([20.0, 20.3, np.nan])) == (20.0, 25.0)
    low, high = time_scale(np.array([10.0] * 98 + [20.0] + [900.0])) or (0, 0)
    assert low == 10.0 and high < 40.0
    assert time_scale(np.array([np.nan])) is None


def test_keys_are_read_whatever_the_pieces_in_which_they_come() -> None:
    typed = b"1q\x1b[A\x1bOB\x1b[6~\t\x1b[Z\r\x7f \x1b"
    names = ["1", "q", "up", "down", "page_down", "tab", "back_tab", "enter", "backspace", "space", "escape"]
    assert Keys().feed(typed) == names
    keys = Keys()
    assert [*keys.feed(b"\x1b["), *keys.feed(b"5"), *keys.feed(b"~r")] == ["page_up", "r"]


@given(st.binary(max_size=200))
def test_no_bytes_break_the_keys(data: bytes) -> None:
    control, keys = Control(), Keys()
    for key in [*keys.feed(data), *keys.feed(data[::-1])]:
        control = press(control, key, 20)
    assert control.choice.pane in (*PANES, "help") and control.choice.scroll >= 0


def _pressed(*keys: str) -> Control:
    control = Control()
    for key in keys:
        control = press(control, key, 20)
    return control


def test_keys_choose_panes_order_and_rank() -> None:
    assert _pressed("3").choice.pane == "ranks" and _pressed("tab", "tab").choice.pane == "ranks"
    assert _pressed("back_tab").choice.pane == PANES[-1] and _pressed("0").choice == Choice()
    assert _pressed("s").choice.sort == "time" and _pressed("s", "s").choice.sort == "rank"
    assert _pressed("r", "1", "2", "enter").choice.rank == 12
    assert _pressed("r", "1", "2", "backspace", "enter").choice.rank == 1
    assert _pressed("r", "1", "enter", "escape").choice.rank is None
    assert _pressed("r", "q").quit is False and _pressed("q").quit
    assert _pressed("p").paused and not _pressed("p", "space").paused
    assert _pressed("?", "?").choice == Choice() and _pressed("?", "escape").choice.pane == "overview"
    assert _pressed("down", "down", "up").choice.scroll == 1 and _pressed("page_down").choice.scroll == 20


_LINES = st.lists(
    st.lists(
        st.tuples(st.sampled_from(["a", "b", " ", "─", "漢", "é", "é"]), st.sampled_from(["", "red"])),
        min_size=12,
        max_size=12,
    ),
    min_size=3,
    max_size=3,
)


@given(st.lists(_LINES, min_size=1, max_size=4), st.sampled_from([None, ColorSystem.STANDARD]))
def test_screen_shows_each_frame_whatever_was_there(frames: list[Any], colours: ColorSystem | None) -> None:
    seen = TerminalScreen(10, 3)
    seen.modes.discard("7")
    screen = Screen(seen.feed, colours)
    for frame in frames:
        lines = [Text.assemble(*row) for row in frame]
        for row in lines:
            row.truncate(10, pad=True)
        screen.draw(lines)
        assert seen.lines == [row.plain.rstrip() for row in lines]


def test_what_has_not_changed_is_not_sent(played: Played) -> None:
    poll, sent = followed(played), list[int]()
    screen = Screen(lambda text: sent.append(len(text.encode())), ColorSystem.STANDARD)
    for _ in range(10):
        played.play(5)
        poll.poll()
        screen.draw(panel(seen(poll), Choice(), 80, 24))
    screen.draw(panel(seen(poll), Choice(), 80, 24))
    assert len(sent) == 10, "nothing is sent where nothing is new"
    assert sent[0] > 2000 and max(sent[1:]) < 1000


def test_no_colour_is_sent_where_none_is_wanted(job: SessionPoll) -> None:
    sent: list[str] = []
    screen = Screen(sent.append, None, plain=True)
    screen.draw(panel(seen(job), Choice(), 80, 24))
    assert "\x1b[0;1m" in sent[0] and "\x1b[0;3" not in sent[0] and "\x1b[0;1;3" not in sent[0]
    assert sent[0].isascii()


def test_pane_of_health_has_the_rows_and_errors_that_next_sends_there_for(tmp_path: Path) -> None:
    played = Played(tmp_path / "demo", late=None)
    poll = SessionPoll(played.source, clock=played.clock)
    for second in range(5):
        played.play(5, lost=(2,) if second == 2 else (), errors={"sampler": 3})
    poll.poll()
    shown = text(seen(poll, Choice("health")), 100, 40, Choice("health"))
    rows = [row.strip("│ ").split() for row in shown.splitlines()]
    assert "HEALTH OF THE MONITOR" in shown and "[9 health]" in shown
    assert ["all", "200", "195", "5", "0"] in rows
    assert ["3", "rank", "0,", "sampler"] in rows and ["host-1", "alive", "0", "s", "4"] in [
        row[:5] for row in rows
    ]
    assert "`top`" in LABELS["telemetry_limited"].next and "health" in PANES
