"""The relay core: real sockets and processes, the real aggregator on a real file, a fake clock."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from module_time import replace_time
from sessions import SECOND, Clock, NoSamples, Straight, aggregation, check_ledger, records_of, with_records
from sessions import Rank as SentRank
from sessions import Relay as SentRelay

from traceml_ray.agent import rank_agent
from traceml_ray.agent.channel import SocketChannel
from traceml_ray.agent.rank_agent import RankAgent
from traceml_ray.identity import RankIdentity
from traceml_ray.monitor import aggregator, rank_intake
from traceml_ray.monitor import rank_connections as peers
from traceml_ray.monitor import relay as relay_module
from traceml_ray.monitor.aggregator import AggregatorCore
from traceml_ray.monitor.finish import ASK_S, LATE_S, LAUNCHER_S, OTHERS_S, SIGN_S, WORD_S
from traceml_ray.monitor.offline import finish_offline
from traceml_ray.monitor.outbox import LISTEN_S, LOOK_S, RESEND_S, Outbox
from traceml_ray.monitor.relay import RelayCore
from traceml_ray.settings import Settings
from traceml_ray.signals.memory.records import MemorySample
from traceml_ray.signals.nodes.records import NODE as NODE_SAMPLES
from traceml_ray.signals.nodes.records import GpuSample, NodeSample
from traceml_ray.stages import DATA, N_STAGES, ROW_BYTES, SEGMENT_BITS, SYNC_WAIT
from traceml_ray.store.session_file import SessionFile
from traceml_ray.wire import codec
from traceml_ray.wire import messages as wire
from traceml_ray.wire.spool import read_spool, write_spool

NODE = wire.NodeIdentity("node", "host", "127.0.0.1")


def rank_batch(
    process_id: str, seq: int, *, rows: int = 3, final: bool = False, pad: int = 0, **fields: Any
) -> bytes:
    fields.setdefault("events", [wire.Event("note", 0, message="x" * pad)] if pad else [])
    fields = with_records(fields)
    return codec.encode(
        wire.RankBatch(
            v=codec.VERSION,
            process_id=process_id,
            seq=seq,
            sent_ns=0,
            produced=rows * (seq + 1),
            dropped=0,
            first_row=rows * seq,
            keys=struct.pack(
                f"<{rows}q", *(row << SEGMENT_BITS for row in range(rows * seq, rows * (seq + 1)))
            ),
            flags=bytes(rows),
            rows=bytes(ROW_BYTES * rows),
            final=final,
            **fields,
        )
    )


class Aggregator(Straight):
    """
    A real one on a session file in `folder`, made when it is first called. It may hang, and it may be killed
    with what it has not committed; the next one goes on from the file.
    """

    def __init__(self, folder: Path) -> None:
        self.up = True
        self.hangs = False
        self.clock = Clock()
        self.finished: list[wire.Finish] = []
        self.sizes: list[int] = []
        self._folder = folder
        self._core: AggregatorCore | None = None
        self._sent: dict[tuple[str, int], bytes] = {}
        self._calls = []

    @property
    def core(self) -> AggregatorCore:
        if self._core is None:
            self._core = aggregation(self._folder, self.clock)
            self.attach(self._core)
        return self._core

    def ingest(self, data: bytes, commit: bool) -> bool:
        if not (self.up and self.core and super().ingest(data, commit)):
            return False
        self.sizes.append(len(data))
        message = codec.decode(data, wire.RelayBatch)
        assert self._sent.setdefault((message.incarnation, message.seq), data) == data
        return True

    def finish(self, data: bytes) -> bool:
        if not (self.up and self.core and super().finish(data)):
            return False
        self.finished.append(msgspec.structs.replace(codec.decode(data, wire.Finish), waited_s=0.0))
        return True

    def poll(self) -> list[bytes | Exception]:
        if self.hangs:
            return []
        if not self.up and self._calls:
            self._calls = []
            return [ConnectionError("the actor died")]
        return super().poll()

    def commit(self) -> None:
        if self._core is not None and self._actor._stopped is None:
            assert self._core.commit()

    def kill(self) -> None:
        """Die with what is not committed."""
        self.up = False
        self.close()

    def close(self) -> None:
        if self._core is not None and self._actor._stopped is None:
            self._core.close()
        self._core = None

    def hang(self) -> Callable[[], None]:
        """Ranks of another node hang: all ranks are asked for their stacks; call the result to end that."""
        relay, ranks = SentRelay(1), [SentRank(rank, job_id="other") for rank in range(2)]
        self.core.ingest(relay.message(*(rank.batch(60) for rank in ranks)))
        self.clock.tick(25)
        places = [wire.OpenStage(60, stage, 24 * SECOND) for stage in (SYNC_WAIT, DATA)]
        waits = [rank.batch(0, open=place) for rank, place in zip(ranks, places, strict=True)]
        self.core.ingest(relay.message(*waits))
        self.core.judge()
        assert [command.name for command in self.commands] == ["dump"]

        def end() -> None:
            self.core.ingest(relay.message(*(rank.batch(10) for rank in ranks)))
            self.core.judge()
            assert not self.commands

        return end

    @property
    def commands(self) -> list[wire.Command]:
        return self.core._judge.commands

    @contextlib.contextmanager
    def file(self) -> Iterator[SessionFile]:
        if not (self._folder / "session.sqlite").exists():
            assert self.core
        with SessionFile(self._folder / "session.sqlite") as file:
            yield file

    @property
    def stored(self) -> list[wire.RelayBatch]:
        """The messages that are in the file."""
        with self.file() as file:
            marks = dict(file._all("SELECT incarnation, last_seq FROM relay"))
        sent = [data for (relay, seq), data in sorted(self._sent.items()) if seq <= marks.get(relay, 0)]
        return [codec.decode(data, wire.RelayBatch) for data in sent]

    def batches(self) -> list[wire.RankBatch]:
        return [codec.decode(data, wire.RankBatch) for message in self.stored for data in message.batches]

    def forwarded(self, process_id: str) -> list[int]:
        """Numbers of the batches that the relay has sent and that are stored."""
        return [batch.seq for batch in self.batches() if batch.process_id == process_id]

    def seqs(self, process_id: str) -> list[int]:
        """Numbers of the batches whose rows are in the file."""
        query = "SELECT first_row, n FROM chunk JOIN rank_process p ON process = p.id WHERE process_id = ?"
        with self.file() as file:
            return [first // n for first, n in file._all(f"{query} ORDER BY chunk.id", process_id)]

    def lost(self) -> list[str]:
        with self.file() as file:
            return [process.process_id for process in file.processes() if process.lost]

    def dropped(self) -> dict[str, int]:
        with self.file() as file:
            return {
                s.process_id: sum(s.dropped_by_relay.values()) for s in file.processes() if s.dropped_by_relay
            }

    def errors(self) -> dict[str, int]:
        with self.file() as file:
            return next(node.errors for node in file.cluster() if node.node_id == NODE.node_id)

    def messages(self, kind: str) -> list[str]:
        return [e.message for message in self.stored for e in message.events if e.kind == kind]


class Bench:
    """A relay whose clock only moves when told to."""

    def __init__(
        self, folder: Path, limit: int = 64 << 20, spool: Path | None = None, ahead_s: int = 0
    ) -> None:
        self.now = 100.0
        self.path = folder / "relay.sock"
        self.spool = spool or folder / "spool"
        self.spool.mkdir(exist_ok=True)
        self.started: list[subprocess.Popen[bytes]] = []
        self.aggregator = Aggregator(folder / "session")
        self.sampler = NoSamples()
        self.relay = RelayCore(
            self.path,
            NODE,
            self.aggregator,
            self.sampler,
            Settings(relay_buffer_bytes=limit),
            spool=self.spool,
            clock=lambda: self.now,
            wall=lambda: self.aggregator.clock() + ahead_s * SECOND,
        )

    def close(self) -> None:
        self.relay.close()
        self.aggregator.close()

    def tick(self, times: int = 1) -> None:
        """Let so many ticks pass, with a commit after each."""
        for _ in range(times):
            self.now += wire.TICK_S
            self.aggregator.clock.tick(wire.TICK_S)
            self.relay.poll()
            self.aggregator.commit()

    def until(self, done: Callable[[], bool]) -> None:
        """Turn, with real waiting for real processes, until `done`."""
        end = time.monotonic() + 240
        while not done():
            assert time.monotonic() < end, "it never happened"
            self.relay.poll(0.05)
            self.tick()

    def connect(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.settimeout(240)
        sock.connect(str(self.path))
        return sock


@pytest.fixture
def bench() -> Iterator[Bench]:
    folder = Path(tempfile.mkdtemp(prefix="tr-"))
    made = Bench(folder)
    yield made
    made.close()
    for process in made.started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(240)
    shutil.rmtree(folder)


def reply(sock: socket.socket) -> wire.RankReply:
    return codec.decode(sock.recv(1 << 16), wire.RankReply)


def test_batch_is_acknowledged_and_forwarded_unchanged(bench: Bench) -> None:
    with bench.connect() as sock:
        sent = rank_batch("a", 0)
        sock.send(sent)
        bench.relay.poll(5)  # the connection
        bench.relay.poll(5)  # the packet
        assert reply(sock) == wire.RankReply(codec.VERSION, "a", 0, -1)
        bench.tick(2)
    assert [data for message in bench.aggregator.stored for data in message.batches] == [sent]
    assert bench.aggregator.stored[0].events[0].kind == "relay_start"


def test_reply_names_the_stored_batches_a_rank_need_not_keep(bench: Bench) -> None:
    with bench.connect() as sock:
        settled = []
        bench.relay.poll(5)  # the connection
        for seq in range(4):
            sock.send(rank_batch("a", seq))
            bench.relay.poll(5)
            settled.append((answer := reply(sock)).settled_seq)
            assert answer.acked_seq == seq
            bench.tick(2)
    assert settled[0] == -1 and settled[-1] >= 1 and settled == sorted(settled)


def test_caller_that_has_not_noticed_a_restart_gets_an_error(bench: Bench) -> None:
    with pytest.raises(LookupError):
        bench.relay.accept(rank_batch("a", 5), fresh=False)
    bench.relay.accept(rank_batch("a", 3), fresh=True)
    bench.relay.accept(rank_batch("a", 4), fresh=False)
    bench.tick(2)
    assert bench.aggregator.seqs("a") == [3, 4]


def test_relay_spool_and_agent_spool_do_not_overwrite_each_other(bench: Bench) -> None:
    bench.relay.accept(rank_batch("a", 1))
    write_spool(bench.spool / "a.spool", [rank_batch("a", 2)])
    bench.relay._spool.salvage()
    assert [path.name for path in sorted(bench.spool.iterdir())] == ["a.0.spool", "a.spool"]
    again = Bench(bench.path.parent / "again", spool=bench.spool)
    assert not again.relay.flush(0)
    again.tick(3)
    assert again.aggregator.seqs("a") == [1, 2]
    again.close()


def test_socket_is_for_this_user_only(bench: Bench) -> None:
    assert bench.path.stat().st_mode & 0o777 == 0o600
    open_folder = Path(tempfile.mkdtemp(prefix="tr-"))
    open_folder.chmod(0o755)
    with pytest.raises(OSError, match="0700"):
        Bench(open_folder)
    shutil.rmtree(open_folder)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")
def test_other_user_who_reaches_the_socket_is_refused(bench: Bench) -> None:
    bench.path.parent.chmod(0o711)
    bench.path.chmod(0o666)
    talk = (
        "import os, socket, sys; os.setuid(65534); s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET);"
        "s.connect(sys.argv[1]); s.send(b'x'); sys.exit(s.recv(10) != b'')"
    )
    stranger = subprocess.Popen([sys.executable, "-c", talk, str(bench.path)], stderr=subprocess.DEVNULL)
    bench.started.append(stranger)
    bench.until(lambda: stranger.poll() is not None)
    bench.until(
        lambda: bool(bench.aggregator.stored) and "socket: PermissionError" in bench.aggregator.errors()
    )
    assert "uid 65534" in bench.aggregator.messages("swallowed")[0]
    assert not bench.aggregator.batches()


def test_path_too_long_for_a_socket_is_refused_by_name(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 80)
    folder.mkdir(mode=0o700)
    with pytest.raises(OSError, match="longer than 90 bytes"):
        Bench(folder)


def test_new_relay_replaces_the_socket_of_a_dead_one_but_not_of_a_living_one(bench: Bench) -> None:
    with pytest.raises(OSError, match="another relay is listening"):
        Bench(bench.path.parent)
    bench.relay.close()
    second = Bench(bench.path.parent)
    with second.connect() as sock:
        sock.send(rank_batch("a", 7))
        second.relay.poll(5)
        second.relay.poll(5)
        assert reply(sock).acked_seq == 7
    second.close()


def test_batches_of_one_tick_go_in_one_message(bench: Bench) -> None:
    for seq in range(3):
        bench.relay.accept(rank_batch("a", seq))
        bench.relay.accept(rank_batch("b", seq))
    bench.tick(2)
    assert [len(message.batches) for message in bench.aggregator.stored] == [6]


def test_backlog_is_split_below_64_kib_and_keeps_its_order(bench: Bench) -> None:
    bench.aggregator.up = False
    for seq in range(40):
        bench.relay.accept(rank_batch("a", seq, pad=9000))
    bench.tick()
    bench.aggregator.up = True
    bench.tick(20)
    assert bench.aggregator.seqs("a") == list(range(40))
    assert max(bench.aggregator.sizes) <= 64 * 1024


def test_batch_sent_twice_is_acknowledged_twice_and_forwarded_once(bench: Bench) -> None:
    for seq in (0, 1, 0, 1, 2):
        answer = codec.decode(bench.relay.accept(rank_batch("a", seq)), wire.RankReply)
    assert answer.acked_seq == 2
    bench.tick(2)
    assert bench.aggregator.forwarded("a") == [0, 1, 2]


def test_batches_a_killed_aggregator_had_not_committed_are_sent_again(bench: Bench) -> None:
    for seq in range(2):
        bench.relay.accept(rank_batch("a", seq))
        bench.tick()
    bench.relay.accept(rank_batch("a", 2))
    bench.now += wire.TICK_S
    bench.relay.poll()  # sent
    bench.relay.poll()  # taken, not committed
    bench.aggregator.kill()
    bench.relay.accept(rank_batch("a", 3))
    bench.tick(2)
    bench.aggregator.up = True
    bench.tick(int(RESEND_S / wire.TICK_S) + 4)
    assert bench.aggregator.seqs("a") == [0, 1, 2, 3]


def test_failed_call_is_repeated_as_soon_as_there_is_an_aggregator(bench: Bench) -> None:
    bench.relay.accept(rank_batch("a", 0))
    bench.now += wire.TICK_S
    bench.relay.poll()  # sent, not answered
    bench.aggregator.kill()
    bench.tick()
    bench.aggregator.up = True
    bench.tick(2)
    assert bench.aggregator.seqs("a") == [0]


def test_relay_of_many_nodes_sends_once_all_its_ranks_have_reported(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aggregator, "MANY_NODES", 0)
    for seq in range(2):
        for name in "ab":
            bench.relay.accept(rank_batch(name, seq))
        bench.tick(4)
    sent = len(bench.aggregator.sizes)
    for seq in range(2, 6):
        bench.relay.accept(rank_batch("a", seq))
        bench.tick()
        assert len(bench.aggregator.sizes) == sent, "the other rank has not reported"
        bench.relay.accept(rank_batch("b", seq))
        bench.relay.poll()
        sent += 1
        assert len(bench.aggregator.sizes) == sent
        bench.tick(2)
    bench.relay.accept(rank_batch("b", 6))
    bench.tick(4)
    assert len(bench.aggregator.sizes) == sent + 1, "it waits a second at most"
    bench.tick(8)
    assert bench.aggregator.seqs("a") == [*range(6)] and bench.aggregator.seqs("b") == [*range(7)]


def test_relay_that_sends_seldom_is_flushed_at_once(bench: Bench) -> None:
    bench.relay._link.tick_s = 60.0
    bench.relay.accept(rank_batch("a", 0))
    bench.relay.poll()
    bench.relay.accept(rank_batch("a", 1))
    bench.relay.start()
    time.sleep(0.1)  # it waits for packets
    assert bench.relay.flush(240)


@pytest.mark.parametrize("ahead_s", [5, -5])
def test_relay_measures_how_far_its_clock_is_off_over_the_messages_it_sends(
    bench: Bench, ahead_s: int
) -> None:
    bench.relay.close()
    other = Bench(bench.path.parent, ahead_s=ahead_s)
    for seq in range(5):
        other.relay.accept(rank_batch("a", seq))
        other.tick()
    with other.aggregator.file() as file:
        (node,) = file.cluster()
        (clock,) = file.clocks().values()
    # Between a packet and the look for its answer there is a whole tick of the fake clock.
    assert node.clock_offset_ns is not None and node.clock_bound_ns is not None
    assert abs(node.clock_offset_ns + ahead_s * SECOND) <= node.clock_bound_ns <= 0.13 * SECOND
    assert abs(clock.offset_ns[-1] + ahead_s * SECOND) <= clock.bound_ns[-1]
    other.close()


def test_relay_looks_for_a_reply_at_once_now_and_then(bench: Bench) -> None:
    link = bench.relay._link
    assert link.patience(bench.now) == wire.TICK_S
    quick = []
    for seq in range(100):
        bench.relay.accept(rank_batch("a", seq))
        bench.now += wire.TICK_S
        bench.relay.poll()
        quick.append(link.patience(bench.now) == LOOK_S)
        assert link.patience(bench.now + LISTEN_S) == wire.TICK_S  # it does not come
    assert sum(quick) == 3  # in 25 seconds


def test_disk_that_stores_nothing_does_not_make_the_relay_grow(bench: Bench) -> None:
    bench.relay.close()
    small = Bench(bench.path.parent, limit=50_000)
    for seq in range(60):
        small.relay.accept(rank_batch("a", seq, pad=6000))
        small.now += wire.TICK_S
        small.relay.poll()
    packed, waiting = small.relay._outbox.salvage()
    assert sum(map(len, packed)) + sum(map(len, waiting)) <= 50_000
    assert len(waiting) >= 3  # the newest are held, not only what was sent first
    small.close()


def test_events_spans_and_samples_dropped_by_an_overflow_are_counted(bench: Bench) -> None:
    bench.relay.close()
    small = Bench(bench.path.parent, limit=20_000)
    small.aggregator.up = False
    events, spans = [wire.Event("note", 1, message="x" * 4000)], [wire.SpanSum("a", 1, 1, 5, 5, 0, 0)]
    sample_fields = {
        "process": wire.ProcessSample(1, 1.0, 1, 1, 0, 0),
        "memory": [MemorySample(1, 1, None)],
    }
    for seq in range(12):
        small.relay.accept(rank_batch("a", seq, events=events, spans=spans, **sample_fields))
        small.sampler.sample = NodeSample(seq, *[None] * 9)
        small.tick()
    small.aggregator.up = True
    small.tick(10)
    batches, errors = small.aggregator.batches(), small.aggregator.errors()
    for what, name in {"events": "event", "spans": "span", "memory": "memory samples"}.items():
        kept = sum(len(batch.records.get(what, ()) or getattr(batch, what, ())) for batch in batches)
        assert 0 < kept < 12
        assert kept + errors[f"{name}: no room"] == 12
    assert errors["process sample: no room"] == 12 - len(batches)
    samples = sum(len(records_of(message, NODE_SAMPLES)) for message in small.aggregator.stored)
    assert samples + errors["samples of nodes: no room"] == 12
    small.relay.close()


def test_ended_process_is_reported_gone_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    gone: list[peers.RankConnection] = []
    monkeypatch.setattr(bench.relay._connections, "on_gone", gone.append)
    monkeypatch.setattr(os, "pidfd_open", lambda _: (_ for _ in ()).throw(ProcessLookupError()))
    with bench.connect() as sock:
        sock.send(rank_batch("a", 0))
    bench.relay.poll(1)
    bench.relay.poll()
    assert len(gone) == 1


def test_hanging_aggregator_holds_up_nothing_and_loses_nothing(bench: Bench) -> None:
    bench.aggregator.hangs = True
    for seq in range(30):
        assert codec.decode(bench.relay.accept(rank_batch("a", seq)), wire.RankReply).acked_seq == seq
        bench.tick()
    bench.aggregator.hangs = False
    bench.tick(40)
    assert bench.aggregator.seqs("a") == list(range(30))


def test_bad_packets_are_counted_by_reason_and_sender_and_the_connection_stays(bench: Bench) -> None:
    with bench.connect() as sock:
        for bad in (b"\xc1garbage", codec.encode(wire.RelayReply(codec.VERSION, 1)), bytes(70_000)):
            sock.send(bad)
            bench.relay.poll(1)
            bench.relay.poll()
        sock.send(rank_batch("a", 0))
        bench.until(lambda: bench.aggregator.seqs("a") == [0])
        assert reply(sock).acked_seq == 0
    pid = os.getpid()
    expected = {f"packet: {reason}": 1 for reason in ("garbage", "wrong_kind", "too_large")}
    assert bench.aggregator.errors().items() >= expected.items()
    messages = bench.aggregator.messages("swallowed")
    assert len(messages) == 3 and all(f"packet (pid {pid})" in message for message in messages)


def test_bad_batch_of_a_caller_is_refused_and_counted(bench: Bench) -> None:
    with pytest.raises(codec.WireError, match="garbage"):
        bench.relay.accept(b"\xc1")
    bench.tick(2)
    assert bench.aggregator.errors() == {"batch of a caller: garbage": 1}


def test_rank_that_does_not_read_its_replies_is_still_served(bench: Bench) -> None:
    with bench.connect() as sock:
        for seq in range(2000):
            sock.send(rank_batch("a", seq, rows=1))
            if seq % 20 == 0:
                bench.relay.poll(1)
                bench.relay.poll()
        bench.until(lambda: len(bench.aggregator.seqs("a")) == 2000)
    assert bench.aggregator.errors()["reply not sent"] > 0


def test_last_packets_of_a_rank_that_read_no_reply_are_not_lost(bench: Bench) -> None:
    with bench.connect() as sock:
        sock.send(rank_batch("a", 0))
        bench.relay.poll(5)
        bench.relay.poll(5)  # its reply lies there unread: the kernel now resets the connection at the close
        sock.send(rank_batch("a", 1))
        sock.send(rank_batch("a", 2))
    bench.until(lambda: len(bench.aggregator.seqs("a")) == 3)
    assert bench.aggregator.seqs("a") == [0, 1, 2]


def test_endless_sender_holds_up_no_other_and_its_last_packets_are_read(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "_AT_ONCE", 4)
    with bench.connect() as sock:
        bench.relay.poll(5)
        for seq in range(6):
            sock.send(rank_batch("a", seq))
        bench.relay.poll(5)
        assert bench.relay._intake._processes["a"].seq == 3
        bench.relay.poll(5)
        assert bench.relay._intake._processes["a"].seq == 5
    run_rank(bench, [rank_batch("b", seq) for seq in range(10)], "die")
    bench.until(lambda: bench.aggregator.lost() == ["b"])
    assert bench.aggregator.seqs("b") == list(range(10))


V1_STEP = {"step": 1, "events": {"_traceml_internal:step_time": {"cpu": {"duration_ms": 9.0, "n_calls": 1}}}}
V1_ROWS = {"rank": 0, "sampler": "StepTimeSampler", "tables": {"StepTimeTable": [V1_STEP]}}


def test_rank_process_beyond_the_limit_is_refused_until_another_has_ended(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_intake, "MAX_PROCESSES", 2)
    for process in "ab":
        bench.relay.accept(rank_batch(process, 0))
    refusal = codec.encode(wire.RankReply(codec.VERSION, "c", -1, -1, refused={0: "too_many_processes"}))
    assert bench.relay.accept(rank_batch("c", 0)) == refusal
    with pytest.raises(codec.WireError, match="too_many_processes"):
        bench.relay.accept(msgspec.msgpack.encode(V1_ROWS))
    write_spool(bench.spool / "c.spool", [rank_batch("c", 0)])
    assert not bench.relay.flush(0)
    with bench.connect() as sock:
        sock.setblocking(False)
        bench.relay.poll(5)
        sock.send(rank_batch("c", 0))
        bench.relay.poll(5)
        assert sock.recv(1 << 16) == refusal
    bench.relay.accept(rank_batch("b", 1, final=True))
    bench.relay.accept(rank_batch("d", 0))
    bench.tick(2)
    assert {batch.process_id for batch in bench.aggregator.batches()} == {"a", "b", "d"}
    assert bench.aggregator.errors() == {
        "batch of a caller: too_many_processes": 2,
        "spool: too_many_processes": 1,
        "packet: too_many_processes": 1,
    }


def test_rows_of_a_refused_batch_are_dropped_in_the_ledger_and_the_rank_says_why(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_intake, "MAX_PROCESSES", 1)
    bench.relay.accept(rank_batch("a", 0))
    agent = RankAgent(Settings(session="s", interval=60.0), SocketChannel(str(bench.path)))
    for rows in (5, 0, 20):
        for _ in range(rows):
            agent.ring.push(agent.ring.accepted << SEGMENT_BITS, 0, [10] * N_STAGES)
        agent.tick()
        bench.tick(4)
        if not rows:  # two batches were refused: one of another process makes room
            bench.relay.accept(rank_batch("a", 1, final=True))
    agent.tick()
    bench.tick(4)
    with SessionFile(bench.path.parent / "session" / "session.sqlite") as file:
        process = next(one for one in file.processes() if one.process_id == agent.process_id)
    assert (process.produced, process.stored, process.dropped_agent) == (25, 20, 5)
    assert process.errors["batch refused: too_many_processes"] == 2
    assert check_ledger(bench.path.parent / "session")["in_flight"] == 0


def test_batch_that_cannot_be_read_is_refused_by_its_number(bench: Bench) -> None:
    bench.relay.accept(rank_batch("a", 0))
    bad = rank_batch("a", 1, strategy=5)
    reply = codec.decode(bench.relay.accept(bad), wire.RankReply)
    assert (reply.acked_seq, reply.refused) == (0, {1: "malformed"})
    for unknown in (b"", b"garbage", bad[:40]):
        with pytest.raises(codec.WireError, match="garbage"):
            bench.relay.accept(unknown)


def test_stacks_of_many_processes_go_in_several_packets(bench: Bench) -> None:
    bench.relay._intake.events += [wire.Event("stacks", 0, message="x" * 12_000) for _ in range(200)]
    bench.until(lambda: len(bench.aggregator.messages("stacks")) >= 200)
    assert len(bench.aggregator.messages("stacks")) == 200
    assert max(bench.aggregator.sizes) < codec.MAX_MESSAGE_BYTES // 2


RANK = """
import os, socket, sys, time
sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
sock.connect(sys.argv[1])
for data in sys.argv[2].split(","):
    sock.send(bytes.fromhex(data))
if "fork" in sys.argv:  # a data loader worker that outlives the rank and holds its connection
    if os.fork() == 0:
        time.sleep(600)
        os._exit(0)
if "wait" in sys.argv:
    sock.recv(1 << 16)
if "die" in sys.argv:
    os.kill(os.getpid(), 9)
"""


def run_rank(bench: Bench, batches: list[bytes], *how: str) -> None:
    """Run a rank in a process group of its own; returns when it has ended, unless it waits for a reply."""
    code = ",".join(data.hex() for data in batches)
    command = [sys.executable, "-c", RANK, str(bench.path), code, *how]
    process = subprocess.Popen(command, start_new_session=True)
    bench.started.append(process)
    if "wait" not in how:
        process.wait(240)


@pytest.mark.parametrize("when", ["wait", "at once"])
def test_killed_rank_is_lost_though_its_child_holds_the_connection(bench: Bench, when: str) -> None:
    run_rank(bench, [rank_batch("a", 0), rank_batch("a", 1)], "die", "fork", when)
    bench.until(lambda: bool(bench.aggregator.lost()))
    assert bench.aggregator.lost() == ["a"]
    assert bench.aggregator.seqs("a") == [0, 1]  # its last packets come before the news of its end


def test_rank_that_sent_its_final_batch_is_not_lost(bench: Bench) -> None:
    run_rank(bench, [rank_batch("a", 0, final=True)], "die")
    run_rank(bench, [rank_batch("b", 0)], "die")
    bench.until(lambda: bool(bench.aggregator.lost()))
    bench.tick(4)
    assert bench.aggregator.lost() == ["b"]


def test_rank_that_left_a_spool_file_is_not_lost(bench: Bench) -> None:
    write_spool(bench.spool / "a.spool", [rank_batch("a", 1, final=True)])
    run_rank(bench, [rank_batch("a", 0)])
    run_rank(bench, [rank_batch("b", 0)])
    bench.until(lambda: bool(bench.aggregator.lost()))
    bench.tick(4)
    assert bench.aggregator.lost() == ["b"]


def test_ended_rank_that_left_a_copy_of_what_the_relay_has_is_not_sent_again(bench: Bench) -> None:
    batches = [rank_batch("a", 0), rank_batch("a", 1, final=True)]
    write_spool(bench.spool / "a.spool", batches)
    run_rank(bench, batches)
    run_rank(bench, [rank_batch("b", 0)])
    bench.until(lambda: bool(bench.aggregator.lost()))
    thread, answers = flush(bench, 240)
    bench.until(lambda: not thread.is_alive())
    assert answers == [True] and not list(bench.spool.iterdir())
    assert bench.aggregator.forwarded("a") == bench.aggregator.seqs("a") == [0, 1]


def test_calling_process_that_is_killed_is_lost_as_well(bench: Bench) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    bench.started.append(process)
    who = RankIdentity(0, 0, 0, 1, 1, 1, "host", None, "job", 0, process.pid, "explicit")
    batch = codec.decode(rank_batch("a", 0), wire.RankBatch)
    bench.relay.accept(codec.encode(msgspec.structs.replace(batch, identity=who)))
    bench.relay.accept(rank_batch("a", 1))
    bench.tick(2)
    assert bench.aggregator.lost() == []
    process.kill()
    bench.until(lambda: bench.aggregator.lost() == ["a"])


def test_critical_errors_become_events_and_the_rest_of_a_flood_is_counted(bench: Bench) -> None:
    gpus = [GpuSample(n, None, None, None, None, xid=[79]) for n in range(8)]
    bench.aggregator.up = False
    for t in range(100):
        bench.sampler.sample = NodeSample(t, *[None] * 9, gpus=gpus)
        bench.tick()
    bench.aggregator.up = True
    bench.tick(400)
    xid_events = events(bench, "xid")
    counted = bench.aggregator.stored[-1].errors["event: no room"]
    assert (len(xid_events) + counted, xid_events[0].data["gpu"]) == (800, 0)
    assert max(len(message.events) for message in bench.aggregator.stored) <= 512


def events(bench: Bench, kind: str) -> list[wire.Event]:
    return [e for message in bench.aggregator.stored for e in message.events if e.kind == kind]


@pytest.mark.parametrize("code", ["import os; os.kill(os.getpid(), 11)", "import os; os._exit(7)"])
def test_exit_code_of_a_lost_process_is_read_before_its_parent_asks(bench: Bench, code: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", f"import sys; sys.stdin.read(); {code}"],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    bench.started.append(process)
    who = RankIdentity(0, 0, 0, 1, 1, 1, "host", None, "job", 0, process.pid, "explicit")
    batch = codec.decode(rank_batch("a", 0), wire.RankBatch)
    bench.relay.accept(codec.encode(msgspec.structs.replace(batch, identity=who)))
    assert process.stdin is not None
    process.stdin.close()
    bench.until(lambda: bool(events(bench, "process_ended")))
    assert events(bench, "process_ended")[0].data == {
        "process_id": "a",
        "exit_code": -11 if "kill" in code else 7,
    }


def test_command_goes_to_every_rank_until_it_is_withdrawn(bench: Bench) -> None:
    sock = bench.connect()
    sock.send(rank_batch("a", 0))
    bench.tick(2)
    assert reply(sock).commands == []
    go_on = bench.aggregator.hang()
    for seq in (1, 2):
        sock.send(rank_batch("a", seq))
        bench.tick(2)
    assert [reply(sock).commands for _ in range(2)][-1] == bench.aggregator.commands
    go_on()
    for seq in (3, 4):
        sock.send(rank_batch("a", seq))
        bench.tick(2)
    assert [reply(sock).commands for _ in range(2)][-1] == []
    assert events(bench, "stacks") == [], "it answers itself"


def test_rank_that_does_not_answer_is_inspected_from_outside_once(bench: Bench) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    bench.started.append(process)
    who = RankIdentity(0, 0, 0, 1, 1, 1, "host", None, "job", 0, process.pid, "explicit")
    batch = codec.decode(rank_batch("a", 0), wire.RankBatch)
    bench.relay.accept(codec.encode(msgspec.structs.replace(batch, identity=who)))
    os.kill(process.pid, signal.SIGSTOP)
    bench.now += 6
    bench.relay.accept(rank_batch("b", 0))
    bench.aggregator.hang()
    bench.until(lambda: bool(events(bench, "stacks")))
    bench.tick(8)
    (event,) = events(bench, "stacks")
    (command,) = bench.aggregator.commands
    assert event.data == {"dump": command.args["id"], "process_id": "a", "state": "stopped (SIGSTOP)"}


def ask_to_finish(bench: Bench, **fields: Any) -> tuple[socket.socket, wire.Finish]:
    """The launcher's side: send Finish; also returned as the aggregator is to see it."""
    sock = bench.connect()
    message = wire.Finish(codec.VERSION, 1, [wire.RankFailure(0, 0, 9, 1, 0, "boom")], **fields)
    sock.send(codec.encode(message))
    return sock, msgspec.structs.replace(message, node_id=NODE.node_id)


def signs(sock: socket.socket) -> list[wire.Finished]:
    """The replies that the launcher gets, up to the last."""
    answers = [codec.decode(sock.recv(1 << 16), wire.Finished)]
    while answers[-1].pending:
        answers.append(codec.decode(sock.recv(1 << 16), wire.Finished))
    return answers


def finished(sock: socket.socket) -> wire.Finished:
    return signs(sock)[-1]


def test_finish_reads_the_spool_flushes_writes_and_ends_the_actors(bench: Bench) -> None:
    bench.relay.accept(rank_batch("a", 0))
    write_spool(bench.spool / "a.spool", [rank_batch("a", 0), rank_batch("a", 1, final=True)])
    (bench.spool / "b.spool").write_bytes(b"\xff\xff\xff\x7fcut")
    sock, message = ask_to_finish(bench)
    bench.until(lambda: bench.relay.stopped)
    assert finished(sock) == wire.Finished(codec.VERSION, "written")
    assert bench.aggregator.finished == [message] * 2  # asked, and asked again when it was written
    assert bench.aggregator.seqs("a") == [0, 1]
    assert bench.aggregator.core.over
    assert not list(bench.spool.iterdir())
    sock.close()


def test_relay_asked_to_finish_leaves_its_rows_in_files_before_it_asks_the_aggregator(bench: Bench) -> None:
    bench.aggregator.hangs = True
    run_rank(bench, [rank_batch("a", 0), rank_batch("a", 1)], "die")  # it leaves none
    bench.until(lambda: "a" not in bench.relay._intake._processes)
    bench.relay.accept(rank_batch("b", 0))
    sock, _ = ask_to_finish(bench)
    for _ in range(3):
        bench.relay.poll(5)
    assert not bench.relay.stopped  # from here on it may hang, or be killed
    left = {path.name: len(read_spool(path)) for path in bench.spool.iterdir()}
    assert left == {"a.0.spool": 2, "b.0.spool": 1}
    sock.close()


def test_relay_without_room_for_files_still_hands_over(bench: Bench) -> None:
    bench.relay.accept(rank_batch("a", 0))
    bench.spool.rmdir()
    sock, _ = ask_to_finish(bench)
    bench.until(lambda: bench.relay.stopped)
    assert finished(sock).ok and bench.aggregator.seqs("a") == [0]
    assert bench.aggregator.errors() == {"spool: FileNotFoundError": 1}
    sock.close()


def test_finish_does_not_wait_for_the_commit_of_the_aggregator(bench: Bench) -> None:
    bench.relay.accept(rank_batch("a", 0))
    for _ in range(3):
        bench.now += wire.TICK_S
        bench.relay.poll()
    assert bench.aggregator.seqs("a") == []
    sock, _ = ask_to_finish(bench)
    for _ in range(20):
        bench.now += ASK_S / 10
        bench.relay.poll()
    assert bench.relay.stopped
    assert bench.aggregator.seqs("a") == [0]
    sock.close()


def test_finish_stores_everything_once_though_the_aggregator_is_killed(bench: Bench) -> None:
    for seq in range(3):
        bench.relay.accept(rank_batch("a", seq))
        bench.now += wire.TICK_S
        bench.relay.poll()
    sock, _ = ask_to_finish(bench)
    bench.relay.poll(5)
    bench.aggregator.kill()
    bench.tick()
    bench.aggregator.up = True
    bench.until(lambda: bench.relay.stopped)
    assert finished(sock).ok
    assert bench.aggregator.seqs("a") == [0, 1, 2]
    sock.close()


@pytest.mark.parametrize(
    ("began", "patience"), [(False, WORD_S), (True, WORD_S / 2)], ids=["starting", "stuck"]
)
def test_finish_without_an_aggregator_fails_and_keeps_rows_in_the_spool(
    bench: Bench, began: bool, patience: float
) -> None:
    if began:
        for seq in range(4):  # a reply says what of those before is stored
            bench.relay.accept(rank_batch("b", seq))
            bench.tick()
    bench.aggregator.hangs = True
    for seq in range(4):
        bench.relay.accept(rank_batch("a", seq))
        bench.tick(int(WORD_S / 4 / wire.TICK_S))
    write_spool(bench.spool / "a.0.spool", [rank_batch("a", 4, final=True)])
    sock, _ = ask_to_finish(bench)
    bench.relay.poll(5)
    bench.relay.poll(5)
    for sign in range(int(patience / SIGN_S)):  # whoever waits for the end is told that there is somebody
        assert codec.decode(sock.recv(1 << 16), wire.Finished).state == "waiting", sign
        assert not bench.relay.stopped
        bench.tick(int(SIGN_S / wire.TICK_S))
    bench.tick(2)
    answer = finished(sock)
    assert not answer.ok
    assert "did not answer" in answer.detail
    left = [codec.decode(frame, wire.RankBatch) for frame in read_spool(bench.spool / "a.0.spool")]
    assert [batch.seq for batch in left] == [0, 1, 2, 3, 4]
    sock.close()


def test_slow_report_is_waited_for_and_one_that_hangs_on_the_disk_is_not(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.relay.accept(rank_batch("a", 0))
    sock, _ = ask_to_finish(bench)
    monkeypatch.setattr(bench.aggregator.core.endings, "write_due", lambda: None)  # another thread is at it
    end = bench.aggregator.core.endings._session
    end.reporting = True
    bench.tick(int(3 * WORD_S / wire.TICK_S))
    assert not bench.relay.stopped
    end.reporting = False
    bench.tick(int(WORD_S / wire.TICK_S) + 2)
    assert bench.relay.stopped
    answers = signs(sock)
    assert [answer.state for answer in answers if answer.state != "waiting"][-2:] == ["writing", "failed"]
    sock.close()


def test_node_that_does_not_end_the_session_leaves_once_its_rows_are_stored(bench: Bench) -> None:
    bench.relay.accept(rank_batch("a", 0))
    sock, message = ask_to_finish(bench, stop=False, nodes=2)
    bench.until(lambda: bench.relay.stopped)
    assert finished(sock) == wire.Finished(codec.VERSION, "noted", waiting=1)
    assert bench.aggregator.finished == [message]
    assert bench.aggregator.seqs("a") == [0]
    assert not bench.aggregator.core.over
    sock.close()


def test_node_that_ends_the_session_waits_for_the_others(bench: Bench) -> None:
    sock, message = ask_to_finish(bench, nodes=2)
    bench.until(lambda: len(bench.aggregator.finished) >= 3)
    assert not bench.relay.stopped
    other = msgspec.structs.replace(message, node_id="other", stop=False)
    assert codec.decode(bench.aggregator.core.end(codec.encode(other)), wire.Finished).waiting == 0
    bench.until(lambda: bench.relay.stopped)
    assert finished(sock) == wire.Finished(codec.VERSION, "written")
    assert all(asked == message for asked in bench.aggregator.finished)
    assert bench.aggregator.core.over
    sock.close()


def test_node_that_ends_late_still_delivers_and_files_are_written_again(
    bench: Bench,
) -> None:
    first, later = SentRank(0, per_node=1), SentRank(1, per_node=1)
    other = SentRelay(1)
    bench.aggregator.core.ingest(other.message(later.batch(5)))
    bench.relay.accept(first.batch(5, final=True))
    sock, message = ask_to_finish(bench, nodes=2)
    started = bench.now
    while not bench.relay.stopped:
        bench.now += ASK_S / 2
        bench.aggregator.clock.tick(ASK_S / 2)
        bench.relay.poll()
    assert OTHERS_S < bench.now - started < LAUNCHER_S
    assert finished(sock) == wire.Finished(codec.VERSION, "written", "host-1", waiting=1)
    core, folder = bench.aggregator.core, bench.path.parent / "session"
    assert core.endings.left_behind and not core.over
    for _ in range(8):
        bench.aggregator.clock.tick(30)
        core.ingest(other.message(later.batch(10)))
        core.endings.write_due()
        assert not core.over
    core.ingest(other.message(later.batch(1, final=True)))
    left = msgspec.structs.replace(message, node_id="node-1", stop=False, exit_code=0)
    assert codec.decode(core.end(codec.encode(left)), wire.Finished).ok
    core.endings.write_due()
    assert core.over
    summary = json.loads((folder / "summary.json").read_bytes())
    assert (summary["ledger"]["stored"], summary["session"]["status"]) == (5 + 5 + 80 + 1, "failed")
    assert [event["message"] for event in summary["events"] if event["kind"] == "note"] == [
        "the files were written without host-1, still running then"
    ]
    sock.close()


def test_silent_node_is_not_waited_for_without_end(bench: Bench) -> None:
    bench.aggregator.core.ingest(SentRelay(1).message(SentRank(1, per_node=1).batch(5)))
    sock, _ = ask_to_finish(bench, nodes=2)
    bench.until(lambda: bench.relay.stopped)
    bench.aggregator.clock.tick(LATE_S - 1)
    assert not bench.aggregator.core.over
    bench.aggregator.clock.tick(2)
    assert bench.aggregator.core.over
    sock.close()


def test_restarted_aggregator_still_waits_for_the_missing_node(
    bench: Bench,
) -> None:
    other, later = SentRelay(1), SentRank(1, per_node=1)
    bench.aggregator.core.ingest(other.message(later.batch(5)))
    sock, message = ask_to_finish(bench, nodes=2)
    bench.until(lambda: bench.relay.stopped)
    bench.aggregator.kill()
    bench.aggregator.up = True
    assert bench.aggregator.core.endings.left_behind and not bench.aggregator.core.over
    left = msgspec.structs.replace(message, node_id="node-1", stop=False)
    bench.aggregator.core.ingest(other.message(later.batch(1, final=True)))
    bench.aggregator.core.end(codec.encode(left))
    bench.aggregator.core.endings.write_due()
    assert bench.aggregator.core.over
    bench.aggregator.kill()
    assert bench.aggregator.core.over  # so that it ends what is left of the session
    sock.close()


def test_node_without_an_aggregator_leaves_in_time_and_keeps_its_rows(bench: Bench) -> None:
    bench.aggregator.kill()
    bench.relay.accept(rank_batch("a", 0, final=True))
    sock, _ = ask_to_finish(bench, stop=False, nodes=2)
    bench.relay.poll(5)
    bench.relay.poll(5)
    bench.tick(int(WORD_S / wire.TICK_S) + 2)
    assert not finished(sock).ok
    assert len(read_spool(bench.spool / "a.0.spool")) == 1
    assert bench.relay.stopped
    sock.close()


def flush(bench: Bench, timeout_s: float) -> tuple[threading.Thread, list[bool]]:
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(bench.relay.flush(timeout_s)))
    thread.start()
    return thread, answers


def test_flush_returns_when_all_is_stored_including_the_spool(bench: Bench) -> None:
    bench.relay.accept(rank_batch("a", 0))
    write_spool(bench.spool / "b.spool", [rank_batch("b", 0), rank_batch("b", 1, final=True)])
    thread, answers = flush(bench, 240)
    bench.until(lambda: not thread.is_alive())
    assert answers == [True]
    assert (bench.aggregator.seqs("a"), bench.aggregator.seqs("b")) == ([0], [0, 1])
    assert not list(bench.spool.iterdir())  # so that nothing of it comes a second time
    assert not bench.relay.stopped


def test_unconfirmed_flush_returns_false_and_leaves_the_spool(bench: Bench) -> None:
    bench.aggregator.kill()
    write_spool(bench.spool / "b.spool", [rank_batch("b", 0)])
    thread, answers = flush(bench, 0.3)
    bench.until(lambda: not thread.is_alive())
    assert answers == [False]
    assert list(bench.spool.iterdir())


def test_relay_told_to_end_leaves_its_rows_in_files_before_it_hands_over(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    replace_time(monkeypatch, relay_module, all_threads=True, monotonic=lambda: now[0])
    bench.aggregator.hangs = True
    bench.relay.accept(rank_batch("a", 0))
    bench.tick()
    thread = threading.Thread(target=lambda: bench.relay.end(0.5))
    thread.start()
    while not list(bench.spool.glob("*.spool")):
        assert thread.is_alive()
    assert not bench.relay.stopped  # whoever waits for it may have it killed now
    now[0] += 0.5
    thread.join(240)
    assert [path.name for path in bench.spool.iterdir()] == ["a.0.spool"]


@pytest.mark.parametrize("dies", [False, True], ids=["relay hangs", "relay and aggregator are killed"])
def test_rows_that_only_the_relay_had_taken_at_the_end_are_stored_from_the_copy(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, dies: bool
) -> None:
    """The agent ends in the second between its relay's reply and the aggregator's commit."""
    monkeypatch.setattr(rank_agent, "CLOSE_WAIT_S", 240.0)  # until it has the reply
    settings = Settings(session="s", interval=60.0)
    agent = RankAgent(settings, SocketChannel(str(bench.path)), spool=str(bench.spool))
    for rows in (5, 20):
        for _ in range(rows):
            agent.ring.push(agent.ring.accepted << SEGMENT_BITS, 0, [10] * N_STAGES)
        agent.tick()
        bench.tick(4 if rows == 5 else 0)
    assert bench.aggregator.core._writer.processes[agent.process_id].stored == 5
    agent.start()
    ending = threading.Thread(target=agent.close)
    ending.start()
    while ending.is_alive():
        bench.relay.poll(0.01)
    assert not agent._outbox.unacked()  # the relay has it all
    if dies:
        bench.now += wire.TICK_S
        bench.relay.poll()  # sent, and taken
    bench.aggregator.kill()
    folder = bench.path.parent / "session"
    finish_offline(folder, Settings(), wire.Finish(codec.VERSION, 0), bench.spool)
    assert check_ledger(folder)["stored"] == 25
    with SessionFile(folder / "session.sqlite") as file:
        (process,) = file.processes()
        assert process.final


def test_ended_relay_removes_its_socket_and_its_folder_if_empty() -> None:
    for left in (False, True):
        folder = Path(tempfile.mkdtemp(prefix="tr-"))
        relay = RelayCore(
            folder / "relay.sock", NODE, Aggregator(folder), NoSamples(), Settings(), spool=folder
        )
        if left:
            write_spool(folder / "a.0.spool", [rank_batch("a", 0)])
        relay.close()
        relay.close()
        assert folder.exists() == left
        assert not (folder / "relay.sock").exists()
        shutil.rmtree(folder, ignore_errors=True)


def test_spool_is_read_once_and_as_far_as_possible() -> None:
    folder = Path(tempfile.mkdtemp(prefix="tr-"))
    bench = Bench(folder, spool=folder)
    write_spool(folder / "a.spool", [rank_batch("a", 0), b"\xc1junk", rank_batch("a", 1)])
    (folder / "b.spool").mkdir()
    bench.tick(40)
    assert bench.aggregator.seqs("a") == [0, 1]
    assert [path.name for path in folder.glob("*.spool")] == ["b.spool"]
    bench.relay.accept(rank_batch("c", 0))
    bench.tick(2)
    assert bench.aggregator.errors() == {"spool: garbage": 1, "spool: IsADirectoryError": 1}
    bench.close()
    shutil.rmtree(folder)


def test_relay_whose_aggregator_answers_is_not_unused(bench: Bench) -> None:
    bench.relay.accept(rank_batch("a", 0))
    bench.tick()
    bench.now += 1000
    bench.relay.poll()  # the answer to that batch
    assert not bench.relay.stopped
    bench.aggregator.up = False
    bench.now += 1000
    bench.relay.poll()
    assert bench.relay.stopped


def test_caller_that_cannot_be_watched_does_not_keep_an_unused_relay(bench: Bench) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(240)
    who = RankIdentity(0, 0, 0, 1, 1, 1, "host", None, "job", 0, ended.pid, "explicit")
    batch = codec.decode(rank_batch("a", 0), wire.RankBatch)
    bench.relay.accept(codec.encode(msgspec.structs.replace(batch, identity=who)))
    bench.tick(2)
    assert not bench.relay.stopped and bench.aggregator.lost() == []
    bench.now += 1000
    bench.tick()
    assert bench.relay.stopped


def test_unused_relay_ends_itself_but_not_while_a_rank_is_connected(bench: Bench) -> None:
    with bench.connect() as sock:
        sock.send(rank_batch("a", 0, final=True))
        bench.until(lambda: bench.aggregator.seqs("a") == [0])
        bench.now += 1000
        bench.tick()
        assert not bench.relay.stopped
    bench.relay.poll(5)
    bench.now += 1000
    bench.tick()
    assert bench.relay.stopped


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("send"), st.sampled_from("ab")),
        st.tuples(st.sampled_from(["turn", "commit", "kill", "back", "hang", "on"]), st.just("")),
    ),
    max_size=120,
)


@settings(max_examples=60, deadline=None)
@given(ACTIONS)
def test_rows_are_each_stored_once_or_counted_as_dropped(actions: list[tuple[str, str]]) -> None:
    folder = Path(tempfile.mkdtemp(prefix="tr-"))
    bench = Bench(folder, limit=20_000)
    sent: Counter[str] = Counter()
    try:
        for action, process in actions:
            if action == "send":
                bench.relay.accept(rank_batch(process, sent[process], pad=6000))
                sent[process] += 1
            elif action == "turn":
                bench.now += wire.TICK_S
                bench.relay.poll()
            elif action == "commit":
                bench.aggregator.commit()
            elif action == "kill":
                bench.aggregator.kill()
            elif action == "back":
                bench.aggregator.up = True
            else:
                bench.aggregator.hangs = action == "hang"
        bench.aggregator.up, bench.aggregator.hangs = True, False
        bench.tick(int(2 * RESEND_S / wire.TICK_S) + 20)
        for process, count in sent.items():
            seqs = bench.aggregator.seqs(process)
            assert seqs == sorted(set(seqs))
            assert 3 * len(seqs) + bench.aggregator.dropped().get(process, 0) == 3 * count
    finally:
        bench.close()
        shutil.rmtree(folder)


@pytest.mark.parametrize("limit", [1 << 20, 40_000])
def test_small_batches_go_in_packets_that_are_accepted(tmp_path: Path, limit: int) -> None:
    """And so do the counts of many rank processes of which rows were dropped."""
    bench = Bench(tmp_path, limit=limit)
    processes = [f"s{number}" for number in range(2 * codec.MAX_ITEMS + 1)]
    for process in processes:
        bench.relay.accept(rank_batch(process, 0, rows=1))
    bench.tick(40)
    dropped = bench.aggregator.dropped()
    stored = [batch.process_id for batch in bench.aggregator.batches()]
    assert sorted([*stored, *dropped]) == sorted(processes)
    assert len(dropped) > codec.MAX_ITEMS if limit < 1 << 20 else not dropped
    assert max(len(message.batches) for message in bench.aggregator.stored) <= codec.MAX_ITEMS
    bench.close()


@given(st.lists(st.integers(1, 400), max_size=60), st.integers(200, 2000))
def test_outbox_never_holds_more_than_its_limit(sizes: list[int], limit: int) -> None:
    box = Outbox(limit)
    for number, size in enumerate(sizes):
        box.add("a", number, 1, secrets.token_bytes(size))
        if number % 3 == 0 and box.may_pack and box.waiting:
            box.pack(b"".join(box.select()))
            box.sent()
            if number % 2 == 0:
                box.confirm(box.next_seq - 1)
                assert box.stored["a"] == number
        packed, waiting = box.salvage()
        assert sum(map(len, packed)) + sum(map(len, waiting)) <= limit
