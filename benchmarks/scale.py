"""
One real aggregator under the load of many nodes: `python benchmarks/scale.py [--seconds 40] [RANKS …]`.

Relays are simulated: 8 ranks each, 5 steps a second, and one rank late in `data` from the middle on. At the
end of each second all relays send the data of that second, as in a large job. With `--calls N` they send N
messages a second, one after the other. `--rows` leaves out what ranks send in addition to rows (identity,
samples, spans, the agent's own cost). With `--device` each row is on a device's clock, with its host's row
and lead. With `--memory` each rank sends a sample of its memory each second. Printed for each size: CPU and
memory of the aggregator's process, how long a message waits for its answer, the time until the late rank is
named, what was lost, and how far the player fell behind.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import numpy as np
import ray
from figures import machine, publish
from ray_cluster import actor_processes, fake_cluster

from traceml_ray.identity import RankIdentity
from traceml_ray.live_session import Session
from traceml_ray.ray.actors import ActorConfig
from traceml_ray.ray.aggregator import ensure_aggregator
from traceml_ray.settings import Settings
from traceml_ray.signals.kinds import encoded
from traceml_ray.signals.memory.records import MemorySample
from traceml_ray.stages import (
    DATA,
    FLAG_DEVICE_CLOCK,
    FORWARD,
    LEAD_BYTES,
    N_STAGES,
    POST_SYNC,
    SEGMENT_BITS,
    SYNC_WAIT,
)
from traceml_ray.wire import codec
from traceml_ray.wire import messages as wire

SIZES = (8, 64, 512, 2048, 8192)
PER_NODE, STEPS_A_SECOND = 8, 5
ON_TIME = 2
"""Number of steps of a second before the late rank is late, so that it begins within a second."""
MS = 1_000_000
ROW = np.array([5, 10, 1, 60, 100, 24]) * MS
"""Row of a rank that is not late, in ns."""
HOST_ROW = np.array([3, 10, 1, 8, 12, 166]) * MS
"""
The same row on the host's clock, where ROW is on the device's: the host queues work and waits at
the end.
"""


class Node:
    """One relay with its ranks."""

    def __init__(self, number: int, ranks: int, device: bool, memory: bool) -> None:
        self.device, self.memory = device, memory
        self.identity = wire.NodeIdentity(
            f"{number:056x}", f"node-{number}", f"10.0.{number >> 8}.{number & 255}"
        )
        self.seq = self.second = 0
        self.who = [
            RankIdentity(
                number * PER_NODE + local, local, number, ranks, min(PER_NODE, ranks), -(-ranks // PER_NODE),
                self.identity.hostname, self.identity.node_id, "scale", 0, 1000 + local, "torchrun",
            )
            for local in range(min(PER_NODE, ranks))
        ]  # fmt: skip

    def messages(
        self, late: int | None, rng: np.random.Generator, rows_only: bool, on_time: int, calls: int
    ) -> list[bytes]:
        """
        Return the messages with which this relay sends one second of steps. `late` is the late rank, which is
        still on time in the first `on_time` steps.
        """
        first, self.second = self.second * STEPS_A_SECOND, self.second + 1
        keys = (np.arange(first, first + STEPS_A_SECOND, dtype="<i8") << SEGMENT_BITS).tobytes()
        flags, batches = bytes([FLAG_DEVICE_CLOCK * self.device] * STEPS_A_SECOND), []
        for identity in self.who:
            rows = np.tile(ROW, (STEPS_A_SECOND, 1)) + rng.integers(0, MS, (STEPS_A_SECOND, N_STAGES))
            if late is not None:
                rows[on_time:, DATA if identity.global_rank == late else SYNC_WAIT] += 60 * MS
            batch = wire.RankBatch(
                codec.VERSION, f"{identity.global_rank:016x}", self.second, time.time_ns(),
                first + STEPS_A_SECOND, 0, first, keys, flags,
                rows.astype("<i8").tobytes(), None if rows_only and self.second > 1 else identity,
                wire.OpenStage(first + STEPS_A_SECOND, FORWARD, 0),
                **({} if rows_only else self._more(first)),
                **(self._host_part(rows) if self.device else {}),
            )  # fmt: skip
            batches.append(codec.encode(batch))
        return [self._message(batches[number::calls]) for number in range(calls)]

    def _host_part(self, rows: Any) -> dict[str, Any]:
        """
        Return the hosts' rows and leads for device rows. A host is late where its device waits
        for data.
        """
        more = rows - ROW
        hosts = np.tile(HOST_ROW, (STEPS_A_SECOND, 1)) + more // 2
        hosts[:, DATA] += more[:, DATA] - more[:, DATA] // 2
        leads = np.zeros((STEPS_A_SECOND, LEAD_BYTES), np.uint8)
        leads[:, 0] = (more[:, DATA] > 10 * MS) << DATA
        return {"host_rows": hosts.astype("<i8").tobytes(), "leads": leads.tobytes()}

    def _message(self, batches: list[bytes]) -> bytes:
        self.seq += 1
        name = self.identity.node_id[-16:]
        message = wire.RelayBatch(codec.VERSION, self.identity, name, self.seq, time.time_ns(), batches)
        return codec.encode(message)

    def _more(self, first: int) -> dict[str, Any]:
        """Return what a rank under DDP sends each second in addition to rows."""
        step, now = first + STEPS_A_SECOND, time.time_ns()
        spans = [
            wire.SpanSum(name, stage, STEPS_A_SECOND, 5 * MS, MS, first, step - 1)
            for name, stage in (("optimizer", POST_SYNC), ("all_reduce", SYNC_WAIT))
        ]
        return {
            "process": wire.ProcessSample(now, 99.0, 1 << 30, 20, self.second << 20, self.second << 20),
            "spans": spans,
            "overhead": wire.Overhead(
                self.second * 50_000, self.second * MS, self.second * 1000 * MS, self.second * 700
            ),
            "strategy": "ddp",
            "records": encoded([self._memory(step, now)]) if self.memory else {},
        }

    def _memory(self, step: int, now: int) -> MemorySample:
        """Return a sample of a rank on a device whose allocator's memory varies a little."""
        used = [(30 << 30) + (self.second * 7919 % 64 << 20) + n for n in range(5)]
        allocator = (*used, 0, 0, used[1], 4 * used[0], 80 << 30)
        return MemorySample(now, step, 0, *allocator, 2 << 30, None, 1 << 40, 64 << 30)


def collect(sent: deque[tuple[float, Any]], waits: list[float], timeout_s: float) -> None:
    """Wait a moment for the oldest answer, and record how long it took."""
    if not sent:
        time.sleep(timeout_s)
    elif ray.wait([sent[0][1]], timeout=timeout_s)[0]:
        when, ref = sent.popleft()
        ray.get(ref)
        waits.append(time.monotonic() - when)


def run(ranks: int, seconds: int, calls: int, rows_only: bool, device: bool, memory: bool) -> str:
    """Play one size; return its row of the table."""
    rng, late_from = np.random.default_rng(0), seconds // 2
    with tempfile.TemporaryDirectory() as out:
        config = ActorConfig(f"scale-{ranks}", Settings(session=f"scale-{ranks}", out=out))
        aggregator = ensure_aggregator(config, ray.get_runtime_context().get_node_id())
        session = Session(config.session, aggregator)
        [process] = actor_processes("Aggregator")
        nodes = [Node(number, ranks, device, memory) for number in range(-(-ranks // PER_NODE))]
        late, named_after = ranks - 1, None
        waits: list[float] = []
        sent: deque[tuple[float, Any]] = deque()
        began, cpu = time.monotonic(), sum(process.cpu_times()[:2])
        asked = 0.0
        for second in range(seconds):
            rank = late if second >= late_from else None
            on_time = ON_TIME if second == late_from else 0
            made = [node.messages(rank, rng, rows_only, on_time, calls or 1) for node in nodes]
            messages = [message for number in zip(*made, strict=True) for message in number]
            for index, message in enumerate(messages):
                due = began + second + 1 + (index / len(messages) if calls else 0)
                while (left := due - time.monotonic()) > 0:
                    collect(sent, waits, min(left, 0.002))
                    if named_after is None and second > late_from and time.monotonic() - asked > 0.2:
                        verdict, asked = session.verdict(), time.monotonic()
                        if verdict and (verdict.label, verdict.rank) == ("straggler", late):
                            named_after = asked - began - late_from - ON_TIME / STEPS_A_SECOND
                sent.append((time.monotonic(), aggregator.ingest.remote(message)))
                while len(sent) > 2048:
                    collect(sent, waits, 0.1)
        ray.get([ref for _, ref in sent])
        elapsed = time.monotonic() - began
        used = (sum(process.cpu_times()[:2]) - cpu) / elapsed
        memory = process.memory_info().rss / 2**20
        time.sleep(2)
        ledger = session.status().ledger
        session.stop(20)
    lost = len(nodes) * min(PER_NODE, ranks) * seconds * STEPS_A_SECOND - ledger.stored
    waits_ms = np.percentile(np.array(waits) * 1e3, [50, 99])
    named = "not named" if named_after is None else f"{named_after:.1f} s"
    return (
        f"| {ranks} | {used:.3f} | {memory:.0f} MiB | {waits_ms[0]:.1f} / {waits_ms[1]:.0f} ms "
        f"| {named} | {lost} | {elapsed - seconds - bool(calls):+.1f} s |"
    )


def main() -> None:
    """Play each size in turn."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "ranks", type=int, nargs="*", default=SIZES, help="numbers of ranks, each measured separately"
    )
    parser.add_argument("--seconds", type=int, default=40, help="time of each size, s (default: 40)")
    parser.add_argument(
        "--calls",
        type=int,
        default=0,
        help="send N messages a second, one after the other; 0: all at the end of each second",
    )
    parser.add_argument("--device", action="store_true", help="send rows of a device's clock")
    parser.add_argument(
        "--memory", action="store_true", help="send a memory sample of each rank every second"
    )
    parser.add_argument("--rows", action="store_true", help="send nothing but rows")
    args = parser.parse_args()
    rows = "rows of a device's clock" if args.device else "rows of the CPU's clock"
    print(f"{machine()}\n{STEPS_A_SECOND} steps/s, {args.seconds} s each, {rows}\n")
    head = ("ranks", "cores used", "memory", "answer p50 / p99", "named after", "rows lost", "player behind")
    print(f"| {' | '.join(head)} |")
    print("|---|---|---|---|---|---|---|")
    rows_of_table = []
    with fake_cluster(nodes=1, cpus=1):
        for ranks in args.ranks:
            line = run(ranks, args.seconds, args.calls, args.rows, args.device, args.memory)
            print(line, flush=True)
            rows_of_table.append([cell.strip() for cell in line.strip("| ").split("|")])
    publish("scale_device" if args.device else "scale", head, rows_of_table)


if __name__ == "__main__":
    main()
