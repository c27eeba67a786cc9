"""
The questions that a session answers, and how they are sent. Driver, command line and web app ask in no other
way.

A question is a `Request` struct that declares the type of its answer. `ask` encodes requests, sends them with
`send`, and decodes each answer as the type that its request declares. They are answered by
`reports.answers.Answers`: in the aggregator of a running session, or over a session's file. An array is sent
as its bytes, kind and shape.

A command (`StartProfile`, `Dump`, …) is a request that changes something; only a running session obeys it.
What is asked of the aggregator as an actor (who it is, to look for nodes without a relay, to end) are calls
of `ray.aggregator`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Annotated, Any, Generic, TypeVar, Union, get_args

import msgspec
import numpy as np

from traceml_ray import __version__
from traceml_ray.analysis import shapes
from traceml_ray.errors import sendable
from traceml_ray.signals.finding import Finding
from traceml_ray.signals.memory.records import MemorySample
from traceml_ray.signals.nodes.records import NodeSample
from traceml_ray.store import profiles, results, step_shapes, summary_shape
from traceml_ray.store.rank_processes import RankProcess
from traceml_ray.store.step_rows import MOST as MOST_ROWS
from traceml_ray.store.step_rows import StepRows
from traceml_ray.wire import codec
from traceml_ray.wire import messages as wire
from traceml_ray.wire.codec import UNREADABLE, Count, Int64, ready

A = TypeVar("A", covariant=True)


def _tag(name: str) -> str:
    """Return the tag of a question or command in a message."""
    return name.removeprefix("Get")


class Request(
    msgspec.Struct, Generic[A], frozen=True, tag_field="what", tag=_tag, forbid_unknown_fields=True
):
    """A question whose answer has type `A`, or a command."""


_ARRAY = 1
"""Code of the msgpack extension that holds an array: head (dtype, shape), then its bytes."""
_KINDS = ("<f8", "<f4", "<i8", "|u1")
_MAX_ERROR = 1000
"""Largest number of characters of an error, which may repeat what was asked."""


class QueryError(RuntimeError):
    """A question has no answer. The message says why."""


class OfRun(Request[A], Generic[A], frozen=True):
    """A question about one run."""

    run: str | None = None
    """Id or name of the run; None: the newest, see `store.rank_processes.newest`."""


class Page(msgspec.Struct, Generic[A]):
    """One part of an answer that grows."""

    items: list[A]
    """The entries after the cursor of the question, the oldest first."""
    cursor: int
    """Cursor for the next question: it returns the entries after these."""


class GetStatus(Request[results.Status], frozen=True):
    """The state of the session itself."""


class GetRuns(Request[list[results.RunInfo]], frozen=True):
    """The runs of the session, the oldest first."""


class GetNodes(OfRun[list[results.NodeInfo]], frozen=True):
    """The nodes of the cluster, including lost ones, each with the ranks of the run on it."""


class GetRanks(OfRun[dict[int, RankProcess]], frozen=True):
    """One process per global rank, all of the same generation, see `store.rank_processes.current_ranks`."""


class GetProcesses(Request[list[RankProcess]], frozen=True):
    """Every process of every run that was a rank, in order of first appearance."""


class GetLedger(OfRun[results.WholeLedger], frozen=True):
    """Where each produced row of the session, and of each rank of the run, is."""


class GetVerdict(OfRun[results.LiveVerdict | None], frozen=True):
    """
    The current verdict. For a run that is over, the verdict of its report; None before
    the first verdict.
    """


class GetVerdicts(OfRun[Page[step_shapes.VerdictChange]], frozen=True):
    """Every change of the live verdict after cursor `since`."""

    since: Count = 0


class GetDeaths(OfRun[list[step_shapes.DeathInfo]], frozen=True):
    """
    The ranks of the run that died. Deaths that no other death explains come first, then the others in order
    of time.
    """


class GetEvents(OfRun[Page[results.EventRow]], frozen=True):
    """
    The newest `most` events (None: all) after cursor `since`, of the run and of nodes, the oldest first.
    `brief` leaves out events whose message is a file (stacks, flight recorders).
    """

    since: Count = 0
    brief: bool = False
    most: Count | None = None


class GetSummary(OfRun[summary_shape.Summary], frozen=True):
    """
    The summary. For a session that is over, the one written at its end. Otherwise it is computed now; for a
    very long run it covers only the newest steps, unless `whole` asks for all steps.
    """

    whole: bool = False


class GetReportPage(OfRun[bytes], frozen=True):
    """The bytes of a `report.html` that covers the whole run, made for this question."""


class GetNodeSamples(Request[list[tuple[str, NodeSample]]], frozen=True):
    """
    Pairs of node id and sample: the newest `last` samples of each of `nodes` (ids). With `first_ns` or
    `last_ns` (ns since the epoch, None: now), `last` samples spread over that time.
    """

    nodes: tuple[str, ...]
    last: Count
    first_ns: Int64 = 0
    last_ns: Int64 | None = None


class GetProcessSamples(Request[list[tuple[int, wire.ProcessSample]]], frozen=True):
    """Pairs of process id and sample, of each of `processes` (ids), chosen as by `GetNodeSamples`."""

    processes: tuple[Int64, ...]
    last: Count
    first_ns: Int64 = 0
    last_ns: Int64 | None = None


class GetMemorySamples(Request[list[tuple[int, MemorySample]]], frozen=True):
    """
    Pairs of process id and memory sample, of all devices of each of `processes` (ids), chosen as by
    `GetNodeSamples`.
    """

    processes: tuple[Int64, ...]
    last: Count
    first_ns: Int64 = 0
    last_ns: Int64 | None = None


class Findings(OfRun[list[Finding]], frozen=True):
    """All findings of the run: those of the verdict first, then the others, the costliest first."""


class GetTimes(OfRun[shapes.StepTimes], frozen=True):
    """
    The numbers of the steps of a run (`analysis.step_numbers`). `whole` is True for all steps, False for the
    newest, None for all if the run is over. With `last`, they are of the steps from `first` to `last`.
    """

    whole: bool | None = None
    first: Count = 0
    last: Count | None = None


class GetColumns(OfRun[shapes.StepColumns], frozen=True):
    """
    The data of charts by step: the newest steps, or all steps in few columns (`whole`: as for `GetTimes`), or
    the steps from `first` to `last` in few columns. The heatmap shows busy time (`stage` "total") or one
    stage. `since` is `next` of an earlier answer: only later data is returned.
    """

    stage: str = "total"
    whole: bool | None = None
    since: tuple[list[str | Int64], Int64] | None = None
    first: Count = 0
    last: Count | None = None


class GetTimeline(OfRun[shapes.RunTimeline], frozen=True):
    """Duration of a step, and the time at which it was over, for the whole run in at most `most` columns."""

    most: Count = 300


class GetChange(OfRun[shapes.ChangedParts], frozen=True):
    """Exposed time of each stage from step `begin` to `first`, and from there to `last` (None: the end)."""

    begin: Count = 0
    first: Count = 0
    last: Count | None = None


class GetBusy(OfRun[shapes.BusyTimes], frozen=True):
    """The busy time of `ranks` in each of the newest `most` steps."""

    ranks: tuple[Int64, ...] = ()
    most: Count = 0


class GetRankSteps(OfRun[shapes.RankSteps], frozen=True):
    """The stages of `rank` in the newest `most` steps, or from step `first` to `last` in as many columns."""

    rank: Int64 = 0
    most: Count = 0
    first: Count | None = None
    last: Count | None = None


class GetRankTimes(OfRun[shapes.RankTimes], frozen=True):
    """The parts of each rank's step time, over the steps that `GetTimes` covers."""

    whole: bool | None = None
    first: Count = 0
    last: Count | None = None


class GetStepSample(OfRun[shapes.StepSample], frozen=True):
    """The time that a step takes, and how far it varies by chance. Two runs are compared by it."""


class GetStep(OfRun[step_shapes.OneStep], frozen=True):
    """Step number `step` of all ranks that have it."""

    step: Int64 = 0


class GetStepRows(OfRun[StepRows], frozen=True):
    """
    The single rows of steps `first` to `last` (None: the newest) of `ranks` (None: all): about `most` rows
    after cursor `since`. Ask for the next part with `cursor` of the answer, until its `end` is True.
    """

    first: Count = 0
    last: Count | None = None
    ranks: tuple[Int64, ...] | None = None
    since: Count = 0
    most: Count = MOST_ROWS


class GetCell(OfRun[shapes.CellMeans], frozen=True):
    """The values behind one cell of the heatmap: `rank`, from step `first` to step `last`."""

    rank: Int64 = 0
    first: Int64 = 0
    last: Int64 = 0


class GetSpans(OfRun[list[step_shapes.SpanTimes]], frozen=True):
    """The named spans of `rank` from step `first` to step `last`, the longest first."""

    rank: Int64 = 0
    first: Int64 = 0
    last: Int64 = 0


class GetBundles(Request[list[results.BundleInfo]], frozen=True):
    """The bundles of incidents, the oldest first."""


class ReadBundle(Request[bytes], frozen=True):
    """At most `n` bytes of file `name` of a bundle (its id), from `offset` on. Empty beyond the end."""

    bundle: str
    name: str
    offset: Count
    n: Count


class GetProfiles(Request[profiles.Profiles], frozen=True):
    """The finished profiles of the session, and the profile in progress."""


class ReadProfile(Request[bytes], frozen=True):
    """At most `n` bytes of file `name` of a profile (its id), from `offset` on. Empty beyond the end."""

    profile: str
    name: str
    offset: Count
    n: Count


class Dump(Request[None], frozen=True):
    """
    Makes a bundle with the stacks of all ranks. `id` identifies the command, and is stored in the bundle. A
    repeated `id` makes no second bundle. If the first bundle could not be made, the repeated command is
    refused with the reason.
    """

    id: codec.Name


class StartProfile(Request[None], frozen=True):
    """Profiles some steps, after those that were requested before. `id` is stored in the profile."""

    id: codec.Name
    request: wire.ProfileRequest


class StartLayers(Request[None], frozen=True):
    """Measures the layers of some steps. `id` is stored with the measurements."""

    id: codec.Name
    request: wire.LayersRequest


class RemoveProfile(Request[bool], frozen=True):
    """Removes the profile with this `id`. The answer says whether there was one."""

    id: str


class Snapshot(Request[str], frozen=True):
    """
    Copies the session file in its current state, and writes its reports. The answer is
    the name of the copy.
    """


class ReadFile(Request[bytes], frozen=True):
    """At most `n` bytes of the copy or report `name`, from `offset` on. Empty beyond the end."""

    name: str
    offset: Count
    n: Count


class NoteSinks(Request[None], frozen=True):
    """Note how the sinks of the session are doing."""

    sinks: list[results.SinkState]


class RayGauge(msgspec.Struct, frozen=True):
    """One of Ray's own metrics, as a process of Ray records it."""

    name: str
    """Its name, to which Ray adds `ray_`."""
    about: str
    """What it measures, in a sentence."""
    tags: tuple[str, ...]
    """Names of its tags."""
    series: Annotated[list[tuple[tuple[str, ...], float]], msgspec.Meta(max_length=1024)]
    """Values of the tags, and the measured value, of each series."""
    ended: float = math.nan
    """Last value of a series that has ended."""


class SetRayMetrics(Request[None], frozen=True):
    """Record metrics of Ray in the aggregator's process. Series that are not in `gauges` any more end."""

    gauges: Annotated[list[RayGauge], msgspec.Meta(max_length=64)]


class PassFigures(Request[list[wire.TrackerState]], frozen=True):
    """
    Passes figures of the run `run` on to its rank 0, whose trackers they are for. The answer is how these are
    doing, as far as that is known.
    """

    run: str
    figures: wire.Figures


class Discard(Request[None], frozen=True):
    """Removes the copy `name`."""

    name: str


class Asked(msgspec.Struct):
    """A message with requests."""

    version: str
    """Version of traceml-ray on the asking side."""
    requests: Annotated[list[msgspec.Raw], msgspec.Meta(max_length=1024)]
    """The encoded requests, at most 1,024."""
    watching: bool = False
    """
    Whether an open page asks by itself. Such a question does not count as use, which would keep the session
    alive.
    """


class Answered(msgspec.Struct):
    """A message with one answer for each request, or with an error."""

    version: str
    """Version of traceml-ray on the answering side."""
    folder: str = ""
    """Path of the session's folder; "": not known."""
    answers: list[msgspec.Raw] = []
    """The encoded answers, in the order of the requests."""
    error: str = ""
    """Why there is no answer; "" if there are answers."""


def ask(
    send: Callable[[bytes], bytes], requests: Sequence[Request[Any]], watching: bool = False
) -> list[Any]:
    """
    Return the answer to each request, in their order.

    Args:
        send: sends a message and returns the reply.
        requests: the questions and commands, all for one session.
        watching: whether an open page asks by itself, see `Asked`.

    Raises `QueryError` if a question has no answer or the reply cannot be read, and whatever `send` raises.
    """
    raw = [msgspec.Raw(msgspec.msgpack.encode(request)) for request in requests]
    reply = send(msgspec.msgpack.encode(Asked(__version__, raw, watching)))
    try:
        answered = msgspec.msgpack.decode(reply, type=ready(Answered))
    except UNREADABLE as error:
        raise QueryError(f"the answer cannot be read: {error}") from None
    if answered.error:
        raise QueryError(answered.error)
    try:
        return [_answer(r, a) for r, a in zip(requests, answered.answers, strict=True)]
    except UNREADABLE as error:
        names = ", ".join(sorted({type(request).__name__ for request in requests}))
        why = f"it is of traceml-ray {answered.version}, this is {__version__}"
        if answered.version == __version__:
            why = f"{answered.folder}: the session file is damaged"
        raise QueryError(f"the answer to {names} cannot be read ({error}): {why}") from None


def _answer(request: Request[Any], raw: msgspec.Raw) -> Any:
    """Return a decoded answer. A summary keeps the blocks that a newer version has added."""
    if isinstance(request, GetSummary):
        return summary_shape.summary_of(msgspec.msgpack.decode(raw))
    return _decoder(type(request)).decode(raw)


def ask_one(send: Callable[[bytes], bytes], request: Request[A]) -> A:
    """Return the answer to one request. Raises `QueryError`, and whatever `send` raises."""
    answer: A = ask(send, [request])[0]
    return answer


def decode(data: bytes, questions: tuple[type[Request[Any]], ...]) -> tuple[list[Request[Any]], bool]:
    """
    Return the requests in a message, and whether the asking side is `watching`. Each request must be one of
    `questions`. Raises `QueryError`.
    """
    try:
        asked = msgspec.msgpack.decode(data, type=ready(Asked))
    except UNREADABLE as error:
        raise QueryError(f"this is not a question ({error})") from None
    return [_decode_request(raw, asked.version, questions) for raw in asked.requests], asked.watching


def _decode_request(
    raw: msgspec.Raw, version: str, questions: tuple[type[Request[Any]], ...]
) -> Request[Any]:
    try:
        request: Request[Any] = _request_decoder(questions).decode(raw)
    except UNREADABLE as error:
        try:
            what = msgspec.msgpack.decode(raw, type=ready(dict[str, Any])).get("what")
        except UNREADABLE:
            what = None
        raise QueryError(
            f"this session runs traceml-ray {__version__}, which does not understand the question "
            f"{str(what)[:40]!r} of traceml-ray {version[:40]!r}: {error}"
        ) from None
    return request


def encode(answers: Sequence[Any], session: str = "") -> bytes:
    """Return a message with the answers, including their arrays."""
    answers = [
        summary_shape.plain(answer) if isinstance(answer, summary_shape.Summary) else answer
        for answer in answers
    ]
    reply = {"version": __version__, "folder": sendable(session), "answers": answers}
    return msgspec.msgpack.encode(reply, enc_hook=_encode)


def encode_error(error: str) -> bytes:
    """Return a message that says why there is no answer."""
    return msgspec.msgpack.encode(Answered(__version__, error=sendable(error[:_MAX_ERROR]) or "unknown"))


def _kinds(cls: type[Any]) -> list[type[Any]]:
    return [kind for sub in cls.__subclasses__() for kind in (_kinds(sub) or [sub])]


REQUESTS: dict[str, type[Request[Any]]] = {kind.__name__: kind for kind in _kinds(Request)}
"""
Every question and command that does not belong to a signal, by name. Those of signals are
in `signals.views`.
"""


@cache
def _request_decoder(questions: tuple[type[Request[Any]], ...]) -> msgspec.msgpack.Decoder[Any]:
    every: Any = Union[questions]  # noqa: UP007
    return msgspec.msgpack.Decoder(ready(every))


def answer_type(kind: type[Request[A]]) -> type[A]:
    """Return the type of the answer to requests of a kind."""
    (answer,) = get_args(kind.__orig_bases__[0])  # type: ignore[attr-defined]
    shape: type[A] = answer
    return shape


@cache
def _decoder(kind: type[Request[Any]]) -> msgspec.msgpack.Decoder[Any]:
    """Return the decoder for the answer to requests of a kind."""
    return msgspec.msgpack.Decoder(ready(answer_type(kind)), ext_hook=_decode)


def _encode(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        head = msgspec.msgpack.encode([value.dtype.str, list(value.shape)])
        return msgspec.msgpack.Ext(_ARRAY, len(head).to_bytes(2, "little") + head + value.tobytes())
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(type(value).__name__)


def _decode(code: int, data: memoryview) -> Any:
    if code != _ARRAY:
        raise ValueError(f"unknown extension {code}")
    end = 2 + int.from_bytes(data[:2], "little")
    kind, shape = msgspec.msgpack.decode(data[2:end], type=ready(tuple[str, list[int]]))
    if kind not in _KINDS:
        raise ValueError(f"unknown kind of array {kind[:20]!r}")
    return np.frombuffer(data[end:], kind).reshape(shape)
