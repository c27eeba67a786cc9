"""
The rank that died first, and why: the verdict on a run that broke.

When one rank dies, its peers fail in their collectives and the launcher ends the rest. The cause
is the first death that is neither of the two.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from traceml_ray import text
from traceml_ray.analysis.verdict import Verdict
from traceml_ray.analysis.window import missing_of
from traceml_ray.errors import is_out_of_memory
from traceml_ray.store.rank_processes import RankProcess, generations, last_attempt, node_key
from traceml_ray.store.results import EventRow

ENDED = "process_ended"
"""Kind of event of a process that ended, whether it died or not."""
_CLOCKS_NS = 100_000_000
"""Largest assumed difference between the clocks of two nodes, in ns."""
_SEEN_NS = 100_000_000
"""Largest assumed delay until the end of a process is observed from outside, in ns."""
_LOST_NS = 20_000_000_000
"""Largest assumed delay until the end of a node is observed, in ns."""
_CUT_NS = 1_000_000_000
"""torchrun rounds its times down to whole seconds; this is one second, in ns."""
_LATE_NS = {"exception": 0, "rank_lost": _LOST_NS, ENDED: _SEEN_NS}
FATAL = tuple(_LATE_NS)
"""Kinds of events that report a death."""
_LISTED = 3
"""Largest number of deaths of unknown order that are listed one by one. Further ones are only counted."""
_FROM_PEERS = re.compile(
    r"connection closed by peer|connection reset|connection refused|broken pipe|socket timeout"
    r"|nccl|processgroup|gloo|distbackenderror|distnetworkerror|diststoreerror|tcpstore|monitoredbarrier"
    r"|heartbeat monitor|watchdog caught collective",
    re.IGNORECASE,
)
_DID_NOT_JOIN = re.compile(
    r"Ranks? (\d[\d, ]{0,400}) failed to pass monitoredBarrier"
    r"|wait timeout after \d+ms, keys: /default_pg/\d+//cpu//\d+/(\d+)$",
    re.ASCII | re.MULTILINE,
)
"""
Patterns of torch's messages that name the ranks that others waited for: in `monitored_barrier`, and in
`init_process_group`, where the key ends in the rank whose address is missing.
"""
_SIGNAL = re.compile(r"Signal \d+ \(\w+\) received by PID \d+")
"""Pattern of torchrun's message for a rank that raised no exception."""
_CRASHES = frozenset(
    (
        signal.SIGSEGV,
        signal.SIGBUS,
        signal.SIGILL,
        signal.SIGFPE,
        signal.SIGABRT,
        signal.SIGTRAP,
        signal.SIGSYS,
    )
)
"""Signals by which a process ends because of what it did itself."""
_SILENT = frozenset({"ray", "v1"})
"""
Sources of ranks whose end without a final message is not a death. A plain actor may be killed when its work
is done, and version 1 has no final message.
"""


@dataclass(frozen=True)
class Moment:
    """A time on a node's clock. The true time is at most `early_ns` before or `late_ns` after it."""

    t_ns: int
    early_ns: int = 0
    late_ns: int = 0


@dataclass(frozen=True)
class Death:
    """
    The death of a rank's process. `message` is the exception as `Type: text`, "" if there was none.
    `exit_code` is None if no launcher saw it, negative for a signal.
    """

    rank: int
    when: Moment
    message: str = ""
    exit_code: int | None = None
    process: RankProcess | None = None
    circumstances: str = ""
    """Message of the event that reported the process as lost."""
    traceback: str | None = None
    oom_kills: int = 0
    """Number of processes of its cgroup that the kernel killed during its life because memory ran out."""

    @property
    def node(self) -> str | None:
        """Key of the process's node; None: not known."""
        return node_key(self.process) if self.process and self.process.identity else None

    @property
    def last_step(self) -> int | None:
        """Last step that the process completed."""
        return self.process.last_step if self.process else None

    @property
    def stage(self) -> str | None:
        """Stage that the process was in, as last reported."""
        return self.process.stage if self.process else None

    @property
    def reason(self) -> str:
        """
        Reason of the death in words: the exception, else how the process was lost, else the signal or the
        exit code.
        """
        if self.message:
            lines = [line.strip() for line in self.message.splitlines() if line.strip()]
            return " ".join(lines[: 2 if lines[0].endswith(":") else 1]).rstrip(".:")
        if self.exit_code is None and self.circumstances:
            return self.circumstances
        if self.out_of_memory:
            return "killed by the kernel: memory ran out"
        return exit_words(self.exit_code)

    @property
    def how(self) -> str:
        """The reason as a description: "killed by SIGKILL"."""
        by_signal = self.reason == exit_words(self.exit_code) and (self.exit_code or 0) < 0
        return f"killed by {self.reason}" if by_signal else self.reason

    @property
    def consequence(self) -> bool:
        """Whether another death caused this one: a collective failed, or the launcher ended the process."""
        return self.exit_code == -signal.SIGTERM or bool(_FROM_PEERS.search(self.message))

    @property
    def out_of_memory(self) -> bool:
        """Whether the exception says that memory ran out, or the kernel killed the process for that."""
        if self.message:
            return is_out_of_memory(self.message)
        return self.oom_kills > 0 and self.exit_code in (None, -signal.SIGKILL)


def exit_words(code: int | None) -> str:
    """Return an exit code in words: `SIGKILL`, `exit code 1`; None: the process left no trace."""
    if code is None:
        return "its process ended without a message"
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def deaths(
    failures: Sequence[dict[str, Any]],
    events: Sequence[EventRow],
    processes: Sequence[RankProcess],
    failed: bool = False,
) -> list[Death]:
    """
    Return the deaths of the last generation of a run (see `rank_processes.generations`) in order of time. The
    death of a process that was replaced is not a death of the run. If there is none and the run `failed`,
    return the deaths of the processes replaced in the last attempt, unless each of them is only a consequence
    of another.

    `failures` are the launcher's (RankFailure as dicts), `events` and `processes` the run's. An exception,
    the launcher and the relay may report the same death, each with a time: the most exact time counts.
    """
    events_of_process: dict[int | None, list[EventRow]] = {}
    for event in events:
        if event.kind in FATAL:
            events_of_process.setdefault(event.process, []).append(event)
    known = {(s.identity.global_rank, s.identity.pid) for s in processes if s.identity}
    by_process = {(failure["rank"], failure["pid"]): failure for failure in failures}
    all_deaths = [
        Death(failure["rank"], _moment([], failure), _message(failure), failure["exit_code"])
        for who, failure in by_process.items()
        if who not in known
    ]

    def died(processes_of: Iterable[RankProcess]) -> list[Death]:
        every = (
            _death(process, events_of_process.get(process.id, []), by_process) for process in processes_of
        )
        return [death for death in every if death]

    last = generations(last_attempt(processes))
    all_deaths += died({process.rank: process for process in last[-1]}.values()) if last else []
    if failed and not all_deaths:
        replaced = (died(before) for before in reversed(last))
        all_deaths = next(
            (
                generation_deaths
                for generation_deaths in replaced
                if not all(death.consequence for death in generation_deaths)
            ),
            [],
        )
    return sorted(all_deaths, key=lambda death: death.when.t_ns)


def _death(
    process: RankProcess, every: list[EventRow], failures: Mapping[tuple[int, int], dict[str, Any]]
) -> Death | None:
    """
    Return the death of a process, from all its events (`every`) and the launcher's `failures`; None: it did
    not die.
    """
    assert process.identity is not None
    rank = process.identity.global_rank
    failure = failures.get((rank, process.identity.pid))
    mine = [event for event in every if event.kind != ENDED]
    seen = next((event for event in reversed(every) if event.kind == ENDED), None)
    lost = bool(mine) if process.identity.source in _SILENT else process.lost
    if not (failure or lost or any(event.kind == "exception" for event in mine)):
        return None
    raised = [event for event in mine if event.kind == "exception"]
    message = next(filter(None, [*(event.message for event in raised), _message(failure)]), "")
    calls = next((event.data.get("traceback") for event in raised), None)
    ended = seen.data if seen else {}
    code = failure["exit_code"] if failure else _whole(ended, "exit_code")
    gone = next((event.message for event in mine if event.kind == "rank_lost"), "")
    when, kills = _moment(every, failure, process.last_seen_ns), _whole(ended, "oom_kills") or 0
    traceback = calls if isinstance(calls, str) else None
    return Death(rank, when, message, code, process, gone, traceback, kills)


def _moment(events: Sequence[EventRow], failure: dict[str, Any] | None, last_seen_ns: int = 0) -> Moment:
    """
    Return when a process ended: the most exact of the known times, and the earliest of
    equally exact ones.
    """
    alive = {"rank_lost": last_seen_ns}  # both are of the aggregator's clock
    known = [
        Moment(t_ns, early_ns=min(_LATE_NS[kind], max(0, t_ns - alive.get(kind, 0))))
        for kind, t_ns in ((event.kind, event.t_ns) for event in events)
    ]
    if failure is not None:
        known.append(Moment(failure["t_ns"], _SEEN_NS, _CUT_NS))
    exact = min(known, key=lambda m: (m.early_ns + m.late_ns, m.t_ns), default=None)
    return exact or Moment(last_seen_ns, late_ns=_LOST_NS)


def _whole(data: dict[str, Any], name: str) -> int | None:
    """Return an integer from an event; None if it is invalid. Any process may have sent the event."""
    value = data.get(name)
    return value if isinstance(value, int) else None


def _message(failure: dict[str, Any] | None) -> str:
    message = str(failure["message"]) if failure else ""
    return "" if _SIGNAL.match(message) else message


def culprits(all_deaths: Sequence[Death]) -> list[Death]:
    """
    Return the first death that is no consequence (if all are, the first death), then those that may have been
    earlier within the error of the clocks.
    """
    unexplained = [death for death in all_deaths if not death.consequence] or list(all_deaths)
    return [death for death in unexplained if death is unexplained[0] or _maybe_before(death, unexplained[0])]


def _maybe_before(death: Death, other: Death) -> bool:
    one_clock = death.node is not None and death.node == other.node
    gap = (death.when.t_ns - death.when.early_ns) - (other.when.t_ns + other.when.late_ns)
    return gap <= (0 if one_clock else _CLOCKS_NS)


def headline(
    all_deaths: Sequence[Death],
    node_of: Callable[[Death], str | None],
    ranks: Mapping[int, RankProcess],
    world: int,
) -> Verdict:
    """
    Return the verdict that names the first death. `all_deaths` has at least one; `node_of` returns the label
    of a death's node; `ranks` are the known ranks of `world`.
    """
    first = culprits(all_deaths)
    death, tie, others = first[0], len(first) > 1, len(all_deaths) - len(first)
    if death.consequence:
        absent = _did_not_join(all_deaths, node_of, world)
        earlier = absent or _earlier(all_deaths, node_of(death), ranks, world)
        if earlier is not None:
            return earlier
    stage = _one({one.stage for one in first})
    then = f" {text.count(others, 'other rank')} ended after {'them' if tie else 'it'}."
    return Verdict(
        label="oom" if death.out_of_memory else "rank_lost",
        stage=stage,
        rank=death.rank,
        ranks=tuple(sorted(one.rank for one in first)),
        node=_one({node_of(one) for one in first}),
        confidence="medium" if tie or death.consequence else "high",
        last_step=_one({one.last_step for one in first}),
        open_stage=stage,
        exit_reason=_one({one.reason for one in first}),
        why=_why(first, node_of) + then * (others > 0),
        next=" ".join(dict.fromkeys(map(_advice, first[:_LISTED]))),
    )


def _did_not_join(
    all_deaths: Sequence[Death], node_of: Callable[[Death], str | None], world: int
) -> Verdict | None:
    """Return the verdict for deaths of which one says that other ranks did not join. None: none says so."""
    for death in all_deaths:
        match = _DID_NOT_JOIN.search(death.message)
        gone = [int(rank) for rank in re.findall(r"\d+", match[1] or match[2])] if match else []
        if not gone or max(gone) >= world:
            continue
        one, who = len(gone) == 1, text.ranks(gone)
        name, where = _where(death, node_of(death))
        return Verdict(
            label="rank_lost",
            rank=gone[0] if one else None,
            ranks=tuple(gone),
            confidence="high",
            last_step=death.last_step,
            why=f"{name} failed{where}, because {who} did not join: {death.reason}.",
            next=f"Look at the output of {who}. If the time-out is more than 20 s the line is known, too.",
        )
    return None


def _earlier(
    all_deaths: Sequence[Death], node: str | None, ranks: Mapping[int, RankProcess], world: int
) -> Verdict | None:
    """
    Return the verdict for deaths that are all consequences of the end of a peer that had finished, or that
    never reported.
    """
    death, dead = all_deaths[0], {one_death.rank for one_death in all_deaths}
    reached = -1 if death.last_step is None else death.last_step
    finished = [
        rank
        for rank, process in sorted(ranks.items())
        if process.final and rank not in dead and (process.last_step or 0) <= reached
    ]
    gone = finished or missing_of(world, ranks)
    if not gone:
        return None
    one, who = len(gone) == 1, text.ranks(gone)
    if finished:
        then, advice = (
            "had finished.",
            "Give every rank the same number of steps, or train under torch's Join.",
        )
    else:
        which = "it" if one else "one of them"
        then = f"sent nothing before {'it' if one else 'they'} ended: {which} probably ended first."
        advice = f"Read the output of {who}."
    (name, where), so = _where(death, node), who[0].upper() + who[1:]
    return Verdict(
        label="rank_lost",
        rank=gone[0] if one else None,
        ranks=tuple(gone),
        confidence="medium" if finished else "low",
        why=f"{name} failed{where}, because a peer was gone: {death.reason}. {so} {then}",
        next=advice,
    )


def _one(values: set[Any]) -> Any:
    """Return the value if all are the same; else None."""
    return next(iter(values)) if len(values) == 1 else None


def _why(first: Sequence[Death], node_of: Callable[[Death], str | None]) -> str:
    places = [_where(death, node_of(death)) for death in first]
    if len(first) == 1:
        return f"{places[0][0]} ended first{places[0][1]}: {first[0].reason}."
    details = "; ".join(
        f"{who}{where}: {death.reason}" for (who, where), death in zip(places[:_LISTED], first, strict=False)
    )
    more = f"; and {len(first) - _LISTED} more" if len(first) > _LISTED else ""
    ranks = text.ranks([death.rank for death in first])
    return f"{ranks} ended so close together that clocks cannot tell which was first: {details}{more}."


def _where(death: Death, node: str | None) -> tuple[str, str]:
    place = place_words(death.last_step, death.stage)
    return f"rank {death.rank}" + (f" ({node})" if node else ""), f" {place}" if place else ""


def place_words(last_step: int | None, stage: str | None) -> str:
    """
    Return the position of a rank, as last reported: "after step 1,091, in `data`"; "" before its first step.
    It may have ended in a later step that was never reported.
    """
    if last_step is None:
        return ""
    return f"after step {last_step:,}" + (f", in `{stage}`" if stage else "")


def _advice(death: Death) -> str:
    if death.out_of_memory:
        return "Smaller batch or activation checkpointing on this rank."
    if death.exit_code == -signal.SIGKILL:
        return (
            "It was killed: look for the kernel's out-of-memory killer (dmesg), and in the scheduler's log."
        )
    if not death.message and death.exit_code is None and death.circumstances:
        return "Look in the scheduler's log and in the cloud's: the machine failed, not the process."
    if death.message or death.exit_code is None or death.exit_code > 0:
        return f"Read the traceback in rank {death.rank}'s own output."
    if -death.exit_code not in _CRASHES:
        return "A signal from outside ended it: look in the scheduler's log for who sent it."
    return f"It crashed: run rank {death.rank} with `python -X faulthandler` for its stack."
