"""
What travels between rank, relay and aggregator, version 3. Columns are raw little-endian bytes.

Times are int64 nanoseconds. `*_ns` of a row are durations on the rank's own monotonic clock; `sent_ns` and
`t_ns` are wall-clock time since the epoch.

What a person asks for is a `MeasureRequest`, from wherever it comes. A trace travels in calls of its own
from a relay to the aggregator, beside the packets with rows: a rank leaves it in a file and says in which
folder (`Capture`); the relay, on the same host, reads it from there. Each reply says how much the
aggregator has, so that both may be restarted meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from traceml_ray.identity import RankIdentity, rank_filter
from traceml_ray.stages import LEAD_BYTES, N_STAGES, ROW_BYTES
from traceml_ray.wire.codec import FEW, Count, Int64, Message, Name, Part, Value, WireError, ready

TRACE_NAME = "trace.json.gz"
"""Name of a trace's file in the folder that the rank has made for it."""
FOLDER_PREFIX = "trace-"
"""How the name of that folder begins; the id of the rank process follows."""
PART_BYTES = 60 * 1024
"""Largest size of `TracePart.data`, so that the whole message stays below `MAX_BATCH_BYTES`."""


class TracePart(Message, tag="trace", frozen=True):
    """
    Relay to aggregator: a part of the trace of a rank. Without `data` it asks how much of it is there. The
    reply is TraceReply.
    """

    process_id: Name
    profile: Name
    """Id of the profile."""
    number: Count
    """Number of the command, as in `Capture`."""
    total_bytes: Count
    offset: Count
    data: bytes = b""
    failure: Annotated[str, msgspec.Meta(max_length=300)] = ""
    """Why the relay cannot read the rest: it will not come."""

    def check(self) -> None:
        """Raise `WireError` where the part does not lie in its trace, or is too large."""
        if len(self.data) > PART_BYTES:
            raise WireError("too_large", f"{len(self.data)} bytes, limit {PART_BYTES}")
        if self.offset + len(self.data) > self.total_bytes:
            raise WireError("bad_columns", f"{len(self.data)} bytes at {self.offset} of {self.total_bytes}")


class TraceReply(Message, tag="trace_reply", frozen=True):
    """Aggregator to relay."""

    offset: Count | None = None
    """Where to go on: the number of bytes that are there, or are about to be. None: no more is wanted."""
    pause_s: Annotated[float, msgspec.Meta(ge=0, le=60)] = 0.0
    """How long to wait before the next call, in seconds."""


MAX_LAYER_STEPS = 1000


class LayersRequest(Part, frozen=True):
    """For how many steps of which run a person wants to have the layers measured."""

    steps: Annotated[int, msgspec.Meta(ge=1, le=MAX_LAYER_STEPS)] = 20
    run: str | None = None
    """Id or name; None: the newest."""

    @classmethod
    def checked(cls, steps: int, run: str | None = None) -> LayersRequest:
        """Return it. Raises ValueError where there cannot be so many steps."""
        if not 1 <= steps <= MAX_LAYER_STEPS:
            raise ValueError(f"steps={steps} must be an integer from 1 to {MAX_LAYER_STEPS}")
        return cls(steps, run)


class LayersCommand(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of the command `layers`, see `wire.Command`."""

    id: Name
    run: str | None = None
    ranks: str = "all"
    steps: Count


MAX_PROFILE_STEPS = 50
OPTIONS = ("memory", "stacks", "shapes")
"""What may be recorded besides, see `ProfileRequest`."""
LATE = "was over when the request came"
"""Phrase in the reason of a rank that was past the first step. The profile is then begun again."""

CaptureState = Literal["armed", "recording", "sending", "refused", "failed"]
"""State of one rank as the rank knows it; see `store.profiles.State`."""


class ProfileRequest(Part, frozen=True):
    """Which steps of which ranks a person wants to have profiled."""

    ranks: Annotated[str, msgspec.Meta(max_length=1024)] = "all"
    """A rank filter: `all`, or `0,4-7`."""
    steps: Annotated[int, msgspec.Meta(ge=1, le=MAX_PROFILE_STEPS)] = 3
    memory: bool = False
    """Whether the allocations of each operation are recorded."""
    stacks: bool = False
    """Whether the place in the code that called each operation is recorded."""
    shapes: bool = False
    """Whether the shapes of the inputs of each operation are recorded."""
    run: str | None = None
    """Id or name; None: the newest."""

    @classmethod
    def of(cls, values: Mapping[str, object]) -> ProfileRequest:
        """Return the request that has these fields. Raises ValueError, which says what is wrong with them."""
        try:
            return msgspec.convert([*msgspec.structs.astuple(cls(**values))], ready(cls), strict=False)  # type: ignore[arg-type]
        except (msgspec.ValidationError, TypeError) as error:
            raise ValueError(f"{error} (a profile has {', '.join(cls.__struct_fields__)})") from None

    @classmethod
    def checked(cls, values: Mapping[str, Any]) -> ProfileRequest:
        """Return what a person asks for, as `of`. Raises ValueError also for ranks that cannot be read."""
        rank_filter(values["ranks"])
        steps = values.get("steps", 1)
        if isinstance(steps, int) and not 1 <= steps <= MAX_PROFILE_STEPS:
            raise ValueError(f"steps={steps} must be an integer from 1 to {MAX_PROFILE_STEPS}")
        return cls.of(values)


class MeasureRequest(Part, frozen=True):
    """A profile, or the time of layers, that a person asks for: in a rank, or over the relay's socket."""

    id: Name
    """It will be in the manifest of a profile."""
    profile: ProfileRequest | None = None
    layers: LayersRequest | None = None


class ProfileCommand(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of the command `profile`, see `wire.Command`."""

    id: Name
    """Id of the profile."""
    number: Count
    """Grows where it is begun anew, since a rank was past its first step already."""
    run: str | None = None
    ranks: str = "all"
    """A rank filter: those of the run that are meant."""
    first_step: Count
    steps: Count
    limit_s: float
    """Time to wait for the steps, in s."""
    record_s: float = 60.0
    """
    Longest time that the steps may take, in s. What is recorded takes memory: an evaluation among them would
    take gigabytes.
    """
    memory: int = 0
    stacks: int = 0
    shapes: int = 0
    """0 or 1, as torch has them."""
    serve_s: float = 60.0
    """Longest time that a rank without steps, to which others give work, records, in s. It begins at once."""
    over: int = 0
    """1 when the others have recorded their steps; ranks without steps then end."""


class Capture(Part, frozen=True):
    """How far this rank is with the profile that it was asked for; in every batch while there is one."""

    id: Name
    number: Count
    """Number of the command that the rank follows. A profile may be begun again, see `wire.Command`."""
    state: CaptureState
    reason: str = ""
    total_bytes: Count | None = None
    """Size of the trace once it is written, in bytes."""
    steps: Annotated[list[tuple[Int64, Int64, Int64, Int64 | None]], FEW] = []
    """For each recorded step: number, begin, end, end of its row, see `store.profiles.ProfileStep`."""
    start_ns: Count | None = None
    stop_ns: Count | None = None
    export_ns: Count | None = None
    """What it has cost, see `store.profiles.RankProfile`."""
    serves: bool = False
    """It has no steps of its own; `steps` then has one, 0, for all the time that was recorded."""
    folder: str = ""
    """Where its trace is as a file on this host, see `wire.messages`: an absolute path."""


MAX_BATCH_BYTES = 64 * 1024
"""A larger argument of an actor call goes through Ray's object store, 2-3 times as slow."""
MAX_ROWS = 1024
TICK_S = 0.25
"""How often a relay sends, where the aggregator does not say otherwise."""

Rows = Annotated[int, msgspec.Meta(ge=0, le=1 << 44)]
"""A number of rows: more than any run has, and those of all ranks add up to an int64."""
StageIndex = Annotated[int, msgspec.Meta(ge=0, lt=N_STAGES)]
DEVICE_CLOCK = "device clock"
"""Key in `RankBatch.missing`: why a rank on a CUDA device has no rows on the device's clock."""
CLOSED = "off since step"
"""Under DEVICE_CLOCK: it has ended itself; the step, a colon and the reason follow."""
NOT_MEASURED = "not measured: "
"""How names in `RelayBatch.errors` begin of what a node cannot measure; the count is of its devices."""
Records = dict[str, Annotated[list[msgspec.Raw], FEW]]
"""
What signals have to say, by the name of the kind: records as they were encoded, each by itself. See
`signals.kinds`; a kind that the receiver does not know is counted there, and left out.
"""
Columns = tuple[bytes, bytes, bytes, bytes, bytes]
"""Keys, flags, rows, host rows and leads of some rows, see `RankBatch`."""


class ProcessSample(Part, frozen=True):
    """A sample of a rank's process. `None` is "not known", never 0."""

    t_ns: Int64
    cpu_pct: float | None
    rss_bytes: Count | None
    threads: Count | None
    read_bytes: Count | None
    write_bytes: Count | None


class OpenStage(Part, frozen=True):
    """The stage that a rank is in, and for how long it has been."""

    step: Int64
    stage: StageIndex
    elapsed_ns: Int64
    span: str | None = None
    """Name of the open span inside the stage: `checkpoint`, `barrier`, a user's stage, …"""
    span_ns: Int64 | None = None
    """For how long it has been."""


class SpanSum(Part, frozen=True):
    """Time in spans of one name (`optimizer`, `checkpoint`, a user's stage) since the last batch."""

    name: str
    stage: StageIndex
    count: Count
    total_ns: Int64
    max_ns: Int64 | None
    """None where only the sum was kept."""
    first_step: Int64
    last_step: Int64
    bytes: Count | None = None
    """For a collective: size of its buffers, in bytes."""
    process_group: str | None = None
    """For a collective: torch's name of its process group."""


class Event(Part, frozen=True):
    """
    Something that happened once, for a person to read.

    `kind` is one of `attach`, `exception`, `exit`, `rank_lost`, `process_ended`, `stacks`,
    `standing`, `flight_recorder`, `relay_start`, `xid`, `oom`, `bundle_request`, `profile`, `note`, …
    """

    kind: str
    t_ns: Int64
    step: Int64 | None = None
    stage: StageIndex | None = None
    message: str = ""
    data: Annotated[dict[str, Value], FEW] = {}


class Placement(Part, frozen=True):
    """Where a rank is in a job that is not only data parallel."""

    mesh: Annotated[dict[str, Annotated[list[Count], FEW]], FEW] = {}
    """For each dimension of the rank's device mesh, by name: its coordinate and the size of the dimension."""
    stages: Annotated[list[Count], FEW] = []
    """The stages of a pipeline that it has, of `of_stages` in all."""
    of_stages: Count = 0
    worker: str = ""
    """Its name as a worker of torch.distributed.rpc."""


class Overhead(Part, frozen=True):
    """What the monitor itself has cost this rank so far (cumulative)."""

    marks_ns: Count
    """Estimated time inside our hooks on the training thread."""
    agent_cpu_ns: Count
    agent_wall_ns: Count
    sent_bytes: Count


class RankBatch(Message, tag="rank", frozen=True):
    """
    One tick of one rank's agent.

    A *rank process* is one process's life (16 hex digits, drawn at start); its identity may be learned
    late. Rows are numbered from 0 per rank process in the order they were put into the ring:
    this batch holds `first_row … first_row + n - 1`. `produced` and `dropped` are cumulative,
    `produced` counts dropped rows too.
    """

    process_id: Name
    seq: Count
    sent_ns: Int64
    produced: Rows
    dropped: Rows
    first_row: Rows
    keys: bytes
    """n × int64: `step << SEGMENT_BITS | segment`."""
    flags: bytes
    """n × uint8: FLAG_*."""
    rows: bytes
    """n × N_STAGES × int64 ns."""
    identity: RankIdentity | None = None
    open: OpenStage | None = None
    process: ProcessSample | None = None
    spans: Annotated[list[SpanSum], FEW] = []
    events: Annotated[list[Event], FEW] = []
    errors: Annotated[dict[str, Count], FEW] = {}
    """Swallowed exceptions by place, cumulative."""
    missing: Annotated[dict[str, str], FEW] = {}
    """Patches and signals that could not be had, with the reason."""
    overhead: Overhead | None = None
    strategy: str | None = None
    """
    What this rank has seen: single, ddp, fsdp2, fsdp2+hsdp, ddp+tp, pp, all_reduce (inferred), … see
    INFERRED; of all ranks together: `analysis.parallelism.mode`.
    """
    final: bool = False
    group: tuple[Count, Count] | None = None
    """
    The ranks that this one exchanges gradients with: the lowest global rank among them and how many they
    are, which tells groups apart, since they share no rank. None: not known.
    """
    host_rows: bytes = b""
    """
    n × N_STAGES × int64 ns: the same rows on the CPU's clock, where `rows` has those with FLAG_DEVICE_CLOCK
    on the device's. A row that the device has no times for is the same in both. Empty: the rank process has
    no device clock.
    """
    leads: bytes = b""
    """n × LEAD_BYTES × uint8 (late, full, sure), or empty: not known. Only with `host_rows`."""
    memory_from: Annotated[dict[str, str], FEW] = {}
    """
    Where each field of a sample of memory that can be known here comes from: torch, nvml, kernel or cgroup.
    Not in every batch; what it lacks is not known, and `missing` may say why.
    """
    environment: Annotated[dict[str, str], FEW] = {}
    """Versions and the configuration of torch's allocator, in the first batch."""
    capture: Capture | None = None
    placement: Placement | None = None
    """None: the job is only data parallel, as far as is known."""
    records: Annotated[Records, FEW] = {}
    requests: Annotated[list[MeasureRequest], FEW] = []
    """What the script asks for."""

    def columns(self, skip: int = 0) -> Columns:
        """Return the columns of the rows without the first `skip`."""
        row = ROW_BYTES * skip
        columns = self.keys[8 * skip :], self.flags[skip:], self.rows[row:]
        return *columns, self.host_rows[row:], self.leads[LEAD_BYTES * skip :]

    def check(self) -> None:
        """Raise `WireError` where the columns do not fit each other."""
        count = len(self.flags)
        if count > MAX_ROWS:
            raise WireError("too_large", f"{count} rows, limit {MAX_ROWS}")
        if len(self.keys) != 8 * count or len(self.rows) != ROW_BYTES * count:
            raise WireError("bad_columns", f"{count} flags, {len(self.keys)} / {len(self.rows)} bytes")
        hosted = len(self.host_rows), len(self.leads)
        if hosted not in ((0, 0), (ROW_BYTES * count, 0), (ROW_BYTES * count, LEAD_BYTES * count)):
            raise WireError(
                "bad_columns", f"{count} flags, {hosted[0]} / {hosted[1]} bytes of host rows and leads"
            )
        if self.dropped > self.produced:
            raise WireError("bad_columns", f"{self.dropped} rows dropped of {self.produced} produced")


class Command(Part, frozen=True):
    """
    Something the receiver is to do. It is part of every reply until it has been done, so that no lost reply
    matters: the receiver does each `args["id"]` once.

    `dump`: send the stack of every thread (event `stacks`); `where`: only the place of the training thread
    (event `standing`, which is not stored). `args["run"]`: ranks of that job only.

    `profile`: record steps with torch's profiler, see `ProfileCommand`. `layers`: measure the layers of some
    steps, see `LayersCommand`.
    """

    name: str
    args: Annotated[dict[str, Value], FEW] = {}


class RankReply(Message, tag="rank_reply", frozen=True):
    """
    Relay to agent: every batch up to `acked_seq` has been taken over by the relay, and none up to
    `settled_seq` need be sent again: they are on disk.
    """

    process_id: Name
    acked_seq: Int64
    settled_seq: Int64
    commands: Annotated[list[Command], FEW] = []
    verdict: Annotated[dict[str, Value], FEW] = {}
    """For rank 0: `label`, `why`, `stage`, `rank`, `cost_pct`, `mean_step_ms` of its run at present."""
    refused: Annotated[dict[int, str], FEW] = {}
    """Why the relay does not accept a batch, by number of the batch. It must not be sent again."""


class NodeIdentity(Part, frozen=True):
    """A machine of the cluster; `node_id` is Ray's."""

    node_id: str
    hostname: str
    address: str


class RelayBatch(Message, tag="relay", frozen=True):
    """
    One tick of one node: the rank batches as they came, in order.

    `incarnation` is drawn when a relay process starts, `seq` counts from 1 within it; the
    aggregator takes each (incarnation, seq) once. `dropped` is cumulative rows per rank process.
    """

    node: NodeIdentity
    incarnation: str
    seq: Count
    sent_ns: Int64
    batches: Annotated[list[bytes], FEW] = []
    dropped: Annotated[dict[str, Rows], FEW] = {}
    lost: Annotated[list[str], FEW] = []
    """Rank processes whose process is gone without a final batch."""
    events: Annotated[list[Event], FEW] = []
    errors: Annotated[dict[str, Count], FEW] = {}
    answer: tuple[Int64, Int64] | None = None
    """
    `sent_ns` of a reply that arrived since the last message, and its arrival on the node's clock. Of several
    replies, the one that took the least time.
    """
    records: Annotated[Records, FEW] = {}
    """Records of the node."""
    of_ranks: Annotated[dict[str, Annotated[Records, FEW]], FEW] = {}
    """Records that the relay itself has made of ranks, by rank process."""
    requests: Annotated[list[MeasureRequest], FEW] = []
    """What persons on this node ask for."""


class RelayReply(Message, tag="relay_reply", frozen=True):
    """Aggregator to relay: messages up to `stored_seq` are on disk."""

    stored_seq: Int64
    commands: Annotated[list[Command], FEW] = []
    verdicts: Annotated[dict[str, dict[str, Value]], FEW] = {}
    """Verdict of each run; see `RankReply.verdict`."""
    tick_s: Annotated[float, msgspec.Meta(ge=TICK_S, le=60)] = TICK_S
    """How often to send, in seconds, where not all ranks of the node have reported before."""
    sent_ns: Int64 | None = None
    """On the aggregator's clock."""


class RankFailure(Part, frozen=True):
    """How one rank's process ended badly, as the launcher saw it. A signal is a negative exit code."""

    rank: Count
    local_rank: Count
    pid: Count
    exit_code: Int64
    t_ns: Int64
    message: str = ""


class Finish(Message, tag="finish", frozen=True):
    """
    Launcher to relay, over the rank socket, and from there to the aggregator: this node's part of the job is
    over. The aggregator decides when the files are written; each further reply says how far that is.
    """

    exit_code: Int64
    failures: Annotated[list[RankFailure], FEW] = []
    stop: bool = True
    """End the session; without it, only this node leaves."""
    node_id: str = ""
    """Id of the node that leaves. The relay fills it in."""
    nodes: Count = 1
    """How many nodes the job has: they are waited for."""
    force: bool = False
    """A person has ordered it: no node is waited for."""
    waited_s: float = 0.0
    """How long the launcher has waited already, when the relay passes this on."""


class Finished(Message, tag="finished", frozen=True):
    """How far the end of a session, or of a run, is."""

    state: Literal["waiting", "writing", "noted", "written", "failed"]
    """
    Progress of the end. waiting: for those that may still deliver, or for the disk; ask again. writing: the
    report is being made; ask again. noted: there is nothing to wait for. written: the files are there.
    failed: they cannot be written.
    """
    detail: str = ""
    """Why not, or which nodes are missing."""
    waiting: Count = 0
    """
    Ranks, or nodes, that are waited for because they may still deliver; of files that are written, those
    whose rows may not be in them.
    """

    @property
    def pending(self) -> bool:
        """Whether to ask again."""
        return self.state in ("waiting", "writing")

    @property
    def ok(self) -> bool:
        """Whether what was asked for is done."""
        return self.state in ("noted", "written")


class ControlRequest(Message, tag="request", frozen=True):
    """
    A person to the relay, over the rank socket: a bundle is wanted, or something is to be measured. The
    reply is Finished (noted).
    """

    request: Name
    """Id of the bundle, which will be in its manifest."""
    measure: MeasureRequest | None = None
    """What is wanted instead of a bundle."""


class RunEnd(Message, tag="run", frozen=True):
    """
    What starts ranks inside Ray (Ray Train's controller) to the aggregator, about one run of the
    session; the reply is Finished.
    """

    job_id: str
    """Job id, as in the identity of the run's ranks."""
    info: Annotated[dict[str, Value], FEW] = {}
    """
    New facts of the run: name, launcher, world_size, nnodes, … Facts that are missing stay as
    they were.
    """
    events: Annotated[list[Event], FEW] = []
    status: str | None = None
    """finished, failed or stopped: the run is over, and its files must be written. None: it continues."""
