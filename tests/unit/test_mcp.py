"""What a coding agent is answered: the same as Python, of bounded size, and errors that say what to do."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import msgspec
import numpy as np
import pytest
from mcp import Client, StdioServerParameters
from mcp.types import CallToolResult, TextContent, Tool
from played import Played, played_to_end

import traceml_ray
from traceml_ray import to_builtins
from traceml_ray.cli import main
from traceml_ray.mcp.bounded import LIMIT, Row, as_text, cut_text
from traceml_ray.mcp.server import make_server
from traceml_ray.mcp.sessions import Sessions
from traceml_ray.reports import comparison, overlay
from traceml_ray.settings import Settings
from traceml_ray.signals.logged.records import LoggedValues
from traceml_ray.signals.output.records import Output
from traceml_ray.store.session import prepare
from traceml_ray.wire import messages as wire

ASKS_A_JOB = {"profile", "dump_stacks"}
Ask = Callable[..., Any]


class Logging(Played):
    """A played session whose ranks log a loss and print a line, and whose rank 0 notes what it does."""

    def of_rank(self, rank: int) -> dict[str, Any]:
        first, last = self.step, self.step + 4
        loss = 1.0 / (1 + self.step + rank)
        note = [wire.Event("note", self.clock(), self.step, 3, f"at step {self.step}")]
        return {
            "logged": [LoggedValues("loss", first, last, 5, loss, loss, last=loss)],
            "output": [Output(1, self.clock(), [f"step {self.step} of rank {rank}"])],
            "events": note if rank == 0 else [],
        }


def played(folder: Path, world: int = 8, seconds: int = 30, **given: Any) -> Played:
    job = Logging(folder, world, **given)
    for _ in range(seconds):
        job.play()
    return job


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a running session of 8 ranks, rank 5 late, and two that are over."""
    out = tmp_path_factory.mktemp("out")
    played_to_end(out / "before")
    played_to_end(out / "after", late=2)
    folder = prepare(out, "demo")
    job = played(folder.path)
    yield out
    job.aggregator.close()
    folder.release()


async def _call(server: Any, tool: str, arguments: dict[str, Any]) -> CallToolResult:
    async with Client(server) as client:
        return await client.call_tool(tool, arguments)


def called(out: Path, tool: str, **arguments: Any) -> CallToolResult:
    """Call a tool of a server in this process."""
    sessions = Sessions(str(out))
    try:
        return anyio.run(_call, make_server(sessions), tool, arguments)
    finally:
        sessions.close()


def text_of(result: CallToolResult) -> str:
    (content,) = result.content
    assert isinstance(content, TextContent)
    return content.text


def answer(out: Path, tool: str, **arguments: Any) -> Any:
    """Return the JSON that a tool answers."""
    result = called(out, tool, **arguments)
    assert not result.is_error, text_of(result)
    return json.loads(text_of(result))


def refusal(out: Path, tool: str, **arguments: Any) -> str:
    """Return the sentence with which a tool refuses."""
    result = called(out, tool, **arguments)
    assert result.is_error
    return text_of(result)


def plain(value: Any) -> Any:
    """Return an answer of Python as JSON has it."""
    return json.loads(json.dumps(to_builtins(value)))


def without(fields: dict[str, Any], *beginnings: str) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if not name.startswith(beginnings)}


CHARTS = "first", "last", "line", "lowest", "highest"
SAME: dict[str, tuple[dict[str, Any], Callable[[Any], Any]]] = {
    "get_verdict": ({}, lambda session: session.verdict()),
    "get_findings": (
        {},
        lambda session: [{"headline": one.headline, **plain(one)} for one in session.findings()],
    ),
    "get_status": (
        {},
        lambda session: {
            "folder": str(session.folder),
            "live": session.is_live,
            "status": session.status(),
            "runs": session.runs(),
        },
    ),
    "get_throughput": ({}, lambda session: without(plain(session.throughput()), "line_")),
    "get_goodput": ({}, lambda session: session.goodput()),
    "get_memory": ({}, lambda session: session.memory()),
    "get_layers": ({}, lambda session: session.layers()),
    "get_logged": ({}, lambda session: [without(plain(one), *CHARTS) for one in session.logged()]),
    "get_events": ({"most": 5}, lambda session: session.events(most=5)[::-1]),
    "list_profiles": ({}, lambda session: session.profiles()),
}
"""Tools that answer exactly what one method answers."""


@pytest.mark.parametrize("tool", SAME)
@pytest.mark.parametrize("name", ["demo", "before"])
def test_a_tool_answers_what_python_answers(out: Path, tool: str, name: str) -> None:
    arguments, ask = SAME[tool]
    with traceml_ray.open(name, out=out) as session:
        expected = plain(ask(session))
    assert answer(out, tool, session=name, **{"most": 100, **arguments}) == expected
    assert expected or tool in ("get_findings", "get_logged", "get_events", "list_profiles")


def test_verdict_names_the_rank_and_its_findings_have_evidence(out: Path) -> None:
    verdict = answer(out, "get_verdict", session="demo")
    assert (verdict["label"], verdict["rank"], verdict["stage"]) == ("straggler", 5, "data")
    first = answer(out, "get_findings", session="demo")[0]
    assert first["headline"] == "straggler: rank 5 (host-1) in data"
    assert first["cost"] > 0.1 and first["evidence"]["excess_pct"] > 0 and first["next"]


def test_ranks_are_those_of_python_the_slowest_first(out: Path) -> None:
    rows = answer(out, "get_ranks", session="demo")
    with traceml_ray.open("demo", out=out) as session:
        infos, summary = plain(session.ranks()), plain(session.summary())
    assert rows[0]["rank"] == 5 and len(rows) == 8
    for row in rows:
        rank = str(row["rank"])
        assert row["identity"] == infos[row["rank"]]
        assert row["state"] == summary["ranks"][rank]
        assert row["busy_median_ms"] == summary["steps"]["per_rank_median_ms"][rank]
        assert row["memory"] == summary["memory"]["per_rank"][rank]
    some = answer(out, "get_ranks", session="demo", ranks="4,5-6")
    assert some[0]["rank"] == 5 and {row["rank"] for row in some} == {4, 5, 6}
    assert "none of this run: ranks are 0-7" in refusal(out, "get_ranks", session="demo", ranks="9")


def test_nodes_and_stages_are_those_of_python(out: Path) -> None:
    nodes = answer(out, "get_nodes", session="demo")
    stages = answer(out, "get_stages", session="demo")
    with traceml_ray.open("demo", out=out) as session:
        known, summary = plain(session.nodes()), plain(session.summary())
    assert [row["node"] for row in nodes] == ["host-1", "host-0"], "rank 5 is on host-1"
    assert [row["state"] for row in nodes] == [known[1], known[0]]
    per_node = summary["steps"]["per_node_median_ms"]
    assert [row["busy_median_ms"] for row in nodes] == [per_node["host-1"], per_node["host-0"]]
    assert nodes[0]["samples"] in summary["system"]["nodes"]
    assert stages["stages"] == summary["stages"] and stages["spans"] == summary["spans"]
    assert stages["steps"] == without(summary["steps"], "per_rank_", "per_node_")


def test_steps_are_rows_of_python_and_too_many_are_refused(out: Path) -> None:
    part = answer(out, "get_steps", session="demo", first=100, last=101, ranks="4-5")
    with traceml_ray.open("demo", out=out) as session:
        table = session.steps(100, 101, ranks="4-5")
    assert part["columns"] == table.columns
    assert [row[part["columns"].index("data_ns")] for row in part["rows"]] == table.data_ns.tolist()
    assert len(part["rows"]) == 4
    assert "choose steps with first=" in refusal(out, "get_steps", session="demo", first=0, last=100)


def test_one_logged_number_has_its_course(out: Path) -> None:
    loss = answer(out, "get_logged", session="demo", name="loss")
    with traceml_ray.open("demo", out=out) as session:
        (expected,) = session.logged()
    assert loss == plain(expected) and len(loss["line"]) > 10
    assert "no logged number 'lr'; there: loss" in refusal(out, "get_logged", session="demo", name="lr")


def test_comparison_and_table_are_those_of_python(out: Path) -> None:
    two = answer(out, "compare_sessions", sessions=["before", "after"], most=100)
    assert two == plain(traceml_ray.compare("before", "after", out=out))
    assert two["word"] == "worse" and two["stage"] == "data"
    three = answer(out, "compare_sessions", sessions=["before", "after", "demo"], most=100)
    names = ["before", "after", "demo"]
    settings = Settings.load(out=str(out))
    sides = overlay.stored_runs(comparison.ask_side, names, [None] * 3, settings)
    assert three == plain(overlay.table_of(sides))


def test_report_is_the_text_of_the_command(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "before", "--sessions", str(out)]) == 0
    assert text_of(called(out, "get_report", session="before")) == capsys.readouterr().out


def test_output_is_the_lines_of_a_rank(out: Path) -> None:
    with traceml_ray.open("demo", out=out) as session:
        output = session.output(3)
    shown = text_of(called(out, "get_output", session="demo", rank=3))
    assert shown.splitlines() == [f"{line.stream}: {line.text}" for line in output.lines]
    assert shown.endswith("stdout: step 145 of rank 3")
    assert text_of(called(out, "get_output", session="before", rank=1)) == "Rank 1 has printed nothing."


def test_list_names_every_session_and_counts_the_rest(out: Path) -> None:
    everything = answer(out, "list_sessions")
    assert {one["name"] for one in everything["sessions"]} == {"demo", "before", "after"}
    assert everything["folder"] == str(out)
    assert answer(out, "list_sessions", most=1)["sessions"][1] == "… 2 more"


class TestRefusals:
    def test_an_unknown_name_lists_those_that_there_are(self, out: Path) -> None:
        for tool in ("get_verdict", "get_report", "profile", "dump_stacks", "get_profile"):
            why = refusal(out, tool, session="nobody")
            assert "no session 'nobody'" in why
            assert all(name in why for name in ("demo", "before", "after")), why

    def test_an_empty_or_missing_folder_says_so(self, tmp_path: Path) -> None:
        assert answer(tmp_path, "list_sessions")["sessions"] == []
        assert f"no session under {tmp_path}" in refusal(tmp_path, "get_verdict")
        missing = refusal(tmp_path / "nowhere", "list_sessions")
        assert "nowhere" in missing and "no such file" in missing

    def test_a_broken_file_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "broken").mkdir()
        (tmp_path / "broken" / "session.sqlite").write_bytes(b"x" * 5000)
        assert "broken/session.sqlite: cannot use the session file" in refusal(tmp_path, "get_verdict")
        assert answer(tmp_path, "list_sessions")["sessions"][0]["name"] == "broken"

    def test_an_unknown_run_lists_those_that_there_are(self, out: Path) -> None:
        assert "there is no run 'other'" in refusal(out, "get_findings", session="demo", run="other")

    def test_a_session_that_starts_says_so(self, tmp_path: Path) -> None:
        starting = prepare(tmp_path, "new")
        try:
            assert "session 'new' has no steps yet" in refusal(tmp_path, "get_verdict")
            assert answer(tmp_path, "list_sessions")["sessions"][0]["status"] == "starting"
        finally:
            starting.release()

    def test_a_session_without_a_verdict_says_what_to_do(self, tmp_path: Path) -> None:
        folder = prepare(tmp_path, "young")
        job = Logging(folder.path, 2, late=None)
        job.play(1, judge=False)
        try:
            assert "no verdict yet" in text_of(called(tmp_path, "get_verdict"))
        finally:
            job.aggregator.close()
            folder.release()

    def test_what_needs_a_running_job_says_that_it_has_ended(self, out: Path) -> None:
        for tool in ASKS_A_JOB:
            assert "is not live: it has ended" in refusal(out, tool, session="before")
        why = refusal(out, "get_profile", session="before")
        assert "has no profile" in why and "`profile` records one" in why

    def test_wrong_arguments_are_named(self, out: Path) -> None:
        assert "most" in refusal(out, "get_ranks", most=100_000)
        assert "ranks" in refusal(out, "profile", session="before", ranks="all of them")
        assert "at most 8 are compared" in refusal(out, "compare_sessions", sessions=["demo"] * 9)
        assert "Unknown tool" in refusal(out, "remove_session")


@pytest.fixture(scope="module")
def huge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a session of 1,024 ranks on 128 nodes."""
    out = tmp_path_factory.mktemp("huge")
    job = Logging(out / "big", 1024, per_node=8, gpus=8, onset=10)
    for second in range(8):
        job.play(judge=second == 7)
    yield out
    job.aggregator.close()


READING = (
    *("list_sessions", "get_verdict", "get_findings", "get_status", "get_stages", "get_ranks", "get_nodes"),
    *(
        "get_throughput",
        "get_goodput",
        "get_memory",
        "get_layers",
        "get_logged",
        "get_events",
        "get_report",
        "list_profiles",
    ),
)


def test_answers_about_1024_ranks_are_small_even_if_much_is_asked_for(huge: Path) -> None:
    sessions = Sessions(str(huge))

    async def answers() -> dict[str, str]:
        async with Client(make_server(sessions)) as client:
            texts = {}
            for tool in READING:
                result = await client.call_tool(tool, {} if tool == "get_report" else {"most": 100})
                assert not result.is_error, text_of(result)
                texts[tool] = text_of(result)
            return texts

    texts = anyio.run(answers)
    sessions.close()
    sizes = {tool: len(text) for tool, text in texts.items()}
    assert {tool for tool, size in sizes.items() if size > LIMIT + 100} == set(), sizes
    rows = json.loads(texts["get_ranks"])
    assert rows[0]["rank"] == 5 and rows[-1] == f"… {1024 - len(rows) + 1:,} more"
    assert len(rows) > 10
    nodes = json.loads(texts["get_nodes"])
    assert nodes[0]["busy_median_ms"] >= nodes[1]["busy_median_ms"]
    assert nodes[-1] == f"… {128 - len(nodes) + 1} more"


def test_a_session_is_read_and_not_changed(out: Path) -> None:
    def digests() -> dict[str, str]:
        files = [
            path for path in (out / "demo").rglob("*") if path.is_file() and path.suffix != ".sqlite-shm"
        ]
        return {
            path.name: hashlib.sha256(path.read_bytes()).hexdigest()
            for path in files
            if not path.name.endswith("-shm")
        }

    before = digests()
    for tool in READING:
        called(out, tool, session="demo") if tool != "list_sessions" else called(out, tool)
    assert digests() == before


def test_a_running_session_is_followed_and_a_new_one_of_its_name_is_another(tmp_path: Path) -> None:
    job = played(tmp_path / "s", 2, seconds=4, late=None)
    sessions = Sessions(str(tmp_path))

    def rows() -> int:
        with sessions.opened("s") as session:
            return len(session.steps())

    assert rows() == 2 * 20
    with sessions.opened("s") as first:
        pass
    job.play()
    assert rows() == 2 * 25
    with sessions.opened(None) as second:
        assert first is second, "it goes on reading"
    job.aggregator.close()
    shutil.move(tmp_path / "s", tmp_path / "old")
    played(tmp_path / "s", 2, seconds=1, late=None).aggregator.close()
    assert rows() == 2 * 5
    sessions.close()


def _tools(read_only: bool) -> list[Tool]:
    async def listed() -> list[Tool]:
        async with Client(make_server(Sessions(None), read_only=read_only)) as client:
            return (await client.list_tools()).tools

    return anyio.run(listed)


def test_only_two_tools_ask_a_job_for_something_and_can_be_left_out() -> None:
    tools = {tool.name: tool for tool in _tools(read_only=False)}
    hints = {name: tool.annotations for name, tool in tools.items()}
    assert {name for name, hint in hints.items() if hint is None or not hint.read_only_hint} == ASKS_A_JOB
    assert not any(hints[name].destructive_hint for name in ASKS_A_JOB)  # type: ignore[union-attr]
    assert {tool.name for tool in _tools(read_only=True)} == {*tools} - ASKS_A_JOB
    for name, tool in tools.items():
        assert tool.description and tool.description.endswith("."), name
        assert len(tool.description) < 500, name
        parameters = tool.input_schema["properties"]
        assert all(about.get("description") for about in parameters.values()), name


def test_a_real_process_speaks_the_protocol_and_nothing_else(out: Path) -> None:
    command = StdioServerParameters(
        command=sys.executable, args=["-m", "traceml_ray.cli", "mcp"], env={"TRACEML_OUT": str(out)}
    )

    async def ask() -> tuple[str, list[str], CallToolResult, CallToolResult]:
        async with Client(command, read_timeout_seconds=120) as client:
            name = client.server_info.name
            tools = [tool.name for tool in (await client.list_tools()).tools]
            verdict = await client.call_tool("get_verdict", {"session": "demo"})
            return name, tools, verdict, await client.call_tool("get_verdict", {"session": "nobody"})

    name, tools, verdict, unknown = anyio.run(ask)
    assert name == "traceml-ray" and {*READING, *ASKS_A_JOB} <= {*tools}
    assert json.loads(text_of(verdict))["rank"] == 5
    assert unknown.is_error and "sessions there: " in text_of(unknown)


def test_the_server_needs_neither_torch_nor_ray() -> None:
    code = "import sys, traceml_ray.mcp.server; sys.exit(bool({'torch', 'ray'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], timeout=240, check=False).returncode == 0


@pytest.mark.parametrize("name", ["mcp", "mcp.server.mcpserver"])
def test_a_missing_or_old_package_is_an_error_that_says_what_to_install(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded = [module for module in sys.modules if module.startswith(f"{name}.")]
    for module in ("traceml_ray.mcp.server", *loaded):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, name, None)
    assert main(["mcp"]) == 1
    printed = capsys.readouterr()
    assert "pip install 'traceml-ray[mcp]'" in printed.err and printed.err.count("\n") == 1
    assert printed.out == ""


class Numbers(msgspec.Struct):
    name: str
    values: Any


class TestBounded:
    def test_what_fits_is_whole(self) -> None:
        value = Numbers("loss", np.arange(3.0))
        assert json.loads(as_text([value], 3)) == [{"name": "loss", "values": [0.0, 1.0, 2.0]}]

    def test_lists_and_maps_are_cut_and_counted_fields_are_not(self) -> None:
        value = Row({f"field {n}": n for n in range(60)}, of_rank={n: n for n in range(1024)})
        value["list"] = [*range(1_500)]
        shown = json.loads(as_text(value, 10))
        assert shown["list"] == [*range(10), "… 1,490 more"]
        assert shown["of_rank"]["…"] == "… 984 more" and len(shown["of_rank"]) == 41
        assert shown["field 59"] == 59

    def test_a_large_answer_keeps_as_many_as_fit(self) -> None:
        rows = [Numbers("x" * 3_000, [*range(20)]) for _ in range(50)]
        text = as_text(rows, 50)
        assert LIMIT / 4 < len(text) <= LIMIT
        shown = json.loads(text)
        assert shown[-1] == f"… {51 - len(shown)} more" and "more characters" in shown[0]["name"]

    def test_what_cannot_be_made_small_enough_is_cut(self) -> None:
        wide = Row({f"field {n}": "x" * 300 for n in range(1_000)})
        assert len(as_text(wide, 10)) < LIMIT + 100

    def test_text_is_cut_at_the_end_of_a_line(self) -> None:
        text = "".join(f"line {n}\n" for n in range(100))
        assert cut_text(text, 10_000) == text
        assert cut_text(text, 100).splitlines()[-2:] == ["line 12", "… 696 more characters"]
