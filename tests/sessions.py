"""Hand-made sessions: ranks, their batches, and a relay that sends them."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from traceml_ray.analysis.thresholds import Thresholds
from traceml_ray.document.json import as_json
from traceml_ray.identity import RankIdentity
from traceml_ray.monitor.aggregator import AggregatorCore
from traceml_ray.ray.actor_calls import MAX_IN_FLIGHT
from traceml_ray.ray.actors import ActorConfig
from traceml_ray.ray.aggregator import Aggregator
from traceml_ray.ray.membership import Membership
from traceml_ray.reports.answers import QUESTIONS, Answers
from traceml_ray.reports.summary import summarize
from traceml_ray.settings import Settings
from traceml_ray.signals.kind import Kind, R
from traceml_ray.signals.kinds import KINDS
from traceml_ray.signals.nodes.records import NodeSample
from traceml_ray.stages import FLAG_EXCLUDED, SEGMENT_BITS
from traceml_ray.store import query
from traceml_ray.store.results import LiveVerdict
from traceml_ray.store.session_file import SessionFile
from traceml_ray.store.summary_shape import Summary, plain, to_builtins
from traceml_ray.wire import codec
from traceml_ray.wire import messages as wire
from traceml_ray.wire.codec import encode_part

SECOND = 1_000_000_000
MS = 1_000_000


class Clock:
    """A wall clock that stands still until a test moves it."""

    def __init__(self) -> None:
        self.now = 1_700_000_000 * SECOND

    def __call__(self) -> int:
        return self.now

    def timer(self) -> float:
        """Return the same time in seconds, for code that measures durations: here nothing takes time."""
        return self.now / SECOND

    def tick(self, seconds: float = 1.0) -> None:
        self.now += int(seconds * SECOND)


def identity(
    rank: int, world: int = 2, *, per_node: int = 8, attempt: int = 0, pid: int = 0, **other: Any
) -> RankIdentity:
    """Return a rank of job `job` as torchrun starts it. `other`: fields of RankIdentity."""
    node = rank // per_node
    local = min(world, per_node)
    identity = RankIdentity(
        rank, rank % per_node, node, world, local, -(-world // per_node), f"host-{node}", None, "job",
        attempt, pid or 1000 + rank + 100 * attempt, "torchrun",
    )  # fmt: skip
    return msgspec.structs.replace(identity, **other)


class Rank:
    """The agent of one rank. It sends `rows` ms per step, in batches with consecutive numbers."""

    def __init__(self, number: int, world: int = 2, *, process_id: str | None = None, **who: Any) -> None:
        self.identity = identity(number, world, **who)
        job = "" if self.identity.job_id == "job" else self.identity.job_id
        self.process_id = process_id or f"{job}{self.identity.attempt:08x}{number:08x}"
        self.seq = -1
        self.produced = 0
        self.dropped = 0

    def batch(self, steps: int = 1, ms: list[float] | None = None, **fields: Any) -> bytes:
        """
        Return the next batch, with `steps` rows of `ms` (default: a balanced 10 ms step). `fields` whose
        names are kinds of records (`memory`, `work`, …) are lists of such records.
        """
        row = np.array([1, 2, 0, 3, 3, 1] if ms is None else ms) * MS
        first = self.produced
        keys = np.arange(first, first + steps, dtype="<i8") << SEGMENT_BITS
        flags = np.zeros(steps, np.uint8)
        if first == 0 and steps:
            flags[0] = FLAG_EXCLUDED
        self.produced += steps
        self.seq += 1
        default: dict[str, Any] = {"identity": self.identity, "sent_ns": 0, "first_row": first}
        columns = {"keys": keys.tobytes(), "flags": flags.tobytes()}
        rows = np.tile(row.astype("<i8"), (steps, 1)).tobytes()
        counts = {"seq": self.seq, "produced": self.produced, "dropped": self.dropped}
        default.update(columns, rows=rows, **counts)
        return codec.encode(
            wire.RankBatch(v=codec.VERSION, process_id=self.process_id, **{**default, **with_records(fields)})
        )


def with_records(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the `fields` of a message, with kinds of records converted to their form in the message."""
    records = {
        name: [encode_part(one) for one in fields[name]] for name in KINDS.keys() & fields if fields[name]
    }
    rest = {name: value for name, value in fields.items() if name not in KINDS}
    return {**rest, "records": {**records, **fields.get("records", {})}} if records else rest


def records_of(batch: wire.RankBatch | wire.RelayBatch, kind: Kind[R]) -> list[R]:
    """Return the records of one kind in a message."""
    return [kind.decode(raw) for raw in batch.records.get(kind.name, ())]


class Relay:
    """The relay of one node. It numbers its messages and remembers what is confirmed."""

    def __init__(self, node: int = 0, incarnation: str | None = None) -> None:
        self.node = wire.NodeIdentity(f"node-{node}", f"host-{node}", f"10.0.0.{node + 1}")
        self.incarnation = incarnation or f"relay-{node}"
        self.seq = 0

    def message(self, *batches: bytes, seq: int | None = None, sent_ns: int = 0, **fields: Any) -> bytes:
        """
        Return the next message. `fields` whose names are kinds of records (`node`) are lists of
        such records.
        """
        if seq is None:
            self.seq += 1
        return codec.encode(
            wire.RelayBatch(
                v=codec.VERSION, node=self.node, incarnation=self.incarnation, sent_ns=sent_ns,
                seq=self.seq if seq is None else seq, batches=list(batches), **with_records(fields),
            )
        )  # fmt: skip


class Straight:
    """
    A relay's transport to an aggregator in the same process. It delivers what Ray would deliver, in order and
    a moment later. The answers come from the methods of the actor.
    """

    def __init__(self, aggregator: AggregatorCore) -> None:
        self._calls: list[Callable[[], bytes]] = []
        self._parts: list[bytes | Exception] = []
        self.attach(aggregator)

    def attach(self, aggregator: AggregatorCore) -> None:
        """From now on, let this aggregator answer."""
        self._actor = actor_of(aggregator)

    def ingest(self, data: bytes, commit: bool) -> bool:
        return self._call(lambda: self._actor.ingest(data, commit))

    def finish(self, data: bytes) -> bool:
        return self._call(lambda: self._actor.finish(data))

    def poll(self) -> list[bytes | Exception]:
        """Return replies. The actor's other thread writes what is due after each answer."""
        calls, self._calls = self._calls, []
        answers: list[bytes | Exception] = [call() for call in calls]
        if calls:
            self._actor._core.endings.write_due()
        return answers

    def send_part(self, data: bytes) -> bool:
        """Answer at once: the actor has a separate thread for these calls."""
        self._parts.append(self._actor.bulk(data))
        return True

    def part_replies(self, timeout_s: float) -> list[bytes | Exception]:
        replies, self._parts = self._parts, []
        return replies

    def _call(self, call: Callable[[], bytes]) -> bool:
        if len(self._calls) >= MAX_IN_FLIGHT:
            return False
        self._calls.append(call)
        return True


def actor_of(aggregator: AggregatorCore, **settings: Any) -> Any:
    """Return an aggregator actor made without Ray, which its `__init__` needs. Its threads do not run."""
    made: Any = object.__new__(Aggregator)
    made._config = ActorConfig("s", Settings(**settings))
    made._core, made._held, made._node_id, made._alone = aggregator, None, "n", False
    made._membership = Membership(made._config, made._node_state, aggregator.errors)
    made._wake, made._stopping, made._stopped = threading.Event(), threading.Lock(), None
    return made


class NoSamples:
    """A node sampler with at most one sample: the one that a test sets."""

    errors: Counter[str] = Counter()
    sample: NodeSample | None = None

    def latest(self) -> NodeSample | None:
        sample, self.sample = self.sample, None
        return sample


LIMITS = Thresholds(hold_s=0.2, hold_group_s=0.2, hold_cost_s=0.05)
"""
Thresholds for played sessions. They take seconds of the clock, but their steps only some tenths
of a second.
"""


def aggregation(folder: Path, clock: Clock | None = None, **info: Any) -> AggregatorCore:
    """Return an aggregator on `folder`. It makes no automatic profiles."""
    folder.mkdir(parents=True, exist_ok=True)
    clock, settings = clock or Clock(), Settings(thresholds=LIMITS, auto_profile=0)
    return AggregatorCore(folder, settings, {"launcher": "torchrun", **info}, clock, clock)


def run_message(aggregator: AggregatorCore, run: str = "job", **fields: Any) -> wire.Finished:
    """Return the answer to a message about a run, sent again once the files that are due are written."""
    message = codec.encode(wire.RunEnd(codec.VERSION, run, **fields))
    answer = codec.decode(aggregator.end(message), wire.Finished)
    if answer.pending:
        aggregator.endings.write_due()
        answer = codec.decode(aggregator.end(message), wire.Finished)
    return answer


def ask(aggregator: AggregatorCore, what: str, **fields: Any) -> Any:
    """
    Return the answer to a question of `store.query`, by its name. For questions with a cursor, return the
    items. Verdicts and summaries are plain values, as in JSON.
    """
    kinds = {kind.__struct_config__.tag: kind for kind in QUESTIONS}
    request: Any = kinds[what.title().replace("_", "")](**fields)
    answer = query.ask_one(aggregator.query, request)
    if isinstance(answer, (LiveVerdict, Summary)):
        return to_builtins(answer)
    return answer.items if isinstance(answer, query.Page) else answer


def written_summary(file: SessionFile, limits: Thresholds, run: str | None = None) -> dict[str, Any]:
    """Return what `summary.json` contains for a session."""
    summary: dict[str, Any] = json.loads(as_json(plain(summarize(file, limits, run))))
    return summary


def stored(folder: Path) -> Callable[[bytes], bytes]:
    """Return a function that answers questions from the session file in `folder`."""
    return Answers(folder, LIMITS).reply


def confirmed(reply: bytes) -> int:
    """Return the number up to which messages are stored, according to a reply."""
    return codec.decode(reply, wire.RelayReply).stored_seq


def check_ledger(folder: Path) -> dict[str, Any]:
    """
    Check that every produced row is accounted for, and that each stored row is in the file
    exactly once.
    """
    with SessionFile(folder / "session.sqlite") as session:
        count: dict[str, Any] = msgspec.to_builtins(session.ledger())
        for part in (count, *count["per_rank"].values()):
            assert part["produced"] == part["stored"] + part["in_flight"] + sum(part["dropped"].values())
            assert min(part["in_flight"], *part["dropped"].values()) >= 0
        runs = [msgspec.to_builtins(run["ledger"]) for run in session.runs()]
        for part in runs:
            assert part["produced"] == part["stored"] + part["in_flight"] + sum(part["dropped"].values())
        assert sum(part["produced"] for part in runs) + _unknown(session) == count["produced"]
        for process in session.processes():
            chunks = session._all("SELECT first_row, n FROM chunk WHERE process = ?", process.id)
            numbers = [row for first, n in chunks for row in range(first, first + n)]
            assert len(numbers) == len(set(numbers)) == process.stored
            assert numbers == sorted(numbers)
        return count


def _unknown(session: SessionFile) -> int:
    """Return the number of rows of processes without a run, because their identity is not known."""
    return sum(process.produced for process in session.processes() if process.identity is None)


def doubled_rows(stored: SessionFile) -> int:
    """
    Return the number of rows that overlap others. If none overlap, return the difference to the
    counted rows.
    """
    ends: dict[int, int] = {}
    rows = doubled = 0
    for process, first, n in stored._all("SELECT process, first_row, n FROM chunk ORDER BY 1, 2"):
        doubled += max(0, ends.get(process, 0) - first)
        ends[process] = max(ends.get(process, 0), first + n)
        rows += n
    return doubled or abs(rows - sum(process.stored for process in stored.processes()))


_SHOWN = {"page": "children", "answer": "data"} | dict.fromkeys(
    ("nav", "session", "verdict-strip", "problem"), "content"
)


def refresh_request(
    tick: Any = 1, pathname: Any = "/", search: Any = "", zone: Any = "UTC", seen: Any = None
) -> dict[str, Any]:
    """Return what a browser posts to refresh a page."""
    inputs = (("due", "data"), ("url", "pathname"), ("url", "search"), ("timezone", "data"))
    values = zip(inputs, (tick, pathname, search, zone), strict=True)
    return {
        "output": "..{}..".format("...".join(f"{id}.{name}" for id, name in _SHOWN.items())),
        "outputs": [{"id": id, "property": name} for id, name in _SHOWN.items()],
        "inputs": [{"id": id, "property": name, "value": value} for (id, name), value in values],
        "changedPropIds": ["due.data"],
        "state": [{"id": "seen", "property": "data", "value": seen}],
    }


def watch(url: str) -> str:
    """Request a refresh of the overview from the web app, as a browser does. Return the answer."""
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(
        url + "_dash-update-component", json.dumps(refresh_request()).encode(), headers
    )
    with urllib.request.urlopen(request, timeout=240) as answer:
        page: str = answer.read().decode()
        return page
