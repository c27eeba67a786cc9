"""Rows of a device's clock with their host's part: from the wire into windows, live and from the file."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from played import QUIET, Played
from sessions import LIMITS, MS, NoSamples, Straight, ask, check_ledger, written_summary
from unit.sample_windows import held_bytes

from traceml_ray.analysis.row_table import (
    WIDTH,
    RankMeta,
    RowTable,
    from_wire,
    has_host_columns,
    host_part,
    with_host_columns,
)
from traceml_ray.analysis.step_history import StepHistory, begun
from traceml_ray.analysis.step_stats import span
from traceml_ray.analysis.window import RankRows, Window
from traceml_ray.monitor.aggregator import AggregatorCore
from traceml_ray.monitor.relay import RelayCore
from traceml_ray.reports.files import text_of
from traceml_ray.reports.stored_totals import reduce
from traceml_ray.settings import Settings
from traceml_ray.stages import (
    DATA,
    FLAG_DEVICE_CLOCK,
    FLAG_EXCLUDED,
    FLAG_INSEPARABLE,
    FORWARD,
    LEAD_BYTES,
    LEAD_UNKNOWN,
    N_STAGES,
    SEGMENT_BITS,
)
from traceml_ray.store import query
from traceml_ray.store.history_reader import pack, unpack
from traceml_ray.store.session_file import SessionFile
from traceml_ray.store.summary_shape import summary_of
from traceml_ray.wire import codec
from traceml_ray.wire import messages as wire
from traceml_ray.wire.spool import write_spool

DEVICE = FLAG_DEVICE_CLOCK


def columns(n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows and host rows (n, 6) ns, leads (n, 3)."""
    rng = np.random.default_rng(seed)
    rows, host = rng.integers(1, 1 << 40, (2, n, N_STAGES)).astype("<i8")
    return rows, host, rng.integers(0, 1 << N_STAGES, (n, LEAD_BYTES)).astype(np.uint8)


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from(["", "host", "both"])), min_size=1, max_size=6))
def test_chunks_come_to_the_rows_that_went_in(chunks: list[tuple[int, str]]) -> None:
    sent, parts = [], []
    for seed, (n, kind) in enumerate(chunks):
        rows, host, leads = columns(n, seed)
        parts.append((rows.tobytes(), host.tobytes() * bool(kind), leads.tobytes() * (kind == "both")))
        sent.append((rows, host, leads, kind))
    chunk_rows = from_wire(parts)
    assert (
        chunk_rows.dtype == np.int64
        and (chunk_rows[:, :N_STAGES] == np.concatenate([part[0] for part in sent])).all()
    )
    assert has_host_columns(chunk_rows) == any(n and kind for n, kind in chunks)
    end = 0
    for rows, host, leads, kind in sent:
        part, end = chunk_rows[end : end + len(rows)], end + len(rows)
        own_host, own_leads = host_part(part, np.full(len(part), DEVICE, np.uint8))
        if not (kind and len(rows)):
            assert own_host is own_leads is None
            continue
        assert own_host is not None and (own_host == host).all()
        assert own_leads is not None and (own_leads == (leads if kind == "both" else LEAD_UNKNOWN)).all()


def wide(n: int, seed: int = 0) -> np.ndarray:
    rows, host, leads = columns(n, seed)
    return from_wire([(rows.tobytes(), host.tobytes(), leads.tobytes())])


def table_window(table: RowTable, ranks: int) -> Window:
    return table.window(slice(0, len(table.keys)), range(ranks), [RankMeta("n")] * ranks, ranks)


@given(st.data())
def test_window_has_the_host_rows_of_its_rows_in_whatever_order_they_come(data: st.DataObject) -> None:
    ranks, steps = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 12))
    every = [wide(steps, rank) for rank in range(ranks)]
    keys = np.arange(steps, dtype=np.int64) << SEGMENT_BITS
    table, whole = RowTable(), RowTable()
    for one in (table, whole):
        one.add_ranks(range(ranks))
    cuts = [sorted(data.draw(st.sets(st.integers(0, steps), max_size=3)) | {0, steps}) for _ in every]
    parts = [(r, slice(*cut)) for r, rank_cuts in enumerate(cuts) for cut in pairwise(rank_cuts)]
    for rank, part in data.draw(st.permutations(parts)):
        flags = np.full((1, part.stop - part.start), DEVICE, np.uint8)
        table.put(table.places([rank]), keys[part], flags, every[rank][None, part])
    whole.put(whole.places(range(ranks)), keys, np.full((ranks, steps), DEVICE, np.uint8), np.stack(every))
    for window in (table_window(table, ranks), table_window(whole, ranks)):
        assert window.host is not None and window.leads is not None
        for place, rank_rows in enumerate(every):
            assert (window.d[:, place] == rank_rows[:, :N_STAGES]).all()
            assert (window.host[:, place] == rank_rows[:, N_STAGES:-1]).all()
            assert (window.leads[:, place] == columns(steps, place)[2]).all()


def test_ranks_without_a_device_clock_take_no_room_for_host_rows() -> None:
    table, keys = RowTable(), np.arange(40, dtype=np.int64) << SEGMENT_BITS
    table.add_ranks(range(4))
    flags = np.zeros((4, 40), np.uint8)
    table.put(table.places(range(4)), keys, flags, np.ones((4, 40, N_STAGES), np.int64))
    before = held_bytes(table)
    window = table_window(table, 4)
    assert window.host is None and window.leads is None
    table.put(table.places([0]), keys + (40 << SEGMENT_BITS), flags[:1] | DEVICE, wide(40)[None])
    assert held_bytes(table) > 1.9 * before
    window = table_window(table, 4)
    assert len(window.keys) == 40 and window.host is None, "there are no rows of a device in these steps"


def test_rows_that_the_device_clock_has_no_times_for_do_not_count_while_it_goes_on() -> None:
    """Before a rank's first device row, and long after its last, they count as what they are."""
    steps = 700
    flags = np.full(steps, DEVICE, np.uint8)
    flags[:5] = flags[20:30] = flags[300:] = FLAG_INSEPARABLE
    keys = np.arange(steps, dtype=np.int64) << SEGMENT_BITS
    for cuts in ([0, steps], [0, 3, 25, 26, 301, 400, steps]):
        table = RowTable(most=1 << 16)
        table.add_ranks([0])
        for begin, end in pairwise(cuts):
            part = slice(begin, end)
            table.put(table.places([0]), keys[part], flags[None, part], wide(steps)[None, part])
        steps_kept = table_window(table, 1).steps.tolist()
        assert steps_kept == [*range(20), *range(30, 300), *range(299 + 257, steps)]
    closed = RowTable()
    closed.add_ranks([0])
    closed.put(closed.places([0]), keys[:50], flags[None, 30:80], wide(50)[None])
    narrow = np.ones((1, 50, N_STAGES), np.int64)
    closed.put(closed.places([0]), keys[50:100], np.full((1, 50), FLAG_INSEPARABLE, np.uint8), narrow)
    assert len(table_window(closed, 1).keys) == 100, "a device clock that has closed itself is none"


def test_window_of_sampled_steps_has_as_many_as_one_of_all() -> None:
    history, steps = StepHistory(LIMITS), 800
    flags = np.where(np.arange(steps) % 8, FLAG_INSEPARABLE, DEVICE).astype(np.uint8)
    rows = np.ones((steps, WIDTH), np.int64)
    history.add_rows([RankRows(r, "n", np.arange(steps) << SEGMENT_BITS, flags, rows) for r in range(2)])
    history.advance({0, 1}, 0, 2)
    window = history.window([0, 1], 2, (), 50)
    assert window.steps.tolist() == list(range(400, 800, 8)) and not window.gaps
    assert window.host is not None


def test_report_of_sampled_steps_counts_all_of_them(tmp_path: Path) -> None:
    played = Played(tmp_path / "s", 2, late=1, onset=100, device=True, gpus=0)
    played.every = 8
    for _ in range(60):
        played.play(20)
    times = query.ask_one(played.aggregator.query, query.GetTimes("job"))
    played.end()
    with SessionFile(played.aggregator.folder.sqlite) as file:
        summary = written_summary(file, LIMITS)
        text = " ".join(text_of(summary_of(summary), tmp_path).split())
    took_s = 1200 * sum(QUIET) / 1e3 + 1100 * 12e-3
    steps, verdict = summary["steps"], summary["verdict"]
    assert (steps["count"], steps["covers"]["to_step"], steps["covers"]["timed_pct"]) == (1200, 1199, 12.5)
    assert (
        steps["judged"] < 150
        and "1,200 steps" in text
        and "% of the steps; all figures but the number" in text
    )
    assert steps["mean_ms"] < 1.1 * 1e3 * took_s / 1200
    assert (verdict["label"], verdict["rank"], verdict["stage"]) == ("straggler", 1, "data")
    assert verdict["elapsed_s"] == pytest.approx(took_s, rel=0.1)
    assert verdict["lost_s"] == pytest.approx(1100 * 12e-3, rel=0.1)
    assert times.timed_pct == pytest.approx(12.5, abs=0.1) and times.productive_pct > 0


@pytest.mark.parametrize(("steps", "piece"), [(803, 7), (803, 803), (60_005, 5000)])
def test_all_steps_are_counted_also_those_the_device_clock_is_not_read_in(steps: int, piece: int) -> None:
    """One step in 8 is; rank 1 comes late with some rows, and of two rows of step 400 one is read."""
    every = np.arange(steps)
    keys = np.insert(every << SEGMENT_BITS, 401, 400 << SEGMENT_BITS | 1)
    flags = np.where((keys >> SEGMENT_BITS) % 8, FLAG_INSEPARABLE, DEVICE).astype(np.uint8)
    flags[401], flags[0] = FLAG_INSEPARABLE, DEVICE | FLAG_EXCLUDED
    rows = np.full((len(keys), WIDTH), MS)
    history = StepHistory(LIMITS, deep=True)
    both = [RankRows(rank, "n", keys, flags, rows) for rank in range(2)]
    held: list[RankRows] = []
    for begin in range(0, len(keys), piece):
        part = slice(begin, begin + piece)
        late = both[1].select(part)
        if begin // piece % 3 == 1:
            held.append(late)
            late = late.select(slice(0, 0))
        history.add_rows([both[0].select(part), *([late] if len(late.keys) else [])])
        history.advance({0, 1} if begin % 2 else {0}, 0, 2)
        while held and begin // piece % 3 == 2:
            history.add_rows([held.pop()])
    history.add_rows(held)
    history.advance((), 0, 2)
    assert history.counts() == {0: steps, 1: steps}
    assert history.timed() == pytest.approx(1 / 8, rel=0.02)
    took = N_STAGES * len(keys)
    for rank in range(2):
        line = history.timeline(rank)
        assert (line.first[0], line.last[-1]) == (0, steps - 1)
        assert line.took.sum() == pytest.approx(took * MS, rel=1e-5)
        assert (line.first[1:] == line.last[:-1] + 1).all()
        begins, ends = span(line, 10**15, 600, 700) or (0, 0)
        assert (10**15 - ends, 10**15 - begins) == pytest.approx(
            ((steps - 701) * 6 * MS, (steps - 600) * 6 * MS), abs=8 * 6 * MS
        )
    assert history.total_ms() == pytest.approx(took, abs=8 * 6 + 6)


@pytest.mark.parametrize("piece", [7, 900])
def test_idle_share_counts_every_step_also_of_those_that_are_summed_up(piece: int) -> None:
    ranks, steps = 40, 4500  # of so many ranks 3,276 steps are kept one by one
    rng = np.random.default_rng(0)
    rows = np.full((ranks, steps, WIDTH), 5 * MS)
    rows[:, :, DATA] = rng.integers(1, 3 * MS, (ranks, steps))
    late = rng.random(steps) < 0.4
    rows[3, late, FORWARD] += 7 * MS
    rows[:, :, -1] = 0
    rows[3, late, -1] = 1 << FORWARD
    rows[4, :, -1] = -1
    rows[5, ::3, -1] = from_wire([(bytes(48), bytes(48), b"")])[0, -1]
    flags = np.full((ranks, steps), DEVICE, np.uint8)
    flags[4] = 0
    history, keys = StepHistory(LIMITS), np.arange(steps) << SEGMENT_BITS
    history.register_ranks({rank: RankMeta("n") for rank in range(ranks)})
    for begin in range(0, steps, piece):
        part = slice(begin, min(steps, begin + piece))
        history.put(range(ranks), keys[part], flags[:, part], rows[:, part])
        history.advance(set(range(ranks)), 0, ranks)
    warm = slice(LIMITS.warmup_steps, None)
    idle = rows[:, warm, DATA].sum(axis=1)
    idle[3] += 7 * MS * late[warm].sum()
    share = idle / rows[:, warm, :N_STAGES].sum(axis=(1, 2))
    share[4] = np.nan
    known = rows[5, warm][rows[5, warm, -1] == 0]
    share[5] = known[:, DATA].sum() / known[:, :N_STAGES].sum()
    stats = history.stats()
    assert stats is not None and stats.steps == steps - LIMITS.warmup_steps
    assert stats.idle() == pytest.approx(share, rel=1e-4, nan_ok=True)
    newest = history.stats(50)
    assert newest is not None and newest.idle()[3] == pytest.approx(
        (rows[3, -50:, DATA].sum() + 7 * MS * late[-50:].sum()) / rows[3, -50:, :N_STAGES].sum(), rel=1e-4
    )


def test_history_of_ranks_without_a_device_clock_has_no_idle_times() -> None:
    history, keys = StepHistory(LIMITS), np.arange(60) << SEGMENT_BITS
    history.register_ranks({rank: RankMeta("n") for rank in range(2)})
    history.put(range(2), keys, np.zeros((2, 60), np.uint8), np.full((2, 60, N_STAGES), MS))
    history.advance({0, 1}, 0, 2)
    stats = history.stats()
    assert stats is not None and np.isnan(stats.idle()).all()
    assert [store.device for store in history.stores()] == [None]


def test_leads_that_are_not_known_stay_unknown_in_a_window() -> None:
    rows, flags = wide(4), np.array([DEVICE, DEVICE, 0, DEVICE], np.uint8)
    rows[1] = from_wire([(bytes(48), bytes(48), b"")])[0]
    rows[2] = with_host_columns(rows[2, :N_STAGES])
    host, leads = host_part(rows, flags)
    assert host is not None and leads is not None
    assert (leads == LEAD_UNKNOWN).all(axis=1).tolist() == [False, True, True, False]
    rows[3] = with_host_columns(rows[3, :N_STAGES])
    assert host_part(rows, flags) == (None, None), (
        "a row on a device's clock of which the host's is not known"
    )


def test_statistics_that_are_kept_have_the_host_rows_that_wait_for_another_rank() -> None:
    keys = np.arange(300, dtype=np.int64) << SEGMENT_BITS
    rows = wide(300)
    rows[:, : 2 * N_STAGES] = rows[:, : 2 * N_STAGES] % (9 * MS)
    flags = np.full(300, DEVICE, np.uint8)
    both = [RankRows(rank, "n", keys, flags, rows, None, None, rank + 1) for rank in range(2)]
    run = begun(both, LIMITS, None)
    run.add([both[0].select(slice(0, 100)), both[1]], {0, 1}, 0, 2)
    again = unpack(pack(run), both)
    assert again is not None
    again.add([both[0].select(slice(100, 300))], {0, 1}, 0, 2)
    again.finish(2)
    window = again.history.between(99 << SEGMENT_BITS, 299 << SEGMENT_BITS, [0, 1], 2)
    assert window.host is not None and (window.host[:, 1] == rows[100:, N_STAGES:-1]).all()
    assert again.replay is not None
    sample = again.replay.done().sample()
    assert sample is not None and sample.host is not None and sample.leads is not None
    assert (sample.host[:, 0] == rows[sample.steps, N_STAGES:-1]).all()


# -- the whole way -------------------------------------------------------------------------------


class Node:
    """Two ranks with a device clock, one of them late in loading data; a relay, an aggregator."""

    def __init__(self, folder: Path, session_bytes: int = 1 << 40) -> None:
        self.played = Played(folder / "s", 2, late=1, onset=40, device=True, gpus=0)
        self.settings = Settings(session_bytes=session_bytes, thresholds=LIMITS)
        self.reopen()
        self.spool = folder / "spool"
        self.spool.mkdir()
        self.sent: list[list[wire.RankBatch]] = [[], []]
        self.relay = RelayCore(
            folder / "r.sock", wire.NodeIdentity("node-0", "host-0", "10.0.0.1"),
            self.way, NoSamples(), Settings(), spool=self.spool,
            clock=self.played.clock.timer,
        )  # fmt: skip

    def reopen(self) -> None:
        """Another aggregator on the same file."""
        self.core.close()
        again = AggregatorCore(self.core.folder.path, self.settings, {}, self.played.clock)
        self.played.aggregator, self.way = again, Straight(again)

    def close(self) -> None:
        self.relay.close()
        self.core.close()

    def play(self, seconds: int, spooled: int | None = None) -> None:
        """So many seconds of 20 steps; what rank `spooled` has to say stays in its process."""
        kept: list[bytes] = []
        for _ in range(seconds):
            self.played.clock.tick()
            rows = self.played.rows(20)
            for number, rank in enumerate(self.played.ranks):
                data = self.played._batch(rank, rows[number])
                self.sent[number].append(codec.decode(data, wire.RankBatch))
                if number == spooled:
                    kept.append(data)
                else:
                    self.relay.accept(data)
            self.played.step += 20
            self.turn()
        self.played.clock.tick()
        self.turn()
        if spooled is not None:
            write_spool(self.spool / f"{self.played.ranks[spooled].process_id}.spool", kept)

    def turn(self) -> None:
        self.relay.poll()
        assert self.core.commit()
        self.core.judge()

    @property
    def core(self) -> AggregatorCore:
        return self.played.aggregator

    def rows(self, rank: int, name: str) -> np.ndarray:
        """All that a rank has sent of one column, but its first row (n, …)."""
        data = b"".join(getattr(batch, name) for batch in self.sent[rank])
        kind, width = (np.uint8, LEAD_BYTES) if name == "leads" else ("<i8", N_STAGES)
        return np.frombuffer(data, kind).reshape(-1, width)[1:]

    def first(self, rank: int) -> np.ndarray:
        return np.frombuffer(self.sent[rank][0].rows, "<i8")[:N_STAGES]

    def check(self, window: Window) -> None:
        """Check that a window has what the ranks sent of its steps."""
        steps = window.steps - 1
        assert window.host is not None and window.leads is not None and len(steps) >= 20
        for rank in range(2):
            assert (window.d[:, rank] == self.rows(rank, "rows")[steps]).all()
            assert (window.host[:, rank] == self.rows(rank, "host_rows")[steps]).all()
            assert (window.leads[:, rank] == self.rows(rank, "leads")[steps]).all()

    def live(self) -> Window:
        run = self.core._steps.get("job")
        assert run is not None
        return run.history.window([0, 1], 2, (), 50)

    def stored(self) -> list[RankRows]:
        with SessionFile(self.core.folder.sqlite) as file:
            return file.rows()[0]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    made.close()


def test_host_rows_and_leads_reach_live_windows_and_the_session_file(node: Node) -> None:
    node.play(10)
    node.check(node.live())
    for rank_rows in node.stored():
        assert (rank_rows.rows[1:, :N_STAGES] == node.rows(rank_rows.rank, "rows")).all()
        host, leads = host_part(rank_rows.rows, rank_rows.flags)
        assert host is not None and (host[1:] == node.rows(rank_rows.rank, "host_rows")).all()
        assert leads is not None and (leads[1:] == node.rows(rank_rows.rank, "leads")).all()
    assert not node.core.errors
    check_ledger(node.core.folder.path)


def test_report_judges_device_rows_as_the_live_verdict_does(node: Node) -> None:
    node.play(20)
    live = ask(node.core, "verdict")
    with SessionFile(node.core.folder.sqlite) as file:
        stored = written_summary(file, LIMITS)["verdict"]
        whole = reduce(file, LIMITS)
    named = "straggler", "data", 1
    assert (live["label"], live["stage"], live["rank"]) == named
    assert (stored["label"], stored["stage"], stored["rank"]) == named
    sample = whole and whole.judged.sample()
    assert sample is not None
    node.check(sample)


def test_run_whose_device_clock_began_after_some_steps_is_judged_live_and_afterwards(node: Node) -> None:
    node.played.clock_from = 100
    node.play(20)
    live = ask(node.core, "verdict")
    with SessionFile(node.core.folder.sqlite) as file:
        stored, whole = written_summary(file, LIMITS)["verdict"], reduce(file, LIMITS)
    for verdict in (live, stored):
        assert (verdict["label"], verdict["stage"], verdict["rank"]) == ("straggler", "data", 1)
    sample = whole and whole.judged.sample()
    assert sample is not None and sample.flags[0, 0] & FLAG_INSEPARABLE
    assert sample.host is not None and sample.leads is not None
    since = sample.since(101)
    for rank in range(2):
        sent = node.rows(rank, "host_rows")[since.steps - 101]  # the first that was sent is that of step 100
        assert since.host is not None and (since.host[:, rank] == sent).all()


def test_rank_without_a_device_clock_among_others_is_reported(node: Node) -> None:
    node.played.late = None
    both, (first, second) = node.played._beside, node.played.ranks
    inseparable = {"flags": np.full(20, FLAG_INSEPARABLE, np.uint8).tobytes()}
    node.played._beside = lambda rank, rows: both(rank, rows) if rank is first else inseparable  # type: ignore[method-assign]
    node.play(10)
    live = ask(node.core, "verdict")
    with SessionFile(node.core.folder.sqlite) as file:
        stored = written_summary(file, LIMITS)["verdict"]
    for verdict in (live, stored):
        assert verdict["label"] == "telemetry_limited" and "(the CPU's: rank 1)" in verdict["why"]
    assert second.produced == 200


def test_restarted_aggregator_has_the_host_rows_of_before(node: Node) -> None:
    node.play(10)
    way = node.way
    node.reopen()
    way.attach(node.core)
    node.play(1)
    node.check(node.live())


def test_device_rows_of_a_spool_file_are_stored_with_their_host_rows(node: Node) -> None:
    node.play(3)
    node.play(4, spooled=1)
    assert not node.relay.flush(0)
    node.play(2)
    node.check(node.live())
    assert [len(rank_rows.keys) for rank_rows in node.stored()] == [9 * 20] * 2
    check_ledger(node.core.folder.path)


def test_device_rows_that_are_folded_away_still_count(tmp_path: Path) -> None:
    node = Node(tmp_path, session_bytes=300_000)
    node.play(150)
    with SessionFile(node.core.folder.sqlite) as file:
        left = file.rows()[0]
        assert len(left[0].keys) < 2000 and has_host_columns(left[0].rows)
        for process in file.processes():
            sums, rank = file.folded()[process.id], process.rank
            assert rank is not None
            rows = node.rows(rank, "rows")[: int(sums.counts.sum()) - 1]
            assert sums.sums[:, DATA].sum() == rows[:, DATA].sum() + node.first(rank)[DATA]
        summary = written_summary(file, LIMITS)
    assert summary["ledger"]["folded"] > 2000
    assert summary["steps"]["covers"]["rows_pct"] == 100 and summary["steps"]["count"] == 3000
    assert not node.core.errors
    node.close()
