"""Files of NCCL Inspector: found among the files of a rank, followed as they grow, bounded, and counted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from inspector_lines import line, pair

from traceml_ray.signals.collectives import inspector
from traceml_ray.signals.collectives.inspector import InspectorFiles, add_line
from traceml_ray.signals.collectives.judge import OfRank, collective_times
from traceml_ray.signals.collectives.records import CallTimes
from traceml_ray.signals.collectives.sums import CallSums

MIB = 1 << 20
CANNOT = "collectives: lines of NCCL Inspector that cannot be read"


def summed(*lines: bytes) -> list[CallTimes]:
    sums = CallSums("inspector")
    for one in lines:
        add_line(sums, one)
    return sums.due(0.0, True)


def test_line_is_a_call_with_its_number_time_and_size() -> None:
    (record,) = summed(*(line(7 + n, 61_974) for n in range(3)))
    assert (record.source, record.op, record.group_size) == ("inspector", "all_reduce", 2)
    assert record.process_group == "0x7f8c496ae9f661"
    assert (record.calls, record.timed, record.bytes) == (3, 3, 3 * 64 * MIB)
    assert [(one.step, one.ns) for one in record.samples] == [
        (7, 61_974_000),
        (8, 61_974_000),
        (9, 61_974_000),
    ]
    assert record.description == ""


def test_line_of_an_older_version_and_one_with_a_trace_are_read() -> None:
    for one in (line(1, 50, name=None, source=None), line(1, 50, traced=32), line(1, 50, name="DP Group 0")):
        (record,) = summed(one)
        assert record.timed == 1
    assert record.description == "DP Group 0"


def test_size_is_that_of_all_ranks() -> None:
    """NCCL Inspector writes the size of each rank's part, as NCCL is called."""
    gathered, scattered, reduced = (
        summed(line(1, 50, coll=coll, size=MIB, ranks=8))[0]
        for coll in ("AllGather", "ReduceScatter", "AllReduce")
    )
    assert (gathered.bytes, scattered.bytes, reduced.bytes) == (8 * MIB, 8 * MIB, MIB)
    assert (gathered.op, scattered.op) == ("all_gather", "reduce_scatter")


def test_bandwidth_is_that_of_nccl_inspector_where_no_rank_waits() -> None:
    """The example of its documentation: 16 GiB in 61,974 µs on 8 ranks are 485.1 GB/s."""
    lines = [line(1 + n, 61_974, size=17_179_869_184, ranks=8) for n in range(20)]
    records = [OfRank(rank, "a", *summed(*lines)) for rank in range(8)]
    (kind,) = collective_times(records).kinds
    assert kind.algorithm_gb_per_s == pytest.approx(277.210914, rel=1e-6)
    assert kind.bus_gb_per_s == pytest.approx(485.119099, rel=1e-6)
    assert kind.calls_per_step is None


def test_send_receive_and_launches_have_no_time() -> None:
    (sent,) = summed(pair(1, 40))
    assert (sent.op, sent.calls) == ("send", 1)
    (launched,) = summed(line(1, 40, source="collective_cpu"))
    assert (launched.calls, launched.timed) == (1, 0)
    (unknown,) = summed(line(1, 40, coll="All2All"))
    assert unknown.bytes == 0  # its size is not defined


# -- files ---------------------------------------------------------------------------------------

_WRITER = """
import os, sys
path = sys.argv[1] + f"/host-pid{os.getpid()}.log"
file = open(path, "wb", buffering=0)
print(path, flush=True)
for length in sys.stdin:
    file.write(bytes.fromhex(length.strip()))
    print("done", flush=True)
"""


class Rank:
    """A process that has a file open, as the plugin has."""

    def __init__(self, folder: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-S", "-c", _WRITER, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.path = Path(self.process.stdout.readline().strip())

    def write(self, data: bytes) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(data.hex() + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


class Time:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def drained(files: InspectorFiles) -> dict[str, int]:
    """Poll; return the number of calls by rank process."""
    files.poll()
    return {name: sum(one.calls for one in records) for name, records in files.drain().items()}


def test_file_is_found_followed_and_read_to_its_end(tmp_path: Path) -> None:
    rank, clock = Rank(tmp_path), Time()
    files = InspectorFiles(clock)
    files.follow("r", rank.process.pid)
    rank.write(line(1, 50))
    assert drained(files) == {}  # not searched yet
    clock.now = 5.0
    assert drained(files) == {"r": 1}
    rank.write(line(2, 50) + line(3, 50)[:40])
    clock.now = 7.0
    assert drained(files) == {} and not files.waiting  # records are sent less often
    clock.now = 10.0
    assert drained(files) == {"r": 2}
    rank.write(line(3, 50)[40:] + line(4, 50))
    rank.end()
    files.ended("r")
    assert drained(files) == {"r": 4}
    assert files._processes == {} and files.errors == {}


def test_all_records_are_handed_over_at_the_end(tmp_path: Path) -> None:
    rank, files = Rank(tmp_path), InspectorFiles(Time())
    files.follow("r", rank.process.pid)
    rank.write(line(1, 50))
    files.read_once_more(0.0)
    assert files.waiting and drained(files) == {"r": 1}
    rank.write(line(2, 50))
    files.read_once_more(0.0)
    assert drained(files) == {"r": 2}
    rank.end()
    files.close()


def test_process_without_such_a_file_is_searched_ever_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Time()
    files = InspectorFiles(clock)
    process = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    files.follow("r", process.pid)
    searched = []
    search = files._search
    monkeypatch.setattr(files, "_search", lambda one, now: (searched.append(now), search(one, now)))
    for second in range(0, 3600, 2):
        clock.now = float(second)
        files.poll()
    process.kill()
    process.communicate()
    assert 10 < len(searched) < 25 and searched[0] == 6.0


def test_lines_that_cannot_be_read_are_counted_and_the_others_are_read(tmp_path: Path) -> None:
    rank, clock = Rank(tmp_path), Time()
    files = InspectorFiles(clock)
    files.follow("r", rank.process.pid)
    clock.now = 5.0
    rank.write(
        line(1, 50) + b"{}\n" + b"\n" + b'{"header":{"id":"0x1","n_ranks":-1}}\n' + b"[" * 9000 + b"\n"
    )
    rank.write(line(2, -5) + line(3, 50))
    assert drained(files) == {"r": 2}
    assert files.errors == {CANNOT: 4}
    rank.write(b"x" * (inspector._LINE_BYTES + 1))
    clock.now = 20.0
    assert drained(files) == {}
    assert files.errors == {CANNOT: 5}
    rank.end()
    files.close()


def test_log_of_another_program_is_no_error(tmp_path: Path) -> None:
    rank, clock = Rank(tmp_path), Time()
    files = InspectorFiles(clock)
    files.follow("r", rank.process.pid)
    clock.now = 5.0
    rank.write(b"starting\nlistening on port 8080\n")
    assert drained(files) == {} and files.errors == {}
    rank.end()
    files.close()


def test_what_is_left_too_far_behind_is_skipped_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = line(1, 50)
    monkeypatch.setattr(inspector, "_BACKLOG_BYTES", 100 * len(one))
    monkeypatch.setattr(inspector, "_POLL_BYTES", 20 * len(one))
    monkeypatch.setattr(inspector, "_PIECE_BYTES", 10 * len(one))
    monkeypatch.setattr(inspector, "_LINE_BYTES", 2 * len(one))
    rank, clock = Rank(tmp_path), Time()
    files = InspectorFiles(clock)
    files.follow("r", rank.process.pid)
    clock.now = 5.0
    rank.write(one)
    assert drained(files) == {"r": 1}
    rank.write(one * 500)
    clock.now = 20.0
    assert drained(files) == {"r": 1 + 20}
    assert files.errors == {"collectives: bytes of NCCL Inspector skipped": 480 * len(one)}  # no line was cut
    rank.write(one * 500 + one[:30])
    clock.now = 40.0
    assert drained(files) == {"r": 21 + 19}  # a line that was cut is skipped as a whole
    assert files.errors == {"collectives: bytes of NCCL Inspector skipped": 961 * len(one)}
    rank.end()
    files.close()


def test_thread_reads_and_ends(tmp_path: Path) -> None:
    rank, files = Rank(tmp_path), InspectorFiles(interval=600)
    files.start()
    rank.write(line(1, 50))
    files.follow("r", rank.process.pid)
    files.read_once_more(60.0)
    assert drained(files) == {"r": 1}
    files.close()
    assert files._polling.thread is not None
    files._polling.thread.join(240)
    assert not files._polling.thread.is_alive()
    rank.end()
