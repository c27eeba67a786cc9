"""A stored session in Python: what it is opened by, what it answers, its tables, its plots and its HTML."""

from __future__ import annotations

import builtins
import hashlib
import json
import re
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from played import HOST, Played

import traceml_ray
from traceml_ray.interactive.html import scoped
from traceml_ray.interactive.plots import PLOTS
from traceml_ray.stages import DATA, STAGES
from traceml_ray.store import query
from traceml_ray.store.session import SessionError


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Played:
    played = Played(tmp_path_factory.mktemp("out") / "demo", world=8)
    played.play(300)
    return played


@pytest.fixture
def session(played: Played) -> Any:
    with traceml_ray.open(played.folder) as session:
        yield session


class TestOpen:
    def test_a_name_a_folder_and_a_file_are_the_same_session(self, played: Played) -> None:
        out = played.folder.parent
        for name in ("demo", played.folder, played.folder / "session.sqlite", None):
            with traceml_ray.open(name, out=out) as session:
                assert (session.id, session.folder) == ("demo", played.folder)

    def test_a_bundle_is_a_session(self, played: Played) -> None:
        bundle = played.folder / "bundles" / "20261127-100000-hang"
        bundle.mkdir(parents=True)
        with (
            sqlite3.connect(bundle / "session.sqlite") as copy,
            sqlite3.connect(played.folder / "session.sqlite") as source,
        ):
            source.backup(copy)
        with traceml_ray.open(bundle) as session:
            assert session.id == "demo/bundles/20261127-100000-hang"
            assert len(session.steps()) == 8 * 300
        shutil.rmtree(bundle.parent)

    def test_what_is_no_session_is_an_error_that_says_so(self, tmp_path: Path, played: Played) -> None:
        (tmp_path / "session.sqlite").write_bytes(b"no database" * 1000)
        with pytest.raises(SessionError, match="not a database"):
            traceml_ray.open(tmp_path)
        with pytest.raises(SessionError, match=r"no session 'nothing'.*demo"):
            traceml_ray.open("nothing", out=played.folder.parent)
        with pytest.raises(SessionError, match=r"a folder of sessions.*demo"):
            traceml_ray.open(played.folder.parent)

    def test_two_sessions_of_a_name_are_an_error(
        self, tmp_path: Path, played: Played, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "demo").mkdir()
        shutil.copy(played.folder / "session.sqlite", tmp_path / "demo")
        monkeypatch.chdir(tmp_path)
        with pytest.raises(SessionError, match="two sessions are called 'demo'"):
            traceml_ray.open("demo", out=played.folder.parent)

    def test_another_version_is_an_error_that_names_it(self, tmp_path: Path, played: Played) -> None:
        with (
            sqlite3.connect(tmp_path / "session.sqlite") as copy,
            sqlite3.connect(played.folder / "session.sqlite") as source,
        ):
            source.backup(copy)
            copy.execute("PRAGMA user_version=99")
        with pytest.raises(SessionError, match=r"written by a newer traceml-ray.*99.*upgrade"):
            traceml_ray.open(tmp_path)

    def test_a_closed_session_says_that_it_is(self, played: Played) -> None:
        with traceml_ray.open(played.folder) as session:
            pass
        with pytest.raises(SessionError, match="is closed"):
            session.verdict()

    def test_nothing_is_written_and_a_writer_is_not_held_up(self, tmp_path: Path) -> None:
        played = Played(tmp_path / "demo", world=4, late=None)
        played.play(50)
        with traceml_ray.open(played.folder) as session:
            before = _files(played.folder)
            for ask in (session.verdict, session.findings, session.memory, session.summary, session.events):
                ask()
            assert len(session.steps()) == 4 * 50
            assert _files(played.folder) == before
            played.play(10)
            assert len(session.steps()) == 4 * 60


def _files(folder: Path) -> dict[str, str]:
    """Digests of the files, without the memory that SQLite's readers and writers share."""
    files = [path for path in folder.rglob("*") if path.is_file() and not path.name.endswith("-shm")]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


class TestQuestions:
    def test_live_and_stored_answer_alike(self, played: Played, session: Any) -> None:
        live = query.ask_one(played.source.reply, query.GetVerdict())
        assert live is not None
        stored = session.verdict()
        assert (stored.label, stored.rank, stored.stage) == (live.label, live.rank, live.stage)
        assert stored.label == "straggler"
        assert [info.global_rank for info in session.ranks()] == [*range(8)]
        assert session.status().ranks == 8
        json.dumps(traceml_ray.to_builtins(session.ranks()))
        json.dumps(traceml_ray.to_builtins(session.findings()))

    def test_a_run_that_is_not_there_is_an_error_of_the_session(self, session: Any) -> None:
        with pytest.raises(SessionError, match="session 'demo': there is no run 'other'"):
            session.verdict("other")


class TestSteps:
    def test_rows_are_those_of_each_step_and_rank(self, session: Any) -> None:
        steps = session.steps()
        assert len(steps) == 8 * 300
        assert steps.step.tolist()[:9] == [0] * 8 + [1]
        assert steps.rank.tolist()[:9] == [*range(8), 0]
        late = (steps.rank == 5) & (steps.step >= 100)
        assert np.median(steps.data_ns[late]) - np.median(steps.data_ns[~late]) > 10_000_000
        assert (steps.total_ns == sum(getattr(steps, f"{stage}_ns") for stage in STAGES)).all()

    def test_filters(self, session: Any) -> None:
        steps = session.steps(10, 19, ranks="0,5-6")
        assert (steps.step.min(), steps.step.max(), {*steps.rank.tolist()}) == (10, 19, {0, 5, 6})
        assert len(steps) == 30
        assert {*session.steps(ranks=3).rank.tolist()} == {3}
        with pytest.raises(ValueError, match="no rank 8: ranks are 0-7"):
            session.steps(ranks=[0, 8])
        with pytest.raises(ValueError, match="first <= last"):
            session.steps(9, 3)

    def test_too_many_rows_are_an_error_that_names_the_filters(self, session: Any) -> None:
        with pytest.raises(ValueError, match=r"more than most=1,000 rows.*125 steps of 8 ranks.*iter_steps"):
            session.steps(most=1000)

    def test_parts_hold_every_row_once(self, session: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("traceml_ray.store.step_rows._SCANNED", 2)
        parts = [*session.iter_steps()]
        assert len(parts) > 3
        keys = {pair for part in parts for pair in zip(part.step.tolist(), part.rank.tolist(), strict=True)}
        assert len(keys) == sum(map(len, parts)) == 8 * 300

    def test_times_of_the_host_are_not_known_in_rows_on_its_clock(self, tmp_path: Path) -> None:
        played = Played(tmp_path / "demo", 2, per_node=2, late=None, device=True)
        played.clock_from = 30
        for _ in range(3):
            played.play(20)
        with traceml_ray.open(played.folder) as session:
            steps = session.steps()
            earlier = session.steps(0, 19)
        assert steps.host_ns is not None and steps.host_ns.shape == (120, 6)
        known = steps.step >= 40  # the first batch that has no row before step 30
        assert np.isnan(steps.host_ns[~known]).all()
        assert steps.host_ns[known].tolist() == [[1e6 * ms for ms in HOST]] * 40
        assert steps.host_data_ns[-1] == 1e6 * HOST[DATA]
        assert earlier.host_ns is None and "host_data_ns" not in earlier.columns

    def test_an_unknown_column_is_named(self, session: Any) -> None:
        with pytest.raises(AttributeError, match="no column 'dat_ns'; columns: step, rank"):
            _ = session.steps(0, 1).dat_ns


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with more rows than are read for one question."""
    played = Played(tmp_path_factory.mktemp("out") / "long", 4, late=None)
    for _ in range(100):
        played.play(1000, judge=False)
    played.end()
    return played.folder


class TestLongRun:
    def test_plots_and_html_are_of_all_of_it(self, long: Path) -> None:
        pytest.importorskip("plotly")
        with traceml_ray.open(long) as session:
            assert max(session.plot("ranks").data[0].x) == 99_999.5
        with traceml_ray.open(long) as session:
            assert session._chart_data().columns.last[-1] == 99_999

    def test_summary_is_the_one_that_was_written_of_all_of_it(
        self, long: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("traceml_ray.reports.stored_totals.MAX_ROWS", 50_000)
        written = json.loads((long / "summary.json").read_bytes())
        assert written["steps"]["count"] == 100_000
        with traceml_ray.open(long) as session:
            assert traceml_ray.to_builtins(session.summary()) == written


class TestPandas:
    def test_types_of_columns(self, session: Any) -> None:
        pytest.importorskip("pandas")
        steps = session.steps(0, 9).to_pandas()
        assert {str(steps[name].dtype) for name in ("step", "rank", "data_ns", "total_ns")} == {"int64"}
        assert len(steps) == 80
        findings = session.findings().to_pandas()
        assert str(findings["from_time"].dtype) == "datetime64[ns, UTC]"
        assert "from_ns" not in findings
        assert str(findings["cost"].dtype) == "float64"
        nodes = session.nodes().to_pandas()
        assert str(nodes["last_seen"].dtype) == "datetime64[ns, UTC]"
        assert nodes["lost_at"].isna().all()
        assert str(session.ranks().to_pandas()["stored"].dtype) == "int64"

    def test_an_empty_table_has_its_typed_columns(self, session: Any) -> None:
        pytest.importorskip("pandas")
        empty = type(session.findings())([], traceml_ray.interactive.questions.Finding).to_pandas()
        assert len(empty) == 0
        assert str(empty["from_time"].dtype) == "datetime64[ns, UTC]"

    def test_arrays_by_attribute(self, session: Any) -> None:
        assert session.ranks().stored.tolist() == [300] * 8
        with pytest.raises(AttributeError, match="no field 'rows'; fields: global_rank"):
            _ = session.ranks().rows

    def test_without_pandas_the_error_says_what_to_install(
        self, session: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        _hide(monkeypatch, "pandas")
        with pytest.raises(ImportError, match="pip install pandas"):
            session.ranks().to_pandas()


def _hide(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    real = builtins.__import__

    def refuse(name: str, *args: Any, **more: Any) -> Any:
        if name.partition(".")[0] == package:
            raise ImportError(f"No module named {name!r}")
        return real(name, *args, **more)

    monkeypatch.setattr(builtins, "__import__", refuse)


class TestPlot:
    @pytest.mark.parametrize("name", PLOTS)
    def test_each_plot_is_a_figure(self, session: Any, name: str) -> None:
        objects = pytest.importorskip("plotly.graph_objects")
        figure = session.plot(name)
        assert isinstance(figure, objects.Figure)
        assert figure.layout.title.text.startswith("demo: ")
        if name != "layers":
            assert len(figure.data)
        figure.to_json()

    def test_ranks_are_named_in_the_middle_of_their_rows(self, session: Any) -> None:
        pytest.importorskip("plotly")
        axis = session.plot("ranks").layout.yaxis
        assert axis.tickvals == tuple(row + 0.5 for row in range(8))
        assert axis.ticktext[5] == "▶ rank 5 (host-1)"

    def test_an_unknown_plot_lists_those_there_are(self, session: Any) -> None:
        with pytest.raises(ValueError, match="no plot is called 'rank'; plots: ranks, steps, stages"):
            session.plot("rank")

    def test_without_plotly_the_error_says_what_to_install(
        self, session: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        _hide(monkeypatch, "plotly")
        with pytest.raises(ImportError, match="pip install plotly"):
            session.plot("ranks")


class TestHtml:
    def test_a_session_is_its_verdict_numbers_and_heatmap(self, session: Any) -> None:
        page = session._repr_html_()
        assert "Straggler: rank 5" in page
        assert "Step time" in page
        assert "data:image/png" in page
        assert not re.search(r"<script|https?://(?!www\.w3\.org)|\son\w+=", page)

    def test_style_is_of_our_box_only(self) -> None:
        sheet = ":root { a: b; } h1, h2 { c: d; } @media (max-width: 9px) { p { e: f; } } "
        sheet += "@media print { p { g: h; } }"
        assert [*scoped(sheet, ".box")] == [
            ".box h1, .box h2 { c: d; }",
            "@media (max-width: 9px) { .box p { e: f; } }",
        ]

    def test_tables_escape_what_a_session_says(self, session: Any) -> None:
        assert "<table>" in session.ranks()._repr_html_()
        ranks = session.ranks()
        named = msgspec.structs.replace(ranks[0], hostname="<b>")
        assert "<b>" not in type(ranks)([named], type(named))._repr_html_()
        assert "post_sync ms" in session.steps(0, 5)._repr_html_()
