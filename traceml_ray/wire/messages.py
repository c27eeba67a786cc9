"""
The messages between rank, relay and aggregator, version 3. Columns are raw little-endian bytes.

Times are int64 nanoseconds. `*_ns` of a row are durations on the rank's own monotonic clock; `sent_ns` and
`t_ns` are wall-clock time since the epoch.

A `MeasureRequest` is a request of a user, from any source. A relay sends a trace to the aggregator in
separate calls, not in the packets with rows. A rank leaves the trace in a file and reports the folder
(`Capture`); the relay, on the same host, reads it there. Each reply says how much the aggregator has, so both
may be restarted meanwhile.
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
"""First part of the name of that folder. The id of the rank process follows."""
PART_BYTES = 60 * 1024
"""Largest size of `TracePart.data`, so that the whole message stays below `MAX_BATCH_BYTES`."""


class TracePart(Message, tag="trace", frozen=True):
    """
    Relay to aggregator: a part of the trace of a rank. Without `data` it asks how much of the trace has
    arrived. The reply is TraceReply.
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
    """Why the relay cannot read the rest. The rest will not be sent."""

    def check(self) -> None:
        """Raise `WireError` if the part is outside its trace, or too large."""
        if len(self.data) > PART_BYTES:
            raise WireError("too_large", f"{len(self.data)} bytes, limit {PART_BYTES}")
        if self.offset + len(self.data) > self.total_bytes:
            raise WireError("bad_columns", f"{len(self.data)} bytes at {self.offset} of {self.total_bytes}")


class TraceReply(Message, tag="trace_reply", frozen=True):
    """Aggregator to relay: reply to TracePart."""

    offset: Count | None = None
    """
    Offset of the next part: the number of bytes that have arrived, or are about to. None: no
    more is needed.
    """
    pause_s: Annotated[float, msgspec.Meta(ge=0, le=60)] = 0.0
    """How long to wait before the next call, in seconds."""


MAX_LAYER_STEPS = 1000


class LayersRequest(Part, frozen=True):
    """Request to measure the layers for a number of steps of a run."""

    steps: Annotated[int, msgspec.Meta(ge=1, le=MAX_LAYER_STEPS)] = 20
    run: str | None = None
    """Id or name of the run. None: the newest."""

    @classmethod
    def checked(cls, steps: int, run: str | None = None) -> LayersRequest:
        """Return the request. Raises ValueError if the number of steps is not allowed."""
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
"""What can be recorded in addition, see `ProfileRequest`."""
LATE = "was over when the request came"
"""Phrase in the reason of a rank that was past the first step. The profile is then started again."""

CaptureState = Literal["armed", "recording", "sending", "refused", "failed"]
"""State of one rank as the rank knows it; see `store.profiles.State`."""


class ProfileRequest(Part, frozen=True):
    """Request to profile steps of some ranks."""

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
    """Id or name of the run. None: the newest."""

    @classmethod
    def of(cls, values: Mapping[str, object]) -> ProfileRequest:
        """Return the request with these fields. Raises ValueError that says what is wrong with them."""
        try:
            return msgspec.convert([*msgspec.structs.astuple(cls(**values))], ready(cls), strict=False)  # type: ignore[arg-type]
        except (msgspec.ValidationError, TypeError) as error:
            raise ValueError(f"{error} (a profile has {', '.join(cls.__struct_fields__)})") from None

    @classmethod
    def checked(cls, values: Mapping[str, Any]) -> ProfileRequest:
        """As `of`, but also raises ValueError for ranks that cannot be parsed."""
        rank_filter(values["ranks"])
        steps = values.get("steps", 1)
        if isinstance(steps, int) and not 1 <= steps <= MAX_PROFILE_STEPS:
            raise ValueError(f"steps={steps} must be an integer from 1 to {MAX_PROFILE_STEPS}")
        return cls.of(values)


class MeasureRequest(Part, frozen=True):
    """
    A user's request for a profile, or for the time of layers. It comes from a rank, or over the relay's
    socket.
    """

    id: Name
    """Id of the request. It is stored in the manifest of a profile."""
    profile: ProfileRequest | None = None
    layers: LayersRequest | None = None


class ProfileCommand(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of the command `profile`, see `wire.Command`."""

    id: Name
    """Id of the profile."""
    number: Count
    """Number that grows when the profile is started again, because a rank was past its first step."""
    run: str | None = None
    ranks: str = "all"
    """A rank filter: the ranks of the run to profile."""
    first_step: Count
    steps: Count
    limit_s: float
    """Time to wait for the steps, in s."""
    record_s: float = 60.0
    """
    Longest time that the steps may take, in s. A recording uses memory: an evaluation in it would take
    gigabytes.
    """
    memory: int = 0
    stacks: int = 0
    shapes: int = 0
    """0 or 1, in torch's form."""
    serve_s: float = 60.0
    """
    Longest recording of a rank without steps of its own, which works for others, in s. It
    begins immediately.
    """
    over: int = 0
    """1 when the others have recorded their steps. Ranks without steps then end their recording."""


class Capture(Part, frozen=True):
    """State of this rank's requested profile. It is in every batch while there is a profile."""

    id: Name
    number: Count
    """Number of the command that the rank follows. A profile may be started again, see `wire.Command`."""
    state: CaptureState
    reason: str = ""
    total_bytes: Count | None = None
    """Size of the trace once it is written, in bytes."""
    steps: Annotated[list[tuple[Int64, Int64, Int64, Int64 | None]], FEW] = []
    """For each recorded step: number, begin, end, end of its row, see `store.profiles.ProfileStep`."""
    start_ns: Count | None = None
    stop_ns: Count | None = None
    export_ns: Count | None = None
    """Cost of the export, see `store.profiles.RankProfile`."""
    serves: bool = False
    """Whether the rank has no steps of its own. `steps` then has one entry, 0, for the whole recording."""
    folder: str = ""
    """
    Absolute path of the folder on this host that contains the trace, see the docstring of
    `wire.messages`.
    """


MAX_BATCH_BYTES = 64 * 1024
"""Larger arguments of an actor call go through Ray's object store, which is 2-3 times as slow."""
MAX_ROWS = 1024
TICK_S = 0.25
"""Time between two messages of a relay in s, unless the aggregator sets another."""

Rows = Annotated[int, msgspec.Meta(ge=0, le=1 << 44)]
"""A number of rows. The limit exceeds any run, and the sum over all ranks fits an int64."""
StageIndex = Annotated[int, msgspec.Meta(ge=0, lt=N_STAGES)]
DEVICE_CLOCK = "device clock"
"""Key in `RankBatch.missing`: why a rank on a CUDA device has no rows on the device's clock."""
CLOSED = "off since step"
"""Under DEVICE_CLOCK: the clock has ended itself. The step, a colon and the reason follow."""
NOT_MEASURED = "not measured: "
"""
Prefix of names in `RelayBatch.errors` of values that a node cannot measure. The count is the number of its
devices.
"""
Records = dict[str, Annotated[list[msgspec.Raw], FEW]]
"""
Records of signals by the name of their kind. Each record is encoded by itself. See `signals.kinds`. A
receiver counts and ignores kinds that it does not know.
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
    """The stage that a rank is in, and the time since it entered the stage."""

    step: Int64
    stage: StageIndex
    elapsed_ns: Int64
    span: str | None = None
    """Name of the open span inside the stage: `checkpoint`, `barrier`, a user's stage, …"""
    span_ns: Int64 | None = None
    """Time since the span began, in ns."""
    still_ns: Int64 | None = None
    """Time since the training thread was last found to do something, in ns. None: not known."""


class SpanSum(Part, frozen=True):
    """Time in spans of one name (`optimizer`, `checkpoint`, a user's stage) since the last batch."""

    name: str
    stage: StageIndex
    count: Count
    total_ns: Int64
    max_ns: Int64 | None
    """None if only the sum was kept."""
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
    `standing`, `relay_start`, `xid`, `oom`, `bundle_request`, `profile`, `note`, …
    """

    kind: str
    t_ns: Int64
    step: Int64 | None = None
    stage: StageIndex | None = None
    message: str = ""
    data: Annotated[dict[str, Value], FEW] = {}


class Placement(Part, frozen=True):
    """Position of a rank in a job that is not only data parallel."""

    mesh: Annotated[dict[str, Annotated[list[Count], FEW]], FEW] = {}
    """For each dimension of the rank's device mesh, by name: its coordinate and the size of the dimension."""
    stages: Annotated[list[Count], FEW] = []
    """Numbers of the pipeline stages that it has, out of `of_stages`."""
    of_stages: Count = 0
    worker: str = ""
    """Name of the rank as a worker of torch.distributed.rpc."""


class Overhead(Part, frozen=True):
    """Cumulative cost of the monitor itself for this rank."""

    marks_ns: Count
    """Estimated time inside our hooks on the training thread."""
    agent_cpu_ns: Count
    agent_wall_ns: Count
    sent_bytes: Count


MAX_TRACKER_CHARS = 500
"""Largest length of the texts in `TrackerState`, in characters."""
_TrackerText = Annotated[str, msgspec.Meta(max_length=MAX_TRACKER_CHARS)]


class Figures(Part, frozen=True):
    """Figures of a run at one moment, for the experiment trackers that the script of rank 0 has open."""

    made_ns: Count
    """When they were made (ns since the epoch). Newer figures replace older ones."""
    step: Int64
    """The newest step that all ranks had reported."""
    values: Annotated[dict[str, float], FEW] = {}
    """Figures by name, with the unit in the name: `step_ms`."""
    label: str = ""
    """Label of the verdict; "": there is none yet."""
    key: str = ""
    """Identifies what the verdict names. It is the same while the same is named."""
    severity: str = "info"
    headline: str = ""
    """The verdict and what it names, in one line."""
    why: str = ""
    """The verdict in sentences."""


class TrackerState(Part, frozen=True):
    """An experiment tracker into whose open run a rank process writes figures. Counts are cumulative."""

    name: str
    """Name of the tracker, as in `Settings.log_to`."""
    run: _TrackerText = ""
    """Id of the run in the tracker; "": not known, or it has none."""
    where: _TrackerText = ""
    """URL or folder of the run, for people. It holds no secret."""
    uri: _TrackerText = ""
    """Address under which the tracker's API finds the run, without a password; "": it cannot be found."""
    sent: Count = 0
    failed: Count = 0
    dropped: Count = 0
    """Number of figures that were replaced by newer ones while the tracker was busy."""
    error: _TrackerText = ""
    """The newest failure; "" if the last attempt succeeded."""


class RankBatch(Message, tag="rank", frozen=True):
    """
    One tick of one rank's agent.

    A *rank process* is the life of one process (16 hex digits, drawn at start). Its identity may become known
    late. Rows are numbered from 0 per rank process, in the order in which they were put into the ring: this
    batch holds `first_row … first_row + n - 1`. `produced` and `dropped` are cumulative. `produced` includes
    dropped rows.
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
    """Suppressed exceptions by place, cumulative."""
    missing: Annotated[dict[str, str], FEW] = {}
    """Patches and signals that are not available, with the reason."""
    overhead: Overhead | None = None
    strategy: str | None = None
    """
    Parallelism that this rank has detected: single, ddp, fsdp2, fsdp2+hsdp, ddp+tp, pp, all_reduce
    (inferred), … see INFERRED. For all ranks together: `analysis.parallelism.mode`.
    """
    final: bool = False
    group: tuple[Count, Count] | None = None
    """
    Ranks with which this one exchanges gradients: (lowest global rank among them, number of ranks). This
    identifies the group, because groups share no rank. None: not known.
    """
    host_rows: bytes = b""
    """
    n × N_STAGES × int64 ns: the same rows on the CPU's clock, where `rows` with FLAG_DEVICE_CLOCK are on the
    device's clock. A row without device times is the same in both. Empty: the rank process has no device
    clock.
    """
    leads: bytes = b""
    """n × LEAD_BYTES × uint8 (late, full, sure), or empty: not known. Only with `host_rows`."""
    memory_from: Annotated[dict[str, str], FEW] = {}
    """
    Source of each field of a memory sample that is available here: torch, nvml, kernel or cgroup. Not in
    every batch. A field without a source is not known, and `missing` may have the reason.
    """
    environment: Annotated[dict[str, str], FEW] = {}
    """Versions and the configuration of torch's allocator, in the first batch."""
    capture: Capture | None = None
    placement: Placement | None = None
    """None: as far as is known, the job is only data parallel."""
    records: Annotated[Records, FEW] = {}
    requests: Annotated[list[MeasureRequest], FEW] = []
    """Requests of the script."""
    trackers: Annotated[list[TrackerState], FEW] = []
    """Of rank 0: each tracker in use, if any has changed."""

    def columns(self, skip: int = 0) -> Columns:
        """Return the columns of the rows, without the first `skip` rows."""
        if not skip:
            return self.keys, self.flags, self.rows, self.host_rows, self.leads
        row = ROW_BYTES * skip
        columns = self.keys[8 * skip :], self.flags[skip:], self.rows[row:]
        return *columns, self.host_rows[row:], self.leads[LEAD_BYTES * skip :]

    def check(self) -> None:
        """Raise `WireError` if the columns do not fit together."""
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
    A command for the receiver. It is in every reply until it has been executed, so a lost reply does not
    matter: the receiver executes each `args["id"]` once.

    `dump`: send the stack of every thread (event `stacks`). `where`: send only the place of the training
    thread (event `standing`, which is not stored). `args["run"]`: only for ranks of that job.

    `profile`: record steps with torch's profiler, see `ProfileCommand`. `layers`: measure the layers of some
    steps, see `LayersCommand`.

    `check_node`, for a relay: check the node during training, from `args["begin_ns"]` on (ns, clock of the
    node), because of the straggler `args["rank"]`. `args["processes"]`: its ranks, as "4:process 5:other".
    """

    name: str
    args: Annotated[dict[str, Value], FEW] = {}


class RankReply(Message, tag="rank_reply", frozen=True):
    """
    Relay to agent: the relay has received every batch up to `acked_seq`. Batches up to `settled_seq` are on
    disk and need not be sent again.
    """

    process_id: Name
    acked_seq: Int64
    settled_seq: Int64
    commands: Annotated[list[Command], FEW] = []
    verdict: Annotated[dict[str, Value], FEW] = {}
    """
    For rank 0: `label`, `why`, `stage`, `rank`, `cost_pct`, `mean_step_ms` of the current
    verdict on its run.
    """
    refused: Annotated[dict[int, str], FEW] = {}
    """Number of a batch that the relay refuses → the reason. It must not be sent again."""
    figures: Figures | None = None
    """For rank 0: the newest figures for its trackers."""


class NodeIdentity(Part, frozen=True):
    """A machine of the cluster. `node_id` is Ray's id."""

    node_id: str
    hostname: str
    address: str


class RelayBatch(Message, tag="relay", frozen=True):
    """
    One tick of one node: the rank batches as received, in order.

    `incarnation` is drawn when a relay process starts, and `seq` counts from 1 within it. The aggregator
    accepts each (incarnation, seq) once. `dropped` is cumulative rows per rank process.
    """

    node: NodeIdentity
    incarnation: str
    seq: Count
    sent_ns: Int64
    batches: Annotated[list[bytes], FEW] = []
    dropped: Annotated[dict[str, Rows], FEW] = {}
    lost: Annotated[list[str], FEW] = []
    """Rank processes that have ended without a final batch."""
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
    """Records of ranks that the relay itself has made, by rank process."""
    requests: Annotated[list[MeasureRequest], FEW] = []
    """Requests of users on this node."""


class RelayReply(Message, tag="relay_reply", frozen=True):
    """Aggregator to relay: messages up to `stored_seq` are on disk."""

    stored_seq: Int64
    commands: Annotated[list[Command], FEW] = []
    verdicts: Annotated[dict[str, dict[str, Value]], FEW] = {}
    """Verdict of each run; see `RankReply.verdict`."""
    tick_s: Annotated[float, msgspec.Meta(ge=TICK_S, le=60)] = TICK_S
    """Time between two messages in seconds, unless all ranks of the node have reported earlier."""
    sent_ns: Int64 | None = None
    """Time at which it was sent (ns, aggregator's clock)."""
    figures: Annotated[dict[str, Figures], FEW] = {}
    """Newest figures for the trackers of each run; see `RankReply.figures`."""


class RankFailure(Part, frozen=True):
    """How a rank's process failed, as seen by the launcher. A signal is a negative exit code."""

    rank: Count
    local_rank: Count
    pid: Count
    exit_code: Int64
    t_ns: Int64
    message: str = ""


class Finish(Message, tag="finish", frozen=True):
    """
    Launcher to relay, over the rank socket, and from there to the aggregator: this node's part of the job is
    over. The aggregator decides when the files are written. Each further reply reports the progress.
    """

    exit_code: Int64
    failures: Annotated[list[RankFailure], FEW] = []
    stop: bool = True
    """Whether to end the session. Otherwise only this node leaves."""
    node_id: str = ""
    """Id of the node that leaves. The relay fills it in."""
    nodes: Count = 1
    """Number of nodes of the job. The aggregator waits for all of them."""
    force: bool = False
    """Whether a user has ordered the end: no node is waited for."""
    waited_s: float = 0.0
    """Time that the launcher had already waited when the relay passes this on, in s."""


class Finished(Message, tag="finished", frozen=True):
    """Progress of the end of a session, or of a run."""

    state: Literal["waiting", "writing", "noted", "written", "failed"]
    """
    `waiting`: for processes that may still deliver, or for the disk; ask again. `writing`: the report is
    being made; ask again. `noted`: there is nothing to wait for. `written`: the files exist. `failed`: they
    cannot be written.
    """
    detail: str = ""
    """Reason of a failure, or the missing nodes."""
    waiting: Count = 0
    """
    Number of ranks, or nodes, that are waited for because they may still deliver. If the files are written:
    those whose rows may be missing in them.
    """

    @property
    def pending(self) -> bool:
        """Return whether to ask again."""
        return self.state in ("waiting", "writing")

    @property
    def ok(self) -> bool:
        """Return whether the request is done."""
        return self.state in ("noted", "written")


class ControlRequest(Message, tag="request", frozen=True):
    """
    User to relay, over the rank socket: make a bundle, or measure something. The reply is
    Finished (noted).
    """

    request: Name
    """Id of the bundle. It is stored in the bundle's manifest."""
    measure: MeasureRequest | None = None
    """What to measure. None: make a bundle."""


class RunEnd(Message, tag="run", frozen=True):
    """
    From the process that starts ranks inside Ray (Ray Train's controller) to the aggregator, about one run of
    the session. The reply is Finished.
    """

    job_id: str
    """Job id, as in the identity of the run's ranks."""
    info: Annotated[dict[str, Value], FEW] = {}
    """
    New facts of the run: name, launcher, world_size, nnodes, … Facts that are missing here do
    not change.
    """
    events: Annotated[list[Event], FEW] = []
    status: str | None = None
    """finished, failed or stopped: the run is over, and its files must be written. None: it continues."""
